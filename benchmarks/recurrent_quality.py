"""Measure what rounding costs a language model: the perplexity of the chunk form and of the exact form on a CPU.

    python benchmarks/recurrent_quality.py [--folder FOLDER] [--steps N]

The model reads bytes. It has two layers of Gated DeltaNet (one key head, two value heads of 128 x 128), each with an
MLP, and 0.6 million parameters. It is trained here on the sources of Python's standard library, in the parallel form
and in float32. Every eighth file is left out, and the perplexity is that of these files.

The text then runs through `RecurrentStates` in windows of 1 to 4 tokens. Up to 3 rejected drafts follow the accepted
tokens of a window. Inputs of the layers are bfloat16, as in an engine; states are float32 or bfloat16. The reference is
the same model with bfloat16 inputs and float64 states, token by token in PyTorch.

A row `perplexity/FORM_STATES` is the perplexity over that of the reference, with a sample per text. `chunk_over_exact`
compares the two forms: at most 0.1 % more is the target.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import random
import sysconfig
from collections.abc import Callable

import torch
from results import FOLDER, Row, row, save, this_machine
from torch import Tensor, nn
from torch.nn import functional

from nwor_ops.recurrent import RecurrentCache, RecurrentStates

WIDTH, LAYERS, HEAD, VALUE_HEADS, BYTES = 128, 2, 128, 2, 256
TRAINED_TOKENS, BATCH, LEARNING_RATE = 128, 8, 3e-3
TEXTS, TEXT_TOKENS, MAX_WINDOW, CHUNK = 8, 1024, 4, 16
TARGET = 1.001
SIZES = [HEAD, HEAD, VALUE_HEADS * HEAD, VALUE_HEADS, VALUE_HEADS, VALUE_HEADS * HEAD]  # q, k, v, a, b and the gate
Recurrence = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="where the results go")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    options = parser.parse_args()
    torch.manual_seed(0)
    trained_on, texts = read_texts()
    model = Model()
    train(model, trained_on, options.steps)
    with torch.no_grad():
        save(this_machine(), "recurrent_quality", measure(model, texts), options.folder)


def read_texts() -> tuple[Tensor, Tensor]:
    """Return the bytes to train on, and int64 ``[TEXTS, TEXT_TOKENS + 1]`` from other files."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = b"".join(file.read_bytes() for file in files[::8])
    trained_on = b"".join(file.read_bytes() for place, file in enumerate(files) if place % 8)
    stride = (len(held_out) - TEXT_TOKENS - 1) // (TEXTS - 1)
    texts = [list(held_out[stride * text :][: TEXT_TOKENS + 1]) for text in range(TEXTS)]
    return torch.frombuffer(bytearray(trained_on), dtype=torch.uint8), torch.tensor(texts)


class Layer(nn.Module):
    """Gated DeltaNet and an MLP."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.into, self.out = nn.Linear(WIDTH, sum(SIZES)), nn.Linear(VALUE_HEADS * HEAD, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head_norm = nn.RMSNorm(HEAD)
        self.A_log = nn.Parameter(torch.zeros(VALUE_HEADS))
        self.dt_bias = nn.Parameter(torch.tensor([-2.0, -5.0]))  # decays of 0.88 and 0.99 at first

    def forward(self, x: Tensor, recurrence: Recurrence) -> Tensor:
        q, k, v, a, b, gate = self.into(self.norm(x)).split(SIZES, -1)
        v, gate = (part.unflatten(-1, (VALUE_HEADS, HEAD)) for part in (v, gate))
        mixed = self.head_norm(recurrence(self.number, q, k, v, a, b)) * functional.silu(gate)
        x = x + self.out(mixed.flatten(-2))
        return x + self.down(functional.silu(self.up(self.mlp_norm(x))))

    def decays_and_betas(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the decays, and the betas."""
        return -self.A_log.to(a.dtype).exp() * functional.softplus(a + self.dt_bias.to(a.dtype)), b.sigmoid()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(BYTES, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = [Layer(number) for number in range(LAYERS)]
        self.registered = nn.ModuleList(self.layers)
        self.logits = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens: Tensor, recurrence: Recurrence) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, recurrence)
        return self.logits(self.norm(x))

    def parallel(self, number: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute all tokens of a text in parallel, from a state of zeros: ``[B, T, heads, dv]``.

        The updates u of the recurrence solve ``u + beta lower(k k^T decay) u = beta v``.
        """
        q, k = normalized(q) * HEAD**-0.5, normalized(k)
        logarithms, betas = self.layers[number].decays_and_betas(a, b)
        passed = logarithms.cumsum(1).transpose(1, 2)  # [B, heads, T]
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
        decays = (passed[..., :, None] - passed[..., None, :]).masked_fill(~later, -math.inf).exp()
        betas = betas.transpose(1, 2)[..., None]
        system = betas * ((k @ k.mT)[:, None] * decays).tril(-1)
        updates = torch.linalg.solve_triangular(system, betas * v.transpose(1, 2), upper=False, unitriangular=True)
        return (((q @ k.mT)[:, None] * decays) @ updates).transpose(1, 2)


def normalized(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def train(model: Model, text: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps)
    offsets = torch.arange(TRAINED_TOKENS + 1)
    for step in range(steps):
        starts = torch.randint(len(text) - TRAINED_TOKENS - 1, (BATCH, 1))
        tokens = text[starts + offsets].long()
        logits = model(tokens[:, :-1], model.parallel)
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: perplexity {loss.exp():.2f}", flush=True)


def measure(model: Model, texts: Tensor) -> list[Row]:
    reference = perplexities(run_reference(model, texts[:, :-1]), texts)
    rows = [row("perplexity/reference", reference.tolist(), "perplexity", "lower")]
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        found = {}
        for form, chunk in (("exact", 0), ("chunk", CHUNK)):
            found[form] = perplexities(run_windows(model, texts, dtype, chunk), texts)
            rows.append(
                row(f"perplexity/{form}_{name}", (found[form] / reference).tolist(), "ratio", "lower", digits=6)
            )
        over = (found["chunk"] / found["exact"]).tolist()
        rows.append(row(f"perplexity/chunk_over_exact_{name}", over, "ratio", "lower", TARGET, digits=6))
    return rows


def perplexities(logits: Tensor, texts: Tensor) -> Tensor:
    """Return the perplexity of each text, from ``[TEXTS, TEXT_TOKENS, BYTES]``."""
    losses = functional.cross_entropy(logits.double().mT, texts[:, 1:], reduction="none")
    return losses.mean(1).exp()


def run_reference(model: Model, tokens: Tensor) -> Tensor:
    """Compute the logits with float64 states, one token after the other."""

    def recurrence(number: int, *inputs: Tensor) -> Tensor:
        q, k, v, a, b = (part.bfloat16().double() for part in inputs)
        q, k = normalized(q) * HEAD**-0.5, normalized(k)
        logarithms, betas = model.layers[number].decays_and_betas(a, b)
        decays, state, outputs = logarithms.exp(), torch.zeros(len(q), VALUE_HEADS, HEAD, HEAD).double(), []
        for token in range(q.shape[1]):
            key, query = k[:, token, None, :, None], q[:, token, None, :, None]
            state *= decays[:, token, :, None, None]
            update = betas[:, token, :, None] * (v[:, token] - (state @ key).squeeze(-1))
            state += update[..., None] * key.mT
            outputs.append((state @ query).squeeze(-1))
        return torch.stack(outputs, 1).bfloat16().float()

    return model(tokens, recurrence)


def run_windows(model: Model, texts: Tensor, dtype: torch.dtype, chunk: int) -> Tensor:
    """Compute the logits through `RecurrentStates`, in windows that end with rejected drafts."""
    states = RecurrentStates(max_num_requests=TEXTS, device="cpu")
    for number in range(LAYERS):
        cache = RecurrentCache.new(
            num_slots=TEXTS + 1, max_window=MAX_WINDOW, num_key_heads=1, num_value_heads=VALUE_HEADS, key_size=HEAD,
            value_size=HEAD, state_dtype=dtype, ring_rows=CHUNK - 1 + MAX_WINDOW if chunk else 0, chunk=chunk,
        )  # fmt: skip
        states.register_layer(str(number), cache)
    states.allocate()

    def recurrence(number: int, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        q, k = (part[:, None].bfloat16().contiguous() for part in (q, k))
        layer = model.layers[number]
        inputs = (q, k, v.bfloat16().contiguous(), a.bfloat16(), b.bfloat16(), layer.A_log, layer.dt_bias)
        return states.verify(str(number), *inputs).float()

    rng, slots = random.Random(0), torch.arange(1, TEXTS + 1)
    logits, done = torch.zeros(TEXTS, TEXT_TOKENS, BYTES), 0
    while done < TEXT_TOKENS:
        kept = min(rng.randint(1, MAX_WINDOW), TEXT_TOKENS - done)
        window = rng.randint(kept, MAX_WINDOW)
        tokens = texts[:, done : done + kept]
        drafts = torch.full((TEXTS, window - kept), rng.randrange(BYTES))
        states.begin(slots, torch.arange(0, TEXTS * window + 1, window, dtype=torch.int32))
        found = model(torch.cat((tokens, drafts), 1).flatten(), recurrence)
        states.commit(torch.full((TEXTS,), kept, dtype=torch.int32))
        logits[:, done : done + kept] = found.unflatten(0, (TEXTS, window))[:, :kept]
        done += kept
    return logits


if __name__ == "__main__":
    main()
