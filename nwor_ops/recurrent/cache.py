"""The states and records of one layer, and checks of the caches of several layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from nwor_ops import validation
from nwor_ops.kv_cache import has_no_data
from nwor_ops.validation import BoundToMemory

_STATE_DTYPES = (torch.float32, torch.bfloat16)
_KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST_ROWS = 32  # kMostRecordRows in csrc/recurrent_plan.h
CHUNK, MOST_CHUNK_WINDOW, CHUNK_WIDTH = 16, 8, 128  # of the kernels of the chunk form


@dataclass(frozen=True)
class RecurrentCache(BoundToMemory):
    """States and records of one layer, with one slot per request.

    Use :meth:`new` to allocate everything. Or pass all five tensors, which may be views of an engine's pages: any
    stride between slots, contiguous within a slot. Slot 0 is padding.

    Letters: S slots, W tokens of the longest window (K + 1), which is the number of rows of a record, H key heads, HV
    value heads, dk and dv elements per key and value head.

    Args:
        state: float32 or bfloat16 ``[S, HV, dv, dk]``.
        record_keys: ``[S, 2, W, H, dk]``, dtype of the layer's keys: bfloat16, float16 or, only on the CPU, float32.
        record_norms: float32 ``[S, 2, W, H]``.
        record_decays: float32 ``[S, 2, W, HV]``, or ``[S, 2, W, HV, dk]`` for layers with a decay per channel (KDA).
        record_updates: float32 ``[S, W, HV, dv]``.
        chunk: C, 0 or 16. With 16 windows have the chunk form, and a store folds exactly 16 rows
            (:func:`nwor_ops.gated_delta_verify`). It needs dk = dv = 128, no decay per channel and W of at most 8. Up
            to R = C - 1 + W rows may be pending. So records have one half of R + W rows, ``[S, 1, R + W, ...]``, and
            ``record_updates`` is ``[S, R + W, HV, dv]``.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not match.

    Example:
        >>> cache = RecurrentCache.new(
        ...     num_slots=3, max_window=4, num_key_heads=1, num_value_heads=2, key_size=64, value_size=64
        ... )
        >>> cache.state.shape, cache.num_slots, cache.max_window
        (torch.Size([3, 2, 64, 64]), 3, 4)
    """

    state: Tensor
    record_keys: Tensor
    record_norms: Tensor
    record_decays: Tensor
    record_updates: Tensor
    chunk: int = 0

    @classmethod
    def new(
        cls,
        *,
        num_slots: int,
        max_window: int,
        num_key_heads: int,
        num_value_heads: int,
        key_size: int,
        value_size: int,
        dtype: torch.dtype = torch.bfloat16,
        state_dtype: torch.dtype = torch.float32,
        per_channel: bool = False,
        chunk: int = 0,
        device: torch.device | str = "cpu",
    ) -> RecurrentCache:
        """Allocate states and records, filled with zeros.

        Args:
            num_slots: one for each request that may hold a state, and one for slot 0.
            max_window: tokens of the longest window: K draft tokens and 1. At most 32.
            num_key_heads, num_value_heads: heads of the layer. The number of value heads is a multiple of the number of
                key heads; adjacent value heads share a key head.
            key_size, value_size: elements per head. Kernels exist for keys of 64, 96, 128 or 256 and values of 64, 128,
                192 or 256; :meth:`RecurrentStates.allocate` refuses others.
            dtype: dtype of the queries, keys and values.
            state_dtype: dtype of the states, float32 or bfloat16.
            per_channel: whether each channel of a key has a decay (KDA). If False, each value head has one.
            chunk: 0 or 16: how many rows a store folds. 0 = a store folds all pending rows.
            device: device of all tensors.

        Raises:
            ValueError, TypeError: a number, dtype or device is invalid.
        """
        where = "RecurrentCache.new"
        sizes = {"num_slots": num_slots, "num_value_heads": num_value_heads, "value_size": value_size,
                 "key_size": key_size}  # fmt: skip
        shape = [validation.integer(f"{where}: {name}", size) for name, size in sizes.items()]
        _one_of(f"{where}: state_dtype", state_dtype, _STATE_DTYPES)
        place = validation.device(f"{where}: device", device)
        rows = validation.integer(f"{where}: max_window", max_window, most=_MOST_ROWS)
        heads = validation.integer(f"{where}: num_key_heads", num_key_heads)
        _one_of(f"{where}: dtype", dtype, _KEY_DTYPES)
        validation.boolean(f"{where}: per_channel", per_channel)
        validation.integer(f"{where}: chunk", chunk, least=0)

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=place)

        channels = (key_size,) if per_channel else ()
        halves, rows = (1, chunk - 1 + 2 * rows) if chunk else (2, rows)
        return cls(
            torch.zeros(shape, dtype=state_dtype, device=place),
            zeros(halves, rows, heads, key_size, dtype=dtype),
            zeros(halves, rows, heads),
            zeros(halves, rows, num_value_heads, *channels),
            zeros(rows, num_value_heads, value_size),
            chunk,
        )

    def __post_init__(self) -> None:
        def check(name: str, *dtypes: torch.dtype, dims: int) -> Tensor:
            tensor: Tensor = getattr(self, name)
            validation.tensor(f"RecurrentCache: {name}", tensor, *dtypes, dims=dims, least=1)
            validation.tensor(f"RecurrentCache: {name}", tensor, device=self.state.device)
            if tensor.numel() and not tensor[0].is_contiguous():
                raise ValueError(
                    f"RecurrentCache: {name} must be contiguous within a slot, got strides {list(tensor.stride())}"
                )
            return tensor

        def expect(name: str, letters: str, *shape: int) -> None:
            got = list(getattr(self, name).shape)
            if got != list(shape):
                raise ValueError(f"RecurrentCache: {name} must be {letters}, {list(shape)}, got {got}")

        slots, value_heads, value_size, key_size = check("state", *_STATE_DTYPES, dims=4).shape
        _, _, rows, heads, _ = check("record_keys", *_KEY_DTYPES, dims=5).shape
        per_channel = isinstance(self.record_decays, Tensor) and self.record_decays.dim() == 5
        check("record_decays", torch.float32, dims=5 if per_channel else 4)
        check("record_norms", torch.float32, dims=4)
        check("record_updates", torch.float32, dims=4)
        if validation.integer("RecurrentCache: chunk", self.chunk, least=0):
            _check_chunk(self)
        halves, letters = (1, "1, R + W") if self.chunk else (2, "2, W")
        expect("record_keys", f"[S, {letters}, H, dk]", slots, halves, rows, heads, key_size)
        expect("record_norms", f"[S, {letters}, H]", slots, halves, rows, heads)
        if per_channel:
            expect("record_decays", f"[S, {letters}, HV, dk]", slots, halves, rows, value_heads, key_size)
        else:
            expect("record_decays", f"[S, {letters}, HV] or [S, {letters}, HV, dk]", slots, halves, rows, value_heads)
        expect("record_updates", f"[S, {letters[3:]}, HV, dv]", slots, rows, value_heads, value_size)
        if heads == 0 or value_heads % heads != 0:
            raise ValueError(
                f"RecurrentCache: state must have a multiple of the {heads} key heads of record_keys, got "
                f"{value_heads} value heads"
            )

    @property
    def device(self) -> torch.device:
        return self.state.device

    @property
    def num_slots(self) -> int:
        return self.state.shape[0]

    @property
    def max_window(self) -> int:
        """Tokens of the longest window."""
        rows = self.record_keys.shape[2]
        return (rows - self.chunk + 1) // 2 if self.chunk else rows

    @property
    def per_channel(self) -> bool:
        """Whether each channel of a key has a decay (KDA)."""
        return self.record_decays.dim() == 5

    @property
    def geometry(self) -> tuple[object, ...]:
        """Chunk, dtypes, shapes and strides. One launch folds all layers for which they are equal."""
        tensors = (self.state, *self.records)
        return self.chunk, *((tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors)

    @property
    def records(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, norms, decays and updates, in the order of the ops' arguments."""
        return self.record_keys, self.record_norms, self.record_decays, self.record_updates


def _one_of(what: str, dtype: object, dtypes: tuple[torch.dtype, ...]) -> None:
    validation.instance(what, dtype, torch.dtype, "a torch.dtype")
    if dtype not in dtypes:
        raise TypeError(f"{what} must be {' or '.join(map(str, dtypes))}, got {dtype}")


def _check_chunk(cache: RecurrentCache) -> None:
    if cache.chunk != CHUNK:
        raise ValueError(f"RecurrentCache: chunk must be 0 or {CHUNK}, got {cache.chunk}")
    rows, window = cache.record_keys.shape[2], cache.max_window
    if window < 1 or rows != CHUNK - 1 + 2 * window:
        raise ValueError(
            f"RecurrentCache: record_keys must have {CHUNK - 1} rows and two for each token of a window with chunk "
            f"{CHUNK}, got {rows}"
        )
    if window > MOST_CHUNK_WINDOW:
        raise ValueError(
            f"RecurrentCache: max_window must be at most {MOST_CHUNK_WINDOW} with chunk {CHUNK}, got {window}"
        )
    if cache.per_channel:
        raise ValueError(f"RecurrentCache: per_channel must be False with chunk {CHUNK}, got True")
    sizes = list(cache.state.shape[2:])
    if sizes != [CHUNK_WIDTH, CHUNK_WIDTH]:
        raise ValueError(f"RecurrentCache: state must be [S, HV, 128, 128] with chunk {CHUNK}, got heads of {sizes}")


def check_apart(method: str, caches: Mapping[str, RecurrentCache]) -> None:
    """Raise if states or records share memory, within a layer or between layers.

    A window would overwrite other data, and no kernel could check it, because none sees all layers.

    Args:
        method: name of the calling method, for the message.
        caches: the caches by layer. All have the same number of slots.

    Raises:
        ValueError: two tensors share memory.
    """
    places = [
        (f"{field.name} of {name!r}", getattr(cache, field.name))
        for name, cache in caches.items()
        for field in fields(cache)
        if field.name != "chunk"
    ]
    if any(has_no_data(tensor) for _, tensor in places):
        return  # no addresses to compare
    num_slots = places[0][1].shape[0]
    slots = torch.arange(num_slots, device="cpu")
    starts = torch.cat([tensor.data_ptr() + slots * tensor.stride(0) * tensor.itemsize for _, tensor in places])
    sizes = torch.tensor([tensor[0].numel() * tensor.itemsize for _, tensor in places], device="cpu")
    starts, order = starts.sort()
    ends = starts + sizes.repeat_interleave(num_slots)[order]
    for index in (starts[1:] < ends[:-1]).nonzero()[:1, 0].tolist():
        first, second = sorted(int(place) // num_slots for place in order[index : index + 2])
        raise ValueError(f"{method}: {places[first][0]} and {places[second][0]} must not share memory")


def layers_of_mixed_storages(caches: Mapping[str, RecurrentCache]) -> set[str]:
    """Return the layers with a storage that holds several dtypes, such as pages.

    AOTAutograd (torch 2.13) refuses a graph that mutates such inputs, and its message does not name them.
    """
    tensors = [(name, tensor) for name, cache in caches.items() for tensor in (cache.state, *cache.records)]
    dtypes: dict[int, set[torch.dtype]] = {}
    for _, tensor in tensors:
        dtypes.setdefault(tensor.untyped_storage()._cdata, set()).add(tensor.dtype)
    return {name for name, tensor in tensors if len(dtypes[tensor.untyped_storage()._cdata]) > 1}
