"""From samples to the packed rows of one forward pass.

Rows of a micro-batch: for each prompt its tokens (once when shared), then for each of its samples the response tokens but
the last. The row at which a token is predicted is the row of the token before it; the first token of every response is
predicted by the prompt's last row, which samples of a group share. Sharing is exact: a row depends on its prefix only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.kernels.attention_index import AttentionIndex, Run, build_index
from lockstep.kernels.table import Kernels
from lockstep.models.decoder import Decoder
from lockstep.nn.context import PackedContext
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.rollout.types import Completion


@dataclass(frozen=True)
class MicroBatch:
    """T rows and N response tokens.

    ids_T, positions_T: inputs. rows_N: row that predicts each token. targets_N, rollout_N (log-probabilities),
    temperature_N, sample_N (number of the token's completion in this micro-batch).
    """

    ids_T: Tensor
    positions_T: Tensor
    index: AttentionIndex
    rows_N: Tensor
    targets_N: Tensor
    rollout_N: Tensor
    temperature_N: Tensor
    sample_N: Tensor

    def log_probs(
        self, decoder: Decoder, scales: KVScales | None, collector: AmaxCollector | None = None
    ) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) [N] of every response token, differentiable."""
        context = PackedContext(
            self.positions_T, self.index, decoder.kernels, scales=scales, collector=collector
        )
        hidden = decoder.hidden(self.ids_T, context)
        return decoder.head.log_probs(hidden[self.rows_N], self.targets_N, self.temperature_N)


def make_microbatch(completions: Sequence[Completion], group: int, *, share_prompts: bool) -> MicroBatch:
    """Packs completions; `group` is the number of query heads for each KV head. Equal prompts in a row are shared."""
    ids: list[int] = []
    positions: list[Tensor] = []
    runs: list[Run] = []
    rows: list[int] = []
    prompt: tuple[int, ...] | None = None
    prompt_slots = torch.empty(0, dtype=torch.long)
    for completion in completions:
        length = len(completion.prompt_ids)
        if not share_prompts or completion.prompt_ids != prompt:
            prompt = completion.prompt_ids
            prompt_slots = torch.arange(len(ids), len(ids) + length)
            runs.append(Run(len(ids), length, 0, prompt_slots))
            positions.append(torch.arange(length))
            ids += prompt
        start, count = len(ids), len(completion.token_ids) - 1
        if count:
            slots = torch.cat([prompt_slots, torch.arange(start, start + count)])
            runs.append(Run(start, count, length, slots))
            positions.append(torch.arange(length, length + count))
            ids += completion.token_ids[:-1]
        rows += [int(prompt_slots[-1]), *range(start, start + count)]
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    temperatures = torch.tensor([c.params.score_temperature for c in completions])
    return MicroBatch(
        torch.tensor(ids),
        torch.cat(positions),
        build_index(runs, group),
        torch.tensor(rows),
        torch.tensor([t for c in completions for t in c.token_ids]),
        torch.tensor([p for c in completions for p in c.logprobs], dtype=torch.float32),
        temperatures.repeat_interleave(lengths),
        torch.arange(len(completions)).repeat_interleave(lengths),
    )


def prompt_context(
    prompts: Sequence[tuple[int, ...]], group: int, kernels: Kernels, collector: AmaxCollector
) -> tuple[Tensor, PackedContext]:
    """(ids, context) of a forward over whole prompts that gathers KV maxima."""
    runs, start = [], 0
    for prompt in prompts:
        runs.append(Run(start, len(prompt), 0, torch.arange(start, start + len(prompt))))
        start += len(prompt)
    positions = torch.cat([torch.arange(len(p)) for p in prompts])
    context = PackedContext(positions, build_index(runs, group), kernels, collector=collector)
    return torch.tensor([t for p in prompts for t in p]), context
