"""Graphs of the draft loop on a GPU.

They are compared with eager drafting and with drafting without a loop, per position. Also tested: captures,
allocations, waits, launches, and ranks. `tests/drafter` tests the choice and the order of graphs, with stand-ins.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from draft_loops import (
    NEVER,
    Follower,
    draft,
    make_drafter,
    make_round,
    plain_drafts,
    play,
    require_metadata_of_every_step,
    require_only_own_slots_written,
)
from no_sync import no_waits
from processes import SUPPORT, environment

from nwor_ops.drafter import GraphKey
from nwor_ops.testing.engine_process import free_port

NUM_DRAFTS = (1, 2, 3, 5, 8)
SIZES = (1, 4, 16, 64)
BATCHES = (64, 1, 33, 4, 16, 3, 7)  # a large batch leaves junk in the rows that are padded in smaller ones
MODES = ("eager", "loop")
MAX_LEN = 40


@pytest.fixture(scope="module")
def drafters(device):
    """Return one captured drafter per K, for the module."""
    made = {}

    def get(num_drafts):
        if num_drafts not in made:
            made[num_drafts] = make_drafter(num_drafts, max(SIZES), device, max_len=MAX_LEN)
            made[num_drafts].capture(list(SIZES))
        return made[num_drafts]

    return get


def padded_to(num_reqs):
    return min(size for size in SIZES if size >= num_reqs)


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
def test_both_modes_equal_plain_drafting(drafters, num_drafts, temperature):
    """Every position of every request.

    Eager runs use the batch's own shape and the graph's shape. Positions, slots and windows of each step are compared,
    and no other slot is written. Debug mode compares addresses before each replay.
    """
    drafter = drafters(num_drafts)
    drafter.temperature.fill_(temperature)
    for number, num_reqs in enumerate(BATCHES):
        batch, padded = make_round(drafter, num_reqs, seed=100 * num_drafts + number), padded_to(num_reqs)
        expected = plain_drafts(drafter, batch.texts, batch.states)
        for mode, options in (("eager", {}), ("eager", {"padded": padded}), ("loop", {}), ("loop", {"replay": False})):
            assert draft(drafter, batch, mode, **options) == expected, (num_reqs, mode, options)
            require_metadata_of_every_step(drafter, batch, num_reqs if (mode, options) == ("eager", {}) else padded)
            require_only_own_slots_written(drafter, batch)
            assert (drafter.buffers.draft_tokens[num_reqs:, 1:] == NEVER).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_rounds(device, temperature):
    """One capture and many consecutive batches, with eager prefills in between."""
    drafter = make_drafter(4, 17, device, max_len=120)
    drafter.capture([17])
    expected = play(drafter, "eager", 12, temperature)
    for mode in ("auto", "loop"):
        assert play(drafter, mode, 12, temperature) == expected
    # 16 of 17 rows are real. Prompts ran eagerly, and every round of "auto" was a whole loop.
    assert drafter.loop.counts["decode", "loop"] == drafter.loop.counts["first_pass", "loop"] == 24


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
def test_hidden_states_and_poisoned_tails(device, num_drafts, temperature):
    """Junk in every padded row, and the state after the last step.

    Batches of growing and shrinking size run through the same graphs, without a first pass, and the loop pads them.
    """
    follower = Follower(num_drafts, 16, 30, device, debug=True)
    follower.loop.capture([GraphKey(rows) for rows in (4, 16)])
    follower.temperature.fill_(temperature)
    for num_reqs in (16, 2, 11, 4, 1):
        for mode in MODES:
            rows = num_reqs if mode == "eager" else 4 if num_reqs <= 4 else 16
            follower.require_plain_drafts(num_reqs, mode, rows, 1e-9)
    if num_drafts == 1:
        assert not follower.loop.counts


# ---------------------------------------------------------------- capture


def test_capture_writes_no_cache(device):
    drafter = make_drafter(3, 8, device)
    for cache in drafter.caches:
        cache.fill_(7)
    drafter.capture([8, 1])
    torch.cuda.synchronize()
    assert all((cache == 7).all() for cache in drafter.caches)


def test_streams_and_pools(device):
    """Captured on the caller's stream into the caller's pool, replayed on another stream."""
    entered = []
    handles = [torch.cuda.graph_pool_handle() for _ in range(2)]

    @contextmanager
    def pool():
        entered.append(1)
        yield handles[1]

    outputs = []
    for given in (None, handles[0], pool):
        follower = Follower(4, 8, 30, device, pool=given)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            follower.loop.capture([GraphKey(8), GraphKey(4)])
        torch.cuda.synchronize()
        follower.load(7, seed=3)
        outputs.append(follower.loop.run(7, "loop").tolist())
        other = torch.cuda.Stream()
        follower.load(7, seed=3)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            follower.loop.run(7, "loop")
        torch.cuda.synchronize()
        outputs.append(follower.buffers.draft_tokens[:7].tolist())
    assert outputs == outputs[:1] * 6
    assert len(entered) == 2


def test_invalidate(device):
    """Everything runs eagerly until the next capture, which uses the new addresses."""
    drafter = make_drafter(3, 8, device)
    drafter.capture([8])
    batch = make_round(drafter, 5, 0)
    expected = plain_drafts(drafter, batch.texts, batch.states)
    assert draft(drafter, batch, "auto") == expected
    drafter.loop.invalidate("the cache is allocated anew")
    assert drafter.loop.graph_for(5) is None
    with pytest.raises(RuntimeError, match="no graph was captured for"):
        draft(drafter, batch, "loop")
    for layer, cache in enumerate(drafter.caches):
        drafter.caches[layer] = drafter.model.attention[layer].cache = cache.clone()
        cache.fill_(float("nan"))  # wrong drafts would show that a graph still reads it
    assert draft(drafter, batch, "auto") == expected
    drafter.capture([8])
    for _ in range(2):
        assert draft(drafter, batch, "auto") == expected
    assert drafter.loop.counts["decode", "loop"] == 3
    assert drafter.loop.counts["decode", "eager"] == 1


# ---------------------------------------------------------------- garbage, allocations, waits and launches


def test_collector_does_not_break_a_capture(device):
    """The collector must not destroy it during the capture: CUDA would then invalidate the capture."""
    stream, x, before = torch.cuda.Stream(device), torch.zeros(8, device=device), gc.get_threshold()
    drafter = make_drafter(4, 8, device, debug=False)
    gc.collect()
    gc.set_threshold(0)  # not before all graphs of this loop exist
    try:
        for _ in range(20):
            cycle = [torch.cuda.CUDAGraph()]
            with torch.cuda.graph(cycle[0], stream=stream):
                x.add_(1)
            cycle.append(cycle)
        del cycle
        gc.set_threshold(1)  # collect at almost every allocation of an object
        drafter.capture([8])
    finally:
        gc.set_threshold(*before)
    batch = make_round(drafter, 6, 0)
    assert draft(drafter, batch, "loop") == draft(drafter, batch, "eager")


def test_replays_allocate_nothing(device):
    """Neither the loop nor the first pass allocates."""
    drafter, follower = make_drafter(4, 8, device, debug=False), Follower(4, 8, 30, device)
    drafter.capture([8])
    follower.loop.capture([GraphKey(8)])
    batch = make_round(drafter, 6, 0)
    expected = draft(drafter, batch, "loop")
    drafter.target.load(batch.verified, batch.lengths, batch.num_rejected, batch.states, batch.next_tokens)
    follower.load(6, 0)
    states = batch.states.to(device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    drafts = drafter.propose(states, batch.verified.shape[1], "loop")
    follower.loop.run(6, "loop")
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert drafts.tolist() == expected


def test_nothing_waits(device):
    """The host waits for the device in no mode."""
    drafter, follower = make_drafter(4, 8, device, debug=False), Follower(4, 8, 30, device)
    drafter.capture([8])
    follower.loop.capture([GraphKey(8)])
    batch = make_round(drafter, 6, 0)
    follower.load(6, 0)
    draft(drafter, batch, "eager")
    states = batch.states.to(device)
    with no_waits():
        for mode in MODES:
            follower.loop.run(6, mode)
            drafter.propose(states, batch.verified.shape[1], mode)


def launches(run):
    """Return how often a run makes each call, and how many kernels the device runs for it."""
    from torch.profiler import profile, supported_activities

    run()
    torch.cuda.synchronize()
    with profile(activities=supported_activities()) as profiled:
        run()
        torch.cuda.synchronize()
    events = profiled.profiler.kineto_results.events()
    calls = Counter(event.name() for event in events if event.device_type().name == "CPU")
    on_device = [event.name() for event in events if event.device_type().name == "CUDA"]
    # An annotated range has one event on the host and one on the device.
    return calls, len([name for name in on_device if name not in calls])


def test_launches(device):
    """Launches are counted by the profiler, not read from a log.

    The whole loop is one graph launch. The graph contains all kernels of its steps.
    """
    num_drafts = 5
    follower = Follower(num_drafts, 8, 30, device)
    follower.loop.capture([GraphKey(8)])
    drafter = make_drafter(num_drafts, 8, device, debug=False)
    drafter.capture([8])
    follower.load(8, 0)
    kernels = {}
    for mode, expected in (("loop", 1), ("eager", 0)):
        calls, kernels[mode] = launches(lambda mode=mode: follower.loop.run(8, mode))
        assert calls["cudaGraphLaunch"] == expected, calls
        other = sum(count for name, count in calls.items() if "LaunchKernel" in name)
        if mode == "loop":
            assert other == 0, calls
        else:
            assert other > 4 * (num_drafts - 1), calls
    assert kernels["loop"] >= 4 * (num_drafts - 1)
    assert abs(kernels["loop"] - kernels["eager"]) <= 2, kernels

    batch = make_round(drafter, 8, 0)
    draft(drafter, batch, "loop")
    states = batch.states.to(device)

    def first_pass():
        drafter.buffers.idx_mapping.copy_(states)
        drafter.loop.run_first_pass(8, num_drafts + 2)

    calls, _ = launches(first_pass)
    assert calls["cudaGraphLaunch"] == 1, calls
    assert sum(count for name, count in calls.items() if "LaunchKernel" in name) == 0, calls


# ---------------------------------------------------------------- ranks


@pytest.mark.parametrize("ranks", [1, 2] if torch.cuda.device_count() > 1 else [1])
def test_ranks(ranks):
    """Each step has a captured collective, and every rank makes the drafts of a single process,
    per position."""
    port = free_port()
    script = SUPPORT / "draft_loop_ranks.py"
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(ranks), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for rank, process in enumerate(running):
            said, _ = process.communicate(timeout=150)
            assert process.returncode == 0, said
            assert f"rank {rank} of {ranks}: 6 batches, 2 modes, the same drafts" in said
    finally:
        for process in running:
            process.kill()
