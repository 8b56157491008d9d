"""List the configurations that each feature refuses at start-up, with the reasons.

Start-up, ``nwor-ops doctor`` and the table in docs/reference/support.md all read ``REFUSALS``. ``python
tools/support_tables.py`` writes the table. :func:`check_engine` applies the refusals that need only an engine's
configuration. Each other refusal is checked in the folder of its feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nwor_ops.transaction.manager import MODES
from nwor_ops.vllm.support.features import (
    CACHE_SPECS,
    DEVICES,
    DRAFT_BACK_ENDS,
    DRAFT_GRAPHS,
    DRAFT_METHODS,
    FUSED_MLA_WRITER,
    KEY_WIDTHS,
    TRANSACTION,
    VALUE_WIDTHS,
)

Check = Callable[[], object]  # a check of an engine's configuration, which raises Unsupported


class Unsupported(Exception):
    """The configuration of this engine is not supported. The message names it and gives the reason.

    Args:
        message: the reason.
        change: the argument of the engine that changes it. Empty: none does.

    Attributes:
        parts: each reason with its argument. There are several if several checks failed.
    """

    def __init__(self, message: str, change: str = "") -> None:
        super().__init__(message)
        self.parts: tuple[tuple[str, str], ...] = ((message, change),)

    @classmethod
    def join(cls, parts: Iterable[tuple[str, str]]) -> Unsupported:
        """Return one error with all these reasons."""
        parts = tuple(parts)
        error = cls("; ".join(why for why, _ in parts))
        error.parts = parts
        return error

    def refuse(self, feature: str, strict: bool, logger: Any, asked_for: str, without: str = "without it") -> None:
        """Raise RuntimeError with the reasons, the arguments that change them, and the setting that goes on without.

        If not ``strict``, log a warning. ``asked_for`` is the request ("mode cow was asked for"), and ``without`` says
        how the engine then runs.
        """
        if strict:
            reasons = "; ".join(f"{why} (change: {change})" if change else why for why, change in self.parts)
            raise RuntimeError(
                f"nwor: {reasons} ({asked_for}; VLLM_NWOR_ON_UNSUPPORTED=vanilla or "
                f'{{"nwor": {{"on_unsupported": "vanilla"}}}} runs such an engine {without})'
            ) from self
        logger.warning("nwor: %s: not active: %s", feature, self)


@dataclass(frozen=True)
class Refusal:
    """A configuration that is refused at start-up.

    Attributes:
        feature: the configuration, as docs/reference/support.md names it.
        transaction, draft_graphs, recurrent, draft_vocabulary: the reason that this feature refuses it. Empty: the
            feature allows it.
        found: tells whether a vLLM configuration has it. None: it is only visible later, in layers, groups or device.
        message: format string of the error message, with the reason as ``why``. Empty: ``feature`` and the reason.
        modes: the modes in which the transaction refuses it.
        engines: the engines that can have it. Empty: all.
        change: the argument of the engine that changes it. Empty: none does.
    """

    feature: str
    transaction: str = ""
    draft_graphs: str = ""
    found: Callable[[Any], bool] | None = None
    message: str = ""
    modes: tuple[str, ...] = MODES
    engines: str = ""
    recurrent: str = ""
    draft_vocabulary: str = ""
    change: str = ""

    def why(self, use: str) -> str:
        """Return the reason that a feature refuses it, or an empty string."""
        reason: str = getattr(self, use.replace(" ", "_"))
        return reason

    def because(self, **values: Any) -> Unsupported:
        """Return the exception, with these values filled in to the message."""
        reason = next(filter(None, map(self.why, DEVICES)))
        return Unsupported(self.message.format(**{"why": reason} | values), self.change)


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
_CUDA = "CUDA"
_PARALLEL = "parallel_config."

# fmt: off
DEVICE = Refusal(
    "a device other than cpu and cuda; for the other features, than cuda",
    "only cpu and cuda are supported", "CUDA graphs need CUDA", message="device {device}: {why}",
    recurrent="it uses vLLM's CUDA kernels", draft_vocabulary="only cuda is supported")
METHOD = Refusal(
    "speculation with another method than " + ", ".join(f"{', '.join(names)} ({runner})" for runner, names in
    DRAFT_METHODS.items()),
    draft_graphs="the method has its own graphs, or needs none",
    message="speculation by {method}: draft graphs in model runner {runner} are for method {methods}",
    change='"method" in --speculative-config')
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
    message="speculation by {method}: layers {layers} are in KV-cache group {group}: {why}",
    engines="runner V1 and the CPU engine")
NEW_TOKENS = Refusal(
    "a model that does not sample exactly one new token per request and step (diffusion)",
    "its draft tokens do not follow one sampled token at the end of a request",
    message="the model samples {count} new tokens for each request and step: {why}", engines="runner V2")
FUSED_WRITER = Refusal(
    f"the compiler pass `{FUSED_MLA_WRITER}` with MLA layers",
    "its kernel bypasses the layer's cache writer",
    message="compilation pass {name}: {why}", modes=("cow",), engines=_CUDA,
    change="-cc.pass_config.fuse_rope_kvcache_cat_mla=False")
UNKNOWN_LAYER = Refusal(
    "layers or back ends not in `layers/back_ends.py` (model-owned writers, turboquant, sparse MLA, ...)",
    "the cache layout of their writer is unknown",
    message="layer {layer}: its class {layer_class} with back end {impl} is not known",
    change="--attention-backend")
UNRELIABLE_CACHE = Refusal(
    "a cache of `int4_per_token_head`",
    "vanilla vLLM 0.33.0 sometimes fails with it: two of three engines on the H200 ended in a device-side assertion",
    message="layer {layer} with a cache of {kv_cache_dtype}: {why}", engines=_CUDA,
    change="--kv-cache-dtype")
OTHER_SIZE = Refusal(
    "keys whose elements are larger than the cache's (`dtype` float32, `kv_cache_dtype` bfloat16)",
    "vLLM's writer does not convert them, and writes into other rows and past the end of the cache",
    message="keys of {source} in a cache of {cache}: {why}", engines="the CPU engine",
    change="--kv-cache-dtype auto")
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
    "tokens needs {needed}: give the cache more memory, or lower max_num_seqs or max_model_len (more memory does not "
    "help with --max-model-len auto, which takes all of it: give a length)", modes=("stage",),
    change="--max-num-seqs, --max-model-len")
SCHEDULER = Refusal(
    "a scheduler that is not vLLM's", "it could give the shadow pages to requests",
    message="scheduler {name}: mode stage withholds blocks from vLLM's scheduler only", modes=("stage",),
    change="--scheduler-cls")
SPLIT_BLOCKS = Refusal(
    "a back end whose pages are smaller than vLLM's blocks", "entries of the block table would not be pages",
    message="layer {layer}: its back end splits blocks of {block} tokens into pages of {page}; mode stage needs whole "
    "blocks: set --block-size {page}, or another back end if vLLM chooses the size (a hybrid model)",
    modes=("stage",), engines=_CUDA,
    change="--block-size")
COPIED_TABLE = Refusal(
    "a drafter that attends with the target's metadata (as EAGLE and MTP do), if a layer of the target or the drafter "
    "has another back end than FLASH_ATTN, TRITON_ATTN, FLASH_ATTN_MLA and TRITON_MLA",
    "their metadata holds a copy of the block table, or was not reviewed",
    message="speculation by {method} with back end {impl} (layer {layer}): the drafter attends with metadata that was "
    "made for the target's step, which mode stage had redirected, and this back end's metadata may not hold the "
    "runner's own block table", modes=("stage",), engines="runner V2",
    change="--attention-backend, or VLLM_NWOR_MODE=cow")
DRAFTER = Refusal(
    "a drafter that is not vLLM's class for draft models or EAGLE (such as Gemma4's, Step3p5's), parallel drafting, "
    "M-RoPE, index sharing between the steps of MTP, `enforce_eager` of the drafter",
    draft_graphs="its passes differ", message="draft graphs in model runner V1: {what}", engines="runner V1",
    change="--speculative-config")
OTHER_MODEL = Refusal(
    "a model that is not listed above for one recurrent state",
    recurrent="it has not been tried, or its recurrent layers use other kernels",
    message="recurrent: model {architecture}: {why}; supported are {supported}")
DRAFT_METHOD = Refusal(
    "speculation with another method than MTP, EAGLE and draft models",
    draft_vocabulary="its drafts are not sampled by vLLM's `sample_draft`",
    message="speculation by {method}: a draft vocabulary is for MTP, EAGLE and draft models", engines="runner V2",
    change='"method" in --speculative-config')
HEAD = Refusal(
    "a drafter whose output head is quantized, has a bias or another dtype, or has not all of the target's tokens "
    "(EAGLE-3, DSpark, DFlash)",
    draft_vocabulary="its rows cannot be copied, or do not belong to the target's tokens",
    message="the drafter's logits cannot be computed from copied rows: {what}", engines="runner V2")
UNKNOWN_LAYERS = Refusal(
    "recurrent layers other than vLLM's Gated DeltaNet for Qwen and OLMo hybrid, and KDA for Kimi Linear, "
    "GLM-5.3-Flash and Bailing V3 (for example Mamba, other short convolutions)",
    recurrent="they use other kernels",
    message="recurrent: only for models whose recurrent layers are all vLLM's Gated DeltaNet for Qwen or "
    "OLMo hybrid, or KDA for Kimi Linear, GLM-5.3-Flash or Bailing V3, not for layers {layers}")
TAKEN_CLASS = Refusal(
    "another plugin's class in place of vLLM's Gated DeltaNet for Qwen or OLMo hybrid, or KDA for Kimi Linear, "
    "GLM-5.3-Flash or Bailing V3",
    recurrent="vLLM's registry holds one class per layer",
    message="recurrent: {registered} is registered in place of {layer}")
STATE = Refusal(
    f"recurrent states with other head widths than {', '.join(map(str, KEY_WIDTHS))} (keys) and "
    f"{', '.join(map(str, VALUE_WIDTHS))} (values), float16 states, windows of more than 32 tokens, float32 keys",
    recurrent="the kernel does not support them",
    message="recurrent: {what}",
    change='--mamba-ssm-cache-dtype, "num_speculative_tokens" in --speculative-config')
CHUNK_FORM = Refusal(
    "`VLLM_NWOR_RECURRENT=chunk` with a decay per channel (KDA), heads other than 128 wide, another `dtype` than "
    "bfloat16, windows of more than 8 tokens, blocks that are no multiple of 16",
    recurrent="the kernel of the chunk form does not support them",
    message="VLLM_NWOR_RECURRENT=chunk: {what}; VLLM_NWOR_RECURRENT=exact supports it",
    change="VLLM_NWOR_RECURRENT=exact")
GRAPH_MODE = Refusal(
    "decode batches of the target that do not run from FULL graphs (`enforce_eager`, PIECEWISE)",
    draft_graphs="the drafter runs graphs only if the target does",
    message="cudagraph_mode {mode}: draft graphs follow the target, whose decode batches must run from FULL graphs (no "
    "enforce_eager; cudagraph_mode FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE)",
    change="without --enforce-eager; --compilation-config")
CAPTURE_SIZES = Refusal(
    "no capture size that is large enough for a decode batch",
    draft_graphs="the drafter runs graphs only if the target does",
    message="cudagraph_capture_sizes {sizes}: none holds a batch of {tokens} tokens per request",
    change="--cudagraph-capture-sizes")

CONNECTOR = Refusal(
    "KV connectors that the table of connectors refuses, or does not list",
    "the table gives the reason; a custom connector must declare when it reads the cache",
    message="KV connector {name}: {why}",
    change="--kv-transfer-config")
UNORDERED = Refusal(
    "NIXL or MooncakeConnector with async scheduling",
    "it reads a request's partial tail after it ends; by then the next step may have written drafts there",
    message="KV connector {name} with async scheduling: {why}", modes=("cow",),
    change="--no-async-scheduling, or VLLM_NWOR_MODE=stage")
PARTIAL_TAILS = Refusal(
    "OffloadingConnector or MooncakeStoreConnector with a hybrid model",
    "it stores the partial last block of a prompt, and reads it while the next step may write drafts there",
    message="KV connector {name} with a hybrid model: {why}; use mode stage", modes=("cow",),
    change="VLLM_NWOR_MODE=stage, or --kv-transfer-config")
STATE_CONNECTOR = Refusal(
    "KV connectors, and settings of connectors, that the table of connectors refuses for one recurrent state",
    recurrent="they would read a state whose last window is pending, or are untested: the table gives the reason",
    message="recurrent with KV connector {name}: {why}",
    change="--kv-transfer-config")
EXPORTED_TABLE = Refusal(
    "a KV connector that exports in attention, with a back end whose metadata has a copy of the block table",
    "it exports in attention by a copy of the block table, which names shadow pages",
    message="KV connector {name}, layer {layer} with back end {impl}: {why}", modes=("stage",),
    change="--kv-transfer-config, or VLLM_NWOR_MODE=cow")

REFUSALS = (
    DEVICE, METHOD, UNNAMED_LAYERS, TAKEN_LAYERS, OTHER_GROUP, NEW_TOKENS, CONNECTOR, UNORDERED, PARTIAL_TAILS,
    EXPORTED_TABLE, STATE_CONNECTOR,
    Refusal("KV connectors", "", "a connector moves a layer's keys in Python, which graphs do not run",
            _has("kv_transfer_config"),
        change="without --kv-transfer-config"),
    Refusal("pipeline parallelism", "a rank before the last learns only in a later step which drafts were accepted",
            _NOT_TRIED, _has(_PARALLEL + "pipeline_parallel_size", above=1), recurrent=_NOT_TRIED,
            draft_vocabulary=_NOT_TRIED,
        change="--pipeline-parallel-size 1"),
    Refusal("prefill context parallelism", "its slot mappings are computed inside the forward",
            "its batches are split on the host", _has(_PARALLEL + "prefill_context_parallel_size", above=1),
            recurrent=_NOT_TRIED, draft_vocabulary="a rank sees a part of the step's tokens",
        change="--prefill-context-parallel-size 1"),
    Refusal("decode context parallelism",
            "with drafts, vanilla vLLM 0.33 generates wrong tokens (FLASH_ATTN, FLASH_ATTN_MLA), so there is no "
            "reference to compare with", "attention metadata is planned on the host",
            _has(_PARALLEL + "decode_context_parallel_size", above=1), recurrent=_NOT_TRIED,
        change="--decode-context-parallel-size 1"),
    # With a dense target, each rank is a separate engine of data-parallel size 1.
    Refusal("data parallelism of a model with experts", _NOT_TRIED, "in vanilla vLLM 0.33 the drafter of runner V2 "
            "stops with an assertion, because its forward gets the target's token counts of all ranks; in V1 all ranks "
            "agree on the size of each draft pass on the host",
            _has(_PARALLEL + "data_parallel_size", above=1), recurrent=_NOT_TRIED,
        change="--data-parallel-size 1"),
    Refusal("dual batch overlap", "vLLM's runner V2 does not support it with speculation; in V1, which needs data "
            "parallelism of experts with DeepEP or NIXL for it, it has not been tried", _NOT_TRIED,
            _has(_PARALLEL + "use_ubatching"), recurrent=_NOT_TRIED,
        change="without --enable-dbo"),
    Refusal("adaptive verification", "", "the number of drafts per request is known only on the device",
            _has("speculative_config.enable_adaptive_verification"),
        change='"enable_adaptive_verification": false in --speculative-config'),
    Refusal("model runner V1", "", "", lambda config: not config.use_v2_model_runner,
            recurrent="it builds batches and copies states between blocks in another way",
            draft_vocabulary="its drafters sample in other code",
        change="VLLM_USE_V2_MODEL_RUNNER=1"),
    OTHER_MODEL,
    Refusal("Kimi Linear with Kimi K3's gate (`use_full_rank_gate`)", "", "", _has_other_gate,
            recurrent="vLLM then creates Kimi K3's layer, which is another class"),
    Refusal("`--use-replayssm`", "", "", _has("cache_config.use_replayssm"),
            recurrent="vLLM then keeps one state per request itself",
        change="without --use-replayssm, or VLLM_NWOR_RECURRENT=0"),
    # Without a draft model, `draft_model_config` is the target's configuration.
    Refusal("a draft model with recurrent layers", "", "",
            lambda config: config.speculative_config is not None
            and config.speculative_config.method == "draft_model"
            and config.speculative_config.draft_model_config.is_hybrid, recurrent=_NOT_TRIED,
        change='"model" in --speculative-config'),
    Refusal("HiSparse", "it writes to its own slots", found=_has("attention_config.hisparse_config"), engines=_CUDA,
        change="--attention-config"),
    FUSED_WRITER, UNKNOWN_LAYER, UNRELIABLE_CACHE, OTHER_SIZE, CACHE_SPEC, ALL_RECURRENT, SMALL_CACHE, SCHEDULER,
    SPLIT_BLOCKS, COPIED_TABLE, DRAFTER, GRAPH_MODE, CAPTURE_SIZES, DRAFT_METHOD, HEAD, UNKNOWN_LAYERS, TAKEN_CLASS,
    STATE, CHUNK_FORM,
    Refusal(f"attention of the drafter other than {', '.join(DRAFT_BACK_ENDS)}; layers neither full nor sliding-window",
            draft_graphs="TRITON_MLA, FlashMLA and CUTLASS MLA treat the first pass as a prompt, whose context vLLM "
            "0.33 bounds on the host; FLASH_ATTN_MLA stopped with an illegal memory access; FlashInfer plans on the "
            "host; other back ends were not reviewed"),
    Refusal("expert load balancing", "", _NOT_TRIED, _has(_PARALLEL + "enable_eplb"),
        change="without --enable-eplb"),
    # As in vLLM's drafter, a draft model gets token ids, including image placeholders, and one position per token.
    Refusal("a multimodal model", "", "no engine with images has been run; a draft model with three-dimensional "
            "positions (M-RoPE) would get one-dimensional ones",
            _has("model_config.is_multimodal_model", "speculative_config.draft_model_config.is_multimodal_model")),
    Refusal("an encoder-decoder model", "", _NOT_TRIED, _has("model_config.is_encoder_decoder")),
    # A separate draft model is allowed: vLLM creates the layers of adapters only in the target.
    Refusal("LoRA with a drafter that is not a separate model", "", "it may share the target's embedding, whose "
            "adapters are looked up on the host", lambda config: _has("lora_config")(config)
            and config.speculative_config.method != "draft_model",
        change="without --enable-lora"),
    Refusal("watermarking", "", "it needs contexts that are prepared on the host", _has("watermark_config"),
        change="without --watermark-config"),
    Refusal("weight offloading", "", _NOT_TRIED,
            _has("offload_config.uva.cpu_offload_gb", "offload_config.prefetch.offload_group_size"),
            draft_vocabulary="the rows of an output head in host memory cannot be copied by a kernel",
        change="without --cpu-offload-gb"),
)
# fmt: on


def device_problem(device_type: str, use: str) -> str | None:
    """Return why a feature cannot run on a device, or None if it can. vLLM's name of no device is empty."""
    if device_type in DEVICES[use]:
        return None
    return DEVICE.message.format(device=device_type or "none", why=DEVICE.why(use))


def check_engine(vllm_config: Any, device_type: str, use: str = TRANSACTION, mode: str = "") -> None:
    """Check the configuration of an engine for a feature. Later checks look at its layers and KV-cache groups.

    Without a mode of the transaction, refusals for a single mode are skipped.
    """
    parts = list[tuple[str, str]]()
    if problem := device_problem(device_type, use):
        parts.append((problem, DEVICE.change))
    if use == DRAFT_GRAPHS:
        runner, method = "V2" if vllm_config.use_v2_model_runner else "V1", vllm_config.speculative_config.method
        if method not in DRAFT_METHODS[runner]:
            methods = ", ".join(DRAFT_METHODS[runner])
            parts.append((METHOD.message.format(method=method, runner=runner, methods=methods), METHOD.change))
    parts += [
        (f"{refusal.feature}: {refusal.why(use)}", refusal.change)
        for refusal in REFUSALS
        if refusal.found is not None
        and refusal.why(use)
        and (use != TRANSACTION or mode in refusal.modes or len(refusal.modes) > 1)
        and refusal.found(vllm_config)
    ]
    if parts:
        raise Unsupported.join(parts)
