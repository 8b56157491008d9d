"""Options of the command ``nwor-ops``. The commands are implemented in ``demo.py`` and ``doctor.py``."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import sys
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console

from nwor_ops.cli.extras import require

app = typer.Typer(
    help="No Write On Reject: faster speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, the rest on stderr.")]


class Mode(str, Enum):
    """Modes of the transaction."""

    COW = "cow"
    STAGE = "stage"


@app.command()
def demo(
    mode: Annotated[
        Mode, typer.Option(help="cow: write drafts, undo rejected ones. stage: write drafts to shadow pages.")
    ] = Mode.COW,
    model: Annotated[
        str | None,
        typer.Option(help="Your model (folder or name) for vLLM. Default: two random Llamas."),
    ] = None,
    method: Annotated[str, typer.Option(help="Speculation method of vLLM: ngram, draft_model, eagle, ...")] = "ngram",
    draft_model: Annotated[str | None, typer.Option(help="The draft model, for methods that need one.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, max=31, help="Drafts per request and step.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=8, max=384, help="Tokens per request; half in timed rounds.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each engine; fewer on a slow machine.")] = 20,
    compile: Annotated[bool, typer.Option(help="Let vLLM compile the model and use CUDA graphs.")] = False,
    output: Annotated[pathlib.Path, typer.Option(help="Folder for the picture, results and logs.")] = pathlib.Path(
        "demo-output"
    ),
    json: JsonOption = False,
) -> None:
    """Show the three features on this machine, without and with NWOR.

    A real vLLM engine leaves no stale row in the cache. A small hybrid model has one recurrent state per request. A
    draft model's pass is one graph launch. The tokens are the same.

    Exits with 1 if a check or an engine fails, and with 2 if an option is invalid.
    """
    require("vllm", "matplotlib")
    from nwor_ops.cli.demo import run_demo
    from nwor_ops.cli.demo_options import DemoOptions, check_options

    options = DemoOptions(
        output=output,
        mode=mode.value,
        model=model,
        method=method,
        draft_model=draft_model,
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=max_tokens,
        rounds=rounds,
        compile=compile,
    )
    try:
        check_options(options)
    except ValueError as error:
        typer.echo(f"nwor-ops demo: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(run_demo(options, as_json=json))


class Device(str, Enum):
    """Devices of an engine."""

    HERE = "here"
    CUDA = "cuda"


@app.command()
def check(
    arguments: Annotated[list[str], typer.Argument(metavar="-- ARGS...", help="The arguments of vllm serve.")],
    device: Annotated[
        Device, typer.Option(help="here: the device that vLLM finds. cuda: an NVIDIA GPU of another machine.")
    ] = Device.HERE,
    capability: Annotated[str, typer.Option(help="With --device cuda: its compute capability.")] = "9.0",
    gpu_memory: Annotated[float, typer.Option(min=1, help="With --device cuda: its memory in GiB.")] = 80.0,
    cache_memory: Annotated[
        float | None,
        typer.Option(min=0.001, help="Memory of the KV cache per GPU in GiB; vLLM logs it at start-up."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say which features an engine with these arguments will have, and what they cost. Loads no weights.

    The settings are those of the engine: VLLM_NWOR_... in the environment, or --additional-config. Example:
    VLLM_NWOR_MODE=cow nwor-ops check -- MODEL --speculative-config '{"method": "ngram", ...}'

    Exits with 0 if no check refuses a feature that is switched on, with 2 if the command line or a setting is invalid,
    with 3 if a feature that is switched on will be refused, and with 4 if vLLM itself refuses the arguments.
    """
    require("vllm")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not re.fullmatch(r"\d+\.\d", capability):
        raise typer.BadParameter(f"must be a number like 9.0, got {capability!r}", param_hint="--capability")
    with contextlib.redirect_stdout(sys.stderr):
        from nwor_ops.vllm import preview

        machine = preview.Machine()
        if device is Device.CUDA:
            major, minor = map(int, capability.split("."))
            machine = preview.describe_gpu((major, minor), int(gpu_memory * 2**30))
        from nwor_ops.cli.check import Outcome, as_json, outcome_of, print_preview

        cache_bytes = None if cache_memory is None else int(cache_memory * 2**30)
        try:
            found = preview.look(arguments, cache_bytes, machine)
        except preview.InvalidEngine as error:
            typer.echo(f"nwor-ops check: vLLM refuses these arguments: {error}", err=True)
            raise typer.Exit(Outcome.ENGINE.value) from None
        except ValueError as error:
            typer.echo(f"nwor-ops check: {error}", err=True)
            raise typer.Exit(Outcome.INVALID.value) from None
    if json:
        print(as_json(found))
    else:
        console = Console(highlight=False)
        print_preview(found, console if console.is_terminal else Console(highlight=False, width=120))
    raise typer.Exit(outcome_of(found).value)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Report what is installed, whether everything that this machine needs works, and how to fix the rest.

    It needs the CPU library, the CUDA library if there is a GPU, and the hooks if vLLM is installed. Exits with 3 if a
    library is missing or torch cannot use the GPU, with 4 if an op gives a wrong result, and with 5 if vLLM does not
    load the plugin, or its version or a hook differs. If several apply, it is the smallest of them.
    """
    from nwor_ops.cli.doctor import examine, print_findings

    # Keep vLLM's import messages out of the output.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with contextlib.redirect_stdout(sys.stderr):
        examination = examine()
    if json:
        print(examination.as_json())
    else:
        console = Console(highlight=False)
        print_findings(examination, console if console.is_terminal else Console(highlight=False, width=120))
    raise typer.Exit(examination.outcome.value)
