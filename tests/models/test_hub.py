"""Models from the Hugging Face hub: what is fetched, what is refused, and what is left when a download breaks off. The hub is a
folder here."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from lockstep.cli.main import main
from lockstep.errors import CheckpointError, ConfigError, UserError
from lockstep.models.checkpoint import load_config
from lockstep.models.hub import fetch_hub
from lockstep.models.tiny import make_tiny
from lockstep.models.tokenizer import load_tokenizer
from lockstep.trainer.recipes import prepare_model
from lockstep.trainer.spec import ModelSource

SHA = "0123456789abcdef0123456789abcdef01234567"
REFUSED = (
    "pytorch_model.bin",
    "modeling_tiny.py",
    "README.md",
    "training_args.bin",
    "original/model.safetensors",
)


class Hub:
    """One repository, `org/tiny`, with branch `main`. calls: patterns of every download. broken: raised by the second one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.broken = folder, [], None  # type: tuple[Path, list[list[str]], Exception | None]
        self.refused: Exception | None = None

    def model_info(self, name: str, revision: str) -> SimpleNamespace:
        if self.refused is not None:
            raise self.refused
        assert (name, revision) == ("org/tiny", "main")
        files = [str(f.relative_to(self.folder)) for f in self.folder.rglob("*") if f.is_file()]
        return SimpleNamespace(sha=SHA, siblings=[SimpleNamespace(rfilename=f) for f in sorted(files)])

    def snapshot_download(
        self, name: str, *, revision: str, local_dir: Path, allow_patterns: list[str]
    ) -> None:
        assert (name, revision) == ("org/tiny", SHA), "everything is of one commit"
        self.calls.append(allow_patterns)
        for file in self.model_info(name, "main").siblings:
            if any(fnmatch.fnmatch(file.rfilename, p) for p in allow_patterns):
                to = local_dir / file.rfilename
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.folder / file.rfilename, to)
                if self.broken is not None and len(self.calls) > 1:
                    raise self.broken
        (local_dir / ".cache").mkdir(exist_ok=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    make_tiny(tmp_path / "hub")
    for name in REFUSED:
        (tmp_path / "hub" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "hub" / name).write_bytes(b"x")
    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


def test_it_brings_a_model_and_no_code(hub: Hub, tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    assert fetch_hub(out, name="org/tiny") == out
    spec = load_config(out)
    assert spec == load_config(hub.folder) and load_tokenizer(out, spec) is not None
    there = {str(f.relative_to(out)) for f in out.rglob("*")}
    assert there == {f.name for f in hub.folder.iterdir()} - {"original"} - set(REFUSED)
    assert hub.calls[0] == ["config.json"], "the architecture is known before the weights"
    assert [f.name for f in out.parent.iterdir()] == ["tiny"]


def test_a_recipe_downloads_once(hub: Hub, tmp_path: Path) -> None:
    source = ModelSource(str(tmp_path / "m"), "hub", {"name": "org/tiny"})
    assert prepare_model(source) == prepare_model(source) == tmp_path / "m"
    assert len(hub.calls) == 2
    for args in ({}, {"name": "org/tiny", "branch": "main"}):
        with pytest.raises(ConfigError, match=r"model\.args.*recipe hub"):
            prepare_model(ModelSource(str(tmp_path / "other"), "hub", args))  # type: ignore[arg-type]


def test_a_broken_download_leaves_no_model_and_goes_on(hub: Hub, tmp_path: Path) -> None:
    hub.broken = ConnectionError("reset by peer")
    with pytest.raises(
        UserError, match=r"org/tiny: .* \(ConnectionError: reset by peer\) -> try again, which goes on"
    ):
        fetch_hub(tmp_path / "m", name="org/tiny")
    half = tmp_path / f".m-{SHA[:12]}.part"
    assert not (tmp_path / "m").exists() and (half / "config.json").is_file()
    hub.broken = None
    fetch_hub(tmp_path / "m", name="org/tiny")
    assert (tmp_path / "m" / "config.json").is_file() and not half.exists()


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        (
            errors.GatedRepoError,
            "is gated.*accept its terms at https://huggingface.co/org/tiny, and set HF_TOKEN",
        ),
        (errors.RepositoryNotFoundError, "no such model.*HF_TOKEN"),
        (errors.RevisionNotFoundError, "no revision 'main'"),
        (errors.HFValidationError, "is no name of a model.*Qwen/Qwen3-1.7B"),
    ],
)
def test_what_the_hub_refuses(hub: Hub, tmp_path: Path, refused: Any, text: str) -> None:
    hub.refused = refused.__new__(refused)
    with pytest.raises(CheckpointError, match=text):
        fetch_hub(tmp_path / "m", name="org/tiny")
    assert not hub.calls


def test_only_safetensors_of_a_known_architecture(hub: Hub, tmp_path: Path) -> None:
    config = hub.folder / "config.json"
    config.write_text(
        config.read_text().replace('"llama"', '"mamba"').replace("LlamaForCausalLM", "MambaForCausalLM")
    )
    with pytest.raises(CheckpointError, match="mamba"):
        fetch_hub(tmp_path / "m", name="org/tiny")
    assert hub.calls == [["config.json"]], "no weights were fetched"
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="org/tiny: has no safetensors"):
        fetch_hub(tmp_path / "m", name="org/tiny")


def test_what_is_there_is_not_overwritten(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["model", "fetch", "org/tiny", str(tmp_path / "m")])
    assert stop.value.code == 2 and "something else is here already" in capsys.readouterr().err
    assert not hub.calls and (tmp_path / "m" / "notes.txt").read_text() == "mine"
    with pytest.raises(SystemExit) as stop:
        main(["model", "fetch", "org/tiny", str(tmp_path / "fresh")])
    assert stop.value.code == 0 and capsys.readouterr().out == f"wrote {tmp_path / 'fresh'}\n"


def test_no_connection_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as stop:
        main(["model", "fetch", "org/tiny", str(tmp_path / "m")])
    told = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and told.count("\n") == 1
        and told.startswith("error: org/tiny: the model could not be")
    )
    assert list(tmp_path.iterdir()) == []
