"""Test VLLM_NWOR_DEBUG_SYNC=1, which a process reads once.

Tests marked `debug_mode` run again with it in a separate process. Invalid data then raises the errors of the CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from bad_input import DEBUG_MODE
from processes import ROOT
from transactions import Request, make_batch

from nwor_ops import DraftCommitManager, LayerCache, Layout, ops
from nwor_ops.testing import samples
from nwor_ops.testing.layouts import twin
from nwor_ops.transaction.protocol import State


@pytest.mark.debug_mode
def test_a_replay_is_reported_by_the_next_eager_call(device):
    """A stream that is being captured is never synchronized. Outside debug mode nothing is reported."""
    rows, caches, one = torch.zeros(3, 1, 4), torch.zeros(2, 3, 4, 1, 4), torch.ones(1)
    arguments = twin((rows, rows + 1, *caches, torch.tensor([5, 0, 99]), one, one, "auto"), device)
    other = samples.calls("log_slots", 1, device)[0]
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


@pytest.mark.debug_mode
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_a_commit_that_is_refused_after_its_launch(device, mode):
    """The kernel finds that there are too few ids. Cancel undoes the window, and every draft is counted once.

    Outside debug mode the first commit determines the outcome: a draft without an id is rejected.
    """
    requests = [Request(1, 3, 2), Request(1, 2, 2)]
    batch = make_batch(requests, {"default": [*range(4), *range(16, 19)]}, spare_drafts=0)
    window = batch.window._replace(seq_lens=torch.tensor([4, 3], dtype=torch.int32))
    tables = {"default": torch.tensor([[0], [1]], dtype=torch.int32, device=device)}
    manager = DraftCommitManager(
        max_num_tokens=8, max_num_requests=2, max_draft_tokens=6, device=device, mode=mode, max_drafts_per_request=3
    )
    manager.register_layer("layer", LayerCache.packed(torch.zeros(8, 16, 2, 16, device=device)))
    manager.allocate()
    ids, sampled = batch.draft_token_ids.to(device), batch.sampled_token_ids.to(device)
    manager.bind(Layout({"default": batch.slots["default"].to(device)}, tables))
    manager.begin(twin(window, device))
    accepted = 2
    if DEBUG_MODE:
        with pytest.raises(ValueError, match=r"must not exceed the 3 entries of draft_token_ids, got 5"):
            manager.commit(ids[:3].clone(), sampled)
        manager.cancel()
        accepted = 0
    else:
        manager.commit(ids[:3].clone(), sampled)
    stats = manager.stats()
    assert (stats.windows, stats.drafted, stats.accepted, stats.rejected) == (1, 5, accepted, 5 - accepted)
    assert manager.state is State.CLOSED


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
