"""Compare the device's counts on ``/metrics`` with those of vLLM's scheduler, which counts token ids on the host."""

from __future__ import annotations

from collections.abc import Mapping


def check_agreement(metrics: Mapping[str, float], aborted: int = 0, drafts: int = 0) -> None:
    """Check that both counted the same drafts and accepted drafts, in an engine whose every step was a transaction.

    Args:
        metrics: samples of an engine at rest, by name.
        aborted: number of requests that may have ended while a step ran: aborted, or stopped in the previous step with
            async scheduling. The scheduler does not count the drafts of that step.
        drafts: maximum number of drafts of a request in a step.
    """

    def total(name: str) -> float:
        return metrics.get(f"{name}_total", metrics.get(name, 0))

    drafted, accepted = total("nwor_draft_tokens"), total("nwor_committed_tokens")
    assert drafted > 0
    assert drafted == accepted + total("nwor_rejected_tokens")
    assert 0 <= drafted - total("vllm:spec_decode_num_draft_tokens") <= aborted * drafts
    assert 0 <= accepted - total("vllm:spec_decode_num_accepted_tokens") <= aborted * drafts
    for name in ("nwor_abandoned_windows", "nwor_vanilla_steps", "nwor_errors"):
        assert total(name) == 0, name
