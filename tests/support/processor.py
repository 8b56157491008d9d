"""Limit a test run to some of this processor's instruction sets.

``NWOR_TEST_CPU`` limits vLLM. vLLM asks ``torch.cpu`` which of its libraries to load (``_C``, ``_C_AVX512``,
``_C_AVX2``) and which attention to run. Every Python process of a limited run, those of vLLM included, imports
``limited/sitecustomize.py``, which hides the instruction sets above the limit.

``ATEN_CPU_CAPABILITY`` is torch's own variable. It limits torch's kernels and, by default, Inductor.
``NWOR_TEST_SIMDLEN`` sets the vector width of Inductor's code separately: 0 (no vectors), 256 or 512 bits.
"""

from __future__ import annotations

import importlib.machinery
import os
import pathlib
import sys
from collections.abc import Callable
from types import MappingProxyType, ModuleType
from typing import NamedTuple

import processes

VARIABLE = "NWOR_TEST_CPU"
SIMDLEN = "NWOR_TEST_SIMDLEN"


class Level(NamedTuple):
    needs: str  # keys of torch.cpu.get_capabilities()
    lacks: tuple[str, ...]  # prefixes of the features that are hidden from vLLM
    library: str  # the library that vLLM must load
    environment: dict[str, str]  # limits of torch and oneDNN, which do not ask torch.cpu


LEVELS = {
    "avx2": Level("avx2", ("avx512", "amx"), "_C_AVX2", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "avx512": Level(
        "avx512_f", ("avx512_bf16", "avx512_fp16", "amx"), "_C_AVX512", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
    ),
    "avx512_bf16": Level("avx512_bf16", ("amx",), "_C", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
    "amx": Level("amx_tile", (), "_C", {}),
}


def apply() -> None:
    """Limit this process and the processes that it starts.

    Raises:
        ValueError: the variable names an unknown level, or more than this processor has.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return
    if name not in LEVELS:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(LEVELS)}, got {name!r}")
    import torch.cpu

    has = torch.cpu.get_capabilities()
    if not has.get(LEVELS[name].needs):
        most = [other for other, level in LEVELS.items() if has.get(level.needs)]
        raise ValueError(f"{VARIABLE}={name}, but this processor has none; it can be {' or '.join(most) or 'nothing'}")
    os.environ |= environment(name)
    _deny(torch.cpu, LEVELS[name])


def environment(name: str) -> dict[str, str]:
    """Return the environment of a process that is limited from its start."""
    return processes.environment(processes.SUPPORT / "limited") | LEVELS[name].environment | {VARIABLE: name}


def separate_compiler_cache() -> None:
    """Give each checkout and each limited run its own folder for Inductor's cache. Call this before torch is imported.

    Inductor's cache key has neither the schemas of our ops nor the instruction set. torch's default folder serves all
    checkouts of a user. There a test finds code that another branch compiled, for other schemas. A limited run finds
    code that was compiled for a wider instruction set, and then results differ or the process crashes.
    ``TORCHINDUCTOR_CACHE_DIR`` of the user replaces the folder of the checkout.
    """
    limits = "-".join(filter(None, (os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", VARIABLE, SIMDLEN))))
    folder = pathlib.Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or processes.ROOT / "build" / "inductor")
    if limits and folder.name != limits:  # workers of pytest-xdist inherit the variable
        folder = folder / limits
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def limit_compiler() -> None:
    """Apply ``NWOR_TEST_SIMDLEN`` to the Inductor of this process.

    Raises:
        ValueError: Inductor cannot generate code of that width for this processor.
    """
    if not (bits := os.environ.get(SIMDLEN)):
        return
    from torch._inductor import config, cpu_vec_isa

    config.cpp.simdlen = int(bits)
    if (width := cpu_vec_isa.pick_vec_isa().bit_width()) != int(bits):
        raise ValueError(f"{SIMDLEN}={bits}, but Inductor generates code of {width} bits for this processor")


def apply_at_import() -> None:
    """Limit a process that has just started, without importing any module early."""
    if level := LEVELS.get(os.environ.get(VARIABLE, "")):
        sys.meta_path.insert(0, _AfterImport("torch.cpu", lambda module: _deny(module, level)))


def _deny(module: ModuleType, level: Level) -> None:
    ask = module.get_capabilities
    module.get_capabilities = lambda: MappingProxyType(  # type: ignore[attr-defined]
        {name: has and not name.startswith(level.lacks) for name, has in ask().items() if name != "architecture"}
        | {"architecture": ask()["architecture"]}
    )


class _AfterImport:
    """Import finder that calls a function after one module was imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def vllm_library() -> str:
    """Return the CPU library that vLLM loaded into this process."""
    maps = pathlib.Path("/proc/self/maps").read_text().split()
    [name] = {path.rpartition("/")[2] for path in maps if "/vllm/_C" in path}
    return name.removesuffix(".abi3.so")
