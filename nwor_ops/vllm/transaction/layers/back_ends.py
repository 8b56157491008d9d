"""Attention back ends: which layers take part, and how each back end stores and writes its cache.

Only the back ends in this file are supported. Each one is tested on a scratch page when the engine starts, with vLLM's
own writer as the reference. The test checks the position of a slot's bytes, and whether our writer produces the same
bytes. If it does, one kernel logs and writes. Otherwise our kernel logs, and vLLM's writer writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nwor_ops.kv_cache import LayerCache
from nwor_ops.vllm.hooks import Hook, check_vllm
from nwor_ops.vllm.support.features import CACHE_SPECS, FUSED_MLA_WRITER
from nwor_ops.vllm.support.refusals import (
    CACHE_SPEC,
    COPIED_TABLE,
    FUSED_WRITER,
    SPLIT_BLOCKS,
    UNKNOWN_LAYER,
    UNRELIABLE_CACHE,
    Unsupported,
)
from nwor_ops.vllm.transaction.layers import cpu_pages, trial
from nwor_ops.vllm.transaction.layers.target import TargetLayer, same_place
from nwor_ops.vllm.transaction.supported import is_recurrent

_ATTENTION = "vllm.model_executor.layers.attention.attention.Attention"
_MLA_ATTENTION = "vllm.model_executor.layers.attention.mla_attention.MLAAttention"

# The MLA layer of Kimi Linear. It writes the cache in its own kernel, together with other work of attention.
KIMI_ATTENTION = "vllm.models.kimi_k3.nvidia.mla.MultiHeadLatentAttention"

_KIMI_MODULE, _KIMI_CLASS = KIMI_ATTENTION.rsplit(".", 1)
KIMI_HOOKS = (
    Hook(_KIMI_MODULE, f"{_KIMI_CLASS}._attention", "positions, q, kv_c_normed, k_pe, attn_out"),
    Hook(
        _KIMI_MODULE,
        f"{_KIMI_CLASS}._decode_concat_cache",
        "ql_nope, q_pe, kv_c_normed, k_pe, positions, cos_sin_cache, slot_mapping",
    ),
)

_BACK_ENDS = "vllm.v1.attention.backends."
CPU_IMPL = _BACK_ENDS + "cpu_attn.CPUAttentionBackendImpl"
TRITON_IMPL = _BACK_ENDS + "triton_attn.TritonAttentionImpl"
# Key and value of a token and head are adjacent: [B, H, N, 2 * D].
PACKED_IMPLS = (
    _BACK_ENDS + "flash_attn.FlashAttentionImpl",
    TRITON_IMPL,
    _BACK_ENDS + "flashinfer.FlashInferImpl",
    _BACK_ENDS + "flex_attention.FlexAttentionImpl",
)
# One latent row per token: [B, N, C]. vLLM writes it, our kernel logs it.
LATENT_IMPLS = tuple(
    _BACK_ENDS + "mla." + name
    for name in (
        "triton_mla.TritonMLAImpl",
        "flashmla.FlashMLAImpl",
        "flashattn_mla.FlashAttnMLAImpl",
        "cutlass_mla.CutlassMLAImpl",
        "flashinfer_mla.FlashInferMLAImpl",
    )
)
# The metadata of these back ends refers to the runner's own block table, neither to a copy nor to values derived from
# it. Restoring the table therefore restores the metadata.
_TABLE_READERS = (
    CPU_IMPL,
    TRITON_IMPL,
    _BACK_ENDS + "flash_attn.FlashAttentionImpl",
    _BACK_ENDS + "mla.triton_mla.TritonMLAImpl",
    _BACK_ENDS + "mla.flashattn_mla.FlashAttnMLAImpl",
)
_UNRELIABLE = ("int4_per_token_head",)
_FORMATS = {
    "auto": "auto",
    "bfloat16": "auto",
    "float16": "auto",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}


def target_layers(runner: Any, drafter_layers: set[str], mode: str) -> list[TargetLayer]:
    """Return the layers whose writes belong to the transaction, sorted by KV-cache group: neither recurrent layers nor
    the drafter's. In mode ``"stage"`` only the position of a write matters, not its writer."""
    context = runner.compilation_config.static_forward_context
    layers = []
    for group, name, spec in _layers_of_groups(runner.kv_cache_config):
        attention = context[name]
        if name in drafter_layers or getattr(attention, "kv_sharing_target_layer_name", None) is not None:
            continue  # a layer that shares another layer's cache writes nothing
        if is_recurrent(spec):
            continue
        if type(spec).__name__ not in CACHE_SPECS:
            raise CACHE_SPEC.because(group=group, spec=type(spec).__name__)
        bypasses_writer = getattr(runner.compilation_config.pass_config, FUSED_MLA_WRITER, False)
        if qualified_name(attention) == _MLA_ATTENTION and mode != "stage" and bypasses_writer:
            raise FUSED_WRITER.because(name=FUSED_MLA_WRITER)
        layers.append(_target_layer(name, group, attention, runner.model_config.dtype))
    return layers


def check_tables(runner: Any, layers: list[TargetLayer], borrowers: set[str]) -> None:
    """Check that attention reads only the slot mappings and block tables that the runner holds.

    ``borrowers`` are layers of a drafter that attend with metadata of the target's step, which was built while the
    tables named shadow pages. Their back end may differ from the target's.
    """
    for layer in layers:
        page = layer.cache.planes[0].view.shape[1]
        block = runner.kv_cache_config.kv_cache_groups[int(layer.group)].kv_cache_spec.block_size
        if page != block:
            raise SPLIT_BLOCKS.because(layer=layer.name, block=block, page=page)
    for name, impl in table_copies(runner, layers, borrowers).items() if borrowers else ():
        raise COPIED_TABLE.because(method=runner.speculative_config.method, impl=impl, layer=name)


def table_copies(runner: Any, layers: list[TargetLayer], borrowers: Iterable[str] = ()) -> dict[str, str]:
    """Return the layers whose metadata copies the runner's block table, with their back ends."""
    context = runner.compilation_config.static_forward_context
    names = (*(layer.name for layer in layers), *sorted(borrowers))
    impls = {name: qualified_name(context[name].impl) for name in names}
    return {name: impl for name, impl in impls.items() if impl not in _TABLE_READERS}


def _layers_of_groups(kv_cache_config: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield group, name and spec of each layer. The layers of one group may have different specs."""
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            yield str(number), name, specs.get(name, group.kv_cache_spec)


def qualified_name(thing: Any) -> str:
    """Return the name of an object's class, with its module."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


Maker = Callable[[str, str, Any, torch.dtype], TargetLayer]


def maker_of(name: str, attention: Any) -> Maker:
    """Return the function that describes a layer of this class and back end. The layer's cache need not exist."""
    layer_class, impl = qualified_name(attention), qualified_name(getattr(attention, "impl", None))
    makers: dict[tuple[str, str], Maker] = {
        (_ATTENTION, CPU_IMPL): _cpu_layer,
        **{(_ATTENTION, known): _packed_layer for known in PACKED_IMPLS},
        **{(_MLA_ATTENTION, known): _latent_layer for known in LATENT_IMPLS},
        **{(KIMI_ATTENTION, known): _kimi_layer for known in LATENT_IMPLS},
    }
    if (layer_class, impl) not in makers:
        raise UNKNOWN_LAYER.because(layer=name, layer_class=layer_class, impl=impl)
    return makers[layer_class, impl]


def _target_layer(name: str, group: str, attention: Any, source_dtype: torch.dtype) -> TargetLayer:
    describe = maker_of(name, attention)
    try:
        return describe(name, group, attention, source_dtype)
    except ValueError as error:
        raise Unsupported(f"layer {name}: {error}") from error


# ---------------------------------------------------------------- the kinds of layers


def _cpu_layer(name: str, group: str, attention: Any, source_dtype: torch.dtype) -> TargetLayer:
    """Describe a layer of the CPU back end: keys are transposed within a page, or their order needs a table."""
    # Bind the writer of the class, since the attribute of the instance will be patched.
    own_writer = functools.partial(type(attention.impl).do_kv_cache_update, attention.impl, attention)
    page_offsets = cpu_pages.learn_pages(own_writer, attention.kv_cache, source_dtype)
    writable = page_offsets is None and attention.impl.kv_cache_dtype == "auto"
    planes = functools.partial(cpu_pages.layer_cache, page_offsets=page_offsets, writable=writable)
    _, heads, _, width = attention.kv_cache.shape
    rows = trial.Rows(((heads, width // 2), (heads, width // 2)), source_dtype, attention.kv_cache.device)
    trial.check_slots(own_writer, planes, attention.kv_cache, rows)
    return TargetLayer(name, group, attention.kv_cache, planes(attention.kv_cache), own_writer, fused=writable)


def _packed_layer(name: str, group: str, attention: Any, source_dtype: torch.dtype) -> TargetLayer:
    """Describe a layer of a GPU back end: rows of key and value, adjacent, in strided pages."""
    impl, kv_cache = attention.impl, attention.kv_cache
    if kv_cache.dim() != 4 or kv_cache.shape[-1] % 2 != 0:
        raise ValueError(f"its cache must be [num_blocks, num_kv_heads, block_size, 2 * width], got {kv_cache.shape}")
    if impl.kv_cache_dtype in _UNRELIABLE:
        raise UNRELIABLE_CACHE.because(layer=name, kv_cache_dtype=impl.kv_cache_dtype)
    own_writer: Callable[..., None] = functools.partial(type(impl).do_kv_cache_update, impl, attention)
    scales_within = getattr(impl, "_is_per_token_head_quant", False)
    if scales_within:
        own_writer = _WriterOfScales(attention, own_writer)
    written_as = None if scales_within else _FORMATS.get(impl.kv_cache_dtype)

    def opaque(kv_cache: Tensor) -> LayerCache:
        return LayerCache.opaque(kv_cache.transpose(1, 2))

    def packed(kv_cache: Tensor) -> LayerCache:
        return LayerCache.packed(kv_cache.transpose(1, 2))

    def scales() -> tuple[Tensor, Tensor]:
        return attention._k_scale, attention._v_scale

    heads = attention.num_kv_heads
    rows = trial.Rows(((heads, attention.head_size), (heads, attention.head_size_v)), source_dtype, kv_cache.device)
    trial.check_slots(own_writer, opaque, kv_cache, rows)
    if written_as is None or not trial.writes_the_same(own_writer, packed, kv_cache, rows, scales(), written_as):
        return TargetLayer(name, group, kv_cache, opaque(kv_cache), own_writer)
    return TargetLayer(name, group, kv_cache, packed(kv_cache), own_writer, True, written_as, scales)


def _latent_layer(name: str, group: str, attention: Any, source_dtype: torch.dtype) -> TargetLayer:
    """Describe an MLA layer: one row of latents per token. vLLM's writer takes further arguments."""
    impl, kv_cache = attention.impl, attention.kv_cache
    if getattr(attention, "hisparse_cache", None) is not None:
        raise ValueError("HiSparse writes to its own slots, which the plugin does not know")
    if kv_cache.dim() != 3:
        raise ValueError(f"its cache must be [num_blocks, block_size, width], got {kv_cache.shape}")
    own_writer = functools.partial(type(impl).do_kv_cache_update, impl)

    def tried(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        own_writer(key, value, kv_cache, slot_mapping, impl.kv_cache_dtype, attention._k_scale)

    trial.check_slots(tried, _latents, kv_cache, _rows_of_latents(attention, source_dtype))
    return TargetLayer(name, group, kv_cache, _latents(kv_cache), own_writer)


def _kimi_layer(name: str, group: str, attention: Any, source_dtype: torch.dtype) -> TargetLayer:
    """Describe an MLA layer of Kimi Linear: the same rows as :func:`_latent_layer`, but written by the model.

    Before the model writes them, the writer of the back end writes them for us.
    """
    check_vllm(KIMI_HOOKS)
    layer, impl = _latent_layer(name, group, attention, source_dtype), attention.impl
    if attention.rotary_emb is not None or attention.q_lora_rank is not None:
        raise ValueError("this layer class is supported for Kimi Linear only, not for Kimi K3")
    if impl.kv_cache_dtype not in ("auto", "bfloat16"):
        raise ValueError(f"the writer of this layer class needs a bfloat16 cache, got {impl.kv_cache_dtype}")
    own = attention.kv_cache

    def tried(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        query = key.new_zeros(len(key), attention.num_local_heads, attention.head_size)
        query_of_latents, rotated = query.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
        attention.kv_cache = kv_cache
        try:
            attention._decode_concat_cache(query_of_latents, rotated, key, value, None, None, slot_mapping)
        finally:
            attention.kv_cache = own

    trial.check_slots(tried, _latents, own, _rows_of_latents(attention, source_dtype))
    return layer


def _latents(kv_cache: Tensor) -> LayerCache:
    return LayerCache.opaque(kv_cache.unsqueeze(2))


def _rows_of_latents(attention: Any, source_dtype: torch.dtype) -> trial.Rows:
    shapes = (attention.kv_lora_rank,), (1, attention.qk_rope_head_dim)
    return trial.Rows(shapes, source_dtype, attention.kv_cache.device)


class _WriterOfScales:
    """Call vLLM's writer for a layer whose cache contains its scales (Triton's per-token-head formats).

    The back end writes the scales through views. It creates them from the first cache that it is given, sets all scales
    to 1, and keeps the views. Any other cache (a scratch page, or the image of the audit) needs its own views during
    the write.
    """

    def __init__(self, attention: Any, write: Callable[..., None]) -> None:
        self._attention, self._write = attention, write
        self._of_scratch: tuple[Tensor | None, Tensor | None] = (None, None)  # views that keep their storage alive

    def __call__(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        impl, storage = self._attention.impl, kv_cache.untyped_storage()
        own = self._attention.kv_cache.untyped_storage()
        if own.data_ptr() == storage.data_ptr():
            self._write(key, value, kv_cache, slot_mapping)
            return
        bound = impl._k_scale_cache, impl._v_scale_cache
        is_image = bound[0] is not None and own.nbytes() == storage.nbytes()
        views = tuple(same_place(view, storage) for view in bound) if is_image else self._scratch_views(storage)
        try:
            impl._k_scale_cache, impl._v_scale_cache = views
            self._write(key, value, kv_cache, slot_mapping)
            if not is_image:
                self._of_scratch = impl._k_scale_cache, impl._v_scale_cache
        finally:
            impl._k_scale_cache, impl._v_scale_cache = bound

    def _scratch_views(self, storage: torch.UntypedStorage) -> tuple[Tensor | None, Tensor | None]:
        known = self._of_scratch[0]
        if known is not None and known.untyped_storage().data_ptr() == storage.data_ptr():
            return self._of_scratch
        return None, None  # the back end creates them, once for each scratch page
