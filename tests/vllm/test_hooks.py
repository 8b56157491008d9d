"""Patches of vLLM: the effect of a patch, and that unloading the plugin restores every function and class of vLLM."""

from __future__ import annotations

import gc
import importlib
import inspect
import logging
import os
import pickle
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from engine_checks import STAGE
from engines import ENGINE, ENVIRONMENT, SMALL, Engines, model_folder, prompts
from processes import ROOT, environment

from nwor_ops.config import CarriedSettings, NworConfig
from nwor_ops.vllm import hooks
from nwor_ops.vllm.hooks import Hook, ModulePatch, PatchError, Patches
from nwor_ops.vllm.support.refusals import Unsupported
from nwor_ops.vllm.transaction.runners.v1 import V1


class Vanilla:
    def step(self, tokens: int) -> int:
        return tokens


def adding(number: int) -> Callable[[Callable[..., int]], Callable[..., int]]:
    def decorator(original: Callable[..., int]) -> Callable[..., int]:
        return lambda *arguments: original(*arguments) + number

    return decorator


@pytest.fixture
def vanilla() -> type[Vanilla]:
    """A fresh class."""

    class Fresh(Vanilla):
        step = Vanilla.step

        @classmethod
        def name(cls) -> str:
            return cls.__name__

        @staticmethod
        def number() -> int:
            return 1

    Fresh.__qualname__ = "Vanilla"
    return Fresh


# ---------------------------------------------------------------- one patch


def test_patch_of_class_object_and_module(vanilla: Any) -> None:
    derived, module = type("Derived", (vanilla,), {}), ModuleType("module")
    module.step = step = lambda tokens: tokens  # type: ignore[attr-defined]
    thing, method = vanilla(), vars(vanilla)["step"]
    patches = Patches("test")
    patches.put(derived, "step", adding(1))
    patches.put(thing, "step", adding(2))
    patches.put(module, "step", adding(3))
    assert (vanilla().step(0), derived().step(0), thing.step(0), module.step(0)) == (0, 1, 2, 3)
    assert [patch.target for patch in patches] == [
        "test_hooks.Derived.step",
        "test_hooks.Vanilla.step",
        "module.step",
    ]
    assert inspect.signature(derived.step) == inspect.signature(method)
    patches.undo()
    assert "step" not in vars(derived) | vars(thing)
    assert (vars(vanilla)["step"], module.step) == (method, step)
    assert list(patches) == [patch for patch in hooks.applied() if patch.by == "test"] == []


def test_class_methods_and_static_methods_are_restored(vanilla: Any) -> None:
    before = dict(vars(vanilla))
    patches = Patches("test")
    patches.put(vanilla, "name", lambda original: classmethod(lambda cls: f"our {original()}"))
    patches.put(vanilla, "number", lambda original: staticmethod(lambda: original() + 1))
    assert (vanilla().name(), vanilla().number()) == ("our Fresh", 2)
    patches.undo()
    assert dict(vars(vanilla)) == before


def test_a_feature_patches_a_function_once(vanilla: Any) -> None:
    first = Patches("test")
    first.put(vanilla, "step", adding(1))
    with pytest.raises(PatchError, match=r"nwor: test_hooks\.Vanilla\.step is already patched by test"):
        Patches("test").put(vanilla, "step", adding(1))
    with pytest.raises(PatchError, match="already patched"):
        Patches("test").put(vanilla(), "step", adding(1))
    Patches("test").put_once(vanilla, "step", adding(1))
    assert vanilla().step(0) == 1
    other = Patches("another feature")
    other.put(vanilla, "step", adding(10))
    with pytest.raises(PatchError, match="already patched"):  # also below the patch of another feature
        Patches("test").put(vanilla, "step", adding(1))
    assert vanilla().step(0) == 11
    other.undo()
    first.undo()
    first.put(vanilla, "step", adding(1))
    assert vanilla().step(0) == 1


def test_a_function_that_is_missing(vanilla: Any) -> None:
    patches = Patches("test")
    with pytest.raises(Unsupported, match=r"Vanilla\.other does not exist"):
        patches.put(vanilla, "other", adding(1))
    patches.put_once(vanilla, "other", lambda original: classmethod(lambda cls: original), may_be_missing=True)
    assert vanilla.other() is None
    patches.undo()
    assert not hasattr(vanilla, "other")


def test_methods_receive_the_original_first() -> None:
    thing = Vanilla()
    ours = SimpleNamespace(step=lambda original, tokens: original(tokens + 1) + 1)
    patches = Patches("test")
    patches.put_methods(thing, ours, ["step"])
    assert thing.step(0) == 2
    patches.undo()
    assert thing.step(0) == 0


def test_a_patch_below_foreign_code_is_not_undone(vanilla: Any) -> None:
    """The foreign function calls ours. Once it is gone, the patch can be undone."""
    before = vars(vanilla)["step"]
    patches = Patches("test")
    patches.put(vanilla, "step", adding(1))
    patched, vanilla.step = vanilla.step, lambda self, tokens: 100
    with pytest.raises(PatchError, match=r"Vanilla\.step: other code replaced the patch by test: undo that first"):
        patches.undo()
    vanilla.step = patched
    patches.undo()
    assert vars(vanilla)["step"] is before
    patches.put(vanilla, "step", adding(1))
    vanilla.step = before  # other code put the original back
    patches.undo()
    assert vars(vanilla)["step"] is before


def test_a_patched_object_can_be_freed() -> None:
    thing, patches = Vanilla(), Patches("test")
    patches.put_methods(thing, SimpleNamespace(step=lambda original, tokens: original(tokens)), ["step"])
    freed = weakref.ref(thing)
    del thing
    gc.collect()
    assert freed() is None
    assert list(patches) == []


# ---------------------------------------------------------------- the whole plugin


def functions_of(owner: Any) -> dict[str, Any]:
    """Return the functions and classes in the dict of a module, class or object, by name."""
    kinds = (classmethod, staticmethod, property, type)
    return {name: value for name, value in vars(owner).items() if callable(value) or isinstance(value, kinds)}


def vllm_now(names: list[str]) -> dict[Any, Any]:
    """Return the functions and classes of these modules and of their classes, and vLLM's tables that we add to."""
    import vllm.envs
    from vllm.model_executor.custom_op import op_registry_oot

    found: dict[Any, Any] = {}
    for name in names:
        module = importlib.import_module(name)
        found[name] = functions_of(module)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__.startswith("vllm."):
                found[value] = functions_of(value)
    tables = {"variables": list(vllm.envs.environment_variables), "layers": dict(op_registry_oot)}
    return found | tables | {"finders": list(sys.meta_path)}


def changed(before: dict[Any, Any], after: dict[Any, Any]) -> list[str]:
    """Return what differs between two results of :func:`vllm_now`."""
    found = []
    for owner, values in before.items():
        if isinstance(values, list):
            found += [str(owner)] if values != after[owner] else []
            continue
        names = [name for name in values | after[owner] if values.get(name) is not after[owner].get(name)]
        found += [f"{getattr(owner, '__qualname__', owner)}.{name}" for name in names]
    return sorted(set(found) - {"vllm.envs.__getattr__"})  # vLLM itself replaces it when an engine starts


def footprint_job(nwor: dict[str, Any], variables: dict[str, str]) -> tuple[list[str], list[str]]:
    """Run an engine. Return what changed in the modules of vLLM that were loaded before, and our patches."""
    os.environ.update(ENVIRONMENT | variables)
    modules = [name for name in sys.modules if name.split(".")[0] == "vllm"]
    before = vllm_now(modules)
    from vllm import LLM, SamplingParams

    llm = LLM(**ENGINE | {"model": model_folder(**SMALL), "additional_config": {"nwor": nwor} if nwor else {}})
    sampling = SamplingParams(max_tokens=4, detokenize=False)
    llm.generate([{"prompt_token_ids": request} for request in prompts(2)], sampling, use_tqdm=False)
    assert V1.module in modules
    return changed(before, vllm_now(modules)), [patch.target for patch in hooks.applied()]


def test_engine_without_feature_changes_two_functions(engines: Engines) -> None:
    """Compared with an engine without the plugin; ``on_error`` alone is no feature.

    With ``VLLM_NWOR=off`` only vLLM's table of variables changes. The engine starts, although a setting is invalid.
    """
    switch = {"VLLM_NWOR": "off", "VLLM_NWOR_MODE": "cow", "VLLM_NWOR_RECURRENT": "1", "VLLM_NWOR_NO_SUCH": "1"}
    jobs: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({}, {"VLLM_PLUGINS": ""}),
        ({"mode": "stage", "draft_graphs": True}, switch),
        ({}, {}),
        ({"on_error": "stop", "draft_vocabulary": 0}, {}),
    ]
    vanilla, off, *others = [one.result() for one in [engines.submit(footprint_job, *job) for job in jobs]]
    assert vanilla[1] == []
    assert off[1] == ["vllm.envs.compile_factors"]
    assert set(off[0]) - set(vanilla[0]) == {"variables", "vllm.envs.compile_factors"}
    for changes, patched in others:
        assert patched == ["vllm.envs.compile_factors", "vllm.config.vllm.VllmConfig.__post_init__"]
        assert set(changes) - set(vanilla[0]) == {"vllm.envs.compile_factors", "VllmConfig.__post_init__"}


def test_settings_arrive_before_the_plugin() -> None:
    """In a new process vLLM reads its pickled configuration, and then loads the plugin."""
    sent = pickle.dumps({"nwor": CarriedSettings({"mode": "stage", "draft_graphs": False})}).hex()
    script = f"""
import pickle, sys
config = pickle.loads(bytes.fromhex("{sent}"))
assert config == {{"nwor": {{"mode": "stage", "draft_graphs": False}}}}
assert "nwor_ops.vllm" not in sys.modules
from nwor_ops.vllm import plugin
from nwor_ops.config import CarriedSettings
plugin.register()
import vllm.v1.core.sched.scheduler
from nwor_ops.vllm.hooks import applied
print(*[patch.target for patch in applied() if "Scheduler" in patch.target])
pickle.loads(pickle.dumps(CarriedSettings({{"draft_graphs": True}})))  # another engine in this process
print([*plugin._FINDER.patches["vllm.v1.engine.output_processor"].values()][0].draft_graphs)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    scheduler = "vllm.v1.core.sched.scheduler.Scheduler"
    expected = [f"{scheduler}.__init__", f"{scheduler}.update_from_output", "True"]
    assert done.stdout.split() == expected, done.stderr[-2000:]


def test_patch_of_changed_function_is_refused(vanilla: Any, caplog: pytest.LogCaptureFixture) -> None:
    module: Any = ModuleType("vllm.changed")
    module.Vanilla, logger = vanilla, logging.getLogger()
    for name, signature, problem in (
        ("Vanilla.step", "tokens, drafts", r"Vanilla\.step takes \('tokens',\), expected"),
        ("Vanilla.other", "tokens", r"Vanilla\.other does not exist"),
        ("Other.step", "tokens", r"module 'vllm\.changed' has no attribute 'Other'"),
    ):
        patch = ModulePatch(Hook("vllm.changed", name, signature), adding(1), "test", lambda config: True)
        with pytest.raises(RuntimeError, match=f"nwor: .*{problem}.*test was asked for"):
            patch.apply(module, NworConfig(mode="cow"), logger)
        patch.apply(module, NworConfig(mode="cow", on_unsupported="vanilla"), logger)
        assert re.search(f"nwor: test: not active: .*{problem}", caplog.messages[-1])
        assert vanilla().step(0) == 0
    patch = ModulePatch(Hook("vllm.changed", "Vanilla.step", "tokens"), adding(1), "test", lambda config: True)
    for _ in range(2):
        patch.apply(module, NworConfig(), logger)
    assert vanilla().step(0) == 1


PATCHED_MODULES = [
    "vllm.envs",
    "vllm.config.vllm",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.gpu.warmup",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.metrics.loggers",
    "vllm.v1.engine.core",
    "vllm.v1.spec_decode.llm_base_proposer",
]


def not_in_the_page(targets: list[str]) -> list[str]:
    """Return the patched attributes that docs/internals/hooks.md does not name."""
    page = (ROOT / "docs" / "internals" / "hooks.md").read_text()
    names = {target.rsplit(".", 1)[-1] for target in targets} - {"variables", "finders"}
    return sorted(name for name in names if f"{name}`" not in page)


def unloading_job(nwor: dict[str, Any], requests: list[list[int]]) -> dict[str, Any]:
    """Run requests, unload the plugin, and run them again on the same engine."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    import nwor_ops
    import nwor_ops.vllm

    before = vllm_now(PATCHED_MODULES)
    settings = ENGINE | {"model": model_folder(), "additional_config": {"nwor": nwor}}
    llm = LLM(**settings)
    sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, detokenize=False)

    def tokens(llm: Any) -> list[list[int]]:
        asked = [{"prompt_token_ids": request} for request in requests]
        return [list(done.outputs[0].token_ids) for done in llm.generate(asked, sampling, use_tqdm=False)]

    result: dict[str, Any] = {"tokens": [tokens(llm)], "patched": changed(before, vllm_now(PATCHED_MODULES))}
    [session] = nwor_ops.vllm.sessions()
    windows = session.stats().windows
    applied = hooks.applied()
    objects = [patch for patch in applied if not isinstance(patch.owner, ModuleType | type)]
    result["objects"] = sorted({patch.target for patch in objects})
    nwor_ops.vllm.unload()
    result["left"] = [
        *changed(before, vllm_now(PATCHED_MODULES)),
        *(patch.target for patch in objects if patch.name in vars(patch.owner)),
        *(patch.target for patch in applied if getattr(patch.owner, patch.name, None) is patch.replacement),
        *map(str, hooks.applied()),
        *map(str, nwor_ops.vllm.sessions()),
    ]
    result["tokens"].append(tokens(llm))
    result["windows"] = (windows, session.stats().windows, nwor_ops.stats().windows)
    nwor_ops.vllm.register()
    result["patched again"] = changed(before, vllm_now(PATCHED_MODULES))
    return result


def test_unloading_restores_vllm_under_running_engine(engines: Engines) -> None:
    result = engines.submit(unloading_job, STAGE, prompts(6)).result()
    assert result["left"] == []
    assert {
        "GPUModelRunner.initialize_kv_cache", "Scheduler.__init__",
        "vllm.envs.compile_factors", "VllmConfig.__post_init__",
    } <= set(result["patched"])  # fmt: skip
    named = {target.rsplit(".", 1)[1] for target in result["objects"]}
    assert {"execute_model", "sample_tokens", "_prepare_inputs", "_sample", "do_kv_cache_update"} <= named
    assert not_in_the_page([*result["patched"], *result["objects"]]) == []
    assert result["patched again"] == result["patched"]
    assert result["tokens"][0] == result["tokens"][1]
    before, after, total = result["windows"]
    assert before == after > 0
    assert total == 0


def cuda_patches_job() -> dict[str, list[str]]:
    """Patch the modules of vLLM without an engine: runners, connectors, layers with one state. Then undo it."""
    os.environ |= {"VLLM_NWOR_RECURRENT": "1", "VLLM_NWOR_DRAFT_GRAPHS": "1", "VLLM_NWOR_MODE": "stage"}
    from vllm.model_executor.models import qwen3_next

    from nwor_ops.vllm import plugin
    from nwor_ops.vllm.recurrent import layer, models
    from nwor_ops.vllm.recurrent import plugin as recurrent

    modules = [*PATCHED_MODULES, *{patch.hook.module for patch in plugin.PATCHES}, qwen3_next.__name__]
    on_cpu = [model for model in models.ALL if not any(hook.cuda for hook in model.hooks[:1])]
    modules += [*dict.fromkeys(model.module for model in on_cpu)]
    modules += ["vllm.models.kimi_k3.nvidia.ops.third_party.kda", "vllm.models.qwen4_exp.nvidia.ple_layer"]
    modules += ["vllm.model_executor.layers.mamba.checkpoint"]
    before = vllm_now(modules)
    plugin.register()
    for model in on_cpu:
        layer.install(model)
    recurrent.add_records(qwen3_next.Qwen3NextForCausalLM)
    layer.watch_checkpoints()
    patched = changed(before, vllm_now(modules))
    plugin.unload()
    return {"patched": patched, "left": changed(before, vllm_now(modules)) + [str(patch) for patch in hooks.applied()]}


def test_unloading_restores_cuda_patches(engines: Engines) -> None:
    result = engines.submit(cuda_patches_job).result()
    assert result["left"] == []
    assert not_in_the_page(result["patched"]) == []
    for target in (
        "vllm.v1.worker.gpu.model_runner.init_speculator",
        "GPUModelRunner.execute_model",
        "vllm.v1.worker.gpu.warmup.run_mixed_prefill_decode_warmup",
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector.build_offloading_config",
        "MooncakeConnectorWorker.register_kv_caches",
        "MooncakeStoreWorker.__init__",
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.fused_sigmoid_gating_delta_rule_update",
        "vllm.model_executor.models.bailing_moe_v3.fused_recurrent_kda_fwd",
        "Qwen4ExpPLELayer.get_kv_cache_spec",
        "Qwen3NextForCausalLM.get_mamba_specs_from_config",
        "MambaPrefillCheckpointExporter.export",
        "layers.QwenGatedDeltaNetAttention",
        "layers.KimiGatedDeltaNetAttention",
        "variables",
    ):
        assert target in result["patched"]
