"""``nwor-ops check``: print what :mod:`nwor_ops.vllm.check` finds out about an engine that has not started."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nwor_ops.cli.report import BAD, GOOD, Exit, Report, Stopped, silence_vllm
from nwor_ops.config import is_ours, switched_off


def look_at(arguments: Sequence[str], settings: Mapping[str, str] | None = None) -> tuple[Any, dict[str, Any]]:
    """Return vLLM's configuration for the arguments of ``vllm serve``, and :func:`nwor_ops.vllm.check.look` at it.

    The environment stays as it is. Its settings of nwor_ops count, or ``settings`` in their place. Raises Stopped if
    vLLM refuses the arguments, or if a setting is invalid.
    """
    environment = dict(os.environ)
    silence_vllm()
    from nwor_ops.vllm.check import InvalidEngine, configure, look

    if settings is not None:
        for name in filter(is_ours, environment):
            del os.environ[name]
        os.environ.update(settings)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            config = configure(arguments)
            return config, look(config)
    except InvalidEngine as error:
        if str(error).startswith("nwor: "):  # a setting in --additional-config
            raise Stopped(str(error)) from None
        subject = "vLLM refuses these arguments"
        cause, model = type(error.__cause__), arguments[0]
        is_missing = not model.startswith("-") and not os.path.exists(model)
        if is_missing and (cause is OSError or "huggingface_hub" in cause.__module__):
            subject = f"there is no folder {model}, and vLLM could not load a model of this name"
        message = str(error).replace("Please check the logs for more details", "VLLM_LOGGING_LEVEL=ERROR prints why")
        raise Stopped(f"{subject}: {message}", Exit.ENGINE) from None
    except ValueError as error:
        raise Stopped(str(error)) from None
    except SystemExit as end:  # vLLM's parser has printed the reason
        if not end.code:
            raise  # --help
        raise Stopped("an argument is unknown or malformed; vLLM's parser says which one, above") from None
    finally:
        os.environ.clear()
        os.environ.update(environment)


def run_check(arguments: Sequence[str], report: Report) -> int:
    """Check the arguments of ``vllm serve``, print the result, and return the exit code. Raises Stopped."""
    with report.task("checking the engine's arguments"):
        _, preview = look_at(arguments)
        from nwor_ops.vllm.check import switches_of
    result = {"exit_code": outcome_of(preview), **preview, "switches": switches_of(preview)}
    report.json(result)
    print_preview(result, report)
    return outcome_of(preview)


def outcome_of(preview: Mapping[str, Any]) -> Exit:
    refused = any(feature["switched_on"] and not feature["runs"] for feature in preview["features"])
    return Exit.REFUSED if refused else Exit.FINE


def reasons_of(feature: Mapping[str, Any]) -> list[str]:
    """Return why a feature will be refused, as sentences."""
    return [one["why"] + (f" ({one['change']})" if one["change"] else "") for one in feature["reasons"]]


def print_preview(preview: Mapping[str, Any], report: Report) -> None:
    """Print each feature with the reasons, and the conclusion."""
    engine, switches, features = preview["engine"], preview["switches"], preview["features"]
    drafts = f"{engine['method']}, {engine['num_speculative_tokens']} drafts" if engine["method"] else "none"
    report.line(
        f"{engine['model']} ({engine['architecture']}), speculation: {drafts}; "
        f"vLLM {engine['vllm']} on {engine['device']}, runner {engine['runner']}"
    )
    for feature in features:
        on, runs = feature["switched_on"], feature["runs"]
        style = ("bold" if runs else BAD) if on else ""
        state = "switched on, " if on else "off, "
        verb = ("will" if on else "would") + (" run" if runs else " be refused")
        report.line(state + verb, feature["feature"], style)
        for reason in reasons_of(feature):
            report.line(f"  {reason}")
    line = f"{', '.join(switches)}; nwor-ops bench measures the gain" if switches else _no_gain(engine)
    report.line(line, "may be faster with", "bold")
    names = ", ".join(feature["feature"] for feature in features if feature["switched_on"] and not feature["runs"])
    switched_on = ", ".join(feature["feature"] for feature in features if feature["switched_on"])
    if not switched_on:
        report.line("Nothing is switched on" + (": VLLM_NWOR=off." if switched_off() else "."))
    elif not names:
        line = f"No check refuses {switched_on}. Layers, back ends and the cache are checked at the start."
        report.line(line, style=GOOD)
    elif engine["on_unsupported"] == "vanilla":
        report.line(f"The engine will start without {names}.", style=BAD)
    else:
        report.line(f"The engine will not start: {names} will be refused.", style=BAD)


def _no_gain(engine: Mapping[str, Any]) -> str:
    """Return why no switch makes the engine faster."""
    method, layers = engine["method"], f"{engine['architecture']} has no recurrent layers"
    if engine["hybrid"] or not (method is None or method.startswith("ngram") or method == "suffix"):
        return "nothing; the reasons are above"
    return f"nothing; {'it does not speculate' if method is None else f'{method} has no draft model'}, and {layers}"
