"""The training benchmarks on a CPU, with a tiny model: they run, their sums add up, and they refuse what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.bench import corpus, gradients, sft, step, training, training_layer
from lockstep.bench.goals import Goal
from lockstep.bench.sides import Batch, Side, Sides, cosine, make_sides, random_batch, random_masters
from lockstep.errors import ContractError, DataError
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.tiny import make_tiny, tiny_spec
from lockstep.numerics.flow import bf16_flow, fp8_flow
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.spec import OptimSpec
from lockstep.trainer.workload import Card

CARD = Card()


@pytest.fixture
def decoder() -> Decoder:
    spec = tiny_spec(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=128, family="qwen3")
    return random_masters(spec, fp8_flow(), select("reference"), std=0.05)


def sides_of(decoder: Decoder, lengths: list[int], **more: Any) -> tuple[Sides, list[Batch]]:
    return make_sides(decoder, lengths, **more), [random_batch(decoder, lengths, seed=i) for i in range(2)]


def test_rows_are_what_was_asked_for(decoder: Decoder) -> None:
    batch = random_batch(decoder, [5, 9])
    assert batch.packing.lengths == (5, 9) and batch.packing.starts_S1.tolist() == [0, 5, 14]
    assert batch.rows == len(batch.micro.ids_T) == len(batch.micro.targets_N) == len(batch.advantage_N) == 14
    assert batch.micro.positions_T.tolist() == [*range(5), *range(9)]


def test_a_training_step_of_both_sides(decoder: Decoder) -> None:
    sides, batches = sides_of(decoder, [8, 8])
    said: list[str] = []
    result = training.run_training(sides, batches, CARD, iterations=1, say=said.append)
    assert set(result.times["fp8"]) == set(training.PHASES[1:]) and set(result.times["bf16"]) == set(
        training.PHASES
    )
    assert 0.95 < result.agreement.worst <= result.agreement.whole * 1.01 <= 1.02
    assert "gradient cosine" in said[0] and math.isnan(result.memory_ratio)
    ours, theirs = (sum(result.times[side].values()) for side in ("fp8", "bf16"))
    assert result.phase_ratio == pytest.approx(theirs / ours)
    without = theirs - result.times["bf16"]["old log-probabilities"]
    assert result.step_ratio == pytest.approx(without / ours) and result.step_ratio < result.phase_ratio
    text = "\n".join(result.lines())
    assert all(name in text for name in training.PHASES)
    assert all(p.grad is None for p in decoder.parameters())


def test_sides_take_turns_and_only_ours_is_captured(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides, batches = sides_of(decoder, [8, 8])
    seen: list[tuple[str, bool]] = []

    def step(side: Side, batches: Sequence[Batch], optimizer: Optimizer) -> training.Times:
        seen.append((side.name, sides.ours.decoder.graphs is not None))
        return {name: float(len(seen)) for name in training.PHASES}

    monkeypatch.setattr(training, "one_step", step)
    result = training.run_training(sides, batches, CARD, iterations=3, say=lambda text: None, captured=True)
    order = ["fp8"] * 3 + ["bf16"] * 3 + ["fp8"] * 2 + ["bf16"] * 2
    assert [name for name, _ in seen] == order and all(captured for _, captured in seen)
    assert result.times["fp8"]["forward"] == 3.0 and result.times["bf16"]["forward"] == 6.0
    assert decoder.graphs is None and not decoder.head.in_place
    assert not sides.theirs.baseline.decoder.head.in_place


def test_both_sides_follow_the_masters(decoder: Decoder) -> None:
    sides, batches = sides_of(decoder, [6, 6])
    optimizer = Optimizer(decoder.named_parameters(), OptimSpec(lr=0.004), 10)
    with torch.no_grad():
        before = [side.log_probs(batches[0]) for side in sides.both]
    for side in sides.both:
        training.one_step(side, batches, optimizer)
    for side in sides.both:
        side.publish()
    with torch.no_grad():
        after = [side.log_probs(batches[0]) for side in sides.both]
    for old, new in zip(before, after, strict=True):
        assert float((old - new).abs().max()) > 0.05
    assert float((after[0] - after[1]).abs().mean()) < float((before[0] - after[0]).abs().mean()) / 3


def test_a_wrong_gradient_ends_the_benchmark(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    sides, batches = sides_of(decoder, [8, 8])
    layer = sides.theirs.baseline.layers[1]
    right = layer.operations.swiglu_grad
    monkeypatch.setattr(layer.operations, "swiglu_grad", lambda grad, gate_up: -right(grad, gate_up))
    with pytest.raises(ContractError, match="disagree"):
        training.compare(sides, batches[0])
    monkeypatch.setattr(
        layer.operations, "swiglu_grad", lambda grad, gate_up: right(grad, gate_up) * math.nan
    )
    with pytest.raises(ContractError, match="not finite"):
        training.compare(sides, batches[0])


def test_small_micro_batches_by_the_wall(decoder: Decoder) -> None:
    sides, batches = sides_of(decoder, [4])
    ratio, times = training.wall_ratio(sides, batches, 2)
    assert ratio == pytest.approx(times["bf16"] / times["fp8"]) and min(times.values()) > 0
    assert all(p.grad is None for p in decoder.parameters())


def result_of() -> training.Result:
    names = ("old log-probabilities", "forward", "backward", "optimizer", "publication")
    both = {
        "fp8": dict(zip(names[1:], (10.0, 20.0, 5.0, 1.0))),
        "bf16": dict(zip(names, (15.0, 15.0, 32.0, 5.0, 2.0))),
    }
    memory = {"fp8": training.Memory(6, 9), "bf16": training.Memory(10, 14)}
    agreement = training.Agreement(0.01, 0.99, 0.98, 3)
    return training.Result(16384, agreement, both, memory, {"fp8": {}, "bf16": {}}, {"fp8": 1, "bf16": 1})


def test_training_goals() -> None:
    found = training.goals("qwen3-1.7b", result_of(), 1.1)
    assert [(g.id, round(g.value, 6), g.goal, g.reached) for g in found] == [
        ("D3a", 1.5, 1.35, True),
        ("D3b", 0.6, 0.6, True),
        ("D4", round(69 / 36, 6), 1.7, True),
        ("D7", 1.1, 1.0, True),
    ]
    assert [g.id for g in training.goals("qwen3-1.7b", result_of(), None)] == ["D3a", "D3b", "D4"]
    assert training.goals("qwen3-0.6b", result_of(), 1.1) == []
    assert len(training.goals("qwen3-4b", result_of(), 1.1)) == 4, "or a larger model"


def test_layer_goals() -> None:
    linears = training_layer.Linears(17.5, 26.0, 0.7, 2.0)
    times = {"fp8": {"forward": 5.0, "backward": 10.0}, "bf16": {"forward": 7.0, "backward": 15.5}}
    result = training_layer.Result(16384, times, {"fp8": 1.0, "bf16": 2.0}, 0.99, linears)
    assert [(g.id, g.value, g.reached) for g in training_layer.goals("qwen3-8b", result)] == [
        ("D2a", 1.5, True),
        ("D2b", pytest.approx(26.0 / 18.2), True),
    ]
    assert linears.separate_ratio == pytest.approx(26.0 / 19.5)
    assert training_layer.goals("qwen3-1.7b", result) == []
    assert "1.500x" in "\n".join(result.lines())


def test_cosine_is_of_whole_lists() -> None:
    a = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    assert cosine(a, a) == pytest.approx(1.0)
    assert cosine(a, [torch.tensor([3.0, 0.0]), torch.tensor([-4.0])]) == pytest.approx((9 - 16) / 25)
    assert math.isnan(cosine(a, [torch.zeros(2), torch.zeros(1)]))


@pytest.mark.parametrize("kv_fp8", [False, True])
def test_a_whole_step_of_both_sides(kv_fp8: bool) -> None:
    spec = tiny_spec(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=64)
    decoder = random_masters(spec, fp8_flow(kv_fp8=kv_fp8), select("reference"), std=0.05)
    work = step.StepWork(prompts=2, samples=2, prompt_tokens=5, new_tokens=6, microbatch_tokens=25)
    said: list[str] = []
    result = step.run_step(decoder, work, steps=1, say=said.append)
    assert set(result.times["bf16"]) == set(step.PHASES)
    assert set(step.PHASES) - set(result.times["fp8"]) == {"old log-probabilities"}
    assert result.mismatch["fp8"] == 0.0
    total = {side: sum(times.values()) for side, times in result.times.items()}
    assert result.ratio == pytest.approx(total["bf16"] / total["fp8"])
    assert [(g.id, g.goal) for g in step.goals("qwen3-1.7b", result)] == [("D5", 1.5)]
    assert "old log-probabilities" in "\n".join(result.lines())


def test_a_rollout_that_is_not_the_trainers_ends_the_benchmark(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = step.batch_of

    def shifted(completions: Any, *rest: Any) -> Batch:
        batch = real(completions, *rest)
        batch.micro.rollout_N[0] += 1e-6
        return batch

    monkeypatch.setattr(step, "batch_of", shifted)
    work = step.StepWork(1, 2, 4, 4, 16)
    with pytest.raises(ContractError, match="rollout and trainer disagree"):
        step.run_step(decoder, work, steps=1, say=lambda line: None)


def test_the_surrogate_at_the_first_pass_is_the_policy_gradient() -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantage = torch.tensor([2.0, -1.0, 0.5])
    step.grpo_loss(logp, logp.detach().clone(), advantage, 3).backward()
    assert logp.grad is not None
    torch.testing.assert_close(logp.grad, -advantage / 3)


def test_the_corpus_is_cut_into_sequences_and_every_eighth_is_held_out(tmp_path: Path) -> None:
    spec = make_tiny(tmp_path / "m", hidden=32, layers=1)
    train, held = corpus.load_corpus(tmp_path / "m", spec, 64)
    assert len(train) > 1000 and abs(len(train) / 7 - len(held)) <= 1
    assert all(len(c.prompt_ids) + len(c.token_ids) == 64 for c in (*train, *held))
    assert not {c.prompt_index for c in train} & {c.prompt_index for c in held}
    with pytest.raises(DataError, match="lower it"):
        corpus.load_corpus(tmp_path / "m", spec, 10**5)


def test_gradients_of_a_checkpoint(tmp_path: Path) -> None:
    make_tiny(tmp_path / "m", hidden=128, layers=2, intermediate=128)
    kernels = select("reference")
    found = gradients.run_gradients(
        tmp_path / "m", fp8_flow(), kernels, count=2, length=24, save_fp8=False, say=lambda line: None
    )
    assert set(found.layers) == set(found.alone) == {0, 1} and 0.97 < found.layers[found.worst] < 1.0
    assert 0.99 < min(found.alone.values()) < 1.0
    assert found.loss == pytest.approx(found.loss_bf16, rel=0.02) and found.loss != found.loss_bf16
    same = gradients.run_gradients(
        tmp_path / "m", bf16_flow(), kernels, count=2, length=24, save_fp8=False, say=lambda line: None
    )
    assert same.whole == pytest.approx(1.0) and same.loss == same.loss_bf16
    assert list(same.alone.values()) == pytest.approx([1.0, 1.0])
    flow, alone = gradients.goals(found)
    assert (flow.id, flow.value, flow.goal) == ("D6a", min(found.layers.values()), 0.995)
    assert (alone.id, alone.value, alone.goal) == ("D6c", min(found.alone.values()), 0.995)


def test_fine_tuning_in_both_flows(tmp_path: Path) -> None:
    make_tiny(tmp_path / "m", hidden=64, layers=1, intermediate=64)
    how = sft.SFT(steps=6, batch=2, length=16, lr=3e-3, every=3, held_out=4)
    curves = sft.run_sft(tmp_path / "m", fp8_flow(), select("reference"), how, say=lambda line: None)
    for curve in (curves.fp8, curves.twin, curves.other):
        assert list(curve.held_out) == list(curve.own) == [0, 3, 6] and len(curve.training) == 6
        assert curve.held_out[6] < curve.held_out[0]
    assert (
        len({curve.held_out[0] for curve in (curves.fp8, curves.twin, curves.other)}) == 1
    )  # the same masters
    assert curves.twin.own == curves.twin.held_out and curves.fp8.own[0] != curves.fp8.held_out[0]
    one, judge = (gradients.load_decoder(tmp_path / "m", bf16_flow(), select("reference")) for _ in range(2))
    torch._foreach_mul_([p.data for p in one.parameters()], 1.2)
    one.refresh(2)
    held = corpus.load_corpus(tmp_path / "m", one.spec, how.length)[1][:4]
    before = sft.held_out_loss(judge, held)
    assert sft.judged(judge, one, held) == sft.held_out_loss(one, held) != before
    assert curves.twin.training[0] != curves.other.training[0]
    assert curves.difference < curves.noise
    assert sft.goals(curves) == []  # too short to say anything


def test_curves_are_compared_by_their_largest_distance() -> None:
    fp8 = sft.Curve("fp8", {0: 9.0, 250: 2.02, 500: 1.51}, {}, ())
    twin = sft.Curve("bf16", {0: 1.0, 250: 2.0, 500: 1.5}, {}, ())
    other = sft.Curve("bf16, seed 1", {0: 1.0, 250: 2.0, 500: 1.46}, {}, ())
    (goal,) = sft.goals(sft.Curves(fp8, twin, other))
    assert goal == Goal("D6b", pytest.approx(0.5), 1.0, goal.unit, higher_is_better=False) and goal.reached


def test_masters_begin_within_the_rounding_of_their_bf16_values(decoder: Decoder) -> None:
    with torch.no_grad():
        for master in decoder.parameters():
            master.copy_(master.bfloat16())
    before = [master.detach().clone() for master in decoder.parameters()]
    sft.spread(decoder)
    for old, new in zip(before, decoder.parameters(), strict=True):
        assert (
            torch.equal(new.bfloat16().float(), old)
            and (old == 0).logical_or(new != old).float().mean() > 0.9
        )
    moved = torch.cat([(new - old).flatten() for old, new in zip(before, decoder.parameters(), strict=True)])
    assert (moved > 0).float().mean().item() == pytest.approx(0.5, abs=0.05)


def test_an_order_has_every_sequence_once_an_epoch() -> None:
    first, again = ([sft._at(0, place, 7) for place in range(e * 7, e * 7 + 7)] for e in (0, 1))
    assert sorted(first) == sorted(again) == list(range(7)) and first != again
    assert first != [sft._at(1, place, 7) for place in range(7)]
