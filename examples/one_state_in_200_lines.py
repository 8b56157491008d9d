"""One recurrent state per request: the whole idea in one file that needs only torch.

    python examples/one_state_in_200_lines.py

A layer of linear attention (Gated DeltaNet) has one matrix per head and request, its state S. Each token changes it:

    S = S decay;   u = beta (v - S k);   S = S + u k^T;   out = S q

A step verifies a known token and K drafts. Only after sampling is it known how many of these tokens stay. A matrix does
not forget a token, so engines store the state after each of the K + 1 tokens (`EveryState`) and go on from one of them.

`OneState` stores one state, which no token of the current window has reached, and a small record of the window: k,
decay and u of each token. The next window first applies the recorded rows that stay. This needs no dot product, because
u is known. A rejected draft is a row that is not applied: there is nothing to undo.

The library does the same in one kernel per layer, with ragged batches, CUDA graphs and any acceptance on the device:
`nwor_ops.RecurrentStates`. The tests compare this file with it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply(state: Tensor, key: Tensor, decay: Tensor, update: Tensor) -> Tensor:
    """Return the state ``[H, dv, dk]`` after a token whose update u ``[H, dv]`` is known.

    Args:
        key: ``[H, dk]``, normalised.
        decay: ``[H]``.
    """
    return state * decay[:, None, None] + update[:, :, None] * key[:, None, :]


def run_token(state: Tensor, token: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state after a token, its output ``[H, dv]`` and its update ``[H, dv]``.

    Args:
        token: ``q`` and ``k`` ``[H, dk]``, normalised; ``v`` ``[H, dv]``; ``decay`` and ``beta`` ``[H]``.
    """
    decayed = state * token["decay"][:, None, None]
    seen = (decayed * token["k"][:, None, :]).sum(-1)
    update = token["beta"][:, None] * (token["v"] - seen)
    state = apply(state, token["k"], token["decay"], update)
    return state, (state * token["q"][:, None, :]).sum(-1), update


class EveryState:
    """The usual scheme: K + 1 states per request, all of them written in each step."""

    def __init__(self, num_slots: int, window: int, heads: int, key_size: int, value_size: int) -> None:
        self.states = torch.zeros(num_slots, window, heads, value_size, key_size)
        self.last = torch.zeros(num_slots, dtype=torch.long)  # the state to go on from

    def verify(self, slot: int, window: list[dict[str, Tensor]]) -> Tensor:
        """Run the tokens of a window and return their outputs ``[W, H, dv]``."""
        state, outputs = self.states[slot, self.last[slot]].clone(), []
        for row, token in enumerate(window):
            state, out, _ = run_token(state, token)
            self.states[slot, row] = state
            outputs.append(out)
        return torch.stack(outputs)

    def commit(self, slot: int, num_kept: int) -> None:
        self.last[slot] = num_kept - 1

    @property
    def bytes_of_request(self) -> int:
        return self.states[0].numel() * self.states.itemsize


class OneState:
    """One state and the record of one window per request."""

    def __init__(self, num_slots: int, window: int, heads: int, key_size: int, value_size: int) -> None:
        self.states = torch.zeros(num_slots, heads, value_size, key_size)
        self.keys = torch.zeros(num_slots, window, heads, key_size)
        self.decays = torch.zeros(num_slots, window, heads)
        self.updates = torch.zeros(num_slots, window, heads, value_size)
        self.pending = [0] * num_slots  # rows of the record that stay and are not in the state yet

    def verify(self, slot: int, window: list[dict[str, Tensor]]) -> Tensor:
        """Apply the pending rows, store the state, run the window's tokens, and record them.

        The only write of a state: it happens before the window's first token.
        """
        self.fold(slot)
        state, outputs = self.states[slot], []
        for row, token in enumerate(window):
            state, out, update = run_token(state, token)  # in registers, for the outputs
            self.keys[slot, row], self.decays[slot, row], self.updates[slot, row] = token["k"], token["decay"], update
            outputs.append(out)
        return torch.stack(outputs)

    def commit(self, slot: int, num_kept: int) -> None:
        """Keep the first tokens of the window. The states are not touched."""
        self.pending[slot] = num_kept

    def cancel(self, slot: int) -> None:
        """Keep no token of a window whose step failed."""
        self.pending[slot] = 0

    def fold(self, slot: int) -> None:
        """Apply the pending rows. Call it before anything else reads a state: a snapshot, or another kernel."""
        for row in range(self.pending[slot]):
            self.states[slot] = apply(
                self.states[slot], self.keys[slot, row], self.decays[slot, row], self.updates[slot, row]
            )
        self.pending[slot] = 0

    def reset(self, slot: int) -> None:
        """Begin a new request."""
        self.states[slot].zero_()
        self.pending[slot] = 0

    @property
    def bytes_of_request(self) -> int:
        return sum(t[0].numel() * t.itemsize for t in (self.states, self.keys, self.decays, self.updates))


def random_token(heads: int, key_size: int, value_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return what a layer computes from the hidden state of a token."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    return {
        "q": unit(normal(heads, key_size)) * key_size**-0.5,
        "k": unit(normal(heads, key_size)),
        "v": normal(heads, value_size),
        "decay": torch.sigmoid(normal(heads) + 3),
        "beta": torch.sigmoid(normal(heads)),
    }


def main(steps: int = 40, num_drafts: int = 3) -> float:
    """Decode two requests in both schemes, and return the largest difference of their outputs."""
    sizes = {"heads": 2, "key_size": 64, "value_size": 64}
    generator = torch.Generator().manual_seed(0)
    schemes = [scheme(2, num_drafts + 1, **sizes) for scheme in (EveryState, OneState)]
    worst, accepted, rejected = 0.0, 0, 0
    for step in range(steps):
        slot = step % 2
        window = [random_token(**sizes, generator=generator) for _ in range(num_drafts + 1)]
        every, one = (scheme.verify(slot, window) for scheme in schemes)
        worst = max(worst, float((every - one).abs().max()))
        num_kept = int(torch.randint(1, num_drafts + 2, (1,), generator=generator))  # sampling decides
        for scheme in schemes:
            scheme.commit(slot, num_kept)
        accepted, rejected = accepted + num_kept - 1, rejected + num_drafts + 1 - num_kept
    every, one = (scheme.bytes_of_request for scheme in schemes)
    print(f"{steps} steps, {accepted} drafts accepted, {rejected} rejected")
    print(f"bytes of a request: {every} with {num_drafts + 1} states, {one} with one state and a record")
    print(f"largest difference of the outputs: {worst}")
    return worst


if __name__ == "__main__":
    raise SystemExit(main() > 1e-5)
