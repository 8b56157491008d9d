"""Measure what a transaction adds to one step: launches, and time on the host.

    python benchmarks/step_cost.py [FOLDER]

There are 32 layers of 8 KV heads x 64. They are once in vLLM's CPU pages (key and value in separate planes, the case
with the most launches), and once packed. Each of 8 requests has 4 drafts, half of them rejected. On a CPU the kernels
run on the host, so the times include their work. The time of the plain writer is measured in turn and subtracted.

The rows `begin_over_zero` and `commit_over_zero` compare the host's time with that of one `zero_()`, in turn. They are
for 16 requests with 4 drafts, in both modes, for one and two groups of layers. `cold`: the host has emptied its caches
before each call, as an engine does between two steps. The zeroed tensor has gaps, so that a CPU takes the same way
through torch as a GPU. A CPU launches nothing, but runs the kernels.

They go to a separate file, ``host_cost``. With a GPU, only they are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from results import Row, alternating, asked_folder, ratios, row, save, this_machine
from torch.utils._python_dispatch import TorchDispatchMode

from nwor_ops import DraftCommitManager, LayerCache, Window, num_shadow_blocks, write_kv
from nwor_ops.vllm.transaction.layers.cpu_pages import strided_pages

LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 32, 8, 64, 32, 32
REQUESTS, DRAFTS = 8, 4
TOKENS = REQUESTS * (DRAFTS + 1)
MOST_LAUNCHES = 4
ROUNDS, CALLS = 15, 30
ENGINE_REQUESTS, ENGINE_BLOCK_SIZE, PAGES = 16, 16, 4
MOST_OF_ZERO = 1.3
CACHE_BYTES = 2**28
COLD_CALLS, WARM_CALLS = 60, 500


class CountLaunches(TorchDispatchMode):
    """Count our ops; each op is one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.namespace == "nwor"
        return func(*args, **(kwargs or {}))


def make_layer(packed: bool) -> LayerCache:
    if packed:
        return LayerCache.packed(torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16))
    pages = torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    return LayerCache.split(*strided_pages(pages))


class Step:
    """One verification step, with and without the transaction."""

    def __init__(self, packed: bool) -> None:
        self.layers = {f"layers.{i}": make_layer(packed) for i in range(LAYERS)}
        self.manager = DraftCommitManager(
            max_num_tokens=TOKENS, max_num_requests=REQUESTS, max_draft_tokens=REQUESTS * DRAFTS, device="cpu"
        )
        for name, cache in self.layers.items():
            self.manager.register_layer(name, cache)
        self.manager.allocate()
        self.key, self.value = torch.randn(2, TOKENS, HEADS, HEAD_SIZE).to(torch.bfloat16)
        # Each request continues in its own block, in consecutive slots.
        starts = torch.randperm(BLOCKS)[:REQUESTS, None] * BLOCK_SIZE + torch.randint(
            BLOCK_SIZE - DRAFTS, (REQUESTS, 1)
        )
        self.slots = (starts + torch.arange(DRAFTS + 1)).flatten()
        self.window = Window(
            torch.arange(0, TOKENS + 1, DRAFTS + 1, dtype=torch.int32),
            torch.arange(DRAFTS, REQUESTS * DRAFTS + 1, DRAFTS, dtype=torch.int32),
            {"default": self.slots},
            REQUESTS * DRAFTS,
        )
        self.num_rejected = torch.full((REQUESTS,), DRAFTS // 2, dtype=torch.int32)
        self.one = torch.ones(1)

    def begin_and_commit(self) -> None:
        self.manager.begin(self.window)
        self.manager.commit_rejected(self.num_rejected)

    def transaction(self) -> None:
        self.manager.begin(self.window)
        for name in self.layers:
            self.manager.write(name, self.key, self.value, self.slots)
        self.manager.commit_rejected(self.num_rejected)

    def plain(self) -> None:
        for cache in self.layers.values():
            write_kv(self.key, self.value, *cache.key_value(), self.slots, self.one, self.one, "auto")


def launches(run: Callable[[], None]) -> int:
    """Return the launches of a step. It is the first one, whose calls are not bound yet: a bound call makes several."""
    with CountLaunches() as counter:
        run()
    return counter.count


def figures(name: str, step: Step) -> list[Row]:
    added = launches(step.transaction) - launches(step.plain)
    samples = alternating({"plain": step.plain, "transaction": step.transaction}, ROUNDS, CALLS)
    pairs = zip(samples["transaction"], samples["plain"], strict=True)
    outside = alternating({"ends": step.begin_and_commit}, ROUNDS, CALLS)["ends"]
    return [
        row(f"launches_added/{name}/{LAYERS}_layers", [added], "launches", "lower", MOST_LAUNCHES),
        row(f"host_time_added/{name}/{LAYERS}_layers", [1e6 * (t - p) for t, p in pairs], "us", "lower", digits=1),
        row(f"host_time_begin_commit/{name}/{LAYERS}_layers", [1e6 * t for t in outside], "us", "lower", digits=1),
    ]


class EngineStep:
    """The begin and commit of an engine: counts of logits, and tensors that stay where they are."""

    def __init__(self, mode: str, groups: int, device: str) -> None:
        requests, tokens = ENGINE_REQUESTS, ENGINE_REQUESTS * (DRAFTS + 1)
        shadow = groups * num_shadow_blocks(requests, DRAFTS, ENGINE_BLOCK_SIZE) if mode == "stage" else 0
        shape = (requests * PAGES + shadow, ENGINE_BLOCK_SIZE, 1, 32)  # a CPU's kernels should take little of the time
        self.manager = DraftCommitManager(
            max_num_tokens=tokens, max_num_requests=requests, max_draft_tokens=requests * DRAFTS, device=device,
            mode=mode, max_drafts_per_request=DRAFTS,
        )  # fmt: skip
        for layer in range(LAYERS):
            cache = LayerCache.packed(torch.zeros(shape, dtype=torch.bfloat16, device=device))
            self.manager.register_layer(f"{layer}", cache, f"{layer % groups}")
        self.manager.allocate()
        seq_lens = torch.randint(DRAFTS + 2, PAGES * ENGINE_BLOCK_SIZE + 1, (requests,), dtype=torch.int32)
        tables = torch.randperm(requests * PAGES).view(requests, PAGES).to(torch.int32)
        positions = seq_lens[:, None] - DRAFTS - 1 + torch.arange(DRAFTS + 1)
        pages, offsets = positions // ENGINE_BLOCK_SIZE, positions % ENGINE_BLOCK_SIZE
        slots = (tables.gather(1, pages) * ENGINE_BLOCK_SIZE + offsets).flatten().long()
        starts = torch.arange(0, tokens + 1, DRAFTS + 1, dtype=torch.int32)
        self.window = Window(
            starts.to(device), starts.to(device, copy=True),
            {f"{group}": slots.to(device, copy=True) for group in range(groups)}, requests * DRAFTS,
            num_bonus_tokens=1, leading_zero=True, seq_lens=seq_lens.to(device),
            block_tables={f"{group}": tables.to(device, copy=True) for group in range(groups)},
            request_states=torch.arange(requests, dtype=torch.int32, device=device),
        )  # fmt: skip
        self.num_rejected = torch.full((requests,), DRAFTS // 2, dtype=torch.int32, device=device)
        self.zeroed = torch.ones(2 * requests, dtype=torch.int32, device=device)[::2]

    def calls(self) -> dict[str, Callable[[], object]]:
        return {
            "zero": self.zeroed.zero_,
            "begin": lambda: self.manager.begin(self.window),
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
    folder = asked_folder(__doc__)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        rows = [figure for name in ("split", "packed") for figure in figures(name, Step(name == "packed"))]
        save("cpu", "step_cost", rows, folder)
    save(this_machine(), "host_cost", engine_figures(device), folder)


if __name__ == "__main__":
    main()
