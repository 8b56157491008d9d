"""The alert rules and the dashboard: valid, about metrics that exist, and each alert fires when it should.

``tests/vllm/test_serve.py`` evaluates every expression on the metrics of a real server.
"""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import yaml
from prometheus import ALERTS, DASHBOARD, dashboard_expressions, promtool

from nwor_ops.vllm.metrics.names import INFO, MEMORY, METRICS

RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
NAMES = {
    *(f"{name}_total" for name, _ in METRICS.values()),
    INFO[0],
    MEMORY[0],
}
LABELS = 'job="vllm", instance="a:8000", engine="0", model_name="m"'

# By alert: input series that make it fire.
FIRES = {
    "NworFeatureMissing": {f'nwor_info{{{LABELS}, draft_graphs="missing"}}': "1x20"},
    "NworAbsent": {'vllm:generation_tokens_total{job="vllm", instance="a:8000"}': "9x20"},
    "NworSkippedRequests": {f"nwor_recurrent_skipped_requests_total{{{LABELS}}}": "0x5 1x15"},
    "NworVanillaSteps": {
        f'nwor_vanilla_steps_total{{{LABELS}, reason="a"}}': "0+1x20",
        f'nwor_vanilla_steps_total{{{LABELS}, reason="b"}}': "0+1x20",
        f"nwor_windows_total{{{LABELS}}}": "0+100x20",
    },
    "NworErrors": {f'nwor_errors_total{{{LABELS}, reason="a"}}': "_x5 1x15"},
    "NworAbandonedWindows": {f"nwor_abandoned_windows_total{{{LABELS}}}": "0x5 1x15"},
    "NworCancelledWindows": {f"nwor_cancelled_windows_total{{{LABELS}}}": "0x5 1x15"},
    "NworEagerPasses": {
        f'nwor_draft_eager_passes_total{{{LABELS}, reason="a"}}': "0+6x40",
        f"nwor_draft_graph_replays_total{{{LABELS}}}": "0+5x40",
    },
}
QUIET = {
    f'nwor_info{{{LABELS}, transaction="cow", draft_graphs="on", recurrent="chunk"}}': "1x40",
    'vllm:generation_tokens_total{job="vllm", instance="a:8000"}': "9x40",
    'vllm:generation_tokens_total{job="vllm", instance="b:8000"}': "0x40",  # no request yet
    f"nwor_recurrent_skipped_requests_total{{{LABELS}}}": "0x40",
    f'nwor_vanilla_steps_total{{{LABELS}, reason="a"}}': "0+1x40",
    f"nwor_windows_total{{{LABELS}}}": "0+200x40",
    f'nwor_errors_total{{{LABELS}, reason="a"}}': "3x40",
    f"nwor_abandoned_windows_total{{{LABELS}}}": "3x40",
    f"nwor_cancelled_windows_total{{{LABELS}}}": "3x40",
    f'nwor_draft_eager_passes_total{{{LABELS}, reason="a"}}': "0+4x40",
    f"nwor_draft_graph_replays_total{{{LABELS}}}": "0+5x40",
}
AT = {"NworEagerPasses": "35m"}  # it must last; the others are evaluated after 8 minutes


def test_rules_are_valid() -> None:
    done = promtool("check", "rules", str(ALERTS))
    assert done.returncode == 0, done.stderr
    assert f"SUCCESS: {len(RULES)} rules found" in done.stdout


@pytest.mark.parametrize("alert", FIRES)
def test_alert_fires(alert: str, tmp_path: pathlib.Path) -> None:
    fired(tmp_path, FIRES[alert], AT.get(alert, "8m"), alert)


def test_no_alert_fires_without_cause(tmp_path: pathlib.Path) -> None:
    fired(tmp_path, QUIET, "35m")


def fired(folder: pathlib.Path, series: dict[str, str], at: str, *expected: str) -> None:
    """Evaluate every rule on some series, and compare the names of the alerts that fire."""
    firing = 'group by (alertname) (ALERTS{alertstate="firing"})'
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": firing, "eval_time": at, "exp_samples": samples}],
    }
    file = folder / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_in_the_runbook() -> None:
    alerts = [rule["alert"] for rule in RULES]
    assert alerts == list(FIRES)
    runbook = (ALERTS.parents[1] / "operate.md").read_text()
    assert [alert for alert in alerts if f"### {alert}\n" not in runbook] == []
    assert set(re.findall(r"^### (Nwor\w+)$", runbook, re.MULTILINE)) == set(alerts)


def test_rules_and_dashboard_use_existing_metrics() -> None:
    text = ALERTS.read_text() + DASHBOARD.read_text()
    named = set(re.findall(r"\bnwor_\w+", text)) - {"nwor_ops"}
    assert named - NAMES == set()
    assert NAMES - named == set()
    assert len(dashboard_expressions()) > 10
