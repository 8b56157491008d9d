"""Test the packages of `make dist` as a user gets them: installed into fresh environments.

Each is tried with the torch that `make setup` takes, and with the newest of `make matrix`. `make test-dist` runs these
tests. They download both, and build the sdist.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from matrix import Environment, tomllib  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOL, VERSION = PROJECT["tool"]["nwor_ops"], PROJECT["project"]["version"]
[WHEEL] = (ROOT / "dist").glob("*.whl")
[SDIST] = (ROOT / "dist").glob("*.tar.gz")
CLI = ["typer", "rich"]
SENTENCE = "nwor-ops: typer is not installed; install it with: pip install '.[cli]' in a checkout, or 'nwor_ops[cli]'"
AN_OP = """
import torch, nwor_ops
cache = torch.zeros(2, 4, 1, 4)
log = torch.full((3, 1, 4), 7.0)
cache[1, 2] = 5.0
nwor_ops.log_slots(cache, torch.tensor([0, 6, -1]), torch.tensor([2, 0, -1], dtype=torch.int32), log)
assert log.tolist() == [[[5.0] * 4], [[7.0] * 4], [[0.0] * 4]], log
print(nwor_ops.__file__)
"""


def run(*command: object, **options) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=1800, check=False, **options)


class Fresh(Environment):
    """An environment without nwor_ops, however the last run left it."""

    def __init__(self, version: str):
        super().__init__(ROOT / "build" / "packages", version)
        self.make()
        self.pip("uninstall", "--yes", "nwor_ops", *CLI)

    def pip(self, *words: object, **variables: str) -> None:
        self.run("-m", "pip", "--disable-pip-version-check", *map(str, words), **variables)

    def doctor(self, *options: str) -> list[subprocess.CompletedProcess[str]]:
        """Run the command in both ways, outside the checkout."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables |= {"COLUMNS": "200", "TERM": "dumb"}
        commands = (self.folder / "bin" / "nwor-ops",), (self.python, "-m", "nwor_ops")
        return [run(*command, "doctor", *options, env=variables, cwd=self.folder) for command in commands]

    def says_what_is_missing(self) -> None:
        for done in self.doctor():
            assert (done.returncode, done.stdout) == (1, "")
            # Before it torch may say that there is no NumPy.
            assert done.stderr.splitlines()[-1] == SENTENCE
            assert "Traceback" not in done.stderr

    def works(self) -> None:
        for done in self.doctor("--json"):
            assert done.returncode == 0, done.stdout + done.stderr
            findings = {(row["section"], row["name"]): row for row in json.loads(done.stdout)["findings"]}
            assert findings["versions", "torch"]["detail"].startswith(self.version)
            assert findings["versions", "nwor_ops"]["detail"] == VERSION
            assert findings["libraries", "cpu"]["ok"] is True
            assert findings["families of ops", "undo, cpu"]["ok"] is True
        assert Path(self.run("-c", AN_OP, cwd=self.folder).strip()).is_relative_to(self.folder)


@pytest.fixture(scope="module")
def usual() -> Fresh:
    return Fresh(TOOL["torch"])


@pytest.fixture(scope="module")
def newest() -> Fresh:
    return Fresh(TOOL["torch-matrix"][-1])


@pytest.mark.parametrize("torch", ["usual", "newest"])
def test_wheel(torch: str, request: pytest.FixtureRequest) -> None:
    fresh = request.getfixturevalue(torch)
    fresh.pip("install", WHEEL)
    fresh.says_what_is_missing()
    fresh.pip("install", f"{WHEEL}[cli]")
    fresh.works()


def test_tests_pass_with_wheel(usual: Fresh) -> None:
    """Outside the checkout, with the tests that need only torch. A failed test raises."""
    loaded, summary = usual.test(WHEEL)
    assert "('cpu', 'loaded')" in loaded
    assert int(re.findall(r"(\d+) passed", summary)[0]) > 1000


def test_sdist_builds_in_isolation(usual: Fresh) -> None:
    """The build environment is pip's own; a bare torch>=... would be a CUDA build of several GB there."""
    constraint = usual.folder / "build-constraint.txt"
    constraint.write_text(f"torch=={TOOL['torch']}+cpu\n")
    index = {"PIP_EXTRA_INDEX_URL": url} if (url := os.environ.get("TORCH_INDEX")) else {}
    usual.pip("uninstall", "--yes", "nwor_ops", *CLI)
    usual.pip(
        "install", "--no-cache-dir", f"{SDIST}[cli]", NWOR_BUILD_CUDA="0", PIP_CONSTRAINT=str(constraint), **index
    )
    usual.works()


def test_wheel_without_isolation_with_the_newest_torch(newest: Fresh) -> None:
    """`pip install --no-build-isolation`, the README's command, from the sdist."""
    newest.pip("uninstall", "--yes", "nwor_ops")
    newest.pip("install", *CLI)
    newest.pip("install", "--no-cache-dir", "--no-deps", "--no-build-isolation", SDIST, NWOR_BUILD_CUDA="0")
    newest.works()


def test_old_setuptools_is_a_sentence(usual: Fresh, tmp_path: Path) -> None:
    """Python 3.11's venv brings setuptools 65, and torch before 2.14 does not ask for more."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "setuptools==65.5.0")
    done = run(python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", SDIST)
    assert done.returncode != 0
    assert "nwor_ops: building needs setuptools >= 77, found 65.5.0; upgrade it: pip install" in (
        done.stdout + done.stderr
    )


def test_tags() -> None:
    """auditwheel gives the tag only if the wheel needs no newer symbol of the system."""
    assert WHEEL.name == f"nwor_ops-{VERSION}-py3-none-manylinux_{TOOL['manylinux']}_x86_64.whl"
    [record] = (name for name in zipfile.ZipFile(WHEEL).namelist() if name.endswith(".dist-info/WHEEL"))
    written = zipfile.ZipFile(WHEEL).read(record).decode()
    assert f"Tag: py3-none-manylinux_{TOOL['manylinux']}_x86_64" in written


def test_the_wheel_needs_only_torch_and_the_system(tmp_path: Path) -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        libraries = [wheel.extract(name, tmp_path) for name in wheel.namelist() if name.endswith(".so")]
    for library in libraries:
        needed = set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", library).stdout))
        kind = Path(library).stem.removeprefix("libnwor_")
        assert needed <= {"libtorch.so", f"libtorch_{kind}.so", "libtorch_cpu.so", "libc10.so", "libstdc++.so.6",
                          "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0",
                          "ld-linux-x86-64.so.2"}  # fmt: skip


def test_the_sdist_is_complete() -> None:
    with tarfile.open(SDIST) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files", cwd=ROOT).stdout.split()
    left_out = ("benchmarks/", ".")
    assert [name for name in tracked if name not in names and not name.startswith(left_out)] == []
    assert not [name for name in names if name.endswith((".so", ".pyc", ".log"))]
