"""A server after errors of this package: ``/health``, answers and ``/metrics`` over HTTP.

``test_errors.py`` has more errors, in engines of a test's process.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import planted_server
import pytest
from engines import Engines, prompts
from processes import environment
from readme_serve import MAX_TOKENS
from tiny_serve import Server, running

PATIENCE_SECONDS = 60.0
SAID = "nwor: {} failed: planted in {}; the engine goes on"


def answers(server: Server, asked: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(server.complete, asked))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["cow", pytest.param("stage", marks=pytest.mark.nightly)])
def test_a_server_goes_on_after_errors_of_ours(engines: Engines, tmp_path: Path, mode: str) -> None:
    """It is healthy, its tokens are vanilla's, and its counters and log say what happened. After a step of vLLM that
    failed, vLLM ends the server, and its log has the error of the step."""
    asked = prompts(6)
    vanilla = engines.start(asked, max_tokens=MAX_TOKENS)
    planted_server.install(tmp_path / "plugin")
    variables = {"VLLM_NWOR_MODE": mode, planted_server.FOLDER_VARIABLE: str(tmp_path)}
    variables["PYTHONPATH"] = environment(tmp_path / "plugin")["PYTHONPATH"]
    errors, interrupted = (tmp_path / name for name in (planted_server.ERRORS, planted_server.INTERRUPTED))
    server = Server(variables)
    with running(server):
        errors.touch()
        while_they_last = answers(server, asked)
        server.get("/health")
        errors.unlink()
        assert [while_they_last, answers(server, asked)] == 2 * [vanilla.result()["tokens"]]
        check_counts(server, tmp_path, mode)
        server.get("/health")
        interrupted.touch()
        with pytest.raises(OSError, match=r"HTTP Error 50[03]|Connection reset|closed connection"):
            server.complete(asked[0])
        check_it_ends(server)


def check_counts(server: Server, folder: Path, mode: str) -> None:
    """The counters are those of the planted errors, and nothing keeps one."""
    totals = server.metrics_at_rest()
    found = planted_server.found(folder)
    planted = found["planted"]
    assert found["alive"] == 0
    assert set(planted) == {"begin failed", "commit failed", "sending counters failed"} | (
        {"write failed"} if mode == "cow" else set()
    )
    samples = server.scrape()
    counted = {dict(labels)["reason"]: value for labels, value in samples["nwor_errors_total"].items()}
    assert counted == planted
    of_steps = {reason: number for reason, number in planted.items() if "counters" not in reason}
    steps = samples["nwor_vanilla_steps_total"]
    assert {dict(labels)["reason"]: value for labels, value in steps.items()} == of_steps
    assert totals["nwor_abandoned_windows_total"] == sum(of_steps.values()) - of_steps["begin failed"]
    assert totals["nwor_windows_total"] > sum(of_steps.values())
    for reason in of_steps:
        what = reason.removesuffix(" failed")
        methods = ("write", "log") if what == "write" else (what,)  # log: vLLM's writer is used, as with AMX
        assert sum(server.log.count(SAID.format(what, method)) for method in methods) == 1, reason


def check_it_ends(server: Server) -> None:
    """vLLM says that it is not healthy, or no longer listens; then it ends."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.alive():
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError):
            server.get("/health")
            pytest.fail("a server whose engine has ended is healthy")
        time.sleep(0.1)
    assert SAID.format("cancel", "cancel") in server.log
    assert "planted in forward" in server.log
