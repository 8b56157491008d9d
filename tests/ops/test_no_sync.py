"""Test that between begin and commit nothing is allocated, nothing synchronizes, and nothing depends on a host value.

The same calls can therefore run inside compiled code and CUDA graphs. On the CPU a synchronization would not be
noticed, so these tests forbid the operations that would cause one. (`tests/gpu` checks the same with counters of CUDA.)
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from no_sync import Forbidden, as_on_a_device, guard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transactions import KINDS, Batch, Request, Transactions, one_thread  # noqa: F401

import nwor_ops.transaction.manager
from nwor_ops import ops
from nwor_ops.testing import samples
from nwor_ops.transaction.window import Layout

MIXED = (Request(5), Request(1, 4, 2), Request(1, 3, 0), Request(1), Request(2, 2, 2), Request(0))
KIND_SETS = [*((kind,) for kind in KINDS), tuple(KINDS)]


def run_window(transactions: Transactions, batch: Batch, end: str = "commit", guarded=guard, binds=True) -> None:
    """Run one window. Only its calls are guarded, not the preparation and comparison of the test."""
    manager = transactions.manager
    if binds:
        manager.bind(Layout(batch.slots))
    slots_of = {name: batch.slots[group] for name, group in transactions.group_of.items()}
    rows_of = {name: transactions.rows(name, batch.num_tokens) for name in transactions.caches}
    writable = {name: cache.writable for name, cache in transactions.caches.items()}
    sources = {name: c.key_value(rows_of[name]) for name, c in transactions.caches.items() if c.writable}
    with guarded():
        manager.begin(batch.window)
        for name, slots in slots_of.items():
            for half in (slice(0, 7), slice(7, None)):
                if writable[name]:
                    key, value = sources[name]
                    manager.write(name, key[half], value[half], slots[half], token_offset=half.start)
                else:
                    manager.log(name, slots[half], token_offset=half.start)
        if end == "commit":
            manager.commit(batch.draft_token_ids, batch.sampled_token_ids)
        else:
            manager.commit_rejected(batch.num_rejected)


@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
@pytest.mark.parametrize("known", [True, False], ids=["host knows", "host does not know"])
@pytest.mark.parametrize("kinds", KIND_SETS, ids="+".join)
def test_only_our_ops(kinds, known, end):
    transactions = Transactions(kinds)
    for seed in range(2):
        batch = transactions.batch(MIXED, padding=3, seed=seed, num_draft_tokens_known=known)
        run_window(transactions, batch, end)
    stats = transactions.manager.stats()
    assert (stats.windows, stats.accepted, stats.rejected) == (2, 8, 10)


PLANTED = {
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "if": lambda t: bool(t[0]),
    "index": lambda t: range(99)[t[0]],
    "cpu": lambda t: t.cpu(),
    "empty": lambda t: torch.empty(1),
    "tensor": lambda t: torch.tensor([1]),
    "clone": lambda t: t.clone(),
    "arithmetic": lambda t: t + 1,
}


@pytest.mark.parametrize("plant", PLANTED)
def test_the_guard_finds_a_forbidden_operation(plant, monkeypatch):
    """The same window with one forbidden operation after a layer's write raises."""
    write = ops.write_kv_logged

    def planted(*args):
        write(*args)
        PLANTED[plant](args[4])

    transactions = Transactions(["packed"])
    batch = transactions.batch(MIXED, padding=3)
    run_window(transactions, batch)
    monkeypatch.setattr(nwor_ops.transaction.manager.ops, "write_kv_logged", planted)
    with pytest.raises(Forbidden):
        run_window(transactions, batch)


# ---------------------------------------------------------------- allocations, counted


def allocated_bytes(profile: torch.profiler.profile) -> int:
    return sum(max(0, event.cpu_memory_usage) for event in profile.events())


@contextmanager
def counted(result: list[int]):
    cpu = torch.profiler.ProfilerActivity.CPU
    with as_on_a_device(), torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        yield
    result.append(allocated_bytes(profile))


@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
@pytest.mark.parametrize("kinds", KIND_SETS, ids="+".join)
def test_nothing_is_allocated(kinds, end):
    """Also inside the kernels, which the guard cannot see."""
    transactions = Transactions(kinds)
    batch = transactions.batch(MIXED, padding=3)
    result: list[int] = []
    run_window(transactions, batch, end, guarded=lambda: counted(result))
    assert result == [0]


@pytest.mark.parametrize("op", samples.ops_of("recurrent"))
def test_recurrent_ops_allocate_nothing(op):
    for arguments in samples.calls(op):
        result: list[int] = []
        with counted(result):
            getattr(ops, op)(*arguments)
        assert result == [0]


NO_REQUESTS = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("plant", [lambda t: torch.empty(1), lambda t: ops.acceptance_mask(t, t[None], NO_REQUESTS)])
def test_the_count_finds_an_allocation(plant, monkeypatch):
    """It finds one extra allocation of one element, in Python and inside one of our kernels."""
    write = ops.write_kv_logged

    def planted(*args):
        write(*args)
        plant(args[4])

    monkeypatch.setattr(nwor_ops.transaction.manager.ops, "write_kv_logged", planted)
    transactions = Transactions(["packed"])
    result: list[int] = []
    run_window(transactions, transactions.batch(MIXED, padding=3), guarded=lambda: counted(result))
    assert result[0] > 0


# ---------------------------------------------------------------- the same calls, whatever the values


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    window = batch.window
    return [
        window.query_start_loc,
        window.cu_num_draft_tokens,
        *batch.slots.values(),
        batch.draft_token_ids,
        batch.sampled_token_ids,
        batch.num_rejected,
    ]


class Calls(TorchDispatchMode):
    """Records every call with the addresses, shapes and strides of its tensors, and its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        described = [
            (leaf.data_ptr(), tuple(leaf.shape), leaf.stride()) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        self.calls.append((func, *described))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("end", ["commit", "commit_rejected"])
def test_the_calls_do_not_depend_on_values(end):
    """A CUDA graph captured in one window makes the launches of every later window."""
    transactions = Transactions()
    batch = transactions.batch(MIXED, padding=3, num_draft_tokens_known=False)
    others = (
        MIXED,
        (Request(2, 3, 1), Request(4), Request(1, 4, 4), Request(0), Request(3), Request(0)),
        (Request(3),) * 6,  # no drafts at all
    )
    persistent = tensors_of(batch)  # the engine refills the same tensors for each window
    rows = {name: transactions.rows(name, batch.num_tokens) for name in transactions.caches}
    transactions.rows = lambda name, num_tokens: rows[name]
    transactions.manager.bind(Layout(batch.slots))
    recorded = []
    for seed, requests in enumerate(others):
        padding = batch.num_tokens - sum(r.given + r.drafts for r in requests)
        new = transactions.batch(requests, padding, seed, num_draft_tokens_known=False)
        for target, value in zip(persistent, tensors_of(new), strict=True):
            target.fill_(-1)
            target[tuple(slice(0, size) for size in value.shape)].copy_(value)
        with Calls() as calls:
            run_window(transactions, batch, end, binds=False)
        recorded.append(calls.calls)
    assert len(recorded[0]) > len(transactions.caches)
    assert recorded[0] == recorded[1] == recorded[2]
    stats = transactions.manager.stats()
    assert (stats.drafted, stats.accepted) == (9 + 7, 4 + 5)
