"""The parts are the whole, each source is found where it was planted, and the suggestion does what it claims."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.cli.main import main
from lockstep.config.load import dump, load_run
from lockstep.errors import ConfigError, DataError
from lockstep.kernels.reference import ReferenceKernels
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import make_tiny
from lockstep.nn.context import PackedContext
from lockstep.nn.linear import Linear
from lockstep.numerics.flow import Flow, FlowPair, FlowSpec, Gemm, bf16_flow, build_flows, fp8_flow
from lockstep.numerics.formats import BF16, row_groups, square_blocks
from lockstep.numerics.quantize import quantize
from lockstep.observe.attribution import lines, read_attribution, section
from lockstep.observe.report import build_report
from lockstep.rollout.spec import RolloutSpec
from lockstep.trainer import setup
from lockstep.trainer.attribution import Attribution, attribute_layers, attribute_sources, band, open_run
from lockstep.trainer.attribution import run_attribution as attribute
from lockstep.trainer.checkpoint import Progress, list_checkpoints, load_weights
from lockstep.trainer.plants import PerTensorActivation
from lockstep.trainer.probe import LayerwiseKV, Probe, ProbeSpec, mixed_flow
from lockstep.trainer.spec import CheckpointSpec, ModelSource, RunSpec

MakeSpec = Callable[..., RunSpec]
SIZE = ProbeSpec(prompts=3, samples=4, tokens=6)
"""What `make_spec` samples in a step."""
PATH = ("weights", "activations", "kv", "attention", "head", "batch")


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, distributions far from flat."""
    folder = tmp_path_factory.mktemp("deep") / "model"
    make_tiny(folder, hidden=32, layers=4, heads=4, kv_heads=2, intermediate=48)
    change(folder, lambda name, t: t if "norm" in name else t * 5)
    return folder


def change(folder: Path, edit: Callable[[str, Tensor], Tensor]) -> None:
    """Rewrites every tensor of a model folder."""
    file = folder / "model.safetensors"
    save_file(
        {n: edit(n, t).contiguous() for n, t in load_file(file).items()}, file, metadata={"format": "pt"}
    )


def open_probe(spec: RunSpec, run_dir: Path | None = None) -> Probe:
    """The probe that `run_attribution` works with."""
    opened = open_run(spec, SIZE, run_dir)
    return Probe(opened.parts, opened.progress, SIZE, lambda _: None)


def plant(monkeypatch: pytest.MonkeyPatch, trainer: Flow, rollout: Flow) -> None:
    """Gives the two sides these flows, whatever the configuration says."""
    monkeypatch.setattr(setup, "build_flows", lambda spec, layers: FlowPair(trainer, rollout))


def effects(probe: Probe) -> dict[str, float]:
    """max |d| of each source alone and of its step on the path, by name."""
    sources, residue = attribute_sources(probe, None, Progress(), lambda _: None)
    assert residue.telescoping == 0.0
    found = {s.name: s.alone.max for s in sources if s.alone is not None and s.step is not None}
    assert tuple(found) == PATH
    assert {n: v > 0 for n, v in found.items()} == {
        s.name: s.step.max > 0 for s in sources if s.step is not None
    }
    return found


def plain_scores(probe: Probe, flow: Flow) -> Tensor:
    """Log-probabilities under a flow by the training forward itself, decoder and all made here."""
    parts = probe.parts
    decoder = Decoder(parts.model_spec, flow, ReferenceKernels(exact=parts.spec.kernels == "exact"))
    decoder.load_state_dict(parts.decoder.state_dict())
    decoder.refresh(1)
    scales = parts.engine.scales if flow.kv_fp8 else None
    with torch.no_grad():
        return torch.cat([m.log_probs(decoder, scales)[0] for m in probe.packed]).double()


# The parts and the whole ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["reference", "exact"])
@pytest.mark.parametrize("attention", ["bf16", "fp8"])
def test_the_steps_telescope_exactly_to_the_whole(make_spec: MakeSpec, kernels: str, attention: str) -> None:
    flow = FlowSpec("fp8-rollout", "fp8", attention=attention)  # type: ignore[arg-type]
    spec = make_spec(flow, kernels=kernels)
    found = attribute(spec, SIZE, by_layer=False)
    probe = open_probe(spec)
    d = plain_scores(probe, probe.flows.trainer) - probe.rollout_N
    assert found.whole.max == float(d.abs().max()) > 0
    assert found.whole.mean == float(d.abs().mean())
    assert found.whole.mean_square == float((d * d).mean())
    assert found.whole.p99 == sorted(d.abs().tolist())[-(-99 * len(d) // 100) - 1]
    assert found.residue.telescoping == 0.0
    inside = [s for s in found.sources if s.step is not None]
    assert tuple(s.name for s in inside) == PATH
    assert inside[-1].cumulative == found.whole
    assert sum(s.step.signed_mean for s in inside) == pytest.approx(found.whole.signed_mean, abs=1e-15)
    assert inside[0].step == inside[0].alone
    changed = {s.name for s in inside if s.alone.max > 0}
    assert changed == {"weights", "activations", "kv", *(["attention"] if attention == "fp8" else [])}


def test_the_trainers_own_rounding_is_a_size_to_compare_with(make_spec: MakeSpec) -> None:
    probe = open_probe(make_spec("fp8-rollout"))
    sources, _ = attribute_sources(probe, None, Progress(), lambda _: None)
    found = next(s for s in sources if s.name == "rounding")
    d = plain_scores(probe, bf16_flow()) - plain_scores(probe, replace(bf16_flow(), activation=torch.float32))
    assert found.alone is not None and found.step is None
    assert found.alone.mean == float(d.abs().mean()) > 0


def test_the_residue_is_what_the_parts_leave(make_spec: MakeSpec) -> None:
    probe = open_probe(make_spec("fp8-rollout", "fp8"))
    _, residue = attribute_sources(probe, None, Progress(), lambda _: None)
    rows, squares = row_groups("fp32"), square_blocks("fp32")
    base = bf16_flow()
    alone = [
        replace(base, fprop=Gemm(BF16, squares)),
        replace(base, fprop=Gemm(rows, BF16)),
        bf16_flow(kv_fp8=True),
    ]
    trainer = plain_scores(probe, base)
    parts = [trainer - plain_scores(probe, flow) for flow in alone]
    whole = trainer - probe.rollout_N
    left = (whole - sum(parts)).abs()
    assert residue.mean == pytest.approx(float(left.mean()), rel=1e-14)
    assert residue.share == pytest.approx(float(left.mean() / whole.abs().mean()), rel=1e-14)
    assert residue.parts_mean_square == pytest.approx(sum(float((p * p).mean()) for p in parts), rel=1e-14)
    assert residue.whole_mean_square == float((whole * whole).mean())


def test_the_whole_is_the_mismatch_that_training_logs(make_spec: MakeSpec, train: Callable[..., Any]) -> None:
    spec = make_spec("fp8-rollout", "fp8")
    whole = attribute(spec, SIZE, by_layer=False).whole
    _, metrics = train(spec)
    assert metrics[0]["mismatch/max_abs_dlogp"] == whole.max
    assert metrics[0]["mismatch/mean_abs_dlogp"] == pytest.approx(whole.mean, rel=1e-12)
    assert metrics[0]["token_mult_prob_error"] == pytest.approx(whole.mean_exp, rel=1e-12)


# Each source where it was planted -------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_a_unified_flow_gives_zeros(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, kv: str) -> None:
    spec = make_spec("fp8", kv)
    flows = build_flows(spec.flow, 2)
    # Two flows that are equal but for a GEMM of the backward pass, so that each side has a decoder of its own.
    plant(monkeypatch, flows.trainer, replace(flows.rollout, wgrad=Gemm(BF16, BF16)))
    probe = open_probe(spec)
    assert probe.parts.engine.decoder is not probe.parts.decoder
    assert set(effects(probe).values()) == {0.0}
    assert attribute_layers(probe, lambda _: None) == []


ROWS, SQUARES = row_groups("fp32"), square_blocks("fp32")
PLANTED = {
    "weights": (bf16_flow(), replace(bf16_flow(), fprop=Gemm(BF16, SQUARES))),
    "activations": (bf16_flow(), replace(bf16_flow(), fprop=Gemm(ROWS, BF16))),
    "kv": (bf16_flow(), bf16_flow(kv_fp8=True)),
    "kv of FP8 linears": (fp8_flow(), fp8_flow(kv_fp8=True)),
    "attention": (fp8_flow(kv_fp8=True), fp8_flow(kv_fp8=True, attention_fp8=True)),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_source_is_the_only_one(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    plant(monkeypatch, *PLANTED[what])
    found = effects(open_probe(make_spec("fp8-rollout", "fp8")))
    assert {name for name, value in found.items() if value > 0} == {what.split()[0]}


def test_a_stale_output_head_is_found(make_spec: MakeSpec) -> None:
    spec = make_spec("fp8-rollout")
    opened = open_run(spec, SIZE, None)
    head = opened.parts.engine.decoder.head
    head.packed = head.kernels.pack((head.weight.detach() * 1.01).bfloat16())
    opened.parts.engine.decoder.model.embed_tokens.packed = head.packed
    probe = Probe(opened.parts, opened.progress, SIZE, lambda _: None)
    assert effects_of_head(probe) > 0


def effects_of_head(probe: Probe) -> float:
    sources, residue = attribute_sources(probe, None, Progress(), lambda _: None)
    assert residue.telescoping == 0.0
    return {s.name: s.alone.max for s in sources if s.alone is not None}["head"]


def test_a_row_that_depends_on_its_batch_is_found(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "choose_kernels", lambda *_: PerTensorActivation())
    spec = make_spec("fp8")
    plant(monkeypatch, fp8_flow(), replace(fp8_flow(), wgrad=Gemm(BF16, BF16)))
    found = effects(open_probe(spec))
    assert {name for name, value in found.items() if value > 0} == {"batch"}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("side", ["weights", "activations"])
def test_a_mixed_linear_multiplies_codes_by_plain_values(exact: bool, side: str) -> None:
    generator = torch.Generator().manual_seed(1)
    gemm = Gemm(BF16, SQUARES) if side == "weights" else Gemm(ROWS, BF16)
    kernels = ReferenceKernels(exact=exact)
    linear = Linear(150, 70, bias=True, flow=replace(bf16_flow(), fprop=gemm), layer=0, kernels=kernels)
    weight, bias = torch.randn(70, 150, generator=generator), torch.randn(70, generator=generator)
    linear.load_state_dict({"weight": weight, "bias": bias})
    linear.refresh("weight")
    x = torch.randn(9, 150, generator=generator).bfloat16()
    with torch.no_grad():
        y = linear(x)
    w_values = quantize(weight, SQUARES).dequantize() if side == "weights" else weight.bfloat16()
    x_values = quantize(x, ROWS).dequantize() if side == "activations" else x
    product = (x_values.double() @ w_values.double().t()).bfloat16()
    expected = product + bias.bfloat16()
    if exact:
        assert torch.equal(y, expected)
    else:
        assert float((y.double() - expected.double()).abs().max()) <= 2**-7 * float(expected.abs().max())
    with pytest.raises(ValueError, match="for probes without gradient: training needs both operands in FP8"):
        linear(x)


def test_a_flow_that_can_not_be_mixed_is_refused() -> None:
    pair = FlowPair(fp8_flow(keep_bf16=frozenset({0})), fp8_flow(keep_bf16=frozenset({1})))
    with pytest.raises(ValueError, match="not the same ones"):
        mixed_flow(pair, {"weights"})


def test_truncation_is_the_kept_mass_and_adds_nothing(make_spec: MakeSpec) -> None:
    rollout = RolloutSpec(
        prompts_per_step=3, samples_per_prompt=4, max_new_tokens=6, top_k=5, truncation="replay"
    )
    spec = make_spec("fp8-rollout", rollout=rollout)
    found = attribute(spec, SIZE, by_layer=False)
    source = next(s for s in found.sources if s.name == "truncation")
    probe = open_probe(spec)
    masses = []
    for micro in probe.packed:
        assert micro.mask is not None
        decoder = probe.parts.decoder
        with torch.no_grad():
            context = PackedContext(micro.positions_T, micro.index, decoder.kernels)
            hidden = decoder.hidden(micro.ids_T, context)[micro.rows_N]
            p = decoder.head.logits(hidden, micro.temperature_N).double().softmax(-1)
        bounds = micro.mask.offsets.tolist()
        masses += [p[i, micro.mask.ids_M[a:b].long()].sum() for i, (a, b) in enumerate(pairwise(bounds))]
    mass = torch.stack(masses)
    assert source.alone is not None and source.step is None
    assert source.alone.mean == pytest.approx(float(mass.log().abs().mean()), rel=1e-5)
    assert f"kept mass {float(mass.mean()):.4f}" in source.note
    assert found.residue.telescoping == 0.0 and found.whole.max < 1


def test_staleness_is_measured_between_two_checkpoints(
    make_spec: MakeSpec, train: Callable[..., Any]
) -> None:
    spec = make_spec("fp8", checkpoint=CheckpointSpec(every=1, keep=2, export_hf=False))
    train(spec)
    run_dir = Path(spec.run_dir)
    found = attribute(spec, SIZE, run_dir=run_dir)
    assert found.weights.startswith("checkpoint step_000003") and found.probe["step"] == 3
    assert found.whole.max == 0 and found.band == "exact" and found.layers == ()
    source = next(s for s in found.sources if s.name == "staleness")
    assert source.note.startswith("an engine at step 2 under a trainer at step 3")
    probe = open_probe(spec, run_dir)
    old = Decoder(probe.parts.model_spec, probe.flows.trainer, probe.parts.decoder.kernels)
    load_weights(list_checkpoints(run_dir / "checkpoints")[-2], old)
    old.refresh(1)
    with torch.no_grad():
        stale = torch.cat([m.log_probs(old, None)[0] for m in probe.packed]).double()
    assert source.alone is not None
    assert source.alone.mean == float((probe.rollout_N - stale).abs().mean()) > 0


def test_layers_that_the_controller_took_out_of_fp8_stay_out(
    make_spec: MakeSpec, train: Callable[..., Any]
) -> None:
    spec = make_spec("fp8-rollout", checkpoint=CheckpointSpec(every=3, export_hf=False))
    train(spec)
    state_file = list_checkpoints(Path(spec.run_dir) / "checkpoints")[-1] / "state.json"
    state = json.loads(state_file.read_text())
    state["controller"] = {"kept_layers": [1]}
    state_file.write_text(json.dumps(state))
    found = attribute(spec, SIZE, run_dir=Path(spec.run_dir), target=0.0)
    assert found.weights == "checkpoint step_000003, layers 1 in BF16 by its controller"
    assert [x.kept_bf16 for x in found.layers] == [False, True]
    assert found.layers[0].linears.mean == found.whole.mean  # layer 0 is all that differs
    assert found.suggestion is not None and found.suggestion.layers == (0,)
    assert "keep_bf16_layers: [0, 1]" in found.suggestion.config


# Layers and the suggestion --------------------------------------------------------------------------------------


def blown_up(folder: Path, layer: int) -> None:
    """A row of the layer's up and value projections far beyond all others, and nothing that listens to either: the function
    stays, but the FP8 codes of those blocks, and of the activations beside them, go coarse."""
    listens = {
        "mlp.down_proj": [0],
        "self_attn.o_proj": [0, 8],
    }  # two query heads of size 8 share the first KV head

    def edit(name: str, t: Tensor) -> Tensor:
        t = t.clone()
        for part in ("mlp.up_proj", "self_attn.v_proj"):
            if name == f"model.layers.{layer}.{part}.weight":
                t[0] *= 1e6
        for part, columns in listens.items():
            if name == f"model.layers.{layer}.{part}.weight":
                t[:, columns] = 0
        return t

    change(folder, edit)


@pytest.fixture
def outlier_spec(make_spec: MakeSpec, tmp_path: Path) -> RunSpec:
    """Four layers, the third with outliers."""
    folder = tmp_path / "outliers"
    make_tiny(folder, hidden=32, layers=4, heads=4, kv_heads=2, intermediate=48)
    change(folder, lambda name, t: t if "norm" in name else t * 5)
    blown_up(folder, 2)
    return make_spec("fp8-rollout", "fp8", model=ModelSource(str(folder)))


def test_a_layer_with_outliers_is_ranked_first(outlier_spec: RunSpec) -> None:
    found = attribute(outlier_spec, SIZE, target=1e9)
    assert [x.layer for x in found.layers] == [0, 1, 2, 3]
    for effect in ("linears", "both"):
        ranked = sorted(found.layers, key=lambda x: -getattr(x, effect).mean)
        assert ranked[0].layer == 2
        assert getattr(ranked[0], effect).mean > 2 * getattr(ranked[1], effect).mean
    assert found.suggestion is not None and found.suggestion.layers == ()  # far below that target already


def test_a_layer_alone_is_that_layer_alone(make_spec: MakeSpec, deep_model: Path) -> None:
    probe = open_probe(make_spec("fp8-rollout", "fp8", model=ModelSource(str(deep_model))))
    found = attribute_layers(probe, lambda _: None)
    trainer = plain_scores(probe, bf16_flow())
    for layer in (0, 3):
        linears = fp8_flow(keep_bf16=frozenset(range(4)) - {layer})
        d = trainer - plain_scores(probe, linears)
        assert found[layer].linears.mean == float(d.abs().mean()) > 0
        d = trainer - scores_with_kv_in_one_layer(probe, linears, layer)
        assert found[layer].both.mean == float(d.abs().mean()) > 0
        assert found[layer].both != found[layer].linears


def scores_with_kv_in_one_layer(probe: Probe, flow: Flow, layer: int) -> Tensor:
    """The keys and values of one layer are quantized and widened before a plain attention, and v's scale applied there."""
    parts = probe.parts
    scales = parts.engine.scales
    assert scales is not None
    decoder = Decoder(parts.model_spec, flow, parts.decoder.kernels)
    decoder.load_state_dict(parts.decoder.state_dict())
    decoder.refresh(1)

    class OneLayer(PackedContext):
        def attend(self, at: int, *args: Any) -> Tensor:
            inner = PackedContext(
                self.positions_T, self.index, self.kernels, scales=scales if at == layer else None
            )
            return inner.attend(at, *args)

    out = []
    with torch.no_grad():
        for micro in probe.packed:
            context = OneLayer(micro.positions_T, micro.index, decoder.kernels)
            hidden = decoder.hidden(micro.ids_T, context)[micro.rows_N]
            out.append(decoder.head.log_probs(hidden, micro.targets_N, micro.temperature_N)[0])
    return torch.cat(out).double()


def test_kv_alone_belongs_to_layers_too(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, bf16_flow(), bf16_flow(kv_fp8=True))
    found = attribute_layers(open_probe(make_spec("fp8-rollout", "fp8")), lambda _: None)
    assert all(x.linears.max == 0 and x.both.max > 0 and not x.kept_bf16 for x in found)


def test_every_layer_of_a_layerwise_context_is_a_plain_one(make_spec: MakeSpec) -> None:
    probe = open_probe(make_spec("fp8-rollout", "fp8"))
    flow = probe.flows.rollout
    every = frozenset(range(2))
    assert torch.equal(probe.score(flow, kv_layers=every), plain_scores(probe, flow))
    assert torch.equal(
        probe.score(flow, kv_layers=frozenset()), plain_scores(probe, replace(flow, kv_fp8=False))
    )
    assert issubclass(LayerwiseKV, PackedContext)


def mean_abs(probe: Probe, spec: FlowSpec) -> float:
    """Mean |d| between the two flows of a section, by the training forward."""
    flows = build_flows(spec, probe.parts.model_spec.num_layers)
    return float((plain_scores(probe, flows.trainer) - plain_scores(probe, flows.rollout)).abs().mean())


def test_the_suggestion_lowers_the_mismatch_as_claimed(
    make_spec: MakeSpec, deep_model: Path, tmp_path: Path
) -> None:
    spec = make_spec("fp8-rollout", model=ModelSource(str(deep_model)))
    before = attribute(spec, SIZE, by_layer=False).whole.mean
    target = 0.6 * before
    found = attribute(spec, SIZE, target=target)
    s = found.suggestion
    assert s is not None and s.reached and not s.kv_to_bf16
    assert 0 < len(s.layers) < 4 and s.before == before and s.after <= target
    ranked = [x.layer for x in sorted(found.layers, key=lambda x: -x.linears.mean_square)]
    assert s.layers == tuple(sorted(ranked[: len(s.layers)]))
    file = tmp_path / "suggested.yaml"
    before_it, _, rest = dump(spec).partition("\nflow:\n")
    file.write_text(f"{before_it}\n{s.config}\nrollout:{rest.partition('rollout:')[2]}")
    pasted = load_run(file).flow
    assert pasted == replace(spec.flow, keep_bf16_layers=s.layers)
    probe = open_probe(spec)
    assert mean_abs(probe, pasted) == s.after
    fewer = tuple(sorted(ranked[: len(s.layers) - 1]))
    assert mean_abs(probe, replace(spec.flow, keep_bf16_layers=fewer)) > target
    applied = attribute(replace(spec, flow=pasted), SIZE)
    assert applied.whole.mean < before
    assert {x.layer for x in applied.layers if x.kept_bf16} == set(s.layers)
    assert all(x.linears.max == 0 for x in applied.layers if x.kept_bf16)


def test_where_layers_do_not_help_the_cache_goes_to_bf16(make_spec: MakeSpec) -> None:
    found = attribute(make_spec("fp8-rollout", "fp8"), SIZE, target=0.0)
    s = found.suggestion
    assert s is not None and s.reached and s.kv_to_bf16 and s.layers == (0, 1) and s.after == 0.0
    assert "kv: bf16" in s.config and "keep_bf16_layers: [0, 1]" in s.config


def test_layers_to_keep_in_bf16(make_spec: MakeSpec, tmp_path: Path) -> None:
    spec = FlowSpec("fp8", keep_first_bf16=1, keep_bf16_layers=(0, 2), keep_last_bf16=1)
    flows = build_flows(spec, 6)
    assert flows.unified and flows.trainer.keep_bf16 == {0, 2, 5}
    flows = build_flows(replace(spec, name="fp8-rollout"), 6)
    assert flows.rollout.keep_bf16 == {0, 2, 5} and not flows.trainer.is_fp8
    assert build_flows(replace(spec, name="bf16"), 6).unified
    with pytest.raises(ValueError, match=r"names layer 2, the model has layers 0 to 1"):
        build_flows(FlowSpec(keep_bf16_layers=(2,)), 2)
    for wrong in ((2, 1), (1, 1), (-1, 0)):
        with pytest.raises(ValueError, match="ascending and each once"):
            FlowSpec(keep_bf16_layers=wrong)
    file = tmp_path / "run.yaml"
    file.write_text(dump(make_spec(FlowSpec("fp8", keep_bf16_layers=(1,)))))
    assert load_run(file).flow.keep_bf16_layers == (1,)
    assert load_run(file, ["flow.keep_bf16_layers=[0, 1]"]).flow.keep_bf16_layers == (0, 1)


def test_kept_layers_stay_bf16_on_both_sides_of_a_run(make_spec: MakeSpec, train: Callable[..., Any]) -> None:
    spec = make_spec(FlowSpec("fp8", keep_bf16_layers=(1,)))
    _, metrics = train(spec)
    assert all(m["mismatch/max_abs_dlogp"] == 0 for m in metrics)
    decoder = open_run(
        replace(spec, flow=replace(spec.flow, name="fp8-rollout")), SIZE, None
    ).parts.engine.decoder
    fp8 = {n for n, m in decoder.named_modules() if isinstance(m, Linear) and m.fp8}
    assert fp8 and all(".layers.0." in n for n in fp8)


# What people see ------------------------------------------------------------------------------------------------


def test_the_mismatch_has_sources_and_a_band_case_49(outlier_spec: RunSpec) -> None:
    """'What mismatch is safe, and why does it explode?' is answered: a band, the source, the layer."""
    found = attribute(outlier_spec, SIZE, target=0.05)
    data = found.to_dict()
    assert [band(x) for x in (1.0, 1.0000001, 1.03, 1.031, 1.05, 1.051)] == [
        "exact", "healthy", "healthy", "tolerable", "tolerable", "high",
    ]  # fmt: skip
    assert found.band == band(found.whole.mean_exp) == "high"
    shares = {
        s.name: s.alone.mean_square for s in found.sources if s.alone is not None and s.step is not None
    }
    largest = max(shares, key=lambda n: shares[n])
    assert largest in ("weights", "activations")
    told = "\n".join(lines(data))
    assert "high, above 1.05" in told and f"Largest source: {largest}" in told
    assert "layers by mean |Δlogp| alone: 2 (" in told
    assert found.suggestion is not None and 2 in found.suggestion.layers
    assert found.suggestion.after < found.suggestion.before / 2


def write_config(spec: RunSpec, path: Path) -> Path:
    path.write_text(dump(spec))
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as e:
        main(arguments)
    return int(e.value.code or 0)


def test_the_command_on_a_configuration(
    make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(make_spec("fp8-rollout", "fp8"), tmp_path / "run.yaml")
    plot = tmp_path / "plots" / "a.svg"
    code = run(
        "attribute", str(config), "--prompts", "2", "--samples", "2", "--tokens", "5",
        "--target", "0.001", "--svg", str(plot),
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    for said in ("sampled 4 completions", "weights alone: ", "layer 1 alone: ", "whole", "keep_bf16_layers"):
        assert said in out
    run_dir = tmp_path / "run"
    data = json.loads((run_dir / "attribution.json").read_text())
    assert data == read_attribution(run_dir / "attribution.json")
    assert [s["name"] for s in data["sources"]] == [*PATH, "truncation", "staleness", "rounding"]
    page = (run_dir / "attribution.html").read_text()
    assert "attribution-layers" in page and "keys and values" in page
    drawing = plot.read_text()
    assert drawing.startswith("<svg ") and drawing.count("<g ") == 4 and "nan" not in drawing.lower()
    assert not (run_dir / "report.html").exists()


def test_the_command_on_a_run_extends_its_report(
    make_spec: MakeSpec, tmp_path: Path, train: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec("fp8-rollout", checkpoint=CheckpointSpec(every=3, export_hf=False))
    train(spec, config_yaml=dump(spec))
    run_dir = Path(spec.run_dir)
    without = build_report(run_dir).read_text()
    assert 'id="attribution"' not in without
    code = run("attribute", str(run_dir), "--prompts", "2", "--samples", "2", "--tokens", "5", "--no-layers")
    out, err = capsys.readouterr()
    assert (code, err) == (0, "") and "weights: checkpoint step_000003" in out and "layer 0" not in out
    report = (run_dir / "report.html").read_text()
    assert 'id="attribution"' in report and 'id="attribution-sources"' in report
    assert report.count("<figure") == without.count("<figure") + 1
    assert build_report(run_dir).read_text() == report
    assert report.count("<script type=") == report.count('class="card plot"')
    (run_dir / "attribution.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match="not an attribution of format 1"):
        build_report(run_dir)
    (run_dir / "attribution.json").write_text("{")
    with pytest.raises(DataError, match=r"attribution.json: no JSON"):
        build_report(run_dir)


BAD: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no such run": (lambda t: [str(t / "nowhere")], "nowhere: no such run folder or configuration"),
    "not a run": (lambda t: [str(t)], "not the folder of a run (it has no config.yaml)"),
    "flows equal": (lambda t: [str(t / "run.yaml"), "flow.name=fp8"], "the same flow: their mismatch is 0"),
    "flows equal, BF16": (
        lambda t: [str(t / "run.yaml"), "flow.name=bf16"],
        "`lockstep audit` checks that zero",
    ),
    "no tokens": (lambda t: [str(t / "run.yaml"), "--tokens", "0"], "--tokens: must be at least 1"),
    "target": (lambda t: [str(t / "run.yaml"), "--target", "-1"], "--target: must be a mean |delta logp|"),
    "too long": (lambda t: [str(t / "run.yaml"), "--tokens", "5000"], "the model has 1024 positions"),
    "no such layer": (
        lambda t: [str(t / "run.yaml"), "flow.keep_bf16_layers=[7]"],
        "flow: keep_bf16_layers names layer 7, the model has layers 0 to 1",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_mistake_is_one_clear_line(
    make_spec: MakeSpec, tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    write_config(make_spec("fp8-rollout"), tmp_path / "run.yaml")
    arguments, text = BAD[what]
    code = run("attribute", *arguments(tmp_path))
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and text in err
    assert not (tmp_path / "run").exists()


def test_equal_flows_are_refused_before_a_model_is_loaded(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "load_masters", None)
    with pytest.raises(ConfigError, match="has no sources"):
        attribute(make_spec("fp8"), SIZE)


def test_the_page_shows_zero_as_zero(make_spec: MakeSpec, train: Callable[..., Any]) -> None:
    spec = make_spec("fp8", checkpoint=CheckpointSpec(every=1, keep=2, export_hf=False))
    train(spec)
    found: Attribution = attribute(spec, SIZE, run_dir=Path(spec.run_dir), target=0.01)
    data = found.to_dict()
    assert f"No mismatch: {data['probe']['tokens']} log-probabilities are equal bit for bit." in lines(data)
    body = section(data).body
    assert body.count("exactly 0") == 8 and "nothing to change" in body  # six sources, the whole, truncation
