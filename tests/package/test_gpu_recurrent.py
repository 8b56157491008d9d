"""benchmarks/gpu_recurrent.py without a GPU: its jobs, the order of its turns, and its rows."""

from __future__ import annotations

import pathlib
from typing import Any

import gpu_recurrent
import pytest


def test_a_load_that_fits_has_graphs_of_its_size(tmp_path: pathlib.Path) -> None:
    job = gpu_recurrent.job_of(tmp_path, 3, 128, small=False)
    engine = job["engine"]
    assert engine["max_num_seqs"] == 128
    assert engine["speculative_config"]["num_speculative_tokens"] == 3
    sizes = engine["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes[-1] == engine["compilation_config"]["max_cudagraph_capture_size"] == 4 * 128
    for requests in gpu_recurrent.REQUESTS[3]:
        assert 4 * requests in sizes
    assert engine["enable_prefix_caching"] is False


class Engine:
    def __init__(self, side: str, said: list[str], seconds: float) -> None:
        self.side, self.said, self.seconds = side, said, seconds

    def ask(self, command: str) -> dict[str, Any]:
        self.said.append(f"{self.side}: {command}")
        return {
            "seconds": self.seconds,
            "tokens": 256,
            "tokens_hash": 1,
            "acceptance_length": 2.5,
            "most_running": 7,
        }


def test_the_sides_take_turns_and_a_row_is_their_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    engines: Any = {"vanilla": Engine("vanilla", said, 2.0), "recurrent": Engine("recurrent", said, 1.0)}
    answers = gpu_recurrent.measure(engines, 64, seconds=0.0)
    assert said == ["vanilla: run 64 0", "recurrent: run 64 0", "recurrent: run 64 1", "vanilla: run 64 1"]
    rows = {row.name: row.value for row in gpu_recurrent.figures("3", 64, answers)}
    assert rows["e2e_recurrent/3/64"] == 2.0
    assert (rows["tok_s_recurrent/3/64"], rows["tok_s_vanilla/3/64"]) == (256, 128)
    assert (rows["running_recurrent/3/64"], rows["running_vanilla/3/64"]) == (7, 7)


def profiled(kernels: int, syncs: int) -> dict[str, Any]:
    """Return a profile of 10 steps."""
    calls = {"cudaGraphLaunch": 20, "cudaLaunchKernel": 10 * kernels, "cudaEventRecord": 70}
    return {
        "steps": 10,
        "kernels": {"a": 10 * kernels, "b": 300},
        "copies": {"Memcpy HtoD": 40},
        "calls": calls,
        "syncs": {"cudaStreamSynchronize": syncs},
    }


def test_a_profile_says_what_one_state_adds() -> None:
    rows = gpu_recurrent.profile_rows("3", 16, profiled(4, 10), profiled(5, 10))
    assert {row.name.removeprefix("recurrent_step/3/16/"): (row.value, row.target) for row in rows} == {
        "kernels_added": (1.0, None),
        "host_launches_added": (1.0, 1),
        "copies_added": (0.0, None),
        "syncs_added": (0.0, 0),
    }


class Writer:
    """An engine whose second run differs from the first from the third token on, if requests run concurrently."""

    def __init__(self, first: int) -> None:
        self.first, self.runs = first, 0

    def ask(self, command: str) -> dict[str, Any]:
        _, count, at_once = command.split()
        self.runs += 1
        last = self.runs if int(at_once) else 9
        text = {"tokens": [self.first, 5, last], "margins": [0.0, 2.0, 0.5]}
        return {"texts": [text] * int(count)}


def test_texts_are_compared_with_those_of_the_same_engine_too(capsys: pytest.CaptureFixture[str]) -> None:
    engines: Any = {"vanilla": Writer(1), "recurrent": Writer(2)}
    gpu_recurrent.compare_texts(engines, 2)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "2 requests one by one: 2 of 6 best tokens are tied"
    assert said[1].strip() == (
        "vanilla, run 1 and recurrent, run 1: 2 of 2 texts part; request 0 at token 0, margin 0; "
        "request 1 at token 0, margin 0"
    )
    assert said[2].strip() == "vanilla, run 1 and vanilla, run 2: 0 of 2 texts part"
    assert "vanilla, run 1 and vanilla, run 2: 2 of 2 texts part; request 0 at token 2, margin 0.5" in said[9]


def test_texts_are_verified_greedily(tmp_path: pathlib.Path) -> None:
    speculation = gpu_recurrent.job_of(tmp_path, 3, 4, small=False, synthetic=False)["engine"]["speculative_config"]
    assert not [name for name in speculation if "synthetic" in name or "rejection" in name]
