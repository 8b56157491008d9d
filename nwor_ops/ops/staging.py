"""Family ``staging``: a window's rows stay in a staging buffer until their outcome is known.

:func:`stage_kv` copies keys and values to rows of a staging buffer, and attention reads them there. After sampling,
:func:`accept_staged` and :func:`commit_staged` write the accepted rows into the cache. This family is for custom
engines whose attention can read keys and values outside the cache, and for engines that verify token trees. A commit
may name new slots, so an accepted path can go to consecutive slots. :func:`move_slots` compacts a tree that was written
to the cache directly.

Letters are as in :mod:`nwor_ops.ops`. A *staging row* is a row of a staging buffer.
"""

from __future__ import annotations

from torch import Tensor

from nwor_ops.ops.registry import op

__all__ = [
    "STAGE_COUNTERS",
    "accept_staged",
    "commit_staged",
    "move_slots",
    "stage_kv",
]

# Layout of the `counters` tensor of `accept_staged`, int64 [len(STAGE_COUNTERS)]. Ops only increment it.
STAGE_COUNTERS = ("windows", "staged", "stage_operations", "committed", "rejected", "incomplete")


@op(mutates=("staged_key", "staged_value", "row_windows"))
def stage_kv(
    key: Tensor,
    value: Tensor,
    stage_rows: Tensor,
    staged_key: Tensor,
    staged_value: Tensor,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
) -> None:
    """Copy keys and values of this window to rows of a staging buffer, as raw bytes. They are quantized only at commit.

    Args:
        key: ``[>= T, H, Dk]``, float32, float16 or bfloat16, any strides. Only the first T rows are read.
        value: ``[>= T, H, Dv]``, dtype of ``key``, any strides.
        stage_rows: int32 ``[T]``, contiguous: staging row of each token, in any order; negative = not staged. The rows
            of one call must be distinct. One such tensor serves every layer of a window.
        staged_key: ``[R, H, Dk]``, dtype of ``key``, any strides; **mutated** at the rows named, nowhere else.
        staged_value: ``[R, H, Dv]``, dtype of ``key``, any strides; **mutated** at the same rows.
        window_id: int64 ``[1]`` or None: the number of the open window.
        row_windows: int64 ``[R]``, contiguous, or None (both or neither); **mutated**: ``window_id`` at every staged
            row. It tells :func:`accept_staged` which rows this layer has staged in this window.

    All tensors are on one device.

    Example:
        >>> import torch
        >>> staged_key, staged_value = torch.zeros(4, 1, 2), torch.zeros(4, 1, 2)
        >>> rows = torch.tensor([2, -1], dtype=torch.int32)
        >>> nwor_ops.stage_kv(torch.ones(2, 1, 2), torch.ones(2, 1, 2), rows, staged_key, staged_value)
        >>> staged_key[:, 0, 0].tolist()
        [0.0, 0.0, 1.0, 0.0]
    """


@op(mutates=("row_committed", "counters"))
def accept_staged(
    row_accepted: Tensor,
    row_slots: Tensor,
    window_id: Tensor,
    row_windows: Tensor,
    num_slots: int,
    row_committed: Tensor,
    counters: Tensor,
    row_requests: Tensor | None = None,
    row_positions: Tensor | None = None,
) -> None:
    """Decide on the device which staged rows are committed: the accepted ones in every layer, or none.

    A row is *wanted* if it was accepted and has a slot. The wanted rows are committed if every layer has staged every
    one of them in this window, and every slot is in range. Otherwise the whole window is rejected. So after a forward
    that stopped early, or that skipped a layer, no layer gets a row that another layer lacks.

    Args:
        row_accepted: bool ``[R]``, contiguous: any pattern. Or int32 ``[Q]``, contiguous, with ``row_requests`` and
            ``row_positions``: number of accepted rows of each request.
        row_slots: int64 ``[R]``, contiguous: destination slot of each row; negative = none.
        window_id: int64 ``[1]``: the number of the open window.
        row_windows: int64 ``[L, R]``, contiguous: the window in which each of L layers last staged each row.
        num_slots: number of slots of the smallest cache.
        row_committed: bool ``[R]``, contiguous; **mutated**: the rows that :func:`commit_staged` must write.
        counters: int64 ``[len(STAGE_COUNTERS)]``, contiguous; **mutated**. It adds to ``windows`` 1, to ``staged`` the
            rows that some layer staged in this window, and to ``stage_operations`` the pairs of layer and row staged.
            It adds to ``committed`` the committed rows, to ``rejected`` the other staged rows, and to ``incomplete`` 1
            if the whole window was rejected.
        row_requests: int32 ``[R]``, contiguous, or None: request of each row; negative = none.
        row_positions: int32 ``[R]``, contiguous, or None: index of each row among the rows of its request, from 0.

    Example:
        >>> import torch
        >>> row_committed = torch.zeros(2, dtype=torch.bool)
        >>> counters = torch.zeros(len(nwor_ops.STAGE_COUNTERS), dtype=torch.int64)
        >>> nwor_ops.accept_staged(
        ...     torch.tensor([True, False]), torch.tensor([4, 5]), torch.tensor([1]), torch.tensor([[1, 1]]), 8,
        ...     row_committed, counters,
        ... )
        >>> row_committed.tolist()
        [True, False]
    """


@op(mutates=("key_cache", "value_cache"))
def commit_staged(
    staged_key: Tensor,
    staged_value: Tensor,
    row_slots: Tensor,
    row_accepted: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_cache_dtype: str,
    row_requests: Tensor | None = None,
    row_positions: Tensor | None = None,
) -> None:
    """Write the accepted rows of a staging buffer into one layer's cache, quantized exactly as :func:`write_kv` does.

    Args:
        staged_key: ``[>= R, H, Dk]``, float32, float16 or bfloat16, any strides.
        staged_value: ``[>= R, H, Dv]``, dtype of ``staged_key``, any strides.
        row_slots: int64 ``[R]``, contiguous: the slot of each row; negative = none. These need not be the slots for
            which the tokens were drafted. Slots of accepted rows must be distinct.
        row_accepted: bool ``[R]``, contiguous: any pattern. Or int32 ``[Q]``, contiguous, with ``row_requests`` and
            ``row_positions``: number of accepted rows of each request.
        key_cache: ``[B, N, H, Dk]``, any strides; **mutated** at the slots of accepted rows, nowhere else.
        value_cache: ``[B, N, H, Dv]``, any strides; **mutated** at the same slots.
        k_scale, v_scale, kv_cache_dtype: as in :func:`write_kv`. Scales per token are ``[>= R, 1]``, one for each row.
        row_requests, row_positions: as in :func:`accept_staged`.

    Example:
        >>> import torch
        >>> key_cache, value_cache, scale = torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2), torch.ones(1)
        >>> nwor_ops.commit_staged(
        ...     torch.ones(2, 1, 2), torch.ones(2, 1, 2), torch.tensor([3, 0]), torch.tensor([True, False]),
        ...     key_cache, value_cache, scale, scale, "auto",
        ... )
        >>> key_cache.view(4, 2)[:, 0].tolist()
        [0.0, 0.0, 0.0, 1.0]
    """


@op(mutates=("caches",))
def move_slots(caches: list[Tensor], src_slots: Tensor, dst_slots: Tensor, page_offsets: Tensor | None = None) -> None:
    """Move rows within the caches, in every layer, with one launch. The moves are simultaneous.

    A slot may be the source of some moves and the destination of another. Each destination then gets the row that its
    source held before the call, as if all sources were read before the first write. This compacts the accepted path of
    a token tree in place.

    Args:
        caches: L planes ``[B, N, H, W]`` of one geometry (equal shape, strides and dtype), all distinct; **mutated** at
            the destinations, nowhere else. Any dtype of 1, 2, 4 or 8 bytes. Bytes are not interpreted.
        src_slots: int64 ``[C]``, contiguous.
        dst_slots: int64 ``[C]``, contiguous. Destinations must be distinct. A move with a negative source or
            destination is skipped.
        page_offsets: as in :func:`log_slots`.

    Example:
        >>> import torch
        >>> cache = torch.arange(4.0).view(2, 2, 1, 1)
        >>> nwor_ops.move_slots([cache], torch.tensor([3, 0]), torch.tensor([0, 1]))
        >>> cache.flatten().tolist()
        [3.0, 0.0, 2.0, 3.0]
    """
