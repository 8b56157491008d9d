"""The undo log: its memory order, planes that it refuses, and layers that a forward did not reach."""

from __future__ import annotations

import pytest
import torch

from nwor_ops import DraftCommitManager, LayerCache, Layout, Plane, Window, ops
from nwor_ops.transaction.undo_log import _new_log


@pytest.mark.parametrize("slots_are_adjacent", [False, True])
def test_log_rows_are_adjacent_if_slots_are(slots_are_adjacent: bool) -> None:
    """One access then moves several rows."""
    pages = torch.ones(3, 2, 8, 4) if slots_are_adjacent else torch.ones(3, 4, 2, 8)
    plane = Plane(pages.permute(0, 3, 1, 2) if slots_are_adjacent else pages)  # 3 blocks of 4 slots, 2 heads of 8
    log = _new_log(plane, layers=2, rows=5)
    assert (log.shape, log.dtype, log.count_nonzero()) == ((2, 5, 2, 8), plane.view.dtype, 0)
    assert log.stride() == ((80, 1, 40, 5) if slots_are_adjacent else (80, 16, 8, 1))


# ---------------------------------------------------------------- layers that a forward did not reach


def begin_draft(manager: DraftCommitManager, **slots: list[int]) -> dict[str, torch.Tensor]:
    """Begin a window of a token and a draft. Return its slot mappings."""
    starts, drafts = (torch.tensor(values, dtype=torch.int32) for values in ([0, 2], [1]))
    slot_mappings = {group: torch.tensor(of_group) for group, of_group in slots.items()}
    manager.bind(Layout(slot_mappings))
    manager.begin(Window(starts, drafts))
    return slot_mappings


def test_cancel_after_write_refused_slot() -> None:
    """The draft of a layer is outside of its cache. Nothing was logged there."""
    manager = DraftCommitManager(max_num_tokens=8, max_num_requests=2, max_draft_tokens=4, device="cpu")
    small, large = (torch.zeros(number, 2, 1, 8) for number in (4, 8))
    manager.register_layer("b", LayerCache.packed(small), "small")
    manager.register_layer("a", LayerCache.packed(large), "large")
    manager.allocate()
    slots = begin_draft(manager, small=[2, 8], large=[2, 3])
    manager.write("a", torch.ones(2, 1, 4), torch.ones(2, 1, 4), slots["large"])
    with pytest.raises(IndexError, match=r"slot_mapping\[1\] must be below 8"):
        manager.write("b", torch.ones(2, 1, 4), torch.ones(2, 1, 4), slots["small"])
    manager.cancel()
    assert not large.view(-1, 8)[3].any()
    assert manager.stats().rejected == 1


def test_cancel_after_log_of_one_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of the other plane holds nothing, so no row of the layer is put back."""
    manager = DraftCommitManager(max_num_tokens=8, max_num_requests=2, max_draft_tokens=4, device="cpu")
    planes = torch.arange(64.0).view(2, 4, 2, 1, 4)
    manager.register_layer("a", LayerCache.split(*planes))
    manager.allocate()
    slots = begin_draft(manager, default=[2, 3])
    log, calls, before = ops.log_slots, iter([True, False]), planes.clone()
    monkeypatch.setattr(ops, "log_slots", lambda *arguments: log(*arguments) if next(calls) else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.log("a", slots["default"])
    manager.cancel()
    assert torch.equal(planes, before)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (lambda: LayerCache.opaque(torch.zeros(4, 2, 1, 16).expand(4, 2, 8, 16)), r"caches\[0\] must not overlap"),
        (lambda: LayerCache.opaque(Plane(torch.zeros(4, 2, 1, 16), offsets().t().contiguous().t())), "contiguous"),
        (lambda: LayerCache.opaque(Plane(torch.zeros(4, 2, 1, 16), offsets() + 1000)), "within the storage"),
    ],
    ids=["expanded", "strided offsets", "offsets outside"],
)
def test_planes_without_a_restore_are_refused(cache, message):
    manager = DraftCommitManager(max_num_tokens=8, max_num_requests=2, max_draft_tokens=4, device="cpu")
    manager.register_layer("x", cache())
    with pytest.raises((ValueError, IndexError), match=f"^allocate: layers 'x' could not be restored: .*{message}"):
        manager.allocate()


def offsets() -> torch.Tensor:
    return torch.arange(32, dtype=torch.int32).view(2, 16)
