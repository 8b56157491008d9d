"""RecurrentStates with layers of every kind, and the scheme to compare it with.

:class:`EveryState` is that scheme. It keeps the state after each token (``all_states`` of the same kernel) and goes on
from the state after the last token that stays. It has no records, cursors or plans: for the kernel, each window is a
first window, on new copies of the states. So recording, reapplying, folding and copying rows must give bit-identical
results. :func:`in_double_precision` computes the recurrence of a whole text in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from nwor_ops import RecurrentCache, RecurrentStates, ops
from nwor_ops.testing.layouts import random_bytes

CHUNK = 16  # rows that a store folds in the chunk form


@dataclass(frozen=True)
class Kind:
    """The sizes, dtypes and options of a layer."""

    key_heads: int = 1
    value_heads: int = 2
    key_size: int = 64
    value_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    per_channel: bool = False
    gated: bool = False
    gate_lower_bound: float | None = None
    given_gates: bool = False  # the caller computes decays and betas

    def cache(self, **options: Any) -> RecurrentCache:
        return RecurrentCache.new(
            num_key_heads=self.key_heads, num_value_heads=self.value_heads, key_size=self.key_size,
            value_size=self.value_size, dtype=self.dtype, state_dtype=self.state_dtype, per_channel=self.per_channel,
            **options,
        )  # fmt: skip


KINDS = {
    "gdn": Kind(),
    "gdn again": Kind(),  # folded by the same launch
    "other keys": Kind(dtype=torch.float16),  # folded by another launch, only because of its record
    "small state": Kind(key_heads=2, state_dtype=torch.bfloat16, dtype=torch.float16),
    "kda": Kind(value_heads=1, value_size=128, per_channel=True),
    "bounded": Kind(value_heads=1, per_channel=True, gate_lower_bound=-5.0),
    "given gates": Kind(key_heads=2, given_gates=True),
    "gated": Kind(value_heads=3, state_dtype=torch.bfloat16, gated=True),
}


# In the chunk form, which has only these sizes.
CHUNK_KINDS = {
    "wide": Kind(value_heads=1, key_size=128, value_size=128),
    "wide small state": Kind(value_heads=1, key_size=128, value_size=128, state_dtype=torch.bfloat16, gated=True),
}


def paged(cache: RecurrentCache, seed: int = 0) -> tuple[RecurrentCache, Tensor]:
    """Return the cache as views of pages, one page per slot with random bytes in between, and the pages."""
    tensors = (cache.state, *cache.records)
    gap, places, end = 48, [], 16
    for tensor in tensors:
        places.append(end)
        end += -(-tensor[0].numel() * tensor.element_size() // 16) * 16 + gap
    pages = random_bytes(cache.num_slots * end, torch.uint8, seed).view(cache.num_slots, end).to(cache.device)
    views = []
    for tensor, place in zip(tensors, places, strict=True):
        size = tensor[0].numel() * tensor.element_size()
        view = pages[:, place : place + size].view(tensor.dtype).unflatten(1, tensor.shape[1:])
        view.copy_(tensor)
        views.append(view)
    return RecurrentCache(*views, cache.chunk), pages


@dataclass
class Weights:
    A_log: Tensor | None
    dt_bias: Tensor | None
    norm: Tensor | None


class EveryState:
    """A layer in the scheme that keeps K + 1 states."""

    def __init__(self, kind: Kind, weights: Weights, device: str) -> None:
        self.kind, self.weights, self.device = kind, weights, device
        self.held: dict[int, Tensor] = {}  # by slot
        self._after: dict[int, Tensor] = {}  # by slot, the state after each token of the open window

    def zeros(self) -> Tensor:
        kind = self.kind
        shape = kind.value_heads, kind.value_size, kind.key_size
        return torch.zeros(shape, dtype=kind.state_dtype, device=self.device)

    def begin_chunk(self, slot: int) -> None:
        """Follow a fold, where a chunk begins."""

    def verify(self, slots: Sequence[int], lengths: Sequence[int], inputs: dict[str, Tensor]) -> Tensor:
        kind, count = self.kind, len(slots)
        scratch = kind.cache(num_slots=count + 1, max_window=max(lengths, default=1), device=self.device)
        for row, slot in enumerate(slots, 1):
            scratch.state[row] = self.held[slot]
        plan = torch.zeros(count, 4, dtype=torch.int32, device=self.device)
        plan[:, 0] = plan[:, 3] = torch.arange(1, count + 1)
        starts = [0, *accumulate(lengths)]
        window_id = torch.ones(1, dtype=torch.int64, device=self.device)
        out = torch.zeros_like(inputs["v"])
        tokens = starts[-1]
        states = torch.zeros(tokens, *self.zeros().shape, dtype=kind.state_dtype, device=self.device)
        ops.gated_delta_verify(
            out[:tokens], scratch.state, *scratch.records, torch.zeros_like(window_id),
            *(inputs[name][:tokens] for name in "qkvab"), self.weights.A_log, self.weights.dt_bias, plan, window_id,
            torch.tensor(starts, dtype=torch.int32, device=self.device), kind.key_size**-0.5,
            gate=inputs["gate"][:tokens] if kind.gated else None, norm_weight=self.weights.norm, all_states=states,
            gate_lower_bound=kind.gate_lower_bound,
        )  # fmt: skip
        self._after = {
            slot: states[start:end].clone()
            for slot, start, end in zip(slots, starts, starts[1:], strict=False)
        }  # fmt: skip
        return out

    def commit(self, kept: dict[int, int]) -> None:
        for slot, number in kept.items():
            self.held[slot] = self._after[slot][number - 1]


class EveryChunk(EveryState):
    """The same for the chunk form. Each token runs as a separate window, from the state at the start of its chunk.

    It has no cursors and plans either: for each window, the tokens since then run again from empty records.
    A chunk begins with each state that another call has put in ``held``.
    """

    def __init__(self, kind: Kind, weights: Weights, device: str) -> None:
        super().__init__(kind, weights, device)
        self._base: dict[int, Tensor] = {}  # by slot, the state at the start of a chunk
        self._since: dict[
            int, list[tuple[dict[str, Tensor], Tensor]]
        ] = {}  # the tokens since, and the state after each
        self._window: dict[int, list[tuple[dict[str, Tensor], Tensor]]] = {}

    def begin_chunk(self, slot: int) -> None:
        self._base[slot], self._since[slot] = self.held[slot], []

    def verify(self, slots: Sequence[int], lengths: Sequence[int], inputs: dict[str, Tensor]) -> Tensor:
        outputs, begin = [torch.zeros_like(inputs["v"][:0])], 0
        self._window = {}
        for slot, length in zip(slots, lengths, strict=True):
            since = self._since.get(slot)
            if since is None or self.held[slot] is not (since[-1][1] if since else self._base[slot]):
                self.begin_chunk(slot)
            tokens = [{name: part[t : t + 1] for name, part in inputs.items()} for t in range(begin, begin + length)]
            found = self._run(self._base[slot], [*(token for token, _ in self._since[slot]), *tokens])[-length:]
            outputs += [out for out, _ in found]
            self._window[slot] = [(token, state) for token, (_, state) in zip(tokens, found, strict=True)]
            begin += length
        return torch.cat(outputs)

    def _run(self, base: Tensor, tokens: list[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Return the output of each token and the state after it, from a state at the start of a chunk."""
        kind = self.kind
        scratch = kind.cache(num_slots=2, max_window=1, chunk=CHUNK, device=self.device)
        scratch.state[1] = base
        number, starts = (torch.tensor(values, device=self.device) for values in ([1], [0, 1]))
        found, rows, first = [], 0, 0
        for token in tokens:
            plan = torch.tensor([[1, rows, first, rows // CHUNK]], dtype=torch.int32, device=self.device)
            if rows == CHUNK:
                rows, first = 0, (first + CHUNK) % (CHUNK + 1)
            rows += 1
            out = torch.zeros_like(token["v"])
            state = torch.zeros(1, *base.shape, dtype=kind.state_dtype, device=self.device)
            ops.gated_delta_verify(
                out, scratch.state, *scratch.records, torch.zeros_like(number), *(token[name] for name in "qkvab"),
                self.weights.A_log, self.weights.dt_bias, plan, number, starts.int(), kind.key_size**-0.5,
                gate=token["gate"] if kind.gated else None, norm_weight=self.weights.norm, all_states=state,
                chunk=CHUNK,
            )  # fmt: skip
            found.append((out, state[0]))
        return found

    def commit(self, kept: dict[int, int]) -> None:
        for slot, number in kept.items():
            since = self._since[slot] = self._since[slot] + self._window[slot][:number]
            self.held[slot] = since[-1][1]
            if len(since) > CHUNK:
                self._base[slot], self._since[slot] = since[CHUNK - 1][1], since[CHUNK:]


def in_double_precision(kind: Kind, weights: Weights, inputs: dict[str, Tensor]) -> Tensor:
    """Return the outputs of a whole text ``[T, HV, dv]`` from a zero state, by the formula of the papers."""
    group = kind.value_heads // kind.key_heads
    q, k, v, a, b = (inputs[name].double() for name in "qkvab")
    q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(group, dim=1) for x in (q, k))
    if kind.given_gates:
        decay, beta = a.exp(), b
    else:
        assert weights.A_log is not None
        assert weights.dt_bias is not None
        rate, x = weights.A_log.double().exp(), a + weights.dt_bias.double()
        rate = rate[:, None] if kind.per_channel else rate
        bound = kind.gate_lower_bound
        decay = torch.exp(-rate * torch.nn.functional.softplus(x) if bound is None else bound * (rate * x).sigmoid())
        beta = b.sigmoid()
    state = torch.zeros(kind.value_heads, kind.value_size, kind.key_size, dtype=torch.float64, device=q.device)
    outputs = []
    for t in range(len(q)):
        state = state * (decay[t][:, None, :] if kind.per_channel else decay[t][:, None, None])
        update = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + torch.einsum("hv,hk->hvk", update, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]) * kind.key_size**-0.5)
    out = torch.stack(outputs)
    if kind.gated:
        gate = inputs["gate"].double()
        out = torch.nn.functional.rms_norm(out, out.shape[-1:], weights.norm.double(), 1e-5) * gate * gate.sigmoid()
    return out


class Decoding:
    """Layers of some kinds, each in RecurrentStates and in EveryState."""

    def __init__(
        self,
        kinds: Iterable[str] = KINDS,
        *,
        num_slots: int = 8,
        max_window: int = 4,
        max_requests: int = 5,
        chunk: int = 0,
        in_pages: bool = False,
        one_storage: bool = False,
        device: str = "cpu",
    ) -> None:
        self.max_window, self.max_requests, self.device = max_window, max_requests, device
        self.kinds = {name: (KINDS | CHUNK_KINDS)[name] for name in kinds}
        self.states = RecurrentStates(max_num_requests=max_requests, device=device)
        self.generator = torch.Generator().manual_seed(0)
        self.caches: dict[str, RecurrentCache] = {}
        self.pages: dict[str, Tensor] = {}
        self.weights: dict[str, Weights] = {}
        self.every_state: dict[str, EveryState] = {}
        if one_storage:  # it holds all float32 states, layer by layer within a slot
            widths = {name: kind.value_heads * kind.value_size * kind.key_size for name, kind in self.kinds.items()}
            pool = torch.zeros(num_slots, sum(widths.values()), device=device)
            states = dict(zip(widths, pool.split(list(widths.values()), dim=1), strict=True))
        for name, kind in self.kinds.items():
            cache = kind.cache(num_slots=num_slots, max_window=max_window, device=device, chunk=chunk)
            if one_storage and kind.state_dtype == torch.float32:
                cache = RecurrentCache(states[name].unflatten(1, cache.state.shape[1:]), *cache.records, chunk)
            if in_pages:
                cache, self.pages[name] = paged(cache)
            for tensor in (cache.state, *cache.records):  # rows that were not written must not be read
                tensor.fill_(torch.nan)
            self.caches[name] = cache
            self.states.register_layer(name, cache)
            channels = (kind.key_size,) if kind.per_channel else ()
            self.weights[name] = Weights(
                None if kind.given_gates else self.random(kind.value_heads).to(device),
                None if kind.given_gates else self.random(kind.value_heads, *channels).to(device),
                (1 + 0.1 * self.random(kind.value_size)).to(device) if kind.gated else None,
            )
            scheme = EveryChunk if chunk else EveryState
            self.every_state[name] = scheme(kind, self.weights[name], device)
        self.states.allocate()
        self._pages_before = {name: pages.clone() for name, pages in self.pages.items()}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def draw(self, least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (1,), generator=self.generator))

    def inputs(self, name: str, tokens: int) -> dict[str, Tensor]:
        """Queries, keys, values and gates are views of one packed tensor, as projections leave them."""
        kind = self.kinds[name]
        heads = {
            "q": (kind.key_heads, kind.key_size),
            "k": (kind.key_heads, kind.key_size),
            "v": (kind.value_heads, kind.value_size),
            "gate": (kind.value_heads, kind.value_size),
        }
        sizes = [prod(shape) for shape in heads.values()]
        packed = self.random(tokens, sum(sizes)).to(self.device, kind.dtype)
        views = {
            part: view.unflatten(1, shape)
            for (part, shape), view in zip(heads.items(), packed.split(sizes, dim=1), strict=True)
        }
        channels = (kind.key_size,) if kind.per_channel else ()
        views["a"] = self.random(tokens, kind.value_heads, *channels).to(self.device, kind.dtype)
        views["b"] = self.random(tokens, kind.value_heads).to(self.device, kind.dtype)
        if kind.given_gates:
            views["a"], views["b"] = -views["a"].float().exp(), views["b"].float().sigmoid()
        return views

    # ------------------------------------------------------------ calls of both schemes

    def tensor(self, values: Iterable[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def start(self, *slots: int) -> None:
        """Start new requests."""
        self.states.reset(self.tensor(slots))
        for layer in self.every_state.values():
            layer.held.update({slot: layer.zeros() for slot in slots})

    def begin(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        is_window: Sequence[bool] | None = None,
        computed: Sequence[int] | None = None,
    ) -> None:
        """Open a window with these lengths by slot. Slot -1 is padding. The other tensors are longer than the batch."""
        self.slots, self.lengths, self.is_window = slots, lengths, is_window or [True] * len(slots)
        self.states.begin(
            self.tensor(slots, torch.int64),
            self.tensor([0, *accumulate([*lengths, 1])]),
            None if is_window is None else self.tensor([*is_window, False], torch.bool),
            None if computed is None else self.tensor([*computed, 9]),
        )

    def own_tokens(self) -> list[int]:
        """Return the tokens of the batch whose requests have windows."""
        starts = [0, *accumulate(self.lengths)]
        return [t for i, slot in enumerate(self.slots) if slot > 0 and self.is_window[i]
                for t in range(starts[i], starts[i + 1])]  # fmt: skip

    def forward(self, names: Iterable[str] | None = None, padding: int = 2) -> dict[str, dict[str, Tensor]]:
        """Run layers in both schemes, compare their outputs, and return their inputs."""
        own = self.own_tokens()
        windows = {slot: length for slot, length, opens in zip(self.slots, self.lengths, self.is_window, strict=True)
                   if slot > 0 and opens and length > 0}  # fmt: skip
        given = {}
        for name in self.kinds if names is None else names:
            inputs = given[name] = self.inputs(name, sum(self.lengths) + padding)
            out = self.verify(name, inputs)
            mine = {part: tensor[own] for part, tensor in inputs.items()}
            expected = torch.zeros_like(out)
            expected[own] = self.every_state[name].verify(list(windows), list(windows.values()), mine)
            assert torch.equal(out, expected), f"outputs of {name} are not those of the scheme with every state"
        return given

    def verify(self, name: str, inputs: dict[str, Tensor]) -> Tensor:
        weights, gate = self.weights[name], inputs["gate"] if self.kinds[name].gated else None
        return self.states.verify(
            name, *(inputs[part] for part in "qkvab"), weights.A_log, weights.dt_bias, gate=gate,
            norm_weight=weights.norm, gate_lower_bound=self.kinds[name].gate_lower_bound,
        )  # fmt: skip

    def commit(self, kept: dict[int, int]) -> None:
        """Commit with these numbers of kept tokens, by slot."""
        self.states.commit(self.tensor(kept.get(slot, -7) for slot in [*self.slots, 0]))
        for layer in self.every_state.values():
            layer.commit(kept)

    def window(self, lengths: dict[int, int], kept: dict[int, int]) -> dict[str, dict[str, Tensor]]:
        """Run a whole step with these requests, by slot."""
        self.begin(list(lengths), list(lengths.values()))
        given = self.forward()
        self.commit(kept)
        return given

    # ------------------------------------------------------------ comparison

    def state_of(self, slot: int, name: str) -> Tensor:
        return self.caches[name].state[slot]

    def assert_folded(self, *slots: int) -> None:
        """Check that nothing is pending in these slots, and that their states equal those of the other scheme."""
        assert not self.states.cursors.table[list(slots), ::2].any()
        for name, layer in self.every_state.items():
            for slot in slots:
                assert torch.equal(self.state_of(slot, name), layer.held[slot]), f"slot {slot} of layer {name}"

    def assert_no_other_bytes_written(self) -> None:
        """Check that nothing was written outside states and records."""
        for name, pages in self.pages.items():
            owned = torch.zeros_like(pages, dtype=torch.bool)
            for tensor in (self.caches[name].state, *self.caches[name].records):
                start = tensor.data_ptr() - pages.data_ptr()
                owned[:, start : start + tensor[0].numel() * tensor.element_size()] = True
            assert torch.equal(pages[~owned], self._pages_before[name][~owned])
            assert (~owned).sum() > 48 * len(pages)
