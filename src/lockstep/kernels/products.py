"""Which kernel multiplies rows with a weight: for FP8 the library, a narrow kernel for few rows, or the Triton kernel; for BF16
one of the last two.

All give a row the same bits, whatever the number of rows. But that is proven, not believed: the library is used for a
weight's shape only after this process has compared it with the Triton kernel at every size class, and a form of the narrow
kernel only after it gave the library's bits. Without proof the Triton kernel does it all. Which of the proven ones runs is a
matter of measured time.

A process has one `PRODUCTS`, as a proof holds for the process: cuBLASLt reads its workspace setting once. The operation
`fp8_linear` is its `linear`.

Next: `triton/gemm.py` and `triton/narrow_gemm.py` for the arithmetic, `library.py` for what cuBLASLt demands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from lockstep.kernels.in_turns import captured, copies_for
from lockstep.kernels.library import scaled_mm_codes
from lockstep.kernels.operation import operation
from lockstep.kernels.triton import gemm, narrow_bf16, narrow_gemm
from lockstep.kernels.triton.quantize import quantize_rows

PROOF_ROWS = (4, 8, 16, 32, 64, 96, 128, 256, 512, 1024)
FEW_ROWS = (16, 32, 64, 128, narrow_gemm.MOST_ROWS)
"""Classes of few rows for which the faster of library and narrow kernel is found by timing; the bits are the same."""
NARROW = (
    {"stages": 12},
    {"stages": 6, "parts": 3},
    {"stages": 12, "tile": 64, "left": 1},
    {"stages": 12, "tile": 32, "left": 1},
    {"stages": 6, "left": 1, "parts": 3},
    {"stages": 8, "left": 2},
    {"stages": 5, "left": 2, "parts": 3},
)
"""Forms of the FP8 kernel that were fastest somewhere; each costs a compilation."""
NARROW_BF16 = (
    {"stages": 12},
    {"stages": 9},
    {"stages": 12, "tile": 64, "left": 1},
    {"stages": 12, "tile": 32, "left": 1},
    {"stages": 8, "tile": 128, "left": 1},
    {"stages": 4, "tile": 128, "tokens": 256},
)
"""Of the BF16 kernel. Without scales there are registers for larger tiles, which read less from the second-level cache: it bounds
the output head."""
WIDE_BF16 = ({"stages": 4, "tile": 128, "tokens": 256},)
"""Of the BF16 kernel for more rows than are few."""
MANY_ROWS = 1024
"""Stand for all those: enough for every processor, and their logits take 0.6 GB."""
HEAD_START_MS = 0.002
"""How much slower alone a narrow kernel may be than the library: it starts while the kernel before it ends, and lets the next one
start."""
MOST_COPIES = 24
"""Of a weight that is timed in turns."""
Form = dict[str, int]
"""Options of the narrow kernel."""


class Products:
    """Proofs and choices so far."""

    def __init__(self) -> None:
        self._library: dict[torch.Size, bool] = {}
        self._narrow: dict[tuple[torch.Size, int], Form | None] = {}
        self._plain: dict[tuple[torch.Size, int, torch.dtype], Form | None] = {}

    def linear(
        self,
        x_codes_TK: Tensor,
        x_scale: Tensor,
        w_codes_NK: Tensor,
        w_scale: Tensor,
        library_scale: Tensor | None,
        w_group: int,
    ) -> Tensor:
        """x w^T of 1x128 rows and a weight with `w_group` rows a scale, rounded once to BF16, [T, N]. library_scale: the weight's
        in the library's layout, None for shapes that it refuses."""
        if library_scale is None or not self.proven(w_codes_NK, w_scale, library_scale, w_group):
            return gemm.fp8_matmul(x_codes_TK, x_scale, w_codes_NK, w_scale, w_group=w_group)
        narrow = None
        if x_scale.stride(1) % 4 == 0:  # in padded storage, as kernels leave them; a copy may be denser
            narrow = self._choice(w_codes_NK, w_scale, library_scale, len(x_codes_TK))
        if narrow is not None:
            return narrow_gemm.narrow_matmul(x_codes_TK, x_scale, w_codes_NK, w_scale, **narrow)
        return scaled_mm_codes(x_codes_TK, x_scale, w_codes_NK, library_scale)

    def proven(self, w_codes_NK: Tensor, w_scale: Tensor, library_scale: Tensor, w_group: int) -> bool:
        """Whether the library gives rows of this weight shape the Triton kernel's bits at every size class."""
        shape = w_codes_NK.shape
        if shape not in self._library:
            x = _random(PROOF_ROWS[-1], w_codes_NK, seed=shape[0] + shape[1])
            expected = gemm.fp8_matmul(*quantize_rows(x, pow2=False), w_codes_NK, w_scale, w_group=w_group)
            same = True
            for count in PROOF_ROWS:
                for first in {0, PROOF_ROWS[-1] - count}:
                    some = quantize_rows(x[first : first + count], pow2=False)
                    found = scaled_mm_codes(*some, w_codes_NK, library_scale)
                    same &= torch.equal(found, expected[first : first + count])
            self._library[shape] = same
        return self._library[shape]

    def agree(self, ours: Tensor, known: Tensor) -> bool:
        """What a narrow form must do to be a candidate."""
        return torch.equal(ours, known)

    def _choice(self, w_codes_NK: Tensor, w_scale: Tensor, library_scale: Tensor, count: int) -> Form | None:
        """The fastest form of the narrow kernel for so few rows, or None where the library is faster. Each candidate has to
        give the library's bits first."""
        size = _size_class(count)
        if size is None:
            return None
        key = (w_codes_NK.shape, size)
        if key not in self._narrow:
            x = _random(size, w_codes_NK, seed=size)
            some = {n: quantize_rows(x[:n], pow2=False) for n in _counts(size)}

            def library(w_NK: Tensor) -> Tensor:
                return scaled_mm_codes(*some[size], w_NK, library_scale)

            def narrow(n: int, form: Form, w_NK: Tensor) -> Tensor:
                codes, scale = some[n]
                return narrow_gemm.narrow_matmul(codes, scale, w_NK, w_scale, **form)

            self._narrow[key] = self._fastest(size, w_codes_NK, library, narrow, NARROW)
        return self._narrow[key]

    def plain(self, x_TK: Tensor, w_NK: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """x w^T of BF16 rows and a BF16 weight, rounded once to `dtype`, [T, N]: the Triton kernel or a form of the narrow one
        that is faster and has its bits."""
        form = self._plain_choice(w_NK, len(x_TK), dtype) if narrow_bf16.takes(x_TK, w_NK) else None
        if form is None:
            return gemm.bf16_matmul(x_TK, w_NK, dtype=dtype)
        return narrow_bf16.narrow_bf16_matmul(x_TK, w_NK, dtype=dtype, **form)

    def _plain_choice(self, w_NK: Tensor, count: int, dtype: torch.dtype) -> Form | None:
        few = _size_class(count)
        size, forms = (MANY_ROWS, WIDE_BF16) if few is None else (few, NARROW_BF16)
        key = (w_NK.shape, size, dtype)
        if key not in self._plain:
            x = _random(size, w_NK, seed=size)
            self._plain[key] = self._fastest(
                size,
                w_NK,
                lambda w_NK: gemm.bf16_matmul(x, w_NK, dtype=dtype),
                lambda n, form, w_NK: narrow_bf16.narrow_bf16_matmul(x[:n], w_NK, dtype=dtype, **form),
                forms,
            )
        return self._plain[key]

    def _fastest(
        self,
        size: int,
        weight_NK: Tensor,
        known: Callable[[Tensor], Tensor],
        narrow: Callable[[int, Form, Tensor], Tensor],
        forms: Sequence[Form],
    ) -> Form | None:
        """The fastest form of a narrow kernel for `size` rows, or None where the known kernel is faster. Both take the weight;
        known: of `size` rows; narrow: of the first n of them."""
        expected = known(weight_NK)
        candidates = [form for form in forms if _sensible(size, len(weight_NK), form)]
        compile_together([partial(narrow, size, form, weight_NK) for form in candidates], expected.device)
        weights = copies_of(weight_NK)
        best, found = elapsed([partial(known, w) for w in weights]) + HEAD_START_MS, None
        for form in candidates:
            if not all(self.agree(narrow(n, form, weight_NK), expected[:n]) for n in _counts(size)):
                continue
            time = elapsed([partial(narrow, size, form, w) for w in weights])
            if time < best:
                best, found = time, form
        return found


PRODUCTS = Products()
"""Of this process."""


@operation("fp8_linear", fake=lambda x_codes_TK, w_codes_NK: gemm.empty_product(x_codes_TK, w_codes_NK))
def fp8_linear(
    x_codes_TK: Tensor,
    x_scale: Tensor,
    w_codes_NK: Tensor,
    w_scale: Tensor,
    library_scale: Tensor | None,
    w_group: int,
) -> Tensor:
    """See `Products.linear`."""
    return PRODUCTS.linear(x_codes_TK, x_scale, w_codes_NK, w_scale, library_scale, w_group)


@operation("bf16_product", fake=gemm.empty_product)
def bf16_product(x_TK: Tensor, w_NK: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """See `Products.plain`."""
    return PRODUCTS.plain(x_TK, w_NK, dtype)


def _sensible(size: int, columns: int, form: Form) -> bool:
    """Whether a form is worth a trial for so many rows: other tokens than the default's, fewer or, beyond its tile, more."""
    tokens, most = form.get("tokens", 0), narrow_gemm.shape_of(size)
    return (tokens < most or (most < size and tokens > most)) and narrow_gemm.fits(size, columns, **form)


def compile_together(launches: Sequence[Callable[[], object]], device: torch.device) -> None:
    """Launches each once, from as many threads as there are cores: most of a first launch is compilation, which one core would do
    one after the other. Waits for the device."""
    threads = min(len(launches), os.cpu_count() or 1)
    if threads < 2:
        return
    with ThreadPoolExecutor(threads, "compile", torch.cuda.set_device, (device,)) as pool:
        for done in [pool.submit(launch) for launch in launches]:
            done.result()
    torch.cuda.synchronize(device)


def _size_class(count: int) -> int | None:
    """The class of few rows that so many belong to, or None where they are not few."""
    return next((size for size in FEW_ROWS if size >= count), None)


def _counts(size: int) -> tuple[int, int, int]:
    """Numbers of rows at which a form of this size class is compared."""
    return 1, size - 3, size


def _random(rows: int, w_codes_NK: Tensor, *, seed: int) -> Tensor:
    """Rows that the weight takes, BF16."""
    device = w_codes_NK.device
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, w_codes_NK.shape[1], generator=generator, device=device).bfloat16()


def copies_of(weight: Tensor) -> list[Tensor]:
    """The weight, and as many copies as it takes that none is in the second-level cache when its turn comes again."""
    count = min(copies_for(weight.nbytes), MOST_COPIES)
    return [weight, *(weight.clone() for _ in range(count - 1))]


def elapsed(launches: Sequence[Callable[[], object]], repeats: int = 24) -> float:
    """Milliseconds of one of these launches in turns, within a graph: one follows the other as in a decode step, so what a kernel
    does while the one before ends counts for it."""
    graph, count = captured(launches, repeats)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(sorted(times)[2]) / count
