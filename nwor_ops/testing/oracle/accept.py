"""The ops of family accept in plain Python."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

WINDOWS, DRAFTED, ACCEPTED, REJECTED = range(4)  # indices in `counters`


def drafts_of_requests(draft_start_loc: Tensor) -> list[range]:
    """For each request, the indices of its drafts in the batch."""
    return [range(start, end) for start, end in itertools.pairwise(draft_start_loc.tolist())]


def plan_window(
    query_start_loc, cu_num_draft_tokens, slot_mappings, log_rows, row_slots, row_requests,
    row_positions, counters, draft_start_loc, token_offset=None, num_bonus_tokens=0, leading_zero=False,
) -> None:  # fmt: skip
    counts = cu_num_draft_tokens.tolist()[int(leading_zero) :]
    starts = [0, *(count - num_bonus_tokens * (q + 1) for q, count in enumerate(counts))]
    for place in range(len(draft_start_loc)):
        draft_start_loc[place] = starts[min(place, len(counts))]
    for output in (log_rows, row_slots, row_requests, row_positions):
        output.fill_(-1)
    counters[WINDOWS] += 1
    for request, drafts in enumerate(drafts_of_requests(draft_start_loc[: len(starts)])):
        first_token = int(query_start_loc[request + 1]) - len(drafts)
        for position, row in enumerate(drafts):
            row_requests[row] = request
            row_positions[row] = position
            token = first_token + position - (token_offset or 0)
            if 0 <= token < len(slot_mappings[0]):  # otherwise another micro-batch counts it
                counters[DRAFTED] += 1
                log_rows[token] = row
                for group, slot_mapping in enumerate(slot_mappings):
                    row_slots[group, row] = max(-1, int(slot_mapping[token]))


def acceptance_mask(draft_token_ids, sampled_token_ids, draft_start_loc):
    accepted = torch.zeros(len(draft_token_ids), dtype=torch.bool)
    num_accepted = torch.zeros(len(draft_start_loc) - 1, dtype=torch.int32)
    for request, drafts in enumerate(drafts_of_requests(draft_start_loc)):
        sampled = sampled_token_ids[request].tolist()
        for position, draft in enumerate(drafts):
            token = sampled[position] if position < len(sampled) else -1
            went_on = position + 1 >= len(sampled) or sampled[position + 1] >= 0
            if token < 0 or token != int(draft_token_ids[draft]) or not went_on:
                break
            accepted[draft] = True
            num_accepted[request] += 1
    return accepted, num_accepted


def acceptance_mask_from_rejected(num_rejected, draft_start_loc, num_draft_tokens):
    accepted = torch.zeros(num_draft_tokens, dtype=torch.bool)
    num_accepted = torch.zeros(len(draft_start_loc) - 1, dtype=torch.int32)
    for request, drafts in enumerate(drafts_of_requests(draft_start_loc)):
        rejected = min(max(int(num_rejected[request]), 0), len(drafts))
        num_accepted[request] = len(drafts) - rejected
        for draft in drafts[: len(drafts) - rejected]:
            accepted[draft] = True
    return accepted, num_accepted


def _mark_rejected(accepted, num_accepted_of_requests, draft_start_loc, row_rejected, num_accepted, counters):
    row_rejected.fill_(False)
    num_accepted.fill_(0)
    num_accepted[: len(num_accepted_of_requests)] = num_accepted_of_requests
    for row in range(int(draft_start_loc[-1])):
        row_rejected[row] = not accepted[row]
        counters[ACCEPTED if accepted[row] else REJECTED] += 1


def reject_rows(draft_token_ids, sampled_token_ids, draft_start_loc, row_rejected, num_accepted, counters) -> None:
    accepted, of_requests = acceptance_mask(draft_token_ids, sampled_token_ids, draft_start_loc)
    _mark_rejected(accepted, of_requests, draft_start_loc, row_rejected, num_accepted, counters)


def reject_by_counts(num_rejected, draft_start_loc, row_rejected, num_accepted, counters) -> None:
    accepted, of_requests = acceptance_mask_from_rejected(num_rejected, draft_start_loc, int(draft_start_loc[-1]))
    _mark_rejected(accepted, of_requests, draft_start_loc, row_rejected, num_accepted, counters)
