"""Interfaces of a back end for :class:`~nwor_ops.drafter.DraftLoop`: its attention metadata, and the first pass."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from nwor_ops.drafter.buffers import GraphKey


class DraftMetadata(Protocol):
    """The attention metadata of one drafter, slot mappings included.

    You choose the type of the metadata object. The loop passes it to ``model_fn``.

    Graphs read the tensors of the object they were captured with. Three rules follow:

    - Every tensor lies in memory that never moves: a buffer of the loop, or one of the adapter. A second ``build`` of a
      key writes to the same memory as the first. It writes all of it, including the rows after ``num_reqs``.
    - Host scalars are upper bounds (``max_len``, ``key.query_len``), because a graph keeps the value of its capture.
    - Padded rows have ``buffers.idx_mapping[row] < 0``. No table is read for them.

    Inherit from this class to get ``prepare``, or implement all three methods.

    Example:
        >>> class Metadata(DraftMetadata):
        ...     def __init__(self, buffers):
        ...         self.buffers = buffers
        ...     def build(self, key, num_reqs, step, capturing=False):
        ...         return {"seq_lens": self.buffers.seq_lens[: key.num_reqs]}
        ...     def update(self, key, metadata):
        ...         pass  # the lengths are a view of the loop's buffer, which every step updates
        >>> buffers = nwor_ops.drafter.DraftBuffers.allocate(4, 2, "cpu")
        >>> Metadata(buffers).build(GraphKey(2), num_reqs=1, step=1)["seq_lens"].tolist()
        [0, 0]
    """

    def prepare(self, key: GraphKey, num_reqs: int) -> None:
        """Do the host work that a batch needs once, before its first step or replay. Called in every mode, outside
        graphs.

        Example: copy this batch's block tables into the buffers that the graphs read. Does nothing by default.
        """

    def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> Any:
        """Build the metadata of one step on the host, from the current buffers. Called outside graphs.

        Args:
            key: the padded shape; ``key.query_len`` is 1 in the loop.
            num_reqs: number of real requests, <= ``key.num_reqs``; 0 if ``capturing``.
            step: number of the step about to run: 0 for the first pass, then 1 to K - 1.
            capturing: whether a warm-up or a capture follows instead of a batch. The object then serves every replay of
                that graph.

        Returns:
            The object for ``model_fn`` and ``update``.
        """
        ...

    def update(self, key: GraphKey, metadata: Any) -> None:
        """Do everything that :meth:`build` does to ``metadata``, on the device only. It is captured once per step.

        Mode "eager" never calls it. A back end that plans on the host captures no graphs.

        Compute everything that depends on positions or lengths from their absolute values, never from the previous
        step. Include padded rows. In the loop you may assume one token per request. Do not allocate outside the
        capturing pool, synchronize with the device, branch on values or plan on the host.
        """
        raise NotImplementedError("DraftMetadata.update: mode 'loop' and captures need it; mode 'eager' does not")


class FirstPass(Protocol):
    """Step 0 of a drafter: the work around its first forward pass, which ends with draft token 0.

    In the first pass each row has ``key.query_len`` tokens. A separate draft model has K + 2: K + 1 target tokens and
    one more. A drafter that follows the target has K + 1. The loop calls ``expand``, the metadata's ``build`` or
    ``update``, ``model_fn`` and ``finish``, in this order. All except ``build`` are captured. Both methods therefore
    work on the device only, with tensors at fixed addresses (pass them to ``DraftBuffers.register``). They read from
    ``buffers.idx_mapping`` which rows are real.

    Example:
        ``StandaloneFirstPass`` of ``examples/draft_loop.py`` is complete. These are two of its steps:

        >>> import torch
        >>> class Following(FirstPass):
        ...     def __init__(self, buffers, target_ids):
        ...         self.buffers, self.target_ids = buffers, target_ids
        ...     def expand(self, key):
        ...         self.buffers.input_ids[: key.num_tokens].copy_(self.target_ids[: key.num_tokens])
        ...     def finish(self, key, output, next_hidden):
        ...         self.buffers.draft_tokens[: key.num_reqs, 0].copy_(output.argmax(dim=-1))
        >>> buffers = nwor_ops.drafter.DraftBuffers.allocate(4, 2, "cpu")
        >>> first_pass = Following(buffers, torch.tensor([7, 8, 9]).int())
        >>> first_pass.expand(GraphKey(1, 3))
        >>> buffers.input_ids[:3].tolist()
        [7, 8, 9]
    """

    def expand(self, key: GraphKey) -> None:
        """Write the tokens of this pass, ``query_start_loc`` and ``seq_lens`` from the target's batch.

        Write every row of ``key``; padded rows become inert (no tokens, length 0). A second call must have no effect:
        read only the target's batch, and do not change it.
        """
        ...

    def finish(self, key: GraphKey, output: Tensor, next_hidden: Tensor | None) -> None:
        """Sample draft 0 into ``draft_tokens[:, 0]``, and write the inputs of step 1 to the buffers.

        :func:`~nwor_ops.ops.prepare_decode_inputs` does the second part. ``current_draft_step`` is 0.

        Args:
            key: the padded shape of this pass.
            output: the result of ``model_fn``, ``[key.num_tokens, ...]``.
            next_hidden: its second result, or None.
        """
        ...
