"""Run the demo's requests in one vLLM engine: ``python -m nwor_ops.cli.demo_engine JOB.json``.

The commands are ``run`` and ``report`` (:func:`nwor_ops.testing.engine_process.serve`). The environment decides whether
nwor_ops is on; this file does not change it.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any

from nwor_ops.cli.report import versions
from nwor_ops.testing.engine_process import serve

MOST_STEPS = 20_000


class DemoEngine:
    """The engine of the demo. A job is ``{"engine": arguments of vllm.LLM, "requests": [fields of workload.Request],
    "stop_token_ids": tokens that end an answer}``."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**job["engine"])
        self.requests: list[dict[str, Any]] = job["requests"]
        self.stop_token_ids: list[int] = job["stop_token_ids"]
        self.runs = 0
        self.audit, self.block = self._watch_block()

    def versions(self) -> dict[str, str]:
        import torch

        cpu = f"{os.cpu_count()} CPU cores ({platform.machine()})"
        return versions() | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu}

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
        ordered = [tokens[str(index)] for index in range(len(self.requests))]
        return {"tokens": ordered, "steps": step + 1, "seconds": seconds}

    def _add(self, index: int) -> None:
        from vllm import SamplingParams

        request = self.requests[index]
        # Greedy, because vLLM 0.32 on a CPU does not support sampling with drafts. Its rejection sampler divides the
        # logits by a temperature that is never set (utils/cpu_triton_utils.py, _expand_kernel_impl).
        params = SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False,
            stop_token_ids=self.stop_token_ids,
        )  # fmt: skip
        self.llm.llm_engine.add_request(f"{self.runs}-{index}", {"prompt_token_ids": request["prompt"]}, params)

    def report(self) -> dict[str, Any]:
        """Return what the audit counted, and the states of a block at three moments."""
        return {"audit": self.audit.summary(), "block": self.block.panels} if self.audit else {}

    def _watch_block(self) -> tuple[Any, Any]:
        import nwor_ops.vllm
        from nwor_ops.cli.demo_block import BlockWatch
        from nwor_ops.vllm.audit.engine import cache_audit

        for session in nwor_ops.vllm.sessions():
            if audit := cache_audit(session):
                session.subscribe(block := BlockWatch(session, audit))
                return audit, block
        return None, None


if __name__ == "__main__":
    serve(DemoEngine)
