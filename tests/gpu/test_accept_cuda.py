"""Family accept on a GPU: planned windows and acceptance against the oracle, on all memory around; windows
that a device can only leave unplanned; opcheck."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import memory, surrounded, twin
from samples import (
    OTHER_IDS,
    WIDE_IDS,
    argument_names,
    decided,
    flags,
    int32,
    int64,
    plan_arguments,
    sample_inputs,
    with_arguments,
)

import nwor_ops
from nwor_ops import ops

ACCEPT = (
    "plan_window",
    "acceptance_mask",
    "acceptance_mask_from_rejected",
    "reject_rows",
    "reject_rows_from_rejected",
)
ID_DTYPES = (torch.int32, torch.int64)
COUNTED_BEFORE = [10, 20, 30, 40, 50]  # what `samples` puts into counters


@pytest.mark.parametrize("op", ACCEPT)
def test_samples(same_as_oracle, op):
    for arguments in sample_inputs(op):
        same_as_oracle(op, arguments)


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
def test_plan(same_as_oracle, batch, groups):
    starts, cu = batch
    exact = cu[-1] if cu else 0
    for rows in (exact, exact + 7):
        same_as_oracle("plan_window", plan_arguments(starts, cu, tokens=20, groups=groups, rows=rows))


def test_plan_of_too_many_groups(device):
    arguments = twin(plan_arguments(groups=129), device)
    with pytest.raises(ValueError, match="at most 128 slot mappings on CUDA, got 129"):
        ops.plan_window(*arguments)


@pytest.mark.parametrize(("offset", "tokens"), [(3, 4), (4, 5), (5, 1), (9, 3), (50, 2), (8, 0)])
def test_plan_of_a_later_micro_batch(device, offset, tokens):
    """A micro-batch's slot mapping is sliced: global token positions must not index it."""
    arguments = twin(plan_arguments(tokens=tokens, token_offset=offset), device)
    ops.plan_window(*arguments)
    _, _, _, log_rows, row_slots, row_requests, row_positions, *_ = arguments
    drafts = [1, 2, 3, 6, 7, 8]  # tokens of the batch
    here = [offset <= token < offset + tokens for token in drafts]
    slots = [100 + token - offset if inside else -1 for token, inside in zip(drafts, here, strict=True)]
    assert row_slots.tolist() == [slots]
    assert row_requests.tolist() == [0, 0, 0, 2, 2, 2]
    assert row_positions.tolist() == [0, 1, 2, 0, 1, 2]
    rows = {token - offset: row for row, token in enumerate(drafts)}
    assert log_rows.tolist() == [rows.get(t, -1) if t < tokens else -1 for t in range(tokens + 2)]


@st.composite
def planned_batches(draw):
    requests = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=6))
    starts, cu = [0], []
    for given_tokens, drafts in requests:
        starts.append(starts[-1] + given_tokens + drafts)
        cu.append((cu[-1] if cu else 0) + drafts)
    return tuple(starts), tuple(cu)


@settings(max_examples=60)
@given(planned_batches(), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
def test_plan_of_any_batch(same_as_oracle, batch, padding, spare_rows, groups):
    starts, cu = batch
    rows = (cu[-1] if cu else 0) + spare_rows
    same_as_oracle("plan_window", plan_arguments(starts, cu, starts[-1] + padding, groups, rows))


@pytest.mark.parametrize("requests", [255, 256, 257, 3000])
def test_plan_of_a_large_batch(same_as_oracle, requests):
    """More requests than threads in a block, rows and tokens over many blocks."""
    random = torch.Generator().manual_seed(requests)
    drafts = torch.randint(0, 5, (requests,), generator=random)
    lengths = drafts + torch.randint(0, 3, (requests,), generator=random)
    starts, cu = [0, *lengths.cumsum(0).tolist()], drafts.cumsum(0).tolist()
    arguments = plan_arguments(tuple(starts), tuple(cu), starts[-1] + 9, 2, cu[-1] + 300)
    ours = same_as_oracle("plan_window", arguments)
    assert ours[7].tolist() == [11, 20 + cu[-1], 30, 40, 50]


UNPLANNED = {
    "more drafts than rows": {"rows": 5},
    "no rows": {"rows": 0},
    "decreasing drafts": {"cu_num_draft_tokens": (3, 2, 6, 6)},
    "negative drafts": {"cu_num_draft_tokens": (-1, 3, 6, 6)},
    "far too many drafts": {"cu_num_draft_tokens": (3, 3, 6, 2**31 - 1)},
    "decreasing tokens": {"query_start_loc": (0, 5, 4, 9, 9)},
    "negative start": {"query_start_loc": (-3, 4, 5, 9, 9)},
    "more drafts than tokens": {"query_start_loc": (0, 2, 5, 9, 9)},
    "tokens beyond the slot mapping": {"tokens": 8},
}


@pytest.mark.parametrize("case", UNPLANNED)
def test_bad_window_is_left_unplanned_whole(device, case):
    """Every row of every output is -1, it is counted, and nothing is raised: the step goes on."""
    arguments = plan_arguments(**UNPLANNED[case], groups=2)
    ours = twin(arguments, device)
    ops.plan_window(*ours)
    assert all((output == -1).all() for output in ours[3:7])
    assert ours[7].tolist() == [10, 20, 30, 40, 51]
    expected = twin(arguments)
    for output in expected[3:7]:
        output.fill_(-1)
    expected[7][4] += 1
    assert all(torch.equal(a, b) for a, b in zip(memory(ours), memory(expected), strict=True))


@pytest.mark.parametrize("broken", [0, 300, 1023])
def test_one_bad_request_among_many(device, broken):
    """Every block comes to the same verdict, wherever the bad request is."""
    starts = torch.arange(0, 1025 * 4, 4)
    cu = torch.arange(3, 1025 * 3, 3)[:1024].clone()
    cu[broken:] += 2  # five drafts in four tokens
    ours = twin(plan_arguments(tuple(starts.tolist()), tuple(cu.tolist()), 4096, 1, 4000), device)
    ops.plan_window(*ours)
    assert all((output == -1).all() for output in ours[3:7])
    assert ours[7].tolist() == [10, 20, 30, 40, 51]


# ---------------------------------------------------------------- acceptance


@pytest.mark.parametrize("sampled_dtype", ID_DTYPES, ids=str)
@pytest.mark.parametrize("draft_dtype", ID_DTYPES, ids=str)
@pytest.mark.parametrize("case", OTHER_IDS)
def test_acceptance_by_hand(device, same_as_oracle, case, draft_dtype, sampled_dtype):
    arguments, accepted = decided(case, draft_dtype, sampled_dtype)
    assert ops.acceptance_mask(*twin(arguments, device))[1].tolist() == accepted
    same_as_oracle("acceptance_mask", arguments)
    outputs = flags(*[1] * 9), int32(*[9] * 5), int64(*COUNTED_BEFORE)
    ours = same_as_oracle("reject_rows", (*arguments, *outputs))
    assert ours[4].tolist() == [*accepted, *[0] * (5 - len(accepted))]


@pytest.mark.parametrize("case", WIDE_IDS)
def test_acceptance_of_wide_ids(device, same_as_oracle, case):
    arguments, accepted = decided(case)
    assert ops.acceptance_mask(*twin(arguments, device))[1].tolist() == accepted
    same_as_oracle("acceptance_mask", arguments)


def test_sampled_tokens_of_any_strides(same_as_oracle):
    (drafts, sampled, cu), _ = decided("half", torch.int64, torch.int32)
    wide = surrounded(torch.full((2, 10), 77, dtype=torch.int32))
    wide[:, ::2] = sampled
    for view in (wide[:, ::2], surrounded(sampled.T.contiguous()).T):
        same_as_oracle("acceptance_mask", (drafts, view, cu))


@st.composite
def verified(draw):
    """Drafts and sampled tokens of few different ids, so that equal ones are common."""
    counts = draw(st.lists(st.integers(0, 4), max_size=5))
    ids = st.integers(0, 2)
    drafts = [draw(ids) for _ in range(sum(counts))]
    columns = max(counts, default=0) + draw(st.integers(0, 1))
    sampled = []
    for _ in counts:
        row = [draw(ids) for _ in range(draw(st.integers(0, columns)))]
        sampled.append(row + [-1] * (columns - len(row)))
    cu = [sum(counts[: q + 1]) for q in range(len(counts))]
    tokens = torch.tensor(sampled, dtype=draw(st.sampled_from(ID_DTYPES))).view(len(counts), columns)
    flat = torch.tensor(drafts, dtype=draw(st.sampled_from(ID_DTYPES)))
    return surrounded(flat), surrounded(tokens), int32(*cu)


@settings(max_examples=60)
@given(verified(), st.integers(0, 3), st.integers(0, 2))
def test_acceptance_of_any_batch(same_as_oracle, arguments, spare_rows, spare_requests):
    drafts, _, cu = arguments
    same_as_oracle("acceptance_mask", arguments)
    outputs = (
        flags(*[1] * (len(drafts) + spare_rows)),
        int32(*[9] * (len(cu) + spare_requests)),
        int64(*COUNTED_BEFORE),
    )
    same_as_oracle("reject_rows", (*arguments, *outputs))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-9, 9)), max_size=6), st.integers(0, 3))
def test_counts_are_clamped(same_as_oracle, requests, extra):
    counts, rejected = [n for n, _ in requests], [r for _, r in requests]
    cu = int32(*(sum(counts[: q + 1]) for q in range(len(counts))))
    num_rejected = int32(*rejected, *[99] * extra)
    same_as_oracle("acceptance_mask_from_rejected", (num_rejected, cu, sum(counts) + extra))
    outputs = (
        flags(*[1] * (sum(counts) + extra)),
        int32(*[9] * (len(counts) + extra)),
        int64(*COUNTED_BEFORE),
    )
    same_as_oracle("reject_rows_from_rejected", (num_rejected, cu, *outputs))


def test_a_large_batch_counts_every_row_once(same_as_oracle):
    """Rows over many blocks: the counters are the sum of all of them."""
    random = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 6, (1000,), generator=random)
    cu, total = counts.cumsum(0).int(), int(counts.sum())
    drafts = torch.randint(0, 2, (total,), generator=random)
    sampled = torch.randint(-1, 2, (1000, 6), generator=random)
    outputs = flags(*[1] * (total + 77)), int32(*[9] * 1100), int64(*COUNTED_BEFORE)
    ours = same_as_oracle("reject_rows", (drafts, sampled, cu, *outputs))
    assert ours[5][2:4].sum().item() == 30 + 40 + total
    num_rejected = torch.randint(-2, 7, (1000,), generator=random).int()
    same_as_oracle("reject_rows_from_rejected", (num_rejected, cu, *outputs))


@pytest.mark.parametrize("op", ["reject_rows", "reject_rows_from_rejected"])
def test_a_window_that_was_never_planned_rejects_nothing(same_as_oracle, op):
    """More drafts than rows: plan_window left no slot, so nothing may be restored or counted."""
    arguments = with_arguments(op, sample_inputs(op)[0], row_rejected=flags(*[1] * 6))
    ours = same_as_oracle(op, arguments)
    assert not ours[-3].any()
    assert ours[-1].tolist() == COUNTED_BEFORE


@pytest.mark.parametrize("cu", [(3, 2, 7), (-5, 3, 7), (2**31 - 1, 3, 7), (3, 3, 2**31 - 1), (7, 0, 0)])
@pytest.mark.parametrize("op", ACCEPT[1:])
def test_cumulative_drafts_that_lie(device, op, cu):
    """What the CPU refuses, the device must survive: only outputs change, and each of their elements."""
    arguments = with_arguments(op, sample_inputs(op)[0], cu_num_draft_tokens=int32(*cu))
    ours = twin(arguments, device)
    results = getattr(ops, op)(*ours)
    if results is None:
        results = ours[-3], ours[-2]
        inputs = (arguments[:-3], ours[:-3])
    else:
        inputs = (arguments, ours)
    assert all(torch.equal(a, b) for a, b in zip(*map(memory, inputs), strict=True))
    assert ((results[1] >= 0) & (results[1] <= 7)).all()


# ---------------------------------------------------------------- torch's view of the ops


@pytest.mark.parametrize("op", ACCEPT)
def test_opcheck(device, op):
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for arguments in sample_inputs(op, device):
        torch.library.opcheck(getattr(torch.ops.nwor, op).default, arguments, test_utils=utilities)


def test_compiled_whole(device):
    """fullgraph: the window that eager code plans and settles, counters too."""

    def step(plan, drafts, sampled, rejected, num_accepted):
        ops.plan_window(*plan)
        ops.reject_rows(drafts + 1, sampled, plan[1], rejected, num_accepted, plan[7])
        return ops.acceptance_mask(drafts + 1, sampled, plan[1])[0].sum()

    sampled = surrounded(torch.tensor([[1, 2, 9, -1], [9, -1, -1, -1], [4, 5, 6, 9], [-1, -1, -1, -1]]))
    arguments = plan_arguments(), int64(0, 1, 2, 3, 4, 5), sampled, flags(*[1] * 6), int32(*[9] * 4)
    eager, compiled = twin(arguments, device), twin(arguments, device)
    expected = step(*eager)
    result = torch.compile(step, fullgraph=True)(*compiled)
    assert result.item() == expected.item() == 5
    assert all(torch.equal(a, b) for a, b in zip(memory(eager), memory(compiled), strict=True))
    assert eager[0][7].tolist() == [11, 26, 35, 41, 50]


@pytest.mark.parametrize("op", ACCEPT)
def test_a_tensor_left_on_the_cpu_is_refused(device, op):
    arguments = twin(sample_inputs(op)[0], device)
    for place, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor):
            mixed = (*arguments[:place], argument.cpu(), *arguments[place + 1 :])
            with pytest.raises(TypeError, match=f"^{op}: .* must be on device "):
                getattr(ops, op)(*mixed)


def test_counters_are_those_of_the_package(device):
    """The kernels count at the places that COUNTERS names."""
    counters = torch.zeros(len(nwor_ops.COUNTERS), dtype=torch.int64, device=device)
    place = argument_names("plan_window").index("counters")
    arguments = list(twin(plan_arguments(), device))
    arguments[place] = counters
    ops.plan_window(*arguments)
    counted = dict(zip(nwor_ops.COUNTERS, counters.tolist(), strict=True))
    assert counted == {"windows": 1, "drafted": 6, "accepted": 0, "rejected": 0, "overflowed": 0}
