"""Draft loop: one step body that runs eagerly, or as one graph for all steps.

:class:`DraftLoop` is the loop, and :class:`DraftBuffers` holds the tensors that its steps read and write. A
:class:`DraftMetadata` builds the attention metadata of your back end. A :class:`FirstPass` is the pass before the loop.
``docs/guides/draft-loop.md`` explains how it works and how to write an adapter. ``examples/draft_loop.py`` is one to
run. Only torch is needed.
"""

from nwor_ops.drafter.buffers import DraftBuffers, GraphKey
from nwor_ops.drafter.loop import DraftLoop
from nwor_ops.drafter.metadata import DraftMetadata, FirstPass
from nwor_ops.drafter.sampler import DraftSampler

__all__ = [
    "DraftBuffers",
    "DraftLoop",
    "DraftMetadata",
    "DraftSampler",
    "FirstPass",
    "GraphKey",
]
