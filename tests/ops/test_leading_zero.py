"""Counts of drafts that begin with a zero (``leading_zero``), as an index pointer does: the same as without it."""

from __future__ import annotations

import pytest
import torch
from layouts import refuse, same_memory, surrounded, twin
from samples import argument_names, int32, sample_inputs, with_arguments

from nwor_ops import ops
from nwor_ops.ops import registry

OPS = tuple(op for op in registry.OPS if "leading_zero" in argument_names(op))
SAMPLES = [(op, index) for op in OPS for index in range(len(sample_inputs(op)))]


def with_zero(op, arguments, zero=0):
    """The same call with a number before the counts."""
    counts = arguments[argument_names(op).index("cu_num_draft_tokens")]
    longer = surrounded(torch.cat([counts.new_full((1,), zero), counts]))
    return with_arguments(op, arguments, cu_num_draft_tokens=longer, leading_zero=True)


def test_every_op_that_takes_counts_of_a_window():
    windows = {op for op in registry.OPS if "num_bonus_tokens" in argument_names(op)}
    assert set(OPS) == windows


@pytest.mark.parametrize(("op", "index"), SAMPLES)
def test_same_bytes_as_without(device, op, index):
    """And the counts, which are read alone, are as they were."""
    plain = sample_inputs(op, device)[index]
    ours = with_zero(op, twin(plain))
    place = argument_names(op).index("cu_num_draft_tokens")
    before = ours[place].clone()
    getattr(ops, op)(*ours)
    getattr(ops, op)(*plain)
    others_of = [(arguments[:place], arguments[place + 1 : len(plain)]) for arguments in (ours, plain)]
    assert same_memory(*others_of)
    assert torch.equal(ours[place], before)


@pytest.mark.parametrize("op", OPS)
def test_the_zero_must_be_there(op):
    arguments = sample_inputs(op)[0]
    refuse(op, with_zero(op, arguments, 3), ValueError, "cu_num_draft_tokens must begin with 0 where .*, got 3$")
    empty = with_arguments(op, arguments, cu_num_draft_tokens=int32(), leading_zero=True)
    sentence = r"cu_num_draft_tokens must be \[num_requests \+ 1\] with at least 1 elements, got torch.int32 \[0\]$"
    refuse(op, empty, ValueError, sentence)
    with pytest.raises(ValueError, match=f"^{op}: {sentence}"):
        getattr(ops, op)(*twin(empty, "meta"))
