"""The correction in a run: in which order, over which samples, against which policy, and at what price."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.algorithms import merge_metrics
from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.correction.controller_spec import ControllerSpec
from lockstep.correction.presets import ICEPOP, NONE, PRESETS, TOKEN_TIS
from lockstep.correction.spec import CorrectionSpec
from lockstep.correction.tighten import WIDEST
from lockstep.errors import ContractError
from lockstep.numerics.flow import FlowPair, bf16_flow, fp8_flow
from lockstep.observe.glossary import describe
from lockstep.trainer import setup
from lockstep.trainer.loop import RunResult
from lockstep.trainer.spec import MismatchSpec, OptimSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
OpenTrainer = Callable[[RunSpec], Any]
Train = Callable[..., tuple[RunResult, list[dict[str, float]]]]
WIDE = {"rollout_rs_threshold": 1.02, "rollout_rs_threshold_lower": 0.98}
"""Geometric bounds for completions of six tokens; the published ones are for thousands."""


def correction_of(name: Any, **more: Any) -> CorrectionSpec:
    return CorrectionSpec(name, **(WIDE if name.startswith("geometric") else {}), **more)


def log_ratios(trainer: Any, samples: list[Any]) -> list[torch.Tensor]:
    """log p_old / q of every token, sample by sample, from a forward of its own."""
    old = trainer.updater.old_log_probs(samples, trainer.history)
    return [old[id(s)].double() - torch.tensor(s.completion.trained_logprobs).double() for s in samples]


def spoil(trainer: Any, monkeypatch: pytest.MonkeyPatch, places: set[tuple[int, int]], by: float) -> None:
    """The rollout claims another probability for the first token of these samples (group counted from 0, sample)."""
    generate, first = trainer.generate, trainer.progress.ordinal

    def claim(start: int, prompts: Any) -> Any:
        found = []
        for c in generate(start, prompts):
            if (c.prompt_index - first, c.sample_index) in places:
                c = replace(c, logprobs=(min(c.logprobs[0] + by, 0.0), *c.logprobs[1:]))
            found.append(c)
        return found

    monkeypatch.setattr(trainer, "generate", claim)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_runs(make_spec: MakeSpec, train: Train, name: Any) -> None:
    """FP8 rollout, BF16 trainer: every number is finite, known to the glossary, and the model learns from what is kept."""
    spec = make_spec("fp8-rollout", correction=correction_of(name), update=UpdateSpec(2))
    _, metrics = train(spec)
    for m in metrics:
        assert all(math.isfinite(v) for v in m.values())
        assert m["mismatch/tokens"] > 20, "compared before anything was rejected"
        assert m["optim/applied_steps"] == 1 and m["optim/grad_norm"] > 0
        assert all(describe(k) for k in m if k.startswith(("rollout_corr/", "policy/"))), m.keys()
        if name != "bypass":
            assert abs(m["policy/ratio_mean"] - 1) < 1e-12, "against the old policy, before the first step"
        assert ("rollout_corr/rollout_is_mean" in m) == (PRESETS[name].rollout_is != "none")
        assert ("rollout_corr/rejected_fraction" in m) == PRESETS[name].rejects
    if name == "bypass":
        assert any(m["policy/ratio_max"] > 1 for m in metrics)


@pytest.mark.parametrize(
    ("update", "names"),
    [
        (UpdateSpec(1), [n for n in PRESETS if n != "none"]),
        (UpdateSpec(1, mini_batches=2, epochs=2), ["token_tis", "ais", "icepop"]),
    ],
    ids=["one step", "several"],
)
def test_correcting_nothing_changes_nothing(
    make_spec: MakeSpec, train: Train, update: UpdateSpec, names: list[Any]
) -> None:
    """In a unified flow every weight is exactly 1 and nobody is rejected: the bits are those of a run without."""
    plain, _ = train(make_spec("fp8", update=update))
    for name in names:
        spec = make_spec("fp8", name=name, update=update, correction=CorrectionSpec(name))
        corrected, metrics = train(spec)
        assert corrected.digest == plain.digest, name
        assert metrics[0].get("rollout_corr/rejected_fraction", 0.0) == 0.0


def test_a_correction_changes_what_is_learnt(make_spec: MakeSpec, train: Train) -> None:
    digests = {}
    for name in ("none", "token_tis", "sequence_tis", "geometric_mis"):
        spec = make_spec("fp8-rollout", name=name, correction=correction_of(name), update=UpdateSpec(1))
        digests[name] = train(spec)[0].digest
    assert len(set(digests.values())) == len(digests)


def test_in_one_unclipped_step_bypass_is_the_untruncated_token_weight(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    """grad of A p/q at p = p_old is (p_old / q) A grad log p: the correction is in the ratio, so weights would count it twice."""
    algorithm = AlgorithmSpec("grpo", clip_low=1.0, clip_high=math.inf)
    with open_trainer(make_spec("fp8-rollout", algorithm=algorithm)) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        found = {}
        for name in ("bypass", "token_tis", "none"):
            trainer.updater.correction = replace(PRESETS[name], rollout_is_threshold=math.inf)  # type: ignore[index]
            found[name], _ = gradient_of(trainer, samples)
    distance = float((found["bypass"] - found["token_tis"]).norm() / found["token_tis"].norm())
    assert (
        distance
        < 1e-6
        < 1e-3
        < float((found["none"] - found["token_tis"]).norm() / found["token_tis"].norm())
    )


@pytest.mark.parametrize(
    ("flow", "name", "update", "passes"),
    [
        ("fp8", "none", UpdateSpec(1), 0),
        ("fp8", "none", UpdateSpec(1, mini_batches=3, epochs=2), 0),
        ("fp8-rollout", "none", UpdateSpec(1), 0),
        ("fp8-rollout", "token_tis", UpdateSpec(1), 0),
        ("fp8-rollout", "sequence_tis", UpdateSpec(1), 0),
        ("fp8-rollout", "bypass", UpdateSpec(1, mini_batches=3), 0),
        ("fp8-rollout", "token_tis", UpdateSpec(1, mini_batches=3, epochs=2), 1),
        ("fp8-rollout", "none", UpdateSpec(1, epochs=2), 1),
        ("fp8-rollout", "icepop", UpdateSpec(1), 1),
        ("fp8-rollout", "veto", UpdateSpec(1), 1),
        ("fp8-rollout", "ais", UpdateSpec(1), 1),
    ],
)
def test_the_old_policy_costs_a_pass_only_where_it_must(
    make_spec: MakeSpec, open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch,
    flow: str, name: Any, update: UpdateSpec, passes: int,
) -> None:  # fmt: skip
    spec = make_spec(flow, correction=CorrectionSpec(name), update=update, controller=ControllerSpec("off"))
    with open_trainer(spec) as trainer:
        trainer.begin()
        calls = []
        score = trainer.updater.old_log_probs
        monkeypatch.setattr(
            trainer.updater, "old_log_probs", lambda *a, **k: calls.append(len(a[0])) or score(*a, **k)
        )
        trainer.step()
        assert calls == [12] * passes, "once, over all samples, before any is left out"


@pytest.mark.parametrize("name", ["token_tis", "sequence_tis", "geometric_token_tis", "ais"])
@pytest.mark.parametrize("update", [UpdateSpec(1), UpdateSpec(1, epochs=2)], ids=["one step", "two epochs"])
def test_ratio_and_weight_are_taken_against_the_old_policy_case_39(
    make_spec: MakeSpec, open_trainer: OpenTrainer, name: Any, update: UpdateSpec
) -> None:
    """What the loss gets, mini-batch after mini-batch, is the policy from before the first optimizer step, with weights from
    float64 ratios; nothing of it carries a gradient, and nothing moves when the weights of the model do."""
    spec = make_spec("fp8-rollout", correction=correction_of(name), update=update, optim=OptimSpec(lr=0.02))
    with open_trainer(spec) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        d = log_ratios(trainer, samples)
        old = torch.cat(list(trainer.updater.old_log_probs(samples, trainer.history).values()))
        seen = []
        terms = trainer.updater.corrector.terms
        trainer.updater.corrector.terms = lambda *a: seen.append((a, terms(*a))) or seen[-1][1]
        trainer.updater.update(samples, trainer.history)
    assert len(seen) == update.epochs
    for (chosen, _, _), found in seen:
        assert chosen == samples and not found.anchor_N.requires_grad and not found.weight_N.requires_grad
        assert torch.equal(found.anchor_N, old)
        c = PRESETS[name]
        ratio = (
            torch.cat([x.sum().expand_as(x) if c.rollout_is == "sequence" else x for x in d])
            .exp()
            .clamp(max=2.0)
        )
        if name == "ais":
            ratio = 1 + float((found.weight_N - 1)[0] / (ratio - 1)[0]) * (ratio - 1)
        torch.testing.assert_close(found.weight_N.double(), ratio, rtol=1e-5, atol=1e-7)
    if update.epochs == 2:
        assert not torch.equal(seen[1][0][1].values_N.detach(), old), "the current policy has moved"


@pytest.mark.parametrize("which", ["sequence", "geometric", "veto"])
def test_a_rejected_sample_moves_no_sibling_and_a_group_of_one_goes_case_41(
    make_spec: MakeSpec, open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch, which: Any
) -> None:
    """Sample 1 of group 0 and three samples of group 1 have a broken probability: the advantages of group 0 are those of its
    three others, group 1 is gone, and the share that was rejected is said."""
    options: dict[str, Any] = {"rollout_rs": which, "rollout_rs_threshold": 3.0}
    if which == "veto":
        options = {"rollout_token_veto_threshold": 0.2}
    spec = make_spec(
        "fp8-rollout",
        correction=CorrectionSpec(**options),
        algorithm=AlgorithmSpec("grpo", advantage="group_mean"),
    )
    with open_trainer(spec) as trainer:
        trainer.begin()
        broken = {(0, 1), (1, 0), (1, 2), (1, 3)}
        # A veto is for a token that the trainer finds impossible; a sum, for one that the rollout did.
        spoil(trainer, monkeypatch, broken, 20.0 if which == "veto" else -20.0)
        samples, metrics = trainer.sample()
        kept = {(s.completion.prompt_index, s.completion.sample_index) for s in samples}
        rejected = {(g, i) for g in range(3) for i in range(4)} - kept - {(1, 1)}
        assert rejected == broken, "and nobody else, by these thresholds"
        assert metrics["rollout_corr/rejected_fraction"] == pytest.approx(4 / 12)
        assert metrics["data/kept_groups"] == 2
        for group in (0, 2):
            rewards = [s.reward for s in samples if s.group == group]
            mean = sum(rewards) / len(rewards)
            found = [s.advantage for s in samples if s.group == group]
            assert found == pytest.approx([r - mean for r in rewards], abs=1e-6)
        update = trainer.updater.update(samples, trainer.history)
    assert update["mismatch/tokens"] > sum(s.completion.trained_tokens for s in samples), "all were compared"


def gradient_of(
    trainer: Any, samples: list[Any], budget: int = 4096, share: bool = True
) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient and metrics of one mini-batch that has been screened, and of its loss alone."""
    updater = trainer.updater
    updater.packs.spec = replace(updater.packs.spec, max_tokens_per_microbatch=budget, share_prompts=share)
    trainer.parts.decoder.zero_grad(set_to_none=True)
    updater.corrector.records.clear()
    updater.screen(samples, None)
    updater.corrector.weigh(samples)
    parts = updater.gradients(samples, None, None, {})
    grads = [p.grad.flatten().double() for p in trainer.parts.decoder.parameters() if p.grad is not None]
    return torch.cat(grads), {k: v.result() for k, v in merge_metrics(parts).items()}


def precise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer in FP32 throughout under an FP8 engine, so that only what is tested can make a difference."""
    flows = FlowPair(replace(bf16_flow(), activation=torch.float32), fp8_flow())
    monkeypatch.setattr(setup, "make_flows", lambda spec, model: flows)


@pytest.mark.parametrize("denominator", ["token", "sequence", "constant"])
def test_rejected_samples_are_in_no_denominator_case_42(
    make_spec: MakeSpec, open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch, denominator: Any
) -> None:
    """The coefficients of a corrected batch are those of a batch that never had the rejected samples."""
    precise(monkeypatch)
    algorithm = AlgorithmSpec("grpo", denominator=denominator)
    spec = make_spec("fp8-rollout", correction=correction_of("geometric_token_tis"), algorithm=algorithm)
    with open_trainer(spec) as trainer:
        trainer.begin()
        spoil(trainer, monkeypatch, {(0, 0), (2, 1)}, -20.0)
        samples, metrics = trainer.sample()
        assert 0 < metrics["rollout_corr/rejected_fraction"] < 1 and 2 <= len(samples) <= 10
        corrected, _ = gradient_of(trainer, samples)
        trainer.updater.correction = TOKEN_TIS
        alone, _ = gradient_of(trainer, samples)
        assert torch.equal(corrected, alone)
        assert trainer.updater.corrector.lengths(samples).tolist() == [
            s.completion.trained_tokens for s in samples
        ]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("denominator", ["token", "sequence", "constant"])
def test_masked_tokens_and_the_denominator_case_42(
    make_spec: MakeSpec, open_trainer: OpenTrainer, denominator: Any, counted: bool
) -> None:
    """Both policies, against coefficients written out: a masked token leaves the denominator, or stays in it with weight 0."""
    bounds = {"rollout_rs_threshold": 1.005, "rollout_rs_threshold_lower": 0.995}
    spec = make_spec(
        "fp8-rollout",
        correction=CorrectionSpec("icepop", count_masked_tokens=counted, **bounds),
        algorithm=AlgorithmSpec("grpo", denominator=denominator),
    )
    with open_trainer(spec) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        d = log_ratios(trainer, samples)
        inside = [(x >= math.log(0.995)) & (x <= math.log(1.005)) for x in d]
        assert 0 < sum(int(k.sum()) for k in inside) < sum(map(len, inside)), "some are masked, some are not"
        assert all(bool(k.any()) for k in inside) or counted, "who has no token left was rejected"
        seen = []
        import lockstep.trainer.update as module

        loss = module.policy_loss
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "policy_loss", lambda i, r: seen.append(i) or loss(i, r))
            trainer.updater.update(samples, trainer.history)
    n = [len(k) if counted else int(k.sum()) for k in inside]
    expected = {
        "token": [1 / sum(n)] * len(n),
        "sequence": [1 / (len(n) * m) for m in n],
        "constant": [1 / (len(n) * 6)] * len(n),
    }[denominator]
    inputs = seen[0]
    coef = torch.tensor(expected)[inputs.sample_N]
    mask = torch.cat(inside)
    torch.testing.assert_close(inputs.coef_N, coef if counted else torch.where(mask, coef, 0.0))
    ratio = torch.cat(d).exp().float()
    torch.testing.assert_close(inputs.weight_N, torch.where(mask, ratio, 0.0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        ("grpo", "icepop"),
        ("gspo", "icepop"),
        ("dapo", "sequence_tis"),
        ("dr_grpo", "geometric_token_tis"),
        ("gspo", "ais"),
    ],
)
def test_cutting_a_corrected_batch_changes_nothing_case_42(
    make_spec: MakeSpec, open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch, algorithm: Any, name: Any
) -> None:
    precise(monkeypatch)
    more = {"rollout_rs_threshold": 1.02, "rollout_rs_threshold_lower": 0.98} if name == "icepop" else {}
    spec = make_spec(
        "fp8-rollout",
        correction=correction_of(name, **more),
        algorithm=AlgorithmSpec(algorithm, dynamic_sampling=False),
    )
    with open_trainer(spec) as trainer:
        trainer.begin()
        samples, _ = trainer.sample()
        whole, metrics = gradient_of(trainer, samples)
        assert float(whole.norm()) > 1e-4
        for budget, share in ((40, True), (13, False)):
            grad, other = gradient_of(trainer, samples, budget, share)
            assert float((grad - whole).norm() / whole.norm()) < 1e-5, (budget, share)
            assert all(math.isclose(other[k], metrics[k], rel_tol=1e-5, abs_tol=1e-7) for k in metrics)


@pytest.mark.parametrize("threshold", [2.0, 1.0 + 1e-9])
def test_everything_rejected_moves_nothing(make_spec: MakeSpec, train: Train, threshold: float) -> None:
    correction = CorrectionSpec(rollout_rs="geometric", rollout_rs_threshold=threshold)
    _, metrics = train(make_spec("fp8-rollout", correction=correction, update=UpdateSpec(2)))
    moved = threshold == 2.0
    for m in metrics:
        assert m["rollout_corr/rejected_fraction"] == (0.0 if moved else 1.0)
        assert m["optim/applied_steps"] == (1 if moved else 0) and m["mismatch/tokens"] > 20
        assert (m["sync/changed_codes_pct"] > 0) is moved


def test_the_run_says_once_that_it_is_in_the_length_trap_case_38(
    make_spec: MakeSpec, open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {(g, i) for g in range(9) for i in range(4)}
    for name, told in (("sequence_tis", True), ("token_tis", False)):
        spec = make_spec(
            "fp8-rollout", name=name, correction=CorrectionSpec(name), mismatch=MismatchSpec("warn", 99.0)
        )  # type: ignore[arg-type]
        with open_trainer(spec) as trainer:
            trainer.begin()
            spoil(trainer, monkeypatch, places, -3.0)
            warnings = []
            for _ in range(2):
                metrics = trainer.step()
                warnings.append(trainer.updater.warning)
                assert metrics["rollout_corr/length_trap"] > 2
        assert warnings[1] == "" and ("length trap" in warnings[0]) is told
        file = Path(spec.run_dir) / "notes.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        notes = [json.loads(line)["text"] for line in lines]
        assert sum("length trap" in n and "rollout_is to token" in n for n in notes) == int(told)


def test_tightening_a_run(make_spec: MakeSpec, open_trainer: OpenTrainer) -> None:
    """From nothing to the strictest, a step each: the run goes on under every one, and says what it is."""
    with open_trainer(make_spec("fp8-rollout", controller=ControllerSpec("off"))) as trainer:
        trainer.begin()
        updater, found = trainer.updater, []
        assert updater.correction == NONE and updater.action == "warn"
        while (text := updater.tighten_correction()) is not None:
            found.append((updater.correction, text))
            metrics = trainer.step()
            assert all(math.isfinite(v) for v in metrics.values())
        assert [c for c, _ in found[:3]] == [TOKEN_TIS, ICEPOP, WIDEST] and len(found) == 9
        assert updater.tighten_correction() is None and updater.correction == found[-1][0]


def test_a_corrected_run_warns_where_an_uncorrected_one_stops(
    make_spec: MakeSpec, open_trainer: OpenTrainer
) -> None:
    for correction, asked, action in (
        (CorrectionSpec(), "auto", "stop"),
        (CorrectionSpec("token_tis"), "auto", "warn"),
        (CorrectionSpec("token_tis"), "stop", "stop"),
    ):
        spec = make_spec("fp8", correction=correction, mismatch=MismatchSpec(asked))  # type: ignore[arg-type]
        with open_trainer(spec) as trainer:
            assert trainer.updater.action == action


@pytest.mark.parametrize("name", ["token_tis", "icepop"])
def test_a_broken_forward_stops_the_run(make_spec: MakeSpec, open_trainer: OpenTrainer, name: Any) -> None:
    """A log-probability of the trainer that is not finite can be neither weighed nor judged: it is not masked away."""
    with open_trainer(make_spec("fp8-rollout", correction=CorrectionSpec(name))) as trainer:
        trainer.begin()
        head = trainer.parts.decoder.head
        scores = head.log_probs
        head.log_probs = lambda *a: tuple(x + float("nan") for x in scores(*a))
        with pytest.raises(ContractError, match="log-probabilities of sample 0 of prompt 0 are not finite"):
            trainer.step()


def test_dynamic_sampling_after_rejection(
    make_spec: MakeSpec, open_trainer: OpenTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group whose kept samples all got one reward teaches nothing, even if a rejected one differed."""
    spec = make_spec(
        "fp8-rollout",
        reward="first_group",
        algorithm=AlgorithmSpec("dapo"),
        correction=CorrectionSpec(rollout_rs="sequence", rollout_rs_threshold=3.0),
    )
    with open_trainer(spec) as trainer:
        trainer.begin()
        samples, metrics = trainer.sample()
        assert metrics["data/sampling_rounds"] == 3 and metrics["data/kept_groups"] == 3
        rounds = trainer.updater.mismatch.tokens
        assert rounds > sum(s.completion.trained_tokens for s in samples), (
            "every round was scored and compared"
        )
        assert trainer.updater.update(samples, trainer.history)["mismatch/tokens"] == rounds


@pytest.mark.parametrize(
    ("flow", "correction", "algorithm", "update", "text"),
    [
        ("fp8-rollout", "bypass", AlgorithmSpec("rloo"), UpdateSpec(1), "algorithm.name rloo has none"),
        (
            "fp8",
            "none",
            AlgorithmSpec(clip_calibration_every=5),
            UpdateSpec(1),
            "clip_calibration_every has no effect",
        ),
        ("bf16", "none", AlgorithmSpec(clip_calibration_every=5), UpdateSpec(1, epochs=2), "no effect"),
        (
            "fp8-rollout",
            "token_tis",
            AlgorithmSpec(clip_calibration_every=5),
            UpdateSpec(1, epochs=2),
            "no effect",
        ),
    ],
)
def test_what_correction_and_loss_ask_of_each_other(
    make_spec: MakeSpec, flow: str, correction: Any, algorithm: AlgorithmSpec, update: UpdateSpec, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        make_spec(flow, correction=CorrectionSpec(correction), algorithm=algorithm, update=update)
