"""Calls that every op must refuse or accept, made from its schema, its table of arguments and `samples.sample_inputs`.

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
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from oracle_checks import refuse
from samples import argument_names, ops_of, sample_inputs, with_arguments
from torch import Tensor
from torch.utils._pytree import tree_map

from nwor_ops import ops
from nwor_ops.meta import SPECS
from nwor_ops.meta.check import Array, one_of
from nwor_ops.testing import oracle
from nwor_ops.testing.layouts import memory, same_memory, surrounded, twin


@dataclass(frozen=True)
class Case:
    """A call and its expected error."""

    label: str
    arguments: tuple[Any, ...]
    error: type[Exception]
    sentence: str  # the message after "OP: ", as a regular expression


def declared(op: str) -> list[Any]:
    return list(getattr(torch.ops.nwor, op).default._schema.arguments)


def is_tensor(argument: Any) -> bool:
    return "Tensor" in str(argument.type)


def is_int(argument: Any) -> bool:
    return "int" in str(argument.type)


def is_bool(argument: Any) -> bool:
    return str(argument.type) == "bool"


def is_float(argument: Any) -> bool:
    return "float" in str(argument.type)


def is_list(argument: Any) -> bool:
    return str(argument.type).startswith("List")


def is_optional(argument: Any) -> bool:
    return str(argument.type).startswith("Optional")


def is_mutated(argument: Any) -> bool:
    return argument.alias_info is not None


@functools.cache
def _samples(op: str) -> list[tuple[Any, ...]]:
    found = sample_inputs(op)
    if op == "gumbel_sample":
        found.append(with_arguments(op, found[0], workspace=surrounded(torch.zeros(10, dtype=torch.int64))))
    return found


def sample_with(op: str, *names: str, device: str = "cpu") -> tuple[Any, ...] | None:
    """A valid call that passes all of these arguments, with separate memory; None if no sample has them."""
    places = [argument_names(op).index(name) for name in names]
    for sample in _samples(op):
        if all(place < len(sample) and sample[place] is not None and sample[place] != [] for place in places):
            return twin(sample, device)
    return None


def _given(op: str, name: str, device: str) -> tuple[Any, ...]:
    """The same. If no sample passes the argument, its default is written out."""
    if name == "plane_table":
        arguments = twin(_samples(op)[0], device)
        return with_arguments(op, arguments, plane_table=ops.plane_table(arguments[0]), caches=arguments[0][:1])
    found = sample_with(op, name, device=device)
    if found is not None:
        return found
    defaults = {argument.name: argument.default_value for argument in declared(op)}
    return with_arguments(op, twin(_samples(op)[0], device), **{name: defaults[name]})


def _value(op: str, arguments: tuple[Any, ...], name: str) -> Any:
    return arguments[argument_names(op).index(name)]


def _replacements(
    op: str, device: str, wanted: Callable[[Any], bool]
) -> Iterator[tuple[str, Any, Any, Callable[[Any], tuple[Any, ...]]]]:
    """For every position of an argument: its name in messages, its declaration, its value, and a call with another
    value."""
    for argument in filter(wanted, declared(op)):
        arguments = _given(op, argument.name, device)
        value = _value(op, arguments, argument.name)

        def replaced(new: Any, arguments: Any = arguments, name: str = argument.name) -> tuple[Any, ...]:
            return with_arguments(op, arguments, **{name: new})

        if not is_list(argument):
            yield argument.name, argument, value, replaced
            continue
        for index in range(len(value)):

            def with_element(new: Any, index: int = index, value: Any = value, replaced: Any = replaced) -> Any:
                return replaced([*value[:index], new, *value[index + 1 :]])

            yield f"{argument.name}[{index}]", argument, value[index], with_element


# ---------------------------------------------------------------- kinds of bad input


def another_device(op: str, device: str, others: tuple[str, ...]) -> Iterator[Case]:
    """One tensor on another device. If the others are compared with it, the message names another argument."""
    for (name, argument, value, call), other in itertools.product(_replacements(op, device, is_tensor), others):
        sentence = (
            rf"{re.escape(name)} must be on device {device}\S* like the other arguments, got {other}"
            rf"|\S+ must be on device {other}\S* like the other arguments, got {device}"
        )
        if argument.name == "plane_table":
            if other == "cpu":
                other = device
            sentence = rf"plane_table must be on device cpu, got {other}"
        if value.device.type != other:
            yield Case(f"{name} on {other}", call(value.to(other)), TypeError, sentence)


def no_tensor(op: str, device: str) -> Iterator[Case]:
    """None, text, a number, a list or an array instead of a tensor or a list of tensors."""
    others: list[Any] = ["x", 3.5, [1, 2]]
    if find_spec("numpy"):
        import numpy

        others.append(numpy.zeros(3))
    for name, argument, _, call in _replacements(op, device, is_tensor):
        if is_list(argument) or not is_optional(argument):
            yield Case(f"{name}=None", call(None), TypeError, rf"{re.escape(name)} must be a tensor, got None")
        for other in others:
            kind = type(other).__name__
            yield Case(f"{name}: {kind}", call(other), TypeError, rf"{re.escape(name)} must be a tensor, got .*{kind}$")
    for argument in filter(is_list, declared(op)):
        arguments = _given(op, argument.name, device)
        for other, named in ((None, "None"), (3.5, "3.5, a value of type float")):
            yield Case(
                f"{argument.name}={other}", with_arguments(op, arguments, **{argument.name: other}), TypeError,
                rf"{argument.name} must be a list of (tensors|ints), got {re.escape(named)}",
            )  # fmt: skip


def no_number(op: str, device: str) -> Iterator[Case]:
    """Text, None, a fraction or 65 bits instead of an integer; a number instead of text."""
    for name, argument, _, call in _replacements(op, device, lambda argument: not is_tensor(argument)):
        if is_bool(argument):
            continue
        of_type = str(argument.type)
        sentence = rf"{re.escape(name)} must be an? \w+, got "
        yield Case(f"{name}: object", call(object()), TypeError, sentence)
        if is_int(argument):
            yield Case(f"{name}: str", call("x"), TypeError, sentence)
            yield Case(f"{name}: float", call(2.0), TypeError, sentence)
            for wide in (2**63, -(2**63) - 1):
                yield Case(f"{name}={wide}", call(wide), ValueError, rf"{re.escape(name)} must fit 64 bits, got {wide}")
        if of_type == "str":
            yield Case(f"{name}: int", call(1), TypeError, sentence)
        if not is_optional(argument):
            yield Case(f"{name}=None", call(None), TypeError, sentence + "None")


def no_bool(op: str, device: str) -> Iterator[Case]:
    """Anything with a truth value instead of True or False."""
    for name, _, _, call in _replacements(op, device, is_bool):
        for other in (None, 0, 2, 1.0, "x", torch.tensor(True)):
            yield Case(f"{name}={other!r}", call(other), TypeError, rf"{name} must be a bool, got ")


DTYPES = (torch.bool, torch.int16, torch.int32, torch.int64, torch.float64)


def _spec(op: str, argument: Any) -> Array:
    return SPECS[op][argument.name]


def wrong_dtype(op: str, device: str) -> Iterator[Case]:
    """Every dtype that the table of arguments does not allow. If several must be equal, the message names one of
    them."""
    for name, argument, value, call in _replacements(op, device, is_tensor):
        spec = _spec(op, argument)
        if argument.name == "plane_table" and device == "meta":  # no such device
            continue
        if "scale" in argument.name:  # read only for fp8
            arguments = next(twin(s, device) for s in _samples(op) if "fp8" in s)
            call = functools.partial(_with, op, arguments, argument.name)
            value = _value(op, arguments, argument.name)
        alike = re.escape(name) if spec.dtypes else r"\S+"
        sentence = rf"{alike} must have dtype {re.escape(one_of(spec.dtypes)) if spec.dtypes else ''}"
        if argument.name == "row_accepted":  # flags or counts
            sentence = r"row_accepted must have dtype torch\.(bool|int32)"
        # 16 bytes per element, which no argument allows.
        wrong = [dtype for dtype in DTYPES if spec.dtypes and dtype not in spec.dtypes]
        for dtype in (torch.complex128, *wrong):
            yield Case(
                f"{name}: {dtype}", call(torch.zeros(value.shape, dtype=dtype, device=device)), TypeError, sentence
            )


def wrong_dims(op: str, device: str) -> Iterator[Case]:
    """One dimension too many, and all dimensions flattened."""
    for name, argument, value, call in _replacements(op, device, is_tensor):
        dims = _spec(op, argument).dims
        for other in (value[None], value.flatten()):
            if dims and other.dim() not in dims:
                yield Case(f"{name}: {list(other.shape)}", call(other), ValueError, rf"{re.escape(name)} must be ")


def _with(op: str, arguments: tuple[Any, ...], name: str, new: Any) -> tuple[Any, ...]:
    return with_arguments(op, arguments, **{name: new})


def lazy_view(op: str, device: str) -> Iterator[Case]:
    """A mutated argument is a view that torch resolves when it is read."""
    for name, _, value, call in _replacements(op, device, lambda a: is_tensor(a) and is_mutated(a)):
        if value.dtype != torch.bool:
            yield Case(
                f"{name} negative",
                call(torch._neg_view(value)),
                ValueError,
                rf"{re.escape(name)} must not be a negative",
            )


# Pairs that may share memory, or that are not compared (see docs/reference/ops.md, "Not checked", and the docstrings).
_NOT_COMPARED: dict[str, list[tuple[str, str]]] = {
    "write_kv": [(cache, scale) for cache in ("key_cache", "value_cache") for scale in ("k_scale", "v_scale")],
    "restore_slots_from_rejected": [("counters", "window_id")],
    "accept_staged": [("counters", "window_id")],
    "update_draft_inputs": [("hidden_states", "next_hidden_states")],
    "eagle_step": [("positions", "new_positions")],
    "dcp_local_seq_lens": [("seq_lens", "local_seq_lens")],
    "gated_delta_fold": [(f"record_{part}", "layer_windows") for part in ("keys", "norms", "decays", "updates")],
}
_NOT_COMPARED["write_kv_logged"] = _NOT_COMPARED["commit_staged"] = _NOT_COMPARED["write_kv"]  # without fp8
# What each op of family shadow compares with all of its other arguments; also `saved_slots` with `slot_mappings`.
_COMPARED_WITH_ALL = {"caches", "page_offsets", "row_rejected", "num_accepted", "counters"}


def _compared(op: str, one: str, other: str) -> bool:
    if op in ops_of("shadow"):
        outputs = _COMPARED_WITH_ALL if op == "close_window_from_rejected" else {"caches", "page_offsets"}
        return bool({one, other} & outputs) or {one, other} == {"saved_slots", "slot_mappings"}
    return {one, other} not in map(set, _NOT_COMPARED.get(op, ()))


def shared_memory(op: str, device: str) -> Iterator[Case]:
    """Each pair of a mutated argument and another one, of any dtype, starts at the same address."""
    tensors = list(filter(is_tensor, declared(op)))
    names = "|".join(tensor.name for tensor in tensors)
    for one, other in itertools.combinations(tensors, 2):
        if not (is_mutated(one) or is_mutated(other)) or "plane_table" in (one.name, other.name):
            continue
        if not _compared(op, one.name, other.name):
            continue
        arguments = sample_with(op, one.name, other.name, device=device)
        if arguments is None:
            continue
        a, b = _value(op, arguments, one.name), _value(op, arguments, other.name)
        first = [x[0] if isinstance(x, list) else x for x in (a, b)]
        moved = _at(first[0], first[1])
        if moved is None:
            continue
        new = [moved, *b[1:]] if isinstance(b, list) else moved
        yield Case(
            f"{one.name} and {other.name}", with_arguments(op, arguments, **{other.name: new}), ValueError,
            rf"({names})(\[\d+\])? and ({names})(\[\d+\])? must not share memory",
        )  # fmt: skip


def _at(place: Tensor, tensor: Tensor) -> Tensor | None:
    """`tensor` at the start of `place`, aligned; None if the storage is too short."""
    if tensor.numel() == 0 or place.numel() == 0:
        return None
    size, storage = tensor.element_size(), place.untyped_storage()
    first = -(-place.storage_offset() * place.element_size() // size)
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
    for argument in declared(op):
        arguments = _given(op, argument.name, device) if is_tensor(argument) and is_mutated(argument) else ()
        value = _value(op, arguments, argument.name) if arguments else None
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
WITHOUT_DATA: dict[str, Callable[..., Iterator[Case]]] = {
    "wrong dtype": wrong_dtype,
    "wrong dims": wrong_dims,
    "bad float": bad_float,
    "overlapping itself": overlapping_itself,
}

KINDS: dict[str, Callable[..., Iterator[Case]]] = {
    "no tensor": no_tensor,
    "no number": no_number,
    **WITHOUT_DATA,
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
    named = re.match(rf"{op}: (\w+)(?:\[\d+\])? (?:and (\w+) )?must ", message)
    return named is not None and {name for name in named.groups() if name} <= set(argument_names(op))


def refuse_argument(op: str, sample: int, argument: str, value: Any, expected: str, got: str) -> None:
    """Check that a sample with another value of an argument is refused. `value` may be a function of the arguments.

    An invalid dtype is a TypeError, any other invalid argument a ValueError.
    """
    arguments = sample_inputs(op)[sample]
    value = value(arguments) if callable(value) else value
    name = "block_tables" if value == [] and argument == "slot_mappings" else argument
    sentence = rf"^{op}: {name} must {re.escape(expected)}.*, got {re.escape(got)}$"
    error = TypeError if expected.startswith("have dtype") else ValueError
    refuse(op, with_arguments(op, arguments, **{argument: value}), error, sentence)


def refuse_shared(op: str, argument: str, value: Any, names: str) -> None:
    """Check that the op refuses an argument in the memory of another one. `value` is a function of all arguments."""
    arguments = sample_inputs(op)[0]
    arguments = with_arguments(op, arguments, **{argument: value(arguments)})
    refuse(op, arguments, ValueError, f"{names} must not share memory$")


def refuse_gradient(op: str, name: str) -> None:
    """The ops have no backward. An in-place write without one would silently corrupt the backward pass."""
    arguments = sample_inputs(op)[0]
    argument = _value(op, arguments, name)
    (argument[1] if name == "caches" else argument).requires_grad_(True)
    before = memory(arguments)
    with pytest.raises(RuntimeError, match=rf"^{op}: {name}(\[1\])? must not require a gradient"):
        getattr(ops, op)(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, memory(arguments), strict=True))
    with torch.no_grad():
        getattr(ops, op)(*arguments)


def _leaves(arguments: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) and not leaf.is_neg() else None, arguments)
    return found


# ---------------------------------------------------------------- any integers

INTEGERS = (0, -1, 2**31, 2**62, 2**63 - 1)


def any_integer(op: str, device: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every integer argument at the ends of its range."""
    for name, _, _, call in _replacements(op, device, is_int):
        for value in INTEGERS:
            yield f"{name}={value}", twin(call(value))


_DATA = {
    torch.int32: (-(2**31), -1, 0, 1, 2**31 - 1),
    torch.int64: (-(2**63), -(2**31), -1, 0, 1, 2**31, 2**62, 2**63 - 1),
}


def any_data(op: str, device: str, seeds: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Some elements of integer tensors at the ends of their range."""
    samples = _samples(op)
    for seed in range(seeds):
        dice = random.Random(seed)
        arguments = twin(samples[seed % len(samples)])
        integers = [t for t in _leaves(arguments) if t.dtype in _DATA and t.numel()]
        for tensor in dice.sample(integers, min(len(integers), dice.choice((1, 1, 2, 4)))):
            for _ in range(dice.choice((1, 1, 3))):
                tensor[tuple(dice.randrange(size) for size in tensor.shape)] = dice.choice(_DATA[tensor.dtype])
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
        getattr(ops, op)(*sample_inputs(op, device)[0])  # the report was cleared
        return None
    results = getattr(ops, op)(*ours)
    if left is None:
        after = twin(ours)
        assert only_declared_changed(op, after, arguments)
    else:
        for argument, one, wanted, given in zip(declared(op), ours, left, arguments, strict=False):
            assert same_memory([one], [wanted if is_mutated(argument) else given]), argument.name
    return (*ours, *(results or ()))
