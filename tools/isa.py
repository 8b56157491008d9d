"""Run the tests that depend on the processor under every instruction set of this processor: ``make test-isa``.

    python tools/isa.py                      # all runs
    python tools/isa.py avx2-4 vllm-avx2     # some runs, by name
    python tools/isa.py --list               # the names
    python tools/isa.py avx2-1 -- -n 2 -x    # options for pytest

- ``avx2-1``, ``avx2-4``: torch's kernels and Inductor's code use AVX2, with 1 and 4 threads. The run has all tests of
  tests/ops, tests/transaction and tests/recurrent.
- ``avx2+avx512``: torch's kernels use AVX2, Inductor's code uses AVX-512. The run has the tests that compile.
- ``vllm-avx2``: vLLM loads its library for AVX2. The run has the tests of tests/vllm that depend on that library.

Each run has its own folder for Inductor's cache. The exit status is 1 if a run failed or had no test.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "isa"

TESTS = ("--device=cpu", "tests/ops", "tests/transaction", "tests/recurrent")
THAT_COMPILE = (*TESTS, "-k", "compile or trace")
# The tests of tests/vllm whose results depend on the library that vLLM loads. `NWOR_TEST_CPU=avx2 make test-vllm` runs
# all of tests/vllm.
OF_VLLM = (
    "tests/vllm/test_processor.py", "tests/vllm/test_cpu_writer.py", "tests/vllm/test_engine.py::test_dtypes",
    "tests/vllm/test_recurrent_kernel.py::test_windows_are_those_of_the_cpu_kernel",
)  # fmt: skip


@dataclass(frozen=True)
class InstructionSet:
    """One instruction set: the feature of torch.cpu that it needs, and how torch and Inductor are limited to it."""

    needs: str
    simdlen: int
    environment: dict[str, str]


# oneDNN and MKL do not read ATEN_CPU_CAPABILITY. MKL reads its variable on Intel's processors only.
SETS = {
    "default": InstructionSet(
        "", 0, {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    ),
    "avx2": InstructionSet(
        "avx2", 256, {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    ),
    "avx512": InstructionSet("avx512_f", 512, {"ATEN_CPU_CAPABILITY": "avx512"}),
}
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "NWOR_TEST_CPU", "NWOR_TEST_SIMDLEN")


@dataclass(frozen=True)
class Run:
    """One run of pytest."""

    name: str
    threads: int
    tests: tuple[str, ...]
    environment: dict[str, str]

    def execute(self, options: list[str]) -> int:
        """Run pytest, and return its exit status."""
        cache = FOLDER / "inductor" / self.name
        shutil.rmtree(cache, ignore_errors=True)
        variables = {name: value for name, value in os.environ.items() if name not in LIMITS}
        variables |= {"OMP_NUM_THREADS": str(self.threads), "TORCHINDUCTOR_CACHE_DIR": str(cache)} | self.environment
        variables["OMP_WAIT_POLICY"] = "passive"  # there may be more threads than cores: a waiting one must not spin
        print(f"== {self.name}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *self.tests, *options]
        return subprocess.run(command, env=variables, check=False).returncode


def runs(capabilities: Mapping[str, Any], has_vllm: bool, cpu_levels: dict[str, str]) -> list[Run]:
    """List the runs for a processor.

    Args:
        capabilities: of ``torch.cpu.get_capabilities()``.
        has_vllm: whether a CPU build of vLLM is installed.
        cpu_levels: values of ``NWOR_TEST_CPU``, each with the capability that it needs.
    """
    sets = {name: of for name, of in SETS.items() if not of.needs or capabilities.get(of.needs)}
    found = [
        Run(f"{name}-{threads}", threads, TESTS, of.environment) for name, of in sets.items() for threads in (1, 4)
    ]
    found += [
        Run(f"{name}+{other}", 1, THAT_COMPILE,
            of.environment | {"NWOR_TEST_SIMDLEN": str(sets[other].simdlen)})
        for name, of in sets.items() for other in sets if other != name
    ]  # fmt: skip
    if has_vllm:
        found += [
            Run(f"vllm-{level}", 1, OF_VLLM, {"NWOR_TEST_CPU": level})
            for level, needs in cpu_levels.items() if capabilities.get(needs)
        ]  # fmt: skip
    return found


def of_this_processor() -> list[Run]:
    import torch

    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from processor import LEVELS

    levels = {name: level.needs for name, level in LEVELS.items()}
    return runs(torch.cpu.get_capabilities(), has_cpu_vllm(), levels)


def has_cpu_vllm() -> bool:
    """Whether the installed vLLM is a CPU build: only that has a library for AVX2."""
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations or []) if spec else []
    return any(list(pathlib.Path(folder).glob("_C_AVX2*.so")) for folder in folders)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs; all of them by default")
    parser.add_argument("--list", action="store_true", help="show the names of all runs")
    words = sys.argv[1:]
    where = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:where])
    every = of_this_processor()
    if unknown := set(options.names) - {run.name for run in every}:
        parser.error(f"no such run on this processor: {', '.join(sorted(unknown))}")
    chosen = [run for run in every if not options.names or run.name in options.names]
    if options.list:
        print("\n".join(run.name for run in chosen))
        return 0
    os.chdir(ROOT)
    status = {run.name: run.execute(words[where + 1 :]) for run in chosen}
    print("\n".join(f"{name}: {f'exit status {code}' if code else 'passed'}" for name, code in status.items()))
    return 1 if any(status.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
