"""Exit codes, help, and what a command hands to the packages below."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import __version__
from lockstep.cli.main import main
from lockstep.config.load import load_run
from lockstep.errors import CapacityError, ContractError

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "config" / "files" / "small.yaml"


def run(*arguments: str) -> int:
    """Exit code of a command line, in this process."""
    with pytest.raises(SystemExit) as e:
        main(arguments)
    return int(e.value.code or 0)


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the package without installing it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120
    )


class Launch(types.ModuleType):
    """Stands in for `lockstep.launch.local` and remembers how it was called."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__("lockstep.launch.local")
        self.error = error
        self.calls: list[tuple[Any, ...]] = []

    def run_training(self, spec: Any, *, resume: str, config_yaml: str) -> Any:
        self.calls.append((spec, resume, config_yaml))
        if self.error:
            raise self.error
        return types.SimpleNamespace(step=spec.update.steps, digest="0123456789abcdef" * 4)

    def run_evaluation(self, spec: Any, model_path: str | None) -> dict[str, float]:
        self.calls.append((spec, model_path))
        return {"eval/reward": 0.25, "eval/mean_length": 12.0}


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Launch:
    module = Launch()
    monkeypatch.setitem(sys.modules, "lockstep.launch.local", module)
    return module


def test_help_lists_the_commands_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom lockstep.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as e:\n    code = e.code\n"
        "print('LOADED', sorted({m.split('.')[0] for m in sys.modules}))\nsys.exit(code)"
    )
    done = python("-c", script, "--help")
    assert done.returncode == 0, done.stderr
    listing, loaded = done.stdout.split("LOADED")
    for command in ("train", "eval", "audit", "report", "doctor", "config", "model"):
        assert f"\n  {command} " in listing
    for package in (
        "torch",
        "transformers",
        "datasets",
        "tensorboard",
        "math_verify",
        "pydantic",
        "numpy",
        "yaml",
    ):
        assert f"'{package}'" not in loaded, package


def test_reading_a_configuration_loads_no_optional_package() -> None:
    script = (
        "import sys\nfrom lockstep.config.load import load_run\nload_run(sys.argv[1])\n"
        "print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    done = python("-c", script, str(SMALL))
    assert done.returncode == 0, done.stderr
    for package in (
        "datasets",
        "tensorboard",
        "math_verify",
        "reasoning_gym",
        "gguf",
        "pyarrow",
        "pandas",
        "wandb",
        "rich",
    ):
        assert f"'{package}'" not in done.stdout, package


def test_python_m_lockstep_works_uninstalled() -> None:
    done = python("-m", "lockstep", "--version")
    assert (done.returncode, done.stdout) == (0, f"lockstep {__version__}\n")


def test_train_hands_over_the_run_and_how_to_resume(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("train", str(SMALL), "optim.lr=3e-5", "update.steps=2", "--resume", "never") == 0
    (spec, resume, text), *others = launch.calls
    assert (spec.optim.lr, spec.update.steps, resume, others) == (3e-5, 2, "never", [])
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    assert load_run(file) == spec
    assert (
        capsys.readouterr().out == "step 2, weights 0123456789abcdef (SHA-256); everything is in runs/small\n"
    )


def test_train_resumes_by_itself_unless_told_otherwise(launch: Launch) -> None:
    assert run("train", str(SMALL)) == 0
    assert launch.calls[0][1] == "auto"


def test_eval_hands_over_the_model_and_prints_the_metrics(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", str(SMALL), "--model", str(tmp_path), "eval.data.source=arithmetic", "seed=4") == 0
    spec, model = launch.calls[0]
    assert (spec.seed, model) == (4, str(tmp_path))
    assert capsys.readouterr().out == "eval/reward       0.25\neval/mean_length  12\n"


def test_eval_needs_data(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", str(SMALL)) == 2
    assert "eval.data is missing" in capsys.readouterr().err and not launch.calls


def test_a_users_mistake_is_one_line_and_exit_code_2(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.error = CapacityError("needs 9 GB", where="rollout.cache_gb", fix="give it 9")
    assert run("train", str(SMALL)) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: capacity: rollout.cache_gb: needs 9 GB -> give it 9\n")


def test_a_broken_contract_is_exit_code_3(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    launch.error = ContractError("step 3: 4 tokens differ,\nat most by 0.1")
    assert run("train", str(SMALL)) == 3
    assert capsys.readouterr().err == "error: contract: step 3: 4 tokens differ, at most by 0.1\n"


def test_an_interruption_is_exit_code_130(launch: Launch) -> None:
    launch.error = KeyboardInterrupt()
    assert run("train", str(SMALL)) == 130


def test_a_full_gpu_is_one_line_and_exit_code_2(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    launch.error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 35.12 MiB is free. "
        "Including non-PyTorch memory, this process has 139.76 GiB memory in use. Of the allocated memory 138.93 GiB is allocated"
    )
    assert run("train", str(SMALL)) == 2
    assert capsys.readouterr().err == (
        "error: capacity: a GPU ran out of memory (Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 139.80 GiB of "
        "which 35.12 MiB is free. Including non-PyTorch memory, this process has 139.76 GiB memory in use) -> "
        "`lockstep plan CONFIG` says what a run takes and what would help most; --debug shows where it ended\n"
    )
    with pytest.raises(torch.OutOfMemoryError):
        main(["train", str(SMALL), "--debug"])
    launch.error = RuntimeError("something else")
    with pytest.raises(RuntimeError):
        main(["train", str(SMALL)])


def test_our_own_bugs_keep_their_traceback(launch: Launch) -> None:
    launch.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        main(["train", str(SMALL)])


@pytest.mark.parametrize("place", [0, 2])
def test_debug_shows_the_traceback(launch: Launch, place: int) -> None:
    launch.error = CapacityError("x")
    arguments = ["train", str(SMALL)]
    arguments.insert(place, "--debug")
    with pytest.raises(CapacityError):
        main(arguments)


@pytest.mark.parametrize("arguments", [["train"], ["train", "--bad"], ["nonsense"], ["config", "show"]])
def test_a_malformed_command_line_is_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments) == 2


@dataclass
class Audit:
    passed: bool

    def lines(self) -> list[str]:
        return ["fp8  144 values", "contract holds" if self.passed else "contract BROKEN"]


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 3)])
def test_audit(
    passed: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[tuple[Any, ...]] = []

    def run_audit(
        spec: Any, flows: tuple[str, ...], plant: str | None, *, say: Callable[[str], None]
    ) -> Audit:
        calls.append((spec.seed, flows, plant))
        say(Audit(passed).lines()[0])
        return Audit(passed)

    module = types.ModuleType("lockstep.trainer.audit")
    module.run_audit = run_audit  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lockstep.trainer.audit", module)
    options = ["--flows", "fp8, fp8+kv8", "--plant", "per-tensor-activation"]
    assert run("audit", str(SMALL), "seed=7", *options) == code
    assert calls == [(7, ("fp8", "fp8+kv8"), "per-tensor-activation")]
    assert capsys.readouterr().out.splitlines() == Audit(passed).lines()


def test_dry_run_prints_and_makes_nothing(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("train", str(SMALL), "--dry-run", "update.steps=7") == 0
    out = capsys.readouterr().out
    assert "steps: 7" in out and "\n# model: models/tiny, will be made by recipe tiny, " in out
    assert not launch.calls and not list(tmp_path.iterdir())
    again = tmp_path / "again.yaml"
    again.write_text(out, encoding="utf-8")
    assert run("train", str(again)) == 0
    assert launch.calls[0][0].update.steps == 7


def test_config_show_is_a_complete_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("config", "show", str(SMALL), "optim.lr=2e-6") == 0
    out = capsys.readouterr().out
    assert "lr: 2.0e-06" in out and "tensorboard: true" in out


def test_config_reference_writes_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "docs" / "configuration.md"
    assert run("config", "reference", "--out", str(file)) == 0
    assert file.read_text(encoding="utf-8").startswith("# Configuration")
    assert str(file) in capsys.readouterr().out


def test_doctor_names_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor") == 0
    out = capsys.readouterr().out
    for word in (f"lockstep     {__version__}", "torch ", "cpu ", "gpu", "kernels      auto means"):
        assert word in out


def test_model_tiny(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "m"
    assert (
        run("model", "tiny", str(out), "--hidden", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1")
        == 0
    )
    assert (out / "config.json").exists() and "parameters" in capsys.readouterr().out
    assert run("model", "tiny", str(out)) == 2
    assert capsys.readouterr().err.startswith(f"error: checkpoint: {out}: ")


def test_import_gguf_of_nothing_is_a_users_mistake(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("model", "import-gguf", str(tmp_path / "none.gguf"), str(tmp_path / "out")) == 2
    assert "no such file" in capsys.readouterr().err
