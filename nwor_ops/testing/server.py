"""``vllm serve`` as a child process: start it, wait until it answers, read its metrics, and stop all its processes.

``python -m nwor_ops.testing.server ARGS`` is ``vllm serve ARGS``. It also runs with vLLM's CPU package, whose name the
command ``vllm`` does not know.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from nwor_ops.testing.ports import free_port

PROGRAM = (sys.executable, "-m", "nwor_ops.testing.server")
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


class ServerFailed(RuntimeError):
    """A server ended or did not answer. The message has its error and the path of its log."""


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
            ServerFailed: it ended, or the time is up.
        """
        deadline = time.monotonic() + seconds
        while self.alive():
            with contextlib.suppress(OSError, urllib.error.URLError):
                self.get("/health")
                return
            if time.monotonic() > deadline:
                raise ServerFailed(f"the server did not answer within {seconds:.0f} s (log: {self.log_file})")
            time.sleep(_POLL_SECONDS)
        raise ServerFailed(f"the server ended: {error_of(self.log)} (log: {self.log_file})")

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


def error_of(log: str) -> str:
    """Return the first error in the log of a server or an engine, or its last lines."""
    lines = [line.rstrip() for line in log.splitlines()]
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if error := _ERROR.search(line):
            message = following.strip().partition(" [type=")[0] if _SEVERAL.match(error[2]) else error[2]
            return f"{error[1].rpartition('.')[2]}: {message}"
    return "\n".join(["the end of its log is", *(f"    {line}" for line in lines[-TAIL_LINES:])])


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
