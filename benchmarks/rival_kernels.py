"""Compare gated_delta_verify with the kernels of FlashInfer, SGLang and vLLM: microseconds per layer.

    python benchmarks/rival_kernels.py [--folder FOLDER] [--seconds 450]
    python benchmarks/rival_kernels.py --check ours chunk16      # only compare with the formula; also without a GPU

Layers, inputs, accepted counts and measurement are those of `recurrent_kernel.py`. All sides read the same inputs.
The requests are at different rows of their chunks and rings, so each step stores the states of as many as the next.

- `ours`, `chunk16`: both forms, with the plan of the window.
- `vllm`: `fused_sigmoid_gating_delta_rule_update` of vLLM, one state per token.
- `flashinfer_mtp`: `gated_delta_rule_mtp`, one float32 state per token. The choice of the first state is not timed.
- `flashinfer_ring`: `gated_delta_rule_mtp_ucache_flush` of `gdn_decode_bf16_wy_ucache_flush`: a bfloat16 state and a
  ring of 32 rows. At most 16 of them are pending: a fold frees these while the window fills others. The caller moves
  the cursors, which is not timed.
- `sglang`: `gdn_replayssm_spec_decode`, after `commit_gdn_replayssm_spec` and `commit_gdn_replayssm_circular`, as
  `sglang/srt/speculative/spec_utils.py` calls them: a ring of 16 rows. Bfloat16 states are stored after each window.

First each side runs 12 windows in a process of its own and is compared with the formula in float32. A side that fails
or differs by more than 2 % is reported and not timed. FlashInfer needs its package. SGLang needs one file of its wheel
on PYTHONPATH, `sglang/kernels/ops/attention/linear/gdn_replayssm_spec_decode.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import torch
from recurrent_kernel import CHUNK, DEVICE, KEY_HEADS, READ_BYTES, SCALE, STATES, VALUE_HEADS, WIDTH, Case, measured
from results import new_parser, ratios, row, save, this_machine
from torch import Tensor
from vllm_kernels import recurrent_update, sglang_replay

from nwor_ops.testing.oracle.recurrent import decay_of, forward_token

REQUESTS, DRAFTS = (16, 64, 128, 384), (3, 7, 1, 0)
CHECKED_REQUESTS, CHECKED_WINDOWS = (64, 12) if DEVICE == "cuda" else (2, 4)
TOLERANCE = 0.02
RING, FLASHINFER_RING, FLASHINFER_WINDOW = 16, 32, 16  # rows
NAME = "rival_kernels"


@dataclass
class Side:
    """A kernel in the buffers of a case: one step of all layers, and what its caller does before."""

    step: Callable[[], None]
    advance: Callable[[], object] = lambda: None


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def states_of(case: Case, per_request: int = 1) -> Tensor:
    return zeros(case.layers, 1 + case.requests * per_request, VALUE_HEADS, WIDTH, WIDTH, dtype=case.dtype)


def inputs(case: Case, layer: int) -> list[Tensor]:
    """Return q, k, v, a, b ``[requests, rows, heads, ...]`` of the case."""
    parts = (*case.copied_heads(layer), case.a[layer], case.b[layer])
    return [part.unflatten(0, (case.requests, case.rows)) for part in parts]


def ours(case: Case, staggered: bool, chunk: int = 0) -> Side:
    (step,) = case.ours(norms=(False,), chunk=chunk, staggered=staggered).values()
    return Side(step)


def vllm(case: Case, _staggered: bool) -> Side:
    return Side(case.theirs(recurrent_update())["triton"])


def flashinfer_mtp(case: Case, _staggered: bool) -> Side:
    from flashinfer.gdn_decode import gated_delta_rule_mtp

    if case.dtype != torch.float32:
        raise NotImplementedError("gated_delta_rule_mtp takes float32 states only")
    states, first = states_of(case, case.rows), zeros(case.requests)
    indices = (case.slots[:, None] + torch.arange(case.rows, device=DEVICE) * case.requests).int().contiguous()
    layers = [inputs(case, i) for i in range(case.layers)]
    outs = [out.unflatten(0, (case.requests, case.rows)) for out in case.out]

    def step() -> None:
        for i, (q, k, v, a, b) in enumerate(layers):
            gated_delta_rule_mtp(
                q, k, v, states[i], first, case.A_log[i], a, case.dt_bias[i], b, scale=SCALE, output=outs[i],
                ssm_state_indices=indices, disable_state_update=False,
            )  # fmt: skip

    return Side(step, lambda: first.copy_(indices.gather(1, case.kept[:, None].long() - 1)[:, 0]))


def flashinfer_ring(case: Case, staggered: bool) -> Side:
    from flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush import gated_delta_rule_mtp_ucache_flush

    if case.dtype != torch.bfloat16:
        raise NotImplementedError("gated_delta_rule_mtp_ucache_flush takes bfloat16 states only")
    states, slots = states_of(case), case.requests + 1
    keys = zeros(case.layers, slots, KEY_HEADS, FLASHINFER_RING, WIDTH, dtype=torch.bfloat16)
    updates = zeros(case.layers, slots, VALUE_HEADS, FLASHINFER_RING, WIDTH, dtype=torch.bfloat16)
    decays = zeros(case.layers, slots, VALUE_HEADS, FLASHINFER_RING, dtype=torch.float32)
    length, base = zeros(case.requests), zeros(case.requests)
    fold = FLASHINFER_WINDOW - case.rows + 1
    if staggered:
        length.copy_(torch.arange(case.requests) % fold)
    layers = [inputs(case, i) for i in range(case.layers)]
    outs = [out.unflatten(0, (case.requests, case.rows)) for out in case.out]
    A_log, dt_bias = (list(part.bfloat16()) for part in (case.A_log, case.dt_bias))

    def step() -> None:
        for i, (q, k, v, a, b) in enumerate(layers):
            gated_delta_rule_mtp_ucache_flush(
                A_log[i], a, dt_bias[i], q=q, k=k, v=v, b=b, initial_state_source=states[i],
                initial_state_indices=case.slots, scale=SCALE, output=outs[i], k_cache=keys[i], u_cache=updates[i],
                g_cache=decays[i], hist_len=length, cache_base=base, flush_min=fold, restart_hist_on_flush=False,
            )  # fmt: skip

    def advance() -> None:
        folded = length >= fold
        base.copy_((base + length * folded) % FLASHINFER_RING)
        length.masked_fill_(folded, 0).add_(case.kept)

    return Side(step, advance)


def sglang(case: Case, staggered: bool) -> Side:
    replay, slots = sglang_replay(), case.requests + 1
    bf16 = {"dtype": torch.bfloat16}
    states = states_of(case)
    updates, low_updates = (zeros(case.layers, slots, VALUE_HEADS, RING, WIDTH, **bf16) for _ in range(2))
    keys, low_keys = (zeros(case.layers, slots, KEY_HEADS, RING, WIDTH, **bf16) for _ in range(2))
    decays = zeros(case.layers, slots, VALUE_HEADS, RING, dtype=torch.float32)
    length, base, fold = zeros(slots), zeros(slots), zeros(slots, dtype=torch.int8)
    cursors: dict[str, Any] = {"write_pos": length, "cache_base": base, "is_flush": fold}
    if staggered and case.dtype == torch.float32:
        length.copy_(torch.arange(slots) % (RING - 2 * case.rows + 1))
    heads = [case.copied_heads(i) for i in range(case.layers)]

    def step() -> None:
        replay.commit_gdn_replayssm_spec(
            **cursors, num_accepted=case.kept, replay_indices=case.slots, max_cache_len=RING, max_spec_len=case.rows,
            fold_every_commit=case.dtype != torch.float32, null_block_id=-1,
        )  # fmt: skip
        replay.commit_gdn_replayssm_circular(
            **cursors, checkpoint_state=states, d_cache=updates, k_cache=keys, g_cache=decays,
            d_residual_cache=low_updates, k_residual_cache=low_keys, state_batch_indices=case.slots,
            replay_indices=case.slots, accept_lens=case.kept, null_block_id=-1,
        )  # fmt: skip
        for i, (q, k, v) in enumerate(heads):
            replay.gdn_replayssm_spec_decode(
                q, k, v, case.a[i], case.b[i], case.A_log[i], case.dt_bias[i], states[i], updates[i], keys[i],
                decays[i], low_updates[i], low_keys[i], None, case.out[i], case.starts, case.slots, case.slots,
                **cursors, max_cache_len=RING, max_spec_len=case.rows, scale=SCALE, null_block_id=-1,
                launch_mode="verify",
            )  # fmt: skip

    return Side(step)


SIDES: dict[str, Callable[[Case, bool], Side]] = {
    "ours": ours,
    "chunk16": lambda case, staggered: ours(case, staggered, CHUNK),
    "vllm": vllm,
    "flashinfer_ring": flashinfer_ring,
    "flashinfer_mtp": flashinfer_mtp,
    "sglang": sglang,
}


def expected(case: Case, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return a window's output ``[requests, rows, HV, dv]`` and the states after each token, in float32."""
    q, k, v, a, b = (part.float() for part in inputs(case, 0))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q, k = (part.repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for part in (q * SCALE, k))
    decay, beta = decay_of(case.A_log[0], a + case.dt_bias[0], 1.0, 20.0), torch.sigmoid(b)
    token, outs, after = torch.vmap(torch.vmap(forward_token)), [], []
    for i in range(case.rows):
        states, out, _ = token(states, q[:, i], k[:, i], v[:, i], decay[:, i], beta[:, i])
        outs.append(out)
        after.append(states)
    return torch.stack(outs, 1), torch.stack(after, 1)


def largest_difference(name: str, dtype: torch.dtype, drafts: int) -> float:
    """Return how much a side's outputs differ from the formula: the largest norm of a window's error over its norm."""
    torch.manual_seed(drafts)
    case = Case(CHECKED_REQUESTS, drafts, dtype, layers=1)
    states, worst = zeros(case.requests, VALUE_HEADS, WIDTH, WIDTH, dtype=torch.float32), 0.0
    everyone = torch.arange(case.requests, device=DEVICE)
    case.kept.fill_(1)
    side = None
    for _ in range(CHECKED_WINDOWS):
        for buffer in (case.packed, case.a, case.b):
            buffer.normal_()
        for copy, part in zip(case.copied_heads(0), case.heads(0), strict=True):
            copy.copy_(part)
        side = SIDES[name](case, False) if side is None else side
        case.out.fill_(torch.nan)
        side.advance()
        side.step()
        want, after = expected(case, states)
        got = (case.out[0] if case.returned is None else case.returned).view_as(want).float()
        worst = max(worst, float((got - want).norm() / want.norm())) if got.isfinite().all() else torch.inf
        case.kept.random_(1, case.rows + 1)
        states = after[everyone, case.kept.long() - 1]
    return worst


def check(names: list[str]) -> None:
    """Print one line of JSON for each case of the sides."""
    for name, (dtype_name, dtype), drafts in product(names, STATES.items(), DRAFTS):
        line: dict[str, Any] = {"side": name, "state": dtype_name, "drafts": drafts}
        try:
            difference = largest_difference(name, dtype, drafts)
            line |= {"passed": difference <= TOLERANCE, "result": f"differs by {difference:.4f}"}
        except Exception as error:  # of another project: reported, and the others go on
            line |= {"passed": False, "result": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(line), flush=True)


def checked_sides() -> set[tuple[str, str, int]]:
    """Check each side in a process of its own, print the results, and return which cases may be timed."""
    command = [sys.executable, __file__, "--check"]
    runs = {name: subprocess.Popen([*command, name], stdout=-1, stderr=-1, text=True) for name in SIDES}
    passed = set()
    for name, run in runs.items():
        output, errors = run.communicate()
        for line in (json.loads(text) for text in output.splitlines() if text.startswith('{"side"')):
            print(f"{name}/{line['state']}/{line['drafts']}: {'' if line['passed'] else 'NOT TIMED, '}{line['result']}")
            if line["passed"]:
                passed.add((name, line["state"], line["drafts"]))
        if run.returncode:
            print(f"{name}: its check ended with {run.returncode}: {errors.strip()[-500:]}")
    return passed


def advances(sides: list[Side], read: Tensor) -> Iterator[None]:
    """Prepare the sides in turn: each moves its cursors, then L2 is emptied."""
    for side in cycle(sides):
        side.advance()
        read.sum()
        yield


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=450, help="start no case after this time")
    parser.add_argument("--check", nargs="+", choices=SIDES, help="only compare these sides with the formula")
    options = parser.parse_args()
    if options.check:
        return check(options.check)
    begin, passed = time.monotonic(), checked_sides()
    torch.manual_seed(0)
    read = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device=DEVICE)
    for drafts, state, requests in product(DRAFTS, ("bf16", "fp32"), REQUESTS):
        prefix = f"{NAME}/{state}/{requests}x{drafts}"
        if time.monotonic() - begin > options.seconds:
            print(f"{prefix}: not measured, the time is over")
            continue
        torch.cuda.empty_cache()
        case = Case(requests, drafts, STATES[state], states=2 * drafts + 10)
        sides = {name: make(case, True) for name, make in SIDES.items() if (name, state, drafts) in passed}
        turns = advances(list(sides.values()), read)
        samples = measured(case, {name: side.step for name, side in sides.items()}, lambda turns=turns: next(turns))
        rows = [
            row(f"{prefix}/{form}_over_{rival}", ratios(samples, form, rival), "ratio", "lower")
            for form, rival in product(("ours", "chunk16"), samples)
            if form in samples and rival not in ("ours", "chunk16")
        ]
        rows += [row(f"{prefix}/{name}_us", times, "us", "lower", digits=2) for name, times in samples.items()]
        save(this_machine(), NAME, rows, options.folder, keep=True)
    return None


if __name__ == "__main__":
    main()
