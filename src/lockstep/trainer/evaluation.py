"""Held-out evaluation: greedy and sampled completions of fixed prompts, scored by the run's own rewards."""

from __future__ import annotations

from lockstep.errors import ConfigError
from lockstep.rewards.evaluate import Rewards
from lockstep.rollout.types import Completion, Request
from lockstep.trainer.sample import Sample
from lockstep.trainer.scoring import score
from lockstep.trainer.setup import Parts, check_lengths, load_prompts, sampling_params

EVAL_SEED = 0x5EED
"""Added to the run's seed, so that evaluation never reuses the noise of training."""


class Evaluator:
    """Evaluates the engine's current weights on the first `eval.prompts` held-out prompts."""

    def __init__(self, parts: Parts, rewards: Rewards) -> None:
        spec = parts.spec.eval
        if spec.data is None:
            raise ConfigError("there is no held-out data", where="eval.data")
        self.parts, self.rewards, self.spec = parts, rewards, spec
        prompts, _ = load_prompts(spec.data, parts.tokenizer, parts.spec.seed)
        self.prompts = prompts[: spec.prompts]
        new_tokens = spec.max_new_tokens or parts.spec.rollout.max_new_tokens
        check_lengths(parts.model_spec, max(len(p.ids) for p in self.prompts), new_tokens)

    def run(self, step: int, version: int, scale_version: int | None = None) -> dict[str, float]:
        """Metrics under `eval/` of these weights and KV scales (None: those in use). A completion solves its prompt when its
        reward is at least 1."""
        metrics: dict[str, float] = {}
        greedy = self._score(self._generate(step, (version, scale_version), greedy=True, samples=1))
        metrics["eval/greedy_pass@1"] = _share(greedy)
        metrics["eval/reward"] = _mean(greedy)
        metrics["eval/mean_length"] = sum(len(s.completion.token_ids) for s in greedy) / len(greedy)
        metrics["eval/clipped_ratio"] = sum(s.completion.finish_reason == "length" for s in greedy) / len(
            greedy
        )
        count = self.spec.samples
        if count:
            sampled = self._score(self._generate(step, (version, scale_version), greedy=False, samples=count))
            metrics["eval/sampled_pass@1"] = _share(sampled)
            metrics["eval/mean@k"] = metrics[f"eval/mean@{count}"] = _mean(sampled)
            solved = {s.group for s in sampled if (s.reward or 0.0) >= 1.0}
            metrics[f"eval/pass@{count}"] = len(solved) / len(self.prompts)
        return metrics

    def _generate(
        self, step: int, versions: tuple[int, int | None], *, greedy: bool, samples: int
    ) -> list[Completion]:
        params = sampling_params(self.parts, greedy=greedy, evaluation=True)
        requests = [Request(p.ids, i, samples, params) for i, p in enumerate(self.prompts)]
        seed = self.parts.spec.seed + EVAL_SEED
        weights, scales = versions
        return self.parts.generate(
            requests, seed=seed, step=step, expected_version=weights, expected_scale_version=scales
        )

    def _score(self, completions: list[Completion]) -> list[Sample]:
        samples = [
            Sample(c, self.prompts[c.prompt_index].example, c.prompt_index, self.parts.text)
            for c in completions
        ]
        score(self.rewards, samples, self.parts.ranks)
        return samples


def _mean(samples: list[Sample]) -> float:
    rewards = [s.reward for s in samples if s.reward is not None]
    return sum(rewards) / len(rewards) if rewards else float("nan")


def _share(samples: list[Sample]) -> float:
    return sum((s.reward or 0.0) >= 1.0 for s in samples) / len(samples)
