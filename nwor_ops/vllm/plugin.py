"""vLLM plugin entry point: decides what is attached, and patches vLLM's modules when they are imported.

vLLM calls ``register`` in every process that it starts. It patches the key of the compile cache, and
``VllmConfig.__post_init__``, which reads the settings of an engine (:mod:`nwor_ops.vllm.environment`). These settings
select patches of modules and classes (:func:`install`). A module that is not imported yet is patched after its first
import, because importing it takes seconds in processes that never need it. ``GPUModelRunner.initialize_kv_cache`` then
attaches to the engine, and patches everything else on instances.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from nwor_ops.config import NworConfig, switched_off
from nwor_ops.transaction.counters import set_source
from nwor_ops.vllm.audit.engine import audit_engine, audit_states_alone, cache_audit
from nwor_ops.vllm.draft_graphs import plugin as draft_graphs
from nwor_ops.vllm.draft_vocabulary import plugin as draft_vocabulary
from nwor_ops.vllm.environment import HOOKS as ENVIRONMENT_HOOKS
from nwor_ops.vllm.environment import announce_variables, settings_of, vllm_logger, watch_configurations
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.hooks import Hook, ModulePatch, Patches, undo_all, version_problem, when_undone
from nwor_ops.vllm.metrics import publisher, relay
from nwor_ops.vllm.recurrent import connectors as recurrent_connectors
from nwor_ops.vllm.recurrent import plugin as recurrent
from nwor_ops.vllm.recurrent.supported import HOOKS as RECURRENT_HOOKS
from nwor_ops.vllm.recurrent.supported import LOAD_MODEL
from nwor_ops.vllm.support.features import (
    DEVICES,
    DRAFT_GRAPHS,
    DRAFT_VOCABULARY,
    NO_SPECULATION,
    RECURRENT,
    SUPPORTED_VERSIONS,
    TRANSACTION,
)
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction import connectors, shadow_blocks
from nwor_ops.vllm.transaction.layers.back_ends import KIMI_HOOKS
from nwor_ops.vllm.transaction.runners.base import log_bytes
from nwor_ops.vllm.transaction.runners.v1 import V1
from nwor_ops.vllm.transaction.runners.v2 import V2, WARM_UPS
from nwor_ops.vllm.transaction.session import Session
from nwor_ops.vllm.transaction.supported import check_transaction

RUNNERS = {kind.module: kind for kind in (V1, V2)}

METRICS = "metrics"
_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
# Graphs that vLLM captured in mode "cow" write to the undo log of their session, also after :func:`unload`.
_unloaded: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


def register() -> None:
    """Install the plugin; vLLM's entry point ``vllm.general_plugins``. Calling it again is safe.

    Example:
        >>> nwor_ops.vllm.register()  # vLLM calls it in every process
        >>> nwor_ops.vllm.register()  # nothing changes
    """
    NworConfig.load()  # raises for an unknown variable or value now, not when a cache is bound
    announce_variables()
    if switched_off():
        return
    set_source(relay.totals)
    when_undone(functools.partial(set_source, None))
    watch_configurations(install)


def install(config: NworConfig) -> None:
    """Patch the modules and classes of vLLM that engines with these settings need. Calling it again is safe."""
    for patch in PATCHES:
        if not patch.wanted(config):
            continue
        module = patch.hook.module
        if module in sys.modules:
            patch.apply(sys.modules[module], config, vllm_logger())
        else:
            _FINDER.patches.setdefault(module, {})[patch] = config
    if _FINDER.patches and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
        when_undone(_FINDER.patches.clear)
        when_undone(functools.partial(sys.meta_path.remove, _FINDER))


def unload() -> None:
    """Take the plugin out of this process. Every function and class of vLLM is then as it was before :func:`register`.

    Call it when no request is running. An engine in this process goes on without the transaction. In mode ``"stage"``
    its scheduler still withholds the shadow pages. A V2 runner keeps its speculator with draft graphs. Other processes
    are not affected.

    Raises:
        RuntimeError: an engine in this process has one recurrent state per request, which vLLM's code cannot read. Or
            other code has replaced a patch of this plugin; all others are undone.

    Example:
        >>> nwor_ops.vllm.register()
        >>> nwor_ops.vllm.unload()
        >>> nwor_ops.vllm.sessions()
        []
    """
    if recurrent.recurrent_engines():
        raise RuntimeError("nwor: cannot unload: an engine of this process has one recurrent state per request")
    _unloaded.update(_sessions)
    _sessions.clear()
    undo_all()


class _ModuleFinder(importlib.abc.MetaPathFinder):
    """Patch a vLLM module right after its first import."""

    def __init__(self) -> None:
        self.patches: dict[str, dict[ModulePatch, NworConfig]] = {}  # by module, with the settings that want them
        self._looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self.patches or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec

        def patching(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
            def exec_module(module: ModuleType) -> None:
                execute(module)
                for patch, config in self.patches[name].items():
                    patch.apply(module, config, vllm_logger())

            return exec_module

        Patches(f"the import of {name}").put(spec.loader, "exec_module", patching)
        return spec


_FINDER = _ModuleFinder()


def _warming(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch of a warm-up of the V2 runner. It invents as many requests as the runner's cache has blocks for.

    It uses no shadow pages, the log says that it was audited, and its counts are left out.
    """

    def warm_up(model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        session, cache = _sessions.get(model_runner), model_runner.kv_cache_config
        if session is not None and session.shadow_blocks is not None:
            model_runner.kv_cache_config = shadow_blocks.smaller(cache, session.shadow_blocks)
        try:
            result = original(model_runner, *args, **kwargs)
        finally:
            model_runner.kv_cache_config = cache
        audit = None if session is None else cache_audit(session)
        if audit is not None and original.__name__ == "warmup_kernels":
            steps = audit.summary()["verify_steps"]
            vllm_logger().info("nwor: vLLM's warm-up was audited, %d steps with drafts", steps)
        if model_runner in publisher.publishers:
            publisher.publishers[model_runner].forget()
        return result

    return warm_up


def _warn_of_lost_drafter(worker: Any) -> None:
    """Level 2 releases all weights. vLLM saves the drafter's only if the configuration names them."""
    if worker.get_draft_model() is not None and not worker.model_config.sleep_preserve_parameter_names:
        vllm_logger().warning(
            "nwor: after sleep level 2, reload_weights loads only the target, and the drafts will be rejected. "
            "Start with sleep_preserve_parameter_names=['draft.*']"
        )


def _sleeping(sleep: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        for owner in (_sessions.get(self.model_runner), recurrent.recurrent_engine_of(self.model_runner)):
            if owner is not None:
                with Errors(vllm_logger(), "without publishing counters").survived("copying counters failed"):
                    owner.go_to_sleep()
        if (args[0] if args else kwargs.get("level")) == 2:
            with Errors(vllm_logger(), "to sleep").survived("looking for a drafter failed"):
                _warn_of_lost_drafter(self)
        return sleep(self, *args, **kwargs)

    return patched


def _attaching(module: str, initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch that reads an engine's configuration after its cache is bound and before it has a drafter."""

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = initialize(self, *args, **kwargs)
        profiling = kwargs.get("is_profiling", args[1] if len(args) > 1 else False)
        if self.device.type == "cpu":  # this runner overrides load_model
            draft_vocabulary.prepare(self.vllm_config, vllm_logger())
        if not profiling:
            _start_metrics(self)
        recurrent.attach(self, vllm_logger(), profiling)
        if not profiling:
            _attach(self, module)
        return result

    return initialize_kv_cache


def _reserving(measure: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch that holds as much memory as the undo log will take while vLLM profiles a forward. The cache then
    leaves this memory free."""

    def profile_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        room = torch.empty(_expected_log_bytes(self), dtype=torch.uint8, device=self.device)
        result = measure(self, *args, **kwargs)
        del room
        return result

    return profile_run


def _expected_log_bytes(runner: Any) -> int:
    mode = settings_of(runner.vllm_config).mode
    with contextlib.suppress(Unsupported):  # reported after the cache is bound
        if mode == "cow" and runner.speculative_config is not None and runner.device.type == "cuda":
            check_transaction(runner.vllm_config, runner.device.type, mode)
            return log_bytes(runner)
    return 0


def _preparing(load: Callable[..., Any]) -> Callable[..., Any]:
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        recurrent.prepare(self.vllm_config, vllm_logger())
        draft_vocabulary.prepare(self.vllm_config, vllm_logger())
        return load(self, *args, **kwargs)

    return load_model


def _attach(runner: Any, module: str) -> None:
    """Read the configuration of a runner whose cache was just bound, and attach what it asks for."""
    config = settings_of(runner.vllm_config)
    logger = vllm_logger()
    draft_graphs.attach(runner, module, logger)
    if not config.wants_transaction:
        return
    previous = _sessions.pop(runner, None)
    if previous is not None:
        previous.patches.undo()
    session, refused = None, None
    try:
        session = RUNNERS[module](runner).attach(config, logger, audit_engine if config.audit else None)
    except Unsupported as error:
        refused = error
    if session is None:
        if config.mode == "off" and audit_states_alone(runner):
            reason = refused or NO_SPECULATION
            logger.info("nwor: only the recurrent states of this engine are audited: %s", reason)
        elif refused is None:
            logger.info("nwor: not active: the engine does not speculate")
        else:
            refused.refuse(TRANSACTION, config.strict, logger, f"mode {config.mode} was asked for")
        return
    _sessions[runner] = session
    if session.manager is not None:
        publisher.publish(runner, session, Session.counts, lambda session: session.counters)
    audit = ", audited at every step" if config.audit else ""
    logger.info("nwor: active, mode %s%s: %s", config.mode, audit, session.describe())


def sessions() -> list[Session]:
    """Return the sessions of the engines in this process. Engines in other processes are not included.

    Example:
        Print the windows of each engine. Here no engine runs.

        >>> [session.stats().windows for session in nwor_ops.vllm.sessions()]
        []
    """
    return list(_sessions.values())


def _start_metrics(runner: Any) -> None:
    """Publish the counts of a runner whose cache was just bound, if its engine has a feature."""
    config, logger = settings_of(runner.vllm_config), vllm_logger()
    if not config.wants_feature or runner in publisher.publishers:
        return
    reported = functools.partial(_feature_report, config, weakref.ref(runner))
    with Errors(logger, "without publishing counters").survived("starting to count failed"):
        publishes = publisher.Publisher(runner.vllm_config, reported, logger)
        publishes.add(runner, draft_graphs.counts)
        if (vocabulary := draft_vocabulary.vocabulary_of(runner)) is not None:
            publishes.add(vocabulary, type(vocabulary).counts, lambda owner: owner.first.counters)
        publisher.publishers[runner] = publishes


def _feature_report(config: NworConfig, alive: Callable[[], Any]) -> dict[str, Any]:
    """Return the labels of ``nwor_info``, and the bytes of ``nwor_memory_bytes`` by part.

    A feature can be missing without a refusal: the engine does not speculate, or ``on_unsupported`` is ``"vanilla"``.
    """
    import vllm

    import nwor_ops

    runner, active, memory = alive(), dict[str, str](), dict[str, int]()
    session = _sessions.get(runner)
    if session is not None and session.manager is not None:
        active["transaction"], shadow = session.mode, session.shadow_blocks
        memory |= {"undo_log": session.manager.log_bytes} if shadow is None else {"shadow_pages": shadow.num_bytes}
    if (drafter := draft_graphs.graphed_drafter(runner)) is not None:
        active["draft_graphs"], memory["draft_graphs"] = "on", drafter.graphs.bytes
    if (vocabulary := draft_vocabulary.vocabulary_of(runner)) is not None:
        active["draft_vocabulary"], memory["draft_vocabulary"] = "on", vocabulary.num_bytes
    if (state := recurrent.recurrent_engine_of(runner)) is not None:
        active["recurrent"], memory["records"] = state.form, state.record_bytes
    switched_on = {
        "transaction": config.mode,
        "draft_graphs": "on" if config.draft_graphs else "off",
        "recurrent": config.form,
        "draft_vocabulary": "on" if config.draft_vocabulary else "off",
    }
    labels = {"version": nwor_ops.__version__, "vllm": vllm.__version__}
    for feature, state_of_feature in switched_on.items():
        labels[feature] = state_of_feature if active.get(feature, "off") == state_of_feature else "missing"
    return {"features": labels, "memory": memory}


def check_hooks() -> list[dict[str, Any]]:
    """Check the vLLM version and each hook without starting an engine, for ``nwor-ops doctor``.

    Returns:
        One row per check: ``hook`` (its name), ``feature``, ``needed``, ``ok``, and ``detail`` (the signature, or the
        problem). ``needed`` tells whether this vLLM and its device may have the feature. It is always true for the
        transaction.

    Example:
        >>> [row["hook"] for row in nwor_ops.vllm.check_hooks() if row["needed"] and not row["ok"]]
        []
    """
    from vllm.platforms import current_platform

    of_runners = [hook for kind in RUNNERS.values() for hook in kind.hooks]
    by_feature = {
        TRANSACTION: (*of_runners, *KIMI_HOOKS, *shadow_blocks.HOOKS, *connectors.HOOKS, *_COMMON_HOOKS),
        DRAFT_GRAPHS: draft_graphs.HOOKS,
        DRAFT_VOCABULARY: draft_vocabulary.HOOKS,
        RECURRENT: RECURRENT_HOOKS,
    }
    rows = []
    for feature, hooks in by_feature.items():
        wrong = version_problem(feature)
        needed = feature == TRANSACTION or (wrong is None and current_platform.device_type in DEVICES[feature])
        results = [(f"vLLM version, {feature}", wrong, f"supported: {', '.join(SUPPORTED_VERSIONS[feature])}")]
        for hook in hooks:
            if not (hook.cuda and current_platform.is_cpu()):
                name = f"{hook.module}.{hook.name}" if hook.module in RUNNERS else hook.name
                results.append((name, hook.problem(), hook.signature))
        rows += [
            {"hook": name, "feature": feature, "needed": needed, "ok": problem is None, "detail": problem or detail}
            for name, problem, detail in results
        ]
    return rows


# ---------------------------------------------------------------- patches of modules and classes

_SLEEP = Hook("vllm.v1.worker.gpu_worker", "Worker.sleep", "level")
_UPDATE_STATS = Hook("vllm.v1.engine.output_processor", "OutputProcessor.update_scheduler_stats", "scheduler_stats")
_COMMON_HOOKS = (*ENVIRONMENT_HOOKS, _SLEEP, _UPDATE_STATS, relay.UPDATE_HOOK)


def _module_patches() -> Iterator[ModulePatch]:
    for kind in RUNNERS.values():
        hooks = {hook.name.rpartition(".")[2]: hook for hook in kind.hooks if hook.module == kind.module}
        if kind is V2:
            following = recurrent.following_forwards
            yield ModulePatch(hooks["execute_model"], following, RECURRENT, lambda config: bool(config.recurrent))
        yield ModulePatch(
            LOAD_MODEL if kind is V2 else Hook(V1.module, LOAD_MODEL.name, "load_dummy_weights, model"),
            _preparing,
            RECURRENT,
            lambda config: bool(config.recurrent) or config.draft_vocabulary > 0,
        )
        attaching = functools.partial(_attaching, kind.module)
        yield ModulePatch(hooks["initialize_kv_cache"], attaching, "nwor_ops", lambda config: config.wants_anything)
        yield ModulePatch(hooks["profile_run"], _reserving, TRANSACTION, lambda config: config.mode == "cow")
        yield ModulePatch(hooks["sample_tokens"], publisher.attaching, METRICS, lambda config: config.wants_feature)
        yield ModulePatch(hooks["execute_model"], publisher.resting, METRICS, lambda config: config.wants_feature)
    for hook in WARM_UPS:
        yield ModulePatch(hook, _warming, "nwor_ops", lambda config: config.wants_anything)
    yield ModulePatch(draft_graphs.HOOKS[0], draft_graphs.creating, DRAFT_GRAPHS, lambda config: config.draft_graphs)
    creating, reloading = draft_vocabulary.HOOKS[:2]
    for hook, decorator in ((creating, draft_vocabulary.creating), (reloading, draft_vocabulary.reloading)):
        yield ModulePatch(hook, decorator, DRAFT_VOCABULARY, lambda config: config.draft_vocabulary > 0)
    scheduler = shadow_blocks.HOOKS[0]
    yield ModulePatch(scheduler, shadow_blocks.withholding, TRANSACTION, lambda config: config.mode == "stage")
    yield ModulePatch(_SLEEP, _sleeping, METRICS, lambda config: config.wants_anything)
    yield ModulePatch(relay.UPDATE_HOOK, relay.relaying, METRICS, lambda config: config.wants_feature)
    yield ModulePatch(_UPDATE_STATS, relay.receiving, METRICS, lambda config: config.wants_feature)
    yield from recurrent_connectors.PATCHES


PATCHES = tuple(_module_patches())
