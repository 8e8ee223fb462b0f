"""One run of the experiment, for as long as there is time.

    python experiments/mismatch/run.py CONFIG [KEY=VALUE ...] --stop-at 25 --until 1764300000

It is `lockstep train` with a clock and a probe: the same loop, the same bits. After each step it looks at the clock; at
`--stop-at` steps, or when the next step wouldn't be finished `--until` then (seconds since 1970), it writes a checkpoint and
ends. Started again with the same arguments it goes on from there. Next: `drive.py`, which starts many of these.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from probe import ProbedUpdater

from lockstep.bench.machine import stamp
from lockstep.config.load import dump, load_run
from lockstep.errors import ContractError, UserError
from lockstep.observe.logger import RunLogger
from lockstep.rewards.evaluate import Rewards
from lockstep.trainer.loop import Trainer
from lockstep.trainer.sample import Sample
from lockstep.trainer.setup import Parts, make_parts
from lockstep.trainer.spec import RunSpec

SLACK = 1.3
"""A step may take so many times as long as the longest of the last ones."""
SAVE_S = 12.0
"""Seconds set aside for the checkpoint."""


class TimedTrainer(Trainer):
    """A trainer that can be stopped between two steps, and probes gradients every `every` steps (0: never)."""

    def __init__(self, parts: Parts, rewards: Rewards, logger: RunLogger, every: int) -> None:
        super().__init__(parts, rewards, logger)
        self.updater: ProbedUpdater = ProbedUpdater(parts, self.recipe, self.optimizer)
        self.every = every

    def go_on(self, config_yaml: str, stop_at: int, until: float) -> int:
        """Goes on from the newest checkpoint, or begins; one step at least. Returns the number of finished steps."""
        resumed = self.resume("auto")
        self.logger.folder.config_file.write_text(config_yaml)
        if not resumed:
            self.begin()
        last = min(stop_at, self.spec.update.steps)
        took: list[float] = []
        while self.progress.step < last:
            begun = time.time()
            self.step()
            took.append(time.time() - begun)
            if time.time() + SLACK * max(took[-5:]) + SAVE_S > until:
                break
        if took:
            self.save()
        return self.progress.step

    def step(self) -> dict[str, float]:
        """See `Trainer`."""
        self.updater.drawn = []
        self.updater.armed = self.every > 0 and self.progress.step % self.every == 0
        return super().step()

    def rollout_and_score(self, count: int) -> tuple[list[Sample], dict[str, float]]:
        """See `Trainer`; the probe gets to know all samples."""
        samples, metrics = super().rollout_and_score(count)
        self.updater.drawn += samples
        return samples, metrics


def train(spec: RunSpec, *, stop_at: int, until: float, every: int) -> int:
    """One piece of a run; see `TimedTrainer.go_on`. What it ran on is in `stamp.json` of the run's folder."""
    torch.manual_seed(spec.seed)
    run_dir = Path(spec.run_dir)
    with Rewards(spec.rewards) as rewards:
        parts = make_parts(spec)
        run_dir.mkdir(parents=True, exist_ok=True)
        with RunLogger(run_dir, spec.observe, spec.update.steps) as logger:
            steps = TimedTrainer(parts, rewards, logger, every).go_on(dump(spec), stop_at, until)
    (run_dir / "stamp.json").write_text(json.dumps(machine(parts.kernels.name)) + "\n")
    return steps


def machine(kernels: str) -> dict[str, Any]:
    """What a run ran on. Its command line is left out: it is the driver's, and full of paths."""
    found = {name: value for name, value in asdict(stamp()).items() if name != "command"}
    return {**found, "kernels": kernels}


def main(argv: Sequence[str] | None = None) -> int:
    """2 for what the user got wrong, 3 for a broken promise, as `lockstep train`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--stop-at", type=int, default=sys.maxsize, help="steps after which to end")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds since 1970")
    parser.add_argument("--probe-every", type=int, default=0, help="steps between two gradient probes")
    options = parser.parse_args(argv)
    try:
        spec = load_run(options.config, options.overrides)
        steps = train(spec, stop_at=options.stop_at, until=options.until, every=options.probe_every)
    except (UserError, ContractError) as error:
        print(f"error: {error.kind}: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{steps} steps", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
