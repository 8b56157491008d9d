"""``nwor-ops verify`` with real engines: a wrong byte is found and reported, without prompts and secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import planted_plugin
import pytest
from engines import ENVIRONMENT, NGRAM
from processes import environment

from nwor_ops.cli.verify import Outcome
from nwor_ops.testing.tiny_llama import write_tiny_llama

SECRET = "tr0ub4dor-and-3-staples"
PROMPT = [11, 12, 13, 14, 15, 11, 12, 13, 14, 15, 11, 12, 13, 14, 15, 11, 12]
ARGUMENTS = [
    "--skip-tokenizer-init", "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager",
    "--num-gpu-blocks-override", "96", "--block-size", "32", "--speculative-config", json.dumps(NGRAM),
]  # fmt: skip

# Each starts an engine in new processes: half a minute.
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.nightly]


def verify(folder: Path, *options: str, arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    planted_plugin.install(folder / "plugins")
    engine = {**environment(folder / "plugins"), **ENVIRONMENT, "VLLM_NWOR_MODE": "cow"}
    output = str(folder / "found.tar.gz")
    command = ["-m", "nwor_ops", "verify", "--json", "--device", "cpu", "--output", output, *options, "--", *arguments]
    engine["VLLM_CACHE_ROOT"] = str(Path.home() / ".cache" / "vllm")  # one test changes HOME
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=engine | variables, timeout=600, check=False
    )


def contents(folder: Path) -> dict[str, str]:
    with tarfile.open(folder / "found.tar.gz") as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}


def test_a_wrong_byte_is_reported_without_prompts_and_secrets(tmp_path):
    """The engine's own log has a secret, the home folder and the prompt: see planted_plugin."""
    model = write_tiny_llama(tmp_path / "home" / "models" / "tiny")
    prompts = tmp_path / "prompts"
    prompts.write_text(json.dumps(PROMPT) + "\n")
    finished = verify(
        tmp_path, "--minutes", "0", "--prompts", str(prompts), arguments=[str(model), *ARGUMENTS],
        PLANTED_BYTE="1", PLANTED_TOKEN=SECRET, HOME=str(tmp_path / "home"),
    )  # fmt: skip
    assert finished.returncode == Outcome.ENGINE, finished.stderr
    assert "Traceback" not in finished.stderr
    found = json.loads(finished.stdout)
    assert (found["ok"], found["exit_code"]) == (False, Outcome.ENGINE)
    assert found["violation"].startswith("nwor audit, step ")
    assert " 1 bytes differ from the expected ones" in found["violation"]
    assert found["environment"]["VLLM_NWOR_MODE"] == "cow"
    assert found["arguments"] == ["~/models/tiny", *ARGUMENTS]
    files = contents(tmp_path)
    assert set(files) == {"nwor-verify/report.json", "nwor-verify/engine.log"}
    log = files["nwor-verify/engine.log"]
    assert "the secret is <removed>, home is ~/models" in log  # the plugin ran, and its line is here
    assert found["violation"] in log
    for text in (*files.values(), finished.stdout):
        for private in (SECRET, str(PROMPT)[1:-1], " ".join(map(str, PROMPT)), str(tmp_path / "home")):
            assert private not in text


@pytest.mark.parametrize("processes", ["0", "1"])
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_an_engine_without_a_fault_is_fine(mode, processes, tmp_path):
    """In one process, and with the engine core and the worker in others."""
    model = write_tiny_llama(tmp_path / "tiny")
    finished = verify(
        tmp_path, "--minutes", "0.1", arguments=[str(model), *ARGUMENTS], VLLM_NWOR_MODE=mode,
        VLLM_ENABLE_V1_MULTIPROCESSING=processes,
    )  # fmt: skip
    assert finished.returncode == Outcome.FINE, finished.stderr + finished.stdout
    found = json.loads(finished.stdout)
    [worker] = found["engine"]["audits"]
    assert worker["modes"] == [mode]
    assert worker["transaction"][0]["verify_steps"] > 5
    assert worker["transaction"][0]["accepted"] > 0
    assert found["engine"]["requests"]["requests"] > 10


@pytest.mark.parametrize("mode", ["cow", "off"])
def test_an_engine_without_drafts_is_not_fine(mode, tmp_path):
    """Nothing is audited without speculation, and the exit code says so."""
    model = write_tiny_llama(tmp_path / "tiny")
    finished = verify(tmp_path, "--minutes", "0.1", arguments=[str(model), *ARGUMENTS[:-2]], VLLM_NWOR_MODE=mode)
    assert finished.returncode == Outcome.NOTHING, finished.stderr
    assert "add --speculative-config" in json.loads(finished.stdout)["outcome"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["/nonexistent/model"], "/nonexistent/model"),
        ([], "vLLM refuses the arguments"),
    ],
)
def test_arguments_that_vllm_refuses(arguments, complaint, tmp_path):
    finished = verify(tmp_path, "--minutes", "0", arguments=arguments or ["--max-num-seqs", "0"], HF_HUB_OFFLINE="1")
    assert (finished.returncode, finished.stdout) == (Outcome.INVALID, "")
    assert "nwor-ops verify: vLLM refuses the arguments: " in finished.stderr
    assert complaint in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "found.tar.gz").exists()
    assert os.environ.get(planted_plugin.SECRET_VARIABLE) is None
