"""Fake implementations: what each op does to shapes, for ``torch.compile``, FakeTensor and ``device="meta"``.

One module per family, as everywhere. A fake of an op without a result has nothing to compute; it
still must exist (a missing one shows only when the op is traced) and it still checks what can be
checked without data, so that a wrong model fails while it is traced.
"""

from nwor_ops.meta import accept, drafter, shadow, staging, undo

__all__ = ["accept", "drafter", "shadow", "staging", "undo"]
