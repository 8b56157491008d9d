"""Run README's commands over HTTP. vLLM's CPU engine has only the transaction; tests/gpu/vllm runs all three."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ENVIRONMENT, Engines
from readme_serve import AT_ONCE, MAX_TOKENS, Server, at_once, differing, one_by_one, prompts, readme_commands, running
from tiny_models import write_served_llama

from nwor_ops.testing.server import PROGRAM

COMMANDS = readme_commands()
# An audit copies the cache at every step, and a small one makes vLLM preempt requests. A block of a CPU's cache has 128
# tokens: five hold one request of 512.
SMALL_CACHE = ("--num-gpu-blocks-override", "12")
PATIENCE_SECONDS = 900.0  # it compiles, on a machine that tests share


def test_the_readme_starts_each_feature_once() -> None:
    assert set(COMMANDS) == {"draft_graphs", "recurrent", "mode"}
    assert {name: command.environment for name, command in COMMANDS.items()} == {
        "draft_graphs": {"VLLM_NWOR_DRAFT_GRAPHS": "1"},
        "recurrent": {"VLLM_NWOR_RECURRENT": "1"},
        "mode": {"VLLM_NWOR_MODE": "cow"},
    }
    for command in COMMANDS.values():
        assert command.with_models(MODEL="/m", DRAFT="/d")[0] == "/m"
        assert not [word for word in command.with_models(MODEL="/m", DRAFT="/d") if "DRAFT" in word]


@pytest.fixture(scope="module")
def servers(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Vanilla vLLM, and the transaction's command, audited."""
    folder: Path = tmp_path_factory.mktemp("serve")
    command = COMMANDS["mode"]
    words = [*command.with_models(MODEL=write_served_llama(folder / "model")), *SMALL_CACHE]
    audited = command.environment | {"VLLM_NWOR_AUDIT": "1"}
    started = {
        side: Server(PROGRAM, words, ENVIRONMENT | environment, folder / f"{side}.log")
        for side, environment in {"vanilla": {"VLLM_PLUGINS": ""}, "audited": audited}.items()
    }
    with running(*started.values(), seconds=PATIENCE_SECONDS):
        yield started
    for side, server in started.items():
        print(f"{side}:\n{server.log[-3000:]}")


def test_the_transaction_as_the_readme_starts_it(servers: dict[str, Server]) -> None:
    vanilla, ours = servers["vanilla"], servers["audited"]
    asked = prompts(ours.block_tokens())
    wanted = one_by_one(vanilla, asked)
    assert differing(one_by_one(ours, asked), wanted) == []
    together = at_once(ours, asked * 2)
    assert len(together) == 2 * len(asked) > AT_ONCE
    assert all(len(tokens) == MAX_TOKENS for tokens in together)
    assert differing(together, wanted * 2) == []
    found = ours.metrics_at_rest()
    assert ours.alive()
    assert "nwor: active, mode cow, audited at every step" in ours.log
    assert "AuditError" not in ours.log
    assert found["vllm:prefix_cache_hits_total"] > 0
    assert found["vllm:num_preemptions_total"] > 0
    assert found["nwor_committed_tokens_total"] > 0
    assert found["nwor_rejected_tokens_total"] > 0
    assert found["nwor_disagreements_total"] == 0
    assert found.get("nwor_vanilla_steps_total", 0) == 0
