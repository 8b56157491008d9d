"""Family drafter: the ops of a drafter's loop, compared with the oracle on all surrounding memory, and by hand."""

from __future__ import annotations

import math

import bad_input
import draft_examples as samples
import oracle_checks
import pytest
import torch
from expecttest import assert_expected_inline
from tensors import flags, int32, int64, numbers

from nwor_ops import ops
from nwor_ops.testing import layouts
from nwor_ops.testing.oracle import drafter as oracle_drafter
from nwor_ops.testing.samples import argument_names, named, with_arguments


def run(op, arguments, device="cpu"):
    """Run the op on a copy of the arguments, and return the copy by name."""
    ours = layouts.twin(arguments, device)
    getattr(ops, op)(*ours)
    return named(op, ours)


# ---------------------------------------------------------------- by hand, without the oracle


def test_prefill_by_hand(device):
    """Two of four tokens rejected, a chunk of a prompt, one of four rejected, and a padded row with misleading data."""
    after = run("prepare_prefill_inputs", samples.prefill(), device)
    # row 0: tokens 100, 101 | 102, 103 rejected; row 1: token 104; row 2: 105, 106, 107 | 108 rejected
    assert after["input_ids"].tolist() == [101, 503, 0, 0, 600, 106, 107, 502, 0, 0, 0, 0]
    assert after["positions"].tolist() == [*range(1000, 1009), 0, 0, 0]
    assert after["query_start_loc"].tolist() == [0, 4, 5, 9, 9, 9, 9]
    assert after["seq_lens"].tolist() == [10, 11, 12, 0, 0, 0]
    assert after["last_token_indices"].tolist() == [1, 4, 7, 0, 0, 0]
    assert after["current_draft_step"].item() == 0


@pytest.mark.parametrize("rejected", [2, 3, 99])
def test_prefill_of_a_row_without_a_valid_token(device, rejected):
    """vLLM's kernel writes index -1, and for row 0 an id before the buffer."""
    arguments = samples.prefill((0, 2, 3), (1, 0), (rejected, 0), (1, 1), capacity=4)
    after = run("prepare_prefill_inputs", arguments, device)
    assert after["last_token_indices"].tolist() == [0, 2, 0, 0, 0, 0]
    assert after["input_ids"].tolist() == [0, 0, 500, 0]


def test_decode_by_hand(device):
    after = run("prepare_decode_inputs", samples.decode(), device)
    assert after["input_ids"].tolist() == [200, 203, 206, 0, 0, 0, 77, 77]
    assert after["positions"].tolist() == [8, 31, 31, 0, 0, 0]
    assert after["query_start_loc"].tolist() == [0, 1, 2, 3, 3, 3, 3]
    assert after["seq_lens"].tolist() == [9, 32, 32, 0, 0, 0]
    assert after["sample_positions"].tolist() == [2**33 + 1, 2**33 + 2, 2**33 + 3, 0, 0, 0]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_update_by_hand(step):
    """The last step stores its token and changes nothing else. A padded row never changes."""
    before = samples.update(step)
    after = run("update_draft_inputs", before)
    drafts = [[300 + row if column == step and row < 3 else 77 for column in range(3)] for row in range(5)]
    assert after["draft_tokens"].tolist() == drafts
    if step == 2:
        kept = [i for i, name in enumerate(argument_names("update_draft_inputs")) if name != "draft_tokens"]
        ours = list(after.values())
        assert layouts.same_memory([before[i] for i in kept], [ours[i] for i in kept])
        return
    assert after["input_ids"].tolist() == [300, 301, 302, 77, 77]
    assert after["positions"].tolist() == [9, 31, 31, -1]
    assert after["seq_lens"].tolist() == [10, 32, 32, 0]
    assert torch.equal(after["next_hidden_states"][:3], after["hidden_states"][:3])
    assert torch.equal(after["next_hidden_states"][3:], named("update_draft_inputs", before)["next_hidden_states"][3:])


def test_update_in_place_copies_nothing():
    """The model may write its hidden states to the place where it will read them."""
    arguments = samples.update()
    hidden = numbers(4, 24, dtype=torch.bfloat16)
    shared = with_arguments("update_draft_inputs", arguments, hidden_states=hidden, next_hidden_states=hidden[:, :])
    after = run("update_draft_inputs", shared)
    assert torch.equal(after["next_hidden_states"], hidden)
    assert after["input_ids"].tolist() == [300, 301, 302, 77, 77]
    oracle_checks.refuse(
        "update_draft_inputs",
        with_arguments(
            "update_draft_inputs", arguments, hidden_states=hidden[:, 1:], next_hidden_states=hidden[:, :-1]
        ),
        ValueError,
        "next_hidden_states and hidden_states must not share memory",
    )


def test_slots_by_hand(device):
    """Block size 4, columns 50 + 6 * state + block; row 3 is padded."""
    after = run("compute_slot_mappings", samples.slots(), device)
    first = [68 * 4 + 2, 68 * 4 + 3, 69 * 4, 69 * 4 + 1]  # state 3, positions 2 to 5
    second = [51 * 4 + 2]  # state 0, position 6
    third = [63 * 4 + 3, 64 * 4, 64 * 4 + 1, 64 * 4 + 2]  # state 2, positions 7 to 10
    assert after["slot_mappings"].tolist() == [[*first, *second, *third, -1, -1, -1]]


def test_only_shared_groups_need_whole_runs(device):
    """A group of which each rank has all tokens, a group without slots, and a single rank."""
    whole = samples.slots(block_sizes=(6, 4, 0), size=2, rank=0, interleave=3, sharded=flags(1, 0, 1))
    after = run("compute_slot_mappings", whole, device)["slot_mappings"]
    one_rank = run("compute_slot_mappings", samples.slots(block_sizes=(4, 4)))["slot_mappings"]
    assert torch.equal(after[1].cpu(), one_rank[1])
    assert (after[2] == -1).all()
    alone = run("compute_slot_mappings", samples.slots(size=1, rank=0, interleave=3), device)["slot_mappings"]
    assert torch.equal(alone.cpu(), one_rank[:1])


@pytest.mark.debug_mode
def test_blocks_that_split_a_run_of_a_rank(device):
    """Two tokens would get one slot. With `cp_sharded`, CUDA finds it in the kernel, and the tokens get no slots."""
    arguments = samples.slots(block_sizes=(4, 6), size=2, rank=0, interleave=3, sharded=flags(1, 1))
    left = named("compute_slot_mappings", bad_input.left_by_the_oracle("compute_slot_mappings", arguments))
    left["slot_mappings"][0] = -1
    bad_input.check_bad_data(
        "compute_slot_mappings", arguments, ValueError,
        r"block_sizes must be multiples of cp_interleave \(3\) in groups that the ranks share, got 4 in group 0",
        device, tuple(left.values()),
    )  # fmt: skip
    wrong = layouts.twin(samples.slots(block_sizes=(0, 6, 4), size=2, rank=0, interleave=3), device)
    sentence = r"block_sizes\[2\] must be a multiple of cp_interleave \(3\) with cp_size > 1, got 4"
    oracle_checks.refuse("compute_slot_mappings", wrong, ValueError, sentence)


def test_eagle_step_by_hand(device):
    after = run("eagle_step", samples.eagle(), device)
    # rows of 7 columns from 50 on; positions 3, 4, 31 | 32 and 41 are past the end | 0
    assert after["new_positions"].tolist() == [3, 4, 31, 0, 0, 0, 77]
    assert after["seq_lens"].tolist() == [4, 5, 32, 1, 1, 1, 77, 77, 77]
    assert after["slot_mapping"].tolist() == [203, 58 * 4, 70 * 4 + 3, -1, -1, 85 * 4, -1, -1, -1]


def test_eagle_step_in_place():
    arguments = samples.eagle()
    separate = run("eagle_step", arguments)
    positions = arguments[0]
    after = run("eagle_step", with_arguments("eagle_step", arguments, new_positions=positions))
    assert after["positions"].tolist() == separate["new_positions"][:6].tolist()
    assert torch.equal(after["slot_mapping"], separate["slot_mapping"])


def test_padded_inputs_by_hand(device):
    """Two of four rejected, no drafts, none rejected, nothing sampled, a row without tokens, and padded rows."""
    after = run("prepare_inputs_padded", samples.padded_inputs(), device)
    assert after["num_rejected"].tolist() == [2, 0, 0, 0, 0, 0, 0]
    assert after["token_indices_to_sample"].tolist() == [1, 4, 8, 0, 0, 0, 0]
    marked = run("prepare_inputs_padded", samples.padded_inputs(discarded=(1, 1, 0, 0, 0)), device)
    assert marked["num_rejected"].tolist() == [0] * 7
    assert marked["token_indices_to_sample"].tolist() == [0, 0, 8, 0, 0, 0, 0]


def test_next_token_by_hand(device):
    after = run("prepare_next_token_padded", samples.next_token(), device)
    assert after["next_token_ids"].tolist() == [6, 401, 7, 403, 8, 0, 0]
    assert after["valid_sampled_count"].tolist() == [2, 0, 1, 0, 1, 0, 0]


def test_expand_by_hand(device):
    """Shifted ids with two mask tokens: each request grows by two."""
    after = run("copy_expand_inputs", samples.expand(), device)
    first = [101, 503, 12, 12, 11, 11]  # 100, 101 accepted, 102, 103 rejected
    second = [500, 12, 12]
    third = [106, 107, 502, 12, 12, 11]
    assert after["input_ids"].tolist() == [*first, *second, *third, *[11] * 9]
    expected = [*range(1000, 1006), *range(1004, 1007), *range(1005, 1011), *[0] * 9]
    assert after["positions"].tolist() == expected
    assert after["is_rejected"].nonzero().flatten().tolist() == [4, 5, 14, *range(15, 24)]
    assert after["is_masked"].nonzero().flatten().tolist() == [2, 3, 7, 8, 12, 13]
    assert after["new_token_indices"].tolist() == [1, 2, 3, 6, 7, 8, 11, 12, 13, 0, 0, 0, 0]
    mapping = after["hidden_state_mapping"].tolist()
    assert mapping == [0, 1, 2, 3, 6, 9, 10, 11, 12, -1, -1]


def test_extend_by_hand(device):
    after = run("extend_queries", samples.extend(), device)
    assert after["query_start_loc"].tolist() == [0, 5, 7, 12, 12, 12, 12]
    assert after["seq_lens"].tolist() == [11, 32, 32, 0, 0, 0]

    def slot(row, position):
        return (50 + row * 8 + position // 4) * 4 + position % 4

    first = [slot(0, 20), slot(0, 21), slot(0, 22), -1, slot(0, 24)]  # every fifth token from 3 on is rejected
    second = [slot(1, 25), slot(1, 26)]
    third = [slot(2, 27), -1, slot(2, 29), slot(2, 30), slot(2, 31)]
    assert after["slot_mapping"].tolist() == [*first, *second, *third, -1, -1, -1, -1]
    late = run("extend_queries", samples.extend(first_position=29), device)
    assert late["slot_mapping"].tolist() == [slot(0, 29), slot(0, 30), slot(0, 31), *[-1] * 13]


def test_update_draft_vocabulary_by_hand(device):
    """Rows 0 to 7 have tokens 3, 10, 17, 24, 31, 38, 5, 12. Rows 0, 4 and 7 are marked, and the hand is at row 3."""
    after = run("update_draft_vocabulary", samples.vocabulary(), device)
    # The list is 17, 12, 17, 10, 40, 24, 3, 9, -1, 9, and 40 is no token: rows 0, 1, 2, 3 and 7 are listed.
    # The hand passes row 3, clears row 4, and 9 takes row 5.
    tokens = [3, 10, 17, 24, 31, 9, 5, 12]
    assert after["token_ids"].tolist() == tokens
    assert after["used"][0].item() == 0b10101111
    assert after["hand"][0].item() == 6
    assert after["counters"].tolist() == [100 + 3, 7 + 2]  # 3, 9 and 9
    assert after["row_of_token"].tolist() == [tokens.index(t) if t in tokens else -1 for t in range(40)]
    assert torch.equal(after["weight"], after["head"][tokens])


def test_argmax_draft_tokens_by_hand(device):
    logits = torch.tensor([[1.0, 5.0, 5.0, math.nan], [-math.inf, math.nan, -math.inf, -1.0], [-math.inf] * 4])
    tokens, values = samples.poisoned(3, dtype=torch.int64), samples.poisoned(3, dtype=torch.float32)
    after = run("argmax_draft_tokens", (logits, int64(9, 700, 30, 2), tokens, values), device)
    assert after["tokens"].tolist() == [30, 2, 0]
    assert after["values"].tolist() == [5.0, -1.0, -math.inf]


def test_expand_draft_logits_by_hand(device):
    arguments = torch.tensor([[1.0, math.nan]]), int32(-1, 1, -1, 0), samples.poisoned(1, 5, dtype=torch.float32)
    out = run("expand_draft_logits", arguments, device)["out"][0].tolist()
    assert out[0] == out[2] == out[4] == -math.inf
    assert math.isnan(out[1])
    assert out[3] == 1.0


def test_local_lens_by_hand(device):
    """Four ranks take turns of two tokens, so rank 1 holds tokens 2, 3, 10, 11, 18, ..."""
    after = run("dcp_local_seq_lens", samples.local_lens(), device)
    assert after["local_seq_lens"].tolist() == [0, 0, 2, 2, 2, 26, 0, 0]
    lens = int32(0, 1, 7, 8, 9, 100)
    ops.dcp_local_seq_lens(lens, lens, 4, 1, 2)
    assert lens.tolist() == [0, 0, 2, 2, 2, 26]


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [1, 24, 33, 64, 4096, 4100])
def test_hidden_rows_of_any_width(device, width, dtype, step):
    """Accesses of 16 bytes and of single elements, over several blocks. The memory before a row makes it misaligned."""
    op, arguments = (
        "update_draft_inputs",
        samples.update(step, width=width, rows=5, states=(1, 2, 3, 0, samples.PADDED)),
    )
    for offset in (0, 1, 8):
        hidden = torch.arange(5 * width + offset).to(dtype)[offset:].view(5, width)
        target = torch.zeros(5 * width + 16, dtype=dtype)[8 : 8 + 5 * width].view(5, width)
        strided = torch.zeros(5, 2 * width, dtype=dtype)[:, ::2]
        for into in (target, strided):
            changed = with_arguments(op, arguments, hidden_states=hidden, next_hidden_states=into)
            oracle_checks.assert_same_as_oracle(op, changed, device)


def test_most_tables(device):
    oracle_checks.assert_same_as_oracle("compute_slot_mappings", samples.slots(block_sizes=(4,) * 64), device)
    more = layouts.twin(samples.slots(block_sizes=(4,) * 65), device)
    oracle_checks.refuse("compute_slot_mappings", more, ValueError, "block_tables must hold 1 to 64 tables, got 65")


@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_no_slot_beyond_a_full_table(device, num_drafts):
    """Sequences end at the model's limit, and one and two tokens before it. After each row comes another block."""
    size, limit, lengths, tokens = 4, 32, (32, 31, 30), num_drafts + 1
    blocks, room = torch.randperm(24).view(3, 8), 3 * (num_drafts + 2)
    table = torch.nn.functional.pad(blocks, (0, 1), value=999).int().to(device)[:, :8]

    def tensor(values, dtype=torch.int32):
        return torch.tensor(list(values), dtype=dtype, device=device)

    def zeros(*shape, dtype=torch.int32):
        return torch.zeros(shape, dtype=dtype, device=device)

    def slots_of(row, positions):
        """At the limit, each further token replaces the last one."""
        return [int(blocks[row, min(p, 31) // size]) * size + min(p, 31) % size for p in positions]

    # The first pass of a draft model: the verified tokens and one more.
    starts, lens, none = tensor(range(0, 3 * tokens + 1, tokens)), tensor(lengths), zeros(3)
    places = tensor((p for length in lengths for p in range(length - tokens, length)), torch.int64)
    ids, positions, marks = zeros(room), zeros(room, dtype=torch.int64), zeros(2, room, dtype=torch.bool)
    slots, seq_lens = zeros(room, dtype=torch.int64), zeros(3)
    ops.copy_expand_inputs(
        zeros(3 * tokens), places, starts, none, none, ids, positions, *marks, zeros(3), max_model_len=limit
    )
    ops.extend_queries(starts, lens, positions, marks[0], table, zeros(4), seq_lens, slots, size, limit)
    expected = [slot for row, end in enumerate(lengths) for slot in slots_of(row, range(end - tokens, end + 1))]
    assert (slots.tolist(), seq_lens.tolist()) == (expected, [32, 32, 31])

    # The steps of one token, and those of vLLM's V1 runner, which have no slot at the limit.
    positions, starts, slots = lens.long().clamp(max=31), zeros(4), zeros(2, 3, dtype=torch.int64)
    eagle, eagle_lens, drafts = lens.long() - 1, lens.clone(), zeros(3, 8, dtype=torch.int64)
    ops.prepare_decode_inputs(drafts, lens + 1, none, ids, positions, starts, seq_lens, limit)
    for step in range(num_drafts):
        ops.compute_slot_mappings(tensor(range(3)), starts, positions, [table], [size], slots[:1])
        ops.eagle_step(eagle, table, eagle_lens, eagle, slots[1], size, limit)
        for row, place in enumerate(length + step for length in lengths):
            assert slots[:1, row].tolist() == slots_of(row, [place + 1])
            if place <= limit:
                assert slots[1:, row].tolist() == ([-1] if place == limit else slots_of(row, [place]))
            assert slots[1, row].item() // size in (-1, *blocks[row].tolist())
        assert seq_lens.tolist() == [min(length + step + 2, limit) for length in lengths]
        assert eagle_lens.max() <= limit
        ops.update_draft_inputs(none, tensor([step], torch.int64), drafts, ids, positions, seq_lens, 8, limit)


# ---------------------------------------------------------------- gumbel_sample


def draw(logits, temperature=1.0, seeds=None, positions=None, step=0, states=None, device="cpu", **options):
    rows = len(logits)
    states = torch.arange(rows) if states is None else torch.tensor(states)
    count = max([rows, *(states + 1).tolist()])
    arguments = (
        logits, states, torch.full((count,), float(temperature)),
        torch.zeros(count, dtype=torch.int64) if seeds is None else torch.as_tensor(seeds),
        torch.arange(rows) if positions is None else torch.as_tensor(positions),
        torch.tensor(step), torch.full((rows,), 77, dtype=torch.int64),
    )  # fmt: skip
    ours = layouts.twin(arguments, device)
    ops.gumbel_sample(*ours, **options)
    return ours[6].cpu()


def random_logits(rows, vocab, dtype=torch.float32, seed=0, scale=1.0):
    return (scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_temperature_zero_is_argmax(device, dtype):
    logits = random_logits(20, 3001, dtype)
    assert torch.equal(draw(logits, 0.0, device=device), logits.argmax(-1))
    assert torch.equal(draw(logits, 1e-39, device=device), logits.argmax(-1))  # too small to divide by
    few_values = torch.randint(0, 3, (20, 500)).to(dtype)  # many equal logits
    few_values[:, 7] = 2
    first = [int((row == row.max()).nonzero()[0]) for row in few_values]
    assert draw(few_values, 0.0, device=device).tolist() == first
    signed_zeros = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]]).to(dtype)
    assert draw(signed_zeros, 0.0, device=device).tolist() == [1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_nan_is_drawn(device, temperature):
    nan, inf = math.nan, math.inf
    rows = [
        [nan, 1.0, nan, nan], [nan, nan, nan, nan], [-inf, -inf, -inf, -inf], [-inf, nan, -inf, 5.0],
        [1.0, inf, nan, inf], [nan, -inf, nan, -inf],
    ]  # fmt: skip
    assert draw(torch.tensor(rows), temperature, device=device).tolist() == [1, 0, 0, 3, 1, 0]


@pytest.mark.parametrize("vocab", [1, 2, 3, 17, 4099])
@pytest.mark.parametrize("temperature", [1e-30, 0.05, 0.7, 1.0, 30.0, 1e30])
def test_draws_are_those_of_the_oracle(device, vocab, temperature):
    arguments = samples.sample(6, vocab, temperatures=(temperature,) * 6, states=None, steps=(0, 1, 2, 0, 1, 2))
    oracle_checks.assert_same_as_oracle("gumbel_sample", arguments, device)


def test_noise_is_pinned(device):
    """CPU, CUDA and every later version must give these values, because users rely on seeds."""
    of_tokens = oracle_drafter.noise(-(2**62) + 5, 2**33 + 1, 3, 4)
    tokens = draw(torch.zeros(8, 50_000), seeds=range(8), step=2, device=device).tolist()
    assert_expected_inline(
        f"{[round(x, 9) for x in of_tokens]}\n{tokens}",
        """\
[1.427382963, -0.275704801, -0.950371418, -0.819763607]
[35447, 21429, 17192, 33897, 3706, 3421, 1544, 45420]""",
    )


@pytest.mark.parametrize(("vocab", "dtype"), [(5000, torch.float32), (50_000, torch.bfloat16)], ids=str)
def test_a_row_does_not_depend_on_other_rows(device, vocab, dtype):
    """The same (seed, position, step) gives the same token in any row, order and batch, with any padding."""
    logits = random_logits(7, vocab, dtype)
    seeds, positions = torch.arange(7) * 11, torch.arange(7) + 2**35
    key = {"temperature": 0.9, "step": 4, "device": device}
    together = draw(logits, seeds=seeds, positions=positions, **key)
    for row in range(7):
        only = slice(row, row + 1)
        assert draw(logits[only], seeds=seeds[only], positions=positions[only], **key).item() == together[row]
    order = torch.tensor([3, 1, 6, 0, 2, 5, 4])
    assert torch.equal(draw(logits[order], seeds=seeds[order], positions=positions[order], **key), together[order])
    padded = torch.cat([logits, torch.full((3, vocab), math.nan, dtype=dtype)])
    more = {"seeds": torch.cat([seeds, seeds])[:10], "positions": [*positions.tolist(), 9, 9, 9]}
    with_padding = draw(padded, states=[*range(7), -1, -1, -1], **more, **key)
    assert with_padding.tolist() == [*together.tolist(), 0, 0, 0]
    strided = layouts.surrounded(logits.T.contiguous()).T
    assert torch.equal(draw(strided, seeds=seeds, positions=positions, **key), together)
    # A longer vocabulary whose additional tokens cannot win.
    wider = torch.cat([logits, torch.full((7, 99), -math.inf, dtype=dtype)], 1)
    assert torch.equal(draw(wider, seeds=seeds, positions=positions, **key), together)


def test_workspace_is_reusable(device):
    """The workspace is zero after every call. Calls with and without it give the same tokens."""
    workspace = torch.zeros(200, dtype=torch.int64, device=device)
    for number in range(20):
        rows = 1 + 7 * number % 64
        logits = random_logits(rows, 40_000, torch.bfloat16, seed=number)
        key = {"seeds": range(number, number + rows), "device": device}
        assert torch.equal(draw(logits, **key), draw(logits, workspace=workspace, **key))
        assert not workspace.any()


# Upper 0.1 % points of chi-square.
CRITICAL = {9: 27.9, 31: 61.1, 255: 330.5}


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("varied", ["seeds", "positions", "step"])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_distribution(device, varied, temperature):
    """60,000 draws (a million on CUDA) that differ in only one part of the key."""
    count = {"cpu": 60_000, "cuda": 1_000_000}[device]
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -2.0, 1.5, 0.0, 1.0], device=device)
    key = dict.fromkeys(("seeds", "positions", "step"), torch.full((count,), 12345, device=device))
    rows = torch.arange(count, device=device)
    key[varied] = rows * (1 if varied != "seeds" else 2**20 + 1)
    sampled = torch.zeros(count, dtype=torch.int64, device=device)
    ops.gumbel_sample(
        logits.expand(count, -1), rows, torch.full((count,), temperature, device=device), key["seeds"],
        key["positions"], key["step"], sampled,
    )  # fmt: skip
    counts = torch.bincount(sampled, minlength=len(logits)).double()
    probabilities = torch.softmax(logits.double() / temperature, 0)
    assert chi_square(counts, probabilities) < CRITICAL[9]


@pytest.mark.parametrize(("vocab", "cells"), [(128_256, 32), (256, 256)])
def test_uniform_over_a_large_vocabulary(vocab, cells):
    """With equal logits every part of the vocabulary is equally likely, including its ends and odd tokens."""
    count = 600 if vocab > 1000 else 20_000
    sampled = draw(torch.zeros(1, vocab).expand(count, -1), seeds=torch.arange(count))
    place = sampled * cells // vocab
    counts = torch.bincount(place, minlength=cells).double()
    assert chi_square(counts, torch.full((cells,), 1 / cells, dtype=torch.float64)) < CRITICAL[cells - 1]
    odd = int((sampled % 2).sum())
    assert abs(odd - count / 2) < 3.3 * math.sqrt(count) / 2


def test_two_tokens_of_a_pair_are_independent():
    """The two tokens share a hash, but their noises must be independent."""
    noises = torch.tensor([oracle_drafter.noise(seed, 3, 0, 2) for seed in range(20_000)]).double()
    correlation = torch.corrcoef(noises.T)[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(20_000)
    # E = exp(-noise) of each token is exponential: mean 1, variance 1.
    exponential = torch.exp(-noises)
    assert (exponential.mean(0) - 1).abs().max() < 4 / math.sqrt(20_000)
    assert (exponential.var(0) - 1).abs().max() < 4 * math.sqrt(8 / 20_000)


def test_the_column_is_a_number_on_the_device(device):
    """Only column `step` of a matrix of drafts is written. There is one step for all rows, or one per row."""
    after = run("gumbel_sample", samples.sample(steps=(2,)), device)
    assert (after["sampled"][:, :2] == 77).all()
    assert after["sampled"][:5, 2].max() < 40
    each = run("gumbel_sample", samples.sample(), device)
    written = (each["sampled"] != 77).nonzero().tolist()
    assert written == [[0, 1], [1, 0], [2, 2], [3, 1], [4, 1]]


def test_a_padded_row_may_hold_any_step(device):
    """A padded row has no column, and writes none."""
    after = run("gumbel_sample", samples.sample(steps=(1, 0, 2**40, 1, 1)), device)
    assert (after["sampled"][2] == 77).all()


# ---------------------------------------------------------------- invalid data


def test_positions_at_the_end_of_64_bits():
    """If a sum does not fit 64 bits, the result is the limit, or the largest number if there is no limit."""
    last = 2**63 - 1
    positions = samples.decode(positions=(last, 30, last - 1, 0, 0, 0))
    assert run("prepare_decode_inputs", positions)["positions"].tolist()[:3] == [31, 31, 31]
    rejected = with_arguments(
        "prepare_decode_inputs", samples.decode(advance=False), num_rejected=int64(-last, 0, last, 0)
    )
    lengths = run("prepare_decode_inputs", rejected)["seq_lens"].tolist()
    assert lengths[:3] == [2**31 - 1, 32, 33 - (2**31 - 1)]
    step = with_arguments("eagle_step", samples.eagle(positions=(0, 0, 3)), positions=int64(last, last - 1, 3))
    after = run("eagle_step", step)
    assert after["new_positions"].tolist()[:3] == [0, 0, 4]
    assert after["slot_mapping"].tolist()[:3] == [-1, -1, 4 * int(step[1][2, 1])]
    expanded = with_arguments("copy_expand_inputs", samples.expand(), target_positions=int64(*[last - 1] * 10))
    assert run("copy_expand_inputs", expanded)["positions"].tolist()[:4] == [last - 1, last, last, last]
    sampled, context = int64(77, 77, 77).view(1, 3), int64(77)
    starts, lowest = int32(0, 3), int64(-last - 1)
    ops.gather_step_tokens(int64(1, 2, 3), starts, starts, int32(0), lowest, int64(9), sampled, context)
    assert sampled.tolist() == [[-1, -1, -1]]
