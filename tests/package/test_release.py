"""The checks of a release (tools/release.py): a tag and a wheel that must not be published are refused."""

from __future__ import annotations

import pathlib
import re
import shutil
import struct
import subprocess
import sys
import zipfile

import pytest
import release
import support_tables
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIST = "8.0;9.0;12.0+PTX"
CODE = [("machine code", 80), ("machine code", 90), ("machine code", 120), ("PTX", 120)]


def library(folder: pathlib.Path, code: list[tuple[str, int]]) -> bytes:
    """Return a library whose section .nv_fatbin has one container per entry, with padding between them."""
    lines = []
    for kind, architecture in code:
        entry = struct.pack("<HHIQ", {"PTX": 1, "machine code": 2}[kind], 0, 64, 16) + bytes(12)
        entry += struct.pack("<I", architecture) + bytes(64 - 32 + 16)
        container = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry + bytes(8)
        lines.append(".byte " + ",".join(map(str, container)))
    (folder / "code.s").write_text("\n".join(['.section .nv_fatbin, "a"', *lines, ""]))
    command = ["gcc", "-shared", "-nostdlib", "code.s", "-o", "code.so"]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "code.so").read_bytes()


def wheel(folder: pathlib.Path, files: dict[str, bytes], version: str = "1.2.3") -> pathlib.Path:
    path = folder / "nwor_ops-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("nwor_ops-1.2.3.dist-info/METADATA", f"Name: nwor_ops\nVersion: {version}\n\nText")
        for name, content in files.items():
            archive.writestr(f"nwor_ops/{name}", content)
    return path


def test_wheel_without_cuda_library_is_refused(tmp_path: pathlib.Path) -> None:
    path = wheel(tmp_path, {"libnwor_cpu.so": b"cpu"})
    problem = f"{path.name}: nwor_ops/libnwor_cuda.so is missing"
    assert release.problems_of_wheel(path, "1.2.3", LIST) == [problem]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize("missing", [None, *CODE], ids=str)
def test_every_architecture_is_required(missing: tuple[str, int] | None, tmp_path: pathlib.Path) -> None:
    cuda = library(tmp_path, [entry for entry in CODE if entry != missing])
    path = wheel(tmp_path, {"libnwor_cpu.so": b"cpu", "libnwor_cuda.so": cuda})
    found = release.problems_of_wheel(path, "1.2.3", LIST)
    if missing is None:
        assert found == []
    else:
        kind, number = missing
        assert found == [f"{path.name}: libnwor_cuda.so has no {kind} for compute capability {number / 10}"]


@pytest.mark.skipif(not (ROOT / "nwor_ops" / "libnwor_cuda.so").exists(), reason="the CUDA library is not built here")
def test_architectures_of_our_library_are_found() -> None:
    found = release.device_code((ROOT / "nwor_ops" / "libnwor_cuda.so").read_bytes())
    assert found
    assert all(kind in ("PTX", "machine code") and 50 <= number < 200 for kind, number in found)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_another_version_is_refused(tmp_path: pathlib.Path) -> None:
    files = {"libnwor_cpu.so": b"cpu", "libnwor_cuda.so": library(tmp_path, CODE)}
    path = wheel(tmp_path, files, version="1.2.4")
    problem = f"{path.name}: its metadata is of nwor_ops 1.2.4, expected nwor_ops 1.2.3"
    assert release.problems_of_wheel(path, "1.2.3", LIST) == [problem]


@pytest.mark.parametrize(
    ("tag", "heading", "problem"),
    [
        ("v1.2.3", "1.2.3 (2026-11-30)", None),
        ("v1.2.4", "1.2.3 (2026-11-30)", "the tag is v1.2.4, but pyproject.toml has version 1.2.3"),
        ("1.2.3", "1.2.3 (2026-11-30)", "the tag is 1.2.3, but"),
        ("v1.2.3", "1.2.3 (unreleased)", "got 'unreleased'"),
        ("v1.2.3", "1.2.2 (2026-11-30)", "got 'none'"),
    ],
)
def test_tag_version_and_changelog_must_agree(tag: str, heading: str, problem: str | None) -> None:
    found = release.problems_of_tag(tag, "1.2.3", f"# Changelog\n\n## {heading}\n- A line.\n")
    assert [problem in one for one in found if problem] == [True] * len(found)
    assert bool(found) == (problem is not None)


def test_notes_are_the_section_of_the_version() -> None:
    changelog = "# Changelog\n\n## 1.3 (2026-12-01)\n- New.\n\n## 1.2.3 (2026-11-30)\n### Ops\n- Old.\n\n## 1.2 (x)\n"
    assert release.section(changelog, "1.2.3") == ("2026-11-30", "### Ops\n- Old.")


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_commands_of_a_workflow_exist(path: pathlib.Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    assert all(set(job.get("needs", ())) <= set(jobs) or job["needs"] in jobs for job in jobs.values())
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = set(re.findall(r"^make ([a-z-]+)$", "\n".join(commands), re.MULTILINE))
    targets |= {
        target for job in jobs.values() for target in job.get("strategy", {}).get("matrix", {}).get("target", ())
    }
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets - known == set()
    scripts = set(re.findall(r"\btools/\w+\.py|\.ci/\w+", "\n".join(commands)))
    assert targets or scripts
    assert [name for name in sorted(scripts) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["ci", "nightly"])
def test_workflows_with_tests_install_promtool(name: str) -> None:
    """Tests of the alert rules skip without it (tests/support/prometheus.py), and the workflow would still pass."""
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    [packages] = re.findall(r"apt-get install ((?:--\S+ )*)(.+)$", text, re.MULTILINE)
    assert "prometheus" in packages[1].split()


def test_command_refuses_with_exit_status_1() -> None:
    command = [sys.executable, str(ROOT / "tools" / "release.py"), "v9.9.9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("release: the tag is v9.9.9, but pyproject.toml has version ")


def test_container_has_newest_supported_vllm() -> None:
    [version] = re.findall(r"^FROM vllm/vllm-openai:v(\d+\.\d+)\.\d+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert support_tables.vllm_versions().splitlines()[2].startswith(f"| {version} | CUDA |")
