"""Build and test nwor_ops with every torch of pyproject.toml ([tool.nwor_ops] torch-matrix): `make matrix`.

For each version, in a separate environment:
1. setup.py builds a wheel with that version's headers: the CPU library and, if nvcc is found, the CUDA library for one
architecture.
2. The wheel of the OLDEST version is installed under every version. Both libraries are loaded, and the CPU tests that
need only torch run against it.

A CUDA build of torch is installed without NVIDIA's packages, and tools/cuda_stubs.py makes it importable. No GPU is
used: the CUDA library is compiled, linked and loaded, and the GPU tests check its results.

The results are printed as the table of docs/compatibility.md, and written to FOLDER/result.json. Exits with 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from cuda_stubs import write_stubs
from step import run_step

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSIONS: list[str] = PROJECT["tool"]["nwor_ops"]["torch-matrix"]
# Dependencies of torch except NVIDIA's packages and triton, which CPU code does not need, and those of the build.
NEEDED = ["filelock", "fsspec", "jinja2", "networkx", "ninja", "setuptools>=77,<82", "sympy>=1.13.3",
          "typing-extensions>=4.13"]  # fmt: skip
TESTS_NEED = ("numpy", "pytest", "pytest-xdist", "hypothesis", "expecttest")
# tests/gpu and tests/vllm need a GPU and vLLM. The other folders test the checkout itself, or need the demo's packages.
NOT_HERE = ["tests/gpu", "tests/vllm", "tests/dist", "tests/package"]
ARCHITECTURE = "9.0"
LOADED = """
import json, nwor_ops, torch
print(json.dumps({"torch": torch.__version__,
                  "libraries": {lib.kind: lib.problem or "loaded" for lib in nwor_ops.LIBRARIES}}))
"""


@dataclass
class Row:
    """The results of one version."""

    version: str
    torch: str = ""
    cpu_headers: str = "not tried"
    cuda_headers: str = "not tried"
    cpu_library: str = "not tried"
    cuda_library: str = "not tried"
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)  # tests by reason
    seconds: float = 0.0
    problem: str = ""

    @property
    def good(self) -> bool:
        return not (self.problem or self.failed) and self.passed > 0

    @property
    def tests(self) -> str:
        if self.problem:
            return self.problem
        skipped = sum(self.skipped.values())
        return f"{self.passed} passed, {len(self.failed)} failed, {skipped} skipped"


class Environment:
    """A virtual environment with one torch and what the tests need, without nwor_ops."""

    def __init__(self, folder: pathlib.Path, version: str):
        self.version = version
        self.folder = folder / version
        self.python = str(self.folder / "bin" / "python")
        self.stubs = self.folder / "stubs"

    def variables(self, **more: str) -> dict[str, str]:
        libraries = f"{self.stubs}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
        # Hide the checkout's nwor_ops and the packages in the user's home.
        clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        return clean | {"LD_LIBRARY_PATH": libraries, "PYTHONNOUSERSITE": "1"} | more

    def make(self, wheels: pathlib.Path) -> None:
        """Create the environment. Steps that were finished before are not repeated."""
        finished, packages = self.folder / ".finished", [*NEEDED, *TESTS_NEED]
        if finished.exists() and finished.read_text() == str(packages):
            return
        command(sys.executable, "-m", "venv", "--clear", str(self.folder))
        pip = (self.python, "-m", "pip", "--disable-pip-version-check")
        command(*pip, "install", "--no-deps", str(self.torch_wheel(wheels)))
        command(*pip, "install", *packages)
        purelib = subprocess.run(
            [self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
        print(write_stubs(pathlib.Path(purelib) / "torch" / "lib", self.stubs), "stub libraries")
        command(self.python, "-c", "import torch; print(torch.__version__)", environment=self.variables())
        finished.write_text(str(packages))

    def torch_wheel(self, wheels: pathlib.Path) -> pathlib.Path:
        """Return torch's wheel from the cache, and download it first if it is missing."""
        pattern = f"torch-{self.version}[-+]*cp{sys.version_info.major}{sys.version_info.minor}-*.whl"
        if not list(wheels.glob(pattern)):
            wheels.mkdir(parents=True, exist_ok=True)
            index = ["--extra-index-url", url] if (url := os.environ.get("TORCH_INDEX")) else []
            pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", *index)
            command(*pip, "--dest", str(wheels), f"torch=={self.version}")
        return sorted(wheels.glob(pattern))[0]


def command(*words: str, environment: dict[str, str] | None = None) -> None:
    print("$", *words, flush=True)
    subprocess.run(words, env=environment, check=True)


class Matrix:
    def __init__(self, folder: pathlib.Path, wheels: pathlib.Path, versions: list[str]):
        self.folder = folder
        self.wheels = wheels
        self.rows = {version: Row(version) for version in versions}
        self.environments = {version: Environment(folder, version) for version in versions}
        self.step = 0
        self.nvcc = nvcc_problem()
        cuda = [] if self.nvcc else [self.compile_cuda]
        self.works = [self.make, self.compile_cpu, *cuda, self.test]
        if self.nvcc:
            for row in self.rows.values():
                row.cuda_headers = f"not tried: {self.nvcc}"

    def run(self) -> None:
        for work in self.works:
            for row in self.rows.values():
                if row.problem:
                    self.step += 1
                else:
                    work(row, self.environments[row.version])

    def do(self, title: str, words: list[str], environment: dict[str, str] | None = None) -> bool:
        self.step += 1
        return run_step(f"{self.step}/{len(self.works) * len(self.rows)}", title, words, environment=environment) == 0

    def make(self, row: Row, environment: Environment) -> None:
        words = [sys.executable, __file__, "--only-environment", row.version, "--folder", str(self.folder)]
        if not self.do(f"environment with torch {row.version}", [*words, "--wheels", str(self.wheels)]):
            row.problem = "no environment: this torch was not installed or cannot be imported"

    def compile_cpu(self, row: Row, environment: Environment) -> None:
        shutil.rmtree(environment.folder / "dist", ignore_errors=True)
        done = self.compile(f"CPU sources with the headers of {row.version}", environment, NWOR_BUILD_CUDA="0")
        row.cpu_headers = "built" if done else "failed"
        if not done and row.version == min_version(self.rows):
            for other in self.rows.values():
                other.problem = other.problem or f"no library: it was not built with torch {row.version}"

    def compile_cuda(self, row: Row, environment: Environment) -> None:
        """Build the CUDA library next to the CPU library, so that the wheel contains both."""
        done = self.compile(f"CUDA sources with the headers of {row.version}", environment, NWOR_BUILD_CUDA="1")
        row.cuda_headers = "built" if done else "failed"

    def compile(self, title: str, environment: Environment, **variables: str) -> bool:
        base, wheels = environment.folder / "build", environment.folder / "dist"
        # Keep only the libraries of an earlier run; setup.py knows whether they are up to date.
        wanted = ["libnwor_cpu.so"] if self.nvcc else ["libnwor_cpu.so", "libnwor_cuda.so"]
        for path in base.glob("lib*/**/*"):
            if path.is_file() and path.name not in wanted:
                path.unlink()
        words = [environment.python, "setup.py", "egg_info", "--egg-base", str(environment.folder)]
        words += ["build", "--build-base", str(base), "bdist_wheel", "--dist-dir", str(wheels)]
        return self.do(title, words, environment.variables(TORCH_CUDA_ARCH_LIST=ARCHITECTURE, **variables))

    def test(self, row: Row, environment: Environment) -> None:
        oldest = self.environments[min_version(self.rows)]
        [wheel] = (oldest.folder / "dist").glob("*.whl")
        report = environment.folder / "report.xml"
        report.unlink(missing_ok=True)
        start = time.monotonic()
        words = [sys.executable, __file__, "--only-tests", row.version, "--wheel", str(wheel)]
        done = self.do(f"tests under torch {row.version}", [*words, "--folder", str(self.folder)])
        row.seconds = round(time.monotonic() - start, 1)
        loaded = environment.folder / "loaded.json"
        if not loaded.exists() or not report.exists():
            row.problem = "the library built with the oldest headers cannot be imported, or no test ran"
            return
        found = json.loads(loaded.read_text())
        row.torch = found["torch"]
        row.cpu_library, row.cuda_library = found["libraries"]["cpu"], found["libraries"]["cuda"]
        read_report(row, report)
        if not done and not row.failed:
            row.problem = "the tests were cut short"

    def result(self) -> dict:
        return {
            "nwor_ops": PROJECT["project"]["version"],
            "commit": first_line("git", "describe", "--always", "--dirty"),
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            "processor": first_line("sh", "-c", "grep -m1 'model name' /proc/cpuinfo").partition(": ")[2],
            "compiler": first_line(os.environ.get("CXX", "g++"), "--version"),
            "nvcc": self.nvcc or "found",
            "library_built_with": f"the headers of torch {min_version(self.rows)}",
            "rows": [asdict(row) for row in self.rows.values()],
        }


def run_tests(environment: Environment, wheel: str, tests: list[str]) -> None:
    """Run tests outside the checkout, so that they import the installed package."""
    folder = environment.folder
    (folder / "loaded.json").unlink(missing_ok=True)
    pip = (environment.python, "-m", "pip", "--disable-pip-version-check")
    command(*pip, "install", "--no-deps", "--force-reinstall", wheel)
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("tests", "examples", "csrc", "docs"):  # some tests read a header or a document
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    os.chdir(tree)
    variables = environment.variables()
    found = subprocess.run([environment.python, "-c", LOADED], env=variables, text=True, stdout=subprocess.PIPE)
    if found.returncode == 0:
        (folder / "loaded.json").write_text(found.stdout)
    leave_out = [f"--ignore={path}" for path in NOT_HERE]
    pytest = [environment.python, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadgroup", *leave_out]
    command(*pytest, f"--junitxml={folder / 'report.xml'}", *tests, environment=variables)


def read_report(row: Row, report: pathlib.Path) -> None:
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            row.failed.append(name)
        elif (skip := case.find("skipped")) is not None:
            reason = skip.get("message") or "no reason given"
            row.skipped[reason] = row.skipped.get(reason, 0) + 1
        else:
            row.passed += 1


def min_version(versions: Iterable[str]) -> str:
    return min(versions, key=lambda version: [int(part) for part in version.split(".")])


def nvcc_problem() -> str:
    """Return the reason of setup.py why no CUDA library can be built here, or an empty string."""
    if os.environ.get("NWOR_BUILD_CUDA") == "0":
        return "NWOR_BUILD_CUDA=0"
    code = "import runpy; print(runpy.run_path('setup.py')['cuda_problem']() or '')"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def first_line(*words: str) -> str:
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    except OSError:
        return "unknown"


def print_table(rows: list[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # Markdown, which can be pasted into the document.
    table = Table(box=box.MARKDOWN)
    for name in ("torch", "CPU sources", "CUDA sources", "CPU library", "CUDA library", "tests"):
        table.add_column(name)
    for row in rows:
        table.add_row(row.torch or row.version, row.cpu_headers, row.cuda_headers, row.cpu_library, row.cuda_library,
                      row.tests)  # fmt: skip
    console = Console(width=200, highlight=False, markup=False)
    console.print(table)
    for row in rows:
        for name in row.failed:
            console.print(f"torch {row.version}: failed: {name}")
        for reason, number in row.skipped.items():
            console.print(f"torch {row.version}: {number} skipped: {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=f"default: {' '.join(VERSIONS)}")
    parser.add_argument(
        "--folder", type=pathlib.Path, default=ROOT / "build" / "matrix", help="environments and results"
    )
    parser.add_argument("--wheels", type=pathlib.Path, default=ROOT / "build" / "matrix" / "wheels",
                        help="folder of torch's wheels, also for downloads")  # fmt: skip
    parser.add_argument("--only-environment", help=argparse.SUPPRESS)  # runs one step of this program in a new process
    parser.add_argument("--only-tests", help=argparse.SUPPRESS)
    parser.add_argument("--wheel", help=argparse.SUPPRESS)
    parser.add_argument("--tests", nargs="*", default=["tests"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, wheels = options.folder.resolve(), options.wheels.resolve()
    if options.only_environment:
        Environment(folder, options.only_environment).make(wheels)
        return 0
    if options.only_tests:
        run_tests(Environment(folder, options.only_tests), options.wheel, options.tests)
        return 0

    os.chdir(ROOT)
    matrix = Matrix(folder, wheels, options.versions or VERSIONS)
    if matrix.nvcc:
        print(f"the CUDA sources are not compiled: {matrix.nvcc}", flush=True)
    matrix.run()
    result = folder / "result.json"
    result.write_text(json.dumps(matrix.result(), indent=2) + "\n")
    rows = list(matrix.rows.values())
    print_table(rows)
    print(f"written to {result}")
    return 0 if all(row.good and "failed" not in (row.cpu_headers, row.cuda_headers) for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"exit status {error.returncode}: {' '.join(map(str, error.cmd))}")
