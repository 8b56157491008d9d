"""Test the family undo on a GPU beyond ops/: large caches."""

from __future__ import annotations

import pytest
import torch

from nwor_ops import ops


def test_offsets_beyond_32_bits(device):
    """A packed cache of more than 2^31 elements: its last slots are written and restored."""
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
