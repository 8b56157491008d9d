"""Start an engine process, send it commands, and report why it ended."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import selectors
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from nwor_ops.config import is_ours

PATIENCE_SECONDS = 900.0
# To end after its stdin is closed. vLLM 0.33 on a GPU may need all of it.
CLOSING_SECONDS = 20.0
TAIL_LINES = 25
LONGEST_SENTENCE = 400
_RAISED = re.compile(r"\bERROR\b.*?\] ((?:\w+\.)*\w*(?:Error|Exception|Unsupported|Interrupt): .*)")
# Make tensor parallelism reduce by NCCL only (with disable_custom_all_reduce). vLLM's other methods use NVLink
# multicast, which some machines do not permit.
NCCL_ALONE = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}


class EngineFailed(RuntimeError):
    """An engine ended before it answered. The message ends with the tail of its log.

    Attributes:
        sentence: the engine's own error and the path of its log. None if the engine reported nothing.
    """

    def __init__(self, message: str, sentence: str | None = None) -> None:
        super().__init__(message)
        self.sentence = sentence


def engine_environment(mode: str, audit: bool, offline: bool) -> dict[str, str]:
    """Return the environment of one engine. With mode ``off`` and no audit, it contains nothing of nwor_ops."""
    environment = {name: value for name, value in os.environ.items() if not is_ours(name) and name != "VLLM_PLUGINS"}
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine, plugin and demo in one process
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Two engines share the machine, so each gets one thread and a small cache.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    if mode != "off":
        environment["VLLM_NWOR_MODE"] = mode
    if audit:
        environment["VLLM_NWOR_AUDIT"] = "1"
    return environment


class EngineProcess:
    """One engine in a separate process.

    Args:
        name: name of its job file and log file.
        job: the program's input, written as JSON.
        folder: folder of these files.
        environment: the complete environment of the process.
        program: arguments of Python; the job file is appended. The program answers as ``demo_engine`` does.
        patience: maximum seconds of one answer.
    """

    def __init__(
        self,
        name: str,
        job: dict[str, Any],
        folder: pathlib.Path,
        environment: dict[str, str],
        program: Sequence[str] = ("-m", "nwor_ops.cli.demo_engine"),
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self.name, self._patience = name, patience
        self.log = folder / f"{name}.log"
        job_file = folder / f"{name}.job.json"
        job_file.write_text(json.dumps(job, indent=1) + "\n")
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *program, str(job_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self._unread = b""

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until the engine has started, and return the versions it runs on."""
        return self._answer(self._deadline())["versions"]

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        deadline = self._deadline()
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail_at_end(deadline)
        return self._answer(deadline)

    def close(self, deadline: float | None = None) -> None:
        """Close the engine's stdin and wait until it ends. It has nothing to save, and is killed at the deadline.

        Args:
            deadline: a time of ``time.monotonic()``. None: in ``CLOSING_SECONDS``.
        """
        self.begin_to_close()
        if not self._ends_by(time.monotonic() + CLOSING_SECONDS if deadline is None else deadline):
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def begin_to_close(self) -> None:
        """Close the engine's stdin, which tells it to end. Do not wait."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended, and did not read the last command
                self._process.stdin.close()

    def _deadline(self) -> float:
        return time.monotonic() + self._patience

    def _answer(self, deadline: float) -> dict[str, Any]:
        line = self._read_line(deadline)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            # Messages of pydantic checks in vLLM contain the values of all fields, over many lines.
            said = textwrap.shorten(answer["error"], width=LONGEST_SENTENCE, placeholder=" ...")
            self._fail("stopped", said)
        return answer

    def _read_line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._process.kill()
                    self._fail(f"did not answer within {self._patience:.0f} s")
                if not (read := os.read(self._process.stdout.fileno(), 1 << 16)):
                    self._fail_at_end(deadline)
                self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _ends_by(self, deadline: float) -> bool:
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def _fail_at_end(self, deadline: float) -> NoReturn:
        """Wait until the engine ends, or kill it at the deadline, and report which."""
        if self._ends_by(deadline):
            self._fail(f"ended with exit code {self._process.returncode}")
        self._process.kill()
        self._fail(f"closed its pipe, and did not end within {self._patience:.0f} s")

    def _fail(self, what: str, said: str | None = None) -> NoReturn:
        lines = self.log.read_text(errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
        what = f"the engine {self.name!r} {what}" + (f": {said}" if said else "") + _cause(lines)
        raise EngineFailed(f"{what}; the end of {self.log}:\n{tail}", f"{what} (log: {self.log})" if said else None)


def _cause(lines: Sequence[str]) -> str:
    """Return the first error that vLLM's engine core logged. It is a separate process, and its parent does not repeat
    the error."""
    for line in lines:
        if line.startswith("(EngineCore") and (found := _RAISED.search(line)):
            return f"; the engine core raised {textwrap.shorten(found[1], LONGEST_SENTENCE, placeholder=' ...')}"
    return ""


def close_all(engines: Iterable[EngineProcess]) -> None:
    """Close engines at the same time, with one deadline for all."""
    engines = list(engines)
    deadline = time.monotonic() + CLOSING_SECONDS
    for engine in engines:
        engine.begin_to_close()
    for engine in engines:
        engine.close(deadline)
