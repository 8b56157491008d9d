"""Test staging and shadow pages in CUDA graphs with changed data, and on streams. Nothing is allocated or
synchronized."""

from __future__ import annotations

import pytest
import samples_staging as samples
import torch
from no_sync import no_waits, no_waits_or_allocations
from samples import ops_of, sample_inputs
from shadow_windows import Sequence, make_window
from tensors import SMALL

from nwor_ops import DraftCommitManager, LayerCache, ops
from nwor_ops.testing.layouts import Shape, make_pages, same_memory, twin
from nwor_ops.testing.oracle import shadow as oracle
from nwor_ops.testing.raw_rows import raw

STAGE = (*ops_of("shadow"), *ops_of("staging"))


class Replayed:
    """A window in buffers with fixed addresses, large enough for any `random_window`."""

    ROWS, TOKENS, DRAFTS, COLUMNS = 8, 60, 40, 8

    def __init__(self, device, groups):
        self.groups = groups
        window = self.random_window(0)
        self.planes = twin(window.planes, device)
        shadow_shape = window.tensors["shadow_blocks"].shape
        sizes = {
            "query_start_loc": (self.ROWS + 1,), "draft_start_loc": (self.ROWS + 1,), "seq_lens": (self.ROWS,),
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
            tuple(sequences), "one_backing", shape, groups=self.groups, num_shadows=2, held=True, seed=seed
        )

    def load(self, window):
        for plane, source in zip(self.planes, window.planes, strict=True):
            raw(plane).copy_(raw(source))
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
            self.planes, planes, t["query_start_loc"], t["draft_start_loc"], t["seq_lens"], t["row_slots"],
            t["shadow_blocks"], self.slots, self.tables, t["saved_slots"], t["tail_pages"], t["idx_mapping"],
            t["held_slots"],
        )  # fmt: skip

    def close(self):
        t, planes = self.tensors, [len(self.planes) // self.groups] * self.groups
        ops.close_window(
            self.planes, planes, t["query_start_loc"], t["draft_start_loc"], t["row_rejected"],
            t["shadow_blocks"], t["saved_slots"], t["tail_pages"], self.slots, self.tables, t["idx_mapping"],
            t["held_slots"],
        )  # fmt: skip

    def assert_is(self, window):
        for plane, expected in zip(self.planes, window.planes, strict=True):
            assert torch.equal(raw(plane).cpu(), raw(expected))
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
    """Captured once. Every replay has other requests, lengths, slots, tables, states and outcomes."""
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
    """stage, accept, commit and move in one graph. Every replay has other rows, slots and outcomes."""
    stage = twin(samples.stage(dtype=torch.bfloat16), device)
    accept = twin(samples.accept_staged((1,) * 4, (5, 7, 0, 3), ((), ())), device)
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
            stage_rows[rows[0]] = -1  # row 0 is not staged: if it is accepted, the whole window is rejected
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


def test_nothing_is_allocated_or_synchronized(device):
    replayed = Replayed(device, 2)
    replayed.load(replayed.random_window(3))
    others = [twin(sample_inputs(op)[0], device) for op in STAGE[:4]]

    def run():
        replayed.open()
        replayed.close()
        for op, arguments in zip(STAGE[:4], others, strict=True):
            getattr(ops, op)(*arguments)

    with no_waits():
        run()
    with no_waits_or_allocations():
        run()


def test_forgetting_shadow_pages_does_not_sync(device):
    """Also for selected states, whose numbers are on the host."""
    manager = DraftCommitManager(
        max_num_tokens=9, max_num_requests=3, max_draft_tokens=6, device=device, mode="stage", max_drafts_per_request=2
    )
    manager.register_layer("layer", LayerCache.packed(torch.zeros(16, 4, 2, 16, device=device)))
    manager.allocate()
    held = manager.recovery.held_slots
    for states, kept in (([2, 0], 1), (None, 0)):
        held.fill_(7)
        with no_waits():
            manager.forget_shadow_pages(states)
        assert (held >= 0).flatten(1).cpu().sum() == kept * held.shape[2]


def test_launches(device):
    """One kernel for open and one for close, whatever the number of layers and groups."""
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
        ours.groups[0].slot_mapping.add_(1)  # the slots are valid only after the sleep
        ops.open_window(*ours.open_arguments())
    stream.synchronize()
    oracle.open_window(*window.open_arguments())
    assert same_memory(ours.planes, window.planes)
    assert same_memory(ours.groups, window.groups)
