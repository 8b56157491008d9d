"""Real vLLM CPU engines with the transaction: every byte is audited at every step, and the output is vanilla's."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch
from agreement import check_agreement
from engine_checks import COW, STAGE, check_transaction, check_vllm_counts
from engines import (
    ENGINE,
    ENVIRONMENT,
    LLAMA,
    SMALL,
    Engines,
    metrics_of,
    model_folder,
    prompts,
    receive_last_counts,
    run_requests,
)
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from nwor_ops.testing import real_model
from nwor_ops.vllm.metrics.names import METRICS

MODES = pytest.mark.parametrize("nwor", [COW, STAGE], ids=["cow", "stage"])
NUM_SHADOW = 16  # shadow pages per group in mode stage: 8 requests, each with a tail page and one more


def isa_of(dtype: torch.dtype, kv_cache_dtype: str = "auto") -> str:
    """Return the kind of pages that vLLM chooses for these engines on this processor."""
    return _get_attn_isa(dtype, ENGINE["block_size"], LLAMA["head_dim"], kv_cache_dtype)


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
        r"nwor: speculation by draft_model: layers draft_model.model.layers.0.self_attn.attn are in KV-cache group 1: "
        r"vLLM makes them write to the slots of the first group, where they overwrite rows of the target model"
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
@MODES
@pytest.mark.skipif(not real_model.is_installed(), reason=f"the packages {real_model.PACKAGES} are not installed")
def test_texts_of_real_model(engines: Engines, nwor: dict[str, Any]) -> None:
    chats = real_model.chats([prompt for kind in real_model.PROMPTS.values() for prompt in kind[:2]])
    # Few blocks, because the audit keeps a copy of the whole cache.
    arguments = {"model": str(real_model.model_folder()), "load_format": "auto", "num_gpu_blocks_override": 40}
    vanilla, ours = engines.pair(chats, nwor, **arguments)
    assert ours["tokens"] == vanilla["tokens"]
    # In real text many a step has no draft of a request, so that its shadow page must be filled again.
    ours["session"].pop("copied_rows")
    audit = check_transaction(ours)
    check_vllm_counts(ours)
    assert 0.1 < audit["accepted"] / audit["drafted"] < 0.9


def several_processes_job(requests: list[list[int]], environment: dict[str, str]) -> dict[str, Any]:
    """Run an engine with its core and two ranks in separate processes. Return the workers, the counts and the log."""
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }  # collective_rpc of a function
    os.environ.update(ENVIRONMENT | own | environment)
    with tempfile.NamedTemporaryFile("r") as log:
        for stream in (1, 2):
            os.dup2(os.open(log.name, os.O_WRONLY | os.O_APPEND), stream)
        from engine_child import describe_worker
        from vllm import LLM

        import nwor_ops.vllm

        llm = LLM(**ENGINE | {"model": model_folder(**SMALL), "tensor_parallel_size": 2})
        run_requests(llm, requests, 40)
        receive_last_counts(llm)
        result = {
            "sessions": [session for worker in llm.collective_rpc(describe_worker) for session in worker["sessions"]],
            "own_sessions": nwor_ops.vllm.sessions(),
            "stats": vars(nwor_ops.stats()),
            "metrics": metrics_of(llm),
        }
        llm.llm_engine.engine_core.shutdown()
        return result | {"log": log.read()}


@pytest.mark.long
def test_engine_in_several_processes(engines: Engines) -> None:
    """`vllm serve` runs the engine core in a child process, and each rank is one more. The plugin loads in all of them.

    Each rank audits its half of the heads. On /metrics both count as one. The server of test_serve.py covers mode cow.
    """
    environment = {"VLLM_NWOR_MODE": "stage", "VLLM_NWOR_AUDIT": "1"}
    result = engines.submit(several_processes_job, prompts(6), environment).result()
    assert "nwor: active, mode stage, audited at every step" in result["log"]
    withheld = "16 of 96 blocks (16.7% of the cache, 0.2 MiB) are shadow pages, withheld from the scheduler"
    assert withheld in result["log"]
    assert result["own_sessions"] == []
    first, second = result["sessions"]
    check_transaction({"session": first})
    assert first["audit"] == second["audit"]
    counted = {name: result["stats"][name] for name in ("drafted", "accepted", "rejected")}
    assert counted == {name: first["stats"][name] for name in counted}
    check_agreement({f"{METRICS[name][0]}_total": count for name, count in counted.items()} | result["metrics"])
