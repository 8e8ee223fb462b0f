"""The audit over model shapes with random weights, and over a checkpoint beside them: counts by shape and flow, and goal C1.

The goal asks for all shapes at full depth under three flows, and for real weights of SmolLM2, with at least 10,000 sampled tokens
whose log-probability the training forward has to give bit for bit. It may be done in parts, one after another or at the same
time: every model and flow is written down as it ends, and parts of one commit on one card belong together.

Next: `../trainer/audit.py`.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.exact_run import model_name
from lockstep.bench.goals import Goal, passed
from lockstep.bench.machine import Stamp
from lockstep.bench.random_model import random_decoder
from lockstep.bench.results import write_results
from lockstep.bench.shapes import preset
from lockstep.errors import ConfigError
from lockstep.kernels.table import Kernels, device_of, select
from lockstep.models.spec import PRESETS, ModelSpec
from lockstep.numerics.flow import FlowSpec
from lockstep.trainer.audit import audit_decoder, audit_flow, run_audit, told
from lockstep.trainer.audit_device import random_prompts
from lockstep.trainer.audit_report import AuditReport
from lockstep.trainer.backend import refuse_unsupported
from lockstep.trainer.plants import planted
from lockstep.trainer.spec import RunSpec

GOAL_SHAPES = ("qwen3-8b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-1.7b", "qwen3-0.6b")
GOAL_FLOWS = ("bf16", "fp8", "fp8+kv8")
GOAL_ROWS = 10_000
REAL = "smollm2-135m"
"""The shape that the goal wants real weights of."""


@dataclass(frozen=True)
class Audited:
    """The checks of one model under all flows. weights: `random`, or the folder they came from."""

    model: str
    weights: str
    layers: int
    report: AuditReport
    seconds: float

    def records(self) -> list[dict[str, Any]]:
        """One row a flow: sampled tokens, each counted once, values compared, values that differ."""
        found = []
        for flow in dict.fromkeys(c.flow for c in self.report.checks):
            checks = [c for c in self.report.checks if c.flow == flow]
            found.append(
                {
                    "model": self.model,
                    "weights": Path(self.weights).name,
                    "layers": self.layers,
                    "flow": flow,
                    "equalities": len(checks),
                    "rows": distinct_rows(self.report, flow),
                    "values": sum(c.compared for c in checks),
                    "different": sum(c.different for c in checks),
                    "passed": all(c.passed for c in checks),
                    "failed": [c.name for c in checks if not c.passed],
                }
            )
        return found


def distinct_rows(report: AuditReport, flow: str) -> int:
    """Sampled tokens that were compared with the training forward: of the short prompts, and of the long context. The same
    tokens under several packings count once."""
    rows = [(c.name, c.rows) for c in report.checks if c.flow == flow and c.rows]
    long = sum(count for name, count in rows if "context of" in name)
    return max((count for name, count in rows if "context of" not in name), default=0) + long


def audit_shapes(
    shapes: Sequence[str],
    flows: Sequence[str],
    *,
    layers: int | None = None,
    plant: str | None = None,
    kernels: Kernels | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Audited]:
    """Audits these shapes with random weights. layers: so many instead of all. Raises ConfigError for a shape with experts."""
    specs = [_shape(name, layers) for name in shapes]
    if kernels is None:
        kernels = select("hopper") if plant is None else planted(plant, exact=False, hopper=True)
    found = []
    for name, spec in zip(shapes, specs, strict=True):
        begun = time.perf_counter()
        say(f"{name}, {spec.num_layers} layers, random weights")
        report = AuditReport(planted=plant or "")
        for flow in flows:
            chosen = audit_flow(flow, FlowSpec(), spec.num_layers)
            refuse_unsupported(kernels, spec, chosen)
            decoder = random_decoder(spec, chosen, kernels, device_of(kernels))
            report.checks += told(
                audit_decoder(flow, decoder, random_prompts(spec.vocab_size), FlowSpec()), say
            )
            del decoder
            _empty()
        found.append(Audited(name, "random", spec.num_layers, report, time.perf_counter() - begun))
        say(f"{name}: {found[-1].seconds:.1f} s")
    return found


def audit_run(
    spec: RunSpec, flows: Sequence[str], kernels: Kernels, *, say: Callable[[str], None] = lambda _: None
) -> Audited:
    """Audits the model of a run configuration on the same kernels."""
    from lockstep.models.checkpoint import load_config

    begun = time.perf_counter()
    say(f"{spec.model.path}")
    report = run_audit(spec, flows, say=say, kernels=kernels)
    model = load_config(spec.model.path)
    _empty()
    seconds = time.perf_counter() - begun
    say(f"{spec.model.path}: {seconds:.1f} s")
    return Audited(model_name(model), spec.model.path, model.num_layers, report, seconds)


def audit_parts(
    shapes: Sequence[str],
    flows: Sequence[str],
    spec: RunSpec | None,
    kernels: Kernels,
    *,
    layers: int | None,
    plant: str | None,
    say: Callable[[str], None],
) -> Iterator[Audited]:
    """Shapes with random weights, then the model of the configuration if there is one, each under one flow at a time."""
    for shape in shapes:
        for flow in flows:
            yield from audit_shapes([shape], [flow], layers=layers, plant=plant, kernels=kernels, say=say)
    if spec is not None:
        for flow in flows:
            yield audit_run(spec, [flow], kernels, say=say)


@dataclass
class Parts:
    """Rows of one audit that may be done in parts, a row for each model and flow. What a file holds of this commit on this
    card counts, the rest is dropped."""

    rows: list[dict[str, Any]]

    @classmethod
    def of(cls, path: Path, stamp: Stamp) -> Parts:
        """What was done so far."""
        if not path.is_file():
            return cls([])
        known = json.loads(path.read_text(encoding="utf-8"))
        same = known.get("commit") == stamp.commit and known.get("card") == stamp.card
        return cls(list(known["rows"]) if same else [])

    @classmethod
    def written(cls, path: Path, stamp: Stamp, rows: Sequence[dict[str, Any]]) -> Parts:
        """Adds rows to the file. Several processes may do so at the same time."""
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            parts = cls.of(path, stamp)
            parts.add(rows)
            write_results(path, "audit", stamp, {}, parts.rows)
        finally:
            os.close(folder)
        return parts

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Rows of a model under a flow take the place of earlier ones."""
        new = {_key(row) for row in rows}
        self.rows = [row for row in self.rows if _key(row) not in new] + list(rows)

    @property
    def missing(self) -> list[str]:
        """What goal C1 asks for and isn't there: model and flow."""
        done = {
            (r["model"], r["weights"] == "random", r["flow"])
            for r in self.rows
            if r["layers"] == _depth(r["model"])
        }
        wanted = [(s, True, f) for s in GOAL_SHAPES for f in GOAL_FLOWS] + [
            (REAL, False, f) for f in GOAL_FLOWS
        ]
        return [f"{model} {flow}" for model, random, flow in wanted if (model, random, flow) not in done]

    def goals(self) -> list[Goal]:
        """C1 once all of it was done, or as soon as a part failed."""
        ok = all(r["passed"] for r in self.rows)
        if ok and self.missing:
            return []
        return [passed("C1", ok and sum(r["rows"] for r in self.rows) >= GOAL_ROWS)]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["weights"], row["layers"], row["flow"]


def refuse_altered(*, layers: int | None, plant: str | None) -> None:
    """Raises ConfigError for an audit that goal C1 can't count."""
    too_much = [w for w, there in (("--layers", layers is not None), ("--plant", plant is not None)) if there]
    if too_much:
        raise ConfigError(
            "the goal needs models at full depth as they are",
            where="--goals",
            fix="; ".join(f"leave {w} out" for w in too_much),
        )


def _shape(name: str, layers: int | None) -> ModelSpec:
    spec = preset(name)
    if spec.moe is not None:
        raise ConfigError(
            f"{name} has experts", where="--shape", why="the audit on a GPU is of dense decoders",
            fix="choose one of " + ", ".join((*GOAL_SHAPES, REAL)),
        )  # fmt: skip
    return spec if layers is None else replace(spec, num_layers=min(layers, spec.num_layers))


def _depth(model: str) -> int:
    return PRESETS[model].num_layers if model in PRESETS else 0


def _empty() -> None:
    gc.collect()
    torch.cuda.empty_cache()
