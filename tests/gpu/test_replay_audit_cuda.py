"""Test one captured CUDA graph, replayed ten thousand times. Every replay is audited on the device.

Three graphs alternate, and nothing is read back until the end. The first makes a new step (requests, slots, drafts,
outcome, keys and values) and its expected result in plain torch. The second is the transaction. The third counts the
differences.
"""

from __future__ import annotations

import pytest
import torch
from no_sync import no_waits_or_allocations

from nwor_ops import DraftCommitManager, LayerCache, Layout, Window

REPLAYS = 10_000
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, SIZE = 3, 12, 16, 4, 64
REQUESTS, MOST_DRAFTS, PADDING = 8, 4, 3
TOKENS, ROWS, SLOTS = REQUESTS * (MOST_DRAFTS + 1) + PADDING, REQUESTS * MOST_DRAFTS, BLOCKS * BLOCK_SIZE
SCALE = 0.37


class Replays:
    def __init__(self, device: str, kv_cache_dtype: str, by_counts: bool) -> None:
        self.by_counts = by_counts
        self.kv_cache_dtype = kv_cache_dtype
        dtype = torch.bfloat16 if kv_cache_dtype == "auto" else torch.uint8
        int32 = {"dtype": torch.int32, "device": device}
        self.starts, self.cu_drafts = torch.zeros(REQUESTS + 1, **int32), torch.zeros(REQUESTS, **int32)
        self.slots = torch.zeros(TOKENS, dtype=torch.int64, device=device)
        self.draft_ids = torch.zeros(ROWS, **int32)
        self.sampled = torch.zeros(REQUESTS, MOST_DRAFTS + 1, **int32)
        self.accepted, self.num_rejected = torch.zeros(2, REQUESTS, **int32)
        self.source = torch.zeros(LAYERS, TOKENS, HEADS, 2 * SIZE, dtype=torch.bfloat16, device=device)
        self.scale = torch.full((1,), SCALE, device=device)
        self.cache = torch.zeros(LAYERS, BLOCKS, BLOCK_SIZE, HEADS, 2 * SIZE, dtype=dtype, device=device)
        # One more slot, for rows that must not stay.
        self.expected = torch.zeros(LAYERS, SLOTS + 1, HEADS, 2 * SIZE, dtype=dtype, device=device)
        self.expected_log = torch.zeros(LAYERS, ROWS + 1, HEADS, 2 * SIZE, dtype=dtype, device=device)
        self.is_logged = torch.zeros(ROWS + 1, dtype=torch.bool, device=device)
        self.mismatches, self.drafted, self.rejected = torch.zeros(3, dtype=torch.int64, device=device)
        self.manager = DraftCommitManager(
            max_num_tokens=TOKENS, max_num_requests=REQUESTS, max_draft_tokens=ROWS, device=device
        )
        for layer, cache in enumerate(self.cache):
            self.manager.register_layer(str(layer), LayerCache.packed(cache))
        self.manager.allocate()
        self.manager.bind(Layout({"default": self.slots}))
        [[self.log]] = [of_class.logs for of_class in self.manager.recovery.classes]

    def new_step(self) -> None:
        device = self.slots.device
        drafts = torch.randint(0, MOST_DRAFTS + 1, (REQUESTS,), device=device)
        accepted = torch.minimum(torch.randint(0, MOST_DRAFTS + 1, (REQUESTS,), device=device), drafts)
        self.starts[1:] = (drafts + 1).cumsum(0)
        self.cu_drafts.copy_(drafts.cumsum(0))
        self.accepted.copy_(accepted)
        self.num_rejected.copy_(drafts - accepted)
        self.source.normal_()
        self.draft_ids.random_(0, 2**20)

        # The request of a token, and its index among the drafts; -1 = the target token.
        tokens = torch.arange(TOKENS, device=device)
        request = torch.searchsorted(self.starts[1:].long(), tokens, right=True)
        is_padding = request == REQUESTS
        request = request.clamp(max=REQUESTS - 1)
        draft = tokens - self.starts[request] - 1
        row = self.cu_drafts[request] - drafts[request] + draft

        is_skipped = is_padding | (tokens == torch.randint(0, 2 * TOKENS, (1,), device=device))
        slots = torch.rand(SLOTS, device=device).argsort()[:TOKENS]
        self.slots.copy_(torch.where(is_skipped, -1, slots))

        # The sampler repeats the accepted drafts. Its next token is sometimes equal to the rejected draft.
        column = torch.arange(MOST_DRAFTS + 1, device=device)
        ids = self.draft_ids[(self.cu_drafts - drafts)[:, None].add(column).clamp(max=ROWS - 1)]
        own = torch.where(accepted < drafts, torch.randint(0, 2, (REQUESTS,), device=device), 1)
        ends = torch.where(column == accepted[:, None], ids + own[:, None], -1)
        self.sampled.copy_(torch.where(column < accepted[:, None], ids, ends))

        self.expect(~is_skipped, draft >= accepted[request], draft >= 0, row, slots)
        self.drafted += drafts.sum()
        self.rejected += (drafts - accepted).sum()

    def expect(self, is_written, is_rejected, is_draft, row, slots) -> None:
        logged_row = torch.where(is_written & is_draft, row, ROWS)
        self.is_logged.zero_()
        self.is_logged.index_fill_(0, logged_row, True)
        self.expected_log[:, logged_row] = self.expected[:, slots]
        rows = self.source
        if self.kv_cache_dtype != "auto":
            rows = (rows.float() / self.scale).to(torch.float8_e4m3fn).view(torch.uint8)
        stays = is_written & ~(is_draft & is_rejected)
        self.expected[:, torch.where(stays, slots, SLOTS)] = rows

    def transaction(self) -> None:
        manager = self.manager
        manager.begin(Window(self.starts, self.cu_drafts))
        for layer in range(LAYERS):
            key, value = self.source[layer].split(SIZE, dim=-1)
            manager.write(
                str(layer), key, value, self.slots,
                k_scale=self.scale, v_scale=self.scale, kv_cache_dtype=self.kv_cache_dtype,
            )  # fmt: skip
        if self.by_counts:
            manager.commit_rejected(self.num_rejected)
        else:
            manager.commit(self.draft_ids, self.sampled)

    def audit(self) -> None:
        differs = self.cache.view(torch.uint8).view(LAYERS, SLOTS, -1) != self.expected[:, :SLOTS].view(
            torch.uint8
        ).view(LAYERS, SLOTS, -1)
        log_differs = (self.log != self.expected_log[:, :ROWS]).flatten(2).any(2) & self.is_logged[:ROWS]
        self.mismatches += differs.sum() + log_differs.sum()
        self.mismatches += (self.manager.buffers.num_accepted != self.accepted).sum()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("by_counts", [False, True])
def test_every_replay_of_one_graph(device, kv_cache_dtype, by_counts):
    torch.manual_seed(0)
    replays = Replays(device, kv_cache_dtype, by_counts)
    graphs = []
    for part in (replays.new_step, replays.transaction, replays.audit):
        part()  # so that nothing is loaded or allocated for the first time during a capture
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            part()
    for _ in range(REPLAYS):
        for graph in graphs:
            graph.replay()
    assert replays.mismatches.item() == 0
    stats = replays.manager.stats()
    assert stats.windows == REPLAYS + 1
    assert stats.drafted == replays.drafted.item() > REPLAYS
    assert stats.rejected == replays.rejected.item() > REPLAYS
    assert stats.accepted == stats.drafted - stats.rejected > REPLAYS


@pytest.mark.parametrize("by_counts", [False, True])
def test_transaction_does_not_allocate_or_sync(device, by_counts):
    replays = Replays(device, "auto", by_counts)
    for part in (replays.new_step, replays.transaction, replays.new_step):
        part()
    with no_waits_or_allocations():
        replays.transaction()
    replays.audit()
    assert replays.mismatches.item() == 0


def test_the_audit_finds_a_row_that_was_not_restored(device):
    """Without the restore of the commit, the same audit counts differences."""
    torch.manual_seed(0)
    replays = Replays(device, "auto", by_counts=False)
    recovery, nothing = replays.manager.recovery, torch.zeros_like(replays.manager.buffers.row_rejected)
    recovery.launches = [launch | {"row_rejected": nothing} for launch in recovery.launches]
    replays.manager.bind(Layout({"default": replays.slots}))
    for _ in range(3):
        replays.new_step()
        replays.transaction()
        replays.audit()
    assert replays.mismatches.item() > 0
