"""``nwor-ops check``: its results are those of the engine that then starts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from engines import NGRAM, Engines, model_folder, prompts

from nwor_ops.cli.check import look_at, outcome_of, print_preview
from nwor_ops.cli.report import Exit, Report, Stopped
from nwor_ops.cli.verify_engine import SMALL_ENGINE, configuration_of, describe, hides_states_of_vanilla
from nwor_ops.vllm.check import FEATURES, InvalidEngine, configuration, configure, engine_arguments, look, switches_of
from nwor_ops.vllm.support.refusals import REFUSALS

# The arguments of vllm serve for the engines of these tests.
ARGUMENTS = (
    "--skip-tokenizer-init", "--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "256",
    "--max-num-seqs", "8", "--num-gpu-blocks-override", "96", "--block-size", "32",
)  # fmt: skip
SPECULATION = ("--speculative-config", json.dumps(NGRAM))
# A connector named by its module counts as a custom one, which must declare when it reads.
CONNECTOR = {
    "kv_connector": "ExampleConnector",
    "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "kv_role": "kv_both",
}


def looked(arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    os.environ.update(environment)
    return json.loads(json.dumps(look(configure(arguments))))


def predictions(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {feature["feature"]: feature for feature in found["features"]}


@pytest.mark.parametrize(
    ("setting", "value", "feature", "request_", "change"),
    [
        ("mode", "cow", "cow", "mode cow", "--kv-transfer-config"),
        ("draft_vocabulary", 512, "draft vocabulary", "a draft vocabulary", None),
    ],
)
def test_refusal_equals_start_up_and_names_argument(
    engines: Engines, setting: str, value: Any, feature: str, request_: str, change: str | None
) -> None:
    arguments = [model_folder(), *ARGUMENTS, *SPECULATION, "--kv-transfer-config", json.dumps(CONNECTOR)]
    found = engines.submit(looked, arguments, {f"VLLM_NWOR_{setting.upper()}": str(value)}).result()
    assert outcome_of(found) == Exit.REFUSED
    assert [name for name, one in predictions(found).items() if one["switched_on"]] == [feature]
    reasons = predictions(found)[feature]["reasons"]
    assert change is None or [reason["change"] for reason in reasons] == [change]
    why = "; ".join(one["why"] + (f" (change: {one['change']})" if one["change"] else "") for one in reasons)
    with pytest.raises(RuntimeError, match=re.escape(f"nwor: {why} ({request_} was asked for")):
        engines.run(prompts(1), nwor={setting: value}, kv_transfer_config=CONNECTOR)


def test_only_recurrent_works_without_speculation(engines: Engines) -> None:
    found = engines.submit(looked, [model_folder(), *ARGUMENTS], {"VLLM_NWOR_MODE": "stage"}).result()
    assert outcome_of(found) == Exit.REFUSED
    reasons = {name: one["reasons"] for name, one in predictions(found).items()}
    recurrent = [reason["why"] for reason in reasons.pop("recurrent")]
    assert recurrent
    assert not any("speculate" in why for why in recurrent)
    for found_reasons in reasons.values():
        assert found_reasons == [{"why": "the engine does not speculate", "change": "--speculative-config"}]


@pytest.mark.parametrize(
    ("mode", "hybrid", "full", "speculates", "hides"),
    [
        ("off", True, True, True, True),
        ("cow", True, True, True, False),
        ("off", False, True, True, False),
        ("off", True, False, True, False),
        ("off", True, True, False, False),
    ],
)
def test_verify_knows_when_graphs_hide_states(
    mode: str, hybrid: bool, full: bool, speculates: bool, hides: bool
) -> None:
    """FULL graphs call no Python that could audit the states of vanilla vLLM."""
    config = SimpleNamespace(
        additional_config={"nwor": {"mode": mode}},
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full)),
        model_config=SimpleNamespace(is_hybrid=hybrid),
        speculative_config=object() if speculates else None,
    )
    assert hides_states_of_vanilla(config) == hides


def described(arguments: Sequence[str]) -> dict[str, Any]:
    return describe(configuration_of(list(arguments)))


def test_bug_report_describes_engine_without_secrets(engines: Engines) -> None:
    extra = {"secret_key": "s3cr3t", "authToken": "s3cr3t", "url": "redis://:s3cr3t@host", "deep": {"key": "s3cr3t"}}
    connector = json.dumps(CONNECTOR | {"kv_connector_extra_config": extra})
    secrets = ("--kv-transfer-config", connector, "--additional-config", '{"private_key": "s3cr3t"}')
    secrets += ("--served-model-name", "s3cr3t")
    engine = engines.submit(described, [model_folder(), *ARGUMENTS, *SPECULATION, *secrets]).result()
    assert (engine["method"], engine["block_size"]) == ("ngram", 32)
    assert "s3cr3t" not in json.dumps(engine)


# ---------------------------------------------------------------- the command


def command_job(arguments: list[str]) -> tuple[int, str, str]:
    """Run the command in this process, because importing vLLM takes most of its time. Return its code and output."""
    from nwor_ops_cli import main

    os.environ |= {"COLUMNS": "200", "TERM": "dumb"}
    sys.argv = ["nwor-ops", "check", *arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code, output.getvalue(), errors.getvalue()


@pytest.mark.parametrize(
    ("text", "error"),
    [(None, "[Errno 2] No such file or directory: "), ("port: [1", "while parsing a flow sequence in ")],
    ids=["missing", "invalid"],
)
def test_bad_config_file_prints_one_line(
    engines: Engines, text: str | None, error: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    arguments = ["--", model_folder(), "--config", str(file)]
    if text is None:  # the command silences vLLM's log before it imports vLLM
        words = [sys.executable, "-m", "nwor_ops", "check", *arguments]
        done = subprocess.run(words, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True)
        code, output, errors = done.returncode, done.stdout, done.stderr
        assert len(errors.splitlines()) == 2, errors
    else:
        code, output, errors = engines.submit(command_job, arguments).result()
    assert (code, output) == (Exit.ENGINE, "")
    line = errors.splitlines()[-1]
    assert line.startswith(f"nwor-ops check: vLLM refuses these arguments: {error}")
    assert str(file) in line


@pytest.mark.parametrize(
    ("argument", "lines"),
    [
        (["--no-such-option"], ["unrecognized arguments: --no-such-option", "an argument is unknown or malformed"]),
        (["--additional-config", '{"nwor": {"mod": 1}}'], ["nwor-ops check: nwor: unknown settings ['mod']"]),
    ],
)
def test_invalid_argument_prints_no_traceback(engines: Engines, argument: list[str], lines: list[str]) -> None:
    """test_cli.py has the mistakes that are found before vLLM is imported."""
    code, output, errors = engines.submit(command_job, ["--", model_folder(), *argument]).result()
    assert (code, output) == (2, ""), errors
    assert all(line in errors for line in lines), errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("model", "subject"),
    [
        (["nobody/no-model"], "there is no folder nobody/no-model, and vLLM could not load a model of this name: "),
        (["--model="], "vLLM refuses these arguments: "),
    ],
)
def test_missing_model_is_named_as_json(engines: Engines, model: list[str], subject: str) -> None:
    code, output, errors = engines.submit(command_job, ["--json", "--", *model, *SPECULATION]).result()
    found = json.loads(output)
    assert (code, found["exit_code"]) == (4, 4), errors
    assert found["error"].startswith(subject)
    assert f"nwor-ops check: {found['error']}" in errors
    assert "Traceback" not in errors


def test_silenced_log_is_not_referred_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM inspects some architectures in another process, and only logs why that failed."""
    error = InvalidEngine("Model architectures ['A'] failed to be inspected. Please check the logs for more details.")
    monkeypatch.setattr("nwor_ops.vllm.check.configure", Mock(side_effect=error))
    with pytest.raises(Stopped, match=r"failed to be inspected\. VLLM_LOGGING_LEVEL=ERROR prints why\.$"):
        look_at([model_folder()])


def printed(capsys: pytest.CaptureFixture[str], *features: dict[str, Any], **changes: Any) -> str:
    engine = {"vllm": "0.33.0", "device": "cuda", "runner": "V2", "model": "m", "architecture": "LlamaForCausalLM",
              "hybrid": False, "vocabulary": 248320, "method": "ngram", "num_speculative_tokens": 4,
              "on_unsupported": "error"} | changes  # fmt: skip
    preview = {"engine": engine, "features": features}
    print_preview(preview | {"switches": switches_of(preview)}, Report("check"))
    return capsys.readouterr().out


def prediction(feature: str, switched_on: bool, *reasons: dict[str, str]) -> dict[str, Any]:
    return {"feature": feature, "switched_on": switched_on, "runs": not reasons, "reasons": reasons}


def test_switches_that_help_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    refused = tuple(prediction(feature, False, {"why": "x", "change": ""}) for feature in FEATURES[2:])
    runs = tuple(prediction(feature, False) for feature in FEATURES)
    layers = "LlamaForCausalLM has no recurrent layers"
    for predictions, changes, line in (
        (refused, {}, f"nothing; ngram has no draft model, and {layers}"),
        (refused, {"method": None}, f"nothing; it does not speculate, and {layers}"),
        (refused, {"hybrid": True}, "nothing; the reasons are above"),
        (refused, {"method": "eagle3"}, "nothing; the reasons are above"),
        (runs, {}, "VLLM_NWOR_RECURRENT=1, VLLM_NWOR_DRAFT_GRAPHS=1, VLLM_NWOR_DRAFT_VOCABULARY=32768; nwor-ops bench"),
        (runs[2:3] + runs[4:], {"vocabulary": 32768}, "VLLM_NWOR_DRAFT_GRAPHS=1; nwor-ops bench measures the gain"),
        (runs[:2] + refused, {}, f"nothing; ngram has no draft model, and {layers}"),
    ):  # fmt: skip
        assert f"\nmay be faster with: {line}" in printed(capsys, *predictions, **changes)


def test_last_line_says_whether_engine_starts(capsys: pytest.CaptureFixture[str]) -> None:
    refused = prediction("stage", True, {"why": "the cache is too small", "change": "--max-num-seqs"})
    off = prediction("draft graphs", False, {"why": "the method has its own graphs", "change": ""})
    runs = prediction("recurrent", True)
    text = printed(capsys, refused, off, runs)
    assert text.endswith("The engine will not start: stage will be refused.\n")
    assert "the cache is too small (--max-num-seqs)" in text
    assert "recurrent: switched on, will run\n" in text
    assert printed(capsys, refused, on_unsupported="vanilla").endswith("The engine will start without stage.\n")
    assert printed(capsys, runs, off).endswith(
        "No check refuses recurrent. Layers, back ends and the cache are checked at the start.\n"
    )
    assert "Nothing is switched on" in printed(capsys, off)
    assert outcome_of({"features": (off, runs)}) is Exit.FINE
    assert outcome_of({"features": (off, refused)}) is Exit.REFUSED


def test_refusals_name_arguments_of_vllm() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    known = {option for action in parser._actions for option in action.option_strings}
    named = {option for refusal in REFUSALS for option in re.findall(r"(?<!\S)--[a-z-]+", refusal.change)}
    assert len(named) > 15
    assert named - known == set()


def test_arguments_override_defaults_of_small_engine() -> None:
    """The CPU platform sets the memory of the cache itself, so it is not compared."""
    words = [model_folder(), "--skip-tokenizer-init"]
    small, given = (
        configuration(engine_arguments([*words, *more], **SMALL_ENGINE))
        for more in ((), ("--max-num-seqs", "8", "--max-model-len", "64"))
    )
    assert (small.scheduler_config.max_num_seqs, given.scheduler_config.max_num_seqs) == (16, 8)
    with pytest.raises(InvalidEngine, match=r"^--model must have a value$"):
        configure(["--model"])
    assert (small.model_config.original_max_model_len, given.model_config.max_model_len) == (-1, 64)
