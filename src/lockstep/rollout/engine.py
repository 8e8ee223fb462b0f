"""The embedded engine: samples with the trainer's own decoder, over a paged cache, by continuous batching.

`step` reads top to bottom: schedule, compute, draw, finish. Weights are the decoder's working copies; in a unified flow
the very same object the trainer uses, so a published version is there without a copy.

Next: `scheduler.py` for who runs, `runner.py` for the forward pass, `sampler.py` for the draw.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences

import torch

from lockstep.errors import ContractError
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.rollout.cache import PagedCache
from lockstep.rollout.noise import row_keys
from lockstep.rollout.runner import Runner
from lockstep.rollout.sampler import draw
from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.sequence import Sequence
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, FinishReason, Progress, Request


class EmbeddedEngine:
    """Implements `rollout.types.Engine` in this process.

    detokenize: token ids to text, needed only for requests with stop strings.
    """

    def __init__(
        self,
        decoder: Decoder,
        spec: RolloutSpec,
        *,
        cache_tokens: int,
        detokenize: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.decoder, self.spec = decoder, spec
        self.detokenize = detokenize
        device = next(decoder.parameters()).device
        self.cache = PagedCache(
            decoder.spec, decoder.flow, tokens=cache_tokens, page_size=spec.page_size, device=device
        )
        self.runner = Runner(decoder, self.cache)
        self.scales: KVScales | None = None
        self.preemptions = 0
        self.steps = 0

    @property
    def version(self) -> int:
        """Weight version of the decoder's working copies."""
        return self.decoder.version

    @property
    def scale_version(self) -> int:
        """Version of the KV scales in use; 0 without FP8 KV."""
        return 0 if self.scales is None else self.scales.version

    def set_kv_scales(self, scales: KVScales) -> int:
        """Takes KV scales into use between generations and echoes their version."""
        self.scales = scales
        return self.scale_version

    def digest(self) -> str:
        """See `Decoder.digest`."""
        return self.decoder.digest()

    def generate(
        self,
        requests: Sequences[Request],
        *,
        seed: int,
        step: int,
        expected_version: int,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """See `rollout.types.Engine.generate`."""
        if self.version != expected_version:
            raise ContractError(
                f"the engine holds weight version {self.version}, version {expected_version} was expected"
            )
        if self.decoder.flow.kv_fp8 and self.scales is None:
            raise ContractError("the flow has an FP8 KV cache but no KV scales were calibrated or published")
        scheduler = Scheduler(self.cache, self.spec.max_running, self.spec.max_batched_tokens)
        sequences = [s for request in requests for s in scheduler.add(request)]
        finished = 0
        while not scheduler.done:
            finished += self._step(scheduler, seed, step)
            if progress is not None:
                progress(finished, len(sequences))
        self.preemptions += scheduler.preemptions
        assert self.cache.free_pages == self.cache.num_pages, "pages leaked"
        return [s.completion(self.version, self.scale_version) for s in sequences]

    def _step(self, scheduler: Scheduler, seed: int, step: int) -> int:
        """One engine step; the number of sequences that finished."""
        work = scheduler.schedule()
        if work:
            for item, hidden in zip(work, self.runner.forward(work, self.scales), strict=True):
                if item.sequence.computed == len(item.sequence.tokens):
                    item.sequence.hidden = hidden
                    if item.sequence.fresh:
                        scheduler.prompt_computed(item.sequence)
        ready = [s for s in scheduler.running if s.hidden is not None]
        finished = 0
        if ready:
            keys = [
                row_keys(seed, step, s.group.request.prompt_index, s.sample_index, len(s.output))
                for s in ready
            ]
            rows = torch.stack([s.hidden for s in ready if s.hidden is not None])
            with torch.no_grad():
                drawn = draw(rows, self.decoder.head, [s.group.request.params for s in ready], keys)
            for sequence, token, logprob in zip(ready, drawn.tokens, drawn.logprobs, strict=True):
                sequence.tokens.append(token)
                sequence.logprobs.append(logprob)
                sequence.hidden = None
                sequence.finish_reason = self._finish_reason(sequence, token)
                if sequence.finish_reason is not None:
                    scheduler.finish(sequence)
                    finished += 1
        self.steps += 1
        return finished

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.group.request.params
        if token in params.stop_token_ids:
            return "stop"
        if params.stop:
            assert self.detokenize is not None, "stop strings need a detokenizer"
            text = self.detokenize(sequence.output)
            if any(s in text for s in params.stop):
                return "stop"
        return "length" if len(sequence.output) >= params.max_tokens else None
