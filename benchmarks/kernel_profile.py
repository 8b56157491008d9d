"""What Nsight Compute says of the three hot kernels: duration, DRAM throughput, occupancy, registers.

    python benchmarks/kernel_profile.py [FOLDER]      # FOLDER: default benchmarks/results

For a machine with a GPU and ncu on the PATH; vLLM is not needed. The kernels run one at a time, at the clocks the card
has, so their durations hold no overlap with the launch of the next one.
"""

from __future__ import annotations

import csv
import pathlib
import subprocess
import sys

import torch
from cow_transaction import CASES, Step, layer_caches
from results import FOLDER, Row, row, save
from torch import Tensor

from nwor_ops import ops

SHAPES = ((256, 4), (4000, 4))  # 1,280 and 20,000 tokens
LAYERS = 4
METRICS = {  # of ncu: name and unit of ours, whether more is better
    "gpu__time_duration.sum": ("duration", "us", "lower"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("dram_throughput", "%", "higher"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("achieved_occupancy", "%", "higher"),
    "launch__registers_per_thread": ("registers", "per thread", "lower"),
}
KERNELS = {"write_kernel": "write_kv_logged", "log_kernel": "log_slots", "restore_kernel": "restore_slots"}


def launch(buffer: Tensor, requests: int, drafts: int) -> None:
    """Each kernel once, after a large read that leaves nothing of the rows in L2."""
    step = Step(CASES[0], requests, drafts, layer_caches(buffer, CASES[0], LAYERS))
    step.load()
    step.transaction()
    every_row = torch.ones_like(step.rejected)
    for kernel in (
        lambda: step.write_layer(0),
        lambda: ops.log_slots(step.caches[1], step.slots, step.log_rows, step.log[1]),
        lambda: ops.restore_slots(step.caches, step.log, step.row_slots[0], every_row),
    ):
        buffer[: 2**29].view(torch.float32).sum()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        kernel()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def profile() -> list[Row]:
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--metrics", ",".join(METRICS), sys.executable, __file__, "--launch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode != 0 or start is None:
        raise RuntimeError(f"ncu did not finish:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    profiled = list(csv.DictReader(lines[start:]))[1:]  # the first row holds units
    rows = []
    for number, figures in enumerate(profiled):
        [op] = [op for kernel, op in KERNELS.items() if kernel in figures["Kernel Name"]]
        requests, drafts = SHAPES[number // len(KERNELS)]
        for metric, (name, unit, better) in METRICS.items():
            value = float(figures[metric].replace(",", ""))
            value = value / 1000 if unit == "us" else value  # ncu counts nanoseconds
            rows.append(row(f"kernel_profile/{op}/{requests * (drafts + 1)}/{name}", [value], unit, better, digits=1))
    return rows


def main() -> None:
    if sys.argv[1:] == ["--launch"]:
        buffer = torch.zeros(2**32, dtype=torch.uint8, device="cuda")
        for requests, drafts in SHAPES:
            launch(buffer, requests, drafts)
        return
    save("h200", "kernel_profile", profile(), pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)


if __name__ == "__main__":
    main()
