"""Run the examples in the docstrings of the library's public functions and classes."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import types
from typing import Any

import pytest

import nwor_ops
import nwor_ops.drafter
import nwor_ops.vllm

# Public objects of these packages need vLLM, Matplotlib or a terminal. tests/vllm/test_plugin.py runs the plugin's.
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


def test_every_op_has_an_example() -> None:
    assert [name for name, op in nwor_ops.ops.registry.OPS.items() if not has_example(op.function)] == []


@pytest.mark.parametrize("module", [nwor_ops, nwor_ops.drafter, nwor_ops.vllm])
def test_every_public_class_and_function_has_an_example(module: types.ModuleType) -> None:
    public = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    objects = {name: thing for name, thing in public.items() if inspect.isclass(thing) or inspect.isfunction(thing)}
    assert len(objects) >= 5
    assert [name for name, thing in objects.items() if not has_example(thing)] == []


def has_example(thing: Any) -> bool:
    return bool(doctest.DocTestParser().get_examples(inspect.getdoc(thing) or ""))


def test_a_docstring_without_an_example_is_found() -> None:
    def without() -> None:
        """Example: see elsewhere."""

    assert not has_example(without)
    assert has_example(nwor_ops.write_kv)
