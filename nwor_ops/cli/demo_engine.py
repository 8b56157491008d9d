"""Run one vLLM engine in a separate process: ``python -m nwor_ops.cli.demo_engine JOB.json``.

It reads one command per line from stdin (``run``, ``report``), and answers with one line of JSON on stdout. Everything
that vLLM prints goes to stderr, which the parent writes to a log. The environment decides whether nwor_ops is on; this
file does not change it.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from nwor_ops.cli.versions import imported_versions

MOST_STEPS = 20_000


def main() -> None:
    serve(DemoEngine)


class Engine(Protocol):
    """The interface that :func:`serve` calls."""

    def versions(self) -> dict[str, Any]: ...

    def answer(self, line: str) -> dict[str, Any]:
        """Run the command in a line of stdin, and return its answer."""
        ...


def serve(start: Callable[[dict[str, Any]], Engine]) -> None:
    """Start an engine with the job file of the command line, and answer each line of stdin."""
    answers = _claim_stdout()
    try:
        engine = start(json.loads(pathlib.Path(sys.argv[1]).read_text()))
        _answer(answers, {"versions": engine.versions()})
        for line in sys.stdin:
            _answer(answers, engine.answer(line.strip()))
    except Exception as error:
        traceback.print_exc()
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def _claim_stdout() -> TextIO:
    """Reserve the real stdout for answers. Everything else that is printed goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


class DemoEngine:
    """The engine of the demo. A job is ``{"engine": arguments of vllm.LLM, "requests": [fields of
    workload.Request]}``."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**job["engine"])
        self.requests: list[dict[str, Any]] = job["requests"]
        self.runs = 0

    def answer(self, line: str) -> dict[str, Any]:
        return self.run() if line == "run" else self.report()

    def run(self) -> dict[str, Any]:
        """Serve all requests, each added at its arrival step. Return the tokens of each, the number of steps and the
        seconds."""
        # A later run must not reuse the blocks of an earlier one.
        self.llm.reset_prefix_cache()
        self.runs += 1
        engine: Any = self.llm.llm_engine
        waiting = sorted(range(len(self.requests)), key=lambda index: self.requests[index]["arrival_step"])
        tokens: dict[str, list[int]] = {}
        start = time.perf_counter()
        for step in range(MOST_STEPS):
            while waiting and self.requests[waiting[0]]["arrival_step"] <= step:
                self._add(waiting.pop(0))
            for output in engine.step():
                if output.finished:
                    tokens[output.request_id.split("-")[1]] = list(output.outputs[0].token_ids)
            if not waiting and not engine.has_unfinished_requests():
                break
        else:
            raise RuntimeError(f"demo: the {len(self.requests)} requests did not finish within {MOST_STEPS} steps")
        seconds = time.perf_counter() - start
        return {
            "tokens": [tokens[str(index)] for index in range(len(self.requests))],
            "steps": step + 1,
            "seconds": seconds,
        }

    def _add(self, index: int) -> None:
        from vllm import SamplingParams

        request = self.requests[index]
        prompt = request["prompt"]
        # Greedy, because vLLM 0.32 on a CPU does not support sampling with drafts. Its rejection sampler divides the
        # logits by a temperature that is never set (utils/cpu_triton_utils.py, _expand_kernel_impl).
        params = SamplingParams(temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(
            f"{self.runs}-{index}",
            prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt},
            params,
        )

    def report(self) -> dict[str, Any]:
        """Return the counts of vLLM, and those of nwor_ops if it is on."""
        counted = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        return {
            "versions": self.versions(),
            "vllm": {
                "drafted": counted.get("vllm:spec_decode_num_draft_tokens", 0),
                "accepted": counted.get("vllm:spec_decode_num_accepted_tokens", 0),
                "verified_requests": counted.get("vllm:spec_decode_num_drafts", 0),
            },
            "sessions": [_session_report(session) for session in _sessions()],
        }

    def versions(self) -> dict[str, str]:
        import torch

        cpu = f"{os.cpu_count()} CPU cores ({platform.machine()})"
        return imported_versions() | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu}


def _sessions() -> list[Any]:
    import nwor_ops.vllm

    return list(nwor_ops.vllm.sessions())


def _session_report(session: Any) -> dict[str, Any]:
    report: dict[str, Any] = {
        "mode": session.mode,
        "description": session.describe(),
        "stats": session.stats().as_dict(),
        "audit": None,
        "cache": {},
    }
    if session.audit is not None:
        report["audit"] = session.audit.summary()
        # One string per block, one digit per slot.
        report["cache"] = {
            group: ["".join(map(str, block)) for block in states.tolist()]
            for group, states in session.audit.slot_states().items()
        }
    return report


if __name__ == "__main__":
    main()
