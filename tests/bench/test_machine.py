"""Where the kernels can't run: one clear line, from every command; and what a result says of its origin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.bench import doctor, machine
from lockstep.bench.machine import MachineError, require_hopper, stamp, workspace_meaning
from lockstep.cli.main import main
from lockstep.errors import ConfigError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as e:
        main(arguments)
    return int(e.value.code or 0)


@without_gpu
@pytest.mark.parametrize("command", ["gemm", "quant", "attention", "check"])
def test_a_machine_without_the_gpu_is_refused_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", command) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == (
        f"error: machine: lockstep bench {command} needs an NVIDIA GPU of compute capability 9.0 (Hopper) and triton "
        "(torch sees no NVIDIA GPU here) -> run it on such a machine\n"
    )


def test_bad_arguments_are_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "hopper_missing", lambda: None)
    monkeypatch.setenv(machine.WORKSPACE, "0")
    assert run("bench", "check", "--sanitize", "memcheck,nonsense") == 2
    assert "--sanitize: 'nonsense' is unknown -> one of memcheck, racecheck" in capsys.readouterr().err
    assert run("bench", "check", "--goals", "--small") == 2
    assert "--goals needs every kernel in full size" in capsys.readouterr().err
    assert run("bench", "check", "--only", "quantize,nonsense") == 2
    assert "--only: 'nonsense' is unknown -> one of quantize, norm" in capsys.readouterr().err


def test_the_package_is_imported_without_triton_or_a_gpu() -> None:
    """Every module, in a process in which importing triton fails."""
    folder = Path(machine.__file__).parent
    modules = [f"lockstep.bench.{file.stem}" for file in folder.glob("*.py") if file.stem != "__init__"]
    script = (
        "import sys, importlib\nsys.modules['triton'] = None\n"
        "for name in sys.argv[1:]:\n    importlib.import_module(name)\nimport lockstep.cli.bench"
    )
    env = {
        **os.environ,
        "PYTHONPATH": str(folder.parents[1]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", script, *modules], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("capability", "triton", "words"),
    [((8, 0), "3.6.0", "an A100 has compute capability 8.0"), ((9, 0), None, "triton is not installed")],
)
def test_the_reason_is_named(
    capability: tuple[int, int], triton: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an A100")
    monkeypatch.setattr(machine, "_version", lambda name: triton)
    with pytest.raises(MachineError, match=words):
        require_hopper("this")


def test_the_workspace_is_set_to_zero_unless_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "hopper_missing", lambda: None)
    monkeypatch.setenv(machine.WORKSPACE, "4096")
    require_hopper("this")
    assert os.environ[machine.WORKSPACE] == "4096"
    monkeypatch.delenv(machine.WORKSPACE)
    require_hopper("this")
    assert os.environ[machine.WORKSPACE] == "0"
    assert stamp().settings == {machine.WORKSPACE: "0"}


def test_what_the_workspace_setting_means() -> None:
    assert workspace_meaning(None).startswith("not set; the Hopper kernels set it to 0")
    assert "the same bits in every batch" in workspace_meaning("0")
    assert "4096 KiB: cuBLASLt may split K" in workspace_meaning("4096")


def test_a_stamp_names_versions_commit_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/lockstep", "bench", "gemm", "--out", "a b.json"])
    monkeypatch.setenv(machine.COMMIT, "abc")
    found = stamp()
    assert (found.commit, found.command) == ("abc", "lockstep bench gemm --out 'a b.json'")
    monkeypatch.setattr(
        sys, "argv", ["x", "--out", "/home/me/a.json", "model.path=/models/m", "runs/b", "--goals"]
    )
    assert stamp().command == "lockstep --out a.json model.path=m runs/b --goals", (
        "no path of a machine travels"
    )
    assert {"lockstep", "python", "torch", "cuda", "triton", "driver"} == set(found.versions)
    monkeypatch.delenv(machine.COMMIT)
    monkeypatch.setattr(machine, "_git", lambda *a: {"rev-parse": "f00", "status": " M x"}[a[0]])
    assert stamp().commit == "f00+changes"
    monkeypatch.setattr(machine, "_git", lambda *a: None)
    assert stamp().commit == "unknown"


@without_gpu
def test_doctor_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(machine.WORKSPACE, "32768")
    assert run("doctor", "--model", "qwen3-0.6b") == 0
    out = capsys.readouterr().out
    assert "self-test    skipped: torch sees no NVIDIA GPU here" in out
    assert (
        f"workspace    {machine.WORKSPACE} 32768 KiB: cuBLASLt may split K" in out
        and "driver       none" in out
    )


def test_doctor_refuses_a_model_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="did you mean qwen3-8b"):
        doctor.examine("qwen3-8bb", None, print)
