"""The audit: does the contract hold for this model, on this machine, today?

Three questions for each flow. Do the samples of the engine keep their bits when the schedule changes (batch, order, chunked
prefill, pages, preemption, prompts shared or not)? Are their log-probabilities the training forward's, packed in several
ways? And does every operation by itself give a row the same bits alone and in company? The last one names the culprit when
the first two fail; to show that it can, a violation may be planted.

Next: `audit_flow.py` for the questions, `audit_device.py` for a GPU's, `../kernels/rowwise.py` for how the row law is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from lockstep.errors import ConfigError
from lockstep.kernels.table import Kernels, device_of, refuse_missing, select
from lockstep.models.build import empty_decoder
from lockstep.models.checkpoint import load_config
from lockstep.models.decoder import Decoder
from lockstep.models.tokenizer import load_tokenizer
from lockstep.numerics.flow import Flow, FlowSpec, build_flows
from lockstep.trainer.audit_device import DeviceAudit, lengthened
from lockstep.trainer.audit_flow import PROMPTS, FlowAudit
from lockstep.trainer.audit_report import AuditReport, Check
from lockstep.trainer.backend import refuse_unsupported
from lockstep.trainer.plants import PLANTS, planted
from lockstep.trainer.recipes import prepare_model
from lockstep.trainer.setup import calibrate, load_masters, load_prompts
from lockstep.trainer.spec import RunSpec

__all__ = ["PLANTS", "AuditReport", "Check", "audit_decoder", "audit_flow", "run_audit", "told"]


def run_audit(
    spec: RunSpec,
    flows: Sequence[str],
    plant: str | None = None,
    *,
    say: Callable[[str], None] = lambda _: None,
    kernels: Kernels | None = None,
) -> AuditReport:
    """Audits the model of a run under the named flows (`bf16`, `fp8`, each with `+kv8` for an FP8 KV cache or `+kv8+attn8`
    for FP8 attention over it). kernels: those to use instead of making the run's."""
    refuse_missing(spec.kernels)
    path = prepare_model(spec.model)
    model_spec = load_config(path)
    tokenizer = load_tokenizer(path, model_spec)
    prompts, _ = load_prompts(spec.data, tokenizer, spec.seed)
    if kernels is None:
        kernels = select(spec.kernels, dense=model_spec.moe is None)
        if plant is not None:
            kernels = planted(plant, exact=kernels.exact, hopper=kernels.fused)
    ids = [p.ids for p in prompts[:PROMPTS]]
    ids = lengthened(ids) if kernels.fused else ids
    report = AuditReport(planted=plant or "")
    for name in flows:
        flow = audit_flow(name, spec.flow, model_spec.num_layers)
        refuse_unsupported(kernels, model_spec, flow)
        decoder = empty_decoder(model_spec, flow, kernels, device_of(kernels))
        load_masters(decoder, path)
        decoder.refresh(1)
        temperature = spec.rollout.temperature or 1.0
        checks = audit_decoder(name, decoder, ids, spec.flow, seed=spec.seed, temperature=temperature)
        report.checks += told(checks, say)
    return report


def told(checks: Iterable[Check], say: Callable[[str], None]) -> Iterator[Check]:
    """The checks, each said as it ends, with the seconds that it took."""
    begun = time.perf_counter()
    for check in checks:
        now = time.perf_counter()
        say(f"{check.line()}  {now - begun:6.1f} s")
        begun = now
        yield check


def audit_decoder(
    name: str,
    decoder: Decoder,
    prompts: Sequence[tuple[int, ...]],
    flow: FlowSpec,
    *,
    seed: int = 0,
    temperature: float = 1.0,
) -> Iterator[Check]:
    """The checks of one flow, on a decoder whose version is 1: sized for the device that its kernels work on."""
    scales = calibrate(decoder, prompts, flow, 1) if decoder.flow.kv_fp8 else None
    kind = DeviceAudit if decoder.kernels.fused else FlowAudit
    yield from kind(name, decoder, prompts, scales, seed=seed, temperature=temperature).checks()


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
