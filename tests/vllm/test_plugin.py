"""The settings of the plugin, and the versions of vLLM that it refuses. test_feature_report.py has engines with it."""

from __future__ import annotations

import doctest
from types import SimpleNamespace
from typing import Any

import pytest
from engines import Engines

from nwor_ops.config import NworConfig
from nwor_ops.vllm.environment import settings_of


def examples_job() -> dict[str, tuple[int, int]]:
    """Run the examples of the plugin's public functions and classes. Return failures and attempts by name."""
    import nwor_ops.vllm

    names = {"nwor_ops": nwor_ops}
    runner, found = doctest.DocTestRunner(), {}
    for name in nwor_ops.vllm.__all__:
        thing = getattr(nwor_ops.vllm, name)
        [test] = doctest.DocTestFinder(recurse=False).find(thing, name, extraglobs=names | {name: thing})
        results = runner.run(test)
        found[name] = (results.failed, results.attempted)
    return found


def test_the_examples_of_the_plugin_run(engines: Engines) -> None:
    found = engines.submit(examples_job).result()
    assert "RecurrentEngine" in found
    assert {name: result for name, result in found.items() if result[0] or not result[1]} == {}


def test_hooks_match_this_vllm() -> None:
    import nwor_ops.vllm

    assert [row for row in nwor_ops.vllm.check_hooks() if row["needed"] and not row["ok"]] == []


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.v1.worker.gpu_model_runner as runner_module

    from nwor_ops.vllm.hooks import check_vllm
    from nwor_ops.vllm.support.refusals import Unsupported
    from nwor_ops.vllm.transaction.runners.v1 import V1

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any, more: Any) -> None: ...

    monkeypatch.setattr(runner_module.GPUModelRunner, "_sample", _sample)
    with pytest.raises(Unsupported, match=r"_sample takes .*'more'.*, expected"):
        check_vllm(V1.hooks)


def test_another_vllm_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from nwor_ops.vllm.hooks import check_vllm
    from nwor_ops.vllm.support.refusals import Unsupported

    monkeypatch.setattr(vllm, "__version__", "0.31.1")
    with pytest.raises(Unsupported, match=r"vLLM 0\.31\.1 is not supported"):
        check_vllm(())


# ---------------------------------------------------------------- configuration


def test_settings_add_nothing_to_a_configuration() -> None:
    """vLLM copies the configuration of an engine field by field for its draft model."""
    config = SimpleNamespace(additional_config={"nwor": {"mode": "cow"}})
    assert settings_of(config).mode == "cow"
    assert list(vars(config)) == ["additional_config"]


def test_environment_wins() -> None:
    config = NworConfig.load({"nwor": {"mode": "cow", "audit": 1}}, {"VLLM_NWOR_MODE": "off"})
    assert config == NworConfig(mode="off", audit=True)
    config = NworConfig.load({"nwor": {"draft_graphs": False}}, {"VLLM_NWOR_DRAFT_GRAPHS": "1"})
    assert (config.draft_graphs, config.wants_transaction) == (True, False)


@pytest.mark.parametrize(
    ("additional", "environment", "message"),
    [
        ({"nwor": {"mod": "cow"}}, {}, "unknown settings \\['mod'\\]; known are mode, audit, on_unsupported, on_error"),
        ({"nwor": {"mode": "on"}}, {}, "mode must be one of off, cow, stage, got 'on'"),
        ({"nwor": {"audit": 2}}, {}, "audit must be true, false, 0 or 1, got 2"),
        ({"nwor": {"draft_graphs": "maybe"}}, {}, "draft_graphs must be true, false, 0 or 1, got 'maybe'"),
        (
            {"nwor": {"draft_vocabulary": True}},
            {},
            "nwor: draft_vocabulary must be a number of tokens, 0 to 2147483647",
        ),
        ({}, {"VLLM_NWOR_DRAFT_VOCABULARY": "-1"}, "nwor: VLLM_NWOR_DRAFT_VOCABULARY must be a number of tokens, 0 to"),
        ({"nwor": "cow"}, {}, "must be a dict"),
        ({}, {"VLLM_NWOR_MODE": "stage2"}, "nwor: VLLM_NWOR_MODE must be one of"),
        ({}, {"VLLM_NWOR_MODUS": "cow"}, "unknown environment variable VLLM_NWOR_MODUS; known are"),
        ({}, {"VLLM_NWOR": "0"}, "VLLM_NWOR must be on or off, got '0'"),
        ({"nwor": {"audit": 1}}, {"VLLM_NWOR_AUDIT": "x"}, "nwor: VLLM_NWOR_AUDIT must be true, false, 0 or 1, got"),
        ({}, {"VLLM_NWOR_ON_UNSUPPORTED": "ignore"}, "VLLM_NWOR_ON_UNSUPPORTED must be one of error, vanilla"),
        ({}, {"VLLM_NWOR_ON_ERROR": "vanilla"}, "VLLM_NWOR_ON_ERROR must be one of continue, stop"),
        (None, {"VLLM_NWOR_DEBUG_SYNC": "yes"}, "VLLM_NWOR_DEBUG_SYNC must be 0, 1, false or true, got"),
    ],
)
def test_unknown_settings_are_errors(additional: Any, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NworConfig.load(additional, environment)


def test_the_default_is_off() -> None:
    assert NworConfig.load(None, {}) == NworConfig(mode="off", audit=False, on_unsupported="error", on_error="continue")
    config = NworConfig.load({"other": 1}, {"VLLM_NWOR_DEBUG_SYNC": "1"})
    assert (config.wants_transaction, config.draft_graphs, config.recurrent) == (False, False, False)


def test_the_switch_is_read_before_every_other_setting() -> None:
    asked = {"VLLM_NWOR_MODE": "cow", "VLLM_NWOR_DRAFT_GRAPHS": "1", "VLLM_NWOR_NO_SUCH": "1"}
    assert NworConfig.load({"nwor": {"recurrent": True}}, {"VLLM_NWOR": "OFF"} | asked) == NworConfig()
    assert NworConfig.load({"nwor": {"recurrent": True}}, {"VLLM_NWOR": "on"}).recurrent
