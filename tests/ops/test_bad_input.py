"""Test invalid input to every op: argument by argument, from the schema (`bad_input`). Refusals write nothing."""

from __future__ import annotations

import pathlib
import re

import bad_input
import numpy
import oracle_checks
import pytest
import samples_drafter
import samples_staging
import torch
from samples import OPS, argument_names, sample_inputs, with_arguments
from tensors import int64

from nwor_ops import ops
from nwor_ops.arguments import describe_type_error
from nwor_ops.testing import layouts, oracle
from nwor_ops.testing.against_oracle import assert_same_results

PROBLEMS = pathlib.Path(__file__).parents[2] / "csrc" / "common" / "problems.h"


@pytest.mark.parametrize("op", OPS)
def test_another_device(device, op):
    """One tensor on another device than the rest. The call goes to the CUDA kernel or to the fake. No address of
    another device reaches a kernel."""
    for case in bad_input.another_device(op, device, ("cpu", "meta")):
        bad_input.check_refused(op, case)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_one_argument_on_cuda(device, op):
    """One CUDA tensor in a call on the CPU selects the CUDA kernel."""
    for case in bad_input.another_device(op, "cpu", (device,)):
        bad_input.check_refused(op, case)


@pytest.mark.parametrize("kind", bad_input.KINDS)
@pytest.mark.parametrize("op", OPS)
def test_refused(device, op, kind):
    for case in bad_input.KINDS[kind](op, device):
        bad_input.check_refused(op, case)


@pytest.mark.parametrize("kind", bad_input.WITHOUT_DATA)
@pytest.mark.parametrize("op", OPS)
def test_fake_refuses(op, kind):
    """An invalid model fails while it is traced."""
    for case in bad_input.KINDS[kind](op, "meta"):
        bad_input.check_refused(op, case)


WITH_OPTIONS = [op for op in OPS if any(map(bad_input.is_bool, bad_input.declared(op)))]


@pytest.mark.parametrize("op", WITH_OPTIONS)
def test_options_are_booleans(device, op):
    """The kernel of an op sees True or False, because the dispatcher converts. The function checks what it is given."""
    for on in (device, "meta"):
        for case in bad_input.no_bool(op, on):
            bad_input.check_refused(op, case)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("op", WITH_OPTIONS)
def test_options_are_booleans_in_compiled_code(device, op, fullgraph):
    for case in bad_input.no_bool(op, device):
        torch.compiler.reset()
        compiled = torch.compile(getattr(ops, op), backend="eager", fullgraph=fullgraph)
        with pytest.raises(Exception, match=f"{op}: {case.sentence}") as caught:
            compiled(*case.arguments)
        assert fullgraph or type(caught.value) is TypeError


@pytest.mark.parametrize("op", OPS)
def test_any_integer(device, op):
    """The call raises an error that names the op and the argument, or gives the result of the oracle.

    CUDA gives the result of the CPU. Data that the CPU refuses is skipped on CUDA, and all writes are inside the
    outputs.
    """
    for label, arguments in bad_input.any_integer(op, "cpu"):
        on_cpu, name = layouts.twin(arguments), re.match(r"\w+", label)[0]
        expected, refused = bad_input.attempt(op, on_cpu)
        if refused is not None:
            assert type(refused) in (ValueError, IndexError), f"{label}: {refused!r}"
            # If the data exceeds a count of drafts, the message names the data.
            assert re.match(rf"{op}: .*\b({name}|cu_num_draft_tokens)\b", str(refused)), f"{label}: {refused}"
            assert layouts.same_memory(on_cpu, arguments), label
        elif op == "gated_delta_verify":
            continue  # test_recurrent.py compares its sums, within a tolerance
        else:
            theirs = layouts.twin(arguments)
            assert_same_results(expected, getattr(oracle, op)(*theirs))
            assert layouts.same_memory(on_cpu, theirs), label
        if device == "cpu":
            continue
        ours = layouts.twin(arguments, device)
        result, error = bad_input.attempt(op, ours)
        if error is not None:
            assert repr(error) == repr(refused), label
            assert layouts.same_memory(ours, arguments), label
        elif refused is not None:
            assert bad_input.only_declared_changed(op, ours, arguments), label
        else:
            assert_same_results(result, expected)
            if op == "gated_delta_fold":  # a sum of floats may differ from the CPU's in its last bit
                for state, of_cpu in zip(ours[0], on_cpu[0], strict=True):
                    torch.testing.assert_close(state.cpu(), of_cpu, equal_nan=True, msg=label)
                    state.copy_(of_cpu)
            assert layouts.same_memory(ours, on_cpu), label


@pytest.mark.parametrize("op", OPS)
def test_any_data(device, op):
    """Call the ops with any indices, counts and starts.

    The CPU raises an error that names the op and an argument and writes nothing, or writes a result inside the outputs.
    CUDA always writes a result inside the outputs. compute-sanitizer also checks reads.
    """
    for label, arguments in bad_input.any_data(op, device, seeds={"cpu": 60, "cuda": 20}[device]):
        before = layouts.twin(arguments)
        _, error = bad_input.attempt(op, arguments)
        if error is None:
            assert bad_input.only_declared_changed(op, arguments, before), label
            continue
        assert device == "cpu", f"{label}: {error!r}"
        assert type(error) in (ValueError, IndexError), f"{label}: {error!r}"
        assert bad_input.begins_with_an_argument(op, str(error)), f"{label}: {error}"
        assert layouts.same_memory(arguments, before), label


# ---------------------------------------------------------------- beyond the table


def test_every_message_about_data_begins_with_an_argument():
    """`test_any_data` compares some of them with the op that raises them."""
    wordings = re.findall(r"Error,\s*((?:\"[^\"]*\"\s*)+)\}", PROBLEMS.read_text())
    texts = ["".join(re.findall(r'"([^"]*)"', wording)) for wording in wordings]
    assert len(texts) > 50
    arguments = {name for op in OPS for name in argument_names(op)}
    for text in texts:
        found = re.match(r"(\w+)(?:\[\{index\}\])? (?:and (\w+) )?must .*\bgot .*\{value\}", text)
        assert found, text
        assert set(filter(None, found.groups())) <= arguments, text


@pytest.mark.parametrize("op", OPS)
def test_the_table_covers_every_tensor(op):
    """The table covers every argument: each is tested on another device, and with a value that is not a tensor."""
    tensors = {argument.name for argument in bad_input.declared(op) if bad_input.is_tensor(argument)}
    for made in (bad_input.another_device(op, "cpu", ("meta",)), bad_input.no_tensor(op, "cpu")):
        assert {re.match(r"\w+", case.label)[0] for case in made} >= tensors


@pytest.mark.parametrize("op", OPS)
def test_every_mutated_tensor_is_tried_with_overlapping_elements(op):
    """Except if they have one element."""
    mutated = {a.name for a in bad_input.declared(op) if bad_input.is_tensor(a) and bad_input.is_mutated(a)}
    tried = {re.match(r"\w+", case.label)[0] for case in bad_input.overlapping_itself(op, "cpu")}
    assert mutated - tried <= {"window_id", "layer_window", "layer_windows", "current_draft_step", "num_skipped"}


def test_lazy_views_are_read():
    """An argument that an op only reads may be a view that torch resolves."""
    arguments = sample_inputs("write_kv")[0]
    key, value = arguments[:2]
    plain, lazy = layouts.twin(with_arguments("write_kv", arguments, key=-key, value=-value)), layouts.twin(arguments)
    ops.write_kv(*plain)
    ops.write_kv(torch._neg_view(lazy[0]), torch._neg_view(lazy[1]), *lazy[2:])
    assert torch.equal(lazy[2].view(torch.int32), plain[2].view(torch.int32))
    assert torch.equal(lazy[3].view(torch.int32), plain[3].view(torch.int32))


def test_conjugate_and_zero_views_are_not_written():
    pages = torch.randn(1, 4, 1, 2, dtype=torch.complex64)
    before = pages.clone()
    for plane, what in ((pages.conj(), "conjugate view"), (torch._efficientzerotensor(1, 4, 1, 2), "zero without")):
        with pytest.raises(ValueError, match=rf"^move_slots: caches\[0\] must not be a {what}"):
            ops.move_slots([plane], int64(0), int64(1))
        with pytest.raises(ValueError, match=r"^plane_table: caches\[0\] must be a tensor with its own memory"):
            ops.plane_table([plane])
    assert torch.equal(pages, before)


def test_planes_that_begin_together_are_not_moved():
    """A chain of moves in a plane that is given twice would be done twice."""
    (first, second), *moves = samples_staging.move()
    oracle_checks.refuse(
        "move_slots", ([first, second, first], *moves), ValueError, r"caches\[0\] and caches\[2\] must not share"
    )


def test_plane_table_takes_only_a_list_of_tensors():
    for caches, got in (
        (None, "caches must be a list of tensors, got None"),
        ([None], r"caches\[0\] must be a tensor"),
    ):
        with pytest.raises(TypeError, match=f"plane_table: {got}"):
            ops.plane_table(caches)


def test_type_error_is_described_only_if_there_is_one():
    overload = torch.ops.nwor.dcp_local_seq_lens.default
    lens = torch.zeros(1, dtype=torch.int32)
    for rank in (0, True, torch.tensor(0), torch.tensor([0.0])):  # the dispatcher accepts them
        assert describe_type_error(overload, (lens, lens.clone(), 4, rank)) is None
    assert describe_type_error(overload, (lens,)) is None
    error = describe_type_error(overload, (lens, lens.clone(), 4, 0.5, None))
    assert isinstance(error, TypeError)
    assert str(error) == "dcp_local_seq_lens: dcp_rank must be an int, got 0.5, a value of type float"
    error = describe_type_error(overload, (lens.to_sparse(),))
    assert str(error) == "dcp_local_seq_lens: seq_lens must be a dense tensor, got torch.sparse_coo"


@pytest.mark.parametrize("value", [torch.tensor([2, 3]), torch.zeros(0), torch.tensor(2j), numpy.array([2, 3])])
def test_an_array_is_no_number(value):
    """Tensors and arrays have the methods of numbers, but only those with one element are numbers."""
    lens = torch.zeros(1, dtype=torch.int32)
    got = f"got a value of type {type(value).__name__}$"
    with pytest.raises(TypeError, match=f"^dcp_local_seq_lens: dcp_size must be an int, {got}"):
        ops.dcp_local_seq_lens(lens, lens.clone(), value, 0)
    slots = with_arguments("compute_slot_mappings", samples_drafter.slots(), block_sizes=[value])
    with pytest.raises(TypeError, match=rf"^compute_slot_mappings: block_sizes\[0\] must be an int, {got}"):
        ops.compute_slot_mappings(*slots)
    verify = with_arguments("gated_delta_verify", sample_inputs("gated_delta_verify")[0], softplus_beta=value)
    with pytest.raises(TypeError, match=f"^gated_delta_verify: softplus_beta must be a float, {got}"):
        ops.gated_delta_verify(*verify)


LAST = 2**63 - 1


def test_positions_at_the_end_of_64_bits():
    """If a sum does not fit 64 bits, the result is the limit, or the largest number if there is no limit."""
    positions = samples_drafter.decode(positions=(LAST, 30, LAST - 1, 0, 0, 0))
    ops.prepare_decode_inputs(*positions)
    assert positions[4].tolist()[:3] == [31, 31, 31]

    rejected = with_arguments(
        "prepare_decode_inputs", samples_drafter.decode(advance=False), num_rejected=int64(-LAST, 0, LAST, 0)
    )
    ops.prepare_decode_inputs(*rejected)
    assert rejected[6].tolist()[:3] == [2**31 - 1, 32, 33 - (2**31 - 1)]

    step = with_arguments("eagle_step", samples_drafter.eagle(positions=(0, 0, 3)), positions=int64(LAST, LAST - 1, 3))
    ops.eagle_step(*step)
    assert [t.tolist()[:3] for t in (step[3], step[4])] == [[0, 0, 4], [-1, -1, 4 * int(step[1][2, 1])]]

    expanded = with_arguments("copy_expand_inputs", samples_drafter.expand(), target_positions=int64(*[LAST - 1] * 10))
    ops.copy_expand_inputs(*expanded)
    assert expanded[6].tolist()[:4] == [LAST - 1, LAST, LAST, LAST]


def test_negative_lengths_count_as_none():
    arguments = samples_drafter.local_lens((-1, -(2**31), 9), size=1, rank=0)
    ops.dcp_local_seq_lens(*arguments)
    assert arguments[1].tolist()[:3] == [0, 0, 9]
