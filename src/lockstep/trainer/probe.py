"""A probe batch: tokens that the engine sampled, scored under any mixture of the trainer's flow and the engine's.

A mixture is a `Flow` like any other (one operand from this side, one from that), so a probe runs the very modules a run does
and nothing is swapped after it was built. Decoders share the run's masters; each makes its own working copies.

Shapes: N trained tokens of all completions, in order. Next: `attribution.py`, which asks the questions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError, ContractError, DataError
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.nn.context import PackedContext
from lockstep.numerics.flow import Flow, FlowPair, Gemm
from lockstep.numerics.formats import ScaleKind
from lockstep.rollout.types import Completion, Request
from lockstep.trainer.checkpoint import Progress
from lockstep.trainer.microbatch import MicroBatch, make_microbatch
from lockstep.trainer.route_replay import routes_of_rows
from lockstep.trainer.sample import Expected, admit
from lockstep.trainer.setup import Parts, sampling_params

Say = Callable[[str], None]


@dataclass(frozen=True)
class ProbeSpec:
    """How much to sample: prompts, completions of each, and tokens of each at most."""

    prompts: int = 4
    samples: int = 2
    tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("prompts", "samples", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", where=f"--{name}")


FLOW_PARTS = ("weights", "activations", "kv", "attention")
"""What a flow says about the forward pass, part by part. FP8 attention needs FP8 keys and values."""


def mixed_flow(flows: FlowPair, on: Collection[str]) -> Flow:
    """The trainer's flow with the `FLOW_PARTS` in `on` from the engine's; one of the two itself where that is the same.

    Raises ValueError when both sides have FP8 linears in different layers: one flow can't say which operand is meant where.
    """
    trainer, rollout = flows.trainer, flows.rollout
    if trainer.is_fp8 and rollout.is_fp8 and trainer.keep_bf16 != rollout.keep_bf16:
        raise ValueError("both sides keep layers in BF16, but not the same ones")
    side = {part: rollout if part in on else trainer for part in FLOW_PARTS}
    gemm = Gemm(side["activations"].fprop.lhs, side["weights"].fprop.rhs)
    keep = trainer.keep_bf16 if trainer.is_fp8 or not gemm.is_fp8 else rollout.keep_bf16
    mixed = replace(
        trainer,
        fprop=gemm,
        keep_bf16=keep,
        kv_fp8=side["kv"].kv_fp8,
        attention_fp8=side["attention"].attention_fp8,
    )
    for own in (trainer, rollout):
        if replace(mixed, name=own.name, dgrad=own.dgrad, wgrad=own.wgrad) == own:
            return own
    return mixed


class LayerwiseKV(PackedContext):
    """A packed context whose keys and values are in FP8 in some layers only (and with them attention, where the flow says so)."""

    def __init__(self, layers: frozenset[int], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.layers, self.all_scales = layers, self.scales

    def attend(
        self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, query_scale: ScaleKind | None = None
    ) -> Tensor:
        """See `AttentionContext`."""
        self.scales = self.all_scales if layer in self.layers else None
        return super().attend(layer, q_THD, k_TGD, v_TGD, query_scale)


class Probe:
    """The probe batch of a run whose weights are published. `rollout_N` is what the engine said of its own tokens."""

    def __init__(self, parts: Parts, progress: Progress, spec: ProbeSpec, say: Say) -> None:
        self.parts, self.flows = parts, parts.flows
        say(
            f"sampling {spec.prompts} prompts x {spec.samples} completions in the engine's flow ({self.flows.rollout.name})"
        )
        self.completions = self._sample(progress, spec)
        self.packed = self._batches(share=True)
        self.rollout_N = torch.cat([m.rollout_N for m in self.packed]).double()
        self._scores: dict[tuple[Any, ...], Tensor] = {}
        self._spare: Decoder | None = None
        say(f"sampled {len(self.completions)} completions, {len(self.rollout_N)} tokens")

    def _sample(self, progress: Progress, spec: ProbeSpec) -> list[Completion]:
        """What the engine makes of the next prompts."""
        parts = self.parts
        params = sampling_params(parts)
        if params.truncated:
            params = replace(params, max_kept=parts.model_spec.vocab_size)
        prompts = parts.stream.take(progress.ordinal, spec.prompts)
        completions = parts.engine.generate(
            [Request(p.ids, progress.ordinal + i, spec.samples, params) for i, p in enumerate(prompts)],
            seed=parts.spec.seed,
            step=progress.step,
            expected_version=parts.engine.version,
        )
        engine, vocabulary = parts.engine, parts.model_spec.vocab_size
        expected = Expected(engine.version, engine.scale_version, vocabulary, routes=parts.replayed)
        kept, dropped = admit(completions, expected)
        if not kept:
            raise DataError(
                "no completion kept the sample contract",
                why=", ".join(f"{k} {v:g}" for k, v in dropped.items()),
            )
        return kept

    def _batches(self, *, share: bool) -> list[MicroBatch]:
        """Completions in order, side by side under the token budget, or each by itself."""
        groups: list[list[Completion]] = [[]]
        room = self.parts.spec.update.max_tokens_per_microbatch
        used = 0
        for completion in self.completions:
            size = len(completion.prompt_ids) + len(completion.token_ids)
            if groups[-1] and (not share or used + size > room):
                groups.append([])
                used = 0
            groups[-1].append(completion)
            used += size
        return [make_microbatch(g, self.parts.group, share_prompts=share) for g in groups]

    @torch.no_grad()
    def score(
        self,
        flow: Flow,
        *,
        kv_layers: frozenset[int] | None = None,
        engine_head: bool = False,
        apart: bool = False,
        full_softmax: bool = False,
        decoder: Decoder | None = None,
    ) -> Tensor:
        """Log-probabilities [N] float64 of the probe's tokens under a flow.

        kv_layers: layers whose keys and values are in FP8, where the flow has that; None means all. engine_head: the engine's
        working copy of the output head. apart: every completion in a forward of its own, prompts repeated. full_softmax:
        whatever truncation kept. decoder: one with this flow and other weights. Raises ContractError when one is not finite.
        """
        key = (flow, kv_layers, engine_head, apart, full_softmax, decoder)
        if key not in self._scores:
            decoder = decoder or self._decoder(flow)
            head = self.parts.engine.decoder.head if engine_head else decoder.head
            parts = []
            for micro in self._batches(share=False) if apart else self.packed:
                hidden = decoder.hidden(micro.ids_T, self._context(micro, decoder, kv_layers))
                mask = None if full_softmax else micro.mask
                rows = hidden[micro.rows_N]
                parts.append(head.log_probs(rows, micro.targets_N, micro.temperature_N, mask)[0])
            logp_N = torch.cat(parts).double()
            if not bool(torch.isfinite(logp_N).all()):
                raise ContractError(f"a log-probability under {flow.describe()} is not finite")
            self._scores[key] = logp_N
        return self._scores[key]

    def _context(
        self, micro: MicroBatch, decoder: Decoder, kv_layers: frozenset[int] | None
    ) -> PackedContext:
        scales = self.parts.engine.scales if decoder.flow.kv_fp8 else None
        layers = frozenset(range(decoder.spec.num_layers)) if kv_layers is None else kv_layers
        routes = routes_of_rows(micro.routes_TLk, decoder.spec)
        return LayerwiseKV(
            layers, micro.positions_T, micro.index, decoder.kernels, scales=scales, routes=routes
        )

    def _decoder(self, flow: Flow) -> Decoder:
        """The run's own decoder where it has this flow, else one over the same masters; only the last of those is kept."""
        own = [
            d for d in (self.parts.decoder, self.parts.engine.decoder, self._spare) if d and d.flow == flow
        ]
        if own:
            return own[0]
        self._spare = None
        kernels = self.parts.decoder.kernels
        # The reference takes activations of any type, other kernels need not.
        if flow.activation != self.parts.decoder.flow.activation:
            kernels = select("exact" if kernels.exact else "reference")
        spare = Decoder(self.parts.model_spec, flow, kernels)
        spare.share_masters(self.parts.decoder)
        spare.refresh(self.parts.decoder.version)
        self._spare = spare
        return spare
