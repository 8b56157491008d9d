"""Test invalid input to every op: argument by argument, from the schema (`bad_input`). Refusals write nothing."""

from __future__ import annotations

import itertools
import pathlib
import re

import bad_input
import pytest
import torch
from torch.autograd import forward_ad

from nwor_ops import ops
from nwor_ops.arguments import describe_type_error
from nwor_ops.ops import registry
from nwor_ops.testing import layouts, oracle, samples
from nwor_ops.testing.against_oracle import assert_same_results
from nwor_ops.testing.samples import argument_names, named, with_arguments

OPS = tuple(registry.OPS)
PROBLEMS = pathlib.Path(__file__).parents[2] / "csrc" / "common" / "problems.h"
FLOAT_SUMS = ("gated_delta_verify", "gated_delta_fold")  # compared within a tolerance elsewhere


@pytest.mark.parametrize("op", OPS)
def test_another_device(device, op):
    """One tensor is on another device than the rest. No address of another device reaches a kernel."""
    for case in bad_input.another_device(op, device, ("cpu", "meta")):
        bad_input.check_refused(op, case)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_one_argument_on_cuda(device, op):
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
    """A model with a wrong dtype or number of dimensions fails while it is traced."""
    for case in bad_input.KINDS[kind](op, "meta"):
        bad_input.check_refused(op, case)


WITH_OPTIONS = [op for op in OPS if any(map(bad_input.is_bool, bad_input.declared(op)))]


@pytest.mark.parametrize("op", WITH_OPTIONS)
def test_options_are_booleans(device, op):
    """The kernel of an op sees True or False, because the dispatcher converts. The function checks its arguments."""
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
def test_gradients_are_refused(op):
    """The ops have no derivatives. Without an error, a gradient or a tangent would be lost silently."""
    for name, _, value, call in bad_input._replacements(op, "cpu", bad_input.is_tensor):
        if value is not None and value.dtype in (torch.float32, torch.float16, torch.bfloat16):
            wrong = call(value.detach().requires_grad_())
            with pytest.raises(RuntimeError, match=rf"^{op}: {re.escape(name)} must not require a gradient"):
                getattr(ops, op)(**named(op, tuple(wrong)))
            _, error = bad_input.attempt(op, wrong)
            assert type(error) is RuntimeError, name
            assert str(error).startswith(f"{op}: {name} must not require a gradient"), error
            with forward_ad.dual_level(), torch.no_grad():
                _, error = bad_input.attempt(op, call(forward_ad.make_dual(value, torch.ones_like(value))))
            assert type(error) is RuntimeError, name
            assert str(error).startswith(f"{op}: {name} must not have a tangent"), error


def check_on_cuda(op, label, arguments, on_cpu, expected, refused):
    """CUDA gives the result of the CPU. It skips data that the CPU refuses, and writes only inside the outputs."""
    ours = layouts.twin(arguments, "cuda")
    result, error = bad_input.attempt(op, ours)
    if error is not None:
        assert repr(error) == repr(refused), label
        assert layouts.same_memory(ours, arguments), label
    elif refused is not None or op in FLOAT_SUMS:
        assert bad_input.only_declared_changed(op, ours, arguments), label
    else:
        assert_same_results(result, expected)
        assert layouts.same_memory(ours, on_cpu), label


@pytest.mark.parametrize("kind", [bad_input.any_integer, bad_input.any_shape])
@pytest.mark.parametrize("op", OPS)
def test_refused_or_right(device, op, kind):
    """A call with another integer or shape raises an error that names an argument, or gives the oracle's result."""
    for label, arguments in kind(op):
        on_cpu = layouts.twin(arguments)
        expected, refused = bad_input.attempt(op, on_cpu)
        if refused is not None:
            assert type(refused) in (ValueError, IndexError, TypeError), f"{label}: {refused!r}"
            assert str(refused).startswith(f"{op}: "), f"{label}: {refused}"
            assert layouts.same_memory(on_cpu, arguments), label
        elif op not in FLOAT_SUMS:
            theirs = layouts.twin(arguments)
            try:
                result = getattr(oracle, op)(*theirs)
            except IndexError:  # the op leaves out what is not there
                assert bad_input.only_declared_changed(op, layouts.twin(on_cpu), arguments), label
            else:
                assert_same_results(expected, result, f"{label}: ")
                assert layouts.same_memory(on_cpu, theirs), label
        if device == "cuda":
            check_on_cuda(op, label, arguments, on_cpu, expected, refused)


@pytest.mark.debug_mode
@pytest.mark.parametrize("op", OPS)
def test_any_data(device, op):
    """Call the ops with any indices, counts and starts.

    The CPU raises an error that names the op and an argument and writes nothing, or writes a result inside the outputs.
    CUDA writes a result inside the outputs, and raises only in debug mode. compute-sanitizer also checks reads.
    """
    for label, arguments in bad_input.any_data(op, device, seeds={"cpu": 60, "cuda": 20}[device]):
        before = layouts.twin(arguments)
        _, error = bad_input.attempt(op, arguments)
        if error is None:
            assert bad_input.only_declared_changed(op, arguments, before), label
            continue
        assert device == "cpu" or bad_input.DEBUG_MODE, f"{label}: {error!r}"
        assert type(error) in (ValueError, IndexError), f"{label}: {error!r}"
        assert bad_input.begins_with_an_argument(op, str(error)), f"{label}: {error}"
        assert device != "cpu" or layouts.same_memory(arguments, before), label


# Indices that are skipped if they are negative. The op finds only those of rows that it moves.
INDICES = [
    ("write_kv", "slot_mapping"), ("write_kv_logged", "slot_mapping"), ("write_kv_logged", "log_rows"),
    ("log_slots", "slot_mapping"), ("log_slots", "log_rows"), ("restore_slots", "row_slots"),
    ("restore_slots_from_rejected", "row_slots"), ("stage_kv", "stage_rows"), ("commit_staged", "row_slots"),
    ("move_slots", "src_slots"), ("move_slots", "dst_slots"),
]  # fmt: skip


def bound_of(name, values):
    """Return the first index outside."""
    if name in ("log_rows", "stage_rows"):
        log = next(values[of] for of in ("key_log", "log", "staged_key") if of in values)
        return len(log)
    cache = values["caches"][0] if "caches" in values else values.get("key_cache", values.get("cache"))
    return cache.shape[0] * cache.shape[1]


@pytest.mark.debug_mode
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(("op", "name"), INDICES)
def test_index_outside(device, op, name, far):
    """The CPU refuses the call, also if the index is the last one. CUDA leaves out its row, and no other."""

    def used(**values):
        indices = [values[of] for of in ("slot_mapping", "src_slots", "dst_slots", name) if of in values]
        return torch.stack([of[: min(map(len, indices))] >= 0 for of in indices]).all(0)

    def drafts(**values):
        return used(**values).any() and ("draft_start_loc" not in values or values["draft_start_loc"][-1] > 0)

    arguments = bad_input.call_with(op, name, where=drafts)
    values = samples.named(op, arguments)
    changed = {of: None for of in ("window_id", "row_windows", "num_rows") if "restore" in op}
    if op == "restore_slots":
        changed["row_rejected"] = torch.ones_like(values["row_rejected"])
    elif op == "restore_slots_from_rejected":
        changed["num_rejected"] = torch.full_like(values["num_rejected"], 99)
    elif op == "commit_staged":
        changed |= {
            "row_requests": None,
            "row_positions": None,
            "row_accepted": torch.ones_like(values["row_slots"] >= 0),
        }
    last = 0 if op == "restore_slots_from_rejected" else int(used(**values).nonzero()[-1])
    largest = 2 ** (62 if values[name].dtype == torch.int64 else 30)
    calls = []
    for index in (largest if far else bound_of(name, values), -1):
        changed[name] = values[name].clone()
        changed[name][last] = index
        calls.append(with_arguments(op, arguments, **changed))
    left = bad_input.left_by_the_oracle(op, calls[1])
    bad_input.check_bad_data(op, calls[0], IndexError, rf"{name}\[{last}\] must be below ", device, left)


# ---------------------------------------------------------------- beyond the table


def wordings() -> list[str]:
    found = re.findall(r"Error,[\s\\]*((?:\"[^\"]*\"[\s\\]*)+)\)", PROBLEMS.read_text())
    return ["".join(re.findall(r'"([^"]*)"', wording)) for wording in found]


@pytest.mark.nightly
def test_every_problem_is_found():
    """Each wording of invalid data is raised by some op for some drawn data, sizes or numbers, or a test by hand names
    it: some need values that are hardly ever drawn together."""
    missing = {text: re.compile(re.sub(r"\\{\w+\\}", r"-?\\d+", re.escape(text)) + "$") for text in wordings()}
    for op in OPS:
        drawn = (bad_input.any_data(op, "cpu", seeds=400), bad_input.any_shape(op), bad_input.any_integer(op))
        for _, arguments in itertools.chain(*drawn):
            message = str(bad_input.attempt(op, arguments)[1] or "").removeprefix(f"{op}: ")
            missing = {text: pattern for text, pattern in missing.items() if not pattern.match(message)}
    assert len(missing) < 10
    tests = pathlib.Path(__file__).parent.glob("test_*.py")
    by_hand = "".join(path.read_text() for path in tests if path.name != "test_bad_input.py")
    assert {text for text in missing if " ".join(text.split()[:6]) not in by_hand} == set()


def test_every_message_about_data_begins_with_an_argument():
    arguments = {name for op in OPS for name in argument_names(op)}
    for text in wordings():
        found = re.match(r"(\w+)(?:\[\{index\}\])? (?:and (\w+) )?must .*\bgot .*\{value\}", text)
        assert found, text
        assert set(filter(None, found.groups())) <= arguments, text


@pytest.mark.parametrize("op", OPS)
def test_cases_cover_every_tensor(op):
    tensors = {a.name for a in bad_input.declared(op) if bad_input.is_tensor(a)} - {"plane_table"}
    for made in (bad_input.another_device(op, "cpu", ("meta",)), bad_input.another_type(op, "cpu")):
        assert {re.match(r"\w+", case.label)[0] for case in made} >= tensors
    mutated = {a.name for a in bad_input.declared(op) if bad_input.is_tensor(a) and bad_input.is_mutated(a)}
    tried = {re.match(r"\w+", case.label)[0] for case in bad_input.overlapping_itself(op, "cpu")}
    assert mutated - tried <= {"window_id", "layer_window", "layer_windows", "current_draft_step", "num_skipped"}


def test_conjugate_and_zero_views_are_refused():
    pages, slots = torch.randn(1, 4, 1, 2, dtype=torch.complex64), torch.tensor([0])
    before = pages.clone()
    for plane, view in ((pages.conj(), "conjugate view"), (torch._efficientzerotensor(1, 4, 1, 2), "zero without")):
        with pytest.raises(ValueError, match=rf"^move_slots: caches must have its own memory, got a {view}"):
            ops.move_slots([plane], slots, slots + 1)
    assert torch.equal(pages, before)


def test_type_error_is_described_only_if_there_is_one():
    overload = torch.ops.nwor.dcp_local_seq_lens.default
    lens = torch.zeros(1, dtype=torch.int32)
    for rank in (0, True, torch.tensor(0), torch.tensor([0.0])):  # the dispatcher accepts them
        assert describe_type_error(overload, (lens, lens.clone(), 4, rank)) is None
    error = describe_type_error(overload, (lens, lens.clone(), 4, 0.5, None))
    assert isinstance(error, TypeError)
    assert str(error) == "dcp_local_seq_lens: dcp_rank must be an int, got 0.5, a value of type float"
    error = describe_type_error(overload, (lens.to_sparse(),))
    assert str(error) == "dcp_local_seq_lens: seq_lens must be a dense tensor, got torch.sparse_coo"


@pytest.mark.parametrize("value", [torch.tensor([2, 3]), torch.zeros(0), torch.tensor(2j), torch.zeros(3).numpy()])
def test_an_array_is_no_number(value):
    """Tensors and arrays have the methods of numbers, but only those with one element are numbers."""
    lens, got = torch.zeros(1, dtype=torch.int32), f"got a value of type {type(value).__name__}$"
    with pytest.raises(TypeError, match=f"^dcp_local_seq_lens: dcp_size must be an int, {got}"):
        ops.dcp_local_seq_lens(lens, lens.clone(), value, 0)
    slots = with_arguments("compute_slot_mappings", samples.calls("compute_slot_mappings")[0], block_sizes=[value])
    with pytest.raises(TypeError, match=rf"^compute_slot_mappings: block_sizes\[0\] must be an int, {got}"):
        ops.compute_slot_mappings(*slots)
    verify = with_arguments("gated_delta_verify", samples.calls("gated_delta_verify")[0], softplus_beta=value)
    with pytest.raises(TypeError, match=f"^gated_delta_verify: softplus_beta must be a float, {got}"):
        ops.gated_delta_verify(*verify)
