"""What every metric means, in one line and with its unit. `docs/metrics.md` is printed from here.

Names are those of TRL and verl where these have the metric, so that dashboards carry over. A part in angle brackets
stands for any text without a slash: `rewards/<function>/mean` is `rewards/exact_match/mean` for one reward function.
To write the page: `python -m lockstep.observe.glossary > docs/metrics.md`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Meaning:
    """One line of the glossary."""

    text: str
    unit: str = ""


def _m(text: str, unit: str = "") -> Meaning:
    return Meaning(text, unit)


_REWARD = {
    "reward": _m("Mean reward of the step's samples, all reward functions weighted and added.", "reward"),
    "reward_std": _m(
        "Standard deviation of the reward within a group of samples, averaged over groups.", "reward"
    ),
    "frac_reward_zero_std": _m("Groups whose samples all got the same reward: they teach nothing.", "share"),
    "rewards/<function>/mean": _m("Mean of what this reward function gave, before its weight.", "reward"),
    "rewards/<function>/std": _m("Standard deviation of what this reward function gave.", "reward"),
    "rewards/<function>/none": _m("Samples this reward function doesn't apply to.", "samples"),
    "rewards/unscored": _m("Samples that no reward function scored: dropped.", "samples"),
    "rewards/timeouts": _m("Samples for which a reward function ran out of time.", "samples"),
    "rewards/crashes": _m("Samples for which a reward function took its worker process down.", "samples"),
    "rewards/errors": _m("Samples for which a reward function raised.", "samples"),
}
_COMPLETIONS = {
    "completions/mean_length": _m("Mean length of the completions.", "tokens"),
    "completions/min_length": _m("Shortest completion.", "tokens"),
    "completions/max_length": _m("Longest completion.", "tokens"),
    "completions/mean_terminated_length": _m(
        "Mean length of the completions that ended by themselves.", "tokens"
    ),
    "completions/clipped_ratio": _m("Completions cut off at the length limit.", "share"),
    "completions/trained_ratio": _m("Completion tokens that the loss mask leaves to train.", "share"),
    "rollout/kept_mass_mean": _m(
        "Mean mass that top-p, top-k and min-p kept of a token's distribution.", "share"
    ),
    "rollout/kept_mass_min": _m(
        "Least mass that top-p, top-k and min-p kept of a token's distribution.", "share"
    ),
    "num_tokens": _m("Prompt and completion tokens of all kept samples since the run began.", "tokens"),
}
_EVAL = {
    "eval/greedy_pass@1": _m("Held-out prompts solved by the greedy completion.", "share"),
    "eval/sampled_pass@1": _m("Held-out samples that solve their prompt, sampled as in training.", "share"),
    "eval/mean@k": _m("Mean reward of k samples a held-out prompt.", "reward"),
    "eval/mean@<k>": _m("Mean reward of this many samples a held-out prompt.", "reward"),
    "eval/pass@<k>": _m("Held-out prompts that at least one of k samples solves.", "share"),
    "eval/reward": _m("Mean reward of the greedy completions of held-out prompts.", "reward"),
    "eval/mean_length": _m("Mean length of the evaluated completions.", "tokens"),
    "eval/clipped_ratio": _m("Evaluated completions cut off at the length limit.", "share"),
}
_MOE = {
    "moe/load_max_over_mean": _m(
        "Rows of a layer's busiest expert over the mean of its experts in the training forward, averaged over layers.",
        "ratio",
    ),
    "moe/idle_experts": _m("Experts that no row of the training forward went to, over all layers.", "share"),
    "moe/overruled_routes": _m(
        "Choices of experts (a row in a layer) replayed from the rollout that the trainer's router would not have made.",
        "share",
    ),
}
_MISMATCH = {
    "mismatch/max_abs_dlogp": _m(
        "Largest difference between trainer's and rollout's log-probability of a token; 0 means equal bit for bit.",
        "nats",
    ),
    "mismatch/mean_abs_dlogp": _m(
        "Mean absolute difference of trainer's and rollout's log-probabilities over tokens.", "nats"
    ),
    "mismatch/p99_abs_dlogp": _m(
        "The difference that 99 % of the tokens don't exceed: the value of a token, no estimate.", "nats"
    ),
    "mismatch/kl_k1": _m(
        "KL(rollout, trainer) estimated by the mean of rollout's minus trainer's; can be negative.", "nats"
    ),
    "mismatch/kl_k3": _m(
        "KL(rollout, trainer) by Schulman's k3, mean of r - 1 - log r: never negative, less noise.", "nats"
    ),
    "mismatch/chi2_token": _m(
        "Chi-square divergence over tokens: mean squared importance weight, trainer over rollout, minus 1.",
        "ratio",
    ),
    "mismatch/chi2_seq": _m(
        "The same over sequences, whose weight is the product of their tokens' weights.", "ratio"
    ),
    "mismatch/ess": _m(
        "Effective sample size: tokens that weighing by trainer over rollout would leave; 1 when all weights are equal.",
        "share",
    ),
    "mismatch/trainer_ppl": _m("Perplexity of the samples under the trainer, mean over sequences.", "ratio"),
    "mismatch/rollout_ppl": _m("Perplexity of the samples under the engine, mean over sequences.", "ratio"),
    "mismatch/ppl_ratio": _m("Trainer's over rollout's perplexity, mean over sequences.", "ratio"),
    "mismatch/log_ppl_diff": _m("Trainer's minus rollout's log-perplexity, mean over sequences.", "nats"),
    "mismatch/position_<range>": _m(
        "Mean absolute difference at these positions of a completion, counted from 0.", "nats"
    ),
    "mismatch/exact_tokens": _m("Tokens whose two log-probabilities are the same bits.", "share"),
    "mismatch/extreme_tokens": _m(
        "Tokens whose two probabilities differ by more than a factor of two.", "share"
    ),
    "mismatch/tokens": _m("Tokens compared.", "tokens"),
    "token_mult_prob_error": _m(
        "Mean of exp(|difference of log-probabilities|) over tokens: 1 is perfect, up to 1.05 is called healthy (NeMo RL).",
        "ratio",
    ),
    "gen_kl_error": _m("NeMo RL's name for mismatch/kl_k3.", "nats"),
    "policy_kl_error": _m("KL(trainer, rollout) by k3 over the rollout's tokens (NeMo RL's name).", "nats"),
    "js_divergence_error": _m("Jensen-Shannon divergence of trainer and rollout (NeMo RL's name).", "nats"),
    "sampling_importance_ratio": _m(
        "Mean of trainer's over rollout's probability (NeMo RL's name).", "ratio"
    ),
    "sampling/sampling_logp_difference/mean": _m("TRL's name for mismatch/mean_abs_dlogp.", "nats"),
    "sampling/sampling_logp_difference/max": _m("TRL's name for mismatch/max_abs_dlogp.", "nats"),
}
_CORRECTION = {
    "rollout_corr/kl": _m("KL(rollout, trainer), direct estimate (verl's name for mismatch/kl_k1).", "nats"),
    "rollout_corr/k3_kl": _m("KL(rollout, trainer), k3 estimate (verl's name for mismatch/kl_k3).", "nats"),
    "rollout_corr/training_ppl": _m(
        "Perplexity of the samples under the trainer, mean over sequences.", "ratio"
    ),
    "rollout_corr/rollout_ppl": _m(
        "Perplexity of the samples under the rollout engine, mean over sequences.", "ratio"
    ),
    "rollout_corr/training_log_ppl": _m("Log-perplexity of the samples under the trainer.", "nats"),
    "rollout_corr/rollout_log_ppl": _m("Log-perplexity of the samples under the rollout engine.", "nats"),
    "rollout_corr/log_ppl_diff": _m("Rollout's minus trainer's log-perplexity, mean over sequences.", "nats"),
    "rollout_corr/log_ppl_abs_diff": _m(
        "Absolute difference of rollout's and trainer's log-perplexity, mean over sequences.", "nats"
    ),
    "rollout_corr/log_ppl_diff_max": _m(
        "Largest difference of rollout's and trainer's log-perplexity.", "nats"
    ),
    "rollout_corr/log_ppl_diff_min": _m(
        "Smallest difference of rollout's and trainer's log-perplexity.", "nats"
    ),
    "rollout_corr/ppl_ratio": _m("Trainer's over rollout's perplexity, mean over sequences.", "ratio"),
    "rollout_corr/chi2_token": _m("Chi-square divergence over tokens: mean squared ratio minus 1.", "ratio"),
    "rollout_corr/chi2_seq": _m(
        "Chi-square divergence over sequences: grows exponentially with length.", "ratio"
    ),
    "rollout_corr/rollout_is_mean": _m(
        "Mean importance weight, trainer over rollout, as applied: over tokens, or over sequences where they are weighed.",
        "ratio",
    ),
    "rollout_corr/rollout_is_std": _m("Standard deviation of the importance weights.", "ratio"),
    "rollout_corr/rollout_is_min": _m("Smallest importance weight, before truncation.", "ratio"),
    "rollout_corr/rollout_is_max": _m("Largest importance weight, before truncation.", "ratio"),
    "rollout_corr/rollout_is_p<percentile>": _m("This percentile of the importance weights.", "ratio"),
    "rollout_corr/rollout_is_eff_sample_size": _m(
        "Effective sample size over samples; 1 when all weights are equal.", "share"
    ),
    "rollout_corr/rollout_is_ratio_fraction_high": _m("Weights above the upper threshold.", "share"),
    "rollout_corr/rollout_is_ratio_fraction_low": _m("Weights below the lower threshold.", "share"),
    "rollout_corr/rollout_is_seq_mean": _m("Mean importance weight of a sequence.", "ratio"),
    "rollout_corr/rollout_is_seq_std": _m("Standard deviation of the sequence weights.", "ratio"),
    "rollout_corr/rollout_is_seq_min": _m("Smallest sequence weight.", "ratio"),
    "rollout_corr/rollout_is_seq_max": _m("Largest sequence weight.", "ratio"),
    "rollout_corr/rollout_is_seq_max_deviation": _m("Largest distance of a sequence weight from 1.", "ratio"),
    "rollout_corr/rollout_is_seq_fraction_high": _m("Sequence weights above the upper threshold.", "share"),
    "rollout_corr/rollout_is_seq_fraction_low": _m("Sequence weights below the lower threshold.", "share"),
    "rollout_corr/rollout_is_batch_norm_factor": _m(
        "Mean weight that all weights were divided by (rollout_is_batch_normalize).", "ratio"
    ),
    "rollout_corr/rollout_is_strength": _m(
        "Strength of the weights under ess_target: 1 leaves them as they are, towards 0 all become 1.",
        "share",
    ),
    "rollout_corr/rollout_is_veto_fraction": _m("Sequences thrown out for one catastrophic token.", "share"),
    "rollout_corr/rollout_is_catastrophic_token_fraction": _m("Tokens below the veto threshold.", "share"),
    "rollout_corr/rejected_fraction": _m(
        "Sequences rejected as a whole, of those that were sampled: by veto, by rejection, or with no token left.",
        "share",
    ),
    "rollout_corr/length_trap": _m(
        "Factor by which ratios of whole sequences stray from 1, by their length and the mismatch of tokens.",
        "ratio",
    ),
    "rollout_corr/rollout_rs_masked_fraction": _m("Tokens masked by rejection.", "share"),
    "rollout_corr/rollout_rs_seq_masked_fraction": _m(
        "Sequences of which rejection masked something.", "share"
    ),
}
_POLICY = {
    "policy/entropy": _m("Mean entropy of the next-token distribution over completion tokens.", "nats"),
    "entropy": _m("TRL's name for policy/entropy.", "nats"),
    "policy/kl_to_reference": _m("KL to the reference policy (k3), mean over tokens.", "nats"),
    "policy/approx_kl": _m("KL(old, current policy) within the update (k3), mean over tokens.", "nats"),
    "policy/ratio_mean": _m("Mean of current over old probability, as the loss uses it.", "ratio"),
    "policy/ratio_max": _m("Largest of current over old probability.", "ratio"),
    "policy/clip_bound_low": _m("Lower bound of the ratio, calibrated.", "ratio"),
    "policy/clip_bound_high": _m("Upper bound of the ratio, calibrated.", "ratio"),
    "policy/clip_fraction_low": _m("Tokens clipped at the lower bound.", "share"),
    "policy/clip_fraction_high": _m("Tokens clipped at the upper bound.", "share"),
    "policy/clip_fraction_positive_advantage": _m(
        "Of the tokens with a positive advantage, those clipped at either bound; 0 when there are none.",
        "share",
    ),
    "policy/clip_fraction_negative_advantage": _m(
        "Of the tokens with a negative advantage, those clipped at either bound; 0 when there are none.",
        "share",
    ),
    "clip_ratio/low_mean": _m("TRL's name for policy/clip_fraction_low.", "share"),
    "clip_ratio/high_mean": _m("TRL's name for policy/clip_fraction_high.", "share"),
    "clip_ratio/region_mean": _m("Tokens clipped at either bound (TRL's name).", "share"),
}
_CONTROLLER = {
    "controller/action": _m(
        "What the controller did: 0 nothing, 1 tighten, 2 recalibrate, 3 keep layers, 4 republish, 5 stop.",
        "code",
    ),
    "controller/out_of_band": _m("Steps in a row out of band since the last action.", "count"),
    "controller/band": _m("Largest mismatch/mean_abs_dlogp that is in band.", "nats"),
}
_SYNC = {
    "sync/version": _m("Version of the weights published at the end of the step.", "count"),
    "sync/changed_codes_pct": _m(
        "Elements of the working copies (FP8 codes, BF16 values) that the last optimizer step changed.", "%"
    ),
    "sync/max_rel_err": _m("Largest relative error of a published tensor against its master.", "ratio"),
    "sync/tensors": _m("Tensors published.", "count"),
    "sync/bytes": _m("Bytes of the engine's working copies, shared with it or sent.", "bytes"),
}
_KV = {
    "kv/saturation_pct": _m(
        "Keys and values of the step's training forwards beyond the range of the FP8 scales their samples were drawn with.",
        "%",
    ),
    "kv/scale_drift": _m(
        "Largest relative difference between the maximum that a KV scale was made from and the one it should cover now.",
        "ratio",
    ),
    "kv/scale_version": _m("Version of the KV scales published at the end of the step.", "count"),
}
_OPTIM = {
    "optim/lr": _m("Learning rate.", ""),
    "optim/grad_norm": _m("Global gradient norm before clipping.", ""),
    "optim/applied_steps": _m("Optimizer steps taken in this step.", "count"),
    "optim/skipped_steps": _m("Optimizer steps skipped so far because the gradient wasn't finite.", "count"),
}
_DATA = {
    "data/epoch": _m("Passes over the prompts so far.", "count"),
    "data/dropped_<reason>": _m(
        "Samples dropped because they broke the sample contract in this way; docs/samples.md lists the reasons.",
        "samples",
    ),
    "data/segments": _m("Samples that the step's conversations were cut into.", "samples"),
    "data/rewritten_history": _m(
        "Turns at which the chat template rendered the past otherwise, so that a new segment began.", "count"
    ),
    "data/kept_groups": _m("Groups of samples that this step learned from.", "count"),
    "data/sampling_rounds": _m("Rounds of rollout until enough groups could be learned from.", "count"),
    "data/packing_fill": _m("Tokens in the packed micro-batches over their budget.", "share"),
    "data/microbatches": _m("Micro-batches of this step.", "count"),
}
_TIME = {
    "time/<phase>_s": _m("Seconds in this phase; phases don't overlap.", "s"),
    "time/step_s": _m("Seconds of the whole step.", "s"),
    "time/uncaptured_microbatches": _m(
        "Micro-batches whose kernels the host launched one by one: the first of a kind, or of more than 16,384 rows.",
        "count",
    ),
    "memory/rss_gb": _m("Largest resident size of the process so far.", "GiB"),
    "memory/cuda_gb": _m("Most GPU memory held by tensors in this step.", "GiB"),
}

SECTIONS: dict[str, dict[str, Meaning]] = {
    "Reward": _REWARD,
    "Completions": _COMPLETIONS,
    "Evaluation": _EVAL,
    "Mixture of experts": _MOE,
    "Mismatch between rollout and trainer": _MISMATCH,
    "Correction of the mismatch": _CORRECTION,
    "Controller of the mismatch": _CONTROLLER,
    "Policy update": _POLICY,
    "Publication of weights": _SYNC,
    "FP8 keys and values": _KV,
    "Optimizer": _OPTIM,
    "Data": _DATA,
    "Time and memory": _TIME,
}
"""Heading -> metrics under it."""

GLOSSARY: dict[str, Meaning] = {name: meaning for part in SECTIONS.values() for name, meaning in part.items()}
"""Metric name, or pattern with angle brackets -> meaning."""


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Meaning], ...]:
    """The names with angle brackets, as regular expressions."""
    found = []
    for name, meaning in GLOSSARY.items():
        if "<" in name:
            parts = re.split(r"<[^>]*>", name)
            found.append((re.compile("[^/]+".join(re.escape(part) for part in parts)), meaning))
    return tuple(found)


def describe(name: str) -> Meaning | None:
    """The meaning of a metric; an exact name goes before a pattern. None when the glossary doesn't know it."""
    if name in GLOSSARY:
        return GLOSSARY[name]
    return next((meaning for pattern, meaning in _patterns() if pattern.fullmatch(name)), None)


def markdown() -> str:
    """The page `docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Every line of `metrics.jsonl` is one step: `step`, `time` (seconds since 1970) and the metrics below. The same names",
        "appear in TensorBoard, wandb, trackio and the report. A non-finite value is written as the string `NaN`, `Infinity`",
        "or `-Infinity`, never left out. `time/*` and `memory/*` depend on the machine; all others repeat bit for bit when a",
        "run is repeated or resumed.",
        "",
        "Printed by `python -m lockstep.observe.glossary > docs/metrics.md`.",
    ]
    for heading, metrics in SECTIONS.items():
        lines += ["", f"## {heading}", "", "| metric | unit | meaning |", "|---|---|---|"]
        for name, meaning in metrics.items():
            text = meaning.text.replace("|", "\\|")
            lines.append(f"| `{name}` | {meaning.unit} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
