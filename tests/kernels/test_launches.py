"""Every launch compiles for a Hopper GPU, without one.

Launchers run on tensors of the CPU; Triton binds, specialises and compiles what they launch as it would on the GPU, but
starts nothing. So wrong arguments, kernels that no longer compile and results of another form show on any machine that has
Triton 3.6 (`pip install triton==3.6.0`); elsewhere this is skipped.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", minversion="3.6")

from lockstep.bench.operations import Call, calls, tables  # noqa: E402
from lockstep.kernels.operation import LAUNCHERS  # noqa: E402

Launched = list[tuple[str, Any]]


def names(compiled: Launched) -> set[str]:
    return {name for name, _ in compiled}


def chooses(call: Call) -> bool:
    """Whether the launcher first compares and times kernels, which takes a GPU."""
    plain = call.name == "bf16_product" and call.args[0].shape[1] % 8 == 0
    return plain or (call.name == "fp8_linear" and call.args[4] is not None)


def test_every_operation(compiled: Launched) -> None:
    import lockstep.kernels.hopper  # noqa: F401 - declares them all

    for call in calls("cpu", tables()):
        if chooses(call):
            continue
        before = len(compiled)
        found = LAUNCHERS[call.name](*call.args, **call.kwargs)
        assert len(compiled) > before, call.name
        results = [] if found is None else [found] if isinstance(found, torch.Tensor) else list(found)
        forms = [(tuple(x.shape), x.dtype, tuple(x.stride())) for x in results]
        assert forms == [tuple(form) for form in call.forms], (call.name, call.kwargs)
    # A constant below FP32's normal numbers makes FP64 of what it meets.
    assert {name for name, kernel in compiled if ".f64" in kernel.asm["ptx"]} == set()


def test_an_entropy_is_one_kernel_whether_probabilities_are_stored_or_not(compiled: Launched) -> None:
    """So it has the same bits: another store may give a row's sum another order."""
    from lockstep.kernels.triton.head_backward import entropy

    for vocabulary in (151_936, 5001):
        x, ones = torch.zeros(4, vocabulary), torch.ones(4)
        for stored in (None, 4, 1, 0):
            p = None if stored is None else torch.zeros(stored, vocabulary, dtype=torch.bfloat16)
            entropy(x, ones, ones, p)
        assert len({id(kernel) for _, kernel in compiled}) == 1
        compiled.clear()


def test_every_form_of_the_narrow_products(compiled: Launched) -> None:
    from lockstep.kernels.products import MANY_ROWS, NARROW, NARROW_BF16, WIDE_BF16
    from lockstep.kernels.triton.narrow_bf16 import narrow_bf16_matmul
    from lockstep.kernels.triton.narrow_gemm import fits, narrow_matmul
    from lockstep.kernels.triton.quantize import empty_codes

    codes, scale = torch.zeros(1536, 512, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(12, 4)
    weight = torch.zeros(1536, 512, dtype=torch.bfloat16)
    for rows in (1, 17, 64, 256):
        x_codes, x_scale = empty_codes(rows, 512, torch.device("cpu"))
        for form in NARROW:
            if fits(rows, 1536, **form):
                narrow_matmul(x_codes, x_scale, codes, scale, **form)
        for form in NARROW_BF16:
            if fits(rows, 1536, **form):
                narrow_bf16_matmul(torch.zeros(rows, 512, dtype=torch.bfloat16), weight, **form)
    for form in WIDE_BF16:
        assert fits(MANY_ROWS, 1536, **form)
        narrow_bf16_matmul(torch.zeros(MANY_ROWS, 512, dtype=torch.bfloat16), weight, **form)
    assert names(compiled) == {"_narrow", "_narrow_bf16"}


def test_refresh_and_fingerprints(compiled: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.kernels import in_place
    from lockstep.kernels.renew import Source
    from lockstep.kernels.triton.fingerprint import fingerprints
    from lockstep.numerics.formats import BF16, square_blocks

    monkeypatch.setattr(in_place, "_master", lambda source: source.master)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    shapes = [(384, 512), (576, 576), (192, 576), (130, 200), (97, 323), (576,), (5,)]
    operands = (square_blocks("fp32"), square_blocks("pow2"), BF16)
    sources = [
        Source(f"{shape} {operand}", torch.zeros(shape), operand, torch.bfloat16, None)
        for shape in shapes
        for operand in operands
        if len(shape) == 2 or operand is BF16
    ]
    made = [renewed.packed for renewed in in_place.refresh(sources)]
    held = [(p.codes.codes, p.codes.scale) if p.codes is not None else (p.plain, None) for p in made]
    assert len(fingerprints(held)) == len(sources)
    assert names(compiled) == {"_requantize", "_round", "_fingerprint"}
    # Products read weights before they wait, so what writes weights lets no kernel in before its end.
    assert not any("griddepcontrol" in kernel.asm["ptx"] for _, kernel in compiled)


def test_a_place_is_looked_at_once_as_long_as_its_master_stays(
    compiled: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.kernels import in_place
    from lockstep.kernels.renew import Source
    from lockstep.kernels.triton.refresh import Pass
    from lockstep.numerics.formats import square_blocks

    looked: list[int] = []
    record = Pass._record
    monkeypatch.setattr(
        Pass,
        "_record",
        lambda self, master, *rest, **k: looked.append(master.data_ptr()) or record(self, master, *rest, **k),
    )
    monkeypatch.setattr(in_place, "_master", lambda source: source.master)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    operand, pow2 = square_blocks("fp32"), square_blocks("pow2")
    first, other = torch.zeros(256, 384), torch.zeros(256, 384)
    (made,) = in_place.refresh([Source("w", first, operand, torch.bfloat16, None)])
    assert looked == [first.data_ptr()]
    for master, kind, again in (
        (first, operand, False),
        (other, operand, True),
        (other, operand, False),
        (other, pow2, True),
    ):
        looked.clear()
        (renewed,) = in_place.refresh([Source("w", master, kind, torch.bfloat16, made.packed)])
        assert renewed.packed is made.packed and looked == ([master.data_ptr()] if again else []), (
            kind,
            again,
        )
    assert len(compiled) == 5


def test_a_first_working_copy_does_not_keep_its_master(
    compiled: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lockstep.kernels import in_place
    from lockstep.kernels.renew import Source
    from lockstep.numerics.formats import square_blocks

    monkeypatch.setattr(in_place, "_master", lambda source: source.master)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    master = torch.zeros(256, 384)
    source = Source("w", master, square_blocks("fp32"), torch.bfloat16, None)
    (made,) = in_place.refresh([source])
    kept = weakref.ref(master)
    del master, source
    gc.collect()
    assert made.packed.codes is not None and kept() is None and compiled


def test_launches_compile_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.kernels.products import compile_together

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: places.append(device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    places: list[Any] = []
    waited: list[Any] = []
    done: list[int] = []
    device, together = torch.device("cuda", 1), threading.Barrier(3, timeout=30)

    def launch(number: int) -> None:
        together.wait()
        done.append(number)

    compile_together([partial(launch, n) for n in range(3)], device)
    assert sorted(done) == [0, 1, 2] and waited == [device] and set(places) == {device}
    with pytest.raises(ZeroDivisionError):
        compile_together([lambda: 1 // 0, lambda: None], device)


def test_weights_that_are_timed_in_turns_outgrow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.kernels import in_turns, products

    monkeypatch.setattr(in_turns, "ROTATED_BYTES", 1 << 20)
    small, middle, large = (torch.ones(n, 64, dtype=torch.bfloat16) for n in (16, 2048, 8193))
    assert [len(products.copies_of(w)) for w in (small, middle, large)] == [products.MOST_COPIES, 4, 1]
    first, *others = products.copies_of(middle)
    assert first is middle and len({w.data_ptr() for w in others} | {middle.data_ptr()}) == 4


def test_values_are_written_side_by_side(compiled: Launched) -> None:
    from lockstep.kernels.triton.rope import write_pages

    rows = torch.zeros(128, 8, 128, dtype=torch.bfloat16)
    k_pages, v_pages = (torch.zeros(2, 8, *s, dtype=torch.bfloat16) for s in ((64, 128), (128, 64)))
    write_pages(rows, rows, torch.arange(128), torch.arange(128), k_pages, v_pages, None)
    ((_, kernel),) = compiled
    code = kernel.asm["ttgir"]
    store = [line for line in code.splitlines() if "tt.store" in line][-1]
    layout = re.findall(r"#blocked\d*", store)[-1]
    # Rows are the first dimension, and a value's dimension lies 64 elements behind the one before.
    assert re.search(rf"^{layout} = .*threadsPerWarp = \[32, 1\]", code, re.MULTILINE)
