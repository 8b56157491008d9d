"""How much of the pages that windows begin in is copied to shadow pages, and how much these hold already."""

from __future__ import annotations

from typing import Any


class CopiedRows:
    """Of all windows since it was put around a manager, rows of one layer of each group.

    Attributes:
        copied: rows that open_window copied.
        committed: rows before the step's tokens in the pages that its drafts begin in: as many would be copied if
            nothing were held.
    """

    def __init__(self, pages: Any) -> None:
        self.copied = self.committed = 0
        self._pages, self._open = pages, pages.open
        pages.open = self._counting

    def _counting(self, window: Any, redirects: Any) -> None:
        pages, held = self._pages, self._pages.held_slots.tolist()
        self._open(window, redirects)
        requests = window.num_requests
        states = range(requests) if window.request_states is None else window.request_states[:requests].tolist()
        starts = window.query_start_loc.tolist()
        for group, (tails, saved) in enumerate(zip(pages.tail_pages.tolist(), pages.saved_slots.tolist(), strict=True)):
            size = pages.launches[0].planes.views[0].shape[1]
            for request in range(requests):
                if tails[request] < 0:
                    continue
                # A token before the tail page was not redirected, and what is saved for it is an older window's.
                drafts = pages._buffers.draft_starts[request : request + 2].diff().item()
                first_draft = saved[starts[request + 1] - drafts]
                given = starts[request + 1] - drafts - starts[request]
                page, offset = divmod(first_draft, size)
                rows = max(0, offset - given)
                last = held[group][states[request]][tails[request] % len(held[group][0])]
                there = last % size + 1 if window.request_states is not None and last // size == page else 0
                self.committed += rows
                self.copied += max(0, rows - there)


def copied_rows(manager: Any) -> CopiedRows:
    """Begin to count."""
    return CopiedRows(manager.recovery)
