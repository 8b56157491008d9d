"""Draft graphs, shared by both runners: what the graphs hold, their sizes, cost, counts and reports."""

from __future__ import annotations

import abc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import graph_capture

from nwor_ops import ops
from nwor_ops.drafter import DraftBuffers, DraftLoop, GraphKey
from nwor_ops.vllm.draft_graphs.supported import refuse
from nwor_ops.vllm.environment import settings_of
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.metrics.names import by_reason
from nwor_ops.vllm.support.refusals import CAPTURE_SIZES

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


def _padded(counts: Iterable[int], batches: Iterable[int]) -> list[int]:
    """Return the counts to which batches of these sizes are padded, largest first. Batches larger than every count are
    left out."""
    holding = ([count for count in counts if count >= requests] for requests in batches)
    return sorted({min(large) for large in holding if large}, reverse=True)


def _counts_of(keys: Iterable[GraphKey]) -> dict[str, list[int]]:
    """Return the request counts of each pass."""
    every = list(keys)
    return {
        "first_pass": sorted({key.num_reqs for key in every if key.query_len > 1}),
        "decode": sorted({key.num_reqs for key in every if key.query_len == 1}),
    }


@dataclass(frozen=True)
class LayerMetadata:
    """Arguments for vLLM's forward context, by layer: metadata of the back end, and int64 slots ``[num_tokens]``."""

    attention: dict[str, Any]
    slot_mappings: dict[str, Tensor]


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


class GraphedDrafter(abc.ABC):
    """Base class of the drafters with graphs of both runners. It is the metadata and the first pass of its loop.

    vLLM's builders create a metadata object on the host. All its tensors are views of persistent buffers, also the
    scheduler metadata of FlashAttention 3. One object therefore serves every replay, if the graph updates slots and
    scheduler metadata before each step. Plain numbers in it are upper bounds, as in vLLM's eager drafters.

    Attributes:
        graphs: the graphs. None before they are captured, and if they were refused.
        drafts_by_requests: number of drafts by number of requests in the batch. Entry 0 is unused.
        extra_tokens: tokens of each request in the first pass that the target did not verify.
        buffers: the buffers of the draft loop.
        num_rejected: int32 ``[max_num_reqs]``. The number of rejected drafts of each row.
        last_token_indices: int64 ``[max_num_reqs]``. The token of the first pass that draft 0 of each row follows.
        first_pass_positions: int64. The position of each token of the first pass.
        first_pass_lens: int32 ``[max_num_reqs]``. Lengths after the first pass, rejected tokens included, not clamped.
        errors: counts the steps in which vLLM's code drafted because ours failed.
    """

    vllm_config: Any
    device: torch.device
    max_num_reqs: int
    max_num_tokens: int  # of the compiled model: vLLM's max_num_batched_tokens
    max_model_len: int
    graphs: Any  # LoopGraphs
    num_drafts: int
    drafts_by_requests: list[int]
    extra_tokens: int
    buffers: DraftBuffers
    num_rejected: Tensor
    last_token_indices: Tensor
    first_pass_positions: Tensor
    first_pass_lens: Tensor

    def _set_up(self, num_drafts: int, drafts_by_requests: list[int] | None, logger: Any) -> None:
        self.graphs, self.num_drafts, self._logger = None, num_drafts, logger
        self.drafts_by_requests = drafts_by_requests or [num_drafts] * (self.max_num_reqs + 1)
        self._first_pass_lengths = {drafts + 1 + self.extra_tokens for drafts in self.drafts_by_requests[1:]}
        self._eager: Counter[str] = Counter()  # passes that ran vLLM's code, by reason
        self.errors = Errors.by_setting(settings_of(self.vllm_config), logger, "with vLLM's drafter in this step")

    def make_loop(self, pool: Any) -> DraftLoop:
        """Create the draft loop over the buffers. It holds no graphs yet."""
        return DraftLoop(
            self._forward,
            lambda key, output: self.sample_rows(key.num_reqs, output, self.buffers.positions[: key.num_reqs]),
            self.buffers,
            self,
            self.num_drafts,
            self.max_model_len,
            first_pass=self,
            pool=pool,
        )

    # ------------------------------------------------------------ the captured bodies

    @abc.abstractmethod
    def _forward(self, key: GraphKey, metadata: LayerMetadata) -> Tensor | tuple[Tensor, Tensor]:
        """Run the model as vLLM's drafter does: compiled, and without vLLM's graphs."""

    @abc.abstractmethod
    def sample_rows(self, rows: int, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """Sample with vLLM's function: int64 ``[rows]``. Rows without a request get an arbitrary token."""

    @abc.abstractmethod
    def expand(self, key: GraphKey) -> None: ...

    @abc.abstractmethod
    def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> LayerMetadata: ...

    @abc.abstractmethod
    def _write_slots(self, rows: int) -> object:
        """Write the slot of each row's position. Padded rows get no slot."""

    @abc.abstractmethod
    def _groups(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield vLLM's attention groups with layers of the drafter, each with its block table."""

    def prepare(self, key: GraphKey, num_reqs: int) -> None:
        """Copy this batch's block tables to the place where kernels with smaller blocks than the cache manager's read
        them."""
        for group, block_table in self._groups():
            group.map_to_kernel_block_table(block_table[: key.num_reqs])

    def update(self, key: GraphKey, metadata: LayerMetadata) -> None:
        if key.query_len == 1:  # a first pass has its slots before
            self._write_slots(key.num_reqs)
        for group, _ in self._groups():
            group.update_draft_decode_metadata(metadata.attention)

    def finish(self, key: GraphKey, output: Tensor, next_hidden: Tensor | None) -> None:
        """Sample draft 0 and write the inputs of the decode loop."""
        rows, last = key.num_reqs, self.last_token_indices[: key.num_reqs]
        positions = self.first_pass_positions[last]
        self.buffers.draft_tokens[:rows, 0] = self.sample_rows(rows, output[last], positions)
        self.start_decode(rows, positions, None if next_hidden is None else next_hidden[last])

    def start_decode(self, rows: int, positions: Tensor, hidden_states: Tensor | None = None) -> None:
        """Write the inputs of the decode loop from draft 0, its position and its hidden states, whichever code ran the
        first pass. Padded rows become inert."""
        if self.num_drafts == 1:
            return
        buffers = self.buffers
        buffers.positions[:rows] = positions
        if hidden_states is not None:
            assert buffers.hidden_states is not None
            buffers.hidden_states[:rows] = hidden_states
        ops.prepare_decode_inputs(
            buffers.draft_tokens[:rows],
            self.first_pass_lens,
            self.num_rejected,
            buffers.input_ids,
            buffers.positions,
            buffers.query_start_loc,
            buffers.seq_lens,
            self.max_model_len,
            buffers.idx_mapping[:rows],
        )

    # ------------------------------------------------------------ a step

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

    def _why_eager_first_pass(self, rows: int, query_len: int) -> str | None:
        """Return the reason why this first pass runs vLLM's code, or None. ``query_len`` is 0 if requests differ."""
        if query_len not in self._first_pass_lengths:
            return MIXED
        return TOO_MANY_TOKENS if self.graphs.loop.graph_for(rows, query_len) is None else None

    # ------------------------------------------------------------ capture

    def capture_keys(self) -> dict[int, list[GraphKey]]:
        """Return the keys to capture, by number of drafts: first passes over that number, and loops that make that
        number.

        The request counts are those of the target's graphs. A first pass needs no more requests than a batch with that
        number of drafts may have. A loop needs only the counts to which batches of its number of drafts are padded.
        """
        batches: dict[int, list[int]] = {}
        for requests, drafts in enumerate(self.drafts_by_requests[1:], 1):
            batches.setdefault(drafts, []).append(requests)
        counts = {drafts: captured_counts(self.vllm_config, drafts + 1, self.max_num_reqs) for drafts in batches}
        every = set().union(*counts.values())
        keys = {}
        for drafts, requests_of_them in batches.items():
            length = drafts + 1 + self.extra_tokens
            keys[drafts] = [
                GraphKey(count, length)
                for count in _padded(counts[drafts], range(1, requests_of_them[-1] + 1))
                if count * length <= self.max_num_tokens
            ]
            if drafts > 1:
                keys[drafts] += [GraphKey(count) for count in _padded(every, requests_of_them)]
        return {drafts: group for drafts, group in sorted(keys.items(), reverse=True) if group}

    def capture_graphs(self) -> int:
        """Capture the graphs and log that they are active, or refuse. Return the bytes of GPU memory that this took."""
        if self.graphs is None:
            return 0
        keys = self.capture_keys()
        if not keys:
            self.graphs, sizes = None, self.vllm_config.compilation_config.cudagraph_capture_sizes
            error = CAPTURE_SIZES.because(sizes=sizes, tokens=self.num_drafts + 1)
            refuse(settings_of(self.vllm_config), error, self._logger)
            return 0
        self.graphs.capture_for(keys)
        self._logger.info(
            "nwor: draft graphs: active: %d graphs (%s) in %.1f s, %.0f MiB",
            sum(map(len, keys.values())),
            "; ".join(
                "{} drafts: first pass of {first_pass}, decode loop of {decode} requests".format(n, **_counts_of(group))
                for n, group in keys.items()
            ),
            self.graphs.seconds,
            self.graphs.bytes / 2**20,
        )
        taken: int = self.graphs.bytes
        return taken

    # ------------------------------------------------------------ reports

    def report(self) -> dict[str, Any]:
        """Return what was captured and what ran, as ``draft_graph_reports`` describes it."""
        graphs = self.graphs
        return {
            "captured": {} if graphs is None else {n: _counts_of(group) for n, group in graphs.keys.items()},
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
            **by_reason("draft_eager_reasons", {why: n for why, n in self._eager.items() if why not in NO_REQUESTS}),
            **by_reason("errors", self.errors.counts),
        }
