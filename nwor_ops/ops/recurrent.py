"""Family ``recurrent``: linear-attention layers verify drafts with one recurrent state per request.

A rejected draft token cannot be removed from a recurrent state. So engines keep a state for each draft token. Here a
request has one state, and a *record* of its last window. For each token, the record holds the key, 1 / |key|, the decay
and the update ``u = beta * (v - S k)``.

The next step reads the state and reapplies the accepted rows of the record: ``S = S * decay + u k^T``, without dot
products. It stores the result once. Then it runs its own window in registers, for the outputs and a new record.
Rejected tokens are never written to the state. In the exact form, all results are bit-identical to a scheme that stores
the state after every token.

A step calls :func:`plan_recurrent_window` once and :func:`gated_delta_verify` for each layer. It needs no call
afterwards, because the next plan takes the number of tokens that stay. :func:`plan_recurrent_fold` and
:func:`gated_delta_fold` apply pending rows immediately, before anything else reads a state.

Letters as in :mod:`nwor_ops.ops`, and: S slots of states, W rows of a record (at most 32). H key heads of dk elements
(64, 96, 128 or 256). HV value heads of dv elements (64, 128, 192 or 256); HV is a multiple of H. Slot 0 and negative
slots are padding, like vLLM's null block.
"""

from __future__ import annotations

from torch import Tensor

from nwor_ops.ops.registry import op

__all__ = [
    "gated_delta_fold",
    "gated_delta_verify",
    "plan_recurrent_block_fold",
    "plan_recurrent_fold",
    "plan_recurrent_window",
]


@op(mutates=("plan", "cursors", "window_id", "num_skipped"))
def plan_recurrent_window(
    plan: Tensor,
    cursors: Tensor,
    window_id: Tensor,
    state_slots: Tensor,
    query_start_loc: Tensor,
    num_kept: Tensor,
    record_rows: int,
    is_window: Tensor | None = None,
    num_skipped: Tensor | None = None,
    chunk: int = 0,
) -> None:
    """Open a window: plan for all layers which rows each request reapplies, and where it records.

    All tensors are on one device. Mutated tensors must not share memory with other arguments.

    Args:
        plan: int32 ``[>= Q, 4]``, contiguous. **Mutated** in every row. Column 0 is the slot that the request reads.
            Column 1 is the number of rows to reapply, and column 2 the half of the record with these rows. Column 3 is
            the slot that it writes, equal to the first. This window records into the other half. Rows are zero for
            requests without a window, and from Q on. With ``chunk``, column 2 is the first row to reapply. Column 3 is
            0 if the state is not stored. This window records after the rows of column 1.
        cursors: int32 ``[S, 2]``, contiguous. **Mutated** at the slots of this step's requests. A row holds the number
            of rows that the last window recorded (0 = nothing pending), and their half. With ``chunk`` ``[S, 3]``: the
            number of rows that the last window recorded, the first pending row, and the number of accepted rows before
            that window. Fill it with zeros at first.
        window_id: int64 ``[1]``. **Mutated**: the number of the open window, increased by one.
        state_slots: int32 or int64 ``[Q]``, any stride. The slot of each request. A slot of 0 or less is padding. It
            may be a column of a block table.
        query_start_loc: int32 ``[>= Q + 1]``, contiguous. The first token of each request, then the end. A request
            without tokens keeps its cursor.
        num_kept: int32 ``[>= Q]``, contiguous. Number of tokens of the request's last window that stay, from 1 to the
            recorded rows. It includes the first token, which is not a draft token. Ignored if nothing is pending.
        record_rows: W, the maximum number of tokens in a window.
        is_window: bool ``[>= Q]``, contiguous, or None = all True. False if another kernel (prefill or plain decode)
            computes the request's tokens of this step. Its pending rows are dropped. Fold them before.
        num_skipped: int64 ``[1]`` or None. **Mutated** on CUDA: increased by the number of requests that this window
            skipped. Their counts are invalid. On the CPU the call raises for the first one.
        chunk: C, 0 or 16. With 16 the window of :func:`gated_delta_verify` has the chunk form. It stores the state only
            if at least C accepted rows are pending, and folds exactly C. The others stay pending: a record is a ring
            with R = C - 1 + W pending rows and W rows of a window. W is at most 8. 0 = every window stores the state
            with all accepted rows, and a record has two halves of W rows.

    Raises:
        ValueError: on the CPU, a window longer than W, an invalid count or cursor, or two requests with the same slot.
            On CUDA, such a request gets a row of zeros and keeps its cursor. CUDA does not check for equal slots.

    Example:
        >>> import torch
        >>> def int32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> plan, cursors, window = torch.zeros(1, 4).int(), torch.zeros(2, 2).int(), torch.zeros(1).long()
        >>> slots, starts = int32(1), int32(0, 3)  # one request: a known token and two drafts
        >>> nwor_ops.plan_recurrent_window(plan, cursors, window, slots, starts, int32(0), record_rows=3)
        >>> plan.tolist(), cursors.tolist()  # nothing to reapply; three rows will be recorded
        ([[1, 0, 0, 1]], [[0, 0], [3, 1]])
        >>> nwor_ops.plan_recurrent_window(plan, cursors, window, slots, starts, int32(2), record_rows=3)
        >>> plan.tolist(), cursors.tolist()  # two of them stay: reapply these
        ([[1, 2, 1, 1]], [[0, 0], [3, 0]])
    """


@op(mutates=("plan", "cursors"))
def plan_recurrent_fold(
    plan: Tensor,
    cursors: Tensor,
    source_slots: Tensor,
    target_slots: Tensor,
    num_rows: Tensor,
    keep_source: bool = False,
) -> None:
    """Plan for :func:`gated_delta_fold` which pending rows to apply to which states.

    Args:
        plan: int32 ``[>= E, 4]``, contiguous. **Mutated** in every row, with the columns of
            :func:`plan_recurrent_window`. Rows are zero for padding and from E on. They are also zero for entries that
            fold no row into their own slot.
        cursors: int32 ``[S, 2]`` or, with chunks, ``[S, 3]``, contiguous. **Mutated**: nothing is pending in targets,
            and in sources unless ``keep_source``. All entries are read before the first is written.
        source_slots: int32 or int64 ``[E]``, any stride. Slots whose state and record are read. A slot of 0 or less is
            padding.
        target_slots: int32 or int64 ``[>= E]``, any stride. Slots whose state is written. A slot of 0 or less is
            padding. If source and target differ, the state is copied, also with zero rows.
        num_rows: int32 ``[>= E]``, contiguous. Number of rows of the last window to apply, clamped to 0 and its
            recorded rows. With chunks, all accepted rows before them are applied too.
        keep_source: whether rows stay pending in a source. It has no effect if the source is its own target.

    Raises:
        ValueError: on the CPU, two entries have the same target, or a target is the source of another entry. CUDA does
            not check this.

    Example:
        >>> import torch
        >>> def int32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> plan, cursors = torch.zeros(1, 4).int(), int32(0, 0, 3, 1).view(2, 2)  # three rows of slot 1 are pending
        >>> nwor_ops.plan_recurrent_fold(plan, cursors, int32(1), int32(1), int32(2))  # two of them stay
        >>> plan.tolist(), cursors.tolist()
        ([[1, 2, 1, 1]], [[0, 0], [0, 1]])
    """


@op(mutates=("plan", "cursors", "num_skipped"))
def plan_recurrent_block_fold(
    plan: Tensor,
    cursors: Tensor,
    block_tables: list[Tensor],
    idx_mapping: Tensor,
    source_columns: Tensor,
    num_kept: Tensor,
    target_columns: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size: int = 0,
    moves_rows: bool = False,
    num_skipped: Tensor | None = None,
) -> None:
    """Plan the folds of requests that reach the end of a block, for an engine that keeps states in cache blocks.

    The state of a request is in the block of its last token, a column of its block table. The engine copies it twice
    per step, and this op plans each copy as a fold for :func:`gated_delta_fold`:

    - Before a step (``target_columns``), the state moves to the block of the step's last token. All kept rows of the
      last window are applied. Nothing stays pending in the source.
    - After a step (``num_computed_tokens``), the state after the last token of a full block is stored in that block, if
      a token of the last window filled it. Rows up to this token are applied. All rows stay pending in the source,
      unless it is the same block.

    A request has one state in each group of layers. Slots of states are block numbers. The entries of the plan are
    those of the first group, one for each request, then those of the second.

    Args:
        plan: int32 ``[>= G * Q, 4]``, contiguous. **Mutated** in every row, with the columns of
            :func:`plan_recurrent_window`. Rows are zero for requests that stay in their block, and from G * Q on.
        cursors: as in :func:`plan_recurrent_fold`. **Mutated** at the blocks of entries that are not zero.
        block_tables: G tensors int32 ``[N, columns]``, contiguous along a row, at most 64. Block 0 is padding.
        idx_mapping: int32 or int64 ``[Q]``, any stride. The row of each request in ``block_tables`` and in the tensors
            below. A negative row is padding.
        source_columns: int32 ``[>= N]``, contiguous. The column of the block with the state. Negative: no state yet.
        num_kept: int32 ``[>= N]``, contiguous. Number of tokens of the request's last window that stay, from 1 to the
            recorded rows. Ignored if nothing is pending, or if the request stays in its block.
        target_columns: int32 ``[>= N]``, contiguous. The column of the block that the state moves to. A request stays
            if it is negative or equal to the source.
        num_computed_tokens: int32 ``[>= N]``, contiguous. Number of tokens of the request after the step, without
            rejected drafts. Give either this or ``target_columns``.
        block_size: tokens per block, with ``num_computed_tokens``.
        moves_rows: only with ``target_columns`` and chunks. The kept rows move with the cursor and stay pending in the
            target. The caller copies the states and records. The plan says which, and is not for
            :func:`gated_delta_fold`.
        num_skipped: int64 ``[1]`` or None. **Mutated** on CUDA: increased by the number of entries that are left out
            because a number is invalid. On the CPU the call raises for the first one.

    Example:
        >>> import torch
        >>> def int32(*values):
        ...     return torch.tensor(values, dtype=torch.int32)
        >>> plan, cursors = torch.zeros(1, 4).int(), torch.zeros(8, 2).int()
        >>> cursors[5, 0] = 3  # the last window had three tokens: the 15th to the 17th of its request
        >>> tables, request, column = [int32(5, 7).view(1, 2)], int32(0), int32(0)
        >>> nwor_ops.plan_recurrent_block_fold(  # all three stay, so the 16th has filled the first block
        ...     plan, cursors, tables, request, column, int32(3), num_computed_tokens=int32(17), block_size=16
        ... )
        >>> plan.tolist()  # two rows are folded in place
        [[5, 2, 0, 5]]
    """


@op(
    mutates=(
        "out", "state", "record_keys", "record_norms", "record_decays", "record_updates", "layer_window", "all_states",
    )
)  # fmt: skip
def gated_delta_verify(
    out: Tensor,
    state: Tensor,
    record_keys: Tensor,
    record_norms: Tensor,
    record_decays: Tensor,
    record_updates: Tensor,
    layer_window: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    plan: Tensor,
    window_id: Tensor,
    query_start_loc: Tensor,
    scale: float,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    use_qk_l2norm: bool = True,
    gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    gate_activation: str = "silu",
    all_states: Tensor | None = None,
    allow_neg_eigval: bool = False,
    gate_lower_bound: float | None = None,
    chunk: int = 0,
) -> None:
    """Run one layer of a window: reapply the accepted rows, store the state, run the window's tokens and record them.

    To reapply a row of the record, the kernel computes ``S = S decay + u k^T`` without dot products. It then rounds the
    state to its dtype and stores it. It continues from the rounded state, in float32. The state is not rounded
    between the tokens of the window:

        g = -exp(A_log) softplus(a + dt_bias);  decay = exp(g);  beta = sigmoid(b)
        k = k / sqrt(sum(k^2) + 1e-6);  q = scale q / sqrt(sum(q^2) + 1e-6)
        S = S decay;  u = beta (v - S k);  S = S + u k^T;  out = S q

    vLLM's ``fused_sigmoid_gating_delta_rule_update`` has the same formula
    (``vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py``). Here
    ``softplus(x) = log(1 + exp(softplus_beta x)) / softplus_beta``, or x if ``softplus_beta x`` is above the threshold.

    Models differ in how they compute g and beta:

    - With ``gate_lower_bound``, ``g = gate_lower_bound / (1 + exp(-exp(A_log) (a + dt_bias)))``. GLM-5.3-Flash uses
      -5. The softplus arguments have no effect.
    - Without ``A_log`` and ``dt_bias``, the caller has computed both: ``a`` holds g and ``b`` holds beta.
    - With ``allow_neg_eigval``, beta is doubled, as in OLMo hybrid. ``1 - beta k k^T`` may then have negative
      eigenvalues.

    With ``gate`` and ``norm_weight``, the kernel rounds out to its dtype. Then it computes
    ``out / sqrt(mean(out^2) + norm_eps) * norm_weight * act(gate)``, like vLLM's ``fused_gdn_decode_post_conv_mtp``.

    Value head i uses head ``i // (HV // H)`` of q and k.

    With ``chunk``, each token belongs to a chunk of C tokens, counted from the slot's last fold. S0 is the state at the
    start of the chunk, rounded to its dtype. Row i of the chunk has key ki, decay di and update ui, and token j:

        w(i) = d(i+1) ... dj;  w = d0 ... dj
        uj = beta (vj - w S0 kj - sum over i < j of w(i) (ki kj) ui)
        out = w S0 qj + sum over i <= j of w(i) (ki qj) ui

    This equals the formula above up to rounding. The bits of a token depend only on S0 and on the rows of its chunk.
    They do not depend on how tokens fall into windows. If a window passes the end of a chunk, the kernel folds the
    chunk in a copy of the state. The next window stores the same bits.

    ``query_start_loc`` defines the Q requests. A row of zeros in ``plan`` means padding, or no window. For such a
    request the kernel only writes zeros to its tokens in ``out``. Another kernel may write them after this call. Tokens
    from ``query_start_loc[Q]`` on are not written.

    Args:
        out: ``[>= T, HV, dv]``. Float16 or bfloat16, on the CPU also float32. Contiguous along dv. **Mutated** at the
            requests' tokens.
        state: float32 or bfloat16 ``[S, HV, dv, dk]``. Contiguous within a slot. Any stride of slots, fastest if each
            slot begins at a multiple of 16 bytes. **Mutated** at the slots that the plan writes, like the records.
        record_keys: ``[S, 2, W, H, dk]``, dtype of ``out``. Keys before normalization. Each record is contiguous within
            a slot. Any stride of slots.
        record_norms: float32 ``[S, 2, W, H]``. The factor that normalizes a key, 1 without ``use_qk_l2norm``.
        record_decays: float32 ``[S, 2, W, HV]``, or ``[S, 2, W, HV, dk]``. The second form has a decay per channel.
        record_updates: float32 ``[S, W, HV, dv]``. The updates u.
        layer_window: int64 ``[1]``. **Mutated**: set to ``window_id``. A cancelled step uses it to find the layers that
            ran. If CUDA skips a request here (see below), a cancelled step applies no rows for it.
        q, k: ``[T, H, dk]``, dtype of ``out``. Contiguous along dk. They may be views of one packed tensor.
        v: ``[T, HV, dv]``, dtype of ``out``. Contiguous along dv.
        a: ``[T, HV]``, or ``[T, HV, dk]`` with a decay per channel (KDA). Any strides. The dtype may be float32,
            float16 or bfloat16. The same holds for ``b``, ``A_log``, ``dt_bias`` and ``norm_weight``.
        b: ``[T, HV]``. Any strides.
        A_log: ``[HV]``, or None.
        dt_bias: ``[HV]``, or ``[HV, dk]`` with a decay per channel. None if ``A_log`` is None.
        plan, window_id: from :func:`plan_recurrent_window`. The plan of another window would apply rows twice.
        query_start_loc: int32 ``[Q + 1]``, contiguous, as passed to the plan. Q is at most the rows of ``plan``.
        scale: factor of q. Like all float options, it must be finite in float32.
        softplus_beta, softplus_threshold: parameters of the softplus. The first is positive, the second at most 88.
            With a higher threshold, ``exp`` would be infinite in float32.
        use_qk_l2norm: whether to normalize q and k.
        gate: ``[>= T, HV, dv]``, dtype of ``out``, or None. Contiguous along dv.
        norm_weight: ``[dv]``. None if ``gate`` is None.
        norm_eps: epsilon of the norm, 0 or more.
        gate_activation: ``"silu"`` or ``"sigmoid"``. It is applied to ``gate``.
        all_states: ``[>= T, HV, dv, dk]``, dtype of ``state``, or None. Contiguous within a token. **Mutated**: the
            rounded state after each token, as a scheme that stores every state keeps it. For tests and audits.
        allow_neg_eigval: whether to double beta. Needs ``A_log``.
        gate_lower_bound: the bound of g, negative, or None for the softplus. Needs ``A_log``.
        chunk: C of :func:`plan_recurrent_window`, 0 or 16. The form with chunks needs dk = dv = 128 and one decay per
            head, on CUDA also bfloat16 inputs. Its records are rings: ``[S, 1, R + W, ...]``, and ``record_updates`` is
            ``[S, R + W, HV, dv]``. If the plan stores nothing, the window continues from the reapplied rows in float32.
            0 = the state goes through every token.

    Example:
        >>> import torch
        >>> rows, heads, width = 2, 1, 64
        >>> out, state = torch.zeros(1, heads, width), torch.zeros(2, heads, width, width)
        >>> keys, norms = torch.zeros(2, 2, rows, heads, width), torch.zeros(2, 2, rows, heads)
        >>> decays, updates = torch.zeros(2, 2, rows, heads), torch.zeros(2, rows, heads, width)
        >>> layer_window, window = torch.zeros(1).long(), torch.ones(1).long()
        >>> starts, plan = torch.tensor([0, 1]).int(), torch.tensor([[1, 0, 1, 1]]).int()  # one token, nothing pending
        >>> q = k = v = torch.ones(1, heads, width)
        >>> a, b = torch.zeros(1, heads), torch.full((1, heads), 100.0)  # beta = sigmoid(100) = 1
        >>> nwor_ops.gated_delta_verify(
        ...     out, state, keys, norms, decays, updates, layer_window, q, k, v, a, b, torch.zeros(heads),
        ...     torch.zeros(heads), plan, window, starts, scale=1.0,
        ... )
        >>> out[0, 0, 0].item(), state.any().item()  # v at its own key; the token is recorded, not stored
        (1.0, False)
    """


@op(mutates=("states", "layer_windows"))
def gated_delta_fold(
    states: list[Tensor],
    record_keys: list[Tensor],
    record_norms: list[Tensor],
    record_decays: list[Tensor],
    record_updates: list[Tensor],
    layer_windows: list[Tensor],
    plan: Tensor,
    window_id: Tensor | None = None,
    chunk: int = 0,
) -> None:
    """Fold pending rows into the states of several layers: ``state[target]`` becomes ``state[source]`` with its rows.

    The result is bit-identical to the state that :func:`gated_delta_verify` stores before its window. With
    ``window_id`` the call is repeatable: a layer that it has folded is marked, and a second call leaves that layer out.

    Args:
        states: a tensor for each of L layers, as ``state`` of :func:`gated_delta_verify`. All have the same shape,
            dtype and strides. Layers of another geometry take another call. **Mutated** at the target slots of the
            plan.
        record_keys, record_norms, record_decays, record_updates: a tensor for each layer, as there, with two halves
            or, with ``chunk``, one. Contiguous within a slot. The tensors of one list have the same shape and the same
            stride between slots.
        layer_windows: int64 ``[1]`` for each layer. The last window that the layer ran in. **Mutated** if
            ``window_id`` is given and the plan has rows. All of them then hold its number.
        plan: int32 ``[E, 4]``, contiguous. The output of :func:`plan_recurrent_fold`. To cancel an open window, that of
            :func:`plan_recurrent_window`. Rows with the target 0 are left out.
        window_id: int64 ``[1]`` or None. Layers whose ``layer_windows`` holds this number are left out. They ran in the
            window, or an earlier call has folded them. None = fold all layers and mark none.
        chunk: C of :func:`plan_recurrent_window`, 0 or 16. After C rows the state is rounded to its dtype. Then the
            other rows follow. 0 = the state is rounded once, at the end.

    Raises:
        ValueError: lists of different lengths. A state shares memory with another state or a record. With
            ``window_id``, a number in ``layer_windows`` shares memory with another one, the plan or ``window_id``.

    Example:
        >>> import torch
        >>> state = torch.ones(2, 1, 64, 64)
        >>> keys, norms = torch.zeros(2, 2, 3, 1, 64), torch.ones(2, 2, 3, 1)
        >>> decays, updates = torch.full((2, 2, 3, 1), 0.5), torch.zeros(2, 3, 1, 64)
        >>> plan = torch.tensor([[1, 2, 0, 1]]).int()  # two rows of slot 1
        >>> layer_window = torch.zeros(1).long()
        >>> nwor_ops.gated_delta_fold([state], [keys], [norms], [decays], [updates], [layer_window], plan)
        >>> state[:, 0, 0, 0].tolist()  # two decays of 0.5
        [1.0, 0.25]
    """
