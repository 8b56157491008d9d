"""Common base of managers, staging buffers and recurrent states: layers by name, and methods with a required order."""

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

# csrc/cuda/launch.h reads the same variable.
_DEBUG_SYNC = os.environ.get("VLLM_NWOR_DEBUG_SYNC") in ("1", "true")


class State(Enum):
    """State of the protocol."""

    REGISTERING = "registering layers"
    CLOSED = "between windows"
    OPEN = "inside a window"


class Stateful(BoundToMemory, Generic[_Layer]):
    """Holds a protocol state, and layers that are registered before the state first becomes ``CLOSED``."""

    _called = ""  # name in messages
    _closing = "commit() or cancel()"  # calls that end a window, for messages
    _cache_type: type = LayerCache  # type of the cache of a layer
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
        """Say in a message which call leads to the required state."""
        if state is State.REGISTERING:  # cannot be reached again
            return ""
        if self._state is State.REGISTERING:
            return "; call allocate() first"
        return f"; call {self._closing if self._state is State.OPEN else 'begin()'} first"

    def _check_new_layer(self, name: object, cache: Any) -> None:
        """Raise if a layer must not be registered under this name."""
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
        """Raise if a layer is called outside a window. Compiled and captured calls are not checked."""
        # A graph is captured once, outside any window. Its replays happen inside windows.
        if self._state is not State.OPEN and not torch.compiler.is_compiling() and not is_capturing(tensor):
            raise RuntimeError(f"{method} of layer {name!r}: no window is open; call begin() first")


def is_capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is being captured on the current stream of this tensor's device."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def waits_for_checks(tensor: Tensor) -> bool:
    """Return whether a check may read the tensor's data: only eagerly, and only in debug mode."""
    return _DEBUG_SYNC and not torch.compiler.is_compiling() and not is_capturing(tensor)
