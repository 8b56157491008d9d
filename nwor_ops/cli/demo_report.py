"""Check the results of ``nwor-ops demo``, print them on one screen, and write them to files."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nwor_ops.cli.demo_options import PARTS, SIDES, DemoOptions
from nwor_ops.cli.demo_picture import cache_panels, draw_caches

# A larger ratio between the rounds of one engine means that the machine is busy.
STEADY = 1.5
# The workload must have both accepted and rejected drafts.
ACCEPTANCE = (0.2, 0.8)
SCHEMES = ("every_state", "one_state")
LOOP_MODES = ("eager", "step", "loop")


# ---------------------------------------------------------------- checks


def checked(options: DemoOptions, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the demo: figures, and a sentence for each check that failed."""
    sides = {side: _side_result(options, measured, side) for side in SIDES}
    tokens = {part: [run for side in SIDES for run in measured[part][side]["tokens"]] for part in PARTS}
    rounds = zip(*(measured["timed"][side]["rates"] for side in SIDES), strict=True)
    result: dict[str, Any] = {
        "command": shlex.join(["nwor-ops", *sys.argv[1:]]),
        "versions": measured["audited"]["nwor"]["versions"],
        "models": options.models,
        "method": options.method,
        "draft_model": options.draft_model,
        "num_speculative_tokens": options.num_speculative_tokens,
        "enforce_eager": not options.compile,
        "requests": len(tokens["audited"][0]),
        "output_tokens": sum(map(len, tokens["audited"][0])),
        "acceptance": {part: _acceptance(measured[part]["vanilla"]["vllm"]) for part in PARTS},
        "outputs_identical": all(run == runs[0] for runs in tokens.values() for run in runs),
        **sides,
        "speed_ratio": _spread([nwor / vanilla for vanilla, nwor in rounds]),
        "recurrent": measured["recurrent"],
        "draft_loop": measured["draft_loop"],
    }
    result["problems"] = list(problems(options, result))
    result["warnings"] = [*(_workload_remarks(result) if options.own_model else ()), *machine_remarks(result)]
    result["ok"] = not result["problems"]
    return result


def _acceptance(counted: dict[str, int]) -> float:
    return counted["accepted"] / counted["drafted"] if counted["drafted"] else 0.0


def _spread(rounds: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(rounds), "lowest": min(rounds), "highest": max(rounds), "rounds": rounds}


def _side_result(options: DemoOptions, measured: dict[str, Any], side: str) -> dict[str, Any]:
    audited, timed = measured["audited"][side], measured["timed"][side]
    session = audited["sessions"][0] if audited["sessions"] else {}
    return {
        "mode": options.modes[side],
        "session": session.get("description"),
        "audit": session.get("audit"),
        "stats": session.get("stats"),
        "vllm": audited["vllm"],
        "timed_vllm": timed["vllm"],
        "timed_mode": timed["sessions"][0]["mode"] if timed["sessions"] else "none",
        "step_ms": _spread(timed["step_ms"]),
        "tokens_per_second": _spread(timed["rates"]),
    }


def problems(options: DemoOptions, result: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence for every check that failed."""
    yield from _transaction_problems(options, result)
    yield from _recurrent_problems(result["recurrent"])
    yield from _draft_loop_problems(options, result["draft_loop"])


def _transaction_problems(options: DemoOptions, result: dict[str, Any]) -> Iterator[str]:
    for side in SIDES:
        if result[side]["audit"] is None:
            yield f"{options.titles[side]} was not audited: nwor_ops was not active in that engine"
    if result["nwor"]["timed_mode"] != options.mode or result["vanilla"]["timed_mode"] != "none":
        yield "the timed engines did not run in the requested modes"
    if not result["outputs_identical"]:
        yield "the engines did not generate the same tokens"
    if any(result[side]["audit"] is None for side in SIDES):
        return
    audit = result["nwor"]["audit"]
    if audit["stale_rows"] or audit["stale_rows_at_end"]:
        yield f"NWOR left {max(audit['stale_rows'], audit['stale_rows_at_end'])} stale rows in the cache"
    if options.mode == "stage":
        if audit["exposed_rows"]:
            yield f"NWOR wrote {audit['exposed_rows']} rows of rejected drafts to pages of a request"
        if audit["moments"] != 2 * audit["steps"]:
            looked, steps = audit["moments"], audit["steps"]
            yield f"the audit compared {looked} times during steps, not twice in each of {steps} steps"
    yield from _disagreements(options, result)
    if not options.own_model:
        yield from _workload_remarks(result)


def _disagreements(options: DemoOptions, result: dict[str, Any]) -> Iterator[str]:
    for side in SIDES:
        audit, vllm = result[side]["audit"], result[side]["vllm"]
        for name in ("drafted", "accepted"):
            if audit[name] != vllm[name]:
                title = options.titles[side]
                yield f"{title}: the audit counted {audit[name]} {name} tokens, vLLM's metrics {vllm[name]}"
    for name in ("drafted", "accepted", "rejected"):
        counted, seen = result["nwor"]["stats"][name], result["nwor"]["audit"][name]
        if counted != seen:
            yield f"NWOR counted {counted} {name} tokens on the device, the audit {seen}"


def _workload_remarks(result: dict[str, Any]) -> Iterator[str]:
    low, high = ACCEPTANCE
    for part, acceptance in result["acceptance"].items():
        if not low <= acceptance <= high:
            yield (
                f"the workload needs accepted and rejected drafts: {acceptance:.0%} of the drafts of the {part} part "
                f"were accepted, outside {low:.0%} to {high:.0%}"
            )
    if result["vanilla"]["audit"] and not result["vanilla"]["audit"]["stale_rows"]:
        yield "the workload needs rejected drafts: vanilla vLLM left no stale row"


def _recurrent_problems(recurrent: dict[str, Any]) -> Iterator[str]:
    every, one = (recurrent[scheme] for scheme in SCHEMES)
    for scheme in (every, one):
        states = scheme["states_per_request"]
        if not scheme["same_as_plain"]:
            yield f"recurrent states: decoding with {states} per request gave other tokens than plain decoding"
        if not scheme["accepted"] or not scheme["rejected"]:
            yield f"recurrent states: the workload with {states} per request needs accepted and rejected drafts"
    if one["states_per_request"] != 1:
        yield f"recurrent states: a request has {one['states_per_request']}, not one"
    if one["bytes_per_request"] >= every["bytes_per_request"]:
        yield (
            f"recurrent states: one state and its record took {one['bytes_per_request']:,} bytes, not less than the "
            f"{every['bytes_per_request']:,} of {every['states_per_request']} states"
        )


def _draft_loop_problems(options: DemoOptions, loop: dict[str, Any]) -> Iterator[str]:
    for mode in LOOP_MODES:
        if not loop[mode]["same_as_eager"]:
            yield f"draft loop: mode {mode} made other drafts than eager code"
    passes = 2 if options.num_speculative_tokens > 1 else 1
    if loop["loop"]["graphs"] != passes:
        yield f"draft loop: a captured step replayed {loop['loop']['graphs']} graphs, not {passes}"
    launches = [loop[mode]["kernels"] + loop[mode]["graphs"] for mode in LOOP_MODES]
    if not launches[0] > launches[1] > launches[2]:
        counts = ", ".join(f"{mode} {count}" for mode, count in zip(LOOP_MODES, launches, strict=True))
        yield f"draft loop: launches per step must fall from eager to step to loop, got {counts}"


def machine_remarks(result: dict[str, Any]) -> Iterator[str]:
    rates = result["vanilla"]["tokens_per_second"]
    if rates["highest"] > STEADY * rates["lowest"]:
        yield (
            f"the rounds of vanilla vLLM vary from {rates['lowest']:,.0f} to {rates['highest']:,.0f} tok/s: "
            "the machine is busy, and the speeds are not reliable"
        )


# ---------------------------------------------------------------- output


def write_files(options: DemoOptions, measured: dict[str, Any], result: dict[str, Any]) -> None:
    """Write the result, the state of each slot of both caches, and the picture."""
    caches = {
        title: (measured["audited"][side]["sessions"] or [{"cache": {}}])[0]["cache"]
        for side, title in options.titles.items()
    }
    legend = {"0": "free", "1": "committed row", "2": "stale row of a rejected draft", "3": "shadow page"}
    (options.output / "cache.json").write_text(json.dumps({"states": legend, "caches": caches}, indent=1) + "\n")
    (options.output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    if panels := cache_panels(caches):
        audit = result["nwor"]["audit"] or {}
        headline = (
            f"The paged KV cache after the last request: {audit.get('drafted', 0):,} drafts verified, "
            f"{audit.get('rejected', 0):,} rejected"
        )
        draw_caches(panels, options.output / "cache.png", headline)


def print_result(console: Console, options: DemoOptions, result: dict[str, Any]) -> None:
    versions = result["versions"]
    table = Table(title=f"Speculative decoding, K = {result['num_speculative_tokens']}", show_header=False)
    table.add_column(no_wrap=True)
    for _ in SIDES:
        table.add_column(justify="right")
    for headings, rows in _sections(options, result):
        table.add_section()
        table.add_row(*(f"[bold]{escape(heading)}[/]" for heading in headings))
        for row in rows:
            table.add_row(*row)
    console.print(table)
    if result["draft_loop"]["device"] == "cpu":
        console.print(
            "A CPU has no CUDA graphs: stand-ins run their bodies from the host, and each replay counts as one launch."
        )
    console.print(
        f"vLLM {versions['vllm']}, torch {versions['torch']}, nwor_ops {versions['nwor_ops']}, "
        f"{versions['device']}; {result['seconds']:.0f} s in total"
    )
    console.print(f"picture: {options.output / 'cache.png'}, all figures: {options.output / 'result.json'}")
    for warning in result["warnings"]:
        console.print(f"[yellow]note:[/] {escape(warning)}", soft_wrap=True)
    for problem in result["problems"]:
        console.print(f"[bold red]not as promised:[/] {escape(problem)}", soft_wrap=True)
    if result["ok"]:
        kept = {
            "cow": "no rejected draft left a byte in the cache",
            "stage": "no rejected draft was ever written to a page of a request",
        }
        console.print(f"[bold green]as promised:[/] the same tokens with and without, and {kept[options.mode]}")


def _sections(
    options: DemoOptions, result: dict[str, Any]
) -> Iterator[tuple[tuple[str, ...], Iterable[tuple[str, ...]]]]:
    """Yield the headings and rows of each section of the table."""
    eager = "eager" if result["enforce_eager"] else "compiled"
    for part, rows in (("audited", _audited_rows(result)), ("timed", _timed_rows(result))):
        model = textwrap.shorten(result["models"][part], 30)
        yield (f"KV transaction, {part}: {model}, {eager}", *options.titles.values()), rows
    recurrent = result["recurrent"]
    states = f"{recurrent['every_state']['states_per_request']} states"
    yield ("Hybrid models: a small hybrid Llama", states, "NWOR (one state)"), _recurrent_rows(recurrent)
    yield ("Draft models: a small draft model", "eager", "NWOR (captured)"), _draft_loop_rows(result["draft_loop"])


def _audited_rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    audits = [result[side]["audit"] for side in SIDES]

    def row(label: str, *names: str) -> tuple[str, ...]:
        return label, *(", ".join(f"{audit[name]:,}" for name in names) if audit else "-" for audit in audits)

    yield row("steps, verify steps", "steps", "verify_steps")
    yield row("drafts accepted, rejected", "accepted", "rejected")
    yield row("rejected rows before sampling (sum)", "exposed_rows")
    yield row("stale rows left after a step (sum)", "stale_rows")
    yield row("stale rows in the cache at the end", "stale_rows_at_end")
    yield "the same tokens, both parts", "", _yes(result["outputs_identical"])


def _timed_rows(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    sides = [result[side] for side in SIDES]
    yield "a step, median", *(f"{side['step_ms']['median']:.1f} ms" for side in sides)
    rates = [side["tokens_per_second"] for side in sides]
    yield "output tok/s, median", *(f"{rate['median']:,.0f}" for rate in rates)
    yield "  lowest to highest", *(f"{rate['lowest']:,.0f} to {rate['highest']:,.0f}" for rate in rates)
    ratio = result["speed_ratio"]
    yield f"NWOR / vanilla, median of {len(ratio['rounds'])} rounds", "", f"{ratio['median']:.3f}"
    yield "  lowest to highest", "", f"{ratio['lowest']:.3f} to {ratio['highest']:.3f}"


def _recurrent_rows(recurrent: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    schemes = [recurrent[scheme] for scheme in SCHEMES]
    yield "states per request and layer", *(f"{scheme['states_per_request']}" for scheme in schemes)
    yield "bytes per request, with the record", *(f"{scheme['bytes_per_request']:,}" for scheme in schemes)
    yield "drafts accepted, rejected", *(f"{scheme['accepted']:,}, {scheme['rejected']:,}" for scheme in schemes)
    yield "the tokens of plain decoding", *(_yes(scheme["same_as_plain"]) for scheme in schemes)


def _draft_loop_rows(loop: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    eager, captured = loop["eager"], loop["loop"]
    yield "launches per step", f"{eager['kernels']:,}", f"{captured['graphs']} graphs, {captured['kernels']} kernels"
    yield f"the same {loop['drafts']:,} drafts", "", _yes(captured["same_as_eager"] and loop["step"]["same_as_eager"])


def _yes(holds: bool) -> str:
    return "yes" if holds else "[bold red]no[/]"
