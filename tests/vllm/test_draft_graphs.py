"""Draft graphs without a GPU: settings, refusals, and a comparison with the drafts of the vLLM speculator.

Engines that replay graphs are in tests/gpu/vllm.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from draft_configs import MambaSpec, MLAAttentionSpec, engine_config, group
from processes import interpreted

from nwor_ops.config import NworConfig
from nwor_ops.vllm.draft_graphs import plugin as draft_graphs
from nwor_ops.vllm.draft_graphs.graphs import DUMMY_RUN, GraphedDrafter
from nwor_ops.vllm.draft_graphs.supported import check_attention, check_graph_mode
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.hooks import check_vllm
from nwor_ops.vllm.support.features import DRAFT_GRAPHS
from nwor_ops.vllm.support.refusals import Unsupported, check_engine

LOGGER = logging.getLogger("nwor")


@pytest.mark.long
def test_drafts_are_those_of_vllm_s_speculator() -> None:
    """Compare real speculators of the installed vLLM on the CPU. Ours runs the bodies of its graphs from the host."""
    said = dict(line.split(" ", 1) for line in interpreted("draft_speculators.py").splitlines())
    for name in ("greedy", "greedy-dynamic", "probabilistic", "probabilistic-dynamic"):
        ran = json.loads(said[name])
        # 40 batches, each run in one of three ways: all of it in "graphs", only the decode loop, or none of it.
        assert set(ran["eager"]) == {
            "first pass of a batch with prompts, or with fewer drafts in some request",
            "more requests than the largest graph",
            "the runner's buffers moved",
            "draft graphs failed",
        }
        assert ran["replays"]["first_pass"] > 15
        if name in ("greedy", "probabilistic"):
            assert ran["replays"]["decode"] > ran["replays"]["first_pass"]
        else:  # with at most one draft, only the first pass runs
            assert ran["replays"]["decode"] > 10
        assert ran["replays"]["first_pass"] + sum(ran["eager"].values()) == 40 + ran["repeated"]
    # vLLM's speculator under data parallelism: the target's tokens differ from those of its first pass.
    found = re.fullmatch(r"(\d+) (\d+), with (\d+) tokens and (\d+) requests", said["data-parallel"])
    assert found
    across, first_pass, tokens, requests = map(int, found.groups())
    assert across == tokens
    assert first_pass == tokens + requests


# ---------------------------------------------------------------- settings


def test_draft_graphs_want_no_transaction() -> None:
    config = NworConfig.load({"nwor": {"draft_graphs": True}}, {})
    assert config.draft_graphs
    assert not config.wants_transaction
    assert NworConfig.load({}, {"VLLM_NWOR_DRAFT_GRAPHS": "1"}) == config
    assert not NworConfig.load({"nwor": {"draft_graphs": True}}, {"VLLM_NWOR_DRAFT_GRAPHS": "0"}).draft_graphs
    assert NworConfig.load({"nwor": {"mode": "cow"}}, {}).wants_transaction
    assert not NworConfig.load({}, {}).draft_graphs


def test_a_value_that_is_no_switch_is_an_error() -> None:
    with pytest.raises(ValueError, match="draft_graphs must be true or false, got 'yes'"):
        NworConfig.load({"nwor": {"draft_graphs": "yes"}}, {})


# ---------------------------------------------------------------- refusals


def test_supported_engines_are_not_refused() -> None:
    for changes in (
        {"parallel_config__tensor_parallel_size": 2},
        {"lora_config": object()},
        {"speculative_config__num_speculative_tokens_per_batch_size": [(1, 8, 4)]},
    ):
        check_engine(engine_config(**changes), "cuda", DRAFT_GRAPHS)


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"speculative_config__method": "eagle"}, "speculation by eagle: draft graphs in model runner V2 are for"),
        ({"parallel_config__data_parallel_size": 2}, "data parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__use_ubatching": True}, "dual batch overlap"),
        ({"parallel_config__enable_eplb": True}, "expert load balancing"),
        ({"model_config__is_multimodal_model": True}, "a multimodal model"),
        ({"speculative_config__draft_model_config__is_multimodal_model": True}, "a multimodal model"),
        ({"model_config__is_encoder_decoder": True}, "an encoder-decoder model"),
        ({"speculative_config__enable_adaptive_verification": True}, "adaptive verification"),
        ({"watermark_config": object()}, "watermarking"),
        ({"kv_transfer_config": object()}, "KV connectors"),
        ({"offload_config__uva__cpu_offload_gb": 1}, "weight offloading"),
        ({"offload_config__prefetch__offload_group_size": 2}, "weight offloading"),
    ],
)
def test_each_refusal_has_its_sentence(changes: dict[str, Any], because: str) -> None:
    with pytest.raises(Unsupported, match=f"^{because}"):
        check_engine(engine_config(**changes), "cuda", DRAFT_GRAPHS)


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(Unsupported, match="device cpu: CUDA graphs need CUDA"):
        check_engine(engine_config(), "cpu", DRAFT_GRAPHS)


def test_attention_that_a_graph_cannot_follow_is_refused() -> None:
    check_attention([[group("FLASH_ATTN")], [], [group("TRITON_ATTN")]])
    for groups, because in (
        ([[group("FLASHINFER")]], "attention back end FLASHINFER: only FLASH_ATTN, TRITON_ATTN"),
        ([[group("TRITON_MLA", MLAAttentionSpec)]], "attention back end TRITON_MLA: only FLASH_ATTN"),
        ([[group("FLASH_ATTN", MambaSpec)]], "KV-cache spec MambaSpec: only"),
        ([[group("FLASH_ATTN")], [group("TRITON_ATTN", in_place=False)]], "TRITON_ATTN: here it cannot update"),
    ):
        with pytest.raises(Unsupported, match=because):
            check_attention(groups)


def test_graph_modes() -> None:
    from vllm.config.compilation import CUDAGraphMode

    for name in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        check_graph_mode(CUDAGraphMode[name])
    for name in ("NONE", "PIECEWISE"):
        with pytest.raises(Unsupported, match=f"cudagraph_mode {name}: .*no enforce_eager"):
            check_graph_mode(CUDAGraphMode[name])


def test_other_versions_of_vllm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    for version in ("0.32.0", "0.34.0", "0.330.1"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(Unsupported, match=f"vLLM {version} is not supported for draft graphs"):
            check_vllm(draft_graphs.V2_HOOKS, DRAFT_GRAPHS)


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    monkeypatch.setattr(vllm, "__version__", "0.33.0")
    check_vllm(draft_graphs.V2_HOOKS, DRAFT_GRAPHS)
    monkeypatch.setattr(StandaloneARSpeculator, "capture", lambda self, more: None)
    with pytest.raises(Unsupported, match=r"capture takes .*'more'.*, expected \(\)"):
        check_vllm(draft_graphs.V2_HOOKS, DRAFT_GRAPHS)


# ---------------------------------------------------------------- patches


def runner_module(name: str = draft_graphs.RUNNER_MODULE) -> Any:
    module = ModuleType(name)
    module.init_speculator = lambda vllm_config, device, req_states: "vLLM's"  # type: ignore[attr-defined]
    return module


def make(module: Any, config: Any, device: str = "cuda") -> Any:
    return module.init_speculator(config, SimpleNamespace(type=device), None)


def test_without_the_setting_vllm_s_speculator_is_used() -> None:
    module = runner_module()
    draft_graphs.patch_runner_module(module, LOGGER)
    assert make(module, engine_config(additional_config={})) == "vLLM's"
    assert make(module, engine_config(additional_config={"nwor": {"mode": "cow"}})) == "vLLM's"


def test_patching_twice_patches_once() -> None:
    module = runner_module()
    draft_graphs.patch_runner_module(module, LOGGER)
    once = module.init_speculator
    draft_graphs.patch_runner_module(module, LOGGER)
    assert module.init_speculator is once


def test_the_v1_runner_s_module_is_left_alone() -> None:
    module = runner_module("vllm.v1.worker.gpu_model_runner")
    before = module.init_speculator
    draft_graphs.patch_runner_module(module, LOGGER)
    assert module.init_speculator is before


def test_refused_at_start_up_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    module = runner_module()
    draft_graphs.patch_runner_module(module, LOGGER)
    with pytest.raises(RuntimeError, match=r"^nwor: speculation by eagle: .*VLLM_NWOR_ON_UNSUPPORTED=vanilla"):
        make(module, engine_config(speculative_config__method="eagle"))


def test_a_missing_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (
        SimpleNamespace(kind="cpu", problem=None),
        SimpleNamespace(kind="cuda", problem="libnwor_cuda.so is missing"),
    )
    monkeypatch.setattr("nwor_ops.library.loaded_libraries", lambda: found)
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    module = runner_module()
    draft_graphs.patch_runner_module(module, LOGGER)
    with pytest.raises(RuntimeError, match=r"^nwor: libnwor_cuda.so is missing \(draft graphs were asked for"):
        make(module, engine_config())


def test_refused_and_vanilla_on_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    module = runner_module()
    draft_graphs.patch_runner_module(module, LOGGER)
    settings = {"nwor": {"draft_graphs": True, "on_unsupported": "vanilla"}}
    config = engine_config(parallel_config__data_parallel_size=2, additional_config=settings)
    assert make(module, config) == "vLLM's"
    assert "draft graphs: not active: data parallelism" in caplog.text


def test_hooks_match_this_vllm() -> None:
    assert [hook.problem() for hook in draft_graphs.V2_HOOKS if hook.problem()] == []


# ---------------------------------------------------------------- captured sizes


@pytest.mark.parametrize(
    ("sizes", "rows", "tokens", "first", "decode"),
    [
        # Whole requests only. A size that is not a multiple is rounded up, if the largest size permits it.
        ([1, 2, 4, 8, 16, 24, 32, 40], 8, 512, [8, 7, 5, 4, 2, 1], [8, 7, 5, 4, 2, 1]),
        ([5, 10, 20, 320], 64, 8192, [64, 4, 2, 1], [64, 4, 2, 1]),
        # More requests than may run. A first pass of 4 x 6 tokens does not fit into batches of 20.
        ([5, 20, 100], 8, 20, [1], [4, 1]),
        ([1, 2], 8, 512, [], []),
        ([], 8, 512, [], []),
    ],
)
def test_captured_request_counts(sizes: list[int], rows: int, tokens: int, first: list[int], decode: list[int]) -> None:

    keys = capture_keys([4] * (rows + 1), sizes, tokens)
    assert keys == ({4: (first, decode)} if first or decode else {})
    # One draft: only a first pass.
    assert all(loops == [] for _, loops in capture_keys([1] * (rows + 1), sizes, tokens).values())


def capture_keys(schedule: list[int], sizes: list[int], tokens: int) -> dict[int, tuple[list[int], list[int]]]:
    """Return request counts of the first pass and of the loop, by number of drafts."""
    from nwor_ops.vllm.draft_graphs.speculator import GraphedDraftModelSpeculator

    config = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes, default=0))
    speculator = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=config),
        drafts_by_requests=schedule,
        max_num_reqs=len(schedule) - 1,
        max_num_tokens=tokens,
    )
    found = GraphedDraftModelSpeculator.capture_keys(speculator)  # type: ignore[arg-type]
    assert {key.query_len for drafts, keys in found.items() for key in keys} <= {1, *(drafts + 2 for drafts in found)}
    return {
        drafts: (
            [key.num_reqs for key in keys if key.query_len == drafts + 2],
            [key.num_reqs for key in keys if key.query_len == 1],
        )
        for drafts, keys in found.items()
    }


def test_captured_request_counts_of_a_dynamic_number_of_drafts() -> None:
    """A first pass covers all batches that had at most this many requests, because some requests may have ended.

    A loop covers the counts to which its batches are padded. Nothing is captured if only a first pass runs.
    """
    schedule = [0, 4, 4, 4, 2, 2, 2, 0, 0, 1]
    sizes = sorted({(drafts + 1) * requests for drafts in (0, 1, 2, 4) for requests in range(1, 10)})
    assert capture_keys(schedule, sizes, 512) == {
        4: ([3, 2, 1], [3, 2, 1]),
        2: ([6, 5, 4, 3, 2, 1], [6, 5, 4]),
        1: ([9, 8, 7, 6, 5, 4, 3, 2, 1], []),
        0: ([8, 7, 6, 5, 4, 3, 2, 1], []),
    }
    # Few sizes: batches are padded to a size of another number of drafts, up to the target's largest size.
    assert capture_keys(schedule, [5, 15, 18], 512) == {
        4: ([3, 1], [3, 2, 1]),
        2: ([6, 5, 2], [6, 5]),
        1: ([9, 8, 3], []),
        0: ([5], []),
    }


# ---------------------------------------------------------------- counters


@pytest.mark.parametrize(("registry", "runner_attribute"), [("_speculators", "speculator"), ("_proposers", "drafter")])
def test_runner_publishes_its_drafters_counts(registry: str, runner_attribute: str, monkeypatch: Any) -> None:
    """V2's speculator is our object. V1's drafter is vLLM's, and our object has it."""

    class Drafter(GraphedDrafter):
        capture_keys = None  # type: ignore[assignment]

    drafter: Any = Drafter()
    drafter.drafter = object()
    drafter.errors, drafter.graphs = Errors(LOGGER, ""), None
    drafter._eager = Counter({"mixed": 2, DUMMY_RUN: 5})
    monkeypatch.setattr(draft_graphs, registry, [drafter])
    runner = SimpleNamespace(**{runner_attribute: drafter if registry == "_speculators" else drafter.drafter})
    assert draft_graphs.counts(runner) == draft_graphs.counts(SimpleNamespace()) == {}  # before the capture
    passes = Counter({("decode", "loop"): 3, ("first_pass", "loop"): 1, ("decode", "eager"): 7})
    drafter.graphs = SimpleNamespace(loop=SimpleNamespace(counts=passes, host_seconds=0.25))
    assert draft_graphs.counts(runner) == {
        "draft_graph_replays": 4, "draft_host_seconds": 0.25, "draft_eager_reasons:mixed": 2,
    }  # fmt: skip
