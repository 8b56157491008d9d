"""Calls that every op must refuse or accept, made from its schema, its table of arguments and its sample calls.

`check_bad_data` defines how a call with invalid data ends on the CPU and on CUDA.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from oracle_checks import refuse
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nwor_ops import ops
from nwor_ops.meta import SPECS, one_of
from nwor_ops.ops import registry
from nwor_ops.testing import oracle, samples
from nwor_ops.testing.layouts import memory, same_memory, twin
from nwor_ops.testing.samples import argument_names, named, with_arguments


@dataclass(frozen=True)
class Case:
    """A call and its expected error."""

    label: str
    arguments: tuple[Any, ...]
    error: type[Exception]
    sentence: str  # the message after "OP: ", as a regular expression


def declared(op: str) -> list[Any]:
    return list(registry.OPS[op].overload._schema.arguments)


def has_type(part: str) -> Callable[[Any], bool]:
    return lambda argument: part in str(argument.type)


is_tensor, is_int, is_bool, is_float = map(has_type, ("Tensor", "int", "bool", "float"))


def is_mutated(argument: Any) -> bool:
    return argument.alias_info is not None


@functools.cache
def _calls(op: str) -> list[tuple[Any, ...]]:
    return samples.calls(op, 24)


def full(value: Any) -> bool:
    return all(leaf.numel() > 1 or leaf.shape in ((), (1,)) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def call_with(
    op: str, *names: str, device: str = "cpu", where: Callable[..., bool] | None = None
) -> tuple[Any, ...] | None:
    """A valid call that passes all of these arguments, with elements, and fulfils a condition. None = there is none."""
    for call in _calls(op):
        values = named(op, call)
        passed = all(values.get(name) is not None and values[name] != [] and full(values[name]) for name in names)
        if passed and (where is None or where(**values)):
            return twin(call, device)
    return None


def _passing(op: str, name: str, device: str) -> tuple[Any, ...]:
    """The same. If no call passes the argument, it has its default."""
    if name == "plane_table":
        call = call_with(op, "caches", device=device)
        return with_arguments(op, call, plane_table=ops.plane_table(call[0]), caches=call[0][:1])
    return call_with(op, name, device=device) or twin(_calls(op)[0], device)


def _replacements(
    op: str, device: str, wanted: Callable[[Any], bool]
) -> Iterator[tuple[str, Any, Any, Callable[[Any], tuple[Any, ...]]]]:
    """For every position of an argument: its name in messages, its declaration, its value, and a call with another
    value."""
    for argument in filter(wanted, declared(op)):
        call = _passing(op, argument.name, device)
        value = named(op, call).get(argument.name)

        def replaced(new: Any, call: Any = call, name: str = argument.name) -> tuple[Any, ...]:
            return with_arguments(op, call, **{name: new})

        if not has_type("List")(argument):
            yield argument.name, argument, value, replaced
            continue
        for index in range(min(len(value), 2)):

            def with_element(new: Any, index: int = index, value: Any = value, replaced: Any = replaced) -> Any:
                return replaced([*value[:index], new, *value[index + 1 :]])

            yield f"{argument.name}[{index}]", argument, value[index], with_element


# ---------------------------------------------------------------- kinds of bad input


def another_device(op: str, device: str, others: tuple[str, ...]) -> Iterator[Case]:
    """One tensor on another device. If the others are compared with it, the message names another argument."""
    for (name, argument, value, call), other in itertools.product(_replacements(op, device, is_tensor), others):
        if value is None or argument.name == "plane_table":
            continue
        sentence = (
            rf"{re.escape(name)} must be on device {device}\S* like the other arguments, got {other}"
            rf"|\S+ must be on device {other}\S* like the other arguments, got {device}"
        )
        if value.device.type != other:
            yield Case(f"{name} on {other}", call(value.to(other)), TypeError, sentence)


def another_type(op: str, device: str) -> Iterator[Case]:
    """Text, None, numbers and lists in place of tensors, integers, floats and texts."""
    for name, argument, _, call in _replacements(op, device, lambda argument: not is_bool(argument)):
        kind = "a tensor" if is_tensor(argument) else r"an? \w+"
        wrong: list[Any] = [object(), *(["x", 3.5, [1, 2]] if is_tensor(argument) else [])]
        if is_int(argument):
            wrong += ["x", 2.0]
        if str(argument.type) == "str":
            wrong.append(1)
        if has_type("List")(argument) or not has_type("Optional")(argument):
            wrong.append(None)
        for other in wrong:
            yield Case(f"{name}={other}", call(other), TypeError, rf"{re.escape(name)} must be {kind}, got ")
        for wide in (2**63, -(2**63) - 1) if is_int(argument) else ():
            yield Case(f"{name}={wide}", call(wide), ValueError, rf"{re.escape(name)} must fit 64 bits, got {wide}")
    for argument in filter(has_type("List"), declared(op)):
        for other in (None, 3.5):
            call = with_arguments(op, _passing(op, argument.name, device), **{argument.name: other})
            sentence = rf"{argument.name} must be a list of (tensors|ints), got {other}"
            yield Case(f"{argument.name}={other}", call, TypeError, sentence)


def no_bool(op: str, device: str) -> Iterator[Case]:
    """Anything with a truth value instead of True or False."""
    for name, _, _, call in _replacements(op, device, is_bool):
        for other in (None, 0, 2, 1.0, "x", torch.tensor(True)):
            yield Case(f"{name}={other!r}", call(other), TypeError, rf"{name} must be a bool, got ")


DTYPES = (torch.bool, torch.int16, torch.int32, torch.int64, torch.float64)


def wrong_dtype(op: str, device: str) -> Iterator[Case]:
    """Every dtype that the table of arguments does not allow. If several must be equal, the message names one of
    them."""
    for name, argument, value, call in _replacements(op, device, is_tensor):
        spec = SPECS[op][argument.name]
        if "scale" in name or value is None or argument.name == "plane_table":  # read only for fp8; only on the CPU
            continue
        if device == "meta" and not spec.dtypes and spec.like in (None, argument.name):
            continue
        alike = re.escape(name) if spec.dtypes else r"\S+"
        sentence = rf"{alike} must have dtype {re.escape(one_of(spec.dtypes)) if spec.dtypes else ''}"
        if argument.name == "row_accepted":  # flags or counts
            sentence = r"row_accepted must have dtype torch\.(bool|int32)"
        # 16 bytes per element, which no argument allows.
        for dtype in (torch.complex128, *(d for d in DTYPES if spec.dtypes and d not in spec.dtypes)):
            new = torch.zeros(value.shape, dtype=dtype, device=device)
            yield Case(f"{name}: {dtype}", call(new), TypeError, sentence)


def wrong_dims(op: str, device: str) -> Iterator[Case]:
    """One dimension too many, and all dimensions flattened."""
    for name, argument, value, call in _replacements(op, device, is_tensor):
        dims = SPECS[op][argument.name].dims
        for other in () if value is None else (value[None], value.flatten()):
            if dims and other.dim() not in dims:
                yield Case(f"{name}: {list(other.shape)}", call(other), ValueError, rf"{re.escape(name)} must be ")


def lazy_view(op: str, device: str) -> Iterator[Case]:
    """An argument is a view that torch resolves when it is read. A kernel would read the unresolved memory."""
    for name, argument, value, call in _replacements(op, device, is_tensor):
        if value is not None and value.dtype != torch.bool:
            sentence = f"{argument.name} must have its own memory, got a negative view"
            yield Case(f"{name} negative", call(torch._neg_view(value)), ValueError, sentence)


# Pairs that may share memory (see docs/reference/ops.md, "Not checked", and the docstrings).
_MAY_SHARE: dict[str, tuple[str, str]] = {
    "restore_slots_from_rejected": ("counters", "window_id"),
    "accept_staged": ("counters", "window_id"),
    "update_draft_inputs": ("hidden_states", "next_hidden_states"),
    "eagle_step": ("positions", "new_positions"),
    "dcp_local_seq_lens": ("seq_lens", "local_seq_lens"),
}
# What each op of family shadow compares with all of its other arguments; also `saved_slots` with `slot_mappings`.
_COMPARED_WITH_ALL = {"caches", "page_offsets", "row_rejected", "num_accepted", "counters"}


def _compared(op: str, one: str, other: str) -> bool:
    if registry.OPS[op].family == "shadow":
        outputs = _COMPARED_WITH_ALL if op == "close_window_from_rejected" else {"caches", "page_offsets"}
        return bool({one, other} & outputs) or {one, other} == {"saved_slots", "slot_mappings"}
    return {one, other} != set(_MAY_SHARE.get(op, ()))


def _uses_all(kv_cache_dtype: str = "fp8", window_id: Any = 0, **_: Any) -> bool:
    """Return whether a call reads its scales and writes its window numbers. Otherwise these are not compared."""
    return kv_cache_dtype != "auto" and window_id is not None


def shared_memory(op: str, device: str) -> Iterator[Case]:
    """Each pair of a mutated argument and another one, of any dtype, starts at the same address."""
    tensors = list(filter(is_tensor, declared(op)))
    names = "|".join(tensor.name for tensor in tensors)
    for one, other in itertools.combinations(tensors, 2):
        if not (is_mutated(one) or is_mutated(other)) or "plane_table" in (one.name, other.name):
            continue
        if not _compared(op, one.name, other.name):
            continue
        arguments = call_with(op, one.name, other.name, device=device, where=_uses_all)
        if arguments is None:
            continue
        a, b = (named(op, arguments)[tensor.name] for tensor in (one, other))
        first, second = (x[0] if isinstance(x, list) else x for x in (a, b))
        name, value, moved = other.name, b, _at(first, second)
        if moved is None:
            name, value, moved = one.name, a, _at(second, first)
        assert moved is not None, f"neither {one.name} nor {other.name} has room for the other"
        yield Case(
            f"{one.name} and {other.name}",
            with_arguments(op, arguments, **{name: [moved, *value[1:]] if isinstance(value, list) else moved}),
            ValueError, rf"({names})(\[\d+\])? and ({names})(\[\d+\])? must not share memory",
        )  # fmt: skip


def _at(place: Tensor, tensor: Tensor) -> Tensor | None:
    """`tensor`, aligned, at the first byte of `place`; None if the storage is too short."""
    size, storage = tensor.element_size(), place.untyped_storage()
    first = place.storage_offset() * place.element_size() // size
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if (first + extent) * size > storage.nbytes():
        return None
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, first, tensor.shape, tensor.stride())


def _expanded(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor with one element, repeated, along each dimension."""
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            yield tensor.narrow(dim, 0, 1).expand(tensor.shape)


def _interleaved(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor with rows that begin one element after each other."""
    if tensor.dim() > 1 and tensor.shape[-1] > 1 and tensor.shape[-2] > 1:
        strides = [*tensor.stride()[:-2], 1, 1]
        yield tensor.as_strided(tensor.shape, strides)


def overlapping_itself(op: str, device: str) -> Iterator[Case]:
    """Elements of a mutated argument share memory. In a list all tensors do, because their strides must be equal."""
    for argument in filter(lambda a: is_tensor(a) and is_mutated(a), declared(op)):

        def repeats(name: str = argument.name, **values: Any) -> bool:
            return any(leaf.numel() > 1 for leaf in _leaves(values[name]))

        arguments = call_with(op, argument.name, device=device, where=repeats)
        value = named(op, arguments)[argument.name] if arguments else None
        tensors = value if isinstance(value, list) else [value] * (value is not None)
        for views in zip(*([*_expanded(t), *_interleaved(t)] for t in tensors), strict=True):
            new = list(views) if isinstance(value, list) else views[0]
            label = f"{argument.name} with strides {views[0].stride()}"
            call = with_arguments(op, arguments, **{argument.name: new})
            yield Case(label, call, ValueError, rf"{argument.name}(\[0\])? must ")


# Finite numbers that each option does not allow. Kernels compute in float32, where 1e-300 is 0.
_OUTSIDE = {
    "softplus_beta": (0.0, -1.0, 1e-300),
    "softplus_threshold": (88.5, 1e30),
    "norm_eps": (-1e-5, -1.0),
    "gate_lower_bound": (0.0, 5.0, -1e-300),
}


def bad_float(op: str, device: str) -> Iterator[Case]:
    """NaN, an infinity, a number that float32 cannot hold, and a number outside the range of the option."""
    for name, argument, _, call in _replacements(op, device, is_float):
        for value in (math.nan, math.inf, -math.inf, 1e60, -1e60, *_OUTSIDE.get(argument.name, ())):
            sentence = rf"{name} must be (\w[\w ]* and )?finite in float32, got {re.escape(f'{value:g}')}$"
            yield Case(f"{name}={value}", call(value), ValueError, sentence)


# Cases that need no data, so the fakes must find them too.
WITHOUT_DATA: dict[str, Callable[..., Iterator[Case]]] = {"wrong dtype": wrong_dtype, "wrong dims": wrong_dims}

KINDS: dict[str, Callable[..., Iterator[Case]]] = {
    "another type": another_type,
    **WITHOUT_DATA,
    "bad float": bad_float,
    "overlapping itself": overlapping_itself,
    "lazy view": lazy_view,
    "shared memory": shared_memory,
}


def attempt(op: str, arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    """Return the result and the exception of a call."""
    try:
        return getattr(ops, op)(*arguments), None
    except Exception as error:
        return None, error


def check_refused(op: str, case: Case) -> None:
    """Check that the call raises the error of the case, and that no byte of its arguments has changed."""
    real = [leaf for leaf in _leaves(case.arguments) if leaf.device.type != "meta"]
    before = memory(real)
    _, error = attempt(op, case.arguments)
    assert type(error) is case.error, f"{case.label}: {error!r}"
    assert re.match(rf"{op}: ({case.sentence})", str(error)), f"{case.label}: {error}"
    assert all(torch.equal(a, b) for a, b in zip(before, memory(real), strict=True)), f"{case.label} wrote"


def begins_with_an_argument(op: str, message: str) -> bool:
    """Return whether the message names the op, and then an argument of this op and the requirement."""
    found = re.match(rf"{op}: (\w+)(?:\[\d+\])? (?:and (\w+) )?must ", message)
    return found is not None and {name for name in found.groups() if name} <= set(argument_names(op))


def _leaves(arguments: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and not leaf.is_neg()]


# ---------------------------------------------------------------- calls that are refused or right

INTEGERS = (0, -1, 2**31, 2**62, 2**63 - 1)


def any_integer(op: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every integer argument at the ends of its range."""
    for name, _, _, call in _replacements(op, "cpu", is_int):
        for value in INTEGERS:
            yield f"{name}={value}", twin(call(value))


def any_shape(op: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every tensor with fewer elements along each dimension, and with gaps between its elements."""
    for name, argument, value, call in _replacements(op, "cpu", is_tensor):
        if value is None or argument.name == "plane_table":
            continue
        for dim, size in enumerate(value.shape):
            for length in {0, 1, size - 1} - {size}:
                yield f"{name}: {length} of dimension {dim}", twin(call(value.narrow(dim, 0, max(length, 0))))
        if value.dim():
            bits = value.view(torch.uint8) if value.dtype == torch.bool else value
            spaced = torch.stack([bits, bits], -1)[..., 0].view(value.dtype)
            yield f"{name}: with gaps", twin(call(spaced))


_DATA = {
    torch.int32: (-(2**31), -2, -1, 0, 1, 2, 4, 2**31 - 1),
    torch.int64: (-(2**63), -(2**31), -1, 0, 1, 3, 2**31, 2**62, 2**63 - 1),
}


def any_data(op: str, device: str, seeds: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Some elements of integer tensors at the ends of their range, or equal to another element."""
    calls = [call for call in _calls(op) if any(t.dtype in _DATA and t.numel() > 3 for t in _leaves(call))]
    for seed in range(seeds):
        dice = random.Random(seed)
        arguments = twin(calls[seed % len(calls)])
        integers = [t for t in _leaves(arguments) if t.dtype in _DATA and t.numel()]
        for tensor in dice.sample(integers, min(len(integers), dice.choice((1, 1, 1, 2, 4)))):
            for _ in range(dice.choice((1, 1, 3))):
                place, other = (tuple(dice.randrange(size) for size in tensor.shape) for _ in range(2))
                value = (
                    int(tensor[other]) + dice.randint(-1, 1)
                    if dice.random() < 0.4
                    else dice.choice(_DATA[tensor.dtype])
                )
                limits = torch.iinfo(tensor.dtype)
                tensor[place] = min(max(value, limits.min), limits.max)
        yield f"seed {seed}", twin(arguments, device)


def only_declared_changed(op: str, arguments: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Return whether only arguments marked as mutated differ. It also reverts the differences."""
    for argument, now, then in zip(declared(op), arguments, before, strict=False):
        if is_tensor(argument) and is_mutated(argument):
            for a, b in zip(_leaves([now]), _leaves([then]), strict=True):
                a.copy_(b)
    return same_memory(arguments, before)


# ---------------------------------------------------------------- invalid data

DEBUG_MODE = os.environ.get("VLLM_NWOR_DEBUG_SYNC") == "1"


def left_by_the_oracle(op: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    after = twin(arguments)
    getattr(oracle, op)(*after)
    return after


def check_bad_data(
    op: str,
    arguments: tuple[Any, ...],
    error: type[Exception],
    sentence: str,
    device: str,
    left: tuple[Any, ...] | None = None,
    reported: str | None = None,
) -> tuple[Any, ...] | None:
    """Check a call with invalid indices, counts or starts.

    The CPU refuses the call and writes nothing. CUDA finds them in the kernel and skips them. The call then leaves the
    contents of ``left``; without ``left``, only its outputs may have changed. In debug mode CUDA raises the CPU's error
    after the launch, or ``reported`` if a kernel may find any of several invalid values first. Tests that call this are
    marked ``debug_mode``, and ``gpu/test_debug_mode.py`` runs them again.

    Returns:
        the arguments as CUDA left them, and its results; None if the call raised.
    """
    if device == "cpu":
        refuse(op, arguments, error, sentence)
        return None
    ours = twin(arguments, device)
    if DEBUG_MODE:
        with pytest.raises(error, match=sentence if reported is None else reported) as caught:
            getattr(ops, op)(*ours)
        assert type(caught.value) is error
        assert str(caught.value).startswith(f"{op}: ")
        getattr(ops, op)(*samples.calls(op, 1, device)[0])  # the report was cleared
        return None
    results = getattr(ops, op)(*ours)
    if left is None:
        after = twin(ours)
        assert only_declared_changed(op, after, arguments)
    else:
        for argument, one, wanted, given in zip(declared(op), ours, left, arguments, strict=False):
            assert same_memory([one], [wanted if is_mutated(argument) else given]), argument.name
    return (*ours, *(results or ()))
