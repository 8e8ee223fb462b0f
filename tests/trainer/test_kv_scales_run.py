"""FP8 keys and values over many versions: scales follow the weights, and rollout and trainer never differ in a bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import tiny_spec
from lockstep.nn.kv_scales import AmaxCollector, KVMaxima, KVScales
from lockstep.numerics.flow import FlowSpec, build_flows
from lockstep.rollout.calibration import calibrate_from_engine, measure_kv
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Request, SamplingParams
from lockstep.sync.publish import Publisher
from lockstep.trainer.microbatch import make_microbatch
from lockstep.trainer.scale_history import ScaleHistory
from lockstep.trainer.spec import CheckpointSpec, ModelSource, OptimSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
Train = Callable[..., Any]
OpenTrainer = Callable[[RunSpec], Any]

UNIFIED = {
    "fp8+kv8": (FlowSpec("fp8", "fp8"), "reference"),
    "fp8+kv8+attn8": (FlowSpec("fp8", "fp8", attention="fp8"), "reference"),
    "bf16+kv8+pow2": (FlowSpec("bf16", "fp8", "pow2"), "reference"),
    "fp8+kv8+attn8, exact": (FlowSpec("fp8", "fp8", attention="fp8", kv_headroom=1.0), "exact"),
}


class World:
    """A tiny model whose weights move, its engine, and the trainer's memory of KV scales."""

    def __init__(self, flow: FlowSpec, kernels: Any) -> None:
        spec = tiny_spec(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, family="qwen2")
        flows = build_flows(flow, 2)
        self.decoder = Decoder(spec, flows.trainer, select(kernels))
        self.generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for name, p in self.decoder.named_parameters():
                p.copy_(torch.randn(p.shape, generator=self.generator) * 0.2 + float("norm" in name))
        rollout = self.decoder
        if not flows.unified:
            rollout = Decoder(spec, flows.rollout, select(kernels))
            rollout.share_masters(self.decoder)
        options = RolloutSpec(page_size=8, max_running=15, max_batched_tokens=100)
        self.engine = EmbeddedEngine(rollout, options, cache_tokens=2000)
        self.publisher = Publisher(self.decoder, self.engine)
        self.history = ScaleHistory(flow, torch.device("cpu"))
        draw = torch.randint(8, 60, (90,), generator=self.generator).tolist()
        self.prompts = [tuple(draw[:n]) for n in (3, 17, 40, 71)] + [tuple(draw[20:42])]

    def publish(self, version: int, seen: KVMaxima | None) -> None:
        """The next version, with the scales that its predecessor's maxima ask for."""
        first = (
            (lambda: self.history.advance(measure_kv(self.decoder, self.prompts))) if seen is None else None
        )
        self.publisher.publish(version, scales=first or self.history.advance(seen))

    def sample(self, version: int, first: int = 0) -> list[Any]:
        """Three samples of every prompt from number `first` on."""
        params = SamplingParams(6, 0.9)
        requests = [Request(p, i, 3, params) for i, p in enumerate(self.prompts) if i >= first]
        expected = self.history.version
        return self.engine.generate(
            requests, seed=5, step=version, expected_version=version, expected_scale_version=expected
        )

    def score(
        self, completions: list[Any], scales: KVScales, collector: AmaxCollector | None = None
    ) -> Tensor:
        """The training forward, in two micro-batches, minus the rollout: all zeros when the bits are the same."""
        differences = []
        for part in (completions[:8], completions[8:]):
            micro = make_microbatch(part, 2, share_prompts=True)
            with torch.no_grad():
                logp_N, _ = micro.log_probs(self.decoder, scales, collector)
            differences.append(logp_N - micro.rollout_N)
        return torch.cat(differences)

    def move(self) -> None:
        """An optimizer step, larger than real ones; keys and values of a layer grow or shrink by up to a third."""
        with torch.no_grad():
            for name, p in self.decoder.named_parameters():
                p.add_(torch.randn(p.shape, generator=self.generator) * 0.02)
                if "k_proj" in name or "v_proj" in name:
                    p.mul_(0.75 + 0.6 * float(torch.rand((), generator=self.generator)))


@pytest.mark.parametrize("flow", UNIFIED)
def test_twenty_versions_of_moving_weights_have_no_mismatch_case_29_32(flow: str) -> None:
    spec, kernels = UNIFIED[flow]
    versions = 20 if kernels == "reference" else 4
    world, seen = World(spec, kernels), None
    used, compared, differed = [], 0, 0
    for version in range(1, versions + 1):
        world.publish(version, seen)
        drawn, computed = world.sample(version), world.engine.recalled
        again = world.sample(version, first=3)
        assert again == drawn[9:] and world.engine.recalled >= computed + 80, "the same from the prefix cache"
        collector = AmaxCollector(2, 2)
        difference = world.score(drawn, world.history.of(drawn[0].scale_version), collector)
        assert torch.equal(difference, torch.zeros_like(difference)), (version, world.history.version)
        compared += len(difference)
        used.append(world.history.version)
        if used[-1] > 1 and used[-1] != used[-2]:
            differed += int((world.score(drawn, world.history.of(used[-2])) != 0).sum())
        seen = collector.read()
        world.move()
    assert compared == versions * 15 * 6 and used == sorted(used) and versions // 4 <= len(set(used))
    if spec.scale == "fp32":  # a power of two moves exponents of codes only
        assert differed > 20, "with the scales of the version before, it would not have been so"


def test_a_split_flow_gathers_maxima_in_its_bf16_forward_case_32() -> None:
    """The trainer's keys are BF16, the engine's FP8: the maxima are the trainer's, the scales the engine's."""
    world = World(FlowSpec("fp8-rollout", "fp8"), "reference")
    world.publish(1, None)
    for version in range(2, 6):
        done = world.sample(version - 1)
        collector = AmaxCollector(2, 2)
        difference = world.score(done, world.history.of(done[0].scale_version), collector)
        assert 0 < float(difference.abs().max()) < 2, "another precision, but the same model"
        assert torch.equal(difference, world.score(done, KVScales(torch.ones(2, 2), torch.ones(2, 2), 1)))
        seen = collector.read()
        assert seen.elements > 0 and bool((seen.k > 0).all())
        world.move()
        world.publish(version, seen)
        assert world.engine.scale_version == world.history.version
    assert world.history.version > 1


def test_both_calibrations_agree_in_a_unified_flow_and_not_in_a_split_one_case_28() -> None:
    """FP8-RL's route measures the engine's own forward: the same bits where that is the trainer's, near ones elsewhere."""
    for name, same in (("fp8", True), ("fp8-rollout", False)):
        world = World(FlowSpec(name, "fp8"), "reference")  # type: ignore[arg-type]
        world.publish(1, None)
        options = {"headroom": 2.0, "kind": "fp32", "version": 1}
        ours = measure_kv(world.decoder, world.prompts).scales(**options)  # type: ignore[arg-type]
        theirs = calibrate_from_engine(world.engine, world.prompts, **options)  # type: ignore[arg-type]
        assert ours.same_values(theirs) is same
        torch.testing.assert_close(theirs.k, ours.k, rtol=0.2, atol=0)
        torch.testing.assert_close(theirs.v, ours.v, rtol=0.2, atol=0)
        one_by_one = [measure_kv(world.engine.decoder, [p]) for p in world.prompts]
        largest = torch.stack([m.k for m in one_by_one]).amax(0)
        torch.testing.assert_close(theirs.k, largest * 2 / 448, rtol=1e-6, atol=0)


def kv_spec(make_spec: MakeSpec, name: str = "run", flow: FlowSpec | None = None, **more: Any) -> RunSpec:
    """Six steps at a learning rate at which keys and values grow quickly."""
    options: dict[str, Any] = {"update": UpdateSpec(6), "optim": OptimSpec(lr=2e-2), **more}
    return make_spec(flow or FlowSpec("fp8", "fp8"), name=name, **options)


def receipts(spec: RunSpec) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (Path(spec.run_dir) / "receipts.jsonl").read_text().splitlines()]


FLOWS = {
    "fp8": FlowSpec("fp8", "fp8"),
    "fp8, FP8 attention": FlowSpec("fp8", "fp8", attention="fp8"),
    "fp8, calibrated by the engine": FlowSpec("fp8", "fp8", kv_calibration="rollout"),
    "split": FlowSpec("fp8-rollout", "fp8"),
    "once": FlowSpec("fp8", "fp8", kv_recalibrate="once"),
}


@pytest.mark.parametrize("flow", FLOWS)
def test_scales_travel_with_the_weights_case_28_32(make_spec: MakeSpec, train: Train, flow: str) -> None:
    """One receipt a version, with the scales in use; metrics say the same."""
    spec = kv_spec(make_spec, flow=FLOWS[flow])
    _, metrics = train(spec)
    shipped = receipts(spec)
    versions = [r["scale_version"] for r in shipped]
    assert [r["version"] for r in shipped] == list(range(1, 8)) and versions[0] == 1
    assert [m["kv/scale_version"] for m in metrics] == versions[1:]
    assert len({r["scales_digest"] for r in shipped}) == len(set(versions)) and "" not in {
        r["scales_digest"] for r in shipped
    }
    if flow == "once":
        assert set(versions) == {1} and metrics[-1]["kv/scale_drift"] > 0.25
    else:
        assert len(set(versions)) > 1
        for before, after, m in zip(versions, versions[1:], metrics):
            assert m["kv/scale_drift"] > 0.2 if after != before else m["kv/scale_drift"] <= 0.25
    if flow != "split":
        assert all(m["mismatch/max_abs_dlogp"] == 0.0 for m in metrics)


@pytest.mark.parametrize("flow", ["fp8", "fp8, FP8 attention", "split", "fp8, calibrated by the engine"])
def test_resuming_across_a_change_of_scales_is_bit_equal_case_65(
    make_spec: MakeSpec, train: Train, outcome: Callable[[Path], dict[str, Any]], tmp_path: Path, flow: str
) -> None:
    """Scales change before and after the checkpoint; maxima of before it decide after it."""
    saving = {"checkpoint": CheckpointSpec(every=1, keep=9)}
    whole = kv_spec(make_spec, "whole", FLOWS[flow], **saving)
    train(whole)
    versions = [r["scale_version"] for r in receipts(whole)]
    changes = [i for i in range(1, 7) if versions[i] != versions[i - 1]]
    assert len(changes) > 1, "one on either side"
    stop = changes[0] if changes[0] < 6 else changes[0] - 1
    half = kv_spec(make_spec, "half", FLOWS[flow], **saving)
    train(replace(half, update=UpdateSpec(stop)))
    train(half)
    assert outcome(tmp_path / "half") == outcome(tmp_path / "whole")


def test_maxima_that_a_checkpoint_lost_would_be_noticed_case_65(
    make_spec: MakeSpec, train: Train, open_trainer: OpenTrainer
) -> None:
    spec = kv_spec(make_spec, update=UpdateSpec(2), checkpoint=CheckpointSpec(every=1))
    train(spec)
    path = Path(spec.run_dir) / "checkpoints" / "step_000002" / "kv_scales.safetensors"
    tensors = load_file(path)
    assert {"k", "v", "running", "basis", "k.1", "v.1"} <= tensors.keys()
    save_file({k: t for k, t in tensors.items() if k != "running"}, path)
    with (
        open_trainer(replace(spec, update=UpdateSpec(3))) as trainer,
        pytest.raises(Exception, match="KV scales"),
    ):
        trainer.resume("auto")


@pytest.mark.parametrize("name", ["fp8", "fp8-rollout"])
def test_saturation_pct_is_the_share_of_saturated_elements_case_35(
    make_spec: MakeSpec, train: Train, monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    """Counted again in float64 from every key and value of the update's forwards, under the scales that were shipped."""
    scales: dict[int, KVScales] = {}
    steps: list[list[tuple[int, Tensor, Tensor]]] = []
    see, set_scales, read = AmaxCollector.see, EmbeddedEngine.set_kv_scales, AmaxCollector.read
    watched: list[tuple[int, Tensor, Tensor]] = []

    def note(self: AmaxCollector, layer: int, k: Tensor, v: Tensor) -> None:
        watched.append((layer, k.detach().double(), v.detach().double()))
        see(self, layer, k, v)

    def used(self: EmbeddedEngine, given: KVScales) -> int:
        scales[given.version] = given
        return set_scales(self, given)

    def done(self: AmaxCollector) -> KVMaxima:
        found = read(self)
        if found.elements:
            steps.append(list(watched))
        watched.clear()
        return found

    monkeypatch.setattr(AmaxCollector, "see", note)
    monkeypatch.setattr(EmbeddedEngine, "set_kv_scales", used)
    monkeypatch.setattr(AmaxCollector, "read", done)
    flow = FlowSpec(name, "fp8", kv_headroom=1.001, kv_recalibrate="once")
    _, metrics = train(kv_spec(make_spec, flow=flow))
    assert set(scales) == {1} and len(steps) == len(metrics) == 6
    for rows, line in zip(steps, metrics):
        beyond = total = 0
        for layer, k, v in rows:
            for x, scale in ((k, scales[1].k[layer]), (v, scales[1].v[layer])):
                beyond += int((x.abs() > 448 * scale.double()[:, None] * (1 + 2**-22)).sum())
                total += x.numel()
        assert line["kv/saturation_pct"] == pytest.approx(100 * beyond / total, rel=1e-12)
    assert metrics[-1]["kv/saturation_pct"] > metrics[0]["kv/saturation_pct"] > 0, (
        "keys of completions, growing keys"
    )


def test_headroom_keeps_the_next_step_from_saturating_case_35(make_spec: MakeSpec, train: Train) -> None:
    _, metrics = train(kv_spec(make_spec))
    assert all(m["kv/saturation_pct"] == 0.0 for m in metrics[1:]), (
        "all but what the first prompts didn't show"
    )


def test_without_an_fp8_cache_there_are_no_such_metrics(make_spec: MakeSpec, train: Train) -> None:
    _, metrics = train(make_spec("fp8", update=UpdateSpec(1)))
    assert not [name for line in metrics for name in line if name.startswith("kv/")]


def test_samples_are_replayed_with_the_scales_they_were_drawn_with_case_32(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    """Samples of two scale versions in one batch: each micro-batch has one, and not a bit differs."""
    with open_trainer(kv_spec(make_spec)) as trainer:
        trainer.begin()
        first, _ = trainer.sample()
        seen = measure_kv(trainer.parts.decoder, [(9, 30, 31)])
        trainer.updater.seen = replace(seen, k=seen.k * 40, v=seen.v * 40)
        trainer.publish(must_change=False)
        second, _ = trainer.sample()
        versions = {s.completion.scale_version for s in first}, {s.completion.scale_version for s in second}
        assert versions == ({1}, {2})
        mixed = [s for pair in zip(first, second) for s in pair]
        for members in trainer.updater.packs.pack(mixed, {}):
            assert len({mixed[i].completion.scale_version for i in members}) == 1
        found = trainer.updater.old_log_probs(mixed, trainer.history)
        for sample in mixed:
            assert found[id(sample)].tolist() == list(sample.completion.logprobs)
        with pytest.raises(ContractError, match="drawn with KV scales v1, these are v2"):
            trainer.updater.old_log_probs(first, trainer.scales)
        with pytest.raises(ContractError, match="can't share a micro-batch"):
            trainer.updater.packs.microbatch(mixed)


def test_a_sample_of_unknown_scales_stops_the_update_case_32(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    with open_trainer(kv_spec(make_spec)) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        for version in (0, 7):
            samples[3].completion = replace(samples[3].completion, scale_version=version)
            with pytest.raises(ContractError, match=f"drawn with KV scales v{version}, the trainer knows v1"):
                trainer.updater.update(samples, trainer.history)


def test_an_engine_that_keeps_other_scales_is_caught_case_28(
    make_spec: MakeSpec, open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It echoes the version and uses 1.0: what travels is compared, not only its number."""

    def forgetful(self: EmbeddedEngine, scales: KVScales) -> int:
        self.scales = replace(scales, k=torch.ones_like(scales.k), v=torch.ones_like(scales.v))
        return scales.version

    monkeypatch.setattr(EmbeddedEngine, "set_kv_scales", forgetful)
    with (
        open_trainer(kv_spec(make_spec)) as trainer,
        pytest.raises(ContractError, match="other KV scales than v1"),
    ):
        trainer.begin()


def test_scales_that_change_behind_the_trainers_back_are_caught_case_28(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    """Between two publications, and without a new version: the next receipt compares all the same."""
    with open_trainer(kv_spec(make_spec, flow=FlowSpec("fp8", "fp8", kv_recalibrate="once"))) as trainer:
        trainer.begin()
        engine = trainer.parts.engine
        engine.scales = replace(engine.scales, k=engine.scales.k * 2)
        with pytest.raises(ContractError, match="other KV scales than v1"):
            trainer.publish(must_change=False)


@pytest.mark.parametrize("name", ["fp8", "fp8-rollout"])
def test_an_update_with_a_key_that_is_not_finite_moves_nothing_case_17(
    make_spec: MakeSpec, open_trainer: OpenTrainer, name: Any
) -> None:
    """Read once for a mini-batch, before the optimizer steps; the layer is named."""
    with open_trainer(kv_spec(make_spec, flow=FlowSpec(name, "fp8"))) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        attention = trainer.parts.decoder.model.layers[1].self_attn
        honest = attention.rope.rotate

        def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
            out = honest(x, cos_sin)
            keys = x.shape[1] == attention.kv_heads
            return out.masked_fill((torch.arange(len(out)) == 4)[:, None, None], torch.inf) if keys else out

        attention.rope = type("Rotated", (), {"rotate": staticmethod(rotate)})()
        before = {n: p.clone() for n, p in trainer.parts.decoder.named_parameters()}
        # A BF16 forward shows it in its log-probabilities, too; codes would hide it.
        message = "layer 1: non-finite key in KV head 0" + (
            "|are not finite" if name == "fp8-rollout" else ""
        )
        with pytest.raises(ContractError, match=message):
            trainer.updater.update(samples, trainer.history)
        assert all(torch.equal(p, before[n]) for n, p in trainer.parts.decoder.named_parameters())


def test_keys_that_overflow_end_a_run_with_their_layer_case_17(
    make_spec: MakeSpec, train: Train, model_dir: Path, tmp_path: Path
) -> None:
    """One line and exit code 3, not a plausible code."""
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    tensors = load_file(broken / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 3e38)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    spec = kv_spec(make_spec)
    with pytest.raises(ContractError, match="layer 1: non-finite key in KV head 0"):
        train(replace(spec, model=ModelSource(str(broken))))
