"""Prometheus and promtool, if they are installed (Debian: ``apt-get install prometheus``)."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from nwor_ops.testing.engine_process import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yml"
DASHBOARD = ROOT / "docs" / "monitoring" / "dashboard.json"


def program(name: str) -> str:
    """Return the path of a program, or skip the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *arguments], input=given, capture_output=True, text=True, check=False)


def dashboard_expressions() -> list[str]:
    """Return the expressions of the dashboard's panels, with Grafana's variables filled in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    filled = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
    for variable, value in filled.items():
        expressions = [expression.replace(variable, value) for expression in expressions]
    return expressions


class Prometheus:
    """A Prometheus that scrapes one server every second."""

    def __init__(self, folder: pathlib.Path, port: int) -> None:
        self.port = free_port()
        config = folder / "prometheus.yml"
        job = {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}))
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
             f"--web.listen-address=127.0.0.1:{self.port}"], stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression at this moment. Raises OSError for an invalid one."""
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/query?{query}", timeout=30) as answer:
            return json.load(answer)["data"]["result"]

    def has_numbers(self, expression: str) -> bool:
        """Return whether an expression has samples now, none of them NaN."""
        samples = self.query(expression)
        return bool(samples) and all(sample["value"][1] != "NaN" for sample in samples)

    def wait_for(self, expression: str) -> None:
        """Wait until an expression has a sample."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self.query(expression):
                    return
            time.sleep(0.5)
        raise AssertionError(f"{expression} has no sample after 60 seconds")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@contextlib.contextmanager
def scraping(folder: pathlib.Path, port: int) -> Iterator[Prometheus]:
    prometheus = Prometheus(folder, port)
    try:
        yield prometheus
    finally:
        prometheus.stop()
