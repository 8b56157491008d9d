"""Run the demo's requests in one vLLM engine: ``python -m nwor_ops.cli.demo_engine JOB.json``.

The commands are ``run`` and ``report`` (:func:`nwor_ops.testing.engine_process.serve`). The environment decides whether
nwor_ops is on; this file does not change it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.cli.report import versions
from nwor_ops.testing.engine_process import serve
from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.transaction.layers.target import elements, positions

MOST_STEPS = 20_000
COMMITTED, DRAFT = 1, 3  # 0 and 2 are the audit's FREE and STALE
STATES = ".#Xd"


class DemoEngine:
    """The engine of the demo. A job is ``{"engine": arguments of vllm.LLM, "requests": [fields of tiny_llama.Request],
    "stop_token_ids": tokens that end an answer}``."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**job["engine"])
        self.requests: list[dict[str, Any]] = job["requests"]
        self.stop_token_ids: list[int] = job["stop_token_ids"]
        self.runs = 0
        self.audit, self.block = self._watch_block()

    def versions(self) -> dict[str, str]:
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
        from nwor_ops.vllm.audit.engine import cache_audit

        for session in nwor_ops.vllm.sessions():
            if audit := cache_audit(session):
                session.subscribe(block := BlockWatch(session, audit))
                return audit, block
        return None, None


class BlockWatch(StepListener):
    """Keep the states of a block in the first step in which a request has accepted and rejected drafts, all in it.

    Args:
        session: the session of the engine.
        audit: the audit of its cache, which was subscribed before.

    Attributes:
        panels: the block ``before`` that step, when its drafts are ``verified``, and ``after`` its commit: a character
            of ``STATES`` per slot. Empty before that step.
    """

    def __init__(self, session: Any, audit: Any) -> None:
        self.panels: dict[str, str] = {}
        self._audit, self._layer = audit, next(iter(session.layers.values()))
        # By request: the block, the slots of the last token and the drafts in it, the block's states and its bytes.
        self._windows: dict[int, tuple[int, Tensor, Tensor, Tensor]] = {}
        self._verified: dict[int, Tensor] = {}

    def begin(
        self, query_start_loc: Sequence[int], num_draft_tokens: Sequence[int], slot_mappings: Any, *_: Any
    ) -> None:
        self._windows, slots = {}, slot_mappings[self._layer.group].cpu()
        for request, (end, drafts) in enumerate(zip(query_start_loc[1:], num_draft_tokens, strict=False)):
            own = slots[int(end) - int(drafts) - 1 : int(end)]
            block, first = divmod(int(own[0]), self._size)
            if drafts > 1 and block == int(own[-1]) // self._size and not self.panels:
                self._windows[request] = block, own % self._size, self._states(block, first), self._bytes(block)

    def forwarded(self, moment: str) -> None:
        for request, (block, own, states, before) in self._windows.items():
            written = (self._bytes(block) != before).any(1)
            self._verified[request] = states.clone()
            self._verified[request][own[1:]] = torch.where(written, DRAFT, states)[own[1:]].to(states.dtype)
            self._verified[request][own[:1]] = torch.where(written, COMMITTED, states)[own[:1]].to(states.dtype)

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        sampled = num_sampled() if num_sampled is not None and self._windows else []
        for request, (block, own, states, _) in self._windows.items() if sampled else ():
            if 1 < sampled[request] < len(own) and not self.panels:
                moments = states, self._verified[request], self._states(block, int(own[0]))
                names = ("before", "verified", "after")
                self.panels = {
                    name: "".join(STATES[state] for state in states.tolist())
                    for name, states in zip(names, moments, strict=True)
                }

    @property
    def _size(self) -> int:
        return int(self._layer.cache.planes[0].view.shape[1])

    def _states(self, block: int, first: int) -> Tensor:
        states: Tensor = self._audit.slot_states()[self._layer.group][block]
        states[:first] = COMMITTED  # by steps without drafts too, which are not audited in the V2 runner
        return states

    def _bytes(self, block: int) -> Tensor:
        """Return what the first layer holds in a block: ``[slots, elements]``."""
        slots = block * self._size + torch.arange(self._size, device="cpu")
        storage = self._layer.kv_cache.untyped_storage()
        rows = [elements(storage, plane)[positions(plane, slots)].flatten(1) for plane in self._layer.cache.planes]
        return torch.cat(rows, dim=1).cpu()


if __name__ == "__main__":
    serve(DemoEngine)
