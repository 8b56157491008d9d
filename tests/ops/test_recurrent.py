"""Family recurrent: exact plans, layers compared with the oracle, and bits compared with a scheme that stores every
state. All surrounding memory is checked too."""

from __future__ import annotations

import math
import random

import oracle_checks
import pytest
import samples_recurrent as samples
import torch
from bad_input import check_bad_data, left_by_the_oracle
from samples_recurrent import Heads
from tensors import int32

from nwor_ops import ops
from nwor_ops.testing import layouts
from nwor_ops.testing.against_oracle import compare
from nwor_ops.testing.layouts import raw
from nwor_ops.testing.oracle import recurrent as oracle
from nwor_ops.testing.samples import named, with_arguments

STATE_DTYPES = (torch.float32, torch.bfloat16)
DTYPES = (torch.bfloat16, torch.float16)
INT32_MAX = 2**31 - 1
KEY_WIDTHS, VALUE_WIDTHS = (64, 96, 128, 256), (64, 128, 192, 256)
PLANS = ("plan_recurrent_window", "plan_recurrent_fold")


# ---------------------------------------------------------------- plans


def test_window_by_hand(device):
    """With and without pending rows, a padded request, one without tokens, a prefill. Rows past the batch are zeros."""
    ours = named(PLANS[0], oracle_checks.assert_same_as_oracle(PLANS[0], samples.window(), device))
    assert ours["plan"].tolist() == [
        [2, 2, 1, 2], [0] * 4, [0] * 4, [3, 0, 1, 3], [1, 3, 0, 1], [0] * 4, [0] * 4, [0] * 4,
    ]  # fmt: skip
    assert ours["cursors"].tolist() == [[0, 0], [3, 1], [3, 0], [1, 0], [1, 0], [0, 0]]
    assert ours["window_id"].tolist() == [2**33 + 6]


def test_fold_plan_by_hand(device):
    """At most the pending rows are folded. A copy includes them. Padding changes nothing."""
    ours = named(PLANS[1], oracle_checks.assert_same_as_oracle(PLANS[1], samples.fold_plan(), device))
    assert ours["plan"].tolist() == [[2, 2, 1, 2], [0] * 4, [1, 2, 0, 4], [0] * 4, [0] * 4, [0] * 4]
    assert ours["cursors"].tolist() == [[0, 0], [0, 0], [0, 1], [0, 1], [0, 0], [0, 0]]
    kept = named(PLANS[1], oracle_checks.assert_same_as_oracle(PLANS[1], samples.fold_plan(keep_source=True), device))
    assert kept["plan"].tolist() == ours["plan"].tolist()
    assert kept["cursors"].tolist() == [[0, 0], [3, 0], [0, 1], [0, 1], [0, 0], [0, 0]]


# The invalid arguments, the request that has them, and the message.
BAD_WINDOWS = {
    "slot past the last": ({"slots": (2, 0, 4, 6, 1, 5)}, 3, IndexError, r"state_slots\[3\] must be below 6 .*got 6"),
    "window past the record": (
        {"starts": (0, 3, 5, 5, 9, 10, 11)}, 3, ValueError,
        "query_start_loc must give a request no more than the 3 tokens .* got 4 for request 3",
    ),
    "nothing kept": ({"num_kept": (0, 9, 9, 9, 3, 9)}, 0, ValueError, r"num_kept\[0\] must be from 1 to the 2"),
    "more kept than recorded": (
        {"num_kept": (2, 9, 9, 9, 4, 9)}, 4, ValueError,
        r"num_kept\[4\] must be from 1 to the 3 tokens of the request's last window, got 4",
    ),
    "a negative number kept": ({"num_kept": (-1, 9, 9, 9, 3, 9)}, 0, ValueError, "the request's last window, got -1"),
    "any number kept": ({"num_kept": (2, 9, 9, 9, INT32_MAX, 9)}, 4, ValueError, "last window, got 2147483647"),
    "starts that decrease": (
        {"starts": (0, 3, 5, 4, 5, 6, 7)}, 2, ValueError,
        "query_start_loc must start at 0 or above and not decrease, got 5 and 4 around request 2",
    ),
    "more pending than a record holds": (
        {"cursors": ((0, 0), (3, 0), (4, 1), (0, 1), (1, 0), (0, 0))}, 0, ValueError,
        "cursors must have from 0 to 3 rows pending in a slot, got 4 in slot 2",
    ),
    "no such half": (
        {"cursors": ((0, 0), (3, 0), (2, 2), (0, 1), (1, 0), (0, 0))}, 0, ValueError,
        "cursors must name half 0 or 1 of a record, got 2 in slot 2",
    ),
    "more rows than a ring holds": (
        {"cursors": ((0, 0, 0), (3, 0, 0), (2, 1, INT32_MAX), (0, 1, 4), (1, 0, 3), (0, 0, 0)), "chunk": 16}, 0,
        ValueError, "cursors must have from 0 to 19 rows pending in a slot, got 2147483647 in slot 2",
    ),
}  # fmt: skip


@pytest.mark.debug_mode
@pytest.mark.parametrize(("wrong", "request_index", "error", "sentence"), BAD_WINDOWS.values(), ids=BAD_WINDOWS)
def test_bad_window(device, wrong, request_index, error, sentence):
    """CUDA skips and counts the request: it gets a row of zeros and keeps its cursor."""
    arguments = samples.window(**wrong, num_skipped=7)
    slots = named(PLANS[0], arguments)["state_slots"].clone()
    slots[request_index] = 0  # the other requests are planned as without it
    left = left_by_the_oracle(PLANS[0], with_arguments(PLANS[0], arguments, state_slots=slots))
    named(PLANS[0], left)["num_skipped"] += 1
    check_bad_data(PLANS[0], arguments, error, sentence, device, left)
    assert named(PLANS[0], left)["plan"].any()


def test_slots_that_conflict():
    """Two requests with one slot, and folds whose order would matter. Only the CPU checks this."""
    oracle_checks.refuse(
        PLANS[0], samples.window(slots=(2, 0, 4, 2, 1, 5), num_kept=(2,) * 6), ValueError,
        "state_slots must name a slot for one request only, got 2 for request 0 and request 3",
    )  # fmt: skip
    meeting = "target_slots must name a slot that no other entry reads or writes"
    for sources, targets in (((1, 2), (3, 3)), ((1, 2), (2, 1)), ((1, 1), (1, 2)), ((1, 2), (2, 3))):
        oracle_checks.refuse(
            PLANS[1], samples.fold_plan(sources, targets, (1, 1)), ValueError, f"{meeting}, got [123] in entry"
        )


@pytest.mark.debug_mode
@pytest.mark.parametrize(("sources", "targets", "name"), [((1, 6), (1, 2), "source"), ((1, 3), (1, 6), "target")])
def test_bad_fold_plan(device, sources, targets, name):
    arguments = samples.fold_plan(sources, targets, (1, 1))
    after = check_bad_data(PLANS[1], arguments, IndexError, rf"{name}_slots\[1\] must be below 6 .* got 6", device)
    if after is not None:
        assert after[0].tolist() == [[1, 1, 0, 1], *[[0] * 4] * 5]


@pytest.mark.debug_mode
@pytest.mark.parametrize(
    ("cursor", "sentence"),
    [
        ((33, 0, 0), "from 0 to 32 rows pending in a slot, got 33 in slot 2"),
        ((2, 0, 31), "from 0 to 30 rows pending in a slot, got 31 in slot 2"),
        ((2, 0, INT32_MAX), "from 0 to 30 rows pending in a slot, got 2147483647 in slot 2"),
        ((2, 0, -1), "from 0 to 30 rows pending in a slot, got -1 in slot 2"),
        ((2, 32, 0), "a first row below 32 of a ring, got 32 in slot 2"),
    ],
    ids=str,
)
def test_bad_cursor_of_a_fold(device, cursor, sentence):
    cursors = ((0, 0, 0), (3, 6, 2), cursor, (0, 1, 4), (1, 0, 3), (0, 0, 0))
    arguments = samples.fold_plan((1, 2), (1, 2), (1, 1), cursors)
    after = check_bad_data(PLANS[1], arguments, ValueError, sentence, device)
    if after is not None:
        assert after[0].tolist() == [[1, 3, 6, 1], *[[0] * 4] * 5]


# ---------------------------------------------------------------- a layer compared with the oracle

VERIFY, FOLD = "gated_delta_verify", "gated_delta_fold"


WRITTEN = (
    "out",
    "state",
    "record_keys",
    "record_norms",
    "record_decays",
    "record_updates",
    "layer_window",
    "all_states",
)


def tolerance(
    dtype: torch.dtype, state_dtype: torch.dtype = torch.float32, device: str = "cpu", absolute: float = 5e-6
) -> tuple[float, float]:
    """Return the relative and absolute tolerance for sums in another order.

    A dtype with fewer bits may round to an adjacent number, and twice with a norm. CUDA rounds the products of
    reapplied rows in another way, so numbers of a bfloat16 state may already be adjacent ones.
    """
    steps = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
    neighbours = device != "cpu" and state_dtype == torch.bfloat16
    return 2 * steps[dtype], 2e-3 if neighbours else absolute


def check_verify(arguments: tuple, device: str = "cpu", absolute: float = 5e-6) -> tuple:
    """Compare with the oracle: equal up to rounding, and keys and all other bytes equal.

    Returns:
        The arguments of the call.
    """
    ours, theirs, given = layouts.twin(arguments, device), layouts.twin(arguments), named(VERIFY, arguments)
    ops.gated_delta_verify(*ours)
    oracle.gated_delta_verify(*theirs)
    inexact = {name: given[name] for name in WRITTEN if name not in ("record_keys", "layer_window")}
    tolerances = {
        name: tolerance(tensor.dtype, given["state"].dtype, device, absolute)
        for name, tensor in inexact.items()
        if tensor is not None
    }
    compare(VERIFY, None, None, layouts.twin(ours), theirs, tolerances)
    return ours


def same_results(one: tuple, other: tuple) -> bool:
    """Return whether two calls have left the same bits in their outputs, in any layout."""
    pairs = [(named(VERIFY, one)[name], named(VERIFY, other)[name]) for name in WRITTEN]
    return all(torch.equal(raw(a), raw(b)) for a, b in pairs if a is not None)


@pytest.mark.parametrize("per_channel", [False, True], ids=["", "kda"])
@pytest.mark.parametrize("value_width", VALUE_WIDTHS)
@pytest.mark.parametrize("key_width", KEY_WIDTHS)
def test_widths(device, key_width, value_width, per_channel):
    """Also norms over every width."""
    heads = Heads(1, 2, key_width, value_width)
    for state_dtype, norm in zip(STATE_DTYPES, ("silu", None), strict=True):
        check_verify(
            samples.verify(heads, samples.REQUESTS[:4], state_dtype, per_channel=per_channel, norm=norm), device
        )


def moved(dice: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Copy inputs to another layout: any alignment within 16 bytes, gaps between heads and tokens, or head by head."""
    tokens, heads, width = tensor.shape
    kind = dice.choice(("as it is", "placed", "spaced", "by head"))
    if kind == "as it is":
        return tensor
    if kind == "placed":
        return layouts.surrounded(tensor, edge=dice.randint(16, 23))
    if kind == "spaced":
        wide = torch.zeros(tokens, heads + 1, width + 6, dtype=tensor.dtype)
        return layouts.surrounded(wide)[:, :heads, :width].copy_(tensor)
    by_head = torch.zeros(heads, tokens, width, dtype=tensor.dtype)
    return layouts.surrounded(by_head).transpose(0, 1).copy_(tensor)


@pytest.mark.parametrize("seed", range(40))
def test_random_layers(device, seed):
    """Any sizes, dtypes, options, windows and layouts. State and record are at any place in a page, also misaligned."""
    dice = random.Random(seed)
    key_heads, rows, norm = (
        dice.randint(1, 3),
        dice.choice((1, 2, 3, 9, 16, 32)),
        dice.choice((None, "silu", "sigmoid")),
    )
    heads = Heads(key_heads, key_heads * dice.choice((1, 2, 4, 5)), dice.choice(KEY_WIDTHS), dice.choice(VALUE_WIDTHS))
    layer = {
        "state_dtype": dice.choice(STATE_DTYPES), "per_channel": dice.random() < 0.3, "rows": rows,
        "dtype": dice.choice(DTYPES if device == "cuda" else (*DTYPES, torch.float32)),
        "gap": dice.choice((0, 2, 4, 8, 12, 48, 4096)), "shift": dice.choice((0, 4, 8, 12)),
        "one_page": dice.random() < 0.8,
    }  # fmt: skip
    requests = tuple(
        samples.Planned(slot if dice.random() < 0.8 else 0, dice.randint(0, rows), dice.randint(0, rows), slot % 2)
        for slot in dice.sample(range(1, 5), dice.randint(1, 4))
    )
    gates = dice.choice(("softplus", "bounded", "given"))
    arguments = samples.verify(
        heads, requests, norm=norm, all_states=dice.random() < 0.5, use_qk_l2norm=dice.random() < 0.8,
        extra_tokens=dice.randint(0, 2), allow_neg_eigval=gates != "given" and dice.random() < 0.3, seed=seed,
        gate_lower_bound=-5.0 if gates == "bounded" else None, given_gates=gates == "given", **layer,
    )  # fmt: skip
    given = named(VERIFY, arguments)
    changed = {name: moved(dice, given[name]) for name in ("q", "k", "v", "gate", "out") if given[name] is not None}
    if gates == "given":
        changed |= {name: layouts.surrounded(given[name].to(dice.choice(DTYPES))) for name in "ab"}
    if given["all_states"] is not None:
        changed["all_states"] = layouts.surrounded(given["all_states"], edge=64 + dice.randint(0, 7))
    # The terms of a long sum may cancel, so small outputs have larger relative errors.
    check_verify(with_arguments(VERIFY, arguments, **changed), device, absolute=1e-4)
    layer["gap"] = min(layer["gap"], 48)
    check_fold(samples.fold(2, heads, **layer, folds=tuple(
        (request.slot, request.rows, request.half, request.slot) for request in requests
    )), device)  # fmt: skip


def test_options(device):
    """Without the norm of q and k, another softplus, weights of another dtype than the inputs."""
    check_verify(samples.verify(use_qk_l2norm=False, seed=1), device)
    arguments = samples.verify(norm="silu", seed=2)
    other = with_arguments(VERIFY, arguments, scale=0.3, softplus_beta=2.5, softplus_threshold=0.5, norm_eps=0.1)
    ours, plain = check_verify(other, device), check_verify(arguments, device)
    assert not torch.equal(ours[0], plain[0])
    given = named(VERIFY, arguments)
    weights = {name: given[name].to(torch.float16) for name in ("a", "b", "A_log", "dt_bias", "norm_weight")}
    check_verify(with_arguments(VERIFY, arguments, **weights), device)


@pytest.mark.parametrize("per_channel", [False, True], ids=["", "kda"])
def test_bounded_decays_by_hand(device, per_channel):
    """A gate of 0 is half open: the decay is exp(L / 2). Large gates give a decay of 1 or exp(L), not NaN."""
    arguments = layouts.twin(samples.verify(per_channel=per_channel, gate_lower_bound=-5.0), device)
    given = named(VERIFY, arguments)
    for name in ("a", "dt_bias"):
        given[name].zero_()
    given["a"][1], given["a"][2] = 3e4, -3e4
    ops.gated_delta_verify(*arguments)
    decays = given["record_decays"][samples.REQUESTS[0].slot, 1 - samples.REQUESTS[0].half].cpu()
    for token, log_decay in enumerate((-2.5, -5.0, 0.0)):
        expected = torch.full_like(decays[token], log_decay).exp()
        torch.testing.assert_close(decays[token], expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("heads", [Heads(2, 2, 96, 192), Heads(1, 2)], ids=str)
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_doubled_beta(device, state_dtype, heads):
    """Equal to twice the beta without the option: by hand for betas of 1/2 and 1, and with the oracle for others."""
    check_verify(samples.verify(heads, state_dtype=state_dtype, all_states=True, allow_neg_eigval=True), device)
    once = layouts.twin(samples.verify(heads, state_dtype=state_dtype), device)
    twice = layouts.twin(once)
    named(VERIFY, once)["b"].fill_(100.0)  # a beta of 1
    named(VERIFY, twice)["b"].zero_()  # of 1/2
    ops.gated_delta_verify(*once)
    ops.gated_delta_verify(*with_arguments(VERIFY, twice, allow_neg_eigval=True))
    assert same_results(once, twice)


def test_extremes(device):
    """Decays of 0 and 1, closed and open gates, and a key of zeros give finite results."""
    arguments = samples.verify(norm="silu", all_states=True, extra_tokens=0)
    given = named(VERIFY, arguments)
    given["a"][:2] = torch.tensor([[80.0, -80.0], [-200.0, 3e4]])
    given["b"][:2] = torch.tensor([[100.0, -100.0], [0.0, 3e4]])
    given["k"][0], given["q"][1] = 0, 0
    given["gate"][2] = torch.tensor([-200.0, 200.0])[:, None]
    ours = named(VERIFY, check_verify(arguments, device))
    assert ours["out"][:3].isfinite().all()
    assert ours["all_states"][:3].isfinite().all()


def test_a_window_may_move_a_state(device):
    """If source and target differ, the source is read and does not change."""
    arguments = samples.verify(requests=(samples.Planned(1, 2, 2, 1), samples.Planned(3, 1, 0)))
    moved = layouts.surrounded(torch.tensor([[1, 2, 1, 2], [3, 0, 0, 4]], dtype=torch.int32))
    check_verify(with_arguments(VERIFY, arguments, plan=moved), device)


# ---------------------------------------------------------------- folds


def check_fold(arguments: tuple, device: str = "cpu") -> tuple:
    """Compare with the oracle (bit-identical on the CPU). Return the arguments of the call."""
    ours, theirs = layouts.twin(arguments, device), layouts.twin(arguments)
    ops.gated_delta_fold(*ours)
    oracle.gated_delta_fold(*theirs)
    tolerances = None if device == "cpu" else {"states": tolerance(arguments[0][0].dtype)}
    compare(FOLD, None, None, layouts.twin(ours), theirs, tolerances)
    return ours


def test_fold_of_nothing(device):
    for folds in ((), ((0, 0, 0, 0),), ((0, 2, 1, 0), (3, 2, 1, 0))):
        arguments = samples.fold(folds=folds)
        assert layouts.same_memory(check_fold(arguments, device), arguments)


def test_cancel_skips_layers_that_ran(device):
    arguments = samples.fold(4, ran=(0, 2))
    ours = check_fold(arguments, device)
    again = layouts.twin(ours)
    ops.gated_delta_fold(*again)  # all layers are marked now
    assert layouts.same_memory(again, ours)
    changed = [not torch.equal(a[1:].cpu(), b[1:]) for a, b in zip(ours[0], arguments[0], strict=True)]
    assert changed == [False, True, False, True]


def test_many_layers(device):
    """More than the 72 layers that fit in the parameters of one launch."""
    check_fold(samples.fold(75, Heads(1, 1), folds=((2, 1, 0, 2), (1, 3, 1, 4))), device)


@pytest.mark.parametrize("per_channel", [False, True], ids=["", "kda"])
@pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
def test_fold_equals_the_reapplied_rows_of_verify(device, state_dtype, per_channel):
    """Both ops give bit-identical states."""
    arguments = layouts.twin(
        samples.verify(Heads(2, 4, 64, 128), state_dtype=state_dtype, per_channel=per_channel), device
    )
    given = named(VERIFY, layouts.twin(arguments))
    names = ("state", "record_keys", "record_norms", "record_decays", "record_updates", "layer_window")
    ops.gated_delta_fold(*([given[name]] for name in names), given["plan"])
    ops.gated_delta_verify(*arguments)
    assert torch.equal(given["state"][1:], named(VERIFY, arguments)["state"][1:])
    assert not torch.equal(given["state"][2], named(VERIFY, samples.verify())["state"][2].to(given["state"]))


# ---------------------------------------------------------------- bits


def test_row_without_a_target_is_padding(device):
    """Only chunks have windows without a store."""
    arguments = samples.verify(requests=(samples.Planned(2, 2), samples.Planned(3, 1)))
    plan = layouts.surrounded(torch.tensor([[2, 1, 0, 0], [3, 0, 0, 3]], dtype=torch.int32))
    out = named(VERIFY, check_verify(with_arguments(VERIFY, arguments, plan=plan), device))["out"]
    assert not out[:2].any()
    assert out[2].any()


@pytest.mark.usefixtures("four_threads")
def test_threads_give_the_same_bits():
    arguments = samples.verify(Heads(2, 8, 128, 128), norm="silu", all_states=True)
    ours, theirs = layouts.twin(arguments), layouts.twin(arguments)
    ops.gated_delta_verify(*ours)
    torch.set_num_threads(1)
    ops.gated_delta_verify(*theirs)
    assert layouts.same_memory(ours, theirs)


# ---------------------------------------------------------------- invalid arguments

BAD_PLANS = {
    "target past the last": ((5, 0, 0, 5), IndexError, r"plan must name slots in \[1, 5\), got 5 in row 1"),
    "source past the last": ((9, 0, 0, 4), IndexError, r"plan must name slots in \[1, 5\), got 9 in row 1"),
    "source nobody's": ((0, 0, 0, 4), IndexError, r"plan must name slots in \[1, 5\), got 0 in row 1"),
    "more rows than a record has": (
        (4, 4, 0, 4),
        ValueError,
        "plan must reapply from 0 to the 3 rows .* got 4 in row 1",
    ),
    "fewer rows than none": ((4, -1, 0, 4), ValueError, "plan must reapply from 0 to the 3 rows .* got -1 in row 1"),
    "no such half": ((4, 0, 2, 4), ValueError, "plan must name half 0 or 1 of a record, got 2 in row 1"),
}


@pytest.mark.debug_mode
@pytest.mark.parametrize(("row", "error", "sentence"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_bad_plan(device, row, error, sentence):
    """CUDA skips only the invalid row."""
    requests = (samples.Planned(2, 3, 2, 1), samples.Planned(4, 2), samples.Planned(3, 1))
    arguments = samples.verify(requests=requests)
    good = samples.plan_of(requests)
    plan = good.clone()
    plan[1] = torch.tensor(row, dtype=torch.int32)
    after = check_bad_data(VERIFY, with_arguments(VERIFY, arguments, plan=plan), error, sentence, device)
    folds = samples.fold(folds=tuple(map(tuple, plan[:3].tolist())))
    folded = check_bad_data(FOLD, folds, error, sentence, device)
    if after is not None:
        ours = named(VERIFY, after)
        expected = named(VERIFY, layouts.twin(arguments, device))
        ops.gated_delta_verify(**expected)
        assert torch.equal(ours["state"][2:4], expected["state"][2:4])
        assert torch.equal(ours["out"][5:6], expected["out"][5:6])
    if folded is not None:
        assert not torch.equal(folded[0][0][2].cpu(), folds[0][0][2])


@pytest.mark.debug_mode
@pytest.mark.parametrize(
    ("starts", "sentence"),
    [
        ((0, 3, 2, 4), "query_start_loc must start at 0 or above and not decrease, got 3 and 2 around request 1"),
        ((-1, 2, 4, 6), "query_start_loc must start at 0 or above"),
        ((0, 3, 6, 9), "q must have a row for every token, got 8 where request 2 ends at token 9"),
        ((0, 4, 5, 6), "query_start_loc must give a request no more than the 3 tokens .*, got 4 for request 0"),
    ],
)
def test_bad_starts(device, starts, sentence):
    arguments = samples.verify(requests=(samples.Planned(2, 3, 2, 1), samples.Planned(4, 2), samples.Planned(3, 1)))
    bad = with_arguments(VERIFY, arguments, query_start_loc=int32(*starts))
    check_bad_data(VERIFY, bad, ValueError, sentence, device)


def test_plans_that_conflict():
    """Only the CPU checks this."""
    arguments = samples.verify(requests=(samples.Planned(2, 1), samples.Planned(1, 1)))
    for second in ((1, 0, 0, 2), (2, 0, 0, 1)):
        plan = torch.tensor([(2, 0, 0, 2), second], dtype=torch.int32)
        sentence = "plan must name a target that no other row reads or writes, got 2 in row"
        oracle_checks.refuse(VERIFY, with_arguments(VERIFY, arguments, plan=plan), ValueError, sentence)
        oracle_checks.refuse(FOLD, samples.fold(folds=tuple(map(tuple, plan.tolist()))), ValueError, sentence)


def test_neighbours_of_other_sizes_share_no_memory(device):
    """The last bytes of a number of 8 or 4 bytes count as shared memory; the bytes after it do not."""
    arguments = samples.window(cursors=((0, 0),), slots=(0,) * 6)
    memory = torch.zeros(6, dtype=torch.int32, device=device)
    window = memory[2:4].view(torch.int64)
    for start, shared in ((0, False), (1, True), (2, True), (3, True), (4, False)):
        cursors = memory[start : start + 2].view(1, 2)
        call = with_arguments(PLANS[0], layouts.twin(arguments, device), window_id=window, cursors=cursors)
        if shared:
            oracle_checks.refuse(PLANS[0], call, ValueError, "window_id and cursors must not share memory")
        else:
            ops.plan_recurrent_window(*call)
    assert window.item() == 2


def refused_shapes() -> dict[str, tuple[dict, str]]:
    arguments = samples.verify(norm="silu", all_states=True)
    given = named(VERIFY, arguments)
    tokens = given["q"].shape[0]

    def zeros(*shape: int, like: str = "q") -> torch.Tensor:
        return torch.zeros(shape, dtype=given[like].dtype)

    return {
        "width": ({"state": zeros(5, 2, 64, 192, like="state")}, "state must be of key_width 64, 96, 128 or 256"),
        "value width": (
            {"state": zeros(5, 2, 96, 64, like="state")}, "state must be of value_width 64, 128, 192 or 256"
        ),
        "transposed state": ({"state": given["state"].transpose(2, 3)}, "state must be contiguous within"),
        "slots in slots": ({"state": given["state"][:1].expand(5, -1, -1, -1)}, "state must be of slots at least 8192"),
        "heads": ({"record_keys": zeros(5, 2, 3, 3, 64)}, "record_keys must be of a number of heads that divides"),
        "rows": ({"record_keys": zeros(5, 2, 33, 1, 64)}, "record_keys must be of 1 to 32 rows"),
        "halves": ({"record_keys": zeros(5, 1, 3, 1, 64)}, r"record_keys must be \[5, 2, record_rows, num_key"),
        "slots": ({"record_norms": zeros(4, 2, 3, 1, like="record_norms")}, r"record_norms must be \[5, 2, 3, 1\]"),
        "decays": ({"record_decays": zeros(5, 2, 3, 1, like="record_norms")}, r"record_decays must be \[5, 2, 3, 2\]"),
        "channels": ({"a": zeros(tokens, 2, 64)}, rf"a must be \[{tokens}, 2\]"),
        "bias": ({"dt_bias": zeros(2, 64)}, r"dt_bias must be \[2\]"),
        "updates": ({"record_updates": zeros(5, 3, 2, 32, like="state")}, r"record_updates must be \[5, 3, 2, 64\]"),
        "key tokens": ({"k": zeros(tokens - 1, 1, 64)}, rf"k must be \[{tokens}, 1, 64\]"),
        "spaced width": ({"v": zeros(tokens, 2, 128)[..., ::2]}, "v must be contiguous along its last dimension"),
        "output": ({"out": zeros(tokens - 1, 2, 64)}, rf"out must be \[>= {tokens}, 2, 64\]"),
        "gate alone": ({"norm_weight": None}, "gate and norm_weight must be given together"),
        "weight": ({"norm_weight": zeros(1, like="state")}, r"norm_weight must be \[64\]"),
        "activation": ({"gate_activation": "tanh"}, "gate_activation must be silu or sigmoid, got tanh"),
        "no A_log": ({"A_log": None}, "A_log and dt_bias must be given together"),
        "no dt_bias": ({"dt_bias": None}, "A_log and dt_bias must be given together"),
        "bound of nothing": (
            {"A_log": None, "dt_bias": None, "gate_lower_bound": -5.0},
            "gate_lower_bound must be None without A_log and dt_bias",
        ),
        "doubled beta that was given": (
            {"A_log": None, "dt_bias": None, "allow_neg_eigval": True},
            "allow_neg_eigval must be False without A_log and dt_bias",
        ),
        "plan": ({"plan": int32(0, 0, 0, 0).view(1, 4)}, r"plan must be \[num_requests, 4\] with at least 5 rows"),
        "starts": ({"query_start_loc": int32()}, r"query_start_loc must be \[num_requests \+ 1\] with at least 1"),
        "states": ({"all_states": zeros(2, 2, 64, 64, like="state")}, rf"all_states must be \[>= {tokens}, 2, 64"),
    }  # fmt: skip


@pytest.mark.parametrize(("changed", "sentence"), refused_shapes().values(), ids=refused_shapes())
def test_refused(device, changed, sentence):
    arguments = layouts.twin(with_arguments(VERIFY, samples.verify(norm="silu", all_states=True), **changed), device)
    oracle_checks.refuse(VERIFY, arguments, ValueError, sentence)


def test_refused_lists(device):
    arguments = layouts.twin(samples.fold(3), device)
    oracle_checks.refuse(FOLD, ([], *arguments[1:]), ValueError, "states must hold at least one layer, got none")
    oracle_checks.refuse(
        FOLD, (*arguments[:2], arguments[2][:2], *arguments[3:]), ValueError,
        "record_norms must hold a tensor for each of the 3 states, got 2",
    )  # fmt: skip
    other = layouts.twin(samples.fold(1, gap=64), device)
    mixed = [[*mine[:2], theirs[0]] for mine, theirs in zip(arguments[:6], other[:6], strict=True)]
    sentence = r"states\[2\] must be of the shape and strides of states\[0\], torch.float32 \[5, 2, 64, 64\]"
    oracle_checks.refuse(FOLD, (*mixed, arguments[6]), ValueError, sentence)
    twice = [[*tensors[:2], tensors[0]] for tensors in arguments[:6]]
    oracle_checks.refuse(FOLD, (*twice, arguments[6]), ValueError, "states and states must not share memory")


def test_refused_lists_of_two_shapes(device):
    """Equal strides between slots, but other heads."""
    made = [
        layouts.twin(samples.fold(1, Heads(1, 2, *widths), one_page=False), device) for widths in ((64, 128), (128, 64))
    ]
    assert made[0][0][0].stride(0) == made[1][0][0].stride(0)
    lists = [[*mine, *theirs] for mine, theirs in zip(made[0][:6], made[1][:6], strict=True)]
    sentence = r"states\[1\] must be of the shape and strides of states\[0\], torch.float32 \[5, 2, 128, 64\], got"
    oracle_checks.refuse(FOLD, (*lists, made[0][6]), ValueError, sentence)


def test_marks_of_a_fold_share_no_memory(device):
    arguments = layouts.twin(samples.fold(2, ran=()), device)
    call = with_arguments(FOLD, arguments, layer_windows=arguments[5][:1] * 2)
    oracle_checks.refuse(FOLD, call, ValueError, "layer_windows and layer_windows must not share memory")


@pytest.mark.gpu
def test_float32_inputs_are_refused(device):
    oracle_checks.refuse(
        VERIFY, layouts.twin(samples.verify(dtype=torch.float32), device), TypeError,
        "out must have dtype torch.float16 or torch.bfloat16 on CUDA",
    )  # fmt: skip


def test_most_record_rows(device):
    oracle_checks.refuse(
        PLANS[0],
        layouts.twin(samples.window(record_rows=33), device),
        ValueError,
        "record_rows must be at most 32, got 33",
    )
    oracle_checks.assert_same_as_oracle(PLANS[0], samples.window(record_rows=32), device)


def test_decay_of_the_oracle():
    """Compare with the formula in Python's doubles; above its threshold softplus is the identity."""
    x, A_log, threshold = [-3.0, 0.0, 0.5, 2.0], 0.3, 1.0
    softplus = [y if y > threshold else math.log1p(math.exp(y)) for y in x]
    expected = torch.tensor([math.exp(-math.exp(A_log) * y) for y in softplus])
    decays = oracle.decay_of(torch.tensor(A_log), torch.tensor(x), 1.0, threshold)
    torch.testing.assert_close(decays, expected, rtol=1e-6, atol=0)  # a few roundings in float32
    bounded = torch.tensor([math.exp(-5.0 / (1 + math.exp(-math.exp(A_log) * y))) for y in x])
    decays = oracle.decay_of(torch.tensor(A_log), torch.tensor(x), 1.0, threshold, -5.0)
    torch.testing.assert_close(decays, bounded, rtol=2e-6, atol=0)  # the exponent is up to 5
    assert samples.starts_of(samples.REQUESTS).tolist() == [0, 3, 5, 5, 6, 8]
