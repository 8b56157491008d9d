"""Run the demo's requests in one vLLM engine: ``python -m nwor_ops.cli.demo_engine JOB.json``.

The command is ``run`` (:func:`nwor_ops.testing.engine_process.serve`). The environment decides whether nwor_ops is on.
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

COMMITTED, DRAFT = 1, 3  # 0 and 2 are the audit's FREE and STALE
STATES = ".#Xd"


class DemoEngine:
    """The engine of the demo. A job is ``{"engine": arguments of vllm.LLM, "requests": [fields of tiny_llama.Request],
    "stop_token_ids": tokens that end an answer}``."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        import nwor_ops.vllm
        from nwor_ops.vllm.audit.engine import cache_audit

        self.llm, self.job = LLM(**job["engine"]), job
        self.audit: Any = None
        for session in nwor_ops.vllm.sessions():
            if audit := cache_audit(session):
                self.audit, self.block = audit, BlockWatch(session, audit)
                session.subscribe(self.block)
        if self.audit is None and os.environ.get("VLLM_NWOR_AUDIT") == "1":
            raise RuntimeError("nwor_ops is not active in this engine")

    def describe(self) -> dict[str, str]:
        cpu = f"{os.cpu_count()} CPU cores ({platform.machine()})"
        return versions() | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu}

    def run(self) -> dict[str, Any]:
        """Serve all requests, more than may run at a time. Return the tokens of each, and the seconds.

        An audited engine adds the audit's counts, and the states of a block at three moments.
        """
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()  # a later run must not reuse the blocks of an earlier one
        # Greedy, because vLLM 0.32 on a CPU does not support sampling with drafts. Its rejection sampler divides the
        # logits by a temperature that is never set (utils/cpu_triton_utils.py, _expand_kernel_impl).
        fixed: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        requests, stops = self.job["requests"], self.job["stop_token_ids"]
        params = [SamplingParams(max_tokens=one["max_tokens"], stop_token_ids=stops, **fixed) for one in requests]
        prompts: Any = [{"prompt_token_ids": request["prompt"]} for request in requests]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        audited = {"audit": self.audit.summary(), "block": self.block.panels} if self.audit else {}
        return {"tokens": [list(output.outputs[0].token_ids) for output in outputs], "seconds": seconds} | audited


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
            written = (self._bytes(block) != before).any(1)[own]
            kinds = torch.full_like(states[own], DRAFT)
            kinds[0] = COMMITTED
            self._verified[request] = states.index_copy(0, own, torch.where(written, kinds, states[own]))

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        sampled = num_sampled() if num_sampled is not None and self._windows else []
        for request, (block, own, states, _) in self._windows.items() if sampled else ():
            if 1 < sampled[request] < len(own) and not self.panels:
                moments = {"before": states, "verified": self._verified[request]}
                moments["after"] = self._states(block, int(own[0]))
                self.panels = {name: "".join(STATES[at] for at in slots.tolist()) for name, slots in moments.items()}

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
