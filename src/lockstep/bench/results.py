"""Result files: one JSON document a benchmark, with the stamp of the machine, replaced as a whole or not at all.

`rows` are plain dictionaries: `ms` milliseconds, `tflops` 10^12 operations a second, `gbps` 10^9 bytes a second, `roofline` the
least possible time over the measured one (`timing.py`). docs/benchmarks.md explains every column.

Next: `goals.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.bench.machine import Stamp

FOLDER = Path("benchmarks") / "results"
"""Where results go, relative to the folder that the command runs in."""


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes beside and renames, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_results(
    path: Path, name: str, stamp: Stamp, ceilings: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> None:
    """The results of one benchmark. ceilings: what the card reached in the same call."""
    write_json(path, {"benchmark": name, **asdict(stamp), "ceilings": dict(ceilings), "rows": list(rows)})


def rounded(value: float, digits: int = 4) -> float:
    """To significant digits: a time carries no more."""
    return float(f"{value:.{digits}g}")
