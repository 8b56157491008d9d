"""vLLM in child processes: engines that take commands, and servers. Start them, stop them, and say why they ended.

- :class:`EngineProcess` runs a program that answers lines of its stdin with lines of JSON on its stdout: :func:`serve`.
- :class:`Server` is ``vllm serve``: ``python -m nwor_ops.testing.engine_process ARGS``. This also runs vLLM's CPU
  package, whose name the command ``vllm`` does not know.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import re
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from nwor_ops.config import is_ours

PROGRAM = (sys.executable, "-m", "nwor_ops.testing.engine_process")  # of a server
PATIENCE_SECONDS = 900.0
# To end after its stdin is closed. vLLM 0.33 on a GPU may need all of it.
CLOSING_SECONDS = 20.0
LONGEST_ERROR = 400
# Make tensor parallelism reduce by NCCL only (with disable_custom_all_reduce). vLLM's other methods use NVLink
# multicast, which some machines do not permit.
NCCL_ALONE = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
TAIL_LINES = 15
STOP_SECONDS = 30
_POLL_SECONDS = 0.3
# The last line of a traceback, in a child's log after the process and the place. The last error of a failed start only
# says that an engine failed; an earlier one says why.
_ERROR = re.compile(
    r"^(?:\(.*?pid=\d+\) )?(?:ERROR .*?\] )?"
    r"((?:\w+\.)*\w*(?:Error|Exception|Unsupported|Interrupt)): (?!Engine core init)(\S.*)$"
)
_SEVERAL = re.compile(r"\d+ validation errors? for ")  # pydantic's first line; the next one has the error


class EngineFailed(RuntimeError):
    """An engine or a server ended, or did not answer. The message has its error and the path of its log."""


def error_of(log: str) -> str:
    """Return the first error in the log of a server or an engine, or its last lines."""
    lines = [line.rstrip() for line in log.splitlines()]
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if error := _ERROR.search(line):
            message = following.strip().partition(" [type=")[0] if _SEVERAL.match(error[2]) else error[2]
            return f"{error[1].rpartition('.')[2]}: {message}"
    return "\n".join(["the end of its log is", *(f"    {line}" for line in lines[-TAIL_LINES:])])


# ---------------------------------------------------------------- engines


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
        """Wait until the engine has started, and return its description.

        Raises:
            EngineFailed: it ended, or the time is up.
        """
        return self.answer()["engine"]

    def ask(self, command: str) -> dict[str, Any]:
        """Send a command, and return its answer. Errors are those of :meth:`wait_until_ready`."""
        self.tell(command)
        return self.answer()

    def tell(self, command: str) -> None:
        """Send a command. :meth:`answer` waits for its answer."""
        try:
            self.stdin.write(command.encode() + b"\n")
            self.stdin.flush()
        except BrokenPipeError:
            self._fail_at_end()

    def close(self) -> None:
        """Close it as :func:`close_all` does."""
        close_all([self])

    def answer(self) -> dict[str, Any]:
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


def serve(start: Callable[[dict[str, Any]], Any]) -> None:
    """Start an engine with the job file of the command line, and answer each line of stdin: a method and numbers.

    The first answer is ``{"engine": engine.describe()}``. An error is the last one, after its innermost cause:
    ``{"error": sentence}``.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # everything else that is printed goes to the log
    try:
        engine = start(json.loads(pathlib.Path(sys.argv[1]).read_text()))
        _write(answers, {"engine": engine.describe()})
        for line in sys.stdin:
            command, *numbers = line.split()
            _write(answers, getattr(engine, command)(*map(json.loads, numbers)))
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


# ---------------------------------------------------------------- servers

# Linux assigns ports from 32768 on by default, and vLLM's defaults begin at 29500. Below them no other program takes a
# port between the search for it and the start of its server.
FIRST_PORT, PORTS = 20000, 9000
_port_numbers = itertools.count()


def free_port() -> int:
    """Return a port that is free on every address of this host.

    Two of our processes start their searches at different places, and none returns a port twice.
    """
    for number in itertools.islice(_port_numbers, PORTS):
        port = FIRST_PORT + (os.getpid() * 17 + number) % PORTS
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("", port))
            return port
    raise RuntimeError(f"free_port: one of the ports {FIRST_PORT} to {FIRST_PORT + PORTS - 1} must be free")


class Server:
    """One server, in its own session.

    Args:
        arguments: the arguments of ``vllm serve``. Host and port are added.
        environment: the complete environment of the process.
        log: a file for its output.
        program: the command that runs ``vllm serve``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: pathlib.Path,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self.port, self.log_file = free_port(), log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*program, *arguments, "--host", "127.0.0.1", "--port", str(self.port)],
                env=dict(environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the server answers.

        Raises:
            EngineFailed: it ended, or the time is up.
        """
        deadline = time.monotonic() + seconds
        while self.alive():
            with contextlib.suppress(OSError, urllib.error.URLError):
                self.get("/health")
                return
            if time.monotonic() > deadline:
                raise EngineFailed(f"the server did not answer within {seconds:.0f} s (log: {self.log_file})")
            time.sleep(_POLL_SECONDS)
        raise EngineFailed(f"the server ended: {error_of(self.log)} (log: {self.log_file})")

    def get(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> str:
        """Return the answer to a request: GET, or POST if there is a body.

        Raises:
            OSError: the server does not answer, or answers with an error.
        """
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as response:
            text: str = response.read().decode()
        return text

    def metrics(self) -> dict[str, float]:
        """Return the samples of ``/metrics`` by name, added over all labels."""
        samples: dict[str, float] = {}
        for name, value in re.findall(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", self.get("/metrics"), re.MULTILINE):
            samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    def stop(self) -> None:
        """Stop the server as an operator does, and end by force what is left of its processes."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """Ask the server to end, without waiting for it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common.startup import cli_env_setup
    except ModuleNotFoundError:  # vLLM 0.32
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args(["serve", *sys.argv[1:]])
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":
    main()
