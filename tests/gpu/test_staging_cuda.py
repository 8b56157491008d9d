"""Family stage on a GPU: every path of the kernels against the oracle, on all memory around; CUDA graphs with changed
data, no allocation and no sync, debug mode, opcheck and torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys

import oracle
import pytest
import torch
from layouts import LAYOUTS, Shape, make_amx_pages, make_pages, random_bytes, same_memory, surrounded, twin
from samples import SMALL, WIDE_VALUES, flags, int32, int64, numbers, sample_inputs, with_arguments
from samples_staging import (
    accept_staged_arguments,
    commit_arguments,
    commit_lengths,
    held_window,
    move_arguments,
    opened,
    stage_arguments,
)
from staged_windows import WINDOW_SHAPE, Sequence, assert_keeps_the_promise, make_window, run_as_the_oracle_does
from torch import Tensor

from nwor_ops import ops
from nwor_ops.ops import registry, staging

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ELEMENT_DTYPES = (torch.uint8, torch.float8_e5m2, torch.int16, torch.bfloat16, torch.float32, torch.int64)
FP8_CACHES = (("fp8", torch.uint8), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2))
SHAPES = {
    "d64": Shape(3, 16, 2, 64, 64, layers=2),
    "d80": Shape(3, 16, 4, 80, 80, layers=2),
    "d128": Shape(3, 16, 8, 128, 128, layers=2),
    "d192_v128": Shape(2, 16, 3, 192, 128, layers=2),
    "odd": Shape(3, 5, 3, 7, 9, layers=3),
    "mla_latent": Shape(2, 16, 1, 576, 64, layers=2),
    "one_element": Shape(13, 1, 1, 1, 1, layers=2),
    "more_units_than_a_block": Shape(3, 4, 40, 256, 128),
}
STAGE = (*registry.family("shadow"), *registry.family("staging"))


@pytest.mark.parametrize("op", STAGE)
def test_samples(same_as_oracle, op):
    for arguments in sample_inputs(op):
        same_as_oracle(op, arguments)


# ---------------------------------------------------------------- the staging buffer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_stage(same_as_oracle, shape, dtype):
    same_as_oracle("stage_kv", stage_arguments(shape, dtype))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).tolist()
    same_as_oracle("stage_kv", stage_arguments(shape, dtype, tuple(order[:200]), rows=300, marks=False))


@pytest.mark.parametrize("moved", ["key", "value", "staged_key", "staged_value"])
@pytest.mark.parametrize("offset", range(9))
def test_stage_misaligned(same_as_oracle, moved, offset):
    """One of the four at every element of a 16-byte word, the others aligned."""
    shape = Shape(1, 1, 2, 16, 32)
    arguments = stage_arguments(shape, torch.bfloat16)
    replaced = {}
    for place, name in {0: "key", 1: "value", 3: "staged_key", 4: "staged_value"}.items():
        tensor, shift = arguments[place], 16 + (offset if name == moved else 0)
        around = random_bytes(tensor.numel() + 40, tensor.dtype, seed=place)
        replaced[name] = around[shift : shift + tensor.numel()].view(tensor.shape)
    same_as_oracle("stage_kv", with_arguments("stage_kv", arguments, **replaced))


def test_stage_of_any_strides(same_as_oracle):
    key, value, rows, staged_key, _, *marks = stage_arguments(dtype=torch.bfloat16)
    qkv = numbers(8, 3, 4, 8, dtype=torch.bfloat16)
    by_head = numbers(4, 8, 8, dtype=torch.bfloat16, seed=1).transpose(0, 1)
    spaced = numbers(8, 4, 16, dtype=torch.bfloat16, seed=2)[..., ::2]
    packed = random_bytes(4 * 4 * 32, torch.bfloat16).view(4, 4, 32)
    for k, v in ((qkv[:, 1], qkv[:, 2]), (by_head, spaced), (spaced, by_head), (key, value)):
        same_as_oracle("stage_kv", (k, v, rows, packed[..., :8], packed[..., 8:24:2], *marks))
        same_as_oracle("stage_kv", (k, v, rows, staged_key, packed[..., 8:16], *marks))


@pytest.mark.parametrize("row", [4, 2**31 - 1])
def test_a_stage_row_outside_the_buffer_is_skipped(device, row):
    arguments = with_arguments("stage_kv", stage_arguments(), stage_rows=int32(0, row, 2))
    ours = twin(arguments, device)
    theirs = twin(with_arguments("stage_kv", arguments, stage_rows=int32(0, -1, 2)))
    ops.stage_kv(*ours)
    oracle.stage_kv(*theirs)
    assert all(same_memory([a], [b]) for a, b in zip(ours[3:], theirs[3:], strict=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_commit_in_every_layout(same_as_oracle, layout, shape):
    slots = (5, -1, 0, 11, 7, -1)
    arguments = commit_arguments(layout=layout, shape=shape, slots=slots, dtype=torch.bfloat16)
    same_as_oracle("commit_staged", arguments)
    same_as_oracle("commit_staged", commit_lengths(arguments))


@pytest.mark.parametrize("layout", ["nhd", "padded", "vec"])
@pytest.mark.parametrize("scales", ["one", "per_head", "per_row"])
@pytest.mark.parametrize(("kv_cache_dtype", "cache_dtype"), FP8_CACHES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_commit_to_fp8(same_as_oracle, dtype, kv_cache_dtype, cache_dtype, scales, layout):
    shape = {"one": (1,), "per_head": (WIDE_VALUES.heads,), "per_row": (8, 1)}[scales]
    options = {
        "layout": layout, "shape": WIDE_VALUES, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype,
        "cache_dtype": cache_dtype, "scales": (numbers(*shape, seed=4).abs(), numbers(*shape, seed=5).abs()),
        "slots": (5, 14, 0, 11, 7, 3),
    }  # fmt: skip
    same_as_oracle("commit_staged", commit_arguments(**options))


@pytest.mark.parametrize("lengths", [(0, 0, 0), (3, 1, 1), (1, 9, -4), (2,), ()])
def test_commit_by_lengths(same_as_oracle, lengths):
    same_as_oracle("commit_staged", commit_lengths(commit_arguments(slots=(5, 2, 0, 11, 7, 1)), lengths))


@pytest.mark.parametrize("slot", [12, 2**31, 2**62])
def test_commit_to_a_slot_outside_the_cache_is_skipped(same_as_oracle, slot):
    arguments = commit_arguments((1, 0, 1, 0, 0, 0), slots=(5, 99, slot, 0, 1, 2))
    without = with_arguments("commit_staged", arguments, row_slots=int64(5, 99, -1, 0, 1, 2))
    same_as_oracle("commit_staged", arguments, without)


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("missing", [None, "staged", "slot"])
def test_all_or_nothing(same_as_oracle, rows, missing):
    """One row that one layer lacks, or whose slot is not there, decides about all of them."""
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
    arguments = (surrounded(accepted), surrounded(slots), int64(7), surrounded(windows), 100,
                 surrounded(~accepted), counters)  # fmt: skip
    ours = same_as_oracle("accept_staged", arguments)
    assert bool(ours[5].any()) is (missing is None)


# ---------------------------------------------------------------- move_slots


@pytest.mark.parametrize("dtype", ELEMENT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_move_in_every_layout(same_as_oracle, layout, dtype):
    for shape in (SMALL, SHAPES["odd"], SHAPES["mla_latent"], SHAPES["more_units_than_a_block"]):
        for planes in make_pages(layout, shape, dtype)[:2]:
            same_as_oracle("move_slots", (planes, *move_arguments()[1:]))


@pytest.mark.parametrize("offset", range(9))
def test_move_in_misaligned_planes(same_as_oracle, offset):
    planes = make_pages("nhd", Shape(3, 4, 2, 16, 32, 3), torch.bfloat16, offset).key_caches
    same_as_oracle("move_slots", (planes, *move_arguments()[1:]))


@pytest.mark.parametrize("layers", [1, 383, 384, 385, 800])
def test_move_in_many_layers(same_as_oracle, layers):
    planes = make_pages("packed", Shape(2, 6, 1, 8, 8, layers), torch.bfloat16).value_caches
    same_as_oracle("move_slots", (planes, *move_arguments()[1:]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=str)
def test_move_in_pages_whose_order_only_a_table_can_say(same_as_oracle, dtype):
    pages = make_amx_pages(Shape(3, 32, 2, 16, 16, layers=2), dtype)
    for planes, table in ((pages.key_caches, pages.key_offsets), (pages.value_caches, pages.value_offsets)):
        same_as_oracle("move_slots", (planes, int64(95, 0, 33, -1, 17), int64(0, 95, 34, 1, 33), table))


@pytest.mark.parametrize("moves", [1, 2, 31, 32, 33, 512, 2048, 2049, 14_000, 15_000, 60_000])
def test_many_moves_happen_at_once(device, moves):
    """A random cycle through all slots that move: each is a source and a destination. From some number of moves on a
    block takes narrower columns, then more shared memory than it gets without asking, then narrower accesses."""
    shape = Shape(moves // 16 + 2, 16, 2, 64, 64, 2)
    planes = [torch.randint(-999, 999, (shape.blocks, 16, 2, 128), dtype=torch.int16, device=device) for _ in range(2)]
    order = torch.randperm(shape.blocks * 16, device=device)[:moves]
    before = [plane.flatten(0, 1).clone() for plane in planes]
    ops.move_slots(planes, order, order.roll(1))
    for plane, old in zip(planes, before, strict=True):
        old[order.roll(1)] = old[order]
        assert torch.equal(plane.flatten(0, 1), old)


def test_more_moves_than_fit(device):
    plane = torch.zeros(20_000, 16, 1, 1, dtype=torch.uint8, device=device)
    slots = torch.arange(300_000, device=device)
    with pytest.raises(ValueError, match=r"^move_slots: src_slots must hold at most \d+ moves .*, got 300000$"):
        ops.move_slots([plane], slots, slots)


@pytest.mark.parametrize("slot", [12, 2**31, 2**62])
@pytest.mark.parametrize("name", ["src_slots", "dst_slots"])
def test_a_move_outside_the_cache_is_left_out(device, name, slot):
    arguments = with_arguments("move_slots", move_arguments(), src_slots=int64(5, 3, 1), dst_slots=int64(1, 0, 5))
    bad = with_arguments("move_slots", arguments, **{name: int64(arguments[1][0], slot, arguments[1][2])})
    if name == "dst_slots":
        bad = with_arguments("move_slots", arguments, dst_slots=int64(1, slot, 5))
    ours, theirs = twin(bad, device), twin(with_arguments("move_slots", arguments, src_slots=int64(5, -1, 1)))
    ops.move_slots(*ours)
    oracle.move_slots(*theirs)
    assert same_memory(ours[0], theirs[0])


# ---------------------------------------------------------------- shadow pages


@pytest.mark.parametrize("dtype", ELEMENT_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_window_in_every_layout(device, layout, dtype):
    for shape in (WINDOW_SHAPE, Shape(60, 5, 3, 7, 7, 3), Shape(60, 16, 8, 64, 64, 5)):
        run_as_the_oracle_does(make_window(layout=layout, shape=shape, dtype=dtype), device)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_window_of_any_block_size_and_groups(device, block_size, groups):
    shape = Shape(70 if block_size > 4 else 300, block_size, 2, 8, 8, 5)
    options = {"groups": groups, "num_bonus_tokens": groups - 1, "idx_dtype": torch.int64}
    run_as_the_oracle_does(make_window(shape=shape, **options), device)


@pytest.mark.parametrize("amx", [False, True])
def test_window_with_page_offsets(device, amx):
    run_as_the_oracle_does(make_window(shape=Shape(60, 16, 2, 16, 16), layout="vec", amx=amx), device)


@pytest.mark.parametrize("offset", range(9))
def test_window_of_misaligned_planes(device, offset):
    run_as_the_oracle_does(make_window(shape=Shape(60, 4, 2, 16, 16, 2), offset=offset), device)


@pytest.mark.parametrize("layers", [1, 3, 4, 5, 161, 320, 321, 700])
@pytest.mark.parametrize("groups", [1, 2])
def test_window_of_many_planes(device, layers, groups):
    """Addresses of 320 planes fit in one launch; slots and tables are redirected once."""
    window = make_window(shape=Shape(60, 4, 1, 8, 8, layers), groups=groups)
    run_as_the_oracle_does(window, device)


def test_window_of_many_requests(device):
    """More requests than a block redirects, and more than rows of one page that are copied side by side."""
    sequences = tuple(Sequence(3 + q % 40, 1, q % 4 if q % 40 > 5 else 0, q % 3, state=q) for q in range(300))
    shape = Shape(8000, 4, 2, 8, 8, 2)
    run_as_the_oracle_does(make_window(sequences, shape=shape, num_states=300, held=True), device)


@pytest.mark.parametrize("sequences", [(), (Sequence(3, 3),), (Sequence(0, 0),), (Sequence(4, 0, 4, 2, state=0),)])
def test_small_windows(device, sequences):
    run_as_the_oracle_does(make_window(sequences), device)


def test_drafts_past_the_longest_sequence(device):
    sequences = (Sequence(12, 1, 4, 2, 0, without_slot=2), Sequence(9, 1, 3, 0, 1, without_slot=3))
    run_as_the_oracle_does(make_window(sequences), device)


def test_held_rows(device):
    run_as_the_oracle_does(held_window(), device)


@pytest.mark.parametrize("layout", ["packed", "packed_hnd", "one_backing"])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_promise(device, layout, groups):
    assert_keeps_the_promise(make_window(layout=layout, groups=groups).copy(device))


BAD = {
    "a state outside": {"idx_mapping": int32(2, 0, 6, 1, 5, -1)},
    "a drafting request that is padded": {"idx_mapping": int32(2, 0, -1, 1, 5, -1)},
    "another length": {"seq_lens": int32(14, 7, 12, 8, 10, 0)},
    "a length of nothing": {"seq_lens": int32(14, 7, 1, 8, 10, 0)},
}


@pytest.mark.parametrize("case", BAD)
def test_a_request_that_does_not_agree_is_left_alone(device, case):
    """The others are redirected all the same: what comes of it is what comes of request 2 without slots."""
    window = make_window()
    ours = window.copy(device)
    ops.open_window(*with_arguments("open_window", ours.open_arguments(), **twin(BAD[case], device)))
    row_slots = window.tensors["row_slots"].clone()
    row_slots[0, 3:7] = -1  # the drafts of request 2
    saved = window.groups[0].slot_mapping.clone()
    oracle.open_window(*with_arguments("open_window", window.open_arguments(), row_slots=row_slots))
    for one, other in zip(ours.planes, window.planes, strict=True):
        assert torch.equal(oracle.raw(one).cpu(), oracle.raw(other))
    assert torch.equal(ours.groups[0].block_table.cpu(), window.groups[0].block_table)
    assert torch.equal(ours.groups[0].slot_mapping.cpu(), window.groups[0].slot_mapping)
    assert torch.equal(ours.tensors["tail_pages"].cpu(), window.tensors["tail_pages"])
    assert not torch.equal(saved, window.groups[0].slot_mapping)


@pytest.mark.parametrize("case", ["shadow block -1", "shadow block 60", "one page", "two columns"])
def test_pages_that_are_not_there(device, case):
    """Nothing of a request without enough pages is redirected, and nothing outside the buffers is touched."""
    window = make_window(num_shadows=1) if case == "one page" else make_window()
    if case.startswith("shadow"):
        window.tensors["shadow_blocks"].fill_(int(case.split()[-1]))
    ours = window.copy(device)
    arguments = ours.open_arguments()
    if case == "two columns":
        arguments = with_arguments("open_window", arguments, block_tables=[ours.groups[0].block_table[:, :1]])
    ops.open_window(*arguments)
    if case == "one page":
        return  # some requests fit in one page: only that nothing faults is of interest
    assert same_memory(ours.planes, window.planes)
    assert same_memory(ours.groups[0].block_table, window.groups[0].block_table)
    assert same_memory(ours.groups[0].slot_mapping, window.groups[0].slot_mapping)


def test_drafts_past_the_window_are_left_alone(device):
    """Two drafts without a slot in row_slots, but with one in the slot mapping, whose page is past the table's row."""
    window = make_window((Sequence(10, 1, 4, 1, state=0), Sequence(3, 3, state=1)))
    window.tensors["row_slots"][0, 2:4] = -1
    ours = window.copy(device)
    narrow = [ours.groups[0].block_table[:, :2]]
    own = ours.groups[0].slot_mapping[3:5].clone()
    ops.open_window(*with_arguments("open_window", ours.open_arguments(), block_tables=narrow))
    window.groups[0].slot_mapping[3:5] = -1
    oracle.open_window(*window.open_arguments())
    assert torch.equal(ours.groups[0].slot_mapping[3:5], own)
    ours.groups[0].slot_mapping[3:5] = -1
    for memory in ("planes", "tensors", "groups"):
        assert same_memory(getattr(ours, memory), getattr(window, memory)), memory


def test_a_saved_slot_outside_the_cache_is_skipped(device):
    window = opened(make_window())
    ours = window.copy(device)
    ours.tensors["saved_slots"][0, 2] = 2**40
    by_counts = ours.copy()
    ops.close_window(*ours.close_arguments())
    ops.close_window_from_rejected(*by_counts.judge_arguments())
    window.tensors["saved_slots"][0, 2] = -1
    judged = window.copy()
    oracle.close_window(*window.close_arguments())
    oracle.close_window_from_rejected(*judged.judge_arguments())
    for mine, wanted in ((ours, window), (by_counts, judged)):
        assert same_memory(mine.planes, wanted.planes)
        assert same_memory(mine.groups, wanted.groups)


# ---------------------------------------------------------------- graphs, allocations, streams


class Replayed:
    """A window in buffers that never move, big enough for any of `random_window`."""

    ROWS, TOKENS, DRAFTS, COLUMNS = 8, 60, 40, 8

    def __init__(self, device, groups):
        self.groups = groups
        window = self.random_window(0)
        self.planes = twin(window.planes, device)
        shadow_shape = window.tensors["shadow_blocks"].shape
        sizes = {
            "query_start_loc": (self.ROWS + 1,), "cu_num_draft_tokens": (self.ROWS,), "seq_lens": (self.ROWS,),
            "row_slots": (groups, self.DRAFTS), "shadow_blocks": shadow_shape, "saved_slots": (groups, self.TOKENS),
            "tail_pages": (groups, self.ROWS), "idx_mapping": (self.ROWS,), "row_rejected": (self.DRAFTS,),
            "held_slots": shadow_shape,
        }  # fmt: skip
        self.tensors = {
            name: torch.zeros(size, dtype=window.tensors[name].dtype, device=device) for name, size in sizes.items()
        }
        self.slots = [torch.zeros(self.TOKENS, dtype=torch.int64, device=device) for _ in range(groups)]
        self.tables = [torch.zeros(self.ROWS, self.COLUMNS, dtype=torch.int32, device=device) for _ in range(groups)]

    def random_window(self, seed):
        random = torch.Generator().manual_seed(seed)

        def draw(low, high):
            return int(torch.randint(low, high + 1, (1,), generator=random))

        sequences = []
        for state in torch.randperm(6, generator=random).tolist()[: draw(1, 6)]:
            drafts, given = draw(0, 4), draw(1, 3)
            accepted = draw(0, drafts)
            sequences.append(Sequence(draw(0, 9) + drafts + given, given, drafts, accepted, state))
        sequences += [Sequence(0, 0)] * (self.ROWS - len(sequences))
        shape = Shape(120, 4, 2, 32, 32, 3)
        return make_window(
            tuple(sequences), "one_backing", shape, groups=self.groups, num_shadows=2, held=True, seed=seed,
            num_bonus_tokens=1,
        )  # fmt: skip

    def load(self, window):
        for plane, source in zip(self.planes, window.planes, strict=True):
            oracle.raw(plane).copy_(oracle.raw(source))
        for name, buffer in self.tensors.items():
            value = window.tensors[name]
            buffer.fill_(-1 if buffer.dtype != torch.bool else 1)
            columns = min(value.shape[-1], buffer.shape[-1])
            buffer[..., :columns].copy_(value[..., :columns])
        for group, slots, table in zip(window.groups, self.slots, self.tables, strict=True):
            slots.fill_(-1)
            slots[: len(group.slot_mapping)].copy_(group.slot_mapping)
            table.fill_(99)
            rows = group.block_table[: self.ROWS]
            table[: len(rows), : rows.shape[1]].copy_(rows)

    def open(self):
        t, planes = self.tensors, [len(self.planes) // self.groups] * self.groups
        ops.open_window(
            self.planes, planes, t["query_start_loc"], t["cu_num_draft_tokens"], t["seq_lens"], t["row_slots"],
            t["shadow_blocks"], self.slots, self.tables, t["saved_slots"], t["tail_pages"], t["idx_mapping"],
            t["held_slots"], None, 1,
        )  # fmt: skip

    def close(self):
        t, planes = self.tensors, [len(self.planes) // self.groups] * self.groups
        ops.close_window(
            self.planes, planes, t["query_start_loc"], t["cu_num_draft_tokens"], t["row_rejected"],
            t["shadow_blocks"], t["saved_slots"], t["tail_pages"], self.slots, self.tables, t["idx_mapping"],
            t["held_slots"], None, 1,
        )  # fmt: skip

    def assert_is(self, window):
        for plane, expected in zip(self.planes, window.planes, strict=True):
            assert torch.equal(oracle.raw(plane).cpu(), oracle.raw(expected))
        assert torch.equal(self.tensors["held_slots"].cpu(), window.tensors["held_slots"])
        assert torch.equal(self.tensors["tail_pages"].cpu(), window.tensors["tail_pages"][:, : self.ROWS])
        for group, slots, table in zip(window.groups, self.slots, self.tables, strict=True):
            assert torch.equal(slots[: len(group.slot_mapping)].cpu(), group.slot_mapping)
            rows = group.block_table[: self.ROWS]
            assert torch.equal(table[: len(rows), : rows.shape[1]].cpu(), rows)


def captured(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("groups", [1, 2])
def test_windows_in_cuda_graphs(device, groups):
    """Captured once; every replay has other requests, lengths, slots, tables, states and outcomes."""
    replayed = Replayed(device, groups)
    replayed.load(replayed.random_window(0))
    open_graph, close_graph = captured(replayed.open), captured(replayed.close)
    for seed in range(1, 100):
        window = replayed.random_window(seed)
        replayed.load(window)
        open_graph.replay()
        oracle.open_window(*window.open_arguments())
        replayed.assert_is(window)
        close_graph.replay()
        oracle.close_window(*window.close_arguments())
        replayed.assert_is(window)


def test_the_staging_buffer_in_a_cuda_graph(device):
    """stage, accept, commit and move in one graph; every replay has other rows, slots and outcomes."""
    stage = twin(stage_arguments(dtype=torch.bfloat16), device)
    accept = twin(accept_staged_arguments((1,) * 4, (5, 7, 0, 3), ((), ())), device)
    pages = make_pages("packed", SMALL, torch.bfloat16)
    model = twin(pages)
    ours = twin(pages, device)
    scale = torch.ones(1, device=device)
    windows = accept[3]
    moves = [torch.tensor(slots, device=device) for slots in ((1, 2), (2, 1))]

    def run():
        for layer in range(SMALL.layers):
            ops.stage_kv(*stage[:5], accept[2], windows[layer])
        ops.accept_staged(*accept)
        for layer in range(SMALL.layers):
            planes = ours.key_caches[layer], ours.value_caches[layer]
            ops.commit_staged(*stage[3:5], accept[1], accept[5], *planes, scale, scale, "auto")
        ops.move_slots([*ours.key_caches, *ours.value_caches], *moves)

    accept[2].fill_(1)
    graph = captured(run)
    windows.zero_()
    for tensor, content in zip(
        (*ours.key_caches, *ours.value_caches), (*pages.key_caches, *pages.value_caches), strict=True
    ):
        tensor.copy_(content)
    random = torch.Generator().manual_seed(3)
    for window in range(2, 60):
        rows = torch.randperm(6, generator=random)[:4]
        stage_rows = torch.full((6,), -1, dtype=torch.int32)
        stage_rows[rows] = torch.arange(4, dtype=torch.int32)
        if window % 5 == 0:
            stage_rows[rows[0]] = -1  # row 0 is not staged: if it is accepted the window is rejected as a whole
        key, value = (torch.randn(s.shape, generator=random).bfloat16() for s in stage[:2])
        slots = torch.randperm(12, generator=random)[:4]
        accepted = torch.rand(4, generator=random) < 0.5
        pair = torch.randperm(12, generator=random)[:2]
        for buffer, content in zip(
            (*stage[:3], accept[0], accept[1], *moves),
            (key, value, stage_rows, accepted, slots, pair, pair.flip(0)), strict=True,
        ):  # fmt: skip
            buffer.copy_(content)
        accept[2].fill_(window)
        graph.replay()
        complete = not (window % 5 == 0 and accepted[0])
        for planes, source in zip(model[:2], (key, value), strict=True):
            for plane in planes:
                flat = [plane[slot // 4, slot % 4] for slot in range(12)]
                for row, token in enumerate(rows.tolist()):
                    if complete and accepted[row]:
                        flat[slots[row]].copy_(source[token])
                first, second = (flat[slot].clone() for slot in pair.tolist())
                flat[pair[1]].copy_(first)
                flat[pair[0]].copy_(second)
        assert same_memory(model[:2], ours[:2])


def test_nothing_is_allocated_and_nothing_waits(device):
    replayed = Replayed(device, 2)
    replayed.load(replayed.random_window(3))
    others = [twin(sample_inputs(op)[0], device) for op in STAGE[:4]]
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            replayed.open()
            replayed.close()
            for op, arguments in zip(STAGE[:4], others, strict=True):
                getattr(ops, op)(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_launches(device):
    """One kernel for open and one for close, whatever the layers and groups."""
    replayed = Replayed(device, 2)
    replayed.load(replayed.random_window(3))
    replayed.open()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replayed.close()
        replayed.open()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in names if "open_kernel" in name]) == 1
    assert len([name for name in names if "close_kernel" in name]) == 1
    assert len([name for name in names if "kernel" in name]) == 2


def test_another_stream(device):
    window = make_window()
    ours = window.copy(device)
    ours.groups[0].slot_mapping.sub_(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        ours.groups[0].slot_mapping.add_(1)  # only after the sleep are the slots the right ones
        ops.open_window(*ours.open_arguments())
    stream.synchronize()
    oracle.open_window(*window.open_arguments())
    assert same_memory(ours.planes, window.planes)
    assert same_memory(ours.groups, window.groups)


# ---------------------------------------------------------------- debug mode


DEBUG_MODE = """
import pytest, torch
from samples import int32, int64, sample_inputs, twin, with_arguments
from samples_staging import commit_arguments, make_window, move_arguments, opened, stage_arguments
from nwor_ops import ops

def refuse(op, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        getattr(ops, op)(*twin(arguments, "cuda"))
    getattr(ops, op)(*twin(sample_inputs(op)[0], "cuda"))  # the report is gone

refuse("stage_kv", with_arguments("stage_kv", stage_arguments(), stage_rows=int32(0, 9)), IndexError,
       r"^stage_kv: stage_rows\\[1\\] must be below the 4 rows of the staging buffer, got 9$")
for name, other in (("src_slots", "dst_slots"), ("dst_slots", "src_slots")):
    bad = with_arguments("move_slots", move_arguments(), **{name: int64(5, 12), other: int64(1, 2)})
    refuse("move_slots", bad, IndexError, rf"^move_slots: {name}\\[1\\] must be below 12 .*, got 12$")
refuse("commit_staged", commit_arguments((1, 0, 1, 0, 0, 0), slots=(5, 99, 12, 0, 1, 2)), IndexError,
       r"^commit_staged: row_slots\\[2\\] must be below 12 .*, got 12$")
for replaced, error, sentence in (
    ({"query_start_loc": int32(0, 4, 11, 16, 16, 16, 16)}, ValueError, "got the end 16 for request [345]"),
    ({"cu_num_draft_tokens": int32(3, 3, 7, 10, 99, 99)}, ValueError, "must not exceed the 14 rows .*, got 99"),
    ({"idx_mapping": int32(2, 0, 6, 1, 5, -1)}, IndexError, "got 6 for request 2"),
    ({"seq_lens": int32(15, 7, 11, 8, 10, 0)}, ValueError, "at position 12 of request 0"),
):
    refuse("open_window", with_arguments("open_window", make_window().open_arguments(), **replaced), error, sentence)
window = opened(make_window())
window.tensors["saved_slots"][0, 2] = 2**40
refuse("close_window", window.close_arguments(), IndexError, "must be below 240, got 1099511627776")
refuse("close_window_from_rejected", window.judge_arguments(), IndexError, "must be below 240, got 1099511627776")
print("reported")
"""


def test_debug_mode_raises():
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", DEBUG_MODE], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": path, "VLLM_NWOR_DEBUG_SYNC": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "reported"


# ---------------------------------------------------------------- torch's view of the ops


@pytest.mark.parametrize("op", STAGE)
def test_opcheck(device, op):
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    for arguments in sample_inputs(op, device):
        # Its comparison of tensors is not implemented for 8-bit floats.
        eight_bits = any(isinstance(a, Tensor) and a.dtype == torch.float8_e5m2 for a in arguments)
        utils = utilities[1:] if eight_bits else utilities
        torch.library.opcheck(getattr(torch.ops.nwor, op).default, arguments, test_utils=utils)


def test_compiled_whole(device):
    """fullgraph: no graph break at an op, and nothing of the mutation is lost."""

    def step(stage, slots, accepted, key_cache, value_cache, scale, sources, destinations):
        key, value, *rest = stage
        ops.stage_kv(key * 2, value + 1, *rest)
        ops.commit_staged(*rest[1:3], slots, accepted, key_cache, value_cache, scale, scale, "auto")
        ops.move_slots([key_cache, value_cache], sources, destinations)

    stage = stage_arguments(marks=False)
    stage = (numbers(8, 4, 8), numbers(8, 4, 8, seed=1), *stage[2:])
    caches = [surrounded(random_bytes(3 * 4 * 4 * 8, torch.float32, seed).view(3, 4, 4, 8)) for seed in (5, 6)]
    arguments = (stage, int64(5, 7, 0, 3), flags(1, 0, 1, 1), *caches, torch.ones(1), int64(5, 1), int64(1, 5))
    eager, compiled = twin(arguments, device), twin(arguments, device)
    step(*eager)
    with torch.no_grad():
        torch.compile(step, fullgraph=True)(*compiled)
    assert same_memory(eager, compiled)


@pytest.mark.parametrize("op", STAGE)
def test_a_tensor_left_on_the_cpu_is_refused(device, op):
    arguments = twin(sample_inputs(op)[0], device)
    names = [a.name for a in getattr(torch.ops.nwor, op).default._schema.arguments]
    for place, (name, argument) in enumerate(zip(names, arguments, strict=False)):
        # A scale is not looked at where bytes are copied.
        if isinstance(argument, Tensor) and "scale" not in name:
            mixed = (*arguments[:place], argument.cpu(), *arguments[place + 1 :])
            with pytest.raises(TypeError, match=f"^{op}: .* must be on device "):
                getattr(ops, op)(*mixed)
