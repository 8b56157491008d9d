"""Test bound calls (`nwor_ops.ops.bound`): they do what the op does, and refuse what it refuses."""

from __future__ import annotations

import gc
import weakref

import bad_input
import pytest
import torch
from tensors import int32, int64, plan
from torch._subclasses.fake_tensor import FakeTensorMode

from nwor_ops import ops
from nwor_ops.ops import bound, registry
from nwor_ops.ops.bound import BINDABLE, bind
from nwor_ops.testing import layouts
from nwor_ops.testing.samples import argument_names, with_arguments


def raising_as_the_manager(call):
    def run(*arguments):
        try:
            call(*arguments)
        except Exception as error:
            raise bound.own_error(error) from None

    return run


begin_bound = raising_as_the_manager(bound.begin_bound)
begin_redirected_bound = raising_as_the_manager(bound.begin_redirected_bound)
commit_bound = raising_as_the_manager(bound.commit_bound)
commit_tokens_bound = raising_as_the_manager(bound.commit_tokens_bound)


def test_a_bound_plan(device):
    """A handle is made from one call. Each step passes its own counts and queries."""
    log_rows, row_slots = int32(*[77] * 4).to(device), torch.full((1, 3), 77, device=device)
    counters, draft_start_loc = torch.zeros(5, dtype=torch.int64, device=device), int32(7, 7, 7).to(device)
    handle = bind(
        "plan_window",
        query_start_loc=int32(0, 2, 4).to(device),
        cu_num_draft_tokens=int32(1, 2).to(device),
        slot_mappings=[int64(20, 21, 22, 23).to(device)],
        log_rows=log_rows,
        row_slots=row_slots,
        row_requests=int32(7, 7, 7).to(device),
        row_positions=int32(7, 7, 7).to(device),
        counters=counters,
        draft_start_loc=draft_start_loc,
    )
    assert (handle.dtype, tuple(handle.shape), handle.device.type) == (torch.int64, (4,), "cpu")
    assert log_rows.tolist() == [77] * 4  # nothing has run yet
    begin_bound(int32(0, 3).to(device), int32(2).to(device), handle)
    assert log_rows.tolist() == [-1, 0, 1, -1]
    assert (row_slots.tolist(), draft_start_loc.tolist()) == ([[21, 22, -1]], [0, 2, 2])
    assert counters.tolist() == [1, 2, 0, 0, 0]
    begin_bound(int32(0, 1, 4).to(device), int32(0, 3).to(device), handle)
    assert (log_rows.tolist(), row_slots.tolist()) == ([-1, 0, 1, 2], [[21, 22, 23]])


def named(op, arguments):
    given = dict(zip(argument_names(op), arguments, strict=False))
    return registry.OPS[op].arguments((), given)


def begun(requests, device="cpu", query_start_loc=None, idx_mapping=None):
    """The handle of a begin with this number of requests, which have no drafts.

    With `query_start_loc`, open_window is bound too. The commit takes that tensor and `idx_mapping` from the handle.
    """
    zeros, minus = torch.zeros(requests + 1, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
    rows, counters = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    filled = (zeros, zeros[1:].clone(), [torch.tensor([3])], minus, rows, minus.clone(), minus.clone(), counters,
              zeros.clone())  # fmt: skip
    given = named("plan_window", layouts.twin(filled, device))
    handle = bind("plan_window", **given)
    if query_start_loc is None:
        begin_bound(given["query_start_loc"], given["cu_num_draft_tokens"], handle)
        return handle
    states = torch.arange(requests)
    opening = (
        [torch.zeros(9, 4, 1, 4)], [1], zeros, zeros, torch.ones(requests, dtype=torch.int32), rows[:, :0],
        torch.zeros(1, requests + 1, 2, dtype=torch.int32), [states.clone()], [states[:, None].int()], states[None] + 0,
        states[None].int(), states.int(), None,
    )  # fmt: skip
    of_open = named("open_window", layouts.twin(opening, device)) | {"query_start_loc": given["query_start_loc"]}
    of_open |= {"draft_start_loc": torch.zeros_like(given["query_start_loc"])}
    if idx_mapping is None:
        of_open["idx_mapping"] = None
    handle = bind("open_window", handle, **of_open)
    counts = given["cu_num_draft_tokens"]
    begin_redirected_bound(query_start_loc, counts, handle, of_open["seq_lens"], idx_mapping)
    return handle


def begun_for(given):
    """The handle of a begin for the commit of a sample."""
    window = {name: given[name] for name in ("query_start_loc", "idx_mapping") if "query_start_loc" in given}
    return begun(given["draft_start_loc"].shape[0] - 1, given["draft_start_loc"].device, **window)


def run_bound(op, arguments):
    """Bind a call, and run it with its own arguments of a step."""
    given = named(op, arguments)
    if op == "plan_window":
        begin_bound(given["query_start_loc"], given["cu_num_draft_tokens"], bind(op, **given))
        return
    if op == "gated_delta_fold":
        bound.fold_bound(given["plan"], bind(op, **given | {"plan": given["plan"][:0]}))
        return
    before = begun_for(given)
    handle = bind(op, begun=before, **given)
    if op == "reject_rows":
        commit_tokens_bound(given["draft_token_ids"], given["sampled_token_ids"], handle)
        return
    if given.get("num_rows") is not None:
        bound.num_rows_of(before)[0] = given["num_rows"]
    commit_bound(given["num_rejected"], handle)


COMMITS = ("restore_slots_from_rejected", "close_window_from_rejected")


def call_of(op, device="cpu"):
    """A call for at least three requests, with drafts that have rows."""

    def fits(draft_start_loc, query_start_loc=None, **others):
        of_drafts = others.get("draft_token_ids", others.get("num_rejected"))
        return len(draft_start_loc) > 3 and (of_drafts is None or len(of_drafts) > 3)

    if op == "gated_delta_fold":
        return bad_input.call_with(op, "plan", device=device, where=lambda plan, **others: bool((plan[:, 3] > 0).any()))
    return bad_input.call_with(op, "draft_start_loc", device=device, where=fits)


@pytest.mark.parametrize("op", ["plan_window", "reject_rows", *COMMITS, "gated_delta_fold"])
def test_same_bytes_as_the_op(device, op):
    arguments = call_of(op, device)
    twin = layouts.twin(arguments)
    getattr(ops, op)(*arguments)
    run_bound(op, twin)
    assert layouts.same_memory(arguments, twin)


def test_calls_run_in_the_order_of_binding(device):
    """Two restores after the one that determines the outcome."""
    arguments = call_of("restore_slots_from_rejected", device)
    names = argument_names("restore_slots")
    twins = [layouts.twin(arguments) for _ in range(2)]
    for given in (named("restore_slots_from_rejected", one) for one in twins):
        rest = {name: given[name] for name in names}
        if given["caches"][0].data_ptr() == twins[0][0][0].data_ptr():
            first = bind("restore_slots_from_rejected", begun=begun_for(given), **given)
            commit_bound(given["num_rejected"], bind("restore_slots", first, **rest))
        else:
            ops.restore_slots_from_rejected(**given)
            ops.restore_slots(**rest)
    assert layouts.same_memory(*twins)


def test_a_commit_checks_the_numbers_of_its_begin(device):
    """Begin keeps the number of requests in its handle, and the caller writes the number of rows there."""
    op = "restore_slots_from_rejected"
    arguments = call_of(op, device)
    twin, given = layouts.twin(arguments), named(op, arguments)
    requests = given["draft_start_loc"].shape[0] - 1
    getattr(ops, op)(*arguments)
    before, larger = begun(requests, device), begun(requests + 1, device)
    handle, counts = bind(op, begun=before, **named(op, twin)), named(op, twin)["num_rejected"]
    num_rows = bound.num_rows_of(before)
    assert num_rows.tolist() == [-1]
    if given["num_rows"] is not None:
        num_rows[0] = given["num_rows"]
    commit_bound(counts, handle)
    assert layouts.same_memory(arguments, twin)
    wrong = bind(op, begun=larger, **named(op, twin))
    with pytest.raises(ValueError, match=rf"num_requests must be from 0 to the {requests} of .*, got {requests + 1}"):
        commit_bound(counts, wrong)
    num_rows[0] = given["log"].shape[1] + 1
    with pytest.raises(ValueError, match=r"^restore_slots_from_rejected: num_rows must be from 0 to the"):
        commit_bound(counts, handle)
    assert layouts.same_memory(arguments, twin)


def bound_plan(**others):
    """A handle of a plan for four requests, and the arguments of its call."""
    arguments = plan(**others)
    return bind("plan_window", **named("plan_window", arguments)), arguments


def test_a_handle_keeps_its_tensors():
    """The buffers live as long as the handle, and no longer."""
    numpy = pytest.importorskip("numpy")
    memory = numpy.full(14, 77, dtype=numpy.int32)
    alive = weakref.ref(memory)
    arguments = list(plan())
    query_start_loc, counts, arguments[3] = *arguments[:2], torch.from_numpy(memory)
    handle = bind("plan_window", **named("plan_window", arguments))
    del memory, arguments
    gc.collect()
    begin_bound(query_start_loc, counts, handle)
    assert alive().tolist() == [-1, 0, 1, 2, -1, -1, 3, 4, 5, -1, -1, -1, -1, -1]
    del handle
    gc.collect()
    assert alive() is None


def test_a_copy_of_a_handle_is_refused():
    handle, arguments = bound_plan()
    for other in (handle.clone(), handle[:1], torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"^_begin_bound: bound must be a handle that _bind has returned"):
            begin_bound(*arguments[:2], other)
    with pytest.raises(TypeError, match=r"^_begin_bound: bound must have dtype torch.int64"):
        begin_bound(*arguments[:2], handle.int())


@pytest.mark.gpu
def test_a_handle_on_the_device_is_refused(device):
    handle, arguments = bound_plan()
    with pytest.raises(TypeError, match=r"^_begin_bound: bound must be on device cpu"):
        begin_bound(*(argument.to(device) for argument in arguments[:2]), handle.to(device))


WRONG_STEPS = {
    "another dtype": (0, lambda t: t.long(), TypeError, "plan_window: query_start_loc must have dtype torch.int32"),
    "a lazy view": (0, torch._neg_view, ValueError, "^_begin_bound: query_start_loc must have its own memory"),
    "too short": (0, lambda t: t[:4], ValueError, r"plan_window: query_start_loc must be \[num_requests \+ 1\]"),
    "not contiguous": (1, lambda t: t.repeat_interleave(2)[::2], ValueError, "cu_num_draft_tokens must be contiguous"),
    "more requests": (1, lambda t: t.repeat(4), ValueError, "plan_window: num_requests must be from 0 to the 4"),
    "more drafts": (1, lambda t: t + 3, ValueError, "plan_window: cu_num_draft_tokens must give a request no more"),
}


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_a_step_with_invalid_arguments_writes_nothing(case):
    place, wrong, error, sentence = WRONG_STEPS[case]
    handle, arguments = bound_plan()
    before = layouts.twin(arguments)
    given = list(arguments[:2])
    given[place] = wrong(given[place])
    with pytest.raises(error, match=sentence):
        begin_bound(*given, handle)
    assert layouts.same_memory(arguments, before)


def test_step_must_not_share_an_output():
    handle, arguments = bound_plan()
    for place, name in ((0, "query_start_loc"), (1, "cu_num_draft_tokens")):
        given = list(arguments[:2])
        given[place] = arguments[3][: len(given[place])]  # log_rows
        with pytest.raises(ValueError, match=f"^plan_window: {name} must not share memory"):
            begin_bound(*given, handle)


@pytest.mark.parametrize("op", COMMITS)
def test_a_commit_needs_the_handle_of_its_begin(op):
    given = named(op, call_of(op))
    with pytest.raises(ValueError, match=r"^_commit_bound: bound must be a handle that was bound with begun"):
        commit_bound(given["num_rejected"], bind(op, **given))
    with pytest.raises(ValueError, match=rf"^{op}: begun must be a handle"):
        bind(op, begun=begun(1).clone(), **given)


def test_commit_of_a_window_without_states():
    given = named("close_window_from_rejected", call_of("close_window_from_rejected"))
    before = begun_for(given | {"idx_mapping": None})
    with pytest.raises(ValueError, match=r"^close_window_from_rejected: idx_mapping must be given exactly if"):
        commit_bound(given["num_rejected"], bind("close_window_from_rejected", begun=before, **given))


WRONG_TOKENS = {
    "another dtype": ("draft_token_ids", lambda t: t.float(), TypeError, "must have dtype torch.int32 or torch.int64"),
    "two dimensions": ("draft_token_ids", lambda t: t[None], ValueError, r"must be \[num_draft_tokens\]"),
    "too few requests": ("sampled_token_ids", lambda t: t[:1], ValueError, r"must be \[>= \d+ requests"),
    "too few drafts": ("draft_token_ids", lambda t: t[:3], ValueError, "must not exceed the 3 entries"),
    "an output": ("draft_token_ids", None, ValueError, "must not share memory"),
}


@pytest.mark.parametrize("case", WRONG_TOKENS)
def test_tokens_that_are_refused_write_nothing(case):
    name, wrong, error, sentence = WRONG_TOKENS[case]
    given = named("reject_rows", call_of("reject_rows"))
    handle = bind("reject_rows", begun=begun_for(given), **given)
    tokens = {name: given[name] for name in ("draft_token_ids", "sampled_token_ids")}
    tokens[name] = given["num_accepted"] if wrong is None else wrong(tokens[name])
    untouched = layouts.twin(list(given.values()))
    with pytest.raises(error, match=f"^reject_rows: .*{sentence}"):
        commit_tokens_bound(*tokens.values(), handle)
    assert layouts.same_memory(list(given.values()), untouched)


@pytest.mark.parametrize("op", BINDABLE)
def test_bind_checks_as_the_op(op):
    """The same error as the op's."""
    name = next(name for name in ("draft_start_loc", "row_slots", "plan") if name in argument_names(op))
    arguments = bad_input.call_with(op, name)
    wrong = with_arguments(op, arguments, **{name: torch.zeros(3)})
    with pytest.raises(TypeError, match=f"^{op}: {name} must have dtype") as by_op:
        getattr(ops, op)(*wrong)
    with pytest.raises(TypeError) as by_bind:
        bind(op, **named(op, wrong))
    assert str(by_bind.value) == str(by_op.value)
    with pytest.raises(TypeError, match=f"^{op}: missing a required argument"):
        bind(op)
    lazy = torch._neg_view(named(op, arguments)[name])
    with pytest.raises(ValueError, match=f"^{op}: {name} must have its own memory, got a negative view"):
        bind(op, **named(op, with_arguments(op, arguments, **{name: lazy})))
    if "caches" in argument_names(op):
        learned = [torch.zeros(2, requires_grad=True)]
        with pytest.raises(RuntimeError, match=rf"^{op}: caches\[0\] must not require a gradient"):
            bind(op, **named(op, with_arguments(op, arguments, caches=learned)))


def test_a_trace_refuses_bound_calls():
    """The schema of a handle hides which tensors are mutated."""
    handle, arguments = bound_plan()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(argument) for argument in arguments[:2]]
        with pytest.raises(registry.Refusal, match=r"^_begin_bound: hides which tensors are mutated"):
            begin_bound(*fakes, handle)
