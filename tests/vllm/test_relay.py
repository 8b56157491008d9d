"""Totals of a worker on another host, or of a Ray worker: they arrive with the output of a step."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from counted_session import CountedSession
from vllm.config import ParallelConfig
from vllm.v1.outputs import ModelRunnerOutput

from nwor_ops.vllm.metrics import relay, transport
from nwor_ops.vllm.metrics.transport import CounterFile
from nwor_ops.vllm.metrics.worker import SessionPublisher


class RaysExecutor:
    """An executor class as given to an engine. vLLM's Ray executors set this attribute too."""

    uses_ray = True


class Parallel(SimpleNamespace):
    use_ray = ParallelConfig.use_ray


def _config(nodes: int = 2, backend: Any = "mp") -> Any:
    return SimpleNamespace(
        instance_id="i",
        parallel_config=Parallel(data_parallel_index=0, nnodes_within_dp=nodes, distributed_executor_backend=backend),
        model_config=SimpleNamespace(served_model_name="tiny"),
        additional_config={"nwor": {"mode": "cow"}},
        speculative_config=SimpleNamespace(),
    )


class Scheduler:
    """A scheduler that ignores the output."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.seen: list[Any] = []

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        self.seen.append(model_runner_output)
        return "outputs"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that switches to the folder of the other host."""
    monkeypatch.setattr(transport, "PERIOD", 3600)

    def on(host: str) -> None:
        monkeypatch.setenv(transport.DIRECTORY_VARIABLE, str(tmp_path / host))

    return on


def _worker() -> tuple[CountedSession, SessionPublisher, relay.Sender]:
    session = CountedSession()
    publisher = SessionPublisher(session, CounterFile("worker", _config()), logging.getLogger())  # type: ignore[arg-type]
    return session, publisher, relay.Sender(publisher.arrived, session, publisher.errors)


def _output(inside: str = "") -> Any:
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    return SimpleNamespace(**{inside: output}) if inside else output


def _arrived(output: Any) -> Any:
    """Return what vLLM's message queue, or Ray, makes of an object."""
    for name in ("model_runner_output", "_model_runner_output"):
        output = getattr(output, name, output)
    return pickle.loads(pickle.dumps(output))


@pytest.mark.parametrize("inside", ["", "model_runner_output", "_model_runner_output"])
def test_totals_come_with_a_steps_output(hosts: Any, inside: str) -> None:
    hosts("the worker's")
    session, _, sender = _worker()
    session.step(1, 4, 1, 3, 0)
    output = _output(inside)
    assert sender in session.listeners
    sender.returned(output)
    hosts("the engine core's")
    scheduler = Scheduler(_config())
    relay.Receiver(scheduler, logging.getLogger())
    assert scheduler.update_from_output(None, _arrived(output)) == "outputs"
    found = transport.read(transport.files("worker")).counts
    assert (found["windows"], found["drafted"], found["accepted"], found["rejected"]) == (1, 4, 1, 3)
    hosts("the worker's")
    second = _output(inside)
    sender.returned(second)  # too early to send again
    assert not hasattr(_arrived(second), relay.TOTALS)
    sender._next = 0.0
    sender.returned(None)
    sender.returned(ModelRunnerOutput(req_ids=[], req_id_to_index={}))
    assert sender._next == 0.0, "there was nothing to put them on"


def test_a_workers_own_file_goes_before_what_it_sent(hosts: Any) -> None:
    """Both hold totals of the same worker, and the file is newer."""
    hosts("both")
    session, publisher, sender = _worker()
    session.step(1, 4, 1, 3, 0)
    output = _output()
    sender.returned(output)
    publisher.publish()
    scheduler = Scheduler(_config())
    relay.Receiver(scheduler, logging.getLogger())
    scheduler.update_from_output(None, _arrived(output))
    assert transport.files("worker") == [publisher.file.path]


def test_no_folder_to_write_to_is_said_once(hosts: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    hosts("the engine core's")
    (tmp_path / "the engine core's").write_text("a file")
    scheduler = Scheduler(_config())
    relay.Receiver(scheduler, logging.getLogger())
    output = _output()
    setattr(output, relay.TOTALS, ({"windows": 1}, {}))
    for _ in range(2):
        assert scheduler.update_from_output(None, output) == "outputs"
    assert caplog.text.count("publishing counters failed") == 1


@pytest.mark.parametrize(
    ("nodes", "backend", "remote"),
    [(1, "mp", False), (2, "mp", True), (1, "ray", True), (1, RaysExecutor, True), (1, "uni", False)],
)
def test_only_an_engine_whose_workers_may_be_elsewhere_receives(
    hosts: Any, nodes: int, backend: Any, remote: bool
) -> None:
    hosts("the engine core's")
    made = type("Made", (Scheduler,), {})
    relay.patch_scheduler_module(SimpleNamespace(Scheduler=made, logger=logging.getLogger()))  # type: ignore[arg-type]
    assert ("update_from_output" in vars(made(_config(nodes, backend)))) == remote


def test_an_error_while_sending_is_counted_and_goes_no_further(hosts: Any) -> None:
    hosts("the worker's")
    session, publisher, sender = _worker()

    def fails(totals_of: Any) -> None:
        assert totals_of is session
        raise RuntimeError("planted")

    sender._arrived = fails  # type: ignore[assignment]
    sender.returned(_output())
    assert publisher.errors.counts["sending counters failed"] == 1
