"""Measure what a transaction adds to one step: launches, and time on the host.

    python benchmarks/step_cost.py

32 layers of 8 KV heads x 64, once in vLLM's CPU pages (key and value in separate planes, the case with the most
launches) and once packed. 8 requests have 4 drafts each, half of them rejected. On a CPU the kernels run on the host,
so the times include their work. The time of the plain writer is measured in turn and subtracted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from results import Row, alternating, row, save
from torch.utils._python_dispatch import TorchDispatchMode

from nwor_ops import DraftCommitManager, LayerCache, Window, write_kv
from nwor_ops.vllm.transaction.layers.cpu_pages import strided_pages

LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 32, 8, 64, 32, 32
REQUESTS, DRAFTS = 8, 4
TOKENS = REQUESTS * (DRAFTS + 1)
MOST_LAUNCHES = 4
ROUNDS, CALLS = 15, 30


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
            planes = cache.key_value(tuple(plane.view for plane in cache.planes))
            write_kv(self.key, self.value, *planes, self.slots, self.one, self.one, "auto")


def launches(run: Callable[[], None]) -> int:
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


def main() -> None:
    torch.manual_seed(0)
    rows = [figure for name in ("split", "packed") for figure in figures(name, Step(name == "packed"))]
    save("cpu", "step_cost", rows)


if __name__ == "__main__":
    main()
