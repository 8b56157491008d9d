"""The patches of the V2 runner, on a runner that acts in the same order as in vLLM (page_machine.py).

vLLM's CPU engine has only V1. tests/gpu/vllm covers the real V2 runner.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from page_machine import Part, Request, V2Runner

from nwor_ops.vllm.audit.engine import cache_audit
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction.runners.v2 import V2

MODES = pytest.mark.parametrize("mode", ["cow", "stage"])
AUDIT = pytest.mark.parametrize("audit", [False, True])


class DraftingRunner(V2Runner):
    """A request with four tokens runs a step of a token and two drafts, of which the first is accepted."""

    failure: BaseException | None = None

    def __init__(self, mode: str, audit: bool = False) -> None:
        super().__init__(mode, audit)
        request = Request("a", 4, blocks=[1, 3])
        self.run([Part(request, 4, 0, 0)], fails=False)
        self.advance()
        self.step = [Part(request, 1, 2, 1)]

    def draft(self) -> None:
        """Use the slots of the step for other rows."""
        self.told = self.rows
        self.drafted_with = self.slots[0, :3].tolist(), self.table[0, :2].tolist()
        self.slots.fill_(9)
        if self.failure is not None and self.parts is self.step:
            raise self.failure

    def forward(self) -> None:
        super().forward()
        self.seen = self.rows

    @property
    def rows(self) -> list[bool]:
        """Whether the pages of the request have the rows of its token and of both drafts."""
        return (self.kv_cache[3, :3, 0, 0] != 0).tolist()


@MODES
@AUDIT
def test_accepted_drafts_stay_and_rejected_ones_go(audit: bool, mode: str) -> None:
    runner = DraftingRunner(mode, audit)
    runner.run(runner.step, fails=False)
    assert runner.seen == [mode == "cow"] * 3
    assert runner.told == [True, True, False]
    assert runner.drafted_with == ([12, 13, 14], [1, 3])
    stats = runner.session.stats()
    assert (stats.drafted, stats.accepted, stats.rejected, stats.cancelled) == (2, 1, 1, 0)


@MODES
def test_accepted_drafts_stay_if_drafter_fails(mode: str) -> None:
    """vLLM has already counted the accepted drafts."""
    runner = DraftingRunner(mode)
    runner.failure = ValueError("drafter")
    with pytest.raises(ValueError, match="drafter"):
        runner.run(runner.step, fails=False)
    assert runner.rows == [True, True, False]
    stats = runner.session.stats()
    assert (stats.drafted, stats.accepted, stats.rejected, stats.cancelled) == (2, 1, 1, 0)


def test_failure_of_step_propagates(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runner = DraftingRunner("cow")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(runner.session.manager, "cancel", fail)
    monkeypatch.setattr(runner, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run(runner.step, fails=False)
    assert "nwor: cancel failed: the device is lost" in caplog.text


@MODES
@AUDIT
def test_adaptive_verification_uses_counts_of_device(audit: bool, mode: str) -> None:
    """The host knows only the total number of drafts. So the audit asks the device too."""
    runner = V2Runner(mode, audit)
    a, b = Request("a", 2, blocks=[1]), Request("b", 1, blocks=[2])
    runner.run([Part(a, 2, 0, 0), Part(b, 1, 0, 0)], fails=False)
    runner.advance()
    runner.adaptive_verification = object()
    runner.run([Part(a, 1, 1, 0), Part(b, 1, 2, 1)], fails=False)
    assert (runner.kv_cache[1:3, :, 0, 0] != 0).tolist() == [[True, True, True, False]] * 2
    stats = runner.session.stats()
    assert (stats.drafted, stats.accepted, stats.rejected, stats.cancelled) == (3, 1, 2, 0)
    if audit:
        summary = cache_audit(runner.session).summary()
        assert {name: summary[name] for name in ("drafted", "accepted", "rejected", "stale_rows")} == {
            "drafted": 3, "accepted": 1, "rejected": 2, "stale_rows": 0,
        }  # fmt: skip


def _attachment(speculator: Any, sampled: int = 1, cached: tuple[str, ...] = (), **methods: bool) -> V2:
    """The target has the layer "target.0". ``cached`` are the other layers that have a cache."""
    config = SimpleNamespace(
        method="any",
        **{name: lambda: False for name in ("use_ngram", "uses_draft_model", "use_dflash", "use_dspark")}
        | {name: lambda: True for name in methods},
    )
    target, group = torch.nn.Identity(), SimpleNamespace(layer_names=["target.0", *cached])
    return V2(
        SimpleNamespace(
            speculator=speculator,
            speculative_config=config,
            model_state=SimpleNamespace(num_new_sampled_tokens_per_step=sampled),
            get_model=lambda: target,
            kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
            compilation_config=SimpleNamespace(
                static_forward_context={"target.0": target, **{name: torch.nn.Identity() for name in cached}}
            ),
        )
    )


def test_layers_that_a_drafter_names_are_used() -> None:
    named = SimpleNamespace(draft_attn_layer_names={"mtp.0"})
    assert _attachment(named, cached=("mtp.0",)).drafter_layers() == {"mtp.0"}
    # A draft model without attention has no layers; neither does a drafter without a model.
    assert _attachment(SimpleNamespace(draft_attn_layer_names=set())).drafter_layers() == set()
    assert _attachment(SimpleNamespace()).drafter_layers() == set()
    assert _attachment(None).drafter_layers() == set()


def test_a_drafter_with_unnamed_layers_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"mtp\.0"):
        _attachment(SimpleNamespace(), cached=("mtp.0",)).drafter_layers()
    with pytest.raises(Unsupported, match=r"names layers target\.0 as its own, which are in the target's model"):
        _attachment(SimpleNamespace(attn_layer_names=["target.0"])).drafter_layers()
    assert _attachment(SimpleNamespace(attn_layer_names=None)).drafter_layers() == set()
    with pytest.raises(Unsupported, match="samples 0 new tokens for each request and step"):
        _attachment(SimpleNamespace(), sampled=0).drafter_layers()


def test_drafter_with_own_batches_borrows_nothing() -> None:
    assert _attachment(SimpleNamespace()).drafter_borrows
    for method in ("use_ngram", "uses_draft_model", "use_dflash", "use_dspark"):
        assert not _attachment(SimpleNamespace(), **{method: True}).drafter_borrows


def test_which_blocks_a_batch_names() -> None:
    """Only the rows of requests in the batch are returned, up to their length, with the number of tokens computed
    before it."""
    named = torch.tensor([[1, 2, 9], [3, 9, 9], [4, 5, 6]], dtype=torch.int32)
    numbers = numpy.array([[0, 0, 0], [2, 1, 3]])
    runner = V2Runner("cow", audit=False)
    runner.block_tables.block_tables = [SimpleNamespace(gpu=None), SimpleNamespace(gpu=named)]
    runner.block_tables.num_blocks = SimpleNamespace(np=numbers)
    attachment = V2(runner)
    attachment._batch = SimpleNamespace(
        num_reqs=2,
        query_start_loc=torch.tensor([0, 5, 6, 6], dtype=torch.int32),
        seq_lens=torch.tensor([12, 8, 0], dtype=torch.int32),
        idx_mapping_np=numpy.array([2, 0]),
    )
    assert list(attachment.table_rows("1")) == [(7, [4, 5, 6]), (7, [1, 2])]
