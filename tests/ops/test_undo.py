"""Test the family undo beyond its random windows: by hand, every number in fp8, adjacent rows, and large calls."""

from __future__ import annotations

import bad_input
import oracle_checks
import pytest
import torch
from oracle_checks import random_log
from tensors import numbers

from nwor_ops import ops
from nwor_ops.testing import layouts
from nwor_ops.testing.layouts import Shape
from nwor_ops.testing.oracle import undo as oracle


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


WRITERS = ("write_kv", "write_kv_logged", "log_slots", "restore_slots", "stage_kv", "commit_staged", "move_slots")


@pytest.mark.parametrize("op", WRITERS)
def test_padded_rows_write_nothing(device, op):
    """Of 128 rows, 64 are tokens. The others have slot -1, which is the last slot to an index of Python.

    On CUDA the call runs eagerly and then in a graph.
    """
    shapes = [(8, 16)] * 2 + [(128,)] * 4
    planes = [numbers(*shape, 2, 8, seed=seed).to(device) for seed, shape in enumerate(shapes)]
    caches, rows, logs = planes[:2], planes[2:4], planes[4:]
    slots, every = torch.tensor([*range(64), *[-1] * 64], device=device), torch.ones(128, device=device).bool()
    scales, next_slots = [torch.ones(1, device=device)] * 2, torch.where(slots < 0, -1, (slots + 1) % 64)
    arguments = {
        "write_kv": (*rows, *caches, slots, *scales, "auto"),
        "write_kv_logged": (*rows, *caches, slots, *scales, "auto", slots.int(), *logs),
        "log_slots": (caches[0], slots, torch.arange(128, device=device).int(), logs[0]),
        "restore_slots": (caches, torch.stack(logs), slots, every),
        "stage_kv": (*rows, slots.int(), *logs),
        "commit_staged": (*rows, slots, every, *caches, *scales, "auto"),
        "move_slots": (caches, next_slots, slots),
    }[op]
    before = [plane.clone() for plane in planes]
    getattr(ops, op)(*arguments)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            getattr(ops, op)(*arguments)
        graph.replay()
    changed = [(a != b).view(128, -1).nonzero()[:, 0].unique().tolist() for a, b in zip(planes, before, strict=True)]
    assert [*range(64)] in changed
    assert all(written in ([], [*range(64)]) for written in changed)


def planes(shape):
    return [caches[0] for caches in layouts.make_pages("nhd", shape, torch.uint8)[:2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_of_every_16_bit_number(device, kv_cache_dtype, dtype):
    """All 65536 bit patterns: ties, subnormals, saturation, infinities, NaNs, both zeros."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 4, 256)
    shape = Shape(8, 8, 4, 256, 256)
    for scale in (1.0, 0.37):
        scales = torch.tensor([scale]), torch.tensor([-scale])
        arguments = (every, every, *planes(shape), torch.arange(64), *scales, kv_cache_dtype)
        oracle_checks.assert_same_as_oracle("write_kv", arguments, device)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_divides_by_the_scale(device, kv_cache_dtype):
    """On and next to every tie between two codes. A product with the reciprocal of 49 rounds differently."""
    values = oracle.fp8_values(kv_cache_dtype)
    ties = ((values[1:] + values[:-1]) / 2 * 49).float()
    beside = [torch.nextafter(ties, torch.full_like(ties, limit)) for limit in (0.0, float("inf"))]
    source = torch.cat([ties, *beside, -ties]).repeat(2)[: 64 * 8].view(8, 8, 8)
    scales = torch.tensor([49.0]), torch.tensor([-49.0])
    arguments = (source, source, *planes(Shape(2, 4, 8, 8, 8)), torch.arange(8), *scales, kv_cache_dtype)
    oracle_checks.assert_same_as_oracle("write_kv", arguments, device)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)]
)
def test_oracle_quantizes_as_torch(kv_cache_dtype, dtype):
    """Compared where the cast of torch has the same meaning: finite numbers that do not saturate."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    fits = every[every.isfinite() & (every.abs() <= torch.finfo(dtype).max)]
    assert torch.equal(oracle.to_fp8(fits, kv_cache_dtype), fits.to(dtype).view(torch.uint8))
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e30])
    largest = 0x7E if dtype == torch.float8_e4m3fn else 0x7B
    assert oracle.to_fp8(special, kv_cache_dtype).tolist() == [0x7F, largest, 0x80 | largest, 0x80, largest]


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


@pytest.mark.parametrize("layers", [1, 4, 5, 384, 385, 770])
def test_restore_of_many_layers(device, layers):
    """On CUDA the addresses of 384 layers fit in one launch. More layers take more launches."""
    caches = layouts.make_pages("packed", Shape(2, 2, 1, 8, 8, layers=layers), torch.bfloat16).key_caches
    log, slots = random_log(caches, 3), torch.tensor([3, 0, 1])
    oracle_checks.assert_same_as_oracle(
        "restore_slots", (caches, log, slots, torch.tensor([True, False, True])), device
    )
    windows = torch.randint(6, 8, (layers, 3), generator=torch.Generator().manual_seed(layers))
    arguments = (caches, log, slots, torch.ones(3, dtype=torch.bool), None, torch.tensor([7]))
    for num_rows in (None, 0, 2):
        oracle_checks.assert_same_as_oracle("restore_slots", (*arguments, windows, num_rows), device)


def with_page_offset(op, offset):
    """Two calls with page tables. The second has another offset: a number, or a function of the space in the last page.

    Slots 17 (logged), 1 and 17 (restored) use it.
    """
    pages = layouts.make_amx_pages(Shape(2, 16, 2, 16, 16), torch.bfloat16)
    cache, table = pages.value_caches[0], pages.value_offsets.clone()
    rejected, starts = torch.ones(3, dtype=torch.bool), torch.tensor([0, 3]).int()
    outputs = (torch.zeros(3, dtype=torch.bool), torch.zeros(1).int(), torch.zeros(len(ops.COUNTERS)).long())
    log, slots = random_log([cache], 3), torch.tensor([1, 17, 31])
    arguments = {
        "log_slots": (cache, slots, torch.tensor([0, 2, 1]).int(), log[0]),
        "restore_slots": ([cache], log, slots, rejected),
        "restore_slots_from_rejected": ([cache], log, slots, torch.tensor([3]).int(), starts, *outputs),
    }[op]
    room = cache.untyped_storage().nbytes() // 2 - cache.storage_offset() - cache.stride(0) - cache.stride(2)
    wrong = table.clone()
    wrong[1, 2] = offset(room) if callable(offset) else offset
    return (*arguments, table), (*arguments, wrong)


WITH_OFFSETS = ("log_slots", "restore_slots", "restore_slots_from_rejected")


@pytest.mark.debug_mode
@pytest.mark.parametrize("offset", [-1, -(2**31), 2**30, 2**31 - 1])
@pytest.mark.parametrize("op", WITH_OFFSETS)
def test_page_offset_outside_the_storage(device, op, offset):
    """CUDA skips such an element, and no other."""
    plain, wrong = with_page_offset(op, offset)
    left = bad_input.check_bad_data(op, wrong, IndexError, "page_offsets must lie within the storage", device)
    if left is not None:
        expected = bad_input.left_by_the_oracle(op, plain)
        for mine, wanted, before in zip(*(layouts.memory(call[:4]) for call in (left, expected, plain)), strict=True):
            differs = (mine != wanted).nonzero()
            assert len(differs) <= 2 * 2 * 2  # bytes of one element of each head
            assert torch.equal(mine[differs], before[differs])


@pytest.mark.parametrize("op", WITH_OFFSETS)
def test_page_offsets_at_the_end(device, op):
    """The last offset inside the storage is used. The CPU refuses the next, as it checks the table for all pages."""
    oracle_checks.assert_same_as_oracle(op, with_page_offset(op, lambda room: room - 1)[1], device)
    wrong = with_page_offset(op, lambda room: room)[1]
    oracle_checks.refuse(op, wrong, IndexError, "page_offsets must lie within the storage")


@pytest.mark.parametrize("name", ["slot_mapping", "log_rows"])
def test_log_in_the_indices_of_its_tokens(name):
    """Without the check, log_slots would follow slots and rows that it has just overwritten."""
    cache, log = torch.full((4, 16, 2, 64), 2**62), torch.zeros(64, 2, 64, dtype=torch.int64)
    indices = {"slot_mapping": torch.arange(64), "log_rows": torch.arange(64, dtype=torch.int32)}
    indices[name] = log.view(-1).view(indices[name].dtype)[:64].copy_(indices[name])
    sentence = f"log and {name} must not share memory$"
    oracle_checks.refuse("log_slots", (cache, *indices.values(), log), ValueError, sentence)


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
    slots, rows = torch.tensor([*runs[0]]), torch.tensor([*runs[1]], dtype=torch.int32)
    (key_cache, key_log), (value_cache, value_log) = slot_adjacent(), slot_adjacent()
    value_cache += 1000
    key, value = torch.randn(2, 10, 2, 8)
    one, window, marks = torch.ones(1), torch.tensor([7]), torch.zeros(10, dtype=torch.int64)
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
        arguments = (list(caches), log, torch.tensor([*runs[0]]), flags, None, torch.tensor([7]), marks, num_rows)
        oracle_checks.assert_same_as_oracle("restore_slots", arguments, device)
