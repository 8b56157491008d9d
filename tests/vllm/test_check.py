"""``nwor-ops check``: its results and costs are those of the engine that then starts."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from engines import ENGINE, NGRAM, Engines, model_folder, prompts
from test_hybrid import QWEN3_NEXT

from nwor_ops.cli.check import Outcome, as_dict, outcome_of, print_preview
from nwor_ops.cli.report import Report
from nwor_ops.cli.verify_engine import SMALL_ENGINE, STAGE_LENGTH
from nwor_ops.vllm.check import Prediction, Preview, Reason, configure, look
from nwor_ops.vllm.support.refusals import REFUSALS

# The arguments of vllm serve for the engines of these tests.
ARGUMENTS = (
    "--skip-tokenizer-init", "--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "256",
    "--max-num-seqs", "8", "--num-gpu-blocks-override", "96", "--block-size", "32",
)  # fmt: skip
SPECULATION = ("--speculative-config", json.dumps(NGRAM))
# A connector named by its module counts as a custom one, which must declare when it reads.
CONNECTOR = {
    "kv_connector": "ExampleConnector",
    "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "kv_role": "kv_both",
}


# A start decides this if the size of the cache is unknown.
ROOM = "the cache must hold the shadow pages and one request of the maximum length"


def looked(arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    os.environ.update(environment)
    return as_dict(look(arguments))


def predictions(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {prediction["feature"]: prediction for prediction in found["features"]}


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_the_costs_are_those_of_the_engine(engines: Engines, mode: str) -> None:
    engine = engines.start(prompts(2), nwor={"mode": mode}, max_tokens=8)
    found = engines.submit(looked, [model_folder(), *ARGUMENTS, *SPECULATION], {"VLLM_NWOR_MODE": mode}).result()
    assert found["exit_code"] == 0
    prediction = predictions(found)[mode]
    assert (prediction["switched_on"], prediction["runs"], prediction["reasons"]) == (True, True, [])
    assert ROOM not in prediction["at_start"]
    described, costs = engine.result()["session"]["describe"], prediction["costs"]
    if mode == "cow":
        assert f"log {costs['undo_log_bytes'] / 2**20:.1f} MiB" in described
    else:
        withheld, size = costs["shadow_pages"], costs["shadow_page_bytes"] / 2**20
        assert described.split("; ")[1].startswith(f"{withheld} of {ENGINE['num_gpu_blocks_override']} blocks")
        assert f"{size:.1f} MiB) are shadow pages" in described
    # 96 blocks of 32 tokens, and one that vLLM keeps; a request of 256 tokens has 8.
    assert costs["requests_that_fit_in_vllm"] == 12
    assert costs["requests_that_fit"] == (12 if mode == "cow" else (96 - costs["shadow_pages"]) // 8)


def test_a_refusal_is_that_of_the_engine_and_names_the_argument(engines: Engines) -> None:
    arguments = [model_folder(), *ARGUMENTS, *SPECULATION, "--kv-transfer-config", json.dumps(CONNECTOR)]
    found = engines.submit(looked, arguments, {"VLLM_NWOR_MODE": "cow"}).result()
    assert found["exit_code"] == Outcome.REFUSED
    [reason] = predictions(found)["cow"]["reasons"]
    assert reason["change"] == "--kv-transfer-config"
    with pytest.raises(RuntimeError, match=re.escape(f"nwor: {reason['why']} (mode cow was asked for")):
        engines.run(prompts(1), nwor={"mode": "cow"}, kv_transfer_config=CONNECTOR)


def test_an_engine_that_does_not_speculate_has_no_feature_but_one_state(engines: Engines) -> None:
    found = engines.submit(looked, [model_folder(), *ARGUMENTS], {"VLLM_NWOR_MODE": "stage"}).result()
    assert found["exit_code"] == Outcome.REFUSED
    reasons = {prediction["feature"]: prediction["reasons"] for prediction in found["features"]}
    of_one_state = [reason["why"] for reason in reasons.pop("one state")]
    assert of_one_state
    assert not any("speculate" in why for why in of_one_state)
    for found_reasons in reasons.values():
        assert found_reasons == [{"why": "the engine does not speculate", "change": "--speculative-config"}]


def test_a_cache_without_room_for_the_shadow_pages_is_refused(engines: Engines) -> None:
    arguments = [model_folder(), *ARGUMENTS, *SPECULATION, "--max-num-seqs", "64"]
    found = engines.submit(looked, arguments, {"VLLM_NWOR_MODE": "stage"}).result()
    [reason] = predictions(found)["stage"]["reasons"]
    assert reason["why"].startswith("mode stage withholds 128 blocks")
    assert reason["change"] == "--max-num-seqs, --max-model-len"
    assert predictions(found)["cow"]["runs"]


# ---------------------------------------------------------------- a GPU that is not here

DESCRIBED = """
import json, sys
import vllm
vllm.__version__ = "0.33.0"  # the version that has the features; the hooks are not compared
from nwor_ops.cli.check import as_dict
from nwor_ops.vllm import check
machine = check.describe_gpu((9, 0), 80 << 30)
for arguments in json.loads(sys.argv[1]):
    print(json.dumps(as_dict(check.look(arguments, machine=machine))))
"""


def lines_of(code: str, several: list[list[Any]], **environment: str) -> list[str]:
    """Run the code in a subprocess with the arguments of several engines. Return the lines that it prints."""
    command = [sys.executable, "-c", code, json.dumps(several)]
    variables = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"} | environment
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


@pytest.mark.long
def test_a_gpu_that_is_not_here_is_configured_as_if_it_were(tmp_path: pathlib.Path) -> None:
    """vLLM has not cached what it knows about the model's class, as on a new machine."""
    import torch

    if torch.version.cuda:
        pytest.skip("the hooks are compared with a CUDA build of vLLM")
    drafting = {"method": "draft_model", "model": model_folder(), "num_speculative_tokens": 4}
    arguments = [model_folder(), "--skip-tokenizer-init", "--speculative-config", json.dumps(drafting)]
    several = [arguments, [*arguments, "--enforce-eager"], [*arguments, "--cpu-offload-gb", "1"]]
    lines = lines_of(DESCRIBED, several, VLLM_NWOR_DRAFT_GRAPHS="1", VLLM_CACHE_ROOT=str(tmp_path))
    graphed, eager, offloaded = map(json.loads, lines)
    assert (graphed["engine"]["device"], graphed["engine"]["runner"]) == ("cuda", "V2")
    prediction = predictions(graphed)["draft graphs"]
    assert (graphed["exit_code"], prediction["runs"]) == (0, True)
    counts = prediction["costs"]["request_counts_with_graphs"]
    assert prediction["costs"]["graphs_at_most"] == 2 * len(counts)
    assert counts[-1] == 1
    assert any("cannot be compared for CUDA" in line for line in prediction["at_start"])
    assert ROOM in predictions(graphed)["stage"]["at_start"]
    [reason] = predictions(eager)["draft graphs"]["reasons"]
    assert (eager["exit_code"], reason["change"]) == (3, "without --enforce-eager; --compilation-config")
    [reason] = predictions(offloaded)["draft graphs"]["reasons"]
    assert (offloaded["exit_code"], reason["change"]) == (3, "without --cpu-offload-gb")
    assert not predictions(graphed)["one state"]["runs"]


CONFIGURED = """
import json, sys
from nwor_ops.vllm import check
check.describe_gpu((9, 0), 80 << 30)
from nwor_ops.cli.verify_engine import read_arguments
for arguments in json.loads(sys.argv[1]):
    print(read_arguments(arguments).compilation_config.cudagraph_mode.name)
"""


@pytest.mark.long
def test_verify_lets_the_audit_of_vanillas_states_see_each_step() -> None:
    """FULL graphs call no Python. They stay if the arguments name them, if a feature is on, and without states."""
    hybrid = [model_folder(**QWEN3_NEXT), "--skip-tokenizer-init", *SPECULATION]
    cases = [
        (hybrid, "PIECEWISE"),
        ([*hybrid, "--enforce-eager"], "NONE"),
        ([*hybrid, "-cc.cudagraph_mode=FULL"], "FULL"),
        ([*hybrid, "--additional-config", '{"nwor": {"mode": "cow"}}'], "FULL_AND_PIECEWISE"),
        ([model_folder(), "--skip-tokenizer-init", *SPECULATION], "FULL_AND_PIECEWISE"),
    ]
    found = lines_of(CONFIGURED, [arguments for arguments, _ in cases], VLLM_NWOR_AUDIT="1")
    assert found == [mode for _, mode in cases]


# The KV cache of a model that is not here: its attention and recurrent layers, each with (block size, KV heads, width).
PLANNED = """
import json, sys
import torch
from vllm.v1 import kv_cache_interface
from nwor_ops.vllm import check
check.describe_gpu((9, 0), 80 << 30)
from nwor_ops.cli.verify_engine import read_arguments
from nwor_ops.vllm.transaction.shadow_blocks import shadow_blocks
for arguments, full, sliding, recurrent, (size, heads, width) in json.loads(sys.argv[1]):
    config = read_arguments(arguments)
    attention = {"block_size": size, "num_kv_heads": heads, "head_size": width, "dtype": torch.bfloat16}
    of_full = kv_cache_interface.FullAttentionSpec(**attention)
    of_sliding = kv_cache_interface.SlidingWindowSpec(**attention, sliding_window=1024)
    drafts = config.speculative_config.num_speculative_tokens
    states = kv_cache_interface.MambaSpec(
        block_size=config.model_config.max_model_len, shapes=((64,),), dtypes=(torch.float32,),
        page_size_padded=of_full.page_size_bytes, num_speculative_blocks=drafts,
    )
    specs = {f"{kind}.{layer}": spec
             for kind, spec, layers in (("f", of_full, full), ("s", of_sliding, sliding), ("r", states, recurrent))
             for layer in range(layers)}
    config.cache_config.kv_cache_layout = "LBHNC"
    cache = check._plan_cache(config, specs, config.cache_config.kv_cache_memory_bytes)
    shadow_blocks(config, cache)
    print(config.model_config.max_model_len)
"""


@pytest.mark.long
def test_verify_starts_ordinary_models_in_mode_stage() -> None:
    """Qwen3-8B, Llama-2-7B, Gemma-3-27B and Qwen3.5-9B have these layers. The last model has a short context."""
    models: list[tuple[int, list[Any]]] = [
        (40960, [36, 0, 0, (16, 8, 128)]),
        (4096, [32, 0, 0, (16, 32, 128)]),
        (131072, [10, 52, 0, (16, 16, 128)]),
        (262144, [8, 0, 24, (544, 4, 256)]),
        (256, [36, 0, 0, (16, 8, 128)]),
    ]
    cases = [
        [[model_folder(max_position_embeddings=length), "--skip-tokenizer-init", *SPECULATION], *layers]
        for length, layers in models
    ]
    found = lines_of(PLANNED, cases, VLLM_NWOR_MODE="stage")
    assert found == [str(min(STAGE_LENGTH, length)) for length, _ in models]


# ---------------------------------------------------------------- the command


def check_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "nwor_ops", "check", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_an_argument_that_vllm_does_not_know_is_said_without_a_traceback() -> None:
    """test_cli.py has the mistakes that are found before vLLM is imported."""
    done = check_command("--", "/tmp", "--no-such-option")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "unrecognized arguments: --no-such-option" in done.stderr
    assert "an argument is unknown or malformed" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_vllm_refuses_is_in_the_json_too() -> None:
    done = check_command("--json", "--", "nobody/no-model", *SPECULATION)
    found = json.loads(done.stdout)
    assert (done.returncode, found["exit_code"]) == (4, 4), done.stderr
    assert found["error"].startswith("vLLM refuses these arguments: ")
    assert "nobody/no-model" in found["error"]
    assert f"nwor-ops check: {found['error']}" in done.stderr
    assert "Traceback" not in done.stderr


def printed(capsys: pytest.CaptureFixture[str], *predictions: Prediction, on_unsupported: str = "error") -> str:
    engine = {"vllm": "0.33.0", "device": "cuda", "runner": "V2", "model": "m", "architecture": "LlamaForCausalLM",
              "method": "ngram", "num_speculative_tokens": 4, "on_unsupported": on_unsupported}  # fmt: skip
    print_preview(Preview(engine, predictions), Report("check"))
    return capsys.readouterr().out


def test_the_last_line_says_what_the_engine_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    refused = Prediction("stage", True, (Reason("the cache is too small", "--max-num-seqs"),))
    off = Prediction("draft graphs", False, (Reason("the method has its own graphs"),))
    runs = Prediction(
        "one state", True, costs={"request_bytes": 2**21, "request_bytes_of_vllm": 2**23}, at_start=("x",)
    )
    text = printed(capsys, refused, off, runs)
    assert text.endswith("The engine will not start: stage will be refused.\n")
    assert "the cache is too small (--max-num-seqs)" in text
    assert "one state: switched on, will run\n  only a start can tell: x\n" in text
    assert printed(capsys, refused, on_unsupported="vanilla").endswith("The engine will start without stage.\n")
    assert printed(capsys, runs, off).endswith("No check refuses one state.\n")
    assert "Nothing is switched on" in printed(capsys, off)
    assert outcome_of(Preview({}, (off, runs))) is Outcome.RUNS
    assert outcome_of(Preview({}, (off, refused))) is Outcome.REFUSED


def test_the_arguments_that_refusals_name_are_vllms() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    known = {option for action in parser._actions for option in action.option_strings}
    named = {option for refusal in REFUSALS for option in re.findall(r"(?<!\S)--[a-z-]+", refusal.change)}
    assert len(named) > 15
    assert named - known == set()


def test_arguments_override_the_defaults_of_a_small_engine() -> None:
    """The CPU platform sets the memory of the cache itself, so it is not compared."""
    words = [model_folder(), "--skip-tokenizer-init"]
    small = configure(words, **SMALL_ENGINE)
    given = configure([*words, "--max-num-seqs", "8", "--max-model-len", "64"], **SMALL_ENGINE)
    assert (small.scheduler_config.max_num_seqs, given.scheduler_config.max_num_seqs) == (16, 8)
    assert (small.model_config.original_max_model_len, given.model_config.max_model_len) == (-1, 64)
