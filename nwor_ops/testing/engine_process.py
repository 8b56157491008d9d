"""Parent side of :mod:`nwor_ops.cli.demo_engine`: start an engine, send it commands, and report why it ended."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import selectors
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from typing import Any

from nwor_ops.config import is_ours

PATIENCE_SECONDS = 900.0
TAIL_LINES = 25
LONGEST_SENTENCE = 400
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
        job: see :class:`nwor_ops.cli.demo_engine.DemoEngine`.
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
        return self._answer()["versions"]

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail(f"ended with exit code {self._process.wait()}")
        return self._answer()

    def close(self) -> None:
        """Close the engine's stdin and wait until it ends. It has nothing to save."""
        self.begin_to_close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def begin_to_close(self) -> None:
        """Close the engine's stdin, which tells it to end. Do not wait."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended, and did not read the last command
                self._process.stdin.close()

    def _answer(self) -> dict[str, Any]:
        line = self._read_line(time.monotonic() + self._patience)
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
                    self._fail(f"ended with exit code {self._process.wait()}")
                self._unread += read
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _fail(self, what: str, said: str | None = None) -> None:
        lines = self.log.read_text(errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])
        what = f"the engine {self.name!r} {what}" + (f": {said}" if said else "")
        raise EngineFailed(f"{what}; the end of {self.log}:\n{tail}", f"{what} (log: {self.log})" if said else None)


def close_all(engines: Iterable[EngineProcess]) -> None:
    """Close engines at the same time. With vLLM 0.33 on a GPU, an engine may need all of its 20 s to end."""
    engines = list(engines)
    for engine in engines:
        engine.begin_to_close()
    for engine in engines:
        engine.close()
