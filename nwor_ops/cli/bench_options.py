"""Options of ``nwor-ops bench``, the check of their values, and the two sides that they describe."""

from __future__ import annotations

import os
import pathlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nwor_ops.cli.files import lines_of, make_folder, parse_json
from nwor_ops.config import SWITCH, NworConfig, is_ours

VANILLA, OURS = "vanilla", "nwor"
SIDES = (VANILLA, OURS)
RANDOM = "random"
TRANSACTION, DRAFT, RECURRENT = "transaction", "draft", "recurrent"
_FORM = "VLLM_NWOR_RECURRENT"
# Every setting that could differ between the sides. The environment wins over --additional-config.
_ALL_OFF = {
    SWITCH: "on",
    "VLLM_NWOR_MODE": "off",
    "VLLM_NWOR_AUDIT": "0",
    "VLLM_NWOR_DRAFT_GRAPHS": "0",
    _FORM: "0",
    "VLLM_NWOR_ON_UNSUPPORTED": "error",
    "VLLM_NWOR_EMIT_METRICS": "1",
}


@dataclass(frozen=True)
class BenchOptions:
    """The options of the command; see ``nwor-ops bench --help``.

    Attributes:
        feature: ``"transaction"``, ``"draft"`` or ``"recurrent"``.
        arguments: the arguments of ``vllm serve``, for both sides.
        mode: of the transaction, ``"cow"`` or ``"stage"``.
        form: of recurrent states, ``"exact"`` or ``"chunk"``.
        output_tokens: per request. None: 256, or the numbers in the file of prompts.
        vanilla_environment: variables of the vanilla server, on top of this process's.
    """

    feature: str
    arguments: tuple[str, ...]
    output: pathlib.Path
    mode: str = "cow"
    form: str = "exact"
    requests: tuple[int, ...] = (1, 16, 64)
    rounds: int = 6
    seconds: float = 20.0
    prompts: str = RANDOM
    input_tokens: int = 512
    output_tokens: int | None = None
    temperature: float = 0.0
    client_arguments: tuple[str, ...] = ()
    vanilla_arguments: tuple[str, ...] = ()
    vanilla_environment: Mapping[str, str] | None = None
    restart: bool = False
    control: bool = False

    @property
    def feature_name(self) -> str:
        """The feature's name in ``nwor-ops check``."""
        return {TRANSACTION: self.mode, DRAFT: "draft graphs", RECURRENT: "one state"}[self.feature]

    @property
    def titles(self) -> dict[str, str]:
        """A name of each side, for output."""
        ours = f"{self.feature_name} ({self.form})" if self.feature == RECURRENT else self.feature_name
        return {VANILLA: VANILLA, OURS: "vanilla again" if self.control else ours}

    @property
    def switch(self) -> dict[str, str]:
        """The variable that switches the feature on."""
        return {
            TRANSACTION: {"VLLM_NWOR_MODE": self.mode},
            DRAFT: {"VLLM_NWOR_DRAFT_GRAPHS": "1"},
            RECURRENT: {_FORM: self.form},
        }[self.feature]

    @property
    def label(self) -> tuple[str, str]:
        """The feature's label of ``nwor_info``, and its value if the feature is active."""
        return {
            TRANSACTION: ("transaction", self.mode),
            DRAFT: ("draft_graphs", "on"),
            RECURRENT: ("recurrent", self.form),
        }[self.feature]

    def settings(self, side: str) -> dict[str, str]:
        """Return the variables that this command sets for a side."""
        if side == OURS and not self.control:
            return _ALL_OFF | self.switch
        return {SWITCH: "off"} | dict((self.vanilla_environment or {}) if side == VANILLA else {})

    def environment(self, side: str) -> dict[str, str]:
        """Return the complete environment of a side's server. It lets a client empty the prefix cache."""
        kept = {name: value for name, value in os.environ.items() if not is_ours(name)}
        return kept | {"VLLM_SERVER_DEV_MODE": "1"} | self.settings(side)

    def arguments_of(self, side: str) -> list[str]:
        return [*self.arguments, *(self.vanilla_arguments if side == VANILLA else ())]


def parse_requests(text: str) -> tuple[int, ...]:
    """Parse ``"1,16,64"``.

    Raises:
        ValueError: it is not a list of different positive numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len({*map(int, parts)}) < len(parts):
        raise ValueError(f"--requests must be different positive numbers like 1,16,64, got {text!r}")
    return tuple(map(int, parts))


def parse_variables(texts: list[str]) -> dict[str, str]:
    """Parse a list of ``NAME=VALUE``, the values of ``--vanilla-env``.

    Raises:
        ValueError: one of them has another form, or is a setting of the plugin.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"--vanilla-env must be NAME=VALUE, got {text!r}")
        if is_ours(name):
            raise ValueError(f"--vanilla-env: {name} is a setting of nwor_ops, and the vanilla side runs without it")
        found[name] = value
    return found


def parse_words(option: str, text: str) -> tuple[str, ...]:
    """Split a string as a shell does.

    Raises:
        ValueError: a quotation mark is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{option}: {error} in {text!r}") from None


def check_options(options: BenchOptions) -> None:
    """Check the options that can be checked without vLLM, and create the folder for the results.

    Raises:
        ValueError: an option is invalid; the message is a sentence.
    """
    if options.prompts != RANDOM:
        _check_prompts(pathlib.Path(options.prompts), options.output_tokens is not None)
    make_folder(options.output)


def check_form(options: BenchOptions, additional_config: Any, environment: Mapping[str, str]) -> None:
    """Check that the settings of the user's server do not ask for another form of recurrent states.

    Args:
        options: the options of the command.
        additional_config: vLLM's ``additional_config``.
        environment: the variables of this process. Those that the servers ignore are ignored here too.

    Raises:
        ValueError: they ask for another form; the message is a sentence.
    """
    if options.feature != RECURRENT or options.control:
        return
    variable = {_FORM: environment[_FORM]} if _FORM in environment else {}
    asked = NworConfig.load(additional_config, variable).form
    if asked not in ("off", options.form):
        raise ValueError(
            f"--form: {options.form} would be measured, but {_FORM if variable else '--additional-config'} asks for "
            f"{asked}; use the same form in both, or remove that setting"
        )


def _check_prompts(path: pathlib.Path, has_length: bool) -> None:
    if path.suffix != ".jsonl" or not path.is_file():
        raise ValueError(f"--prompts must be {RANDOM!r} or a file that ends with .jsonl, got {str(path)!r}")
    lines = lines_of("--prompts", path)
    if not lines:
        raise ValueError(f"--prompts: {path} is empty")
    for number, line in enumerate(lines, 1):
        entry = parse_json(line)
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ValueError(f'--prompts: line {number} of {path} must be an object with a "prompt"')
        if has_length:
            continue
        if "output_tokens" not in entry:
            raise ValueError(f'--prompts: line {number} of {path} has no "output_tokens"; set --output-len for all')
        tokens = entry["output_tokens"]
        if type(tokens) is not int or tokens < 1:
            raise ValueError(
                f'--prompts: "output_tokens" in line {number} of {path} must be a positive number, got {tokens!r}'
            )
