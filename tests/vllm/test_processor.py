"""``NWOR_TEST_CPU``: a limited run tells vLLM about fewer processor features, here and in the processes that it
starts."""

from __future__ import annotations

import os
import subprocess
import sys

import processor
import pytest
import torch

ASK = """
import json, torch
from vllm import _custom_ops
import processor
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
print(json.dumps([processor.vllm_library(), _get_attn_isa(torch.bfloat16, 32, 64)]))
"""


def can_be(level: processor.Level) -> bool:
    return bool(torch.cpu.get_capabilities().get(level.needs))


def test_vllm_loads_the_library_of_a_limited_processor() -> None:
    """For the limit of this test run, if it has one."""
    from vllm import _custom_ops  # noqa: F401

    level = processor.LEVELS.get(os.environ.get(processor.VARIABLE, ""))
    library = processor.vllm_library()
    assert library in {known.library for known in processor.LEVELS.values()}
    if level is not None:
        assert library == level.library


@pytest.mark.parametrize("name", [name for name, level in processor.LEVELS.items() if can_be(level)])
def test_a_process_that_is_started_is_limited_too(name: str) -> None:
    level = processor.LEVELS[name]
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=processor.environment(name), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == f'["{level.library}", "{"amx" if name == "amx" else "vec"}"]'


def test_features_beyond_the_limit_are_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a simulated processor with every feature."""
    everything = {"avx2": True, "avx512_f": True, "avx512_bf16": True, "amx_tile": True, "architecture": "x86_64"}
    expected = {
        "avx2": ["avx2"],
        "avx512": ["avx2", "avx512_f"],
        "avx512_bf16": ["avx2", "avx512_bf16", "avx512_f"],
        "amx": ["amx_tile", "avx2", "avx512_bf16", "avx512_f"],
    }
    for name, level in processor.LEVELS.items():
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: everything)
        processor._deny(torch.cpu, level)
        left = torch.cpu.get_capabilities()
        assert left["architecture"] == "x86_64"
        assert sorted(feature for feature, has in left.items() if has is True) == expected[name]
        assert torch.cpu._is_amx_tile_supported() == (name == "amx")


@pytest.mark.parametrize("asked", ["amx", "avx1024"])
def test_more_than_the_processor_has_is_refused(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    monkeypatch.setenv(processor.VARIABLE, asked)
    message = "this processor has none; it can be avx2$" if asked == "amx" else "must be one of avx2, .*got 'avx1024'"
    with pytest.raises(ValueError, match=message):
        processor.apply()
