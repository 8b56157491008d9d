"""The engine of ``nwor-ops verify``: ``python -m nwor_ops.cli.verify_engine JOB.json``.

A job is ``{"arguments": arguments of vllm serve, "drafts": whether it speculates, "prompts": texts or an empty list,
"seed": number}``. The environment switches the audit on. An error of the audit ends the process. Its log then has the
line ``AuditError: ...``. The commands (:func:`nwor_ops.testing.engine_process.serve`):

- ``repeat``: serve a long prompt three times. Return how much of it was in the prefix cache.
- ``serve SECONDS``: add, abort and serve random requests for this time, at least for one step. Then serve those that
  still run, and abort them after ``LAST_SECONDS``. Return the counts of requests and the audit's summary.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from nwor_ops.config import NworConfig
from nwor_ops.testing.engine_process import serve

MOST_CLIENTS = 32
LAST_SECONDS = 20.0
MOST_TOKENS = 64  # in an answer
LONGEST_PROMPT = 1500
REMEMBERED = 50  # prompts that may come again
REPEATED_BLOCKS = 4  # of the prompt that is sent three times
TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)
# Defaults of a GPU engine, which the user's arguments override. The audit keeps copies of the whole cache and compares
# all of it at each step. A small cache does not fit a long context or the states of a thousand requests.
SMALL_ENGINE = {"kv_cache_memory_bytes": 1 << 30, "max_num_seqs": 16, "max_model_len": -1}  # -1: as long as fits
# Mode stage needs a fixed length, because a request that just fits in the whole cache leaves no block for shadow pages.
STAGE_LENGTH = 1024


class AuditedEngine:
    """An engine with the user's arguments, and random requests."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        self._config = config = configuration_of(job["arguments"], job["drafts"])
        self._engine = LLMEngine.from_vllm_config(config)
        self._vocabulary = config.model_config.get_vocab_size()
        self._longest = config.model_config.max_model_len
        self._clients = self._most_clients = min(MOST_CLIENTS, config.scheduler_config.max_num_seqs + 4)  # some wait
        self._dice = random.Random(job["seed"])
        self._texts: list[str] = job["prompts"]
        self._counts: Counter[str] = Counter()
        self._running: dict[str, int] = {}  # by request: the number of tokens after which it is aborted, or 0
        self._seen: list[list[int]] = []

    def describe(self) -> dict[str, Any]:
        return describe(self._config) | {"audits": self._audits()}

    def repeat(self) -> dict[str, Any]:
        from vllm import SamplingParams

        length = max(1, min(REPEATED_BLOCKS * self._config.cache_config.block_size, self._longest - MOST_TOKENS - 1))
        prompt: Any = {"prompt_token_ids": (self._gram(20) * (length // 20 + 1))[:length]}
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        cached = []
        for number in range(3):
            self._engine.add_request(f"repeated {number}", prompt, params)
            while self._engine.has_unfinished_requests():
                cached += [output.num_cached_tokens or 0 for output in self._engine.step() if output.finished]
        return {"prompt_tokens": length, "cached_tokens": cached[1:]}

    def serve(self, seconds: float) -> dict[str, Any]:
        until, stepped = time.monotonic() + seconds, False
        while not stepped or time.monotonic() < until:
            stepped = True
            if self._dice.random() < 0.05:
                self._clients = self._dice.randint(1, self._most_clients)
            while len(self._running) < self._clients:
                self._add()
            self._step()
        until = time.monotonic() + LAST_SECONDS
        while self._running and time.monotonic() < until:
            self._step()
        self._abort(list(self._running))
        return {"requests": dict(self._counts), "audits": self._audits()}

    def _abort(self, requests: list[str]) -> None:
        self._counts["aborted"] += len(requests)
        self._engine.abort_request(requests)
        for request in requests:
            del self._running[request]

    def _step(self) -> None:
        to_abort = []
        for output in self._engine.step():
            abort_after = self._running.get(output.request_id)
            if abort_after is None:
                continue
            tokens = len(output.outputs[0].token_ids)  # type: ignore[index]
            if output.finished:
                self._counts["tokens"] += tokens
                del self._running[output.request_id]
            elif abort_after and tokens >= abort_after:
                to_abort.append(output.request_id)
        if to_abort:
            self._abort(to_abort)

    def _add(self) -> None:
        from vllm import SamplingParams

        dice = self._dice
        self._counts["requests"] += 1
        request, prompt = str(self._counts["requests"]), self._prompt()
        tokens = min(dice.randint(1, MOST_TOKENS), self._longest // 2)
        params = SamplingParams(
            temperature=dice.choice(TEMPERATURES), seed=dice.getrandbits(30), max_tokens=tokens, detokenize=False,
            ignore_eos=dice.random() < 0.5,
        )  # fmt: skip
        self._running[request] = dice.randint(1, tokens) if dice.random() < 0.25 else 0
        self._engine.add_request(request, prompt, params)

    def _prompt(self) -> Any:
        """Return one of the user's prompts, an earlier prompt, one that begins like an earlier one, or a new one."""
        if self._texts:
            return self._dice.choice(self._texts)
        kind = self._dice.random()
        if not self._seen or kind < 0.5:
            tokens = self._random_tokens()
        else:
            tokens = self._dice.choice(self._seen)
            if kind < 0.8:
                tokens = tokens[: self._dice.randint(1, len(tokens))] + self._random_tokens()
        self._seen = [*self._seen, tokens[: self._room]][-REMEMBERED:]
        return {"prompt_token_ids": self._seen[-1]}

    @property
    def _room(self) -> int:
        """The most tokens of a prompt, so that the answer fits too."""
        return max(1, min(LONGEST_PROMPT, max(self._longest // 2, self._longest - MOST_TOKENS) - 1))

    def _random_tokens(self) -> list[int]:
        """Return tokens that repeat themselves, so that a lookup of n-grams finds proposals. Ids at the ends of a
        vocabulary, where special tokens are, are left out."""
        dice = self._dice
        gram = self._gram(dice.randint(2, 20))
        length = dice.choice((1, 8, 40, 200, self._room))
        return (gram * (length // len(gram) + 1))[: dice.randint(1, min(length, self._room))]

    def _gram(self, length: int) -> list[int]:
        least, most = self._vocabulary // 50, max(2, self._vocabulary * 9 // 10)
        return [self._dice.randrange(least, most) for _ in range(length)]

    def _audits(self) -> list[dict[str, Any]]:
        """Return what each worker has audited."""
        audits: list[dict[str, Any]] = self._engine.collective_rpc(audits_in)
        return audits


def describe(config: Any) -> dict[str, Any]:
    """Return what a bug report needs of an engine's configuration, in values that cannot hold a secret."""
    from nwor_ops.vllm.check import summary_of

    parallel = config.parallel_config
    return summary_of(config) | {
        "settings": asdict(NworConfig.load(config.additional_config)),
        "dtype": str(config.model_config.dtype),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "block_size": config.cache_config.block_size,
        "cache_dtype": str(config.cache_config.cache_dtype),
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "prefix_cache_retention_interval": getattr(config.cache_config, "prefix_cache_retention_interval", None),
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_model_len": config.model_config.max_model_len,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
    }


def configuration_of(arguments: list[str], drafts: bool = True) -> Any:
    """Return vLLM's configuration for the arguments of ``vllm serve``, over defaults that the audit needs."""
    from vllm.platforms import current_platform

    from nwor_ops.vllm.check import InvalidEngine, configuration, engine_arguments

    defaults: dict[str, Any] = dict(SMALL_ENGINE) if current_platform.is_cuda() else {}
    config = configuration(engine_arguments(arguments, **defaults))
    if defaults and NworConfig.load(config.additional_config).mode == "stage":
        defaults["max_model_len"] = min(STAGE_LENGTH, config.model_config.max_model_len)
    engine = engine_arguments(arguments, **defaults)
    if not drafts:
        engine.speculative_config = None
    graphs = engine.compilation_config
    if graphs.cudagraph_mode is None and drafts and hides_states_of_vanilla(config):
        graphs.cudagraph_mode = type(config.compilation_config.cudagraph_mode).PIECEWISE
        with contextlib.suppress(InvalidEngine):
            return configuration(engine)
        graphs.cudagraph_mode = None  # adaptive verification needs FULL graphs
    return configuration(engine)


def hides_states_of_vanilla(config: Any) -> bool:
    """Return whether this is vanilla vLLM with recurrent states and FULL graphs, which call no Python to audit them.

    With one of our features on, the audit needs no Python in the graphs, so the user's graph mode stays.
    """
    ours = NworConfig.load(config.additional_config).wants_feature
    full = config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    return full and not ours and config.model_config.is_hybrid and config.speculative_config is not None


def audits_in(worker: Any) -> dict[str, Any]:
    """Return what the engine of this worker has audited."""
    import nwor_ops.vllm
    from nwor_ops.vllm.audit.engine import summaries

    sessions = nwor_ops.vllm.sessions()
    return {"modes": [session.mode for session in sessions]} | summaries(sessions, nwor_ops.vllm.recurrent_engines())


if __name__ == "__main__":
    serve(AuditedEngine)
