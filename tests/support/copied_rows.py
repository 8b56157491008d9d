"""How many rows the windows of mode "stage" copy to shadow pages, and how many they hold already."""

from __future__ import annotations

from typing import Any


class CopiedRows:
    """Counts rows of one layer of each group, in all later windows of a manager.

    Attributes:
        copied: rows that open_window copied.
        committed: rows before the step's tokens, in the pages in which its drafts begin. This many rows would be copied
            if shadow pages held none.
    """

    def __init__(self, manager: Any) -> None:
        self.copied = self.committed = 0
        self._manager = manager
        self._pages = pages = manager.recovery
        self._block_sizes = {
            group: launch.planes.views[0].shape[1]
            for launch in pages.launches
            for group in range(launch.groups.start, launch.groups.stop)
        }
        self._begin, manager.begin = manager.begin, self._counting

    def as_dict(self) -> dict[str, int]:
        return {"copied": self.copied, "committed": self.committed}

    def _counting(self, window: Any) -> None:
        pages = self._pages
        held = pages.held_slots.tolist()
        self._begin(window)
        requests = self._manager._num_requests(window)
        states = range(requests) if window.request_states is None else window.request_states[:requests].tolist()
        starts, draft_starts = window.query_start_loc.tolist(), pages._buffers.draft_start_loc.tolist()
        tails, saved = pages.tail_pages.tolist(), pages.saved_slots.tolist()
        for group, size in self._block_sizes.items():
            for request in range(requests):
                tail = tails[group][request]
                if tail < 0:
                    continue
                first_draft = starts[request + 1] - (draft_starts[request + 1] - draft_starts[request])
                page, offset = divmod(saved[group][first_draft], size)
                rows = max(0, offset - (first_draft - starts[request]))
                there = 0
                if window.request_states is not None:
                    of_state = held[group][states[request]]
                    held_page, last = divmod(of_state[tail % len(of_state)], size)
                    there = last + 1 if held_page == page else 0
                self.committed += rows
                self.copied += max(0, rows - there)
