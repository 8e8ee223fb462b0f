"""Rows of a Hugging Face dataset: on the hub, in a folder of data files, or saved with `save_to_disk`.

The only file that imports datasets. Next: `rows.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.errors import DataError


def dataset_rows(
    path: str, name: str | None, split: str, revision: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of one split in order, with their place. DataError when it can't be loaded."""
    try:
        import datasets
    except ImportError as error:
        fix = "pip install datasets"
        raise DataError(
            "source dataset needs datasets", where=path, why="it is not installed", fix=fix
        ) from error
    saved = any((Path(path) / file).is_file() for file in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            found = datasets.load_from_disk(path)
        else:
            found = datasets.load_dataset(path, name, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError, LookupError) as error:
        # Which of these datasets raises for a wrong name, split or connection differs between its versions.
        raise DataError(
            "the dataset can't be loaded", where=path, why=f"{type(error).__name__}: {error}"
        ) from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise DataError(
                f"there is no split {split!r}", where=path, fix=f"data.args.split: one of {', '.join(found)}"
            )
        found = found[split]
    for number, values in enumerate(found):
        yield f"{path}[{split}], row {number}", values
