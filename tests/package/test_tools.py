"""Test the tools that the Makefile runs: links for an older glibc, and runs with sanitizers."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import asan
import pytest
from older_glibc import link_flags
from processes import ROOT


def build(source: str, *flags: str, folder: Path) -> None:
    command = ["g++", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", *flags]
    subprocess.run(command, input=source, text=True, cwd=folder, check=True)


# ---------------------------------------------------------------- older_glibc


def versions(library: Path) -> dict[str, str]:
    table = subprocess.run(["objdump", "-T", str(library)], capture_output=True, text=True, check=True).stdout
    return {name: version for version, name in re.findall(r"\*UND\*.*\(GLIBC_([\d.]+)\)\s+(\S+)", table)}


def test_library_is_linked_for_older_glibc(tmp_path: Path) -> None:
    """dlsym and pthread_key_create have a new version since 2.34, sqrt does not."""
    source = (
        "typedef double function(double);\n"
        "void *dlsym(void *, const char *); int pthread_key_create(unsigned *, void *); double sqrt(double);\n"
        'double ask(double x) { unsigned key; return pthread_key_create(&key, 0) + ((function *)dlsym(0, "cbrt"))(x)'
        " + sqrt(x); }\n"
    )
    build(source, "-o", "plain.so", "-lm", folder=tmp_path)
    flags = link_flags(tmp_path / "plain.so", (2, 28), "g++", tmp_path / "older")
    build(source, "-o", "older.so", *flags, "-lm", folder=tmp_path)
    plain, older = versions(tmp_path / "plain.so"), versions(tmp_path / "older.so")
    assert plain.keys() == older.keys() >= {"dlsym", "pthread_key_create", "sqrt"}
    assert all(tuple(map(int, version.split("."))) <= (2, 28) for version in older.values())
    if plain["dlsym"] != "2.34":
        pytest.skip(f"this machine's glibc has dlsym at version {plain['dlsym']}: nothing was to be done")
    assert flags
    ask = ctypes.CDLL(str(tmp_path / "older.so")).ask
    ask.restype = ctypes.c_double
    assert ask(ctypes.c_double(64.0)) == 4.0 + 8.0


def test_nothing_is_added_for_old_symbols(tmp_path: Path) -> None:
    build("double sqrt(double); double f(double x) { return sqrt(x); }", "-o", "plain.so", "-lm", folder=tmp_path)
    assert link_flags(tmp_path / "plain.so", (2, 28), "g++", tmp_path / "older") == []


# ---------------------------------------------------------------- tools/asan.py


def test_library_without_sanitizers_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that pass with it would show nothing."""
    library = tmp_path / "lib" / "nwor_ops" / "libnwor_cpu.so"
    library.parent.mkdir(parents=True)
    monkeypatch.setattr(asan, "FOLDER", tmp_path)
    library.write_bytes((ROOT / "nwor_ops" / "libnwor_cpu.so").read_bytes())
    assert asan.problem_of_the_build(dict(os.environ)) == "the library does not call __ubsan_handle"
    library.write_bytes(b"__ubsan_handle_shift_out_of_bounds")
    found = asan.problem_of_the_build(dict(os.environ))  # no LD_PRELOAD: nothing watches the read
    assert found.startswith("a read past the end of a tensor was not reported")
