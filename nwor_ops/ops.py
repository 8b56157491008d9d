"""Every op of the library: its schema, and one documented wrapper per op.

The schemas are declared here, once, through :mod:`torch.library`. The kernels live in
``csrc/cpu/FAMILY.cpp`` and ``csrc/cuda/FAMILY.cu``, the fake implementations in ``meta/FAMILY.py``.
The families ``draft`` and ``stage`` have files of their own, :mod:`nwor_ops.ops_draft` and :mod:`nwor_ops.ops_stage`,
and are used from here all the same.
``torch.ops.nwor.NAME`` and the wrapper of the same name take the same arguments in the same order.
The wrapper adds two things: it refuses tensors that require a gradient (these ops have none, and
an in-place op without one would corrupt a backward pass in silence), and it raises ``TypeError``
for a wrong dtype or device where the dispatcher can only raise ``ValueError``.

Shapes use these letters: T tokens of this step, R log rows, G groups of layers, Q requests,
B blocks, N slots per block (the block size), H KV heads, D head size, W the width of a plane.

A *cache* is always the logical view ``[B, N, H, W]`` with any strides: NHD, HND, K and V packed in
one row, one backing buffer for all layers and MLA latents (H = 1) are all such views. A *slot* is
``block * N + offset``, as in vLLM. No op here has a return value unless it says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nwor_ops.arguments import as_list, describe_type_error, type_error_in_list
from nwor_ops.torch_fixes import before_lowering

NAMESPACE = "nwor"

SCHEMAS = {
    # family undo
    "write_kv": """(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,
        Tensor slot_mapping, Tensor k_scale, Tensor v_scale, str kv_cache_dtype) -> ()""",
    "write_kv_logged": """(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,
        Tensor slot_mapping, Tensor k_scale, Tensor v_scale, str kv_cache_dtype,
        Tensor log_rows, Tensor(c!) key_log, Tensor(d!) value_log, Tensor? window_id=None,
        Tensor(e!)? row_windows=None) -> ()""",
    "log_slots": """(Tensor cache, Tensor slot_mapping, Tensor log_rows, Tensor(a!) log,
        Tensor? page_offsets=None, Tensor? window_id=None, Tensor(b!)? row_windows=None) -> ()""",
    "restore_slots": """(Tensor(a!)[] caches, Tensor log, Tensor row_slots, Tensor row_rejected,
        Tensor? page_offsets=None, Tensor? window_id=None, Tensor? row_windows=None, int? num_rows=None,
        Tensor? plane_table=None) -> ()""",
    "restore_slots_from_rejected": """(Tensor(a!)[] caches, Tensor log, Tensor row_slots, Tensor num_rejected,
        Tensor cu_num_draft_tokens, Tensor(b!) row_rejected, Tensor(c!) num_accepted, Tensor(d!) counters,
        int num_bonus_tokens=0, Tensor? page_offsets=None, Tensor? window_id=None, Tensor? row_windows=None,
        int? num_rows=None, Tensor? plane_table=None, bool leading_zero=False) -> ()""",
    # family accept
    "plan_window": """(Tensor query_start_loc, Tensor cu_num_draft_tokens, Tensor[] slot_mappings,
        Tensor(a!) log_rows, Tensor(b!) row_slots, Tensor(c!) row_requests,
        Tensor(d!) row_positions, Tensor(e!) counters, int? token_offset=None,
        int num_bonus_tokens=0, bool leading_zero=False) -> ()""",
    "acceptance_mask": """(Tensor draft_token_ids, Tensor sampled_token_ids,
        Tensor cu_num_draft_tokens) -> (Tensor accepted, Tensor num_accepted)""",
    "acceptance_mask_from_rejected": """(Tensor num_rejected, Tensor cu_num_draft_tokens,
        int num_draft_tokens) -> (Tensor accepted, Tensor num_accepted)""",
    "reject_rows": """(Tensor draft_token_ids, Tensor sampled_token_ids, Tensor cu_num_draft_tokens,
        Tensor(a!) row_rejected, Tensor(b!) num_accepted, Tensor(c!) counters,
        int num_bonus_tokens=0, bool leading_zero=False) -> ()""",
    "reject_rows_from_rejected": """(Tensor num_rejected, Tensor cu_num_draft_tokens,
        Tensor(a!) row_rejected, Tensor(b!) num_accepted, Tensor(c!) counters,
        int num_bonus_tokens=0, bool leading_zero=False) -> ()""",
}

# Layout of the `counters` tensor, int64 [len(COUNTERS)], which only ever grows.
COUNTERS = ("windows", "drafted", "accepted", "rejected", "overflowed")

_library = torch.library.Library(NAMESPACE, "FRAGMENT")

# The overload itself: calling through the packet looks it up again each time.
_overloads: dict[str, torch._ops.OpOverload] = {}
_argument_names: dict[str, tuple[str, ...]] = {}


class Refusal(RuntimeError):
    """There is no kernel for a device, or a trace asks for what it must not have: not a matter of one argument."""


def declare(schemas: dict[str, str]) -> None:
    """Define the ops of one family; ``SCHEMAS`` holds all of them."""
    for name, schema in schemas.items():
        _library.define(name + " ".join(schema.split()), tags=(torch.Tag.pt2_compliant_tag,))
        overload = getattr(torch.ops.nwor, name).default
        _overloads[name] = overload
        _argument_names[name] = tuple(argument.name for argument in overload._schema.arguments)
    SCHEMAS.update(schemas)


declare(SCHEMAS)


def implement(op: str, kernel: Callable[..., Any], dispatch_key: str) -> None:
    """Register a Python kernel of one op for one dispatch key."""
    _library.impl(op, kernel, dispatch_key)


def implement_fake(op: str, kernel: Callable[..., Any]) -> None:
    """Register the fake implementation of one op: what it does to shapes (see ``meta/``)."""
    torch.library.register_fake(f"{NAMESPACE}::{op}", before_lowering(kernel), lib=_library)


# The compiled kernels word a dtype or device complaint in exactly these two ways (csrc/check.h).
_TYPE_COMPLAINT = re.compile(r" must have dtype | must be on device ")


def call(op: str, *arguments: Any) -> Any:
    """Call one op with the arguments of its schema; every wrapper ends here.

    Raises:
        TypeError: an argument is of a type that the schema does not take, or of a wrong dtype or device.
        ValueError: anything else is wrong with an argument.
        RuntimeError: a tensor requires a gradient, or there is no kernel for its device.
    """
    if torch.is_grad_enabled():  # in serving it is not: then no plane of a cache is looked at
        _refuse_gradients(op, arguments)
    try:
        return _overloads[op](*arguments)
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise _translated(op, arguments, error) from None


def _refuse_gradients(op: str, arguments: Sequence[Any]) -> None:
    for name, argument in zip(_argument_names[op], arguments, strict=True):
        if isinstance(argument, Tensor):
            _refuse_gradient(op, name, argument)
        elif isinstance(argument, (list, tuple)):
            for index, element in enumerate(argument):
                if isinstance(element, Tensor):
                    _refuse_gradient(op, f"{name}[{index}]", element)


def _refuse_gradient(op: str, name: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise RuntimeError(
            f"{op}: {name} must not require a gradient, the op has no backward; "
            "call it under torch.no_grad() or torch.inference_mode(), or pass .detach()"
        )


def _translated(op: str, arguments: Sequence[Any], error: Exception) -> Exception:
    """The error a caller should see.

    A kernel throws std::invalid_argument, which Python sees as ValueError up to torch 2.14 and as RuntimeError from
    2.15 on. Its complaints begin with the name of the op; so do the refusals of ``library.py``, which are
    RuntimeErrors and stay so.
    """
    if wrong_type := describe_type_error(_overloads[op], arguments):
        return wrong_type
    complaint = str(error)
    if isinstance(error, Refusal) or not complaint.startswith(f"{op}: "):
        return error
    return TypeError(complaint) if _TYPE_COMPLAINT.search(complaint) else ValueError(complaint)


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
    call("write_kv", key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype)


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
    call(
        "write_kv_logged", key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, kv_cache_dtype,
        log_rows, key_log, value_log, window_id, row_windows,
    )  # fmt: skip


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
    call("log_slots", cache, slot_mapping, log_rows, log, page_offsets, window_id, row_windows)


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
            _refuse_gradient("plane_table", f"caches[{index}]", cache)
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
    call(
        "restore_slots",
        caches,
        log,
        row_slots,
        row_rejected,
        page_offsets,
        window_id,
        row_windows,
        num_rows,
        plane_table,
    )


def restore_slots_from_rejected(
    caches: list[Tensor],
    log: Tensor,
    row_slots: Tensor,
    num_rejected: Tensor,
    cu_num_draft_tokens: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    num_bonus_tokens: int = 0,
    page_offsets: Tensor | None = None,
    window_id: Tensor | None = None,
    row_windows: Tensor | None = None,
    num_rows: int | None = None,
    plane_table: Tensor | None = None,
    leading_zero: bool = False,
) -> None:
    """:func:`reject_rows_from_rejected`, then :func:`restore_slots` of the rows it rejected, in one launch.

    Args:
        caches, log, row_slots, page_offsets, window_id, row_windows, num_rows, plane_table: as in
            :func:`restore_slots`.
        num_rejected: int32 ``[>= Q]``: how many drafts of each request were rejected.
        cu_num_draft_tokens, row_rejected, num_accepted, counters, num_bonus_tokens, leading_zero: as in
            :func:`reject_rows`; the three outputs are **mutated**, and share no memory with ``row_slots`` and
            ``row_windows``. ``window_id`` may be ``counters[:1]``, which stays as it is, not another part of them.

    Raises:
        As :func:`restore_slots` and :func:`reject_rows`, before anything is written.
    """
    call(
        "restore_slots_from_rejected", caches, log, row_slots, num_rejected, cu_num_draft_tokens, row_rejected,
        num_accepted, counters, num_bonus_tokens, page_offsets, window_id, row_windows, num_rows, plane_table,
        leading_zero,
    )  # fmt: skip


def plan_window(
    query_start_loc: Tensor,
    cu_num_draft_tokens: Tensor,
    slot_mappings: Sequence[Tensor],
    log_rows: Tensor,
    row_slots: Tensor,
    row_requests: Tensor,
    row_positions: Tensor,
    counters: Tensor,
    token_offset: int | None = None,
    num_bonus_tokens: int = 0,
    leading_zero: bool = False,
) -> None:
    """Work out, on the device, which tokens of this step are drafts and where each is logged.

    The drafts of request q are the last ``n = cu_num_draft_tokens[q] - cu_num_draft_tokens[q - 1]``
    of its tokens, ``[query_start_loc[q + 1] - n, query_start_loc[q + 1])``: vLLM's order in both
    of its model runners. Draft number r of the batch, counted through all requests, gets log row r,
    so row r is also entry r of vLLM's flat ``draft_token_ids``. Prompt and target tokens, padded
    tokens and padded requests (a repeated last value in both cumulative arrays) get no row.

    Every element of every output is written, so nothing of an earlier window survives.

    Args:
        query_start_loc: int32 ``[>= Q + 1]``, contiguous. First token of each request, then the end.
        cu_num_draft_tokens: int32 ``[Q]``, contiguous. Drafts up to and including each request.
        slot_mappings: G tensors int64 ``[T]``, contiguous: this step's slots, one per group.
        log_rows: int32 ``[>= T]``, contiguous; **mutated**: log row of each token, else -1.
        row_slots: int64 ``[G, R]``, contiguous; **mutated**: slot of each log row per group, else -1.
        row_requests: int32 ``[R]``, contiguous; **mutated**: request of each log row, else -1.
        row_positions: int32 ``[R]``, contiguous; **mutated**: place of the draft among the drafts of
            its request, from 0, else -1.
        counters: int64 ``[len(COUNTERS)]``; **mutated**: ``windows`` and ``drafted`` grow, or
            ``overflowed`` if the window was not planned.
        token_offset: None = a whole batch. Else a micro-batch: the first T tokens of ``slot_mappings``
            and ``log_rows`` are the tokens ``[token_offset, token_offset + T)`` of the batch, and rows of
            drafts outside it keep slot -1.
        num_bonus_tokens: how many tokens beside its drafts ``cu_num_draft_tokens`` counts for each request,
            padded ones too: 1 where an engine counts logits, as vLLM's ``cu_num_logits``. The drafts of
            request q are then ``num_bonus_tokens`` fewer than the difference above.
        leading_zero: whether ``cu_num_draft_tokens`` is ``[Q + 1]`` and begins with a 0 before the first request's
            count, as vLLM's ``cu_num_logits`` and other index pointers do. The 0 is not looked at on CUDA.

    Raises:
        ValueError: a shape, stride or overlap; on the CPU also more than R drafts, a cumulative array
            that decreases, more drafts than tokens in a request, or tokens beyond T (of a whole
            batch); nothing is written. On CUDA such a window is left unplanned as a whole (every
            row -1, counted in ``overflowed``) and raises in debug mode.
        TypeError: a dtype or device.
    """
    call(
        "plan_window", query_start_loc, cu_num_draft_tokens, as_list(slot_mappings), log_rows, row_slots,
        row_requests, row_positions, counters, token_offset, num_bonus_tokens, leading_zero,
    )  # fmt: skip


def acceptance_mask(
    draft_token_ids: Tensor, sampled_token_ids: Tensor, cu_num_draft_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Which drafts were accepted, from what the target sampled; on the device, no sync.

    Draft j of request q counts as accepted if every draft of q up to and including j equals the
    token sampled in its place (a negative one equals nothing), and the sampler went on after it:
    ``sampled_token_ids[q, j + 1]`` is not negative (where that column exists). The second condition
    tells an accepted draft from a rejected one whose replacement happens to be the same token, which
    vLLM's synthetic rejection sampler can produce.

    Args:
        draft_token_ids: int32 or int64 ``[P]``, contiguous: the drafts of all requests in order.
        sampled_token_ids: int32 or int64 ``[>= Q, >= most drafts]``, any strides; negative = no token
            (vLLM's ``RejectionSampler`` writes -1).
        cu_num_draft_tokens: int32 ``[Q]``, contiguous, as in :func:`plan_window`; its last value is <= P.

    Returns:
        ``accepted``, bool ``[P]`` (False past the last draft), and ``num_accepted``, int32 ``[Q]``.

    Raises:
        ValueError, TypeError: as above.
    """
    return call("acceptance_mask", draft_token_ids, sampled_token_ids, cu_num_draft_tokens)


def acceptance_mask_from_rejected(
    num_rejected: Tensor, cu_num_draft_tokens: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    """:func:`acceptance_mask` for runners that already know how many drafts were rejected.

    Args:
        num_rejected: int32 ``[>= Q]``, contiguous: the last so many drafts of each request were
            rejected; clamped to [0, its drafts].
        cu_num_draft_tokens: int32 ``[Q]``, contiguous.
        num_draft_tokens: P, the length of the mask (a host integer below 2^31, an upper bound of the drafts).

    Returns:
        ``accepted``, bool ``[P]``, and ``num_accepted``, int32 ``[Q]``.
    """
    return call("acceptance_mask_from_rejected", num_rejected, cu_num_draft_tokens, num_draft_tokens)


def reject_rows(
    draft_token_ids: Tensor,
    sampled_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    num_bonus_tokens: int = 0,
    leading_zero: bool = False,
) -> None:
    """:func:`acceptance_mask` into a window's own buffers, as :func:`restore_slots` wants it.

    Nothing is allocated, so it fits between begin and commit.

    Args:
        draft_token_ids, sampled_token_ids, cu_num_draft_tokens: as in :func:`acceptance_mask`.
        row_rejected: bool ``[R]``, contiguous; **mutated**, every element: True for a rejected draft.
        num_accepted: int32 ``[>= Q]``, contiguous; **mutated**, every element; 0 past Q.
        counters: int64 ``[len(COUNTERS)]``; **mutated**: ``accepted`` and ``rejected`` grow.
        num_bonus_tokens, leading_zero: as in :func:`plan_window`.

    A window of more than R drafts was never planned: every row is then False and nothing is counted.
    """
    call(
        "reject_rows", draft_token_ids, sampled_token_ids, cu_num_draft_tokens, row_rejected, num_accepted, counters,
        num_bonus_tokens, leading_zero,
    )  # fmt: skip


def reject_rows_from_rejected(
    num_rejected: Tensor,
    cu_num_draft_tokens: Tensor,
    row_rejected: Tensor,
    num_accepted: Tensor,
    counters: Tensor,
    num_bonus_tokens: int = 0,
    leading_zero: bool = False,
) -> None:
    """:func:`reject_rows` for runners that already know ``num_rejected``, int32 ``[>= Q]``."""
    call(
        "reject_rows_from_rejected", num_rejected, cu_num_draft_tokens, row_rejected, num_accepted, counters,
        num_bonus_tokens, leading_zero,
    )  # fmt: skip


# The families draft and stage are declared and documented in files of their own, which need what stands above.
from nwor_ops.ops_draft import *  # noqa: E402, F403
from nwor_ops.ops_stage import *  # noqa: E402, F403
