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
VLLM = (
    "test_engine.py", "test_plugin.py", "test_runner_v2.py", "test_stage.py", "test_audit.py", "test_cpu_writer.py"
)  # fmt: skip
# Every rule that matches counts.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"csrc/\w+/(undo|write|rows)\.\w+|meta/undo\.py", ("test_undo.py", "test_schema.py")),
    (r"csrc/\w+/(stage|write|rows)\.\w+|meta/stage\.py|nwor_ops/ops_stage\.py", ("test_stage.py", "test_schema.py")),
    (r"csrc/\w+/accept\.\w+|meta/accept\.py", ("test_accept.py", "test_leading_zero.py", "test_schema.py")),
    (r"csrc/\w+/draft\.\w+|csrc/(draft|gumbel)\.h|meta/draft\.py|nwor_ops/ops_draft\.py", ("test_draft.py",)),
    (r"csrc/\w+\.\w+|csrc/cuda/launch\.h|meta/\w+\.py", ("test_schema.py", "test_undo.py", "test_plane_table.py")),
    (r"nwor_ops/(ops|library|__init__|torch_fixes)\.py", ("test_schema.py", "test_manager.py", "test_plane_table.py")),
    (r"nwor_ops/(arguments|validation)\.py", ("test_schema.py", "test_manager.py", "test_staging.py")),
    (r"nwor_ops/(manager|cache|window|shadow|config|stats)\.py", ("test_manager.py", "test_manager_stage.py")),
    (r"nwor_ops/(staging|shadow)\.py", ("test_staging.py", "test_manager_stage.py")),
    (r"nwor_ops/draft/\w+\.py", ("test_draft_loop.py",)),
    (r"nwor_ops/(cli/\w+|__main__)\.py", ("test_cli.py",)),
    (r"nwor_ops/vllm/draft_\w+\.py", ("vllm/test_draft_graphs.py", "vllm/test_draft_kernels.py")),
    (r"nwor_ops/vllm/(metrics|agreement|boards|environment)\.py", ("vllm/test_metrics.py",)),
    (r"nwor_ops/vllm/\w+\.py", tuple(f"vllm/{name}" for name in VLLM)),
    (r"setup\.py|pyproject\.toml|MANIFEST\.in|Makefile", ("test_package.py",)),
    (r"tools/\w+\.py", ("test_tools.py",)),
    (r"examples/.*", ("test_examples.py",)),
    (r"tests/(oracle|layouts|samples)\.py", ("test_undo.py", "test_schema.py")),
    (r"tests/(oracle|samples)_(stage)\.py", ("test_stage.py",)),
    (r"tests/(oracle|samples)_draft\.py", ("test_draft.py",)),
    (r"tests/(transactions|staged_windows|counted_session)\.py", ("test_manager.py", "test_staging.py")),
    (r"tests/draft_loops\.py", ("test_draft_loop.py",)),
    (r"tests/vllm/(?!test_)\w+\.py", ("vllm/test_engine.py", "vllm/test_processor.py", "vllm/test_cpu_writer.py")),
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
    whole = [path for path in paths if re.fullmatch(r"tests/(vllm/)?test_\w+\.py", path) and (ROOT / path).exists()]
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
