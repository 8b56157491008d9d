"""torch.compile(fullgraph=True): the same bytes as eager, and no cache or log is ever copied.

The ops guarantee their bytes. torch and Inductor do not: the order of a sum depends on the instruction set and on the
number of threads. Steps in this file let torch compute only what every order computes exactly.
"""

from __future__ import annotations

import ast
import math
import re

import pytest
import torch
from oracle_checks import random_log
from tensors import flags, int32, int64
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.utils._pytree import tree_leaves

from nwor_ops import ops
from nwor_ops.ops import registry
from nwor_ops.testing import layouts, samples

# Everything that a step computes itself is smaller than a log, so a buffer of a log's size is a copy.
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 2, 101, 4, 2, 8
HIDDEN = HEADS * HEAD_SIZE
LOG_ROWS = 67
LOG_SIZE = LOG_ROWS * HEADS * HEAD_SIZE


@pytest.fixture(autouse=True, scope="module")
def own_compiler_cache():
    """Inductor's cache does not notice a changed mutability under the same op name (pytorch #187319)."""
    torch._dynamo.reset()
    with fresh_cache():
        yield
    torch._dynamo.reset()


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **options)


def small_integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def assert_same_as_eager(eager, compiled_function, *calls: tuple) -> None:
    """Results and all memory after the arguments, for each set of arguments."""
    for arguments in calls:
        ours, theirs = layouts.twin(arguments), layouts.twin(arguments)
        with torch.no_grad():
            result, expected = compiled_function(*ours), eager(*theirs)
        for one, other in zip(tree_leaves(result), tree_leaves(expected), strict=True):
            assert one is other is None or torch.equal(one, other)
        assert layouts.same_memory(ours, theirs)
        assert not layouts.same_memory(ours, arguments), "nothing was written: the test shows nothing"


def allocations(function, *arguments) -> list[int]:
    """Elements of every buffer that Inductor's code for this call allocates."""
    with torch.no_grad():
        _, codes = run_and_get_code(compiled(function), *layouts.twin(arguments))
    assert codes
    lines = [line for code in codes for line in code.splitlines() if not line.lstrip().startswith(("#", "//"))]
    code = "\n".join(lines)
    # Other ways in which Inductor's code could make or fill a buffer.
    assert not re.search(r"\baten\.(clone|copy|copy_|empty\w*|new_empty\w*)\b", code)
    return allocated_elements(code)


def allocated_elements(code: str) -> list[int]:
    return [math.prod(ast.literal_eval(size)) for size in re.findall(r"= empty_strided\w*\((\([^()]*\))", code)]


# ---------------------------------------------------------------- the transaction


def transaction(
    backing, keys, values, slot_mapping, query_start_loc, cu_num_draft_tokens, draft_token_ids,
    sampled_token_ids, log_rows, row_slots, row_requests, row_positions, row_rejected, num_accepted,
    counters, draft_start_loc, logs, scale, row_windows,
):  # fmt: skip
    """Plan, write every layer, decide, put back: one graph, every view made inside it. Other code reads the cache."""
    ops.plan_window(
        query_start_loc, cu_num_draft_tokens, [slot_mapping], log_rows, row_slots, row_requests,
        row_positions, counters, draft_start_loc,
    )  # fmt: skip
    read, blocks, offsets = [], slot_mapping // BLOCK_SIZE, slot_mapping % BLOCK_SIZE
    for layer in range(LAYERS):
        key_cache, value_cache = backing[:, layer].split(HEAD_SIZE, -1)
        key_log, value_log = logs[layer].split(HEAD_SIZE, -1)
        ops.write_kv_logged(
            keys[layer] * 2, values[layer] + 1, key_cache, value_cache, slot_mapping, scale, scale, "auto",
            log_rows, key_log, value_log, counters[:1], row_windows[layer],
        )  # fmt: skip
        read.append(key_cache[blocks, offsets] + value_cache[blocks, offsets])
    ops.reject_rows(draft_token_ids, sampled_token_ids, draft_start_loc, row_rejected, num_accepted, counters)
    # A list of planes: every layer of the one backing buffer, keys and values together.
    ops.restore_slots(list(backing.unbind(1)), logs, row_slots[0], row_rejected)
    accepted, _ = ops.acceptance_mask(draft_token_ids, sampled_token_ids, draft_start_loc)
    return accepted, num_accepted + 1, read


def transaction_arguments(padding: int = 0) -> tuple:
    """Requests of 1 + 3 and 2 + 2 tokens (given and drafted); one of three and two of two drafts accepted."""
    backing = layouts.random_bytes(BLOCKS * LAYERS * BLOCK_SIZE * HIDDEN * 2, torch.int16, seed=4).float()
    tokens = 8 + padding
    return (
        backing.view(BLOCKS, LAYERS, BLOCK_SIZE, HEADS, 2 * HEAD_SIZE),
        small_integers(LAYERS, tokens, HEADS, HEAD_SIZE, seed=1),
        small_integers(LAYERS, tokens, HEADS, HEAD_SIZE, seed=2),
        int64(40, 41, 42, 43, 7, 6, 5, 403, *[-1] * padding), int32(0, 4, 8), int32(3, 5), int64(11, 12, 13, 14, 15),
        torch.tensor([[11, 99, -1, -1], [14, 15, 16, -1]]), int32(*[5] * tokens),
        int64(*[5] * LOG_ROWS).view(1, -1),
        int32(*[5] * LOG_ROWS), int32(*[5] * LOG_ROWS), flags(*[1] * LOG_ROWS), int32(9, 9),
        int64(*[0] * len(ops.COUNTERS)), int32(9, 9, 9),
        small_integers(LAYERS, LOG_ROWS, HEADS, 2 * HEAD_SIZE, seed=5), torch.ones(1),
        int64(*[0] * LAYERS * LOG_ROWS).view(LAYERS, LOG_ROWS),
    )  # fmt: skip


def test_transaction():
    """One compilation serves steps of any number of tokens. Only prompt, target and accepted slots change."""
    compiled_transaction = compiled(transaction)
    assert_same_as_eager(transaction, compiled_transaction, *map(transaction_arguments, (0, 3, 1, 5)))
    arguments = transaction_arguments()
    ours = layouts.twin(arguments)
    with torch.no_grad():
        compiled_transaction(*ours)
    changed = (ours[0] != arguments[0]).flatten(3).any(-1).any(1)
    slots = [block * BLOCK_SIZE + offset for block, offset in changed.nonzero().tolist()]
    assert slots == [5, 6, 7, 40, 41, 403]


def test_transaction_copies_nothing():
    sizes = allocations(transaction, *transaction_arguments())
    assert sizes, "the pattern finds no allocation at all: it no longer fits Inductor's code"
    assert max(sizes) < LOG_SIZE


@pytest.mark.parametrize("copied", [0, 16])
def test_copy_is_seen(copied):
    """The check above can fail: a functional step keeps the old cache, or the old log."""
    sizes = allocations(
        lambda *arguments: (arguments[copied].clone(), transaction(*arguments)), *transaction_arguments()
    )
    assert max(sizes) >= LOG_SIZE


def test_log_and_restore_around_another_writer():
    """The other writer is traced too: neither Inductor nor functionalisation may reorder across it."""

    def undone(cache, slots, rows, log, rejected):
        ops.log_slots(cache, slots, rows, log[0])
        cache.add_(1)
        ops.restore_slots([cache], log, slots, rejected)
        return cache * 2

    cache = small_integers(5, 4, 2, 8)
    arguments = (cache, int64(3, 17, 8), int32(2, 0, 1), random_log([cache], 3), flags(1, 0, 1))
    assert_same_as_eager(undone, compiled(undone), arguments)


# ---------------------------------------------------------------- family shadow


def are_apart(arguments) -> bool:
    """Return whether no two tensors are views of one storage. A trace rebuilds such inputs from their common base, and
    Inductor copies it. A model makes its views in the traced function."""
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.numel()]
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)


def num_elements(arguments) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor))


def call_with_writer(op):
    """A call of a window of shadow pages, whose planes another writer changes in the same graph."""

    def redirects(slot_mappings, page_offsets, caches, **_):
        return len(slot_mappings) == 1 and page_offsets is None and caches[0].dtype == torch.float32

    calls = (samples.named(op, call.arguments) for call in samples.recorded(op, 400))
    return next(call for call in calls if redirects(**call) and are_apart(call))


@pytest.mark.parametrize("op", ["open_window", "close_window"])
def test_shadow_pages(op):
    """The redirect happens in the graph before the writer, and no plane is copied."""

    def step(arguments):
        getattr(ops, op)(**arguments)
        for plane in arguments["caches"]:
            plane[arguments["slot_mappings"][0][:2] // plane.shape[1]] = 7.0
        return arguments["block_tables"][0].clone()

    arguments = call_with_writer(op)
    assert_same_as_eager(step, compiled(step), (arguments,))
    assert max(allocations(step, arguments), default=0) < arguments["caches"][0].numel()


# ---------------------------------------------------------------- every op


@pytest.mark.long
@pytest.mark.parametrize("op", registry.OPS)
def test_op_alone(device, op):
    """Nothing is allocated or copied around an op, and every mutation is kept."""
    arguments = max(filter(are_apart, samples.calls(op, 40, device)), key=num_elements)
    code = check_compiled(op, arguments)
    assert not re.search(r"\baten\.(clone|copy)", code)
    assert not any(allocated_elements(code))


def check_compiled(op: str, arguments: tuple) -> str:
    """Compare with eager, and return Inductor's code."""
    eager, ours = layouts.twin(arguments), layouts.twin(arguments)
    with torch.no_grad():
        expected = getattr(ops, op)(*eager)
        result, codes = run_and_get_code(compiled(getattr(ops, op)), *ours)
    for one, other in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        assert one is other is None or torch.equal(one, other)
    assert layouts.same_memory(ours, eager)
    return "".join(codes)


# Ops with samples of views of one storage. Those of gated_delta_verify and gated_delta_fold have several dtypes in one
# page, and "aot_autograd() does not yet handle input mutations on views with different dtypes".
ON_VIEWS = (
    "write_kv", "write_kv_logged", "restore_slots", "restore_slots_from_rejected", "commit_staged", "move_slots",
    *samples.ops_of("shadow"),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("op", ON_VIEWS)
def test_op_on_views_of_one_storage(device, op):
    """Every mutation is kept, also if inputs are key and value planes of one cache, or views of one projection."""
    calls = [call for call in samples.calls(op, 40, device) if not are_apart(call)]
    check_compiled(op, max(calls, key=num_elements))


# ---------------------------------------------------------------- aliasing (pytorch #198031)


def log_into_a_clone(cache, slots, rows):
    log = cache[0].clone()
    ops.log_slots(cache, slots, rows, log)
    return log


def restore_from_a_clone(cache, slots, rows):
    log = cache[:1].clone()
    ops.restore_slots([cache], log[:, :3], slots, rows > 0)
    return log


@pytest.mark.parametrize("function", [log_into_a_clone, restore_from_a_clone])
def test_a_clone_stays_a_clone(function):
    """A functionalised `y = x.clone(); op_(y, x)` must not silently become `op_(x, x)`.

    If the compiler drops the clone, the op sees shared memory and refuses before it writes.
    """
    arguments = (small_integers(5, 4, 2, 8), int64(17, 3, 0), int32(2, 0, 3))
    ours, theirs = layouts.twin(arguments), layouts.twin(arguments)
    expected = function(*theirs)
    try:
        result = compiled(function)(*ours)
    except ValueError as error:
        assert "must not share memory" in str(error)  # noqa: PT017  (either outcome is right)
        assert layouts.same_memory(ours, arguments)
    else:
        assert torch.equal(result, expected)
        assert layouts.same_memory(ours, theirs)


def test_aliasing_is_an_error_when_compiled_too():
    def aliased(cache, slots, rows):
        ops.log_slots(cache, slots, rows, cache[0])

    with pytest.raises(Exception, match="log and cache must not share memory"):
        compiled(aliased)(small_integers(5, 4, 2, 8), int64(17, 3, 0), int32(2, 0, 3))


# ---------------------------------------------------------------- views of inputs that do not start their storage

OFFSET_VIEWS = {
    "select": lambda rows: [rows.view(2, LOG_ROWS)[0], rows.view(2, LOG_ROWS)[1]],
    "slice": lambda rows: [rows[:LOG_ROWS], rows[LOG_ROWS:]],
    "slice of a slice": lambda rows: [rows[1:-1][: LOG_ROWS - 1], rows[2:][LOG_ROWS - 2 : -1]],
    "split": lambda rows: rows.split(LOG_ROWS),
    "whole": lambda rows: [rows],
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("view", OFFSET_VIEWS)
@pytest.mark.parametrize("dynamic", [False, None])
def test_mutated_views_of_an_input_inside_its_storage(view, backend, dynamic):
    """torch adds the input's offset twice for some views (nwor_ops/torch_fixes.py): neighbours would be overwritten."""

    def mark_rows(cache, slots, log_rows, window_id, rows, log):
        for part in OFFSET_VIEWS[view](rows):
            ops.log_slots(cache, slots, log_rows, log[: part.shape[0]], None, window_id, part)
        return window_id + 1

    def call(window: int) -> tuple:
        memory = torch.zeros(5 + 2 * LOG_ROWS + 5, dtype=torch.int64)
        log = torch.zeros(3 * LOG_ROWS, HEADS, HEAD_SIZE)
        return (
            small_integers(BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE), int64(9, 2), int32(0, LOG_ROWS - 2),
            int64(window), memory[5:-5], log[LOG_ROWS:],
        )  # fmt: skip

    function = compiled(mark_rows, backend=backend, dynamic=dynamic)
    assert_same_as_eager(mark_rows, function, call(7), call(8))
