"""Captured training passes on a GPU: they do what the same work does when it is launched kernel by kernel, bit for bit, and the
forward has the bits of the pass without padding. Random models of real layer shapes; needs a Hopper GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.bench.attention_backward import packed_runs
from lockstep.bench.random_model import random_decoder
from lockstep.bench.sides import random_masters
from lockstep.kernels.attention_index import Run
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.spec import PRESETS
from lockstep.models.trunk_graph import TrunkGraphs
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.nn.packed import packed_context
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CUDA = torch.device("cuda")
SPECS = {
    name: replace(PRESETS[name], num_layers=2, vocab_size=2048, bos_id=1, eos_ids=(2,))
    for name in ("smollm2-135m", "qwen3-0.6b", "qwen2.5-7b")
}
FLOWS: dict[str, Flow] = {
    "bf16": bf16_flow(),
    "fp8": fp8_flow(),
    "fp8+kv8": fp8_flow(kv_fp8=True),
    "half": fp8_flow(keep_bf16=frozenset({1})),
}
PACKS = (
    ((70, (40, 1, 63)), (33, ()), (300, (48, 48))),
    ((81, (50, 3, 40)), (20, ()), (311, (30, 61))),
    ((1500, ()), (1000, ())),
    ((2200, (100,)),),
    ((128, ()),),
)
"""(prompt, responses to it) of each pack; the first two have one room."""


def pack(parts: Any) -> tuple[list[Run], Tensor]:
    """Runs with shared prompts, and positions."""
    runs = packed_runs(parts)
    return runs, torch.cat([torch.arange(run.position, run.position + run.count) for run in runs])


def decoder_of(name: str, flow: Flow, *, graphs: bool) -> Decoder:
    decoder = random_masters(SPECS[name], flow, select("hopper"))
    decoder.capture(graphs)
    decoder.model.rope.reserve(4096, CUDA)
    return decoder


def pass_of(decoder: Decoder, parts: Any, collector: AmaxCollector | None = None) -> Tensor:
    spec, (runs, positions) = decoder.spec, pack(parts)
    generator = torch.Generator().manual_seed(len(positions))
    ids = torch.randint(spec.vocab_size, (len(positions),), generator=generator).to(CUDA)
    scales = None
    if decoder.flow.kv_fp8:
        shape = (spec.num_layers, spec.num_kv_heads)
        scales = KVScales(torch.full(shape, 0.004, device=CUDA), torch.full(shape, 0.003, device=CUDA), 1)
    index = decoder.kernels.index(runs, spec.query_group, CUDA)
    context = packed_context(positions.to(CUDA), index, decoder.kernels, scales=scales, collector=collector)
    out = decoder.hidden(ids, context)
    targets = torch.randint(spec.vocab_size, (len(positions),), generator=generator).to(CUDA)
    logp, _ = decoder.head.log_probs(out, targets, torch.ones(len(positions), device=CUDA))
    (logp @ torch.randn(len(positions), generator=generator).to(CUDA)).backward()
    return out.detach()


def grads(decoder: Decoder) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "name, flow, checkpointing",
    [*((n, f, False) for n in SPECS for f in FLOWS), ("qwen3-0.6b", "fp8+kv8", True)],
)
def test_it_is_the_pass_kernel_by_kernel(name: str, flow: str, checkpointing: bool) -> None:
    one, captured = (decoder_of(name, FLOWS[flow], graphs=g) for g in (False, True))
    for decoder in (one, captured):
        decoder.checkpointing, decoder.save_fp8 = checkpointing, True
    layers, heads = one.spec.num_layers, one.spec.num_kv_heads
    before: dict[str, Tensor] = {}
    for turn in range(3):
        one.zero_grad(set_to_none=True)
        captured.zero_grad(set_to_none=True)
        for parts in PACKS:
            seen = [AmaxCollector(layers, heads, CUDA) for _ in range(2)]
            expected, found = (pass_of(d, parts, c) for d, c in zip((one, captured), seen, strict=True))
            assert torch.equal(found, expected)
            a, b = (c.read() for c in seen)
            assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v)
            assert (a.saturated, a.elements) == (b.saturated, b.elements)
        expected_grads, found_grads = grads(one), grads(captured)
        assert found_grads.keys() == expected_grads.keys()
        for key, want in expected_grads.items():
            got = found_grads[key]
            if float(want.norm()) > 1e-3 and not key.endswith("k_proj.bias"):
                alike = float(F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0))
                assert alike > 0.999, f"{key}: {alike}"
        if turn:
            assert all(torch.equal(before[n], g) for n, g in found_grads.items()), (
                "the same bits in every run"
            )
        before = found_grads
    graphs = captured.graphs
    assert graphs is not None and len(graphs.passes) == 4
    for one_pass in graphs.passes.values():  # the work itself, over what was put in last
        rows, totals = one_pass.rows, [graphs.totals.parts[id(p)] for p in one_pass.parameters]
        found = []
        for forward, backward in (
            (one_pass.forward, one_pass.backward),
            (one_pass._forward, one_pass._backward),
        ):
            torch._foreach_zero_(totals)
            with torch.no_grad():
                forward()
                out = rows.out_TK.clone()
                backward()
            found.append([out, rows.dh_TK.clone(), *(t.clone() for t in totals)])
        assert all(torch.equal(replayed, done) for replayed, done in zip(*found, strict=True))


@pytest.mark.parametrize("flow", FLOWS)
def test_a_larger_room_changes_no_bit(flow: str) -> None:
    """Whichever packs came before: a run that goes on from a checkpoint has seen others."""
    decoder, more_keys = decoder_of("qwen3-0.6b", FLOWS[flow], graphs=True), ((300, (48,) * 6),)
    rooms, outs, found = [], [], []
    for parts in (PACKS[0], PACKS[0], more_keys, PACKS[0], PACKS[0]):
        decoder.zero_grad(set_to_none=True)
        out = pass_of(decoder, parts)
        (held,) = decoder.graphs.passes.values()  # type: ignore[union-attr]
        rooms.append(held.room)
        if parts is PACKS[0]:
            outs.append(out)
            found.append(grads(decoder))
    assert rooms[0] == rooms[1] and rooms[2] == rooms[3] == rooms[4] and rooms[2].entries > rooms[1].entries
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert all(torch.equal(grad, found[0][name]) for some in found for name, grad in some.items())


def test_a_captured_batch_of_whole_sequences_goes_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the same bits in every run are not asked for: attention's gradient is then cuDNN's, inside the graph too."""
    from lockstep.kernels import attention_library  # needs Triton

    taken: list[str] = []
    right = attention_library._cudnn_grad
    monkeypatch.setattr(attention_library, "_cudnn_grad", lambda *args: taken.append("cudnn") or right(*args))
    one, captured = (decoder_of("qwen3-0.6b", FLOWS["fp8"], graphs=g) for g in (False, True))
    one.deterministic, captured.deterministic = True, False
    batch, ragged = ((512, ()), (512, ())), ((500, ()), (524, ()))
    for parts in (batch, batch, batch, ragged, ragged, ragged, batch):
        for decoder in (one, captured):
            decoder.zero_grad(set_to_none=True)
        expected, before = pass_of(one, parts), len(taken)
        assert torch.equal(pass_of(captured, parts), expected)
        for (name, want), got in zip(grads(one).items(), grads(captured).values(), strict=True):
            alike = float(F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0))
            assert alike > 0.998, f"{name}: {alike}"
        assert parts is batch or len(taken) == before
    layers = captured.spec.num_layers
    assert len(taken) == 2 * layers, "launched once, captured once, replayed twice"
    assert captured.graphs is not None and len(captured.graphs.passes) == 2


def test_an_optimizer_step_is_seen() -> None:
    """Working copies and their transposes are written where captured passes read them."""
    one, captured = (decoder_of("qwen3-0.6b", FLOWS["fp8+kv8"], graphs=g) for g in (False, True))
    for version in (3, 4):
        for decoder in (one, captured):
            pass_of(decoder, PACKS[2])
            with torch.no_grad():
                for parameter in decoder.parameters():
                    parameter.mul_(1.01)
            decoder.zero_grad(set_to_none=True)
            decoder.refresh(version)
        assert torch.equal(pass_of(captured, PACKS[2]), pass_of(one, PACKS[2]))
        for (name, want), got in zip(grads(one).items(), grads(captured).values(), strict=True):
            alike = float(F.cosine_similarity(got.double().flatten(), want.double().flatten(), 0))
            assert alike > 0.9999, f"{name}: {alike}"
    assert captured.graphs is not None and len(captured.graphs.passes) == 1, "nothing has moved"


def test_a_decoder_without_gradient_is_left_alone() -> None:
    decoder = random_decoder(SPECS["qwen3-0.6b"], FLOWS["fp8"], select("hopper"), CUDA)
    decoder.graphs = TrunkGraphs()
    with torch.no_grad():
        runs, positions = pack(PACKS[0])
        index = decoder.kernels.index(runs, decoder.spec.query_group, CUDA)
        decoder.model.rope.reserve(4096, CUDA)
        ids = torch.zeros(len(positions), dtype=torch.long, device=CUDA)
        decoder.hidden(ids, packed_context(positions.to(CUDA), index, decoder.kernels))
    assert not decoder.graphs.passes
