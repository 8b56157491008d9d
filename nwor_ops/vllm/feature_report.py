"""Find out at start-up whether each feature that an engine asked for is active in every worker, and say if it is not.

A refusal stops the engine by default. A feature can also be missing without a refusal. For example, the engine does
not speculate, or ``on_unsupported`` is ``"vanilla"``. The plugin may have failed to load in a worker, ``VLLM_PLUGINS``
may leave it out there, or the worker's node may not have the package. The engine core therefore asks every worker after
its cache is bound and its graphs are captured. It publishes the result as ``nwor_info``, and the memory of the features
as ``nwor_memory_bytes``.

The question is sent by value, so that a worker without the package can answer it. An engine core without the plugin
asks nothing: ``nwor_info`` is then missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.metrics import transport
from nwor_ops.vllm.metrics.transport import GaugeFile
from nwor_ops.vllm.support.features import FEATURES, NO_SPECULATION

OFF, ON, MISSING = "off", "on", "missing"
LABELS = tuple(feature.label for feature in FEATURES.values())
TRANSACTION, DRAFT_GRAPHS, RECURRENT = LABELS
UNDO_LOG, SHADOW_PAGES, GRAPHS, RECORDS = "undo_log", "shadow_pages", "draft_graphs", "records"  # nwor_memory_bytes

_WORDS = {feature.label: feature.words for feature in FEATURES.values()}
_NEED_DRAFTS = tuple(feature.label for feature in FEATURES.values() if feature.needs_drafts)
_patches = Patches("feature report")


@dataclass(frozen=True)
class Active:
    """The features of one worker.

    Attributes:
        features: the state of each feature: ``"off"``, ``"on"``, the mode of the transaction, or the form of recurrent
            states.
        memory: bytes that the active features take, by part.
    """

    features: dict[str, str] = field(default_factory=lambda: dict.fromkeys(LABELS, OFF))
    memory: dict[str, int] = field(default_factory=dict)


def asked_for(config: NworConfig) -> dict[str, str]:
    """Return the state of each feature that the settings ask for."""
    return {
        TRANSACTION: config.mode,
        DRAFT_GRAPHS: ON if config.draft_graphs else OFF,
        RECURRENT: config.form,
    }


def compare(asked: dict[str, str], workers: Sequence[dict[str, str] | None]) -> tuple[dict[str, str], list[str]]:
    """Compare what an engine asked for with what its workers have.

    Args:
        asked: the states that the settings ask for.
        workers: the states of each worker, by rank. None: the plugin is not loaded there.

    Returns:
        The state of each feature for ``nwor_info``, and a sentence for each feature that is missing.
    """
    states, sentences = dict(asked), []
    for feature, state in asked.items():
        lacking = [rank for rank, worker in enumerate(workers) if worker is None or worker[feature] != state]
        if state == OFF or not lacking:
            continue
        states[feature] = MISSING
        unloaded = [rank for rank in lacking if workers[rank] is None]
        others = [f"rank {rank} has {worker[feature]}" for rank, worker in enumerate(workers)
                  if worker is not None and worker[feature] not in (OFF, state)]  # fmt: skip
        why = "the log of the worker has the reason"
        if unloaded:
            why = f"nwor_ops is not loaded in rank {_numbers(unloaded)}: is the package installed on that node?"
        elif others:
            why = f"{', '.join(others)}: are the settings of that node different?"
        asked_for_state = f"asked for ({state})" if state != ON else "asked for"
        ranks = f"rank {_numbers(lacking)} of {len(workers)}"
        sentences.append(f"{_WORDS[feature]}: {asked_for_state}, but not active in {ranks}; {why}")
    return states, sentences


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


# Pickled with its code: in a worker without the package, a function of this module could not be found.
_QUESTION = """
def ask(worker):
    import sys

    plugin = sys.modules.get("nwor_ops.vllm.plugin")
    return None if plugin is None else plugin.active_in(worker)
"""


def _question() -> Callable[[Any], Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(_QUESTION, namespace)
    return namespace["ask"]


def report(vllm_config: Any, ask_workers: Callable[[Callable[[Any], Any]], Sequence[Any]], logger: Any) -> None:
    """Log what is missing, and publish what is there. Never raises: the engine can serve without this report.

    Args:
        vllm_config: the engine's configuration.
        ask_workers: calls a function in every worker with the worker as its argument, and returns the answers by rank.
        logger: vLLM's logger.
    """
    config = NworConfig.load(vllm_config.additional_config)
    asked = asked_for(config)
    if set(asked.values()) == {OFF}:
        return
    try:
        idle = [feature for feature in _NEED_DRAFTS if asked[feature] != OFF and vllm_config.speculative_config is None]
        states, sentences, memory = asked | dict.fromkeys(idle, OFF), list[str](), dict[str, int]()
        if set(states.values()) != {OFF}:
            answers = ask_workers(_question())
            found = [None if answer is None else Active(*answer) for answer in answers]
            states, sentences = compare(states, [None if one is None else one.features for one in found])
            memory = _largest([one.memory for one in found if one is not None])
        if idle:
            states |= dict.fromkeys(idle, MISSING)
            sentences += [f"{_WORDS[feature]}: asked for, but not active: {NO_SPECULATION}" for feature in idle]
        for sentence in sentences:
            logger.warning("nwor: %s", sentence)
        if config.emit_metrics and transport.directory() is not None:
            publish(vllm_config, states, memory)
    except Exception:
        logger.exception("nwor: it is not known which features are active in the workers")


def _largest(memory: Sequence[dict[str, int]]) -> dict[str, int]:
    return {part: max(one.get(part, 0) for one in memory) for part in sorted(set().union(*memory))}


def publish(vllm_config: Any, states: dict[str, str], memory: dict[str, int]) -> None:
    """Write ``nwor_info`` and ``nwor_memory_bytes`` to a file. Raises OSError."""
    import vllm

    import nwor_ops

    info = {"version": nwor_ops.__version__, "vllm": vllm.__version__} | states
    samples = [(transport.INFO, info, 1)]
    samples += [(transport.MEMORY, {"part": part}, size) for part, size in memory.items()]
    GaugeFile("core", vllm_config).write(samples)


def patch_core_module(module: ModuleType) -> None:
    """Patch vLLM's engine core so that it asks its workers after their caches are bound."""

    def decorator(original: Callable[..., Any]) -> Callable[..., Any]:
        def _initialize_kv_caches(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, vllm_config, *args, **kwargs)
            report(vllm_config, self.model_executor.collective_rpc, module.logger)
            return result

        return _initialize_kv_caches

    _patches.put_once(getattr(module, "EngineCore", None), "_initialize_kv_caches", decorator)
