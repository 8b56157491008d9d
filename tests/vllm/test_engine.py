"""Real vLLM CPU engines with the transaction: every byte is audited at every step, and the output is vanilla's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from agreement import check_agreement
from engine_checks import COW, STAGE, check_transaction, check_vllm_counts
from engines import ENGINE, LLAMA, Engines, model_folder, prompts, ranks_job
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from nwor_ops.vllm.metrics.names import METRICS

MODES = pytest.mark.parametrize("nwor", [COW, STAGE], ids=["cow", "stage"])
NUM_SHADOW = 16  # shadow pages per group in mode stage: 8 requests, each with a tail page and one more


def isa_of(dtype: torch.dtype, kv_cache_dtype: str = "auto") -> str:
    """Return the kind of pages that vLLM chooses for these engines on this processor."""
    return _get_attn_isa(dtype, ENGINE["block_size"], LLAMA["head_dim"], kv_cache_dtype)


def test_vanilla_leaves_stale_rows(engines: Engines) -> None:
    """The reason for this library, and the proof that the audit finds stale rows."""
    audit = engines.run(prompts(12), nwor={"mode": "off", "audit": True})["session"]["audit"]
    assert audit["rejected"] > 0
    assert audit["stale_rows"] > 0


@MODES
@pytest.mark.smoke
def test_greedy_tokens_equal_vanillas(engines: Engines, nwor: dict[str, Any]) -> None:
    vanilla, ours = engines.pair(prompts(36), nwor)
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)
    check_vllm_counts(ours)
    for name, fused in ours["session"]["layers"].items() if nwor is COW else ():
        assert fused == (ours["layers"][name]["isa"] != "amx"), "our writer writes whatever strides can express"


@pytest.mark.long
def test_compiled(engines: Engines) -> None:
    """In vLLM's piecewise-compiled model, the write is an opaque op between compiled pieces.

    Two layers have a first, a middle and a last piece. Each further layer costs a compilation. The server of
    test_serve_readme.py is compiled in mode cow.
    """
    model = model_folder(num_hidden_layers=2)
    vanilla, ours = engines.pair(prompts(8), STAGE, model=model, enforce_eager=False)
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)
    check_vllm_counts(ours)


@MODES
def test_preemption_and_abort(engines: Engines, nwor: dict[str, Any]) -> None:
    """The cache is too small for the batch: requests lose their blocks while they run, and start over."""
    requests = prompts(10, longest=80, seed=3)
    arguments = {"max_tokens": 80, "max_model_len": 192, "abort": {6: ["0", "3"], 9: ["5"]}}
    shadow = NUM_SHADOW if nwor is STAGE else 0
    started = engines.start(requests, num_gpu_blocks_override=14, **arguments)
    ours = engines.run(requests, nwor=nwor, num_gpu_blocks_override=14 + shadow, **arguments)
    vanilla = started.result()
    assert ours["metrics"]["num_preemptions"] == vanilla["metrics"]["num_preemptions"]
    assert ours["metrics"]["num_preemptions"] > 0
    assert sum(tokens is None for tokens in ours["tokens"]) == 3
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)


@MODES
def test_prefix_caching_and_chunked_prefill(engines: Engines, nwor: dict[str, Any]) -> None:
    """Blocks are shared and reused, so a stale row in a hashed block would be part of another request's prefix.

    Prompts are longer than a step's token budget, so batches mix prompt chunks and decodes with drafts.
    """
    shared = prompts(1, longest=90, seed=5)[0] * 8
    requests = [shared[:96] + tokens[:20] for tokens in prompts(8)] * 3
    budget = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    vanilla, ours = engines.pair(requests, nwor, enable_prefix_caching=True, **budget)
    assert ours["metrics"]["prefix_cache_hits"] > 0
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)
    check_vllm_counts(ours)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtypes(engines: Engines, dtype: str) -> None:
    vanilla, ours = engines.pair(prompts(8), COW, dtype=dtype)
    assert {layer["isa"] for layer in ours["layers"].values()} == {isa_of(getattr(torch, dtype))}
    assert ours["tokens"] == vanilla["tokens"]
    assert ours["session"]["audit"]["rejected"] > 0
    assert ours["session"]["audit"]["stale_rows"] == 0


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
}


@MODES
@pytest.mark.long
def test_groups_of_layers_that_share_memory(engines: Engines, nwor: dict[str, Any]) -> None:
    """Sliding-window and full layers are two KV-cache groups with separate slot mappings, and their blocks share one
    buffer."""
    vanilla, ours = engines.pair(prompts(8, longest=150), nwor, model=model_folder(**GEMMA))
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)
    check_vllm_counts(ours)
    assert ours["session"]["groups"] == ["0", "1"]


def test_pages_with_transposed_keys(engines: Engines) -> None:
    vanilla, ours = engines.pair(prompts(12), COW, model=model_folder(head_dim=80))
    assert {layer["isa"] for layer in ours["layers"].values()} == {"vec16"}
    assert ours["tokens"] == vanilla["tokens"]
    check_transaction(ours)


def test_fp8_cache_is_logged_before_vllm_writes(engines: Engines) -> None:
    """vLLM's own writer fills a quantized CPU cache, and ours only logs."""
    try:
        isa_of(torch.bfloat16, "fp8")
    except NotImplementedError as refused:
        pytest.skip(f"vLLM on this processor: {refused}")
    vanilla, ours = engines.pair(prompts(8), COW, kv_cache_dtype="fp8")
    assert ours["tokens"] == vanilla["tokens"]
    assert set(ours["session"]["layers"].values()) == {False}
    assert ours["session"]["audit"]["rejected"] > 0
    assert ours["session"]["audit"]["stale_rows"] == 0


@MODES
def test_draft_model_layers_are_left_alone(engines: Engines, nwor: dict[str, Any]) -> None:
    """The drafter's layers call the same op and may share slots, but they do not belong to the transaction."""
    draft = {
        "method": "draft_model",
        "model": model_folder(num_hidden_layers=1, hidden_size=128),
        "num_speculative_tokens": 3,
    }
    vanilla, ours = engines.pair(prompts(8), nwor, speculative_config=draft)
    assert ours["tokens"] == vanilla["tokens"]
    target = set(ours["session"]["layers"])
    assert len(target) == 3
    assert len(ours["layers"]) == 4
    assert {name for name, layer in ours["layers"].items() if layer["wrapped"]} == target
    check_transaction(ours, accepts=False)  # a model with other random weights


def test_draft_model_in_other_group_is_refused(engines: Engines) -> None:
    """vLLM gives the draft model the slots of the first group, and its layer shares memory with a layer of
    that group."""
    draft = {"method": "draft_model", "model": model_folder(num_hidden_layers=1), "num_speculative_tokens": 2}
    said = (
        r"nwor: speculation by draft_model: layers draft_model.model.layers.0.self_attn.attn are in KV-cache group 1, "
        r"and this runner has them write at the slots of group 0"
    )
    with pytest.raises(RuntimeError, match=said):
        engines.run(prompts(2), nwor=COW, model=model_folder(**GEMMA), speculative_config=draft)


def test_sampling_with_temperature(engines: Engines) -> None:
    """With random sampling, the sampler's placeholders tell what was accepted; greedy equality does not apply."""
    ours = engines.run(prompts(10), nwor=COW, temperature=0.3)
    check_vllm_counts(ours)
    assert ours["session"]["audit"]["rejected"] > 0
    assert ours["session"]["audit"]["stale_rows"] == 0


@pytest.mark.long
def test_engine_core_in_its_own_process(engines: Engines) -> None:
    """`vllm serve` runs the engine core in a child process. The plugin loads there too, in worker and scheduler.

    The server of test_serve.py covers mode cow.
    """
    requests = prompts(6)
    environment = {"VLLM_NWOR_MODE": "stage", "VLLM_NWOR_AUDIT": "1"}
    vanilla = engines.start(requests)
    ours = engines.run_detached(requests, environment)
    assert ours["tokens"] == vanilla.result()["tokens"]
    assert "nwor: active, mode stage, audited at every step" in ours["log"]
    withheld = "16 of 96 blocks (16.7% of the cache, 0.8 MiB) are shadow pages, withheld from the scheduler"
    assert withheld in ours["log"]
    assert ours["sessions"] == 0, "the windows are in the other process"
    exact = {f"{METRICS[name][0]}_total": ours["stats"][name] for name in ("drafted", "accepted", "rejected")}
    check_agreement(exact | ours["metrics"])


@pytest.mark.long
def test_two_ranks(engines: Engines) -> None:
    """Tensor parallelism: each rank is a process that audits its half of the heads. On /metrics both count as one."""
    arguments = {"tensor_parallel_size": 2, "additional_config": {"nwor": COW}}
    result = engines.submit(ranks_job, prompts(4), arguments).result()
    sessions = [session for worker in result["workers"] for session in worker["sessions"]]
    assert len(sessions) == 2
    for session in sessions:
        check_transaction({"session": session})
    assert sessions[0]["audit"] == sessions[1]["audit"]
    for name in ("drafted", "accepted", "rejected"):
        assert result["stats"][name] == sessions[0]["stats"][name]
