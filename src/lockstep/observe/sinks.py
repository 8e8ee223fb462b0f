"""Where a step's numbers and samples are written.

metrics.jsonl is the record of a run; everything else that shows metrics (TensorBoard, wandb, trackio) is a view that
can be rebuilt from it. So a resumed run looks like one that was never interrupted: `truncate(step)` cuts the files back
to the checkpoint, and the views replay what stays. `logger.py` holds the sinks together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lockstep.observe.jsonl import LineFile, number

RESERVED = ("step", "time")
"""Keys of a metrics line that are no metrics."""


class MetricSink(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, metrics: Mapping[str, float], moment: float) -> None:
        """Take one step; `moment` is the wall clock in seconds since 1970."""

    def truncate(self, step: int, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Forget every step after `step`. `kept` are the lines of metrics.jsonl that stay, for views that replay."""

    def close(self) -> None:
        """Write out what is pending."""


class Rewarded(Protocol):
    """What has a reward, or none yet."""

    @property
    def reward(self) -> float | None:
        """The weighted sum."""


Chosen = TypeVar("Chosen", bound=Rewarded)


@dataclass(frozen=True)
class SampleRecord:
    """One completion as people read it."""

    prompt: str
    """Text of the prompt as the model saw it."""
    completion: str
    """Text of the completion: a view of its tokens."""
    answer: str | None = None
    """The expected answer, where the task has one."""
    reward: float | None = None
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Reward function -> what it gave."""
    finish_reason: str = ""
    """Why it ended: `stop`, `length`, ..."""
    tokens: int = 0
    """Length of the completion in tokens."""
    mean_logp: float | None = None
    """Mean log-probability of its tokens in the rollout, in nats."""
    max_abs_dlogp: float | None = None
    """Largest |trainer's - rollout's log-probability| over its tokens, in nats."""
    weight_version: int | None = None
    """Version of the weights that sampled it."""


class JsonlSink:
    """metrics.jsonl: `{"step": n, "time": ..., metric: value, ...}`, on disk before `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    @property
    def last_step(self) -> int | None:
        """The last step in the file."""
        return self._file.last_step

    def write(self, step: int, metrics: Mapping[str, float], moment: float) -> None:
        """Append one step. Raises UserError when the file is already past it."""
        clash = [name for name in RESERVED if name in metrics]
        if clash:
            raise ValueError(f"{clash[0]!r} is no name for a metric: it is a field of every line")
        self._file.append(
            step, [{"time": round(moment, 3), **{name: float(v) for name, v in metrics.items()}}]
        )

    def truncate(self, step: int, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Drop the lines after `step`."""
        self._file.truncate(step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SamplesSink:
    """samples.jsonl: some completions of every step. It holds no wall clock, so equal runs have equal files."""

    def __init__(self, path: Path, per_step: int) -> None:
        self._file, self._per_step = LineFile(path), per_step

    def write(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Append this step's selection; nothing when there is none."""
        chosen = select(samples, self._per_step)
        if chosen:
            self._file.append(step, [asdict(sample) for sample in chosen])

    def truncate(self, step: int) -> None:
        """Drop the samples after `step`."""
        self._file.truncate(step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ReceiptsSink:
    """receipts.jsonl: what every publication of weights said about itself.

    `step` is the training step at whose end the weights were published, 0 for those published before training: the
    checkpoint of that step restores these weights, so a resumed run has their receipt and need not write it again.
    """

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path, order="repeating")

    def write(self, step: int, receipt: Mapping[str, Any]) -> None:
        """Append one receipt."""
        self._file.append(step, [receipt])

    def truncate(self, step: int) -> None:
        """Drop the receipts after `step`."""
        self._file.truncate(step)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ControllerSink(ReceiptsSink):
    """controller.jsonl: what the mismatch controller ordered at the end of a step, why, and what became of it."""


class ServiceSink:
    """A tracking service: one of its runs, opened by the first line.

    A service's history can't be cut. After a resume a new run of the same group starts, and gets the lines that stay
    before the new ones; the old run is left as it is.
    """

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]) -> None:
        self.run_dir, self.project, self.config = run_dir, project, dict(config)
        self._name = run_dir.name
        self._run: Any = None

    def start(self, name: str) -> Any:
        """Open a run of this name; it has `log(metrics, step=)` and `finish()`."""
        raise NotImplementedError

    def write(self, step: int, metrics: Mapping[str, float], moment: float) -> None:
        """Send one step."""
        if self._run is None:
            self._run = self.start(self._name)
        self._run.log(dict(metrics), step=step)

    def truncate(self, step: int, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Replay `kept` into a new run."""
        self.close()
        self._name = f"{self.run_dir.name}-from-{step}"
        for line in kept:
            if line["step"] <= step:
                self.write(line["step"], metrics_of(line), float(line["time"]))

    def close(self) -> None:
        """Finish the run: waits until everything is sent."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def select(samples: Sequence[Chosen], keep: int) -> list[Chosen]:
    """At most `keep` of the samples, in their order: the best, the worst, then an even spread. Never random."""
    if keep >= len(samples):
        return list(samples)
    scored = [(s.reward, i) for i, s in enumerate(samples) if s.reward is not None and s.reward == s.reward]
    order: list[int] = []
    if scored:
        order += [max(scored, key=lambda pair: (pair[0], -pair[1]))[1], min(scored)[1]]
    order += [i * len(samples) // keep for i in range(keep)]
    order += range(len(samples))
    chosen = list(dict.fromkeys(order))[:keep]
    return [samples[i] for i in sorted(chosen)]


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The metrics in one line of metrics.jsonl, non-finite ones as floats again."""
    pairs = ((name, number(value)) for name, value in line.items() if name not in RESERVED)
    return {name: value for name, value in pairs if value is not None}
