"""Audit of vLLM's own recurrent states: K + 1 states per request, without ``VLLM_NWOR_RECURRENT``.

vLLM stores the state after each token of a window, and continues from the state after the last accepted token. In each
step and Gated DeltaNet layer the audit compares three things:

- the number of accepted tokens that the layer uses with the number of tokens that were sampled for the request;
- the state that the layer continues from with the state that it stored there, in all bytes. Nothing else may have
  changed it in between;
- each state that the layer stores with a state that is computed again from the same inputs, in plain PyTorch.

The first difference names the step and the layer. The audit watches the kernel that vLLM's CPU engine calls.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.step_listener import StepListener
from nwor_ops.vllm.transaction.audit.undo import AuditError
from nwor_ops.vllm.transaction.audit.vllm_states import RecurrentGroup

KERNEL = "fused_sigmoid_gating_delta_rule_update_spec_cpu"
_NORM_EPS = 1e-6
_patches = Patches("audit of vLLM's states")
_audits: weakref.WeakValueDictionary[int, VllmStateAudit] = weakref.WeakValueDictionary()  # by the address of `A_log`
# Sums in another order. A state of 16 bits may round to an adjacent number, and the next token starts from it.
_TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2**-6, 2**-6), torch.float16: (2**-9, 2**-9)}


class VllmStateAudit(StepListener):
    """Compare the states of every window of vLLM.

    The audit copies the states of every window, so use it only with small models.

    Args:
        names: the name of each Gated DeltaNet layer, by the address of its ``A_log``.
        groups: the groups of recurrent layers.
        blocks_stay: whether a request keeps its blocks, so that a state can be found again in the next step. With
            prefix caching vLLM copies states to other blocks, and the second comparison is left out.
    """

    needs_begin = True

    def __init__(self, names: Mapping[int, str], groups: Sequence[RecurrentGroup], blocks_stay: bool = True) -> None:
        self._names, self._groups, self._blocks_stay = names, groups, blocks_stay
        self._kept: dict[tuple[str, int], Tensor] = {}  # by layer and first block: the states after each token
        self._num_kept: dict[int, int] = {}  # by first block: number of tokens that were sampled
        self._windows: list[int] = []  # first blocks of the step's windows, in the order of the batch
        self._with_drafts: list[int] = []  # requests with drafts, in the order of the batch
        self._counts = Counter(steps=0, windows=0, states_compared=0, states_computed=0)

    def summary(self) -> dict[str, int]:
        """Return the counts by name.

        - ``steps``, ``windows``: steps with windows, and windows, once for each KV-cache group.
        - ``states_compared``: states that a layer continued from, once for each layer.
        - ``states_computed``: states that were computed again.
        """
        return dict(self._counts)

    # ------------------------------------------------------------ events of a step

    def begin(self, query_start_loc: Sequence[int], num_draft_tokens: Sequence[int], *rest: Any) -> None:
        """Forget the states of requests whose tokens another kernel computes in this step."""
        self._with_drafts = [request for request, drafts in enumerate(num_draft_tokens) if drafts > 0]
        self._windows = []
        for group in self._groups:
            for request, (_, blocks) in enumerate(group.rows()):
                if request not in self._with_drafts:
                    self._forget(blocks)

    def commit(self, num_sampled: Callable[[], list[int]] | None, undone: bool) -> None:
        """Remember how many tokens of each window stay."""
        windows, self._windows = self._windows, []
        if not windows:
            return
        self._counts["steps"] += 1
        self._counts["windows"] += len(windows)
        if num_sampled is None or len(windows) % max(1, len(self._with_drafts)):
            self._forget(windows)  # the step failed
            return
        counts = num_sampled()
        for place, block in enumerate(windows):  # those of one group after those of another
            self._num_kept[block] = counts[self._with_drafts[place % len(self._with_drafts)]]

    def drop(self) -> None:
        windows, self._windows = self._windows, []
        self._forget(windows)

    def _forget(self, blocks: Iterable[int]) -> None:
        gone = set(blocks)
        for block in gone:
            self._num_kept.pop(block, None)
        for name, block in [key for key in self._kept if key[1] in gone]:
            del self._kept[name, block]

    # ------------------------------------------------------------ a layer

    def watched(self, compute: Callable[..., Tensor], **arguments: Any) -> Tensor:
        """Run vLLM's kernel for the windows of a layer, and compare the states before and after it.

        Raises:
            AuditError: a count or a state is wrong.
        """
        name = self._names[arguments["A_log"].data_ptr()]
        states, blocks = arguments["initial_state_source"], arguments["spec_state_indices"].tolist()
        accepted, starts = arguments["num_accepted_tokens"].tolist(), arguments["cu_seqlens"].tolist()
        read = []
        for row, count in zip(blocks, accepted, strict=True):
            self._compare_start(name, row, count, states)
            read.append(states[row[count - 1]].float().clone())  # the kernel may overwrite it
        out = compute(**arguments)
        if not any(block in self._windows for block, *_ in blocks):
            self._windows += [block for block, *_ in blocks]
        inputs = _Inputs(arguments)
        for row, state, start, end in zip(blocks, read, starts, starts[1:], strict=False):
            stored = states[row[: end - start]].clone()
            self._compare_stored(name, row[0], inputs.states(state, start, end), stored)
            self._kept[name, row[0]] = stored
        return out

    def _compare_start(self, name: str, blocks: list[int], count: int, states: Tensor) -> None:
        kept, sampled = self._kept.get((name, blocks[0])), self._num_kept.get(blocks[0])
        if kept is None or sampled is None or not self._blocks_stay:
            return
        where = f"{self._where} of layer {name}, request in block {blocks[0]}"
        if count != sampled:
            raise AuditError(
                f"{where}: vLLM continues from the state after {count} tokens of the last window, and {sampled} tokens "
                "were sampled"
            )
        differ = int((_bytes(states[blocks[count - 1]]) != _bytes(kept[count - 1])).sum())
        if differ:
            raise AuditError(
                f"{where}: the state after {count} tokens of the last window has changed since: {differ} bytes differ"
            )
        self._counts["states_compared"] += 1

    def _compare_stored(self, name: str, block: int, expected: Tensor, stored: Tensor) -> None:
        relative, absolute = _TOLERANCES[stored.dtype]
        close = torch.isclose(stored.float(), expected, rtol=relative, atol=absolute)
        self._counts["states_computed"] += len(stored)
        if not close.all():
            token = int((~close).nonzero()[0, 0])
            raise AuditError(
                f"{self._where} of layer {name}, request in block {block}: the state after token {token} of the window "
                f"is not the one that its inputs give: {int((~close[token]).sum())} of {close[token].numel()} numbers "
                "differ"
            )

    @property
    def _where(self) -> str:
        return f"nwor audit, step {self._counts['steps']}: vLLM's states"


class _Inputs:
    """The inputs of a layer's windows, as float32 with a head for each value head."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        heads = arguments["v"].shape[1] // arguments["k"].shape[1]
        key = arguments["k"].float()
        if arguments["use_qk_l2norm_in_kernel"]:
            key = key * torch.rsqrt((key * key).sum(-1, keepdim=True) + _NORM_EPS)
        self._keys, self._values = key.repeat_interleave(heads, dim=1), arguments["v"].float()
        x = arguments["a"].float() + arguments["dt_bias"].float()
        self._decays = torch.exp(-arguments["A_log"].float().exp() * F.softplus(x))
        self._rates = arguments["b"].float().sigmoid()

    def states(self, state: Tensor, start: int, end: int) -> Tensor:
        """Return the state ``[heads, dk, dv]`` after each of some tokens."""
        after = []
        for token in range(start, end):
            key = self._keys[token][..., None]
            state = state * self._decays[token][:, None, None]
            update = (self._values[token] - (state * key).sum(1)) * self._rates[token][:, None]
            state = state + key * update[:, None]
            after.append(state)
        return torch.stack(after) if after else state.new_empty(0, *state.shape)


def audit_states(runner: Any, groups: Sequence[RecurrentGroup]) -> VllmStateAudit | None:
    """Watch the Gated DeltaNet layers of an engine with vLLM's states.

    Returns:
        The audit, or None if this vLLM has no such layer or kernel on this device.
    """
    if runner.device.type != "cpu":
        return None
    import vllm._custom_ops as kernels

    context = runner.compilation_config.static_forward_context
    names = {
        layer.A_log.data_ptr(): name
        for name, layer in context.items()
        if hasattr(layer, "A_log") and hasattr(layer, "rearrange_mixed_qkv")
    }
    if not names or not hasattr(kernels, KERNEL):
        return None
    audit = VllmStateAudit(names, groups, runner.cache_config.mamba_cache_mode == "none")
    _audits.update(dict.fromkeys(names, audit))
    _patches.put_once(kernels, KERNEL, _watching)
    return audit


def _watching(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def watched(*args: Any, **arguments: Any) -> Tensor:
        """Run vLLM's kernel. vLLM calls it by keyword."""
        audit = _audits.get(arguments["A_log"].data_ptr()) if "A_log" in arguments else None
        return compute(*args, **arguments) if audit is None else audit.watched(compute, **arguments)

    return watched


def _bytes(state: Tensor) -> Tensor:
    return state.contiguous().view(torch.uint8)
