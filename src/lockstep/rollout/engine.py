"""The embedded engine: samples with the trainer's own decoder, over a paged cache, by continuous batching.

`step` reads top to bottom: schedule, compute, draw, finish. Weights are the decoder's working copies; in a unified flow
the very same object the trainer uses, so a published version is there without a copy.

Next: `scheduler.py` for who runs, `runner.py` for the forward pass, `sampler.py` for the draw.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequences
from typing import TYPE_CHECKING

import torch

from lockstep.errors import ConfigError, ContractError
from lockstep.kernels.attention_form import PAGE
from lockstep.models.decoder import Decoder
from lockstep.nn.kv_scales import KVScales
from lockstep.rollout.cache import PagedCache
from lockstep.rollout.device_cache import MAX_KEPT, MAX_STOPS, DeviceCache
from lockstep.rollout.prefix_cache import PrefixCache, PrefixKey
from lockstep.rollout.runner import Runner
from lockstep.rollout.sampler import draw
from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.sequence import Sequence
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, FinishReason, Progress, Request

if TYPE_CHECKING:
    from lockstep.rollout.decode_state import DecodeState

ROOM = 1 << 17
"""Tokens of a sequence that the running batch has room for from the start, if model and cache have; longer ones get more."""


class EmbeddedEngine:
    """Implements `rollout.types.Engine` in this process.

    detokenize: token ids to text, needed only for requests with stop strings. `preemptions` counts sequences that had to give
    their pages back, `recalled` tokens that were found in the prefix cache, `waited` seconds of a host with nothing to do.
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
        device = decoder.device
        self.cache = cache_kind(decoder, spec)(
            decoder.spec,
            decoder.flow,
            tokens=cache_tokens,
            page_size=spec.page_size,
            device=device,
            prefix=PrefixCache(spec.page_size) if spec.prefix_cache else None,
            record_routes=spec.routes == "replay" and decoder.spec.moe is not None,
        )
        self.runner = Runner(decoder, self.cache)
        self.scales: KVScales | None = None
        self.state: DecodeState | None = None
        self.preemptions = self.recalled = 0
        self.steps = 0
        self.waited = 0.0

    @property
    def version(self) -> int:
        """Weight version of the decoder's working copies."""
        return self.decoder.version

    @property
    def scale_version(self) -> int:
        """Version of the KV scales in use; 0 without FP8 KV."""
        return 0 if self.scales is None else self.scales.version

    def set_kv_scales(self, scales: KVScales) -> int:
        """Takes KV scales into use between generations and echoes their version.

        Raises ContractError for scales of another shape, not finite or not positive, for an older version than the one in
        use, for other scales under its number, and where the flow has no FP8 KV cache.
        """
        spec, held = self.decoder.spec, self.scales
        if not self.decoder.flow.kv_fp8:
            raise ContractError("the engine was given KV scales, its flow has a BF16 KV cache")
        scales.refuse_unless_usable(spec.num_layers, spec.num_kv_heads)
        if held is not None and scales.version < held.version:
            raise ContractError(
                f"stale KV scales: v{scales.version} was given, v{held.version} is in use already"
            )
        if held is not None and scales.version == held.version and not scales.same_values(held):
            raise ContractError(f"two different KV scales are called v{scales.version}")
        self.scales = scales.to(self.cache.k.device)
        return self.scale_version

    def use(self, decoder: Decoder) -> None:
        """Samples with another decoder from now on, one of the same shape and KV cache. It must be published before the next
        generation, under a version the engine has not had: what is cached of the old decoder is keyed by version."""
        assert decoder.flow.kv_fp8 == self.decoder.flow.kv_fp8, "the cache was made for another KV precision"
        self.decoder, self.runner = decoder, Runner(decoder, self.cache)

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
        expected_scale_version: int | None = None,
        progress: Progress | None = None,
    ) -> list[Completion]:
        """See `rollout.types.Engine.generate`."""
        if self.version != expected_version:
            raise ContractError(
                f"the engine holds weight version {self.version}, version {expected_version} was expected"
            )
        if self.decoder.flow.kv_fp8 and self.scales is None:
            raise ContractError("the flow has an FP8 KV cache but no KV scales were calibrated or published")
        if expected_scale_version not in (None, self.scale_version):
            raise ContractError(
                f"the engine uses KV scales v{self.scale_version}, v{expected_scale_version} was expected"
            )
        self.cache.renew(PrefixKey(self.version, self.decoder.refreshes, self.scale_version))
        budget = self.spec.batched_tokens(gpu=self.decoder.kernels.fused)
        scheduler = Scheduler(self.cache, self.spec.max_running, budget)
        sequences = [s for request in requests for s in scheduler.add(request)]
        try:
            if self._loops(requests):
                self._run_loop(scheduler, seed, step, progress)
            else:
                self._run_steps(scheduler, seed, step, progress)
        except BaseException:  # an interrupt as well: whoever goes on finds an engine with nothing under way
            self.cache.clear()
            self.runner.watch.clear()
            raise
        self.preemptions += scheduler.preemptions
        self.recalled += scheduler.recalled
        assert self.cache.free_pages == self.cache.num_pages, "pages leaked"
        return [s.completion(self.version, self.scale_version) for s in sequences]

    def _run_steps(self, scheduler: Scheduler, seed: int, step: int, progress: Progress | None) -> None:
        """Step by step, with the host in between."""
        finished, total = 0, len(scheduler.waiting)
        while not scheduler.done:
            finished += self._step(scheduler, seed, step)
            if progress is not None:
                progress(finished, total)

    def _loops(self, requests: Sequences[Request]) -> bool:
        """Whether windows of captured steps can serve these requests: on a device, for a dense model, with so many stop
        tokens and recorded ids as fit there."""
        return (
            self.decoder.kernels.fused
            and self.decoder.spec.moe is None
            and not any(len(r.params.stop_token_ids) > MAX_STOPS for r in requests)
            and not any(r.params.room > MAX_KEPT for r in requests)
        )

    def _run_loop(self, scheduler: Scheduler, seed: int, step: int, progress: Progress | None) -> None:
        """Windows of decode steps; the host reads one while the next runs."""
        from lockstep.rollout.decode_loop import DecodeLoop
        from lockstep.rollout.decode_state import DecodeState

        total = len(scheduler.waiting)
        requests = {id(s.group): s.group.request for s in scheduler.waiting}.values()
        longest = max(len(r.prompt_ids) + r.params.max_tokens for r in requests)
        rows, state = self.spec.max_running, self.state
        if state is None or state.decoder is not self.decoder or state.pages < self.cache.pages_for(longest):
            assert isinstance(self.cache, DeviceCache)
            # For all that may still come, since captured steps hold on to the sizes of the block table and of the rotary table.
            most = min(self.decoder.spec.max_position, self.cache.num_pages * PAGE, ROOM)
            longest = max(longest, most)
            self.decoder.model.rope.reserve(longest + 1, self.cache.k.device)
            self.state = state = DecodeState(
                self.decoder, self.cache, rows, longest, self.spec.window, graphs=self.spec.cuda_graphs
            )
        loop = DecodeLoop(
            scheduler, self.runner, state, self.scales, self._finish_reason, seed=seed, step=step
        )
        while not scheduler.done:
            loop.advance()
            if progress is not None:
                progress(loop.finished, total)
        while loop.flights:
            loop.read()
        self.steps += loop.windows * state.window
        self.waited += loop.waited

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
            noise = [s.noise(seed, step) for s in ready]
            rows = torch.stack([s.hidden for s in ready if s.hidden is not None])
            with torch.no_grad():
                drawn = draw(rows, self.decoder.head, [s.group.request.params for s in ready], noise)
            rows_drawn = zip(ready, drawn.tokens, drawn.logprobs, drawn.kept, strict=True)
            for sequence, token, logprob, kept in rows_drawn:
                sequence.take(token, logprob, kept)
                sequence.finish_reason = self._finish_reason(sequence, token)
                if sequence.finish_reason is not None:
                    sequence.routes = self.cache.routes_of(sequence.pages, sequence.computed)
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


def cache_kind(decoder: Decoder, spec: RolloutSpec) -> type[PagedCache]:
    """The cache in the layout that the decoder's kernels read."""
    if not decoder.kernels.fused:
        return PagedCache
    if spec.page_size != PAGE:
        raise ConfigError(
            f"pages of {spec.page_size} tokens",
            where="rollout.page_size",
            why=f"device kernels read pages of {PAGE}, the key step of attention",
            fix=f"set it to {PAGE}",
        )
    return DeviceCache
