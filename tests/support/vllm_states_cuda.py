"""The audit of K + 1 recurrent states with the Triton kernel that vLLM runs on CUDA, in Triton's interpreter.

    python tests/support/vllm_states_cuda.py CASE

CASE is ``right``, or an error to plant: ``wrong state``, ``changed byte``, ``wrong count``. ``norm`` reads the same
inputs as the method whose kernel also computes the norm. The script prints the error of the audit, or its summary.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from interpreter import use_interpreter

HEADS, VALUE_HEADS, DK, DV, TOKENS, REQUESTS = 1, 2, 16, 8, 3, 2


class Group:
    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def rows(self) -> list[tuple[int, list[int]]]:
        return [(9, row) for row in self._table.tolist()]


def main(case: str) -> None:
    use_interpreter()
    import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn as module

    from nwor_ops.vllm.audit import vllm_states

    torch.manual_seed(0)
    table = torch.arange(REQUESTS * TOKENS, dtype=torch.int32).view(REQUESTS, TOKENS) + 1
    padded = torch.cat([table, torch.zeros(1, TOKENS, dtype=torch.int32)])
    states = torch.randn(REQUESTS * TOKENS + 1, VALUE_HEADS, DV, DK) * 0.1
    A_log, dt_bias = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    audit = vllm_states.VllmStateAudit({A_log.data_ptr(): "layers.1"}, [Group(table)])
    vllm_states._audits[A_log.data_ptr()] = audit
    original = vars(module)[vllm_states.TRITON_KERNEL]

    def planting(**arguments: Any) -> Any:
        out = original(**arguments)
        if case == "wrong state" and sampled is not None:
            states[table[1, 2], 0, 3, 4] += 0.01
        return out

    setattr(module, vllm_states.TRITON_KERNEL, planting)
    assert vllm_states.watch_cuda_kernels()

    def step(num_accepted: list[int]) -> None:
        count = REQUESTS * TOKENS
        mixed = torch.randn(count, 2 * HEADS * DK + VALUE_HEADS * DV)
        q, k, v = mixed.split([HEADS * DK, HEADS * DK, VALUE_HEADS * DV], dim=1)
        a, b = torch.randn(count, VALUE_HEADS), torch.randn(count, VALUE_HEADS)
        starts = torch.tensor([*range(0, count + 1, TOKENS), count], dtype=torch.int32)  # the last row is padded
        accepted = torch.tensor([*num_accepted, 1], dtype=torch.int32)
        arguments = {
            "A_log": A_log, "a": a, "b": b, "dt_bias": dt_bias, "q": q.reshape(1, count, HEADS, DK),
            "k": k.reshape(1, count, HEADS, DK), "v": v.reshape(1, count, VALUE_HEADS, DV), "initial_state": states,
            "inplace_final_state": True, "cu_seqlens": starts, "ssm_state_indices": padded,
            "num_accepted_tokens": accepted, "use_qk_l2norm_in_kernel": True,
        }  # fmt: skip
        audit.begin([], [TOKENS - 1] * REQUESTS)
        if case == "norm":
            layer = SimpleNamespace(A_log=A_log, dt_bias=dt_bias, kv_cache=(None, states))
            metadata = SimpleNamespace(
                num_spec_decodes=REQUESTS, spec_state_indices_tensor=padded, num_accepted_tokens=accepted,
                spec_query_start_loc=starts,
            )  # fmt: skip
            call = vllm_states.LayerCall.of_norm_kernel(layer, mixed, b, a, metadata)
            audit.watched(call, lambda: original(**arguments))
        else:
            vars(module)[vllm_states.TRITON_KERNEL](**arguments)

    sampled: list[int] | None = None
    try:
        step([1, 1])
        audit.commit(lambda: [2, 3], undone=False)
        sampled = [2, 3]
        if case == "changed byte":
            states.view(torch.uint8)[table[0, 1], 1, 2, 3] ^= 1
        step([2, 1] if case == "wrong count" else sampled)
        audit.commit(lambda: [1, 1], undone=False)
    except vllm_states.AuditError as error:
        print(error)
    else:
        print(json.dumps(audit.summary()))


if __name__ == "__main__":
    main(sys.argv[1])
