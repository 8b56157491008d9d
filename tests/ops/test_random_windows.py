"""Random windows: they call every op, the ops agree with the oracles, and a wrong byte of any op is found."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils._pytree import tree_leaves

from nwor_ops import ops
from nwor_ops.ops import registry
from nwor_ops.testing import samples
from nwor_ops.testing.against_oracle import Mismatch, compare_with_oracle, run_round, run_window
from nwor_ops.testing.layouts import surrounded
from nwor_ops.testing.samples import FAMILIES, argument_names

OPS = tuple(registry.OPS)
FAMILY_OF = {op: registry.OPS[op].family for op in OPS}
MOST_SEEDS = 30  # in which every op is called


def run_windows(family: str) -> None:
    for seed in range(MOST_SEEDS):
        run_window(family, seed, "cpu")


@pytest.mark.parametrize("seed", range(0, 60, 10))
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_match_oracle(device, family, seed):
    for number in range(seed, seed + 10):
        run_window(family, number, device)


@pytest.mark.parametrize("num_requests", [0, 1, 33, 257])
@pytest.mark.parametrize("family", FAMILIES)
def test_number_of_requests(device, family, num_requests):
    """More requests than threads in a block, and tokens in many blocks."""
    for seed in range(3 if num_requests < 100 else 1):
        run_window(family, seed, device, min(num_requests, 33) if family == "recurrent" else num_requests)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("family", FAMILIES)
def test_windows_on_several_threads(family):
    for seed in range(3):
        run_window(family, seed, "cpu", 16)


def test_rounds_call_every_op(device):
    calls = sum((run_round(seed, device) for seed in range(10)), run_round(10, device))
    assert set(calls) == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_calls_vary_every_argument(op):
    """Optional tensors are passed and left out, and options are on and off."""
    calls = [samples.named(op, call.arguments) for call in samples.recorded(op, 120)]
    for argument in registry.OPS[op].overload._schema.arguments:
        values = [call.get(argument.name) for call in calls]
        if argument.name == "plane_table":
            continue  # tests/ops/test_plane_table.py
        if str(argument.type).startswith("Optional"):
            assert {value is None for value in values} == {True, False}, argument.name
        elif str(argument.type) == "bool":
            assert set(values) == {True, False}, argument.name


@pytest.mark.parametrize("op", OPS)
def test_data_seeds_keep_shapes(op):
    """Another data seed changes only what tensors hold. A seed gives the same call each time."""

    def shape_of(call):
        return [
            (leaf.shape, leaf.stride(), leaf.dtype, leaf.storage_offset()) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in tree_leaves(call.arguments)
        ]

    first, *others = (samples.recorded(op, 6, data_seed) for data_seed in range(3))
    for other in others:
        assert list(map(shape_of, other)) == list(map(shape_of, first))
    contents = [repr(calls[-1].arguments) for calls in (first, samples.recorded(op, 6), others[0])]
    assert contents[0] == contents[1]


def spoiled(op: str, how):
    """Return the op, followed by a change of its results or mutated arguments."""
    original = getattr(ops, op)
    declared = getattr(torch.ops.nwor, op).default._schema.arguments
    mutated = [argument.name for argument in declared if argument.alias_info and argument.alias_info.is_write]

    def call(*arguments):
        results = original(*arguments)
        passed = dict(zip(argument_names(op), arguments, strict=False))
        written = [passed[name] for name in mutated if passed.get(name) is not None] or list(results)
        how([part for one in written for part in (one if isinstance(one, list) else [one])])
        return results

    return call


def change_an_element(tensors: list[torch.Tensor]) -> None:
    for tensor in [tensor for tensor in tensors if tensor.numel()][:1]:
        element = tensor[(-1,) * tensor.dim()]
        element.copy_(~element if element.dtype == torch.bool else torch.where(element == 1, 3, 1))


@pytest.mark.parametrize("op", OPS)
def test_wrong_element_is_found(op, monkeypatch):
    monkeypatch.setattr(ops, op, spoiled(op, change_an_element))
    with pytest.raises(Mismatch, match=f"^{op}: "):
        run_windows(FAMILY_OF[op])


def test_byte_outside_arguments_is_found(monkeypatch):
    def write_past_the_end(tensors: list[torch.Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        storage[len(storage) - 1] = storage[len(storage) - 1] ^ 1

    monkeypatch.setattr(ops, "stage_kv", spoiled("stage_kv", write_past_the_end))
    with pytest.raises(Mismatch, match=r"^stage_kv wrote a byte outside its arguments$"):
        run_window("staging", 0, "cpu")


def test_message_names_first_place(monkeypatch):
    def dcp_local_seq_lens(seq_lens, local_seq_lens, *rest):
        original(seq_lens, local_seq_lens, *rest)
        local_seq_lens[1] += 2

    original = ops.dcp_local_seq_lens
    monkeypatch.setattr(ops, "dcp_local_seq_lens", dcp_local_seq_lens)
    lengths = surrounded(torch.tensor([5, 9], dtype=torch.int32))
    sentence = "dcp_local_seq_lens: local_seq_lens[1] must be 4, as the oracle says, got 6 (1 of 2 elements differ)"
    with pytest.raises(Mismatch, match=f"^{re.escape(sentence)}$"):
        compare_with_oracle("dcp_local_seq_lens", (lengths, torch.zeros_like(lengths), 2, 1, 2))


def test_numbers_within_tolerance_are_accepted(monkeypatch):
    monkeypatch.setattr(ops, "gated_delta_fold", spoiled("gated_delta_fold", lambda tensors: tensors[0].mul_(1 + 1e-7)))
    for seed in range(4):
        run_window("recurrent", seed, "cpu")
