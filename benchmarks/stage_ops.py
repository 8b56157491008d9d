"""Measure shadow pages and staging on a GPU: shadow pages against a plain copy of the same bytes, moves against
alternatives.

    python benchmarks/stage_ops.py [FOLDER]

It does not need vLLM, and takes a minute or two. The layers are 32 packed planes of 8 heads x 2 x 128 in bf16, in one
buffer.

Each side is one CUDA graph, and the sides are replayed in turn. Before every replay, outside the measured time, tables
and slots are restored. Then 512 MB are read, so that no row is left in L2 and the GPU is busy while the host launches
the graph.

Shadow pages: every request has a target token and K drafts after a tail page with a random number of rows. All drafts
are accepted, so close copies as much as possible. The alternative copies the same number of bytes with one `copy_`. A
ratio of 0.8 means 80 % of its speed. `held` is an open whose rows are already in the shadow pages.

Moves: every request moves the accepted path of a tree of 8 nodes, including chains and swaps, in one launch for all
layers. The alternatives are one launch per layer, and torch's index_select and index_copy_ per layer.

Staging: stage_kv and commit_staged of all layers, and accept_staged, against write_kv of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from cow_transaction import alternating_on_gpu, captured
from results import Row, asked_folder, ratios, row, save, this_machine
from torch import Tensor

from nwor_ops import num_shadow_blocks, ops

DEVICE = "cuda"
LAYERS, HEADS, WIDTH = 32, 8, 256
ROW_BYTES = HEADS * WIDTH * 2
WINDOWS = (
    (1, 4, 16),
    (16, 4, 16),
    (64, 4, 16),
    (256, 4, 16),
    (256, 8, 16),
    (256, 8, 64),
)  # requests, drafts per request, block size
LARGE = {(256, 4, 16), (256, 8, 16), (256, 8, 64)}
COPY_TARGET, MOVE_TARGET = 0.8, 3.0
MOVES = ((64, 8), (16, 8), (1, 8))  # requests, nodes per request
STAGED = ((1, 5), (64, 5), (64, 9))  # requests, rows per request
SLOTS = 128 * 1024
READ_BYTES, ROUNDS = 2**29, 200


def layer_planes(block_size: int) -> list[Tensor]:
    """Return ``[B, N, H, W]`` of every layer, one after the other in memory."""
    backing = torch.zeros(LAYERS, SLOTS // block_size, block_size, HEADS, WIDTH, dtype=torch.bfloat16, device=DEVICE)
    return list(backing)


class Window:
    """A window of requests in buffers that never move. `reset` undoes the effects of open and close."""

    def __init__(self, planes: list[Tensor], requests: int, drafts: int) -> None:
        blocks, block_size = planes[0].shape[:2]
        tokens, pages = drafts + 1, 4
        self.planes, self.drafts = planes, drafts
        shadow = num_shadow_blocks(requests, drafts, block_size)
        int32 = {"dtype": torch.int32, "device": DEVICE}
        fill = torch.randint(0, block_size, (requests,), device=DEVICE)  # number of committed rows of each tail page
        lengths = block_size + fill + tokens
        columns = max(pages, -(-(2 * block_size + tokens) // block_size))
        order = torch.randperm(blocks - shadow, device=DEVICE)[: requests * columns]
        self.table = order.int().view(requests, columns)
        positions = lengths[:, None] - tokens + torch.arange(tokens, device=DEVICE)
        own_blocks = self.table.long().gather(1, positions // block_size)
        self.slots = (own_blocks * block_size + positions % block_size).flatten()
        self.own_slots, self.own_table = self.slots.clone(), self.table.clone()
        self.starts = torch.arange(requests + 1, **int32) * tokens
        self.draft_starts = torch.arange(requests + 1, **int32) * drafts
        self.seq_lens = lengths.int()
        self.row_slots = self.slots.view(requests, tokens)[:, 1:].reshape(1, -1).contiguous()
        self.shadow_blocks = torch.arange(blocks - shadow, blocks, **int32).view(1, requests, -1)
        self.held = torch.full(self.shadow_blocks.shape, -1, device=DEVICE)
        self.saved = torch.empty(1, requests * tokens, dtype=torch.int64, device=DEVICE)
        self.tails = torch.empty(1, requests, **int32)
        self.rejected = torch.zeros(requests * drafts, dtype=torch.bool, device=DEVICE)
        self.states = torch.arange(requests, **int32)
        # Number of rows in the tail page before this step: one fewer than its fill if the target token is in it.
        first_draft = fill + 1
        tail_fill = torch.where(first_draft < block_size, fill, 0)
        self.opened_rows = int(tail_fill.sum())
        self.shared_rows = int(
            (first_draft < block_size).sum()
        )  # number of target tokens in the page of the first draft
        self.closed_rows = self.shared_rows + requests * drafts

    def closed_bytes(self) -> int:
        """Return the bytes that close copies in all layers, for the current acceptance."""
        return (self.shared_rows + int((~self.rejected).sum())) * LAYERS * ROW_BYTES

    def reset(self) -> None:
        self.slots.copy_(self.own_slots)
        self.table.copy_(self.own_table)

    def open(self, held: Tensor | None = None) -> None:
        ops.open_window(
            self.planes, [LAYERS], self.starts, self.draft_starts, self.seq_lens, self.row_slots, self.shadow_blocks,
            [self.slots], [self.table], self.saved, self.tails, self.states, held,
        )  # fmt: skip

    def close(self, held: Tensor | None = None) -> None:
        ops.close_window(
            self.planes, [LAYERS], self.starts, self.draft_starts, self.rejected, self.shadow_blocks, self.saved,
            self.tails, [self.slots], [self.table], self.states, held,
        )  # fmt: skip


def plain_copy(rows: int) -> Callable[[], None]:
    """Copy as many bytes as this number of rows has in every layer."""
    source, target = torch.zeros(2, max(rows, 1) * LAYERS * ROW_BYTES, dtype=torch.uint8, device=DEVICE)
    return captured(lambda: target.copy_(source))


def window_rows(read: Tensor) -> list[Row]:
    rows = []
    for requests, drafts, block_size in WINDOWS:
        window = Window(layer_planes(block_size), requests, drafts)

        def prepare(window: Window = window) -> None:
            window.reset()
            read.sum()

        window.open()  # so that close has records in every replay
        variants = {
            "open": captured(window.open),
            "close": captured(window.close),
            "copy_for_open": plain_copy(window.opened_rows),
            "copy_for_close": plain_copy(window.closed_rows),
        }
        window.reset()
        window.open(window.held)
        window.close(window.held)  # from here on the shadow pages hold rows that a later step commits
        held = window.held.clone()
        variants["held"] = captured(lambda window=window, held=held: window.open(held))
        samples = alternating_on_gpu(variants, ROUNDS, prepare)
        name = f"{requests}x{drafts}/block{block_size}"
        target = COPY_TARGET if (requests, drafts, block_size) in LARGE else None
        rows += [
            row(f"open_window/{name}", ratios(samples, "copy_for_open", "open"), "ratio", "higher", target),
            row(f"open_window/{name}/us", samples["open"], "us", "lower", digits=2),
            row(f"open_window/{name}/held_us", samples["held"], "us", "lower", digits=2),
            row(f"open_window/{name}/copy_us", samples["copy_for_open"], "us", "lower", digits=2),
            row(f"close_window/{name}", ratios(samples, "copy_for_close", "close"), "ratio", "higher", target),
            row(f"close_window/{name}/us", samples["close"], "us", "lower", digits=2),
            row(f"close_window/{name}/copy_us", samples["copy_for_close"], "us", "lower", digits=2),
        ]
    return rows


def moves_of(requests: int, nodes: int) -> tuple[Tensor, Tensor]:
    """Return moves in which each request's nodes have consecutive slots, and the path is a random order of them.

    Sources and destinations are the same slots.
    """
    base = torch.randperm(SLOTS // nodes, device=DEVICE)[:requests, None] * nodes
    order = torch.rand(requests, nodes, device=DEVICE).argsort(1)
    return (base + order).flatten(), (base + torch.arange(nodes, device=DEVICE)).flatten()


def move_rows(read: Tensor) -> list[Row]:
    rows, planes = [], layer_planes(16)
    flat = [plane.view(SLOTS, -1) for plane in planes]
    for requests, nodes in MOVES:
        sources, destinations = moves_of(requests, nodes)

        def per_layer(sources: Tensor = sources, destinations: Tensor = destinations) -> None:
            for plane in planes:
                ops.move_slots([plane], sources, destinations)

        def indexed(sources: Tensor = sources, destinations: Tensor = destinations) -> None:
            for plane in flat:
                plane.index_copy_(0, destinations, plane.index_select(0, sources))

        variants = {
            "ours": captured(lambda s=sources, d=destinations: ops.move_slots(planes, s, d)),
            "per_layer": captured(per_layer),
            "index": captured(indexed),
            "copy": plain_copy(requests * nodes),
        }
        samples = alternating_on_gpu(variants, ROUNDS, lambda: read.sum())
        name = f"move_slots/{requests}x{nodes}"
        target = MOVE_TARGET if requests == MOVES[0][0] else None
        rows += [
            row(f"{name}/over_launch_per_layer", ratios(samples, "per_layer", "ours"), "ratio", "higher", target),
            row(f"{name}/over_index_copy", ratios(samples, "index", "ours"), "ratio", "higher", target),
            row(f"{name}/us", samples["ours"], "us", "lower", digits=2),
            row(f"{name}/copy_us", samples["copy"], "us", "lower", digits=2),
        ]
    return rows


def staging_rows(read: Tensor) -> list[Row]:
    rows, planes = [], layer_planes(16)
    halves = [plane.split(WIDTH // 2, -1) for plane in planes]
    scale = torch.ones(1, device=DEVICE)
    for requests, each in STAGED:
        count = requests * each
        sources = torch.randn(2, LAYERS, count, HEADS, WIDTH // 2, device=DEVICE).bfloat16()
        staged = torch.zeros_like(sources)
        token_rows = torch.randperm(count, dtype=torch.int32, device=DEVICE)
        slots = torch.randperm(SLOTS, device=DEVICE)[:count]
        accepted = torch.ones(count, dtype=torch.bool, device=DEVICE)
        committed = torch.zeros_like(accepted)
        window_id = torch.ones(1, dtype=torch.int64, device=DEVICE)
        windows = torch.ones(LAYERS, count, dtype=torch.int64, device=DEVICE)
        counters = torch.zeros(len(ops.STAGE_COUNTERS), dtype=torch.int64, device=DEVICE)

        def stage() -> None:
            for layer in range(LAYERS):
                ops.stage_kv(*sources[:, layer], token_rows, *staged[:, layer], window_id, windows[layer])  # noqa: B023

        def commit() -> None:
            for layer in range(LAYERS):
                ops.commit_staged(*staged[:, layer], slots, accepted, *halves[layer], scale, scale, "auto")  # noqa: B023

        def write() -> None:
            for layer in range(LAYERS):
                ops.write_kv(*sources[:, layer], *halves[layer], slots, scale, scale, "auto")  # noqa: B023

        def accept() -> None:
            ops.accept_staged(accepted, slots, window_id, windows, SLOTS, committed, counters)  # noqa: B023

        variants = {"stage": captured(stage), "accept": captured(accept), "commit": captured(commit)}
        variants["write"] = captured(write)
        samples = alternating_on_gpu(variants, ROUNDS, lambda: read.sum())
        name = f"{requests}x{each}"
        rows += [
            row(f"stage_kv/{name}", ratios(samples, "stage", "write"), "ratio", "lower"),
            row(f"commit_staged/{name}", ratios(samples, "commit", "write"), "ratio", "lower"),
            row(f"accept_staged/{name}/us", samples["accept"], "us", "lower", digits=2),
            row(f"write_kv/{name}/us", samples["write"], "us", "lower", digits=2),
        ]
    return rows


def main() -> None:
    folder = asked_folder(__doc__)
    torch.manual_seed(0)
    read = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device=DEVICE)
    rows = window_rows(read) + move_rows(read) + staging_rows(read)
    save(this_machine(), "stage_ops", rows, folder)


if __name__ == "__main__":
    main()
