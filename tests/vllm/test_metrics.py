"""The way of the counters to the front end. test_engine.py and test_serve.py compare those of engines."""

from __future__ import annotations

import inspect
import os
from types import SimpleNamespace
from typing import Any, ClassVar

import prometheus_client
import pytest
import torch
from counted_session import CountedSession, Scheduler, across_processes, engine_config, front_end, positive, step_output
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

import nwor_ops
from nwor_ops.recurrent.cursors import Cursors
from nwor_ops.vllm import plugin
from nwor_ops.vllm.environment import announce_variables
from nwor_ops.vllm.metrics import publisher as worker
from nwor_ops.vllm.metrics import relay
from nwor_ops.vllm.metrics.names import METRICS
from nwor_ops.vllm.recurrent.plugin import RecurrentEngine

# ---------------------------------------------------------------- from the device to the front end


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A registry of Prometheus, and no counts received yet."""
    made = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge"):
        original = getattr(prometheus_client, name)
        monkeypatch.setattr(prometheus_client, name, lambda *a, kind=original, **k: kind(*a, **k, registry=made))
    monkeypatch.setattr(relay, "_received", {})
    monkeypatch.setattr(worker, "PERIOD", 0.0)
    monkeypatch.setattr(worker, "publishers", {})
    monkeypatch.setattr(relay, "publishers", worker.publishers)
    from vllm.v1.engine.output_processor import OutputProcessor

    method = OutputProcessor.update_scheduler_stats
    monkeypatch.setattr(OutputProcessor, "update_scheduler_stats", relay.receiving(method))
    yield made
    for cached in (relay._counter, relay._gauge):
        cached.cache_clear()


def samples(registry: Any) -> dict[str, float]:
    """Return samples by name, and labels that are not those of vLLM."""
    return {
        sample.name + "".join(f"/{value}" for name, value in sample.labels.items() if name not in relay._LABELS):
        sample.value for family in registry.collect() for sample in family.samples if "_created" not in sample.name
    }  # fmt: skip


class Arrival:
    """An event on a stream; the machine decides when it is over."""

    over: ClassVar[list[Any]] = []

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self in Arrival.over


class Served:
    """A runner with the patches of the worker. A step of it that samples counts one window."""

    def __init__(self, session: CountedSession) -> None:
        self._session = session

    def execute_model(self, scheduler_output: Any) -> str:
        return "executed"

    def sample_tokens(self, output: Any, steps: int = 1) -> Any:
        for _ in range(steps):
            self._session.step()
        return output

    execute_model = worker.resting(execute_model)
    sample_tokens = worker.attaching(sample_tokens)


class RelayingScheduler(Scheduler):
    update_from_output = relay.relaying(Scheduler.update_from_output)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_reach_the_front_end(
    seed: int, registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies arrive late but in order, outputs lack requests, and vLLM makes no statistics.

    The front end never has more than was counted. The first output after an empty step brings all counts. An owner that
    ended keeps its share.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    monkeypatch.setattr(torch.cuda, "Event", Arrival)
    monkeypatch.setattr(Arrival, "over", [])
    late = draw(2)
    if late:
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    statistics = [dict, lambda: {0: EngineCoreOutputs()},
                  lambda: {3: EngineCoreOutputs(), 1: EngineCoreOutputs(scheduler_stats=SchedulerStats())}]  # fmt: skip
    scheduler, session = RelayingScheduler(lambda: statistics[draw(3)]()), CountedSession()
    runner = Served(session)
    runner.sample_tokens(step_output())  # of an engine without a feature
    publisher = worker.publishers[runner] = session.publisher()  # type: ignore[index]
    for _ in range(1 + draw(3)):  # vLLM's warm-up
        session.step()
        runner.sample_tokens(step_output())
        publisher.forget()

    def run_step(inside: str, steps: int = 1) -> None:
        output = runner.sample_tokens(step_output(inside), steps)
        front_end(scheduler.update_from_output(None, across_processes(output)))

    def arrive() -> None:
        Arrival.over = [publisher._copy[0]] if publisher._copy is not None else []

    def is_idle() -> None:
        assert runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=0)) == "executed"

    steps = 0
    for _ in range(60):
        match draw(7):
            case 0 if late:
                arrive()
            case 1:
                runner.sample_tokens(SimpleNamespace(req_ids=[]), 0)
            case 2:
                runner.sample_tokens(None, 0)
            case 3:
                is_idle()
            case 4:
                copy = publisher._copy
                runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
                assert publisher._copy is copy
            case _:
                steps += 1
                run_step(["", "model_runner_output", "_model_runner_output"][draw(3)])
        received = sum(counts["windows"] for counts in relay._received.values())
        assert received == steps if not late else received <= steps
        assert relay.totals().windows == steps
    for _ in range(2):
        is_idle()  # the second empty step copies nothing
        arrive()
    run_step("", 0)  # a request without drafts
    expected = {"nwor_windows_total": steps, "nwor_draft_tokens_total": 3 * steps, "nwor_committed_tokens_total": steps,
                "nwor_rejected_tokens_total": 2 * steps, "nwor_recurrent_steps_total": steps}  # fmt: skip
    assert samples(registry) == expected | {"nwor_info/cow": 1, "nwor_memory_bytes/undo_log": 7}
    del session, runner._session
    run_step("", 0)
    assert relay.totals() == nwor_ops.EngineStats(
        1, windows=steps, drafted=3 * steps, accepted=steps, rejected=2 * steps, recurrent_steps=steps
    )
    assert caplog.messages == []  # the first output told the engine core that the plugin is in the worker


def test_engines_are_added_up(registry: Any) -> None:
    """A message has each count once: engines that ended keep their share, and reasons are told apart."""
    for engine, reason in ((0, "a: b"), (1, "c"), (0, "c")):
        session = CountedSession()
        publisher = session.publisher(engine)
        publisher.add(publisher, lambda _, why=reason: {f"errors:{why}": 2, "draft_eager_reasons:x": 1})
        session.step()
        scheduler, output = RelayingScheduler(), step_output()
        publisher.attach(output)
        front_end(scheduler.update_from_output(None, output))
    stats = relay.totals()
    assert (stats.engines, stats.windows) == (3, 3)
    assert (stats.errors, stats.draft_eager_reasons) == ({"a: b": 2, "c": 4}, {"x": 3})
    [family] = [family for family in registry.collect() if family.name == "nwor_windows"]
    assert {sample.labels["engine"]: sample.value for sample in family.samples if "_total" in sample.name} == {
        "0": 2, "1": 1,
    }  # fmt: skip
    assert (family.type, family.documentation) == ("counter", METRICS["windows"][1])


def test_few_outputs_have_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with news, once per period. Between them nothing is copied."""
    session, now = CountedSession(), 100.0
    publisher = session.publisher()
    monkeypatch.setattr(worker, "PERIOD", 0.1)
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)
    copies: list[None] = []
    start_copy = publisher._start_copy
    monkeypatch.setattr(publisher, "_start_copy", lambda: [copies.append(None), start_copy()])
    events = ((0, 0.0, True), (1, 0.09, False), (0, 0.02, True), (0, 0.2, False), (1, 0.01, False), (0, 0.1, True))
    for steps, seconds, sent in events:
        now += seconds
        for _ in range(steps):
            session.step()
        output = step_output()
        publisher.attach(output)
        assert hasattr(output, worker.MESSAGE) is sent
    assert len(copies) == 4


def test_new_cache_publishes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of what outlives a cache are not published again."""

    class Runner:
        vllm_config = engine_config()

    runner = Runner()
    monkeypatch.setattr(plugin.draft_graphs, "counts", lambda _: {"draft_graph_replays": 3})
    for _ in range(2):
        plugin._start_metrics(runner)
    assert positive(vars(relay.totals())) == {"engines": 1, "draft_graph_replays": 3}
    del runner.vllm_config.model_config
    worker.publishers.clear()
    plugin._start_metrics(runner)  # an error of the metrics does not stop the engine
    assert len(worker.publishers) == 0


def test_errors_of_metrics_stop_no_step(caplog: pytest.LogCaptureFixture, registry: Any) -> None:
    """In the worker, the engine core and the front end. The worker's are counted, and the counts arrive later."""

    def counts(_: Any) -> dict[str, float]:
        if broken:
            raise RuntimeError("planted")
        return {}

    broken = [True]
    session, scheduler, output = CountedSession(), RelayingScheduler(), step_output()
    publisher = session.publisher()
    session.step()
    publisher.add(session, counts)
    publisher.attach(output)
    publisher.forget()
    broken.clear()
    front_end(scheduler.update_from_output(None, output))  # without a message
    publisher.attach(output)
    assert front_end(scheduler.update_from_output(None, output))[0].waiting_lora_adapters == {}
    assert samples(registry)["nwor_windows_total"] == 1
    assert samples(registry)["nwor_errors_total/sending counters failed"] == 1
    output._nwor_message = "no message"
    front_end(scheduler.update_from_output(None, output))
    scheduler._outputs = lambda: None
    scheduler.update_from_output(None, output)
    assert [record.getMessage().split(":")[1] for record in caplog.records] == [
        " sending counters failed", " leaving out the warm-up failed", " no feature is active",
        " receiving counters failed", " passing on counters failed",
    ]  # fmt: skip


def test_engine_without_feature_gets_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Another engine of this process has one."""
    scheduler = RelayingScheduler()
    scheduler.vllm_config.additional_config = {}
    scheduler.update_from_output(None, step_output())
    assert caplog.messages == []


# ---------------------------------------------------------------- the plugin's hooks


class Runner:
    """A runner without an engine."""

    vllm_config, kv_cache_config = SimpleNamespace(additional_config={}), None


def test_warm_up_is_left_out() -> None:
    """A warm-up runs steps with windows."""
    runner, session = Runner(), CountedSession()
    warm_up = plugin._warming(lambda model_runner, *_: session.step() or "warm")
    worker.publishers[runner] = session.publisher()
    assert warm_up(Runner(), None, None) == "warm"  # of an engine without a feature
    assert relay.totals().windows == 1
    assert warm_up(runner, None, None) == "warm"
    assert relay.totals().windows == 0
    session.step()
    assert relay.totals().windows == 1


def test_sleeping_engine_keeps_its_counts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its counters are on the device, whose memory vLLM then releases. An error does not keep it awake."""

    class Worker:
        def __init__(self, model_runner: Any) -> None:
            self.model_runner = model_runner

        def get_draft_model(self) -> None:
            return None

        @plugin._sleeping
        def sleep(self, level: int) -> str:
            calls.append(f"sleep {level}")
            cursors.num_skipped = None  # released
            return "asleep"

    def go_to_sleep() -> None:
        calls.append("go_to_sleep")
        raise RuntimeError("planted")

    calls: list[str] = []
    runner, session, state = (
        Runner(),
        SimpleNamespace(go_to_sleep=go_to_sleep),
        RecurrentEngine.__new__(RecurrentEngine),
    )
    cursors: Any = Cursors(1, torch.device("cpu"))
    cursors.num_skipped.fill_(3)
    state.builders, state._cursors, state._slept = [SimpleNamespace(steps=5)], cursors, None
    monkeypatch.setitem(plugin._sessions, runner, session)
    monkeypatch.setitem(plugin.recurrent._engines, runner, state)
    assert Worker(runner).sleep(level=2) == "asleep"
    assert Worker(Runner()).sleep(1) == "asleep"  # of an engine without a feature
    assert calls == ["go_to_sleep", "sleep 2", "sleep 1"]
    assert state.counts(*state.counter.tolist())["recurrent_skipped_requests"] == 3
    [record] = caplog.records
    assert record.getMessage().startswith("nwor: copying counters failed: planted; the engine goes on without")


@pytest.mark.parametrize(("level", "kept", "warns"), [(1, [], False), (2, [], True), (2, ["draft.*"], False)])
def test_sleep_that_loses_the_drafter_warns(
    level: int, kept: list[str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """After level 2 vLLM 0.33 loads the target's weights again, and not the drafter's."""
    worker = SimpleNamespace(
        model_runner=Runner(), get_draft_model=object, model_config=SimpleNamespace(sleep_preserve_parameter_names=kept)
    )
    assert plugin._sleeping(lambda self, level=1: level)(worker, level=level) == level
    assert [record.getMessage()[:25] for record in caplog.records] == ["nwor: after sleep level 2"] * warns


@pytest.mark.parametrize("level", [1, 2])
def test_worker_without_get_draft_model_sleeps(level: int, caplog: pytest.LogCaptureFixture) -> None:
    assert plugin._sleeping(lambda self, level: level)(SimpleNamespace(model_runner=Runner()), level) == level
    assert len(caplog.records) == level - 1


# ---------------------------------------------------------------- settings reach every process


def test_ray_workers_get_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ray.ray_env import get_env_vars_to_copy

    names = {"VLLM_NWOR_MODE", "VLLM_NWOR_AUDIT", "VLLM_NWOR_ON_UNSUPPORTED"}
    for name in names:
        monkeypatch.setenv(name, "x")
    assert names <= get_env_vars_to_copy(destination="RayWorkerWrapper")


@pytest.mark.parametrize("variable", ["VLLM_NWOR", "VLLM_NWOR_MODE"])
def test_vllm_knows_announced_variables(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """They do not change the key of compiled code either."""
    import vllm.envs
    from vllm.platforms.interface import Platform

    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    table = {name: get for name, get in vllm.envs.environment_variables.items() if "NWOR" not in name}
    monkeypatch.setattr(vllm.envs, "environment_variables", table)
    monkeypatch.setattr(vllm.envs, "compile_factors", inspect.unwrap(vllm.envs.compile_factors))
    vanilla = vllm.envs.compile_factors()
    monkeypatch.setenv(variable, "on")
    with pytest.raises(ValueError, match=variable):
        Platform.validate_environ(hard_fail=True)
    announce_variables()
    announce_variables()
    Platform.validate_environ(hard_fail=True)
    assert vllm.envs.environment_variables[variable]() == "on"
    assert variable in inspect.unwrap(vllm.envs.compile_factors)()  # without the plugin
    assert vllm.envs.compile_factors() == vanilla != {}
