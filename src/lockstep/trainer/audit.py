"""The audit: does the contract hold for this model, on this machine, today?

Three questions for each flow. Do the samples of the engine keep their bits when the schedule changes (batch, order, chunked
prefill, pages, preemption, prompts shared or not)? Are their log-probabilities the training forward's, packed in several
ways? And does every operation by itself give a row the same bits alone and in company? The last one names the culprit when
the first two fail; to show that it can, a violation may be planted.

Next: `../kernels/rowwise.py` for how the row law is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.kernels.reference import PackedWeight, ReferenceKernels
from lockstep.kernels.rowwise import row_matmul
from lockstep.kernels.table import Kernels, select
from lockstep.models.checkpoint import load_config
from lockstep.models.decoder import Decoder
from lockstep.models.tokenizer import load_tokenizer
from lockstep.nn.kv_scales import AmaxCollector
from lockstep.numerics.flow import Flow, FlowSpec, build_flows
from lockstep.numerics.formats import Operand
from lockstep.numerics.quantize import Quantized, quantize
from lockstep.rollout.calibration import prompt_context
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request, SamplingParams
from lockstep.trainer.microbatch import make_microbatch
from lockstep.trainer.setup import calibrate, load_masters, load_prompts, prepare_model
from lockstep.trainer.spec import RunSpec

PROMPTS, SAMPLES, NEW_TOKENS = 4, 3, 12


@dataclass(frozen=True)
class Check:
    """One equality. `compared` values, of which `different` had other bits; `culprit` names where it began."""

    flow: str
    name: str
    compared: int
    different: int
    culprit: str = ""

    @property
    def passed(self) -> bool:
        return self.compared > 0 and self.different == 0

    def line(self) -> str:
        """For people."""
        verdict = "equal" if self.passed else f"{self.different} DIFFER"
        where = f"  <- {self.culprit}" if self.culprit else ""
        return f"{self.flow:14} {self.name:44} {self.compared:10,} values  {verdict}{where}"


@dataclass
class AuditReport:
    """All checks."""

    checks: list[Check] = field(default_factory=list)
    planted: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(c.passed for c in self.checks)

    def lines(self) -> list[str]:
        """A table and a verdict."""
        failed = [c for c in self.checks if not c.passed]
        total = sum(c.compared for c in self.checks)
        verdict = f"contract holds: {len(self.checks)} equalities, {total:,} values, no bit differs"
        if failed:
            culprit = next((c.culprit for c in failed if c.culprit), failed[0].name)
            verdict = f"contract BROKEN in {len(failed)} of {len(self.checks)} equalities; first: {culprit}"
        planted = [f"planted violation: {self.planted}"] if self.planted else []
        return [*planted, *(c.line() for c in self.checks), verdict]


class PerTensorActivation(ReferenceKernels):
    """A planted violation: one scale for a whole activation tensor, so a row depends on its batch (field failure 51)."""

    def quantize_rows(self, x_TK: Tensor, operand: Operand) -> Quantized:
        """1x128 codes under the scale of the largest group."""
        row = quantize(x_TK, operand)
        scale = row.scale.max().expand_as(row.scale).contiguous()
        codes = quantize(row.dequantize() / scale.max(), operand).dequantize().clamp(-448, 448)
        return Quantized(codes.to(row.codes.dtype), scale, row.group)


class SplitK(ReferenceKernels):
    """A planted violation: few rows are summed in two halves of K, as libraries do to fill a chip (cuBLASLt at M <= 32)."""

    def linear(self, x_TK: Quantized | Tensor, weight: PackedWeight) -> Tensor:
        """A product whose order of summation changes with the number of rows."""
        x = x_TK.dequantize() if isinstance(x_TK, Quantized) else x_TK
        if len(x) >= 16 or weight.dense is None:
            return super().linear(x_TK, weight)
        half = x.shape[1] // 2
        parts = [
            row_matmul(x[:, s], weight.dense[:, s].contiguous()) for s in (slice(half), slice(half, None))
        ]
        return (parts[0] + parts[1]).float()


PLANTS: dict[str, type[ReferenceKernels]] = {
    "per-tensor-activation": PerTensorActivation,
    "split-k": SplitK,
}


def run_audit(
    spec: RunSpec,
    flows: Sequence[str],
    plant: str | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """Audits the model of a run under the named flows (`bf16`, `fp8`, each with `+kv8` for an FP8 KV cache or `+kv8+attn8`
    for FP8 attention over it)."""
    path = prepare_model(spec.model)
    model_spec = load_config(path)
    tokenizer = load_tokenizer(path, model_spec)
    prompts, _ = load_prompts(spec.data, tokenizer, spec.seed)
    if plant is not None and plant not in PLANTS:
        raise ConfigError(f"unknown violation {plant!r}", where="--plant", fix=f"one of {', '.join(PLANTS)}")
    kernels = PLANTS[plant](exact=spec.kernels == "exact") if plant else select(spec.kernels)
    report = AuditReport(planted=plant or "")
    for name in flows:
        flow = audit_flow(name, spec.flow, model_spec.num_layers)
        decoder = Decoder(model_spec, flow, kernels)
        load_masters(decoder, path)
        decoder.refresh(1)
        audit = FlowAudit(name, decoder, [p.ids for p in prompts[:PROMPTS]], spec)
        for check in audit.checks():
            report.checks.append(check)
            say(check.line())
    return report


def audit_flow(name: str, spec: FlowSpec, num_layers: int) -> Flow:
    """The flow a name such as `fp8+kv8` stands for, with the run's other choices."""
    base, _, cache = name.partition("+")
    if base not in ("bf16", "fp8") or cache not in ("", "kv8", "kv8+attn8"):
        raise ConfigError(
            f"unknown flow {name!r}", where="--flows", fix="bf16 or fp8, with +kv8 or +kv8+attn8 behind it"
        )
    kv, attention = "fp8" if cache else "bf16", "fp8" if cache == "kv8+attn8" else "bf16"
    chosen = replace(spec, name=base, kv=kv, attention=attention)  # type: ignore[arg-type]
    return build_flows(chosen, num_layers).trainer


class FlowAudit:
    """All checks of one flow."""

    def __init__(self, name: str, decoder: Decoder, prompts: list[tuple[int, ...]], spec: RunSpec) -> None:
        self.name, self.decoder, self.prompts, self.seed = name, decoder, prompts, spec.seed
        self.group = decoder.spec.query_group
        self.scales = calibrate(decoder, prompts, spec.flow, 1) if decoder.flow.kv_fp8 else None
        self.params = SamplingParams(NEW_TOKENS, spec.rollout.temperature or 1.0)
        longest = max(len(p) for p in prompts) + NEW_TOKENS
        everything = PROMPTS * (SAMPLES + 1) * (longest + 64)
        base = RolloutSpec(max_running=PROMPTS * SAMPLES)
        self.schedules: dict[str, tuple[RolloutSpec, int]] = {
            "all together": (base, everything),
            "three at a time, prefill in chunks": (
                replace(base, max_running=3, max_batched_tokens=5),
                everything,
            ),
            "pages of 7 tokens": (replace(base, page_size=7), everything),
            "memory for little more than one (preemption)": (replace(base, page_size=4), longest + 12),
        }

    def checks(self) -> Iterator[Check]:
        """Operations first, so that what fails later has a name."""
        operation = self.operations()
        yield operation
        samples = {name: self.generate(*how) for name, how in self.schedules.items()}
        first = samples["all together"]
        for name, other in samples.items():
            yield self.same_samples(f"samples: {name}", first, other, operation.culprit)
        yield self.same_samples("samples: one prompt by one", first, self.one_by_one(), operation.culprit)
        packings: dict[str, tuple[list[Completion], bool]] = {
            "training forward, prompts shared": (first, True),
            "training forward, prompts repeated": (first, False),
            "training forward, reversed order": (first[::-1], False),
        }
        for name, (completions, share) in packings.items():
            yield self.same_log_probs(name, [completions], share, operation.culprit)
        yield self.same_log_probs(
            "training forward, each sample alone", [[c] for c in first], True, operation.culprit
        )

    def generate(self, rollout: RolloutSpec, cache_tokens: int, only: int | None = None) -> list[Completion]:
        """Samples under one schedule."""
        engine = EmbeddedEngine(self.decoder, rollout, cache_tokens=cache_tokens)
        if self.scales is not None:
            engine.set_kv_scales(self.scales)
        requests = [
            Request(p, i, SAMPLES, self.params) for i, p in enumerate(self.prompts) if only in (None, i)
        ]
        return engine.generate(requests, seed=self.seed, step=0, expected_version=1)

    def one_by_one(self) -> list[Completion]:
        """The same samples, each prompt in an engine of its own."""
        how = self.schedules["all together"]
        return [c for i in range(len(self.prompts)) for c in self.generate(*how, only=i)]

    def same_samples(
        self, name: str, first: list[Completion], other: list[Completion], culprit: str
    ) -> Check:
        """Token ids and log-probabilities of both."""
        pairs = list(zip(first, other, strict=True))
        compared = sum(len(a.token_ids) for a, _ in pairs)
        different = 0
        for a, b in pairs:
            same = sum(
                x == y
                for x, y in zip(zip(a.token_ids, a.logprobs), zip(b.token_ids, b.logprobs), strict=False)
            )
            different += max(len(a.token_ids), len(b.token_ids)) - same
        return Check(self.name, name, compared, different, culprit if different else "")

    @torch.no_grad()
    def same_log_probs(self, name: str, batches: list[list[Completion]], share: bool, culprit: str) -> Check:
        """The training forward's log-probabilities against the rollout's."""
        compared = different = 0
        for completions in batches:
            micro = make_microbatch(completions, self.group, share_prompts=share)
            logp_N, _ = micro.log_probs(self.decoder, self.scales)
            compared += logp_N.numel()
            different += int((logp_N != micro.rollout_N).sum())
        return Check(self.name, name, compared, different, culprit if different else "")

    @torch.no_grad()
    def operations(self) -> Check:
        """Every operation's rows: prompts side by side against each prompt, and each first token, alone."""
        together = self.record(self.prompts)
        compared = different = 0
        culprit = ""
        starts = torch.tensor([0, *map(len, self.prompts)]).cumsum(0).tolist()
        pieces = [(s, p) for s, p in zip(starts, self.prompts, strict=False)]
        for start, tokens in [*pieces, *((s, p[:1]) for s, p in pieces)]:
            rows = slice(start, start + len(tokens))
            for (name, many), (_, alone) in zip(together, self.record([tokens]), strict=True):
                bad = int((many[rows] != alone).sum())
                compared += alone.numel()
                different += bad
                culprit = culprit or (name if bad else "")
        return Check(self.name, "operations, row by row", compared, different, culprit)

    def record(self, prompts: list[tuple[int, ...]]) -> list[tuple[str, Tensor]]:
        """(name, value by row) of every operation of a forward pass, in order."""
        tape: list[tuple[str, Tensor]] = []
        collector = AmaxCollector(self.decoder.spec.num_layers, self.decoder.spec.num_kv_heads)
        ids, context = prompt_context(prompts, self.group, self.decoder.kernels, collector)
        context.scales = self.scales
        with _taped(self.decoder.kernels, tape):
            hidden = self.decoder.hidden(ids, context)
            logits = self.decoder.head.logits(hidden, torch.ones(len(hidden)))
            tape.append(("log_normalizer (output head)", self.decoder.kernels.log_normalizer(logits)))
        return tape


class _taped:
    """Notes every row-wise operation of a backend while the block runs.

    Between the choice of experts and their combination rows are sorted by expert, so that operations in company and alone
    can't be compared in place; what the experts gave is noted by row, as one operation, when it is combined.
    """

    OPERATIONS: tuple[str, ...] = (
        *("quantize_rows", "linear", "rms_norm", "rope", "swiglu", "quantize_kv", "attention"),
        *("router_scores", "top_experts", "combine"),
    )

    def __init__(self, kernels: Kernels, tape: list[tuple[str, Tensor]]) -> None:
        self.kernels, self.tape = kernels, tape
        self.sorted_rows = False

    def __enter__(self) -> None:
        for name in self.OPERATIONS:
            setattr(self.kernels, name, self._noted(name, getattr(self.kernels, name)))

    def __exit__(self, *_: object) -> None:
        for name in self.OPERATIONS:
            delattr(self.kernels, name)

    def _noted(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if name == "combine":
                self.sorted_rows = False
                self._note("experts", args[0])
            result = operation(*args)
            if not self.sorted_rows:
                self._note(name, result[0] if isinstance(result, tuple) else result)
            self.sorted_rows = self.sorted_rows or name == "top_experts"
            return result

        return run

    def _note(self, name: str, value: Quantized | Tensor) -> None:
        value = value.dequantize() if isinstance(value, Quantized) else value
        number = sum(n.startswith(f"{name} (") for n, _ in self.tape) + 1
        self.tape.append((f"{name} (call {number} of the forward pass)", value.float()))
