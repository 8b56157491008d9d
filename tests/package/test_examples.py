"""The examples: their text equals plain decoding, and no rejected draft remains in their cache."""

from __future__ import annotations

import re
import subprocess
import sys

import draft_loop
import draft_vocabulary
import one_state_in_200_lines
import pytest
import torch
import torch.nn.functional as F
from paged_llama import LlamaConfig, rotary_embedding
from processes import ROOT
from recurrent_decoding import GatedDeltaNet, HybridConfig, HybridEngine
from recurrent_states import Kind, Weights, in_double_precision
from speculative_decoding import BLOCK_SIZE, Engine, make_prompts
from torch._dynamo.utils import counters
from transactions import one_thread  # noqa: F401

from nwor_ops import RecurrentCache, RecurrentStates

EXAMPLES = ROOT / "examples"

CONFIG = LlamaConfig(num_layers=3)
PROMPTS = make_prompts(5, CONFIG.vocab_size)
NUM_OUTPUT_TOKENS = 24
NUM_DRAFTS = 3


def make_engine(kind: type[Engine] = Engine, **options) -> Engine:
    options = {"num_drafts": NUM_DRAFTS, "max_requests": 3, "max_context": 64} | options
    engine = kind(CONFIG, **options)
    generator = torch.Generator().manual_seed(1)
    for cache in engine.caches:  # rows of earlier requests
        pages = cache[: engine.max_requests * engine.max_blocks]
        pages.copy_(torch.randn(pages.shape, generator=generator))
    return engine


def generate(engine: Engine) -> list[list[int]]:
    return engine.generate(PROMPTS, NUM_OUTPUT_TOKENS)


class Audited(Engine):
    """Compare the whole cache before and after every step, and record which tokens were rejected."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.rejected: list[list[int]] = []  # positions in the batch, per step
        self.mixed_steps = 0
        self.num_pages = self.max_requests * self.max_blocks  # pages of requests; the shadow pages follow

    def step(self, running):
        before = [cache.clone() for cache in self.caches]
        sampled = super().step(running)
        for cache, old in zip(self.caches, before, strict=True):
            changed = (cache != old)[: self.num_pages].any(dim=(2, 3)).flatten().nonzero().flatten().tolist()
            assert set(changed) <= set(self.kept_slots), "a rejected draft left something behind"
        return sampled

    def build_step(self, running):
        step = super().build_step(running)
        self.own_slots = step.batch.slot_mapping.tolist()  # inside a window, mode "stage" replaces them
        return step

    def sample(self, logits, step):
        sampled = super().sample(logits, step)
        ends = step.window.query_start_loc[1:].tolist()
        drafts = (step.drafts >= 0).sum(dim=1).tolist()
        accepted = ((sampled >= 0).sum(dim=1) - 1).tolist()
        rejected = [t for e, n, a in zip(ends, drafts, accepted, strict=True) for t in range(e - n + a, e)]
        self.rejected.append(rejected)
        slots = self.own_slots
        self.kept_slots = [s for t, s in enumerate(slots) if s >= 0 and t not in rejected]
        has_prompt = len(slots) == self.token_budgets[-1]
        self.mixed_steps += has_prompt and sum(drafts) > 0
        return sampled


def dense_greedy(model, prompt: list[int]) -> list[int]:
    """Decode greedily without any cache: read the whole text again for every token."""
    tokens = list(prompt)
    for _ in range(NUM_OUTPUT_TOKENS):
        positions = torch.arange(len(tokens))
        x = model.embedding(torch.tensor(tokens))
        for block in model.blocks:
            attention, c = block.attention, CONFIG
            sizes = [c.num_heads, c.num_kv_heads, c.num_kv_heads]
            qkv = attention.qkv(block.attention_norm(x)).view(len(tokens), -1, c.head_size)
            query, key, value = qkv.split(sizes, dim=1)
            query = rotary_embedding(query, positions, c.rope_theta)
            key = rotary_embedding(key, positions, c.rope_theta)
            q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + attention.out(attended[0].transpose(0, 1).flatten(1))
            x = x + block.mlp(block.mlp_norm(x))
        tokens.append(int(model.head(model.norm(x))[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
@torch.no_grad()
def plain() -> list[list[int]]:
    model = make_engine(num_drafts=0).model
    return [dense_greedy(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("mode", ["cow", "stage"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_speculative_decoding_keeps_no_rejected_draft(plain, layout, mode):
    engine = make_engine(Audited, layout=layout, mode=mode)
    assert generate(engine) == plain

    # The workload must be able to fail: it has accepted and rejected drafts, prompts in the same batches, and reused
    # blocks.
    stats = engine.manager.stats()
    assert stats.accepted > 20
    assert stats.rejected > 20
    assert stats.drafted == stats.accepted + stats.rejected
    assert stats.rejected == sum(map(len, engine.rejected))
    assert engine.mixed_steps > 0
    blocks_used = sum(-(-(len(prompt) + NUM_OUTPUT_TOKENS) // BLOCK_SIZE) for prompt in PROMPTS)
    assert blocks_used > engine.max_requests * engine.max_blocks / 2


class Boom(Exception):
    pass


class Retries:
    """Runs a step again if it fails."""

    def step(self, running):
        try:
            return super().step(running)
        except Boom:
            return super().step(running)


class Fragile(Retries, Engine):
    """Every third forward fails in its second layer, and the engine runs the step again."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.calls = 0
        self.model.blocks[1].attention_norm.register_forward_pre_hook(self.fail_sometimes)

    def fail_sometimes(self, module, arguments) -> None:
        self.calls += 1
        if self.calls % 3 == 0:
            raise Boom


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_failed_forward_is_undone(plain, mode):
    fragile, steady = make_engine(Fragile, mode=mode), make_engine()
    assert generate(fragile) == generate(steady) == plain
    assert fragile.manager.stats().cancelled > 5
    for cache, expected in zip(fragile.caches, steady.caches, strict=True):
        assert torch.equal(cache[: len(expected)], expected)


# ---------------------------------------------------------------- compiled


@pytest.mark.long
def test_compiled_engine_runs_ops_without_recompiling(plain):
    """Its cache is audited in each step, as without compilation."""
    torch.compiler.reset()
    counters.clear()
    engine = make_engine(Audited, compile=True)
    assert generate(engine) == plain
    assert min(engine.manager.stats().accepted, engine.manager.stats().rejected) > 20
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == len(engine.token_budgets)
    steps = engine.manager.stats().windows
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
    ):
        assert generate(engine) == plain
    ran = {event.key: event.count for event in profile.key_averages()}
    steps = engine.manager.stats().windows - steps
    assert ran["nwor::write_kv_logged"] == steps * CONFIG.num_layers
    assert ran["nwor::_begin_bound"] == ran["nwor::_commit_tokens_bound"] == steps


# ---------------------------------------------------------------- command lines


@pytest.mark.parametrize(
    ("script", "arguments", "says"),
    [
        ("speculative_decoding", "--num-prompts 3 --output-tokens 16 --layout HND --no-compile",
         r"speculative .* [1-9]\d* accepted, [1-9]\d* rejected"),
        ("draft_loop", "--num-drafts 3 --temperature 1", "the same 135 drafts in both modes: yes"),
        ("staging/token_tree", "--num-prompts 3 --output-tokens 16", ""),
        ("staging/tree_in_pages", "", r"\b0 rejected rows.*\b0 rejected rows.*\b([2-9]\d|\d{3,}) rejected rows"),
        ("recurrent_decoding", "--num-prompts 3 --output-tokens 24", r"[1-9]\d* accepted, [1-9]\d* rejected"),
        ("recurrent_decoding", "--num-prompts 3 --output-tokens 24 --form chunk --no-compile",
         r"[1-9]\d* accepted, [1-9]\d* rejected"),
    ],
)  # fmt: skip
def test_script_reproduces_plain_decoding(script, arguments, says):
    """In a process that has no other path. The defaults of a script compile its model."""
    command = [sys.executable, str(EXAMPLES / f"{script}.py"), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert script == "draft_loop" or "same output as plain greedy decoding: yes" in done.stdout
    assert re.search(says, done.stdout, re.DOTALL), done.stdout


def test_draft_vocabulary_keeps_the_text(capsys):
    """draft_vocabulary.py asserts that the text is that of plain decoding."""
    draft_vocabulary.main()
    whole, small = capsys.readouterr().out.splitlines()
    assert "coverage 1.000" in whole
    per_step, coverage = map(float, re.findall(r"\d\.\d+", small))
    assert per_step > 2.3
    assert 0.97 < coverage < 1


@pytest.mark.parametrize("words", ["--rounds 0", "--num-reqs 0", "--device banana"])
def test_draft_loop_refuses_invalid_options(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draft_loop.py", *words.split()])
    with pytest.raises(SystemExit):
        draft_loop.main()
    assert f"{words.split()[0]}" in capsys.readouterr().err.splitlines()[-1]


def test_draft_loop_notices_other_drafts(monkeypatch, capsys):
    class Forgetful(draft_loop.PagedMetadataAdapter):
        """A back end whose update in place is incomplete, but whose build is correct."""

        def update(self, key, metadata):
            if self.buffers.current_draft_step < 2:
                super().update(key, metadata)

        def build(self, key, *arguments):
            metadata = super().build(key, *arguments)
            super().update(key, metadata)
            return metadata

    monkeypatch.setitem(draft_loop.Drafter.__init__.__kwdefaults__, "adapter", Forgetful)
    monkeypatch.setattr(sys, "argv", ["draft_loop.py"])
    assert draft_loop.main() == 1
    assert "in both modes: NO" in capsys.readouterr().out


# ---------------------------------------------------------------- recurrent states

HYBRID = HybridConfig()
NUM_HYBRID_TOKENS = 40  # its texts repeat after eight tokens


def hybrid_engine(kind: type[HybridEngine] = HybridEngine, config: HybridConfig = HYBRID, **options) -> HybridEngine:
    engine = kind(config, **{"num_drafts": NUM_DRAFTS, "max_requests": 3, "max_context": 64} | options)
    for cache in engine.caches.values():  # rows of earlier requests
        for tensor in [cache] if isinstance(cache, torch.Tensor) else [cache.state, *cache.records]:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    return engine


def dense_hybrid_greedy(model, prompt: list[int]) -> list[int]:
    """Decode greedily without cache or state: read the whole text again for every token, with linear layers
    in float64."""
    kind = Kind(HYBRID.linear_key_heads, HYBRID.linear_value_heads, dtype=torch.float32, gated=True)
    tokens = list(prompt)
    for _ in range(NUM_HYBRID_TOKENS):
        positions, count = torch.arange(len(tokens)), len(tokens)
        x = model.embedding(torch.tensor(tokens))
        for block in model.blocks:
            attention, normed = block.attention, block.attention_norm(x)
            if isinstance(attention, GatedDeltaNet):
                q, k, v, gate, a, b = attention.project(normed)
                weights = Weights(attention.A_log, attention.dt_bias, attention.norm)
                inputs = {"q": q, "k": k, "v": v, "gate": gate, "a": a, "b": b}
                attended = in_double_precision(kind, weights, inputs).float().flatten(1)
            else:
                q, k, v = (t.transpose(0, 1)[None] for t in attention.project(normed, positions))
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                attended = attended[0].transpose(0, 1).reshape(count, -1)
            x = x + attention.out(attended)
            x = x + block.mlp(block.mlp_norm(x))
        tokens.append(int(model.head(model.norm(x))[-1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def test_hybrid_decoding_keeps_no_rejected_draft():
    engine = hybrid_engine()
    plain = [dense_hybrid_greedy(engine.model, prompt) for prompt in PROMPTS]
    assert engine.generate(PROMPTS, NUM_HYBRID_TOKENS, speculate=True) == plain
    stats = engine.manager.stats()
    assert min(stats.accepted, stats.rejected) > 20


def test_chunk_form_decodes_the_same():
    """With drafts and without: its bits do not depend on how tokens are cut into windows."""
    config = HybridConfig(linear_head_size=128)
    exact, chunk = hybrid_engine(config=config), hybrid_engine(config=config, form="chunk")
    assert chunk.states.chunk == 16
    texts = [chunk.generate(PROMPTS, NUM_HYBRID_TOKENS, speculate) for speculate in (False, True)]
    assert texts[0] == texts[1] == exact.generate(PROMPTS, NUM_HYBRID_TOKENS, speculate=False)
    stats = chunk.manager.stats()
    assert min(stats.accepted, stats.rejected) > 20


def test_one_state_in_one_file_equals_the_library():
    """With drafts that are rejected, a cancelled window, a fold and a reused slot. Both add in another order."""
    sizes, generator = {"heads": 2, "key_size": 64, "value_size": 64}, torch.Generator().manual_seed(0)
    example = one_state_in_200_lines.OneState(2, 3, **sizes)
    cache = RecurrentCache.new(
        num_slots=2, max_window=3, num_key_heads=2, num_value_heads=2, key_size=64, value_size=64, dtype=torch.float32
    )
    states = RecurrentStates(max_num_requests=1, device="cpu")
    states.register_layer("a", cache)
    states.allocate()
    slot = torch.tensor([1])
    for step, (length, stays) in enumerate([(3, 1), (2, 2), (3, 0), (3, 2), (1, 1), (3, 3), (3, 1)]):
        window = [one_state_in_200_lines.random_token(**sizes, generator=generator) for _ in range(length)]
        q, k, v, decay, beta = (torch.stack([token[name] for token in window]) for name in window[0])
        states.begin(slot, torch.tensor([0, length], dtype=torch.int32))
        out = states.verify("a", q, k, v, decay.log(), beta, None, None, scale=1.0, use_qk_l2norm=False)
        torch.testing.assert_close(out, example.verify(1, window), rtol=1e-4, atol=1e-5)
        assert out.abs().max() > 0.01
        if stays:
            states.commit(torch.tensor([stays], dtype=torch.int32))
            example.commit(1, stays)
        else:
            states.cancel()
            example.cancel(1)
        if step in (1, 4):
            states.fold(slot)
            example.fold(1)
            torch.testing.assert_close(cache.state[1], example.states[1], rtol=1e-4, atol=1e-5)
        if step == 4:
            states.reset(slot)
            example.reset(1)
    assert one_state_in_200_lines.main() < 1e-5
