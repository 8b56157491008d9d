"""Compare the CPU kernels with vLLM's own CPU writer, and with a plain copy of the same bytes.

    python benchmarks/cpu_ops.py

The results are ratios of times, measured in turn in one process with one thread. Shapes: 8 KV heads x 128, bf16, block
size 32. The caches have at least 64 MiB, more than the processor's caches hold. On a processor with AMX the pages in
its order are measured too, with vLLM's blocks of 128. These rows go to a separate file, ``cpu_ops_amx``.
"""

from __future__ import annotations

import torch
from results import Row, alternating, ratios, row, save
from vllm import _custom_ops as vllm_ops

import nwor_ops
from nwor_ops.vllm.transaction.layers.cpu_pages import layer_cache, learn_pages, strided_pages

HEADS, HEAD_SIZE, BLOCK_SIZE, BLOCKS = 8, 128, 32, 512
AMX_BLOCK_SIZE, AMX_BLOCKS = 128, 256
TOKENS = (5, 64, 1024)
LAYERS, REJECTED = 32, 0.6
ROUNDS, CALLS = 15, 20


def consecutive_slots(num_tokens: int, blocks: int, block_size: int) -> torch.Tensor:
    """Return the slots of requests with a target token and four drafts, consecutive within a block."""
    starts = torch.randperm(blocks)[: -(-num_tokens // 5), None] * block_size + 7
    return (starts + torch.arange(5)).flatten()[:num_tokens]


def drafts(num_tokens: int) -> torch.Tensor:
    """Return log rows: four of five tokens are drafts, as with K = 4."""
    return torch.where(torch.arange(num_tokens) % 5 == 0, -1, torch.arange(num_tokens)).to(torch.int32)


def halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the halves that vLLM's writer takes."""
    return kv_cache.view(*kv_cache.shape[:2], -1, HEAD_SIZE).chunk(2, dim=2)


def write_amx(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    vllm_ops.cpu_attn_reshape_and_cache(key, value, *halves(kv_cache), slots, "amx")


def log_amx_row(num_tokens: int) -> Row:
    """Measure a log through the table of offsets, which precedes vLLM's own writer."""
    key, value = torch.randn(2, num_tokens, HEADS, HEAD_SIZE).to(torch.bfloat16)
    slots, log_rows = consecutive_slots(num_tokens, AMX_BLOCKS, AMX_BLOCK_SIZE), drafts(num_tokens)
    kv_cache = torch.zeros(AMX_BLOCKS, HEADS, AMX_BLOCK_SIZE, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    theirs = halves(kv_cache)
    [plane] = layer_cache(kv_cache, learn_pages(write_amx, kv_cache, torch.bfloat16), writable=False).planes
    log = torch.zeros(num_tokens, HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    samples = alternating(
        {
            "vllm": lambda: vllm_ops.cpu_attn_reshape_and_cache(key, value, *theirs, slots, "amx"),
            "log": lambda: nwor_ops.log_slots(plane.view, slots, log_rows, log, plane.page_offsets),
        },
        ROUNDS,
        CALLS,
    )
    return row(f"log_slots_over_vllm_writer/amx/{num_tokens}", ratios(samples, "log", "vllm"), "ratio", "lower")


def write_rows(num_tokens: int) -> list[Row]:
    shape = (num_tokens, HEADS, HEAD_SIZE)
    key, value = torch.randn(2, *shape).to(torch.bfloat16)
    slots = consecutive_slots(num_tokens, BLOCKS, BLOCK_SIZE)
    kv_cache = torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    theirs = halves(kv_cache)
    ours = strided_pages(kv_cache)
    rows_contiguous = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16)
    packed = rows_contiguous.split(HEAD_SIZE, dim=-1)
    log = torch.zeros(2, *shape, dtype=torch.bfloat16)
    # The layout that the manager gives the log of such keys: rows are adjacent where slots are.
    log_like_vec = torch.zeros(HEADS, HEAD_SIZE, num_tokens, dtype=torch.bfloat16).permute(2, 0, 1), log[1]
    log_rows = drafts(num_tokens)
    one = torch.ones(1)
    copy_to, copy_from = torch.empty(2, *shape, dtype=torch.bfloat16), torch.stack((key, value))
    samples = alternating(
        {
            "vllm": lambda: vllm_ops.cpu_attn_reshape_and_cache(key, value, *theirs, slots, "vec"),
            "vec": lambda: nwor_ops.write_kv(key, value, *ours, slots, one, one, "auto"),
            "vec_logged": lambda: nwor_ops.write_kv_logged(
                key, value, *ours, slots, one, one, "auto", log_rows, *log_like_vec
            ),
            "packed": lambda: nwor_ops.write_kv(key, value, *packed, slots, one, one, "auto"),
            "packed_logged": lambda: nwor_ops.write_kv_logged(
                key, value, *packed, slots, one, one, "auto", log_rows, *log
            ),
            "copy": lambda: copy_to.copy_(copy_from),
        },
        ROUNDS,
        CALLS,
    )
    return [
        row(f"write_kv_over_vllm_writer/vec/{num_tokens}", ratios(samples, "vec", "vllm"), "ratio", "lower"),
        row(
            f"write_kv_logged_over_vllm_writer/vec/{num_tokens}",
            ratios(samples, "vec_logged", "vllm"),
            "ratio",
            "lower",
        ),
        row(f"write_kv_over_copy/packed/{num_tokens}", ratios(samples, "packed", "copy"), "ratio", "lower"),
        row(
            f"write_kv_logged_over_copy/packed/{num_tokens}",
            ratios(samples, "packed_logged", "copy"),
            "ratio",
            "lower",
        ),
    ]


def restore_rows(num_rows: int) -> Row:
    blocks = 64
    caches = list(torch.zeros(LAYERS, blocks, BLOCK_SIZE, HEADS, 2 * HEAD_SIZE, dtype=torch.bfloat16).unbind(0))
    log = torch.randn(LAYERS, num_rows, HEADS, 2 * HEAD_SIZE).to(torch.bfloat16)
    row_slots = torch.randperm(blocks * BLOCK_SIZE)[:num_rows]
    rejected = torch.arange(num_rows) < int(REJECTED * num_rows)
    restored = int(rejected.sum())
    copy_from = log[:, :restored].contiguous()
    copy_to = torch.empty_like(copy_from)
    samples = alternating(
        {
            "restore": lambda: nwor_ops.restore_slots(caches, log, row_slots, rejected),
            "copy": lambda: copy_to.copy_(copy_from),
        },
        ROUNDS,
        CALLS,
    )
    return row(
        f"restore_slots_over_copy/{LAYERS}_layers/{num_rows}",
        ratios(samples, "restore", "copy"),
        "ratio",
        "lower",
    )


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # vLLM's writer and ours start threads at different sizes
    rows = [figure for tokens in TOKENS for figure in write_rows(tokens)]
    rows += [restore_rows(rows_) for rows_ in (4, 64, 1024)]
    amx = torch.cpu._is_amx_tile_supported()
    if amx:
        rows += [log_amx_row(tokens) for tokens in TOKENS]
    save("cpu", "cpu_ops_amx" if amx else "cpu_ops", rows)


if __name__ == "__main__":
    main()
