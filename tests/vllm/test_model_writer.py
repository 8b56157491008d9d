"""A layer whose model writes the rows in its own kernel: the MLA of Kimi Linear.

Class and back end come from vLLM. Its kernels need CUDA, so this file implements the ones that write rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.forward_context as forward_context
from torch import Tensor
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction.layers.back_ends import target_layers
from nwor_ops.vllm.transaction.runners import base

LATENT, ROTATED, HEADS, BLOCKS, BLOCK = 32, 16, 2, 4, 8
SCHEMAS = {
    "_C_cache_ops": "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor scale) -> ()",
    "_C": "fused_kimi_k3_mla_decode_q_concat_kv_cache_insert(Tensor ql_nope, Tensor q_pe, Tensor kv_c, Tensor k_pe, "
    "Tensor(a!) q, Tensor(b!) kv_cache, Tensor slots, int block_size, Tensor? positions, Tensor? table) -> ()",
}


def write_rows(latent: Tensor, rotated: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    for row, slot in zip(torch.cat((latent, rotated.flatten(1)), 1), slots.tolist(), strict=True):
        if slot >= 0:
            kv_cache[slot // kv_cache.shape[1], slot % kv_cache.shape[1]] = row


@pytest.fixture
def kernels() -> Iterator[None]:
    libraries = []
    for namespace, schema in SCHEMAS.items():
        name = schema.split("(", 1)[0]
        assert not hasattr(getattr(torch.ops, namespace), name), "vLLM's CPU build has this kernel: use it"
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(schema)
        libraries.append(library)

    def generic(latent: Tensor, rotated: Tensor, kv_cache: Tensor, slots: Tensor, dtype: str, scale: Tensor) -> None:
        write_rows(latent, rotated, kv_cache, slots)

    def of_the_model(ql: Tensor, qr: Tensor, latent: Tensor, rotated: Tensor, q: Tensor, kv_cache: Tensor,
                     slots: Tensor, *rest: Any) -> None:  # fmt: skip
        assert q.shape == (len(latent), HEADS, LATENT + ROTATED)
        assert (ql.shape[2], qr.shape[2]) == (LATENT, ROTATED)
        write_rows(latent, rotated, kv_cache, slots)

    libraries[0].impl("concat_and_cache_mla", generic, "CPU")
    libraries[1].impl("fused_kimi_k3_mla_decode_q_concat_kv_cache_insert", of_the_model, "CPU")
    yield
    for library in libraries:
        library._destroy()


def layer_of(**more: Any) -> Any:
    from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention

    layer: Any = MultiHeadLatentAttention.__new__(MultiHeadLatentAttention)
    torch.nn.Module.__init__(layer)
    impl: Any = TritonMLAImpl.__new__(TritonMLAImpl)
    impl.kv_cache_dtype = "auto"
    given = {
        "impl": impl, "kv_cache_dtype": "auto", "rotary_emb": None, "q_lora_rank": None, "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROTATED, "head_size": LATENT + ROTATED, "num_local_heads": HEADS,
        "_k_scale": torch.ones(1), "layer_name": "layer",
        "kv_cache": torch.zeros(BLOCKS, BLOCK, LATENT + ROTATED, dtype=torch.bfloat16),
    }  # fmt: skip
    for name, value in (given | more).items():
        setattr(layer, name, value)
    return layer


def runner_of(layer: Any) -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=LATENT + ROTATED, dtype=torch.bfloat16)
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}, pass_config=None),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )


@pytest.mark.usefixtures("kernels")
def test_a_slot_is_where_the_model_writes_it() -> None:
    layer = layer_of()
    [target] = target_layers(runner_of(layer), set(), "cow")
    assert (target.name, target.fused) == ("layer", False)
    assert target.cache.planes[0].view.shape == (BLOCKS, BLOCK, 1, LATENT + ROTATED)
    assert layer.kv_cache is target.kv_cache
    assert not layer.kv_cache.any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("more", "because"),
    [
        ({"q_lora_rank": 8}, "this layer class is supported for Kimi Linear only"),
        ({"rotary_emb": object()}, "this layer class is supported for Kimi Linear only"),
    ],
)
def test_kimi_k3_is_refused(more: dict[str, Any], because: str) -> None:
    with pytest.raises(Unsupported, match=f"layer layer: {because}"):
        target_layers(runner_of(layer_of(**more)), set(), "cow")


@pytest.mark.usefixtures("kernels")
def test_a_cache_of_another_format_is_refused() -> None:
    layer = layer_of()
    layer.impl.kv_cache_dtype = "fp8"
    with pytest.raises(Unsupported, match="the writer of this layer class needs a bfloat16 cache, got fp8"):
        target_layers(runner_of(layer), set(), "cow")


@pytest.mark.usefixtures("kernels")
def test_a_model_that_writes_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    write = type(layer)._decode_concat_cache
    monkeypatch.setattr(
        type(layer),
        "_decode_concat_cache",
        lambda self, ql_nope, q_pe, kv_c_normed, k_pe, positions, cos_sin_cache, slot_mapping: write(
            self, ql_nope, q_pe, kv_c_normed, k_pe, positions, cos_sin_cache, slot_mapping + 1
        ),
    )
    with pytest.raises(Unsupported, match=r"layer layer: vLLM's writer .* puts slot 0 elsewhere than expected"):
        target_layers(runner_of(layer), set(), "cow")


def test_rows_are_handed_over_before_the_layer_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session gets the rows of the batch without padding, until it is detached."""
    layer, said = layer_of(), []
    monkeypatch.setattr(
        type(layer), "_attention", lambda self, positions, q, kv_c_normed, k_pe, attn_out: said.append("attends")
    )
    session: Any = SimpleNamespace(
        writer=lambda name: lambda attention, *rows: said.append((name, *rows)), patches=Patches("test")
    )
    base._patch_model_writer(layer, "layer", session)
    latent, rotated, slots = torch.randn(5, LATENT), torch.randn(5, 1, ROTATED), torch.arange(5)
    metadata = {"layer": SimpleNamespace(num_actual_tokens=3)}
    context: Any = SimpleNamespace(attn_metadata=metadata, slot_mapping={"layer": slots})
    monkeypatch.setattr(forward_context, "_forward_context", context)
    layer._attention(None, None, latent, rotated, None)
    (name, *rows, cache, where, dtype, scale), attends = said
    assert (name, attends, dtype) == ("layer", "attends", "auto")
    assert [len(part) for part in (*rows, where)] == [3, 3, 3]
    assert cache is layer.kv_cache
    assert scale is layer._k_scale
    context.attn_metadata = None  # a warm-up without metadata
    layer._attention(None, None, latent, rotated, None)
    assert said[2:] == ["attends"]
    session.patches.undo()
    assert "_attention" not in vars(layer)
