"""A pipeline rank that does not sample: its windows are deferred until the last rank's outcome arrives.

pipeline_rank.py has its runner, its scheduler and the expected cache. (The real classes need two GPUs: tests/gpu/vllm.)
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_rank import Engine

from nwor_ops.transaction.in_flight import InFlightManager
from nwor_ops.transaction.writer import LayerWriter
from nwor_ops.vllm.audit.cache import AuditError
from nwor_ops.vllm.audit.engine import cache_audit


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("audit", [True, False], ids=["audited", "plain"])
@pytest.mark.parametrize("defers", [True, False], ids=["grammars", "no grammar"])
def test_a_rank_keeps_accepted_rows(ranks: int, audit: bool, defers: bool) -> None:
    totals = dict.fromkeys(("drafted", "accepted", "rejected"), 0)
    known = 0
    for seed in range(4):
        engine = Engine(ranks, seed, audit, defers)
        engine.run(60)
        engine.run(ranks + 1, idle=True)
        session = engine.runner.session
        known += engine.known
        assert torch.equal(engine.runner.kv_cache, engine.runner.should)
        stats = session.stats().as_dict()
        assert stats["drafted"] == stats["accepted"] + stats["rejected"] > 0
        assert session.manager._deferred == {}
        for name in totals:
            totals[name] += stats[name]
        if audit:
            summary = cache_audit(session).summary()
            assert {name: summary[name] for name in totals} == {name: stats[name] for name in totals}
            assert summary["exposed_rows"] > 0
            assert summary["stale_rows"] == 0
    assert totals["accepted"] > 50
    assert totals["rejected"] > 50
    assert (known > 0) == (
        defers and ranks > 2
    )  # with two ranks, the one deferred window follows every deferred sampling


def test_a_row_that_is_not_undone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit raises if the drafts of a request that ended stay."""
    monkeypatch.setattr(InFlightManager, "undo", lambda *_: None)
    engine = Engine(2, seed=0)
    with pytest.raises(AuditError, match=r"when requests ended, nwor audit, step .* differ from the expected"):
        engine.run(60)


def test_an_undo_that_fails_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts of that step stay, and nothing is settled when its outcome arrives."""
    failed = 0

    def fails(*_: Any) -> None:
        nonlocal failed
        failed += 1
        raise RuntimeError("planted in undo")

    monkeypatch.setattr(InFlightManager, "undo", fails)
    engine = Engine(2, seed=0)
    engine.run(60)
    engine.run(3, idle=True)
    session = engine.runner.session
    assert failed > 0
    assert session.vanilla_steps["undo failed"] == session.stats().abandoned == failed
    assert session.manager._deferred == {}


@pytest.mark.parametrize(("owner", "moment"), [(InFlightManager, "begin"), (LayerWriter, "write")])
def test_vanilla_step_is_no_finding(monkeypatch: pytest.MonkeyPatch, owner: type, moment: str) -> None:
    """Every draft of such a step stays. The audit still compares all other rows."""
    planned, calls = getattr(owner, moment), 0

    def fails_now_and_then(*arguments: Any, **options: Any) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            raise RuntimeError(f"planted in {moment}")
        planned(*arguments, **options)

    monkeypatch.setattr(owner, moment, fails_now_and_then)
    engine = Engine(2, seed=0)
    engine.run(60)
    engine.run(3, idle=True)
    session = engine.runner.session
    assert session.vanilla_steps[f"{moment} failed"] == calls // 5 > 2
    assert session.manager._deferred == {}
    summary, stats = cache_audit(session).summary(), session.stats()
    assert (summary["accepted"], summary["rejected"]) == (stats.accepted, stats.rejected), "of the others alone"
    assert stats.rejected > 0


def test_early_request_is_settled_first() -> None:
    """vLLM never does this: its scheduler waits as many steps as there are ranks."""
    engine = Engine(3, seed=1)
    while not engine.runner.session.manager._deferred:
        engine.step()
    number = len(engine.steps) - 1
    engine.runner.attachment._rank.schedule(engine.steps[number][0].req_ids)
    assert engine.runner.session.manager._deferred == {}
    engine._settle(number)
    assert torch.equal(engine.runner.kv_cache, engine.runner.should)


@pytest.mark.parametrize("how", ["empty step", "outcome here"])
def test_rows_that_a_paused_engine_knows_are_kept(how: str) -> None:
    """The engine takes results without scheduling, so accepted drafts may be in the prefix cache when a
    request ends."""
    engine = Engine(2, seed=3)
    while True:
        engine.step()
        batch = engine.steps[-1][0]
        if engine.runner.session.manager._deferred and max(batch.drafts) > 0:
            break
    number, names = len(engine.steps) - 1, set(batch.req_ids)
    engine._settle(number - 1)
    step = engine.runner.attachment._rank._deferred_steps[-1]
    step.received.event.happened = how == "outcome here"
    tokens = 0 if how == "empty step" else 1
    engine.runner.pp_handler.get_prev_sampled_outputs()
    engine.runner.finish_requests(
        SimpleNamespace(
            finished_req_ids=names,
            preempted_req_ids=None,
            total_num_scheduled_tokens=tokens,
            pending_structured_output_tokens=False,
        )
    )
    engine._settle(number)
    assert torch.equal(engine.runner.kv_cache, engine.runner.should)
    assert engine.runner.session.stats().accepted > 0
