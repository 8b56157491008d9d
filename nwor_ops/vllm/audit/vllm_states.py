"""Audit of the recurrent states that vLLM keeps without ``VLLM_NWOR_RECURRENT``: K + 1 states per request.

vLLM stores the state after each token of a window, and continues from the state after the last accepted token. In each
step and Gated DeltaNet layer the audit compares three things:

- The number of accepted tokens that the layer uses, with the number of tokens that were sampled for the request.
- The state that the layer continues from, with the state that it stored there, in all bytes.
- Each state that the layer stores, with a state that is computed again from the same inputs, in plain PyTorch.

A FULL graph calls no Python, so an engine with such graphs is not audited.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nwor_ops.vllm.audit.cache import AuditError
from nwor_ops.vllm.audit.watch import RecurrentGroup, differing_bytes
from nwor_ops.vllm.hooks import Patches
from nwor_ops.vllm.step_listener import StepListener

Result = TypeVar("Result")

KERNEL = "fused_sigmoid_gating_delta_rule_update_spec_cpu"
TRITON_KERNEL = "fused_sigmoid_gating_delta_rule_update"
NORM_METHOD = "_forward_core_decode_spec_post_conv_fused_norm"
_CUDA_MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_NULL_BLOCK = 0
_NORM_EPS = 1e-6
_patches = Patches("audit of vLLM's states")
_audits: weakref.WeakValueDictionary[int, VllmStateAudit] = weakref.WeakValueDictionary()  # by the address of `A_log`
# Sums in another order. A state of 16 bits may round to an adjacent number, and the next token starts from it.
_TOLERANCES = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2**-6, 2**-6), torch.float16: (2**-9, 2**-9)}


class VllmStateAudit(StepListener):
    """Compare the states of every window of vLLM. Those of each request's last window are copied.

    Args:
        names: the name of each Gated DeltaNet layer, by the address of its ``A_log``.
        groups: the groups of recurrent layers.
        blocks_stay: whether a request keeps its blocks, so that a state can be found again in the next step. With
            prefix caching vLLM copies states to other blocks, and the second comparison is left out.
    """

    def __init__(self, names: Mapping[int, str], groups: Sequence[RecurrentGroup], blocks_stay: bool = True) -> None:
        self._names, self._groups, self._blocks_stay = names, groups, blocks_stay
        self._kept: dict[tuple[str, int], Tensor] = {}  # by layer and first block: the states after each token
        self._num_sampled: dict[int, int] = {}  # by first block: number of tokens that were sampled
        self._windows: list[int] = []  # first blocks of the step's windows, in the order of the batch
        self._with_drafts: list[int] = []  # requests with drafts, in the order of the batch
        self._counts = Counter(steps=0, windows=0, states_compared=0, states_computed=0)

    def summary(self) -> dict[str, int]:
        """Return the counts by name. Windows count once for each KV-cache group, states once for each layer."""
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
        for index, block in enumerate(windows):  # those of one group after those of another
            self._num_sampled[block] = counts[self._with_drafts[index % len(self._with_drafts)]]

    def drop(self) -> None:
        windows, self._windows = self._windows, []
        self._forget(windows)

    def _forget(self, blocks: Iterable[int]) -> None:
        gone = set(blocks)
        for block in gone:
            self._num_sampled.pop(block, None)
        for name, block in [key for key in self._kept if key[1] in gone]:
            del self._kept[name, block]

    # ------------------------------------------------------------ a layer

    def watched(self, call: LayerCall, compute: Callable[[], Result]) -> Result:
        """Run vLLM's kernel for the windows of a layer, and compare the states before and after it."""
        name, states, windows = self._names[call.A_log.data_ptr()], call.states, call.windows()
        if not windows:
            return compute()
        self._compare_starts(name, windows, states)
        read = states[[window.source for window in windows]].float()  # a copy: the kernel may overwrite it
        out = compute()
        if not any(window.blocks[0] in self._windows for window in windows):
            self._windows += [window.blocks[0] for window in windows]
        stored = states[[block for window in windows for block in window.blocks[: window.length]]]
        self._compare_stored(name, windows, call.states_after(windows, read), stored)
        if self._blocks_stay:
            of_windows = stored.split([window.length for window in windows])
            for window, of_window in zip(windows, of_windows, strict=True):
                self._kept[name, window.blocks[0]] = of_window.clone()  # not a view, which keeps all windows
        return out

    def _compare_starts(self, name: str, windows: list[_Window], states: Tensor) -> None:
        known = [
            (window, kept)
            for window in windows
            if (kept := self._kept.get((name, window.blocks[0]))) is not None and window.blocks[0] in self._num_sampled
        ]
        for window, _ in known:
            if window.num_kept != (sampled := self._num_sampled[window.blocks[0]]):
                raise AuditError(
                    f"{self._where_of(name, window)}: vLLM continues from the state after {window.num_kept} tokens of "
                    f"the last window, and {sampled} tokens were sampled"
                )
        if not known:
            return
        before = torch.stack([kept[window.num_kept - 1] for window, kept in known])
        present = states[[window.source for window, _ in known]]
        if differing_bytes(present, before):
            counts = [differing_bytes(*states) for states in zip(present, before, strict=True)]
            window, count = next((window, count) for (window, _), count in zip(known, counts, strict=True) if count)
            raise AuditError(
                f"{self._where_of(name, window)}: the state after {window.num_kept} tokens of the last window has "
                f"changed since: {count} bytes differ"
            )
        self._counts["states_compared"] += len(known)

    def _compare_stored(self, name: str, windows: list[_Window], expected: Tensor, stored: Tensor) -> None:
        """Compare the states after each token of the windows."""
        relative, absolute = _TOLERANCES[stored.dtype]
        self._counts["states_computed"] += len(stored)
        error = (stored.float() - expected).abs_()
        if error.sub_(expected.abs().mul_(relative)).max() <= absolute:  # faster than isclose; NaN fails
            return
        differ = ~torch.isclose(stored.float(), expected, rtol=relative, atol=absolute)
        counts = differ.flatten(1).sum(1).tolist()
        tokens = [(window, token) for window in windows for token in range(window.length)]
        for (window, token), count in zip(tokens, counts, strict=True):
            if count:
                raise AuditError(
                    f"{self._where_of(name, window)}: the state after token {token} of the window is not the one that "
                    f"its inputs give: {count} of {differ[0].numel()} numbers differ"
                )

    def _where_of(self, name: str, window: _Window) -> str:
        return f"{self._where} of layer {name}, request in block {window.blocks[0]}"

    @property
    def _where(self) -> str:
        return f"nwor audit, step {self._counts['steps']}: vLLM's states"


@dataclasses.dataclass(frozen=True)
class _Window:
    """A request's tokens in a call, and the blocks for the state after each of them."""

    blocks: list[int]
    num_kept: int
    start: int
    end: int

    @property
    def source(self) -> int:
        """The block that the layer continues from."""
        return self.blocks[self.num_kept - 1]

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer's kernel, the same for all kernels."""

    A_log: Tensor
    dt_bias: Tensor
    a: Tensor  # inputs of the decays and of the rates, [tokens, value heads]
    b: Tensor
    k: Tensor  # [tokens, heads, width]
    v: Tensor
    states: Tensor  # a view of the cache, [blocks, value heads, dk, dv]
    blocks: Tensor  # of each request, [requests, K + 1]; the kernel may have more rows than requests
    num_kept: Tensor  # tokens of each request's last window that stay
    starts: Tensor  # first token of each request, and the end of the last one
    normalize: bool = True  # whether the kernel divides keys by their norm

    @classmethod
    def of_kernel(cls, arguments: Mapping[str, Any]) -> LayerCall:
        """Return the call with these arguments of the CPU kernel, or of the Triton kernel, whose states are
        ``[blocks, heads, dv, dk]``."""
        is_cpu = "initial_state_source" in arguments
        return cls(
            **{name: arguments[name] for name in ("A_log", "dt_bias", "a", "b")},
            k=arguments["k"] if is_cpu else arguments["k"][0],
            v=arguments["v"] if is_cpu else arguments["v"][0],
            states=arguments["initial_state_source"] if is_cpu else arguments["initial_state"].mT,
            blocks=arguments["spec_state_indices" if is_cpu else "ssm_state_indices"],
            num_kept=arguments["num_accepted_tokens"],
            starts=arguments["cu_seqlens"],
            normalize=arguments["use_qk_l2norm_in_kernel"],
        )

    @classmethod
    def of_norm_kernel(cls, layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, metadata: Any) -> LayerCall:
        """Return the call of the kernel with the norm, from the arguments of the method that calls it."""
        value_heads, dv, dk = layer.kv_cache[1].shape[1:]
        keys = (mixed_qkv.shape[1] - value_heads * dv) // 2
        _, k, v = mixed_qkv.split([keys, keys, value_heads * dv], dim=1)
        requests = metadata.num_spec_decodes
        return cls(
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            a=a,
            b=b,
            k=k.unflatten(1, (-1, dk)),
            v=v.unflatten(1, (-1, dv)),
            states=layer.kv_cache[1].mT,
            blocks=metadata.spec_state_indices_tensor[:requests],
            num_kept=metadata.num_accepted_tokens[:requests],
            starts=metadata.spec_query_start_loc[: requests + 1],
        )

    def windows(self) -> list[_Window]:
        """Return the windows. Padded rows and runs without a cache name block 0, and the kernel skips them."""
        starts = self.starts.tolist()
        rows = zip(self.blocks.tolist(), self.num_kept.tolist(), starts, starts[1:], strict=False)
        windows = [_Window(blocks, num_kept, start, end) for blocks, num_kept, start, end in rows if end > start]
        return [window for window in windows if window.num_kept > 0 and window.source > _NULL_BLOCK]

    def states_after(self, windows: list[_Window], states: Tensor) -> Tensor:
        """Compute the states after each token of these windows, float32 ``[tokens, value heads, dk, dv]``, from the
        ``states`` before them. **Mutates** ``states``."""
        tokens = [token for window in windows for token in range(window.start, window.end)]
        keys, values = self.k[tokens].float(), self.v[tokens].float()
        if self.normalize:
            keys = keys * torch.rsqrt((keys * keys).sum(-1, keepdim=True) + _NORM_EPS)
        keys = keys.repeat_interleave(values.shape[1] // keys.shape[1], dim=1)[..., None]
        decays = torch.exp(-self.A_log.float().exp() * F.softplus(self.a[tokens].float() + self.dt_bias.float()))
        decays, rates = decays[..., None, None], self.b[tokens].float().sigmoid()[..., None]
        after = states.new_empty(len(tokens), *states.shape[1:])
        ends = list(itertools.accumulate(window.length for window in windows))
        for token in range(max(window.length for window in windows)):
            longer = [index for index, window in enumerate(windows) if window.length > token]
            of_windows = torch.tensor(longer, device=states.device)
            at = torch.tensor([ends[index] - windows[index].length + token for index in longer], device=states.device)
            state, key = states[of_windows] * decays[at], keys[at]
            state = state + key * ((values[at] - (state * key).sum(2)) * rates[at])[:, :, None]
            states[of_windows] = after[at] = state
        return after


def audit_states(runner: Any, groups: Sequence[RecurrentGroup]) -> VllmStateAudit | str:
    """Watch the Gated DeltaNet layers of a hybrid model with vLLM's states.

    Returns:
        The audit, or why these states cannot be audited.
    """
    context = runner.compilation_config.static_forward_context
    names = {
        layer.A_log.data_ptr(): name
        for name, layer in context.items()
        if hasattr(layer, "A_log") and hasattr(layer, "rearrange_mixed_qkv")
    }
    if not names:
        return "the recurrent layers of this model are no Gated DeltaNet layers of Qwen's kind"
    if runner.device.type != "cpu" and runner.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return (
            "FULL graphs call no Python; use --enforce-eager or "
            '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        )
    if not (_watch_cpu_kernel() if runner.device.type == "cpu" else watch_cuda_kernels()):
        return f"this vLLM has no kernel on {runner.device.type} that the audit knows"
    audit = VllmStateAudit(names, groups, runner.cache_config.mamba_cache_mode == "none")
    _audits.update(dict.fromkeys(names, audit))
    return audit


def _watch_cpu_kernel() -> bool:
    """Patch the kernel of the CPU engine. Return whether this vLLM has it."""
    import vllm._custom_ops as kernels

    if hasattr(kernels, KERNEL):
        _patches.put_once(kernels, KERNEL, _watching)
    return hasattr(kernels, KERNEL)


def watch_cuda_kernels() -> bool:
    """Patch the CUDA kernels of the layer in vLLM. Return whether this vLLM has the layer."""
    module = sys.modules.get(_CUDA_MODULE)
    if module is None or not hasattr(module, TRITON_KERNEL):
        return False
    _patches.put_once(module, TRITON_KERNEL, _watching)
    layer = getattr(module, "QwenGatedDeltaNetAttention", None)
    _patches.put_once(layer, NORM_METHOD, _watching_norm)
    return True


def _watching(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch of a kernel that vLLM calls by keyword. Calls without drafts are not watched."""

    def watched(*args: Any, **arguments: Any) -> Any:
        audit = _audits.get(arguments["A_log"].data_ptr()) if "A_log" in arguments else None
        if audit is None or arguments.get("num_accepted_tokens") is None:
            return compute(*args, **arguments)
        return audit.watched(LayerCall.of_kernel(arguments), lambda: compute(*args, **arguments))

    return watched


def _watching_norm(compute: Callable[..., Any]) -> Callable[..., Any]:
    def watched(layer: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, *args: Any, **arguments: Any) -> Any:
        """Run the layer's method whose kernel also computes the norm."""
        audit = _audits.get(layer.A_log.data_ptr())
        if audit is None:
            return compute(layer, mixed_qkv, b, a, *args, **arguments)
        metadata = arguments["attn_metadata"] if "attn_metadata" in arguments else args[-1]
        call = LayerCall.of_norm_kernel(layer, mixed_qkv, b, a, metadata)
        return audit.watched(call, lambda: compute(layer, mixed_qkv, b, a, *args, **arguments))

    return watched
