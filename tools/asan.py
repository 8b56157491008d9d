"""Run the tests of the ops with sanitizers: ``make test-asan``.

    python tools/asan.py                   # builds the library, then runs all files of tests/ops
    python tools/asan.py undo accept       # some of the files
    python tools/asan.py undo -- -n 2 -x   # options for pytest

AddressSanitizer and UndefinedBehaviorSanitizer watch the CPU kernels. The package is built a second time, in
build/asan. The sanitizers must be loaded before Python, so the tests run with LD_PRELOAD. Python's own allocator is
off. Each object is therefore a separate block, and a read past its end is found. The first error ends the process, and
prints where the memory was allocated and used. Each file runs in its own process, so the other files still run. A
summary follows at the end. Tests that compile are left out, because Inductor's code has no sanitizers.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

from step import log_file, run_step

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "asan"
LEFT_OUT = ("compile",)
# A report goes to the standard error of a process that then ends: pytest must not hold it back.
PYTEST = ("-q", "--device=cpu", "--capture=sys")
NO_TESTS = 5  # pytest's exit status if options like -k leave no test of a file
# Run first: check that the library is instrumented and that a bad read is reported.
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


def test_files(names: list[str]) -> list[pathlib.Path]:
    """Return the test files with these names (``undo`` for ``test_undo.py``), or all of them."""
    files = {path.stem.removeprefix("test_"): path for path in sorted((ROOT / "tests" / "ops").glob("test_*.py"))}
    files = {name: path for name, path in files.items() if name not in LEFT_OUT}
    if unknown := [name for name in names if name not in files]:
        sys.exit(f"test-asan: no tests for {', '.join(unknown)}; there are {', '.join(files)}")
    return [files[name] for name in names or files]


def split_arguments(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of test files, and the options for pytest after ``--``."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def run_tests(files: list[pathlib.Path], options: list[str], variables: dict[str, str]) -> list[str]:
    """Run each file in its own process. Return a line for each file that failed."""
    # The script and not `python -m`, which would put this folder, and its library, before PYTHONPATH.
    pytest = str(pathlib.Path(sys.executable).parent / "pytest")
    failed, summary = [], []
    for number, path in enumerate(files, 2):
        title = f"{path.stem} under sanitizers"
        start = time.monotonic()
        status = run_step(
            f"{number}/{len(files) + 1}", title, [pytest, str(path), *PYTEST, *options], environment=variables
        )
        last = log_file(title).read_text(errors="replace").rstrip().rpartition("\n")[2]
        if status not in (0, NO_TESTS):
            failed.append(f"{path.stem}: exit status {status}")
        summary.append(f"{path.stem:<24}{status:>4}{time.monotonic() - start:>7.0f} s  {last.strip('= ')}")
    print("\n".join(["", f"{'file':<24}exit  seconds  result", *summary]))
    return failed


def main() -> int:
    names, options = split_arguments(sys.argv[1:])
    files = test_files(names)
    os.chdir(ROOT)
    build = [sys.executable, "setup.py", "-q", "build", "--build-lib", str(FOLDER / "lib")]
    build += ["--build-temp", str(FOLDER / "temp")]
    with_sanitizers = os.environ | {"NWOR_SANITIZE": "address,undefined", "NWOR_BUILD_CUDA": "0"}
    title = "CPU library with sanitizers"
    if run_step(f"1/{len(files) + 1}", title, build, environment=with_sanitizers) != 0:
        return 1
    variables = environment()
    if problem := problem_of_the_build(variables):
        print(f"test-asan: {problem}")
        return 1
    failed = run_tests(files, options, variables)
    print(f"test-asan: {'; '.join(failed) or 'all files passed'}")
    return bool(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
