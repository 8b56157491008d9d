"""The settings of an engine; and the plugin's environment variables, which vLLM must know but not hash.

vLLM warns about each ``VLLM_...`` variable that its own table lacks, and stops with ``--fail-on-environ-validation``.
Every variable in that table is part of the compile cache key. The plugin's variables are removed from the key: in a
forward the library acts only inside vLLM's custom ops, so the compiled code does not depend on them. Settings in
``additional_config`` stay in the key, because vLLM hashes them with its own configuration.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from nwor_ops.config import ADDITIONAL_CONFIG_KEY, CarriedSettings, NworConfig, is_ours
from nwor_ops.vllm.hooks import Hook, ModulePatch, when_undone

# The only functions that are patched in an engine without a feature. If one does not fit, a warning says so.
HOOKS = (Hook("vllm.envs", "compile_factors", ""), Hook("vllm.config", "VllmConfig.__post_init__", ""))
_NOT_STRICT = NworConfig(on_unsupported="vanilla")


def vllm_logger() -> Any:
    """Return the logger of this plugin."""
    from vllm.logger import init_logger

    return init_logger("vllm.plugins.nwor_ops")


def settings_of(vllm_config: Any) -> NworConfig:
    """Return the settings of an engine. They are not kept, because vLLM copies its configuration for a draft model."""
    return NworConfig.load(vllm_config.additional_config)


def announce_variables() -> None:
    """Add the plugin's variables that are set to vLLM's table. Calling it again is safe."""
    import vllm.envs

    table = vllm.envs.environment_variables
    for name in os.environ:
        if is_ours(name) and name not in table:
            table[name] = functools.partial(os.environ.get, name)
            when_undone(functools.partial(table.pop, name, None))
    ModulePatch(HOOKS[0], _without_ours, "environment", bool).apply(vllm.envs, _NOT_STRICT, vllm_logger())


def watch_configurations(install: Callable[[NworConfig], None]) -> None:
    """Call ``install`` with the settings of each engine whose configuration reaches this process.

    These are the settings of the environment, and those in ``additional_config``: of configurations that vLLM makes
    here, and of those that it sent here (:class:`CarriedSettings`).
    """
    import vllm.config

    def reading(initialize: Callable[..., None]) -> Callable[..., None]:
        def __post_init__(self: Any) -> None:
            additional = self.additional_config
            if isinstance(additional, dict) and ADDITIONAL_CONFIG_KEY in additional:
                settings_of(self)  # raises for invalid settings
                additional[ADDITIONAL_CONFIG_KEY] = CarriedSettings(additional[ADDITIONAL_CONFIG_KEY])
            initialize(self)

        return __post_init__

    ModulePatch(HOOKS[1], reading, "additional_config", bool).apply(vllm.config, _NOT_STRICT, vllm_logger())
    CarriedSettings.install = install
    when_undone(functools.partial(setattr, CarriedSettings, "install", None))
    for config in (NworConfig.load(), *(settings.config for settings in CarriedSettings.all)):
        install(config)


def _without_ours(factors: Callable[[], dict[str, object]]) -> Callable[[], dict[str, object]]:
    def compile_factors() -> dict[str, object]:
        return {name: value for name, value in factors().items() if not is_ours(name)}

    return compile_factors
