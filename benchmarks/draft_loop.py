"""Compare a drafter's loop as one CUDA graph, as one graph per step, and eager, in turn in one process.

    python benchmarks/draft_loop.py [FOLDER]

It does not need vLLM, and takes about a minute. The drafter has one layer of an 8B Llama (hidden size 4096, 32 heads of
128, 8 KV heads, MLP of 14336) and its head of 128,256 tokens, in bfloat16. Its paged cache has 1,024 tokens per
request. `draft_loop_small` has half the width and 32,000 tokens, so that a step is short compared with its launches.
The attention gathers its pages in plain torch. torch.compile compiles the layer in every mode, as a serving engine
would.

The time is measured from the first launch of steps 1 to K - 1 until the device is done, starting with an idle GPU.
Every run starts with the same two launches (positions copied back, `prepare_decode_inputs`). The idle share comes from
a profile of the same runs. It is the share of the time in which the GPU ran nothing, from the first kernel after those
two launches to the end of the last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from results import Row, alternating, asked_folder, ratios, row, save, this_machine
from torch import Tensor
from torch.profiler import profile, supported_activities

from nwor_ops import ops
from nwor_ops.drafter import DraftBuffers, DraftLoop, DraftMetadata, DraftSampler, GraphKey

BLOCK_SIZE, MAX_LEN, START = 16, 1024, 900
BATCHES, NUM_DRAFTS = (1, 4, 16, 64), (2, 3, 4, 6, 8)
PROFILED_BATCHES, PROFILED_DRAFTS, PROFILED_RUNS = (1, 16, 64), 4, 12
IDLE_TARGET, LAUNCHES_BEFORE = 0.05, 2
ROUNDS, CALLS = 15, 4
MODES = ("loop", "step", "eager")


@dataclass(frozen=True)
class Size:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    head_size: int = 128


LARGE = Size("draft_loop", 4096, 32, 8, 14336, 128_256)
SMALL = Size("draft_loop_small", 2048, 16, 4, 7168, 32_000)


class Metadata(DraftMetadata):
    """Slots, and the row of the block table of each row; both on the device."""

    def __init__(self, buffers: DraftBuffers, block_tables: Tensor) -> None:
        self.buffers, self.block_tables = buffers, block_tables
        self.slots = torch.full((1, buffers.max_num_reqs), -1, dtype=torch.int64, device="cuda")
        self.tables = torch.zeros_like(block_tables)

    def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> tuple[Tensor, Tensor]:
        metadata = (self.slots[0, : key.num_reqs], self.tables[: key.num_reqs])
        self.update(key, metadata)
        return metadata

    def update(self, key: GraphKey, metadata: tuple[Tensor, Tensor]) -> None:
        idx_mapping = self.buffers.idx_mapping[: key.num_reqs]
        ops.compute_slot_mappings(
            idx_mapping, self.buffers.query_start_loc, self.buffers.positions, [self.block_tables], [BLOCK_SIZE],
            self.slots,
        )  # fmt: skip
        metadata[1].copy_(self.block_tables[idx_mapping.clamp(min=0)])


class Layer:
    """One decoder layer and the head, with random weights."""

    def __init__(self, size: Size, max_num_reqs: int) -> None:
        self.size = size
        attention = size.heads * size.head_size

        def weight(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5

        self.embedding, self.head = weight(size.vocab, size.hidden), weight(size.vocab, size.hidden)
        self.qkv = weight(attention + 2 * size.kv_heads * size.head_size, size.hidden)
        self.out = weight(size.hidden, attention)
        self.gate_up, self.down = weight(2 * size.intermediate, size.hidden), weight(size.hidden, size.intermediate)
        self.norm = torch.ones(size.hidden, device="cuda", dtype=torch.bfloat16)
        columns = MAX_LEN // BLOCK_SIZE
        self.block_tables = torch.randperm(max_num_reqs * columns, device="cuda").int().view(max_num_reqs, columns)
        shape = (max_num_reqs * columns, BLOCK_SIZE, size.kv_heads, 2 * size.head_size)
        self.cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        self.scale = torch.ones(1, device="cuda")
        self.places = torch.arange(MAX_LEN, device="cuda")
        self.forward = torch.compile(self._forward, fullgraph=True, dynamic=False)
        self.logits = torch.compile(self._logits, fullgraph=True, dynamic=False)

    def normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size.hidden,), self.norm, 1e-6)

    def attend(self, query: Tensor, tables: Tensor, seq_lens: Tensor) -> Tensor:
        size, rows = self.size, len(query)
        pages = self.cache[tables].flatten(1, 2).transpose(1, 2)  # [N, H, S, 2D]
        keys, values = pages[..., : size.head_size], pages[..., size.head_size :]
        grouped = query.view(rows, size.kv_heads, -1, size.head_size) * size.head_size**-0.5
        scores = torch.matmul(grouped, keys.transpose(2, 3))
        hidden = (self.places >= seq_lens[:, None])[:, None, None]
        return torch.matmul(scores.masked_fill(hidden, -1e30).softmax(-1), values).flatten(1)

    def _forward(self, ids: Tensor, seq_lens: Tensor, metadata: tuple[Tensor, Tensor]) -> Tensor:
        size, (slots, tables) = self.size, metadata
        x = self.embedding[ids]
        sizes = [size.heads * size.head_size, *[size.kv_heads * size.head_size] * 2]
        query, key, value = F.linear(self.normed(x), self.qkv).split(sizes, dim=1)
        ops.write_kv(
            key.view(len(x), size.kv_heads, -1), value.view(len(x), size.kv_heads, -1),
            self.cache[..., : size.head_size], self.cache[..., size.head_size :], slots, self.scale, self.scale, "auto",
        )  # fmt: skip
        x = x + F.linear(self.attend(query, tables, seq_lens), self.out)
        gate, up = F.linear(self.normed(x), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.normed(hidden), self.head)


class Cell:
    """One batch size and K: a loop with its graphs. Each run starts from the same positions."""

    def __init__(self, layer: Layer, batch: int, num_drafts: int) -> None:
        self.batch = batch
        self.buffers = buffers = DraftBuffers.allocate(batch, num_drafts, "cuda")
        temperature = torch.ones(batch, device="cuda")
        sampler = DraftSampler(buffers, temperature, torch.arange(batch, device="cuda"), layer.logits)
        metadata = Metadata(buffers, layer.block_tables[:batch])

        def model(key: GraphKey, metadata: tuple[Tensor, Tensor]) -> Tensor:
            return layer.forward(buffers.input_ids[: key.num_reqs], buffers.seq_lens[: key.num_reqs], metadata)

        self.loop = DraftLoop(model, sampler, buffers, metadata, num_drafts, MAX_LEN)
        self.loop.capture([GraphKey(batch)], ("step", "loop"))
        self.start = torch.full((batch,), START, device="cuda")
        self.target_lens = torch.full((batch,), START + 1, dtype=torch.int32, device="cuda")
        self.rejected = torch.zeros(batch, dtype=torch.int32, device="cuda")
        buffers.idx_mapping.copy_(torch.arange(batch))

    def run(self, mode: str) -> None:
        buffers = self.buffers
        buffers.positions.copy_(self.start)
        ops.prepare_decode_inputs(
            buffers.draft_tokens, self.target_lens, self.rejected, buffers.input_ids, buffers.positions,
            buffers.query_start_loc, buffers.seq_lens, MAX_LEN, buffers.idx_mapping,
        )  # fmt: skip
        self.loop.run(self.batch, mode, inert_tails=True)
        torch.cuda.synchronize()

    def variants(self) -> dict[str, Callable[[], None]]:
        return {mode: (lambda mode=mode: self.run(mode)) for mode in MODES}

    def equal_drafts(self) -> float:
        """Return the share of drafts that are equal in all three modes."""
        drafts = []
        for mode in MODES:
            self.run(mode)
            drafts.append(self.buffers.draft_tokens.clone())
        return float(((drafts[0] == drafts[1]) & (drafts[0] == drafts[2])).double().mean())


def time_rows(size: Size, layer: Layer, batch: int, num_drafts: int) -> list[Row]:
    cell = Cell(layer, batch, num_drafts)
    equal = cell.equal_drafts()
    samples = alternating(cell.variants(), ROUNDS, CALLS)
    name = f"{size.name}/{batch}x{num_drafts}"
    return [
        row(f"{name}/equal_drafts", [equal], "share", "higher", 1.0),
        row(f"{name}/loop_over_eager", ratios(samples, "loop", "eager"), "ratio", "lower"),
        row(f"{name}/loop_over_step", ratios(samples, "loop", "step"), "ratio", "lower"),
        *(row(f"{name}/{mode}_us", [1e6 * s for s in samples[mode]], "us", "lower", digits=1) for mode in MODES),
    ]


def idle_share(spans: list[tuple[int, int]]) -> float:
    """Return the share of the time from the first start to the last end that no span covers. Spans are in
    ns, sorted."""
    first, covered_to = spans[0]
    idle = 0
    for start, end in spans:
        idle += max(start - covered_to, 0)
        covered_to = max(covered_to, end)
    return idle / (covered_to - first)


def idle_rows(size: Size, layer: Layer, batch: int) -> list[Row]:
    cell, rows = Cell(layer, batch, PROFILED_DRAFTS), []
    for mode, run in cell.variants().items():
        run()
        with profile(activities=supported_activities()) as profiled:
            for _ in range(PROFILED_RUNS + 2):
                run()
                time.sleep(0.005)  # a gap that separates the runs
        events = list(profiled.profiler.kineto_results.events())
        on_host = {event.name() for event in events if event.device_type().name == "CPU"}
        spans = sorted(
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in events
            if event.device_type().name == "CUDA" and event.name() not in on_host and "Sync" not in event.name()
        )
        runs = [spans[:1]]
        for before, span in pairwise(spans):
            if span[0] - before[1] > 2_500_000:
                runs.append([])
            runs[-1].append(span)
        loops = [spans_of_run[LAUNCHES_BEFORE:] for spans_of_run in runs[2:]]  # without the start of the profiler
        name = f"{size.name}/{batch}x{PROFILED_DRAFTS}/{mode}"
        target = IDLE_TARGET if mode == "loop" and size is LARGE else None
        rows.append(row(f"{name}_idle_share", [idle_share(spans) for spans in loops], "share", "lower", target))
        rows.append(row(f"{name}_kernels", [float(statistics.median(map(len, loops)))], "kernels", "lower"))
    return rows


@torch.no_grad()
def main() -> None:
    folder = asked_folder(__doc__)
    torch._dynamo.config.recompile_limit = 2 * len(BATCHES)  # one entry per shape
    torch.manual_seed(0)
    rows: list[Row] = []
    for size, drafts in ((LARGE, NUM_DRAFTS), (SMALL, (PROFILED_DRAFTS,))):
        layer = Layer(size, max(BATCHES))
        for batch in BATCHES:
            for num_drafts in drafts:
                rows += time_rows(size, layer, batch, num_drafts)
        for batch in PROFILED_BATCHES:
            rows += idle_rows(size, layer, batch)
        del layer
    save(this_machine(), "draft_loop", rows, folder)


if __name__ == "__main__":
    main()
