"""The structure of csrc and of the families of ops. `make lint` checks the imports of Python."""

from __future__ import annotations

import ast
import os
import re

import pytest
from processes import ROOT
from torch.utils._device import _device_constructors

FAMILIES = {path.stem for path in ROOT.glob("csrc/*.h") if "_" not in path.stem}
# Folders of csrc, and the folders that their files may include.
LEVELS = {"common": ("common",), "": ("common", ""), "cpu": ("common", "", "cpu"), "cuda": ("common", "", "cuda")}


def includes() -> list[tuple[str, str]]:
    """Return each file of csrc with each file of csrc that it includes: from its own folder, otherwise from csrc."""
    csrc = ROOT / "csrc"
    files = {str(path.relative_to(csrc)): path for path in csrc.rglob("*.*") if path.suffix in (".h", ".cpp", ".cu")}
    found = []
    for file, path in sorted(files.items()):
        for name in re.findall(r'^\s*#\s*include\s+"(.+)"', path.read_text(), re.MULTILINE):
            own = os.path.normpath(os.path.join(os.path.dirname(file), name))
            found.append((file, own if own in files else name))
    return found


def test_no_include_leaves_its_level() -> None:
    found = includes()
    assert len(found) > 100
    assert [pair for pair in found if os.path.dirname(pair[1]) not in LEVELS[os.path.dirname(pair[0])]] == []


def test_no_family_includes_a_part_of_another() -> None:
    """Such as cuda/recurrent_rows.h in cuda/undo.cu."""

    def family(file: str) -> str:
        return re.split(r"[_.]", os.path.basename(file))[0]

    parts = [(file, target) for file, target in includes() if "_" in target and family(target) in FAMILIES]
    assert parts
    assert [pair for pair in parts if family(pair[0]) != family(pair[1])] == []


@pytest.mark.parametrize(
    "pattern",
    ["csrc/cpu/{}.cpp", "csrc/cuda/{}.cu", "nwor_ops/ops/{}.py", "nwor_ops/testing/oracle/{}.py",
     "tests/ops/test_{}.py"],
)  # fmt: skip
def test_family_has_one_name_everywhere(pattern: str) -> None:
    assert len(FAMILIES) > 5
    assert [name for name in sorted(FAMILIES) if not (ROOT / pattern.format(name)).exists()] == []


def test_every_new_tensor_names_its_device() -> None:
    """In all code that runs in an engine: engines often set a default device, and pinned memory must be the host's."""
    constructors, calls, nameless = {f"torch.{function.__name__}" for function in _device_constructors()}, 0, []
    for path in sorted({*ROOT.glob("nwor_ops/**/*.py")} - {*ROOT.glob("nwor_ops/testing/**/*.py")}):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in constructors:
                calls += 1
                if not any(keyword.arg == "device" for keyword in node.keywords):
                    nameless.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert calls > 50
    assert nameless == []


def test_every_package_is_shipped() -> None:
    named = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)[1]
    packages = {str(path.parent.relative_to(ROOT)).replace("/", ".") for path in ROOT.glob("nwor_ops/**/__init__.py")}
    assert set(re.findall(r'"(.+?)"', named)) == packages | {"nwor_ops.examples", "nwor_ops.meta"}
