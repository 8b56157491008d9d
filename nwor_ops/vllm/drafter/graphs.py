"""What the draft graphs of both runners have in common: which are captured, what that took, what ran, what is told."""

from __future__ import annotations

import abc
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.distributed.parallel_state import graph_capture

from nwor_ops.drafter import DraftLoop, GraphKey, keys_of_token_counts
from nwor_ops.vllm import metrics
from nwor_ops.vllm.drafter.report import DraftGraphReport
from nwor_ops.vllm.support import CAPTURE_SIZES, Unsupported

Refuse = Callable[[Unsupported], None]

# Why a pass runs vLLM's code.
NOTHING_CAPTURED, DUMMY_RUN = NO_REQUESTS = ("nothing captured", "dummy run")  # that no request asked for
TOO_LARGE = "more requests than the largest graph"
MIXED = "first pass of a batch with prompts, or with fewer drafts in some request"
TOO_MANY_TOKENS = "first pass of more requests than its largest graph"


def captured_counts(vllm_config: Any, query_len: int, max_num_reqs: int) -> list[int]:
    """The request counts of the target's graphs, largest first.

    vLLM's capture sizes count the target's tokens. A size that is no multiple of a request's is rounded up, as vLLM
    does, and left out where that exceeds the largest.

    Args:
        vllm_config: the engine's.
        query_len: the target's tokens of each request, K + 1.
        max_num_reqs: the most requests of a batch.
    """
    config = vllm_config.compilation_config
    keys = keys_of_token_counts(config.cudagraph_capture_sizes or (), query_len, max_num_reqs)
    return [key.num_reqs for key in keys if key.num_tokens <= config.max_cudagraph_capture_size]


class LoopGraphs:
    """A draft loop, which of its graphs were captured, and what that took.

    Args:
        device: where the drafter runs.
        loop: the draft loop. It holds no graphs yet.

    Attributes:
        keys: of what was captured, by the number of drafts: the first pass over as many, and the loop that makes as
            many.
    """

    def __init__(self, device: torch.device, loop: DraftLoop) -> None:
        self.loop = loop
        self.keys: dict[int, list[GraphKey]] = {}
        self.seconds, self.bytes = 0.0, 0
        self._device = device

    def capture_for(self, keys: dict[int, list[GraphKey]]) -> None:
        """Capture, and measure what it takes."""
        reserved, started = self._reserved(), time.perf_counter()
        with graph_capture(device=self._device):
            self.loop.capture(key for of_them in keys.values() for key in of_them if key.query_len > 1)
            for num_drafts in sorted(keys, reverse=True):
                loops = [key for key in keys[num_drafts] if key.query_len == 1]
                if loops:
                    self.loop.capture(loops, num_drafts=num_drafts)
        torch.cuda.synchronize(self._device)
        self.keys = keys
        self.seconds = time.perf_counter() - started
        self.bytes = max(self._reserved() - reserved, 0)

    def _reserved(self) -> int:
        """By this process: others on the GPU do not count, nor does what the driver keeps for each graph."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a capture does so too
        return torch.cuda.memory_reserved(self._device)

    @property
    def most_requests(self) -> int:
        """Requests of the largest graph; 0 while nothing is captured."""
        return max((key.num_reqs for of_them in self.keys.values() for key in of_them), default=0)


def _counts_of(keys: Iterable[GraphKey]) -> dict[str, list[int]]:
    """Request counts by pass."""
    every = list(keys)
    return {
        "first_pass": sorted({key.num_reqs for key in every if key.query_len > 1}),
        "decode": sorted({key.num_reqs for key in every if key.query_len == 1}),
    }


class GraphedDrafter(abc.ABC):
    """Who drafts with graphs, as far as both runners' have it in common.

    Attributes:
        graphs: None while there are none, and where they were refused.
    """

    graphs: Any  # LoopGraphs
    _refuse: Refuse
    _logger: Any  # vLLM's
    _eager: Counter[str]  # passes that ran vLLM's code, by reason

    @abc.abstractmethod
    def capture_keys(self) -> dict[int, list[GraphKey]]:
        """By the number of drafts the graphs for it; none where no capture size holds a batch."""

    def capture_graphs(self, vllm_config: Any, num_drafts: int) -> int:
        """Capture, count from now on and say so; or refuse where there is nothing to capture. Bytes that it took.

        Args:
            vllm_config: the engine's.
            num_drafts: most of a request.
        """
        if self.graphs is None:
            return 0
        keys = self.capture_keys()
        if not keys:
            self.graphs, sizes = None, vllm_config.compilation_config.cudagraph_capture_sizes
            self._refuse(CAPTURE_SIZES.because(sizes=sizes, tokens=num_drafts + 1))
            return 0
        self.graphs.capture_for(keys)
        metrics.start_counting(self, "drafter", vllm_config, self._logger)
        self._say_active()
        taken: int = self.graphs.bytes
        return taken

    def _say_active(self) -> None:
        """The start-up line."""
        keys: dict[int, list[GraphKey]] = self.graphs.keys
        passes = {
            drafts: "first pass of {first_pass}, decode loop of {decode} requests".format(**_counts_of(of_them))
            for drafts, of_them in keys.items()
        }
        self._logger.info(
            "nwor: draft graphs: active: %d graphs (%s) in %.1f s, %.0f MiB",
            sum(map(len, keys.values())),
            "; ".join(passes.values() if len(passes) == 1 else (f"{n} drafts: {said}" for n, said in passes.items())),
            self.graphs.seconds,
            self.graphs.bytes / 2**20,
        )

    def report(self) -> DraftGraphReport:
        """What was captured, and what ran."""
        if self.graphs is None:
            return DraftGraphReport(eager=dict(self._eager))
        keys, counts = self.graphs.keys, self.graphs.loop.counts
        return DraftGraphReport(
            captured=_counts_of(key for of_them in keys.values() for key in of_them),
            captured_by_drafts={drafts: _counts_of(of_them) for drafts, of_them in keys.items()},
            capture_seconds=self.graphs.seconds,
            capture_bytes=self.graphs.bytes,
            replays={name: counts[name, "loop"] for name in ("first_pass", "decode")},
            eager=dict(self._eager),
        )

    def counted(self) -> dict[str, int]:
        """For ``/metrics``: only what requests have caused. The publisher's thread asks while the runner counts."""
        graphs = self.graphs
        replays = [] if graphs is None else list(graphs.loop.counts.items())
        return {
            "draft_graph_replays": sum(count for (_, mode), count in replays if mode == "loop"),
            "draft_eager_passes": sum(count for why, count in list(self._eager.items()) if why not in NO_REQUESTS),
        }
