"""Self-tests for ``nwor-ops doctor``: one small call of every op, compared with plain torch.

They only answer whether the ops run on this machine; the test suite tests the ops. Two families have their own modules:
:mod:`nwor_ops.cli.self_test_drafter` and :mod:`nwor_ops.cli.self_test_recurrent`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.cli import self_test_drafter, self_test_recurrent
from nwor_ops.kv_cache import LayerCache
from nwor_ops.testing.comparison import difference
from nwor_ops.transaction.manager import DraftCommitManager
from nwor_ops.transaction.shadow_pages import num_shadow_blocks
from nwor_ops.transaction.window import Window

# Two requests: a target and drafts 60 to 62; a prompt token, a target and drafts 70 and 71.
QUERY_START_LOC = (0, 4, 8)
CU_NUM_DRAFT_TOKENS = (3, 5)
DRAFT_TOKEN_IDS = (60, 61, 62, 70, 71)
SLOTS = (8, 9, 10, 11, 17, 18, 19, -1)
LOG_ROWS = (-1, 0, 1, 2, -1, -1, 3, 4)
# The first request accepts one draft, the second none.
SAMPLED_TOKEN_IDS = ((60, 99, -1, -1), (98, -1, -1, -1))
ACCEPTED = (True, False, False, False, False)
NUM_ACCEPTED = (1, 0)
NUM_REJECTED = (2, 2)
BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 3, 8, 2, 16
LOG_SIZE = 6


class _Sample:
    """A cache [B, N, H, 2 * D] with data in it, and this step's keys and values."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

        self.device = device
        self.cache = drawn(BLOCKS, BLOCK_SIZE, HEADS, 2 * HEAD_SIZE)
        self.before = self.cache.clone()
        self.key, self.value = drawn(len(SLOTS), HEADS, HEAD_SIZE), drawn(len(SLOTS), HEADS, HEAD_SIZE)
        self.log = torch.zeros(LOG_SIZE, HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16, device=device)
        self.slots = self.tensor(SLOTS, torch.int64)
        self.log_rows = self.tensor(LOG_ROWS, torch.int32)
        self.cu_num_draft_tokens = self.tensor(CU_NUM_DRAFT_TOKENS, torch.int32)
        self.draft_start_loc = self.tensor((0, *CU_NUM_DRAFT_TOKENS), torch.int32)
        self.counters = torch.zeros(len(ops.COUNTERS), dtype=torch.int64, device=device)
        self.scale = torch.ones(1, device=device)

    def tensor(self, values: tuple, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def key_value(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return tensor[..., :HEAD_SIZE], tensor[..., HEAD_SIZE:]

    def written(self, tokens: range | tuple[int, ...] = range(len(SLOTS))) -> Tensor:
        """Return the cache after a plain write of these tokens."""
        cache = self.before.clone().flatten(0, 1)
        for token in tokens:
            if SLOTS[token] >= 0:
                cache[SLOTS[token]] = torch.cat([self.key[token], self.value[token]], -1)
        return cache.unflatten(0, (BLOCKS, BLOCK_SIZE))

    def logged(self) -> Tensor:
        log = torch.zeros_like(self.log)
        for slot, row in zip(SLOTS, LOG_ROWS, strict=True):
            if slot >= 0 and row >= 0:
                log[row] = self.before.flatten(0, 1)[slot]
        return log


def _write_kv(device: torch.device) -> str | None:
    sample = _Sample(device)
    ops.write_kv(
        sample.key,
        sample.value,
        *sample.key_value(sample.cache),
        sample.slots,
        sample.scale,
        sample.scale,
        "auto",
    )
    return difference(cache=(sample.cache, sample.written()))


def _write_kv_logged(device: torch.device) -> str | None:
    sample = _Sample(device)
    ops.write_kv_logged(
        sample.key, sample.value, *sample.key_value(sample.cache), sample.slots, sample.scale, sample.scale, "auto",
        sample.log_rows, *sample.key_value(sample.log),
    )  # fmt: skip
    return difference(cache=(sample.cache, sample.written()), log=(sample.log, sample.logged()))


def _log_slots(device: torch.device) -> str | None:
    sample = _Sample(device)
    ops.log_slots(sample.cache, sample.slots, sample.log_rows, sample.log)
    return difference(cache=(sample.cache, sample.before), log=(sample.log, sample.logged()))


def _row_slots(sample: _Sample) -> Tensor:
    rows = {row: slot for slot, row in zip(SLOTS, LOG_ROWS, strict=True) if row >= 0}
    return sample.tensor(tuple(rows.get(row, -1) for row in range(LOG_SIZE)), torch.int64)


def _restore_slots(device: torch.device) -> str | None:
    sample = _Sample(device)
    row_slots = _row_slots(sample)
    row_rejected = sample.tensor((*(not accepted for accepted in ACCEPTED), False), torch.bool)
    sample.cache.copy_(sample.written())
    ops.restore_slots([sample.cache], sample.logged().unsqueeze(0), row_slots, row_rejected)
    return difference(cache=(sample.cache, sample.written(tokens=(0, 1, 4, 5))))


def _restore_slots_from_rejected(device: torch.device) -> str | None:
    sample = _Sample(device)
    row_rejected = torch.ones(LOG_SIZE, dtype=torch.bool, device=device)
    num_accepted = torch.full((3,), 7, dtype=torch.int32, device=device)
    sample.cache.copy_(sample.written())
    ops.restore_slots_from_rejected(
        [sample.cache], sample.logged().unsqueeze(0), _row_slots(sample), sample.tensor(NUM_REJECTED, torch.int32),
        sample.draft_start_loc, row_rejected, num_accepted, sample.counters,
    )  # fmt: skip
    restored = difference(cache=(sample.cache, sample.written(tokens=(0, 1, 4, 5))))
    return restored or _rejection_difference(row_rejected, num_accepted, sample.counters)


def _plan_window(device: torch.device) -> str | None:
    sample = _Sample(device)
    log_rows = torch.zeros(len(SLOTS), dtype=torch.int32, device=device)
    row_slots = torch.zeros(1, LOG_SIZE, dtype=torch.int64, device=device)
    row_requests, row_positions = torch.zeros(2, LOG_SIZE, dtype=torch.int32, device=device)
    draft_start_loc = torch.full((4,), 7, dtype=torch.int32, device=device)
    ops.plan_window(
        sample.tensor(QUERY_START_LOC, torch.int32), sample.cu_num_draft_tokens, [sample.slots],
        log_rows, row_slots, row_requests, row_positions, sample.counters, draft_start_loc,
    )  # fmt: skip
    return difference(
        log_rows=(log_rows, LOG_ROWS),
        row_slots=(row_slots, [[9, 10, 11, 19, -1, -1]]),
        row_requests=(row_requests, [0, 0, 0, 1, 1, -1]),
        row_positions=(row_positions, [0, 1, 2, 0, 1, -1]),
        counters=(sample.counters, [1, 5, 0, 0, 0]),
        draft_start_loc=(draft_start_loc, [0, *CU_NUM_DRAFT_TOKENS, CU_NUM_DRAFT_TOKENS[-1]]),
    )


def _acceptance_mask(device: torch.device) -> str | None:
    sample = _Sample(device)
    accepted, num_accepted = ops.acceptance_mask(
        sample.tensor(DRAFT_TOKEN_IDS, torch.int32),
        sample.tensor(SAMPLED_TOKEN_IDS, torch.int32),
        sample.draft_start_loc,
    )
    return difference(accepted=(accepted, ACCEPTED), num_accepted=(num_accepted, NUM_ACCEPTED))


def _acceptance_mask_from_rejected(device: torch.device) -> str | None:
    sample = _Sample(device)
    accepted, num_accepted = ops.acceptance_mask_from_rejected(
        sample.tensor(NUM_REJECTED, torch.int32), sample.draft_start_loc, len(ACCEPTED)
    )
    return difference(accepted=(accepted, ACCEPTED), num_accepted=(num_accepted, NUM_ACCEPTED))


def _reject_rows(device: torch.device) -> str | None:
    sample = _Sample(device)
    row_rejected = torch.ones(LOG_SIZE, dtype=torch.bool, device=device)
    num_accepted = torch.full((3,), 7, dtype=torch.int32, device=device)
    ops.reject_rows(
        sample.tensor(DRAFT_TOKEN_IDS, torch.int32), sample.tensor(SAMPLED_TOKEN_IDS, torch.int32),
        sample.draft_start_loc, row_rejected, num_accepted, sample.counters,
    )  # fmt: skip
    return _rejection_difference(row_rejected, num_accepted, sample.counters)


def _reject_rows_from_rejected(device: torch.device) -> str | None:
    sample = _Sample(device)
    row_rejected = torch.ones(LOG_SIZE, dtype=torch.bool, device=device)
    num_accepted = torch.full((3,), 7, dtype=torch.int32, device=device)
    ops.reject_rows_from_rejected(
        sample.tensor(NUM_REJECTED, torch.int32), sample.draft_start_loc,
        row_rejected, num_accepted, sample.counters,
    )  # fmt: skip
    return _rejection_difference(row_rejected, num_accepted, sample.counters)


def _rejection_difference(row_rejected: Tensor, num_accepted: Tensor, counters: Tensor) -> str | None:
    return difference(
        row_rejected=(row_rejected, [*(not accepted for accepted in ACCEPTED), False]),
        num_accepted=(num_accepted, [*NUM_ACCEPTED, 0]),
        counters=(counters, [0, 0, 1, 4, 0]),
    )


def _transaction(device: torch.device) -> str | None:
    """Run begin, write and commit: the accepted draft stays, the others leave no trace."""
    sample = _Sample(device)
    manager = DraftCommitManager(
        max_num_tokens=len(SLOTS), max_num_requests=2, max_draft_tokens=LOG_SIZE, device=device
    )
    manager.register_layer("layer", LayerCache.packed(sample.cache))
    manager.allocate()
    manager.begin(
        Window(sample.tensor(QUERY_START_LOC, torch.int32), sample.cu_num_draft_tokens, {"default": sample.slots})
    )
    manager.write("layer", sample.key, sample.value, sample.slots)
    manager.commit(sample.tensor(DRAFT_TOKEN_IDS, torch.int32), sample.tensor(SAMPLED_TOKEN_IDS, torch.int32))
    return difference(cache=(sample.cache, sample.written(tokens=(0, 1, 4, 5))))


def _refused_call(device: torch.device) -> str | None:
    """Check that an error in a kernel arrives as an exception, which crosses from our C++ runtime to torch's."""
    sample = _Sample(device)
    try:
        ops.log_slots(sample.cache, sample.slots, sample.log_rows[:-1], sample.log)
    except ValueError as error:
        expected = f"log_slots: log_rows must be [num_tokens] with at least {len(SLOTS)} elements"
        return None if str(error).startswith(expected) else f"raised another message: {error}"
    return "did not raise"


def _stage_kv(device: torch.device) -> str | None:
    sample = _Sample(device)
    ops.stage_kv(sample.key, sample.value, sample.log_rows, *sample.key_value(sample.log))
    return difference(staged=(sample.log, _staged_rows(sample)))


def _staged_rows(sample: _Sample) -> Tensor:
    rows = torch.zeros_like(sample.log)
    for token, row in enumerate(LOG_ROWS):
        if row >= 0:
            rows[row] = torch.cat([sample.key[token], sample.value[token]], -1)
    return rows


def _accept_staged(device: torch.device) -> str | None:
    """One of two layers has not staged row 1, so that row may be rejected but not accepted."""
    sample = _Sample(device)
    window_id, row_windows = sample.tensor((3,), torch.int64), sample.tensor(((3, 3, 3), (3, 2, 3)), torch.int64)
    committed = torch.ones(3, dtype=torch.bool, device=device)
    counters = torch.zeros(len(ops.STAGE_COUNTERS), dtype=torch.int64, device=device)
    slots = sample.tensor((5, 6, 7), torch.int64)
    for accepted in ((True, False, True), (False, True, False)):
        flags = sample.tensor(accepted, torch.bool)
        ops.accept_staged(flags, slots, window_id, row_windows, BLOCKS * BLOCK_SIZE, committed, counters)
        if accepted[0] and (problem := difference(row_committed=(committed, accepted))):
            return problem
    return difference(row_committed=(committed, (False,) * 3), counters=(counters, [2, 6, 10, 2, 4, 1]))


def _commit_staged(device: torch.device) -> str | None:
    sample = _Sample(device)
    rows = {row: slot for slot, row in zip(SLOTS, LOG_ROWS, strict=True) if row >= 0}
    row_slots = sample.tensor(tuple(rows.get(row, -1) for row in range(LOG_SIZE)), torch.int64)
    ops.commit_staged(
        *sample.key_value(_staged_rows(sample)), row_slots, sample.tensor((*ACCEPTED, True), torch.bool),
        *sample.key_value(sample.cache), sample.scale, sample.scale, "auto",
    )  # fmt: skip
    return difference(cache=(sample.cache, sample.written(tokens=(1,))))


def _move_slots(device: torch.device) -> str | None:
    """Swap two slots, and copy the old contents of one to a third."""
    sample = _Sample(device)
    ops.move_slots([sample.cache], sample.tensor((3, 17, 3), torch.int64), sample.tensor((17, 3, 9), torch.int64))
    expected = sample.before.clone().flatten(0, 1)
    expected[[17, 3, 9]] = sample.before.flatten(0, 1)[[3, 17, 3]]
    return difference(cache=(sample.cache, expected.unflatten(0, (BLOCKS, BLOCK_SIZE))))


def _staged_transaction(device: torch.device, by_counts: bool = False) -> str | None:
    """Run begin, write and commit with shadow pages: before commit, no draft is in a page of a request."""
    sample = _Sample(device)
    shadows = num_shadow_blocks(2, 3, BLOCK_SIZE)
    cache = torch.cat([sample.cache, torch.zeros_like(sample.cache[:1]).expand(shadows, -1, -1, -1)])
    manager = DraftCommitManager(
        max_num_tokens=len(SLOTS), max_num_requests=2, max_draft_tokens=LOG_SIZE, device=device, mode="stage",
        max_drafts_per_request=3,
    )  # fmt: skip
    manager.register_layer("layer", LayerCache.packed(cache))
    manager.allocate()
    table = sample.tensor(((1, 0), (2, 0)), torch.int32)
    window = Window(
        sample.tensor(QUERY_START_LOC, torch.int32), sample.cu_num_draft_tokens, {"default": sample.slots},
        seq_lens=sample.tensor((4, 5), torch.int32), block_tables={"default": table},
    )  # fmt: skip
    manager.begin(window)
    # Two shadow pages per request. The tail page of the second request has a row from before this step.
    first, second = BLOCKS, BLOCKS + shadows // 2
    opened = difference(
        redirected_slots=(sample.slots, [*(first * BLOCK_SIZE + n for n in range(4)),
                                         *(second * BLOCK_SIZE + n for n in range(1, 4)), -1]),
        redirected_table=(table, ((first, 0), (second, 0))),
        committed_row=(cache[second, 0], sample.before[2, 0]),
        cache_while_open=(cache[:BLOCKS], sample.before),
    )  # fmt: skip
    manager.write("layer", sample.key, sample.value, sample.slots)
    untouched = difference(cache_before_commit=(cache[:BLOCKS], sample.before))
    if by_counts:
        manager.commit_rejected(sample.tensor(NUM_REJECTED, torch.int32))
    else:
        manager.commit(sample.tensor(DRAFT_TOKEN_IDS, torch.int32), sample.tensor(SAMPLED_TOKEN_IDS, torch.int32))
    buffers = manager.buffers
    return (
        opened
        or untouched
        or difference(
            cache=(cache[:BLOCKS], sample.written(tokens=(0, 1, 4, 5))),
            block_table=(table, ((1, 0), (2, 0))),
            slot_mapping=(sample.slots, SLOTS),
            row_rejected=(buffers.row_rejected[: len(ACCEPTED)], [not accepted for accepted in ACCEPTED]),
            num_accepted=(buffers.num_accepted, NUM_ACCEPTED),
            counters=(buffers.counters, [1, 5, 1, 4, 0]),
        )
    )


# Op: a function of the device that returns None, or a sentence that says what is wrong.
SELF_TESTS: dict[str, Callable[[torch.device], str | None]] = {
    "write_kv": _write_kv,
    "write_kv_logged": _write_kv_logged,
    "log_slots": _log_slots,
    "restore_slots": _restore_slots,
    "restore_slots_from_rejected": _restore_slots_from_rejected,
    "plan_window": _plan_window,
    "acceptance_mask": _acceptance_mask,
    "acceptance_mask_from_rejected": _acceptance_mask_from_rejected,
    "reject_rows": _reject_rows,
    "reject_rows_from_rejected": _reject_rows_from_rejected,
    "stage_kv": _stage_kv,
    "accept_staged": _accept_staged,
    "commit_staged": _commit_staged,
    "move_slots": _move_slots,
    "open_window": _staged_transaction,
    "close_window": _staged_transaction,
    "close_window_from_rejected": functools.partial(_staged_transaction, by_counts=True),
    **self_test_drafter.SELF_TESTS,
    **self_test_recurrent.SELF_TESTS,
    "a whole transaction": _transaction,
    "a call that is refused": _refused_call,
}
