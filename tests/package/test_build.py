"""The rebuilds of setup.py, shown on a few sources of one line each."""

from __future__ import annotations

import os
import pathlib
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from fake_gpu import NAME, add_nvidia_smi

ROOT = pathlib.Path(__file__).resolve().parents[2]
TWO = 'extern "C" __attribute__((visibility("default"))) int two()'
SOURCES = {
    "csrc/one.h": "#define ONE 1\n",
    "csrc/two.h": '#include "one.h"\n#define TWO (ONE + 1)\n',
    "csrc/glibc.cpp": "",
    "csrc/cpu/one.cpp": '#include "one.h"\nint one() { return ONE; }\n',
    "csrc/cpu/two.cpp": '#include "two.h"\n' + TWO + " { return TWO; }\n",
    "csrc/exports.map": "{ global: two; local: *; };\n",
}
LIBRARY = "nwor_ops/libnwor_cpu.so"


class Tree:
    """A checkout with other sources."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        for name in ("setup.py", "pyproject.toml", "tools/older_glibc.py", "nwor_ops/gpu.py", "README.md", "LICENSE"):
            self.write(name, (ROOT / name).read_text())
        for package in ("nwor_ops/__init__.py", "nwor_ops/__main__.py"):
            self.write(package, "")
        for name, text in SOURCES.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def build(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", *words]
        variables = {name: value for name, value in os.environ.items() if name not in ("CXX", "NWOR_GLIBC")}
        return subprocess.run(command, cwd=self.folder, env=variables | {"NWOR_BUILD_CUDA": "0"} | environment,
                              capture_output=True, text=True, timeout=300, check=False)  # fmt: skip

    def made(self, *words: str, **environment: str) -> list[str]:
        """Run a build, and return the names of the files that a command created."""
        done = self.build(*words, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        commands = [shlex.split(line) for line in done.stdout.splitlines() if line.startswith("[")]
        return sorted(pathlib.Path(words[words.index("-o") + 1]).name for words in commands)

    def two(self) -> str:
        code = f"import ctypes; print(ctypes.CDLL('./{LIBRARY}').two())"
        environment = os.environ | {"LD_LIBRARY_PATH": torch_libraries()}
        return subprocess.run([sys.executable, "-c", code], cwd=self.folder, env=environment, capture_output=True,
                              text=True, check=True).stdout.strip()  # fmt: skip


def torch_libraries() -> str:
    import torch

    return str(pathlib.Path(torch.__file__).parent / "lib")


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> Tree:
    tree = Tree(tmp_path / "a checkout")  # a path with a space, which must be quoted
    assert tree.made() == ["glibc.o", "libnwor_cpu.unfinished", "one.o", "two.o"]
    assert tree.made() == []
    return tree


def test_changed_source_is_compiled_alone(tree: Tree) -> None:
    tree.write("csrc/cpu/two.cpp", f"{TWO} {{ return 22; }}\n")
    assert tree.made() == ["libnwor_cpu.unfinished", "two.o"]
    assert tree.two() == "22"


@pytest.mark.parametrize(("header", "objects"), [("csrc/two.h", ["two.o"]), ("csrc/one.h", ["one.o", "two.o"])])
def test_header_compiles_what_includes_it(tree: Tree, header: str, objects: list[str]) -> None:
    tree.write(header, SOURCES[header].replace("1", "5"))
    assert tree.made() == ["libnwor_cpu.unfinished", *objects]
    assert tree.two() == {"csrc/two.h": "6", "csrc/one.h": "6"}[header]


def test_other_compiler_or_torch_compiles_everything(tree: Tree) -> None:
    assert len(tree.made(CXX=shutil.which("g++"))) == 4
    assert tree.made(CXX=shutil.which("g++")) == []
    newer = tree.folder / "packages"
    tree.write("packages/torch-99.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 99.0\n")
    assert len(tree.made(CXX=shutil.which("g++"), PYTHONPATH=str(newer))) == 4


def test_older_glibc_links_anew(tree: Tree) -> None:
    assert tree.made(NWOR_GLIBC="2.28") == ["libnwor_cpu.unfinished"]
    assert tree.made(NWOR_GLIBC="2.28") == []
    assert tree.two() == "2"


def test_failed_build_keeps_the_library(tree: Tree) -> None:
    tree.write("csrc/cpu/two.cpp", f"{TWO} {{ return no_such_name; }}\n")
    for _ in range(2):
        done = tree.build()
        assert done.returncode == 1
        assert "no_such_name" in done.stdout
        assert done.stderr.strip() == "nwor_ops: building failed; behind FAILED stands what failed, and why"
        assert tree.two() == "2"


def test_process_keeps_its_opened_library(tree: Tree) -> None:
    library = tree.folder / LIBRARY
    with library.open("rb") as opened:
        before = library.read_bytes()
        tree.write("csrc/cpu/two.cpp", f"{TWO} {{ return 22; }}\n")
        tree.made()
        assert opened.read() == before != library.read_bytes()
    assert not list(tree.folder.rglob("*.unfinished"))


# ---------------------------------------------------------------- a machine with a GPU and without nvcc

ANY_GPU = list(pathlib.Path("/dev").glob("nvidia[0-9]*"))


def libraries(**environment: str) -> subprocess.CompletedProcess[str]:
    """Ask setup.py which libraries it builds on a machine without nvcc."""
    code = """
import pathlib, runpy, shutil, sys
exists = pathlib.Path.exists
which = shutil.which
shutil.which = lambda name, *more: None if name == "nvcc" else which(name, *more)
pathlib.Path.exists = lambda path, **named: path.name != "nvcc" and exists(path, **named)
made = runpy.run_path("setup.py")["libraries"]()
print([library.kind for library in made])
"""
    hidden = ("NWOR_BUILD_CUDA", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=variables | environment, capture_output=True,
                          text=True, check=False)  # fmt: skip


def test_gpu_machine_needs_the_cuda_library(tmp_path: pathlib.Path) -> None:
    done = libraries(**add_nvidia_smi(tmp_path / "bin"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"nwor_ops: this machine has a GPU ({NAME}), but the CUDA library cannot")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "built"),
    [({"NWOR_BUILD_CUDA": "0"}, "['cpu']"), ({"CUDA_VISIBLE_DEVICES": ""}, "['cpu']"), ({"NWOR_BUILD": "0"}, "[]")],
)
def test_variables_choose_the_libraries(tmp_path: pathlib.Path, variables: dict[str, str], built: str) -> None:
    """The Makefile installs the tree with NWOR_BUILD=0, without a second build."""
    done = libraries(**add_nvidia_smi(tmp_path / "bin"), **variables)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, built), done.stderr


@pytest.mark.skipif(bool(ANY_GPU), reason="this machine has a GPU")
@pytest.mark.parametrize("script", [None, "echo NVIDIA-SMI has failed; exit 9"])
def test_cpu_library_is_built_without_gpu(tmp_path: pathlib.Path, script: str | None) -> None:
    done = libraries(**({} if script is None else add_nvidia_smi(tmp_path / "bin", script)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("['cpu']\n")
    assert "building the CPU library only: nvcc was not found" in done.stdout


# ---------------------------------------------------------------- architectures of the CUDA library

NVCC = """#!/bin/sh
case "$1" in
--version) echo 'Cuda compilation tools, release 13.0, V13.0.88' ;;
--list-gpu-code) echo 'sm_75 sm_80 sm_86 sm_90' ;;
*) exit 1 ;;
esac
"""


def add_nvcc(folder: pathlib.Path) -> pathlib.Path:
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    return nvcc


@pytest.mark.parametrize(
    ("capabilities", "wanted", "architectures"),
    [
        ("9.0 8.6 9.0", "", "8.6;9.0"),
        ("9.0", "1", None),  # `make dist`
        ("7.5 9.0", "", None),  # too old for the kernels
        ("12.0", "", None),  # too new for this nvcc
        ("[N/A]", "", None),
        ("", "", None),
    ],
)
def test_gpus_choose_the_architectures(
    capabilities: str, wanted: str, architectures: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'[ "$1" = --query-gpu=compute_cap ] && printf "%s\\n" {capabilities}'
    monkeypatch.setenv("PATH", add_nvidia_smi(tmp_path / "smi", script)["PATH"])
    monkeypatch.setenv("NWOR_BUILD_CUDA", wanted)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    expected = setup["RELEASE_ARCHITECTURES"] if architectures is None else architectures
    assert setup["default_architectures"](str(add_nvcc(tmp_path / "cuda"))) == expected


def test_old_nvcc_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = add_nvcc(tmp_path)
    nvcc.write_text(NVCC.replace("13.0", "11.8"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    problem = runpy.run_path(str(ROOT / "setup.py"))["cuda_problem"]()
    assert problem == f"{nvcc} is of CUDA 11.8, 12.8 or newer is needed; install it or set CUDA_HOME"


def test_terminal_shows_what_is_compiled(tmp_path: pathlib.Path) -> None:
    """pip hides both streams of a build, and so does this shell. The nvcc compiles nothing, so the build fails."""
    tree = Tree(tmp_path / "tree")
    tree.write("csrc/cuda/three.cu", "")
    build = f"{shlex.quote(sys.executable)} setup.py -q build_ext --inplace >log 2>&1"
    variables = {"CUDA_HOME": str(add_nvcc(tmp_path / "cuda").parent.parent), "TORCH_CUDA_ARCH_LIST": "9.0"}
    variables |= {name: value for name, value in os.environ.items() if name not in {"NWOR_BUILD_CUDA", *variables}}
    command = [sys.executable, "-c", f"import pty; pty.spawn(['sh', '-c', {build!r}])"]
    done = subprocess.run(command, cwd=tree.folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=300, check=True)  # fmt: skip
    assert "nwor_ops: compiling CUDA kernels for compute capability 9.0 (about " in done.stdout
    assert "three.cu" in (tree.folder / "log").read_text()
