"""Run the tests of what changed since origin/main (since the last commit where there is none): ``make check``.

What a source is tested by is said here and nowhere else. Not all of it: what runs in a minute or two, of engines the
marked ``smoke`` ones. A test that changed itself runs whole. Arguments are passed on to pytest.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
VLLM = tuple(
    f"vllm/test_{name}.py" for name in ("engine", "plugin", "runner_v2", "stage", "audit", "support", "cpu_writer")
)
FAMILY = r"(?:csrc/(?:\w+/)?|meta/|nwor_ops/ops/|tests/support/(?:oracle_|samples_))"
# Every rule that matches counts.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (FAMILY + r"(undo|write|rows)\.\w+|tests/support/(oracle|layouts|samples)\.py", ("ops/test_undo.py",)),
    (FAMILY + r"(accept|judge)\.\w+", ("ops/test_accept.py", "ops/test_leading_zero.py")),
    (FAMILY + r"(shadow|staging|stage|write|rows)\.\w+", ("ops/test_staging.py",)),
    (FAMILY + r"(drafter|draft|gumbel)\.\w+", ("ops/test_drafter.py",)),
    (r"(csrc|meta|nwor_ops/ops)/.*", ("ops/test_schema.py", "ops/test_plane_table.py")),
    (r"csrc/.*\.h|csrc/glibc.cpp|csrc/exports.map", ("ops/test_undo.py",)),
    (
        r"nwor_ops/(library|__init__|torch_fixes|draft|manager)\.py",
        ("ops/test_schema.py", "transaction/test_manager.py"),
    ),
    (r"nwor_ops/(arguments|validation)\.py", ("ops/test_schema.py", "transaction/test_staging_buffer.py")),
    (
        r"nwor_ops/(transaction/\w+|kv_cache|config)\.py",
        ("transaction/test_manager.py", "transaction/test_manager_stage.py"),
    ),
    (r"nwor_ops/staging\.py", ("transaction/test_staging_buffer.py",)),
    (r"nwor_ops/drafter/\w+\.py|tests/support/draft_loops\.py", ("drafter/test_draft_loop.py",)),
    (r"nwor_ops/(cli/\w+|testing/\w+|__main__)\.py", ("package/test_cli.py",)),
    (
        r"nwor_ops/vllm/drafter/\w+\.py|tests/support/draft_(kernels|speculators)\.py",
        ("vllm/test_draft_graphs.py", "vllm/test_draft_kernels.py"),
    ),
    (r"nwor_ops/vllm/(metrics/\w+|audit/agreement|environment)\.py", ("vllm/test_metrics.py",)),
    (r"nwor_ops/vllm/(?!metrics|drafter).*", VLLM),
    (r"setup\.py|pyproject\.toml|MANIFEST\.in|Makefile", ("package/test_package.py",)),
    (r"setup\.py|tools/older_glibc\.py", ("package/test_build.py",)),
    (r"tools/\w+\.py", ("package/test_tools.py", "package/test_touched.py")),
    (r"benchmarks/results.*|docs/benchmarks\.md|README\.md", ("package/test_results.py",)),
    (r"docs/vllm\.md|tools/support_tables\.py", ("vllm/test_support.py",)),
    (r".*\.md", ("package/test_documents.py",)),
    (r"tests/support/house\.py", ("package/test_house.py",)),
    (r"examples/.*", ("package/test_examples.py",)),
    (
        r"tests/support/(transactions|staged_windows|counted_session)\.py",
        ("transaction/test_manager.py", "transaction/test_staging_buffer.py"),
    ),
    (
        r"tests/support/(engine\w*|processor|other_scheduler|limited/\w+)\.py",
        ("vllm/test_engine.py", "vllm/test_processor.py", "vllm/test_cpu_writer.py"),
    ),
)


def changed() -> list[str]:
    """Paths that differ from where the branch left origin/main, and new ones."""

    def git(*words: str) -> list[str]:
        return subprocess.run(("git", *words), cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")

    try:
        start = git("merge-base", "HEAD", "origin/main")[0]
    except subprocess.CalledProcessError:
        start = "HEAD"
    names = git("diff", "--name-only", start) + git("ls-files", "--others", "--exclude-standard")
    return sorted(filter(None, names))


def files_for(paths: list[str]) -> list[str]:
    """Test files by the rules, which name them relative to tests/."""
    found = {name for pattern, names in RULES for path in paths if re.fullmatch(pattern, path) for name in names}
    return sorted(f"tests/{name}" for name in found)


def main(arguments: list[str]) -> int:
    paths = changed()
    whole = [
        path
        for path in paths
        if re.fullmatch(r"tests/(?!gpu/|packages/)\w+/test_\w+\.py", path) and (ROOT / path).exists()
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
        sys.exit(f"touched.py: git does not say what changed ({error}); make test runs everything")
