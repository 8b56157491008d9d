"""Run the examples in the docstrings of the library's public functions and classes."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import nwor_ops

# Public objects of these packages need vLLM, Matplotlib or a terminal.
_OTHER_DEPENDENCIES = ("nwor_ops.vllm", "nwor_ops.cli", "nwor_ops.testing", "nwor_ops.__main__")
_LIBRARIES = ("nwor_ops.libnwor",)  # shared libraries that are not Python extensions
MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(nwor_ops.__path__, "nwor_ops.", onerror=lambda name: None)
    if not name.startswith((*_OTHER_DEPENDENCIES, *_LIBRARIES))
)


@pytest.mark.parametrize("module", ["nwor_ops", *MODULES])
def test_examples(module: str) -> None:
    results = doctest.testmod(importlib.import_module(module), extraglobs={"nwor_ops": nwor_ops})
    assert results.failed == 0, "the output above shows the example that failed"


def test_every_op_of_a_window_has_an_example() -> None:
    """Variants of an op refer to its example."""
    without = {"reject_rows_from_rejected", "restore_slots_from_rejected", "close_window", "close_window_from_rejected"}
    families = ("accept", "undo", "shadow", "staging")
    for name, op in nwor_ops.ops.registry.OPS.items():
        if op.family in families and name not in without:
            assert "Example" in (op.function.__doc__ or ""), name
