"""Shadow paging, mode ``"stage"``: the pages that a window's drafts are written to.

The last pages of each group's caches belong to no request. The engine withholds them from its allocator. While a window
is open, slots and block tables name these shadow pages instead of the pages that drafts touch; see
:func:`nwor_ops.open_window`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import Plane, PlaneList, occupies_memory
from nwor_ops.ops.bound import bind
from nwor_ops.ops.shadow import MOST_GROUPS
from nwor_ops.overlap import Area, first_overlap
from nwor_ops.transaction.layers import LayerTable
from nwor_ops.transaction.window import Layout, Window, WindowBuffers, numbers_on
from nwor_ops.validation import BoundToMemory


def num_shadow_blocks(max_num_requests: int, max_drafts_per_request: int, block_size: int) -> int:
    """Return how many pages of each group an engine must withhold for mode ``"stage"``.

    Args:
        max_num_requests: largest number of requests in one batch.
        max_drafts_per_request: largest number of drafts of one request.
        block_size: slots per page; with several groups, the smallest block size.

    Example:
        >>> nwor_ops.num_shadow_blocks(max_num_requests=8, max_drafts_per_request=3, block_size=16)
        16
    """
    for name, value in (
        ("max_num_requests", max_num_requests),
        ("max_drafts_per_request", max_drafts_per_request),
        ("block_size", block_size),
    ):
        validation.integer(f"num_shadow_blocks: {name}", value)
    return max_num_requests * shadow_pages_per_request(max_drafts_per_request, block_size)


def shadow_pages_per_request(max_drafts_per_request: int, block_size: int) -> int:
    """Return how many pages the drafts of one request can touch, if the first lies in the last row of a page."""
    return (block_size + max_drafts_per_request - 2) // block_size + 1


@dataclass(frozen=True)
class Launch:
    """Arguments of one call of open_window or close_window: the planes of one geometry in consecutive groups."""

    planes: PlaneList
    planes_per_group: list[int]
    groups: slice
    redirects: bool  # whether this launch changes the tables of its groups
    page_offsets: Tensor | None


class ShadowPages(BoundToMemory):
    """The shadow pages of all groups, with the methods of :class:`UndoLog`. All planes of a group have the same pages.

    Attributes:
        redirects: the slot mappings and block tables of each launch, which begin redirects.
    """

    log_bytes = 0
    redirects: list[tuple[list[Tensor], list[Tensor]]]

    def __init__(self, layers: LayerTable, max_drafts_per_request: int, first_blocks: Mapping[str, int]) -> None:
        self._layers, self._drafts, self._first_blocks = layers, max_drafts_per_request, first_blocks
        self.groups = layers.groups
        self.launches: list[Launch] = []

    def allocate(self, buffers: WindowBuffers) -> None:
        first_blocks, requests, device = self._first_blocks, len(buffers.num_accepted), buffers.row_slots.device
        planes = {group: self._layers.planes_of(group) for group in self.groups}
        unknown = sorted(set(first_blocks) - set(planes), key=repr)
        if unknown:
            raise ValueError(f"allocate: shadow_blocks must name groups of {self.groups}, got {unknown}")
        block_size = min(_pages_of(name, of_group)[1] for name, of_group in planes.items())
        shadows = shadow_pages_per_request(self._drafts, block_size)
        self.blocks_per_group = requests * shadows
        ids = [
            self._block_ids(name, _pages_of(name, of_group)[0], first_blocks.get(name))
            for name, of_group in planes.items()
        ]
        _check_shared_memory(planes, {name: int(own[0]) for name, own in zip(planes, ids, strict=True)}, len(ids[0]))
        shape = (len(self.groups), requests, shadows)

        def filled(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, -1, dtype=dtype, device=device)

        self.shadow_blocks = torch.stack(ids).view(shape).to(device)
        self.held_slots = filled(*shape, dtype=torch.int64)
        self.saved_slots = filled(shape[0], len(buffers.log_rows), dtype=torch.int64)
        self.tail_pages = filled(*shape[:2], dtype=torch.int32)
        self.launches, self._buffers = _plan_launches(planes), buffers

    def _block_ids(self, group: str, num_blocks: int, first: int | None) -> Tensor:
        first = max(num_blocks - self.blocks_per_group, 0) if first is None else first
        if first + self.blocks_per_group > num_blocks:
            raise ValueError(
                f"allocate: group {group!r} must have {self.blocks_per_group} shadow pages "
                f"(num_shadow_blocks) from page {first} on, it has {num_blocks} pages"
            )
        if self.blocks_per_group == num_blocks:
            raise ValueError(
                f"allocate: group {group!r} must have pages for requests in addition to its {num_blocks} shadow "
                "pages (num_shadow_blocks), it has none"
            )
        return torch.arange(first, first + self.blocks_per_group, dtype=torch.int32, device="cpu")

    def bind_begin(self, plan: Tensor, layout: Layout, sample: Window) -> Tensor:
        tables: Any = layout.block_tables
        slot_mappings = [layout.slot_mappings[group] for group in self.groups]
        block_tables = [tables[group] for group in self.groups]
        self._check_apart("slot_mappings", slot_mappings)
        self._check_apart("block_tables", block_tables)
        self.redirects = [
            (slot_mappings[launch.groups], block_tables[launch.groups]) if launch.redirects else ([], [])
            for launch in self.launches
        ]
        requests = len(sample.query_start_loc) - 1
        for number in range(len(self.launches)):
            plan = bind("open_window", plan, **self._open(number, sample, requests))
        return plan

    def _check_apart(self, field: str, tensors: list[Tensor]) -> None:
        """Raise ValueError if two groups share slots or table entries: each would redirect what the other one has.

        One launch does not see the tensors of another.
        """
        areas = [
            (group, Area.of(tensor))
            for group, tensor in zip(self.groups, tensors, strict=True)
            if occupies_memory(tensor)
        ]
        if (shared := first_overlap(areas)) is not None:
            raise ValueError(
                f"bind: {field} of groups {shared[0]!r} and {shared[1]!r} must not share memory in mode "
                '"stage"; layers with the same slots belong to one group'
            )

    def bind_commit(self, begun: Tensor, sample: Window, num_rejected: Tensor) -> Tensor:
        arguments = self._close(0, sample, len(num_rejected))
        outcome = self._buffers.outcome_arguments(len(num_rejected))
        bound = bind("close_window_from_rejected", begun=begun, num_rejected=num_rejected, **arguments | outcome)
        return self._bind_closes(bound, sample, 1)

    def bind_commit_tokens(self, outcome: Tensor, sample: Window) -> Tensor:
        return self._bind_closes(outcome, sample, 0)

    def _bind_closes(self, bound: Tensor, sample: Window, first: int) -> Tensor:
        for number in range(first, len(self.launches)):
            bound = bind("close_window", bound, **self._close(number, sample, len(sample.query_start_loc) - 1))
        return bound

    def _open(self, number: int, window: Window, num_requests: int) -> dict[str, Any]:
        row_slots = self._buffers.row_slots[self.launches[number].groups]
        return self._arguments(number, window, num_requests) | {"seq_lens": window.seq_lens, "row_slots": row_slots}

    def _close(self, number: int, window: Window, num_requests: int) -> dict[str, Any]:
        return self._arguments(number, window, num_requests) | {"row_rejected": self._buffers.row_rejected}

    def _arguments(self, number: int, window: Window, num_requests: int) -> dict[str, Any]:
        """Return the common arguments of all ops of a window."""
        launch, groups = self.launches[number], self.launches[number].groups
        caches, table = launch.planes.arguments()
        slot_mappings, block_tables = self.redirects[number]
        return {
            "caches": caches,
            "planes_per_group": launch.planes_per_group,
            "query_start_loc": window.query_start_loc,
            "draft_start_loc": self._buffers.draft_start_loc[: num_requests + 1],
            "shadow_blocks": self.shadow_blocks[groups],
            "slot_mappings": slot_mappings,
            "block_tables": block_tables,
            "saved_slots": self.saved_slots[groups],
            "tail_pages": self.tail_pages[groups],
            "idx_mapping": window.request_states,
            "held_slots": None if window.request_states is None else self.held_slots[groups],
            "page_offsets": launch.page_offsets,
            "plane_table": table,
        }

    def put_back(self, window: Window, num_requests: int) -> None:
        """Restore slots and tables. Synchronizes with the device.

        Nothing was written yet, so no row is copied: the launch gets planes without columns. The slots show which
        launches ran: only those of made launches lie in shadow pages. The saved slots of other launches are from an
        earlier window.
        """
        self.held_slots.fill_(-1)
        for number, launch in enumerate(self.launches):
            first, block_size = launch.groups.start, launch.planes.views[0].shape[1]
            slot_mappings, _ = self.redirects[number]
            if any(self._is_redirected(first + index, slots, block_size) for index, slots in enumerate(slot_mappings)):
                empty = [view[..., :0] for view in launch.planes.views]
                only_tables = {"caches": empty, "plane_table": None, "held_slots": None, "page_offsets": None}
                ops.close_window(**self._close(number, window, num_requests) | only_tables)

    def refresh(self, window: Window, num_requests: int) -> None:
        """Copy every committed row of the tail pages again. Tables and slots do not change."""
        for number in range(len(self.launches)):
            nothing: dict[str, Any] = {"slot_mappings": [], "block_tables": [], "held_slots": None}
            ops.open_window(**self._open(number, window, num_requests) | nothing)

    def forget(self, states: Sequence[int] | None) -> None:
        """Clear the held slots with one fill. For selected states, their numbers are copied to the device first."""
        if states is None:
            self.held_slots.fill_(-1)
        else:
            self.held_slots.index_fill_(1, numbers_on(self.held_slots.device, states), -1)

    def _is_redirected(self, group: int, slots: Tensor, block_size: int) -> bool:
        blocks = slots[slots >= 0] // block_size
        return bool(torch.isin(blocks, self.shadow_blocks[group]).any())


def _pages_of(group: str, planes: Sequence[Plane]) -> tuple[int, int]:
    """Return the number and the size of the pages of a group."""
    pages = {(plane.view.shape[0], plane.view.shape[1]) for plane in planes}
    if len(pages) != 1:
        raise ValueError(
            f'allocate: the layers of group {group!r} must have the same pages in mode "stage", got '
            f"{sorted(pages)} (num_blocks, block_size)"
        )
    num_blocks, block_size = pages.pop()
    if block_size == 0:
        raise ValueError(
            f'allocate: the layers of group {group!r} must have tokens in their pages in mode "stage", got block_size 0'
        )
    return num_blocks, block_size


def _check_shared_memory(planes: Mapping[str, Sequence[Plane]], first_blocks: Mapping[str, int], count: int) -> None:
    """Raise ValueError if shadow pages of two groups share a byte, as in one page pool of an engine."""
    areas = [
        (name, _area_of_pages(plane, first_blocks[name], count))
        for name, of_group in planes.items()
        for plane in of_group
        if occupies_memory(plane.view)
    ]
    if (shared := first_overlap(areas)) is not None:
        one, other = sorted(shared, key=list(planes).index)
        raise ValueError(
            f"allocate: groups {one!r} and {other!r} share memory and must not share shadow pages, got {count} pages "
            f"from {first_blocks[one]} and from {first_blocks[other]} on; set shadow_blocks"
        )


def _area_of_pages(plane: Plane, first: int, count: int) -> Area:
    pages = Area.of(plane.view[first : first + count])
    if plane.page_offsets is None:
        return pages
    low, high = map(int, plane.page_offsets.aminmax())
    blocks, _, heads, _ = pages.dimensions
    return Area(pages.start + low * pages.size, (high - low + 1) * pages.size, (blocks, heads))


def _plan_launches(planes: Mapping[str, Sequence[Plane]]) -> list[Launch]:
    """Plan one launch per geometry and run of adjacent groups. The first launch of a group redirects its tables.

    Of the groups of a run, either all are redirected by an earlier launch or none.
    """
    of_geometry: dict[object, dict[int, list[Plane]]] = {}
    for index, of_group in enumerate(planes.values()):
        for plane in of_group:
            of_geometry.setdefault(plane.geometry, {}).setdefault(index, []).append(plane)
    launches: list[Launch] = []
    redirected: set[int] = set()
    for by_group in of_geometry.values():
        runs: list[list[int]] = []
        for index in sorted(by_group):
            last = runs[-1] if runs else []
            adjacent = last and index == last[-1] + 1 and (index in redirected) == (last[-1] in redirected)
            if adjacent and len(last) < MOST_GROUPS:
                last.append(index)
            else:
                runs.append([index])
        for indices in runs:
            of_run = [by_group[index] for index in indices]
            launches.append(
                Launch(
                    PlaneList([plane.view for of_group in of_run for plane in of_group]),
                    [len(of_group) for of_group in of_run],
                    slice(indices[0], indices[-1] + 1),
                    indices[0] not in redirected,
                    of_run[0][0].page_offsets,
                )
            )
        redirected.update(by_group)
    return launches
