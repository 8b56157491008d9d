"""``nwor-ops check``: predict which features an engine will have, before it starts.

vLLM's configuration is built from the arguments of ``vllm serve``. Then the checks of start-up run on it that need no
layers and no cache. The engine makes further checks when it starts.

This module imports vLLM inside functions, because a command sets vLLM's variables first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from nwor_ops.config import SUGGESTED_ROWS, NworConfig
from nwor_ops.vllm.draft_graphs.supported import check_graph_mode
from nwor_ops.vllm.environment import settings_of
from nwor_ops.vllm.hooks import check_library
from nwor_ops.vllm.support.features import DRAFT_GRAPHS, DRAFT_VOCABULARY, NO_SPECULATION, RECURRENT
from nwor_ops.vllm.support.refusals import Check, Unsupported

COW, STAGE = "cow", "stage"
FEATURES = (COW, STAGE, DRAFT_GRAPHS, RECURRENT, DRAFT_VOCABULARY)
# The switches that can make an engine faster. The modes of the transaction are for those who read the cache.
SWITCHES = {
    RECURRENT: "VLLM_NWOR_RECURRENT=1",
    DRAFT_GRAPHS: "VLLM_NWOR_DRAFT_GRAPHS=1",
    DRAFT_VOCABULARY: f"VLLM_NWOR_DRAFT_VOCABULARY={SUGGESTED_ROWS}",
}


class InvalidEngine(Exception):
    """vLLM itself refuses the arguments. The message is vLLM's."""


# ---------------------------------------------------------------- the configuration


def configure(arguments: Sequence[str]) -> Any:
    """Return vLLM's configuration for the arguments of ``vllm serve``.

    Raises:
        SystemExit: an argument is unknown or malformed; vLLM's parser has printed the reason.
        InvalidEngine: vLLM refuses the configuration, or cannot read the model's.
        ValueError: a setting of the plugin is invalid, or vLLM finds no device.
    """
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise ValueError("vLLM finds no device on this machine; run the command on the machine of the engine")
    NworConfig.load()  # an invalid variable is not vLLM's mistake
    return configuration(engine_arguments(arguments))


def engine_arguments(arguments: Sequence[str], **defaults: Any) -> Any:
    """Return vLLM's ``AsyncEngineArgs``, with ``defaults`` for arguments that are not given. Errors are as above."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm")
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser")).set_defaults(**defaults)
    try:
        parsed = parser.parse_args(["serve", *arguments])
        if getattr(parsed, "model_tag", None) is not None:
            parsed.model = parsed.model_tag
        serve.validate(parsed)
        return AsyncEngineArgs.from_cli_args(parsed)
    except Exception as error:  # an IndexError: vLLM looks for the value of --model after the last argument
        no_value = f"{arguments[-1]} must have a value"
        raise InvalidEngine(no_value if isinstance(error, IndexError) else _first_sentence(error)) from error


def configuration(engine_arguments: Any) -> Any:
    """Return vLLM's configuration for its ``AsyncEngineArgs``. Raises InvalidEngine."""
    try:
        return engine_arguments.create_engine_config()
    except Exception as error:
        raise InvalidEngine(_first_sentence(error)) from error


def _first_sentence(error: Exception) -> str:
    """Return the message of an error from vLLM, without the input and the link that pydantic adds."""
    lines = [line.strip().removeprefix("Value error, ") for line in str(error).splitlines()]
    kept = [
        line for line in lines if line and not re.match(r"For further information|\d+ validation errors? for ", line)
    ]
    return " ".join(kept).partition(" [type=")[0] or type(error).__name__


# ---------------------------------------------------------------- the checks of start-up


def look(vllm_config: Any) -> dict[str, Any]:
    """Check an engine that has not started, from its configuration.

    Returns:
        JSON values: ``engine``, a summary of it, and ``features``. Each has its name, whether it is ``switched_on``,
        whether it ``runs``, and the ``reasons`` of a refusal: ``why``, and the argument to ``change`` (empty: none).
    """
    import vllm

    settings = settings_of(vllm_config)
    engine = summary_of(vllm_config) | {
        "vllm": vllm.__version__,
        "model": vllm_config.model_config.model,
        "vocabulary": vllm_config.model_config.get_vocab_size(),
        "on_unsupported": settings.on_unsupported,
    }
    switched_on = {COW: settings.mode == COW, STAGE: settings.mode == STAGE,
                   DRAFT_GRAPHS: settings.draft_graphs, RECURRENT: bool(settings.recurrent),
                   DRAFT_VOCABULARY: settings.draft_vocabulary > 0}  # fmt: skip
    features = []
    for feature in FEATURES:
        if vllm_config.speculative_config is None and feature != RECURRENT:
            parts: tuple[tuple[str, str], ...] = ((NO_SPECULATION, "--speculative-config"),)
        else:
            parts = _refusals(_checks_of(feature, vllm_config))
        reasons = [{"why": why, "change": change} for why, change in parts]
        state = {"switched_on": switched_on[feature], "runs": not reasons, "reasons": reasons}
        features.append({"feature": feature} | state)
    return {"engine": engine, "features": features}


def summary_of(vllm_config: Any) -> dict[str, Any]:
    """Return what an engine is, in values that cannot hold a secret."""
    speculation = vllm_config.speculative_config
    return {
        "device": vllm_config.device_config.device_type,
        "runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "architecture": vllm_config.model_config.architecture,
        "hybrid": vllm_config.model_config.is_hybrid,
        "method": None if speculation is None else speculation.method,
        "num_speculative_tokens": None if speculation is None else speculation.num_speculative_tokens,
    }


def switches_of(preview: dict[str, Any]) -> list[str]:
    """Return the switches that may make this engine faster: of features that would run and have something to do."""
    runs = {feature["feature"] for feature in preview["features"] if feature["runs"]}
    small = {DRAFT_VOCABULARY} if preview["engine"]["vocabulary"] <= SUGGESTED_ROWS else set()
    return [switch for feature, switch in SWITCHES.items() if feature in runs - small]


def _refusals(checks: Iterable[Check]) -> tuple[tuple[str, str], ...]:
    """Return the reasons of the first check that fails."""
    try:
        for check in checks:
            check()
    except Unsupported as error:
        return error.parts
    return ()


def _checks_of(feature: str, vllm_config: Any) -> Iterable[Check]:
    device_type = vllm_config.device_config.device_type
    if feature == RECURRENT:
        from nwor_ops.vllm.recurrent import models, supported

        yield from supported.checks_of(vllm_config)
        yield lambda: supported.check_hooks(models.model_of(vllm_config))
        yield lambda: check_library("cuda")
    elif feature == DRAFT_GRAPHS:
        from nwor_ops.vllm.draft_graphs import plugin

        yield from plugin.checks_of(vllm_config, device_type)
        yield lambda: check_graph_mode(vllm_config.compilation_config.cudagraph_mode)
    elif feature == DRAFT_VOCABULARY:
        from nwor_ops.vllm.draft_vocabulary.plugin import check_config

        yield lambda: check_config(vllm_config, device_type)
    else:
        from nwor_ops.vllm.transaction.runners.v1 import V1
        from nwor_ops.vllm.transaction.runners.v2 import V2

        yield from (V2 if vllm_config.use_v2_model_runner else V1).checks_of(vllm_config, device_type, feature)
