"""The metrics: names and help texts for Prometheus. docs/reference/metrics.md describes them."""

from __future__ import annotations

# Field of EngineStats: Prometheus name (without the suffix "_total") and help text.
METRICS = {
    "windows": ("nwor_windows", "Number of steps with drafts that ran as a transaction."),
    "drafted": ("nwor_draft_tokens", "Number of draft tokens in these steps, logged (mode cow) or staged."),
    "accepted": ("nwor_committed_tokens", "Number of draft tokens accepted and kept."),
    "rejected": ("nwor_rejected_tokens", "Number of draft tokens rejected or cancelled: undone, or never written."),
    "cancelled": ("nwor_cancelled_windows", "Number of windows whose drafts were all undone because the step failed."),
    "abandoned": ("nwor_abandoned_windows", "Number of windows that ended without an undo, leaving rows of drafts."),
    "vanilla_steps": ("nwor_vanilla_steps", "Number of steps with drafts that ran without the transaction, by reason."),
    "draft_graph_replays": ("nwor_draft_graph_replays", "Number of draft model passes that ran as one graph launch."),
    "draft_eager_reasons": (
        "nwor_draft_eager_passes",
        "Number of draft model passes that ran without a graph, with draft graphs on, by reason.",
    ),
    "recurrent_steps": ("nwor_recurrent_steps", "Number of steps with decodes and one recurrent state per request."),
    "recurrent_skipped_requests": (
        "nwor_recurrent_skipped_requests",
        "Number of requests skipped because their counts are invalid, per KV-cache group. Should be 0.",
    ),
    "draft_vocabulary_tokens": (
        "nwor_draft_vocabulary_tokens",
        "Number of tokens that the target sampled, with a draft vocabulary.",
    ),
    "draft_vocabulary_missed": (
        "nwor_draft_vocabulary_missed",
        "Number of these tokens that were outside the draft vocabulary, so that no drafter could propose them.",
    ),
    "errors": ("nwor_errors", "Number of errors of nwor_ops after which the engine went on, by reason. Should be 0."),
}
BY_REASON = ("vanilla_steps", "draft_eager_reasons", "errors")  # with the label "reason"
# Gauges.
INFO = (
    "nwor_info",
    "State of each feature of nwor_ops: off; on, its mode or its form; or missing (asked for, but not active).",
)
MEMORY = ("nwor_memory_bytes", "Memory of the features of nwor_ops in bytes, by part.")


def by_reason(name: str, reasons: dict[str, int]) -> dict[str, int]:
    """Return counts of one metric of :data:`BY_REASON` as :class:`Publisher` takes them: ``NAME:REASON``."""
    return {f"{name}:{reason}": count for reason, count in reasons.items()}
