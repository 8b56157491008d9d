"""Blocks of code in the documents: Python runs here, and every command is one that a test or a named machine runs."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from draft_loop import Drafter, StandaloneFirstPass
from paged_drafter import DrafterConfig, PagedMetadataAdapter
from processes import ROOT
from readme_serve import readme_commands

from nwor_ops.config import NworConfig
from nwor_ops.drafter import DraftBuffers, DraftSampler

DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md")
# "<!-- ran on an H200 -->" before a block: it needs hardware or hours, and this is where it ran.
MARK = re.compile(r"<!-- ran on (.+?) -->\n")
LANGUAGES = ("bash", "python", "")  # without a language: a diagram


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        document: its document, relative to the root.
        hardware: the hardware that a comment before it names, or "".
    """

    document: str
    language: str
    hardware: str
    text: str


def blocks_of(text: str, document: str) -> list[Block]:
    pattern = re.compile(rf"(?:{MARK.pattern})?^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Block(document, language, hardware or "", code) for hardware, language, code in pattern.findall(text)]


BLOCKS = [block for path in DOCUMENTS for block in blocks_of(path.read_text(), str(path.relative_to(ROOT)))]
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.hardware]
COMMANDS = [
    (block.document, command.strip())
    for block in BLOCKS
    if block.language == "bash" and not block.hardware
    for line in block.text.replace("\\\n", " ").splitlines()
    if (command := line) and not line.startswith("#")
]


# ---------------------------------------------------------------- Python


def draft_loop(device: str) -> dict[str, Any]:
    """The model and the adapters of examples/draft_loop.py, for buffers of the block's own."""
    drafts, rows, max_len = 4, 16, 64
    example = Drafter(DrafterConfig(), drafts, rows, max_len, device)

    made: list[StandaloneFirstPass] = []

    def first_pass(buffers: DraftBuffers, sampler: DraftSampler) -> StandaloneFirstPass:
        made.append(StandaloneFirstPass(example.target, buffers, len(buffers.input_ids), max_len))
        made[0].sampler = sampler
        return made[0]

    def metadata(buffers: DraftBuffers) -> PagedMetadataAdapter:
        tokens = len(buffers.input_ids)
        return PagedMetadataAdapter(example.config, buffers, example.block_tables, tokens, made[0].unwritten)

    states = torch.arange(3)
    tokens = torch.randint(example.config.vocab_size, (3, drafts + 1))
    example.target.load(tokens, torch.full((3,), 5), torch.zeros(3), states, torch.arange(3))
    return {
        "K": drafts,
        "YourFirstPass": first_pass,
        "YourMetadata": metadata,
        "max_len": max_len,
        "max_num_reqs": rows,
        "model": example.model,
        "num_reqs": 3,
        "seeds": example.seeds,
        "states": states,
        "temperature": example.temperature,
    }


def recurrent_states(device: str) -> dict[str, Any]:
    """Two requests of a layer, with one known token and two drafts each."""
    generator = torch.Generator().manual_seed(0)

    def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(6, *shape, generator=generator).to(device, dtype)

    def per_request(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return {
        "A_log": torch.zeros(32, device=device),
        "K": 2,
        "a": rows(32),
        "b": rows(32),
        "dt_bias": torch.zeros(32, device=device),
        "k": rows(16, 128),
        "max_requests": 2,
        "num_kept": per_request(1, 3),
        "q": rows(16, 128),
        "query_start_loc": per_request(0, 3, 6),
        "state_slots": per_request(1, 2),
        "v": rows(32, 128),
        "weight": torch.ones(128, device=device, dtype=torch.bfloat16),
        "z": rows(32, 128),
    }


# What a block takes as given, by document.
GIVEN: dict[str, Callable[[str], dict[str, Any]]] = {
    "docs/guides/draft-loop.md": draft_loop,
    "docs/guides/recurrent-states.md": recurrent_states,
}


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.document)
def test_a_block_of_python_runs(block: Block, device: str) -> None:
    """On the device of the test. A CPU has no CUDA graphs, so that nothing is captured there."""
    code = block.text.replace('"cuda"', repr(device))
    if device == "cpu":
        code = re.sub(r"^loop\.capture\(.*$", "", code, flags=re.MULTILINE)
    names = GIVEN.get(block.document, lambda device: {})(device)
    exec(compile(code, block.document, "exec"), names)
    if block.document == "docs/guides/draft-loop.md":
        assert names["drafts"].shape == (3, 4)
    if block.document == "docs/guides/recurrent-states.md":
        assert names["out"].abs().sum() > 0


def test_there_are_blocks_of_python() -> None:
    assert {block.document for block in PYTHON} > set(GIVEN)


# ---------------------------------------------------------------- commands


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a command, and its words."""
    words = shlex.split(command, comments=True)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    return variables, [word for word in words if not re.match(r"[A-Z_]+=", word)]


def as_in_the_readme(command: str) -> bool:
    """Whether tests/vllm/test_serve_readme.py or tests/gpu/vllm/test_serve_readme.py starts this server.

    The settings may be in ``--additional-config``, and the program may be the one that vLLM's CPU engine has.
    """
    variables, words = words_of(command)
    program = ["vllm", "serve"]
    if words[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]:  # tests/vllm/test_metrics.py starts it so
        words = [*program, *words[4:]]
    additional = None
    if "--additional-config" in words:
        place = words.index("--additional-config")
        additional = json.loads(words[place + 1])
        words = words[:place] + words[place + 2 :]
    settings = NworConfig.load(additional, variables)
    tested = {NworConfig.load(None, entry.environment): entry.words for entry in readme_commands().values()}
    tested[NworConfig(mode="stage")] = tested[NworConfig(mode="cow")]  # tests/vllm/test_stage.py
    return words[:2] == program and tuple(words[2:]) == tested.get(settings)


def checks_the_readme(command: str) -> bool:
    """Whether this checks or verifies a server of the README, as test_check.py and test_verify.py of tests/vllm do."""
    checked = re.sub(r"nwor-ops (?:check|verify --minutes \d+) --", "vllm serve", command)
    return checked != command and as_in_the_readme(checked)


def benches_the_readme(command: str) -> bool:
    """Whether this measures a server of the README, as tests/vllm/test_bench_servers.py does for one feature."""
    switches = {"transaction": "VLLM_NWOR_MODE=cow", "draft": "VLLM_NWOR_DRAFT_GRAPHS=1"}
    switches["recurrent"] = "VLLM_NWOR_RECURRENT=1"
    found = re.match(r"nwor-ops bench (\w+) -- ", command)
    return found is not None and as_in_the_readme(f"{switches[found[1]]} vllm serve {command[found.end() :]}")


def is_target(command: str) -> bool:
    """Whether this is a target of the Makefile that .ci/run makes."""
    _, words = words_of(command)
    return words[0] == "make" and re.search(rf"^make {words[1]}\b", (ROOT / ".ci/run").read_text(), re.M) is not None


def is_example(command: str) -> bool:
    """Whether tests/package/test_examples.py runs this script, and the script has these options."""
    _, (python, script, *options) = words_of(command)
    if python != "python" or not script.startswith("examples/"):
        return False
    source = (ROOT / script).read_text()
    tested = pathlib.Path(script).name in (ROOT / "tests/package/test_examples.py").read_text()
    return tested and all(f'"{option}"' in source for option in options if option.startswith("--"))


# Exact commands, and the tests that run them or what they stand for.
TESTS = {
    "nwor-ops doctor": "tests/package/test_cli.py",
    "nwor-ops verify --minutes 1": "tests/package/test_verify.py",
    "pip install --no-build-isolation '.[cli]'": "tests/dist/test_packages.py",
    'echo "torch==2.13.0+cpu" > constraint.txt': "tests/dist/test_packages.py",
    "pip install nwor_ops-0.1.0.tar.gz": "tests/dist/test_packages.py",
}


RULES = (as_in_the_readme, checks_the_readme, benches_the_readme, is_target, is_example)


def test_every_command_is_run_by_a_test() -> None:
    assert len(COMMANDS) > 15
    unknown = []
    for document, command in COMMANDS:
        _, words = words_of(command)
        exact = next((name for name in TESTS if words == words_of(name)[1]), None)
        if exact is not None:
            assert (ROOT / TESTS[exact]).exists(), exact
        elif not any(rule(command) for rule in RULES):
            unknown.append(f"{document}: {command}")
    assert unknown == []


def test_a_command_that_no_test_runs_is_found() -> None:
    speculation = """--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'"""
    assert as_in_the_readme(f"VLLM_NWOR_MODE=cow vllm serve MODEL {speculation}")
    assert as_in_the_readme(f"""vllm serve MODEL {speculation} --additional-config '{{"nwor": {{"mode": "cow"}}}}'""")
    assert not as_in_the_readme(f"VLLM_NWOR_MODE=cow vllm serve MODEL {speculation} --other")
    assert not as_in_the_readme(f"VLLM_NWOR_RECURRENT=1 vllm serve MODEL {speculation}")
    assert benches_the_readme(f"nwor-ops bench transaction -- MODEL {speculation}")
    assert not benches_the_readme(f"nwor-ops bench recurrent -- MODEL {speculation}")
    assert is_target("make test  # all")
    assert not is_target("make nothing")
    assert is_example("python examples/staging/token_tree.py --branches 3")
    assert not is_example("python examples/staging/token_tree.py --leaves 3")
    assert not is_example("python examples/paged_llama.py")


# ---------------------------------------------------------------- all blocks


def test_every_block_has_a_known_language_or_names_its_hardware() -> None:
    assert [block for block in BLOCKS if block.language not in LANGUAGES] == []
    program = re.compile(r"^(?:\w+=\S+ )*(?:python|make|pip|vllm|nwor-ops) ", re.MULTILINE)
    assert [block for block in BLOCKS if not block.language and program.search(block.text)] == []


def test_blocks_are_found() -> None:
    text = "<!-- ran on an H200 -->\n```bash\nls\n```\n\n```python\n1 + 1\n```\n```\n-> ->\n```\n"
    assert blocks_of(text, "a.md") == [
        Block("a.md", "bash", "an H200", "ls\n"),
        Block("a.md", "python", "", "1 + 1\n"),
        Block("a.md", "", "", "-> ->\n"),
    ]
