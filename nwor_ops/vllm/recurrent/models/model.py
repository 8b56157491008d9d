"""What the plugin knows about a hybrid model: its recurrent layers, their sizes, and the vLLM functions that it needs.

Nothing here imports vLLM at the top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nwor_ops.vllm.hooks import Hook

LAYERS = "vllm.model_executor.layers.mamba."
# For layer classes that inherit the method.
SPEC_HOOK = Hook(LAYERS + "abstract", "MambaBase.get_kv_cache_spec", "vllm_config")


class Heads(NamedTuple):
    """Heads of a recurrent layer on all ranks, and elements per head.

    ``per_channel``: each channel of a key has a decay (KDA). If False, each head has one.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    per_channel: bool = False


class LayerMethods:
    """Methods that our subclass of a vLLM layer adds.

    The subclass is created when it is installed: its bases are this class,
    :class:`~nwor_ops.vllm.recurrent.layer.RecurrentLayer` and vLLM's class.

    Attributes:
        gates: names of the arguments of vLLM's function for decays and betas.
    """

    gates: tuple[str, str] = ("g", "beta")

    def recurrence(self, *, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, **arguments: Any) -> Tensor:
        """Verify the windows of a batch in place of vLLM's function, and return the output.

        Tensors of tokens have a batch dimension of one: ``[1, T, ...]``. vLLM may pass ``out`` if it has only windows.
        """
        out = torch.empty_like(v) if out is None else out
        decays, betas = (arguments[name] for name in self.gates)
        self.verify(q[0], k[0], v[0], decays[0], betas[0], out[0])
        return out

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Model:
    """Models whose recurrent layers have the same class in vLLM.

    Attributes:
        architectures: names of the models' classes in vLLM.
        module, layer: module and name of the vLLM class of the layers.
        methods: what our subclass adds.
        recurrence: the vLLM function that computes all windows of a layer. Its argument ``initial_state`` is the state.
        hooks: vLLM functions that the plugin overrides, calls or relies on for this class only.
        heads: returns the sizes of a layer from the text configuration of a model.
        state_dtype_of: method of vLLM's ``MambaStateDtypeCalculator`` for these layers.
        dtype_settings: settings of vLLM's cache that this method takes. A layer ignores a setting that is missing here.
        without_record: modules and names of other recurrent classes in such models. They have one state in any case,
            so they need no record.
    """

    architectures: tuple[str, ...]
    module: str
    layer: str
    methods: type[LayerMethods]
    recurrence: Hook
    hooks: tuple[Hook, ...]
    heads: Callable[[Any], Heads]
    state_dtype_of: str = "gated_delta_net_state_dtype"
    dtype_settings: tuple[str, ...] = ("mamba_cache_dtype", "mamba_ssm_cache_dtype")
    without_record: tuple[tuple[str, str], ...] = ()

    def state_dtype(self, vllm_config: Any) -> Any:
        """Return the dtype of the states in an engine."""
        from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator

        settings = (getattr(vllm_config.cache_config, name) for name in self.dtype_settings)
        return getattr(MambaStateDtypeCalculator, self.state_dtype_of)(vllm_config.model_config.dtype, *settings)[1]


def gated_delta_net_heads(config: Any) -> Heads:
    """Return the heads of a Gated DeltaNet layer, which has one decay per head."""
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    return Heads(*heads, config.linear_key_head_dim, config.linear_value_head_dim)


def kda_heads(heads: int, width: int) -> Heads:
    """Return the heads of a KDA layer, which has as many heads of keys as of values."""
    return Heads(heads, heads, width, width, per_channel=True)
