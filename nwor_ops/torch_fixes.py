"""Defects of torch.compile by which a mutated view is written elsewhere, in silence, and what is done about them.

Two concern a graph input that does not start its storage, and a view of it that an op mutates. They are not of these
ops: any mutating custom op meets them. Here they would write over a neighbour's cache.

- *Slices* (every release up to 2.15). ``try_use_slice`` takes the offset of the view in its storage for its offset in
  the graph input. Corrected by leaving such views to ``as_strided``, which names a place in the storage.
- *as_strided* (2.11 and 2.12; mended in 2.13). Inductor adds that place to the address of the graph input, which has
  the input's own offset in it already. Corrected as 2.13 does: the input's offset is taken off.

A third one cannot be corrected here: of a view that is mutated Inductor forgets an offset that is a symbol
(pytorch/pytorch#198068), so with ``dynamic=True`` every layer would log into the rows of the first. What is traced for
an object of this library has no such symbols: its tensors go through :func:`static`, its numbers through
:func:`static_int`.

A torch that does right is left alone. What others compile in the same process changes in this alone: what was written
to a wrong place is written to the right one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def static(tensor: Tensor) -> Tensor:
    """The tensor, with sizes that are numbers in a trace, also in one with ``dynamic=True``."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.mark_static(tensor)
    return tensor


def static_int(value: int) -> int:
    """The number, as itself in a trace: an attribute of an object may be a symbol there."""
    return operator.index(value)


def correct_slices() -> None:
    """Cheap: torch has imported that module already."""
    from torch._higher_order_ops import auto_functionalize

    try_use_slice = getattr(auto_functionalize, "try_use_slice", None)
    if try_use_slice is None or not _takes_offsets_as_places(try_use_slice):
        return

    @functools.wraps(try_use_slice)
    def slice_of_whole_storage(base: Tensor, tensor: Tensor) -> Any:
        offset = base.storage_offset()
        return try_use_slice(base, tensor) if isinstance(offset, int) and offset == 0 else None

    auto_functionalize.try_use_slice = slice_of_whole_storage


def _takes_offsets_as_places(try_use_slice: Callable[..., Any]) -> bool:
    base = torch.empty(6, device="meta")[2:]
    return try_use_slice(base, base[1:3]) == (0, 3, 5)


def before_lowering(fake: _Function) -> _Function:
    """A fake that corrects ``as_strided`` when it first runs: before Inductor lowers what was traced with it, and not
    before the first compilation, since importing Inductor takes seconds."""
    if torch.torch_version.TorchVersion(torch.__version__) >= "2.13":
        return fake

    @functools.wraps(fake)
    def with_correction(*arguments: Any, **options: Any) -> Any:
        correct_as_strided()
        return fake(*arguments, **options)

    return cast("_Function", with_correction)


@functools.cache
def correct_as_strided() -> None:
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    as_strided = torch.ops.aten.as_strided.default
    lower = lowering.lowerings[as_strided]

    def offset_of_input(x: Any) -> Any:
        data = x.data if isinstance(x, ir.TensorBox) else x
        if isinstance(data, ir.BaseView):
            data = data.unwrap_view()
        if isinstance(data, ir.StorageBox):
            data = data.data
        if not isinstance(data, ir.InputBuffer):
            return 0
        name = data.get_name()
        graph: Any = V.graph
        for node in graph.module.graph.nodes:
            if node.op == "placeholder" and graph.qualify_name(node.target) == name:
                return node.meta["val"].storage_offset()
        return 0

    @functools.wraps(lower)
    def within_input(x: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        if storage_offset is not None:
            offset = offset_of_input(x)
            storage_offset = storage_offset - (offset.node.expr if isinstance(offset, torch.SymInt) else offset)
        return lower(x, size, stride, storage_offset)

    lowering.lowerings[as_strided] = within_input
