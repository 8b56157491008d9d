"""Draft vocabulary: a small output head for drafters, whose rows follow the traffic."""

from __future__ import annotations

import torch
from torch import Tensor

from nwor_ops import ops, validation

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DraftVocabulary:
    """Let a drafter compute the logits of ``rows`` tokens instead of the whole vocabulary.

    The set takes in the tokens of prompts and outputs, and forgets those that were not used for the longest time (by
    the CLOCK algorithm, see :func:`~nwor_ops.ops.update_draft_vocabulary`). The target still verifies with its whole
    head, so the output does not change. A token outside the set cannot be drafted: :meth:`coverage` says how often the
    target sampled one.

    No method synchronizes except :meth:`coverage`. :meth:`update`, :meth:`draft`, :meth:`best`, :meth:`logits` and
    :meth:`expand_logits` work in CUDA graphs and under ``torch.compile``. All tensors keep their addresses.

    Args:
        head: float32, float16 or bfloat16 ``[V, H]``, contiguous rows: the target's output head, or this rank's part.
            It is kept, and read by each update.
        rows: N, the number of tokens in the set, from 1 to V. ``32_768`` suits vocabularies of 128 K to 256 K tokens.
        first_token: the token of the first row of ``head``, with tensor parallelism.

    Attributes:
        weight: dtype of ``head``, ``[N, H]``: the copied rows.
        token_ids: int64 ``[N]``: the token of each row. It starts with the first N tokens of the head.
        row_of_token: int32 ``[V]``: the row of each token, -1 outside the set.
        counters: int64 ``[2]``: number of tokens passed to :meth:`update`, and of those that were not in the set.

    Raises:
        ValueError: the head is not ``[V, H]`` with contiguous rows, or has fewer rows than ``rows``.
        TypeError: an argument has another type or dtype. Quantized heads have no rows to copy.
        RuntimeError: the head requires a gradient.

    Example:
        >>> import torch, nwor_ops
        >>> vocabulary = nwor_ops.DraftVocabulary(torch.eye(6), rows=2)
        >>> vocabulary.update(torch.tensor([5, 3]))  # at most half of the rows change: 3 enters
        >>> vocabulary.token_ids.tolist(), vocabulary.draft(torch.eye(6)[3:4]).tolist()
        ([3, 1], [3])
    """

    def __init__(self, head: Tensor, rows: int, *, first_token: int = 0) -> None:
        self._check_head(head)
        validation.integer("DraftVocabulary: rows", rows)
        most = validation.INT32_MAX + 1 - head.shape[0]  # ids have 31 bits
        validation.integer("DraftVocabulary: first_token", first_token, least=0, most=most)
        if rows > head.shape[0]:
            raise ValueError(f"DraftVocabulary: rows must be at most {head.shape[0]}, the rows of head, got {rows}")
        self.head, self.first_token = head, first_token
        self.weight = head.new_empty(rows, head.shape[1])
        self.token_ids = torch.empty(rows, dtype=torch.int64, device=head.device)
        self.row_of_token = torch.empty(head.shape[0], dtype=torch.int32, device=head.device)
        self.counters = torch.empty(2, dtype=torch.int64, device=head.device)
        self._used = torch.empty(-(-rows // 32), dtype=torch.int32, device=head.device)
        self._hand = torch.empty(1, dtype=torch.int32, device=head.device)
        self.reset()

    @staticmethod
    def _check_head(head: Tensor) -> None:
        validation.tensor("DraftVocabulary: head", head, *_DTYPES, dims=2, least=1)
        if head.shape[1] > 1 and head.stride(1) != 1:
            raise ValueError(f"DraftVocabulary: head must have contiguous rows, got strides {list(head.stride())}")
        if head.requires_grad:
            raise RuntimeError("DraftVocabulary: head must not require a gradient; pass head.detach()")
        validation.own_memory("DraftVocabulary: head", head)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name: what must survive if an engine frees its memory."""
        return {
            "weight": self.weight,
            "token_ids": self.token_ids,
            "row_of_token": self.row_of_token,
            "counters": self.counters,
            "used": self._used,
            "hand": self._hand,
        }

    def update(self, tokens: Tensor, prompt_tokens: Tensor | None = None) -> None:
        """Take in the tokens of a step. Call it once per step, before the first draft.

        At most N / 2 tokens enter, the last ones of ``prompt_tokens`` followed by ``tokens``.

        Args:
            tokens: int32 or int64 ``[>= 0]``: the tokens that the target sampled, without rejected drafts. They are
                counted. Ids outside the head, as -1, are skipped.
            prompt_tokens: int32 or int64 ``[>= 0]``, or None: the tokens of prompts that the step computed.
        """
        ops.update_draft_vocabulary(
            tokens, self.head, self.token_ids, self.row_of_token, self.weight, self._used, self._hand, self.counters,
            prompt_tokens, self.first_token,
        )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[R, N]`` of hidden states ``[R, H]``. Column r belongs to ``token_ids[r]``."""
        validation.tensor("DraftVocabulary: hidden", hidden, dims=2, device=self.weight.device)
        if hidden.shape[1] != self.weight.shape[1]:
            raise ValueError(
                f"DraftVocabulary: hidden must be [R, {self.weight.shape[1]}], got {validation.shown(hidden)}"
            )
        return torch.nn.functional.linear(hidden, self.weight)

    def draft(self, hidden: Tensor) -> Tensor:
        """Return the most likely token of the set for hidden states ``[R, H]``: int64 ``[R]``.

        The lowest token wins among equal logits. NaN counts as -inf.
        """
        return self.best(hidden)[1]

    def best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit, float32 ``[R]``, and its token, int64 ``[R]``.

        With tensor parallelism, ranks compare these values to find the draft.
        """
        logits = self.logits(hidden)
        tokens = self.token_ids.new_empty(logits.shape[0])
        values = tokens.new_empty(logits.shape[0], dtype=torch.float32)
        ops.argmax_draft_tokens(logits, self.token_ids, tokens, values)
        return values, tokens

    def expand_logits(self, logits: Tensor, out: Tensor) -> Tensor:
        """Write the result of :meth:`logits` to ``out``, ``[R, >= V]``, with -inf outside the set. Return ``out``.

        A sampler needs it for probabilistic drafts: rejection sampling reads the distribution that was drawn from.
        """
        validation.tensor("DraftVocabulary: logits", logits, dims=2)
        if logits.shape[1] != len(self.token_ids):
            raise ValueError(
                f"DraftVocabulary: logits must be [R, {len(self.token_ids)}], got {validation.shown(logits)}"
            )
        ops.expand_draft_logits(logits, self.row_of_token, out)
        return out

    def reload(self, head: Tensor | None = None) -> None:
        """Copy all rows again, after the weights of the head changed. The set stays as it is.

        Args:
            head: a new head of the same shape, dtype and device, or None. Graphs that captured :meth:`update` read the
                old one.
        """
        if head is not None:
            self._check_head(head)
            if head.shape != self.head.shape or head.dtype != self.head.dtype or head.device != self.head.device:
                raise ValueError(
                    f"DraftVocabulary: head must stay {validation.shown(self.head)}, got {validation.shown(head)}"
                )
            self.head = head
        torch.index_select(self.head, 0, self.token_ids - self.first_token, out=self.weight)

    def reset(self) -> None:
        """Start again with the first N tokens and no counts, if the contents of the tensors are lost."""
        rows = len(self.token_ids)
        torch.arange(self.first_token, self.first_token + rows, out=self.token_ids, device=self.token_ids.device)
        self.row_of_token.fill_(-1)
        torch.arange(rows, dtype=torch.int32, out=self.row_of_token[:rows], device=self.row_of_token.device)
        for tensor in (self._used, self._hand, self.counters):
            tensor.zero_()
        self.reload()

    def coverage(self) -> float | None:
        """Return the share of counted tokens that were in the set, or None before the first one. Synchronizes."""
        seen, missed = self.counters.tolist()
        return 1 - missed / seen if seen else None
