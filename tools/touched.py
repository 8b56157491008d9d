"""Run the tests for the changes since origin/main, or since the last commit if there is no origin/main: ``make check``.

This file is the only place that maps sources to tests. It selects tests that take a minute or two, and only those
engine tests that are marked ``smoke``. A changed test file runs completely. Arguments are passed to pytest.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEVELS = r"(?:csrc/(?:cpu/|cuda/)?|meta/|nwor_ops/ops/|nwor_ops/testing/oracle/|tests/support/samples_)"
# Sources of one area and its tests, or the quick ones among them, relative to tests/. A family has the same name on
# every level, followed by an underscore if it has several files on one level. Every matching rule counts.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (LEVELS + r"(undo|accept|shadow|staging|drafter|recurrent)(?:_\w+)?\.\w+", (r"ops/test_\1.py",)),
    (r"tests/support/shadow_windows\.py", ("ops/test_shadow.py",)),
    (r"(?:csrc|meta|nwor_ops/ops)/.*", ("ops/test_schema.py", "ops/test_plane_table.py")),
    (
        r"csrc/(?!.*(?:accept|shadow|staging|drafter|recurrent)(?:_\w+)?\.).*|tests/support/(?:oracle_checks|samples|tensors)\.py"
        r"|nwor_ops/testing/(?:layouts|raw_rows|against_oracle)\.py",
        ("ops/test_undo.py",),
    ),
    (r"tests/support/bad_input\.py", ("ops/test_bad_input.py",)),
    (
        r"nwor_ops/(?:transaction/)?(?!__main__)\w+\.py|tests/support/(?:transactions|decoding|faults|no_sync)\.py",
        ("transaction/test_manager.py", "transaction/test_manager_stage.py", "transaction/test_staging_buffer.py"),
    ),
    (
        r"nwor_ops/(?:recurrent/\w+|transaction/state)\.py|(?:csrc/(?:cpu/)?|nwor_ops/ops/)recurrent(?:_\w+)?\.\w+"
        r"|tests/support/recurrent_states\.py",
        ("recurrent",),
    ),
    (r"nwor_ops/recurrent/(?:cache|cursors|fold)\.py", ("vllm/test_one_state.py",)),
    (r"nwor_ops/drafter/.*|tests/support/draft_loops\.py|examples/(?:paged_)?draft\w*\.py", ("drafter",)),
    (
        r"nwor_ops/vllm/.*|tests/support/(?:draft_(?:configs|kernels|proposers|speculators)|hashing_drafter|one_state_\w+|interpreter\w*|recurrent_kernels|engine\w*|processor|other_scheduler"
        r"|counted_session|(?:export|loading)_connector|planted_(?:errors|server)|tiny_serve|(?:tiny|custom)_drafters|page_machine|pipeline_rank|v2_runner|packed_rows|limited/\w+)\.py|docs/reference/(?:support|cases)\.md|docs/guides/hybrid-models\.md|tools/(?:made_tables|support_tables|shown_cases|state_sizes)\.py",
        ("vllm",),
    ),
    (
        r"nwor_ops/(?:(?:cli|testing)/\w+|__main__)\.py|tools/(?:command_options|made_tables)\.py|docs/reference/commands\.md",
        ("package/test_cli.py",),
    ),
    (
        r"nwor_ops/testing/(?:random_windows|against_oracle|layouts|raw_rows|oracle/\w+)\.py",
        ("ops/test_random_windows.py",),
    ),
    (r"nwor_ops/cli/bench\w*\.py|nwor_ops/testing/server\.py", ("package/test_bench.py", "vllm/test_bench_servers.py")),
    (r"nwor_ops/cli/verify\w*\.py|tests/support/planted_plugin\.py", ("package/test_verify.py",)),
    (r"nwor_ops/testing/host_graphs\.py", ("drafter/test_host_graphs.py",)),
    (r"nwor_ops/testing/every_state\.py", ("package/test_examples.py",)),
    (r"examples/.*", ("package/test_examples.py", "package/test_cli.py")),
    (r"setup\.py|pyproject\.toml|MANIFEST\.in|Makefile", ("package/test_package.py",)),
    (r"setup\.py|tools/older_glibc\.py", ("package/test_build.py",)),
    (r"tools/docs_site\.py|mkdocs\.yml|Makefile", ("package/test_docs_site.py",)),
    (r"tools/\w+\.py|tests/support/processor\.py", ("package/test_tools.py", "package/test_touched.py")),
    (r"benchmarks/results.*|docs/(?:benchmarks|internals/tried)\.md|README\.md", ("package/test_results.py",)),
    (r"benchmarks/gpu_(?:methods|engine)\.py", ("package/test_gpu_methods.py",)),
    (r"benchmarks/gpu_(?:parallel|engine)\.py", ("package/test_gpu_parallel.py",)),
    (r".*\.md", ("package/test_documents.py",)),
    (r"tests/support/import_graph\.py", ("package/test_import_graph.py",)),
    (r"nwor_ops/testing/ports\.py", ("package/test_ports.py",)),
)


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


def files_for(paths: list[str]) -> list[str]:
    """Return test files and folders by the rules."""
    matches = ((re.fullmatch(pattern, path), names) for pattern, names in RULES for path in paths)
    return sorted({f"tests/{match.expand(name)}" for match, names in matches if match for name in names})


def main(arguments: list[str]) -> int:
    paths = changed()
    whole = [
        path for path in paths if re.fullmatch(r"tests/(?!gpu/|dist/)\w+/test_\w+\.py", path) and (ROOT / path).exists()
    ]
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
