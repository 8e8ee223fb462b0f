"""The files of a run folder, by name and as data. `logger.py` writes them, `report.py` reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.jsonl import read_lines


@dataclass(frozen=True)
class RunDir:
    """A run folder. Every reader is content with a file that isn't there."""

    path: Path

    @property
    def metrics_file(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def samples_file(self) -> Path:
        """Some completions of every step."""
        return self.path / "samples.jsonl"

    @property
    def receipts_file(self) -> Path:
        """One line a publication of weights."""
        return self.path / "receipts.jsonl"

    @property
    def controller_file(self) -> Path:
        """One line an order of the mismatch controller."""
        return self.path / "controller.jsonl"

    @property
    def notes_file(self) -> Path:
        """One-off remarks, with the wall clock; never cut, since they tell what happened."""
        return self.path / "notes.jsonl"

    @property
    def config_file(self) -> Path:
        """The configuration the run was started with."""
        return self.path / "config.yaml"

    @property
    def summary_file(self) -> Path:
        """What the run came to, written at its end."""
        return self.path / "summary.json"

    @property
    def attribution_file(self) -> Path:
        """What `lockstep attribute` found, if it was run."""
        return self.path / "attribution.json"

    @property
    def report_file(self) -> Path:
        """The report, in one file."""
        return self.path / "report.html"

    @property
    def tensorboard_folder(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    def lines(self, file: Path) -> list[dict[str, Any]]:
        """All complete records of one of the line files."""
        return list(read_lines(file))

    def config_text(self) -> str:
        """config.yaml as written, or an empty string."""
        if not self.config_file.exists():
            return ""
        return self.config_file.read_text(encoding="utf-8", errors="replace")

    def config(self) -> dict[str, Any]:
        """config.yaml as data; empty when there is none. Raises DataError when it is no YAML mapping."""
        import yaml

        try:
            loaded = yaml.safe_load(self.config_text()) or {}
        except yaml.YAMLError as error:
            raise DataError("no YAML", where=str(self.config_file), why=str(error)) from error
        if not isinstance(loaded, dict):
            raise DataError("no YAML mapping", where=str(self.config_file))
        return loaded

    def summary(self) -> dict[str, Any]:
        """summary.json as data; empty when there is none. Raises DataError when it is no JSON."""
        if not self.summary_file.exists():
            return {}
        try:
            loaded = json.loads(self.summary_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError("no JSON", where=str(self.summary_file), why=str(error)) from error
        return loaded if isinstance(loaded, dict) else {}
