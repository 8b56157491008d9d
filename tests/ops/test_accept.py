"""Test the family accept against the oracle, on all surrounding memory: which tokens are drafts, which were
accepted."""

from __future__ import annotations

import re

import bad_input
import oracle_checks
import pytest
import samples_accept as samples
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import argument_names, ops_of, sample_inputs, with_arguments
from tensors import flags, int32, int64

from nwor_ops import ops
from nwor_ops.testing import layouts


def test_plan_by_hand(device):
    """Requests of 2 + 2 and 1 + 1 tokens (given and drafted). This test does not depend on the oracle."""
    ours = layouts.twin(samples.plan((0, 4, 6), (2, 3), tokens=7, groups=2, rows=5), device)
    ops.plan_window(*ours)
    _, _, _, log_rows, row_slots, row_requests, row_positions, counters, draft_start_loc, *_ = ours
    assert log_rows.tolist() == [-1, -1, 0, 1, -1, 2, -1, -1, -1]
    assert row_slots.tolist() == [[102, 103, 105, -1, -1], [202, 203, 205, -1, -1]]
    assert row_requests.tolist() == [0, 0, 1, -1, -1]
    assert row_positions.tolist() == [0, 1, 0, -1, -1]
    assert counters.tolist() == [11, 23, 30, 40, 50]
    assert draft_start_loc.tolist() == [0, 2, 3, 3, 3]  # to the end of the tensor


OPS = ops_of("accept")
ID_DTYPES = (torch.int32, torch.int64)
COUNTED_BEFORE = [10, 20, 30, 40, 50]  # initial counters of `samples`


# ---------------------------------------------------------------- plan_window

BATCHES = {
    "one request": ((0, 5), (4,)),
    "every token a draft": ((0, 4), (4,)),
    "no drafts": ((0, 3, 4), (0, 0)),
    "mixed with prompts": ((0, 7, 12, 13, 18), (0, 4, 4, 8)),
    "padded requests": ((0, 3, 6, 6, 6), (2, 4, 4, 4)),
    "a request without tokens": ((0, 3, 3, 6), (2, 2, 4)),
    "longer query_start_loc": ((0, 3, 6, 9, 99), (2, 2)),
    "no requests": ((0,), ()),
    "not from 0": ((2, 5, 8), (2, 4)),
}


@pytest.mark.parametrize("groups", [1, 3, 128])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_plan(device, batch, groups):
    starts, cu = batch
    exact = cu[-1] if cu else 0
    for rows in (exact, exact + 7):
        oracle_checks.assert_same_as_oracle("plan_window", samples.plan(starts, cu, 20, groups, rows), device)


@pytest.mark.gpu
def test_plan_of_too_many_groups(device):
    with pytest.raises(ValueError, match="at most 128 slot mappings on CUDA, got 129"):
        ops.plan_window(*layouts.twin(samples.plan(groups=129), device))


def test_plan_of_a_draft_without_a_slot(device):
    """The row of a skipped token keeps slot -1, so that nothing is restored for it."""
    arguments = samples.plan((0, 4), (3,), tokens=4)
    slots = int64(9, -1, 8, -5)
    ours = oracle_checks.assert_same_as_oracle(
        "plan_window", with_arguments("plan_window", arguments, slot_mappings=[slots]), device
    )
    assert ours[4].tolist() == [[-1, 8, -1, -1, -1, -1]]


@pytest.mark.parametrize(("offset", "tokens"), [(3, 4), (4, 5), (5, 1), (9, 3), (50, 2), (8, 0)])
def test_plan_of_a_later_micro_batch(device, offset, tokens):
    """The slot mapping of a micro-batch is a slice. Token positions of the batch must not index it."""
    ours = oracle_checks.assert_same_as_oracle("plan_window", samples.plan(tokens=tokens, token_offset=offset), device)
    _, _, _, log_rows, row_slots, row_requests, row_positions, _, draft_start_loc, *_ = ours
    assert draft_start_loc.tolist() == [0, 3, 3, 6, 6, 6, 6]  # every micro-batch has those of the batch
    drafts = [1, 2, 3, 6, 7, 8]  # tokens of the batch
    here = [offset <= token < offset + tokens for token in drafts]
    slots = [100 + token - offset if inside else -1 for token, inside in zip(drafts, here, strict=True)]
    assert row_slots.tolist() == [slots]
    assert row_requests.tolist() == [0, 0, 0, 2, 2, 2]
    assert row_positions.tolist() == [0, 1, 2, 0, 1, 2]
    rows = {token - offset: row for row, token in enumerate(drafts)}
    assert log_rows.tolist() == [rows.get(t, -1) if t < tokens else -1 for t in range(tokens + 2)]


@pytest.mark.parametrize("tokens", [2, 3, 7])
def test_plan_of_the_first_micro_batch(device, tokens):
    """It starts at token 0 and ends before the batch does. One request straddles the cut."""
    oracle_checks.assert_same_as_oracle("plan_window", samples.plan(tokens=tokens, token_offset=0), device)


@st.composite
def planned_batches(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=6))
    starts, cu = [0], []
    for given_tokens, drafts in requests:
        starts.append(starts[-1] + given_tokens + drafts)
        cu.append((cu[-1] if cu else 0) + drafts)
    return starts, cu


@given(st.data())
def test_plan_of_any_batch(device, data):
    starts, cu = data.draw(planned_batches())
    padding = data.draw(st.integers(0, 3))
    rows = (cu[-1] if cu else 0) + data.draw(st.integers(0, 3))
    offset = data.draw(st.integers(0, starts[-1]))
    tokens = starts[-1] - offset + padding
    if offset:
        tokens = data.draw(st.integers(0, tokens))
    groups = data.draw(st.integers(1, 3))
    bonus = data.draw(st.integers(0, 2))
    cu = [count + bonus * (q + 1) for q, count in enumerate(cu)]
    oracle_checks.assert_same_as_oracle(
        "plan_window",
        samples.plan(tuple(starts), tuple(cu), tokens, groups, rows, offset, num_bonus_tokens=bonus),
        device,
    )


def test_no_value_of_an_earlier_window_remains(device):
    other = {
        "query_start_loc": int32(0, 2), "cu_num_draft_tokens": int32(1), "counters": int64(0, 0, 0, 0, 0)
    }  # fmt: skip
    fresh = layouts.twin(with_arguments("plan_window", samples.plan(), **other), device)
    ours = layouts.twin(samples.plan(), device)
    ops.plan_window(*ours)
    again = with_arguments("plan_window", ours, **layouts.twin(other, device))
    ops.plan_window(*again)
    ops.plan_window(*fresh)
    assert all(torch.equal(a, b) for a, b in zip(again[3:9], fresh[3:9], strict=True))


@pytest.mark.parametrize("requests", [255, 256, 257, 3000])
def test_plan_of_a_large_batch(device, requests):
    """More requests than threads in a block, with rows and tokens over many blocks."""
    random = torch.Generator().manual_seed(requests)
    drafts = torch.randint(0, 5, (requests,), generator=random)
    lengths = drafts + torch.randint(0, 3, (requests,), generator=random)
    starts, cu = [0, *lengths.cumsum(0).tolist()], drafts.cumsum(0).tolist()
    arguments = samples.plan(tuple(starts), tuple(cu), starts[-1] + 9, 2, cu[-1] + 300)
    ours = oracle_checks.assert_same_as_oracle("plan_window", arguments, device)
    assert ours[7].tolist() == [11, 20 + cu[-1], 30, 40, 50]


# ---------------------------------------------------------------- acceptance


@pytest.mark.parametrize("sampled_dtype", ID_DTYPES, ids=str)
@pytest.mark.parametrize("draft_dtype", ID_DTYPES, ids=str)
@pytest.mark.parametrize("case", samples.OTHER_IDS)
def test_acceptance_by_hand(device, case, draft_dtype, sampled_dtype):
    arguments, accepted = samples.decided(case, draft_dtype, sampled_dtype)
    oracle_checks.assert_same_as_oracle("acceptance_mask", arguments, device)
    assert ops.acceptance_mask(*layouts.twin(arguments, device))[1].tolist() == accepted
    outputs = flags(*[1] * 9), int32(*[9] * 5), int64(*COUNTED_BEFORE)
    ours = oracle_checks.assert_same_as_oracle("reject_rows", (*arguments, *outputs), device)
    assert ours[4].tolist() == [*accepted, *[0] * (5 - len(accepted))]


@pytest.mark.parametrize("case", samples.WIDE_IDS)
def test_acceptance_of_wide_ids(device, case):
    arguments, accepted = samples.decided(case)
    oracle_checks.assert_same_as_oracle("acceptance_mask", arguments, device)
    assert ops.acceptance_mask(*layouts.twin(arguments, device))[1].tolist() == accepted


def test_sampled_tokens_of_any_strides(device):
    (drafts, sampled, cu), _ = samples.decided("half")
    wide = layouts.surrounded(torch.full((2, 10), 77))
    wide[:, ::2] = sampled
    by_column = layouts.surrounded(sampled.T.contiguous()).T
    for view in (wide[:, ::2], by_column):
        oracle_checks.assert_same_as_oracle("acceptance_mask", (drafts, view, cu), device)
    same_row = layouts.surrounded(torch.tensor([[5, 6, -1]])).expand(2, 3)
    oracle_checks.assert_same_as_oracle("acceptance_mask", (int64(5, 5), same_row, int32(0, 1, 2)), device)


def test_flags_after_the_last_draft_are_false(device):
    arguments = (int64(1, 1, 1, 1), layouts.surrounded(torch.tensor([[1, 1, 1, 1, 1]])), int32(0, 2))
    oracle_checks.assert_same_as_oracle("acceptance_mask", arguments, device)
    accepted, _ = ops.acceptance_mask(*layouts.twin(arguments, device))
    assert accepted.tolist() == [True, True, False, False]


@pytest.mark.parametrize("op", OPS)
def test_samples(device, op):
    for arguments in sample_inputs(op):
        oracle_checks.assert_same_as_oracle(op, arguments, device)


@st.composite
def verified(draw):
    """Drafts and sampled tokens of a few different ids, so that equal ones are common."""
    counts = draw(st.lists(st.integers(0, 4), max_size=5))
    most = max(counts, default=0)
    ids = st.integers(0, 2)
    drafts = [draw(ids) for _ in range(sum(counts))]
    columns = most + draw(st.integers(0, 1))
    sampled = []
    for _ in counts:
        row = [draw(ids) for _ in range(draw(st.integers(0, columns)))]
        sampled.append(row + [-1] * (columns - len(row)))
    starts = [sum(counts[:q]) for q in range(len(counts) + 1)]
    tokens = torch.tensor(sampled, dtype=draw(st.sampled_from(ID_DTYPES))).view(len(counts), columns)
    flat = torch.tensor(drafts, dtype=draw(st.sampled_from(ID_DTYPES)))
    return layouts.surrounded(flat), layouts.surrounded(tokens), int32(*starts)


@given(st.data())
def test_acceptance_of_any_batch(device, data):
    drafts, _, starts = arguments = data.draw(verified())
    oracle_checks.assert_same_as_oracle("acceptance_mask", arguments, device)
    extra_rows, extra_requests = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 2))
    requests = len(starts) - 1 + extra_requests
    outputs = flags(*[1] * (len(drafts) + extra_rows)), int32(*[9] * requests), int64(*COUNTED_BEFORE)
    oracle_checks.assert_same_as_oracle("reject_rows", (*arguments, *outputs), device)

    # A runner that knows the counts gets the same window.
    arguments, ours, theirs = (
        layouts.twin(arguments, device),
        layouts.twin(outputs, device),
        layouts.twin(outputs, device),
    )
    accepted, num_accepted = ops.acceptance_mask(*arguments)
    starts = arguments[2]
    num_rejected = (torch.diff(starts) - num_accepted).int()
    from_rejected = ops.acceptance_mask_from_rejected(num_rejected, starts, len(drafts))
    assert torch.equal(from_rejected[0], accepted)
    assert torch.equal(from_rejected[1], num_accepted)
    ops.reject_rows(*arguments, *ours)
    ops.reject_rows_from_rejected(num_rejected, starts, *theirs)
    assert layouts.same_memory(ours, theirs)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=6), st.integers(0, 3))
def test_counts_are_clamped(device, requests, extra):
    counts, rejected = [n for n, _ in requests], [r for _, r in requests]
    starts = int32(*(sum(counts[:q]) for q in range(len(counts) + 1)))
    num_rejected = int32(*rejected, *[99] * extra)
    oracle_checks.assert_same_as_oracle(
        "acceptance_mask_from_rejected", (num_rejected, starts, sum(counts) + extra), device
    )
    outputs = (flags(*[1] * (sum(counts) + extra)), int32(*[9] * (len(counts) + extra)), int64(1, 2, 3, 4, 5))
    oracle_checks.assert_same_as_oracle("reject_rows_from_rejected", (num_rejected, starts, *outputs), device)


@pytest.mark.parametrize("op", ["reject_rows", "reject_rows_from_rejected"])
def test_a_window_that_was_refused_rejects_nothing(device, op):
    """plan_window reports no drafts for it, so nothing may be restored or counted."""
    arguments = with_arguments(op, sample_inputs(op)[0], draft_start_loc=int32(0, 0, 0, 0))
    ours = oracle_checks.assert_same_as_oracle(op, arguments, device)
    assert not ours[-3].any()
    assert ours[-1].tolist() == COUNTED_BEFORE


@pytest.mark.gpu
def test_no_draft_of_a_refused_window_is_accepted_or_rejected(device):
    """The ops of a window pass the result of a refused window on: no request has drafts, whatever was rejected."""
    plan = layouts.twin(samples.plan(rows=5), device)
    row_rejected, num_accepted = layouts.twin((flags(*[1] * 5), int32(*[9] * 6)), device)
    ops.plan_window(*plan)
    ops.reject_rows_from_rejected(layouts.twin(int32(*[1] * 6), device), plan[8], row_rejected, num_accepted, plan[7])
    assert not plan[8].any()
    assert not row_rejected.any()
    assert not num_accepted.any()
    assert plan[7].tolist() == [10, 20, 30, 40, 51]


@pytest.mark.debug_mode
@pytest.mark.parametrize("op", ["reject_rows", "reject_rows_from_rejected"])
def test_more_drafts_than_rows(device, op):
    arguments = with_arguments(op, sample_inputs(op)[0], row_rejected=flags(*[1] * 6))
    bad_input.check_bad_data(
        op, arguments, ValueError, "draft_start_loc must not exceed the 6 rows of row_rejected, got 7$", device
    )


def test_a_large_batch_counts_every_row_once(device):
    """With rows over many blocks, the counters are the sum over all blocks."""
    random = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 6, (1000,), generator=random)
    starts, total = torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0)), int(counts.sum())
    drafts = torch.randint(0, 2, (total,), generator=random)
    sampled = torch.randint(-1, 2, (1000, 6), generator=random)
    outputs = flags(*[1] * (total + 77)), int32(*[9] * 1100), int64(*COUNTED_BEFORE)
    ours = oracle_checks.assert_same_as_oracle("reject_rows", (drafts, sampled, starts, *outputs), device)
    assert ours[5][2:4].sum().item() == 30 + 40 + total
    num_rejected = torch.randint(-2, 7, (1000,), generator=random).int()
    oracle_checks.assert_same_as_oracle("reject_rows_from_rejected", (num_rejected, starts, *outputs), device)


def test_counters_only_increase(device):
    arguments = sample_inputs("reject_rows", device)[0]
    for times in (1, 2, 3):
        ops.reject_rows(*arguments)
        assert arguments[-1].tolist() == [10, 20, 30 + 6 * times, 40 + 1 * times, 50]


def test_counters_follow_the_order_of_the_package(device):
    """The kernels use the indices of COUNTERS."""
    counters = torch.zeros(len(ops.COUNTERS), dtype=torch.int64, device=device)
    ops.plan_window(*with_arguments("plan_window", layouts.twin(samples.plan(), device), counters=counters))
    counted = dict(zip(ops.COUNTERS, counters.tolist(), strict=True))
    assert counted == {"windows": 1, "drafted": 6, "accepted": 0, "rejected": 0, "overflowed": 0}


# ---------------------------------------------------------------- errors: the message, and nothing written


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
def test_an_invalid_window_is_refused_as_a_whole(device, case):
    options, sentence = BAD_WINDOWS[case]
    arguments = samples.plan(**options, groups=2)
    bad_input.check_bad_data("plan_window", arguments, ValueError, sentence, device, unplanned(arguments))


def test_a_negative_token_offset():
    oracle_checks.refuse(
        "plan_window", samples.plan(token_offset=-1), ValueError, "token_offset must not be negative, got -1"
    )


@pytest.mark.debug_mode
@pytest.mark.parametrize("broken", [0, 300, 1023])
def test_one_bad_request_among_many(device, broken):
    """The output has no trace of the others. On CUDA every block must come to the same result, wherever the bad
    request is."""
    starts = torch.arange(0, 1025 * 4, 4)
    cu = torch.arange(3, 1025 * 3, 3)[:1024].clone()
    cu[broken:] += 2  # five drafts in four tokens
    arguments = samples.plan(tuple(starts.tolist()), tuple(cu.tolist()), 4096, 1, 4000)
    sentence = f"got 5 drafts in the 4 tokens of request {broken}"
    bad_input.check_bad_data("plan_window", arguments, ValueError, sentence, device, unplanned(arguments))


def _index_arguments(op):
    """Arguments that must be contiguous vectors, with their dtypes."""
    vectors = {
        "query_start_loc": "int32", "cu_num_draft_tokens": "int32", "draft_start_loc": "int32", "log_rows": "int32",
        "row_requests": "int32", "row_positions": "int32", "counters": "int64", "num_rejected": "int32",
        "row_rejected": "bool", "num_accepted": "int32",
    }  # fmt: skip
    names = argument_names(op)
    return [(op, name, vectors[name]) for name in names if name in vectors]


# Their length is the number of requests.
OF_ANY_LENGTH = [(op, "draft_start_loc") for op in OPS[1:]]
INDEX_ARGUMENTS = [case for op in OPS for case in _index_arguments(op)]


@pytest.mark.parametrize(("op", "name", "dtype"), INDEX_ARGUMENTS)
def test_index_arguments(op, name, dtype):
    """Dtype, number of dimensions, contiguity and, if another argument fixes it, length."""
    arguments = sample_inputs(op)[0]
    names = argument_names(op)
    good = arguments[names.index(name)]
    size = len(good)

    def refused(value, error, sentence):
        oracle_checks.refuse(op, with_arguments(op, arguments, **{name: value}), error, sentence)

    wrong = torch.int64 if dtype == "int32" else torch.int32
    refused(good.to(wrong), TypeError, rf"{name} must have dtype torch.{dtype}, got {wrong} \[{size}\]")
    refused(good.view(1, -1), ValueError, rf"{name} must be .*, got torch.{dtype} \[1, {size}\]")
    spaced = layouts.surrounded(torch.stack([good, good], 1).flatten())[::2]
    refused(spaced, ValueError, rf"{name} must be contiguous, got torch.{dtype} \[{size}\]")
    if name not in ("cu_num_draft_tokens", "row_rejected") and (op, name) not in OF_ANY_LENGTH:
        short = 1 if name in ("query_start_loc", "log_rows", "counters", "row_requests", "row_positions") else 2
        refused(good[:short], ValueError, rf"{name} must be .*, got torch.{dtype} \[{short}\]")


# (op, argument): invalid values, each with the expected and the given part of the message.
WRONG = {
    ("plan_window", "row_slots"): [
        (int64(*[5] * 6), "be [1 groups, num_log_rows]", "torch.int64 [6]"),
        (int64(*[5] * 12).view(2, 6), "be [1 groups, num_log_rows]", "torch.int64 [2, 6]"),
        (int32(*[5] * 6).view(1, 6), "have dtype torch.int64", "torch.int32 [1, 6]"),
        (int64(*[5] * 12).view(1, 12)[:, ::2], "be contiguous", "torch.int64 [1, 6]"),
    ],
    ("plan_window", "row_requests"): [
        (int32(*[5] * 7), "be of as many rows as row_slots", "torch.int32 [7]"),
    ],
    ("plan_window", "row_positions"): [
        (int32(*[5] * 7), "be of as many rows as row_slots", "torch.int32 [7]"),
    ],
    ("acceptance_mask", "draft_token_ids"): [
        (torch.ones(7), "have dtype torch.int32 or torch.int64", "torch.float32 [7]"),
        (int64(*range(7)).view(1, 7), "be [num_draft_tokens]", "torch.int64 [1, 7]"),
        (int64(*range(14))[::2], "be contiguous", "torch.int64 [7]"),
    ],
    ("acceptance_mask", "sampled_token_ids"): [
        (torch.ones(3, 5), "have dtype torch.int32 or torch.int64", "torch.float32 [3, 5]"),
        (int64(*range(15)), "be [>= 3 requests", "torch.int64 [15]"),
        (int64(*range(10)).view(2, 5), "be [>= 3 requests", "torch.int64 [2, 5]"),
    ],
    ("acceptance_mask_from_rejected", "num_draft_tokens"): [(-1, "not be negative", "-1")],
}


@pytest.mark.parametrize(
    ("op", "argument", "value", "expected", "got"),
    [(*where, *wrong) for where, wrongs in WRONG.items() for wrong in wrongs],
)
def test_wrong_argument(op, argument, value, expected, got):
    bad_input.refuse_argument(op, 0, argument, value, expected, got)


WRONG_SLOT_MAPPINGS = {
    "none": ([], ValueError, "slot_mappings must hold at least one slot mapping, got none"),
    "dtype": (
        [int32(*range(12))],
        TypeError,
        "slot_mappings[0] must have dtype torch.int64, got torch.int32 [12]",
    ),
    "strides": (
        [int64(*range(24))[::2]],
        ValueError,
        "slot_mappings[0] must be contiguous, got torch.int64 [12]",
    ),
    "lengths": (
        [int64(*range(12)), int64(*range(11))],
        ValueError,
        "slot_mappings[1] must be of the length of slot_mappings[0], torch.int64 [12], got torch.int64 [11]",
    ),
}


@pytest.mark.parametrize("case", WRONG_SLOT_MAPPINGS)
def test_wrong_slot_mappings(case):
    slot_mappings, error, sentence = WRONG_SLOT_MAPPINGS[case]
    arguments = samples.plan(groups=max(1, len(slot_mappings)))
    arguments = with_arguments("plan_window", arguments, slot_mappings=slot_mappings)
    oracle_checks.refuse("plan_window", arguments, error, re.escape(sentence))


@pytest.mark.debug_mode
@pytest.mark.parametrize(
    "starts",
    [(0, 3, 2, 7), (0, -5, 3, 7), (0, 2**31 - 1, 3, 7), (0, 3, 3, 2**31 - 1), (0, 7, 0, 0), (3, 3, 7, 7),
     (-1, 3, 3, 7), (2**31 - 1, 2**31 - 1, 2**31 - 1, 7)],
)  # fmt: skip
@pytest.mark.parametrize("op", OPS[1:])
def test_invalid_draft_starts(device, op, starts):
    """The CPU refuses them. The device must survive them: only outputs change, and counts stay valid."""
    arguments = with_arguments(op, sample_inputs(op)[0], draft_start_loc=int32(*starts))
    sentence = (
        r"draft_start_loc must (begin with 0, got|not decrease, got -?\d+ and -?\d+ around"
        r"|not exceed (the 7 |num_draft_tokens .7.,))"
    )
    left = bad_input.check_bad_data(op, arguments, ValueError, sentence, device)
    if left is not None:
        num_accepted = left[-1] if op.startswith("acceptance_mask") else left[-2]
        assert ((num_accepted >= 0) & (num_accepted <= 7)).all()


@pytest.mark.debug_mode
@pytest.mark.parametrize("op", ["acceptance_mask", "reject_rows"])
def test_more_drafts_than_draft_tokens(device, op):
    arguments = with_arguments(op, sample_inputs(op)[0], draft_token_ids=int64(*range(6)))
    sentence = "draft_start_loc must not exceed the 6 entries of draft_token_ids, got 7$"
    bad_input.check_bad_data(op, arguments, ValueError, sentence, device)


def test_more_drafts_than_the_length_of_the_mask():
    op = "acceptance_mask_from_rejected"
    arguments = with_arguments(op, sample_inputs(op)[0], num_draft_tokens=6)
    oracle_checks.refuse(op, arguments, ValueError, "draft_start_loc must not exceed num_draft_tokens .6., got 7$")


# output, and the input or output that it would share memory with
SHARED = [
    ("plan_window", "log_rows", "query_start_loc"),
    ("plan_window", "row_requests", "cu_num_draft_tokens"),
    ("plan_window", "row_requests", "row_positions"),
    ("plan_window", "log_rows", "row_positions"),
    ("plan_window", "row_slots", "slot_mappings"),
    ("plan_window", "draft_start_loc", "cu_num_draft_tokens"),
    ("plan_window", "draft_start_loc", "row_requests"),
    ("reject_rows", "num_accepted", "draft_start_loc"),
    ("reject_rows_from_rejected", "num_accepted", "num_rejected"),
    ("reject_rows_from_rejected", "num_accepted", "draft_start_loc"),
]


@pytest.mark.parametrize(
    ("op", "argument"), [("plan_window", "cu_num_draft_tokens"), ("acceptance_mask_from_rejected", "draft_start_loc")]
)
def test_too_many_requests(tmp_path, op, argument):
    """Kernels number requests in 32 bits. (This is a sparse file, and only its beginning is read.)"""
    counts = torch.from_file(str(tmp_path / "counts"), shared=True, size=2**31 + 1, dtype=torch.int32)
    (tmp_path / "counts").unlink()
    arguments = with_arguments(op, sample_inputs(op)[0], **{argument: counts})
    with pytest.raises(ValueError, match=rf"^{op}: {argument} must be of fewer than 2\^31 requests, got"):
        getattr(ops, op)(*arguments)


@pytest.mark.parametrize(("op", "output", "other"), SHARED)
def test_outputs_must_not_share_memory(op, output, other):
    arguments = sample_inputs(op)[0]
    names = argument_names(op)
    count = 12
    one = (int64 if output == "row_slots" else int32)(*[0] * count)
    if output == "row_slots":
        replaced = {"row_slots": one[:6].view(1, 6), "slot_mappings": [one]}
    else:
        sizes = {name: len(arguments[names.index(name)]) for name in (output, other)}
        replaced = {output: one[: max(sizes[output], 1)], other: one[: sizes[other]]}
        if output == "log_rows":
            replaced[output] = one
    oracle_checks.refuse(op, with_arguments(op, arguments, **replaced), ValueError, "must not share memory")


@pytest.mark.parametrize("output", ["log_rows", "row_requests", "row_positions", "counters", "draft_start_loc"])
def test_no_output_of_a_plan_overlaps_a_slot_mapping(output):
    """The blocks of the op read the slot mapping in any order."""
    arguments = sample_inputs("plan_window")[0]
    names = argument_names("plan_window")
    slots, taken = arguments[names.index("slot_mappings")][0], arguments[names.index(output)]
    memory = torch.zeros(max(slots.numel(), taken.numel()) * 2, dtype=torch.int64)
    memory[: slots.numel()] = slots
    replaced = {
        "slot_mappings": [memory[: slots.numel()]],
        "row_slots": arguments[names.index("row_slots")][:1].clone(),
        output: memory.view(taken.dtype)[: taken.numel()],
    }
    oracle_checks.refuse(
        "plan_window", with_arguments("plan_window", arguments, **replaced), ValueError, "must not share memory"
    )
