"""One model runner's transactions: what is the same for every generation of vLLM's runner.

A runner module (``runner_v1``) turns its runner's objects into a :class:`Step` and calls
:meth:`Session.begin` and :meth:`Session.commit`; the wrapped writer of each target layer calls
:meth:`Session.write`. The policy for errors is here and nowhere else:

- strict (default): the error goes up, the engine stops with the reason;
- ``on_unsupported="vanilla"``: the step goes on as if this library were not there, and is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nwor_ops import library
from nwor_ops.config import NworConfig
from nwor_ops.manager import DraftCommitManager, State, set_current_manager
from nwor_ops.stats import Stats
from nwor_ops.vllm.audit import AuditedLayer, CacheAudit
from nwor_ops.window import Window


@dataclass(frozen=True)
class TargetLayer:
    """A layer of the target model whose cache writes belong to the transaction.

    Attributes:
        audited: the layer as the audit sees it; also names it.
        fused: our kernel logs and writes; else it logs, and the layer's own writer writes.
    """

    audited: AuditedLayer
    fused: bool


@dataclass(frozen=True)
class Step:
    """One forward of the target model, as its runner describes it.

    Attributes:
        window: device tensors for the manager.
        draft_token_ids: int ``[P]``, device.
        query_start_loc: the same on the host; for the audit, which copies it at begin.
        num_draft_tokens: on the host, per request.
    """

    window: Window
    draft_token_ids: Tensor
    query_start_loc: Sequence[int]
    num_draft_tokens: list[int]


class Session:
    """Everything this library holds for one model runner.

    Args:
        config: what was asked for.
        layers: the target layers.
        limits: ``max_num_tokens``, ``max_num_requests``, ``max_draft_tokens`` of the engine.
        logger: vLLM's.
    """

    def __init__(
        self,
        config: NworConfig,
        layers: list[TargetLayer],
        limits: dict[str, int],
        logger: Any,
    ) -> None:
        self.config = config
        self.mode = config.mode
        self._layers = {layer.audited.name: layer for layer in layers}
        self._addresses = {name: layer.audited.kv_cache.data_ptr() for name, layer in self._layers.items()}
        self._logger = logger
        self._step: Step | None = None
        self._batch_starts: dict[str, int] = {}  # address of each group's slot of token 0
        self.vanilla_steps: Counter[str] = Counter()
        self.manager: DraftCommitManager | None = None
        if config.mode == "cow":
            self.manager = self._make_manager(layers, limits)
        self.audit = CacheAudit([layer.audited for layer in layers]) if config.audit else None

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
            starts = [int(start) for start in step.query_start_loc]
            slots = {group: mapping[: starts[-1]] for group, mapping in step.window.slot_mappings.items()}
            self.audit.begin(starts, step.num_draft_tokens, slots)
        if self.manager is None:
            return
        drafts, rows = step.window.num_draft_tokens, self.manager.max_draft_tokens
        if drafts is not None and drafts > rows:  # not a fault of anybody's: the step is plain vLLM's, strict or not
            self._count("more drafts than log rows", f"{drafts} drafts, {rows} rows; this step runs without an undo")
            return
        try:
            self.manager.begin(step.window)
        except Exception as error:
            self._fall_back("begin", error)
        else:
            self._step = step
            self._batch_starts = {group: slots.data_ptr() for group, slots in step.window.slot_mappings.items()}

    def write(self, name: str, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """In place of the layer's own writer."""
        layer = self._layers[name]
        own_writer = layer.audited.write
        if self.audit is not None:
            self.audit.write(name, key, value, slot_mapping)
        if self._step is None or not self._write_in_window(layer, key, value, kv_cache, slot_mapping):
            own_writer(key, value, kv_cache, slot_mapping)

    def commit(self, sampled_token_ids: Tensor) -> None:
        """After sampling, before the drafter runs."""
        step, self._step = self._step, None
        committed = False
        if step is not None:
            assert self.manager is not None
            try:
                self.manager.commit(step.draft_token_ids, sampled_token_ids)
                committed = True
            except Exception as error:
                self._fall_back("commit", error)
        if self.audit is not None:
            self.audit.commit(sampled_token_ids, enforce=committed)

    def close_interrupted(self) -> None:
        """A window that is still open belongs to a step that failed: undo every draft it wrote."""
        self._step = None
        if self.manager is None or self.manager.state is not State.OPEN:
            if self.audit is not None:
                self.audit.drop()
            return
        try:
            self.manager.cancel()
        except Exception as error:
            self._fall_back("cancel", error)
            return
        self._count("cancelled", "a step ended without sampling; its drafts were undone")
        if self.audit is not None:
            self.audit.commit(None, enforce=True)

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

    def _write_in_window(
        self, layer: TargetLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> bool:
        """Log, and write if fused. True if nothing is left to do."""
        assert self.manager is not None
        audited = layer.audited
        try:
            if kv_cache.data_ptr() != self._addresses[audited.name]:
                raise RuntimeError(f"the cache of layer {audited.name} is not where it was when the engine started")
            token_offset = self._token_offset(audited.group, slot_mapping)
            if layer.fused:
                self.manager.write(audited.name, key, value, slot_mapping, token_offset=token_offset)
                return True
            self.manager.log(audited.name, slot_mapping, token_offset=token_offset)
        except Exception as error:
            self._fall_back("write", error)
        return False

    def _token_offset(self, group: str, slot_mapping: Tensor) -> int:
        """Where in the batch a slot mapping begins: 0, or the start of a micro-batch's slice. Both are views
        of one persistent buffer, so the addresses tell."""
        start, batch_start = slot_mapping.data_ptr(), self._batch_starts[group]
        if start == batch_start:
            return 0
        token_offset = (start - batch_start) // slot_mapping.element_size()
        assert self.manager is not None
        if not 0 <= token_offset <= self.manager.max_num_tokens - slot_mapping.shape[0]:
            raise RuntimeError(f"a layer of group {group} was given a slot mapping that is not its group's")
        return token_offset

    def _fall_back(self, moment: str, error: Exception) -> None:
        """Strict: stop with the reason. Else: this step ends as it would without the library. A commit that
        failed half-way has undone some rejected drafts and no accepted one, so that is safe too."""
        self._step = None
        if self.manager is not None and self.manager.state is State.OPEN:
            self.manager.abandon()
        if self.config.strict:
            raise RuntimeError(
                f"nwor: {moment} failed: {error} (VLLM_NWOR_ON_UNSUPPORTED=vanilla runs such steps without the "
                "transaction)"
            ) from error
        self._count(f"{moment} failed", str(error))

    def _count(self, reason: str, detail: str) -> None:
        if self.vanilla_steps[reason] == 0:
            self._logger.warning("nwor: %s: %s (further ones are counted, not logged)", reason, detail)
        self.vanilla_steps[reason] += 1
