"""Compare the runs of ``nwor-ops bench``: what the ratios prove, as a table, JSON and sentences."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nwor_ops.cli.report import GOOD, NOTE, Report, counted

VANILLA, OURS = "vanilla", "nwor"
SIDES = (VANILLA, OURS)
CONFIDENCE = 0.95
# Output tok/s are proportional to the tokens of a step, so a difference in these looks like a gain or a loss.
ACCEPTANCE_TOLERANCE = 0.02


class Finding(str, enum.Enum):
    """What the runs of one load say."""

    FASTER = "faster"
    SLOWER = "slower"
    NOISE = "no difference can be told from noise"
    TOO_FEW_ROUNDS = "too few rounds"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True)
class Run:
    """One run of the client: ``prompts`` requests, a constant number of them at a time.

    Attributes:
        tok_s: output tokens per second.
        ttft_ms: median time to the first token.
        tpot_ms: median time per further token.
        drafts: how often a request's drafts were verified.
        accepted: accepted draft tokens.
    """

    prompts: int
    seconds: float
    tok_s: float
    ttft_ms: float
    tpot_ms: float
    output_tokens: int
    drafts: int
    accepted: int


@dataclass(frozen=True)
class Load:
    """The runs of both sides with one number of requests at a time.

    Attributes:
        requests: how many run at a time.
        runs: by side. Runs at the same place belong to one round.
        same_drafts: whether both sides propose the same drafts. If not, their acceptance is part of the result.
    """

    requests: int
    runs: Mapping[str, Sequence[Run]]
    same_drafts: bool = True

    def tokens_per_step(self, side: str) -> float | None:
        """Return the tokens of a request's decode step over a side's runs, or None if no draft was verified.

        A step gives the accepted drafts and one more token, so the other tokens are as many as the steps.
        """
        tokens, accepted, drafts = (
            sum(getattr(run, name) for run in self.runs[side]) for name in ("output_tokens", "accepted", "drafts")
        )
        return tokens / (tokens - accepted) if drafts else None

    @property
    def obstacle(self) -> str | None:
        """Why the sides cannot be compared, or None."""
        vanilla, ours = map(self.tokens_per_step, SIDES)
        if vanilla is None and ours is None:
            return "no draft was verified; this traffic or method makes none"
        if vanilla is None or ours is None:
            return f"{VANILLA if vanilla is None else OURS} verified no draft"
        if not self.same_drafts or abs(vanilla / ours - 1) <= ACCEPTANCE_TOLERANCE:
            return None
        limit = f"{100 * ACCEPTANCE_TOLERANCE:.0f} %"
        return f"{vanilla:.2f} (vanilla) and {ours:.2f} tokens per step differ by more than {limit}"

    @property
    def ratios(self) -> list[float]:
        """Our output tok/s over vanilla's, by round."""
        return [ours.tok_s / vanilla.tok_s for vanilla, ours in zip(*(self.runs[side] for side in SIDES), strict=True)]

    @property
    def interval(self) -> tuple[float, float] | None:
        return interval_of_median(self.ratios)

    @property
    def finding(self) -> Finding:
        if self.obstacle is not None:
            return Finding.NOT_COMPARABLE
        if self.interval is None:
            return Finding.TOO_FEW_ROUNDS
        low, high = self.interval
        return Finding.FASTER if low > 1 else Finding.SLOWER if high < 1 else Finding.NOISE

    @property
    def ratio(self) -> str:
        """The median with its interval, or the reason why there is none, for output."""
        if self.obstacle is not None:
            return "-"
        median = f"{statistics.median(self.ratios):.3f}"
        return median if self.interval is None else f"{median} ({self.interval[0]:.3f} to {self.interval[1]:.3f})"

    def median(self, side: str, name: str) -> float:
        """Return the median of a field of :class:`Run` over a side's runs."""
        return statistics.median(getattr(run, name) for run in self.runs[side])


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Return an interval that contains the median with a probability of at least 95 %, whatever the distribution.

    It lies between the k-th smallest and the k-th largest value. The median is outside if fewer than k of n values are
    on one side of it. This probability is that of fewer than k heads in n tosses of a coin.

    Returns:
        None: there are fewer than six values, so k would be 0.
    """
    count, below = len(values), 0.0
    for k in range(count + 1):
        below += 2 * math.comb(count, k) / 2**count
        if below > 1 - CONFIDENCE:
            break
    ordered = sorted(values)
    return (ordered[k - 1], ordered[-k]) if k else None


# ---------------------------------------------------------------- output


def as_dict(load: Load) -> dict[str, Any]:
    """Return a load as JSON values. The ratio is missing if the sides cannot be compared."""
    ratio = None
    if load.obstacle is None:
        low, high = load.interval or (None, None)
        ratio = {"median": statistics.median(load.ratios), "rounds": load.ratios, "low": low, "high": high}
    return {
        "requests": load.requests,
        "finding": load.finding.value,
        "obstacle": load.obstacle,
        "ratio": ratio,
        "acceptance": {side: load.tokens_per_step(side) for side in SIDES},
        "runs": {side: [asdict(run) for run in load.runs[side]] for side in SIDES},
    }


def sentence(load: Load) -> str:
    """Return the result of a load as a sentence."""
    at = f"{counted(load.requests, 'request')} at a time: {load.finding.value}"
    if load.obstacle is not None:
        return f"{at}: {load.obstacle}"
    more = f", {len(load.ratios)} of at least 6" if load.interval is None else ""
    return f"{at}{more}: {load.ratio} times vanilla's output tok/s"


def print_loads(report: Report, feature: str, loads: Sequence[Load]) -> None:
    """Print a table of both sides, and a sentence for each load."""
    rows = [("requests", "", "output tok/s", "first token", "further", "tokens per step", "ratio (95 %)")]
    for load in loads:
        for side in SIDES:
            tokens = load.tokens_per_step(side)
            rows.append((
                f"{load.requests:,}" if side == VANILLA else "",
                VANILLA if side == VANILLA else feature,
                f"{load.median(side, 'tok_s'):,.1f}",
                f"{load.median(side, 'ttft_ms'):,.1f} ms",
                f"{load.median(side, 'tpot_ms'):,.2f} ms",
                "-" if tokens is None else f"{tokens:.2f}",
                "" if side == VANILLA else load.ratio,
            ))  # fmt: skip
    report.table(rows, left=2)
    report.line("")
    for load in loads:
        report.line(sentence(load), style=GOOD if load.finding is Finding.FASTER else "bold")
    if any(load.finding is Finding.NOT_COMPARABLE for load in loads):
        report.line("longer runs (--seconds) or other prompts may make the acceptance equal", "note", NOTE)
