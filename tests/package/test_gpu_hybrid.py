"""benchmarks/gpu_hybrid.py without a GPU: its jobs, its order of turns, and the rows it makes of the answers."""

from __future__ import annotations

import pathlib
from typing import Any

import gpu_hybrid
import pytest


def test_a_default_engine_is_told_nothing_else(tmp_path: pathlib.Path) -> None:
    engine = gpu_hybrid.job_of(tmp_path, gpu_hybrid.variant_of("default"), small=False)["engine"]
    needed = {"model", "load_format", "skip_tokenizer_init", "seed", "disable_log_stats", "max_num_batched_tokens"}
    assert set(engine) == needed | {"kv_cache_memory_bytes", "gpu_memory_utilization", "speculative_config"}


def test_variants_are_joined(tmp_path: pathlib.Path) -> None:
    variant = gpu_hybrid.variant_of("bfloat16+drafts_1+no_prefix")
    assert (variant.engine["mamba_ssm_cache_dtype"], variant.drafts) == ("bfloat16", 1)
    assert gpu_hybrid.variant_of("drafts_1+bfloat16") == gpu_hybrid.variant_of("bfloat16+drafts_1")
    engine = gpu_hybrid.job_of(tmp_path, variant, small=False, block_size=576)["engine"]
    assert engine["enable_prefix_caching"] is False
    assert engine["block_size"] == 576
    assert engine["speculative_config"]["synthetic_acceptance_rates"] == [0.6914]
    none = gpu_hybrid.job_of(tmp_path, gpu_hybrid.variant_of("drafts_0"), small=False)["engine"]
    assert "speculative_config" not in none
    assert "max_num_seqs" not in engine
    small = gpu_hybrid.job_of(tmp_path, variant, small=False, cache_gib=12)["engine"]
    assert small["max_num_seqs"] == gpu_hybrid.SEQS_OF_SMALL_CACHE
    with pytest.raises(ValueError, match="'nonsense' is not a variant; there are default"):
        gpu_hybrid.variant_of("default+nonsense")
    assert gpu_hybrid.results_of("bfloat16+drafts_1") == "gpu_hybrid_bfloat16"
    assert gpu_hybrid.results_of("drafts_1+ring_6") == "gpu_hybrid_ring"
    assert gpu_hybrid.results_of("ring_6+drafts_0") == "gpu_hybrid_without_drafts_ring"
    ring = gpu_hybrid.job_of(tmp_path, gpu_hybrid.variant_of("drafts_0+ring_6"), small=False)["engine"]
    assert ring["additional_config"] == {"nwor": {"ring_rows": 6}}
    chunk = gpu_hybrid.job_of(tmp_path, gpu_hybrid.variant_of("chunk"), small=False)["engine"]
    assert chunk["additional_config"] == {"nwor": {"recurrent": "chunk"}}
    assert gpu_hybrid.results_of("chunk") == "gpu_hybrid_chunk"
    assert gpu_hybrid.results_of("drafts_0") == "gpu_hybrid_without_drafts"


def test_a_draft_is_accepted_as_often_with_any_number_of_drafts(tmp_path: pathlib.Path) -> None:
    rates = [
        gpu_hybrid.job_of(tmp_path, gpu_hybrid.variant_of(f"drafts_{drafts}"), small=False)["engine"][
            "speculative_config"
        ]["synthetic_acceptance_rates"]
        for drafts in (1, 2)
    ]
    default = gpu_hybrid.job_of(tmp_path, gpu_hybrid.variant_of("default"), small=False)["engine"]
    most = default["speculative_config"]["synthetic_acceptance_rates"]
    assert rates == [most[:1], most[:2]]
    assert 1 + sum(most) == pytest.approx(2.5, abs=0.001)


class Engine:
    """Answers as an engine does, so many times as fast as the other."""

    def __init__(self, side: str, said: list[str], seconds: float) -> None:
        self.side, self.said, self.seconds = side, said, seconds

    def ask(self, command: str) -> dict[str, Any]:
        self.said.append(f"{self.side}: {command}")
        if command.startswith("ttft"):
            count, seed = int(command.split()[1]), command.split()[-1]
            hit = any(earlier.endswith(seed) for earlier in self.said[:-1] if earlier.startswith(f"{self.side}: ttft"))
            found = {"seconds": self.seconds / (2 if hit else 1), "cached": 512 if hit else 0}
            return {name: [value] * count for name, value in found.items()} | {"prompt_tokens": 1024}
        return {"seconds": self.seconds, "tokens": 256, "acceptance_length": 2.5, "most_running": 7}


def pair(said: list[str]) -> Any:
    return {"default": Engine("default", said, 2.0), "recurrent": Engine("recurrent", said, 1.0)}


def test_the_sides_take_turns_and_a_row_is_their_ratio() -> None:
    said: list[str] = []
    answers = gpu_hybrid.measure(pair(said), 64, seconds=0.0)
    assert said == ["default: run 64 0", "recurrent: run 64 0", "recurrent: run 64 1", "default: run 64 1"]
    rows = {row.name: row.value for row in gpu_hybrid.figures("default", 64, answers)}
    assert rows["e2e_recurrent/over_default/64"] == 2.0
    assert (rows["tok_s_recurrent_beside_default/64"], rows["tok_s_default/64"]) == (256, 128)
    assert rows["running_default/64"] == rows["running_recurrent_beside_default/64"] == 7
    answers["default"][0]["acceptance_length"] = answers["default"][1]["acceptance_length"] = 2.3
    with pytest.raises(RuntimeError, match="not comparable"):
        gpu_hybrid.figures("default", 64, answers)


def test_first_tokens_of_cold_prompts_and_of_hits() -> None:
    said: list[str] = []
    answers = gpu_hybrid.first_tokens(pair(said), range(2), (900, 124))
    ask = "ttft 1 900 124 0 0"
    assert said[:4] == [f"default: {ask}", f"recurrent: {ask}", f"recurrent: {ask}", f"default: {ask}"]
    assert said[32:35] == [
        "default: ttft 8 900 124 1 0",
        "recurrent: ttft 8 900 124 1 0",
        "recurrent: ttft 1 900 124 0 1",
    ]
    assert len(said) == 2 * 2 * (16 + 1)
    rows = {row.name: row.value for row in gpu_hybrid.first_token_figures("default", answers)}
    assert (rows["ttft_ms_default/cold"], rows["ttft_ms_default/hit"]) == (2000, 1000)
    assert rows["ttft_recurrent/over_default/cold"] == rows["ttft_recurrent/over_default/hit_at_once"] == 0.5
    assert rows["hit_rate_default"] == rows["hit_rate_recurrent_beside_default"] == 0.5


def test_a_prompt_that_only_one_side_has_cached_is_in_no_ratio() -> None:
    answers = gpu_hybrid.first_tokens(pair([]), range(1), (900, 124))
    for run in answers["default"]["single"][:2]:  # our second prompt is a hit, vanilla's is not
        run |= {"seconds": [9.0], "cached": [0]}
    rows = {row.name: row for row in gpu_hybrid.first_token_figures("default", answers)}
    assert rows["ttft_recurrent/over_default/hit"].spread == [0.5, 0.5]
    assert rows["ttft_recurrent/over_default/cold"].value == round(1 / 9, 4)
    assert rows["ttft_ms_default/cold"].value == 9000


def test_a_side_without_cold_prompts_has_no_row_of_them() -> None:
    engines = pair([])
    gpu_hybrid.first_tokens(engines, range(1), (900, 124))
    again = gpu_hybrid.first_tokens(engines, range(1), (900, 124))  # the prefix is in both caches now
    rows = {row.name: row.value for row in gpu_hybrid.first_token_figures("default", again)}
    assert (rows["ttft_ms_default/hit"], rows["ttft_recurrent/over_default/hit"]) == (1000, 0.5)
    assert not any(name.endswith("/cold") for name in rows)


def test_the_best_vanilla_is_that_over_which_we_gain_least() -> None:
    values = {"default": 1.3, "bfloat16": 1.1, "best": 9.0}
    known = {
        f"e2e_recurrent/over_{name}/64": {"name": f"e2e_recurrent/over_{name}/64", "value": value, "spread": [1.0, 2.0]}
        for name, value in values.items()
    }
    [row] = gpu_hybrid.best_figures(known, gpu_hybrid.TARGETS)
    assert (row.name, row.value, row.target, row.met) == ("e2e_recurrent/over_best/64", 1.1, 1.12, False)


def test_requests_that_fit() -> None:
    caches = [{"requests": requests, "block_sizes": [576, 576]} for requests in (259, 118)]
    rows = {row.name: row for row in gpu_hybrid.fit_figures("default", *caches)}
    assert rows["fits_recurrent/over_default"].value == pytest.approx(2.195, abs=0.001)


def test_requests_that_ran_at_once_in_a_full_cache() -> None:
    full = [{"most_running": requests, "waited": True} for requests in (300, 140)]
    rows = {row.name: row for row in gpu_hybrid.held_figures("default", *full)}
    assert rows["held_recurrent/over_default"].value == pytest.approx(2.143, abs=0.001)
    assert rows["held_recurrent/over_default"].met
    with pytest.raises(RuntimeError, match="recurrent: all requests ran at once"):
        gpu_hybrid.held_figures("default", full[0] | {"waited": False}, full[1])
