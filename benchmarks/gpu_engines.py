"""Run the GPU engine tests, audited at every step, and write one result per configuration of vLLM.

    python benchmarks/gpu_engines.py [FOLDER] [-- arguments of pytest, such as -k v1]

It runs ``tests/gpu/vllm``, and writes one entry per case to FOLDER/MACHINE/engines.jsonl (default benchmarks/results):
the configuration, steps, drafts, rows compared and the outcome. If pytest runs only some cases, the entries of the
others stay. It takes about 20 minutes. If it is stopped early (control-C), it writes what it has.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from results import asked_folder, this_machine, write_entries

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> int:
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    folder, more = asked_folder(__doc__, arguments[:cut]), arguments[cut + 1 :]
    with tempfile.TemporaryDirectory() as scratch:
        logs = pathlib.Path(os.environ.get("NWOR_TEST_LOGS") or scratch)
        command = [sys.executable, "-m", "pytest", "tests/gpu/vllm", "-q", "--tb=no", "-p", "no:cacheprovider"]
        with subprocess.Popen([*command, *more], cwd=ROOT, env=os.environ | {"NWOR_TEST_LOGS": str(logs)}) as tests:
            try:
                returncode = tests.wait()
            except KeyboardInterrupt:  # the tests get the signal too, and end by themselves
                returncode = tests.wait()
        report = logs / "engines.json"
        entries = json.loads(report.read_text()) if report.exists() else []
        entries = [entry for entry in entries if "outcome" in entry]
    found = [_without_paths(entry) for entry in entries]
    target = write_entries(this_machine(), "engines", found, folder, keep=bool(more))
    passed = sum(entry.get("outcome") == "passed" for entry in entries)
    print(f"{passed} of {len(entries)} cases passed; {target}")
    return returncode


def _without_paths(entry: dict) -> dict:
    """Return the first line of an error, without the folders of this machine."""
    found = {"name": entry["case"]} | {key: value for key, value in entry.items() if key != "case"}
    for name in ("why", "error"):
        if found.get(name):
            found[name] = re.sub(r"/\S+", "...", found[name].splitlines()[0])[:300]
    return found


if __name__ == "__main__":
    sys.exit(main())
