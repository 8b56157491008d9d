"""Test ``nwor-ops bench`` without vLLM: the conclusions from ratios, the refusals, and that no process is left.

tests/vllm/test_bench_servers.py runs the command with real servers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nwor_ops.testing.server import Server, ServerFailed, error_of

pytest.importorskip("rich")
pytest.importorskip("typer")

from rich.console import Console
from typer.testing import CliRunner

from nwor_ops.cli import bench, bench_options
from nwor_ops.cli.app import app
from nwor_ops.cli.bench_client import Run
from nwor_ops.cli.bench_options import (
    OURS,
    VANILLA,
    BenchOptions,
    check_form,
    check_options,
    parse_requests,
    parse_variables,
)
from nwor_ops.cli.bench_report import Finding, Load, as_dict, interval_of_median, print_loads, remarks, sentence
from nwor_ops.cli.progress import Tasks

STEADY = (1.01, 1.02, 0.99, 1.0, 1.01, 0.98)


def run(tok_s: float, drafts: int = 400, accepted: int = 600, output_tokens: int = 1000) -> Run:
    return Run(10, 5.0, tok_s, 12.0, 3.0, output_tokens, drafts, accepted)


def load(ratios: Sequence[float], requests: int = 4, **ours: int) -> Load:
    """Vanilla makes 100 tok/s times a drift that both sides share."""
    rates = [100.0 * (1 + 0.3 * number) for number in range(len(ratios))]
    of_ours = [run(rate * ratio, **ours) for rate, ratio in zip(rates, ratios, strict=True)]
    return Load(requests, {VANILLA: [run(rate) for rate in rates], OURS: of_ours})


# ---------------------------------------------------------------- what ratios prove


@pytest.mark.parametrize("count", range(1, 15))
def test_the_interval_misses_the_median_in_at_most_one_of_twenty_cases(count: int) -> None:
    """Each value is above or below the true median with the same probability. All cases are counted."""
    values = [float(number) for number in range(count)]
    interval = interval_of_median(values)
    missed = dict.fromkeys(range(count // 2 + 2), 0)
    for signs in itertools.product((0, 1), repeat=count):
        below = sum(signs)
        for k in missed:  # the interval from the k-th smallest to the k-th largest value
            missed[k] += below < k or count - below < k
    allowed = 0.05 * 2**count
    k = max(k for k in missed if missed[k] <= allowed)
    assert interval == ((values[k - 1], values[-k]) if k else None)
    assert (interval is None) == (count < 6)


def test_order_does_not_matter_for_the_interval() -> None:
    assert interval_of_median([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    assert interval_of_median([]) is None


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
def test_a_difference_counts_if_the_interval_is_on_one_side_of_1(ratios: Sequence[float], finding: Finding) -> None:
    measured = load(ratios)
    assert measured.ratios == pytest.approx(list(ratios))
    assert measured.finding is finding


def test_the_sentences_say_whether_it_is_noise() -> None:
    noise = "no difference can be told from noise: 1.005 times vanilla's output tok/s (0.980 to 1.020)"
    assert sentence(load(STEADY)) == f"4 requests at a time: {noise}"
    assert sentence(load((1.5,) * 6, requests=1)).startswith("1 request at a time: faster: 1.500 times")
    assert sentence(load((1.5,) * 2)).endswith("2 rounds are too few to tell it from noise (at least 6)")


def test_a_difference_that_two_starts_may_have_is_remarked(tmp_path: pathlib.Path) -> None:
    small, large = load((1.005,) * 6), load((1.02,) * 6)
    options = BenchOptions("transaction", ("MODEL",), tmp_path)
    assert "two starts of one engine" in "".join(remarks(options, [small]))
    assert list(remarks(options, [large])) == []
    assert list(remarks(BenchOptions("transaction", ("MODEL",), tmp_path, restart=True), [small])) == []


# ---------------------------------------------------------------- unequal acceptance


@pytest.mark.parametrize(
    ("ours", "obstacle"),
    [
        ({"accepted": 632}, "2.50 (vanilla) and 2.58 tokens per step differ by more than 2 %"),
        ({"accepted": 568}, "2.50 (vanilla) and 2.42 tokens per step differ by more than 2 %"),
        ({"drafts": 420, "accepted": 630}, "40.0 (vanilla) and 42.0 steps with drafts per 100 output tokens differ"),
        ({"drafts": 0, "accepted": 0}, "nwor verified no draft"),
    ],
)
def test_sides_with_unequal_acceptance_get_no_ratio(
    ours: dict[str, int], obstacle: str, tmp_path: pathlib.Path
) -> None:
    measured = load((1.234,) * 6, **ours)
    assert measured.finding is Finding.NOT_COMPARABLE
    assert measured.obstacle is not None
    assert measured.obstacle.startswith(obstacle)
    found = as_dict(measured)
    assert (found["ratio"], found["finding"]) == (None, "not comparable")
    console = Console(file=io.StringIO(), width=120)
    print_loads(console, BenchOptions("transaction", ("MODEL",), tmp_path), [measured])
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"not comparable: {obstacle}" in " ".join(printed.split())
    assert "1.23" not in printed


def test_a_small_difference_of_the_acceptance_is_tolerated() -> None:
    assert load(STEADY, accepted=615).obstacle is None
    assert as_dict(load(STEADY))["ratio"]["median"] == pytest.approx(1.005)


def test_two_sides_without_drafts_are_not_comparable() -> None:
    without = [run(100.0, drafts=0, accepted=0)] * 6
    assert (
        Load(1, {VANILLA: without, OURS: without}).obstacle
        == "no draft was verified; this traffic or method makes none"
    )


def test_the_picture_shows_a_ratio_only_where_there_is_one(tmp_path: pathlib.Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    from nwor_ops.cli.bench_picture import COLOURS, draw_loads

    def colours(*loads: Load) -> set[str]:
        draw_loads(loads, tmp_path / "bench.png", "headline", "subtitle")
        pixels = (image.imread(tmp_path / "bench.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
        drawn = {"#{:02x}{:02x}{:02x}".format(*pixel) for pixel in {tuple(pixel) for pixel in pixels}}
        return drawn & {COLOURS[Finding.FASTER], COLOURS[Finding.SLOWER]}

    faster, refused = load((1.5, 1.6, 1.4, 1.5, 1.7, 1.3)), load((1.5,) * 6, accepted=700)
    assert colours(faster) == {COLOURS[Finding.FASTER]}
    assert colours(faster, refused) == {COLOURS[Finding.FASTER], COLOURS[Finding.SLOWER]}
    assert colours(refused) == {COLOURS[Finding.SLOWER]}  # its reason


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("bench", "mixture", "--", "MODEL"), "'mixture' is not one of 'transaction', 'draft', 'recurrent'"),
        (("bench", "draft"), "Missing argument"),
        (("bench", "draft", "MODEL", "--tensor-parallel-size", "2"), "No such option"),
        (("bench", "draft", "--requests", "1,x", "--", "MODEL"), "--requests must be different positive numbers like"),
        (("bench", "draft", "--requests", "4,4", "--", "MODEL"), "--requests must be different positive numbers like"),
        (("bench", "draft", "--rounds", "0", "--", "MODEL"), "'--rounds'"),
        (("bench", "draft", "--vanilla-env", "A", "--", "MODEL"), "--vanilla-env must be NAME=VALUE, got 'A'"),
        (("bench", "draft", "--vanilla-env", "VLLM_NWOR_MODE=cow", "--", "MODEL"), "is a setting of nwor_ops"),
        (("bench", "draft", "--vanilla-args", "'", "--", "MODEL"), "--vanilla-args: No closing quotation"),
        (("bench", "draft", "--output", "/proc/none", "--", "MODEL"), "--output: /proc/none cannot be created"),
        (("bench", "draft", "--output", "/proc", "--", "MODEL"), "--output: no file can be created in /proc"),
        pytest.param(
            ("bench", "draft", "--output", "x" * 300, "--", "MODEL"), "cannot be created: File name too long", id="name"
        ),
        (("bench", "draft", "--seconds", "inf", "--", "MODEL"), "for --seconds: must be a finite number, got inf"),
        (("bench", "draft", "--seconds", "1e308", "--", "MODEL"), "for --seconds: must be at most 1,000,000"),
        (("bench", "draft", "--temperature", "inf", "--", "MODEL"), "for --temperature: must be a finite number"),
    ],
)
def test_a_mistake_exits_with_2_and_names_the_option(
    words: Sequence[str], complaint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200", "TERM": "dumb"})
    assert done.exit_code == 2, done.output
    assert complaint in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "must be 'random' or a file that ends with .jsonl"),
        ("", "is empty"),
        ("what\n", 'line 1 of .* must be an object with a "prompt"'),
        ('{"prompt": "a", "output_tokens": 3}\n{"prompt": 7}\n', 'line 2 of .* must be an object with a "prompt"'),
        ('{"prompt": "a"}\n', 'line 1 of .* has no "output_tokens"; set --output-len'),
        pytest.param("[" * 100_000, 'line 1 of .* must be an object with a "prompt"', id="too deep"),
        pytest.param(f'{{"a": {"9" * 5000}}}', 'line 1 of .* must be an object with a "prompt"', id="too long"),
        ('{"prompt": "a", "output_tokens": 0}\n', '"output_tokens" in line 1 of .* must be a positive number, got 0'),
        ('{"prompt": "a", "output_tokens": true}\n', '"output_tokens" in line 1 of .* must be a positive .*, got True'),
    ],
)
def test_a_file_of_prompts_is_checked_before_a_server_starts(
    text: str | None, complaint: str, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"^--prompts.*{complaint}"):
        check_options(BenchOptions("draft", ("MODEL",), tmp_path, prompts=str(path)))
    path.write_text('{"prompt": "a"}\n')
    check_options(BenchOptions("draft", ("MODEL",), tmp_path, prompts=str(path), output_tokens=3))
    # Only a newline ends a line of JSON. Texts have other separators.
    path.write_text('{"prompt": "a\u2028b\x85c", "output_tokens": 3}\n', encoding="utf-8")
    check_options(BenchOptions("draft", ("MODEL",), tmp_path, prompts=str(path)))


def test_a_file_of_prompts_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(ValueError, match=r"^--prompts: \S+prompts\.jsonl cannot be read: Input/output error$"):
        check_options(BenchOptions("draft", ("MODEL",), tmp_path, prompts=str(path)))


def test_valid_lists_are_parsed() -> None:
    assert parse_requests("1, 16,64") == (1, 16, 64)
    assert parse_variables(["A=b=c", "B="]) == {"A": "b=c", "B": ""}


def test_the_sides_differ_in_the_feature_only(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor_ops.config import NworConfig

    monkeypatch.setenv("VLLM_NWOR_AUDIT", "1")  # set in the operator's shell
    monkeypatch.setenv("A_VARIABLE", "kept")
    wanted = {
        "transaction": NworConfig(mode="stage"),
        "draft": NworConfig(draft_graphs=True),
        "recurrent": NworConfig(recurrent=True),
    }
    additional = {"nwor": {"mode": "cow", "draft_graphs": True, "recurrent": True, "on_unsupported": "vanilla"}}
    for feature, config in wanted.items():
        options = BenchOptions(
            feature, ("MODEL",), tmp_path, mode="stage", vanilla_arguments=("--more",), vanilla_environment={"B": "2"}
        )
        sides = {side: options.environment(side) for side in bench_options.SIDES}
        assert NworConfig.load(additional, sides[OURS]) == config
        assert NworConfig.load(additional, sides[VANILLA]) == NworConfig()
        assert {side["A_VARIABLE"] for side in sides.values()} == {"kept"}
        assert (sides[VANILLA]["B"], sides[OURS].get("B")) == ("2", None)
        assert (options.arguments_of(VANILLA), options.arguments_of(OURS)) == (["MODEL", "--more"], ["MODEL"])
        control = BenchOptions(feature, ("MODEL",), tmp_path, control=True).environment(OURS)
        assert NworConfig.load(additional, control) == NworConfig()


def test_the_form_is_measured_and_named(tmp_path: pathlib.Path) -> None:
    from nwor_ops.config import NworConfig

    for form in ("exact", "chunk"):
        options = BenchOptions("recurrent", ("MODEL",), tmp_path, form=form)
        assert NworConfig.load({}, options.environment(OURS)).form == form
        assert options.titles[OURS] == f"one state ({form})"
        assert options.label == ("recurrent", form)


@pytest.mark.parametrize(
    ("form", "variable", "setting", "asked"),
    [
        ("exact", "chunk", None, "VLLM_NWOR_RECURRENT asks for chunk"),
        ("chunk", "1", None, "VLLM_NWOR_RECURRENT asks for exact"),
        ("exact", None, "chunk", "--additional-config asks for chunk"),
        ("chunk", "exact", "chunk", "VLLM_NWOR_RECURRENT asks for exact"),  # the environment wins
        ("exact", "exact", "chunk", None),
        ("exact", "0", None, None),
        ("chunk", "chunk", None, None),
        ("chunk", None, None, None),
    ],
)
def test_settings_of_another_form_are_refused(
    form: str, variable: str | None, setting: str | None, asked: str | None, tmp_path: pathlib.Path
) -> None:
    """Other variables are ignored, as in the servers."""
    environment = {"VLLM_NWOR_MODE": "neither"} | ({"VLLM_NWOR_RECURRENT": variable} if variable else {})
    additional = {"nwor": {"recurrent": setting}} if setting else {}
    options = BenchOptions("recurrent", ("MODEL",), tmp_path, form=form)
    sentence = f"--form: {form} would be measured, but {asked}; use the same form in both, or remove that setting"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$") if asked else contextlib.nullcontext():
        check_form(options, additional, environment)
    check_form(dataclasses.replace(options, feature="draft"), additional, environment)
    check_form(dataclasses.replace(options, control=True), additional, environment)


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


def start(program: str, log: pathlib.Path, **named: Any) -> Server:
    return Server(["MODEL"], dict(os.environ), log, (sys.executable, "-c", program), **named)


def gone(process: int) -> bool:
    status = pathlib.Path(f"/proc/{process}/stat")
    with_state = status.read_text() if status.exists() else ") Z"
    return with_state.rpartition(") ")[2].startswith("Z")


def test_a_server_is_stopped_with_all_its_processes(tmp_path: pathlib.Path) -> None:
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


def test_a_server_that_ends_is_reported_with_its_first_error(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "server.log"
    server = start("raise ValueError('no room for the cache')", log)
    with pytest.raises(ServerFailed) as caught:
        server.wait_until_ready(60)
    assert str(caught.value) == f"the server ended: ValueError: no room for the cache (log: {log})"
    server.stop()


def test_a_server_that_does_not_answer_in_time_is_reported(tmp_path: pathlib.Path) -> None:
    server = start("import time; time.sleep(600)", tmp_path / "server.log")
    try:
        with pytest.raises(ServerFailed, match="did not answer within 0 s"):
            server.wait_until_ready(0.1)
    finally:
        server.stop()


def test_the_cause_is_found_in_a_log_of_vllm() -> None:
    log = """\
(EngineCore pid=7) ERROR 11-23 [core.py:1] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-23 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-23 [core.py:1]     raise error
(EngineCore pid=7) ERROR 11-23 [core.py:1] nwor_ops.vllm.errors.Unsupported: nwor: the layers are of an unknown class
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert error_of(log) == "Unsupported: nwor: the layers are of an unknown class"
    invalid = """\
WARNING 11-23 22:17:13 [api_utils.py:33] This may cause `OSError: Too many open files`. Consider more.
Traceback (most recent call last):
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, max_model_len is too large. [type=value_error, input_value=ArgsKwargs(), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev
"""
    assert error_of(invalid) == "ValidationError: Value error, max_model_len is too large."
    assert error_of("one\ntwo\n") == "the end of its log is\n    one\n    two"
    assert "core initialization" in error_of(log.splitlines()[-1])  # nothing better is known


def test_a_second_interrupt_does_not_leave_a_server_behind() -> None:
    """Ctrl-C while the servers are being stopped is ignored."""
    program = """
import os, pathlib, signal, sys
from nwor_ops.cli.bench import _uninterrupted
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore this signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    with _uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        print("stopped all", flush=True)
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, ["stopped all", "True"]), done.stderr


def test_json_has_every_round() -> None:
    found = json.loads(json.dumps(as_dict(load(STEADY))))
    assert [len(runs) for runs in found["runs"].values()] == [6, 6]
    assert found["ratio"]["rounds"] == pytest.approx(list(STEADY))
    assert math.isclose(found["acceptance"]["vanilla"]["tokens_per_step"], 2.5)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_result_is_printed_if_it_cannot_be_written(
    as_json: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {
        "exit_code": 0, "model": "MODEL", "device": {"count": 1, "name": "CPU"}, "seconds": 1.0,
        "versions": {"vllm": "0", "nwor_ops": "0"},
    }  # fmt: skip
    (tmp_path / "result.json").mkdir()
    monkeypatch.setattr(bench, "_measure", lambda *_: (result, [load(STEADY)]))
    assert bench.run_bench(BenchOptions("draft", ("MODEL",), tmp_path), as_json) == 0
    printed = capsys.readouterr()
    assert f"nwor-ops bench: --output: {tmp_path} could not be written: Is a directory" in printed.err
    assert json.loads(printed.out) == result if as_json else "1 x CPU, vLLM 0" in printed.out
    assert "picture:" not in printed.out


# ---------------------------------------------------------------- rounds


class Machine:
    """Stands in for the client and for two servers: notes what is asked, and needs half a second for each request."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int, int]] = []
        self.started: list[str] = []

    @contextlib.contextmanager
    def running(self, *sides: str) -> Iterator[dict[str, str]]:
        self.started += sides
        yield {side: side for side in sides}

    def run(self, server: str, requests: int, prompts: int, seed: int) -> Run:
        self.asked.append((server, requests, prompts, seed))
        return Run(prompts, 0.5 * prompts / requests, 100.0, 1.0, 1.0, 10, 4, 6)


@pytest.mark.parametrize("restart", [False, True])
def test_the_sides_run_the_same_in_turn(restart: bool, tmp_path: pathlib.Path) -> None:
    options = BenchOptions("draft", ("MODEL",), tmp_path, requests=(1, 4), rounds=2, seconds=5.1, restart=restart)
    machine, console = Machine(), Console(file=io.StringIO())
    plan = bench.Plan(options, machine)  # type: ignore[arg-type]
    measure = bench._measure_restarted if restart else bench._measure_side_by_side
    measure(options, console, Tasks(console, 2), machine, plan)  # type: ignore[arg-type]
    measured = [asked for asked in machine.asked if asked[3] not in bench.WARM_UP_SEEDS]
    # A request takes half a second, so 5.1 seconds are enough for 10, one after the other.
    first, second = [(requests, 10 * requests, 0) for requests in (1, 4)], [(1, 10, 1), (4, 40, 1)]
    if restart:
        assert measured == [(side, *run) for side in (VANILLA, OURS) for run in first] + [
            (side, *run) for side in (OURS, VANILLA) for run in second
        ]
        assert machine.started == [VANILLA, OURS, OURS, VANILLA]
    else:
        assert measured == [(side, *run) for run in first for side in (VANILLA, OURS)] + [
            (side, *run) for run in second for side in (OURS, VANILLA)
        ]
        assert machine.started == [VANILLA, OURS]
    warmed_up = {(server, requests) for server, requests, _, seed in machine.asked if seed in bench.WARM_UP_SEEDS}
    assert warmed_up == set(itertools.product((VANILLA, OURS), (1, 4)))
    assert {len(runs) for of_load in plan.runs.values() for runs in of_load.values()} == {2}
