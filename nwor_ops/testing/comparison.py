"""What a self-test says about a result that is not what it should be."""

from __future__ import annotations

import torch
from torch import Tensor


def difference(**pairs: tuple[Tensor, object]) -> str | None:
    """A sentence about the first result that is not what was expected; None where all are."""
    for name, (result, expected) in pairs.items():
        wanted = torch.as_tensor(expected, dtype=result.dtype, device=result.device)
        if result.shape != wanted.shape or not torch.equal(result, wanted):
            return f"{name} is not what it should be; run the test suite (pytest tests) and report it"
    return None
