"""The totals of several engines (:func:`nwor_ops.stats`)."""

from __future__ import annotations

from dataclasses import fields

import pytest

import nwor_ops
from nwor_ops.transaction import counters
from nwor_ops.transaction.counters import EngineStats

NUMBERS = [entry.name for entry in fields(EngineStats) if entry.type in ("int", "float")]


def test_numbers_and_reasons_of_engines_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "_sources", [])
    first = EngineStats(**dict.fromkeys(NUMBERS, 1), vanilla_steps={"a": 2, "b": 1}, errors={"c": 4})
    second = EngineStats(**dict.fromkeys(NUMBERS, 2), vanilla_steps={"a": 3}, draft_eager_reasons={"d": 5})
    sources = [lambda: first, lambda: second]
    for source in (*sources, sources[0]):
        counters.add_source(source)
    reasons = {"vanilla_steps": {"a": 5, "b": 1}, "draft_eager_reasons": {"d": 5}, "errors": {"c": 4}}
    assert nwor_ops.stats() == EngineStats(**dict.fromkeys(NUMBERS, 3), **reasons)
    for _ in range(2):  # the second call does nothing
        counters.remove_source(sources[0])
    assert nwor_ops.stats() == second
