"""Mode stage: shadow pages keep their rows from step to step, and must never keep rows of another request.

page_machine.py has the runners of these tests, and the state machine that drives them at random.
"""

from __future__ import annotations

import pytest
import torch
from page_machine import DRAFTS, SETTINGS, Part, Request, Runner, V1Engine, V1Runner, V2Engine, V2Runner

from nwor_ops.vllm.transaction.runners import v1


def serve(runner: Runner, steps: list[list[Part]]) -> None:
    for parts in steps:
        runner.run(parts, fails=False)
        runner.advance()


RUNNERS = pytest.mark.parametrize("runner_class", [V1Runner, V2Runner])


@RUNNERS
def test_request_with_constant_drafts_is_copied_once(runner_class: type[Runner]) -> None:
    """Two requests, six steps of a token and two drafts, across the ends of pages."""
    runner = runner_class()
    a, b = Request("a", 6, blocks=[1, 2, 3, 4, 5]), Request("b", 5, blocks=[7, 8, 9, 10, 11])
    serve(runner, [[Part(a, 6, 0, 0), Part(b, 5, 0, 0)]])
    serve(runner, [[Part(a, 1, DRAFTS, number % 2), Part(b, 1, DRAFTS, number % 3)] for number in range(6)])
    assert runner.copied.copied == 2 + 1  # rows of the pages in which the prompts end
    assert runner.copied.committed == 11


@RUNNERS
@pytest.mark.parametrize("loads", [True, False])
def test_pages_are_copied_only_after_loads(
    runner_class: type[Runner], loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connector is called in every attention layer, even if it has loaded everything in earlier steps."""
    runner, refreshed = runner_class(), []
    monkeypatch.setattr(runner.session.manager, "refresh_shadow_pages", lambda: refreshed.append(1))
    request = Request("a", 1, [1.0, 2.0, 3.0, 4.0], blocks=[1, 2], loaded=4 if loads else 0)
    runner.kv_cache[1] = torch.arange(1.0, 5.0)[:, None, None]
    load = runner.load
    monkeypatch.setattr(runner, "load", lambda: load() if loads else runner.session.loaded())
    serve(runner, [[Part(request, 1, DRAFTS, 1)]])
    assert len(refreshed) == loads


def test_page_of_new_request_is_copied_again() -> None:
    """The next request is the only one in the batch, and gets the state and the page of the one that ended."""
    runner = V2Runner()
    a, b = Request("a", 2, blocks=[1, 2]), Request("b", 2, blocks=[1, 2])
    serve(runner, [[Part(a, 2, 0, 0)], [Part(a, 1, DRAFTS, 0)]])
    runner.remove("a")
    serve(runner, [[Part(b, 2, 0, 0)], [Part(b, 1, DRAFTS, 1)]])


@RUNNERS
def test_first_step_with_drafts_copies_its_page(runner_class: type[Runner]) -> None:
    """The rows of a request were loaded in an earlier step. It gets the state and pages of one that ended."""
    runner = runner_class()
    a, b = Request("a", 2, blocks=[1, 2]), Request("b", 1, [5.0, 6.0], blocks=[1, 2])
    serve(runner, [[Part(a, 2, 0, 0)], [Part(a, 1, DRAFTS, 0)]])
    runner.remove("a")
    runner.kv_cache[1, :2] = torch.tensor(b.rows)[:, None, None]
    serve(runner, [[Part(b, 1, DRAFTS, 1)]])


def test_a_request_keeps_its_number_in_any_row() -> None:
    states = v1.RequestStates(3, torch.device("cpu"))

    def numbers(*order: str) -> dict[str, int]:
        return dict(zip(order, states.tensor.tolist(), strict=True))

    assert states.update(["a", "b", "c"]) == [True] * 3
    first, tensor = numbers("a", "b", "c"), states.tensor
    assert sorted(first.values()) == [0, 1, 2]
    assert states.update(["a", "b", "c"]) == [False] * 3
    assert states.tensor is tensor  # nothing was copied
    assert states.update(["c", "a"]) == [False] * 2
    assert numbers("c", "a") == {"c": first["c"], "a": first["a"]}
    assert states.update(["c", "d", "a"]) == [False, True, False]
    assert numbers("c", "d", "a") == {"c": first["c"], "d": first["b"], "a": first["a"]}
    assert states.update(["b", "a"]) == [True, False]  # a request that returns is new
    assert [states[name] for name in ("b", "a")] == states.tensor.tolist()


# ---------------------------------------------------------------- random steps

TestV1 = V1Engine.TestCase
TestV1.settings = SETTINGS
TestV2 = V2Engine.TestCase
TestV2.settings = SETTINGS
