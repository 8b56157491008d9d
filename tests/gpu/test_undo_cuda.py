"""Family undo on a GPU: every path of the kernels against the oracle, on all memory around; CUDA graphs,
no allocation and no sync inside a transaction, debug mode, opcheck and torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys

import oracle
import pytest
import torch
from layouts import LAYOUTS, Shape, make_amx_pages, make_pages, memory, random_bytes, same_memory, twin
from samples import (
    LOG_ROWS,
    SLOTS,
    SMALL,
    WIDE_VALUES,
    flags,
    int32,
    int64,
    log_for,
    logged_arguments,
    numbers,
    sample_inputs,
    surrounded_layers,
    with_arguments,
    write_arguments,
)

import nwor_ops
from nwor_ops import ops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP8_CACHES = (
    ("fp8", torch.uint8),
    ("fp8_e4m3", torch.float8_e4m3fn),
    ("fp8_e5m2", torch.uint8),
    ("fp8_e5m2", torch.float8_e5m2),
)
SCALES = ("one", "zero_dim", "per_head", "per_token")
SHAPES = {
    "d64": Shape(3, 16, 2, 64, 64, layers=2),
    "d80": Shape(3, 16, 4, 80, 80, layers=2),
    "d128": Shape(3, 16, 8, 128, 128, layers=2),
    "d192_v128": Shape(2, 16, 3, 192, 128, layers=2),
    "d256": Shape(2, 16, 2, 256, 256, layers=2),
    "block_size_is_num_heads": Shape(4, 8, 8, 16, 16, layers=2),
    "block_size_12": Shape(3, 12, 2, 16, 24, layers=2),
    "odd": Shape(3, 5, 3, 7, 9, layers=3),
    "mla_latent": Shape(2, 16, 1, 576, 64, layers=2),
    "one_element": Shape(13, 1, 1, 1, 1, layers=2),
    "more_units_than_a_block": Shape(2, 4, 40, 256, 128),
}
OFFSETS = range(9)
ELEMENT_DTYPES = (torch.uint8, torch.float8_e5m2, torch.int16, torch.bfloat16, torch.float32, torch.int64)
UNDO = ("write_kv", "write_kv_logged", "log_slots", "restore_slots", "restore_slots_from_rejected")


def spread_slots(shape, count=9):
    """Distinct slots in any order, the first and the last one among them, and two skipped tokens."""
    last = shape.blocks * shape.block_size - 1
    order = torch.randperm(last + 1, generator=torch.Generator().manual_seed(0)).tolist()
    inner = [slot for slot in order if slot not in (0, last)][: count - 2]
    return (*inner[:4], last, 0, *inner[4:], -1, -7)


def every_second(slots):
    """Every second token is a draft; rows are not in the order of tokens."""
    drafts = range(0, len(slots), 2)
    rows = dict(zip(drafts, reversed(range(len(drafts))), strict=True))
    return tuple(rows.get(token, -1) for token in range(len(slots)))


def logged_with_room(slots, **options):
    """Arguments of write_kv_logged with as many log rows as there are drafts."""
    rows = every_second(slots)
    arguments = logged_arguments(log_rows=rows, slots=slots, **options)
    logs = [log_for(cache, max(rows) + 1, seed) for seed, cache in enumerate(arguments[2:4])]
    return (*arguments[:-2], *logs)


def layer_log(caches, rows):
    return surrounded_layers([log_for(cache, rows, seed=20 + i) for i, cache in enumerate(caches)])


# ---------------------------------------------------------------- write_kv, write_kv_logged


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_in_every_layout(same_as_oracle, layout, shape):
    slots = spread_slots(shape)
    options = {"layout": layout, "shape": shape, "slots": slots, "dtype": torch.bfloat16}
    same_as_oracle("write_kv", write_arguments(**options))
    same_as_oracle("write_kv_logged", logged_with_room(**options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_copies_every_bit_pattern(same_as_oracle, dtype):
    """NaN payloads, signalling NaNs and subnormals arrive unchanged."""
    key = random_bytes(8 * 4 * 8, dtype, seed=5).view(8, 4, 8)
    value = random_bytes(8 * 4 * 8, dtype, seed=6).view(8, 4, 8)
    same_as_oracle("write_kv_logged", (key, value, *logged_arguments(dtype=dtype)[2:]))


@pytest.mark.parametrize("layout", ["nhd", "padded", "vec"])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize(("kv_cache_dtype", "cache_dtype"), FP8_CACHES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8(same_as_oracle, dtype, kv_cache_dtype, cache_dtype, scales, layout):
    tokens, heads = len(SLOTS) + 2, WIDE_VALUES.heads
    shape = {"one": (1,), "zero_dim": (), "per_head": (heads,), "per_token": (tokens, 1)}[scales]
    options = {
        "layout": layout, "shape": WIDE_VALUES, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype,
        "cache_dtype": cache_dtype, "scales": (numbers(*shape, seed=4).abs(), numbers(*shape, seed=5).abs()),
    }  # fmt: skip
    same_as_oracle("write_kv", write_arguments(**options))
    same_as_oracle("write_kv_logged", logged_arguments(**options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_of_every_16_bit_number(same_as_oracle, kv_cache_dtype, dtype):
    """All 65536 bit patterns: ties, subnormals, saturation, infinities, NaNs, both zeros."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 4, 256)
    for scale in (1.0, 0.37):
        arguments = write_arguments("nhd", Shape(8, 8, 4, 256, 256), dtype, kv_cache_dtype, slots=tuple(range(64)))
        scales = torch.tensor([scale]), torch.tensor([-scale])
        same_as_oracle("write_kv", (every, every, *arguments[2:5], *scales, kv_cache_dtype))


def test_scales_are_not_read_where_bytes_are_copied(same_as_oracle):
    empty = torch.empty(0)
    same_as_oracle(
        "write_kv_logged", with_arguments("write_kv_logged", logged_arguments(), k_scale=empty, v_scale=empty)
    )


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_misaligned_planes(same_as_oracle, kv_cache_dtype, dtype, offset):
    """Caches, sources and logs that start at every element of a 16-byte word, one of them at a time."""
    shape = Shape(3, 4, 2, 16, 32)
    options = {"layout": "nhd", "shape": shape, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    same_as_oracle("write_kv_logged", aligned(logged_arguments(**options, offset=offset)))
    for moved in ("key", "value", "key_log", "value_log"):
        same_as_oracle("write_kv_logged", aligned(logged_arguments(**options), moved, offset))


def aligned(arguments, moved=None, offset=0):
    """The same call with sources and logs that start 16-byte aligned, but for the one that is moved."""
    replaced = {}
    for name, place in {"key": 0, "value": 1, "key_log": 9, "value_log": 10}.items():
        tensor, shift = arguments[place], offset if name == moved else 0
        memory_around = random_bytes(tensor.numel() + 64, tensor.dtype, seed=place)
        view = memory_around[16 + shift : 16 + shift + tensor.numel()].view(tensor.shape)
        oracle.raw(view).copy_(oracle.raw(tensor))
        replaced[name] = view
    return with_arguments("write_kv_logged", arguments, **replaced)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
def test_sources_and_logs_of_any_strides(same_as_oracle, kv_cache_dtype):
    """Slices of a fused QKV projection, transposed heads, every second element, overlapping nothing."""
    arguments = logged_arguments(dtype=torch.bfloat16, kv_cache_dtype=kv_cache_dtype)
    qkv = numbers(8, 3, 4, 8, dtype=torch.bfloat16)
    by_head = numbers(4, 8, 8, dtype=torch.bfloat16, seed=1).transpose(0, 1)
    spaced = numbers(8, 4, 16, dtype=torch.bfloat16, seed=2)[..., ::2]
    logs = random_bytes(4 * 4 * 32, arguments[2].dtype).view(4, 4, 32)
    for key, value in ((qkv[:, 1], qkv[:, 2]), (by_head, spaced), (spaced, by_head)):
        replaced = {"key": key, "value": value, "key_log": logs[..., 0:16:2], "value_log": logs[..., 16:24]}
        same_as_oracle("write_kv_logged", with_arguments("write_kv_logged", arguments, **replaced))


def test_latent_without_values(same_as_oracle):
    """MLA: one latent plane, and a value of no width."""
    shape = Shape(2, 16, 1, 576, 0)
    same_as_oracle("write_kv_logged", logged_with_room(spread_slots(shape), shape=shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("slots", [(), (-1, -1, -3), (0,)], ids=["empty", "all skipped", "one"])
def test_few_tokens(same_as_oracle, slots):
    same_as_oracle("write_kv", write_arguments(slots=slots))
    same_as_oracle("write_kv_logged", logged_arguments((0, 1, 2)[: len(slots)], slots=slots))


@pytest.mark.parametrize("tokens", [300, 20_000])
def test_many_tokens(device, tokens):
    """Every block shape between one row per warp and many rows per block, against torch's own indexing."""
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


def test_offsets_beyond_32_bits(device):
    """A packed cache of more than 2^31 elements: the last slots of it are reached, and put back."""
    blocks = 2**31 // (16 * 8 * 256) + 4
    cache = torch.zeros(blocks, 16, 8, 256, dtype=torch.bfloat16, device=device)
    slots = blocks * 16 - 1 - torch.arange(5, device=device)
    key, value = torch.randn(2, 5, 8, 128, device=device).bfloat16()
    log_rows, scale = torch.arange(5, dtype=torch.int32, device=device), torch.ones(1, device=device)
    logs = torch.ones(2, 1, 5, 8, 128, dtype=torch.bfloat16, device=device)
    planes = cache[..., :128], cache[..., 128:]
    ops.write_kv_logged(key, value, *planes, slots, scale, scale, "auto", log_rows, logs[0, 0], logs[1, 0])
    assert torch.equal(cache.view(-1, 8, 256)[slots], torch.cat([key, value], dim=2))
    assert not logs.any()
    for plane, log in zip(planes, logs, strict=True):
        ops.restore_slots([plane], log, slots, torch.ones(5, dtype=torch.bool, device=device))
    assert not cache.any()


def test_too_many_slots_are_refused(device):
    """Slot numbers are divided in 31 bits."""
    cache = torch.zeros(1, dtype=torch.uint8, device=device).expand(2**31, 1, 1, 1)
    slots, log_rows = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    log = torch.zeros(1, 1, 1, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=r"^log_slots: a cache must have fewer than 2\^31 slots"):
        ops.log_slots(cache, slots, log_rows, log)


def test_another_stream(device):
    """The ops follow torch's current stream."""
    arguments = logged_arguments(dtype=torch.bfloat16)
    ours, theirs = twin(arguments, device), twin(arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        ours[0].add_(1)  # only after the sleep does the key hold what must be written
        ops.write_kv_logged(*ours)
    stream.synchronize()
    theirs[0].add_(1)
    oracle.write_kv_logged(*theirs)
    assert same_memory(ours[2:], theirs[2:])


# ---------------------------------------------------------------- bad indices: skipped, nothing else touched


@pytest.mark.parametrize("slot", [12, 13, 2**31, 2**40, 2**62])
@pytest.mark.parametrize("op", UNDO)
def test_slot_outside_the_cache_is_skipped(same_as_oracle, op, slot):
    if op.startswith("restore_slots"):
        caches = make_pages("packed", SMALL, torch.float32).key_caches
        arguments = (caches, layer_log(caches, 3), int64(5, slot, 0), flags(1, 1, 1))
        if op == "restore_slots_from_rejected":
            counts = int32(1, 2), int32(1, 3)
            arguments = (*arguments[:3], *counts, flags(0, 0, 0), int32(7, 7), int64(0, 0, 0, 0, 0))
        without = with_arguments(op, arguments, row_slots=int64(5, -1, 0))
    else:
        arguments = sample_inputs(op)[0]
        arguments = with_arguments(op, arguments, slot_mapping=int64(5, slot, 0))
        if op != "write_kv":
            arguments = with_arguments(op, arguments, log_rows=int32(0, 1, 2))
        without = with_arguments(op, arguments, slot_mapping=int64(5, -1, 0))
    same_as_oracle(op, arguments, without)


@pytest.mark.parametrize("row", [4, 5, 2**31 - 1])
@pytest.mark.parametrize("op", ["write_kv_logged", "log_slots"])
def test_log_row_outside_the_log(same_as_oracle, op, row):
    """The token is written all the same: attention needs it."""
    arguments = with_arguments(op, sample_inputs(op)[0], slot_mapping=int64(5, 7, 0), log_rows=int32(0, row, 2))
    same_as_oracle(op, arguments, with_arguments(op, arguments, log_rows=int32(0, -1, 2)))


@pytest.mark.parametrize("offset", [-1, 2**30])
@pytest.mark.parametrize("op", ["log_slots", "restore_slots"])
def test_page_offset_outside_the_storage(device, op, offset):
    """Such an element is neither read nor written; the others are."""
    arguments = sample_inputs(op)[3]
    table = arguments[4].clone()
    table[1, 2] = offset  # slots 17 (logged) and 1 (restored) use it
    ours = twin(with_arguments(op, arguments, page_offsets=table), device)
    theirs = twin(arguments)
    original = memory(arguments)
    getattr(ops, op)(*ours)
    getattr(oracle, op)(*theirs)
    for mine, wanted, before in zip(memory(ours[:4]), memory(theirs[:4]), original, strict=False):
        differs = (mine != wanted).nonzero()
        assert len(differs) <= 2 * 2 * 2  # bytes of one element of each head
        assert torch.equal(mine[differs], before[differs])


# ---------------------------------------------------------------- log_slots, restore_slots


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", ELEMENT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "padded", "one_backing", "vec"])
def test_log_and_restore_of_every_element_size(same_as_oracle, layout, dtype, offset):
    shape = Shape(3, 6, 2, 16, 8, layers=5)
    for caches in make_pages(layout, shape, dtype, offset)[:2]:
        log = layer_log(caches, 4)
        same_as_oracle("log_slots", (caches[2], int64(17, 0, -1, 9), int32(3, 0, 1, -1), log[2]))
        same_as_oracle("restore_slots", (caches, log, int64(17, 0, -1, 9), flags(1, 0, 1, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float32], ids=str)
def test_pages_whose_order_only_a_table_can_say(same_as_oracle, dtype):
    pages = make_amx_pages(Shape(3, 32, 2, 16, 16, layers=3), dtype)
    for caches, table in ((pages.key_caches, pages.key_offsets), (pages.value_caches, pages.value_offsets)):
        log = layer_log(caches, 4)
        same_as_oracle("log_slots", (caches[1], int64(95, 0, -1, 33), int32(3, 0, 1, 2), log[1], table))
        same_as_oracle("restore_slots", (caches, log, int64(95, 0, -1, 33), flags(1, 1, 1, 1), table))


REJECTED = {
    "none": lambda rows: [0] * rows,
    "all": lambda rows: [1] * rows,
    "suffix": lambda rows: [0] * (rows // 2) + [1] * (rows - rows // 2),
    "prefix": lambda rows: [1] * (rows // 2) + [0] * (rows - rows // 2),
    "sparse": lambda rows: [int(row % 3 == 1) for row in range(rows)],
}


@pytest.mark.parametrize("rejected", REJECTED)
@pytest.mark.parametrize("rows", [0, 1, 11, 40])
def test_restore_of_any_pattern(same_as_oracle, rows, rejected):
    shape = Shape(5, 16, 2, 64, 64, layers=3)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(rows))[:rows].tolist()
    slots = [slot if row % 5 else -1 for row, slot in enumerate(slots)]
    for layout in ("packed", "one_backing"):
        caches = make_pages(layout, shape, torch.bfloat16).value_caches
        same_as_oracle(
            "restore_slots",
            (caches, layer_log(caches, rows), int64(*slots), flags(*REJECTED[rejected](rows))),
        )


@pytest.mark.parametrize("layers", [1, 4, 5, 384, 385, 770])
def test_restore_of_many_layers(same_as_oracle, layers):
    """Addresses of 384 layers fit in one launch; more layers take more launches."""
    caches = make_pages("packed", Shape(2, 2, 1, 8, 8, layers=layers), torch.bfloat16).key_caches
    log = layer_log(caches, 3)
    same_as_oracle("restore_slots", (caches, log, int64(3, 0, 1), flags(1, 0, 1)))
    windows = torch.randint(6, 8, (layers, 3), generator=torch.Generator().manual_seed(layers))
    arguments = (caches, log, int64(3, 0, 1), flags(1, 1, 1), None, int64(7))
    for num_rows in (None, 0, 2):
        same_as_oracle("restore_slots", (*arguments, windows, num_rows))


@pytest.mark.parametrize(
    ("layers", "requests", "most_drafts"),
    [(1, 0, 0), (1, 1, 4), (4, 16, 4), (5, 64, 4), (2, 300, 7), (385, 3, 2), (3, 5, 200)],
)
@pytest.mark.parametrize("shape", ["one head", "wide", "odd"])
def test_judge_and_restore_in_one_launch(same_as_oracle, shape, layers, requests, most_drafts):
    """Random drafts and counts, negative ones and more than there are drafts among them; rows of other windows."""
    sizes = {"one head": (1, 16, 16), "wide": (16, 128, 128), "odd": (3, 7, 9)}[shape]
    random = torch.Generator().manual_seed(requests)
    drafts = torch.randint(0, most_drafts + 1, (requests,), generator=random)
    counts = torch.randint(-1, most_drafts + 2, (requests,), generator=random).int()
    used, bonus = int(drafts.sum()), requests % 2
    cu = (drafts.cumsum(0) + bonus * torch.arange(1, requests + 1)).int()
    rows = used + 5
    caches = make_pages("packed", Shape(rows // 8 + 2, 8, *sizes, layers=layers), torch.bfloat16).key_caches
    slots = torch.full((rows,), -1)
    slots[:used] = torch.randperm(8 * len(caches[0]), generator=random)[:used]
    windows = torch.randint(6, 8, (layers, rows), generator=random)
    for num_rows in (None, used):
        outputs = flags(*[1] * rows), int32(*[77] * (requests + 2)), int64(10, 20, 30, 40, 50)
        same_as_oracle(
            "restore_slots_from_rejected",
            (
                caches, layer_log(caches, rows), slots, counts, cu, *outputs, bonus, None, int64(7), windows,
                num_rows,
            ),
        )  # fmt: skip


@pytest.mark.parametrize("op", ["write_kv_logged", "log_slots"])
def test_rows_are_marked_with_their_window(same_as_oracle, op):
    window_id, row_windows = int64(2**40 + 3), int64(1, 2, 3, 4)
    arguments = sample_inputs(op)[0]
    options = (None, window_id, row_windows) if op == "log_slots" else (window_id, row_windows)
    ours = same_as_oracle(op, (*arguments[:11], *options))
    logged = {row for row, slot in zip(LOG_ROWS, SLOTS, strict=True) if row >= 0 and slot >= 0}
    assert ours[-1].tolist() == [2**40 + 3 if row in logged else row + 1 for row in range(4)]


# ---------------------------------------------------------------- a whole transaction

REQUESTS, MOST_DRAFTS, PADDING = 4, 4, 3


class Transaction:
    """One verify step of a small model in buffers that never move, and a model of what it leaves behind.

    `load` puts a random step into the buffers; `run` is the transaction; `expect` is the audit: the cache
    of a run that never saw the rejected drafts, kept by plain indexing on the CPU.
    """

    shape = Shape(blocks=6, block_size=16, heads=4, key_width=64, value_width=32, layers=4)

    def __init__(self, device, layout, kv_cache_dtype, seed=0, judges_by_counts=False):
        self.judges_by_counts = judges_by_counts
        self.random = torch.Generator().manual_seed(seed)
        self.kv_cache_dtype = kv_cache_dtype
        dtype = torch.bfloat16 if kv_cache_dtype == "auto" else torch.uint8
        self.model = make_pages(layout, self.shape, dtype, offset=1)
        self.pages = twin(self.model, device)
        tokens, rows = REQUESTS * (1 + MOST_DRAFTS) + PADDING, REQUESTS * MOST_DRAFTS
        s = self.shape
        sizes = {
            "query_start_loc": (REQUESTS + 1,), "cu": (REQUESTS,), "log_rows": (tokens,),
            "row_requests": (rows,), "row_positions": (rows,), "num_accepted": (REQUESTS,),
            "num_rejected": (REQUESTS,),
        }  # fmt: skip
        self.int32 = {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
        self.slots = torch.full((tokens,), -1, device=device)
        self.drafts = torch.zeros(rows, dtype=torch.int32, device=device)
        self.sampled = torch.full((REQUESTS, MOST_DRAFTS + 1), -1, device=device)
        self.row_slots = torch.zeros(1, rows, dtype=torch.int64, device=device)
        self.rejected = torch.zeros(rows, dtype=torch.bool, device=device)
        self.counters = torch.zeros(len(nwor_ops.COUNTERS), dtype=torch.int64, device=device)
        self.window_id = torch.zeros(1, dtype=torch.int64, device=device)
        self.windows = torch.zeros(s.layers, rows, dtype=torch.int64, device=device)
        self.scale = torch.full((1,), 0.5, device=device)
        self.sources = [
            torch.zeros(s.layers, tokens, s.heads, width, dtype=torch.bfloat16, device=device)
            for width in (s.key_width, s.value_width)
        ]
        self.logs = [
            torch.zeros(s.layers, rows, s.heads, width, dtype=dtype, device=device)
            for width in (s.key_width, s.value_width)
        ]
        self.expected_counters = [0] * len(nwor_ops.COUNTERS)

    def run(self):
        i = self.int32
        ops.plan_window(
            i["query_start_loc"], i["cu"], [self.slots], i["log_rows"], self.row_slots, i["row_requests"],
            i["row_positions"], self.counters,
        )  # fmt: skip
        for layer in range(self.shape.layers):
            ops.write_kv_logged(
                self.sources[0][layer], self.sources[1][layer], self.pages.key_caches[layer],
                self.pages.value_caches[layer], self.slots, self.scale, self.scale, self.kv_cache_dtype,
                i["log_rows"], self.logs[0][layer], self.logs[1][layer], self.window_id, self.windows[layer],
            )  # fmt: skip
        planes = list(zip(self.pages[:2], self.logs, strict=True))
        windows = None, self.window_id, self.windows
        outputs = self.rejected, i["num_accepted"], self.counters
        if self.judges_by_counts:
            caches, log = planes.pop(0)
            ops.restore_slots_from_rejected(
                caches, log, self.row_slots[0], i["num_rejected"], i["cu"], *outputs, 0, *windows
            )
        else:
            ops.reject_rows(self.drafts, self.sampled, i["cu"], *outputs)
        for caches, log in planes:
            ops.restore_slots(caches, log, self.row_slots[0], self.rejected, *windows)

    def draw(self, low, high, *size):
        return torch.randint(low, high + 1, size, generator=self.random)

    def load(self):
        """A step of random requests, drafts, slots, rows and outcome; the model gets the rows that stay."""
        drafts = self.draw(0, MOST_DRAFTS, REQUESTS)
        accepted = torch.minimum(self.draw(0, MOST_DRAFTS, REQUESTS), drafts)
        lengths = drafts + 1  # the target token and its drafts
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        slots = torch.full((len(self.slots),), -1)
        used = int(starts[-1])
        slots[:used] = torch.randperm(self.shape.blocks * self.shape.block_size, generator=self.random)[:used]
        slots[self.draw(0, used - 1, 1)] = -1
        ids = self.draw(0, 2**20, len(self.drafts))
        sampled, stays, before = torch.full(self.sampled.shape, -1), slots >= 0, 0
        for q, (n, a) in enumerate(zip(drafts.tolist(), accepted.tolist(), strict=True)):
            sampled[q, :a] = ids[before : before + a]
            sampled[q, a] = ids[before + a] + 1 if a < n else 5
            if a < n and self.draw(0, 1, 1):  # a replacement that equals the draft is told by what follows
                sampled[q, a] = ids[before + a]
            before += n
            stays[starts[q + 1] - (n - a) : starts[q + 1]] = False
        sources = [torch.randn(s.shape, generator=self.random).bfloat16() for s in self.sources]
        for buffer, content in [
            (self.int32["query_start_loc"], starts), (self.int32["cu"], drafts.cumsum(0)),
            (self.int32["num_rejected"], drafts - accepted),
            (self.slots, slots), (self.drafts, ids), (self.sampled, sampled),
            *zip(self.sources, sources, strict=True),
        ]:  # fmt: skip
            buffer.copy_(content)
        self.window_id.add_(1)
        self.expect(slots, stays, sources)
        counts = (1, int(drafts.sum()), int(accepted.sum()), int((drafts - accepted).sum()), 0)
        self.expected_counters = [old + new for old, new in zip(self.expected_counters, counts, strict=True)]

    def expect(self, slots, stays, sources):
        kept = slots[stays]
        blocks, offsets = kept // self.shape.block_size, kept % self.shape.block_size
        for caches, source in zip(self.model[:2], sources, strict=True):
            for layer, cache in enumerate(caches):
                rows = source[layer][stays]
                if self.kv_cache_dtype == "auto":
                    oracle.raw(cache)[blocks, offsets] = oracle.raw(rows)
                else:
                    cache[blocks, offsets] = oracle.to_fp8(rows.float() / 0.5, self.kv_cache_dtype)

    def audit(self):
        assert same_memory(self.model[:2], self.pages[:2])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("layout", ["hnd", "packed", "one_backing", "padded", "vec"])
@pytest.mark.parametrize("judges_by_counts", [False, True])
def test_transaction(device, layout, kv_cache_dtype, judges_by_counts):
    transaction = Transaction(device, layout, kv_cache_dtype, judges_by_counts=judges_by_counts)
    for _ in range(20):
        transaction.load()
        transaction.run()
        transaction.audit()
    assert transaction.counters.tolist() == transaction.expected_counters


@pytest.mark.parametrize("judges_by_counts", [False, True])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e5m2"])
def test_transaction_in_a_cuda_graph(device, kv_cache_dtype, judges_by_counts):
    """Captured once; every replay has new requests, slots, rows and acceptance."""
    transaction = Transaction(device, "one_backing", kv_cache_dtype, seed=1, judges_by_counts=judges_by_counts)
    transaction.load()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        transaction.run()
    torch.cuda.current_stream().wait_stream(stream)
    transaction.audit()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transaction.run()
    transaction.audit()  # capturing runs nothing
    for _ in range(300):
        transaction.load()
        graph.replay()
        transaction.audit()
    assert transaction.counters.tolist() == transaction.expected_counters


def test_transaction_allocates_nothing_and_waits_for_nothing(device):
    transaction = Transaction(device, "packed", "auto")
    transaction.load()
    transaction.run()
    transaction.load()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        transaction.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    transaction.audit()


def test_cancel_puts_every_draft_row_back(device):
    """All rows rejected: after the restore only prompt and target tokens are new."""
    transaction = Transaction(device, "packed", "auto")
    transaction.load()
    i = transaction.int32
    transaction.sampled[:, 1:] = -1  # whatever was drafted, the sampler stopped before
    transaction.sampled[:, 0] = -2
    before = twin(transaction.pages)
    transaction.run()
    assert not i["num_accepted"].any()
    is_draft = i["log_rows"] >= 0
    slots = torch.where(is_draft, -1, transaction.slots)
    for layer in range(transaction.shape.layers):
        ops.write_kv(
            transaction.sources[0][layer], transaction.sources[1][layer], before.key_caches[layer],
            before.value_caches[layer], slots, transaction.scale, transaction.scale, "auto",
        )  # fmt: skip
    assert same_memory(before[:2], transaction.pages[:2])


# ---------------------------------------------------------------- debug mode


DEBUG_MODE = """
import sys, pytest, torch
from samples import flags, int32, int64, plan_arguments, sample_inputs, twin, with_arguments
from nwor_ops import ops

def refuse(op, error, sentence, sample=0, **replaced):
    good = twin(sample_inputs(op)[sample], "cuda")
    bad = twin(with_arguments(op, sample_inputs(op)[sample], **replaced), "cuda")
    with pytest.raises(error, match=sentence):
        getattr(ops, op)(*bad)
    getattr(ops, op)(*good)  # the report is gone

for op in ("write_kv", "write_kv_logged", "log_slots"):
    refuse(op, IndexError, rf"^{op}: slot_mapping\\[2\\] must be below 12 .*, got 99$",
           slot_mapping=int64(5, 0, 99))
refuse("restore_slots", IndexError, r"^restore_slots: row_slots\\[1\\] must be below 12 .*, got 12$",
       row_slots=int64(5, 12, 0, 11))
refuse("restore_slots_from_rejected", IndexError, r"must be below 12 .*, got 12$", row_slots=int64(12, 5, 0, 11))
refuse("restore_slots_from_rejected", ValueError, "must not decrease, got 0 at request 1 after 1",
       cu_num_draft_tokens=int32(1, 0, 4))
for op in ("write_kv_logged", "log_slots"):
    refuse(op, IndexError, rf"^{op}: log_rows\\[1\\] must be below the 4 rows of the log, got 4$",
           slot_mapping=int64(5, 0, 7), log_rows=int32(0, 4, 2))
table = sample_inputs("log_slots")[3][4].clone()
table[1, 2] = 2**30
for op in ("log_slots", "restore_slots"):
    refuse(op, IndexError, "page_offsets must lie within the storage", sample=3, page_offsets=table)

with pytest.raises(ValueError, match="row_slots must have a row for each draft, got 5 rows for 6 drafts"):
    ops.plan_window(*twin(plan_arguments(rows=5), "cuda"))
refuse("plan_window", ValueError, "must not decrease, got 2 at request 1 after 3",
       cu_num_draft_tokens=int32(3, 2, 6, 6))
refuse("acceptance_mask", ValueError, "must not exceed the 6 entries of draft_token_ids, got 7",
       draft_token_ids=int64(*range(6)))

# A captured stream is never waited for; the next eager call tells what a replay met.
arguments = with_arguments("write_kv", sample_inputs("write_kv")[0], slot_mapping=int64(5, 0, 99))
arguments = twin(arguments, "cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    ops.write_kv(*arguments)
ops.log_slots(*twin(sample_inputs("log_slots")[0], "cuda"))
graph.replay()
with pytest.raises(IndexError, match="^write_kv: slot_mapping"):
    ops.log_slots(*twin(sample_inputs("log_slots")[0], "cuda"))
print("reported")
"""


def run_python(code, **environment):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": path, **environment}, check=False,
    )  # fmt: skip


def test_debug_mode_raises():
    done = run_python(DEBUG_MODE, VLLM_NWOR_DEBUG_SYNC="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "reported"


# ---------------------------------------------------------------- torch's view of the ops


@pytest.mark.parametrize("op", UNDO)
def test_opcheck(device, op):
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for arguments in sample_inputs(op, device):
        # Its comparison of tensors is not implemented for 8-bit floats.
        eight_bits = any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e5m2 for a in arguments)
        utils = utilities[1:] if eight_bits else utilities
        torch.library.opcheck(getattr(torch.ops.nwor, op).default, arguments, test_utils=utils)


def test_compiled_whole(device):
    """fullgraph: no graph break at an op, and nothing of the mutation is lost."""

    def step(write, restore):
        key, value, *rest = write
        ops.write_kv_logged(key * 2, value + 1, *rest)
        ops.restore_slots(*restore)

    write = logged_arguments(dtype=torch.bfloat16)
    write = with_arguments("write_kv_logged", write, key=numbers(8, 4, 8).bfloat16(), value=numbers(8, 4, 8).bfloat16())
    restore = [[write[2]], write[9][None], int64(0, 11, 5, -1), flags(1, 0, 0, 1)]
    eager, compiled = twin((write, restore), device), twin((write, restore), device)
    step(*eager)
    with torch.no_grad():
        torch.compile(step, fullgraph=True)(*compiled)
    assert same_memory(eager, compiled)


@pytest.mark.parametrize("op", UNDO)
def test_a_tensor_left_on_the_cpu_is_refused(device, op):
    arguments = twin(sample_inputs(op)[0], device)
    names = [a.name for a in getattr(torch.ops.nwor, op).default._schema.arguments]
    for place, (name, argument) in enumerate(zip(names, arguments, strict=False)):
        # A scale is not looked at where bytes are copied.
        if isinstance(argument, torch.Tensor) and "scale" not in name:
            mixed = (*arguments[:place], argument.cpu(), *arguments[place + 1 :])
            with pytest.raises(TypeError, match=f"^{op}: .* must be on device "):
                getattr(ops, op)(*mixed)
