"""Test RecurrentStates with random calls. tests/support/recurrent_machine.py has the engine that makes them."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from recurrent_machine import MACHINE_SETTINGS, Engine
from state_machines import run_machine
from transactions import one_thread  # noqa: F401

import nwor_ops.recurrent
from nwor_ops import ops


@pytest.mark.state_machine
def test_random_calls(machine_seed, request):
    """Whenever no window is open, every slot is bit-identical to the state of the other scheme."""
    run_machine(Engine, MACHINE_SETTINGS, machine_seed, request)


def folding_layers_twice(monkeypatch) -> None:
    """A cancel that does not know which layers ran."""
    fold = ops.gated_delta_fold
    monkeypatch.setattr(ops, "gated_delta_fold", lambda *tensors, window_id=None, **launch: fold(*tensors, **launch))


def taking_all_tokens(monkeypatch) -> None:
    """A commit that says nothing: every token of a window stays, or as many as in an earlier one."""
    plan = ops.plan_recurrent_window

    def plan_all(plan_, cursors, window, slots, starts, accepted, *rest):
        pending = cursors[:, 0][slots.clamp(0)].clamp(1).int()
        plan(plan_, cursors, window, slots, starts, pending, *rest)

    monkeypatch.setattr(ops, "plan_recurrent_window", plan_all)


def folding_without_a_record(monkeypatch) -> None:
    plan = ops.plan_recurrent_fold
    monkeypatch.setattr(
        ops, "plan_recurrent_fold", lambda p, c, source, target, rows, keep: plan(p, c, source, target, rows * 0, keep)
    )


def committing_to_another_slot(monkeypatch) -> None:
    monkeypatch.setattr(
        nwor_ops.recurrent.RecurrentStates, "_check_commit", lambda self, slots, accepted: slots.fill_(1)
    )


@pytest.mark.parametrize(
    "broken", [folding_layers_twice, taking_all_tokens, folding_without_a_record, committing_to_another_slot]
)
def test_the_machine_finds_what_is_broken(broken, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(
        (AssertionError, ValueError), match=r"another state|are not those of|slot \d of layer|num_kept must be"
    ):
        run_state_machine_as_test(
            Engine, settings=settings(MACHINE_SETTINGS, report_multiple_bugs=False, phases=[Phase.generate])
        )
