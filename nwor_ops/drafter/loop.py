"""The draft loop: one step body, run eagerly or in one graph."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.drafter.buffers import DraftBuffers, GraphKey
from nwor_ops.drafter.metadata import DraftMetadata, FirstPass
from nwor_ops.validation import BoundToMemory

logger = logging.getLogger(__name__)

ModelFn = Callable[[GraphKey, Any], "Tensor | tuple[Tensor, Tensor]"]
SampleFn = Callable[[GraphKey, Tensor], Tensor]
Pool = Any  # torch.cuda.graph_pool_handle()
Mode = Literal["eager", "loop"]
AnyMode = Literal["auto", "eager", "loop"]


class Graph(Protocol):
    """A ``torch.cuda.CUDAGraph``, or a stand-in."""

    def replay(self) -> None: ...


@dataclass(frozen=True)
class Recording:
    """A captured graph, the metadata of its capture, and the addresses of the buffers that it reads."""

    graph: Graph
    metadata: Any
    addresses: dict[str, int]


def addresses_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector off while graphs are recorded.

    It may destroy an unreachable graph. CUDA does not permit this while a stream is capturing, and invalidates the
    capture. ``torch.cuda.graph`` collects before a capture only with ``torch.compiler.config.force_cudagraph_gc``.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _steps_of(key: GraphKey, num_drafts: int) -> range:
    """Return the steps of a pass: 0 for a first pass, otherwise those of the loop."""
    return range(1) if key.query_len > 1 else range(1, num_drafts)


class DraftLoop(BoundToMemory):
    """Run steps 1 to K - 1 of a drafter, and its first pass if it is given one.

    One step is forward, logits, sampling and update. Each step needs attention metadata, which is built on the host or
    updated on the device. The same body runs in two ways:

    - ``"eager"``: the metadata is built before each step, and kernels are launched one by one. Works for any batch on
      any device.
    - ``"loop"``: all steps are in one graph, and the metadata is updated in place between them.

    Args:
        model_fn: ``model_fn(key, metadata)`` runs the model over the first ``key.num_tokens`` tokens of the buffers. It
            returns the input of ``sample_fn``, ``[key.num_tokens, ...]``. If hidden states are carried, it returns a
            pair: this input, and the hidden states ``[>= key.num_reqs, width]`` of the next step. It is captured, so it
            must not synchronize with the device or depend on values there. Collectives of tensor parallelism are
            allowed if they can be captured (NCCL's can) and every rank captures the same keys in the same order.
        sample_fn: ``sample_fn(key, output)`` returns int32 or int64 ``[key.num_reqs]``, one token per row. It reads its
            other inputs from the buffers (``idx_mapping``, ``current_draft_step``, ...). Use :class:`DraftSampler` or
            your engine's sampler. It is captured too, and called in steps >= 1 only.
        buffers: the tensors that the steps read and write.
        metadata: the back end's metadata.
        num_drafts: K, the number of drafts per request, > 0, including the draft of the first pass. A run may make
            fewer.
        max_len: maximum sequence length of the model. Positions are clamped below it, lengths to it.
        first_pass: step 0, or None if the caller runs it.
        pool: memory pool of the graphs (``torch.cuda.graph_pool_handle()``), or a function that returns a context
            manager around each capture, which yields the pool. None means a new pool.
        debug: before each replay, compare the addresses of ``buffers.tensors()`` with those of the capture. Before each
            run, check ``idx_mapping``, which synchronizes. On the CPU it is always checked.

    Attributes:
        counts: number of runs by pass and mode: ``counts["decode", "loop"]``, ``counts["first_pass", "eager"]``, ... A
            run counts once, however many steps it has.

    Example:
        A model that counts: each token is the previous one plus 1. The first pass has written draft 0, here 5.

        >>> class NoMetadata(DraftMetadata):
        ...     def build(self, key, num_reqs, step, capturing=False): ...
        ...     def update(self, key, metadata): ...
        >>> buffers = DraftBuffers.allocate(max_num_reqs=1, num_drafts=3, device="cpu")
        >>> buffers.idx_mapping[0], buffers.draft_tokens[0, 0], buffers.input_ids[0] = 0, 5, 5
        >>> loop = DraftLoop(
        ...     model_fn=lambda key, metadata: buffers.input_ids[: key.num_tokens] + 1,
        ...     sample_fn=lambda key, output: output, buffers=buffers, metadata=NoMetadata(), num_drafts=3, max_len=16)
        >>> loop.run(num_reqs=1).tolist()
        [[5, 6, 7]]
    """

    counts: Counter[tuple[str, Mode]]

    def __init__(
        self,
        model_fn: ModelFn,
        sample_fn: SampleFn,
        buffers: DraftBuffers,
        metadata: DraftMetadata,
        num_drafts: int,
        max_len: int,
        *,
        first_pass: FirstPass | None = None,
        pool: Pool | Callable[[], AbstractContextManager[Pool]] | None = None,
        debug: bool = False,
    ) -> None:
        for name, function in (("model_fn", model_fn), ("sample_fn", sample_fn)):
            validation.function(f"DraftLoop: {name}", function)
        validation.instance("DraftLoop: buffers", buffers, DraftBuffers, "a DraftBuffers")
        num_drafts = validation.integer("DraftLoop: num_drafts", num_drafts)
        max_len = validation.integer("DraftLoop: max_len", max_len)
        if buffers.draft_tokens.shape[1] < num_drafts:
            raise ValueError(
                f"DraftLoop: draft_tokens must have a column for each of {num_drafts} drafts, "
                f"got {list(buffers.draft_tokens.shape)}"
            )
        self.model_fn, self.sample_fn, self.first_pass = model_fn, sample_fn, first_pass
        self.buffers, self.metadata = buffers, metadata
        self.num_drafts, self.max_len, self.debug = num_drafts, max_len, debug
        self.counts = Counter()
        self._pool = pool
        self._own_pool: Any = None
        # By query length and number of drafts: the graphs by request count, smallest first.
        self._graphs: dict[tuple[int, int], dict[int, Recording]] = {}
        self._why_no_graphs = "nothing was captured"
        self._logged: set[tuple[str, str]] = set()

    @torch.no_grad()
    def capture(self, keys: Iterable[GraphKey], num_drafts: int | None = None) -> None:
        """Record graphs, at start-up or after :meth:`invalidate`. Graphs are never recorded at run time.

        Keys with ``query_len > 1`` (first pass) come first, then those of the loop. Within both, larger keys come
        first, so that smaller graphs fit into the memory of the larger ones. The same body runs once as a warm-up
        before each recording, on the stream that then records: the current stream, or a side stream if that is the
        default stream. Both use ``build(..., capturing=True)``. All rows are padded meanwhile, so no key is written to
        the cache. The contents of the buffers are lost. Python collects no garbage meanwhile.

        Capture on a stream that no other graph was captured on. From torch 2.12, a graph that is destroyed frees the
        cuBLAS workspaces of its stream, and the stream's other graphs then use freed memory (pytorch/pytorch#193402).

        Args:
            keys: shapes to record. Duplicates and keys that already have a graph are left out.
            num_drafts: number of drafts that the graphs make, 1 to K; None means K. A first pass is the same for every
                number; with 1 draft there is no loop.
        """
        validation.instance("DraftLoop.capture: keys", keys, Iterable, "GraphKeys")
        drafts, chosen = self._checked_drafts(num_drafts), {self._checked(key, 0) for key in keys}
        stream = self._capture_stream()
        # The first pass precedes the loop, and the largest key comes first, so that later graphs fit into the pool's
        # memory. All ranks of a tensor-parallel group must capture in the same order.
        order = sorted(chosen, key=lambda key: (key.query_len == 1, -key.num_tokens, key.query_len))
        with no_garbage_collection():
            for key in order:
                graphs, steps = self._graphs_of(key.query_len, drafts), _steps_of(key, drafts)
                if steps and key.num_reqs not in graphs:
                    graphs = {**graphs, key.num_reqs: self._record(key, steps, stream)}
                    self._graphs[self._kind(key.query_len, drafts)] = dict(sorted(graphs.items()))

    def graph_for(self, num_reqs: int, query_len: int = 1, num_drafts: int | None = None) -> GraphKey | None:
        """Return the key of the graph that ``run(num_reqs)`` would replay, or with ``query_len`` > 1 the first pass.

        It is the smallest that fits. None if the batch would run eagerly.
        """
        self._check_num_reqs(num_reqs)
        counts = self._graphs_of(query_len, self._checked_drafts(num_drafts))
        return next((GraphKey(count, query_len) for count in counts if count >= num_reqs), None)

    @torch.no_grad()
    def run(
        self,
        num_reqs: int,
        mode: AnyMode = "auto",
        *,
        key: GraphKey | None = None,
        replay: bool = True,
        inert_tails: bool = False,
        num_drafts: int | None = None,
    ) -> Tensor:
        """Run steps 1 to K - 1 for the first ``num_reqs`` rows of the buffers.

        The rows must hold the inputs of step 1 (ids, positions, lengths and ``query_start_loc``), as
        :func:`~nwor_ops.ops.prepare_decode_inputs` writes them.

        Args:
            num_reqs: number of real requests, >= 0; with 0 nothing runs.
            mode: "auto" runs the whole loop in one graph if there is one, else eagerly; the reason is logged once. Mode
                "loop" needs a graph.
            key: the padded shape to run in. None means the smallest graph that fits, or no padding if eager.
            replay: False runs the body of that mode from the host instead of its graph. This separates a wrong graph
                from wrong metadata, and needs neither a capture nor a GPU.
            inert_tails: the caller guarantees that the rows after ``num_reqs`` are inert, as ``prepare_decode_inputs``
                with a padded ``idx_mapping`` leaves them. Otherwise they are made inert here (five fills, if there is
                padding).
            num_drafts: number of drafts to make, 1 to K; None means K. With fewer drafts, fewer steps run, and the
                other columns of ``draft_tokens`` do not change. A graph must have been captured for that number.

        Returns:
            ``draft_tokens[:num_reqs]``, int64 ``[num_reqs, K]``, or its first ``num_drafts`` columns: a view.

        Raises:
            ValueError: ``num_reqs``, ``key`` or ``num_drafts`` does not fit. On the CPU and with ``debug=True`` also if
                ``idx_mapping`` is negative in a row before ``num_reqs``, whose drafts would be those of an earlier run.
            RuntimeError: mode "loop" needs a graph that was not captured. With ``debug=True`` also if a tensor that a
                graph reads has moved.
        """
        self._check_num_reqs(num_reqs)
        drafts = self._checked_drafts(num_drafts)
        if num_reqs > 0 and drafts > 1:
            self._run(num_reqs, 1, mode, key, replay, drafts, inert_tails)
        return self.buffers.draft_tokens[:num_reqs, :drafts]

    @torch.no_grad()
    def run_first_pass(
        self,
        num_reqs: int,
        query_len: int,
        mode: AnyMode = "auto",
        *,
        key: GraphKey | None = None,
        replay: bool = True,
    ) -> Tensor:
        """Run step 0 for ``num_reqs`` requests of ``query_len`` tokens each. Arguments and errors are those of
        :meth:`run`.

        This method sets ``idx_mapping[num_reqs:rows]`` to -1; :meth:`FirstPass.expand` writes everything else in padded
        rows. Mode "loop" has expansion, metadata update, forward and sampling in one graph.

        Returns:
            ``draft_tokens[:num_reqs, :1]``: a view.
        """
        self._check_num_reqs(num_reqs)
        if query_len < 2:
            raise ValueError(f"DraftLoop.run_first_pass: query_len must be > 1, got {query_len}")
        if num_reqs > 0:
            self._run(num_reqs, query_len, mode, key, replay, self.num_drafts, inert_tails=False)
        return self.buffers.draft_tokens[:num_reqs, :1]

    def invalidate(self, reason: str) -> None:
        """Drop every graph, because memory that they read has moved or is about to. Runs are eager until the next
        ``capture``.

        Call it if the KV cache is allocated again, before sleep, after a weight swap that does not keep addresses, or
        if a registered tensor is replaced.

        Args:
            reason: the reason in a few words, for the log.
        """
        self._graphs.clear()
        self._own_pool = None  # a pool without its graphs cannot be recorded into again
        self._why_no_graphs = f"the graphs were dropped: {reason}"

    # ---------------------------------------------------------------- bodies: the contents of a graph

    def _all_steps(self, key: GraphKey, metadata: Any, steps: range) -> None:
        for step in steps:
            self._begin_step(key, step)
            self.metadata.update(key, metadata)
            self._step(key, metadata)

    def _begin_step(self, key: GraphKey, step: int) -> None:
        """Write what the metadata of a step depends on."""
        self.buffers.current_draft_step.fill_(step)
        if key.query_len > 1:
            assert self.first_pass is not None
            self.first_pass.expand(key)

    def _step(self, key: GraphKey, metadata: Any) -> None:
        """Run one step: forward, logits, sampling, and the inputs of the next step."""
        buffers, result = self.buffers, self.model_fn(key, metadata)
        output, next_hidden = result if isinstance(result, tuple) else (result, None)
        if (next_hidden is None) != (buffers.hidden_states is None):
            expected = "hidden states, in a pair with its output" if next_hidden is None else "no hidden states"
            present = "given" if next_hidden is None else "None"
            raise ValueError(f"DraftLoop: model_fn must return {expected}: buffers.hidden_states is {present}")
        if key.query_len > 1:
            assert self.first_pass is not None
            self.first_pass.finish(key, output, next_hidden)
            return
        sampled = self.sample_fn(key, output)
        validation.instance("DraftLoop: the result of sample_fn", sampled, Tensor, "a tensor")
        if list(sampled.shape) != [key.num_reqs]:
            raise ValueError(f"DraftLoop: sample_fn must return [{key.num_reqs}] tokens, got {list(sampled.shape)}")
        ops.update_draft_inputs(
            sampled=sampled,
            current_draft_step=buffers.current_draft_step,
            draft_tokens=buffers.draft_tokens,
            input_ids=buffers.input_ids,
            positions=buffers.positions,
            seq_lens=buffers.seq_lens,
            num_speculative_steps=self.num_drafts,
            max_model_len=self.max_len,
            idx_mapping=buffers.idx_mapping,
            hidden_states=next_hidden,
            next_hidden_states=buffers.hidden_states,
        )

    # ---------------------------------------------------------------- host code around the bodies

    def _run(
        self,
        num_reqs: int,
        query_len: int,
        mode: AnyMode,
        key: GraphKey | None,
        replay: bool,
        num_drafts: int,
        inert_tails: bool,
    ) -> None:
        """Run the first pass, or steps 1 to ``num_drafts`` - 1 if ``query_len`` is 1."""
        chosen, key = self._choose(num_reqs, query_len, mode, key, num_drafts)
        recording = self._recording(chosen, key, replay, num_drafts)
        self._check_requests(num_reqs)
        if query_len == 1:
            if not inert_tails:
                self.buffers.pad_rows(num_reqs, key.num_reqs)
        elif key.num_reqs > num_reqs:
            self.buffers.idx_mapping[num_reqs : key.num_reqs].fill_(-1)
        self.counts["decode" if query_len == 1 else "first_pass", chosen] += 1
        self.metadata.prepare(key, num_reqs)
        steps = _steps_of(key, num_drafts)
        if chosen == "eager":
            for step in steps:
                self._begin_step(key, step)
                self._step(key, self.metadata.build(key, num_reqs, step))
            return
        if recording is None:
            self._begin_step(key, steps.start)  # a build may read the buffers
            self._all_steps(key, self.metadata.build(key, num_reqs, steps.start), steps)
        else:
            recording.graph.replay()

    def _recording(self, mode: Mode, key: GraphKey, replay: bool, num_drafts: int) -> Recording | None:
        """Return the graph to replay, or None to run from the host. In debug mode, check that nothing has moved."""
        if mode == "eager" or not replay:
            return None
        recording = self._graphs_of(key.query_len, num_drafts).get(key.num_reqs)
        if recording is None:
            drafts = "" if num_drafts == self.num_drafts else f" and {num_drafts} drafts"
            raise RuntimeError(f"DraftLoop: no graph was captured for {key}{drafts}; capture() it at start-up")
        if self.debug:
            before, now = recording.addresses, addresses_of(self.buffers.tensors())
            for name in before.keys() | now.keys():
                if before.get(name) != now.get(name):
                    raise RuntimeError(
                        f"DraftLoop: buffers[{name!r}] must not move after the capture; write into it in place, or "
                        "invalidate() and capture() again"
                    )
        return recording

    def _choose(
        self, num_reqs: int, query_len: int, mode: AnyMode, key: GraphKey | None, num_drafts: int
    ) -> tuple[Mode, GraphKey]:
        if mode not in ("auto", "eager", "loop"):
            raise ValueError(f"DraftLoop: mode must be auto, eager or loop, got {mode!r}")
        default = None if mode == "eager" else self.graph_for(num_reqs, query_len, num_drafts)
        if mode == "auto" and default is None:
            mode = "eager"
            self._log_once(query_len, self._why_eager(query_len, num_drafts))
        key = key or default or GraphKey(num_reqs, query_len)
        return "eager" if mode == "eager" else "loop", self._checked(key, num_reqs, query_len)

    def _why_eager(self, query_len: int, num_drafts: int) -> str:
        """Return the reason why a batch has no graph."""
        if counts := self._graphs_of(query_len, num_drafts):
            return f"no graph holds more than {max(counts)} requests"
        if self._graphs:
            return f"no graph has query length {query_len}" + (f" and {num_drafts} drafts" if query_len == 1 else "")
        return self._why_no_graphs

    def _kind(self, query_len: int, num_drafts: int) -> tuple[int, int]:
        """Return the key of :attr:`_graphs`. First passes do not depend on the number of drafts."""
        return query_len, num_drafts if query_len == 1 else self.num_drafts

    def _graphs_of(self, query_len: int, num_drafts: int) -> dict[int, Recording]:
        return self._graphs.get(self._kind(query_len, num_drafts), {})

    def _checked_drafts(self, num_drafts: int | None) -> int:
        if num_drafts is None:
            return self.num_drafts
        return validation.integer("DraftLoop: num_drafts", num_drafts, most=self.num_drafts)

    def _check_num_reqs(self, num_reqs: int) -> None:
        validation.integer("DraftLoop: num_reqs", num_reqs, least=0, most=self.buffers.max_num_reqs)

    def _check_requests(self, num_reqs: int) -> None:
        """Raise if a row has no request. No kernel would write its drafts, which would be those of an earlier run."""
        if not self.debug and not validation.reads_values(self.buffers.device):
            return
        for row in (self.buffers.idx_mapping[:num_reqs] < 0).nonzero()[:1, 0].tolist():
            raise ValueError(
                f"DraftLoop: idx_mapping must name the request of each of {num_reqs} rows, got "
                f"{int(self.buffers.idx_mapping[row])} in row {row}"
            )

    def _checked(self, key: GraphKey, num_reqs: int, query_len: int | None = None) -> GraphKey:
        validation.instance("DraftLoop: key", key, GraphKey, "a GraphKey")
        most = self.buffers.max_num_reqs
        if not num_reqs <= key.num_reqs <= most:
            raise ValueError(
                f"DraftLoop: {key} must hold the {num_reqs} requests of the batch and fit into buffers of {most} rows"
            )
        if query_len is not None and key.query_len != query_len:
            raise ValueError(f"DraftLoop: {key} must have the query length of this pass, {query_len}")
        if key.query_len > 1 and self.first_pass is None:
            raise ValueError(f"DraftLoop: {key} belongs to a first pass, but the loop has none")
        return key

    def _log_once(self, query_len: int, why_eager: str) -> None:
        what = "decode steps" if query_len == 1 else f"first pass of {query_len} tokens"
        if (what, why_eager) not in self._logged:
            self._logged.add((what, why_eager))
            logger.info("nwor draft loop, %s: eager, because: %s", what, why_eager)

    # ---------------------------------------------------------------- capture

    def _record(self, key: GraphKey, steps: range, stream: torch.cuda.Stream) -> Recording:
        def build() -> Any:
            self.buffers.fill_for_warm_up(key)
            self.buffers.current_draft_step.fill_(steps.start)
            return self.metadata.build(key, 0, steps.start, capturing=True)

        def body() -> None:
            self._all_steps(key, metadata, steps)

        metadata = build()
        self._warm_up(body, stream)
        metadata = build()  # back ends may plan or allocate in the warm-up
        return Recording(self._graph(body, stream), metadata, addresses_of(self.buffers.tensors()))

    # These methods need CUDA graphs. On a CPU, nwor_ops.testing.host_graphs replaces them.

    def _capture_stream(self) -> torch.cuda.Stream:
        """Return the current stream, or a new one if that is the default stream, which cannot capture."""
        device = self.buffers.device
        if device.type != "cuda":
            raise RuntimeError(f"DraftLoop.capture: needs a CUDA device, the buffers are on {device}")
        if self._pool is None and self._own_pool is None:
            self._own_pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(device)
        return torch.cuda.Stream(device) if current == torch.cuda.default_stream(device) else current

    def _warm_up(self, body: Callable[[], object], stream: torch.cuda.Stream) -> None:
        """Run what will be recorded, so that libraries create their handles and workspaces now."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _graph(self, body: Callable[[], object], stream: torch.cuda.Stream) -> Graph:
        """Record ``body`` into a graph whose memory comes from the pool."""
        graph, pool = torch.cuda.CUDAGraph(), self._own_pool if self._pool is None else self._pool
        with pool() if callable(pool) else nullcontext(pool) as handle, torch.cuda.graph(graph, handle, stream):
            body()
        return graph
