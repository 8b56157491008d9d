"""Test the manager with random steps against a model. The engine that drives it is in support/manager_machine.py."""

from __future__ import annotations

import pytest
from deferring_machine import DeferringEngine
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from manager_machine import MACHINE_SETTINGS, Engine, StagedEngine
from state_machines import Counted, run_machine
from transactions import one_thread  # noqa: F401

import nwor_ops.transaction.manager
from nwor_ops import ops
from nwor_ops.testing.layouts import memory


@pytest.mark.state_machine
@pytest.mark.parametrize("machine", [Engine, StagedEngine, DeferringEngine])
def test_random_steps(machine, machine_seed, request):
    """Whenever no window is open, the caches equal the model byte for byte, and the counters are consistent."""
    run_machine(machine, MACHINE_SETTINGS, machine_seed, request)


def without_row_windows(restore):
    return lambda caches, log, slots, rejected, offsets, window, windows, *rest: restore(
        caches, log, slots, rejected, offsets, None, None, *rest
    )


def without_last_layer(restore):
    def restore_others(caches, log, slots, rejected, offsets, window, windows, num_rows, table):
        layers = max(1, len(table) - 1)
        restore(
            caches, log[:layers], slots, rejected, offsets, window, windows[:layers], num_rows, table[:layers]
        )  # fmt: skip

    return restore_others


def without_page_offsets(restore):
    return lambda caches, log, slots, rejected, offsets, *rest: restore(caches, log, slots, rejected, None, *rest)


@pytest.mark.parametrize("break_restore", [without_row_windows, without_last_layer, without_page_offsets])
def test_the_state_machine_finds_a_broken_restore(break_restore, monkeypatch):
    monkeypatch.setattr(nwor_ops.transaction.manager.ops, "restore_slots", break_restore(ops.restore_slots))
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


def test_a_failure_names_the_command_that_repeats_it(monkeypatch, capsys, request):
    """A seed makes the same transitions each time."""
    monkeypatch.setattr(nwor_ops.transaction.manager.ops, "restore_slots", without_page_offsets(ops.restore_slots))
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
