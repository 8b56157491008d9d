"""Supported configurations, refusals with their reasons, and the checks that run when an engine starts.

A :class:`Hook` names a vLLM function and the parameters that it must have. An engine is refused if its vLLM differs.
The tables here are the only source of three things: the refusals at start-up, the output of ``nwor-ops doctor``, and
the tables in docs/vllm.md (``python tools/support_tables.py`` writes them).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nwor_ops import library
from nwor_ops.transaction.manager import MODES

# The features of an engine: the transaction (modes cow and stage), draft graphs, and one recurrent state per request.
TRANSACTION, DRAFT_GRAPHS, ONE_STATE = "transaction", "draft graphs", "one state"
SUPPORTED_VERSIONS = {TRANSACTION: ("0.32", "0.33"), DRAFT_GRAPHS: ("0.33",), ONE_STATE: ("0.33",)}
DEVICES = {TRANSACTION: ("cpu", "cuda"), DRAFT_GRAPHS: ("cuda",), ONE_STATE: ("cuda",)}
# Draft graphs: supported methods by model runner. For the transaction, see runners/base.py (drafters) and
# layers/back_ends.py (attention).
DRAFT_METHODS = {"V2": ("draft_model",), "V1": ("draft_model", "eagle", "eagle3", "mtp")}
DRAFT_BACK_ENDS = ("FLASH_ATTN", "TRITON_ATTN")
DRAFT_CACHE_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")
CACHE_SPECS = (*DRAFT_CACHE_SPECS, "MLAAttentionSpec")
# Models that support one state per request. All recurrent layers of such a model have the same vLLM class.
ONE_STATE_MODELS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "InternS2PreviewForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
    "KimiLinearForCausalLM",
    "AliceAIForCausalLM",
    "BailingMoeV3ForCausalLM",
    "BailingMoeV3VLForConditionalGeneration",
    "OlmoHybridForCausalLM",
    "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration",
)
KEY_WIDTHS, VALUE_WIDTHS = (64, 96, 128, 256), (64, 128, 192, 256)  # elements per head of a recurrent state
# This compiler pass in vLLM replaces the cache writer of MLA layers with a kernel that also rotates the key. The
# passes for other layers exist only for ROCm.
FUSED_MLA_WRITER = "fuse_rope_kvcache_cat_mla"


@dataclass(frozen=True)
class Connector:
    """Describe when and what a KV connector reads from the cache.

    Attributes:
        reads: when it reads, and which blocks.
        shown: the test that covers the connector. Empty: only vLLM's source was read; the connector was not run.
        in_order: it reads on the main stream, or after an event on that stream. It reads rows of a step only after the
            forward of that step. If False, it may read at any time after a request ends.
        layer_wise: it may export a layer from inside the attention op.
        partial_tails: for a hybrid model, it also stores the partial last block of a prompt. This read is not ordered
            before the next step.
        loads_any_time: it may load rows while vLLM runs other requests. This is the default, also for custom
            connectors, unless vLLM's source rules it out. An audit reports unexpected rows as stray writes.
        refused: the reason that the transaction refuses the connector. Empty: it is supported.
        one_state: the reason that an engine with one recurrent state per request refuses the connector. Empty: it is
            supported. A supported connector exports only complete states. It reads them in a block with a cache key,
            or in the last block of a request that generates one token, after the forward of that step.
        one_state_cases: cases of tests/support/gpu_cases.py that cover ``one_state``. Empty: vLLM's source was read;
            the connector was not run.
    """

    reads: str
    shown: str = ""
    in_order: bool = True
    layer_wise: bool = False
    partial_tails: bool = False
    loads_any_time: bool = True
    refused: str = ""
    one_state: str = ""
    one_state_cases: tuple[str, ...] = ()


_AT_THE_END = "after a request ends, by RDMA and not in stream order: its blocks, with the partial tail"
_NIXL = Connector(_AT_THE_END, in_order=False)
_NIXL_CASES = ("one-state-pd-nixl", "one-state-pd-nixl-align")
_NOT_HYBRID = "vLLM starts no hybrid model with it (it is not `SupportsHMA`)"
_LOADS = "`test_connectors.py`, `test_connectors_gpu.py`"


def _offloaded(name: str) -> tuple[str, ...]:
    return tuple(f"one-state-connector-{name}{more}" for more in ("", "-mtp", "-8"))


# All connectors of vLLM 0.33, by their name in vLLM's factory.
CONNECTORS = {
    "ExampleConnector": Connector(
        "in attention: whole blocks of prompts", _LOADS, layer_wise=True, loads_any_time=False,
        one_state=_NOT_HYBRID),
    "MultiConnector": Connector(
        "as its inner connectors do; all of them must be supported", "`test_connectors.py`", loads_any_time=False),
    "OffloadingConnector": Connector(
        "in the next step, on a stream that waits for the main one: full chunks, for a hybrid model partial ones too",
        "`test_connectors_gpu.py`", partial_tails=True, one_state_cases=_offloaded("offloading")),
    "SimpleCPUOffloadConnector": Connector(
        "at `wait_for_save`, after an event: full blocks, at the end of a hybrid request a partial one", _LOADS,
        one_state_cases=(*_offloaded("simple-cpu"), "one-state-connector-default")),
    "LMCacheMPConnector": Connector(
        "at `wait_for_save`, after an event: full chunks", "no test; by hand on a CPU, vLLM 0.32",
        one_state="vLLM uses the class of the `lmcache` package if it is installed; that class was not reviewed"),
    "LMCacheConnectorV1": Connector(
        "at `wait_for_save`, or in attention: full chunks", layer_wise=True, loads_any_time=False,
        shown="`test_connectors_gpu.py`, tokens not compared", one_state=_NOT_HYBRID),
    "MooncakeStoreConnector": Connector(
        "at `wait_for_save`, after an event: full blocks, for a hybrid model partial ones too", partial_tails=True),
    "HF3FSKVConnector": Connector("at `wait_for_save`: full blocks", one_state=_NOT_HYBRID),
    "NixlConnector": replace(_NIXL, one_state_cases=_NIXL_CASES),
    "NixlPullConnector": _NIXL,
    "NixlPushConnector": _NIXL,
    "MooncakeConnector": _NIXL,
    "HiSparseConnector": Connector("", refused="it writes to its own slots"),
    "FlexKVConnectorV1": Connector("", refused="it reads from another process when the scheduler asks; not tested"),
    "MoRIIOConnector": Connector("", refused="it writes to other engines from inside attention; not tested"),
    "DecodeBenchConnector": Connector("", refused="it fills the cache with made-up rows for benchmarks; not tested"),
    "ExampleHiddenStatesConnector": Connector("", refused="it exports hidden states, not keys and values; not tested"),
}  # fmt: skip
# A custom connector class sets this attribute to True to declare that it reads in order:
# - It reads on the current stream, or after an event recorded there: in save_kv_layer (which is then called after the
#   commit), in wait_for_save or later.
# - In start_load_kv it reads no token that the step has computed.
# - It reads a partial block only on the current stream. An event does not stop the next step from writing drafts there.
IN_ORDER = "reads_kv_cache_in_order"
# A custom connector class sets this attribute to True to declare that every recurrent state it reads is complete. It
# reads the state in a block with a cache key, in wait_for_save or later. Or it reads the last block of a request that
# generates one token, after the forward of that step. In other blocks the last window's accepted tokens may be pending.
COMPLETE_STATES = "reads_complete_states"
# Tiers of OffloadingConnector whose keys contain the model's name. recurrent/stores.py adds the record's size to it.
NAMED_TIERS = ("fs", "obj", "p2p")


class Unsupported(Exception):
    """The configuration of this engine is not supported. The message names it and gives the reason."""

    def stop_if(self, strict: bool, asked_for: str, without: str) -> None:
        """Raise RuntimeError with the reason and the setting that starts the engine without the feature.

        Args:
            strict: do nothing if False.
            asked_for: the request, for the message: "mode cow was asked for".
            without: how such an engine then runs, for the message: "without it".
        """
        if strict:
            raise RuntimeError(
                f"nwor: {self} ({asked_for}; VLLM_NWOR_ON_UNSUPPORTED=vanilla or "
                f'{{"nwor": {{"on_unsupported": "vanilla"}}}} runs such an engine {without})'
            ) from self


@dataclass(frozen=True)
class Hook:
    """A vLLM function that the plugin patches or calls.

    Attributes:
        module, name: its module, and its name there. ``name`` may contain one dot.
        signature: its parameters in order, without ``self``, separated by ``", "``.
        cuda: whether only CUDA engines call it. On a CPU, vLLM may define another function with this name, or may lack
            a dependency of the module.
    """

    module: str
    name: str
    signature: str
    cuda: bool = False

    def problem(self) -> str | None:
        """Return the difference between vLLM's function and this description, or None if they match."""
        try:
            target: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            return f"{self.module}.{self.name} does not exist ({error})"
        found = tuple(name for name in inspect.signature(target).parameters if name != "self")
        expected = tuple(self.signature.split(", ")) if self.signature else ()
        if found != expected:
            return f"{self.module}.{self.name} takes {found}, expected {expected}"
        return None


def wrap_once(
    owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], mark: str = "_nwor_wrapped"
) -> None:
    """Patch a vLLM function, unless it is missing or has this patch already.

    Args:
        owner: the module or class of the function, or None if this vLLM does not have the class.
        name: name of the function.
        wrapper: takes the original function and returns its replacement.
        mark: attribute that marks a patched function. Independent patches of one function need different marks,
            because a replacement inherits the marks of the original.
    """
    original = getattr(owner, name, None) if owner is not None else None
    if original is None or getattr(original, mark, False):
        return
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, mark, True)
    setattr(owner, name, wrapped)


# ---------------------------------------------------------------- refusals


@dataclass(frozen=True)
class Refusal:
    """A configuration that is refused at start-up.

    Attributes:
        feature: the configuration, as docs/vllm.md names it.
        transaction, draft_graphs, one_state: the reason that this feature refuses it. Empty: the feature allows it.
        found: tells whether a vLLM configuration has it. None: it is only visible later, in layers, groups or device.
        message: format string of the error message. Empty: the message is ``feature`` and the reason.
        modes: the modes in which the transaction refuses it.
        engines: the engines that can have it. Empty: all.
    """

    feature: str
    transaction: str = ""
    draft_graphs: str = ""
    found: Callable[[Any], bool] | None = None
    message: str = ""
    modes: tuple[str, ...] = MODES
    engines: str = ""
    one_state: str = ""

    def why(self, use: str) -> str:
        """Return the reason that a feature refuses it, or an empty string."""
        return {TRANSACTION: self.transaction, DRAFT_GRAPHS: self.draft_graphs, ONE_STATE: self.one_state}[use]

    def reasons(self) -> str:
        """Return all reasons in one line, with the modes and engines that each applies to."""
        modes = ", ".join(filter(None, [*self.modes, self.engines]))
        by_use = {modes: self.transaction, DRAFT_GRAPHS: self.draft_graphs, ONE_STATE: self.one_state}
        return "; ".join(f"{use}: {why}" for use, why in by_use.items() if why)

    def because(self, **values: Any) -> Unsupported:
        """Return the exception, with these values filled in to the message."""
        return Unsupported(self.message.format(**values))


def _has(*paths: str, above: int = 0) -> Callable[[Any], bool]:
    """Return a test of a configuration: is one of these paths a number above ``above``, or another value than None?"""

    def holds(thing: Any, path: str) -> bool:
        for name in path.split("."):
            thing = getattr(thing, name, None)
        return thing > above if isinstance(thing, int | float) else thing is not None

    return lambda config: any(holds(config, path) for path in paths)


def _has_other_gate(config: Any) -> bool:
    """Return whether a KDA layer has Kimi K3's gate."""
    kda = getattr(config.model_config.hf_text_config, "linear_attn_config", None) or {}
    return bool(kda.get("use_full_rank_gate"))


_NOT_TRIED = "it has not been tried"
_PIPELINE = "pipeline parallelism"
_CUDA = "CUDA"
_PARALLEL = "parallel_config."
_in_stages = _has(_PARALLEL + "pipeline_parallel_size", above=1)

# fmt: off
DEVICE = Refusal(
    "a device other than cpu and cuda; for draft graphs and one state, than cuda",
    "only cpu and cuda are supported", "CUDA graphs need CUDA", message="device {device}: {why}",
    one_state="it uses vLLM's CUDA kernels")
METHOD = Refusal(
    "speculation with another method than " + ", ".join(f"{', '.join(names)} ({runner})" for runner, names in
    DRAFT_METHODS.items()),
    draft_graphs="the method has its own graphs, or needs none",
    message="speculation by {method}: draft graphs in model runner {runner} are for method {methods}")
UNNAMED_LAYERS = Refusal(
    "a drafter with layers that it does not name", "they cannot be told from layers of the target model",
    message="speculation by {method}: layers {layers} have a KV cache, are in no module of the target's model, and "
    "{drafter} does not name them as its own")
TAKEN_LAYERS = Refusal(
    "a drafter that names layers of the target's model as its own", "their rows would be left out of the transaction",
    message="speculation by {method}: {drafter} names layers {layers} as its own, which are in the target's model")
OTHER_GROUP = Refusal(
    "a draft model whose layers are not in the first of several KV-cache groups",
    "vLLM makes them write to the slots of the first group, where they overwrite rows of the target model",
    message="speculation by {method}: layers {layers} are in KV-cache group {group}, and this runner has them write at "
    "the slots of group 0, where they overwrite rows of the target model", engines="runner V1 and the CPU engine")
HYBRID_PIPELINE = Refusal(
    f"{_PIPELINE} with a hybrid model", _NOT_TRIED, message=f"{_PIPELINE} with a hybrid model: {_NOT_TRIED}",
    engines="runner V2")
NEW_TOKENS = Refusal(
    "a model that does not sample exactly one new token per request and step (diffusion)",
    "its draft tokens do not follow one sampled token at the end of a request",
    message="the model samples {count} new tokens for each request and step: draft tokens can be identified only if it "
    "samples one", engines="runner V2")
FUSED_WRITER = Refusal(
    f"the compiler pass `{FUSED_MLA_WRITER}` with MLA layers",
    "its kernel bypasses the layer's cache writer; the message says how to switch the pass off",
    message="compilation pass {name} bypasses the layer's cache writer; switch it off with "
    "-cc.pass_config.{name}=False", modes=("cow",), engines=_CUDA)
UNKNOWN_LAYER = Refusal(
    "layers or back ends not in `nwor_ops/vllm/layers/back_ends.py` (model-owned writers, turboquant, sparse MLA, ...)",
    "the cache layout of their writer is unknown",
    message="layer {layer}: its class {layer_class} with back end {impl} is not known")
UNRELIABLE_CACHE = Refusal(
    "a cache of `int4_per_token_head`",
    "vanilla vLLM 0.33.0 sometimes fails with it: two of three engines on the H200 ended in a device-side assertion",
    message="layer {layer}: vanilla vLLM sometimes fails with a cache of {kv_cache_dtype}", engines=_CUDA)
OTHER_SIZE = Refusal(
    "keys whose elements are larger than the cache's (`dtype` float32, `kv_cache_dtype` bfloat16)",
    "vLLM's writer does not convert them, and writes into other rows and past the end of the cache",
    message="keys of {source} in a cache of {cache}: vLLM's CPU writer does not convert them, and writes into other "
    "rows and past the end of the cache; set kv_cache_dtype to auto", engines="the CPU engine")
CACHE_SPEC = Refusal(
    "ring buffers, cross attention, other KV-cache specs (except recurrent states)",
    "they have no slot per token, or several tokens share a slot",
    message=f"KV-cache group {{group}} is a {{spec}}; supported are {', '.join(CACHE_SPECS)}, and recurrent states, "
    "which vLLM manages")
ALL_RECURRENT = Refusal(
    "a model whose KV-cache groups are all recurrent (Mamba without attention)",
    "the transaction has no KV cache to protect", message="no layer of the target model writes its own KV cache")
SMALL_CACHE = Refusal(
    "a cache too small for the shadow pages and one request of max_model_len tokens", "the message gives the numbers",
    message="mode stage withholds {withheld} blocks ({groups} groups, {requests} requests of up to {drafts} drafts in "
    "blocks of {block_size}) of the {num_blocks} that the cache has; of the {left} left a request of {max_model_len} "
    "tokens needs {needed}: give the cache more memory, or lower max_num_seqs or max_model_len", modes=("stage",))
SCHEDULER = Refusal(
    "a scheduler that is not vLLM's", "it could give the shadow pages to requests",
    message="scheduler {name}: mode stage withholds blocks from vLLM's scheduler only", modes=("stage",))
SPLIT_BLOCKS = Refusal(
    "a back end whose pages are smaller than vLLM's blocks", "entries of the block table would not be pages",
    message="layer {layer}: its back end splits blocks of {block} tokens into pages of {page}; mode stage needs whole "
    "blocks: set --block-size {page}, or another back end if vLLM chooses the size (a hybrid model)",
    modes=("stage",), engines=_CUDA)
COPIED_TABLE = Refusal(
    "a drafter that attends with the target's metadata (as EAGLE and MTP do), if a layer of the target or the drafter "
    "has another back end than FLASH_ATTN, TRITON_ATTN, FLASH_ATTN_MLA and TRITON_MLA",
    "their metadata holds a copy of the block table, or was not reviewed",
    message="speculation by {method} with back end {impl} (layer {layer}): the drafter attends with metadata that was "
    "made for the target's step, which mode stage had redirected, and this back end's metadata may not hold the "
    "runner's own block table", modes=("stage",), engines="runner V2")
DRAFTER = Refusal(
    "a drafter that is not vLLM's class for draft models or EAGLE (such as Gemma4's, Step3p5's), parallel drafting, "
    "M-RoPE, index sharing between the steps of MTP, `enforce_eager` of the drafter",
    draft_graphs="its passes differ", message="draft graphs in model runner V1: {what}", engines="runner V1")
NOT_ONE_STATE = Refusal(
    "recurrent layers other than vLLM's Gated DeltaNet for Qwen and OLMo hybrid, and KDA for Kimi Linear, "
    "GLM-5.3-Flash and Bailing V3 (for example Mamba, other short convolutions)",
    one_state="they use other kernels",
    message="one state per request is for models whose recurrent layers are all vLLM's Gated DeltaNet for Qwen or "
    "OLMo hybrid, or KDA for Kimi Linear, GLM-5.3-Flash or Bailing V3, not for layers {layers}")
TAKEN_CLASS = Refusal(
    "another plugin's class in place of vLLM's Gated DeltaNet for Qwen or OLMo hybrid, or KDA for Kimi Linear, "
    "GLM-5.3-Flash or Bailing V3",
    one_state="vLLM's registry holds one class per layer",
    message="one state per request: {registered} is registered in place of {layer}")
STATE = Refusal(
    f"recurrent states with other head widths than {', '.join(map(str, KEY_WIDTHS))} (keys) and "
    f"{', '.join(map(str, VALUE_WIDTHS))} (values), float16 states, windows of more than 32 tokens, float32 keys",
    one_state="the kernel does not support them",
    message="one state per request: {what}")
GRAPH_MODE = Refusal(
    "decode batches of the target that do not run from FULL graphs (`enforce_eager`, PIECEWISE)",
    draft_graphs="the drafter runs graphs only if the target does",
    message="cudagraph_mode {mode}: draft graphs follow the target, whose decode batches must run from FULL graphs (no "
    "enforce_eager; cudagraph_mode FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE)")
CAPTURE_SIZES = Refusal(
    "no capture size that is large enough for a decode batch",
    draft_graphs="the drafter runs graphs only if the target does",
    message="cudagraph_capture_sizes {sizes}: none holds a batch of {tokens} tokens per request")

CONNECTOR = Refusal(
    "KV connectors that the table of connectors refuses, or does not list",
    "the table gives the reason; a custom connector must declare when it reads the cache",
    message="KV connector {name}: {why}")
UNORDERED = Refusal(
    "NIXL and MooncakeConnector with async scheduling",
    "they read a request's partial tail after it ends; by then the next step may have written drafts there",
    message="KV connector {name} with async scheduling: it reads a request's partial tail after it ends; by then the "
    "next step may have written drafts there; use mode stage or --no-async-scheduling", modes=("cow",))
PARTIAL_TAILS = Refusal(
    "OffloadingConnector and MooncakeStoreConnector with a hybrid model",
    "they store the partial last block of a prompt, and read it while the next step may write drafts there",
    message="KV connector {name} with a hybrid model: it stores the partial last block of a prompt, and reads it while "
    "the next step may write drafts there; use mode stage", modes=("cow",))
STATE_CONNECTOR = Refusal(
    "KV connectors, and settings of connectors, that the table of connectors refuses for one recurrent state",
    one_state="they would read a state whose last window is pending, or are untested: the table gives the reason",
    message="one state per request with KV connector {name}: {why}")
EXPORTED_TABLE = Refusal(
    "a KV connector that exports in attention, with a back end whose metadata has a copy of the block table",
    "it exports by that copy, which names shadow pages",
    message="KV connector {name} exports layer {layer} in attention, with back end {impl}: its metadata has a copy of "
    "the block table, which names shadow pages in mode stage", modes=("stage",))

REFUSALS = (
    DEVICE, METHOD, UNNAMED_LAYERS, TAKEN_LAYERS, OTHER_GROUP, NEW_TOKENS, CONNECTOR, UNORDERED, PARTIAL_TAILS,
    EXPORTED_TABLE, STATE_CONNECTOR,
    Refusal("KV connectors", "", "a connector moves a layer's keys in Python, which graphs do not run",
            _has("kv_transfer_config")),
    Refusal(f"{_PIPELINE} in model runner V1 and the CPU engine",
            "the other pipeline ranks do not learn which drafts of a request were rejected, so they cannot undo them",
            found=lambda config: _in_stages(config) and not getattr(config, "use_v2_model_runner", False)),
    Refusal(_PIPELINE, "a rank before the last learns only in a later step which drafts were accepted, and a shadow "
            "page serves one step", _NOT_TRIED, _in_stages, one_state=_NOT_TRIED,
            modes=("stage",)),
    Refusal(f"{_PIPELINE} with KV connectors",
            "on ranks before the last, connectors read a step's last blocks before its drafts are accepted or rejected",
            found=lambda config: _in_stages(config) and _has("kv_transfer_config")(config)),
    Refusal(f"{_PIPELINE} without async scheduling",
            "with drafts, vanilla vLLM 0.33 stops with an assertion: a request has fewer tokens than logits",
            found=lambda config: _in_stages(config) and not _has("scheduler_config.async_scheduling")(config)),
    HYBRID_PIPELINE,
    Refusal("prefill context parallelism", "its slot mappings are computed inside the forward",
            "its batches are split on the host", _has(_PARALLEL + "prefill_context_parallel_size", above=1),
            one_state=_NOT_TRIED),
    Refusal("decode context parallelism",
            "with drafts, vanilla vLLM 0.33 generates wrong tokens (FLASH_ATTN, FLASH_ATTN_MLA), so there is no "
            "reference to compare with", "attention metadata is planned on the host",
            _has(_PARALLEL + "decode_context_parallel_size", above=1), one_state=_NOT_TRIED),
    # With a dense target, each rank is a separate engine of data-parallel size 1.
    Refusal("data parallelism of a model with experts", _NOT_TRIED, "in vanilla vLLM 0.33 the drafter of runner V2 "
            "stops with an assertion, because its forward gets the target's token counts of all ranks; in V1 all ranks "
            "agree on the size of each draft pass on the host",
            _has(_PARALLEL + "data_parallel_size", above=1), one_state=_NOT_TRIED),
    Refusal("dual batch overlap", "vLLM's runner V2 does not support it with speculation; in V1, which needs data "
            "parallelism of experts with DeepEP or NIXL for it, it has not been tried", _NOT_TRIED,
            _has(_PARALLEL + "use_ubatching"), one_state=_NOT_TRIED),
    Refusal("adaptive verification", "", "the number of drafts per request is known only on the device",
            _has("speculative_config.enable_adaptive_verification")),
    Refusal("model runner V1", "", "", lambda config: not config.use_v2_model_runner,
            one_state="it builds batches and copies states between blocks in another way"),
    Refusal(f"other models than {', '.join(ONE_STATE_MODELS)}", "", "",
            lambda config: config.model_config.architecture not in ONE_STATE_MODELS,
            one_state="they have not been tried, or their recurrent layers use other kernels"),
    Refusal("Kimi Linear with Kimi K3's gate (`use_full_rank_gate`)", "", "", _has_other_gate,
            one_state="vLLM then creates Kimi K3's layer, which is another class"),
    Refusal("`--use-replayssm`", "", "", _has("cache_config.use_replayssm"),
            one_state="vLLM then keeps one state per request itself"),
    # Without a draft model, `draft_model_config` is the target's configuration.
    Refusal("a draft model with recurrent layers", "", "",
            lambda config: config.speculative_config.method == "draft_model"
            and config.speculative_config.draft_model_config.is_hybrid, one_state=_NOT_TRIED),
    Refusal("HiSparse", "it writes to its own slots", found=_has("attention_config.hisparse_config"), engines=_CUDA),
    FUSED_WRITER, UNKNOWN_LAYER, UNRELIABLE_CACHE, OTHER_SIZE, CACHE_SPEC, ALL_RECURRENT, SMALL_CACHE, SCHEDULER,
    SPLIT_BLOCKS, COPIED_TABLE, DRAFTER, GRAPH_MODE, CAPTURE_SIZES, NOT_ONE_STATE, TAKEN_CLASS, STATE,
    Refusal(f"attention of the drafter other than {', '.join(DRAFT_BACK_ENDS)}; layers neither full nor sliding-window",
            draft_graphs="TRITON_MLA, FlashMLA and CUTLASS MLA treat the first pass as a prompt, whose context vLLM "
            "0.33 bounds on the host; FLASH_ATTN_MLA, with a graph per step, stopped with an illegal memory access; "
            "FlashInfer plans on the host and has not been tried with a graph per step; other back ends were not "
            "reviewed"),
    Refusal("expert load balancing", "", _NOT_TRIED, _has(_PARALLEL + "enable_eplb")),
    # As in vLLM's drafter, a draft model gets token ids, including image placeholders, and one position per token.
    Refusal("a multimodal model", "", "no engine with images has been run; a draft model with three-dimensional "
            "positions (M-RoPE) would get one-dimensional ones",
            _has("model_config.is_multimodal_model", "speculative_config.draft_model_config.is_multimodal_model")),
    Refusal("an encoder-decoder model", "", _NOT_TRIED, _has("model_config.is_encoder_decoder")),
    # A separate draft model is allowed: vLLM creates the layers of adapters only in the target.
    Refusal("LoRA with a drafter that is not a separate model", "", "it may share the target's embedding, whose "
            "adapters are looked up on the host", lambda config: _has("lora_config")(config)
            and config.speculative_config.method != "draft_model"),
    Refusal("watermarking", "", "it needs contexts that are prepared on the host", _has("watermark_config")),
    Refusal("weight offloading", "", _NOT_TRIED,
            _has("offload_config.uva.cpu_offload_gb", "offload_config.prefetch.offload_group_size")),
)
# fmt: on


# ---------------------------------------------------------------- methods of drafting


@dataclass(frozen=True)
class Method:
    """A drafting method in vLLM, and the tests that run the transaction with it. No method is refused by its name.

    Attributes:
        name: vLLM's name of the method.
        v2, v1: cases of tests/support/gpu_cases.py that ran, by CUDA runner.
        cpu: tests in tests/vllm.
        versions: vLLM versions that have the method.
        notes: remarks for the table in docs/vllm.md, by column (``v2``, ``v1``, ``cpu``).
    """

    name: str
    v2: tuple[str, ...] = ()
    v1: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    versions: tuple[str, ...] = SUPPORTED_VERSIONS[TRANSACTION]
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_shown(self) -> bool:
        return bool(self.v2 or self.v1 or self.cpu)


_V1_ONLY = {"v2": "vLLM has it only in V1"}
_V2_ONLY = dict.fromkeys(("v1", "cpu"), "vLLM has it only in V2")
_COW = {"v1": "in mode `cow`"}
# Each test compares the output with vanilla vLLM and audits every step, in both modes unless noted. vLLM also has a
# name for the MTP layers of each of 27 models, and treats all of them as `mtp`.
# fmt: off
METHODS = (
    Method("ngram", v2=("v2-flash-ngram-full_and_piecewise",), v1=("v1-flash-ngram-full_and_piecewise",),
           cpu=("test_36_prompts",)),
    Method("ngram_gpu", v2=("method-v2-ngram_gpu",), v1=("method-v1-ngram_gpu",),
           notes=_COW | {"cpu": "vLLM has it only on CUDA"}),
    Method("suffix", v1=("method-v1-suffix",), notes=_V1_ONLY | {
           "cpu": "passed by hand: `test_suffix` needs `arctic-inference`, which CI does not have"}),
    Method("custom_class", cpu=("test_custom_class",), notes=_V1_ONLY),
    Method("draft_model", v2=("v2-flash-draft_model",), v1=("v1-flash-draft_model",),
           cpu=("test_draft_model_layers_are_left_alone",)),
    Method("eagle", v2=("v2-flash-eagle",), v1=("v1-flash-eagle",), cpu=("test_eagle",)),
    Method("eagle3", v2=("method-v2-eagle3",), v1=("method-v1-eagle3",), cpu=("test_eagle3",)),
    Method("mtp", v2=("method-v2-mla-mtp", "method-v2-gdn-mtp"), v1=("method-v1-mla-mtp", "method-v1-gdn-mtp"),
           cpu=("test_mtp",), notes=_COW | {"cpu": "MiMo"}),
    Method("dflash", v2=("method-v2-dflash-synthetic",), v1=("method-v1-dflash-synthetic",), notes=_COW),
    Method("dspark", v2=("method-v2-dspark",), notes=_V2_ONLY),
    Method("extract_hidden_states", cpu=("test_extract_hidden_states",),
           notes={"cpu": "without its connector, which is refused"}),
    Method("medusa", cpu=("test_medusa",), versions=("0.32",), notes=_V1_ONLY),
)
# fmt: on


# ---------------------------------------------------------------- engines with several GPUs


@dataclass(frozen=True)
class ParallelMode:
    """A parallel mode of vLLM, and the tests that run the transaction with it. ``REFUSALS`` has the refused ones.

    Attributes:
        name: its name in docs/vllm.md.
        modes: supported modes of the transaction.
        v2, v1: cases of tests/gpu/vllm/test_parallel.py, by runner. Names that end in ``-stage`` run in mode stage.
            benchmarks/results holds the outcome of each.
        cpu: tests in tests/vllm.
        notes: remarks for the table in docs/vllm.md, by column (``v2``, ``v1``, ``cpu``).
    """

    name: str
    modes: tuple[str, ...] = MODES
    v2: tuple[str, ...] = ()
    v1: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)


def _both(*names: str) -> tuple[str, ...]:
    return tuple(name for case in names for name in (case, f"{case}-stage"))


# fmt: off
PARALLEL_MODES = (
    ParallelMode("tensor parallelism", v2=_both("tp2-ngram-v2", "tp2-eagle-v2", "tp4-eagle-v2"),
                 v1=_both("tp2-ngram-v1", "tp2-eagle-v1")),
    ParallelMode("data parallelism, dense", v2=_both("dp2-dense-v2", "dp4-dense-v2"), v1=_both("dp2-dense-v1")),
    ParallelMode("tensor x data", v2=_both("tp2-dp2-dense-v2")),
    ParallelMode(_PIPELINE, ("cow",), v2=("pp2-ngram-v2", "pp2-eagle-v2", "pp2-eager-v2", "pp2-abort-v2",
                 "pp2-preemption-v2", "tp2-pp2-eagle-v2"),
                 cpu=("test_a_stage_leaves_accepted_rows_alone",),
                 notes={"v1": "refused", "cpu": "without an engine, because it would be refused"}),
    ParallelMode("several nodes, by vLLM's multiprocess launcher",
                 v2=(*_both("nodes2-tp2-v2"), "nodes2-pp2-v2"), notes={"v1": "not tried", "cpu": "not tried"}),
    ParallelMode("Ray", cpu=("test_serve_counts_what_the_workers_of_ray_count",),
                 notes={"v2": "not tried", "v1": "not tried", "cpu": "tensor parallel 2, workers on another node"}),
)
# fmt: on


# ---------------------------------------------------------------- checks: each raises Unsupported


def version_problem(use: str = TRANSACTION) -> str | None:
    """Return why the installed vLLM does not support a feature, or None if it does."""
    import vllm

    found, supported = re.match(r"\d+\.\d+", vllm.__version__), SUPPORTED_VERSIONS[use]
    if found is not None and found[0] in supported:
        return None
    purpose, are = ("", "are") if use == TRANSACTION else (f" for {use}", "is")
    return f"vLLM {vllm.__version__} is not supported{purpose}; supported {are} {', '.join(supported)}"


def check_vllm(hooks: Iterable[Hook], use: str = TRANSACTION) -> None:
    """Check the version of vLLM, and that each hook exists with the expected parameters."""
    problems = [version_problem(use), *(hook.problem() for hook in hooks)]
    if any(problems):
        raise Unsupported("; ".join(problem for problem in problems if problem))


def check_engine(vllm_config: Any, device_type: str, use: str = TRANSACTION, mode: str = "") -> None:
    """Check the configuration of an engine. Later checks look at its layers and KV-cache groups.

    Args:
        vllm_config, device_type: vLLM's configuration of the engine, and its device ("cpu", "cuda").
        use: the feature.
        mode: mode of the transaction. If it is empty, refusals for a single mode are skipped.
    """
    method, found = vllm_config.speculative_config.method, []
    if device_type not in DEVICES[use]:
        found.append(DEVICE.message.format(device=device_type, why=DEVICE.why(use)))
    if use == DRAFT_GRAPHS:
        runner = "V2" if vllm_config.use_v2_model_runner else "V1"
        if method not in DRAFT_METHODS[runner]:
            methods = ", ".join(DRAFT_METHODS[runner])
            found.append(METHOD.message.format(method=method, runner=runner, methods=methods))
    found += [
        f"{refusal.feature}: {refusal.why(use)}"
        for refusal in REFUSALS
        if refusal.found is not None
        and refusal.why(use)
        and (use != TRANSACTION or mode in refusal.modes or len(refusal.modes) > 1)
        and refusal.found(vllm_config)
    ]
    if found:
        raise Unsupported("; ".join(found))


def connectors_of(kv_transfer: Any) -> Iterator[tuple[str, Connector]]:
    """Yield the name and the description of each KV connector of an engine, including nested connectors.

    Args:
        kv_transfer: vLLM's ``KVTransferConfig``, or a dict with its settings, or None without a connector.
    """
    if kv_transfer is None:
        return
    if isinstance(kv_transfer, dict):
        from vllm.config import KVTransferConfig

        kv_transfer = KVTransferConfig(**kv_transfer)
    name = kv_transfer.kv_connector
    if name is None:
        return
    if kv_transfer.kv_connector_module_path or name not in CONNECTORS:
        yield name, _own_connector(kv_transfer)
        return
    if name == "OffloadingConnector" and kv_transfer.kv_connector_extra_config.get("spec_module_path"):
        yield name, Connector("", refused="a custom spec does not declare when it reads the cache")
        return
    connector = CONNECTORS[name]
    setting = _setting_without_one_state(name, kv_transfer.kv_connector_extra_config)
    yield name, replace(connector, one_state=setting) if setting and not connector.one_state else connector
    if name == "MultiConnector":
        for inner in kv_transfer.kv_connector_extra_config.get("connectors", ()):
            yield from connectors_of(inner)


def _setting_without_one_state(name: str, extra: Mapping[str, Any]) -> str:
    """Return why one recurrent state per request refuses these settings of a vLLM connector, or an empty string."""
    if name == "OffloadingConnector":
        if extra.get("sync_load_budget_bytes"):
            return (
                "with sync_load_budget_bytes vLLM copies a state to the request's next block before the load of that "
                "state: set it to 0"
            )
        for tier in extra.get("secondary_tiers") or ():
            if tier.get("type") not in NAMED_TIERS:
                return f"the keys of a tier of type {tier.get('type')} are the same for pages with and without a record"
    if name.startswith("Nixl") and extra.get("bidirectional_kv_xfer"):
        return (
            "with bidirectional_kv_xfer a decoder exports its last block, in which the accepted tokens of the last "
            "window are pending: set it to false"
        )
    return ""


def _own_connector(kv_transfer: Any) -> Connector:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    found = KVConnectorFactory.get_connector_class(kv_transfer)
    if getattr(found, IN_ORDER, False):
        unknown = (
            "it does not declare which states it reads; a class that reads only complete states sets "
            f"{COMPLETE_STATES} = True"
        )
        complete = getattr(found, COMPLETE_STATES, False)
        return Connector("in order, as the class declares", layer_wise=True, one_state="" if complete else unknown)
    return Connector(
        "",
        refused=f"it does not declare when it reads the cache; a class that reads in order sets {IN_ORDER} = True",
    )


def check_connectors(vllm_config: Any, mode: str) -> None:
    """Check that the KV connectors of an engine read no rejected rows in this mode."""
    for name, connector in connectors_of(vllm_config.kv_transfer_config):
        if connector.refused:
            raise CONNECTOR.because(name=name, why=connector.refused)
        if mode == "cow" and not connector.in_order and vllm_config.scheduler_config.async_scheduling:
            raise UNORDERED.because(name=name)


def check_state_connectors(vllm_config: Any) -> None:
    """Check that the KV connectors of an engine read only complete recurrent states."""
    for name, connector in connectors_of(getattr(vllm_config, "kv_transfer_config", None)):
        why = connector.refused or connector.one_state
        if why:
            raise STATE_CONNECTOR.because(name=name, why=why)


def check_transaction(vllm_config: Any, device_type: str, mode: str) -> None:
    """Check that an engine with this configuration, including its KV connectors, supports the transaction."""
    check_engine(vllm_config, device_type, mode=mode)
    check_connectors(vllm_config, mode)


def check_partial_tails(vllm_config: Any, kv_cache_config: Any, mode: str) -> None:
    """Check that no KV connector reads partial blocks of this cache while the next step may write drafts there."""
    if mode != "cow" or not any(is_recurrent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        return
    for name, connector in connectors_of(vllm_config.kv_transfer_config):
        if connector.partial_tails:
            raise PARTIAL_TAILS.because(name=name)


def check_library(device_type: str) -> None:
    """Check that the compiled library for a device is loaded."""
    problem = next(compiled.problem for compiled in library.loaded_libraries() if compiled.kind == device_type)
    if problem:
        raise Unsupported(problem)


def check_one_state(geometry: Any, state_dtype: Any) -> None:
    """Check that the kernel supports states of this shape and dtype.

    Args:
        geometry: a :class:`~nwor_ops.vllm.recurrent.records.RecordGeometry`.
        state_dtype: dtype of the states, as ``torch.dtype``.
    """
    for what, width, known in (
        ("keys", geometry.key_width, KEY_WIDTHS),
        ("values", geometry.value_width, VALUE_WIDTHS),
    ):
        if width not in known:
            raise STATE.because(what=f"heads of {what} are {width} wide, not one of {known}")
    if geometry.rows > 32:
        raise STATE.because(what=f"windows have {geometry.rows} tokens, more than 32")
    if str(state_dtype) not in ("torch.float32", "torch.bfloat16"):
        raise STATE.because(what=f"states are {state_dtype}: set mamba_ssm_cache_dtype to float32 or bfloat16")
    if str(geometry.key_dtype) not in ("torch.float16", "torch.bfloat16"):
        raise STATE.because(what=f"keys are {geometry.key_dtype}")


def check_registered(registered: type | None, layer: str, ours: str) -> None:
    """Check that no other plugin replaced a layer class.

    Args:
        registered: the class that vLLM's registry holds for the layer, or None.
        layer: name of the vLLM class.
        ours: module of our class.
    """
    if registered is not None and registered.__module__ != ours:
        raise TAKEN_CLASS.because(registered=f"{registered.__module__}.{registered.__qualname__}", layer=layer)


def check_passes(pass_config: Any) -> None:
    """Check that no compilation pass bypasses the cache writer of MLA layers."""
    if getattr(pass_config, FUSED_MLA_WRITER, False):
        raise FUSED_WRITER.because(name=FUSED_MLA_WRITER)


def is_recurrent(spec: Any) -> bool:
    """Return whether a KV-cache spec is for recurrent states.

    Mamba, Gated DeltaNet, short convolutions and linear attention have such states: a few per request, and every token
    overwrites them. The transaction ignores them; vLLM keeps one for each draft.
    """
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

    return all(isinstance(of_layer, MambaSpec) for of_layer in iter_layer_specs(spec))


def check_group_spec(group: str, spec: Any) -> None:
    """Check that a KV-cache group has one slot per token."""
    if type(spec).__name__ not in CACHE_SPECS:
        raise CACHE_SPEC.because(group=group, spec=type(spec).__name__)


def check_attention(attn_groups: Iterable[Iterable[Any]]) -> None:
    """Check that a graph can update the metadata of the drafter's attention groups."""
    problems = set()
    for group in (group for groups in attn_groups for group in groups):
        backend, spec = group.backend.get_name(), type(group.kv_cache_spec).__name__
        if backend not in DRAFT_BACK_ENDS:
            problems.add(f"attention back end {backend}: only {', '.join(DRAFT_BACK_ENDS)} are supported")
        elif spec not in DRAFT_CACHE_SPECS:
            problems.add(f"KV-cache spec {spec}: only {', '.join(DRAFT_CACHE_SPECS)} are supported")
        elif not group.supports_draft_decode_metadata_update:
            problems.add(f"attention back end {backend}: here it cannot update its metadata on the device")
    if problems:
        raise Unsupported("; ".join(sorted(problems)))


def check_graph_mode(cudagraph_mode: Any) -> None:
    """Check that the target's decode batches run as FULL graphs."""
    if cudagraph_mode.decode_mode().name != "FULL":
        raise GRAPH_MODE.because(mode=cudagraph_mode.name)
