"""Test planes passed as a table (``plane_table``): the result equals a call with all planes in ``caches``."""

from __future__ import annotations

import bad_input
import oracle_checks
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nwor_ops import ops
from nwor_ops.ops import registry
from nwor_ops.testing import layouts, samples
from nwor_ops.testing.layouts import Shape
from nwor_ops.testing.samples import argument_names, with_arguments

OPS = ("restore_slots", "restore_slots_from_rejected", "open_window", "close_window", "close_window_from_rejected")


def with_table(op, arguments, **others):
    """The same call with only the first plane and a table of all planes."""
    table = ops.plane_table(arguments[0])
    return with_arguments(op, arguments, **{"caches": arguments[0][:1], "plane_table": table, **others})


def call_of(op, device="cpu"):
    def with_planes(caches, **_):
        return len({cache.data_ptr() for cache in caches}) == len(caches) > 1

    return bad_input.call_with(op, "caches", device=device, where=with_planes)


@pytest.mark.parametrize("op", OPS)
def test_same_bytes_as_with_all_planes(device, op):
    for all_planes in samples.calls(op, 12, device):
        by_table = layouts.twin(all_planes)
        getattr(ops, op)(*with_table(op, by_table))
        getattr(ops, op)(*all_planes)
        assert layouts.same_memory(by_table, all_planes)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_a_table_on_the_device_is_refused(device, op):
    arguments = call_of(op, device)
    table = ops.plane_table(arguments[0]).to(device)
    oracle_checks.refuse(
        op, with_table(op, arguments, plane_table=table), TypeError, "plane_table must be on device cpu, got cuda:0$"
    )


def test_a_table_holds_addresses_and_room():
    storage = torch.zeros(1000, dtype=torch.int16)
    planes = [storage[start : start + 64].view(2, 4, 2, 4) for start in (7, 500)]
    table = ops.plane_table(planes)
    assert (table.dtype, table.device.type) == (torch.int64, "cpu")
    assert table.tolist() == [
        [plane.data_ptr(), 2 * (1000 - start)] for plane, start in zip(planes, (7, 500), strict=True)
    ]


@pytest.mark.parametrize(
    ("second", "error", "sentence"),
    [
        (lambda p: p.float(), TypeError, r"caches\[1\] must have dtype torch.bfloat16, got torch.float32$"),
        (lambda p: p.to("meta"), TypeError, r"caches\[1\] must be on device cpu, got meta$"),
        (lambda p: p[:1], ValueError, r"caches\[1\] must be of the shape and strides of caches\[0\]"),
        (lambda p: p.transpose(0, 1), ValueError, r"caches\[1\] must be of the shape and strides of caches\[0\]"),
    ],
)
def test_planes_of_another_geometry(second, error, sentence):
    plane = torch.zeros(2, 2, 2, 4, dtype=torch.bfloat16)
    with pytest.raises(error, match=f"^plane_table: {sentence}"):
        ops.plane_table([plane, second(plane)])


def test_planes_that_kernels_cannot_use():
    """The table hides them from the checks of the ops that get it."""
    plane = torch.zeros(2, 2, 2, 4)
    for wrong, error, sentence in (
        (torch._neg_view(plane), ValueError, "have its own memory, got a negative view; pass a copy$"),
        (torch._efficientzerotensor(2, 2, 2, 4), ValueError, "have its own memory, got a zero without memory"),
        (torch.zeros(2, 2, 2, 4, requires_grad=True), RuntimeError, "not require a gradient, the op has no backward"),
    ):
        with pytest.raises(error, match=rf"^plane_table: caches\[1\] must {sentence}"):
            ops.plane_table([plane, wrong])


def test_no_planes():
    with pytest.raises(ValueError, match=r"^plane_table: caches must hold at least one plane, got none$"):
        ops.plane_table([])


WRONG = [
    (lambda caches, table: {"plane_table": table.int()}, TypeError, "plane_table must have dtype torch.int64"),
    (lambda caches, table: {"plane_table": table[:, :1]}, ValueError, r"plane_table must be \[>= 1 planes, 2\]"),
    (lambda caches, table: {"plane_table": table[:0]}, ValueError, r"plane_table must be \[>= 1 planes, 2\]"),
    (lambda caches, table: {"plane_table": table.T.contiguous().T}, ValueError, "plane_table must be contiguous"),
    (lambda caches, table: {"caches": caches}, ValueError, "caches must hold only the first plane .*, got 2$"),
    (lambda caches, table: {"caches": caches[1:]}, ValueError, "plane_table must be of planes that begin with caches"),
]  # fmt: skip


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("change", "error", "sentence"), WRONG)
def test_wrong_tables(op, change, error, sentence):
    arguments = call_of(op)
    changed = change(arguments[0], ops.plane_table(arguments[0]))
    oracle_checks.refuse(op, with_table(op, arguments, **changed), error, sentence)


@pytest.mark.parametrize("op", OPS)
def test_planes_that_are_smaller_than_the_first_one(op):
    """With a view of more blocks at the same address, the op would write past the end of the other planes."""
    arguments = call_of(op)
    more = arguments[0][0].new_zeros((arguments[0][0].shape[0] + 5, *arguments[0][0].shape[1:]))
    less = torch.zeros_like(more[:-1])
    table = ops.plane_table([more[:-1], less])
    bytes_of = more.numel() * more.element_size()
    sentence = rf"planes as large as caches\[0\], {bytes_of} bytes, got {bytes_of - more[0].nbytes} for plane 1$"
    oracle_checks.refuse(op, with_arguments(op, arguments, caches=[more], plane_table=table), ValueError, sentence)


def test_the_plane_with_the_least_room_limits_page_offsets():
    """It may be another plane than the first. Offsets that fit the first plane may exceed the storage of another."""
    pages = layouts.make_amx_pages(Shape(2, 16, 2, 16, 16, layers=2), torch.bfloat16)
    planes, offsets = pages.value_caches, pages.value_offsets
    assert offsets is not None
    size, strides = planes[0].shape, planes[0].stride()
    roomy, exact = (
        torch.zeros(elements, dtype=torch.bfloat16).as_strided(size, strides)
        for elements in (4 * planes[0].untyped_storage().nbytes(), (size[0] - 1) * strides[0] + strides[0])
    )
    table = offsets.clone()
    table[15, 15] = int(offsets.max()) + strides[0]
    log = torch.zeros(2, 1, 2, 16, dtype=torch.bfloat16)
    for caches in ([roomy, exact], [exact, roomy]):
        arguments = (caches, log, torch.tensor([31]), torch.ones(1, dtype=torch.bool), table)
        oracle_checks.refuse(
            "restore_slots", with_table("restore_slots", arguments), IndexError, "page_offsets must lie within"
        )


@pytest.mark.parametrize("op", OPS)
def test_a_trace_refuses_it(op):
    """A trace could not see that the other planes are mutated, and would reorder their readers."""
    arguments = call_of(op)
    table = ops.plane_table(arguments[0])
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=f"^{op}: plane_table hides"):
        getattr(torch.ops.nwor, op).default(*with_arguments(op, arguments, plane_table=table))


def test_every_op_of_a_step_that_takes_planes_is_covered():
    takes = {op for op in registry.OPS if "plane_table" in argument_names(op)}
    assert takes == set(OPS)
