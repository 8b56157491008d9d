"""Every op of the library: declared, typed and documented as one function, in the file of its family.

The kernels of a family are in ``csrc/cpu/FAMILY.cpp`` and ``csrc/cuda/FAMILY.cu``. The fakes check arguments by the
table in ``meta/arguments.py``.

``torch.ops.nwor.NAME`` and the function of the same name take the same arguments in the same order. The function adds
three things:

- It refuses tensors that require a gradient or have a tangent. The ops have no derivatives, and an in-place op without
  one would silently corrupt a backward pass.
- It raises ``TypeError`` for a wrong dtype or device. The dispatcher can raise only ``ValueError``.
- It raises ``TypeError`` for an option that is neither True nor False. The dispatcher takes the truth value of None and
  of numbers.

Shapes use these letters. A batch has T tokens of this step, Q requests and R log rows. A cache has G groups of layers,
B blocks, N slots per block (the block size), H KV heads and D as the head size. W is the width of a plane.

A *cache* is always the logical view ``[B, N, H, W]`` with any strides. NHD, HND, K and V packed in one row, one backing
buffer for all layers, and MLA latents (H = 1) are all such views. A *slot* is ``block * N + offset``, as in vLLM. An op
returns nothing unless its documentation says so.

Every op raises ``ValueError`` for an invalid shape, stride or option, or for mutated memory that overlaps another
argument. It raises ``TypeError`` for a wrong dtype or device, and ``RuntimeError`` for a tensor that requires a
gradient, or if the library for a device is missing. On the CPU, invalid indices, counts and starts raise ``IndexError``
or ``ValueError`` before anything is written. CUDA leaves out their rows; with ``VLLM_NWOR_DEBUG_SYNC=1`` the call then
raises. Docstrings name only what a caller needs beyond that.
"""

from nwor_ops.ops import accept, drafter, recurrent, shadow, staging, undo
from nwor_ops.ops.accept import *  # noqa: F403
from nwor_ops.ops.drafter import *  # noqa: F403
from nwor_ops.ops.recurrent import *  # noqa: F403
from nwor_ops.ops.shadow import *  # noqa: F403
from nwor_ops.ops.staging import *  # noqa: F403
from nwor_ops.ops.undo import *  # noqa: F403

__all__: list[str] = []
__all__ += accept.__all__
__all__ += drafter.__all__
__all__ += recurrent.__all__
__all__ += shadow.__all__
__all__ += staging.__all__
__all__ += undo.__all__
