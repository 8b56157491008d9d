"""The audit by itself, where a drafter's layers share the target's storage."""

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

    def undo(self) -> None:
        self.target[0, 2] = self.before[0, 2]

    def compare(self) -> None:
        self.audit.commit(lambda: [2], undone=True)


def test_a_step_as_it_should_be() -> None:
    """The drafter runs behind the commit: what it writes is in the image of the next step."""
    step = Step()
    step.undo()
    step.compare()
    step.drafter[0] = 7
    step.audit.begin([0, 1], [0], {"0": SLOTS[:1]})
    step.compare()
    summary = step.audit.summary()
    assert (summary["drafted"], summary["accepted"], summary["rejected"]) == (2, 1, 1)
    assert summary["stale_rows"] == 0


def test_a_rejected_row_that_stays_is_found() -> None:
    step = Step()
    with pytest.raises(AuditError, match=r"rejected drafts of group 0 left their rows in slots 2 \(token 2\)"):
        step.compare()


@pytest.mark.parametrize("block", [0, 1])
def test_an_undo_that_reaches_into_the_drafters_layer_is_found(block: int) -> None:
    """Where the target wrote (block 0) and where it did not."""
    step = Step()
    step.undo()
    step.drafter[block, 0, 0, 0] = 5
    with pytest.raises(AuditError, match="bytes are not what this step should leave there"):
        step.compare()


def test_an_accepted_row_that_is_lost_is_found() -> None:
    step = Step()
    step.undo()
    step.target[0, 1] = 7
    with pytest.raises(AuditError, match=r"in layer target slots 1 \(token 1\)"):
        step.compare()


def test_a_drafter_that_runs_before_the_commit_is_found() -> None:
    """A write between begin and commit that no part of the step makes."""
    step = Step()
    step.drafter[0] = 7
    step.undo()
    with pytest.raises(AuditError, match="bytes are not what this step should leave there"):
        step.compare()
