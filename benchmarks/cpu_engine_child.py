"""Run one vLLM CPU engine in which NWOR can be switched off for a run: ``cpu_engine_child.py JOB.json``.

A job is that of nwor_ops/cli/demo_engine.py. Each line of stdin is a command: ``on`` and ``off`` serve all requests
with and without NWOR. Each answer is a line of JSON on stdout.
"""

from __future__ import annotations

from typing import Any

from gpu_engine_child import describe_plugin, switch_transactions

from nwor_ops.cli.demo_engine import DemoEngine, serve


class SwitchedEngine(DemoEngine):
    def answer(self, line: str) -> dict[str, Any]:
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        begun = switch_transactions(worker, line == "on")
        return self.run() | {"windows": describe_plugin(worker)["windows"] - begun}


if __name__ == "__main__":
    serve(SwitchedEngine)
