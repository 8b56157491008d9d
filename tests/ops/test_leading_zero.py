"""Test the ways in which engines count (``num_bonus_tokens``, ``leading_zero`` of plan_window): all give the same
window."""

from __future__ import annotations

import pytest
import samples_accept as samples
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle_checks import refuse
from samples import with_arguments
from tensors import int32

from nwor_ops import ops
from nwor_ops.testing.layouts import same_memory, twin

OUTPUTS = slice(3, 9)


def planned(device, starts, drafts, bonus=0, zero=False):
    """Run plan_window for the drafts of each request, counted in one of the ways."""
    counts = [sum(drafts[: q + 1]) + bonus * (q + 1) for q in range(len(drafts))]
    arguments = samples.plan(starts, (0, *counts) if zero else tuple(counts), starts[-1], rows=sum(drafts) + 2)
    arguments = with_arguments("plan_window", arguments, num_bonus_tokens=bonus, leading_zero=zero)
    arguments = with_arguments("plan_window", arguments, draft_start_loc=int32(*[77] * (len(drafts) + 3)))
    ours = twin(arguments, device)
    ops.plan_window(*ours)
    assert torch.equal(ours[1].cpu(), arguments[1])  # only read
    return ours[OUTPUTS]


@given(requests=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=6))
def test_every_way_to_count_gives_one_window(device, requests):
    starts, drafts = [0], [n for _, n in requests]
    for tokens, n in requests:
        starts.append(starts[-1] + tokens + n)
    plain = planned(device, tuple(starts), drafts)
    total = sum(drafts)
    assert plain[-1].tolist() == [*(sum(drafts[:q]) for q in range(len(drafts))), total, total, total]
    for bonus, zero in ((0, True), (1, False), (1, True), (2, True)):
        assert same_memory(planned(device, tuple(starts), drafts, bonus, zero), plain)


def test_invalid_counts_are_refused():
    sentence = "cu_num_draft_tokens must begin with 0 where .*, got 3$"
    arguments = samples.plan(cu_num_draft_tokens=(3, 3, 3, 6, 6), leading_zero=True)
    refuse("plan_window", arguments, ValueError, sentence)
    empty = samples.plan(cu_num_draft_tokens=(), leading_zero=True)
    sentence = r"cu_num_draft_tokens must be \[num_requests \+ 1\] with at least 1 elements, got torch.int32 \[0\]$"
    refuse("plan_window", empty, ValueError, sentence)
    with pytest.raises(ValueError, match=f"^plan_window: {sentence}"):
        ops.plan_window(*twin(empty, "meta"))
    negative = samples.plan(num_bonus_tokens=-1)
    refuse("plan_window", negative, ValueError, "num_bonus_tokens must not be negative, got -1$")
    short = with_arguments("plan_window", samples.plan(), draft_start_loc=int32(*[7] * 4))
    refuse("plan_window", short, ValueError, r"draft_start_loc must be \[num_requests \+ 1\] with at least 5 elements")
