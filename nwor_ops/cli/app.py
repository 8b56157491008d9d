"""Options of the command ``nwor-ops``. Each command is implemented in the module of its name."""

from __future__ import annotations

import contextlib
import enum
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from nwor_ops.cli.extras import require
from nwor_ops.cli.progress import Tasks

app = typer.Typer(
    help="No Write On Reject: faster speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


LARGEST = 1_000_000  # the limit of each option in minutes, seconds or GiB


def _finite(option: typer.CallbackParam, value: float | None) -> float | None:
    """Refuse ``inf``, which the limits of an option do not, and numbers whose products may overflow."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, got {value}", param_hint=option.opts[0])
    if value is not None and value > LARGEST:
        raise typer.BadParameter(f"must be at most {LARGEST:,}, got {value:g}", param_hint=option.opts[0])
    return value


JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, the rest on stderr.")]


@contextlib.contextmanager
def _exit_if_invalid(command: str, invalid: type[ValueError] = ValueError) -> Iterator[None]:
    """Print the error of an invalid option, and exit with 2."""
    try:
        yield
    except invalid as error:
        typer.echo(f"nwor-ops {command}: {error}", err=True)
        raise typer.Exit(2) from None


@contextlib.contextmanager
def _shown(what: str) -> Iterator[None]:
    """Show a progress line on stderr. Redirect the command's own output there too."""
    tasks = Tasks(Console(stderr=True, highlight=False), 1)
    with contextlib.redirect_stdout(sys.stderr), tasks.task(what):
        yield


class Mode(str, enum.Enum):
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
    with _exit_if_invalid("demo"):
        check_options(options)
    raise typer.Exit(run_demo(options, as_json=json))


class Device(str, enum.Enum):
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
    gpu_memory: Annotated[
        float, typer.Option(min=1, callback=_finite, help="With --device cuda: its memory in GiB.")
    ] = 80.0,
    cache_memory: Annotated[
        float | None,
        typer.Option(
            min=0.001, callback=_finite, help="Memory of the KV cache per GPU in GiB; vLLM logs it at start-up."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say which features an engine with these arguments will have, and what they cost. Loads no weights.

    The settings are those of the engine: VLLM_NWOR_... in the environment, or --additional-config. Example:
    VLLM_NWOR_MODE=cow nwor-ops check -- MODEL --speculative-config '{"method": "ngram", ...}'

    Exits with 0 if no check refuses a feature that is switched on, and with 3 if such a feature will be refused. Exits
    with 2 if the command line or a setting is invalid, and with 4 if vLLM itself refuses the arguments.
    """
    require("vllm")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not re.fullmatch(r"\d+\.\d", capability):
        raise typer.BadParameter(f"must be a number like 9.0, got {capability!r}", param_hint="--capability")
    with _shown("checking the engine's arguments"):
        from nwor_ops.vllm import check

        machine = check.Machine()
        if device is Device.CUDA:
            major, minor = map(int, capability.split("."))
            machine = check.describe_gpu((major, minor), int(gpu_memory * 2**30))
        from nwor_ops.cli.check import Outcome, as_json, as_json_of_error, outcome_of, print_preview

        cache_bytes = None if cache_memory is None else int(cache_memory * 2**30)
        found, outcome, problem = None, Outcome.INVALID, ""
        try:
            found = check.look(arguments, cache_bytes, machine)
        except check.InvalidEngine as error:
            outcome, problem = Outcome.ENGINE, f"vLLM refuses these arguments: {error}"
        except ValueError as error:
            problem = str(error)
        except SystemExit as end:  # vLLM's parser has printed the reason
            if not end.code:
                raise  # --help
            problem = "an argument is unknown or malformed; vLLM's parser says which one, above"
    if found is None:
        typer.echo(f"nwor-ops check: {problem}", err=True)
        if json:
            print(as_json_of_error(outcome, problem))
        raise typer.Exit(outcome.value)
    if json:
        print(as_json(found))
    else:
        console = Console(highlight=False)
        print_preview(found, console if console.is_terminal else Console(highlight=False, width=120))
    raise typer.Exit(outcome_of(found).value)


class Feature(str, enum.Enum):
    """Features that ``nwor-ops bench`` measures."""

    TRANSACTION = "transaction"
    DRAFT = "draft"
    RECURRENT = "recurrent"


class Form(str, enum.Enum):
    """Forms of recurrent states."""

    EXACT = "exact"
    CHUNK = "chunk"


@app.command()
def bench(
    feature: Annotated[Feature, typer.Argument(help="The feature to measure.")],
    arguments: Annotated[
        list[str], typer.Argument(metavar="-- ARGS...", help="The arguments of vllm serve, for both sides.")
    ],
    mode: Annotated[Mode, typer.Option(help="Mode of the transaction.")] = Mode.COW,
    form: Annotated[Form, typer.Option(help="Form of the recurrent states.")] = Form.EXACT,
    requests: Annotated[str, typer.Option(help="Loads: how many requests run at a time.")] = "1,16,64",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each load and side; a conclusion needs at least 6.")] = 6,
    seconds: Annotated[float, typer.Option(min=0.1, callback=_finite, help="Length of a run of vanilla vLLM.")] = 20.0,
    prompts: Annotated[
        str, typer.Option(help="random, or a file of JSON lines with prompt and output_tokens.")
    ] = "random",
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a random prompt.")] = 512,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="Output tokens per request. Default: 256, or those that the file names.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, callback=_finite, help="0 makes both sides choose the same tokens.")
    ] = 0.0,
    client_args: Annotated[str | None, typer.Option(help="More arguments of vllm bench serve, as one string.")] = None,
    vanilla_args: Annotated[
        str | None, typer.Option(help="More arguments of the vanilla server, as one string.")
    ] = None,
    vanilla_env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the vanilla server; may be repeated.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start the sides in turn, once per round, each with the whole memory.")
    ] = False,
    control: Annotated[
        bool, typer.Option("--control", help="Compare vanilla with vanilla, to see the noise of this machine.")
    ] = False,
    output: Annotated[pathlib.Path, typer.Option(help="Folder for the picture, results and logs.")] = pathlib.Path(
        "bench-output"
    ),
    json: JsonOption = False,
) -> None:
    """Measure a feature with your model, arguments and traffic: vanilla vLLM and nwor_ops in turn.

    Two servers start with the same arguments, and run the same requests round by round. Example:
    nwor-ops bench recurrent --requests 1,16 -- MODEL --speculative-config '{"method": "mtp", ...}'

    Exits with 0 if every load was measured, and with 1 if a server or a request fails. Exits with 2 if the command line
    is invalid, with 3 if the feature will be refused, and with 4 if vLLM refuses the arguments. Exits with 5 if the two
    sides accept drafts differently, so that no ratio is given.
    """
    require("vllm", "matplotlib", *(() if prompts == "random" else ("pandas",)))
    from nwor_ops.cli.bench_options import BenchOptions, check_options, parse_requests, parse_variables, parse_words

    with _exit_if_invalid("bench"):
        options = BenchOptions(
            feature=feature.value,
            arguments=tuple(arguments),
            output=output,
            mode=mode.value,
            form=form.value,
            requests=parse_requests(requests),
            rounds=rounds,
            seconds=seconds,
            prompts=prompts,
            input_tokens=input_len,
            output_tokens=output_len,
            temperature=temperature,
            client_arguments=parse_words("--client-args", client_args or ""),
            vanilla_arguments=parse_words("--vanilla-args", vanilla_args or ""),
            vanilla_environment=parse_variables(vanilla_env or []),
            restart=restart,
            control=control,
        )
        check_options(options)
    from nwor_ops.cli.bench import run_bench

    raise typer.Exit(run_bench(options, as_json=json))


class OpsDevice(str, enum.Enum):
    """Devices of the ops."""

    CPU = "cpu"
    CUDA = "cuda"


@app.command()
def verify(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS...]", help="The arguments of vllm serve.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, callback=_finite, help="Time, without the start of the engine.")
    ] = 5.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the windows and requests.")] = 0,
    device: Annotated[
        OpsDevice | None, typer.Option(help="Device of the ops. Default: cuda if torch finds a GPU, otherwise cpu.")
    ] = None,
    prompts: Annotated[
        pathlib.Path | None,
        typer.Option(help="File with a text or a JSON list of token ids per line. Default: random."),
    ] = None,
    output: Annotated[pathlib.Path, typer.Option(help="Archive for a bug report.")] = pathlib.Path(
        "nwor-verify.tar.gz"
    ),
    json: JsonOption = False,
) -> None:
    """Prove on this machine that nwor_ops works: compare every op with an oracle, and audit an engine at every step.

    Random windows of every op are compared with plain Python. Then an engine with your model, arguments and settings
    (VLLM_NWOR_... in the environment) serves random requests, and the audit compares every byte of its cache. Without
    ARGS only the ops are compared. Example:
    VLLM_NWOR_MODE=cow nwor-ops verify --minutes 10 -- MODEL --speculative-config '{"method": "ngram", ...}'

    Exits with 0 if there is no violation. Exits with 2 if the command line or a setting is invalid, with 3 if an op is
    wrong, and with 4 if the engine's audit finds a violation. Exits with 5 if the engine does not start, with 6 if it
    ends by another error, and with 7 if it had no step with drafts.
    """
    require("rich", *(["vllm"] if arguments else []))
    import torch

    from nwor_ops.cli.verify import InvalidOptions, VerifyOptions, check_options, run_verify

    chosen = device.value if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    options = VerifyOptions(minutes, seed, output, chosen, prompts, tuple(arguments or ()))
    with _exit_if_invalid("verify", InvalidOptions):
        check_options(options)
        code = run_verify(options, as_json=json)
    raise typer.Exit(code)


@app.command()
def doctor(
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every check, with each of vLLM's hooks.")] = False,
    json: JsonOption = False,
) -> None:
    """Report what is installed, whether everything that this machine needs works, and how to fix the rest.

    It needs the CPU library, the CUDA library if there is a GPU, and the hooks if vLLM is installed. Exits with 3 if a
    library is missing or torch cannot use the GPU, and with 4 if an op gives a wrong result. Exits with 5 if vLLM does
    not load the plugin, if its version or a hook differs, or if a setting is invalid. If several apply, it is the
    smallest of them.
    """
    from nwor_ops.cli.doctor import run_doctor
    from nwor_ops.cli.report import Report

    raise typer.Exit(run_doctor(Report("doctor", json), verbose))
