"""Blocks of code in the documents: Python runs here, and every command exists."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import typer
from draft_loop import Drafter, StandaloneFirstPass
from paged_drafter import DrafterConfig, PagedMetadataAdapter
from processes import ROOT

from nwor_ops.config import NworConfig
from nwor_ops.drafter import DraftBuffers, DraftSampler
from nwor_ops_cli import app

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


# What a block takes as given, by document.
GIVEN: dict[str, Callable[[str], dict[str, Any]]] = {
    "docs/guides/draft-loop.md": draft_loop,
}


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.document)
def test_block_of_python_runs(block: Block, device: str) -> None:
    """On the device of the test. A CPU has no CUDA graphs, so that nothing is captured there."""
    code = block.text.replace('"cuda"', repr(device))
    if device == "cpu":
        code = re.sub(r"^loop\.capture\(.*$", "", code, flags=re.MULTILINE)
    names = GIVEN.get(block.document, lambda device: {})(device)
    exec(compile(code, block.document, "exec"), names)
    if block.document == "docs/guides/draft-loop.md":
        assert names["drafts"].shape == (3, names.get("n", 4))
    if "states" in names and block.document == "docs/guides/recurrent-states.md":
        assert names["out"].abs().sum() > 0
        assert not names["states"].cursors.table[:, 0].any()  # all rows are folded


# ---------------------------------------------------------------- commands


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a command, and its words."""
    words = shlex.split(command, comments=True)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    return variables, [word for word in words if not re.match(r"[A-Z_]+=", word)]


def problem_of(command: str) -> str:
    """Return why a command of a document cannot run, or an empty string."""
    variables, words = words_of(command)
    match words:
        case ["make", target, *_]:
            found = re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return "" if found else f"no target {target}"
        case ["python", "-m", "vllm.entrypoints.openai.api_server", *options] | ["vllm", "serve", *options]:
            place = options.index("--additional-config") + 1 if "--additional-config" in options else 0
            settings = NworConfig.load(json.loads(options[place]) if place else None, variables)
            return "" if settings != NworConfig() else "no feature is switched on"
        case ["python", script, *options]:
            source = (ROOT / script).read_text() if (ROOT / script).exists() else ""
            unknown = [option for option in options if option.startswith("--") and f'"{option}"' not in source]
            return "" if source and not unknown else f"{script}: missing, or without {unknown}"
        case ["nwor-ops", name, *options]:
            if name not in COMMANDS_OF_OURS:
                return f"no command {name}"
            options = options[: options.index("--")] if "--" in options else options
            names = {
                name for option in COMMANDS_OF_OURS[name].params for name in (*option.opts, *option.secondary_opts)
            }
            unknown = [option for option in options if option.startswith("--") and option not in names]
            return f"no option {unknown}" if unknown else ""
    return "" if words[0] in ("pip", "echo", "docker", "curl", "vllm", "pytest", "source", "git") else "not known"


COMMANDS_OF_OURS: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_commands_can_run() -> None:
    assert len(COMMANDS) > 15
    problems = [
        f"{document}: {command}: {problem_of(command)}" for document, command in COMMANDS if problem_of(command)
    ]
    assert problems == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make nothing", "no target nothing"),
        ("vllm serve MODEL", "no feature is switched on"),
        ("python examples/nothing.py", "examples/nothing.py: missing"),
        ("python examples/staging/token_tree.py --leaves 3", "without ['--leaves']"),
        ("nwor-ops nothing", "no command nothing"),
        ("nwor-ops check --nothing -- MODEL", "no option ['--nothing']"),
    ],
)
def test_wrong_commands_are_found(command: str, problem: str) -> None:
    assert problem in problem_of(command)


# ---------------------------------------------------------------- all blocks


def test_blocks_have_a_known_language() -> None:
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
