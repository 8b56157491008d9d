"""benchmarks/gpu_engine.py and gpu_transaction.py without a GPU: sides, jobs, the order of turns, and rows."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import benchmark_engine
import gpu_engine
import gpu_transaction
import pytest
from gpu_engine import MODELS, Engine, Run, job_of, side_of

from nwor_ops.testing.engine_process import EngineFailed


@pytest.mark.parametrize("model", MODELS)
def test_job_has_models_and_acceptance(model: str, tmp_path: pathlib.Path) -> None:
    shape, drafts = MODELS[model].shape, MODELS[model].num_drafts
    job = json.loads(json.dumps(job_of(MODELS[model], side_of("vanilla"), tmp_path, 36, MODELS[model].acceptance)))
    assert job["vocabulary"] == shape["vocab_size"]
    assert job["length"] == pytest.approx(2.5, abs=0.001)
    assert len(job["engine"]["speculative_config"]["synthetic_acceptance_rates"]) == drafts
    assert json.loads((tmp_path / "target" / "config.json").read_text()) == shape
    kinds = shape.get("layer_types", [])
    assert len(kinds) in (0, shape["num_hidden_layers"])


def test_words_of_a_side_add_up(tmp_path: pathlib.Path) -> None:
    side = side_of("bfloat16+recurrent+vocabulary_8192+drafts_5")
    assert side == side_of("drafts_5+vocabulary_8192+recurrent+bfloat16")
    assert side.settings == {"VLLM_NWOR_RECURRENT": "1", "VLLM_NWOR_DRAFT_VOCABULARY": "8192"}
    engine = job_of(MODELS["hybrid"], side, tmp_path, 12, 0.5)["engine"]
    assert engine["mamba_ssm_cache_dtype"] == "bfloat16"
    assert engine["max_num_seqs"] == gpu_engine.SEQS_OF_SMALL_CACHE
    assert engine["speculative_config"]["synthetic_acceptance_rates"] == [0.5, 0.25, 0.125, 0.0625, 0.0312]
    assert "speculative_config" not in job_of(MODELS["llama"], side_of("drafts_0"), tmp_path, 36, 0.5)["engine"]
    assert side_of("v1+graphs").runner == "v1"
    with pytest.raises(ValueError, match=r"'nonsense' is no side; there are drafts_N, vocabulary_N, vanilla, "):
        side_of("recurrent+nonsense")


@pytest.mark.parametrize(
    ("words", "message"),
    [("--sides a", "'a' is no side"), ("--over cow", "--over names cow"), ("--at-once 1", "at least 2")],
)
def test_bad_arguments_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        gpu_engine.parse_arguments(words.split())
    assert message in capsys.readouterr().err


def test_first_side_meets_all_others() -> None:
    assert list(gpu_engine.groups_of(["a", "b", "c", "d"], 3)) == [["b", "c"], ["d"]]
    assert list(gpu_engine.groups_of(["a"], 2)) == [[]]


class Process:
    """Answers like an engine process, in ``seconds`` per run. Prompts with a known prefix take half the time."""

    def __init__(self, name: str, asked: list[str], seconds: float, length: float = 2.5) -> None:
        self.name, self.asked, self.seconds, self.length = name, asked, seconds, length
        self.prefixes: set[str] = set()

    def ask(self, command: str) -> dict[str, Any]:
        self.asked.append(f"{self.name}: {command}")
        if command.startswith("fits"):
            return {"requests": 100 / self.seconds}
        if command.startswith("ttft"):
            _, count, _, _, _, seed = command.split()
            hit = seed in self.prefixes
            self.prefixes.add(seed)
            return {"seconds": [self.seconds / (1 + hit)] * int(count), "cached": [512 * hit] * int(count)}
        return {
            "seconds": self.seconds, "tokens": 256, "acceptance_length": self.length, "most_running": 7,
            "draft_graph_replays": 1,
        }  # fmt: skip

    def close(self, deadline: float | None = None) -> None: ...


def run_of(tmp_path: pathlib.Path, over: list[str], **processes: Process) -> Run:
    words = ["--sides", *processes, "--over", *over, "--folder", str(tmp_path / "results"), "--seconds", "0"]
    run = Run(gpu_engine.parse_arguments(words), tmp_path)
    for name, process in processes.items():
        versions = {"start_seconds": 60.0, "draft_graphs": []}
        run.engines[name] = Engine(process, {"length": 2.5}, versions)  # type: ignore[arg-type]
    return run


def rows_of(tmp_path: pathlib.Path) -> dict[str, float]:
    [file] = (tmp_path / "results").glob("*/gpu_engine_hybrid.jsonl")
    return {row["name"]: row["value"] for row in map(json.loads, file.read_text().splitlines()) if "name" in row}


def test_sides_take_turns_and_are_compared(tmp_path: pathlib.Path) -> None:
    asked: list[str] = []
    seconds = {"recurrent": 1.0, "vanilla": 2.0, "bfloat16": 1.6}
    processes = {name: Process(name, asked, some) for name, some in seconds.items()}
    run = run_of(tmp_path, ["vanilla", "bfloat16"], **processes)
    run.measure(64)
    run.facts()
    assert asked[:3] == [f"{name}: run 64 0" for name in seconds]
    assert asked[3:6] == [f"{name}: run 64 384" for name in ("recurrent", "bfloat16", "vanilla")]
    rows = rows_of(tmp_path)
    ratios = {name: value for name, value in rows.items() if name.startswith("e2e/")}
    assert ratios == {
        "e2e/recurrent/over/vanilla/64": 2.0,
        "e2e/recurrent/over/bfloat16/64": 1.6,
        "e2e/bfloat16/over/vanilla/64": 1.25,
    }
    assert rows["tok_s/vanilla/64"] == 128.0
    assert rows["fits/recurrent/over/vanilla"] == 2.0
    assert run.problems == []


def test_speed_is_scaled_to_expected_acceptance(tmp_path: pathlib.Path) -> None:
    processes = {"recurrent": Process("recurrent", [], 1.0, length=2.45), "vanilla": Process("vanilla", [], 1.0, 2.2)}
    run = run_of(tmp_path, ["vanilla"], **processes)
    run.measure(64)
    rows = rows_of(tmp_path)
    assert rows["tok_s/recurrent/64"] == pytest.approx(256 * 2.5 / 2.45, abs=0.1)
    assert run.problems == ["vanilla, 64 requests: 2.2 tokens per step, expected 2.50"]
    assert not any(name.startswith("e2e") for name in rows)


def test_first_tokens_compare_cold_with_cold(tmp_path: pathlib.Path) -> None:
    processes = {"recurrent": Process("recurrent", [], 1.0), "vanilla": Process("vanilla", [], 2.0)}
    processes["vanilla"].prefixes.add("1")  # cached on one side only: in no ratio
    run = run_of(tmp_path, ["vanilla"], **processes)
    run.first_tokens(range(2))
    rows = rows_of(tmp_path)
    assert (rows["ttft_ms/vanilla/cold"], rows["ttft_ms/vanilla/hit"]) == (2000, 1000)
    for kind in ("cold", "hit", "hit_at_once"):
        assert rows[f"ttft/recurrent/over/vanilla/{kind}"] == 0.5


def test_failed_side_is_left_out(tmp_path: pathlib.Path) -> None:
    processes = {"recurrent": Process("recurrent", [], 1.0), "vanilla": Process("vanilla", [], 2.0)}
    run = run_of(tmp_path, ["vanilla"], **processes)

    def fail(engine: Engine) -> None:
        if engine.process is processes["vanilla"]:
            raise EngineFailed("it ended")

    run._each(["recurrent", "vanilla", "absent"], fail)
    assert list(run.engines) == ["recurrent"]
    assert run.problems == ["vanilla: it ended"]


def test_parts_of_a_step_by_kernel() -> None:
    """With many requests each product takes long, and an fp8 copy makes the drafts' heads short."""
    mark, before = ("spin_kernel(long)", 2.0), ("nvjet_64x8", 700.0)
    verify = "void nwor::(anonymous namespace)::verify_kernel<float>"
    target = [mark, ("nvjet_128x64", 300.0), (verify, 20.0), ("nvjet_256x64", 2400.0)]
    vanilla = [*target, *([("nvjet_64x8", 90.0), ("cutlass_fp8_gemm", 310.0), ("reduce_argmax", 5.0)] * 3)]
    assert benchmark_engine.step_parts([before, *vanilla * 2], 3) == {
        "states": 20, "target_head": 2400, "drafts_heads": 930, "rest": 300 + 3 * 95, "steps": 2
    }  # fmt: skip
    drafts = [("nvjet_64x8", 300.0), ("nvjet_64x8", 90.0), ("void nwor::(anonymous namespace)::argmax_kernel", 6.0)] * 3
    update = [("void nwor::(anonymous namespace)::plan_vocabulary_kernel", 8.0)]
    assert benchmark_engine.step_parts([before, *[*target, *update, *drafts] * 2], 3) == {
        "states": 20, "target_head": 2400, "drafts_heads": 8 + 3 * 96, "rest": 300 + 3 * 300, "steps": 2
    }  # fmt: skip


# ---------------------------------------------------------------- gpu_transaction.py


def turns(on_seconds: float, **more: Any) -> dict[str, Any]:
    off = {"on": False, "steps": 20, "tokens": 800, "seconds": 1.0, "median_step": 0.05, "windows": 0}
    on = off | {"on": True, "seconds": on_seconds, "median_step": on_seconds / 20, "windows": 26} | more
    return {"turns": [off, on, on, off], "vanilla_steps": []}


def test_turns_are_compared_in_pairs() -> None:
    rows = {row.name: row for row in gpu_transaction.turn_rows("cow", 16, [turns(1.25), turns(0.8)])}
    assert (rows["e2e/cow/16"].value, rows["e2e/cow/16"].target) == (1.025, 0.998)
    assert rows["added_us/cow/16"].value == pytest.approx(1e6 * (0.0625 + 0.04 - 0.1) / 2)


@pytest.mark.parametrize(
    ("more", "message"),
    [({"tokens": 900}, "not comparable"), ({"windows": 19}, "NWOR was on where it should be off")],
)
def test_incomparable_turns_give_no_row(more: dict[str, int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        gpu_transaction.turn_rows("cow", 16, [turns(1.0, **more)])


def test_each_capture_has_each_side_first() -> None:
    asked: list[str] = []
    engines: Any = {mode: Process(mode, asked, 1.0) for mode in ("cow", "stage")}
    gpu_transaction.measure(engines, 16, 0.0)
    assert [command for command in asked if "cow" in command] == [
        f"cow: turns 16 {capture} {first}" for capture in (0, 1) for first in (0, 1)
    ]
    assert asked.count("stage: turns 16 0 0") == asked.count("stage: turns 16 0 1") == 2
