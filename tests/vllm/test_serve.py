"""A real server of vLLM's CPU engine: counters on its ``/metrics``, and what it does after errors of this package.

``test_errors.py`` has more errors, in engines of a test's process.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import planted_server
import pytest
import ray_on_cpu
import yaml
from agreement import check_agreement
from engines import NGRAM, Engines, prompts
from processes import environment
from prometheus import ALERTS, dashboard_expressions, promtool, scraping
from readme_serve import MAX_TOKENS
from tiny_serve import Server, running

import nwor_ops
from nwor_ops.vllm.metrics.names import METRICS
from nwor_ops.vllm.metrics.publisher import PERIOD

K = NGRAM["num_speculative_tokens"]
PATIENCE_SECONDS = 60.0
SAID = "nwor: {} failed: planted in {}; the engine goes on"


class PlantedServer(Server):
    """A server with our plugin and with planted_server.py, whose files are in ``planted``. It rejects environment
    variables that vLLM does not know."""

    def __init__(self, folder: Path, mode: str) -> None:
        planted_server.install(folder / "plugin")
        variables = {"VLLM_NWOR_MODE": mode, planted_server.FOLDER_VARIABLE: str(folder)}
        variables["PYTHONPATH"] = environment(folder / "plugin")["PYTHONPATH"]
        super().__init__(variables, "--fail-on-environ-validation")
        self.planted = folder


@pytest.fixture(scope="module")
def server(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedServer]:
    """Start one server for all tests. The last one ends it."""
    started = PlantedServer(tmp_path_factory.mktemp("planted"), "cow")
    with running(started):
        yield started


def check_served(server: Server) -> None:
    """Run six clients in parallel; then the counters must equal the scheduler's."""
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(server.complete, prompts(6)))
    totals = server.metrics_at_rest()
    check_agreement(totals)
    assert totals["nwor_windows_total"] > 0
    assert totals["nwor_committed_tokens_total"] > 0
    assert totals["nwor_rejected_tokens_total"] > 0
    assert totals["nwor_cancelled_windows_total"] == 0


def test_serve_counts_what_vllm_counts(server: Server) -> None:
    check_served(server)


@pytest.mark.nightly
def test_serve_counts_in_mode_stage(engines: Engines) -> None:
    server = Server({"VLLM_NWOR_MODE": "stage"}, "--disable-log-stats")
    with running(server):
        server.complete(prompts(1)[0])
        time.sleep(2 * PERIOD)
        server.complete([3, 4, 5], max_tokens=1)  # its output brings the last counts
        samples = server.metrics()
        assert samples["nwor_draft_tokens_total"] > 0
        assert "vllm:spec_decode_num_draft_tokens_total" not in samples
        assert "nwor: active, mode stage" in server.log


@pytest.mark.nightly
def test_several_api_servers_share_counts(engines: Engines) -> None:
    """Each server reports the counters of all, like vLLM's own counters."""
    server = Server({"VLLM_NWOR_MODE": "cow"}, "--api-server-count", "2")
    with running(server):
        check_served(server)
        counted = [server.scrape()["nwor_draft_tokens_total"] for _ in range(8)]
        assert counted == counted[:1] * 8
        assert set(counted[0]) == {(("engine", "0"), ("model_name", "tiny"))}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("executor", "mode", "devices"),
    [
        ("RayExecutorV2", "cow", (0, 2)),  # both ranks on a node without the server
        ("RayExecutorV2", "stage", (0, 2)),
        # The older executor needs a worker on the server's node, and nodes with different IPs.
        ("RayDistributedExecutor", "cow", (2,)),
    ],
)
def test_serve_counts_for_ray_workers(engines: Engines, executor: str, mode: str, devices: tuple[int, ...]) -> None:
    """Two ranks are Ray actors, and each is attached and audited."""
    ours = {"VLLM_NWOR_MODE": mode, "VLLM_NWOR_AUDIT": "1"}
    ours["VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = str(int(executor == "RayExecutorV2"))
    arguments = ("--distributed-executor-backend", "ray", "--tensor-parallel-size", "2")
    with ray_on_cpu.cluster(devices) as (variables, logs):
        server = Server(variables | ours, *arguments)
        with running(server):
            check_served(server)
            attached = sum(f"nwor: active, mode {mode}, audited at every step" in log for log in logs())
            # Workers of the older executor log only warnings, for vLLM too.
            assert attached == (2 if executor == "RayExecutorV2" else 0)


def test_serve_labels_are_those_of_vllm(server: Server) -> None:
    server.complete(prompts(1)[0])
    samples = server.scrape()
    labels = set(samples["vllm:spec_decode_num_draft_tokens_total"])
    assert labels == {(("engine", "0"), ("model_name", "tiny"))}
    for name in ("windows", "drafted", "accepted", "rejected", "cancelled", "abandoned", "host_seconds"):
        assert set(samples[f"{METRICS[name][0]}_total"]) == labels


def test_serve_reports_active_features(server: Server) -> None:
    import vllm

    server.complete(prompts(1)[0])
    samples = server.scrape()
    [(labels, value)] = samples["nwor_info"].items()
    states = {"transaction": "cow", "draft_graphs": "off", "recurrent": "off", "draft_vocabulary": "off"}
    of_vllm = {"engine": "0", "model_name": "tiny", "vllm": vllm.__version__}
    assert (dict(labels), value) == (states | of_vllm | {"version": nwor_ops.__version__}, 1)
    [(labels, size)] = samples["nwor_memory_bytes"].items()
    assert dict(labels)["part"] == "undo_log"
    assert f"log {size / 2**20:.1f} MiB" in server.log


def test_host_time_is_counted(server: Server) -> None:
    before, started = server.metrics_at_rest(), time.monotonic()
    server.complete(prompts(1)[0])
    elapsed, after = time.monotonic() - started, server.metrics_at_rest()
    steps, seconds = (after[name] - before[name] for name in ("nwor_windows_total", "nwor_host_seconds_total"))
    assert steps > 0
    assert 0 < seconds < elapsed


def test_hang_ups_are_counted(server: Server) -> None:
    """The scheduler does not count the last drafts of an aborted request."""
    aborted = 4
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(server.hang_up, prompts(aborted, seed=1)))
        list(pool.map(server.complete, prompts(6, seed=2)))
    check_agreement(server.metrics_at_rest(), aborted, K)


def test_server_knows_our_variables(server: Server) -> None:
    """vLLM does not warn, and the server, which rejects unknown variables, has started. No file is left anywhere."""
    assert "Unknown vLLM environment variable" not in server.log
    assert [path for path in Path(server.folder).rglob("*") if "nwor" in path.name] == []


def test_promtool_accepts_our_metrics(server: Server) -> None:
    """Names, units, types and help texts are as Prometheus recommends. (vLLM's names have colons.)"""
    ours = [line for line in server.get("/metrics").splitlines() if re.match(r"(# \w+ )?nwor_", line)]
    assert len(ours) > 20
    done = promtool("check", "metrics", given="\n".join(ours) + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_dashboard_and_alerts_have_data(server: PlantedServer, tmp_path: Path) -> None:
    """Prometheus scrapes the server. Later tests see the counts that are then added in each step, because this engine
    cannot make them: passes of a drafter, steps with one state, steps without the transaction."""
    (server.planted / planted_server.COUNT).touch()
    numbers = itertools.count(1)
    with scraping(tmp_path, server.port) as prometheus:
        for number in range(4):
            server.complete(prompts(1, seed=number)[0])
            time.sleep(1)
        prometheus.wait_for("rate(nwor_draft_graph_replays_total[1m]) > 0")
        prometheus.wait_for("rate(nwor_windows_total[1m]) > 0")
        expressions = dashboard_expressions()
        for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]:
            # An alert that does not fire has no sample: ask for its left side, or for its metric.
            left = re.sub(r'\{\w+="missing"\}', "", rule["expr"]).split(" > ")[0].split(" unless ")[0]
            expressions.append(left.replace("[5m]", "[1m]").removeprefix("count by (job, instance) ("))
        # A quotient of two rates is NaN until both counters have grown between two scrapes: keep the server busy.
        deadline = time.monotonic() + 120
        for expression in expressions:
            while not prometheus.has_numbers(expression):
                assert time.monotonic() < deadline, expression
                server.complete(prompts(1, seed=next(numbers))[0])
        firing = prometheus.query("count by (job, instance) (vllm:generation_tokens_total > 0) unless "
                                  "count by (job, instance) (nwor_info)")  # fmt: skip
        assert firing == []


# ---------------------------------------------------------------- errors of this package


def test_server_goes_on_after_errors(server: PlantedServer, engines: Engines) -> None:
    """It is healthy, its tokens are vanilla's, and its counters and log say what happened. After a step of vLLM that
    failed, vLLM ends the server, and its log has the error of the step."""
    check_errors(server, "cow", engines)


@pytest.mark.nightly
def test_errors_in_mode_stage(engines: Engines, tmp_path: Path) -> None:
    server = PlantedServer(tmp_path, "stage")
    with running(server):
        check_errors(server, "stage", engines)


def check_errors(server: PlantedServer, mode: str, engines: Engines) -> None:
    asked = prompts(6)
    vanilla = engines.start(asked, max_tokens=MAX_TOKENS)
    errors, interrupted = (server.planted / name for name in (planted_server.ERRORS, planted_server.INTERRUPTED))
    windows = server.metrics().get("nwor_windows_total", 0.0)
    errors.touch()
    while_they_last = answers(server, asked)
    server.get("/health")
    errors.unlink()
    assert [while_they_last, answers(server, asked)] == 2 * [vanilla.result()["tokens"]]
    check_counts(server, mode, windows)
    server.get("/health")
    interrupted.touch()
    with pytest.raises(OSError, match=r"HTTP Error 50[03]|Connection reset|closed connection"):
        server.complete(asked[0])
    check_it_ends(server)


def answers(server: Server, asked: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(server.complete, asked))


def check_counts(server: PlantedServer, mode: str, windows: float) -> None:
    """The counters are those of the planted errors, and nothing keeps one.

    Args:
        windows: number of windows before the first error.
    """
    totals = server.metrics_at_rest()
    found = planted_server.found(server.planted)
    planted = found["planted"]
    assert found["alive"] == 0
    assert set(planted) == {"begin failed", "commit failed", "sending counters failed"} | (
        {"write failed"} if mode == "cow" else set()
    )
    of_steps = {reason: number for reason, number in planted.items() if "counters" not in reason}
    samples = server.scrape()
    for metric, expected in (("nwor_errors_total", planted), ("nwor_vanilla_steps_total", of_steps)):
        counted = {dict(labels)["reason"]: value for labels, value in samples[metric].items()}
        counted.pop(planted_server.REASON, None)
        assert counted == expected
    assert totals["nwor_abandoned_windows_total"] == sum(of_steps.values()) - of_steps["begin failed"]
    assert totals["nwor_windows_total"] - windows > sum(of_steps.values())
    for reason in of_steps:
        what = reason.removesuffix(" failed")
        methods = ("write", "log") if what == "write" else (what,)  # log: vLLM's writer is used, as with AMX
        assert sum(server.log.count(SAID.format(what, method)) for method in methods) == 1, reason


def check_it_ends(server: Server) -> None:
    """vLLM says that it is not healthy, or no longer listens; then it ends."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while server.alive():
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError):
            server.get("/health")
            pytest.fail("a server whose engine has ended is healthy")
        time.sleep(0.1)
    assert SAID.format("cancel", "cancel") in server.log
    assert "planted in forward" in server.log
