"""Hybrid models: the transaction covers attention's rows, and vLLM manages the recurrent states in the same memory.

The model has the layers of Qwen3-Next. On the CPU engine of vLLM 0.32, only the recurrent kernels of Gated DeltaNet
can verify drafts. Its convolution for Mamba and LFM2 expects one state index per token. It gets one row of them per
request instead, and reads after its end. Such engines give different results from run to run. That engine also lacks
prefix caching for hybrid models, because its Triton kernels have no CPU version. The file gpu_cases.py has cases of
both.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_checks import COW, STAGE, check_transaction, check_vllm_counts
from engines import ENGINE, ENVIRONMENT, Engines, model_folder, prompts
from packed_rows import write_rows
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

from nwor_ops.kv_cache import LayerCache
from nwor_ops.vllm.audit import watch
from nwor_ops.vllm.audit.cache import AuditError, CacheAudit
from nwor_ops.vllm.audit.watch import RecurrentGroup
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction.layers.target import TargetLayer
from nwor_ops.vllm.transaction.runners.base import log_bytes
from nwor_ops.vllm.transaction.shadow_blocks import ShadowBlocks, shadow_blocks
from nwor_ops.vllm.transaction.supported import is_recurrent

QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 5,
    "hidden_size": 128,
    "intermediate_size": 128,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "mlp_only_layers": [0, 1, 2, 3],  # one layer must have experts
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
# Small enough that blocks of states become blocks of rows, and the reverse.
CACHE = {"num_gpu_blocks_override": 64}
SHADOW = 16  # for the one group of attention layers; the two groups of states need none


@pytest.mark.parametrize("nwor", [COW, STAGE, {"mode": "off", "audit": True}], ids=["cow", "stage", "off"])
def test_hybrid_model(engines: Engines, nwor: dict[str, Any]) -> None:
    """The tokens are vanilla's with a cache of the same size for the scheduler, and all of attention's bytes are
    correct.

    Without undo, the stale rows are found.
    """
    arguments = {"model": model_folder(**QWEN3_NEXT)} | CACHE
    started = engines.start(prompts(16), **arguments)
    if nwor is STAGE:
        arguments["num_gpu_blocks_override"] += SHADOW
    ours = engines.run(prompts(16), nwor=nwor, **arguments)
    assert ours["tokens"] == started.result()["tokens"]
    session = ours["session"]
    assert session["groups"] == ["2"]
    assert list(session["layers"]) == ["model.layers.1.self_attn.attn", "model.layers.3.self_attn.attn"]
    assert session["audit"]["recurrent_bytes"] > 0
    [states] = session["vllm_states"]
    assert states["steps"] > 10
    assert states["states_compared"] > states["steps"]
    assert states["states_computed"] > states["windows"]
    if nwor["mode"] == "off":
        assert session["audit"]["stale_rows"] == session["audit"]["rejected"] > 0
        return
    check_transaction(ours)
    check_vllm_counts(ours)
    if nwor is STAGE:
        assert "16 of 80 blocks (20.0% of the cache" in session["describe"]


def _job_with_a_wrong_byte(model: str, requests: list[list[int]], nwor: dict[str, Any]) -> str:
    """Run an engine in which a row of a prompt changes during a step, or vLLM's states of a layer after the third one.
    Return what the audit says."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    import nwor_ops.vllm
    from nwor_ops.vllm.step_listener import StepListener

    llm = LLM(**ENGINE | CACHE | {"model": model, "additional_config": {"nwor": nwor}})
    [session] = nwor_ops.vllm.sessions()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    layer = session.layers["model.layers.3.self_attn.attn"]

    mixer = "model.layers.2.linear_attn"  # other layers have the same memory in other blocks
    [number] = [n for n, group in enumerate(runner.kv_cache_config.kv_cache_groups) if mixer in group.layer_names]
    steps = itertools.count()

    class Spoiling(StepListener):
        def opened(self, slot_mappings: Any) -> None:
            block = int(runner.input_batch.block_table[int(layer.group)].block_table.np[0, 0])
            layer.kv_cache[block, 0, 0, 0] += 1

        def commit(self, *outcome: Any) -> None:
            if nwor["mode"] == "off" and next(steps) == 2:
                blocks = runner.input_batch.block_table[number].block_table.np[0, :5]
                runner.compilation_config.static_forward_context[mixer].kv_cache[1][blocks.tolist()] += 1

    session.subscribe(Spoiling())
    sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, detokenize=False)
    try:
        llm.generate([{"prompt_token_ids": tokens} for tokens in requests], sampling, use_tqdm=False)
    except AuditError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("nwor", "sentence"),
    [
        (COW, r" [12] bytes differ from the expected ones"),
        (
            {"mode": "off", "audit": True},
            r"^nwor audit, step 2: vLLM's states of layer model\.layers\.2\.linear_attn, request in block \d+: the "
            r"state after \d tokens of the last window has changed since: \d+ bytes differ$",
        ),
    ],
    ids=["row", "vanilla's states"],
)
def test_wrong_byte_in_engine_is_found(engines: Engines, nwor: dict[str, Any], sentence: str) -> None:
    text = engines.submit(_job_with_a_wrong_byte, model_folder(**QWEN3_NEXT), prompts(4), nwor).result()
    assert re.search(sentence, text), text


# ---------------------------------------------------------------- bytes that are not compared

BLOCKS, SIZE, HEADS, WIDTH = 8, 4, 2, 8
SLOTS = torch.tensor([8, 9, 10])  # in block 2: a token and its two drafts; the second draft is rejected
STATE = 40  # bytes of the state in a page of 256


class Step:
    """A correct step of a hybrid model: an attention layer in block 2, and a layer with states in the same memory.

    Its two requests have computed 9 and 3 tokens, with blocks of 4.
    """

    def __init__(self, make: Callable[..., CacheAudit]) -> None:
        self.rows = [(9, [1, 5, 3]), (3, [4])]  # blocks 1 and 5 of the first request were freed
        self.cache = torch.ones(BLOCKS, SIZE, HEADS, 2 * WIDTH, dtype=torch.bfloat16)
        self.pages = self.cache.view(BLOCKS, -1).view(torch.uint8)
        state = self.pages[:, :STATE].view(torch.float32).view(BLOCKS, 2, 5)
        recurrent = RecurrentGroup(SIZE, (state, torch.zeros(BLOCKS, 5)), lambda: self.rows)  # the second is elsewhere
        layer = TargetLayer("target", "0", self.cache, LayerCache.packed(self.cache), write_rows)
        self.audit = make([layer], 8, recurrent=[recurrent])

    def run(self, block: int, byte: int) -> None:
        """Run the step with a byte that changes, as if a kernel of vLLM or ours had written it."""
        rows = torch.arange(2 * 3 * HEADS * WIDTH).view(2, 3, HEADS, WIDTH).to(torch.bfloat16) + 2
        self.audit.begin([0, 3], [2], {"0": SLOTS})
        self.audit.opened({"0": SLOTS})
        before = self.cache[2, 2].clone()
        self.audit.record("target", rows[0], rows[1], SLOTS, 0, ())
        write_rows(rows[0], rows[1], self.cache, SLOTS)
        self.cache[2, 2] = before
        self.pages[block, byte] += 1
        self.audit.commit(lambda: [2], undone=True)


@pytest.mark.parametrize(
    ("block", "byte", "left_out"),
    [
        *((block, STATE - 1, True) for block in (0, 3, 4)),  # the state of padded rows, and those of the requests
        *((block, STATE, False) for block in (0, 3, 4)),  # after their states
        *((block, 0, False) for block in (1, 5)),  # states that the request no longer owns
        *((block, 0, False) for block in (2, 6, 7)),  # a block of attention, and a free one
    ],
)
def test_only_states_of_batch_are_left_out(block: int, byte: int, left_out: bool) -> None:
    step = Step(CacheAudit)
    if left_out:
        step.run(block, byte)
        assert step.audit.summary()["recurrent_bytes"] == 3 * STATE
        return
    with pytest.raises(AuditError, match="1 bytes differ from the expected ones"):
        step.run(block, byte)


def test_pages_of_states_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LARGEST_TILE", 64)
    step = Step(functools.partial(CacheAudit, rest_bytes=0))
    step.run(3, STATE)
    assert step.audit.summary()["bytes_compared"] == step.pages.shape[1]


def test_state_left_out_once_is_compared_later() -> None:
    step = Step(CacheAudit)
    step.run(3, STATE - 1)
    step.rows = [(3, [4])]  # the request that owns block 3 is not in the next batch
    step.run(4, STATE - 1)
    with pytest.raises(AuditError, match="1 bytes differ from the expected ones"):
        step.run(3, STATE - 1)


def test_shadow_pages_and_states_are_left_out_together() -> None:
    step = Step(functools.partial(CacheAudit, shadow_blocks={"0": range(6, 8)}))
    step.audit.begin([0, 3], [2], {"0": SLOTS})
    [watched] = step.audit._watched.values()
    marked = step.audit._left_out(step.audit._step, watched)
    assert marked.view(BLOCKS, -1).sum(1).tolist() == [STATE, 0, 0, STATE, STATE, 0, 256, 256]


# ---------------------------------------------------------------- groups and blocks

ROWS = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
STATES = MambaSpec(block_size=256, shapes=((4, 8), (16, 16)), dtypes=(torch.bfloat16, torch.float32))


def test_which_specs_are_recurrent() -> None:
    assert is_recurrent(STATES)
    assert is_recurrent(UniformTypeKVCacheSpecs(256, kv_cache_specs={"a": STATES, "b": STATES}))
    assert not is_recurrent(ROWS)
    assert not is_recurrent(UniformTypeKVCacheSpecs(32, kv_cache_specs={"a": ROWS, "b": ROWS}))


def test_only_attention_groups_have_shadow_pages() -> None:
    """A block of states may span as many tokens as a request can have, or fewer than a block of attention.

    Neither size determines the number of shadow pages that drafts need.
    """
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(max_model_len=256),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    short_states = MambaSpec(block_size=2, shapes=((4, 8),), dtypes=(torch.bfloat16,))

    def shadow(*specs: Any) -> ShadowBlocks:
        groups = [SimpleNamespace(kv_cache_spec=spec, host_resident=False) for spec in specs]
        tensors = [SimpleNamespace(size=6400)]
        cache = SimpleNamespace(num_blocks=64, kv_cache_groups=groups, kv_cache_tensors=tensors)
        return shadow_blocks(config, cache)

    made = shadow(STATES, ROWS, short_states, ROWS)
    assert (made.groups, made.per_group, made.first) == ((1, 3), 8, 48)
    assert (made.of_group(1), made.of_group(3)) == (range(48, 56), range(56, 64))
    with pytest.raises(Unsupported, match="no layer of the target model writes its own KV cache"):
        shadow(STATES, short_states)


def test_the_log_has_no_rows_for_states() -> None:
    runner = SimpleNamespace(
        get_kv_cache_spec=lambda: {"attention": ROWS, "mixer": STATES},
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
            speculative_config=SimpleNamespace(num_speculative_tokens=3),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        ),
    )
    assert log_bytes(runner) == 4 * 3 * 2 * 2 * 64 * 2
