"""Compare the whole transaction on a GPU with vLLM's plain writer, and its kernels with a plain copy.

    VLLM_CORE=path/to/vllm/_C_stable_libtorch.abi3.so python benchmarks/cow_transaction.py [FOLDER]

It needs vLLM's compiled core: an installed vLLM, or the path of its library in VLLM_CORE. It takes half a minute.

The transaction is plan_window, 32 write_kv_logged, reject_rows and restore_slots. It is compared with 32 calls of
reshape_and_cache_flash in vLLM. Each side is one CUDA graph, and the two are replayed in turn. Before every replay,
outside the measured time, the step gets new slots, drafts and sampled tokens. Then 512 MB are read, so that no cache
row is left in L2 and the GPU is busy while the host launches the graph. The layers lie in one buffer of 8 GiB. Each
layer has its own keys and values, so that they are read from memory too. In `cow_transaction_hot` all layers use the
same keys and values. They stay in L2, as they do right after a model's layer has computed them. The writer of vLLM
gains most from that, because it reads nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from results import Row, asked_folder, ratios, row, save, this_machine
from torch import Tensor
from vllm_kernels import load_core

from nwor_ops import COUNTERS, ops

LAYERS, HEADS, BLOCK_SIZE = 32, 8, 16
SHAPES = ((1, 4), (16, 4), (64, 4), (256, 4), (64, 16), (256, 8))  # requests, drafts per request
ACCEPTED = 0.4
TARGETS = {(1, 4): 0.9, (16, 4): 0.9}
TARGET, LARGE_TARGET = 1.0, 0.8
BUFFER_BYTES, READ_BYTES = 2**33, 2**29
ROUNDS, LARGE_ROUNDS, LARGE_TOKENS, LARGE_LAYERS = 200, 50, 20_000, 4


@dataclass(frozen=True)
class Case:
    name: str
    head_size: int = 128
    kv_cache_dtype: str = "auto"
    heads_first: bool = False  # HND in vLLM: [B, H, N, 2D] in memory
    hot: bool = False  # all layers use the same keys and values


CASES = (
    Case("cow_transaction"),
    Case("cow_transaction_hot", hot=True),
    Case("cow_transaction_fp8", kv_cache_dtype="fp8_e4m3"),
    Case("cow_transaction_hnd", heads_first=True),
    Case("cow_transaction_d64", head_size=64),
    Case("cow_transaction_d192", head_size=192),
    Case("cow_transaction_d256", head_size=256),
)


def layer_caches(buffer: Tensor, case: Case, count: int = LAYERS) -> list[Tensor]:
    """Return packed caches ``[B, N, H, 2D]`` of `count` layers in one buffer."""
    cells = buffer.view(torch.bfloat16 if case.kv_cache_dtype == "auto" else torch.uint8)
    shape = (HEADS, BLOCK_SIZE) if case.heads_first else (BLOCK_SIZE, HEADS)
    blocks = cells.numel() // (count * HEADS * BLOCK_SIZE * 2 * case.head_size)
    used = count * blocks * HEADS * BLOCK_SIZE * 2 * case.head_size
    layers = cells[:used].view(count, blocks, *shape, 2 * case.head_size)
    return list(layers.transpose(2, 3) if case.heads_first else layers)


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
    variants: dict[str, Callable[[], None]], rounds: int, prepare: Callable[[], None]
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


def large_rows(buffer: Tensor, read: Tensor) -> list[Row]:
    """Return bytes read and written per second, divided by those of a plain copy of 1 GiB."""
    case = CASES[0]
    caches = layer_caches(buffer[: 2**32], case, LARGE_LAYERS)
    step, size, cache = Step(case, LARGE_TOKENS // 5, 4, caches), case.head_size, caches[0]
    tokens = step.slots.numel()
    every = torch.arange(tokens, dtype=torch.int32, device="cuda")
    log = torch.zeros(LARGE_LAYERS, tokens, HEADS, 2 * size, dtype=cache.dtype, device="cuda")
    rejected = torch.ones(tokens, dtype=torch.bool, device="cuda")
    copy_to, copy_from = buffer[-(2**31) :].view(2, -1)
    moved = 2 * tokens * HEADS * 2 * size * cache.element_size()  # one layer: each byte is read and written

    def prepare() -> None:
        step.load()
        read.sum()

    samples = alternating_on_gpu(
        {
            "copy": lambda: copy_to.copy_(copy_from),
            "write_kv": lambda: ops.write_kv(
                step.keys[0],
                step.values[0],
                cache[..., :size],
                cache[..., size:],
                step.slots,
                step.scale,
                step.scale,
                "auto",
            ),
            "log_slots": lambda: ops.log_slots(cache, step.slots, every, log[0]),
            "restore_slots": lambda: ops.restore_slots(caches, log, step.slots, rejected),
        },
        LARGE_ROUNDS,
        prepare,
    )
    bytes_of = {"copy": 2 * copy_to.numel(), "write_kv": moved, "log_slots": moved}
    bytes_of["restore_slots"] = LARGE_LAYERS * moved
    speeds = {name: [bytes_of[name] / us / 1e6 for us in times] for name, times in samples.items()}
    rows = [row("large/copy", speeds["copy"], "TB/s", "higher")]
    return rows + [
        row(f"large/{name}", ratios(speeds, name, "copy"), "ratio", "higher", LARGE_TARGET)
        for name in ("write_kv", "log_slots", "restore_slots")
    ]


def main() -> None:
    folder = asked_folder(__doc__)
    torch.manual_seed(0)
    load_core()
    writer = torch.ops._C_cache_ops.reshape_and_cache_flash
    buffer = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, device="cuda")
    read = torch.zeros(READ_BYTES // 4, dtype=torch.float32, device="cuda")
    rows = [figure for case in CASES for figure in transaction_rows(case, buffer, read, writer)]
    rows += large_rows(buffer, read)
    save(this_machine(), "cow_transaction", rows, folder)


if __name__ == "__main__":
    main()
