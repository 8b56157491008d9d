"""Run the GPU engine tests, audited at every step, and write one result per configuration of vLLM.

    python benchmarks/gpu_engines.py [--folder FOLDER] [--resume] [-- arguments of pytest, such as -k v1]

It runs ``tests/gpu/vllm``, and writes one entry per case to FOLDER/MACHINE/engines.jsonl (default benchmarks/results):
the configuration, steps, drafts, rows compared and the outcome. If pytest runs only some cases, the entries of the
others stay. It takes about 90 minutes on 16 cores. If it is stopped early (control-C), it writes what it has. With
``--resume`` it skips the cases that passed with the installed torch and vLLM, on any GPU, in benchmarks/results.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from results import FOLDER, circumstances, new_parser, read, this_machine, write_entries

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> int:
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = new_parser(__doc__)
    parser.add_argument("--resume", action="store_true", help="skip cases that passed with this torch and vLLM")
    options, more = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    with tempfile.TemporaryDirectory() as scratch:
        logs = pathlib.Path(os.environ.get("NWOR_TEST_LOGS") or scratch)
        command = [sys.executable, "-m", "pytest", "tests/gpu/vllm", "-q", "--tb=no", "-p", "no:cacheprovider"]
        environment = os.environ | {"NWOR_TEST_LOGS": str(logs)}
        if options.resume:
            left_out = pathlib.Path(scratch, "passed.json")
            left_out.write_text(json.dumps(passed_cases()))
            environment["NWOR_TEST_PASSED"] = str(left_out)
        with subprocess.Popen([*command, *more], cwd=ROOT, env=environment) as tests:
            try:
                returncode = tests.wait()
            except KeyboardInterrupt:  # the tests get the signal too, and end by themselves
                returncode = tests.wait()
        report = logs / "engines.json"
        entries = json.loads(report.read_text()) if report.exists() else []
        entries = [entry for entry in entries if "outcome" in entry]
    found = [_without_paths(entry) for entry in entries]
    target = write_entries(this_machine(), "engines", found, options.folder, keep=bool(more or options.resume))
    passed = sum(entry.get("outcome") == "passed" for entry in entries)
    print(f"{passed} of {len(entries)} cases passed; {target}")
    return returncode


def passed_cases(folder: pathlib.Path = FOLDER) -> list[str]:
    """Return the names of the cases that passed with the installed torch and vLLM, on any GPU."""
    installed = circumstances()
    wanted = {"torch": installed["torch"], "vllm": installed["vllm"], "outcome": "passed"}
    passed: set[str] = set()
    for path in folder.glob("*/engines.jsonl"):
        entries = read(path.parent.name, "engines", folder)
        passed |= {name for name, entry in entries.items() if wanted.items() <= entry.items()}
    return sorted(passed)


def _without_paths(entry: dict) -> dict:
    """Return the first line of an error, without the folders of this machine."""
    found = {"name": entry["case"]} | {key: value for key, value in entry.items() if key != "case"}
    for name in ("why", "error"):
        if found.get(name):
            found[name] = re.sub(r"/\S+", "...", found[name].splitlines()[0])[:300]
    return found


if __name__ == "__main__":
    sys.exit(main())
