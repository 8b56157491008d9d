"""A prefill engine in a separate process, for an engine that decodes its requests. See ``engine_child``."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

from nwor_ops.testing.engine_process import free_port

START_SECONDS = 240


class PrefillEngine:
    """Starts it, while the caller starts its own engine. Use as a context manager.

    Args:
        job: the decoding engine's job. ``job["prefill"]`` has the settings in which this engine differs.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())  # the decoding engine is in this process
        self._process = context.Process(target=_serve, args=(job, theirs), daemon=True)

    def __enter__(self) -> PrefillEngine:
        self._process.start()
        self._is_ready = False
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(10)

    def prefill(self, prompts: dict[str, list[int]]) -> dict[str, dict[str, Any]]:
        """Return the transfer parameters of each prompt, by its name. The first call waits for the engine to start."""
        if not self._is_ready:
            self._receive(START_SECONDS)
            self._is_ready = True
        self._ours.send(prompts)
        found: dict[str, dict[str, Any]] = self._receive(120)
        return found

    def describe(self) -> dict[str, Any]:
        """Return what the engine says of its worker, and of the pages that it handed over."""
        self._ours.send(None)
        found: dict[str, Any] = self._receive(60)
        return found

    def _receive(self, seconds: float) -> Any:
        if not self._ours.poll(seconds):
            raise RuntimeError(f"the prefill engine has not answered for {seconds} s")
        said = self._ours.recv()
        if isinstance(said, str):
            raise RuntimeError(f"the prefill engine: {said}")
        return said


def _serve(job: dict[str, Any], pipe: Any) -> None:
    try:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
        _answer(job, pipe)
    except BaseException as error:
        traceback.print_exc()
        pipe.send("".join(traceback.format_exception_only(error)).strip())
    os._exit(0)


def _answer(job: dict[str, Any], pipe: Any) -> None:
    from engine_child import describe_worker, handed_over, serve_short_one
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"] | job["prefill"])
    engine = llm.llm_engine
    pipe.send({})
    while True:
        prompts = pipe.recv()
        if prompts is None:
            [worker] = llm.collective_rpc(describe_worker)
            pipe.send({"worker": worker, "handed_over": handed_over()})
            continue
        found = {}
        for name, prompt in prompts.items():
            extra = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
            parameters = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, extra_args=extra)
            engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found["-".join(output.request_id.split("-")[:2])] = output.kv_transfer_params
        serve_short_one(llm, "last")  # a step after all others, in which the worker hears of their end
        pipe.send(json.loads(json.dumps(found)))


def transfer_of(prefilled: dict[str, dict[str, Any]] | None) -> Callable[[str], dict[str, Any] | None]:
    """From a request's name to its extra sampling arguments."""
    return lambda name: None if prefilled is None else {"kv_transfer_params": dict(prefilled[name])}
