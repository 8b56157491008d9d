"""Test the family undo on a GPU beyond ops/: large caches, streams, transactions in CUDA graphs without allocation
or sync."""

from __future__ import annotations

import pytest
import torch
from no_sync import no_waits_or_allocations

import nwor_ops
from nwor_ops import ops
from nwor_ops.testing.layouts import Shape, make_pages, same_memory, twin
from nwor_ops.testing.oracle import undo as oracle
from nwor_ops.testing.raw_rows import raw


def test_offsets_beyond_32_bits(device):
    """A packed cache of more than 2^31 elements: its last slots are written and restored."""
    blocks = 2**31 // (16 * 8 * 256) + 4
    cache = torch.zeros(blocks, 16, 8, 256, dtype=torch.bfloat16, device=device)
    slots = blocks * 16 - 1 - torch.arange(5, device=device)
    key, value = torch.randn(2, 5, 8, 128, device=device).bfloat16()
    log_rows, scale = torch.arange(5, dtype=torch.int32, device=device), torch.ones(1, device=device)
    logs = torch.ones(2, 1, 5, 8, 128, dtype=torch.bfloat16, device=device)
    planes = cache[..., :128], cache[..., 128:]
    ops.write_kv_logged(key, value, *planes, slots, scale, scale, "auto", log_rows, logs[0, 0], logs[1, 0])
    assert torch.equal(cache.view(-1, 8, 256)[slots], torch.cat([key, value], dim=2))
    assert not logs.any()
    for plane, log in zip(planes, logs, strict=True):
        ops.restore_slots([plane], log, slots, torch.ones(5, dtype=torch.bool, device=device))
    assert not cache.any()


def test_too_many_slots_are_refused(device):
    """Slot numbers are divided in 31 bits."""
    cache = torch.zeros(1, dtype=torch.uint8, device=device).expand(2**31, 1, 1, 1)
    slots, log_rows = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    log = torch.zeros(1, 1, 1, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"^log_slots: a cache must have fewer than 2\^31 slots"):
        ops.log_slots(cache, slots, log_rows, log)


# ---------------------------------------------------------------- a whole transaction

REQUESTS, MOST_DRAFTS, PADDING = 4, 4, 3


class Transaction:
    """One step of a small model in buffers with fixed addresses, and a model of its result.

    `load` copies a random step into the buffers, and `run` is the transaction. `expect` is the audit: the cache of a
    run without the rejected drafts, computed by plain indexing on the CPU.
    """

    shape = Shape(blocks=6, block_size=16, heads=4, key_width=64, value_width=32, layers=4)

    def __init__(self, device, layout, kv_cache_dtype, seed=0, rejects_by_counts=False):
        self.rejects_by_counts = rejects_by_counts
        self.random = torch.Generator().manual_seed(seed)
        self.kv_cache_dtype = kv_cache_dtype
        dtype = torch.bfloat16 if kv_cache_dtype == "auto" else torch.uint8
        self.model = make_pages(layout, self.shape, dtype, offset=1)
        self.pages = twin(self.model, device)
        tokens, rows = REQUESTS * (1 + MOST_DRAFTS) + PADDING, REQUESTS * MOST_DRAFTS
        s = self.shape
        sizes = {
            "query_start_loc": (REQUESTS + 1,), "cu": (REQUESTS,), "starts": (REQUESTS + 1,), "log_rows": (tokens,),
            "row_requests": (rows,), "row_positions": (rows,), "num_accepted": (REQUESTS,),
            "num_rejected": (REQUESTS,),
        }  # fmt: skip
        self.int32 = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
        self.slots = torch.full((tokens,), -1, device=device)
        self.drafts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.sampled = torch.full((REQUESTS, MOST_DRAFTS + 1), -1, device=device)
        self.row_slots = torch.zeros(1, rows, dtype=torch.int64, device=device)
        self.rejected = torch.zeros(rows, dtype=torch.bool, device=device)
        self.counters = torch.zeros(len(nwor_ops.COUNTERS), dtype=torch.int64, device=device)
        self.window_id = torch.zeros(1, dtype=torch.int64, device=device)
        self.windows = torch.zeros(s.layers, rows, dtype=torch.int64, device=device)
        self.scale = torch.full((1,), 0.5, device=device)
        self.sources = [
            torch.zeros(s.layers, tokens, s.heads, width, dtype=torch.bfloat16, device=device)
            for width in (s.key_width, s.value_width)
        ]
        self.logs = [
            torch.zeros(s.layers, rows, s.heads, width, dtype=dtype, device=device)
            for width in (s.key_width, s.value_width)
        ]
        self.expected_counters = [0] * len(nwor_ops.COUNTERS)

    def run(self):
        i = self.int32
        ops.plan_window(
            i["query_start_loc"], i["cu"], [self.slots], i["log_rows"], self.row_slots, i["row_requests"],
            i["row_positions"], self.counters, i["starts"],
        )  # fmt: skip
        for layer in range(self.shape.layers):
            ops.write_kv_logged(
                self.sources[0][layer], self.sources[1][layer], self.pages.key_caches[layer],
                self.pages.value_caches[layer], self.slots, self.scale, self.scale, self.kv_cache_dtype,
                i["log_rows"], self.logs[0][layer], self.logs[1][layer], self.window_id, self.windows[layer],
            )  # fmt: skip
        planes = list(zip(self.pages[:2], self.logs, strict=True))
        windows = None, self.window_id, self.windows
        outputs = self.rejected, i["num_accepted"], self.counters
        if self.rejects_by_counts:
            caches, log = planes.pop(0)
            ops.restore_slots_from_rejected(
                caches, log, self.row_slots[0], i["num_rejected"], i["starts"], *outputs, *windows
            )
        else:
            ops.reject_rows(self.drafts, self.sampled, i["starts"], *outputs)
        for caches, log in planes:
            ops.restore_slots(caches, log, self.row_slots[0], self.rejected, *windows)

    def draw(self, low, high, *size):
        return torch.randint(low, high + 1, size, generator=self.random)

    def load(self):
        """Load a step of random requests, drafts, slots, rows and outcome. The model gets the rows that stay."""
        drafts = self.draw(0, MOST_DRAFTS, REQUESTS)
        accepted = torch.minimum(self.draw(0, MOST_DRAFTS, REQUESTS), drafts)
        lengths = drafts + 1  # the target token and its drafts
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        slots = torch.full((len(self.slots),), -1)
        used = int(starts[-1])
        slots[:used] = torch.randperm(self.shape.blocks * self.shape.block_size, generator=self.random)[:used]
        slots[self.draw(0, used - 1, 1)] = -1
        ids = self.draw(0, 2**20, len(self.drafts))
        sampled, stays, before = torch.full(self.sampled.shape, -1), slots >= 0, 0
        for q, (n, a) in enumerate(zip(drafts.tolist(), accepted.tolist(), strict=True)):
            sampled[q, :a] = ids[before : before + a]
            sampled[q, a] = ids[before + a] + 1 if a < n else 5
            if a < n and self.draw(0, 1, 1):  # the next token shows that a replacement equal to the draft was rejected
                sampled[q, a] = ids[before + a]
            before += n
            stays[starts[q + 1] - (n - a) : starts[q + 1]] = False
        sources = [torch.randn(s.shape, generator=self.random).bfloat16() for s in self.sources]
        for buffer, content in [
            (self.int32["query_start_loc"], starts), (self.int32["cu"], drafts.cumsum(0)),
            (self.int32["num_rejected"], drafts - accepted),
            (self.slots, slots), (self.drafts, ids), (self.sampled, sampled),
            *zip(self.sources, sources, strict=True),
        ]:  # fmt: skip
            buffer.copy_(content)
        self.window_id.add_(1)
        self.expect(slots, stays, sources)
        counts = (1, int(drafts.sum()), int(accepted.sum()), int((drafts - accepted).sum()), 0)
        self.expected_counters = [old + new for old, new in zip(self.expected_counters, counts, strict=True)]

    def expect(self, slots, stays, sources):
        kept = slots[stays]
        blocks, offsets = kept // self.shape.block_size, kept % self.shape.block_size
        for caches, source in zip(self.model[:2], sources, strict=True):
            for layer, cache in enumerate(caches):
                rows = source[layer][stays]
                if self.kv_cache_dtype == "auto":
                    raw(cache)[blocks, offsets] = raw(rows)
                else:
                    cache[blocks, offsets] = oracle.to_fp8(rows.float() / 0.5, self.kv_cache_dtype)

    def audit(self):
        assert same_memory(self.model[:2], self.pages[:2])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("layout", ["hnd", "packed", "one_backing", "padded", "vec"])
@pytest.mark.parametrize("rejects_by_counts", [False, True])
def test_transaction(device, layout, kv_cache_dtype, rejects_by_counts):
    transaction = Transaction(device, layout, kv_cache_dtype, rejects_by_counts=rejects_by_counts)
    for _ in range(20):
        transaction.load()
        transaction.run()
        transaction.audit()
    assert transaction.counters.tolist() == transaction.expected_counters


@pytest.mark.parametrize("rejects_by_counts", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
def test_transaction_in_a_cuda_graph(device, kv_cache_dtype, rejects_by_counts):
    """Captured once. Every replay has new requests, slots, rows and outcomes."""
    transaction = Transaction(device, "one_backing", kv_cache_dtype, seed=1, rejects_by_counts=rejects_by_counts)
    transaction.load()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        transaction.run()
    torch.cuda.current_stream().wait_stream(stream)
    transaction.audit()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transaction.run()
    transaction.audit()  # capturing runs nothing
    for _ in range(300):
        transaction.load()
        graph.replay()
        transaction.audit()
    assert transaction.counters.tolist() == transaction.expected_counters


def test_transaction_does_not_allocate_or_sync(device):
    transaction = Transaction(device, "packed", "auto")
    transaction.load()
    transaction.run()
    transaction.load()
    with no_waits_or_allocations():
        transaction.run()
    transaction.audit()


def test_cancel_restores_every_draft_row(device):
    """All rows rejected: after the restore only prompt and target tokens are new."""
    transaction = Transaction(device, "packed", "auto")
    transaction.load()
    i = transaction.int32
    transaction.sampled[:, 1:] = -1  # the sampler stopped before any draft
    transaction.sampled[:, 0] = -2
    before = twin(transaction.pages)
    transaction.run()
    assert not i["num_accepted"].any()
    is_draft = i["log_rows"] >= 0
    slots = torch.where(is_draft, -1, transaction.slots)
    for layer in range(transaction.shape.layers):
        ops.write_kv(
            transaction.sources[0][layer], transaction.sources[1][layer], before.key_caches[layer],
            before.value_caches[layer], slots, transaction.scale, transaction.scale, "auto",
        )  # fmt: skip
    assert same_memory(before[:2], transaction.pages[:2])
