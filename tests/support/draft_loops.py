"""Shared by the tests of the draft loop: random batches, and drafting without the loop.

`plain_drafts` has no cache, slots, padding or graphs. For every draft it reads the whole text again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from draft_loop import Drafter, play  # noqa: F401
from paged_drafter import DrafterConfig, PagedMetadataAdapter
from paged_llama import rotary_embedding
from torch import Tensor

from nwor_ops import ops
from nwor_ops.drafter import DraftBuffers, DraftLoop, DraftMetadata, DraftSampler
from nwor_ops.testing.oracle import drafter as oracle

NEVER = -9  # a value that no drafter writes

# ---------------------------------------------------------------- a drafter without a loop


def whole_text(drafter: Drafter, tokens: Tensor) -> Tensor:
    """Return hidden states ``[R, S, H]`` of padded texts ``[R, S]``: plain causal attention, with a window in odd
    layers."""
    model, c = drafter.model, drafter.config
    rows, length = tokens.shape
    places = torch.arange(length, device=tokens.device)
    distance = places[:, None] - places
    x = model.embedding(tokens)
    for layer, attention in enumerate(model.attention):
        sees = (distance >= 0) & (distance < c.window) if layer % 2 else distance >= 0
        qkv = attention.qkv(model.norms[2 * layer](x)).view(rows, length, 3, c.num_heads, c.head_size)
        query, key = (
            rotary_embedding(qkv[:, :, n].reshape(-1, c.num_heads, c.head_size), places.repeat(rows), c.rope_theta)
            for n in (0, 1)
        )
        value = qkv[:, :, 2].reshape_as(key)
        key, value = (t.to(drafter.caches[0].dtype).to(x.dtype) for t in (key, value))  # in the cache's dtype
        q, k, v = (t.view(rows, length, c.num_heads, -1).transpose(1, 2) for t in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + attention.out(attended.transpose(1, 2).reshape(rows, length, -1))
        x = x + model.mlp[layer](model.norms[2 * layer + 1](x))
    return model.norms[-1](x)


def sample(drafter: Drafter, logits: Tensor, states: Tensor, positions: list[int], step: int) -> list[int]:
    sampled = torch.zeros(len(logits), dtype=torch.int64)
    oracle.gumbel_sample(
        logits.cpu(), states, drafter.temperature.cpu(), drafter.seeds.cpu(), torch.tensor(positions),
        torch.tensor(step), sampled,
    )  # fmt: skip
    return sampled.tolist()


@torch.no_grad()
def plain_drafts(drafter: Drafter, texts: list[list[int]], states: Tensor) -> list[list[int]]:
    """Return K drafts after each text, including the target's token. A text has at most ``max_len`` tokens."""
    limit, device = drafter.loop.max_len, drafter.buffers.device
    texts = [list(text) for text in texts]
    drafts: list[list[int]] = [[] for _ in texts]
    for step in range(drafter.num_drafts):
        # At the model's limit, each further token replaces the last one.
        seen = [text[: limit - 1] + text[-1:] if len(text) > limit else text for text in texts]
        last = [len(text) - 1 for text in seen]
        padded = torch.zeros(len(seen), max(last) + 1, dtype=torch.int64, device=device)
        for row, text in enumerate(seen):
            padded[row, : len(text)] = torch.tensor(text)
        hidden = whole_text(drafter, padded)[torch.arange(len(last)), last]
        tokens = sample(drafter, drafter.model.compute_logits(hidden), states, last, step)
        for text, row, token in zip(texts, drafts, tokens, strict=True):
            text.append(token)
            row.append(token)
    return drafts


# ---------------------------------------------------------------- batches


@dataclass
class Round:
    """A batch after the target's step: K + 1 verified tokens per request, some of them rejected."""

    states: Tensor  # int64 [R]
    lengths: Tensor  # int64 [R]: number of tokens of each text before these K + 1
    verified: Tensor  # int64 [R, K + 1]
    num_rejected: Tensor  # int64 [R]
    next_tokens: Tensor  # int64 [R]
    histories: list[list[int]]
    caches: list[Tensor] = field(default_factory=list)  # contents before the drafter's first pass

    @property
    def texts(self) -> list[list[int]]:
        kept = self.verified.shape[1] - self.num_rejected
        return [
            history + self.verified[row, : kept[row]].tolist() + [int(self.next_tokens[row])]
            for row, history in enumerate(self.histories)
        ]


def make_round(drafter: Drafter, num_reqs: int, seed: int, lengths: list[int] | None = None) -> Round:
    """Prefill random texts of random (or given) lengths, and verify random drafts."""
    random = torch.Generator().manual_seed(seed)
    vocab, most = drafter.config.vocab_size, drafter.loop.max_len - drafter.num_drafts - 2
    if lengths is None:
        longest = min(most, len(drafter.first_pass.unwritten) - 2)
        lengths = torch.randint(1, longest + 1, (num_reqs,), generator=random).tolist()
    states = torch.randperm(drafter.buffers.max_num_reqs, generator=random)[:num_reqs]
    histories = [torch.randint(vocab, (length,), generator=random).tolist() for length in lengths]
    for cache in drafter.caches:  # rows of earlier requests
        cache.copy_(torch.randn(cache.shape, generator=random))
    for row, history in enumerate(histories):
        only, zero = states[row : row + 1], torch.zeros(1, dtype=torch.int64)
        drafter.target.load(torch.tensor([history]), zero, zero, only, zero)
        drafter.buffers.idx_mapping[:1].copy_(only)
        drafter.loop.run_first_pass(1, len(history) + 1, "eager")
    return Round(
        states,
        torch.tensor(lengths),
        torch.randint(vocab, (num_reqs, drafter.num_drafts + 1), generator=random),
        torch.randint(drafter.num_drafts + 2, (num_reqs,), generator=random).clamp(max=drafter.num_drafts),
        torch.randint(vocab, (num_reqs,), generator=random),
        histories,
        [cache.clone() for cache in drafter.caches],
    )


def draft(drafter: Drafter, batch: Round, mode: str, **options) -> list[list[int]]:
    """Draft one round, each time from the same caches. Everything that the round must write starts with junk."""
    for cache, before in zip(drafter.caches, batch.caches, strict=True):
        cache.copy_(before)
    buffers = drafter.buffers
    buffers.draft_tokens.fill_(NEVER)
    for junk in (buffers.input_ids, buffers.positions, buffers.seq_lens, buffers.query_start_loc[1:]):
        junk.fill_(77)
    drafter.loop.metadata.slots.fill_(0)  # a used slot
    drafter.loop.metadata.window_slots.fill_(3)
    drafter.target.load(batch.verified, batch.lengths, batch.num_rejected, batch.states, batch.next_tokens)
    return drafter.propose(batch.states, batch.verified.shape[1], mode, **options).tolist()


def slots_of(drafter: Drafter, state: int, positions: range) -> list[int]:
    table, size = drafter.block_tables[state].tolist(), drafter.config.block_size
    return [table[p // size] * size + p % size for p in positions]


def require_only_own_slots_written(drafter: Drafter, batch: Round) -> None:
    """Check that the batch wrote from each request's first verified token to its last draft, and nothing else."""
    allowed = set()
    for row, state in enumerate(batch.states.tolist()):
        begin = int(batch.lengths[row])
        end = min(begin + 2 * drafter.num_drafts + 2, drafter.loop.max_len)
        allowed |= set(slots_of(drafter, state, range(begin, end)))
    for cache, before in zip(drafter.caches, batch.caches, strict=True):
        changed = (cache != before).any(dim=(2, 3)).flatten().nonzero().flatten().tolist()
        assert changed
        assert set(changed) <= allowed


class WatchedAdapter(PagedMetadataAdapter):
    """Keep the inputs of the model for each step. They are copied on the device, so also in graphs."""

    def __init__(self, config, buffers, *rest) -> None:
        super().__init__(config, buffers, *rest)
        steps, tokens = buffers.draft_tokens.shape[1], self.slots.shape[1]
        shapes = {"positions": (), "seq_lens": (), "slot_mapping": (), "window_slots": (config.window,)}
        self.seen = {
            name: torch.full((steps, tokens, *width), NEVER, dtype=torch.int64, device=buffers.device)
            for name, width in shapes.items()
        }

    def update(self, key, metadata) -> None:
        super().update(key, metadata)
        step = self.buffers.current_draft_step.view(1)
        for name, seen in self.seen.items():
            now = getattr(metadata, name)
            seen[:, : len(now)].index_copy_(0, step, now.to(seen.dtype)[None])


def require_metadata_of_every_step(drafter: Drafter, batch: Round, padded: int) -> None:
    """Check position, length, slot and window of each row in every step, and that padded rows have none.

    In the first pass, rejected tokens have no slot.
    """
    watched, limit, window = drafter.loop.metadata.seen, drafter.loop.max_len, drafter.config.window
    first_pass, tokens = [], drafter.num_drafts + 2
    for row, state in enumerate(batch.states.tolist()):
        begin, end = len(batch.histories[row]), min(len(batch.texts[row]), limit)
        slots = slots_of(drafter, state, range(begin, end))
        first_pass += slots + [-1] * (tokens - len(slots))
    seen = watched["slot_mapping"][0, : padded * tokens].tolist()
    assert seen == first_pass + [-1] * ((padded - len(batch.states)) * tokens)
    lengths = [len(text) for text in batch.texts]
    for step in range(1, drafter.num_drafts):
        rows = [min(length - 1 + step, limit - 1) for length in lengths]
        slots = [slots_of(drafter, s, range(p, p + 1))[0] for s, p in zip(batch.states.tolist(), rows, strict=True)]
        windows = []
        for state, position in zip(batch.states.tolist(), rows, strict=True):
            begin = max(position - window + 1, 0)
            seen = slots_of(drafter, state, range(begin, position + 1))
            windows.append([-1] * (window - len(seen)) + seen)
        spare = padded - len(rows)
        assert watched["positions"][step, :padded].tolist() == rows + [0] * spare
        assert watched["seq_lens"][step, :padded].tolist() == [position + 1 for position in rows] + [0] * spare
        assert watched["slot_mapping"][step, :padded].tolist() == slots + [-1] * spare
        assert watched["window_slots"][step, :padded].tolist() == windows + [[-1] * window] * spare


def require_inert(buffers: DraftBuffers, num_reqs: int, rows: int) -> None:
    """Check that rows [num_reqs, rows) are as ``DraftBuffers.pad_rows`` leaves them."""
    assert (buffers.idx_mapping[num_reqs:rows] < 0).all()
    assert (buffers.query_start_loc[num_reqs + 1 : rows + 1] == num_reqs).all()
    for tensor in (buffers.input_ids, buffers.positions, buffers.seq_lens):
        assert not tensor[num_reqs:rows].any()


def make_drafter(num_drafts: int, max_num_reqs: int, device: str = "cpu", **options) -> Drafter:
    """Create a drafter in float64, so that a padded batch, which changes the order of sums, cannot change a token."""
    options = {"max_len": 40, "dtype": torch.float64, "debug": True, "adapter": WatchedAdapter} | options
    return Drafter(DrafterConfig(), num_drafts, max_num_reqs, device=device, **{"prompt_len": 40} | options)


# ---------------------------------------------------------------- a drafter that carries hidden states


def with_hidden_states(buffers: DraftBuffers, hidden_states: Tensor) -> DraftBuffers:
    return DraftBuffers(**vars(buffers) | {"hidden_states": hidden_states})


class SlotMetadata(DraftMetadata):
    """Only slots, in one persistent tensor."""

    def __init__(self, buffers: DraftBuffers, block_tables: Tensor, block_size: int) -> None:
        self.buffers, self.block_tables, self.block_size = buffers, block_tables, block_size
        self.slots = torch.full((1, buffers.max_num_reqs), NEVER, dtype=torch.int64, device=buffers.device)

    def build(self, key, num_reqs, step, capturing=False):
        metadata = {"slots": self.slots[0, : key.num_reqs], "positions": self.buffers.positions[: key.num_reqs]}
        self.update(key, metadata)
        return metadata

    def update(self, key, metadata) -> None:
        ops.compute_slot_mappings(
            self.buffers.idx_mapping[: key.num_reqs], self.buffers.query_start_loc, self.buffers.positions,
            [self.block_tables], [self.block_size], self.slots,
        )  # fmt: skip


class Follower:
    """The decode steps of a drafter that follows the target, without a first pass.

    Hidden states are carried from step to step. Its "attention" is the slot that it is given, so a stale slot gives
    other tokens.
    """

    VOCAB, WIDTH, BLOCK = 300, 24, 4

    def __init__(self, num_drafts: int, max_num_reqs: int, max_len: int, device: str = "cpu", **options) -> None:
        random = torch.Generator().manual_seed(1)
        columns = -(-max_len // self.BLOCK)
        self.embedding, self.head, self.of_slots = (
            torch.randn(n, self.WIDTH, generator=random, dtype=torch.float64).to(device)
            for n in (self.VOCAB, self.VOCAB, max_num_reqs * columns * self.BLOCK)
        )
        tables = torch.randperm(max_num_reqs * columns, generator=random).int().view(max_num_reqs, columns)
        self.block_tables = tables.to(device)
        self.buffers = with_hidden_states(
            DraftBuffers.allocate(max_num_reqs, num_drafts, device),
            torch.zeros(max_num_reqs, self.WIDTH, dtype=torch.float64, device=device),
        )
        self.temperature = torch.zeros(max_num_reqs, device=device)
        self.seeds = torch.arange(max_num_reqs, device=device) * 7 - 3
        sampler = DraftSampler(self.buffers, self.temperature, self.seeds, self.logits)
        metadata = SlotMetadata(self.buffers, self.block_tables, self.BLOCK)
        self.loop = DraftLoop(self.model, sampler, self.buffers, metadata, num_drafts, max_len, **options)

    def hidden(self, before: Tensor, ids: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        mixed = self.embedding[ids] + self.of_slots[slots.clamp(min=0)] + positions[:, None] / 64
        return torch.tanh(before + mixed)

    def logits(self, hidden: Tensor) -> Tensor:
        return (hidden[:, None] * self.head).sum(-1).float()

    def model(self, key, metadata) -> tuple[Tensor, Tensor]:
        buffers, rows = self.buffers, key.num_reqs
        hidden = self.hidden(
            buffers.hidden_states[:rows], buffers.input_ids[:rows], metadata["positions"], metadata["slots"]
        )
        return hidden, hidden

    def load(self, num_reqs: int, seed: int) -> None:
        """Write the results of a first pass (draft 0, and the inputs of step 1), and junk everywhere else."""
        buffers, limit, random = self.buffers, self.loop.max_len, torch.Generator().manual_seed(seed)
        for tensor in (*buffers.tensors().values(), self.loop.metadata.slots):
            if tensor is not self.temperature and tensor is not self.seeds and tensor.dim():
                tensor.fill_(55)
        buffers.draft_tokens.fill_(NEVER)
        positions = torch.randint(limit, (num_reqs,), generator=random)
        buffers.idx_mapping[:num_reqs].copy_(torch.randperm(buffers.max_num_reqs, generator=random)[:num_reqs])
        buffers.positions[:num_reqs].copy_(positions)
        buffers.seq_lens[:num_reqs].copy_(positions + 1)
        buffers.query_start_loc[: num_reqs + 1].copy_(torch.arange(num_reqs + 1))
        buffers.hidden_states[:num_reqs].copy_(torch.randn(num_reqs, self.WIDTH, generator=random, dtype=torch.float64))
        buffers.draft_tokens[:num_reqs, 0].copy_(torch.randint(self.VOCAB, (num_reqs,), generator=random))
        buffers.input_ids[:num_reqs].copy_(buffers.draft_tokens[:num_reqs, 0])

    def plain(self, num_reqs: int) -> dict[str, list]:
        """Run the same steps per request on the data of `load`, and return the drafts and the final inputs."""
        b, limit = self.buffers, self.loop.max_len
        end: dict[str, list] = {name: [] for name in ("drafts", "ids", "positions", "seq_lens", "hidden")}
        for row in range(num_reqs):
            state, token, position = (int(t[row]) for t in (b.idx_mapping, b.input_ids, b.positions))
            length, hidden = int(b.seq_lens[row]), b.hidden_states[row : row + 1]
            drafts = [token]
            for step in range(1, self.loop.num_drafts):
                slot = int(self.block_tables[state, position // self.BLOCK]) * self.BLOCK + position % self.BLOCK
                device = hidden.device
                after = self.hidden(hidden, *(torch.tensor([n], device=device) for n in (token, position, slot)))
                drawn = torch.zeros(1, dtype=torch.int64)
                oracle.gumbel_sample(
                    self.logits(after).cpu(), torch.tensor([state]), self.temperature.cpu(), self.seeds.cpu(),
                    torch.tensor([position]), torch.tensor(step), drawn,
                )  # fmt: skip
                drafts.append(int(drawn))
                if step < self.loop.num_drafts - 1:
                    token, hidden = int(drawn), after
                    position, length = min(position + 1, limit - 1), min(length + 1, limit)
            for name, value in zip(end, (drafts, token, position, length, hidden[0].tolist()), strict=True):
                end[name].append(value)
        return end

    def left(self, num_reqs: int) -> dict[str, list]:
        """Read the results of `plain` from the buffers."""
        b = self.buffers
        tensors = (b.draft_tokens[:, : self.loop.num_drafts], b.input_ids, b.positions, b.seq_lens, b.hidden_states)
        names = ("drafts", "ids", "positions", "seq_lens", "hidden")
        return {name: tensor[:num_reqs].tolist() for name, tensor in zip(names, tensors, strict=True)}

    def require_plain_drafts(self, num_reqs: int, mode: str, rows: int, tolerance: float, **options) -> None:
        """Compare a run with `plain`. Only its own columns and rows change, and padded rows up to `rows` are inert."""
        num_drafts, buffers = self.loop.num_drafts, self.buffers
        self.load(num_reqs, seed=num_reqs)
        expected = self.plain(num_reqs)
        tail = buffers.hidden_states[num_reqs:].clone()
        assert self.loop.run(num_reqs, mode, **options).shape == (num_reqs, num_drafts)
        left = self.left(num_reqs)
        if num_drafts > 1:
            torch.testing.assert_close(left.pop("hidden"), expected.pop("hidden"), rtol=tolerance, atol=tolerance)
            assert left == expected, (num_reqs, mode)
        assert (buffers.draft_tokens[num_reqs:] == NEVER).all()
        assert torch.equal(buffers.hidden_states[num_reqs:], tail)
        if num_reqs and num_drafts > 1:
            require_inert(buffers, num_reqs, rows)
            assert (self.loop.metadata.slots[0, num_reqs:rows] == -1).all()
