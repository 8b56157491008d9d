"""Counters: on the /metrics of a real server, through nwor_ops.stats(), and compared with the scheduler's counts."""

from __future__ import annotations

import inspect
import itertools
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray_on_cpu
import torch
import yaml
from counted_session import CountedSession
from engines import ENGINE, ENVIRONMENT, NGRAM, SMALL, Engines, _run_requests, _sampling, model_folder, prompts
from prometheus import ALERTS, dashboard_expressions, promtool, scraping
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client import Counter as PrometheusCounter
from tiny_serve import Server, running
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

import nwor_ops
from nwor_ops import COUNTERS
from nwor_ops.config import NworConfig
from nwor_ops.recurrent.cursors import SkippedRequests
from nwor_ops.transaction import counters
from nwor_ops.vllm.environment import announce_variables
from nwor_ops.vllm.metrics import exporter, transport
from nwor_ops.vllm.metrics import worker as publishing
from nwor_ops.vllm.metrics.agreement import Agreement, SchedulerWatch, patch_scheduler_module
from nwor_ops.vllm.metrics.transport import CounterFile, Totals
from nwor_ops.vllm.metrics.worker import Publisher, SessionPublisher

K = NGRAM["num_speculative_tokens"]


# ---------------------------------------------------------------- a real server


@pytest.fixture(scope="module")
def server(engines: Engines) -> Iterator[Server]:
    """Start one server for all tests. It rejects environment variables that vLLM does not know."""
    started = Server({"VLLM_NWOR_MODE": "cow"}, "--fail-on-environ-validation")
    with running(started):
        yield started


def check_served(server: Server) -> None:
    """Run six clients in parallel; then the counters must equal the scheduler's."""
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(server.complete, prompts(6)))
    totals = server.metrics_at_rest()
    assert totals["nwor_windows_total"] > 0
    assert totals["nwor_draft_tokens_total"] == totals["vllm:spec_decode_num_draft_tokens_total"] > 0
    assert totals["nwor_committed_tokens_total"] == totals["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert totals["nwor_rejected_tokens_total"] > 0
    assert totals["nwor_draft_tokens_total"] == (
        totals["nwor_committed_tokens_total"] + totals["nwor_rejected_tokens_total"]
    )
    assert totals["nwor_cancelled_windows_total"] == totals["nwor_abandoned_windows_total"] == 0
    assert totals.get("nwor_vanilla_steps_total", 0) == 0
    assert totals["nwor_disagreements_total"] == 0


def test_serve_counts_what_vllm_counts(server: Server) -> None:
    check_served(server)


@pytest.mark.nightly
def test_serve_counts_what_vllm_counts_in_mode_stage(engines: Engines) -> None:
    server = Server({"VLLM_NWOR_MODE": "stage"})
    with running(server):
        check_served(server)
        assert "nwor: active, mode stage" in server.log


@pytest.mark.nightly
def test_serve_counts_what_vllm_counts_with_several_api_servers(engines: Engines) -> None:
    """Each server reports the counters of all, like vLLM's own counters, whose files are in the same folder."""
    server = Server({"VLLM_NWOR_MODE": "cow"}, "--api-server-count", "2")
    with running(server):
        check_served(server)
        counted = [server.scrape()["nwor_draft_tokens_total"] for _ in range(8)]
        assert counted == counted[:1] * 8
        assert set(counted[0]) == {(("engine", "0"), ("model_name", "tiny"))}
        processes = {path.stem.split("_")[1] for path in Path(server.folder).glob("*/counter_*.db")}
        assert len([name for name in processes if name.isdecimal()]) >= 2  # API servers with vLLM's counters
        server.stop()
        assert not list(Path(server.folder).glob("**/counter_*"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("executor", "mode", "devices"),
    [
        ("RayExecutorV2", "cow", (0, 2)),  # both ranks on a node without the server
        ("RayExecutorV2", "stage", (0, 2)),
        (
            "RayDistributedExecutor",
            "cow",
            (2,),
        ),  # the older executor needs a worker on the server's node, and nodes with different IPs
    ],
)
def test_serve_counts_what_the_workers_of_ray_count(
    engines: Engines, executor: str, mode: str, devices: tuple[int, ...]
) -> None:
    """Two ranks are Ray actors, and each is attached and audited.

    Their totals come with the output of a step, so those of one step arrive with a later one.
    """
    ours = {"VLLM_NWOR_MODE": mode, "VLLM_NWOR_AUDIT": "1"}
    ours["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = str(int(executor == "RayExecutorV2"))
    arguments = ("--distributed-executor-backend", "ray", "--tensor-parallel-size", "2")
    with ray_on_cpu.cluster(devices) as (environment, logs):
        server = Server(environment | ours, *arguments)
        with running(server):
            with ThreadPoolExecutor(6) as pool:
                list(pool.map(server.complete, prompts(6)))
            counted = server.metrics_at_rest()
            server.complete(prompts(1, seed=1)[0], max_tokens=1)  # brings the counts
            totals = server.metrics_at_rest()
            assert totals["nwor_draft_tokens_total"] == counted["vllm:spec_decode_num_draft_tokens_total"] > 0
            assert totals["nwor_committed_tokens_total"] == counted["vllm:spec_decode_num_accepted_tokens_total"] > 0
            assert totals["nwor_rejected_tokens_total"] > 0
            assert totals["nwor_comparisons_total"] > 0
            assert totals["nwor_disagreements_total"] == 0
            attached = sum(f"nwor: active, mode {mode}, audited at every step" in log for log in logs())
            # Workers of the older executor log only warnings, for vLLM too.
            assert attached == (2 if executor == "RayExecutorV2" else 0)


def test_serve_labels_are_those_of_vllm(server: Server) -> None:
    samples = server.scrape()
    labels = set(samples["vllm:spec_decode_num_draft_tokens_total"])
    assert labels == {(("engine", "0"), ("model_name", "tiny"))}
    for counted, (name, _) in transport.METRICS.items():
        # Draft graphs and steps with one recurrent state are counted only if they are on.
        elsewhere = counted.startswith(("draft_", "one_state_"))
        assert set(samples.get(f"{name}_total", ())) == (set() if elsewhere else labels)


def test_serve_says_which_features_are_active(server: Server) -> None:
    import vllm

    samples = server.scrape()
    [(labels, value)] = samples["nwor_info"].items()
    states = {"transaction": "cow", "draft_graphs": "off", "recurrent": "off"}
    of_vllm = {"engine": "0", "model_name": "tiny", "vllm": vllm.__version__}
    assert (dict(labels), value) == (states | of_vllm | {"version": nwor_ops.__version__}, 1)
    [(labels, size)] = samples["nwor_memory_bytes"].items()
    assert dict(labels)["part"] == "undo_log"
    assert f"log {size / 2**20:.1f} MiB" in server.log


def test_the_host_time_of_a_step_is_counted(server: Server) -> None:
    before, started = server.metrics_at_rest(), time.monotonic()
    server.complete(prompts(1)[0])
    elapsed, after = time.monotonic() - started, server.metrics_at_rest()
    steps, seconds = (after[name] - before[name] for name in ("nwor_windows_total", "nwor_host_seconds_total"))
    assert steps > 0
    assert 0 < seconds < elapsed


def test_promtool_finds_nothing_wrong_with_our_metrics(server: Server) -> None:
    """Names, units, types and help texts are as Prometheus recommends. (vLLM's names have colons.)"""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    ours = [line for line in lines if re.match(r"(# \w+ )?nwor_", line)]
    assert len(ours) > 20
    done = promtool("check", "metrics", given="\n".join(ours) + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_expression_of_the_dashboard_and_of_the_alerts_returns_data(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus scrapes the server. Counts that this engine cannot make are added to its files: passes of a drafter,
    steps with one state, steps without the transaction."""
    [folder] = Path(server.folder).glob("nwor-metrics-*")
    monkeypatch.setenv(transport.DIRECTORY_VARIABLE, str(folder))
    added = CounterFile("added", _config())

    def count(number: int) -> None:
        counts = Counter(
            draft_graph_replays=number, draft_host_seconds=number,
            one_state_steps=number, one_state_host_seconds=number, one_state_skipped_requests=0,
        )  # fmt: skip
        reasons = Counter({"a reason": number})
        added.write(Totals(counts, reasons, reasons, reasons))

    count(1)
    try:
        with scraping(tmp_path, server.port) as prometheus:
            prometheus.wait_for("nwor_info")
            for number in range(2, 5):
                server.complete(prompts(1, seed=number)[0])
                count(number)
            prometheus.wait_for("rate(nwor_draft_graph_replays_total[1m]) > 0")
            prometheus.wait_for("rate(nwor_windows_total[1m]) > 0")
            expressions = dashboard_expressions()
            for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
                # An alert that does not fire has no sample: ask for its left side, or for its metric.
                left = re.sub(r'\{\w+="missing"\}', "", rule["expr"]).split(" > ")[0].split(" unless ")[0]
                expressions.append(left.replace("[5m]", "[1m]"))
            # A quotient of two rates is NaN until both counters have grown between two scrapes: keep the server busy.
            numbers = itertools.count(5)
            deadline = time.monotonic() + 120
            for expression in expressions:
                while not prometheus.has_numbers(expression):
                    assert time.monotonic() < deadline, expression
                    number = next(numbers)
                    server.complete(prompts(1, seed=number)[0])
                    count(number)
            firing = prometheus.query("count by (job, instance) (vllm:num_requests_running) unless "
                                      "count by (job, instance) (nwor_info)")  # fmt: skip
            assert firing == []
    finally:
        added.path.unlink()


def test_serve_agrees_with_the_scheduler_when_clients_hang_up(server: Server) -> None:
    """The scheduler does not count the last drafts of an aborted request. The comparison allows for that
    and continues."""
    before = server.metrics_at_rest()
    aborted = 4
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(server.hang_up, prompts(aborted, seed=1)))
        list(pool.map(server.complete, prompts(6, seed=2)))
    server.metrics_at_rest()
    server.complete(prompts(1)[0])  # the comparison runs when the scheduler runs a step
    totals = server.metrics_at_rest()
    uncounted = totals["nwor_draft_tokens_total"] - totals["vllm:spec_decode_num_draft_tokens_total"]
    assert 0 <= uncounted <= aborted * K
    assert totals["nwor_draft_tokens_total"] == (
        totals["nwor_committed_tokens_total"] + totals["nwor_rejected_tokens_total"]
    )
    assert totals["nwor_comparisons_total"] > before["nwor_comparisons_total"]
    assert totals["nwor_disagreements_total"] == 0
    assert "counters disagree" not in server.log


def test_vllm_knows_the_variables(server: Server) -> None:
    """vLLM does not warn, and the server, which rejects unknown variables, has started."""
    assert "Unknown vLLM environment variable" not in server.log


@pytest.mark.nightly
def test_emit_metrics_off_shows_nothing(engines: Engines) -> None:
    """test_emit_metrics_off_exports_nothing has the same for an engine in a test's process."""
    server = Server({"VLLM_NWOR_MODE": "cow", "VLLM_NWOR_EMIT_METRICS": "0"}, "--fail-on-environ-validation")
    with running(server):
        server.complete(prompts(1)[0])
        totals = server.metrics_at_rest()
        assert totals["vllm:spec_decode_num_draft_tokens_total"] > 0
        assert not [name for name in totals if "nwor" in name]
        assert "nwor: active" in server.log
        assert not list(Path(server.folder).glob("nwor-metrics-*"))


def test_files_are_private_and_removed(server: Server) -> None:
    """Runs after the other tests with a server, because it stops it."""
    [folder] = Path(server.folder).glob("nwor-metrics-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [path.name for path in folder.glob("counter_*")]
    assert all(name.startswith(f"counter_{folder.name}-") for name in files)
    assert {name.removeprefix(f"counter_{folder.name}-").split("-")[0] for name in files} == {
        "worker",
        "scheduler",
    }
    assert [path.name for path in folder.glob("gauge_*")] == [next(folder.glob("gauge_mostrecent_*-core-*.db")).name]
    server.stop()
    assert not folder.exists()


# ---------------------------------------------------------------- vLLM's LLM


TAMPERS = [("drafted", 3), ("drafted", -8), ("accepted", 1), ("accepted", -1)]
ABORT = {5: ["1"], 9: ["2", "3"], 20: ["6"]}  # requests by step


def _llm_job(environment: dict[str, str], arguments: dict[str, Any], tamper: bool) -> dict[str, Any]:
    """Run two workloads with aborts. If asked, run more with a counter that is falsified and repaired."""
    os.environ.update(ENVIRONMENT | environment)
    transport.PERIOD = 0.02
    from vllm import LLM

    import nwor_ops.vllm

    llm = LLM(**ENGINE | {"model": model_folder(**SMALL), "dtype": "float32"} | arguments)
    in_process = bool(nwor_ops.vllm.sessions())
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm").addHandler(handler)

    def work(seed: int) -> dict[str, Any]:
        requests = prompts(8, seed=seed)
        sampling = [_sampling(index, 0.0, 80) for index in range(len(requests))]
        _run_requests(llm, requests, sampling, ABORT)
        time.sleep(0.1 if in_process else 1.5)  # the period of the engine core
        return nwor_ops.stats().as_dict()

    result: dict[str, Any] = {"in_process": in_process, "stats": [work(0), work(1)], "tampered": []}
    result["vllm"] = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    result["exported"] = sorted({family.name for family in REGISTRY.collect() if family.name.startswith("nwor_")})
    result["folder"] = os.environ.get(transport.DIRECTORY_VARIABLE)
    for counter, amount in TAMPERS if tamper else ():
        [session] = nwor_ops.vllm.sessions()
        counters = session.manager.buffers.counters
        counters[COUNTERS.index(counter)] += amount
        # On a busy machine the publisher's thread may not run during a whole workload: try again.
        before = nwor_ops.stats().disagreements
        false = next((now for _ in range(20) if (now := work(2)["disagreements"]) > before), before)
        counters[COUNTERS.index(counter)] -= amount
        work(3)  # compares once more with what was published while the counter was wrong
        mended = [work(4)["disagreements"], work(5)["disagreements"]]
        while mended[-2] != mended[-1] and len(mended) < 10:
            mended.append(work(6)["disagreements"])
        result["tampered"].append([false, *mended[-2:]])
    result["warnings"] = [text for text in warnings if text.startswith("nwor:")]
    return result


def _run_llm(
    engines: Engines, environment: dict[str, str] | None = None, tamper: bool = False, **arguments: Any
) -> dict[str, Any]:
    settings = {"additional_config": {"nwor": {"mode": "cow"}}} | arguments
    return engines.submit(_llm_job, environment or {}, settings, tamper).result()


def _check_agreement(result: dict[str, Any]) -> None:
    first, second = result["stats"]
    assert first["engines"] == second["engines"] == 1
    assert 0 < first["windows"] < second["windows"]
    assert second["drafted"] == second["accepted"] + second["rejected"]
    assert second["drafted"] >= result["vllm"]["vllm:spec_decode_num_draft_tokens"] > 0
    assert second["accepted"] >= result["vllm"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert second["comparisons"] > first["comparisons"] > 0
    assert second["disagreements"] == 0


def test_agreement_with_aborts_and_a_false_counter(engines: Engines) -> None:
    """A wrong counter is found each time, logged once with both numbers, and accepted again after it is repaired.

    The engine continues.
    """
    result = _run_llm(engines, tamper=True)
    assert result["in_process"]
    _check_agreement(result)
    assert {"nwor_windows", "nwor_draft_tokens"} <= set(result["exported"])
    assert result["folder"] is not None
    before = 0
    for tamper, (false, mended, later) in zip(TAMPERS, result["tampered"], strict=True):
        assert before < false <= mended == later, tamper
        before = later
    [message] = result["warnings"]
    assert re.search(r"counters disagree: nwor counted \d+ drafts and \d+ accepted, the scheduler \d+ and", message)


def test_emit_metrics_off_exports_nothing(engines: Engines) -> None:
    """The counters stay in the engine's process, and nothing compares them with the scheduler's."""
    result = _run_llm(engines, {"VLLM_NWOR_EMIT_METRICS": "0"})
    assert (result["exported"], result["folder"]) == ([], None)
    assert result["stats"][1]["windows"] > 0
    assert result["stats"][1]["comparisons"] == 0
    assert result["vllm"]["vllm:spec_decode_num_draft_tokens"] > 0


@pytest.mark.long
def test_stats_and_agreement_of_an_engine_core_in_its_own_process(engines: Engines) -> None:
    model = model_folder()
    draft = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    result = _run_llm(engines, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, model=model, speculative_config=draft)
    assert not result["in_process"]
    _check_agreement(result)


# ---------------------------------------------------------------- the scheduler's counts


def _config(engine: int = 0, instance: str = "i") -> Any:
    """Return the configuration that a counter's labels come from."""
    return SimpleNamespace(
        instance_id=instance,
        parallel_config=SimpleNamespace(data_parallel_index=engine),
        model_config=SimpleNamespace(served_model_name="tiny"),
    )


class Scheduler:
    """The counting of the scheduler, which leaves out the drafts of requests that it has forgotten."""

    def __init__(self, nwor: dict[str, Any], ngram_gpu: bool = False, speculates: bool = True, **speculative: bool):
        speculative_config = SimpleNamespace(use_ngram_gpu=lambda: ngram_gpu, **speculative)
        self.vllm_config = _config()
        self.vllm_config.additional_config = {"nwor": nwor}
        self.vllm_config.speculative_config = speculative_config if speculates else None
        self.forgotten: set[str] = set()
        self.log_stats = True
        self.miscounts = 0
        self.stop_after: dict[str, int] = {}  # tokens of a request that stops before their end

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        stats = None
        for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            sampled = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[request]]
            if request not in self.forgotten and sampled:
                stats = stats or SpecDecodingStats.new(len(drafts))
                # One draft is missing, because a grammar forbade it.
                stats.observe_draft(len(drafts) - 1, len(sampled) - 1 + self.miscounts)
                del sampled[self.stop_after.get(request, len(sampled)) :]
        scheduler_stats = SchedulerStats(spec_decoding_stats=stats) if self.log_stats else None
        return {0: EngineCoreOutputs(), 1: EngineCoreOutputs(scheduler_stats=scheduler_stats)}


def _step(scheduler: Scheduler, **requests: tuple[int, int]) -> Any:
    """Return one step with the drafts and sampled tokens of each request."""
    return scheduler.update_from_output(
        SimpleNamespace(scheduled_spec_decode_tokens={name: [-1] * drafts for name, (drafts, _) in requests.items()}),
        SimpleNamespace(
            req_id_to_index={name: index for index, name in enumerate(requests)},
            sampled_token_ids=[[7] * sampled for _, sampled in requests.values()],
        ),
    )


@pytest.fixture
def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Return a scheduler whose every step is compared right away."""
    monkeypatch.setattr(transport, "PERIOD", 0)
    scheduler = Scheduler({"mode": "cow"})
    SchedulerWatch(scheduler, logging.getLogger())
    return scheduler


@pytest.fixture
def worker(folder: Path) -> CounterFile:
    return CounterFile("worker", _config())


def _publish(worker: CounterFile, drafted: int, accepted: int, **vanilla_steps: int) -> None:
    worker.write(Totals(Counter(drafted=drafted, accepted=accepted, abandoned=0), Counter(vanilla_steps)))


def _compared() -> tuple[int, int]:
    [path] = transport.files("scheduler-i-0")
    counts = transport.read([path]).counts
    return counts["comparisons"], counts["disagreements"]


def test_forgotten_requests_are_added(watched: Scheduler, worker: CounterFile) -> None:
    """They were aborted while the step ran, or stopped in the previous step under async scheduling."""
    assert set(_step(watched, a=(4, 3), b=(4, 5))) == {0, 1}
    watched.forgotten.add("b")
    _publish(worker, 16, 7)
    _step(watched, a=(4, 1), b=(4, 2))
    assert _compared() == (1, 0)


@pytest.mark.parametrize("forgotten", [(), ("b",)])
@pytest.mark.parametrize("log_stats", [True, False])
def test_tokens_past_a_stop_were_accepted_too(
    watched: Scheduler, worker: CounterFile, log_stats: bool, forgotten: tuple[str, ...]
) -> None:
    """vLLM removes them from the step's output after it has counted them."""
    watched.log_stats, watched.stop_after = log_stats, {"a": 2}
    watched.forgotten.update(forgotten)
    _publish(worker, 8, 5)
    _step(watched, a=(4, 5), b=(4, 2))
    assert _compared() == (1, 0)


@pytest.mark.parametrize(("log_stats", "disagreements"), [(True, 1), (False, 0)])
def test_the_scheduler_is_asked_what_it_counted(
    watched: Scheduler, worker: CounterFile, log_stats: bool, disagreements: int
) -> None:
    """The scheduler's own count is used, unless its statistics are off."""
    watched.log_stats, watched.miscounts = log_stats, -1
    _publish(worker, 8, 6)
    _step(watched, a=(4, 3), b=(4, 5))
    assert _compared() == (1, disagreements)


def test_forgotten_requests_without_tokens_may_have_accepted_any(watched: Scheduler, worker: CounterFile) -> None:
    watched.forgotten.add("b")
    _publish(worker, 8, 5)
    _step(watched, a=(4, 3), b=(4, 0))
    _publish(worker, 12, 9)
    _step(watched, a=(4, 3))
    assert _compared() == (2, 1)  # between 2 and 6, then between 4 and 8


def test_nothing_is_compared_after_a_step_without_the_transaction(
    watched: Scheduler, worker: CounterFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    _publish(worker, 4, 1, vanilla=1)
    _step(watched, a=(4, 2), b=(4, 3))
    _publish(worker, 5, 0)
    _step(watched, a=(4, 3))
    assert _compared() == (0, 0)
    assert [record.getMessage() for record in caplog.records] == [
        "nwor: counters are no longer compared with the scheduler's: a step ran without the transaction"
    ]


def test_nothing_is_compared_after_a_new_cache_was_bound(watched: Scheduler, worker: CounterFile) -> None:
    _publish(worker, 4, 1)
    _step(watched, a=(4, 2))
    assert _compared() == (1, 0)
    _publish(CounterFile("worker", _config()), 0, 0)
    _step(watched, a=(4, 2))
    _publish(worker, 1, 1)
    _step(watched, a=(4, 2))
    assert _compared() == (1, 0)


def test_an_error_in_the_comparison_leaves_the_scheduler_alone(
    watched: Scheduler, worker: CounterFile, caplog: pytest.LogCaptureFixture
) -> None:
    worker.path.write_bytes(b"not a file of counters")
    assert set(_step(watched, a=(4, 3))) == {0, 1}
    assert set(_step(watched, a=(4, 3))) == {0, 1}
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "nwor: the comparison with the scheduler's counters failed"
    ]


def test_a_scheduler_that_counts_in_another_way_is_left_alone(folder: Path) -> None:
    class Another(Scheduler):
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any, more: Any) -> Any: ...  # type: ignore[override]

    scheduler = Another({"mode": "cow"})
    SchedulerWatch(scheduler, logging.getLogger())
    assert "update_from_output" not in vars(scheduler)


@pytest.mark.parametrize(
    ("arguments", "watched"),
    [
        ({"nwor": {"mode": "cow"}}, True),
        ({"nwor": {"mode": "cow", "emit_metrics": False}}, False),
        ({"nwor": {}}, False),
        ({"nwor": {"mode": "cow"}, "speculates": False}, False),
        ({"nwor": {"mode": "cow"}, "ngram_gpu": True}, False),
        ({"nwor": {"mode": "cow"}, "enable_adaptive_verification": True}, False),
    ],
)
def test_which_schedulers_are_watched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], watched: bool
) -> None:
    """No scheduler is watched if metrics are off, or if the worker verifies other drafts than the scheduler counts."""
    monkeypatch.setattr(Scheduler, "__init__", Scheduler.__init__)  # restored afterwards
    module: Any = SimpleNamespace(Scheduler=Scheduler, logger=logging.getLogger())
    patch_scheduler_module(module)
    patch_scheduler_module(module)
    assert ("update_from_output" in vars(Scheduler(**arguments))) is watched
    assert bool(transport.files()) is watched


# ---------------------------------------------------------------- the comparison


def test_the_comparison_waits_for_the_scheduler() -> None:
    agreement = Agreement()
    agreement.published(8, 5)
    assert agreement.compare() is None
    assert agreement.waiting
    agreement.step(4, 2, 2)
    assert agreement.compare() is None
    assert agreement.waiting
    agreement.step(4, 3, 3)
    agreement.step(4, 4, 4)
    assert agreement.compare() is None
    assert (agreement.comparisons, agreement.disagreements) == (1, 0)


def test_dropped_counts_lie_between_two_numbers() -> None:
    for accepted, disagreements in ((1, 1), (2, 0), (4, 0), (6, 0), (7, 1)):
        agreement = Agreement()
        agreement.step(4, 2, 2)
        agreement.step(4, 0, 4)
        agreement.published(8, accepted)
        agreement.compare()
        assert agreement.disagreements == disagreements, accepted


@pytest.mark.parametrize("published", [(7, 5), (9, 5), (8, 4), (8, 6), (0, 1)])
def test_a_pair_that_never_was_is_a_disagreement(published: tuple[int, int]) -> None:
    agreement = Agreement()
    for accepted in (2, 3, 1):
        agreement.step(4, accepted, accepted)
    agreement.published(*published)
    message = agreement.compare()
    assert message is not None
    assert f"nwor counted {published[0]} drafts and {published[1]} accepted" in message
    assert agreement.disagreements == 1


def test_totals_never_go_back() -> None:
    agreement = Agreement()
    for _ in range(4):
        agreement.step(4, 2, 2)
    agreement.published(12, 6)
    assert agreement.compare() is None
    agreement.published(8, 4)
    assert agreement.compare() is not None


def test_dropped_totals_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nwor_ops.vllm.metrics.agreement._MOST_STEPS", 8)
    agreement = Agreement()
    for _ in range(20):
        agreement.step(4, 2, 2)
    agreement.published(4, 2)
    assert agreement.compare() is None
    assert agreement.comparisons == 0
    agreement.published(76, 38)
    assert agreement.compare() is None
    assert agreement.comparisons == 1


# ---------------------------------------------------------------- from the device to Prometheus


def _publisher(session: CountedSession, *warming_up: Any) -> SessionPublisher:
    return SessionPublisher(session, CounterFile("worker", _config()), logging.getLogger(), *warming_up)


def _read(publisher: Publisher) -> Totals:
    return transport.read([publisher.file.path])


def test_publisher_leaves_out_the_warm_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, warming_up = CountedSession(), [True, True, False]
    publisher = _publisher(session, lambda: warming_up.pop(0))
    for _ in range(2):
        session.step(1, 4, 2, 2, 0)
        publisher.publish()
        assert _read(publisher).counts["windows"] == 0
    session.step(1, 4, 1, 3, 0)
    session.step(1, 3, 1, 2, 1)
    publisher.publish()
    # A step that follows soon is not copied. It is not fetched either, while others may follow.
    assert _read(publisher).counts["windows"] == 1
    monkeypatch.setattr(transport, "PERIOD", 0)
    session.begun += 1
    publisher.publish()
    assert _read(publisher).counts["windows"] == 1  # nor during a window
    session.begun -= 1
    publisher.publish()
    totals = _read(publisher)
    assert dict(totals.counts) == {
        "windows": 2,
        "drafted": 7,
        "accepted": 2,
        "rejected": 5,
        "cancelled": 0,
        "abandoned": 0,
        "host_seconds": 0,
    }
    assert totals.vanilla_steps == {"more drafts than log rows": 1}
    publisher.stop()
    assert session.listeners == []


def test_the_hosts_counts_leave_out_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of vLLM's two warm-ups runs steps with windows, and what is counted before them is kept out too."""
    from nwor_ops.vllm import plugin
    from nwor_ops.vllm.recurrent.plugin import OneState

    class Runner: ...

    runner, session = Runner(), SimpleNamespace(host_seconds=0.0, shadow_blocks=None, audit=None)
    builders = [SimpleNamespace(steps=0, host_seconds=0.0) for _ in range(2)]
    state = OneState.__new__(OneState)
    state._builders = builders
    monkeypatch.setitem(plugin._sessions, runner, session)
    monkeypatch.setitem(plugin.one_state._engines, runner, state)

    def step(model_runner: Any, *_: Any) -> str:
        session.host_seconds += 1.0
        for builder in builders:
            builder.steps += 1
            builder.host_seconds += 0.5
        return "warm"

    module: Any = ModuleType("vllm.v1.worker.gpu.warmup")
    for name in ("warmup_kernels", "run_mixed_prefill_decode_warmup"):
        setattr(module, name, step)
    plugin._patch_warmup_module(module)
    for name in ("warmup_kernels", "run_mixed_prefill_decode_warmup"):
        assert getattr(module, name)(runner, None, None) == "warm"
        assert getattr(module, name)(Runner(), None, None) == "warm"  # of an engine without a feature
        step(runner)
        counts = {"one_state_steps": 2, "one_state_host_seconds": 2.0, "one_state_skipped_requests": 0}
        assert (session.host_seconds, state._counts(0)) == (2.0, counts)


def test_an_engine_that_goes_to_sleep_says_so_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its counters are on the device, whose memory vLLM then releases. An error does not keep it awake."""
    from nwor_ops.vllm import plugin
    from nwor_ops.vllm.recurrent.plugin import OneState

    class Runner: ...

    class Worker:
        def __init__(self, model_runner: Any) -> None:
            self.model_runner = model_runner

        def sleep(self, level: int) -> str:
            said.append(f"sleep {level}")
            skipped.counter = None  # released
            return "asleep"

    def go_to_sleep() -> None:
        said.append("go_to_sleep")
        raise RuntimeError("planted")

    said: list[str] = []
    runner, session, state = Runner(), SimpleNamespace(go_to_sleep=go_to_sleep), OneState.__new__(OneState)
    skipped: Any = SkippedRequests(torch.device("cpu"))
    skipped.counter.fill_(3)
    state._builders, state._skipped, state._slept = [SimpleNamespace(steps=5, host_seconds=0.0)], skipped, None
    monkeypatch.setitem(plugin._sessions, runner, session)
    monkeypatch.setitem(plugin.one_state._engines, runner, state)
    module: Any = SimpleNamespace(Worker=Worker)
    plugin._patch_worker_module(module)
    assert module.Worker(runner).sleep(level=2) == "asleep"
    assert module.Worker(Runner()).sleep(1) == "asleep"  # of an engine without a feature
    assert said == ["go_to_sleep", "sleep 2", "sleep 1"]
    assert state.counted()["one_state_skipped_requests"] == 3
    [record] = caplog.records
    assert record.getMessage().startswith("nwor: copying counters failed: planted; the engine goes on without")


def test_a_step_that_begins_while_the_last_one_is_fetched_is_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have counted its drafts, but not yet their outcome."""
    session = CountedSession()
    publisher = _publisher(session)
    session.step(1, 4, 2, 2, 0)
    session.step(1, 4, 2, 2, 0)
    monkeypatch.setattr(transport, "PERIOD", 0)

    class Counters:
        is_cuda = False

        def to(self, *_: Any, **__: Any) -> Any:
            session.begun += 1
            counters[1] += 4
            return counters.clone()

    counters, session.counters = session.counters, Counters()  # type: ignore[assignment]
    publisher.publish()
    assert _read(publisher).counts["drafted"] == 4
    session.counters = counters
    session.counters[2] += 4
    session.counters[0] += 1
    session.listeners[0].ended()
    publisher.publish()
    assert (_read(publisher).counts["drafted"], _read(publisher).counts["accepted"]) == (12, 8)


def test_an_engine_falls_asleep_after_the_fetch_in_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM then releases the memory of the counters, which the publisher's thread is reading."""
    session = CountedSession()
    publisher = _publisher(session)
    for _ in range(2):  # the second step is not copied
        session.step(1, 4, 2, 2, 0)
    monkeypatch.setattr(transport, "PERIOD", 0)
    counters, reading, released = session.counters, threading.Event(), threading.Event()

    class Counters:
        is_cuda = False

        def to(self, *_: Any, **__: Any) -> Any:
            reading.set()
            assert not released.wait(0.3)
            return counters.clone()

    session.counters = Counters()  # type: ignore[assignment]
    thread = threading.Thread(target=publisher.publish)
    thread.start()
    assert reading.wait(60)
    publisher.sleeping()
    released.set()
    thread.join()
    assert not publisher.errors.counts
    assert _read(publisher).counts["windows"] == 2


def test_publisher_tells_reasons_apart(folder: Path) -> None:
    session = CountedSession()
    publisher = _publisher(session)
    session.vanilla_steps = Counter({"begin failed": 2, "cancelled": 1})
    publisher.stop()
    assert _read(publisher).vanilla_steps == {"begin failed": 2}


def test_publisher_that_cannot_write_says_so_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = CountedSession()
    folder.touch()
    publisher = _publisher(session)
    session.step(1, 4, 2, 2, 0)
    publisher.stop()
    [record] = caplog.records
    assert (record.levelname, record.getMessage()[:42]) == ("ERROR", "nwor: publishing counters failed: [Errno 1")
    assert publisher.errors.counts["publishing counters failed"] > 1


def test_nothing_that_a_publisher_does_stops_a_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the copy, such as a failed launch, of the final copy, and of a count that the thread reads."""
    monkeypatch.setattr(transport, "PERIOD", 0.01)
    session = CountedSession()
    publisher = _publisher(session)
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "_host", None)
        patch.setattr(publisher, "arrived", None)
        session.step(1, 4, 2, 2, 0)
        deadline = time.monotonic() + 60
        while publisher.errors.counts["publishing counters failed"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert publisher.errors.counts["copying counters failed"] == 1
    session.step(1, 4, 3, 1, 0)
    while _read(publisher).counts["drafted"] != 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _read(publisher).errors == publisher.errors.counts
    monkeypatch.setattr(session, "counters", None)
    publisher.stop()
    assert publisher.errors.counts["copying counters failed"] == 2
    said = [record.getMessage().split(":")[1].strip() for record in caplog.records if record.levelname == "ERROR"]
    assert sorted(said) == ["copying counters failed", "publishing counters failed"]


def test_metrics_that_cannot_start_stop_no_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no thread can be started")

    class Runner:
        vllm_config = _config()

    runner, session = Runner(), CountedSession()
    runner.vllm_config.additional_config = {}
    session.windows = 1  # type: ignore[attr-defined]
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(publishing, "CounterFile", fails)
    publishing.start(runner, session, logging.getLogger())  # type: ignore[arg-type]
    publishing.start_counting(session, "drafter", runner.vllm_config, logging.getLogger())
    assert session not in publishing.publishers
    assert [record.getMessage().split(";")[0] for record in caplog.records] == 2 * [
        "nwor: starting to count failed: no thread can be started"
    ]


def test_a_scrape_survives_an_invalid_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's metrics are in the same scrape."""
    publisher = _publisher(CountedSession())
    registry = _exported(monkeypatch)
    PrometheusCounter("vllm_own", "A metric of vLLM.", registry=registry)
    assert {"nwor_windows_total/0/tiny", "vllm_own_total/"} <= set(_values(registry))
    publisher.file.path.write_bytes(b"not a file of counters")
    for _ in range(2):
        assert "vllm_own_total/" in _values(registry)
    assert [record.getMessage()[:36] for record in caplog.records] == ["nwor: reading counters failed: Read "]


def test_publisher_does_not_keep_its_owner_alive(folder: Path) -> None:
    session = CountedSession()
    publisher = _publisher(session)
    del session
    publisher.publish()
    assert publisher._owner() is None


def test_publisher_of_what_the_host_counts(folder: Path) -> None:
    class Speculator:
        def counted(self) -> dict[str, int]:
            return {"draft_graph_replays": 3}

        def eager_passes(self) -> dict[str, int]:
            return {"mixed": 2}

    speculator = Speculator()
    publisher = Publisher(speculator, CounterFile("drafter", _config()), logging.getLogger())
    assert _read(publisher) == Totals(Counter(draft_graph_replays=3), eager_passes=Counter(mixed=2))


def _values(registry: CollectorRegistry) -> dict[str, float]:
    return {
        f"{sample.name}/{'/'.join(sample.labels[label] for label in sorted(sample.labels))}": sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def _exported(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    """Export as in the process in which vLLM created its metrics."""
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    exporter.export.__wrapped__(logging.getLogger())
    return registry


def test_a_scrape_adds_up_what_files_hold(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines, one of them started twice; an engine that ended keeps its share."""
    registry = _exported(monkeypatch)
    assert _values(registry) == {}
    first, other = CounterFile("worker", _config()), CounterFile("worker", _config(engine=1))
    first.write(Totals(Counter(drafted=5), Counter({"begin failed": 1})))
    other.write(Totals(Counter(drafted=100, accepted=0)))
    first.write(Totals(Counter(drafted=8), Counter({"begin failed": 1})))
    CounterFile("worker", _config(instance="j")).write(Totals(Counter(drafted=2), Counter({"begin failed": 2})))
    assert _values(registry) == {
        "nwor_draft_tokens_total/0/tiny": 10,
        "nwor_draft_tokens_total/1/tiny": 100,
        "nwor_committed_tokens_total/1/tiny": 0,
        "nwor_vanilla_steps_total/0/tiny/begin failed": 3,
    }
    [family] = [family for family in registry.collect() if family.name == "nwor_draft_tokens"]
    assert (family.type, family.documentation) == ("counter", transport.METRICS["drafted"][1])


def test_where_vllm_collects_files_ours_are_among_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is the case with several API servers. The totals are still those of one set of engines."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    (tmp_path / "shared").mkdir()
    monkeypatch.setenv(transport.SHARED_VARIABLE, str(tmp_path / "shared"))
    CounterFile("worker", _config()).write(Totals(Counter(drafted=8)))
    monkeypatch.setenv(transport.DIRECTORY_VARIABLE, str(tmp_path / "earlier"))
    CounterFile("worker", _config()).write(Totals(Counter(drafted=2)))
    assert _values(get_prometheus_registry()) == {"nwor_draft_tokens_total/0/tiny": 10}
    assert _values(_exported(monkeypatch)) == {}
    assert (exporter.totals([]).drafted, exporter.totals([]).engines) == (2, 1)
    assert not folder.exists()


@pytest.mark.parametrize("chosen", [True, False])
def test_stats_without_an_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    """There is no folder either if metrics are off."""
    if not chosen:
        monkeypatch.delenv(transport.DIRECTORY_VARIABLE)
    assert exporter.totals([]) == nwor_ops.stats()
    assert nwor_ops.stats().engines == nwor_ops.stats().windows == 0


def test_stats_adds_up_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine, drafted in ((0, 5), (1, 7)):
        CounterFile("worker", _config(engine)).write(Totals(Counter(drafted=drafted), Counter({"begin failed": 1})))
    CounterFile("scheduler", _config()).write(Totals(Counter(comparisons=9, disagreements=1)))
    monkeypatch.setattr(counters, "_sources", [])
    for _ in range(2):
        counters.add_source(_no_sessions)
    stats = nwor_ops.stats()
    assert (stats.engines, stats.drafted, stats.comparisons, stats.disagreements) == (2, 12, 9, 1)
    assert stats.vanilla_steps == {"begin failed": 2}


def _no_sessions() -> counters.EngineStats:
    return exporter.totals([])


# ---------------------------------------------------------------- the folder


def _choose() -> str:
    transport.choose_directory.cache_clear()
    transport.choose_directory()
    return os.environ[transport.DIRECTORY_VARIABLE]


def test_only_the_first_process_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(transport.DIRECTORY_VARIABLE, "/inherited")
    monkeypatch.setattr("multiprocessing.util.Finalize", lambda *_, **__: None)
    mine = _choose()
    assert mine != "/inherited"  # this process is not a multiprocessing child
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert _choose() == mine  # a child keeps its parent's folder
    monkeypatch.delenv(transport.DIRECTORY_VARIABLE)
    assert _choose() != mine


_CHILD = """
import multiprocessing
from collections import Counter
from types import SimpleNamespace
from nwor_ops.vllm.metrics import transport

CONFIG = SimpleNamespace(
    instance_id="i",
    parallel_config=SimpleNamespace(data_parallel_index=0),
    model_config=SimpleNamespace(served_model_name="tiny"),
)

def child():
    transport.choose_directory()
    transport.CounterFile("worker", CONFIG).write(transport.Totals(Counter(windows=1)))

def parent():
    child()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    print(transport.read(transport.files()).counts["windows"], transport.directory())

if __name__ == "__main__":
    %s
"""


@pytest.mark.parametrize(
    "start", ["parent()", "p = multiprocessing.get_context('fork').Process(target=parent); p.start(); p.join()"]
)
def test_the_first_process_removes_the_folder(start: str) -> None:
    """This holds even if it is a child of another process. Its own children write to the folder and leave it."""
    # Engines of other tests in this process may have named a folder. A forked child would use it, and leave it.
    environment = {name: value for name, value in os.environ.items() if name != transport.DIRECTORY_VARIABLE}
    command = [sys.executable, "-c", _CHILD % start]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    count, folder = ran.stdout.split()
    assert count == "2"
    assert not Path(folder).exists(), (sorted(Path(folder).glob("*")), ran.stderr)


def test_leftovers_of_killed_processes_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, strange = (
        tmp_path / f"{transport._PREFIX}{owner}-0123" for owner in (gone.pid, os.getpid(), "another")
    )
    for folder in (dead, alive, strange):
        folder.mkdir()
    monkeypatch.setenv(transport.DIRECTORY_VARIABLE, str(tmp_path / "new"))
    CounterFile("worker", _config()).write(Totals())
    assert not dead.exists()
    assert alive.exists()
    assert strange.exists()


def test_a_folder_that_was_removed_is_made_again(folder: Path) -> None:
    file = CounterFile("worker", _config())
    file.write(Totals(Counter(windows=1)))
    file.path.unlink()
    folder.rmdir()
    file.write(Totals(Counter(windows=2)))
    assert transport.read(transport.files()) == Totals(Counter(windows=2))
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_reader_never_sees_half_of_a_file(folder: Path) -> None:
    """Every pair that is read was written in one piece."""
    file = CounterFile("worker", _config())
    file.write(Totals(Counter(drafted=0, accepted=0)))
    seen, done = set(), threading.Event()

    def look() -> None:
        while not done.is_set():
            counts = transport.read([file.path]).counts
            seen.add((counts["drafted"], counts["accepted"]))

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(1, 300):
        file.write(Totals(Counter(drafted=number, accepted=number)))
    done.set()
    reader.join()
    assert len(seen) > 1
    assert all(drafted == accepted for drafted, accepted in seen)


@pytest.mark.parametrize("count", [1, 200])
def test_a_file_holds_as_many_values_as_there_are(folder: Path, count: int) -> None:
    totals = Totals(Counter(windows=2**53), Counter({f"reason {number}": number + 1 for number in range(count)}))
    file = CounterFile("worker", _config())
    file.write(totals)
    assert transport.read([file.path]) == totals


# ---------------------------------------------------------------- settings reach every process


def test_ray_workers_get_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    names = {"VLLM_NWOR_MODE", "VLLM_NWOR_EMIT_METRICS", "VLLM_NWOR_AUDIT", "VLLM_NWOR_ON_UNSUPPORTED"}
    for name in names:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv(transport.DIRECTORY_VARIABLE, "/tmp/x")
    copied = get_env_vars_to_copy(destination="RayWorkerWrapper")
    assert names <= copied
    assert transport.DIRECTORY_VARIABLE not in copied  # a folder on this host


@pytest.mark.parametrize("variable", ["VLLM_NWOR", "VLLM_NWOR_MODE"])
def test_announced_variables_are_known_to_vllm(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    import vllm.envs
    from vllm.platforms.interface import Platform

    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(vllm.envs, "environment_variables", dict(vllm.envs.environment_variables))
    monkeypatch.setenv(variable, "on")
    monkeypatch.setenv(transport.DIRECTORY_VARIABLE, "/tmp/x")
    with pytest.raises(ValueError, match=variable):
        Platform.validate_environ(hard_fail=True)
    announce_variables()
    announce_variables()
    Platform.validate_environ(hard_fail=True)
    assert vllm.envs.environment_variables[variable]() == "on"
    assert transport.DIRECTORY_VARIABLE not in vllm.envs.environment_variables


@pytest.mark.parametrize("variable", ["VLLM_NWOR", "VLLM_NWOR_MODE"])
def test_announced_variables_do_not_change_the_key_of_compiled_code(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    import vllm.envs

    for name in [name for name in os.environ if name.startswith("VLLM_NWOR")]:
        monkeypatch.delenv(name)
    table = {name: get for name, get in vllm.envs.environment_variables.items() if "NWOR" not in name}
    monkeypatch.setattr(vllm.envs, "environment_variables", dict(table))
    monkeypatch.setattr(vllm.envs, "compile_factors", inspect.unwrap(vllm.envs.compile_factors))
    vanilla = vllm.envs.compile_factors()
    assert vanilla
    monkeypatch.setenv(variable, "on")
    announce_variables()
    announce_variables()
    assert variable in vllm.envs.environment_variables
    assert (
        variable in inspect.unwrap(vllm.envs.compile_factors)()
    )  # without the plugin, vLLM would include it in the key
    assert vllm.envs.compile_factors() == vanilla


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("false", False), ("1", True)])
def test_emit_metrics_from_the_environment(value: str, expected: bool) -> None:
    assert NworConfig.load({}, {"VLLM_NWOR_EMIT_METRICS": value}).emit_metrics is expected


def test_emit_metrics_is_on_unless_told_otherwise() -> None:
    assert NworConfig.load({}, {}).emit_metrics
    assert not NworConfig.load({"nwor": {"emit_metrics": False}}, {}).emit_metrics
    with pytest.raises(ValueError, match="VLLM_NWOR_EMIT_METRICS must be 0 or 1"):
        NworConfig.load({}, {"VLLM_NWOR_EMIT_METRICS": "maybe"})
    with pytest.raises(ValueError, match="emit_metrics must be true or false"):
        NworConfig.load({"nwor": {"emit_metrics": 1}}, {})


def test_a_folder_that_cannot_be_made_stops_no_server(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def no_folder(logger: logging.Logger) -> None:
        raise OSError("no space left")

    module = SimpleNamespace(logger=logging.getLogger("vllm.test"))
    made = []

    class PrometheusStatLogger:
        def __init__(self, vllm_config: Any) -> None:
            made.append(vllm_config)

    module.PrometheusStatLogger = PrometheusStatLogger
    monkeypatch.setattr(exporter, "export", no_folder)
    exporter.patch_loggers_module(module)
    with caplog.at_level(logging.ERROR, "vllm.test"):
        module.PrometheusStatLogger(SimpleNamespace(additional_config={"nwor": {"mode": "cow"}}))
    assert len(made) == 1
    assert "export of counters failed: no space left" in caplog.text
