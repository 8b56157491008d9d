"""Run the tests of the ops with sanitizers: ``make test-asan``.

    python tools/asan.py [undo accept ...] [-- options of pytest]     # default: all files of tests/ops

AddressSanitizer and UndefinedBehaviorSanitizer watch the CPU kernels, in a second build (build/asan). They must be
loaded before Python, so the tests run with LD_PRELOAD. Python's own allocator is off, so that each object is a separate
block. The first error ends the process of its file. Tests that compile are left out: their code has no sanitizers.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "asan"
# A report goes to the standard error of a process that then ends: pytest must not hold it back.
PYTEST = ("-q", "--device=cpu", "--capture=sys")
NO_TESTS = 5  # pytest's exit status if options like -k leave no test of a file
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


def run_tests(files: list[pathlib.Path], options: list[str], variables: dict[str, str]) -> list[str]:
    """Run each file in its own process. Return a line for each file that failed."""
    # The script and not `python -m`, which would put this folder, and its library, before PYTHONPATH.
    pytest = str(pathlib.Path(sys.executable).parent / "pytest")
    failed = []
    for path in files:
        print(f"== {path.stem}", flush=True)
        status = subprocess.run([pytest, str(path), *PYTEST, *options], env=variables, check=False).returncode
        failed += [f"{path.stem}: exit status {status}"] * (status not in (0, NO_TESTS))
    return failed


def main() -> int:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    names, options = words[:end], words[end + 1 :]
    files = [path for path in sorted((ROOT / "tests" / "ops").glob("test_*.py")) if path.stem != "test_compile"]
    if unknown := set(names) - {path.stem.removeprefix("test_") for path in files}:
        sys.exit(f"test-asan: no tests for {', '.join(sorted(unknown))}")
    os.chdir(ROOT)
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(FOLDER / "lib")]
    build += ["--build-temp", str(FOLDER / "temp")]
    subprocess.run(build, env=os.environ | {"NWOR_SANITIZE": "address,undefined", "NWOR_BUILD_CUDA": "0"}, check=True)
    variables = environment()
    if problem := problem_of_the_build(variables):
        sys.exit(f"test-asan: {problem}")
    chosen = [path for path in files if not names or path.stem.removeprefix("test_") in names]
    failed = run_tests(chosen, options, variables)
    print(f"test-asan: {'; '.join(failed) or 'all files passed'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
