"""The mixture of experts against a plain one in float64, its row law, and its routes: recorded, replayed, never quantized."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.kernels.reference import ReferenceKernels
from lockstep.kernels.reference_moe import combine, router_scores, top_experts
from lockstep.nn.linear import Linear
from lockstep.nn.moe import MoE, by_expert
from lockstep.nn.routes import ExpertLoad, Routes
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.numerics.formats import row_groups, square_blocks
from lockstep.numerics.quantize import quantize

HIDDEN, INNER, EXPERTS, COUNT = 160, 72, 7, 3
FLOWS = {
    "bf16": bf16_flow(),
    "fp8": fp8_flow(),
    "fp8-pow2": fp8_flow(scale="pow2"),
    "fp8-kept": fp8_flow(keep_bf16=frozenset({0})),
}


def float32(flow: Flow) -> Flow:
    return dataclasses.replace(flow, activation=torch.float32)


def make(flow: Flow, *, exact: bool = False, normalize: bool = True, seed: int = 0) -> MoE:
    """A refreshed module whose weights BF16 holds exactly."""
    module = MoE(
        hidden=HIDDEN,
        intermediate=INNER,
        experts=EXPERTS,
        count=COUNT,
        normalize=normalize,
        flow=flow,
        layer=0,
        kernels=ReferenceKernels(exact=exact),
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_((torch.randn(p.shape, generator=generator) * p.shape[1] ** -0.5).bfloat16())
    refresh(module)
    return module


def refresh(module: MoE) -> None:
    with torch.no_grad():
        module.gate.refresh("gate.weight")
        for m in module.modules():
            if isinstance(m, Linear):
                m.refresh("weight")


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(count, HIDDEN, generator=generator).bfloat16().to(dtype)


def rounded(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands as the FP8 flow multiplies them, gradients passing straight through."""
    pairs = ((x, row_groups("fp32")), (w, square_blocks("fp32")))
    x, w = (t + (quantize(t.detach(), o).dequantize().double() - t).detach() for t, o in pairs)
    return x, w


def plain(
    x: Tensor,
    weights: dict[str, Tensor],
    ids: Tensor | None = None,
    *,
    normalize: bool = True,
    fp8: bool = False,
) -> Tensor:
    """The same function, one row and one expert at a time, in float64, with autograd of its own."""

    def product(a: Tensor, name: str) -> Tensor:
        b = weights[name + ".weight"]
        a, b = rounded(a[None], b) if fp8 else (a[None], b)
        return (a @ b.t())[0]

    out = []
    for t, row in enumerate(x):
        scores = (weights["gate.weight"] @ row).softmax(0)
        chosen = scores.sort(descending=True).indices[:COUNT] if ids is None else ids[t]
        total = scores[chosen].sum() if normalize else torch.ones(())
        y = torch.zeros(HIDDEN, dtype=torch.float64)
        for e in chosen.tolist():
            name = f"experts.{e}."
            inner = F.silu(product(row, name + "gate_proj")) * product(row, name + "up_proj")
            y = y + scores[e] / total * product(inner, name + "down_proj")
        out.append(y)
    return torch.stack(out)


def error(y: Tensor, expected: Tensor) -> float:
    """Relative, in norm."""
    return float((y.detach().double() - expected.detach()).norm() / expected.detach().norm())


def leaves(module: MoE) -> dict[str, Tensor]:
    return {n: p.detach().double().requires_grad_() for n, p in module.named_parameters()}


def assert_gradients(module: MoE, truth: dict[str, Tensor], *, relative: float) -> None:
    for name, p in module.named_parameters():
        expected = truth[name].grad
        if p.grad is None:
            assert expected is None or not bool(expected.any()), name
            continue
        assert expected is not None and p.grad.dtype == torch.float32
        assert error(p.grad, expected) < relative, f"{name}: {error(p.grad, expected)}"


@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
@pytest.mark.parametrize("normalize", [True, False])
def test_values_and_gradients_are_those_of_float64(exact: bool, normalize: bool) -> None:
    module = make(float32(bf16_flow()), exact=exact, normalize=normalize)
    x = rows(40, dtype=torch.float32).requires_grad_()
    grad = rows(40, 1, torch.float32)
    routes = Routes()
    y = module(x, routes)
    truth, x64 = leaves(module), x.detach().double().requires_grad_()
    expected = plain(x64, truth, normalize=normalize)
    assert error(y, expected) < 1e-6
    assert torch.equal(routes.ids[0], plain_ids(x64, truth))
    y.backward(grad)
    expected.backward(grad.double())
    assert x.grad is not None and x64.grad is not None
    assert error(x.grad, x64.grad) < 2e-6
    assert_gradients(module, truth, relative=2e-6)


def plain_ids(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    return (x @ weights["gate.weight"].t()).sort(1, descending=True).indices[:, :COUNT]


def test_fp8_values_are_those_of_quantized_operands() -> None:
    module, x = make(float32(fp8_flow(wgrad_fp8=False))), rows(40, dtype=torch.float32).requires_grad_()
    y, truth, x64 = module(x), leaves(module), x.detach().double().requires_grad_()
    expected = plain(x64, truth, fp8=True)
    # The gated product is rounded to FP32 before it is quantized: a code on an edge may fall on the other side.
    assert error(y, expected) < 2e-3
    unquantized = plain(x64, truth)
    assert error(y, unquantized) > 1e-2
    grad = rows(40, 1, torch.float32)
    y.backward(grad)
    expected.backward(grad.double())
    assert_gradients(module, truth, relative=0.06)  # output gradients are e4m3
    assert x.grad is not None and x64.grad is not None
    assert error(x.grad, x64.grad) < 0.06


@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
@torch.no_grad()
def test_a_row_depends_on_itself_only(flow: Flow, exact: bool) -> None:
    module, x = make(flow, exact=exact), rows(700)
    routes = Routes()
    whole = module(x, routes)
    assert int(torch.bincount(routes.ids[0].flatten()).max()) > 256, "experts have more rows than one piece"
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    assert torch.equal(module(x[order]), whole[order])
    assert torch.equal(module(x[333:]), whole[333:])
    alone = torch.cat([module(x[i : i + 1]) for i in range(0, 700, 9)])
    assert torch.equal(alone, whole[::9])
    parts = torch.cat([module(part) for part in x.split(23)])
    assert torch.equal(parts, whole)


def test_rows_of_one_expert_in_crowds_of_every_size() -> None:
    """All rows go to the same experts, in batches of 1 to 70: what decides an expert's bits is never its crowd."""
    module = make(fp8_flow())
    with torch.no_grad():
        module.gate.weight[: EXPERTS - COUNT] = -module.gate.weight[EXPERTS - COUNT :][:1]
        refresh(module)
        x = rows(70)
        whole = module(x)
        for n in range(1, 71):
            assert torch.equal(module(x[:n]), whole[:n]), n


def test_gradients_don_t_depend_on_grad_mode() -> None:
    module, x = make(fp8_flow()), rows(50)
    with torch.no_grad():
        quiet = module(x)
    assert torch.equal(module(x.clone().requires_grad_()).detach(), quiet)


def test_ties_go_to_the_lowest_expert_case_52() -> None:
    scores = torch.full((300, 64), 1 / 64)
    assert torch.equal(top_experts(scores, 8), torch.arange(8).expand(300, 8))
    scores[:, 40] = scores[:, 17] = 0.5
    assert torch.equal(top_experts(scores, 4), torch.tensor([17, 40, 0, 1]).expand(300, 4))


def test_scores_are_a_softmax_and_the_sum_is_taken_by_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 129, generator=generator) * 20
    scores = router_scores(logits)
    torch.testing.assert_close(scores.double(), logits.double().softmax(1), rtol=1e-5, atol=1e-30)
    y = torch.randn(50, 5, 33, generator=generator).bfloat16()
    weight = torch.rand(50, 5, generator=generator)
    expected = torch.zeros(50, 33)
    for rank in range(5):
        expected = expected + y[:, rank].float() * weight[:, rank, None]
    assert torch.equal(combine(y, weight), expected.bfloat16())
    assert torch.equal(combine(y.float(), weight), expected)
    assert not torch.equal(combine(y.float().flip(1), weight.flip(1)), expected), (
        "the order of addition shows"
    )


def test_rows_are_sorted_by_expert_then_row() -> None:
    ids = torch.tensor([[2, 0], [0, 3], [2, 3]])
    order, counts = by_expert(ids, 5)
    assert order.tolist() == [1, 2, 0, 4, 3, 5] and counts == [2, 0, 2, 2, 0]


def test_an_expert_without_rows_has_no_part_in_the_pass() -> None:
    module, x = make(fp8_flow()), rows(1).requires_grad_()
    routes = Routes()
    module(x, routes).float().sum().backward()
    used = set(routes.ids[0][0].tolist())
    for e, expert in enumerate(module.experts):
        has = {p.grad is not None and bool(p.grad.any()) for p in expert.parameters()}
        assert has == {e in used}


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_a_replayed_router_keeps_its_gradient_case_56(shift: int) -> None:
    """Replayed experts, the model's own or others: the router's gradient is that of scores from the dense softmax."""
    module = make(float32(bf16_flow()))
    x = rows(30, dtype=torch.float32).requires_grad_()
    own = Routes()
    module(x, own)
    ids = (own.ids[0] + shift) % EXPERTS
    y = module(x, Routes({0: ids}))
    truth, x64 = leaves(module), x.detach().double().requires_grad_()
    expected = plain(x64, truth, ids)
    assert error(y, expected) < 1e-6
    grad = rows(30, 1, torch.float32)
    y.backward(grad)
    expected.backward(grad.double())
    router = module.gate.weight.grad
    assert router is not None and bool((router.norm(dim=1) > 1e-3).all()), (
        "every expert's score moves every other's"
    )
    assert_gradients(module, truth, relative=3e-6)


def test_without_renormalisation_the_replayed_router_learns_too_case_56() -> None:
    module = make(float32(bf16_flow()), normalize=False)
    x = rows(4, dtype=torch.float32)
    ids = torch.tensor([[6, 5, 4], [0, 1, 2], [3, 2, 6], [1, 3, 5]])
    y = module(x, Routes({0: ids}))
    truth = leaves(module)
    expected = plain(x.double(), truth, ids, normalize=False)
    y.backward(torch.ones_like(y))
    expected.backward(torch.ones_like(expected))
    assert module.gate.weight.grad is not None and bool(module.gate.weight.grad.any())
    assert_gradients(module, truth, relative=3e-6)


@pytest.mark.parametrize("flow", [bf16_flow(), fp8_flow()], ids=["bf16", "fp8"])
def test_recorded_routes_replay_to_the_same_bits_case_52(flow: Flow) -> None:
    """In any order within a row: what is imposed is the set, the ranks are the model's own."""
    module, x = make(flow), rows(90)
    record = Routes()
    y = module(x, record)
    assert record.ids[0].dtype == torch.int64 and record.ids[0].shape == (90, COUNT)
    for ids in (record.ids[0], record.ids[0].flip(1), record.ids[0][:, [1, 2, 0]].to(torch.int16)):
        replay = Routes({0: ids})
        assert torch.equal(module(x, replay), y)
        assert torch.equal(replay.ids[0], record.ids[0]) and replay.overruled == 0
    other = Routes({0: (record.ids[0] + 1) % EXPERTS})
    assert not torch.equal(module(x, other), y)
    changed = ((record.ids[0] + 1) % EXPERTS).sort(1).values != record.ids[0].sort(1).values
    assert other.overruled == int(changed.any(1).sum()) > 45
    assert torch.equal(other.ids[0].sort(1).values, ((record.ids[0] + 1) % EXPERTS).sort(1).values)


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ({}, "lack layer 0"),
        ({0: torch.zeros(5, 2, dtype=torch.long)}, r"shape \[5, 2\].*\[5, 3\]"),
        ({0: torch.tensor([[0, 1, 2]]).expand(4, 3)}, r"shape \[4, 3\].*\[5, 3\]"),
        ({0: torch.tensor([[0, 1, 7]]).expand(5, 3)}, r"outside 0\.\.6"),
        ({0: torch.tensor([[0, 1, -1]]).expand(5, 3)}, r"outside 0\.\.6"),
        ({0: torch.tensor([[0, 1, 1]]).expand(5, 3)}, "twice"),
    ],
    ids=["no layer", "count", "rows", "too large", "negative", "twice"],
)
def test_routes_that_can_t_be_are_refused(ids: dict[int, Tensor], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(bf16_flow())(rows(5), Routes(ids))


def test_load_of_the_experts() -> None:
    load = ExpertLoad(4)
    assert load.metrics() == {}
    routes = Routes()
    routes.ids = {0: torch.tensor([[0, 1], [0, 2]]), 1: torch.tensor([[3, 1], [0, 2]])}
    load.see(routes)
    load.see(routes)
    assert load.metrics() == {"moe/load_max_over_mean": 1.5, "moe/idle_experts": 1 / 8}
    replay = Routes({})
    replay.ids, replay.overruled = {0: torch.tensor([[3, 2]])}, 1
    load.see(replay)
    assert load.metrics()["moe/overruled_routes"] == 1 / 9


def test_routes_are_equal_packed_and_paged_case_52(toy: SimpleNamespace) -> None:
    """Through a training forward, alone, and token by token over a paged cache, with experts that tie everywhere."""
    spec = toy.SPECS["qwen3_moe"]
    weights = toy.random_weights(spec)
    for name, value in weights.items():
        if name.endswith("mlp.gate.weight"):
            value[[0, 2, 3, 4, 5]] = 0.0  # five experts that always tie, and one that is better or worse
    decoder = toy.make_decoder(spec, fp8_flow(kv_fp8=True), weights=weights)
    lengths = (40, 3, 66)
    ids = toy.random_ids(spec, lengths)
    scales = toy.calibrate(decoder, ids, lengths, 2.0)
    packed = toy.packed_context(decoder, lengths, scales)
    packed.routes = Routes()
    hidden = decoder.hidden(ids, packed)
    assert sorted(packed.routes.ids) == [0, 2], "layer 1 is dense"
    found = {tuple(pair) for chosen in packed.routes.ids.values() for pair in chosen.tolist()}
    assert found == {(1, 0), (0, 2)}, "the lowest of equals first"
    records: list[tuple[Tensor, Routes]] = []
    steps = toy.decode_schedule(lengths)
    paged = toy.paged_hidden(decoder, ids, lengths, steps, scales, routes=records)
    assert torch.equal(paged, hidden.detach())
    for layer, expected in packed.routes.ids.items():
        chosen = torch.full_like(expected, -1)
        for where, record in records:
            chosen[where] = record.ids[layer]
        assert torch.equal(chosen, expected)
    replay = toy.packed_context(decoder, lengths, scales)
    replay.routes = Routes(packed.routes.ids)
    assert torch.equal(decoder.hidden(ids, replay), hidden)


@pytest.mark.parametrize("keep", [frozenset(), frozenset({0})], ids=["all", "first kept"])
def test_exactly_the_linears_of_attention_mlp_and_experts_are_quantized_case_06(
    toy: SimpleNamespace, keep: frozenset[int]
) -> None:
    spec = toy.SPECS["qwen3_moe"]
    decoder = toy.make_decoder(spec, fp8_flow(keep_bf16=keep))
    coded = {name for name, module in decoder.working() if module.working.codes is not None}
    expected = set()
    for layer in set(range(spec.num_layers)) - keep:
        prefix = f"model.layers.{layer}."
        expected |= {f"{prefix}self_attn.{p}_proj.weight" for p in "qkvo"}
        blocks = [f"experts.{i}." for i in range(spec.moe.num_experts)] if layer != 1 else [""]
        expected |= {f"{prefix}mlp.{b}{p}_proj.weight" for b in blocks for p in ("gate", "up", "down")}
    assert coded == expected and len(coded) >= 2 * 4 + 3 + 18
    routers = {name for name, _ in decoder.working() if name.endswith("mlp.gate.weight")}
    assert routers == {"model.layers.0.mlp.gate.weight", "model.layers.2.mlp.gate.weight"}


def test_both_sides_quantize_the_same_modules_and_gate_is_not_gate_proj_case_05(toy: SimpleNamespace) -> None:
    """`mlp.gate` is a router, `mlp.gate_proj` a linear of a dense layer, `mlp.experts.0.gate_proj` one of an expert."""
    spec = toy.SPECS["qwen3_moe"]
    trainer, engine = (toy.make_decoder(spec, flow) for flow in (fp8_flow(), fp8_flow()))
    kinds = [{name: (type(m).__name__, m.operand) for name, m in d.working()} for d in (trainer, engine)]
    assert kinds[0] == kinds[1] and trainer.digest() == engine.digest()
    named = {
        "model.layers.0.mlp.gate.weight": ("Router", False),
        "model.layers.1.mlp.gate_proj.weight": ("Linear", True),
        "model.layers.0.mlp.experts.0.gate_proj.weight": ("Linear", True),
    }
    for name, (kind, coded) in named.items():
        assert (kinds[0][name][0], kinds[0][name][1].is_fp8) == (kind, coded)
    router, linear = (dict(trainer.working())[name].working for name in list(named)[:2])
    assert router.codes is None and router.plain is not None and router.plain.dtype == torch.bfloat16
    assert linear.codes is not None and linear.plain is None
