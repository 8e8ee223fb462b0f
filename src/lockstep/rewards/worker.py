"""A pool of worker processes with a hard time limit for every sample.

A worker that is late is killed, with everything it started, and replaced while the others go on. One that dies by itself is
replaced as well, and its sample gets one more chance, since the sample may not have been the cause. Only JSON goes over the
pipes. The loop is one `select`: who has answered, who is late, who can take the next sample. Next: `child.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Literal, Self

from lockstep.errors import RewardError
from lockstep.rewards.spec import RewardSpec

START_LIMIT_S = 120.0
"""Time for a worker to import what it needs. Long: the first import from a cold network disk is slow."""

MEMORY_BYTES = 8 << 30
"""Address space of a worker that runs built-ins only. A power tower then ends in MemoryError before it eats the machine."""

ATTEMPTS = 2
"""Workers that may die over one sample before it is given up."""

START_ATTEMPTS = 3
"""Workers in a row that may die before they are ready; one can be the victim of something else."""


@dataclass(frozen=True)
class Job:
    """One sample for one reward. `request` is what `child.evaluate` reads, without the limit."""

    request: dict[str, Any]
    timeout_s: float


@dataclass(frozen=True)
class Outcome:
    """What became of a job. `score` belongs to kind `score`, `detail` to `raised` and `refused`.

    `raised`: the function raised something. `refused`: what it returned, or was given, breaks the contract. `crash`: the
    worker died over the sample, twice.
    """

    kind: Literal["score", "timeout", "crash", "raised", "refused"]
    score: float | None = None
    detail: str = ""


class WorkerPool:
    """`workers` processes that evaluate `specs`. They start at once and import in the background.

    `run` may be called from any thread, one call at a time; `close` from any other, which ends a running call with
    RewardError.
    """

    def __init__(self, specs: Sequence[RewardSpec], workers: int, memory_bytes: int = 0) -> None:
        if workers < 1:
            raise ValueError(f"a pool needs at least one worker, not {workers}")
        self._setup = json.dumps(
            {"specs": [asdict(spec) for spec in specs], "memory_bytes": memory_bytes}
        ).encode()
        self._lock, self._closing, self._failed_starts = threading.Lock(), False, 0
        self._workers: list[_Worker] = []
        self._finalizer = weakref.finalize(self, _kill, self._workers, os.getpid())
        for _ in range(workers):
            self._workers.append(_Worker(self._setup))

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Outcomes in the order of the jobs. Raises RewardError when workers can't start or the pool is closed."""
        with self._lock:
            outcomes: dict[int, Outcome] = {}
            waiting, attempts = deque(range(len(jobs))), [0] * len(jobs)
            while len(outcomes) < len(jobs):
                self._check_open()
                self._hand_out(jobs, waiting, attempts)
                self._collect(jobs, waiting, attempts, outcomes)
            return [outcomes[index] for index in range(len(jobs))]

    def _hand_out(self, jobs: Sequence[Job], waiting: deque[int], attempts: list[int]) -> None:
        for slot, worker in enumerate(self._workers):
            if not waiting:
                return
            if worker.ready and worker.job is None:
                index = waiting[0]
                try:
                    worker.send(index, jobs[index])
                except OSError:  # died while idle: nobody's sample is to blame
                    self._replace(slot)
                    continue
                attempts[waiting.popleft()] += 1

    def _collect(
        self, jobs: Sequence[Job], waiting: deque[int], attempts: list[int], outcomes: dict[int, Outcome]
    ) -> None:
        """Wait until somebody answers or is late, then settle all who did or are."""
        active = [worker for worker in self._workers if worker.deadline is not None]
        pause = max(0.0, min(worker.deadline or 0.0 for worker in active) - time.monotonic())
        answered = wait([worker.connection for worker in active], timeout=pause)
        for slot, worker in enumerate(self._workers):
            self._check_open()
            if worker.connection in answered:
                index, message = worker.job, worker.receive()
                if message is None:
                    self._died(slot, index, waiting, attempts, outcomes)
                elif index is None:
                    self._failed_starts = 0
                else:
                    outcomes[index] = _outcome(message)
            elif worker.deadline is not None and worker.deadline <= time.monotonic():
                if worker.job is None:
                    raise RewardError(f"a reward worker did not start within {START_LIMIT_S:g} s")
                outcomes[worker.job] = Outcome("timeout")
                self._replace(slot)

    def _died(
        self,
        slot: int,
        index: int | None,
        waiting: deque[int],
        attempts: list[int],
        outcomes: dict[int, Outcome],
    ) -> None:
        worker = self._workers[slot]
        if index is None:
            self._failed_starts += 1
            if self._failed_starts == START_ATTEMPTS:
                raise RewardError(f"reward workers die while starting ({worker.exit_text()})")
        elif attempts[index] < ATTEMPTS:
            waiting.appendleft(index)
        else:
            outcomes[index] = Outcome("crash", detail=worker.exit_text())
        self._replace(slot)

    def _replace(self, slot: int) -> None:
        self._workers[slot].kill()
        if not self._closing:
            self._workers[slot] = _Worker(self._setup)

    def _check_open(self) -> None:
        if self._closing:
            raise RewardError("the reward workers have been closed")

    def processes(self) -> list[int]:
        """The ids of the worker processes."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers and wait until they are gone. Closing twice is fine."""
        self._closing = True
        for worker in list(self._workers):
            worker.signal_group()  # wakes a `run` that is waiting for them
        with self._lock:
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _kill(workers: list[_Worker], owner: int) -> None:
    """End them all, unless this is a fork of the process that started them."""
    if os.getpid() != owner:
        return
    for worker in workers:
        worker.signal_group()
    for worker in workers:
        worker.kill()
    workers.clear()


def _outcome(message: dict[str, Any]) -> Outcome:
    if "raised" in message:
        return Outcome("raised", detail=message["raised"])
    if "refused" in message:
        return Outcome("refused", detail=message["refused"])
    return Outcome("score", score=message["score"])


class _Worker:
    """One process: starting, then ready, then busy with `job` until `deadline` (a time of the monotonic clock)."""

    def __init__(self, setup: bytes) -> None:
        self.connection, theirs = Pipe()
        self.ready = False
        self.job: int | None = None
        self.deadline: float | None = time.monotonic() + START_LIMIT_S
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lockstep.rewards.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the trainer's business, and the whole group can be killed
            )
        finally:
            theirs.close()
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # a death this early shows when its answer is read
            self.connection.send_bytes(setup)

    def send(self, index: int, job: Job) -> None:
        """Start on a job. OSError when the process is gone."""
        self.connection.send_bytes(json.dumps({**job.request, "limit_s": job.timeout_s}).encode())
        self.job, self.deadline = index, time.monotonic() + job.timeout_s

    def receive(self) -> dict[str, Any] | None:
        """Its message, or None when it died. RewardError when it could not start."""
        try:
            message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None
        if "fatal" in message:
            raise RewardError(message["fatal"])
        self.ready, self.job, self.deadline = True, None, None
        return message

    def signal_group(self) -> None:
        """Kill the process and what it started. Nothing once it was reaped: its id may be somebody else's by then."""
        if self.process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill, and wait for the end."""
        self.signal_group()
        self.process.wait()
        self.connection.close()

    def exit_text(self) -> str:
        """How the process ended, in words; one that merely closed its pipe is ended here."""
        self.signal_group()
        code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _environment() -> dict[str, str]:
    """The parent's environment and import path; one thread, and sets in the same order every time."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
