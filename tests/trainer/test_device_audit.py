"""The audit of a GPU: its schedules and counts on a CPU with the reference's kernels, all of it on a Hopper GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.bench.audit import Audited, Parts, audit_parts, audit_shapes, distinct_rows, refuse_altered
from lockstep.bench.machine import Stamp
from lockstep.bench.random_model import random_decoder
from lockstep.errors import ConfigError
from lockstep.kernels.reference import ReferenceKernels
from lockstep.models.spec import PRESETS
from lockstep.numerics.flow import FlowSpec, fp8_flow
from lockstep.trainer import audit_device
from lockstep.trainer.audit import calibrate
from lockstep.trainer.audit_device import DeviceAudit, lengthened, random_prompts
from lockstep.trainer.audit_report import AuditReport, Check
from lockstep.trainer.microbatch import make_microbatch
from lockstep.trainer.plants import planted

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
SHAPE = replace(
    PRESETS["smollm2-135m"],
    num_layers=2,
    vocab_size=300,
    hidden_size=128,
    intermediate_size=160,
    num_heads=2,
    num_kv_heads=1,
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes for a CPU."""
    samples = ((64, 4), (1 << 30, 3))
    sizes = {"LENGTHS": (5, 64, 70, 130, 1), "LONG": 300, "NEW_TOKENS": 8, "SAMPLES": samples, "REPEATS": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(audit_device, name, value)
    monkeypatch.setattr(audit_device, "SHARED_PREFIX", 64)
    monkeypatch.setattr(audit_device, "LONG_NEW_TOKENS", 4)


def logits_of(decoder: Any, hidden_NK: Tensor) -> Tensor:
    kernels = decoder.kernels
    return kernels.logits(hidden_NK, decoder.head.working, torch.ones(len(hidden_NK)))


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the decode steps without a GPU: each sample alone."""

    def decoded(decoder: Any, samples: Any, scales: Any) -> Tensor:
        micros = [make_microbatch([c], decoder.spec.query_group, share_prompts=True) for c in samples]
        return torch.cat([logits_of(decoder, m.hidden(decoder, scales)[m.rows_N]) for m in micros])

    def compared(decoder: Any, hidden_NK: Tensor, logits_NV: Tensor) -> int:
        return int((logits_of(decoder, hidden_NK) != logits_NV).sum())

    monkeypatch.setattr(audit_device, "decoded_logits", decoded)
    monkeypatch.setattr(audit_device, "decoded_log_probs", lambda _, micro: micro.rollout_N)
    monkeypatch.setattr(audit_device, "compare_logits", compared)


def audit(kernels: ReferenceKernels) -> AuditReport:
    decoder = random_decoder(SHAPE, fp8_flow(kv_fp8=True), kernels, torch.device("cpu"))
    prompts = random_prompts(SHAPE.vocab_size)
    scales = calibrate(decoder, prompts, FlowSpec("fp8", "fp8"), 1)
    return AuditReport(list(DeviceAudit("fp8+kv8", decoder, prompts, scales).checks()))


@pytest.mark.usefixtures("small", "no_triton")
def test_every_schedule_is_tried_and_every_row_counted_once() -> None:
    report = audit(ReferenceKernels())
    assert report.passed, report.lines()
    names = [c.name for c in report.checks]
    assert len(names) == len(set(names)) == 19
    assert "samples: memory for little more than one (preemption)" in names
    assert "samples: prompts from the prefix cache" in names and "samples: no CUDA graphs, reversed" in names
    drawn = (4 + 4 + 3 + 3 + 4) * 8
    assert distinct_rows(report, "fp8+kv8") == drawn + 3 * 4
    logits = next(c for c in report.checks if "all logits" in c.name)
    assert logits.compared == drawn * SHAPE.vocab_size


@pytest.mark.usefixtures("small", "no_triton")
def test_a_violation_is_caught_there_too() -> None:
    report = audit(planted("per-tensor-activation", exact=False, hopper=False))
    assert not report.passed and "quantize_rows" in report.lines()[-1]


@pytest.mark.usefixtures("small", "no_triton")
def test_a_schedule_that_did_not_do_what_it_says_is_no_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceAudit.schedules

    def roomy(self: DeviceAudit) -> Any:
        return [replace(s, cache_tokens=10**5) if s.must == "preemptions" else s for s in real(self)]

    monkeypatch.setattr(DeviceAudit, "schedules", roomy)
    report = audit(ReferenceKernels())
    failed = [c for c in report.checks if not c.passed]
    assert [c.culprit for c in failed] == ["the engine counted no preemptions"]
    assert "NOTHING COMPARED" in failed[0].line() and not report.passed


def test_a_forward_that_does_not_repeat_itself_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two log-probabilities of four, in one pass of many."""
    right, calls = torch.tensor([-1.0, -2.0, -3.0, -4.0]), []

    def log_probs(*_: object) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return right + (torch.tensor([0.0, 0.1, 0.1, 0.0]) if len(calls) == 17 else 0.0), right

    micro = SimpleNamespace(rollout_N=right, log_probs=log_probs)
    monkeypatch.setattr(DeviceAudit, "packed", lambda *_: micro)
    decoder = random_decoder(SHAPE, fp8_flow(), ReferenceKernels(), torch.device("cpu"))
    check = DeviceAudit("fp8", decoder, [(1, 2)], None).repeated([], "")
    assert (check.compared, check.different, check.passed) == (4 * audit_device.REPEATS, 2, False)


def test_prompts_share_whole_pages_and_stay_apart() -> None:
    for prompts in (random_prompts(1000), lengthened([(1, 2, 3), (4, 5, 6, 7)])[2:]):
        assert tuple(map(len, prompts)) == audit_device.LENGTHS
        long = [p for p in prompts if len(p) > audit_device.SHARED_PREFIX]
        assert len({p[: audit_device.SHARED_PREFIX] for p in long}) == 1 and len(long) == 4
    long = [p for p in random_prompts(1000) if len(p) > 192]
    assert len({p[192:300] for p in long}) == 4


def audited(model: str, weights: str, flow: str, *, layers: int | None = None, rows: int = 700) -> Audited:
    check = Check(flow, "training forward, prompts shared", rows, 0, rows=rows)
    depth = PRESETS[model].num_layers if layers is None else layers
    return Audited(model, weights, depth, AuditReport([check]), 1.0)


def whole(**options: Any) -> list[Audited]:
    from lockstep.bench.audit import GOAL_FLOWS, GOAL_SHAPES, REAL

    return [
        audited(model, weights, flow, **options)
        for model, weights in [*((s, "random") for s in GOAL_SHAPES), (REAL, "models/x")]
        for flow in GOAL_FLOWS
    ]


def goals(found: list[Audited]) -> list[float]:
    parts = Parts([])
    for one in found:
        parts.add(one.records())
    return [goal.value for goal in parts.goals()]


def test_the_goal_needs_every_shape_flow_and_enough_rows() -> None:
    assert goals(whole()) == [1.0]
    assert goals(whole()[1:]) == [], "as long as something is missing there is no verdict"
    assert goals(whole(rows=500)) == [0.0]
    assert goals(whole(layers=2)) == []
    broken = replace(whole()[0], report=AuditReport([Check("bf16", "x", 5, 1)]))
    assert goals([broken]) == [0.0], "one that failed is one"
    assert goals([broken, *whole()]) == [1.0], "the same model and flow again takes its place"
    with pytest.raises(ConfigError, match=r"--goals.*leave --layers out"):
        refuse_altered(layers=2, plant=None)


def test_every_model_is_audited_under_one_flow_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def shapes(names: list[str], flows: list[str], **_: Any) -> list[Audited]:
        asked.append((names[0], flows[0]))
        return whole()[: len(names) * len(flows)]

    def run(spec: str, flows: list[str], *_: Any, **__: Any) -> Audited:
        asked.append((spec, flows[0]))
        return whole()[-1]

    monkeypatch.setattr("lockstep.bench.audit.audit_shapes", shapes)
    monkeypatch.setattr("lockstep.bench.audit.audit_run", run)
    kernels, options = ReferenceKernels(), {"layers": None, "plant": None, "say": print}
    with_run: Any = "run"
    found = list(audit_parts(["a", "b"], ["x", "y"], with_run, kernels, **options))
    assert asked == [(m, f) for m in ("a", "b", "run") for f in ("x", "y")] and len(found) == 6
    assert len(list(audit_parts(["a"], ["x"], None, kernels, **options))) == 1


def test_an_audit_goes_on_where_it_was_left(tmp_path: Path) -> None:
    stamp = Stamp("card", {}, "abc", "lockstep audit")
    file, first, second = tmp_path / "audit.json", whole()[0], whole()[1]
    assert Parts.of(file, stamp).rows == []
    Parts.written(file, stamp, first.records())
    on = Parts.written(file, stamp, second.records())
    assert Parts.of(file, stamp) == on
    assert [r["flow"] for r in on.rows] == [r["flow"] for a in (first, second) for r in a.records()]
    assert len(on.missing) == len(whole()) - 2
    for other in (replace(stamp, commit="def"), replace(stamp, card="another")):
        assert Parts.of(file, other).rows == [], "another program, or another card"


def test_audits_may_write_at_the_same_time(tmp_path: Path) -> None:
    stamp, file = Stamp("card", {}, "abc", "lockstep audit"), tmp_path / "results" / "audit.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda one: Parts.written(file, stamp, one.records()), whole()))
    assert len(Parts.of(file, stamp).rows) == len(whole()) and Parts.of(file, stamp).missing == []


def test_shapes_with_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="qwen3-30b-a3b has experts"):
        audit_shapes(["qwen3-30b-a3b"], ["fp8"], kernels=ReferenceKernels())


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "smollm2-135m", "qwen2.5-7b"])
def test_it_holds_on_a_gpu(shape: str) -> None:
    (found,) = audit_shapes([shape], ["bf16", "fp8+kv8"], layers=2)
    assert found.report.passed, found.report.lines()
    assert all(row["rows"] > 1000 and row["values"] > 10**7 for row in found.records())


@pytest.mark.gpu
@gpu
def test_a_gpu_that_splits_k_is_caught() -> None:
    (found,) = audit_shapes(["qwen3-0.6b"], ["fp8"], layers=2, plant="split-k")
    assert not found.report.passed and "linear" in found.report.lines()[-1]
    failed = {c.name.partition(":")[0].partition(",")[0] for c in found.report.checks if not c.passed}
    assert {
        "operations",
        "samples",
        "training forward",
    } <= failed  # decoded once more, there are never so few rows
