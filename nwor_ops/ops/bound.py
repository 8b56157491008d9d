"""Bound calls: ops whose arguments are checked once, and which then run in every step with a few new ones.

An engine passes the same buffers, planes and tables in every step. Passing and checking them takes the host longer than
the launch. :func:`bind` checks a call of an op and returns a handle. :data:`begin_bound`, :data:`commit_bound`, their
variants and :data:`fold_bound` run the calls of a handle with the tensors that change from step to step. They are
torch's own callables, since one more Python function costs the host some us in a cold cache. Pass what they raise to
:func:`own_error`.

torch takes time for each None too, and longer for an int than for a tensor. So these ops have only the arguments that
their calls need. A caller writes ``num_rows`` to the memory of a handle (:func:`num_rows_of`).

These functions are for the classes of this library. They are not public ops, because the schema of a handle hides which
tensors are mutated. A trace refuses them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from nwor_ops.ops import registry

BINDABLE = (
    "plan_window", "open_window", "reject_rows", "close_window", "close_window_from_rejected", "restore_slots",
    "restore_slots_from_rejected", "gated_delta_fold",
)  # fmt: skip
_STEPS = ("_begin_bound", "_begin_redirected_bound", "_commit_bound", "_commit_tokens_bound", "_fold_bound")
NAMES = (*(f"_bind_{op}" for op in BINDABLE), *_STEPS)  # of the ops that are declared here


def _declare(name: str, schema: str) -> Callable[..., Any]:
    overload = registry.declare_private(name, schema, "hides which tensors are mutated; call the op that was bound")
    # The call of an overload is one more Python function.
    return getattr(overload, "_op", overload)


def _bind_schema(op: str) -> str:
    arguments = re.sub(r"\(\w+!\)", "", str(registry.OPS[op].overload._schema)).partition("(")[2].rpartition(") -> ")[0]
    return f"({arguments}, Tensor? after=None, Tensor? begun=None) -> Tensor"


_bind = {op: _declare(f"_bind_{op}", _bind_schema(op)) for op in BINDABLE}
# Run the bound calls of a begin: plan_window. Arguments:
# - query_start_loc, cu_num_draft_tokens: as in plan_window. They give the number of requests, which is at most that of
#   the bound calls.
# - bound: the handle.
# Raises as the bound ops. Also ValueError if a tensor in a list has moved, or if an argument lies in the address range
# of one that the calls write. All calls are checked before the first one is launched.
begin_bound = _declare("_begin_bound", "(Tensor query_start_loc, Tensor cu_num_draft_tokens, Tensor bound) -> ()")

# The same with any number of open_window after it.
# - seq_lens, idx_mapping: as in open_window.
begin_redirected_bound = _declare(
    "_begin_redirected_bound",
    "(Tensor query_start_loc, Tensor cu_num_draft_tokens, Tensor bound, Tensor seq_lens, Tensor? idx_mapping) -> ()",
)

# Run the bound calls of a commit: an op ..._from_rejected, then any number of restore_slots or close_window. The calls
# read the window's values from the tensors of its begin. These tensors must not move. Arguments:
# - num_rejected: as in restore_slots_from_rejected.
# - bound: the handle.
# Raises as begin_bound.
commit_bound = _declare("_commit_bound", "(Tensor num_rejected, Tensor bound) -> ()")

# The same with the sampled tokens: reject_rows, then any number of restore_slots or close_window.
# - draft_token_ids, sampled_token_ids: as in reject_rows.
commit_tokens_bound = _declare(
    "_commit_tokens_bound", "(Tensor draft_token_ids, Tensor sampled_token_ids, Tensor bound) -> ()"
)

# Run the bound gated_delta_fold, without window_id, by a plan of any length that shares no memory with the states.
fold_bound = _declare("_fold_bound", "(Tensor plan, Tensor bound) -> ()")


def bind(op: str, after: Tensor | None = None, begun: Tensor | None = None, **arguments: Any) -> Tensor:
    """Check a call of an op without running it.

    Args:
        op: one of :data:`BINDABLE`.
        after: a handle whose calls run first, or None.
        begun: for the first call of a commit: the handle of its begin. It lives as long as the new handle.
        arguments: all arguments of the op, by name. The handle keeps them alive. Tensors in lists must not move; each
            step checks it. The caller guarantees it for all others.

    Returns:
        A handle, int64 ``[4]`` on the CPU. A copy of it is refused.

    Raises:
        ValueError, TypeError, RuntimeError: as the op.
    """
    declared = registry.OPS[op]
    registry.refuse_gradients(declared, (), arguments)
    try:
        return _bind[op](*declared.arguments((), arguments).values(), after, begun)
    except (ValueError, TypeError, RuntimeError) as error:
        raise registry.translated(declared, (), arguments, error) from None


def num_rows_of(begun: Tensor) -> memoryview:
    """Return ``num_rows`` of a begin's handle, one int64, as in ``restore_slots``; -1 = not given.

    The caller writes it before a commit. The handle must live longer.
    """
    return memoryview(ctypes.c_int64.from_address(begun.data_ptr() + 24)).cast("B").cast("q")


def own_error(error: BaseException) -> BaseException:
    """Return the error of a bound call with the type that the caller should see."""
    if not isinstance(error, (ValueError, TypeError, RuntimeError)):
        return error
    return registry.with_own_type(error, *BINDABLE, *_STEPS)
