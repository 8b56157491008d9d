"""The ops of family drafter give the results of the vLLM kernels, which run in Triton's interpreter."""

from __future__ import annotations

import pathlib

from processes import interpreted


def test_ops_are_vllm_s_kernels(tmp_path: pathlib.Path) -> None:
    said = interpreted("draft_kernels.py", str(tmp_path / "vllm_kernels.py"))
    assert said.strip() == "30 batches equal"
