"""Family ``staging``: a window's rows wait in a side buffer until it is known which of them are accepted.

:func:`stage_kv` puts a window's keys and values into rows of a side buffer, attention reads them there, and after
sampling :func:`accept_staged` and :func:`commit_staged` scatter the accepted ones into the cache. For engines whose
attention can read fresh keys and values, and for those that verify token trees: the slots of a commit may be new
ones, so that an accepted path lands in consecutive slots. A tree that was written to the cache at once is compacted
there by :func:`move_slots`.

Letters as in :mod:`nwor_ops.ops`. A *staging row* is a row of a staging buffer.
"""

from __future__ import annotations

from torch import Tensor

from nwor_ops.ops.registry import op

# Layout of the `counters` tensor of `accept_staged`, int64 [len(STAGE_COUNTERS)], which only ever grows.
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
    """Copy keys and values of this window to rows of a staging buffer: raw bytes, quantised only at commit.

    Args:
        key: ``[>= T, H, Dk]``, float32, float16 or bfloat16, any strides. Only the first T rows are read.
        value: ``[>= T, H, Dv]``, dtype of ``key``, any strides.
        stage_rows: int32 ``[T]``, contiguous: staging row of each token, in any order; negative = not staged. Rows of
            one call must be distinct. One such tensor serves every layer of a window.
        staged_key: ``[R, H, Dk]``, dtype of ``key``, any strides; **mutated** at the rows named, nowhere else.
        staged_value: ``[R, H, Dv]``, likewise.
        window_id: int64 ``[1]`` or None: the number of the open window.
        row_windows: int64 ``[R]``, contiguous, or None (both or neither); **mutated**: ``window_id`` at every row
            staged, which tells :func:`accept_staged` what this layer has staged in this window.

    Raises:
        ValueError: a shape, a stride, or memory that a source and a buffer, or the two buffers, share.
        TypeError: a dtype or device.
        IndexError: on the CPU, a row >= R; nothing is written. On CUDA such a token is skipped, and with
            ``VLLM_NWOR_DEBUG_SYNC=1`` the call raises after it.
        RuntimeError: a tensor requires a gradient, or the library for this device is missing.

    All tensors are on one device.
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
    """Decide on the device which staged rows are committed: the accepted ones of every layer, or none at all.

    A row is *wanted* if it was accepted and has a slot. If every layer has staged every wanted row in this window and
    every slot lies inside the caches, the wanted rows are committed. Else the window is rejected as a whole: after a
    forward that stopped half-way, or skipped a layer, no layer gets a row that another lacks.

    Args:
        row_accepted: bool ``[R]``, contiguous: any pattern. Or int32 ``[Q]``, contiguous, with ``row_requests`` and
            ``row_positions``: how many rows of each request were accepted.
        row_slots: int64 ``[R]``, contiguous: where each row is to go, negative = nowhere.
        window_id: int64 ``[1]``: the number of the open window.
        row_windows: int64 ``[L, R]``, contiguous: the window in which each of L layers last staged each row.
        num_slots: slots of the smallest of the caches.
        row_committed: bool ``[R]``, contiguous; **mutated**: which rows :func:`commit_staged` shall write.
        counters: int64 ``[len(STAGE_COUNTERS)]``, contiguous; **mutated**, each grows: ``windows`` by one, ``staged``
            by the rows that some layer staged in this window, ``stage_operations`` by the pairs of layer and row
            staged, ``committed`` by the rows committed, ``rejected`` by the other staged rows, ``incomplete`` by one
            if the window was rejected as a whole.
        row_requests: int32 ``[R]``, contiguous, or None: request of each row, negative = none.
        row_positions: int32 ``[R]``, contiguous, or None: place of each row among those of its request, from 0.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`stage_kv`.
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
    """Write the accepted rows of a staging buffer into one layer's cache, quantised exactly as :func:`write_kv` does.

    Args:
        staged_key: ``[>= R, H, Dk]``, float32, float16 or bfloat16, any strides.
        staged_value: ``[>= R, H, Dv]``, dtype of ``staged_key``.
        row_slots: int64 ``[R]``, contiguous: the slot of each row, negative = none. They need not be the slots the
            tokens were drafted for. Those of accepted rows must be distinct.
        row_accepted: bool ``[R]``, contiguous: any pattern. Or int32 ``[Q]``, contiguous, with ``row_requests`` and
            ``row_positions``: how many rows of each request were accepted.
        key_cache: ``[B, N, H, Dk]``, any strides; **mutated** at the slots of accepted rows, nowhere else.
        value_cache: ``[B, N, H, Dv]``, likewise.
        k_scale, v_scale, kv_cache_dtype: as in :func:`write_kv`; scales per token are ``[>= R, 1]``, one for each row.
        row_requests, row_positions: as in :func:`accept_staged`.

    Raises:
        As :func:`write_kv`; the IndexError is for the slot of an accepted row.
    """


@op(mutates=("caches",))
def move_slots(caches: list[Tensor], src_slots: Tensor, dst_slots: Tensor, page_offsets: Tensor | None = None) -> None:
    """Move rows inside the caches, in every layer: one launch. All moves happen at once.

    A slot may be the source of some moves and the destination of another: each destination then holds what its source
    held before the call, as if all sources had been read before the first was written. So the accepted path of a
    token tree is compacted in place.

    Args:
        caches: L planes ``[B, N, H, W]`` of one geometry (equal shape, strides and dtype), none of them twice;
            **mutated** at the destinations, nowhere else. The dtype may be any of 1, 2, 4 or 8 bytes; bytes are not
            interpreted.
        src_slots: int64 ``[C]``, contiguous.
        dst_slots: int64 ``[C]``, contiguous. Destinations must be distinct. A move with a negative source or
            destination is left out.
        page_offsets: as in :func:`log_slots`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`stage_kv`.
        IndexError: on the CPU, a source or destination >= B * N; nothing is written. On CUDA the move is left out and
            reported in debug mode.
    """
