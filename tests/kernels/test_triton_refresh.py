"""Refresh in place on the GPU: the bytes of `numerics/quantize.py`, the reference's account, storage that never moves, and
fingerprints equal on both sides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.kernels.library import library_scale
from lockstep.kernels.reference import PackedWeight, ReferenceKernels
from lockstep.kernels.renew import Source
from lockstep.models.decoder import BETWEEN, Decoder
from lockstep.nn.working import Known
from lockstep.numerics.fingerprint import fingerprint
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.numerics.formats import AMAX_FLOOR, BF16, ScaleKind, square_blocks
from lockstep.numerics.quantize import Quantized, quantize

pytestmark = pytest.mark.gpu
SHAPES = [
    (128, 128),
    (4096, 4096),
    (1024, 4096),
    (576, 576),
    (192, 576),
    (1536, 576),
    (130, 200),
    (97, 323),
    (1, 128),
    (257, 132),
    (384, 640),
    (128, 18_944),
    (3, 2),
]
FLOWS = {"fp8": fp8_flow(), "fp8-pow2": fp8_flow(scale="pow2"), "bf16": bf16_flow()}


@pytest.fixture(scope="module")
def kernels(hopper: SimpleNamespace) -> Any:
    from lockstep.kernels.table import select

    return select("hopper")


def master(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Blocks of all kinds: usual, zero, negative zero, tiny, huge, values between two codes, one outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * 0.02
    kinds = torch.randint(0, 8, (-(-rows // 128), -(-columns // 128)), generator=generator)
    for i, row in enumerate(kinds.tolist()):
        for j, kind in enumerate(row):
            block = x[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            if kind == 1:
                block.zero_()
            elif kind == 2:
                block.zero_().neg_()
            elif kind == 3:
                block.mul_(1e-30)
            elif kind == 4:
                block.mul_(1e35)
            elif kind == 5:
                block.copy_(torch.randint(-900, 901, block.shape, generator=generator) / 2)
                block[0, 0] = 448.0
            elif kind == 6:
                block[0, -1] = 30.0
    return x


def assert_same_bytes(found: Tensor, expected: Tensor) -> None:
    bits = torch.uint8 if found.element_size() == 1 else torch.int16
    differing = int((found.cpu().view(bits) != expected.view(bits)).sum())
    assert not differing, f"{differing} of {found.numel()} differ"


@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_scales_and_account(shape: tuple[int, int], kind: ScaleKind, kernels: Any) -> None:
    operand, reference = square_blocks(kind), ReferenceKernels()
    there = here = None
    for seed in range(3):
        x = master(*shape, seed) if seed < 2 else master(*shape, 1) * 1.01
        sources = [
            Source("w", x.to(device), operand, torch.bfloat16, held)
            for device, held in (("cuda", there), ("cpu", here))
        ]
        found, expected = next(kernels.refresh(sources[:1])), next(reference.refresh(sources[1:]))
        assert there is None or found.packed is there, "it stays where it is"
        there, here = found.packed, expected.packed
        assert_same_bytes(there.codes.codes, here.codes.codes)
        assert torch.equal(there.codes.scale.cpu(), here.codes.scale)
        library = library_scale(here.codes)
        assert (library is None) == (there.library_scale is None)
        assert library is None or torch.equal(there.library_scale.cpu(), library)
        assert (found.changed, found.max_rel) == (expected.changed, expected.max_rel)
        assert found.fingerprint == fingerprint(here.codes.codes, here.codes.scale)
        assert there.version.count == seed + 1


@pytest.mark.parametrize("shape", [*SHAPES, (4096,), (5,), (64,), (4100,), (70_001, 130)], ids=str)
def test_plain_values(shape: tuple[int, ...], kernels: Any) -> None:
    held = None
    for seed in range(2):
        x = master(*(shape if len(shape) == 2 else (1, *shape)), seed).view(shape)
        found = next(kernels.refresh([Source("w", x.cuda(), BF16, torch.bfloat16, held)]))
        old, held = held, found.packed
        assert old is None or held is old
        assert_same_bytes(held.plain, x.bfloat16())
        assert found.fingerprint == fingerprint(x.bfloat16())
        before = master(*(shape if len(shape) == 2 else (1, *shape)), 0).view(shape).bfloat16()
        changed = int((before.view(torch.int16) != x.bfloat16().view(torch.int16)).sum())
        assert found.changed == (changed if seed else x.numel()) and found.max_rel == 0.0


@pytest.mark.parametrize("first", [1, 2, 4])
def test_values_beside_each_other_in_one_storage(first: int, kernels: Any) -> None:
    """Neither master nor working copy begins where a vector load could."""
    x = master(300, 256).flatten()[: 300 * 255 + 8]
    stacked, alone = x.cuda()[first : first + 300 * 255], torch.zeros(300 * 255 + 8).bfloat16()
    place = PackedWeight(None, alone.cuda()[first : first + 300 * 255], None)
    found = next(kernels.refresh([Source("w", stacked, BF16, torch.bfloat16, place)]))
    want = x[first : first + 300 * 255].bfloat16()
    assert found.packed is place and found.fingerprint == fingerprint(want)
    assert_same_bytes(place.plain, want)
    assert found.changed == int((want.view(torch.int16) != 0).sum())


def test_many_tensors_of_many_shapes_at_once(kernels: Any) -> None:
    xs = [master(*shape, i) for i, shape in enumerate(SHAPES * 5)]
    operands = [BF16 if i % 3 == 2 else square_blocks("pow2" if i % 3 else "fp32") for i in range(len(xs))]
    sources = [
        Source(str(i), x.cuda(), o, torch.bfloat16, None) for i, (x, o) in enumerate(zip(xs, operands))
    ]
    for x, operand, found in zip(xs, operands, kernels.refresh(sources), strict=True):
        if operand.is_fp8:
            assert_same_bytes(found.packed.codes.codes, quantize(x, operand).codes)
        else:
            assert_same_bytes(found.packed.plain, x.bfloat16())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("operand", [square_blocks("fp32"), BF16], ids=str)
def test_the_first_that_is_not_finite_is_named(operand: Any, value: float, kernels: Any) -> None:
    xs = [master(300, 200, i) for i in range(4)]
    xs[2][299, 199] = xs[3][0, 0] = value
    sources = [Source(f"w{i}", x.cuda(), operand, torch.bfloat16, None) for i, x in enumerate(xs)]
    with pytest.raises(ValueError, match="^w2: non-finite value"):
        list(kernels.refresh(sources))


def test_a_value_that_rounds_to_infinity_is_refused(kernels: Any) -> None:
    x = torch.full((4, 4), 3.4e38)
    with pytest.raises(ValueError, match="w: non-finite"):
        list(kernels.refresh([Source("w", x.cuda(), BF16, torch.bfloat16, None)]))
    found = next(kernels.refresh([Source("w", x.cuda(), square_blocks("fp32"), torch.bfloat16, None)]))
    assert_same_bytes(found.packed.codes.codes, quantize(x, square_blocks("fp32")).codes)


def test_a_block_of_zeros_gets_the_floor(kernels: Any) -> None:
    found = next(
        kernels.refresh(
            [Source("w", torch.zeros(128, 256).cuda(), square_blocks("fp32"), torch.bfloat16, None)]
        )
    )
    assert not found.packed.codes.codes.view(torch.uint8).any() and found.max_rel == 0.0
    assert torch.equal(found.packed.codes.scale.cpu(), torch.full((1, 2), AMAX_FLOOR) / torch.tensor(448.0))


@pytest.mark.parametrize("shape", [*SHAPES, (70_001, 130)], ids=str)
def test_fingerprints_are_those_of_the_cpu(shape: tuple[int, int], kernels: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator)
    values, vector = (
        torch.randn(shape, generator=generator).bfloat16(),
        torch.randn(shape[1], generator=generator),
    )
    held = [(codes, scale), (codes, None), (values, None), (vector, None), (codes[:, 1:], None)]
    there = [(v.cuda(), None if s is None else s.cuda()) for v, s in held]
    there[-1] = (there[0][0][:, 1:], None)
    assert kernels.fingerprints(there) == [fingerprint(*h) for h in held]


@pytest.mark.parametrize("family", ["llama31", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS)
def test_decoders_on_both_sides(flow: Flow, family: str, toy: SimpleNamespace, kernels: Any) -> None:
    """Records and digests of three versions; stacks that stay, and follow."""
    spec, weights = toy.SPECS[family], toy.random_weights(toy.SPECS[family])
    here, there = Decoder(spec, flow, ReferenceKernels()), Decoder(spec, flow, kernels)
    for decoder in (here, there):
        decoder.load_state_dict(weights)
    there.cuda()
    generator = torch.Generator().manual_seed(0)
    kept: list[Any] = []
    kept_digest = ""
    for version in (1, 2, 3):
        records = [d.refresh(version) for d in (here, there)]
        assert records[0] == records[1] and here.digest() == there.digest()
        stacks = [p.stacked() for p in there.projections() if len(p.linears) > 1]
        now = [(m.packed, *((h.value.data_ptr(),) for h in m.held())) for _, m in there.working()]
        assert not kept or all(a[0] is b[0] and a[1:] == b[1:] for a, b in zip(kept[0], now, strict=True))
        assert not kept or all(a is b for a, b in zip(kept[1], stacks, strict=True))
        kept, kept_digest = [now, stacks], here.digest()
        for projection, stack in zip(
            (p for p in there.projections() if len(p.linears) > 1), stacks, strict=True
        ):
            assert_stack(stack, [linear.working for linear in projection.linears])
        with torch.no_grad():
            for (_, p), (_, q) in zip(here.named_parameters(), there.named_parameters(), strict=True):
                p.add_(torch.randn(p.shape, generator=generator) * 1e-2)
                q.copy_(p)
    for _, module in there.working():
        module.known = Known()
    assert there.digest() == kept_digest
    digest = there.digest()
    there.refresh(4)
    assert there.digest() != digest
    with torch.no_grad():
        there.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        there.refresh(5)
    assert there.version == BETWEEN


def assert_stack(stack: Any, parts: list[Any]) -> None:
    if stack.codes is None:
        assert torch.equal(stack.plain, torch.cat([p.plain for p in parts]))
        return
    whole = torch.cat([p.codes.dequantize() for p in parts])
    assert torch.equal(stack.codes.dequantize(), whole)
    for weight in (stack, *parts):
        codes: Quantized = weight.codes
        library = library_scale(codes)
        assert (library is None) == (weight.library_scale is None)
        assert library is None or torch.equal(library, weight.library_scale)


def test_weights_fused_after_their_refresh(toy: SimpleNamespace, kernels: Any) -> None:
    """As a receiver installs them: one by one, then stacked."""
    spec = toy.SPECS["qwen3"]
    one, other = (Decoder(spec, fp8_flow(), kernels).cuda() for _ in range(2))
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    other.load_state_dict(one.state_dict())
    one.refresh(1)
    for name, module in other.working():
        module.refresh(name)
    other.stack()
    assert one.digest() == other.digest()
    for projection in other.projections():
        if len(projection.linears) > 1:
            stack = projection.stacked()
            assert stack is projection.stacked()
            assert_stack(stack, [linear.working for linear in projection.linears])
