"""Whole runs of a mixture of experts: no mismatch where the flow promises none, replayed routes where it can't, audit, resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.cli.main import main
from lockstep.data.spec import DataSpec
from lockstep.errors import ConfigError, ContractError, DataError
from lockstep.kernels.reference import PackedWeight, ReferenceKernels
from lockstep.models.checkpoint import load_config
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import make_tiny
from lockstep.numerics.flow import FlowSpec, fp8_flow
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, SamplingParams, VersionSpan
from lockstep.trainer.audit import run_audit
from lockstep.trainer.audit_flow import FlowAudit
from lockstep.trainer.loop import RunResult
from lockstep.trainer.microbatch import make_microbatch
from lockstep.trainer.route_replay import RouteShape
from lockstep.trainer.sample import Expected, admit
from lockstep.trainer.setup import load_masters
from lockstep.trainer.spec import CheckpointSpec, ModelSource, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
Train = Callable[..., tuple[RunResult, list[dict[str, float]]]]
TIGHT = RolloutSpec(3, 4, 7, max_running=5, max_batched_tokens=9, page_size=3, temperature=0.9)


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE folder of six experts, weights five times those of the recipe, one of its layers dense."""
    folder = tmp_path_factory.mktemp("models") / "moe"
    make_tiny(
        folder, family="qwen3_moe", hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48, experts=6
    )
    tensors = load_file(folder / "model.safetensors")
    scaled = {n: t if "norm" in n else t * 5 for n, t in tensors.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def make_moe(make_spec: MakeSpec, moe_dir: Path) -> MakeSpec:
    def make(*args: Any, **sections: Any) -> RunSpec:
        return make_spec(*args, model=ModelSource(str(moe_dir)), **sections)

    return make


@pytest.mark.parametrize(
    ("flow", "more"),
    [
        (FlowSpec("bf16"), {}),
        (FlowSpec("fp8"), {}),
        (FlowSpec("fp8", "fp8", "pow2", keep_first_bf16=1), {}),
        (FlowSpec("fp8", "fp8"), {"kernels": "exact"}),
    ],
    ids=str,
)
def test_a_unified_flow_has_no_mismatch_case_52(
    make_moe: MakeSpec, train: Train, flow: FlowSpec, more: dict[str, Any]
) -> None:
    update = UpdateSpec(4, max_tokens_per_microbatch=40)
    result, metrics = train(make_moe(flow, rollout=TIGHT, update=update, **more))
    assert result.step == 4 and len(metrics) == 4
    for m in metrics:
        assert (m["mismatch/max_abs_dlogp"], m["mismatch/exact_tokens"]) == (0.0, 1.0)
        assert m["sync/changed_codes_pct"] > 0 and m["optim/grad_norm"] > 0 and m["mismatch/tokens"] > 20
        assert 1 < m["moe/load_max_over_mean"] <= 3 and 0 <= m["moe/idle_experts"] < 1
        assert "moe/overruled_routes" not in m


def test_a_dense_run_has_no_metrics_of_experts(make_spec: MakeSpec, train: Train) -> None:
    _, metrics = train(make_spec(update=UpdateSpec(1)))
    assert not [name for name in metrics[0] if name.startswith("moe/")]


def test_replayed_routes_bring_a_split_flow_together_case_52(make_moe: MakeSpec, train: Train) -> None:
    """BF16 trainer, FP8 engine: the two choose other experts for some tokens, and agree better when one choice is made."""
    means = {}
    for routes in ("own", "replay"):
        rollout = replace(TIGHT, max_new_tokens=12, routes=routes)
        spec = make_moe("fp8-rollout", name=routes, rollout=rollout, update=UpdateSpec(2))
        _, metrics = train(spec)
        means[routes] = metrics[0]["mismatch/mean_abs_dlogp"]
        assert means[routes] > 0 and all(m["optim/grad_norm"] > 0 for m in metrics)
        if routes == "replay":
            assert all(0 < m["moe/overruled_routes"] < 0.2 for m in metrics)
            assert "data/dropped_routes" not in metrics[0]
    assert means["replay"] < 0.95 * means["own"], means


def test_the_reference_policy_routes_by_itself(make_moe: MakeSpec, train: Train) -> None:
    """KL to the reference is a property of two policies: replaying the rollout's experts in the reference would be neither."""
    algorithm = AlgorithmSpec("grpo", kl_coef=0.05)
    rollout = replace(TIGHT, routes="replay")
    _, metrics = train(make_moe("fp8-rollout", rollout=rollout, algorithm=algorithm, update=UpdateSpec(1)))
    assert metrics[0]["policy/kl_to_reference"] > 0, "the trainer was overruled, the reference was not"


def test_replay_without_effect_is_refused(make_spec: MakeSpec, make_moe: MakeSpec, train: Train) -> None:
    rollout = replace(TIGHT, routes="replay")
    with pytest.raises(ConfigError, match="routes have no effect.*unified"):
        train(make_moe("fp8", rollout=rollout))
    with pytest.raises(ConfigError, match="no experts"):
        train(make_spec("fp8-rollout", rollout=rollout))


def completion(routes: Tensor | None, prompt: tuple[int, ...] = (5, 6), tokens: int = 3) -> Completion:
    return Completion(
        prompt,
        0,
        0,
        tuple(range(7, 7 + tokens)),
        (-1.0,) * tokens,
        "length",
        (VersionSpan(1, 0, tokens),),
        0,
        SamplingParams(tokens),
        routes=routes,
    )


GOOD = torch.tensor([[[0, 3], [2, 1]]], dtype=torch.int16).repeat(4, 1, 1)
SHAPE = RouteShape(2, 2, 6)


@pytest.mark.parametrize(
    ("routes", "named"),
    [
        (None, "doesn't say"),
        (GOOD[:3], r"\[3, 2, 2\]"),
        (GOOD[:, :1], r"\[4, 1, 2\]"),
        (GOOD.float(), "float32"),
        (GOOD + 3, "outside 0..5"),
        (GOOD - 1, "outside 0..5"),
        (torch.ones_like(GOOD), "twice"),
    ],
)
def test_routes_are_part_of_the_sample_contract(routes: Tensor | None, named: str) -> None:
    """What can't be replayed is dropped at the door and counted, under replay; routes nobody replays are no sample's either."""
    expected = Expected(1, 0, 20, routes=SHAPE)
    kept, counts = admit([completion(GOOD), completion(routes)], expected)
    assert len(kept) == 1 and counts == {"data/dropped_routes": 1.0}
    with pytest.raises(DataError, match=named):
        admit([completion(routes)], expected, "stop")
    _, counts = admit([completion(GOOD)], Expected(1, 0, 20))
    assert counts == {"data/dropped_routes": 1.0}


def test_rows_of_a_micro_batch_get_their_own_routes() -> None:
    """A shared prompt's rows once, and not shared where the routes of the prompt differ."""
    first, second = torch.arange(16).view(4, 2, 2), torch.arange(16, 32).view(4, 2, 2)
    second[:2] = first[:2]
    samples = [completion(first), completion(second)]
    micro = make_microbatch(samples, 1, share_prompts=True)
    assert micro.routes_TLk is not None
    assert torch.equal(micro.routes_TLk, torch.cat([first, second[2:]]))
    apart = make_microbatch(samples, 1, share_prompts=False)
    assert apart.routes_TLk is not None
    assert torch.equal(apart.routes_TLk, torch.cat([first, second]))
    other = completion(second + 1)
    mixed = make_microbatch([samples[0], other], 1, share_prompts=True)
    assert mixed.routes_TLk is not None
    assert torch.equal(mixed.routes_TLk, torch.cat([first, second + 1])) and len(mixed.ids_T) == 8
    assert make_microbatch([completion(None)] * 2, 1, share_prompts=True).routes_TLk is None
    with pytest.raises(ContractError, match="routes for 4 rows of a micro-batch of 8"):
        make_microbatch([samples[0], completion(None)], 1, share_prompts=True)


def test_the_audit_passes(make_moe: MakeSpec) -> None:
    args = {"template": "{a}{op}{b}=", "operators": ["+", "*"], "digits": [1, 3], "size": 6}
    report = run_audit(make_moe(data=DataSpec("arithmetic", args=args)), ["fp8"])
    assert report.passed, report.lines()
    assert all(c.compared > 100 for c in report.checks)


class Crowded(ReferenceKernels):
    """A planted violation among the experts only: an expert with few rows rounds its output once more."""

    def linear(self, x_TK: Any, weight: PackedWeight) -> Tensor:
        out = super().linear(x_TK, weight)
        expert = weight.codes is not None and weight.codes.shape == (32, 24)
        return (out * 1.01 if expert and len(out) < 3 else out).float()


@pytest.mark.parametrize(
    ("kernels", "culprit"), [(ReferenceKernels, ""), (Crowded, "experts (call 1 of the forward pass)")]
)
def test_the_audit_names_the_experts(moe_dir: Path, kernels: type[ReferenceKernels], culprit: str) -> None:
    decoder = Decoder(load_config(moe_dir), fp8_flow(), kernels())
    load_masters(decoder, moe_dir)
    decoder.refresh(1)
    check = FlowAudit("fp8", decoder, [(5, 9, 4, 7), (6, 8), (11, 30, 12)], None).operations()
    assert (check.passed, check.culprit) == (not culprit, culprit) and check.compared > 1000


def test_a_resumed_run_equals_an_uninterrupted_one(make_moe: MakeSpec, train: Train) -> None:
    """Also where an expert got no row so far: its moments are there."""
    few = RolloutSpec(1, 2, 2)
    update = UpdateSpec(2)
    checkpoint = CheckpointSpec(every=1, keep=3)
    whole, metrics = train(make_moe(name="whole", rollout=few, update=update, checkpoint=checkpoint))
    assert metrics[0]["moe/idle_experts"] > 0
    train(make_moe(name="cut", rollout=few, update=UpdateSpec(1), checkpoint=checkpoint))
    resumed, _ = train(make_moe(name="cut", rollout=few, update=update, checkpoint=checkpoint))
    assert resumed.digest == whole.digest and resumed.step == 2


def test_the_exported_model_is_the_trained_one(make_moe: MakeSpec, train: Train) -> None:
    checkpoint = CheckpointSpec(export_dtype="float32")
    spec = make_moe(update=UpdateSpec(1), checkpoint=checkpoint)
    result, _ = train(spec)
    folder = Path(spec.run_dir) / "model"
    trained = load_config(folder)
    decoder = Decoder(trained, fp8_flow(), ReferenceKernels())
    load_masters(decoder, folder)
    decoder.refresh(1)
    assert trained.moe is not None and decoder.digest() == result.digest


def test_lockstep_train_on_a_tiny_mixture(
    tmp_path: Path, read_metrics: Callable[[Path], list[dict[str, float]]]
) -> None:
    """The command, the configuration that is shipped, a handful of steps."""
    run_dir = tmp_path / "run"
    changes = {
        "run_dir": run_dir,
        "model.path": tmp_path / "model",
        "warm_start.steps": 3,
        "rollout.prompts_per_step": 3,
        "rollout.samples_per_prompt": 4,
        "update.steps": 3,
        "eval.prompts": 3,
        "eval.samples": 0,
        "observe.live": "off",
    }
    config = Path(__file__).parents[2] / "configs" / "tiny-moe.yaml"
    with pytest.raises(SystemExit) as end:
        main(["train", str(config), *(f"{name}={value}" for name, value in changes.items())])
    assert end.value.code == 0
    metrics = [m for m in read_metrics(run_dir) if m["step"]]
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert all(m["mismatch/max_abs_dlogp"] == 0.0 and m["mismatch/exact_tokens"] == 1.0 for m in metrics)
    assert all(m["moe/load_max_over_mean"] > 1 for m in metrics)
    assert load_config(run_dir / "model").moe == load_config(tmp_path / "model").moe is not None
