"""KV connectors: what they export of a layer inside its attention op waits for the commit, and an audit learns what
they load.

Everything else that a supported connector reads is behind the commit by vLLM's own order (``support.CONNECTORS`` says
when each of them reads).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nwor_ops.vllm.session import Session
from nwor_ops.vllm.support import (
    EXPORTED_TABLE,
    Hook,
    check_partial_tails,
    check_vllm,
    connectors_of,
)

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CONTEXT = "vllm.forward_context"
HOOKS = (
    Hook(_BASE, "KVConnectorBase_V1.save_kv_layer", "layer_name, kv_layer, attn_metadata, kwargs"),
    Hook(_BASE, "KVConnectorBase_V1.start_load_kv", "forward_context, kwargs"),
    Hook(_BASE, "KVConnectorBase_V1.wait_for_layer_load", "layer_name"),
    Hook(_CONTEXT, "get_forward_context", ""),
    Hook(_CONTEXT, "override_forward_context", "forward_context"),
)


def worker_connector() -> Any | None:
    """The connector of this worker, if its engine has one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


class ConnectorAttachment:
    """Puts one connector's exports behind the commit.

    Args:
        runner: of either generation, its cache bound.
        mode: the session's.

    Raises:
        Unsupported: what a connector reads is not what the mode promises.
    """

    # Methods of the connector in whose place the method of that name here is called: with its own, bound, and then
    # with its arguments.
    patched: tuple[str, ...]

    def __init__(self, runner: Any, mode: str) -> None:
        check_partial_tails(runner.vllm_config, runner.kv_cache_config, mode)
        found = list(connectors_of(runner.vllm_config.kv_transfer_config))
        self.layer_wise = [name for name, connector in found if connector.layer_wise]
        self.loads_any_time = any(connector.loads_any_time for _, connector in found)
        self.patched = ("save_kv_layer",) if self.layer_wise else ()
        self.connector = worker_connector()
        if self.connector is not None:
            check_vllm(HOOKS)
        self._exports: list[tuple[Callable[[], None], Any]] = []

    def check_tables(self, table_copies: dict[str, str]) -> None:
        """Raises :class:`Unsupported` where exports in attention would go by what mode ``"stage"`` has redirected.

        Args:
            table_copies: the target layers whose metadata has a block table of its own, and their back ends.
        """
        for layer, impl in table_copies.items() if self.layer_wise else ():
            raise EXPORTED_TABLE.because(name=self.layer_wise[0], layer=layer, impl=impl)

    def follow(self, session: Session) -> None:
        """Hear of the steps of a session from now on."""
        self.session = session
        if self.layer_wise:
            session.subscribe(commit=self._step_ended, drop=self._exports.clear)
        if session.audit is not None or session.shadow_blocks is not None:
            self.patched += ("start_load_kv", "wait_for_layer_load") if self.layer_wise else ("start_load_kv",)

    # ------------------------------------------------------------ in the place of the connector's methods

    def save_kv_layer(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """In an attention op. While a window is open the layer holds rows of drafts, or lacks those of the step."""
        if not self.session.in_window:
            save(*args, **kwargs)
            return
        from vllm.forward_context import get_forward_context

        self._exports.append((functools.partial(save, *args, **kwargs), get_forward_context()))

    def start_load_kv(self, load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._load(load, *args, **kwargs)

    def wait_for_layer_load(self, wait: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._load(wait, *args, **kwargs)

    def _load(self, load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.session.tell("loading")
        load(*args, **kwargs)
        self.session.loaded()

    # ------------------------------------------------------------ what the session tells of

    def _step_ended(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Also a step that went on without the transaction exports what it computed; a cancelled one does not."""
        from vllm.forward_context import override_forward_context

        exports, self._exports[:] = list(self._exports), []
        if num_sampled is None:
            return
        for export, context in exports:
            with override_forward_context(context):
                export()
