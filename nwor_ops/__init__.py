"""Faster speculative decoding: one recurrent state per request, draft graphs, and KV-cache writes as a transaction.

Importing the package declares ``torch.ops.nwor.*`` and loads the compiled kernels.

- :mod:`nwor_ops.ops`: the ops, one documented function each.
- :class:`DraftCommitManager`: the transaction (begin, write, then commit or cancel).
- :class:`RecurrentStates`: linear-attention layers with one state per request.
- :mod:`nwor_ops.drafter`: the drafter's loop in CUDA graphs.
- :class:`DraftVocabulary`: a small output head for drafters, whose rows follow the traffic.
- :mod:`nwor_ops.vllm`: the plugin.

Example:
    >>> import nwor_ops
    >>> nwor_ops.num_shadow_blocks(max_num_requests=8, max_drafts_per_request=3, block_size=16)
    16
"""

# ruff: noqa: I001  (`name as name` re-exports; isort would split them into one statement each)

from importlib import metadata as _metadata

from nwor_ops import library as _library
from nwor_ops import ops as ops
from nwor_ops import torch_fixes as _torch_fixes

try:
    __version__ = _metadata.version("nwor_ops")
except _metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

LIBRARIES = _library.loaded_libraries()
_torch_fixes.correct_slices()

import nwor_ops.meta as _meta  # noqa: E402, F401  (the fakes register themselves)
from nwor_ops.drafter.vocabulary import DraftVocabulary as DraftVocabulary  # noqa: E402
from nwor_ops.kv_cache import (  # noqa: E402
    LayerCache as LayerCache,
    Plane as Plane,
)
from nwor_ops.ops import *  # noqa: E402, F403
from nwor_ops.recurrent import (  # noqa: E402
    RecurrentCache as RecurrentCache,
    RecurrentStates as RecurrentStates,
)
from nwor_ops.transaction.staging import (  # noqa: E402
    KVCacheInterceptor as KVCacheInterceptor,
    StagingBuffer as StagingBuffer,
)
from nwor_ops.transaction.counters import (  # noqa: E402
    EngineStats as EngineStats,
    StagingStats as StagingStats,
    Stats as Stats,
    stats as stats,
)
from nwor_ops.transaction.manager import DraftCommitManager as DraftCommitManager  # noqa: E402
from nwor_ops.transaction.shadow_pages import num_shadow_blocks as num_shadow_blocks  # noqa: E402
from nwor_ops.transaction.window import (  # noqa: E402
    Layout as Layout,
    Window as Window,
)
