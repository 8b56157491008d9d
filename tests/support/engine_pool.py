"""Run engines, several at a time, each in a separate process that is ended at its deadline.

Environment: ``NWOR_TEST_LOGS`` (folder for logs and answers), ``NWOR_TEST_PARALLEL`` (number of concurrent engines),
``NWOR_TEST_DEADLINE`` (seconds per engine), ``NWOR_TEST_START`` (``forkserver``, or ``spawn`` if a process that has
imported vLLM must not fork).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import engine_child
from processes import ROOT, SUPPORT

from nwor_ops.testing.engine_process import NCCL_ALONE

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine, worker and the test's child are one process
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # collective_rpc accepts a function, even if workers are processes
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    **NCCL_ALONE,
}
# Environment of servers. They have their own processes and vLLM's default sampler.
SERVER_ENVIRONMENT = {
    name: value for name, value in ENVIRONMENT.items() if "FLASHINFER" not in name and "MULTIPROC" not in name
}
# Imported once, before the processes fork. None of these modules uses the GPU on import.
PRELOAD = ["vllm", "vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "torch._dynamo", "torch._inductor.compile_fx"]
PROFILING_ATTEMPTS = 4
DEFAULTS: dict[str, Any] = {
    "max_tokens": 40,
    "temperature": 0.0,
    "requests": 24,
    "shared_prefix": 0,
    "rounds": 1,
    "abort": {},
    "sleep": False,
    "drop_prefix_cache": False,
    "continued": False,
    "record_drafts": False,
    "faults": None,
    "adapter": None,
    "exports": False,
    "cost_curves": None,
    "nodes": 1,
    "prompt_tokens": [],
    "chats": False,
    "schema": None,
    "prefill": None,
}


def make_plugin_findable(folder: pathlib.Path) -> None:
    """Let vLLM find the plugin by its entry point, even if nwor_ops is only on the path and not installed.

    In that case, write package metadata to a folder, for this process and all processes that it starts.
    """
    added = [SUPPORT, ROOT]
    found = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if "nwor_ops" not in found:
        added.append(write_metadata(folder))
    for path in map(str, added):
        if path not in sys.path:
            sys.path.append(path)
    existing = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    os.environ["PYTHONPATH"] = os.pathsep.join([*existing, *map(str, added)])


def write_metadata(folder: pathlib.Path) -> pathlib.Path:
    """Write the entry points of pyproject.toml for a tree that is not installed, and return the folder."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    text = ""
    for group, points in project["entry-points"].items():
        text += f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
    (info / "entry_points.txt").write_text(text)
    return folder


class EnginePool:
    """Run jobs (see :mod:`engine_child`), each only once, however often it is requested.

    Args:
        logs: folder for one log and one answer per job.
        parallel: number of concurrent engines.
        deadline: maximum time from start to answer, in seconds.
    """

    def __init__(self, logs: pathlib.Path, parallel: int, deadline: float) -> None:
        self.logs = logs
        self._deadline = deadline
        logs.mkdir(parents=True, exist_ok=True)
        self._threads = ThreadPoolExecutor(parallel)
        self._futures: dict[str, Future[dict[str, Any]]] = {}
        self._closing = threading.Event()
        self._context: Any = multiprocessing.get_context(os.environ.get("NWOR_TEST_START", "forkserver"))
        if hasattr(self._context, "set_forkserver_preload"):
            self._context.set_forkserver_preload(PRELOAD)

    def start(self, name: str, job: dict[str, Any]) -> Future[dict[str, Any]]:
        job = DEFAULTS | job
        key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()[:12]
        if key not in self._futures:
            self._futures[key] = self._threads.submit(self._run, name, job)
        return self._futures[key]

    def close(self) -> None:
        """End the engines that still run, so that an interrupted test run does not wait for them."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        for _ in range(PROFILING_ATTEMPTS):
            result = self._run_once(name, job)
            # vLLM measures free memory, and fails if another process frees memory meanwhile.
            if "Error in memory profiling" not in (result["error"] or "") or self._closing.is_set():
                break
        return result

    def _run_once(self, name: str, job: dict[str, Any]) -> dict[str, Any]:
        # One cache folder for all jobs: vLLM needs half a minute to inspect a model class. Compiled graphs are keyed by
        # settings, which differ between all jobs.
        cache = pathlib.Path(tempfile.gettempdir()) / "nwor-engine-caches"
        caches = {"VLLM_CACHE_ROOT": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        environment = ENVIRONMENT | caches | job["environment"]
        answer, log = self.logs / f"{name}.json", self.logs / f"{name}.log"
        answer.unlink(missing_ok=True)
        process = self._context.Process(
            target=engine_child.run, args=(job | {"environment": environment}, str(answer), str(log))
        )
        started = time.monotonic()
        process.start()
        while process.is_alive() and time.monotonic() - started < self._deadline and not self._closing.is_set():
            process.join(1)
        late = process.is_alive()
        _end(process)
        result: dict[str, Any] = {"error": f"no answer after {time.monotonic() - started:.0f} s" if late else None}
        if answer.exists():
            result = json.loads(answer.read_text())
        elif not late:
            result["error"] = f"the process ended with exit code {process.exitcode} and no answer"
        result["seconds"] = round(time.monotonic() - started, 1)
        result["log"] = str(log)
        result["said"] = _said_by_nwor(log)
        return result


def _end(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join(10)


def _said_by_nwor(log: pathlib.Path) -> list[str]:
    """Return the lines of a log that this library wrote."""
    if not log.exists():
        return []
    lines = log.read_text(errors="replace").splitlines()
    return [line for line in lines if "nwor:" in line or "AuditError" in line][:40]


def pool_from_environment(default_logs: pathlib.Path) -> EnginePool:
    return EnginePool(
        pathlib.Path(os.environ.get("NWOR_TEST_LOGS") or default_logs),
        int(os.environ.get("NWOR_TEST_PARALLEL", min(8, max(1, (os.cpu_count() or 2) // 2)))),
        float(os.environ.get("NWOR_TEST_DEADLINE", "150")),
    )
