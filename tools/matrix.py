"""Build and test nwor_ops with every torch of pyproject.toml ([tool.nwor_ops] torch-matrix): `make matrix`.

For each version, in a separate environment:
1. setup.py builds a wheel with that version's headers: the CPU library and, if nvcc is found, the CUDA library for one
architecture.
2. The wheel of the OLDEST version is installed under every version. Both libraries are loaded, and the CPU tests that
need only torch run against it.

No GPU is used: a CUDA build of torch loads the CUDA library, and the GPU tests check its results. ``2.15.0+cpu`` is a
version too. The results are printed as the table of docs/compatibility.md. Exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSIONS: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["nwor_ops"]["torch-matrix"]
# What the build and the tests need in addition to torch.
NEEDED = ["ninja", "setuptools>=77,<82", "numpy", "pytest", "pytest-xdist", "hypothesis", "expecttest"]
# tests/gpu and tests/vllm need a GPU and vLLM. The other folders test the checkout itself, or need the demo's packages.
NOT_HERE = ["tests/gpu", "tests/vllm", "tests/dist", "tests/package"]
ARCHITECTURE = "9.0"
LOADED = "import nwor_ops; print([(lib.kind, lib.problem or 'loaded') for lib in nwor_ops.LIBRARIES])"


class Environment:
    """A virtual environment with one torch and what the tests need, without nwor_ops."""

    def __init__(self, folder: pathlib.Path, version: str):
        self.version, self.folder = version, folder / version
        self.python = str(self.folder / "bin" / "python")

    def run(self, *words: str, cwd: pathlib.Path = ROOT, **variables: str) -> str:
        """Run Python with these words, and return what it prints. The checkout's nwor_ops and the packages in the
        user's home are hidden.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        print("$ python", *words, flush=True)
        found = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        found |= {"PYTHONNOUSERSITE": "1"} | variables
        done = subprocess.run([self.python, *words], cwd=cwd, env=found, text=True, stdout=subprocess.PIPE)
        print(done.stdout[-4000:], flush=True)
        done.check_returncode()
        return done.stdout

    def make(self) -> None:
        """Create the environment, unless an earlier run has."""
        finished = self.folder / ".finished"
        if finished.exists() and finished.read_text() == str(NEEDED):
            return
        index = ["--extra-index-url", url] if (url := os.environ.get("TORCH_INDEX")) else []
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(self.folder)], check=True)
        self.run("-m", "pip", "-q", "install", *index, f"torch=={self.version}", *NEEDED)
        self.run("-c", "import torch; print(torch.__version__)")
        finished.write_text(str(NEEDED))

    def build(self, cuda: bool) -> pathlib.Path:
        """Build a wheel with this torch's headers, and return its path."""
        shutil.rmtree(self.folder / "dist", ignore_errors=True)
        words = ["setup.py", "-q", "egg_info", "--egg-base", str(self.folder), "build", "--build-base"]
        words += [str(self.folder / "build"), "bdist_wheel", "--dist-dir", str(self.folder / "dist")]
        cuda = cuda and "+cpu" not in self.version
        self.run(*words, TORCH_CUDA_ARCH_LIST=ARCHITECTURE, NWOR_BUILD_CUDA=str(int(cuda)))
        [wheel] = (self.folder / "dist").glob("*.whl")
        return wheel

    def test(self, wheel: pathlib.Path) -> tuple[str, str]:
        """Run the tests outside the checkout, so that they import the installed wheel. Return the libraries, and the
        last line of pytest."""
        self.run("-m", "pip", "-q", "install", "--no-deps", "--force-reinstall", str(wheel))
        tree = self.folder / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        for name in ("tests", "examples", "csrc", "docs"):  # some tests read a header or a document
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        loaded = self.run("-c", LOADED, cwd=tree).strip()
        ignored = [f"--ignore={path}" for path in NOT_HERE]
        output = self.run("-m", "pytest", "-q", "-n", "auto", "--dist", "loadgroup", *ignored, "tests", cwd=tree)
        return loaded, output.rstrip().rpartition("\n")[2].strip("= ")


def has_nvcc() -> bool:
    """Return whether setup.py would build the CUDA library here."""
    code = "import runpy; print(runpy.run_path('setup.py')['cuda_problem']() or '')"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return os.environ.get("NWOR_BUILD_CUDA") != "0" and not found.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help=f"default: {' '.join(VERSIONS)}")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build" / "matrix", help="environments")
    options = parser.parse_args()
    folder, cuda = options.folder.resolve(), has_nvcc()
    versions = sorted(options.versions or VERSIONS, key=lambda version: [*map(int, re.findall(r"\d+", version))])
    rows, oldest, failed = [], None, False
    for version in versions:
        environment, cells = Environment(folder, version), ["failed"] * 3
        try:
            environment.make()
            wheel = environment.build(cuda)
            cells[0] = "CPU and CUDA built" if cuda else "CPU built"
            oldest = oldest or wheel
            cells[1:] = environment.test(oldest)
        except subprocess.CalledProcessError as error:
            failed = True
            cells[2] = f"exit status {error.returncode}"
        rows.append(f"| {version} | {' | '.join(cells)} |")
    print("| torch | sources | libraries of the oldest | tests |", "|---|---|---|---|", *rows, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
