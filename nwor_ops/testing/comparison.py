"""Messages of the self-tests."""

from __future__ import annotations

import torch
from torch import Tensor


def difference(**pairs: tuple[Tensor, object]) -> str | None:
    """Return a sentence about the first result that differs from the expected one, or None if all are equal."""
    for name, (result, expected) in pairs.items():
        wanted = torch.as_tensor(expected, dtype=result.dtype, device=result.device)
        if result.shape != wanted.shape or not torch.equal(result, wanted):
            return f"{name} has a wrong value; run nwor-ops verify and attach its archive to a bug report"
    return None
