"""The kernel checks under NVIDIA's compute-sanitizer: memcheck finds accesses outside of an allocation, racecheck finds hazards
in shared memory.

Each tool runs `lockstep bench check --small` in a process of its own, with torch's caching allocator off so that every tensor is
an allocation with edges. The verdict is the tool's own summary line and its exit code; what it found is listed once for each
place in a kernel, with how often.

Goal C2b: no fault under both. Next: `kernels_check.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.bench.goals import Goal, passed
from lockstep.bench.machine import MachineError

TOOLS = ("memcheck", "racecheck")
FAULT = 86
"""Exit code that the tool is told to use when it found something."""
GOAL = "C2b"
USUAL = Path("/usr/local/cuda/bin/compute-sanitizer")
OPTIONS = ("--print-limit", "1000", "--destroy-on-device-error", "kernel")
"""A fault ends its kernel and not the process, so that one run finds all."""
_SUMMARY = re.compile(r"=+ ((?:ERROR|RACECHECK) SUMMARY: \d+ (?:errors?|hazards?)\b(?! were not printed).*)")
_FINDING = re.compile(r"=+ ((?:Invalid|Error:|Warning:|Misaligned|Program hit|Barrier error).*)")
_PLACE = re.compile(
    r"=+ {5}(?:at|and Write access at|and Read access at) (\S+?)\+0x\w+(?: in (?:.*/)?([\w.]+:\d+))?"
)
_ADDRESS = re.compile(r"\+0x[0-9a-f]+")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """What one tool said. faults: of the summary; None when it never came to one. exit_code: of the whole process.
    findings: each kind of fault with its place, and how often it was printed."""

    tool: str
    summary: str
    faults: int | None
    exit_code: int
    seconds: float
    findings: dict[str, int]
    tail: str

    @property
    def clean(self) -> bool:
        """Nothing found, and the checks themselves passed."""
        return self.exit_code == 0 and self.faults == 0

    def line(self) -> str:
        """For a terminal."""
        word = "ok" if self.clean else f"FAILED, exit code {self.exit_code}"
        return f"compute-sanitizer {self.tool}: {self.summary or 'no summary'} ({self.seconds:.0f} s)  {word}"


def sanitizer() -> str:
    """Path of the program. Raises MachineError when it isn't installed."""
    found = shutil.which("compute-sanitizer") or (str(USUAL) if USUAL.exists() else None)
    if found is None:
        raise MachineError(
            "compute-sanitizer is not on the PATH", why="it comes with the CUDA toolkit", fix="install it"
        )
    return found


def run_sanitizer(
    tools: Sequence[str], names: Sequence[str], *, timeout_s: float = 540, say: Say = print
) -> list[Verdict]:
    """One verdict a tool; names: of the kernels. `timeout_s` for each tool."""
    program, verdicts = sanitizer(), []
    for tool in tools:
        verdicts.append(_run(program, tool, names, timeout_s))
        say(verdicts[-1].line())
        for finding, count in verdicts[-1].findings.items():
            say(f"  {count} x {finding}")
        if not verdicts[-1].clean and not verdicts[-1].findings:
            say(verdicts[-1].tail)
    return verdicts


def read_summary(output: str) -> tuple[str, int | None]:
    """(summary line, faults in it) of a tool's output."""
    lines = _SUMMARY.findall(output)
    if not lines:
        return "", None
    counts = re.findall(r"(\d+) (?:errors?|hazards?)", lines[-1])
    return lines[-1], int(counts[0]) if counts else None


def read_findings(output: str) -> dict[str, int]:
    """Distinct faults of a tool's output, most frequent first: its first line, and the kernels and source lines under it."""
    found: Counter[str] = Counter()
    current: list[str] = []
    for line in [*output.splitlines(), ""]:
        if head := _FINDING.match(line):
            if current:
                found[" | ".join(current)] += 1
            current = [_ADDRESS.sub("", head[1]).strip()]
        elif current and (place := _PLACE.match(line)):
            current.append(" ".join(filter(None, place.groups())))
        elif current and not line.startswith("====="):
            found[" | ".join(current)] += 1
            current = []
    return dict(found.most_common())


def goals(verdicts: Sequence[Verdict]) -> list[Goal]:
    """C2b: clean under every tool."""
    return [passed(GOAL, all(v.clean for v in verdicts) and {v.tool for v in verdicts} >= set(TOOLS))]


def _run(program: str, tool: str, names: Sequence[str], timeout_s: float) -> Verdict:
    command = [program, "--tool", tool, "--error-exitcode", str(FAULT), *OPTIONS, sys.executable]
    command += ["-m", "lockstep", "bench", "check", "--small", "--no-write", "--only", ",".join(names)]
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = _text(late.stdout) + _text(late.stderr), -1
    summary, faults = read_summary(output)
    seconds = time.monotonic() - start
    return Verdict(tool, summary, faults, code, seconds, read_findings(output), output[-4000:])


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""
