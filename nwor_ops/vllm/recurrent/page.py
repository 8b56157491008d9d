"""Layout of a page: vLLM's states of a layer, and after them the record of the request's last windows; and the layers
that share a group of pages.

The parts of a record are in the order that keeps 16-byte alignment. A page belongs to a block, so a record moves with
its state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.recurrent.cache import CHUNK, Fold, FoldedLayer, RecurrentCache
from nwor_ops.recurrent.cursors import Cursors
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
        """Return the states, and views of the record in each page, int8 ``[num_slots, page_bytes]``, from an offset."""
        records: dict[str, Tensor] = {}
        for name, (shape, dtype) in self.parts.items():
            size = prod(shape) * dtype.itemsize
            records[f"record_{name}"] = pages[:, offset : offset + size].view(dtype).view(-1, *shape)
            offset += size
        return RecurrentCache(state, **records, chunk=self.chunk)


class GroupLayers:
    """The layers of one KV-cache group, whose caches are bound.

    All groups share the cursors, because a block belongs to one group at a time.
    """

    def __init__(self, cursors: Cursors, layers: Sequence[Any]) -> None:
        self.cursors = cursors
        self.layers = {layer.prefix: layer for layer in layers}
        self._neutral: Tensor | None = None  # layers of a group have records of one geometry
        self._fold = Fold(FoldedLayer(layer.recurrent_cache, layer.layer_window) for layer in layers)

    def begin_chunk(self, slots: Tensor, positions: Tensor) -> None:
        """Let blocks with nothing pending begin in the middle of a chunk, as if its earlier rows were pending.

        A chunk ends at a multiple of its length, but a prompt ends anywhere. The records get rows that change nothing.

        Args:
            slots: int64 ``[E]``; 0 = skip this entry.
            positions: integers ``[E]``: number of tokens in each state.
        """
        for layer in self.layers.values():  # one launch per layer
            geometry = layer.geometry
            if self._neutral is None:
                self._neutral = geometry.neutral_record(slots.device)
            record = self._neutral.expand(slots.shape[0], -1)
            geometry.whole_records(layer.recurrent_cache).index_copy_(0, slots, record)
        cursors = self.cursors.table
        rows = torch.zeros(slots.shape[0], 3, dtype=torch.int32, device=slots.device)
        rows[:, 1] = cursors[slots, 1]
        rows[:, 2] = positions % self.cursors.chunk * (slots > 0)
        cursors[slots] = rows

    def fold(self, plan: Tensor, sources: Tensor, targets: Tensor, rows: Tensor, keep_source: bool = False) -> None:
        """Fold the pending rows of blocks in all layers. Arguments: :func:`nwor_ops.plan_recurrent_fold`."""
        ops.plan_recurrent_fold(plan, self.cursors.table, sources, targets, rows, keep_source)
        self.fold_planned(plan[: sources.shape[0]])

    def fold_planned(self, plan: Tensor) -> None:
        """Fold all layers by a plan, int32 ``[E, 4]``."""
        self._fold.apply(plan)
