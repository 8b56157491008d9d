"""The memory order of the undo log."""

from __future__ import annotations

import pytest
import torch

from nwor_ops import Plane
from nwor_ops.transaction.undo_log import _new_log


@pytest.mark.parametrize("slots_are_adjacent", [False, True])
def test_log_rows_are_adjacent_if_slots_are(slots_are_adjacent: bool) -> None:
    """One access then moves several rows."""
    pages = torch.ones(3, 2, 8, 4) if slots_are_adjacent else torch.ones(3, 4, 2, 8)
    plane = Plane(pages.permute(0, 3, 1, 2) if slots_are_adjacent else pages)  # 3 blocks of 4 slots, 2 heads of 8
    log = _new_log(plane, layers=2, rows=5)
    assert (log.shape, log.dtype, log.count_nonzero()) == ((2, 5, 2, 8), plane.view.dtype, 0)
    assert log.stride() == ((80, 1, 40, 5) if slots_are_adjacent else (80, 16, 8, 1))
