"""Compare vLLM's Triton kernel for gated delta layers with the recurrent ops. It keeps a state for every token of a
window. Run by test_recurrent_kernel.py:

    TRITON_INTERPRET=1 python recurrent_kernels.py FILE

The script writes the kernel's source from the installed vLLM to FILE. Triton's interpreter runs it on the CPU.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import pathlib
import random
import sys

import torch
from interpreter import patch_once_per_launch
from samples_recurrent import Heads, Inputs, make_layer, packed_inputs
from torch import Tensor

from nwor_ops import ops

SOURCE = "third_party/flash_linear_attention/ops/fused_sigmoid_gating.py"
KERNEL = "fused_sigmoid_gating_delta_rule_update_kernel"
REQUESTS, MOST_TOKENS, STEPS, VALUES_OF_A_PROGRAM = 3, 4, 5, 32


def load_kernel(file: pathlib.Path):
    """Return only the kernel. Importing the modules around it needs a GPU driver."""
    vllm = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
    text = (vllm / SOURCE).read_text()
    node = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == KERNEL)
    code = "\n".join(text.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno])
    # With a gate per channel, it advances by one number per token instead of one per channel. This is correct only for
    # windows of one token. vLLM (0.32, 0.33) has another kernel for such layers.
    assert "p_a += HV\n" in f"{code}\n"
    code = f"{code}\n".replace("p_a += HV\n", "p_a += HV * K if IS_KDA else HV\n")
    file.write_text(f"import triton\nimport triton.language as tl\n\n\n{code}")
    spec = importlib.util.spec_from_file_location("vllm_recurrent_kernel", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, KERNEL)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def run_vllm(kernel, inputs: Inputs, states: Tensor, slots: Tensor, accepted: Tensor, starts: Tensor) -> Tensor:
    """Call it as vLLM's ``fused_sigmoid_gating_delta_rule_update`` does."""
    q, k, v, a, b = (tensor.contiguous() for tensor in inputs[:5])
    tokens, key_heads, key_width = k.shape
    value_heads, value_width = v.shape[1:]
    out, requests = torch.zeros_like(v), len(starts) - 1
    kernel[(1, value_width // VALUES_OF_A_PROGRAM, requests * value_heads)](
        A_log=inputs.A_log, a=a, b=b, dt_bias=inputs.dt_bias.contiguous(), beta=1.0, threshold=20.0, q=q, k=k, v=v,
        o=out, h0=states, ht=states, cu_seqlens=starts, ssm_state_indices=slots, num_accepted_tokens=accepted,
        scale=key_width**-0.5, N=requests, T=tokens, B=1, H=key_heads, HV=value_heads, K=key_width, V=value_width,
        BK=key_width, BV=VALUES_OF_A_PROGRAM, stride_init_state_token=states.stride(0),
        stride_final_state_token=states.stride(0), stride_indices_seq=slots.stride(0),
        stride_indices_tok=slots.stride(1), INPLACE_FINAL_STATE=True, USE_QK_L2NORM_IN_KERNEL=True,
        IS_KDA=a.dim() == 3,
    )  # fmt: skip
    return out


def compare(kernel, heads: Heads, state_dtype: torch.dtype, per_channel: bool) -> None:
    """Compare outputs of every token, and the final states, for windows of any length and acceptance."""
    dice = random.Random(0)
    layer = make_layer(heads, REQUESTS + 1, MOST_TOKENS, state_dtype, per_channel=per_channel)
    theirs = torch.zeros(REQUESTS * MOST_TOKENS + 1, *layer.state.shape[1:], dtype=state_dtype)
    table = torch.arange(REQUESTS * MOST_TOKENS, dtype=torch.int32).view(REQUESTS, MOST_TOKENS) + 1
    theirs[table[:, 0].long()] = layer.state[1:]
    plan, cursors = torch.zeros(REQUESTS, 4, dtype=torch.int32), torch.zeros(REQUESTS + 1, 2, dtype=torch.int32)
    window_id, slots = torch.zeros(1, dtype=torch.int64), int32(*range(1, REQUESTS + 1))
    lengths = [1] * REQUESTS
    # A sum in another order may round a bfloat16 number to an adjacent one, and the state continues from it.
    exact = state_dtype == torch.float32
    for step in range(STEPS):
        kept = [dice.randint(1, length) for length in lengths]
        lengths = [dice.randint(1, MOST_TOKENS) for _ in lengths]
        starts = int32(*itertools.accumulate(lengths, initial=0))
        inputs = packed_inputs(sum(lengths), heads, per_channel=per_channel, seed=step)
        expected = run_vllm(kernel, inputs, theirs, table, int32(*kept), starts)
        out = torch.zeros_like(expected)
        ops.plan_recurrent_window(plan, cursors, window_id, slots, starts, int32(*kept), MOST_TOKENS)
        ops.gated_delta_verify(out, *layer.tensors, *inputs, plan, window_id, starts, heads.key_width**-0.5)
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-6 if exact else 2**-9)
        assert expected.abs().max() > 0.01
    kept = [dice.randint(1, length) for length in lengths]
    ops.plan_recurrent_fold(plan, cursors, slots, slots, int32(*kept))
    ops.gated_delta_fold(*([tensor] for tensor in layer.tensors), plan)
    last = theirs[table[torch.arange(REQUESTS), torch.tensor(kept) - 1].long()]
    torch.testing.assert_close(layer.state[1:], last, rtol=1e-5 if exact else 2**-7, atol=1e-6 if exact else 2**-7)


def main(file: str) -> None:
    patch_once_per_launch()
    kernel, count = load_kernel(pathlib.Path(file)), 0
    for per_channel in (False, True):
        for heads in (Heads(1, 2, 64, 64), Heads(2, 2, 128, 64)):
            for state_dtype in (torch.float32, torch.bfloat16):
                compare(kernel, heads, state_dtype, per_channel)
                count += 1
    print(f"{count} layers equal")


if __name__ == "__main__":
    main(*sys.argv[1:])
