"""Test the family undo against the oracle, on all surrounding memory: write, write with a log, log, restore."""

from __future__ import annotations

import re
import subprocess
import sys

import bad_input
import oracle_checks
import pytest
import samples_undo as samples
import tensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import ROOT
from samples import sample_inputs, with_arguments
from samples_accept import outcome_buffers
from tensors import flags, int32, int64

from nwor_ops import ops
from nwor_ops.testing import layouts
from nwor_ops.testing.layouts import Shape
from nwor_ops.testing.oracle import undo as oracle
from nwor_ops.testing.raw_rows import raw


def test_by_hand(device):
    """Two drafts are written and logged, the second one is rejected. This test does not depend on the oracle."""
    key, value = torch.randn(2, 3, 1, 4, device=device)  # [tokens, heads, width]
    cache = torch.zeros(2, 4, 1, 8, device=device)  # [blocks, block_size, heads, K | V]
    log = torch.full((2, 1, 8), 7.0, device=device)  # [rows, heads, K | V]
    scale = torch.ones(1, device=device)
    slots = torch.tensor([2, 3, 4], device=device)
    log_rows = torch.tensor([-1, 0, 1], dtype=torch.int32, device=device)  # token 0 is no draft

    ops.write_kv_logged(
        key, value, cache[..., :4], cache[..., 4:], slots, scale, scale, "auto", log_rows, log[..., :4], log[..., 4:]
    )
    assert torch.equal(cache.view(8, 8)[2:5], torch.cat([key, value], -1).view(3, 8))
    assert torch.equal(log, torch.zeros_like(log))  # the earlier rows

    ops.restore_slots([cache], log[None], slots[1:], torch.tensor([False, True], device=device))
    assert torch.equal(cache.view(8, 8)[3], torch.cat([key, value], -1)[1, 0])
    assert torch.equal(cache.view(8, 8)[4], torch.zeros(8, device=device))


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_CACHES = (
    ("fp8", torch.uint8),
    ("fp8_e4m3", torch.uint8),
    ("fp8_e4m3", torch.float8_e4m3fn),
    ("fp8_e5m2", torch.uint8),
    ("fp8_e5m2", torch.float8_e5m2),
)
SCALES = ("one", "zero_dim", "per_head", "per_token")
SHAPES = tensors.SHAPES | {
    "d256": Shape(2, 16, 2, 256, 256, layers=2),
    "all_sizes_equal": Shape(4, 4, 4, 4, 4, layers=4),
    "more_units_than_a_block": Shape(2, 4, 40, 256, 128),
}
OFFSETS = range(9)
ELEMENT_DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.int16, torch.bfloat16, torch.float32, torch.int64)
LOGGING_OPS = ("write_kv_logged", "log_slots")
RESTORING_OPS = ("restore_slots", "restore_slots_from_rejected")
ALL_OPS = ("write_kv", *LOGGING_OPS, *RESTORING_OPS)

LAYOUT_NAMES = tuple(layouts.LAYOUTS)


def spread_slots(shape: Shape) -> tuple[int, ...]:
    """Distinct slots in any order, including the first and the last one, and two skipped tokens."""
    num_slots = shape.blocks * shape.block_size
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0)).tolist()
    inner = [slot for slot in order if slot not in (0, num_slots - 1)][:9]
    return (*dict.fromkeys([*inner[:4], num_slots - 1, 0, *inner[4:]]), -1, -7)


def logged_rows(slots: tuple[int, ...]) -> tuple[int, ...]:
    """Every second token is a draft. Rows are not in the order of tokens."""
    drafts = range(0, len(slots), 2)
    rows = dict(zip(drafts, reversed(range(len(drafts))), strict=True))
    return tuple(rows.get(token, -1) for token in range(len(slots)))


def layer_log(caches, rows: int):
    return tensors.surrounded_layers([tensors.log_for(cache, rows, seed=20 + i) for i, cache in enumerate(caches)])


def scales_of(kind: str, tokens: int, heads: int):
    shape = {"one": (1,), "zero_dim": (), "per_head": (heads,), "per_token": (tokens, 1)}[kind]
    return tensors.numbers(*shape, seed=4).abs(), tensors.numbers(*shape, seed=5).abs()


# ---------------------------------------------------------------- write_kv, write_kv_logged


@pytest.mark.parametrize("op", ALL_OPS)
def test_samples(device, op):
    for arguments in sample_inputs(op):
        oracle_checks.assert_same_as_oracle(op, arguments, device)


def logged_with_room(slots: tuple[int, ...], **options):
    """Arguments of write_kv_logged with as many log rows as there are drafts."""
    rows = logged_rows(slots)
    arguments = samples.write_logged(log_rows=rows, slots=slots, **options)
    logs = [tensors.log_for(cache, max(rows) + 1, seed) for seed, cache in enumerate(arguments[2:4])]
    return (*arguments[:-2], *logs)


@pytest.mark.parametrize("make", [samples.write, logged_with_room], ids=["write_kv", "write_kv_logged"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_write_in_every_layout(device, layout, shape, make):
    op = "write_kv" if make is samples.write else "write_kv_logged"
    for dtype in (torch.float32, torch.bfloat16):
        arguments = make(layout=layout, shape=shape, slots=spread_slots(shape), dtype=dtype)
        oracle_checks.assert_same_as_oracle(op, arguments, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ["write_kv", "write_kv_logged"])
def test_auto_copies_every_bit_pattern(device, op, dtype):
    """NaN payloads, signalling NaNs and subnormals arrive unchanged."""
    arguments = samples.write_logged(dtype=dtype) if op == "write_kv_logged" else samples.write(dtype=dtype)
    key = layouts.random_bytes(8 * 4 * 8, dtype, seed=5).view(8, 4, 8)
    value = layouts.random_bytes(8 * 4 * 8, dtype, seed=6).view(8, 4, 8)
    oracle_checks.assert_same_as_oracle(op, (key, value, *arguments[2:]), device)


@pytest.mark.parametrize("layout", ["nhd", "padded", "vec"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("kv_cache_dtype", "cache_dtype"), FP8_CACHES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_write(device, dtype, kv_cache_dtype, cache_dtype, scales, layout):
    """Values are quantized, while the old bytes are logged unchanged (never cast as integers)."""
    options = {
        "layout": layout, "shape": tensors.WIDE_VALUES, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype,
        "cache_dtype": cache_dtype, "scales": scales_of(scales, len(samples.SLOTS) + 2, tensors.WIDE_VALUES.heads),
    }  # fmt: skip
    oracle_checks.assert_same_as_oracle("write_kv", samples.write(**options), device)
    oracle_checks.assert_same_as_oracle("write_kv_logged", samples.write_logged(**options), device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_of_every_16_bit_number(device, kv_cache_dtype, dtype):
    """All 65536 bit patterns: ties, subnormals, saturation, infinities, NaNs, both zeros."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 4, 256)
    shape = Shape(8, 8, 4, 256, 256)
    for scale in (1.0, 0.37):
        arguments = samples.write("nhd", shape, dtype, kv_cache_dtype, slots=tuple(range(64)))
        scales = torch.tensor([scale]), torch.tensor([-scale])
        oracle_checks.assert_same_as_oracle(
            "write_kv", (every, every, *arguments[2:5], *scales, kv_cache_dtype), device
        )


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_divides_by_the_scale(device, kv_cache_dtype):
    """On and next to every tie between two codes. A product with the reciprocal of 49 rounds differently."""
    values = oracle.fp8_values(kv_cache_dtype)
    ties = ((values[1:] + values[:-1]) / 2 * 49).float()
    beside = [torch.nextafter(ties, torch.full_like(ties, limit)) for limit in (0.0, float("inf"))]
    source = torch.cat([ties, *beside, -ties]).repeat(2)[: 64 * 8].view(8, 8, 8)
    arguments = samples.write("nhd", Shape(2, 4, 8, 8, 8), torch.float32, kv_cache_dtype, slots=tuple(range(8)))
    scales = torch.tensor([49.0]), torch.tensor([-49.0])
    oracle_checks.assert_same_as_oracle("write_kv", (source, source, *arguments[2:5], *scales, kv_cache_dtype), device)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
def test_the_oracle_quantizes_as_torch(kv_cache_dtype, dtype):
    """Compared where the cast of torch has the same meaning: finite numbers that do not saturate."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    fits = every[every.isfinite() & (every.abs() <= torch.finfo(dtype).max)]
    assert torch.equal(oracle.to_fp8(fits, kv_cache_dtype), fits.to(dtype).view(torch.uint8))
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e30])
    largest = 0x7E if dtype == torch.float8_e4m3fn else 0x7B
    assert oracle.to_fp8(special, kv_cache_dtype).tolist() == [0x7F, largest, 0x80 | largest, 0x80, largest]


def aligned(arguments, moved=None, offset=0):
    """The same call with sources and logs that start 16-byte aligned, except the one that is moved."""
    replaced = {}
    for name, place in {"key": 0, "value": 1, "key_log": 9, "value_log": 10}.items():
        tensor, shift = arguments[place], offset if name == moved else 0
        memory_around = layouts.random_bytes(tensor.numel() + 64, tensor.dtype, seed=place)
        view = memory_around[16 + shift : 16 + shift + tensor.numel()].view(tensor.shape)
        raw(view).copy_(raw(tensor))
        replaced[name] = view
    return with_arguments("write_kv_logged", arguments, **replaced)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_misaligned_planes(device, kv_cache_dtype, dtype, offset):
    """Planes, sources and logs start at any element, all of them and one at a time. No vector access may assume an
    alignment."""
    options = {"layout": "nhd", "shape": Shape(3, 4, 2, 16, 32), "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    arguments = list(samples.write_logged(**options, offset=offset))
    oracle_checks.assert_same_as_oracle("write_kv_logged", aligned(arguments), device)
    arguments[0] = layouts.surrounded(arguments[0], edge=offset)
    arguments[1] = layouts.surrounded(arguments[1], edge=8 - offset)
    oracle_checks.assert_same_as_oracle("write_kv_logged", tuple(arguments), device)
    for moved in ("key", "value", "key_log", "value_log"):
        oracle_checks.assert_same_as_oracle(
            "write_kv_logged", aligned(samples.write_logged(**options), moved, offset), device
        )


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_restore_of_misaligned_planes(device, dtype, offset):
    pages = layouts.make_pages("nhd", Shape(3, 4, 2, 16, 16), dtype, offset)
    log = layouts.random_bytes(4 * 2 * 16 + offset, dtype)[offset:].view(1, 4, 2, 16)
    oracle_checks.assert_same_as_oracle(
        "restore_slots", (pages.key_caches, log, int64(1, 5, -1, 7), flags(1, 1, 1, 0)), device
    )


def test_sources_of_any_strides(device):
    """Key and value as slices of a fused QKV projection, and heads before tokens."""
    arguments = samples.write(dtype=torch.bfloat16)
    qkv = tensors.numbers(8, 3, 4, 8, dtype=torch.bfloat16)
    oracle_checks.assert_same_as_oracle("write_kv", (qkv[:, 1], qkv[:, 2], *arguments[2:]), device)
    by_head, by_width = tensors.numbers(4, 8, 8, dtype=torch.bfloat16), tensors.numbers(8, 8, 4, dtype=torch.bfloat16)
    oracle_checks.assert_same_as_oracle(
        "write_kv", (by_head.transpose(0, 1), by_width.transpose(1, 2), *arguments[2:]), device
    )
    one_row = tensors.numbers(1, 4, 8, dtype=torch.bfloat16).expand(8, 4, 8)
    oracle_checks.assert_same_as_oracle("write_kv", (one_row, one_row, *arguments[2:]), device)


def test_logs_of_any_strides(device):
    """Key and value logs packed in one row, as the pages are, and heads before rows."""
    arguments = samples.write_logged()
    packed = layouts.random_bytes(4 * 4 * 16, torch.float32, seed=9).view(4, 4, 16)
    oracle_checks.assert_same_as_oracle("write_kv_logged", (*arguments[:-2], packed[..., :8], packed[..., 8:]), device)
    by_head = layouts.random_bytes(2 * 4 * 4 * 8, torch.float32, seed=9).view(2, 4, 4, 8).transpose(1, 2)
    oracle_checks.assert_same_as_oracle("write_kv_logged", (*arguments[:-2], by_head[0], by_head[1]), device)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
def test_sources_and_logs_of_any_strides(device, kv_cache_dtype):
    """Slices of a fused projection, transposed heads, every second element, into the halves of a packed log."""
    arguments = samples.write_logged(dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    qkv = tensors.numbers(8, 3, 4, 8, dtype=torch.bfloat16)
    by_head = tensors.numbers(4, 8, 8, dtype=torch.bfloat16, seed=1).transpose(0, 1)
    spaced = tensors.numbers(8, 4, 16, dtype=torch.bfloat16, seed=2)[..., ::2]
    logs = layouts.random_bytes(4 * 4 * 32, arguments[2].dtype).view(4, 4, 32)
    for key, value in ((qkv[:, 1], qkv[:, 2]), (by_head, spaced), (spaced, by_head)):
        replaced = {"key": key, "value": value, "key_log": logs[..., 0:16:2], "value_log": logs[..., 16:24]}
        oracle_checks.assert_same_as_oracle(
            "write_kv_logged", with_arguments("write_kv_logged", arguments, **replaced), device
        )


@pytest.mark.parametrize("scale", [[float("nan")], [0.0], []], ids=str)
def test_auto_reads_no_scale(device, scale):
    scales = torch.tensor(scale), torch.tensor(scale)
    oracle_checks.assert_same_as_oracle("write_kv", samples.write(scales=scales), device)
    oracle_checks.assert_same_as_oracle("write_kv_logged", samples.write_logged(scales=scales), device)


def test_latent_without_values(device):
    """MLA: one latent plane, and a value of no width."""
    shape = Shape(2, 16, 1, 576, 0)
    arguments = logged_with_room(spread_slots(shape), shape=shape, dtype=torch.bfloat16)
    oracle_checks.assert_same_as_oracle("write_kv_logged", arguments, device)


@pytest.mark.parametrize("slots", [(), (-1, -1, -3), (0,)], ids=["empty", "all skipped", "one"])
def test_few_tokens(device, slots):
    oracle_checks.assert_same_as_oracle("write_kv", samples.write(slots=slots), device)
    oracle_checks.assert_same_as_oracle(
        "write_kv_logged", samples.write_logged((0, 1, 2)[: len(slots)], slots=slots), device
    )


@pytest.mark.parametrize("tokens", [300, 20_000])
def test_many_tokens(device, tokens):
    """Every block shape between one row per warp and many rows per block, compared with torch indexing."""
    for heads, width in ((8, 128), (1, 8), (2, 40)):
        blocks = tokens // 16 + 2
        cache = torch.randint(-999, 999, (blocks, 16, heads, 2 * width), device=device, dtype=torch.int16)
        cache = cache.view(torch.bfloat16)
        expected = cache.view(torch.int16).clone()
        key, value = (
            torch.randint(-999, 999, (tokens, heads, width), device=device, dtype=torch.int16) for _ in range(2)
        )
        slots = torch.randperm(blocks * 16, device=device)[:tokens]
        log_rows = torch.randperm(tokens, device=device, dtype=torch.int32)
        logs = torch.zeros(2, tokens, heads, width, device=device, dtype=torch.bfloat16)
        scale = torch.ones(1, device=device)
        old = expected.view(-1, heads, 2 * width)[slots]
        expected.view(-1, heads, 2 * width)[slots] = torch.cat([key, value], dim=2)
        ops.write_kv_logged(
            key.view(torch.bfloat16), value.view(torch.bfloat16), cache[..., :width], cache[..., width:],
            slots, scale, scale, "auto", log_rows, logs[0], logs[1],
        )  # fmt: skip
        assert torch.equal(cache.view(torch.int16), expected)
        assert torch.equal(torch.cat([*logs.view(torch.int16)], dim=2)[log_rows.long()], old)


def test_scales_of_any_strides(device):
    wide = tensors.numbers(8, 3).abs()
    options = {"kv_cache_dtype": "fp8", "dtype": torch.bfloat16}
    oracle_checks.assert_same_as_oracle(
        "write_kv", samples.write(scales=(wide[:, 1:2], wide[2:6, 0]), **options), device
    )


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_key_longer_than_slot_mapping(device, extra):
    """vLLM pads key and value for a graph. Only slot_mapping gives the number of tokens."""
    oracle_checks.assert_same_as_oracle("write_kv_logged", samples.write_logged(extra_tokens=extra), device)


def test_log_rows_longer_than_slot_mapping(device):
    arguments = samples.write_logged(log_rows=(*samples.LOG_ROWS, 3, 3, 99))
    oracle_checks.assert_same_as_oracle("write_kv_logged", arguments, device)


def test_no_early_return_skips_the_write(device):
    """A batch without drafts, or with a log without rows, is written too."""
    oracle_checks.assert_same_as_oracle(
        "write_kv_logged", samples.write_logged(log_rows=(-1,) * len(samples.SLOTS)), device
    )
    arguments = samples.write_logged(log_rows=(-1,) * len(samples.SLOTS))
    no_rows = [tensors.log_for(cache, rows=0) for cache in arguments[2:4]]
    ours = oracle_checks.assert_same_as_oracle("write_kv_logged", (*arguments[:-2], *no_rows), device)
    written = [divmod(slot, tensors.SMALL.block_size) for slot in samples.SLOTS if slot >= 0]
    for place in written:
        token = samples.SLOTS.index(place[0] * tensors.SMALL.block_size + place[1])
        assert torch.equal(ours[2][place], ours[0][token])


@pytest.mark.parametrize("op", ["write_kv", "write_kv_logged"])
def test_only_skipped_tokens(device, op):
    options = {"slots": (-1, -2, -(2**62))}
    arguments = samples.write(**options) if op == "write_kv" else samples.write_logged((0, 1, 2), **options)
    before = layouts.twin(arguments)
    ours = oracle_checks.assert_same_as_oracle(op, arguments, device)
    assert layouts.same_memory(ours, before)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed"])
def test_layout_is_not_inferred_if_block_size_equals_num_heads(device, layout):
    """NHD and HND planes have the same shape here. Only the strides distinguish them."""
    shape = SHAPES["all_sizes_equal"]
    arguments = samples.write(layout, shape, slots=(6,), extra_tokens=0)
    ours = oracle_checks.assert_same_as_oracle("write_kv", arguments, device)
    assert torch.equal(ours[2][1, 2], ours[0][0])
    assert torch.equal(ours[3][1, 2], ours[1][0])


@pytest.mark.usefixtures("four_threads")
def test_many_tokens_on_several_threads():
    """More rows than one thread takes, so that the work is split."""
    shape = Shape(40, 16, 2, 32, 32, layers=3)
    slots = torch.randperm(640, generator=torch.Generator().manual_seed(3)).tolist()[:500]
    rows = [row if row < 300 else -1 for row in torch.randperm(500).tolist()]
    arguments = samples.write_logged(tuple(rows), layout="packed_hnd", shape=shape, slots=tuple(slots))
    logs = [tensors.log_for(cache, 300, seed) for seed, cache in enumerate(arguments[2:4])]
    oracle_checks.assert_same_as_oracle("write_kv_logged", (*arguments[:-2], *logs))
    pages = layouts.make_pages("packed_hnd", shape, torch.float32)
    log = tensors.surrounded_layers([tensors.log_for(cache, 300, seed) for seed, cache in enumerate(pages.key_caches)])
    rejected = flags(*(torch.rand(300, generator=torch.Generator().manual_seed(4)) < 0.5).tolist())
    oracle_checks.assert_same_as_oracle("restore_slots", (pages.key_caches, log, int64(*slots[:300]), rejected))


# ---------------------------------------------------------------- restore_slots_from_rejected


@given(st.data())
def test_restore_from_any_rejected_counts(device, data):
    """Negative counts, counts above all drafts, rows of other windows, and a log with unused rows."""
    drafts = data.draw(st.lists(st.integers(0, 4), max_size=6))
    counts = [data.draw(st.integers(-1, 6)) for _ in drafts]
    spare, layers = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    used = sum(drafts)
    rows = used + spare
    starts = [sum(drafts[:q]) for q in range(len(drafts) + 1)]
    slots = data.draw(st.permutations(range(32)))[:used] + [-1] * spare
    caches = layouts.make_pages("packed", Shape(4, 8, 2, 4, 4, layers=layers), torch.bfloat16).key_caches
    log = tensors.surrounded_layers([tensors.log_for(cache, rows, seed=i) for i, cache in enumerate(caches)])
    windows = torch.tensor(
        [[data.draw(st.integers(6, 7)) for _ in range(rows)] for _ in range(layers)], dtype=torch.int64
    )
    num_rows = data.draw(st.sampled_from([None, used, rows]))
    oracle_checks.assert_same_as_oracle(
        "restore_slots_from_rejected",
        (
            caches, log, int64(*slots), int32(*counts), int32(*starts), *outcome_buffers(rows, len(drafts) + 1), None,
            int64(7), windows.view(layers, rows), num_rows,
        ), device,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "requests", "most_drafts"),
    [(1, 0, 0), (1, 1, 4), (4, 16, 4), (5, 64, 4), (2, 300, 7), (385, 3, 2), (3, 5, 200)],
)
@pytest.mark.parametrize("shape", ["one head", "wide", "odd"])
def test_restore_from_many_rejected_counts(device, shape, layers, requests, most_drafts):
    """Random drafts and counts, including negative counts and counts above the drafts, and rows of other windows."""
    sizes = {"one head": (1, 16, 16), "wide": (16, 128, 128), "odd": (3, 7, 9)}[shape]
    random = torch.Generator().manual_seed(requests)
    drafts = torch.randint(0, most_drafts + 1, (requests,), generator=random)
    counts = torch.randint(-1, most_drafts + 2, (requests,), generator=random).int()
    used = int(drafts.sum())
    starts = torch.nn.functional.pad(drafts.cumsum(0).int(), (1, 0))
    rows = used + 5
    caches = layouts.make_pages("packed", Shape(rows // 8 + 2, 8, *sizes, layers=layers), torch.bfloat16).key_caches
    slots = torch.full((rows,), -1)
    slots[:used] = torch.randperm(8 * len(caches[0]), generator=random)[:used]
    windows = torch.randint(6, 8, (layers, rows), generator=random)
    for num_rows in (None, used):
        outputs = outcome_buffers(rows, requests + 2)
        arguments = (
            caches, layer_log(caches, rows), slots, counts, starts, *outputs, None, int64(7), windows, num_rows
        )  # fmt: skip
        oracle_checks.assert_same_as_oracle("restore_slots_from_rejected", arguments, device)


# ---------------------------------------------------------------- log_slots, restore_slots


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", ELEMENT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "padded", "one_backing", "vec"])
def test_log_and_restore_of_every_element_size(device, layout, dtype, offset):
    for caches in layouts.make_pages(layout, Shape(3, 6, 2, 16, 8, layers=5), dtype, offset)[:2]:
        log = layer_log(caches, 4)
        oracle_checks.assert_same_as_oracle(
            "log_slots", (caches[2], int64(17, 0, -1, 9), int32(3, 0, 1, -1), log[2]), device
        )
        oracle_checks.assert_same_as_oracle(
            "restore_slots", (caches, log, int64(17, 0, -1, 9), flags(1, 0, 1, 1)), device
        )


@pytest.mark.parametrize("dtype", ELEMENT_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [SHAPES["odd"], SHAPES["mla_latent"], SHAPES["all_sizes_equal"]], ids=["odd", "mla", "equal"]
)
@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_log_and_restore_any_plane(device, layout, shape, dtype):
    """Latents, inline scales, packed rows: any plane with slots, of every element size."""
    pages = layouts.make_pages(layout, shape, dtype)
    slots = spread_slots(shape)
    rows = logged_rows(slots)
    num_rows = max(rows) + 2
    for cache in (pages.key_caches[0], pages.value_caches[-1]):
        oracle_checks.assert_same_as_oracle(
            "log_slots", (cache, int64(*slots), int32(*rows), tensors.log_for(cache, num_rows)), device
        )
    row_slots = int64(*slots[:num_rows])
    for caches in pages[:2]:
        log = tensors.surrounded_layers([tensors.log_for(cache, num_rows, seed) for seed, cache in enumerate(caches)])
        oracle_checks.assert_same_as_oracle(
            "restore_slots", (caches, log, row_slots, flags(*[1, 0, 1, 1, 0, 1, 1, 1][:num_rows])), device
        )


REJECTED = {
    "none": lambda rows: [0] * rows,
    "all": lambda rows: [1] * rows,
    "suffix": lambda rows: [0] * (rows // 2) + [1] * (rows - rows // 2),
    "prefix": lambda rows: [1] * (rows // 2) + [0] * (rows - rows // 2),
    "sparse": lambda rows: [int(row % 3 == 1) for row in range(rows)],
}


@pytest.mark.parametrize("rejected", REJECTED)
@pytest.mark.parametrize("rows", [0, 1, 11, 40])
def test_restore_exactly_the_rejected(device, rows, rejected):
    """At 0 %, 50 % and 100 % acceptance, slots of accepted rows keep the written rows."""
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(rows))[:rows].tolist()
    slots = [slot if row % 5 else -1 for row, slot in enumerate(slots)]
    for layout in ("packed", "one_backing"):
        caches = layouts.make_pages(layout, Shape(5, 16, 2, 64, 64, layers=3), torch.bfloat16).value_caches
        arguments = (caches, layer_log(caches, rows), int64(*slots), flags(*REJECTED[rejected](rows)))
        ours = oracle_checks.assert_same_as_oracle("restore_slots", arguments, device)
        if rejected == "none":
            assert layouts.same_memory(ours, arguments)


@pytest.mark.parametrize("layers", [1, 4, 5, 384, 385, 770])
def test_restore_of_many_layers(device, layers):
    """On CUDA the addresses of 384 layers fit in one launch. More layers take more launches."""
    caches = layouts.make_pages("packed", Shape(2, 2, 1, 8, 8, layers=layers), torch.bfloat16).key_caches
    log = layer_log(caches, 3)
    oracle_checks.assert_same_as_oracle("restore_slots", (caches, log, int64(3, 0, 1), flags(1, 0, 1)), device)
    windows = torch.randint(6, 8, (layers, 3), generator=torch.Generator().manual_seed(layers))
    arguments = (caches, log, int64(3, 0, 1), flags(1, 1, 1), None, int64(7))
    for num_rows in (None, 0, 2):
        oracle_checks.assert_same_as_oracle("restore_slots", (*arguments, windows, num_rows), device)


def test_restore_from_a_log_of_any_strides(device):
    """[R, L, H, W] in memory, and the halves of a packed log."""
    pages = layouts.make_pages("packed", tensors.SMALL, torch.float32)
    by_row = layouts.random_bytes(4 * 2 * 4 * 8, torch.float32).view(4, 2, 4, 8).transpose(0, 1)
    packed = layouts.random_bytes(2 * 4 * 4 * 16, torch.float32).view(2, 4, 4, 16)
    for log in (by_row, packed[..., 8:]):
        oracle_checks.assert_same_as_oracle(
            "restore_slots", (pages.value_caches, log, int64(0, 5, 9, 11), flags(1, 0, 1, 1)), device
        )


def test_logging_does_not_touch_the_cache(device):
    pages = layouts.make_pages("packed", tensors.SMALL, torch.float32)
    arguments = (
        pages.key_caches[0],
        int64(*samples.SLOTS),
        int32(*samples.LOG_ROWS),
        tensors.log_for(pages.key_caches[0]),
    )
    ours = oracle_checks.assert_same_as_oracle("log_slots", arguments, device)
    assert layouts.same_memory(ours[0], arguments[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [Shape(2, 16, 2, 32, 32, 2), Shape(3, 32, 2, 16, 16, 3)], ids=str)
@pytest.mark.parametrize("offset", [0, 3])
def test_page_offsets(device, shape, offset, dtype):
    """vLLM's CPU `amx` pages, whose inner order no strides can express."""
    pages = layouts.make_amx_pages(shape, dtype, offset)
    slots = spread_slots(shape)
    rows = logged_rows(slots)
    num_rows = max(rows) + 1
    for caches, table in ((pages.key_caches, pages.key_offsets), (pages.value_caches, pages.value_offsets)):
        assert sorted(table.flatten().tolist()) == list(range(table.numel()))
        log = tensors.log_for(caches[0], num_rows)
        oracle_checks.assert_same_as_oracle("log_slots", (caches[1], int64(*slots), int32(*rows), log, table), device)
        logs = tensors.surrounded_layers([tensors.log_for(cache, num_rows, seed) for seed, cache in enumerate(caches)])
        rejected = flags(*[row % 3 != 1 for row in range(num_rows)])
        oracle_checks.assert_same_as_oracle(
            "restore_slots", (caches, logs, int64(*slots[:num_rows]), rejected, table), device
        )


def test_page_offsets_of_plain_pages_equal_strides(device):
    pages = layouts.make_pages("vec", tensors.SMALL, torch.int16)
    cache = pages.key_caches[0]
    table = (torch.arange(4)[:, None] * cache.stride(1) + torch.arange(8) * cache.stride(3)).int()
    arguments = (cache, int64(*samples.SLOTS), int32(*samples.LOG_ROWS), tensors.log_for(cache))
    with_strides, with_table = layouts.twin(arguments, device), layouts.twin((*arguments, table), device)
    ops.log_slots(*with_strides)
    ops.log_slots(*with_table)
    assert layouts.same_memory(with_strides, with_table[:4])


EMPTY = {
    "no tokens": lambda: ("write_kv_logged", samples.write_logged((), slots=(), extra_tokens=0)),
    "no tokens, but padding": lambda: ("write_kv_logged", samples.write_logged((), slots=(), extra_tokens=3)),
    "no blocks": lambda: ("write_kv_logged", samples.write_logged((0,), shape=Shape(0, 4, 4, 8, 8), slots=(-1,))),
    "no heads": lambda: ("write_kv_logged", samples.write_logged(shape=Shape(3, 4, 0, 8, 8))),
    "no width": lambda: ("write_kv_logged", samples.write_logged(shape=Shape(3, 4, 4, 0, 8))),
    "no log rows": lambda: (
        "restore_slots",
        (
            layouts.make_pages("packed", tensors.SMALL, torch.float32).key_caches, torch.empty(2, 0, 4, 8), int64(),
            flags(),
        ),
    ),
    "a table without width": lambda: (
        "log_slots",
        (
            torch.empty(3, 4, 4, 0), int64(*samples.SLOTS), int32(*samples.LOG_ROWS), torch.empty(4, 4, 0),
            torch.empty(4, 0, dtype=torch.int32),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", EMPTY)
def test_empty(device, case):
    op, arguments = EMPTY[case]()
    oracle_checks.assert_same_as_oracle(op, arguments, device)


# ---------------------------------------------------------------- properties

shapes = st.builds(
    Shape,
    blocks=st.integers(1, 4),
    block_size=st.sampled_from([1, 2, 3, 4, 7, 16]),
    heads=st.integers(1, 4),
    key_width=st.sampled_from([1, 3, 8, 16]),
    value_width=st.sampled_from([1, 5, 8, 32]),
    layers=st.integers(1, 3),
)


@st.composite
def windows(draw, shape: Shape):
    """Slots of a step's tokens, log rows of its drafts, and the rejected rows."""
    num_slots = shape.blocks * shape.block_size
    slots = draw(st.lists(st.integers(0, num_slots - 1), unique=True, max_size=12))
    skipped = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    slots = [-1 if skip else slot for slot, skip in zip(slots, skipped, strict=True)]
    rows = draw(st.permutations(range(len(slots))))
    drafts = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    log_rows = [row if draft else -1 for row, draft in zip(rows, drafts, strict=True)]
    rejected = draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
    return slots, log_rows, rejected


@given(st.data())
def test_log_then_restore_returns_the_bytes(device, data):
    """For any bytes, layout and window, and any data that another writer writes in between."""
    shape = data.draw(shapes)
    layout = data.draw(st.sampled_from(LAYOUT_NAMES))
    dtype = data.draw(st.sampled_from(ELEMENT_DTYPES))
    offset = data.draw(st.integers(0, 8))
    slots, log_rows, rejected = data.draw(windows(shape))
    pages = layouts.twin(layouts.make_pages(layout, shape, dtype, offset, seed=data.draw(st.integers(0, 99))), device)
    before = layouts.memory(pages.key_caches[0])[0]

    row_slots = [-1] * len(slots)
    for slot, row in zip(slots, log_rows, strict=True):
        if row >= 0:
            row_slots[row] = slot
    of_tokens, of_rows = layouts.twin(
        ((int64(*slots), int32(*log_rows)), (int64(*row_slots), flags(*rejected))), device
    )
    logs = []
    for caches in pages[:2]:
        rows = [layouts.random_bytes(len(slots) * c.size(2) * c.size(3), dtype).view(-1, *c.shape[2:]) for c in caches]
        logs.append(layouts.twin(torch.stack(rows), device))
        for layer, cache in enumerate(caches):
            ops.log_slots(cache, *of_tokens, logs[-1][layer])
    expected = layouts.twin(pages)
    logged = [slot for slot, row in zip(slots, log_rows, strict=True) if row >= 0 and slot >= 0]
    undone = [slot for row, slot in enumerate(row_slots) if rejected[row] and slot >= 0]
    for slot in logged:  # another writer
        for caches, expected_caches in zip(pages[:2], expected[:2], strict=True):
            for cache, expected_cache in zip(caches, expected_caches, strict=True):
                b, n = divmod(slot, shape.block_size)
                raw(cache)[b, n] ^= 0x55
                if slot not in undone:
                    raw(expected_cache)[b, n] ^= 0x55
    for caches, log in zip(pages[:2], logs, strict=True):
        ops.restore_slots(caches, log, *of_rows)
    assert layouts.same_memory(pages, expected)
    if set(logged) == set(undone):
        assert torch.equal(layouts.memory(pages.key_caches[0])[0], before)


@st.composite
def batches(draw):
    """(prompt or target tokens, drafts) of each request. Some requests have no drafts."""
    return draw(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=4))


@given(st.data())
def test_a_transaction_equals_a_run_without_the_rejected_drafts(device, data):
    """Plan, write every layer with a log, determine the outcome, restore. This is the promise of the library, over
    all memory."""
    batch = data.draw(batches())
    num_tokens = sum(tokens + drafts for tokens, drafts in batch)
    num_drafts = sum(drafts for _, drafts in batch)
    block_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    shape = Shape(
        blocks=-(-(num_tokens + 3) // block_size),
        block_size=block_size,
        heads=data.draw(st.integers(1, 3)),
        key_width=data.draw(st.sampled_from([3, 8])),
        value_width=data.draw(st.sampled_from([5, 8])),
        layers=data.draw(st.integers(1, 3)),
    )
    kv_cache_dtype, dtype, cache_dtype = data.draw(
        st.sampled_from([
            ("auto", torch.float32, torch.float32), ("auto", torch.bfloat16, torch.bfloat16),
            ("fp8_e4m3", torch.float16, torch.uint8), ("fp8_e5m2", torch.bfloat16, torch.float8_e5m2),
        ])
    )  # fmt: skip
    pages = layouts.make_pages(
        data.draw(st.sampled_from(LAYOUT_NAMES)), shape, cache_dtype, data.draw(st.integers(0, 8))
    )
    pages, without_drafts = layouts.twin(pages, device), layouts.twin(pages, device)
    num_slots = shape.blocks * shape.block_size
    slots = data.draw(st.permutations(range(num_slots)))[:num_tokens]
    padding = data.draw(st.integers(0, 2))
    slot_mapping = int64(*slots, *[-1] * padding).to(device)
    num_rows = num_drafts + data.draw(st.integers(0, 3))

    # The sampled tokens: each request accepts a prefix of its drafts.
    starts, cu, sampled, drafted, rejected_tokens = [0], [], [], [], []
    for tokens, drafts in batch:
        accepted = data.draw(st.integers(0, drafts))
        ids = [100 + len(drafted) + i for i in range(drafts)]
        sampled.append((ids[:accepted] + [7] + [-1] * 5)[:5])
        drafted += ids
        starts.append(starts[-1] + tokens + drafts)
        cu.append(len(drafted))
        rejected_tokens += range(starts[-1] - drafts + accepted, starts[-1])

    fills = {"log_rows": len(slot_mapping), "requests": num_rows, "positions": num_rows, "accepted": len(batch),
             "starts": len(batch) + 1}  # fmt: skip
    log_rows, *of_rows, num_accepted, draft_starts = layouts.twin(
        [int32(*[5] * count) for count in fills.values()], device
    )
    row_slots, row_rejected = layouts.twin((int64(*[5] * num_rows).view(1, -1), flags(*[1] * num_rows)), device)
    query_start_loc, cu, counters = layouts.twin((int32(*starts), int32(*cu), int64(*[0] * len(ops.COUNTERS))), device)
    ops.plan_window(query_start_loc, cu, [slot_mapping], log_rows, row_slots, *of_rows, counters, draft_starts)
    logs = [layouts.twin(layer_log(caches, num_rows), device) for caches in pages[:2]]
    scale = torch.tensor([0.5], device=device)
    accepted_slots = [-1 if token in rejected_tokens else slot for token, slot in enumerate(slots)]
    accepted_slots = int64(*accepted_slots).to(device)
    for layer in range(shape.layers):
        tokens = len(slot_mapping) + 1
        key = tensors.numbers(tokens, shape.heads, shape.key_width, dtype=dtype, seed=layer).to(device)
        value = tensors.numbers(tokens, shape.heads, shape.value_width, dtype=dtype, seed=layer + 50).to(device)
        ops.write_kv_logged(
            key, value, pages.key_caches[layer], pages.value_caches[layer], slot_mapping, scale, scale,
            kv_cache_dtype, log_rows, logs[0][layer], logs[1][layer],
        )  # fmt: skip
        ops.write_kv(
            key, value, without_drafts.key_caches[layer], without_drafts.value_caches[layer],
            accepted_slots, scale, scale, kv_cache_dtype,
        )  # fmt: skip
    tokens = torch.tensor(drafted, dtype=torch.int64), torch.tensor(sampled, dtype=torch.int32)
    ops.reject_rows(*layouts.twin(tokens, device), draft_starts, row_rejected, num_accepted, counters)
    for caches, log in zip(pages[:2], logs, strict=True):
        ops.restore_slots(caches, log, row_slots[0], row_rejected)
    assert layouts.same_memory(pages, without_drafts)
    assert counters.tolist() == [1, num_drafts, num_drafts - len(rejected_tokens), len(rejected_tokens), 0]


# ---------------------------------------------------------------- errors: the message, and nothing written


BOUNDS = (12, 13, 2**31, 2**40, 2**62)


@pytest.mark.debug_mode
@pytest.mark.parametrize("slot", BOUNDS)
@pytest.mark.parametrize("op", ALL_OPS)
def test_slot_outside_the_cache(device, op, slot):
    """The bad slot is the last one, so a check inside the loop would come too late."""
    name, arguments = "slot_mapping", sample_inputs(op)[0]
    if op in RESTORING_OPS:
        caches = layouts.make_pages("packed", tensors.SMALL, torch.float32).key_caches
        how = (flags(1, 1, 1),) if op == "restore_slots" else (int32(1, 2), int32(0, 1, 3), *outcome_buffers(3, 2))
        name, arguments = "row_slots", (caches, layer_log(caches, 3), int64(5, 0, slot), *how)
    elif op in LOGGING_OPS:
        arguments = with_arguments(op, arguments, log_rows=int32(0, 1, 2))
    arguments, without = (with_arguments(op, arguments, **{name: int64(5, 0, last)}) for last in (slot, -1))
    sentence = rf"{name}\[2\] must be below 12 .*, got {slot}$"
    bad_input.check_bad_data(op, arguments, IndexError, sentence, device, bad_input.left_by_the_oracle(op, without))


@pytest.mark.debug_mode
@pytest.mark.parametrize("shape", tensors.NO_BYTES.values(), ids=tensors.NO_BYTES)
@pytest.mark.parametrize("op", ALL_OPS)
def test_slot_outside_a_cache_whose_rows_have_no_bytes(device, op, shape):
    written = samples.write_logged(shape=shape)
    log_rows = int32(0, 1, 2)
    arguments = {
        "write_kv": written[:8],
        "write_kv_logged": (*written[:8], log_rows, *written[9:]),
        "log_slots": (written[2], int64(), log_rows, written[9]),
        "restore_slots": ([written[2]], written[9][None, :3], int64(), flags(1, 1, 1)),
        "restore_slots_from_rejected": (
            [written[2]], written[9][None, :3], int64(), int32(1, 2), int32(0, 1, 3), *outcome_buffers(3, 2)
        ),
    }[op]  # fmt: skip
    name = "row_slots" if op in RESTORING_OPS else "slot_mapping"
    arguments, without = (with_arguments(op, arguments, **{name: int64(5, 0, last)}) for last in (12, -1))
    sentence = rf"{name}\[2\] must be below 12 .*, got 12$"
    bad_input.check_bad_data(op, arguments, IndexError, sentence, device, bad_input.left_by_the_oracle(op, without))


def test_slot_outside_the_cache_of_an_accepted_row(device):
    """Rows that are kept are not checked."""
    caches = layouts.make_pages("packed", tensors.SMALL, torch.float32).key_caches
    oracle_checks.assert_same_as_oracle(
        "restore_slots", (caches, layer_log(caches, 3), int64(5, 0, 99), flags(1, 1, 0)), device
    )


@pytest.mark.debug_mode
@pytest.mark.parametrize("row", [4, 5, 2**31 - 1])
@pytest.mark.parametrize("op", LOGGING_OPS)
def test_log_of_a_fixed_size_is_never_overrun(device, op, row):
    """An earlier version had 512 rows and silently wrote past them. CUDA still writes the token, because attention
    needs it."""
    arguments = with_arguments(op, sample_inputs(op)[0], slot_mapping=int64(5, 0, 7), log_rows=int32(0, 1, row))
    without = with_arguments(op, arguments, log_rows=int32(0, 1, -1))
    sentence = rf"log_rows\[2\] must be below the 4 rows of the log, got {row}$"
    bad_input.check_bad_data(op, arguments, IndexError, sentence, device, bad_input.left_by_the_oracle(op, without))


def test_log_row_of_a_skipped_token_is_ignored(device):
    oracle_checks.assert_same_as_oracle("write_kv_logged", samples.write_logged((0, -1, 99), slots=(3, 5, -1)), device)


def _with_page_offset(op, offset):
    """A sample, and the same with one offset replaced: by a number, or by a function of the space in the last page."""
    arguments = sample_inputs(op)[1 if op == "restore_slots_from_rejected" else 3]
    cache = arguments[0] if op == "log_slots" else arguments[0][-1]
    first, storage = cache.storage_offset(), cache.untyped_storage().nbytes() // cache.element_size()
    last_page = (cache.shape[0] - 1) * cache.stride(0) + (cache.shape[2] - 1) * cache.stride(2)
    table = arguments[-1].clone()
    table[1, 2] = offset(storage - first - last_page) if callable(offset) else offset
    return arguments, with_arguments(op, arguments, page_offsets=table)


@pytest.mark.debug_mode
@pytest.mark.parametrize("offset", [-1, -(2**31), 2**30, 2**31 - 1])
@pytest.mark.parametrize("op", ["log_slots", *RESTORING_OPS])
def test_page_offsets_outside_the_storage(device, op, offset):
    """Slots 17 (logged), 1 and 17 (restored) use it. CUDA skips such an element, and no other."""
    plain, wrong = _with_page_offset(op, offset)
    left = bad_input.check_bad_data(op, wrong, IndexError, "page_offsets must lie within the storage", device)
    if left is not None:
        of_planes = (
            layouts.memory(arguments[:4]) for arguments in (left, bad_input.left_by_the_oracle(op, plain), plain)
        )
        for mine, wanted, before in zip(*of_planes, strict=True):
            differs = (mine != wanted).nonzero()
            assert len(differs) <= 2 * 2 * 2  # bytes of one element of each head
            assert torch.equal(mine[differs], before[differs])


@pytest.mark.parametrize("op", ["log_slots", *RESTORING_OPS])
def test_the_last_page_offset_inside_the_storage(device, op):
    """The CPU refuses the next one, because it checks the table for every page."""
    oracle_checks.assert_same_as_oracle(op, _with_page_offset(op, lambda room: room - 1)[1], device)


@pytest.mark.parametrize("op", ["log_slots", *RESTORING_OPS])
def test_the_first_page_offset_outside_the_storage(op):
    wrong = _with_page_offset(op, lambda room: room)[1]
    oracle_checks.refuse(op, wrong, IndexError, "page_offsets must lie within the storage")


# (op, sample, argument): invalid values, each with the expected and the given part of the message.
# A function gets the arguments of the sample.
CACHE_SHAPE = "be [num_blocks, block_size, num_kv_heads, width]"
SCALE_SHAPE = "be one element, per head [num_kv_heads] or per token [num_tokens, 1]"
E4M3_CACHE = "have dtype torch.uint8 or torch.float8_e4m3fn for kv_cache_dtype"
WRONG = {
    ("write_kv", 0, "key"): [
        (
            lambda a: a[0].double(),
            "have dtype torch.float32, torch.float16 or torch.bfloat16",
            "torch.float64 [8, 4, 8]",
        ),
        (lambda a: a[0][:5], "be [>= 6, 4, 8]", "torch.float32 [5, 4, 8]"),
        (lambda a: a[0][:, :3], "be [>= 6, 4, 8]", "torch.float32 [8, 3, 8]"),
    ],
    ("write_kv", 0, "value"): [
        (lambda a: a[1].half(), "have dtype torch.float32", "torch.float16 [8, 4, 8]"),
        (lambda a: a[1][..., :7], "be [>= 6, 4, 8]", "torch.float32 [8, 4, 7]"),
        (lambda a: a[1].flatten(1), "be [>= 6, 4, 8]", "torch.float32 [8, 32]"),
    ],
    ("write_kv", 0, "key_cache"): [(lambda a: a[2].flatten(2), CACHE_SHAPE, "torch.float32 [3, 4, 32]")],
    ("write_kv", 0, "value_cache"): [
        (lambda a: a[3].flatten(2), CACHE_SHAPE, "torch.float32 [3, 4, 32]"),
        (lambda a: a[3][:2], "be of the num_blocks", "torch.float32 [2, 4, 4, 8]"),
        (lambda a: a[3][:, :3], "be of the num_blocks, block_size", "torch.float32 [3, 3, 4, 8]"),
        (lambda a: a[3].int(), "have dtype torch.float32", "torch.int32 [3, 4, 4, 8]"),
    ],
    ("write_kv", 0, "slot_mapping"): [
        (lambda a: a[4].int(), "have dtype torch.int64", "torch.int32 [6]"),
        (lambda a: a[4].view(2, 3), "be [num_tokens]", "torch.int64 [2, 3]"),
        (int64(*[0] * 6)[::2], "be contiguous", "torch.int64 [3]"),
    ],
    ("write_kv", 0, "kv_cache_dtype"): [("int8", "be one of auto, fp8, fp8_e4m3, fp8_e5m2", "int8")],
    ("write_kv", 3, "k_scale"): [
        (lambda a: a[5].half(), "have dtype torch.float32", "torch.float16 [4]"),
        (torch.ones(3), SCALE_SHAPE, "torch.float32 [3]"),
    ],
    ("write_kv", 3, "v_scale"): [(torch.ones(5, 1), SCALE_SHAPE, "torch.float32 [5, 1]")],
    ("write_kv_logged", 0, "log_rows"): [
        (lambda a: a[8].long(), "have dtype torch.int32", "torch.int64 [6]"),
        (lambda a: a[8][:5], "be [num_tokens] with at least 6 elements", "torch.int32 [5]"),
        (int32(*[0] * 12)[::2], "be contiguous", "torch.int32 [6]"),
    ],
    ("write_kv_logged", 3, "key_log"): [
        (lambda a: a[9].char(), "have dtype torch.uint8", "torch.int8 [4, 4, 8]"),
        (lambda a: a[9][:, :3], "be [num_log_rows, 4, 8]", "torch.uint8 [4, 3, 8]"),
    ],
    ("write_kv_logged", 0, "value_log"): [
        (lambda a: a[10][..., :7], "be [num_log_rows, 4, 8]", "torch.float32 [4, 4, 7]"),
        (lambda a: a[10][:3], "be of as many rows as key_log", "torch.float32 [3, 4, 8]"),
    ],
    ("log_slots", 0, "cache"): [
        (lambda a: a[0][0], CACHE_SHAPE, "torch.bfloat16 [4, 4, 8]"),
        (
            torch.empty(3, 4, 4, 8, dtype=torch.complex128),
            "have dtype of 1, 2, 4 or 8 bytes per element",
            "another dtype [3, 4, 4, 8]",
        ),
    ],
    ("log_slots", 0, "slot_mapping"): [
        (lambda a: a[1].int(), "have dtype torch.int64", "torch.int32 [6]"),
        (int64(*[0] * 6)[::2], "be contiguous", "torch.int64 [3]"),
    ],
    ("log_slots", 0, "log_rows"): [
        (lambda a: a[2].long(), "have dtype torch.int32", "torch.int64 [6]"),
        (lambda a: a[2][:5], "be [num_tokens] with at least 6 elements", "torch.int32 [5]"),
    ],
    ("log_slots", 0, "log"): [
        (lambda a: a[3].half(), "have dtype torch.bfloat16", "torch.float16 [4, 4, 8]"),
        (lambda a: a[3][..., :4], "be [num_log_rows, 4, 8]", "torch.bfloat16 [4, 4, 4]"),
    ],
    ("log_slots", 3, "page_offsets"): [
        (lambda a: a[4].long(), "have dtype torch.int32", "torch.int64 [16, 16]"),
        (lambda a: a[4][:8], "be [block_size, width] of the cache", "torch.int32 [8, 16]"),
        (lambda a: a[4].T, "be contiguous", "torch.int32 [16, 16]"),
    ],
    ("restore_slots", 0, "log"): [
        (lambda a: a[1][:1], "be [2, num_log_rows, 4, 8]", "torch.bfloat16 [1, 4, 4, 8]"),
        (lambda a: a[1].half(), "have dtype torch.bfloat16", "torch.float16 [2, 4, 4, 8]"),
        (lambda a: a[1].flatten(2), "be [2, num_log_rows, 4, 8]", "torch.bfloat16 [2, 4, 32]"),
    ],
    ("restore_slots", 0, "row_slots"): [
        (lambda a: a[2].int(), "have dtype torch.int64", "torch.int32 [4]"),
        (lambda a: a[2][:3], "be one slot for each row of log", "torch.int64 [3]"),
        (int64(*[0] * 8)[::2], "be contiguous", "torch.int64 [4]"),
    ],
    ("restore_slots", 0, "row_rejected"): [
        (lambda a: a[3].byte(), "have dtype torch.bool", "torch.uint8 [4]"),
        (flags(1, 1, 1, 1, 1), "be one flag for each row of log", "torch.bool [5]"),
        (flags(*[1] * 8)[::2], "be contiguous", "torch.bool [4]"),
    ],
    ("restore_slots", 0, "num_rows"): [
        (-1, "be from 0 to the 4 rows of log", "-1"),
        (5, "be from 0 to the 4 rows of log", "5"),
    ],
    ("restore_slots_from_rejected", 0, "num_rejected"): [
        (lambda a: a[3].long(), "have dtype torch.int32", "torch.int64 [3]"),
        (lambda a: a[3][:2], "be [num_requests] with at least 3 elements", "torch.int32 [2]"),
    ],
    ("restore_slots_from_rejected", 0, "draft_start_loc"): [
        (int32(), "be [num_requests + 1] with at least 1 elements", "torch.int32 [0]"),
    ],
    ("restore_slots_from_rejected", 0, "row_rejected"): [
        (flags(1, 1, 1, 1, 1), "be one flag for each row of log", "torch.bool [5]"),
    ],
    ("restore_slots_from_rejected", 0, "counters"): [
        (int64(1, 2), "be [len(COUNTERS)] with at least 5 elements", "torch.int64 [2]"),
    ],
    ("restore_slots_from_rejected", 0, "num_rows"): [
        (5, "be from 0 to the 4 rows of log", "5"),
    ],
    ("restore_slots", 3, "page_offsets"): [
        (lambda a: a[4].long(), "have dtype torch.int32", "torch.int64 [16, 16]"),
        (lambda a: a[4].T, "be contiguous", "torch.int32 [16, 16]"),
    ],
}


@pytest.mark.parametrize(
    ("op", "sample", "argument", "value", "expected", "got"),
    [(*where, *wrong) for where, wrongs in WRONG.items() for wrong in wrongs],
)
def test_wrong_argument(op, sample, argument, value, expected, got):
    bad_input.refuse_argument(op, sample, argument, value, expected, got)


@pytest.mark.parametrize(
    ("sample", "kv_cache_dtype", "expected"),
    [
        (0, "fp8", f"{E4M3_CACHE} fp8, got torch.float32 [3, 4, 4, 8]"),
        (
            3,
            "auto",
            "have dtype torch.float32 (that of key) for kv_cache_dtype auto, got torch.uint8 [3, 4, 4, 8]",
        ),
        (4, "fp8_e4m3", f"{E4M3_CACHE} fp8_e4m3, got torch.float8_e5m2 [3, 4, 4, 8]"),
    ],
)
def test_cache_of_another_format(sample, kv_cache_dtype, expected):
    arguments = with_arguments("write_kv", sample_inputs("write_kv")[sample], kv_cache_dtype=kv_cache_dtype)
    oracle_checks.refuse("write_kv", arguments, TypeError, f"key_cache must {re.escape(expected)}$")


WRONG_LAYERS = {
    "none": (lambda caches: [], "caches must hold at least one plane, got none"),
    "dtype": (
        lambda caches: [caches[0], caches[1].half()],
        "caches[1] must have dtype torch.bfloat16, got torch.float16 [3, 4, 4, 8]",
    ),
    "shape": (
        lambda caches: [caches[0], caches[1][:2]],
        "caches[1] must be of the shape and strides of caches[0], torch.bfloat16 [3, 4, 4, 8], "
        "got torch.bfloat16 [2, 4, 4, 8]",
    ),
    "strides": (
        lambda caches: [caches[0], caches[1].contiguous()],
        "caches[1] must be of the shape and strides of caches[0]",
    ),
}


@pytest.mark.parametrize("case", WRONG_LAYERS)
def test_layers_of_different_geometry(case):
    change, sentence = WRONG_LAYERS[case]
    arguments = sample_inputs("restore_slots")[0]
    arguments = with_arguments("restore_slots", arguments, caches=change(arguments[0]))
    oracle_checks.refuse("restore_slots", arguments, TypeError if case == "dtype" else ValueError, re.escape(sentence))


# op, argument, its value as a function of the other arguments, name of the other argument in the message
SHARED = [
    ("write_kv", "key", lambda a: a[2].flatten(0, 1)[:8], "key_cache"),
    ("write_kv", "value", lambda a: a[3].flatten(0, 1)[:8], r"\w+_cache"),
    ("write_kv_logged", "key_log", lambda a: a[0][:4], "key"),
    ("write_kv_logged", "value_log", lambda a: a[2][0], r"\w+_cache"),
    ("write_kv_logged", "value_log", lambda a: a[9], "key_log|key_log and value_log"),
    ("log_slots", "log", lambda a: a[0][0], "cache"),
    ("restore_slots", "log", lambda a: a[0][0].as_strided((2, 4, 4, 8), a[0][0].stride()), "caches"),
    ("restore_slots_from_rejected", "log", lambda a: a[0][0].as_strided((2, 4, 4, 8), a[0][0].stride()), "caches"),
    ("restore_slots_from_rejected", "num_accepted", lambda a: a[2].view(torch.int32)[:3], "num_accepted and row_slots"),
    ("restore_slots_from_rejected", "row_rejected", lambda a: a[2].view(torch.bool)[:4], "row_rejected and row_slots"),
    ("restore_slots_from_rejected", "num_accepted", lambda a: a[4], "num_accepted and draft_start_loc"),
]


@pytest.mark.parametrize(("op", "argument", "value", "other"), SHARED)
def test_source_and_destination_must_not_share_memory(op, argument, value, other):
    bad_input.refuse_shared(op, argument, value, rf"({other})( and \w+)?")


@pytest.mark.parametrize("name", ["slot_mapping", "log_rows"])
def test_a_log_in_the_indices_of_its_tokens_is_an_error(name):
    """Without the check, log_slots would follow slots and rows that it has just overwritten."""
    script = f"""if True:
        import torch
        from nwor_ops import ops

        cache, log = torch.full((4, 16, 2, 64), 2**62), torch.zeros(64, 2, 64, dtype=torch.int64)
        indices = {{"slot_mapping": torch.arange(64), "log_rows": torch.arange(64, dtype=torch.int32)}}
        place = log.view(-1).view(indices["{name}"].dtype)[:64]
        indices["{name}"] = place.copy_(indices["{name}"])
        try:
            ops.log_slots(cache, indices["slot_mapping"], indices["log_rows"], log)
        except ValueError as error:
            print(error)
    """
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (child.returncode, child.stdout) == (0, f"log_slots: log and {name} must not share memory\n"), child.stderr


def test_logs_that_overlap_with_different_starts():
    """Each row of the value log is the next row of the key log."""
    arguments = samples.write_logged()
    log = tensors.log_for(arguments[2], rows=5)
    arguments = with_arguments("write_kv_logged", arguments, key_log=log[:4], value_log=log[1:])
    oracle_checks.refuse("write_kv_logged", arguments, ValueError, "key_log and value_log must not share memory")


# ---------------------------------------------------------------- row_windows


@pytest.mark.parametrize("op", LOGGING_OPS)
def test_logged_rows_carry_their_window(device, op):
    """Rows of skipped tokens, and rows that are not logged, keep their number."""
    arguments = sample_inputs(op)[-1]
    ours = oracle_checks.assert_same_as_oracle(op, arguments, device)
    logged = [row for slot, row in zip(samples.SLOTS, samples.LOG_ROWS, strict=True) if slot >= 0 and row >= 0]
    expected = [tensors.WINDOW if row in logged else tensors.EARLIER_WINDOW for row in range(len(ours[-1]))]
    assert ours[-1].tolist() == expected


@pytest.mark.parametrize("shape", tensors.NO_BYTES.values(), ids=tensors.NO_BYTES)
@pytest.mark.parametrize("op", [*LOGGING_OPS, "log_slots with page_offsets"])
def test_rows_without_bytes_carry_their_window(device, op, shape):
    written = samples.write_logged(shape=shape)
    marks = int64(tensors.WINDOW), tensors.row_windows(tensors.NUM_LOG_ROWS)
    if op == "write_kv_logged":
        arguments = (*written, *marks)
    else:
        table = torch.zeros(shape.block_size, shape.key_width, dtype=torch.int32) if "page_offsets" in op else None
        arguments = (written[2], written[4], written[8], written[9], table, *marks)
    ours = oracle_checks.assert_same_as_oracle(op.split()[0], arguments, device)
    logged = [row for slot, row in zip(samples.SLOTS, samples.LOG_ROWS, strict=True) if slot >= 0 and row >= 0]
    expected = [tensors.WINDOW if row in logged else tensors.EARLIER_WINDOW for row in range(len(ours[-1]))]
    assert len(set(expected)) == 2
    assert ours[-1].tolist() == expected


@pytest.mark.parametrize("reached", range(4))
def test_a_forward_that_stopped_early(device, reached):
    """Layers that did not log in this window hold rows of an older window, which must not be restored."""
    shape = tensors.SMALL._replace(layers=3)
    caches = layouts.make_pages("one_backing", shape, torch.bfloat16).key_caches
    windows = tensors.row_windows(shape.layers, 4)
    slots, rows = int64(5, 0, 11), int32(2, 0, 3)
    log = layer_log(caches, 4)
    before = layouts.memory(caches[0])[0]
    for layer in range(reached):
        ops.log_slots(caches[layer], slots, rows, log[layer], None, int64(tensors.WINDOW), windows[layer])
        raw(caches[layer])[1, 1] ^= 0x55
        raw(caches[layer])[2, 3] ^= 0x55
    arguments = (caches, log, int64(0, -1, 5, 11), flags(1, 1, 1, 1), None, int64(tensors.WINDOW), windows)
    ours = oracle_checks.assert_same_as_oracle("restore_slots", arguments, device)
    assert torch.equal(layouts.memory(ours[0][0])[0], before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_row_windows_with_a_page_table(device, dtype):
    pages = layouts.make_amx_pages(Shape(2, 16, 2, 16, 16, layers=2), dtype)
    windows = tensors.row_windows(2, 3)
    windows[0, 1] = windows[1, 2] = tensors.WINDOW
    log = tensors.surrounded_layers([tensors.log_for(cache, 3, seed) for seed, cache in enumerate(pages.value_caches)])
    oracle_checks.assert_same_as_oracle(
        "restore_slots",
        (
            pages.value_caches,
            log,
            int64(3, 17, 31),
            flags(1, 1, 1),
            pages.value_offsets,
            int64(tensors.WINDOW),
            windows,
        ),
        device,
    )


WRONG_WINDOWS = [
    ({"row_windows": None}, "window_id and row_windows must be given together"),
    ({"window_id": None}, "window_id and row_windows must be given together"),
    ({"window_id": int32(1)}, r"window_id must have dtype torch.int64, got torch.int32 \[1\]"),
    ({"window_id": int64()}, r"window_id must be .*, got torch.int64 \[0\]"),
    ({"row_windows": int32(1, 1, 1, 1)}, r"row_windows must have dtype torch.int64, got torch.int32 \[4\]"),
    ({"row_windows": int64(1, 1, 1)}, r"row_windows must be .*, got torch.int64 \[3\]"),
    (
        {"row_windows": int64(1, 1, 1, 1).view(1, 2, 2)},
        r"row_windows must be .*, got torch.int64 \[1, 2, 2\]",
    ),
]


@pytest.mark.parametrize("op", [*LOGGING_OPS, "restore_slots"])
@pytest.mark.parametrize(("replaced", "sentence"), WRONG_WINDOWS)
def test_wrong_windows(op, replaced, sentence):
    arguments = with_arguments(op, sample_inputs(op)[-1], **replaced)
    oracle_checks.refuse(op, arguments, TypeError if "dtype" in sentence else ValueError, sentence)


def test_row_windows_must_not_be_counters():
    """Otherwise the counted outcome would decide which rows count as logged."""
    arguments = sample_inputs("restore_slots_from_rejected")[0]
    windows = int64(*range(13))
    arguments = with_arguments(
        "restore_slots_from_rejected", arguments, counters=windows[:5], window_id=int64(tensors.WINDOW),
        row_windows=windows[4:12].view(2, 4),
    )  # fmt: skip
    oracle_checks.refuse(
        "restore_slots_from_rejected", arguments, ValueError, "counters and row_windows must not share memory$"
    )


@pytest.mark.parametrize("op", [*LOGGING_OPS, "restore_slots"])
def test_row_windows_must_be_contiguous(op):
    arguments = sample_inputs(op)[-1]
    spaced = arguments[-1].repeat_interleave(2, -1)[..., ::2]
    oracle_checks.refuse(
        op, with_arguments(op, arguments, row_windows=spaced), ValueError, "row_windows must be contiguous"
    )


def test_row_windows_must_not_hold_the_window_id():
    both = int64(1, 1, 1, 1)
    for op in LOGGING_OPS:
        arguments = with_arguments(op, sample_inputs(op)[-1], row_windows=both, window_id=both[2:3])
        oracle_checks.refuse(op, arguments, ValueError, "row_windows and window_id must not share memory")


FLOAT_ARGUMENTS = {
    "write_kv": ("key", "value", "key_cache", "value_cache", "k_scale", "v_scale"),
    "write_kv_logged": (
        "key",
        "value",
        "key_cache",
        "value_cache",
        "k_scale",
        "v_scale",
        "key_log",
        "value_log",
    ),
    "log_slots": ("cache", "log"),
    "restore_slots": ("caches", "log"),
    "restore_slots_from_rejected": ("caches", "log"),
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in FLOAT_ARGUMENTS.items() for name in names])
def test_gradients_are_refused(op, name):
    bad_input.refuse_gradient(op, name)


# ---------------------------------------------------------------- rows that move together


# Slots of ten tokens and their log rows: consecutive runs of every length. Runs end at the end of a block
# (4 slots), at a gap in slots or rows, and at tokens that are skipped or not drafts. Some run backwards.
RUNS = {
    "one run over two blocks": (range(1, 11), range(10)),
    "slots jump": ((0, 1, 2, 8, 9, 4, 5, 6, 7, 3), range(10)),
    "rows jump": (range(10), (0, 1, 5, 6, 7, 2, 3, 9, 8, 4)),
    "tokens that are not drafts": (range(10), (-1, 0, 1, 2, -1, 3, 4, -1, 5, 6)),
    "skipped tokens": ((0, 1, -1, 3, 4, 5, 6, -1, 8, 9), range(10)),
    "backwards": (range(9, -1, -1), range(9, -1, -1)),
}


def slot_adjacent():
    """A key plane of `vec` pages of vLLM, and a log whose rows are adjacent if the slots are."""
    cache = torch.arange(3 * 2 * 8 * 4, dtype=torch.float32).reshape(3, 2, 8, 4).permute(0, 3, 1, 2)
    log = torch.full((2, 8, 10), -1.0).permute(2, 0, 1)
    assert cache.stride(1) == log.stride(0) == 1
    return cache, log


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
def test_adjacent_rows_are_logged_as_single_ones(device, runs):
    slots, rows = int64(*runs[0]), int32(*runs[1])
    (key_cache, key_log), (value_cache, value_log) = slot_adjacent(), slot_adjacent()
    value_cache += 1000
    key, value = torch.randn(2, 10, 2, 8)
    one, window, marks = torch.ones(1), int64(7), torch.zeros(10, dtype=torch.int64)
    oracle_checks.assert_same_as_oracle(
        "write_kv_logged",
        (key, value, key_cache, value_cache, slots, one, one, "auto", rows, key_log, value_log, window, marks),
        device,
    )


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS.keys())
@pytest.mark.parametrize("window_of_row", [(7,) * 10, (7, 7, 7, 6, 7, 7, 7, 7, 5, 7)], ids=["all", "some"])
@pytest.mark.parametrize("rejected", [0b1111111111, 0b1101111011, 0b0000111100, 0b1010101010])
def test_adjacent_rows_are_restored_as_single_ones(device, runs, window_of_row, rejected):
    caches, log = zip(*(slot_adjacent() for _ in range(2)), strict=True)
    log = torch.stack([plane.permute(1, 2, 0) for plane in log]).permute(0, 3, 1, 2)
    log.copy_(torch.randn(log.shape))
    flags = torch.tensor([bool(rejected >> row & 1) for row in range(10)])
    marks = torch.tensor([window_of_row, window_of_row[::-1]])
    assert log.stride(1) == 1
    for num_rows in (None, 0, 4, 10):
        arguments = (list(caches), log, int64(*runs[0]), flags, None, int64(7), marks, num_rows)
        oracle_checks.assert_same_as_oracle("restore_slots", arguments, device)
