"""Random windows: they call every op, they agree with the oracles, and a wrong byte of any op is found."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from samples import OPS, argument_names, ops_of
from torch.utils._pytree import tree_map

from nwor_ops import ops
from nwor_ops.ops import registry
from nwor_ops.testing import random_windows
from nwor_ops.testing.against_oracle import Mismatch, compare_with_oracle
from nwor_ops.testing.layouts import surrounded
from nwor_ops.testing.random_windows import FAMILIES, run_round, run_window

FAMILY_OF = {op: registry.OPS[op].family for op in OPS}
MOST_SEEDS = 30  # in which every op is called


def run_windows(family: str) -> None:
    for seed in range(MOST_SEEDS):
        run_window(family, seed, "cpu")


def test_rounds_call_every_op(device):
    calls: Counter[str] = Counter()
    for seed in range(6):
        calls += run_round(seed, device)
    assert set(calls) == set(OPS)


def test_every_family_has_windows():
    assert set(FAMILIES) == set(FAMILY_OF.values())
    assert all(set(run_window(family, 1, "cpu")) & set(ops_of(family)) for family in FAMILIES)


def test_a_seed_gives_the_same_windows(monkeypatch):
    seen: list[list[str]] = []

    def recorded(op, arguments, *rest):
        seen[-1].append(f"{op} {tree_map(lambda leaf: leaf.tolist() if torch.is_tensor(leaf) else leaf, arguments)}")
        return compare_with_oracle(op, arguments, *rest)

    monkeypatch.setattr(random_windows, "compare_with_oracle", recorded)
    for seed in (4, 4, 5):
        seen.append([])
        run_window("drafter", seed, "cpu")
    assert seen[0] == seen[1] != seen[2]


def spoiled(op: str, how):
    """Return the op, followed by a change of its results or mutated arguments."""
    original = getattr(ops, op)
    declared = getattr(torch.ops.nwor, op).default._schema.arguments
    mutated = [argument.name for argument in declared if argument.alias_info and argument.alias_info.is_write]

    def call(*arguments):
        results = original(*arguments)
        given = dict(zip(argument_names(op), arguments, strict=False))
        written = [given[name] for name in mutated if given.get(name) is not None] or list(results)
        how([part for one in written for part in (one if isinstance(one, list) else [one])])
        return results

    return call


def change_an_element(tensors: list[torch.Tensor]) -> None:
    tensor = next(tensor for tensor in tensors if tensor.numel())
    element = tensor[(-1,) * tensor.dim()]
    element.copy_(~element if element.dtype == torch.bool else torch.where(element == 1, 3, 1))


@pytest.mark.parametrize("op", OPS)
def test_a_wrong_element_of_any_op_is_found(op, monkeypatch):
    monkeypatch.setattr(ops, op, spoiled(op, change_an_element))
    with pytest.raises(Mismatch, match=f"^{op}: "):
        run_windows(FAMILY_OF[op])


def test_a_byte_outside_the_arguments_is_found(monkeypatch):
    def write_past_the_end(tensors: list[torch.Tensor]) -> None:
        storage = tensors[0].untyped_storage()
        storage[len(storage) - 1] = storage[len(storage) - 1] ^ 1

    monkeypatch.setattr(ops, "stage_kv", spoiled("stage_kv", write_past_the_end))
    with pytest.raises(Mismatch, match=r"^stage_kv wrote a byte outside its arguments$"):
        run_window("staging", 0, "cpu")


def test_the_message_names_the_first_place(monkeypatch):
    def dcp_local_seq_lens(seq_lens, local_seq_lens, *rest):
        original(seq_lens, local_seq_lens, *rest)
        local_seq_lens[1] += 2

    original = ops.dcp_local_seq_lens
    monkeypatch.setattr(ops, "dcp_local_seq_lens", dcp_local_seq_lens)
    lengths = surrounded(torch.tensor([5, 9], dtype=torch.int32))
    sentence = "dcp_local_seq_lens: local_seq_lens[1] must be 4, as the oracle says, got 6 (1 of 2 elements differ)"
    with pytest.raises(Mismatch, match=f"^{re.escape(sentence)}$"):
        compare_with_oracle("dcp_local_seq_lens", (lengths, torch.zeros_like(lengths), 2, 1, 2))


def test_numbers_within_the_tolerance_are_accepted(monkeypatch):
    monkeypatch.setattr(ops, "gated_delta_fold", spoiled("gated_delta_fold", lambda tensors: tensors[0].mul_(1 + 1e-7)))
    for seed in range(4):
        run_window("recurrent", seed, "cpu")
