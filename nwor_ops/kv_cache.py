"""The paged cache of one layer, as the ops see it: planes of slots.

A plane is a logical ``[num_blocks, block_size, num_kv_heads, width]`` view with any strides. The engine chooses the
strides. This module never infers a layout from a shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nwor_ops import ops, validation
from nwor_ops.overlap import Area, share_bytes
from nwor_ops.torch_fixes import static_int
from nwor_ops.validation import BoundToMemory


def has_no_data(tensor: Tensor) -> bool:
    """Return whether a tensor has no storage, as in tracing, profiling and warm-up. There is nothing to write then.

    A tensor without elements needs no storage. On the meta device a slice has an address.
    """
    return isinstance(tensor, FakeTensor) or tensor.is_meta or (tensor.data_ptr() == 0 and tensor.numel() > 0)


def occupies_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has elements, and storage for them."""
    return not has_no_data(tensor) and tensor.numel() > 0


@dataclass(frozen=True)
class Plane(BoundToMemory):
    """One view of a layer's cache.

    Args:
        view: ``[B, N, H, W]``, any strides, any dtype of 1, 2, 4 or 8 bytes.
        page_offsets: int32 ``[N, W]`` on the same device, or None; see :func:`nwor_ops.log_slots`. Planes with the same
            order inside their pages must share the tensor.

    Example:
        >>> import torch
        >>> latents = nwor_ops.Plane(torch.zeros(4, 16, 1, 576, dtype=torch.bfloat16))
    """

    view: Tensor
    page_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        validation.tensor("Plane: view", self.view)
        validation.own_memory("Plane: view", self.view)
        if self.view.dim() != 4:
            raise ValueError(
                "Plane: view must be [num_blocks, block_size, num_kv_heads, width], got "
                f"{self.view.dtype} {list(self.view.shape)}; LayerCache.split takes the views of keys and of values"
            )
        if self.view.element_size() not in (1, 2, 4, 8):
            raise TypeError(f"Plane: view must have dtype of 1, 2, 4 or 8 bytes, got {self.view.dtype}")
        if self.page_offsets is None:
            return
        validation.tensor("Plane: page_offsets", self.page_offsets, torch.int32, device=self.view.device)
        validation.own_memory("Plane: page_offsets", self.page_offsets)
        if self.page_offsets.shape != (self.view.shape[1], self.view.shape[3]):
            raise ValueError(
                f"Plane: page_offsets must be [block_size, width], {[self.view.shape[1], self.view.shape[3]]}, got "
                f"{list(self.page_offsets.shape)}"
            )

    @property
    def geometry(self) -> tuple[Any, ...]:
        """The properties that planes must share to be restored by one launch."""
        view = self.view
        return view.dtype, tuple(view.shape), view.stride(), id(self.page_offsets)


class PlaneList(BoundToMemory):
    """Planes of one geometry that ops take in every step. They are compared once and then passed as a table.

    Args:
        views: ``[B, N, H, W]``, one per plane. They must not move.
    """

    def __init__(self, views: list[Tensor]) -> None:
        self.views = views
        self._first = views[:1]
        self._table = None if has_no_data(views[0]) else ops.plane_table(views)

    def arguments(self) -> tuple[list[Tensor], Tensor | None]:
        """Return the arguments ``caches`` and ``plane_table`` of an op. A trace gets all planes, since it must see
        which it mutates."""
        if self._table is None or torch.compiler.is_compiling():
            return self.views, None
        return self._first, self._table


@dataclass(frozen=True)
class LayerCache(BoundToMemory):
    """The planes of one layer, and the position of key and value in them.

    Use one of the three constructors:

    - :meth:`packed`: key and value are the halves of one row (vLLM >= 0.26).
    - :meth:`split`: key and value have one plane each.
    - :meth:`opaque`: an external writer fills the planes (MLA latents, inline scales, pages with a custom order). Log
      such a layer with ``manager.log`` before that writer runs.

    Example:
        >>> import torch
        >>> nwor_ops.LayerCache.packed(torch.zeros(4, 16, 8, 2 * 128)).num_slots
        64
    """

    planes: tuple[Plane, ...]
    writable: bool = True

    @classmethod
    def packed(cls, cache: Tensor) -> LayerCache:
        """Describe a cache whose rows hold a key and then a value of the same width.

        Args:
            cache: ``[B, N, H, 2 * D]``, any strides. For other widths see :meth:`split`: its planes may be views of one
                tensor.
        """
        return cls((Plane(cache),))

    @classmethod
    def split(cls, key_cache: Tensor, value_cache: Tensor) -> LayerCache:
        """Describe a cache with one plane for keys and one for values.

        Args:
            key_cache: ``[B, N, H, Dk]``, any strides.
            value_cache: ``[B, N, H, Dv]``, dtype of ``key_cache``, any strides.
        """
        return cls((Plane(key_cache), Plane(value_cache)))

    @classmethod
    def opaque(cls, *planes: Plane | Tensor) -> LayerCache:
        """Describe planes that an external writer fills.

        Args:
            planes: planes, or tensors ``[B, N, H, W]``.
        """
        return cls(tuple(plane if isinstance(plane, Plane) else Plane(plane) for plane in planes), writable=False)

    def __post_init__(self) -> None:
        count = len(self.planes)
        if count == 0 or (self.writable and count > 2):
            raise ValueError(f"LayerCache: planes must hold a plane, or key and value if writable, got {count}")
        if self.writable and count == 1 and self.planes[0].view.shape[3] % 2:
            raise ValueError(
                f"LayerCache: a packed plane must have an even width, got {list(self.planes[0].view.shape)}"
            )
        slots = {(plane.view.shape[0] * plane.view.shape[1], plane.view.device) for plane in self.planes}
        if len(slots) != 1:
            raise ValueError(f"LayerCache: planes must agree on slots and device, got {sorted(map(str, slots))}")
        if self.writable and count == 2:
            _check_key_and_value(*(plane.view for plane in self.planes))

    @property
    def device(self) -> torch.device:
        return self.planes[0].view.device

    @property
    def num_slots(self) -> int:
        return self.planes[0].view.shape[0] * self.planes[0].view.shape[1]

    def key_value(self, planes: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Split the caches, or other tensors with the shapes of the planes, into key and value."""
        if planes is None:
            planes = tuple(plane.view for plane in self.planes)
        if len(planes) == 1:
            size = static_int(self.planes[0].view.shape[3] // 2)
            return planes[0][..., :size], planes[0][..., size:]
        return planes[0], planes[1]


def _check_key_and_value(key: Tensor, value: Tensor) -> None:
    """Raise ValueError unless two planes can hold the keys and the values of one layer."""
    if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype:
        raise ValueError(
            "LayerCache: the value plane must have the dtype, blocks, block size and heads of the key plane "
            f"({key.dtype} {list(key.shape)}), got {value.dtype} {list(value.shape)}"
        )
    if occupies_memory(key) and occupies_memory(value) and share_bytes(Area.of(key), Area.of(value)):
        raise ValueError("LayerCache: the key plane and the value plane must not share memory")
