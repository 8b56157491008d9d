"""VLLM_NWOR_DEBUG_SYNC=1, which a process reads once: tests marked `debug_mode` run once more with it, in one of their
own, where bad data raise what they raise on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from bad_input import DEBUG_MODE
from layouts import twin
from processes import ROOT
from samples import int64, sample_inputs, with_arguments

from nwor_ops import ops


@pytest.mark.debug_mode
def test_a_replay_is_reported_by_the_next_eager_call(device):
    """A captured stream is never waited for. Outside debug mode nothing is reported."""
    arguments = twin(with_arguments("write_kv", sample_inputs("write_kv")[0], slot_mapping=int64(5, 0, 99)), device)
    other = twin(sample_inputs("log_slots")[0], device)
    ops.log_slots(*other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.write_kv(*arguments)
    ops.log_slots(*other)
    graph.replay()
    if DEBUG_MODE:
        with pytest.raises(IndexError, match=r"^write_kv: slot_mapping\[2\] must be below 12 .*, got 99$"):
            ops.log_slots(*other)
    ops.log_slots(*other)


def test_debug_mode_raises():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cuda", "-m", "debug_mode"]
    done = subprocess.run(
        [*command, "tests/ops", "tests/gpu/test_debug_mode.py"], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "VLLM_NWOR_DEBUG_SYNC": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert found, done.stdout[-5000:]
    assert int(found[1]) > 100
