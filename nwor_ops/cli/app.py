"""Options of the command ``nwor-ops``. The commands are implemented in ``demo.py`` and ``doctor.py``."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from enum import Enum
from typing import Annotated

import typer
from rich.console import Console

from nwor_ops.cli.extras import require

app = typer.Typer(
    help="No Write On Reject: transactional KV-cache writes for speculative decoding.",
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
        typer.Option(help="Your model (folder or name) for both parts. Default: two random Llamas."),
    ] = None,
    method: Annotated[str, typer.Option(help="Speculation method of vLLM: ngram, draft_model, eagle, ...")] = "ngram",
    draft_model: Annotated[str | None, typer.Option(help="The draft model, for methods that need one.")] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="Drafts per request and step.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=8, max=384, help="Maximum number of tokens per request.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each engine; fewer on a slow machine.")] = 20,
    compile: Annotated[bool, typer.Option(help="Let vLLM compile the model and use CUDA graphs.")] = False,
    output: Annotated[pathlib.Path, typer.Option(help="Folder for the picture, results and logs.")] = pathlib.Path(
        "demo-output"
    ),
    json: JsonOption = False,
) -> None:
    """Run a real vLLM engine with and without NWOR: same tokens, no stale row in the cache.

    Exits with 1 if a check or an engine fails, and with 2 if an option is invalid.
    """
    require("vllm", "matplotlib")
    from nwor_ops.cli.demo import DemoOptions, check_options, run_demo

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


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Report what is installed, what works on this machine, and how to fix the rest.

    Exits with 1 if no compiled library is loaded or a self-test fails.
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
    raise typer.Exit(0 if examination.usable else 1)
