"""Run state machines: a fixed share in every run, and as many random transitions as `--transitions` asks for.

A test takes the argument `machine_seed`. It is None in a plain run. With `--transitions N` there is one test for each
10,000 of the N transitions, and the seeds count up from `--first-seed`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

OF_A_SEED = 10_000


class Counted(RuleBasedStateMachine):
    """A state machine that counts its transitions."""

    transitions = 0

    @invariant()
    def transition(self) -> None:
        Counted.transitions += 1


def seeds_of(config: pytest.Config) -> list[int | None]:
    if not (transitions := config.getoption("--transitions")):
        return [None]
    first = config.getoption("--first-seed")
    return list(range(first, first - (-transitions // OF_A_SEED)))


def run_machine(machine: type[Counted], share: settings, machine_seed: int | None, request: pytest.FixtureRequest):
    """Run a state machine: the examples of `share`, or 10,000 transitions of a seed."""
    before = Counted.transitions
    try:
        if machine_seed is None:
            run_state_machine_as_test(machine, settings=share)
            return
        ours = settings(
            share, derandomize=False, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
        )
        for batch in itertools.count():
            if Counted.transitions - before >= OF_A_SEED:
                return
            seeded = seed(1000 * machine_seed + batch)(type(machine.__name__, (machine,), {}))
            with the_command(machine_seed, request):
                run_state_machine_as_test(seeded, settings=ours)
    finally:
        request.node.user_properties.append(("transitions", Counted.transitions - before))


@contextmanager
def the_command(machine_seed: int, request: pytest.FixtureRequest) -> Iterator[None]:
    """If the state machine fails, print the command that reproduces the failure."""
    try:
        yield
    except BaseException:
        print(
            f"\nreproduce: python -m pytest '{request.node.nodeid}' --transitions {OF_A_SEED} "
            f"--first-seed {machine_seed}"
        )
        raise
