"""KV connectors with one recurrent state per request: an engine does not take pages with another layout for its own.

recurrent_aligned.py compares the states that connectors export."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from processes import environment

from nwor_ops.config import NworConfig
from nwor_ops.vllm.recurrent import connectors, supported
from nwor_ops.vllm.recurrent.page import RecordGeometry
from nwor_ops.vllm.support.connectors import CONNECTORS

GEOMETRY = RecordGeometry(rows=4, key_heads=2, value_heads=4, key_width=64, value_width=128, key_dtype=torch.bfloat16)
LAYOUT = f"recurrent-4x{GEOMETRY.num_bytes}"


# ---------------------------------------------------------------- stores that engines share


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations with ``rows`` have one state per request; a window of theirs has so many tokens."""
    monkeypatch.setattr(connectors, "uses_recurrent", lambda config: config.rows > 0)
    monkeypatch.setattr(RecordGeometry, "of", lambda config: replace(GEOMETRY, rows=config.rows))


def wrapped(connector: str, **contents: Any) -> Any:
    """A module with these contents, after this library has wrapped it."""
    name = supported.CONNECTOR_HOOKS[connector].module
    module = ModuleType(name)
    vars(module).update(contents)
    for patch in connectors.PATCHES:
        if patch.hook.module == name:
            patch.apply(module, NworConfig(), logging.getLogger())
    return module


def test_each_sharing_connector_has_a_hook() -> None:
    assert {hook.module for hook in supported.CONNECTOR_HOOKS.values()} == {
        patch.hook.module for patch in connectors.PATCHES
    }
    assert {name for name in supported.CONNECTOR_HOOKS if CONNECTORS[name].recurrent} == set()
    for hook in supported.CONNECTOR_HOOKS.values():
        assert hook.problem() is None


def test_modules_are_wrapped_when_vllm_imports_them() -> None:
    script = """
import importlib, nwor_ops.vllm.plugin as plugin
from nwor_ops.vllm.hooks import applied
from nwor_ops.vllm.recurrent.supported import CONNECTOR_HOOKS
plugin.register()
for hook in CONNECTOR_HOOKS.values():
    owner = importlib.import_module(hook.module)
    *classes, name = hook.name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    assert (owner, name) in [(patch.owner, patch.name) for patch in applied()], hook
    assert hook.problem() is None
"""
    variables = environment() | {"VLLM_NWOR_RECURRENT": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.usefixtures("layouts")
def test_a_tier_of_files_has_another_folder(tmp_path: Any) -> None:
    from vllm.v1.kv_offload import config as offload
    from vllm.v1.kv_offload.file_mapper import FileMapper

    sizes = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    given = {
        "groups": (SimpleNamespace(tokens_per_block=80, layer_names=("layer",)),),
        "model": offload.OffloadingModelConfig("folder/model", "bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=80),
        "parallel": SimpleNamespace(rank=0, is_parallelism_agnostic=False, **sizes),
        "canonical_layout": False,
    }
    config = offload.OffloadingConfig(
        **{field.name: given.get(field.name) for field in fields(offload.OffloadingConfig)}
    )
    module = wrapped("OffloadingConnector", build_offloading_config=lambda vllm_config, kv_cache_config: config)

    def folder(rows: int) -> str:
        found = module.build_offloading_config(SimpleNamespace(rows=rows), None)
        return FileMapper.from_offloading_spec(str(tmp_path), SimpleNamespace(config=found)).base_path

    assert folder(0) == FileMapper.from_offloading_spec(str(tmp_path), SimpleNamespace(config=config)).base_path
    assert len({folder(0), folder(4), folder(5)}) == 3
    assert f"model+{LAYOUT}_" in folder(4)


@pytest.mark.usefixtures("layouts")
def test_engines_with_other_layouts_fail_nixl_s_handshake() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash as compute

    module = wrapped("NixlConnector", compute_nixl_compatibility_hash=compute)

    def found(rows: int, function: Any) -> str:
        model = SimpleNamespace(
            model="model", dtype=torch.bfloat16, get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 64,
            get_total_num_hidden_layers=lambda: 4,
        )  # fmt: skip
        config = SimpleNamespace(
            rows=rows, model_config=model, cache_config=SimpleNamespace(cache_dtype="auto"), speculative_config=None,
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        )  # fmt: skip
        return function(config, "FLASH_ATTN", transfer_mode="pull")

    ours = module.compute_nixl_compatibility_hash
    assert found(0, ours) == found(0, compute)
    assert found(4, ours) == f"{found(0, compute)}+{LAYOUT}"
    assert found(5, ours) != found(4, ours)


@pytest.mark.usefixtures("layouts")
@pytest.mark.parametrize("prefix", ["", "mine"])
def test_mooncake_s_store_has_other_keys(prefix: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import KeyMetadata, PoolKey

    class Worker:
        def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self.key = PoolKey.build_prefix(
                KeyMetadata("model", 0, 0, 0, 0, cache_prefix=extra.get("cache_prefix", ""))
            )

    module = wrapped("MooncakeStoreConnector", MooncakeStoreWorker=Worker)

    def keys(rows: int) -> Iterator[str]:
        extra = {"cache_prefix": prefix} if prefix else {}
        config = SimpleNamespace(rows=rows, kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))
        for _ in range(2):  # a second worker of the same configuration
            yield module.MooncakeStoreWorker(config, None).key

    [vanilla], [ours], [others] = ({*keys(rows)} for rows in (0, 4, 5))
    assert vanilla == (f"{prefix}@" if prefix else "") + "model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0"
    assert ours.endswith(f"{LAYOUT}@model@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0")
    assert len({vanilla, ours, others}) == 3


@pytest.mark.usefixtures("layouts")
def test_mooncake_s_transfer_between_other_layouts_fails() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

    class Worker:
        def __init__(self, rows: int) -> None:
            self.vllm_config = SimpleNamespace(rows=rows)

        def register_kv_caches(self, kv_caches: Any) -> None:
            self.registered_layer_names = list(kv_caches)

    module = wrapped("MooncakeConnector", MooncakeConnectorWorker=Worker)

    def regions(rows: int) -> Any:
        worker = module.MooncakeConnectorWorker(rows)
        worker.register_kv_caches({"a": None, "b": None})
        return mooncake_connector._expand_transfer_regions(
            [0, 1], [8, 8], [8, 8], worker.registered_layer_names, [0, 1]
        )

    def problem(local: int, remote: int) -> str | None:
        return mooncake_connector._align_transfer_regions(regions(local), regions(remote))[2]

    assert problem(0, 0) is problem(4, 4) is None
    for local, remote in ((0, 4), (4, 0), (4, 5)):
        assert "has no matching consumer occurrence" in str(problem(local, remote))
