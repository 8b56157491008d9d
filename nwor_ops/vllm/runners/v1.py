"""vLLM's first model runner, the only one on the CPU: where its step begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nwor_ops.transaction.window import Window
from nwor_ops.vllm.runners.base import RunnerKind, Wrapper
from nwor_ops.vllm.session import Session, Step
from nwor_ops.vllm.support import Hook, Unsupported

_MODULE = "vllm.v1.worker.gpu_model_runner"


def _slot_mapping(runner: Any, group: str) -> Tensor:
    return runner.input_batch.block_table[int(group)].slot_mapping.gpu


def _block_table(runner: Any, group: str) -> Tensor:
    return runner.input_batch.block_table[int(group)].block_table.gpu


def _drafter_borrows(runner: Any) -> bool:
    return False  # its metadata is made when it drafts


def _drafter_layers(runner: Any) -> set[str]:
    config = runner.speculative_config
    if not (config.uses_draft_model() or config.use_eagle()):
        return set()
    names = set(getattr(runner.drafter, "_draft_attn_layer_names", ()))
    if not names:
        raise Unsupported("the drafter does not say which attention layers are its own")
    return names


def _step(runner: Any, metadata: Any, groups: list[str]) -> Step:
    """One forward: metadata is vLLM's ``SpecDecodeMetadata``, on the host and on the device."""
    num_requests = len(metadata.num_draft_tokens)
    return Step(
        Window(
            query_start_loc=runner.query_start_loc.gpu,
            cu_num_draft_tokens=metadata.cu_num_draft_tokens,
            slot_mappings={group: _slot_mapping(runner, group) for group in groups},
            num_draft_tokens=sum(metadata.num_draft_tokens),
            seq_lens=runner.seq_lens,
            block_tables={group: _block_table(runner, group) for group in groups},
        ),
        query_start_loc=runner.query_start_loc.np[: num_requests + 1],
        num_draft_tokens=metadata.num_draft_tokens,
    )


def _wrappers(runner: Any, session: Session, groups: list[str]) -> dict[str, Wrapper]:
    def begin(prepare_inputs: Callable[..., Any]) -> Callable[..., Any]:
        def _prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            result = prepare_inputs(scheduler_output, num_scheduled_tokens)
            if result[1] is not None:
                session.begin(_step(runner, result[1], groups))
            return result

        return _prepare_inputs

    def commit(sample: Callable[..., Any]) -> Callable[..., Any]:
        def _sample(logits: Any, spec_decode_metadata: Any) -> Any:
            session.forwarded("before sampling")
            output = sample(logits, spec_decode_metadata)
            if spec_decode_metadata is not None:
                drafted, sampled = spec_decode_metadata.draft_token_ids, output.sampled_token_ids
                session.commit(
                    lambda manager: manager.commit(drafted, sampled),
                    num_sampled=lambda: (sampled >= 0).sum(-1).tolist(),
                )
            return output

        return _sample

    return {"_prepare_inputs": begin, "_sample": commit}


V1 = RunnerKind(
    module=_MODULE,
    hooks=(
        Hook(
            _MODULE,
            "GPUModelRunner.initialize_kv_cache",
            ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
        ),
        Hook(_MODULE, "GPUModelRunner._prepare_inputs", ("scheduler_output", "num_scheduled_tokens")),
        Hook(_MODULE, "GPUModelRunner._sample", ("logits", "spec_decode_metadata")),
        Hook(_MODULE, "GPUModelRunner.execute_model", ("scheduler_output", "intermediate_tensors")),
        Hook(_MODULE, "GPUModelRunner.sample_tokens", ("grammar_output",)),
        Hook(_MODULE, "GPUModelRunner.profile_run", ("randomize_inputs",)),
        Hook(_MODULE, "GPUModelRunner.get_kv_cache_spec", ()),
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
    ),
    drafter_layers=_drafter_layers,
    slot_mapping=_slot_mapping,
    drafter_borrows=_drafter_borrows,
    wrappers=_wrappers,
)
