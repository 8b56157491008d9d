"""Settings of the vLLM plugin, from the environment and from ``additional_config["nwor"]``. The environment wins."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from nwor_ops.transaction.manager import MODES

SWITCH = "VLLM_NWOR"  # "off" switches everything off
ENVIRONMENT_PREFIX = "VLLM_NWOR_"
ADDITIONAL_CONFIG_KEY = "nwor"
SUGGESTED_ROWS = 32_768  # of a draft vocabulary, for vocabularies of 128 K to 256 K tokens

# Environment variables with the prefix that other modules read.
_READ_ELSEWHERE = {"VLLM_NWOR_DEBUG_SYNC": "csrc/cuda/launch.h, nwor_ops/transaction/protocol.py"}

_WORDS = {"mode": ("off", *MODES), "on_unsupported": ("error", "vanilla"), "on_error": ("continue", "stop")}
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
# True is the exact form. The name of another form is a string that is not empty, so every form is true.
_RECURRENT: dict[str, bool | str] = {**_BOOLEANS, "on": True, "exact": True, "off": False, "chunk": "chunk"}


@dataclass(frozen=True)
class NworConfig:
    """The settings of the plugin. Switches and numbers may also be text, as in the environment: ``"1"``, ``"no"``.

    Attributes:
        mode: ``"off"``: no transaction. ``"cow"``: an undo log. Log what the drafts overwrite, and undo the rejected
            ones. ``"stage"``: shadow paging. Write the drafts to shadow pages, and copy the accepted rows to their
            slots after sampling.
        audit: compare the whole cache at every step, and raise at the first byte that violates the transaction. Slow.
            With mode ``"off"`` it only counts the rejected rows that vLLM leaves in the cache.
        on_unsupported: the action at start-up if a feature is not possible. ``"error"`` stops with the reason.
            ``"vanilla"`` warns, and starts the engine without the feature.
        on_error: the action if a step meets an error of this plugin, and can safely go on without it.
            ``"continue"`` counts the error, and logs it once per reason. ``"stop"`` raises it, and the engine ends. If
            the step cannot safely go on, the engine always ends.
        draft_graphs: run a draft model from CUDA graphs; in the V1 runner also EAGLE and MTP. Independent of the mode.
        recurrent: keep one recurrent state per request instead of one per draft, for Gated DeltaNet and KDA layers.
            Independent of the mode. ``True`` or ``"exact"``: each token updates the state. ``"chunk"``: outputs come
            from the state at the start of a chunk of 16 tokens, with tensor cores.
        draft_vocabulary: number of tokens that a drafter computes logits of: those that recent requests used. 0 = the
            whole vocabulary. Independent of the mode.
    """

    mode: str = "off"
    audit: bool = False
    on_unsupported: str = "error"
    on_error: str = "continue"
    draft_graphs: bool = False
    recurrent: bool | str = False
    draft_vocabulary: int = 0

    def __post_init__(self) -> None:
        for name, allowed in _WORDS.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"nwor: {name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("audit", "draft_graphs", "recurrent"):
            object.__setattr__(self, name, _switch(name, getattr(self, name)))
        object.__setattr__(self, "draft_vocabulary", _rows(self.draft_vocabulary))

    @property
    def wants_transaction(self) -> bool:
        """Whether the plugin attaches to the steps of the target model."""
        return self.mode != "off" or self.audit

    @property
    def wants_feature(self) -> bool:
        """Whether at least one feature is switched on. Its counters are then published."""
        return self.mode != "off" or self.draft_graphs or bool(self.recurrent) or self.draft_vocabulary > 0

    @property
    def wants_anything(self) -> bool:
        """Whether a feature or the audit is switched on."""
        return self.wants_feature or self.audit

    @property
    def form(self) -> str:
        """The form of the windows of recurrent layers: ``"exact"`` or ``"chunk"``; ``"off"``: vLLM's own windows."""
        return self.recurrent if isinstance(self.recurrent, str) else "exact" if self.recurrent else "off"

    @property
    def chunk(self) -> bool:
        """Whether the windows of recurrent layers have the chunk form."""
        return self.recurrent == "chunk"

    @property
    def strict(self) -> bool:
        return self.on_unsupported == "error"

    @classmethod
    def load(cls, additional_config: Any = None, environment: Mapping[str, str] | None = None) -> NworConfig:
        """Read the settings from both sources. With ``VLLM_NWOR=off`` neither is read, and everything is off.

        Args:
            additional_config: vLLM's ``additional_config``, a dict. Any other type is ignored.
            environment: environment variables; default ``os.environ``.

        Raises:
            ValueError: an unknown key, variable or value. The message lists the known ones.

        Example:
            >>> from nwor_ops.config import NworConfig
            >>> NworConfig.load({"nwor": {"mode": "cow"}}, environment={"VLLM_NWOR_AUDIT": "1"}).mode
            'cow'
        """
        if switched_off(environment):
            return cls()
        return cls(**{**_from_additional_config(additional_config), **_from_environment(environment)})


class CarriedSettings(dict[str, Any]):
    """The settings in an engine's ``additional_config``, announced in each process that the configuration reaches.

    vLLM pickles its configuration for a new process, which reads it before it loads the plugin.

    Attributes:
        all: the settings that reached this process.
        install: called with new settings; None until the plugin is loaded.
    """

    all: ClassVar[list[CarriedSettings]] = []
    install: ClassVar[Callable[[NworConfig], None] | None] = None

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        if self not in self.all:
            self.all.append(self)
        install = type(self).install
        if install is not None:
            install(self.config)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    @property
    def config(self) -> NworConfig:
        """The settings of an engine in this process."""
        return NworConfig.load({ADDITIONAL_CONFIG_KEY: self})


def _switch(name: str, value: Any) -> Any:
    """Return False, True, or the name of a form of ``recurrent`` other than the exact one."""
    words, more = (_RECURRENT, "0, 1, off, exact or chunk") if name == "recurrent" else (_BOOLEANS, "0 or 1")
    switch = words.get(str(value).lower())
    if switch is None:
        raise ValueError(f"nwor: {name} must be true, false, {more}, got {value!r}")
    return switch


def _rows(value: Any) -> int:
    is_number = re.fullmatch(r"\d{1,10}", value) if isinstance(value, str) else type(value) is int
    if not is_number or not 0 <= int(value) < 2**31:
        raise ValueError(f"nwor: draft_vocabulary must be a number of tokens, 0 to 2147483647, got {value!r}")
    return int(value)


def _known() -> tuple[str, ...]:
    return tuple(field.name for field in fields(NworConfig))


def _from_additional_config(additional_config: Any) -> dict[str, Any]:
    if not isinstance(additional_config, Mapping):
        return {}
    settings = additional_config.get(ADDITIONAL_CONFIG_KEY, {})
    if not isinstance(settings, Mapping):
        raise ValueError(f'nwor: additional_config["{ADDITIONAL_CONFIG_KEY}"] must be a dict, got {settings!r}')
    unknown = sorted((key for key in settings if key not in _known()), key=str)
    if unknown:
        raise ValueError(f"nwor: unknown settings {unknown}; known are {', '.join(_known())}")
    return dict(settings)


def _from_environment(environment: Mapping[str, str] | None) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    names = {ENVIRONMENT_PREFIX + name.upper(): name for name in _known()}
    for variable, value in (os.environ if environment is None else environment).items():
        if variable in _READ_ELSEWHERE:
            if value not in ("0", "1", "false", "true"):
                raise ValueError(f"nwor: {variable} must be 0, 1, false or true, got {value!r}")
        elif variable in names:
            setting: dict[str, Any] = {names[variable]: value}
            try:
                NworConfig(**setting)
            except ValueError as error:
                raise ValueError(str(error).replace(names[variable], variable, 1)) from None
            settings |= setting
        elif variable.startswith(ENVIRONMENT_PREFIX):
            known = ", ".join([SWITCH, *names, *_READ_ELSEWHERE])
            raise ValueError(f"nwor: unknown environment variable {variable}; known are {known}")
    return settings


def is_ours(variable: str) -> bool:
    """Return whether the name of an environment variable is one of the plugin's."""
    return variable == SWITCH or variable.startswith(ENVIRONMENT_PREFIX)


def switched_off(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether ``VLLM_NWOR=off`` switches the whole plugin off.

    Raises:
        ValueError: the variable is neither ``on`` nor ``off``.
    """
    value = (os.environ if environment is None else environment).get(SWITCH, "on")
    if value.lower() not in ("on", "off"):
        raise ValueError(f"nwor: {SWITCH} must be on or off, got {value!r}")
    return value.lower() == "off"
