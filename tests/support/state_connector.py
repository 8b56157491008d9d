"""KV connectors of the tests for recurrent states.

:class:`StateConnector` stores nothing. It notes the bytes that a store would copy: the state in each block that gets a
cache key. The other one, :class:`PagesConnector`, hands the end of a prompt from a prefill engine to a decode engine.
It uses files, and NIXL's protocol. The prefill engine stops one token before the prompt's end. Its last block is read
after the end of the request, on a separate stream. As in NIXL, the convolution and the state of a recurrent layer are
copied.

Both work in engines with this library and without.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.utils import clip_ssm_state_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.v1.kv_cache_interface import MambaSpec

# By request, tokens and layer: digests of the convolution's last inputs and of the state, and the rows that are pending
# there (0 in engines without this library).
states: dict[str, tuple[str, str, int]] = {}
# Pages that were handed over, in this process.
handed_over = {"exported": 0, "loaded": 0, "pending": 0}


def pending_in(block: int, layers: list[Any]) -> int:
    """Return the number of pending rows that change a state. In the chunk form, a record may begin with others.

    Args:
        block: a block of recurrent states.
        layers: layers of the block's group.
    """
    plugin, found = sys.modules.get("nwor_ops.vllm"), 0
    for engine in plugin.recurrent_engines() if plugin else []:
        cursors = engine.builders[0].group.cursors
        rows, first, *earlier = cursors.table[block].tolist()
        rows += sum(earlier)
        if not cursors.chunk:
            found += rows
            continue
        for layer in layers:
            updates = layer.recurrent_cache.record_updates[block]
            places = [(first + row) % updates.shape[0] for row in range(rows)]
            found += int((updates[places] != 0).flatten(1).any(1).sum())
    return found


def _digest(tensor: Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


class _Connector(KVConnectorBase_V1, SupportsHMA):
    """The base of both connectors: the layers of each KV-cache group, and methods that do nothing."""

    reads_kv_cache_in_order = True
    reads_complete_states = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.groups = kv_cache_config.kv_cache_groups
        self.context = vllm_config.compilation_config.static_forward_context
        self.conv_rows = 3  # the convolutions of the tiny models have a width of 4

    def convolution_of(self, layer: str, block: int) -> Tensor:
        """The inputs before the next token."""
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        rows = self.context[layer].kv_cache[0][block]
        return rows[:, : self.conv_rows] if is_conv_state_dim_first() else rows[: self.conv_rows]

    def state_of(self, layer: str, block: int) -> Tensor:
        return self.context[layer].kv_cache[1][block]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None


@dataclass
class Offered(KVConnectorMetadata):
    """The blocks that get a key in a step: request, group, block, tokens."""

    blocks: list[tuple[str, int, int, int]] = field(default_factory=list)


class StateConnector(_Connector):
    """See the module."""

    def build_connector_meta(self, scheduler_output: Any) -> Offered:
        found = scheduler_output.kv_connector_block_state
        offered = found.boundary_state_offloads if found is not None else {}
        return Offered([(name, *entry) for name, entries in offered.items() for entry in entries])

    def wait_for_save(self) -> None:
        """A store copies the blocks on this stream, or after an event that it records here."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Offered)
        for name, group, block, tokens in metadata.blocks:
            request = "-".join(name.split("-")[:2])  # vLLM adds something
            for layer in self.groups[group].layer_names:
                digests = _digest(self.convolution_of(layer, block)), _digest(self.state_of(layer, block))
                states[f"{request}:{tokens}:{layer}"] = (*digests, pending_in(block, [self.context[layer]]))


# ---------------------------------------------------------------- prefill and decode


@dataclass
class Handed(KVConnectorMetadata):
    """The requests to read after their end, and the requests to load: file and blocks by group for each."""

    exports: dict[str, tuple[str, list[list[int]]]] = field(default_factory=dict)
    loads: dict[str, tuple[str, list[list[int]], list[int]]] = field(default_factory=dict)  # with the first block


class PagesConnector(_Connector):
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.meta = Handed()
        self.finish: Callable[[], None] = lambda: None
        self.in_no_order: Callable[[], Any] = contextlib.nullcontext
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.folder = vllm_config.kv_transfer_config.kv_connector_extra_config["folder"]

    # ------------------------------------------------------------ in the scheduler

    def on_new_request(self, request: Any) -> None:
        """The prefill engine computes all but the last token of a prompt."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode") and not params.get("truncated"):
            request.prompt_token_ids.pop()
            request._all_token_ids.pop()
            request.num_prompt_tokens -= 1
            request.max_tokens = 1
            params["truncated"] = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        tokens = len(request.prompt_token_ids) - 1 - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill") or num_external_tokens == 0:
            return
        params["do_remote_prefill"] = False
        have = len(request.prompt_token_ids) - 1 - num_external_tokens
        first = [0 if isinstance(group.kv_cache_spec, MambaSpec) else have // group.kv_cache_spec.block_size
                 for group in self.groups]  # fmt: skip
        self.meta.loads[request.request_id] = params["path"], self._clipped(blocks.get_block_ids()), first

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode"):
            return False, None
        handle, path = tempfile.mkstemp(dir=self.folder)
        os.close(handle)
        self.meta.exports[request.request_id] = path, self._clipped(block_ids)
        return True, {"do_remote_prefill": True, "path": path, "tokens": request.num_computed_tokens}

    def _clipped(self, block_ids: Any) -> list[list[int]]:
        """The block with the state, for a recurrent group."""
        return [
            clip_ssm_state_blocks(list(blocks), group.kv_cache_spec.num_speculative_blocks)
            if isinstance(group.kv_cache_spec, MambaSpec)
            else list(blocks)
            for blocks, group in zip(block_ids, self.groups, strict=True)
        ]

    def build_connector_meta(self, scheduler_output: Any) -> Handed:
        meta, self.meta = self.meta, Handed()
        return meta

    # ------------------------------------------------------------ in the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.caches = kv_caches
        if torch.cuda.is_available():
            self.stream = torch.cuda.Stream()
            self.finish, self.in_no_order = torch.cuda.synchronize, functools.partial(torch.cuda.stream, self.stream)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Handed)
        with self.in_no_order():  # with the steps, whose outputs have arrived
            for name, (path, blocks) in metadata.exports.items():
                pages = {layer: [page.clone().cpu() for page in self._pages(layer, number, blocks[number])]
                         for number, group in enumerate(self.groups) for layer in group.layer_names}  # fmt: skip
                torch.save(pages, path)
                handed_over["pending"] += sum(
                    pending_in(block, [self.context[layer] for layer in group.layer_names])
                    for group, of_group in zip(self.groups, blocks, strict=True) for block in of_group
                    if isinstance(group.kv_cache_spec, MambaSpec)
                )  # fmt: skip
                handed_over["exported"] += 1
                self.sent.add(name)
        for name, (path, blocks, first) in metadata.loads.items():
            pages = torch.load(path)
            for number, group in enumerate(self.groups):
                for layer in group.layer_names:
                    self._load(layer, number, blocks[number], pages[layer], first[number])
            handed_over["loaded"] += 1
            self.received.add(name)

    def _pages(self, layer: str, number: int, blocks: list[int]) -> list[Tensor]:
        if isinstance(self.groups[number].kv_cache_spec, MambaSpec):
            return [part[block] for block in blocks for part in self.context[layer].kv_cache[:2]]
        return [self.caches[layer][block] for block in blocks]

    def _load(self, layer: str, number: int, blocks: list[int], pages: list[Tensor], first: int) -> None:
        mine = self._pages(layer, number, blocks)
        for target, page in list(zip(mine, pages, strict=False))[first:]:
            target.copy_(page)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self.finish()
        sent, received, self.sent, self.received = self.sent, self.received, set(), set()
        return sent or None, received or None
