"""Family ``drafter``: the work of a drafter's loop between two forward passes, on the device.

Each op replaces some twenty small torch ops and a host-side build per step in vLLM with one kernel. A whole
draft loop therefore fits in a CUDA graph: nothing is allocated or read back, and every count that changes from step to
step is read on the device.

Letters: a call has N rows, of which R are real, and T target tokens. A buffer has M rows (>= N). Each request has K
drafts. L is the maximum sequence length of the model (``max_model_len``), and V the size of the vocabulary.

*Padded rows.* A captured graph has N rows, of which R are requests. Ops that must know R take ``idx_mapping``, the
request-state index of each row. A negative entry marks a padded row; padded rows come last. The inputs of a padded row
are not read. Each op says what it writes there; this never depends on the previous contents. If ``idx_mapping`` is
optional, None means that all N rows are real.

*Tails.* Unless an op says otherwise, it writes every element of an output, so nothing of an earlier batch remains. No
cache writer writes to a slot of -1 (PAD).

*Ranges.* Sizes and counts from the host are below 2^31. A sum that does not fit into its dtype is clamped to the
nearest value that does. Positions, lengths and slots therefore never wrap around.

On the CPU, an index outside a buffer raises IndexError before anything is written. On CUDA such a read is left out (the
value is 0, the slot PAD), and ``VLLM_NWOR_DEBUG_SYNC=1`` makes the call raise.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nwor_ops.ops.registry import op

__all__ = [
    "argmax_draft_tokens",
    "compute_slot_mappings",
    "copy_expand_inputs",
    "dcp_local_seq_lens",
    "eagle_step",
    "expand_draft_logits",
    "extend_queries",
    "gather_step_tokens",
    "gumbel_sample",
    "prepare_decode_inputs",
    "prepare_inputs_padded",
    "prepare_next_token_padded",
    "prepare_prefill_inputs",
    "update_draft_inputs",
    "update_draft_vocabulary",
]


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
    """Prepare the first pass of a drafter that follows the target (EAGLE, MTP): the target's batch, ids moved up by
    one.

    Request i has ``n = query_start_loc[i + 1] - query_start_loc[i] - num_rejected[i]`` valid tokens. Its ids are the
    target's ids from the second one on, and then the token that the target sampled. In a chunk of a prompt, the last id
    is the prompt's next token. Rejected tokens stay in the batch after the valid ones, so that the target's attention
    metadata fits. Their id is 0, and their position is the target's. Same semantics as ``prepare_prefill_inputs`` of
    vLLM 0.33 (``v1/worker/gpu/spec_decode/target_dependent_ar``).

    Args:
        target_input_ids: int32 or int64 ``[>= T]``, any stride. Token ids of the target's batch.
        target_positions: int64 ``[>= T]``, contiguous. Positions of these tokens.
        target_query_start_loc: int32 ``[>= N + 1]``, contiguous. First token of each request, then the end.
        target_seq_lens: int32 ``[>= N]``, contiguous. Number of tokens of each request after this step.
        idx_mapping: int32 or int64 ``[N]``, any stride. Request-state index; negative in padded rows, which come last.
        num_sampled: int32 or int64 ``[>= N]``, any stride. Number of tokens that the target sampled; 0 in a prompt
            chunk.
        num_rejected: int32 or int64 ``[>= N]``, any stride. Number of rejected tokens at the end of each request.
        last_sampled: int32 or int64 ``[S]``, any stride, by request-state index. The last sampled token.
        next_prefill_tokens: int32 or int64 ``[S]``, any stride, by request-state index. The next token of the prompt.
        input_ids: int32 ``[capacity]``, contiguous; **mutated**. It is 0 after the last request.
        positions: int64 ``[capacity]``, contiguous; **mutated**. It is 0 after the last request.
        query_start_loc: int32 ``[>= N + 1]``, contiguous; **mutated**: the target's values, and the end of the last
            request from row R on.
        seq_lens: int32 ``[>= N]``, contiguous; **mutated**: the target's values, 0 from row R on.
        last_token_indices: int64 ``[>= N]``, contiguous; **mutated**. Index of each request's last valid token. It is 0
            for a request without one (n <= 0) and from row R on.
        current_draft_step: int64 ``[]`` or ``[1]``; **mutated**: 0.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> int32, int64 = (lambda *v: torch.tensor(v, dtype=torch.int32)), (lambda *v: torch.tensor(v))
        >>> input_ids, last_token_indices = int32(0, 0, 0, 0), int64(0)
        >>> ops.prepare_prefill_inputs(
        ...     int32(5, 6, 7), int64(0, 1, 2), int32(0, 3), int32(3), int64(0), int32(2), int32(1), int64(9), int64(0),
        ...     input_ids, int64(0, 0, 0, 0), int32(0, 0), int32(0), last_token_indices, int64(0))
        >>> input_ids.tolist(), last_token_indices.tolist()  # the rejected token 7 is replaced by the sampled 9
        ([6, 9, 0, 0], [1])
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
    """Prepare the steps of one token per request after the first pass.

    Row i < R gets the id ``draft_tokens[i, 0]``, the position ``min(position + 1, L - 1)`` and the sequence length
    ``min(target_seq_lens[i] - num_rejected[i] + 1, L)``. If positions do not advance (Gemma4's drafter writes no keys),
    the position stays and the length is ``target_seq_lens[i] - num_rejected[i]``. Rows [R, M) become inert. Same
    semantics as ``prepare_decode_inputs`` of vLLM 0.33 otherwise.

    Args:
        draft_tokens: int32 or int64 ``[N, >= 1]``, any strides. Only column 0 is read.
        target_seq_lens: int32 ``[>= N]``, contiguous. Number of tokens of each request, rejected tokens included.
        num_rejected: int32 or int64 ``[>= N]``, any stride. Number of rejected tokens of each request.
        input_ids: int32 ``[>= M]``, contiguous; **mutated** in rows [0, M): 0 from row R on.
        positions: int64 ``[>= M]``, contiguous. Position of each request's last valid token; **mutated** in rows [0,
            M): 0 from row R on.
        query_start_loc: int32 ``[>= N + 1]``, contiguous; **mutated**: ``min(i, R)``.
        seq_lens: int32 ``[M]``, contiguous; **mutated**: 0 from row R on.
        max_model_len: L, > 0.
        idx_mapping: int32 or int64 ``[>= N]``, any stride, or None. Only the signs are read.
        sample_positions: int64 ``[>= M]``, contiguous, or None; **mutated**. Positions that key the noise. They grow by
            one in each step and are never clamped. They are 0 in rows [R, M).
        advance_positions: whether each draft token writes a key, so that positions advance.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> positions, seq_lens = torch.tensor([6]), torch.zeros(1, dtype=torch.int32)
        >>> ids, starts = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
        >>> ops.prepare_decode_inputs(
        ...     torch.tensor([[42]]), torch.tensor([8], dtype=torch.int32), torch.tensor([1]),
        ...     ids, positions, starts, seq_lens, max_model_len=128)
        >>> ids.tolist(), positions.tolist(), seq_lens.tolist()
        ([42], [7], [8])
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
    """End one draft step: store the sampled token and prepare the inputs of the next step.

    ``draft_tokens[i, step] = sampled[i]`` for i < R; the other columns do not change. The last step (``step >=
    num_speculative_steps - 1``) does nothing else. Earlier steps also set ``input_ids[i] = sampled[i]``, copy the
    hidden state, and increase position and sequence length by one, clamped to L - 1 and L. Rows [R, N) do not change,
    so they stay as :func:`prepare_decode_inputs` made them.

    Args:
        sampled: int32 or int64 ``[N]``, any stride. The tokens of this step.
        current_draft_step: int64 ``[]`` or ``[1]``, at a fixed address, so that one captured step serves every step.
        draft_tokens: int32 or int64 ``[>= N, >= num_speculative_steps]``, any strides; **mutated** in one column.
        input_ids: int32 ``[>= N]``, contiguous; **mutated**.
        positions: int64 ``[>= N]``, contiguous; **mutated** if ``advance_positions``.
        seq_lens: int32 ``[>= N]``, contiguous; **mutated** if ``advance_positions``.
        num_speculative_steps: K, > 0.
        max_model_len: L, > 0.
        idx_mapping: int32 or int64 ``[>= N]``, any stride, or None. Only the signs are read.
        hidden_states: ``[>= N, width]``, 1, 2, 4 or 8 bytes per element, any strides, or None.
        next_hidden_states: ``[>= N, width]``, same dtype, any strides, or None (both or neither); **mutated**. It may
            be the same view as ``hidden_states``, and then nothing is copied. Otherwise the two must not share memory.
        sample_positions: int64 ``[>= N]``, contiguous, or None; **mutated**: + 1, never clamped.
        advance_positions: as in :func:`prepare_decode_inputs`.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> drafts, positions = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([7])
        >>> ids, seq_lens = torch.zeros(1, dtype=torch.int32), torch.tensor([8], dtype=torch.int32)
        >>> ops.update_draft_inputs(
        ...     torch.tensor([43]), torch.tensor(1), drafts, ids, positions, seq_lens,
        ...     num_speculative_steps=3, max_model_len=128)
        >>> drafts.tolist(), positions.tolist(), seq_lens.tolist()
        ([[0, 43, 0]], [8], [9])
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
    """Compute the cache slot of each token for every group of layers, in one launch over groups x tokens.

    The slot of a token at position p of row i is ``table[idx_mapping[i], p // B] * B + p % B``. Tokens of a row with a
    negative index get PAD, and no table is read for them; such rows need not be last here. Everything from
    ``query_start_loc[N]`` to the capacity gets PAD too. Same semantics as ``BlockTables.compute_slot_mappings`` of vLLM
    0.33.

    Args:
        idx_mapping: int32 or int64 ``[N]``, any stride. Row of the block tables; negative means PAD.
        query_start_loc: int32 ``[>= N + 1]``, contiguous, not decreasing.
        positions: int64 ``[>= query_start_loc[N]]``, contiguous.
        block_tables: 1 to 64 tensors int32 ``[S, columns]``, last stride 1, one per group.
        block_sizes: number of slots per block of each group, in tokens; 0 means a group without slots (all PAD).
        slot_mappings: int64 ``[groups, capacity]``, last stride 1; **mutated**, every element.
        cp_size: number of ranks that share the cache by context parallelism; 1 means none.
        cp_rank: this rank. Positions that another rank holds get PAD.
        cp_interleave: number of consecutive tokens on one rank. With ``cp_size`` > 1, it must divide the block size of
            each group that the ranks share. Otherwise two tokens would get one slot.
        cp_sharded: bool ``[groups]``, contiguous. Whether the ranks share the cache of a group. None means that all
            groups are shared.

    Raises:
        ValueError: ``cp_interleave`` does not divide a block size. With ``cp_sharded``, only the CPU raises, and CUDA
            gives all tokens of that group PAD.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> slots = torch.zeros(1, 4, dtype=torch.int64)
        >>> ops.compute_slot_mappings(
        ...     torch.tensor([0]), torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3, 4, 5]),
        ...     [torch.tensor([[7, 2]], dtype=torch.int32)], [4], slots)
        >>> slots.tolist()
        [[31, 8, 9, -1]]
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
    """Advance one EAGLE step of a runner that gathers its block tables: position, slot and length in one kernel.

    Let ``p = positions[i] + 1``. If p >= L, the new position is 0, the slot is PAD and the length is 1. Otherwise the
    slot is that of p (its block clamped to the last column) and the length is ``min(seq_lens[i] + 1, L)``. Same
    semantics as ``eagle_step_update_slot_mapping_and_metadata`` of vLLM 0.33 (V1 runner).

    Args:
        positions: int64 ``[N]``, contiguous.
        block_table: int32 ``[>= N, >= 1]``, last stride 1. Row i belongs to request i.
        seq_lens: int32 ``[>= N]``, contiguous; **mutated** in rows [0, N).
        new_positions: int64 ``[>= N]``, contiguous; **mutated** in rows [0, N). It may start at the address of
            ``positions`` (in place); otherwise the two must not share memory.
        slot_mapping: int64 ``[>= N]``, contiguous; **mutated**: PAD from row N on.
        block_size: number of tokens per block, > 0.
        max_model_len: L, > 0.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> positions, slots = torch.tensor([3]), torch.zeros(2, dtype=torch.int64)
        >>> lens = torch.tensor([4], dtype=torch.int32)
        >>> ops.eagle_step(positions, torch.tensor([[7, 2]], dtype=torch.int32), lens, positions, slots, 4, 128)
        >>> positions.tolist(), lens.tolist(), slots.tolist()
        ([4], [5], [8, -1])
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
    """Find the token from which the drafter continues each request, if rejected tokens stay in the batch.

    With d drafts, ``num_rejected[i] = d + 1 - valid_sampled_count[i]`` (0 without drafts), and the index is
    ``query_start_loc[i + 1] - 1 - num_rejected[i]``. Three kinds of rows get index 0 and 0 rejected tokens: rows
    without tokens, padded rows, and discarded rows. A row is discarded if ``discarded`` marks it, or if it has drafts
    but nothing was sampled for it. Same semantics as ``eagle_prepare_inputs_padded`` of vLLM 0.33, except that vLLM
    gives -1 for an empty first row.

    Args:
        cu_num_draft_tokens: int32 ``[N]``, contiguous. Number of drafts up to and including each request.
        valid_sampled_count: int32 ``[>= N]``, contiguous. Number of accepted drafts + 1.
        query_start_loc: int32 ``[>= N + 1]``, contiguous.
        token_indices_to_sample: int32 or int64 ``[>= N]``, any stride; **mutated**. It is 0 from row N on.
        num_rejected: int32 or int64 ``[>= N]``, any stride; **mutated**. It is 0 from row N on.
        discarded: bool ``[>= N]``, contiguous, or None.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> indices, rejected = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        >>> int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> ops.prepare_inputs_padded(int32(3), int32(2), int32(0, 4), indices, rejected)
        >>> indices.tolist(), rejected.tolist()  # 1 of 3 drafts accepted: tokens 2 and 3 are rejected
        ([1], [2])
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
    """Find the token with which each request continues, and count the tokens that the target sampled for it.

    Valid ids are in [0, vocab_size). The next token is the last valid one of the row, otherwise the backup. A discarded
    row gets its backup and a count of 0, whatever was sampled. Same semantics as ``eagle_prepare_next_token_padded`` of
    vLLM 0.33. (vLLM treats any id except -1 below ``vocab_size`` as valid; no sampler writes other ids.)

    Args:
        sampled_token_ids: int32 or int64 ``[N, >= 0]``, any strides; -1 means no token.
        discarded: bool ``[>= N]``, contiguous. Rows whose tokens are not used.
        backup_next_token_ids: int32 or int64 ``[>= N]``, any stride.
        next_token_ids: int32 or int64 ``[>= N]``, any stride; **mutated**. It is 0 from row N on.
        valid_sampled_count: int32 or int64 ``[>= N]``, any stride; **mutated**. It is 0 from row N on.
        vocab_size: V, > 0.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> next_ids, counts = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        >>> sampled = torch.tensor([[5, 6, -1], [-1, -1, -1]])
        >>> keep, backup = torch.tensor([False, False]), torch.tensor([1, 2])
        >>> ops.prepare_next_token_padded(sampled, keep, backup, next_ids, counts, vocab_size=100)
        >>> next_ids.tolist(), counts.tolist()
        ([6, 2], [2, 0])
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
    """Sample one token per row from ``softmax(logits / temperature)``, or take the argmax at temperature 0.

    It uses the Gumbel-max trick: the token with the largest ``logits / temperature + noise`` wins, and the lowest one
    among equals. The noise of a token depends only on (seed, position, step, token). An integer hash and fixed
    arithmetic make it bit-identical on every device. CPU and CUDA therefore draw the same token, in any row, with any
    padding, captured or not. At temperature 0 (or below the smallest normal float32) there is no noise, and the result
    is that of ``torch.argmax``.

    A NaN logit is never drawn: it counts as -inf (``torch.argmax`` would return it). A row with only -inf and NaN gives
    token 0. A padded row (negative index) gives token 0; its logits are not read, and the cache does not change.

    Args:
        logits: float32, float16 or bfloat16 ``[N, V]``, any strides.
        idx_mapping: int32 or int64 ``[>= N]``, any stride. Request-state index; negative in padded rows.
        temperature: float32 ``[S]``, contiguous, by request-state index.
        seeds: int64 ``[S]``, contiguous, by request-state index.
        positions: int64 ``[>= N]``, contiguous. The position that keys the noise.
        step: int64, one element (``[]`` or ``[1]``) or ``[>= N]``, contiguous. The draft step.
        sampled: int32 or int64 ``[>= N]``, any stride, or ``[>= N, K]``, any strides; **mutated** in rows [0, N). In a
            matrix only column ``step`` is written.
        logits_cache: ``[S, K, >= V]``, dtype of ``logits``, any strides, or None; **mutated**. The logits of row i,
            before temperature, are written to ``[idx_mapping[i], step, :V]``.
        workspace: int64 ``[>= 2 * N]``, contiguous, all 0, or None. Scratch memory of the CUDA kernel, which is 0 again
            after the call, so one buffer serves every call on one stream. If None, the call allocates it.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> sampled = torch.zeros(1, dtype=torch.int64)
        >>> ops.gumbel_sample(
        ...     torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]), torch.tensor([0.0]), torch.tensor([1]),
        ...     torch.tensor([7]), torch.tensor(0), sampled)
        >>> sampled.tolist()
        [1]
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
    """Prepare the first pass of a drafter that reads the sequence itself: insert P new tokens in each request.

    Each request becomes: its accepted tokens | the bonus token | P - 1 mask tokens | its rejected tokens. It grows by P
    tokens (``num_new_tokens``), or by P - 1 if ids are shifted, because shifting drops the first id. Request i starts
    at ``target_query_start_loc[i] + i * growth``. Positions continue from the request's first one, through the rejected
    tokens too. A request without tokens gets no new ones: the tokens it grows by are marked as rejected, and its
    indices are 0.

    It covers two functions of vLLM 0.33: ``prepare_prefill_inputs`` of ``standalone_ar`` (P = 1, with ``idx_mapping``
    and ``max_model_len``), and ``copy_and_expand_eagle_inputs`` of the V1 runner. The latter gives rejected tokens
    position 0; a slot computed from it would be the sequence's first.

    Args:
        target_input_ids: int32 or int64 ``[>= T]``, any stride.
        target_positions: int64 ``[>= T]``, contiguous.
        target_query_start_loc: int32 ``[>= N + 1]``, contiguous.
        num_rejected: int32 or int64 ``[N]``, any stride; clamped to the tokens of the request.
        next_token_ids: int32 or int64, any stride. The bonus token of each row ``[>= N]``, or, with ``idx_mapping``, of
            each request-state index ``[S]``.
        input_ids: int32 ``[capacity]``, contiguous; **mutated**. It is ``padding_token_id`` at rejected tokens and
            after the last request.
        positions: int64 ``[capacity]``, contiguous; **mutated**. It is 0 after the last request.
        is_rejected: bool ``[capacity]``, contiguous; **mutated**. It is True also after the last request.
        is_masked: bool ``[capacity]``, contiguous; **mutated**: the mask tokens.
        new_token_indices: int32 or int64 ``[>= N * P]``, any stride; **mutated**. Indices of each request's bonus and
            mask tokens. They are 0 after the last request. With P = 1 these are the indices to sample at.
        num_new_tokens: P, > 0.
        padding_token_id: 32-bit id for rejected and unused tokens.
        mask_token_id: 32-bit id of the P - 1 tokens that are drafted in parallel.
        shift_input_ids: whether ids move up by one relative to positions (EAGLE).
        max_model_len: L, or None: positions are clamped to L - 1, or not at all.
        idx_mapping: int32 or int64 ``[>= N]``, any stride, or None.
        hidden_state_mapping: int32 or int64 ``[>= T]``, any stride, or None; **mutated**. Only with
            ``shift_input_ids``. The index to which each target token's hidden state moves. It is -1 after the last
            request.

    Raises:
        ValueError: on the CPU, the capacity is too small for all tokens.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> int32, int64 = (lambda *v: torch.tensor(v, dtype=torch.int32)), (lambda *v: torch.tensor(v))
        >>> ids, rejected = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.bool)
        >>> ops.copy_expand_inputs(
        ...     int32(5, 6, 7), int64(0, 1, 2), int32(0, 3), int64(1), int64(9),
        ...     ids, torch.zeros(5, dtype=torch.int64), rejected, torch.zeros(5, dtype=torch.bool), int64(0))
        >>> ids.tolist(), rejected.tolist()
        ([5, 6, 9, 0, 0], [False, False, False, True, True])
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
    """Compute the attention metadata of the batch from :func:`copy_expand_inputs`: every query grows by the same
    number.

    ``query_start_loc[i] = target_query_start_loc[i] + i * num_new_tokens`` and ``seq_lens[i] = min(target_seq_lens[i] +
    num_new_tokens, L)``. A token's slot is that of its position in row i of ``block_table``. It is PAD if the position
    is L or more, or if the token is rejected. Same semantics as ``extend_all_queries_by_N`` and
    ``compute_new_slot_mapping`` of vLLM 0.33.

    Args:
        target_query_start_loc: int32 ``[>= N + 1]``, contiguous.
        target_seq_lens: int32 ``[N]``, contiguous.
        positions: int64 ``[>= the new end]``, contiguous.
        is_rejected: bool ``[>= the new end]``, contiguous.
        block_table: int32 ``[N, columns]``, last stride 1; as many rows as queries.
        query_start_loc: int32 ``[>= N + 1]``, contiguous; **mutated**. It is the new end from row R on.
        seq_lens: int32 ``[>= N]``, contiguous; **mutated**. It is 0 from row R on.
        slot_mapping: int64 ``[capacity]``, contiguous; **mutated**. It is PAD after the last request.
        block_size: number of tokens per block, > 0.
        max_model_len: L, > 0.
        num_new_tokens: number of tokens by which each query grows, >= 0.
        idx_mapping: int32 or int64 ``[>= N]``, any stride, or None. Only the signs are read.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> int32 = lambda *values: torch.tensor(values, dtype=torch.int32)
        >>> starts, lens, slots = int32(0, 0), int32(0), torch.zeros(4, dtype=torch.int64)
        >>> ops.extend_queries(
        ...     int32(0, 2), int32(4), torch.tensor([2, 3, 4]), torch.tensor([False, False, False]), int32(7, 2)[None],
        ...     starts, lens, slots, block_size=4, max_model_len=128)
        >>> starts.tolist(), lens.tolist(), slots.tolist()
        ([0, 3], [5], [30, 31, 8, -1])
    """


@op(mutates=("local_seq_lens",))
def dcp_local_seq_lens(
    seq_lens: Tensor, local_seq_lens: Tensor, dcp_size: int, dcp_rank: int, cp_interleave: int = 1
) -> None:
    """Count the tokens of each sequence that lie on this rank of decode context parallelism.

    Tokens are distributed over the ranks in turn, in runs of ``cp_interleave``. Same semantics as
    ``prepare_dcp_local_seq_lens`` of vLLM 0.33.

    Args:
        seq_lens: int32 ``[N]``, contiguous; 0 in padded rows. A negative length counts as 0.
        local_seq_lens: int32 ``[>= N]``, contiguous; **mutated**; 0 from row N on. It may start at the address of
            ``seq_lens`` (in place); otherwise the two must not share memory.
        dcp_size: number of ranks, > 0.
        dcp_rank: this rank, in [0, dcp_size).
        cp_interleave: number of consecutive tokens on one rank, > 0.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> local = torch.zeros(2, dtype=torch.int32)
        >>> ops.dcp_local_seq_lens(torch.tensor([5, 8], dtype=torch.int32), local, dcp_size=2, dcp_rank=1)
        >>> local.tolist()
        [2, 4]
    """


@op(mutates=("sampled_tokens", "context_tokens"))
def gather_step_tokens(
    input_ids: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    num_sampled: Tensor,
    last_sampled: Tensor,
    sampled_tokens: Tensor,
    context_tokens: Tensor,
) -> None:
    """Collect the tokens that a step added to its requests, for :func:`update_draft_vocabulary`.

    Request i computed the tokens ``[query_start_loc[i], query_start_loc[i + 1])``. The last ``cu_num_logits[i + 1] -
    cu_num_logits[i] - 1`` of them are drafts. The target accepted the first ``num_sampled[i] - 1`` drafts, and sampled
    one more token.

    Args:
        input_ids: int32 or int64 ``[>= T]``, any stride. Token ids of the target's batch.
        query_start_loc: int32 ``[>= N + 1]``, contiguous. First token of each request, then the end.
        cu_num_logits: int32 ``[>= N + 1]``, contiguous. First logit of each request, then the end.
        idx_mapping: int32 or int64 ``[N]``, any stride. Request-state index; negative in padded rows, which come last.
        num_sampled: int32 or int64 ``[>= N]``, any stride. Number of tokens that the target sampled; 0 in a prompt
            chunk.
        last_sampled: int32 or int64 ``[S]``, any stride, by request-state index. The last sampled token.
        sampled_tokens: int32 or int64 ``[>= N, >= 1]``, any strides; **mutated**: the accepted drafts of each request,
            then its last sampled token, then -1. Tokens after the last column are left out.
        context_tokens: int32 or int64 ``[capacity]``, any stride; **mutated**: the ids that are not drafts, and -1 in
            all other places.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> int32, int64 = (lambda *v: torch.tensor(v, dtype=torch.int32)), (lambda *v: torch.tensor(v))
        >>> sampled, context = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
        >>> ops.gather_step_tokens(  # a request with two drafts, of which one is accepted, and a prompt
        ...     int32(7, 20, 21, 4, 5, 6), int32(0, 3, 6), int32(0, 3, 4), int64(1, 0), int32(2, 1), int64(8, 30),
        ...     sampled, context)
        >>> sampled.tolist(), context.tolist()
        ([[20, 30, -1], [8, -1, -1]], [7, -1, -1, 4, 5, 6])
    """


@op(mutates=("token_ids", "row_of_token", "weight", "used", "hand", "counters"))
def update_draft_vocabulary(
    sampled_tokens: Tensor,
    head: Tensor,
    token_ids: Tensor,
    row_of_token: Tensor,
    weight: Tensor,
    used: Tensor,
    hand: Tensor,
    counters: Tensor,
    prompt_tokens: Tensor | None = None,
    first_token: int = 0,
) -> None:
    """Let a draft vocabulary, a set of N tokens with copies of their rows of the head, follow the tokens of a step.

    The list of a call is ``prompt_tokens``, then ``sampled_tokens``. A listed token that is in the set marks its row as
    used. One that is missing takes the row of another token, by the CLOCK algorithm: the hand goes over the rows,
    clears the marks that it finds, and stops at a row without one. It never takes the row of a listed token. A token
    that is listed twice counts once, by its last place. At most half of the rows change in a call (one row if N = 1).
    If more tokens are missing, the last ones of the list enter, in the order of the list.

    The result depends only on the arguments, so CPU and CUDA leave the same bytes. Ids outside ``[first_token,
    first_token + V)`` are padding (-1) or belong to another rank of tensor parallelism. They are skipped.

    Args:
        sampled_tokens: int32 or int64 ``[>= 0]``, any stride. The tokens that ``counters`` counts.
        head: ``[V, H]``, any dtype of 1, 2, 4 or 8 bytes, contiguous rows. The output head, or this rank's part of it.
        token_ids: int64 ``[N]`` with 1 <= N <= V, contiguous; **mutated**. The token of each row.
        row_of_token: int32 ``[>= V]``, contiguous; **mutated**. The row of each token of the head, -1 without one.
        weight: dtype of ``head``, ``[N, H]``, contiguous rows; **mutated**. Row r has the bytes of the head's row of
            ``token_ids[r]``.
        used: int32 ``[>= ceil(N / 32)]``, contiguous; **mutated**. One bit per row, the lowest bit first.
        hand: int32 ``[>= 1]``, contiguous; **mutated**. The row where the next search starts.
        counters: int64 ``[>= 2]``, contiguous; **mutated**. Number of sampled tokens of this head so far, and of those
            that were not in the set before their call. Duplicates count.
        prompt_tokens: int32 or int64 ``[>= 0]``, any stride, or None. Tokens that enter too, but are not counted.
        first_token: the token of the first row of ``head``.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> head, token_ids = torch.arange(6.0)[:, None], torch.arange(2)
        >>> rows, weight = torch.tensor([0, 1, -1, -1, -1, -1], dtype=torch.int32), head[:2].clone()
        >>> used, hand = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        >>> counters = torch.zeros(2, dtype=torch.int64)
        >>> ops.update_draft_vocabulary(torch.tensor([0, 5, -1]), head, token_ids, rows, weight, used, hand, counters)
        >>> token_ids.tolist(), weight.flatten().tolist(), counters.tolist()  # 0 is in use, so 5 takes the row of 1
        ([0, 5], [0.0, 5.0], [2, 1])
    """


@op(mutates=("tokens", "values"))
def argmax_draft_tokens(logits: Tensor, token_ids: Tensor, tokens: Tensor, values: Tensor | None = None) -> None:
    """Find the token with the largest logit in each row, if the logits are those of the tokens ``token_ids``.

    The lowest token wins among equal logits, so the order of ``token_ids`` does not matter. A NaN counts as -inf. A row
    with only -inf and NaN gives token 0 with the value -inf.

    Args:
        logits: float32, float16 or bfloat16 ``[R, N]``, any strides.
        token_ids: int64 ``[>= N]``, contiguous. Ids in [0, 2^31).
        tokens: int32 or int64 ``[>= R]``, any stride; **mutated** in rows [0, R).
        values: float32 ``[>= R]``, contiguous, or None; **mutated** in rows [0, R): the largest logit (0 for -0).

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> tokens = torch.zeros(1, dtype=torch.int64)
        >>> ops.argmax_draft_tokens(torch.tensor([[2.0, 1.0, 2.0]]), torch.tensor([70, 3, 50]), tokens)
        >>> tokens.tolist()
        [50]
    """


@op(mutates=("out",))
def expand_draft_logits(logits: Tensor, row_of_token: Tensor, out: Tensor) -> None:
    """Spread the logits of a draft vocabulary over the whole vocabulary: a token outside the set gets -inf.

    A sampler that draws from ``out`` never draws a token outside the set, and rejection sampling finds in it the
    distribution that was drawn from.

    Args:
        logits: float32, float16 or bfloat16 ``[R, N]``, any strides.
        row_of_token: int32 ``[V]``, contiguous. The column of each token in ``logits``; -1 outside the set.
        out: dtype of ``logits``, ``[R, >= V]``, any strides; **mutated**. Columns from V on are -inf.

    Example:
        >>> import torch
        >>> from nwor_ops import ops
        >>> out = torch.zeros(1, 4)
        >>> ops.expand_draft_logits(torch.tensor([[2.0, 1.0]]), torch.tensor([-1, 1, 0, -1], dtype=torch.int32), out)
        >>> out.tolist()
        [[-inf, 1.0, 2.0, -inf]]
    """
