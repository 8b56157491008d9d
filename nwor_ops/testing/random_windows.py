"""Random windows of every family of ops, compared with the oracles in all memory.

A window is a chain of :mod:`sample calls <nwor_ops.testing.samples>`. Each call runs on the device, and its oracle runs
on the CPU. The next call continues from the oracle's result, so the first difference is in the op that is named.

Example:
    >>> from nwor_ops.testing.random_windows import run_round
    >>> sorted(run_round(7, "cpu"))[:2]  # the ops of this round, and the number of their calls
    ['acceptance_mask', 'acceptance_mask_from_rejected']
"""

from __future__ import annotations

from collections import Counter

from nwor_ops.testing.against_oracle import compare_with_oracle
from nwor_ops.testing.samples import FAMILIES
from nwor_ops.testing.samples.dice import Dice


def run_round(seed: int, device: str) -> Counter[str]:
    """Compare a random window of each family with the oracles, and return the number of calls of each op.

    Raises:
        Mismatch: an op and its oracle differ.
        Exception: an op refused its arguments. Its message names the op.
    """
    counts: Counter[str] = Counter()
    for family in FAMILIES:
        counts += run_window(family, seed, device)
    return counts


def run_window(family: str, seed: int, device: str, num_requests: int | None = None) -> Counter[str]:
    """Compare a random window of one family with the oracles. See :func:`run_round` and :class:`Dice`."""
    window, counts, after = FAMILIES[family](Dice(family, seed, 0, num_requests)), Counter[str](), None
    while True:
        try:
            call = next(window) if after is None else window.send(after)
        except StopIteration:
            return counts
        counts[call.op] += 1
        _, after = compare_with_oracle(call.op, call.arguments, device, call.tolerances)
