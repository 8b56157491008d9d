"""``nwor-ops check``: print what :mod:`nwor_ops.vllm.check` finds out about an engine that has not started."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nwor_ops.vllm.check import Prediction, Preview


class Outcome(enum.IntEnum):
    """The exit code of ``nwor-ops check``."""

    RUNS = 0  # no check refuses a feature that is switched on
    INVALID = 2  # the command line or a setting is invalid
    REFUSED = 3  # a feature that is switched on will be refused
    ENGINE = 4  # vLLM itself refuses the arguments


def outcome_of(preview: Preview) -> Outcome:
    return Outcome.REFUSED if preview.refused else Outcome.RUNS


def as_json(preview: Preview) -> str:
    features = [asdict(prediction) | {"runs": prediction.runs} for prediction in preview.predictions]
    found = {"exit_code": outcome_of(preview).value, "engine": preview.engine, "features": features}
    return json.dumps(found | {"costs_unknown": preview.costs_unknown}, indent=2)


def as_json_of_error(outcome: Outcome, problem: str) -> str:
    return json.dumps({"exit_code": outcome.value, "error": problem}, indent=2)


def print_preview(preview: Preview, console: Console) -> None:
    """Print a table with a row per feature, the costs, and what only a start can find out."""
    engine = preview.engine
    drafts = f"{engine['method']}, {engine['num_speculative_tokens']} drafts" if engine["method"] else "none"
    console.print(
        f"vLLM {engine['vllm']} on {engine['device']}, runner {engine['runner']}, "
        f"{escape(str(engine['architecture']))}, speculation: {escape(drafts)}",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("feature", "switched on", "prediction", "why; which argument changes it"):
        table.add_column(column)
    for prediction in preview.predictions:
        table.add_row(
            prediction.feature,
            "yes" if prediction.switched_on else "no",
            _in_a_word(prediction),
            escape(_reasons(prediction)),
        )
    console.print(table)
    for prediction in preview.predictions:
        for line in _costs(prediction.costs):
            console.print(f"{prediction.feature}: {line}", soft_wrap=True)
    if preview.costs_unknown:
        console.print(f"The costs are missing or incomplete: {escape(preview.costs_unknown)}", soft_wrap=True)
    for prediction in preview.predictions:
        if prediction.switched_on and prediction.at_start:
            unknown = escape("; ".join(prediction.at_start))
            console.print(f"Only a start can tell for {prediction.feature}: {unknown}.", soft_wrap=True)
    console.print(_conclusion(preview), soft_wrap=True)


def _in_a_word(prediction: Prediction) -> str:
    if prediction.runs:
        return "[green]will run[/]" if prediction.switched_on else "would run"
    return "[bold red]will be refused[/]" if prediction.switched_on else "would be refused"


def _reasons(prediction: Prediction) -> str:
    return "\n".join(
        f"{reason.why} ({reason.change})" if reason.change else reason.why for reason in prediction.reasons
    )


def _costs(costs: dict[str, Any]) -> list[str]:
    lines = []
    if "undo_log_bytes" in costs:
        lines.append(f"an undo log of {costs['undo_log_bytes'] / 2**20:.1f} MiB per rank")
    if "shadow_pages" in costs:
        lines.append(f"{costs['shadow_pages']} shadow pages, {costs['shadow_page_bytes'] / 2**20:.1f} MiB of the cache")
    if "graphs_at_most" in costs:
        counts = ", ".join(map(str, costs["request_counts_with_graphs"]))
        lines.append(f"at most {costs['graphs_at_most']} graphs, for batches of {counts} requests")
    if "request_bytes" in costs:
        ours, vllm = (costs[name] / 2**20 for name in ("request_bytes", "request_bytes_of_vllm"))
        lines.append(f"a request of the maximum length takes {ours:.1f} MiB per rank (vLLM: {vllm:.1f})")
    if "requests_that_fit" in costs:
        lines.append(f"{costs['requests_that_fit']} of them fit (vLLM: {costs['requests_that_fit_in_vllm']})")
    return lines


def _conclusion(preview: Preview) -> str:
    on = [prediction.feature for prediction in preview.predictions if prediction.switched_on]
    if not on:
        return "Nothing is switched on: set VLLM_NWOR_MODE, VLLM_NWOR_DRAFT_GRAPHS or VLLM_NWOR_RECURRENT."
    if not preview.refused:
        return f"[bold green]No check refuses {', '.join(on)}.[/]"
    names = ", ".join(prediction.feature for prediction in preview.refused)
    if preview.engine["on_unsupported"] == "vanilla":
        return f"[bold red]The engine will start without {names}.[/]"
    return f"[bold red]The engine will not start: {names} will be refused.[/]"
