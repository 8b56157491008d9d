"""An engine in a separate process: start it, send it commands, and report why it ended.

A command is a line of the program's stdin. An answer is a line of JSON on its stdout. What the program prints goes to
a log. :class:`EngineProcess` is the parent's end, and :func:`serve` the program's.
"""

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
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TextIO

from nwor_ops.config import is_ours
from nwor_ops.testing.server import error_of

PATIENCE_SECONDS = 900.0
# To end after its stdin is closed. vLLM 0.33 on a GPU may need all of it.
CLOSING_SECONDS = 20.0
LONGEST_ERROR = 400
# Make tensor parallelism reduce by NCCL only (with disable_custom_all_reduce). vLLM's other methods use NVLink
# multicast, which some machines do not permit.
NCCL_ALONE = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}


class EngineFailed(RuntimeError):
    """An engine ended before it answered. The message has its error and the path of its log."""


def engine_environment(mode: str, audit: bool) -> dict[str, str]:
    """Return the environment of one engine. With mode ``off`` and no audit, it contains nothing of nwor_ops."""
    environment = {name: value for name, value in os.environ.items() if not is_ours(name) and name != "VLLM_PLUGINS"}
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and plugin in one process
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Two engines share the machine, so each gets one thread and a small cache.
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",  # else numba's OpenMP, of the n-gram lookup, gives torch as many threads as cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
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
        program: arguments of Python; the job file is appended. The program answers as :func:`serve` does.
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
            self.process = subprocess.Popen(
                [sys.executable, *program, str(job_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self.stdin: Any = self.process.stdin
        self.stdout: Any = self.process.stdout
        self._unread = b""

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until the engine has started, and return the versions it runs on.

        Raises:
            EngineFailed: it ended, or the time is up.
        """
        return self._answer()["versions"]

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command, and return its answer. Errors are those of :meth:`wait_until_ready`."""
        try:
            self.stdin.write(command.encode() + b"\n")
            self.stdin.flush()
        except BrokenPipeError:
            self._fail_at_end()
        return self._answer()

    def close(self) -> None:
        """Close it as :func:`close_all` does."""
        close_all([self])

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._read_line())
        if "error" in answer:
            is_outer = re.search("engine ?core|EngineDead", answer["error"], re.IGNORECASE)
            error = error_of(self.log.read_text(errors="replace")) if is_outer else answer["error"]
            # Messages of pydantic checks in vLLM contain the values of all fields, over many lines.
            self._fail(f"stopped: {textwrap.shorten(error, LONGEST_ERROR, placeholder=' ...')}")
        return answer

    def _read_line(self) -> bytes:
        deadline = time.monotonic() + self._patience
        with selectors.DefaultSelector() as selector:
            selector.register(self.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.process.kill()
                    self._fail(f"did not answer within {self._patience:.0f} s")
                if not (read := os.read(self.stdout.fileno(), 1 << 16)):
                    self._fail_at_end()
                self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _fail_at_end(self) -> NoReturn:
        """Wait until the engine ends, which has closed its pipe, and report why."""
        self.close()
        error = error_of(self.log.read_text(errors="replace"))
        self._fail(f"ended with exit code {self.process.returncode}: {error}")

    def _fail(self, reason: str) -> NoReturn:
        raise EngineFailed(f"the engine {self.name!r} {reason} (log: {self.log})")


def close_all(engines: Iterable[EngineProcess]) -> None:
    """Tell all engines to end, and kill those that still run after ``CLOSING_SECONDS``. They have nothing to save."""
    engines, deadline = list(engines), time.monotonic() + CLOSING_SECONDS
    for engine in engines:
        with contextlib.suppress(BrokenPipeError):  # it ended, and did not read the last command
            engine.stdin.close()
    for engine in engines:
        try:
            engine.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            engine.process.kill()
            engine.process.wait()
        engine.stdout.close()


# ---------------------------------------------------------------- the program


def serve(start: Callable[[dict[str, Any]], Any]) -> None:
    """Start an engine with the job file of the command line, and answer each line of stdin by ``engine.answer(line)``.

    The first answer is ``{"versions": engine.versions()}``. An error is the last one, after its innermost cause:
    ``{"error": sentence}``.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # everything else that is printed goes to the log
    try:
        engine = start(json.loads(pathlib.Path(sys.argv[1]).read_text()))
        _write(answers, {"versions": engine.versions()})
        for line in sys.stdin:
            _write(answers, engine.answer(line.strip()))
    except Exception as error:
        traceback.print_exc()
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        because = "" if cause is error else f"{type(cause).__name__}: {cause}; then "
        _write(answers, {"error": f"{because}{type(error).__name__}: {error}"})
        sys.exit(1)


def _write(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
