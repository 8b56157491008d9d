"""Run the tests for the changes since origin/main, or since the last commit if there is no origin/main: ``make check``.

This file is the only place that maps sources to tests: by rules, and for helpers, benchmarks and tools by the imports
of the tests. It selects tests that take a minute or two, and only those engine tests that are marked ``smoke``. A
changed test file runs completely. Arguments are passed to pytest.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEVELS = r"(?:csrc/(?:cpu/|cuda/)?|meta/|nwor_ops/ops/|nwor_ops/testing/oracle/)"
FAMILIES = "undo|accept|shadow|staging|drafter|recurrent"
_OF_THE_MANAGER = tuple(f"transaction/test_{name}.py" for name in ("manager", "manager_stage", "staging_buffer"))
# Sources of one area and its tests, or the quick ones among them, relative to tests/. A family has the same name on
# every level, followed by an underscore if it has several files on one level. Every matching rule counts.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (LEVELS + rf"({FAMILIES})(?:_\w+)?\.\w+", (r"ops/test_\1.py",)),
    (r"(?:csrc|meta|nwor_ops/ops)/.*", ("ops/test_schema.py", "ops/test_plane_table.py")),
    (rf"csrc/(?!(?:cpu/|cuda/)?(?:{FAMILIES})[_.]).*", ("ops/test_undo.py",)),
    (r"nwor_ops/testing/(?:layouts|raw_rows|against_oracle)\.py", ("ops/test_undo.py",)),
    (r"nwor_ops/(?:transaction/)?(?!__main__)\w+\.py", _OF_THE_MANAGER),
    (r"nwor_ops/(?:overlap|kv_cache)\.py", ("transaction/test_overlap.py", "transaction/test_bad_classes.py")),
    (
        r"nwor_ops/(?:recurrent/\w+|transaction/state)\.py|(?:csrc/(?:cpu/)?|nwor_ops/ops/)recurrent(?:_\w+)?\.\w+",
        ("recurrent",),
    ),
    (r"nwor_ops/recurrent/(?:cache|cursors|fold)\.py", ("vllm/test_one_state.py",)),
    (r"nwor_ops/drafter/.*|examples/(?:paged_)?draft\w*\.py", ("drafter",)),
    (r"nwor_ops/vllm/.*|docs/(?:reference/(?:support|cases)|guides/hybrid-models|internals/hooks)\.md", ("vllm",)),
    (r"tools/(?:made_tables|support_tables|shown_cases|state_sizes)\.py", ("vllm",)),
    (
        r"nwor_ops/(?:(?:cli|testing)/\w+|__main__)\.py|tools/(?:command_options|made_tables)\.py|docs/reference/commands\.md",
        ("package/test_cli.py",),
    ),
    (
        r"nwor_ops/testing/(?:random_windows|against_oracle|layouts|raw_rows|oracle/\w+)\.py",
        ("ops/test_random_windows.py",),
    ),
    (r"nwor_ops/cli/bench\w*\.py|nwor_ops/testing/server\.py", ("package/test_bench.py", "vllm/test_bench_servers.py")),
    (r"nwor_ops/cli/verify\w*\.py", ("package/test_verify.py",)),
    (r"nwor_ops/testing/host_graphs\.py", ("drafter/test_host_graphs.py",)),
    (r"nwor_ops/testing/every_state\.py", ("package/test_examples.py",)),
    (r"nwor_ops/testing/ports\.py", ("package/test_ports.py",)),
    (r"examples/.*", ("package/test_examples.py", "package/test_cli.py")),
    (r"setup\.py|pyproject\.toml|MANIFEST\.in|Makefile", ("package/test_package.py",)),
    (r"setup\.py|tools/older_glibc\.py", ("package/test_build.py",)),
    (r"mkdocs\.yml|Makefile|docs/assets/.*", ("package/test_docs_site.py",)),
    (r"tools/\w+\.py", ("package/test_tools.py", "package/test_touched.py")),
    (
        r"benchmarks/results.*|docs/(?:benchmarks|internals/tried|guides/which-feature)\.md|README\.md",
        ("package/test_results.py",),
    ),
    (r".*\.md|benchmarks/\w+\.py", ("package/test_documents.py",)),
    (r"\.github/workflows/.*|docs/compatibility\..*|pyproject\.toml|Dockerfile", ("package/test_release.py",)),
    (r"docs/monitoring/.*", ("package/test_monitoring.py",)),
    (r"\.ci/run", ("package/test_code_blocks.py",)),
    (r"tests/conftest\.py", ("ops/test_undo.py", "transaction/test_manager_state_machine.py")),
    (r"tests/vllm/conftest\.py|tests/support/\w+/\w+\.py", ("vllm",)),
)
# Helpers that many tests import, and the quick ones among these tests.
HELPERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (rf"tests/support/samples_({FAMILIES})\.py", (r"ops/test_\1.py",)),
    (r"tests/support/(?:oracle_checks|samples|tensors)\.py", ("ops/test_undo.py",)),
    (r"tests/support/shadow_windows\.py", ("ops/test_shadow.py",)),
    (r"tests/support/bad_input\.py", ("ops/test_bad_input.py",)),
    (r"tests/support/processes\.py", ("package/test_tools.py",)),
    (r"tests/support/(?:transactions|decoding|faults|no_sync)\.py", _OF_THE_MANAGER),
    (r"tests/support/draft_loop\w*\.py", ("drafter",)),
)
# Folders of modules that tests import, in the order of `pythonpath` in pyproject.toml.
MODULES = ("tests/support", "examples", "examples/staging", "tools", "benchmarks")
TEST = re.compile(r"tests/(?!gpu/|dist/)\w+/test_\w+\.py")


def changed() -> list[str]:
    """Return the paths that differ from the merge base with origin/main, and new paths."""

    def git(*words: str) -> list[str]:
        return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")

    try:
        start = git("merge-base", "HEAD", "origin/main")[0]
    except subprocess.CalledProcessError:
        start = "HEAD"
    names = git("diff", "--name-only", start) + git("ls-files", "--others", "--exclude-standard")
    return sorted(filter(None, names))


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return the paths of the modules in MODULES that each of them, each test file and each conftest.py imports."""
    modules = {path.stem: path for folder in reversed(MODULES) for path in (ROOT / folder).glob("*.py")}
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.name.startswith(("test_", "conftest."))]
    found = {}
    for path in [*modules.values(), *tests]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
        used = [modules[name] for name in names & set(modules)]
        found[path.relative_to(ROOT).as_posix()] = {one.relative_to(ROOT).as_posix() for one in used}
    return found


def importers(module: str) -> set[str]:
    """Return a module and the files that import it, directly or through others."""
    found: set[str] = set()
    new = {module}
    while new:
        found |= new
        new = {path for path, modules in imports().items() if modules & new} - found
    return found


def by_rules(rules: tuple[tuple[str, tuple[str, ...]], ...], path: str) -> set[str]:
    matches = ((re.fullmatch(pattern, path), names) for pattern, names in rules)
    return {f"tests/{match.expand(name)}" for match, names in matches if match for name in names}


def by_imports(path: str) -> set[str]:
    """Return the test files that import a module. Tests of the plugin run the helpers that nothing imports."""
    users = importers(path)
    imported = set().union(*imports().values())
    run = {user for user in users if user.startswith("tests/support/") and user not in imported}
    found = {user for user in users if TEST.fullmatch(user)} | ({"tests/vllm"} if run else set())
    return found.union(*(by_rules(RULES, user) for user in users if user.endswith("/conftest.py")))


def files_for(paths: list[str]) -> list[str]:
    """Return test files and folders by the rules, and by the imports of the tests."""
    found: set[str] = set()
    for path in paths:
        found |= by_rules(RULES, path) | (by_rules(HELPERS, path) or (by_imports(path) if path in imports() else set()))
    return sorted(path for path in found if path.rpartition("/")[0] not in found)


def main(arguments: list[str]) -> int:
    paths = changed()
    whole = [path for path in paths if TEST.fullmatch(path) and (ROOT / path).exists()]
    others = [path for path in files_for(paths) if path not in whole]
    worst = 0
    for selection in ([*whole], [*others, "-m", "not vllm or smoke"] if others else []):
        if selection:
            print("pytest", *selection, flush=True)
            done = subprocess.run([sys.executable, "-m", "pytest", *arguments, *selection], cwd=ROOT, check=False)
            worst = max(worst, done.returncode)
    if not whole + others:
        print("nothing that has tests")
    return worst


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"touched.py: git did not list the changes ({error}); make test runs everything")
