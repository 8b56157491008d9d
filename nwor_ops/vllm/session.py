"""One model runner's transactions: what is the same for every generation of vLLM's runner.

A runner module (``runner_v1``) turns its runner's objects into a :class:`Step` and calls
:meth:`Session.begin` and :meth:`Session.commit`; the wrapped writer of each target layer calls
:meth:`Session.write`. The policy for errors is here and nowhere else:

- strict (default): the error goes up, the engine stops with the reason;
- ``on_unsupported="vanilla"``: the step goes on as if this library were not there, and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nwor_ops import library
from nwor_ops.config import NworConfig
from nwor_ops.manager import DraftCommitManager, State, set_current_manager
from nwor_ops.stats import Stats
from nwor_ops.vllm.audit import AuditedLayer, AuditError, CacheAudit
from nwor_ops.window import Window


@dataclass(frozen=True)
class TargetLayer:
    """A layer of the target model whose cache writes belong to the transaction.

    Attributes:
        audited: the layer as the audit sees it; also names it.
        fused: our kernel logs and writes; else it logs, and the layer's own writer writes.
        kv_cache_dtype: for the fused kernel.
        k_scale, v_scale: float32 scales for the fused kernel, or None.
    """

    audited: AuditedLayer
    fused: bool
    kv_cache_dtype: str = "auto"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One forward of the target model, as its runner describes it.

    Attributes:
        window: device tensors for the manager.
        draft_token_ids: int ``[P]``, device.
        query_start_loc: host; for the audit.
        num_draft_tokens: host, per request.
    """

    window: Window
    draft_token_ids: Tensor
    query_start_loc: list[int]
    num_draft_tokens: list[int]


class Session:
    """Everything this library holds for one model runner.

    Args:
        config: what was asked for.
        layers: the target layers.
        limits: ``max_num_tokens``, ``max_num_requests``, ``max_draft_tokens`` of the engine.
        slot_mappings: the runner's persistent slot mapping per group: a micro-batch's slices are
            located in it by their address.
        logger: vLLM's.
    """

    def __init__(
        self,
        config: NworConfig,
        layers: list[TargetLayer],
        limits: dict[str, int],
        slot_mappings: Callable[[str], Tensor],
        logger: Any,
    ) -> None:
        self.config = config
        self.mode = config.mode
        self._layers = {layer.audited.name: layer for layer in layers}
        self._slot_mappings = slot_mappings
        self._logger = logger
        self._step: Step | None = None
        self.vanilla_steps: Counter[str] = Counter()
        self.manager: DraftCommitManager | None = None
        if config.mode == "cow":
            self.manager = self._make_manager(layers, limits)
        self.audit = (
            CacheAudit([layer.audited for layer in layers], enforce=config.mode != "off") if config.audit else None
        )

    def _make_manager(self, layers: list[TargetLayer], limits: dict[str, int]) -> DraftCommitManager:
        device = layers[0].audited.kv_cache.device
        kind = "cuda" if device.type == "cuda" else "cpu"
        problem = next(lib.problem for lib in library.loaded_libraries() if lib.kind == kind)
        if problem:
            raise RuntimeError(problem)
        manager = DraftCommitManager(**limits, device=device)
        for layer in layers:
            audited = layer.audited
            manager.register_layer(audited.name, audited.planes(audited.kv_cache), audited.group)
        manager.allocate()
        set_current_manager(manager)
        return manager

    # ------------------------------------------------------------ the three moments of a step

    def begin(self, step: Step) -> None:
        """After the runner prepared its inputs, before the forward."""
        self.close_interrupted()
        if self.audit is not None:
            self.audit.begin(step.query_start_loc, step.num_draft_tokens, dict(step.window.slot_mappings))
        if self.manager is None:
            return
        try:
            self.manager.begin(step.window)
        except Exception as error:
            self._fall_back("begin", error)
        else:
            self._step = step

    def write(self, name: str, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """In place of the layer's own writer."""
        layer = self._layers[name]
        own_writer = layer.audited.write
        if kv_cache.data_ptr() != layer.audited.kv_cache.data_ptr():
            own_writer(key, value, kv_cache, slot_mapping)  # a throw-away cache
            return
        if self.audit is not None:
            self.audit.write(name, key, value, slot_mapping)
        if self._step is None or not self._write_in_window(layer, key, value, slot_mapping):
            own_writer(key, value, kv_cache, slot_mapping)

    def commit(self, sampled_token_ids: Tensor) -> None:
        """After sampling, before the drafter runs."""
        step = self._step
        if step is not None:
            assert self.manager is not None
            try:
                self.manager.commit(step.draft_token_ids, sampled_token_ids)
                self._step = None
            except Exception as error:
                self._fall_back("commit", error)
        if self.audit is not None:
            self.audit.commit(sampled_token_ids)

    def close_interrupted(self) -> None:
        """A window that is still open belongs to a step that failed: undo every draft it wrote."""
        if self.manager is None or self.manager.state is not State.OPEN:
            return
        self._step = None
        self.manager.cancel()
        if self.audit is not None:
            self.audit.drop()
        self._count("cancelled", "a step ended without sampling; its drafts were undone")

    # ------------------------------------------------------------ reporting

    def stats(self) -> Stats:
        """Totals so far; waits for the device."""
        return self.manager.stats() if self.manager is not None else Stats(0, 0, 0, 0, 0, 0, 0)

    def describe(self) -> str:
        if self.manager is None:
            return f"watching {len(self._layers)} layers, no transaction"
        fused = sum(layer.fused for layer in self._layers.values())
        return (
            f"{len(self._layers)} layers ({fused} through the fused writer), "
            f"{self.manager.max_draft_tokens} log rows, log {self.manager.log_bytes / 2**20:.1f} MiB, "
            f"{self.manager.launches_per_window} launches per step beyond the writers"
        )

    # ------------------------------------------------------------ inside

    def _write_in_window(self, layer: TargetLayer, key: Tensor, value: Tensor, slot_mapping: Tensor) -> bool:
        """Log, and write if fused. True if nothing is left to do."""
        assert self.manager is not None
        audited = layer.audited
        try:
            base = self._slot_mappings(audited.group)
            token_offset = (slot_mapping.data_ptr() - base.data_ptr()) // slot_mapping.element_size()
            if not 0 <= token_offset <= base.numel() - slot_mapping.numel():
                raise RuntimeError(f"layer {audited.name} was given a slot mapping that is not its group's")
            if layer.fused:
                self.manager.write(
                    audited.name,
                    key,
                    value,
                    slot_mapping,
                    k_scale=layer.k_scale,
                    v_scale=layer.v_scale,
                    kv_cache_dtype=layer.kv_cache_dtype,
                    token_offset=token_offset,
                )
                return True
            self.manager.log(audited.name, slot_mapping, token_offset=token_offset)
        except Exception as error:
            self._fall_back("write", error)
        return False

    def _fall_back(self, moment: str, error: Exception) -> None:
        """Strict: stop with the reason. Else: this step ends as it would without the library."""
        if self.config.strict or isinstance(error, AuditError):
            raise RuntimeError(
                f"nwor: {moment} failed: {error} (VLLM_NWOR_ON_UNSUPPORTED=vanilla runs such steps without the "
                "transaction)"
            ) from error
        self._step = None
        if self.manager is not None and self.manager.state is State.OPEN:
            self.manager.abandon()
        if self.audit is not None:
            self.audit.drop()
        self._count(f"{moment} failed", str(error))

    def _count(self, reason: str, detail: str) -> None:
        if self.vanilla_steps[reason] == 0:
            self._logger.warning("nwor: %s: %s (further ones are counted, not logged)", reason, detail)
        self.vanilla_steps[reason] += 1
