"""What a measurement was taken on: card, driver, versions, commit, command; and the refusal where there is no such card.

Kernels and benchmarks need an NVIDIA GPU of compute capability 9.0 (Hopper) and Triton. The modules of this package are
imported without either; `require_hopper` is the first line of what needs them.

Next: `shapes.py`.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from lockstep import __version__
from lockstep.errors import UserError
from lockstep.kernels.table import WORKSPACE, hopper_missing

COMMIT = "LOCKSTEP_COMMIT"
"""Environment variable that names the commit where the source is no git repository."""


class MachineError(UserError):
    """This machine can't do it."""

    kind = "machine"


@dataclass(frozen=True)
class Stamp:
    """Where numbers come from; every result file carries it. settings: environment variables that change them."""

    card: str
    versions: dict[str, str]
    commit: str
    command: str
    settings: dict[str, str] = field(default_factory=dict)


def require_hopper(what: str) -> None:
    """Sets the library's workspace to zero unless the environment says otherwise. Raises MachineError where `what` can't run."""
    reason = hopper_missing()
    if reason:
        raise MachineError(
            f"{what} needs an NVIDIA GPU of compute capability 9.0 (Hopper) and triton",
            why=reason,
            fix="run it on such a machine",
        )
    os.environ.setdefault(WORKSPACE, "0")


def stamp() -> Stamp:
    """The record of this process."""
    settings = {name: value for name in (WORKSPACE,) if (value := os.environ.get(name)) is not None}
    return Stamp(card(), versions(), commit(), command(), settings)


def card() -> str:
    """Name of the first GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def versions() -> dict[str, str]:
    """Everything whose version may change a time."""
    found = {
        "lockstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": _version("triton") or "none",
    }
    return found | {"driver": driver()}


def driver() -> str:
    """Version of the NVIDIA driver as `nvidia-smi` names it; "unknown" without that program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    done = subprocess.run(
        [program, "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else "unknown"


def commit() -> str:
    """Commit of the source, "+changes" when tracked files differ from it; else what the environment says; else "unknown"."""
    named = os.environ.get(COMMIT)
    if named:
        return named
    head = _git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def command() -> str:
    """The command line, as one would type it; of absolute paths only the last part, since a result file travels."""
    words = (re.sub(r"(^|=)/\S*?([^/\s]+)/?$", r"\1\2", word) for word in sys.argv[1:])
    return "lockstep " + shlex.join(words)


def workspace_meaning(value: str | None) -> str:
    """One line on what the workspace setting does to the row law. value: as in the environment, None when unset."""
    if value is None:
        return "not set; the Hopper kernels set it to 0: cuBLASLt can't split K then, and a row has the same bits in every batch"
    if value == "0":
        return "0: cuBLASLt can't split K, and a row of an FP8 product has the same bits in every batch"
    return (
        f"{value} KiB: cuBLASLt may split K at few rows, and then a row's bits depend on its batch; weights for which it does "
        "are multiplied by the Triton kernel instead, which is slower. Unset it"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of git in the folder of this package; None when that isn't a repository or git is missing."""
    program, here = shutil.which("git"), Path(__file__).parent
    if program is None or "site-packages" in here.parts:
        return None
    done = subprocess.run(
        [program, "-C", str(here), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
