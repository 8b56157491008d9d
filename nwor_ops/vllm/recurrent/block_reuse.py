"""Clear the pending rows of blocks that get a new owner, and copy pending rows with a block.

After the scheduler gave a block to a request, vLLM may write a state there without a call to this plugin. For example,
FlashInfer's prefill exports a checkpoint, or a KV connector loads a state. The next step reads that state. It must not
apply rows that the previous owner of the block recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nwor_ops.recurrent.cursors import Cursors
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.step_listener import RecurrentListener


class BlockOwners:
    """Follow the blocks that the scheduler gives to a V2 runner's requests, in groups whose layers have one state.

    Both patches run before vLLM's code, so a new block has nothing pending when vLLM copies, loads or computes a state
    there. They read lists on the host and do not synchronize.
    """

    def __init__(self, runner: Any, groups: Sequence[int], cursors: Cursors) -> None:
        self._runner, self._groups, self._cursors = runner, groups, cursors
        self._loads = runner.vllm_config.kv_transfer_config is not None
        self.listener: RecurrentListener | None = None

    def attach(self, patches: Patches) -> None:
        patches.put_methods(self._runner, self, ("add_requests", "update_requests"))

    def add_requests(self, add: Callable[..., Any], scheduler_output: Any) -> Any:
        """Clear the blocks of new requests. Blocks of a prefix-cache hit have nothing pending in any case."""
        self._clear([block for request in scheduler_output.scheduled_new_reqs for block in self._new_blocks(request)])
        return add(scheduler_output)

    def update_requests(self, update: Callable[..., Any], scheduler_output: Any) -> Any:
        """Clear the new blocks of running requests. Copy the pending rows of each block that vLLM copies."""
        new_blocks = [blocks for blocks in scheduler_output.scheduled_cached_reqs.new_block_ids if blocks is not None]
        self._clear([block for blocks in new_blocks for group in self._groups for block in blocks[group]])
        result = update(scheduler_output)
        if copies := scheduler_output.kv_cache_block_copies:
            sources, targets = self._to_device(copies).unbind(1)
            self._cursors.table[targets] = self._cursors.table[sources]  # their records are copied too
            if self.listener is not None:
                self.listener.copied([(int(source), int(target)) for source, target in copies])
        return result

    def _new_blocks(self, request: Any) -> Iterator[int]:
        """Yield the blocks that the request did not have before.

        If more of a streamed prompt arrives, vLLM adds a known request again, with all its blocks.
        """
        index = self._runner.req_states.req_id_to_index.get(request.req_id)
        counts = self._runner.block_tables.num_blocks.np
        for group in self._groups:
            yield from request.block_ids[group][0 if index is None else int(counts[group, index]) :]

    def _clear(self, blocks: list[int]) -> None:
        if not blocks:
            return
        self._cursors.drop(self._to_device(blocks))
        if self.listener is not None:
            self.listener.assigned(blocks, may_be_loaded=self._loads)

    def _to_device(self, blocks: Sequence[Any]) -> Tensor:
        return to_device(np.array(blocks, dtype=np.int64), self._cursors.table.device)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device without synchronizing."""
    source = torch.from_numpy(values)
    return (source.pin_memory() if device.type == "cuda" else source).to(device, non_blocking=True)
