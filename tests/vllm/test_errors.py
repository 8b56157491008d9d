"""The behaviour of an engine after an error of this package: rows of the table in docs/operate.md, on real engines.

Draft graphs and recurrent states need CUDA: ``tests/gpu/vllm/test_errors_gpu.py``. Their tests on the CPU are in
``test_draft_graphs.py`` and ``test_recurrent_engine.py``.
"""

from __future__ import annotations

import gc
import logging
import os
import re
from collections import Counter
from typing import Any

import pytest
from engine_child import describe_session
from engines import ENGINE, ENVIRONMENT, SMALL, Engines, model_folder, prompts, receive_last_counts, run_requests
from planted_errors import Fault, Lines, Planted

MAX_TOKENS = 40
BLOCK = ENGINE["block_size"]
BEGIN, WRITE, COMMIT = "begin failed", "write failed", "commit failed"
CANCEL = "cancel failed"
SEND = "sending counters failed"


def _faults(mode: str) -> list[Fault]:
    """Return faults of every moment of a step, before its launches and between them, and of the metrics."""
    from nwor_ops import DraftCommitManager
    from nwor_ops.transaction import manager
    from nwor_ops.transaction.writer import LayerWriter
    from nwor_ops.vllm.metrics.publisher import Publisher
    from nwor_ops.vllm.transaction.runners.v1 import V1

    begin = {"cow": "begin_bound", "stage": "begin_redirected_bound"}[mode]
    return [
        Fault(V1, "_step", 11, BEGIN),
        Fault(DraftCommitManager, "begin", 9, BEGIN),
        Fault(manager, begin, 10, BEGIN, after=True),
        Fault(LayerWriter, "write", 7, WRITE),
        Fault(LayerWriter, "log", 7, WRITE),  # if vLLM's writer is used
        Fault(DraftCommitManager, "commit", 6, COMMIT),
        Fault(manager, "commit_tokens_bound", 8, COMMIT, after=True),
        Fault(Publisher, "_start_copy", 3, SEND),
        Fault(Publisher, "_message", 5, SEND),
    ]


def _job(settings: dict[str, Any], requests: list[list[int]]) -> dict[str, Any]:
    """Run the requests with faults, and again without."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    import nwor_ops
    from nwor_ops.vllm.audit.engine import cache_audit
    from nwor_ops.vllm.metrics import publisher, relay
    from nwor_ops.vllm.transaction.session import Step

    publisher.PERIOD = 0.0
    llm = LLM(**settings)
    lines = Lines()
    logging.getLogger("vllm").addHandler(lines)
    [session] = nwor_ops.vllm.sessions()
    planted = Planted(_faults(session.mode))
    rounds = [run_requests(llm, requests, MAX_TOKENS)]
    planted.remove()
    during, vanilla_steps = session.stats(), dict(session.vanilla_steps)
    rounds.append(run_requests(llm, requests, MAX_TOKENS))
    receive_last_counts(llm)
    [received] = relay._received.values()
    exact = nwor_ops.stats()
    alive = planted.alive()  # collects garbage
    return {
        "tokens": rounds,
        "planted": dict(planted.counts),
        "alive": alive,
        "steps": sum(isinstance(thing, Step) for thing in gc.get_objects()),
        "vanilla_steps": vanilla_steps,
        "during": during.as_dict(),
        "after": session.stats().as_dict(),
        "audit": cache_audit(session).summary(),
        "vanilla_steps_after": dict(session.vanilla_steps),
        "errors": dict(session.errors.counts),
        "stats": exact.errors,
        "received": {name.removeprefix("errors:"): n for name, n in received.items() if name.startswith("errors:")},
        "drafted": [exact.drafted, received["drafted"]],
        "lines": lines.lines,
    }


def _settings(**nwor: Any) -> dict[str, Any]:
    return ENGINE | {"model": model_folder(**SMALL), "additional_config": {"nwor": nwor}}


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_engine_goes_on_after_our_errors(engines: Engines, mode: str) -> None:
    """Tokens are vanilla's, every other step is a transaction, and counters and log say what happened."""
    requests = prompts(20)
    vanilla = engines.start(requests, max_tokens=MAX_TOKENS, model=model_folder(**SMALL))
    found = engines.submit(_job, _settings(mode=mode, audit=True), requests).result()
    assert found["tokens"] == 2 * [vanilla.result()["tokens"]]
    planted = Counter(found["planted"])
    metrics = {SEND: planted.pop(SEND)}
    assert set(planted) == {BEGIN, COMMIT} | ({WRITE} if mode == "cow" else set())
    assert min(*planted.values(), *metrics.values()) > 1
    assert found["vanilla_steps"] == found["vanilla_steps_after"] == found["errors"] == planted
    assert found["stats"] == found["received"] == planted + Counter(metrics)
    assert found["drafted"] == [after_drafted := found["after"]["drafted"], after_drafted]
    during, after, audit = found["during"], found["after"], found["audit"]
    assert during["abandoned"] == planted.total() - planted[BEGIN]
    # Rows of drafts stayed in the steps that failed. The audit compared all others, and every row outside of drafts.
    assert audit["stale_rows"] > 0
    assert audit["rejected"] > audit["stale_rows"]
    # The second time nothing failed, and every step with drafts was a transaction.
    assert after["abandoned"] == during["abandoned"]
    assert after["windows"] > during["windows"] > 0
    # Nothing keeps an error, with the tensors of its frames, or a step.
    assert (found["alive"], found["steps"]) == (0, 0)
    errors = [line for level, line in found["lines"] if level == "ERROR"]
    said = [re.match(r"nwor: ([\w ]+): planted in \w+; the engine goes on", line) for line in errors]
    assert sorted(match[1] for match in said if match) == sorted({**planted, **metrics})


def _failing_job(settings: dict[str, Any], requests: list[list[int]], stays_open: bool) -> str:
    """Fail in a commit, and perhaps again while the window is closed. Return the error of the engine."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    from nwor_ops import DraftCommitManager

    llm = LLM(**settings)
    faults = [Fault(DraftCommitManager, "commit", 5, COMMIT)]
    if stays_open:
        faults.append(Fault(DraftCommitManager, "abandon", 1, ""))
    Planted(faults)
    try:
        run_requests(llm, requests, MAX_TOKENS)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_engine_stops_on_request_or_if_unsafe(engines: Engines) -> None:
    """By the setting, and, with any setting, after an error after which shadow pages may be in block tables."""
    stop, unsafe = (
        engines.submit(_failing_job, _settings(mode="cow", on_error="stop"), prompts(4), False),
        engines.submit(_failing_job, _settings(mode="stage"), prompts(4), True),
    )
    assert stop.result() == (
        "nwor: commit failed: planted in commit (VLLM_NWOR_ON_ERROR=continue goes on without the transaction in this "
        "step)"
    )
    assert re.fullmatch(
        "nwor: commit failed: planted in commit; then the window could not be closed: planted in abandon; .* shadow "
        "pages, so the engine stops, whatever VLLM_NWOR_ON_ERROR says",
        unsafe.result(),
    )


# ---------------------------------------------------------------- after a step of vLLM that failed


def _error_of_a_run(llm: Any, requests: list[list[int]]) -> str:
    """Return the error of a step of vLLM, and abort all requests: vLLM does not repeat a step that failed."""
    error = ""
    try:
        run_requests(llm, requests, MAX_TOKENS)
    except RuntimeError as raised:
        error = str(raised)
    llm.llm_engine.abort_request([str(index) for index in range(len(requests))])
    return error


def _interrupted_job(settings: dict[str, Any], requests: list[list[int]]) -> dict[str, Any]:
    """Fail in two forwards of vLLM, after every layer has written, and in the cancel of the second window. Run the
    requests again."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM

    import nwor_ops

    llm = LLM(**settings)
    lines = Lines()
    logging.getLogger("vllm").addHandler(lines)
    [session] = nwor_ops.vllm.sessions()
    context = llm.llm_engine.model_executor.driver_worker.worker.model_runner.compilation_config.static_forward_context
    forward = Planted([Fault(list(context.values())[-1].impl, "forward", 12, "")])

    def counts() -> dict[str, Any]:
        return describe_session(session) | {"errors": dict(nwor_ops.stats().errors)}

    errors, moments = [_error_of_a_run(llm, requests)], [counts()]
    planted = Planted([Fault(nwor_ops.DraftCommitManager, "cancel", 1, CANCEL)])
    errors.append(_error_of_a_run(llm, requests))
    planted.remove()
    forward.remove()
    moments.append(counts())
    tokens = run_requests(llm, requests, MAX_TOKENS)
    return {
        "run_errors": errors,
        "planted": dict(planted.counts),
        "alive": planted.alive(),
        "moments": [*moments, counts()],
        "tokens": tokens,
        "lines": lines.lines,
    }


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_failed_forwards_leave_no_draft(engines: Engines, mode: str) -> None:
    """The window is cancelled in the step that failed, and the audit compares that. If cancel fails, the error is still
    the step's own. Its drafts belong to no sequence: tokens of later requests are vanilla's."""
    requests = prompts(20)
    vanilla = engines.start(requests, max_tokens=MAX_TOKENS, model=model_folder(**SMALL))
    found = engines.submit(_interrupted_job, _settings(mode=mode, audit=True), requests).result()
    assert found["run_errors"] == ["planted in forward"] * 2
    assert found["tokens"] == vanilla.result()["tokens"]
    cancelled, during, after = found["moments"]
    assert (cancelled["vanilla_steps"], cancelled["errors"]) == ({"cancelled": 1}, {})
    assert (cancelled["stats"]["abandoned"], cancelled["stats"]["cancelled"]) == (0, 1)
    assert cancelled["stats"]["rejected"] == cancelled["audit"]["rejected"] > 0
    assert cancelled["audit"]["stale_rows"] == 0
    assert cancelled["audit"]["steps"] == 12
    assert found["planted"] == {CANCEL: 1}
    for moment in (during, after):
        assert moment["vanilla_steps"] == {"cancelled": 1, CANCEL: 1}
        assert moment["errors"] == {CANCEL: 1}
        assert (moment["stats"]["abandoned"], moment["stats"]["cancelled"]) == (1, 1)
    assert after["stats"]["windows"] > during["stats"]["windows"]
    assert found["alive"] == 0
    assert [line.partition(";")[0] for level, line in found["lines"] if level == "ERROR"] == [
        f"nwor: {CANCEL}: planted in cancel"
    ]
