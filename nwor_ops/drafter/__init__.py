"""A drafter's loop: one step body that runs eagerly, as a graph per step, or as one graph for all steps.

:class:`DraftLoop` is the loop; :class:`DraftBuffers` what its steps read and write; a :class:`DraftMetadata` makes
the attention metadata, for a back end of yours; a :class:`FirstPass` is what comes before the loop. How it works
and how to write an adapter: ``docs/draft_loop.md``; ``examples/draft_loop.py`` is one to run. Needs torch alone.
"""

from nwor_ops.drafter.buffers import DraftBuffers
from nwor_ops.drafter.dispatch import Dispatch, DispatchTable, GraphKey, keys_of_token_counts
from nwor_ops.drafter.loop import DraftLoop
from nwor_ops.drafter.metadata import DraftMetadata, FirstPass
from nwor_ops.drafter.sampler import DraftSampler

__all__ = [
    "Dispatch",
    "DispatchTable",
    "DraftBuffers",
    "DraftLoop",
    "DraftMetadata",
    "DraftSampler",
    "FirstPass",
    "GraphKey",
    "keys_of_token_counts",
]
