"""Draft graphs in the V1 runner without a GPU: drafts compared with vLLM, refusals, attaching.

Engines that replay graphs are in tests/gpu/vllm.
"""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draft_configs import FullAttentionSpec, engine_config, group
from engines import Engines, prompts
from processes import interpreted

from nwor_ops.vllm.draft_graphs import plugin as draft_graphs
from nwor_ops.vllm.hooks import check_vllm
from nwor_ops.vllm.support.features import DRAFT_GRAPHS
from nwor_ops.vllm.support.refusals import Unsupported, check_engine

LOGGER = logging.getLogger("nwor")
FAILED = "draft graphs failed"
MIXED = "first pass of a batch with prompts, or with fewer drafts in some request"
TOO_LARGE = "more requests than the largest graph"
FEWER = "a number of drafts without graphs"
NEAR = "a request close to the model's length limit"
RANDOM = "drafts drawn at random"


@pytest.mark.long
def test_drafts_are_those_of_vllm_s_drafters() -> None:
    """Compare real drafters of the installed vLLM on the CPU. Ours runs the bodies of its graphs from the host."""
    lines = [line.split(" ", 1) for line in interpreted("draft_proposers.py").splitlines() if "replays" in line]
    ran = {name: json.loads(said) for name, said in lines}
    assert list(ran) == ["draft_model", "eagle", "eagle3", "mtp", "heterogeneous", "one", "probabilistic"]
    for name, report in ran.items():
        replays, eager, failed = report["replays"], report["eager"], report["failed"]
        assert replays["first_pass"] > (5 if name == "probabilistic" else 15)
        # The decode loop runs after every first pass, except with one draft.
        passes = replays["first_pass"] + eager[MIXED] - failed["run_first_pass"]
        assert replays["decode"] == (0 if name == "one" else passes)
        # 40 batches, each run in one of three ways: all of it in "graphs", only the decode loop, or none of it. Batches
        # that failed after their first pass ran it twice.
        assert replays["first_pass"] + sum(eager.values()) == 40 + failed["run_first_pass"] + failed["_propose"]
        assert {MIXED, TOO_LARGE, FEWER, FAILED} <= set(eager) <= {MIXED, TOO_LARGE, FEWER, FAILED, NEAR, RANDOM}
        assert (RANDOM in eager) == (name == "probabilistic")
    assert any(NEAR in report["eager"] for report in ran.values())


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "mtp"])
def test_methods_of_the_v1_runner(method: str) -> None:
    config = engine_config(use_v2_model_runner=False, speculative_config__method=method)
    check_engine(config, "cuda", DRAFT_GRAPHS)


def test_another_method_is_refused() -> None:
    config = engine_config(use_v2_model_runner=False, speculative_config__method="ngram")
    with pytest.raises(
        Unsupported, match=r"by ngram: draft graphs in model runner V1 are .*draft_model, eagle, eagle3"
    ):
        check_engine(config, "cuda", DRAFT_GRAPHS)


def test_hooks_match_this_vllm() -> None:
    assert [hook.problem() for hook in draft_graphs.V1_HOOKS if hook.problem()] == []


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    monkeypatch.setattr("vllm.__version__", "0.33.0")
    check_vllm(draft_graphs.V1_HOOKS, DRAFT_GRAPHS)
    monkeypatch.setattr(SpecDecodeBaseProposer, "_greedy_sample", lambda self, hidden_states, more: None)
    with pytest.raises(Unsupported, match=r"_greedy_sample takes .*'more'.*, expected \('hidden_states',\)"):
        check_vllm(draft_graphs.V1_HOOKS, DRAFT_GRAPHS)


class Runner(SimpleNamespace):
    """The parts of the runner that draft graphs use."""

    def capture_model(self) -> int:
        self.captured = True
        return 5


def proposer_of(runner: Any) -> Any:
    [found] = [proposer for proposer in draft_graphs._proposers if proposer.runner is runner]
    return found


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
        _freeze_gc=nullcontext,
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
        _slot_mapping_buffer=torch.zeros(16, dtype=torch.int64),
        **changes,
    )
    return drafter


def attach(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    monkeypatch.setattr("nwor_ops.library.loaded_libraries", lambda: (SimpleNamespace(kind="cuda", problem=None),))
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
def test_a_drafter_that_graphs_cannot_follow(
    changes: dict[str, Any], because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter()
    vars(drafter).update(changes)
    with pytest.raises(RuntimeError, match=f"^nwor: .*{because}.*draft graphs were asked for"):
        attach(make_runner(drafter), monkeypatch)
    assert "propose" not in vars(drafter)


def test_a_drafter_of_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="draft graphs in model runner V1: the drafter is a DFlashProposer"):
        attach(make_runner(make_drafter("dflash")), monkeypatch)


def test_piecewise_graphs_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.compilation import CUDAGraphMode

    dispatcher = SimpleNamespace(cudagraph_mode=CUDAGraphMode.PIECEWISE)
    with pytest.raises(RuntimeError, match="cudagraph_mode PIECEWISE: draft graphs follow the target"):
        attach(make_runner(make_drafter(), cudagraph_dispatcher=dispatcher), monkeypatch)


def test_refused_and_vanilla_on_request(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"nwor": {"draft_graphs": True, "on_unsupported": "vanilla"}}
    config = engine_config(use_v2_model_runner=False, parallel_config__data_parallel_size=2, additional_config=settings)
    drafter = make_drafter()
    attach(make_runner(drafter, vllm_config=config), monkeypatch)
    assert "draft graphs: not active: data parallelism" in caplog.text
    assert "propose" not in vars(drafter)


def test_an_engine_on_the_cpu_is_refused(engines: Engines) -> None:
    with pytest.raises(RuntimeError, match=r"nwor: vLLM .*draft graphs were asked for"):
        engines.run(prompts(1), nwor={"draft_graphs": True})


def test_an_engine_on_the_cpu_runs_without_on_request(engines: Engines) -> None:
    settings = {"draft_graphs": True, "mode": "cow", "on_unsupported": "vanilla"}
    result = engines.run(prompts(2), nwor=settings, max_tokens=8)
    assert result["session"]["stats"]["windows"] > 0  # the transaction is a separate setting


# ---------------------------------------------------------------- patches


def test_in_and_out_of_a_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the cache is bound again, the drafter gets a new loop around vLLM's own methods."""
    from vllm.v1.spec_decode.eagle import EagleProposer

    drafter = make_drafter()
    runner = make_runner(drafter)
    attach(runner, monkeypatch)
    first = proposer_of(runner)
    assert first.report().captured == {"first_pass": [], "decode": []}
    assert [(patch.owner is drafter, patch.name) for patch in first.patches] == [
        (True, "propose"),
        (False, "capture_model"),
    ]
    attach(runner, monkeypatch)
    second = proposer_of(runner)
    assert second is not first
    assert [patch.original.__func__ for patch in second.patches if patch.owner is drafter] == [EagleProposer.propose]
    assert list(draft_graphs._proposers) == [second]
    assert first.graphs is None
    second.detach()
    assert drafter.propose.__func__ is EagleProposer.propose
    assert runner.capture_model() == 5


def test_other_runners_and_engines_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)
    drafter = make_drafter()
    runner = make_runner(drafter)
    draft_graphs.attach(runner, draft_graphs.RUNNER_MODULE, LOGGER)
    attach(make_runner(drafter, vllm_config=engine_config(additional_config={})), monkeypatch)
    assert caplog.messages == []
    attach(make_runner(drafter, speculative_config=None), monkeypatch)
    assert caplog.messages == ["nwor: draft graphs: not active: the engine does not speculate"]
    assert "propose" not in vars(drafter)


def test_captured_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's sizes count K + 1 = 4 tokens per request. The compiled model takes at most 16."""
    drafter = make_drafter()
    sizes = {"cudagraph_capture_sizes": [4, 8, 16, 24], "max_cudagraph_capture_size": 24}
    drafter.vllm_config.compilation_config = SimpleNamespace(**sizes)
    runner = make_runner(drafter)
    attach(runner, monkeypatch)
    proposer = proposer_of(runner)
    found = [(key.num_reqs, key.query_len) for keys in proposer.capture_keys().values() for key in keys]
    assert found == [(4, 4), (2, 4), (1, 4), (4, 1), (2, 1), (1, 1)]


def test_no_size_that_holds_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM captures its graphs, and the log says that the drafter has none."""
    drafter = make_drafter()
    sizes = {"cudagraph_capture_sizes": [1, 2], "max_cudagraph_capture_size": 2}
    drafter.vllm_config.compilation_config = SimpleNamespace(**sizes)
    runner = make_runner(drafter)
    attach(runner, monkeypatch)
    with pytest.raises(RuntimeError, match=r"cudagraph_capture_sizes \[1, 2\]: none holds a batch of 4 tokens"):
        runner.capture_model()
    assert runner.captured
