"""Compare gated_delta_verify with vLLM's kernels, which store the state after every token: microseconds per layer.

    python benchmarks/recurrent_kernel.py [--folder FOLDER]                # K = 1, 3, 7 over vLLM's kernels
    python benchmarks/recurrent_kernel.py [--folder FOLDER] --chunk 16     # the chunk form over the exact form
    python benchmarks/recurrent_kernel.py [--folder FOLDER] --decode       # both forms over vLLM's decode kernel

The first and the last form need vLLM: its Triton kernels, and its compiled core (of the installed vLLM, or of
VLLM_CORE). Each takes under two minutes.

The layers have the shape of Qwen3-Next and Qwen3.5-4B: 16 key heads and 32 value heads of 128 x 128. There are 36
layers, or fewer if vLLM's K + 1 states of each do not fit, and each has its own states and inputs. All requests have a
window of K + 1 tokens. 1 to K + 1 of them are accepted, each number for equally many requests. Each side is one CUDA
graph of all layers, one launch after the other; ours includes the plan of the window. The graphs are replayed in turn.
Before every replay 512 MB are read, so that no state is left in L2 and the GPU is busy while the host launches the
graph.

`triton` is `fused_sigmoid_gating_delta_rule_update`. `cuda` is `fused_gdn_decode_post_conv_mtp`, which ends with the
gated norm, as ours does with `norm`. `decode` is `fused_recurrent_gated_delta_rule_packed_decode`, which keeps one
state and has no drafts. A ratio is the time of the first variant divided
by that of the second. In the chunk form each request is at another row of its chunk, so each step stores the states of
as many requests as the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from results import Row, new_parser, ratios, row, save, this_machine
from torch import Tensor
from transaction_kernels import alternating_on_gpu, captured
from vllm_kernels import load_core, recurrent_update

from nwor_ops import ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY_HEADS, VALUE_HEADS, WIDTH = 16, 32, 128
MOST_LAYERS, ROUNDS, READ_BYTES = 36, 12, 2**29
REQUESTS, DRAFTS = (1, 16, 64, 128), (1, 3, 7)
CHUNK_REQUESTS, CHUNK_DRAFTS, CHUNK = (16, 64, 128), (0, 1, 3, 7), 16
DECODE_REQUESTS = (16, 32, 64, 128, 256, 512)
STATES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TRITON_TARGETS = {("fp32", 16, 3): 0.48, ("fp32", 64, 3): 0.42, ("fp32", 128, 3): 0.42}
CUDA_TARGETS = {("fp32", 16, 3): 0.58, ("fp32", 64, 3): 0.53, ("fp32", 128, 3): 0.53, ("bf16", 128, 1): 1.0}
SCALE, EPS = WIDTH**-0.5, 1e-6


class Case:
    """Requests with one window each, in every layer, in buffers that never move."""

    def __init__(self, requests: int, drafts: int, dtype: torch.dtype, layers: int = 0, states: int = 0) -> None:
        """Allocate as many layers as fit, or `layers`. All sides keep `states` states per request, or K + 5."""
        self.requests, self.rows, self.dtype = requests, drafts + 1, dtype
        tokens, rows = requests * self.rows, self.rows
        if not layers:
            state = VALUE_HEADS * WIDTH * WIDTH * dtype.itemsize
            room = torch.cuda.mem_get_info()[0] * 4 // 5
            layers = min(MOST_LAYERS, room // (state * requests * (states or rows + 4)))
        self.layers = layers
        int32 = {"dtype": torch.int32, "device": DEVICE}
        self.starts = torch.arange(requests + 1, **int32) * rows
        self.kept = torch.arange(requests, **int32) % rows + 1
        self.slots = torch.arange(1, requests + 1, **int32)
        self.widths = KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, VALUE_HEADS * WIDTH
        shape = (self.layers, tokens)
        self.packed = torch.randn(*shape, sum(self.widths), device=DEVICE).bfloat16()
        self.a, self.b = torch.randn(2, *shape, VALUE_HEADS, device=DEVICE).bfloat16()
        self.gate = torch.randn(*shape, VALUE_HEADS, WIDTH, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.gate)
        # Numbers of bfloat16, because FlashInfer rounds them.
        self.A_log, self.dt_bias = torch.randn(2, self.layers, VALUE_HEADS, device=DEVICE).bfloat16().float()
        self.weight = torch.rand(WIDTH, device=DEVICE)
        self.returned: Tensor | None = None  # output of a kernel that takes no buffer for it
        self.copies: dict[int, tuple[Tensor, ...]] = {}

    def heads(self, layer: int) -> tuple[Tensor, ...]:
        q, k, v = self.packed[layer].split(self.widths, -1)
        return tuple(part.unflatten(-1, (-1, WIDTH)) for part in (q, k, v))

    def copied_heads(self, layer: int) -> tuple[Tensor, ...]:
        """Return contiguous copies of q, k and v, which all rivals share."""
        return self.copies.setdefault(layer, tuple(part.contiguous() for part in self.heads(layer)))

    def ours(
        self, norms: tuple[bool, ...] = (False, True), chunk: int = 0, *, staggered: bool = True
    ) -> dict[str, Callable[[], None]]:
        slots, rows = self.requests + 1, self.rows
        halves, all_rows = (1, chunk - 1 + 2 * rows) if chunk else (2, rows)
        plan = torch.zeros(self.requests, 4, dtype=torch.int32, device=DEVICE)
        cursors = torch.zeros(slots, 3 if chunk else 2, dtype=torch.int32, device=DEVICE)
        if chunk and staggered:  # a window of each request, behind some accepted rows
            cursors[:, 0], cursors[:, 2] = rows, torch.arange(slots) % chunk
        window_id = torch.zeros(1, dtype=torch.int64, device=DEVICE)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(self.layers, slots, *shape, dtype=dtype, device=DEVICE)

        states = zeros(VALUE_HEADS, WIDTH, WIDTH, dtype=self.dtype)
        records = (
            zeros(halves, all_rows, KEY_HEADS, WIDTH, dtype=torch.bfloat16), zeros(halves, all_rows, KEY_HEADS),
            zeros(halves, all_rows, VALUE_HEADS), zeros(all_rows, VALUE_HEADS, WIDTH),
        )  # fmt: skip
        ran = torch.zeros(self.layers, 1, dtype=torch.int64, device=DEVICE)

        def run(norm: bool) -> None:
            ops.plan_recurrent_window(plan, cursors, window_id, self.slots, self.starts, self.kept, rows, chunk=chunk)
            for i in range(self.layers):
                ops.gated_delta_verify(
                    self.out[i], states[i], *(record[i] for record in records), ran[i], *self.heads(i), self.a[i],
                    self.b[i], self.A_log[i], self.dt_bias[i], plan, window_id, self.starts, SCALE,
                    gate=self.gate[i] if norm else None, norm_weight=self.weight if norm else None, norm_eps=EPS,
                    chunk=chunk,
                )  # fmt: skip

        name = f"chunk{chunk}" if chunk else "ours"
        return {f"{name}_norm" if norm else name: lambda norm=norm: run(norm) for norm in norms}

    def theirs(self, update: Callable[..., Any]) -> dict[str, Callable[[], None]]:
        states = torch.zeros(
            self.layers, 1 + self.requests * self.rows, VALUE_HEADS, WIDTH, WIDTH, dtype=self.dtype, device=DEVICE
        )
        indices = self.slots[:, None] + torch.arange(self.rows, dtype=torch.int32, device=DEVICE) * self.requests
        indices = indices.contiguous()
        heads = [self.copied_heads(i) for i in range(self.layers)]

        def triton() -> None:
            for i, (q, k, v) in enumerate(heads):
                self.returned, _ = update(
                    self.A_log[i], self.a[i], self.b[i], self.dt_bias[i], q[None], k[None], v[None], scale=SCALE,
                    initial_state=states[i], cu_seqlens=self.starts, ssm_state_indices=indices,
                    num_accepted_tokens=self.kept, use_qk_l2norm_in_kernel=True,
                )  # fmt: skip

        def cuda() -> None:
            for i in range(self.layers):
                torch.ops._C.fused_gdn_decode_post_conv_mtp(
                    self.packed[i], self.a[i], self.b[i], self.A_log[i], self.dt_bias[i], indices, self.starts,
                    self.kept, states[i], self.gate[i], self.weight, self.out[i], SCALE, EPS, "silu",
                )  # fmt: skip

        return {"triton": triton, "cuda": cuda}

    def their_decode(self) -> dict[str, Callable[[], None]]:
        from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule_packed_decode

        states = torch.zeros(self.layers, 1 + self.requests, VALUE_HEADS, WIDTH, WIDTH, dtype=self.dtype, device=DEVICE)

        def decode() -> None:
            for i in range(self.layers):
                fused_recurrent_gated_delta_rule_packed_decode(
                    mixed_qkv=self.packed[i], a=self.a[i], b=self.b[i], A_log=self.A_log[i], dt_bias=self.dt_bias[i],
                    scale=SCALE, initial_state=states[i], out=self.out[i].unsqueeze(1), ssm_state_indices=self.slots,
                    use_qk_l2norm_in_kernel=True,
                )  # fmt: skip

        return {"decode": decode}


def measured(
    case: Case, variants: dict[str, Callable[[], None]], prepare: Callable[[], object]
) -> dict[str, list[float]]:
    """Return microseconds per layer of each variant, as a CUDA graph. `prepare` runs before each."""
    calls = alternating_on_gpu({name: captured(run) for name, run in variants.items()}, ROUNDS, prepare)
    return {name: [time / case.layers for time in times] for name, times in calls.items()}


def case_rows(name: str, requests: int, drafts: int, update: Callable[..., object], read: Tensor) -> list[Row]:
    case = Case(requests, drafts, STATES[name])
    samples = measured(case, case.ours() | case.theirs(update), read.sum)
    key, prefix = (name, requests, drafts), f"recurrent_kernel/{name}/{requests}x{drafts}"
    return [
        row(f"{prefix}/over_triton", ratios(samples, "ours", "triton"), "ratio", "lower", TRITON_TARGETS.get(key)),
        row(f"{prefix}/norm_over_cuda", ratios(samples, "ours_norm", "cuda"), "ratio", "lower", CUDA_TARGETS.get(key)),
        *(row(f"{prefix}/{variant}_us", times, "us", "lower", digits=2) for variant, times in samples.items()),
    ]


def chunk_rows(kind: str, name: str, requests: int, drafts: int, read: Tensor) -> list[Row]:
    case = Case(requests, drafts, STATES[name])
    variants = case.ours(norms=(False,)) | case.ours(norms=(False,), chunk=CHUNK)
    base = "ours"
    if kind == "recurrent_decode":
        variants |= case.their_decode()
        base = "decode"
    samples = measured(case, variants, read.sum)
    prefix = f"{kind}/{name}/{requests}x{drafts}"
    return [
        *(row(f"{prefix}/{variant}_over_{base}", ratios(samples, variant, base), "ratio", "lower")
          for variant in samples if variant != base),
        *(row(f"{prefix}/{variant}_us", times, "us", "lower", digits=2) for variant, times in samples.items()),
    ]  # fmt: skip


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--chunk", type=int, choices=[CHUNK], help="compare the chunk form with the exact form")
    parser.add_argument("--decode", action="store_true", help="no drafts: compare with vLLM's decode kernel")
    options = parser.parse_args()
    torch.manual_seed(0)
    read = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device=DEVICE)
    rows: list[Row] = []
    if options.chunk or options.decode:
        kind = "recurrent_decode" if options.decode else "recurrent_chunk"
        for name, requests in product(STATES, DECODE_REQUESTS if options.decode else CHUNK_REQUESTS):
            for drafts in (0,) if options.decode else CHUNK_DRAFTS:
                rows += chunk_rows(kind, name, requests, drafts, read)
                torch.cuda.empty_cache()
        return save(this_machine(), kind, rows, options.folder)
    load_core()
    update = recurrent_update()
    for name, requests, drafts in product(STATES, REQUESTS, DRAFTS):
        rows += case_rows(name, requests, drafts, update, read)
        torch.cuda.empty_cache()
    return save(this_machine(), "recurrent_kernel", rows, options.folder)


if __name__ == "__main__":
    main()
