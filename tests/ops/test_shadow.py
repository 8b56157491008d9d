"""Test the family shadow beyond its random windows: by hand, many planes, and inconsistent requests."""

from __future__ import annotations

import functools
import itertools

import bad_input
import oracle_checks
import pytest
import torch

from nwor_ops import ops
from nwor_ops.testing import layouts, samples
from nwor_ops.testing.samples import named, with_arguments


def test_by_hand(device):
    """One request: a target at position 5 and drafts at 6 and 7. This test does not depend on the oracle.

    Its page is block 2, its shadow page block 3. The first draft is accepted.
    """

    def on_device(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=device)

    cache = torch.arange(16.0, device=device).view(4, 4, 1, 1).clone()  # [blocks, block_size, heads, width]
    starts, drafts, lengths = on_device(0, 3), on_device(0, 2), on_device(8)  # [requests (+ 1)]
    row_slots = on_device([10, 11], dtype=torch.int64)  # [groups, rows]
    slots, table = on_device(9, 10, 11, dtype=torch.int64), on_device([0, 2])  # [tokens], [requests, blocks]
    shadow_blocks, tail_pages = on_device([[3]]), on_device([0])  # [groups, states, pages], [groups, requests]
    saved_slots = on_device([0, 0, 0], dtype=torch.int64)  # [groups, tokens]

    ops.open_window(
        [cache], [1], starts, drafts, lengths, row_slots, shadow_blocks, [slots], [table], saved_slots, tail_pages
    )
    assert (slots.tolist(), table.tolist()) == ([13, 14, 15], [[0, 3]])
    assert cache[3, 0].item() == 8.0  # the committed row, position 4

    cache.view(-1)[slots] = on_device(-1.0, -2.0, -3.0, dtype=torch.float32)  # a forward
    rejected = torch.tensor([False, True], device=device)
    ops.close_window([cache], [1], starts, drafts, rejected, shadow_blocks, saved_slots, tail_pages, [slots], [table])
    assert (slots.tolist(), table.tolist()) == ([9, 10, 11], [[0, 2]])
    assert cache[2].flatten().tolist() == [8.0, -1.0, -2.0, 11.0]


@functools.cache
def opening():
    """An `open_window` of one group without a page table whose first two requests draft, and copied rows before."""

    def fits(draft_start_loc, row_slots, slot_mappings, idx_mapping, page_offsets, **_):
        drafts = draft_start_loc.diff()
        return (
            len(slot_mappings) == 1 and page_offsets is None and idx_mapping is not None and len(drafts) > 2
            and (drafts[:2] > 0).all() and (row_slots[0, draft_start_loc[:2].long()] >= 0).all()
        )  # fmt: skip

    calls = (call.arguments for call in samples.recorded("open_window", 200))
    return next(call for call in calls if fits(**named("open_window", call)))


@pytest.mark.parametrize("op", samples.ops_of("shadow"))
@pytest.mark.parametrize("layers", [1, 4, 5, 320, 321, 700])
def test_window_of_many_planes(device, layers, op):
    """On CUDA the addresses of 320 planes fit in one launch. Slots and tables are redirected once."""
    arguments = bad_input.call_with(op, "caches", where=lambda slot_mappings, **_: len(slot_mappings) == 1)
    caches = [layouts.twin(arguments[0][0]) for _ in range(layers)]
    oracle_checks.assert_same_as_oracle(
        op, with_arguments(op, arguments, caches=caches, planes_per_group=[layers]), device
    )


@pytest.mark.parametrize("held", ["none", "before", "after", "first", "far"])
def test_held_rows_of_another_page(device, held):
    """Held rows of another page, or rows after the held one, are not used."""
    values = named("open_window", opening())
    size = values["caches"][0].shape[1]
    tail = int(values["row_slots"][0, 0]) // size * size
    slot = {"none": -1, "before": tail - 1, "after": tail + size, "first": tail, "far": 10**6}[held]
    shape = values["shadow_blocks"].shape
    arguments = with_arguments("open_window", opening(), held_slots=torch.full(shape, slot))
    oracle_checks.assert_same_as_oracle("open_window", arguments, device)


def changed(name, place, value):
    tensor = named("open_window", opening())[name].clone()
    tensor[place] = value
    return {name: tensor}


# The changed element, the error, and whether only the second request is left out on CUDA.
INCONSISTENT = {
    "tokens past the batch": (
        "query_start_loc",
        2,
        10**6,
        ValueError,
        "query_start_loc must give each request",
        False,
    ),
    "drafts past the rows": ("draft_start_loc", -1, 10**6, ValueError, "draft_start_loc must not exceed the", False),
    "starts that decrease": ("draft_start_loc", 1, 10**6, ValueError, "draft_start_loc must not", False),
    "a state out of range": ("idx_mapping", 1, 10**6, IndexError, r"idx_mapping must be in .*, got 1000000", True),
    "a padded request with drafts": ("idx_mapping", 1, -1, IndexError, r"idx_mapping must be in .*, got -1", True),
    "a length that is too short": ("seq_lens", 1, 0, ValueError, "row_slots must have the offset in its page", True),
}


@pytest.mark.debug_mode
@pytest.mark.parametrize("case", INCONSISTENT)
def test_inconsistent_request(device, case):
    """On CUDA the other requests are redirected, as if the inconsistent one had no slots."""
    name, place, value, error, sentence, leaves_one = INCONSISTENT[case]
    starts, row_slots = named("open_window", opening())["draft_start_loc"], named("open_window", opening())["row_slots"]
    call, left = with_arguments("open_window", opening(), **changed(name, place, value)), None
    if leaves_one:
        row_slots = row_slots.clone()
        row_slots[0, int(starts[1]) : int(starts[2])] = -1
        left = bad_input.left_by_the_oracle(
            "open_window", with_arguments("open_window", opening(), row_slots=row_slots)
        )
    ours = bad_input.check_bad_data("open_window", call, error, sentence, device, reported=r"\w+ must ")
    if ours is not None and left is not None:
        ours, left = named("open_window", ours), named("open_window", left)
        for name in ("caches", "slot_mappings", "block_tables", "tail_pages"):
            assert layouts.same_memory(ours[name], left[name]), name


@pytest.mark.debug_mode
@pytest.mark.parametrize("block", [-1, 10**6])
def test_shadow_block_outside_the_cache(device, block):
    """On CUDA no request is redirected."""
    call = with_arguments("open_window", opening(), shadow_blocks=torch.full_like(opening()[6], block))
    ours = bad_input.check_bad_data(
        "open_window", call, IndexError, rf"shadow_blocks must be in .*, got {block}", device
    )
    if ours is not None:
        assert all(layouts.same_memory(ours[place], call[place]) for place in (0, 7, 8))


@pytest.mark.debug_mode
def test_fewer_shadow_pages_than_drafts_need(device):
    """The drafts of some request begin in one page and end in the next."""

    def crosses(**values):
        if len(values["slot_mappings"]) > 1 or values["page_offsets"] is not None:
            return False
        size = values["caches"][0].shape[1]
        pages = (values["row_slots"][0] // size).where(values["row_slots"][0] >= 0, -1)
        starts = values["draft_start_loc"].tolist()
        states = values["idx_mapping"]
        return any(
            first < last and 0 <= pages[first] < pages[last - 1] and (states is None or states[request] >= 0)
            for request, (first, last) in enumerate(itertools.pairwise(starts))
        )

    calls = (call.arguments for call in samples.recorded("open_window", 200))
    call = next(call for call in calls if crosses(**named("open_window", call)))
    blocks = named("open_window", call)["shadow_blocks"][..., :1].clone()
    sentence = r"shadow_blocks must have a page for each page .*, got 1 pages where request \d+ needs 2"
    call = with_arguments("open_window", call, shadow_blocks=blocks, held_slots=None)
    bad_input.check_bad_data("open_window", call, ValueError, sentence, device)


@pytest.mark.debug_mode
@pytest.mark.parametrize("draft", [0, -1])
@pytest.mark.parametrize("op", ["close_window", "close_window_from_rejected"])
def test_saved_slot_outside_the_cache(device, op, draft):
    """CUDA leaves out the token. If it is the first draft of a request, CUDA leaves out the request."""

    def request_and_token(query_start_loc, draft_start_loc, **_):
        drafts = draft_start_loc.diff()
        request = int((drafts > 1).nonzero()[0])
        return request, int(query_start_loc[1 + request]) - (1 if draft else int(drafts[request]))

    def redirects(saved_slots, slot_mappings, **others):
        if not slot_mappings or not (others["draft_start_loc"].diff() > 1).any():
            return False
        request, token = request_and_token(**others)
        slot = saved_slots[0, token] if others["tail_pages"][0, request] >= 0 else -1
        return bool(slot >= 0 and slot != slot_mappings[0][token])

    arguments = bad_input.call_with(op, "slot_mappings", where=redirects)
    values = named(op, arguments)
    request, token = request_and_token(**values)
    kept = {name: torch.zeros_like(values[name]) for name in ("row_rejected", "num_rejected") if name in values}
    outside, without = (with_arguments(op, layouts.twin(arguments), **kept) for _ in range(2))
    named(op, outside)["saved_slots"][0, token] = 2**40
    if draft:
        named(op, without)["saved_slots"][0, token] = -1
    else:
        named(op, without)["tail_pages"][0, request] = -1
    left = bad_input.left_by_the_oracle(op, without)
    bad_input.check_bad_data(op, outside, IndexError, "saved_slots must be below .*, got 1099511627776", device, left)
