"""plan_recurrent_block_fold: the folds of requests that reach the end of a block."""

from __future__ import annotations

import oracle_checks
import pytest
import samples_recurrent as samples
import torch
from bad_input import check_bad_data, left_by_the_oracle
from tensors import int32

from nwor_ops import ops
from nwor_ops.testing import layouts
from nwor_ops.testing.samples import with_arguments

OP = "plan_recurrent_block_fold"
MOST_TABLES = 64


def with_pending(arguments: tuple, **rows: int) -> tuple:
    """The same call with these numbers of rows pending in blocks `b1`, `b2`, ... and nothing elsewhere."""
    cursors = torch.zeros_like(arguments[1])
    for block, pending in rows.items():
        cursors[int(block[1:])] = torch.tensor([pending, 1, 3][: cursors.shape[1]])
    arguments[1].copy_(cursors)
    return arguments


def test_moves_by_hand(device):
    """A request that moves takes its kept rows with it. Its drafts are dropped."""
    arguments = with_pending(samples.block_fold(samples.MOVES), b1=3, b6=2, b4=3)
    plan, cursors, *_ = oracle_checks.assert_same_as_oracle(OP, arguments, device)
    # The requests have rows 2, 0, padding, 1 and 3 of both tables. Row 3 has no state yet.
    assert plan.tolist() == [
        [6, 2, 1, 8], [1, 2, 1, 2], [0] * 4, [0] * 4, [0] * 4,
        [14, 0, 0, 16], [9, 0, 0, 10], [0] * 4, [0] * 4, [0] * 4, *[[0] * 4] * 2,
    ]  # fmt: skip
    assert cursors[:, 0].nonzero().view(-1).tolist() == [4]  # the request that stays


def test_full_blocks_by_hand(device):
    """A block that a window has filled gets the state after its last token. In place, the drafts are dropped."""
    arguments = with_pending(samples.block_fold(samples.FULL_BLOCKS), b3=3, b7=3, b5=1)
    plan, cursors, *_ = oracle_checks.assert_same_as_oracle(OP, arguments, device)
    assert plan[:5].tolist() == [[7, 3, 1, 7], [3, 1, 1, 2], [0] * 4, [0] * 4, [0] * 4]
    assert {block: cursors[block, 0].item() for block in (2, 3, 5, 7)} == {2: 0, 3: 3, 5: 1, 7: 0}


@pytest.mark.parametrize("chunk", [0, 16])
def test_windows_that_end_around_a_block(device, chunk):
    """Each window of up to 4 tokens, from each token of a block, of which each number stays.

    In the chunk form, rows of earlier windows are pending too, from any row of a ring on. They are folded first.
    Blocks after the last token of a step are not allocated: their numbers in the table are those of no block.
    """
    size = 4
    windows = [(begin, n, kept) for begin in range(1, 9) for n in range(1, 5) for kept in range(1, n + 1)]
    begins, tokens, kept = torch.tensor(windows, dtype=torch.int32).T.contiguous()
    blocks = torch.arange(1, 1 + 3 * len(windows), dtype=torch.int32).view(-1, 3)
    table, columns = blocks.clone(), (begins + tokens - 1) // size
    table[torch.arange(3) > columns[:, None]] = 2**31 - 1
    cursors = torch.zeros(3 * len(windows) + 1, 3 if chunk else 2, dtype=torch.int32)
    expected, after = [], cursors.clone()
    for row, (begin, n, stay) in enumerate(windows):
        source, full = int(blocks[row, columns[row]]), (begin + stay) // size
        first, earlier = (5 * row % 31, row % chunk) if chunk else (1, 0)
        cursors[source] = after[source] = torch.tensor([n, first, earlier][: cursors.shape[1]])
        fills = full * size > begin
        fold = [source, earlier + full * size - begin, first, int(blocks[row, full - 1])]
        expected.append(fold if fills else [0] * 4)
        if fills and source == blocks[row, full - 1]:
            after[source, ::2] = 0
    plan, skipped = torch.zeros(len(windows), 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    rows = torch.arange(len(windows))
    ours = layouts.twin(
        (plan, cursors, [table], rows, columns, kept, None, begins + kept, size, False, skipped), device
    )
    getattr(ops, OP)(*ours)
    assert ours[0].tolist() == expected
    assert ours[1].tolist() == after.tolist()
    assert not ours[-1].any()


def test_moved_rows_stay_pending(device):
    arguments = with_pending(samples.block_fold(samples.MOVES, ring=True, moves_rows=True), b1=3, b6=2)
    _, cursors, *_ = oracle_checks.assert_same_as_oracle(OP, arguments, device)
    assert {block: cursors[block].tolist() for block in (1, 2, 6, 8)} == {
        1: [0, 1, 0], 2: [0, 1, 5], 6: [0, 1, 0], 8: [0, 1, 5],
    }  # fmt: skip


def test_many_tables_and_requests(device):
    """More entries than threads of a block, in as many tables as a call takes."""
    requests = 9
    tables = tuple(
        tuple((2 * (group * requests + row) + 1, 2 * (group * requests + row) + 2) for row in range(requests))
        for group in range(MOST_TABLES)
    )
    columns = {"source_columns": (0,) * requests, "target_columns": (1, 0) * 4 + (1,), "num_kept": (2,) * requests}
    arguments = list(samples.block_fold(columns, tables, tuple(range(requests))))
    arguments[1] = torch.tensor([[3, 1]] * (2 * MOST_TABLES * requests + 1), dtype=torch.int32)
    oracle_checks.assert_same_as_oracle(OP, tuple(arguments), device)
    oracle_checks.refuse(
        OP, with_arguments(OP, tuple(arguments), block_tables=arguments[2] * 2), ValueError,
        f"block_tables must hold 1 to {MOST_TABLES} tables, got 128",
    )  # fmt: skip


# The invalid arguments, the requests without the invalid one, and the message of the error.
INVALID = {
    "a row past the tables": (
        {"requests": (0, 4)}, samples.MOVES, (0, -1),
        r"idx_mapping\[1\] must be below the 4 rows of block_tables, got 4",
    ),
    "a source past the columns": (
        {}, {**samples.MOVES, "source_columns": (3, 1, 0, -1)}, (2, -1, -1, 1, 3),
        "block_tables must have a column for each block, got 3 columns where request 1 has block 3",
    ),
    "a target past the columns": (
        {}, {**samples.FULL_BLOCKS, "num_computed_tokens": (17, 6, 8, 2)}, (2, -1, -1, 1, 3),
        "got 3 columns where request 1 has block 3",
    ),
    "a block past the cursors": (
        {"tables": (((1, 2, 3), (4, 5, 0), (6, 7, 17), (0, 0, 0)),)}, samples.MOVES, (-1, 0, -1, 1, 3),
        r"block_tables must have blocks below 17 \(num_slots\), got 17 for request 0",
    ),
}  # fmt: skip


@pytest.mark.debug_mode
@pytest.mark.parametrize("case", INVALID)
def test_invalid_data(device, case):
    """The CPU refuses the call. CUDA skips the request, and plans the others."""
    options, columns, others, sentence = INVALID[case]
    arguments = with_pending(samples.block_fold(columns, **options), b1=2, b3=2, b6=3, b7=3, b14=3, b15=3)
    ids = with_arguments(OP, arguments, idx_mapping=int32(*others))
    left = left_by_the_oracle(OP, ids)
    assert left[0].any()
    check_bad_data(OP, arguments, IndexError, sentence, device, left)


@pytest.mark.debug_mode
@pytest.mark.parametrize("columns", [samples.MOVES, samples.FULL_BLOCKS], ids=["moves", "full blocks"])
@pytest.mark.parametrize("kept", [0, -1, 4, 2**31 - 1])
def test_invalid_number_of_kept_tokens(device, kept, columns):
    """Three rows are pending. CUDA leaves the request out in both tables, and counts both entries."""
    numbers = (*columns["num_kept"][:2], kept, 1)
    arguments = samples.block_fold(columns | {"num_kept": numbers}, num_skipped=7)
    arguments = with_pending(arguments, b1=2, b3=2, b6=3, b7=3, b14=3, b15=3)
    sentence = rf"num_kept\[2\] must be from 1 to the 3 tokens of the request's last window, got {kept}"
    after = check_bad_data(OP, arguments, ValueError, sentence, device)
    if after is not None:
        plan, cursors, skipped = after[0], after[1], after[-1]
        assert (plan[0].any(), plan[1].any(), plan[5].any()) == (False, True, False)
        assert cursors[[6, 7, 14, 15], 0].tolist() == [3, 3, 3, 3]
        assert skipped.item() == 7 + 2


def test_kept_tokens_are_ignored_without_pending_rows(device):
    for columns in (samples.MOVES, samples.FULL_BLOCKS):
        arguments = with_pending(samples.block_fold(columns | {"num_kept": (0, 99, -1, 1)}))
        oracle_checks.assert_same_as_oracle(OP, arguments, device)


def test_blocks_that_conflict():
    """Two requests with one block. Only the CPU checks this."""
    tables = (((1, 2, 3), (4, 5, 0), (6, 7, 2), (0, 0, 0)),)
    oracle_checks.refuse(
        OP, samples.block_fold(samples.MOVES, tables), ValueError,
        "block_tables must name a target that no other request reads or writes, got block 2 in entry 1, which entry 0",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("replaced", "error", "sentence"),
    [
        ({"num_computed_tokens": int32(1, 1, 1, 1)}, ValueError, "target_columns or num_computed_tokens must be given"),
        ({"target_columns": None}, ValueError, "target_columns or num_computed_tokens must be given, and not both"),
        ({"block_size": 4}, ValueError, "block_size must be 0 with target_columns, got 4"),
        ({"moves_rows": True}, ValueError, r"cursors must be \[num_slots, 3\], those of chunks, with moves_rows"),
        ({"block_tables": []}, ValueError, "block_tables must hold 1 to 64 tables, got 0"),
        ({"num_kept": int32(1, 1, 1)}, ValueError, r"num_kept must be \[num_states\] with at least 4 elements"),
        (
            {"block_tables": [torch.zeros(4, 3, dtype=torch.int32), torch.zeros(5, 3, dtype=torch.int32)]},
            ValueError, r"block_tables\[1\] must be of as many rows as block_tables\[0\]",
        ),
        (
            {"block_tables": [torch.zeros(3, 4, dtype=torch.int32).T]}, ValueError,
            r"block_tables\[0\] must be contiguous along a row",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_arguments_that_do_not_fit(replaced, error, sentence):
    oracle_checks.refuse(OP, with_arguments(OP, samples.block_fold(samples.MOVES), **replaced), error, sentence)


def test_a_full_block_moves_no_rows():
    arguments = samples.block_fold(samples.FULL_BLOCKS, ring=True, moves_rows=True)
    oracle_checks.refuse(OP, arguments, ValueError, "moves_rows must be False with num_computed_tokens, got True")
    for size in (0, -1, 2**31):
        arguments = samples.block_fold(samples.FULL_BLOCKS, block_size=size)
        oracle_checks.refuse(OP, arguments, ValueError, "block_size must be (positive|below 2.31), got")
