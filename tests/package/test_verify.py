"""``nwor-ops verify`` without an engine of vLLM: options, exit codes, and what its report has.

tests/vllm/test_verify_engines.py runs real engines.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")

import typer

from nwor_ops import ops
from nwor_ops.cli import verify
from nwor_ops.cli.report import Exit, Report, Stopped
from nwor_ops.cli.verify import VerifyOptions, check_options, run_verify
from nwor_ops.cli.verify_engine import LONGEST_PROMPT, MOST_TOKENS, AuditedEngine
from nwor_ops.testing.engine_process import EngineProcess
from nwor_ops_cli import _reporting

JSON = Report("verify", as_json=True)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch) -> None:
    """Also on a machine with a GPU."""
    monkeypatch.setattr(VerifyOptions, "device", "cpu")


def options(folder: Path, **changes) -> VerifyOptions:
    return VerifyOptions(**{"output": folder, "minutes": 0.0, "seed": 3} | changes)


# ---------------------------------------------------------------- the ops


@pytest.mark.parametrize("writable", [True, False])
def test_ops_are_compared_and_reported(writable, tmp_path, capsys):
    """A report that cannot be written, on a full disk for example, is printed all the same."""
    path = tmp_path / "report.json"
    if not writable:
        path.mkdir()
    assert run_verify(options(tmp_path), JSON) == Exit.FINE
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["ok"], found["error"], found["seed"], found["ops"]["rounds"]) == (True, None, 3, 1)
    assert sum(found["ops"]["calls"].values()) > 30
    if writable:
        assert json.loads(path.read_text()) == found
    else:
        assert f"nwor-ops verify: --output: {path} could not be written: Is a directory" in printed.err


@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_wrong_op_comes_with_its_command(how, tmp_path, capsys, monkeypatch):
    original, calls = ops.move_slots, []

    def move_slots(caches, *rest):
        calls.append(rest)
        if how == "raises" and len(calls) == 2:
            raise RuntimeError("the device is lost")
        original(caches, *rest)
        if len(calls) == 2:
            caches[0].view(torch.uint8).untyped_storage()[70] ^= 1

    monkeypatch.setattr(ops, "move_slots", move_slots)
    assert run_verify(options(tmp_path, minutes=1.0), Report("verify")) == Exit.OP
    printed = capsys.readouterr().out
    assert "an op differs from its oracle (exit code 6)" in printed
    seed = re.search(r"error: seed (\d+): ", printed)
    assert seed is not None
    assert ("RuntimeError: the device is lost" if how == "raises" else "move_slots") in printed
    assert f"command: nwor-ops verify --minutes 0 --seed {seed[1]}\n" in printed


# ---------------------------------------------------------------- the engine


def test_prompt_leaves_room_for_answer() -> None:
    """The longest answer has 64 tokens, or half of the engine's limit."""
    engine = object.__new__(AuditedEngine)
    room = {}
    for engine._longest in range(4, 3000):
        room[engine._longest] = engine._room
        assert engine._room + min(MOST_TOKENS, engine._longest // 2) < engine._longest
    assert (room[1024], room[2999]) == (959, LONGEST_PROMPT)


# It answers as verify_engine does, without its imports.
ANSWERS = """
import itertools, json, sys
def answer(**values):
    print(json.dumps(values), flush=True)
audits = 2 * [{"modes": ["cow"], "transaction": [{"verify_steps": VERIFIED}], "recurrent": [{"windows": 0}],
               "vllm_states": STATES, "vllm_states_not_audited": REASONS}]
drafts = json.load(open(sys.argv[1]))["drafts"]
for line in itertools.chain(["start"], sys.stdin):
    if line.startswith("COMMAND"):
        FAILURE
    if line == "start":
        answer(engine=dict(architecture="Llama", device="cpu", method="ngram", num_speculative_tokens=4, audits=audits,
                           settings={"mode": "cow"}, prefix_caching=True, block_size=16, hybrid=True,
                           prefix_cache_retention_interval=0))
    else:
        answer(audits=audits, prompt_tokens=64, cached_tokens=HITS, requests={"requests": 4})
"""
NO_MEMORY = "answer(error='ValueError: no memory left, key=s3cr3t'); sys.exit(1)"
AUDIT_ERROR = (
    "print('(Core) ERROR a.AuditError: nwor audit, step 3: 1 bytes', file=sys.stderr); answer(error='Dead: x')"
)


def start_program(folder: Path, monkeypatch, **replaced: str) -> None:
    """Make the command start this program instead of an engine."""
    text = ANSWERS
    defaults = {"COMMAND": "none", "FAILURE": "pass", "VERIFIED": "9", "STATES": "[]", "REASONS": "[]"}
    for name, value in {**defaults, "HITS": "[48, 48]"}.items():
        text = text.replace(name, replaced.get(name, value))
    program = folder / "program.py"
    program.write_text(text)

    def start(given: VerifyOptions, name: str, drafts: bool) -> EngineProcess:
        return EngineProcess(name, {"drafts": drafts}, given.output, dict(os.environ), (str(program),))

    monkeypatch.setattr(verify, "start_program", start)
    monkeypatch.setattr(verify, "check_arguments", lambda _: None)


@pytest.mark.parametrize(
    ("replaced", "outcome", "error", "vllm_error"),
    [
        ({}, Exit.FINE, None, None),
        ({"VERIFIED": "0"}, Exit.NOTHING, None, None),
        ({"COMMAND": "start", "FAILURE": NO_MEMORY}, Exit.FAILED, None, "stopped: ValueError: no memory left"),
        ({"COMMAND": "serve", "FAILURE": NO_MEMORY}, Exit.FAILED, None, "stopped: ValueError: no memory left"),
        ({"COMMAND": "serve", "FAILURE": "sys.exit(9)"}, Exit.FAILED, None, "ended with exit code 9"),
        ({"COMMAND": "serve", "FAILURE": AUDIT_ERROR}, Exit.AUDIT, "nwor audit, step 3: 1 bytes", None),
        ({"COMMAND": "start", "FAILURE": AUDIT_ERROR}, Exit.AUDIT, "nwor audit, step 3: 1 bytes", None),
    ],
)
def test_engine_end_decides_exit_code(replaced, outcome, error, vllm_error, tmp_path, capsys, monkeypatch):
    """Words of vLLM are printed. The report has none, because they may hold arguments."""
    start_program(tmp_path, monkeypatch, **replaced)
    assert run_verify(options(tmp_path, arguments=("MODEL", "--api-key", "s3cr3t")), JSON) == outcome
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["exit_code"], found["error"], found["ok"]) == (outcome, error, outcome == Exit.FINE)
    assert ("nwor-ops verify: " not in printed.err) if vllm_error is None else (vllm_error in printed.err)
    report = (tmp_path / "report.json").read_text()
    assert "s3cr3t" not in report
    assert json.loads(report) == found
    assert (tmp_path / "engine.log").exists()
    assert not (tmp_path / "engine.job.json").exists()


def test_audited_states_of_vllm_are_counted(tmp_path, capsys, monkeypatch):
    """There are two ranks. They have the same reason, which is printed once."""
    reason = "FULL graphs call no Python"
    start_program(tmp_path, monkeypatch, STATES='[{"states_computed": 600}]', REASONS=repr([reason]))
    assert run_verify(options(tmp_path, arguments=("MODEL",)), Report("verify")) == Exit.FINE
    printed = capsys.readouterr().out
    assert "\n1 round of random windows on cpu: " in printed
    lines = [line for line in printed.splitlines() if "recurrent states" in line]
    assert lines == [
        "1,200 recurrent states of vLLM compared", f"vLLM's recurrent states were not audited: {reason}",
    ]  # fmt: skip


SOME = "48 of 64 tokens of a repeated prompt were cached"
NONE = "0 of 64 tokens of a repeated prompt were cached"


@pytest.mark.parametrize(
    ("hits", "sentence"),
    [
        ("[48, 48]", SOME),
        ("[0, 48]", SOME),
        ("[0, 0]", f"{NONE}, 0 without drafts: drafts are not the cause; a block has 16 tokens, and only whole blocks"),
        (
            "[0, 0] if drafts else [32, 48]",
            f"{NONE}, 48 without drafts: --prefix-cache-retention-interval is 0, so vLLM keeps few states; try 16",
        ),
    ],
)
def test_prefix_hits_are_compared_without_drafts(hits, sentence, tmp_path, capsys, monkeypatch):
    """The engine without drafts starts only if drafts may have ended the hits."""
    start_program(tmp_path, monkeypatch, HITS=hits)
    assert run_verify(options(tmp_path, arguments=("MODEL",)), Report("verify")) == Exit.FINE
    printed = capsys.readouterr()
    assert f"prefix cache: {sentence}" in printed.out
    assert ("without drafts" in printed.err) == ("without drafts" in sentence)


@pytest.mark.parametrize(
    ("replaced", "end"),
    [({}, "no difference in 18 steps"), ({"COMMAND": "serve", "FAILURE": AUDIT_ERROR}, "nwor audit, step 3: 1 bytes")],
)
def test_one_line_to_paste_names_everything(replaced, end, tmp_path, capsys, monkeypatch):
    """Two ranks had nine steps each."""
    start_program(tmp_path, monkeypatch, **replaced)
    run_verify(options(tmp_path, arguments=("MODEL",)), Report("verify"))
    line = capsys.readouterr().out.splitlines()[-1]
    expected = rf"to paste: nwor_ops \S+, vLLM .+, torch \S+; Llama on cpu, ngram K=4, mode cow; {end}"
    assert re.fullmatch(expected, line), line


def test_interrupted_command_names_what_it_awaits(tmp_path, capsys, monkeypatch):
    interrupt = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT)"
    start_program(tmp_path, monkeypatch, COMMAND="serve 54.00", FAILURE=interrupt)  # the ops had a tenth of the time
    with pytest.raises(typer.Exit) as ended, _reporting("verify", as_json=True) as report:
        run_verify(options(tmp_path, arguments=("MODEL",), minutes=1.0), report)
    printed = capsys.readouterr()
    assert (ended.value.exit_code, json.loads(printed.out)) == (130, {"exit_code": 130, "error": "interrupted"})
    assert "interrupted; waiting for the engine to end, 20 s at most\n" in printed.err
    assert not list(tmp_path.glob("*.job.json"))


@pytest.mark.parametrize(
    ("ranks", "switch", "complaint"),
    [(2, "on", r"^--data-parallel-size must be 1: "), (1, "off", r"^VLLM_NWOR=off switches the audit off too")],
)
def test_engine_without_an_audit_is_refused(ranks, switch, complaint, tmp_path, monkeypatch):
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=ranks))
    monkeypatch.setattr(verify, "look_at", lambda _: (config, {}))
    monkeypatch.setenv("VLLM_NWOR", switch)
    with pytest.raises(Stopped, match=complaint):
        run_verify(options(tmp_path, arguments=("MODEL",)), JSON)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"output": Path("prompts/sub")}, "--output: no file can be created in prompts/sub: Not a directory"),
        ({"output": Path("dangling")}, "--output: no file can be created in dangling: "),
        ({"prompts": "none"}, "--prompts: none cannot be read: No such file or directory"),
        ({"prompts": "\n \n"}, "--prompts: prompts has no prompt"),
    ],
)
def test_invalid_options_are_refused(changes, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("prompts").write_text("fine")
    Path("dangling").symlink_to("nowhere")
    if "prompts" in changes:
        if changes["prompts"] != "none":
            Path("prompts").write_text(changes["prompts"])
        changes = {"prompts": Path("none" if changes["prompts"] == "none" else "prompts")}
    with pytest.raises(Stopped) as caught:
        check_options(options(tmp_path, **changes))
    assert caught.value.code == Exit.INVALID
    assert complaint in str(caught.value)
    assert Path("dangling").is_symlink()
    assert not Path("nowhere").exists()


def test_prompts_are_lines_of_a_file(tmp_path):
    """Only a newline ends a line: texts have other separators."""
    path = tmp_path / "prompts"
    path.write_text("one\u2028two\n\n  three\n", encoding="utf-8")
    given = options(tmp_path, prompts=path)
    check_options(given)
    assert verify.prompts_of(given) == ["one\u2028two", "three"]
