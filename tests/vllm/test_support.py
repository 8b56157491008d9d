"""Supported and refused configurations: their messages, and the generated tables of docs/reference."""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import json
import re
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import engine_faults
import gpu_cases
import pytest
import support_tables
import tiny_models
import vllm
from draft_configs import with_settings
from shown_cases import METHODS, PARALLEL_MODES, Shown
from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

from nwor_ops.vllm.recurrent.supported import check_state_connectors
from nwor_ops.vllm.support.connectors import CONNECTORS
from nwor_ops.vllm.support.features import DEVICES, DRAFT_GRAPHS
from nwor_ops.vllm.support.refusals import REFUSALS, Refusal, Unsupported, check_engine
from nwor_ops.vllm.transaction.supported import check_connectors, check_scheduler

TESTS = Path(__file__).parent


def engine(method: str = "ngram", **found: Any) -> Any:
    """Return a configuration of the V2 runner with only the given settings; ``a__b`` is ``config.a.b``."""
    config = SimpleNamespace(speculative_config=SimpleNamespace(method=method), use_v2_model_runner=True)
    return with_settings(config, **found)


@pytest.mark.parametrize("document", support_tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_of_documents_are_up_to_date(document: Path) -> None:
    text = document.read_text()
    assert support_tables.filled(document, text) == text, "run python tools/support_tables.py"


def test_a_document_without_the_marks_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"must have the mark '<!-- supported: .*' once, got 0"):
        support_tables.filled(support_tables.REFERENCE / "support.md", "")


@pytest.mark.parametrize(
    ("found", "kind", "reason"),
    [
        ({}, "xpu", "device xpu: only cpu and cuda are supported$"),
        ({"parallel_config__pipeline_parallel_size": 2}, "cpu", "pipeline parallelism: a rank before the last learns"),
        (
            {"parallel_config__prefill_context_parallel_size": 2},
            "cpu",
            "prefill context parallelism: its slot mappings",
        ),
        ({"parallel_config__decode_context_parallel_size": 2}, "cpu", "decode context parallelism: with drafts, "),
        ({"parallel_config__data_parallel_size": 2}, "cpu", "data parallelism of a model with experts: it has not"),
        ({"parallel_config__use_ubatching": True}, "cpu", "dual batch overlap: vLLM's runner V2 does not support it"),
        ({"attention_config__hisparse_config": object()}, "cpu", "HiSparse: it writes to its own slots"),
    ],
)
def test_each_refusal_gives_its_reason(found: dict[str, Any], kind: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=f"^{reason}"):
        check_engine(engine(**found), kind)


def test_supported_configurations_pass() -> None:
    sizes = {f"parallel_config__{kind}_parallel_size": 1 for kind in ("pipeline", "decode_context")}
    sizes |= {"parallel_config__data_parallel_size": 1, "parallel_config__tensor_parallel_size": 8}
    for mode in ("cow", "stage"):
        check_engine(engine(**sizes, kv_transfer_config=None), "cpu", mode=mode)
    check_engine(engine("of tomorrow", lora_config=object()), "cuda")
    check_engine(engine("eagle", speculative_config__enable_adaptive_verification=True), "cuda")
    check_engine(engine("eagle", speculative_config__num_speculative_tokens_per_batch_size=[(1, 8, 4)]), "cuda")
    check_engine(engine("draft_model", attention_config__hisparse_config=object()), "cuda", DRAFT_GRAPHS)


def test_every_method_of_vllm_has_a_row() -> None:
    here = {method.name for method in METHODS if vllm.__version__.startswith(method.versions)}
    named_for_a_model = set(get_args(MTPModelTypes)) - {"mtp"}
    assert set(get_args(SpeculativeMethod)) - named_for_a_model - {"mlp_speculator"} == here  # no runner has that


@functools.cache
def names_of_tests() -> set[str]:
    return {name for path in TESTS.glob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}


def parallel_tests() -> Any:
    path = TESTS.parent / "gpu" / "vllm" / "test_parallel.py"
    spec = importlib.util.spec_from_file_location("parallel_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def all_cases() -> dict[str, Any]:
    things = [*vars(gpu_cases).values(), *vars(parallel_tests()).values()]
    listed = (each for thing in things for each in (thing if isinstance(thing, list) else [thing]))
    return {each.name: each for each in listed if isinstance(each, gpu_cases.Case | gpu_cases.Refusal)}


@pytest.mark.parametrize("row", [*METHODS, *PARALLEL_MODES], ids=lambda row: row.name)
def test_shown_tests_exist_and_passed(row: Shown) -> None:
    """By the committed results: each method in both modes, unless the table says `cow`."""
    assert set(row.cpu) <= names_of_tests()
    passed = support_tables.passed_cases()
    for runner, module in (("v2", "gpu.model_runner"), ("v1", "gpu_model_runner")):
        for name in getattr(row, runner):
            assert all_cases()[name].runner.endswith(module)
            if row in METHODS:
                assert name in passed
                assert f"stage-{name}" in passed or "in mode `cow`" in row.notes.get(runner, "")


def test_table_has_every_case_with_gpus() -> None:
    named = {name for mode in PARALLEL_MODES for name in (*mode.v2, *mode.v1)}
    tests = parallel_tests()
    assert named == {case.name for case in (*tests.TENSOR, *tests.DATA, *tests.NODES)}


def cases_named(text: str) -> list[str]:
    """Return the names and patterns of cases in the comments of a document."""
    return [name for names in re.findall(r"<!-- cases: (.*?) -->", text) for name in names.split()]


def test_every_case_that_the_documents_name_passed() -> None:
    named = cases_named((support_tables.REFERENCE / "cases.md").read_text())
    cases = set(all_cases())
    passed = {name for its in support_tables.entries().values() for name in its if its[name]["outcome"] == "passed"}
    assert len(set(named)) > 120
    assert [name for name in named if not fnmatch.filter(cases & passed, name)] == []


@pytest.mark.parametrize(
    ("v2", "cell"),
    [(("passed",), "yes; a note"), (("passed", "not-run"), "in part; a note"), (("not-run",), "no; a note")],
)
def test_case_that_did_not_pass_is_no_yes(v2: tuple[str, ...], cell: str) -> None:
    mode = Shown("some", v2=v2, notes={"v2": "a note"})
    assert support_tables._ran(mode, "v2", {"passed"}) == cell
    assert "tp2-ngram-v2" in support_tables.passed_cases()


def test_all_reasons_of_a_refusal_are_named() -> None:
    both = engine(parallel_config__prefill_context_parallel_size=2, parallel_config__use_ubatching=True)
    with pytest.raises(Unsupported, match=r"^prefill context parallelism: .*; dual batch overlap: "):
        check_engine(both, "cpu")


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.feature)
def test_each_refusal_has_reason_and_message(refusal: Refusal) -> None:
    assert any(refusal.why(use) for use in DEVICES)
    names = [name for _, name, _, _ in string.Formatter().parse(refusal.message) if name]
    filled = str(refusal.because(**{name: f"<{name}>" for name in names}))
    assert all(f"<{name}>" in filled for name in names)


def test_other_scheduler_is_refused() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    for scheduler in (Scheduler, type("Derived", (Scheduler,), {})):
        check_scheduler(engine(scheduler_config__get_scheduler_cls=lambda scheduler=scheduler: scheduler))
    with pytest.raises(Unsupported, match=r"^scheduler Other: mode stage withholds blocks from vLLM's"):
        check_scheduler(engine(scheduler_config__get_scheduler_cls=lambda: type("Other", (), {})))


# ---------------------------------------------------------------- KV connectors


def with_connector(
    name: str, is_async: bool = True, module: str | None = None, hybrid: bool = False, **extra: Any
) -> Any:
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector=name, kv_role="kv_both", kv_connector_module_path=module, kv_connector_extra_config=extra
    )
    return engine(
        kv_transfer_config=transfer, scheduler_config__async_scheduling=is_async, model_config__is_hybrid=hybrid
    )


def test_each_connector_of_vllm_is_listed() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert set(CONNECTORS) == set(KVConnectorFactory._registry)


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_connectors_that_are_not_refused(mode: str) -> None:
    check_connectors(engine(kv_transfer_config=None), mode)
    for name, connector in CONNECTORS.items():
        if not connector.refused:
            check_connectors(with_connector(name, is_async=connector.in_order), mode)
    inner = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("ExampleConnector", "OffloadingConnector")]
    check_connectors(with_connector("MultiConnector", connectors=inner), mode)
    check_connectors(with_connector("ExportConnector", module="export_connector"), mode)


@pytest.mark.parametrize("name", [name for name, connector in CONNECTORS.items() if not connector.in_order])
def test_unordered_connectors_are_refused_with_async_scheduling(name: str) -> None:
    check_connectors(with_connector(name), "stage")
    with pytest.raises(Unsupported, match=f"^KV connector {name} with async scheduling: it reads .*") as error:
        check_connectors(with_connector(name), "cow")
    assert error.value.parts[0][1] == "--no-async-scheduling, or VLLM_NWOR_MODE=stage"


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_connectors_that_are_refused(mode: str) -> None:
    for name, connector in CONNECTORS.items():
        if connector.refused:
            with pytest.raises(Unsupported, match=f"^KV connector {name}: {connector.refused}$"):
                check_connectors(with_connector(name), mode)
    inner = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("ExampleConnector", "HiSparseConnector")]
    with pytest.raises(Unsupported, match=r"^KV connector HiSparseConnector: it writes to its own slots$"):
        check_connectors(with_connector("MultiConnector", connectors=inner), mode)


@pytest.mark.parametrize("name", ["OffloadingConnector", "MooncakeStoreConnector"])
def test_hybrid_model_refuses_partial_tails(name: str) -> None:
    inner = {"connectors": [{"kv_connector": name, "kv_role": "kv_both"}]}
    for connector, extra in ((name, {}), ("MultiConnector", inner)):
        config = with_connector(connector, hybrid=True, **extra)
        check_connectors(config, "stage")
        with pytest.raises(Unsupported, match=f"^KV connector {name} with a hybrid model: .*; use mode stage$"):
            check_connectors(config, "cow")
    check_connectors(with_connector("SimpleCPUOffloadConnector", hybrid=True), "cow")


def test_a_custom_offloading_spec_is_refused() -> None:
    check_connectors(with_connector("OffloadingConnector", spec_name="CPUOffloadingSpec"), "stage")
    with pytest.raises(Unsupported, match=r"^KV connector OffloadingConnector: a custom spec does not declare"):
        check_connectors(with_connector("OffloadingConnector", spec_name="Mine", spec_module_path="mine"), "stage")


def test_a_custom_connector_must_declare_when_it_reads() -> None:
    """Also if it has the name of a connector of vLLM."""
    message = "it does not declare when it reads the cache; a class that reads in order sets reads_kv_cache_in_order"
    modules = {"SilentConnector": "export_connector"}
    modules["ExampleConnector"] = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector"
    for name, module in modules.items():
        with pytest.raises(Unsupported, match=f"^KV connector {name}: {message} = True$"):
            check_connectors(with_connector(name, module=module), "cow")


# ---------------------------------------------------------------- KV connectors with one recurrent state


def child(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


COMPLETE = [
    "MultiConnector", "OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector", "NixlConnector",
    "NixlPullConnector", "NixlPushConnector", "MooncakeConnector",
]  # fmt: skip


def test_connectors_that_recurrent_supports() -> None:
    check_state_connectors(engine(kv_transfer_config=None))
    check_state_connectors(engine())
    for name, connector in CONNECTORS.items():
        if name in COMPLETE:
            check_state_connectors(with_connector(name))
            continue
        why = connector.refused or connector.recurrent
        with pytest.raises(Unsupported, match=re.escape(f"recurrent with KV connector {name}: {why}")):
            check_state_connectors(with_connector(name))
    inner = [child("SimpleCPUOffloadConnector"), child("NixlConnector")]
    check_state_connectors(with_connector("MultiConnector", connectors=inner))
    with pytest.raises(Unsupported, match="with KV connector LMCacheMPConnector: keys of the `lmcache` package"):
        check_state_connectors(with_connector("MultiConnector", connectors=[*inner, child("LMCacheMPConnector")]))


@pytest.mark.parametrize(
    ("name", "reason", "extra"),
    [
        ("OffloadingConnector", "with sync_load_budget_bytes vLLM copies a state", {"sync_load_budget_bytes": 1 << 20}),
        ("OffloadingConnector", "the keys of a tier of type kvcr", {"secondary_tiers": [{"type": "kvcr"}]}),
        ("NixlConnector", "with bidirectional_kv_xfer a decoder exports", {"bidirectional_kv_xfer": True}),
        ("NixlPullConnector", "with bidirectional_kv_xfer a decoder exports", {"bidirectional_kv_xfer": True}),
    ],
)
def test_settings_of_connectors_that_recurrent_refuses(name: str, reason: str, extra: dict[str, Any]) -> None:
    """Also in a connector inside a MultiConnector. The transaction accepts these settings."""
    allowed = {"sync_load_budget_bytes": 0, "secondary_tiers": [{"type": "fs"}, {"type": "obj"}, {"type": "p2p"}]}
    check_state_connectors(with_connector(name, **allowed, bidirectional_kv_xfer=False))
    for config in (with_connector(name, **extra), with_connector("MultiConnector", connectors=[child(name, **extra)])):
        check_connectors(config, "stage")
        with pytest.raises(Unsupported, match=f"^recurrent with KV connector {name}: {reason}"):
            check_state_connectors(config)


def test_custom_connector_must_declare_complete_states() -> None:
    for name, module, reason in (
        ("SilentConnector", "export_connector", "it does not declare when it reads the cache"),
        ("ExportConnector", "export_connector", "it does not declare which states .* sets reads_complete_states"),
    ):
        with pytest.raises(Unsupported, match=f"^recurrent with KV connector {name}: {reason}"):
            check_state_connectors(with_connector(name, module=module))
    check_state_connectors(with_connector("StateConnector", module="state_connector"))


def test_models_of_gpu_cases_can_be_written(tmp_path: Path) -> None:
    """Every model that a case names can be created, also without a GPU."""
    models = tiny_models.write_models(tmp_path)
    used = json.dumps([[case.engine, getattr(case, "use", {})] for case in all_cases().values()])
    named = {word[1:] for word in re.findall(r'"(@\w+)"', used)}
    assert {"mla", "mla_draft", "gdn_mtp", "llama_lora", "real"} <= named <= {*models, "real"}


@pytest.mark.parametrize("name", engine_faults.RECURRENT)
def test_faults_of_gpu_cases_can_be_planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each class has the method, also without a GPU."""
    monkeypatch.setattr(engine_faults, "_planted", None)
    engine_faults.plant(None, name)
    engine_faults._planted.remove()
