"""Compare vLLM's draft kernels with the ops of family drafter, on random batches. Run by test_draft_graphs.py:

    TRITON_INTERPRET=1 python draft_kernels.py FILE

It writes the kernels of the installed vLLM's source to FILE, and runs them on the CPU with Triton's interpreter.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import sys

import torch
from interpreter import patch_once_per_launch
from torch import Tensor

from nwor_ops import ops

STANDALONE = "v1/worker/gpu/spec_decode/standalone_ar/speculator.py"
KERNELS = {
    "v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py": (
        "_prepare_prefill_inputs_kernel", "_prepare_decode_inputs_kernel", "_update_draft_inputs_kernel",
    ),
    STANDALONE: ("_prepare_prefill_inputs_kernel",),
    "v1/spec_decode/utils.py": (
        "eagle_step_slot_mapping_metadata_kernel", "eagle_prepare_inputs_padded_kernel",
        "eagle_prepare_next_token_padded_kernel", "copy_and_expand_eagle_inputs_kernel",
    ),
    "v1/worker/gpu/cp_utils.py": ("_dcp_local_seq_lens_kernel",),
    "v1/worker/gpu/block_table.py": ("_compute_slot_mappings_kernel",),
    "v1/worker/gpu/buffer_utils.py": ("_load_ptr",),
}  # fmt: skip
BATCHES, CAPACITY, ROWS, STATES, LONGEST, STEPS, WIDTH = 30, 64, 8, 10, 40, 4, 24


def kernel_source(vllm: pathlib.Path) -> str:
    """Return only the kernels, because the modules that contain them need a whole engine to be imported."""
    parts = ["import triton", "import triton.language as tl"]
    for name, kernels in KERNELS.items():
        text = (vllm / name).read_text()
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef) or node.name not in kernels:
                continue
            code = "\n".join(text.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno])
            if name == STANDALONE:
                code = code.replace(f"def {node.name}", "def standalone_prefill_kernel")
            parts.append(code)
    # The interpreter does not accept a Python bool as a mask.
    return (
        "\n\n\n".join(parts)
        .replace("is_local = True", "is_local = positions >= 0")
        .replace("mask=is_local & is_real_req", "mask=(is_local & is_real_req) != 0")
        .replace("is_local = ~sharded | is_local", "is_local = (sharded == 0) | is_local")
    )


def load_kernels(file: pathlib.Path):
    file.write_text(kernel_source(pathlib.Path(importlib.util.find_spec("vllm").origin).parent))
    spec = importlib.util.spec_from_file_location("vllm_kernels", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours, theirs), f"ours {ours.tolist()}, vLLM's {theirs.tolist()}"


def int32(*shape: int) -> Tensor:
    return torch.full(shape, 7, dtype=torch.int32)


def int64(*shape: int) -> Tensor:
    return torch.full(shape, 7, dtype=torch.int64)


class Batch:
    """R requests of a few tokens; the padded forms have ROWS rows."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.rows = int(torch.randint(1, 6, ()))
        self.lengths = torch.randint(1, 7, (self.rows,))
        self.starts = torch.zeros(ROWS + 1, dtype=torch.int32)
        self.starts[1 : self.rows + 1] = self.lengths.cumsum(0)
        self.starts[self.rows + 1 :] = self.tokens = int(self.starts[self.rows])
        self.first = torch.randint(0, LONGEST - 8, (self.rows,))
        self.ids = torch.randint(0, 1000, (CAPACITY,), dtype=torch.int32)
        self.positions = torch.zeros(CAPACITY, dtype=torch.int64)
        for row in range(self.rows):
            begin, end = self.starts[row : row + 2].tolist()
            self.positions[begin:end] = self.first[row] + torch.arange(end - begin)
        self.seq_lens = self.padded((self.first + self.lengths).int(), 0)
        self.rejected = self.padded((torch.rand(self.rows) * self.lengths).int(), 0)
        self.states = self.padded(torch.randperm(STATES)[: self.rows], -1)
        self.sampled = torch.randint(0, 3, (self.rows,), dtype=torch.int32)
        self.last_sampled = torch.randint(0, 1000, (STATES,))
        self.next_prompt = torch.randint(0, 1000, (STATES,), dtype=torch.int32)

    def padded(self, of_rows: Tensor, value: int) -> Tensor:
        return torch.cat([of_rows, torch.full((ROWS - self.rows,), value, dtype=of_rows.dtype)])


def compare_loop(vllm, b: Batch) -> None:
    """Compare prepare_prefill_inputs, prepare_decode_inputs and all later updates."""
    r = b.rows
    ours, theirs = (
        (int32(CAPACITY), int64(CAPACITY), int32(ROWS + 1), int32(ROWS), int64(ROWS), int64(1)) for _ in range(2)
    )
    ids, positions, starts, seq_lens, *_ = ours
    ids2, positions2, starts2, seq_lens2, last2, step2 = theirs
    ops.prepare_prefill_inputs(
        b.ids, b.positions, b.starts, b.seq_lens, b.states[:r], b.sampled, b.rejected, b.last_sampled, b.next_prompt,
        *ours,
    )  # fmt: skip
    vllm._prepare_prefill_inputs_kernel[(r,)](
        last2, step2, ids2, positions2, starts2, seq_lens2, b.ids, b.positions, b.states[:r], b.last_sampled,
        b.next_prompt, b.sampled, b.rejected, b.starts, b.seq_lens, ROWS, BLOCK_SIZE=1024,
    )  # fmt: skip
    for one, other in zip(ours[2:], theirs[2:], strict=True):
        same(one, other)
    for row in range(r):
        begin = int(b.starts[row])
        end = begin + int(b.lengths[row] - b.rejected[row])
        same(ids[begin:end], ids2[begin:end])
        same(positions[begin:end], positions2[begin:end])

    keys, keys2 = torch.arange(ROWS) + 5, torch.arange(ROWS) + 5
    drafts = torch.randint(0, 1000, (ROWS, STEPS))
    for advance in (False, True):
        for of_rows in (positions, positions2):
            of_rows[:r] = b.first + b.lengths - 1 - b.rejected[:r]
        ops.prepare_decode_inputs(
            drafts, b.seq_lens, b.rejected, ids, positions, starts, seq_lens, LONGEST, b.states, keys, advance
        )
        vllm._prepare_decode_inputs_kernel[(r + 1,)](
            drafts[:r], STEPS, b.seq_lens, b.rejected, ids2, positions2, keys2, starts2, seq_lens2, LONGEST, ROWS,
            BLOCK_SIZE=1024, ADVANCE_DRAFT_POSITIONS=advance,
        )  # fmt: skip
        same(starts, starts2)
        same(seq_lens, seq_lens2)
        for one, other in ((ids, ids2), (positions, positions2), (keys, keys2)):
            same(one[:r], other[:r])

    drafts2 = drafts.clone()
    hidden, hidden2 = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    for number in range(1, STEPS):
        tokens, made, number = torch.randint(0, 1000, (ROWS,)), torch.randn(ROWS, WIDTH), torch.tensor(number)
        ops.update_draft_inputs(
            tokens, number, drafts, ids, positions, seq_lens, STEPS, LONGEST, b.states, made, hidden, keys
        )
        vllm._update_draft_inputs_kernel[(r,)](
            drafts2, STEPS, hidden2, WIDTH, ids2, positions2, keys2, seq_lens2, tokens, number, made, WIDTH, WIDTH,
            LONGEST, STEPS, BLOCK_SIZE=1024, ADVANCE_DRAFT_POSITIONS=True,
        )  # fmt: skip
        for one, other in ((drafts, drafts2), (hidden, hidden2), (seq_lens, seq_lens2)):
            same(one, other)
        for one, other in ((ids, ids2), (positions, positions2), (keys, keys2)):
            same(one[:r], other[:r])


def compare_standalone(vllm, b: Batch) -> None:
    """Compare copy_expand_inputs and extend_queries, the first pass of a standalone drafter."""
    r, capacity = b.rows, CAPACITY + ROWS
    ids, positions, last, starts, seq_lens = (
        int32(capacity), int64(capacity), int64(ROWS), int32(ROWS + 1), int32(ROWS)
    )  # fmt: skip
    vllm.standalone_prefill_kernel[(r,)](
        b.ids, b.positions, b.last_sampled.int(), b.states, ids, positions, last, starts, seq_lens, b.starts,
        b.seq_lens, b.rejected, ROWS, LONGEST, BLOCK_SIZE=16,
    )  # fmt: skip
    ours = int32(capacity), int64(capacity), torch.zeros(capacity).bool(), torch.zeros(capacity).bool(), int64(ROWS)
    ops.copy_expand_inputs(
        b.ids, b.positions, b.starts, b.rejected, b.last_sampled, *ours, max_model_len=LONGEST, idx_mapping=b.states
    )
    end = b.tokens + r
    same(ours[0][:end], ids[:end])
    same(ours[1][:end], positions[:end])
    same(ours[4], last)
    table, extended = torch.randint(0, 500, (ROWS, 10), dtype=torch.int32), (int32(ROWS + 1), int32(ROWS))
    ops.extend_queries(
        b.starts, b.seq_lens, ours[1], ours[2], table, *extended, int64(capacity), 4, LONGEST, 1, b.states
    )  # fmt: skip
    same(extended[0], starts)
    same(extended[1], seq_lens)


def compare_expand(vllm, b: Batch, num_new: int, shift: bool) -> None:
    r, capacity = b.rows, CAPACITY + 3 * ROWS
    ours, theirs = (
        (int32(capacity), int64(capacity), torch.zeros(capacity).bool(), torch.zeros(capacity).bool(),
         int32(ROWS * num_new)) for _ in range(2)
    )  # fmt: skip
    mapping, mapping2 = int32(CAPACITY), int32(CAPACITY)
    bonus = torch.randint(0, 1000, (ROWS,), dtype=torch.int32)
    ops.copy_expand_inputs(
        b.ids, b.positions, b.starts, b.rejected[:r], bonus, *ours, num_new, 11, 12, shift, None, None,
        mapping if shift else None,
    )  # fmt: skip
    vllm.copy_and_expand_eagle_inputs_kernel[(r, 2)](
        b.ids, b.positions, bonus, *theirs, mapping2, b.starts, b.starts[1 : r + 1] - 1 - b.rejected[:r], 11, 12,
        b.tokens, num_new, shift, BLOCK_SIZE_TOKENS=8,
    )  # fmt: skip
    end = b.tokens + r * (num_new - shift)
    live = ~theirs[2][:end]
    for place in (0, 2, 3):
        same(ours[place][:end], theirs[place][:end])
    same(ours[1][:end][live], theirs[1][:end][live])  # vLLM's V1 kernel writes 0 for rejected tokens
    same(ours[4][: r * num_new], theirs[4][: r * num_new])
    if shift:
        same(mapping[: b.tokens], mapping2[: b.tokens])


def compare_rows(vllm, b: Batch, seed: int) -> None:
    """Compare eagle_step, prepare_inputs_padded, prepare_next_token_padded and dcp_local_seq_lens."""
    r = b.rows
    positions, table = torch.randint(0, LONGEST + 2, (r,)), torch.randint(0, 500, (ROWS, 10), dtype=torch.int32)
    ours, theirs = (((positions + 1).int(), int64(r), int64(ROWS)) for _ in range(2))
    ops.eagle_step(positions, table, *ours, 4, LONGEST)
    vllm.eagle_step_slot_mapping_metadata_kernel[(ROWS,)](
        positions, table, 10, *theirs, 4, LONGEST, 10, -1, r
    )  # fmt: skip
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)

    drafts = torch.minimum(torch.randint(0, 5, (r,)), b.lengths - 1)
    valid = 1 + (torch.rand(r) * (drafts + 1)).int()
    ours, theirs = ((int32(r), int32(r)) for _ in range(2))
    ops.prepare_inputs_padded(drafts.cumsum(0).int(), valid, b.starts, *ours)
    vllm.eagle_prepare_inputs_padded_kernel[(r,)](drafts.cumsum(0).int(), valid, b.starts, *theirs, r)
    same(ours[0], theirs[0])
    same(ours[1], theirs[1])

    sampled, backup = torch.randint(-1, 60, (r, 5), dtype=torch.int32), torch.randint(0, 50, (r,), dtype=torch.int32)
    discarded = torch.rand(r) < 0.3
    ops.prepare_next_token_padded(sampled, discarded, backup, *ours, 50)
    vllm.eagle_prepare_next_token_padded_kernel[(r,)](
        sampled, discarded, backup, *theirs, 50, 5, r, 5, BLOCK_SIZE_TOKENS=8
    )  # fmt: skip
    same(ours[0], theirs[0])
    same(ours[1], theirs[1])

    local, local2 = int32(ROWS), int32(ROWS)
    ops.dcp_local_seq_lens(b.seq_lens[:r], local, 4, seed % 4, 1 + seed % 3)
    vllm._dcp_local_seq_lens_kernel[(1,)](local2, b.seq_lens, 4, seed % 4, 1 + seed % 3, r, ROWS, 128)
    same(local, local2)


def compare_slots(vllm, b: Batch, cp_size: int) -> None:
    r, sizes = b.rows, [4, 8]
    tables = [torch.randint(0, 500, (STATES, 20), dtype=torch.int32) for _ in sizes]
    slots, slots2, sharded = int64(2, CAPACITY), int64(2, CAPACITY), torch.tensor([True, False])
    ops.compute_slot_mappings(
        b.states[:r], b.starts, b.positions, tables, sizes, slots, cp_size, cp_size - 1, 2, sharded
    )
    vllm._compute_slot_mappings_kernel[(2, r + 1)](
        CAPACITY, b.states[:r], b.starts, b.positions,
        torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64), torch.tensor([20, 20]),
        torch.tensor(sizes, dtype=torch.int32), torch.tensor([True, True]), sharded, slots2, CAPACITY, cp_size - 1,
        CP_SIZE=cp_size, CP_INTERLEAVE=2, PAD_ID=-1, TRITON_BLOCK_SIZE=1024,
    )  # fmt: skip
    same(slots, slots2)


def main() -> None:
    patch_once_per_launch()
    vllm = load_kernels(pathlib.Path(sys.argv[1]))
    for seed in range(BATCHES):
        batch = Batch(seed)
        compare_loop(vllm, batch)
        compare_standalone(vllm, batch)
        for num_new in (1, 3):
            for shift in (False, True):
                compare_expand(vllm, batch, num_new, shift)
        compare_rows(vllm, batch, seed)
        for cp_size in (1, 2):
            compare_slots(vllm, batch, cp_size)
    print(f"{BATCHES} batches equal")


if __name__ == "__main__":
    main()
