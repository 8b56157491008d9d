"""Shadow paging, mode ``"stage"``: the pages that a window's drafts are written to.

The last pages of each group's caches belong to no request. The engine withholds them from its allocator. While a window
is open, slots and block tables name these shadow pages instead of the pages that drafts touch; see
:func:`nwor_ops.open_window`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nwor_ops import ops, validation
from nwor_ops.kv_cache import Plane, PlaneList, occupies_memory
from nwor_ops.ops.bound import bind
from nwor_ops.ops.shadow import MOST_GROUPS
from nwor_ops.overlap import Area, first_overlap
from nwor_ops.transaction.layers import Layer, LayerTable
from nwor_ops.transaction.recovery import Capacity, Redirects
from nwor_ops.transaction.window import Window, WindowBuffers, numbers_on
from nwor_ops.validation import BoundToMemory


def num_shadow_blocks(max_num_requests: int, max_drafts_per_request: int, block_size: int) -> int:
    """Return how many pages of each group an engine must withhold for mode ``"stage"``.

    Args:
        max_num_requests: largest number of requests in one batch.
        max_drafts_per_request: largest number of drafts of one request.
        block_size: slots per page; with several groups, the smallest block size.

    Raises:
        ValueError, TypeError: a value is not an integer above 0.

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


class GroupViews(NamedTuple):
    """Views of the tensors that open_window and close_window take, for the groups of one launch.

    They are made once, because a lookup costs the host less than new views in every step.
    """

    row_slots: Tensor
    shadow_blocks: Tensor
    saved_slots: Tensor
    tail_pages: Tensor
    held_slots: Tensor


class ShadowPages(BoundToMemory):
    """See :class:`nwor_ops.transaction.recovery.Recovery`. All planes of a group have the same pages."""

    log_bytes = 0

    def __init__(self, layers: LayerTable, capacity: Capacity) -> None:
        if capacity.max_drafts_per_request is None:
            raise ValueError('DraftCommitManager: max_drafts_per_request must be at least 1 in mode "stage", got None')
        self._layers, self._capacity, self._drafts = layers, capacity, capacity.max_drafts_per_request
        self.groups = layers.groups
        self.launches: list[Launch] = []

    def allocate(self, buffers: WindowBuffers) -> None:
        """Allocate the tensors of the shadow pages.

        Raises:
            ValueError: a group has too few pages, or layers with different pages; shadow pages of two groups share
                memory; or ``shadow_blocks`` names a group without layers.
        """
        capacity, first_blocks = self._capacity, self._capacity.shadow_blocks
        planes = {group: self._layers.planes_of(group) for group in self.groups}
        unknown = sorted(set(first_blocks) - set(planes))
        if unknown:
            raise ValueError(f"allocate: shadow_blocks must name groups of {self.groups}, got {unknown}")
        block_size = min(_pages_of(name, of_group)[1] for name, of_group in planes.items())
        shadows = shadow_pages_per_request(self._drafts, block_size)
        self.blocks_per_group = capacity.max_num_requests * shadows
        ids = [
            self._block_ids(name, _pages_of(name, of_group)[0], first_blocks.get(name))
            for name, of_group in planes.items()
        ]
        _check_shared_memory(planes, {name: int(own[0]) for name, own in zip(planes, ids, strict=True)}, len(ids[0]))
        shape = (len(self.groups), capacity.max_num_requests, shadows)

        def filled(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, -1, dtype=dtype, device=capacity.device)

        self.shadow_blocks = torch.stack(ids).view(shape).to(capacity.device)
        self.held_slots = filled(*shape, dtype=torch.int64)
        self.saved_slots = filled(shape[0], capacity.max_num_tokens, dtype=torch.int64)
        self.tail_pages = filled(*shape[:2], dtype=torch.int32)
        self.launches, self._buffers = _plan_launches(planes), buffers
        kept = (buffers.row_slots, self.shadow_blocks, self.saved_slots, self.tail_pages, self.held_slots)
        self._group_views = [GroupViews(*(tensor[launch.groups] for tensor in kept)) for launch in self.launches]

    @property
    def launches_per_window(self) -> int:
        return 2 * len(self.launches)

    def _block_ids(self, group: str, num_blocks: int, first: int | None) -> Tensor:
        first = num_blocks - self.blocks_per_group if first is None else first
        if first < 0 or first + self.blocks_per_group > num_blocks:
            raise ValueError(
                f"allocate: group {group!r} must have {self.blocks_per_group} shadow pages "
                f"(num_shadow_blocks) from page {first} on, it has {num_blocks} pages"
            )
        if self.blocks_per_group == num_blocks:
            raise ValueError(
                f"allocate: group {group!r} must have pages for requests in addition to its {num_blocks} shadow "
                "pages (num_shadow_blocks), it has none"
            )
        return torch.arange(first, first + self.blocks_per_group, dtype=torch.int32)

    def redirects(self, window: Window, slot_mappings: list[Tensor]) -> Redirects:
        if window.seq_lens is None:
            raise ValueError("begin: window must have seq_lens")
        given: Any = window.block_tables
        block_tables = [given[group] for group in self.groups]
        self._check_apart("slot_mappings", slot_mappings)
        self._check_apart("block_tables", block_tables)
        if len(self.launches) == 1:
            return [(slot_mappings, block_tables)]
        return [
            (slot_mappings[launch.groups], block_tables[launch.groups]) if launch.redirects else ([], [])
            for launch in self.launches
        ]

    def _check_apart(self, field: str, tensors: list[Tensor]) -> None:
        """Raise ValueError if two groups share slots or table entries: each would redirect what the other one has.

        One launch does not see the tensors of another. This runs only for windows whose calls are not bound yet. A
        trace has no addresses.
        """
        if torch.compiler.is_compiling():
            return
        areas = [
            (group, Area.of(tensor))
            for group, tensor in zip(self.groups, tensors, strict=True)
            if occupies_memory(tensor)
        ]
        if (shared := first_overlap(areas)) is not None:
            raise ValueError(
                f"begin: window.{field} of groups {shared[0]!r} and {shared[1]!r} must not share memory in mode "
                '"stage"; layers with the same slots belong to one group'
            )

    def check(self, window: Window) -> None:
        if window.seq_lens is None or window.block_tables is None:
            lacking = " and no ".join(name for name in ("seq_lens", "block_tables") if getattr(window, name) is None)
            raise ValueError(f'begin: window must have seq_lens and block_tables in mode "stage", got no {lacking}')
        validation.instance("begin: window.block_tables", window.block_tables, Mapping, "a mapping")
        missing = [group for group in self.groups if group not in window.block_tables]
        if missing:
            raise ValueError(f"begin: window.block_tables must have a table for each group, got none for {missing}")

        def check(name: str, value: object, *dtypes: torch.dtype, dims: int = 1) -> None:
            least = window.num_requests
            validation.tensor(
                f"begin: window.{name}", value, *dtypes, dims=dims, least=least, device=self._capacity.device
            )

        check("seq_lens", window.seq_lens, torch.int32)
        if window.request_states is not None:
            check("request_states", window.request_states, torch.int32, torch.int64)
        for group in self.groups:
            check(f"block_tables[{group!r}]", window.block_tables[group], torch.int32, dims=2)

    def open(self, window: Window, redirects: Redirects) -> None:
        for launch, views, own in zip(self.launches, self._group_views, redirects, strict=True):
            ops.open_window(**self._open(launch, views, window, own, _held(views, window)))

    def bind_open(self, window: Window, redirects: Redirects, plan: Tensor) -> Tensor:
        for launch, views, own in zip(self.launches, self._group_views, redirects, strict=True):
            plan = bind("open_window", plan, **self._open(launch, views, window, own, _held(views, window)))
        return plan

    def _open(
        self,
        launch: Launch,
        views: GroupViews,
        window: Window,
        redirects: tuple[list[Tensor], list[Tensor]],
        held_slots: Tensor | None,
    ) -> dict[str, Any]:
        return self._window(launch, views, window, redirects, held_slots) | {
            "seq_lens": window.seq_lens,
            "row_slots": views.row_slots,
        }

    def _window(
        self,
        launch: Launch,
        views: GroupViews,
        window: Window,
        redirects: tuple[list[Tensor], list[Tensor]],
        held_slots: Tensor | None,
    ) -> dict[str, Any]:
        """Return the common arguments of all ops of a window."""
        caches, table = launch.planes.arguments()
        slot_mappings, block_tables = redirects
        return {
            "caches": caches,
            "planes_per_group": launch.planes_per_group,
            "query_start_loc": window.query_start_loc,
            "draft_start_loc": self._buffers.draft_starts,
            "shadow_blocks": views.shadow_blocks,
            "slot_mappings": slot_mappings,
            "block_tables": block_tables,
            "saved_slots": views.saved_slots,
            "tail_pages": views.tail_pages,
            "idx_mapping": window.request_states,
            "held_slots": held_slots,
            "page_offsets": launch.page_offsets,
            "plane_table": table,
        }

    def write(
        self,
        layer: Layer,
        log_rows: Tensor,
        key: Tensor,
        value: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor,
        v_scale: Tensor,
        kv_cache_dtype: str,
    ) -> None:
        """Write to the slots, which are redirected already."""
        ops.write_kv(key, value, *layer.caches(), slot_mapping, k_scale, v_scale, kv_cache_dtype)

    def log(self, layer: Layer, log_rows: Tensor, slot_mapping: Tensor) -> None:
        """Do nothing: the external writer follows the redirected slots."""

    def close(self, window: Window, redirects: Redirects, first: int = 0, num_drafts: int | None = None) -> None:
        """Copy the rows to keep, and restore slots and tables. The source rows do not change, so it can be repeated."""
        for launch, views, own in zip(self.launches[first:], self._group_views[first:], redirects[first:], strict=True):
            ops.close_window(**self._close(launch, views, window, own))

    def _close(
        self, launch: Launch, views: GroupViews, window: Window, redirects: tuple[list[Tensor], list[Tensor]]
    ) -> dict[str, Any]:
        held_slots, row_rejected = _held(views, window), self._buffers.row_rejected
        return self._window(launch, views, window, redirects, held_slots) | {"row_rejected": row_rejected}

    def _close_from_rejected(self, window: Window, redirects: Redirects, num_rejected: Tensor) -> dict[str, Any]:
        return self._close(self.launches[0], self._group_views[0], window, redirects[0]) | {
            "num_rejected": num_rejected,
            "num_accepted": self._buffers.num_accepted,
            "counters": self._buffers.counters,
        }

    def close_from_rejected(self, window: Window, redirects: Redirects, num_rejected: Tensor) -> None:
        ops.close_window_from_rejected(**self._close_from_rejected(window, redirects, num_rejected))

    def bind_close(self, window: Window, redirects: Redirects, num_rejected: Tensor, begun: Tensor) -> Tensor:
        bound = bind(
            "close_window_from_rejected", begun=begun, **self._close_from_rejected(window, redirects, num_rejected)
        )
        return self._bind_from(1, window, redirects, bound)

    def bind_close_after(self, window: Window, redirects: Redirects, outcome: Tensor) -> Tensor:
        return self._bind_from(0, window, redirects, outcome)

    def _bind_from(self, first: int, window: Window, redirects: Redirects, bound: Tensor) -> Tensor:
        for launch, views, own in zip(self.launches[first:], self._group_views[first:], redirects[first:], strict=True):
            bound = bind("close_window", bound, **self._close(launch, views, window, own))
        return bound

    def close_keeping_all(self, window: Window, redirects: Redirects) -> None:
        self._buffers.row_rejected.fill_(False)
        self.close(window, redirects)
        self.forget(None)  # the rest of the forward does not write to shadow pages

    def put_back(self, window: Window, redirects: Redirects) -> None:
        """Undo the launches of an open that failed. Synchronizes with the device.

        Nothing was written yet, so no row is copied: the launch gets planes without columns. The slots show which
        launches ran: only those of made launches lie in shadow pages. The saved slots of other launches are from an
        earlier window.
        """
        self.held_slots.fill_(-1)
        for launch, views, own in zip(self.launches, self._group_views, redirects, strict=True):
            first, block_size = launch.groups.start, launch.planes.views[0].shape[1]
            if any(self._is_redirected(first + place, slots, block_size) for place, slots in enumerate(own[0])):
                empty = [view[..., :0] for view in launch.planes.views]
                only_tables = {"caches": empty, "plane_table": None, "held_slots": None, "page_offsets": None}
                ops.close_window(**self._close(launch, views, window, own) | only_tables)

    def refresh(self, window: Window) -> None:
        """Copy every committed row of the tail pages again. Tables and slots do not change."""
        for launch, views in zip(self.launches, self._group_views, strict=True):
            ops.open_window(**self._open(launch, views, window, ([], []), None))

    def forget(self, states: Sequence[int] | None) -> None:
        """Clear the held slots with one fill. For selected states, their numbers are copied to the device first."""
        if states is None:
            self.held_slots.fill_(-1)
        else:
            self.held_slots.index_fill_(1, numbers_on(self.held_slots.device, states), -1)

    def _is_redirected(self, group: int, slots: Tensor, block_size: int) -> bool:
        blocks = slots[slots >= 0] // block_size
        return bool(torch.isin(blocks, self.shadow_blocks[group]).any())


def _held(views: GroupViews, window: Window) -> Tensor | None:
    return None if window.request_states is None else views.held_slots


def _pages_of(group: str, planes: Sequence[Plane]) -> tuple[int, int]:
    """Return the number and the size of the pages of a group."""
    found = {(plane.view.shape[0], plane.view.shape[1]) for plane in planes}
    if len(found) != 1:
        raise ValueError(
            f'allocate: the layers of group {group!r} must have the same pages in mode "stage", got '
            f"{sorted(found)} (num_blocks, block_size)"
        )
    num_blocks, block_size = found.pop()
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
