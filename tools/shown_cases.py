"""The tests that show each way to draft, parallel mode and KV connector, for the tables of tools/support_tables.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nwor_ops.vllm.support.features import SUPPORTED_VERSIONS, TRANSACTION


@dataclass(frozen=True)
class Shown:
    """A method of drafting or a parallel mode of vLLM, and the tests that run the transaction with it.

    ``v2`` and ``v1`` are cases of the CUDA runners: of tests/support/gpu_cases.py, and for parallel modes of
    tests/gpu/vllm/test_parallel.py (those that end in ``-stage`` run in mode stage). ``cpu`` are tests in tests/vllm.
    ``versions`` of vLLM have the method. ``notes`` are remarks for the table in docs/reference/support.md, by column.
    """

    name: str
    v2: tuple[str, ...] = ()
    v1: tuple[str, ...] = ()
    cpu: tuple[str, ...] = ()
    versions: tuple[str, ...] = SUPPORTED_VERSIONS[TRANSACTION]
    notes: Mapping[str, str] = field(default_factory=dict)


_V1_ONLY = {"v2": "vLLM has it only in V1"}
_V2_ONLY = dict.fromkeys(("v1", "cpu"), "vLLM has it only in V2")
_COW = {"v1": "in mode `cow`"}
# Each test compares the output with vanilla vLLM and audits every step, in both modes unless noted. For the MTP layers
# of each of 27 models vLLM has another name too, and treats all of them as `mtp`.
# fmt: off
METHODS = (
    Shown("ngram", v2=("v2-flash-ngram-full_and_piecewise",), v1=("v1-flash-ngram-full_and_piecewise",),
          cpu=("test_greedy_tokens_equal_vanillas",)),
    Shown("ngram_gpu", v2=("method-v2-ngram_gpu",), v1=("method-v1-ngram_gpu",),
          notes=_COW | {"cpu": "vLLM has it only on CUDA"}),
    Shown("suffix", v1=("method-v1-suffix",), notes=_V1_ONLY | {
          "cpu": "passed by hand: it needs `arctic-inference`"}),
    Shown("custom_class", cpu=("test_custom_class",), notes=_V1_ONLY),
    Shown("draft_model", v2=("v2-flash-draft_model",), v1=("v1-flash-draft_model",),
          cpu=("test_draft_model_layers_are_left_alone",)),
    Shown("eagle", v2=("v2-flash-eagle",), v1=("v1-flash-eagle",), cpu=("test_eagle",)),
    Shown("eagle3", v2=("method-v2-eagle3",), v1=("method-v1-eagle3",), cpu=("test_eagle3",)),
    Shown("mtp", v2=("method-v2-mla-mtp", "method-v2-gdn-mtp"), v1=("method-v1-mla-mtp", "method-v1-gdn-mtp"),
          cpu=("test_mtp",), notes=_COW | {"cpu": "MiMo"}),
    Shown("dflash", v2=("method-v2-dflash-synthetic",), v1=("method-v1-dflash-synthetic",), notes=_COW),
    Shown("dspark", v2=("method-v2-dspark",), notes=_V2_ONLY),
    Shown("extract_hidden_states", cpu=("test_extract_hidden_states",),
          notes={"cpu": "without its connector, which is refused"}),
    Shown("medusa", cpu=("test_medusa",), versions=("0.32",), notes=_V1_ONLY),
)
# fmt: on


def _both(*names: str) -> tuple[str, ...]:
    return tuple(name for case in names for name in (case, f"{case}-stage"))


# fmt: off
PARALLEL_MODES = (
    Shown("tensor parallelism", v2=_both("tp2-ngram-v2", "tp2-eagle-v2", "tp4-eagle-v2"),
          v1=_both("tp2-ngram-v1", "tp2-eagle-v1")),
    Shown("data parallelism, dense", v2=_both("dp2-dense-v2", "dp4-dense-v2"), v1=_both("dp2-dense-v1")),
    Shown("tensor x data", v2=_both("tp2-dp2-dense-v2")),
    Shown("several nodes, by vLLM's multiprocess launcher",
          v2=_both("nodes2-tp2-v2"), notes={"v1": "no", "cpu": "no"}),
    Shown("Ray", cpu=("test_serve_counts_for_ray_workers",),
          notes={"v2": "no", "v1": "no", "cpu": "tensor parallel 2, workers on another node"}),
)
# fmt: on


@dataclass(frozen=True)
class ConnectorTests:
    """Whether tests/vllm/test_connectors.py or test_connectors_gpu.py runs a KV connector with the transaction, and its
    cases of tests/support/gpu_cases.py with ``recurrent``. Empty: not tested; only vLLM's source was read."""

    transaction: str = ""
    recurrent: tuple[str, ...] = ()


def _offloaded(name: str) -> tuple[str, ...]:
    return tuple(f"one-state-connector-{name}{more}" for more in ("", "-mtp", "-8"))


# fmt: off
CONNECTOR_TESTS = {
    "ExampleConnector": ConnectorTests("yes"),
    "MultiConnector": ConnectorTests("yes, on a CPU"),
    "OffloadingConnector": ConnectorTests("yes", _offloaded("offloading")),
    "SimpleCPUOffloadConnector": ConnectorTests(
        "yes", (*_offloaded("simple-cpu"), "one-state-connector-default")),
    "LMCacheMPConnector": ConnectorTests("by hand, on a CPU with vLLM 0.32"),
    "LMCacheConnectorV1": ConnectorTests("yes, tokens not compared"),
    "NixlConnector": ConnectorTests(recurrent=("one-state-pd-nixl", "one-state-pd-nixl-align")),
}
# fmt: on
