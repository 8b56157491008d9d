"""Clears the pending rows of blocks that get a new owner, and copies them with a block.

The scheduler gives a block to a request. After that vLLM may write a state there without telling anyone: FlashInfer's
prefill exports a checkpoint, a KV connector loads a state. The next step reads that state, and must not apply rows that
the former owner of the block recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nwor_ops.vllm.recurrent.audit import StateAudit


class BlockOwners:
    """Follows the blocks that a runner is given.

    Call :meth:`attach` once. Both wrappers run before vLLM's code, so a new block has nothing pending when vLLM copies
    to it, loads to it or computes in it. They read lists on the host and do not wait for the device.

    Args:
        runner: vLLM's V2 runner.
        groups: numbers of the KV-cache groups whose layers have one state.
        cursors: int32 ``[num_blocks, 2]``, of all groups.

    Attributes:
        audit: the audit of this engine, or None.
    """

    def __init__(self, runner: Any, groups: Sequence[int], cursors: Tensor) -> None:
        self._runner, self._groups, self._cursors = runner, groups, cursors
        self._loads = runner.vllm_config.kv_transfer_config is not None
        self.audit: StateAudit | None = None

    def attach(self) -> None:
        """Wrap the methods of this runner. A runner that binds another cache can be attached again."""
        for name in ("add_requests", "update_requests"):
            original: Callable[..., Any] = getattr(type(self._runner), name).__get__(self._runner)
            setattr(self._runner, name, _before(original, getattr(self, name)))

    def add_requests(self, add: Callable[..., Any], scheduler_output: Any) -> Any:
        """Clear the blocks of new requests. Blocks that a prefix-cache hit shares have nothing pending already."""
        self._clear([block for request in scheduler_output.scheduled_new_reqs for block in self._new_blocks(request)])
        return add(scheduler_output)

    def update_requests(self, update: Callable[..., Any], scheduler_output: Any) -> Any:
        """Clear the new blocks of running requests. Copy the pending rows of each block that vLLM copies."""
        given = [blocks for blocks in scheduler_output.scheduled_cached_reqs.new_block_ids if blocks is not None]
        self._clear([block for blocks in given for group in self._groups for block in blocks[group]])
        result = update(scheduler_output)
        if copies := scheduler_output.kv_cache_block_copies:
            source, target = to_device(np.array(copies, dtype=np.int64), self._cursors.device).unbind(1)
            self._cursors[target] = self._cursors[source]
            if self.audit is not None:
                self.audit.copied([(int(source), int(target)) for source, target in copies])
        return result

    def _new_blocks(self, request: Any) -> Iterator[int]:
        """Yield the blocks that the request did not have before.

        vLLM also adds a request again that it knows, with all its blocks, if more of a streamed prompt arrives.
        """
        index = self._runner.req_states.req_id_to_index.get(request.req_id)
        counts = self._runner.block_tables.num_blocks.np
        for group in self._groups:
            yield from request.block_ids[group][0 if index is None else int(counts[group, index]) :]

    def _clear(self, blocks: list[int]) -> None:
        if not blocks:
            return
        self._cursors[:, 0].index_fill_(0, to_device(np.array(blocks, dtype=np.int64), self._cursors.device), 0)
        if self.audit is not None:
            self.audit.assigned(blocks, may_be_loaded=self._loads)


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device without waiting for it."""
    source = torch.from_numpy(values)
    return (source.pin_memory() if device.type == "cuda" else source).to(device, non_blocking=True)


def _before(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def run(scheduler_output: Any) -> Any:
        return ours(original, scheduler_output)

    return run
