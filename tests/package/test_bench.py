"""Test ``nwor-ops bench`` without vLLM: the conclusions from ratios, the two sides, and that no process is left.

tests/vllm/test_bench_servers.py runs the command with real servers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nwor_ops.testing.engine_process import EngineFailed, Server, error_of

pytest.importorskip("rich")

from nwor_ops.cli import bench
from nwor_ops.cli.bench import BenchOptions
from nwor_ops.cli.bench_report import (
    OURS,
    SIDES,
    VANILLA,
    Finding,
    Load,
    Run,
    as_dict,
    interval_of_median,
    print_loads,
    sentence,
)
from nwor_ops.cli.report import Exit, Report, Stopped

STEADY = (1.01, 1.02, 0.99, 1.0, 1.01, 0.98)


def run(tok_s: float, drafts: int = 400, accepted: int = 600, output_tokens: int = 1000) -> Run:
    return Run(10, 5.0, tok_s, 12.0, 3.0, output_tokens, drafts, accepted)


def load(ratios: Sequence[float], requests: int = 4, **ours: int) -> Load:
    """Vanilla makes 100 tok/s times a drift that both sides share."""
    rates = [100.0 * (1 + 0.3 * number) for number in range(len(ratios))]
    of_ours = [run(rate * ratio, **ours) for rate, ratio in zip(rates, ratios, strict=True)]
    return Load(requests, {VANILLA: [run(rate) for rate in rates], OURS: of_ours})


# ---------------------------------------------------------------- what ratios prove


@pytest.mark.parametrize("count", range(15))
def test_interval_misses_median_once_in_twenty(count: int) -> None:
    """Each value is above or below the true median with the same probability. All cases are counted."""
    values = [float(number) for number in range(count)]
    missed = dict.fromkeys(range(count // 2 + 2), 0)
    for signs in itertools.product((0, 1), repeat=count):
        below = sum(signs)
        for k in missed:  # the interval from the k-th smallest to the k-th largest value
            missed[k] += below < k or count - below < k
    k = max(k for k in missed if missed[k] <= 0.05 * 2**count)
    assert interval_of_median(values[::-1]) == ((values[k - 1], values[-k]) if k else None)
    assert (k == 0) == (count < 6)


@pytest.mark.parametrize(
    ("ratios", "finding"),
    [
        ((1.5, 1.6, 1.4, 1.5, 1.7, 1.3), Finding.FASTER),
        ((0.9, 0.95, 0.99, 0.9, 0.97, 0.93), Finding.SLOWER),
        (STEADY, Finding.NOISE),
        ((1.0,) * 6, Finding.NOISE),
        ((1.5,) * 5, Finding.TOO_FEW_ROUNDS),
        ((1.5, 1.6, 1.4, 1.5, 1.7, 1.3, 1.4, 1.5, 0.9), Finding.FASTER),  # one of nine may be an outlier
        ((1.5, 1.6, 1.4, 1.5, 1.7, 0.9), Finding.NOISE),
    ],
)
def test_difference_counts_outside_of_interval(ratios: Sequence[float], finding: Finding) -> None:
    measured = load(ratios)
    assert measured.ratios == pytest.approx(list(ratios))
    assert measured.finding is finding
    assert f"4 requests at a time: {finding.value}" in sentence(measured)


@pytest.mark.parametrize(
    ("ours", "obstacle"),
    [
        ({"accepted": 613}, "2.50 (vanilla) and 2.58 tokens per step differ by more than 2 %"),
        ({"accepted": 587}, "2.50 (vanilla) and 2.42 tokens per step differ by more than 2 %"),
        ({"drafts": 0, "accepted": 0}, "nwor verified no draft"),
        ({"accepted": 607}, None),
    ],
)
def test_unequal_acceptance_gets_no_ratio(
    ours: dict[str, int], obstacle: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = load((1.234,) * 6, **ours)
    found = json.loads(json.dumps(as_dict(measured)))
    assert [len(runs) for runs in found["runs"].values()] == [6, 6]
    print_loads(Report("bench"), "cow", [measured])
    printed = capsys.readouterr().out
    assert ("1.23" in printed) == (obstacle is None)
    if obstacle is None:
        assert found["ratio"]["rounds"] == pytest.approx([1.234] * 6)
        assert found["acceptance"]["vanilla"] == pytest.approx(2.5)
    else:
        assert (found["ratio"], found["finding"]) == (None, "not comparable")
        assert f"not comparable: {obstacle}" in printed


def test_own_drafts_are_part_of_the_ratio() -> None:
    """A draft vocabulary proposes other drafts than the whole one."""
    measured = dataclasses.replace(load((1.1,) * 6, accepted=500), same_drafts=False)
    assert (measured.finding, measured.obstacle) == (Finding.FASTER, None)


def test_sides_without_drafts_are_not_comparable() -> None:
    without = [run(100.0, drafts=0, accepted=0)] * 6
    obstacle = "no draft was verified; this traffic or method makes none"
    assert Load(1, {VANILLA: without, OURS: without}).obstacle == obstacle


# ---------------------------------------------------------------- the two sides


def test_sides_differ_in_the_feature_only(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor_ops.config import NworConfig

    monkeypatch.setenv("VLLM_NWOR_AUDIT", "1")  # set in the operator's shell
    monkeypatch.setenv("A_VARIABLE", "kept")
    wanted = {
        "cow": NworConfig(mode="cow"),
        "stage": NworConfig(mode="stage"),
        "draft_graphs": NworConfig(draft_graphs=True),
        "recurrent": NworConfig(recurrent="exact"),
        "chunk": NworConfig(recurrent="chunk"),
        "draft_vocabulary": NworConfig(draft_vocabulary=32768),
        "recurrent+draft_vocabulary": NworConfig(recurrent="exact", draft_vocabulary=32768),
    }
    assert wanted.keys() >= bench.FEATURES.keys()
    additional = {"mode": "cow", "draft_graphs": True, "recurrent": True, "draft_vocabulary": 9}
    additional = {"nwor": additional | {"on_unsupported": "vanilla"}}
    vanilla: dict[str, Any] = {"vanilla_arguments": ("--more",), "vanilla_environment": {"B": "2"}}
    for feature in wanted:
        options = BenchOptions(feature, ("MODEL",), tmp_path, **vanilla)
        sides = {side: options.environment(side) for side in SIDES}
        assert NworConfig.load(additional, sides[OURS]) == wanted[feature]
        assert NworConfig.load(additional, sides[VANILLA]) == NworConfig()
        assert {side["A_VARIABLE"] for side in sides.values()} == {"kept"}
        assert (sides[VANILLA]["B"], sides[OURS].get("B")) == ("2", None)
        assert (options.arguments_of(VANILLA), options.arguments_of(OURS)) == (["MODEL", "--more"], ["MODEL"])


@pytest.mark.parametrize("feature", ["nothing", "cow+", "cow+stage", "recurrent+chunk", "cow+cow"])
def test_unknown_or_repeated_features_are_refused(feature: str) -> None:
    with pytest.raises(Stopped, match=r"FEATURE must be cow, stage, .* or several of different"):
        bench.parse_feature(feature)


# ---------------------------------------------------------------- servers

# Answers as a server does, and has a child that ignores SIGTERM, like an engine that hangs.
ANSWERING = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); "
                          "print('ready', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'# HELP a_total x\\na_total{engine="0"} 2.0\\na_total{engine="1"} 3.0\\nb 1\\n')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def start(program: str, log: pathlib.Path) -> Server:
    return Server(["MODEL"], dict(os.environ), log, (sys.executable, "-c", program))


def gone(process: int) -> bool:
    status = pathlib.Path(f"/proc/{process}/stat")
    with_state = status.read_text() if status.exists() else ") Z"
    return with_state.rpartition(") ")[2].startswith("Z")


def test_server_stops_with_all_its_processes(tmp_path: pathlib.Path) -> None:
    server = start(ANSWERING, tmp_path / "server.log")
    try:
        server.wait_until_ready(60)
        assert server.metrics() == {"a_total": 5.0, "b": 1.0}
        child = int(server.log.split()[1])
        assert not gone(child)
    finally:
        server.stop()
    assert not server.alive()
    deadline = time.monotonic() + 30
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(child)
    server.stop()  # again


@pytest.mark.parametrize(
    ("program", "seconds", "sentence"),
    [
        ("raise ValueError('no room for the cache')", 60, "the server ended: ValueError: no room for the cache"),
        ("import time; time.sleep(600)", 0.1, "the server did not answer within 0 s"),
    ],
)
def test_server_that_fails_is_reported(program: str, seconds: float, sentence: str, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "server.log"
    server = start(program, log)
    try:
        with pytest.raises(EngineFailed) as caught:
            server.wait_until_ready(seconds)
    finally:
        server.stop()
    assert str(caught.value) == f"{sentence} (log: {log})"


CORE = "(EngineCore pid=7) ERROR 11-23 [core.py:1]"
NOTHING_BETTER = "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (f"{CORE} EngineCore failed to start.\n{CORE} Traceback (most recent call last):\n{CORE}     raise error\n"
         f"{CORE} nwor_ops.vllm.errors.Unsupported: nwor: the layers are of an unknown class\n{NOTHING_BETTER}\n",
         "Unsupported: nwor: the layers are of an unknown class"),
        ("WARNING 11-23 22:17:13 [utils.py:33] This may cause `OSError: Too many open files`. Consider more.\n"
         "Traceback (most recent call last):\npydantic_core.ValidationError: 1 validation error for ModelConfig\n"
         "  Value error, max_model_len is too large. [type=value_error, input_value=ArgsKwargs(), input_type=Args]\n"
         "    For further information visit https://errors.pydantic.dev\n",
         "ValidationError: Value error, max_model_len is too large."),
        ("one\ntwo\n", "the end of its log is\n    one\n    two"),
        ("", "the end of its log is"),
        (NOTHING_BETTER, f"the end of its log is\n    {NOTHING_BETTER}"),
    ],
)  # fmt: skip
def test_cause_is_found_in_log(log: str, error: str) -> None:
    assert error_of(log) == error


def test_interrupt_says_what_it_waits_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (sys.executable, "-c", "import time; time.sleep(600)")
    monkeypatch.setattr(bench, "Server", functools.partial(Server, program=program))
    monkeypatch.setattr(Server, "wait_until_ready", lambda *_: None)
    servers = bench.running(BenchOptions("cow", ("MODEL",), tmp_path), (), Report("bench"), *SIDES)
    with pytest.raises(KeyboardInterrupt), servers as started:
        raise KeyboardInterrupt
    assert [server.alive() for server in started.values()] == [False, False]
    sentence = "nwor-ops bench: interrupted; waiting for the servers to end, 60 s at most\n"
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize(("memory", "hint"), [((), False), (("--gpu-memory-utilization", "0.4"), True)])
def test_failed_start_names_its_side(
    memory: tuple[str, ...], hint: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers share the memory, and with --restart each has all of it."""
    program = (sys.executable, "-c", "raise RuntimeError('out of memory')")
    monkeypatch.setattr(bench, "Server", functools.partial(Server, program=program))
    servers = bench.running(BenchOptions("stage", ("MODEL",), tmp_path), memory, Report("bench"), OURS)
    with pytest.raises(EngineFailed, match=r"^stage: the server ended: RuntimeError: out of memory") as caught, servers:
        pass
    assert str(caught.value).endswith("; with --restart each side has the whole memory") is hint


def test_plugin_that_is_left_out_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with pytest.raises(Stopped, match=r"^cow will be refused: VLLM_PLUGINS=another leaves nwor_ops out") as caught:
        bench.prepare(BenchOptions("cow", ("MODEL",), tmp_path))
    assert caught.value.code == Exit.REFUSED


def test_second_interrupt_leaves_no_server() -> None:
    """Ctrl-C while the servers are being stopped is ignored."""
    program = """
import os, pathlib, signal, sys
from nwor_ops.cli.report import handling
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore this signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    with handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        print("stopped all", flush=True)
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["stopped all", "True"]), done.stderr


# ---------------------------------------------------------------- rounds and results


@pytest.mark.parametrize("as_json", [False, True])
def test_unwritable_result_is_printed(
    as_json: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {
        "exit_code": 0, "model": "MODEL", "device": {"count": 1, "name": "CPU"}, "seconds": 1.0,
        "versions": {"vllm": "0", "nwor_ops": "0"},
    }  # fmt: skip
    (tmp_path / "result.json").mkdir()
    monkeypatch.setattr(bench, "_measure", lambda *_: (result, [load(STEADY)]))
    assert bench.run_bench(BenchOptions("draft_graphs", ("MODEL",), tmp_path), Report("bench", as_json)) == 0
    printed = capsys.readouterr()
    assert f"nwor-ops bench: --output: {tmp_path}/result.json could not be written: Is a directory" in printed.err
    assert json.loads(printed.out) == result if as_json else "1 x CPU, vLLM 0" in printed.out
    assert "all figures" not in printed.out


class Machine:
    """Stands in for the client and for two servers: notes the requests, and needs half a second for each of them."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int, int, int]] = []
        self.started: list[str] = []

    @contextlib.contextmanager
    def running(self, *sides: str) -> Iterator[dict[str, str]]:
        self.started += sides
        yield {side: side for side in sides}

    def run(self, server: str, requests: int, prompts: int, seed: int) -> Run:
        self.runs.append((server, requests, prompts, seed))
        return Run(prompts, 0.5 * prompts / requests, 100.0, 1.0, 1.0, 10, 4, 6)


@pytest.mark.parametrize("restart", [False, True])
def test_sides_run_the_same_in_turn(restart: bool, tmp_path: pathlib.Path) -> None:
    options = BenchOptions("chunk", ("MODEL",), tmp_path, requests=(1, 4), rounds=2, seconds=5.1, restart=restart)
    machine: Any = Machine()
    runs = bench.measure_rounds(options, Report("bench"), machine.running, machine)
    measured = [one for one in machine.runs if one[3] not in bench.WARM_UP_SEEDS]
    # A request takes half a second, so 5.1 seconds are enough for 10, one after the other.
    first, second = [(requests, 10 * requests, 0) for requests in (1, 4)], [(1, 10, 1), (4, 40, 1)]
    turned = SIDES[::-1]
    assert measured == [
        *((side, *run) for side in SIDES for run in first), *((side, *run) for side in turned for run in second),
    ]  # fmt: skip
    assert machine.started == [*SIDES, *(turned if restart else ())]
    warmed_up = {(server, requests) for server, requests, _, seed in machine.runs if seed in bench.WARM_UP_SEEDS}
    assert warmed_up == set(itertools.product(SIDES, (1, 4)))
    assert {
        requests: {side: [one.prompts for one in of] for side, of in sides.items()} for requests, sides in runs.items()
    } == {requests: dict.fromkeys(SIDES, [10 * requests] * 2) for requests in (1, 4)}
