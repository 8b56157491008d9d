"""vLLM plugin entry point: decides what is attached, and patches vLLM's modules when they are imported.

vLLM calls ``register`` in every process that it starts. No configuration exists at that time, and the runner's module
is not imported yet. ``register`` must not import it, since that takes seconds in processes that never need it. It
installs an import hook instead, which patches these modules after their first import:

- Both runner modules. ``GPUModelRunner.initialize_kv_cache`` attaches to the engine if its configuration asks for it,
  and patches everything else on instances. ``load_model`` prepares one state per request
  (:mod:`nwor_ops.vllm.recurrent.plugin`). ``profile_run`` reserves the memory of the undo log.
- The V2 runner's module, in addition: ``init_speculator`` (:mod:`nwor_ops.vllm.draft_graphs.plugin`).
- The scheduler's module, for mode ``"stage"`` (:mod:`nwor_ops.vllm.transaction.shadow_blocks`) and the metrics.
- The GPU worker, to copy counters to the host before the engine sleeps.
- The V2 runner's warm-up, for mode ``"stage"``, the audit and the metrics.
- The front end's output processor, for the metrics.

With ``VLLM_NWOR=off`` the plugin patches only the key of the compile cache (:mod:`nwor_ops.vllm.environment`).
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
from nwor_ops.vllm import feature_report, metrics
from nwor_ops.vllm.audit.engine import audit_engine, audit_states_alone, cache_audit
from nwor_ops.vllm.draft_graphs import plugin as draft_graphs
from nwor_ops.vllm.draft_vocabulary import plugin as draft_vocabulary
from nwor_ops.vllm.environment import announce_variables, settings_of
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.hooks import Patches, undo_all, version_problem, when_undone
from nwor_ops.vllm.recurrent import connectors as recurrent_connectors
from nwor_ops.vllm.recurrent import plugin as recurrent
from nwor_ops.vllm.recurrent.supported import HOOKS as RECURRENT_HOOKS
from nwor_ops.vllm.recurrent.supported import RUNNER_MODULE as V2_RUNNER_MODULE
from nwor_ops.vllm.support.features import (
    DEVICES,
    DRAFT_GRAPHS,
    DRAFT_VOCABULARY,
    RECURRENT,
    SUPPORTED_VERSIONS,
    TRANSACTION,
)
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction import connectors, shadow_blocks
from nwor_ops.vllm.transaction.layers.back_ends import KIMI_HOOKS
from nwor_ops.vllm.transaction.runners.base import log_bytes
from nwor_ops.vllm.transaction.runners.pipeline import HOOKS as PIPELINE_HOOKS
from nwor_ops.vllm.transaction.runners.v1 import V1
from nwor_ops.vllm.transaction.runners.v2 import V2
from nwor_ops.vllm.transaction.session import Session
from nwor_ops.vllm.transaction.supported import check_transaction

RUNNERS = {kind.module: kind for kind in (V1, V2)}

_patches = Patches("plugin")
_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()
# Graphs that vLLM captured in mode "cow" write to the undo log of their session, also after :func:`unload`.
_unloaded: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.nwor_ops")


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
    set_source(metrics.totals)
    when_undone(functools.partial(set_source, None))
    for name, patch in _module_patches().items():
        if name in sys.modules:
            patch(sys.modules[name])
    if not any(isinstance(finder, _ModuleFinder) for finder in sys.meta_path):
        finder = _ModuleFinder()
        sys.meta_path.insert(0, finder)
        when_undone(functools.partial(sys.meta_path.remove, finder))


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


def _module_patches() -> dict[str, Callable[[ModuleType], None]]:
    """Return the patch function of each vLLM module, by module name."""
    return {
        **dict.fromkeys(RUNNERS, _patch_runner_module),
        "vllm.v1.core.sched.scheduler": _patch_scheduler_module,
        "vllm.v1.worker.gpu.warmup": _patch_warmup_module,
        "vllm.v1.worker.gpu_worker": _patch_worker_module,
        "vllm.v1.engine.output_processor": lambda module: metrics.patch_output_module(module, _logger()),
        **recurrent_connectors.PATCHES,
    }


class _ModuleFinder(importlib.abc.MetaPathFinder):
    """Patch a vLLM module right after its first import."""

    def __init__(self) -> None:
        self._patches = _module_patches()
        self._looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._patches or self._looking:
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
                self._patches[name](module)

            return exec_module

        Patches(f"the import of {name}").put(spec.loader, "exec_module", patching)
        return spec


def _patch_scheduler_module(module: ModuleType) -> None:
    shadow_blocks.patch_scheduler_module(module)
    metrics.patch_scheduler_module(module)


def _patch_warmup_module(module: ModuleType) -> None:
    def shadow_blocks_of(runner: Any) -> shadow_blocks.ShadowBlocks | None:
        session = _sessions.get(runner)
        return session.shadow_blocks if session is not None else None

    def telling(warm_up: Callable[..., Any]) -> Callable[..., Any]:
        def warmup_kernels(model_runner: Any, *args: Any, **kwargs: Any) -> Any:
            result = warm_up(model_runner, *args, **kwargs)
            session = _sessions.get(model_runner)
            audit = None if session is None else cache_audit(session)
            if audit is not None:
                steps = audit.summary()["verify_steps"]
                _logger().info("nwor: vLLM's warm-up was audited, %d steps with drafts", steps)
            return result

        return warmup_kernels

    def uncounted(warm_up: Callable[..., Any]) -> Callable[..., Any]:
        def forgetting(model_runner: Any, *args: Any, **kwargs: Any) -> Any:
            result = warm_up(model_runner, *args, **kwargs)
            metrics.forget(model_runner)
            return result

        return forgetting

    shadow_blocks.patch_warmup_module(module, shadow_blocks_of)
    _patches.put_once(module, "warmup_kernels", lambda warm_up: telling(uncounted(warm_up)))
    _patches.put_once(module, "run_mixed_prefill_decode_warmup", uncounted)


def _patch_worker_module(module: ModuleType) -> None:
    def telling(sleep: Callable[..., Any]) -> Callable[..., Any]:
        def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
            for owner in (_sessions.get(self.model_runner), recurrent.recurrent_engine_of(self.model_runner)):
                if owner is not None:
                    with Errors(_logger(), "without publishing counters").survived("copying counters failed"):
                        owner.go_to_sleep()
            return sleep(self, *args, **kwargs)

        return patched

    _patches.put_once(module.Worker, "sleep", telling)


def _patch_runner_module(module: ModuleType) -> None:
    """Patch a runner class so that it reads its engine's configuration after its cache is bound and before it has a
    drafter."""
    draft_graphs.patch_runner_module(module, _logger())
    draft_vocabulary.patch_runner_module(module, _logger())
    runner_class = getattr(module, "GPUModelRunner", None)
    if getattr(runner_class, "initialize_kv_cache", None) is None:
        if NworConfig.load().mode != "off":
            raise RuntimeError(f"nwor: {module.__name__} has no GPUModelRunner.initialize_kv_cache to patch")
        return

    def attaching(initialize: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = initialize(self, *args, **kwargs)
            profiling = kwargs.get("is_profiling", args[1] if len(args) > 1 else False)
            if self.device.type == "cpu":  # this runner overrides load_model
                draft_vocabulary.prepare(self.vllm_config, _logger())
            if not profiling:
                _start_metrics(self)
            recurrent.attach(self, _logger(), profiling)
            if not profiling:
                _attach(self, module.__name__)
            return result

        return initialize_kv_cache

    def reserving(measure: Callable[..., Any]) -> Callable[..., Any]:
        def profile_run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with _reserve_log_memory(self):
                return measure(self, *args, **kwargs)

        return profile_run

    def preparing(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            recurrent.prepare(self.vllm_config, _logger())
            draft_vocabulary.prepare(self.vllm_config, _logger())
            return load(self, *args, **kwargs)

        return load_model

    if module.__name__ == V2_RUNNER_MODULE:
        _patches.put_once(runner_class, "execute_model", recurrent.following_forwards)
    _patches.put_once(runner_class, "load_model", preparing)
    _patches.put_once(runner_class, "initialize_kv_cache", attaching)
    metrics.patch_runner_class(runner_class)
    _patches.put_once(runner_class, "profile_run", reserving)  # a missing method is reported by the check of the hooks


@contextlib.contextmanager
def _reserve_log_memory(runner: Any) -> Iterator[None]:
    """Hold as much memory as the undo log will take while vLLM profiles a forward. The cache then leaves this memory
    free."""
    config = settings_of(runner.vllm_config)
    if config.mode != "cow" or runner.speculative_config is None or runner.device.type != "cuda":
        yield
        return
    try:
        check_transaction(runner.vllm_config, runner.device.type, config.mode)
    except Unsupported:  # reported after the cache is bound
        yield
        return
    room = torch.empty(log_bytes(runner), dtype=torch.uint8, device=runner.device)
    yield
    del room


def _attach(runner: Any, module: str) -> None:
    """Read the configuration of a runner whose cache was just bound, and attach what it asks for."""
    config = settings_of(runner.vllm_config)
    logger = _logger()
    draft_graphs.attach(runner, module, logger)
    if not config.wants_transaction:
        return
    previous = _sessions.pop(runner, None)
    if previous is not None:
        previous.patches.undo()
    try:
        attachment = RUNNERS[module](runner)
        session = attachment.attach(config, logger, audit_engine if config.audit else None)
    except Unsupported as error:
        if config.mode == "off" and audit_states_alone(runner):
            logger.info("nwor: only the recurrent states of this engine are audited: %s", error)
            return
        error.stop_if(config.strict, f"mode {config.mode} was asked for", "without it")
        logger.warning("nwor: not active: %s", error)
        return
    if session is None:
        if config.mode == "off" and audit_states_alone(runner):
            reason = "the engine does not speculate"
            logger.info("nwor: only the recurrent states of this engine are audited: %s", reason)
        else:
            logger.info("nwor: not active: the engine does not speculate")
        return
    _sessions[runner] = session
    if session.manager is not None:
        metrics.publish(runner, session, Session.counts, lambda session: session.counters)
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
    config, alive = settings_of(runner.vllm_config), weakref.ref(runner)
    report = functools.partial(_feature_report, config, alive)
    if config.wants_feature and metrics.start(runner, report, config.emit_metrics, _logger()):
        metrics.publish(runner, runner, draft_graphs.counts)
        vocabulary = draft_vocabulary.vocabulary_of(runner)
        if vocabulary is not None:
            metrics.publish(runner, vocabulary, type(vocabulary).counts, lambda owner: owner.first.counters)


def _feature_report(config: NworConfig, alive: Callable[[], Any]) -> dict[str, Any]:
    runner = alive()
    active, memory = dict[str, str](), dict[str, int]()
    session = _sessions.get(runner)
    if session is not None and session.manager is not None:
        active[feature_report.TRANSACTION] = session.mode
        if session.shadow_blocks is None:
            memory[feature_report.UNDO_LOG] = session.manager.log_bytes
        else:
            memory[feature_report.SHADOW_PAGES] = session.shadow_blocks.num_bytes
    drafter = draft_graphs.graphed_drafter(runner)
    if drafter is not None:
        active[feature_report.DRAFT_GRAPHS] = feature_report.ON
        memory[feature_report.GRAPHS] = drafter.graphs.bytes
    vocabulary = draft_vocabulary.vocabulary_of(runner)
    if vocabulary is not None:
        active[feature_report.DRAFT_VOCABULARY] = feature_report.ON
        memory[feature_report.VOCABULARY] = vocabulary.num_bytes
    state = recurrent.recurrent_engine_of(runner)
    if state is not None:
        active[feature_report.RECURRENT] = state.form
        memory[feature_report.RECORDS] = state.record_bytes
    return feature_report.report(config, active, memory)


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
    import vllm
    from vllm.platforms import current_platform

    of_runners = [hook for kind in RUNNERS.values() for hook in kind.hooks]
    if not vllm.__version__.startswith("0.32."):  # there, pipeline parallelism on the V2 runner is refused
        of_runners += PIPELINE_HOOKS
    by_feature = {
        TRANSACTION: (*of_runners, *KIMI_HOOKS, *shadow_blocks.HOOKS, *connectors.HOOKS),
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
