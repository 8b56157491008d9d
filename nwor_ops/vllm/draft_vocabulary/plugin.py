"""Draft vocabulary in vLLM's V2 runner: which engines may have it, and how it is attached to a speculator.

The V2 runner creates its speculator by ``init_speculator``. The plugin patches methods of this object:

- ``load_model`` finds the output heads of the drafter and copies their rows, so the memory counts as weights.
- ``propose`` updates the set of tokens before the first draft of a step.
- ``sample_draft`` and ``compute_draft_logits`` return tokens and logits of the whole vocabulary.

The drafter's ``LogitsProcessor`` computes the logits of the rows instead of all logits. Norms, scaling and soft caps of
the model stay as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nwor_ops import ops
from nwor_ops.config import NworConfig
from nwor_ops.drafter.vocabulary import DraftVocabulary
from nwor_ops.vllm.environment import settings_of, vllm_logger
from nwor_ops.vllm.errors import Errors
from nwor_ops.vllm.hooks import Hook, Patches, check_library, check_vllm
from nwor_ops.vllm.metrics.names import by_reason
from nwor_ops.vllm.support.features import DRAFT_VOCABULARY, NO_SPECULATION
from nwor_ops.vllm.support.refusals import DRAFT_METHOD, HEAD, Unsupported, check_engine

RUNNER_MODULE = "vllm.v1.worker.gpu.model_runner"
_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator"
HOOKS = (
    Hook(RUNNER_MODULE, "init_speculator", "vllm_config, device, req_states"),
    Hook(RUNNER_MODULE, "GPUModelRunner.reset_lora_state", ""),
    Hook(_SPECULATOR, "DraftModelSpeculator.load_model", "target_model"),
    Hook(_SPECULATOR, "DraftModelSpeculator.compute_draft_logits", "hidden_states, spec_step_idx"),
    Hook(
        _SPECULATOR,
        "DraftModelSpeculator.sample_draft",
        "hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step, draft_logits, "
        "spec_step_idx, num_steps",
    ),
    Hook(
        "vllm.model_executor.layers.logits_processor",
        "LogitsProcessor._get_logits",
        "hidden_states, lm_head, embedding_bias, skip_gather",
    ),
)

_ATTRIBUTE = "nwor_draft_vocabulary"  # of a speculator
_TRIAL_LOGITS = 7
_owners: weakref.WeakSet[SpeculatorVocabulary] = weakref.WeakSet()


def draft_vocabularies() -> list[SpeculatorVocabulary]:
    """Return the draft vocabularies of this process's engines. Engines in other processes are not included.

    Example:
        Here no engine runs.

        >>> [owner.describe() for owner in nwor_ops.vllm.draft_vocabularies()]
        []
    """
    return [owner for owner in _owners if owner.vocabularies]


def vocabulary_of(runner: Any) -> SpeculatorVocabulary | None:
    """Return the draft vocabulary of a runner's drafter if it is active, otherwise None."""
    owner = getattr(getattr(runner, "speculator", None), _ATTRIBUTE, None)
    return owner if owner is not None and owner.vocabularies else None


# ---------------------------------------------------------------- patches of the V2 runner's module


def creating(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch of ``init_speculator``: its speculator gets a draft vocabulary if the engine asks for one."""

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        speculator = original(vllm_config, device, req_states)
        _attach(speculator, vllm_config, device, vllm_logger())
        return speculator

    return init_speculator


def reloading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a patch of ``reset_lora_state``, which vLLM calls after each change of weights."""

    def reset_lora_state(self: Any) -> None:
        original(self)
        vocabulary = vocabulary_of(self)
        if vocabulary is not None:
            vocabulary.reload()

    return reset_lora_state


def check_config(vllm_config: Any, device_type: str) -> None:
    """Raise Unsupported if an engine with this configuration cannot have a draft vocabulary."""
    check_vllm(HOOKS, DRAFT_VOCABULARY)
    check_engine(vllm_config, device_type, DRAFT_VOCABULARY)
    check_library(device_type)


def prepare(vllm_config: Any, logger: Any) -> None:
    """Refuse an engine that asks for a draft vocabulary and cannot have it, before it loads weights."""
    config = settings_of(vllm_config)
    if not config.draft_vocabulary:
        return
    if vllm_config.speculative_config is None:
        logger.info("nwor: draft vocabulary: not active: %s", NO_SPECULATION)
        return
    try:
        check_config(vllm_config, vllm_config.device_config.device_type)
    except Unsupported as error:
        _refuse(config, error, logger)


def _refuse(config: NworConfig, error: Unsupported, logger: Any) -> None:
    error.refuse(DRAFT_VOCABULARY, config.strict, logger, "a draft vocabulary was asked for")


def _attach(speculator: Any, vllm_config: Any, device: Any, logger: Any) -> None:
    config = settings_of(vllm_config)
    if not config.draft_vocabulary:
        return
    try:
        check_config(vllm_config, device.type)
        if not _draws_with_inherited_code(speculator):
            raise DRAFT_METHOD.because(method=vllm_config.speculative_config.method)
    except Unsupported as error:
        _refuse(config, error, logger)
        return
    setattr(speculator, _ATTRIBUTE, SpeculatorVocabulary(speculator, config, logger))


def _draws_with_inherited_code(speculator: Any) -> bool:
    """Return whether vLLM's own ``sample_draft`` makes each draft of this speculator."""
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

    loops = (MultiModuleMTPSpeculator, StandaloneARSpeculator, TargetDependentARSpeculator)
    return isinstance(speculator, loops) and type(speculator).sample_draft is DraftModelSpeculator.sample_draft


# ---------------------------------------------------------------- the heads of a drafter


def _trial_heads(speculator: Any) -> list[Any]:
    """Return the output heads that the drafter's ``compute_logits`` uses.

    The trial runs it for each draft step with a stand-in for the head's matrix product. A model whose logits are not
    those of a head, such as one with a trained small vocabulary, returns another shape.
    """
    heads: list[Any] = []

    def trial(hidden_states: Tensor, lm_head: Any, embedding_bias: Any = None, skip_gather: bool = False) -> Tensor:
        if embedding_bias is not None:
            raise HEAD.because(what="its output head has a bias")
        if all(head is not lm_head for head in heads):
            heads.append(lm_head)
        return hidden_states.new_zeros(hidden_states.shape[0], _TRIAL_LOGITS)

    patches = Patches("trial of the output head")
    for processor in _logits_processors(speculator.model):
        patches.put(processor, "_get_logits", lambda original: trial)
    hidden = torch.zeros(1, speculator.hidden_size, dtype=speculator.dtype, device=speculator.device)
    try:
        with torch.inference_mode():
            shapes = [
                tuple(speculator.compute_draft_logits(hidden, step).shape)
                for step in range(speculator.num_speculative_steps)
            ]
    finally:
        patches.undo()
    if not heads or set(shapes) != {(1, _TRIAL_LOGITS)}:
        raise HEAD.because(what="its logits are not those of one output head (a trained small vocabulary?)")
    return heads


def _logits_processors(model: Any) -> list[Any]:
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    return [module for module in model.modules() if isinstance(module, LogitsProcessor)]


def _check_head(head: Any, processors: list[Any], vllm_config: Any) -> None:
    """Raise Unsupported if the rows of an output head cannot be copied, or are not one per token."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    if not isinstance(getattr(head, "quant_method", None), (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)):
        raise HEAD.because(what=f"its output head is quantized or wrapped ({type(head).__name__})")
    if getattr(head, "bias", None) is not None:
        raise HEAD.because(what="its output head has a bias")
    if any(processor.head_dtype not in (None, head.weight.dtype) for processor in processors):
        raise HEAD.because(what=f"its output head computes in another dtype than {head.weight.dtype}")
    tokens = vllm_config.model_config.get_vocab_size()
    if head.org_vocab_size != tokens:
        raise HEAD.because(what=f"its output head has {head.org_vocab_size} of the target's {tokens} tokens")


class SpeculatorVocabulary:
    """The draft vocabulary of one speculator.

    Args:
        speculator: a ``DraftModelSpeculator``. Its weights are not loaded yet.
        config: the engine's settings.
        logger: vLLM's logger.

    Attributes:
        vocabularies: one for each distinct output head of the drafter, by ``id`` of the head; all with the same tokens.
        errors: counts the steps without an update, because it failed.
    """

    def __init__(self, speculator: Any, config: NworConfig, logger: Any) -> None:
        self.vocabularies: dict[int, DraftVocabulary] = {}
        self.errors = Errors.by_setting(config, logger, "with the draft vocabulary of the step before")
        self._speculator, self._config, self._logger = speculator, config, logger
        self._tp_size = self._part_rows = self._vocab_size = 0
        _owners.add(self)
        Patches(DRAFT_VOCABULARY).put_methods(speculator, self, ("load_model",))

    @property
    def first(self) -> DraftVocabulary:
        """The vocabulary of the first head. All have the same tokens."""
        return next(iter(self.vocabularies.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [tensor for vocabulary in self.vocabularies.values() for tensor in vocabulary.tensors().values()]
        return sum(tensor.nbytes for tensor in tensors)

    def counts(self, sampled: int, missed: int) -> dict[str, int]:
        """Return the counts for the metrics.

        Args:
            sampled, missed: the counters of the vocabulary, read from the device.
        """
        counts = {"draft_vocabulary_tokens": sampled, "draft_vocabulary_missed": missed}
        return counts | by_reason("errors", self.errors.counts)

    def describe(self) -> str:
        """Return the number of tokens and the memory, for the start-up line."""
        rows = len(self.first.token_ids) * self._tp_size
        return f"{rows:,} of {self._vocab_size:,} tokens, {self.num_bytes / 2**20:.0f} MiB on each rank"

    def reload(self) -> None:
        """Copy the rows again, because the head may have other weights."""
        for vocabulary in self.vocabularies.values():
            vocabulary.reload()

    # ------------------------------------------------------------ set up

    def load_model(self, original: Callable[..., None], target_model: Any) -> None:
        """Load the drafter, and copy rows of its head. vLLM's profile counts their memory with the weights."""
        original(target_model)
        try:
            processors = _logits_processors(self._speculator.model)
            heads = _trial_heads(self._speculator)
            for head in heads:
                _check_head(head, processors, self._speculator.vllm_config)
        except Unsupported as error:
            _refuse(self._config, error, self._logger)
            return
        for number, head in enumerate(heads):
            self._add_head(head, f"{_ATTRIBUTE}_{number}")
        patches = Patches(DRAFT_VOCABULARY)
        self._row_logits = self._speculator.compute_draft_logits
        for processor in processors:
            patches.put(processor, "_get_logits", lambda original: self._get_logits)
        patches.put_methods(self._speculator, self, ("compute_draft_logits", "sample_draft", "propose"))
        device = self._speculator.device
        steps, requests = self._speculator.num_speculative_steps, self._speculator.max_num_reqs
        self._sampled = torch.empty(requests, steps + 1, dtype=torch.int64, device=device)
        self._context = torch.empty(self._speculator.max_num_tokens, dtype=torch.int64, device=device)
        self._logger.info("nwor: draft vocabulary: active, %s", self.describe())

    def _add_head(self, head: Any, name: str) -> None:
        shard = head.shard_indices
        first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        self._tp_size, self._vocab_size, self._part_rows = head.tp_size, head.org_vocab_size, head.weight.shape[0]
        rows = min(max(self._config.draft_vocabulary // head.tp_size, 1), end - first)
        vocabulary = DraftVocabulary(head.weight.data[: end - first], rows, first_token=first)
        self.vocabularies[id(head)] = vocabulary
        for part, tensor in vocabulary.tensors().items():  # vLLM saves the buffers of a drafter that sleeps
            self._speculator.model.register_buffer(f"{name}_{part}", tensor, persistent=False)

    # ------------------------------------------------------------ drafts

    def _get_logits(
        self, hidden_states: Tensor, lm_head: Any, embedding_bias: Any = None, skip_gather: bool = False
    ) -> Tensor:
        """Compute the logits of this rank's rows, in place of ``LogitsProcessor._get_logits``."""
        return self.vocabularies[id(lm_head)].logits(hidden_states)

    def compute_draft_logits(
        self, original: Callable[..., Tensor], hidden_states: Tensor, spec_step_idx: int
    ) -> Tensor:
        """Return the logits of the whole vocabulary, -inf outside the set."""
        logits = original(hidden_states, spec_step_idx)
        part = logits.new_empty(logits.shape[0], self._part_rows)
        self.first.expand_logits(logits, part)
        return self._all_gather(part)[:, : self._vocab_size]

    def sample_draft(
        self,
        original: Callable[..., Tensor],
        hidden_states: Tensor,
        sample_src_positions: Tensor,
        idx_mapping: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        draft_step: Tensor,
        draft_logits: Tensor | None,
        spec_step_idx: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the best token of the set. Drafts that are not greedy need the logits of the whole vocabulary."""
        if draft_logits is not None or self._speculator.acceptance_estimator is not None:
            return original(
                hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step, draft_logits,
                spec_step_idx, *args, **kwargs,
            )  # fmt: skip
        logits = self._row_logits(hidden_states, spec_step_idx)
        tokens = self.first.token_ids.new_empty(logits.shape[0])
        if self._tp_size == 1:
            ops.argmax_draft_tokens(logits, self.first.token_ids, tokens)
            return tokens
        values = tokens.new_empty(logits.shape[0], dtype=torch.float32)
        ops.argmax_draft_tokens(logits, self.first.token_ids, tokens, values)
        pairs = self._all_gather(torch.stack([values.double(), tokens.double()], dim=-1))  # token ids stay exact
        values, tokens = pairs.view(-1, self._tp_size, 2).unbind(-1)
        best = values == values.amax(-1, keepdim=True)
        return tokens.where(best, float("inf")).amin(-1).to(torch.int64)

    def _all_gather(self, tensor: Tensor) -> Tensor:
        if self._tp_size == 1:
            return tensor
        from vllm.distributed import tensor_model_parallel_all_gather

        return tensor_model_parallel_all_gather(tensor, dim=-1)

    # ------------------------------------------------------------ a step

    def propose(
        self,
        original: Callable[..., Tensor],
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Update the set with the tokens of the step, and draft."""
        if not (kwargs.get("dummy_run") or kwargs.get("is_profile")):
            with self.errors.survived("updating the draft vocabulary failed"):
                self._update(input_batch, num_sampled, last_sampled)
        return original(
            input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
            num_rejected, last_sampled, *args, **kwargs,
        )  # fmt: skip

    def _update(self, input_batch: Any, num_sampled: Tensor, last_sampled: Tensor) -> None:
        sampled = self._sampled[: input_batch.num_reqs]
        # Without a prompt, the context is the last sampled token of each request, which is in the set already.
        context = self._context[: input_batch.num_tokens if input_batch.has_prefill else 0]
        ops.gather_step_tokens(
            input_batch.input_ids, input_batch.query_start_loc, input_batch.cu_num_logits, input_batch.idx_mapping,
            num_sampled, last_sampled.view(-1), sampled, context,
        )  # fmt: skip
        for vocabulary in self.vocabularies.values():
            vocabulary.update(sampled.view(-1), context)
