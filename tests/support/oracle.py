"""Every op of nwor_ops in plain Python: slow and obvious, one token at a time. Each family has a module.

Names, argument order and in-place behaviour are those of `nwor_ops.ops`, on CPU tensors.
"""

from oracle_accept import *  # noqa: F403
from oracle_drafter import *  # noqa: F403
from oracle_recurrent import *  # noqa: F403
from oracle_shadow import *  # noqa: F403
from oracle_staging import *  # noqa: F403
from oracle_undo import *  # noqa: F403
