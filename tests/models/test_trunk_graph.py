"""A training pass over fixed storage against the one that is launched layer by layer. On a CPU the captured work is done again
instead of replayed: what is tested here is what goes in and comes out. `test_trunk_graph_gpu.py` has the graphs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.bench.attention_backward import packed_runs
from lockstep.data.packing import GroupLengths, pack
from lockstep.kernels.attention_index import Run, build_index
from lockstep.kernels.packed_index import Room
from lockstep.models import trunk_graph
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.models.trunk_graph import padded_rows, padded_runs
from lockstep.nn.device_context import DevicePacked
from lockstep.nn.kv_scales import AmaxCollector, KVScales
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow

SPECS = {
    "qwen2": ModelSpec("qwen2", 131, 256, 384, 2, 4, 2, 64, attention_bias=True),
    "qwen3": ModelSpec("qwen3", 131, 128, 256, 2, 2, 1, 128, qk_norm=True, tie_embeddings=True),
}
FLOWS = {"bf16": bf16_flow(), "fp8": fp8_flow(), "fp8+kv8": fp8_flow(kv_fp8=True)}
PACKS = ((70, 1, 33), (90, 8), (64, 64), (200, 30))
"""Three of one room, 128 rows, the third without padding; and a larger one."""


class Index:
    """Runs, and the reference's index of them."""

    def __init__(self, group: int, runs: Sequence[Run] = ()) -> None:
        self.group, self.runs, self.fills = group, tuple(runs), 0
        self.inner = build_index(runs, group) if runs else None

    def fill(self, runs: Sequence[Run]) -> None:
        self.inner, self.fills = build_index(runs, self.group), self.fills + 1


@pytest.fixture
def kernels(fused: SimpleNamespace) -> Any:
    class Kernels(fused.Kernels):  # type: ignore[name-defined]
        made: list[Index] = []

        def static_index(self, room: Room, group: int, device: torch.device) -> Index:
            self.made.append(Index(group))
            return self.made[-1]

        def ready(self, weight: Any) -> None:
            self.note("ready")

        def attention(self, q: Tensor, k: Tensor, v: Tensor, index: Any, *form: Any) -> Any:
            return super().attention(q, k, v, index.inner, *form)

        def attention_grad(self, *tensors: Any, **options: Any) -> Any:
            return super().attention_grad(*tensors[:6], tensors[6].inner, *tensors[7:], **options)

    made = Kernels()
    made.made = []
    return made


def decoder_of(toy: SimpleNamespace, spec: ModelSpec, flow: Flow, kernels: Any, *, graphs: bool) -> Decoder:
    decoder = Decoder(spec, flow, kernels)
    decoder.load_state_dict(toy.random_weights(spec), strict=True)
    decoder.refresh(1)
    decoder.model.rope.reserve(512, torch.device("cpu"))
    decoder.capture(graphs)
    return decoder


def pass_of(
    toy: SimpleNamespace, decoder: Decoder, lengths: Sequence[int], collector: AmaxCollector | None = None
) -> Tensor:
    """Hidden states of a pack of random tokens, after the backward pass of some of their log-probabilities."""
    out = forward(toy, decoder, lengths, collector)
    generator = torch.Generator().manual_seed(len(out))
    targets = torch.randint(decoder.spec.vocab_size, (len(out),), generator=generator)
    logp, _ = decoder.head.log_probs(out, targets, torch.ones(len(out)))
    (logp @ torch.randn(len(out), generator=generator)).backward()
    return out.detach()


def forward(
    toy: SimpleNamespace, decoder: Decoder, lengths: Sequence[int], collector: AmaxCollector | None = None
) -> Tensor:
    spec, starts = decoder.spec, [sum(lengths[:i]) for i in range(len(lengths))]
    runs = [Run(s, n, 0, torch.arange(s, s + n)) for s, n in zip(starts, lengths, strict=True)]
    scales = None
    if decoder.flow.kv_fp8:
        shape = (spec.num_layers, spec.num_kv_heads)
        scales = KVScales(torch.full(shape, 0.004), torch.full(shape, 0.003), 1)
    context = DevicePacked(
        toy.positions(lengths),
        Index(spec.query_group, runs),
        scales,
        collector=collector,  # type: ignore[arg-type]
    )
    return decoder.hidden(toy.random_ids(spec, lengths), context)  # type: ignore[arg-type]


def grads(decoder: Decoder) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_is_the_pass_layer_by_layer(
    toy: SimpleNamespace, kernels: Any, spec: ModelSpec, flow: Flow, checkpointing: bool
) -> None:
    one, captured = (decoder_of(toy, spec, flow, kernels, graphs=g) for g in (False, True))
    one.checkpointing = captured.checkpointing = checkpointing
    for step in range(2):
        one.zero_grad(set_to_none=True)
        captured.zero_grad(set_to_none=True)
        for lengths in PACKS:
            seen = [AmaxCollector(spec.num_layers, spec.num_kv_heads) for _ in range(2)]
            expected, found = (
                pass_of(toy, d, lengths, c) for d, c in zip((one, captured), seen, strict=True)
            )
            assert torch.equal(found, expected)
            a, b = (c.read() for c in seen)
            assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v)
            assert (a.saturated, a.elements) == (b.saturated, b.elements)
        assert flow.kv_fp8 == (a.elements > 0)
        expected_grads, found_grads = grads(one), grads(captured)
        assert found_grads.keys() == expected_grads.keys()
        for name, want in expected_grads.items():
            if float(want.norm()) > 1e-3:
                # Rows of padding are zeros but for a bias, and then they share a group of columns with the last rows.
                least = 0.999 if spec.attention_bias and flow.is_fp8 else 0.99999
                alike = F.cosine_similarity(found_grads[name].flatten(), want.flatten(), 0)
                assert alike > least and abs(float(found_grads[name].norm() / want.norm()) - 1) < 3e-3, name
        if step == 0:
            first = found_grads
    assert all(torch.equal(first[n], g) for n, g in found_grads.items()), "a step begins at zero"
    assert captured.graphs is not None and len(captured.graphs.passes) == 2
    # The larger room made the first one leave, which came back.
    assert [index.fills for index in kernels.made] == [3, 2, 3]


def test_gradients_that_were_there_stay(toy: SimpleNamespace, kernels: Any) -> None:
    decoder = decoder_of(toy, SPECS["qwen3"], FLOWS["fp8"], kernels, graphs=True)
    pass_of(toy, decoder, PACKS[0])
    alone = grads(decoder)
    decoder.zero_grad(set_to_none=True)
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    pass_of(toy, decoder, PACKS[0])
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, alone[name] + 1, rtol=1e-4, atol=1e-5, msg=name)


def test_embedding_and_head_add_in_place(toy: SimpleNamespace, kernels: Any) -> None:
    """To the same tensor, for whoever looks at it between two micro-batches, tied or not."""
    for spec in SPECS.values():
        decoder = decoder_of(toy, spec, FLOWS["bf16"], kernels, graphs=True)
        pass_of(toy, decoder, PACKS[0])
        tables = {decoder.model.embed_tokens, decoder.head}
        held = [table.weight.grad for table in tables]
        before = [grad.clone() for grad in held if grad is not None]
        pass_of(toy, decoder, PACKS[0])
        assert len(tables) == (1 if spec.tie_embeddings else 2) == len(before)
        for table, grad, once in zip(tables, held, before, strict=True):
            assert table.weight.grad is grad and grad is not None
            torch.testing.assert_close(grad, 2 * once, rtol=1e-4, atol=1e-5)
        decoder.zero_grad(set_to_none=True)
        assert all(table.weight.grad is None for table in tables)


def test_gradients_that_are_kept_survive_others(toy: SimpleNamespace, kernels: Any) -> None:
    decoder = decoder_of(toy, SPECS["qwen3"], FLOWS["fp8"], kernels, graphs=True)
    pass_of(toy, decoder, PACKS[0])
    kept, expected = {n: p.grad for n, p in decoder.named_parameters()}, grads(decoder)
    for parameter in decoder.parameters():
        parameter.grad = None
    with decoder.uncaptured():
        pass_of(toy, decoder, PACKS[1])
    other = grads(decoder)
    for name, parameter in decoder.named_parameters():
        parameter.grad = kept[name]
        assert parameter.grad is not None and torch.equal(parameter.grad, expected[name])
        assert not torch.equal(other[name], expected[name])
    pass_of(toy, decoder, PACKS[1])
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is kept[name] and parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected[name] + other[name], rtol=1e-3, atol=1e-4)


def test_frozen_parameters_get_none(toy: SimpleNamespace, kernels: Any) -> None:
    decoder = decoder_of(toy, SPECS["qwen3"], FLOWS["fp8"], kernels, graphs=True)
    decoder.model.embed_tokens.weight.requires_grad_(False)
    decoder.model.layers[0].requires_grad_(False)
    pass_of(toy, decoder, PACKS[0])
    expected = {n for n, p in decoder.named_parameters() if p.requires_grad}
    assert set(grads(decoder)) == expected and "model.layers.1.mlp.up_proj.weight" in expected


def test_the_next_version_is_read(toy: SimpleNamespace, kernels: Any) -> None:
    """Working copies are written in place, so a captured pass reads the new ones; one that moved is captured anew."""
    one, captured = (decoder_of(toy, SPECS["qwen3"], FLOWS["fp8"], kernels, graphs=g) for g in (False, True))
    pass_of(toy, captured, PACKS[0])
    with torch.no_grad():
        for decoder in (one, captured):
            for parameter in decoder.parameters():
                parameter.mul_(1.25)
            decoder.refresh(2)
    assert torch.equal(forward(toy, captured, PACKS[0]), forward(toy, one, PACKS[0]))


def test_two_passes_at_once_are_refused(toy: SimpleNamespace, kernels: Any) -> None:
    decoder = decoder_of(toy, SPECS["qwen3"], FLOWS["bf16"], kernels, graphs=True)
    first, second = forward(toy, decoder, PACKS[0]), forward(toy, decoder, PACKS[3])
    second.sum().backward()
    with pytest.raises(RuntimeError, match="took the place of this one"):
        first.sum().backward()


def test_long_packs_are_launched_one_by_one(
    toy: SimpleNamespace, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trunk_graph, "MOST_ROWS", 150)
    decoder = decoder_of(toy, SPECS["qwen3"], FLOWS["bf16"], kernels, graphs=True)
    pass_of(toy, decoder, PACKS[3])
    assert decoder.graphs is not None and not decoder.graphs.passes and decoder.graphs.launched == 1
    for launched in (2, 2, 2):
        pass_of(toy, decoder, PACKS[0])
        assert len(decoder.graphs.passes) == 1 and decoder.graphs.launched == launched
    with torch.no_grad():
        forward(toy, decoder, PACKS[1])
    assert kernels.made[-1].fills == 3, "without gradient nothing goes through it"


def captures(
    toy: SimpleNamespace, decoder: Decoder, table: Sequence[tuple[Any, Any]], noted: list[int]
) -> list[list[int]]:
    """What was noted in each of these passes."""
    found = []
    for lengths, _ in table:
        noted.clear()
        pass_of(toy, decoder, lengths)
        found.append(list(noted))
    return found


def test_what_is_captured_when(toy: SimpleNamespace, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A room that comes again, once; what is larger than all captured before it takes their memory."""
    captured: list[int] = []

    def graph(work: Any, pool: Any) -> Any:
        captured.append(len(work.__self__.rows.h_TK))
        return lambda: work()

    monkeypatch.setattr(trunk_graph, "_graph", graph)
    decoder = decoder_of(toy, SPECS["qwen3"], FLOWS["bf16"], kernels, graphs=True)
    small, large = (128,), (200, 30)
    table = (
        (large, []),
        (small, []),
        (small, [128, 128]),
        (small, []),
        (large, [256, 256]),
        (large, []),
        (small, [128, 128]),
        (small, []),
    )
    assert captures(toy, decoder, table, captured) == [expected for _, expected in table]


def test_rare_rooms_are_forgotten(
    toy: SimpleNamespace, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trunk_graph, "MOST_ROOMS", 2)
    decoder = decoder_of(toy, SPECS["qwen3"], FLOWS["bf16"], kernels, graphs=True)
    for rows in (384, 128, 384, 256):
        pass_of(toy, decoder, (rows,))
    assert decoder.graphs is not None
    assert [len(p.rows.h_TK) for p in decoder.graphs.passes.values()] == [384, 256]


def test_a_room_grows_for_a_pack_that_it_does_not_hold(toy: SimpleNamespace, kernels: Any) -> None:
    """The larger one takes its place, and holds what the smaller did."""
    one, captured = (decoder_of(toy, SPECS["qwen3"], FLOWS["fp8"], kernels, graphs=g) for g in (False, True))
    few, many = (70, 1, 33), (6,) * 20
    for lengths, made in ((few, 1), (many, 2), (few, 2), (many, 2)):
        assert torch.equal(pass_of(toy, captured, lengths), pass_of(toy, one, lengths))
        assert len(kernels.made) == made
        (held,) = captured.graphs.passes.values()  # type: ignore[union-attr]
        assert held.room.runs == (16 if made == 1 else 32)


def test_a_pool_without_graphs_is_not_used_again(
    toy: SimpleNamespace, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch ends a capture into one, where something of it is still held."""
    new, pools = iter(range(9)), []
    monkeypatch.setattr(trunk_graph, "_new_pool", lambda: next(new))
    monkeypatch.setattr(trunk_graph, "_graph", lambda work, pool: pools.append(pool) or work)
    decoder = decoder_of(toy, SPECS["qwen3"], FLOWS["fp8"], kernels, graphs=True)
    few, many, less = (70, 1, 33), (6,) * 20, (40,) * 9
    table = (
        (few, []),
        (few, [0, 0]),
        (many, []),
        (many, [1, 1]),
        (less, []),
        (less, [2, 2]),
        (few, []),
        (few, [2, 2]),
    )
    assert captures(toy, decoder, table, pools) == [expected for _, expected in table]


@pytest.mark.parametrize(("budget", "mean"), [(4096, 200), (8192, 800)])
def test_samples_of_any_lengths_need_few_rooms(
    toy: SimpleNamespace, kernels: Any, monkeypatch: pytest.MonkeyPatch, budget: int, mean: int
) -> None:
    """What is launched kernel by kernel makes a GPU wait, and a capture takes as long: both have to be rare."""
    made: list[Any] = []
    captures: list[int] = []

    class Small(trunk_graph.CapturedPass):
        def __init__(self, graphs: Any, decoder: Decoder, room: Room, context: Any, rows: Any) -> None:
            self.room, self.rows, self.uses = room, rows, 0
            made.append(self)

        def capture(self, pool: Any) -> None:
            captures.append(self.room.rows)

        def release(self) -> None:
            pass

    monkeypatch.setattr(trunk_graph, "CapturedPass", Small)
    decoder = decoder_of(toy, SPECS["qwen3"], FLOWS["bf16"], kernels, graphs=True)
    graphs, dice = decoder.graphs, random.Random(0)
    assert graphs is not None
    context, first_uses, packs = DevicePacked(torch.zeros(0), None), [], 0  # type: ignore[arg-type]
    for step in range(20):
        lengths = [min(3000, 1 + int(dice.lognormvariate(math.log(mean), 0.6))) for _ in range(256)]
        groups = [GroupLengths(dice.randint(80, 250), tuple(lengths[i : i + 8])) for i in range(0, 256, 8)]
        bins = pack(groups, budget, share_prompt=True)
        before = len(made)
        for members in bins:
            parts = {n // 8: [lengths[m] for m in members if m // 8 == n // 8] for n in members}
            runs = packed_runs([(groups[g].prompt, responses) for g, responses in parts.items()])
            rows = sum(run.count for run in runs)
            found = graphs._pass_for(decoder, padded_runs(tuple(runs), rows), context, torch.zeros(rows, 1))
            assert found.room.holds(Room.of(padded_runs(tuple(runs), rows)))
        if step >= 10:
            packs += len(bins)
            first_uses.append(len(made) - before)
    assert sum(first_uses) <= 0.04 * packs, f"{sum(first_uses)} of {packs}"
    assert len(captures) <= len(made) <= 60


def test_few_rooms() -> None:
    assert [padded_rows(n) for n in (1, 128, 129, 4095, 4096, 4097, 6141, 8192)] == [
        128, 128, 256, 4096, 4096, 4352, 6144, 8192,
    ]  # fmt: skip
    assert all(padded_rows(n) - n <= max(n // 16, 127) for n in range(1, 20000, 37))
    runs = (Run(0, 100, 0, torch.arange(100)),)
    assert padded_runs(runs, 128) is runs
    (_, more) = padded_runs(runs, 100)
    assert (more.row, more.count, more.position, more.slots.tolist()) == (100, 28, 0, list(range(100, 128)))
