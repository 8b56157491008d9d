"""``nwor-ops bench`` with vLLM: refusals before any server starts; nightly, whole runs with two real servers."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from engines import ENVIRONMENT, NGRAM, Engines, model_folder
from tiny_models import write_served_llama

from nwor_ops.cli.bench import Outcome, Stopped, _prepare, memory_arguments
from nwor_ops.cli.bench_client import Client
from nwor_ops.cli.bench_options import OURS, SIDES, VANILLA, BenchOptions
from nwor_ops.vllm.check import look

SPECULATION = ("--speculative-config", json.dumps(NGRAM))
ONE_DRAFT = f"--speculative-config '{json.dumps(NGRAM | {'num_speculative_tokens': 1})}'"
ARGUMENTS = ("--max-num-seqs", "4", "--enforce-eager")


def prepared(
    arguments: list[str], feature: str, changes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, str, list[str]]:
    """Return the outcome, the message and, if nothing is refused, what each server's memory is."""
    before = dict(os.environ)
    options = BenchOptions(feature, tuple(arguments), pathlib.Path("."), **changes)
    try:
        config = _prepare(options)
    except Stopped as stopped:
        assert dict(os.environ) == before
        return stopped.outcome.name, str(stopped), []
    assert dict(os.environ) == before
    return "", "", memory_arguments(options, config)


def reasons(arguments: list[str]) -> dict[str, str]:
    return {
        prediction.feature: prediction.reasons[0].why
        for prediction in look(arguments).predictions
        if prediction.reasons
    }


def test_what_the_plugin_refuses_is_refused_with_its_reason(engines: Engines) -> None:
    """The engine of a CPU has only the transaction."""
    arguments = [model_folder(), *ARGUMENTS, *SPECULATION]
    of_check = engines.submit(reasons, arguments).result()
    for feature, name in (("draft", "draft graphs"), ("recurrent", "one state")):
        outcome, message, _ = engines.submit(prepared, arguments, feature).result()
        assert outcome == Outcome.REFUSED.name
        assert message.startswith(f"{name} will be refused: {of_check[name]}")
    assert engines.submit(prepared, [model_folder()], "transaction").result()[:2] == (
        "REFUSED",
        "cow will be refused: the engine does not speculate (--speculative-config)",
    )


def test_settings_of_another_form_are_refused_before_a_server_starts(engines: Engines) -> None:
    arguments = [model_folder(), *ARGUMENTS, "--additional-config", json.dumps({"nwor": {"recurrent": "chunk"}})]
    outcome, message, _ = engines.submit(prepared, arguments, "recurrent").result()
    assert outcome == Outcome.INVALID.name
    assert message.startswith("--form: exact would be measured, but --additional-config asks for chunk;")
    assert engines.submit(prepared, arguments, "recurrent", {"form": "chunk"}).result()[0] == Outcome.REFUSED.name


def test_both_servers_share_the_memory_unless_they_are_started_in_turn(engines: Engines) -> None:
    arguments = [model_folder(), *ARGUMENTS, *SPECULATION, "--gpu-memory-utilization", "0.7"]
    assert engines.submit(prepared, arguments, "transaction").result() == ("", "", ["--gpu-memory-utilization", "0.35"])
    assert engines.submit(prepared, arguments, "transaction", {"restart": True}).result() == ("", "", [])


def test_what_vllm_refuses_and_what_does_not_fit_the_model(engines: Engines) -> None:
    outcome, message, _ = engines.submit(prepared, ["/nonexistent/model"], "transaction").result()
    assert outcome == Outcome.ENGINE.name
    assert message.startswith("vLLM refuses these arguments: ")
    arguments = [model_folder(), *SPECULATION]
    outcome, message, _ = engines.submit(prepared, arguments, "transaction", {"input_tokens": 1000}).result()
    assert (outcome, message) == (
        "INVALID",
        "--input-len and --output-len: 1256 tokens exceed the engine's limit of 1024",
    )


def tried(model: str, folder: str, *client_arguments: str) -> str:
    """Return why the client cannot make prompts for this model."""
    output = pathlib.Path(folder)
    config = SimpleNamespace(tokenizer=model, tokenizer_mode="auto", trust_remote_code=False)
    try:
        Client(BenchOptions("transaction", (model,), output, client_arguments=client_arguments), config)
    except ValueError as error:
        return str(error)
    return ""


def test_prompts_that_the_client_cannot_make_are_found_before_a_server_starts(
    engines: Engines, tmp_path: pathlib.Path
) -> None:
    served = write_served_llama(tmp_path / "model")
    assert engines.submit(tried, served, str(tmp_path)).result() == ""
    cannot = "the client of vllm bench serve cannot make the prompts: "
    assert engines.submit(tried, model_folder(), str(tmp_path)).result().startswith(cannot)  # it has no tokenizer
    missing = ("--dataset-name", "sharegpt", "--dataset-path", "/nonexistent.json")
    assert "/nonexistent.json" in engines.submit(tried, served, str(tmp_path), *missing).result()


# ---------------------------------------------------------------- two real servers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_served_llama(tmp_path_factory.mktemp("bench") / "model")


def command(model: str, output: pathlib.Path, *options: str) -> list[str]:
    traffic = ("--seconds", "0.1", "--input-len", "32", "--output-len", "48", "--output", str(output), "--json")
    words = [sys.executable, "-m", "nwor_ops", "bench", "transaction", *traffic, *options]
    return [*words, "--", model, *ARGUMENTS, *SPECULATION]


def bench(model: str, output: pathlib.Path, *options: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        command(model, output, *options), env=os.environ | ENVIRONMENT, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.nightly
def test_two_servers_are_compared(engines: Engines, model: str, tmp_path: pathlib.Path) -> None:
    code, result, said = bench(model, tmp_path, "--requests", "1,2", "--rounds", "6")
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
    assert (tmp_path / "bench.png").stat().st_size > 0
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert "round 6 of 6" in said


@pytest.mark.nightly
def test_servers_that_accept_differently_are_not_compared(engines: Engines, model: str, tmp_path: pathlib.Path) -> None:
    code, result, _ = bench(model, tmp_path, "--requests", "2", "--rounds", "1", "--vanilla-args", ONE_DRAFT)
    assert (code, result["exit_code"]) == (Outcome.NOT_COMPARABLE, Outcome.NOT_COMPARABLE)
    [load] = result["loads"]
    assert load["ratio"] is None
    assert "tokens per step differ by more than 2 %" in load["obstacle"]


@pytest.mark.nightly
def test_servers_are_started_anew_for_each_round(engines: Engines, model: str, tmp_path: pathlib.Path) -> None:
    code, result, _ = bench(model, tmp_path, "--requests", "2", "--rounds", "1", "--restart", "--control")
    [load] = result["loads"]
    assert (code, load["finding"], result["control"]) == (0, "too few rounds", True)
    assert result["memory"] == "whole, started in turn"
    assert "nwor: " not in (tmp_path / f"{OURS}.log").read_text()


@pytest.mark.nightly
def test_a_server_that_cannot_start_is_reported(engines: Engines, model: str, tmp_path: pathlib.Path) -> None:
    code, result, _ = bench(model, tmp_path, "--vanilla-args", "--max-model-len 100000")
    assert (code, result["exit_code"]) == (Outcome.FAILED, Outcome.FAILED)
    assert result["error"].startswith("vanilla: the server ended: ")
    assert "max_model_len" in result["error"]


@pytest.mark.nightly
def test_an_interrupt_stops_the_servers(engines: Engines, model: str, tmp_path: pathlib.Path) -> None:
    import psutil

    process = subprocess.Popen(
        command(model, tmp_path),
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        while not (tmp_path / f"{VANILLA}.log").exists() or len(psutil.Process(process.pid).children(True)) < 2:
            assert process.poll() is None
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == Outcome.INTERRUPTED, said
    assert said.strip().endswith("nwor-ops bench: interrupted; the servers are stopped")
    _, left = psutil.wait_procs(children, timeout=60)
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
