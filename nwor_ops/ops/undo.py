"""Family ``undo``: write keys and values, log the rows that drafts overwrite, and restore the rejected ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nwor_ops import validation
from nwor_ops.ops.registry import op

__all__ = [
    "log_slots",
    "plane_table",
    "restore_slots",
    "restore_slots_from_rejected",
    "write_kv",
    "write_kv_logged",
]


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
    """Write this step's keys and values into the paged cache. This is the plain writer.

    It writes the same bytes as vLLM's ``reshape_and_cache_flash`` (``vllm/csrc/libtorch_stable/cache_kernels.cu``), for
    everything that vLLM's op supports.

    Args:
        key: ``[>= T, H, Dk]``, float32, float16 or bfloat16, any strides. Only the first T rows are read.
        value: ``[>= T, H, Dv]``, dtype of ``key``, any strides. Dv may differ from Dk.
        key_cache: ``[B, N, H, Dk]``, any strides; **mutated** at the slots written, nowhere else.
        value_cache: ``[B, N, H, Dv]``, the same B, N, H and dtype; **mutated** at the same slots.
        slot_mapping: int64 ``[T]``, contiguous. Slot of each token; negative = skip the token. The slots of one call
            must be distinct.
        k_scale: float32, one element, or per head ``[H]``, or per token ``[T, 1]``. A stored fp8 key is ``key /
            k_scale``, saturated. With ``kv_cache_dtype`` ``"auto"`` it is not read, but must be on the same device.
        v_scale: float32, the same for ``value``.
        kv_cache_dtype: ``"auto"``, ``"fp8"`` = ``"fp8_e4m3"``, or ``"fp8_e5m2"``. With ``"auto"`` caches have the dtype
            of ``key``, and bytes are copied. Otherwise caches are uint8 or the float8 dtype of that format.

    All tensors are on one device.

    Example:
        >>> import torch
        >>> key_cache, value_cache, scale = torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4), torch.ones(1)
        >>> key = value = torch.ones(2, 1, 4)
        >>> nwor_ops.write_kv(key, value, key_cache, value_cache, torch.tensor([3, -1]), scale, scale, "auto")
        >>> key_cache.view(4, 4)[:, 0].tolist()
        [0.0, 0.0, 0.0, 1.0]
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
    """Write keys and values as :func:`write_kv`, after logging what each draft's slot holds, in one kernel.

    Before token t is written, the old bytes of its slot are copied to row ``log_rows[t]`` of the logs. Bytes are never
    interpreted, so :func:`restore_slots` is exact for every dtype.

    Args:
        key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype: as in :func:`write_kv`.
        log_rows: int32 ``[>= T]``, contiguous. Log row of each token; -1 = not a draft. The rows of one call must be
            distinct.
        key_log: ``[R, H, Dk]``, dtype of ``key_cache``, any strides; **mutated** at the rows in ``log_rows`` of tokens
            with a slot, nowhere else.
        value_log: ``[R, H, Dv]``, dtype of ``key_cache``, any strides; **mutated** at the same rows.
        window_id: int64 ``[1]`` or None: the number of the open window.
        row_windows: int64 ``[R]``, contiguous, or None (both or neither); **mutated**. Every row logged gets
            ``window_id``. It lets :func:`restore_slots` distinguish rows of this window from older ones.

    Raises:
        IndexError: on the CPU, a slot >= B * N or a log row >= R. CUDA writes a token of the latter without logging it.

    Example:
        >>> import torch
        >>> key_cache, value_cache, scale = torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4), torch.ones(1)
        >>> key_log, value_log = torch.full((1, 1, 4), -1.0), torch.full((1, 1, 4), -1.0)
        >>> key, slots = torch.ones(2, 1, 4), torch.tensor([0, 1])
        >>> log_rows = torch.tensor([-1, 0], dtype=torch.int32)  # the second token is a draft
        >>> nwor_ops.write_kv_logged(
        ...     key, key, key_cache, value_cache, slots, scale, scale, "auto", log_rows, key_log, value_log
        ... )
        >>> key_log[0, 0].tolist()
        [0.0, 0.0, 0.0, 0.0]
        >>> nwor_ops.restore_slots([key_cache], key_log.unsqueeze(0), torch.tensor([1]), torch.tensor([True]))
        >>> key_cache.view(4, 4)[:2, 0].tolist()
        [1.0, 0.0]
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
    """Log what each draft's slot holds in one plane, for an external writer.

    Call it before that writer. The plane may hold anything that has slots: MLA latents, scales, or packed keys and
    values, of any dtype of 1, 2, 4 or 8 bytes.

    Args:
        cache: ``[B, N, H, W]``, any strides.
        slot_mapping: int64 ``[T]``, contiguous; negative = skip.
        log_rows: int32 ``[>= T]``, contiguous; negative = not a draft.
        log: ``[R, H, W]``, dtype of ``cache``, any strides; **mutated** at the rows in ``log_rows``.
        page_offsets: int32 ``[N, W]``, contiguous, or None. It describes pages whose inner order no strides can
            express. Element ``(b, n, h, w)`` of the plane is then ``b * cache.stride(0) + h * cache.stride(2) +
            page_offsets[n, w]`` elements from the start of ``cache``. ``cache`` must span the whole page: the largest
            such offset must be inside its storage.
        window_id, row_windows: as in :func:`write_kv_logged`.

    Example:
        >>> import torch
        >>> cache, log = torch.arange(8.0).view(2, 2, 1, 2), torch.zeros(1, 1, 2)
        >>> nwor_ops.log_slots(cache, torch.tensor([3]), torch.tensor([0], dtype=torch.int32), log)
        >>> log[0, 0].tolist()
        [6.0, 7.0]
    """


def plane_table(caches: Sequence[Tensor]) -> Tensor:
    """Make a table of the addresses of planes of one geometry, for ops that get the same planes in every step.

    Checking every layer of an engine costs the host more than the rest of such a call. The table is made, and the
    planes are compared, once. The planes must outlive the table and must not move. It serves only calls with the same
    first plane.

    Args:
        caches: L planes ``[B, N, H, W]`` of one geometry (equal shape, strides, dtype and device).

    Returns:
        int64 ``[L, 2]`` on the CPU: the address of each plane, and the number of bytes from there to the end of its
            storage.

    Raises:
        ValueError, TypeError: no plane, a lazy view, or planes of different geometries.
        RuntimeError: a plane requires a gradient.

    Example:
        >>> import torch
        >>> caches = [torch.zeros(2, 2, 1, 4), torch.zeros(2, 2, 1, 4)]
        >>> table = nwor_ops.plane_table(caches)
        >>> table[:, 1].tolist()
        [64, 64]
        >>> logs, slots, rejected = torch.zeros(2, 1, 1, 4), torch.tensor([1]), torch.tensor([True])
        >>> nwor_ops.restore_slots(caches[:1], logs, slots, rejected, plane_table=table)
    """
    validation.instance("plane_table: caches", caches, (list, tuple), "a list of tensors")
    if not caches:
        raise ValueError("plane_table: caches must hold at least one plane, got none")
    first = caches[0]
    validation.tensor("plane_table: caches[0]", first)
    for index, cache in enumerate(caches):
        validation.tensor(f"plane_table: caches[{index}]", cache, first.dtype, device=first.device)
        validation.own_memory(f"plane_table: caches[{index}]", cache)
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
    """Restore the logged bytes of every rejected row, in every layer, with one launch.

    Args:
        caches: L planes ``[B, N, H, W]`` of one geometry (equal shape, strides and dtype), one per layer; **mutated**
            at the slots of rejected rows, nowhere else.
        log: ``[L, R, H, W]``, dtype of the planes, any strides: written by :func:`write_kv_logged` or
            :func:`log_slots`.
        row_slots: int64 ``[R]``, contiguous. Slot of each log row; negative = nothing was logged.
        row_rejected: bool ``[R]``, contiguous. Any pattern: a prefix, a suffix, or sparse.
        page_offsets: as in :func:`log_slots`.
        window_id: int64 ``[1]`` or None: the number of the window to restore.
        row_windows: int64 ``[L, R]``, contiguous, or None (both or neither). The window in which each layer logged each
            row. Rows of other windows than ``window_id`` are skipped. After a forward that stopped early, the layers
            that it did not reach have nothing to restore.
        num_rows: number of rows to look at, from row 0; None = all R. It saves time if a log made for many requests
            holds only a few drafts.
        plane_table: :func:`plane_table` of all planes, or None. With a table, ``caches`` holds only the first plane,
            and the host checks no other. All planes of the table are **mutated**. This is for eager and captured calls.
            torch.compile and export refuse it, because they could not see which planes are mutated.

    Example:
        >>> import torch
        >>> cache, log = torch.ones(1, 4, 1, 4), torch.zeros(1, 2, 1, 4)  # the log holds zeros
        >>> row_slots, row_rejected = torch.tensor([1, 2]), torch.tensor([False, True])
        >>> nwor_ops.restore_slots([cache], log, row_slots, row_rejected)
        >>> cache[0, :, 0, 0].tolist()
        [1.0, 1.0, 0.0, 1.0]
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
    """Find the rejected rows from their numbers, as :func:`reject_rows` does from tokens, and restore their slots in
    the same launch.

    Args:
        caches, log, row_slots, page_offsets, window_id, row_windows, num_rows, plane_table: as in
            :func:`restore_slots`.
        num_rejected: int32 ``[>= Q]``: number of rejected drafts of each request.
        draft_start_loc, row_rejected, num_accepted, counters: as in :func:`reject_rows`; the last three are
            **mutated**. They must not share memory with ``row_slots`` or ``row_windows``. ``window_id`` may be
            ``counters[:1]``, which does not change, but no other part of ``counters``.

    Example:
        >>> import torch
        >>> cache, log = torch.ones(1, 4, 1, 4), torch.zeros(1, 2, 1, 4)  # the log holds zeros
        >>> row_slots, starts = torch.tensor([1, 2]), torch.tensor([0, 2], dtype=torch.int32)
        >>> row_rejected, num_accepted = torch.zeros(2, dtype=torch.bool), torch.zeros(1, dtype=torch.int32)
        >>> counters = torch.zeros(len(nwor_ops.COUNTERS), dtype=torch.int64)
        >>> num_rejected = torch.tensor([1], dtype=torch.int32)
        >>> nwor_ops.restore_slots_from_rejected(
        ...     [cache], log, row_slots, num_rejected, starts, row_rejected, num_accepted, counters
        ... )
        >>> cache[0, :, 0, 0].tolist(), num_accepted.tolist()  # the second draft was rejected
        ([1.0, 1.0, 0.0, 1.0], [1])
    """
