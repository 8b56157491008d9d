"""KV connectors on the real CPU engine: the rows that they see in the cache, and that they load the right ones."""

from __future__ import annotations

import logging
import os
import pathlib
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_checks import COW, STAGE, check_transaction
from engines import ENGINE, ENVIRONMENT, Engines
from tiny_models import tiny_folder
from vllm.forward_context import get_forward_context, override_forward_context

from nwor_ops import LayerCache, Layout, Window
from nwor_ops.config import NworConfig
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction.connectors import ConnectorAttachment
from nwor_ops.vllm.transaction.layers.target import TargetLayer
from nwor_ops.vllm.transaction.session import Session, Step
from nwor_ops.vllm.transaction.shadow_blocks import ShadowBlocks, smaller

VANILLA = {"mode": "off", "audit": True}
EXPORT = {"kv_connector": "ExportConnector", "kv_connector_module_path": "export_connector", "kv_role": "kv_both"}


def _job(settings: dict[str, Any], use: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(ENVIRONMENT)
    import engine_child
    from engine_pool import DEFAULTS

    result: dict[str, Any] = {}
    engine_child.run_engine(DEFAULTS | use | {"engine": settings}, result)
    sessions = result["workers"][0]["sessions"]
    return result | {"session": sessions[0] if sessions else None}


def _start(engines: Engines, nwor: dict[str, Any] | None, connector: dict[str, Any], **use: Any) -> Any:
    """Start an engine with these uses of a job; see ``engine_child``. Requests arrive while others decode."""
    settings = ENGINE | {"model": tiny_folder("llama"), "load_format": "auto", "kv_transfer_config": connector}
    return engines.submit(_job, settings | ({"additional_config": {"nwor": nwor}} if nwor else {}), use)


@pytest.mark.long
def test_what_an_exporter_sees(engines: Engines) -> None:
    use = {"exports": True, "requests": 12, "max_tokens": 20}
    started = [_start(engines, nwor, EXPORT, **use) for nwor in (VANILLA, COW, STAGE)]
    vanilla, cow, stage = results = [future.result() for future in started]
    for result in results:
        exports = result["exports"]
        assert exports["shadow_slots"] == 0
        # No request tells the worker that the last one has ended.
        assert [name.partition("-")[0] for name in exports["unfinished"]] in (["last"], [])
        for moment, found in exports["counts"].items():
            assert found["rows"] > 0
            assert found["missing"] == 0, f"{result['session']['mode']}, {moment}"
    assert all(found["rejected"] > 0 for found in vanilla["exports"]["counts"].values())
    assert cow["exports"]["counts"].pop("forward")["rejected"] > 0
    for result in (cow, stage):
        assert result["rounds"] == vanilla["rounds"]
        assert not any(found["rejected"] for found in result["exports"]["counts"].values()), result["exports"]
        check_transaction(result)


# ---------------------------------------------------------------- vLLM's own: what they load. GPU cases have more


SIMPLE = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 24},
}


def _example(folder: pathlib.Path) -> dict[str, Any]:
    path = tempfile.mkdtemp(dir=folder)  # each engine's own
    extra = {"shared_storage_path": path}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _multi(folder: pathlib.Path) -> dict[str, Any]:
    extra = {"connectors": [SIMPLE, _example(folder)]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def test_stored_rows_can_be_loaded(engines: Engines, tmp_path: pathlib.Path) -> None:
    """Generate, forget, load. The tokens are vanilla's, and the audit has compared the whole cache."""
    use = {"rounds": 2, "requests": 12, "drop_prefix_cache": True}
    started = [_start(engines, nwor, _example(tmp_path), **use) for nwor in (None, COW, STAGE)]
    vanilla, *ours = (future.result() for future in started)
    assert vanilla["session"] is None
    loaded = vanilla["metrics"]["external_prefix_cache_hits"]
    assert loaded > 0
    for result in ours:
        assert result["rounds"] == vanilla["rounds"]
        assert result["metrics"]["external_prefix_cache_hits"] == loaded
        assert result["session"]["others_write"] is False
        check_transaction(result)


def runner_with(transfer: Any) -> Any:
    return SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))


def _attached(transfer: dict[str, Any] | None) -> ConnectorAttachment:
    return ConnectorAttachment(runner_with(transfer))


def test_which_connectors_load_at_any_time(tmp_path: pathlib.Path) -> None:
    """A connector does if one of its parts does. So does a custom connector, because its times are not known."""
    example = _example(tmp_path)
    only = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    only["kv_connector_extra_config"] = {"connectors": [example, example]}
    assert not any(_attached(transfer).loads_any_time for transfer in (None, example, only))
    assert all(_attached(transfer).loads_any_time for transfer in (SIMPLE, _multi(tmp_path), EXPORT))


# ---------------------------------------------------------------- sizes


def test_connector_sides_agree_on_block_bytes() -> None:
    """The worker's sees the whole cache, the scheduler's what mode stage leaves of it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    page, blocks = spec.page_size_bytes, 40
    tensor = KVCacheTensor(page * blocks, ["0"], layer_stride=page * blocks, block_stride=page)
    whole = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(["0"], spec)])
    without = smaller(whole, ShadowBlocks(blocks, groups=(0,), per_group=7, block_bytes=page))
    assert (without.num_blocks, without.kv_cache_tensors[0].size) == (33, 33 * page)
    assert (whole.num_blocks, whole.kv_cache_tensors[0].size) == (blocks, blocks * page)
    derive = SimpleCPUOffloadScheduler._derive_cpu_config
    assert derive(without, 100 * page).num_blocks == derive(whole, 100 * page).num_blocks == 100


# ---------------------------------------------------------------- exports that wait


class Exporting:
    """A session with an open window, and an export of its layer that was called for inside."""

    def __init__(self) -> None:
        slots, cache = {"0": torch.tensor([4, 5, 6])}, torch.zeros(3, 4, 2, 16)
        layer = TargetLayer("layer", "0", cache, LayerCache.packed(cache), lambda *_: None, fused=True)
        self.session = Session(
            NworConfig.load({"nwor": {"mode": "cow"}}, {}), [layer], slots,
            max_num_requests=1, max_draft_tokens=2, max_drafts_per_request=2, shadow_blocks=None,
            logger=logging.getLogger("test"),
        )  # fmt: skip
        self.exported: list[Any] = []
        self.attached = ConnectorAttachment(runner_with(EXPORT))
        self.attached.follow(self.session)
        starts, counts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        self.session.bind(Layout(slots))
        self.session.begin(Step, Window(starts, counts, 2), lambda: ([0, 3], [2]))
        with override_forward_context("the step's"):
            self.attached.save_kv_layer(self.export, "layer", cache, None, more=1)
        assert self.exported == []

    def export(self, name: str, *rest: Any, more: int) -> None:
        self.exported.append((name, more, get_forward_context()))

    def fail(self, *_: Any) -> None:
        raise RuntimeError("planted")


EXPORTED = [("layer", 1, "the step's")]


def test_an_export_is_made_once_behind_the_commit() -> None:
    step = Exporting()
    step.session.commit(lambda manager: manager.commit_rejected(torch.tensor([1], dtype=torch.int32)), lambda: [2])
    assert step.exported == EXPORTED
    step.session.close_interrupted()
    assert step.exported == EXPORTED


@pytest.mark.parametrize("cancels", [True, False])
def test_export_of_cancelled_step_is_dropped(monkeypatch: pytest.MonkeyPatch, cancels: bool) -> None:
    """Also where the cancellation itself fails."""
    step = Exporting()
    if not cancels:
        monkeypatch.setattr(step.session.manager, "cancel", step.fail)
    step.session.close_interrupted()
    step.session.commit(step.fail, lambda: [1])  # the next step, without a window
    assert step.exported == []


def test_export_of_vanilla_step_is_made() -> None:
    step = Exporting()
    step.session.commit(step.fail, lambda: [1])
    assert step.session.vanilla_steps["commit failed"] == 1
    assert step.exported == EXPORTED


def test_export_outside_window_is_made_immediately() -> None:
    step = Exporting()
    step.session.close_interrupted()
    with override_forward_context("the drafter's"):
        step.attached.save_kv_layer(step.export, "layer", more=2)
    assert step.exported == [("layer", 2, "the drafter's")]


def test_exports_by_copied_table_are_refused() -> None:
    attached = _attached({"kv_connector": "ExampleConnector", "kv_role": "kv_both"})
    attached.check_tables({})
    with pytest.raises(Unsupported, match=r"^KV connector ExampleConnector, layer 3 with back end B: it exports in"):
        attached.check_tables({"3": "B"})
