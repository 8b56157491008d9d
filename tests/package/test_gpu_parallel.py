"""benchmarks/gpu_parallel.py without a GPU: the places of its engines, their jobs, and its rows."""

from __future__ import annotations

import json
import pathlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import gpu_parallel
import pytest
from gpu_parallel import Place

from nwor_ops.testing.engine_process import EngineFailed


@pytest.mark.parametrize(
    ("gpus", "names"),
    [
        ([1], ["cow_tp1-0"]),
        ([1, 2], ["cow_tp2-0", "cow_tp1-0", "cow_tp1-1"]),
        ([4], ["cow_tp4-0", "cow_tp1-0", "cow_tp1-1", "cow_tp1-2", "cow_tp1-3"]),
    ],
)
def test_every_kind_finds_its_engines(gpus: list[int], names: list[str]) -> None:
    assert [place.name for place in gpu_parallel.places("cow", gpus)] == names


@pytest.mark.parametrize(("target", "hidden"), [("8b", 4096), ("1b", 2048)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_add_up_without_multicast(ranks: int, target: str, hidden: int, tmp_path: pathlib.Path) -> None:
    options = SimpleNamespace(requests=[64, 16], target=target, small=False)
    job = gpu_parallel.engine_job_at(Place("cow", ranks), tmp_path, options)
    assert json.loads((tmp_path / "target" / "config.json").read_text())["hidden_size"] == hidden
    engine = json.loads(json.dumps(job))["engine"]
    assert engine["compilation_config"] == {
        "cudagraph_capture_sizes": [80, 320],
        "pass_config": {"fuse_allreduce_rms": False},
    }
    assert engine.get("tensor_parallel_size", 1) == ranks
    assert engine.get("disable_custom_all_reduce", False) == (ranks > 1)
    assert job["captures"] == 2


class Engine:
    """Answer a command and record it. A turn with NWOR takes 5 us longer per step."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: Counter[str] = Counter()
        self._fails = fails

    def ask(self, command: str) -> dict[str, Any]:
        self.asked[command] += 1
        if self._fails:
            raise EngineFailed("planted")
        _, _, capture, first, _ = map(str, command.split())
        order = [first != "1", first == "1"]
        turns = [
            {"on": not off, "median_step": 1e-3 + 5e-6 * (not off), "seconds": 0.02, "steps": 20, "tokens": 50 * 16,
             "windows": 0 if off else 26}
            for off in order
        ]  # fmt: skip
        return {"turns": turns, "capture": int(capture), "vanilla_steps": [{}]}


def _run(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, broken: tuple[Place, ...] = ()) -> Any:
    monkeypatch.setattr(gpu_parallel, "this_machine", lambda: "here")
    monkeypatch.setattr(gpu_parallel, "EngineProcess", Engine)
    options = SimpleNamespace(
        target="8b",
        modes=["cow", "stage"],
        gpus=[1, 2],
        requests=[16],
        seconds=0.0,
        small=False,
        folder=tmp_path / "results",
    )
    run = gpu_parallel.Run(options, tmp_path)  # type: ignore[arg-type]
    places = [place for mode in options.modes for place in gpu_parallel.places(mode, options.gpus)]
    run.engines = {place: Engine(place in broken) for place in places}  # type: ignore[misc]
    run.measure()
    return run


def _rows(tmp_path: pathlib.Path) -> dict[str, Any]:
    lines = (tmp_path / "results" / "here" / "gpu_parallel.jsonl").read_text().splitlines()
    return {row["name"]: row["value"] for row in map(json.loads, lines) if "name" in row}


def test_each_kind_has_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    run = _run(monkeypatch, tmp_path)
    assert run.problems == []
    found = _rows(tmp_path)
    for mode in ("cow", "stage"):
        for kind in ("tp1", "tp2", "dp2"):
            assert found[f"added_us_{mode}_{kind}/16"] == 5.0
            assert found[f"e2e_{mode}_{kind}/16"] == 1.0
    # Each side is captured first once, and all ranks of data parallelism get equally many requests.
    asked = {place.name: engine.asked for place, engine in run.engines.items()}
    assert asked["cow_tp2-0"] == Counter({f"turns 16 {n} {first} 0": 1 for n in (0, 1) for first in (0, 1)})
    assert asked["stage_tp2-0"] == Counter({f"turns 16 0 {first} 0": 2 for first in (0, 1)})
    assert asked["cow_tp1-1"] == asked["cow_tp2-0"]
    assert asked["cow_tp1-0"] == asked["cow_tp1-1"] + asked["cow_tp1-1"]


def test_failed_measurements_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    run = _run(monkeypatch, tmp_path, broken=(Place("cow", 1, 1),))
    assert run.problems == ["planted"]
    found = _rows(tmp_path)
    assert "e2e_cow_tp2/16" in found
    assert "e2e_cow_dp2/16" not in found
