"""What this plugin was built against, and the checks that stop it before it touches anything else.

Every function that is wrapped is named here with the parameters it must have. A vLLM that differs is
refused with a sentence; nothing is guessed.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass
from typing import Any

SUPPORTED_VERSIONS = ("0.32",)
TRIED_METHODS = ("ngram", "draft_model")


class Unsupported(Exception):
    """This engine cannot keep the promise; the message says what and why."""


@dataclass(frozen=True)
class Hook:
    """A function of vLLM's that the plugin wraps or calls.

    Attributes:
        module, name: where it is; ``name`` may have one dot.
        parameters: its parameters, in order, without ``self``.
    """

    module: str
    name: str
    parameters: tuple[str, ...]

    def problem(self) -> str | None:
        """None, or what does not match."""
        try:
            target: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            return f"{self.module}.{self.name} is not there ({error})"
        found = tuple(name for name in inspect.signature(target).parameters if name != "self")
        if found != self.parameters:
            return f"{self.module}.{self.name} takes {found}, expected {self.parameters}"
        return None


V1_HOOKS = (
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.initialize_kv_cache",
        ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._prepare_inputs",
        ("scheduler_output", "num_scheduled_tokens"),
    ),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._sample", ("logits", "spec_decode_metadata")),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.execute_model",
        ("scheduler_output", "intermediate_tensors"),
    ),
    Hook("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.sample_tokens", ("grammar_output",)),
    Hook(
        "vllm.v1.spec_decode.metadata",
        "SpecDecodeMetadata",
        (
            "draft_token_ids",
            "num_draft_tokens",
            "cu_num_draft_tokens",
            "cu_num_sampled_tokens",
            "target_logits_indices",
            "bonus_logits_indices",
            "logits_indices",
        ),
    ),
    Hook(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackendImpl.do_kv_cache_update",
        ("layer", "key", "value", "kv_cache", "slot_mapping"),
    ),
)


def version_problem() -> str | None:
    """None, or why this vLLM is not supported."""
    import vllm

    found = re.match(r"\d+\.\d+", vllm.__version__)
    if found is None or found[0] not in SUPPORTED_VERSIONS:
        return f"vLLM {vllm.__version__} is not supported; supported are {', '.join(SUPPORTED_VERSIONS)}"
    return None


def check_vllm() -> None:
    """Raises :class:`Unsupported` unless this vLLM is the one that the hooks were written for."""
    problems = [version_problem(), *(hook.problem() for hook in V1_HOOKS)]
    if any(problems):
        raise Unsupported("; ".join(problem for problem in problems if problem))


def check_engine(vllm_config: Any) -> None:
    """Raises :class:`Unsupported` for an engine configuration in which the promise cannot be kept."""
    parallel = vllm_config.parallel_config
    method = vllm_config.speculative_config.method
    refusals = {
        f"speculation by {method}: only {' and '.join(TRIED_METHODS)} have been tried": method not in TRIED_METHODS,
        "tensor parallelism: it has not been tried": parallel.tensor_parallel_size > 1,
        "data parallelism: it has not been tried": parallel.data_parallel_size > 1,
        "dual batch overlap: it has not been tried": getattr(parallel, "use_ubatching", False),
        "sleep mode: the cache moves when it wakes": vllm_config.model_config.enable_sleep_mode,
        "pipeline parallelism: only the last stage learns in time which drafts were accepted": (
            parallel.pipeline_parallel_size > 1
        ),
        "prefill context parallelism: its slot mappings are made anew inside the forward": (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1
        ),
        "decode context parallelism: it has not been tried": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "KV connectors: a connector may export a layer inside its attention op, before commit": (
            vllm_config.kv_transfer_config is not None
        ),
    }
    found = [sentence for sentence, applies in refusals.items() if applies]
    if found:
        raise Unsupported("; ".join(found))


def check_group_spec(name: str, spec: Any) -> None:
    """Raises :class:`Unsupported` for a KV-cache group whose states are not slots of tokens."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    tried = type(spec) in (FullAttentionSpec, SlidingWindowSpec)
    if not tried or isinstance(spec, MLAAttentionSpec):
        raise Unsupported(
            f"KV-cache group {name} is a {type(spec).__name__}; supported are FullAttentionSpec and SlidingWindowSpec"
        )
