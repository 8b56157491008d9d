"""Offload to pinned memory if /dev/shm is too small: vLLM then keeps blocks in the worker, as on ROCm.

vLLM imports this in a worker before it builds anything, as its ``worker_extension_cls``.
"""

from __future__ import annotations

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

CPUOffloadingSpec._uses_shared_region = lambda self: False


class Worker:
    """An empty extension of the worker."""
