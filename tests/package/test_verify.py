"""``nwor-ops verify`` without an engine of vLLM: options, exit codes, and what its archive leaves out.

tests/vllm/test_verify_engines.py runs real engines.
"""

from __future__ import annotations

import json
import os
import resource
import tarfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("typer")

from typer.testing import CliRunner

from nwor_ops import ops
from nwor_ops.cli import verify, verify_archive
from nwor_ops.cli.verify import InvalidOptions, Outcome, VerifyOptions, check_options, run_verify
from nwor_ops.cli.verify_archive import Redaction, allowed_environment, write_archive
from nwor_ops.cli.verify_engine import LONGEST_PROMPT, MOST_TOKENS, AuditedEngine
from nwor_ops.testing.engine_process import EngineProcess


def options(folder: Path, **changes) -> VerifyOptions:
    given = {
        "minutes": 0.0, "seed": 3, "output": folder / "found.tar.gz", "device": "cpu", "prompts": None, "arguments": (),
    }  # fmt: skip
    return VerifyOptions(**given | changes)


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}


# ---------------------------------------------------------------- the ops


def test_the_ops_are_fine(tmp_path, capsys):
    assert run_verify(options(tmp_path), as_json=True) == Outcome.FINE
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (found["ok"], found["violation"], found["seed"], found["ops"]["rounds"]) == (True, None, 3, 1)
    assert found["ops"]["calls"]["gated_delta_verify"] == 3
    assert "1/1 comparing random windows of every op on cpu" in printed.err
    files = contents(tmp_path / "found.tar.gz")
    assert json.loads(files["nwor-verify/report.json"]) | {"archive": found["archive"]} == found
    assert list(files) == ["nwor-verify/report.json"]


def test_the_result_is_printed_if_the_archive_cannot_be_written(capsys):
    full = options(Path("/dev"), output=Path("/dev/full"))
    check_options(full)
    assert run_verify(full, as_json=True) == Outcome.FINE
    printed = capsys.readouterr()
    assert json.loads(printed.out)["archive"] is None
    assert "--output: /dev/full could not be written: No space left on device" in printed.err
    assert run_verify(full, as_json=False) == Outcome.FINE
    assert "archive" not in capsys.readouterr().out


def test_no_part_of_an_archive_is_left_behind(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_archive(tmp_path / "found.tar.gz", {"noise": os.urandom(999).hex()}, "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_a_wrong_op_is_reported_with_the_command_that_repeats_it(how, tmp_path, capsys, monkeypatch):
    original, calls = ops.move_slots, []

    def move_slots(caches, *rest):
        calls.append(rest)
        if how == "raises" and len(calls) == 2:
            raise RuntimeError("the device is lost")
        original(caches, *rest)
        if len(calls) == 2:
            caches[0].view(torch.uint8).untyped_storage()[70] ^= 1

    monkeypatch.setattr(ops, "move_slots", move_slots)
    assert run_verify(options(tmp_path, minutes=1.0), as_json=False) == Outcome.OP
    printed = capsys.readouterr().out
    assert "an op differs from its oracle (exit code 3)" in printed
    assert "family staging, seed 4: " in printed
    assert ("RuntimeError: the device is lost" if how == "raises" else "move_slots") in printed
    assert "command: nwor-ops verify --minutes 0 --device cpu --seed 4" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--minutes", "0", "--seed", "7"], Outcome.FINE, "no violation found (exit code 0)"),
        (["--minutes", "-1"], Outcome.INVALID, "Invalid value for '--minutes'"),
        (["--minutes", "1e308"], Outcome.INVALID, "Invalid value for --minutes: must be at most 1,000,000, got 1e+308"),
        (["--minutes", "inf"], Outcome.INVALID, "Invalid value for --minutes: must be a finite number, got inf"),
        (["--device", "tpu"], Outcome.INVALID, "Invalid value for '--device'"),
        (
            ["--output", "no/such/folder"],
            Outcome.INVALID,
            "nwor-ops verify: --output: no/such/folder must be a file in",
        ),
    ],
)
def test_the_command(arguments, code, printed, tmp_path, monkeypatch):
    from nwor_ops.cli.app import app

    monkeypatch.chdir(tmp_path)
    finished = CliRunner().invoke(
        app, ["verify", "--device", "cpu", *arguments], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    assert finished.exit_code == code
    assert printed in finished.output
    assert "Traceback" not in finished.output
    assert (tmp_path / "nwor-verify.tar.gz").exists() == (code == Outcome.FINE)


# ---------------------------------------------------------------- the engine


def test_a_prompt_leaves_room_for_its_answer() -> None:
    """The longest answer has 64 tokens, or half of the engine's limit."""
    engine = object.__new__(AuditedEngine)
    room = {}
    for engine._longest in range(4, 3000):
        room[engine._longest] = engine._room
        assert engine._room + min(MOST_TOKENS, engine._longest // 2) < engine._longest
    assert (room[1024], room[2999]) == (959, LONGEST_PROMPT)


# It answers as verify_engine does, without its imports.
ANSWERS = """
import json, sys
def answer(**values):
    print(json.dumps(values), flush=True)
audits = [{"modes": ["cow"], "transaction": [{"verify_steps": VERIFIED}], "recurrent": [{"windows": 0}],
           "vllm_states": [], "vllm_states_not_audited": []}]
answer(versions={})
for line in sys.stdin:
    if line.startswith("COMMAND"):
        FAILURE
    answer(requests={"requests": 4}, audits=audits)
"""
NO_MEMORY = "answer(error='ValueError: no memory left'); sys.exit(1)"
STOPPED = "the engine 'engine' stopped: ValueError: no memory left"
AUDIT_ERROR = (
    "print('(Core) ERROR a.AuditError: nwor audit, step 3: 1 bytes', file=sys.stderr); answer(error='Dead: x')"
)


def start_program(folder: Path, text: str, monkeypatch) -> None:
    """Make the command start this program instead of an engine."""
    program = folder / "program.py"
    program.write_text(text)

    def engine(_, logs: Path) -> EngineProcess:
        return EngineProcess("engine", {}, logs, dict(os.environ), (str(program),))

    monkeypatch.setattr(verify, "_engine", engine)


@pytest.mark.parametrize(
    ("command", "failure", "verified", "outcome", "violation"),
    [
        ("none", "", 9, Outcome.FINE, None),
        ("none", "", 0, Outcome.NOTHING, None),
        ("start", NO_MEMORY, 9, Outcome.START, STOPPED),
        ("finish", NO_MEMORY, 9, Outcome.ENDED, STOPPED),
        ("serve", "sys.exit(9)", 9, Outcome.ENDED, "the engine 'engine' ended with exit code 9"),
        ("serve", AUDIT_ERROR, 9, Outcome.ENGINE, "nwor audit, step 3: 1 bytes"),
        ("start", AUDIT_ERROR, 9, Outcome.ENGINE, "nwor audit, step 3: 1 bytes"),
    ],
)
def test_an_engine_that_ends_in_any_way(command, failure, verified, outcome, violation, tmp_path, capsys, monkeypatch):
    program = ANSWERS.replace("COMMAND", command).replace("FAILURE", failure or "pass")
    start_program(tmp_path, program.replace("VERIFIED", str(verified)), monkeypatch)
    assert run_verify(options(tmp_path, arguments=("MODEL",)), as_json=True) == outcome
    found = json.loads(capsys.readouterr().out)
    assert (found["exit_code"], found["violation"], found["ok"]) == (outcome, violation, outcome == Outcome.FINE)
    log = contents(tmp_path / "found.tar.gz").get("nwor-verify/engine.log", "")
    assert (violation in log) == (outcome == Outcome.ENGINE) if violation else not log


@pytest.mark.parametrize(("step_seconds", "fewest", "most"), [(0.0, 20, 10**6), (0.4, 1, 4)])
def test_the_engine_serves_until_the_time_is_over(step_seconds, fewest, most, tmp_path, monkeypatch):
    """With a large cache one step may take longer than a step of the progress."""
    log = tmp_path / "commands"
    failure = f"__import__('time').sleep({step_seconds}); open({str(log)!r}, 'a').write(line)"
    program = ANSWERS.replace("COMMAND", "serve").replace("FAILURE", failure).replace("VERIFIED", "9")
    start_program(tmp_path, program, monkeypatch)
    monkeypatch.setattr(verify, "SLICE_SECONDS", 0.05)
    given = options(tmp_path, arguments=("MODEL",), minutes=1 / 60)
    assert run_verify(given, as_json=True) == Outcome.FINE
    assert fewest <= len(log.read_text().splitlines()) <= most


WHY = "FULL graphs call no Python"


@pytest.mark.parametrize(
    ("states", "why", "sentences"),
    [
        ([], [], []),
        ([{"states_computed": 600}], [], ["1,200 recurrent states of vLLM compared"]),
        ([], [WHY], [f"vLLM's recurrent states were not audited: {WHY}"]),
    ],
    ids=["none", "audited", "not audited"],
)
def test_what_was_audited_of_vllms_states_is_said(states, why, sentences, tmp_path, capsys, monkeypatch):
    """There are two ranks. They have the same reason, which is said once."""
    program = ANSWERS.replace('"vllm_states": []', f'"vllm_states": {states}').replace("FAILURE", "pass")
    program = program.replace('"vllm_states_not_audited": []', f'"vllm_states_not_audited": {why}')
    start_program(tmp_path, program.replace("VERIFIED", "9").replace("audits = ", "audits = 2 * "), monkeypatch)
    assert run_verify(options(tmp_path, arguments=("MODEL",)), as_json=False) == Outcome.FINE
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "recurrent states" in line] == sentences
    report = json.loads(contents(tmp_path / "found.tar.gz")["nwor-verify/report.json"])
    assert report["engine"]["audits"][0]["vllm_states_not_audited"] == why


def test_invalid_arguments_of_vllm(tmp_path, monkeypatch):
    said = "vllm serve: error: unrecognized arguments: --x"
    start_program(tmp_path, f"import json; print(json.dumps({{'error': 'InvalidArguments: {said}'}}))", monkeypatch)
    with pytest.raises(InvalidOptions, match=f"^vLLM refuses the arguments: {said}$"):
        run_verify(options(tmp_path, arguments=("MODEL", "--x")), as_json=True)
    assert not (tmp_path / "found.tar.gz").exists()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("changes", "variables", "complaint"),
    [
        ({"output": "."}, {}, "--output: . must be a file in a folder that exists"),
        ({"output": "no/such/folder"}, {}, "--output: no/such/folder must be a file in a folder that exists"),
        ({"prompts": "none"}, {}, "--prompts: there is no file none"),
        ({"prompts": "empty"}, {}, "--prompts: empty has no prompt"),
        pytest.param(
            {"output": "x" * 300}, {}, f"--output: {'x' * 300} cannot be written: File name too long", id="a long name"
        ),
        ({"output": "/proc/none"}, {}, "--output: /proc/none cannot be written: No such file or directory"),
        ({"prompts": "list"}, {}, r"--prompts: line 2 of list must be text or a JSON list of token ids"),
        ({"prompts": "octal"}, {}, r"--prompts: line 1 of octal must be text or a JSON list of token ids"),
        ({"prompts": "deep"}, {}, r"--prompts: line 1 of deep must be text or a JSON list of token ids"),
        ({"prompts": "/proc/self/mem"}, {}, "--prompts: /proc/self/mem cannot be read: Input/output error"),
        ({"arguments": ("M",)}, {"VLLM_NWOR_MODE": "cwo"}, "nwor: mode must be one of off, cow, stage, got 'cwo'"),
        ({"arguments": ("M",)}, {"VLLM_NWOR": "off"}, "VLLM_NWOR=off switches the audit off too; unset it"),
    ],
)
def test_invalid_options(changes, variables, complaint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "list").write_text("fine\n[1, 2\n")
    (tmp_path / "octal").write_text("[007]\n")
    (tmp_path / "deep").write_text("[" * 100_000)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    paths = {name: Path(value) if isinstance(value, str) else value for name, value in changes.items()}
    with pytest.raises(InvalidOptions) as caught:
        check_options(options(tmp_path, **paths))
    assert str(caught.value) == complaint


def test_a_valid_output_is_not_touched_before_the_end(tmp_path):
    given = options(tmp_path)
    check_options(given)
    assert not given.output.exists()
    given.output.write_text("an earlier archive")
    check_options(given)
    assert given.output.read_text() == "an earlier archive"


def test_a_line_of_prompts_ends_with_a_newline_only(tmp_path):
    path = tmp_path / "prompts"
    path.write_text("one\u2028two\nthree\n", encoding="utf-8")
    assert verify._prompts(options(tmp_path, prompts=path)) == ["one\u2028two", "three"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there(tmp_path):
    with pytest.raises(InvalidOptions, match=r"^--device cuda: torch finds no GPU on this machine"):
        check_options(options(tmp_path, device="cuda"))


# ---------------------------------------------------------------- what is left out

SECRET = "s3cr3t-of-an-engine"


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "DB_PASSWORD", "REGISTRY_AUTH", "SOMETHING"],
)
def test_values_of_other_variables_are_removed(name):
    redaction = Redaction({name: SECRET, "VLLM_NWOR_MODE": "cow"}, (), ())
    assert redaction.log(f"using {SECRET} now\nmode cow") == "using <removed> now\nmode cow\n"
    assert redaction.tree({"a": [f"x{SECRET}"], SECRET: 1}) == {"a": ["x<removed>"], "<removed>": 1}
    assert name not in allowed_environment({name: SECRET})


def test_words_that_are_no_secrets_stay():
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": "/usr/local/bin:/usr/bin",
        "LANG": "C",
        "NUM_TOKENS": "8192",
    }
    line = "false, /usr/bin, C, 8192, max_model_len=4096, --max-num-batched-tokens 8192, block_size: 16"
    assert Redaction(environment, ("--max-num-batched-tokens", "8192"), ()).log(line) == f"{line}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--api-key", SECRET),
        (f"--api-key={SECRET}",),
        ("--api-key", "other", SECRET, "--seed", "3"),
        ("--hf-token", SECRET),
    ],
)
def test_secret_arguments_are_removed(arguments):
    redacted = Redaction({}, arguments, ()).tree(list(arguments))
    assert not any(SECRET in argument for argument in redacted)
    assert redacted[0].startswith(arguments[0][:6])


@pytest.mark.parametrize(
    "line",
    [
        f"api_key={SECRET}", f"'api_key': '{SECRET}'", f'{{"hf_token": "{SECRET}"}}', f"password: {SECRET}",
        f"Authorization: Bearer {SECRET}", f"http://user:{SECRET}@host/path", f"hf_{'a' * 20}{SECRET}", f"sk-{SECRET}",
        f"api_key=['{SECRET}', 'b']",
    ],
)  # fmt: skip
def test_secrets_that_name_themselves_are_removed(line):
    redacted = Redaction({}, (), ()).log(f"a {line} z")
    assert SECRET not in redacted
    assert redacted.startswith("a ")


PROMPT = 'Dear Mr. "O\'Hara", your balance\tis 12'


@pytest.mark.parametrize("line", [PROMPT, repr(PROMPT), json.dumps(PROMPT), f"{PROMPT[:20]}...", PROMPT * 2])
def test_prompts_are_removed(line):
    redacted = Redaction({}, (), [PROMPT]).log(f"request 7: {line}")
    assert "O'Hara" not in redacted
    assert "balance" not in redacted


@pytest.mark.parametrize(
    ("line", "redacted"),
    [
        ("prompt_token_ids=[5, 6, 7], x", "prompt_token_ids=<removed>, x"),
        ("scheduled_spec_decode_tokens={'0': [5, 6]}, x", "scheduled_spec_decode_tokens=<removed>, x"),
        ("prompt: 'hello there', params", "prompt: <removed>, params"),
        ("ids 1 2 3 4 5 6 7 8 9 end", "ids <removed> end"),
        ("tensor([101, 7592, 2088, 102, 0, 0, 0, 0])", "tensor([<removed>])"),
        ("AuditError: nwor audit, step 3: query_start_loc [0, 1, 2, 3, 4, 5, 6, 7, 8]", None),
        ("2026-01-02 10:11:12 [core.py:133] cache 3,072 tokens, 12.00x, sizes [1, 2, 4, 8]", None),
    ],
)
def test_token_ids_are_removed_from_the_log(line, redacted):
    assert Redaction({}, (), ()).log(line) == f"{redacted or line}\n"


def test_the_home_folder_is_removed(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jo")
    redaction = Redaction({}, (), ())
    assert redaction.text("/home/jo/models, /home/john/x, '/home/jo'") == "~/models, /home/john/x, '~'"


def test_the_archive_names_nobody(tmp_path):
    """Neither users nor hosts, in the archive or its compressed stream, and the same content gives the same bytes."""
    for name in ("one.tar.gz", "two.tar.gz"):
        write_archive(tmp_path / name, {"a": 1}, "a line\n")
    one, two = ((tmp_path / name).read_bytes() for name in ("one.tar.gz", "two.tar.gz"))
    assert one == two
    assert b"one.tar" not in one
    with tarfile.open(tmp_path / "one.tar.gz") as archive:
        assert {(member.uname, member.gname, member.uid) for member in archive.getmembers()} == {("", "", 0)}
    assert contents(tmp_path / "one.tar.gz")["nwor-verify/engine.log"] == "a line\n"


def test_no_allowed_variable_is_secret():
    assert not any(verify_archive._SECRET_NAME.search(name) for name in verify_archive.ALLOWED_VARIABLES)
