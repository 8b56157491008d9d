"""Self-tests of family ``drafter``: one small call of each op, with results worked out by hand.

Rows are two requests, and a padded row if the op supports padded rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.testing.comparison import difference

POISON = 77  # initial contents of every output
PAD = -1
DISCARDED = (False, False, False, True)


class _Device:
    """Create tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def int32(self, *values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._device)

    def int64(self, *values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def flags(self, *values: bool) -> Tensor:
        return torch.tensor(values, device=self._device)

    def floats(self, *values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, POISON, dtype=dtype, device=self._device)


def prepare_prefill_inputs(device: torch.device) -> str | None:
    """A request of four tokens, the last one rejected, and two tokens of a prompt that continues."""
    on = _Device(device)
    input_ids, positions = on.poisoned(8), on.poisoned(8, dtype=torch.int64)
    query_start_loc, seq_lens = on.poisoned(4), on.poisoned(3)
    last_token_indices, step = on.poisoned(3, dtype=torch.int64), on.poisoned(1, dtype=torch.int64)
    ops.prepare_prefill_inputs(
        on.int32(10, 11, 12, 13, 20, 21), on.int64(5, 6, 7, 8, 0, 1), on.int32(0, 4, 6, 6), on.int32(9, 2, POISON),
        on.int32(1, 0, -1), on.int32(2, 0, POISON), on.int32(1, 0, POISON), on.int64(50, 51), on.int32(60, 61),
        input_ids, positions, query_start_loc, seq_lens, last_token_indices, step,
    )  # fmt: skip
    return difference(
        input_ids=(input_ids, [11, 12, 51, 0, 21, 60, 0, 0]),
        positions=(positions, [5, 6, 7, 8, 0, 1, 0, 0]),
        query_start_loc=(query_start_loc, [0, 4, 6, 6]),
        seq_lens=(seq_lens, [9, 2, 0]),
        last_token_indices=(last_token_indices, [2, 5, 0]),
        current_draft_step=(step, [0]),
    )


def prepare_decode_inputs(device: torch.device) -> str | None:
    """The model has at most 10 tokens, and the second request reaches them."""
    on = _Device(device)
    input_ids, query_start_loc, seq_lens = on.poisoned(3), on.poisoned(4), on.poisoned(3)
    positions, sample_positions = on.int64(7, 9, POISON), on.int64(100, 200, POISON)
    ops.prepare_decode_inputs(
        on.int64([70, 1], [71, 2], [72, 3]), on.int32(9, 10, POISON), on.int32(1, 0, POISON),
        input_ids, positions, query_start_loc, seq_lens, 10, on.int32(4, 2, -1), sample_positions,
    )  # fmt: skip
    return difference(
        input_ids=(input_ids, [70, 71, 0]),
        positions=(positions, [8, 9, 0]),
        query_start_loc=(query_start_loc, [0, 1, 2, 2]),
        seq_lens=(seq_lens, [9, 10, 0]),
        sample_positions=(sample_positions, [101, 201, 0]),
    )


def update_draft_inputs(device: torch.device) -> str | None:
    """Step 1 of 3."""
    on = _Device(device)
    draft_tokens, input_ids = on.poisoned(3, 3, dtype=torch.int64), on.poisoned(3)
    positions, seq_lens, sample_positions = on.int64(8, 9, 0), on.int32(9, 10, 0), on.int64(1, 2, 3)
    next_hidden_states = on.floats([0.0, 0.0], [0.0, 0.0], [0.0, 0.0])
    ops.update_draft_inputs(
        on.int64(70, 71, 72), on.int64(1), draft_tokens, input_ids, positions, seq_lens, 3, 10, on.int32(4, 2, -1),
        on.floats([1.0, 2.0], [3.0, 4.0], [5.0, 6.0]), next_hidden_states, sample_positions,
    )  # fmt: skip
    return difference(
        draft_tokens=(draft_tokens, [[POISON, 70, POISON], [POISON, 71, POISON], [POISON] * 3]),
        input_ids=(input_ids, [70, 71, POISON]),
        positions=(positions, [9, 9, 0]),
        seq_lens=(seq_lens, [10, 10, 0]),
        next_hidden_states=(next_hidden_states, [[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]),
        sample_positions=(sample_positions, [2, 3, 3]),
    )


def compute_slot_mappings(device: torch.device) -> str | None:
    """Two groups, with blocks of 4 and of 8. The row in the middle is padded."""
    on = _Device(device)
    slot_mappings = on.poisoned(2, 7, dtype=torch.int64)
    ops.compute_slot_mappings(
        on.int32(1, -1, 0), on.int32(0, 2, 3, 5), on.int64(3, 4, 9, 0, 5),
        [on.int32([10, 11], [20, 21]), on.int32([1], [2])], [4, 8], slot_mappings,
    )  # fmt: skip
    return difference(slot_mappings=(slot_mappings, [[83, 84, PAD, 40, 45, PAD, PAD], [19, 20, PAD, 8, 13, PAD, PAD]]))


def eagle_step(device: torch.device) -> str | None:
    """Blocks of 4, and a model of at most 10 tokens, which the third request reaches."""
    on = _Device(device)
    seq_lens = on.int32(4, 8, 10, POISON)
    new_positions, slot_mapping = on.poisoned(4, dtype=torch.int64), on.poisoned(4, dtype=torch.int64)
    ops.eagle_step(
        on.int64(3, 7, 9), on.int32([10, 11, 12], [20, 21, 22], [30, 31, 32]), seq_lens, new_positions, slot_mapping,
        4, 10,
    )  # fmt: skip
    return difference(
        seq_lens=(seq_lens, [5, 9, 1, POISON]),
        new_positions=(new_positions, [4, 8, 0, POISON]),
        slot_mapping=(slot_mapping, [44, 88, PAD, PAD]),
    )


def prepare_inputs_padded(device: torch.device) -> str | None:
    """A request with one of three drafts accepted, one without drafts, and one with two drafts and nothing sampled."""
    on = _Device(device)
    token_indices_to_sample, num_rejected = on.poisoned(4), on.poisoned(4)
    ops.prepare_inputs_padded(
        on.int32(3, 3, 5), on.int32(2, 1, 0), on.int32(0, 4, 5, 8), token_indices_to_sample, num_rejected
    )
    return difference(
        token_indices_to_sample=(token_indices_to_sample, [1, 4, 0, 0]), num_rejected=(num_rejected, [2, 0, 0, 0])
    )


def prepare_next_token_padded(device: torch.device) -> str | None:
    """Ids below 50 are valid."""
    on = _Device(device)
    next_token_ids, valid_sampled_count = on.poisoned(5), on.poisoned(5)
    sampled = on.int32([5, 6, -1], [-1, -1, -1], [7, 99, -1], [5, 6, 7])
    ops.prepare_next_token_padded(
        sampled, on.flags(*DISCARDED), on.int32(40, 41, 42, 43), next_token_ids, valid_sampled_count, 50
    )
    return difference(
        next_token_ids=(next_token_ids, [6, 41, 7, 43, 0]), valid_sampled_count=(valid_sampled_count, [2, 0, 1, 0, 0])
    )


# The token that the noise of (seed, position, step) chooses among 64 equal logits. See `noise` in
# tests/support/oracle_drafter.py.
VOCABULARY = 64
DRAWS = ((0, 0, 0, 61), (1, 7, 0, 33), (2**40, 7, 1, 45), (2**40, 8, 1, 17))


def gumbel_sample(device: torch.device) -> str | None:
    """Two draws that depend only on the noise, one at temperature 0, and a padded row."""
    on = _Device(device)
    rows = len(DRAWS) + 2
    logits = torch.zeros(rows, VOCABULARY, device=device)
    logits[rows - 2, 5] = logits[rows - 2, 9] = 1.0
    logits_cache = torch.full((rows, 2, VOCABULARY), float(POISON), device=device)
    expected_cache = logits_cache.clone()
    steps = [step for _, _, step, _ in DRAWS] + [0, 0]
    for row in range(rows - 1):
        expected_cache[row, steps[row]] = logits[row]
    sampled = on.poisoned(rows, 2, dtype=torch.int64)
    expected = [[token if step == column else POISON for column in range(2)] for _, _, step, token in DRAWS]
    ops.gumbel_sample(
        logits, on.int32(*range(rows - 1), -1), on.floats(*[1.0] * len(DRAWS), 0.0, 1.0),
        on.int64(*(seed for seed, _, _, _ in DRAWS), 3, 3), on.int64(*(position for _, position, _, _ in DRAWS), 7, 7),
        on.int64(*steps), sampled, logits_cache,
    )  # fmt: skip
    return difference(
        sampled=(sampled, [*expected, [5, POISON], [0, POISON]]), logits_cache=(logits_cache, expected_cache)
    )


def copy_expand_inputs(device: torch.device) -> str | None:
    """Each of two requests gets its bonus token and a mask token. The first one rejects its last token."""
    on = _Device(device)
    input_ids, positions = on.poisoned(12), on.poisoned(12, dtype=torch.int64)
    is_rejected, is_masked = on.flags(*[False] * 12), on.flags(*[True] * 12)
    new_token_indices = on.poisoned(4)
    ops.copy_expand_inputs(
        on.int32(10, 11, 12, 13, 20, 21), on.int64(5, 6, 7, 8, 0, 1), on.int32(0, 4, 6), on.int32(1, 0),
        on.int32(51, 60), input_ids, positions, is_rejected, is_masked, new_token_indices,
        num_new_tokens=2, padding_token_id=9, mask_token_id=8,
    )  # fmt: skip
    return difference(
        input_ids=(input_ids, [10, 11, 12, 51, 8, 9, 20, 21, 60, 8, 9, 9]),
        positions=(positions, [5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 0, 0]),
        is_rejected=(is_rejected, [place in (5, 10, 11) for place in range(12)]),
        is_masked=(is_masked, [place in (4, 9) for place in range(12)]),
        new_token_indices=(new_token_indices, [3, 4, 8, 9]),
    )


def extend_queries(device: torch.device) -> str | None:
    """Queries of 4 and 2 tokens grow by one, with blocks of 4 and a model of at most 9 tokens."""
    on = _Device(device)
    query_start_loc, seq_lens, slot_mapping = on.poisoned(4), on.poisoned(3), on.poisoned(10, dtype=torch.int64)
    ops.extend_queries(
        on.int32(0, 4, 6, 6), on.int32(9, 2, POISON), on.int64(5, 6, 7, 8, 9, 0, 1, 2),
        on.flags(*[False] * 4, True, *[False] * 3), on.int32([10, 11, 12], [20, 21, 22], [30, 31, 32]),
        query_start_loc, seq_lens, slot_mapping, 4, 9, 1, on.int32(4, 2, -1),
    )  # fmt: skip
    return difference(
        query_start_loc=(query_start_loc, [0, 5, 8, 8]),
        seq_lens=(seq_lens, [9, 3, 0]),
        slot_mapping=(slot_mapping, [45, 46, 47, 48, PAD, 80, 81, 82, PAD, PAD]),
    )


def dcp_local_seq_lens(device: torch.device) -> str | None:
    """The second of two ranks, which take turns of two tokens."""
    on = _Device(device)
    local_seq_lens = on.poisoned(3)
    ops.dcp_local_seq_lens(on.int32(5, 9), local_seq_lens, 2, 1, 2)
    return difference(local_seq_lens=(local_seq_lens, [2, 4, 0]))


SELF_TESTS: dict[str, Callable[[torch.device], str | None]] = {
    "prepare_prefill_inputs": prepare_prefill_inputs,
    "prepare_decode_inputs": prepare_decode_inputs,
    "update_draft_inputs": update_draft_inputs,
    "compute_slot_mappings": compute_slot_mappings,
    "eagle_step": eagle_step,
    "prepare_inputs_padded": prepare_inputs_padded,
    "prepare_next_token_padded": prepare_next_token_padded,
    "gumbel_sample": gumbel_sample,
    "copy_expand_inputs": copy_expand_inputs,
    "extend_queries": extend_queries,
    "dcp_local_seq_lens": dcp_local_seq_lens,
}
