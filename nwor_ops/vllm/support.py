"""What this plugin was built against, and the checks that stop it before it touches anything else.

Every function that is wrapped is named here with the parameters it must have. A vLLM that differs is
refused with a sentence; nothing is guessed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

SUPPORTED_VERSIONS = ("0.32", "0.33")
# Ways to draft, by the device of the target model.
TRIED_METHODS = {"cpu": ("ngram", "draft_model"), "cuda": ("ngram", "draft_model", "eagle")}
# A pass of vLLM's compiler that replaces the writer of MLA layers by a kernel that also rotates the key. Its
# sisters for other layers exist for ROCm alone.
FUSED_MLA_WRITER = "fuse_rope_kvcache_cat_mla"


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


def wrap_once(
    owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], mark: str = "_nwor_wrapped"
) -> None:
    """Replace a function of vLLM's, where there is one.

    Args:
        owner: a module or class, or None where there is no such class.
        name: the function.
        wrapper: from the function to what replaces it.
        mark: what has it is not wrapped again. Wrappers of one function that know nothing of each other have marks of
            their own; a wrapper inherits those of what it wraps.
    """
    original = getattr(owner, name, None) if owner is not None else None
    if original is None or getattr(original, mark, False):
        return
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, mark, True)
    setattr(owner, name, wrapped)


def version_problem() -> str | None:
    """None, or why this vLLM is not supported."""
    import vllm

    found = re.match(r"\d+\.\d+", vllm.__version__)
    if found is None or found[0] not in SUPPORTED_VERSIONS:
        return f"vLLM {vllm.__version__} is not supported; supported are {', '.join(SUPPORTED_VERSIONS)}"
    return None


def check_vllm(hooks: Iterable[Hook]) -> None:
    """Raises :class:`Unsupported` unless this vLLM is one that the hooks were written for."""
    problems = [version_problem(), *(hook.problem() for hook in hooks)]
    if any(problems):
        raise Unsupported("; ".join(problem for problem in problems if problem))


def check_engine(vllm_config: Any, device_type: str) -> None:
    """Raises :class:`Unsupported` for an engine configuration in which the promise cannot be kept."""
    parallel, speculation = vllm_config.parallel_config, vllm_config.speculative_config
    tried = TRIED_METHODS.get(device_type, ())
    refusals = {
        f"device {device_type}: only {' and '.join(TRIED_METHODS)} are known": device_type not in TRIED_METHODS,
        f"speculation by {speculation.method}: on {device_type} only {', '.join(tried)} have been tried": (
            speculation.method not in tried
        ),
        "adaptive verification: it has not been tried": getattr(speculation, "enable_adaptive_verification", False),
        "data parallelism: it has not been tried": parallel.data_parallel_size > 1,
        "dual batch overlap: it has not been tried": getattr(parallel, "use_ubatching", False),
        "pipeline parallelism: only the last stage learns in time which drafts were accepted": (
            parallel.pipeline_parallel_size > 1
        ),
        "prefill context parallelism: its slot mappings are made anew inside the forward": (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1
        ),
        "decode context parallelism: it has not been tried": getattr(parallel, "decode_context_parallel_size", 1) > 1,
        "HiSparse: it writes to slots of its own": (
            getattr(getattr(vllm_config, "attention_config", None), "hisparse_config", None) is not None
        ),
        "KV connectors: a connector may export a layer inside its attention op, before commit": (
            vllm_config.kv_transfer_config is not None
        ),
    }
    found = [sentence for sentence, applies in refusals.items() if applies]
    if found:
        raise Unsupported("; ".join(found))


def check_passes(pass_config: Any) -> None:
    """Raises :class:`Unsupported` for a compilation pass that writes MLA caches past the layer's writer."""
    if getattr(pass_config, FUSED_MLA_WRITER, False):
        raise Unsupported(
            f"compilation pass {FUSED_MLA_WRITER} writes the cache past the layer's writer; switch it off with "
            f"-cc.pass_config.{FUSED_MLA_WRITER}=False"
        )


def check_group_spec(name: str, spec: Any) -> None:
    """Raises :class:`Unsupported` for a KV-cache group whose states are not slots of tokens."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    known = (FullAttentionSpec, SlidingWindowSpec, MLAAttentionSpec)
    if type(spec) not in known:
        raise Unsupported(
            f"KV-cache group {name} is a {type(spec).__name__}; supported are "
            + ", ".join(kind.__name__ for kind in known)
        )
