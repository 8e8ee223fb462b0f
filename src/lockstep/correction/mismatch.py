"""The disagreement of rollout and trainer about the same tokens: measures, and the truncated importance weight.

d = trainer's log p - rollout's log p, by token. k1 = mean(-d) and k3 = mean(exp(d) - 1 - d) estimate KL(rollout || trainer)
(Schulman, "Approximating KL divergence"). The token multiplicative probability error is mean exp|d| (NeMo RL); 1 is perfect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Mismatch:
    """Sums over tokens, additive over micro-batches; all zero before the first."""

    tokens: int = 0
    exact: int = 0
    max_abs: float = 0.0
    sum_abs: float = 0.0
    sum_k1: float = 0.0
    sum_k3: float = 0.0
    sum_exp_abs: float = 0.0

    def see(self, trainer_N: Tensor, rollout_N: Tensor) -> None:
        """Takes FP32 log-probabilities of the same tokens into account."""
        d = trainer_N.detach().double() - rollout_N.double()
        self.tokens += d.numel()
        self.exact += int((trainer_N.detach() == rollout_N).sum())
        if d.numel():
            largest = float(d.abs().max())
            self.max_abs = float("nan") if math.isnan(largest + self.max_abs) else max(self.max_abs, largest)
        self.sum_abs += float(d.abs().sum())
        self.sum_k1 += float(-d.sum())
        self.sum_k3 += float((d.expm1() - d).sum())
        self.sum_exp_abs += float(d.abs().exp().sum())

    def metrics(self) -> dict[str, float]:
        """Under our names and those that users of NeMo RL and verl know."""
        n = self.tokens
        if n == 0:
            return {"mismatch/tokens": 0.0}
        return {
            "mismatch/max_abs_dlogp": self.max_abs,
            "mismatch/mean_abs_dlogp": self.sum_abs / n,
            "mismatch/kl_k1": self.sum_k1 / n + 0.0,
            "mismatch/kl_k3": self.sum_k3 / n,
            "mismatch/exact_tokens": self.exact / n,
            "mismatch/tokens": float(self.tokens),
            "token_mult_prob_error": self.sum_exp_abs / n,
            "rollout_corr/kl": self.sum_k1 / n + 0.0,
            "rollout_corr/k3_kl": self.sum_k3 / n,
        }


def truncated_weight(trainer_N: Tensor, rollout_N: Tensor, truncate: float) -> Tensor:
    """min(p_trainer / p_rollout, truncate) by token, without gradient (TIS: Ionides 2008; Yao et al. 2025)."""
    return torch.clamp((trainer_N.detach() - rollout_N).exp(), max=truncate)
