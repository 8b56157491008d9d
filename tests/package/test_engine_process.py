"""Engines in processes of their own: how they end, and what is reported about it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from nwor_ops.testing import engine_process
from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, close_all, engine_environment, free_port

CORE = "(EngineCore pid=7) ERROR 11-26 03:50:31 [core.py:99]"
CORE_LOG = f"{CORE} Traceback (most recent call last):\n{CORE} torch.OutOfMemoryError: no memory\nRuntimeError: see\n"


def start(folder: Path, program: str, name: str = "broken") -> EngineProcess:
    (folder / "program.py").write_text(program)
    return EngineProcess(name, {}, folder, dict(os.environ), program=(str(folder / "program.py"),))


def serving(error: str) -> str:
    return f"from nwor_ops.testing.engine_process import serve\ndef start(job):\n    {error}\nserve(start)"


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("import sys; print('the reason', file=sys.stderr); sys.exit(3)",
         "ended with exit code 3: the end of its log is\n    the reason"),
        (f"import sys; print({CORE_LOG!r}, *40 * ['later'], sep='\\n', file=sys.stderr)",
         "ended with exit code 0: OutOfMemoryError: no memory"),
        (serving(f"import sys; print({CORE_LOG!r}, file=sys.stderr); raise RuntimeError('Engine core initialization')"),
         "stopped: OutOfMemoryError: no memory"),
        (serving("raise ValueError('1 validation error\\n  no such\\n   model')"),
         "stopped: ValueError: 1 validation error no such model"),
        (serving("raise RuntimeError('it failed') from ValueError('no memory left')"),
         "stopped: ValueError: no memory left; then RuntimeError: it failed"),
    ],
    ids=["exit", "core", "core, with an answer", "answer", "cause"],
)  # fmt: skip
def test_failed_start_names_innermost_error(program, sentence, tmp_path):
    engine = start(tmp_path, program)
    try:
        with pytest.raises(EngineFailed) as caught:
            engine.wait_until_ready()
    finally:
        engine.close()
    assert str(caught.value) == f"the engine 'broken' {sentence} (log: {tmp_path / 'broken.log'})"


def test_long_error_is_shortened(tmp_path):
    engine = start(tmp_path, serving("raise ValueError(999 * 'x ')"))
    with pytest.raises(EngineFailed, match=r"ValueError: [x ]{300,400} \.\.\. \(log: "):
        engine.wait_until_ready()
    engine.close()


def test_engines_close_at_the_same_time(tmp_path):
    """Each writes when it is told to end, and ends after all others were told too."""
    program = """
import pathlib, sys, time
print("{}", flush=True)
sys.stdin.read()
job = pathlib.Path(sys.argv[1])
(job.parent / f"{job.name}.told").touch()
while len(list(job.parent.glob("*.told"))) < 3:
    time.sleep(0.01)
(job.parent / f"{job.name}.ended").touch()
"""
    close_all([start(tmp_path, program, str(number)) for number in range(3)])
    assert len(list(tmp_path.glob("*.ended"))) == 3


def test_engines_are_killed_at_one_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_process, "CLOSING_SECONDS", 1.0)
    engines = [start(tmp_path, "import time; time.sleep(60)", str(number)) for number in range(4)]
    wait, limits = subprocess.Popen.wait, []

    def recorded(process, timeout=None):
        limits.append(timeout)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", recorded)
    close_all(engines)
    assert 0 < limits[0] <= 1
    assert limits[1:] == [None, 0.0, None, 0.0, None, 0.0, None]  # None: after a kill
    for engine in engines:
        assert engine.process.returncode == -signal.SIGKILL
        assert engine.process.stdout.closed


def test_vanilla_environment_has_nothing_of_ours(monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    monkeypatch.setenv("VLLM_NWOR_DEBUG_SYNC", "1")
    vanilla = engine_environment("off", audit=False)
    assert [name for name in vanilla if re.match("VLLM_NWOR", name)] == []
    audited = engine_environment("cow", audit=True)
    assert (audited["VLLM_NWOR_MODE"], audited["VLLM_NWOR_AUDIT"]) == ("cow", "1")


def test_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    assert engine_process.FIRST_PORT <= port < 29500  # where vLLM's default ports begin; those of Linux begin at 32768
    first = (port - engine_process.FIRST_PORT - os.getpid() * 17) % engine_process.PORTS
    monkeypatch.setattr(engine_process, "_port_numbers", iter(range(first, 10**6)))
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))  # one address of this host is enough
        assert free_port() != port
