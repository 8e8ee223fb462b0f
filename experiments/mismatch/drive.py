"""All runs of the experiment, arms x seeds, in as many pieces as the machine grants.

    python experiments/mismatch/drive.py --model models/smollm2-135m-instruct --out runs/mismatch --jobs 5 --minutes 9

Runs take turns: whoever has the fewest turns of `--slice` steps behind it comes next, in the order of seeds and arms, so that all
curves grow together and can be compared whenever time is up. Then every run stops at a checkpoint; the same command goes on from
there, until each has `--steps`. After each turn `OUT/results/ARM-seedN.json` says how far the run is.

One run leaves most of a GPU idle when the model is small, so `--jobs` of them share it, each a process (`run.py`) of its own. The
first call makes the problems and the starting weights (`prepare.py`). `--resume-check` runs a short training twice, once
stopped and continued, and writes whether the two are the same in every byte. Next: `record.py`, `report.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arms import ARMS, GROUPS, Arm, chosen
from record import write_record
from task import Task

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONFIG = HERE / "config.yaml"
LEAST_S = 40.0
"""No turn begins with less than this left: starting and stopping would be all of it."""
STOPPED_S = 45.0
"""How long a process may overrun its time before it is ended, which costs it what it did since its last checkpoint."""
CHECKED = ("exact", "token-tis")
"""Arms of the resume check."""

Launch = Callable[[list[str], Path, float], int]
"""Runs a script of this folder with arguments; what it prints goes to a log; seconds since 1970 by which it should have ended."""


@dataclass
class Job:
    """One run. steps: at its newest checkpoint."""

    arm: Arm
    seed: int
    out: Path
    order: int
    steps: int = 0

    @property
    def name(self) -> str:
        return f"{self.arm.name}-seed{self.seed}"

    @property
    def run_dir(self) -> Path:
        return self.out / "runs" / self.name

    @property
    def closed(self) -> bool:
        """Finished, and its checkpoints removed: it can't go on."""
        return (self.run_dir / "finished").is_file()

    def count(self) -> int:
        """Steps that are safe: those of the newest checkpoint, or of the results where checkpoints are gone."""
        file = self.out / "results" / f"{self.name}.json"
        if self.closed and file.is_file():
            return int(json.loads(file.read_text())["steps"])
        return saved_steps(self.run_dir)


@dataclass
class Turns:
    """Whose turn it is. Shared by the threads that run jobs; all methods are atomic."""

    waiting: list[Job]
    steps: int
    slice: int
    deadline: float
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> tuple[Job, int] | None:
        """The next run and the step at which its turn ends; None when no time is left, or nothing that isn't running."""
        with self.lock:
            if not self.waiting or time.time() + LEAST_S > self.deadline:
                return None
            job = min(self.waiting, key=lambda j: (j.steps // self.slice, j.order))
            self.waiting.remove(job)
            return job, min((job.steps // self.slice + 1) * self.slice, self.steps)

    def give(self, job: Job, ok: bool) -> None:
        """Back from a turn; out of the game when it failed or is finished."""
        with self.lock:
            if not ok:
                self.failed.append(job.name)
            elif job.steps < self.steps:
                self.waiting.append(job)


def main(argv: Sequence[str] | None = None, launch: Launch | None = None) -> int:
    """1 when a run failed, or the resume check found a difference."""
    options = parse(argv)
    launch = launch or process
    begun, out = time.time(), Path(options.out).resolve()
    for folder in ("runs", "logs", "results"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    overrides = prepare(options, out, launch)
    if options.resume_check:
        return resume_check(options, out, overrides, launch)
    arms = chosen(options.arms)
    jobs = [
        Job(arm, seed, out, i) for i, (seed, arm) in enumerate((s, a) for s in options.seeds for a in arms)
    ]
    for job in jobs:
        job.steps = job.count()
    turns = Turns(
        [j for j in jobs if j.steps < options.steps and not j.closed],
        options.steps,
        options.slice,
        begun + 60 * options.minutes,
    )
    print(f"{len(jobs)} runs, {len(jobs) - len(turns.waiting)} of them finished before", flush=True)

    def work() -> None:
        while (turn := turns.take()) is not None:
            job, stop_at = turn
            ok = False
            try:
                ok = run_piece(job, stop_at, turns.deadline, options, overrides, launch)
            finally:
                turns.give(job, ok)

    threads = [threading.Thread(target=work) for _ in range(min(options.jobs, max(len(turns.waiting), 1)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [f"{j.name} {j.steps}" for j in jobs if j.steps < options.steps]
    print(f"{time.time() - begun:.0f} s; " + (f"not finished: {', '.join(left)}" if left else "all finished"))
    if turns.failed:
        print(f"failed: {', '.join(turns.failed)}; see {out / 'logs'}", file=sys.stderr)
    return 1 if turns.failed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--out", required=True, help="folder for problems, weights, runs and results")
    add(
        "--model", default="", help="folder with SmolLM2-135M-Instruct; the configuration's recipe by default"
    )
    add("--config", default=str(CONFIG))
    known = (*ARMS, *GROUPS)
    add("--arms", nargs="+", choices=known, default=["main"], metavar="ARM", help=f"of {', '.join(known)}")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    add("--steps", type=int, default=100, help="steps of every run")
    add("--slice", type=int, default=25, help="steps of one turn")
    add("--minutes", type=float, default=9.0, help="time for this call, preparation included")
    add("--jobs", type=int, default=1, help="runs at a time")
    add("--probe-every", type=int, default=10, help="steps between two gradient probes; 0: none")
    add("--reward", type=float, default=0.3, help="sampled reward that the starting weights should have")
    add("--blocks", type=int, default=25, help="most blocks of supervised steps for that")
    add("--tidy", action="store_true", help="remove the checkpoints of finished runs (1.6 GB each)")
    add("--resume-check", action="store_true", help="only compare a stopped run with one that wasn't")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides for every run")
    options = parser.parse_args(argv)
    if min(options.steps, options.slice, options.jobs) < 1:
        parser.error("--steps, --slice and --jobs start at 1")
    return options


def prepare(options: argparse.Namespace, out: Path, launch: Launch) -> list[str]:
    """Makes what all runs share, unless it is there, and returns the overrides that name it. SystemExit when it fails."""
    data, start = out / "data", out / "start"
    if not (data / "warm.jsonl").is_file():
        from prepare import write_data

        write_data(data, Task())
    shared = [
        f"data.path={data / 'train.jsonl'}",
        f"eval.data.path={data / 'eval.jsonl'}",
        f"rewards.0.use={HERE / 'task.py'}:right_lines",
        *options.set,
    ]
    if not (start / "warm.json").is_file():
        model = [f"model.path={options.model}"] if options.model else []
        settings = ["--reward", str(options.reward), "--blocks", str(options.blocks)]
        arguments = [str(HERE / "prepare.py"), options.config, *shared, *model]
        arguments += ["--data", str(data), "--out", str(start), *settings]
        log = out / "logs" / "prepare.log"
        if launch(arguments, log, time.time() + 60 * options.minutes):
            raise SystemExit(f"the starting weights could not be made, see {log}")
        print(log.read_text().strip() if log.is_file() else "", flush=True)
    shutil.copyfile(start / "warm.json", out / "results" / "start.json")
    return [*shared, f"model.path={start}", 'model.recipe=""', "model.args={}"]


def run_piece(
    job: Job, stop_at: int, until: float, options: argparse.Namespace, overrides: list[str], launch: Launch
) -> bool:
    """One turn of a run, and its results so far."""
    if not saved_steps(job.run_dir):
        shutil.rmtree(
            job.run_dir, ignore_errors=True
        )  # a first turn that left no checkpoint counts for nothing
    begun = time.time()
    own = [*overrides, *job.arm.overrides, f"update.steps={options.steps}", f"seed={job.seed}"]
    code = launch(
        run_arguments(options, own, job.run_dir, stop_at, until), job.out / "logs" / f"{job.name}.log", until
    )
    before, job.steps = job.steps, saved_steps(job.run_dir)
    about = {"what": job.arm.what, "overrides": list(job.arm.overrides), "set": options.set}
    file = job.out / "results" / f"{job.name}.json"
    write_record(file, job.run_dir, arm=job.arm.name, seed=job.seed, planned=options.steps, about=about)
    record = json.loads(file.read_text())
    reward = record["last"].get("reward")
    word = "" if code == 0 else f" FAILED ({code})"
    took = f"{time.time() - begun:.0f} s, {record['mean'].get('time/step_s') or 0:.2f} s a step"
    print(
        f"{job.name}:{word} step {before} to {job.steps} of {options.steps}, {took}, reward {reward}",
        flush=True,
    )
    if options.tidy and job.steps >= options.steps:
        (job.run_dir / "finished").touch()
        shutil.rmtree(job.run_dir / "checkpoints", ignore_errors=True)
    return code == 0 and job.steps > before


def run_arguments(
    options: argparse.Namespace, overrides: list[str], run_dir: Path, stop_at: int, until: float
) -> list[str]:
    """What `run.py` is started with."""
    clock = ["--stop-at", str(stop_at), "--until", f"{until:.0f}", "--probe-every", str(options.probe_every)]
    return [str(HERE / "run.py"), options.config, *overrides, f"run_dir={run_dir}", *clock]


def saved_steps(run_dir: Path) -> int:
    """Steps of the newest complete checkpoint; 0 without one."""
    found = [p for p in (run_dir / "checkpoints").glob("step_*") if (p / "state.json").is_file()]
    return max((int(p.name.removeprefix("step_")) for p in found), default=0)


def process(arguments: list[str], log: Path, until: float) -> int:
    """A launch as a process, with this checkout's package and one CPU thread for torch."""
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if p)
    settings = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "CUBLASLT_WORKSPACE_SIZE": "0",
    }
    with log.open("ab") as file:
        child = subprocess.Popen(
            [sys.executable, *arguments], env={**os.environ, **settings}, cwd=ROOT, stdout=file, stderr=file
        )
        try:
            return child.wait(timeout=max(until - time.time(), 0.0) + STOPPED_S)
        except subprocess.TimeoutExpired:
            child.terminate()
            return child.wait()


def resume_check(options: argparse.Namespace, out: Path, overrides: list[str], launch: Launch) -> int:
    """Two short trainings of each arm in CHECKED, one stopped half way; `results/resume.json` says whether they are equal."""
    steps, until = min(options.steps, 4), time.time() + 60 * options.minutes
    small = ["rollout.prompts_per_step=4", f"eval.every={max(steps // 2, 1)}", "eval.prompts=4"]
    found: dict[str, Any] = {}

    def check(arm: Arm) -> None:
        own = [*overrides, *small, *arm.overrides, f"update.steps={steps}", "observe.samples_per_step=8"]
        whole, cut = (out / "runs" / f"resume-{arm.name}-{kind}" for kind in ("whole", "cut"))
        codes = []
        for run_dir, stops in ((whole, [steps]), (cut, [max(steps // 2, 1), steps])):
            shutil.rmtree(run_dir, ignore_errors=True)
            for stop_at in stops:
                log = out / "logs" / f"{run_dir.name}.log"
                codes.append(launch(run_arguments(options, own, run_dir, stop_at, until), log, until))
        found[arm.name] = {"ran": not any(codes), "steps": steps, "differ": differences(whole, cut)}
        machine = whole / "stamp.json"
        found[arm.name]["stamp"] = json.loads(machine.read_text()) if machine.is_file() else {}
        for run_dir in (whole, cut):
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)

    threads = [threading.Thread(target=check, args=(ARMS[name],)) for name in CHECKED]
    for thread in threads:
        thread.start()
        if options.jobs == 1:
            thread.join()
    for thread in threads:
        thread.join()
    record = {
        name: found.get(name, {"ran": False, "differ": ["it stopped with an error"]}) for name in CHECKED
    }
    (out / "results" / "resume.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, result in record.items():
        same = result["ran"] and not result["differ"]
        print(
            f"{name}: a run that was stopped {'equals' if same else 'DIFFERS from'} one that wasn't {result['differ']}"
        )
    return 0 if all(r["ran"] and not r["differ"] for r in record.values()) else 1


def differences(whole: Path, cut: Path) -> list[str]:
    """What two finished runs don't share: metrics but the wall clock, samples, receipts, final masters, moments and KV scales."""
    from record import read_rows

    from lockstep.observe.metrics import reproducible

    found = []
    ours, theirs = ([reproducible(r) for r in read_rows(d / "metrics.jsonl")] for d in (whole, cut))
    if not ours or json.dumps(ours) != json.dumps(theirs):
        found.append("metrics")
    newest = f"checkpoints/step_{saved_steps(whole):06d}"
    files = ["samples.jsonl", "receipts.jsonl"]
    files += [f"{newest}/{p.name}" for p in sorted((whole / newest).glob("*.safetensors"))]
    for file in files:
        pair = [d / file for d in (whole, cut)]
        if not all(p.is_file() for p in pair) or pair[0].read_bytes() != pair[1].read_bytes():
            found.append(file)
    return found


if __name__ == "__main__":
    sys.exit(main())
