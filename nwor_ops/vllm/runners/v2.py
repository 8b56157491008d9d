"""vLLM's Model Runner V2, the default on a GPU: where its step begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nwor_ops.transaction.window import Window
from nwor_ops.vllm.runners.base import RunnerKind, Wrapper
from nwor_ops.vllm.session import Session, Step
from nwor_ops.vllm.support import Hook, Unsupported

_MODULE = "vllm.v1.worker.gpu.model_runner"
_WARM_UP = "vllm.v1.worker.gpu.warmup"


def _slot_mapping(runner: Any, group: str) -> Tensor:
    return runner.block_tables.slot_mappings[int(group)]


def _block_table(runner: Any, group: str) -> Tensor:
    return runner.block_tables.input_block_tables[int(group)]


def _drafter_borrows(runner: Any) -> bool:
    config = runner.speculative_config
    return not (config.use_ngram() or config.uses_draft_model())


def _drafter_layers(runner: Any) -> set[str]:
    if runner.model_state.num_new_sampled_tokens_per_step != 1:
        raise Unsupported("the model samples more than one new token for each request and step")
    if runner.speculative_config.use_ngram():
        return set()
    names = set(getattr(runner.speculator, "draft_attn_layer_names", ()))
    if not names:
        raise Unsupported("the drafter does not say which attention layers are its own")
    return names


def _wrappers(runner: Any, session: Session, groups: list[str]) -> dict[str, Wrapper]:
    sampled: list[tuple[Tensor, Tensor]] = []  # of the open window, from sampling until the drafter is done
    slot_mappings = {group: _slot_mapping(runner, group) for group in groups}
    block_tables = {group: _block_table(runner, group) for group in groups}

    def step(input_batch: Any) -> Step:
        return Step(
            Window(
                query_start_loc=input_batch.query_start_loc,
                cu_num_draft_tokens=input_batch.cu_num_logits,
                slot_mappings=slot_mappings,
                num_draft_tokens=input_batch.num_draft_tokens,
                num_bonus_tokens=1,  # vLLM counts logits, from a zero on
                leading_zero=True,
                seq_lens=input_batch.seq_lens,
                block_tables=block_tables,
            ),
            query_start_loc=input_batch.query_start_loc_np,
            num_draft_tokens=input_batch.num_draft_tokens_per_req,
        )

    def begin(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_attn(input_batch: Any) -> Any:
            prepared = prepare(input_batch)
            sampled.clear()
            if input_batch.num_draft_tokens > 0:
                session.begin(step(input_batch))
            return prepared

        return prepare_attn

    def note(sample_batch: Callable[..., Any]) -> Callable[..., Any]:
        def sample(hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
            session.forwarded("before sampling")
            output = sample_batch(hidden_states, input_batch, grammar_output)
            if input_batch.num_draft_tokens > 0:
                sampled.append(output[1:])
                if session.mode == "stage":  # the drafter follows the tables, so they are put back before it runs
                    commit_sampled()
                else:
                    session.sampled()
            return output

        return sample

    # Else behind the drafter, which neither reads nor writes the target's layers: the sampled tokens are on their way
    # to the host by then, which needs them to go on with the next step.
    def commit_sampled() -> None:
        if sampled:
            num_sampled, num_rejected = sampled.pop()
            session.commit(lambda manager: manager.commit_rejected(num_rejected), num_sampled=num_sampled.tolist)

    def commit(sample: Callable[..., Any]) -> Callable[..., Any]:
        # In the inference mode of the worker that calls it: to enter it again would cost as much as an op.
        def sample_tokens(grammar_output: Any) -> Any:
            try:
                output = sample(grammar_output)
            except BaseException:
                # vLLM has counted the accepted drafts already: they stay, whatever became of the drafter.
                session.after_failure(commit_sampled)
                raise
            commit_sampled()
            return output

        return sample_tokens

    return {"prepare_attn": begin, "sample": note, "sample_tokens": commit}


V2 = RunnerKind(
    module=_MODULE,
    hooks=(
        Hook(
            _MODULE,
            "GPUModelRunner.initialize_kv_cache",
            ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
        ),
        Hook(_MODULE, "GPUModelRunner.prepare_attn", ("input_batch",)),
        Hook(_MODULE, "GPUModelRunner.sample", ("hidden_states", "input_batch", "grammar_output")),
        Hook(
            _MODULE,
            "GPUModelRunner.execute_model",
            (
                "scheduler_output",
                "intermediate_tensors",
                "dummy_run",
                "skip_attn_for_dummy_run",
                "is_profile",
                "context_len",
                "valid_dummy_state_slots",
                "randomize_inputs",
            ),
        ),
        Hook(_MODULE, "GPUModelRunner.sample_tokens", ("grammar_output",)),
        Hook(_MODULE, "GPUModelRunner.profile_run", ("randomize_inputs",)),
        Hook(_MODULE, "GPUModelRunner.get_kv_cache_spec", ()),
        Hook(_WARM_UP, "warmup_kernels", ("model_runner", "worker_execute_model", "worker_sample_tokens")),
        Hook(
            _WARM_UP,
            "run_mixed_prefill_decode_warmup",
            (
                "model_runner",
                "worker_execute_model",
                "worker_sample_tokens",
                "num_tokens",
                "mixed_step_context",
                "req_id_prefix",
            ),
        ),
    ),
    drafter_layers=_drafter_layers,
    slot_mapping=_slot_mapping,
    drafter_borrows=_drafter_borrows,
    wrappers=_wrappers,
)
