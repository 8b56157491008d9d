"""Tell vLLM that the variables of this plugin are no typing errors, and that they change nothing it compiles.

vLLM warns of every ``VLLM_...`` variable that is not in its own table, and stops with
``--fail-on-environ-validation``. What is in the table is part of the key of its compile cache. Ours are taken out of
the key: all that this library does in a forward is behind custom ops of vLLM's, so the compiled code is the same
whatever they say, and an engine with others, or with ``VLLM_NWOR_MODE=off``, finds what the one before compiled. (What
is set by ``additional_config`` stays in the key, as vLLM hashes that with its own configuration.)
Ray workers need nothing: vLLM copies every variable with its prefix to them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

from nwor_ops.config import ENVIRONMENT_PREFIX
from nwor_ops.vllm.support import wrap_once


def announce_variables() -> None:
    """Enter the variables that are set into vLLM's table. Safe to call again."""
    import vllm.envs

    for name in os.environ:
        if name.startswith(ENVIRONMENT_PREFIX):
            vllm.envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))
    wrap_once(vllm.envs, "compile_factors", _without_ours)


def _without_ours(factors: Callable[[], dict[str, object]]) -> Callable[[], dict[str, object]]:
    def compile_factors() -> dict[str, object]:
        return {name: value for name, value in factors().items() if not name.startswith(ENVIRONMENT_PREFIX)}

    return compile_factors
