"""`lockstep report`: an HTML page from what a run wrote.

Next: `observe/report.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.", show_default=False)],
) -> None:
    """Write the HTML report of a run."""
    from lockstep.observe.report import build_report

    typer.echo(build_report(run_dir))
