"""A session without an engine: what happens to a window if a listener fails, or if closing it fails."""

from __future__ import annotations

import logging

import pytest
import torch

from nwor_ops import LayerCache, Window
from nwor_ops.config import NworConfig
from nwor_ops.transaction.state import State
from nwor_ops.vllm.layers.target import TargetLayer
from nwor_ops.vllm.session import Session, Step

SLOTS = torch.tensor([4, 5, 6])
KEYS = torch.ones(3, 2, 8)


class Listened:
    """A session with a window of two written drafts, and the events that its listeners received."""

    def __init__(self, on_unsupported: str = "error") -> None:
        self.cache = torch.zeros(3, 4, 2, 16)
        layer = TargetLayer("layer", "0", self.cache, LayerCache.packed(self.cache), lambda *_: None, fused=True)
        config = NworConfig.load({"nwor": {"mode": "cow", "on_unsupported": on_unsupported}})
        slots = {"0": SLOTS.clone()}
        self.session = Session(
            config, [layer], slots, max_num_requests=1, max_draft_tokens=2, max_drafts_per_request=2,
            shadow_blocks=None, logger=logging.getLogger("test"),
        )  # fmt: skip
        self.heard: list[str] = []
        starts, counts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        self.session.begin(Step(Window(starts, counts, slots, 2), lambda: ([0, 3], [2])))
        self.session.write("layer", KEYS, KEYS, self.cache, slots["0"])
        self.session.subscribe(
            drop=lambda: self.heard.append("drop"), commit=lambda *_: self.heard.append("commit"),
            ended=lambda: self.heard.append("ended"),
        )  # fmt: skip
        assert self.cache[1].any()

    @property
    def drafts(self) -> torch.Tensor:
        return self.cache[1, 1:3]


def fails() -> None:
    raise RuntimeError("planted in a listener")


@pytest.mark.parametrize("on_unsupported", ["error", "vanilla"])
def test_drafts_are_undone_if_a_listener_raises(on_unsupported: str) -> None:
    """The listener raises in the event of the forward, or in that of the cancellation."""
    step = Listened(on_unsupported)
    session = step.session
    session.subscribe(forwarded=lambda moment: fails(), commit=lambda *_: fails())
    with pytest.raises(RuntimeError, match="planted in a listener"):
        session.tell("forwarded", "before sampling")
    with pytest.raises(RuntimeError, match="planted in a listener"):
        session.close_interrupted()
    assert session.manager is not None
    assert session.manager.state is State.CLOSED
    assert not step.drafts.any()
    assert session.vanilla_steps["cancelled"] == 1


@pytest.mark.parametrize("on_unsupported", ["error", "vanilla"])
def test_a_step_that_could_not_be_cancelled_is_dropped(monkeypatch: pytest.MonkeyPatch, on_unsupported: str) -> None:
    """A listener that waits for its end would mistake the next step for it."""
    step = Listened(on_unsupported)
    monkeypatch.setattr(type(step.session.manager), "cancel", lambda _: fails())
    if on_unsupported == "error":
        with pytest.raises(RuntimeError, match="nwor: cancel failed: planted in a listener"):
            step.session.close_interrupted()
    else:
        step.session.close_interrupted()
        assert step.session.vanilla_steps["cancel failed"] == 1
    assert step.heard == ["drop"]


def test_a_step_that_is_cancelled_is_told_of_to_its_end() -> None:
    step = Listened()
    step.session.close_interrupted()
    assert step.heard == ["commit", "ended"]
    assert not step.drafts.any()


def test_a_step_without_a_window_undoes_one_that_was_left_open() -> None:
    """The open window belongs to a step that failed. A step with a window undoes it in the same way."""
    step = Listened()
    step.session.skip()
    assert step.session.manager is not None
    assert step.session.manager.state is State.CLOSED
    assert not step.session.in_window
    assert not step.drafts.any()
    assert step.heard == ["commit", "ended"]
    assert step.session.vanilla_steps["cancelled"] == 1
