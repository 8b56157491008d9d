"""The recurrent ops in plain Python; `oracle` exports them.

Plans are exactly equal. States and outputs are computed with torch in float32, one token and one head at a time. Their
order differs from the kernels', so they are equal up to rounding. Reapplied rows need no sums, so on the CPU they are
bit-identical.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# ---------------------------------------------------------------- plans


def plan_recurrent_window(
    plan,
    cursors,
    window_id,
    state_slots,
    query_start_loc,
    num_kept,
    record_rows,
    is_window=None,
    num_skipped=None,
    chunk=0,
) -> None:
    plan.zero_()
    starts = query_start_loc.tolist()
    for request, slot in enumerate(state_slots.tolist()):
        tokens = starts[request + 1] - starts[request]
        if slot <= 0 or tokens == 0:
            continue
        pending, first, *earlier = cursors[slot].tolist()
        if is_window is not None and not is_window[request]:
            cursors[slot, [0, *range(2, cursors.shape[1])]] = 0
            continue
        rows = sum(earlier) + (int(num_kept[request]) if pending else 0)
        stores = rows >= chunk
        plan[request] = torch.tensor([slot, rows, first, slot if stores else 0])
        if not chunk:
            cursors[slot] = torch.tensor([tokens, 1 - first])
        elif stores:
            cursors[slot] = torch.tensor([tokens, (first + chunk) % (chunk - 1 + 2 * record_rows), rows - chunk])
        else:
            cursors[slot] = torch.tensor([tokens, first, rows])
    window_id += 1


def plan_recurrent_fold(plan, cursors, source_slots, target_slots, num_rows, keep_source=False) -> None:
    plan.zero_()
    before = cursors.tolist()
    for entry, (source, target) in enumerate(zip(source_slots.tolist(), target_slots.tolist(), strict=False)):
        if source <= 0 or target <= 0:
            continue
        pending, first, *earlier = before[source]
        rows = sum(earlier) + max(min(int(num_rows[entry]), pending), 0)
        if rows > 0 or source != target:
            plan[entry] = torch.tensor([source, rows, first, target])
        counts = [0, *range(2, cursors.shape[1])]
        cursors[target, counts] = 0
        if source != target and not keep_source:
            cursors[source, counts] = 0


def plan_recurrent_block_fold(
    plan,
    cursors,
    block_tables,
    idx_mapping,
    source_columns,
    num_kept,
    target_columns=None,
    num_computed_tokens=None,
    block_size=0,
    moves_rows=False,
    num_skipped=None,
) -> None:
    folds = []
    for table, row in itertools.product(block_tables, idx_mapping.tolist()):
        source, target, rows = -1, -1, 0
        if row >= 0 and target_columns is not None:
            source, target, rows = (int(of_rows[row]) for of_rows in (source_columns, target_columns, num_kept))
        elif row >= 0:
            source, tokens = int(source_columns[row]), int(num_computed_tokens[row])
            before = tokens - int(num_kept[row])  # tokens before the last window
            target = tokens // block_size - 1
            rows = (target + 1) * block_size - before
        moves = min(source, target) >= 0 and (source != target if target_columns is not None else rows > 0)
        folds.append((int(table[row, source]), int(table[row, target]), rows) if moves else (0, 0, 0))
    sources, targets, num_rows = torch.tensor(folds, dtype=torch.int32).view(-1, 3).unbind(1)
    plan_recurrent_fold(plan, cursors, sources, targets, num_rows, num_computed_tokens is not None)
    if moves_rows:
        for _, moved, first, target in plan.tolist():
            if target > 0:
                cursors[target] = torch.tensor([0, first, moved])


# ---------------------------------------------------------------- one token of one head


def decay_of(
    A_log: Tensor, x: Tensor, softplus_beta: float, softplus_threshold: float, gate_lower_bound: float | None = None
) -> Tensor:
    if gate_lower_bound is not None:
        return torch.exp(gate_lower_bound * torch.sigmoid(torch.exp(A_log) * x))
    softplus = torch.nn.functional.softplus(x, softplus_beta, softplus_threshold)
    return torch.exp(-torch.exp(A_log) * softplus)


def normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row divided by its norm, and the factor."""
    factor = torch.rsqrt((x * x).sum() + 1e-6)
    return x * factor, factor


def forward_token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor):
    """Return the state [dv, dk] after a token, its output [dv] and its update [dv], by vLLM's formula."""
    state = state * decay
    update = (v - state @ k) * beta
    state = state + update[:, None] * k[None, :]
    return state, state @ q, update


def place_of(record_keys: Tensor, first: int, row: int) -> tuple[int, int, int]:
    """Return the half and row of keys, norms and decays, and the row of updates, of row `row` from `first` on."""
    halves, rows = record_keys.shape[1:3]
    if halves == 2:
        return first, row, row
    return 0, (first + row) % rows, (first + row) % rows


def reapplied(
    state, record_keys, record_norms, record_decays, record_updates, slot, rows, first, head, chunk=0
) -> Tensor:
    """Return the state [dv, dk] of one head with the first rows of a record applied. `chunk` rows are a chunk."""
    key_head = head // (state.shape[1] // record_keys.shape[3])
    h = state[slot, head].float()
    for number in range(rows):
        half, row, update_row = place_of(record_keys, first, number)
        key = record_keys[slot, half, row, key_head].float() * record_norms[slot, half, row, key_head]
        h = h * record_decays[slot, half, row, head] + record_updates[slot, update_row, head][:, None] * key[None, :]
        if number + 1 == chunk:
            h = h.to(state.dtype).float()
    return h


# ---------------------------------------------------------------- the ops of a layer


def gated_delta_verify(
    out, state, record_keys, record_norms, record_decays, record_updates, layer_window, q, k, v, a, b, A_log, dt_bias,
    plan, window_id, query_start_loc, scale, softplus_beta=1.0, softplus_threshold=20.0, use_qk_l2norm=True, gate=None,
    norm_weight=None, norm_eps=1e-5, gate_activation="silu", all_states=None, allow_neg_eigval=False,
    gate_lower_bound=None, chunk=0,
) -> None:  # fmt: skip
    record = (record_keys, record_norms, record_decays, record_updates)
    starts = query_start_loc.tolist()
    for request, (begin, end) in enumerate(itertools.pairwise(starts)):
        source, rows, first, target = plan[request].tolist()
        if target <= 0 and (source <= 0 or not chunk):
            out[begin:end] = 0
            continue
        if begin == end:
            continue
        for head in range(state.shape[1]):
            key_head = head // (state.shape[1] // q.shape[1])
            h = reapplied(state, *record, source, rows, first, head, chunk)
            if target > 0 and chunk:
                state[target, head] = reapplied(state, *record, source, chunk, first, head)
            elif target > 0:
                state[target, head] = h
                h = state[target, head].float()
            before = rows - chunk if chunk and target > 0 else rows  # rows of the chunk before the window
            slot = max(target, 0) or source
            next_first = (first + rows) % record_keys.shape[2] if chunk else 1 - first
            for token in range(begin, end):
                if chunk and before + token - begin == chunk:
                    h = h.to(state.dtype).float()
                half, row, update_row = place_of(record_keys, next_first, token - begin)
                query, key = q[token, key_head].float(), k[token, key_head].float()
                factor = torch.ones(())
                if use_qk_l2norm:
                    query, _ = normalised(query)
                    key, factor = normalised(key)
                if A_log is None:
                    decay, beta = torch.exp(a[token, head].float()), b[token, head].float()
                else:
                    x = a[token, head].float() + dt_bias[head].float()
                    decay = decay_of(A_log[head].float(), x, softplus_beta, softplus_threshold, gate_lower_bound)
                    beta = torch.sigmoid(b[token, head].float()) * (2 if allow_neg_eigval else 1)
                h, output, update = forward_token(h, query * scale, key, v[token, head].float(), decay, beta)
                if all_states is not None:
                    all_states[token, head] = h
                record_keys[slot, half, row, key_head] = k[token, key_head]
                record_norms[slot, half, row, key_head] = factor
                record_decays[slot, half, row, head] = decay
                record_updates[slot, update_row, head] = update
                out[token, head] = output
                if gate is not None:
                    output = out[token, head].float()  # rounded, as a separate norm would read it
                    output = output * torch.rsqrt((output * output).mean() + norm_eps) * norm_weight.float()
                    x = gate[token, head].float()
                    out[token, head] = output * torch.sigmoid(x) * (x if gate_activation == "silu" else 1)
    layer_window.copy_(window_id)


def gated_delta_fold(
    states, record_keys, record_norms, record_decays, record_updates, layer_windows, plan, window_id=None, chunk=0
) -> None:
    for layer, state in enumerate(states):
        if window_id is not None and layer_windows[layer] == window_id:
            continue
        record = (record_keys[layer], record_norms[layer], record_decays[layer], record_updates[layer])
        for source, rows, first, target in plan.tolist():
            if target <= 0:
                continue
            for head in range(state.shape[1]):
                state[target, head] = reapplied(state, *record, source, rows, first, head, chunk)
        if window_id is not None and len(plan):
            layer_windows[layer].copy_(window_id)
