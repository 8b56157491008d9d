"""The GPU tests, and the same kernels under compute-sanitizer, as figures to commit.

    python benchmarks/gpu_tests.py [FOLDER]      # FOLDER: default benchmarks/results

For a machine with a GPU; vLLM is not needed. A few minutes.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor

from results import Row, asked_folder, row, save, this_machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Under a sanitizer: no graphs, compilers, subprocesses or large caches, which are slow there and add no kernel.
SANITIZED = (
    "(layout or transaction or judge or micro or acceptance or samples or placement or no_numbers or bad_data "
    "or plane_table or leading_zero or norm_is) "
    "and not (compile or opcheck or graph or test_debug or any_counts or equals_a_run)"
)


def pytest(*arguments: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    # vLLM's engines: gpu_engines.py
    tests = ("--device", "cuda", "tests/ops", "tests/gpu", "--ignore=tests/gpu/vllm")
    command = [*under, sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_rows(folder: pathlib.Path) -> list[Row]:
    report = folder / "gpu_tests.xml"
    done = pytest(f"--junitxml={report}")
    print(done.stdout[-3000:])
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    report.unlink()
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    failed, passed = counts["failures"] + counts["errors"], counts["tests"] - sum(list(counts.values())[1:])
    return [
        row("gpu_tests/passed", [passed], "tests", "higher"),
        row("gpu_tests/failed", [failed], "tests", "lower", 0),
        row("gpu_tests/skipped", [counts["skipped"]], "tests", "lower", 0),
    ]


def sanitizer_row(tool: str) -> Row:
    done = pytest("-k", SANITIZED, under=("compute-sanitizer", "--tool", tool, "--print-limit", "5"))
    found = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", done.stdout + done.stderr)
    if found is None or " passed" not in done.stdout:
        raise RuntimeError(
            f"compute-sanitizer --tool {tool} did not finish:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    if found[1] != "0":
        print(done.stdout[-6000:])
    return row(f"compute_sanitizer/{tool}", [int(found[1])], "errors", "lower", 0)


def main() -> None:
    folder = asked_folder(__doc__)
    with ThreadPoolExecutor() as pool:  # all at once: each keeps one processor busy, and the GPU hardly
        tests, sanitizers = pool.submit(test_rows, folder), [pool.submit(sanitizer_row, tool) for tool in TOOLS]
    rows = tests.result() + [sanitizer.result() for sanitizer in sanitizers]
    save(this_machine(), "gpu_tests", rows, folder)


if __name__ == "__main__":
    main()
