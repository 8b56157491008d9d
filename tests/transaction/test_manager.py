"""Test the manager: its protocol, and that a window leaves only the accepted rows, byte for byte."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transactions import KINDS, Batch, Request, Transactions, begin, one_thread, put_rows  # noqa: F401

import nwor_ops.transaction.manager
import nwor_ops.transaction.protocol
import nwor_ops.transaction.undo_log
from nwor_ops import DraftCommitManager, LayerCache, Layout, Plane, Stats, Window
from nwor_ops.ops.bound import bind
from nwor_ops.testing.layouts import Shape, make_pages, memory
from nwor_ops.transaction.manager import State

# Prefill, decode with drafts of every outcome, decode without drafts.
MIXED = (Request(5), Request(1, 4, 2), Request(1, 3, 0), Request(1), Request(2, 2, 2), Request(1, 1, 0))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def new_manager(**options) -> DraftCommitManager:
    sizes = {"max_num_tokens": 8, "max_num_requests": 2, "max_draft_tokens": 4, "device": "cpu"}
    return DraftCommitManager(**(sizes | options))


def some_cache(device: str = "cpu") -> LayerCache:
    return LayerCache.packed(torch.zeros(2, 4, 2, 16, device=device))


def allocated_manager(**options) -> DraftCommitManager:
    manager = new_manager(**options)
    manager.register_layer("a", some_cache(str(manager.device)))
    manager.allocate()
    manager.bind(Layout({"default": torch.arange(8)}))
    return manager


def small_window(num_draft_tokens: int | None = 2) -> Window:
    return Window(int32(0, 2, 4), int32(1, 2), num_draft_tokens)


def key_value(tokens: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(tokens, 2, 8), torch.ones(tokens, 2, 8)


# ---------------------------------------------------------------- set-up


def test_calls_before_and_after_allocate():
    manager = new_manager()
    assert (manager.stats(), manager.log_bytes) == (Stats(0, 0, 0, 0, 0, 0, 0), 0)
    with pytest.raises(RuntimeError, match="allocate: no layer is registered"):
        manager.allocate()
    with pytest.raises(RuntimeError, match=r"between windows, it is registering layers; call allocate\(\) first"):
        manager.begin(small_window())
    with pytest.raises(KeyError, match="is not registered, or not allocated"):
        manager.writer("a")
    manager.register_layer("a", some_cache())
    with pytest.raises(ValueError, match="register_layer: name must be new, 'a' is registered already"):
        manager.register_layer("a", some_cache())
    with pytest.raises(TypeError, match="cache of 'b' must be on device cpu, got meta"):
        manager.register_layer("b", some_cache("meta"))
    manager.allocate()
    for call in (manager.allocate, lambda: manager.register_layer("b", some_cache())):
        with pytest.raises(RuntimeError, match="the manager must be registering layers"):
            call()


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerCache.packed(torch.zeros(2, 4, 2, 15)),
        lambda: LayerCache.packed(torch.zeros(2, 4, 16)),
        lambda: LayerCache.split(torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 3, 8)),
        lambda: LayerCache.split(torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8, dtype=torch.half)),
        lambda: LayerCache.split(*[torch.zeros(2, 4, 2, 8)] * 2),
        lambda: LayerCache.opaque(),
        lambda: LayerCache.opaque(torch.zeros(2, 4, 1, 8), torch.zeros(3, 4, 1, 8)),
        lambda: LayerCache((Plane(torch.zeros(2, 4, 1, 8)),) * 3),
        lambda: Plane(torch.zeros(8, 2, 16)),
        lambda: Plane(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, dtype=torch.int32)),
    ],
)
def test_invalid_caches(make):
    with pytest.raises(ValueError, match=r"^(LayerCache|Plane)"):
        make()


# ---------------------------------------------------------------- protocol


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("write", ("a", *key_value(), torch.arange(4))),
        ("log", ("a", torch.arange(4))),
        ("commit", (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64))),
        ("commit_rejected", (int32(0, 0),)),
        ("abandon", ()),
    ],
)
@pytest.mark.parametrize("earlier", ["never", "commit", "cancel", "abandon"])
def test_outside_a_window(name, arguments, earlier):
    manager = allocated_manager()
    if earlier != "never":
        manager.bind(Layout({"default": torch.full((4,), -1)}))  # nothing to write
        manager.begin(small_window())
        {
            "commit": lambda: manager.commit_rejected(int32(1, 1)),
            "cancel": manager.cancel,
            "abandon": manager.abandon,
        }[earlier]()
    called = f"{name} of layer 'a'" if name in ("write", "log") else name
    with pytest.raises(RuntimeError, match=rf"^{called}: .*window.*; call begin\(\) first"):
        getattr(manager, name)(*arguments)
    assert manager.state is State.CLOSED
    assert not memory(manager._layers.classes[0].caches)[0].any()


@pytest.mark.parametrize("method", ["write", "log"])
def test_unknown_layer(method):
    manager = allocated_manager()
    manager.begin(small_window())
    arguments = (*key_value(), torch.arange(4)) if method == "write" else (torch.arange(4),)
    with pytest.raises(KeyError, match="layer 'z' is not registered"):
        getattr(manager, method)("z", *arguments)


@pytest.mark.parametrize("token_offset", [5, -1, 0.5, True])
@pytest.mark.parametrize("method", ["write", "log"])
def test_tokens_outside_batch_are_refused(method, token_offset):
    manager = allocated_manager()
    manager.begin(small_window())
    arguments = (*key_value(), torch.arange(4)) if method == "write" else (torch.arange(4),)
    with pytest.raises((ValueError, TypeError), match=rf"^{method} of layer 'a': token_offset must "):
        getattr(manager, method)("a", *arguments, token_offset=token_offset)


def test_write_to_an_opaque_layer():
    manager = new_manager()
    manager.register_layer("latent", LayerCache.opaque(torch.zeros(2, 4, 1, 16)))
    manager.allocate()
    manager.bind(Layout({"default": torch.arange(4)}))
    manager.begin(small_window())
    with pytest.raises(RuntimeError, match=r"the planes of layer 'latent' are opaque; call log\(\)"):
        manager.write("latent", *key_value(), torch.arange(4))


# ---------------------------------------------------------------- refused before anything changes

TOO_MUCH = {
    "drafts known to the host": (Window(int32(0, 6), int32(5), 5),
                                 r"begin: window must have 0 to 4 drafts \(max_draft_tokens\), got 5"),
    "drafts known only to the device": (Window(int32(0, 6), int32(5), None),
                                        "plan_window: row_slots must have a row for each draft, got 4 rows for 5"),
    "requests": (Window(int32(0, 2, 4, 6), int32(1, 2, 3), 3), "plan_window: num_requests must be from 0 to the 2"),
    "more drafts than tokens": (Window(int32(0, 2), int32(3), 3),
                                "plan_window: cu_num_draft_tokens must give a request no more drafts than tokens"),
}  # fmt: skip


@pytest.mark.parametrize(("window", "sentence"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_refused(window, sentence):
    manager = allocated_manager()
    manager.begin(small_window())
    manager.write("a", *key_value(), torch.arange(4))
    manager.commit_rejected(int32(1, 0))
    everything = [vars(manager.buffers), manager.recovery.classes[0].logs, manager._layers.classes[0].caches]
    before = memory(everything)
    with pytest.raises(ValueError, match=sentence):
        manager.begin(window)
    assert manager.state is State.CLOSED
    assert all(torch.equal(a, b) for a, b in zip(before, memory(everything), strict=True))
    with pytest.raises(ValueError, match="plan_window: log_rows must be "):
        manager.bind(Layout({"default": torch.arange(9)}))  # more tokens than the manager's limit
    with pytest.raises(RuntimeError, match=r"begin: no layout is bound; call bind\(\) first"):
        manager.begin(small_window())


def test_commit_needs_a_column_per_draft():
    """Otherwise it would undo an accepted draft. Nothing is written, and the window stays open."""
    transactions = Transactions(["packed"])
    batch = transactions.batch((Request(1, 3, 3), Request(1, 1, 0)))
    begin(transactions.manager, batch)
    transactions.forward(batch, batch.drafted)
    before = memory(vars(transactions.manager.buffers))
    with pytest.raises(ValueError, match=r"^reject_rows: sampled_token_ids must have .*2 columns for the 3 drafts"):
        transactions.manager.commit(batch.draft_token_ids, batch.sampled_token_ids[:, :2])
    after = memory(vars(transactions.manager.buffers))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    transactions.manager.cancel()
    transactions.assert_as_expected()


# ---------------------------------------------------------------- mistakes of an engine


def test_counts_in_place_of_cumulative_counts():
    """[2, 2] for [2, 4]: the second request's drafts would stay in the cache, as tokens without a draft."""
    manager, cache = new_manager(), torch.zeros(2, 4, 2, 16)
    manager.register_layer("a", LayerCache.packed(cache))
    manager.allocate()
    slots = torch.arange(6)
    drafts, sampled = torch.tensor([5, 6, 7, 0]), torch.tensor([[5, 9, -1], [9, -1, -1]])
    manager.bind(Layout({"default": slots}))
    manager.begin(Window(int32(0, 3, 6), int32(2, 2)))
    manager.write("a", *key_value(6), slots)
    sentence = r"commit: draft_token_ids must hold the 2 drafts of the window, then -1, got 4; .*Window.from_counts"
    with pytest.raises(ValueError, match=sentence):
        manager.commit(drafts, sampled)
    with pytest.raises(ValueError, match=r"commit_rejected: num_rejected must be at most 0 for request 1, .*, got 1; "):
        manager.commit_rejected(int32(1, 1))
    manager.cancel()
    cache.zero_()
    manager.begin(Window(int32(0, 3, 6), int32(2, 4), num_draft_tokens=3))  # commit would not look at the fourth
    manager.writer("a").write(*key_value(6), slots)
    for end, outcome in (("commit", (drafts, sampled)), ("commit_rejected", (int32(1, 2),))):
        with pytest.raises(ValueError, match=f"^{end}: num_draft_tokens of the window must be at least 4, .* got 3"):
            getattr(manager, end)(*outcome)
    manager.cancel()
    assert cache.view(8, 32)[:, 0].tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
    for counts, known in ((iter([2, 2]), 4), (np.array([2, 2]), 4), (int32(2, 2), None)):
        cache.zero_()
        window = Window.from_counts(int32(0, 3, 6), counts)
        assert window.cu_num_draft_tokens.dtype == torch.int32
        assert (window.cu_num_draft_tokens.tolist(), window.num_draft_tokens) == ([2, 4], known)
        manager.begin(window)
        manager.write("a", *key_value(6), slots)
        manager.commit(torch.cat([drafts, torch.tensor([-1])]), sampled)  # padded
        assert cache.view(8, 32)[:, 0].tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    for wrong, error, sentence in (
        ([2, -1], ValueError, r"\[1\] must be at least 0, got -1"),
        (torch.tensor([2.9, 2.0]), TypeError, " must have dtype torch.int32 or torch.int64, got torch.float32"),
        (int32(2, 2)[None], ValueError, " must have one dimension"),
        (2, TypeError, " must be a tensor or integers, got 2"),
    ):
        with pytest.raises(error, match=f"^Window.from_counts: counts{sentence}"):
            Window.from_counts(int32(0, 3, 6), wrong)
    with pytest.raises(TypeError, match=r"^Window.from_counts: query_start_loc must be a tensor"):
        Window.from_counts([0, 3, 6], [2, 2])


@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
def test_window_that_no_layer_wrote(end):
    """An engine whose write site does not call the manager. Without slots there is nothing to write."""
    manager = allocated_manager()
    arguments = (int32(0, 0),) if end == "commit_rejected" else (torch.tensor([5, 6]), torch.tensor([[5, 7], [6, 7]]))
    manager.begin(small_window())
    with pytest.raises(RuntimeError, match=rf"{end}: no layer has written in this window; call write\(\) or log\(\)"):
        getattr(manager, end)(*arguments)
    manager.cancel()
    manager.bind(Layout({"default": torch.full((4,), -1)}))
    manager.begin(small_window())
    getattr(manager, end)(*arguments)
    assert manager.stats().accepted == 2


# ---------------------------------------------------------------- what is left in the cache


def commit(transactions, batch):
    transactions.manager.commit(batch.draft_token_ids, batch.sampled_token_ids)


@pytest.mark.parametrize("start", [0, 5])
def test_debug_mode_compares_the_slots(start, monkeypatch):
    """A draft with another slot than in the window is found before anything is written. Other tokens may have any."""
    monkeypatch.setattr(nwor_ops.transaction.protocol, "_DEBUG_SYNC", True)
    transactions = Transactions()
    batch = transactions.batch(MIXED)
    begin(transactions.manager, batch)
    for name in transactions.caches:
        group = transactions.group_of[name]
        elsewhere, views = batch.slots[group].clone(), [plane.view for plane in transactions.caches[name].planes]
        before = memory(views)
        place = batch.drafted[-1]
        elsewhere[place] += 1
        rows = tuple(plane_rows[start:] for plane_rows in transactions.rows(name, batch.num_tokens))
        sentence = (
            rf"^(write|log) of layer '{name}': slot_mapping must have the slots of the window, got slot "
            rf"{elsewhere[place]} for the draft at index {place - start}, which has another slot there"
        )
        with pytest.raises(ValueError, match=sentence):
            transactions.write(name, rows, elsewhere[start:], token_offset=start)
        assert all(map(torch.equal, before, memory(views)))
    transactions.forward(batch, batch.rejected)
    commit(transactions, batch)
    transactions.assert_as_expected()


# ---------------------------------------------------------------- compiled


def compiled_forward(transactions: Transactions, read: bool, backend, dynamic: bool | None):
    def forward(rows_of, slots_of, offset=0):
        outputs = []
        for name, cache in transactions.caches.items():
            slots = slots_of[transactions.group_of[name]]
            if cache.writable:
                transactions.manager.write(name, *cache.key_value(rows_of[name]), slots, token_offset=offset)
            else:
                transactions.manager.log(name, slots, token_offset=offset)
            if read:  # as the attention of a model would
                outputs.append(cache.planes[0].view.flatten(0, 1)[slots.clamp(min=0)].clone())
        return outputs

    return torch.compile(forward, fullgraph=True, backend=backend, dynamic=dynamic)


def finish_writes(transactions: Transactions, batch, rows) -> None:
    """Write the rows of layers whose writer is not ours, and expect all rows that stay."""
    for name, cache in transactions.caches.items():
        slots = batch.slots[transactions.group_of[name]]
        if not cache.writable:
            put_rows(cache.planes, rows[name], slots.tolist())
        transactions.expect(name, rows[name], slots, batch.rejected)


@pytest.mark.parametrize(
    ("kinds", "backend", "dynamic", "read"),
    [
        *(((kind,), "aot_eager", None, read) for kind in KINDS for read in (False, True)),
        *((tuple(KINDS), "aot_eager", None, read) for read in (False, True)),
        (("packed", "one_backing", "split", "latent"), "inductor", None, True),
        (("one_backing", "split", "latent"), "inductor", True, False),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled(kinds, backend, dynamic, read):
    """Compile layers that share a storage, are interleaved in it, or start inside it, as one full graph.

    All layers here are of these kinds. Without `_traced_root` of layers.py, torch 2.13 fails on the packed kinds. If
    sizes are symbols, it logs every layer into the rows of the first one (`torch_fixes.static`).
    """
    torch.compiler.reset()
    transactions = Transactions(kinds)
    forward = compiled_forward(transactions, read, backend, dynamic)
    for seed in range(2):
        batch = transactions.batch(MIXED, padding=2, seed=seed)
        rows = {name: transactions.rows(name, batch.num_tokens) for name in transactions.caches}
        begin(transactions.manager, batch)
        outputs = forward(rows, batch.slots)
        finish_writes(transactions, batch, rows)
        for name, output in zip(transactions.caches, outputs, strict=False):
            if transactions.caches[name].writable:  # reads return what was written, drafts included
                written = rows[name][0][:-2]
                assert memory(output[:-2].clone())[0].equal(memory(written.clone())[0])
        commit(transactions, batch)
        transactions.assert_as_expected()


def test_compiled_layers_of_one_byte_buffer():
    """As in vLLM, each page is bytes of all layers, viewed as their dtype. No tensor of it begins the storage."""
    torch.compiler.reset()
    manager, buffer = new_manager(), torch.zeros(2, 2, 4 * 2 * 16 * 4, dtype=torch.int8)
    for name, part in zip("ab", buffer.unbind(1), strict=True):
        manager.register_layer(name, LayerCache.packed(part.view(torch.float32).unflatten(1, (4, 2, 16))))
    manager.allocate()
    manager.bind(Layout({"default": torch.arange(4)}))
    (key, value), slots = key_value(), torch.arange(4)

    def forward():
        for factor, name in enumerate("ab", 1):
            manager.write(name, key * factor, value * factor, slots)

    manager.begin(small_window())
    torch.compile(forward, fullgraph=True, backend="aot_eager")()
    manager.commit_rejected(int32(0, 1))
    assert buffer.view(torch.float32).view(2, 2, 4, 32)[..., 0].tolist() == [
        [[1, 1, 1, 0], [2, 2, 2, 0]],
        [[0] * 4] * 2,
    ]


@pytest.mark.parametrize("dynamic", [None, True], ids=["", "dynamic"])
def test_the_number_of_tokens_stays_a_symbol(dynamic):
    """If it is marked as dynamic, it stays a symbol next to caches of any size: 16 blocks of 4 slots here."""
    torch.compiler.reset()
    transactions = Transactions(["packed", "one_backing"])
    counter = CompileCounterWithBackend("eager")
    forward = compiled_forward(transactions, False, counter, dynamic)
    for seed, num_tokens in enumerate((16, 4, 17)):
        batch = transactions.batch([Request(num_tokens - 2, 2, 1)], seed=seed)
        rows = {name: transactions.rows(name, num_tokens) for name in transactions.caches}
        for tensor in itertools.chain(batch.slots.values(), *rows.values()):
            torch._dynamo.mark_dynamic(tensor, 0)
        begin(transactions.manager, batch)
        forward(rows, batch.slots)
        finish_writes(transactions, batch, rows)
        commit(transactions, batch)
        transactions.assert_as_expected()
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_compiled_micro_batches(dynamic):
    """An offset is a host value. A graph may have any offset that fits."""
    torch.compiler.reset()
    transactions = Transactions(["packed", "latent"])
    compiled = compiled_forward(transactions, False, "aot_eager", dynamic)
    for seed, cut in enumerate((5, 3)):
        batch = transactions.batch(MIXED, seed=seed)
        rows = {name: transactions.rows(name, batch.num_tokens) for name in transactions.caches}
        begin(transactions.manager, batch)
        for part in (slice(0, cut), slice(cut, None)):
            some = {name: tuple(plane_rows[part] for plane_rows in rows[name]) for name in rows}
            compiled(some, {group: slots[part] for group, slots in batch.slots.items()}, part.start)
        finish_writes(transactions, batch, rows)
        commit(transactions, batch)
        transactions.assert_as_expected()


# ---------------------------------------------------------------- counts


def test_log_bytes():
    """The bytes of a token in every layer times the number of rows, plus one int64 per row and layer."""
    transactions = Transactions(["packed", "split", "latent"], max_draft_tokens=16)
    token = 2 * (2 * 16 * 2) + 2 * (2 * (8 + 12) * 4) + 2 * 24
    assert transactions.manager.log_bytes == 16 * (token + 6 * 8)


@pytest.mark.parametrize("layers", [1, 32])
@pytest.mark.parametrize("kind", ["packed", "split", "both"])
def test_launches_per_window(layers, kind, monkeypatch):
    """Begin and commit launch as many kernels for 32 layers as for one. A write is one launch."""
    manager, bound = new_manager(), []
    for index in range(layers):
        for layout in ("packed", "split") if kind == "both" else (kind,):
            pages = make_pages("nhd", Shape(2, 4, 2, 8, 8), torch.float32)
            cache = some_cache() if layout == "packed" else LayerCache.split(pages.key_caches[0], pages.value_caches[0])
            manager.register_layer(f"{layout}.{index}", cache)
    manager.allocate()
    for module in (nwor_ops.transaction.manager, nwor_ops.transaction.undo_log):
        monkeypatch.setattr(module, "bind", lambda op, *args, **named: bound.append(op) or bind(op, *args, **named))
    manager.bind(Layout({"default": torch.arange(4)}))
    restores = {"packed": 1, "split": 2, "both": 3}[kind]
    by_tokens = ["plan_window", "reject_rows", *["restore_slots"] * restores]
    by_counts = ["restore_slots_from_rejected", *["restore_slots"] * (restores - 1)]
    assert sorted(bound) == sorted(by_tokens + by_counts)
