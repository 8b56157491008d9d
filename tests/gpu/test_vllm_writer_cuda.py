"""Test that `write_kv` writes the same bytes as `reshape_and_cache_flash`, the CUDA writer in vLLM.

It needs the compiled core of vLLM: an installed vLLM, or the path of its `_C_stable_libtorch.abi3.so` in VLLM_CORE.
"""

from __future__ import annotations

import pytest
import torch
from vllm_kernels import load_core

import nwor_ops

try:
    load_core()
except ImportError as error:
    pytest.skip(f"vLLM's core is neither installed nor named by VLLM_CORE: {error}", allow_module_level=True)

TOKENS, BLOCKS, BLOCK_SIZE, HEADS = 37, 8, 16, 4
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Format and scales; "auto" reads none.
FORMATS = [("auto", "one")] + [(f, s) for f in ("fp8", "fp8_e4m3", "fp8_e5m2") for s in ("one", "per head")]
HEAD_SIZES = (64, 80, 128, 192, 256)
# A strided view [B, N, H, D] of each layout.
LAYOUTS = {
    "NHD": lambda d: (BLOCKS, BLOCK_SIZE, HEADS, d),
    "HND": lambda d: (BLOCKS, HEADS, BLOCK_SIZE, d),
    "packed": lambda d: (BLOCKS, HEADS, BLOCK_SIZE, 2 * d),
}


def caches(layout, head_size, dtype):
    shape = LAYOUTS[layout](head_size)
    if layout == "packed":
        both = torch.full(shape, 7, device="cuda").to(dtype).transpose(1, 2)
        return both.split(head_size, dim=-1)
    planes = [torch.full(shape, 7, device="cuda").to(dtype) for _ in range(2)]
    return planes if layout == "NHD" else [plane.transpose(1, 2) for plane in planes]


def rows(dtype, head_size):
    """Keys and values with all special cases of a conversion."""
    key, value = (torch.randn(2, TOKENS, HEADS, head_size, device="cuda") * 200).to(dtype)
    odd = [float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-8, -1e-8, 448.0, 464.0, 465.0, 57344.0, 6e4, -6e4]
    key[3, 1, : len(odd)] = torch.tensor(odd, device="cuda").to(dtype)
    value[-1, -1, -len(odd) :] = torch.tensor(odd, device="cuda").to(dtype)
    return key, value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("kv_cache_dtype", "scales"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bytes_as_vllm(dtype, kv_cache_dtype, head_size, layout, scales):
    torch.manual_seed(head_size)
    cache_dtype = dtype if kv_cache_dtype == "auto" else torch.uint8
    key, value = rows(dtype, head_size)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, device="cuda")[:TOKENS]
    slots[5] = slots[-2] = -1
    k_scale, v_scale = torch.rand(2, 1 if scales == "one" else HEADS, device="cuda") + 0.25
    ours, theirs = caches(layout, head_size, cache_dtype), caches(layout, head_size, cache_dtype)
    nwor_ops.write_kv(key, value, *ours, slots, k_scale, v_scale, kv_cache_dtype)
    torch.ops._C_cache_ops.reshape_and_cache_flash(key, value, *theirs, slots, kv_cache_dtype, k_scale, v_scale)
    for mine, other in zip(ours, theirs, strict=True):
        same = mine.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)
        assert same.all(), f"{int((~same).sum())} bytes differ"
