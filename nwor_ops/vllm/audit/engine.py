"""The audits of one engine: of its KV cache, and of its recurrent states. Only ``plugin`` starts them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from nwor_ops.vllm.audit.cache import CacheAudit
from nwor_ops.vllm.audit.recurrent import StateAudit
from nwor_ops.vllm.audit.vllm_states import VllmStateAudit, audit_states
from nwor_ops.vllm.audit.watch import RecurrentGroup, states_of
from nwor_ops.vllm.recurrent.plugin import recurrent_engine_of
from nwor_ops.vllm.transaction.runners.base import RunnerAttachment
from nwor_ops.vllm.transaction.session import Session
from nwor_ops.vllm.transaction.supported import is_recurrent

_not_audited: weakref.WeakKeyDictionary[Session, str] = weakref.WeakKeyDictionary()


def audit_cache(session: Session, others_write: bool = False, recurrent: Sequence[RecurrentGroup] = ()) -> CacheAudit:
    """Subscribe the audit of a session's mode. The other arguments are those of :class:`CacheAudit`."""
    layers, shadow = list(session.layers.values()), None
    if session.shadow_blocks is not None:
        shadow = {layer.group: session.shadow_blocks.of_group(int(layer.group)) for layer in layers}
    audit = CacheAudit(layers, session.max_num_tokens, others_write, recurrent, shadow_blocks=shadow)
    session.subscribe(audit)
    return audit


def audit_engine(attachment: RunnerAttachment, session: Session, others_write: bool, logger: Any) -> None:
    """Subscribe the audits of an engine: of the cache, and of the recurrent states, ours or vLLM's. Call it before a
    writer is patched."""
    recurrent = _recurrent_groups(attachment)
    audit_cache(session, others_write, recurrent)
    state = recurrent_engine_of(attachment.runner)
    if state is not None:
        audit = StateAudit(state.builders)
        state.listen(audit)
        session.subscribe(audit)
    elif recurrent:
        states = audit_states(attachment.runner, recurrent)
        if isinstance(states, VllmStateAudit):
            session.subscribe(states)
        else:
            _not_audited[session] = states
            logger.warning("nwor: vLLM's recurrent states are not audited: %s", states)


def audit_states_alone(runner: Any) -> bool:
    """Audit only the states, in an engine whose attention layers are not supported. Return whether it has one state
    per request."""
    state = recurrent_engine_of(runner)
    if state is None:
        return False
    audit = StateAudit(state.builders)
    state.listen(audit)

    def decorator(execute: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(*args: Any, **kwargs: Any) -> Any:
            result = execute(*args, **kwargs)
            audit.forwarded("after the forward")
            return result

        return execute_model

    state.patches.put(runner, "execute_model", decorator)
    return True


def cache_audit(session: Session) -> CacheAudit | None:
    """Return the audit of a session's cache, or None."""
    return next((listener for listener in session.listeners if isinstance(listener, CacheAudit)), None)


def summaries(sessions: Sequence[Session], states: Sequence[Any]) -> dict[str, Any]:
    """Return the results of the audits of these sessions, and of engines with one state per request."""
    listeners = [listener for session in sessions for listener in session.listeners]
    of_states = [state.listener for state in states]
    return {
        "transaction": [audit.summary() for audit in listeners if isinstance(audit, CacheAudit)],
        "vllm_states": [audit.summary() for audit in listeners if isinstance(audit, VllmStateAudit)],
        "vllm_states_not_audited": [_not_audited[session] for session in sessions if session in _not_audited],
        "recurrent": [audit.summary() for audit in of_states if isinstance(audit, StateAudit)],
    }


def _recurrent_groups(attachment: RunnerAttachment) -> list[RecurrentGroup]:
    """Return the groups of recurrent layers of a hybrid model."""
    runner, groups = attachment.runner, []
    context = runner.compilation_config.static_forward_context
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if is_recurrent(group.kv_cache_spec):
            states = tuple(state for name in group.layer_names for state in states_of(context[name]))
            rows = functools.partial(attachment.table_rows, str(number))
            groups.append(RecurrentGroup(group.kv_cache_spec.block_size, states, rows))
    return groups
