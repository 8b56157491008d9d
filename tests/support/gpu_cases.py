"""The table of GPU cases. A case compares a vanilla engine with the same engine with NWOR, which is audited."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from real_model_engine import SCHEMA

from nwor_ops.testing.real_model import PACKAGES
from nwor_ops.testing.tiny_llama import VOCABULARY

OFF = {"mode": "off", "audit": True}
COW = {"mode": "cow", "audit": True}
STAGE = {"mode": "stage", "audit": True}
RECURRENT = OFF | {"recurrent": True}
RECURRENT_COW = COW | {"recurrent": True}
RECURRENT_STAGE = STAGE | {"recurrent": True}
RECURRENT_CHUNK = OFF | {"recurrent": "chunk"}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2: dict[str, str] = {}
K = 4
# Cases name their models; tiny_models.py creates the folders.
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
DRAFT = {"method": "draft_model", "model": "@draft", "num_speculative_tokens": K}
EAGLE = {"method": "eagle", "model": "@eagle", "num_speculative_tokens": K}
DSPARK = {"method": "dspark", "model": "@dspark", "num_speculative_tokens": K}
EXPERTS_LIBRARY = "vllm._moe_C_stable_libtorch"  # the library with vLLM's kernels for experts
MTP = {"method": "mtp", "num_speculative_tokens": K}  # the MTP layer is part of the target's checkpoint
# The size of a recurrent state sets the block size, regardless of the setting.
TRITON_PREFILL = {"gdn_prefill_backend": "triton", "block_size": None}
HYBRID_ENGINE = TRITON_PREFILL | {"worker_extension_cls": "gpu_worker_hybrid.Worker", "num_gpu_blocks_override": 192}
METHODS = {
    "ngram": NGRAM,
    "draft_model": DRAFT,
    "eagle": EAGLE,
    "eagle_with_biases": {**EAGLE, "model": "@eagle_with_biases"},
    "eagle3": {**EAGLE, "method": "eagle3", "model": "@eagle3"},
    "ngram_gpu": {**NGRAM, "method": "ngram_gpu"},
    "dflash": {"method": "dflash", "model": "@dflash", "num_speculative_tokens": K},
    "dspark": DSPARK,
    "mtp": MTP,
    "suffix": {"method": "suffix", "num_speculative_tokens": K},
}

ENGINE: dict[str, Any] = {
    "model": "@llama",
    "skip_tokenizer_init": True,
    "seed": 0,
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 8,
    # Fewer tokens than the arriving prompts have: they run in chunks, in steps with drafts of other requests.
    "max_num_batched_tokens": 64,
    "block_size": 16,
    # Small, because the audit copies the cache in every step. Memory profiling is off, because it fails if another
    # engine on the same GPU ends in the meantime.
    "num_gpu_blocks_override": 256,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.04,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    # Compile kernels at first use, which saves half a minute per engine.
    "kernel_config": {"enable_jit_warmup": False, "enable_cutedsl_warmup": False, "enable_flashinfer_autotune": False},
}

GRAPHS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL"}},
    "full_and_piecewise": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    "full_decode_only": {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    # The cache write is compiled, because the graph is not split there.
    "unsplit": {"compilation_config": {"cudagraph_mode": "FULL", "splitting_ops": []}},
    "inductor_partition": {"compilation_config": {"use_inductor_graph_partition": True}},
}
# Values that the engine must report for a setting.
GRAPH_MODES = {
    "eager": "NONE",
    "piecewise": "PIECEWISE",
    "full": "FULL",
    "full_and_piecewise": "FULL_AND_PIECEWISE",
    "full_decode_only": "FULL_DECODE_ONLY",
    "unsplit": "FULL",
    "default": "FULL_AND_PIECEWISE",
}

# vLLM's all-reduce that is fused with a norm needs NVLink multicast, which some hosts of several GPUs do not have.
PLAIN_ALL_REDUCE = {"pass_config": {"fuse_allreduce_rms": False}}


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        name: name of the case and of its log files. ``-k`` selects by it.
        engine: arguments of ``vllm.LLM``, in addition to ``ENGINE``.
        environment: environment variables of both engines.
        nwor: settings of the second engine.
        use: fields of the job; see ``engine_child``.
        same_tokens: whether to compare the output of both engines.
        may_differ: number of requests whose output may differ, because some vanilla kernels add in another order.
        trimmed: whether fewer drafts must be verified than were scheduled.
        expect: values that the second engine must report: fields of its worker, or minimum values of ``metric:NAME``
            and, with one state, of ``audit:NAME``.
        needs: packages besides vLLM. The case is skipped without them.
        more_blocks: additional blocks of the second engine's cache, so that both schedulers have the same number.
        recurrent_groups: number of KV-cache groups that need no shadow pages.
        share: the shares of accepted and of rejected drafts must both be larger than this.
        draft_counts: for each of these numbers, some step must have it as its largest number of drafts per request.
        vanilla: arguments in which the vanilla engine differs.
    """

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    nwor: dict[str, Any] = field(default_factory=lambda: dict(COW))
    use: dict[str, Any] = field(default_factory=dict)
    same_tokens: bool = True
    may_differ: int = 0
    trimmed: bool = False
    expect: dict[str, Any] = field(default_factory=dict)
    needs: str | tuple[str, ...] | None = None
    more_blocks: int = 0
    recurrent_groups: int = 0
    share: float = 0.02
    draft_counts: tuple[int, ...] = ()
    vanilla: dict[str, Any] = field(default_factory=dict)

    def staged(self, **more: Any) -> Case:
        """Return this case in mode stage: two shadow pages per request in each group of attention."""
        requests = self.engine.get("max_num_seqs", ENGINE["max_num_seqs"])
        pages = 2 * requests * (self.expect.get("kv_cache_groups", 1) - self.recurrent_groups)
        return replace(self, **{"name": f"stage-{self.name}", "nwor": dict(STAGE), "more_blocks": pages} | more)

    @property
    def is_v1(self) -> bool:
        return self.environment.get("VLLM_USE_V2_MODEL_RUNNER") == "0"

    @property
    def runner(self) -> str:
        return "vllm.v1.worker.gpu_model_runner" if self.is_v1 else "vllm.v1.worker.gpu.model_runner"

    @property
    def warms_up(self) -> bool:
        """Whether vLLM runs steps with drafts before it serves requests. The V1 runner has no such warm-up."""
        return not self.is_v1 and self.engine.get("kernel_config", ENGINE["kernel_config"])["enable_jit_warmup"]


AnyCase = TypeVar("AnyCase", bound=Case)


def _engine(backend: str = "FLASH_ATTN", method: str = "ngram", graphs: str = "default", **more: Any) -> dict[str, Any]:
    chosen = {"attention_config": {"backend": backend}, "speculative_config": METHODS[method]}
    return chosen | GRAPHS.get(graphs, {}) | more


def _case(
    name: str, environment: dict[str, str] = V2, backend: str = "FLASH_ATTN", graphs: str = "default",
    kind: type[AnyCase] = Case, **more: Any,
) -> AnyCase:  # fmt: skip
    """Return a case. ``more`` are fields of it, and arguments of the engine."""
    own = {field.name: more.pop(field.name) for field in fields(kind) if field.name in more}
    if graphs in GRAPH_MODES and not more.get("enforce_eager"):
        own["expect"] = {"cudagraph_mode": GRAPH_MODES[graphs]} | own.get("expect", {})
    return kind(name=name, engine=_engine(backend, graphs=graphs, **more), environment=environment, **own)


HITS = {"metric:prefix_cache_hits": 1}
# What may happen to requests, and settings that any feature must support.
BEHAVIOURS: dict[str, dict[str, Any]] = {
    "abort": {"use": {"abort": {10: [0, 2], 16: [5]}}},
    "preemption": {
        "num_gpu_blocks_override": 22, "max_model_len": 192, "use": {"max_tokens": 80},
        "expect": {"metric:num_preemptions": 1},
    },
    "prefix-caching": {
        "enable_prefix_caching": True, "use": {"shared_prefix": 48, "rounds": 2}, "expect": HITS,
    },
    "chunked-prefill": {"max_num_batched_tokens": 48, "use": {"shared_prefix": 90}},
    "temperature": {"use": {"temperature": 1.0}},
    "not-async": {"async_scheduling": False},
    "sleep": {"enable_sleep_mode": True, "use": {"rounds": 2, "sleep": True}},
    # At this level vLLM drops all weights, and reloads only those of the target.
    "sleep-level-2": {
        "enable_sleep_mode": True, "sleep_preserve_parameter_names": ["draft.*"], "use": {"rounds": 2, "sleep": 2},
    },
    "length-limit": {"max_model_len": 128, "use": {"max_tokens": 200}},
    # Every other request uses an adapter of the target.
    "lora": {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "use": {"adapter": "@llama_lora"}},
    "memory-profiling": {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.03},
    # Of recurrent states.
    "": {},
    "cow": {"nwor": RECURRENT_COW},
    "stage": {"nwor": RECURRENT_STAGE},
    "float32": {"mamba_ssm_cache_dtype": "float32"},
    "bfloat16": {"mamba_ssm_cache_dtype": "bfloat16"},
    **{graphs: {"graphs": graphs} for graphs in GRAPHS},
}  # fmt: skip
# Requests that end at the model's limit. Kernels for windows and for single tokens add in another order.
WITHOUT_DRAFTS = BEHAVIOURS["length-limit"] | {"vanilla": {"speculative_config": None}}
COUNTS_AT_LIMIT = (1, 3, 7)
ABORT, PREEMPTION = BEHAVIOURS["abort"], BEHAVIOURS["preemption"]


def _each(case: Callable[..., AnyCase], prefix: str, *names: str, **more: Any) -> Iterator[AnyCase]:
    """Yield a case for each of these behaviours."""
    for name in names:
        yield case(f"{prefix}-{name}".strip("-"), **BEHAVIOURS[name] | more)


def _graph_modes() -> Iterator[Case]:
    """Every way of compiling and capturing, on both runners."""
    for graphs in GRAPHS:
        yield _case(f"v2-flash-ngram-{graphs}", graphs=graphs)
        yield _case(f"v2-triton-eagle-{graphs}", backend="TRITON_ATTN", method="eagle", graphs=graphs)
    for graphs in ("eager", "full_and_piecewise"):
        yield _case(f"v1-flash-ngram-{graphs}", V1, graphs=graphs)
    # These graphs need K drafts for each request of a batch, which n-grams rarely find for several.
    yield _case("v1-flash-ngram-full_decode_only", V1, graphs="full_decode_only", max_num_seqs=1)
    yield _case("v1-flash-eagle-full_decode_only", V1, method="eagle", graphs="full_decode_only")


def _methods() -> Iterator[Case]:
    yield _case("v2-flash-eagle", method="eagle")
    yield _case("v2-flash-eagle-eager", method="eagle", graphs="eager")
    yield _case("v2-flash-eagle-with-biases", method="eagle_with_biases", graphs="eager")
    yield _case("v2-flash-draft_model", method="draft_model")
    yield _case("v2-triton-draft_model", backend="TRITON_ATTN", method="draft_model")
    yield _case("v2-triton-ngram", backend="TRITON_ATTN")
    yield _case("real-model", model="@real", needs=PACKAGES, use={"chats": True})
    # The time at which a grammar is compiled is random, and so is the set of requests in a batch.
    yield _case(
        "real-model-json", model="@real", needs=PACKAGES, method="ngram_gpu", same_tokens=False, share=0.0,
        use={"chats": True, "requests": 32, "max_tokens": 1000, "schema": SCHEMA},
        max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512, num_gpu_blocks_override=768,
        skip_tokenizer_init=False,
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )  # fmt: skip
    yield _case("v1-flash-eagle", V1, method="eagle")
    yield _case("v1-flash-draft_model", V1, method="draft_model")
    yield _case("v1-triton-ngram", V1, backend="TRITON_ATTN")
    yield _case("v1-triton-eagle", V1, backend="TRITON_ATTN", method="eagle")


# Each verified token costs part of a step, so adaptive verification drops drafts if many requests run. The costs are
# given, because with so small a model vLLM measures that drafts cost nothing. There is a point for every size, because
# between two points vLLM takes the cost of the larger.
STEEP = {
    "cost_curves": [
        [[requests, 1.0] for requests in range(1, ENGINE["max_num_seqs"] + 1)],
        [[tokens, 4.0 + 0.75 * tokens] for tokens in range(1, ENGINE["max_num_batched_tokens"] + 1)],
    ]
}
# Fewer drafts if more requests run; in V2 none if all run.
DYNAMIC = {
    "v2": {"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 6, 2], [7, 8, 0]]},
    "v1": {"num_speculative_tokens_per_batch_size": [[1, 3, 4], [4, 8, 2]]},
}


def _drafters() -> Iterator[Case]:
    """Yield cases of other drafting methods and ways to verify, in both modes. ``-k method-`` selects them."""
    for case in _methods_beyond():
        yield replace(case, share=0.1)


def _methods_beyond() -> Iterator[Case]:
    any_mode = {"graphs": "any"}
    for runner, environment in (("v2", V2), ("v1", V1)):
        yield _case(f"method-{runner}-eagle3", environment, method="eagle3")
        yield _case(f"method-{runner}-ngram_gpu", environment, method="ngram_gpu")
        yield _case(f"method-{runner}-mla-mtp", environment, "TRITON_MLA", method="mtp", model="@mla_mtp", **any_mode)
        # vLLM manages the states of GDN layers; the transaction handles attention. A block has the size of a state.
        gdn = {"model": "@gdn_mtp", "num_gpu_blocks_override": 192} | TRITON_PREFILL
        groups = {"expect": {"kv_cache_groups": 3}, "recurrent_groups": 2}
        # In V2 vLLM's CUDA kernel decodes, in V1 the Triton kernel that Qwen3-Next always takes.
        kernel = {"VLLM_GDN_DECODE_KERNEL": "triton"} if runner == "v1" else {}
        yield _case(f"method-{runner}-gdn-mtp", environment | kernel, method="mtp", **gdn, **groups, **any_mode)
        yield _case(f"method-{runner}-dynamic", environment, speculative_config=EAGLE | DYNAMIC[runner],
                    draft_counts=(2, 4), **any_mode)  # fmt: skip
    # Its drafts are unrelated to the target's tokens, so acceptance is drawn at random.
    drawn = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    yield _case("method-v2-dflash-synthetic", speculative_config=METHODS["dflash"] | drawn)
    # At temperature 0 the V1 runner does not use the seeds of requests.
    yield _case("method-v1-dflash-synthetic", V1, speculative_config=METHODS["dflash"] | drawn, graphs="any",
                use={"temperature": 1.0})  # fmt: skip
    yield _case("method-v2-dspark", method="dspark")
    yield _case("method-v1-suffix", V1, method="suffix", graphs="any", needs="arctic_inference")
    adaptive = {"enable_adaptive_verification": True}
    yield _case("method-v2-adaptive-dspark", speculative_config=DSPARK | adaptive, use=STEEP, trimmed=True)
    # This drafter has no confidence head, so vLLM estimates its confidence.
    yield _case("method-v2-adaptive-eagle", backend="TRITON_ATTN", speculative_config=EAGLE | adaptive, use=STEEP,
                trimmed=True)  # fmt: skip
    random = {"draft_sample_method": "probabilistic"}
    yield _case("method-v2-block", speculative_config=EAGLE | random | {"rejection_sample_method": "block"},
                use={"temperature": 1.0})  # fmt: skip
    yield _case("method-v2-fly", speculative_config=EAGLE | {"rejection_sample_method": "fly"})


# Hybrid models: vLLM keeps recurrent states in blocks of the same memory.
_HYBRID = {"graphs": "any", "block_size": None, "max_model_len": 320}
_GDN = {"model": "@gdn_mtp"} | TRITON_PREFILL | _HYBRID
_ALIGNED = {
    "enable_prefix_caching": True, "num_gpu_blocks_override": 320, "max_num_batched_tokens": 192, "max_model_len": 320,
}  # fmt: skip
# Requests with a common beginning, long enough for a block of either model. The second round finds what the first has
# left. Requests decode over the ends of blocks.
_AGAIN = {"shared_prefix": 140, "rounds": 2, "requests": 12}
_PREFIXES = _ALIGNED | {"use": _AGAIN, "expect": HITS}


def _hybrids() -> Iterator[Case]:
    """Yield cases of hybrid models, in both modes. ``-k recurrent-`` selects them."""
    gdn = {"recurrent_groups": 3} | _GDN
    mamba = {"model": "@mamba", "recurrent_groups": 2, "expect": {"kv_cache_groups": 3}} | _HYBRID
    aligned = gdn | _PREFIXES | {"expect": {"kv_cache_groups": 4} | HITS}
    for runner, environment in (("v2", V2), ("v1", V1)):
        yield _case(f"recurrent-{runner}-gdn-align", environment, **aligned)
    # A drafter that proposes in every step: shadow pages of hundreds of rows stay, and requests leave theirs to others.
    yield _case(
        "recurrent-v2-gdn-mtp-abort", method="mtp", num_gpu_blocks_override=192, **gdn | {"recurrent_groups": 2},
        **ABORT, expect={"kv_cache_groups": 3},
    )  # fmt: skip
    yield _case("recurrent-v2-mamba", backend="TRITON_ATTN", **mamba)
    yield _case("recurrent-v1-mamba-align", V1, **mamba | _PREFIXES | {"expect": {"kv_cache_groups": 3} | HITS})


def _caches() -> Iterator[Case]:
    """Yield cases of attention back ends, and of formats and layouts of the cache."""
    yield _case("flex", backend="FLEX_ATTENTION", graphs="eager")
    yield _case("flashinfer", backend="FLASHINFER", graphs="any", needs="flashinfer")
    yield _case(
        "flashinfer-eagle-fp8",
        backend="FLASHINFER",
        method="eagle",
        graphs="eager",
        kv_cache_dtype="fp8",
        needs="flashinfer",
    )
    yield _case("flash-fp8", kv_cache_dtype="fp8")
    yield _case("flash-fp8_e4m3-eagle", method="eagle", kv_cache_dtype="fp8_e4m3")
    for dtype in ("fp8", "fp8_per_token_head", "int8_per_token_head"):
        yield _case(f"triton-{dtype}", backend="TRITON_ATTN", kv_cache_dtype=dtype)
    yield _case("v1-flash-fp8", V1, kv_cache_dtype="fp8")
    yield _case("v1-triton-fp8_per_token_head", V1, backend="TRITON_ATTN", kv_cache_dtype="fp8_per_token_head")
    for backend in ("TRITON_MLA", "FLASH_ATTN_MLA"):
        yield _case(f"mla-{backend.lower()}", backend=backend, graphs="any", model="@mla")
    yield _case("mla-triton_mla-eager", backend="TRITON_MLA", graphs="eager", model="@mla")
    yield _case("mla-triton_mla-fp8", backend="TRITON_MLA", graphs="any", model="@mla", kv_cache_dtype="fp8")
    yield _case("v1-mla-triton_mla", V1, backend="TRITON_MLA", graphs="any", model="@mla")
    for backend in ("FLASH_ATTN", "TRITON_ATTN"):
        name = backend.split("_")[0].lower()
        yield _case(f"{name}-sliding", backend=backend, model="@sliding")
        yield _case(f"{name}-hybrid", backend=backend, model="@hybrid", expect={"kv_cache_groups": 2})
    yield _case("v1-flash-hybrid", V1, model="@hybrid", expect={"kv_cache_groups": 2})
    yield _case("flash-block-32", block_size=32)
    yield _case("flash-fp16", dtype="float16")
    for layout in ("HND", "BLNHC", "BLHNC", "BHLNC"):
        name = {"HND": "LBHNC"}.get(layout, layout)
        environment = {"VLLM_KV_CACHE_LAYOUT": layout}
        yield _case(f"layout-{layout}", environment, expect={"kv_cache_layout": name})


def _behaviours() -> Iterator[Case]:
    for runner, environment in (("v2", V2), ("v1", V1)):
        yield from _each(_case, runner, "preemption", "abort", "temperature", "not-async", environment=environment)
    yield from _each(_case, "", "prefix-caching", "sleep", "memory-profiling")
    yield _case("prefix-caching-eagle", method="eagle", **BEHAVIOURS["prefix-caching"])
    yield from _each(_case, "", "chunked-prefill", "sleep-level-2", method="eagle")
    for count in COUNTS_AT_LIMIT:
        speculation = EAGLE | {"num_speculative_tokens": count}
        yield _case(f"length-limit-k{count}", speculative_config=speculation, may_differ=4, **WITHOUT_DRAFTS)
    # vLLM's warm-up creates 8 requests and numbers their 16 blocks itself, which are all blocks of this cache.
    yield _case(
        "warm-up",
        kernel_config={**ENGINE["kernel_config"], "enable_jit_warmup": True},
        num_gpu_blocks_override=16,
        max_model_len=192,
    )


CASES = [*_graph_modes(), *_methods(), *_drafters(), *_hybrids(), *_caches(), *_behaviours()]
NUM_SHADOW = ENGINE["max_num_seqs"] * 2  # shadow pages of one group: 4 drafts may lie in two blocks of 16
# With this fusion, vLLM writes the cache without any writer that can be patched.
FUSED_WRITER = Case(
    "mla-fused-writer",
    _engine(
        "TRITON_MLA",
        graphs="any",
        model="@mla_yarn",  # its pattern of operations is the one that is fused
        compilation_config={
            "use_inductor_graph_partition": True,
            "pass_config": {"fuse_rope_kvcache_cat_mla": True},
        },
    ),
    same_tokens=False,
)
# All of them again in the other mode. FlashInfer's metadata, made for the target, is what vLLM's EAGLE goes by.
_NOT_STAGED = (
    "flashinfer-eagle-fp8",
    # These cases do not depend on the mode.
    *(f"method-v1-{name}" for name in ("ngram_gpu", "mla-mtp", "gdn-mtp", "dynamic", "dflash-synthetic")),
    *(f"method-v2-{name}" for name in ("dynamic", "adaptive-eagle", "block", "fly")),
)
STAGE_CASES = [case.staged() for case in CASES if case.name not in _NOT_STAGED]
# In this mode it is a normal writer that follows the slots.
STAGE_CASES.append(FUSED_WRITER.staged(same_tokens=True, expect={"recorded_layers": []}))


# ---------------------------------------------------------------- KV connectors


def _connector(name: str, module: str | None = None, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_connector_module_path": module,
        "kv_connector_extra_config": extra,
    }


def _connectors() -> Iterator[Case]:
    """Yield cases that generate, drop the prefix cache, and load.

    The end of an asynchronous load is random, and so is the set of requests in a batch. Tokens are therefore compared
    only if one request runs at a time.
    """
    again = {"rounds": 2, "requests": 12, "drop_prefix_cache": True}
    continued = {"use": {**again, "continued": True}}  # decoded tokens are loaded too
    host = {"cpu_bytes_to_use": 1 << 23}  # some 340 blocks: /dev/shm may be small
    # Decoded tokens are stored too. LMCache's usage reports are off. Tokens are not compared, because after a load even
    # vanilla vLLM with LMCache differs from an engine without it (0.5.6, vLLM 0.33).
    lmcache = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_CHUNK_SIZE": "16", "LMCACHE_LOCAL_CPU": "True",
               "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.25", "LMCACHE_SAVE_DECODE_CACHE": "True"}  # fmt: skip
    connectors = {
        "offloading": (_connector("OffloadingConnector", **host, offload_prompt_only=False), None, V2),
        # It copies with NVIDIA's Python bindings of the driver.
        "simple-cpu": (_connector("SimpleCPUOffloadConnector", **host), "cuda", V2),
        "lmcache": (_connector("LMCacheConnectorV1"), "lmcache", lmcache),
    }
    # LMCacheConnectorV1 loads nothing where vLLM replays a FULL graph: the V2 runner has no forward context there, and
    # without metadata in one the connector returns.
    for name, requests, runner, graphs in (
        ("offloading", 1, "", "full_and_piecewise"),
        ("offloading", 8, "", "full_and_piecewise"),
        ("simple-cpu", 1, "", "full_and_piecewise"),
        ("simple-cpu", 8, "", "full_and_piecewise"),
        ("lmcache", 8, "", "piecewise"),
        ("offloading", 1, "v1-", "default"),
        ("offloading", 8, "v1-", "default"),
        ("lmcache", 8, "v1-", "default"),
    ):
        connector, needs, environment = connectors[name]
        yield _case(
            f"{runner}connector-{name}" + (f"-{requests}" if not runner or requests == 1 else ""),
            (V1 if runner else V2) | environment,
            kv_transfer_config=connector,
            enable_prefix_caching=True,
            max_num_seqs=requests,
            same_tokens=requests == 1,
            needs=needs,
            graphs=graphs,
            **continued,
        )
    # Loads before the forward, and exports in attention, which FULL graphs do not run. It stores a prompt when its
    # first chunk is computed, so that there must be no other.
    yield _case(
        "connector-example",
        kv_transfer_config=_connector("ExampleConnector", shared_storage_path="{fresh}"),
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        graphs="piecewise",
        use=again,
    )
    # A hybrid model also stores and loads the states at the ends of blocks. Its blocks are larger.
    yield _case(
        "connector-simple-cpu-gdn",
        **_GDN | _ALIGNED,
        kv_transfer_config=_connector("SimpleCPUOffloadConnector", cpu_bytes_to_use=1 << 25),
        max_num_seqs=1,
        needs="cuda",
        recurrent_groups=3,
        expect={"kv_cache_groups": 4},
        use={**again, **_AGAIN, "continued": True},
    )


CONNECTOR_CASES = [each for case in _connectors() for each in (case, case.staged())]
# What an exporter sees of every page, at each moment at which vLLM lets it look: without a transaction, and with one.
_EXPORTS = _case(
    "exports-cow",
    graphs="piecewise",
    kv_transfer_config=_connector("ExportConnector", "export_connector"),
    use={"exports": True, "requests": 12, "max_tokens": 20},
    share=0.0,  # of few tokens
)
EXPORT_CASES = [
    replace(_EXPORTS, name="exports-vanilla", nwor=OFF, same_tokens=False),
    _EXPORTS,
    _EXPORTS.staged(name="exports-stage"),
]
WATCHED = Case("vanilla-watched", _engine(graphs="eager"), nwor=OFF, same_tokens=False)


@dataclass(frozen=True)
class Refusal:
    """An engine that is refused at start-up, with the reason.

    Attributes:
        name, engine, environment: as in :class:`Case`.
        because: a regular expression for the error, which also contains "nwor:".
        nwor: settings; the default mode is ``cow``.
        needs: as in :class:`Case`.
    """

    name: str
    because: str
    engine: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    nwor: dict[str, Any] = field(default_factory=dict)
    needs: str | None = None


def _refused(
    name: str, because: str, nwor: dict[str, Any] | None = None, environment: dict[str, str] = V2,
    needs: str | None = None, **engine: Any,
) -> Refusal:  # fmt: skip
    return Refusal(f"refused-{name}", because, _engine(**engine), environment, nwor or {}, needs)


SILENT = {"graphs": "eager", "kv_transfer_config": _connector("SilentConnector", "export_connector")}
_SILENT = "KV connector SilentConnector: it does not declare when it reads the cache"
_OFFLOADING = _connector("OffloadingConnector", cpu_bytes_to_use=1 << 25, offload_prompt_only=False)
REFUSALS = [
    _refused("connector", _SILENT, **SILENT),
    _refused("int4", "int4_per_token_head", backend="TRITON_ATTN", graphs="eager",
             kv_cache_dtype="int4_per_token_head"),
    _refused("connector-v1", _SILENT, environment=V1, **SILENT),
    _refused("connector-hybrid", "KV connector OffloadingConnector with a hybrid model: .*; use mode stage",
             **_GDN | _ALIGNED, kv_transfer_config=_OFFLOADING),
    _refused("stage-flashinfer-eagle", "the drafter attends with metadata that was made for the target's step",
             {"mode": "stage"}, needs="flashinfer", backend="FLASHINFER", method="eagle", graphs="eager"),
    _refused("stage-small-cache", "mode stage withholds 16 blocks .* of the 30 that the cache has; of the 13 left a "
             "request of 256 tokens needs", {"mode": "stage"}, graphs="eager", num_gpu_blocks_override=30),
]  # fmt: skip


# ---------------------------------------------------------------- graphs for a draft model


@dataclass(frozen=True)
class DraftCase(Case):
    """A vanilla engine with a draft model, and the same one with draft graphs.

    Attributes:
        exact: every request count has a graph, so nothing is padded: the drafts are the same, token for token. With
            padding a matrix product may take another kernel, and an argmax may see another of two close logits.
            (The V1 runner pads its drafter's passes to graphs of the target's sizes, so there it is never so.)
        captured: request counts of the first pass and of the loop that must have a graph, by number of drafts; None:
            one of all capture sizes.
        eager: why every step runs vLLM's code; empty: some do not.
    """

    exact: bool = True
    captured: dict[int, tuple[list[int], list[int]]] | None = None
    eager: str = ""


GRAPHED = {"mode": "off", "draft_graphs": True}
GRAPHED_COW = {**COW, "draft_graphs": True}
GRAPHED_STAGE = {**STAGE, "draft_graphs": True}
EVERY_COUNT = [(K + 1) * requests for requests in range(1, ENGINE["max_num_seqs"] + 1)]
PADDED_COUNTS = [(K + 1) * requests for requests in (1, 3, 8)]
RANDOM_DRAFT = {**DRAFT, "draft_sample_method": "probabilistic"}


def _draft(
    name: str, backend: str = "FLASH_ATTN", sizes: list[int] = EVERY_COUNT, nwor: Any = GRAPHED, **more: Any
) -> DraftCase:
    more = {"method": "draft_model", "exact": sizes == EVERY_COUNT} | more
    more["use"] = {"record_drafts": True} | more.get("use", {})
    more["compilation_config"] = {"cudagraph_capture_sizes": sizes} | more.get("compilation_config", {})
    return _case(f"draft-graphs-{name}", backend=backend, graphs="any", kind=DraftCase, nwor=nwor, **more)


MODES = (("", GRAPHED), ("-cow", GRAPHED_COW), ("-stage", GRAPHED_STAGE))
# Many tokens, because the test compares a rate.
RANDOM = {"use": {"temperature": 1.0, "max_tokens": 150}}
ONE_DRAFT = {"sizes": [2 * requests for requests in range(1, 9)]}
FULL_DECODE_ONLY = {"cudagraph_mode": "FULL_DECODE_ONLY"}


def _draft_graphs() -> Iterator[DraftCase]:
    for backend in ("FLASH_ATTN", "TRITON_ATTN"):
        kind = backend.split("_")[0].lower()
        for mode, nwor in MODES:
            yield _draft(f"{kind}{mode}", backend, nwor=nwor)
            yield _draft(f"{kind}-padded{mode}", backend, PADDED_COUNTS, nwor=nwor)
            # Drafts are drawn from the distribution of the draft model, which the verification reads.
            yield _draft(f"{kind}-random{mode}", backend, nwor=nwor, speculative_config=RANDOM_DRAFT, **RANDOM)
    # There is no graph for more than 4 requests, so larger batches run vLLM's code.
    yield _draft("larger-batches", sizes=EVERY_COUNT[:4], exact=True)
    yield _draft("one-draft", speculative_config={**DRAFT, "num_speculative_tokens": 1}, exact=True, **ONE_DRAFT)
    for count in COUNTS_AT_LIMIT:
        sizes = [(count + 1) * requests for requests in range(1, 9)]
        # First passes of more than max_num_batched_tokens have no graph.
        first = [requests for requests in range(1, 9) if requests * (count + 2) <= ENGINE["max_num_batched_tokens"]]
        yield _draft(f"length-limit-k{count}", sizes=sizes, exact=True, **BEHAVIOURS["length-limit"],
                     captured={count: (first, list(range(1, 9)) if count > 1 else [])},
                     speculative_config=DRAFT | {"num_speculative_tokens": count})  # fmt: skip
    for graphs in ("full", "full_decode_only"):
        mode = {"cudagraph_mode": graphs.upper()}
        yield _draft(graphs, compilation_config=mode, expect=mode)
    yield from _each(_draft, "", "abort", "prefix-caching", nwor=GRAPHED_COW)
    yield from _each(
        _draft, "", "preemption", "sleep", "sleep-level-2", "not-async", "length-limit", "memory-profiling", "lora"
    )
    yield _draft("preemption-triton-cow", "TRITON_ATTN", nwor=GRAPHED_COW, **PREEMPTION)
    yield _draft("fp8", kv_cache_dtype="fp8")
    yield _draft("hybrid", model="@hybrid", nwor=GRAPHED_COW)
    yield _draft("sliding-draft", speculative_config={**DRAFT, "model": "@sliding"})
    # Four drafts of up to three requests, two of up to six, none of more: a graph for every count of each.
    dynamic = {"speculative_config": DRAFT | DYNAMIC["v2"]}
    every, some = list(range(1, 9)), range(4, 7)
    sizes = sorted({length * requests for length in (1, 3, 5) for requests in every})
    captured = {4: ([1, 2, 3], [1, 2, 3]), 2: ([1, 2, 3, *some], list(some)), 0: (every, [])}
    for mode, nwor in MODES:
        yield _draft(f"dynamic{mode}", sizes=sizes, nwor=nwor, captured=captured, exact=True, **dynamic)
    # Few sizes: one request with two drafts pads to two, four to five; seven without to eight.
    padded = {4: ([1, 2, 3], [1, 2, 3]), 2: ([2, 3, 5, 6], [5, 6]), 0: ([5, 8], [])}
    yield _draft("dynamic-padded-triton", "TRITON_ATTN", [5, 8, 15, 18], captured=padded, **dynamic)
    yield _draft("dynamic-random", sizes=sizes, captured=captured, exact=True, **RANDOM,
                 speculative_config=RANDOM_DRAFT | DYNAMIC["v2"])  # fmt: skip


def _draft_v1(name: str, method: str, backend: str = "FLASH_ATTN", **more: Any) -> DraftCase:
    return _draft(f"v1-{name}", backend, method=method, exact=False, **{"environment": V1} | more)


def _draft_graphs_v1() -> Iterator[DraftCase]:
    """Yield cases of draft graphs in the V1 runner. ``-k draft-graphs-v1`` selects them."""
    for backend in ("FLASH_ATTN", "TRITON_ATTN"):
        kind = backend.split("_")[0].lower()
        for method in ("draft_model", "eagle", "eagle3"):
            yield _draft_v1(f"{kind}-{method}", method, backend)
        # Attention and Gated DeltaNet layers. vLLM manages the states of the latter. A block is as long as a state.
        yield _draft_v1(f"{kind}-mtp", "mtp", backend, model="@qwen3_next_mtp", **HYBRID_ENGINE)
    for method in ("draft_model", "eagle"):
        yield _draft_v1(f"flash-{method}-cow", method, nwor=GRAPHED_COW)
        yield _draft_v1(f"flash-{method}-stage", method, nwor=GRAPHED_STAGE)
        yield _draft_v1(f"flash-{method}-padded", method, sizes=PADDED_COUNTS)
        yield _draft_v1(f"{method}-not-async", method, async_scheduling=False)
    yield _draft_v1("triton-draft_model-cow", "draft_model", "TRITON_ATTN", nwor=GRAPHED_COW)
    yield _draft_v1("triton-eagle-padded", "eagle", "TRITON_ATTN", sizes=PADDED_COUNTS)
    # Tokens are drawn at random, drafts are the most likely ones; drafts drawn at random run vLLM's code.
    yield _draft_v1("temperature", "draft_model", **RANDOM)
    yield _draft_v1("random", "draft_model", speculative_config=RANDOM_DRAFT, eager="drafts drawn at random", **RANDOM)
    yield _draft_v1("larger-batches", "eagle", sizes=EVERY_COUNT[:4])
    yield _draft_v1("one-draft", "eagle", speculative_config={**EAGLE, "num_speculative_tokens": 1}, **ONE_DRAFT)
    yield _draft_v1("full_decode_only", "draft_model", compilation_config=FULL_DECODE_ONLY, expect=FULL_DECODE_ONLY)
    yield _draft_v1("abort", "eagle", nwor=GRAPHED_COW, **ABORT)
    yield from _each(_draft_v1, "", "preemption", "sleep", "length-limit", method="draft_model")
    yield from _each(_draft_v1, "", "prefix-caching", "memory-profiling", method="eagle")


DRAFT_CASES = [*_draft_graphs(), *_draft_graphs_v1()]
# One token of each prompt is left after a load: the request has drafts in the step that loads its rows.
_LOADS = _case(
    "errors-connector",
    kv_transfer_config=_connector("LoadingConnector", "loading_connector", shared_storage_path="{fresh}"),
    max_num_seqs=8,
    max_num_batched_tokens=1024,
    graphs="piecewise",
    use={"faults": "loads", "rounds": 2, "requests": 12, "drop_prefix_cache": True, "prompt_tokens": [17, 33, 49]},
)
LOAD_ERROR_CASES = [_LOADS, _LOADS.staged()]
_CANCEL = _case("errors-cancel-cow", use={"faults": "cancel"}, same_tokens=False)
CANCEL_ERROR_CASES = [
    _CANCEL,
    _CANCEL.staged(name="errors-cancel-stage"),
    replace(_CANCEL, name="errors-cancel-v1", environment=V1),
]
CAPTURE_ERROR_CASE = replace(_CANCEL, name="errors-capture", use={"faults": "capture"})
ERROR_CASES = [
    _draft("errors", use={"faults": "continue"}),
    _draft("errors-cow", nwor=GRAPHED_COW, use={"faults": "continue"}),
    _draft("errors-stage", nwor=GRAPHED_STAGE, use={"faults": "continue"}),
    _draft_v1("errors", "draft_model", use={"faults": "continue"}),
]


def _refused_draft(name: str, because: str, environment: dict[str, str] = V2, **engine: Any) -> Refusal:
    return _refused(f"draft-graphs-{name}", because, GRAPHED, environment, **{"method": "draft_model"} | engine)


DRAFT_REFUSALS = [
    _refused_draft("eager", "cudagraph_mode NONE: draft graphs follow the target", graphs="eager"),
    _refused_draft("piecewise", "cudagraph_mode PIECEWISE: draft graphs follow the target", graphs="piecewise"),
    _refused_draft("eagle", "by eagle: draft graphs in model runner V2 are for method draft_model", method="eagle"),
    _refused_draft("ngram", "by ngram: draft graphs in model runner V2 are for method draft_model", method="ngram"),
    _refused_draft("flex", "back end FLEX_ATTENTION: only FLASH_ATTN, TRITON_ATTN", backend="FLEX_ATTENTION"),
    *(_refused_draft(f"{name}-mla", f"back end {backend}: only FLASH_ATTN, TRITON_ATTN", backend=backend, model="@mla",
                     speculative_config={**DRAFT, "model": "@mla_draft"})
      for name, backend in (("triton", "TRITON_MLA"), ("flash", "FLASH_ATTN_MLA"))),
    _refused_draft("v1-ngram", "by ngram: draft graphs in model runner V1 are for method draft_model, eagle, eagle3, "
                   "mtp", V1, method="ngram"),
    _refused_draft("v1-piecewise", "cudagraph_mode PIECEWISE: draft graphs follow the target", V1, graphs="piecewise",
                   method="eagle"),
    _refused_draft("no-size", r"cudagraph_capture_sizes \[1, 2\]: none holds a batch", compilation_config={
        "cudagraph_capture_sizes": [1, 2]}),
]  # fmt: skip
DRAFT_WARNED = Refusal(
    "warned-draft-graphs",
    "draft graphs: not active",
    DRAFT_REFUSALS[0].engine,
    nwor={**GRAPHED, "on_unsupported": "vanilla"},
)
# With ``on_unsupported`` it only logs a warning.
WARNED = Refusal("warned-connector", "not active", REFUSALS[0].engine, nwor={"on_unsupported": "vanilla"})


# ---------------------------------------------------------------- one recurrent state per request

# vLLM verifies windows of Qwen3-Next with its Triton kernel. For Qwen3.5 it uses its CUDA kernel, which includes the
# norm, or Triton's if it is told so. Our kernel has the bits of the Triton kernel. The CUDA kernel adds in another
# order, so the other of two close logits sometimes wins.
# The kernel of Kimi Linear adds in an order that depends on the number of requests. Its model asks for a kernel in CuTe
# unless it is told not to. OLMo hybrid has another Triton kernel than Qwen. Ours has its bits too.
# GLM-5.3-Flash's Triton kernel sums in another order.
# By name: model, environment, number of requests whose output may differ, other settings.
_EXPERTS = {"method": "ngram", "needs": EXPERTS_LIBRARY}
_KIMI = {"VLLM_KIMI_K3_GEMM_AR": "0"}
_TRITON = {"VLLM_GDN_DECODE_KERNEL": "triton"}
HYBRIDS: dict[str, tuple[str, dict[str, str], int, dict[str, Any]]] = {
    "next": ("@qwen3_next_mtp", V2, 0, {}),
    "qwen3_5": ("@gdn_mtp", V2, 6, {}),
    "triton": ("@gdn_mtp", _TRITON, 0, {}),
    "kimi": ("@kimi", _KIMI, 6, {"method": "ngram", "backend": "FLASH_ATTN_MLA"}),
    "olmo": ("@olmo", V2, 0, {"method": "ngram"}),
    # Blocks have 512 tokens, a page of the indexer.
    "glm": ("@glm", V2, 6, {"method": "ngram", "backend": "FLASHMLA_SPARSE", "gdn_prefill_backend": None,
                            "max_model_len": 768, "needs": "torchvision"}),
    "qwen4": ("@qwen4_exp", _TRITON, 0, _EXPERTS | {"convolutions": 1}),
    "alice": ("@alice", _KIMI, 6, _EXPERTS | {"trust_remote_code": True}),
    "bailing": ("@bailing", V2, 6, {"method": "ngram", "trust_remote_code": True, "backend": "FLASH_ATTN_MLA"}),
}  # fmt: skip
# FULL becomes FULL_AND_PIECEWISE with these layers.
_GRAPHS = ("eager", "piecewise", "full_decode_only")


def _recurrent(name: str, shape: str = "next", nwor: Any = RECURRENT, **more: Any) -> Case:
    """Return a case. ``convolutions``: KV-cache groups of recurrent layers that need no record."""
    model, environment, may_differ, own = HYBRIDS[shape]
    more = own | more
    convolutions = more.pop("convolutions", 0)
    settings = HYBRID_ENGINE | {"method": "mtp", "model": model, "may_differ": may_differ} | more
    # Layers of attention, a drafter's included; those of Gated DeltaNet are three, in groups of as many.
    attention = 1 if settings["method"] == "ngram" else 2
    groups = -(-3 // attention) + convolutions
    settings["expect"] = {"kv_cache_groups": groups + 1} | settings.get("expect", {})
    case = _case(f"one-state-{name}", environment, nwor=nwor, recurrent_groups=groups, **settings)
    return case.staged(name=case.name, nwor=nwor) if nwor is RECURRENT_STAGE else case


def _recurrent_cases() -> Iterator[Case]:
    """Yield cases of one state per request. ``-k one-state-`` selects them.

    The vanilla engine keeps K + 1 states per request. The audit compares every state with the one that vLLM would keep.
    """
    modes = ("", "cow", "stage")
    yield _recurrent("triton-mtp", "triton")
    for shape in ("next", "qwen3_5"):
        yield from _each(_recurrent, f"{shape}-mtp", *modes, shape=shape)
        yield _recurrent(f"{shape}-ngram", shape, method="ngram")
        yield from _each(_recurrent, shape, "float32", *_GRAPHS, shape=shape)
    yield from _each(_recurrent, "next-align", *modes, **_PREFIXES)
    yield _recurrent("qwen3_5-align", "qwen3_5", **_PREFIXES)
    # 32 prompts of more than 512 tokens, in chunks that fill the batch.
    long = {"max_model_len": 704, "max_num_seqs": 32, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 512}
    yield _recurrent(
        "next-prompts", use={"shared_prefix": 512, "requests": 32}, **long, mamba_ssm_cache_dtype="float32"
    )
    # Vanilla runs fewer requests together, and preempts others. Another kernel then computes the decoded tokens of such
    # a request again, as a prompt.
    yield _recurrent("next-preemption", num_gpu_blocks_override=24, use={"max_tokens": 80}, may_differ=12,
                     expect={"metric:num_preemptions": 1})  # fmt: skip
    yield from _each(_recurrent, "next", "abort", "not-async", "sleep", "sleep-level-2", "memory-profiling")
    six = {"speculative_config": MTP | {"num_speculative_tokens": 6}}
    for clients in (2, 3, 4):
        yield _recurrent(f"next-k6-{clients}", max_num_seqs=clients, **six)
    for count in COUNTS_AT_LIMIT:
        speculation = MTP | {"num_speculative_tokens": count}
        yield _recurrent(f"next-length-limit-k{count}", speculative_config=speculation, may_differ=12, **WITHOUT_DRAFTS)
    # Windows of nine tokens, which vLLM's CUDA kernel does not support.
    eight = {"speculative_config": MTP | {"num_speculative_tokens": 8}}
    yield _recurrent("qwen3_5-eight-drafts", "qwen3_5", **eight)
    yield _recurrent("moe", model="@qwen3_next_experts_mtp", needs=EXPERTS_LIBRARY)
    draft = {"speculative_config": DRAFT | {"model": "@draft_of_gdn"}}
    yield from _each(_recurrent, "draft-model", "", "cow", **draft)
    yield from _each(_recurrent, "kimi", "cow", "stage", *_GRAPHS, "abort", shape="kimi")
    yield _recurrent("kimi-piecewise-cow", "kimi", RECURRENT_COW, graphs="piecewise")
    for backend, graphs in (("FLASH_ATTN_MLA", "default"), ("TRITON_MLA", "any")):
        yield _recurrent(f"kimi-{backend.lower()}", "kimi", backend=backend, graphs=graphs)
    # One head of 128 has blocks of 128 tokens, in either engine.
    longer = _PREFIXES | {"max_model_len": 384, "use": _AGAIN | {"shared_prefix": 220}}
    yield _recurrent("kimi-align", "kimi", model="@kimi_of_one_head", **longer)
    # Five groups: three of KDA (a layer each), one of MLA and its indexer, one of the indexer's tails. The transaction
    # is off, because attention has its own kernels.
    five: dict[str, Any] = {"kv_cache_groups": 5, "sessions": []}
    yield from _each(_recurrent, "glm", "", "eager", "bfloat16", "abort", shape="glm", expect=five)
    # FlashKDA exports a state at the end of the first block of a prompt.
    over_blocks = _PREFIXES | {"max_model_len": 1280, "max_num_batched_tokens": 1280, "expect": five | HITS}
    yield _recurrent("glm-align", "glm", **over_blocks | {"use": _AGAIN | {"shared_prefix": 560}})
    for shape, count in (("qwen4", 2), ("alice", 2), ("bailing", 2), ("olmo", 3)):
        yield from _each(_recurrent, f"{shape}-ngram", *modes[:count], shape=shape)
    yield from _each(_recurrent, "qwen4", "eager", "float32", "abort", shape="qwen4")
    yield _recurrent("qwen4-align", "qwen4", **_PREFIXES)
    yield from _each(_recurrent, "alice", "eager", shape="alice")
    yield from _each(_recurrent, "bailing", *_GRAPHS, "abort", shape="bailing")
    # Blocks of 96 tokens.
    yield from _each(
        _recurrent, "olmo-align", *modes, shape="olmo", **_PREFIXES | {"use": _AGAIN | {"shared_prefix": 160}}
    )
    yield from _each(_recurrent, "olmo", "float32", *_GRAPHS, "temperature", "abort", shape="olmo")
    yield _recurrent("olmo-draft-model", "olmo", method="mtp", **draft)
    yield _recurrent("olmo-repeated-keys", "olmo", model="@olmo_repeated")
    yield _recurrent("olmo-triton", "olmo", backend="TRITON_ATTN", graphs="any")
    # A block of attention has 96 tokens, and a request goes on in a second one.
    yield _recurrent("olmo-preemption", "olmo", num_gpu_blocks_override=24, use={"max_tokens": 120}, may_differ=12,
                     expect={"metric:num_preemptions": 1})  # fmt: skip
    # Not visible to a recurrent layer: how many drafts a request has, adapters of projections, where weights are.
    yield _recurrent("next-dynamic", speculative_config=MTP | DYNAMIC["v2"])
    yield _recurrent("lora", "triton", **BEHAVIOURS["lora"] | {"use": {"adapter": "@gdn_lora"}})
    yield _recurrent("next-offload", cpu_offload_gb=0.002)
    # Multimodal classes around the text model, with M-RoPE positions. No request has an image.
    text_only: dict[str, Any] = {"shape": "triton", "language_model_only": True, "needs": "torchvision"}
    yield _recurrent("multimodal", model="@gdn_mtp_multimodal", **text_only)
    minicpm_v = text_only | {"model": "@minicpm_v", "method": "ngram"}
    yield from _each(_recurrent, "minicpm_v-ngram", "", "cow", **minicpm_v)
    yield _recurrent("minicpm_v-align", **minicpm_v, **_PREFIXES)
    for model in ("interns2_preview", "interns2_mobius"):
        interns2 = text_only | {"model": f"@{model}", "trust_remote_code": True}
        interns2 |= {"needs": ("torchvision", EXPERTS_LIBRARY)}
        yield from _each(_recurrent, f"{model}-mtp", "", "cow", **interns2)
        yield _recurrent(f"{model}-align", **interns2, **_PREFIXES)


# vLLM's own settings, except those that keep a tiny engine small. Prefix caching and warm-ups are on, and FlashInfer
# runs the prompts. Blocks have 128 or 192 tokens, and all prompts share 352 tokens. The shortest prompts therefore end
# in the second or third block, and others have a checkpoint inside.
DEFAULTS: dict[str, Any] = {
    "attention_config": None,
    "gdn_prefill_backend": None,
    "enable_prefix_caching": None,
    "max_num_batched_tokens": None,
    "kernel_config": {"enable_jit_warmup": True},
    "max_model_len": 640,
}
LONG_PROMPTS = {"shared_prefix": 352, "rounds": 2, "requests": 12}
FLASHINFER_HITS = HITS | {"gdn_prefill_backends": ["flashinfer"]}


def _defaults() -> Iterator[Case]:
    """Yield cases of one state per request in a default engine. ``-k one-state-default-`` selects them."""
    expect = FLASHINFER_HITS | {"audit:checkpoints": 6, "audit:checkpoint_hits": 6}
    for shape, worker in (("next", "gpu_worker_hybrid.Worker"), ("qwen3_5", "")):  # the first has no experts

        def case(name: str, shape: str = shape, worker: str = worker, nwor: Any = RECURRENT, **more: Any) -> Case:
            use, expected = LONG_PROMPTS | more.pop("use", {}), expect | more.pop("expect", {})
            settings = DEFAULTS | {"worker_extension_cls": worker, "use": use, "expect": expected} | more
            return _recurrent(f"default-{shape}{name}", shape, nwor, **settings)

        yield case("")
        yield case("-cow", nwor=RECURRENT_COW)
        yield case("-stage", nwor=RECURRENT_STAGE)
        # FlashInfer takes another kernel for few sequences. Here both engines have one in each batch.
        yield case("-one-by-one", max_num_seqs=1)
        yield case("-abort", **ABORT)
        # As for `next-preemption`, vanilla vLLM preempts at other times.
        yield case("-preemption", num_gpu_blocks_override=28, use={"max_tokens": 190}, may_differ=24,
                   expect={"metric:num_preemptions": 1})  # fmt: skip
        # Keys inside a block. vLLM then exports fewer states inside a prompt. Of 385 tokens the last one is left, and
        # folded.
        lengths = [376, 422, 393, 448, 385, 370, 442, 381, 405, 399, 366, 390]
        yield case("-partial-hits", prefix_match_unit=64, use={"prompt_tokens": lengths},
                   expect={"audit:checkpoints": 1, "audit:checkpoint_hits": 0, "audit:tail_folds": 1})  # fmt: skip


def _recurrent_connectors() -> Iterator[Case]:
    """Yield cases that generate, drop the prefix cache, and load. ``-k one-state-connector-`` selects them.

    As with other connectors, tokens are compared only if one request runs at a time.
    """
    again = _AGAIN | {"drop_prefix_cache": True, "continued": True}
    aligned = _ALIGNED | {"max_num_seqs": 1, "use": again, "expect": {"metric:external_prefix_cache_hits": 1}}
    host = {"cpu_bytes_to_use": 1 << 25}
    simple = aligned | {"kv_transfer_config": _connector("SimpleCPUOffloadConnector", **host), "needs": "cuda"}
    offloading = aligned | {"kv_transfer_config": _connector("OffloadingConnector", **host, offload_prompt_only=False)}
    many = {"max_num_seqs": 8, "same_tokens": False}
    for name, connector in (("simple-cpu", simple), ("offloading", offloading)):
        yield _recurrent(f"connector-{name}", method="ngram", **connector)
        yield _recurrent(f"connector-{name}-mtp", **connector)
        yield _recurrent(f"connector-{name}-8", **connector | many)
    # Keys inside a block: the ends of prompts are stored too.
    yield _recurrent("connector-offloading-partial-hits", method="ngram", prefix_match_unit=16, **offloading)
    yield _recurrent("connector-simple-cpu-cow", nwor=RECURRENT_COW, method="ngram", **simple)
    yield _recurrent("connector-simple-cpu-stage", nwor=RECURRENT_STAGE, method="ngram", **simple)
    # A default engine, whose prompts FlashInfer runs: it writes states inside a prompt.
    default = DEFAULTS | {
        "kv_transfer_config": simple["kv_transfer_config"],
        "max_num_seqs": 1,
        "needs": ("flashinfer", "cuda"),
        "use": again | {"shared_prefix": LONG_PROMPTS["shared_prefix"]},
        "expect": {
            "gdn_prefill_backends": ["flashinfer"],
            "metric:external_prefix_cache_hits": 1,
            "audit:checkpoints": 6,
        },
    }
    yield _recurrent("connector-default", "qwen3_5", worker_extension_cls="", **default)
    # The bytes of every state that gets a cache key; see state_connector.py.
    states = aligned | {
        "kv_transfer_config": _connector("StateConnector", "state_connector"),
        # Each prompt has more than two blocks, of which MTP leaves out the last one. Some answers reach the next block.
        "use": {"requests": 12, "prompt_tokens": [400, 500, 370, 440]},
        "max_model_len": 576,
        "expect": {},
    }
    yield _recurrent("connector-states-ngram", method="ngram", **states)
    yield _recurrent("connector-states-mtp", **states)
    for name, nwor in (("float32", RECURRENT), ("chunk", RECURRENT_CHUNK)):
        longer = {} if name == "float32" else {"block_size": 176}  # of both engines: records make our pages longer
        other_bits: dict[str, Any] = {}
        if name == "chunk":
            # Two of the prompts end shortly before a block, because some requests have only ten output tokens.
            other_bits = {"may_differ": 8, "use": {"requests": 12, "prompt_tokens": [400, 522, 370, 523]}}
        more = {"mamba_ssm_cache_dtype": "float32"} | longer | other_bits
        yield _recurrent(f"connector-states-{name}", nwor=nwor, **states | more)


def _prefill_elsewhere() -> Iterator[Case]:
    """Yield cases with two engines on one GPU: one for prompts, one for decoding. ``-k one-state-pd-`` selects them.

    For some prompts, the last step of the prefill engine computes only one token, which runs as a window there.
    """
    pages = {"kv_transfer_config": _connector("PagesConnector", "state_connector", folder="{fresh}")}
    alone = {
        "use": {"requests": 8, "prompt_tokens": [66, 40, 130, 90], "prefill": {}},
        "max_num_batched_tokens": 64,
        "max_num_seqs": 1,
        "expect": {"metric:external_prefix_cache_hits": 1},
    }
    yield _recurrent("pd-pages", **alone | pages)
    yield _recurrent("pd-pages-ngram", method="ngram", **alone | pages)
    chunk = {"nwor": RECURRENT_CHUNK, "same_tokens": False, "mamba_ssm_cache_dtype": "float32"}
    yield _recurrent("pd-pages-chunk", **alone | pages | chunk)
    yield _recurrent("pd-pages-8", **alone | pages | {"max_num_seqs": 8, "same_tokens": False})
    aligned = {
        "enable_prefix_caching": True,
        "max_model_len": 320,
        "max_num_batched_tokens": 80,  # a block, so that one token is left of 161 and of 241
        "use": alone["use"] | {"prompt_tokens": [162, 90, 242, 40]},
    }
    yield _recurrent("pd-pages-align", **alone | pages | aligned)
    # Around the ends of one and of two blocks. For the longest of each, one token is left after a block.
    seven = {
        "speculative_config": MTP | {"num_speculative_tokens": 7},
        "block_size": 96,  # of both engines: records make our pages longer
        "max_num_batched_tokens": 96,
        "use": alone["use"] | {"prompt_tokens": [95, 96, 97, 98, 191, 192, 193, 194]},
    }
    yield _recurrent("pd-pages-k7", **alone | pages | seven)
    yield _recurrent("pd-pages-k7-align", **alone | pages | aligned | seven)
    nixl = {"kv_transfer_config": _connector("NixlConnector"), "needs": "nixl"}
    for name, more in (("", {}), ("-align", aligned)):
        case = _recurrent(f"pd-nixl{name}", **alone | nixl | more)
        yield replace(case, environment=case.environment | {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"})


def _without_drafts() -> Iterator[Case]:
    """Yield cases of one state per request without speculation. ``-k one-state-nodrafts-`` selects them.

    vLLM's kernels for such steps add in another order than ours. For Qwen the kernel has one warp per head if all
    requests decode, and four if some have prompts. So as many requests may differ as for the other such kernels.
    """

    def case(name: str, shape: str = "next", **more: Any) -> Case:
        settings = {"method": "ngram", "speculative_config": None, "may_differ": 6} | more
        settings["expect"] = {"sessions": []} | settings.get("expect", {})
        return _recurrent(f"nodrafts-{name}", shape, **settings)

    for shape in ("next", "qwen3_5"):
        yield from _each(case, shape, "", "float32", *_GRAPHS, "abort", shape=shape)
        yield case(f"{shape}-align", shape, **_PREFIXES)
        default = DEFAULTS | {"use": LONG_PROMPTS} | ({"worker_extension_cls": ""} if shape == "qwen3_5" else {})
        default["expect"] = FLASHINFER_HITS | {"audit:checkpoints": 1, "audit:checkpoint_hits": 1}
        yield case(f"{shape}-default", shape, **default)
    # A request that vLLM preempts computes its output as a prompt, by another kernel.
    yield case("next-preemption", num_gpu_blocks_override=24, may_differ=12, use={"max_tokens": 120},
               expect={"metric:num_preemptions": 1})  # fmt: skip
    yield case("next-not-async", async_scheduling=False)
    for shape in ("kimi", "olmo", "bailing", "qwen4"):
        yield case(shape, shape)
    yield case("glm", "glm", expect={"kv_cache_groups": 5})


def _chunks() -> Iterator[Case]:
    """Yield cases of the chunk form. ``-k one-state-chunk-`` selects them.

    Its outputs have other bits than vLLM's, so the other of two close logits sometimes wins.
    """

    def case(name: str, shape: str = "next", nwor: Any = RECURRENT_CHUNK, **more: Any) -> Case:
        settings = {"mamba_ssm_cache_dtype": "float32", "may_differ": 8} | more
        return _recurrent(f"chunk-{name}", shape, nwor, **settings)

    # Some requests decode over the end of their second block. Blocks of 160 tokens hold a page of this form.
    aligned = _PREFIXES | {"max_model_len": 384, "use": _AGAIN | {"shared_prefix": 220}, "may_differ": 16}
    for graphs in ("full", "eager", "piecewise"):
        yield case(f"next-{graphs}", **({} if graphs == "full" else {"graphs": graphs}))
    yield case("qwen3_5", "qwen3_5")
    # A state of 16 bits is rounded once for 16 tokens, and vLLM's after each.
    yield case("next-bfloat16", mamba_ssm_cache_dtype="bfloat16", same_tokens=False)
    yield case("next-seven-drafts", speculative_config=MTP | {"num_speculative_tokens": 7})
    yield case("next-cow", nwor=RECURRENT_COW | {"recurrent": "chunk"})
    # Also with drafts, where a block has 176 tokens.
    longer = {"max_model_len": 512, "use": _AGAIN | {"shared_prefix": 310}}
    yield case("next-align", block_size=176, **aligned | longer)
    yield case("next-abort", **ABORT)
    yield case("next-preemption", num_gpu_blocks_override=20, use={"max_tokens": 190}, may_differ=16,
               expect={"metric:num_preemptions": 1})  # fmt: skip
    default = DEFAULTS | {"use": LONG_PROMPTS, "expect": FLASHINFER_HITS, "may_differ": 16}
    yield case("next-default", **default)
    yield case("next-partial-hits", prefix_match_unit=64, **default)
    without: dict[str, Any] = {"method": "ngram", "speculative_config": None}
    yield case("nodrafts-next", **without, expect={"sessions": []})
    yield case("nodrafts-qwen3_5", "qwen3_5", **without, expect={"sessions": []})
    yield case("nodrafts-next-align", **without | aligned | {"expect": aligned["expect"] | {"sessions": []}})


RECURRENT_CASES = [*_recurrent_cases(), *_defaults(), *_without_drafts(), *_chunks()]
REFUSED_COUNTS = _recurrent(
    "invalid-counts", nwor={"recurrent": True}, use={"faults": "counts", "rounds": 20}, same_tokens=False
)
# Eager, so that Python calls each part in every step.
STATE_ERROR_CASES = [
    _recurrent(f"errors-{part}", nwor={"recurrent": True}, graphs="eager", use={"faults": part}, same_tokens=False)
    for part in ("plan", "verify", "fold")
]
STATE_ERROR_CASES.append(
    _recurrent(
        "errors-copies", nwor={"recurrent": True}, graphs="eager", same_tokens=False, **_ALIGNED,
        use=_AGAIN | {"faults": "copies"},
    )
)  # fmt: skip
# vLLM's own K + 1 states, without FULL graphs: they call no Python, which the audit needs.
VLLM_STATES_CASES = [
    _case(
        f"vllm-states-{shape}-{graphs}", HYBRIDS[shape][1], graphs=graphs, model=HYBRIDS[shape][0],
        method="mtp", nwor=OFF, same_tokens=False, recurrent_groups=2, **HYBRID_ENGINE,
    )
    for shape in ("next", "qwen3_5", "triton")
    for graphs in ("eager", "piecewise")
]  # fmt: skip
RECURRENT_CONNECTORS = list(_recurrent_connectors())
RECURRENT_PREFILLED = list(_prefill_elsewhere())
# Two GPUs. Each rank has the states and records of its heads.
RECURRENT_RANKS = [
    _recurrent(
        f"tp2{name}",
        shape,
        nwor,
        model="@gdn_mtp_wide",
        speculative_config=MTP | {"num_speculative_tokens": 3},
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        disable_custom_all_reduce=True,
        compilation_config=PLAIN_ALL_REDUCE,
        **more,
    )
    for name, shape, nwor, more in (
        ("", "triton", RECURRENT, {}),
        ("-cow", "triton", RECURRENT_COW, {}),
        ("-stage", "triton", RECURRENT_STAGE, {}),
        ("-eager", "triton", RECURRENT, {"graphs": "eager"}),
        ("-fused-norm", "qwen3_5", RECURRENT, {}),
    )
]
CHUNK = {"VLLM_NWOR_RECURRENT": "chunk"}
RECURRENT_REFUSALS = [
    _refused(f"one-state-{name}", because, RECURRENT, environment,
             **{"model": "@gdn_mtp", "graphs": "eager"} | TRITON_PREFILL | engine)
    for name, because, engine, environment in (
        ("v1", "model runner V1", {}, V1),
        ("mamba", "has not been tried, or its recurrent layers", {"model": "@mamba", "gdn_prefill_backend": None}, V2),
        ("connector", "KV connector ExportConnector: it does not declare which states it reads",
         {"kv_transfer_config": _connector("ExportConnector", "export_connector")}, V2),
        ("float16", "states are torch.float16", {"mamba_ssm_cache_dtype": "float16"}, V2),
        ("chunk-drafts", "windows have 9 tokens, more than 8",
         {"speculative_config": MTP | {"num_speculative_tokens": 8}}, V2 | CHUNK),
        ("chunk-float16", "the model's dtype is torch.float16",
         {"dtype": "float16", "mamba_ssm_cache_dtype": "float32"}, V2 | CHUNK),
        ("chunk-kda", "each channel of a key has a decay",
         {"model": "@kimi", "gdn_prefill_backend": None, "speculative_config": None}, V2 | CHUNK),
    )
]  # fmt: skip


# ---------------------------------------------------------------- draft vocabulary

# Rows of the tiny models' heads, a quarter of their tokens.
ROWS = VOCABULARY // 4


def _vocabulary(name: str, rows: int = ROWS, nwor: dict[str, Any] | None = None, **more: Any) -> Case:
    """Return a case. Other drafts are accepted than in the vanilla engine, so batches have other sizes, in which one of
    two close logits may win that did not win before."""
    settings = {"mode": "off", "draft_vocabulary": rows} | (nwor or {})
    return _case(f"vocabulary-{name}", nwor=settings, **{"method": "eagle", "graphs": "any", "may_differ": 2} | more)


def _vocabularies() -> Iterator[Case]:
    """Yield cases of the draft vocabulary. ``-k vocabulary-`` selects them."""
    gdn = HYBRID_ENGINE | {"method": "mtp", "model": "@gdn_mtp", "may_differ": 6}
    random = {"draft_sample_method": "probabilistic"}
    for method in ("eagle", "draft_model"):
        yield _vocabulary(method, method=method)
        yield _vocabulary(f"{method}-whole", VOCABULARY, method=method)
        yield _vocabulary(f"{method}-random", speculative_config=METHODS[method] | random, same_tokens=False,
                          use={"temperature": 1.0})  # fmt: skip
    for graphs in ("eager", "piecewise", "full"):
        yield _vocabulary(f"eagle-{graphs}", graphs=graphs)
    yield _vocabulary("graphs", method="draft_model", nwor={"draft_graphs": True})
    yield _vocabulary("graphs-random", nwor={"draft_graphs": True}, same_tokens=False, use={"temperature": 1.0},
                      speculative_config=RANDOM_DRAFT)  # fmt: skip
    yield _vocabulary("mla-mtp", backend="TRITON_MLA", method="mtp", model="@mla_mtp")
    yield _vocabulary("gdn-mtp", **gdn)
    yield _vocabulary("gdn-mtp-recurrent", nwor={"recurrent": True}, **gdn)
    yield _vocabulary("gdn-mtp-chunk-cow", nwor={"recurrent": "chunk", "mode": "cow"}, same_tokens=False, **gdn)
    yield _vocabulary("stage", nwor={"mode": "stage"}, same_tokens=False)
    yield _vocabulary("adaptive", backend="TRITON_ATTN",
                      speculative_config=EAGLE | {"enable_adaptive_verification": True}, use=STEEP)  # fmt: skip
    yield _vocabulary("dynamic", speculative_config=EAGLE | DYNAMIC["v2"])
    yield from _each(_vocabulary, "", "preemption", "prefix-caching", "chunked-prefill", "abort", "not-async",
                         "memory-profiling")  # fmt: skip
    yield from _each(_vocabulary, "", "lora", method="draft_model")
    yield _vocabulary("sleep-1", **BEHAVIOURS["sleep"])
    yield _vocabulary("sleep-level-2", **BEHAVIOURS["sleep-level-2"])


VOCABULARY_CASES = list(_vocabularies())


_FEW_ROWS = {"mode": "off", "draft_vocabulary": ROWS}
VOCABULARY_REFUSALS = [
    _refused("vocabulary-ngram_gpu", "is for MTP, EAGLE and draft models", _FEW_ROWS, method="ngram_gpu"),
    _refused("vocabulary-v1", "model runner V1", _FEW_ROWS, V1, method="eagle"),
    _refused("vocabulary-quantized", "its output head is quantized", _FEW_ROWS,
             speculative_config=EAGLE | {"draft_lm_head_quantization": "fp8"}),
]  # fmt: skip
