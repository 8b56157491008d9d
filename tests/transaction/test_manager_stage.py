"""Test mode "stage" of the manager: it has the same calls as "cow", and leaves the same caches."""

from __future__ import annotations

import pytest
import torch
from decoding import ALL, DRAFTS, REQUESTS, STEPS, TOKENS, Engine, refusal
from hypothesis import given
from hypothesis import strategies as st
from tensors import int32, numbers
from transactions import KINDS, Request, begin, make_batch, one_thread, put_rows  # noqa: F401

import nwor_ops
from nwor_ops import DraftCommitManager, LayerCache, Layout, Plane, Window, num_shadow_blocks, ops
from nwor_ops.testing.layouts import make_amx_pages, random_bytes


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_fp8_cache_with_scales(mode):
    """Key and value are quantized by their own scales. A commit moves bytes, so the other rows are restored exactly."""
    cache = random_bytes(12 * 4 * 2 * 16, torch.uint8, seed=3).view(12, 4, 2, 16)
    manager = DraftCommitManager(
        max_num_tokens=8, max_num_requests=1, max_draft_tokens=4, device="cpu", mode=mode, max_drafts_per_request=4
    )
    manager.register_layer("one", nwor_ops.LayerCache.packed(cache))
    manager.allocate()
    batch, expected = make_batch((Request(2, 3, 1),), {"default": [2, 3, 4, 5, 6]}), cache.clone()
    batch.window = batch.window._replace(seq_lens=int32(7))
    slots, key, value = batch.slots["default"], numbers(5, 2, 8, seed=1), numbers(5, 2, 8, seed=2)
    scales = torch.tensor([0.5]), torch.tensor([0.125])
    ops.write_kv(key[:3], value[:3], expected[..., :8], expected[..., 8:], slots[:3].clone(), *scales, "fp8_e4m3")
    begin(manager, batch, {"default": int32(0, 1, 2).view(1, 3)})
    manager.write("one", key, value, slots, kv_cache_dtype="fp8_e4m3", k_scale=scales[0], v_scale=scales[1])
    manager.commit(batch.draft_token_ids, batch.sampled_token_ids)
    assert torch.equal(cache[:6], expected[:6])


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_full_tables_and_padded_rows(device, mode, num_drafts):
    """64 tokens in 128 rows. Nothing is written to the last slot, or after the end of a row of the table.

    Requests end at the end of their rows, and one token before and after it. A token after it has no slot.
    """
    size, columns, count, tokens = 4, 4, 64 // (num_drafts + 1), num_drafts + 1
    pages, shadows = count * columns, num_shadow_blocks(count, num_drafts, size)
    cache = numbers(pages + shadows + 1, size, 1, 16).to(device)  # the last page is nobody's
    expected, (key, value) = cache.clone(), (numbers(128, 1, 8, seed=seed).to(device) for seed in (1, 2))
    manager = DraftCommitManager(
        max_num_tokens=128, max_num_requests=count, max_draft_tokens=64, device=device, mode=mode,
        max_drafts_per_request=num_drafts, shadow_blocks={"default": pages},
    )  # fmt: skip
    manager.register_layer("one", LayerCache.packed(cache))
    manager.allocate()
    blocks = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).view(count, columns)
    wide = torch.nn.functional.pad(blocks, (0, 1), value=pages + shadows).int().to(device)
    before, table, ends = wide.clone(), wide[:, :columns], [size * columns + row % 3 - 1 for row in range(count)]
    places = [(row, p) for row, end in enumerate(ends) for p in range(end - tokens, end)]
    slots = [int(blocks[row, p // size]) * size + p % size if p < size * columns else -1 for row, p in places]
    requests = [Request(1, num_drafts, row % tokens) for row in range(count)]
    for rejects in (False, True):
        batch = make_batch(requests, {"default": slots + [-1] * 64}).on(device)
        batch.window = batch.window._replace(seq_lens=int32(*ends).to(device))
        begin(manager, batch, {"default": table})
        manager.write("one", key, value, batch.slots["default"])
        outcome = [batch.num_rejected] if rejects else [batch.draft_token_ids, batch.sampled_token_ids]
        (manager.commit_rejected if rejects else manager.commit)(*outcome)
        kept = [token for token, slot in enumerate(slots) if slot >= 0 and token not in batch.rejected]
        expected.view(-1, 16)[[slots[token] for token in kept]] = torch.cat([key, value], -1)[kept, 0]
        expected[pages:-1] = cache[pages:-1]  # shadow pages
        assert torch.equal(cache, expected)
        assert batch.slots["default"].tolist() == slots + [-1] * 64
        assert torch.equal(wide, before)


@given(st.data())
def test_any_steps(data):
    """Requests change rows, in other tensors. Without states, a shadow page may then hold rows of another request."""
    kinds = data.draw(st.lists(st.sampled_from(ALL), min_size=1, max_size=3, unique=True))
    options = {name: data.draw(st.booleans()) for name in ("with_states", "leading_zero")}
    options |= {name: data.draw(st.integers(0, most)) for name, most in (("seed", 99), ("num_bonus_tokens", 1))}
    stage, cow = (Engine(kinds, mode, binds=data.draw(st.booleans()), **options) for mode in ("stage", "cow"))
    for _ in range(data.draw(st.integers(1, 5))):
        requests = []
        for _ in range(REQUESTS):
            drafts = data.draw(st.integers(0, DRAFTS))
            requests.append(
                Request(data.draw(st.integers(0 if drafts else 1, 3)), drafts, data.draw(st.integers(0, drafts)))
            )
        end = data.draw(st.sampled_from(["commit", "commit_rejected", "cancel", "abandon"]))
        order = data.draw(st.none() | st.permutations(range(REQUESTS)))
        for engine in (stage, cow):
            engine.step(requests, end)
            if order is not None:
                engine.reorder(order)
        stage.assert_pages(cow)
        assert stage.manager.buffers.num_accepted.tolist() == cow.manager.buffers.num_accepted.tolist()
    assert stage.manager.stats() == cow.manager.stats()


@pytest.mark.parametrize("with_states", [False, True])
def test_refused_last_group_changes_nothing(with_states):
    """Its table has no column for a page. The launches of the earlier groups have redirected slots and tables by
    then."""
    with refusal(with_states=with_states) as (engine, batch):
        last = list(engine.tables)[-1]
        narrow = engine.tables | {last: engine.tables[last][:, :1]}
        engine.manager.bind(Layout(batch.slots, narrow, request_states=with_states))
        with pytest.raises(IndexError, match=r"^open_window: block_tables must have a column"):
            engine.manager.begin(batch.window)
        engine.layout = None  # to bind again


DRAFTING = (Request(1, 2, 1),) * 4


def test_unused_shadow_page_holds_no_row():
    """Rows 0 and 1 of page 0 are copied in the first step, which writes rows 2 and 3."""
    cache = numbers(4, 4, 1, 16, seed=1)
    manager = DraftCommitManager(
        max_num_tokens=2, max_num_requests=1, max_draft_tokens=1, device="cpu", mode="stage", max_drafts_per_request=1
    )
    manager.register_layer("one", LayerCache.packed(cache))
    manager.allocate()
    slots, table = torch.tensor([2, 3]), int32(0).view(1, 1)
    manager.bind(Layout({"default": slots}, {"default": table}, request_states=True))
    manager.begin(Window(int32(0, 2), int32(1), seq_lens=int32(4), request_states=int32(0)))
    assert table.item() > 0
    assert torch.equal(cache[table.item(), :2], cache[0, :2])


@pytest.mark.parametrize("states", [None, [], [0], [3, 1]])
def test_only_forgotten_rows_are_copied(states):
    """Attention reads what the shadow page holds, here bytes that the test has put there. State 3 has page 0."""
    engine = Engine(("packed", "latent"), with_states=True, seed=2)
    for requests in ((Request(6), Request(7), Request(5), Request(3)), DRAFTING):
        engine.step(requests)
    for name, cache in engine.caches.items():
        shadows = cache.planes[0].view[engine.blocks_of(engine.group_of[name]) - engine.shadows :]
        shadows.copy_(torch.full_like(shadows, 77))
    before, lengths = engine.committed_rows(), engine.lengths
    engine.manager.forget_shadow_pages(states)
    engine.manager.begin(engine.batch(DRAFTING).window)
    held = set()
    for rows, old in zip(engine.committed_rows(), before, strict=True):
        parts = zip(rows.split(lengths), old.split(lengths), strict=True)
        held |= {request for request, (one, other) in enumerate(parts) if not torch.equal(one, other)}
    assert held == {q for q, state in enumerate(engine.states.tolist()) if states is not None and state not in states}


def test_rows_that_arrive_after_begin():
    """A loader writes rows in the page of the first draft. Attention reads them from the shadow page."""
    engine = Engine(with_states=True)
    engine.step((Request(6), Request(7), Request(5), Request(3)))
    engine.step(DRAFTING)
    batch = engine.batch(DRAFTING)
    own = {group: table.clone() for group, table in engine.tables.items()}
    engine.manager.begin(batch.window)
    for name, cache in engine.caches.items():
        group = engine.group_of[name]
        size = engine.block_sizes[group]
        for request, length in enumerate(engine.lengths):
            page = int(own[group][request, length // size])
            slots = [page * size + offset for offset in range(length % size)]
            rows = tuple(torch.randint(0, 9, (len(slots), *p.view.shape[2:])).to(p.view.dtype) for p in cache.planes)
            put_rows(cache.planes, rows, slots)
    redirected, expected = engine.tables, []
    for engine.tables in (own, redirected):
        engine.manager.refresh_shadow_pages()
        expected.append(engine.committed_rows())
    for seen, wanted in zip(expected[1], expected[0], strict=True):
        assert torch.equal(seen, wanted)
    engine.manager.cancel()


def test_rows_written_after_abandon_are_copied_again():
    """A window is abandoned in the middle of a forward. The rows of the other layers are written only to the requests'
    pages."""
    engine = Engine(with_states=True)
    for requests in ((Request(6), Request(7), Request(5), Request(3)), DRAFTING):
        engine.step(requests)
    batch, names = engine.batch(DRAFTING), list(engine.caches)
    engine.manager.begin(batch.window)
    engine.forward(batch, layers=names[:3])
    engine.manager.abandon()
    for name in names[3:]:
        planes, slots = engine.caches[name].planes, batch.slots[engine.group_of[name]].tolist()
        rows = tuple(torch.randint(0, 9, (len(slots), *p.view.shape[2:])).to(p.view.dtype) for p in planes)
        put_rows(planes, rows, slots)
    engine.lengths = [length + 2 for length in engine.lengths]
    engine.step(DRAFTING)


def test_when_shadow_pages_are_forgotten_or_refreshed():
    for mode in ("cow", "stage"):
        engine = Engine(mode=mode, with_states=mode == "stage")
        with pytest.raises(RuntimeError, match=r"^refresh_shadow_pages: the manager must be inside a window"):
            engine.manager.refresh_shadow_pages()
        for states, error in (([0, 4], ValueError), ([-1], ValueError), ([0.5], TypeError)):
            with pytest.raises(error, match=r"^forget_shadow_pages: states must be "):
                engine.manager.forget_shadow_pages(states)
        engine.step((Request(6), Request(7), Request(5), Request(3)))
        engine.manager.begin(engine.batch(DRAFTING).window)
        engine.manager.refresh_shadow_pages()
        with pytest.raises(RuntimeError, match=r"^forget_shadow_pages: the manager must be between windows"):
            engine.manager.forget_shadow_pages()
        engine.manager.cancel()
        engine.manager.forget_shadow_pages()


def test_stage_needs_the_most_drafts():
    with pytest.raises(ValueError, match="max_drafts_per_request must be given in mode"):
        DraftCommitManager(max_num_tokens=4, max_num_requests=4, max_draft_tokens=4, device="cpu", mode="stage")


@pytest.mark.parametrize("field", ["slot_mappings", "block_tables"])
def test_groups_with_shared_tensors_are_refused(field):
    """The second group would redirect shadow slots of the first one, and accepted rows would be lost."""
    with refusal(("packed", "latent", "split")) as (engine, batch):
        layout, stats = Layout(batch.slots, engine.tables), engine.manager.stats()
        own = getattr(layout, field)
        for shared in (own["full"], own["full"].view_as(own["full"])):
            sentence = f"^bind: {field} of groups 'full' and 'mla' must not share memory in mode"
            with pytest.raises(ValueError, match=sentence):
                engine.manager.bind(layout._replace(**{field: own | {"mla": shared}}))
        with pytest.raises(RuntimeError, match=r"^begin: no layout is bound; call bind\(\) first"):
            engine.manager.begin(batch.window)
        assert engine.manager.stats() == stats
        engine.layout = None  # to bind again


def test_tensors_of_groups_may_be_interleaved():
    engine, other = (Engine(("packed", "latent"), binds=True) for _ in range(2))
    columns = {group: table.shape[1] for group, table in engine.tables.items()}
    storage = torch.zeros(REQUESTS, sum(columns.values()), dtype=torch.int32)
    parts = storage.split(list(columns.values()), 1)
    for (group, table), part in zip(engine.tables.items(), parts, strict=True):
        engine.tables[group] = part.copy_(table)
    rows = torch.full((2, TOKENS), -1)
    engine.slots = dict(zip(engine.slots, rows, strict=False))
    for requests in STEPS:
        for one in (engine, other):
            one.step(requests)
        engine.assert_pages(other)


def test_too_few_pages_are_refused():
    for requests, first, sentence in (
        (9, None, "18 shadow pages .*from page 0 on, it has 16 pages"),
        (9, {"full": 0}, "18 shadow pages .*from page 0 on, it has 16 pages"),
        (9, {"full": 15}, "18 shadow pages .*from page 15 on, it has 16 pages"),
        (8, None, "pages for requests in addition to its 16 shadow pages .*, it has none"),
    ):
        manager = DraftCommitManager(
            max_num_tokens=9, max_num_requests=requests, max_draft_tokens=9, device="cpu", mode="stage",
            max_drafts_per_request=4, shadow_blocks=first,
        )  # fmt: skip
        _, construct, layout, shape, dtype = KINDS["packed"]
        manager.register_layer("one", construct(layout, shape, dtype, 0)[0], "full")
        with pytest.raises(ValueError, match=rf"group 'full' must have {sentence}"):
            manager.allocate()


def test_pages_without_tokens_are_refused():
    manager = staged_manager({"a": LayerCache.opaque(torch.zeros(16, 0, 1, 8))}, None)
    with pytest.raises(
        ValueError, match=r"^allocate: the layers of group 'a' must have tokens in their pages in mode "
    ):
        manager.allocate()


def staged_manager(caches, shadow_blocks):
    """One layer in each group: 2 requests of up to 4 drafts, pages of 4 slots, so 4 shadow pages."""
    manager = DraftCommitManager(
        max_num_tokens=9, max_num_requests=2, max_draft_tokens=8, device="cpu", mode="stage", max_drafts_per_request=4,
        shadow_blocks=shadow_blocks,
    )  # fmt: skip
    for group, cache in caches.items():
        manager.register_layer(f"layer of {group}", cache, group)
    return manager


def test_groups_must_not_share_shadow_pages():
    """Some engines have one page pool for all groups. Unchecked, each group would overwrite the other's drafts."""
    _, construct, layout, shape, dtype = KINDS["packed"]
    one, other = construct(layout, shape, dtype, 0)
    for blocks in (None, {"a": 9}, {"a": 3, "b": 6}):
        manager = staged_manager({"a": one, "b": one}, blocks)
        with pytest.raises(ValueError, match=r"^allocate: groups 'a' and 'b' share memory and must not share shadow "):
            manager.allocate()
    for caches, blocks in (({"a": one, "b": one}, {"a": 8}), ({"a": one, "b": other}, None)):
        staged_manager(caches, blocks).allocate()


def pools():
    """What two groups have of one pool of memory, and whether the last pages of both share a byte."""
    pages = torch.zeros(64, 4, 4, 4)
    half_as_many = pages.view(32, 4, 4, 8)
    ordered = make_amx_pages(KINDS["amx"][3]._replace(blocks=32), torch.bfloat16)
    key = Plane(ordered.key_caches[0], ordered.key_offsets)
    value = Plane(ordered.value_caches[0], ordered.value_offsets)
    moved = Plane(key.view, value.page_offsets + 16 * 32)
    return {
        "pages of twice the size": (pages, half_as_many, True),
        "parts of a row that overlap": (pages[..., :3], pages[..., 2:], True),
        "parts of a row": (pages[..., :2], pages[..., 2:], False),
        "ranges that overlap in shadow pages": (pages[16:], pages[:62], True),
        "ranges that overlap in other pages": (pages[16:], pages[:60], False),
        "interleaved pages": (pages[::2], pages[1::2], False),
        "interleaved slots": (pages[:, ::2], pages[:, 1::2], False),
        "interleaved heads": (pages[:, :, ::2], pages[:, :, 1::2], False),
        "no elements": (pages[..., :0], pages, False),
        "regions with an order of their own": (key, value, False),
        "one region with an order of its own": (key, key, True),
        "a region that its order places elsewhere": (moved, key, False),
        "the region where an order places another": (moved, value, True),
    }  # fmt: skip


@pytest.mark.parametrize("layout", pools())
def test_groups_share_a_pool_of_memory(layout):
    """Shadow pages are compared byte by byte, because groups may have other pages of the same memory."""
    one, other, overlap = pools()[layout]
    for first, second in ((one, other), (other, one)):
        manager = staged_manager({"a": LayerCache.opaque(first), "b": LayerCache.opaque(second)}, None)
        if overlap:
            with pytest.raises(ValueError, match=r"^allocate: groups 'a' and 'b' share memory and must not share sh"):
                manager.allocate()
        else:
            manager.allocate()


def test_shadow_blocks_of_an_unknown_group():
    """A misspelled name would select the last pages, which may be in use."""
    _, construct, layout, shape, dtype = KINDS["packed"]
    manager = staged_manager({"full": construct(layout, shape, dtype, 0)[0]}, {"ful": 3, 0: 3})
    with pytest.raises(ValueError, match=r"^allocate: shadow_blocks must name groups of \['full'\], got \['ful', 0\]$"):
        manager.allocate()


def test_layers_of_a_group_have_the_same_pages():
    manager = staged_manager({"a": LayerCache.opaque(torch.zeros(8, 4, 1, 8))}, None)
    manager.register_layer("more", LayerCache.opaque(torch.zeros(9, 4, 1, 8)), "a")
    with pytest.raises(ValueError, match=r"^allocate: the layers of group 'a' must .*, got \[\(8, 4\), \(9, 4\)\] \(n"):
        manager.allocate()


def test_adjacent_groups_of_one_geometry_share_a_launch():
    manager = staged_manager({}, {"a": 12, "b": 8, "c": 4})
    _, construct, layout, shape, dtype = KINDS["packed"]
    for index, group in enumerate("abc"):
        for layer, cache in enumerate(construct(layout, shape, dtype, index)):
            manager.register_layer(f"{group}{layer}", cache, group)
    manager.allocate()
    assert [launch.planes_per_group for launch in manager.recovery.launches] == [[2, 2, 2]]
    assert manager.log_bytes == 0
    assert manager.recovery.shadow_blocks[:, 0, 0].tolist() == [12, 8, 4]


def test_groups_that_are_not_adjacent_have_separate_launches():
    """One call takes at most 16 consecutive groups. The first call of a group changes its tables."""
    _, construct, layout, shape, dtype = KINDS["packed"]
    caches = {f"{n:02}": construct(layout, shape, dtype, n)[0] for n in range(17)}
    manager = staged_manager(caches, None)
    manager.allocate()
    assert [(x.groups, x.redirects) for x in manager.recovery.launches] == [(slice(0, 16), True), (slice(16, 17), True)]
    other = construct("packed_hnd", shape, dtype, 0)[0]
    manager = staged_manager({"a": caches["00"], "b": other, "c": caches["01"]}, None)
    manager.register_layer("another of c", construct("packed_hnd", shape, dtype, 1)[0], "c")
    manager.allocate()
    launches = [(x.groups, x.planes_per_group, x.redirects) for x in manager.recovery.launches]
    assert launches == [
        (slice(0, 1), [1], True), (slice(2, 3), [1], True), (slice(1, 2), [1], True), (slice(2, 3), [1], False),
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 17])
def test_redirected_group_splits_its_neighbours(count):
    """The second geometry has adjacent groups. One of them has been redirected by the launch of the first geometry."""
    widths = {"a": [16], **{f"b{n}": [8] for n in range(count)}, "c": [8, 16], "d": [8]}
    manager = DraftCommitManager(
        max_num_tokens=3, max_num_requests=1, max_draft_tokens=2, device="cpu", mode="stage", max_drafts_per_request=2
    )
    caches = {(group, width): torch.zeros(4, 4, 1, width) for group in widths for width in widths[group]}
    for (group, width), cache in caches.items():
        manager.register_layer(f"{group}.{width}", nwor_ops.LayerCache.packed(cache), group)
    manager.allocate()
    slots = {group: torch.tensor([1, 2, 3]) for group in widths}
    tables = {group: int32(0).view(1, 1) for group in widths}
    manager.bind(Layout(slots, tables))
    manager.begin(nwor_ops.Window(int32(0, 3), int32(2), seq_lens=int32(4)))
    for group, width in caches:
        assert slots[group].min() >= 8  # in a shadow page
        rows = torch.ones(3, 1, width // 2)
        manager.write(f"{group}.{width}", rows, rows, slots[group])
    manager.commit_rejected(int32(1))
    for (group, _), cache in caches.items():
        assert (slots[group].tolist(), tables[group].tolist()) == ([1, 2, 3], [[0]])
        assert cache[0, :, 0, 0].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_refused_launch_restores_group_without_slots_before_it():
    """The launch of groups "a" and "b" has run: the draft of "b" had slot 0. The last launch is refused."""
    caches = {g: LayerCache.opaque(torch.zeros(9, 4, 1, 8 + 8 * (g == "c"))) for g in "abc"}
    manager = staged_manager(caches, {"b": 0, "c": 1})
    manager.allocate()
    slots, tables = {g: torch.tensor([19, 20]) for g in "abc"}, {g: int32(3, 4, 5)[None] for g in "abc"}
    slots["a"].fill_(-1)
    tables["c"] = tables["c"][:, :0]
    manager.bind(Layout(slots, tables))
    with pytest.raises(IndexError, match=r"^open_window: block_tables must have a column"):
        manager.begin(Window(int32(0, 2), int32(1), seq_lens=int32(9)))
    assert (slots["b"].tolist(), tables["b"].tolist()) == ([19, 20], [[3, 4, 5]])


def test_pages_of_a_request():
    """Drafts that begin in any row of a page, compared with a count one by one."""
    for block_size in range(1, 33):
        for drafts in range(1, 21):
            touched = [{(first + i) // block_size for i in range(drafts)} for first in range(block_size)]
            assert num_shadow_blocks(3, drafts, block_size) == 3 * max(map(len, touched))


def test_drafts_although_the_caller_said_none():
    """The CPU refuses the commit. Cancel puts slots and table back, and the draft is in no page of the request."""
    cache = torch.zeros(8, 2, 1, 8)
    manager = DraftCommitManager(
        max_num_tokens=8, max_num_requests=1, max_draft_tokens=4, device="cpu", mode="stage", max_drafts_per_request=2
    )
    manager.register_layer("x", nwor_ops.LayerCache.packed(cache))
    manager.allocate()
    slots, table = torch.tensor([2, 3]), torch.tensor([[0, 1]], dtype=torch.int32)
    manager.bind(Layout({"default": slots}, {"default": table}))
    starts, drafts, lengths = (torch.tensor(values, dtype=torch.int32) for values in ([0, 2], [1], [4]))
    for _ in range(2):
        cache.zero_()
        manager.begin(nwor_ops.Window(starts, drafts, num_draft_tokens=0, seq_lens=lengths))
        manager.write("x", torch.ones(2, 1, 4), torch.ones(2, 1, 4), slots)
        with pytest.raises(ValueError, match="commit_rejected: num_draft_tokens of the window must be at least 1"):
            manager.commit_rejected(torch.tensor([0], dtype=torch.int32))
        manager.cancel()
        assert (slots.tolist(), table.tolist()) == ([2, 3], [[0, 1]])
        assert cache.view(16, 8)[2:4].tolist() == [[1.0] * 8, [0.0] * 8]
