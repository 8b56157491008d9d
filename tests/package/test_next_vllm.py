"""``make next-vllm``: differences between two vLLMs, on small trees, and for the nightly run on vLLM's wheels."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys

import next_vllm
import pytest
from next_vllm import Sources

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASE = {
    "vllm/__init__.py": "",
    "vllm/platform.py": "def is_cpu():\n    return False\n",
    "vllm/runner.py": '''
from vllm.base import Base
from .platform import is_cpu

def same(a, b: int = 1) -> int:
    """Add."""
    return a + b  # a comment

def body(a):
    return a

def parameters(a, b):
    return a

def gone(a):
    return a

if is_cpu():
    def branched(a): return a
else:
    def branched(a, b): return b

class Runner(Base):
    size: int

    def execute(self, a):
        return self.helper(a)

    def stays(self):
        return 1
''',
    "vllm/base.py": "class Base:\n    def inherited(self, a):\n        return a\n",
}
NEW = BASE | {
    "vllm/runner.py": """
from vllm.base import Base
from vllm.other import *

def body(a):
    return a + 1

def parameters(a, c, *, d):
    return a

def new(a):
    return a

class Runner(Base):
    size: int
    extra: str

    def execute(self, a):
        return self.helper(a, 0)

    def inherited(self, a):
        return a

    def stays(self):
        return (1)
""",
    "vllm/other.py": """
from vllm.platform import is_cpu

def same(a, b=1):
    return (a + b)

if is_cpu():
    def branched(a): return a
else:
    def branched(a, b): return a
""",
}


def tree(folder: pathlib.Path, files: dict[str, str]) -> Sources:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Sources(folder)


@pytest.mark.parametrize(
    ("name", "expected", "what"),
    [
        ("same", "a, b", None),  # moved, reformatted, other comments, no annotations
        ("body", "a", "body"),
        ("parameters", None, "parameters: without ['b'], with ['c', 'd']"),
        ("parameters", "a, b", "parameters: without ['b'], with ['c', 'd']; the hook does not fit: it takes (a, c, d)"),
        ("gone", "a", "gone"),
        ("new", "a", "new"),
        ("never", "a", "in neither version: look by hand"),
        ("branched", "a, b", "body"),
        ("Runner", None, "parameters: without [], with ['extra']"),
        ("Runner.execute", "a", "body"),
        ("Runner.inherited", "a", None),  # now in the class itself
        ("Runner.stays", "", None),
    ],
)
def test_difference_is_found(name: str, expected: str | None, what: str | None, tmp_path: pathlib.Path) -> None:
    base, new = tree(tmp_path / "base", BASE), tree(tmp_path / "new", NEW)
    change = next_vllm.change_of(base.find("vllm.runner", name), new.find("vllm.runner", name), expected)
    assert (change and change.what) == what
    if what == "body":
        assert change is not None
        assert re.search(r"^-.*\n\+.*", change.diff, re.MULTILINE)


def test_every_hook_is_compared() -> None:
    """As many hooks as the files declare, but those of ``runner_hooks`` and ``_methods`` are made by a loop."""
    declared = set()
    for path in (ROOT / "nwor_ops" / "vllm").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(func=ast.Name(id="Hook"), args=[_, ast.Constant(value=name), *_]):
                    declared.add(name)
    assert len(declared) > 40
    compared = {hook.name for hook in next_vllm.hooks()}
    assert declared - compared == set()
    assert {"GPUModelRunner.sample_tokens", "GPUModelRunner.prepare_attn", "GPUModelRunner._sample"} <= compared


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_hooks_and_imports_are_found() -> None:
    [folder] = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    vllm = Sources(pathlib.Path(folder).parent)
    names = {".".join(name) for name in next_vllm.uses(vllm)}
    assert names >= {
        "vllm.v1.core.sched.scheduler.Scheduler.update_from_output",
        "vllm.v1.engine.output_processor.OutputProcessor.update_scheduler_stats",
        "vllm.forward_context.get_forward_context",  # called
        "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator.StandaloneARSpeculator.capture",  # overridden
    }


def run(version: str, base: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / "next_vllm.py"), version, "--base", base]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if "pip found no wheel" in done.stderr:
        pytest.skip(f"the package index has no wheels of vLLM {base} and {version}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_used_names_are_in_0_33() -> None:
    """CI's engine is 0.32, so a name that 0.33 moved is found here only."""
    assert re.fullmatch(
        r"vLLM 0.33.0 -> 0.33.0: 0 of \d\d\d names that the plugin uses differ.\n", run("0.33.0", "0.33.0")
    )


@pytest.mark.nightly
def test_from_0_32_to_0_33() -> None:
    """On vLLM's wheels. This body changed with 0.33."""
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*) \|$", run("0.33.0", "0.32.0"), re.MULTILINE))
    [what] = [what for row, what in rows.items() if row.endswith(".QwenGatedDeltaNetAttention.get_kv_cache_spec")]
    assert what == "body"
