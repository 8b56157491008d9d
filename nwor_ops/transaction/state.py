"""What a manager, a staging buffer and recurrent states have in common: layers by name, calls that come in an order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from nwor_ops import validation
from nwor_ops.kv_cache import LayerCache
from nwor_ops.validation import BoundToMemory

_Layer = TypeVar("_Layer")

# As csrc/cuda/launch.h reads it.
_DEBUG_SYNC = os.environ.get("VLLM_NWOR_DEBUG_SYNC") in ("1", "true")


class State(Enum):
    """Where one of them is in the protocol."""

    REGISTERING = "registering layers"
    CLOSED = "between windows"
    OPEN = "inside a window"


class Stateful(BoundToMemory, Generic[_Layer]):
    """A state, and layers that are registered before it is first ``CLOSED``."""

    _called = ""  # in messages
    _closing = "commit() or cancel()"  # what ends a window, in messages
    _cache_type: type = LayerCache  # what a layer is registered with
    device: torch.device
    _layers: Mapping[str, _Layer]
    _state = State.REGISTERING

    @property
    def state(self) -> State:
        return self._state

    def _require(self, state: State, method: str) -> None:
        if self._state is not state:
            raise RuntimeError(
                f"{method}: the {self._called} must be {state.value}, it is {self._state.value}{self._way_to(state)}"
            )

    def _way_to(self, state: State) -> str:
        """What to call before, in a message."""
        if state is State.REGISTERING:  # there is no way back
            return ""
        if self._state is State.REGISTERING:
            return "; call allocate() first"
        return f"; call {self._closing if self._state is State.OPEN else 'begin()'} first"

    def _check_new_layer(self, name: object, cache: Any) -> None:
        """Raises where a layer cannot be registered under this name."""
        validation.instance("register_layer: name", name, str, "a string")
        validation.instance("register_layer: cache", cache, self._cache_type, f"a {self._cache_type.__name__}")
        if name in self._layers:
            raise ValueError(f"register_layer: name must be new, {name!r} is registered already")
        if cache.device != self.device:
            raise TypeError(f"register_layer: cache of {name!r} must be on device {self.device}, got {cache.device}")

    def _layer(self, name: str, method: str) -> _Layer:
        try:
            return self._layers[name]
        except (KeyError, TypeError):
            validation.instance(f"{method}: name", name, str, "a string")
            raise KeyError(f"{method}: layer {name!r} is not registered") from None

    def _require_window(self, method: str, name: str, tensor: Tensor) -> None:
        """Raises for a layer that is called outside a window, where Python can tell."""
        # A capture is made once, outside any window; its replays happen inside one.
        if self._state is not State.OPEN and not torch.compiler.is_compiling() and not is_capturing(tensor):
            raise RuntimeError(f"{method} of layer {name!r}: no window is open; call begin() first")


def is_capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured on the stream that this tensor's ops would go to."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def waits_for_checks(tensor: Tensor) -> bool:
    """Whether what a tensor holds may be looked at for a check's sake: eagerly, in debug mode."""
    return _DEBUG_SYNC and not torch.compiler.is_compiling() and not is_capturing(tensor)


def raises_behind_launches(tensor: Tensor) -> bool:
    """Whether an op on this tensor may raise what its kernel met, when the kernel has run: on CUDA in debug mode."""
    return tensor.is_cuda and waits_for_checks(tensor)
