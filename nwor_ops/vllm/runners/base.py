"""What attaching to a model runner is, whichever generation of vLLM's it is.

A generation is a :class:`RunnerKind` (``runner_v1.py``, ``runner_v2.py``): where its step begins and ends, and
what it calls its buffers. Everything is wrapped on **instances**, of the runner and of each target layer's
``impl``; classes stay as they are, so another engine in the same process is not touched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from nwor_ops.config import NworConfig
from nwor_ops.vllm import spare_blocks
from nwor_ops.vllm.layers.back_ends import LATENT_IMPLS, check_tables, target_layers
from nwor_ops.vllm.layers.target import TargetLayer
from nwor_ops.vllm.session import Session
from nwor_ops.vllm.spare_blocks import SpareBlocks
from nwor_ops.vllm.support import Hook, Unsupported, check_engine, check_vllm

# What a wrapper takes in place of a method: that method, bound. What it returns replaces it.
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]
_MARK = "_nwor_wrapper"


@dataclass(frozen=True)
class RunnerKind:
    """One generation of vLLM's model runner.

    Attributes:
        module: where its ``GPUModelRunner`` is.
        hooks: everything of vLLM's that is wrapped or called.
        drafter_layers: the attention layers of the drafter's own model.
        slot_mapping: the persistent slot mapping of a group, padding included.
        drafter_borrows: whether the drafter attends with metadata that was made for the target.
        wrappers: for a runner, its session and the groups: method name -> wrapper.
    """

    module: str
    hooks: tuple[Hook, ...]
    drafter_layers: Callable[[Any], set[str]]
    slot_mapping: Callable[[Any, str], Tensor]
    drafter_borrows: Callable[[Any], bool]
    wrappers: Callable[[Any, Session, list[str]], Mapping[str, Wrapper]]

    def attach(self, runner: Any, config: NworConfig, logger: Any) -> Session | None:
        """Make a runner's verification steps transactions. Called once its KV cache is bound.

        Args:
            runner: a ``GPUModelRunner`` or a subclass.
            config: settings that want something.
            logger: vLLM's.

        Returns:
            The session, or None where there is nothing to do (no speculative decoding).

        Raises:
            Unsupported: before anything is wrapped or allocated.
        """
        if runner.speculative_config is None:
            return None
        check_vllm(self.hooks)
        check_engine(runner.vllm_config, runner.device.type)
        drafter_layers = self.drafter_layers(runner)
        layers = target_layers(runner, drafter_layers, config.mode)
        if not layers:
            raise Unsupported("no layer of the target model writes a KV cache of its own")
        spare = self._spare_blocks(runner, layers, drafter_layers) if config.mode == "stage" else None
        groups = sorted({layer.group for layer in layers})
        slot_mappings = {group: self.slot_mapping(runner, group) for group in groups}
        try:
            session = Session(
                config,
                layers,
                slot_mappings,
                max_num_requests=runner.max_num_reqs,
                max_draft_tokens=_max_draft_tokens(runner),
                max_drafts_per_request=runner.speculative_config.num_speculative_tokens,
                spare=spare,
                logger=logger,
            )
        except (RuntimeError, ValueError, TypeError, MemoryError) as error:
            raise Unsupported(str(error)) from error
        context = runner.compilation_config.static_forward_context
        for layer in layers if session.wraps_writers else ():
            _wrap_writer(context[layer.name].impl, layer.name, session)
        for name, wrapper in self._all_wrappers(runner, session, groups).items():
            # An attribute of the instance hides the method of the class; a second attach replaces the first.
            method = getattr(type(runner), name).__get__(runner)
            wrapped = functools.wraps(method)(wrapper(method))
            setattr(wrapped, _MARK, True)
            setattr(runner, name, wrapped)
        return session

    def _spare_blocks(self, runner: Any, layers: list[TargetLayer], drafter_layers: set[str]) -> SpareBlocks:
        """What mode ``"stage"`` needs, or :class:`Unsupported`."""
        check_vllm(spare_blocks.HOOKS)
        spare_blocks.check_scheduler(runner.vllm_config)
        check_tables(runner, layers, drafter_layers if self.drafter_borrows(runner) else set())
        return spare_blocks.spare_blocks(runner.vllm_config, runner.kv_cache_config)

    def detach(self, runner: Any) -> None:
        """Take every wrapper off again: the runner binds a new cache, or is refused."""
        for owner, name, _ in wrapped_methods(runner):
            vars(owner).pop(name, None)  # layers may share an implementation

    def _all_wrappers(self, runner: Any, session: Session, groups: list[str]) -> dict[str, Wrapper]:
        # The two halves of a step: whatever they raise, the drafts are undone before anybody reuses a block.
        def closing(half: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    return half(*args, **kwargs)
                except BaseException:
                    session.after_failure(session.close_interrupted)
                    raise

            return run

        def whole(method: Callable[..., Any]) -> Callable[..., Any]:
            return method

        def closing_around(inner: Wrapper) -> Wrapper:
            return lambda method: closing(inner(method))

        wrappers = dict(self.wrappers(runner, session, groups))
        if session.spare is not None or session.audit is not None:
            wrappers["execute_model"] = functools.partial(_forward, session)
        for half in ("execute_model", "sample_tokens"):
            wrappers[half] = closing_around(wrappers.get(half, whole))
        return wrappers


def _forward(session: Session, execute: Callable[..., Any]) -> Callable[..., Any]:
    """``execute_model``, from the blocks that it is given to the end of the forward."""

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if session.spare is not None:
            session.spare.check(scheduler_output)
        output = execute(scheduler_output, *args, **kwargs)
        session.forwarded("after the forward")
        return output

    return execute_model


def _max_draft_tokens(runner: Any) -> int:
    """Most drafts in one batch: every request with all of its own, as far as the batch has room."""
    return min(runner.max_num_reqs * runner.speculative_config.num_speculative_tokens, runner.max_num_tokens)


def log_bytes(runner: Any) -> int:
    """Memory that the undo log of a runner will take, before there is a cache: a row of each layer per draft."""
    row_bytes = sum(-(-spec.page_size_bytes // spec.block_size) for spec in runner.get_kv_cache_spec().values())
    return _max_draft_tokens(runner) * row_bytes


def _wrap_writer(impl: Any, name: str, session: Session) -> None:
    def do_kv_cache_update(
        layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        session.write(name, key, value, kv_cache, slot_mapping)

    def do_latent_cache_update(
        latent: Tensor, rotated_key: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *rest: Any
    ) -> None:
        session.write(name, latent, rotated_key, kv_cache, slot_mapping, *rest)

    latent = f"{type(impl).__module__}.{type(impl).__qualname__}" in LATENT_IMPLS
    wrapper = do_latent_cache_update if latent else do_kv_cache_update
    setattr(wrapper, _MARK, True)
    impl.do_kv_cache_update = wrapper


def wrapped_methods(runner: Any) -> list[tuple[Any, str, Any]]:
    """Owner, name and function of all that :meth:`RunnerKind.attach` put on a runner and its layers."""
    layers = runner.compilation_config.static_forward_context.values()
    return [
        (owner, name, value)
        for owner in (runner, *(getattr(layer, "impl", layer) for layer in layers))
        for name, value in vars(owner).items()
        if isinstance(value, FunctionType) and hasattr(value, _MARK)
    ]
