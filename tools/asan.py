"""Run the tests of the ops with sanitizers: ``make test-asan``.

    python tools/asan.py              # builds the library, then runs the tests
    python tools/asan.py -- -n 2 -x   # options for pytest

AddressSanitizer and UndefinedBehaviorSanitizer watch the CPU kernels. The package is built a second time, in
build/asan. The sanitizers must be loaded before Python, so the tests run with LD_PRELOAD. Python's own allocator is
off: each object is a block of its own, and a read past its end is found. The first error ends the process, and prints
where the memory was allocated and used. Tests that compile are left out, because Inductor's code has no sanitizers.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

from step import run_step

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "asan"
# A report goes to the standard error of a process that then ends: pytest must not hold it back.
TESTS = ("tests/ops", "--device=cpu", "--deselect=tests/ops/test_compile.py", "--capture=sys")
# Both must be seen to fail before a pass means anything: the library is instrumented, and a bad read is reported.
BAD_READ = (
    "import ctypes, torch, nwor_ops; tensor = torch.zeros(100); ctypes.string_at(tensor.data_ptr(), tensor.nbytes + 64)"
)


def libraries() -> list[str]:
    """Return the paths of the compiler's libraries. libstdc++ is one of them, because torch's exceptions pass through
    AddressSanitizer."""
    compiler = os.environ.get("CXX", "g++")
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    ]
    missing = [name for name, path in zip(names, found, strict=True) if not os.path.isabs(path)]
    if missing:
        sys.exit(f"test-asan: {compiler} has no {', '.join(missing)}; on Debian: apt-get install libasan8 libubsan1")
    return found


def environment() -> dict[str, str]:
    return os.environ | {
        "LD_PRELOAD": " ".join(libraries()),
        "PYTHONPATH": str(FOLDER / "lib"),
        "PYTHONSAFEPATH": "1",  # a test that runs `python -c` in the checkout does not import its library
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves its objects at exit
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def problem_of_the_build(variables: dict[str, str]) -> str:
    """Say why a pass would mean nothing; empty if it does mean something."""
    library = (FOLDER / "lib" / "nwor_ops" / "libnwor_cpu.so").read_bytes()
    for symbol in (b"__asan_report_load", b"__ubsan_handle"):
        if symbol not in library:
            return f"the library does not call {symbol.decode()}"
    command = [sys.executable, "-c", BAD_READ]
    done = subprocess.run(command, env=variables, cwd=FOLDER, capture_output=True, text=True, check=False)
    if done.returncode == 0 or "AddressSanitizer: heap-buffer-overflow" not in done.stderr:
        return f"a read past the end of a tensor was not reported: {done.stderr[-500:]}"
    return ""


def main() -> int:
    options = sys.argv[2:] if sys.argv[1:2] == ["--"] else sys.argv[1:]
    os.chdir(ROOT)
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(FOLDER / "lib")]
    build += ["--build-temp", str(FOLDER / "temp")]
    with_sanitizers = os.environ | {"NWOR_SANITIZE": "address,undefined", "NWOR_BUILD_CUDA": "0"}
    if run_step("1/2", "CPU library with sanitizers", build, environment=with_sanitizers) != 0:
        return 1
    variables = environment()
    if problem := problem_of_the_build(variables):
        print(f"test-asan: {problem}")
        return 1
    # The script and not `python -m`, which would put this folder, and its library, before PYTHONPATH.
    pytest = str(pathlib.Path(sys.executable).parent / "pytest")
    start = time.monotonic()
    status = run_step("2/2", "ops under sanitizers", [pytest, "-q", *TESTS, *options], environment=variables)
    print(f"tests/ops under sanitizers: exit status {status}, {time.monotonic() - start:.0f} s")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
