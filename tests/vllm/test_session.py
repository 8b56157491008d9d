"""A session without an engine: what happens to a window if a listener fails, or if closing it fails."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nwor_ops import LayerCache, Layout, Window, ops
from nwor_ops.config import NworConfig
from nwor_ops.transaction.counters import Stats
from nwor_ops.transaction.protocol import State
from nwor_ops.vllm.errors import CannotContinue
from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.transaction import session as session_module
from nwor_ops.vllm.transaction.layers.target import TargetLayer
from nwor_ops.vllm.transaction.runners import v1
from nwor_ops.vllm.transaction.session import Session, Step
from nwor_ops.vllm.transaction.shadow_blocks import ShadowBlocks

SLOTS = torch.tensor([4, 5, 6])
KEYS = torch.ones(3, 2, 8)
SHADOW_BLOCKS = ShadowBlocks(7, (0, 1), 2, 2**20)  # of group 0: blocks 3 and 4


class Noting(StepListener):
    """Note some events."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.heard: list[str] = []  # the events that end a step or a load
        self.begun: list[tuple[Any, ...]] = []
        self.recorded: list[tuple[Any, ...]] = []
        self.commits: list[tuple[Any, ...]] = []

    def begin(self, *arguments: Any) -> None:
        self.begun.append(arguments)

    def record(self, *arguments: Any) -> None:
        self.recorded.append(arguments)

    def abandoned(self) -> None:
        self.heard.append("abandoned")

    def loaded(self) -> None:
        self.heard.append("loaded in a window" if self.session.in_window else "loaded")

    def drop(self) -> None:
        self.heard.append("drop")

    def commit(self, *arguments: Any) -> None:
        self.heard.append("commit")
        self.commits.append(arguments)


class Failing(StepListener):
    def forwarded(self, moment: str) -> None:
        fails()

    def commit(self, *_: Any) -> None:
        fails()


class Listened:
    """A session with a window of two written drafts, and the events that its listeners received."""

    def __init__(
        self, on_error: str = "continue", fused: bool = True, mode: str = "cow", dtype: Any = None, **of_layer: Any
    ) -> None:
        self.cache = torch.zeros(7, 4, 2, 16, dtype=dtype)
        self.own_writes: list[tuple[Any, ...]] = []
        planes = LayerCache.packed(self.cache)
        layer = TargetLayer("layer", "0", self.cache, planes, self.own_writer, fused, **of_layer)
        config = NworConfig.load({"nwor": {"mode": mode, "on_error": on_error}})
        slots, tables = {"0": SLOTS.clone()}, {"0": torch.arange(3, dtype=torch.int32)[None]}
        self.session = Session(
            config, [layer], slots, max_num_requests=1, max_draft_tokens=2, max_drafts_per_request=2,
            logger=logging.getLogger("test"), shadow_blocks=SHADOW_BLOCKS if mode == "stage" else None,
        )  # fmt: skip
        starts, counts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        self.session.bind(Layout(slots, tables))
        self.window = Window(starts, counts, 2, torch.tensor([7], dtype=torch.int32))
        self.session.begin(Step, self.window, lambda: ([0, 3], [2]))
        self.write(KEYS)
        self.noting = Noting(self.session)
        self.session.subscribe(self.noting)
        assert bool(self.cache[1].any()) is (mode == "cow")

    def write(self, key: torch.Tensor, value: torch.Tensor = KEYS, *rest: Any) -> None:
        self.session.writer("layer")(None, key, value, self.cache, self.session.slot_mappings["0"], *rest)

    def own_writer(self, key: Any, value: Any, kv_cache: torch.Tensor, slots: torch.Tensor, *rest: Any) -> None:
        """vLLM's writer of the layer, in Python."""
        kv_cache.view(-1, 2, 16)[slots] = torch.cat([key, value], dim=-1)
        self.own_writes.append(rest)

    @property
    def drafts(self) -> torch.Tensor:
        return self.cache[1, 1:3]


def fails() -> None:
    raise RuntimeError("planted in a listener")


def test_drafts_are_undone_if_listener_raises() -> None:
    """The listener raises in the event of the forward, and in that of the cancellation."""
    step = Listened()
    session = step.session
    session.subscribe(Failing())
    with pytest.raises(RuntimeError, match="planted in a listener"):
        session.forwarded("before sampling")
    with pytest.raises(RuntimeError, match="planted in a listener"):
        session.close_interrupted()
    assert session.manager is not None
    assert session.manager.state is State.CLOSED
    assert not step.drafts.any()
    assert session.vanilla_steps["cancelled"] == 1


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_uncancellable_step_is_dropped(monkeypatch: pytest.MonkeyPatch, on_error: str) -> None:
    """A listener that waits for its end would mistake the next step for it."""
    step = Listened(on_error)
    monkeypatch.setattr(type(step.session.manager), "cancel", lambda _: fails())
    if on_error == "stop":
        with pytest.raises(RuntimeError, match="nwor: cancel failed: planted in a listener"):
            step.session.close_interrupted()
    else:
        step.session.close_interrupted()
        assert step.session.vanilla_steps["cancel failed"] == 1
    assert step.noting.heard == ["drop"]


@pytest.mark.parametrize("moment", ["write", "commit"])
def test_error_stops_engine_if_set(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    step = Listened("stop")
    session, manager = step.session, step.session.manager
    target = manager.writer("layer") if moment == "write" else manager
    monkeypatch.setattr(type(target), moment, lambda *_, **__: fails())
    calls: dict[str, Callable[[], None]] = {
        "write": lambda: step.write(KEYS),
        "commit": lambda: session.commit(lambda manager: manager.commit(SLOTS, SLOTS), lambda: [1]),
    }
    with pytest.raises(RuntimeError, match=f"nwor: {moment} failed: planted in a listener .VLLM_NWOR_ON_ERROR=cont"):
        calls[moment]()
    assert manager.state is State.CLOSED
    assert session.errors.counts == {}


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_unclosable_window_stops_engine(monkeypatch: pytest.MonkeyPatch, on_error: str) -> None:
    """The next step would undo the drafts that this step accepted."""
    step = Listened(on_error)
    monkeypatch.setattr(type(step.session.manager), "abandon", lambda _: fails())
    message = (
        "^nwor: commit failed: planted in a listener; then the window could not be closed: planted in a listener; "
        "drafts may be undone too late, and slots and block tables may name shadow pages, so the engine stops"
    )
    with pytest.raises(CannotContinue, match=message) as raised:
        step.session.commit(lambda _: fails(), lambda: [1])
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), CannotContinue)  # vLLM sends errors between processes
    assert step.session.errors.counts == {}


def test_failed_write_during_capture_stops_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay of that graph would leave out this layer."""
    step = Listened()
    step.session.close_interrupted()
    monkeypatch.setattr(session_module, "is_capturing", lambda _: True)
    monkeypatch.setattr(type(step.session.manager.writer("layer")), "write", lambda *_, **__: fails())
    with pytest.raises(CannotContinue, match=r"failed while a CUDA graph was captured: planted .* of layer layer"):
        step.write(KEYS)


def test_loaded_rows_without_copy_end_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention then reads the pages of the requests, where the connector put the rows."""
    step = Listened()
    session = step.session
    session._step = session._step._replace(new_states=[0])
    monkeypatch.setattr(type(session.manager), "refresh_shadow_pages", lambda _: fails())
    session.loaded()
    assert not session.in_window
    assert step.noting.heard == ["abandoned", "loaded"]
    assert session.vanilla_steps == session.errors.counts == {"load failed": 1}
    assert session.stats().abandoned == 1


def test_errors_of_the_manager_and_of_a_moved_cache(caplog: pytest.LogCaptureFixture) -> None:
    step = Listened()
    step.cache = step.cache.clone()
    step.write(2 * KEYS)
    assert step.drafts.all()
    step.session.begin(Step, step.window._replace(num_draft_tokens=-1), lambda: ([0, 3], [2]))
    assert step.session.vanilla_steps == step.session.errors.counts == {"write failed": 1, "begin failed": 1}
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "nwor: write failed: the KV cache of layer layer moved to another address after the engine started",
        "nwor: begin failed: begin: window must have 0 to 2 drafts (max_draft_tokens), got -1",
    ]


def test_undescribed_step_runs_without_window(caplog: pytest.LogCaptureFixture) -> None:
    """Only the first error of a reason is logged, with its trace."""
    step = Listened()
    for _ in range(3):
        step.session.begin(fails)
    assert step.session.vanilla_steps == {"cancelled": 1, "begin failed": 3}
    assert not step.drafts.any()
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == (
        "nwor: begin failed: planted in a listener; the engine goes on without the transaction in this step (further "
        "ones are counted, not logged)"
    )
    assert record.exc_info is not None


def test_failed_copy_of_request_states_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    states = v1.RequestStates(2, torch.device("cpu"))
    states.update(["a"])
    with monkeypatch.context() as patch:
        patch.setattr(v1, "numbers_on", lambda *_: fails())
        with pytest.raises(RuntimeError, match="planted"):
            states.update(["b", "a"])
    states.update(["b", "a"])
    assert states.tensor.tolist() == [states["b"], states["a"]]
    assert states["a"] != states["b"]


def test_skip_undoes_window_left_open() -> None:
    """The open window belongs to a step that failed. A step with a window undoes it in the same way."""
    step = Listened()
    step.session.skip()
    assert step.session.manager is not None
    assert step.session.manager.state is State.CLOSED
    assert not step.session.in_window
    assert not step.drafts.any()
    assert step.noting.heard == ["commit"]
    assert step.session.vanilla_steps["cancelled"] == 1


def test_listener_gets_inputs_and_written_rows() -> None:
    step = Listened()
    noting = step.noting
    key, value = 2 * KEYS, 3 * KEYS
    step.write(key, value, "a scale")
    [(name, *rows, slots, offset, rest)] = noting.recorded
    assert name == "layer"
    assert all(row is given for row, given in zip(rows, (key, value), strict=True))
    assert (slots.tolist(), offset, rest) == (SLOTS.tolist(), 0, ("a scale",))

    starts = torch.tensor([0, 1], dtype=torch.int32)
    step.session.close_interrupted()
    step.session.bind(Layout({"0": SLOTS}))
    window = Window(starts, torch.tensor([0], dtype=torch.int32), num_draft_tokens=0)
    step.session.begin(Step, window, lambda: ([0, 1], [0]))
    assert noting.begun == [([0, 1], [0], step.session.slot_mappings)]


@pytest.mark.parametrize("first", [0, 3])
def test_slots_outside_the_batch_are_refused(caplog: pytest.LogCaptureFixture, first: int) -> None:
    """A micro-batch gets a slice of the persistent buffer, here its elements 1 to 3."""
    step, buffer = Listened(), torch.cat([SLOTS[:1], SLOTS, SLOTS[:1]])
    session = step.session
    session.slot_mappings = {"0": buffer[1:4]}
    assert [session._token_offset("0", buffer[start:4]) for start in (1, 2, 3)] == [0, 1, 2]
    session.writer("layer")(None, KEYS[:2], KEYS[:2], step.cache, buffer[first : first + 2])
    message = f"write of layer 'layer': token_offset must be 0 to 1 for 2 of 3 tokens (max_num_tokens), got {first - 1}"
    assert message in caplog.text
    assert session.vanilla_steps == {"write failed": 1}


def test_own_writer_writes_outside_window() -> None:
    step = Listened()
    assert step.own_writes == []  # our kernel logged and wrote
    assert step.session.describe() == "1 layers (1 with the fused writer), 2 log rows, log 0.0 MiB"
    step.session.close_interrupted()
    step.write(2 * KEYS, KEYS, "a scale")
    assert step.own_writes == [("a scale",)]
    assert step.cache[1, 1, 0, 0] == 2


def test_logged_layer_is_written_by_own_writer() -> None:
    step = Listened(fused=False)
    assert step.own_writes == [()]
    assert step.drafts.all()
    step.session.close_interrupted()
    assert not step.drafts.any()


def test_own_writer_stages_drafts() -> None:
    """In mode stage, begin redirects the slots of the writer."""
    step = Listened(mode="stage")
    assert step.own_writes == [()]
    assert step.cache.flatten(1).any(1).nonzero().flatten().tolist() == [4]
    step.session.commit(lambda manager: manager.commit_rejected(torch.tensor([1], dtype=torch.int32)), lambda: [2])
    assert step.cache[1, :3, 0, 0].tolist() == [1, 1, 0]
    assert step.session.describe().startswith("1 layers; 4 of 7 blocks (57.1% of the cache, 4.0 MiB) are shadow pages")


def test_fused_writer_gets_scales_and_format() -> None:
    scales = torch.tensor([0.5]), torch.tensor([0.125])
    step = Listened(dtype=torch.uint8, kv_cache_dtype="fp8_e4m3", scales=lambda: scales)
    expected = torch.zeros_like(step.cache)
    ops.write_kv(KEYS, KEYS, expected[..., :8], expected[..., 8:], SLOTS, *scales, "fp8_e4m3")
    assert torch.equal(step.cache, expected)


def test_failed_commit_keeps_drafts() -> None:
    step = Listened()
    step.session.commit(lambda manager: fails(), lambda: [1])
    assert step.session.vanilla_steps["commit failed"] == 1
    assert step.noting.heard == ["commit"]
    assert step.drafts.all()
    assert step.session.stats().abandoned == 1


@pytest.mark.parametrize("works", [True, False])
def test_a_listener_gets_the_outcome_of_a_step(works: bool) -> None:
    """A call of `num_sampled` synchronizes with the device, so listeners get the function."""
    step = Listened()
    num_sampled = lambda: [1]  # noqa: E731 - compared by identity
    step.session.commit(
        lambda manager: manager.commit_rejected(torch.tensor([2], dtype=torch.int32)) if works else fails(), num_sampled
    )
    assert step.noting.commits == [(num_sampled, works)]


def test_a_session_without_a_transaction() -> None:
    cache = torch.zeros(3, 4, 2, 16)
    layer = TargetLayer("layer", "0", cache, LayerCache.packed(cache), lambda *_: None)
    config = NworConfig.load({"nwor": {"mode": "off"}})
    session = Session(config, [layer], {"0": SLOTS}, 1, 2, 2, shadow_blocks=None, logger=logging.getLogger("test"))
    assert session.describe() == "audits 1 layers, no transaction"
    assert session.stats() == Stats(0, 0, 0, 0, 0, 0, 0)
    session.skip()
    session.close_interrupted()
    assert session.manager is None


def test_sleeping_engine_keeps_counters() -> None:
    """vLLM releases the memory of the device's counters when the engine goes to sleep."""
    step = Listened()
    session = step.session
    assert session.manager is not None
    session.close_interrupted()
    before, counters = session.stats(), session.manager.buffers.counters
    assert before.drafted == 2
    assert session.counts(1, 2, 0, 2, 3)["vanilla_steps:more drafts than log rows"] == 3
    session.go_to_sleep()
    counters.fill_(99)  # released
    assert session.stats() == before
    counters.zero_()
    session.begin(Step, step.window, lambda: ([0, 3], [2]))
    assert session.counters is counters
