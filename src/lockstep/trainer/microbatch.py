"""From samples to the packed rows of one forward pass.

Rows of a micro-batch: for each prompt its tokens (once when shared), then for each of its samples the response tokens but
the last. The row at which a token is predicted is the row of the token before it; the first token of every response is
predicted by the prompt's last row, which samples of a group share. Sharing is exact: a row depends on its prefix only.

Tokens that the loss mask leaves out (what a tool or a user said between two turns) are rows like any other, the context of what
follows; they are just nobody's target, so no loss, denominator or comparison ever sees them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from lockstep.errors import ContractError
from lockstep.kernels.attention_index import Run, build_index
from lockstep.kernels.table import Kernels
from lockstep.kernels.upload import upload
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.packed import packed_context
from lockstep.nn.routes import ExpertLoad
from lockstep.nn.rows import take_rows
from lockstep.nn.sampling_mask import SamplingMask
from lockstep.rollout.types import Completion
from lockstep.trainer.route_replay import joined_routes, routes_of_rows, same_prompt


@dataclass(frozen=True)
class MicroBatch:
    """T rows and N trained tokens.

    ids_T, positions_T: inputs; every position is below `length`. index: what the kernels made of the runs. rows_N: row that
    predicts each token. targets_N, rollout_N (log-probabilities),
    temperature_N, sample_N (number of the token's completion in this micro-batch). mask: the ids that truncation kept.
    scale_version: version of the KV scales that its samples were drawn with. routes_TLk: experts of every row, to be replayed.
    """

    ids_T: Tensor
    positions_T: Tensor
    index: Any
    rows_N: Tensor
    targets_N: Tensor
    rollout_N: Tensor
    temperature_N: Tensor
    sample_N: Tensor
    mask: SamplingMask | None = None
    scale_version: int = 0
    routes_TLk: Tensor | None = None
    length: int = 0

    def log_probs(
        self,
        decoder: Decoder,
        scales: KVScales | None,
        collector: AmaxCollector | None = None,
        load: ExpertLoad | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) [N] of every trained token, differentiable.

        scales: those the samples were drawn with, also where this decoder's own keys and values are BF16, and are then only
        judged by them. None leaves keys and values in BF16.
        """
        hidden = self.hidden(decoder, scales, collector, load)
        rows_NK = take_rows(hidden, self.rows_N)
        return decoder.head.log_probs(rows_NK, self.targets_N, self.temperature_N, self.mask)

    def hidden(
        self,
        decoder: Decoder,
        scales: KVScales | None,
        collector: AmaxCollector | None = None,
        load: ExpertLoad | None = None,
    ) -> Tensor:
        """Final hidden states [T, K] of all rows; arguments as in `log_probs`."""
        routes = routes_of_rows(self.routes_TLk, decoder.spec)
        decoder.model.rope.reserve(self.length, self.positions_T.device)
        context = packed_context(
            self.positions_T,
            self.index,
            decoder.kernels,
            scales=scales,
            collector=collector,
            quantize=decoder.flow.kv_fp8,
            routes=routes,
        )
        hidden = decoder.hidden(self.ids_T, context)
        if load is not None and routes is not None:
            load.see(routes)
        return hidden


def make_microbatch(
    completions: Sequence[Completion],
    group: int,
    *,
    share_prompts: bool,
    kernels: Kernels | None = None,
    device: torch.device | None = None,
) -> MicroBatch:
    """Packs completions; `group` is the number of query heads for each KV head. Equal prompts in a row are shared.

    kernels: whose index it gets, the reference's where there are none. device: where all tensors go, the CPU by default.
    """
    ids: list[int] = []
    positions: list[Tensor] = []
    runs: list[Run] = []
    rows: list[int] = []
    routes: list[Tensor] = []
    first: Completion | None = None  # whose prompt the rows at `prompt_slots` are
    prompt_slots = torch.empty(0, dtype=torch.long)
    for completion in completions:
        length, count = len(completion.prompt_ids), len(completion.token_ids) - 1
        known, start = completion.routes, len(ids)
        if share_prompts and first is not None and same_prompt(first, completion):
            if count:
                slots = torch.cat([prompt_slots, torch.arange(start, start + count)])
                runs.append(Run(start, count, length, slots))
                positions.append(torch.arange(length, length + count))
            routes += [] if known is None or not count else [known[length:]]
        else:  # the prompt and its first completion are one run
            first = completion
            runs.append(Run(start, length + count, 0, torch.arange(start, start + length + count)))
            positions.append(torch.arange(length + count))
            routes += [] if known is None else [known]
            prompt_slots = torch.arange(start, start + length)
            ids += completion.prompt_ids
            start += length
        ids += completion.token_ids[:-1]
        rows += [int(prompt_slots[-1]), *range(start, start + count)]
    masked = any(c.loss_mask is not None for c in completions)
    trained_R = torch.tensor([t for c in completions for t in c.trained]) if masked else slice(None)
    lengths = torch.tensor([c.trained_tokens for c in completions])
    temperatures = torch.tensor([c.params.score_temperature for c in completions])
    mask = SamplingMask.join([c.sampling_mask for c in completions], [len(c.token_ids) for c in completions])
    mask = mask.select(trained_R) if mask is not None and isinstance(trained_R, Tensor) else mask
    return MicroBatch(
        upload(_numbers(ids), device),
        upload(torch.cat(positions), device),
        build_index(runs, group, device) if kernels is None else kernels.index(runs, group, device),
        upload(_numbers(rows)[trained_R], device),
        upload(_numbers(list(chain.from_iterable(c.token_ids for c in completions)))[trained_R], device),
        upload(_numbers(list(chain.from_iterable(c.trained_logprobs for c in completions)), "f"), device),
        upload(temperatures.repeat_interleave(lengths), device),
        upload(torch.arange(len(completions)).repeat_interleave(lengths), device),
        mask if mask is None or device is None else mask.to(device),
        one_scale_version(completions),
        joined_routes(routes, len(ids)),
        max(run.position + run.count for run in runs),
    )


def _numbers(values: list[Any], kind: Literal["q", "f"] = "q") -> Tensor:
    """[N] of Python numbers: int64 ("q") or FP32 ("f"). Several times as fast as `torch.tensor`, and as exact."""
    dtype = torch.int64 if kind == "q" else torch.float32
    return torch.frombuffer(array(kind, values), dtype=dtype) if values else torch.empty(0, dtype=dtype)


def one_scale_version(completions: Sequence[Completion]) -> int:
    """The version of the KV scales that all of these were drawn with.

    Raises ContractError when they were drawn with different ones: the rows of a forward pass share theirs.
    """
    versions = {c.scale_version for c in completions}
    if len(versions) > 1:
        raise ContractError(f"samples of KV scales {sorted(versions)} can't share a micro-batch")
    return versions.pop() if versions else 0
