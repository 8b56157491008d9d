"""Counters on a device, published without an engine: what a session, a runner and vLLM's two processes do with them."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch

from nwor_ops import COUNTERS
from nwor_ops.vllm.metrics.publisher import Publisher

NAMES = ("windows", "drafted", "accepted", "rejected")


def engine_config(engine: int = 0) -> Any:
    """Return the configuration that the labels come from."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_index=engine),
        model_config=SimpleNamespace(served_model_name="tiny"),
        additional_config={"nwor": {"mode": "cow"}},
    )


class CountedSession:
    """The owner of counters on a device, and of one count on the host."""

    def __init__(self, device: str = "cpu") -> None:
        self.counters = torch.zeros(len(NAMES), dtype=torch.int64, device=device)
        self.steps = 0
        assert set(NAMES) < set(COUNTERS)

    def step(self, accepted: int = 1, rejected: int = 2) -> None:
        """Count one step. Does not synchronize with the device."""
        for place, count in enumerate((1, accepted + rejected, accepted, rejected)):
            self.counters[place].add_(count)
        self.steps += 1

    def counts(self, *values: int) -> dict[str, float]:
        return dict(zip(NAMES, values, strict=True)) | {"recurrent_steps": self.steps}

    def publisher(self, engine: int = 0) -> Publisher:
        """Return a publisher of these counters."""
        report = {"features": {"transaction": "cow"}, "memory": {"undo_log": 7}}
        publisher = Publisher(engine_config(engine), lambda: report, logging.getLogger())
        publisher.add(self, CountedSession.counts, lambda session: session.counters)
        return publisher


def step_output(inside: str = "") -> Any:
    """Return the output of a step: a ``ModelRunnerOutput``, or an object that has it in this attribute."""
    from vllm.v1.outputs import ModelRunnerOutput

    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    return SimpleNamespace(**{inside: output}) if inside else output


def across_processes(output: Any) -> Any:
    """Return what vLLM's message queue, or Ray, makes of an output."""
    for name in ("model_runner_output", "_model_runner_output"):
        output = getattr(output, name, output)
    return pickle.loads(pickle.dumps(output))


class Scheduler:
    """The part of vLLM's scheduler that gets the output of a step.

    Args:
        outputs: returns what it sends to the front end.
    """

    def __init__(self, outputs: Any = dict) -> None:
        self.vllm_config, self._outputs = engine_config(), outputs

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        return self._outputs()


def front_end(outputs: dict[int, Any]) -> list[Any]:
    """Give outputs of the scheduler to a front end in another process. Return vLLM's statistics, without ours."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    processor, statistics = OutputProcessor.__new__(OutputProcessor), []
    processor.lora_states = SimpleNamespace(update_scheduler_stats=statistics.append)
    for one in outputs.values():
        received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(one))
        processor.update_scheduler_stats(received.scheduler_stats)
    return statistics


def positive(counts: Any) -> dict[str, float]:
    return {name: count for name, count in Counter(counts).items() if count}
