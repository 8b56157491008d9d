"""The archive of ``nwor-ops verify``: a report and the engine's log, without prompts, token ids, secrets and the home
folder."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import pathlib
import platform
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nwor_ops.config import is_ours

FOLDER = "nwor-verify"  # in the archive
REMOVED = "<removed>"
# Besides the plugin's own. VLLM_API_KEY is one reason why this is a list of names, not a prefix.
ALLOWED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "VLLM_ALLREDUCE_USE_FLASHINFER",
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_ATTENTION_BACKEND",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_DISABLE_COMPILE_CACHE",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_FLASH_ATTN_VERSION",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_PLUGINS",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_WORKER_MULTIPROC_METHOD",
)
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|KEY_ID|SECRET\w*|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|TOKEN)$", re.IGNORECASE
)
_SECRETS = (
    # name: value, name=value, "name": "value"
    (re.compile(r"""(?i)(\b[\w-]*(?:api[_-]?key|secret|password|passwd|(?<![a-z])token)["']?\s*[:=]\s*)"""
                r"""(?:"[^"]*"|'[^']*'|\[[^\]]*\]|[^\s,}\])]+)"""), rf"\g<1>{REMOVED}"),
    (re.compile(r"(?i)(\bauthorization\b\W+(?:bearer|basic)?\s*)[^\s\"',]+"), rf"\g<1>{REMOVED}"),
    (re.compile(r"://[^/\s:@]+:[^/\s@]+@"), f"://{REMOVED}@"),
    (re.compile(r"\b(?:hf_|sk-|ghp_)[\w-]{8,}"), REMOVED),
)  # fmt: skip
# Values whose name says that they are tokens or prompts, and long lists of numbers.
_TOKENS = (
    (re.compile(r"""(?i)(\b\w*(?:token_ids|tokens|prompt)["']?\s*[:=]\s*)(?:\{[^}]*\}|\[[^\]]*\]|"[^"]*"|'[^']*')"""),
     rf"\g<1>{REMOVED}"),
    (re.compile(r"(?<![\w.])-?\d+(?:[,\s]+-?\d+){7,}(?![\w.])"), REMOVED),
)  # fmt: skip
_SHORTEST_SECRET, _LONG_VALUE, _START_OF_PROMPT = 4, 12, 16
_AUDIT = "nwor audit"  # our lines have slots and counts, no token ids


class Redaction:
    """Remove prompts, token ids, secrets and the home folder from text.

    Args:
        environment: the environment of the command. Values of variables that are not allowed are removed if their name
            says that they are secret, or if they are long and not a path.
        arguments: the arguments of the engine; values of options like ``--api-key`` are removed.
        prompts: the user's prompts.
    """

    def __init__(self, environment: Mapping[str, str], arguments: Sequence[str], prompts: Sequence[str]) -> None:
        secrets = {*_secret_values(environment), *_secret_arguments(arguments)}
        self._secrets = sorted(secrets, key=len, reverse=True)
        texts = {form for prompt in prompts for form in _forms(prompt) if len(form) >= _SHORTEST_SECRET}
        self._prompts = sorted(texts, key=len, reverse=True)
        homes: set[str] = set()
        with contextlib.suppress(RuntimeError):  # there is no home folder
            home = pathlib.Path.home()
            homes = {str(home), str(home.resolve())} - {"/"}
        self._homes = sorted(homes, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return a text without secrets, prompts and the home folder."""
        for secret in self._secrets:
            text = text.replace(secret, REMOVED)
        for prompt in self._prompts:
            text = text.replace(prompt, REMOVED)
        for pattern, replacement in _SECRETS:
            text = pattern.sub(replacement, text)
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)
        return text

    def log(self, log: str) -> str:
        """Return a log without these, and without token ids. Lines with the beginning of a prompt are left out."""
        return "".join(f"{self._line(line)}\n" for line in log.splitlines())

    def tree(self, value: Any) -> Any:
        """Return the values of a report, each redacted as text."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self.tree(part) for name, part in value.items()}
        return [self.tree(part) for part in value] if isinstance(value, (list, tuple)) else value

    def _line(self, line: str) -> str:
        line = self.text(line)
        if any(prompt[:_START_OF_PROMPT] in line for prompt in self._prompts if len(prompt) > _START_OF_PROMPT):
            return REMOVED
        if _AUDIT in line:
            return line
        for pattern, replacement in _TOKENS:
            line = pattern.sub(replacement, line)
        return line


def _forms(prompt: str) -> tuple[str, ...]:
    """Return how a prompt may be written: as it is, in JSON or Python, or as other code writes its token ids."""
    ids = re.findall(r"-?\d+", prompt) if re.fullmatch(r"\[[-\d,\s]+\]", prompt) else []
    return (
        prompt,
        json.dumps(prompt)[1:-1],
        repr(prompt)[1:-1],
        *([separator.join(ids) for separator in (", ", ",", " ")] if ids else []),
    )


def _secret_values(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if name in allowed_environment(environment):
            continue
        is_long = len(value) >= _LONG_VALUE and not re.search(r"[/\s]", value)
        if is_long or (_SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET):
            yield value


def _secret_arguments(arguments: Sequence[str]) -> Iterator[str]:
    for index, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if not name.startswith("--") or not _SECRET_NAME.search(name.replace("-", "_")):
            continue
        if has_value:
            yield value
            continue
        for following in arguments[index + 1 :]:  # an option like --api-key takes several values
            if following.startswith("--"):
                break
            yield following


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a report may show."""
    return {name: value for name, value in sorted(environment.items()) if is_ours(name) or name in ALLOWED_VARIABLES}


def versions_here() -> dict[str, Any]:
    """Return the versions and devices of this machine."""
    import torch

    import nwor_ops

    found: dict[str, Any] = {"nwor_ops": nwor_ops.__version__, "python": platform.python_version()}
    for package in ("torch", "vllm", "vllm-cpu", "triton", "flashinfer-python"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    found |= {"machine": platform.machine(), "kernel": platform.release(), "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found["libraries"] = {library.kind: library.problem or "loaded" for library in nwor_ops.LIBRARIES}
    return found


def write_archive(path: pathlib.Path, report: dict[str, Any], log: str) -> None:
    """Write a report and a log to a ``.tar.gz``. It holds no name of a user or host.

    Raises:
        OSError: the file cannot be written. No partial file remains.
    """
    files = {"report.json": json.dumps(report, indent=2) + "\n"} | ({"engine.log": log} if log else {})
    raw = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for name, text in files.items():
            content = text.encode()
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    with path.open("wb") as file:
        try:
            file.write(raw.getvalue())
            file.flush()
        except OSError:
            if path.is_file():
                path.unlink()
            raise
