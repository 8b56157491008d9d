"""Test torch.compile(fullgraph=True) on CUDA: no graph break at an op, and no mutation is lost."""

from __future__ import annotations

import samples_accept
import samples_staging
import samples_undo
import torch
from samples import with_arguments
from tensors import flags, int32, int64, numbers

from nwor_ops import ops
from nwor_ops.testing.layouts import random_bytes, same_memory, surrounded, twin


def as_eager(step, arguments, device):
    """Return the result of the eager step. A compiled one must return the same and leave the same memory."""
    eager, compiled = twin(arguments, device), twin(arguments, device)
    torch._dynamo.reset()
    expected = step(*eager)
    with torch.no_grad():
        result = torch.compile(step, fullgraph=True)(*compiled)
    assert result is expected is None or torch.equal(result, expected)
    assert same_memory(eager, compiled)
    return expected, eager


def test_undo(device):
    def step(write, restore):
        key, value, *rest = write
        ops.write_kv_logged(key * 2, value + 1, *rest)
        ops.restore_slots(*restore)

    write = samples_undo.write_logged(dtype=torch.bfloat16)
    write = with_arguments("write_kv_logged", write, key=numbers(8, 4, 8).bfloat16(), value=numbers(8, 4, 8).bfloat16())
    as_eager(step, (write, [[write[2]], write[9][None], int64(0, 11, 5, -1), flags(1, 0, 0, 1)]), device)


def test_accept(device):
    """Eager code plans and commits the window; the counters agree too."""

    def step(plan, drafts, sampled, rejected, num_accepted):
        ops.plan_window(*plan)
        ops.reject_rows(drafts + 1, sampled, plan[8][:5], rejected, num_accepted, plan[7])
        return ops.acceptance_mask(drafts + 1, sampled, plan[8][:5])[0].sum()

    sampled = surrounded(torch.tensor([[1, 2, 9, -1], [9, -1, -1, -1], [4, 5, 6, 9], [-1, -1, -1, -1]]))
    arguments = samples_accept.plan(), int64(0, 1, 2, 3, 4, 5), sampled, flags(*[1] * 6), int32(*[9] * 4)
    accepted, eager = as_eager(step, arguments, device)
    assert accepted.item() == 5
    assert eager[0][7].tolist() == [11, 26, 35, 41, 50]


def test_staging(device):
    def step(stage, slots, accepted, key_cache, value_cache, scale, sources, destinations):
        key, value, *rest = stage
        ops.stage_kv(key * 2, value + 1, *rest)
        ops.commit_staged(*rest[1:3], slots, accepted, key_cache, value_cache, scale, scale, "auto")
        ops.move_slots([key_cache, value_cache], sources, destinations)

    stage = (numbers(8, 4, 8), numbers(8, 4, 8, seed=1), *samples_staging.stage(marks=False)[2:])
    caches = [surrounded(random_bytes(3 * 4 * 4 * 8, torch.float32, seed).view(3, 4, 4, 8)) for seed in (5, 6)]
    arguments = (stage, int64(5, 7, 0, 3), flags(1, 0, 1, 1), *caches, torch.ones(1), int64(5, 1), int64(1, 5))
    as_eager(step, arguments, device)
