"""Options of ``nwor-ops demo``, and the check of their values."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

import torch

from nwor_ops.cli.files import make_folder
from nwor_ops.testing.tiny_llama import TIMED_SIZE, Size

SIDES = ("vanilla", "nwor")
PARTS = ("audited", "timed")
SIZES = {"audited": Size(), "timed": TIMED_SIZE}
SHORT_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command; see ``nwor-ops demo --help``."""

    output: pathlib.Path
    mode: str = "cow"
    model: str | None = None
    method: str = "ngram"
    draft_model: str | None = None
    num_speculative_tokens: int = 4
    max_tokens: int = 64
    rounds: int = 20
    compile: bool = False

    @property
    def own_model(self) -> bool:
        return self.model is not None

    @property
    def models(self) -> dict[str, str]:
        """A description of each part's model, for output."""
        return {part: self.model or f"{SIZES[part]}, {SHORT_DTYPES[own_dtype(part)]}" for part in PARTS}

    @property
    def modes(self) -> dict[str, str]:
        """The mode of each side."""
        return {"vanilla": "off", "nwor": self.mode}

    @property
    def titles(self) -> dict[str, str]:
        return {"vanilla": "vanilla vLLM", "nwor": f"NWOR ({self.mode})"}


def check_options(options: DemoOptions) -> None:
    """Check the options that can be checked without an engine.

    A name that is not a folder may be a model that vLLM downloads, unless it is spelled like a path.

    Raises:
        ValueError: an option is invalid; the message is a sentence.
    """
    for option, model in (("--model", options.model), ("--draft-model", options.draft_model)):
        if model is None:
            continue
        folder = pathlib.Path(model).expanduser()
        if not folder.exists():
            if model.startswith(("/", ".", "~")):
                raise ValueError(f"{option}: there is no folder {model}")
        elif not folder.is_dir():
            raise ValueError(f"{option}: {model} is a file, not the folder of a model")
        elif not (folder / "config.json").is_file():
            raise ValueError(f"{option}: {model} has no config.json, so it is not the folder of a model")
    make_folder(options.output)


def own_dtype(part: str) -> str:
    """Return the dtype of the demo's own models.

    On a processor without bf16 instructions, a matrix product in bf16 takes four times as long as in float32, and the
    timed part would take minutes.
    """
    return "float32" if part == "timed" and not torch.cuda.is_available() else "bfloat16"
