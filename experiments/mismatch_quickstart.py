"""What each correction is worth on the quickstart: seeds x corrections of a split FP8 run, and the unified flow beside them.

    python experiments/mismatch_quickstart.py --out runs/mismatch --jobs 8

Every run is `lockstep train configs/quickstart.yaml` with a few overrides, in a process of its own with one thread. A run that is
finished leaves `OUT/results/<arm>-seed<seed>.json`; started again, only what is missing is run, and an interrupted run goes on
from its own checkpoint. `OUT/table.json` and `OUT/table.md` are made from whatever is there. The model is made once, by the first
arm's own recipe, before any run starts, so that no two of them make it at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAST_STEPS = 10
"""The final reward is the mean over so many last steps."""
ARMS: dict[str, tuple[str, ...]] = {
    "none": ("flow.name=fp8-rollout", "correction.preset=none"),
    "token_tis": ("flow.name=fp8-rollout", "correction.preset=token_tis"),
    "geometric_mis": ("flow.name=fp8-rollout", "correction.preset=geometric_mis"),
    "geometric_mis_wide": (
        "flow.name=fp8-rollout",
        "correction.preset=geometric_mis",
        "correction.rollout_rs_threshold=1.02",
        "correction.rollout_rs_threshold_lower=0.98",
    ),
    "icepop": ("flow.name=fp8-rollout", "correction.preset=icepop"),
    "ais": ("flow.name=fp8-rollout", "correction.preset=ais"),
    "unified": ("flow.name=fp8",),
}
"""Name -> overrides. `geometric_mis` has verl's bounds, which are for completions of thousands of tokens; `_wide` has some for
the quickstart's three."""
DEFAULT_ARMS = ("none", "token_tis", "geometric_mis", "icepop", "ais", "unified")
FIXED = (
    "controller.enabled=off",
    "checkpoint.export_hf=false",
    "observe.live=off",
    "observe.tensorboard=false",
)
"""For every run. The controller would change the correction on its own."""


@dataclass(frozen=True)
class Job:
    """One run."""

    arm: str
    seed: int
    out: Path
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.arm}-seed{self.seed}"

    @property
    def result(self) -> Path:
        return self.out / "results" / f"{self.name}.json"

    @property
    def run_dir(self) -> Path:
        return self.out / "runs" / self.name


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing and writes the table; 1 when a run failed."""
    options = parse(argv)
    out = Path(options.out).resolve()
    (out / "results").mkdir(parents=True, exist_ok=True)
    (out / "logs").mkdir(exist_ok=True)
    shared = (*FIXED, f"model.path={out / 'model'}", *options.set)
    jobs = [
        Job(arm, seed, out, (*ARMS[arm], *shared)) for seed in range(options.seeds) for arm in options.arms
    ]
    missing = [job for job in jobs if not finished(job, options.config)]
    print(f"{len(jobs)} runs, {len(jobs) - len(missing)} finished before", flush=True)
    if missing:
        make_model(options.config, out, shared)
        with ThreadPoolExecutor(options.jobs) as pool:
            failed = [
                job.name
                for job, ok in zip(missing, pool.map(lambda j: run(j, options.config), missing))
                if not ok
            ]
    else:
        failed = []
    rows = table(options.arms, out)
    (out / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "table.md").write_text(markdown(rows))
    print(markdown(rows), end="")
    if failed:
        print(f"failed: {', '.join(failed)}; see {out / 'logs'}", file=sys.stderr)
    return 1 if failed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for runs, results and the table")
    parser.add_argument("--config", default=str(ROOT / "configs" / "quickstart.yaml"))
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N - 1")
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=tuple(ARMS),
        default=DEFAULT_ARMS,
        metavar="ARM",
        help=f"of {', '.join(ARMS)}",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="overrides for every run, e.g. update.steps=2",
    )
    return parser.parse_args(argv)


def lockstep(arguments: Sequence[str], log: Path) -> int:
    """Runs the command line of this checkout in a process with one thread; what it prints goes to `log`."""
    path = os.pathsep.join(p for p in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if p)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with log.open("ab") as file:
        return subprocess.run(
            [sys.executable, "-m", "lockstep", *arguments],
            env={**os.environ, **threads, "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode


def make_model(config: str, out: Path, shared: Sequence[str]) -> None:
    """Makes the model's folder by the configuration's own recipe: a run of no steps."""
    if (out / "model" / "config.json").is_file():
        return
    nothing = ("update.steps=0", "warm_start.steps=0", "eval.every=0", "checkpoint.every=0")
    arguments = ["train", config, *shared, *nothing, f"run_dir={out / 'runs' / 'make-model'}"]
    if lockstep(arguments, out / "logs" / "make-model.log"):
        raise SystemExit(f"the model could not be made, see {out / 'logs' / 'make-model.log'}")


def finished(job: Job, config: str) -> bool:
    """Whether the run's result is there. SystemExit when it is one of other settings."""
    if not job.result.is_file():
        return False
    found = json.loads(job.result.read_text())
    if found["overrides"] != list(job.overrides) or found["config"] != Path(config).read_text():
        raise SystemExit(f"{job.result} is of another configuration or other overrides: give another --out")
    return True


def run(job: Job, config: str) -> bool:
    """One training run, and its result file when it succeeds."""
    begun = time.perf_counter()
    arguments = ["train", config, *job.overrides, f"seed={job.seed}", f"run_dir={job.run_dir}"]
    code = lockstep(arguments, job.out / "logs" / f"{job.name}.log")
    seconds = time.perf_counter() - begun
    print(f"{job.name}: {'done' if code == 0 else f'FAILED ({code})'}, {seconds:.0f} s", flush=True)
    if code:
        return False
    partial = job.result.with_suffix(".part")
    partial.write_text(json.dumps(result_of(job, config), indent=1) + "\n")
    partial.rename(job.result)
    return True


def result_of(job: Job, config: str) -> dict[str, Any]:
    """What a finished run has to say, from its metrics.jsonl."""
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [m for m in map(json.loads, lines) if m["step"] > 0]
    return {
        "arm": job.arm,
        "seed": job.seed,
        "overrides": job.overrides,
        "config": Path(config).read_text(),
        "steps": len(steps),
        "final_reward": mean_of(steps[-LAST_STEPS:], "reward"),
        "mean_abs_dlogp": mean_of(steps, "mismatch/mean_abs_dlogp"),
        "max_abs_dlogp": max((m.get("mismatch/max_abs_dlogp", 0.0) for m in steps), default=None),
        "ess": mean_of(steps, "rollout_corr/rollout_is_eff_sample_size"),
        "token_ess": mean_of(steps, "mismatch/ess"),
        "rejected": mean_of(steps, "rollout_corr/rejected_fraction"),
        "reward": [m.get("reward") for m in steps],
    }


def mean_of(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    """Over the steps that have this metric as a number; None when none has."""
    values = [m[name] for m in steps if isinstance(m.get(name), int | float)]
    return statistics.fmean(values) if values else None


def table(arms: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """A row for each arm over the seeds that are finished."""
    rows = []
    for arm in arms:
        found = [json.loads(f.read_text()) for f in sorted((out / "results").glob(f"{arm}-seed*.json"))]
        row: dict[str, Any] = {"arm": arm, "seeds": [r["seed"] for r in found]}
        for name in ("final_reward", "mean_abs_dlogp", "ess", "token_ess", "rejected"):
            values = [r[name] for r in found if r[name] is not None]
            row[name] = statistics.fmean(values) if values else None
            row[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
        rows.append(row)
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table for people."""

    def cell(row: dict[str, Any], name: str, digits: int) -> str:
        value, sd = row[name], row[f"{name}_sd"]
        if value is None:
            return "-"
        return f"{value:.{digits}f}" + ("" if sd is None else f" ± {sd:.{digits}f}")

    lines = [
        f"| correction | seeds | reward, last {LAST_STEPS} steps | mean abs delta log p | effective sample size of the weights | "
        "of the token ratios | rejected |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            cell(row, name, digits)
            for name, digits in (
                ("final_reward", 3),
                ("mean_abs_dlogp", 4),
                ("ess", 4),
                ("token_ess", 4),
                ("rejected", 3),
            )
        ]
        lines.append(f"| {row['arm']} | {len(row['seeds'])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
