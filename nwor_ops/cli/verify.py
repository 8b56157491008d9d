"""``nwor-ops verify``: compare random windows of every op with the oracles, then audit an engine at every step.

The engine has the user's model, arguments and settings, and random requests (``verify_engine``). ``report.json`` is for
a bug report. It has chosen values only: neither prompts, arguments, paths nor texts of vLLM, which could hold secrets.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import nwor_ops
from nwor_ops.cli.check import look_at
from nwor_ops.cli.report import BAD, GOOD, Exit, Report, Stopped, counted, make_folder, versions
from nwor_ops.config import switched_off
from nwor_ops.testing.against_oracle import run_round
from nwor_ops.testing.engine_process import CLOSING_SECONDS, EngineFailed, EngineProcess

SHARE_OF_OPS = 0.1  # of the time, if an engine runs too
SLICE_SECONDS = 60.0  # of the engine's work between two commands
PATIENCE_SECONDS = 3600.0  # the start of an engine may download and compile a large model
_AUDIT_ERROR = re.compile(r"\bAuditError: (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class VerifyOptions:
    """The options of the command; see ``nwor-ops verify --help``. Without arguments no engine runs."""

    output: pathlib.Path
    minutes: float = 5.0
    seed: int = 0
    prompts: pathlib.Path | None = None
    arguments: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """The device of the ops."""
        return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Result:
    """What was compared, and the first error, in words of nwor_ops. Words of vLLM may hold secrets.

    ``command`` repeats the first wrong window of an op.
    """

    exit_code: Exit = Exit.FINE
    outcome: str = "no error found"
    error: str | None = None
    command: str | None = None
    ops: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def end(self, exit_code: Exit, outcome: str, error: str | None = None) -> None:
        self.exit_code, self.outcome, self.error = exit_code, outcome, error


def check_options(options: VerifyOptions) -> None:
    """Check the options. Raises Stopped."""
    if options.prompts is not None and not prompts_of(options):
        raise Stopped(f"--prompts: {options.prompts} has no prompt")
    make_folder(options.output)


def prompts_of(options: VerifyOptions) -> list[str]:
    """Return the lines of the user's file that are not empty. Texts have other separators too, such as U+2028."""
    try:
        text = "" if options.prompts is None else options.prompts.read_text(errors="replace")
    except OSError as error:
        raise Stopped(f"--prompts: {options.prompts} cannot be read: {error.strerror}") from None
    return [line.strip() for line in text.split("\n") if line.strip()]


def run_verify(options: VerifyOptions, report: Report) -> int:
    """Compare, print and write the result, and return the exit code. Raises Stopped if vLLM refuses the arguments."""
    result, seconds, share = Result(), options.minutes * 60, 1.0
    if options.arguments:
        share = SHARE_OF_OPS
        with report.task("reading the engine's arguments"):
            check_arguments(options)
    with report.task(f"comparing random windows of every op on {options.device}"):
        _compare_ops(options, seconds * share, result)
    if options.arguments and result.exit_code == Exit.FINE:
        _audit_engine(options, seconds * (1 - share), report, result)
    report.result("report for a bug report", options.output / "report.json", _as_dict(options, result))
    _print(options, result, report)
    return result.exit_code


def check_arguments(options: VerifyOptions) -> None:
    """Check the arguments of the engine and the settings as ``nwor-ops check`` does. Raises Stopped."""
    config, _ = look_at(options.arguments)
    if switched_off():
        raise Stopped("VLLM_NWOR=off switches the audit off too; unset it")
    if config.parallel_config.data_parallel_size > 1:
        raise Stopped("--data-parallel-size must be 1: the ranks of a dense model are separate engines")


# ---------------------------------------------------------------- ops


def _compare_ops(options: VerifyOptions, seconds: float, result: Result) -> None:
    """Compare windows until the time is over: at least one of each family. Stop at the first difference."""
    calls: Counter[str] = Counter()
    started, rounds = time.monotonic(), 0
    while result.error is None and (rounds == 0 or time.monotonic() < started + seconds):
        seed = options.seed + rounds
        try:
            calls += run_round(seed, options.device)
        except Exception as error:  # of an op, whatever it is
            message = str(error).strip() if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
            result.end(Exit.OP, "an op differs from its oracle", f"seed {seed}: {message}")
            result.command = f"nwor-ops verify --minutes 0 --seed {seed}"
        rounds += 1
    taken = round(time.monotonic() - started, 1)
    result.ops = {"device": options.device, "rounds": rounds, "seconds": taken, "calls": dict(sorted(calls.items()))}


# ---------------------------------------------------------------- the engine


def start_program(options: VerifyOptions, name: str, drafts: bool) -> EngineProcess:
    job = {"arguments": list(options.arguments), "prompts": prompts_of(options), "seed": options.seed, "drafts": drafts}
    environment = os.environ | {
        "VLLM_NWOR_AUDIT": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # workers in other processes are asked what they audited
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }
    program = ("-m", "nwor_ops.cli.verify_engine")
    return EngineProcess(name, job, options.output, environment, program, PATIENCE_SECONDS)


@contextlib.contextmanager
def running(options: VerifyOptions, report: Report, name: str, drafts: bool = True) -> Iterator[EngineProcess]:
    """Start the program of an engine, with drafts or without, and end it."""
    engine = start_program(options, name, drafts)

    def end() -> None:
        engine.close()
        (options.output / f"{name}.job.json").unlink()  # it has the prompts

    with report.ending("the engine", CLOSING_SECONDS, end):
        yield engine


def _audit_engine(options: VerifyOptions, seconds: float, report: Report, result: Result) -> None:
    """Start the engine and serve random requests until the time is over. An error of the audit ends the engine."""
    try:
        with running(options, report, "engine") as engine:
            with report.task("starting the engine, audited at every step"):
                result.engine = engine.wait_until_ready()
            with report.task("serving a long prompt three times"):
                result.engine["prefix"] = engine.ask("repeat")
            with report.task(f"serving random requests for {seconds / 60:.1f} min"):
                begun, rest = time.monotonic(), seconds
                while "requests" not in result.engine or rest > 0:  # an engine that fails leaves its last counts
                    result.engine |= engine.ask(f"serve {min(rest, SLICE_SECONDS):.2f}")
                    rest = begun + seconds - time.monotonic()
    except EngineFailed as error:  # the engine has ended, so its log is complete
        audit = _AUDIT_ERROR.search((options.output / "engine.log").read_text(errors="replace"))
        if audit is not None:
            result.end(Exit.AUDIT, "the audit of the engine found an error", audit[1].strip())
        else:
            what = "ended by an error that the audit did not find" if result.engine else "did not start"
            result.end(Exit.FAILED, f"the engine {what}")
            report.error(str(error))
        return
    if not audited_windows(result.engine["audits"]):
        more = "add --speculative-config, or give more --minutes"
        result.end(Exit.NOTHING, f"no step with drafts was audited: {more}")
    elif without_hits(result.engine):
        _repeat_without_drafts(options, report, result)


def without_hits(engine: dict[str, Any]) -> bool:
    """Return whether an engine with drafts and prefix caching found nothing of a repeated prompt."""
    return bool(engine["prefix_caching"] and engine["method"]) and not any(engine["prefix"]["cached_tokens"])


def _repeat_without_drafts(options: VerifyOptions, report: Report, result: Result) -> None:
    try:
        with (
            report.task("repeating the prompt without drafts"),
            running(options, report, "engine_without_drafts", drafts=False) as engine,
        ):
            engine.wait_until_ready()
            result.engine["prefix"]["cached_tokens_without_drafts"] = engine.ask("repeat")["cached_tokens"]
    except EngineFailed as error:
        report.notice(f"no comparison of prefix hits: {error}")


def prefix_sentence(engine: dict[str, Any]) -> str:
    """Return how many tokens of a repeated prompt came from the prefix cache, and the setting that prevents it."""
    if not engine["prefix_caching"]:
        return "prefix caching is off; --enable-prefix-caching switches it on"
    prefix, size = engine["prefix"], engine["block_size"]
    text = f"{max(prefix['cached_tokens'])} of {prefix['prompt_tokens']} tokens of a repeated prompt were cached"
    without = prefix.get("cached_tokens_without_drafts")
    if without is None:
        return text
    text += f", {max(without)} without drafts"
    if not any(without):
        return f"{text}: drafts are not the cause; a block has {size} tokens, and only whole blocks are cached"
    if engine["hybrid"] and engine["prefix_cache_retention_interval"] == 0:
        text += f": --prefix-cache-retention-interval is 0, so vLLM keeps few states; try {size}"
    return text


def audited_windows(audits: list[dict[str, Any]]) -> int:
    """Return the number of audited steps with drafts, over all workers."""
    verified = sum(cache["verify_steps"] for audit in audits for cache in audit["transaction"])
    return verified + sum(states["windows"] for audit in audits for states in audit["recurrent"])


# ---------------------------------------------------------------- the report


def _as_dict(options: VerifyOptions, result: Result) -> dict[str, Any]:
    return {
        "ok": result.exit_code == Exit.FINE,
        "minutes": options.minutes,
        "seed": options.seed,
        "prompts": "random" if options.prompts is None else "from a file",
        "versions": versions(),
        "machine": {
            "machine": platform.machine(),
            "kernel": platform.release(),
            "cuda": torch.version.cuda,
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
            "libraries": [library.kind for library in nwor_ops.LIBRARIES if library.loaded],
        },
    } | asdict(result)


def _print(options: VerifyOptions, result: Result, report: Report) -> None:
    calls, rounds = result.ops["calls"], result.ops["rounds"]
    report.line(
        f"{counted(rounds, 'round')} of random windows on {options.device}: {sum(calls.values()):,} calls "
        f"of {len(calls)} ops compared with the oracles"
    )
    if "requests" in result.engine:
        served = ", ".join(f"{count:,} {name}" for name, count in result.engine["requests"].items())
        audits = result.engine["audits"]
        report.line(f"engine {shlex.join(options.arguments)}")
        report.line(f"served {served}; {counted(audited_windows(audits), 'audited step')} with drafts")
        if states := sum(states["states_computed"] for audit in audits for states in audit["vllm_states"]):
            report.line(f"{states:,} recurrent states of vLLM compared")
        for reason in dict.fromkeys(reason for audit in audits for reason in audit["vllm_states_not_audited"]):
            report.line(f"vLLM's recurrent states were not audited: {reason}")
    if "prefix" in result.engine:
        report.line(prefix_sentence(result.engine), "prefix cache")
    style = GOOD if result.exit_code == Exit.FINE else BAD
    report.line(f"{result.outcome} (exit code {result.exit_code:d})", style=style)
    for name in ("error", "command"):
        if text := getattr(result, name):
            report.line(text, name)
    if result.engine:
        report.line(summary(result), "to paste")


def summary(result: Result) -> str:
    """Return one line for a bug report: versions, model, and the first error or the number of steps without one.

    The error names step, layer and request. Words of vLLM are left out.
    """
    engine, installed = result.engine, versions()
    parts = [
        f"nwor_ops {installed['nwor_ops']}, vLLM {installed['vllm']}, torch {installed['torch']}",
        f"{engine['architecture']} on {engine['device']}, {engine['method'] or 'no drafts'} "
        f"K={engine['num_speculative_tokens'] or 0}, mode {engine['settings']['mode']}",
    ]
    if result.exit_code == Exit.FINE:
        parts.append(f"no difference in {counted(audited_windows(engine['audits']), 'step')}")
    else:
        parts.append(result.error or result.outcome)
    return "; ".join(parts)
