"""Test the manager with random steps against a model. The engine that drives it is in support/manager_machine.py."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from manager_machine import MACHINE_SETTINGS, Engine, StagedEngine
from state_machines import Counted, run_machine
from transactions import one_thread  # noqa: F401

from nwor_ops.testing.layouts import memory
from nwor_ops.transaction.undo_log import UndoLog


@pytest.mark.state_machine
@pytest.mark.parametrize("machine", [Engine, StagedEngine])
def test_random_steps(machine, machine_seed, request):
    """Whenever no window is open, the caches equal the model byte for byte, and the counters are consistent."""
    run_machine(machine, MACHINE_SETTINGS, machine_seed, request)


def without_row_windows(arguments):
    return {"window_id": None, "row_windows": None}


def without_last_layer(arguments):
    layers = max(1, len(arguments["plane_table"]) - 1)
    return {name: arguments[name][:layers] for name in ("log", "row_windows", "plane_table")}


def without_page_offsets(arguments):
    return {"page_offsets": None}


@pytest.fixture(name="break_restore")
def restores_that_break(monkeypatch):
    """Change the arguments of every restore."""

    def break_restore(change):
        allocate = UndoLog.allocate

        def allocate_broken(log, buffers):
            allocate(log, buffers)
            log.launches = [launch | change(launch) for launch in log.launches]

        monkeypatch.setattr(UndoLog, "allocate", allocate_broken)

    return break_restore


@pytest.mark.parametrize("change", [without_row_windows, without_last_layer, without_page_offsets])
def test_broken_restore_is_found(change, break_restore):
    break_restore(change)
    with pytest.raises(AssertionError, match="the caches differ from a run without"):
        run_state_machine_as_test(
            Engine, settings=settings(MACHINE_SETTINGS, report_multiple_bugs=False, phases=[Phase.generate])
        )


def test_memory_is_compared():
    """The comparison covers the bytes around the planes."""
    machine = Engine()
    machine.start(binds=False)
    total = sum(len(part) for part in memory(machine.views))
    planes = sum(view.numel() * view.element_size() for views in machine.views for view in views)
    assert total > planes


def test_failure_names_its_command(break_restore, capsys, request):
    """A seed makes the same transitions each time."""
    break_restore(without_page_offsets)
    share = settings(MACHINE_SETTINGS, report_multiple_bugs=False, phases=[Phase.generate])
    counts = []
    for _ in range(2):
        before = Counted.transitions
        with pytest.raises(AssertionError, match="the caches differ from a run without"):
            run_machine(Engine, share, 7, request)
        counts.append(Counted.transitions - before)
    assert counts[0] == counts[1]
    command = f"reproduce: python -m pytest '{request.node.nodeid}' --transitions 10000 --first-seed 7"
    assert capsys.readouterr().out.count(command) == 2
