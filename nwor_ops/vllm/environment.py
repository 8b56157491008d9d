"""Register the plugin's environment variables with vLLM, and keep them out of its compile cache key.

vLLM warns about each ``VLLM_...`` variable that its own table lacks, and stops with ``--fail-on-environ-validation``.
Every variable in that table is part of the compile cache key. The plugin's variables are removed from the key: in a
forward the library acts only inside vLLM's custom ops, so the compiled code does not depend on them. An engine with
other values, or with ``VLLM_NWOR_MODE=off``, therefore finds the code that an earlier engine compiled. Settings in
``additional_config`` stay in the key, because vLLM hashes them with its own configuration.

Ray workers need nothing: vLLM copies every variable with its prefix to them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from nwor_ops.config import ENVIRONMENT_PREFIX
from nwor_ops.vllm.support import wrap_once


def announce_variables() -> None:
    """Add the plugin's variables that are set to vLLM's table. Calling it again is safe."""
    import vllm.envs

    for name in os.environ:
        if name.startswith(ENVIRONMENT_PREFIX):
            vllm.envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))
    wrap_once(vllm.envs, "compile_factors", _without_ours)


def _without_ours(factors: Callable[[], dict[str, object]]) -> Callable[[], dict[str, object]]:
    def compile_factors() -> dict[str, object]:
        return {name: value for name, value in factors().items() if not name.startswith(ENVIRONMENT_PREFIX)}

    return compile_factors
