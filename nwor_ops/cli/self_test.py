"""Self-tests for ``nwor-ops doctor``: small calls of every op, compared with results worked out by hand.

They only answer whether the ops run on this machine; the test suite tests the ops. The calls are a table,
:mod:`nwor_ops.cli.self_test_calls`. Family ``recurrent`` has its own module,
:mod:`nwor_ops.cli.self_test_recurrent`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.cli import self_test_calls as calls
from nwor_ops.cli import self_test_recurrent
from nwor_ops.kv_cache import LayerCache
from nwor_ops.meta import SPECS
from nwor_ops.meta.check import SOURCES, Array
from nwor_ops.ops.registry import OPS
from nwor_ops.testing.comparison import difference
from nwor_ops.transaction.manager import DraftCommitManager
from nwor_ops.transaction.shadow_pages import num_shadow_blocks
from nwor_ops.transaction.window import Window

# ---------------------------------------------------------------- calls of the table


def _dtype(name: str, spec: Array, values: Any, variant: int) -> torch.dtype:
    """Return the dtype of an argument. Variant n of a call has the n-th dtype that the table allows."""
    while isinstance(values, list) and values:
        values = values[0]
    if isinstance(values, bool):
        return torch.bool
    if "scale" in name:
        return torch.float32
    dtypes = spec.dtypes or SOURCES  # those of keys and values, where the table allows any or that of another argument
    return dtypes[min(variant, len(dtypes) - 1)]


def _untouched(result: Tensor) -> Tensor:
    return ~result if result.dtype == torch.bool else torch.full_like(result, calls.UNTOUCHED)


def _tensors(call: calls.Call, values: dict[str, Any], device: torch.device, variant: int) -> dict[str, Any]:
    """Return the arguments of a call. Arguments that the op declares as tensors become tensors."""

    def tensor(name: str, numbers: Any) -> Any:
        spec = SPECS[call.op].get(name)
        if not isinstance(spec, Array):
            return numbers
        return torch.tensor(numbers, dtype=_dtype(name, spec, numbers, variant), device=device)

    lists = {a.name for a in OPS[call.op].overload._schema.arguments if isinstance(a.type, torch._C.ListType)}
    return {
        name: [tensor(name, element) for element in numbers] if name in lists else tensor(name, numbers)
        for name, numbers in values.items()
    }


def _arguments(call: calls.Call, device: torch.device, variant: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all arguments of a call by name, and the values that they must have after it."""
    given = _tensors(call, call.arguments, device, variant)
    written = {name: values for name, values in call.results.items() if name in SPECS[call.op]}
    expected = _tensors(call, written, device, variant)
    return {name: _untouched(result) for name, result in expected.items() if name not in given} | given, expected


def _differences(call: calls.Call, device: torch.device, variant: int) -> Iterator[str | None]:
    arguments, expected = _arguments(call, device, variant)
    returned = getattr(ops, call.op)(*OPS[call.op].arguments((), arguments).values())
    for name, wanted in expected.items():
        results = arguments[name] if isinstance(wanted, list) else [arguments[name]]
        for result, one in zip(results, wanted if isinstance(wanted, list) else [wanted], strict=True):
            yield difference(**{name: (result, one)})
    for returns, result in zip(OPS[call.op].overload._schema.returns, returned or (), strict=True):
        yield difference(**{returns.name: (result, call.results[returns.name])})


def _num_variants(call: calls.Call) -> int:
    specs = [spec for name, spec in SPECS[call.op].items() if name in call.arguments | call.results]
    return max(len(spec.dtypes or SOURCES) for spec in specs if isinstance(spec, Array))


def _run_calls(op: str, device: torch.device) -> str | None:
    """Run the calls of an op in every dtype, and return the first problem."""
    problems = (
        problem
        for call in calls.CALLS
        if call.op == op
        for variant in range(_num_variants(call))
        for problem in _differences(call, device, variant)
    )
    return next(filter(None, problems), None)


# ---------------------------------------------------------------- other tests


def _transaction(device: torch.device) -> str | None:
    """Run begin, write and commit in both modes: the accepted draft stays, the others leave no trace."""
    return _transaction_in_mode(device, "cow") or _transaction_in_mode(device, "stage")


def _transaction_in_mode(device: torch.device, mode: str) -> str | None:
    def tensor(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    shadows = num_shadow_blocks(2, 3, 8)
    packed = tensor(calls.written(()), torch.bfloat16).repeat(1, 1, 1, 2)  # K | V
    cache = torch.cat([packed, torch.zeros_like(packed[:1]).expand(shadows, -1, -1, -1)])
    sizes: dict[str, Any] = {"max_num_tokens": 8, "max_num_requests": 2, "max_draft_tokens": 6}
    if mode == "stage":
        sizes["max_drafts_per_request"] = 3
    manager = DraftCommitManager(device=device, mode=mode, **sizes)
    manager.register_layer("layer", LayerCache.packed(cache))
    manager.allocate()
    slots, table, tokens = tensor(calls.SLOTS, torch.int64), tensor([[1, 0], [2, 0]]), tensor(calls.WRITE["key"])
    pages: dict[str, Any] = {"seq_lens": tensor([4, 5]), "block_tables": {"default": table}} if mode == "stage" else {}
    manager.begin(Window(tensor(calls.QUERY_START_LOC), tensor(calls.CU_NUM_DRAFT_TOKENS), {"default": slots}, **pages))
    manager.write("layer", tokens.bfloat16(), tokens.bfloat16(), slots)
    before_commit = difference(cache_before_commit=(cache[:3], packed)) if mode == "stage" else None
    manager.commit(tensor(calls.DRAFT_TOKEN_IDS), tensor(calls.SAMPLED_TOKEN_IDS))
    expected = tensor(calls.written(calls.STAYING), torch.bfloat16).repeat(1, 1, 1, 2)
    return before_commit or difference(
        cache=(cache[:3], expected), slot_mapping=(slots, calls.SLOTS), block_table=(table, [[1, 0], [2, 0]])
    )


def _refused_call(device: torch.device) -> str | None:
    """Check that an error in a kernel arrives as an exception, which crosses from our C++ runtime to torch's."""
    [call] = (call for call in calls.CALLS if call.op == "log_slots")
    arguments, _ = _arguments(call, device, 0)
    try:
        ops.log_slots(**arguments | {"log_rows": arguments["log_rows"][:-1]})
    except ValueError as error:
        expected = "log_slots: log_rows must be [num_tokens] with at least 8 elements"
        return None if str(error).startswith(expected) else f"raised another message: {error}"
    return "did not raise"


# Op: a function of the device that returns None, or a sentence that says what is wrong.
SELF_TESTS: dict[str, Callable[[torch.device], str | None]] = {
    **{call.op: functools.partial(_run_calls, call.op) for call in calls.CALLS},
    **self_test_recurrent.SELF_TESTS,
    "a whole transaction": _transaction,
    "a call that is refused": _refused_call,
}
