"""Rows of a parquet file. The only file that imports pyarrow. Next: `rows.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import DataError


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows in file order, with their place. DataError when it can't be read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        fix = "pip install 'lockstep-rl' again: it comes with datasets"
        raise DataError(
            "parquet files need pyarrow", where=str(path), why="it is not installed", fix=fix
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    yield f"{path}, row {number}", values
                    number += 1
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError("not a parquet file", where=str(path), why=str(error).splitlines()[0]) from error
