"""The messages of an engine if a feature that it asked for is not active in every worker."""

from __future__ import annotations

import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from engines import ENGINE, ENVIRONMENT, SMALL, Engines, model_folder

from nwor_ops.cli.bench import BenchOptions
from nwor_ops.cli.bench_report import OURS
from nwor_ops.config import NworConfig
from nwor_ops.vllm import feature_report, plugin
from nwor_ops.vllm.metrics import transport


def _gauges() -> dict[str, float]:
    """Return the published gauges: ``name{label=value,...}``, with the labels in order, without those of the engine."""
    from prometheus_client.multiprocess import MultiProcessCollector

    folder = transport.directory()
    files = [str(path) for path in folder.glob("gauge_*.db")] if folder else []
    found = {}
    for metric in MultiProcessCollector.merge(files):
        for sample in metric.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[f"{sample.name}{sorted(labels.items())}"] = sample.value
    return found


def _start_job(environment: dict[str, str], arguments: dict[str, Any], workers_without: bool) -> dict[str, Any]:
    """Start an engine, and return its warnings and its gauges. If asked, its workers are told to leave the plugin
    out."""
    os.environ.update(ENVIRONMENT | environment)
    if workers_without:
        import nwor_ops.vllm

        nwor_ops.vllm.register()
        os.environ["VLLM_PLUGINS"] = "another"
    from vllm import LLM

    with tempfile.NamedTemporaryFile("r") as log:  # vLLM configures its loggers again when an engine starts
        for stream in (1, 2):
            os.dup2(os.open(log.name, os.O_WRONLY | os.O_APPEND), stream)
        llm = LLM(**(ENGINE | {"model": model_folder(**SMALL)} | arguments))
        warnings = re.findall(r"WARNING .*\] (nwor: .*)", log.read())
    result = {"warnings": warnings, "gauges": _gauges()}
    llm.llm_engine.engine_core.shutdown()
    return result


def started(
    engines: Engines, environment: dict[str, str], workers_without: bool = False, **arguments: Any
) -> dict[str, Any]:
    return engines.submit(_start_job, environment, arguments, workers_without).result()


def info(transaction: str = "off", draft_graphs: str = "off", recurrent: str = "off") -> str:
    import vllm

    import nwor_ops

    states = {"transaction": transaction, "draft_graphs": draft_graphs, "recurrent": recurrent}
    return f"nwor_info{sorted((states | {'version': nwor_ops.__version__, 'vllm': vllm.__version__}).items())}"


def test_an_active_feature_is_told_with_its_memory(engines: Engines) -> None:
    result = started(engines, {"VLLM_NWOR_MODE": "cow"})
    assert result["warnings"] == []
    assert result["gauges"].pop("nwor_memory_bytes[('part', 'undo_log')]") > 0
    assert result["gauges"] == {info("cow"): 1}


def test_an_engine_that_does_not_speculate_warns(engines: Engines) -> None:
    """One state needs no drafts, but a GPU."""
    result = started(engines, {"VLLM_NWOR_MODE": "stage"}, speculative_config=None)
    transaction = "nwor: transaction: asked for, but not active: the engine does not speculate"
    assert result["warnings"] == [transaction]
    assert result["gauges"] == {info("missing"): 1}
    asked = {"VLLM_NWOR_MODE": "stage", "VLLM_NWOR_RECURRENT": "1", "VLLM_NWOR_ON_UNSUPPORTED": "vanilla"}
    result = started(engines, asked, speculative_config=None)
    assert result["warnings"][-2:] == [
        "nwor: one state per request: asked for (exact), but not active in rank 0 of 1; the log of the worker has the "
        "reason",
        transaction,
    ]
    assert result["gauges"] == {info("missing", recurrent="missing"): 1}


def test_a_refused_feature_that_the_engine_does_without_is_missing(engines: Engines) -> None:
    """Draft graphs need CUDA. The transaction is active."""
    asked = {"VLLM_NWOR_MODE": "stage", "VLLM_NWOR_DRAFT_GRAPHS": "1", "VLLM_NWOR_ON_UNSUPPORTED": "vanilla"}
    result = started(engines, asked)
    assert result["warnings"][-1] == (
        "nwor: draft graphs: asked for, but not active in rank 0 of 1; the log of the worker has the reason"
    )
    assert result["gauges"][info("stage", draft_graphs="missing")] == 1
    assert result["gauges"]["nwor_memory_bytes[('part', 'shadow_pages')]"] > 0


def test_workers_without_the_plugin_are_named(engines: Engines) -> None:
    """They are separate processes, in which vLLM was told to leave the plugin out."""
    result = started(
        engines, {"VLLM_NWOR_MODE": "cow"}, True, tensor_parallel_size=2, distributed_executor_backend="mp"
    )
    assert result["warnings"][-1] == (
        "nwor: transaction: asked for (cow), but not active in rank 0, 1 of 2; nwor_ops is not loaded in rank "
        "0, 1: is the package installed on that node?"
    )
    assert result["gauges"] == {info("missing"): 1}


# ---------------------------------------------------------------- the parts


def test_a_worker_without_the_package_can_answer(tmp_path: Path) -> None:
    """The question is pickled with its code."""
    pickled = tmp_path / "question"
    pickled.write_bytes(cloudpickle.dumps(feature_report._question()))
    code = f"import pickle; print(pickle.load(open({str(pickled)!r}, 'rb'))(None))"
    found = subprocess.run([sys.executable, "-S", "-c", _CLOUDPICKLE + code], capture_output=True, text=True)
    assert found.stdout == "None\n", found.stderr


# -S leaves out every installed package; cloudpickle is the one that vLLM's workers have.
_CLOUDPICKLE = f"import sys; sys.path.append({str(Path(cloudpickle.__file__).parents[1])!r}); import cloudpickle\n"


@pytest.mark.parametrize(
    ("workers", "state", "sentence"),
    [
        (["cow", "cow"], "cow", None),
        (["cow", "off"], "missing", "in rank 1 of 2; the log of the worker has the reason"),
        ([None, "cow", None], "missing", "in rank 0, 2 of 3; nwor_ops is not loaded in rank 0, 2"),
    ],
)
def test_every_worker_counts(workers: list[str | None], state: str, sentence: str | None) -> None:
    asked = feature_report.asked_for(NworConfig(mode="cow"))
    answers = [None if mode is None else asked | {"transaction": mode} for mode in workers]
    states, sentences = feature_report.compare(asked, answers)
    assert states == asked | {"transaction": state}
    assert len(sentences) == (sentence is not None)
    assert sentence is None or sentence in sentences[0]


@pytest.mark.parametrize(("asked_form", "label"), [(False, "off"), (True, "exact"), ("chunk", "chunk")])
def test_the_label_of_recurrent_states_is_their_form(asked_form: bool | str, label: str) -> None:
    asked = feature_report.asked_for(NworConfig(recurrent=asked_form))
    assert asked["recurrent"] == label
    assert feature_report.compare(asked, [dict(asked), dict(asked)]) == (asked, [])


@pytest.mark.parametrize("feature", ["transaction", "draft", "recurrent"])
def test_the_benchmark_waits_for_the_label_of_its_settings(feature: str, tmp_path: Path) -> None:
    options = BenchOptions(feature, (), tmp_path)
    label, value = options.label
    assert feature_report.asked_for(NworConfig.load({}, options.settings(OURS)))[label] == value


def test_a_worker_with_the_other_form_is_named() -> None:
    asked = feature_report.asked_for(NworConfig(recurrent="chunk"))
    states, sentences = feature_report.compare(asked, [dict(asked), asked | {"recurrent": "exact"}])
    assert states == asked | {"recurrent": "missing"}
    assert sentences == [
        "one state per request: asked for (chunk), but not active in rank 1 of 2; rank 1 has exact: are the settings "
        "of that node different?"
    ]


def test_a_worker_tells_the_form_of_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        drafter = None

    runner = Runner()
    for form in ("exact", "chunk"):
        state = SimpleNamespace(form=form, record_bytes=3)
        monkeypatch.setattr(plugin.one_state, "one_state_of", {runner: state}.get)
        features, memory = plugin.active_in(SimpleNamespace(model_runner=runner))
        assert (features["recurrent"], memory) == (form, {"records": 3})


def test_each_feature_that_needs_drafts_is_named_without_speculation(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(
        additional_config={"nwor": {"mode": "cow", "draft_graphs": True, "emit_metrics": False}},
        speculative_config=None,
    )
    feature_report.report(config, lambda question: [], logging.getLogger("nwor"))
    assert [record.getMessage() for record in caplog.records] == [
        f"nwor: {words}: asked for, but not active: the engine does not speculate"
        for words in ("transaction", "draft graphs")
    ]


def test_an_error_in_the_report_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    def ask(question: Any) -> Any:
        pickle.dumps(question)  # a plain pickle cannot hold it, and raises
        raise AssertionError

    config = SimpleNamespace(additional_config={"nwor": {"mode": "cow"}}, speculative_config=object())
    feature_report.report(config, ask, logging.getLogger("nwor"))
    [record] = caplog.records
    assert record.getMessage() == "nwor: it is not known which features are active in the workers"


def test_nothing_is_asked_if_nothing_is_switched_on(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[Any] = []
    config = SimpleNamespace(additional_config={}, speculative_config=object())
    feature_report.report(config, lambda question: asked.append(question) or [], logging.getLogger("nwor"))
    assert (asked, caplog.records) == ([], [])
