"""The blocks that mode ``"stage"`` keeps from vLLM's scheduler: shadow pages for the drafts of every running request.

They are the last blocks of the cache. vLLM's block pool is made without them, so nothing about allocation changes: to
the scheduler the cache is that much smaller. The engine core and each worker work out the same numbers from the same
configuration, and the runner looks at every block id that it is given (:meth:`SpareBlocks.check`). vLLM's warm-up of
the V2 runner asks no scheduler: it hands out blocks itself, so it is shown the smaller cache too.

Blocks are numbered for all KV-cache groups together, and groups may lie in one another's memory, so each group of
attention layers has spare blocks of its own. Groups of recurrent states need none, and are given none of these either:
their blocks come from the same pool.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.transaction.shadow_pages import num_shadow_blocks
from nwor_ops.vllm.support import (
    ALL_RECURRENT,
    SCHEDULER,
    SMALL_CACHE,
    Hook,
    Unsupported,
    check_transaction,
    is_recurrent,
    wrap_once,
)

HOOKS = (
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.__init__",
        "vllm_config, kv_cache_config, structured_output_manager, block_size, hash_block_size, "
        "mm_registry, include_finished_set, log_stats",
    ),
    Hook("vllm.v1.core.kv_cache_utils", "get_max_concurrency_for_kv_cache_config", "vllm_config, kv_cache_config"),
)
_WARM_UPS = ("warmup_kernels", "run_mixed_prefill_decode_warmup")
_WRAPPED = "_nwor_spares_blocks"


@dataclass(frozen=True)
class SpareBlocks:
    """Which blocks belong to no request.

    Attributes:
        num_blocks: blocks of the whole cache, these included.
        groups: numbers of the KV-cache groups that have some: those of attention layers, the drafter's own included, as
            the engine core does not know which they are.
        per_group: spare blocks of each group.
        block_bytes: bytes of one block in all layers.
    """

    num_blocks: int
    groups: tuple[int, ...]
    per_group: int
    block_bytes: int

    @property
    def first(self) -> int:
        """The first one. All behind it are spare too."""
        return self.num_blocks - len(self.groups) * self.per_group

    def of_group(self, group: int) -> range:
        start = self.first + self.groups.index(group) * self.per_group
        return range(start, start + self.per_group)

    def describe(self) -> str:
        spare = self.num_blocks - self.first
        return (
            f"{spare} of {self.num_blocks} blocks ({spare / self.num_blocks:.1%} of the cache, "
            f"{spare * self.block_bytes / 2**20:.1f} MiB) are shadow pages, withheld from the scheduler"
        )

    def check(self, scheduler_output: Any) -> None:
        """Raises RuntimeError where the scheduler hands out a spare block: it must not know of them."""
        cached = scheduler_output.scheduled_cached_reqs
        for by_group in (*(new.block_ids for new in scheduler_output.scheduled_new_reqs), *cached.new_block_ids):
            for block_ids in by_group or ():
                if block_ids and max(block_ids) >= self.first:
                    raise RuntimeError(
                        f"nwor: the scheduler gave block {max(block_ids)} to a request; mode stage needs the blocks "
                        f"from {self.first} on for itself. Is nwor_ops loaded in the engine core's process?"
                    )


def spare_blocks(vllm_config: Any, kv_cache_config: Any) -> SpareBlocks:
    """What mode ``"stage"`` withholds of a cache.

    Args:
        vllm_config: the engine's.
        kv_cache_config: the whole cache's, as vLLM made it.

    Raises:
        Unsupported: too little would be left for one request of the longest length; there is no attention layer.
    """
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    groups = tuple(number for number, spec in enumerate(specs) if not is_recurrent(spec))
    if not groups:
        raise ALL_RECURRENT.because()
    block_size = min(specs[number].block_size for number in groups)
    requests = vllm_config.scheduler_config.max_num_seqs
    drafts = vllm_config.speculative_config.num_speculative_tokens
    num_blocks = kv_cache_config.num_blocks
    # One allocation; each of its tensors names the size of all of it.
    block_bytes = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0) // num_blocks
    spare = SpareBlocks(num_blocks, groups, num_shadow_blocks(requests, drafts, block_size), block_bytes)
    # One block of the pool is vLLM's null block.
    per_request = round(num_blocks / get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config))
    if spare.first - 1 < per_request:
        raise SMALL_CACHE.because(
            withheld=num_blocks - spare.first,
            groups=len(groups),
            requests=requests,
            drafts=drafts,
            block_size=block_size,
            num_blocks=num_blocks,
            left=max(spare.first - 1, 0),
            max_model_len=vllm_config.model_config.max_model_len,
            needed=per_request,
        )
    return spare


def check_scheduler(vllm_config: Any) -> None:
    """Raises :class:`Unsupported` for a scheduler that is not vLLM's own: it would hand the blocks out."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler_class = vllm_config.scheduler_config.get_scheduler_cls()
    if not issubclass(scheduler_class, Scheduler):
        raise SCHEDULER.because(name=scheduler_class.__qualname__)


def wrap_scheduler_module(module: ModuleType) -> None:
    """Make each scheduler start with a cache that lacks the spare blocks, if its engine is in mode ``"stage"``."""

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, vllm_config: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, _without_spare_blocks(vllm_config, kv_cache_config), *args, **kwargs)

        return __init__

    wrap_once(getattr(module, "Scheduler", None), "__init__", wrapper, _WRAPPED)


def _without_spare_blocks(vllm_config: Any, kv_cache_config: Any) -> Any:
    from vllm.platforms import current_platform

    config = NworConfig.load(vllm_config.additional_config)
    if config.mode != "stage" or vllm_config.speculative_config is None:
        return kv_cache_config
    try:
        check_transaction(vllm_config, current_platform.device_type, config.mode)
        spare = spare_blocks(vllm_config, kv_cache_config)
    except Unsupported:  # the workers say so, and stop the engine if that is wanted
        return kv_cache_config
    return _smaller(kv_cache_config, spare)


def _smaller(kv_cache_config: Any, spare: SpareBlocks) -> Any:
    """The cache without its last blocks. A tensor's size is that of the whole allocation, and both sides of a connector
    divide it by the number of blocks."""
    smaller = copy.copy(kv_cache_config)
    smaller.num_blocks = spare.first
    smaller.kv_cache_tensors = [
        replace(tensor, size=tensor.size // spare.num_blocks * spare.first)
        for tensor in kv_cache_config.kv_cache_tensors
    ]
    return smaller


def wrap_warmup_module(module: ModuleType, spare_of: Callable[[Any], SpareBlocks | None]) -> None:
    """Make vLLM's warm-up of a V2 runner hand out no spare block: it makes up requests, as many as the runner's cache
    has blocks for.

    Args:
        module: ``vllm.v1.worker.gpu.warmup``.
        spare_of: the spare blocks of a runner, None where it has none.
    """

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def warm_up(model_runner: Any, *args: Any, **kwargs: Any) -> Any:
            spare = spare_of(model_runner)
            if spare is None:
                return original(model_runner, *args, **kwargs)
            whole = model_runner.kv_cache_config
            model_runner.kv_cache_config = _smaller(whole, spare)
            try:
                return original(model_runner, *args, **kwargs)
            finally:
                model_runner.kv_cache_config = whole

        return warm_up

    for name in _WARM_UPS:
        wrap_once(module, name, wrapper, _WRAPPED)
