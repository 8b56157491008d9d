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
    DraftVocabulary,
    KVCacheInterceptor,
    LayerCache,
    Plane,
    RecurrentCache,
    RecurrentStates,
    StagingBuffer,
    num_shadow_blocks,
)
from nwor_ops.config import NworConfig
from nwor_ops.drafter import DraftBuffers, DraftLoop, DraftMetadata, DraftSampler, GraphKey

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
     (3, "x", [], {"default": None}, {"default": 1.5}, {"default": -1}, {"default": 2**62}), REFUSALS),
    ("StagingBuffer", StagingBuffer, STAGING, "device", DEVICES, REFUSALS),
    ("KVCacheInterceptor", KVCacheInterceptor, {"buffer": None}, "buffer", (None, 3, "x"), TypeError),
    ("Plane", Plane, {"view": CACHE}, "view",
     (*NO_TENSORS, torch.zeros(4), torch.zeros(1, 1, 1, 1, dtype=torch.complex128)), REFUSALS),
    ("Plane", Plane, {"view": CACHE}, "page_offsets",
     (3, "x", OFFSETS.long(), OFFSETS[:3], OFFSETS[0], OFFSETS.to("meta")), REFUSALS),
    ("RecurrentCache.new", RecurrentCache.new, RECURRENT, "device", DEVICES, REFUSALS),
    ("RecurrentCache.new", RecurrentCache.new, RECURRENT, "per_channel", (None, 1, "x"), TypeError),
    *(("RecurrentCache", RecurrentCache, dict(vars(RecurrentCache.new(**RECURRENT))), name,
       (*NO_TENSORS, torch.zeros(()), torch.zeros(2, 3).int()), REFUSALS)
      for name in vars(RecurrentCache.new(**RECURRENT))),
    ("RecurrentStates", RecurrentStates, STATES, "device", DEVICES, REFUSALS),
    ("DraftLoop", DraftLoop, LOOP, "model_fn", (None, 3), TypeError),
    ("DraftLoop", DraftLoop, LOOP, "sample_fn", (None, 3), TypeError),
    ("DraftLoop", DraftLoop, LOOP, "buffers", (None, 3, {}), TypeError),
    ("DraftSampler", DraftSampler, SAMPLER, "buffers", (None, 3), TypeError),
    ("DraftSampler", DraftSampler, SAMPLER, "temperature",
     (*NO_TENSORS, torch.zeros(2).double(), torch.zeros(2, 1), torch.zeros(2, device="meta")), REFUSALS),
    ("DraftSampler", DraftSampler, SAMPLER, "seeds", (*NO_TENSORS, torch.zeros(2), int32(1, 2)), REFUSALS),
    ("DraftSampler", DraftSampler, SAMPLER, "compute_logits", (3, "x"), TypeError),
    ("DraftBuffers.allocate", DraftBuffers.allocate, {"max_num_reqs": 2, "num_drafts": 3, "device": "cpu"}, "device",
     DEVICES, REFUSALS),
    *(("DraftBuffers", DraftBuffers, draft_tensors(), name, (*NO_TENSORS, torch.zeros(2, 3, 4)), REFUSALS)
      for name in draft_tensors()),
    ("DraftBuffers", DraftBuffers, draft_tensors(), "hidden_states", (3, torch.zeros(2), torch.zeros(1, 4)), REFUSALS),
    ("DraftBuffers", DraftBuffers, draft_tensors(), "registered", (None, [], {"a": None}), TypeError),
    ("DraftBuffers.register", BUFFERS.register, {}, "temperature", NO_TENSORS, TypeError),
    ("nwor", NworConfig, {}, "mode", (None, 3, "banana", []), ValueError),
    ("nwor", NworConfig, {}, "on_unsupported", (None, 3, "banana"), ValueError),
    ("nwor", NworConfig, {}, "audit", (None, 2, "maybe"), ValueError),
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
    results = {"EngineStats", "StagingStats", "Stats"}
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


def test_tensors_that_kernels_cannot_use():
    """A class refuses them where it gets them, not in its first window."""
    buffers, head = draft_tensors(), torch.eye(4)
    for what, call, value in (
        ("Plane: view", LayerCache.packed, CACHE),
        ("Plane: page_offsets", lambda offsets: Plane(CACHE, offsets), OFFSETS),
        ("DraftBuffers: seq_lens", lambda lens: DraftBuffers(**buffers | {"seq_lens": lens}), buffers["seq_lens"]),
        ("DraftVocabulary: head", lambda head: DraftVocabulary(head, rows=2), head),
        ("DraftVocabulary: head", DraftVocabulary(head, rows=2).reload, head),
    ):
        call(value)
        with pytest.raises(ValueError, match=f"^{what} must have its own memory, got a negative view; pass a copy$"):
            call(torch._neg_view(value))
    with pytest.raises(RuntimeError, match=r"^Plane: view must not require a gradient, the op has no backward"):
        LayerCache.packed(torch.zeros_like(CACHE, requires_grad=True))


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
    # A slot belongs to one group at a time. Layers may be interleaved. A cache without elements has no memory.
    manager.register_layer("b", LayerCache.packed(cache), group="other")
    both = torch.zeros(8, 4, 2, 16)
    manager.register_layer("c", LayerCache.packed(both[:, ::2]))
    manager.register_layer("d", LayerCache.packed(both[:, 1::2]))
    for name in ("e", "f"):
        manager.register_layer(name, LayerCache.packed(torch.zeros(0, 4, 2, 16)))
    manager.allocate()


# ---------------------------------------------------------------- copies

BOUND = {
    "DraftCommitManager": lambda: new_manager("cow"),
    "ShadowPages": lambda: new_manager("stage").recovery,
    "UndoLog": lambda: new_manager("cow").recovery,
    "LayerWriter": lambda: new_manager("cow").writer("a"),
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
    """A copy would refer to memory of the original, or to memory that nothing reads."""
    for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r": cannot be copied or pickled, it is bound to the memory of its"):
            make_copy(BOUND[kind]())
