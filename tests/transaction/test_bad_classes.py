"""Test invalid arguments of every public class and its methods: the error names the argument, and nothing changes.

After each refusal the same object is used again. The result must equal that of an object without a refused call.
"""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from transactions import one_thread  # noqa: F401

import nwor_ops
from nwor_ops import (
    DraftCommitManager,
    InFlightManager,
    KVCacheInterceptor,
    LayerCache,
    Plane,
    RecurrentCache,
    RecurrentStates,
    StagingBuffer,
    Window,
    current_manager,
    num_shadow_blocks,
    set_current_manager,
)
from nwor_ops.config import NworConfig
from nwor_ops.drafter import (
    DraftBuffers,
    DraftLoop,
    DraftMetadata,
    DraftSampler,
    GraphKey,
    keys_of_token_counts,
)
from nwor_ops.testing.layouts import same_memory, twin
from nwor_ops.transaction.counters import Stats
from nwor_ops.transaction.state import State

REFUSALS = (TypeError, ValueError)
NO_INTEGERS: tuple[Any, ...] = (None, 1.5, True, "8", [], torch.ones(1, dtype=torch.int64))
OUT_OF_RANGE = (0, -1, 2**31, 2**62)
NO_TENSORS: tuple[Any, ...] = (None, 3, "x", [1, 2])


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refused(call, arguments: dict[str, Any], name: str, value: Any, sentence: str, error=REFUSALS) -> None:
    """Check that `call` raises, and that the message names the call and the argument."""
    with pytest.raises(error, match=sentence) as caught:
        call(**arguments | {name: value})
    assert type(caught.value) in (error if isinstance(error, tuple) else (error,)), caught.value
    assert name in str(caught.value)
    assert "header" not in str(caught.value)
    assert "Expected a value of type" not in str(caught.value)


# ---------------------------------------------------------------- constructors and functions

CACHE, VALUES = torch.zeros(4, 4, 2, 16), torch.zeros(4, 4, 2, 16)
OFFSETS = torch.zeros(4, 16, dtype=torch.int32)
MANAGER = {"max_num_tokens": 8, "max_num_requests": 2, "max_draft_tokens": 4, "device": "cpu"}
STAGE = MANAGER | {"mode": "stage", "max_drafts_per_request": 2}
STAGING = {"max_num_tokens": 8, "max_num_rows": 8, "device": "cpu"}
DEVICES = (None, 3, 1.5, "banana", torch.float32)
RECURRENT = {
    "num_slots": 2,
    "max_window": 2,
    "num_key_heads": 1,
    "num_value_heads": 2,
    "key_size": 64,
    "value_size": 64,
}
RECORD = {"state": torch.zeros(2, 2, 64, 64), "max_window": 2, "num_key_heads": 1}
STATES = {"max_num_requests": 2, "device": "cpu"}


class Metadata(DraftMetadata):
    def build(self, key, num_reqs, step, capturing=False):
        return None

    def update(self, key, metadata):
        pass


def draft_tensors() -> dict[str, Any]:
    return {field: tensor.clone() for field, tensor in DraftBuffers.allocate(2, 3, "cpu").tensors().items()}


BUFFERS = DraftBuffers.allocate(2, 3, "cpu")
LOOP = {
    "model_fn": lambda key, metadata: torch.zeros(key.num_tokens, 9),
    "sample_fn": lambda key, output: torch.zeros(key.num_reqs, dtype=torch.int64),
    "buffers": BUFFERS, "metadata": Metadata(), "num_drafts": 3, "max_len": 9,
}  # fmt: skip
SAMPLER = {"buffers": BUFFERS, "temperature": torch.zeros(2), "seeds": torch.zeros(2, dtype=torch.int64)}

INTEGERS = {
    "DraftCommitManager": (
        DraftCommitManager,
        STAGE,
        ("max_num_tokens", "max_num_requests", "max_draft_tokens", "max_drafts_per_request"),
    ),
    "InFlightManager": (InFlightManager, MANAGER | {"windows": 2}, ("windows",)),
    "StagingBuffer": (StagingBuffer, STAGING, ("max_num_tokens", "max_num_rows")),
    "num_shadow_blocks": (
        num_shadow_blocks,
        {"max_num_requests": 1, "max_drafts_per_request": 1, "block_size": 4},
        ("max_num_requests", "max_drafts_per_request", "block_size"),
    ),
    "GraphKey": (GraphKey, {"num_reqs": 2, "query_len": 1}, ("num_reqs", "query_len")),
    "keys_of_token_counts": (
        keys_of_token_counts,
        {"token_counts": [4], "query_len": 2, "max_num_reqs": 4},
        ("query_len", "max_num_reqs"),
    ),
    "DraftLoop": (DraftLoop, LOOP, ("num_drafts", "max_len")),
    "DraftBuffers.allocate": (
        DraftBuffers.allocate,
        {"max_num_reqs": 2, "num_drafts": 3, "device": "cpu", "max_num_tokens": 2, "hidden_size": 4},
        ("max_num_reqs", "num_drafts", "max_num_tokens", "hidden_size"),
    ),
    "LayerCache.packed": (LayerCache.packed, {"cache": CACHE, "key_size": 8}, ("key_size",)),
    "RecurrentCache.new": (RecurrentCache.new, RECURRENT, tuple(RECURRENT)),
    "RecurrentCache.for_state": (RecurrentCache.for_state, RECORD, ("max_window", "num_key_heads")),
    "RecurrentStates": (RecurrentStates, STATES, ("max_num_requests",)),
}
# None selects a default for these.
MAY_BE_NONE = {"max_num_tokens of DraftBuffers.allocate", "hidden_size", "key_size"}


@pytest.mark.parametrize(
    ("where", "name"), [(where, name) for where, (_, _, names) in INTEGERS.items() for name in names]
)
def test_integers(where, name):
    call, arguments, _ = INTEGERS[where]
    call(**arguments)
    for value in NO_INTEGERS:
        if value is None and not MAY_BE_NONE.isdisjoint((name, f"{name} of {where}")):
            continue
        refused(call, arguments, name, value, rf"^{where}: {name} must be ")
    for value in OUT_OF_RANGE:
        refused(call, arguments, name, value, rf"^{where}: {name} must be at .*, got {value}$", ValueError)


def test_integers_of_numpy():
    """An integer argument need not be an int."""
    numpy = pytest.importorskip("numpy")
    manager = DraftCommitManager(**MANAGER | {"max_num_tokens": numpy.int32(8)})
    assert type(manager.max_num_tokens) is int


OTHERS: list[tuple[str, Any, dict[str, Any], str, tuple[Any, ...], Any]] = [
    ("DraftCommitManager", DraftCommitManager, MANAGER, "device", DEVICES, REFUSALS),
    ("DraftCommitManager", DraftCommitManager, MANAGER, "mode", (None, 3, "banana"), ValueError),
    ("DraftCommitManager", DraftCommitManager, STAGE, "shadow_blocks",
     (3, "x", {"default": None}, {"default": 1.5}, {"default": -1}, {"default": 2**62}), REFUSALS),
    ("StagingBuffer", StagingBuffer, STAGING, "device", DEVICES, REFUSALS),
    ("KVCacheInterceptor", KVCacheInterceptor, {"buffer": None}, "buffer", (None, 3, "x"), TypeError),
    ("Plane", Plane, {"view": CACHE}, "view",
     (*NO_TENSORS, torch.zeros(4), torch.zeros(1, 1, 1, 1, dtype=torch.complex128)), REFUSALS),
    ("Plane", Plane, {"view": CACHE}, "page_offsets",
     (3, "x", OFFSETS.long(), OFFSETS[:3], OFFSETS[0], OFFSETS.to("meta")), REFUSALS),
    ("LayerCache.packed", LayerCache.packed, {"cache": CACHE}, "cache", (*NO_TENSORS, torch.zeros(())), REFUSALS),
    ("LayerCache.packed", LayerCache.packed, {"cache": CACHE}, "key_size", (16, 17), ValueError),
    ("LayerCache.split", LayerCache.split, {"key_cache": CACHE, "value_cache": VALUES}, "key_cache",
     (*NO_TENSORS, torch.zeros(())), REFUSALS),
    ("LayerCache.split", LayerCache.split, {"key_cache": CACHE, "value_cache": VALUES}, "value_cache",
     (*NO_TENSORS, torch.zeros(()), CACHE[:2], CACHE.half(), CACHE, CACHE[..., 8:]), REFUSALS),
    ("LayerCache.opaque", lambda planes: LayerCache.opaque(planes), {"planes": CACHE}, "planes",
     (*NO_TENSORS, torch.zeros(())), REFUSALS),
    ("LayerCache", LayerCache, {"planes": (Plane(CACHE), Plane(VALUES))}, "planes",
     (None, CACHE, (), (CACHE, VALUES), (None,), (Plane(CACHE),), (Plane(CACHE), Plane(CACHE)),
      *((Plane(CACHE), Plane(other)) for other in (VALUES.half(), VALUES[:, :, :1], VALUES.view(8, 2, 2, 16)))),
     REFUSALS),
    ("LayerCache", LayerCache, {"planes": (Plane(CACHE),), "key_size": 8}, "key_size", ("x", 0, -1, 16, 2**62, True),
     REFUSALS),
    ("LayerCache", LayerCache, {"planes": (Plane(CACHE),), "key_size": 8}, "writable", (None, 3), TypeError),
    ("RecurrentCache.new", RecurrentCache.new, RECURRENT, "device", DEVICES, REFUSALS),
    ("RecurrentCache.new", RecurrentCache.new, RECURRENT, "dtype", (None, 3, "half", torch.int8), TypeError),
    ("RecurrentCache.new", RecurrentCache.new, RECURRENT, "state_dtype", (None, 3, torch.half), TypeError),
    ("RecurrentCache.new", RecurrentCache.new, RECURRENT, "per_channel", (None, 1), TypeError),
    ("RecurrentCache.for_state", RecurrentCache.for_state, RECORD, "state",
     (*NO_TENSORS, torch.zeros(()), torch.zeros(2, 2, 64, 64).half()), REFUSALS),
    *(("RecurrentCache", RecurrentCache, dict(vars(RecurrentCache.new(**RECURRENT))), name,
       (*NO_TENSORS, torch.zeros(()), torch.zeros(2, 3).int(), torch.zeros(2, 2, 2, 1, 64, device="meta")), REFUSALS)
      for name in vars(RecurrentCache.new(**RECURRENT))),
    ("RecurrentStates", RecurrentStates, STATES, "device", DEVICES, REFUSALS),
    ("DraftLoop", DraftLoop, LOOP, "model_fn", (None, 3), TypeError),
    ("DraftLoop", DraftLoop, LOOP, "sample_fn", (None, 3), TypeError),
    ("DraftLoop", DraftLoop, LOOP, "buffers", (None, 3, {}), TypeError),
    ("DraftLoop", DraftLoop, LOOP, "metadata", (None, 3, object()), TypeError),
    ("DraftLoop", DraftLoop, LOOP, "first_pass", (3, object()), TypeError),
    ("DraftSampler", DraftSampler, SAMPLER, "buffers", (None, 3), TypeError),
    ("DraftSampler", DraftSampler, SAMPLER, "temperature",
     (*NO_TENSORS, torch.zeros(2).double(), torch.zeros(2, 1), torch.zeros(2, device="meta")), REFUSALS),
    ("DraftSampler", DraftSampler, SAMPLER, "seeds", (*NO_TENSORS, torch.zeros(2), int32(1, 2)), REFUSALS),
    ("DraftSampler", DraftSampler, SAMPLER, "compute_logits", (3, "x"), TypeError),
    ("DraftSampler", DraftSampler, SAMPLER, "logits_cache", (3, "x", torch.zeros(2, 3)), REFUSALS),
    ("DraftBuffers.allocate", DraftBuffers.allocate, {"max_num_reqs": 2, "num_drafts": 3, "device": "cpu"}, "device",
     DEVICES, REFUSALS),
    *(("DraftBuffers", DraftBuffers, draft_tensors(), name, (*NO_TENSORS, torch.zeros(2, 3, 4)), REFUSALS)
      for name in draft_tensors()),
    ("DraftBuffers", DraftBuffers, draft_tensors(), "hidden_states", (3, torch.zeros(2), torch.zeros(1, 4)), REFUSALS),
    ("DraftBuffers", DraftBuffers, draft_tensors(), "registered", (None, [], {"a": None}), TypeError),
    ("DraftBuffers.register", BUFFERS.register, {}, "temperature", NO_TENSORS, TypeError),
    ("set_current_manager", set_current_manager, {}, "manager", (3, "banana"), TypeError),
    ("set_current_manager", set_current_manager, {"manager": None}, "device", ("banana", 3), REFUSALS),
    ("current_manager", current_manager, {}, "device", DEVICES, REFUSALS),
    ("nwor", NworConfig, {}, "mode", (None, 3, "banana", []), ValueError),
    ("nwor", NworConfig, {}, "on_unsupported", (None, 3, "banana"), ValueError),
    ("nwor", NworConfig, {}, "audit", (None, 1, "yes"), ValueError),
    ("nwor", NworConfig.load, {}, "environment", ({"VLLM_NWOR_MODE": None}, {"VLLM_NWOR": 1}, {3: "x"}),
     TypeError),
]  # fmt: skip


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case[0]}-{case[3]}")
def test_other_arguments(case):
    where, call, arguments, name, values, error = case
    for value in values:
        refused(call, arguments, name, value, rf"^{where}:? ", error)


@pytest.mark.parametrize("name", ["cpu", "cpu:0"])
def test_names_of_the_cpu(name):
    """The device of a tensor on "cpu:0" is "cpu"."""
    manager = DraftCommitManager(**MANAGER | {"device": name})
    manager.register_layer("a", LayerCache.packed(CACHE))
    set_current_manager(manager)
    assert current_manager(name) is current_manager(CACHE.device) is manager
    set_current_manager(None, name)
    assert current_manager(CACHE.device) is None


def test_a_current_manager_of_another_class():
    with pytest.raises(TypeError, match="manager must be a DraftCommitManager or None, got 3"):
        set_current_manager(3)  # type: ignore[arg-type]


def test_unknown_settings_of_any_type():
    with pytest.raises(ValueError, match=r"^nwor: unknown settings \[3, 'modes'\]"):
        NworConfig.load({"nwor": {"modes": 1, 3: 2}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_an_unavailable_device():
    for where, call in (
        ("current_manager", lambda: current_manager("cuda")),
        ("DraftCommitManager", lambda: DraftCommitManager(**MANAGER | {"device": "cuda"})),
    ):
        with pytest.raises(RuntimeError, match=rf"^{where}: device must be an available device, got 'cuda'"):
            call()


def test_every_public_class_is_tested():
    """Except results, which a caller only reads."""
    asked = {case[0].split(".")[0] for case in OTHERS} | {where.split(".")[0] for where in INTEGERS}
    results = {"EngineStats", "InterceptorStats", "RecurrentMemory", "RecurrentStats", "StagingStats", "Stats",
               "Dispatch"}  # fmt: skip
    protocols = {"DraftMetadata", "FirstPass"}
    for module in (nwor_ops, nwor_ops.drafter):
        classes = {name for name, value in vars(module).items() if isinstance(value, type)}
        assert classes - asked - results - protocols <= {"Window"}  # begin checks these


# ---------------------------------------------------------------- the manager


def new_manager(mode: str) -> DraftCommitManager:
    manager = DraftCommitManager(**STAGE | {"mode": mode})
    manager.register_layer("a", LayerCache.packed(torch.zeros(8, 4, 2, 16)))
    manager.register_layer("b", LayerCache.opaque(torch.zeros(8, 4, 1, 8)))
    manager.allocate()
    return manager


def new_window() -> Window:
    """Two requests of two tokens in pages 0 and 1. The second token of each is a draft."""
    return Window(
        int32(0, 2, 4), int32(1, 2), {"default": torch.tensor([0, 1, 4, 5])}, 2, seq_lens=int32(2, 2),
        block_tables={"default": int32(0, 2, 1, 3).view(2, 2)}, request_states=int32(0, 1),
    )  # fmt: skip


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(64.0).view(4, 2, 8), -torch.arange(64.0).view(4, 2, 8)


def everything(manager: DraftCommitManager) -> list[Any]:
    kept, caches = manager.recovery, [layer_class.caches for layer_class in manager._layers.classes]
    stage = manager.mode == "stage"
    records = [kept.held_slots, kept.saved_slots] if stage else [list(found.logs) for found in kept.classes]
    return [vars(manager.buffers), caches, records]


def steps(manager: DraftCommitManager, window: Window) -> dict[str, tuple[Any, dict[str, Any]]]:
    """One window, call by call, with the arguments of each call."""
    key, value = rows()
    slots = window.slot_mappings["default"]
    drafts, sampled = torch.tensor([5, 6]), torch.tensor([[5, 9], [8, -1]])
    return {
        "begin": (manager.begin, {"window": window}),
        "write": (manager.write, {"name": "a", "key": key, "value": value, "slot_mapping": slots}),
        "log": (manager.log, {"name": "b", "slot_mapping": slots}),
        "commit": (manager.commit, {"draft_token_ids": drafts, "sampled_token_ids": sampled}),
    }


def finish(manager: DraftCommitManager, window: Window, done: int = 0) -> None:
    """Finish one window, run another, and return the result."""
    for call, arguments in list(steps(manager, window).values())[done:]:
        call(**arguments)
    another = new_window()
    for call, arguments in steps(manager, another).values():
        call(**arguments)


def assert_refused_and_works(mode, method, name, value, sentence):
    """Open a window if the method needs one. After the refusal that window continues."""
    manager, untroubled, window = new_manager(mode), new_manager(mode), new_window()
    calls = steps(manager, window)
    done = list(calls).index("commit" if method == "commit_rejected" else method)
    for call, arguments in list(calls.values())[:done]:
        call(**arguments)
    before, state = twin([everything(manager), window]), manager.state
    call, arguments = calls.get(method, (manager.commit_rejected, {}))
    refused(call, arguments, name, value, sentence)
    assert manager.state is state
    assert same_memory([everything(manager), window], before)
    finish(manager, window, done)
    finish(untroubled, new_window())
    assert same_memory(everything(manager), everything(untroubled))
    assert manager.stats() == untroubled.stats()
    assert manager.stats().drafted == manager.stats().accepted + manager.stats().rejected == 4


NO_VECTORS_OF_INT32 = (*NO_TENSORS, torch.arange(3), int32(0, 2, 4).view(1, 3), torch.tensor(3).int(),
                       int32(0, 2, 4).to("meta"))  # fmt: skip
WINDOWS: dict[str, tuple[Any, ...]] = {
    "query_start_loc": (*NO_VECTORS_OF_INT32, int32(0, 2)),
    "cu_num_draft_tokens": NO_VECTORS_OF_INT32,
    "slot_mappings": (*NO_TENSORS, {}, {"default": None}, {"default": int32(0, 1, 4, 5)},
                      {"default": torch.zeros(2, 2, dtype=torch.int64)},
                      {"default": torch.zeros(4, dtype=torch.int64, device="meta")}),
    "num_draft_tokens": (1.5, True, "8", -1, 5, 2**31, 2**62),
    "num_bonus_tokens": (None, 1.5, "8", -1, 2**31, 2**62),
    "leading_zero": (None, "x", 1.5, 3),
}  # fmt: skip
STAGED_WINDOWS: dict[str, tuple[Any, ...]] = {
    "seq_lens": (*NO_VECTORS_OF_INT32, int32(2)),
    "block_tables": (*NO_TENSORS, {}, {"default": None}, {"default": int32(0, 1)},
                     {"default": torch.zeros(2, 2, dtype=torch.int64)}, {"default": int32(0, 2).view(1, 2)}),
    "request_states": (3, "x", torch.zeros(2), int32(0), int32(0, 1).view(1, 2), int32(0, 1).to("meta")),
}  # fmt: skip


# Mode `cow` ignores the fields of STAGED_WINDOWS.
@pytest.mark.parametrize(
    ("mode", "field"),
    [*(("cow", field) for field in WINDOWS), *(("stage", field) for field in WINDOWS | STAGED_WINDOWS)],
)
def test_invalid_windows_are_refused(mode, field):
    for value in (WINDOWS | STAGED_WINDOWS)[field]:
        manager, window = new_manager(mode), new_window()
        caches = [layer_class.caches for layer_class in manager._layers.classes]
        # The window was planned before open_window refused it, so it counts as cancelled.
        unchanged = [caches if field in STAGED_WINDOWS else everything(manager), window]
        before = twin(unchanged)
        with pytest.raises(REFUSALS, match=r"^begin: window") as caught:
            manager.begin(window._replace(**{field: value}))
        assert type(caught.value) in REFUSALS
        named = re.search(rf"\b({field}|max_draft_tokens)\b", str(caught.value))
        assert named, caught.value
        assert same_memory(unchanged, before)
        cancelled = manager.stats().cancelled
        assert cancelled == 0 or field in STAGED_WINDOWS
        finish(manager, window)
        assert manager.stats() == Stats(2 + cancelled, 4 + 2 * cancelled, 2, 2 + 2 * cancelled, 0, cancelled, 0)


@pytest.mark.parametrize("field", ["slot_mappings", "block_tables"])
def test_what_is_no_mapping(field):
    manager, window = new_manager("stage"), new_window()
    with pytest.raises(TypeError, match=f"^begin: window.{field} must be a mapping, got 3"):
        manager.begin(window._replace(**{field: 3}))


@pytest.mark.parametrize("counters", [3, torch.zeros(1, dtype=torch.int64), torch.zeros(9)])
def test_counters_that_are_none(counters):
    manager, window = new_manager("cow"), new_window()
    finish(manager, window)
    assert manager.stats(manager.buffers.counters.clone()) == manager.stats()
    with pytest.raises(REFUSALS, match=r"^stats: counters must "):
        manager.stats(counters)


CALLS: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("begin", "window", (None, 3, "x", (), torch.zeros(3)), "^begin: window must be a Window"),
    ("write", "name", (None, 3, []), "^write: name must be a string"),
    ("write", "key", NO_TENSORS, "^write: key must be a tensor"),
    ("write", "value", NO_TENSORS, "^write: value must be a tensor"),
    ("write", "slot_mapping", NO_TENSORS, "^write: slot_mapping must be a tensor"),
    ("write", "k_scale", NO_TENSORS[1:], "^write: k_scale must be a tensor"),
    ("write", "v_scale", NO_TENSORS[1:], "^write: v_scale must be a tensor"),
    ("write", "kv_cache_dtype", (None, 3), "^write: kv_cache_dtype must be a string"),
    ("write", "token_offset", (*NO_INTEGERS, False, 0.0, -4, 5, 9, 2**31, 2**62), "^write: token_offset must be "),
    ("log", "name", (None, 3, []), "^log: name must be a string"),
    ("log", "slot_mapping", NO_TENSORS, "^log: slot_mapping must be a tensor"),
    ("log", "token_offset", (*NO_INTEGERS, False, 0.0, -4, 5, 9, 2**31, 2**62), "^log: token_offset must be "),
    ("commit", "draft_token_ids", (*NO_TENSORS, torch.zeros(2), torch.zeros(2, 2).long()), "draft_token_ids must"),
    ("commit", "sampled_token_ids", (*NO_TENSORS, torch.zeros(2, 2), torch.zeros(2).long()), "sampled_token_ids must"),
    ("commit_rejected", "num_rejected", (*NO_TENSORS, torch.zeros(2), int32(1), torch.zeros(2, 2).int()),
     "num_rejected must"),
]  # fmt: skip


@pytest.mark.parametrize("case", CALLS, ids=lambda case: f"{case[0]}-{case[1]}")
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_invalid_arguments_of_calls_are_refused(mode, case):
    method, name, values, sentence = case
    for value in values:
        assert_refused_and_works(mode, method, name, value, sentence)


def on_meta(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.to("meta") if torch.is_tensor(leaf) else leaf, value)


def meta_manager(manager_of=DraftCommitManager, **limits) -> DraftCommitManager:
    manager = manager_of(**limits | {"device": "meta"})
    manager.register_layer("a", LayerCache.packed(torch.zeros(8, 4, 2, 16, device="meta")))
    manager.register_layer("b", LayerCache.opaque(torch.zeros(8, 4, 1, 8, device="meta")))
    manager.allocate()
    return manager


# Without data nothing tells whether a window was planned or counted.
META_WINDOWS: dict[str, Any] = {
    "query_start_loc": torch.arange(3),
    "cu_num_draft_tokens": torch.arange(2),
    "slot_mappings": {"default": int32(0, 1, 4, 5)},
}
META_STAGED_WINDOWS: dict[str, Any] = {
    "seq_lens": torch.arange(2),
    "block_tables": {"default": torch.zeros(2, 2, dtype=torch.int64)},
    "request_states": torch.zeros(2),
}


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_windows_without_data(mode):
    manager, window = meta_manager(**STAGE | {"mode": mode}), on_meta(new_window())
    for field, value in (META_WINDOWS | (META_STAGED_WINDOWS if mode == "stage" else {})).items():
        with pytest.raises(REFUSALS, match=rf"^begin: window.*{field}"):
            manager.begin(window._replace(**{field: on_meta(value)}))
        assert manager.state is State.CLOSED
    for call, arguments in steps(manager, window).values():
        call(**on_meta(arguments))
    assert manager.state is State.CLOSED


@pytest.mark.parametrize("end", ["commit", "commit_rejected", "cancel", "abandon"])
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_commits_without_data(mode, end):
    manager, window = meta_manager(**STAGE | {"mode": mode}), on_meta(new_window())
    good = {"commit": (torch.tensor([5, 6]), torch.tensor([[5, 9], [8, -1]])), "commit_rejected": (int32(0, 1),)}
    for _ in range(3):  # bound calls serve the third window
        manager.begin(window)
        for bad, arguments in good.items():
            with pytest.raises(REFUSALS, match=r"^\w+: \w+ must have dtype"):
                getattr(manager, bad)(*on_meta([tensor.double() for tensor in arguments]))
        assert manager.state is State.OPEN
        getattr(manager, end)(*on_meta(good.get(end, ())))
        assert manager.state is State.CLOSED


def test_deferred_windows_without_data():
    manager = meta_manager(lambda **limits: InFlightManager(windows=2, **limits), **MANAGER)
    for end in (manager.settle, manager.cancel_deferred, manager.forget):
        manager.begin(on_meta(new_window()))
        deferred = manager.defer()
        with pytest.raises(TypeError, match="num_rejected must have dtype"):
            manager.settle(deferred, on_meta(torch.zeros(2)))
        assert manager.in_flight == 1
        end(deferred, *([on_meta(int32(0, 1))] if end == manager.settle else []))
        assert manager.in_flight == 0
    manager.begin(on_meta(new_window()))


def test_a_token_offset_of_fewer_tokens():
    """It fits with as many tokens as are left, and not with one more."""
    for mode in ("cow", "stage"):
        manager, window = new_manager(mode), new_window()
        manager.begin(window)
        key, value = rows()
        slots = window.slot_mappings["default"]
        manager.write("a", key, value, slots.new_full((4,), -1), token_offset=4)
        with pytest.raises(ValueError, match=r"^write: token_offset must be 0 to 4 for 4 of 8 tokens .* got 5$"):
            manager.write("a", key, value, slots, token_offset=5)


def not_dense() -> list[torch.Tensor]:
    values = torch.zeros(3, 2, 8)
    return [
        values.to_sparse(),
        torch.nested.nested_tensor([values[0], values[1]]),
        torch.quantize_per_tensor(values, 1.0, 0, torch.qint8),
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_tensors_that_are_not_dense(mode):
    for value in not_dense():
        calls = [("write", "key"), ("write", "value"), ("write", "slot_mapping")]
        for method, name in [*calls, *([("log", "slot_mapping")] if mode == "cow" else [])]:
            sentence = f"^(write|log|write_kv|write_kv_logged|log_slots): {name} must be a dense tensor, got "
            assert_refused_and_works(mode, method, name, value, sentence)
    for value in (
        CACHE.to_sparse(),
        torch.nested.nested_tensor([CACHE[0]]),
        torch.quantize_per_tensor(CACHE, 1.0, 0, torch.qint8),
    ):
        refused(Plane, {}, "view", value, "^Plane: view must be a dense tensor, got ", TypeError)
        refused(LayerCache.packed, {}, "cache", value, r"^LayerCache.packed: cache must be a dense tensor", TypeError)
        with pytest.raises(TypeError, match=r"^LayerCache.opaque: planes\[0\] must be a dense tensor"):
            LayerCache.opaque(value)
        # In the words of an error about another type.
        refused(DraftCommitManager, MANAGER, "device", value, "^DraftCommitManager: device must be .* got ", TypeError)


def test_what_is_no_list():
    manager = new_manager("cow")
    deferring = InFlightManager(windows=2, **MANAGER)
    deferring.register_layer("a", LayerCache.packed(torch.zeros(8, 4, 2, 16)))
    deferring.allocate()
    deferring.begin(new_window())
    deferred = deferring.defer()
    for value in (3, True, 1.5, "loop", torch.tensor(0), object()):
        refused(
            manager.forget_shadow_pages, {}, "states", value, "^forget_shadow_pages: states must be a list", TypeError
        )
        refused(deferring.undo, {"deferred": deferred}, "requests", value, "^undo: requests must be a list", TypeError)
    manager.forget_shadow_pages(iter([0]))
    deferring.undo(deferred, iter([0]))


@pytest.mark.parametrize("mode", ["cow", "stage"])
def test_layers_and_counters(mode):
    good = {"name": "c", "cache": LayerCache.packed(CACHE), "group": "default"}
    manager = DraftCommitManager(**STAGE | {"mode": mode})
    for name, values in (("name", (None, 3)), ("cache", (None, CACHE, Plane(CACHE))), ("group", (None, 3, []))):
        for value in values:
            refused(manager.register_layer, good, name, value, rf"^register_layer: {name} must be ", TypeError)
    assert manager.layer_names == manager.groups == ()
    manager.register_layer("a", LayerCache.packed(torch.zeros(8, 4, 2, 16)))
    manager.register_layer("b", LayerCache.opaque(torch.zeros(8, 4, 1, 8)))
    manager.allocate()
    for value in (3, "x", torch.zeros(5), torch.zeros(2, dtype=torch.int64)):
        refused(manager.stats, {}, "counters", value, "^stats: counters must ")
    finish(manager, new_window())
    assert manager.stats() == Stats(2, 4, 2, 2, 0, 0, 0)


@pytest.mark.parametrize("manager_of", [DraftCommitManager, lambda **limits: InFlightManager(windows=2, **limits)])
def test_two_layers_of_a_group_have_different_caches(manager_of):
    """The second layer would log what the first one wrote, and the undo would bring rejected rows back."""
    cache, values = torch.zeros(8, 4, 2, 16), torch.zeros(8, 4, 2, 16)
    manager = manager_of(**MANAGER)
    manager.register_layer("a", LayerCache.split(cache, values))
    for other in (
        LayerCache.packed(cache),
        LayerCache.opaque(cache),
        LayerCache.split(torch.zeros_like(cache), values),
    ):
        with pytest.raises(
            ValueError, match=r"^register_layer: cache of 'b' must have other memory than 'a' of the same group"
        ):
            manager.register_layer("b", other)
    assert manager.layer_names == ("a",)
    # A slot belongs to one group at a time. Layers may be interleaved. A cache without elements has no memory.
    manager.register_layer("b", LayerCache.packed(cache), group="other")
    both = torch.zeros(8, 4, 2, 16)
    manager.register_layer("c", LayerCache.packed(both[:, ::2]))
    manager.register_layer("d", LayerCache.packed(both[:, 1::2]))
    for name in ("e", "f"):
        manager.register_layer(name, LayerCache.packed(torch.zeros(0, 4, 2, 16)))
    manager.allocate()


@pytest.mark.parametrize(
    ("mode", "maker"), [("cow", "_new_log"), ("cow", "WindowBuffers"), ("cow", "PlaneList"), ("stage", "WindowBuffers")]
)
def test_an_allocation_that_fails_can_be_tried_again(mode, maker, monkeypatch):
    """Memory may have been freed since. The second of several tensors does not fit."""
    manager, untroubled = DraftCommitManager(**STAGE | {"mode": mode}), new_manager(mode)
    manager.register_layer("a", LayerCache.packed(torch.zeros(8, 4, 2, 16)))
    manager.register_layer("b", LayerCache.opaque(torch.zeros(8, 4, 1, 8)))
    module = nwor_ops.transaction.manager if maker == "WindowBuffers" else nwor_ops.transaction.undo_log
    made, room = getattr(module, maker), [0 if maker == "WindowBuffers" else 1]

    def make(*arguments):
        if not room:
            return made(*arguments)
        room[0] -= 1
        if room[0] < 0:
            raise torch.OutOfMemoryError("no memory")
        return made(*arguments)

    monkeypatch.setattr(module, maker, make)
    with pytest.raises(torch.OutOfMemoryError):
        manager.allocate()
    room.clear()
    manager.allocate()
    for one in (manager, untroubled):
        finish(one, new_window())
    assert same_memory(everything(manager), everything(untroubled))
    assert manager.log_bytes == untroubled.log_bytes


# ---------------------------------------------------------------- the staging buffer and its interceptor


def new_buffer() -> StagingBuffer:
    buffer = StagingBuffer(**STAGING)
    for name in "ab":
        buffer.register_layer(name, LayerCache.packed(torch.zeros(8, 4, 2, 16)))
    buffer.allocate()
    return buffer


def of_buffer(buffer: StagingBuffer) -> list[Any]:
    layers = buffer._layers.values()
    return [vars(buffer), [layer.staged for layer in layers], [layer.cache.planes[0].view for layer in layers]]


def staging_steps(buffer: StagingBuffer) -> dict[str, tuple[Any, dict[str, Any]]]:
    key, value = rows()
    requests, positions = int32(0, 0, 1, 1), int32(0, 1, 0, 1)
    return {
        "begin": (buffer.begin, {"row_slots": torch.tensor([3, 4, 5, 6]), "stage_rows": int32(0, 1, 2, 3),
                                 "row_requests": requests, "row_positions": positions}),
        "stage": (buffer.stage, {"name": "a", "key": key, "value": value}),
        "stage b": (buffer.stage, {"name": "b", "key": key, "value": value}),
        "commit": (buffer.commit, {"accepted": int32(1, 2), "row_slots": torch.tensor([8, 9, 10, 11])}),
    }  # fmt: skip


NO_SLOTS = (3, "x", [1], int32(1, 2), torch.zeros(2, 2).long(), torch.zeros(9).long(), torch.zeros(2).long().to("meta"))
NO_ROWS = (3, "x", [1], torch.arange(4), int32(0, 1).view(1, 2), torch.zeros(9).int(), int32(1).to("meta"))
STAGING_CALLS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("begin", "row_slots", (None, *NO_SLOTS)),
    ("begin", "stage_rows", NO_ROWS),
    ("begin", "row_requests", (None, *NO_ROWS, int32(0, 1))),
    ("begin", "row_positions", (None, *NO_ROWS, int32(0, 1))),
    ("stage", "name", (None, 3, [])),
    ("stage", "key", (*NO_TENSORS, torch.tensor(3.0))),
    ("stage", "value", NO_TENSORS),
    ("stage", "token_offset", (*NO_INTEGERS, False, 0.0, -4, 9, 2**31, 2**62)),
    ("commit", "accepted", (*NO_TENSORS, torch.zeros(4), torch.zeros(2, 2).int(), torch.zeros(9).bool(),
                            int32(1, 0, 2, 0)[::2], int32(1, 2).to("meta"))),
    ("commit", "row_slots", NO_SLOTS),
]  # fmt: skip


@pytest.mark.parametrize("case", STAGING_CALLS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_staging_buffer(case):
    method, name, values = case
    for value in values:
        buffer, untroubled = new_buffer(), new_buffer()
        calls = staging_steps(buffer)
        for call, arguments in list(calls.values())[: list(calls).index(method)]:
            call(**arguments)
        before, state = twin(of_buffer(buffer)), buffer.state
        refused(*calls[method], name, value, rf"^{method}: .*{name} must |^{method}: row_requests and ")
        assert buffer.state is state
        assert same_memory(of_buffer(buffer), before)
        for call, arguments in list(calls.values())[list(calls).index(method) :]:
            call(**arguments)
        for call, arguments in staging_steps(untroubled).values():
            call(**arguments)
        assert same_memory(of_buffer(buffer), of_buffer(untroubled))
        assert buffer.stats() == untroubled.stats()


def test_staged_layers():
    buffer = StagingBuffer(**STAGING)
    good = {"name": "c", "cache": LayerCache.packed(CACHE), "dtype": torch.float32}
    for name, values in (
        ("name", (None, 3)), ("cache", (None, CACHE)), ("dtype", (3, "half")), ("kv_cache_dtype", (None, 3)),
        ("k_scale", (3, 1.0)), ("v_scale", (3, "x")),
    ):  # fmt: skip
        for value in values:
            refused(buffer.register_layer, good, name, value, rf"^register_layer: {name} must be ", TypeError)
    buffer.register_layer(**good)
    buffer.allocate()


@pytest.fixture(name="commits_fail")
def commits_that_fail(monkeypatch):
    """Make commit_staged fail from a layer on, until this is called with None."""
    real = nwor_ops.ops.commit_staged

    def fail_from(layer):
        made = [0]

        def commit_staged(*arguments):
            if layer is not None and made[0] >= layer:
                raise RuntimeError("the device is lost")
            made[0] += 1
            real(*arguments)

        monkeypatch.setattr(nwor_ops.ops, "commit_staged", commit_staged)

    return fail_from


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("again", ["commit", "commit to others", "reject"])
def test_a_staged_commit_that_failed_between_two_layers(commits_fail, layer, again):
    """Its outcome and its destinations are kept, the data of begin does not change, and the window is counted once."""
    buffer, untroubled = new_buffer(), new_buffer()
    for one in (buffer, untroubled):
        for call, arguments in list(staging_steps(one).values())[:-1]:
            call(**arguments)
    record = twin([buffer.row_slots, buffer.stage_rows, buffer.row_requests, buffer.row_positions])
    commit, arguments = staging_steps(buffer)["commit"]
    for _ in range(2):
        commits_fail(layer)
        with pytest.raises(RuntimeError, match="the device is lost"):
            commit(**arguments)
        assert same_memory([buffer.row_slots, buffer.stage_rows, buffer.row_requests, buffer.row_positions], record)
    commits_fail(None)
    if again == "reject":
        buffer.reject()
        untroubled.reject()
        # Layers before the failure keep their rows.
        changed = [bool(staged.cache.planes[0].view.any()) for staged in buffer._layers.values()]
        assert changed == [layer > 0, False]
    else:
        commit(**arguments if again == "commit" else {"accepted": int32(0, 0)})
        untroubled.commit(**arguments)
        assert same_memory(*([s.cache.planes[0].view for s in b._layers.values()] for b in (buffer, untroubled)))
    assert buffer.stats() == untroubled.stats()
    assert (buffer.stats().windows, buffer.stats().staged) == (1, 4)


@pytest.mark.parametrize("end", ["commit", "reject"])
def test_a_staged_commit_that_failed_without_data(monkeypatch, end):
    buffer = StagingBuffer(**STAGING | {"device": "meta"})
    buffer.register_layer("a", LayerCache.packed(torch.zeros(8, 4, 2, 16, device="meta")))
    buffer.allocate()
    buffer.begin(torch.arange(2, device="meta"))
    accepted = torch.ones(2, dtype=torch.bool, device="meta")

    def fail(*arguments):
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(nwor_ops.ops, "accept_staged", fail)
        with pytest.raises(RuntimeError, match="the device is lost"):
            buffer.commit(accepted)
    assert buffer.state is State.OPEN
    getattr(buffer, end)(*([accepted] if end == "commit" else []))
    assert buffer.state is State.CLOSED


def test_a_commit_that_is_refused_does_not_move_the_next_one():
    """The next call does not use the destinations of the refused one."""
    buffer = new_buffer()
    for call, arguments in list(staging_steps(buffer).values())[:-1]:
        call(**arguments)
    with pytest.raises(ValueError, match=r"^commit: accepted must be contiguous"):
        buffer.commit(int32(1, 0, 2, 0)[::2], torch.tensor([8, 9, 10, 11]))
    buffer.commit(int32(1, 2))
    view = buffer._layers["a"].cache.planes[0].view
    assert {b * 4 + n for b, n in view.flatten(2).any(-1).nonzero().tolist()} == {3, 5, 6}


def test_interceptor_arguments():
    buffer = new_buffer()
    for value in (None, 3, "banana"):
        refused(KVCacheInterceptor, {"buffer": buffer}, "mode", value, "^KVCacheInterceptor: mode must be", ValueError)
    with pytest.raises(RuntimeError, match=r"^KVCacheInterceptor: the staging buffer must be allocated first"):
        KVCacheInterceptor(StagingBuffer(**STAGING))
    interceptor = KVCacheInterceptor(buffer)
    with pytest.raises(ValueError, match=r"^KVCacheInterceptor: mode must be one of direct, staging, got 'stage'"):
        interceptor.mode = "stage"
    assert interceptor.mode == "staging"


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [ValueError("e"), TypeError("e"), IndexError("e"), RuntimeError("e"), KeyError("e"), Interrupted(), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_an_interceptor_leaves_no_window_open_after_its_first_layer(error, monkeypatch):
    """The error may be any that stage raises.

    If it is an error for invalid arguments (RuntimeError in some versions of torch), the window becomes a direct one.
    Any other error propagates.
    """
    buffer = new_buffer()
    interceptor = KVCacheInterceptor(buffer)
    interceptor.finish_warm_up()
    slots, (key, value) = torch.arange(4), rows()

    def stage_kv(*arguments):
        raise error

    assert interceptor.begin(slots)
    with monkeypatch.context() as patch:
        patch.setattr(nwor_ops.ops, "stage_kv", stage_kv)
        if isinstance(error, (ValueError, TypeError, IndexError, RuntimeError)):
            with pytest.warns(RuntimeWarning, match="a window was written directly: e"):
                interceptor.write("a", key, value, slots)
            assert interceptor.stats().refused_windows == 1
            assert buffer._layers["a"].cache.planes[0].view.any()
        else:
            with pytest.raises(type(error)):
                interceptor.write("a", key, value, slots)
    assert not interceptor.staging
    assert interceptor.begin(slots)
    for name in "ab":
        interceptor.write(name, key, value, slots)
    interceptor.commit(torch.tensor([True, False, False, True]))
    assert interceptor.stats().staging.committed == 2


@pytest.mark.filterwarnings("ignore:nwor_ops. a window was written directly")
def test_an_interceptor_with_an_unknown_layer():
    buffer = new_buffer()
    interceptor = KVCacheInterceptor(buffer)
    interceptor.finish_warm_up()
    slots, (key, value) = torch.arange(4), rows()
    for arguments, error, sentence in (
        (("z", key, value, slots), KeyError, "layer 'z' is not registered"),
        ((None, key, value, slots), TypeError, "name must be a string"),
        (("a", None, value, slots), TypeError, "^write: key must be a tensor"),
        (("a", key, None, slots), TypeError, "^write: value must be a tensor"),
    ):
        assert interceptor.begin(slots)
        with pytest.raises(error, match=sentence):
            interceptor.write(*arguments)
        assert not interceptor.staging
    with pytest.raises(TypeError, match=r"^write: slot_mapping must be a tensor"):
        interceptor.write("a", key, value, None)


# ---------------------------------------------------------------- copies

BOUND = {
    "DraftCommitManager": lambda: new_manager("cow"),
    "DraftCommitManager of stage": lambda: new_manager("stage"),
    "StagingBuffer": new_buffer,
    "KVCacheInterceptor": lambda: KVCacheInterceptor(new_buffer()),
    "RecurrentStates": lambda: RecurrentStates(**STATES),
    "DraftBuffers": lambda: BUFFERS,
    "DraftLoop": lambda: DraftLoop(**LOOP),
    "DraftSampler": lambda: DraftSampler(**SAMPLER),
    "WindowBuffers": lambda: new_manager("cow").buffers,
    "LayerCache": lambda: LayerCache.packed(torch.zeros(4, 2, 1, 8)),
    "LayerTable": lambda: new_manager("cow")._layers,
    "Plane": lambda: Plane(torch.zeros(4, 2, 1, 8)),
    "RecurrentCache": lambda: RecurrentCache.new(**RECURRENT),
}


@pytest.mark.parametrize("kind", BOUND)
def test_no_copies(kind):
    """A copy would refer to memory of the original, or to memory that nothing reads. This includes a module that holds
    such an object."""
    thing = BOUND[kind]()
    module = torch.nn.Module()
    module.thing = thing
    sentence = rf"^{kind.split()[0]}: cannot be copied or pickled, it is bound to the memory of its tensors; make anoth"
    for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        for held in (thing, [thing]) if make_copy is not copy.copy else (thing,):
            with pytest.raises(TypeError, match=sentence):
                make_copy(held)
    with pytest.raises(TypeError, match=sentence):
        copy.deepcopy(module)


def objects_in(thing, seen):
    """Yield the objects of this library that a thing refers to."""
    if id(thing) in seen or isinstance(thing, (type, torch.Tensor, str)):
        return
    seen[id(thing)] = thing
    if type(thing).__module__.startswith("nwor_ops"):
        yield thing
    entries = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple, set)) else ()
    for entry in [*entries, *getattr(thing, "__dict__", {}).values()]:
        yield from objects_in(entry, seen)


@pytest.mark.parametrize("kind", BOUND)
def test_no_copies_of_parts(kind):
    """Every part of these objects that holds a tensor refuses copies too."""
    for part in objects_in(BOUND[kind](), {}):
        if not isinstance(part, tuple) and any(isinstance(value, torch.Tensor) for value in vars(part).values()):
            with pytest.raises(TypeError, match="cannot be copied or pickled, it is bound to the memory of its tensor"):
                copy.deepcopy(part)
