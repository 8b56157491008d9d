"""Draft graphs without a GPU, for both runners: drafts compared with vLLM's, refusals, attaching, captured sizes.

Engines that replay graphs are in tests/gpu/vllm.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_configs import FullAttentionSpec, MambaSpec, MLAAttentionSpec, engine_config, group
from engines import Engines, prompts
from processes import interpreted

from nwor_ops.vllm.draft_graphs import plugin as draft_graphs
from nwor_ops.vllm.draft_graphs.graphs import DUMMY_RUN, FAILED, MIXED, TOO_LARGE
from nwor_ops.vllm.draft_graphs.supported import check_attention, check_graph_mode
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.hooks import check_vllm
from nwor_ops.vllm.support.features import DRAFT_GRAPHS
from nwor_ops.vllm.support.refusals import Unsupported, check_engine

LOGGER = logging.getLogger("nwor")
FEWER = "a number of drafts without graphs"
NEAR = "a request close to the model's length limit"
RANDOM = "drafts drawn at random"
V1 = {"use_v2_model_runner": False}
VANILLA = {"nwor": {"draft_graphs": True, "on_unsupported": "vanilla"}}


@pytest.fixture(autouse=True)
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the version and the library be supported ones."""
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    monkeypatch.setattr("nwor_ops.library.loaded_libraries", lambda: (SimpleNamespace(kind="cuda", problem=None),))


# ---------------------------------------------------------------- drafts


@pytest.mark.long
def test_speculator_drafts_what_vllm_drafts() -> None:
    """Compare real speculators of the installed vLLM on the CPU. Ours runs the bodies of its graphs from the host."""
    lines = dict(line.split(" ", 1) for line in interpreted("draft_speculators.py").splitlines())
    for name in ("greedy", "greedy-dynamic", "probabilistic", "probabilistic-dynamic"):
        ran = json.loads(lines[name])
        # 40 batches, each run in one of three ways: all of it in "graphs", only the decode loop, or none of it.
        assert set(ran["eager"]) == {
            MIXED,
            TOO_LARGE,
            FAILED,
        }
        assert ran["replays"]["first_pass"] > 15
        if name in ("greedy", "probabilistic"):
            assert ran["replays"]["decode"] > ran["replays"]["first_pass"]
        else:  # with at most one draft, only the first pass runs
            assert ran["replays"]["decode"] > 10
        assert ran["replays"]["first_pass"] + sum(ran["eager"].values()) == 40 + ran["repeated"]


@pytest.mark.long
def test_proposers_draft_what_vllm_drafts() -> None:
    """Compare real drafters of the installed vLLM on the CPU. Ours runs the bodies of its graphs from the host."""
    lines = [line.split(" ", 1) for line in interpreted("draft_proposers.py").splitlines() if "replays" in line]
    ran = {name: json.loads(report) for name, report in lines}
    assert list(ran) == ["draft_model", "eagle", "eagle3", "mtp", "heterogeneous", "one", "probabilistic"]
    for name, report in ran.items():
        replays, eager, failed = report["replays"], report["eager"], report["failed"]
        assert replays["first_pass"] > (5 if name == "probabilistic" else 15)
        # The decode loop runs after every first pass, except with one draft.
        passes = replays["first_pass"] + eager[MIXED] - failed["run_first_pass"]
        assert replays["decode"] == (0 if name == "one" else passes)
        # 40 batches, each run in one of three ways: all of it in "graphs", only the decode loop, or none of it. Batches
        # that failed after their first pass ran it twice.
        assert replays["first_pass"] + sum(eager.values()) == 40 + failed["run_first_pass"] + failed["_draft"]
        assert {MIXED, TOO_LARGE, FEWER, FAILED} <= set(eager) <= {MIXED, TOO_LARGE, FEWER, FAILED, NEAR, RANDOM}
        assert (RANDOM in eager) == (name == "probabilistic")
    assert any(NEAR in report["eager"] for report in ran.values())


def test_ops_are_vllm_s_kernels(tmp_path: Path) -> None:
    """The ops of family drafter give the results of the vLLM kernels, which run in Triton's interpreter."""
    said = interpreted("draft_kernels.py", str(tmp_path / "vllm_kernels.py"))
    assert said.strip() == "30 batches equal"


# ---------------------------------------------------------------- settings and refusals


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_config__tensor_parallel_size": 2},
        {"lora_config": object()},
        {"speculative_config__num_speculative_tokens_per_batch_size": [(1, 8, 4)]},
        *(V1 | {"speculative_config__method": method} for method in ("draft_model", "eagle", "eagle3", "mtp")),
    ],
)
def test_supported_engines_are_not_refused(changes: dict[str, Any]) -> None:
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
        (V1 | {"speculative_config__method": "ngram"}, "speculation by ngram: draft graphs in model runner V1 are"),
    ],
)
def test_each_refusal_has_its_sentence(changes: dict[str, Any], because: str) -> None:
    with pytest.raises(Unsupported, match=f"^{because}"):
        check_engine(engine_config(**changes), "cuda", DRAFT_GRAPHS)


def test_cpu_has_no_graphs(engines: Engines) -> None:
    """A vLLM of another version is named first. test_feature_report.py has an engine that goes on without them."""
    with pytest.raises(Unsupported, match="device cpu: CUDA graphs need CUDA"):
        check_engine(engine_config(), "cpu", DRAFT_GRAPHS)
    with pytest.raises(RuntimeError, match=r"nwor: vLLM .*draft graphs were asked for"):
        engines.run(prompts(1), nwor={"draft_graphs": True})


def test_other_attention_is_refused() -> None:
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


@pytest.mark.parametrize("hooks", [draft_graphs.V2_HOOKS, draft_graphs.V1_HOOKS])
def test_versions_and_signatures(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    assert [hook.problem() for hook in hooks if hook.problem()] == []
    check_vllm(hooks, DRAFT_GRAPHS)
    monkeypatch.setattr(StandaloneARSpeculator, "capture", lambda self, more: None)
    monkeypatch.setattr(SpecDecodeBaseProposer, "_greedy_sample", lambda self, more: None)
    with pytest.raises(Unsupported, match=r"(capture|_greedy_sample) takes .*'more'.*, expected \("):
        check_vllm(hooks, DRAFT_GRAPHS)
    for version in ("0.32.0", "0.34.0", "0.330.1"):
        monkeypatch.setattr("vllm.__version__", version)
        with pytest.raises(Unsupported, match=f"vLLM {version} is not supported for draft graphs"):
            check_vllm(hooks, DRAFT_GRAPHS)


# ---------------------------------------------------------------- patches of the V2 runner


def make_speculator(config: Any) -> Any:
    create = draft_graphs.creating(lambda vllm_config, device, req_states: "vLLM's")
    return create(config, SimpleNamespace(type="cuda"), None)


@pytest.mark.parametrize(
    "changes",
    [
        {"additional_config": {}},
        {"additional_config": {"nwor": {"mode": "cow"}}},
        {"additional_config": VANILLA, "parallel_config__data_parallel_size": 2},
    ],
)
def test_vllm_creates_its_own_speculator(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It does without the setting, and if a refusal is only a warning."""
    monkeypatch.setattr(draft_graphs, "vllm_logger", lambda: LOGGER)
    assert make_speculator(engine_config(**changes)) == "vLLM's"
    refused = changes.get("additional_config") == VANILLA
    assert ("draft graphs: not active: data parallelism" in caplog.text) == refused


def test_refusal_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"^nwor: speculation by eagle: .*VLLM_NWOR_ON_UNSUPPORTED=vanilla"):
        make_speculator(engine_config(speculative_config__method="eagle"))
    missing = SimpleNamespace(kind="cuda", problem="libnwor_cuda.so is missing")
    monkeypatch.setattr("nwor_ops.library.loaded_libraries", lambda: (missing,))
    with pytest.raises(RuntimeError, match=r"^nwor: libnwor_cuda.so is missing \(draft graphs were asked for"):
        make_speculator(engine_config())


# ---------------------------------------------------------------- patches of the V1 runner


class Runner(SimpleNamespace):
    """The parts of the runner that draft graphs use."""

    def capture_model(self) -> int:
        self.captured = True
        return 5


def proposer_of(runner: Any) -> Any:
    [proposer] = [drafter for drafter in draft_graphs._drafters if drafter.runner is runner]
    return proposer


def make_runner(drafter: Any, **changes: Any) -> Any:
    from vllm.config.compilation import CUDAGraphMode

    table = SimpleNamespace(block_table=SimpleNamespace(gpu=torch.zeros(4, 8, dtype=torch.int32)))
    runner = Runner(
        vllm_config=engine_config(use_v2_model_runner=False),
        device=SimpleNamespace(type="cuda"),
        speculative_config=object(),
        drafter=drafter,
        cudagraph_dispatcher=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        input_batch=SimpleNamespace(block_table=[table]),
    )
    vars(runner).update(changes)
    return runner


def speculation(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"num_speculative_tokens": 3, "enforce_eager": None, "num_speculative_tokens_per_batch_size": None} | changes
    )


def make_drafter(kind: str = "eagle", **changes: Any) -> Any:
    """Create a drafter of vLLM with the attributes that are read before it runs."""
    from vllm.v1.spec_decode.dflash import DFlashProposer
    from vllm.v1.spec_decode.eagle import EagleProposer

    class_ = {"eagle": EagleProposer, "dflash": DFlashProposer}[kind]
    drafter: Any = class_.__new__(class_)
    vars(drafter).update(
        vllm_config=engine_config(use_v2_model_runner=False),
        device=torch.device("cpu"),
        speculative_config=speculation(),
        parallel_drafting=False,
        constant_draft_positions=False,
        uses_mrope=False,
        supports_mm_inputs=False,
        _share_mtp_indices=False,
        draft_attn_groups=[group("FLASH_ATTN", FullAttentionSpec)],
        net_num_new_slots_per_request=0,
        max_batch_size=4,
        max_num_tokens=16,
        max_model_len=64,
        kv_cache_gid=0,
        pass_hidden_states_to_model=True,
        input_ids=torch.zeros(16, dtype=torch.int32),
        positions=torch.zeros(16, dtype=torch.int64),
        hidden_states=torch.zeros(16, 2),
        **changes,
    )
    return drafter


def attach(runner: Any) -> None:
    draft_graphs.attach(runner, draft_graphs.V1_RUNNER_MODULE, LOGGER)


@pytest.mark.parametrize(
    ("changes", "because"),
    [
        ({"parallel_drafting": True}, "parallel drafting has one pass"),
        ({"constant_draft_positions": True}, "its positions do not advance"),
        ({"uses_mrope": True}, "it has M-RoPE"),
        ({"supports_mm_inputs": True}, "it takes embeddings of images"),
        ({"_share_mtp_indices": True}, "its steps share the indices of the first"),
        ({"speculative_config": speculation(enforce_eager=True)}, "speculative_config has enforce_eager"),
        (
            {"speculative_config": speculation(num_speculative_tokens_per_batch_size=[(1, 8, 3)])},
            "its number of drafts is dynamic",
        ),
        (
            {"draft_attn_groups": [group("FLASHINFER")]},
            "attention back end FLASHINFER: only FLASH_ATTN, TRITON_ATTN are supported",
        ),
    ],
)
def test_other_drafters_are_refused(changes: dict[str, Any], because: str) -> None:
    drafter = make_drafter()
    vars(drafter).update(changes)
    with pytest.raises(RuntimeError, match=f"^nwor: .*{because}.*draft graphs were asked for"):
        attach(make_runner(drafter))
    assert "propose" not in vars(drafter)


def test_other_classes_and_modes_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    from vllm.config.compilation import CUDAGraphMode

    with pytest.raises(RuntimeError, match="draft graphs in model runner V1: the drafter is a DFlashProposer"):
        attach(make_runner(make_drafter("dflash")))
    dispatcher = SimpleNamespace(cudagraph_mode=CUDAGraphMode.PIECEWISE)
    with pytest.raises(RuntimeError, match="cudagraph_mode PIECEWISE: draft graphs follow the target"):
        attach(make_runner(make_drafter(), cudagraph_dispatcher=dispatcher))
    config = engine_config(**V1, parallel_config__data_parallel_size=2, additional_config=VANILLA)
    drafter = make_drafter()
    attach(make_runner(drafter, vllm_config=config))
    assert "draft graphs: not active: data parallelism" in caplog.text
    assert "propose" not in vars(drafter)


def test_new_cache_gets_a_new_loop() -> None:
    """When the cache is bound again, the drafter gets a new loop around vLLM's own methods."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    drafter = make_drafter()
    runner = make_runner(drafter)
    attach(runner)
    first = proposer_of(runner)
    assert first.report()["captured"] == {}
    assert [(patch.owner is drafter, patch.name) for patch in first.patches] == [
        (True, "propose"),
        (False, "capture_model"),
    ]
    attach(runner)
    second = proposer_of(runner)
    assert second is not first
    assert [patch.original.__func__ for patch in second.patches if patch.owner is drafter] == [EagleProposer.propose]
    assert list(draft_graphs._drafters) == [second]
    assert first.graphs is None
    second.detach()
    assert drafter.propose.__func__ is EagleProposer.propose
    assert runner.capture_model() == 5


def test_other_runners_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)
    drafter = make_drafter()
    runner = make_runner(drafter)
    draft_graphs.attach(runner, draft_graphs.RUNNER_MODULE, LOGGER)
    attach(make_runner(drafter, vllm_config=engine_config(additional_config={})))
    assert caplog.messages == []
    attach(make_runner(drafter, speculative_config=None))
    assert caplog.messages == ["nwor: draft graphs: not active: the engine does not speculate"]
    assert "propose" not in vars(drafter)


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
        extra_tokens=1,
        max_num_reqs=len(schedule) - 1,
        max_num_tokens=tokens,
    )
    graphs = GraphedDraftModelSpeculator.capture_keys(speculator)  # type: ignore[arg-type]
    assert all(key.query_len in (1, drafts + 2) for drafts, keys in graphs.items() for key in keys)
    return {
        drafts: (
            [key.num_reqs for key in keys if key.query_len == drafts + 2],
            [key.num_reqs for key in keys if key.query_len == 1],
        )
        for drafts, keys in graphs.items()
    }


def test_captured_counts_of_dynamic_drafts() -> None:
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


def test_captured_keys_of_a_proposer() -> None:
    """The target's sizes count K + 1 = 4 tokens per request. The compiled model takes at most 16.

    If no size holds a batch, vLLM captures its graphs, and the drafter's are refused.
    """

    def proposer(*sizes: int) -> tuple[Any, Any]:
        drafter = make_drafter()
        drafter.vllm_config.compilation_config = SimpleNamespace(
            cudagraph_capture_sizes=list(sizes), max_cudagraph_capture_size=max(sizes)
        )
        runner = make_runner(drafter)
        attach(runner)
        return runner, proposer_of(runner)

    _, drafter = proposer(4, 8, 16, 24)
    keys = [(key.num_reqs, key.query_len) for keys in drafter.capture_keys().values() for key in keys]
    assert keys == [(4, 4), (2, 4), (1, 4), (4, 1), (2, 1), (1, 1)]
    runner, _ = proposer(1, 2)
    with pytest.raises(RuntimeError, match=r"cudagraph_capture_sizes \[1, 2\]: none holds a batch of 4 tokens"):
        runner.capture_model()
    assert runner.captured


# ---------------------------------------------------------------- counters


@pytest.mark.parametrize("is_v2", [True, False])
def test_runner_publishes_its_drafters_counts(is_v2: bool, monkeypatch: Any) -> None:
    """V2's speculator is our object. V1's drafter is vLLM's, and our object has it."""
    from nwor_ops.vllm.draft_graphs.proposer import GraphedProposer
    from nwor_ops.vllm.draft_graphs.speculator import GraphedDraftModelSpeculator

    class_: Any = GraphedDraftModelSpeculator if is_v2 else GraphedProposer
    drafter = class_.__new__(class_)
    drafter.errors, drafter.graphs = Errors(LOGGER, ""), None
    drafter._eager = Counter({"mixed": 2, DUMMY_RUN: 5})
    monkeypatch.setattr(draft_graphs, "_drafters", [drafter])
    if is_v2:
        runner = SimpleNamespace(speculator=drafter)
    else:
        drafter.drafter = object()
        runner = SimpleNamespace(drafter=drafter.drafter)
    assert draft_graphs.counts(runner) == draft_graphs.counts(SimpleNamespace()) == {}  # before the capture
    passes = Counter({("decode", "loop"): 3, ("first_pass", "loop"): 1, ("decode", "eager"): 7})
    drafter.graphs = SimpleNamespace(loop=SimpleNamespace(counts=passes))
    assert draft_graphs.counts(runner) == {
        "draft_graph_replays": 4, "draft_eager_reasons:mixed": 2,
    }  # fmt: skip
