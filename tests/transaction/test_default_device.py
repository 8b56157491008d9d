"""Every tensor names its device: each class works if torch has another default device."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
import re

import manager_machine
import pytest
import recurrent_machine
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from state_machines import Counted

import nwor_ops
from nwor_ops.drafter import DraftBuffers, DraftLoop, DraftMetadata, DraftSampler, GraphKey

CLASSES = (
    nwor_ops.DraftCommitManager, nwor_ops.RecurrentStates, nwor_ops.StagingBuffer,
    nwor_ops.KVCacheInterceptor, nwor_ops.DraftVocabulary, DraftBuffers, DraftLoop, DraftSampler,
)  # fmt: skip

PACKAGE = pathlib.Path(nwor_ops.__file__).parent
FACTORY = r"torch\.(arange|as_tensor|empty|eye|full|linspace|ones|rand|randint|randn|tensor|zeros)"


@pytest.fixture(autouse=True)
def meta_is_the_default_device(monkeypatch):
    """Inside every method of the classes, and not in the code of a test. Tensors on meta raise or lose their values."""

    def wrapped(method):
        @functools.wraps(method)
        def on_meta(*arguments, **options):
            with torch.device("meta"):
                return method(*arguments, **options)

        return on_meta

    for cls in CLASSES:
        for name, member in list(vars(cls).items()):
            if inspect.isfunction(member):
                monkeypatch.setattr(cls, name, wrapped(member))
            elif isinstance(member, classmethod):
                monkeypatch.setattr(cls, name, classmethod(wrapped(member.__func__)))


@pytest.mark.parametrize(
    "machine",
    [manager_machine.Engine, manager_machine.StagedEngine, recurrent_machine.Engine],
    ids=["undo log", "shadow pages", "recurrent states"],
)
def test_random_windows(machine: type[Counted]) -> None:
    run_state_machine_as_test(machine, settings=settings(deadline=None, derandomize=True, max_examples=10))


@pytest.mark.parametrize("begins", [True, False])
def test_staging_buffer(begins: bool) -> None:
    buffer, cache = nwor_ops.StagingBuffer(max_num_tokens=2, max_num_rows=2, device="cpu"), torch.zeros(1, 2, 1, 4)
    buffer.register_layer("a", nwor_ops.LayerCache.packed(cache))
    buffer.allocate()
    interceptor = nwor_ops.KVCacheInterceptor(buffer)
    slots = torch.arange(2)
    for end in (lambda: interceptor.commit(torch.tensor([False, True])), interceptor.cancel):
        assert not begins or interceptor.begin(slots)
        interceptor.write("a", torch.ones(2, 1, 2), torch.ones(2, 1, 2), slots)
        end()
    assert cache.view(2, 4)[:, 0].tolist() == [0 if begins else 1, 1]


def test_draft_vocabulary() -> None:
    vocabulary = nwor_ops.DraftVocabulary(torch.eye(8), rows=4)
    vocabulary.update(torch.tensor([7]), torch.tensor([6]))
    vocabulary.reload()
    assert sorted(vocabulary.draft(torch.eye(8)[6:]).tolist()) == [6, 7]
    assert vocabulary.best(torch.eye(8)[7:])[1].tolist() == [7]
    vocabulary.reset()
    assert vocabulary.token_ids.tolist() == [0, 1, 2, 3]
    assert vocabulary.row_of_token.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]


def test_draft_loop() -> None:
    class NoMetadata(DraftMetadata):
        def build(self, key: GraphKey, num_reqs: int, step: int, capturing: bool = False) -> None: ...

        def update(self, key: GraphKey, metadata: None) -> None: ...

    buffers = DraftBuffers.allocate(max_num_reqs=2, num_drafts=3, device="cpu")
    sampler = DraftSampler(buffers, torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    buffers.idx_mapping[0], buffers.draft_tokens[0, 0], buffers.input_ids[0] = 0, 5, 5
    logits = torch.eye(16).roll(1, 1)  # each token is followed by the next one
    loop = DraftLoop(
        lambda key, _: logits[buffers.input_ids[: key.num_tokens]], sampler, buffers, NoMetadata(), 3, max_len=16
    )
    for mode in ("eager", "loop"):
        buffers.draft_tokens[0, 1:], buffers.input_ids[0] = -1, 5
        assert loop.run(1, mode, key=GraphKey(2), replay=False).tolist() == [[5, 6, 7]]


def test_source_names_each_device() -> None:
    """Also where only a GPU gets: with "cuda" as the default device, torch.zeros(pin_memory=True) raises."""
    calls = [
        (path.name, call.lineno, {keyword.arg for keyword in call.keywords})
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in ("testing", "examples")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and re.fullmatch(FACTORY, ast.unparse(call.func))
    ]
    assert sum("pin_memory" in named for *_, named in calls) >= 2
    assert [(file, line) for file, line, named in calls if "device" not in named] == []
