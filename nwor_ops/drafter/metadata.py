"""What a back end implements for :class:`~nwor_ops.drafter.DraftLoop`: its attention metadata, and the first pass."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from nwor_ops.drafter.dispatch import GraphKey


class DraftMetadata(Protocol):
    """The attention metadata of one drafter, slot mappings included.

    The metadata object is yours: the loop hands it to ``model_fn`` and never looks inside, but for the addresses of
    the tensors in it (in dicts, lists, tuples and dataclass-like objects) where it was made with ``debug=True``.

    The rules, because graphs read the tensors of the object they were captured with:

    - Every tensor lies in memory that never moves: a buffer of the loop, or one of the adapter. A second ``build`` of
      a key writes into the same memory as the first, all of it, the rows past ``num_reqs`` included.
    - Host scalars are upper bounds (``max_len``, ``key.query_len``): a graph keeps the value of its capture.
    - Rows past the real ones are known by ``buffers.idx_mapping[row] < 0``; no table is read for them.

    Inherit to get ``prepare`` and ``why_not_in_place``, or write all four.
    """

    @property
    def why_not_in_place(self) -> str | None:
        """None if :meth:`update` does all that :meth:`build` would; else the reason why it cannot, for the log.

        With a reason the loop is never captured as a whole, and ``update`` is never called.
        """
        return None

    def prepare(self, key: GraphKey, num_reqs: int) -> None:
        """Host work that a batch needs once, before its first step or replay, in every mode: outside of graphs.

        Example: copying this batch's block tables to where the graphs read them. Nothing, unless overridden.
        """

    def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> Any:
        """Make the metadata of one step on the host, from the buffers as they are now: outside of graphs.

        Args:
            key: the padded shape; ``key.query_len`` is 1 in the loop.
            num_reqs: real requests, <= ``key.num_reqs``; 0 where ``capturing``.
            step: the step about to run: 0 = first pass, then 1 to K - 1.
            capturing: whether a warm-up or a capture follows rather than a batch. The object then serves every
                replay of that graph.

        Returns:
            What ``model_fn`` and ``update`` are given.
        """
        ...

    def update(self, key: GraphKey, metadata: Any) -> None:
        """Bring ``metadata`` to the state of the buffers, on the device alone: captured, once per step.

        Recomputes everything that depends on positions or lengths from their absolute values (never from the step
        before), padded rows included. It may not allocate outside of the capturing pool, wait for the device,
        branch on values or plan on the host. It may assume one token per request in the loop.
        """
        ...


class FirstPass(Protocol):
    """Step 0 of a drafter: everything around its first forward pass, which ends with draft token 0.

    In the first pass each row has ``key.query_len`` tokens (K + 2 for a draft model of its own: K + 1 target tokens
    and one more; K + 1 for one that follows the target). The loop calls ``expand``, the metadata's ``build`` or
    ``update``, ``model_fn`` and ``finish``, in this order; all but ``build`` are captured. So both methods work on the
    device alone, from tensors at fixed addresses (name them to ``DraftBuffers.register``), and learn which rows are
    real from ``buffers.idx_mapping``.
    """

    def expand(self, key: GraphKey) -> None:
        """Write the tokens of this pass (``query_start_loc`` and ``seq_lens``, too) from the target's batch.

        Every row of ``key`` is written; the padded ones inert: no tokens, length 0. Twice is the same as once: only the
        target's batch is read, and it is left alone.
        """
        ...

    def finish(self, key: GraphKey, output: Tensor, next_hidden: Tensor | None) -> None:
        """Sample draft 0 into ``draft_tokens[:, 0]`` and leave in the buffers what step 1 reads.

        :func:`~nwor_ops.ops.prepare_decode_inputs` does the second half. ``current_draft_step`` is 0.

        Args:
            key: the padded shape of this pass.
            output: what ``model_fn`` returned, ``[key.num_tokens, ...]``.
            next_hidden: its second result, or None.
        """
        ...
