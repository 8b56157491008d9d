"""Real vLLM engines on the GPU: reasons to skip them, the pool that runs them, and what tests find out."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pathlib
from typing import Any

import pytest
import torch
from gpu_cases import ENGINE

from nwor_ops.testing.real_model import model_folder

HERE = pathlib.Path(__file__).resolve().parent
REPORT = "engines.json"
_records: dict[str, dict[str, Any]] = {}


def _has_vllm() -> bool:
    # Read its version, because this folder is a namespace package of the same name.
    try:
        return importlib.util.find_spec("vllm.version") is not None
    except ModuleNotFoundError:
        return False


def _why_not() -> str | None:
    if not _has_vllm():
        return "vLLM is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device is visible to torch"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_passed_cases(config, items)
    reason = _why_not()
    # Servers are other processes, so most of their tests run while the pool's engines do. Tests that start engines
    # themselves wait until the pool has ended all others. `test_readme_commands_exactly_as_written` comes last.
    items.sort(key=_turn)
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.vllm)
        missing = reason or _missing(item)
        if missing is not None:
            item.add_marker(pytest.mark.skip(reason=missing))


def _leave_out_passed_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that the file of ``NWOR_TEST_PASSED`` lists."""
    if not (listed := os.environ.get("NWOR_TEST_PASSED")):
        return
    passed = set(json.loads(pathlib.Path(listed).read_text()))
    left_out = [item for item in items if HERE in item.path.parents and _case_name(item) in passed]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _case_name(item: pytest.Item) -> str:
    return item.callspec.id if hasattr(item, "callspec") else item.name


def _turn(item: pytest.Item) -> int:
    if item.path.name.startswith("test_serve"):
        return 3 if item.name.startswith("test_readme_commands_exactly_as_written") else 0
    return 1 if _parameters(item).keys() & {"case", "refusal"} else 2


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _missing(item: pytest.Item) -> str | None:
    """Return the reason to skip a case: it needs a package or GPUs that this machine lacks."""
    parameters = _parameters(item)
    case = parameters.get("case", parameters.get("refusal"))
    needs = getattr(case, "needs", None) or ()
    for package in (needs,) if isinstance(needs, str) else needs:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    engine, there = getattr(case, "engine", {}), torch.cuda.device_count()
    gpus = math.prod(engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    return f"needs {gpus} GPUs, found {there}" if gpus > max(there, 1) else None


class Engines:
    """The interface by which a test starts engines; see :class:`engine_pool.EnginePool`."""

    def __init__(self, pool: Any, models: dict[str, str]) -> None:
        self._pool = pool
        self.models = models
        self.logs: pathlib.Path = pool.logs

    def start(self, name: str, engine: dict[str, Any], environment: dict[str, str], **use: Any) -> Any:
        """Start an engine and return a future. ``engine`` holds the differences from ``gpu_cases.ENGINE``."""
        settings = self.resolved({**ENGINE, **engine})
        settings = {key: value for key, value in settings.items() if value is not None}
        return self._pool.start(name, {"engine": settings, "environment": environment, **self.resolved(use)})

    def resolved(self, value: Any) -> Any:
        """Replace every ``@name`` by its folder."""
        if isinstance(value, dict):
            return {key: self.resolved(item) for key, item in value.items()}
        if isinstance(value, str) and value.startswith("@"):
            return str(model_folder()) if value == "@real" else self.models[value[1:]]
        return value

    def start_case(self, case: Any) -> tuple[Any, Any]:
        """Return the futures of the vanilla engine and of the engine with NWOR."""
        vanilla = None
        if case.same_tokens:
            # This engine runs without this library's code, and serves all cases that differ only in NWOR's settings.
            environment = {**case.environment, "VLLM_PLUGINS": ""}
            vanilla = self.start(f"{case.name}-vanilla", {**case.engine, **case.vanilla}, environment, **case.use)
        settings = {**case.engine, "additional_config": {"nwor": case.nwor}}
        if case.more_blocks:
            settings["num_gpu_blocks_override"] = (
                case.engine.get("num_gpu_blocks_override", ENGINE["num_gpu_blocks_override"]) + case.more_blocks
            )
        return vanilla, self.start(f"{case.name}-nwor", settings, case.environment, **case.use)

    def start_refusal(self, refusal: Any) -> Any:
        settings = {**refusal.engine, "additional_config": {"nwor": {"mode": "cow", **refusal.nwor}}}
        return self.start(refusal.name, settings, refusal.environment, requests=6)


@pytest.fixture(scope="session")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Start everything that the selected tests need, in their order. A test then waits for its engines."""
    from engine_pool import make_plugin_findable, pool_from_environment
    from tiny_models import write_models

    make_plugin_findable(tmp_path_factory.mktemp("plugin"))
    pool = pool_from_environment(tmp_path_factory.mktemp("logs"))
    shared = Engines(pool, write_models(tmp_path_factory.mktemp("models")))
    for item in request.session.items:
        parameters = _parameters(item)
        if _missing(item) is not None:
            continue
        if "case" in parameters:
            shared.start_case(parameters["case"])
        elif "refusal" in parameters:
            shared.start_refusal(parameters["refusal"])
    yield shared
    pool.close()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return a dict for what a test finds out about its engine. The report shows it with the outcome."""
    return _records.setdefault(request.node.nodeid, {"case": _case_name(request.node)})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    found = _records.get(item.nodeid)
    if found is not None and (report.when == "call" or report.failed):
        found["outcome"] = report.outcome
        if report.failed and call.excinfo is not None:
            found["why"] = str(call.excinfo.value).strip()[:1500]
    return report


def pytest_runtest_logfinish() -> None:
    """Write the findings after every test, so that a run that is stopped keeps them."""
    folder = os.environ.get("NWOR_TEST_LOGS")
    if folder and _records:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        (pathlib.Path(folder) / REPORT).write_text(json.dumps(list(_records.values()), indent=1) + "\n")
