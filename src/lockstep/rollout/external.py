"""Samples as JSON: how a completion drawn by another program comes in, and how ours look outside.

Reading fails closed. A field that is missing, unknown or of another type, a null log-probability, NaN written as text: each is
refused under a reason, and nothing is defaulted or filled in (field failure 44; TRL 6166 counted a null as p = 1). What the
values must be is the door's business (`trainer/sample.py`), which takes such records as it takes completions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.errors import DataError
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.rollout.types import Completion, SamplingParams, VersionSpan

_REQUIRED = {
    "prompt_ids": list,
    "prompt_index": int,
    "sample_index": int,
    "token_ids": list,
    "logprobs": list,
    "finish_reason": str,
    "spans": list,
    "scale_version": int,
    "params": Mapping,
}
_OPTIONAL = {"loss_mask": list, "sampling_mask": Mapping, "routes": list}
_PARAMS = {"max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float}
_MORE_PARAMS = {"stop": list, "stop_token_ids": list, "max_kept": int}
_SPAN = {"version": int, "start": int, "end": int}
_MASK = {"ids": list, "mass": list}


class BadSample(DataError):
    """A record that is no sample. `reason` is the name under which it is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"this is no sample: {detail}", why=reason)
        self.reason, self.detail = reason, detail


def completion_from_json(record: Mapping[str, Any]) -> Completion:
    """The completion that a parsed JSON object describes (docs/samples.md has the fields). Log-probabilities are rounded to
    FP32. Raises BadSample."""
    fields = _checked(record, _REQUIRED, _OPTIONAL, "the sample")
    mask = fields.get("loss_mask")
    trained = [True] * len(fields["token_ids"]) if mask is None else mask
    spans = [_checked(span, _SPAN, {}, "a version span") for span in fields["spans"]]
    kept = fields.get("sampling_mask")
    return Completion(
        tuple(fields["prompt_ids"]),
        fields["prompt_index"],
        fields["sample_index"],
        tuple(fields["token_ids"]),
        _logprobs(fields["logprobs"], trained),
        fields["finish_reason"],
        tuple(VersionSpan(**span) for span in spans),
        fields["scale_version"],
        _params(fields["params"]),
        None if mask is None else tuple(mask),
        None if kept is None else _sampling_mask(kept),
        None if fields.get("routes") is None else _routes(fields["routes"]),
    )


def completion_to_json(completion: Completion) -> dict[str, Any]:
    """The record that `completion_from_json` reads back equal; tokens that were not sampled have a null log-probability."""
    p, mask = completion.params, completion.sampling_mask
    record: dict[str, Any] = {
        "prompt_ids": list(completion.prompt_ids),
        "prompt_index": completion.prompt_index,
        "sample_index": completion.sample_index,
        "token_ids": list(completion.token_ids),
        "logprobs": [None if math.isnan(value) else value for value in completion.logprobs],
        "finish_reason": completion.finish_reason,
        "spans": [{"version": s.version, "start": s.start, "end": s.end} for s in completion.spans],
        "scale_version": completion.scale_version,
        "params": {name: getattr(p, name) for name in _PARAMS}
        | {"stop": list(p.stop), "stop_token_ids": sorted(p.stop_token_ids), "max_kept": p.max_kept},
    }
    if completion.loss_mask is not None:
        record["loss_mask"] = list(completion.loss_mask)
    if mask is not None:
        ids = [part.tolist() for part in mask.ids_M.split(mask.counts_N.tolist())]
        record["sampling_mask"] = {"ids": ids, "mass": mask.mass_N.tolist()}
    if completion.routes is not None:
        record["routes"] = completion.routes.tolist()
    return record


def _checked(
    record: Any, required: Mapping[str, Any], optional: Mapping[str, Any], what: str
) -> Mapping[str, Any]:
    """The record's fields, all there, none unknown, each of its type; null stands for an optional one that is absent."""
    if not isinstance(record, Mapping):
        raise BadSample("field_type", f"{what} is {record!r:.40}, not an object")
    for name in required:
        if name not in record:
            raise BadSample("field_missing", f"{what} has no {name}")
    for name, value in record.items():
        kind = required.get(name) or optional.get(name)
        if kind is None:
            raise BadSample("field_unknown", f"{what} has a field {name!r:.40}")
        if name in optional and value is None:
            continue
        number = kind is float and isinstance(value, int)
        if isinstance(value, bool) or not (isinstance(value, kind) or number):
            raise BadSample("field_type", f"{name} of {what} is {value!r:.40}")
    return record


def _logprobs(values: list[Any], trained: list[Any]) -> tuple[float, ...]:
    """Rounded to FP32. Null is NaN where the token isn't trained, and refused where it is."""
    found = []
    for i, value in enumerate(values):
        if value is None:
            if i >= len(trained) or trained[i] is not False:
                raise BadSample("logprob_missing", f"the log-probability of token {i} is null")
            value = math.nan
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadSample("logprob_type", f"the log-probability of token {i} is {value!r:.40}")
        found.append(float(value))
    return tuple(torch.tensor(found, dtype=torch.float64).float().tolist())


def _params(record: Any) -> SamplingParams:
    fields = _checked(record, _PARAMS, _MORE_PARAMS, "params")
    given = {name: fields[name] for name in _PARAMS}
    for name in ("temperature", "top_p", "min_p"):
        given[name] = float(given[name])
    stop, stop_ids = fields.get("stop") or (), fields.get("stop_token_ids") or ()
    return SamplingParams(
        **given, stop=tuple(stop), stop_token_ids=frozenset(stop_ids), max_kept=fields.get("max_kept") or 0
    )


def _sampling_mask(record: Any) -> SamplingMask:
    fields = _checked(record, _MASK, {}, "sampling_mask")
    ids, mass = fields["ids"], fields["mass"]
    if len(ids) != len(mass) or not all(isinstance(part, list) for part in ids):
        raise BadSample("field_type", "sampling_mask needs a list of ids and a mass for each token")
    if not all(type(i) is int and 0 <= i < 1 << 31 for part in ids for i in part):
        raise BadSample("field_type", "sampling_mask has an id that is no token id")
    if not all(type(m) in (int, float) for m in mass):
        raise BadSample("field_type", "sampling_mask has a mass that is no number")
    return SamplingMask.of(
        [(torch.tensor(part, dtype=torch.int32), float(m)) for part, m in zip(ids, mass, strict=True)]
    )


def _routes(record: list[Any]) -> torch.Tensor:
    """[rows, layers, k] int64. Whether they can be this sample's is the door's business."""
    try:
        found = torch.tensor(record)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadSample(
            "field_type", f"routes are no [rows, layers, k] of expert numbers: {error}"
        ) from error
    if found.dim() != 3 or found.dtype != torch.int64:
        raise BadSample("field_type", "routes are no [rows, layers, k] of expert numbers")
    return found
