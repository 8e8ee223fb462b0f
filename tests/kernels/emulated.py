"""Checks of Gluon kernels under `emulator.py`, one a call: `python emulated.py NAME`. `test_emulated.py` calls them."""

from __future__ import annotations

import sys

import emulator

emulator.install()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from lockstep.kernels.reference import ReferenceKernels  # noqa: E402
from lockstep.kernels.triton import (  # noqa: E402
    columns,
    head_backward,
    numbers,
    paged_attention,
    rope,
    swiglu_backward,
    truncation,
)
from lockstep.kernels.triton import quantize as quantize_rows  # noqa: E402
from lockstep.kernels.truncation import Truncation, threshold  # noqa: E402
from lockstep.numerics.formats import BLOCK, E4M3, column_groups, row_groups, square_blocks  # noqa: E402
from lockstep.numerics.quantize import Quantized, quantize  # noqa: E402

Codes = tuple[Tensor, Tensor]
CODES = ReferenceKernels().quantize_kv
"""Of keys or values [T, G, D] under scales [G]."""
SHAPES = ((300, 256), (128, 128), (40, 384), (260, 130), (1, 136))
"""Tokens and width: of several tiles for each program, of one, of part of one; then ragged ones."""


def some(*shape: int) -> Tensor:
    """BF16 values."""
    return (3 * torch.randn(*shape)).bfloat16()


def wild(*shape: int) -> Tensor:
    """BF16 rows of many magnitudes, some below the quantizer's floor, some zero."""
    sizes = 10.0 ** torch.randint(-16, 4, (shape[0], 1))
    sizes[::7] = 0
    return (3 * torch.randn(*shape) * sizes).bfloat16()


def assert_codes(found: Codes | None, codes: Tensor, scale: Tensor) -> None:
    assert found is not None and torch.equal(found[1], scale)
    assert torch.equal(found[0].view(torch.uint8), codes.view(torch.uint8))


def assert_rows(found: Codes | None, x: Tensor, kind: str) -> None:
    expected = quantize(x.float(), row_groups(kind))
    assert_codes(found, expected.codes, expected.scale)


def assert_columns(found: Codes | None, x: Tensor, kind: str, *, square: bool = False) -> None:
    operand = square_blocks(kind) if square else column_groups(kind)
    expected = quantize(F.pad(x.float(), (0, 0, 0, -len(x) % BLOCK)), operand)
    assert_codes(found, expected.codes.t(), expected.scale.t())


def held(x: Tensor, kind: str = "fp32") -> tuple[Codes, Quantized]:
    """1x128 codes of x in padded storage, as kernels leave them, and the same as one."""
    found = quantize(x.float(), row_groups(kind))
    padded = torch.ones(found.scale.shape[1], -(-len(x) // 4) * 4)
    padded[:, : len(x)] = found.scale.t()
    return (found.codes, padded.t()[: len(x)]), found


def quantize_both(kind: str) -> None:
    """Values in BF16 and FP32 to rows and columns."""
    for shape in SHAPES:
        x = some(*shape)
        for values in (x, x.float()):
            rows, along = columns.quantize_both(values, pow2=kind == "pow2")
            assert_rows(rows, x, kind)
            assert_columns(along, x, kind)
        nothing, along = columns.quantize_both(x, pow2=kind == "pow2", rows=False)
        assert nothing is None
        assert_columns(along, x, kind)


def regroup(kind: str) -> None:
    """Codes of rows to columns."""
    for shape, make in ((shape, make) for shape in SHAPES for make in (some, wild)):
        codes, x = held(make(*shape), kind)
        for square in (False, True):
            found = columns.regroup(*codes, pow2=kind == "pow2", square=square)
            assert_columns(found, x.dequantize(), kind, square=square)


def columns_of(kind: str) -> None:
    """Values, and a norm's, to columns of what their rows' codes stand for; past the last token a zero may have a sign."""
    for (tokens, width), make in ((shape, make) for shape in SHAPES for make in (some, wild)):
        x, weight = make(tokens, width), some(width)
        inverse = (x.float().square().mean(1) + 1e-6).rsqrt()
        normed = (x.float() * inverse[:, None] * weight.float()).bfloat16()
        for values, norm in ((x, (None, None)), (normed, (inverse, weight))):
            meant = quantize(values.float(), row_groups(kind)).dequantize()
            for operand in (column_groups("fp32"), square_blocks("fp32")):
                square = operand.group == (BLOCK, BLOCK)
                codes, scale = columns.columns_of(
                    x, *norm, pow2_rows=kind == "pow2", pow2=False, square=square
                )
                expected = quantize(F.pad(meant, (0, 0, 0, -tokens % BLOCK)), operand)
                assert torch.equal(codes.float(), expected.codes.t().float())
                assert torch.equal(scale, expected.scale.t())


def rope_to_pages(kind: str) -> None:
    """q, and keys and values at their places in pages; the same rows as `rope_rows` gives."""
    fp8 = kind == "fp32"
    for heads, groups, dim, norm in (
        (4, 2, 128, True),
        (9, 3, 64, False),
        (12, 10, 128, True),
        (6, 2, 80, False),
        (18, 2, 32, True),
        (2, 1, 16, False),
        (3, 1, 256, True),
    ):
        count, width = 9, heads + 2 * groups
        qkv, table = some(count, width * dim), torch.randn(64, 2, dim // 2)
        positions, slots = torch.randint(0, 64, (count,)), torch.randperm(3 * 64)[:count]
        norms = (1 + some(dim) / 10, 1 + some(dim) / 10) if norm else None
        scales = (torch.rand(groups) / 20 + 0.01, torch.rand(groups) / 20 + 0.01) if fp8 else None
        dtype, flag = E4M3 if fp8 else torch.bfloat16, torch.zeros(1, dtype=torch.int32)
        k_pages, v_pages = (torch.zeros(3, groups, *s).to(dtype) for s in ((64, dim), (dim, 64)))
        more = {"norms": norms, "eps": 1e-6}
        q, k, v = rope.rope_rows(qkv, table, positions, heads=heads, kv_heads=groups, **more)
        parts = qkv.view(count, width, dim).split([heads, groups, groups], 1)
        for found, x, weight in ((q, parts[0], 0), (k, parts[1], 1)):
            assert_turned(found, x, None if norms is None else norms[weight], table[positions])
        assert torch.equal(v, parts[2])
        keys, values = (k, v) if scales is None else (CODES(x, s) for x, s in zip((k, v), scales))
        for early in (False, True):
            given = (qkv, table, positions, slots, k_pages, v_pages)
            also = {"heads": heads, "scales": scales, "flag": flag, "early": early}
            assert torch.equal(rope.rope_and_write(*given, **also, **more), q) and not int(flag)
            for i, slot in enumerate(slots.tolist()):
                for g in range(groups):
                    tiles = k_pages[slot // 64, g], v_pages[slot // 64, g]
                    assert_stored(*tiles, slot % 64, keys[i, g], values[i, g])


def paged(_: str) -> None:
    """Decode attention over e4m3 pages that rope has written, next to its definition in float64."""
    for heads, groups, dim in ((8, 2, 64), (8, 1, 128)):
        lengths, pages = (70, 129, 1), 7
        width, table = heads + 2 * groups, torch.zeros(64, 2, dim // 2)
        table[:, 0] = 1.0  # no turn
        order = torch.randperm(pages).int()
        tables = torch.stack([F.pad(x, (0, 3 - len(x))) for x in order[:6].split([2, 3, 1])])
        scales = (torch.rand(groups) / 20 + 0.02, torch.rand(groups) / 20 + 0.02)
        k_pages, v_pages = (torch.zeros(pages, groups, *s).to(E4M3) for s in ((64, dim), (dim, 64)))
        given = []
        for length, listed in zip(lengths, tables, strict=True):
            qkv, at = some(length, width * dim), torch.arange(length)
            places = (table, torch.zeros_like(at), listed[at // 64].long() * 64 + at % 64)
            q = rope.rope_and_write(
                qkv, *places, k_pages, v_pages, heads=heads, norms=None, eps=0.0, scales=scales
            )
            given.append(
                (q[-1], *(x.view(length, groups, dim) for x in qkv[:, heads * dim :].split(groups * dim, 1)))
            )
        q = torch.stack([x[0] for x in given])
        given_pages = (k_pages, v_pages)
        sizes = (torch.tensor(lengths, dtype=torch.int32), tables)
        options = {"base": dim**-0.5 * 1.4426950408889634, "splits": 1, "steps": 32}
        for early in (False, True):
            out = torch.empty_like(q)
            paged_attention.launch(
                q, *given_pages, out, out, out, *sizes, scales, out, codes=False, pow2=False, early=early, **options
            )  # fmt: skip
            for found, (query, *stored) in zip(out, given, strict=True):
                k, v = (
                    (CODES(x, s).double() * s[:, None]).repeat_interleave(heads // groups, 1)
                    for x, s in zip(stored, scales, strict=True)
                )
                p = torch.einsum("hd,thd->ht", query.double(), k).mul(dim**-0.5).softmax(1)
                expected = torch.einsum("ht,thd->hd", p, v)
                error = (found.double() - expected).norm() / expected.norm()
                assert float(error) < 0.004, float(error)
        for kind in ("fp32", "pow2") if dim == BLOCK else ():  # a head is a group then
            codes, scale = quantize_rows.empty_codes(len(q), heads * dim, q.device)
            paged_attention.launch(
                q, *given_pages, codes, codes, codes, *sizes, scales, scale, codes=True, pow2=kind == "pow2",
                early=False, **options,
            )  # fmt: skip
            assert_rows((codes, scale), out.flatten(1), kind)


def assert_turned(found: Tensor, x: Tensor, weight: Tensor | None, turn: Tensor) -> None:
    """To all but a few roundings of the norm."""
    x = x.float()
    if weight is not None:
        x = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.float()).bfloat16().float()
    (a, b), (cos, sin) = x.chunk(2, -1), turn[:, None].unbind(2)
    expected = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).bfloat16()
    assert float((found == expected).double().mean()) > 0.98
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)


def assert_stored(keys: Tensor, values: Tensor, at: int, key: Tensor, value: Tensor) -> None:
    """One token's, in a page's tiles [64, D] and [D, 64] of a head; codes stand as `numbers.py` says."""
    if key.dtype != E4M3:
        assert torch.equal(keys[at], key) and torch.equal(values[:, at], value)
        return
    dim = len(key)
    lane, byte = at % 8 // 2, at % 16 // 8 * 2 + at % 2
    for d in range(dim):
        place = (d % 8 // 2 * (dim // 16) + d // 16) * 4 + d % 16 // 8 * 2 + d % 2
        word = ((at // 16 * (dim // 8) + d // 8) * 4 + lane) * 8 + d % 8
        found = keys.view(torch.uint8)[at, place], values.view(torch.uint8).flatten()[word * 4 + byte]
        assert found == (key.view(torch.uint8)[d], value.view(torch.uint8)[d])


def swiglu(kind: str) -> None:
    """The gradient of gate and up, from BF16 and from codes, in the forms that are wanted."""
    for tokens, width in SHAPES[:3]:
        dy, gate_up = some(tokens, width), some(tokens, 2 * width)
        codes, values = held(gate_up)
        for given, x in ((gate_up, gate_up.float()), (codes, values.dequantize())):
            gate, up = x.split(width, 1)
            s = 1.0 / (1.0 + torch.exp2(gate * -1.4426950408889634))
            silu = gate * s
            slope = emulator.fma(silu, 1.0 - s, s).as_subclass(Tensor)
            expected = torch.cat([dy.float() * up * slope, dy.float() * silu], 1).bfloat16()
            for wanted in ((True, True), (True, False), (False, True)):
                rows, along = swiglu_backward.swiglu_backward(
                    dy, given, pow2=kind == "pow2", fp8=True, rows=wanted[0], columns=wanted[1]
                )
                assert (rows is not None, along is not None) == wanted
                if rows is not None:
                    assert_rows(rows, expected, kind)
                if along is not None:
                    assert_columns(along, expected, kind)


def truncated(_: str) -> None:
    """Thresholds are the reference's, with ties, temperatures, several segments, however many logits are listed on the way; kept
    ids are listed ascending, some cut off."""
    top_k, min_p = [0, 5, 9999, 20, 3, 0, 96], [0.0, 0.0, 0.05, 0.01, 0.0, 1.0, 0.0]
    top_p = [0.9, 0.8, 1.0, 0.5, 1.0, 1.0, 0.99]
    temperature = torch.tensor([1.0, 0.7, 1.0, 1.3, 1.0, 1.0, 2.0])
    most = torch.tensor([50, 9, 0, 5, 3, 1, 97], dtype=torch.int32)
    asked = Truncation.of(top_k, min_p, top_p, torch.device("cpu"))
    for vocabulary in (97, 5001):
        x = 3 * torch.randn(7, vocabulary)
        x[1] = (4 * x[1]).round() / 4
        cooled = x / temperature[:, None]
        expected = threshold(cooled, asked)
        for near in (8192, 64, 1):
            truncation.NEAR = near
            found = truncation.truncation_threshold(x, temperature, *asked.parts)
            assert torch.equal(found, expected), (near, found, expected)
        ids, count = truncation.kept_ids(x, temperature, found, most, 64)
        for row in range(7):
            kept = (cooled[row] >= expected[row]).nonzero()[:, 0] if most[row] else torch.empty(0)
            assert int(count[row]) == len(kept)
            assert ids[row, : min(len(kept), 64)].tolist() == kept[:64].tolist()


def head_gradient(_: str) -> None:
    """The gradient of logits over stored probabilities, and from logits, next to autograd's in float64. Vocabularies are no whole
    segments; temperatures, targets of p near one, probabilities that underflow."""
    for rows, vocabulary in ((9, 5001), (5, 97), (3, 8192)):
        x, targets = 3 * torch.randn(rows, vocabulary), torch.randint(vocabulary, (rows,))
        temperature = torch.tensor([1.0, 0.5, 1.3]).repeat(rows)[:rows].contiguous()
        x[0, 3] = -300.0  # exp of it is zero
        likely = torch.tensor([0.9999, 0.999, 0.98])
        others = x.double() / temperature.double()[:, None]
        others[torch.arange(rows), targets] = -torch.inf
        for row, p in enumerate(likely.double()):  # what the target needs to be as likely as that
            x[row, targets[row]] = (others[row].logsumexp(0) + (p / (1 - p)).log()) * temperature[row]
        wide = x.double().requires_grad_()
        log_p = (wide / temperature.double()[:, None]).log_softmax(-1)
        log_prob, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        normalizer = (x.double() / temperature.double()[:, None]).logsumexp(-1).float()
        stored = torch.full((rows - 1, vocabulary), 7.0).bfloat16()
        found = head_backward.entropy(x, temperature, normalizer, stored)
        assert torch.equal(found, head_backward.entropy(x, temperature, normalizer))
        torch.testing.assert_close(found.double(), entropy, rtol=1e-5, atol=1e-5)
        known = (x / temperature[:, None]).gather(1, targets[:, None])[:, 0] - normalizer
        expected = log_p.detach().exp()[:-1]
        assert float(expected.min()) < 1e-45 and not stored[0, 3]
        torch.testing.assert_close(stored.double(), expected, rtol=2.0**-8, atol=1e-38)
        stored = torch.full((rows, vocabulary), 7.0).bfloat16()
        head_backward.entropy(x, temperature, normalizer, stored)
        grad, grad_entropy = torch.randn(rows), torch.randn(rows)
        parts = [(log_prob, grad), (entropy, grad_entropy)]
        terms = [torch.autograd.grad(y @ g.double(), wide, retain_graph=True)[0] for y, g in parts]
        at = torch.arange(rows), targets
        for some_entropy in (grad_entropy, None):
            exact = terms[0] if some_entropy is None else terms[0] + terms[1]
            made, over = torch.empty_like(stored), stored.clone()
            head_backward.logits_grad(x, targets, temperature, normalizer, found, grad, some_entropy, made)
            head_backward.stored_logits_grad(over, targets, temperature, known, found, grad, some_entropy)
            errors = [float((d.double() - exact).norm() / exact.norm()) for d in (made, over)]
            print(f"{rows} x {vocabulary}: from logits {errors[0]:.2e}, over probabilities {errors[1]:.2e}")
            # p is rounded, and its logarithm so off by as much; then the result is rounded
            entropies = (grad_entropy.double() / temperature).abs()[:, None] * log_p.detach().exp()
            room = 2.0**-6.99 * (terms[0].abs() + terms[1].abs()) + 2.0**-8 * entropies + 1e-38
            # the target's own: one rounding, and what FP32 knows of its log-probability
            floor = 8e-6 * (grad.abs() + grad_entropy.abs()).double() / temperature.double()
            room[at] = 2.0**-7.99 * exact[at].abs() + floor
            assert bool(((over.double() - exact).abs() <= room).all())
            assert errors[0] < 4e-3 and errors[1] < 6e-3, errors
        tiny = torch.full((1, vocabulary), 1e-39).bfloat16()  # not a normal number
        ones = torch.ones(1)
        head_backward.stored_logits_grad(tiny, targets[:1], ones, -8 * ones, ones, ones, ones)
        assert tiny.isfinite().all() and int((tiny.abs() > 1e-6).sum()) == 1


def widen(kind: str) -> None:
    """Every code at each byte of a word, to the last bit and sign."""
    codes = torch.cat([torch.arange(256).repeat_interleave(4), torch.randint(256, (1 << 16,))]).to(
        torch.uint8
    )
    pairs = emulator.words_by_text(numbers.WIDEN, codes.view(torch.int32))
    values = codes.view(E4M3).half().view(-1, 4)
    for pair, found in enumerate(pairs):
        for half in (0, 1):
            expected = values[:, 2 * pair + half]
            made = (found >> 16 * half & 0xFFFF).to(torch.int16).view(torch.float16)
            wrong = made.view(torch.int16) != expected.view(torch.int16)
            assert not (wrong & ~expected.isnan()).any(), f"byte {2 * pair + half}"


def faults(_: str) -> None:
    """What the emulator must notice: a wrong address, a copy that nobody waits for, a wait that never ends."""
    x = torch.arange(8.0)
    for places in (8, -1):
        try:
            emulator.load(emulator.Pointer(x, places))
        except AssertionError:
            continue
        raise SystemExit("an address outside was read")
    tile, barrier = emulator.Descriptor(torch.ones(4, 4), [2, 2]), emulator.Barrier()
    emulator.LATE[0] = True
    smem = emulator.Shared(torch.zeros(2, 2))
    barrier.expect(tile.block_type.nbytes)
    emulator.bulk_copy(tile, [3, 3], barrier, smem)
    assert not torch.equal(smem.load(), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    barrier.wait(0)
    assert torch.equal(smem.load(), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    try:
        barrier.wait(1)
    except AssertionError:
        return
    raise SystemExit("a wait for a phase that nobody ends came back")


CHECKS = {
    check.__name__: check
    for check in (
        quantize_both,
        regroup,
        columns_of,
        rope_to_pages,
        paged,
        swiglu,
        head_gradient,
        truncated,
        widen,
        faults,
    )
}

if __name__ == "__main__":
    torch.manual_seed(0)
    emulator.LATE[0] = sys.argv[3] == "late"
    assert E4M3 == emulator.E4M3
    CHECKS[sys.argv[1]](sys.argv[2])
