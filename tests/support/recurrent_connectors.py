"""Exports and loads of one recurrent state per request, at each moment at which vLLM's KV connectors touch pages.
Run by test_recurrent_connectors.py:

    TRITON_INTERPRET=1 python recurrent_connectors.py

Three engines of recurrent_aligned.py run the same requests: with drafts, without drafts, and one that continues from
loaded pages. The inputs of a token depend only on its request and position, and no kernel here mixes requests. So every
exported state must have the bits of the engine without drafts.

Exports are read after the forward (tails of prompts), at ``wait_for_save``, after the next forward, and after the end
of a request. Loads go into blocks whose previous owner left a window pending.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import recurrent_layers
import torch
from recurrent_aligned import COLUMNS, ROWS, AlignedSide
from recurrent_layers import CONVOLUTION, GROUPS, Batch, K, configuration, normal_inputs, prepare_vllm, weights_of
from torch import Tensor

from nwor_ops.vllm.audit.cache import AuditError
from nwor_ops.vllm.audit.recurrent import StateAudit
from nwor_ops.vllm.recurrent.block_reuse import BlockOwners

# Tokens of each request's prompt, and whether its last token is computed separately, in a window.
PROMPTS = [(19, True), (16, False), (10, True), (17, True)]
LENGTH, BLOCK = 36, 8


class Request:
    def __init__(self, name: int, computed: int = 0) -> None:
        self.name, self.computed = name, computed
        self.prompt, self.has_lone_tail = PROMPTS[name]

    def next_tokens(self, drafts: int) -> tuple[int, int]:
        """Tokens and drafts of the next step; -1 drafts: prompt tokens that are no window."""
        left = self.prompt - self.computed
        if left <= 0:
            return 1 + drafts, drafts
        if left == 1 and self.computed:
            return 1 + K, K  # padded with placeholder drafts, as vLLM's scheduler does
        tokens = min(left, BLOCK - self.computed % BLOCK)
        return tokens - (self.has_lone_tail and tokens == left), -1


class Engine:
    """One engine, with a row per request.

    Args:
        drafts: returns how many a decoding request has in a step.
        chance: chooses how many of them are accepted.
        is_audited: compare every state.
    """

    def __init__(
        self, config: Any, weights: Any, drafts: Callable[[], int], chance: random.Random, is_audited: bool = True
    ) -> None:
        self.side = AlignedSide(config, True, False, weights)
        self.cursors = self.side.builders[0].group.cursors
        runner = SimpleNamespace(
            vllm_config=SimpleNamespace(kv_transfer_config=object()),
            req_states=SimpleNamespace(req_id_to_index={}),
            block_tables=SimpleNamespace(num_blocks=SimpleNamespace(np=None)),
        )
        self._owners = BlockOwners(runner, range(GROUPS), self.cursors)
        self.audit = StateAudit(self.side.builders) if is_audited else None
        for audited in (*self.side.builders, *self.side.layers, self.side.aligned, self._owners):
            audited.listener = self.audit
        self.drafts, self.chance = drafts, chance
        self.requests: dict[int, Request] = {}
        self._noise = torch.Generator().manual_seed(chance.randrange(1000))

    # ------------------------------------------------------------ blocks and pages

    def admit(self, row: int, request: Request) -> None:
        """Give a request the blocks of the former owner of a row, in another order. It begins with the block of the
        last window, which is pending."""
        side = self.side
        begins = max(request.computed - 1, 0) // BLOCK
        for table in side.tables:
            pair = [begins, max(int(side.column[row]), 0)]
            table[row, pair] = table[row, pair[::-1]]
        side.accepted[row], side.computed[row] = 1, request.computed
        side.column[row] = (request.computed - 1) // BLOCK
        self.requests[row] = request

    def add(self, row: int) -> None:
        """Report a new request to the plugin, as vLLM's runner does in its first step."""
        blocks = [table[row].tolist() for table in self.side.tables]
        new = SimpleNamespace(req_id=str(self.requests[row].name), block_ids=blocks)
        self._owners.add_requests(lambda _: None, SimpleNamespace(scheduled_new_reqs=[new]))

    def blocks(self, row: int, column: int) -> list[int]:
        """Return the block of each group."""
        return [int(table[row, column]) for table in self.side.tables]

    def page(self, group: int, block: int) -> Tensor:
        """Return all bytes of a page, as a store copies them."""
        states = self.side.layers[group].kv_cache[0]
        pages = torch.empty(0, dtype=torch.int8).set_(states.untyped_storage())
        return pages.view(recurrent_layers.BLOCKS, -1)[block]

    def state(self, row: int, column: int) -> list[Tensor]:
        """Return convolution and state of each group, as a transfer between engines copies them."""
        found = []
        for layer, block in zip(self.side.layers, self.blocks(row, column), strict=True):
            rows, state = layer.kv_cache
            found += [rows[block][: CONVOLUTION - 1].clone(), state[block].clone()]
        return found

    def pending(self, row: int, column: int) -> list[int]:
        return [int(self.cursors.table[block, ::2].sum()) for block in self.blocks(row, column)]

    # ------------------------------------------------------------ steps

    def forward(self) -> None:
        """Run a step up to the end of its forward."""
        rows, scheduled, accepted, inputs = [], [], [], []
        for row, request in self.requests.items():
            tokens, drafts = request.next_tokens(self.drafts())
            in_prompt = request.computed < request.prompt
            sampled = 1 if in_prompt else self.chance.randint(1, tokens)
            advanced = (tokens if drafts < 0 else 1) if in_prompt else sampled
            rows.append(row)
            scheduled.append((SimpleNamespace(computed=request.computed, accepted=1), tokens, drafts))
            ends_prompt = request.computed + advanced >= request.prompt
            accepted.append((int(ends_prompt) if in_prompt else sampled, advanced))
            inputs.append(self._inputs(request, tokens, advanced))
        order = sorted(range(len(rows)), key=lambda place: scheduled[place][2] < 0)
        rows, scheduled, accepted, inputs = ([found[i] for i in order] for found in (rows, scheduled, accepted, inputs))
        batch = Batch(scheduled, padded=False)
        given = [
            {name: torch.cat([of_request[group][name] for of_request in inputs]) for name in inputs[0][group]}
            for group in range(GROUPS)
        ]
        self.rows = torch.tensor(rows, dtype=torch.int32)
        self.accepted = accepted
        self.tails = [
            place for place, (row, (_, _, drafts)) in enumerate(zip(rows, scheduled, strict=True))
            if drafts >= 0 and self.requests[row].computed < self.requests[row].prompt
        ]  # fmt: skip
        self.side.step(batch, self.rows, given)
        if self.audit is not None:
            self.audit.forwarded("after the forward")

    def fold_tails(self) -> None:
        """Fold one row of each prompt that ended in a window. Runs after the forward."""
        for builder in self.side.builders if self.tails else ():
            builder.fold_first_rows(torch.tensor(self.tails))

    def sampled(self) -> None:
        """Run the step from sampling to ``wait_for_save``."""
        sampled, advanced = zip(*self.accepted, strict=True)
        self.side.ended(self.rows, list(sampled), list(advanced))
        for row, count in zip(self.rows.tolist(), advanced, strict=True):
            self.requests[row].computed += count

    def _inputs(self, request: Request, tokens: int, advanced: int) -> list[dict[str, Tensor]]:
        """Return the inputs of a token. Those of rejected drafts are noise."""
        found = []
        for place in range(tokens):
            position = request.computed + place
            generator = torch.Generator().manual_seed(1 + request.name * 1000 + position)
            found.append(normal_inputs(generator if place < advanced else self._noise, 1))
        return [
            {name: torch.cat([of_token[group][name] for of_token in found]) for name in found[0][group]}
            for group in range(GROUPS)
        ]


Truth = dict[tuple[int, int], list[Tensor]]  # by request and tokens


def truth_of(config: Any, weights: Any) -> Truth:
    """Return the state after each number of tokens in an engine without drafts. Prompts have one per chunk."""
    engine, truth = Engine(config, weights, lambda: 0, random.Random(1), is_audited=False), {}
    admit_all(engine)
    while engine.requests:
        engine.forward()
        engine.fold_tails()
        engine.sampled()
        for row, request in list(engine.requests.items()):
            column = (request.computed - 1) // BLOCK
            # The window of the last token is pending: fold it here, as nothing else reads this engine.
            for builder, block in zip(engine.side.builders, engine.blocks(row, column), strict=True):
                slot = torch.tensor([block], dtype=torch.int32)
                builder.group.fold(torch.zeros(1, 4, dtype=torch.int32), slot, slot, torch.ones(1, dtype=torch.int32))
            truth[request.name, request.computed] = engine.state(row, column)
            if request.computed >= LENGTH:
                del engine.requests[row]
    return truth


class Exporter:
    """Compare exported pages with the states of an engine without drafts.

    Attributes:
        stored: pages of all groups in a store, by request and tokens.
        handed_over: convolutions and states that a prefill engine transfers, by request and tokens.
    """

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.counts: Counter[str] = Counter()
        self.stored: Truth = {}
        self.handed_over: Truth = {}
        self._keyed: dict[int, tuple[Request, int]] = {}

    def tails(self, engine: Engine) -> None:
        """Compare prompts that ended in a window. Runs after the forward."""
        for place in engine.tails:
            row = int(engine.rows[place])
            request = engine.requests[row]
            column = int(engine.side.column[row])
            self.check("tails", engine, row, column, request, request.computed + 1)
            self.handed_over[request.name, request.computed + 1] = engine.state(row, column)

    def saved(self, engine: Engine) -> None:
        """Compare the blocks that this step completed. Runs at ``wait_for_save``."""
        for row, (_, advanced) in zip(engine.rows.tolist(), engine.accepted, strict=True):
            request = engine.requests[row]
            full = request.computed // BLOCK
            if full * BLOCK > request.computed - advanced:
                self._keyed[row] = request, full
                self.check("save", engine, row, full - 1, request, full * BLOCK)
                self.stored[request.name, full * BLOCK] = [
                    engine.page(group, block).clone() for group, block in enumerate(engine.blocks(row, full - 1))
                ]

    def later(self, moment: str, engine: Engine) -> None:
        """Compare the last complete block of each request, after the forward of a later step or after its end."""
        for row, (request, full) in self._keyed.items():
            self.check(moment, engine, row, full - 1, request, full * BLOCK)

    def check(self, moment: str, engine: Engine, row: int, column: int, request: Request, tokens: int) -> None:
        pending = engine.pending(row, column)
        assert pending == [0] * GROUPS, f"{moment}: request {request.name}, {tokens} tokens: {pending} rows are pending"
        for mine, wanted in zip(engine.state(row, column), self.truth[request.name, tokens], strict=True):
            assert torch.equal(mine, wanted), f"{moment}: request {request.name}: another state after {tokens} tokens"
        self.counts[moment] += 1


def admit_all(engine: Engine) -> None:
    for row in range(ROWS):
        engine.admit(row, Request(row))
        engine.add(row)


def run_to(engine: Engine, exporter: Exporter, length: int, folds_tails: bool = True) -> None:
    """Run steps until every request has this number of tokens."""
    while engine.requests:
        engine.forward()
        exporter.later("next forward", engine)
        if folds_tails:
            engine.fold_tails()
        exporter.tails(engine)
        engine.sampled()
        exporter.saved(engine)
        for row, request in list(engine.requests.items()):
            if request.computed >= length:
                del engine.requests[row]
    exporter.later("end", engine)


def setting() -> tuple[Any, Any]:
    recurrent_layers.ROWS, recurrent_layers.BLOCKS = ROWS, 1 + GROUPS * ROWS * (COLUMNS + K)
    config = configuration(False, torch.float32)
    config.cache_config.mamba_cache_mode = "align"
    for name in ("mamba_block_size", "hash_block_size", "cache_hit_alignment_tokens"):
        setattr(config.cache_config, name, BLOCK)
    return config, weights_of(torch.Generator().manual_seed(11))


def with_drafts(config: Any, weights: Any, seed: int) -> Engine:
    chance = random.Random(seed)
    return Engine(config, weights, lambda: chance.randint(0, K), chance)


def run(missing: str) -> dict[str, Any]:
    """Leave out ``clear`` or ``tails``, and a check must fail. Any other word leaves out nothing."""
    config, weights = setting()
    truth = truth_of(config, weights)
    exporter = Exporter(truth)
    engine = with_drafts(config, weights, 3)
    admit_all(engine)
    run_to(engine, exporter, LENGTH - 6, missing != "tails")
    said = {"loads": 0, "stale": 0}

    # Another engine, whose blocks are full of other requests' states and windows, loads what was exported.
    for source in (exporter.stored, exporter.handed_over):
        other = with_drafts(config, weights, 4)
        admit_all(other)
        for _ in range(6):
            other.forward()
            other.fold_tails()
            other.sampled()
        other.requests.clear()
        for row, name in enumerate(sorted({name for name, _ in source})):
            tokens = min(tokens for of, tokens in source if of == name)
            other.admit(row, Request(name, tokens))
            column = (tokens - 1) // BLOCK
            said["stale"] += sum(other.pending(row, column))
            for group, block in enumerate(other.blocks(row, column)):
                if source is exporter.stored:
                    other.page(group, block).copy_(source[name, tokens][group])
                else:
                    rows, state = other.side.layers[group].kv_cache
                    rows[block][: CONVOLUTION - 1], state[block] = source[name, tokens][2 * group : 2 * group + 2]
            if missing != "clear":
                other.add(row)
            said["loads"] += 1
        loaded = Exporter(truth)
        run_to(other, loaded, LENGTH - 6)
        exporter.counts += loaded.counts
    return said | {"exports": dict(exporter.counts)}


def outcome(missing: str) -> dict[str, Any]:
    try:
        return run(missing)
    except (AssertionError, AuditError) as error:
        return {"failed": str(error)}


if __name__ == "__main__":
    prepare_vllm()
    for what in sys.argv[1:] or ("all",):
        print(what, json.dumps(outcome(what)), flush=True)
