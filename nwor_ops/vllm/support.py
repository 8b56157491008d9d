"""What this plugin was built against and what it refuses, and the checks that stop it before it touches anything else.

Every function that is wrapped is named with the parameters it must have (:class:`Hook`). A vLLM that differs is refused
with a sentence; nothing is guessed. The tables here are the only ones: the refusals at start-up, what ``nwor-ops
doctor`` prints and the tables of docs/vllm.md (``python tools/support_tables.py``) are made from them.
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

# What an engine may be asked for: the modes cow and stage, draft graphs, and one recurrent state per request.
TRANSACTION, DRAFT_GRAPHS, ONE_STATE = "transaction", "draft graphs", "one state"
SUPPORTED_VERSIONS = {TRANSACTION: ("0.32", "0.33"), DRAFT_GRAPHS: ("0.33",), ONE_STATE: ("0.33",)}
DEVICES = {TRANSACTION: ("cpu", "cuda"), DRAFT_GRAPHS: ("cuda",), ONE_STATE: ("cuda",)}
# Of a drafter with graphs, by model runner. (Of the transaction: runners/base.py for drafters, layers/back_ends.py for
# attention.)
DRAFT_METHODS = {"V2": ("draft_model",), "V1": ("draft_model", "eagle", "eagle3", "mtp")}
DRAFT_BACK_ENDS = ("FLASH_ATTN", "TRITON_ATTN")
DRAFT_CACHE_SPECS = ("FullAttentionSpec", "SlidingWindowSpec")
CACHE_SPECS = (*DRAFT_CACHE_SPECS, "MLAAttentionSpec")
# Whose recurrent layers may have one state per request: of each of them all are of one class of vLLM's.
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
KEY_WIDTHS, VALUE_WIDTHS = (64, 96, 128, 256), (64, 128, 192, 256)  # of a recurrent state's heads
# A pass of vLLM's compiler that replaces the writer of MLA layers by a kernel that also rotates the key. The passes for
# other layers exist for ROCm alone.
FUSED_MLA_WRITER = "fuse_rope_kvcache_cat_mla"


@dataclass(frozen=True)
class Connector:
    """How a KV connector reads the cache.

    Attributes:
        reads: when, and what.
        shown: the test that shows it, or what else does; empty: vLLM's source was read, it was not run.
        in_order: it reads on the main stream, or behind an event there, and of what a step computes only behind that
            step's forward. Else at any time after a request's end.
        layer_wise: it may export a layer from inside its attention op.
        partial_tails: of a hybrid model it also stores the partial last block of a prompt, in no order with the next
            step.
        loads_any_time: it may load rows while vLLM goes on with other requests. Taken for granted unless vLLM's source
            says otherwise, of connectors of one's own too: an audit takes rows that arrive unexpected for stray writes.
        refused: why, where it is.
        one_state: the reason that an engine with one recurrent state per request is refused with it; empty: it is
            supported. A supported connector exports complete states only. It reads them in a block with a cache key, or
            in the last block of a request that generates one token, after the forward of that step.
        one_state_cases: of tests/support/gpu_cases.py, which show it; empty: vLLM's source was read, it was not run.
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


_AT_THE_END = "after a request's end, by RDMA and in no stream's order: its blocks with the partial tail"
_NIXL = Connector(_AT_THE_END, in_order=False)
_NIXL_CASES = ("one-state-pd-nixl", "one-state-pd-nixl-align")
_NOT_HYBRID = "vLLM starts no hybrid model with it (it is not `SupportsHMA`)"
_LOADS = "`test_connectors.py`, `test_connectors_gpu.py`"


def _offloaded(name: str) -> tuple[str, ...]:
    return tuple(f"one-state-connector-{name}{more}" for more in ("", "-mtp", "-8"))


# By the name that vLLM's factory knows them under; all of 0.33's.
CONNECTORS = {
    "ExampleConnector": Connector(
        "in attention: whole blocks of prompts", _LOADS, layer_wise=True, loads_any_time=False,
        one_state=_NOT_HYBRID),
    "MultiConnector": Connector(
        "as its connectors do, which must all be supported", "`test_connectors.py`", loads_any_time=False),
    "OffloadingConnector": Connector(
        "in the next step, on a stream that waits for the main one: full chunks, of a hybrid model partial ones too",
        "`test_connectors_gpu.py`", partial_tails=True, one_state_cases=_offloaded("offloading")),
    "SimpleCPUOffloadConnector": Connector(
        "at `wait_for_save`, behind an event: full blocks, at a hybrid request's end a partial one", _LOADS,
        one_state_cases=(*_offloaded("simple-cpu"), "one-state-connector-default")),
    "LMCacheMPConnector": Connector(
        "at `wait_for_save`, behind an event: full chunks", "no test; by hand on a CPU, vLLM 0.32",
        one_state="vLLM takes the class of the `lmcache` package if it is installed, and that class has not been read"),
    "LMCacheConnectorV1": Connector(
        "at `wait_for_save`, or in attention: full chunks", layer_wise=True, loads_any_time=False,
        shown="`test_connectors_gpu.py`, tokens not compared", one_state=_NOT_HYBRID),
    "MooncakeStoreConnector": Connector(
        "at `wait_for_save`, behind an event: full blocks, of a hybrid model partial ones too", partial_tails=True),
    "HF3FSKVConnector": Connector("at `wait_for_save`: full blocks", one_state=_NOT_HYBRID),
    "NixlConnector": replace(_NIXL, one_state_cases=_NIXL_CASES),
    "NixlPullConnector": _NIXL,
    "NixlPushConnector": _NIXL,
    "MooncakeConnector": _NIXL,
    "HiSparseConnector": Connector("", refused="it writes to slots of its own"),
    "FlexKVConnectorV1": Connector("", refused="it reads from another process, when the scheduler says so; not tried"),
    "MoRIIOConnector": Connector("", refused="it writes to other engines from inside attention; not tried"),
    "DecodeBenchConnector": Connector("", refused="it makes rows up, for benchmarks; not tried"),
    "ExampleHiddenStatesConnector": Connector("", refused="what it exports are no keys and values; not tried"),
}  # fmt: skip
# A class of one's own says with this attribute, set to True, that it reads in order: on the current stream, or behind
# an event recorded there, in save_kv_layer (called behind the commit then), in wait_for_save or later; in start_load_kv
# no token that the step has computed; and a block that is not full on the current stream alone, as an event does not
# keep the next step from writing drafts there.
IN_ORDER = "reads_kv_cache_in_order"
# Set to True, this attribute says of a custom class that every recurrent state it reads is complete: it reads the state
# in a block with a cache key, in wait_for_save or later, or in the last block of a request that generates one token,
# after the forward of that step. In other blocks the accepted tokens of the last window may be pending.
COMPLETE_STATES = "reads_complete_states"
# The tiers of OffloadingConnector whose keys hold the name of the model, to which recurrent/stores.py adds the record's
# size.
NAMED_TIERS = ("fs", "obj", "p2p")


class Unsupported(Exception):
    """This engine cannot keep the promise; the message says what and why."""

    def stop_if(self, strict: bool, asked_for: str, without: str) -> None:
        """Raises RuntimeError with the reason, and the way out of it."""
        if strict:
            raise RuntimeError(
                f"nwor: {self} ({asked_for}; VLLM_NWOR_ON_UNSUPPORTED=vanilla or "
                f'{{"nwor": {{"on_unsupported": "vanilla"}}}} runs such an engine {without})'
            ) from self


@dataclass(frozen=True)
class Hook:
    """A function of vLLM's that the plugin wraps or calls.

    Attributes:
        module, name: where it is; ``name`` may have one dot.
        signature: its parameters, in order, without ``self``.
        cuda: whether only CUDA engines call it. On a CPU vLLM may have another function of this name, or may lack
            what its module imports.
    """

    module: str
    name: str
    signature: str
    cuda: bool = False

    def problem(self) -> str | None:
        """None, or what does not match."""
        try:
            target: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            return f"{self.module}.{self.name} is not there ({error})"
        found = tuple(name for name in inspect.signature(target).parameters if name != "self")
        expected = tuple(self.signature.split(", ")) if self.signature else ()
        if found != expected:
            return f"{self.module}.{self.name} takes {found}, expected {expected}"
        return None


def wrap_once(
    owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], mark: str = "_nwor_wrapped"
) -> None:
    """Replace a function of vLLM's, where there is one.

    Args:
        owner: a module or class, or None where there is no such class.
        name: the function.
        wrapper: from the function to what replaces it.
        mark: what has it is not wrapped again. Wrappers of one function that know nothing of each other have marks of
            their own; a wrapper inherits those of what it wraps.
    """
    original = getattr(owner, name, None) if owner is not None else None
    if original is None or getattr(original, mark, False):
        return
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, mark, True)
    setattr(owner, name, wrapped)


# ---------------------------------------------------------------- what is refused


@dataclass(frozen=True)
class Refusal:
    """What an engine may have with which it is refused.

    Attributes:
        feature: what it is.
        transaction, draft_graphs, one_state: why it is refused there; empty: it is not.
        found: whether a configuration of vLLM's has it. None: it shows later, in layers, groups or the device.
        message: what is said then, with the values to fill in. Else it is the feature and why.
        modes: the modes in which the transaction is refused.
        engines: those that can have it, if not all.
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
        return {TRANSACTION: self.transaction, DRAFT_GRAPHS: self.draft_graphs, ONE_STATE: self.one_state}[use]

    def reasons(self) -> str:
        """Why, for those who read of it before they meet it."""
        modes = ", ".join(filter(None, [*self.modes, self.engines]))
        by_use = {modes: self.transaction, DRAFT_GRAPHS: self.draft_graphs, ONE_STATE: self.one_state}
        return "; ".join(f"{use}: {why}" for use, why in by_use.items() if why)

    def because(self, **values: Any) -> Unsupported:
        return Unsupported(self.message.format(**values))


def _has(*paths: str, above: int = 0) -> Callable[[Any], bool]:
    """Whether a configuration holds, at one of these places, a number above that, or anything else that is there."""

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
    "only cpu and cuda are known", "CUDA graphs need CUDA", message="device {device}: {why}",
    one_state="vLLM's kernels beside it are those of CUDA")
METHOD = Refusal(
    "speculation by another method than " + ", ".join(f"{', '.join(names)} ({runner})" for runner, names in
    DRAFT_METHODS.items()),
    draft_graphs="it has graphs of its own, or needs none",
    message="speculation by {method}: draft graphs in model runner {runner} are for method {methods}")
UNNAMED_LAYERS = Refusal(
    "a drafter with layers that it does not name", "whose rows are the target's is not known",
    message="speculation by {method}: layers {layers} have a KV cache, are in no module of the target's model, and "
    "{drafter} does not name them as its own")
TAKEN_LAYERS = Refusal(
    "a drafter that names layers of the target's model as its own", "their rows would be left out of the transaction",
    message="speculation by {method}: {drafter} names layers {layers} as its own, which are in the target's model")
OTHER_GROUP = Refusal(
    "a draft model whose layers are not in the first of several KV-cache groups",
    "vLLM has them write at the slots of the first one, where they overwrite rows of the target's",
    message="speculation by {method}: layers {layers} are in KV-cache group {group}, and this runner has them write at "
    "the slots of group 0, over rows of the target's", engines="runner V1 and the CPU engine")
HYBRID_PIPELINE = Refusal(
    f"{_PIPELINE} with a hybrid model", _NOT_TRIED, message=f"{_PIPELINE} with a hybrid model: {_NOT_TRIED}",
    engines="runner V2")
NEW_TOKENS = Refusal(
    "a model that samples another number of new tokens in a step than one for each request (diffusion)",
    "its drafts are not the last tokens of a request behind one that was sampled",
    message="the model samples {count} new tokens for each request and step: which tokens are drafts is known where it "
    "samples one", engines="runner V2")
FUSED_WRITER = Refusal(
    f"the compiler pass `{FUSED_MLA_WRITER}` with MLA layers",
    "it writes the cache past the layer's writer; the message says how to switch it off",
    message="compilation pass {name} writes the cache past the layer's writer; switch it off with "
    "-cc.pass_config.{name}=False", modes=("cow",), engines=_CUDA)
UNKNOWN_LAYER = Refusal(
    "layers or back ends not in `nwor_ops/vllm/layers/back_ends.py` (model-owned writers, turboquant, sparse MLA, ...)",
    "where their writer puts a row is not known",
    message="layer {layer}: its class {layer_class} with back end {impl} is not known")
UNRELIABLE_CACHE = Refusal(
    "a cache of `int4_per_token_head`",
    "vLLM 0.33.0's own engines with it fail now and then: of three on the H200, two ended in a device-side assertion",
    message="layer {layer}: vLLM's own engines with a cache of {kv_cache_dtype} fail now and then", engines=_CUDA)
OTHER_SIZE = Refusal(
    "keys whose elements are larger than the cache's (`dtype` float32, `kv_cache_dtype` bfloat16)",
    "vLLM's writer writes them as they are, in others' places and past the end of the cache",
    message="keys of {source} in a cache of {cache}: vLLM's CPU writer writes them as they are, in others' places and "
    "past the end of the cache; set kv_cache_dtype to auto", engines="the CPU engine")
CACHE_SPEC = Refusal(
    "ring buffers, cross attention, other KV-cache specs (recurrent states aside)",
    "their states are not slots of tokens, or a slot serves several",
    message=f"KV-cache group {{group}} is a {{spec}}; supported are {', '.join(CACHE_SPECS)} and, left to vLLM, "
    "recurrent states")
ALL_RECURRENT = Refusal(
    "a model whose KV-cache groups are all recurrent (Mamba without attention)",
    "there is nothing for the transaction to keep", message="no layer of the target model writes a KV cache of its own")
SMALL_CACHE = Refusal(
    "a cache too small for the shadow pages and one request of the longest length", "the message has the numbers",
    message="mode stage withholds {withheld} blocks ({groups} groups, {requests} requests of up to {drafts} drafts in "
    "blocks of {block_size}) of the {num_blocks} that the cache has; of the {left} left a request of {max_model_len} "
    "tokens needs {needed}: give the cache more memory, or lower max_num_seqs or max_model_len", modes=("stage",))
SCHEDULER = Refusal(
    "a scheduler that is not vLLM's", "nothing would withhold the shadow pages from it",
    message="scheduler {name}: mode stage withholds blocks from vLLM's own alone", modes=("stage",))
SPLIT_BLOCKS = Refusal(
    "a back end whose pages are smaller than vLLM's blocks", "table entries would not be pages",
    message="layer {layer}: its back end splits blocks of {block} tokens into pages of {page}; mode stage needs whole "
    "ones: set --block-size {page}, or another back end where vLLM chooses the size (a hybrid model)",
    modes=("stage",), engines=_CUDA)
COPIED_TABLE = Refusal(
    "a drafter that attends with the target's metadata (as EAGLE and MTP do), where a layer of the target or of the "
    "drafter has another back end than FLASH_ATTN, TRITON_ATTN, FLASH_ATTN_MLA and TRITON_MLA",
    "their metadata holds a copy of the block table, or was not looked at",
    message="speculation by {method} with back end {impl} (layer {layer}): the drafter attends with metadata that was "
    "made for the target's step, which mode stage had redirected, and of this back end's it is not known that it holds "
    "the runner's own block table", modes=("stage",), engines="runner V2")
DRAFTER = Refusal(
    "a drafter of another class than vLLM's for draft models and EAGLE (Gemma4's, Step3p5's), parallel drafting, "
    "M-RoPE, index sharing between the steps of MTP, `enforce_eager` of the drafter",
    draft_graphs="its passes are others", message="draft graphs in model runner V1: {what}", engines="runner V1")
NOT_ONE_STATE = Refusal(
    "recurrent layers of another class than vLLM's Gated DeltaNet for Qwen and for OLMo hybrid, and KDA for Kimi "
    "Linear, GLM-5.3-Flash and Bailing V3 (Mamba, other short convolutions)",
    one_state="they have kernels of their own",
    message="one state per request is for models whose recurrent layers are all vLLM's Gated DeltaNet for Qwen or for "
    "OLMo hybrid, or KDA for Kimi Linear, GLM-5.3-Flash or Bailing V3, not for layers {layers}")
TAKEN_CLASS = Refusal(
    "another plugin's class in place of vLLM's Gated DeltaNet for Qwen or OLMo hybrid, or KDA for Kimi Linear, "
    "GLM-5.3-Flash or Bailing V3",
    one_state="there is room for one in vLLM's registry",
    message="one state per request: {registered} is registered in the place of {layer}")
STATE = Refusal(
    f"recurrent states of other heads than {', '.join(map(str, KEY_WIDTHS))} (keys) and "
    f"{', '.join(map(str, VALUE_WIDTHS))} (values) wide, of float16, windows of more than 32 tokens, keys of float32",
    one_state="the kernel has no such",
    message="one state per request: {what}")
GRAPH_MODE = Refusal(
    "decode batches of the target that do not run from FULL graphs (`enforce_eager`, PIECEWISE)",
    draft_graphs="the drafter follows the target",
    message="cudagraph_mode {mode}: draft graphs follow the target, whose decode batches must run from FULL graphs (no "
    "enforce_eager; cudagraph_mode FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE)")
CAPTURE_SIZES = Refusal(
    "no capture size that holds a decode batch", draft_graphs="the drafter follows the target",
    message="cudagraph_capture_sizes {sizes}: none holds a batch of {tokens} tokens per request")

CONNECTOR = Refusal(
    "KV connectors that the table of connectors refuses, or does not name",
    "the table says why; when one of your own reads the cache is known only if it says so",
    message="KV connector {name}: {why}")
UNORDERED = Refusal(
    "NIXL and MooncakeConnector with async scheduling",
    "they read a request's partial tail when its end is known, by when the next step may have written drafts there",
    message="KV connector {name} with async scheduling: it reads a request's partial tail when its end is known, by "
    "when the next step may have written drafts there; use mode stage or --no-async-scheduling", modes=("cow",))
PARTIAL_TAILS = Refusal(
    "OffloadingConnector and MooncakeStoreConnector with a hybrid model",
    "they store the partial last block of a prompt, and read it while the next step may write drafts there",
    message="KV connector {name} with a hybrid model: it stores the partial last block of a prompt, and reads it while "
    "the next step may write drafts there; use mode stage", modes=("cow",))
STATE_CONNECTOR = Refusal(
    "KV connectors, and settings of them, that the table of connectors refuses for one recurrent state",
    one_state="it would read a state whose last window is pending, or has not been read or tried: the table says why",
    message="one state per request with KV connector {name}: {why}")
EXPORTED_TABLE = Refusal(
    "a KV connector that exports in attention, with a back end whose metadata has a copy of the block table",
    "what it exports by is that copy, which names shadow pages",
    message="KV connector {name} exports layer {layer} in attention, with back end {impl}: its metadata has a copy of "
    "the block table, which names shadow pages in mode stage", modes=("stage",))

REFUSALS = (
    DEVICE, METHOD, UNNAMED_LAYERS, TAKEN_LAYERS, OTHER_GROUP, NEW_TOKENS, CONNECTOR, UNORDERED, PARTIAL_TAILS,
    EXPORTED_TABLE, STATE_CONNECTOR,
    Refusal("KV connectors", "", "a connector moves a layer's keys in Python, which graphs do not run",
            _has("kv_transfer_config")),
    Refusal(f"{_PIPELINE} in model runner V1 and the CPU engine",
            "its other stages are told of a request that goes on where it stands, and of one that ends nothing: what "
            "they have to undo they do not know",
            found=lambda config: _in_stages(config) and not getattr(config, "use_v2_model_runner", False)),
    Refusal(_PIPELINE, "a stage that is not the last learns steps later which drafts were accepted, and a shadow page "
            "is one step's", _NOT_TRIED, _in_stages, one_state=_NOT_TRIED,
            modes=("stage",)),
    Refusal(f"{_PIPELINE} with KV connectors",
            "on a stage that is not the last they read a step's last blocks before its drafts are judged",
            found=lambda config: _in_stages(config) and _has("kv_transfer_config")(config)),
    Refusal(f"{_PIPELINE} without async scheduling",
            "with drafts vLLM 0.33's own runner stops there with an assertion: a request has fewer tokens than logits",
            found=lambda config: _in_stages(config) and not _has("scheduler_config.async_scheduling")(config)),
    HYBRID_PIPELINE,
    Refusal("prefill context parallelism", "its slot mappings are made anew inside the forward",
            "its batches are cut up on the host", _has(_PARALLEL + "prefill_context_parallel_size", above=1),
            one_state=_NOT_TRIED),
    Refusal("decode context parallelism",
            "with drafts vLLM 0.33's own tokens are wrong there (FLASH_ATTN, FLASH_ATTN_MLA), so that there is nothing "
            "to compare with", "attention metadata is planned on the host there",
            _has(_PARALLEL + "decode_context_parallel_size", above=1), one_state=_NOT_TRIED),
    # Of a dense target each rank is an engine of its own, of size 1.
    Refusal("data parallelism of a model with experts", _NOT_TRIED, "vLLM 0.33's own drafter of runner V2 stops "
            "there with an assertion: the draft model's forward is given the target's token counts of all ranks; in V1 "
            "all ranks agree on the size of each of its passes, on the host",
            _has(_PARALLEL + "data_parallel_size", above=1), one_state=_NOT_TRIED),
    Refusal("dual batch overlap", "vLLM's runner V2 has none beside speculation; in V1, where it needs data "
            "parallelism of experts with DeepEP or NIXL, it has not been tried", _NOT_TRIED,
            _has(_PARALLEL + "use_ubatching"), one_state=_NOT_TRIED),
    Refusal("adaptive verification", "", "which request has how many drafts is known on the device alone",
            _has("speculative_config.enable_adaptive_verification")),
    Refusal("model runner V1", "", "", lambda config: not config.use_v2_model_runner,
            one_state="its batches are another's, and so are its states between blocks"),
    Refusal(f"other models than {', '.join(ONE_STATE_MODELS)}", "", "",
            lambda config: config.model_config.architecture not in ONE_STATE_MODELS,
            one_state="they have not been tried, or their recurrent layers have kernels of their own"),
    Refusal("Kimi Linear with Kimi K3's gate (`use_full_rank_gate`)", "", "", _has_other_gate,
            one_state="vLLM then makes Kimi K3's layer, which is another class"),
    Refusal("`--use-replayssm`", "", "", _has("cache_config.use_replayssm"),
            one_state="vLLM then counts on one state itself"),
    # Where there is none, vLLM has the target's configuration there.
    Refusal("a draft model with recurrent layers of its own", "", "",
            lambda config: config.speculative_config.method == "draft_model"
            and config.speculative_config.draft_model_config.is_hybrid, one_state=_NOT_TRIED),
    Refusal("HiSparse", "it writes to slots of its own", found=_has("attention_config.hisparse_config"), engines=_CUDA),
    FUSED_WRITER, UNKNOWN_LAYER, UNRELIABLE_CACHE, OTHER_SIZE, CACHE_SPEC, ALL_RECURRENT, SMALL_CACHE, SCHEDULER,
    SPLIT_BLOCKS, COPIED_TABLE, DRAFTER, GRAPH_MODE, CAPTURE_SIZES, NOT_ONE_STATE, TAKEN_CLASS, STATE,
    Refusal(f"attention of the drafter other than {', '.join(DRAFT_BACK_ENDS)}; layers neither full nor sliding-window",
            draft_graphs="TRITON_MLA, FlashMLA and CUTLASS MLA take the first pass for prompts, whose contexts vLLM "
            "0.33 has from bounds on the host; FLASH_ATTN_MLA, with a graph per step, stopped with an illegal memory "
            "access; FlashInfer plans on the host and has not been tried with a graph per step; others were not looked "
            "at"),
    Refusal("expert load balancing", "", _NOT_TRIED, _has(_PARALLEL + "enable_eplb")),
    # A draft model sees token ids and positions in a row, the placeholders of images among them, as in vLLM's drafter.
    Refusal("a multimodal model", "", "no engine with images has been run; a draft model with positions of three "
            "dimensions (M-RoPE) is given those of one",
            _has("model_config.is_multimodal_model", "speculative_config.draft_model_config.is_multimodal_model")),
    Refusal("an encoder-decoder model", "", _NOT_TRIED, _has("model_config.is_encoder_decoder")),
    # A draft model runs without: vLLM makes the adapters' layers in the target alone.
    Refusal("LoRA beside a drafter that follows the target", "", "it may share the target's embedding, whose adapters "
            "are looked up on the host", lambda config: _has("lora_config")(config)
            and config.speculative_config.method != "draft_model"),
    Refusal("watermarking", "", "it samples from contexts that are prepared on the host", _has("watermark_config")),
    Refusal("weight offloading", "", _NOT_TRIED,
            _has("offload_config.uva.cpu_offload_gb", "offload_config.prefetch.offload_group_size")),
)
# fmt: on


# ---------------------------------------------------------------- ways to draft


@dataclass(frozen=True)
class Method:
    """A way to draft that vLLM has, and what shows that its drafts are a transaction. None is refused by its name.

    Attributes:
        name: vLLM's.
        v2, v1: cases of tests/support/gpu_cases.py that ran, by CUDA runner.
        cpu: tests in tests/vllm.
        versions: of vLLM that have it.
        notes: what is to be said, by the same names.
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


_V1_ALONE = {"v2": "vLLM has it in V1 alone"}
_V2_ALONE = dict.fromkeys(("v1", "cpu"), "vLLM has it in V2 alone")
_COW = {"v1": "in mode `cow`"}
# Each test compares the output with vanilla's and audits every step, in both modes unless noted. (vLLM has a name for
# the MTP layers of each of 27 models, too, and takes all of them for `mtp`.)
# fmt: off
METHODS = (
    Method("ngram", v2=("v2-flash-ngram-full_and_piecewise",), v1=("v1-flash-ngram-full_and_piecewise",),
           cpu=("test_36_prompts",)),
    Method("ngram_gpu", v2=("method-v2-ngram_gpu",), v1=("method-v1-ngram_gpu",),
           notes=_COW | {"cpu": "vLLM has it on CUDA alone"}),
    Method("suffix", v1=("method-v1-suffix",), notes=_V1_ALONE | {
           "cpu": "passed by hand: `test_suffix` needs `arctic-inference`, which CI has not"}),
    Method("custom_class", cpu=("test_custom_class",), notes=_V1_ALONE),
    Method("draft_model", v2=("v2-flash-draft_model",), v1=("v1-flash-draft_model",),
           cpu=("test_draft_model_layers_are_left_alone",)),
    Method("eagle", v2=("v2-flash-eagle",), v1=("v1-flash-eagle",), cpu=("test_eagle",)),
    Method("eagle3", v2=("method-v2-eagle3",), v1=("method-v1-eagle3",), cpu=("test_eagle3",)),
    Method("mtp", v2=("method-v2-mla-mtp", "method-v2-gdn-mtp"), v1=("method-v1-mla-mtp", "method-v1-gdn-mtp"),
           cpu=("test_mtp",), notes=_COW | {"cpu": "MiMo"}),
    Method("dflash", v2=("method-v2-dflash-synthetic",), v1=("method-v1-dflash-synthetic",), notes=_COW),
    Method("dspark", v2=("method-v2-dspark",), notes=_V2_ALONE),
    Method("extract_hidden_states", cpu=("test_extract_hidden_states",),
           notes={"cpu": "without its connector, which is refused"}),
    Method("medusa", cpu=("test_medusa",), versions=("0.32",), notes=_V1_ALONE),
)
# fmt: on


# ---------------------------------------------------------------- engines of several GPUs


@dataclass(frozen=True)
class ParallelMode:
    """A way to spread an engine over GPUs, and what shows that each rank keeps its promise. What is refused says why in
    the table of refusals.

    Attributes:
        name: as in the documents.
        modes: of the transaction.
        v2, v1: cases of tests/gpu/vllm/test_parallel.py, by runner; ``-stage`` at the end says the mode. Which of them
            ran and passed is in benchmarks/results.
        cpu: tests in tests/vllm.
        notes: what is to be said, by the same names.
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
                 notes={"v1": "refused", "cpu": "without an engine, which is refused"}),
    ParallelMode("several nodes, by vLLM's multiprocess launcher",
                 v2=(*_both("nodes2-tp2-v2"), "nodes2-pp2-v2"), notes={"v1": "not tried", "cpu": "not tried"}),
    ParallelMode("Ray", cpu=("test_serve_counts_what_the_workers_of_ray_count",),
                 notes={"v2": "not tried", "v1": "not tried", "cpu": "tensor parallel 2, workers on another node"}),
)
# fmt: on


# ---------------------------------------------------------------- checks: each raises Unsupported


def version_problem(use: str = TRANSACTION) -> str | None:
    """None, or why this vLLM is not supported."""
    import vllm

    found, supported = re.match(r"\d+\.\d+", vllm.__version__), SUPPORTED_VERSIONS[use]
    if found is not None and found[0] in supported:
        return None
    purpose, are = ("", "are") if use == TRANSACTION else (f" for {use}", "is")
    return f"vLLM {vllm.__version__} is not supported{purpose}; supported {are} {', '.join(supported)}"


def check_vllm(hooks: Iterable[Hook], use: str = TRANSACTION) -> None:
    """Is this vLLM one that the hooks were written for?"""
    problems = [version_problem(use), *(hook.problem() for hook in hooks)]
    if any(problems):
        raise Unsupported("; ".join(problem for problem in problems if problem))


def check_engine(vllm_config: Any, device_type: str, use: str = TRANSACTION, mode: str = "") -> None:
    """Can the promise be kept in an engine of this configuration? Some of it shows in its layers alone.

    Args:
        vllm_config, device_type: the engine's.
        use: what it is asked for.
        mode: of the transaction; else what is refused in one of its modes is not.
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
    """Name of each KV connector of an engine, and how it reads; those inside others too.

    Args:
        kv_transfer: vLLM's ``KVTransferConfig``, or a dict of its settings; None: there is no connector.
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
        yield name, Connector("", refused="when a spec of one's own reads the cache is not known")
        return
    connector = CONNECTORS[name]
    setting = _setting_without_one_state(name, kv_transfer.kv_connector_extra_config)
    yield name, replace(connector, one_state=setting) if setting and not connector.one_state else connector
    if name == "MultiConnector":
        for inner in kv_transfer.kv_connector_extra_config.get("connectors", ()):
            yield from connectors_of(inner)


def _setting_without_one_state(name: str, extra: Mapping[str, Any]) -> str:
    """Why these settings of a connector of vLLM's are refused beside one recurrent state; empty: they are not."""
    if name == "OffloadingConnector":
        if extra.get("sync_load_budget_bytes"):
            return (
                "with sync_load_budget_bytes vLLM copies a state to the request's next block before the load of that "
                "state: set it to 0"
            )
        for tier in extra.get("secondary_tiers") or ():
            if tier.get("type") not in NAMED_TIERS:
                return f"the keys of a tier of type {tier.get('type')} do not tell pages with a record from others"
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
        unsaid = f"which states it reads is not known; a class that reads complete ones says {COMPLETE_STATES} = True"
        complete = getattr(found, COMPLETE_STATES, False)
        return Connector("in order, it says", layer_wise=True, one_state="" if complete else unsaid)
    return Connector(
        "", refused=f"when it reads the cache is not known; a class that reads in order says {IN_ORDER} = True"
    )


def check_connectors(vllm_config: Any, mode: str) -> None:
    """Is what the engine's KV connectors read of the cache what the mode promises?"""
    for name, connector in connectors_of(vllm_config.kv_transfer_config):
        if connector.refused:
            raise CONNECTOR.because(name=name, why=connector.refused)
        if mode == "cow" and not connector.in_order and vllm_config.scheduler_config.async_scheduling:
            raise UNORDERED.because(name=name)


def check_state_connectors(vllm_config: Any) -> None:
    """Is every recurrent state complete that the engine's KV connectors read?"""
    for name, connector in connectors_of(getattr(vllm_config, "kv_transfer_config", None)):
        why = connector.refused or connector.one_state
        if why:
            raise STATE_CONNECTOR.because(name=name, why=why)


def check_transaction(vllm_config: Any, device_type: str, mode: str) -> None:
    """Can the transaction keep its promise in an engine of this configuration, beside its KV connectors?"""
    check_engine(vllm_config, device_type, mode=mode)
    check_connectors(vllm_config, mode)


def check_partial_tails(vllm_config: Any, kv_cache_config: Any, mode: str) -> None:
    """Does a KV connector read blocks of this cache while the next step may write drafts there?"""
    if mode != "cow" or not any(is_recurrent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        return
    for name, connector in connectors_of(vllm_config.kv_transfer_config):
        if connector.partial_tails:
            raise PARTIAL_TAILS.because(name=name)


def check_library(device_type: str) -> None:
    """Have the ops kernels for a device?"""
    problem = next(compiled.problem for compiled in library.loaded_libraries() if compiled.kind == device_type)
    if problem:
        raise Unsupported(problem)


def check_one_state(geometry: Any, state_dtype: Any) -> None:
    """Is there a kernel for such states? Takes a :class:`~nwor_ops.vllm.recurrent.records.RecordGeometry`."""
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
    """Is the class that vLLM would make in the place of a layer's none, or ours (a module)?"""
    if registered is not None and registered.__module__ != ours:
        raise TAKEN_CLASS.because(registered=f"{registered.__module__}.{registered.__qualname__}", layer=layer)


def check_passes(pass_config: Any) -> None:
    """Does a compilation pass write MLA caches past the layer's writer?"""
    if getattr(pass_config, FUSED_MLA_WRITER, False):
        raise FUSED_WRITER.because(name=FUSED_MLA_WRITER)


def is_recurrent(spec: Any) -> bool:
    """Whether a KV-cache spec is of recurrent states (Mamba, Gated DeltaNet, short convolutions, linear attention): a
    few per request, which every token overwrites. They are left to vLLM, which keeps one for each draft."""
    from vllm.v1.kv_cache_interface import MambaSpec, iter_layer_specs

    return all(isinstance(of_layer, MambaSpec) for of_layer in iter_layer_specs(spec))


def check_group_spec(group: str, spec: Any) -> None:
    """Are the states of a KV-cache group slots of tokens?"""
    if type(spec).__name__ not in CACHE_SPECS:
        raise CACHE_SPEC.because(group=group, spec=type(spec).__name__)


def check_attention(attn_groups: Iterable[Iterable[Any]]) -> None:
    """Can a graph keep the metadata of the drafter's attention groups up to date?"""
    problems = set()
    for group in (group for groups in attn_groups for group in groups):
        backend, spec = group.backend.get_name(), type(group.kv_cache_spec).__name__
        if backend not in DRAFT_BACK_ENDS:
            problems.add(f"attention back end {backend}: only {', '.join(DRAFT_BACK_ENDS)} are known")
        elif spec not in DRAFT_CACHE_SPECS:
            problems.add(f"a cache of kind {spec}: only {', '.join(DRAFT_CACHE_SPECS)} are known")
        elif not group.supports_draft_decode_metadata_update:
            problems.add(f"attention back end {backend}: it cannot update its metadata on the device here")
    if problems:
        raise Unsupported("; ".join(sorted(problems)))


def check_graph_mode(cudagraph_mode: Any) -> None:
    """Do the target's decode batches run from FULL graphs?"""
    if cudagraph_mode.decode_mode().name != "FULL":
        raise GRAPH_MODE.because(mode=cudagraph_mode.name)
