"""Compare the whole transaction on a GPU with vLLM's plain writer, and shadow pages with a plain copy.

    VLLM_CORE=path/to/vllm/_C_stable_libtorch.abi3.so python benchmarks/transaction_kernels.py [--folder FOLDER]

It needs vLLM's compiled core: an installed vLLM, or the path of its library in VLLM_CORE. It takes a minute.

Each side is one CUDA graph, and the sides are replayed in turn. Before every replay, outside the measured time, the
step gets new slots, drafts and sampled tokens. Then 512 MB are read, so that no cache row is left in L2 and the GPU is
busy while the host launches the graph.

``cow_transaction`` is plan_window, 32 write_kv_logged, reject_rows and restore_slots, compared with 32 calls of
reshape_and_cache_flash in vLLM. Each layer has its own keys and values, so that they are read from memory too. In
`cow_transaction_hot` all layers use the same ones. They stay in L2, as right after a model's layer has computed them.

``stage_ops`` are open_window and close_window of 32 layers. Every request has a target token and K drafts after a tail
page with a random number of rows. All drafts are accepted, so close copies as much as possible. The rival copies as
many bytes with one `copy_`: a ratio of 0.8 means 80 % of its speed. `held` is an open whose rows are already in the
shadow pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from results import Row, new_parser, ratios, row, save, this_machine
from torch import Tensor
from vllm_kernels import load_core

from nwor_ops import COUNTERS, num_shadow_blocks, ops

LAYERS, HEADS, BLOCK_SIZE = 32, 8, 16
SHAPES = ((1, 4), (16, 4), (64, 4), (256, 4), (64, 16), (256, 8))  # requests, drafts per request
ACCEPTED = 0.4
TARGETS = {(1, 4): 0.9, (16, 4): 0.9}
TARGET = 1.0
BUFFER_BYTES, READ_BYTES = 2**33, 2**29
ROUNDS = 200
# Requests, drafts per request, block size.
WINDOWS = ((1, 4, 16), (16, 4, 16), (64, 4, 16), (256, 4, 16), (256, 8, 16), (256, 8, 64))
COPY_TARGET, LARGE = 0.8, 256
SLOTS, WIDTH = 128 * 1024, 256
ROW_BYTES = HEADS * WIDTH * 2


@dataclass(frozen=True)
class Case:
    name: str
    head_size: int = 128
    kv_cache_dtype: str = "auto"
    hot: bool = False  # all layers use the same keys and values


CASES = (
    Case("cow_transaction"),
    Case("cow_transaction_hot", hot=True),
    Case("cow_transaction_fp8", kv_cache_dtype="fp8_e4m3"),
    Case("cow_transaction_d64", head_size=64),
    Case("cow_transaction_d256", head_size=256),
)


def layer_caches(buffer: Tensor, case: Case) -> list[Tensor]:
    """Return packed caches ``[B, N, H, 2D]`` of all layers in one buffer."""
    cells = buffer.view(torch.bfloat16 if case.kv_cache_dtype == "auto" else torch.uint8)
    blocks = cells.numel() // (LAYERS * HEADS * BLOCK_SIZE * 2 * case.head_size)
    used = LAYERS * blocks * HEADS * BLOCK_SIZE * 2 * case.head_size
    return list(cells[:used].view(LAYERS, blocks, BLOCK_SIZE, HEADS, 2 * case.head_size))


class Step:
    """One verification step in buffers that never move; `load` writes another one."""

    def __init__(self, case: Case, requests: int, drafts: int, caches: list[Tensor]) -> None:
        self.case, self.requests, self.drafts, self.caches = case, requests, drafts, caches
        tokens, rows, size = requests * (drafts + 1), requests * drafts, case.head_size
        int32 = {"dtype": torch.int32, "device": "cuda"}
        sources = torch.randn(2, 1 if case.hot else len(caches), tokens, HEADS, size, device="cuda").bfloat16()
        self.keys, self.values = sources.expand(-1, len(caches), -1, -1, -1)
        self.scale = torch.full((1,), 0.37, device="cuda")
        self.slots = torch.empty(tokens, dtype=torch.int64, device="cuda")
        self.starts = torch.arange(requests + 1, **int32) * (drafts + 1)
        self.cu_drafts = torch.arange(1, requests + 1, **int32) * drafts
        self.draft_ids = torch.empty(rows, **int32)
        self.sampled = torch.empty(requests, drafts + 1, **int32)
        self.log = torch.zeros(len(caches), rows, HEADS, 2 * size, dtype=caches[0].dtype, device="cuda")
        self.row_windows = torch.zeros(len(caches), rows, dtype=torch.int64, device="cuda")
        self.window_id = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.log_rows = torch.empty(tokens, **int32)
        self.row_slots = torch.empty(1, rows, dtype=torch.int64, device="cuda")
        self.row_requests, self.row_positions = torch.empty(2, rows, **int32)
        self.rejected = torch.empty(rows, dtype=torch.bool, device="cuda")
        self.num_accepted = torch.empty(requests, **int32)
        self.draft_starts = torch.empty(requests + 1, **int32)
        self.counters = torch.zeros(len(COUNTERS), dtype=torch.int64, device="cuda")

    def load(self) -> None:
        """Write new blocks for every request, and new drafts, of which 60 % are rejected."""
        blocks = -(-(self.drafts + BLOCK_SIZE) // BLOCK_SIZE)
        places = torch.randperm(self.caches[0].shape[0] // blocks, device="cuda")[: self.requests, None]
        inside = torch.randint(0, BLOCK_SIZE, (self.requests, 1), device="cuda")
        offsets = torch.arange(self.drafts + 1, device="cuda")
        torch.add(places * (blocks * BLOCK_SIZE) + inside, offsets, out=self.slots.view(self.requests, -1))
        self.draft_ids.random_(0, 2**16)
        share = ACCEPTED * self.drafts + torch.rand(self.requests, 1, device="cuda")
        accepted = share.floor().int()  # the mean is exact
        ids = torch.nn.functional.pad(self.draft_ids.view(self.requests, -1), (0, 1))
        replaced = torch.where(offsets == accepted, ids + 1, -1)
        self.sampled.copy_(torch.where(offsets < accepted, ids, replaced))
        self.window_id.add_(1)

    def transaction(self) -> None:
        ops.plan_window(
            self.starts, self.cu_drafts, [self.slots], self.log_rows, self.row_slots, self.row_requests,
            self.row_positions, self.counters, self.draft_starts,
        )  # fmt: skip
        for layer in range(len(self.caches)):
            self.write_layer(layer)
        ops.reject_rows(
            self.draft_ids, self.sampled, self.draft_starts, self.rejected, self.num_accepted, self.counters
        )
        ops.restore_slots(
            self.caches, self.log, self.row_slots[0], self.rejected, None, self.window_id, self.row_windows
        )

    def write_layer(self, layer: int) -> None:
        size, cache, log = self.case.head_size, self.caches[layer], self.log[layer]
        ops.write_kv_logged(
            self.keys[layer], self.values[layer], cache[..., :size], cache[..., size:], self.slots,
            self.scale, self.scale, self.case.kv_cache_dtype, self.log_rows, log[..., :size], log[..., size:],
            self.window_id, self.row_windows[layer],
        )  # fmt: skip

    def plain_writes(self, writer: Callable[..., None]) -> None:
        size = self.case.head_size
        for layer, cache in enumerate(self.caches):
            writer(
                self.keys[layer], self.values[layer], cache[..., :size], cache[..., size:], self.slots,
                self.case.kv_cache_dtype, self.scale, self.scale,
            )  # fmt: skip


def captured(run: Callable[[], None]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(_used: object = run) -> None:  # the graph reads and writes tensors that the function holds
        graph.replay()

    return replay


def alternating_on_gpu(
    variants: dict[str, Callable[[], None]], rounds: int, prepare: Callable[[], object]
) -> dict[str, list[float]]:
    """Return microseconds of each variant by CUDA events, measured in turn: A B, A B, ...

    `prepare` runs before each variant, outside the measured time.
    """
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in variants}
    for number in range(rounds + 3):
        for name, run in variants.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            prepare()
            begin.record()
            run()
            end.record()
            if number >= 3:
                marks[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: [1000 * begin.elapsed_time(end) for begin, end in pairs] for name, pairs in marks.items()}


def transaction_rows(case: Case, buffer: Tensor, read: Tensor, writer: Callable[..., None]) -> list[Row]:
    rows, caches = [], layer_caches(buffer, case)
    for requests, drafts in SHAPES:
        step = Step(case, requests, drafts, caches)

        def prepare(step: Step = step) -> None:
            step.load()
            read.sum()

        step.load()
        samples = alternating_on_gpu(
            {"ours": captured(step.transaction), "vllm": captured(lambda step=step: step.plain_writes(writer))},
            ROUNDS,
            prepare,
        )
        name = f"{case.name}/{requests}x{drafts}"
        rows += [
            row(name, ratios(samples, "ours", "vllm"), "ratio", "lower", TARGETS.get((requests, drafts), TARGET)),
            row(f"{name}/transaction", samples["ours"], "us", "lower", digits=1),
            row(f"{name}/vllm_writes", samples["vllm"], "us", "lower", digits=1),
        ]
    return rows


# ---------------------------------------------------------------- shadow pages


class Window:
    """A window of requests in buffers that never move. `reset` undoes the effects of open and close."""

    def __init__(self, planes: list[Tensor], requests: int, drafts: int) -> None:
        blocks, block_size = planes[0].shape[:2]
        tokens, pages = drafts + 1, 4
        self.planes, self.drafts = planes, drafts
        shadow = num_shadow_blocks(requests, drafts, block_size)
        int32 = {"dtype": torch.int32, "device": "cuda"}
        fill = torch.randint(0, block_size, (requests,), device="cuda")  # number of committed rows of each tail page
        lengths = block_size + fill + tokens
        columns = max(pages, -(-(2 * block_size + tokens) // block_size))
        order = torch.randperm(blocks - shadow, device="cuda")[: requests * columns]
        self.table = order.int().view(requests, columns)
        positions = lengths[:, None] - tokens + torch.arange(tokens, device="cuda")
        own_blocks = self.table.long().gather(1, positions // block_size)
        self.slots = (own_blocks * block_size + positions % block_size).flatten()
        self.own_slots, self.own_table = self.slots.clone(), self.table.clone()
        self.starts = torch.arange(requests + 1, **int32) * tokens
        self.draft_starts = torch.arange(requests + 1, **int32) * drafts
        self.seq_lens = lengths.int()
        self.row_slots = self.slots.view(requests, tokens)[:, 1:].reshape(1, -1).contiguous()
        self.shadow_blocks = torch.arange(blocks - shadow, blocks, **int32).view(1, requests, -1)
        self.held = torch.full(self.shadow_blocks.shape, -1, device="cuda")
        self.saved = torch.empty(1, requests * tokens, dtype=torch.int64, device="cuda")
        self.tails = torch.empty(1, requests, **int32)
        self.rejected = torch.zeros(requests * drafts, dtype=torch.bool, device="cuda")
        self.states = torch.arange(requests, **int32)
        # Number of rows in the tail page before this step: one fewer than its fill if the target token is in it.
        first_draft = fill + 1
        tail_fill = torch.where(first_draft < block_size, fill, 0)
        self.opened_rows = int(tail_fill.sum())
        self.shared_rows = int(
            (first_draft < block_size).sum()
        )  # number of target tokens in the page of the first draft
        self.closed_rows = self.shared_rows + requests * drafts

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
    source, target = torch.zeros(2, max(rows, 1) * LAYERS * ROW_BYTES, dtype=torch.uint8, device="cuda")
    return captured(lambda: target.copy_(source))


def window_rows(read: Tensor) -> list[Row]:
    rows = []
    for requests, drafts, block_size in WINDOWS:
        planes = torch.zeros(LAYERS, SLOTS // block_size, block_size, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
        window = Window(list(planes), requests, drafts)

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
        target = COPY_TARGET if requests == LARGE else None
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


def main() -> None:
    folder = new_parser(__doc__).parse_args().folder
    torch.manual_seed(0)
    load_core()
    writer = torch.ops._C_cache_ops.reshape_and_cache_flash
    buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device="cuda")
    read = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device="cuda")
    rows = [figure for case in CASES for figure in transaction_rows(case, buffer, read, writer)]
    save(this_machine(), "cow_transaction", rows, folder)
    del buffer
    torch.cuda.empty_cache()
    save(this_machine(), "stage_ops", window_rows(read), folder)


if __name__ == "__main__":
    main()
