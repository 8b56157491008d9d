"""One vLLM CPU engine with NWOR, which can be off for a run: ``cpu_engine_child.py JOB.json``.

A job is that of nwor_ops/cli/demo_engine.py. Commands come on stdin, a line each: ``on`` and ``off`` serve all requests
with NWOR and without; answers go to stdout, a line of JSON each.
"""

from __future__ import annotations

import json
import pathlib
import sys
import traceback

from gpu_engine_child import describe_plugin, switch_transactions

from nwor_ops.cli.demo_engine import DemoEngine, _answer, _claim_stdout


def main() -> None:
    answers = _claim_stdout()
    try:
        engine = DemoEngine(json.loads(pathlib.Path(sys.argv[1]).read_text()))
        worker = engine.llm.llm_engine.model_executor.driver_worker.worker
        _answer(answers, {"versions": engine.versions()})
        for line in sys.stdin:
            switch_transactions(worker, line.strip() == "on")
            begun = describe_plugin(worker)["windows"]
            answer = engine.run()
            _answer(answers, answer | {"windows": describe_plugin(worker)["windows"] - begun})
    except Exception as error:
        traceback.print_exc()
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
