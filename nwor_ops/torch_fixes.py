"""Fixes for torch.compile defects that silently write a mutated view to a wrong place.

Two defects concern a graph input that does not start its storage, if an op mutates a view of it. They affect any
mutating custom op. Here they would overwrite a neighbouring cache.

- *Slices* (every release up to 2.15). ``try_use_slice`` takes the offset of the view in its storage for its offset in
  the graph input. Fix: such views use ``as_strided``, which names a place in the storage.
- *as_strided* (2.11 and 2.12; fixed in 2.13). Inductor adds that place to the address of the graph input, which already
  includes the input's own offset. Fix, as in 2.13: subtract the input's offset.

A third defect is not fixed here. For a mutated view, Inductor loses an offset that is a symbol
(pytorch/pytorch#198068). With ``dynamic=True`` every layer would log into the rows of the first. Traces of this library
have no such symbols: its tensors go through :func:`static`, and its numbers through :func:`static_int`.

A torch version without a defect is not changed. For other code compiled in the same process, the only difference is
that such writes go to the right place.
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
    """Return the tensor, marked so that its sizes are constants in a trace, even with ``dynamic=True``."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.mark_static(tensor)
    return tensor


def static_int(value: int) -> int:
    """Return the integer as a constant in a trace, where an attribute of an object may be a symbol."""
    return operator.index(value)


def correct_slices() -> None:
    """Install the fix for slices if this torch needs it. It is cheap, since torch has imported the module already."""
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
    """Return a fake that installs the ``as_strided`` fix when it first runs.

    This is early enough, since Inductor lowers a graph after tracing it. It is not done at import, because importing
    Inductor takes seconds.
    """
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
