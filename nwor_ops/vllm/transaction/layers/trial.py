"""Trial runs of vLLM's cache writers on scratch pages: find the bytes of a slot, and compare our writer with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.kv_cache import LayerCache
from nwor_ops.vllm.transaction.layers.target import elements, positions

_BLOCKS = 3


@dataclass(frozen=True)
class Rows:
    """Keys and values for a trial run. ``shapes`` are the shapes of one token's key and value."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device

    def plain(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return rows with magnitudes from 1 to 2. No quantization turns such a number into zero."""
        generator = torch.Generator().manual_seed(num_tokens)
        key, value = (torch.rand((num_tokens, *shape), generator=generator, device="cpu") + 1 for shape in self.shapes)
        return key.to(self.device, self.dtype), value.to(self.device, self.dtype)

    def extreme(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return rows with every magnitude, both signs, zeros, infinities and NaN."""
        generator = torch.Generator().manual_seed(num_tokens)
        parts = []
        for shape in self.shapes:
            size = (num_tokens, *shape)
            exponents = torch.randint(-24, 24, size, generator=generator, device="cpu")
            rows = torch.randn(size, generator=generator, device="cpu") * 2.0**exponents
            flat = rows.flatten()
            flat[: 6 * (len(flat) // 6)].view(-1, 6)[::7] = torch.tensor(
                [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0], device="cpu"
            )
            parts.append(rows.to(self.device, self.dtype))
        return parts[0], parts[1]


def _scratch(like: Tensor) -> Tensor:
    """Return a small cache of zeros with the dimensions of `like`, in the same memory order."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    shape = (_BLOCKS, *like.shape[1:])
    memory = like.new_zeros([shape[dim] for dim in order])
    return memory.permute([order.index(dim) for dim in range(like.dim())])


def check_slots(write: Callable[..., None], planes: Callable[[Tensor], LayerCache], like: Tensor, rows: Rows) -> None:
    """Write single tokens with vLLM's own writer, and check that only the slots of the planes change.

    ``planes`` says where a slot of a cache lies. Only shape and dtype of the cache ``like`` are read.
    """
    block_size = planes(like).planes[0].view.shape[1]
    for slot in sorted({0, 1, block_size - 1, block_size + block_size // 2}):
        scratch = _scratch(like)
        # The first write may also set values that do not depend on the slot (initial scales). Compare after the second.
        row = rows.plain(1)
        mapping = torch.tensor([slot], device=like.device)
        write(*row, scratch, torch.full_like(mapping, (_BLOCKS - 1) * block_size))
        before = scratch.clone()
        write(*row, scratch, mapping)
        changed = (_bytes(scratch) != _bytes(before)).view(*scratch.shape, scratch.element_size()).any(-1)
        inside = torch.zeros_like(scratch, dtype=torch.int8)
        for plane in planes(inside).planes:
            elements(inside, plane)[positions(plane, mapping)] = 1
        if bool((changed & (inside == 0)).any()) or not bool(changed.any()):
            raise ValueError(
                f"vLLM's writer ({like.dtype}, block size {block_size}) puts slot {slot} elsewhere than expected"
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def writes_the_same(
    write: Callable[..., None],
    planes: Callable[[Tensor], LayerCache],
    like: Tensor,
    rows: Rows,
    scales: tuple[Tensor, Tensor],
    kv_cache_dtype: str,
) -> bool:
    """Return whether our writer produces the same bytes as vLLM's, including infinities, NaN and saturation.

    This call also loads our kernel, which must not happen for the first time during the capture of a CUDA graph.
    """
    block_size = planes(like).planes[0].view.shape[1]
    num_tokens = 2 * block_size
    key, value = rows.extreme(num_tokens)
    slots = torch.randperm(_BLOCKS * block_size, generator=torch.Generator().manual_seed(0), device="cpu")[:num_tokens]
    slots[::5] = -1
    slots = slots.to(like.device)
    theirs, ours = _scratch(like), _scratch(like)
    write(key, value, theirs, slots)
    layer = planes(ours)
    try:
        ops.write_kv(key, value, *layer.key_value(), slots, *scales, kv_cache_dtype)
    except (ValueError, TypeError):
        return False  # a dtype or shape that only vLLM's writer supports
    return torch.equal(_bytes(theirs), _bytes(ours))
