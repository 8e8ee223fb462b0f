"""What surrounds the products of the backward pass on the GPU: the quantizer's bytes in both groupings, and gradients next to the
plain modules' formulas in float64. Weight gradients have the same bits in every run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.bench.checks_rows import hostile_rows
from lockstep.bench.shapes import AttentionShape, attentions, norm_widths
from lockstep.kernels.reference import saturated
from lockstep.numerics.formats import BLOCK, E4M3_MAX, ScaleKind, column_groups, row_groups, square_blocks
from lockstep.numerics.quantize import Quantized, quantize

pytestmark = pytest.mark.gpu
EPS = 1e-6
KINDS = ["fp32", "pow2"]
TOKENS = (1, 127, 128, 300)
WIDTHS = (128, 576, 130, 200, 127, 1024)
Codes = tuple[Tensor, Tensor]


@pytest.fixture(scope="session")
def kernels(hopper: SimpleNamespace) -> SimpleNamespace:
    """The modules under test, beside the forward's."""
    from lockstep.kernels.triton import columns, norm_backward, rope_backward, swiglu_backward

    return SimpleNamespace(
        columns=columns,
        norm=norm_backward,
        rope=rope_backward,
        swiglu=swiglu_backward,
        forward_rope=hopper.rope,
        rows=hopper.quantize,
    )


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().cuda()


def assert_bytes(found: Codes, codes: Tensor, scale: Tensor, where: str) -> None:
    assert found[0].shape == codes.shape and found[1].shape == scale.shape, where
    wrong = found[0].view(torch.uint8).cpu() != codes.cpu().view(torch.uint8)
    assert torch.equal(found[1].cpu(), scale.cpu()), f"scales, {where}"
    assert not wrong.any(), f"{int(wrong.sum())} codes, {where}, first {wrong.nonzero()[0].tolist()}"


def assert_columns(found: Codes, x: Tensor, kind: ScaleKind, *, square: bool = False) -> None:
    """found: columns of the values x [T, N]."""
    padded = F.pad(x.cpu().float(), (0, 0, 0, -len(x) % BLOCK))
    expected = quantize(padded, square_blocks(kind) if square else column_groups(kind))
    assert_bytes(found, expected.codes.t().contiguous(), expected.scale.t(), f"columns {tuple(x.shape)}")
    strides = (-(-found[1].shape[1] // 4) * 4, 1) if square else (1, x.shape[1])
    assert found[0].is_contiguous() and found[1].stride() == strides


def assert_rows(found: Codes, x: Tensor, kind: ScaleKind) -> None:
    expected = quantize(x.cpu(), row_groups(kind))
    assert_bytes(found, expected.codes, expected.scale, f"rows {tuple(x.shape)}")


def assert_near(found: Tensor, exact: Tensor, *, share: float = 0.99, slack: float = 2e-6) -> None:
    """BF16 values: nearly all the nearest to the exact ones, all others within two units in the last place, or within `slack` of
    their row's largest."""
    assert found.dtype == torch.bfloat16 and bool(torch.isfinite(found).all())
    room = exact.abs() * 2.0**-7 + slack * exact.abs().amax(-1, keepdim=True)
    assert bool(((found.double() - exact).abs() <= room).all())
    assert float((found == exact.to(torch.bfloat16)).double().mean()) > share


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_both_forms_are_the_quantizers(width: int, kind: ScaleKind, kernels: SimpleNamespace) -> None:
    for tokens in TOKENS:
        x = hostile_rows(tokens, width, seed=tokens)
        x[:, : width // 3] = x[:, : width // 3].flip(0)
        there, pow2 = x.cuda(), kind == "pow2"
        rows, columns = kernels.columns.quantize_both(there, pow2=pow2)
        assert_rows(rows, x, kind)
        assert_columns(columns, x, kind)
        plain = kernels.rows.quantize_rows(there, pow2=pow2)
        assert rows[0].stride() == plain[0].stride() and rows[1].stride() == plain[1].stride()
        alone, nothing = kernels.columns.quantize_both(there, pow2=pow2, columns=False)
        assert nothing is None
        assert_rows(alone, x, kind)
        nothing, alone = kernels.columns.quantize_both(there, pow2=pow2, rows=False)
        assert nothing is None
        assert_columns(alone, x, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_bf16_pair_of_value_and_maximum(kind: ScaleKind, kernels: SimpleNamespace) -> None:
    mantissa = 1 + torch.arange(128) / 128
    for shift in range(0, 20, 2):
        x = (mantissa * 2.0**-shift).repeat(128, 1)
        x = torch.where(x <= mantissa[:, None], x, -0.0)
        x = torch.cat([mantissa[:, None], x], 1)[:, :128].bfloat16()
        rows, columns = kernels.columns.quantize_both(x.cuda(), pow2=kind == "pow2")
        assert_rows(rows, x, kind)
        assert_columns(columns, x, kind)
        _, columns = kernels.columns.quantize_both(x.t().contiguous().cuda(), pow2=kind == "pow2")
        assert_columns(columns, x.t(), kind)


def test_fp32_values_next_to_midpoints(kernels: SimpleNamespace) -> None:
    generator = torch.Generator().manual_seed(5)
    amax = 1 + torch.rand(1024, generator=generator)
    amax[:3] = torch.tensor([1.75, 1.75 - 2**-23, 1.75 + 2**-23])
    scale = amax / torch.full_like(amax, E4M3_MAX)
    middle = torch.cat([torch.arange(1, 32, 2) / 1024, torch.arange(17, 32, 2) / 4.0]).double()
    exact = (scale[:, None].double() * middle).float()
    values = [(exact.view(torch.int32) + ulps).view(torch.float32) for ulps in range(-2, 3)]
    x = torch.cat([amax[:, None], *values], 1)
    assert x.shape[1] <= BLOCK
    rows, _ = kernels.columns.quantize_both(x.cuda(), pow2=False)
    assert_rows(rows, x, "fp32")
    _, columns = kernels.columns.quantize_both(x.t().contiguous().cuda(), pow2=False)
    assert_columns(columns, x.t(), "fp32")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_regroup(width: int, kind: ScaleKind, kernels: SimpleNamespace) -> None:
    for tokens in TOKENS:
        x = hostile_rows(tokens, width, seed=tokens)
        codes = quantize(x, row_groups(kind))
        there = kernels.rows.quantize_rows(x.cuda(), pow2=kind == "pow2")
        for square in (False, True):
            found = kernels.columns.regroup(*there, pow2=kind == "pow2", square=square)
            assert_columns(found, codes.dequantize(), kind, square=square)
            again = kernels.columns.regroup(
                there[0], there[1].contiguous(), pow2=kind == "pow2", square=square
            )
            assert torch.equal(again[0].view(torch.uint8), found[0].view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", (128, 576, 200, 4096))
def test_columns_of_values_and_of_their_norm(width: int, kind: ScaleKind, kernels: SimpleNamespace) -> None:
    """One pass has the bytes of two or three."""
    from lockstep.kernels.triton.norm import kept_norm

    pow2 = kind == "pow2"
    weight = random(width, seed=9)
    for tokens in (*TOKENS, 5000):
        x = random(tokens, width, seed=tokens)
        _, normed, inverse = kept_norm(x, weight, EPS, pow2=pow2)
        exact = (x.double().square().mean(1) + EPS).rsqrt()
        torch.testing.assert_close(inverse.double(), exact, rtol=1e-6, atol=0.0)
        for source, rows in (
            ((x, None, None), kernels.rows.quantize_rows(x, pow2=pow2)),
            ((x, inverse, weight), normed),
        ):
            for square in (False, True):
                expected = kernels.columns.regroup(*rows, pow2=pow2, square=square)
                found = kernels.columns.columns_of(*source, pow2_rows=pow2, pow2=pow2, square=square)
                assert torch.equal(found[0].float(), expected[0].float()), (
                    "past the last token a zero may have a sign"
                )
                assert torch.equal(found[1], expected[1])


def test_rows_of_a_wider_matrix_and_no_rows(kernels: SimpleNamespace) -> None:
    whole = random(200, 1000, seed=1)
    rows, columns = kernels.columns.quantize_both(whole[:, 37 : 37 + 300], pow2=False)
    assert_rows(rows, whole[:, 37 : 37 + 300], "fp32")
    assert_columns(columns, whole[:, 37 : 37 + 300], "fp32")
    rows, columns = kernels.columns.quantize_both(whole[:0], pow2=False)
    assert rows[0].shape == (0, 1000) and columns[0].shape == (1000, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wild", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(wild: float, kind: ScaleKind, kernels: SimpleNamespace) -> None:
    x = random(256, 256, seed=2)
    x[130, 5] = wild
    rows, columns = kernels.columns.quantize_both(x, pow2=kind == "pow2")
    for codes, scale in (rows, columns):
        values = Quantized(codes, scale, (1, BLOCK)).dequantize()
        assert not torch.isfinite(values).all()
    assert not torch.isfinite(rows[1][130, 0]) and torch.isfinite(rows[1]).sum() == rows[1].numel() - 1
    assert not torch.isfinite(columns[1][5, 1]) and torch.isfinite(columns[1]).sum() == columns[1].numel() - 1


def swiglu_gradient(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    s = gate.sigmoid()
    silu = gate * s
    return torch.cat([grad * up * (s + silu * (1 - s)), grad * silu], 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu(width: int, kind: ScaleKind, kernels: SimpleNamespace) -> None:
    pow2 = kind == "pow2"
    for tokens in TOKENS:
        grad, gate_up = random(tokens, width, seed=3, scale=1e-3), random(tokens, 2 * width, seed=4, scale=3)
        gate_up[0, : width // 2] = -90
        gate_up[-1, :width] = 90
        forms: list[Tensor | Codes] = [gate_up]
        if width % BLOCK == 0:
            forms.append(kernels.rows.quantize_rows(gate_up, pow2=pow2))
        for form in forms:
            held = Quantized(*form, (1, BLOCK)).dequantize() if isinstance(form, tuple) else form
            gate, up = held.double().chunk(2, 1)
            plain = kernels.swiglu.swiglu_backward(grad, form, pow2=pow2, fp8=False)
            assert_near(plain, swiglu_gradient(grad.double(), gate, up))
            rows, columns = kernels.swiglu.swiglu_backward(grad, form, pow2=pow2, fp8=True)
            assert_rows(rows, plain, kind)
            assert_columns(columns, plain, kind)
            alone, nothing = kernels.swiglu.swiglu_backward(grad, form, pow2=pow2, fp8=True, columns=False)
            assert nothing is None
            assert_rows(alone, plain, kind)
            nothing, alone = kernels.swiglu.swiglu_backward(grad, form, pow2=pow2, fp8=True, rows=False)
            assert nothing is None
            assert_columns(alone, plain, kind)


def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(of x, of the weight before the sum over rows) of an RMSNorm over the last dimension, in float64."""
    grad, x, weight = grad.double(), x.double(), weight.double()
    inverse = 1 / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    n, g = x * inverse, grad * weight
    return inverse * (g - n * (g * n).mean(-1, keepdim=True)), grad * n


@pytest.mark.parametrize("columns", norm_widths(ragged=True))
def test_norm(columns: int, kernels: SimpleNamespace) -> None:
    for tokens in (1, 67, 3000):
        grad, h, dh = (random(tokens, columns, seed=s, scale=c) for s, c in ((5, 1e-2), (6, 1.0), (7, 1e-2)))
        weight = 1 + random(columns, seed=8, scale=0.3)
        h[0] = 0
        for added, dy in ((dh, grad), (None, grad), (dh, grad.float() * 1.001)):
            exact, dw = norm_gradient(dy, h, weight, EPS)
            exact = exact if added is None else added.double() + exact
            found, found_dw = kernels.norm.norm_backward(dy, h, weight, EPS, added)
            assert_near(found, exact)
            room = 1e-5 * dw.abs().sum(0) + 1e-12
            assert found_dw.dtype == torch.float32 and bool(
                ((found_dw.double() - dw.sum(0)).abs() <= room).all()
            )
            again, again_dw = kernels.norm.norm_backward(dy, h, weight, EPS, added)
            assert torch.equal(found, again) and torch.equal(found_dw, again_dw)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "shape", attentions(extra=True), ids=lambda s: f"{s.heads}-{s.kv_heads}-{s.head_dim}"
)
def test_rope(shape: AttentionShape, scaled: bool, kernels: SimpleNamespace) -> None:
    tokens, heads, kv, dim = 150, shape.heads, shape.kv_heads, shape.head_dim
    qkv = random(tokens, shape.row_width, seed=9)
    norms = (1 + random(dim, seed=10, scale=0.3), 1 + random(dim, seed=11, scale=0.3)) if shape.norm else None
    dq, dk, dv = (random(tokens, n, dim, seed=12 + i, scale=1e-2) for i, n in enumerate((heads, kv, kv)))
    positions = torch.arange(tokens, device="cuda") * 3
    angle = torch.rand(3 * tokens, dim // 2, generator=torch.Generator().manual_seed(15)).cuda() * 6
    table = torch.stack([angle.cos(), angle.sin()], 1)
    scales = (
        torch.full((kv,), 1.5 / E4M3_MAX, device="cuda"),
        torch.full((kv,), 2 / E4M3_MAX, device="cuda"),
    )
    kept = scales if scaled else None
    call = (dq, dk, dv, qkv, table, positions)
    found, dq_weight, dk_weight = kernels.rope.rope_backward(*call, norms=norms, eps=EPS, scales=kept)
    again, *weights = kernels.rope.rope_backward(*call, norms=norms, eps=EPS, scales=kept)
    assert torch.equal(found, again)
    _, k, v = kernels.forward_rope.rope_rows(
        qkv, table, positions, heads=heads, kv_heads=kv, norms=norms, eps=EPS
    )
    if scaled:
        clipped = saturated(k, scales[0])
        assert 0 < int(clipped.sum()) < clipped.numel() and int(saturated(v, scales[1]).sum()) > 0
        dk, dv = dk.masked_fill(clipped, 0.0), dv.masked_fill(saturated(v, scales[1]), 0.0)
    cos, sin = (table[positions, i].double()[:, None] for i in (0, 1))
    parts = qkv.view(tokens, -1, dim).split([heads, kv, kv], 1)
    results = found.view(tokens, -1, dim).split([heads, kv, kv], 1)
    for i, (grad, dw) in enumerate(((dq, dq_weight), (dk, dk_weight))):
        a, b = grad.double().chunk(2, -1)
        exact = torch.cat([a * cos + b * sin, b * cos - a * sin], -1)
        if norms is None:
            assert_near(results[i], exact)
            assert dw is None and weights[i] is None
            continue
        exact, each = norm_gradient(exact.bfloat16(), parts[i], norms[i], EPS)
        # A rotation that rounds the other way moves its element by one unit.
        assert_near(results[i], exact, share=0.98, slack=2.0**-7)
        room = 1e-4 * each.abs().sum((0, 1)) + 1e-12
        assert bool(((dw.double() - each.sum((0, 1))).abs() <= room).all())
        assert torch.equal(dw, weights[i])
    assert torch.equal(results[2], dv)


def test_no_tokens(kernels: SimpleNamespace) -> None:
    x = random(0, 256, seed=1)
    out, dw = kernels.norm.norm_backward(x, x, random(256, seed=2), EPS, x)
    assert out.shape == (0, 256) and not dw.any()
    found = kernels.swiglu.swiglu_backward(x, random(0, 512, seed=3), pow2=False, fp8=False)
    assert found.shape == (0, 512)


@pytest.mark.parametrize("square", [True, False], ids=["square", "columns"])
@pytest.mark.parametrize(
    "sizes", [(256, 256, 128), (576, 1536, 256), (4096, 2048, 3072), (1536, 576, 384), (576, 128, 1280)]
)
def test_a_weight_gradient_is_added_in_place(sizes: tuple[int, int, int], square: bool) -> None:
    """The product of what the codes stand for; in place with the bits of product and addition, launched and replayed; each call
    reads the scales of its own operands."""
    from lockstep.kernels.library import add_columns, scaled_mm_columns
    from lockstep.kernels.triton.columns import columns_of, quantize_both

    columns, width, tokens = sizes

    def operands(seed: int) -> tuple[Quantized, Quantized]:
        _, grad = quantize_both(random(tokens, columns, seed=seed), pow2=False, rows=False)
        x = random(tokens, width, seed=seed + 1) * torch.logspace(-2, 2, width, device="cuda").bfloat16()
        found = columns_of(x, None, None, pow2_rows=False, pow2=False, square=square)
        assert grad is not None
        return Quantized(*grad, (1, BLOCK)), Quantized(*found, (BLOCK if square else 1, BLOCK))

    first, second = operands(1), operands(5)
    total = random(columns, width, seed=3).float()
    product = scaled_mm_columns(*first)
    exact = first[0].dequantize().double() @ first[1].dequantize().double().t()
    # Tensor cores add e4m3 products with some 14 bits within a block of 128.
    room = 2.0**-8 * first[0].dequantize().double().abs() @ first[1].dequantize().double().abs().t()
    assert bool(((product.double() - exact).abs() <= room + 1e-12).all())
    want = total + product
    assert not torch.equal(want, total)
    assert add_columns(total, *first)
    assert torch.equal(total, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert add_columns(total, *second)
    for _ in range(2):
        want = want + scaled_mm_columns(*second)
        graph.replay()
        assert torch.equal(total, want)


@pytest.mark.parametrize("listed", [False, True], ids=["all", "listed"])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_codes_of_keys_and_values_are_widened(dim: int, listed: bool) -> None:
    from lockstep.kernels.attention_formula import values_of
    from lockstep.kernels.triton.kv import kv_codes, kv_values

    scale = torch.tensor([0.01, 0.02, 0.003], device="cuda")
    k, v = (kv_codes(random(700, 3, dim, seed=s), scale) for s in (1, 2))
    rows = torch.tensor([5, 699, 0, 5, 44], device="cuda") if listed else None
    for found, codes in zip(kv_values(k, v, rows), (k, v), strict=True):
        assert torch.equal(found, values_of(codes, rows, None, torch.bfloat16))


def test_rows_that_do_not_count_are_not_watched() -> None:
    from lockstep.kernels.triton.kv import watch

    k, v = random(300, 4, 64, seed=1), random(300, 4, 64, seed=2)
    seen = torch.arange(300, device="cuda") < 200
    k[250], v[210] = 100.0, float("inf")
    scales = (torch.full((4,), 0.004, device="cuda"), torch.full((4,), 0.006, device="cuda"))
    found = []
    for some in ((k, v, seen), (k[:200].contiguous(), v[:200].contiguous(), None)):
        maxima, count = torch.zeros(2, 4, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
        watch(*some[:2], scales, maxima, count, some[2])
        found.append((maxima, int(count)))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] > 0
