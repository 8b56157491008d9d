"""The audit by itself, where the drafter runs between sampling and commit and its layers share the target's storage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nwor_ops.kv_cache import LayerCache
from nwor_ops.vllm.audit.undo import AuditError, CacheAudit
from nwor_ops.vllm.layers.target import TargetLayer

BLOCKS, BLOCK_SIZE, HEADS, WIDTH = 4, 4, 2, 8
SLOTS = torch.tensor([0, 1, 2])  # a token and its two drafts, of which the second is rejected


def _write(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = torch.cat((key[token], value[token]), -1)


class Step:
    """One step of a target layer and a drafter's, in one storage."""

    def __init__(self) -> None:
        self.target, self.drafter = torch.ones(2, BLOCKS, BLOCK_SIZE, HEADS, 2 * WIDTH)
        self.audit = CacheAudit([TargetLayer("target", "0", self.target, LayerCache.packed(self.target), _write)], 8)
        rows = torch.arange(2.0 * 3 * HEADS * WIDTH).view(2, 3, HEADS, WIDTH) + 2
        self.audit.begin([0, 3], [2], {"0": SLOTS})
        self.before = self.target.clone()
        self.audit.record("target", rows[0], rows[1], SLOTS, 0, ())
        _write(rows[0], rows[1], self.target, SLOTS)

    def draft(self) -> None:
        self.audit.sampled()
        self.drafter[0] = 7
        self.audit.drafted()

    def undo(self) -> None:
        self.target[0, 2] = self.before[0, 2]

    def compare(self) -> None:
        self.audit.commit(lambda: [2], undone=True)


def test_what_the_drafter_wrote_is_expected() -> None:
    step = Step()
    step.draft()
    step.undo()
    step.compare()
    summary = step.audit.summary()
    assert (summary["drafted"], summary["accepted"], summary["rejected"]) == (2, 1, 1)
    assert summary["stale_rows"] == 0


def test_a_rejected_row_that_stays_is_found_behind_the_drafter() -> None:
    step = Step()
    step.draft()
    with pytest.raises(AuditError, match=r"rejected drafts of group 0 left their rows in slots 2 \(token 2\)"):
        step.compare()


@pytest.mark.parametrize("block", [0, 1])
def test_an_undo_that_reaches_into_the_drafters_layer_is_found(block: int) -> None:
    """Where the drafter wrote (block 0) and where it did not."""
    step = Step()
    step.draft()
    step.undo()
    step.drafter[block, 0, 0, 0] = 5
    with pytest.raises(AuditError, match="bytes are not what this step should leave there"):
        step.compare()


@pytest.mark.parametrize("slot", [1, 2])
def test_a_drafter_that_writes_to_the_target_is_found(slot: int) -> None:
    """To an accepted draft's row, and to a rejected one's."""
    step = Step()
    step.audit.sampled()
    step.target[0, slot] = 7
    with pytest.raises(AuditError, match=f"wrote to layer target, slots {slot} "):
        step.audit.drafted()


def test_a_drafter_that_the_audit_was_not_told_of_is_found() -> None:
    """A write between sampling and commit that no part of the step makes."""
    step = Step()
    step.drafter[0] = 7
    step.undo()
    with pytest.raises(AuditError, match="bytes are not what this step should leave there"):
        step.compare()
