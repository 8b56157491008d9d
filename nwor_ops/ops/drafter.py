"""Family ``drafter``: what a drafter's loop does between two forward passes, on the device.

What vLLM's drafters do with some twenty small torch ops and a host-side build per step is one kernel each here, so that
a whole draft loop fits in a CUDA graph: nothing is allocated, nothing read back, and every count that changes from step
to step is data.

Letters: N rows of this call, R of them real, M rows of a buffer (>= N), K drafts per request, L the longest
sequence the model takes (``max_model_len``), T target tokens, V vocabulary.

*Padded rows.* A captured graph has N rows, of which R are requests. Ops that must know R take ``idx_mapping``,
the request-state index of each row: a negative entry marks a padded row, and padded rows come last. What a
padded row would read is not read; what is written there is said with each op, and never depends on what was
there. Where ``idx_mapping`` is optional, None means that all N rows are real.

*Tails.* Unless an op says otherwise every element of an output is written, so nothing of an earlier batch
survives in it. A slot of -1 (PAD) is one that no cache writer writes.

*Ends.* Sizes and counts that the host gives are below 2^31. A sum of data that its place cannot hold comes to the
nearest number that it can: no position, length or slot is ever one that wrapped round.

Indices that lie outside a buffer are IndexErrors on the CPU, before anything is written. On CUDA such a read is
left out (the value is 0, the slot PAD) and ``VLLM_NWOR_DEBUG_SYNC=1`` makes the call raise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nwor_ops.ops.registry import op


@op(mutates=("input_ids", "positions", "query_start_loc", "seq_lens", "last_token_indices", "current_draft_step"))
def prepare_prefill_inputs(
    target_input_ids: Tensor,
    target_positions: Tensor,
    target_query_start_loc: Tensor,
    target_seq_lens: Tensor,
    idx_mapping: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    last_token_indices: Tensor,
    current_draft_step: Tensor,
) -> None:
    """The first pass of a drafter that follows the target (EAGLE, MTP): the target's batch, ids moved up by one.

    Request i has ``n = query_start_loc[i + 1] - query_start_loc[i] - num_rejected[i]`` valid tokens. Its ids
    are those of the target from the second on, and last the token that the target sampled (or, in a chunk of
    a prompt, the prompt's next token). Rejected tokens stay in the batch, behind the valid ones, so that the
    target's attention metadata fits: their id is 0, their position the target's. The same as
    ``prepare_prefill_inputs`` of vLLM 0.33 (``v1/worker/gpu/spec_decode/target_dependent_ar``).

    Args:
        target_input_ids: int32 or int64 ``[>= T]``, any stride. Ids of the target's batch.
        target_positions: int64 ``[>= T]``, contiguous.
        target_query_start_loc: int32 ``[>= N + 1]``, contiguous. First token of each request, then the end.
        target_seq_lens: int32 ``[>= N]``, contiguous. Tokens of each request after this step.
        idx_mapping: int32 or int64 ``[N]``, any stride. Request-state index; negative = padded, and last.
        num_sampled: int32 or int64 ``[>= N]``, any stride. Tokens that the target sampled; 0 = prompt chunk.
        num_rejected: int32 or int64 ``[>= N]``, any stride. Rejected tokens at the end of each request.
        last_sampled: int32 or int64 ``[S]``, any stride, by request-state index.
        next_prefill_tokens: int32 or int64 ``[S]``, any stride, by request-state index.
        input_ids: int32 ``[capacity]``, contiguous; **mutated**; 0 past the last request.
        positions: int64 ``[capacity]``, contiguous; **mutated**; 0 past the last request.
        query_start_loc: int32 ``[>= N + 1]``, contiguous; **mutated**: the target's, and the end of the last
            request from row R on.
        seq_lens: int32 ``[>= N]``, contiguous; **mutated**: the target's, 0 from row R on.
        last_token_indices: int64 ``[>= N]``, contiguous; **mutated**: place of each request's last valid
            token; 0 for a request that has none (n <= 0) and from row R on.
        current_draft_step: int64 ``[]`` or ``[1]``; **mutated**: 0.

    Raises:
        ValueError: a shape, stride or overlap (no output may share memory with another argument); on the CPU
            also starts that decrease or leave the buffers, or a real row after a padded one.
        TypeError: a dtype or device.
        IndexError: on the CPU, an index >= S.
    """


@op(mutates=("input_ids", "positions", "query_start_loc", "seq_lens", "sample_positions"))
def prepare_decode_inputs(
    draft_tokens: Tensor,
    target_seq_lens: Tensor,
    num_rejected: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_model_len: int,
    idx_mapping: Tensor | None = None,
    sample_positions: Tensor | None = None,
    advance_positions: bool = True,
) -> None:
    """From the first pass to the steps of one token per request.

    Row i < R: id ``draft_tokens[i, 0]``, position ``min(position + 1, L - 1)``, sequence length
    ``min(target_seq_lens[i] - num_rejected[i] + 1, L)``. Where positions do not advance (Gemma4's drafter
    writes no keys), the position stays and the length is ``target_seq_lens[i] - num_rejected[i]``.
    ``prepare_decode_inputs`` of vLLM 0.33, made inert in rows [R, M).

    Args:
        draft_tokens: int32 or int64 ``[N, >= 1]``, any strides; column 0 is read.
        target_seq_lens: int32 ``[>= N]``, contiguous.
        num_rejected: int32 or int64 ``[>= N]``, any stride.
        input_ids: int32 ``[>= M]``, contiguous; **mutated** in rows [0, M): 0 from row R on.
        positions: int64 ``[>= M]``, contiguous. Position of each request's last valid token; **mutated** in
            rows [0, M): 0 from row R on.
        query_start_loc: int32 ``[>= N + 1]``, contiguous; **mutated**: ``min(i, R)``.
        seq_lens: int32 ``[M]``, contiguous; **mutated**: 0 from row R on.
        max_model_len: L, > 0.
        idx_mapping: int32 or int64 ``[>= N]``, any stride, or None; only the signs are read.
        sample_positions: int64 ``[>= M]``, contiguous, or None. What keys the noise of a request: one more
            each step, never clamped; **mutated**: + 1, 0 in rows [R, M).
        advance_positions: whether each draft writes a key of its own.

    Raises:
        As :func:`prepare_prefill_inputs`.
    """


@op(mutates=("draft_tokens", "input_ids", "positions", "seq_lens", "next_hidden_states", "sample_positions"))
def update_draft_inputs(
    sampled: Tensor,
    current_draft_step: Tensor,
    draft_tokens: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    num_speculative_steps: int,
    max_model_len: int,
    idx_mapping: Tensor | None = None,
    hidden_states: Tensor | None = None,
    next_hidden_states: Tensor | None = None,
    sample_positions: Tensor | None = None,
    advance_positions: bool = True,
) -> None:
    """The end of one draft step: keep the token, make the inputs of the next step from it.

    ``draft_tokens[i, step] = sampled[i]`` for i < R; the other columns keep their bytes. In the last step,
    ``step >= num_speculative_steps - 1``, that is all. Before it also ``input_ids[i] = sampled[i]``, the hidden
    state is copied, and position and sequence length grow by one, clamped to L - 1 and L.
    Rows [R, N) keep everything, so they stay as :func:`prepare_decode_inputs` made them.

    Args:
        sampled: int32 or int64 ``[N]``, any stride.
        current_draft_step: int64 ``[]`` or ``[1]``, at a fixed address: one captured step serves every step.
        draft_tokens: int32 or int64 ``[>= N, >= num_speculative_steps]``, any strides; **mutated** in one column.
        input_ids: int32 ``[>= N]``, contiguous; **mutated**.
        positions: int64 ``[>= N]``, contiguous; **mutated** if ``advance_positions``.
        seq_lens: int32 ``[>= N]``, contiguous; **mutated** if ``advance_positions``.
        num_speculative_steps: K, > 0.
        max_model_len: L, > 0.
        idx_mapping: int32 or int64 ``[>= N]``, any stride, or None; only the signs are read.
        hidden_states: ``[>= N, width]``, 1, 2, 4 or 8 bytes per element, any strides, or None.
        next_hidden_states: ``[>= N, width]``, the same dtype, any strides, or None (both or neither);
            **mutated**. It may be the very view that ``hidden_states`` is (then nothing is copied); otherwise
            the two may share no memory.
        sample_positions: int64 ``[>= N]``, contiguous, or None; **mutated**: + 1, never clamped.
        advance_positions: as in :func:`prepare_decode_inputs`.

    Raises:
        ValueError, TypeError: as :func:`prepare_prefill_inputs`.
        IndexError: on the CPU, a step outside the columns of ``draft_tokens``.
        RuntimeError: a hidden state requires a gradient.
    """


@op(mutates=("slot_mappings",))
def compute_slot_mappings(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    block_tables: Sequence[Tensor],
    block_sizes: Sequence[int],
    slot_mappings: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    cp_interleave: int = 1,
    cp_sharded: Tensor | None = None,
) -> None:
    """Where each token's key goes, for every group of layers: one launch over groups x tokens.

    The slot of a token at position p of row i is ``table[idx_mapping[i], p // B] * B + p % B``. Tokens of a
    row with a negative index get PAD, and no table is read for them (padded rows need not be last here); so
    does everything from ``query_start_loc[N]`` to the capacity. ``BlockTables.compute_slot_mappings`` of
    vLLM 0.33.

    Args:
        idx_mapping: int32 or int64 ``[N]``, any stride: row of the block tables; negative = PAD.
        query_start_loc: int32 ``[>= N + 1]``, contiguous, not decreasing.
        positions: int64 ``[>= query_start_loc[N]]``, contiguous.
        block_tables: 1 to 64 tensors int32 ``[S, columns]``, last stride 1, one per group.
        block_sizes: slots per block of each group, in tokens; 0 = a group without slots (all PAD).
        slot_mappings: int64 ``[groups, capacity]``, last stride 1; **mutated**, every element.
        cp_size: ranks that share the cache by context parallelism; 1 = none.
        cp_rank: this rank. Positions that another rank holds get PAD.
        cp_interleave: neighbouring tokens that lie on one rank.
        cp_sharded: bool ``[groups]``, contiguous, or None = all: whether a group is spread over the ranks.

    Raises:
        ValueError, TypeError: as :func:`prepare_prefill_inputs`.
        IndexError: on the CPU, an index >= S, a negative position, or one past the columns.
    """


@op(mutates=("seq_lens", "new_positions", "slot_mapping"))
def eagle_step(
    positions: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    new_positions: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    max_model_len: int,
) -> None:
    """One EAGLE step of a runner that keeps gathered block tables: position, slot and length in one kernel.

    With ``p = positions[i] + 1``: if p >= L the new position is 0, the slot PAD and the length 1; else the
    slot is that of p (its block clamped to the last column) and the length ``min(seq_lens[i] + 1, L)``.
    ``eagle_step_update_slot_mapping_and_metadata`` of vLLM 0.33 (V1 runner).

    Args:
        positions: int64 ``[N]``, contiguous.
        block_table: int32 ``[>= N, >= 1]``, last stride 1; row i belongs to row i.
        seq_lens: int32 ``[>= N]``, contiguous; **mutated** in rows [0, N).
        new_positions: int64 ``[>= N]``, contiguous; **mutated** in rows [0, N). It may start where
            ``positions`` does (in place); otherwise the two may share no memory.
        slot_mapping: int64 ``[>= N]``, contiguous; **mutated**: PAD from row N on.
        block_size: > 0.
        max_model_len: L, > 0.

    Raises:
        ValueError, TypeError: as :func:`prepare_prefill_inputs`.
        IndexError: on the CPU, a position below -1.
    """


@op(mutates=("token_indices_to_sample", "num_rejected"))
def prepare_inputs_padded(
    cu_num_draft_tokens: Tensor,
    valid_sampled_count: Tensor,
    query_start_loc: Tensor,
    token_indices_to_sample: Tensor,
    num_rejected: Tensor,
    discarded: Tensor | None = None,
) -> None:
    """Which token of each request the drafter goes on from, where rejected tokens stay in the batch.

    With d drafts, ``num_rejected[i] = d + 1 - valid_sampled_count[i]`` (0 without drafts) and the index is
    ``query_start_loc[i + 1] - 1 - num_rejected[i]``. A row without tokens, a discarded row (marked in
    ``discarded``, or one with drafts of which nothing was sampled) and a padded row get index 0, rejected 0.
    ``eagle_prepare_inputs_padded`` of vLLM 0.33, which gives -1 for an empty first row.

    Args:
        cu_num_draft_tokens: int32 ``[N]``, contiguous. Drafts up to and including each request.
        valid_sampled_count: int32 ``[>= N]``, contiguous. Accepted drafts + 1.
        query_start_loc: int32 ``[>= N + 1]``, contiguous.
        token_indices_to_sample: int32 or int64 ``[>= N]``, any stride; **mutated**; 0 from row N on.
        num_rejected: int32 or int64 ``[>= N]``, any stride; **mutated**; 0 from row N on.
        discarded: bool ``[>= N]``, contiguous, or None.

    Raises:
        ValueError: a shape, stride or overlap; on the CPU also cumulative drafts that decrease.
        TypeError: a dtype or device.
    """


@op(mutates=("next_token_ids", "valid_sampled_count"))
def prepare_next_token_padded(
    sampled_token_ids: Tensor,
    discarded: Tensor,
    backup_next_token_ids: Tensor,
    next_token_ids: Tensor,
    valid_sampled_count: Tensor,
    vocab_size: int,
) -> None:
    """The token each request goes on with, and how many tokens the target sampled for it.

    Valid ids are those in [0, vocab_size). The next token is the last valid one of the row, else the backup.
    A discarded row gives its backup and a count of 0, whatever was sampled. ``eagle_prepare_next_token_padded``
    of vLLM 0.33 (which takes any id but -1 below ``vocab_size`` for valid; no sampler writes another).

    Args:
        sampled_token_ids: int32 or int64 ``[N, >= 0]``, any strides; -1 = no token.
        discarded: bool ``[>= N]``, contiguous: rows whose tokens are not to be used.
        backup_next_token_ids: int32 or int64 ``[>= N]``, any stride.
        next_token_ids: int32 or int64 ``[>= N]``, any stride; **mutated**; 0 from row N on.
        valid_sampled_count: int32 or int64 ``[>= N]``, any stride; **mutated**; 0 from row N on.
        vocab_size: V, > 0.

    Raises:
        ValueError: a shape or overlap. TypeError: a dtype or device.
    """


@op(mutates=("sampled", "logits_cache", "workspace"))
def gumbel_sample(
    logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    step: Tensor,
    sampled: Tensor,
    logits_cache: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """Draw one token per row from ``softmax(logits / temperature)``, or take the argmax at temperature 0.

    By the Gumbel-max trick: the token with the largest ``logits / temperature + noise``, the lowest one of
    equals. The noise of a token is a function of (seed, position, step, token) alone, from an integer hash and
    arithmetic that are the same to the bit on every device; so the same draw comes out on CPU and CUDA, in
    any row, beside any padding, captured or not. At temperature 0 (or below the smallest normal float32)
    there is no noise and the result is that of ``torch.argmax``.

    A NaN logit is never drawn: it counts as -inf (``torch.argmax`` would return it). A row in which every
    logit is -inf or NaN gives token 0. A padded row (negative index) gives token 0; its logits are not read
    and the cache is left alone.

    Args:
        logits: float32, float16 or bfloat16 ``[N, V]``, any strides.
        idx_mapping: int32 or int64 ``[>= N]``, any stride: request-state index; negative = padded.
        temperature: float32 ``[S]``, contiguous, by request-state index.
        seeds: int64 ``[S]``, contiguous, by request-state index.
        positions: int64 ``[>= N]``, contiguous. Position that keys the draw.
        step: int64, one element (``[]`` or ``[1]``) or ``[>= N]``, contiguous: the draft step.
        sampled: int32 or int64 ``[>= N]``, any stride, or ``[>= N, K]``, any strides; **mutated** in rows
            [0, N). Of a matrix only column ``step`` is written.
        logits_cache: ``[S, K, >= V]``, dtype of ``logits``, any strides, or None; **mutated**: the raw logits of
            row i, before temperature, at ``[idx_mapping[i], step, :V]``.
        workspace: int64 ``[>= 2 * N]``, contiguous, zero, or None; scratch of the CUDA kernel, zero again
            after the call, so zeros made once serve every call on one stream. Without it the call makes its own.

    Raises:
        ValueError, TypeError: as :func:`prepare_prefill_inputs`.
        IndexError: on the CPU, an index >= S, or a step outside the columns that it names.
        RuntimeError: a tensor requires a gradient.
    """


@op(mutates=("input_ids", "positions", "is_rejected", "is_masked", "new_token_indices", "hidden_state_mapping"))
def copy_expand_inputs(
    target_input_ids: Tensor,
    target_positions: Tensor,
    target_query_start_loc: Tensor,
    num_rejected: Tensor,
    next_token_ids: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    is_rejected: Tensor,
    is_masked: Tensor,
    new_token_indices: Tensor,
    num_new_tokens: int = 1,
    padding_token_id: int = 0,
    mask_token_id: int = 0,
    shift_input_ids: bool = False,
    max_model_len: int | None = None,
    idx_mapping: Tensor | None = None,
    hidden_state_mapping: Tensor | None = None,
) -> None:
    """The first pass of a drafter that reads the sequence itself: make room for P new tokens in each request.

    Each request becomes: its accepted tokens | the bonus token | P - 1 mask tokens | its rejected tokens. It
    grows by P tokens (``num_new_tokens``), or by P - 1 where ids are shifted, which drops the first. Request i
    starts at ``target_query_start_loc[i] + i * growth``. Positions count on from the request's first one, through
    the rejected tokens too. Covers ``prepare_prefill_inputs`` of vLLM 0.33's ``standalone_ar`` (P = 1, with
    ``idx_mapping`` and ``max_model_len``) and ``copy_and_expand_eagle_inputs`` of its V1 runner (which gives
    rejected tokens position 0; a slot made of that would be the sequence's first).

    A request without tokens has no new ones: what it grows by is marked rejected, and its indices are 0.

    Args:
        target_input_ids: int32 or int64 ``[>= T]``, any stride.
        target_positions: int64 ``[>= T]``, contiguous.
        target_query_start_loc: int32 ``[>= N + 1]``, contiguous.
        num_rejected: int32 or int64 ``[N]``, any stride; clamped to the tokens of the request.
        next_token_ids: int32 or int64, any stride: the bonus token of each row ``[>= N]``, or, with
            ``idx_mapping``, of each request-state index ``[S]``.
        input_ids: int32 ``[capacity]``, contiguous; **mutated**; ``padding_token_id`` at rejected tokens and
            past the last request.
        positions: int64 ``[capacity]``, contiguous; **mutated**; 0 past the last request.
        is_rejected: bool ``[capacity]``, contiguous; **mutated**; True also past the last request.
        is_masked: bool ``[capacity]``, contiguous; **mutated**: the mask tokens.
        new_token_indices: int32 or int64 ``[>= N * P]``, any stride; **mutated**: places of each request's bonus
            and mask tokens; 0 past the last request. With P = 1 the indices to sample at.
        num_new_tokens: P, > 0.
        padding_token_id: id of tokens that count for nothing, of 32 bits, as ``mask_token_id``.
        mask_token_id: id of the P - 1 tokens that are drafted in parallel.
        shift_input_ids: whether ids move up by one against positions (EAGLE) or not.
        max_model_len: L, or None: positions are clamped to L - 1, or not at all.
        idx_mapping: int32 or int64 ``[>= N]``, any stride, or None.
        hidden_state_mapping: int32 or int64 ``[>= T]``, any stride, or None; only with ``shift_input_ids``;
            **mutated**: where the hidden state of each target token goes; -1 past the last request.

    Raises:
        ValueError, TypeError: as :func:`prepare_prefill_inputs`; ValueError on the CPU also where the capacity
            does not hold every token.
        IndexError: on the CPU, an index >= S.
    """


@op(mutates=("query_start_loc", "seq_lens", "slot_mapping"))
def extend_queries(
    target_query_start_loc: Tensor,
    target_seq_lens: Tensor,
    positions: Tensor,
    is_rejected: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    max_model_len: int,
    num_new_tokens: int = 1,
    idx_mapping: Tensor | None = None,
) -> None:
    """The attention metadata of what :func:`copy_expand_inputs` made: every query longer by the same number.

    ``query_start_loc[i] = target_query_start_loc[i] + i * num_new_tokens`` and
    ``seq_lens[i] = min(target_seq_lens[i] + num_new_tokens, L)``. A token's slot is that of its position in row
    i of ``block_table``; PAD where the position is L or more, or the token is rejected.
    ``extend_all_queries_by_N`` and ``compute_new_slot_mapping`` of vLLM 0.33.

    Args:
        target_query_start_loc: int32 ``[>= N + 1]``, contiguous.
        target_seq_lens: int32 ``[N]``, contiguous.
        positions: int64 ``[>= the new end]``, contiguous.
        is_rejected: bool ``[>= the new end]``, contiguous.
        block_table: int32 ``[N, columns]``, last stride 1; as many rows as queries.
        query_start_loc: int32 ``[>= N + 1]``, contiguous; **mutated**; the new end from row R on.
        seq_lens: int32 ``[>= N]``, contiguous; **mutated**; 0 from row R on.
        slot_mapping: int64 ``[capacity]``, contiguous; **mutated**; PAD past the last request.
        block_size: > 0.
        max_model_len: L, > 0.
        num_new_tokens: by how much each query grows, >= 0.
        idx_mapping: int32 or int64 ``[>= N]``, any stride, or None; only the signs are read.

    Raises:
        ValueError, TypeError: as :func:`prepare_prefill_inputs`.
        IndexError: on the CPU, a position that is negative or past the columns, of a token that needs a slot.
    """


@op(mutates=("local_seq_lens",))
def dcp_local_seq_lens(
    seq_lens: Tensor, local_seq_lens: Tensor, dcp_size: int, dcp_rank: int, cp_interleave: int = 1
) -> None:
    """How many of each sequence's tokens lie on this rank of decode context parallelism.

    Tokens go round the ranks in runs of ``cp_interleave``. ``prepare_dcp_local_seq_lens`` of vLLM 0.33.

    Args:
        seq_lens: int32 ``[N]``, contiguous; 0 in padded rows, and so counts a negative length.
        local_seq_lens: int32 ``[>= N]``, contiguous; **mutated**; 0 from row N on. It may start where
            ``seq_lens`` does (in place); otherwise the two may share no memory.
        dcp_size: ranks, > 0.
        dcp_rank: this rank, in [0, dcp_size).
        cp_interleave: > 0.

    Raises:
        ValueError, TypeError: as :func:`prepare_prefill_inputs`.
    """
