"""``nwor-ops verify`` with real engines: a wrong byte is found and reported, without what is private."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import planted_server
import pytest
from engines import ENVIRONMENT, NGRAM
from processes import environment
from tiny_models import write_served_llama

from nwor_ops.cli.report import Exit
from nwor_ops.testing.tiny_llama import write_tiny_llama

PROMPT = "t11 t12 t13 t14 t15 t11 t12 t13 t14 t15 t11 t12 t13 t14 t15 t11 t12"
SECRET = "s3cr3t"
ARGUMENTS = [
    "--skip-tokenizer-init", "--max-model-len", "256", "--max-num-seqs", "8", "--enforce-eager",
    "--num-gpu-blocks-override", "96", "--block-size", "32", "--speculative-config", json.dumps(NGRAM),
]  # fmt: skip

# Each starts an engine in new processes: half a minute.
pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.nightly]


def verify(folder: Path, *options: str, arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    planted_server.install(folder / "plugins", "planted_plugin")
    engine = {**environment(folder / "plugins"), **ENVIRONMENT, "VLLM_NWOR_MODE": "cow"}
    output = str(folder / "out")
    command = ["-m", "nwor_ops", "verify", "--json", "--output", output, *options, "--", *arguments]
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=engine | variables, timeout=600, check=False
    )


def test_wrong_byte_is_reported_without_secrets(tmp_path):
    """The report has no argument, prompt or path. The engine's log stays on this machine."""
    prompts = tmp_path / "prompts"
    prompts.write_text(PROMPT + "\n")
    extra = {"shared_storage_path": str(tmp_path / "kv"), "url": f"redis://:{SECRET}@host", "private_key": SECRET}
    extra |= {"secret_key": SECRET, "authToken": SECRET, "nested": {"aws_secret_access_key": SECRET}}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    arguments = [
        write_served_llama(tmp_path / "tiny"), *ARGUMENTS[1:], "--served-model-name", SECRET,
        "--kv-transfer-config", json.dumps(connector), "--additional-config", json.dumps({"private_key": SECRET}),
    ]  # fmt: skip
    finished = verify(
        tmp_path, "--minutes", "0", "--prompts", str(prompts), arguments=arguments, PLANTED_BYTE="1"
    )  # fmt: skip
    assert finished.returncode == Exit.AUDIT, finished.stderr
    assert "Traceback" not in finished.stderr
    report = (tmp_path / "out" / "report.json").read_text()
    found = json.loads(report)
    assert (found["ok"], found["exit_code"], found["engine"]["settings"]["mode"]) == (False, Exit.AUDIT, "cow")
    assert found["error"].startswith("nwor audit, step ")
    assert " 1 bytes differ from the expected ones" in found["error"]
    assert found["error"] in (tmp_path / "out" / "engine.log").read_text()
    for private in (SECRET, PROMPT, str(tmp_path)):
        assert private not in report


@pytest.mark.parametrize(("mode", "processes"), [("cow", "0"), ("stage", "1")])
def test_engine_without_fault_is_fine(mode, processes, tmp_path):
    """In one process, and with the engine core and the worker in others."""
    model = write_tiny_llama(tmp_path / "tiny")
    finished = verify(
        tmp_path, "--minutes", "0.1", arguments=[str(model), *ARGUMENTS], VLLM_NWOR_MODE=mode,
        VLLM_ENABLE_V1_MULTIPROCESSING=processes,
    )  # fmt: skip
    assert finished.returncode == Exit.FINE, finished.stderr + finished.stdout
    found = json.loads(finished.stdout)
    [worker] = found["engine"]["audits"]
    assert worker["modes"] == [mode]
    assert worker["transaction"][0]["verify_steps"] > 5
    assert worker["transaction"][0]["accepted"] > 0
    assert found["engine"]["requests"]["requests"] > 10


@pytest.mark.parametrize("mode", ["cow", "off"])
def test_engine_without_drafts_is_not_fine(mode, tmp_path):
    """Nothing is audited without speculation, and the exit code says so."""
    model = write_tiny_llama(tmp_path / "tiny")
    finished = verify(tmp_path, "--minutes", "0.1", arguments=[str(model), *ARGUMENTS[:-2]], VLLM_NWOR_MODE=mode)
    assert finished.returncode == Exit.NOTHING, finished.stderr
    assert "add --speculative-config" in json.loads(finished.stdout)["outcome"]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["MODEL", "--no-such-option"], Exit.INVALID, "unrecognized arguments: --no-such-option"),
        (["/nonexistent/model"], Exit.ENGINE, "there is no folder /nonexistent/model"),
    ],
)
def test_vllm_refuses_arguments(arguments, code, complaint, tmp_path):
    finished = verify(tmp_path, "--minutes", "0", arguments=arguments, HF_HUB_OFFLINE="1")
    assert finished.returncode == code, finished.stderr
    assert json.loads(finished.stdout)["exit_code"] == code
    assert complaint in finished.stderr
    assert "Traceback" not in finished.stderr
