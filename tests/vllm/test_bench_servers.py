"""``nwor-ops bench`` with vLLM: refusals before any server starts; nightly, whole runs with two real servers."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import pytest
from engines import ENVIRONMENT, NGRAM, Engines, model_folder
from tiny_models import write_served_llama

from nwor_ops.cli.bench import BenchOptions, Client, memory_arguments, prepare
from nwor_ops.cli.bench_report import OURS, SIDES, VANILLA
from nwor_ops.cli.report import Exit, Stopped
from nwor_ops.vllm.check import configure, look

SPECULATION = ("--speculative-config", json.dumps(NGRAM))
ONE_DRAFT = f"--speculative-config '{json.dumps(NGRAM | {'num_speculative_tokens': 1})}'"
ARGUMENTS = ("--max-num-seqs", "4", "--enforce-eager")


def prepared(arguments: list[str], feature: str, **changes: Any) -> tuple[str, str, list[str]]:
    """Return the outcome, the message and, if nothing is refused, the arguments of each server's memory."""
    before = dict(os.environ)
    options = BenchOptions(feature, tuple(arguments), pathlib.Path("."), **changes)
    try:
        memory = memory_arguments(options, prepare(options))
    except Stopped as stopped:
        return stopped.code.name, str(stopped), []
    finally:
        assert dict(os.environ) == before
    return "", "", memory


def reasons(arguments: list[str]) -> dict[str, str]:
    return {
        feature["feature"]: feature["reasons"][0]["why"]
        for feature in look(configure(arguments))["features"]
        if feature["reasons"]
    }


def refused_tokenizer() -> str:
    model = configure([model_folder()]).model_config
    with tempfile.TemporaryDirectory() as folder, pytest.raises(Stopped) as caught:
        Client((), model, pathlib.Path(folder) / "client.log")
    return str(caught.value)


def refusals() -> list[tuple[str, str, list[str]]]:
    """Try several engines in one process, which imports vLLM once."""
    model, whole = [model_folder(), *ARGUMENTS, *SPECULATION], ["--gpu-memory-utilization", "0.7"]
    return [
        prepared(model, "draft_graphs"),
        prepared(model, "chunk"),
        prepared(model, "draft_vocabulary"),
        prepared([model_folder()], "cow"),
        prepared([*model, "--enforce-eager", "--max-num-seqs", "none"], "cow"),
        prepared(["/nonexistent/model"], "cow"),
        prepared([*model, "--config", "missing.yaml"], "cow"),
        prepared([*model, *whole], "stage"),
        prepared([*model, *whole], "stage", restart=True),
    ]


def test_refusals_come_before_a_server_starts(engines: Engines) -> None:
    """The engine of a CPU has only the transaction. Both servers share the memory unless they start in turn."""
    why = engines.submit(reasons, [model_folder(), *ARGUMENTS, *SPECULATION]).result()
    answers = engines.submit(refusals).result()
    tokenizer = engines.submit(refused_tokenizer).result()
    assert tokenizer.startswith(f"the client needs a tokenizer: {model_folder()}: ")
    expected = [
        (Exit.REFUSED, f"draft graphs will be refused: {why['draft graphs']}"),
        (Exit.REFUSED, f"recurrent will be refused: {why['recurrent']}"),
        (Exit.REFUSED, f"draft vocabulary will be refused: {why['draft vocabulary']}"),
        (Exit.REFUSED, "cow will be refused: the engine does not speculate (--speculative-config)"),
        (Exit.INVALID, "an argument is unknown or malformed"),
        (Exit.ENGINE, "there is no folder /nonexistent/model"),
        (Exit.ENGINE, ""),
    ]
    for (outcome, message, _), (code, sentence) in zip(answers, expected, strict=False):
        assert outcome == code.name
        assert message.startswith(sentence)
    assert "missing.yaml" in answers[6][1]
    assert answers[len(expected) :] == [("", "", ["--gpu-memory-utilization", "0.35"]), ("", "", [])]


# ---------------------------------------------------------------- two real servers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_served_llama(tmp_path_factory.mktemp("bench") / "model")


def command(model: str, output: pathlib.Path, *options: str) -> list[str]:
    client = "--random-input-len 32 --random-output-len 48"
    traffic = ("--seconds", "0.1", "--client-args", client, "--output", str(output), "--json")
    words = [sys.executable, "-m", "nwor_ops", "bench", "cow", *traffic, *options]
    return [*words, "--", model, *ARGUMENTS, *SPECULATION]


def bench(model: str, output: pathlib.Path, *options: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        command(model, output, *options), env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.nightly
def test_two_servers_are_compared(engines: Engines, model: str, tmp_path: pathlib.Path) -> None:
    code, result, _ = bench(model, tmp_path, "--requests", "1,2", "--rounds", "6")
    assert (code, result["exit_code"], result["feature"]) == (0, 0, "cow")
    assert [load["requests"] for load in result["loads"]] == [1, 2]
    for load in result["loads"]:
        drafted = [[(run["drafts"], run["accepted"]) for run in load["runs"][side]] for side in SIDES]
        assert drafted[0] == drafted[1]  # greedy, so both sides make the same tokens
        assert len({*drafted[0]}) > 1, "rounds have different prompts"
        assert all(run["output_tokens"] == 48 * run["prompts"] for side in SIDES for run in load["runs"][side])
        assert load["obstacle"] is None
        assert len(load["ratio"]["rounds"]) == 6
    assert "nwor: active, mode cow" in (tmp_path / f"{OURS}.log").read_text()
    assert "nwor: " not in (tmp_path / f"{VANILLA}.log").read_text()
    assert json.loads((tmp_path / "result.json").read_text()) == result


@pytest.mark.nightly
def test_interrupt_stops_the_servers(engines: Engines, model: str, tmp_path: pathlib.Path) -> None:
    import psutil

    process = subprocess.Popen(
        command(model, tmp_path),
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not (tmp_path / f"{VANILLA}.log").exists() or len(psutil.Process(process.pid).children(True)) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == Exit.INTERRUPTED, errors
    assert json.loads(printed)["error"] == "interrupted"
    assert "waiting for the servers to end" in errors
    _, left = psutil.wait_procs(children, timeout=60)
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
