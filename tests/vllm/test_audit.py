"""The audit without an engine: a drafter's layers share the target's storage, or a KV connector loads rows."""

from __future__ import annotations

import pytest
import torch
from packed_rows import write_rows

from nwor_ops.kv_cache import LayerCache
from nwor_ops.vllm.audit.cache import AuditError, CacheAudit
from nwor_ops.vllm.transaction.layers.target import TargetLayer

BLOCKS, BLOCK_SIZE, HEADS, WIDTH = 4, 4, 2, 8
SLOTS = torch.tensor([0, 1, 2])  # a token and its two drafts; the second draft is rejected
ELSEWHERE = "bytes differ from the expected ones"


class Step:
    """One step of a target layer and a drafter layer in one storage, one layer after the other or block by block."""

    def __init__(self, others_write: bool = False, by_block: bool = False) -> None:
        layers = (BLOCKS, 2) if by_block else (2, BLOCKS)
        self.target, self.drafter = torch.ones(*layers, BLOCK_SIZE, HEADS, 2 * WIDTH).unbind(int(by_block))
        layer = TargetLayer("target", "0", self.target, LayerCache.packed(self.target), write_rows)
        self.audit = CacheAudit([layer], 8, others_write)
        rows = torch.arange(2.0 * 3 * HEADS * WIDTH).view(2, 3, HEADS, WIDTH) + 2
        self.audit.begin([0, 3], [2], {"0": SLOTS})
        self.before = self.target.clone()
        self.audit.record("target", rows[0], rows[1], SLOTS, 0, ())
        write_rows(rows[0], rows[1], self.target, SLOTS)

    def undo(self) -> None:
        self.target[0, 2] = self.before[0, 2]

    def compare(self) -> None:
        self.audit.commit(lambda: [2], undone=True)


def test_a_step_as_it_should_be() -> None:
    """The drafter runs after the commit, so its rows are in the image of the next step."""
    step = Step()
    step.undo()
    step.compare()
    step.drafter[0] = 7
    step.audit.begin([0, 1], [0], {"0": SLOTS[:1]})
    step.compare()
    summary = step.audit.summary()
    assert [summary[name] for name in ("drafted", "accepted", "rejected", "stale_rows")] == [2, 1, 1, 0]


@pytest.mark.parametrize("offset", [-4, 7, 2**40])
def test_slots_outside_the_batch_are_refused(offset: int) -> None:
    """Only mode ``"cow"`` has a writer that checks the offset of a micro-batch."""
    rows = torch.zeros(2, 2, HEADS, WIDTH)
    sentence = rf"^nwor audit of layer 'target': token_offset must be 0 to 6 for 2 of 8 .*, got {offset}$"
    with pytest.raises(ValueError, match=sentence):
        Step().audit.record("target", *rows, SLOTS[:2], offset, ())


@pytest.mark.parametrize(
    ("layer", "block", "offset", "message"),
    [
        ("target", 0, 2, r"rejected drafts of group 0 left their rows in slots 2 \(token 2\)"),
        ("target", 0, 1, r"in layer target slots 1 \(token 1\)"),  # an accepted row that is lost
        *(("drafter", block, 0, rf"{ELSEWHERE}, in blocks .*, bytes \d+ to \d+ of the \d+ bytes") for block in (0, 1)),
    ],
)
def test_wrong_row_is_found(layer: str, block: int, offset: int, message: str) -> None:
    """In the target's layer, or in the drafter's, in a block that the target wrote (block 0) and in another one."""
    step = Step()
    step.undo()
    getattr(step, layer)[block, offset] = 7
    with pytest.raises(AuditError, match=message):
        step.compare()


# ---------------------------------------------------------------- caches that are not compared whole

TILE, TILES = 4096, 32


class LargeStep:
    """Steps of one layer in a cache of 32 tiles, with a block per tile. Its token is in block 5."""

    def __init__(self, rest_bytes: int) -> None:
        self.cache = torch.ones(TILES, BLOCK_SIZE, HEADS, TILE // 32)
        layer = TargetLayer("target", "0", self.cache, LayerCache.packed(self.cache), write_rows)
        self.audit = CacheAudit([layer], 8, rest_bytes=rest_bytes)

    def run(self, block: int | None) -> None:
        """Run a step that spoils a byte of a block, which is not its own."""
        slots = torch.tensor([5 * BLOCK_SIZE])
        self.audit.begin([0, 1], [0], {"0": slots})
        rows = torch.full((2, 1, HEADS, TILE // 64), 2.0)
        self.audit.record("target", *rows, slots, 0, ())
        write_rows(*rows, self.cache, slots)
        if block is not None:
            self.cache.view(torch.uint8)[block, 3, 1, 7] ^= 1
        self.audit.commit(lambda: [1], undone=True)


@pytest.mark.parametrize("block", range(TILES))
def test_wrong_byte_elsewhere_is_found_in_turn(block: int) -> None:
    """Each step compares the block that it writes, and the next three of the cache."""
    step, turn = LargeStep(rest_bytes=3 * TILE), 0 if block == 5 else block // 3
    for _ in range(turn):
        step.run(block)
    with pytest.raises(AuditError, match=rf"^nwor audit, step {turn}: 1 bytes differ .*, in blocks \[{block}\]"):
        step.run(block)


def test_steps_compare_few_tiles_of_large_cache() -> None:
    step = LargeStep(rest_bytes=3 * TILE)
    for _ in range(TILES):
        step.run(None)
    assert TILES * 3 * TILE < step.audit.summary()["bytes_compared"] <= TILES * 4 * TILE


def test_storages_watch_pages_of_their_groups() -> None:
    caches = enumerate(torch.ones(TILES, BLOCK_SIZE, HEADS, TILE // 32) for _ in range(3))
    layers = [TargetLayer(str(n), "001"[n], cache, LayerCache.packed(cache), write_rows) for n, cache in caches]
    audit = CacheAudit(layers, 8, rest_bytes=0)
    audit.begin([0, 1], [0], {"0": torch.tensor([5 * BLOCK_SIZE]), "1": torch.tensor([9 * BLOCK_SIZE])})
    assert [watched.tiles.numbers.tolist() for watched in audit._watched.values()] == [[5], [5], [9]]


# ---------------------------------------------------------------- loads of a KV connector


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize(("others_write", "by_block"), [(True, False), (False, False), (True, True)])
def test_written_blocks_are_compared_if_others_write(others_write: bool, by_block: bool, block: int) -> None:
    """The changed slot belongs to no token of this step, which writes block 0. If a block of all layers is one page,
    the drafter's is too."""
    step = Step(others_write, by_block)
    step.undo()
    (step.drafter if by_block else step.target)[block, 3, 0, 0] = 5
    if others_write and block != 0:
        step.compare()
        return
    with pytest.raises(AuditError, match=f" 2 {ELSEWHERE}"):
        step.compare()


LOADED = [(0, 3), (3, 3)]  # in a block of the batch, and in a free one


@pytest.mark.parametrize("changes", [True, False])
@pytest.mark.parametrize("loads", [True, False])
@pytest.mark.parametrize(("block", "offset"), LOADED)
def test_write_after_load_is_found(block: int, offset: int, loads: bool, changes: bool) -> None:
    step = Step()
    step.audit.loading()
    if loads:
        step.target[block, offset] = step.drafter[block, offset] = 7
    step.audit.loaded()
    step.undo()
    if not changes:
        step.compare()
        return
    step.target[block, offset] = 8
    with pytest.raises(AuditError, match=ELSEWHERE):
        step.compare()


@pytest.mark.parametrize("others_write", [True, False])
@pytest.mark.parametrize(
    ("slot", "message"),
    [(1, r"in layer target slots 1 \(token 1\)"), (2, r"rejected drafts .* left their rows in slots 2 \(token 2\)")],
)
def test_draft_changed_during_load_is_found(others_write: bool, slot: int, message: str) -> None:
    step = Step(others_write)
    step.undo()
    step.audit.loading()
    step.target[0, slot] = 7
    step.target[0, 3] = 7  # this was
    step.audit.loaded()
    with pytest.raises(AuditError, match=message):
        step.compare()


def test_load_between_steps_is_in_next_image() -> None:
    step = Step()
    step.undo()
    step.compare()
    step.audit.loading()
    step.target[3] = 7
    step.audit.loaded()
    step.audit.begin([0, 1], [0], {"0": SLOTS[:1]})
    step.compare()
