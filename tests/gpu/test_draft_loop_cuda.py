"""Graphs of the draft loop on a GPU: one graph for all steps, and one graph per step.

They are compared with eager drafting and with drafting without a loop, per position. Also tested: when graphs are
captured, addresses, allocations, waits, launches, and ranks.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from draft_loops import (
    NEVER,
    Follower,
    HostPlannedAdapter,
    WatchedAdapter,
    draft,
    make_drafter,
    make_round,
    plain_drafts,
    play,
    require_inert,
    require_metadata_of_every_step,
    require_only_own_slots_written,
)
from no_sync import no_waits
from processes import SUPPORT, environment

from nwor_ops.drafter import GraphKey
from nwor_ops.drafter.graphs import places_of
from nwor_ops.testing.ports import free_port

NUM_DRAFTS = (1, 2, 3, 5, 8)
SIZES = (1, 4, 16, 64)
BATCHES = (64, 1, 33, 4, 16, 3, 7)  # a large batch leaves junk in the rows that are padded in smaller ones
GRAPHS = ("step", "loop")
MAX_LEN = 40


@pytest.fixture(scope="module")
def drafters(device):
    """Return one captured drafter per K, for the module."""
    made = {}

    def get(num_drafts):
        if num_drafts not in made:
            made[num_drafts] = make_drafter(num_drafts, max(SIZES), device, max_len=MAX_LEN)
            made[num_drafts].capture(list(SIZES), GRAPHS)
        return made[num_drafts]

    return get


def padded_to(num_reqs):
    return min(size for size in SIZES if size >= num_reqs)


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
def test_three_modes_equal_plain_drafting(drafters, num_drafts, temperature):
    """Every position of every request.

    Eager runs use the batch's own shape and the graph's shape. Positions, slots and windows of each step are compared,
    and no other slot is written. Debug mode compares addresses before each replay.
    """
    drafter = drafters(num_drafts)
    drafter.temperature.fill_(temperature)
    for number, num_reqs in enumerate(BATCHES):
        batch, padded = make_round(drafter, num_reqs, seed=100 * num_drafts + number), padded_to(num_reqs)
        expected = plain_drafts(drafter, batch.texts, batch.states)
        ways = [("eager", {}), ("eager", {"padded": padded}), *((mode, {}) for mode in GRAPHS)]
        ways += [(mode, {"replay": False}) for mode in GRAPHS]
        for mode, options in ways:
            assert draft(drafter, batch, mode, **options) == expected, (num_reqs, mode, options)
            require_metadata_of_every_step(drafter, batch, num_reqs if (mode, options) == ("eager", {}) else padded)
            require_only_own_slots_written(drafter, batch)
            assert (drafter.buffers.draft_tokens[num_reqs:, 1:] == NEVER).all()


@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
def test_drafts_at_the_model_limit(drafters, num_drafts):
    """Sequences of each length around block and window boundaries, and up to max_len."""
    drafter = drafters(num_drafts)
    drafter.temperature.fill_(0.0)
    most = MAX_LEN - num_drafts - 2
    batch = make_round(drafter, most, 5, lengths=list(range(most, 0, -1)))
    batch.num_rejected[:3] = 0
    expected = plain_drafts(drafter, batch.texts, batch.states)
    assert len(batch.texts[0]) == MAX_LEN
    for mode in GRAPHS:
        assert draft(drafter, batch, mode) == expected
        require_metadata_of_every_step(drafter, batch, padded_to(most))
        require_only_own_slots_written(drafter, batch)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_many_rounds(device, temperature):
    """One capture and many consecutive batches, with eager prefills in between."""
    drafter = make_drafter(4, 17, device, max_len=120)
    drafter.capture([17], GRAPHS)
    expected = play(drafter, "eager", 12, temperature)
    for mode in ("auto", *GRAPHS):
        assert play(drafter, mode, 12, temperature) == expected
    # 16 of 17 rows are real. Prompts ran eagerly, and every round of "auto" was a whole loop.
    assert drafter.loop.counts["decode", "loop"] == drafter.loop.counts["first_pass", "loop"] == 24
    assert drafter.loop.counts["decode", "step"] == 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
def test_hidden_states_and_poisoned_tails(device, num_drafts, temperature):
    """Junk in every padded row, and the state after the last step.

    Batches of growing and shrinking size run through the same graphs, without a first pass, and the loop pads them.
    """
    follower = Follower(num_drafts, 16, 30, device, debug=True)
    follower.loop.capture([GraphKey(rows) for rows in (4, 16)], GRAPHS)
    follower.temperature.fill_(temperature)
    for num_reqs in (16, 2, 11, 4, 1):
        for mode in (*GRAPHS, "eager"):
            follower.load(num_reqs, seed=num_reqs)
            expected = follower.plain(num_reqs)
            tail = follower.buffers.hidden_states[num_reqs:].clone()
            follower.loop.run(num_reqs, mode)
            left = follower.left(num_reqs)
            if num_drafts > 1:
                torch.testing.assert_close(left.pop("hidden"), expected.pop("hidden"), rtol=1e-9, atol=1e-9)
                assert left == expected, (num_reqs, mode)
            assert (follower.buffers.draft_tokens[num_reqs:] == NEVER).all()
            assert torch.equal(follower.buffers.hidden_states[num_reqs:], tail)
            if num_drafts > 1 and mode != "eager":
                rows = 4 if num_reqs <= 4 else 16
                require_inert(follower.buffers, num_reqs, rows)
                assert (follower.loop.metadata.slots[0, num_reqs:rows] == -1).all()
    if num_drafts == 1:
        assert not follower.loop.counts


def test_own_sampler_is_captured(device):
    """Torch's argmax as int64 and int32, captured."""
    outputs = []
    for sample in (lambda logits: logits.argmax(-1), lambda logits: logits.argmax(-1).int(), None):
        follower = Follower(4, 8, 30, device)
        if sample is not None:
            follower.loop.sample_fn = lambda key, hidden, sample=sample, follower=follower: sample(
                follower.logits(hidden)
            )
        follower.loop.capture([GraphKey(8)], GRAPHS)
        for mode in GRAPHS:
            follower.load(5, seed=3)
            outputs.append(follower.loop.run(5, mode).tolist())
    assert outputs == outputs[:1] * 6


def test_host_planned_metadata_takes_a_graph_per_step(device, caplog):
    """`auto` logs its choice and the reason once. The step graphs serve first pass and loop."""
    drafter = make_drafter(5, 8, device, adapter=HostPlannedAdapter)
    drafter.capture([8])
    batch = make_round(drafter, 6, 0)
    expected = plain_drafts(drafter, batch.texts, batch.states)
    with caplog.at_level(logging.INFO, logger="nwor_ops"):
        assert [draft(drafter, batch, "auto") for _ in range(3)] == [expected] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "nwor draft loop, first pass of 7 tokens: step, because: this back end plans on the host",
        "nwor draft loop, decode steps: step, because: this back end plans on the host",
    ]
    assert drafter.loop.counts["decode", "step"] == drafter.loop.counts["first_pass", "step"] == 3
    require_metadata_of_every_step(drafter, batch, 8)
    with pytest.raises(ValueError, match="mode 'loop' needs metadata that is updated in place: this back end plans"):
        drafter.capture([8], ("loop",))


def test_larger_batches_run_eagerly(device):
    """More requests than the largest graph holds."""
    drafter = make_drafter(3, 8, device)
    drafter.capture([4])
    batch = make_round(drafter, 6, 0)
    assert draft(drafter, batch, "auto") == plain_drafts(drafter, batch.texts, batch.states)
    found = drafter.loop.dispatch(6)
    assert (found.mode, found.reason) == ("eager", "no graph holds more than 4 requests")
    assert drafter.loop.counts["decode", "eager"] == 1
    assert drafter.loop.dispatch(4, 5).key == GraphKey(4, 5)
    assert drafter.loop.dispatch(4, 9).reason == "no graph has query length 9"


def test_each_number_of_drafts_has_graphs(device):
    """All numbers share one first pass. Each has a graph of the loop for the requested numbers of requests.

    With a graph per step, fewer of them are replayed.
    """
    drafter = make_drafter(5, 8, device)
    drafter.capture([8, 4])
    for num_drafts in (3, 2, 1):
        drafter.loop.capture([GraphKey(4)], num_drafts=num_drafts)
    drafter.loop.capture([GraphKey(8)], ("step",), num_drafts=2)
    for num_reqs in (3, 7, 4):
        batch = make_round(drafter, num_reqs, num_reqs)
        expected = plain_drafts(drafter, batch.texts, batch.states)
        for num_drafts in (5, 3, 2, 1, 4):
            drafter.loop.counts.clear()
            found = draft(drafter, batch, "auto", num_drafts=num_drafts)
            assert found == [row[:num_drafts] for row in expected]
            assert (drafter.buffers.draft_tokens[:, num_drafts:] == NEVER).all()
            require_only_own_slots_written(drafter, batch)
            captured = num_drafts == 5 or (num_drafts in (2, 3) and num_reqs <= 4)
            ran = {("decode", "loop" if captured else "step"): 1} if num_drafts > 1 else {}
            assert drafter.loop.counts == {("first_pass", "loop"): 1, **ran}
    drafter.loop.invalidate("the test")
    drafter.loop.capture([GraphKey(8)])
    assert drafter.loop.dispatch(2, num_drafts=3).reason == "no graph has query length 1 and 3 drafts"
    with pytest.raises(RuntimeError, match=r"GraphKey\(num_reqs=2, query_len=1\) and 3 drafts in mode 'loop'"):
        drafter.loop.run(2, "loop", num_drafts=3)


# ---------------------------------------------------------------- capture


class NotingAdapter(WatchedAdapter):
    """Record each build for a capture, and the contents of the buffers at that time."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.notes = []

    def build(self, key, num_reqs, step, capturing=False):
        if capturing:
            starts, lens = self.buffers.query_start_loc[: key.num_reqs + 1].tolist(), self.buffers.seq_lens.tolist()
            self.notes.append((key, num_reqs, step, starts, lens[: key.num_reqs], int(self.buffers.idx_mapping.max())))
        return super().build(key, num_reqs, step, capturing)


def test_capture_order(device):
    """The shapes of the first pass come before those of the loop, and larger ones come first.

    Each shape has one build for the warm-up and one for the capture, on a batch of exactly that shape.
    """
    drafter = make_drafter(3, 8, device, adapter=NotingAdapter)
    drafter.capture([2, 8, 4])
    expected = [GraphKey(rows, length) for length in (5, 1) for rows in (8, 4, 2)]
    notes = drafter.loop.metadata.notes
    assert [note[0] for note in notes] == [key for key in expected for _ in range(2)]
    for key, num_reqs, step, starts, lens, largest in notes:
        assert (num_reqs, step, largest) == (0, 0 if key.query_len > 1 else 1, -1)
        assert starts == [key.query_len * row for row in range(key.num_reqs + 1)]
        assert lens == [key.query_len] * key.num_reqs
    notes.clear()
    drafter.capture([4, 2, 1])  # only new shapes
    assert [note[0] for note in notes] == [GraphKey(1, 5)] * 2 + [GraphKey(1)] * 2


def test_capture_writes_no_cache(device):
    drafter = make_drafter(3, 8, device)
    for cache in drafter.caches:
        cache.fill_(7)
    drafter.capture([8, 1], GRAPHS)
    torch.cuda.synchronize()
    assert all((cache == 7).all() for cache in drafter.caches)


def test_one_draft_captures_no_loop(device):
    follower = Follower(1, 4, 30, device)
    follower.loop.capture([GraphKey(4)])
    assert follower.loop.dispatch(2).mode == "eager"


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
            follower.loop.capture([GraphKey(8), GraphKey(4)], GRAPHS)
        torch.cuda.synchronize()
        for mode in GRAPHS:
            follower.load(7, seed=3)
            outputs.append(follower.loop.run(7, mode).tolist())
            other = torch.cuda.Stream()
            follower.load(7, seed=3)
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                follower.loop.run(7, mode)
            torch.cuda.synchronize()
            outputs.append(follower.buffers.draft_tokens[:7].tolist())
    assert outputs == outputs[:1] * 12
    assert len(entered) == 4


def test_invalidate(device):
    """Everything runs eagerly until the next capture, which uses the new addresses."""
    drafter = make_drafter(3, 8, device)
    drafter.capture([8])
    batch = make_round(drafter, 5, 0)
    expected = plain_drafts(drafter, batch.texts, batch.states)
    assert draft(drafter, batch, "auto") == expected
    drafter.loop.invalidate("the cache is allocated anew")
    assert drafter.loop.dispatch(5).reason == "the graphs were dropped: the cache is allocated anew"
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


# ---------------------------------------------------------------- addresses


def test_memory_never_moves(device):
    """The addresses of all buffers and builds stay, over steps, batches and captures."""
    drafter = make_drafter(3, 8, device)
    places = []
    for seed in range(3):
        if seed == 1:
            drafter.capture([8], GRAPHS)
        batch = make_round(drafter, 5 + seed, seed)
        for mode in ("eager", *(GRAPHS if seed else ())):
            draft(drafter, batch, mode)
        now = places_of(drafter.buffers.tensors())
        for key in (GraphKey(8), GraphKey(8, 5)):
            drafter.buffers.fill_for_warm_up(key)
            metadata = drafter.loop.metadata.build(key, 3, 1)
            now |= {(key, name): place for name, place in places_of(vars(metadata)).items()}
        places.append(now)
    assert places == places[:1] * 3
    assert len(places[0]) > 15


def test_moved_buffer_is_refused(device):
    """Debug mode names the buffer before the replay."""
    follower = Follower(3, 4, 30, device, debug=True)
    follower.loop.capture([GraphKey(4)], GRAPHS)
    follower.load(3, 0)
    follower.loop.run(3, "step")
    kept, follower.buffers.positions = follower.buffers.positions, follower.buffers.positions.clone()
    for mode in GRAPHS:
        with pytest.raises(RuntimeError, match=r"DraftLoop: buffers\['positions'\] must not move or change after the"):
            follower.loop.run(3, mode)
    follower.buffers.positions = kept
    follower.buffers.registered["seeds"] = follower.seeds[:3]
    with pytest.raises(
        RuntimeError, match=r"DraftLoop: buffers\['seeds'\] must not move .* torch.int64 \[4\] .* got .* \[3\]"
    ):
        follower.loop.run(3, "loop")


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
    """Neither the loop nor the first pass allocates, and neither does an in-place build between steps."""
    drafter, follower = make_drafter(4, 8, device, debug=False), Follower(4, 8, 30, device)
    drafter.capture([8])
    follower.loop.capture([GraphKey(8)], GRAPHS)
    batch = make_round(drafter, 6, 0)
    expected = draft(drafter, batch, "loop")
    drafter.target.load(batch.verified, batch.lengths, batch.num_rejected, batch.states, batch.next_tokens)
    follower.load(6, 0)
    states = batch.states.to(device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    drafts = drafter.propose(states, batch.verified.shape[1], "loop")
    for mode in GRAPHS:
        follower.loop.run(6, mode)
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert drafts.tolist() == expected


def test_nothing_waits(device):
    """The host waits for the device in no mode."""
    drafter, follower = make_drafter(4, 8, device, debug=False), Follower(4, 8, 30, device)
    drafter.capture([8], GRAPHS)
    follower.loop.capture([GraphKey(8)], GRAPHS)
    batch = make_round(drafter, 6, 0)
    follower.load(6, 0)
    draft(drafter, batch, "eager")
    states = batch.states.to(device)
    with no_waits():
        for mode in ("eager", *GRAPHS):
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

    The whole loop is one graph launch. A graph per step needs K - 1 launches. Each graph contains all kernels of its
    steps.
    """
    num_drafts = 5
    follower = Follower(num_drafts, 8, 30, device)
    follower.loop.capture([GraphKey(8)], GRAPHS)
    drafter = make_drafter(num_drafts, 8, device, debug=False)
    drafter.capture([8])
    follower.load(8, 0)
    kernels = {}
    for mode, expected in (("loop", 1), ("step", num_drafts - 1), ("eager", 0)):
        calls, kernels[mode] = launches(lambda mode=mode: follower.loop.run(8, mode))
        assert calls["cudaGraphLaunch"] == expected, calls
        other = sum(count for name, count in calls.items() if "LaunchKernel" in name)
        if mode == "loop":
            assert other == 0, calls
        elif mode == "step":  # those of the step counter and of the slots
            assert other == 2 * (num_drafts - 1), calls
        else:
            assert other > 4 * (num_drafts - 1), calls
    assert kernels["loop"] >= 4 * (num_drafts - 1)
    assert abs(kernels["loop"] - kernels["eager"]) <= 2, kernels
    assert abs(kernels["step"] - kernels["eager"]) <= 2, kernels

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
            assert f"rank {rank} of {ranks}: 6 batches, 3 modes, the same drafts" in said
    finally:
        for process in running:
            process.kill()
