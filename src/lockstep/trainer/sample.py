"""A completion on its way through rewards and advantages, and the door it has to pass.

The sample contract (docs/samples.md) is checked here, once, whoever drew the sample: token ids of the vocabulary, the FP32
log-probability of each trained token, finite and not positive, the parameters it was drawn with, what truncation kept, which
tokens are trained, and version spans that cover it. What breaks the contract is dropped and counted by reason, or stops the run;
it is never repaired (TRL 6166, NeMo-RL 4218).

Next: `microbatch.py`, which relies on all of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.data.example import Example
from lockstep.errors import DataError
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.rollout.external import BadSample, completion_from_json
from lockstep.rollout.types import Completion, SamplingParams
from lockstep.trainer.route_replay import RouteShape


@dataclass
class Sample:
    """One completion with what has been learnt about it. `group` numbers the prompts of a step from 0. decode: its text, made for
    whoever reads it."""

    completion: Completion
    example: Example
    group: int
    decode: Callable[[Completion], str]
    reward: float | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    advantage: float = 0.0
    max_abs_dlogp: float | None = None

    @cached_property
    def text(self) -> str:
        """As people and reward functions read it."""
        return self.decode(self.completion)


def by_sample(samples: Sequence[Sample], values_N: Tensor) -> tuple[Tensor, ...]:
    """Values of the trained tokens of these samples in order, cut into each sample's own."""
    parts: tuple[Tensor, ...] = values_N.split([s.completion.trained_tokens for s in samples])
    return parts


@dataclass(frozen=True)
class Expected:
    """What a step asked for. prompts: token ids by prompt index; None where samples may have other prompts (segments).
    routes: what the routes of a sample must be where they are replayed; None where samples have none."""

    version: int
    scale_version: int
    vocabulary: int
    prompts: Mapping[int, tuple[int, ...]] | None = None
    routes: RouteShape | None = None


@dataclass(frozen=True)
class Defect:
    """Why a completion can't be trained on: the name it is counted under, and the particulars."""

    reason: str
    detail: str


def admit(
    completions: Iterable[Completion | Mapping[str, Any]],
    expected: Expected,
    on_bad: Literal["drop", "stop"] = "drop",
) -> tuple[list[Completion], dict[str, float]]:
    """The completions that keep the sample contract, and `data/dropped_<reason>` counts of the others. Records (parsed JSON, see
    `rollout/external.py`) are read first.

    Raises DataError under `stop`, naming the first offender.
    """
    reasons: Counter[str] = Counter()
    kept = []
    for number, item in enumerate(completions):
        found = None
        try:
            completion = completion_from_json(item) if isinstance(item, Mapping) else item
            found = defect(completion, expected)
            where = f"sample {completion.sample_index} of prompt {completion.prompt_index}"
        except BadSample as error:
            found, where = Defect(error.reason, error.detail), f"sample number {number}"
        if found is None:
            kept.append(completion)
        elif on_bad == "stop":
            fix = "mend the engine, or drop and count such samples with data.on_bad_sample: drop"
            raise DataError(
                f"breaks the sample contract: {found.detail}", where=where, why=found.reason, fix=fix
            )
        else:
            reasons[found.reason] += 1
    return kept, {f"data/dropped_{reason}": float(count) for reason, count in sorted(reasons.items())}


def defect(completion: Completion, expected: Expected) -> Defect | None:
    """Why a completion can't be trained on, or None."""
    return (
        _prompt(completion, expected)
        or _tokens(completion, expected)
        or _params(completion.params)
        or _loss_mask(completion)
        or _logprobs(completion)
        or _versions(completion, expected)
        or _sampling_mask(completion, expected.vocabulary)
        or _routes(completion, expected.routes)
    )


def _prompt(completion: Completion, expected: Expected) -> Defect | None:
    ids = completion.prompt_ids
    if not ids or not _all_tokens(ids, expected.vocabulary):
        return Defect("prompt", "the prompt has no tokens, or one that is not in the vocabulary")
    if expected.prompts is None:
        return None
    asked = expected.prompts.get(completion.prompt_index)
    if asked is None:
        return Defect("prompt", f"nobody asked for prompt {completion.prompt_index}")
    if asked != ids:
        return Defect("prompt", f"the prompt's {len(ids)} tokens are not the {len(asked)} that were sent")
    return None


def _tokens(completion: Completion, expected: Expected) -> Defect | None:
    if not completion.token_ids:
        return Defect("no_tokens", "the response has no tokens")
    if not _all_tokens(completion.token_ids, expected.vocabulary):
        i = next(i for i, t in enumerate(completion.token_ids) if not _all_tokens((t,), expected.vocabulary))
        what = f"token {i} is {completion.token_ids[i]!r:.40}, the vocabulary has {expected.vocabulary}"
        return Defect("token_id", what)
    if completion.finish_reason not in ("stop", "length"):
        return Defect("finish_reason", f"it ended by {completion.finish_reason!r:.40}, not by stop or length")
    return None


def _all_tokens(ids: tuple[int, ...], vocabulary: int) -> bool:
    return all(type(t) is int for t in ids) and min(ids) >= 0 and max(ids) < vocabulary


def _params(params: SamplingParams) -> Defect | None:
    if not isinstance(params, SamplingParams):
        return Defect("params", "it doesn't say how it was sampled")
    numbers = (params.temperature, params.top_p, params.top_k, params.min_p)
    if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
        return Defect("params", f"temperature, top_p, top_k and min_p are {numbers}")
    if params.temperature == 0:
        return Defect("greedy", "it was taken greedily: that is no draw from a distribution")
    if params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0 or not 0 <= params.min_p < 1:
        return Defect("params", f"temperature, top_p, top_k and min_p are {numbers}")
    return None


def _loss_mask(completion: Completion) -> Defect | None:
    mask, count = completion.loss_mask, len(completion.token_ids)
    if mask is None:
        return None
    if len(mask) != count or not all(type(m) is bool for m in mask):
        return Defect("loss_mask", f"the loss mask is not {count} truth values")
    if not any(mask):
        return Defect("nothing_trained", "the loss mask leaves no token to train")
    return None


def _logprobs(completion: Completion) -> Defect | None:
    """Finite and not positive after rounding to FP32; NaN is allowed where a token isn't trained, since it wasn't sampled."""
    values, count = completion.logprobs, len(completion.token_ids)
    if len(values) != count:
        return Defect("logprob_count", f"there are {len(values)} log-probabilities for {count} tokens")
    if not all(type(p) is float for p in values):
        i = next(i for i, p in enumerate(values) if type(p) is not float)
        reason = "logprob_missing" if values[i] is None else "logprob_type"
        return Defect(reason, f"the log-probability of token {i} is {values[i]!r:.40}")
    value_N = torch.tensor(values, dtype=torch.float64).float()
    unsampled_N = value_N.isnan() & ~torch.tensor(completion.trained)
    for reason, bad_N in (
        ("logprob_nonfinite", ~value_N.isfinite() & ~unsampled_N),
        ("logprob_positive", value_N > 0),
    ):
        if bool(bad_N.any()):
            i = int(bad_N.nonzero()[0])
            return Defect(reason, f"the log-probability of token {i} is {values[i]}")
    return None


def _versions(completion: Completion, expected: Expected) -> Defect | None:
    """Spans that cover every token once, all of the version that the step expects (field failure 64)."""
    end = 0
    for span in completion.spans:
        if not all(type(n) is int for n in (span.version, span.start, span.end)):
            return Defect("version_spans", f"{span} is not made of whole numbers")
        if span.start != end or span.end <= span.start:
            return Defect("version_spans", f"a version span from {span.start} to {span.end} follows {end}")
        end = span.end
    if end != len(completion.token_ids):
        return Defect("version_spans", f"version spans cover {end} tokens of {len(completion.token_ids)}")
    versions = sorted({span.version for span in completion.spans})
    if len(versions) > 1:
        return Defect("mixed_versions", f"its tokens come from weight versions {versions}")
    if versions[0] != expected.version:
        what = f"it was sampled under weight version {versions[0]}, version {expected.version} was expected"
        return Defect("wrong_version", what)
    if completion.scale_version != expected.scale_version:
        what = f"its KV scales have version {completion.scale_version}, {expected.scale_version} was expected"
        return Defect("wrong_scales", what)
    return None


def _sampling_mask(completion: Completion, vocabulary: int) -> Defect | None:
    """What truncation kept, for every trained token, the token itself among it (field failure 37)."""
    mask, truncated = completion.sampling_mask, completion.params.truncated
    if mask is None:
        if not truncated:
            return None
        return Defect("no_sampling_mask", "truncation was on and nothing says which ids it kept")
    if not truncated:
        return Defect("sampling_mask", "there is a sampling mask, but its parameters truncate nothing")
    wrong = _malformed(mask, len(completion.token_ids), vocabulary)
    if wrong:
        return Defect("sampling_mask", wrong)
    token_M = torch.arange(len(mask)).repeat_interleave(mask.counts_N)
    hit_N = torch.zeros(len(mask), dtype=torch.bool)
    hit_N[token_M[mask.ids_M == torch.tensor(completion.token_ids)[token_M]]] = True
    lost_N = ~hit_N & torch.tensor(completion.trained)
    if bool(lost_N.any()):
        i = int(lost_N.nonzero()[0])
        return Defect("sampling_mask", f"token {i} is not among the ids that were kept for it")
    return None


def _routes(completion: Completion, shape: RouteShape | None) -> Defect | None:
    """Which experts computed it, where the trainer repeats that; nowhere else."""
    if shape is None:
        return None if completion.routes is None else Defect("routes", "it has routes, rollout.routes is own")
    wrong = shape.wrong(completion)
    return Defect("routes", wrong) if wrong else None


def _malformed(mask: SamplingMask, count: int, vocabulary: int) -> str:
    """What is wrong with a sampling mask by itself, or nothing."""
    ids, offsets = mask.ids_M, mask.offsets
    if len(mask) != count or len(offsets) != count + 1:
        return f"the sampling mask is for {len(mask)} tokens of {count}"
    if int(offsets[0]) != 0 or int(offsets[-1]) != len(ids) or bool((mask.counts_N < 0).any()):
        return "the sampling mask's offsets don't fit its ids"
    rising = ids.diff() > 0
    first = offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < len(ids))]
    rising[first - 1] = True
    if not bool(rising.all()) or (len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary):
        return "kept ids are not ascending ids of the vocabulary"
    if not bool(((mask.mass_N > 0) & (mask.mass_N <= 1)).all()):
        return "a kept mass is not between 0 and 1"
    return ""
