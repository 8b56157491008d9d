"""A manager over caches of every kind, and a copy of the expected caches.

The model is plain. `expected` is a copy of all memory, and only the rows of kept tokens are written to it. After each
commit or cancel, `Transactions.assert_as_expected` compares all bytes, including those between and around the planes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from nwor_ops import DraftCommitManager, LayerCache, Layout, Plane, Window, num_shadow_blocks
from nwor_ops.testing.layouts import Shape, amx_offsets, make_amx_pages, make_pages, memory, random_bytes, raw, twin

NUM_SLOTS = 64
# Layers of one geometry share the table, because its identity is part of the geometry.
AMX_OFFSETS = amx_offsets(16, 32)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """For modules that import it: a second thread is slower for tensors this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def whole_rows(key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """The packed plane that contains key and value as halves."""
    shape = (*key_cache.shape[:3], key_cache.shape[3] + value_cache.shape[3])
    return key_cache.as_strided(shape, key_cache.stride(), key_cache.storage_offset())


def packed(layout: str, shape: Shape, dtype: torch.dtype, seed: int) -> list[LayerCache]:
    pages = make_pages(layout, shape, dtype, seed=seed)
    planes = map(whole_rows, pages.key_caches, pages.value_caches)
    return [LayerCache.packed(plane) for plane in planes]


def split(layout: str, shape: Shape, dtype: torch.dtype, seed: int) -> list[LayerCache]:
    pages = make_pages(layout, shape, dtype, seed=seed)
    return [LayerCache.split(k, v) for k, v in zip(pages.key_caches, pages.value_caches, strict=True)]


def amx(layout: str, shape: Shape, dtype: torch.dtype, seed: int) -> list[LayerCache]:
    pages = make_amx_pages(shape, dtype, seed=seed)
    # A plane with page_offsets spans its whole page. Key and value are its halves.
    key_offsets, value_offsets = AMX_OFFSETS
    return [
        LayerCache.opaque(Plane(key, key_offsets), Plane(value, value_offsets))
        for key, value in zip(pages.key_caches, pages.value_caches, strict=True)
    ]


def latent(layout: str, shape: Shape, dtype: torch.dtype, seed: int) -> list[LayerCache]:
    pages = make_pages(layout, shape, dtype, seed=seed)
    return [LayerCache.opaque(plane) for plane in map(whole_rows, pages.key_caches, pages.value_caches)]


# name: (group, constructor, layout, shape, dtype). Layers of a group share a block size.
KINDS = {
    "packed": ("full", packed, "packed", Shape(16, 4, 2, 8, 8, 2), torch.bfloat16),
    "packed_hnd": ("full", packed, "packed_hnd", Shape(16, 4, 3, 8, 8), torch.float16),
    "one_backing": ("full", packed, "one_backing", Shape(16, 4, 4, 8, 8, 3), torch.bfloat16),
    "split": ("sliding", split, "nhd", Shape(8, 8, 2, 8, 12, 2), torch.float32),
    "vec": ("sliding", split, "vec", Shape(8, 8, 1, 4, 4), torch.float16),
    "amx": ("cpu", amx, "amx", Shape(4, 16, 2, 32, 32, 2), torch.bfloat16),
    "latent": ("mla", latent, "packed", Shape(13, 5, 1, 16, 8, 2), torch.uint8),
}


@dataclass(frozen=True)
class Request:
    """The part of one request in a batch."""

    given: int  # prompt and target tokens
    drafts: int = 0
    accepted: int = 0


@dataclass
class Batch:
    window: Window
    slots: dict[str, Tensor]  # per group, int64 [T]
    rejected: list[int]  # tokens
    drafted: list[int]  # tokens
    draft_token_ids: Tensor
    sampled_token_ids: Tensor
    num_rejected: Tensor

    @property
    def num_tokens(self) -> int:
        return len(next(iter(self.slots.values())))

    def on(self, device: str) -> Batch:
        """The batch on a device."""
        slots = {group: slots.to(device) for group, slots in self.slots.items()}
        starts, counts = self.window.query_start_loc.to(device), self.window.cu_num_draft_tokens.to(device)
        return replace(
            self, slots=slots, draft_token_ids=self.draft_token_ids.to(device),
            window=self.window._replace(query_start_loc=starts, cu_num_draft_tokens=counts),
            sampled_token_ids=self.sampled_token_ids.to(device), num_rejected=self.num_rejected.to(device),
        )  # fmt: skip


def make_batch(
    requests: Sequence[Request],
    slots: dict[str, list[int]],
    num_draft_tokens_known: bool = True,
    spare_drafts: int = 2,
) -> Batch:
    """The tensors of a batch with these slots (-1 = padded) and with the given outcome of its drafts."""
    rejected, drafted, draft_ids = [], [], []
    most = max([r.drafts for r in requests], default=0)
    sampled = torch.full((len(requests), most + 1), -1)
    end = 0
    for index, r in enumerate(requests):
        end += r.given + r.drafts
        drafted += range(end - r.drafts, end)
        rejected += range(end - r.drafts + r.accepted, end)
        ids = [100 * index + j for j in range(r.drafts)]
        draft_ids += ids
        if r.given + r.drafts:
            sampled[index, : r.accepted + 1] = torch.tensor([*ids[: r.accepted], 7777])
    window = Window(
        torch.tensor([0, *accumulate(r.given + r.drafts for r in requests)], dtype=torch.int32),
        torch.tensor(list(accumulate(r.drafts for r in requests)), dtype=torch.int32),
        len(draft_ids) if num_draft_tokens_known else None,
    )
    return Batch(
        window,
        {group: torch.tensor(s, dtype=torch.int64) for group, s in slots.items()},
        rejected,
        drafted,
        torch.tensor(draft_ids + [-5] * spare_drafts),
        sampled,
        torch.tensor([r.drafts - r.accepted for r in requests], dtype=torch.int32),
    )


def begin(manager: DraftCommitManager, batch: Batch, block_tables: Mapping[str, Tensor] | None = None) -> None:
    """Open a window with a layout of its own."""
    manager.bind(Layout(batch.slots, block_tables))
    manager.begin(batch.window)


def on_device(caches: list[LayerCache], device: str) -> list[LayerCache]:
    """The caches of a constructor on a device, with all memory around them."""
    if device == "cpu":
        return caches
    copies = twin([[plane.view for plane in cache.planes] for cache in caches], device)
    return [LayerCache(tuple(map(Plane, views)), cache.writable) for cache, views in zip(caches, copies, strict=True)]


def distinct_slots(groups: Iterable[str], count: int, padding: int = 0, seed: int = 0) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    chosen = {g: torch.randperm(NUM_SLOTS, generator=generator)[:count].tolist() for g in groups}
    return {group: slots + [-1] * padding for group, slots in chosen.items()}


def put_rows(planes: Sequence[Plane], rows: Sequence[Tensor], slots: Sequence[int]) -> None:
    """Write a row of bytes per token into each plane, as the writer of any engine."""
    for plane, plane_rows in zip(planes, rows, strict=True):
        view = plane.view
        for token, slot in enumerate(slots):
            if slot < 0:
                continue
            block, offset = divmod(slot, view.shape[1])
            if plane.page_offsets is None:
                raw(view)[block, offset] = raw(plane_rows)[token]
                continue
            # The page as one row of elements, and the indices of this slot's elements in it.
            places = plane.page_offsets[offset].long() + block * view.stride(0)
            for head in range(view.shape[2]):
                start = view.storage_offset() + head * view.stride(2)
                length = view.shape[0] * view.stride(0) - head * view.stride(2)
                length = min(length, view.untyped_storage().size() // view.element_size() - start)
                flat = raw(view.as_strided((length,), (1,), start))
                flat[places] = raw(plane_rows)[token, head]


class Transactions:
    """Layers of some kinds in one manager. `expected` is on the CPU, whatever the device of the caches."""

    def __init__(
        self,
        kinds: Iterable[str] = KINDS,
        *,
        max_num_tokens: int = 40,
        max_num_requests: int = 8,
        max_draft_tokens: int = 16,
        mode: str = "cow",
        max_drafts_per_request: int | None = None,
        device: str = "cpu",
    ) -> None:
        self.device = device
        limits = {
            "max_num_tokens": max_num_tokens,
            "max_num_requests": max_num_requests,
            "max_draft_tokens": max_draft_tokens,
            "device": device,
            "mode": mode,
            "max_drafts_per_request": max_drafts_per_request,
        }
        self.manager = DraftCommitManager(**limits)
        kinds, self.shadows = list(kinds), 0  # the last pages of each group, which belong to no request
        if mode == "stage":
            smallest = min(KINDS[kind][3].block_size for kind in kinds)
            self.shadows = num_shadow_blocks(max_num_requests, max_drafts_per_request or 1, smallest)
        self.caches: dict[str, LayerCache] = {}
        self.group_of: dict[str, str] = {}
        for seed, kind in enumerate(kinds):
            group, construct, layout, shape, dtype = KINDS[kind]
            shape = shape._replace(blocks=shape.blocks + self.shadows)
            for index, cache in enumerate(on_device(construct(layout, shape, dtype, seed), device)):
                self.caches[f"{kind}.{index}"] = cache
                self.group_of[f"{kind}.{index}"] = group
        for name, cache in self.caches.items():
            self.manager.register_layer(name, cache, self.group_of[name])
        self.manager.allocate()
        self.groups = self.manager.groups
        self._views = [[plane.view for plane in cache.planes] for cache in self.caches.values()]
        copies = twin(self._views, "cpu")
        self.expected = {
            name: [Plane(view, p.page_offsets) for view, p in zip(views, cache.planes, strict=True)]
            for (name, cache), views in zip(self.caches.items(), copies, strict=True)
        }
        self._seed = 1000

    def batch(self, requests: Sequence[Request], padding: int = 0, seed: int = 0, **options) -> Batch:
        count = sum(r.given + r.drafts for r in requests)
        return make_batch(requests, distinct_slots(self.groups, count, padding, seed), **options).on(self.device)

    def rows(self, name: str, num_tokens: int) -> tuple[Tensor, ...]:
        """The data for the layer's writer, on the CPU: new random bytes for each token and plane."""
        self._seed += 1
        shapes = [(num_tokens, *plane.view.shape[2:]) for plane in self.caches[name].planes]
        return tuple(
            random_bytes(t * h * w, plane.view.dtype, self._seed).view(t, h, w)
            for (t, h, w), plane in zip(shapes, self.caches[name].planes, strict=True)
        )

    def write(self, name: str, rows: tuple[Tensor, ...], slots: Tensor, token_offset: int = 0) -> None:
        cache = self.caches[name]
        if cache.writable:
            key, value = cache.key_value(tuple(plane_rows.to(self.device) for plane_rows in rows))
            self.manager.write(name, key, value, slots, token_offset=token_offset)
        else:
            self.manager.log(name, slots, token_offset=token_offset)
            put_rows(cache.planes, rows, slots.tolist())

    def forward(self, batch: Batch, lost: Iterable[int], layers: Iterable[str] | None = None) -> None:
        """Write every token in each layer. The tokens in `lost` are not expected to stay."""
        for name in self.caches if layers is None else layers:
            slots = batch.slots[self.group_of[name]]
            rows = self.rows(name, len(slots))
            self.write(name, rows, slots)
            self.expect(name, rows, slots, lost)

    def expect(self, name: str, rows: tuple[Tensor, ...], slots: Tensor, lost: Iterable[int]) -> None:
        lost = set(lost)
        kept = [-1 if token in lost else slot for token, slot in enumerate(slots.tolist())]
        put_rows(self.expected[name], rows, kept)

    def expect_any_shadow_pages(self) -> None:
        """Ignore the contents of shadow pages."""
        for name, cache in self.caches.items():
            for plane, expected in zip(cache.planes, self.expected[name], strict=True):
                real = plane.view.shape[0] - self.shadows
                theirs, ours = expected.view[real:], plane.view[real:]
                if plane.page_offsets is not None:  # strides do not give the order in a page: whole pages
                    start = cache.planes[0].view.storage_offset() + real * plane.view.stride(0)
                    size = (self.shadows * plane.view.stride(0),)
                    theirs, ours = (view.as_strided(size, (1,), start) for view in (theirs, ours))
                raw(theirs).copy_(raw(ours))

    def is_as_expected(self) -> bool:
        if self.shadows:
            self.expect_any_shadow_pages()
        views = [[plane.view for plane in planes] for planes in self.expected.values()]
        pairs = zip(memory(self._views), memory(views), strict=True)
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)

    def assert_as_expected(self) -> None:
        assert self.is_as_expected(), "the caches differ from a run without the rejected drafts"
