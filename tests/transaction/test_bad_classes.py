"""Test invalid arguments: the error names the class or op, and the argument."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from transactions import one_thread  # noqa: F401

import nwor_ops
from nwor_ops import (
    DraftCommitManager,
    KVCacheInterceptor,
    LayerCache,
    Plane,
    RecurrentCache,
    RecurrentStates,
    StagingBuffer,
    num_shadow_blocks,
)
from nwor_ops.config import NworConfig
from nwor_ops.drafter import (
    DraftBuffers,
    DraftLoop,
    DraftMetadata,
    DraftSampler,
    GraphKey,
)

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
    "StagingBuffer": (StagingBuffer, STAGING, ("max_num_tokens", "max_num_rows")),
    "num_shadow_blocks": (
        num_shadow_blocks,
        {"max_num_requests": 1, "max_drafts_per_request": 1, "block_size": 4},
        ("max_num_requests", "max_drafts_per_request", "block_size"),
    ),
    "GraphKey": (GraphKey, {"num_reqs": 2, "query_len": 1}, ("num_reqs", "query_len")),
    "DraftLoop": (DraftLoop, LOOP, ("num_drafts", "max_len")),
    "DraftBuffers.allocate": (
        DraftBuffers.allocate,
        {"max_num_reqs": 2, "num_drafts": 3, "device": "cpu", "max_num_tokens": 2},
        ("max_num_reqs", "num_drafts", "max_num_tokens"),
    ),
    "RecurrentCache.new": (RecurrentCache.new, RECURRENT, tuple(RECURRENT)),
    "RecurrentStates": (RecurrentStates, STATES, ("max_num_requests",)),
}
# None selects a default for these.
MAY_BE_NONE = {"max_num_tokens of DraftBuffers.allocate"}


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
    ("RecurrentCache.new", RecurrentCache.new, RECURRENT, "device", DEVICES, REFUSALS),
    *(("RecurrentCache", RecurrentCache, dict(vars(RecurrentCache.new(**RECURRENT))), name,
       (*NO_TENSORS, torch.zeros(()), torch.zeros(2, 3).int()), REFUSALS)
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


def test_names_of_the_cpu():
    """The device of a tensor on "cpu:0" is "cpu"."""
    assert DraftCommitManager(**MANAGER | {"device": "cpu:0"}).device == CACHE.device


def test_unknown_settings_of_any_type():
    with pytest.raises(ValueError, match=r"^nwor: unknown settings \[3, 'modes'\]"):
        NworConfig.load({"nwor": {"modes": 1, 3: 2}})


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_an_unavailable_device():
    with pytest.raises(RuntimeError, match=r"^DraftCommitManager: device must be an available device, got 'cuda'"):
        DraftCommitManager(**MANAGER | {"device": "cuda"})


def test_every_public_class_is_tested():
    """Except results, which a caller only reads."""
    asked = {case[0].split(".")[0] for case in OTHERS} | {where.split(".")[0] for where in INTEGERS}
    results = {"EngineStats", "StagingStats", "Stats",
               "Dispatch"}  # fmt: skip
    protocols = {"DraftMetadata", "FirstPass"}
    for module in (nwor_ops, nwor_ops.drafter):
        classes = {name for name, value in vars(module).items() if isinstance(value, type)}
        assert classes - asked - results - protocols <= {"LayerCache", "Layout", "Window", "DraftVocabulary"}  # others


# ---------------------------------------------------------------- methods


def new_manager(mode: str) -> DraftCommitManager:
    manager = DraftCommitManager(**STAGE | {"mode": mode})
    manager.register_layer("a", LayerCache.packed(torch.zeros(8, 4, 2, 16)))
    manager.register_layer("b", LayerCache.opaque(torch.zeros(8, 4, 1, 8)))
    manager.allocate()
    return manager


def new_buffer() -> StagingBuffer:
    buffer = StagingBuffer(**STAGING)
    buffer.register_layer("a", LayerCache.packed(torch.zeros(8, 4, 2, 16)))
    buffer.allocate()
    return buffer


SLOTS, KEY = torch.tensor([0, 1, 8, 9]), torch.zeros(4, 2, 8)
CALLS: dict[str, dict[str, tuple[dict[str, Any], tuple[tuple[str, Any], ...]]]] = {
    "manager": {
        "register_layer": ({"name": "c", "cache": LayerCache.packed(CACHE)}, (("name", 3), ("cache", CACHE))),
        "forget_shadow_pages": ({"states": [0]}, (("states", [2]), ("states", [-1]), ("states", [0.5]))),
        "write": (
            {"name": "a", "key": KEY, "value": KEY, "slot_mapping": SLOTS},
            (("value", KEY.half()), ("slot_mapping", SLOTS.int()),
             ("kv_cache_dtype", "fp4"), ("token_offset", 5), ("token_offset", -1), ("token_offset", 0.5)),
        ),
        "log": ({"name": "b", "slot_mapping": SLOTS}, (("token_offset", 5), ("token_offset", True))),
    },
    "buffer": {
        "begin": ({"row_slots": SLOTS}, (("row_slots", SLOTS.int()), ("stage_rows", torch.arange(4)))),
        "stage": ({"name": "a", "key": KEY, "value": KEY}, (("value", KEY.half()), ("token_offset", 5))),
        "commit": ({"accepted": SLOTS > 1}, (("accepted", SLOTS), ("row_slots", SLOTS.int()))),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ["cow", "stage", "buffer"])
def test_methods_name_the_argument(kind):
    """A refused call changes nothing: the same call with valid arguments works."""
    thing = new_buffer() if kind == "buffer" else new_manager(kind)
    for method, (arguments, wrong) in CALLS["buffer" if kind == "buffer" else "manager"].items():
        target = DraftCommitManager(**(STAGE | {"mode": kind})) if method == "register_layer" else thing
        if method == "write":
            tables = {"default": int32(0, 1, 2, 3).view(2, 2)}
            thing.bind(nwor_ops.Layout({"default": SLOTS.clone()}, tables))
            thing.begin(nwor_ops.Window(int32(0, 2, 4), int32(1, 2), seq_lens=int32(2, 2)))
        for name, value in wrong:
            refused(getattr(target, method), arguments, name, value, name)
        getattr(target, method)(**arguments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
def test_tensors_that_are_not_dense():
    for value in (
        CACHE.to_sparse(),
        torch.nested.nested_tensor([CACHE[0]]),
        torch.quantize_per_tensor(CACHE, 1.0, 0, torch.qint8),
    ):
        refused(Plane, {}, "view", value, "^Plane: view must be a dense tensor, got ", TypeError)
        # In the words of an error about another type.
        refused(DraftCommitManager, MANAGER, "device", value, "^DraftCommitManager: device must be .* got ", TypeError)


def test_two_layers_of_a_group_have_different_caches():
    """The second layer would log what the first one wrote, and the undo would bring rejected rows back."""
    cache, values = torch.zeros(8, 4, 2, 16), torch.zeros(8, 4, 2, 16)
    manager = DraftCommitManager(**MANAGER)
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


@pytest.mark.parametrize("maker", ["_new_log", "PlaneList"])
def test_failed_allocation_can_be_repeated(maker, monkeypatch):
    """Memory may have been freed since. The second of several tensors does not fit."""
    manager = DraftCommitManager(**MANAGER)
    manager.register_layer("a", LayerCache.packed(torch.zeros(8, 4, 2, 16)))
    manager.register_layer("b", LayerCache.opaque(torch.zeros(8, 4, 1, 8)))
    module, made = nwor_ops.transaction.undo_log, []
    make = getattr(module, maker)

    def make_one(*arguments):
        if made:
            raise torch.OutOfMemoryError("no memory")
        made.append(1)
        return make(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, maker, make_one)
        with pytest.raises(torch.OutOfMemoryError):
            manager.allocate()
    manager.allocate()
    assert manager.log_bytes == new_manager("cow").log_bytes


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
def test_no_copies(kind):
    """A copy would refer to memory of the original, or to memory that nothing reads. This includes every part that
    holds a tensor."""
    for part in objects_in(BOUND[kind](), {}):
        if not isinstance(part, tuple) and any(isinstance(value, torch.Tensor) for value in vars(part).values()):
            for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=r": cannot be copied or pickled, it is bound to the memory of its"):
                    make_copy(part)
