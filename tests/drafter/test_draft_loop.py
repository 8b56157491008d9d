"""The draft loop on the CPU: both bodies run from the host, and are compared with drafting without a loop.

Also tested: padding, the choice of a graph, the rules of metadata, and refusals. The graphs are tested in
`tests/gpu/test_draft_loop_cuda.py`.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from draft_loops import (
    NEVER,
    Follower,
    WatchedAdapter,
    draft,
    make_drafter,
    make_round,
    plain_drafts,
    require_inert,
    require_metadata_of_every_step,
    require_only_own_slots_written,
    with_hidden_states,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from no_sync import NoHostReads, as_on_a_device
from paged_drafter import PagedMetadata
from torch.utils._python_dispatch import TorchDispatchMode
from transactions import one_thread  # noqa: F401

from nwor_ops.drafter import DraftBuffers, DraftLoop, DraftMetadata, DraftSampler, GraphKey
from nwor_ops.drafter.loop import addresses_of
from nwor_ops.testing.host_graphs import HostGraphLoop

MODES = ("eager", "loop")


def body(drafter, batch, mode, padded=None, num_drafts=None):
    """Run a mode's body from the host, which is what its graph records."""
    return draft(drafter, batch, mode, replay=False, padded=padded, num_drafts=num_drafts)


# ---------------------------------------------------------------- drafts


@settings(max_examples=settings.default.max_examples * 2 // 3)
@given(st.integers(1, 8), st.integers(1, 23), st.integers(0, 9), st.integers(0, 2**20),
       st.sampled_from([0.0, 0.6, 2.0]), st.sampled_from([9, 24]))  # fmt: skip
def test_random_batches_equal_whole_text(num_drafts, num_reqs, spare, seed, temperature, more):
    """Compare every position of every request, and the metadata of each step. No other slot is written.

    Sequences cross block and window boundaries, and end at the model's limit.
    """
    drafter = make_drafter(num_drafts, num_reqs + spare, max_len=2 * num_drafts + more)
    drafter.temperature.fill_(temperature)
    batch = make_round(drafter, num_reqs, seed)
    expected = plain_drafts(drafter, batch.texts, batch.states)
    for mode in MODES:
        assert body(drafter, batch, mode, num_reqs + spare) == expected
        require_metadata_of_every_step(drafter, batch, num_reqs + spare)
        require_only_own_slots_written(drafter, batch)
        assert (drafter.buffers.draft_tokens[num_reqs:, 1:] == NEVER).all()


@pytest.mark.parametrize("num_drafts", [1, 3, 4, 7])
def test_drafts_beyond_the_limit_write_nothing(num_drafts):
    """The target's token has no position left. The drafts are useless, and no request's cache changes."""
    drafter = make_drafter(num_drafts, 4, max_len=24)
    batch = make_round(drafter, 3, 0, lengths=[23 - num_drafts, 23 - num_drafts, 7])
    batch.num_rejected[:2] = 0
    outputs = [body(drafter, batch, mode, 4) for mode in MODES]
    assert outputs[0] == outputs[1]
    assert outputs[0][2] == plain_drafts(drafter, batch.texts[2:], batch.states[2:])[0]
    require_metadata_of_every_step(drafter, batch, 4)
    require_only_own_slots_written(drafter, batch)


@pytest.mark.parametrize("mode", MODES)
def test_first_pass_pads_stale_rows(mode):
    """An earlier batch left the index of a real request in idx_mapping."""
    drafter = make_drafter(3, 8)
    batch = make_round(drafter, 5, 0)
    expected = plain_drafts(drafter, batch.texts, batch.states)
    body(drafter, batch, mode, 8)  # loads the target's batch
    drafter.buffers.draft_tokens.fill_(NEVER)
    drafter.buffers.idx_mapping[5:].fill_(int(batch.states[0]))
    drafter.loop.run_first_pass(5, 5, mode, key=GraphKey(8, 5), replay=False)
    require_inert(drafter.buffers, 5, 8)
    assert drafter.loop.run(5, mode, key=GraphKey(8), replay=False).tolist() == expected
    require_metadata_of_every_step(drafter, batch, 8)
    require_only_own_slots_written(drafter, batch)


class NoMetadata(DraftMetadata):
    def build(self, key, num_reqs, step, capturing=False): ...

    def update(self, key, metadata): ...


def test_buffers_may_have_more_columns():
    """The result has K columns. The others hold older data."""
    buffers = DraftBuffers.allocate(max_num_reqs=1, num_drafts=5, device="cpu")
    buffers.draft_tokens.fill_(NEVER)
    buffers.idx_mapping[0], buffers.draft_tokens[0, 0], buffers.input_ids[0] = 0, 5, 5
    loop = DraftLoop(
        lambda key, _: buffers.input_ids[: key.num_tokens] + 1, lambda _, output: output, buffers, NoMetadata(),
        num_drafts=3, max_len=16,
    )  # fmt: skip
    assert loop.run(num_reqs=1).tolist() == [[5, 6, 7]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_carried_hidden_states_equal_plain_steps(num_drafts, temperature):
    """Each token goes to its column only.

    The last step changes neither ids nor positions, lengths or hidden states. Padded rows are inert, whatever they
    held.
    """
    follower = Follower(num_drafts, 9, max_len=30, debug=True)
    follower.temperature.fill_(temperature)
    for num_reqs, rows in ((1, 1), (5, 9), (9, 9), (1, 8), (0, 3)):
        for mode in MODES:
            follower.require_plain_drafts(num_reqs, mode, rows, 1e-12, key=GraphKey(rows), replay=False)


# ---------------------------------------------------------------- the parts of a step


class Operations(TorchDispatchMode):
    """Record every operation that is not a view, except the reads of these tests' own records."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func is not torch.ops.aten._local_scalar_dense.default:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def thin_loop():
    """Create a loop whose model and metadata do nothing, so that only the loop's own work is left."""
    num_drafts, rows = 4, 3
    buffers = with_hidden_states(DraftBuffers.allocate(rows, num_drafts, "cpu"), torch.zeros(rows, 8).bfloat16())
    buffers.idx_mapping.copy_(torch.arange(rows))
    logits, states = torch.randn(rows, 50), torch.randn(rows, 8).bfloat16()
    cache = torch.zeros(rows, num_drafts, 50)
    sampler = DraftSampler(buffers, torch.ones(rows), torch.arange(rows), logits_cache=cache)
    seen: list[tuple] = []

    class Metadata:
        def prepare(self, key, num_reqs):
            seen.append(("prepare", key, num_reqs))

        def build(self, key, num_reqs, step, capturing=False):
            seen.append(("build", key, num_reqs, step, capturing, int(buffers.current_draft_step)))
            return "built"

        def update(self, key, metadata):
            seen.append(("update", key, metadata, int(buffers.current_draft_step)))

    def model(key, metadata):
        seen.append(("model", key, metadata, int(buffers.current_draft_step)))
        return logits[: key.num_reqs], states[: key.num_reqs]

    return DraftLoop(model, sampler, buffers, Metadata(), num_drafts, 100), seen, logits, cache


def test_step_is_two_kernels():
    """A step is sampling and update. Neither the hidden state nor the token is copied
    separately."""
    loop, *_ = thin_loop()
    with torch.no_grad(), Operations() as done:
        loop._step(GraphKey(3), "built")
    assert done.names == ["nwor.gumbel_sample.default", "nwor.update_draft_inputs.default"]
    with as_on_a_device(), Operations() as done:
        loop.run(3, "loop", replay=False)
    step = ["aten.fill_.Scalar", "nwor.gumbel_sample.default", "nwor.update_draft_inputs.default"]
    assert done.names == step[:1] + 3 * step  # the first one belongs to the build


def test_order_of_calls():
    """The build is outside the body, before each step, and after the step number is set.

    The model gets the key of the run. In the whole loop, the update replaces the build.
    """
    key = GraphKey(3)
    loop, seen, *_ = thin_loop()
    loop.run(2, "eager", key=key)
    expected = [("prepare", key, 2)]
    for step in (1, 2, 3):
        expected += [("build", key, 2, step, False, step), ("model", key, "built", step)]
    assert seen == expected
    seen.clear()
    loop.run(2, "loop", key=key, replay=False)
    expected = [("prepare", key, 2), ("build", key, 2, 1, False, 1)]
    for step in (1, 2, 3):
        expected += [("update", key, "built", step), ("model", key, "built", step)]
    assert seen == expected


def test_sampler_column_is_data():
    """The logits of each step are in the column that the step tensor names."""
    loop, _, logits, cache = thin_loop()
    loop.run(3, "eager")
    assert not cache[:, 0].any()
    assert all(torch.equal(cache[:, step], logits) for step in (1, 2, 3))


@pytest.mark.parametrize("mode", MODES)
def test_rows_without_a_request_are_refused(mode):
    """Their drafts would be those of the last round, because no kernel writes them."""
    follower = Follower(5, 6, max_len=30)
    follower.load(4, seed=0)
    follower.loop.buffers.idx_mapping[2:] = -1
    before = follower.loop.buffers.draft_tokens.clone()
    sentence = r"^DraftLoop: idx_mapping must name the request of each of 4 rows, got -1 in row 2"
    with pytest.raises(ValueError, match=sentence):
        follower.loop.run(4, mode, key=GraphKey(6), replay=False)
    assert torch.equal(follower.loop.buffers.draft_tokens, before)
    follower.loop.run(2, mode, key=GraphKey(6), replay=False)


class NoValuesOut(NoHostReads):
    NAMES = NoHostReads.NAMES - {"to"}  # a cast of the model


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_read_back(mode):
    """Neither the loop nor the code around it copies a value to the host, and no size depends on data."""
    drafter = make_drafter(3, 4, debug=False)
    batch = make_round(drafter, 3, 0)
    expected = body(drafter, batch, mode, 4)
    buffers = drafter.buffers
    drafter.target.load(batch.verified, batch.lengths, batch.num_rejected, batch.states, batch.next_tokens)
    with as_on_a_device(), NoValuesOut():
        drafter.loop.run_first_pass(3, 5, mode, key=GraphKey(4, 5), replay=False)
        drafter.loop.run(3, mode, key=GraphKey(4), replay=False, inert_tails=True)
    assert buffers.draft_tokens[:3].tolist() == expected


# ---------------------------------------------------------------- addresses


def test_memory_never_moves():
    """Every build of any step and batch uses the same memory, and so do the buffers."""
    drafter = make_drafter(3, 8)
    buffers, metadata = drafter.buffers, drafter.loop.metadata
    before, places = addresses_of(buffers.tensors()), []
    for seed in range(3):
        batch = make_round(drafter, 3 + seed, seed)
        for mode in MODES:
            body(drafter, batch, mode, 8)
        for key in (GraphKey(8), GraphKey(8, 5)):
            buffers.fill_for_warm_up(key)
            places.append(addresses_of(vars(metadata.build(key, 3, 1))))
    assert addresses_of(buffers.tensors()) == before
    assert places[0::2] == places[:1] * 3
    assert places[1::2] == places[1:2] * 3
    assert set(places[0]) == {field.name for field in fields(PagedMetadata)}


def test_registration_of_another_tensor_is_refused():
    """Nothing is registered then. The same tensor may be registered again."""
    buffers, cache = DraftBuffers.allocate(2, 3, "cpu"), torch.zeros(2, 3, 9)
    for _ in range(2):
        buffers.register(logits_cache=cache)
    for others in ({"other": cache, "logits_cache": cache.clone()}, {"other": cache, "seq_lens": cache}):
        with pytest.raises(ValueError, match=r"^DraftBuffers.register: \w+ is already registered with another tensor"):
            buffers.register(**others)
    with pytest.raises(ValueError, match="logits_cache is already registered"):
        DraftSampler(buffers, torch.zeros(2), torch.zeros(2, dtype=torch.int64), logits_cache=cache.clone())
    assert buffers.registered == {"logits_cache": cache}
    DraftSampler(buffers, torch.ones(2), torch.ones(2, dtype=torch.int64), logits_cache=cache)
    assert sorted(buffers.registered) == ["logits_cache", "seeds", "temperature"]


# ---------------------------------------------------------------- padding


@given(st.integers(1, 7), st.data())
def test_padded_rows_are_inert(rows, data):
    """Real rows and the rows after the graph's rows do not change."""
    num_reqs = data.draw(st.integers(0, rows))
    buffers = DraftBuffers.allocate(8, 2, "cpu")
    names = ("idx_mapping", "input_ids", "positions", "seq_lens", "query_start_loc")
    for name in names:
        getattr(buffers, name).fill_(77)
    buffers.pad_rows(num_reqs, rows)
    require_inert(buffers, num_reqs, rows)
    for name, value in zip(names, (-1, 0, 0, 0, num_reqs), strict=True):
        ends = name == "query_start_loc" and num_reqs < rows
        expected = [77] * num_reqs + [value] * (rows - num_reqs + ends)
        assert getattr(buffers, name).tolist() == expected + [77] * (len(getattr(buffers, name)) - len(expected))


def test_warm_up_has_only_padded_rows():
    """A second capture writes new token counts, lengths and starts in place."""
    buffers = DraftBuffers.allocate(6, 3, "cpu", max_num_tokens=30)
    places = addresses_of(buffers.tensors())
    for tensor in buffers.tensors().values():
        tensor.fill_(77)
    buffers.fill_for_warm_up(GraphKey(4, 5))
    assert buffers.query_start_loc.tolist() == [0, 5, 10, 15, 20, 20, 20]
    assert buffers.seq_lens.tolist() == [5, 5, 5, 5, 0, 0]
    assert buffers.positions.tolist() == [0, 1, 2, 3, 4] * 4 + [0] * 10
    buffers.fill_for_warm_up(GraphKey(2))
    assert buffers.query_start_loc.tolist() == [0, 1, 2, 2, 2, 2, 2]
    assert buffers.seq_lens.tolist() == [1, 1, 0, 0, 0, 0]
    assert not buffers.positions.any()
    assert not buffers.input_ids.any()
    assert buffers.idx_mapping.tolist() == [-1] * 6
    assert places == addresses_of(buffers.tensors())


# ---------------------------------------------------------------- the choice of a graph


@given(st.sets(st.tuples(st.integers(1, 40), st.integers(1, 6))), st.integers(0, 40), st.integers(1, 6))
def test_smallest_graph_is_taken(keys, num_reqs, query_len):
    """Of exactly this query length: a first pass of one request has several tokens, a decode step has one."""
    buffers = DraftBuffers.allocate(40, 3, "cpu")
    sampler = DraftSampler(buffers, torch.zeros(40), torch.zeros(40, dtype=torch.int64))
    empty = SimpleNamespace(expand=lambda key: None, finish=lambda *_: None)
    loop = HostGraphLoop(lambda key, _: torch.zeros(key.num_reqs, 9), sampler, buffers, NoMetadata(), 3, 99,
                         first_pass=empty)  # fmt: skip
    loop.capture(GraphKey(*key) for key in keys)
    holding = [count for count, length in keys if length == query_len and count >= num_reqs]
    counts = [count for count, length in keys if length == query_len]
    assert loop.graph_for(num_reqs, query_len) == (GraphKey(min(holding), query_len) if holding else None)
    if counts:
        assert loop._why_eager(query_len, 3) == f"no graph holds more than {max(counts)} requests"
    elif keys:
        drafts = " and 3 drafts" if query_len == 1 else ""
        assert loop._why_eager(query_len, 3) == f"no graph has query length {query_len}{drafts}"
    loop.invalidate("the cache moved")
    assert loop.graph_for(num_reqs, query_len) is None
    assert loop._why_eager(query_len, 3) == "the graphs were dropped: the cache moved"


def test_eager_run_logs_its_reason_once(caplog):
    """The same function runs, and the reason is logged once."""
    drafter = make_drafter(3, 4)
    batch = make_round(drafter, 3, 0)
    with caplog.at_level(logging.INFO, logger="nwor_ops"):
        outputs = [draft(drafter, batch, "auto") for _ in range(3)]
    assert outputs == [plain_drafts(drafter, batch.texts, batch.states)] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "nwor draft loop, first pass of 5 tokens: eager, because: nothing was captured",
        "nwor draft loop, decode steps: eager, because: nothing was captured",
    ]
    assert drafter.loop.counts == {("first_pass", "eager"): 6, ("decode", "eager"): 3}  # 3 of them are prefills
    assert drafter.loop.graph_for(3) is None


# ---------------------------------------------------------------- capture, with stand-ins for graphs


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


def test_capture_order():
    """The shapes of the first pass come before those of the loop, and larger ones come first.

    Each shape has one build for the warm-up and one for the capture, on a batch of exactly that shape.
    """
    drafter = make_drafter(3, 8, adapter=NotingAdapter, loop=HostGraphLoop)
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
    drafter = make_drafter(1, 4, loop=HostGraphLoop)
    drafter.capture([4])
    assert (drafter.loop.graph_for(2, 3), drafter.loop.graph_for(2)) == (GraphKey(4, 3), None)  # no step follows


def test_each_number_of_drafts_has_graphs():
    """All numbers share one first pass. Each has a graph of the loop for the requested numbers of requests."""
    drafter = make_drafter(5, 8, loop=HostGraphLoop)
    drafter.capture([8, 4])
    for num_drafts in (3, 2, 1):
        drafter.loop.capture([GraphKey(4)], num_drafts=num_drafts)
    for num_reqs in (3, 7, 4):
        batch = make_round(drafter, num_reqs, num_reqs)
        expected = plain_drafts(drafter, batch.texts, batch.states)
        for num_drafts in (5, 3, 2, 1, 4):
            drafter.loop.counts.clear()
            drafts = draft(drafter, batch, "auto", num_drafts=num_drafts)
            assert drafts == [row[:num_drafts] for row in expected]
            assert (drafter.buffers.draft_tokens[:, num_drafts:] == NEVER).all()
            require_only_own_slots_written(drafter, batch)
            captured = num_drafts == 5 or (num_drafts in (2, 3) and num_reqs <= 4)
            ran = {("decode", "loop" if captured else "eager"): 1} if num_drafts > 1 else {}
            assert drafter.loop.counts == {("first_pass", "loop"): 1, **ran}
            assert body(drafter, batch, "eager", 8, num_drafts) == drafts
            assert (drafter.buffers.draft_tokens[:, num_drafts:] == NEVER).all()
    drafter.buffers.seq_lens[3:] = 77
    drafter.loop.run(3, "eager")
    assert (drafter.buffers.seq_lens[3:] == 77).all()  # an eager run has no padded rows
    drafter.loop.invalidate("the test")
    drafter.loop.capture([GraphKey(8), GraphKey(2, 7)], num_drafts=4)
    assert (drafter.loop.graph_for(2, num_drafts=4), drafter.loop.graph_for(2, 7)) == (GraphKey(8), GraphKey(2, 7))
    assert drafter.loop.graph_for(2, num_drafts=3) is None
    with pytest.raises(RuntimeError, match=r"GraphKey\(num_reqs=2, query_len=1\) and 3 drafts; capture"):
        drafter.loop.run(2, "loop", num_drafts=3)


# ---------------------------------------------------------------- refusals


def test_loop_needs_an_update():
    """A back end that plans on the host has only a build. Replays of its metadata would be stale."""

    class Planned(DraftMetadata):
        def build(self, key, num_reqs, step, capturing=False): ...

    loop = make_loop(metadata=Planned())
    assert loop.run(2, "eager").shape == (2, 3)
    with pytest.raises(NotImplementedError, match=r"^DraftMetadata.update: mode 'loop' and captures need it"):
        loop.run(2, "loop", replay=False)


def test_missing_graph_is_refused():
    """The call is refused before anything is written."""
    drafter = make_drafter(3, 4)
    tensors = drafter.buffers.tensors().values()
    for tensor in tensors:
        tensor.fill_(1)
    with pytest.raises(RuntimeError, match=r"no graph was captured for GraphKey\(num_reqs=3, query_len=1\); capture"):
        drafter.loop.run(3, "loop")
    with pytest.raises(RuntimeError, match=r"no graph was captured for GraphKey\(num_reqs=3, query_len=5\); capture"):
        drafter.loop.run_first_pass(3, 5, "loop")
    assert all((tensor == 1).all() for tensor in tensors)
    assert not drafter.loop.counts
    with pytest.raises(RuntimeError, match=r"DraftLoop.capture: needs a CUDA device, the buffers are on cpu"):
        drafter.capture([4])


def make_loop(**changes):
    buffers = DraftBuffers.allocate(4, 3, "cpu")
    buffers.idx_mapping.copy_(torch.arange(4))
    sampler = DraftSampler(buffers, torch.zeros(4), torch.zeros(4, dtype=torch.int64))
    return DraftLoop(
        **{"model_fn": lambda key, metadata: torch.zeros(key.num_tokens, 9), "sample_fn": sampler, "max_len": 9}
        | {"buffers": buffers, "metadata": NoMetadata(), "num_drafts": 3} | changes
    )  # fmt: skip


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: make_loop(num_drafts=4), r"draft_tokens must have a column for each of 4 drafts, got \[4, 3\]"),
        (lambda: make_loop().run(5), "DraftLoop: num_reqs must be at most 4, got 5"),
        (lambda: make_loop().run(-1), "num_reqs must be at least 0, got -1"),
        (lambda: make_loop().run(2, num_drafts=4), "DraftLoop: num_drafts must be at most 3, got 4"),
        (lambda: make_loop().run(2, key=GraphKey(1)), r"GraphKey\(num_reqs=1, query_len=1\) must hold the 2 requests"),
        (lambda: make_loop().run(2, key=GraphKey(5)), "and fit into buffers of 4 rows"),
        (lambda: make_loop().run(2, key=GraphKey(2, 3)), "must have the query length of this pass, 1"),
        (lambda: make_loop().run(2, "whole"), "mode must be auto, eager or loop, got 'whole'"),
        (lambda: make_loop().run_first_pass(2, 3), r"query_len=3\) belongs to a first pass"),
        (lambda: make_loop().run_first_pass(2, 1), "DraftLoop.run_first_pass: query_len must be > 1, got 1"),
        (lambda: make_loop(model_fn=lambda *_: (1, 2)).run(2), "model_fn must return no hidden states: buffers.h"),
        (
            lambda: make_loop(model_fn=lambda *_: torch.ones(1, 9)).run(2),
            "DraftSampler: logits must .* of at least 2, got",
        ),
        (lambda: make_loop(sample_fn=lambda _, out: out[:1, 0]).run(2), r"must return \[2\] tokens, got \[1\]"),
    ],
)
def test_bad_values_are_refused(run, message):
    with pytest.raises(ValueError, match=message):
        run()


def test_keys_and_outputs_are_checked():
    for wrong in (lambda: make_loop().run(2, "eager", key=(2, 1)), lambda: make_loop().capture([(2, 1)])):
        with pytest.raises(TypeError, match=r"^DraftLoop: key must be a GraphKey, got \(2, 1\)"):
            wrong()
    with pytest.raises(TypeError, match=r"^DraftLoop.capture: keys must be GraphKeys, got GraphKey\("):
        make_loop().capture(GraphKey(2))
    with pytest.raises(TypeError, match=r"the result of sample_fn must be a tensor, got \[1, 2\]"):
        make_loop(sample_fn=lambda key, out: [1, 2]).run(2)
    carrying = Follower(3, 4, 20)
    carrying.load(2, seed=0)
    carrying.loop.model_fn = lambda key, metadata: torch.zeros(2, 9)
    with pytest.raises(ValueError, match=r"must return hidden states, in a pair with its output: buffers.hidden_"):
        carrying.loop.run(2)


LONGS = torch.zeros(12).long()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("input_ids", torch.zeros(4), "must have dtype torch.int32, got torch.float32"),
        ("idx_mapping", torch.zeros(4), "must have dtype torch.int32 or torch.int64, got torch.float32"),
        ("idx_mapping", LONGS.to("meta"), "must be on device cpu, got meta"),
        ("positions", LONGS[:3], r"must have one dimension, the first of at least 4, got \[3\]"),
        ("query_start_loc", LONGS[:4].int(), "must have one dimension, the first of at least 5"),
        ("positions", LONGS[::2], r"must be contiguous, got strides \[2\]"),
        ("draft_tokens", LONGS, "must have 2 dimensions, the first of at least 4"),
        ("hidden_states", torch.zeros(3, 2), "must have 2 dimensions, the first of at least 4"),
        ("current_draft_step", LONGS[:1], "must have 0 dimensions"),
    ],
)
def test_bad_buffers_are_refused(name, value, message):
    tensors = DraftBuffers.allocate(4, 3, "cpu").tensors()
    error = TypeError if "dtype" in message or "device" in message else ValueError
    with pytest.raises(error, match=f"^DraftBuffers: {name} {message}"):
        DraftBuffers(**tensors | {name: value})


def test_buffers_may_have_any_strides():
    tensors = DraftBuffers.allocate(4, 3, "cpu").tensors()
    for tokens in (torch.zeros(3, 4).long().t(), torch.zeros(8, 6).long()[::2, ::2], torch.zeros(4, 1).long()):
        DraftBuffers(**tensors | {"draft_tokens": tokens})
