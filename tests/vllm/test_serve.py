"""A real server of vLLM's CPU engine: counters on its ``/metrics``."""

from __future__ import annotations

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
from tiny_serve import Server, running

import nwor_ops
from nwor_ops.vllm.metrics.names import METRICS
from nwor_ops.vllm.metrics.publisher import PERIOD

K = NGRAM["num_speculative_tokens"]


class PlantedServer(Server):
    """A server with our plugin and with planted_server.py, which plants counts while the file ``planted`` exists. It
    rejects environment variables that vLLM does not know."""

    def __init__(self, folder: Path) -> None:
        planted_server.install(folder / "plugin")
        self.planted = folder / "planted"
        variables = {"VLLM_NWOR_MODE": "cow", planted_server.VARIABLE: str(self.planted)}
        variables["PYTHONPATH"] = environment(folder / "plugin")["PYTHONPATH"]
        super().__init__(variables, "--fail-on-environ-validation")


@pytest.fixture(scope="module")
def server(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedServer]:
    """Start one server for all tests."""
    started = PlantedServer(tmp_path_factory.mktemp("planted"))
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
    for name in ("windows", "drafted", "accepted", "rejected", "cancelled", "abandoned"):
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
    """Prometheus scrapes the server, which now counts in each step what this engine cannot: passes of a drafter, steps
    with one state, steps without the transaction. So this is the last test of the server."""
    server.planted.touch()
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
