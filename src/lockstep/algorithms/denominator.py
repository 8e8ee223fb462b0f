"""The one denominator: what a token's loss is multiplied by.

Stacks divide in three places (the micro-batch, the accumulation step, the data-parallel group) and get a loss
that depends on how the batch was cut. Here the division happens once, for the whole mini-batch, before it is
cut: every sample gets one coefficient, each of its tokens is multiplied by it, and everything after that is a
plain sum. So

    loss = sum over tokens of coef[sample of the token] * loss of the token

is additive over micro-batches and over ranks, whatever their sizes. (A data-parallel wrapper that averages
gradients has to be undone by the number of ranks; take the lengths of all ranks' samples here.)

A rejected sample is not in the count: its coefficient is 0 and the others are what they would be without it.
Setting its loss to zero while it stays in the denominator would scale down everybody else's.

Shapes: S samples. `losses.py` comes next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

DenominatorKind = Literal["token", "sequence", "constant"]


def token_coefficients(
    lengths_S: Tensor,
    kind: DenominatorKind,
    *,
    max_tokens: int,
    keep_S: Tensor | None = None,
) -> Tensor:
    """FP32 coefficients [S] for the tokens of each sample of one mini-batch.

    `lengths_S` (integers [S]) counts the tokens that are trained on; with S' kept samples of lengths n:
    `token` 1 / sum(n), every token counts the same (DAPO, arXiv 2503.14476, eq. 12);
    `sequence` 1 / (S' n), every sample counts the same (GRPO, arXiv 2402.03300, eq. 3);
    `constant` 1 / (S' max_tokens), independent of all lengths (Dr. GRPO, arXiv 2503.20783).

    Samples outside `keep_S` (bool [S]) get 0 and are not counted. Raises ValueError if nothing is kept (there
    is no update to make), if a kept sample has no token, or if one is longer than `max_tokens` under
    `constant`."""
    if kind not in _KINDS:
        raise ValueError(f"unknown denominator {kind!r}; known: {', '.join(_KINDS)}")
    if lengths_S.dim() != 1 or lengths_S.is_floating_point() or lengths_S.dtype == torch.bool:
        raise ValueError(f"lengths must be an integer vector, not {lengths_S.dtype} {tuple(lengths_S.shape)}")
    if keep_S is None:
        keep_S = torch.ones(lengths_S.shape, dtype=torch.bool, device=lengths_S.device)
    elif keep_S.shape != lengths_S.shape or keep_S.dtype != torch.bool:
        raise ValueError(
            f"the keep mask must be bool {tuple(lengths_S.shape)}, not {keep_S.dtype} {tuple(keep_S.shape)}"
        )
    lengths_K = lengths_S[keep_S].double()
    if lengths_K.numel() == 0:
        raise ValueError("no sample of the mini-batch is kept: there is no update to make, skip it")
    if int(lengths_K.min()) < 1:
        raise ValueError("a kept sample has no token to train on: reject it before the denominator is taken")
    coef_S = torch.zeros(lengths_S.shape, dtype=torch.float32, device=lengths_S.device)
    coef_S[keep_S] = _KINDS[kind](lengths_K, max_tokens).float()
    return coef_S


def _token(lengths_K: Tensor, max_tokens: int) -> Tensor:
    return (1.0 / lengths_K.sum()).expand(lengths_K.shape)


def _sequence(lengths_K: Tensor, max_tokens: int) -> Tensor:
    return 1.0 / (lengths_K.numel() * lengths_K)


def _constant(lengths_K: Tensor, max_tokens: int) -> Tensor:
    longest = int(lengths_K.max())
    if longest > max_tokens:
        raise ValueError(f"a sample of {longest} tokens is longer than max_tokens = {max_tokens}")
    return torch.full_like(lengths_K, 1.0 / (lengths_K.numel() * max_tokens))


_KINDS: dict[DenominatorKind, Callable[[Tensor, int], Tensor]] = {
    "token": _token,
    "sequence": _sequence,
    "constant": _constant,
}
