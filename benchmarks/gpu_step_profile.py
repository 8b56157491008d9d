"""Profile what a decode step on the GPU gains with NWOR: kernels, host time, waits for the device.

    python benchmarks/gpu_step_profile.py [--mode stage] [--runner v1] [--folder FOLDER]

It uses an engine of gpu_engine.py with fewer layers. Only the times of kernels depend on the number of layers, not the
counts. In one process 16 requests decode with 4 drafts each in FULL CUDA graphs, with and without NWOR. The profiler of
torch runs over the same number of steps. It counts kernels by name (including those in graphs), launches, and calls
that wait for the device. It also gives the time of each of our kernels. The host time is what the patched functions
take in addition to vLLM's own, timed inside and outside. It takes about a minute and a half.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections import Counter
from typing import Any

from gpu_engine import (
    OURS,
    PROFILED_STEPS,
    TARGETS,
    kernel_times,
    log_folder,
    make_job,
    new_parser,
    per_step,
    print_differences,
    result_name,
    start_sides,
)
from results import Row, row, save, this_machine

from nwor_ops.testing.engine_process import close_all

LAYERS, REQUESTS = 8, 16
TIMED_STEPS = 400
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")


def total(counts: Counter[str], names: tuple[str, ...] | None = None) -> float:
    return sum(count for name, count in counts.items() if names is None or name in names)


def figures(on: dict[str, Any], off: dict[str, Any], added: dict[str, list[float]]) -> list[Row]:
    for what in ("kernels", "copies", "calls"):
        print_differences(what, per_step(on, what), per_step(off, what))

    def difference(what: str, names: tuple[str, ...] | None = None) -> float:
        # Rounded to a tenth, because the first and last steps of the profile may be incomplete.
        return round(total(per_step(on, what), names) - total(per_step(off, what), names), 1)

    times = per_step(on, "device_us")
    for what in ("device_us", "idle_before_us"):
        print_differences(what, per_step(on, what), per_step(off, what))
    ours = kernel_times(times, OURS)
    # The total of all patched functions in each step.
    steps = [1e6 * sum(parts) for parts in zip(*added.values(), strict=False)]
    return [
        row("step_profile/launches_added", [difference("kernels")], "kernels", "lower", 4),
        row("step_profile/host_launches_added", [difference("calls", LAUNCHES)], "calls", "lower"),
        row("step_profile/copies_added", [difference("copies")], "copies", "lower"),
        row("step_profile/syncs_added", [difference("syncs")], "calls", "lower", 0),
        row("step_profile/kernels_vanilla", [total(per_step(off, "kernels"))], "kernels", "lower", digits=1),
        *(row(f"step_profile/gpu_us/{name}", [us], "us", "lower", digits=1) for name, us in ours.items()),
        row("step_profile/host_us_added", steps, "us", "lower", digits=1),
        *(
            row(f"step_profile/host_us_added/{name}", [1e6 * second for second in seconds], "us", "lower", digits=1)
            for name, seconds in added.items()
        ),
    ]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--mode", choices=list(TARGETS), default="cow", help="mode of NWOR")
    parser.add_argument("--runner", choices=("v2", "v1"), default="v2", help="vLLM's model runner")
    options = parser.parse_args()
    with log_folder(options) as folder:
        job = make_job(folder, LAYERS, "auto", options.small) | {"time_hooks": True, "one_process": True}
        engines, sides = start_sides({"profiled": job}, folder, options.runner, options.mode, options.runner == "v1")
        try:
            counted = {}
            for side in ("off", "on"):
                asked = sides["profiled", side]
                asked.ask(f"profile {REQUESTS} 5")  # the start of the profiler itself
                counted[side] = asked.ask(f"profile {REQUESTS} {PROFILED_STEPS}")
            steps = 100 if options.small else TIMED_STEPS
            added = sides["profiled", "on"].ask(f"host {REQUESTS} {steps}")["added"]
        finally:
            close_all(engines.values())
    if not options.small and not all(counted[side]["kernels"] and counted[side]["calls"] for side in counted):
        raise RuntimeError("the profiler recorded no kernels or no runtime calls: nothing can be said")
    rows = figures(counted["on"], counted["off"], {name: seconds for name, seconds in added.items() if seconds})
    save(
        this_machine(),
        result_name("gpu_step_profile", options),
        rows,
        pathlib.Path(tempfile.mkdtemp()) if options.small else options.folder,
    )


if __name__ == "__main__":
    main()
