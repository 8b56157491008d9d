"""``nwor-ops verify``: compare random windows of every op with the oracles, then audit an engine at every step.

The engine has the user's model, arguments and settings, and random requests (``verify_engine``). Everything that a bug
report needs goes to one archive (``verify_archive``).
"""

from __future__ import annotations

import enum
import json
import os
import pathlib
import re
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from nwor_ops.cli.files import check_file, lines_of, not_written, parse_json
from nwor_ops.cli.progress import Tasks
from nwor_ops.cli.verify_archive import Redaction, allowed_environment, versions_here, write_archive
from nwor_ops.config import NworConfig, switched_off
from nwor_ops.testing.engine_process import EngineFailed, EngineProcess
from nwor_ops.testing.random_windows import run_window
from nwor_ops.testing.samples import FAMILIES

# The share of the ops in the time, if an engine runs too.
SHARE_OF_OPS = 0.1
# An engine serves requests for this time before the progress is updated.
SLICE_SECONDS = 1.0
# After this time at the end, the engine aborts requests that still run.
LAST_SECONDS = 20.0
# The start of an engine may download and compile a large model.
PATIENCE_SECONDS = 3600.0
_AUDIT_ERROR = re.compile(r"\bAuditError: (.+)$", re.MULTILINE)
_INVALID = "InvalidArguments: "


class Outcome(enum.IntEnum):
    """The exit code of ``nwor-ops verify``."""

    FINE = 0  # no violation
    INVALID = 2  # the command line or a setting is invalid
    OP = 3  # an op differs from its oracle
    ENGINE = 4  # the audit of the engine found a violation
    START = 5  # the engine did not start
    ENDED = 6  # the engine ended by an error that is not a violation
    NOTHING = 7  # the engine ran, but no step with drafts was audited


class InvalidOptions(ValueError):
    """An option or a setting is invalid."""


@dataclass(frozen=True)
class VerifyOptions:
    """Options of ``nwor-ops verify``.

    Attributes:
        minutes: time of the comparisons, without the start of the engine.
        seed: seed of the windows and the requests.
        output: file of the archive.
        device: device of the ops.
        prompts: file with a prompt per line for the engine: a text, or a JSON list of token ids. None: random prompts.
        arguments: the arguments of ``vllm serve``. Without them no engine runs.
    """

    minutes: float
    seed: int
    output: pathlib.Path
    device: str
    prompts: pathlib.Path | None
    arguments: tuple[str, ...]


@dataclass
class Result:
    """What was compared, and the first violation.

    Attributes:
        outcome: the exit code.
        sentence: the conclusion in a sentence.
        violation: the first violation, or the error of the engine.
        command: a command that repeats the first wrong window of an op.
        ops: rounds and calls of each op, with their device.
        engine: what was served and audited.
        log: the log of the engine.
    """

    outcome: Outcome = Outcome.FINE
    sentence: str = ""
    violation: str | None = None
    command: str | None = None
    ops: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    log: str = ""


Task = Callable[[str, int | None], AbstractContextManager[Callable[[], None]]]


def check_options(options: VerifyOptions) -> None:
    """Raise InvalidOptions with a sentence if an option or a setting is invalid."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise InvalidOptions("--device cuda: torch finds no GPU on this machine; `nwor-ops doctor` says why")
    try:
        check_file(options.output)
        _check_prompts(options)
    except ValueError as error:
        raise InvalidOptions(str(error)) from None
    if options.arguments:
        try:
            NworConfig.load()
            off = switched_off()
        except ValueError as error:
            raise InvalidOptions(str(error)) from None
        if off:
            raise InvalidOptions("VLLM_NWOR=off switches the audit off too; unset it")


def _check_prompts(options: VerifyOptions) -> None:
    if options.prompts is None:
        return
    if not options.prompts.is_file():
        raise ValueError(f"--prompts: there is no file {options.prompts}")
    lines = lines_of("--prompts", options.prompts)
    if not any(map(str.strip, lines)):
        raise ValueError(f"--prompts: {options.prompts} has no prompt")
    for number, line in enumerate(lines, 1):
        if line.strip().startswith("[") and not _is_list_of_tokens(line):
            raise ValueError(f"--prompts: line {number} of {options.prompts} must be text or a JSON list of token ids")


def _is_list_of_tokens(line: str) -> bool:
    tokens = parse_json(line)
    return isinstance(tokens, list) and bool(tokens) and all(type(token) is int and token >= 0 for token in tokens)


def _prompts(options: VerifyOptions) -> list[str]:
    """Return the lines of the user's file that are not empty."""
    if options.prompts is None:
        return []
    return [line.strip() for line in lines_of("--prompts", options.prompts) if line.strip()]


def run_verify(options: VerifyOptions, as_json: bool) -> int:
    """Compare, print the result, write the archive, and return the exit code.

    Raises:
        InvalidOptions: vLLM refuses the arguments.
    """
    redaction = Redaction(os.environ, options.arguments, _prompts(options))
    progress = Console(stderr=True, highlight=False)
    tasks, result = Tasks(progress, 4 if options.arguments else 1), Result()
    with tempfile.TemporaryDirectory(prefix="nwor-verify-") as folder:
        engine = _engine(options, pathlib.Path(folder)) if options.arguments else None
        try:
            if engine is not None:
                with tasks.task("reading the engine's arguments"):
                    _read_arguments(engine)
            seconds = options.minutes * 60
            _compare_ops(options, seconds * (SHARE_OF_OPS if engine else 1.0), tasks.task, result)
            if engine is not None and result.outcome is Outcome.FINE:
                _audit_engine(engine, seconds * (1 - SHARE_OF_OPS), tasks.task, result)
        finally:
            if engine is not None:
                engine.close()
                result.log = engine.log.read_text(errors="replace")
        _conclude(result)
    report = redaction.tree(_report(options, result))
    archive: str | None = str(options.output)
    try:
        write_archive(options.output, report, redaction.log(result.log))
    except OSError as error:  # a full disk, for example; the result is printed all the same
        archive = None
        progress.print(f"nwor-ops verify: {escape(not_written(options.output, error))}", soft_wrap=True)
    if as_json:
        print(json.dumps(report | {"archive": archive}, indent=2))
    else:
        _print(report, Console(highlight=False), archive)
    return result.outcome.value


# ---------------------------------------------------------------- ops


def _compare_ops(options: VerifyOptions, seconds: float, task: Task, result: Result) -> None:
    """Compare windows until the time is over: at least one of each family. Stop at the first difference."""
    calls: Counter[str] = Counter()
    doing, whole_seconds = f"comparing random windows of every op on {options.device}", max(1, round(seconds))
    started, rounds = time.monotonic(), 0
    with task(doing, whole_seconds) as advance:
        show = _progress(advance, whole_seconds)
        while result.violation is None and (rounds == 0 or time.monotonic() < started + seconds):
            _compare_round(options.seed + rounds, options.device, calls, result)
            rounds += 1
            show(time.monotonic() - started)
    taken = round(time.monotonic() - started, 1)
    result.ops = {"device": options.device, "rounds": rounds, "seconds": taken, "calls": dict(sorted(calls.items()))}


def _progress(advance: Callable[[], None], most: int) -> Callable[[float], None]:
    """Return a function that shows how many of the parts of a task are done."""
    shown = 0

    def show(done: float) -> None:
        nonlocal shown
        while shown < min(most, int(done)):
            advance()
            shown += 1

    return show


def _compare_round(seed: int, device: str, calls: Counter[str], result: Result) -> None:
    """Compare a window of each family, and count the calls. Any error of an op is a violation."""
    family = ""
    try:
        for family in FAMILIES:
            calls += run_window(family, seed, device)
    except Exception as error:
        result.outcome = Outcome.OP
        result.violation = f"family {family}, seed {seed}: {_sentence(error)}"
        result.command = f"nwor-ops verify --minutes 0 --device {device} --seed {seed}"


def _sentence(error: Exception) -> str:
    """Return the message of a mismatch, or the class and message of an error that an op raised."""
    message = str(error).strip()
    return message if isinstance(error, AssertionError) else f"{type(error).__name__}: {message}"


# ---------------------------------------------------------------- the engine


def _engine(options: VerifyOptions, folder: pathlib.Path) -> EngineProcess:
    job = {"arguments": list(options.arguments), "prompts": _prompts(options), "seed": options.seed}
    environment = os.environ | {
        "VLLM_NWOR_AUDIT": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # workers in other processes are asked what they audited
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }
    program = ("-m", "nwor_ops.cli.verify_engine")
    return EngineProcess("engine", job, folder, environment, program, PATIENCE_SECONDS)


def _read_arguments(engine: EngineProcess) -> None:
    try:
        engine.wait_until_ready()
    except EngineFailed as error:
        sentence = error.sentence or str(error)
        found = re.search(f"{_INVALID}(.*?)(?: \\(log: |$)", sentence, re.DOTALL)
        raise InvalidOptions(f"vLLM refuses the arguments: {found[1] if found else sentence}") from None


def _audit_engine(engine: EngineProcess, seconds: float, task: Task, result: Result) -> None:
    """Start the engine and serve random requests until the time is over. An error of the audit ends the engine."""
    started, doing = False, "starting the engine, audited at every step"
    try:
        with task(doing, None):
            engine.ask("start")
        started = True
        slices, rest = max(1, round(seconds / SLICE_SECONDS)), seconds
        with task("serving random requests", slices) as advance:
            began, show = time.monotonic(), _progress(advance, slices)
            while "requests" not in result.engine or rest > 0:  # a step of a large cache may take seconds
                result.engine["requests"] = engine.ask(f"serve {min(rest, SLICE_SECONDS):.2f}")
                passed = time.monotonic() - began
                rest = seconds - passed
                show(passed / SLICE_SECONDS)
            result.engine |= engine.ask(f"finish {LAST_SECONDS}")
        if not _audited_windows(result.engine["audits"]):
            result.outcome = Outcome.NOTHING
    except EngineFailed as error:
        engine.close()  # so that its log is complete
        found = _AUDIT_ERROR.search(engine.log.read_text(errors="replace"))
        if found is not None:
            result.outcome, result.violation = Outcome.ENGINE, found[1].strip()
        else:
            result.outcome = Outcome.ENDED if started else Outcome.START
            what = error.sentence or str(error).splitlines()[0]
            result.violation = re.sub(r" \(log: [^)]*\)$|; the end of \S+:$", "", what)


def _audited_windows(audits: list[dict[str, Any]]) -> int:
    """Return the number of audited steps with drafts, over all workers."""
    of_transaction = sum(found["verify_steps"] for audit in audits for found in audit["transaction"])
    return of_transaction + sum(found["windows"] for audit in audits for found in audit["recurrent"])


def _states_of_vllm(audits: list[dict[str, Any]]) -> list[str]:
    """Return what was audited of the recurrent states that vLLM keeps, and why the rest was not."""
    found = [states for audit in audits for states in audit["vllm_states"]]
    computed = sum(states["states_computed"] for states in found)
    reasons = dict.fromkeys(reason for audit in audits for reason in audit["vllm_states_not_audited"])
    return [f"{computed:,} recurrent states of vLLM compared"] * bool(found) + [
        f"vLLM's recurrent states were not audited: {reason}" for reason in reasons
    ]


# ---------------------------------------------------------------- the report


def _conclude(result: Result) -> None:
    result.sentence = {
        Outcome.FINE: "no violation found",
        Outcome.OP: "an op differs from its oracle",
        Outcome.ENGINE: "the audit of the engine found a violation",
        Outcome.START: "the engine did not start",
        Outcome.ENDED: "the engine ended by an error that is not a violation",
        Outcome.NOTHING: "no step with drafts was audited: add --speculative-config, or give more --minutes",
    }[result.outcome]


def _report(options: VerifyOptions, result: Result) -> dict[str, Any]:
    return {
        "ok": result.outcome is Outcome.FINE,
        "exit_code": result.outcome.value,
        "outcome": result.sentence,
        "violation": result.violation,
        "command": result.command,
        "minutes": options.minutes,
        "seed": options.seed,
        "prompts": "random" if options.prompts is None else "from a file",
        "arguments": list(options.arguments),
        "environment": allowed_environment(os.environ),
        "versions": versions_here(),
        "ops": result.ops,
        "engine": result.engine,
    }


def _print(report: dict[str, Any], console: Console, archive: str | None) -> None:
    ops = report["ops"]
    console.print(
        f"{ops['rounds']} rounds of random windows on {ops['device']}: {sum(ops['calls'].values()):,} calls of "
        f"{len(ops['calls'])} ops compared with the oracles",
        soft_wrap=True,
    )
    if "audits" in report["engine"]:
        requests = report["engine"]["requests"]
        served = ", ".join(f"{count:,} {name}" for name, count in requests.items())
        console.print(f"engine {escape(shlex.join(report['arguments']))}", soft_wrap=True)
        windows = _audited_windows(report["engine"]["audits"])
        console.print(f"served {served}; {windows:,} audited steps with drafts", soft_wrap=True)
        for sentence in _states_of_vllm(report["engine"]["audits"]):
            console.print(escape(sentence), soft_wrap=True)
    colour = "green" if report["ok"] else "red"
    console.print(f"[bold {colour}]{escape(report['outcome'])}[/] (exit code {report['exit_code']})", soft_wrap=True)
    for name in ("violation", "command"):
        if report[name]:
            console.print(f"{name}: {escape(report[name])}", soft_wrap=True)
    if archive is not None:
        console.print(f"archive for a bug report: {escape(archive)}", soft_wrap=True)
