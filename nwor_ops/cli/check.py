"""``nwor-ops check``: print what :mod:`nwor_ops.vllm.check` finds out about an engine that has not started."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nwor_ops.cli.report import BAD, GOOD, Report, Stopped, check_model, silence_vllm

if TYPE_CHECKING:
    from nwor_ops.vllm.check import Prediction, Preview


class Outcome(enum.IntEnum):
    """The exit code of ``nwor-ops check``."""

    RUNS = 0  # no check refuses a feature that is switched on
    INVALID = 2  # the command line or a setting is invalid
    REFUSED = 3  # a feature that is switched on will be refused
    ENGINE = 4  # vLLM itself refuses the arguments


@contextlib.contextmanager
def stopping_if_refused(model: str) -> Iterator[None]:
    """Raise Stopped if vLLM refuses the arguments, or if a setting is invalid."""
    from nwor_ops.vllm.check import InvalidEngine

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except InvalidEngine as error:
        subject = "vLLM refuses these arguments"
        cause = type(error.__cause__)
        if not os.path.exists(model) and (cause is OSError or "huggingface_hub" in cause.__module__):
            subject = f"there is no folder {model}, and vLLM could not load a model of this name"
        raise Stopped(f"{subject}: {error}", Outcome.ENGINE) from None
    except ValueError as error:
        raise Stopped(str(error)) from None
    except SystemExit as end:  # vLLM's parser has printed the reason
        if not end.code:
            raise  # --help
        raise Stopped("an argument is unknown or malformed; vLLM's parser says which one, above") from None


def run_check(arguments: Sequence[str], report: Report) -> int:
    """Check the arguments of ``vllm serve``, print the result, and return the exit code. Raises Stopped."""
    check_model("MODEL", arguments[0])
    silence_vllm()
    with report.task("checking the engine's arguments"), stopping_if_refused(arguments[0]):
        from nwor_ops.vllm.check import configure, look

        preview = look(configure(arguments))
    report.json(as_dict(preview))
    print_preview(preview, report)
    return outcome_of(preview).value


def outcome_of(preview: Preview) -> Outcome:
    return Outcome.REFUSED if preview.refused else Outcome.RUNS


def as_dict(preview: Preview) -> dict[str, Any]:
    """Return the result as JSON values."""
    features = [
        {"feature": one.feature, "switched_on": one.switched_on, "runs": one.runs,
         "reasons": [{"why": why, "change": change} for why, change in one.reasons]}
        for one in preview.predictions
    ]  # fmt: skip
    return {"exit_code": outcome_of(preview).value, "engine": preview.engine, "features": features,
            "switches": preview.switches}  # fmt: skip


def reasons_of(prediction: Prediction) -> list[str]:
    """Return why a feature will be refused, as sentences."""
    return [f"{why} ({change})" if change else why for why, change in prediction.reasons]


def print_preview(preview: Preview, report: Report) -> None:
    """Print each feature with the reasons, and the conclusion."""
    engine = preview.engine
    drafts = f"{engine['method']}, {engine['num_speculative_tokens']} drafts" if engine["method"] else "none"
    report.line(
        f"{engine['model']} ({engine['architecture']}), speculation: {drafts}; "
        f"vLLM {engine['vllm']} on {engine['device']}, runner {engine['runner']}"
    )
    for prediction in preview.predictions:
        on, runs = prediction.switched_on, prediction.runs
        style = ("bold" if runs else BAD) if on else ""
        state = "switched on, " if on else "off, "
        verb = ("will" if on else "would") + (" run" if runs else " be refused")
        report.line(state + verb, prediction.feature, style)
        for reason in reasons_of(prediction):
            report.line(f"  {reason}")
    line = f"{', '.join(preview.switches)}; nwor-ops bench measures the gain" if preview.switches else _no_gain(engine)
    report.line(line, "may be faster with", "bold")
    names = ", ".join(prediction.feature for prediction in preview.refused)
    asked = ", ".join(prediction.feature for prediction in preview.predictions if prediction.switched_on)
    if not asked:
        report.line("Nothing is switched on.")
    elif not names:
        report.line(f"No check refuses {asked}. Layers, back ends and the cache are checked at the start.", style=GOOD)
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
