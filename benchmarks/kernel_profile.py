"""Profile the hot kernels with Nsight Compute: duration, DRAM throughput, occupancy, registers, and bytes written in
mode stage.

    python benchmarks/kernel_profile.py [FOLDER]      # FOLDER: default benchmarks/results

It needs a GPU and ncu on the PATH, but not vLLM. The kernels run one at a time at the card's normal clocks, so their
durations contain no overlap with the next launch.

For `close_window`, the bytes that its stores write are counted too, for a window with random acceptance. They are
compared with the bytes of the accepted rows (and of the target rows in the same page) in every layer. The difference is
slots, tables and records.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable

import torch
from cow_transaction import CASES, Step, layer_caches
from results import Row, asked_folder, row, save, this_machine
from stage_ops import Window, layer_planes
from torch import Tensor

from nwor_ops import ops

SHAPES = ((256, 4), (4000, 4))  # 1,280 and 20,000 tokens in all
LAYERS = 4
WINDOWS = ((64, 4), (256, 4))  # over all layers of stage_ops.py
METRICS = {  # metric of ncu: our name and unit, whether more is better
    "gpu__time_duration.sum": ("duration", "us", "lower"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": ("dram_throughput", "%", "higher"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("achieved_occupancy", "%", "higher"),
    "launch__registers_per_thread": ("registers", "per thread", "lower"),
}
# Sectors of 32 bytes that the multiprocessors write. (L2 counts sectors of its far half twice.)
WRITTEN = "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum"
KERNELS = {
    "write_kv_logged": "write_kernel",
    "log_slots": "log_kernel",
    "restore_slots": "restore_kernel",
    "open_window": "open_kernel",
    "close_window": "close_kernel",
}


def profiled(kernel: Callable[[], None], buffer: Tensor) -> None:
    """Profile one launch, after a large read that removes the rows from L2."""
    buffer[: 2**29].view(torch.float32).sum()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    kernel()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def launch(buffer: Tensor, requests: int, drafts: int) -> None:
    """Launch each kernel of the writes once."""
    step = Step(CASES[0], requests, drafts, layer_caches(buffer, CASES[0], LAYERS))
    step.load()
    step.transaction()
    every_row = torch.ones_like(step.rejected)
    for kernel in (
        lambda: step.write_layer(0),
        lambda: ops.log_slots(step.caches[1], step.slots, step.log_rows, step.log[1]),
        lambda: ops.restore_slots(step.caches, step.log, step.row_slots[0], every_row),
    ):
        profiled(kernel, buffer)


def window_of(requests: int, drafts: int) -> Window:
    """Return a window. Its acceptance is the same in the launching process and in the counting process."""
    torch.manual_seed(requests)
    window = Window(layer_planes(16), requests, drafts)
    accepted = torch.randint(0, drafts + 1, (requests, 1), device="cuda")
    window.rejected.copy_((torch.arange(drafts, device="cuda") >= accepted).flatten())
    return window


def launch_window(buffer: Tensor, requests: int, drafts: int) -> None:
    window = window_of(requests, drafts)
    profiled(window.open, buffer)
    profiled(window.close, buffer)


def profile() -> list[Row]:
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--metrics", ",".join([*METRICS, WRITTEN])]
    command += [sys.executable, __file__, "--launch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode != 0 or start is None:
        raise RuntimeError(f"ncu did not finish:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    launches = [(op, shape) for shape in SHAPES for op in ("write_kv_logged", "log_slots", "restore_slots")]
    launches += [(op, shape) for shape in WINDOWS for op in ("open_window", "close_window")]
    counted = list(csv.DictReader(lines[start:]))[1:]  # the first row contains the units
    rows = []
    for (op, (requests, drafts)), figures in zip(launches, counted, strict=True):
        if KERNELS[op] not in figures["Kernel Name"]:
            raise RuntimeError(f"ncu saw {figures['Kernel Name']}, expected {op}")
        name = f"kernel_profile/{op}/{requests * (drafts + 1)}"
        for metric, (what, unit, better) in METRICS.items():
            value = float(figures[metric].replace(",", ""))
            value = value / 1000 if unit == "us" else value  # ncu counts nanoseconds
            rows.append(row(f"{name}/{what}", [value], unit, better, digits=1))
        if op == "close_window":
            kept = window_of(requests, drafts).closed_bytes()
            rows.append(row(f"{name}/bytes_of_kept_rows", [kept], "bytes", "lower", digits=0))
            written = 32 * float(figures[WRITTEN].replace(",", ""))
            rows.append(row(f"{name}/bytes_written", [written], "bytes", "lower", digits=0))
    return rows


def main() -> None:
    if sys.argv[1:] == ["--launch"]:
        buffer = torch.zeros(2**32, dtype=torch.uint8, device="cuda")
        for shape in SHAPES:
            launch(buffer, *shape)
        for shape in WINDOWS:
            launch_window(buffer, *shape)
        return
    folder = asked_folder(__doc__)
    save(this_machine(), "kernel_profile", profile(), folder)


if __name__ == "__main__":
    main()
