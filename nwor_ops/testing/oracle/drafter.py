"""Oracle of family drafter in plain Python, one row at a time; `oracle` re-exports it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nwor_ops.testing.layouts import raw

PAD = -1


def _num_real(idx_mapping: Tensor | None, num_rows: int) -> int:
    if idx_mapping is None:
        return num_rows
    return sum(1 for state in idx_mapping[:num_rows].tolist() if state >= 0)


def prepare_prefill_inputs(
    target_input_ids, target_positions, target_query_start_loc, target_seq_lens, idx_mapping, num_sampled,
    num_rejected, last_sampled, next_prefill_tokens, input_ids, positions, query_start_loc, seq_lens,
    last_token_indices, current_draft_step,
) -> None:  # fmt: skip
    starts = target_query_start_loc.tolist()
    real = _num_real(idx_mapping, len(idx_mapping))
    for output in (input_ids, positions, seq_lens, last_token_indices, current_draft_step):
        output.zero_()
    query_start_loc.fill_(starts[real])
    for row in range(real):
        tokens = list(range(starts[row], starts[row + 1]))
        query_start_loc[row] = starts[row]
        seq_lens[row] = target_seq_lens[row]
        for token in tokens:
            positions[token] = target_positions[token]
        valid = tokens[: max(0, len(tokens) - int(num_rejected[row]))]
        if not valid:
            continue
        state = int(idx_mapping[row])
        for token in valid[:-1]:
            input_ids[token] = target_input_ids[token + 1]
        input_ids[valid[-1]] = (last_sampled if num_sampled[row] > 0 else next_prefill_tokens)[state]
        last_token_indices[row] = valid[-1]


def prepare_decode_inputs(
    draft_tokens, target_seq_lens, num_rejected, input_ids, positions, query_start_loc, seq_lens, max_model_len,
    idx_mapping=None, sample_positions=None, advance_positions=True,
) -> None:  # fmt: skip
    real = _num_real(idx_mapping, len(draft_tokens))
    query_start_loc.fill_(real)
    for row in range(real):
        query_start_loc[row] = row
    for row in range(len(seq_lens)):
        if row >= real:
            input_ids[row] = positions[row] = seq_lens[row] = 0
            if sample_positions is not None:
                sample_positions[row] = 0
            continue
        input_ids[row] = draft_tokens[row, 0]
        seq_lens[row] = target_seq_lens[row] - num_rejected[row]
        if sample_positions is not None:
            sample_positions[row] += 1
        if advance_positions:
            positions[row] = min(int(positions[row]) + 1, max_model_len - 1)
            seq_lens[row] = min(int(seq_lens[row]) + 1, max_model_len)


def update_draft_inputs(
    sampled, current_draft_step, draft_tokens, input_ids, positions, seq_lens, num_speculative_steps, max_model_len,
    idx_mapping=None, hidden_states=None, next_hidden_states=None, sample_positions=None, advance_positions=True,
) -> None:  # fmt: skip
    step = int(current_draft_step)
    for row in range(_num_real(idx_mapping, len(sampled))):
        draft_tokens[row, step] = sampled[row]
        if step >= num_speculative_steps - 1:
            continue
        input_ids[row] = sampled[row]
        if sample_positions is not None:
            sample_positions[row] += 1
        if hidden_states is not None:
            raw(next_hidden_states)[row] = raw(hidden_states)[row]
        if advance_positions:
            positions[row] = min(int(positions[row]) + 1, max_model_len - 1)
            seq_lens[row] = min(int(seq_lens[row]) + 1, max_model_len)


def _slot(table: Tensor, row: int, position: int, block_size: int) -> int:
    return int(table[row, position // block_size]) * block_size + position % block_size


def compute_slot_mappings(
    idx_mapping, query_start_loc, positions, block_tables, block_sizes, slot_mappings, cp_size=1, cp_rank=0,
    cp_interleave=1, cp_sharded=None,
) -> None:  # fmt: skip
    slot_mappings.fill_(PAD)
    for group, (table, block_size) in enumerate(zip(block_tables, block_sizes, strict=True)):
        sharded = cp_sharded is None or bool(cp_sharded[group])
        for row, state in enumerate(idx_mapping.tolist()):
            if state < 0 or block_size == 0:
                continue
            for token in range(int(query_start_loc[row]), int(query_start_loc[row + 1])):
                position = int(positions[token])
                if cp_size > 1 and sharded:
                    # Count the tokens of each rank up to this one; block tables cover cp_size * block_size tokens.
                    base = position - position % (block_size * cp_size)
                    ranks = [p // cp_interleave % cp_size for p in range(position - base + 1)]
                    if ranks[-1] != cp_rank:
                        continue
                    position = base // cp_size + ranks[:-1].count(cp_rank)
                slot_mappings[group, token] = _slot(table, state, position, block_size)


def eagle_step(positions, block_table, seq_lens, new_positions, slot_mapping, block_size, max_model_len) -> None:
    old_positions = positions.tolist()
    slot_mapping.fill_(PAD)
    for row, old in enumerate(old_positions):
        position = old + 1
        if position >= max_model_len:
            new_positions[row], seq_lens[row] = 0, 1
            continue
        column = min(position // block_size, block_table.size(1) - 1)
        slot_mapping[row] = int(block_table[row, column]) * block_size + position % block_size
        new_positions[row] = position
        seq_lens[row] = min(int(seq_lens[row]) + 1, max_model_len)


def prepare_inputs_padded(
    cu_num_draft_tokens, valid_sampled_count, query_start_loc, token_indices_to_sample, num_rejected, discarded=None
) -> None:
    token_indices_to_sample.zero_()
    num_rejected.zero_()
    before = 0
    for row, cumulative in enumerate(cu_num_draft_tokens.tolist()):
        drafts, before = cumulative - before, cumulative
        begin, end = query_start_loc[row : row + 2].tolist()
        valid = int(valid_sampled_count[row])
        if begin == end or (discarded is not None and discarded[row]) or (drafts and valid <= 0):
            continue
        rejected = max(drafts + 1 - valid, 0) if drafts else 0
        num_rejected[row] = rejected
        token_indices_to_sample[row] = max(end - 1 - rejected, 0)


def prepare_next_token_padded(
    sampled_token_ids, discarded, backup_next_token_ids, next_token_ids, valid_sampled_count, vocab_size
) -> None:
    next_token_ids.zero_()
    valid_sampled_count.zero_()
    for row, ids in enumerate(sampled_token_ids.tolist()):
        valid = [] if discarded[row] else [i for i in ids if 0 <= i < vocab_size]
        next_token_ids[row] = valid[-1] if valid else backup_next_token_ids[row]
        valid_sampled_count[row] = len(valid)


# ---------------------------------------------------------------- gumbel_sample

MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def _mix64(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def _hash32(keys: tuple[int, int], counters: Tensor) -> Tensor:
    """Return 32 random bits for each counter, as int64."""
    x = (counters * 0x9E3779B9 + keys[0]) & MASK32
    x = x ^ (x >> 16) ^ keys[1]
    x = (x * 0x21F0AAAD) & MASK32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK32
    return x ^ (x >> 15)


def noise(seed: int, position: int, step: int, vocab_size: int) -> list[float]:
    """Return the Gumbel noise of every token."""
    x = 0
    for part in (seed, position, step):
        x = _mix64(((x ^ part) + 0x9E3779B97F4A7C15) & MASK64)
    y = _mix64((x + 0x9E3779B97F4A7C15) & MASK64)
    tokens = torch.arange(vocab_size)
    of_pairs = _hash32((x & MASK32, x >> 32), tokens // 2)
    high = torch.where(tokens % 2 == 1, of_pairs >> 16, of_pairs & 0xFFFF)
    low = _hash32((y & MASK32, y >> 32), tokens)
    uniform = [(bits + 0.5) / 2**48 for bits in (high << 32 | low).tolist()]
    return [-math.log(-math.log1p(-u)) for u in uniform]


def _choose(logits: Tensor, temperature: float, noise_of_tokens: list[float] | None) -> int:
    logits = logits.float()
    scores = logits
    if noise_of_tokens is not None:
        scaled = logits / torch.tensor(temperature, dtype=torch.float32)
        scores = (scaled.double() + torch.tensor(noise_of_tokens, dtype=torch.float64)).float()
    scores = scores.masked_fill(scores.isnan(), -math.inf)
    return int((scores == scores.max()).nonzero()[0])


def gumbel_sample(
    logits, idx_mapping, temperature, seeds, positions, step, sampled, logits_cache=None, workspace=None
) -> None:
    for row in range(len(logits)):
        state = int(idx_mapping[row])
        of_row = int(step if step.numel() == 1 else step[row])
        token = 0
        if state >= 0:
            if logits_cache is not None:
                raw(logits_cache)[state, of_row, : logits.size(1)] = raw(logits)[row]
            draws = float(temperature[state]) >= 2.0**-126
            noise_of_tokens = noise(int(seeds[state]), int(positions[row]), of_row, logits.size(1)) if draws else None
            token = _choose(logits[row], float(temperature[state]), noise_of_tokens)
        if sampled.dim() == 2:
            sampled[row, of_row] = token
        else:
            sampled[row] = token


# ---------------------------------------------------------------- longer queries


def copy_expand_inputs(
    target_input_ids, target_positions, target_query_start_loc, num_rejected, next_token_ids, input_ids, positions,
    is_rejected, is_masked, new_token_indices, num_new_tokens=1, padding_token_id=0, mask_token_id=0,
    shift_input_ids=False, max_model_len=None, idx_mapping=None, hidden_state_mapping=None,
) -> None:  # fmt: skip
    """Build each request as a list of (id, rejected, masked), and concatenate the lists."""
    input_ids.fill_(padding_token_id)
    positions.zero_()
    is_rejected.fill_(True)
    is_masked.fill_(False)
    new_token_indices.zero_()
    if hidden_state_mapping is not None:
        hidden_state_mapping.fill_(-1)
    out = int(target_query_start_loc[0])
    for row in range(_num_real(idx_mapping, len(num_rejected))):
        begin, end = target_query_start_loc[row : row + 2].tolist()
        rejected = min(max(int(num_rejected[row]), 0), end - begin)
        total = end - begin + num_new_tokens - shift_input_ids
        if begin == end:
            out += total
            continue
        accepted = target_input_ids[begin : end - rejected].tolist()[1 if shift_input_ids else 0 :]
        bonus = int(next_token_ids[row if idx_mapping is None else int(idx_mapping[row])])
        made = [(token, False, False) for token in accepted]
        made += [(bonus, False, False)] + [(mask_token_id, False, True)] * (num_new_tokens - 1)
        for place in range(num_new_tokens):
            new_token_indices[row * num_new_tokens + place] = out + len(accepted) + place
        made += [(padding_token_id, True, False)] * (total - len(made))
        if hidden_state_mapping is not None:
            for place in range(end - begin):
                hidden_state_mapping[begin + place] = out + place
        for place, (token, is_dead, is_mask) in enumerate(made[:total]):
            position = int(target_positions[begin]) + place
            positions[out + place] = position if max_model_len is None else min(position, max_model_len - 1)
            input_ids[out + place], is_rejected[out + place], is_masked[out + place] = token, is_dead, is_mask
        out += total


def extend_queries(
    target_query_start_loc, target_seq_lens, positions, is_rejected, block_table, query_start_loc, seq_lens,
    slot_mapping, block_size, max_model_len, num_new_tokens=1, idx_mapping=None,
) -> None:  # fmt: skip
    real = _num_real(idx_mapping, len(target_seq_lens))
    starts = [int(start) + row * num_new_tokens for row, start in enumerate(target_query_start_loc[: real + 1])]
    seq_lens.zero_()
    slot_mapping.fill_(PAD)
    query_start_loc.fill_(starts[real])
    for row in range(real):
        query_start_loc[row] = starts[row]
        seq_lens[row] = min(int(target_seq_lens[row]) + num_new_tokens, max_model_len)
        for token in range(starts[row], starts[row + 1]):
            if not is_rejected[token] and positions[token] < max_model_len:
                slot_mapping[token] = _slot(block_table, row, int(positions[token]), block_size)


def dcp_local_seq_lens(seq_lens, local_seq_lens, dcp_size, dcp_rank, cp_interleave=1) -> None:
    lengths = seq_lens.tolist()
    local_seq_lens.zero_()
    for row, length in enumerate(lengths):
        local_seq_lens[row] = sum(1 for token in range(length) if token // cp_interleave % dcp_size == dcp_rank)


def gather_step_tokens(
    input_ids, query_start_loc, cu_num_logits, idx_mapping, num_sampled, last_sampled, sampled_tokens, context_tokens
) -> None:  # fmt: skip
    sampled_tokens.fill_(-1)
    context_tokens.fill_(-1)
    starts, logits = query_start_loc.tolist(), cu_num_logits.tolist()
    for row in range(_num_real(idx_mapping, len(idx_mapping))):
        tokens = list(range(starts[row], starts[row + 1]))
        num_context = len(tokens) - min(max(logits[row + 1] - logits[row] - 1, 0), len(tokens))
        for token in tokens[:num_context]:
            if token < len(context_tokens):
                context_tokens[token] = input_ids[token]
        accepted = int(num_sampled[row]) - 1
        sampled = [int(input_ids[token]) for token in tokens[num_context:]][: max(accepted, 0)]
        sampled += [-1] * (accepted - len(sampled))
        if accepted >= 0:
            sampled.append(int(last_sampled[int(idx_mapping[row])]))
        for column, token in enumerate(sampled[: sampled_tokens.shape[1]]):
            sampled_tokens[row, column] = token


# ---------------------------------------------------------------- draft vocabulary


def update_draft_vocabulary(
    sampled_tokens, head, token_ids, row_of_token, weight, used, hand, counters, prompt_tokens=None, first_token=0
) -> None:
    rows, vocab_size = len(token_ids), len(head)
    prompt = [] if prompt_tokens is None else prompt_tokens.tolist()
    prompt, sampled = (
        [token - first_token for token in tokens if 0 <= token - first_token < vocab_size]
        for tokens in (prompt, sampled_tokens.tolist())
    )
    row_of = {token: row for token, row in enumerate(row_of_token[:vocab_size].tolist()) if row >= 0}
    counters[0] += len(sampled)
    counters[1] += sum(token not in row_of for token in sampled)
    touched = {row_of[token] for token in prompt + sampled if token in row_of}
    marks = set(touched) | {row for row in range(rows) if used[row // 32].item() >> row % 32 & 1}
    missing = dict.fromkeys(token for token in reversed(prompt + sampled) if token not in row_of)
    entering = list(missing)[: min(max(rows // 2, 1), rows - len(touched))]
    place = hand[0].item()
    for token in reversed(entering):
        while place in marks:
            if place not in touched:
                marks.remove(place)
            place = (place + 1) % rows
        row_of_token[int(token_ids[place]) - first_token] = -1
        token_ids[place], row_of_token[token] = token + first_token, place
        weight.view(torch.uint8)[place] = head.view(torch.uint8)[token]
        touched.add(place)
        marks.add(place)
        place = (place + 1) % rows
    hand[0] = place
    for word in range(-(-rows // 32)):
        bits = sum(1 << bit for bit in range(32) if word * 32 + bit in marks)
        used[word] = bits - 2**32 if bits >= 2**31 else bits


def argmax_draft_tokens(logits, token_ids, tokens, values=None) -> None:
    for row, of_row in enumerate(logits.float().tolist()):
        best = max((logit for logit in of_row if not math.isnan(logit)), default=-math.inf)
        drawn = [int(token) for token, logit in zip(token_ids, of_row, strict=False) if logit == best > -math.inf]
        tokens[row] = min(drawn, default=0)
        if values is not None:
            values[row] = best + 0.0


def expand_draft_logits(logits, row_of_token, out) -> None:
    out.fill_(-math.inf)
    for token, row in enumerate(row_of_token.tolist()):
        if row >= 0:
            raw(out)[:, token] = raw(logits)[:, row]
