"""benchmarks/gpu_methods.py without a GPU: its jobs, the order of its turns, and its rows."""

from __future__ import annotations

import itertools
import json
import pathlib
from types import SimpleNamespace
from typing import Any, cast

import gpu_methods
import pytest
from gpu_methods import CAPTURES, METHODS, ROOT, Side

from nwor_ops.testing.engine_process import EngineProcess

COW, STAGE = Side("cow", ROOT), Side("stage", ROOT)


@pytest.mark.parametrize("name", METHODS)
def test_a_job_has_its_models_and_graphs_for_its_batches(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_methods.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 40))
    job = gpu_methods.method_job(METHODS[name], tmp_path, [64, 16, 1], small=False)
    engine = json.loads(json.dumps(job))["engine"]
    speculation = engine["speculative_config"]
    target, drafter = (
        json.loads((pathlib.Path(folder) / "config.json").read_text())
        for folder in (engine["model"], speculation["model"])
    )
    assert job["vocabulary"] == target["vocab_size"] == drafter["vocab_size"]
    assert target["hidden_size"] == drafter["hidden_size"]
    assert (speculation["model"] == engine["model"]) == (speculation["method"] == "mtp")
    tokens = speculation["num_speculative_tokens"] + 1
    assert engine["compilation_config"]["cudagraph_capture_sizes"] == [tokens, 16 * tokens, 64 * tokens]
    assert speculation["synthetic_acceptance_length"] <= tokens
    assert set(METHODS[name].targets) == set(CAPTURES)


@pytest.mark.parametrize(("free", "pinned"), [(7, True), (9, False)])
def test_blocks_go_to_pinned_memory_where_shared_memory_is_small(
    free: int, pinned: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_methods.shutil, "disk_usage", lambda _: SimpleNamespace(free=free << 30))
    job = gpu_methods.method_job(METHODS["offloading"], tmp_path, [16], small=False)
    assert ("worker_extension_cls" in job["engine"]) == pinned


def test_a_hybrid_model_has_a_kind_for_each_layer() -> None:
    kinds = gpu_methods.QWEN_9B["layer_types"]
    assert isinstance(kinds, list)
    assert len(kinds) == gpu_methods.QWEN_9B["num_hidden_layers"]
    assert kinds.count("full_attention") * 3 == kinds.count("linear_attention")


class Engine:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask(self, command: str) -> dict[str, Any]:
        self.asked.append(command)
        return {}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 1), (0.05, None)])
def test_every_capture_has_either_side_first(
    seconds: float, rounds: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(gpu_methods, "time", SimpleNamespace(monotonic=lambda: 0.01 * next(ticks)))
    engines = {COW: Engine(), STAGE: Engine()}
    answers = gpu_methods.measure(cast(dict[Side, EngineProcess], engines), 16, seconds, small=False)
    round_of = {
        COW: ["turns 16 0 0 0", "turns 16 0 1 0", "turns 16 1 0 0", "turns 16 1 1 0"],
        STAGE: ["turns 16 0 0 0", "turns 16 0 1 0"] * 2,
    }
    for side, engine in engines.items():
        done = len(engine.asked) // 4
        assert engine.asked == round_of[side] * done
        assert len(answers[side]) == len(engine.asked)
        assert done == rounds or (rounds is None and done > 1)


def answer(on_seconds: float, on_tokens: int = 50, stored_bytes: int = 1, capture: int = 0) -> dict[str, Any]:
    off = {"on": False, "steps": 20, "tokens": 50, "seconds": 1.0, "median_step": 0.05, "windows": 0}
    on = off | {"on": True, "tokens": on_tokens, "seconds": on_seconds, "median_step": on_seconds / 20, "windows": 26}
    return {"turns": [off, on, on, off], "capture": capture, "vanilla_steps": [], "stored_bytes": stored_bytes}


@pytest.mark.parametrize(("side", "target"), [(COW, 0.995), (STAGE, 0.99)])
def test_figures_of_a_row(side: Side, target: float) -> None:
    rows = gpu_methods.figures("eagle3", side, 1, [answer(1.25), answer(0.8)], small=False)
    found = {row.name: row for row in rows}
    label = f"{side.mode}_eagle3"
    ratio = found[f"e2e_{label}/1"]
    assert (ratio.value, ratio.target, ratio.met) == (1.025, target, True)
    assert found[f"acceptance_length_{label}/1"].value == found[f"acceptance_length_vanilla_{label}/1"].value == 2.5
    assert found[f"tok_s_vanilla_{label}/1"].value == 50
    assert not any("capture" in name for name in found)


def test_another_checkout_has_rows_of_its_own(tmp_path: pathlib.Path) -> None:
    ours, others = (
        {row.name for row in gpu_methods.figures("eagle", Side("cow", tree), 16, [answer(1.0, 50)] * 2, small=False)}
        for tree in (ROOT, tmp_path)
    )
    assert not ours & others
    assert "e2e_cow_eagle_other/16" in others


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("eagle3", {"on_tokens": 60}, "accepted differently"),
        ("offloading", {"stored_bytes": 0}, "has stored nothing"),
    ],
)
def test_incomparable_measurements_give_no_row(name: str, bad: dict[str, int], message: str) -> None:
    gpu_methods.figures(name, COW, 1, [answer(1.0)], small=False)
    with pytest.raises(RuntimeError, match=message):
        gpu_methods.figures(name, COW, 1, [answer(1.0), answer(1.0, **bad)], small=False)


@pytest.mark.parametrize("other", [ROOT, ROOT / "benchmarks"])
def test_another_checkout_is_one(other: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_methods.parse_arguments(["--other", str(other)])
    assert "another checkout" in capsys.readouterr().err
