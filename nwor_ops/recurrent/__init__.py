"""Recurrent states of linear attention as a transaction: one state per request, and a record of its last window.

    cache = RecurrentCache.new(num_slots=..., max_window=K + 1, num_key_heads=..., num_value_heads=..., ...)
    states = RecurrentStates(max_num_requests=..., device=...)
    states.register_layer("layers.0", cache)                              # every layer, then
    states.allocate()                                                     # once, before any capture

    states.begin(state_slots, query_start_loc)                            # each step
    ...  out = states.verify("layers.0", q, k, v, a, b, A_log, dt_bias)   # in each layer
    states.commit(num_kept)                                               # after sampling

A rejected draft token cannot be removed from a recurrent state. So the usual scheme keeps the state after each of the
K + 1 tokens of a window. Here the tokens of a window do not change the state. A record stores what each token would add
to it, in about a hundredth of the state's size. The kernel of the next window reapplies the accepted rows. Until then
they are *pending*. docs/guides/recurrent-states.md says which results are bit-identical.

Between begin and commit, the only allocation is ``verify``'s output if the caller passes none. Nothing synchronizes,
and nothing depends on values that only the host has. So ``verify`` may run eagerly, be traced by ``torch.compile``, or
be captured in a CUDA graph.

``cache`` has the states and records of one layer, and the launches that fold pending rows; ``cursors`` has what is
pending in each slot. ``states`` joins them to the protocol above. The vLLM plugin uses the first two with vLLM's steps.
"""

from nwor_ops.recurrent.cache import RecurrentCache
from nwor_ops.recurrent.states import RecurrentStates

__all__ = ["RecurrentCache", "RecurrentStates"]
