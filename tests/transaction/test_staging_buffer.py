"""Test StagingBuffer and KVCacheInterceptor against plain writes of the kept rows, on all memory of the caches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensors import numbers
from transactions import KINDS, one_thread  # noqa: F401

from nwor_ops import KVCacheInterceptor, LayerCache, StagingBuffer, ops
from nwor_ops.testing.layouts import memory, twin

ROWS, TOKENS = 12, 16
WRITABLE = tuple(kind for kind in KINDS if kind not in ("amx", "latent"))


class Staged:
    """A buffer over layers of some kinds, and a copy of the expected caches."""

    def __init__(self, kinds=WRITABLE):
        self.buffer = StagingBuffer(max_num_tokens=TOKENS, max_num_rows=ROWS, device="cpu")
        self.caches, self.seed = {}, 0
        for number, kind in enumerate(kinds):
            _, construct, layout, shape, dtype = KINDS[kind]
            for index, cache in enumerate(construct(layout, shape, dtype, number)):
                name = f"{kind}.{index}"
                self.caches[name] = cache
                self.buffer.register_layer(name, cache)
        self.buffer.allocate()
        self.dtypes = {name: KINDS[name.split(".")[0]][4] for name in self.caches}
        self.views = [[plane.view for plane in cache.planes] for cache in self.caches.values()]
        copies = twin(self.views)
        self.expected = dict(zip(self.caches, copies, strict=True))

    def sources(self, name, tokens):
        self.seed += 1
        heads = self.caches[name].planes[0].view.shape[2]
        widths = [c.shape[-1] for c in self.caches[name].key_value()]
        return [numbers(tokens, heads, width, dtype=self.dtypes[name], seed=self.seed) for width in widths]

    def key_value(self, name, planes):
        return self.caches[name].key_value(tuple(planes))

    def stage_all(self, tokens, num_layers=None, stage=None, cut=0):
        """Stage every layer or the first ones, in two micro-batches with `cut`, and return their sources."""
        written = {name: self.sources(name, tokens) for name in list(self.caches)[:num_layers]}
        for name, (key, value) in written.items():
            for part in (slice(0, cut), slice(cut, None)) if cut else (slice(0, None),):
                offset = {"token_offset": part.start} if part.start else {}
                (stage or self.buffer.stage)(name, key[part], value[part], **offset)
        return written

    def expect(self, written, rows_of_tokens, slots, kept):
        """Write the rows `kept` to their slots in the expected caches."""
        slot_of_row = {row: slot for row, slot in enumerate(slots) if row in kept}
        mapping = torch.tensor([slot_of_row.get(row, -1) for row in rows_of_tokens], dtype=torch.int64)
        for name, (key, value) in written.items():
            caches = self.key_value(name, self.expected[name])
            ops.write_kv(key, value, *caches, mapping, torch.ones(1), torch.ones(1), "auto")

    def assert_as_expected(self):
        theirs = memory(list(self.expected.values()))
        assert all(torch.equal(a, b) for a, b in zip(memory(self.views), theirs, strict=True))


@pytest.mark.parametrize("larger_first", [False, True])
def test_a_slot_outside_rejects_the_window(larger_first):
    """Layers of 64 and of 68 slots: one has this slot and the other does not."""
    _, construct, layout, shape, dtype = KINDS["packed"]
    caches = [construct(layout, shape._replace(blocks=blocks), dtype, 0)[0] for blocks in (16, 17)]
    buffer = StagingBuffer(max_num_tokens=4, max_num_rows=4, device="cpu")
    for index, cache in enumerate(reversed(caches) if larger_first else caches):
        buffer.register_layer(str(index), cache)
    buffer.allocate()
    views = [cache.planes[0].view for cache in caches]
    before = twin(views)
    buffer.begin(torch.tensor([3, 64, 5]))
    for name in "01":
        buffer.stage(name, *(numbers(3, shape.heads, shape.key_width, dtype=dtype, seed=seed) for seed in (1, 2)))
    buffer.commit(torch.tensor([True, True, False]))
    assert all(torch.equal(a, b) for a, b in zip(memory(views), memory(before), strict=True))
    assert buffer.stats().incomplete == 1


@given(st.data())
def test_any_windows(data):
    """Windows of any rows in sequence: no data of an earlier window remains. A commit may name other slots.

    If a forward stopped before a layer, no cache gets a row, whatever was accepted.
    """
    staged = Staged(data.draw(st.lists(st.sampled_from(WRITABLE), min_size=1, max_size=3, unique=True)))
    counts = {"windows": 0, "staged": 0, "stage_operations": 0, "committed": 0, "incomplete": 0}
    for _ in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.integers(0, ROWS))
        some_slots = st.lists(st.integers(-1, 63), min_size=rows, max_size=rows, unique=True)
        some_flags = st.lists(st.booleans(), min_size=rows, max_size=rows)
        slots, order = data.draw(some_slots), data.draw(st.permutations(range(rows)))
        drop = data.draw(some_flags) if data.draw(st.booleans()) else []
        token_rows = [row if not (drop and drop[row]) else -1 for row in order]
        num_layers = data.draw(st.sampled_from([len(staged.caches)] * 4 + [0, 1]))
        staged.buffer.begin(torch.tensor(slots, dtype=torch.int64), torch.tensor(token_rows, dtype=torch.int32))
        written = staged.stage_all(rows, num_layers, cut=data.draw(st.integers(0, max(0, rows - 1))))
        staged.assert_as_expected()  # no cache has a row yet
        for name, sources in written.items():
            for kept, source in zip(staged.buffer.rows(name), sources, strict=True):
                assert all(torch.equal(kept[row], source[token]) for token, row in enumerate(token_rows) if row >= 0)
        has_rows = {row for row in token_rows if row >= 0} if num_layers == len(staged.caches) else set()
        counts["windows"] += 1
        counts["staged"] += sum(row >= 0 for row in token_rows) * (num_layers > 0)
        counts["stage_operations"] += sum(row >= 0 for row in token_rows) * len(written)
        accepted = data.draw(st.none() | some_flags, "None: reject")
        if accepted is None:
            staged.buffer.reject()
        else:
            others = data.draw(st.none() | some_slots)
            slots = slots if others is None else others
            destinations = () if others is None else (torch.tensor(others, dtype=torch.int64),)
            staged.buffer.commit(torch.tensor(accepted, dtype=torch.bool), *destinations)
            wanted = {row for row in range(rows) if accepted[row] and slots[row] >= 0}
            if wanted <= has_rows:
                staged.expect(written, token_rows, slots, wanted)
                counts["committed"] += len(wanted)
            else:
                counts["incomplete"] += 1
        staged.assert_as_expected()
        stats = vars(staged.buffer.stats())
        assert {name: stats[name] for name in counts} == counts
        assert stats["rejected"] == counts["staged"] - counts["committed"]


@pytest.mark.parametrize("dynamic", [None, True], ids=["", "dynamic"])
def test_compiled_stage(dynamic):
    """One compilation serves later windows: rows, marks and slots are data. Buffer sizes are never symbols."""
    staged = Staged(("packed",))
    torch._dynamo.reset()
    step = torch.compile(
        lambda name, key, value: staged.buffer.stage(name, key * 2, value + 1), fullgraph=True, dynamic=dynamic
    )
    for window in range(3):
        slots, rows = torch.randperm(60)[:6], torch.randperm(6, dtype=torch.int32)
        staged.buffer.begin(slots, rows)
        written = staged.stage_all(6, stage=step)
        accepted = torch.rand(6) < 0.5
        staged.buffer.commit(accepted)
        doubled = {name: (key * 2, value + 1) for name, (key, value) in written.items()}
        staged.expect(doubled, rows.tolist(), slots.tolist(), set(accepted.nonzero().flatten().tolist()))
        staged.assert_as_expected()
        assert staged.buffer.stats().windows == window + 1
    torch._dynamo.reset()


def test_the_protocol():
    staged = Staged(("packed",))
    key, value = staged.sources("packed.0", 3)
    with pytest.raises(RuntimeError, match="no window is open"):
        staged.buffer.stage("packed.0", key, value)
    for call in (lambda: staged.buffer.commit(torch.ones(1, dtype=torch.bool)), staged.buffer.reject):
        with pytest.raises(RuntimeError, match="must be inside a window, it is between windows"):
            call()
    staged.buffer.begin(torch.arange(3))
    with pytest.raises(RuntimeError, match=r"it is inside a window; call commit\(\) or reject\(\) first"):
        staged.buffer.begin(torch.arange(3))
    for method, arguments in (("stage", (key, value)), ("rows", ())):
        with pytest.raises(KeyError, match=f"{method}: layer 'other' is not registered"):
            getattr(staged.buffer, method)("other", *arguments)


WRONG = [
    ({"row_slots": torch.arange(13)}, ValueError, r"row_slots must have one dimension of at most 12, got \[13\]"),
    ({"row_slots": torch.arange(3).int()}, TypeError, "row_slots must have dtype torch.int64, got torch.int32"),
    ({"stage_rows": torch.arange(3)}, TypeError, "stage_rows must have dtype torch.int32, got torch.int64"),
    ({"stage_rows": torch.arange(17).int()}, ValueError, "stage_rows must have one dimension of at most 16"),
]  # fmt: skip


@pytest.mark.parametrize(("replaced", "error", "sentence"), WRONG)
def test_wrong_windows_change_nothing(replaced, error, sentence):
    buffer = Staged(("packed",)).buffer
    before = [buffer.row_slots.clone(), buffer.stage_rows.clone(), buffer.window_id.clone()]
    with pytest.raises(error, match=f"^begin: {sentence}"):
        buffer.begin(**{"row_slots": torch.arange(3)} | replaced)
    after = [buffer.row_slots, buffer.stage_rows, buffer.window_id]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_wrong_layers():
    buffer = StagingBuffer(max_num_tokens=4, max_num_rows=4, device="cpu")
    with pytest.raises(RuntimeError, match="no layer is registered"):
        buffer.allocate()
    _, construct, layout, shape, dtype = KINDS["latent"]
    with pytest.raises(ValueError, match="must hold a key and a value, they are opaque"):
        buffer.register_layer("latent", construct(layout, shape, dtype, 0)[0])
    _, construct, layout, shape, dtype = KINDS["packed"]
    cache = construct(layout, shape, dtype, 0)[0]
    buffer.register_layer("one", cache)
    with pytest.raises(ValueError, match="'one' is registered already"):
        buffer.register_layer("one", cache)
    with pytest.raises(TypeError, match="cache of 'two' must be on device cpu, got meta"):
        buffer.register_layer("two", LayerCache.packed(torch.zeros(2, 2, 1, 8, device="meta")))
    for call in (lambda: buffer.begin(torch.arange(1)), lambda: buffer.rows("one"), lambda: KVCacheInterceptor(buffer)):
        with pytest.raises(RuntimeError, match=r"allocate\(\) first|allocated first"):
            call()
    assert buffer.stats().windows == 0
    buffer.allocate()
    with pytest.raises(RuntimeError, match=r"^allocate: "):
        buffer.allocate()


def test_layer_of_another_dtype_is_refused():
    """Before any window: at commit the layers before it would have their rows already."""
    buffer = StagingBuffer(max_num_tokens=4, max_num_rows=4, device="cpu")
    buffer.register_layer("good", LayerCache.packed(torch.zeros(2, 2, 1, 8)))
    buffer.register_layer("bad", LayerCache.packed(torch.zeros(2, 2, 1, 8, dtype=torch.float64)))
    with pytest.raises(TypeError, match=r"^commit_staged: staged_key must have dtype"):
        buffer.allocate()


def test_refused_commit_changes_nothing():
    """Not even the destinations: the window can be committed to those given at begin."""
    staged = Staged(("packed",))
    staged.buffer.begin(torch.tensor([7, 8, 9]))
    written = staged.stage_all(3)
    for accepted, error in (
        (torch.ones(1, 2, dtype=torch.bool), ValueError),
        (torch.ones(2, dtype=torch.bool, device="meta"), TypeError),
        (torch.ones(2, dtype=torch.int32), TypeError),
    ):
        with pytest.raises(error, match=r"^commit: accepted must "):
            staged.buffer.commit(accepted, torch.tensor([30, 31, 32]))
    staged.buffer.commit(torch.tensor([True, True]))
    staged.expect(written, range(3), (7, 8, 9), {0, 1})
    staged.assert_as_expected()
    assert staged.buffer.stats().windows == 1


def test_more_tokens_than_max_num_tokens():
    """Tokens past the record would silently not be staged."""
    staged = Staged(("packed",))
    staged.buffer.begin(torch.arange(3))
    for tokens, offset in ((TOKENS + 1, 0), (4, TOKENS - 3)):
        key, value = staged.sources("packed.0", tokens)
        sentence = rf"^stage of layer 'packed\.0': token_offset .* for {tokens} of {TOKENS} tokens .* got {offset}"
        with pytest.raises(ValueError, match=sentence):
            staged.buffer.stage("packed.0", key, value, token_offset=offset)
    staged.stage_all(TOKENS)


# ---------------------------------------------------------------- the interceptor


@pytest.mark.filterwarnings("ignore:nwor_ops. a window was written directly")
def test_interceptor_stages_or_writes():
    """A window with too many rows is written directly too. Attention reads the staged rows if begin says so."""
    staged = Staged()
    interceptor = KVCacheInterceptor(staged.buffer)
    for begins, tokens, is_staged in ((False, 4, False), (True, 4, True), (True, 13, False)):
        slots, accepted = torch.randperm(60)[:tokens], torch.arange(tokens) % 2 == 0
        assert (begins and interceptor.begin(slots)) is interceptor.staging is is_staged
        written = {name: staged.sources(name, tokens) for name in staged.caches}
        for name, (key, value) in written.items():
            interceptor.write(name, key, value, slots)
        moved = torch.randperm(60)[:tokens] if is_staged else slots  # a direct write is in its place already
        interceptor.commit(accepted, moved)
        staged.expect(written, range(tokens), moved.tolist(), set(range(0, tokens, 1 + is_staged)))
        staged.assert_as_expected()
    assert interceptor.refused_windows == 1
    assert staged.buffer.stats().windows == 1


def test_failed_commit_is_not_repeated(monkeypatch):
    """Its accepted rows may be in some caches already."""
    staged = Staged(("packed",))
    buffer = staged.buffer
    buffer.begin(torch.arange(2))
    buffer.stage("packed.0", *staged.sources("packed.0", 2))
    monkeypatch.setattr(buffer, "_commit_layer", lambda layer: layer.missing)
    with pytest.raises(AttributeError, match="missing"):
        buffer.commit(torch.tensor([True, False]))
    with pytest.raises(RuntimeError, match=r"commit: .* has failed for the open window; call reject"):
        buffer.commit(torch.tensor([True, False]))
    buffer.reject()
    assert (buffer.stats().committed, buffer.stats().rejected) == (0, 2)
    staged.assert_as_expected()


def test_interceptor_protocol():
    staged = Staged(("packed",))
    interceptor = KVCacheInterceptor(staged.buffer)
    assert interceptor.begin(torch.arange(3))
    with pytest.raises(RuntimeError, match=r"begin: the staging buffer must be between windows, it is inside a window"):
        interceptor.begin(torch.arange(3))
    with pytest.raises(TypeError, match=r"^stage: key must be a tensor, got None"):
        interceptor.write("packed.0", None, None, torch.arange(3))
    with pytest.raises(TypeError, match="stage_kv: "):
        interceptor.write("packed.0", *(s.double() for s in staged.sources("packed.0", 3)), torch.arange(3))
    interceptor.cancel()
    staged.assert_as_expected()
    with pytest.raises(KeyError, match="write: layer 'other' is not registered"):
        interceptor.write("other", *staged.sources("packed.0", 1), torch.tensor([0]))
    with pytest.raises(TypeError, match="buffer must be a StagingBuffer, got 3"):
        KVCacheInterceptor(3)
    with pytest.warns(RuntimeWarning, match="written directly: begin: row_slots must have one dimension of at most 12"):
        interceptor.begin(torch.arange(13))
