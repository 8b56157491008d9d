"""Which features are active in an engine: the labels of ``nwor_info``, the memory they take, the methods they patch."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
from engines import ENGINE, ENVIRONMENT, SMALL, Engines, model_folder, prompts, sampling

from nwor_ops.config import NworConfig
from nwor_ops.vllm import plugin

ON = ["_prepare_inputs", "_sample", "execute_model", "sample_tokens", "class initialize_kv_cache"]
OFF = ON[-1:]
STATES = {"transaction": "off", "draft_graphs": "off", "recurrent": "off", "draft_vocabulary": "off"}


def patched_methods(llm: Any) -> list[str]:
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from nwor_ops.vllm import hooks

    methods = [
        name for name in ("_prepare_inputs", "_sample", "execute_model", "sample_tokens") if name in vars(runner)
    ]
    if any((patch.owner, patch.name) == (GPUModelRunner, "initialize_kv_cache") for patch in hooks.applied()):
        methods.append("class initialize_kv_cache")
    return methods


def _report_job(variables: dict[str, str], arguments: dict[str, Any], workers_without: bool) -> dict[str, Any]:
    """Serve one request, and return the gauges and the warnings. If asked, workers leave the plugin out."""
    os.environ.update(ENVIRONMENT | variables)
    if workers_without:
        import nwor_ops.vllm

        nwor_ops.vllm.register()
        os.environ["VLLM_PLUGINS"] = "another"
    from prometheus_client import REGISTRY
    from vllm import LLM

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    llm = LLM(**(ENGINE | {"model": model_folder(**SMALL)} | arguments))
    logging.getLogger("vllm").addHandler(handler)
    llm.generate([{"prompt_token_ids": prompts(1)[0]}], sampling(0, 0.0, 8), use_tqdm=False)
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    result = {
        "states": [{name: sample.labels[name] for name in STATES} for sample in samples if sample.name == "nwor_info"],
        "memory": {sample.labels["part"]: sample.value for sample in samples if sample.name == "nwor_memory_bytes"},
        "patched": [] if workers_without else patched_methods(llm),
        "warnings": [line for line in lines if line.startswith("nwor: no feature")],
    }
    llm.llm_engine.engine_core.shutdown()
    return result


@pytest.mark.parametrize(
    ("nwor", "arguments", "states", "memory", "patched"),
    [
        ({"mode": "cow"}, {}, {"transaction": "cow"}, ["undo_log"], ON),
        # Draft graphs and one state need CUDA.
        (
            {"mode": "stage", "draft_graphs": "1", "recurrent": "1", "on_unsupported": "vanilla"},
            {},
            {"transaction": "stage", "draft_graphs": "missing", "recurrent": "missing"},
            ["shadow_pages"],
            ON,
        ),
        ({"mode": "stage"}, {"speculative_config": None}, {"transaction": "missing"}, [], OFF),
    ],
)
def test_report_of_an_engine(
    engines: Engines, nwor: dict[str, str], arguments: dict[str, Any], states: dict[str, str], memory: list[str],
    patched: list[str],
) -> None:  # fmt: skip
    """Switched on by the environment. Without speculation there is no transaction."""
    variables = {f"VLLM_NWOR_{name.upper()}": value for name, value in nwor.items()}
    result = engines.submit(_report_job, variables, arguments, False).result()
    assert result["states"] == [STATES | states]
    assert list(result["memory"]) == memory
    assert result["patched"] == patched
    assert all(size > 0 for size in result["memory"].values())
    assert result["warnings"] == []


@pytest.mark.long
def test_worker_without_the_plugin_is_reported(engines: Engines) -> None:
    """The worker is a separate process, in which vLLM was told to leave the plugin out."""
    arguments = {"distributed_executor_backend": "mp"}
    result = engines.submit(_report_job, {"VLLM_NWOR_MODE": "cow"}, arguments, True).result()
    assert (result["states"], result["memory"]) == ([], {})
    assert len(result["warnings"]) == 1


@pytest.mark.parametrize(("active", "state"), [("chunk", "chunk"), ("exact", "missing"), (None, "missing")])
def test_other_form_is_missing(active: str | None, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        drafter = None

    runner, recurrent = Runner(), SimpleNamespace(form=active, record_bytes=3)
    monkeypatch.setattr(plugin.recurrent, "recurrent_engine_of", {runner: recurrent if active else None}.get)
    report = plugin._feature_report(NworConfig(recurrent="chunk"), lambda: runner)
    assert {name: report["features"][name] for name in STATES} == STATES | {"recurrent": state}
    assert report["memory"] == ({"records": 3} if active else {})
