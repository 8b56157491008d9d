"""Shadow pages of mode ``"stage"``: blocks of the KV cache that are withheld from vLLM's scheduler.

They are the last blocks of the cache. vLLM's block pool is created without them, so the scheduler sees a smaller cache
and allocation does not change. The engine core and each worker compute the same numbers from the same configuration.
The runner checks every block id that it receives (:meth:`ShadowBlocks.check`). vLLM's warm-up of the V2 runner
allocates blocks without a scheduler, so it is given the smaller cache too.

Block numbers are shared by all KV-cache groups, and groups may share memory. Each group of attention layers therefore
has its own shadow pages. Groups of recurrent states need none. Their blocks come from the same pool, so they never
receive a shadow page either.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nwor_ops.transaction.shadow_pages import num_shadow_blocks
from nwor_ops.vllm.environment import settings_of
from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.support.refusals import ALL_RECURRENT, SMALL_CACHE, Unsupported
from nwor_ops.vllm.transaction.supported import check_transaction, is_recurrent

HOOKS = (
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.__init__",
        "vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, "
        "mm_registry, include_finished_set, log_stats",
    ),
    Hook("vllm.v1.core.kv_cache_utils", "get_max_concurrency_for_kv_cache_config", "vllm_config, kv_cache_config"),
)


@dataclass(frozen=True)
class ShadowBlocks:
    """The blocks of a cache that are shadow pages.

    Attributes:
        num_blocks: number of blocks in the whole cache, shadow pages included.
        groups: numbers of the KV-cache groups that have shadow pages: all groups of attention layers. The drafter's
            groups are included, because the engine core does not know which they are.
        per_group: number of shadow pages of each group.
        block_bytes: bytes of one block, summed over all layers.
    """

    num_blocks: int
    groups: tuple[int, ...]
    per_group: int
    block_bytes: int

    @property
    def first(self) -> int:
        """The number of the first shadow page. All later blocks are shadow pages too."""
        return self.num_blocks - len(self.groups) * self.per_group

    @property
    def num_bytes(self) -> int:
        """Bytes of all shadow pages."""
        return (self.num_blocks - self.first) * self.block_bytes

    def of_group(self, group: int) -> range:
        """Return the shadow pages of a KV-cache group, as block numbers."""
        start = self.first + self.groups.index(group) * self.per_group
        return range(start, start + self.per_group)

    def describe(self) -> str:
        """Return how many blocks are withheld, for the log line at start-up."""
        withheld = self.num_blocks - self.first
        return (
            f"{withheld} of {self.num_blocks} blocks ({withheld / self.num_blocks:.1%} of the cache, "
            f"{self.num_bytes / 2**20:.1f} MiB) are shadow pages, withheld from the scheduler"
        )

    def check(self, scheduler_output: Any) -> None:
        """Check the block ids that the scheduler gave to requests."""
        cached = scheduler_output.scheduled_cached_reqs
        for by_group in (*(new.block_ids for new in scheduler_output.scheduled_new_reqs), *cached.new_block_ids):
            for block_ids in by_group or ():
                if block_ids and max(block_ids) >= self.first:
                    raise RuntimeError(
                        f"nwor: the scheduler gave block {max(block_ids)} to a request, but blocks {self.first} and "
                        "above are shadow pages of mode stage. Is nwor_ops loaded in the engine core's process?"
                    )


def shadow_blocks(vllm_config: Any, kv_cache_config: Any) -> ShadowBlocks:
    """Compute the shadow pages of a cache in mode ``"stage"``."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    groups = tuple(number for number, spec in enumerate(specs) if not is_recurrent(spec))
    if not groups:
        raise ALL_RECURRENT.because()
    block_size = min(specs[number].block_size for number in groups)
    requests = vllm_config.scheduler_config.max_num_seqs
    drafts = vllm_config.speculative_config.num_speculative_tokens
    num_blocks = kv_cache_config.num_blocks
    # All tensors lie in one allocation, and each of them has the size of the whole allocation.
    block_bytes = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0) // num_blocks
    shadow = ShadowBlocks(num_blocks, groups, num_shadow_blocks(requests, drafts, block_size), block_bytes)
    # vLLM reserves one block of the pool as its null block.
    per_request = round(num_blocks / get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config))
    if shadow.first - 1 < per_request:
        raise SMALL_CACHE.because(
            withheld=num_blocks - shadow.first,
            groups=len(groups),
            requests=requests,
            drafts=drafts,
            block_size=block_size,
            num_blocks=num_blocks,
            left=max(shadow.first - 1, 0),
            max_model_len=vllm_config.model_config.max_model_len,
            needed=per_request,
        )
    return shadow


def withholding(original: Callable[..., None]) -> Callable[..., None]:
    """Return a patch of the scheduler's ``__init__``: in mode ``"stage"`` it gets a cache without the shadow pages."""

    def __init__(self: Any, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, _without_shadow_blocks(vllm_config, kv_cache_config), *args, **kwargs)

    return __init__


def _without_shadow_blocks(vllm_config: Any, kv_cache_config: Any) -> Any:
    from vllm.platforms import current_platform

    config = settings_of(vllm_config)
    if config.mode != "stage" or vllm_config.speculative_config is None:
        return kv_cache_config
    try:
        check_transaction(vllm_config, current_platform.device_type, config.mode)
        shadow = shadow_blocks(vllm_config, kv_cache_config)
    except Unsupported:  # the workers report it, and stop the engine in strict mode
        return kv_cache_config
    return smaller(kv_cache_config, shadow)


def smaller(kv_cache_config: Any, shadow: ShadowBlocks) -> Any:
    """Return the configuration of the cache without its shadow pages.

    A tensor's size is the size of the whole allocation, and connectors divide it by the number of blocks. The size is
    reduced in the same proportion.
    """
    config = copy.copy(kv_cache_config)
    config.num_blocks = shadow.first
    config.kv_cache_tensors = [
        replace(tensor, size=tensor.size // shadow.num_blocks * shadow.first)
        for tensor in kv_cache_config.kv_cache_tensors
    ]
    return config
