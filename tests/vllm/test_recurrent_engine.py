"""One recurrent state per request: our classes compared with vLLM's, the layout of a page, and the supported engines.

vLLM's CPU engine has only the V1 runner, and another kernel for these layers that needs a state for each draft token.
So layers and metadata run without an engine here (recurrent_layers.py); tests/gpu/vllm runs engines.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import pathlib
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from draft_configs import with_settings
from engines import Engines, model_folder, prompts
from processes import interpreted
from recurrent_layers import Operations
from tiny_models import write_models
from torch import Tensor
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, UniformTypeKVCacheSpecs

from nwor_ops import ops
from nwor_ops.config import NworConfig
from nwor_ops.recurrent.cursors import Cursors
from nwor_ops.vllm import hooks
from nwor_ops.vllm.audit.cache import AuditError
from nwor_ops.vllm.audit.engine import audit_states_alone
from nwor_ops.vllm.audit.recurrent import StateAudit, digests
from nwor_ops.vllm.audit.watch import states_of
from nwor_ops.vllm.errors import CannotContinue
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.plugin import _preparing as preparing
from nwor_ops.vllm.recurrent import layer as layers
from nwor_ops.vllm.recurrent import models, plugin, supported
from nwor_ops.vllm.recurrent.block_reuse import BlockOwners
from nwor_ops.vllm.recurrent.page import GroupLayers, RecordGeometry
from nwor_ops.vllm.recurrent.prefix_caching import PER_STATE, AlignedStates
from nwor_ops.vllm.support.refusals import Unsupported

GROUPS = 2  # of recurrent_layers.py
KDA = {"num_heads": 4, "head_dim": 128, "short_conv_kernel_size": 4}
KIMI = {"model_config__architecture": "KimiLinearForCausalLM", "model_config__hf_text_config__linear_attn_config": KDA}
GEOMETRY = RecordGeometry(rows=4, key_heads=2, value_heads=4, key_width=64, value_width=128, key_dtype=torch.bfloat16)
CHUNK = replace(GEOMETRY, key_width=128, chunk=16)
STATES = MambaSpec(
    block_size=256, shapes=((6, 768), (4, 128, 64)), dtypes=(torch.bfloat16, torch.float32), num_speculative_blocks=3
)


# ---------------------------------------------------------------- compared with vLLM


def said_of(case: str, script: str) -> Any:
    """Run a script for a case and return its report.

    It runs real layers and builders of the installed vLLM on the CPU, in Triton's interpreter, and audits every state.
    """
    lines = interpreted(script, case, timeout=900).splitlines()
    [said] = [json.loads(line.removeprefix(case)) for line in lines if line.startswith(f"{case} ")]
    return said


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        "plain-graphs",
        "fused-norm-of-two-ranks",
        pytest.param("plain", marks=pytest.mark.nightly),
        pytest.param("fused-norm-graphs", marks=pytest.mark.nightly),
    ],
)
def test_qwen_equals_vllm(case: str) -> None:
    said = said_of(case, "recurrent_layers.py")
    assert said["blocks"] == [4, 1]  # per request and group: vanilla vLLM, ours
    assert min(said["windows_only"], said["mixed"]) > 12
    assert min(said["prompts_only"], said["preempted"]) > 0
    assert said["states_compared"] > 150
    # Most windows had accepted and rejected drafts.
    assert said["states_compared"] < said["rows_reapplied"] < 4 * said["states_compared"]
    assert said["prompt_folds"] > 0
    # We copy one tensor, and plan each group. vLLM's builder also works on the host's tensors, which count too.
    assert said["operations_added"] == (-16 if "graphs" in case else -10)
    assert said["addresses"] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "blocks"),
    [
        ("plain-chunk", [4, 1]),
        ("plain-graphs-chunk-nodrafts", [1, 1]),
        pytest.param("fused-norm-graphs-chunk", [4, 1], marks=pytest.mark.nightly),
    ],
)
def test_chunk_outputs_are_near_those_of_vllm(case: str, blocks: list[int]) -> None:
    """Prompts of any length precede the windows, and each chunk still ends at a multiple of 16 tokens."""
    said = said_of(case, "recurrent_layers.py")
    assert said["blocks"] == blocks
    assert min(said["windows_only"], said["mixed"]) > 12
    assert said["windows"] - 60 < said["not_stored"] < said["windows"] - 12
    assert said["states_compared"] > 250
    assert min(said["prompt_folds"], said["preempted"]) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(f"{kind}-graphs" for kind in ("kimi", "olmo", "glm", "bailing")),
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("kimi", "olmo", "glm", "bailing")),
    ],
)
def test_other_models_equal_vllm(case: str) -> None:
    """Run layers of Kimi Linear, OLMo hybrid, GLM-5.3-Flash and Bailing V3."""
    said = said_of(case, "recurrent_models.py")
    assert said["blocks"] == [4, 1]
    assert min(said["windows_only"], said["mixed"]) > 4
    assert said["operations_added"] == (-16 if "graphs" in case else -10)
    assert said["addresses"] == 1
    assert said["states_compared"] > 50
    assert said["states_compared"] < said["rows_reapplied"] < 4 * said["states_compared"]


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        "plain-graphs-nodrafts",
        *(
            pytest.param(f"{kind}-nodrafts", marks=pytest.mark.nightly)
            for layer in ("plain", "kimi", "olmo", "glm", "bailing")
            for kind in (layer, f"{layer}-graphs")
            if kind != "plain-graphs"
        ),
    ],
)
def test_models_without_drafts_equal_vllm(case: str) -> None:
    """Each decode is a window of one token. vLLM has other kernels for them, which add in another order."""
    layer = case.partition("-")[0]
    said = said_of(case, f"recurrent_{'layers' if layer == 'plain' else 'models'}.py")
    assert said["blocks"] == [1, 1]
    assert min(said["windows_only"], said["mixed"]) > 4
    # Our builder copies nothing for a batch of decodes. For graphs, vLLM's builder copies for each group.
    assert said["operations_added"] == (-10 if "graphs" in case else -7)
    assert said["states_compared"] > 100
    # Each window applies the row of the one before it. A prompt's chunk may be a window, whose row the next one folds.
    assert said["states_compared"] - said["prompt_folds"] == said["rows_reapplied"]
    assert said["prompt_folds"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "hits", "folds"),
    [
        ("aligned", 4, 60),
        ("aligned-nodrafts", 2, 20),
        ("aligned-chunk", 1, 15),
        pytest.param("aligned-chunk-nodrafts", 1, 8, marks=pytest.mark.nightly),
    ],
)
def test_prefix_caching_equals_vllm(case: str, hits: int, folds: int) -> None:
    """vLLM's kernels copy its states from block to block, and choose the blocks of our states.

    A block that a decode fills gets the key of its prefix. Without drafts its row is folded in place.
    """
    said = said_of(case, "recurrent_aligned.py")
    assert said["hits"] > hits
    assert min(said["prompts"], said["windows"]) > 10
    assert said["audit"]["folds"] > folds
    assert said["audit"]["states_compared"] > said["audit"]["folds"]
    assert ("moves" in said["audit"]) == ("chunk" in case)
    assert GROUPS * said["tails"] == said["audit"]["tail_folds"] > 0


@pytest.mark.long
def test_checkpoints_of_prompts_equal_vllm() -> None:
    """vLLM writes a state from the middle of a prompt to a separate block.

    It finds the block in the whole table. Rows of a previous owner may be pending there. Later requests start from
    this state.
    """
    said = said_of("checkpoints", "recurrent_aligned.py")
    audit = said["audit"]
    assert said["checkpoints"] > 10
    assert said["stale"] > 3
    assert audit["checkpoints"] == GROUPS * said["checkpoints"]
    assert audit["checkpoint_hits"] > 10
    assert min(said["hits"], said["windows"]) > 10


def test_metadata_with_prefix_caching_needs_vllm_s_indices() -> None:
    """vLLM's builder would look up the block in the table. Ours needs the indices that the runner sets."""
    from nwor_ops.vllm.recurrent.metadata import RecurrentMetadataBuilder

    builder: Any = RecurrentMetadataBuilder.__new__(RecurrentMetadataBuilder)
    builder.mamba_aligned_state_indices = None
    table = torch.arange(12).view(4, 3)
    for mode in ("none", "align"):
        builder.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode=mode))
        if mode == "none":
            assert builder._slots(table).tolist() == [0, 3, 6, 9]
            continue
        with pytest.raises(RuntimeError, match=r"must set mamba_aligned_state_indices before .* are unknown"):
            builder._slots(table)
        builder.mamba_aligned_state_indices = table.flip(1)
        assert builder._slots(table[:2]).tolist() == [2, 5]


def test_the_capture_of_a_graph_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor_ops.vllm.recurrent import metadata

    def build(builder: Any, common: Any) -> str:
        builder.steps += 1
        return "metadata"

    monkeypatch.setattr(metadata.GDNAttentionMetadataBuilder, "build_for_cudagraph_capture", build)
    builder: Any = metadata.RecurrentMetadataBuilder.__new__(metadata.RecurrentMetadataBuilder)
    builder.steps = 3
    assert builder.build_for_cudagraph_capture(None) == "metadata"
    assert builder.steps == 3


# ---------------------------------------------------------------- layout of a page


@pytest.mark.parametrize("geometry", [GEOMETRY, CHUNK], ids=["halves", "chunk"])
def test_page_holds_states_and_record_apart(geometry: RecordGeometry) -> None:
    width = geometry.key_width
    vllm = replace(STATES, shapes=((6, 768), (4, 128, width)))
    spec, states = geometry.extend(vllm), vllm.page_size_bytes
    assert spec.page_size_bytes == states + geometry.num_bytes
    assert (spec.num_speculative_blocks, spec.block_size) == (0, STATES.block_size)
    # The second of three layers, in a cache where the pages of a block are adjacent.
    pages = torch.zeros(5, 3, -(-spec.page_size_bytes // 16) * 16, dtype=torch.int8)[:, 1]  # as vLLM pads them
    records = geometry.bind(torch.zeros(5, 4, 128, width), pages, states).records
    halves, rows = (1, 23) if geometry.chunk else (2, 4)
    shapes = [(5, halves, rows, 2, width), (5, halves, rows, 2), (5, halves, rows, 4), (5, rows, 4, 128)]
    assert [tuple(part.shape) for part in records] == shapes
    assert [part.dtype for part in records] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    for number, part in enumerate(records, 1):
        part.view(torch.uint8).fill_(number)
        assert part.data_ptr() % 16 == 0
    marks = pages.view(torch.uint8)
    assert marks[:, :states].eq(0).all()
    assert [int(marks[:, states:].eq(number).sum()) for number in range(1, 5)] == [
        part.numel() * part.element_size() for part in records
    ]


def unbound_layer() -> Any:
    """Return a layer of the plugin without weights and without a cache."""
    kind: Any = layers.subclass_of(models.qwen.MODEL)
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    layer.recurrent, layer.geometry, layer._most_audited_tokens = True, GEOMETRY, 0
    layer.get_state_shape, layer.get_state_dtype = lambda: STATES.shapes, lambda: STATES.dtypes
    return layer


def test_cache_audit_knows_states_and_record() -> None:
    layer = unbound_layer()
    used = GEOMETRY.extend(STATES).page_size_bytes
    pages = torch.zeros(3, 1, 1, used + 64, dtype=torch.int8)
    layer.bind_kv_cache(pages[..., :used])
    for part in states_of(layer):
        part.view(torch.uint8)[1:] = 1
    assert pages[1:, ..., :used].eq(1).all()
    assert not pages[0].any()
    assert not pages[..., used:].any()


def test_a_cache_that_vllm_releases_is_freed() -> None:
    """vLLM measures graphs with a temporary cache, before it sizes the final cache by the free memory."""
    from vllm.v1.worker.utils import clear_layer_kv_caches

    layer = unbound_layer()
    memory = numpy.zeros((3, 1, 1, GEOMETRY.extend(STATES).page_size_bytes), dtype=numpy.int8)
    cache = weakref.ref(memory)
    layer.bind_kv_cache(torch.from_numpy(memory))
    del memory
    gc.collect()
    assert cache() is not None
    assert layer.recurrent_cache.record_updates.shape == (3, 4, 4, 128)
    clear_layer_kv_caches([layer])
    gc.collect()
    assert cache() is None


def linear(keys: int, values: int, key_width: int, value_width: int) -> SimpleNamespace:
    """The names of sizes in configurations of Gated DeltaNet."""
    return SimpleNamespace(
        linear_num_key_heads=keys,
        linear_num_value_heads=values,
        linear_key_head_dim=key_width,
        linear_value_head_dim=value_width,
    )


F32, BF16 = torch.float32, torch.bfloat16
# Each model: its sizes, the heads of one of two ranks, and the dtype of states for mamba_ssm_cache_dtype=bfloat16.
MODELS: dict[str, tuple[SimpleNamespace, tuple[Any, ...], torch.dtype]] = {
    **dict.fromkeys(models.qwen.MODEL.architectures, (linear(2, 4, 64, 128), (1, 2, 64, 128, BF16), BF16)),
    **dict.fromkeys(models.qwen4.MODEL.architectures, (linear(2, 4, 128, 128), (1, 2, 128, 128, BF16), BF16)),
    "KimiLinearForCausalLM": (SimpleNamespace(linear_attn_config=KDA), (2, 2, 128, 128, BF16, True), F32),
    "AliceAIForCausalLM": (linear(4, 4, 128, 128), (2, 2, 128, 128, BF16, True), F32),
    **dict.fromkeys(
        models.bailing.MODEL.architectures,
        (SimpleNamespace(num_attention_heads=4, head_dim=128), (2, 2, 128, 128, BF16, True), F32),
    ),
    "OlmoHybridForCausalLM": (linear(30, 30, 96, 192), (15, 15, 96, 192, BF16), BF16),
    **dict.fromkeys(
        models.glm.MODEL.architectures,
        (
            SimpleNamespace(linear_num_heads=64, linear_head_dim=128, linear_attn_config={}),
            (32, 32, 128, 128, BF16, True),
            BF16,
        ),
    ),
}


@pytest.mark.usefixtures("any_vllm")
@pytest.mark.parametrize("architecture", models.MODELS)
def test_sizes_of_each_model(architecture: str) -> None:
    text, heads, state_dtype = MODELS[architecture]
    config = engine(
        model_config__architecture=architecture,
        model_config__hf_text_config=text,
        cache_config__mamba_ssm_cache_dtype="bfloat16",
        parallel_config__tensor_parallel_size=2,
    )
    assert RecordGeometry.of(config) == RecordGeometry(4, *heads)
    assert models.model_of(config).state_dtype(config) == state_dtype
    assert supported.problem_of(config) is None


@pytest.mark.parametrize("architecture", ["GraniteMoeHybridForCausalLM", "Qwen3NextV2ForCausalLM", None])
def test_unlisted_architecture_is_refused(architecture: str | None) -> None:
    """Also one that is much like a supported model."""
    config = engine(model_config__architecture=architecture)
    sentence = f"model {architecture}: it has not been tried, .*; supported are Qwen3NextForCausalLM, .*KimiLinear"
    with pytest.raises(Unsupported, match=sentence):
        models.model_of(config)
    with pytest.raises(RuntimeError, match=rf"nwor: .*{sentence}.*\(recurrent was asked for; "):
        plugin.prepare(config, logging.getLogger("nwor"))


@pytest.mark.parametrize("name", ["gdn_mtp_multimodal", "minicpm_v", "interns2_preview", "interns2_mobius"])
def test_multimodal_model_has_sizes_of_its_text(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils
    from vllm.transformers_utils.config import get_config, get_hf_text_config

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(supported, "_problem_of_vllm", lambda model: None)
    outer = get_config(write_models(tmp_path, name)[name], trust_remote_code=True)
    [architecture] = outer.architectures
    config = engine(model_config__architecture=architecture, model_config__hf_text_config=get_hf_text_config(outer))
    assert RecordGeometry.of(config) == RecordGeometry(4, 1, 2, 128, 128, torch.bfloat16)
    assert supported.problem_of(config) is None
    assert models.model_of(config) is models.qwen.MODEL


def test_model_reports_pages_with_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the model reports its specs itself, of which only one is of states, and through a subclass."""
    convolution = replace(STATES, shapes=((12, 512),), dtypes=(torch.bfloat16,), tp_replicated=True)

    class Model:
        get_mamba_state_shape_from_config = classmethod(lambda cls, config: STATES.shapes)
        get_mamba_state_dtype_from_config = classmethod(lambda cls, config: STATES.dtypes)

    class TwoKinds(Model):
        get_mamba_specs_from_config = classmethod(lambda cls, config: (STATES, convolution))

    class Outer(TwoKinds): ...

    def pages(model: Any, recurrent: bool) -> list[int]:
        return [spec.page_size_bytes for spec in model.get_mamba_specs_from_config(engine(recurrent=recurrent))]

    monkeypatch.setattr(supported, "_problem_of_vllm", lambda model: None)
    for model in (Model, TwoKinds, Outer) * 2:  # again: a process may start several engines
        plugin.add_records(model)
    record, page = GEOMETRY.num_bytes, STATES.page_size_bytes
    assert (pages(Model, True), pages(Model, False)) == ([page + record], [page])
    for model in (TwoKinds, Outer):
        assert pages(model, True) == [page + record, convolution.page_size_bytes]


@pytest.mark.usefixtures("any_vllm")
@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear", "BailingMoeV3", "OlmoHybrid"])
def test_page_of_vllm_class_grows_by_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These classes report no specs. vLLM then derives one from their shapes and dtypes, and so must we."""
    from vllm.model_executor.models import ModelRegistry

    architecture = f"{name}ForCausalLM"
    model: Any = ModelRegistry.models[architecture].load_model_cls()
    sizes = SimpleNamespace(
        **vars(MODELS[architecture][0]) | {"linear_conv_kernel_dim": 4, "short_conv_kernel_size": 4}
    )
    changes = {"speculative_config__num_speculative_tokens": 3, "model_config__architecture": architecture}
    changes |= {"model_config__hf_text_config": sizes, "model_config__hf_config": sizes}
    config, without = (engine(on, cache_config__use_kda_recoverssm=False, **changes) for on in (True, False))
    assert not hasattr(model, "get_mamba_specs_from_config")
    shapes, dtypes = model.get_mamba_state_shape_from_config(config), model.get_mamba_state_dtype_from_config(config)
    page = MambaSpec(block_size=-1, shapes=shapes, dtypes=dtypes).page_size_bytes
    monkeypatch.setattr(plugin, "_patches", patches := Patches("test"))
    plugin.add_records(model)
    specs = [model.get_mamba_specs_from_config(given) for given in (config, without)]
    patches.undo()
    pages = [[spec.page_size_bytes for spec in some] for some in specs]
    assert pages == [[page + RecordGeometry.of(config).num_bytes], [page]]


@pytest.mark.parametrize("model", models.ALL, ids=lambda model: model.layer)
def test_vllm_must_ask_for_our_pages(model: models.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that asks a model's class for shapes only would have pages without room for records."""
    from vllm.platforms.interface import Platform

    def align(cls: Any, vllm_config: Any, backend_cls: Any) -> Any:
        return vllm_config.model_cls.get_mamba_state_shape_from_config(vllm_config)

    monkeypatch.setattr(hooks, "version_problem", lambda use: None)
    sentence = r"Platform\._align_hybrid_block_size does not call get_mamba_specs_from_config"
    assert [hook.problem() for hook in supported.HOOKS if hook.calls] == [None]
    monkeypatch.setattr(Platform, "_align_hybrid_block_size", classmethod(align))
    with pytest.raises(Unsupported, match=sentence):
        supported.check_hooks(model)


def test_ple_reads_only_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own layer and metadata builder for PLE of Qwen3.8-Flash-Next."""
    from recurrent_layers import configuration
    from vllm.models.qwen4_exp.nvidia.ple_layer import Qwen4ExpPLELayer
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.short_conv_attn import PleShortConvAttentionMetadataBuilder
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    monkeypatch.setattr(supported, "_problem_of_vllm", lambda model: None)
    monkeypatch.setattr(Qwen4ExpPLELayer, "get_kv_cache_spec", Qwen4ExpPLELayer.get_kv_cache_spec)  # undone
    layers.install(models.qwen4.MODEL)
    layer: Any = Qwen4ExpPLELayer.__new__(Qwen4ExpPLELayer)
    torch.nn.Module.__init__(layer)
    layer.hc_hidden_size, layer.conv_state_len, layer.num_spec_tokens = 512, 9, 3
    built = []
    for recurrent in (False, True):
        config = configuration(True, torch.float32)
        config.device_config = SimpleNamespace(device_type="cuda")
        config.speculative_config.method = "mtp"
        config.model_config.architecture = "Qwen4ExpForCausalLM"
        config.cache_config.replayssm_buffer_len = 0
        config.additional_config = {"nwor": {"recurrent": recurrent}}
        layer.model_config, layer.cache_config = config.model_config, config.cache_config
        spec = layer.get_kv_cache_spec(config)
        assert spec.num_speculative_blocks == (0 if recurrent else 3)
        # vLLM requires the same number for this group as for Gated DeltaNet.
        states = replace(STATES, block_size=spec.block_size, mamba_type="gdn")
        states = GEOMETRY.extend(states) if recurrent else states
        groups = [SimpleNamespace(kv_cache_spec=given, layer_names=["layer"]) for given in (states, spec)]
        copies = {"gdn": (None, None), spec.mamba_type: (None,)}
        cache = SimpleNamespace(kv_cache_groups=groups)
        context = MambaSpecDecodeGPUContext.create(4, cache, copies, torch.device("cpu"), lambda count, dtype: None)
        assert (context.num_states, context.num_groups) == (3, 2)
        builder = PleShortConvAttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))
        starts = torch.tensor([0, 4, 6, 11], dtype=torch.int32)
        table = torch.tensor([[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]], dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor([20, 30, 5], dtype=torch.int32),
            num_reqs=3, num_actual_tokens=11, max_query_len=5, max_seq_len=30,
            block_table_tensor=table[:, : 1 + spec.num_speculative_blocks], slot_mapping=None,
            is_prefilling=torch.tensor([False, False, True]),
            seq_lens_cpu_upper_bound=torch.tensor([20, 30, 5], dtype=torch.int32),
        )  # fmt: skip
        built.append(
            builder.build(
                0, common, num_accepted_tokens=torch.tensor([3, 1, 1], dtype=torch.int32),
                num_decode_draft_tokens_cpu=torch.tensor([3, 1, -1], dtype=torch.int32),
            )
        )  # fmt: skip
    theirs, ours = built
    assert ours.spec_state_indices_tensor.tolist() == theirs.spec_state_indices_tensor.tolist() == [4, 8]
    assert ours.state_indices_tensor.tolist() == theirs.state_indices_tensor.tolist() == [12]
    assert ours.num_accepted_tokens.tolist() == theirs.num_accepted_tokens.tolist() == [3, 1]


def test_sizes_of_the_table_are_those_of_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
    import support_tables

    config = engine(num_speculative_tokens=support_tables.DRAFTS)
    sizes = config.model_config.hf_text_config
    sizes.linear_conv_kernel_dim, sizes.layer_types = 4, ["linear_attention", "full_attention", "linear_attention"]
    # Bytes of a layer: the rows of the convolution, the state, and the record.
    page = 2 * 768 * 6 + 4 * 4 * 128 * 64
    record = RecordGeometry.of(config).num_bytes
    heads = models.model_of(config).heads(sizes)
    assert support_tables.states_of(sizes, heads, torch.float32) == (2 * 4 * page, 2 * (page + record))


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_start_up_line(packed: bool) -> None:
    """`packed`: a block holds pages of several layers, as in GLM-5.3-Flash, and a group has a spec for each layer."""
    attention = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    builders = [SimpleNamespace(group=SimpleNamespace(layers={"a": 0, "b": 0}), steps=7)] * 2
    cursors = Cursors(1, torch.device("cpu"))
    cursors.num_skipped += 2

    def engine_of(geometry: RecordGeometry, mode: str = "none", checkpoints: int = 0) -> plugin.RecurrentEngine:
        spec = dataclasses.replace(geometry.extend(STATES), num_prefill_checkpoint_blocks=checkpoints)
        states = UniformTypeKVCacheSpecs(block_size=256, kv_cache_specs={"a": spec, "b": spec}) if packed else spec
        config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=256),
            cache_config=SimpleNamespace(mamba_cache_mode=mode),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        )
        cache = SimpleNamespace(
            num_blocks=106,
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in (states, attention, states)],
            kv_cache_tensors=[SimpleNamespace(size=106 * spec.page_size_bytes)],
        )
        runner = SimpleNamespace(vllm_config=config, max_model_len=256, kv_cache_config=cache)
        return plugin.RecurrentEngine(runner, builders, geometry, cursors)

    exact, chunk = engine_of(GEOMETRY), engine_of(CHUNK)
    assert exact.record_bytes == 106 * GEOMETRY.num_bytes
    assert exact.counts(*exact.counter.tolist()) == {
        "recurrent_steps": 7, "recurrent_skipped_requests": 2,
    }  # fmt: skip
    assert (exact.form, chunk.form) == ("exact", "chunk")
    # A state in each of two groups and two blocks of attention; vLLM has 3 more of each state.
    assert exact.describe() == (
        "4 layers with 1 state per request (vLLM: 4) and a record of 10.2 KiB (6.9% of a page); a request of 256 "
        "tokens has 4 blocks (10), 26 of them fit"
    )
    assert "(vLLM: 4) and chunks of 16 tokens and a record of 58.0 KiB" in chunk.describe()
    # With prefix caching and FlashInfer's prefill a group holds up to three blocks of a request: the state, the one
    # that it is copied from, and a checkpoint.
    aligned = engine_of(GEOMETRY, "align", checkpoints=1)
    assert "a request of 256 tokens has 8 blocks (14), 13 of them fit" in aligned.describe()


# ---------------------------------------------------------------- the audit


class Layer:
    """The state and record of a layer, in pages of one cache with vLLM's layout."""

    def __init__(self, slots: int = 8, geometry: RecordGeometry = GEOMETRY) -> None:
        generator, width = torch.Generator().manual_seed(3), geometry.key_width
        states = replace(STATES, shapes=((6, 768), (4, 128, width)))
        self.prefix, self.geometry, spec = "layer", geometry, geometry.extend(states)
        pages = torch.zeros(slots, spec.page_size_bytes + 64, dtype=torch.int8)
        pages = pages[:, : pages.shape[1] // 16 * 16].clone()
        self.pages, rows = pages, 6 * 768 * 2
        state = pages[:, rows : states.page_size_bytes].view(torch.float32).view(-1, 4, 128, width)
        state.copy_(torch.randn(slots, 4, 128, width, generator=generator))
        self.kv_cache = (pages[:, :rows].view(torch.bfloat16), state)
        self.recurrent_cache = geometry.bind(state, pages, states.page_size_bytes)
        self.layer_window = torch.zeros(1, dtype=torch.int64)
        self.all_states = torch.zeros(16, 4, 128, width)
        self._generator = generator
        self.group = GroupLayers(Cursors(slots, torch.device("cpu"), geometry.chunk), [self])

    def verify(self, window: Window) -> None:
        generator, tokens, width = self._generator, int(window.starts[-1]), self.geometry.key_width

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(torch.bfloat16)

        out = torch.zeros(tokens, 4, 128, dtype=torch.bfloat16)
        inputs = (normal(tokens, 2, width), normal(tokens, 2, width), normal(tokens, 4, 128), normal(tokens, 4),
                  normal(tokens, 4))  # fmt: skip
        ops.gated_delta_verify(
            out, self.recurrent_cache.state, *self.recurrent_cache.records, self.layer_window, *inputs, torch.zeros(4),
            torch.zeros(4), window.plan, window.number, window.starts, scale=0.125, all_states=self.all_states,
            chunk=self.geometry.chunk,
        )  # fmt: skip


class Window:
    """The attributes of a builder that describe its last plan."""

    def __init__(self, slots: list[int], tokens: list[int]) -> None:
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.starts = torch.tensor([0, *tokens]).cumsum(0).to(torch.int32)
        self.plan = torch.zeros(4, 4, dtype=torch.int32)
        self.number = torch.zeros(1, dtype=torch.int64)

    def open(self, layer: Layer, accepted: list[int]) -> None:
        self.group = layer.group
        numbers = torch.tensor(accepted, dtype=torch.int32)
        layer.group.cursors.plan_window(
            self.plan, self.number, self.slots, self.starts, numbers, max_window=GEOMETRY.rows
        )

    def take_planned(self) -> bool:
        return True


class Audited:
    """A layer, its windows and the audit of its states."""

    def __init__(self, slots: list[int], tokens: list[int], geometry: RecordGeometry = GEOMETRY) -> None:
        self.layer, self.window = Layer(geometry=geometry), Window(slots, tokens)
        self.window.group = self.layer.group
        self.audit = StateAudit([self.window])

    def run(self, *windows: list[int]) -> None:
        """Run a window after each list of accepted tokens, and compare its states."""
        for accepted in windows:
            self.run_unaudited(accepted)
            self.audit.forwarded("after the forward")

    def run_unaudited(self, accepted: list[int]) -> None:
        self.window.open(self.layer, accepted)
        self.layer.verify(self.window)

    def finds(self, error: str) -> None:
        with pytest.raises(AuditError, match=error):
            self.audit.forwarded("after the forward")

    def change_state(self, slot: int) -> None:
        self.layer.kv_cache[1].view(torch.uint8)[slot, 3, 100, 7] += 1


def test_audit_finds_wrong_byte() -> None:
    audited = Audited([5, 2], [4, 3])
    audited.run([1, 1], [3, 1], [4, 3])
    counts = dict.fromkeys(("folds", "prompt_folds", "tail_folds", "checkpoints", "checkpoint_hits"), 0)
    counts |= {"steps": 3, "windows": 6, "states_compared": 4, "rows_reapplied": 11}
    assert audited.audit.summary() == counts
    audited.run_unaudited([2, 2])
    audited.change_state(2)
    audited.finds(r"state of layer layer in block 2 is not the state after 2 tokens of the last window$")


def test_digests_tell_states_apart() -> None:
    state = torch.randn(2, 8, 16)
    one_bit, two_signs, swapped, rotated = state.clone(), state.clone(), state[[1, 0]], state.roll(1, 2)
    one_bit.view(torch.int32)[1, 7, 15] ^= 1
    two_signs[0, 3, 4:6] *= -1
    of_states = digests(torch.stack([state, one_bit, two_signs, -state, swapped, rotated, state.clone()]))
    assert of_states[0] == of_states[-1]
    assert len(set(of_states.tolist())) == 6


def audited_chunks() -> Audited:
    """Windows of two requests whose prompts had 13 and 32 tokens. The state of the first one was stored at 16."""
    audited = Audited([5, 2], [4, 3], CHUNK)
    group, state, slots = audited.layer.group, audited.layer.kv_cache[1], torch.tensor([0, 5, 2])
    group.begin_chunk(slots, torch.tensor([7, 13, 32]))
    assert group.cursors.table[slots].tolist() == [[0, 0, 0], [0, 0, 13], [0, 0, 0]]
    audited.audit.began(group, slots)
    before = state.clone()
    audited.run([1, 1], [2, 3], [3, 1])
    # 13 rows that change nothing, and 5 accepted ones: the state after three of them was stored.
    assert audited.window.plan[:2].tolist() == [[5, 18, 0, 5], [2, 4, 0, 0]]
    assert not torch.equal(state[5], before[5])
    assert torch.equal(state[2], before[2])
    return audited


def test_chunk_begin_writes_only_whole_records() -> None:
    layer, other = Layer(geometry=CHUNK), Layer(geometry=CHUNK)
    other.pages.random_(-128, 127, generator=torch.Generator().manual_seed(5))
    layer.pages.copy_(other.pages)
    for record in other.recurrent_cache.records:
        record[[0, 5]] = 0
    other.recurrent_cache.record_decays[[0, 5]] = 1
    layer.group.begin_chunk(torch.tensor([5, 0, 5]), torch.tensor([13, 1, 13]))
    assert torch.equal(layer.pages, other.pages)


def test_audit_compares_pending_rows_of_chunks() -> None:
    audited = audited_chunks()
    assert audited.audit.summary()["windows"] == 6
    assert audited.audit.summary()["rows_reapplied"] == 13 + 0 + 15 + 3 + 18 + 4
    audited.run([4, 3], [2, 2], [4, 3], [4, 3])


@pytest.mark.parametrize("part", ["state", "earlier row", "last window"])
def test_audit_finds_wrong_byte_of_a_chunk(part: str) -> None:
    audited = audited_chunks()
    if part == "state":
        audited.change_state(2)
    else:  # rows 0 to 3 of block 2 are accepted, and rows 4 to 6 are those of the last window
        audited.layer.recurrent_cache.record_updates[2, 1 if part == "earlier row" else 4] += 1
    audited.run_unaudited([4, 1])
    audited.finds("in block 2 with its pending rows is not the state after 5 tokens")


def test_moved_chunks_keep_their_rows() -> None:
    """vLLM's kernel copies states and records (recurrent_aligned.py); here the whole block is copied."""
    audited = audited_chunks()
    group, cursors, cache = audited.layer.group, audited.layer.group.cursors, audited.layer.recurrent_cache
    for tensor in (cache.state, *cache.records):
        tensor[6] = tensor[5]
    table = torch.tensor([[5, 6], [0, 0]], dtype=torch.int32)
    source, target, kept = torch.tensor([[0, 0], [1, 1], [3, 1]], dtype=torch.int32)
    plan = torch.empty(2, 4, dtype=torch.int32)
    requests = torch.tensor([0, 1])
    ops.plan_recurrent_block_fold(
        plan, cursors.table, [table], requests, source, kept, target_columns=target, moves_rows=True
    )
    audited.audit.moved(group, torch.tensor([[5, 0, 0, 6], [0, 0, 0, 0]]))
    assert audited.audit.summary()["moves"] == 1
    assert cursors.table[[5, 6, 0]].tolist() == [[0, 16, 0], [0, 16, 5], [0, 0, 0]]
    audited.window.slots = torch.tensor([6, 2], dtype=torch.int32)
    audited.run([1, 3])
    assert audited.window.plan[0].tolist() == [6, 5, 16, 0]


def test_neutral_rows_are_not_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of connectors count the pending rows of exported blocks."""
    from state_connector import pending_in

    audited = audited_chunks()
    layer, window = audited.layer, audited.window
    monkeypatch.setattr("nwor_ops.vllm.recurrent_engines", lambda: [SimpleNamespace(builders=[window])])
    # The state of block 5 was stored, and the rows after it are real.
    assert (pending_in(5, [layer]), pending_in(2, [layer])) == (2 + 4, 4 + 3)
    layer.group.cursors.drop(torch.tensor([5]))
    layer.group.begin_chunk(torch.tensor([5]), torch.tensor([13]))
    assert int(layer.group.cursors.table[5, ::2].sum()) == 13
    assert pending_in(5, [layer]) == 0


@pytest.mark.parametrize("part", ["state", "updates"])
def test_audit_finds_wrong_byte_of_move(part: str) -> None:
    audited = audited_chunks()
    cache = audited.layer.recurrent_cache
    for tensor in (cache.state, *cache.records):
        tensor[6] = tensor[2]
    (cache.state if part == "state" else cache.record_updates)[6, 1] += 1
    with pytest.raises(AuditError, match="state and record of layer layer in block 6 are not those of block 2, from"):
        audited.audit.moved(audited.layer.group, torch.tensor([[2, 0, 0, 6]]))


def test_audit_without_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine without speculation."""
    from nwor_ops.vllm import plugin as entry

    class Runner:
        speculative_config = execute_model_state = None
        vllm_config = engine(
            speculative_config=None,
            additional_config={"nwor": {"recurrent": True, "audit": True}},
            parallel_config__pipeline_parallel_size=1,
        )

        def execute_model(self, wrong: bool) -> str:
            audited.run_unaudited([1, 1])
            if wrong:
                audited.change_state(2)
            return "output"

    audited = Audited([5, 2], [1, 1])
    runner, state = Runner(), plugin.RecurrentEngine.__new__(plugin.RecurrentEngine)
    state.builders, state._aligned, state._owners = [audited.window], None, None
    state.patches = Patches(plugin.ENGINE_PATCHES)
    Patches("recurrent").put(Runner, "execute_model", plugin.following_forwards)
    assert not audit_states_alone(runner)
    monkeypatch.setitem(plugin._engines, runner, state)
    for _ in range(2):  # the second time with a cache that is bound again
        state.patches.undo()
        entry._attach(runner, supported.RUNNER_MODULE)
    assert entry.sessions() == []
    for _ in range(3):
        assert runner.execute_model(False) == "output"
    summary = state.listener.summary()
    assert (summary["steps"], summary["windows"], summary["states_compared"]) == (3, 6, 4)
    assert summary["rows_reapplied"] == 4  # each window but the first applies the row of the one before
    with pytest.raises(AuditError, match="state of layer layer in block 2 is not the state after 1 tokens"):
        runner.execute_model(True)


def test_audit_finds_skipped_request() -> None:
    """On CUDA, an invalid request gets a row of zeros and keeps its cursor; the CPU raises. A padded row is valid."""
    audited = Audited([5, 2, 0], [4, 3, 2])
    audited.run([1, 1, 1])
    audited.window.plan[1] = 0
    audited.layer.verify(audited.window)
    audited.finds(r"the plan skipped the request in block 2 with 3 tokens: .*3 rows in")


def test_audit_compares_folds_of_prompts() -> None:
    audited = Audited([5, 2], [4, 3])
    audited.run([1, 1])
    plan = torch.zeros(4, 4, dtype=torch.int32)

    def fold(slot: int) -> None:
        slots = torch.tensor([slot], dtype=torch.int32)
        audited.layer.group.fold(plan, slots, slots, torch.tensor([2], dtype=torch.int32))

    fold(5)
    audited.audit.folded(audited.layer.group, plan[:1], "prompt_folds")
    assert audited.audit.summary()["prompt_folds"] == 1
    fold(2)
    audited.change_state(2)
    with pytest.raises(AuditError, match="state of layer layer in block 2 is not the state after 2 tokens"):
        audited.audit.folded(audited.layer.group, plan[:1], "prompt_folds")


def test_audit_holds_the_windows_of_a_step() -> None:
    from nwor_ops.vllm.recurrent.layer import most_window_tokens

    def most(requests: int, sizes: list[int] | None) -> int:
        return most_window_tokens(
            SimpleNamespace(
                num_speculative_tokens=3,
                scheduler_config=SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=8192),
                compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes),
            )
        )

    assert [most(6, sizes) for sizes in (None, [], [8, 16], [8, 24, 32], [8, 64, 32])] == [24, 24, 24, 24, 32]


def test_audit_finds_record_of_previous_owner() -> None:
    audited = Audited([5], [4])
    for accepted in (1, 2):
        audited.window.open(audited.layer, [accepted])
    audited.finds("reapplies 2 rows that no window of block 5 recorded")


class Checkpoint:
    """The fields that an exporter reads in the checkpoint metadata of vLLM."""

    def __init__(self, blocks: list[int], offsets: list[int]) -> None:
        self.state_indices = torch.tensor(blocks, dtype=torch.int32)
        self.checkpoint_offsets = torch.tensor(offsets, dtype=torch.int32)


def exported(layer: Layer, audit: StateAudit) -> tuple[Checkpoint, Tensor, Tensor]:
    """Write two checkpoints as vLLM does, to blocks 3 and 6. The other rows of the batch have none."""
    emitted = torch.randn(5, 4, 128, 64, generator=torch.Generator().manual_seed(9))
    checkpoint, rows = Checkpoint([0, 3, 6, 4], [64, 64, 128, 0]), torch.tensor([0, 1, 4, 0])
    layer.kv_cache[1][[3, 6]] = emitted[[1, 4]]
    audit.exported(layer, checkpoint, emitted, rows)
    return checkpoint, emitted, rows


def test_audit_compares_checkpoints_and_hits() -> None:
    audited = Audited([5], [4])
    layer, audit = audited.layer, audited.audit
    checkpoint, emitted, rows = exported(layer, audit)
    assert audit.summary()["checkpoints"] == 2
    plan = torch.zeros(4, 4, dtype=torch.int32)

    def hit(source: int, target: int) -> None:
        slots = torch.tensor([[source], [target]], dtype=torch.int32)
        layer.group.fold(plan, slots[0], slots[1], torch.tensor([1], dtype=torch.int32))
        audit.folded(layer.group, plan[:1])

    audit.assigned([3, 7])  # a hit and a new block
    hit(3, 7)
    assert audit.summary()["checkpoint_hits"] == 1
    # A wrong byte in the block, before and after the comparison of the export.
    audited.change_state(6)
    with pytest.raises(AuditError, match=r"in block 2 is not the checkpoint that vLLM wrote to block 6$"):
        hit(6, 2)
    with pytest.raises(AuditError, match=r"checkpoint of layer layer in block 6 is not the state .* after 128 tokens$"):
        audit.exported(layer, checkpoint, emitted, rows)
    # The block gets a new owner, which writes another state.
    audit.overwritten(layer.group, torch.tensor([6]))
    hit(6, 2)
    layer.group.cursors.table[3, 0] = 2
    with pytest.raises(AuditError, match=r"checkpoint of layer layer to block 3, where 2 rows of another window"):
        audit.exported(layer, checkpoint, emitted, rows)


def test_audit_follows_copied_and_loaded_blocks() -> None:
    audited = Audited([5], [4])
    layer, audit = audited.layer, audited.audit
    exported(layer, audit)
    audit._kept["layer", 4] = torch.zeros(0)
    audit.copied([(3, 7), (4, 3)])
    assert (sorted(audit._exported), sorted(audit._kept)) == (
        [("layer", 6), ("layer", 7)],
        [("layer", 3), ("layer", 4)],
    )
    audit.assigned([3, 6, 7])
    assert (sorted(audit._exported), sorted(audit._kept)) == ([("layer", 6), ("layer", 7)], [("layer", 4)])
    audit.assigned([6], may_be_loaded=True)
    assert sorted(audit._exported) == [("layer", 7)]


# ---------------------------------------------------------------- blocks that get a new owner


class Runner:
    """The parts of a runner that handle blocks. Groups 0 and 2 have one state. It notes the cursors it sees."""

    def __init__(self, cursors: Tensor, **config: Any) -> None:
        self.cursors, self.seen = cursors, []
        self.vllm_config = SimpleNamespace(kv_transfer_config=None, **config)
        self.req_states = SimpleNamespace(req_id_to_index={"known": 1})
        counts = numpy.array([[0, 2], [0, 9], [0, 1]], dtype=numpy.int32)
        self.block_tables = SimpleNamespace(num_blocks=SimpleNamespace(np=counts))

    def add_requests(self, scheduler_output: Any) -> None:
        self.seen.append(self.cursors.table[:, 0].tolist())

    update_requests = add_requests


def scheduled(new: dict[str, Any], cached: list[Any], copies: Any = None) -> Any:
    """The parts of a scheduler output that name blocks."""
    requests = [SimpleNamespace(req_id=name, block_ids=blocks) for name, blocks in new.items()]
    return SimpleNamespace(
        scheduled_new_reqs=requests,
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=cached),
        kv_cache_block_copies=copies,
    )


def test_new_owner_finds_nothing_pending() -> None:
    cursors = Cursors(12, torch.device("cpu"))
    cursors.table[1:] = torch.tensor([4, 1])
    runner = Runner(cursors)
    owners = BlockOwners(runner, [0, 2], cursors)
    patches = Patches("test")
    owners.attach(patches)
    patches.undo()  # a cache that is bound again
    owners.attach(patches)
    # One new request: blocks 1 and 2 in group 0, 3 in group 2, the null block. A known request: it had 4, 5 and 6.
    output = scheduled({"new": ([0, 1, 2], [8], [3]), "known": ([4, 5, 7], [8], [6])}, [])
    runner.add_requests(output)
    assert runner.seen == [[0, 0, 0, 0, 4, 4, 4, 0, 4, 4, 4, 4]]
    assert cursors.table[:, 1].tolist() == [0] + [1] * 11
    runner.update_requests(scheduled({}, [None, ([9], [8], []), None]))
    assert runner.seen[1] == [0, 0, 0, 0, 4, 4, 4, 0, 4, 0, 4, 4]
    # After a copy of whole blocks, rows that are pending in the source are also pending in the target, new or not.
    cursors.table[10] = torch.tensor([2, 0])
    runner.update_requests(scheduled({}, [([11], [8], [])], [(10, 11), (1, 5)]))
    assert runner.seen[2] == [0, 0, 0, 0, 4, 4, 4, 0, 4, 0, 2, 0]
    assert cursors.table[[1, 5, 10, 11]].tolist() == [[0, 1], [0, 1], [2, 0], [2, 0]]


def test_audit_follows_owners_and_copies() -> None:
    audited = Audited([5], [4])
    cursors, state = audited.layer.group.cursors, audited.layer.kv_cache[1]
    runner = Runner(cursors)
    owners = BlockOwners(runner, [0], cursors)
    owners.attach(Patches("test"))
    owners.listener = audit = audited.audit
    audited.run([1])
    runner.update_requests(scheduled({}, [], [(5, 2)]))
    assert sorted(audit._kept) == [("layer", 2), ("layer", 5)]
    # Block 5 goes to another request. The rows of its previous owner are not part of the new state.
    before = state[5].clone()
    runner.add_requests(scheduled({"new": ([5],)}, []))
    assert sorted(audit._kept) == [("layer", 2)]
    audited.run_unaudited([1])
    assert torch.equal(state[5], before)
    audit.forwarded("after the forward")


# ---------------------------------------------------------------- requests with invalid counts


def test_skipped_requests_stop_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a window skips such a request and counts it. The host knows it once the counter was copied."""
    state: Any = plugin.RecurrentEngine.__new__(plugin.RecurrentEngine)
    state.builders, state.folds_tails = [], False
    cursors = state._cursors = Cursors(1, torch.device("cpu"))
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    cursors.copy_skipped()
    cursors.num_skipped += 1
    cursors.copy_skipped()
    state.after_forward(None)  # the counter is copied a few times per second
    now[0] += 0.5
    cursors.copy_skipped()
    message = "the counts of accepted tokens of some requests are invalid.* states are not known, so the engine stops"
    with pytest.raises(CannotContinue, match=message):
        state.after_forward(None)


# ---------------------------------------------------------------- the ends of prompts


def test_ends_of_prompts_are_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests 0 and 2 of the batch are ends of prompts. recurrent_aligned.py compares the states."""
    folded: list[list[int]] = []
    builder = SimpleNamespace(plan=torch.zeros(1), fold_first_rows=lambda places: folded.append(places.tolist()))
    state = plugin.RecurrentEngine.__new__(plugin.RecurrentEngine)
    state.builders, state.folds_tails, state.listener = [builder, builder], False, None
    state._cursors = Cursors(1, torch.device("cpu"))

    class V2Runner:
        execute_model_state: Any = None

        @plugin.following_forwards
        def execute_model(self, tails: Any) -> str:
            if tails is not None:
                batch = SimpleNamespace(prefill_runs_as_decode_np=tails)
                self.execute_model_state = SimpleNamespace(input_batch=batch)
            return "output"

    runner = V2Runner()
    ends = numpy.array([True, False, True])
    assert runner.execute_model(ends) == "output"  # an engine without one state
    monkeypatch.setitem(plugin._engines, runner, state)
    runner.execute_model(ends)  # nothing else reads its states
    state.folds_tails, runner.execute_model_state = True, None
    runner.execute_model(None)  # a step without a forward
    runner.execute_model(numpy.zeros(3, dtype=bool))
    assert folded == []
    runner.execute_model(ends)
    assert folded == [[0, 2], [0, 2]]


# ---------------------------------------------------------------- prefix caching

BLOCK = 7  # tokens


def aligned_runner() -> tuple[Layer, AlignedStates, Any, Tensor]:
    columns = 12
    layer = Layer(slots=1 + 2 * columns)
    table = torch.arange(1, 1 + 2 * columns, dtype=torch.int32).view(2, columns)
    context = SimpleNamespace(block_size=BLOCK, num_states=2)
    widths = torch.tensor([6, 0], dtype=torch.int32)
    for name in PER_STATE:
        setattr(context, name, widths.clone())
    context.copied = []
    for name in ("run_fused_precopy", "run_fused_postprocess_align"):
        setattr(context, name, lambda *args, name=name: context.copied.append(name))
    aligned = AlignedStates(context, [(layer.group, table)], drafts=GEOMETRY.rows - 1, patches=Patches("test"))
    return layer, aligned, context, table


def test_step_inside_a_block_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, aligned, context, _ = aligned_runner()
    monkeypatch.setattr(aligned, "_block_size", 100)

    counts = [torch.tensor([number, 0], dtype=torch.int32) for number in (3, 3, 0, 1, 350)]
    column, source, bias, accepted, computed = counts
    mapping = torch.tensor([0])

    def launches(length: int, scheduled: int) -> bool:
        batch = SimpleNamespace(
            num_reqs=1,
            seq_lens_cpu_upper_bound=torch.tensor([length], dtype=torch.int32),
            num_scheduled_tokens=numpy.array([scheduled]),
        )
        assert aligned.preprocess_state(lambda *more: more, batch, 1) == (batch, 1)
        with Operations() as made:
            context.run_fused_precopy(1, column, source, bias, mapping)
            context.run_fused_postprocess_align(1, accepted, column, computed, mapping)
        return made.count > 0

    assert [length for length in range(300, 400) if launches(length, 4)] == [*range(300, 317), *range(397, 400)]
    assert launches(350, 60)


def test_launches_at_the_end_of_a_block() -> None:
    """The plan and the fold, before and after the step, and one sum. Each group of layers adds its two folds."""
    context = aligned_runner()[2]
    values = [torch.tensor([number, 0], dtype=torch.int32) for number in (0, -1, 1, 0, BLOCK - 1)]
    target, source, accepted, bias, computed = values
    for _ in range(2):  # the first step binds the fold
        with Operations() as made:
            context.run_fused_precopy(1, target, source, bias, torch.tensor([0]))
            context.run_fused_postprocess_align(1, accepted, target, computed, torch.tensor([0]))
    assert made.count == 5


# ---------------------------------------------------------------- supported engines


def engine(recurrent: bool = True, **found: Any) -> Any:
    """Return a supported configuration with these changes; ``a__b`` is ``config.a.b``."""
    config = SimpleNamespace(
        additional_config={"nwor": {"recurrent": recurrent}},
        device_config=SimpleNamespace(device_type="cuda"),
        use_v2_model_runner=True,
        num_speculative_tokens=3,
        speculative_config=SimpleNamespace(method="mtp"),
        model_config=SimpleNamespace(
            architecture="Qwen3NextForCausalLM", dtype=torch.bfloat16, hf_text_config=linear(2, 4, 64, 128)
        ),
        cache_config=SimpleNamespace(
            mamba_cache_mode="none", mamba_cache_dtype="auto", mamba_ssm_cache_dtype="float32"
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    return with_settings(config, **found)


@pytest.fixture
def any_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the checks of the vLLM version and of the CUDA library pass."""
    monkeypatch.setattr(supported, "_problem_of_vllm", lambda model: None)


@pytest.mark.usefixtures("any_vllm")
@pytest.mark.parametrize(
    ("found", "because"),
    [
        ({"device_config__device_type": "cpu"}, "device cpu: it uses vLLM's CUDA kernels"),
        ({"use_v2_model_runner": False}, "model runner V1: "),
        (
            KIMI | {"model_config__hf_text_config__linear_attn_config": KDA | {"use_full_rank_gate": True}},
            r"Kimi Linear with Kimi K3's gate .*: vLLM then creates Kimi K3's layer, which is another class",
        ),
        (
            KIMI | {"model_config__hf_text_config__linear_attn_config": KDA | {"head_dim": 96}},
            "recurrent: heads of values are 96 wide",
        ),
        ({"cache_config__use_replayssm": True}, "`--use-replayssm`: vLLM then keeps one state per request itself"),
        (
            {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}},
            "recurrent with KV connector LMCacheConnectorV1: vLLM starts no hybrid model with it",
        ),
        ({"parallel_config__use_ubatching": True}, "dual batch overlap: it has not been tried"),
        (
            {"speculative_config__method": "draft_model", "speculative_config__draft_model_config__is_hybrid": True},
            "a draft model with recurrent layers: it has not",
        ),
        ({"cache_config__mamba_ssm_cache_dtype": "float16"}, "recurrent: states are torch.float16: set"),
        ({"model_config__dtype": torch.float32}, "recurrent: keys are torch.float32"),
        ({"num_speculative_tokens": 32}, "recurrent: windows have 33 tokens, more than 32"),
        (
            {"model_config__hf_text_config__linear_key_head_dim": 192},
            "recurrent: heads of keys are 192 wide",
        ),
    ],
)
def test_each_refusal_gives_its_reason(found: dict[str, Any], because: str) -> None:
    assert supported.problem_of(engine()) is None
    with pytest.raises(RuntimeError, match=rf"^nwor: {because}.*\(recurrent was asked for; "):
        plugin.prepare(engine(**found), logging.getLogger("nwor"))


@pytest.mark.usefixtures("any_vllm")
@pytest.mark.parametrize(
    "architecture",
    ["Qwen3NextForCausalLM", "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration", "NemotronHForCausalLM"],
)
def test_replayssm_is_refused_before_weights(architecture: str) -> None:
    """Also for models that only vLLM's option serves: Kimi K3, and Mamba-2."""
    config = engine(cache_config__use_replayssm=True, model_config__architecture=architecture)
    loaded: list[Any] = []
    load_model = preparing(loaded.append)
    with pytest.raises(RuntimeError, match=r"^nwor: `--use-replayssm`: vLLM then keeps one state .*recurrent was"):
        load_model(SimpleNamespace(vllm_config=config))
    assert loaded == []
    config.additional_config = {}
    load_model(SimpleNamespace(vllm_config=config))
    assert len(loaded) == 1


@pytest.mark.usefixtures("any_vllm")
def test_a_class_of_another_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is refused. With ``on_unsupported="vanilla"`` it uses the other plugin's class."""
    from vllm.model_executor.custom_op import op_registry_oot

    class Theirs: ...

    monkeypatch.setitem(op_registry_oot, "QwenGatedDeltaNetAttention", Theirs)
    logger = Logger()
    reason = r"nwor: recurrent: .*Theirs is registered in place of QwenGatedDeltaNetAttention"
    with pytest.raises(RuntimeError, match=reason):
        plugin.prepare(engine(), logger)
    config = engine(additional_config={"nwor": {"recurrent": True, "on_unsupported": "vanilla"}})
    plugin.prepare(config, logger)
    plugin.attach(SimpleNamespace(vllm_config=config), logger, profiling=False)
    assert [re.sub(".*Theirs", "Theirs", line) for line in logger.said] == [
        "Theirs is registered in place of QwenGatedDeltaNetAttention"
    ] * 2
    assert op_registry_oot["QwenGatedDeltaNetAttention"] is Theirs


@pytest.mark.usefixtures("any_vllm")
@pytest.mark.parametrize(
    "found",
    [
        {"cache_config__mamba_cache_mode": "align"},
        {"cache_config__mamba_cache_mode": "align", "cache_config__prefix_match_unit": 64},
        {"lora_config": object()},
        KIMI | {"model_config__hf_text_config__linear_attn_config": KDA | {"gate_lower_bound": -5.0}},
        {"speculative_config__num_speculative_tokens_per_batch_size": [(1, 8, 2)]},
        {"speculative_config__enable_adaptive_verification": True},
        {"offload_config__uva__cpu_offload_gb": 1.0},
        # Without a draft model, `draft_model_config` is the target's configuration.
        {"speculative_config__method": "ngram", "speculative_config__draft_model_config__is_hybrid": True},
    ],
)
def test_features_that_do_not_affect_states_are_supported(found: dict[str, Any]) -> None:
    assert supported.problem_of(engine(**found)) is None


def test_this_vllm_is_refused_by_its_version() -> None:
    with pytest.raises(RuntimeError, match=r"nwor: vLLM 0\.32.* is not supported for recurrent; supported is 0\.33"):
        plugin.prepare(engine(), logging.getLogger("nwor"))


class Logger(logging.Logger):
    """The methods that the plugin calls of a logger."""

    def __init__(self) -> None:
        super().__init__("nwor")
        self.said: list[str] = []
        self.info_once = self.warning_once = lambda text, *values: self.said.append(text % values)


def test_on_unsupported_vanilla_only_logs_the_reason() -> None:
    config, logger = engine(), Logger()
    config.additional_config["nwor"]["on_unsupported"] = "vanilla"
    plugin.prepare(config, logger)
    plugin.attach(SimpleNamespace(vllm_config=config), logger, profiling=False)
    assert [line[:31] for line in logger.said] == ["nwor: recurrent: not active: vL"] * 2
    assert plugin.recurrent_engines() == []


@pytest.mark.usefixtures("any_vllm")
def test_recurrent_without_speculation() -> None:
    config = engine(speculative_config=None, num_speculative_tokens=0)
    assert supported.uses_recurrent(config)
    assert RecordGeometry.of(config).rows == 1


def test_decodes_without_drafts_are_windows() -> None:
    """A prompt's chunk of one token is a window only if the runner says that it runs as a decode."""
    from nwor_ops.vllm.recurrent.metadata import _decodes_of

    starts = torch.tensor([0, 1, 2, 3, 8, 8], dtype=torch.int32)  # the last request is padding
    batch = SimpleNamespace(query_start_loc_cpu=starts, is_prefilling=torch.tensor([False, False, True, True, False]))
    assert _decodes_of(batch).tolist() == [True, True, False, False, False]
    batch.is_prefilling = None  # as in the capture of a graph
    assert _decodes_of(batch).tolist() == [True, True, True, False, False]


def test_settings_of_each_form() -> None:
    for value, form in (("0", False), ("off", False), ("1", True), ("on", True), ("Exact", True), ("chunk", "chunk")):
        config = NworConfig.load({}, {"VLLM_NWOR_RECURRENT": value})
        assert (config.recurrent, config.chunk, config.wants_transaction) == (form, form == "chunk", False)
        assert NworConfig.load({"nwor": {"recurrent": value}}, {}) == config
    assert not NworConfig.load({"nwor": {"recurrent": True}}, {"VLLM_NWOR_RECURRENT": "0"}).recurrent
    for wrong in ("", "2", "lazy"):
        with pytest.raises(ValueError, match="VLLM_NWOR_RECURRENT must be true, false, 0, 1, off, exact or chunk"):
            NworConfig.load({}, {"VLLM_NWOR_RECURRENT": wrong})
    for other in (2, None, "lazy"):
        with pytest.raises(ValueError, match="nwor: recurrent must be true, false, 0, 1, off, exact or chunk, got"):
            NworConfig.load({"nwor": {"recurrent": other}}, {})


def chunked_engine(**found: Any) -> SimpleNamespace:
    """An engine with the chunk form and heads that it supports."""
    changes = {"model_config__hf_text_config": linear(2, 4, 128, 128)} | found
    return engine(additional_config={"nwor": {"recurrent": "chunk"}}, **changes)


@pytest.mark.usefixtures("any_vllm")
def test_records_of_the_chunk_form() -> None:
    config = chunked_engine(cache_config__mamba_ssm_cache_dtype="bfloat16")
    assert RecordGeometry.of(config) == CHUNK
    assert supported.uses_recurrent(config)
    config.num_speculative_tokens = 7
    assert RecordGeometry.of(config).parts["updates"][0][0] == 23 + 8
    assert supported.problem_of(config) is None
    blocks = {"cache_config__mamba_cache_mode": "align", "cache_config__mamba_block_size": 176}
    assert supported.problem_of(chunked_engine(**blocks)) is None


@pytest.mark.usefixtures("any_vllm")
@pytest.mark.parametrize(
    ("found", "because"),
    [
        (KIMI, "each channel of a key has a decay (KDA), and the kernel needs one per head"),
        ({"model_config__hf_text_config__linear_key_head_dim": 64}, "heads of keys are 64 wide, not 128"),
        ({"model_config__hf_text_config__linear_value_head_dim": 64}, "heads of values are 64 wide, not 128"),
        ({"num_speculative_tokens": 8}, "windows have 9 tokens, more than 8"),
        ({"model_config__dtype": torch.float16}, "the model's dtype is torch.float16, not torch.bfloat16"),
        ({"cache_config__prefix_match_unit": 24}, "prefix_match_unit: 24 tokens, not a multiple of 16"),
        ({"cache_config__mamba_cache_mode": "align", "cache_config__mamba_block_size": 136},
         "blocks of recurrent states: 136 tokens, not a multiple of 16"),
    ],
)  # fmt: skip
def test_engines_that_the_chunk_form_refuses(found: dict[str, Any], because: str) -> None:
    problem = str(supported.problem_of(chunked_engine(**found)))
    assert problem == f"VLLM_NWOR_RECURRENT=chunk: {because}; VLLM_NWOR_RECURRENT=exact supports it"


def test_vllm_s_cpu_engine_is_refused(engines: Engines) -> None:
    """It is refused when its cache is bound, because its runner loads a model with another method."""
    reason = r"nwor: device cpu: .*; model runner V1: .*recurrent was asked for"
    with pytest.raises(RuntimeError, match=reason):
        engines.run(prompts(1), nwor={"recurrent": True}, model=model_folder())
