"""benchmarks/gpu_recurrent.py where there is no GPU: its jobs, its order of turns, what it makes of the answers."""

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
