"""The stand-ins for CUDA graphs: they run the bodies, and refuse what a capture would refuse."""

from __future__ import annotations

import gc

import pytest
import torch
from draft_loop import Drafter, play
from paged_drafter import DrafterConfig, PagedMetadataAdapter

from nwor_ops.testing.host_graphs import HostGraph, HostGraphLoop, Launches

ROWS, NUM_DRAFTS, ROUNDS, MAX_LEN = 4, 3, 3, 64


def drafter(**options) -> Drafter:
    options = {"loop": HostGraphLoop, "dtype": torch.float64, "debug": True} | options
    return Drafter(DrafterConfig(), NUM_DRAFTS, ROWS, MAX_LEN, **options)


def test_launches_are_counted_outside_graphs():
    x, launches = torch.zeros(4, 4), Launches()
    graph = HostGraph(lambda: x.add_(1).mul_(2), launches)
    with launches:
        x.view(16).view(8, 2)  # two views, and an allocation
        torch.empty(3)
        x.add_(1)
        graph.replay()
        x.fill_(0)
    assert (launches.kernels, launches.graphs) == (2, 1)


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.unique(x),
    ],
    ids=["item", "bool", "nonzero", "mask", "unique"],
)
def test_waiting_body_is_refused(body):
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"aten\..* cannot be captured in a CUDA graph: the host must read"):
        HostGraph(lambda: body(x)).replay()


def test_index_without_a_mask_is_allowed():
    x = torch.arange(6)
    HostGraph(lambda: x[torch.tensor([1, 2])]).replay()


def test_captured_drafts_are_those_of_eager_code():
    eager, captured = drafter(), drafter()
    captured.capture([ROWS])
    with captured.loop.launches:
        assert play(captured, "loop", ROUNDS, 0.0) == play(eager, "eager", ROUNDS, 0.0)
    assert captured.loop.launches.graphs == 2 * ROUNDS


@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "disabled"])
def test_capture_collects_no_garbage(enabled):
    """The collector may destroy an old graph, which CUDA does not permit while a stream is capturing."""
    captured, seen = drafter(), []
    model = captured.loop.model_fn

    def watched(*arguments):
        seen.append(gc.isenabled())
        if len(seen) > 8:
            raise RuntimeError("planted")
        return model(*arguments)

    captured.loop.model_fn = watched
    (gc.enable if enabled else gc.disable)()
    try:
        captured.capture([1])
        assert gc.isenabled() is enabled
        with pytest.raises(RuntimeError, match="planted"):
            captured.capture([2, 3, ROWS])
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert len(seen) > 8
    assert not any(seen)


def test_moved_tensor_is_refused():
    captured = drafter()
    captured.capture([ROWS])
    seeds = captured.buffers.registered.pop("seeds")
    for moved in ({}, {"seeds": seeds.clone()}):
        captured.buffers.registered.update(moved)
        with pytest.raises(
            RuntimeError, match=r"^DraftLoop: buffers\['seeds'\] must not move after the capture; write"
        ):
            play(captured, "loop", 1, 0.0)
    captured.buffers.registered["seeds"] = seeds
    captured.buffers.input_ids = captured.buffers.input_ids.clone()
    with pytest.raises(RuntimeError, match=r"buffers\['input_ids'\] must not move"):
        play(captured, "loop", 1, 0.0)


def test_waiting_metadata_update_is_refused():
    class Waiting(PagedMetadataAdapter):
        def update(self, key, metadata):
            if int(self.buffers.current_draft_step) < NUM_DRAFTS:
                super().update(key, metadata)

    with pytest.raises(RuntimeError, match=r"_local_scalar_dense.* cannot be captured"):
        drafter(adapter=Waiting).capture([ROWS])
