"""Test the family staging against the oracle, on all surrounding memory."""

from __future__ import annotations

import re

import bad_input
import oracle_checks
import pytest
import samples_staging as samples
import samples_undo
import tensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import ROOT
from samples import ops_of, sample_inputs, with_arguments
from tensors import flags, int32, int64

from nwor_ops import ops
from nwor_ops.ops import staging
from nwor_ops.testing import layouts
from nwor_ops.testing.layouts import Shape
from nwor_ops.testing.raw_rows import raw


def test_by_hand(device):
    """Three tokens are staged, two rows are accepted and written. This test does not depend on the oracle."""
    key, value = torch.randn(2, 3, 1, 4, device=device)  # [tokens, heads, width]
    staged_key, staged_value = torch.zeros(2, 3, 1, 4, device=device)  # [rows, heads, width]
    key_cache, value_cache = torch.zeros(2, 2, 4, 1, 4, device=device)  # [blocks, block_size, heads, width]
    scale = torch.ones(1, device=device)
    ops.stage_kv(key, value, torch.tensor([2, 0, 1], dtype=torch.int32, device=device), staged_key, staged_value)
    assert torch.equal(staged_key, key[[1, 2, 0]])

    slots = torch.tensor([5, 6, 7], device=device)  # of each row
    accepted = torch.tensor([True, False, True], device=device)
    ops.commit_staged(staged_key, staged_value, slots, accepted, key_cache, value_cache, scale, scale, "auto")
    expected = torch.zeros(8, 4, device=device)
    expected[5], expected[7] = value[1, 0], value[0, 0]
    assert torch.equal(value_cache.view(8, 4), expected)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ELEMENT_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.int16, torch.bfloat16, torch.float32, torch.int64)
FORMATS = (
    ("auto", None),
    ("fp8", torch.uint8),
    ("fp8_e4m3", torch.float8_e4m3fn),
    ("fp8_e5m2", torch.uint8),
    ("fp8_e5m2", torch.float8_e5m2),
)
SHAPES = tensors.SHAPES | {"more_units_than_a_block": Shape(3, 4, 40, 256, 128)}
OFFSETS = range(9)
OPS = ops_of("staging")


@pytest.mark.parametrize("op", OPS)
def test_samples(device, op):
    for arguments in sample_inputs(op):
        oracle_checks.assert_same_as_oracle(op, arguments, device)


# ---------------------------------------------------------------- stage_kv


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_stage(device, shape, dtype):
    """Rows in any order, skipped tokens, every bit pattern."""
    oracle_checks.assert_same_as_oracle("stage_kv", samples.stage(shape, dtype), device)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).tolist()
    oracle_checks.assert_same_as_oracle(
        "stage_kv", samples.stage(shape, dtype, tuple(order[:200]), rows=300, marks=False), device
    )


@pytest.mark.parametrize("moved", ["key", "value", "staged_key", "staged_value"])
@pytest.mark.parametrize("offset", OFFSETS)
def test_stage_misaligned(device, moved, offset):
    """One of the four tensors starts at every element of a 16-byte word; the others are aligned."""
    arguments = samples.stage(Shape(1, 1, 2, 16, 32), torch.bfloat16)
    replaced = {}
    for place, name in {0: "key", 1: "value", 3: "staged_key", 4: "staged_value"}.items():
        tensor, shift = arguments[place], 16 + (offset if name == moved else 0)
        around = layouts.random_bytes(tensor.numel() + 40, tensor.dtype, seed=place)
        replaced[name] = around[shift : shift + tensor.numel()].view(tensor.shape)
    oracle_checks.assert_same_as_oracle("stage_kv", with_arguments("stage_kv", arguments, **replaced), device)


def test_stage_of_any_strides(device):
    """Slices of a fused QKV projection into a packed buffer, heads first, every second element."""
    key, value, rows, staged_key, _, *marks = samples.stage(dtype=torch.bfloat16)
    qkv = tensors.numbers(8, 3, 4, 8, dtype=torch.bfloat16)
    by_head = tensors.numbers(4, 8, 8, dtype=torch.bfloat16, seed=1).transpose(0, 1)
    spaced = tensors.numbers(8, 4, 16, dtype=torch.bfloat16, seed=2)[..., ::2]
    packed = layouts.random_bytes(4 * 4 * 32, torch.bfloat16).view(4, 4, 32)
    for k, v in ((qkv[:, 1], qkv[:, 2]), (by_head, spaced), (spaced, by_head), (key[:1].expand(8, 4, 8), value)):
        oracle_checks.assert_same_as_oracle(
            "stage_kv", (k, v, rows, packed[..., :8], packed[..., 8:24:2], *marks), device
        )
        oracle_checks.assert_same_as_oracle(
            "stage_kv", (k, v, rows, staged_key, packed[..., 8:16].flip(0), *marks), device
        )


def test_stage_without_marks_and_without_tokens(device):
    oracle_checks.assert_same_as_oracle("stage_kv", samples.stage(marks=False), device)
    for rows in ((), (-1, -1, -5)):
        arguments = samples.stage(stage_rows=rows)
        ours = oracle_checks.assert_same_as_oracle("stage_kv", arguments, device)
        assert layouts.same_memory(ours, arguments)


def test_staged_rows_carry_their_window(device):
    ours = oracle_checks.assert_same_as_oracle("stage_kv", samples.stage(), device)
    assert ours[-1].tolist() == [
        tensors.WINDOW if row in samples.STAGE_ROWS else tensors.EARLIER_WINDOW for row in range(4)
    ]


@pytest.mark.parametrize("shape", tensors.NO_BYTES.values(), ids=tensors.NO_BYTES)
@pytest.mark.parametrize("marks", [False, True])
def test_stage_rows_without_bytes(device, shape, marks):
    """Such a row is staged: it gets its window."""
    ours = oracle_checks.assert_same_as_oracle("stage_kv", samples.stage(shape, marks=marks), device)
    if marks:
        assert ours[-1].tolist() == [tensors.WINDOW] * 3 + [tensors.EARLIER_WINDOW]


@pytest.mark.usefixtures("four_threads")
def test_many_rows_on_several_threads():
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0)).tolist()
    oracle_checks.assert_same_as_oracle(
        "stage_kv", samples.stage(tensors.SMALL, torch.float16, tuple(order[:300]), rows=400)
    )


@pytest.mark.debug_mode
@pytest.mark.parametrize("row", [4, 2**31 - 1])
@pytest.mark.parametrize("shape", [tensors.SMALL, *tensors.NO_BYTES.values()], ids=["rows", *tensors.NO_BYTES])
def test_stage_row_outside_the_buffer(device, shape, row):
    arguments = with_arguments("stage_kv", samples.stage(shape), stage_rows=int32(0, row, 2))
    without = with_arguments("stage_kv", arguments, stage_rows=int32(0, -1, 2))
    sentence = rf"stage_rows\[1\] must be below the 4 rows .*, got {row}$"
    bad_input.check_bad_data(
        "stage_kv", arguments, IndexError, sentence, device, bad_input.left_by_the_oracle("stage_kv", without)
    )


# ---------------------------------------------------------------- commit_staged


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_commit_in_every_layout(device, layout, shape):
    arguments = samples.commit(layout=layout, shape=shape, slots=(5, -1, 0, 11, 7, -1), dtype=torch.bfloat16)
    oracle_checks.assert_same_as_oracle("commit_staged", arguments, device)
    oracle_checks.assert_same_as_oracle("commit_staged", samples.commit_lengths(arguments), device)


def in_format(dtype, kv_cache_dtype, cache_dtype, scales, layout):
    """Options of `samples_undo.write`."""
    shape = {"one": (1,), "per_head": (tensors.WIDE_VALUES.heads,), "per_row": (8, 1)}[scales]
    return {
        "layout": layout, "shape": tensors.WIDE_VALUES, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype,
        "cache_dtype": cache_dtype, "scales": tuple(tensors.numbers(*shape, seed=seed).abs() for seed in (4, 5)),
        "slots": (5, 14, 0, 11, 7, 3),
    }  # fmt: skip


@pytest.mark.parametrize("scales", ["one", "per_head", "per_row"])
@pytest.mark.parametrize(("kv_cache_dtype", "cache_dtype"), FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_commit_quantizes_as_write_kv(device, dtype, kv_cache_dtype, cache_dtype, scales):
    """The accepted rows, staged and committed, equal a plain write of only these tokens."""
    options = in_format(dtype, kv_cache_dtype, cache_dtype, scales, "padded")
    plain = layouts.twin(samples_undo.write(**options), device)
    key, value, key_cache, value_cache, slots, *rest = layouts.twin(samples_undo.write(**options), device)
    staged = torch.zeros_like(key), torch.zeros_like(value)
    ops.stage_kv(key, value, int32(*range(8)).to(device), *staged)
    accepted = flags(1, 0, 1, 1, 0, 1).to(device)
    ops.commit_staged(*staged, slots, accepted, key_cache, value_cache, *rest)
    ops.write_kv(*plain[:4], torch.where(accepted, plain[4], -1), *plain[5:])
    assert layouts.same_memory(plain[2:4], (key_cache, value_cache))


@pytest.mark.parametrize("layout", ["nhd", "padded", "vec"])
@pytest.mark.parametrize("scales", ["one", "per_head", "per_row"])
@pytest.mark.parametrize(("kv_cache_dtype", "cache_dtype"), FORMATS[1:], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_commit_to_fp8(device, dtype, kv_cache_dtype, cache_dtype, scales, layout):
    arguments = samples.commit(**in_format(dtype, kv_cache_dtype, cache_dtype, scales, layout))
    oracle_checks.assert_same_as_oracle("commit_staged", arguments, device)


PATTERNS = {"none": (0,) * 6, "all": (1,) * 6, "prefix": (1, 1, 1, 0, 0, 0), "sparse": (0, 1, 0, 1, 1, 0)}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_commit_of_any_pattern(device, pattern):
    arguments = samples.commit(PATTERNS[pattern], slots=(5, 2, 0, 11, 7, 1))
    ours = oracle_checks.assert_same_as_oracle("commit_staged", arguments, device)
    if pattern == "none":
        assert layouts.same_memory(ours, arguments)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (3, 1, 1), (1, 9, -4), (2,), ()])
def test_commit_by_lengths(device, lengths):
    """A length may exceed the request, be negative, or be missing for some rows' requests."""
    oracle_checks.assert_same_as_oracle(
        "commit_staged", samples.commit_lengths(samples.commit(slots=(5, 2, 0, 11, 7, 1)), lengths), device
    )


def test_commit_to_new_slots_makes_an_accepted_path_consecutive(device):
    """Nodes 0, 2 and 5 of a token tree were accepted. They are written to consecutive slots."""
    key, value, _, _, key_cache, value_cache, *rest = samples.commit(slots=(-1,) * 6)
    slots, accepted = int64(4, -1, 5, -1, -1, 6), flags(1, 0, 1, 0, 0, 1)
    ours = oracle_checks.assert_same_as_oracle(
        "commit_staged", (key, value, slots, accepted, key_cache, value_cache, *rest), device
    )
    assert torch.equal(ours[4].flatten(0, 1)[4:7].cpu(), key[[0, 2, 5]])


@pytest.mark.debug_mode
@pytest.mark.parametrize("slot", [12, 2**31, 2**62])
def test_commit_slot_outside_the_cache(device, slot):
    """Only the slots of accepted rows count."""
    arguments = samples.commit((1, 0, 1, 0, 0, 0), slots=(5, 99, slot, 0, 1, 2))
    without = with_arguments("commit_staged", arguments, row_slots=int64(5, 99, -1, 0, 1, 2))
    sentence = rf"row_slots\[2\] must be below 12 .*, got {slot}$"
    left = bad_input.left_by_the_oracle("commit_staged", without)
    bad_input.check_bad_data("commit_staged", arguments, IndexError, sentence, device, left)


def test_slots_of_rejected_rows_are_ignored(device):
    arguments = samples.commit((1, 0, 1, 0, 0, 0), slots=(5, 99, 1, 99))
    oracle_checks.assert_same_as_oracle("commit_staged", arguments, device)


# ---------------------------------------------------------------- accept_staged

# The difference from the sample, the committed rows, and whether the whole window was rejected.
DECIDED = {
    "complete": ({}, [0, 2], False),
    "a layer was never reached": ({"staged_by_layer": ((0, 1, 2), (), (0, 2))}, [], True),
    "a layer lacks one row": ({"staged_by_layer": ((0, 2), (0, 1), (0, 2))}, [], True),
    "only rejected rows are missing": (
        {"accepted": (1, 0, 0, 0, 0), "staged_by_layer": ((0,), (0, 1), (0, 2))},
        [0],
        False,
    ),
    "a slot out of range": ({"num_slots": 5}, [], True),
    "a rejected slot out of range": ({"slots": (5, 99, 0, -1, 3)}, [0, 2], False),
    "nothing accepted": ({"accepted": (0, 0, 0, 0, 0)}, [], False),
    "nothing staged": ({"staged_by_layer": ((), (), ())}, [], True),
    "accepted rows without a slot": ({"slots": (-1, -1, 0, -1, -1)}, [2], False),
}


@pytest.mark.parametrize("case", DECIDED)
def test_accepted_by_hand(device, case):
    changed, committed, incomplete = DECIDED[case]
    arguments = samples.accept_staged(**changed)
    ours = oracle_checks.assert_same_as_oracle("accept_staged", arguments, device)
    assert ours[5].nonzero().flatten().tolist() == committed
    assert bool(ours[6][staging.STAGE_COUNTERS.index("incomplete")] - 60) is incomplete


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("missing", [None, "staged", "slot"])
def test_all_or_nothing(device, rows, missing):
    """One row that one layer lacks, or that has no valid slot, decides for all rows."""
    random = torch.Generator().manual_seed(rows)
    accepted = torch.rand(rows, generator=random) < 0.6
    accepted[-1] = True
    slots = torch.randint(-3, 100, (rows,), generator=random)
    slots[-1] = 100 if missing == "slot" else 5
    windows = torch.full((5, rows), 7)
    windows[:, ~accepted] = torch.randint(6, 8, (5, int((~accepted).sum())), generator=random)
    if missing == "staged":
        windows[3, -1] = 6
    counters = int64(*range(len(staging.STAGE_COUNTERS)))
    arguments = (layouts.surrounded(accepted), layouts.surrounded(slots), int64(7), layouts.surrounded(windows), 100,
                 layouts.surrounded(~accepted), counters)  # fmt: skip
    ours = oracle_checks.assert_same_as_oracle("accept_staged", arguments, device)
    assert bool(ours[5].any()) is (missing is None)


def test_stage_counters(device):
    """Operations count layers x rows. `staged` counts a row once, in however many layers it was staged."""
    ours = oracle_checks.assert_same_as_oracle("accept_staged", samples.accept_staged(), device)
    grown = [after - before for after, before in zip(ours[6].tolist(), range(10, 70, 10), strict=True)]
    assert dict(zip(staging.STAGE_COUNTERS, grown, strict=True)) == {
        "windows": 1, "staged": 4, "stage_operations": 8, "committed": 2, "rejected": 2, "incomplete": 0,
    }  # fmt: skip


def test_stage_counters_have_the_order_of_the_kernels():
    names = re.search(r"enum StageCounter \{([^}]*)\}", (ROOT / "csrc" / "staging.h").read_text()).group(1).split(",")
    plain = [name.strip().removeprefix("kStage").lower() for name in names if name.strip()]
    assert plain == [*(name.removeprefix("stage_") for name in staging.STAGE_COUNTERS), "knumstagecounters"]


@given(st.data())
def test_accept_staged_equals_the_oracle(device, data):
    rows, layers = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 4))
    lists = st.lists(st.booleans(), min_size=rows, max_size=rows)
    staged = [tuple(i for i, on in enumerate(data.draw(lists) if data.draw(st.booleans()) else [1] * rows) if on)
              for _ in range(layers)]  # fmt: skip
    slots = data.draw(st.lists(st.integers(-2, 12), min_size=rows, max_size=rows))
    by_length = data.draw(st.booleans())
    if by_length:
        lengths = data.draw(st.lists(st.integers(-1, 4), max_size=4))
        requests = data.draw(st.lists(st.integers(-1, 4), min_size=rows, max_size=rows))
        positions = data.draw(st.lists(st.integers(-1, 4), min_size=rows, max_size=rows))
        accepted, of_rows = int32(*lengths), (int32(*requests), int32(*positions))
    else:
        accepted, of_rows = flags(*data.draw(lists)), ()
    windows = layouts.surrounded(torch.full((layers, rows), tensors.EARLIER_WINDOW))
    for layer, which in enumerate(staged):
        windows[layer, list(which)] = tensors.WINDOW
    committed, counters = flags(*data.draw(lists)), int64(*range(len(staging.STAGE_COUNTERS)))
    arguments = (accepted, int64(*slots), int64(tensors.WINDOW), windows, 12, committed, counters, *of_rows)
    oracle_checks.assert_same_as_oracle("accept_staged", arguments, device)


# ---------------------------------------------------------------- move_slots


def simultaneous(caches, sources, destinations):
    """The expected result of the moves, by torch indexing: gather all, then scatter all."""
    for cache in caches:
        pages, block_size = raw(cache), cache.shape[1]
        rows = pages[sources // block_size, sources % block_size]
        pages[destinations // block_size, destinations % block_size] = rows


@pytest.mark.parametrize("dtype", ELEMENT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_move_in_every_layout(device, layout, dtype):
    for shape in (tensors.SMALL, SHAPES["odd"], SHAPES["mla_latent"], SHAPES["more_units_than_a_block"]):
        for planes in layouts.make_pages(layout, shape, dtype)[:2]:
            arguments = list(samples.move())
            arguments[0] = planes
            oracle_checks.assert_same_as_oracle("move_slots", tuple(arguments), device)


MOVES = {
    "cycle of all": [(i, (i + 1) % 60) for i in range(60)],
    "backwards": [(i, 59 - i) for i in range(60)],
    "one slot to the left": [(i + 1, i) for i in range(59)],
    "one slot to the right": [(i, i + 1) for i in range(59)],
    "one source for many": [(7, i) for i in range(60)],
    "in place": [(i, i) for i in range(60)],
}


@pytest.mark.parametrize("layout", ["nhd", "packed_hnd", "one_backing", "vec"])
@pytest.mark.parametrize("moves", MOVES)
def test_overlapping_moves_are_simultaneous(device, moves, layout):
    shape = Shape(5, 12, 3, 16, 8, layers=3)
    sources, destinations = (int64(*slots) for slots in zip(*MOVES[moves], strict=True))
    for planes in layouts.make_pages(layout, shape, torch.bfloat16)[:2]:
        ours, theirs = (
            layouts.twin((planes, sources, destinations), device),
            layouts.twin((planes, sources, destinations)),
        )
        ops.move_slots(*ours)
        simultaneous(*theirs)
        assert layouts.same_memory(ours, theirs)


@given(st.data())
def test_any_moves(device, data):
    shape = Shape(
        blocks=data.draw(st.integers(1, 4)), block_size=data.draw(st.sampled_from([1, 3, 4, 16])),
        heads=data.draw(st.integers(1, 3)), key_width=data.draw(st.sampled_from([1, 5, 8])),
        value_width=data.draw(st.sampled_from([1, 8])), layers=data.draw(st.integers(1, 3)),
    )  # fmt: skip
    slots = st.integers(-2, shape.blocks * shape.block_size - 1)
    destinations = data.draw(st.lists(slots, unique_by=lambda slot: slot if slot >= 0 else object(), max_size=20))
    sources = data.draw(st.lists(slots, min_size=len(destinations), max_size=len(destinations)))
    layout, dtype = data.draw(st.sampled_from(list(layouts.LAYOUTS))), data.draw(st.sampled_from(ELEMENT_DTYPES))
    planes = layouts.make_pages(layout, shape, dtype, data.draw(st.integers(0, 8))).value_caches
    oracle_checks.assert_same_as_oracle("move_slots", (planes, int64(*sources), int64(*destinations)), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_move_in_pages_with_page_offsets(device, dtype):
    pages = layouts.make_amx_pages(Shape(3, 32, 2, 16, 16, layers=2), dtype)
    for planes, table in ((pages.key_caches, pages.key_offsets), (pages.value_caches, pages.value_offsets)):
        sources, destinations = int64(95, 0, 33, -1, 17), int64(0, 95, 34, 1, 33)
        oracle_checks.assert_same_as_oracle("move_slots", (planes, sources, destinations, table), device)


@pytest.mark.parametrize("offset", OFFSETS)
def test_move_in_misaligned_planes(device, offset):
    planes = layouts.make_pages("nhd", Shape(3, 4, 2, 16, 32, 3), torch.bfloat16, offset).key_caches
    oracle_checks.assert_same_as_oracle("move_slots", (planes, *samples.move()[1:]), device)


@pytest.mark.parametrize("layers", [1, 383, 384, 385, 800])
def test_move_in_many_layers(device, layers):
    planes = layouts.make_pages("packed", Shape(2, 6, 1, 8, 8, layers), torch.bfloat16).value_caches
    oracle_checks.assert_same_as_oracle("move_slots", (planes, *samples.move()[1:]), device)


@pytest.mark.parametrize("moves", [1, 2, 31, 32, 33, 512, 2048, 2049, 14_000, 15_000, 60_000])
def test_many_moves_are_simultaneous(device, moves):
    """A random cycle through all moved slots: each is a source and a destination.

    With more moves, a block takes narrower columns. Then it takes more than the default shared memory, and then
    narrower accesses.
    """
    shape = Shape(moves // 16 + 2, 16, 2, 64, 64, 2)
    planes = [torch.randint(-999, 999, (shape.blocks, 16, 2, 128), dtype=torch.int16, device=device) for _ in range(2)]
    order = torch.randperm(shape.blocks * 16, device=device)[:moves]
    before = [plane.flatten(0, 1).clone() for plane in planes]
    ops.move_slots(planes, order, order.roll(1))
    for plane, old in zip(planes, before, strict=True):
        old[order.roll(1)] = old[order]
        assert torch.equal(plane.flatten(0, 1), old)


@pytest.mark.gpu
def test_more_moves_than_fit(device):
    plane = torch.zeros(20_000, 16, 1, 1, dtype=torch.uint8, device=device)
    slots = torch.arange(300_000, device=device)
    with pytest.raises(ValueError, match=r"^move_slots: src_slots must hold at most \d+ moves .*, got 300000$"):
        ops.move_slots([plane], slots, slots)


@pytest.mark.debug_mode
@pytest.mark.parametrize("name", ["src_slots", "dst_slots"])
@pytest.mark.parametrize("slot", [12, 2**31, 2**62])
def test_move_outside_the_cache(device, name, slot):
    slots = {"src_slots": (5, 3, 1), "dst_slots": (1, 0, 5)}
    with_bad = {**slots, name: (slots[name][0], slot, slots[name][2])}
    arguments, without = (
        with_arguments("move_slots", samples.move(), **{key: int64(*value) for key, value in changed.items()})
        for changed in (with_bad, {**slots, "src_slots": (5, -1, 1)})
    )
    sentence = rf"{name}\[1\] must be below 12 .*, got {slot}$"
    left = bad_input.left_by_the_oracle("move_slots", without)
    bad_input.check_bad_data("move_slots", arguments, IndexError, sentence, device, left)


@pytest.mark.debug_mode
@pytest.mark.parametrize("slot", [12, 2**62])
def test_move_of_a_slot_outside_the_cache_to_itself(device, slot):
    """It moves no bytes, but the slot is checked."""
    arguments, without = (
        with_arguments("move_slots", samples.move(), src_slots=int64(5, source, 1), dst_slots=int64(1, slot, 5))
        for source in (slot, -1)
    )
    sentence = rf"src_slots\[1\] must be below 12 .*, got {slot}$"
    left = bad_input.left_by_the_oracle("move_slots", without)
    bad_input.check_bad_data("move_slots", arguments, IndexError, sentence, device, left)


@pytest.mark.parametrize("name", ["src_slots", "dst_slots"])
def test_a_skipped_move_is_not_checked(device, name):
    other = "dst_slots" if name == "src_slots" else "src_slots"
    skipped = with_arguments("move_slots", samples.move(), **{name: int64(5, 2**62), other: int64(1, -1)})
    oracle_checks.assert_same_as_oracle("move_slots", skipped, device)


# ---------------------------------------------------------------- errors: the message, and nothing written

WRONG_ARGUMENTS = [
    ("stage_kv", 0, "stage_rows", lambda a: a[2].long(), "have dtype torch.int32", "torch.int64 [6]"),
    ("stage_kv", 0, "stage_rows", lambda a: a[2].repeat(2)[::2], "be contiguous", "torch.int32 [6]"),
    ("stage_kv", 0, "key", lambda a: a[0][:5], "be [>= 6, num_kv_heads, width]", "torch.float32 [5, 4, 8]"),
    ("stage_kv", 0, "value", lambda a: a[1].half(), "have dtype torch.float32", "torch.float16 [8, 4, 8]"),
    ("stage_kv", 0, "staged_key", lambda a: a[3][:, :2], "be [num_rows, 4, 8]", "torch.float32 [4, 2, 8]"),
    ("stage_kv", 0, "staged_key", lambda a: a[3].half(), "have dtype torch.float32", "torch.float16 [4, 4, 8]"),
    ("stage_kv", 0, "staged_value", lambda a: a[4][:3], "be of as many rows as staged_key", "torch.float32 [3, 4, 8]"),
    ("stage_kv", 0, "key", lambda a: a[0].double(), "have dtype torch.float32, torch.float16 or",
     "torch.float64 [8, 4, 8]"),
    ("stage_kv", 0, "row_windows", lambda a: a[6][:3], "be [4], one number for each row", "torch.int64 [3]"),
    ("accept_staged", 0, "row_accepted", lambda a: a[0].int(), "have dtype torch.bool", "torch.int32 [5]"),
    ("accept_staged", 0, "row_accepted", lambda a: a[0][:4], "be [num_rows] with at least 5", "torch.bool [4]"),
    ("accept_staged", 2, "row_positions", lambda a: a[8][:4], "be [num_rows] with at least 5", "torch.int32 [4]"),
    ("accept_staged", 0, "row_windows", lambda a: a[3][:, :4], "be [>= 1, 5]", "torch.int64 [3, 4]"),
    ("accept_staged", 0, "row_committed", lambda a: a[5][:4], "be [num_rows] with at least 5", "torch.bool [4]"),
    ("accept_staged", 0, "counters", lambda a: a[6][:5], "be [len(STAGE_COUNTERS)] with", "torch.int64 [5]"),
    ("accept_staged", 0, "num_slots", -1, "not be negative", "-1"),
    ("commit_staged", 0, "row_slots", lambda a: a[2].int(), "have dtype torch.int64", "torch.int32 [6]"),
    ("commit_staged", 0, "staged_key", lambda a: a[0][:5], "be [>= 6, 4, 8]", "torch.float32 [5, 4, 8]"),
    ("commit_staged", 0, "row_accepted", lambda a: a[3][:5], "be [num_rows] with at least 6", "torch.bool [5]"),
    ("commit_staged", 0, "value_cache", lambda a: a[5].half(), "have dtype torch.float32",
     "torch.float16 [3, 4, 4, 8]"),
    ("commit_staged", 1, "row_accepted", lambda a: a[3].long(), "have dtype torch.int32", "torch.int64 [3]"),
    ("move_slots", 0, "src_slots", lambda a: a[1].int(), "have dtype torch.int64", "torch.int32 [8]"),
    ("move_slots", 0, "dst_slots", lambda a: a[2][:7], "be one slot for each of src_slots", "torch.int64 [7]"),
    ("move_slots", 1, "page_offsets", lambda a: a[3].long(), "have dtype torch.int32", "torch.int64 [16, 16]"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "sample", "argument", "value", "expected", "got"), WRONG_ARGUMENTS)
def test_wrong_argument(op, sample, argument, value, expected, got):
    bad_input.refuse_argument(op, sample, argument, value, expected, got)


SHARED = [
    ("stage_kv", "staged_key", lambda a: a[0][:4], "staged_key and key"),
    ("stage_kv", "staged_value", lambda a: a[3], "staged_key and staged_value"),
    ("commit_staged", "staged_key", lambda a: a[4].flatten(0, 1)[:8], "key_cache and staged_key"),
    ("accept_staged", "row_committed", lambda a: a[0], "row_committed and row_accepted"),
]


@pytest.mark.parametrize(("op", "argument", "value", "names"), SHARED)
def test_source_and_destination_must_not_share_memory(op, argument, value, names):
    bad_input.refuse_shared(op, argument, value, names)


FLOATS = {
    "stage_kv": ("key", "value", "staged_key", "staged_value"),
    "commit_staged": ("staged_key", "staged_value", "key_cache", "value_cache", "k_scale", "v_scale"),
    "move_slots": ("caches",),
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in FLOATS.items() for name in names])
def test_gradients_are_refused(op, name):
    bad_input.refuse_gradient(op, name)


def test_requests_and_positions_go_together():
    for op, arguments in (
        ("accept_staged", samples.accept_staged()),
        ("commit_staged", samples.commit()),
    ):
        alone = with_arguments(op, arguments, row_requests=int32(0, 0, 0, 0, 0, 0))
        oracle_checks.refuse(op, alone, ValueError, "row_requests and row_positions must be given together")
