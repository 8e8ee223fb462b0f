"""AdamW on FP32 masters: warm-up and schedule, gradient clipping, and a step that is skipped when a gradient isn't finite.

On a GPU the step is one fused launch for many tensors; the host waits once, for the norm that decides whether it is taken. Where
several processes share a run each holds the moments of its own part of the parameters, steps these and sends them to the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.trainer.ranks import Ranks
from lockstep.trainer.spec import OptimSpec


@dataclass(frozen=True)
class StepResult:
    """grad_norm before clipping; applied is False when the step was skipped."""

    grad_norm: float
    lr: float
    applied: bool


class Optimizer:
    """AdamW with a learning rate that is a pure function of the optimizer step."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        spec: OptimSpec,
        total_steps: int,
        ranks: Ranks | None = None,
    ) -> None:
        parameters = [(n, p) for n, p in named if p.requires_grad]
        matrices = [p for _, p in parameters if p.dim() > 1]
        others = [p for _, p in parameters if p.dim() <= 1]
        self.spec, self.total_steps, self.ranks = spec, max(total_steps, 1), ranks or Ranks()
        self.names = [n for n, p in parameters if p.dim() > 1] + [n for n, p in parameters if p.dim() <= 1]
        self.parameters = matrices + others
        self.division = self.ranks.divide(self.parameters, [p.numel() for p in self.parameters])
        own = {id(p) for p in self.division.own}
        self.on_gpu = bool(self.parameters) and all(p.is_cuda for p in self.parameters)
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in matrices if id(p) in own], "weight_decay": spec.weight_decay},
                {"params": [p for p in others if id(p) in own], "weight_decay": 0.0},
            ],
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            fused=True if self.on_gpu else None,
        )
        self.steps = 0
        self.skipped = 0

    def learning_rate(self) -> float:
        """Of the next step: linear warm-up, then the schedule over the remaining optimizer steps."""
        spec = self.spec
        if self.steps < spec.warmup_steps:
            return spec.lr * (self.steps + 1) / spec.warmup_steps
        if spec.schedule == "constant":
            return spec.lr
        span = max(self.total_steps - spec.warmup_steps, 1)
        done = min((self.steps - spec.warmup_steps) / span, 1.0)
        shape = 1.0 - done if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * shape)

    def step(self) -> StepResult:
        """Adds up the ranks' gradients, clips, steps and clears them; skips (and counts) when their norm is not finite."""
        lr = self.learning_rate()
        if self.ranks.size > 1 or any(p.grad is not None for p in self.parameters):
            for p in self.parameters:  # an expert, or a rank, that got no row: its gradient is zero
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.ranks.add_up(gradients)
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        applied = bool(torch.isfinite(norm))
        if applied:
            if self.spec.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.division.own, self.spec.max_grad_norm, norm)
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
            self.ranks.share_out((p.detach() for p in self.parameters), self.division.owners)
            self.steps += 1
        else:
            self.skipped += 1
        for p in self.parameters:
            p.grad = None
        return StepResult(float(norm), lr, applied)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments by parameter name, for a checkpoint: all of them on the first rank, none on the others. All have to ask."""
        tensors = {}
        for name, parameter, owner in zip(self.names, self.parameters, self.division.owners, strict=True):
            own = self.adam.state.get(parameter) if owner == self.ranks.rank else None
            for key, value in (self.ranks.to_first(own, owner) or {}).items():
                tensors[f"{name}|{key}"] = torch.as_tensor(value)
        return tensors

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], *, steps: int, skipped: int) -> None:
        """Restores what `state_tensors` gave, as far as it is this rank's. Raises ValueError when moments are missing."""
        keys = ("step", "exp_avg", "exp_avg_sq")
        if tensors and (missing := [n for n in self.names for k in keys if f"{n}|{k}" not in tensors]):
            raise ValueError(f"no moments of {missing[0]} (and {len(missing) - 1} more)")
        if steps and not tensors:
            raise ValueError("no moments at all")
        for name, parameter, owner in zip(self.names, self.parameters, self.division.owners, strict=True):
            if tensors and owner == self.ranks.rank:
                known = {k: tensors[f"{name}|{k}"] for k in keys}
                # A fused step counts its steps where it runs, any other on the CPU.
                self.adam.state[parameter] = {
                    k: x.to(parameter.device) if k != "step" or self.on_gpu else x for k, x in known.items()
                }
        self.steps, self.skipped = steps, skipped
