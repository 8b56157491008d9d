"""Errors to plant in a worker of a real engine, by the name that a job has in ``faults``.

====================  ==================================================================================================
name                  planted in
====================  ==================================================================================================
``continue``          graphs of the drafter, and begin and commit of the transaction
``loads``             begin, commit, and the copy of loaded rows to shadow pages
``cancel``            vLLM's sampling in a step with drafts, and then in cancel
``capture``           the write of a layer while vLLM captures a CUDA graph; planted before the engine starts
of ``RECURRENT``      this part of a step with recurrent states
``counts``            no error: after some steps, the cursor of a request's recurrent state is invalid
``states``            no error: after some steps, a number of each state of one layer in vLLM is wrong
====================  ==================================================================================================
"""

from __future__ import annotations

import itertools
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from planted_errors import Fault, Planted

BEFORE_START = ("capture",)
# Parts of a step with recurrent states: class, method, and each call with a multiple of this number.
RECURRENT = {
    "plan": ("metadata:RecurrentMetadataBuilder", "_planned", 12),
    "verify": ("layer:RecurrentLayer", "verify", 30),
    "fold": ("page:GroupLayers", "fold_planned", 3),
    "copies": ("prefix_caching:AlignedStates", "_plan_folds", 3),
}
_planted: Planted | None = None  # in this process


def plant(worker: Any, name: str) -> None:
    """Plant the errors with this name. ``worker`` is vLLM's worker, or None before the engine starts."""
    global _planted
    if name in RECURRENT:
        owner, method, every = RECURRENT[name]
        faults = [Fault(pkgutil.resolve_name(f"nwor_ops.vllm.recurrent.{owner}"), method, every, "")]
    else:
        faults = _FAULTS[name](worker)
    _planted = Planted(faults)


def describe() -> dict[str, Any] | None:
    """Return what was planted in this process: how many errors, what the package counted, and how many are alive."""
    if _planted is None:
        return None
    import nwor_ops

    return {"counts": dict(_planted.counts), "errors": nwor_ops.stats().errors, "alive": _planted.alive()}


def is_v2(runner: Any) -> bool:
    """Return whether this is vLLM's model runner V2."""
    return hasattr(runner, "prepare_attn")


def state_audits(sessions: list[Any]) -> list[Any]:
    """Return the audits of K + 1 recurrent states."""
    module = sys.modules.get("nwor_ops.vllm.audit.vllm_states")
    listeners = [listener for session in sessions for listener in session.listeners]
    return [listener for listener in listeners if module and isinstance(listener, module.VllmStateAudit)]


# ---------------------------------------------------------------- transaction and draft graphs


def _window_faults(worker: Any) -> list[Fault]:
    from nwor_ops import DraftCommitManager

    return [
        Fault(DraftCommitManager, "begin", 9, "begin failed"),
        Fault(DraftCommitManager, "commit_rejected" if is_v2(worker.model_runner) else "commit", 8, "commit failed"),
    ]


def _draft_graph_faults(worker: Any) -> list[Fault]:
    from nwor_ops.drafter import DraftLoop

    return [
        Fault(DraftLoop, "run_first_pass", 5, "draft graphs failed", after=True),
        Fault(DraftLoop, "run", 7, "draft graphs failed", after=True),
        *_window_faults(worker),
    ]


def _load_faults(worker: Any) -> list[Fault]:
    from nwor_ops import DraftCommitManager

    return [*_window_faults(worker), Fault(DraftCommitManager, "refresh_shadow_pages", 2, "load failed")]


def _cancel_faults(worker: Any) -> list[Fault]:
    """In the runner's own method, which our patch calls before it commits."""
    from nwor_ops import DraftCommitManager
    from nwor_ops.vllm import sessions

    [session] = sessions()
    runner = worker.model_runner
    return [
        Fault(runner, "sample" if is_v2(runner) else "_sample", 5, "", only=lambda *_, **__: session.in_window),
        Fault(DraftCommitManager, "cancel", 1, "cancel failed"),
    ]


def _capture_faults(_: Any) -> list[Fault]:
    import torch

    from nwor_ops.transaction.writer import LayerWriter

    def capturing(*_: Any, **__: Any) -> bool:
        return torch.cuda.is_current_stream_capturing()

    return [Fault(LayerWriter, "write", 3, "", only=capturing)]


# ---------------------------------------------------------------- recurrent states


def _invalid_count(_: Any) -> list[Fault]:
    from nwor_ops.vllm.recurrent.metadata import RecurrentMetadataBuilder

    planned, steps = RecurrentMetadataBuilder._planned, itertools.count()

    def _planned(self: Any, metadata: Any, slots: Any) -> Any:
        if metadata.num_spec_decodes and next(steps) == 12:
            self.group.cursors.table[slots[0].long(), 0] = 99  # of more rows than a record has
        return planned(self, metadata, slots)

    setattr(RecurrentMetadataBuilder, "_planned", _planned)  # noqa: B010
    return []


def _wrong_states(_: Any) -> list[Fault]:
    """Change states of the second Gated DeltaNet layer once, after the kernel and the audit's look at them."""
    from vllm.logger import init_logger

    from nwor_ops.vllm import sessions

    audit, *_ = state_audits(sessions())
    names = dict(list(audit._names.items())[1:2])
    watched, calls = type(audit).watched, itertools.count()

    def spoiling(self: Any, call: Any, compute: Any) -> Any:
        out = watched(self, call, compute)
        if (name := names.get(call.A_log.data_ptr())) and next(calls) == 12:
            for window in call.windows():
                for block in window.blocks:
                    call.states[block, 0, 0, 0] += 1.0
            steps = self.summary()["steps"]
            init_logger("vllm.planted").warning("nwor: planted wrong states in step %d of layer %s", steps, name)
        return out

    setattr(type(audit), "watched", spoiling)  # noqa: B010
    return []


_FAULTS: dict[str, Callable[[Any], list[Fault]]] = {
    "continue": _draft_graph_faults,
    "loads": _load_faults,
    "cancel": _cancel_faults,
    "capture": _capture_faults,
    "counts": _invalid_count,
    "states": _wrong_states,
}
