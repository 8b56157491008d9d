"""Layout of a page: vLLM's states of a layer, and after them the record of the request's last windows.

The parts of a record are in the order that keeps 16-byte alignment. A page belongs to a block, so a record moves with
its state.
"""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import torch
from torch import Tensor

from nwor_ops.recurrent.cache import CHUNK, RecurrentCache
from nwor_ops.vllm.environment import settings_of
from nwor_ops.vllm.recurrent.models import model_of


@dataclasses.dataclass(frozen=True)
class RecordGeometry:
    """Sizes of one layer's record on one rank.

    Attributes:
        rows: tokens of the longest window, K + 1.
        key_heads, value_heads: number of heads of the layer on this rank.
        key_width, value_width: elements per head.
        key_dtype: dtype of the keys.
        per_channel: whether each channel of a key has a decay (KDA). If False, each head has one.
        chunk: rows that a store folds in the chunk form, or 0 for the exact form.
    """

    rows: int
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    key_dtype: torch.dtype
    per_channel: bool = False
    chunk: int = 0

    @classmethod
    def of(cls, vllm_config: Any) -> RecordGeometry:
        """Return the geometry of an engine's recurrent layers, from its configuration."""
        config = settings_of(vllm_config)
        heads = model_of(vllm_config).heads(vllm_config.model_config.hf_text_config)
        rows, ranks = vllm_config.num_speculative_tokens + 1, vllm_config.parallel_config.tensor_parallel_size
        return cls(
            rows,
            heads.key_heads // ranks,
            heads.value_heads // ranks,
            heads.key_width,
            heads.value_width,
            vllm_config.model_config.dtype,
            heads.per_channel,
            CHUNK if config.chunk else 0,
        )

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part of a record, in the order of the page."""
        # In the chunk form: rows of a chunk that is not complete, those of the window before, and those of this one.
        halves, rows = (1, self.chunk - 1 + 2 * self.rows) if self.chunk else (2, self.rows)
        keys, values = self.key_heads, self.value_heads
        channels = (self.key_width,) if self.per_channel else ()
        return {
            "updates": ((rows, values, self.value_width), torch.float32),
            "keys": ((halves, rows, keys, self.key_width), self.key_dtype),
            "decays": ((halves, rows, values, *channels), torch.float32),
            "norms": ((halves, rows, keys), torch.float32),
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of one record."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts.values())

    def whole_records(self, cache: RecurrentCache) -> Tensor:
        """Return the records of a cache in pages as int32 ``[num_slots, num_bytes / 4]``, a view."""
        first = cache.record_updates.view(torch.int32)
        return first.as_strided((first.shape[0], self.num_bytes // 4), (first.stride(0), 1))

    def neutral_record(self, device: torch.device) -> Tensor:
        """Return a record whose rows change nothing, int32 ``[num_bytes / 4]``: each decay is 1, all else is 0."""
        filled = [
            torch.full((prod(shape),), name == "decays", dtype=dtype, device=device).view(torch.int32)
            for name, (shape, dtype) in self.parts.items()
        ]
        return torch.cat(filled)

    def extend(self, spec: Any) -> Any:
        """Return a layer's ``MambaSpec`` with records in its pages and one state per request."""
        shapes, dtypes = zip(*self.parts.values(), strict=True)
        return dataclasses.replace(
            spec, shapes=(*spec.shapes, *shapes), dtypes=(*spec.dtypes, *dtypes), num_speculative_blocks=0
        )

    def bind(self, state: Tensor, pages: Tensor, offset: int) -> RecurrentCache:
        """Return the states, and views of the record in each page.

        Args:
            state: ``[num_slots, value_heads, value_width, key_width]``: the states in the pages.
            pages: int8 ``[num_slots, page_bytes]``.
            offset: offset of the record in a page, which is the size of the states, in bytes.
        """
        found: dict[str, Tensor] = {}
        for name, (shape, dtype) in self.parts.items():
            size = prod(shape) * dtype.itemsize
            found[f"record_{name}"] = pages[:, offset : offset + size].view(dtype).view(-1, *shape)
            offset += size
        keys, norms, decays, updates = (found[f"record_{name}"] for name in ("keys", "norms", "decays", "updates"))
        return RecurrentCache(state, keys, norms, decays, updates, self.chunk)
