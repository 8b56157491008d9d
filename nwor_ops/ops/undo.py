"""Family ``undo``: write, keep what was there before, and put it back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nwor_ops.arguments import type_error_in_list
from nwor_ops.ops.registry import op, refuse_gradient


@op(mutates=("key_cache", "value_cache"))
def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_cache_dtype: str,
) -> None:
    """Write this step's keys and values into the paged cache: the plain writer.

    Writes the same bytes as vLLM's ``reshape_and_cache_flash``
    (``vllm/csrc/libtorch_stable/cache_kernels.cu``) for everything that one supports.

    Args:
        key: ``[>= T, H, Dk]``, float32, float16 or bfloat16, any strides. Only the first T rows are read.
        value: ``[>= T, H, Dv]``, dtype of ``key``, any strides. Dv may differ from Dk.
        key_cache: ``[B, N, H, Dk]``, any strides; **mutated** at the slots written, nowhere else.
        value_cache: ``[B, N, H, Dv]``, the same B, N, H and dtype; **mutated** likewise.
        slot_mapping: int64 ``[T]``, contiguous. Slot of each token; -1 (any negative) = skip the token.
            The slots of one call must be distinct.
        k_scale: float32: one element, per head ``[H]``, or per token ``[T, 1]``. A stored fp8 key is
            ``key / k_scale``, saturated. Not read when ``kv_cache_dtype`` is ``"auto"``, but on the same device.
        v_scale: the same for ``value``.
        kv_cache_dtype: ``"auto"`` (caches have the dtype of ``key``, bytes are copied), ``"fp8"`` =
            ``"fp8_e4m3"``, or ``"fp8_e5m2"`` (caches are uint8 or the float8 dtype of that format).

    Raises:
        ValueError: a shape, stride, option or overlap (key or value may not share memory with a cache).
        TypeError: a dtype or device.
        IndexError: on the CPU, a slot >= B * N; nothing is written. On CUDA such a token is skipped,
            and with ``VLLM_NWOR_DEBUG_SYNC=1`` the call raises after it.
        RuntimeError: a tensor requires a gradient, or the library for this device is missing.

    All tensors are on one device.
    """


@op(mutates=("key_cache", "value_cache", "key_log", "value_log", "row_windows"))
def write_kv_logged(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    kv_cache_dtype: str,
    log_rows: Tensor,
    key_log: Tensor,
    value_log: Tensor,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
) -> None:
    """:func:`write_kv`, and first save what each draft's slot held: one kernel.

    Before token t is written, the raw old bytes of its slot are copied to row ``log_rows[t]`` of
    the logs. Bytes are never interpreted, so :func:`restore_slots` is exact for every dtype.

    Args:
        key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype:
            as in :func:`write_kv`.
        log_rows: int32 ``[>= T]``, contiguous. Log row of each token, -1 = not a draft. Rows of one
            call must be distinct.
        key_log: ``[R, H, Dk]``, dtype of ``key_cache``, any strides; **mutated** at the rows named
            by ``log_rows`` of tokens whose slot is not negative, nowhere else.
        value_log: ``[R, H, Dv]``, likewise.
        window_id: int64 ``[1]`` or None: the number of the open window.
        row_windows: int64 ``[R]``, contiguous, or None (both or neither); **mutated**: ``window_id`` at
            every row logged, so that :func:`restore_slots` can tell this window's rows from older ones.

    Raises:
        As :func:`write_kv`; IndexError also for a log row >= R (CUDA: the token is written, not
        logged, and reported in debug mode); ValueError also where a log shares memory with a cache,
        a source or the other log.
    """


@op(mutates=("log", "row_windows"))
def log_slots(
    cache: Tensor,
    slot_mapping: Tensor,
    log_rows: Tensor,
    log: Tensor,
    page_offsets: Tensor | None = None,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
) -> None:
    """Save what each draft's slot holds in one plane, for writers that are not ours.

    Call it before the other writer. The plane may be anything with slots: MLA latents, scales,
    packed keys and values, of any dtype of 1, 2, 4 or 8 bytes.

    Args:
        cache: ``[B, N, H, W]``, any strides.
        slot_mapping: int64 ``[T]``, contiguous; negative = skip.
        log_rows: int32 ``[>= T]``, contiguous; negative = not a draft.
        log: ``[R, H, W]``, dtype of ``cache``, any strides; **mutated** at the rows named.
        page_offsets: int32 ``[N, W]``, contiguous, or None. Where given, element ``(b, n, h, w)`` of
            the plane is ``b * cache.stride(0) + h * cache.stride(2) + page_offsets[n, w]`` elements
            from the start of ``cache``: pages whose inner order no strides can express. ``cache``
            must then span the whole page: the largest such offset lies inside its storage.
        window_id, row_windows: as in :func:`write_kv_logged`.

    Raises:
        As :func:`write_kv_logged`.
    """


def plane_table(caches: Sequence[Tensor]) -> Tensor:
    """Where planes of one geometry lie, for ops that are called with the same ones in every step.

    Looking at each of an engine's layers costs the host more than the rest of such a call. The table is made, and the
    planes are compared, once; the planes must outlive it and stay where they are, and it serves calls with the very
    first plane that it was made with.

    Args:
        caches: L planes ``[B, N, H, W]`` of one geometry (equal shape, strides, dtype and device).

    Returns:
        int64 ``[L, 2]`` on the CPU: the address of each plane, and the bytes from there to the end of its storage.

    Raises:
        ValueError, TypeError: no plane, or another geometry.
        RuntimeError: a plane requires a gradient.
    """
    if wrong_type := type_error_in_list("plane_table: caches", caches):
        raise wrong_type
    if torch.is_grad_enabled():
        for index, cache in enumerate(caches):
            refuse_gradient("plane_table", f"caches[{index}]", cache)
    if not caches:
        raise ValueError("plane_table: caches must hold at least one plane, got none")
    first = caches[0]
    for index, cache in enumerate(caches):
        if cache.is_neg() or cache.is_conj() or cache._is_zerotensor():
            raise ValueError(f"plane_table: caches[{index}] must be a tensor of its own memory, got a lazy view")
        for what, found, expected in (
            ("have dtype", cache.dtype, first.dtype),
            ("be on device", cache.device, first.device),
        ):
            if found != expected:
                raise TypeError(f"plane_table: caches[{index}] must {what} {expected}, got {found}")
        if cache.shape != first.shape or cache.stride() != first.stride():
            raise ValueError(
                f"plane_table: caches[{index}] must be of the shape and strides of caches[0], {tuple(first.shape)} and "
                f"{first.stride()}, got {tuple(cache.shape)} and {cache.stride()}"
            )
    rows = [
        (cache.data_ptr(), cache.untyped_storage().nbytes() - cache.storage_offset() * cache.element_size())
        for cache in caches
    ]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


@op(mutates=("caches",))
def restore_slots(
    caches: list[Tensor],
    log: Tensor,
    row_slots: Tensor,
    row_rejected: Tensor,
    page_offsets: Tensor | None = None,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
    num_rows: int | None = None,
    plane_table: Tensor | None = None,
) -> None:
    """Put the logged bytes of every rejected row back, in every layer: one launch.

    Args:
        caches: L planes ``[B, N, H, W]`` of one geometry (equal shape, strides and dtype), one per
            layer; **mutated** at the slots of rejected rows, nowhere else.
        log: ``[L, R, H, W]``, dtype of the planes, any strides: what :func:`write_kv_logged` or
            :func:`log_slots` saved.
        row_slots: int64 ``[R]``, contiguous. Slot of each log row; negative = nothing was logged.
        row_rejected: bool ``[R]``, contiguous. Any pattern: a prefix, a suffix, sparse.
        page_offsets: as in :func:`log_slots`.
        window_id: int64 ``[1]`` or None.
        row_windows: int64 ``[L, R]``, contiguous, or None (both or neither): the window in which each
            layer logged each row. Rows of another window than ``window_id`` are left alone: after a
            forward that stopped half-way, the layers it never reached hold nothing to put back.
        num_rows: only the first so many rows are looked at; None = all R. A log made for many requests need not be
            walked through for the drafts of a few.
        plane_table: :func:`plane_table` of all planes, or None. Where given, ``caches`` holds the first plane alone
            and the host looks at no other; all of them are **mutated**. For eager and captured calls: torch.compile
            and export, which could not see what is mutated, refuse it.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`write_kv`; ValueError also for ``num_rows`` below 0 or above R.
        IndexError: on the CPU, a slot >= B * N of a rejected row; nothing is written. On CUDA the row
            is skipped and reported in debug mode.
    """


@op(mutates=("caches", "row_rejected", "num_accepted", "counters"))
def restore_slots_from_rejected(
    caches: list[Tensor],
    log: Tensor,
    row_slots: Tensor,
    num_rejected: Tensor,
    draft_start_loc: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    page_offsets: Tensor | None = None,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
    num_rows: int | None = None,
    plane_table: Tensor | None = None,
) -> None:
    """:func:`reject_rows_from_rejected`, then :func:`restore_slots` of the rows it rejected, in one launch.

    Args:
        caches, log, row_slots, page_offsets, window_id, row_windows, num_rows, plane_table: as in
            :func:`restore_slots`.
        num_rejected: int32 ``[>= Q]``: how many drafts of each request were rejected.
        draft_start_loc, row_rejected, num_accepted, counters: as in :func:`reject_rows`; the three outputs are
            **mutated**, and share no memory with ``row_slots`` and ``row_windows``. ``window_id`` may be
            ``counters[:1]``, which stays as it is, not another part of them.

    Raises:
        As :func:`restore_slots` and :func:`reject_rows`, before anything is written.
    """
