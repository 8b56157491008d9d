"""The metrics of an engine after its last step: our counters arrive up to a second later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

QUIET_SECONDS = 2.0
_POLL_SECONDS = 0.2


async def metrics_at_rest(read: Callable[[], Awaitable[dict[str, float]]]) -> dict[str, float]:
    """Return the samples after no request runs and our counters have not changed for two seconds."""
    last: dict[str, float] | None = None
    since = time.monotonic()
    while last is None or time.monotonic() - since < QUIET_SECONDS:
        now = await read()
        ours = {name: value for name, value in now.items() if name.startswith(("nwor_", "vllm:spec_decode"))}
        if ours != last or now["vllm:num_requests_running"] or now["vllm:num_requests_waiting"]:
            last, since = ours, time.monotonic()
        await asyncio.sleep(_POLL_SECONDS)
    return await read()
