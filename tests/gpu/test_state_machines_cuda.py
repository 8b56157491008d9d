"""Random calls of managers, recurrent states and draft vocabularies on CUDA. The CPU has the same state machines."""

from __future__ import annotations

import manager_machine
import pytest
import recurrent_machine
import vocabulary_machine
from hypothesis import settings
from state_machines import run_machine

SHARE = settings(manager_machine.MACHINE_SETTINGS, max_examples=10)


class Engine(manager_machine.Engine):
    device = "cuda"
    layer_kinds = tuple(kind for kind in manager_machine.LAYER_KINDS if kind != "amx")  # the layout of a CPU's pages


class StagedEngine(Engine):
    mode = "stage"


class RecurrentEngine(recurrent_machine.Engine):
    device = "cuda"


class VocabularyMachine(vocabulary_machine.Machine):
    device = "cuda"


@pytest.mark.state_machine
@pytest.mark.parametrize("machine", [Engine, StagedEngine, RecurrentEngine, VocabularyMachine])
def test_random_calls(machine, machine_seed, request):
    run_machine(machine, SHARE, machine_seed, request)
