"""The draft loop on the CPU: its three bodies run from the host, and are compared with drafting without a loop.

Also tested: padding, dispatch, the rules of metadata, and refusals. `tests/gpu/test_draft_loop_cuda.py` tests the
graphs.

A number like 41162-1 refers to a requirement of docs/internals/draft-loop-tests.md.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType

import pytest
import torch
from draft_loops import (
    NEVER,
    Follower,
    HostPlannedAdapter,
    draft,
    make_drafter,
    make_round,
    plain_drafts,
    require_metadata_of_every_step,
    require_only_own_slots_written,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from no_sync import NoHostReads
from paged_drafter import PagedMetadata
from processes import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from transactions import one_thread  # noqa: F401

from nwor_ops.drafter import (
    DispatchTable,
    DraftBuffers,
    DraftLoop,
    DraftMetadata,
    DraftSampler,
    GraphKey,
    keys_of_token_counts,
)
from nwor_ops.drafter.graphs import places_of, require_unmoved

NUM_DRAFTS = (1, 2, 3, 5, 8)
MODES = ("eager", "step", "loop")


def body(drafter, batch, mode, padded=None):
    """Run a mode's body from the host, which is what its graph records."""
    return draft(drafter, batch, mode, replay=False, padded=padded)


# ---------------------------------------------------------------- drafts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
def test_every_mode_drafts_what_reading_the_whole_text_drafts(num_drafts, temperature):
    """41162-1, -10, -11, 34880-9, -14, -15: compare every position of every request, unpadded and padded.

    Sequences cross block and window boundaries. The metadata of each step is compared, and no other slot is written.
    """
    for num_reqs, padded in ((1, 1), (1, 4), (16, 16), (23, 32), (64, 64)):
        drafter = make_drafter(num_drafts, padded)
        drafter.temperature.fill_(temperature)
        batch = make_round(drafter, num_reqs, seed=num_drafts)
        expected = plain_drafts(drafter, batch.texts, batch.states)
        for mode in MODES:
            for rows in {num_reqs, padded}:
                assert body(drafter, batch, mode, rows) == expected, (mode, rows)
                require_metadata_of_every_step(drafter, batch, rows)
                require_only_own_slots_written(drafter, batch)
                assert (drafter.buffers.draft_tokens[num_reqs:, 1:] == NEVER).all()


@settings(max_examples=settings.default.max_examples * 2 // 3)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 5), st.integers(0, 2**20), st.sampled_from([0.0, 0.6, 2.0]))
def test_any_batch(num_drafts, num_reqs, spare, seed, temperature):
    drafter = make_drafter(num_drafts, num_reqs + spare, max_len=2 * num_drafts + 9)
    drafter.temperature.fill_(temperature)
    batch = make_round(drafter, num_reqs, seed)
    expected = plain_drafts(drafter, batch.texts, batch.states)
    for mode in MODES:
        assert body(drafter, batch, mode, num_reqs + spare) == expected
        require_metadata_of_every_step(drafter, batch, num_reqs + spare)
        require_only_own_slots_written(drafter, batch)


@pytest.mark.parametrize("num_drafts", NUM_DRAFTS)
def test_at_the_model_s_limit(num_drafts):
    """41162-1, -11: sequences end a few tokens before max_len, and later drafts take the last position."""
    drafter = make_drafter(num_drafts, 6, max_len=24)
    most = 24 - num_drafts - 2
    batch = make_round(drafter, 5, 3, lengths=[most, most - 1, most - 2, most - 3, 1])
    batch.num_rejected[:4] = 0
    expected = plain_drafts(drafter, batch.texts, batch.states)
    assert len(batch.texts[0]) == 24
    for mode in MODES:
        assert body(drafter, batch, mode, 6) == expected
        require_metadata_of_every_step(drafter, batch, 6)
        require_only_own_slots_written(drafter, batch)


def test_beyond_the_model_s_limit():
    """The target's token has no position left. The drafts are useless, and no request's cache changes."""
    drafter = make_drafter(4, 4, max_len=24)
    batch = make_round(drafter, 3, 0, lengths=[24 - 5, 24 - 5, 7])
    batch.num_rejected[:2] = 0
    outputs = [body(drafter, batch, mode, 4) for mode in MODES]
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][2] == plain_drafts(drafter, batch.texts[2:], batch.states[2:])[0]
    require_metadata_of_every_step(drafter, batch, 4)
    require_only_own_slots_written(drafter, batch)


@pytest.mark.parametrize("mode", MODES)
def test_the_first_pass_pads_too(mode):
    """34880-9: an earlier batch left the index of a real request in idx_mapping."""
    drafter = make_drafter(3, 8)
    batch = make_round(drafter, 5, 0)
    expected = plain_drafts(drafter, batch.texts, batch.states)
    body(drafter, batch, mode, 8)  # loads the target's batch
    drafter.buffers.draft_tokens.fill_(NEVER)
    drafter.buffers.idx_mapping[5:].fill_(int(batch.states[0]))
    drafter.loop.run_first_pass(5, 5, mode, key=GraphKey(8, 5), replay=False)
    drafter.buffers.require_inert(5, 8)
    assert drafter.loop.run(5, mode, key=GraphKey(8), replay=False).tolist() == expected
    require_metadata_of_every_step(drafter, batch, 8)
    require_only_own_slots_written(drafter, batch)


@pytest.mark.parametrize("mode", MODES)
def test_fewer_drafts(mode):
    """The first columns equal those of K drafts. The other columns do not change, and no step runs for them."""
    drafter = make_drafter(5, 8)
    batch = make_round(drafter, 6, 2)
    expected = body(drafter, batch, mode, 8)
    forward, steps = drafter.loop.model_fn, []
    drafter.loop.model_fn = lambda key, metadata: (steps.append(key), forward(key, metadata))[1]
    for num_drafts in (1, 2, 4, 5):
        steps.clear()
        found = draft(drafter, batch, mode, replay=False, padded=8, num_drafts=num_drafts)
        assert found == [row[:num_drafts] for row in expected]
        assert (drafter.buffers.draft_tokens[:, num_drafts:] == NEVER).all()
        assert steps == [GraphKey(8, 7)] + [GraphKey(8)] * (num_drafts - 1)
        require_only_own_slots_written(drafter, batch)


class NoMetadata(DraftMetadata):
    def build(self, key, num_reqs, step, capturing=False): ...

    def update(self, key, metadata): ...


def test_buffers_with_more_columns_than_drafts():
    """The result has K columns. The others hold older data."""
    buffers = DraftBuffers.allocate(max_num_reqs=1, num_drafts=5, device="cpu")
    buffers.draft_tokens.fill_(NEVER)
    buffers.idx_mapping[0], buffers.draft_tokens[0, 0], buffers.input_ids[0] = 0, 5, 5
    loop = DraftLoop(
        lambda key, _: buffers.input_ids[: key.num_tokens] + 1, lambda _, output: output, buffers, NoMetadata(),
        num_drafts=3, max_len=16,
    )  # fmt: skip
    assert loop.run(num_reqs=1).tolist() == [[5, 6, 7]]


def test_stale_metadata_would_be_seen():
    """The tests above can fail: windows and slots of the previous step give other drafts."""
    drafter = make_drafter(5, 8)
    batch = make_round(drafter, 8, 1)
    expected = body(drafter, batch, "loop")
    update = drafter.loop.metadata.update

    def stale(key, metadata):
        if drafter.buffers.current_draft_step < 2:
            update(key, metadata)

    drafter.loop.metadata.update = stale
    drafts = body(drafter, batch, "loop")
    assert [row[:2] for row in drafts] == [row[:2] for row in expected]
    assert [row[3:] for row in drafts] != [row[3:] for row in expected]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 5, 8])
def test_a_drafter_that_carries_hidden_states(num_drafts, temperature):
    """41162-5, -7, -8, -9: each token goes to its column only.

    The last step changes neither ids nor positions, lengths or hidden states. Padded rows are inert, whatever they
    held.
    """
    follower = Follower(num_drafts, 9, max_len=30, debug=True)
    follower.temperature.fill_(temperature)
    for num_reqs, rows in ((1, 1), (5, 9), (9, 9), (1, 8), (0, 3)):
        for mode in MODES:
            follower.load(num_reqs, seed=num_reqs)
            expected = follower.plain(num_reqs)
            hidden_tail = follower.buffers.hidden_states[num_reqs:].clone()
            drafts = follower.loop.run(num_reqs, mode, key=GraphKey(rows), replay=False)
            assert drafts.shape == (num_reqs, num_drafts)
            left = follower.left(num_reqs)
            if num_drafts > 1:
                torch.testing.assert_close(left.pop("hidden"), expected.pop("hidden"), rtol=1e-12, atol=1e-12)
                assert left == expected, mode
            assert (follower.buffers.draft_tokens[num_reqs:] == NEVER).all()
            assert torch.equal(follower.buffers.hidden_states[num_reqs:], hidden_tail)
            if num_reqs and num_drafts > 1:
                follower.buffers.require_inert(num_reqs, rows)
                assert (follower.loop.metadata.slots[0, num_reqs:rows] == -1).all()


def test_a_drafter_whose_positions_stay():
    follower = Follower(4, 5, max_len=30, advance_positions=False)
    outputs = []
    for mode in MODES:
        follower.load(4, seed=2)
        before = [t.clone() for t in (follower.buffers.positions, follower.buffers.seq_lens)]
        outputs.append(follower.loop.run(4, mode, key=GraphKey(5), replay=False).tolist())
        for now, then in zip((follower.buffers.positions, follower.buffers.seq_lens), before, strict=True):
            assert torch.equal(now[:4], then[:4])
    assert outputs[0] == outputs[1] == outputs[2]


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


def thin_loop(hidden: bool = True):
    """Create a loop whose model and metadata do nothing, so that only the loop's own work is left."""
    num_drafts, rows = 4, 3
    buffers = DraftBuffers.allocate(rows, num_drafts, "cpu", hidden_size=8 if hidden else None)
    buffers.idx_mapping.copy_(torch.arange(rows))
    logits, states = torch.randn(rows, 50), torch.randn(rows, 8).bfloat16()
    cache = torch.zeros(rows, num_drafts, 50)
    sampler = DraftSampler(buffers, torch.ones(rows), torch.arange(rows), logits_cache=cache)
    seen: list[tuple] = []

    class Metadata:
        why_not_in_place = None

        def prepare(self, key, num_reqs):
            seen.append(("prepare", key, num_reqs))

        def build(self, key, num_reqs, step, capturing=False):
            seen.append(("build", key, num_reqs, step, capturing, int(buffers.current_draft_step)))
            return "built"

        def update(self, key, metadata):
            seen.append(("update", key, metadata, int(buffers.current_draft_step)))

    def model(key, metadata):
        seen.append(("model", key, metadata, int(buffers.current_draft_step)))
        output = logits[: key.num_reqs]
        return (output, states[: key.num_reqs]) if hidden else output

    return DraftLoop(model, sampler, buffers, Metadata(), num_drafts, 100), seen, logits, cache


def test_a_step_is_two_kernels():
    """41162-2, -5, -6, -8: a step is sampling and update. Neither the hidden state nor the token is copied
    separately."""
    loop, *_ = thin_loop()
    with torch.no_grad(), Operations() as done:
        loop._step(GraphKey(3), "built")
    assert done.names == ["nwor.gumbel_sample.default", "nwor.update_draft_inputs.default"]
    with Operations() as done:
        loop.run(3, "loop", replay=False)
    step = ["aten.fill_.Scalar", "nwor.gumbel_sample.default", "nwor.update_draft_inputs.default"]
    assert done.names == step[:1] + 3 * step  # the first one belongs to the build


def test_order_of_calls():
    """41162-2, -4, 34880-5: the build is outside the body, before each step, and after the step number is set.

    The model gets the key of the run. In the whole loop, the update replaces the build.
    """
    key = GraphKey(3)
    loop, seen, *_ = thin_loop()
    loop.run(2, "step", key=key, replay=False)
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


def test_the_sampler_s_column_is_data():
    """41162-6: the logits of each step are in the column that the step tensor names."""
    loop, _, logits, cache = thin_loop()
    loop.run(3, "eager")
    assert not cache[:, 0].any()
    assert all(torch.equal(cache[:, step], logits) for step in (1, 2, 3))


class NoValuesOut(NoHostReads):
    NAMES = NoHostReads.NAMES - {"to"}  # a cast of the model


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_read_back(mode):
    """Neither the loop nor the code around it copies a value to the host, and no size depends on data."""
    follower = Follower(5, 6, max_len=30)
    follower.load(4, seed=0)
    with NoValuesOut():
        follower.loop.run(4, mode, key=GraphKey(6), replay=False)
    drafter = make_drafter(3, 4, debug=False)
    batch = make_round(drafter, 3, 0)
    expected = body(drafter, batch, mode, 4)
    buffers = drafter.buffers
    drafter.target.load(batch.verified, batch.lengths, batch.num_rejected, batch.states, batch.next_tokens)
    with NoValuesOut():
        drafter.loop.run_first_pass(3, 5, mode, key=GraphKey(4, 5), replay=False)
        drafter.loop.run(3, mode, key=GraphKey(4), replay=False, inert_tails=True)
    assert buffers.draft_tokens[:3].tolist() == expected


# ---------------------------------------------------------------- addresses


def test_memory_never_moves():
    """41162-3, -4, 34880-8: every build of any step and batch uses the same memory, and so do the buffers."""
    drafter = make_drafter(3, 8)
    buffers, metadata, cpu = drafter.buffers, drafter.loop.metadata, torch.device("cpu")
    before = places_of(buffers.tensors(), "buffers", cpu)
    places = []
    for seed in range(3):
        batch = make_round(drafter, 3 + seed, seed)
        for mode in MODES:
            body(drafter, batch, mode, 8)
        for key in (GraphKey(8), GraphKey(8, 5)):
            buffers.fill_for_warm_up(key)
            places.append(places_of(metadata.build(key, 3, 1), "metadata", cpu))
    assert places_of(buffers.tensors(), "buffers", cpu) == before
    assert places[0::2] == places[:1] * 3
    assert places[1::2] == places[1:2] * 3
    assert set(places[0]) == {f"metadata.{field.name}" for field in fields(PagedMetadata)}


def test_moved_tensors_are_named():
    """41162-3: the debug check reports address, shape, stride and dtype, in trees of any kind."""
    cpu = torch.device("cpu")
    tensor = torch.zeros(4, 4)
    tree = {"layer": [tensor, (tensor[0], "text", 3, None)], "other": DispatchTable()}
    before = places_of(tree, "metadata", cpu)
    assert list(before) == ["metadata['layer'][0]", "metadata['layer'][1][0]"]
    require_unmoved(before, places_of(tree, "metadata", cpu))
    for other in (torch.zeros(4, 4), tensor[:3], tensor.t(), tensor.view(torch.int32), None):
        changed = {"layer": [other, (tensor[0],)]}
        with pytest.raises(
            RuntimeError, match=r"DraftLoop: metadata\['layer'\]\[0\] must not move or change after the captu"
        ):
            require_unmoved(before, places_of(changed, "metadata", cpu))
    assert places_of([tensor], "metadata", torch.device("cuda")) == {}


@dataclass(slots=True)
class Slotted:
    table: torch.Tensor
    nothing_here: int = 3


class Callable:
    __slots__ = ("__dict__", "__private")

    def __init__(self, tensor):
        self.tensor, self.__private = tensor, tensor[1:]

    def __call__(self):
        raise NotImplementedError


def a_function(tensor):
    return tensor


a_function.tensor = torch.zeros(1)


def test_tensors_are_found_in_objects_of_every_kind():
    one, two, cpu = torch.zeros(4), torch.ones(4), torch.device("cpu")
    for value, paths in (
        (Slotted(one), ["metadata.table"]),
        (Callable(one), ["metadata.tensor", "metadata._Callable__private"]),
        ({one}, ["metadata{0}"]),
        (frozenset({(one,)}), ["metadata{0}[0]"]),
        (deque([one, two]), ["metadata[0]", "metadata[1]"]),
        (MappingProxyType({"of": one}), ["metadata['of']"]),
        (partial(a_function, one, key=two), ["metadata.args[0]", "metadata.keywords['key']"]),
        (torch.nn.Linear(1, 1, bias=False), ["metadata._parameters['weight']"]),
        ((a_function, torch, Slotted, len, cpu), []),
    ):
        before = places_of(value, "metadata", cpu)
        assert list(before) == paths
        require_unmoved(before, places_of(value, "metadata", cpu))
    both = {one, two}
    before = places_of(both, "metadata", cpu)
    require_unmoved(before, places_of({two, one}, "metadata", cpu))
    with pytest.raises(RuntimeError, match=r"metadata\{[01]\} must not move"):
        require_unmoved(before, places_of({one, torch.zeros(5)}, "metadata", cpu))


def test_registered_tensors_are_watched():
    buffers = DraftBuffers.allocate(3, 2, "cpu")
    table = torch.zeros(3, 2)
    buffers.register(table=table)
    buffers.register(table=table)
    assert buffers.tensors()["table"] is table
    with pytest.raises(ValueError, match=r"DraftBuffers.register: table is already registered with another tensor"):
        buffers.register(table=torch.zeros(3, 2))
    with pytest.raises(ValueError, match="seq_lens is already registered"):
        buffers.register(seq_lens=table)


def test_a_refused_registration_registers_nothing():
    buffers = DraftBuffers.allocate(2, 3, "cpu")
    buffers.register(logits_cache=torch.zeros(2, 3, 9))
    before = dict(buffers.registered)
    with pytest.raises(ValueError, match="logits_cache is already registered"):
        DraftSampler(
            buffers, torch.zeros(2), torch.zeros(2, dtype=torch.int64), logits_cache=torch.zeros(2, 3, 9)
        )  # fmt: skip
    assert buffers.registered == before
    with pytest.raises(ValueError, match="logits_cache is already registered"):
        buffers.register(other=torch.zeros(1), logits_cache=torch.zeros(2, 3, 9))
    assert buffers.registered == before
    DraftSampler(buffers, torch.ones(2), torch.ones(2, dtype=torch.int64), logits_cache=before["logits_cache"])
    assert sorted(buffers.registered) == ["logits_cache", "seeds", "temperature"]


def test_metadata_says_why_it_is_not_updated_in_place():
    """A method in place of the property would be true: the loop would silently take a graph per step."""

    class Method(NoMetadata):
        def why_not_in_place(self):
            return None

    class Nothing:
        prepare, build, update = NoMetadata.prepare, NoMetadata.build, NoMetadata.update

    for metadata, message in (
        (Method(), r"DraftLoop: metadata.why_not_in_place must be None or a str, got <bound method "),
        (Nothing(), r"DraftLoop: metadata must have the property why_not_in_place, got <"),
    ):
        with pytest.raises(TypeError, match=f"^{message}"):
            DraftLoop(
                lambda key, metadata: None, lambda key, output: output, DraftBuffers.allocate(2, 3, "cpu"), metadata,
                num_drafts=3, max_len=9,
            )  # fmt: skip


# ---------------------------------------------------------------- padding


@given(st.integers(1, 7), st.data())
def test_padded_rows_are_inert(rows, data):
    """34880-9: real rows and the rows after the graph's rows do not change."""
    num_reqs = data.draw(st.integers(0, rows))
    buffers = DraftBuffers.allocate(8, 2, "cpu")
    names = ("idx_mapping", "input_ids", "positions", "seq_lens", "query_start_loc")
    for name in names:
        getattr(buffers, name).fill_(77)
    if num_reqs < rows:
        with pytest.raises(RuntimeError, match=rf"idx_mapping must be -1 in the padded rows \[{num_reqs}, {rows}\)"):
            buffers.require_inert(num_reqs, rows)
    buffers.pad_rows(num_reqs, rows)
    buffers.require_inert(num_reqs, rows)
    for name, value in zip(names, (-1, 0, 0, 0, num_reqs), strict=True):
        ends = name == "query_start_loc" and num_reqs < rows
        expected = [77] * num_reqs + [value] * (rows - num_reqs + ends)
        assert getattr(buffers, name).tolist() == expected + [77] * (len(getattr(buffers, name)) - len(expected))


def test_rows_that_are_not_inert_are_found():
    """34880-9: debug mode checks the caller's guarantee."""
    loop = thin_loop()[0]
    loop.debug = True
    buffers = loop.buffers
    buffers.fill_for_warm_up(GraphKey(3))
    for name in ("idx_mapping", "query_start_loc", "input_ids", "positions", "seq_lens"):
        buffers.pad_rows(2, 3)
        getattr(buffers, name)[2] = 5
        with pytest.raises(RuntimeError, match=rf"DraftBuffers: {name} must be -?\d in the padded rows \[2, 3\), got"):
            loop.run(2, "eager", key=GraphKey(3), inert_tails=True)
    loop.run(2, "eager", key=GraphKey(3))


def test_a_warm_up_is_a_whole_batch_of_padded_rows():
    """34880-7: a second capture writes new token counts, lengths and starts in place."""
    buffers = DraftBuffers.allocate(6, 3, "cpu", max_num_tokens=30)
    places = places_of(buffers.tensors(), "buffers", torch.device("cpu"))
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
    assert places == places_of(buffers.tensors(), "buffers", torch.device("cpu"))


# ---------------------------------------------------------------- dispatch


@given(st.sets(st.tuples(st.integers(1, 40), st.integers(1, 6))), st.integers(0, 45), st.integers(1, 6))
def test_dispatch_table(keys, num_reqs, query_len):
    """34880-1: find the smallest request count of exactly this query length that holds the batch."""
    table = DispatchTable(GraphKey(*key) for key in keys)
    counts = [count for count, length in keys if length == query_len]
    holding = [count for count in counts if count >= num_reqs]
    assert table.smallest(num_reqs, query_len) == (GraphKey(min(holding), query_len) if holding else None)
    assert table.largest(query_len) == max(counts, default=0)
    table.clear()
    assert table.smallest(1, query_len) is None


def test_one_request_pads_to_one():
    """34880-2: K = 3, and capture sizes count tokens. A first pass of one request has 4 or 5 tokens, a decode step has
    1."""
    sizes = [1, 2, 4, 8, 16]
    table = DispatchTable(keys_of_token_counts(sizes, 4, 64) + keys_of_token_counts(sizes, 1, 64))
    assert table.smallest(1, 4) == GraphKey(1, 4)
    assert table.smallest(1, 1) == GraphKey(1, 1)
    assert table.smallest(3, 4) == GraphKey(4, 4)
    assert table.smallest(3, 1) == GraphKey(4, 1)
    assert table.smallest(5, 4) is None
    assert table.smallest(16, 1) == GraphKey(16, 1)
    assert table.smallest(1, 5) is None


@given(st.lists(st.integers(1, 600), max_size=20), st.integers(1, 9), st.integers(1, 64))
def test_tokens_are_multiples_of_the_query_length(sizes, query_len, max_num_reqs):
    """34880-12: this holds for any capture sizes of the engine."""
    keys = keys_of_token_counts(sizes, query_len, max_num_reqs)
    assert keys == sorted(set(keys), key=lambda key: -key.num_reqs)
    assert all(key.num_tokens % query_len == 0 and key.num_reqs <= max_num_reqs for key in keys)
    for size in sizes:
        assert any(0 <= key.num_tokens - size < query_len for key in keys) or -(-size // query_len) > max_num_reqs


def test_without_graphs_it_runs_eagerly_and_says_so_once(caplog):
    """41162-10: the same function runs, and the reason is logged once."""
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
    found = drafter.loop.dispatch(3)
    assert (found.key, found.mode) == (GraphKey(3), "eager")
    drafter.loop.invalidate("the cache moved")
    assert drafter.loop.dispatch(3).reason == "the graphs were dropped: the cache moved"


# ---------------------------------------------------------------- refusals


def test_metadata_that_cannot_be_updated_in_place():
    drafter = make_drafter(3, 4, adapter=HostPlannedAdapter)
    batch = make_round(drafter, 3, 0)
    expected = plain_drafts(drafter, batch.texts, batch.states)
    assert body(drafter, batch, "eager", 4) == body(drafter, batch, "step", 4) == expected
    for run in (
        lambda: body(drafter, batch, "loop", 4),
        lambda: drafter.loop.run(3, "loop"),
    ):
        with pytest.raises(
            ValueError, match="mode 'loop' needs metadata that is updated in place: this back end plans"
        ):
            run()


def test_no_graph():
    """The call is refused before anything is written."""
    drafter = make_drafter(3, 4)
    tensors = drafter.buffers.tensors().values()
    for tensor in tensors:
        tensor.fill_(1)
    for mode in ("step", "loop"):
        with pytest.raises(
            RuntimeError, match=r"no graph was captured for GraphKey\(num_reqs=3, query_len=1\) in mode"
        ):
            drafter.loop.run(3, mode)
        with pytest.raises(
            RuntimeError, match=r"no graph was captured for GraphKey\(num_reqs=3, query_len=5\) in mode"
        ):
            drafter.loop.run_first_pass(3, 5, mode)
    assert all((tensor == 1).all() for tensor in tensors)
    assert not drafter.loop.counts
    with pytest.raises(RuntimeError, match=r"DraftLoop.capture: needs a CUDA device, the buffers are on cpu"):
        drafter.capture([4])


def test_bad_arguments():
    buffers = DraftBuffers.allocate(4, 3, "cpu")
    sampler = DraftSampler(buffers, torch.zeros(4), torch.zeros(4, dtype=torch.int64))

    def loop(**changes):
        return DraftLoop(
            **{"model_fn": lambda key, metadata: torch.zeros(key.num_tokens, 9), "sample_fn": sampler, "max_len": 9}
            | {"buffers": buffers, "metadata": thin_loop()[0].metadata, "num_drafts": 3} | changes
        )  # fmt: skip

    for changes, message in (
        ({"num_drafts": 0}, "DraftLoop: num_drafts must be at least 1, got 0"),
        ({"max_len": 0}, "DraftLoop: max_len must be at least 1, got 0"),
        ({"num_drafts": 4}, r"DraftLoop: draft_tokens must have a column for each of 4 drafts, got \[4, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            loop(**changes)
    for run, message in (
        (lambda: loop().run(5), "DraftLoop: num_reqs must be 0 to 4, the rows of the buffers, got 5"),
        (lambda: loop().run(-1), "num_reqs must be 0 to 4, the rows of the buffers, got -1"),
        (lambda: loop().run(2, num_drafts=4), "DraftLoop: num_drafts must be at most 3, got 4"),
        (lambda: loop().run(2, num_drafts=0), "DraftLoop: num_drafts must be at least 1, got 0"),
        (lambda: loop().run(2, key=GraphKey(1)), r"GraphKey\(num_reqs=1, query_len=1\) must hold the 2 requests"),
        (
            lambda: loop().run(2, key=GraphKey(5)),
            "must hold the 2 requests of the batch and fit into buffers of 4 rows",
        ),
        (lambda: loop().run(2, key=GraphKey(2, 3)), "must have the query length of this pass, 1"),
        (lambda: loop().run(2, "whole"), "mode must be auto, eager .* step or loop, got 'whole'"),
        (lambda: loop().run_first_pass(2, 3), r"GraphKey\(num_reqs=2, query_len=3\) belongs to a first pass"),
        (lambda: loop().run_first_pass(2, 1), "DraftLoop.run_first_pass: query_len must be > 1, got 1"),
        (
            lambda: loop(model_fn=lambda key, metadata: (1, 2)).run(2),
            "model_fn must return no hidden states: buffers.h",
        ),
        (lambda: loop(sample_fn=lambda key, out: out[:1, 0]).run(2), r"sample_fn must return \[2\] tokens, got \[1\]"),
        (
            lambda: loop(model_fn=lambda key, metadata: torch.zeros(1, 9)).run(2),
            r"DraftSampler: logits must have 2 dimensions, the first of at least 2, got \[1, 9\]",
        ),
        (lambda: GraphKey(0), "GraphKey: num_reqs must be at least 1, got 0"),
        (lambda: keys_of_token_counts([3], 0, 4), "keys_of_token_counts: query_len must be at least 1, got 0"),
        (lambda: keys_of_token_counts([-3], 1, 4), "each of token_counts must be at least 1, got -3"),
    ):
        with pytest.raises(ValueError, match=message):
            run()
    for run, message in (
        (lambda: loop().run(2.0), "DraftLoop: num_reqs must be an integer, got 2.0"),
        (lambda: loop().run(True), "DraftLoop: num_reqs must be an integer, got True"),
        (lambda: loop().run(2, key=2), "DraftLoop: key must be a GraphKey or None, got 2"),
        (lambda: loop().run(2, "eager", key=0), "DraftLoop: key must be a GraphKey or None, got 0"),
        (lambda: loop().run(2, replay="x"), "DraftLoop: replay must be True or False, got 'x'"),
        (lambda: loop().run(2, inert_tails=1), "DraftLoop: inert_tails must be True or False, got 1"),
        (lambda: loop().run_first_pass(2, 3.0), "DraftLoop: query_len must be an integer, got 3.0"),
        (lambda: loop().run_first_pass(2, 3, key=2), "DraftLoop: key must be a GraphKey or None, got 2"),
        (lambda: loop().run_first_pass(2, 3, replay=None), "DraftLoop: replay must be True or False, got None"),
        (lambda: loop().dispatch("2"), "DraftLoop: num_reqs must be an integer, got '2'"),
        (lambda: loop().dispatch(2, None), "DraftLoop: query_len must be an integer, got None"),
        (lambda: loop().capture([2]), "DraftLoop: each of keys must be a GraphKey, got 2"),
        (lambda: loop().invalidate(None), "DraftLoop: reason must be a string, got None"),
        (lambda: loop(vocab_size="9"), "DraftLoop: vocab_size must be an integer, got '9'"),
        (lambda: sampler(None, torch.zeros(2, 9)), "DraftSampler: key must be a GraphKey, got None"),
        (lambda: sampler(GraphKey(2), torch.zeros(2, 9), 3), "DraftSampler: positions must be a tensor, got 3"),
        (lambda: DispatchTable().smallest("2"), "DispatchTable: num_reqs must be an integer, got '2'"),
        (lambda: buffers.fill_for_warm_up(2), "DraftBuffers.fill_for_warm_up: key must be a GraphKey, got 2"),
        (lambda: buffers.pad_rows(1.5, 2), "DraftBuffers: num_reqs must be an integer, got 1.5"),
    ):
        with pytest.raises(TypeError, match=f"^{message}$"):
            run()
    for run, message in (
        (lambda: loop().dispatch(-1), "DraftLoop: num_reqs must be 0 to 4, the rows of the buffers, got -1"),
        (lambda: loop().dispatch(5), "DraftLoop: num_reqs must be 0 to 4, the rows of the buffers, got 5"),
        (lambda: loop().dispatch(2, 0), "DraftLoop: query_len must be at least 1, got 0"),
        (lambda: loop().capture([GraphKey(5)]), "must hold the 5 requests of the batch and fit into buffers of 4 rows"),
        (lambda: loop(vocab_size=0), "DraftLoop: vocab_size must be at least 1, got 0"),
        (lambda: sampler(GraphKey(5), torch.zeros(5, 9)), "DraftSampler: key must have at most 4 requests, the rows "),
        (lambda: buffers.pad_rows(-1, 2), "DraftBuffers: num_reqs must be at least 0, got -1"),
        (lambda: buffers.pad_rows(3, 2), "DraftBuffers: padded must be at least 3, got 2"),
        (lambda: buffers.pad_rows(2, 5), "DraftBuffers: padded must be at most 4, got 5"),
        (lambda: buffers.require_inert(2, 5), "DraftBuffers: padded must be at most 4, got 5"),
        (
            lambda: buffers.fill_for_warm_up(GraphKey(5)),
            "DraftBuffers.fill_for_warm_up: key must have at most 4 requests, the rows ",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run()
    with pytest.raises(TypeError, match=r"the result of sample_fn must be a tensor, got \[1, 2\]"):
        loop(sample_fn=lambda key, out: [1, 2]).run(2)
    carrying = Follower(3, 4, 20)
    carrying.loop.model_fn = lambda key, metadata: torch.zeros(2, 9)
    with pytest.raises(
        ValueError, match=r"model_fn must return hidden states, in a pair with its output: buffers.hidden_"
    ):
        carrying.loop.run(2)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("input_ids", torch.zeros(4), TypeError, "input_ids must have dtype torch.int32, got torch.float32"),
        ("idx_mapping", torch.zeros(4), TypeError, "idx_mapping must have dtype torch.int32 or torch.int64, got"),
        (
            "positions",
            torch.zeros(3).long(),
            ValueError,
            r"positions must have 1 dimensions and at least 4 rows, got \[3",
        ),
        (
            "query_start_loc",
            torch.zeros(4).int(),
            ValueError,
            "query_start_loc must have 1 dimensions and at least 5 r",
        ),
        ("positions", torch.zeros(8).long()[::2], ValueError, r"positions must be contiguous, got strides \[2\]"),
        ("draft_tokens", torch.zeros(4).long(), ValueError, "draft_tokens must have 2 dimensions and at least 4 rows"),
        (
            "draft_tokens",
            torch.zeros(1, 3).long().expand(4, 3),
            ValueError,
            r"draft_tokens must not name an element twice, got strides \[0, 1\]",
        ),
        (
            "draft_tokens",
            torch.zeros(9).long().as_strided((4, 3), (2, 1)),
            ValueError,
            r"draft_tokens must not name an element twice, got strides \[2, 1\]",
        ),
        ("hidden_states", torch.zeros(4, 1).expand(4, 2), ValueError, "hidden_states must not name an element twice"),
        ("current_draft_step", torch.zeros(1).long(), ValueError, "current_draft_step must have 0 dimensions"),
        ("hidden_states", torch.zeros(3, 2), ValueError, "hidden_states must have 2 dimensions and at least 4 rows"),
        ("idx_mapping", torch.zeros(4, device="meta").long(), TypeError, "idx_mapping must be on device cpu, got meta"),
    ],
)
def test_bad_buffers(name, value, error, message):
    given = {k: v for k, v in vars(DraftBuffers.allocate(4, 3, "cpu")).items() if k != "registered"}
    with pytest.raises(error, match=f"^DraftBuffers: {message}"):
        DraftBuffers(**given | {name: value})


def test_buffers_with_any_strides():
    given = {k: v for k, v in vars(DraftBuffers.allocate(4, 3, "cpu")).items() if k != "registered"}
    for tokens in (torch.zeros(3, 4).long().t(), torch.zeros(8, 6).long()[::2, ::2], torch.zeros(4, 1).long()):
        DraftBuffers(**given | {"draft_tokens": tokens})
    with pytest.raises(ValueError, match=r"^DraftSampler: logits_cache must not name an element twice"):
        DraftSampler(
            DraftBuffers(**given), torch.zeros(4), torch.zeros(4).long(),
            logits_cache=torch.zeros(1, 3, 9).expand(4, 3, 9),
        )  # fmt: skip


@pytest.mark.parametrize("mode", ["eager", "step", "loop"])
@pytest.mark.parametrize("token", [-1, 9, 2**31 + 3])
def test_tokens_outside_the_vocabulary_are_found(mode, token):
    """In debug mode, with the row and the step. Padded rows may hold anything."""

    def loop(bad_row, **changes):
        thin = thin_loop(hidden=False)[0]
        sampled = torch.full((3,), 4)
        sampled[bad_row] = token
        return DraftLoop(
            thin.model_fn, lambda key, output: sampled[: key.num_reqs], thin.buffers, thin.metadata, thin.num_drafts,
            thin.max_len, **changes,
        )  # fmt: skip

    loop(1).run(2, mode, replay=False)
    with pytest.raises(
        ValueError, match=f"^DraftLoop: drafts must be tokens from 0 to 8, got {token} in row 1, step 1"
    ):
        loop(1, debug=True, vocab_size=9).run(2, mode, replay=False)
    loop(2, debug=True, vocab_size=9).run(2, mode, key=GraphKey(3), replay=False)
    if token == 9:
        loop(1, debug=True).run(2, mode, replay=False)
    else:
        with pytest.raises(ValueError, match=f"^DraftLoop: drafts must be tokens from 0 to 2147483647, got {token} in"):
            loop(1, debug=True).run(2, mode, replay=False)


# ---------------------------------------------------------------- requirements


def test_every_requirement_names_a_test_that_exists():
    """The table of docs/internals/draft-loop-tests.md lists all numbers of both lists, and rows name real tests."""
    text = (ROOT / "docs/internals/draft-loop-tests.md").read_text()
    rows = re.findall(r"^\| (\d+)-(\d+) \| .* \| (.*) \|$", text, re.MULTILINE)
    numbers = [(int(pull), int(number)) for pull, number, _ in rows]
    assert numbers == [(41162, n) for n in range(1, 13)] + [(34880, n) for n in range(1, 16)]
    for pull, number, tests in rows:
        named = re.findall(r"`([\w/.]+\.py)::(\w+)`", tests)
        assert named, (pull, number)
        for file, test in named:
            assert re.search(rf"^def {test}\b", (ROOT / "tests" / file).read_text(), re.MULTILINE), (file, test)
