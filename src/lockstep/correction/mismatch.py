"""The disagreement of rollout and trainer about the same tokens, measured.

Per token d = trainer's log p - rollout's log p, and r = exp(d) is the importance weight that would make the rollout's token
the trainer's. With p the trainer and q the rollout, tokens drawn from q:

    k1    mean(-d)                  KL(q || p), unbiased, noisy, can be negative (Schulman, "Approximating KL divergence")
    k3    mean(exp(d) - 1 - d)      the same, never negative, far less noise
    chi2  mean(r^2) - 1             the variance of the weights, over tokens, and over sequences with r the product
    ess   (sum r)^2 / (n sum r^2)   share of the tokens that weighing would leave; 1 when all weights are equal
    perplexity                      exp(-mean log p) by sequence, on both sides

Every number is for the tokens of one step and *additive*: `see` takes one micro-batch after the other, `merge` joins what
several micro-batches or ranks saw, and the result is that of one batch (sums to the last bits of float64, counts, extremes
and the percentile exactly). For that the |d| themselves are kept, eight bytes a token: the 99th percentile is the value of a
token (nearest rank), not an estimate. Arithmetic is float64 on the CPU, hence the same for every device and micro-batch order.

As in verl, a log ratio counts with at most 20 (a weight of half a billion) where weights are squared or mixed, so that one
broken token can't turn the sums into infinities; nothing else is bounded, and NaN reaches every number it belongs to.

Shapes: N tokens of a micro-batch, S sequences in it. Next: `controller.py`, which acts on these numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

EXTREME = math.log(2.0)
"""A token is extreme when the two probabilities differ by more than this in log: by more than a factor of two."""
MAX_LOG_RATIO = 20.0
"""Bound of log ratios where weights are squared or mixed."""
POSITION_EDGES = (4, 16, 64, 256, 1024, 4096, 16384)
"""First positions of the groups after the first: a fixed scale, so that steps with completions of other lengths compare."""
POSITION_NAMES = (
    "0-3",
    "4-15",
    "16-63",
    "64-255",
    "256-1023",
    "1024-4095",
    "4096-16383",
    "16384-up",
)
"""Positions within a completion that share a metric; as many as a chart has colours."""
PERCENTILE = 0.99

ALIASES = {
    "rollout_corr/kl": "mismatch/kl_k1",
    "rollout_corr/k3_kl": "mismatch/kl_k3",
    "rollout_corr/chi2_token": "mismatch/chi2_token",
    "rollout_corr/chi2_seq": "mismatch/chi2_seq",
    "rollout_corr/training_ppl": "mismatch/trainer_ppl",
    "rollout_corr/rollout_ppl": "mismatch/rollout_ppl",
    "rollout_corr/ppl_ratio": "mismatch/ppl_ratio",
    "rollout_corr/log_ppl_diff": "mismatch/log_ppl_diff",
    "sampling/sampling_logp_difference/mean": "mismatch/mean_abs_dlogp",
    "sampling/sampling_logp_difference/max": "mismatch/max_abs_dlogp",
    "gen_kl_error": "mismatch/kl_k3",
}
"""Names that users of verl, TRL and NeMo RL know, and ours for the same number."""


@dataclass
class Mismatch:
    """What was seen of one step. `extreme` is the threshold of `mismatch/extreme_tokens`, in nats."""

    extreme: float = EXTREME
    exact: int = 0
    values: list[Tensor] = field(default_factory=list)
    """|d| of every token, float64."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums over tokens, and over sequences where the name begins with `seq_`."""
    spread: list[Tensor] = field(default_factory=list)
    """Log-perplexity of the trainer less that of the rollout, of every sequence, float64."""
    by_position: Tensor = field(
        default_factory=lambda: torch.zeros(2, len(POSITION_NAMES), dtype=torch.float64)
    )
    """Sum of |d| and number of tokens in each group of positions."""

    @property
    def tokens(self) -> int:
        """Tokens compared."""
        return sum(v.numel() for v in self.values)

    @property
    def max_abs(self) -> float:
        """Largest |d|; 0 before the first token, NaN when there was one."""
        return float(torch.cat(self.values).max()) if self.tokens else 0.0

    @torch.no_grad()
    def see(self, trainer_N: Tensor, rollout_N: Tensor, sample_N: Tensor | None = None) -> None:
        """Takes FP32 log-probabilities [N] of the same tokens into account. `sample_N` (int64 [N]) tells whose token each
        is, tokens of a sequence in their order; every sequence must be here whole. None: all are of one."""
        if trainer_N.numel() == 0:
            return
        p_N, q_N = trainer_N.detach().cpu(), rollout_N.detach().cpu()
        self.exact += int((p_N == q_N).sum())
        p_N, q_N = p_N.double(), q_N.double()
        sample_N = torch.zeros(len(p_N), dtype=torch.int64) if sample_N is None else sample_N.cpu()
        d_N = p_N - q_N
        self.values.append(d_N.abs())
        self._add(_token_sums(d_N, self.extreme))
        self._see_sequences(p_N, q_N, sample_N)
        group_N = torch.bucketize(_positions(sample_N), torch.tensor(POSITION_EDGES), right=True)
        self.by_position[0] += torch.bincount(group_N, weights=d_N.abs(), minlength=len(POSITION_NAMES))
        self.by_position[1] += torch.bincount(group_N, minlength=len(POSITION_NAMES))

    def _see_sequences(self, p_N: Tensor, q_N: Tensor, sample_N: Tensor) -> None:
        """Perplexities and the product of weights of every sequence."""
        length_S = torch.bincount(sample_N)
        there_S = length_S > 0
        length_S = length_S[there_S]
        total_p, total_q = (torch.bincount(sample_N, weights=x)[there_S] for x in (p_N, q_N))
        log_ppl_p, log_ppl_q = -total_p / length_S, -total_q / length_S
        weight_S = _bounded(torch.bincount(sample_N, weights=p_N - q_N)[there_S])
        difference_S = log_ppl_p - log_ppl_q
        self.spread.append(difference_S)
        self._add(
            {
                "seq_trainer_ppl": log_ppl_p.exp(),
                "seq_rollout_ppl": log_ppl_q.exp(),
                "seq_trainer_log_ppl": log_ppl_p,
                "seq_rollout_log_ppl": log_ppl_q,
                "seq_ppl_ratio": difference_S.exp(),
                "seq_chi2": (2 * weight_S).expm1(),
            }
        )

    def _add(self, parts: dict[str, Tensor]) -> None:
        for name, value in parts.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value.sum())

    def merge(self, other: Mismatch) -> Mismatch:
        """What both saw. Raises ValueError when they count extreme tokens by different thresholds."""
        if self.extreme != other.extreme:
            raise ValueError(f"extreme tokens beyond {self.extreme} and beyond {other.extreme} don't add up")
        names = self.sums.keys() | other.sums.keys()
        return Mismatch(
            self.extreme,
            self.exact + other.exact,
            self.values + other.values,
            {n: self.sums.get(n, 0.0) + other.sums.get(n, 0.0) for n in sorted(names)},
            self.spread + other.spread,
            self.by_position + other.by_position,
        )

    def metrics(self) -> dict[str, float]:
        """Every measure under our names and those of verl (`rollout_corr/*`), TRL (`sampling/*`) and NeMo RL."""
        n = self.tokens
        if n == 0:
            return {"mismatch/tokens": 0.0}
        abs_N, mean = torch.cat(self.values), {k: v / n for k, v in self.sums.items()}
        found = {
            "mismatch/max_abs_dlogp": self.max_abs,
            "mismatch/mean_abs_dlogp": mean["abs"],
            "mismatch/p99_abs_dlogp": nearest_rank(abs_N, PERCENTILE),
            "mismatch/kl_k1": mean["k1"] + 0.0,
            "mismatch/kl_k3": mean["k3"],
            "mismatch/chi2_token": mean["chi2"],
            "mismatch/ess": self.sums["weight"] ** 2 / (n * self.sums["weight_squared"]),
            "mismatch/exact_tokens": self.exact / n,
            "mismatch/extreme_tokens": mean["extreme"],
            "mismatch/tokens": float(n),
            "token_mult_prob_error": mean["exp_abs"],
            "policy_kl_error": mean["reverse_k3"],
            "js_divergence_error": mean["js"],
            "sampling_importance_ratio": mean["weight"],
        }
        found |= self._sequence_metrics() | self._position_metrics()
        return found | {theirs: found[ours] for theirs, ours in ALIASES.items()}

    def _sequence_metrics(self) -> dict[str, float]:
        spread_S = torch.cat(self.spread)
        n = spread_S.numel()
        mean = {k: v / n for k, v in self.sums.items() if k.startswith("seq_")}
        return {
            "mismatch/chi2_seq": mean["seq_chi2"],
            "mismatch/trainer_ppl": mean["seq_trainer_ppl"],
            "mismatch/rollout_ppl": mean["seq_rollout_ppl"],
            "mismatch/ppl_ratio": mean["seq_ppl_ratio"],
            "mismatch/log_ppl_diff": float(spread_S.mean()) + 0.0,
            "rollout_corr/training_log_ppl": mean["seq_trainer_log_ppl"] + 0.0,
            "rollout_corr/rollout_log_ppl": mean["seq_rollout_log_ppl"] + 0.0,
            "rollout_corr/log_ppl_abs_diff": float(spread_S.abs().mean()),
            "rollout_corr/log_ppl_diff_max": float(spread_S.max()) + 0.0,
            "rollout_corr/log_ppl_diff_min": float(spread_S.min()) + 0.0,
        }

    def _position_metrics(self) -> dict[str, float]:
        """Mean |d| by position; positions that no completion reached have no metric."""
        total, count = self.by_position.tolist()
        return {
            f"mismatch/position_{name}": total[i] / count[i]
            for i, name in enumerate(POSITION_NAMES)
            if count[i]
        }


def _token_sums(d_N: Tensor, extreme: float) -> dict[str, Tensor]:
    """What is summed over tokens. k3, chi2 and the divergence are written with expm1 and log1p: exactly 0 where d is."""
    b_N = _bounded(d_N)
    below_N = (-b_N).expm1().div(2).log1p()  # log of the mixture (p + q) / 2, less log p
    above_N = below_N + b_N  # the same, less log q
    return {
        "abs": d_N.abs(),
        "k1": -d_N,
        "k3": d_N.expm1() - d_N,
        "reverse_k3": (-d_N).expm1() + d_N,
        "exp_abs": d_N.abs().exp(),
        "extreme": d_N.abs() > extreme,
        "weight": b_N.exp(),
        "weight_squared": (2 * b_N).exp(),
        "chi2": (2 * b_N).expm1(),
        "js": ((-below_N).expm1() + below_N + (-above_N).expm1() + above_N) / 2,
    }


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _positions(sample_N: Tensor) -> Tensor:
    """How many tokens of the same sequence stand before each token."""
    length_S = torch.bincount(sample_N)
    start_S = length_S.cumsum(0) - length_S
    order_N = torch.argsort(sample_N, stable=True)
    position_N = torch.empty_like(sample_N)
    position_N[order_N] = torch.arange(len(sample_N)) - start_S[sample_N[order_N]]
    return position_N


def nearest_rank(value_N: Tensor, share: float) -> float:
    """The smallest of the values that `share` of them don't exceed; NaN when one is NaN."""
    if bool(value_N.isnan().any()):
        return math.nan
    return float(value_N.kthvalue(max(1, math.ceil(share * value_N.numel()))).values)
