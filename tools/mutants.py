"""Change the code at random places and count how many of the changes make a test fail: ``make mutants``.

    python tools/mutants.py [--sample 300] [--seed 7] [--to tests/mutants.json]     # --sample 0: all of them, hours

mutmut makes and runs the mutants, by `[tool.mutmut]` of pyproject.toml, each with the tests that call its function.
`mutmut show NAME` shows a survivor. The exit status is 1 if fewer than 90 % were killed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "mutants"
MUTMUT = [str(pathlib.Path(sys.executable).parent / "mutmut")]
# As in mutmut.stats. A mutant that no test calls survives; one that never ends or crashes is found.
KILLED, SURVIVED = (1, 3, 24, 36, -24, 152, 255, -11, -9), (0, 5, 33)
LEAST_PERCENT = 90


def exit_codes() -> dict[str, int | None]:
    """Return the exit code of the tests of every mutant, by its name. None: it was not run."""
    codes: dict[str, int | None] = {}
    for path in sorted(FOLDER.rglob("*.meta")):
        codes |= json.loads(path.read_text())["exit_code_by_key"]
    return codes


def mutmut(*words: str) -> int:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*MUTMUT, *words], cwd=ROOT, env=environment, check=False).returncode


def result(sample: list[str], codes: dict[str, int | None], seed: int) -> dict[str, Any]:
    killed = sum(codes.get(mutant) in KILLED for mutant in sample)
    survivors = sorted(mutant for mutant in sample if codes.get(mutant) in SURVIVED)
    return {
        "command": f"make mutants SAMPLE={len(sample)} SEED={seed}",
        "date": datetime.date.today().isoformat(),
        "mutants": len(codes),
        "sample": len(sample),
        "killed": killed,
        "survived": len(survivors),
        "percent_killed": round(100 * killed / max(1, killed + len(survivors)), 1),
        "survivors": survivors,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, default=300, help="number of mutants, drawn at random; 0 = all")
    parser.add_argument("--seed", type=int, default=int(datetime.date.today().strftime("%Y%m%d")))
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--to", type=pathlib.Path, help="file for the result")
    options = parser.parse_args()
    # mutmut writes the mutants, learns which tests call which function, and stops, because no mutant has this name.
    mutmut("run", "--max-children", str(options.workers), "none")
    if not (FOLDER / "mutmut-stats.json").exists():
        return 1
    names = sorted(exit_codes())
    sample = random.Random(options.seed).sample(names, min(options.sample or len(names), len(names)))
    mutmut("run", "--max-children", str(options.workers), *sample)
    found = result(sample, exit_codes(), options.seed)
    text = json.dumps(found, indent=2) + "\n"
    print(text)
    if options.to:
        options.to.write_text(text)
    return 0 if found["percent_killed"] >= LEAST_PERCENT else 1


if __name__ == "__main__":
    sys.exit(main())
