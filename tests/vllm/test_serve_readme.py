"""Run README's commands over HTTP. vLLM's CPU engine has only the transaction; tests/gpu/vllm runs all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import ENVIRONMENT, Engines, run_requests
from readme_serve import AT_ONCE, MAX_TOKENS, Server, at_once, differing, one_by_one, prompts, readme_commands, running
from tiny_models import write_served_llama

from nwor_ops.testing.engine_process import PROGRAM

COMMANDS = readme_commands()
# An audit copies the cache at every step, and a small one makes vLLM preempt requests. A block of a CPU's cache has 128
# tokens: five hold one request of 512.
SMALL_CACHE = ("--num-gpu-blocks-override", "12")
PATIENCE_SECONDS = 900.0  # it compiles, on a machine that tests share


def test_the_readme_starts_each_feature_once() -> None:
    assert {name: command.environment for name, command in COMMANDS.items()} == {
        "draft_graphs": {"VLLM_NWOR_DRAFT_GRAPHS": "1"},
        "draft_vocabulary": {"VLLM_NWOR_DRAFT_VOCABULARY": "32768"},
        "recurrent": {"VLLM_NWOR_RECURRENT": "1"},
        "mode": {"VLLM_NWOR_MODE": "cow"},
    }
    for command in COMMANDS.values():
        assert command.with_models(MODEL="/m", DRAFT="/d")[0] == "/m"
        assert not [word for word in command.with_models(MODEL="/m", DRAFT="/d") if "DRAFT" in word]


def vanilla_answers(words: list[str], asked: list[list[int]]) -> dict[str, list[list[int]]]:
    """Answer prompts one by one, with a vanilla engine in this process that has the arguments of ``vllm serve``."""
    os.environ.update(ENVIRONMENT | {"VLLM_PLUGINS": ""})
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    arguments.model = arguments.model_tag
    settings = EngineArgs.from_cli_args(arguments)
    llm = SimpleNamespace(llm_engine=LLMEngine.from_engine_args(settings, UsageContext.OPENAI_API_SERVER))
    return {"tokens": [run_requests(llm, [prompt], MAX_TOKENS)[0] for prompt in asked]}


@pytest.mark.long
def test_the_transaction_as_the_readme_starts_it(engines: Engines, tmp_path: Path) -> None:
    command = COMMANDS["mode"]
    words = [*command.with_models(MODEL=write_served_llama(tmp_path / "model", layers=2)), *SMALL_CACHE]
    environment = ENVIRONMENT | command.environment | {"VLLM_NWOR_AUDIT": "1"}
    ours = Server(PROGRAM, words, environment, tmp_path / "log")
    try:
        with running(ours, seconds=PATIENCE_SECONDS):
            check_served(ours, lambda asked: engines.submit(vanilla_answers, words, asked).result()["tokens"])
    finally:
        print(ours.log[-3000:])


def check_served(ours: Server, answers: Callable[[list[list[int]]], list[list[int]]]) -> None:
    """The server answers as `answers` does, one by one and many at the same time, and its counters agree."""
    asked = prompts(ours.block_tokens())
    wanted = answers(asked)
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
    assert found.get("nwor_vanilla_steps_total", 0) == 0
