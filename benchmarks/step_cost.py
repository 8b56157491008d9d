"""Measure the host's time for begin and commit, over that of one `zero_()`, in turn.

    python benchmarks/step_cost.py [--folder FOLDER]

There are 16 requests with 4 drafts each and 32 layers, in both modes, in one and two groups of layers. `cold`: the host
has emptied its caches before each call, as an engine does between two steps. The zeroed tensor has gaps, so that a CPU
takes the same way through torch as a GPU. A CPU launches nothing, but runs the kernels. The rows go to ``host_cost``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from results import Row, new_parser, ratios, row, save, this_machine

from nwor_ops import DraftCommitManager, LayerCache, Layout, Window, num_shadow_blocks

LAYERS, REQUESTS, DRAFTS = 32, 16, 4
BLOCK_SIZE, PAGES = 16, 4
MOST_OF_ZERO = 1.3
CACHE_BYTES = 2**28
COLD_CALLS, WARM_CALLS = 60, 500


class EngineStep:
    """The begin and commit of an engine: counts of logits, and tensors that stay where they are."""

    def __init__(self, mode: str, groups: int, device: str) -> None:
        requests, tokens = REQUESTS, REQUESTS * (DRAFTS + 1)
        shadow = groups * num_shadow_blocks(requests, DRAFTS, BLOCK_SIZE) if mode == "stage" else 0
        shape = (requests * PAGES + shadow, BLOCK_SIZE, 1, 32)  # a CPU's kernels should take little of the time
        self.manager = DraftCommitManager(
            max_num_tokens=tokens, max_num_requests=requests, max_draft_tokens=requests * DRAFTS, device=device,
            mode=mode, max_drafts_per_request=DRAFTS,
        )  # fmt: skip
        for layer in range(LAYERS):
            cache = LayerCache.packed(torch.zeros(shape, dtype=torch.bfloat16, device=device))
            self.manager.register_layer(f"{layer}", cache, f"{layer % groups}")
        self.manager.allocate()
        seq_lens = torch.randint(DRAFTS + 2, PAGES * BLOCK_SIZE + 1, (requests,), dtype=torch.int32)
        tables = torch.randperm(requests * PAGES).view(requests, PAGES).to(torch.int32)
        positions = seq_lens[:, None] - DRAFTS - 1 + torch.arange(DRAFTS + 1)
        pages, offsets = positions // BLOCK_SIZE, positions % BLOCK_SIZE
        slots = (tables.gather(1, pages) * BLOCK_SIZE + offsets).flatten().long()
        starts = torch.arange(0, tokens + 1, DRAFTS + 1, dtype=torch.int32)
        slot_mappings = {f"{group}": slots.to(device, copy=True) for group in range(groups)}
        block_tables = {f"{group}": tables.to(device, copy=True) for group in range(groups)}
        self.slots = slot_mappings["0"]
        self.manager.bind(Layout(slot_mappings, block_tables, 1, leading_zero=True, request_states=True))
        self.window = Window(
            starts.to(device), starts.to(device, copy=True), num_draft_tokens=requests * DRAFTS,
            seq_lens=seq_lens.to(device), request_states=torch.arange(requests, dtype=torch.int32, device=device),
        )  # fmt: skip
        self.num_rejected = torch.full((requests,), DRAFTS // 2, dtype=torch.int32, device=device)
        self.zeroed = torch.ones(2 * requests, dtype=torch.int32, device=device)[::2]

    def calls(self) -> dict[str, Callable[[], object]]:
        return {
            "zero": self.zeroed.zero_,
            "begin": lambda: self.manager.begin(self.window),
            "log": lambda: self.manager.log("0", self.slots),  # on a CPU commit wants a layer that has written
            "commit": lambda: self.manager.commit_rejected(self.num_rejected),
        }


def in_turn(calls: dict[str, Callable[[], object]], rounds: int, cold: bool, device: str) -> dict[str, list[float]]:
    """Return the seconds of each call. The device is idle before each of them."""
    cache = torch.zeros(CACHE_BYTES, dtype=torch.uint8)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 5):
        for name, call in calls.items():
            if cold:
                cache.add_(1)
            if device == "cuda":
                torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            if number >= 5:
                samples[name].append(time.perf_counter() - started)
    return samples


def engine_figures(device: str) -> list[Row]:
    rows = []
    for mode, groups, cold in ((m, g, c) for m in ("cow", "stage") for g in (1, 2) for c in (False, True)):
        calls = EngineStep(mode, groups, device).calls()
        with torch.inference_mode():
            samples = in_turn(calls, COLD_CALLS if cold else WARM_CALLS, cold, device)
        case = f"{mode}/{groups}_group{'s' if groups > 1 else ''}/{'cold' if cold else 'warm'}"
        rows += [
            row(f"{end}_over_zero/{case}", ratios(samples, end, "zero"), "ratio", "lower", MOST_OF_ZERO)
            for end in ("begin", "commit")
        ]
        rows += [row(f"host_time/{case}/{name}", [1e6 * t for t in samples[name]], "us", "lower", digits=1)
                 for name in samples]  # fmt: skip
    return rows


def main() -> None:
    folder = new_parser(__doc__).parse_args().folder
    torch.manual_seed(0)
    save(this_machine(), "host_cost", engine_figures("cuda" if torch.cuda.is_available() else "cpu"), folder)


if __name__ == "__main__":
    main()
