"""One step towards more caution, for whoever watches the mismatch while a run goes on.

    none, veto, bypass -> token_tis -> icepop -> geometric means in 1 +- 0.016 -> halved, by way of geometric_mis, to 1 +- 0.0002

Any weights count as token_tis, any token mask or sequence rejection as icepop. A veto, and the policy for masked tokens, are
kept on the way up. Geometric rejection begins far wider than the preset: at 1 +- 0.001, made for completions of thousands of
tokens, the quickstart loses 78 % of its samples and learns nothing (docs/mismatch.md). Below 0.0002, the least verl
recommends, it would throw out everything.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.correction.presets import GEOMETRIC_MIS, ICEPOP, TOKEN_TIS, Correction

NARROWEST = 2e-4
"""Geometric bounds are not halved below 1 +- this."""
WIDEST = replace(GEOMETRIC_MIS, rollout_rs_threshold=1.016, rollout_rs_threshold_lower=0.984)
"""Geometric rejection as it begins."""


def tighten(now: Correction) -> tuple[Correction, str] | None:
    """The next stricter correction and a line that says what it is; None at the strictest."""
    if now.rollout_rs == "geometric":
        return _halve(now)
    if now.rollout_rs != "none":
        after, name = WIDEST, "geometric means in 0.984..1.016"
    elif now.rollout_is != "none":
        after, name = ICEPOP, "icepop"
    else:
        after, name = TOKEN_TIS, "token_tis"
    veto = max(now.rollout_token_veto_threshold, after.rollout_token_veto_threshold)
    counted = now.count_masked_tokens and after.rollout_rs == "token"
    after = replace(after, rollout_token_veto_threshold=veto, count_masked_tokens=counted)
    return after, f"correction tightened to {name}"


def _halve(now: Correction) -> tuple[Correction, str] | None:
    upper = 1.0 + (now.rollout_rs_threshold - 1.0) / 2
    lower = 1.0 - (1.0 - now.rollout_rs_threshold_lower) / 2
    if upper - 1.0 < NARROWEST:
        return None
    after = replace(now, rollout_rs_threshold=upper, rollout_rs_threshold_lower=lower)
    return after, f"correction tightened to geometric means in {lower:.6g}..{upper:.6g}"
