"""Calls of the self-test, in plain numbers: the arguments of an op, and what it must write and return.

:mod:`nwor_ops.cli.self_test` makes tensors of them. Dtypes come from the tables in ``meta/``. An output that is not
among the arguments has 77 in every element before the call. So 77 in a result means that the op did not write it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNTOUCHED = 77
PAD = -1


@dataclass(frozen=True)
class Call:
    """One call of an op, with results worked out by hand. Lists stand for tensors and for lists of tensors."""

    op: str
    arguments: dict[str, Any]
    results: dict[str, Any]


# ---------------------------------------------------------------- undo, accept, staging

# Two requests: a target and drafts 60 to 62; a prompt token, a target and drafts 70 and 71.
QUERY_START_LOC = [0, 4, 8]
CU_NUM_DRAFT_TOKENS = [3, 5]
DRAFT_START_LOC = [0, 3, 5]
DRAFT_TOKEN_IDS = [60, 61, 62, 70, 71]
SLOTS = [8, 9, 10, 11, 17, 18, 19, PAD]
LOG_ROWS = [-1, 0, 1, 2, -1, -1, 3, 4]
ROW_SLOTS = [9, 10, 11, 19, PAD, PAD]
# The first request accepts one draft, the second none.
SAMPLED_TOKEN_IDS = [[60, 99, -1, -1], [98, -1, -1, -1]]
NUM_REJECTED = [2, 2]
ACCEPTED = [True, False, False, False, False]
REJECTED_ROWS = [False, True, True, True, True, False]
STAYING = (0, 1, 4, 5)  # tokens that are no rejected drafts

TOKENS = [50 + token for token in range(8)]  # the number of each token's row
CACHE = list(range(24))  # the number of each slot's row, before the step


def row(number: int) -> list[list[int]]:
    """A row [heads, width] that no other number has."""
    return [[number, number + 1], [number + 2, number + 3]]


def rows(numbers: list[int]) -> list[Any]:
    return [row(number) for number in numbers]


def pages(numbers: list[int], block_size: int = 8) -> list[Any]:
    """A cache [blocks, block_size, heads, width], from the number of each slot."""
    return [rows(numbers[start : start + block_size]) for start in range(0, len(numbers), block_size)]


def written(tokens: tuple[int, ...] = tuple(range(7)), more: int = 0) -> list[Any]:
    """The cache after a write of these tokens. `more` tells values from keys."""
    numbers = [number + more for number in CACHE]
    for token in tokens:
        numbers[SLOTS[token]] = TOKENS[token] + more
    return pages(numbers)


VALUES = 24  # a value's row has this number more than the key's
WRITE: dict[str, Any] = {
    "key": rows(TOKENS), "value": rows([number + VALUES for number in TOKENS]),
    "key_cache": written(()), "value_cache": written((), VALUES), "slot_mapping": SLOTS,
    "k_scale": [1], "v_scale": [1], "kv_cache_dtype": "auto",
}  # fmt: skip
WRITTEN = {"key_cache": written(), "value_cache": written(more=VALUES)}
NO_ROW = [[UNTOUCHED] * 2] * 2
LOG = [*rows([9, 10, 11, 19]), NO_ROW, NO_ROW]
VALUE_LOG = [*rows([number + VALUES for number in (9, 10, 11, 19)]), NO_ROW, NO_ROW]
STAGED = [*rows([51, 52, 53, 56, 57]), NO_ROW]
STAGED_VALUES = [*rows([number + VALUES for number in (51, 52, 53, 56, 57)]), NO_ROW]
LOGGED: dict[str, Any] = {"caches": [written()], "log": [LOG], "row_slots": ROW_SLOTS}
RESTORED = {"caches": [written(STAYING)]}
COUNTED = {"row_rejected": REJECTED_ROWS, "num_accepted": [1, 0, 0], "counters": [0, 0, 1, 4, 0]}
NO_COUNTS = [0] * 5
STAGED_WINDOW: dict[str, Any] = {
    "row_slots": [5, 6, 7], "window_id": [3], "row_windows": [[3, 3, 3], [3, 2, 3]], "num_slots": 24,
    "counters": [0] * 6,
}  # fmt: skip

CALLS: tuple[Call, ...] = (
    Call("write_kv", WRITE, WRITTEN),
    Call("write_kv_logged", WRITE | {"log_rows": LOG_ROWS}, WRITTEN | {"key_log": LOG, "value_log": VALUE_LOG}),
    Call("log_slots", {"cache": written(()), "slot_mapping": SLOTS, "log_rows": LOG_ROWS}, {"log": LOG}),
    Call("restore_slots", LOGGED | {"row_rejected": REJECTED_ROWS}, RESTORED),
    Call(
        "restore_slots_from_rejected",
        LOGGED | {"num_rejected": NUM_REJECTED, "draft_start_loc": DRAFT_START_LOC, "counters": NO_COUNTS},
        RESTORED | COUNTED,
    ),
    Call(
        "plan_window",
        {
            "query_start_loc": QUERY_START_LOC, "cu_num_draft_tokens": CU_NUM_DRAFT_TOKENS, "slot_mappings": [SLOTS],
            "counters": NO_COUNTS,
        },
        {
            "log_rows": LOG_ROWS, "row_slots": [ROW_SLOTS], "row_requests": [0, 0, 0, 1, 1, -1],
            "row_positions": [0, 1, 2, 0, 1, -1], "counters": [1, 5, 0, 0, 0], "draft_start_loc": [0, 3, 5, 5],
        },
    ),
    Call(
        "acceptance_mask",
        {
            "draft_token_ids": DRAFT_TOKEN_IDS, "sampled_token_ids": SAMPLED_TOKEN_IDS,
            "draft_start_loc": DRAFT_START_LOC,
        },
        {"accepted": ACCEPTED, "num_accepted": [1, 0]},
    ),
    Call(
        "acceptance_mask_from_rejected",
        {"num_rejected": NUM_REJECTED, "draft_start_loc": DRAFT_START_LOC, "num_draft_tokens": 5},
        {"accepted": ACCEPTED, "num_accepted": [1, 0]},
    ),
    Call(
        "reject_rows",
        {
            "draft_token_ids": DRAFT_TOKEN_IDS, "sampled_token_ids": SAMPLED_TOKEN_IDS,
            "draft_start_loc": DRAFT_START_LOC, "counters": NO_COUNTS,
        },
        COUNTED,
    ),
    Call(
        "reject_rows_from_rejected",
        {"num_rejected": NUM_REJECTED, "draft_start_loc": DRAFT_START_LOC, "counters": NO_COUNTS},
        COUNTED,
    ),
    Call(
        "stage_kv",
        {"key": WRITE["key"], "value": WRITE["value"], "stage_rows": LOG_ROWS},
        {"staged_key": STAGED, "staged_value": STAGED_VALUES},
    ),
    # One of two layers has not staged row 1, so that row may be rejected but not accepted.
    Call(
        "accept_staged",
        STAGED_WINDOW | {"row_accepted": [True, False, True]},
        {"row_committed": [True, False, True], "counters": [1, 3, 5, 2, 1, 0]},
    ),
    Call(
        "accept_staged",
        STAGED_WINDOW | {"row_accepted": [False, True, False]},
        {"row_committed": [False, False, False], "counters": [1, 3, 5, 0, 3, 1]},
    ),
    Call(
        "commit_staged",
        {
            "staged_key": STAGED, "staged_value": STAGED_VALUES, "row_slots": ROW_SLOTS,
            "row_accepted": [*ACCEPTED, True], "key_cache": WRITE["key_cache"], "value_cache": WRITE["value_cache"],
            "k_scale": [1], "v_scale": [1], "kv_cache_dtype": "auto",
        },
        {"key_cache": written((1,)), "value_cache": written((1,), VALUES)},
    ),
    # Swap two slots, and copy the old contents of one to a third.
    Call(
        "move_slots",
        {"caches": [pages(CACHE)], "src_slots": [3, 17, 3], "dst_slots": [17, 3, 9]},
        {"caches": [pages([*CACHE[:3], 17, *CACHE[4:9], 3, *CACHE[10:17], 3, *CACHE[18:]])]},
    ),
)  # fmt: skip

# ---------------------------------------------------------------- shadow

# One request: a target at position 5 and drafts at 6 and 7, in block 2 (slots 8 to 11) with shadow page 3.
# The first draft is accepted.
IN_PLACE: dict[str, Any] = {"slot_mappings": [[9, 10, 11]], "block_tables": [[[0, 2]]]}
REDIRECTED: dict[str, Any] = {"slot_mappings": [[13, 14, 15]], "block_tables": [[[0, 3]]]}
PAGES_OF_WINDOW: dict[str, Any] = {
    "planes_per_group": [1], "query_start_loc": [0, 3], "draft_start_loc": [0, 2], "shadow_blocks": [[[3]]],
}  # fmt: skip
RECORDED: dict[str, Any] = {"saved_slots": [[9, 10, 11]], "tail_pages": [[1]]}
OPEN = [*range(12), 8, 50, 51, 52]  # after the forward: the committed row, the target, and the drafts
CLOSED = [*range(9), 50, 51, 11, 8, 50, 51, 52]

CALLS += (
    Call(
        "open_window",
        PAGES_OF_WINDOW | IN_PLACE
        | {"caches": [pages(list(range(16)), 4)], "seq_lens": [8], "row_slots": [[10, 11]]},
        REDIRECTED | RECORDED | {"caches": [pages([*range(12), 8, 13, 14, 15], 4)]},
    ),
    Call(
        "close_window",
        PAGES_OF_WINDOW | REDIRECTED | RECORDED | {"caches": [pages(OPEN, 4)], "row_rejected": [False, True]},
        IN_PLACE | {"caches": [pages(CLOSED, 4)]},
    ),
    Call(
        "close_window_from_rejected",
        PAGES_OF_WINDOW | REDIRECTED | RECORDED
        | {"caches": [pages(OPEN, 4)], "num_rejected": [1], "counters": NO_COUNTS},
        IN_PLACE
        | {
            "caches": [pages(CLOSED, 4)], "row_rejected": [False, True], "num_accepted": [1],
            "counters": [0, 0, 1, 1, 0],
        },
    ),
)  # fmt: skip

# ---------------------------------------------------------------- drafter

# Rows are two requests, and a padded row if the op supports padded rows.

# The token that the noise of (seed, position, step) chooses among 64 equal logits. See `noise` in
# nwor_ops/testing/oracle/drafter.py.
VOCABULARY = 64
DRAWS = ((0, 0, 0, 61), (1, 7, 0, 33), (2**40, 7, 1, 45), (2**40, 8, 1, 17))
LOGITS = [[0] * VOCABULARY] * 4 + [[int(token in (5, 9)) for token in range(VOCABULARY)], [0] * VOCABULARY]
NO_LOGITS = [UNTOUCHED] * VOCABULARY

CALLS += (
    # A request of four tokens, the last one rejected, and two tokens of a prompt that continues.
    Call(
        "prepare_prefill_inputs",
        {
            "target_input_ids": [10, 11, 12, 13, 20, 21], "target_positions": [5, 6, 7, 8, 0, 1],
            "target_query_start_loc": [0, 4, 6, 6], "target_seq_lens": [9, 2, 77], "idx_mapping": [1, 0, -1],
            "num_sampled": [2, 0, 77], "num_rejected": [1, 0, 77], "last_sampled": [50, 51],
            "next_prefill_tokens": [60, 61],
        },
        {
            "input_ids": [11, 12, 51, 0, 21, 60, 0, 0], "positions": [5, 6, 7, 8, 0, 1, 0, 0],
            "query_start_loc": [0, 4, 6, 6], "seq_lens": [9, 2, 0], "last_token_indices": [2, 5, 0],
            "current_draft_step": [0],
        },
    ),
    # The model has at most 10 tokens, and the second request reaches them.
    Call(
        "prepare_decode_inputs",
        {
            "draft_tokens": [[70, 1], [71, 2], [72, 3]], "target_seq_lens": [9, 10, 77], "num_rejected": [1, 0, 77],
            "positions": [7, 9, 77], "max_model_len": 10, "idx_mapping": [4, 2, -1],
            "sample_positions": [100, 200, 77],
        },
        {
            "input_ids": [70, 71, 0], "positions": [8, 9, 0], "query_start_loc": [0, 1, 2, 2],
            "seq_lens": [9, 10, 0], "sample_positions": [101, 201, 0],
        },
    ),
    # Step 1 of 3.
    Call(
        "update_draft_inputs",
        {
            "sampled": [70, 71, 72], "current_draft_step": [1], "positions": [8, 9, 0], "seq_lens": [9, 10, 0],
            "num_speculative_steps": 3, "max_model_len": 10, "idx_mapping": [4, 2, -1],
            "hidden_states": [[1, 2], [3, 4], [5, 6]], "sample_positions": [1, 2, 3],
        },
        {
            "draft_tokens": [[77, 70, 77], [77, 71, 77], [77, 77, 77]], "input_ids": [70, 71, 77],
            "positions": [9, 9, 0], "seq_lens": [10, 10, 0], "next_hidden_states": [[1, 2], [3, 4], [77, 77]],
            "sample_positions": [2, 3, 3],
        },
    ),
    # Two groups, with blocks of 4 and of 8. The row in the middle is padded.
    Call(
        "compute_slot_mappings",
        {
            "idx_mapping": [1, -1, 0], "query_start_loc": [0, 2, 3, 5], "positions": [3, 4, 9, 0, 5],
            "block_tables": [[[10, 11], [20, 21]], [[1], [2]]], "block_sizes": [4, 8],
        },
        {"slot_mappings": [[83, 84, PAD, 40, 45, PAD, PAD], [19, 20, PAD, 8, 13, PAD, PAD]]},
    ),
    # Blocks of 4, and a model of at most 10 tokens, which the third request reaches.
    Call(
        "eagle_step",
        {
            "positions": [3, 7, 9], "block_table": [[10, 11, 12], [20, 21, 22], [30, 31, 32]],
            "seq_lens": [4, 8, 10, 77], "block_size": 4, "max_model_len": 10,
        },
        {"seq_lens": [5, 9, 1, 77], "new_positions": [4, 8, 0, 77], "slot_mapping": [44, 88, PAD, PAD]},
    ),
    # A request with one of three drafts accepted, one without drafts, and one with two drafts and nothing sampled.
    Call(
        "prepare_inputs_padded",
        {"cu_num_draft_tokens": [3, 3, 5], "valid_sampled_count": [2, 1, 0], "query_start_loc": [0, 4, 5, 8]},
        {"token_indices_to_sample": [1, 4, 0, 0], "num_rejected": [2, 0, 0, 0]},
    ),
    # Ids below 50 are valid.
    Call(
        "prepare_next_token_padded",
        {
            "sampled_token_ids": [[5, 6, -1], [-1, -1, -1], [7, 99, -1], [5, 6, 7]],
            "discarded": [False, False, False, True], "backup_next_token_ids": [40, 41, 42, 43], "vocab_size": 50,
        },
        {"next_token_ids": [6, 41, 7, 43, 0], "valid_sampled_count": [2, 0, 1, 0, 0]},
    ),
    # Four draws that depend only on the noise, one at temperature 0, and a padded row.
    Call(
        "gumbel_sample",
        {
            "logits": LOGITS, "idx_mapping": [0, 1, 2, 3, 4, -1], "temperature": [1, 1, 1, 1, 0, 1],
            "seeds": [*(seed for seed, _, _, _ in DRAWS), 3, 3],
            "positions": [*(position for _, position, _, _ in DRAWS), 7, 7],
            "step": [*(step for _, _, step, _ in DRAWS), 0, 0],
        },
        {
            "sampled": [[61, 77], [33, 77], [77, 45], [77, 17], [5, 77], [0, 77]],
            "logits_cache": [
                [LOGITS[0], NO_LOGITS], [LOGITS[1], NO_LOGITS], [NO_LOGITS, LOGITS[2]], [NO_LOGITS, LOGITS[3]],
                [LOGITS[4], NO_LOGITS], [NO_LOGITS, NO_LOGITS],
            ],
        },
    ),
    # Each of two requests gets its bonus token and a mask token. The first one rejects its last token.
    Call(
        "copy_expand_inputs",
        {
            "target_input_ids": [10, 11, 12, 13, 20, 21], "target_positions": [5, 6, 7, 8, 0, 1],
            "target_query_start_loc": [0, 4, 6], "num_rejected": [1, 0], "next_token_ids": [51, 60],
            "num_new_tokens": 2, "padding_token_id": 9, "mask_token_id": 8,
        },
        {
            "input_ids": [10, 11, 12, 51, 8, 9, 20, 21, 60, 8, 9, 9],
            "positions": [5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 0, 0],
            "is_rejected": [place in (5, 10, 11) for place in range(12)],
            "is_masked": [place in (4, 9) for place in range(12)], "new_token_indices": [3, 4, 8, 9],
        },
    ),
    # Queries of 4 and 2 tokens grow by one, with blocks of 4 and a model of at most 9 tokens.
    Call(
        "extend_queries",
        {
            "target_query_start_loc": [0, 4, 6, 6], "target_seq_lens": [9, 2, 77],
            "positions": [5, 6, 7, 8, 9, 0, 1, 2], "is_rejected": [False] * 4 + [True] + [False] * 3,
            "block_table": [[10, 11, 12], [20, 21, 22], [30, 31, 32]], "block_size": 4, "max_model_len": 9,
            "num_new_tokens": 1, "idx_mapping": [4, 2, -1],
        },
        {
            "query_start_loc": [0, 5, 8, 8], "seq_lens": [9, 3, 0],
            "slot_mapping": [45, 46, 47, 48, PAD, 80, 81, 82, PAD, PAD],
        },
    ),
    # The second of two ranks, which take turns of two tokens.
    Call(
        "dcp_local_seq_lens",
        {"seq_lens": [5, 9], "dcp_size": 2, "dcp_rank": 1, "cp_interleave": 2},
        {"local_seq_lens": [2, 4, 0]},
    ),
)  # fmt: skip
