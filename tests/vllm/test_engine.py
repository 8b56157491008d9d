"""A real vLLM CPU engine with the transaction on: every byte audited at every step, output as vanilla's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import Engines, model_folder, prompts

COW = {"mode": "cow", "audit": True}


def check_transaction(result: dict[str, Any]) -> dict[str, int]:
    """The audit's, the manager's and vLLM's own counts agree, and both sides of the transaction were seen."""
    session = result["session"]
    audit, stats = session["audit"], session["stats"]
    assert audit["stale_rows"] == 0
    assert audit["accepted"] > 0
    assert audit["rejected"] > 0
    assert [stats[name] for name in ("drafted", "accepted", "rejected")] == [
        audit[name] for name in ("drafted", "accepted", "rejected")
    ]
    assert session["vanilla_steps"] == {}
    return audit


def check_vllm_counts(result: dict[str, Any]) -> None:
    """Not where requests are aborted or preempted: vLLM's scheduler forgets what it threw away."""
    audit = result["session"]["audit"]
    assert audit["drafted"] == result["metrics"]["spec_decode_num_draft_tokens"]
    assert audit["accepted"] == result["metrics"]["spec_decode_num_accepted_tokens"]


def test_vanilla_leaves_stale_rows(engines: Engines) -> None:
    """The reason for this library, and the proof that the audit sees what it looks for."""
    audit = engines.run(prompts(12), nwor={"mode": "off", "audit": True})["session"]["audit"]
    assert audit["rejected"] > 0
    assert audit["stale_rows"] > 0


def test_36_prompts(engines: Engines) -> None:
    vanilla, ours = engines.pair(prompts(36), COW)
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)
    check_vllm_counts(ours)
    for name, fused in ours["session"]["layers"].items():
        assert fused == (ours["layers"][name]["isa"] != "amx"), "our writer writes whatever strides can express"


def test_compiled(engines: Engines) -> None:
    """vLLM's piecewise-compiled model: the write site is an opaque op between compiled pieces."""
    vanilla, ours = engines.pair(prompts(8), COW, enforce_eager=False)
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)
    check_vllm_counts(ours)


def test_preemption(engines: Engines) -> None:
    """A cache too small for the batch: requests lose their blocks in mid-flight and start over."""
    vanilla, ours = engines.pair(
        prompts(8, longest=80, seed=3), COW, max_tokens=80, num_gpu_blocks_override=14, max_model_len=192
    )
    assert ours["metrics"]["num_preemptions"] > 0
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)


def test_abort_in_mid_flight(engines: Engines) -> None:
    vanilla, ours = engines.pair(prompts(12), COW, abort={6: ["0", "3"], 9: ["5"]}, max_tokens=60)
    assert sum(tokens is None for tokens in ours["tokens"]) == 3
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)


def test_prefix_caching(engines: Engines) -> None:
    """Blocks are shared and reused: a stale row in a hashed block would be somebody else's prefix."""
    shared = prompts(1, longest=90, seed=5)[0] * 8
    requests = [shared[:96] + tokens[:20] for tokens in prompts(8)] * 3
    vanilla, ours = engines.pair(requests, COW, enable_prefix_caching=True)
    assert ours["metrics"]["prefix_cache_hits"] > 0
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)


def test_chunked_prefill(engines: Engines) -> None:
    """Prompts longer than a step's token budget: decode with drafts and prompt chunks share batches."""
    vanilla, ours = engines.pair(
        prompts(10, longest=150, seed=7), COW, max_num_batched_tokens=64, enable_chunked_prefill=True
    )
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)
    check_vllm_counts(ours)


@pytest.mark.parametrize(
    ("model", "dtype", "isa"),
    [
        ({"head_dim": 80}, "bfloat16", "vec16"),
        ({}, "bfloat16", "amx" if torch.cpu._is_amx_tile_supported() else "vec"),
        ({}, "float32", "vec"),
        ({}, "float16", "vec"),
    ],
    ids=["vec16", "bfloat16", "float32", "float16"],
)
def test_pages_and_dtypes(engines: Engines, model: dict[str, int], dtype: str, isa: str) -> None:
    vanilla, ours = engines.pair(prompts(8), COW, model=model_folder(**model), dtype=dtype)
    assert {layer["isa"] for layer in ours["layers"].values()} == {isa}
    assert ours["tokens"] == vanilla["tokens"]
    assert ours["session"]["audit"]["rejected"] > 0
    assert ours["session"]["audit"]["stale_rows"] == 0


def test_groups_of_layers_that_share_memory(engines: Engines) -> None:
    """Sliding-window and full layers are two KV-cache groups, with slot mappings of their own, whose blocks lie in
    one backing buffer."""
    gemma = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
        "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
    }
    vanilla, ours = engines.pair(prompts(8, longest=150), COW, model=model_folder(**gemma))
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)
    check_vllm_counts(ours)
    assert ours["session"]["groups"] == ["0", "1"]


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 CPU cache needs AVX-512 or AMX")
def test_fp8_cache_is_logged_before_vllm_writes(engines: Engines) -> None:
    """A quantised CPU cache goes through vLLM's own writer; ours only logs."""
    vanilla, ours = engines.pair(prompts(8), COW, kv_cache_dtype="fp8")
    assert ours["tokens"] == vanilla["tokens"]
    assert set(ours["session"]["layers"].values()) == {False}
    assert ours["session"]["audit"]["rejected"] > 0
    assert ours["session"]["audit"]["stale_rows"] == 0


def test_draft_model_layers_are_left_alone(engines: Engines) -> None:
    """The drafter's own layers hit the same op and may share slots: they are not part of the transaction."""
    draft = {
        "method": "draft_model",
        "model": model_folder(num_hidden_layers=1, hidden_size=128),
        "num_speculative_tokens": 3,
    }
    vanilla, ours = engines.pair(prompts(8), COW, speculative_config=draft)
    assert ours["tokens"] == vanilla["tokens"]
    target = set(ours["session"]["layers"])
    assert len(target) == 3
    assert len(ours["layers"]) == 4
    assert {name for name, layer in ours["layers"].items() if layer["wrapped"]} == target
    assert ours["session"]["audit"]["rejected"] > 0
    assert ours["session"]["audit"]["stale_rows"] == 0


def test_sampling_with_temperature(engines: Engines) -> None:
    """Random sampling: the sampler's placeholders, not greedy equality, say what was accepted."""
    ours = engines.run(prompts(10), nwor=COW, temperature=0.3)
    check_vllm_counts(ours)
    assert ours["session"]["audit"]["rejected"] > 0
    assert ours["session"]["audit"]["stale_rows"] == 0


def test_engine_core_in_its_own_process(engines: Engines) -> None:
    """`vllm serve` runs the engine core in a child process: the plugin loads there too."""
    requests = prompts(6)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NWOR_MODE": "cow", "VLLM_NWOR_AUDIT": "1"}
    vanilla = engines.start(requests)
    ours = engines.run_detached(requests, environment)
    assert ours["tokens"] == vanilla.result()["tokens"]
    assert "nwor: active, mode cow, audited at every step" in ours["log"]
