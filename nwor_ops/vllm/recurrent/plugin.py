"""Install one state per request in vLLM.

When a runner loads its model, :func:`prepare` checks the configuration. If it asks for one state, vLLM's registry of
pluggable layers creates our layer. The model's class then reports the size of a page with records
(``get_mamba_specs_from_config``, which vLLM calls if a class has it). Our layer selects the KV-cache spec, the
attention back end and the metadata builder. After a cache is bound, :func:`attach` gives the builders of its groups
their shared cursors.

This module does not import vLLM at the top.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor_ops.recurrent.cursors import Cursors
from nwor_ops.vllm.environment import settings_of
from nwor_ops.vllm.errors import CannotContinue
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.metrics import publisher
from nwor_ops.vllm.recurrent.block_reuse import BlockOwners, to_device
from nwor_ops.vllm.recurrent.models import model_of
from nwor_ops.vllm.recurrent.page import GroupLayers, RecordGeometry
from nwor_ops.vllm.recurrent.prefix_caching import AlignedStates
from nwor_ops.vllm.recurrent.supported import problem_of, uses_recurrent
from nwor_ops.vllm.step_listener import RecurrentListener
from nwor_ops.vllm.support.features import RECURRENT
from nwor_ops.vllm.support.refusals import UNKNOWN_LAYERS
from nwor_ops.vllm.transaction.supported import is_recurrent

_patches = Patches("recurrent: pages")
ENGINE_PATCHES = "recurrent: engine"  # patches of one runner, over those of its class
_engines: weakref.WeakKeyDictionary[Any, RecurrentEngine] = weakref.WeakKeyDictionary()


def recurrent_engines() -> list[RecurrentEngine]:
    """Return the states of the engines in this process. Engines in other processes are not included.

    Example:
        Here no engine runs.

        >>> [state.form for state in nwor_ops.vllm.recurrent_engines()]
        []
    """
    return list(_engines.values())


def recurrent_engine_of(runner: Any) -> RecurrentEngine | None:
    """Return the states of a runner's engine, or None if it has no single states."""
    return _engines.get(runner)


class RecurrentEngine:
    """The states of one engine. The plugin makes it when a cache is bound.

    ``aligned`` copies states between blocks, only with prefix caching. ``owners`` clears blocks with a new owner, only
    with prefix caching or a KV connector. ``folds_tails``: whether :meth:`after_forward` folds the ends of prompts.

    Example:
        Here no engine runs.

        >>> [(state.num_layers, state.record_bytes) for state in nwor_ops.vllm.recurrent_engines()]
        []
    """

    def __init__(
        self,
        runner: Any,
        builders: list[Any],
        geometry: RecordGeometry,
        cursors: Cursors,
        aligned: AlignedStates | None = None,
        owners: BlockOwners | None = None,
        folds_tails: bool = False,
        patches: Patches | None = None,
    ) -> None:
        from vllm.v1.kv_cache_interface import iter_layer_specs

        self.folds_tails = folds_tails
        self.patches = patches or Patches(ENGINE_PATCHES)
        self.builders, self._cursors, self._aligned, self._owners = builders, cursors, aligned, owners
        self.listener: RecurrentListener | None = None
        self._slept: tuple[int, Tensor] | None = None  # steps and skipped requests when the engine went to sleep
        cache, drafts = runner.kv_cache_config, geometry.rows - 1
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        pages = [-(-spec.max_memory_usage_bytes(runner.vllm_config) // spec.page_size_bytes) for spec in specs]
        self.blocks_per_request = sum(pages)
        self.blocks_before = self.blocks_per_request + drafts * sum(is_recurrent(spec) for spec in specs)
        self.states_before = drafts + 1
        self.num_blocks = cache.num_blocks - 1  # vLLM does not use the first block
        self.max_model_len = runner.max_model_len
        self._record_bytes, self._chunk = geometry.num_bytes, geometry.chunk
        self._cache_bytes = max((tensor.size for tensor in cache.kv_cache_tensors), default=0)
        # If layers of several page sizes share a block, vLLM has a spec for each layer of a group.
        recurrent = next(spec for spec in specs if is_recurrent(spec))
        self._page_bytes = next(iter(iter_layer_specs(recurrent))).page_size_bytes

    @property
    def num_layers(self) -> int:
        return sum(len(builder.group.layers) for builder in self.builders)

    @property
    def form(self) -> str:
        """``"exact"`` or ``"chunk"``."""
        return "chunk" if self._chunk else "exact"

    @property
    def record_bytes(self) -> int:
        """Bytes of the records in all pages of the cache."""
        return self._cache_bytes * self._record_bytes // self._page_bytes

    def counts(self, skipped: int) -> dict[str, float]:
        """Return the totals for the metrics. ``skipped``: the value of :attr:`counter`."""
        return {
            "recurrent_steps": self.builders[0].steps,  # every group plans every step
            "recurrent_skipped_requests": skipped,
        }

    @property
    def counter(self) -> Tensor:
        """int64 ``[1]``: number of skipped requests. After :meth:`go_to_sleep` and until the next step, on the host."""
        if self._slept is not None and self._slept[0] == self.builders[0].steps:
            return self._slept[1]
        return self._cursors.num_skipped

    def go_to_sleep(self) -> None:
        """Copy the counter to the host, because vLLM is about to release its memory (``Worker.sleep``)."""
        self._slept = self.builders[0].steps, self._cursors.num_skipped.to("cpu", copy=True)

    def listen(self, listener: RecurrentListener) -> None:
        """Send the events of the states to a listener. The caller notifies it of each forward."""
        layers = [layer for builder in self.builders for layer in builder.group.layers.values()]
        for source in (self, *self.builders, *layers, self._aligned, self._owners):
            if source is not None:
                source.listener = listener
        importlib.import_module("nwor_ops.vllm.recurrent.layer").watch_checkpoints()  # it imports vLLM

    def after_forward(self, input_batch: Any) -> None:
        """Check the requests of a step, and fold the ends of prompts. Call it between forward and sampling.

        Raises:
            CannotContinue: a window skipped a request, as far as the host knows.
        """
        if self._cursors.latest_skipped() > 0:
            raise CannotContinue.because(
                "recurrent: the counts of accepted tokens of some requests are invalid. Their windows were skipped, "
                "and their outputs are zeros",
                "their recurrent states are not known",
            )
        if self.folds_tails:
            self.fold_tails(input_batch)

    def fold_tails(self, input_batch: Any) -> None:
        """Fold the state of each prompt that ran as a window in this step.

        vLLM runs one token of a prompt as a window and pads it with placeholder drafts. So K + 1 rows are pending, and
        only the first is valid. At the end of the prompt, vLLM may give this block to another request, and a KV
        connector may export it. Neither knows about pending rows.
        """
        tails = input_batch.prefill_runs_as_decode_np
        if tails is None or not tails.any():
            return
        if self.listener is not None:
            self.listener.folding_tails()
        places = to_device(tails.nonzero()[0], self.builders[0].plan.device)
        with torch.inference_mode():
            for builder in self.builders:
                builder.fold_first_rows(places)

    def describe(self) -> str:
        now, before = self.blocks_per_request, self.blocks_before
        record = f"chunks of {self._chunk} tokens and a record of" if self._chunk else "a record of"
        return (
            f"{self.num_layers} layers with 1 state per request (vLLM: {self.states_before}) and {record} "
            f"{self._record_bytes / 2**10:.1f} KiB ({100 * self._record_bytes / self._page_bytes:.1f}% of a page); a "
            f"request of {self.max_model_len} tokens has {now} blocks ({before}), {self.num_blocks // now} of them fit"
        )


# ---------------------------------------------------------------- installing


def prepare(vllm_config: Any, logger: Any) -> None:
    """Install our layers and page sizes if the engine asks for one state. Call it before vLLM creates the layers."""
    if not _check(vllm_config, logger):
        return
    from vllm.model_executor.models import ModelRegistry

    importlib.import_module("nwor_ops.vllm.recurrent.layer").install(model_of(vllm_config))  # it imports vLLM
    model_config = vllm_config.model_config
    model: Any
    model, _ = ModelRegistry.resolve_model_cls(model_config.architecture, model_config=model_config)
    add_records(model)


def add_records(model: Any) -> None:
    """Make a model's class report its page sizes with the records. Safe to call again.

    vLLM calls ``get_mamba_specs_from_config`` if the class has it. Most classes do not; their single spec follows from
    the shape and dtype of the state.
    """

    def decorator(given: Callable[..., Any] | None) -> Any:
        def get_mamba_specs_from_config(cls: Any, vllm_config: Any) -> tuple[Any, ...]:
            from vllm.v1.kv_cache_interface import MambaSpec

            shapes = tuple(cls.get_mamba_state_shape_from_config(vllm_config))
            if given is not None:
                specs = tuple(given(vllm_config))
            else:
                dtypes = tuple(cls.get_mamba_state_dtype_from_config(vllm_config))
                specs = (MambaSpec(shapes=shapes, dtypes=dtypes, block_size=-1),)
            if not uses_recurrent(vllm_config):
                return specs
            geometry = RecordGeometry.of(vllm_config)
            return tuple(geometry.extend(spec) if tuple(spec.shapes) == shapes else spec for spec in specs)

        return classmethod(get_mamba_specs_from_config)

    _patches.put_once(model, "get_mamba_specs_from_config", decorator, may_be_missing=True)


def attach(runner: Any, logger: Any, profiling: bool) -> None:
    """Give cursors to the layers of a V2 runner. Call it after vLLM bound a cache.

    With ``profiling`` the cache only serves to measure memory: bind the layers and nothing else.
    """
    vllm_config = runner.vllm_config
    if not _check(vllm_config, logger):  # again, because a runner may load its model without our patch of load_model
        return
    earlier = _engines.pop(runner, None)
    if earlier is not None:
        earlier.patches.undo()
    from nwor_ops.vllm.recurrent.metadata import RecurrentMetadataBuilder

    context, cache = runner.compilation_config.static_forward_context, runner.kv_cache_config
    geometry = RecordGeometry.of(vllm_config)
    cursors, builders = Cursors(cache.num_blocks, runner.device, geometry.chunk), []
    tables, numbers = [], []
    without_record = [name for _, name in model_of(vllm_config).without_record]
    for number, attn_groups in enumerate(runner.attn_groups):
        for group in attn_groups:
            if not is_recurrent(group.kv_cache_spec):
                continue
            if all(type(context[name]).__name__ in without_record for name in group.layer_names):
                continue
            builder = group.get_metadata_builder(0)
            if not isinstance(builder, RecurrentMetadataBuilder):
                raise RuntimeError(f"nwor: {UNKNOWN_LAYERS.because(layers=', '.join(group.layer_names))}")
            builder.bind(GroupLayers(cursors, [context[name] for name in group.layer_names]))
            builders.append(builder)
            tables.append(runner.block_tables.block_tables[number].gpu)
            numbers.append(number)
    if not builders:
        raise RuntimeError(f"nwor: {UNKNOWN_LAYERS.because(layers='(none)')}")
    if profiling:
        return
    aligned = owners = None
    patches = Patches(ENGINE_PATCHES)
    if vllm_config.cache_config.mamba_cache_mode == "align":
        groups = [(builder.group, table) for builder, table in zip(builders, tables, strict=True)]
        state = runner.model_state
        aligned = AlignedStates(state._mamba_ctx, groups, vllm_config.num_speculative_tokens, patches)
        patches.put_methods(state, aligned, ("preprocess_state",))
    connected = vllm_config.kv_transfer_config is not None
    if aligned is not None or connected:
        owners = BlockOwners(runner, numbers, cursors)
        owners.attach(patches)
    folds_tails = connected or vllm_config.cache_config.prefix_match_unit is not None
    _engines[runner] = RecurrentEngine(runner, builders, geometry, cursors, aligned, owners, folds_tails, patches)
    publisher.publish(runner, _engines[runner], RecurrentEngine.counts, lambda state: state.counter)
    logger.info("nwor: recurrent: active: %s", _engines[runner].describe())


def following_forwards(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch of the V2 runner's ``execute_model`` that calls :meth:`RecurrentEngine.after_forward`."""

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = execute(self, *args, **kwargs)
        state = _engines.get(self)
        if state is not None and self.execute_model_state is not None:
            state.after_forward(self.execute_model_state.input_batch)
        return result

    return execute_model


def _check(vllm_config: Any, logger: Any) -> bool:
    """Return whether the engine asks for one state per request and supports it. If it does not, raise or warn."""
    config = settings_of(vllm_config)
    if not config.recurrent:
        return False
    problem = problem_of(vllm_config)
    if problem is None:
        return True
    if config.strict:
        problem.refuse(RECURRENT, True, logger, "recurrent was asked for", "with vLLM's states")
    logger.warning_once("nwor: %s: not active: %s", RECURRENT, str(problem))
    return False
