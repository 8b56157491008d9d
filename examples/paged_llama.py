"""A small Llama with a paged KV cache in plain PyTorch: the engine's part if nwor_ops is used without vLLM.

Three parts matter to nwor_ops; everything else is an ordinary model.

- :func:`make_caches`: one paged cache per layer, as a view ``[num_blocks, block_size, num_kv_heads, 2 * D]`` of any
  order in memory.
- :class:`Attention`: its KV-write site is one call, ``manager.write``. The same kernel writes a batch's keys and
  values, and saves the old contents of the slots of *draft* tokens.
- Attention then reads all rows from the pages, drafts included. A draft that did not see earlier drafts would nearly
  always be rejected.

The weights are random, with a fixed seed. Nothing is downloaded, and the output has no meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nwor_ops import DraftCommitManager


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int = 64
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 16
    rope_theta: float = 10000.0
    # Spread of the random weights. With a larger value, the next token depends more on distant context. The text then
    # repeats less, and drafts are worse.
    init_scale: float = 1.0


@dataclass
class Batch:
    """The device tensors of one forward pass over a flat batch of T tokens of several requests.

    T is padded to one of a few sizes, because compiled code and CUDA graphs need few shapes. A padded token has slot
    -1, so it writes nothing.
    """

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]: position of each token in its request
    slot_mapping: Tensor  # int64 [T]: block * block_size + offset in the page, -1 = none
    block_tables: Tensor  # int32 [Q, max_blocks]: the pages of each request
    requests: Tensor  # int64 [T]: the request of each token


def make_caches(
    config: LlamaConfig,
    num_blocks: int,
    block_size: int,
    device: torch.device | str,
    layout: str = "NHD",
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Create one cache per layer, each as the view ``[num_blocks, block_size, num_kv_heads, 2 * head_size]``.

    nwor_ops reads the layout from the strides of the view; there is no layout flag.
    """
    width = 2 * config.head_size  # key and value of a token and head are adjacent
    caches = []
    for _ in range(config.num_layers):
        if layout == "NHD":
            cache = torch.zeros(num_blocks, block_size, config.num_kv_heads, width, dtype=dtype, device=device)
        else:  # HND: the slots of one head are contiguous
            cache = torch.zeros(num_blocks, config.num_kv_heads, block_size, width, dtype=dtype, device=device)
            cache = cache.transpose(1, 2)
        caches.append(cache)
    return caches


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def rotary_embedding(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate the two halves of each head's vector; ``x`` is ``[T, H, D]``."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, layer_name: str, cache: Tensor, manager: DraftCommitManager) -> None:
        super().__init__()
        self.config, self.layer_name, self.cache, self.manager = config, layer_name, cache, manager
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(config.hidden_size, heads * config.head_size, bias=False)
        self.out = nn.Linear(config.num_heads * config.head_size, config.hidden_size, bias=False)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of each token, ``[T, H, D]``."""
        c = self.config
        sizes = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
        query, key, value = self.qkv(x).view(len(x), sum(sizes), c.head_size).split(sizes, dim=1)
        query = rotary_embedding(query, positions, c.rope_theta)
        return query, rotary_embedding(key, positions, c.rope_theta), value

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Attend from each token to the rows ``[T, H, S, D]`` that ``visible``, bool ``[T, S]``, selects."""
        attended = F.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=visible[:, None, None], enable_gqa=True
        )
        return self.out(attended.flatten(1))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        c = self.config
        query, key, value = self.project(x, batch.positions)

        # The KV-write site. One kernel saves the old contents of the drafts' slots and writes every token. The same
        # call works in eager code, torch.compile and CUDA graph capture: begin() marks the drafts in the manager's
        # device buffers, so no argument names them.
        self.manager.write(self.layer_name, key, value, batch.slot_mapping)

        # [T, max_blocks, N, H, 2D] -> key and value [T, H, S, D]. A real engine calls a paged attention kernel here.
        # Gathering the pages is slow but easy to read.
        pages = self.cache[batch.block_tables[batch.requests]].flatten(1, 2).transpose(1, 2)
        keys, values = pages[..., : c.head_size], pages[..., c.head_size :]
        return self.attend(
            query, keys, values, torch.arange(keys.shape[2], device=x.device) <= batch.positions[:, None]
        )


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(
        self,
        config: LlamaConfig,
        layer_name: str,
        cache: Tensor,
        manager: Any,
        attention: type[Attention],
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
        self.attention = attention(config, layer_name, cache, manager)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


class PagedLlama(nn.Module):
    """A small Llama.

    Args:
        layer_names: the names under which the layers' caches are registered with the manager.
        caches: one per layer, from :func:`make_caches`.
        manager: the object that the attention layers write with, a ``DraftCommitManager``.
        attention: the class of the attention layers. ``token_tree.py`` has another one, whose ``manager`` is a staging
            buffer.
    """

    def __init__(
        self,
        config: LlamaConfig,
        layer_names: list[str],
        caches: list[Tensor],
        manager: Any,
        attention: type[Attention] = Attention,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(
            Block(config, name, cache, manager, attention) for name, cache in zip(layer_names, caches, strict=True)
        )
        self.norm = RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return logits ``[T, vocab_size]``."""
        x = self.embedding(batch.token_ids)
        for block in self.blocks:
            x = block(x, batch)
        return self.head(self.norm(x))


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, scale: float) -> None:
    """Set the same weights on every device."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            spread = scale / parameter.shape[1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
