"""Attach to a model runner: the parts that both generations share.

Each generation is a subclass of :class:`RunnerAttachment` (``v1.py``, ``v2.py``). It knows where its step begins and
ends, and the names of its buffers. Methods are patched on **instances** only, namely the runner and each target layer's
``impl``. Classes stay unchanged, so another engine in the same process is not affected.
"""

from __future__ import annotations

import abc
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.transaction.window import Layout
from nwor_ops.vllm.hooks import Hook
from nwor_ops.vllm.support.refusals import ALL_RECURRENT, TAKEN_LAYERS, UNNAMED_LAYERS, Check, Unsupported
from nwor_ops.vllm.transaction.connectors import ConnectorAttachment
from nwor_ops.vllm.transaction.layers.back_ends import (
    KIMI_ATTENTION,
    LATENT_IMPLS,
    check_tables,
    qualified_name,
    table_copies,
    target_layers,
)
from nwor_ops.vllm.transaction.session import Session
from nwor_ops.vllm.transaction.shadow_blocks import HOOKS as SHADOW_HOOKS
from nwor_ops.vllm.transaction.shadow_blocks import shadow_blocks
from nwor_ops.vllm.transaction.supported import checks_of, is_recurrent

# Attributes in which drafters keep the names of their attention layers. They belong to drafters of the V2 runner,
# drafters of the V1 runner, and the V1 ExtractHiddenStatesProposer, in this order.
_NAMES_OF_LAYERS = ("draft_attn_layer_names", "_draft_attn_layer_names", "attn_layer_names")


def runner_hooks(module: str, **more: str) -> tuple[Hook, ...]:
    """Return the hooks of a ``GPUModelRunner``, by signature: those common to both generations, and ``more``."""
    common = {
        "initialize_kv_cache": "kv_cache_config, is_profiling, kv_cache_allocation_context",
        "sample_tokens": "grammar_output",
        "profile_run": "randomize_inputs",
        "get_kv_cache_spec": "",
    }
    return tuple(Hook(module, f"GPUModelRunner.{name}", signature) for name, signature in (common | more).items())


Auditor = Callable[["RunnerAttachment", Session, bool, Any], None]


class RunnerAttachment(abc.ABC):
    """Run the verification steps of one model runner as transactions.

    ``hooks`` are all vLLM functions that are patched or called. ``patched`` names the runner's methods that are
    patched. The method of the same name in this class is called instead, with the bound original as first argument.
    """

    module: ClassVar[str]
    hooks: ClassVar[tuple[Hook, ...]]
    patched: ClassVar[tuple[str, ...]] = ("execute_model", "sample_tokens")
    session: Session
    entering: frozenset[str] = frozenset()  # requests of the step that have drafts and are new to the runner

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    # ------------------------------------------------------------ implemented by each generation

    @abc.abstractmethod
    def slot_mapping(self, group: str) -> Tensor:
        """Return the persistent slot mapping of a group, padding included."""

    @abc.abstractmethod
    def block_table(self, group: str) -> Tensor:
        """Return the persistent block table of a group, which attention reads."""

    @abc.abstractmethod
    def layout(self, slot_mappings: dict[str, Tensor], block_tables: dict[str, Tensor]) -> Layout:
        """Return the layout of all windows: these tensors, and how the runner counts drafts."""

    @abc.abstractmethod
    def table_rows(self, group: str) -> Iterable[tuple[int, list[int]]]:
        """Return, for each request of the last prepared batch, the number of tokens computed before it and the block
        numbers in its row of a group's block table. Synchronizes with the device."""

    @abc.abstractmethod
    def drafter_layers(self) -> set[str]:
        """Return the names of the drafter's own attention layers, by :func:`named_layers`."""

    @property
    def drafter_borrows(self) -> bool:
        """Whether the drafter attends with metadata that was built for the target's batch."""
        return False

    # ------------------------------------------------------------ attaching

    @classmethod
    def checks_of(cls, vllm_config: Any, device_type: str, mode: str) -> Iterator[Check]:
        """Yield the checks of a configuration (:func:`nwor_ops.vllm.transaction.supported.checks_of`)."""
        return checks_of(vllm_config, device_type, mode, cls.hooks if mode != "stage" else (*cls.hooks, *SHADOW_HOOKS))

    def attach(self, config: NworConfig, logger: Any, audit: Auditor | None = None) -> Session | None:
        """Patch the runner and its target layers.

        ``audit`` subscribes an audit. It gets this attachment, the session, whether a KV connector may load rows at any
        time, and the logger. Return None if the engine does not use speculative decoding.
        """
        runner = self.runner
        if runner.speculative_config is None:
            return None
        for check in self.checks_of(runner.vllm_config, runner.device.type, config.mode):
            check()
        attached = ConnectorAttachment(runner)
        drafter_layers = self.drafter_layers()
        layers = target_layers(runner, drafter_layers, config.mode)
        if not layers:
            raise ALL_RECURRENT.because()
        shadow = None
        if config.mode == "stage":
            check_tables(runner, layers, drafter_layers if self.drafter_borrows else set())
            shadow = shadow_blocks(runner.vllm_config, runner.kv_cache_config)
            attached.check_tables(table_copies(runner, layers))
        try:
            session = Session(
                config,
                layers,
                {group: self.slot_mapping(group) for group in sorted({layer.group for layer in layers})},
                max_num_requests=runner.max_num_reqs,
                max_draft_tokens=max_draft_tokens(runner.vllm_config),
                max_drafts_per_request=runner.speculative_config.num_speculative_tokens,
                shadow_blocks=shadow,
                logger=logger,
            )
            if audit is not None:
                audit(self, session, attached.loads_any_time, logger)
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            raise Unsupported(str(error)) from error
        self.patch(session)
        if attached.connector is not None:
            attached.follow(session)
            session.patches.put_methods(attached.connector, attached, attached.patched)
        context = runner.compilation_config.static_forward_context
        for layer in layers if session.patches_writers else ():
            writes_itself = qualified_name(context[layer.name]) == KIMI_ATTENTION
            patch = _patch_model_writer if writes_itself else _patch_writer
            patch(context[layer.name], layer.name, session)
        return session

    def patch(self, session: Session) -> None:
        """Patch the runner's methods."""
        self.session = session
        tables = {group: self.block_table(group) for group in session.slot_mappings}
        session.bind(self.layout(session.slot_mappings, tables))
        session.patches.put_methods(self.runner, self, self.patched)

    # ------------------------------------------------------------ methods that replace the runner's

    # If either half of a step raises, the drafts are undone before a block is used again.

    def execute_model(self, execute: Callable[..., Any], scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the first half of a step, from its inputs to the end of the forward."""
        session = self.session
        try:
            if session.shadow_blocks is not None:
                session.shadow_blocks.check(scheduler_output)
                self.entering = _entering_with_drafts(scheduler_output)
                # Without synchronous loads, the connector's calls in this step load rows for later steps.
                session.loads = scheduler_output.has_sync_kv_loads
            output = execute(scheduler_output, *args, **kwargs)
            session.forwarded("after the forward")
            return output
        except BaseException:
            session.after_failure()
            raise

    def sample_tokens(self, sample: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the second half of a step, from sampling to the end of the drafter.

        The commit is inside, right after sampling. If the drafter fails, accepted drafts are therefore kept.
        """
        try:
            return sample(*args, **kwargs)
        except BaseException:
            self.session.after_failure()
            raise


def _entering_with_drafts(scheduler_output: Any) -> frozenset[str]:
    """Return the requests that have drafts in this step, and are new to the runner or return to it with other blocks.

    Such drafts exist: the scheduler invents some for a request that has a single token left to compute.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if not drafts:
        return frozenset()
    new = (request.req_id for request in scheduler_output.scheduled_new_reqs)
    resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
    return frozenset(name for name in (*new, *resumed) if name in drafts)


def named_layers(runner: Any, drafter: Any) -> set[str]:
    """Return the layers that a drafter names as its own; the set is empty if it has none."""
    named = {name for attribute in _NAMES_OF_LAYERS for name in getattr(drafter, attribute, None) or ()}
    context = runner.compilation_config.static_forward_context
    modules = {id(module) for module in runner.get_model().modules()}
    cached = [name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names]
    of_target = {name for name in cached if id(context[name]) in modules}
    for refusal, layers in (
        (UNNAMED_LAYERS, [name for name in cached if name not in named | of_target]),
        (TAKEN_LAYERS, sorted(named & of_target)),
    ):
        if layers:
            raise refusal.because(
                method=runner.speculative_config.method, layers=", ".join(layers), drafter=type(drafter).__name__
            )
    return named


def max_draft_tokens(vllm_config: Any) -> int:
    """Return the maximum number of draft tokens in one batch. Each request has its maximum, limited by the batch's
    tokens."""
    scheduler, drafts = vllm_config.scheduler_config, vllm_config.speculative_config.num_speculative_tokens
    return min(scheduler.max_num_seqs * drafts, scheduler.max_num_batched_tokens)


def log_bytes(runner: Any) -> int:
    """Return the bytes that a runner's undo log will take: one row per draft token and attention layer. The cache need
    not exist yet."""
    attention = [spec for spec in runner.get_kv_cache_spec().values() if not is_recurrent(spec)]
    return max_draft_tokens(runner.vllm_config) * sum(-(-s.page_size_bytes // s.block_size) for s in attention)


def _patch_writer(attention: Any, name: str, session: Session) -> None:
    write = session.writer(name)

    def do_latent_cache_update(*arguments: Any) -> None:  # without the layer
        write(None, *arguments)

    ours = do_latent_cache_update if qualified_name(attention.impl) in LATENT_IMPLS else write
    session.patches.put(attention.impl, "do_kv_cache_update", lambda original: ours)


def _patch_model_writer(attention: Any, name: str, session: Session) -> None:
    """Patch a layer whose model writes the cache rows in its own kernel.

    The rows are logged and written before that kernel, which writes the same bytes again. This happens inside the
    function that vLLM excludes from piecewise graphs, namely all of the layer's attention.
    """
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.forward_context import get_forward_context

    attend, write = functools.partial(inspect.unwrap(type(attention)._attention), attention), session.writer(name)

    @eager_break_during_capture
    def _attention(positions: Tensor, q: Tensor, latent: Tensor, rotated_key: Tensor, out: Tensor) -> None:
        context: Any = get_forward_context()
        if context.attn_metadata is not None:
            tokens = context.attn_metadata[name].num_actual_tokens
            slots, rest = context.slot_mapping[name][:tokens], (attention.impl.kv_cache_dtype, attention._k_scale)
            write(attention, latent[:tokens], rotated_key[:tokens], attention.kv_cache, slots, *rest)
        attend(positions, q, latent, rotated_key, out)

    session.patches.put(attention, "_attention", lambda original: _attention)
