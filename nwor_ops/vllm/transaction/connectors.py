"""KV connectors: delay exports from inside the attention op until the commit, and report loads to an audit.

Supported connectors read everything else after the commit, by the order in which vLLM calls them.
``CONNECTORS`` of ``vllm.support.connectors`` lists when each connector reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nwor_ops.vllm.hooks import Hook, check_vllm
from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.support.connectors import connectors_of
from nwor_ops.vllm.support.refusals import EXPORTED_TABLE
from nwor_ops.vllm.transaction.session import Session

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
    """Return the connector of this worker, or None if its engine has none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


class ConnectorAttachment(StepListener):
    """Delay one connector's exports until the commit."""

    # Patched methods of the connector. The method of the same name of this class is called instead. Its first argument
    # is the connector's bound method.
    patched: tuple[str, ...]

    def __init__(self, runner: Any) -> None:
        connectors = list(connectors_of(runner.vllm_config.kv_transfer_config))
        self.layer_wise = [name for name, connector in connectors if connector.layer_wise]
        self.loads_any_time = any(connector.loads_any_time for _, connector in connectors)
        self.patched = ("save_kv_layer",) if self.layer_wise else ()
        self.connector = worker_connector()
        if self.connector is not None:
            check_vllm(HOOKS)
        self._exports: list[tuple[Callable[[], None], Any]] = []

    def check_tables(self, table_copies: dict[str, str]) -> None:
        """Check that no export in attention uses a block table that mode ``"stage"`` redirected."""
        for layer, impl in table_copies.items() if self.layer_wise else ():
            raise EXPORTED_TABLE.because(name=self.layer_wise[0], layer=layer, impl=impl)

    def follow(self, session: Session) -> None:
        """Subscribe to the steps of a session."""
        self.session = session
        if self.layer_wise:
            session.subscribe(self)
        if session.notifies("loading") or session.shadow_blocks is not None:
            self.patched += ("start_load_kv", "wait_for_layer_load") if self.layer_wise else ("start_load_kv",)

    # ------------------------------------------------------------ patches of the connector's methods

    def save_kv_layer(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Delay an export until the commit if a window is open. vLLM calls this in the attention op.

        While a window is open, the layer holds rows of drafts (mode cow) or lacks rows of the step (mode stage).
        """
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
        self.session.loading()
        load(*args, **kwargs)
        self.session.loaded()

    # ------------------------------------------------------------ events of the session

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Run the delayed exports, also of a vanilla step. A cancelled step exports nothing."""
        from vllm.forward_context import override_forward_context

        exports, self._exports[:] = list(self._exports), []
        if num_sampled is None:
            return
        for export, context in exports:
            with override_forward_context(context):
                export()

    def drop(self) -> None:
        """Forget the delayed exports of a step that failed."""
        self._exports.clear()
