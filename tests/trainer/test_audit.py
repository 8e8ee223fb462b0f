"""The audit passes where the contract holds, and catches each violation planted in it, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lockstep.data.spec import DataSpec
from lockstep.errors import ConfigError
from lockstep.trainer.audit import PLANTS, run_audit
from lockstep.trainer.spec import RunSpec

MakeSpec = Callable[..., RunSpec]


@pytest.fixture
def spec(make_spec: MakeSpec) -> RunSpec:
    """Prompts of several lengths."""
    data = DataSpec(
        "arithmetic", args={"template": "{a}{op}{b}=", "operators": ["+", "*"], "digits": [1, 3], "size": 6}
    )
    return replace(make_spec(), data=data)


@pytest.mark.parametrize("flow", ["bf16", "fp8", "fp8+kv8", "fp8+kv8+attn8"])
def test_it_passes(spec: RunSpec, flow: str) -> None:
    said: list[str] = []
    report = run_audit(spec, [flow], say=said.append)
    assert report.passed, report.lines()
    assert len(report.checks) == len(said) == 10
    assert all(c.compared > 100 and c.different == 0 and c.culprit == "" for c in report.checks)
    assert report.lines()[-1].startswith("contract holds: 10 equalities")


CULPRITS = {"per-tensor-activation": "quantize_rows", "split-k": "linear"}


@pytest.mark.parametrize("plant", PLANTS)
def test_each_planted_violation_is_caught_and_named(spec: RunSpec, plant: str) -> None:
    report = run_audit(spec, ["fp8"], plant)
    culprit = CULPRITS[plant]
    assert not report.passed
    assert report.lines()[0] == f"planted violation: {plant}" and "BROKEN" in report.lines()[-1]
    operations = report.checks[0]
    assert operations.different > 0 and operations.culprit.startswith(f"{culprit} (call 1 ")
    assert culprit in report.lines()[-1]
    failed = [c for c in report.checks if not c.passed]
    assert all(c.culprit == operations.culprit for c in failed)
    if plant == "per-tensor-activation":
        assert {c.name.partition(":")[0].partition(",")[0] for c in failed} == {
            "operations",
            "samples",
            "training forward",
        }


def test_what_it_does_not_know(spec: RunSpec) -> None:
    with pytest.raises(ConfigError, match="unknown flow 'fp4'"):
        run_audit(spec, ["fp4"])
    with pytest.raises(ConfigError, match="unknown violation 'x'.*per-tensor-activation"):
        run_audit(spec, ["fp8"], "x")
