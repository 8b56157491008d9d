"""The patches of the V2 runner, on a runner that acts in the same order as in vLLM (v2_runner.py).

vLLM's CPU engine has only V1. tests/gpu/vllm covers the real V2 runner.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from v2_runner import ADAPTIVE_BATCH, ADAPTIVE_SLOTS, SCHEDULER_OUTPUT, SLOTS, TABLE, AdaptiveRunner, Runner

from nwor_ops.vllm.audit.engine import cache_audit
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction.runners.v2 import V2

MODES = pytest.mark.parametrize("mode", ["cow", "stage"])


@MODES
@pytest.mark.parametrize("audit", [False, True])
def test_accepted_drafts_stay_and_rejected_ones_go(audit: bool, mode: str) -> None:
    runner = Runner(audit, mode)
    runner.execute_model(SCHEDULER_OUTPUT)
    assert runner.written() == [mode == "cow"] * 3
    assert runner.sample_tokens(None) == "output"
    assert runner.written() == [True, True, False]
    assert runner.told == [True, True, False]
    assert runner.drafted_with == [SLOTS, TABLE]
    stats = runner.session.stats()
    assert (stats.drafted, stats.accepted, stats.rejected, stats.cancelled) == (2, 1, 1, 0)


@MODES
@pytest.mark.parametrize("audit", [False, True])
def test_accepted_drafts_stay_if_the_drafter_fails(audit: bool, mode: str) -> None:
    """vLLM has already counted the accepted drafts."""
    runner = Runner(audit, mode)
    runner.failure = ValueError("drafter")
    runner.execute_model(SCHEDULER_OUTPUT)
    with pytest.raises(ValueError, match="drafter"):
        runner.sample_tokens(None)
    assert runner.written() == [True, True, False]
    stats = runner.session.stats()
    assert (stats.drafted, stats.accepted, stats.rejected, stats.cancelled) == (2, 1, 1, 0)


def test_failure_of_step_propagates(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner(audit=False)
    runner.execute_model(SCHEDULER_OUTPUT)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(runner.session.manager, "cancel", fail)
    monkeypatch.setattr(runner, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.sample_tokens(None)
    assert "nwor: cancel failed: the device is lost" in caplog.text


def test_adaptive_batch_equals_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's manager of adaptive verification creates it. The counts of host and device differ."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as vllms

    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: None)
    monkeypatch.setattr(vllms, "CpuGpuBuffer", functools.partial(vllms.CpuGpuBuffer, pin_memory=False))
    monkeypatch.setattr(vllms, "_assign_draft_token_budget_compiled", vllms._assign_draft_token_budget)
    states = SimpleNamespace(
        device=torch.device("cpu"),
        num_speculative_steps=2,
        max_num_reqs=2,
        req_id_to_index={"a": 0, "b": 1},
        num_computed_tokens_np=numpy.array([2, 0]),
        prefill_len=SimpleNamespace(np=numpy.array([2, 0])),
    )
    starts = torch.zeros(3, dtype=torch.int32)
    manager = vllms.AdaptiveVerificationManager(states, starts, num_bonus_tokens=1, max_total_logits=16)
    # The device's confidence in each draft, which the host does not know yet. Five tokens cost as much as one.
    manager._confidence_probs[:] = torch.tensor([[0.5, 0.1], [0.9, 0.8]])
    manager.cost_tables = numpy.ones(3), numpy.array([1.0] * 6 + [100.0])
    scheduled, drafts = {"a": 3, "b": 3}, {"a": [-1] * 2, "b": [-1] * 2}
    assert manager.get_num_tokens(scheduled, drafts) == 5

    per_request = numpy.array([2, 2], dtype=numpy.int32)
    counts, _ = manager.compact_batch(per_request, numpy.array([3, 3], dtype=numpy.int32), numpy.array([0, 3, 6]))
    cu_num_logits, query_start_loc, num_drafts, *_ = manager.reallocate_drafts(["a", "b"], torch.tensor([0, 1]))
    batch = ADAPTIVE_BATCH
    assert numpy.cumsum([0, *counts]).tolist() == batch.query_start_loc_np.tolist() == [0, 3, 5]
    assert query_start_loc.tolist() == batch.query_start_loc.tolist() == [0, 2, 5]
    assert cu_num_logits.tolist() == batch.cu_num_logits.tolist()
    assert num_drafts == batch.num_draft_tokens
    assert per_request.tolist() == batch.num_draft_tokens_per_req.tolist()


@MODES
@pytest.mark.parametrize("audit", [False, True])
def test_adaptive_verification_uses_the_device_s_counts(audit: bool, mode: str) -> None:
    """The transaction uses the counts of the device, and so does the audit, which counts on the host."""
    runner = AdaptiveRunner(audit, mode)
    runner.execute_model(SCHEDULER_OUTPUT)
    assert runner.sample_tokens(None) == "output"
    written = runner.kv_cache.flatten(0, 1)[ADAPTIVE_SLOTS, 0, 0] == 1
    assert written.tolist() == [True, False, True, True, False]
    stats = runner.session.stats()
    assert (stats.drafted, stats.accepted, stats.rejected, stats.cancelled) == (3, 1, 2, 0)
    if audit:
        found = cache_audit(runner.session).summary()
        assert (found["drafted"], found["accepted"], found["rejected"], found["stale_rows"]) == (3, 1, 2, 0)


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
    runner = Runner(audit=False)
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
