"""The draft loop itself: one step body, three ways to run it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor

from nwor_ops.draft.buffers import DraftBuffers
from nwor_ops.draft.dispatch import Dispatch, GraphKey, Mode
from nwor_ops.draft.metadata import DraftMetadata, FirstPass

ModelFn = Callable[[GraphKey, Any], "Tensor | tuple[Tensor, Tensor]"]
SampleFn = Callable[[GraphKey, Tensor], Tensor]
Pool = Any  # torch.cuda.graph_pool_handle()


class DraftLoop:
    """Steps 1 to K - 1 of a drafter, and its first pass if it is given one.

    One step is: forward, logits, sampling, update. Around it lie the attention metadata, made on the host or on
    the device. The same body runs in three ways:

    - ``"eager"``: metadata built before each step, kernels launched one by one. Any batch, any device.
    - ``"step"``: the same, with the body in a CUDA graph. One graph serves all steps: the step is a device tensor.
    - ``"loop"``: all steps in one graph, metadata updated in place between them.

    Args:
        model_fn: ``model_fn(key, metadata)`` runs the model over the first ``key.num_tokens`` tokens of the buffers
            and returns what ``sample_fn`` takes, ``[key.num_tokens, ...]``; where hidden states are carried, a pair:
            that, and the hidden states ``[>= key.num_reqs, width]`` of the next step. It is captured: it may not
            wait for the device or depend on its values. Collectives of tensor parallelism are fine if they are
            capturable (NCCL is) and every rank captures the same keys in the same order.
        sample_fn: ``sample_fn(key, output)`` returns int32 or int64 ``[key.num_reqs]``, a token per row; it reads what
            else it needs from the buffers (``idx_mapping``, ``current_draft_step``, ...). :class:`DraftSampler`, or an
            engine's own. Captured likewise. Called in steps >= 1 only.
        buffers: what the steps read and write.
        metadata: the back end's metadata.
        num_steps: K, > 0: drafts per request, the one of the first pass included.
        max_len: the longest sequence that the model takes; positions are clamped below it, lengths at it.
        first_pass: step 0, or None where the caller runs it.
        advance_positions: False for a drafter that writes no keys: positions and lengths stay.
        pool: memory pool of the graphs (``torch.cuda.graph_pool_handle()``), or a function that gives a context
            manager around each capture which yields the pool. None = one of its own.
        debug: compare addresses, shapes and strides of all buffers and metadata with those of the capture before each
            replay, and look whether the padded rows are inert (this one waits for the device).

    Attributes:
        counts: how often what ran: ``counts["decode", "loop"]``, ``counts["first_pass", "eager"]``, ... A run counts
            once, whatever its steps.

    Raises:
        ValueError: ``num_steps`` or ``max_len`` is not positive, or ``draft_tokens`` has fewer than K columns.
    """

    counts: Counter[tuple[str, Mode]]

    def __init__(
        self,
        model_fn: ModelFn,
        sample_fn: SampleFn,
        buffers: DraftBuffers,
        metadata: DraftMetadata,
        num_steps: int,
        max_len: int,
        *,
        first_pass: FirstPass | None = None,
        advance_positions: bool = True,
        pool: Pool | Callable[[], AbstractContextManager[Pool]] | None = None,
        debug: bool = False,
    ) -> None:
        raise NotImplementedError

    def capture(self, keys: Iterable[GraphKey], modes: Iterable[Literal["auto", "step", "loop"]] = ("auto",)) -> None:
        """Record graphs: at start-up, or after :meth:`invalidate`. Never done at run time.

        First the keys with ``query_len > 1`` (first pass), then those of the loop; in both the largest first, so that
        the smaller graphs fit into the memory of the larger. Before each recording the same body runs once as a
        warm-up on the stream that then records: the current one, or a side stream if that is the default stream.
        Both see ``build(..., capturing=True)``. All rows are padded meanwhile: no key is written to the cache. The
        contents of the buffers are lost.

        Args:
            keys: shapes. Doubles and keys that have their graph are left out.
            modes: "auto" = the one graph that ``run`` would choose; or name them, to have both.

        Raises:
            ValueError: a key has more rows than the buffers, or a query length > 1 without a first pass; "loop" where
                the metadata cannot be updated in place.
            RuntimeError: the buffers are not on a CUDA device.
        """
        raise NotImplementedError

    def dispatch(self, num_reqs: int, query_len: int = 1) -> Dispatch:
        """What ``run(num_reqs)`` (or the first pass, with its query length) would do, and why. Launches nothing."""
        raise NotImplementedError

    def run(
        self,
        num_reqs: int,
        mode: Literal["auto", "eager", "step", "loop"] = "auto",
        *,
        key: GraphKey | None = None,
        replay: bool = True,
        inert_tails: bool = False,
    ) -> Tensor:
        """Run steps 1 to K - 1 for the first ``num_reqs`` rows of the buffers.

        The rows must stand as :func:`~nwor_ops.ops.prepare_decode_inputs` makes them: ids, positions, lengths and
        ``query_start_loc`` of step 1.

        Args:
            num_reqs: real requests, >= 0; with 0 nothing runs.
            mode: "auto" = the whole loop in one graph if there is one, else a graph per step, else eager; the reason is
                logged once. Any other must be possible.
            key: the padded shape to run in; None = that of the smallest graph, or, eager, no padding.
            replay: False runs the very body of that mode from the host instead of from its graph: tells a wrong graph
                from wrong metadata, and needs no capture and no GPU.
            inert_tails: the caller vouches that the rows past ``num_reqs`` are inert already, as they are after
                ``prepare_decode_inputs`` with a padded ``idx_mapping``. Otherwise they are made so here (five fills, if
                there is padding).

        Returns:
            ``draft_tokens[:num_reqs]``, int64 ``[num_reqs, K]``: a view.

        Raises:
            ValueError: ``num_reqs`` or ``key`` does not fit.
            RuntimeError: the mode needs a graph that was not captured, or the metadata cannot do it; with
                ``debug=True`` also something that a graph reads has moved.
        """
        raise NotImplementedError

    def run_first_pass(
        self,
        num_reqs: int,
        query_len: int,
        mode: Literal["auto", "eager", "step", "loop"] = "auto",
        *,
        key: GraphKey | None = None,
        replay: bool = True,
    ) -> Tensor:
        """Run step 0 for ``num_reqs`` requests of ``query_len`` tokens each; arguments and errors as :meth:`run`.

        ``idx_mapping[num_reqs:rows]`` is set to -1 here; all else that concerns padded rows is
        :meth:`FirstPass.expand`'s. Mode "loop" has expansion, metadata update, forward and sampling in one graph; "step"
        has the expansion and a metadata build before the graph.

        Returns:
            ``draft_tokens[:num_reqs, :1]``: a view.
        """
        raise NotImplementedError

    def invalidate(self, reason: str) -> None:
        """Drop every graph: what they read is about to move or has moved. Until the next ``capture`` all runs eagerly.

        Call it when the KV cache is allocated anew, before sleep, after a weight swap that does not keep addresses,
        or when a registered tensor is replaced.

        Args:
            reason: why, in a few words, for the log.
        """
        raise NotImplementedError
