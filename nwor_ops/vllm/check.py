"""``nwor-ops check``: predict which features an engine will have and what they cost, before it starts.

vLLM's configuration is built from the arguments of ``vllm serve``. Then the checks of start-up run on it. For the
costs, the model's layers are created on torch's meta device: they have shapes and no weights. No kernel runs and no
CUDA context is created. The engine makes further checks when it starts. Each result lists them.

This module imports vLLM inside functions: the platform may have to be set first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nwor_ops.config import SWITCH, NworConfig
from nwor_ops.vllm.draft_graphs.supported import check_graph_mode
from nwor_ops.vllm.hooks import check_library, check_vllm
from nwor_ops.vllm.recurrent.models import MODELS, model_of
from nwor_ops.vllm.support.features import DRAFT_GRAPHS, NO_SPECULATION, ONE_STATE, TRANSACTION
from nwor_ops.vllm.support.refusals import ALL_RECURRENT, CAPTURE_SIZES, Unsupported, check_engine
from nwor_ops.vllm.transaction.layers.back_ends import check_group_spec, check_passes
from nwor_ops.vllm.transaction.supported import check_partial_tails, check_transaction, is_recurrent

COW, STAGE = "cow", "stage"
FEATURES = (COW, STAGE, DRAFT_GRAPHS, ONE_STATE)
# What only a start can find out, by feature.
_AT_START = {
    COW: ("each layer's writer is tried on a scratch page", "the drafter must name its layers"),
    STAGE: (
        "each layer's writer is tried on a scratch page",
        "the drafter must name its layers",
        "pages of the back end must be whole blocks",
        "a drafter or connector that reads the target's metadata must find the runner's own block table in it",
    ),
    DRAFT_GRAPHS: (
        "the class of the drafter and its attention back end",
        "the CUDA graph mode that the target's attention allows",
        "the memory of the graphs: the line `nwor: draft graphs: active` has it",
    ),
    ONE_STATE: ("every recurrent layer must have the known class",),
}


class InvalidEngine(Exception):
    """vLLM itself refuses the arguments. The message is vLLM's."""


@dataclass(frozen=True)
class Reason:
    """Why a feature will be refused, and the argument that changes it (empty: no argument does)."""

    why: str
    change: str = ""


@dataclass(frozen=True)
class Prediction:
    """The prediction for one feature.

    Attributes:
        feature: ``"cow"``, ``"stage"``, ``"draft graphs"`` or ``"one state"``.
        switched_on: whether the settings ask for it.
        reasons: the reasons why it will be refused. Empty if no check refuses it.
        costs: its costs by name. Bytes are per rank.
        at_start: checks that only the start of the engine can make.
    """

    feature: str
    switched_on: bool
    reasons: tuple[Reason, ...] = ()
    costs: dict[str, Any] = field(default_factory=dict)
    at_start: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Preview:
    """A summary of the engine, a prediction for each feature, and the reason if costs are missing or incomplete."""

    engine: dict[str, Any]
    predictions: tuple[Prediction, ...]
    costs_unknown: str | None = None

    @property
    def refused(self) -> tuple[Prediction, ...]:
        """The features that are switched on and will be refused."""
        return tuple(prediction for prediction in self.predictions if prediction.switched_on and not prediction.runs)


# ---------------------------------------------------------------- the device


@dataclass(frozen=True)
class Machine:
    """The machine of the engine.

    Attributes:
        is_here: whether it is this machine. If not, the compiled libraries here do not matter.
        modules_import: whether vLLM's modules for its device can be imported here, so that hooks can be compared and
            layers created.
    """

    is_here: bool = True
    modules_import: bool = True


def describe_gpu(capability: tuple[int, int], memory: int) -> Machine:
    """Make vLLM configure engines for an NVIDIA GPU that is not here. Call it before vLLM is used.

    Args:
        capability: compute capability of the GPU.
        memory: memory of the GPU in bytes. Some defaults of vLLM depend on it.
    """
    import vllm.platforms as platforms

    modules_import = True
    try:
        import vllm._C_stable_libtorch
    except ImportError:
        modules_import = False
        # A CPU build. The platform's module imports this library to register kernels, and none runs here.
        sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class DescribedGpu(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:  # type: ignore[override]
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "a described GPU"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return memory

        @classmethod
        def device_count(cls) -> int:
            return 1 << 10  # any number of ranks

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM then does not miss a driver for Triton
    platforms._current_platform = DescribedGpu()  # type: ignore[assignment]
    import vllm.triton_utils

    vllm.triton_utils.HAS_TRITON = True  # as on that machine: without it vLLM configures runner V1
    if not modules_import:
        from vllm.model_executor.models.registry import _LazyRegisteredModel

        # vLLM caches what it knows about a model's class. Its writer imports attention kernels that a CPU build lacks.
        _LazyRegisteredModel._save_modelinfo_to_cache = lambda *_: None  # type: ignore[method-assign]
    return Machine(is_here=False, modules_import=modules_import)


# ---------------------------------------------------------------- the configuration


def configure(arguments: Sequence[str], **defaults: Any) -> Any:
    """Return vLLM's configuration for the arguments of ``vllm serve``.

    Args:
        arguments: the arguments.
        defaults: values of arguments that are not given, by the names of vLLM's ``EngineArgs``.

    Raises:
        SystemExit: an argument is unknown or malformed; vLLM's parser has printed the reason.
        InvalidEngine: vLLM refuses the configuration, or cannot read the model's.
    """
    return configuration(engine_arguments(arguments, **defaults))


def engine_arguments(arguments: Sequence[str], **defaults: Any) -> Any:
    """Return vLLM's ``AsyncEngineArgs``. Arguments, defaults and errors are those of :func:`configure`."""
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
    except Exception as error:
        raise InvalidEngine(_first_sentence(error)) from error


def configuration(engine_arguments: Any) -> Any:
    """Return vLLM's configuration for its ``AsyncEngineArgs``. Raises InvalidEngine."""
    try:
        return engine_arguments.create_engine_config()
    except Exception as error:
        raise InvalidEngine(_first_sentence(error)) from error


def _first_sentence(error: Exception) -> str:
    """Return the message of an error from vLLM, without the input and the link that pydantic adds."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith("For further information")]
    return " ".join(kept).partition(" [type=")[0] or type(error).__name__


# ---------------------------------------------------------------- the checks of start-up


def look(arguments: Sequence[str], cache_bytes: int | None = None, machine: Machine = Machine()) -> Preview:
    """Check an engine that has not started.

    Args:
        arguments: the arguments of ``vllm serve``.
        cache_bytes: memory of the KV cache per GPU. None: ``--kv-cache-memory-bytes``, if it is given.
        machine: the machine of the engine.

    Raises:
        SystemExit, InvalidEngine: as :func:`configure`.
        ValueError: a setting of the plugin is invalid.
    """
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise ValueError("vLLM finds no device on this machine; name the one that the engine will have: --device cuda")
    NworConfig.load()  # an invalid variable is not vLLM's mistake
    vllm_config = configure(arguments)
    settings = NworConfig.load(vllm_config.additional_config)
    device = vllm_config.device_config.device_type
    layers, costs_unknown = None, None
    if not machine.modules_import:
        costs_unknown = "this vLLM is a CPU build, so the layers of a CUDA engine cannot be created"
    elif vllm_config.speculative_config is not None or vllm_config.model_config.architecture in MODELS:
        try:
            layers = _Layers.of(vllm_config, cache_bytes)
        except Exception as error:  # any model may do anything with tensors that have no memory
            costs_unknown = f"the model's layers could not be created without memory: {_first_sentence(error)}"
        if layers is not None and layers.drafter_missing is not None:
            costs_unknown = f"the drafter's layers could not be created without memory: {layers.drafter_missing}"
    predictions = []
    for feature in FEATURES:
        reasons = tuple(_reasons(feature, vllm_config, device, layers, machine))
        prediction = Prediction(feature, _switched_on(feature, settings), reasons)
        if prediction.runs:
            try:
                costs = _costs(feature, vllm_config, layers, cache_bytes, arguments)
            except Exception as error:
                costs, costs_unknown = {}, f"{feature}: {_first_sentence(error)}"
            at_start = _AT_START[feature]
            if feature == STAGE and (layers is None or not layers.size_is_known):
                at_start += ("the cache must hold the shadow pages and one request of the maximum length",)
            if not machine.is_here:
                at_start += ("the compiled library and the version of vLLM on that machine",)
            if not machine.modules_import:
                at_start += ("vLLM's hooks: this vLLM is a CPU build, so they cannot be compared for CUDA",)
            prediction = replace(prediction, costs=costs, at_start=at_start)
        predictions.append(prediction)
    return Preview(_in_short(vllm_config, settings), tuple(predictions), costs_unknown)


def _switched_on(feature: str, settings: NworConfig) -> bool:
    asked = {DRAFT_GRAPHS: settings.draft_graphs, ONE_STATE: bool(settings.recurrent)}
    return asked.get(feature, settings.mode == feature)


def _in_short(vllm_config: Any, settings: NworConfig) -> dict[str, Any]:
    import vllm

    speculation = vllm_config.speculative_config
    return {
        "vllm": vllm.__version__,
        "device": vllm_config.device_config.device_type,
        "runner": "V2" if vllm_config.use_v2_model_runner else "V1",
        "model": vllm_config.model_config.model,
        "architecture": vllm_config.model_config.architecture,
        "method": None if speculation is None else speculation.method,
        "num_speculative_tokens": None if speculation is None else speculation.num_speculative_tokens,
        "on_unsupported": settings.on_unsupported,
    }


def _reasons(feature: str, vllm_config: Any, device: str, layers: _Layers | None, machine: Machine) -> Iterator[Reason]:
    """Yield why a feature will be refused: by vLLM's version and hooks, and by the first other check that fails."""
    if vllm_config.speculative_config is None and feature != ONE_STATE:
        yield Reason(NO_SPECULATION, "--speculative-config")
        return
    checks_of = {DRAFT_GRAPHS: _draft_graphs, ONE_STATE: _one_state}.get(feature, _transaction)
    hooks, *checks = checks_of(feature, vllm_config, device, layers)
    if machine.is_here:
        checks.append(lambda: check_library(device))
    version = _failed(lambda: check_vllm((), TRANSACTION if feature in (COW, STAGE) else feature))
    yield from version or (_failed(hooks) if machine.modules_import else ())
    yield from next(filter(None, map(_failed, checks)), ())


def _failed(check: Callable[[], object]) -> list[Reason]:
    try:
        check()
    except Unsupported as error:
        return [Reason(why, change) for why, change in error.parts]
    return []


Checks = Iterator[Callable[[], object]]


def _transaction(mode: str, vllm_config: Any, device: str, layers: _Layers | None) -> Checks:
    from nwor_ops.vllm.transaction.layers.back_ends import maker_of
    from nwor_ops.vllm.transaction.runners.pipeline import HOOKS as PIPELINE_HOOKS
    from nwor_ops.vllm.transaction.runners.v1 import V1
    from nwor_ops.vllm.transaction.runners.v2 import V2
    from nwor_ops.vllm.transaction.shadow_blocks import HOOKS as SHADOW_HOOKS
    from nwor_ops.vllm.transaction.shadow_blocks import check_scheduler, shadow_blocks

    runner = V2 if vllm_config.use_v2_model_runner else V1
    hooks = (*runner.hooks, *(SHADOW_HOOKS if mode == STAGE else ()))
    if runner is V2 and vllm_config.parallel_config.pipeline_parallel_size > 1:
        hooks += PIPELINE_HOOKS
    yield lambda: check_vllm(hooks)
    yield lambda: check_transaction(vllm_config, device, mode)
    if mode == STAGE:
        yield lambda: check_scheduler(vllm_config)
    if layers is None:
        return
    yield lambda: check_partial_tails(vllm_config, layers.cache, mode)
    if mode == STAGE and layers.size_is_known:
        yield lambda: shadow_blocks(vllm_config, layers.cache)
    attention = {name: spec for name, spec in layers.of_target.items() if not is_recurrent(spec)}

    def check_layers() -> None:
        if not attention:
            raise ALL_RECURRENT.because()
        for name, spec in attention.items():
            check_group_spec(name, spec)
            maker_of(name, layers.modules[name])
        if mode == COW and any(type(layers.modules[name]).__name__ == "MLAAttention" for name in attention):
            check_passes(vllm_config.compilation_config.pass_config)

    yield check_layers


def _draft_graphs(feature: str, vllm_config: Any, device: str, layers: _Layers | None) -> Checks:
    from nwor_ops.vllm.draft_graphs.plugin import V1_HOOKS, V2_HOOKS

    yield lambda: check_vllm(V2_HOOKS if vllm_config.use_v2_model_runner else V1_HOOKS, DRAFT_GRAPHS)
    yield lambda: check_engine(vllm_config, device, DRAFT_GRAPHS)
    yield lambda: check_graph_mode(vllm_config.compilation_config.cudagraph_mode)

    def check_sizes() -> None:
        if vllm_config.compilation_config.cudagraph_mode.decode_mode().name == "FULL" and not _graphs(vllm_config):
            sizes = vllm_config.compilation_config.cudagraph_capture_sizes
            raise CAPTURE_SIZES.because(sizes=sizes, tokens=vllm_config.speculative_config.num_speculative_tokens + 1)

    yield check_sizes


def _one_state(feature: str, vllm_config: Any, device: str, layers: _Layers | None) -> Checks:
    from nwor_ops.vllm.recurrent.supported import check_hooks, checks_of

    yield lambda: check_hooks(model_of(vllm_config))
    yield from checks_of(vllm_config)


# ---------------------------------------------------------------- layers without memory, and what they cost


@dataclass(frozen=True)
class _Layers:
    """The layers of one rank.

    Attributes:
        modules: the layers with a KV cache, by name, on torch's meta device.
        specs: their KV-cache specs. The drafter's layers are included if :attr:`drafter_missing` is None.
        of_target: the specs of the target's layers.
        cache: the KV cache as vLLM makes it from these specs and the cache's size.
        size_is_known: whether the cache has the size of the engine's. If not, it has 1 TiB: its groups and the bytes of
            a request do not depend on it.
        drafter_missing: why the drafter's layers are not included, or None.
    """

    modules: dict[str, Any]
    specs: dict[str, Any]
    of_target: dict[str, Any]
    cache: Any
    size_is_known: bool
    drafter_missing: str | None

    @classmethod
    def of(cls, vllm_config: Any, cache_bytes: int | None) -> _Layers:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.platforms import current_platform
        from vllm.utils.torch_utils import set_default_torch_dtype
        from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("with pipeline parallelism each rank has other layers")
        missing = None
        with set_current_vllm_config(vllm_config), _one_rank():
            # This rank sends nothing. A layer needs the rank and the world size to select its heads.
            parallel_state.get_tp_group().world_size = parallel.tensor_parallel_size
            with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
                initialize_model(vllm_config)
                target = set(vllm_config.compilation_config.static_forward_context)
                try:
                    _initialize_drafter(vllm_config)
                except Exception as error:
                    missing = _first_sentence(error)
            current_platform.update_block_size_for_backend(vllm_config)
            specs = get_kv_cache_spec(vllm_config)
            modules = {name: vllm_config.compilation_config.static_forward_context[name] for name in specs}
            if vllm_config.cache_config.kv_cache_layout is None:
                _resolve_layout(vllm_config, modules, specs)
            cache_bytes = cache_bytes or vllm_config.cache_config.kv_cache_memory_bytes
            cache = _plan_cache(vllm_config, specs, cache_bytes or 1 << 40)
        known = cache_bytes is not None or vllm_config.cache_config.num_gpu_blocks_override is not None
        of_target = {name: spec for name, spec in specs.items() if name in target}
        return cls(modules, specs, of_target, cache, known, missing)


def _plan_cache(vllm_config: Any, specs: dict[str, Any], num_bytes: int) -> Any:
    """Return vLLM's ``KVCacheConfig`` for a cache of this size on one rank."""
    try:
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    except ImportError:  # vLLM 0.32, which groups the layers in the second function
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        return get_kv_cache_configs(vllm_config, [specs], [num_bytes])[0]
    groups = get_global_kv_cache_groups(vllm_config, [specs])
    return get_kv_cache_configs(vllm_config, [specs], [num_bytes], groups)[0]


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Give vLLM the process groups of a single rank while layers are created."""
    from vllm.distributed import parallel_state

    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def _initialize_drafter(vllm_config: Any) -> None:
    """Create the drafter's layers as vLLM does, if its method has some."""
    from vllm.compilation.backends import set_model_tag
    from vllm.model_executor.model_loader.utils import initialize_model

    speculation = vllm_config.speculative_config
    if speculation is None:
        return
    if speculation.uses_draft_model():
        drafting = replace(vllm_config, model_config=speculation.draft_model_config, quant_config=None)
        with set_model_tag("draft_model"):
            initialize_model(drafting, prefix="draft_model")
    elif speculation.draft_model_config is not None and speculation.method not in ("ngram", "ngram_gpu", "suffix"):
        with set_model_tag("eagle_head"):
            initialize_model(vllm_config, model_config=speculation.draft_model_config)


def _resolve_layout(vllm_config: Any, modules: dict[str, Any], specs: dict[str, Any]) -> None:
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

    back_ends = list(dict.fromkeys(module.get_attn_backend() for module in modules.values()))
    names = [layout.name for layout in get_supported_kv_cache_layouts(back_ends)]
    resolve_kv_cache_layout(vllm_config, [names], list(specs.values()))


def _costs(
    feature: str, vllm_config: Any, layers: _Layers | None, cache_bytes: int | None, arguments: Sequence[str]
) -> dict[str, Any]:
    if feature == DRAFT_GRAPHS:
        counts = _graphs(vllm_config)
        return {"request_counts_with_graphs": counts, "graphs_at_most": 2 * len(counts)}
    if layers is None:
        return {}
    vanilla = _requests(vllm_config, layers)
    if feature == ONE_STATE:
        form = "chunk" if NworConfig.load(vllm_config.additional_config).chunk else "exact"
        return _fits(vanilla, _with_one_state(arguments, cache_bytes, form))
    if feature == COW:
        from nwor_ops.vllm.transaction.runners.base import max_draft_tokens, undo_log_bytes

        specs = layers.specs.values()
        log = undo_log_bytes(specs, max_draft_tokens(vllm_config), vllm_config.parallel_config.pipeline_parallel_size)
        return {"undo_log_bytes": log} | _fits(vanilla, vanilla)
    from nwor_ops.vllm.transaction.shadow_blocks import shadow_blocks

    shadow = shadow_blocks(vllm_config, layers.cache)
    withheld = layers.cache.num_blocks - shadow.first
    costs = {"shadow_pages": withheld, "shadow_page_bytes": shadow.num_bytes}
    return costs | _fits(vanilla, _requests(vllm_config, layers, withheld / layers.cache.num_blocks))


def _graphs(vllm_config: Any) -> list[int]:
    """Return the request counts that get graphs."""
    from nwor_ops.vllm.draft_graphs.graphs import captured_counts

    drafts = vllm_config.speculative_config.num_speculative_tokens
    return captured_counts(vllm_config, drafts + 1, vllm_config.scheduler_config.max_num_seqs)


def _requests(vllm_config: Any, layers: _Layers, withheld: float = 0.0) -> tuple[int, int | None]:
    """Return the bytes of a request of the maximum length, and how many fit in the cache (None: its size is unknown).

    ``withheld`` is the share of the cache that no request gets.
    """
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    requests = get_max_concurrency_for_kv_cache_config(vllm_config, layers.cache)
    each = round(max(tensor.size for tensor in layers.cache.kv_cache_tensors) / requests)
    return each, int(requests * (1 - withheld)) if layers.size_is_known else None


def _fits(vanilla: tuple[int, int | None], ours: tuple[int, int | None]) -> dict[str, Any]:
    found: dict[str, Any] = {"request_bytes": ours[0], "request_bytes_of_vllm": vanilla[0]}
    if vanilla[1] is not None:
        found |= {"requests_that_fit": ours[1], "requests_that_fit_in_vllm": vanilla[1]}
    return found


def _with_one_state(arguments: Sequence[str], cache_bytes: int | None, form: str) -> tuple[int, int | None]:
    """Return the same as :func:`_requests` with one state per request in a form, from a second configuration."""
    from vllm.logger import init_logger

    from nwor_ops.vllm.recurrent.plugin import prepare

    with _environment({"VLLM_NWOR_RECURRENT": form, SWITCH: "on"}):
        vllm_config = configure(arguments)
        prepare(vllm_config, init_logger("vllm.plugins.nwor_ops"))
        return _requests(vllm_config, _Layers.of(vllm_config, cache_bytes))


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
