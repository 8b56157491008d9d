"""A small drafter over a paged KV cache, and its metadata adapter, which is the back end's part of a draft loop.

A back end implements :class:`PagedMetadataAdapter` for :class:`nwor_ops.drafter.DraftLoop`. Its metadata has all three
kinds of field that matter:

- ``positions`` and ``seq_lens`` are aliases of loop buffers, so they are always up to date.
- ``slot_mapping`` and ``window_slots`` depend on positions, so they change in each step. They are computed again in
  place from absolute positions, padded rows included.
- ``states`` are constant within a batch, but change from batch to batch. A graph of the whole loop replays without host
  code in between, so they are computed on the device too.

Every other layer of the model sees only the last ``window`` tokens, through ``window_slots``. Stale indices there give
wrong tokens, not just slower ones. The weights are random, with a fixed seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from paged_llama import MLP, LlamaConfig, RMSNorm, rotary_embedding
from torch import Tensor, nn

from nwor_ops import ops
from nwor_ops.drafter import DraftBuffers, DraftMetadata, GraphKey


@dataclass(frozen=True)
class DrafterConfig(LlamaConfig):
    vocab_size: int = 256
    num_layers: int = 2
    num_kv_heads: int = 4
    block_size: int = 4
    window: int = 6  # number of tokens that an odd layer sees, including the query's


@dataclass
class PagedMetadata:
    """Metadata of T tokens for attention. All fields are views of memory that never moves."""

    positions: Tensor  # int64 [T]
    seq_lens: Tensor  # int32 [N]: length of each request; each has T / N tokens
    states: Tensor  # int64 [T]: row of the block tables; 0 for a padded token
    slot_mapping: Tensor  # int64 [T]: slot of the token's key, -1 = none
    window_slots: Tensor  # int64 [T, window]: slots that the token sees in a window layer, -1 = before the sequence


class PagedMetadataAdapter(DraftMetadata):
    """Metadata of plain paged attention, computed on the device.

    Args:
        buffers: the buffers of the loop.
        block_tables: int32 ``[S, columns]``, by request-state index.
        max_num_tokens: number of tokens of the largest pass.
        unwritten: bool ``[max_num_tokens]``: tokens of a first pass that get no slot.
    """

    def __init__(
        self,
        config: DrafterConfig,
        buffers: DraftBuffers,
        block_tables: Tensor,
        max_num_tokens: int,
        unwritten: Tensor,
    ) -> None:
        self.config, self.buffers, self.block_tables, self.unwritten = config, buffers, block_tables, unwritten
        device = buffers.device
        self.states = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.slots = torch.full((1, max_num_tokens), -1, dtype=torch.int64, device=device)
        self.window_slots = torch.full((max_num_tokens, config.window), -1, dtype=torch.int64, device=device)
        self.back = torch.arange(config.window, device=device) - (config.window - 1)
        buffers.register(block_tables=block_tables, unwritten=unwritten)

    def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> PagedMetadata:
        # Nothing here needs the host, so a build creates views of the persistent memory and then updates them.
        tokens = key.num_tokens
        metadata = PagedMetadata(
            self.buffers.positions[:tokens],
            self.buffers.seq_lens[: key.num_reqs],
            self.states[:tokens],
            self.slots[0, :tokens],
            self.window_slots[:tokens],
        )
        self.update(key, metadata)
        return metadata

    def update(self, key: GraphKey, metadata: PagedMetadata) -> None:
        buffers, rows, block_size = self.buffers, key.num_reqs, self.config.block_size
        idx_mapping = buffers.idx_mapping[:rows]
        ops.compute_slot_mappings(
            idx_mapping, buffers.query_start_loc, buffers.positions, [self.block_tables], [block_size], self.slots
        )
        if key.query_len > 1:  # rejected tokens write no key
            metadata.slot_mapping.masked_fill_(self.unwritten[: key.num_tokens], -1)
        indices = idx_mapping[:, None].expand(rows, key.query_len).reshape(-1)
        metadata.states.copy_(indices.clamp(min=0))
        seen = metadata.positions[:, None] + self.back
        blocks = self.block_tables[metadata.states[:, None], seen.clamp(min=0) // block_size]
        slots = blocks * block_size + seen % block_size
        metadata.window_slots.copy_(slots.masked_fill((seen < 0) | (indices < 0)[:, None], -1))


class PagedAttention(nn.Module):
    def __init__(self, config: DrafterConfig, cache: Tensor, block_tables: Tensor, windowed: bool) -> None:
        super().__init__()
        self.config, self.cache, self.block_tables, self.windowed = config, cache, block_tables, windowed
        self.qkv = nn.Linear(config.hidden_size, 3 * config.num_heads * config.head_size, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_size, config.hidden_size, bias=False)
        self.scale = torch.ones(1, device=cache.device)

    def forward(self, x: Tensor, metadata: PagedMetadata) -> Tensor:
        c, size = self.config, self.config.head_size
        query, key, value = self.qkv(x).view(len(x), 3 * c.num_heads, size).split(c.num_heads, dim=1)
        query = rotary_embedding(query, metadata.positions, c.rope_theta)
        key = rotary_embedding(key, metadata.positions, c.rope_theta)
        ops.write_kv(
            key.to(self.cache.dtype), value.to(self.cache.dtype), self.cache[..., :size], self.cache[..., size:],
            metadata.slot_mapping, self.scale, self.scale, "auto",
        )  # fmt: skip
        slots, visible = self.window(metadata) if self.windowed else self.whole_sequence(metadata)
        rows = self.cache.flatten(0, 1)[slots].to(x.dtype).transpose(1, 2)  # [T, H, S, 2D]
        mask = visible[:, None, None]
        attended = F.scaled_dot_product_attention(query[:, :, None], rows[..., :size], rows[..., size:], attn_mask=mask)
        return self.out(attended.flatten(1))

    def window(self, metadata: PagedMetadata) -> tuple[Tensor, Tensor]:
        slots = metadata.window_slots
        visible = slots >= 0
        visible[:, -1] = True  # a padded token sees one slot, which avoids NaN
        return slots.clamp(min=0), visible

    def whole_sequence(self, metadata: PagedMetadata) -> tuple[Tensor, Tensor]:
        blocks = self.block_tables[metadata.states].long()[:, :, None] * self.config.block_size
        inside = torch.arange(self.config.block_size, device=blocks.device)
        slots = (blocks + inside).flatten(1)
        places = torch.arange(slots.shape[1], device=slots.device)
        rows = len(metadata.seq_lens)
        filled = (places < metadata.seq_lens[:, None])[:, None].expand(-1, len(slots) // rows, -1).reshape(slots.shape)
        return slots, filled & (places <= metadata.positions[:, None])


class PagedDrafter(nn.Module):
    """A drafter model.

    Args:
        caches: one per layer, ``[num_blocks, block_size, num_heads, 2 * head_size]``.
        block_tables: int32 ``[S, columns]``.
    """

    def __init__(self, config: DrafterConfig, caches: list[Tensor], block_tables: Tensor) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.attention = nn.ModuleList(
            PagedAttention(config, cache, block_tables, windowed=layer % 2 == 1) for layer, cache in enumerate(caches)
        )
        self.mlp = nn.ModuleList(MLP(config) for _ in caches)
        self.norms = nn.ModuleList(RMSNorm(config.hidden_size) for _ in range(2 * len(caches) + 1))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, metadata: PagedMetadata) -> Tensor:
        """Return hidden states ``[T, hidden_size]``."""
        x = self.embedding(input_ids)
        for layer, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * layer](x), metadata)
            x = x + mlp(self.norms[2 * layer + 1](x))
        return self.norms[-1](x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).float()
