"""Every op of nwor_ops in plain Python: slow and obvious, one token at a time. Each family has a module.

Names, argument order and in-place behaviour are those of `nwor_ops.ops`, on CPU tensors.
"""

from nwor_ops.testing.oracle.accept import *  # noqa: F403
from nwor_ops.testing.oracle.drafter import *  # noqa: F403
from nwor_ops.testing.oracle.recurrent import *  # noqa: F403
from nwor_ops.testing.oracle.shadow import *  # noqa: F403
from nwor_ops.testing.oracle.staging import *  # noqa: F403
from nwor_ops.testing.oracle.undo import *  # noqa: F403
