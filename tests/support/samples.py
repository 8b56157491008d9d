"""`sample_inputs(op, device)`: a few calls of every op, for the schema, meta and error tests."""

from __future__ import annotations

from typing import Any

import torch
from layouts import Shape, make_amx_pages, make_pages, random_bytes, surrounded, twin
from torch import Tensor

from nwor_ops.ops import registry

SMALL = Shape(blocks=3, block_size=4, heads=4, key_width=8, value_width=8, layers=2)
WIDE_VALUES = Shape(blocks=3, block_size=5, heads=2, key_width=16, value_width=24)
LATENT = Shape(blocks=2, block_size=4, heads=1, key_width=24, value_width=8)

SLOTS = (5, -1, 0, 11, 7, -1)  # inside SMALL; two tokens are skipped
LOG_ROWS = (-1, 1, 2, 0, -1, -1)  # the draft with row 1 has no slot
NUM_LOG_ROWS = 4


def int64(*values: int) -> Tensor:
    return surrounded(torch.tensor(values, dtype=torch.int64))


def int32(*values: int) -> Tensor:
    return surrounded(torch.tensor(values, dtype=torch.int32))


def flags(*values: int) -> Tensor:
    return surrounded(torch.tensor(values, dtype=torch.bool))


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Finite values of every size, including zero and both signs, surrounded by foreign memory."""
    generator = torch.Generator().manual_seed(seed)
    mantissas = torch.randn(shape, generator=generator)
    exponents = torch.randint(-12, 12, shape, generator=generator).float()
    return surrounded((mantissas * torch.exp2(exponents)).to(dtype))


def log_for(cache: Tensor, rows: int = NUM_LOG_ROWS, seed: int = 7) -> Tensor:
    """A log [R, H, W] of random bytes for one plane."""
    count = rows * cache.size(2) * cache.size(3)
    return random_bytes(count + 8, cache.dtype, seed)[5 : 5 + count].view(rows, cache.size(2), cache.size(3))


def write_arguments(
    layout: str = "packed",
    shape: Shape = SMALL,
    dtype: torch.dtype = torch.float32,
    kv_cache_dtype: str = "auto",
    cache_dtype: torch.dtype | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    slots: tuple[int, ...] = SLOTS,
    extra_tokens: int = 2,
    offset: int = 0,
) -> tuple[Any, ...]:
    """Arguments of write_kv. `key` and `value` are longer than `slot_mapping`, as vLLM pads them."""
    cache_dtype = cache_dtype or (dtype if kv_cache_dtype == "auto" else torch.uint8)
    pages = make_pages(layout, shape, cache_dtype, offset)
    tokens = len(slots) + extra_tokens
    k_scale, v_scale = scales or (numbers(1).abs(), numbers(1, seed=1).abs())
    return (
        numbers(tokens, shape.heads, shape.key_width, dtype=dtype, seed=2),
        numbers(tokens, shape.heads, shape.value_width, dtype=dtype, seed=3),
        pages.key_caches[0], pages.value_caches[0], int64(*slots), k_scale, v_scale, kv_cache_dtype,
    )  # fmt: skip


def logged_arguments(log_rows: tuple[int, ...] = LOG_ROWS, **options: Any) -> tuple[Any, ...]:
    arguments = write_arguments(**options)
    return (*arguments, int32(*log_rows), log_for(arguments[2]), log_for(arguments[3], seed=8))


# A window number for write_kv_logged, log_slots and restore_slots, and an older one.
WINDOW, EARLIER_WINDOW = 2**33 + 5, 5


def row_windows(*shape: int) -> Tensor:
    """Rows that an earlier window logged. The low 32 bits of its number equal those of this window."""
    return surrounded(torch.full(shape, EARLIER_WINDOW, dtype=torch.int64))


def outcome_buffers(rows: int = NUM_LOG_ROWS, requests: int = 3) -> tuple[Tensor, ...]:
    """Output buffers of an outcome: flags of rows, accepted drafts of requests, counters."""
    return flags(*[1] * rows), int32(*[77] * requests), int64(10, 20, 30, 40, 50)


def _samples(op: str) -> list[tuple[Any, ...]]:
    per_token = numbers(8, 1).abs(), numbers(8, 1, seed=1).abs()
    per_head = numbers(4).abs(), numbers(4, seed=1).abs()
    write_options = [
        {},
        {"layout": "one_backing", "dtype": torch.bfloat16},
        {"layout": "hnd", "shape": WIDE_VALUES, "dtype": torch.float16},
        {"layout": "vec", "kv_cache_dtype": "fp8", "scales": per_head},
        {
            "layout": "nhd",
            "kv_cache_dtype": "fp8_e5m2",
            "cache_dtype": torch.float8_e5m2,
            "scales": per_token,
        },
        {"slots": (), "extra_tokens": 0},
    ]
    pages = make_pages("one_backing", SMALL, torch.bfloat16)
    latent = make_pages("nhd", LATENT, torch.uint8)
    wide = make_pages("nhd", LATENT, torch.int64)
    amx = make_amx_pages(Shape(2, 16, 2, 16, 16), torch.bfloat16)
    amx_slots, amx_rows = int64(3, 17, 31), int32(0, 2, 1)

    def layer_log(caches: list[Tensor], rows: int = NUM_LOG_ROWS) -> Tensor:
        return surrounded_layers([log_for(cache, rows, seed=20 + i) for i, cache in enumerate(caches)])

    if op == "write_kv":
        return [write_arguments(**options) for options in write_options]
    if op == "write_kv_logged":
        return [
            logged_arguments(**options, log_rows=LOG_ROWS if "slots" not in options else ())
            for options in write_options
        ] + [(*logged_arguments(), int64(WINDOW), row_windows(NUM_LOG_ROWS))]
    if op == "log_slots":
        return [
            (cache, int64(*slots), int32(*LOG_ROWS), log_for(cache))
            for cache, slots in [
                (pages.key_caches[1], SLOTS),
                (latent.key_caches[0], (1, -1, 0, 7, 5, 2)),
                (wide.value_caches[0], (1, -1, 0, 7, 5, 2)),
            ]
        ] + [
            (amx.key_caches[0], amx_slots, amx_rows, log_for(amx.key_caches[0]), amx.key_offsets),
            (
                pages.key_caches[0],
                int64(*SLOTS),
                int32(*LOG_ROWS),
                log_for(pages.key_caches[0]),
                None,
                int64(WINDOW),
                row_windows(NUM_LOG_ROWS),
            ),
        ]
    if op == "restore_slots":
        logged_by_one_layer = row_windows(2, NUM_LOG_ROWS)
        logged_by_one_layer[1] = WINDOW
        return [
            (pages.key_caches, layer_log(pages.key_caches), int64(5, -1, 0, 11), flags(1, 1, 0, 1)),
            (pages.value_caches[:1], layer_log(pages.value_caches[:1]), int64(2, 4, 0, 1), flags(0, 0, 0, 0)),
            (latent.key_caches, layer_log(latent.key_caches), int64(5, 6, 0, 1), flags(1, 1, 1, 1)),
            (
                amx.value_caches,
                layer_log(amx.value_caches),
                int64(5, 31, 0, 1),
                flags(0, 1, 1, 1),
                amx.value_offsets,
            ),
            (pages.key_caches, layer_log(pages.key_caches, 0), int64(), flags()),
            (pages.key_caches, layer_log(pages.key_caches), int64(5, 3, 0, 11), flags(1, 0, 1, 1), None, None, None, 3),
            (
                pages.key_caches,
                layer_log(pages.key_caches),
                int64(5, -1, 0, 11),
                flags(1, 1, 0, 1),
                None,
                int64(WINDOW),
                logged_by_one_layer,
            ),
        ]
    if op == "restore_slots_from_rejected":
        planes, log, slots = pages.key_caches, layer_log(pages.key_caches), int64(5, -1, 0, 11)
        counts = int32(1, 0, 2), int32(0, 1, 1, 4)
        amx_log = layer_log(amx.value_caches)
        return [
            (planes, log, slots, *counts, *outcome_buffers()),
            (amx.value_caches, amx_log, int64(5, 31, 0, 1), *counts, *outcome_buffers(requests=5), amx.value_offsets),
            (planes, layer_log(planes, 0), int64(), int32(), int32(0), *outcome_buffers(0, 0)),
            (planes, log, slots, int32(-3, 9, 9), int32(0, 1, 1, 4), *outcome_buffers(), None, int64(WINDOW),
             row_windows(2, NUM_LOG_ROWS), 3),
            (planes, log, slots, int32(2, 3), int32(0, 0, 0), *outcome_buffers()),  # an unplanned window
        ]  # fmt: skip
    if op == "plan_window":
        return [
            plan_arguments(),
            plan_arguments(groups=2, token_offset=4, tokens=5),
            plan_arguments(rows=9),
            plan_arguments(cu_num_draft_tokens=(4, 5, 9, 10), num_bonus_tokens=1),
            plan_arguments(cu_num_draft_tokens=(0, 4, 5, 9, 10), num_bonus_tokens=1, leading_zero=True),
        ]
    drafts, cu = (11, 12, 13, 14, 15, 16, 17), (0, 3, 3, 7)
    sampled = torch.tensor([[11, 12, 99, -1, -1], [50, -1, -1, -1, -1], [14, 15, 16, 17, 60]])
    of_tokens = [
        (int64(*drafts), surrounded(sampled), int32(*cu)),
        (int32(*drafts, 0, 0), surrounded(sampled.int().T).T, int32(*cu, 7, 7)[:4]),
        (int64(), int64().view(0, 1), int32(0)),
    ]
    of_counts = [(int32(1, 0, 4), int32(*cu)), (int32(-3, 9, 9, 9), int32(*cu)), (int32(), int32(0))]
    if op == "acceptance_mask":
        return of_tokens
    if op == "acceptance_mask_from_rejected":
        return [(*counts, 7 + i if len(counts[0]) else 0) for i, counts in enumerate(of_counts)]

    inputs = of_tokens if op == "reject_rows" else of_counts
    return [
        (*i, *outcome_buffers(rows, requests)) for i, rows, requests in zip(inputs, (7, 9, 4), (3, 5, 0), strict=True)
    ]


def surrounded_layers(logs: list[Tensor]) -> Tensor:
    """Logs of several layers as one [L, R, H, W] inside foreign memory."""
    stacked = torch.stack(logs)
    backing = random_bytes(stacked.numel() + 8, stacked.dtype, seed=31)
    view = backing[3 : 3 + stacked.numel()].view(stacked.shape)
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[stacked.element_size()]
    view.view(raw).copy_(stacked.view(raw))
    return view


def plan_arguments(
    query_start_loc: tuple[int, ...] = (0, 4, 5, 9, 9, 9),
    cu_num_draft_tokens: tuple[int, ...] = (3, 3, 6, 6),
    tokens: int = 12,
    groups: int = 1,
    rows: int = 6,
    token_offset: int | None = None,
    num_bonus_tokens: int = 0,
    leading_zero: bool = False,
) -> tuple[Any, ...]:
    """A batch without prompts: requests with 3, no and 3 drafts, a padded request, and padded tokens at the end."""
    slot_mappings = [int64(*(100 * (g + 1) + t if t < 11 else -1 for t in range(tokens))) for g in range(groups)]
    return (
        int32(*query_start_loc), int32(*cu_num_draft_tokens), slot_mappings, int32(*[77] * (tokens + 2)),
        surrounded(torch.full((groups, rows), 77, dtype=torch.int64)), int32(*[77] * rows),
        int32(*[77] * rows), int64(10, 20, 30, 40, 50), int32(*[77] * (len(cu_num_draft_tokens) + 3)), token_offset,
        num_bonus_tokens, leading_zero,
    )  # fmt: skip


def sample_inputs(op: str, device: str = "cpu") -> list[tuple[Any, ...]]:
    """Arguments of `op`, each with separate memory."""
    from samples_drafter import draft_samples  # these use the definitions above
    from samples_recurrent import recurrent_samples
    from samples_staging import stage_samples

    families = {
        "drafter": draft_samples,
        "recurrent": recurrent_samples,
        "shadow": stage_samples,
        "staging": stage_samples,
    }
    samples = families.get(registry.OPS[op].family, _samples)(op)
    return [twin(arguments, device) for arguments in samples]


def ops_of(family: str) -> tuple[str, ...]:
    return tuple(op.name for op in registry.OPS.values() if op.family == family)


def argument_names(op: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.nwor, op).default._schema.arguments]


def with_arguments(op: str, arguments: tuple[Any, ...], **replaced: Any) -> tuple[Any, ...]:
    """The same call with some arguments replaced by name."""
    names = argument_names(op)
    defaults = [argument.default_value for argument in getattr(torch.ops.nwor, op).default._schema.arguments]
    length = max(len(arguments), *(names.index(name) + 1 for name in replaced))
    values = [*arguments, *defaults[len(arguments) : length]]
    for name, value in replaced.items():
        values[names.index(name)] = value
    return tuple(values)


OPS = tuple(registry.OPS)


# ---------------------------------------------------------------- acceptance, computed by hand

# drafts of each request, sampled tokens of each request, accepted drafts of each request
DECIDED = {
    "all": ([[1, 2, 3], [4]], [[1, 2, 3, 9], [4, 9, -1, -1]], [3, 1]),
    "none": ([[1, 2, 3], [4]], [[9, -1, -1, -1], [5, -1, -1, -1]], [0, 0]),
    "half": ([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, -1, -1], [5, 9, -1, -1, -1]], [2, 1]),
    "replaced by the same token": ([[1, 2, 3]], [[1, 2, -1, -1]], [1]),
    "equal again after a mismatch": ([[1, 2, 3]], [[1, 9, 3, 9]], [1]),
    "no drafts between": ([[1], [], [2]], [[1, 9], [9, -1], [9, -1]], [1, 0, 0]),
    "no bonus column": ([[1, 2]], [[1, 2]], [2]),
    "fewer columns than drafts": ([[1, 2, 3]], [[1, 2]], [2]),
    "more requests sampled than planned": ([[1]], [[1, 9], [9, 9], [9, 9]], [1]),
    "token 0": ([[0, 0]], [[0, 0, 0]], [2]),
    "beyond 32 bits": ([[2**40]], [[2**40, 1]], [1]),
    "same low 32 bits": ([[2**40 + 5]], [[5, 1]], [0]),
    "no token for an invalid draft": ([[1], [-1]], [[1], [-1]], [1, 0]),
}
WIDE_IDS = [case for case in DECIDED if "32 bits" in case]  # these need int64
OTHER_IDS = [case for case in DECIDED if "32 bits" not in case]


def decided(
    case: str, draft_dtype: torch.dtype = torch.int64, sampled_dtype: torch.dtype = torch.int64
) -> tuple[tuple[Tensor, Tensor, Tensor], list[int]]:
    """The arguments of `acceptance_mask` for a case, and the number of accepted drafts of each request."""
    drafts, sampled, accepted = DECIDED[case]
    starts = [sum(map(len, drafts[:q])) for q in range(len(drafts) + 1)]
    flat = surrounded(torch.tensor([d for ids in drafts for d in ids], dtype=draft_dtype))
    return (flat, surrounded(torch.tensor(sampled, dtype=sampled_dtype)), int32(*starts)), accepted
