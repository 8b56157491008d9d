"""Draft graphs, shared by both runners: captured sizes, cost, counts and reports."""

from __future__ import annotations

import abc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import graph_capture

from nwor_ops import ops
from nwor_ops.drafter import DraftBuffers, DraftLoop, GraphKey
from nwor_ops.vllm.environment import settings_of
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.metrics.names import by_reason
from nwor_ops.vllm.support.refusals import CAPTURE_SIZES, Unsupported

Refuse = Callable[[Unsupported], None]

# Reasons why a pass runs vLLM's code.
NOTHING_CAPTURED, DUMMY_RUN = NO_REQUESTS = ("nothing captured", "dummy run")  # not caused by requests
TOO_LARGE = "more requests than the largest graph"
MIXED = "first pass of a batch with prompts, or with fewer drafts in some request"
TOO_MANY_TOKENS = "first pass of more requests than its largest graph"
FAILED = "draft graphs failed"


def captured_counts(vllm_config: Any, query_len: int, max_num_reqs: int) -> list[int]:
    """Return the request counts of the target's graphs, largest first.

    vLLM's capture sizes count the target's tokens, ``query_len`` for each request. As in vLLM, a size that is not a
    multiple is rounded up, and left out if it then exceeds the largest size.
    """
    config = vllm_config.compilation_config
    most = min(max_num_reqs, config.max_cudagraph_capture_size // query_len)
    counts = {-(-tokens // query_len) for tokens in config.cudagraph_capture_sizes or ()}
    return sorted((count for count in counts if count <= most), reverse=True)


class LoopGraphs:
    """A draft loop, its captured graphs, and the cost of capturing them.

    Attributes:
        keys: keys of the captured graphs, by number of drafts. They belong to first passes over that number of drafts,
            and to loops that make that number.
    """

    def __init__(self, device: torch.device, loop: DraftLoop) -> None:
        self.loop = loop
        self.keys: dict[int, list[GraphKey]] = {}
        self.seconds, self.bytes = 0.0, 0
        self._device = device

    def capture_for(self, keys: dict[int, list[GraphKey]]) -> None:
        """Capture graphs for ``keys``, and measure time and memory."""
        reserved, started = self._reserved(), time.perf_counter()
        with graph_capture(device=self._device):
            self.loop.capture(key for group in keys.values() for key in group if key.query_len > 1)
            for num_drafts in sorted(keys, reverse=True):
                loops = [key for key in keys[num_drafts] if key.query_len == 1]
                if loops:
                    self.loop.capture(loops, num_drafts=num_drafts)
        torch.cuda.synchronize(self._device)
        self.keys = keys
        self.seconds = time.perf_counter() - started
        self.bytes = max(self._reserved() - reserved, 0)

    def _reserved(self) -> int:
        """Return the bytes that this process's allocator holds. Other processes and the driver's memory per graph do
        not count."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # a capture does the same
        return torch.cuda.memory_reserved(self._device)

    @property
    def most_requests(self) -> int:
        """Number of requests of the largest graph; 0 if nothing is captured."""
        return max((key.num_reqs for group in self.keys.values() for key in group), default=0)


def _counts_of(keys: Iterable[GraphKey]) -> dict[str, list[int]]:
    """Return the request counts of each pass."""
    every = list(keys)
    return {
        "first_pass": sorted({key.num_reqs for key in every if key.query_len > 1}),
        "decode": sorted({key.num_reqs for key in every if key.query_len == 1}),
    }


class GraphedDrafter(abc.ABC):
    """Base class of the drafters with graphs of both runners.

    Attributes:
        graphs: the graphs. None before they are captured, and if they were refused.
        buffers: the buffers of the draft loop.
        num_rejected: int32 ``[max_num_reqs]``. The number of rejected drafts of each row.
        errors: counts the steps in which vLLM's code drafted because ours failed.
    """

    graphs: Any  # LoopGraphs
    buffers: DraftBuffers
    num_rejected: Tensor
    errors: Errors
    _refuse: Refuse
    _logger: Any  # vLLM's
    _eager: Counter[str]  # passes that ran vLLM's code, by reason

    def _set_up(self, vllm_config: Any, refuse: Refuse, logger: Any) -> None:
        self.graphs, self._eager = None, Counter()
        self._refuse, self._logger = refuse, logger
        self.errors = Errors.by_setting(settings_of(vllm_config), logger, "with vLLM's drafter in this step")

    @abc.abstractmethod
    def _why_eager(self, **inputs: Any) -> str | None:
        """Return the reason why a whole step with these arguments runs vLLM's code, or None."""

    @abc.abstractmethod
    def _draft(self, **inputs: Any) -> Tensor:
        """Draft from graphs. The arguments are those of vLLM's ``propose``."""

    @torch.inference_mode()
    def draft(self, propose: Callable[..., Tensor], inputs: Mapping[str, Any]) -> Tensor:
        """Draft from graphs, or with vLLM's ``propose``, also after any error: it writes every input and row again."""
        captured = self.graphs is not None and self.graphs.most_requests > 0
        why_eager = self._why_eager(**inputs) if captured else NOTHING_CAPTURED
        if why_eager is None:
            try:
                return self._draft(**inputs)
            except Exception as error:
                self.errors.go_on(FAILED, error)
                why_eager = FAILED
        self._eager[why_eager] += 1
        return propose(**inputs)

    def _prepare_decode(self, rows: int, target_lens: Tensor, max_len: int) -> None:
        """Write the inputs of the decode loop, from draft 0 and its position. Padded rows become inert."""
        buffers = self.buffers
        ops.prepare_decode_inputs(
            buffers.draft_tokens[:rows],
            target_lens,
            self.num_rejected,
            buffers.input_ids,
            buffers.positions,
            buffers.query_start_loc,
            buffers.seq_lens,
            max_len,
            buffers.idx_mapping[:rows],
        )

    @abc.abstractmethod
    def capture_keys(self) -> dict[int, list[GraphKey]]:
        """Return the keys to capture, by number of drafts. Empty if no capture size holds a batch."""

    def capture_graphs(self, vllm_config: Any, num_drafts: int) -> int:
        """Capture the graphs and log that they are active, or refuse. Return the bytes of GPU memory that this took."""
        if self.graphs is None:
            return 0
        keys = self.capture_keys()
        if not keys:
            self.graphs, sizes = None, vllm_config.compilation_config.cudagraph_capture_sizes
            self._refuse(CAPTURE_SIZES.because(sizes=sizes, tokens=num_drafts + 1))
            return 0
        self.graphs.capture_for(keys)
        self._log_active()
        taken: int = self.graphs.bytes
        return taken

    def _log_active(self) -> None:
        """Write the log line at start-up."""
        keys: dict[int, list[GraphKey]] = self.graphs.keys
        passes = {
            drafts: "first pass of {first_pass}, decode loop of {decode} requests".format(**_counts_of(group))
            for drafts, group in keys.items()
        }
        self._logger.info(
            "nwor: draft graphs: active: %d graphs (%s) in %.1f s, %.0f MiB",
            sum(map(len, keys.values())),
            "; ".join(
                passes.values() if len(passes) == 1 else (f"{n} drafts: {counts}" for n, counts in passes.items())
            ),
            self.graphs.seconds,
            self.graphs.bytes / 2**20,
        )

    def report(self) -> dict[str, Any]:
        """Return what was captured and what ran, as ``draft_graph_reports`` describes it."""
        graphs = self.graphs
        keys: dict[int, list[GraphKey]] = {} if graphs is None else graphs.keys
        return {
            "captured": {} if graphs is None else _counts_of(key for group in keys.values() for key in group),
            "captured_by_drafts": {drafts: _counts_of(group) for drafts, group in keys.items()},
            "capture_seconds": 0.0 if graphs is None else graphs.seconds,
            "capture_bytes": 0 if graphs is None else graphs.bytes,
            "replays": {} if graphs is None else {n: graphs.loop.counts[n, "loop"] for n in ("first_pass", "decode")},
            "eager": dict(self._eager),
        }

    def counts(self) -> dict[str, float]:
        """Return the counts for the metrics. Passes that no request caused are left out."""
        passes = Counter() if self.graphs is None else self.graphs.loop.counts
        return {
            "draft_graph_replays": sum(count for (_, mode), count in passes.items() if mode == "loop"),
            "draft_host_seconds": 0.0 if self.graphs is None else self.graphs.loop.host_seconds,
            **by_reason("draft_eager_reasons", {why: n for why, n in self._eager.items() if why not in NO_REQUESTS}),
            **by_reason("errors", self.errors.counts),
        }
