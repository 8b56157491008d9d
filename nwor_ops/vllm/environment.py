"""Tell vLLM that the variables of this plugin are no typing errors.

vLLM warns of every ``VLLM_...`` variable that is not in its own table, and stops with
``--fail-on-environ-validation``. Only what is set is entered, so without one the table stays as it is.
vLLM's compile cache is keyed by the variables in the table: an engine with other settings compiles anew.
Ray workers need nothing: vLLM copies every variable with its prefix to them.
"""

from __future__ import annotations

import functools
import os

from nwor_ops.config import ENVIRONMENT_PREFIX


def announce_variables() -> None:
    """Enter the variables that are set into vLLM's table. Safe to call again."""
    import vllm.envs

    for name in os.environ:
        if name.startswith(ENVIRONMENT_PREFIX):
            vllm.envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))
