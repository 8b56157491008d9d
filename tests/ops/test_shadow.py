"""Test the family shadow against the oracle, on all surrounding memory."""

from __future__ import annotations

import bad_input
import oracle_checks
import pytest
import samples_shadow as samples
import shadow_windows
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import argument_names, ops_of, sample_inputs, with_arguments
from shadow_windows import Sequence, make_window
from tensors import flags, int32

from nwor_ops import ops
from nwor_ops.testing import layouts
from nwor_ops.testing.layouts import Shape
from nwor_ops.testing.oracle import shadow as oracle


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


ELEMENT_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.int16, torch.bfloat16, torch.float32, torch.int64)
OFFSETS = range(9)
OPS = ops_of("shadow")


@pytest.mark.parametrize("op", OPS)
def test_samples(device, op):
    for arguments in sample_inputs(op):
        oracle_checks.assert_same_as_oracle(op, arguments, device)


# ---------------------------------------------------------------- open_window, close_window


@pytest.mark.parametrize("dtype", ELEMENT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_window_in_every_layout(device, layout, dtype):
    for shape in (shadow_windows.WINDOW_SHAPE, Shape(60, 5, 3, 7, 7, 3), Shape(20, 16, 8, 64, 64, 5)):
        shadow_windows.run_and_compare_with_oracle(make_window(layout=layout, shape=shape, dtype=dtype), device)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 32, 64])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_window_of_any_block_size_and_groups(device, block_size, groups):
    shape = Shape(70 if block_size > 4 else 300, block_size, 2, 8, 8, 5)
    for idx_dtype in (torch.int32, torch.int64):
        window = make_window(shape=shape, groups=groups, idx_dtype=idx_dtype)
        shadow_windows.run_and_compare_with_oracle(window, device)


@pytest.mark.parametrize("amx", [False, True])
def test_window_with_page_offsets(device, amx):
    shadow_windows.run_and_compare_with_oracle(
        make_window(shape=Shape(60, 16, 2, 16, 16), layout="vec", amx=amx), device
    )


@pytest.mark.parametrize("offset", OFFSETS)
def test_window_of_misaligned_planes(device, offset):
    for shape in (shadow_windows.WINDOW_SHAPE, Shape(60, 4, 2, 16, 16, 2)):
        shadow_windows.run_and_compare_with_oracle(make_window(shape=shape, offset=offset), device)


@pytest.mark.parametrize("layers", [1, 3, 4, 5, 161, 320, 321, 700])
@pytest.mark.parametrize("groups", [1, 2])
def test_window_of_many_planes(device, layers, groups):
    """On CUDA the addresses of 320 planes fit in one launch. Slots and tables are redirected once."""
    window = make_window(shape=Shape(60, 4, 1, 8, 8, layers), groups=groups)
    shadow_windows.run_and_compare_with_oracle(window, device)


def test_window_of_many_requests(device):
    """More requests than a block redirects, and more than the rows of one page that are copied concurrently."""
    sequences = tuple(Sequence(3 + q % 40, 1, q % 4 if q % 40 > 5 else 0, q % 3, state=q) for q in range(300))
    shape = Shape(8000, 4, 2, 8, 8, 2)
    shadow_windows.run_and_compare_with_oracle(make_window(sequences, shape=shape, num_states=300, held=True), device)


def test_drafts_past_the_longest_sequence(device):
    sequences = (Sequence(12, 1, 4, 2, 0, without_slot=2), Sequence(9, 1, 3, 0, 1, without_slot=3))
    shadow_windows.run_and_compare_with_oracle(make_window(sequences), device)


@pytest.mark.parametrize("sequences", [(), (Sequence(3, 3),), (Sequence(0, 0),), (Sequence(4, 0, 4, 2, state=0),)])
def test_small_windows(device, sequences):
    shadow_windows.run_and_compare_with_oracle(make_window(sequences), device)


def test_a_window_that_was_refused(device):
    """plan_window reports no drafts for it, so nothing is redirected or copied."""
    window = make_window(held=True)
    window.tensors["draft_start_loc"].zero_()
    ours = shadow_windows.run_and_compare_with_oracle(window, device)
    assert layouts.same_memory(shadow_windows.state_of(ours)[:2], shadow_windows.state_of(window)[:2])


def test_without_request_states(device):
    """Without idx_mapping the state of a request is its number."""
    window = make_window(tuple(s for s in shadow_windows.MIXED if s.length))
    place = argument_names("open_window").index("idx_mapping")
    arguments = window.open_arguments()
    oracle_checks.assert_same_as_oracle("open_window", (*arguments[:place], None, *arguments[place + 1 :]), device)


def test_copying_only(device):
    """A second geometry of the same layers: rows are copied, tables and records do not change."""
    window = make_window()
    ours = oracle_checks.assert_same_as_oracle("open_window", window.open_arguments(redirects=False), device)
    assert layouts.same_memory(ours[5:], window.open_arguments(redirects=False)[5:])
    ops.open_window(*window.open_arguments())
    before = window.close_arguments(redirects=False)
    ours = oracle_checks.assert_same_as_oracle("close_window", window.close_arguments(redirects=False), device)
    assert layouts.same_memory(ours[1:], before[1:])


@pytest.mark.parametrize("layout", ["nhd", "packed", "packed_hnd", "one_backing"])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_promise(device, layout, groups):
    shadow_windows.assert_keeps_the_promise(make_window(layout=layout, groups=groups).copy(device))


def test_the_promise_can_fail():
    """Without the redirect the same test fails, because rejected drafts are in pages of requests."""
    window = make_window()
    window.open_arguments = lambda: make_window().open_arguments()
    with pytest.raises(AssertionError):
        shadow_windows.assert_keeps_the_promise(window)


@st.composite
def sequences(draw):
    """Requests with drafts, prompts, and padded rows at the end."""
    states, made = draw(st.permutations(range(6))), []
    for state in states[: draw(st.integers(0, 6))]:
        drafts = draw(st.integers(0, 5))
        given = draw(st.integers(0 if drafts else 1, 6))
        accepted = (
            tuple(i for i in range(drafts) if draw(st.booleans()))
            if draw(st.booleans())
            else draw(st.integers(0, drafts))
        )
        without = draw(st.integers(0, drafts)) if draw(st.integers(0, 4)) == 0 else 0
        length = draw(st.integers(0, 11)) + given + drafts
        made.append(Sequence(length, given, drafts, accepted, state, without))
    return (*made, *[Sequence(0, 0)] * draw(st.integers(0, 2)))


@given(st.data())
def test_any_window(device, data):
    block_size = data.draw(st.sampled_from([1, 2, 4, 7, 16]))
    options = {
        "sequences": data.draw(sequences()), "layout": data.draw(st.sampled_from([*layouts.LAYOUTS])),
        "shape": Shape(400 if block_size < 4 else 120, block_size, data.draw(st.integers(1, 2)), 4, 4,
                       data.draw(st.integers(1, 2))),
        "dtype": data.draw(st.sampled_from([torch.uint8, torch.bfloat16])), "groups": data.draw(st.integers(1, 2)),
        "seed": data.draw(st.integers(0, 99)),
        "idx_dtype": data.draw(st.sampled_from([torch.int32, torch.int64])), "held": data.draw(st.booleans()),
        "offset": data.draw(st.integers(0, 8)),
    }  # fmt: skip
    shadow_windows.run_and_compare_with_oracle(make_window(**options), device)
    shadow_windows.assert_keeps_the_promise(make_window(**options).copy(device))


# ---------------------------------------------------------------- shadow pages that stay


def test_held_rows_are_not_copied_again(device):
    ours = shadow_windows.run_and_compare_with_oracle(samples.held_window(), device)
    assert (ours.tensors["held_slots"][:, 0] == -1).all()  # the state of the prompt holds no rows


class Decoding:
    """Requests that decode step by step, in one pair of caches. Their shadow pages are kept, or filled again in each
    step.

    Page tables do not change owners. `accepted` and the drafts of each step are random.
    """

    def __init__(self, held, seed, requests=3, drafts=4):
        shape = Shape(80, 4, 1, 4, 4, 2)
        self.random = torch.Generator().manual_seed(seed)
        self.planes = layouts.make_pages("packed", shape, torch.uint8).key_caches
        self.block_size, self.drafts, self.requests = shape.block_size, drafts, requests
        shadows = (shape.block_size - 2 + drafts) // shape.block_size + 1
        self.shadow = torch.arange(80 - requests * shadows, 80, dtype=torch.int32).view(1, requests, shadows)
        self.held = torch.full(self.shadow.shape, -1) if held else None
        self.tables = torch.arange(60, dtype=torch.int32).view(20, 3).T[:requests].contiguous()
        self.lengths = [5 + q for q in range(requests)]
        self.copied = 0

    def step(self, drafts):
        """Run one step with these drafts per request. Return what attention read."""
        accepted = [int(torch.randint(0, n + 1, (1,), generator=self.random)) for n in drafts]
        ends = [length + 1 + n for length, n in zip(self.lengths, drafts, strict=True)]
        slots = [
            int(self.tables[q, p // self.block_size]) * self.block_size + p % self.block_size
            for q, end in enumerate(ends) for p in range(self.lengths[q], end)
        ]  # fmt: skip
        starts, draft_starts = [0], [0]
        for n in drafts:
            starts.append(starts[-1] + 1 + n)
            draft_starts.append(draft_starts[-1] + n)
        rows = [slots[t] for q, n in enumerate(drafts) for t in range(starts[q + 1] - n, starts[q + 1])]
        rejected = [i >= a for n, a in zip(drafts, accepted, strict=True) for i in range(n)]
        slot_mapping, saved = torch.tensor(slots), torch.full((1, len(slots)), 77)
        tails = torch.full((1, self.requests), 77, dtype=torch.int32)
        common = (self.planes, [len(self.planes)], int32(*starts), int32(*draft_starts))
        tables = [slot_mapping], [self.tables]
        shadows = torch.cat([plane[60:] for plane in self.planes])
        for plane in self.planes:  # so that a copied row is visible even if its value is unchanged
            plane[60:] ^= 0x55
        flipped = torch.cat([plane[60:] for plane in self.planes])
        ops.open_window(
            *common, int32(*ends), torch.tensor([rows], dtype=torch.int64), self.shadow, *tables, saved, tails,
            None, self.held,
        )  # fmt: skip
        copied = (torch.cat([plane[60:] for plane in self.planes]) != flipped).flatten(2).any(-1)
        for plane, rows_copied, old in zip(self.planes, copied.chunk(2), shadows.chunk(2), strict=True):
            plane[60:][~rows_copied] = old[~rows_copied]
        self.copied += int(copied.sum())
        for plane in self.planes:
            for slot in slot_mapping.tolist():
                value = torch.randint(0, 256, plane.shape[2:], generator=self.random, dtype=torch.uint8)
                plane[slot // self.block_size, slot % self.block_size] = value
        seen = [
            plane[self.tables[q, p // self.block_size], p % self.block_size].clone()
            for plane in self.planes for q, end in enumerate(ends) for p in range(end)
        ]  # fmt: skip
        ops.close_window(*common, flags(*rejected), self.shadow, saved, tails, *tables, None, self.held)
        self.lengths = [length + 1 + a for length, a in zip(self.lengths, accepted, strict=True)]
        return seen


@pytest.mark.parametrize("seed", range(6))
def test_kept_shadow_pages_show_the_same(seed):
    """Twelve steps, some without drafts: attention and pages are as if shadow pages were filled in every step."""
    staying, fresh = Decoding(True, seed), Decoding(False, seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(12):
        drafts = torch.randint(0, 5, (3,), generator=generator).tolist()
        for a, b in zip(staying.step(drafts), fresh.step(drafts), strict=True):
            assert torch.equal(a, b)
        for one, other in zip(staying.planes, fresh.planes, strict=True):
            assert torch.equal(one[:60], other[:60])
        assert torch.equal(staying.tables, fresh.tables)
    assert 0 < staying.copied < fresh.copied


def test_a_request_that_always_drafts_copies_once():
    """After the first window, every tail page is in its shadow page already."""
    decoding = Decoding(True, 0)
    decoding.step([3, 3, 3])
    first = decoding.copied
    assert first > 0
    for _ in range(8):
        decoding.step([4, 4, 4])
    assert decoding.copied == first


def test_a_reassigned_page_is_copied(device):
    """Held rows of another page, or rows after the held one, must not be used."""
    window = make_window((Sequence(11, 1, 3, state=0),), held=True)
    tail = int(window.tensors["row_slots"][0, 0]) // window.block_size
    for held in (-1, tail * 4 - 1, tail * 4 + 4, tail * 4, 10**6):
        window.tensors["held_slots"].fill_(held)
        shadow_windows.run_and_compare_with_oracle(window, device)


# ---------------------------------------------------------------- errors: the message, and nothing written


# The change, the error, and whether request 2 is the one that CUDA skips.
WRONG = {
    "a request with more drafts than tokens": (
        {"query_start_loc": int32(0, 4, 11, 16, 16, 16, 16)}, ValueError, "query_start_loc must give each request its "
        "drafts among the 30 tokens, got the end 16 for request 3", False,
    ),
    "tokens past the batch": (
        {"query_start_loc": int32(0, 4, 11, 16, 24, 99, 99)}, ValueError, "among the 30 tokens, got the end 99", False,
    ),
    "drafts past the rows": (
        {"draft_start_loc": int32(0, 3, 3, 7, 10, 99, 99)}, ValueError,
        "must not exceed the 14 rows .*, got 99", False,
    ),
    "starts that decrease": (
        {"draft_start_loc": int32(0, 3, 3, 7, 6, 6, 6)}, ValueError,
        "draft_start_loc must not decrease, got 7 and 6 around request 3", False,
    ),
    "a state out of range": (
        {"idx_mapping": int32(2, 0, 6, 1, 5, -1)}, IndexError,
        r"idx_mapping must be in \[0, 6\) .*, got 6 for request 2", True,
    ),
    "a drafting request that is padded": (
        {"idx_mapping": int32(2, 0, -1, 1, 5, -1)}, IndexError,
        r"idx_mapping must be in .*, got -1 for request 2", True,
    ),
    "a wrong length": (
        {"seq_lens": int32(14, 7, 12, 8, 10, 0)}, ValueError,
        "row_slots must have the offset in its page .* of a draft has, got slot .* at position .* of", True,
    ),
    "a length below the number of tokens": (
        {"seq_lens": int32(14, 7, 1, 8, 10, 0)}, ValueError, "at position -3 of request 2", True,
    ),
}  # fmt: skip
REPORTED = {  # the following requests are inconsistent too
    "a request with more drafts than tokens": r"got the end 16 for request [345]",
    "tokens past the batch": r"among the 30 tokens",
    "a length below the number of tokens": r"at position -\d of request 2",
}


@pytest.mark.debug_mode
@pytest.mark.parametrize("case", WRONG)
def test_inconsistent_windows(device, case):
    """On CUDA the other requests are redirected, as if the inconsistent one had no slots."""
    replaced, error, sentence, leaves_one = WRONG[case]
    window, left = make_window(), None
    arguments = with_arguments("open_window", window.open_arguments(), **replaced)
    if leaves_one:
        row_slots = window.tensors["row_slots"].clone()
        row_slots[0, 3:7] = -1
        without = with_arguments("open_window", window.open_arguments(), row_slots=row_slots)
        left = bad_input.left_by_the_oracle("open_window", without)
    ours = bad_input.check_bad_data("open_window", arguments, error, sentence, device, reported=REPORTED.get(case))
    if ours is not None and left is not None:
        for name in ("caches", "slot_mappings", "block_tables", "tail_pages"):
            place = argument_names("open_window").index(name)
            assert layouts.same_memory(ours[place], left[place]), name
        assert not layouts.same_memory(ours[7], arguments[7])


@pytest.mark.debug_mode
@pytest.mark.parametrize("case", ["shadow block -1", "shadow block 60", "one page", "two columns"])
def test_too_few_shadow_pages(device, case):
    """On CUDA a request without enough pages is not redirected. With one page, some requests have enough."""
    window = make_window(num_shadows=1) if case == "one page" else make_window()
    arguments, error, sentence = window.open_arguments(), IndexError, "shadow_blocks must be in "
    if case == "one page":
        error, sentence = ValueError, "got 1 pages where request 0 needs 2"
    elif case == "two columns":
        sentence = "got 1 columns where request 0 has page 3"
        narrow = [window.groups[0].block_table[:, :1]]
        arguments = with_arguments("open_window", arguments, block_tables=narrow)
    else:
        block = int(case.split()[-1])
        window.tensors["shadow_blocks"].fill_(block)
        sentence = rf"shadow_blocks must be in \[0, 60\), got {block}"
    reported = {"one page": r"got 1 pages where request \d needs 2", "two columns": "got 1 columns where request "}
    ours = bad_input.check_bad_data("open_window", arguments, error, sentence, device, reported=reported.get(case))
    if ours is not None and case != "one page":
        assert all(layouts.same_memory(ours[place], arguments[place]) for place in (0, 7, 8))


def past_the_window():
    """Two drafts without a slot in row_slots, but with a slot in the slot mapping, on a page past the table's row."""
    window = make_window((Sequence(10, 1, 4, 1, state=0), Sequence(3, 3, state=1)))
    window.tensors["row_slots"][0, 2:4] = -1
    narrow = [window.groups[0].block_table[:, :2]]
    return window, with_arguments("open_window", window.open_arguments(), block_tables=narrow)


def test_drafts_past_the_window_have_no_slot():
    """Without a slot in row_slots, a request needs no page for its last drafts. Their slots would be past its table
    row, or in the shadow page of another page."""
    few = make_window((Sequence(10, 1, 4, 1, state=0), Sequence(3, 3, state=1)), num_shadows=1)
    few.tensors["row_slots"][0, 2:4] = -1
    for arguments in (past_the_window()[1], few.open_arguments()):
        sentence = (
            "slot_mappings must have .* and no slot for a draft without one in row_slots, got slot .* of request 0"
        )
        oracle_checks.refuse("open_window", arguments, ValueError, sentence)


@pytest.mark.gpu
def test_drafts_past_the_window_are_skipped(device):
    window, _ = past_the_window()
    ours = window.copy(device)
    narrow = [ours.groups[0].block_table[:, :2]]
    own = ours.groups[0].slot_mapping[3:5].clone()
    ops.open_window(*with_arguments("open_window", ours.open_arguments(), block_tables=narrow))
    window.groups[0].slot_mapping[3:5] = -1
    oracle.open_window(*window.open_arguments())
    assert torch.equal(ours.groups[0].slot_mapping[3:5], own)
    ours.groups[0].slot_mapping[3:5] = -1
    assert layouts.same_memory(shadow_windows.state_of(ours), shadow_windows.state_of(window))


@pytest.mark.parametrize("change", [4, 1])
def test_a_slot_at_another_offset_in_its_page(change):
    """The third token of the first request: another page is accepted, another row or a slot past the end is not."""
    window = make_window()
    window.groups[0].slot_mapping[2] += change
    if change == 4:
        shadow_windows.run_and_compare_with_oracle(window)
    else:
        expected = "slot_mappings must have the offset in its page .*, got slot"
        oracle_checks.refuse("open_window", window.open_arguments(), ValueError, expected)
    window.groups[0].slot_mapping[2] = 240
    oracle_checks.refuse("open_window", window.open_arguments(), IndexError, "slot_mappings must be below 240, got 240")


@pytest.mark.debug_mode
@pytest.mark.parametrize("close", ["close_window", "close_window_from_rejected"])
def test_a_saved_slot_outside_the_cache(device, close):
    window = samples.opened(make_window())
    arguments, without = (
        with_arguments(close, window.close_arguments() if close == "close_window" else window.counted_arguments(),
                       saved_slots=saved_with(window, slot)) for slot in (2**40, -1)
    )  # fmt: skip
    left = bad_input.left_by_the_oracle(close, without)
    bad_input.check_bad_data(
        close, arguments, IndexError, "saved_slots must be below 240, got 1099511627776", device, left
    )


def saved_with(window, slot):
    saved = layouts.twin(window.tensors["saved_slots"])
    saved[0, 2] = slot
    return saved


E = "torch.int32"
WRONG_ARGUMENTS = [
    ("open_window", 0, "planes_per_group", [1], "add up to the 2 planes", "1"),
    ("open_window", 0, "planes_per_group", [], "hold 1 to 16 groups", "0"),
    ("open_window", 0, "planes_per_group", [3, -1], "not be negative", "-1"),
    ("open_window", 0, "slot_mappings", [], "hold one tensor for each of the 1 groups", "1"),
    ("open_window", 0, "shadow_blocks", lambda a: a[6][..., :0].contiguous(),
     "be of at least one page", f"{E} [1, 6, 0]"),
    ("open_window", 0, "shadow_blocks", lambda a: a[6].long(), "have dtype torch.int32", "torch.int64 [1, 6, 2]"),
    ("open_window", 0, "saved_slots", lambda a: a[9][:, :3].contiguous(), "be [num_groups, >= 30]",
     "torch.int64 [1, 3]"),
    ("open_window", 0, "tail_pages", lambda a: a[10][:, :3].contiguous(), "be [num_groups, >= 6]", f"{E} [1, 3]"),
    ("open_window", 0, "seq_lens", lambda a: a[4][:3], "be [num_requests] with at least 6", f"{E} [3]"),
    ("open_window", 0, "row_slots", lambda a: a[5][0], "be [num_groups, num_rows]", "torch.int64 [14]"),
    ("open_window", 0, "idx_mapping", lambda a: a[11][:3], "be [num_requests] with at least 6", f"{E} [3]"),
    ("open_window", 0, "held_slots", lambda a: a[12][:, :3].contiguous(), "be of the shape of shadow_blocks",
     "torch.int64 [1, 3, 2]"),
    ("open_window", 0, "draft_start_loc", int32(), "be [num_requests + 1] with at least 1", f"{E} [0]"),
    ("open_window", 0, "draft_start_loc", int32(3, 3, 3, 7, 10, 12, 12), "begin with 0", "3"),
    ("close_window", 0, "draft_start_loc", int32(-1, 3, 3, 7, 10, 12, 12), "begin with 0", "-1"),
    ("close_window", 0, "row_rejected", lambda a: a[4].byte(), "have dtype torch.bool", "torch.uint8 [14]"),
    ("close_window", 0, "saved_slots", lambda a: a[6].int(), "have dtype torch.int64", f"{E} [1, 32]"),
    ("close_window_from_rejected", 0, "num_rejected", lambda a: a[4].long(), "have dtype torch.int32",
     "torch.int64 [7]"),
    ("close_window_from_rejected", 0, "num_accepted", lambda a: a[6][:3], "be [num_requests] with at least 6",
     f"{E} [3]"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "sample", "argument", "value", "expected", "got"), WRONG_ARGUMENTS)
def test_wrong_argument(op, sample, argument, value, expected, got):
    bad_input.refuse_argument(op, sample, argument, value, expected, got)


SHARED = [
    ("open_window", "saved_slots", lambda a: a[7][0][None], r"slot_mappings\[0\] and saved_slots"),
    ("close_window_from_rejected", "counters", lambda a: a[9][0, :5], "counters and saved_slots"),
    ("close_window_from_rejected", "counters", lambda a: a[11][0][:5], "counters and slot_mappings"),
    ("close_window_from_rejected", "num_accepted", lambda a: a[10][0], "num_accepted and tail_pages"),
    ("close_window_from_rejected", "num_accepted", lambda a: a[2], "num_accepted and query_start_loc"),
    ("close_window_from_rejected", "num_accepted", lambda a: a[3], "num_accepted and draft_start_loc"),
]


@pytest.mark.parametrize(("op", "argument", "value", "names"), SHARED)
def test_source_and_destination_must_not_share_memory(op, argument, value, names):
    bad_input.refuse_shared(op, argument, value, names)


def test_tables_of_wrong_shapes():
    window = make_window()
    arguments = window.open_arguments()
    for name, value, sentence in (
        ("block_tables", [window.groups[0].block_table[:3]], r"block_tables\[0\] must be \[>= 6, max_num_blocks\]"),
        ("block_tables", [window.groups[0].block_table[:, ::2]], r"block_tables\[0\] must be contiguous along a row"),
        ("slot_mappings", [window.groups[0].slot_mapping[::2]], r"slot_mappings\[0\] must be contiguous"),
        ("block_tables", [], "block_tables must hold one tensor for each of the 1 groups"),
    ):
        oracle_checks.refuse(
            "open_window", with_arguments("open_window", arguments, **{name: value}), ValueError, sentence
        )


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_refused(op):
    bad_input.refuse_gradient(op, "caches")
