"""Run the GPU tests, and the same kernels under compute-sanitizer, and write the results for a commit.

    python benchmarks/gpu_tests.py [--folder FOLDER]      # default: benchmarks/results

It needs a GPU and takes a few minutes. The tests of the recurrent kernel compare it with vLLM's.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from results import Row, new_parser, row, save, this_machine

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Left out under a sanitizer: graphs, compilers, subprocesses and large caches. They are slow there and add no kernel.
SANITIZED = (
    "(by_hand or windows_match_oracle or number_of_requests or plane_table or transaction or chunks_wherever "
    "or those_of_cpu) "
    "and not (compile or opcheck or graph or trace)"
)
# gpu_engines.py runs vLLM's engines of tests/gpu/vllm. Long tests first.
FOLDERS = (ROOT / "tests" / "ops", ROOT / "tests" / "gpu")
FILES = sorted((file for folder in FOLDERS for file in folder.glob("test_*.py")), key=os.path.getsize, reverse=True)


def pytest(file: pathlib.Path, *arguments: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    options = ("--device", "cuda", "-q", "-p", "no:cacheprovider")
    name = str(file.relative_to(ROOT))
    command = [*under, sys.executable, "-m", "pytest", name, *options, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(*under[2:3], name, *[line for line in done.stdout.splitlines() if " in " in line][-1:], flush=True)
    return done


def outcomes(file: pathlib.Path) -> Counter[str]:
    with tempfile.TemporaryDirectory() as scratch:
        report = pathlib.Path(scratch) / "report.xml"
        done = pytest(file, f"--junitxml={report}")
        if done.returncode != 0:
            print(done.stdout[-3000:])
        [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    return Counter({name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")})


def test_rows(found: Iterable[Counter[str]]) -> list[Row]:
    counts = sum(found, Counter())
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return [
        row("gpu_tests/passed", [passed], "tests", "higher"),
        row("gpu_tests/failed", [failed], "tests", "lower", 0),
        row("gpu_tests/skipped", [counts["skipped"]], "tests", "lower", 0),
    ]


def sanitized_files() -> list[pathlib.Path]:
    """Return the files with tests for the sanitizers, long ones first."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--device", "cuda", "-k", SANITIZED]
    done = subprocess.run([*command, *map(str, FILES)], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {ROOT / line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    return [file for file in FILES if file in found]


def sanitizer_errors(tool: str, file: pathlib.Path) -> int:
    done = pytest(file, "-k", SANITIZED, under=("compute-sanitizer", "--tool", tool, "--print-limit", "5"))
    found = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", done.stdout + done.stderr)
    if found is None or " passed" not in done.stdout:
        ends = [output[:3000] + "\n...\n" + output[-3000:] for output in (done.stdout, done.stderr)]
        raise RuntimeError(f"compute-sanitizer --tool {tool}, {file}, did not finish:\n{''.join(ends)}")
    if found[1] != "0":
        print(done.stdout[-6000:])
    return int(found[1])


def main() -> None:
    folder = new_parser(__doc__).parse_args().folder
    sanitized = sanitized_files()
    # Each keeps one processor busy, but hardly the GPU.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        tests = pool.map(outcomes, FILES)
        sanitizers = {tool: pool.map(partial(sanitizer_errors, tool), sanitized) for tool in TOOLS}
    rows = test_rows(tests)
    rows += [row(f"compute_sanitizer/{tool}", [sum(found)], "errors", "lower", 0) for tool, found in sanitizers.items()]
    save(this_machine(), "gpu_tests", rows, folder)


if __name__ == "__main__":
    main()
