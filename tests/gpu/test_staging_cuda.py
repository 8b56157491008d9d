"""Test shadow pages on a GPU beyond their sample calls: the number of launches, and states that are forgotten."""

from __future__ import annotations

import pytest
import torch
from no_sync import no_waits

from nwor_ops import DraftCommitManager, LayerCache, ops
from nwor_ops.testing import samples
from nwor_ops.testing.layouts import twin


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


@pytest.mark.parametrize("op", ["open_window", "close_window"])
def test_one_launch(device, op):
    """There is one kernel, whatever the number of layers and groups."""
    calls = (call.arguments for call in samples.recorded(op, 40))
    arguments = twin(next(call for call in calls if len(call[1]) > 1 and call[1][0] > 1 and len(call[2]) > 2), device)
    getattr(ops, op)(*arguments)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        getattr(ops, op)(*arguments)
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([event for event in events if "kernel" in event.name]) == 1
