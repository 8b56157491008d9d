"""Offloading where /dev/shm is too small: vLLM keeps blocks in pinned memory of the worker instead, as on ROCm.

vLLM imports this in a worker before it builds anything: ``worker_extension_cls``.
"""

from __future__ import annotations

from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

CPUOffloadingSpec._uses_shared_region = lambda self: False


class Worker:
    """Adds nothing to vLLM's."""
