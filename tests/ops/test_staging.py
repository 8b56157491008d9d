"""Test the family staging beyond its random windows: by hand, all or nothing, and simultaneous moves."""

from __future__ import annotations

import re

import bad_input
import oracle_checks
import pytest
import torch
from processes import ROOT

from nwor_ops import ops
from nwor_ops.ops import staging
from nwor_ops.testing import layouts
from nwor_ops.testing.layouts import Shape, surrounded


def test_by_hand(device):
    """Three tokens are staged, two rows are accepted and written. This test does not depend on the oracle."""
    key, value = torch.randn(2, 3, 1, 4, device=device)  # [tokens, heads, width]
    staged_key, staged_value = torch.zeros(2, 3, 1, 4, device=device)  # [rows, heads, width]
    key_cache, value_cache = torch.zeros(2, 2, 4, 1, 4, device=device)  # [blocks, block_size, heads, width]
    scale = torch.ones(1, device=device)
    ops.stage_kv(key, value, torch.tensor([2, 0, 1], dtype=torch.int32, device=device), staged_key, staged_value)
    assert torch.equal(staged_key, key[[1, 2, 0]])

    slots = torch.tensor([5, 6, 7], device=device)  # of each row
    accepted = torch.tensor([True, False, True], device=device)
    ops.commit_staged(staged_key, staged_value, slots, accepted, key_cache, value_cache, scale, scale, "auto")
    expected = torch.zeros(8, 4, device=device)
    expected[5], expected[7] = value[1, 0], value[0, 0]
    assert torch.equal(value_cache.view(8, 4), expected)


# The windows in which three layers staged five rows, what else changes, the committed rows, and whether none is.
ALL = ([1, 1, 1, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0])
DECIDED = {
    "complete": (ALL, {}, [0, 2], False),
    "a layer was never reached": ((ALL[0], [0] * 5, ALL[2]), {}, [], True),
    "a layer lacks one row": (([1, 0, 1, 0, 0], [1, 1, 0, 0, 0], ALL[2]), {}, [], True),
    "only rejected rows are missing": (([1, 0, 0, 0, 0],) * 3, {"accepted": [1, 0, 0, 0, 0]}, [0], False),
    "a slot out of range": (ALL, {"num_slots": 5}, [], True),
    "a rejected slot out of range": (ALL, {"slots": [5, 99, 0, -1, 3]}, [0, 2], False),
    "nothing accepted": (ALL, {"accepted": [0] * 5}, [], False),
    "nothing staged": (([0] * 5,) * 3, {}, [], True),
    "accepted rows without a slot": (ALL, {"slots": [-1, -1, 0, -1, -1]}, [2], False),
}


@pytest.mark.parametrize("case", DECIDED)
def test_accepted_by_hand(device, case):
    windows, changed, committed, incomplete = DECIDED[case]
    accepted = torch.tensor(changed.get("accepted", [1, 0, 1, 1, 0]), dtype=torch.bool)
    slots, counters = torch.tensor(changed.get("slots", [5, 7, 0, -1, 3])), torch.arange(10, 70, 10)
    arguments = (
        accepted, slots, torch.tensor([1]), surrounded(torch.tensor(windows)), changed.get("num_slots", 12),
        surrounded(~accepted), counters,
    )  # fmt: skip
    ours = oracle_checks.assert_same_as_oracle("accept_staged", arguments, device)
    assert ours[5].nonzero().flatten().tolist() == committed
    grown = dict(zip(staging.STAGE_COUNTERS, (ours[6].cpu() - counters).tolist(), strict=True))
    assert grown["incomplete"] == incomplete
    if case == "complete":
        assert grown == {
            "windows": 1, "staged": 4, "stage_operations": 8, "committed": 2, "rejected": 2, "incomplete": 0,
        }  # fmt: skip


@pytest.mark.parametrize("rows", [1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("missing", [None, "staged", "slot"])
def test_all_or_nothing(device, rows, missing):
    """One row that one layer lacks, or that has no valid slot, decides for all rows."""
    random = torch.Generator().manual_seed(rows)
    accepted = torch.rand(rows, generator=random) < 0.6
    accepted[-1] = True
    slots = torch.randint(-3, 100, (rows,), generator=random)
    slots[-1] = 100 if missing == "slot" else 5
    windows = torch.full((5, rows), 7)
    windows[:, ~accepted] = torch.randint(6, 8, (5, int((~accepted).sum())), generator=random)
    if missing == "staged":
        windows[3, -1] = 6
    counters = torch.arange(len(staging.STAGE_COUNTERS))
    arguments = (surrounded(accepted), surrounded(slots), torch.tensor([7]), surrounded(windows), 100,
                 surrounded(~accepted), counters)  # fmt: skip
    ours = oracle_checks.assert_same_as_oracle("accept_staged", arguments, device)
    assert bool(ours[5].any()) is (missing is None)


def test_stage_counters_have_the_order_of_the_kernels():
    names = re.search(r"enum StageCounter \{([^}]*)\}", (ROOT / "csrc" / "staging.h").read_text()).group(1).split(",")
    plain = [name.strip().removeprefix("kStage").lower() for name in names if name.strip()]
    assert plain == [*(name.removeprefix("stage_") for name in staging.STAGE_COUNTERS), "knumstagecounters"]


# ---------------------------------------------------------------- move_slots


@pytest.mark.parametrize("layers", [1, 383, 384, 385, 800])
def test_move_in_many_layers(device, layers):
    planes = layouts.make_pages("packed", Shape(2, 6, 1, 8, 8, layers), torch.bfloat16).value_caches
    oracle_checks.assert_same_as_oracle(
        "move_slots", (planes, torch.tensor([1, 5, 7, 0, -1]), torch.tensor([5, 1, 0, 8, 3])), device
    )


@pytest.mark.parametrize("moves", [1, 2, 31, 32, 33, 512, 2048, 2049, 14_000, 15_000, 60_000])
def test_many_moves_are_simultaneous(device, moves):
    """A random cycle through all moved slots: each is a source and a destination.

    With more moves, a block takes narrower columns. Then it takes more than the default shared memory, and then
    narrower accesses.
    """
    shape = Shape(moves // 16 + 2, 16, 2, 64, 64, 2)
    planes = [torch.randint(-999, 999, (shape.blocks, 16, 2, 128), dtype=torch.int16, device=device) for _ in range(2)]
    order = torch.randperm(shape.blocks * 16, device=device)[:moves]
    before = [plane.flatten(0, 1).clone() for plane in planes]
    ops.move_slots(planes, order, order.roll(1))
    for plane, old in zip(planes, before, strict=True):
        old[order.roll(1)] = old[order]
        assert torch.equal(plane.flatten(0, 1), old)


@pytest.mark.gpu
def test_more_moves_than_fit(device):
    plane = torch.zeros(20_000, 16, 1, 1, dtype=torch.uint8, device=device)
    slots = torch.arange(300_000, device=device)
    with pytest.raises(ValueError, match=r"^move_slots: src_slots must hold at most \d+ moves .*, got 300000$"):
        ops.move_slots([plane], slots, slots)


def test_planes_given_twice_are_refused():
    """A chain of moves in a plane that is given twice would be done twice."""
    first, second = torch.zeros(2, 3, 4, 2, 8)
    arguments = ([first, second, first], torch.tensor([1, 5]), torch.tensor([5, 7]))
    sentence = r"caches\[0\] and caches\[2\] must not share"
    oracle_checks.refuse("move_slots", arguments, ValueError, sentence)


@pytest.mark.debug_mode
@pytest.mark.parametrize("slot", [12, 2**62])
def test_move_of_an_outside_slot_to_itself(device, slot):
    """It moves no bytes, but the slot is checked."""
    plane = surrounded(torch.arange(96.0).view(3, 4, 1, 8))
    call, without = (([plane], torch.tensor([5, s, 1]), torch.tensor([1, slot, 5])) for s in (slot, -1))
    left = bad_input.left_by_the_oracle("move_slots", without)
    bad_input.check_bad_data("move_slots", call, IndexError, r"src_slots\[1\] must be below 12", device, left)
