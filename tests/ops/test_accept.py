"""Test the family accept beyond its random windows: by hand, and windows that are refused."""

from __future__ import annotations

import itertools

import bad_input
import oracle_checks
import pytest
import torch
from tensors import flags, int32, int64, plan

from nwor_ops import ops
from nwor_ops.testing import layouts
from nwor_ops.testing.layouts import surrounded
from nwor_ops.testing.samples import ops_of, with_arguments


def test_plan_by_hand(device):
    """Requests of 2 + 2 and 1 + 1 tokens (given and drafted). This test does not depend on the oracle."""
    ours = layouts.twin(plan((0, 4, 6), (2, 3), tokens=7, groups=2, rows=5), device)
    ops.plan_window(*ours)
    _, _, _, log_rows, row_slots, row_requests, row_positions, counters, draft_start_loc, *_ = ours
    assert log_rows.tolist() == [-1, -1, 0, 1, -1, 2, -1, -1, -1]
    assert row_slots.tolist() == [[102, 103, 105, -1, -1], [202, 203, 205, -1, -1]]
    assert row_requests.tolist() == [0, 0, 1, -1, -1]
    assert row_positions.tolist() == [0, 1, 0, -1, -1]
    assert counters.tolist() == [11, 23, 30, 40, 50]
    assert draft_start_loc.tolist() == [0, 2, 3, 3, 3]  # to the end of the tensor


OPS = ops_of("accept")
COUNTED_BEFORE = [10, 20, 30, 40, 50]  # initial counters


def reject_call(op):
    """A call for requests with 3, no and 4 drafts."""
    drafts, starts = (11, 12, 13, 14, 15, 16, 17), int32(0, 3, 3, 7)
    sampled = surrounded(torch.tensor([[11, 12, 99, -1, -1], [50, -1, -1, -1, -1], [14, 15, 16, 17, 60]]))
    inputs = (int32(1, 0, 4), starts) if "from_rejected" in op else (int64(*drafts), sampled, starts)
    if op == "plan_window":
        return plan()
    if op.startswith("acceptance"):
        return (*inputs, 7) if "from_rejected" in op else inputs
    return (*inputs, flags(*[1] * 7), int32(*[77] * 3), int64(*COUNTED_BEFORE))


# drafts of each request, sampled tokens of each request, accepted drafts of each request
DECIDED = {
    "all": ([[1, 2, 3], [4]], [[1, 2, 3, 9], [4, 9, -1, -1]], [3, 1]),
    "none": ([[1, 2, 3], [4]], [[9, -1, -1, -1], [5, -1, -1, -1]], [0, 0]),
    "half": ([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, -1, -1], [5, 9, -1, -1, -1]], [2, 1]),
    "replaced by the same token": ([[1, 2, 3]], [[1, 2, -1, -1]], [1]),
    "equal again after a mismatch": ([[1, 2, 3]], [[1, 9, 3, 9]], [1]),
    "no drafts between": ([[1], [], [2]], [[1, 9], [9, -1], [9, -1]], [1, 0, 0]),
    "no bonus column": ([[1, 2]], [[1, 2]], [2]),
    "more requests sampled than planned": ([[1]], [[1, 9], [9, 9], [9, 9]], [1]),
    "token 0": ([[0, 0]], [[0, 0, 0]], [2]),
    "beyond 32 bits": ([[2**40]], [[2**40, 1]], [1]),
    "same low 32 bits": ([[2**40 + 5]], [[5, 1]], [0]),
    "no token for an invalid draft": ([[1], [-1]], [[1], [-1]], [1, 0]),
}


@pytest.mark.parametrize(("drafts", "sampled", "accepted"), DECIDED.values(), ids=DECIDED)
def test_acceptance_by_hand(device, drafts, sampled, accepted):
    starts = [sum(map(len, drafts[:q])) for q in range(len(drafts) + 1)]
    arguments = (int64(*itertools.chain(*drafts)), surrounded(torch.tensor(sampled)), int32(*starts))
    assert ops.acceptance_mask(*layouts.twin(arguments, device))[1].tolist() == accepted
    outputs = flags(*[1] * 9), int32(*[9] * 5), int64(*COUNTED_BEFORE)
    ours = oracle_checks.assert_same_as_oracle("reject_rows", (*arguments, *outputs), device)
    assert ours[4].tolist() == [*accepted, *[0] * (5 - len(accepted))]


@pytest.mark.gpu
def test_plan_of_too_many_groups(device):
    with pytest.raises(ValueError, match="at most 128 slot mappings on CUDA, got 129"):
        ops.plan_window(*layouts.twin(plan(groups=129), device))


# ---------------------------------------------------------------- data that is refused


def test_leading_zero_must_be_0():
    sentence = "cu_num_draft_tokens must begin with 0 where .*, got 3$"
    arguments = plan(cu_num_draft_tokens=(3, 3, 3, 6, 6), leading_zero=True)
    oracle_checks.refuse("plan_window", arguments, ValueError, sentence)


BAD_WINDOWS = {
    "more drafts than rows": (
        {"rows": 5},
        "row_slots must have a row for each draft, got 5 rows for 6 drafts",
    ),
    "no rows": ({"rows": 0}, "row_slots must have a row for each draft, got 0 rows for 6 drafts"),
    "decreasing drafts": (
        {"cu_num_draft_tokens": (3, 2, 6, 6)},
        "cu_num_draft_tokens must not decrease, got 2 at request 1 after 3",
    ),
    "negative drafts": (
        {"cu_num_draft_tokens": (-1, 3, 6, 6)},
        "cu_num_draft_tokens must not decrease, got -1|no more drafts than tokens",
    ),
    "far too many drafts": (
        {"cu_num_draft_tokens": (3, 3, 6, 2**31 - 1)},
        "no more drafts than tokens, got 2147483641 drafts in the 0 tokens of request 3",
    ),
    "decreasing tokens": (
        {"query_start_loc": (0, 5, 4, 9, 9)},
        "query_start_loc must .*not decrease, got 5 and 4",
    ),
    "negative start": ({"query_start_loc": (-3, 4, 5, 9, 9)}, "query_start_loc must start at 0 or above"),
    "more drafts than tokens": (
        {"query_start_loc": (0, 2, 5, 9, 9)},
        "no more drafts than tokens, got 3 drafts in the 2 tokens of request 0",
    ),
    "tokens beyond the slot mapping": ({"tokens": 8}, "slot_mappings must cover every draft, got 8 tokens"),
}


def unplanned(arguments):
    """The result of a window that a device can only count: no row has a draft, and no request has one."""
    left = layouts.twin(arguments)
    for output in left[3:7]:
        output.fill_(-1)
    left[8].zero_()
    left[7][ops.COUNTERS.index("overflowed")] += 1
    return left


@pytest.mark.debug_mode
@pytest.mark.parametrize("case", BAD_WINDOWS)
def test_invalid_window_is_refused(device, case):
    options, sentence = BAD_WINDOWS[case]
    arguments = plan(**options, groups=2)
    bad_input.check_bad_data("plan_window", arguments, ValueError, sentence, device, unplanned(arguments))


@pytest.mark.debug_mode
@pytest.mark.parametrize("broken", [0, 300, 1023])
def test_one_bad_request_among_many(device, broken):
    """The output has no trace of the others. On CUDA every block must come to the same result, wherever the bad
    request is."""
    starts = torch.arange(0, 1025 * 4, 4)
    cu = torch.arange(3, 1025 * 3, 3)[:1024].clone()
    cu[broken:] += 2  # five drafts in four tokens
    arguments = plan(tuple(starts.tolist()), tuple(cu.tolist()), 4096, 1, 4000)
    sentence = f"got 5 drafts in the 4 tokens of request {broken}"
    bad_input.check_bad_data("plan_window", arguments, ValueError, sentence, device, unplanned(arguments))


@pytest.mark.debug_mode
@pytest.mark.parametrize(
    "starts",
    [(0, 3, 2, 7), (0, -5, 3, 7), (0, 2**31 - 1, 3, 7), (0, 3, 3, 2**31 - 1), (0, 7, 0, 0), (3, 3, 7, 7),
     (-1, 3, 3, 7), (2**31 - 1, 2**31 - 1, 2**31 - 1, 7)],
)  # fmt: skip
@pytest.mark.parametrize("op", OPS[1:])
def test_invalid_draft_starts(device, op, starts):
    """The CPU refuses them. The device must survive them: only outputs change, and counts stay valid."""
    arguments = with_arguments(op, reject_call(op), draft_start_loc=int32(*starts))
    sentence = (
        r"draft_start_loc must (begin with 0, got|not decrease, got -?\d+ and -?\d+ around"
        r"|not exceed (the 7 |num_draft_tokens .7.,))|sampled_token_ids must have a column for each draft"
    )
    left = bad_input.check_bad_data(op, arguments, ValueError, sentence, device)
    if left is not None:
        num_accepted = left[-1] if op.startswith("acceptance_mask") else left[-2]
        assert ((num_accepted >= 0) & (num_accepted <= 7)).all()


@pytest.mark.debug_mode
@pytest.mark.parametrize("op", ["acceptance_mask", "reject_rows"])
def test_fewer_columns_than_drafts(device, op):
    """The fourth draft of request 2 cannot be compared. CUDA rejects it, and accepts the others as usual."""
    arguments = reject_call(op)
    arguments = with_arguments(op, arguments, sampled_token_ids=surrounded(arguments[1][:, :3]))
    left = bad_input.left_by_the_oracle(op, arguments)
    sentence = "sampled_token_ids must have a column for each draft, got 3 columns for the 4 drafts of request 2"
    after = bad_input.check_bad_data(op, arguments, ValueError, sentence, device, left)
    if after is not None:
        num_accepted = after[-1] if op == "acceptance_mask" else after[-2]
        assert num_accepted.tolist() == [2, 0, 3]


@pytest.mark.parametrize(
    ("op", "argument"), [("plan_window", "cu_num_draft_tokens"), ("acceptance_mask_from_rejected", "draft_start_loc")]
)
def test_too_many_requests(tmp_path, op, argument):
    """Kernels number requests in 32 bits. (This is a sparse file, and only its beginning is read.)"""
    counts = torch.from_file(str(tmp_path / "counts"), shared=True, size=2**31 + 1, dtype=torch.int32)
    (tmp_path / "counts").unlink()
    arguments = with_arguments(op, reject_call(op), **{argument: counts})
    with pytest.raises(ValueError, match=rf"^{op}: {argument} must be of fewer than 2\^31 requests, got"):
        getattr(ops, op)(*arguments)
