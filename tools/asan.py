"""Run the tests of the ops with sanitizers: ``make test-asan``.

    python tools/asan.py -n 4 tests/ops     # options of pytest, and tests

AddressSanitizer and UndefinedBehaviorSanitizer watch the CPU kernels, in a second build (build/asan). They must be
loaded before Python, so the tests run with LD_PRELOAD. Python's own allocator is off, so that each object is a separate
block. An error ends its process, which with ``-n`` fails one test. Tests that compile are left out: their code has no
sanitizers.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "asan"
# A report goes to the standard error of a process that then ends: pytest must not hold it back.
PYTEST = ("-q", "--device=cpu", "--capture=sys", "--ignore=tests/ops/test_compile.py")
# Run first: check that the library is instrumented and that a bad read is reported.
BAD_READ = (
    "import ctypes, torch, nwor_ops; tensor = torch.zeros(100); ctypes.string_at(tensor.data_ptr(), tensor.nbytes + 64)"
)


def environment() -> dict[str, str]:
    """Return the environment of the tests. libstdc++ is preloaded too, because torch's exceptions pass through
    AddressSanitizer."""
    compiler, libraries = os.environ.get("CXX", "g++"), []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        if not os.path.isabs(path):
            sys.exit(f"test-asan: {compiler} has no {name}; on Debian: apt-get install libasan8 libubsan1")
        libraries.append(path.strip())
    return os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": str(FOLDER / "lib"),
        "PYTHONSAFEPATH": "1",  # a test that runs `python -c` in the checkout does not import its library
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves its objects at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def problem_of_the_build(variables: dict[str, str]) -> str:
    """Say why a pass would mean nothing; empty if it does mean something."""
    if b"__ubsan_handle" not in (FOLDER / "lib" / "nwor_ops" / "libnwor_cpu.so").read_bytes():
        return "the library does not call __ubsan_handle"
    command = [sys.executable, "-c", BAD_READ]
    done = subprocess.run(command, env=variables, cwd=FOLDER, capture_output=True, text=True, check=False)
    if done.returncode == 0 or "AddressSanitizer: heap-buffer-overflow" not in done.stderr:
        return f"a read past the end of a tensor was not reported: {done.stderr[-500:]}"
    return ""


def main() -> int:
    os.chdir(ROOT)
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(FOLDER / "lib")]
    build += ["--build-temp", str(FOLDER / "temp")]
    subprocess.run(build, env=os.environ | {"NWOR_SANITIZE": "address,undefined", "NWOR_BUILD_CUDA": "0"}, check=True)
    variables = environment()
    if problem := problem_of_the_build(variables):
        sys.exit(f"test-asan: {problem}")
    # The script and not `python -m`, which would put this folder, and its library, before PYTHONPATH.
    pytest = str(pathlib.Path(sys.executable).parent / "pytest")
    return subprocess.run([pytest, *PYTEST, *sys.argv[1:]], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
