"""Shadow pages: the pages that a window's drafts are written to in mode ``"stage"``.

The last pages of each group's caches belong to no request; the engine withholds them from its allocator. While a window
is open, slots and block tables name them in place of the pages that drafts touch; see
:func:`nwor_ops.open_window`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import Plane, PlaneList
from nwor_ops.ops.shadow import MOST_GROUPS
from nwor_ops.transaction.window import Window, WindowBuffers
from nwor_ops.validation import BoundToMemory

# Slot mappings and block tables that a launch changes and puts back; none where another launch of its groups does.
LaunchTables = tuple[list[Tensor], list[Tensor]]


def num_shadow_blocks(max_num_requests: int, max_drafts_per_request: int, block_size: int) -> int:
    """How many pages of each group an engine has to withhold for mode ``"stage"``.

    Args:
        max_num_requests: most requests in one batch.
        max_drafts_per_request: most drafts of one request.
        block_size: slots in a page; with several groups, the smallest.

    Raises:
        ValueError, TypeError: a number that is no integer above 0.
    """
    for name, value in (
        ("max_num_requests", max_num_requests),
        ("max_drafts_per_request", max_drafts_per_request),
        ("block_size", block_size),
    ):
        validation.integer(f"num_shadow_blocks: {name}", value)
    return max_num_requests * shadow_pages_per_request(max_drafts_per_request, block_size)


def shadow_pages_per_request(max_drafts_per_request: int, block_size: int) -> int:
    """Pages that the drafts of one request can touch: the first may lie in the last row of a page."""
    return (block_size + max_drafts_per_request - 2) // block_size + 1


@dataclass(frozen=True)
class _Launch:
    """What one call of open_window or close_window takes: the planes of one geometry in consecutive groups."""

    planes: PlaneList
    planes_per_group: list[int]
    groups: slice
    redirects: bool  # whether this call changes the tables of its groups
    page_offsets: Tensor | None


class ShadowPages(BoundToMemory):
    """Opens and closes windows over the planes of some groups.

    Args:
        planes: of each group, in the order of ``WindowBuffers.row_slots``. All planes of a group have the same pages.
        first_blocks: first shadow page of each group, or None where they are its last pages.
        max_num_tokens, max_num_requests, max_drafts_per_request: most of each in one batch.
    """

    def __init__(
        self,
        planes: Mapping[str, Sequence[Plane]],
        first_blocks: Mapping[str, int],
        *,
        max_num_tokens: int,
        max_num_requests: int,
        max_drafts_per_request: int,
        device: torch.device,
    ) -> None:
        self.groups, self._device = list(planes), device
        unknown = sorted(set(first_blocks) - set(planes))
        if unknown:
            raise ValueError(f"allocate: shadow_blocks must name groups of {self.groups}, got {unknown}")
        block_size = min(_pages_of(name, of_group)[1] for name, of_group in planes.items())
        shadows = shadow_pages_per_request(max_drafts_per_request, block_size)
        self.blocks_per_group = max_num_requests * shadows
        ids = [
            self._block_ids(name, _pages_of(name, of_group)[0], first_blocks.get(name))
            for name, of_group in planes.items()
        ]
        _check_shared_memory(planes, {name: int(own[0]) for name, own in zip(planes, ids, strict=True)}, len(ids[0]))
        shape = (len(self.groups), max_num_requests, shadows)
        self.shadow_blocks = torch.stack(ids).view(shape).to(device)
        self.held_slots = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.saved_slots = torch.full((shape[0], max_num_tokens), -1, dtype=torch.int64, device=device)
        self.tail_pages = torch.full(shape[:2], -1, dtype=torch.int32, device=device)
        self.launches = _plan_launches(planes)

    def _block_ids(self, group: str, num_blocks: int, first: int | None) -> Tensor:
        first = num_blocks - self.blocks_per_group if first is None else first
        if first < 0 or first + self.blocks_per_group > num_blocks:
            raise ValueError(
                f"allocate: group {group!r} must have {self.blocks_per_group} shadow pages "
                f"(num_shadow_blocks) from page {first} on, it has {num_blocks} pages"
            )
        return torch.arange(first, first + self.blocks_per_group, dtype=torch.int32)

    def tables(self, window: Window, slot_mappings: list[Tensor]) -> list[LaunchTables]:
        """What each launch will redirect and put back. To be kept while the window is open: ``window`` holds mappings
        that an engine may fill anew. Any exception means that :meth:`check` has something to say."""
        if window.seq_lens is None:
            raise ValueError("begin: window must have seq_lens")
        given: Any = window.block_tables
        block_tables = [given[group] for group in self.groups]
        if len(self.launches) == 1:
            return [(slot_mappings, block_tables)]
        return [
            (slot_mappings[launch.groups], block_tables[launch.groups]) if launch.redirects else ([], [])
            for launch in self.launches
        ]

    def check(self, window: Window) -> None:
        """Raises ValueError or TypeError where a window lacks what staging needs, or has it in another form."""
        if window.seq_lens is None or window.block_tables is None:
            lacking = " and no ".join(name for name in ("seq_lens", "block_tables") if getattr(window, name) is None)
            raise ValueError(f'begin: window must have seq_lens and block_tables in mode "stage", got no {lacking}')
        validation.instance("begin: window.block_tables", window.block_tables, Mapping, "a mapping")
        missing = [group for group in self.groups if group not in window.block_tables]
        if missing:
            raise ValueError(f"begin: window.block_tables must have a table for each group, got none for {missing}")

        def check(name: str, value: object, *dtypes: torch.dtype, dims: int = 1) -> None:
            least = window.num_requests
            validation.tensor(f"begin: window.{name}", value, *dtypes, dims=dims, least=least, device=self._device)

        check("seq_lens", window.seq_lens, torch.int32)
        if window.request_states is not None:
            check("request_states", window.request_states, torch.int32, torch.int64)
        for group in self.groups:
            check(f"block_tables[{group!r}]", window.block_tables[group], torch.int32, dims=2)

    def open(self, window: Window, tables: list[LaunchTables], buffers: WindowBuffers) -> None:
        """Redirect a window that ``plan_window`` has planned. If this raises, slots and tables are as they were."""
        assert window.seq_lens is not None
        try:
            for launch, own_tables in zip(self.launches, tables, strict=True):
                g = launch.groups
                caches, table = launch.planes.arguments()
                ops.open_window(
                    caches, launch.planes_per_group, window.query_start_loc, window.cu_num_draft_tokens,
                    window.seq_lens, buffers.row_slots[g], self.shadow_blocks[g], *own_tables,
                    self.saved_slots[g], self.tail_pages[g], window.request_states, self._held(launch, window),
                    launch.page_offsets, window.num_bonus_tokens, table, window.leading_zero,
                )  # fmt: skip
        except Exception:
            self._put_back(window, tables, buffers)
            raise

    def close(self, window: Window, tables: list[LaunchTables], buffers: WindowBuffers, first: int = 0) -> None:
        """Keep the rows that ``buffers.row_rejected`` does not name; put slots and tables back. Twice is the same as
        once: what is copied and put back stays where it is copied from.

        Args:
            first: the launch to begin with; those before it were made.
        """
        for launch, own_tables in zip(self.launches[first:], tables[first:], strict=True):
            g = launch.groups
            caches, table = launch.planes.arguments()
            ops.close_window(
                caches, launch.planes_per_group, window.query_start_loc, window.cu_num_draft_tokens,
                buffers.row_rejected, self.shadow_blocks[g], self.saved_slots[g], self.tail_pages[g],
                *own_tables, window.request_states, self._held(launch, window), launch.page_offsets,
                window.num_bonus_tokens, table, window.leading_zero,
            )  # fmt: skip

    def judge_and_close(
        self, window: Window, tables: list[LaunchTables], buffers: WindowBuffers, num_rejected: Tensor
    ) -> None:
        """The first launch of :meth:`close`, which finds out by itself what was rejected."""
        launch = self.launches[0]
        g = launch.groups
        caches, table = launch.planes.arguments()
        ops.close_window_from_rejected(
            caches, launch.planes_per_group, window.query_start_loc, window.cu_num_draft_tokens,
            num_rejected, buffers.row_rejected, buffers.num_accepted, buffers.counters, self.shadow_blocks[g],
            self.saved_slots[g], self.tail_pages[g], *tables[0], window.request_states,
            self._held(launch, window), launch.page_offsets, window.num_bonus_tokens, table, window.leading_zero,
        )  # fmt: skip

    def _put_back(self, window: Window, tables: list[LaunchTables], buffers: WindowBuffers) -> None:
        """Undo the launches of an open that failed; waits for the device.

        No row is copied, since none was written: planes without columns. Which launches ran, the slots tell: no
        others lie in shadow pages. What the others have saved is of an earlier window.
        """
        self.held_slots.fill_(-1)
        for launch, own_tables in zip(self.launches, tables, strict=True):
            g, block_size = launch.groups, launch.planes.views[0].shape[1]
            if not any(
                self._is_redirected(g.start + place, slots, block_size) for place, slots in enumerate(own_tables[0])
            ):
                continue
            ops.close_window(
                [view[..., :0] for view in launch.planes.views], launch.planes_per_group, window.query_start_loc,
                window.cu_num_draft_tokens, buffers.row_rejected, self.shadow_blocks[g], self.saved_slots[g],
                self.tail_pages[g], *own_tables, window.request_states, None, None,
                window.num_bonus_tokens, None, window.leading_zero,
            )  # fmt: skip

    def _is_redirected(self, group: int, slots: Tensor, block_size: int) -> bool:
        blocks = slots[slots >= 0] // block_size
        return bool(torch.isin(blocks, self.shadow_blocks[group]).any())

    def _held(self, launch: _Launch, window: Window) -> Tensor | None:
        return None if window.request_states is None else self.held_slots[launch.groups]


def _pages_of(group: str, planes: Sequence[Plane]) -> tuple[int, int]:
    """Number and size of the pages of a group."""
    found = {(plane.view.shape[0], plane.view.shape[1]) for plane in planes}
    if len(found) != 1:
        raise ValueError(
            f'allocate: the layers of group {group!r} must have the same pages in mode "stage", got '
            f"{sorted(found)} (num_blocks, block_size)"
        )
    return found.pop()


def _check_shared_memory(planes: Mapping[str, Sequence[Plane]], first_blocks: Mapping[str, int], count: int) -> None:
    """Raises ValueError for groups with planes in the same place (an engine's one pool of pages) and shadow pages in
    common."""
    users: dict[tuple[int, int], list[str]] = {}
    for name, of_group in planes.items():
        for plane in of_group:
            start, page_bytes = plane.view.data_ptr(), plane.view.stride(0) * plane.view.element_size()
            sharing = users.setdefault((start, page_bytes), [])
            for other in sharing if start else []:
                first, other_first = first_blocks[name], first_blocks[other]
                if other != name and abs(first - other_first) < count:
                    raise ValueError(
                        f"allocate: groups {other!r} and {name!r} share memory and must not share shadow pages, got "
                        f"{count} pages from {other_first} and from {first} on; set shadow_blocks"
                    )
            sharing.append(name)


def _plan_launches(planes: Mapping[str, Sequence[Plane]]) -> list[_Launch]:
    """One launch for each geometry, if the groups that have it are neighbours; the first one of a group redirects."""
    of_geometry: dict[object, dict[int, list[Plane]]] = {}
    for index, of_group in enumerate(planes.values()):
        for plane in of_group:
            of_geometry.setdefault(plane.geometry, {}).setdefault(index, []).append(plane)
    launches: list[_Launch] = []
    redirected: set[int] = set()
    for by_group in of_geometry.values():
        runs: dict[tuple[int, bool, int], list[int]] = {}
        for place, index in enumerate(sorted(by_group)):
            # Neighbours have the same distance from their place in the list.
            runs.setdefault((index - place, index in redirected, place // MOST_GROUPS), []).append(index)
        for indices in runs.values():
            of_run = [by_group[index] for index in indices]
            launches.append(
                _Launch(
                    PlaneList([plane.view for of_group in of_run for plane in of_group]),
                    [len(of_group) for of_group in of_run],
                    slice(indices[0], indices[-1] + 1),
                    indices[0] not in redirected,
                    of_run[0][0].page_offsets,
                )
            )
        redirected.update(by_group)
    return launches
