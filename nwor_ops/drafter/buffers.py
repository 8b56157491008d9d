"""Shape and memory of the passes of a draft loop. The memory is allocated once, at addresses that every graph keeps."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nwor_ops import validation
from nwor_ops.validation import BoundToMemory


@dataclass(frozen=True)
class GraphKey:
    """The shape of a pass. Graphs are captured for it, and looked up by it.

    Attributes:
        num_reqs: number of rows, padded rows included, > 0.
        query_len: number of tokens of each row, > 0. It is 1 in the steps of the loop, and larger in the first pass.

    Example:
        >>> GraphKey(4, 5).num_tokens
        20
    """

    num_reqs: int
    query_len: int = 1

    def __post_init__(self) -> None:
        for name, value in (("num_reqs", self.num_reqs), ("query_len", self.query_len)):
            if type(value) is not int or not 0 < value <= validation.INT32_MAX:
                validation.integer(f"GraphKey: {name}", value)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the pass, always a multiple of the query length."""
        return self.num_reqs * self.query_len


@dataclass
class DraftBuffers(BoundToMemory):
    """Tensors that the steps of a draft loop read and write.

    Letters: M rows (the maximum number of requests in a batch), K drafts of each. All tensors are on one device. All
    except ``hidden_states`` and ``draft_tokens`` are contiguous; these two may have any strides, but every element has
    its own memory. Create them with :meth:`allocate`, or pass those of an engine. Graphs refer to them by address, so
    they cannot be copied or pickled.

    Attributes:
        input_ids: int32 ``[>= M]``. The token of each row.
        positions: int64 ``[>= M]``. The position of that token.
        query_start_loc: int32 ``[>= M + 1]``. The first token of each row, then the end.
        seq_lens: int32 ``[M]``. The number of tokens of each request, including those of this step.
        idx_mapping: int32 or int64 ``[M]``. The request-state index of each row. Negative for padded rows, which come
            last.
        draft_tokens: int64 ``[M, K]``. The result: column s holds the tokens of step s.
        current_draft_step: int64 ``[]``. The loop sets it before each step; 0 in the first pass.
        hidden_states: ``[>= M, width]``, or None. The hidden states that an EAGLE-like drafter carries to the next
            step.
        registered: other tensors at fixed addresses that a graph reads, by name; see :meth:`register`.

    Example:
        >>> buffers = DraftBuffers.allocate(max_num_reqs=4, num_drafts=3, device="cpu")
        >>> buffers.draft_tokens.shape
        torch.Size([4, 3])
    """

    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    idx_mapping: Tensor
    draft_tokens: Tensor
    current_draft_step: Tensor
    hidden_states: Tensor | None = None
    registered: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validation.tensor("DraftBuffers: seq_lens", self.seq_lens, torch.int32, dims=1, least=1)
        validation.instance("DraftBuffers: registered", self.registered, dict, "a dict")
        for name, tensor in self.registered.items():
            validation.tensor(f"DraftBuffers: registered[{name!r}]", tensor)
        rows = self.max_num_reqs
        shapes: dict[str, tuple[tuple[torch.dtype, ...], int, int]] = {
            "input_ids": ((torch.int32,), 1, rows),
            "positions": ((torch.int64,), 1, rows),
            "query_start_loc": ((torch.int32,), 1, rows + 1),
            "seq_lens": ((torch.int32,), 1, rows),
            "idx_mapping": ((torch.int32, torch.int64), 1, rows),
            "draft_tokens": ((torch.int64,), 2, rows),
            "current_draft_step": ((torch.int64,), 0, 0),
        } | ({} if self.hidden_states is None else {"hidden_states": ((), 2, rows)})
        for name, (dtypes, dims, least) in shapes.items():
            what, tensor = f"DraftBuffers: {name}", getattr(self, name)
            validation.tensor(what, tensor, *dtypes, dims=dims, least=least, device=self.device)
            validation.own_memory(what, tensor)
            if dims != 2 and not tensor.is_contiguous():
                raise ValueError(f"{what} must be contiguous, got strides {list(tensor.stride())}")

    @classmethod
    def allocate(
        cls,
        max_num_reqs: int,
        num_drafts: int,
        device: torch.device | str,
        *,
        max_num_tokens: int | None = None,
    ) -> DraftBuffers:
        """Allocate all buffers, except ``hidden_states``.

        Args:
            max_num_reqs: M, the maximum number of requests, > 0.
            num_drafts: K, the number of drafts per request, > 0.
            device: device of all buffers.
            max_num_tokens: length of ``input_ids`` and ``positions``, >= M; None means M. A first pass that uses these
                two needs ``M * query_len``.
        """
        for name, number in (("max_num_reqs", max_num_reqs), ("num_drafts", num_drafts)):
            validation.integer(f"DraftBuffers.allocate: {name}", number)
        if max_num_tokens is not None:
            validation.integer("DraftBuffers.allocate: max_num_tokens", max_num_tokens, max_num_reqs)
        device = validation.device("DraftBuffers.allocate: device", device)
        tokens = max_num_reqs if max_num_tokens is None else max_num_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(tokens, dtype=torch.int32),
            positions=zeros(tokens),
            query_start_loc=zeros(max_num_reqs + 1, dtype=torch.int32),
            seq_lens=zeros(max_num_reqs, dtype=torch.int32),
            idx_mapping=zeros(max_num_reqs).fill_(-1),
            draft_tokens=zeros(max_num_reqs, num_drafts),
            current_draft_step=torch.zeros((), dtype=torch.int64, device=device),
        )

    @property
    def max_num_reqs(self) -> int:
        """M, the maximum number of requests in a batch."""
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.seq_lens.device

    def register(self, **tensors: Tensor) -> None:
        """Add tensors that graphs read at fixed addresses (temperatures, block tables, ...).

        With ``debug=True`` the loop refuses to replay a graph after one of them moved. A name that belongs to another
        tensor is refused, and nothing is registered.
        """
        known = self.tensors()
        for name, tensor in tensors.items():
            validation.tensor(f"DraftBuffers.register: {name}", tensor)
            if known.get(name, tensor) is not tensor:
                raise ValueError(f"DraftBuffers.register: {name} is already registered with another tensor")
        self.registered.update(tensors)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the loop, by name."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return own | self.registered

    def pad_rows(self, num_reqs: int, padded: int) -> None:
        """Make rows [num_reqs, padded) inert for a pass of one token per row.

        They get request-state index -1, no tokens, and 0 as id, position and length. Other rows do not change. If there
        are no such rows, nothing is launched.
        """
        if num_reqs == padded:
            return
        self.idx_mapping[num_reqs:padded].fill_(-1)
        self.query_start_loc[num_reqs : padded + 1].fill_(num_reqs)
        for tensor in (self.input_ids, self.positions, self.seq_lens):
            tensor[num_reqs:padded].zero_()

    def fill_for_warm_up(self, key: GraphKey) -> None:
        """Fill the buffers for a warm-up: ``key.num_reqs`` rows of ``key.query_len`` tokens, all of them padded.

        Lengths and starts are those of real rows, so that kernels do their work. Every index is -1, so no key is
        written. The rows after those of the key are inert.
        """
        rows, length = key.num_reqs, key.query_len
        self.idx_mapping.fill_(-1)
        self.input_ids.zero_()
        self.positions.zero_()
        self.seq_lens.zero_()
        self.seq_lens[:rows].fill_(length)
        starts = torch.arange(len(self.query_start_loc), device=self.device) * length
        self.query_start_loc.copy_(starts.clamp(max=key.num_tokens))
        places = self.positions[: key.num_tokens]
        places.copy_(torch.arange(len(places), device=self.device) % length)
