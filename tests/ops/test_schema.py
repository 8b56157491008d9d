"""Test the declared contract: schemas, kernels and fakes of every op, and the results of opcheck."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from bad_input import only_declared_changed
from processes import ROOT
from torch.utils._pytree import tree_leaves

from nwor_ops import ops
from nwor_ops.meta import SPECS
from nwor_ops.ops import registry
from nwor_ops.testing import samples
from nwor_ops.testing.layouts import memory, twin
from nwor_ops.testing.samples import argument_names, ops_of

OPS = tuple(registry.OPS)
RETURNING = ("acceptance_mask", "acceptance_mask_from_rejected")


def overload(op):
    return getattr(torch.ops.nwor, op).default


def test_every_op_is_documented_and_exported():
    import nwor_ops

    for op in OPS:
        wrapper = getattr(ops, op)
        assert all(re.search(rf"\b{name}\b", wrapper.__doc__) for name in argument_names(op)), op
        assert getattr(nwor_ops, op) is wrapper


@pytest.mark.parametrize("op", OPS)
def test_call_by_names(op):
    """Every argument can be passed by name, with the same result. A pickled function is found again."""
    arguments = samples.calls(op, 1)[0]
    ours = twin(arguments)
    getattr(ops, op)(*arguments)
    getattr(ops, op)(**dict(zip(argument_names(op), ours, strict=False)))
    assert all(torch.equal(a, b) for a, b in zip(memory(arguments), memory(ours), strict=True))
    assert pickle.loads(pickle.dumps(getattr(ops, op))) is getattr(ops, op)


@pytest.mark.parametrize("op", OPS)
def test_call_that_does_not_fit_the_signature(op):
    first, *rest = argument_names(op)
    arguments = samples.calls(op, 1)[0]
    with pytest.raises(TypeError, match=f"^{op}: missing a required argument: '{rest[0]}'$"):
        getattr(ops, op)(arguments[0])
    with pytest.raises(TypeError, match=f"^{op}: got an unexpected keyword argument 'drafts'$"):
        getattr(ops, op)(*arguments, drafts=1)
    with pytest.raises(TypeError, match=f"^{op}: multiple values for argument '{first}'$"):
        getattr(ops, op)(*arguments, **{first: arguments[0]})


@pytest.mark.parametrize("op", OPS)
def test_tag_and_results(op):
    assert torch.Tag.pt2_compliant_tag in overload(op).tags
    returns = overload(op)._schema.returns
    assert len(returns) == (2 if op in RETURNING else 0)
    assert all(r.alias_info is None for r in returns)


def test_counters_have_the_order_of_the_kernels():
    """`COUNTERS` has the order of the enum in csrc/accept.h."""
    source = (ROOT / "csrc" / "accept.h").read_text()
    names = re.search(r"enum Counter \{([^}]*)\}", source).group(1).split(",")
    assert [name.strip() for name in names] == [
        *(f"k{name.capitalize()}" for name in ops.COUNTERS),
        "kNumCounters",
    ]


@pytest.mark.parametrize("op", [op for op in OPS if op not in ops_of("recurrent")])
def test_shapes_in_csrc_are_those_of_meta(op):
    """Comments on the parameters of an op's check show the shape of each tensor, and which tensors are written."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "csrc").glob("*.h")))
    check = re.search(rf"NWOR_(?:BINDABLE_)?OP\(m, {op}, (\w+)\)", source)[1]
    parameters = re.search(rf"\b{check}\(\s*const char\* op,(.*?)\) {{\n", source, re.DOTALL)[1]
    notes = dict(re.findall(r"(\w+),?\s*// (.+)", parameters))
    for argument in overload(op)._schema.arguments:
        spec = SPECS[op].get(argument.name)
        if spec is None or not spec.dims:
            continue
        note = notes.pop(argument.name)
        assert {len(shape.split(",")) if shape else 0 for shape in re.findall(r"\[(.*?)\]", note)} == set(spec.dims), (
            note
        )
        assert note.endswith("written") == (argument.alias_info is not None), note
    assert set(notes) <= {"k_scale", "v_scale", "plane_table"}


@pytest.mark.parametrize("op", OPS)
def test_opcheck(device, op):
    """All utilities: schema, autograd registration, fake tensor, AOT dispatch with dynamic shapes."""
    for arguments in samples.calls(op, 4, device):
        utilities = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
        if any(isinstance(a, torch.Tensor) and "float8" in str(a.dtype) for a in tree_leaves(arguments)):
            utilities.remove("test_schema")  # it cannot compare tensors of these dtypes
        torch.library.opcheck(overload(op), arguments, test_utils=utilities)


def elements(argument) -> list[torch.Tensor]:
    """Return the bytes of the elements of each tensor, without those between them."""
    tensors = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
    return [torch.cat([tensor.flatten()]).view(torch.uint8) for tensor in tensors]


# Mutated arguments that a call with valid data leaves as they were.
NOT_WRITTEN = {
    ("gumbel_sample", "workspace"),  # it is 0 again after the call
    ("plan_recurrent_window", "num_skipped"),  # counts what CUDA leaves out of invalid data
    ("plan_recurrent_block_fold", "num_skipped"),
}


@pytest.mark.parametrize("op", OPS)
def test_exactly_declared_arguments_are_written(device, op):
    """No check of torch finds an argument that is declared as mutated and never written."""
    written = set()
    declared = overload(op)._schema.arguments
    for arguments in samples.calls(op, 60, device):
        before = twin(arguments)
        getattr(ops, op)(*arguments)
        for argument, now, then in zip(declared, arguments, before, strict=False):
            if now is not None and not all(map(torch.equal, elements(now), elements(then))):
                written.add(argument.name)
        assert only_declared_changed(op, arguments, before)
    mutated = {argument.name for argument in declared if argument.alias_info is not None}
    assert written == mutated - {argument for of, argument in NOT_WRITTEN if of == op}


@pytest.mark.parametrize("op", OPS)
def test_meta(op):
    """Every op runs on `device="meta"` and returns the right shapes and dtypes."""
    for arguments in samples.calls(op, 4):
        result = getattr(ops, op)(*twin(arguments, "meta"))
        expected = getattr(ops, op)(*arguments)
        if op in RETURNING:
            assert [(r.device.type, r.dtype, r.shape) for r in result] == [("meta", e.dtype, e.shape) for e in expected]
        else:
            assert result is None
