"""The parts of the demo without vLLM: the engines of ``examples/`` on small models with random weights."""

from __future__ import annotations

import importlib
import pathlib
import sys
from typing import Any

import torch
from torch import Tensor

import nwor_ops
from nwor_ops import RecurrentCache
from nwor_ops.testing.host_graphs import HostGraphLoop

HEAD_SIZE = 128  # recurrent states, as in Qwen3-Next
PROMPTS, OUTPUT_TOKENS = 6, 48
DRAFT_REQUESTS, DRAFT_ROUNDS = 5, 4


def example(name: str) -> Any:
    """Import a file of ``examples/``, which a wheel holds in the package."""
    package = pathlib.Path(nwor_ops.__file__).parent
    folder = next(path for path in (package / "examples", package.parent / "examples") if path.is_dir())
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)


def recurrent_states(num_drafts: int) -> dict[str, Any]:
    """Decode the same prompts plainly and with drafts. A request has one state per layer, and a record.

    ``every_state`` has the bytes of the usual scheme: a state after each of the K + 1 tokens of a window.
    """
    decoding, prompts_of = example("recurrent_decoding"), example("speculative_decoding").make_prompts
    config = decoding.HybridConfig(linear_head_size=HEAD_SIZE)
    prompts = prompts_of(PROMPTS, config.vocab_size)
    plain = decoding.HybridEngine(config, num_drafts=num_drafts).generate(prompts, OUTPUT_TOKENS, speculate=False)
    engine = decoding.HybridEngine(config, num_drafts=num_drafts)
    tokens = engine.generate(prompts, OUTPUT_TOKENS, speculate=True)
    caches = [cache for cache in engine.caches.values() if isinstance(cache, RecurrentCache)]
    state = sum(cache.state[0].nbytes for cache in caches)
    record, stats = sum(part[0].nbytes for cache in caches for part in cache.records), engine.manager.stats()
    return {
        "bytes": {"every_state": (num_drafts + 1) * state, "state": state, "record": record},
        "accepted": stats.accepted,
        "rejected": stats.rejected,
        "same_as_plain": tokens == plain,
    }


def draft_loop(num_drafts: int) -> dict[str, Any]:
    """Draft the same rounds eagerly and from two graphs, on the CPU, and count the launches of a round."""
    drafting = example("draft_loop")
    rows = DRAFT_REQUESTS + 1  # one more than requests, so that every replay has a padded row
    max_len = 16 + (DRAFT_ROUNDS + 1) * (num_drafts + 1)

    def run(mode: str) -> tuple[list[list[int]], dict[str, int]]:
        # float64: a padded batch adds in another order, which must not change the better of two tokens.
        options = {"dtype": torch.float64, "loop": HostGraphLoop}
        drafter = drafting.Drafter(drafting.DrafterConfig(), num_drafts, rows, max_len, **options)
        propose, launches, rounds = drafter.propose, drafter.loop.launches, set()

        def counted(states: Tensor, *arguments: Any, **options: Any) -> Tensor:
            launches.kernels = launches.graphs = 0
            with launches:
                proposed: Tensor = propose(states, *arguments, **options)
            if len(states) == DRAFT_REQUESTS:  # prompts run one by one
                rounds.add((launches.kernels, launches.graphs))
            return proposed

        drafter.propose, drafter.loop.debug = counted, False  # the checks of debug mode are launches too
        if mode != "eager":
            drafter.capture([rows], (mode,))
        drafts: list[list[int]] = drafting.play(drafter, mode, DRAFT_ROUNDS, temperature=0.0)
        [(kernels, graphs)] = rounds  # every round launches the same
        return drafts, {"kernels": kernels, "graphs": graphs}

    (drafts, eager), (others, captured) = run("eager"), run("loop")
    same = drafts == others
    return {"eager": eager, "captured": captured, "same_drafts": same, "drafts": len(drafts) * num_drafts}
