"""README's feature commands, as README.md has them, with tiny models in place of MODEL and DRAFT, over HTTP.

``test_readme_commands_exactly_as_written`` adds only host and port. Such a server takes nine tenths of the GPU. The
test must therefore run while nothing else does: ``-k test_readme_commands_exactly_as_written`` selects only it.

``test_audited`` adds ``SMALL_CACHE`` to the words and ``VLLM_NWOR_AUDIT=1`` to the environment. An audit copies the
cache at every step, and a small cache makes vLLM preempt requests. The answers equal those of a vanilla server that
gets one request at a time.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from agreement import check_agreement
from engine_pool import SERVER_ENVIRONMENT
from readme_serve import (
    HUNG_UP,
    MAX_TOKENS,
    Command,
    Server,
    at_once,
    differing,
    one_by_one,
    prompts,
    readme_commands,
    running,
)

COMMANDS = readme_commands()
MODELS = {
    "draft_graphs": {"MODEL": "llama", "DRAFT": "draft"},
    "draft_vocabulary": {"MODEL": "gdn_mtp"},
    "recurrent": {"MODEL": "gdn_mtp"},
    "mode": {"MODEL": "llama"},
}
# The counter of each feature, which must grow.
COUNTED = {"mode": "windows", "draft_vocabulary": "draft_vocabulary_tokens", "recurrent": "recurrent_steps",
           "draft_graphs": "draft_graph_replays"}  # fmt: skip
# Blocks: one request of 512 tokens fits, eight do not.
BLOCKS = {"draft_graphs": 40, "recurrent": 24, "mode": 40}
# On a large GPU `vllm serve` allows 1,024 requests, and a hybrid model needs a block for each.
SMALL_CACHE = (
    *("--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", "0.05"),
    *("--max-num-seqs", str(min(BLOCKS.values()))),
)
# Number of answers that may differ, for requests one by one and for several together. For Qwen3.5 the kernel of vLLM
# adds in another order, so the other of two close logits may win. Larger batches use other matrix products.
MAY_DIFFER = {"draft_graphs": (0, 4), "recurrent": (4, 6), "mode": (0, 4)}
PATIENCE_SECONDS = 280.0


def program() -> list[str]:
    found = shutil.which("vllm")
    return [found, "serve"] if found else [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def serve(command: Command, engines: Any, name: str, environment: dict[str, str], more: tuple[str, ...] = ()) -> Server:
    words = command.with_models(**{word: engines.models[model] for word, model in MODELS[command.feature].items()})
    return Server(
        program(),
        [*words, *more],
        SERVER_ENVIRONMENT | environment,
        engines.logs / f"serve-{command.feature}-{name}.log",
    )


def our_counters(metrics: dict[str, float]) -> dict[str, float]:
    return {
        name: value for name, value in metrics.items() if name.startswith("nwor_") and not name.endswith("_created")
    }


def test_each_command_has_a_model() -> None:
    assert set(COMMANDS) == set(MODELS)


@pytest.fixture(scope="module")
def servers(engines: Any, request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Server]]:
    """Start the servers of all selected audited tests together, because start-up takes most of the time.

    Each test waits for its own two."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == test_audited.__name__]
    started = {}
    for feature in (item.callspec.params["feature"] for item in items):
        command = COMMANDS[feature]
        more = ("--num-gpu-blocks-override", str(BLOCKS[feature]), *SMALL_CACHE)
        audited = command.environment | {"VLLM_NWOR_AUDIT": "1"}
        started[feature, "vanilla"] = serve(command, engines, "vanilla", {"VLLM_PLUGINS": ""}, SMALL_CACHE)
        started[feature, "audited"] = serve(command, engines, "audited", audited, more)
    yield started
    for server in started.values():
        server.stop()


@pytest.mark.parametrize("feature", list(BLOCKS))
def test_audited(feature: str, servers: dict[tuple[str, str], Server], engines: Any, record: dict[str, Any]) -> None:
    vanilla, ours = (servers[feature, side].wait(PATIENCE_SECONDS) for side in ("vanilla", "audited"))
    asked = prompts(ours.block_tokens())
    wanted = one_by_one(vanilla, asked)
    alone = one_by_one(ours, asked)
    together = at_once(ours, asked + asked)
    assert ours.alive(), ours.log[-4000:]
    found = ours.metrics_at_rest()
    record |= our_counters(found) | {
        "block_tokens": [vanilla.block_tokens(), ours.block_tokens()],
        "differ_alone": differing(alone, wanted),
        "differ_together": differing(together, wanted + wanted),
        "preemptions": found.get("vllm:num_preemptions_total"),
        "hits": found.get("vllm:prefix_cache_hits_total"),
    }
    assert found["vllm:prefix_cache_hits_total"] > 0
    assert found["vllm:num_preemptions_total"] > 0
    assert found["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert "AuditError" not in ours.log
    assert "nwor: active" in ours.log or feature != "mode"
    alone_limit, together_limit = MAY_DIFFER[feature]
    assert len(record["differ_alone"]) <= alone_limit
    assert len(record["differ_together"]) <= together_limit
    if feature == "mode":
        assert found["nwor_rejected_tokens_total"] > 0
    if feature == "recurrent":
        assert found["nwor_recurrent_steps_total"] > 0


@pytest.mark.parametrize("feature", list(MODELS))
def test_readme_commands_exactly_as_written(feature: str, engines: Any, record: dict[str, Any]) -> None:
    command = COMMANDS[feature]
    server = serve(command, engines, "words", command.environment)
    with running(server, seconds=PATIENCE_SECONDS):
        asked = prompts(server.block_tokens())
        answers = one_by_one(server, asked) + at_once(server, asked)
        assert all(len(tokens) == MAX_TOKENS for tokens in answers)
        found = server.metrics_at_rest()
    record |= our_counters(found) | {
        "hits": found.get("vllm:prefix_cache_hits_total"),
        "differ": differing(answers[: len(asked)], answers[len(asked) :]),
    }
    assert found["vllm:spec_decode_num_accepted_tokens_total"] > 0
    assert found["vllm:prefix_cache_hits_total"] > 0
    counted = f"nwor_{COUNTED[feature]}"
    assert any(name.startswith(counted) and value > 0 for name, value in found.items()), sorted(record)
    if feature == "mode":
        # With async scheduling, a step may still run when its request ends: every answer, the short one of
        # `metrics_at_rest`, and the clients that hang up.
        check_agreement(found, len(answers) + 1 + HUNG_UP, command.drafts)
