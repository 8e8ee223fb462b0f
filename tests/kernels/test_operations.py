"""Kernels as operations of torch: the decorator on plain functions, and that each fake result has the form of the real one.

The first part runs anywhere. The second needs Triton to import the kernels, but no GPU: results have shapes, types and strides
only, and are compared with formulas and with the reference's. On a GPU the same calls run, and torch checks each declaration.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.bench.operations import calls, tables
from lockstep.kernels.attention_index import Run
from lockstep.kernels.operation import OPERATIONS, operation
from lockstep.kernels.reference import ReferenceKernels
from lockstep.numerics.formats import BLOCK, E4M3, row_groups
from lockstep.numerics.quantize import Quantized

CALLS: list[str] = []
"""Launches of the functions below."""


def _padded(x_TK: Tensor, more: int = 1) -> tuple[Tensor, Tensor]:
    """Storage as kernels have it: the second result is a transposed view of padded rows."""
    rows, columns = x_TK.shape
    wide = -(-rows // 4) * 4
    codes = torch.empty(rows, columns, dtype=E4M3, device=x_TK.device)
    return codes, torch.empty(more, wide, dtype=torch.float32, device=x_TK.device).t()[:rows]


@operation("test_codes", fake=_padded, device="cpu")
def codes(x_TK: Tensor, more: int = 1, *, pow2: bool) -> tuple[Tensor, Tensor]:
    CALLS.append("codes")
    found, scale = _padded(x_TK, more)
    return found.copy_(x_TK), scale.copy_(x_TK.abs().amax(1, keepdim=True).expand(-1, more) + pow2)


@operation("test_forms", fake=lambda x, both: [torch.empty_like(x) for _ in range(1 + both)], device="cpu")
def forms(x: Tensor, bias: Tensor | None, *, both: bool) -> list[Tensor]:
    CALLS.append("forms")
    first = x * 2 if bias is None else x * 2 + bias
    return [first, first + 1] if both else [first]


@operation("test_write", fake=lambda x: torch.empty_like(x), mutates=("pages", "flag"), device="cpu")
def write(x: Tensor, slots: Tensor, pages: Tensor, flag: Tensor | None) -> Tensor:
    CALLS.append("write")
    pages[slots] = x
    if flag is not None:
        flag.fill_(1)
    return x + 1


class Seen(TorchDispatchMode):
    """The operations that went through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype, x.stride()


def test_a_plain_call_is_the_launcher_itself() -> None:
    x = torch.randn(5, 8)
    with Seen() as seen:
        found, scale = codes(x, 2, pow2=True)
    assert not any(name.startswith("lockstep::") for name in seen.names)
    assert form(found) == ((5, 8), E4M3, (8, 1)) and form(scale) == ((5, 2), torch.float32, (1, 8))
    with Seen() as seen:
        codes(torch.nn.Parameter(x, requires_grad=False), pow2=True)
    assert not any(name.startswith("lockstep::") for name in seen.names)


def test_fake_and_meta_tensors_get_the_fake() -> None:
    CALLS.clear()
    with FakeTensorMode():
        found = codes(torch.empty(5, 8), 2, pow2=True)
        assert [form(x) for x in found] == [((5, 8), E4M3, (8, 1)), ((5, 2), torch.float32, (1, 8))]
        assert form(codes(torch.empty(6, 8), pow2=False)[1]) == ((6, 1), torch.float32, (1, 8))
        assert len(forms(torch.empty(2), None, both=True)) == 2
        pages = torch.empty(9, 3)
        assert form(write(torch.empty(2, 3), torch.empty(2).long(), pages, None)) == (
            (2, 3),
            torch.float32,
            (3, 1),
        )
    assert form(codes(torch.empty(5, 8, device="meta"), pow2=True)[1])[2] == (1, 8)
    assert not CALLS


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_programs_hold_the_operation(backend: str) -> None:
    names: list[str] = []

    def keeping(module: Any, inputs: Any) -> Any:
        names.extend(str(node.target) for node in module.graph.nodes if "lockstep" in str(node.target))
        return module

    def program(x: Tensor, pages: Tensor, flag: Tensor) -> tuple[Tensor, ...]:
        found, scale = codes(x, 2, pow2=True)
        first, second = forms(found.float(), None, both=True)
        [third] = forms(first, second, both=False)
        moved = write(third * scale[:, :1], torch.tensor([1, 0, 4, 3, 2]), pages, flag)
        return moved, pages * 2

    x = torch.randn(5, 8)
    expected_pages, expected_flag = torch.zeros(6, 8), torch.zeros(1)
    expected = program(x, expected_pages, expected_flag)
    torch.compile(program, backend=keeping, fullgraph=True)(x, torch.zeros(6, 8), torch.zeros(1))
    assert [n.split(".")[1] for n in names] == ["test_codes", "test_forms", "test_forms", "test_write"]
    torch.compiler.reset()
    pages, flag = torch.zeros(6, 8), torch.zeros(1)
    found = torch.compile(program, backend=backend, fullgraph=True)(x, pages, flag)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(pages, expected_pages) and torch.equal(flag, expected_flag)
    torch.compiler.reset()


def test_torch_agrees_with_the_declarations() -> None:
    x = torch.randn(5, 8)
    checks: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("test_codes", (x, 2), {"pow2": True}),
        ("test_forms", (x, None), {"both": True}),
        ("test_forms", (x, x), {"both": False}),
        ("test_write", (x, torch.arange(5), torch.zeros(6, 8), torch.zeros(1)), {}),
        ("test_write", (x, torch.arange(5), torch.zeros(6, 8), None), {}),
    ]
    for name, args, kwargs in checks:
        torch.library.opcheck(OPERATIONS[name], args, kwargs)


def test_what_is_declared_wrongly_is_refused() -> None:
    def launch(x: Tensor, *, pow2: bool) -> Tensor:
        return x + pow2

    with pytest.raises(ValueError, match="test_codes is declared twice"):
        operation("test_codes", fake=lambda x: x)(launch)
    with pytest.raises(ValueError, match="test_other takes y, its launcher doesn't"):
        operation("test_other", fake=lambda y: y)(launch)
    with pytest.raises(ValueError, match="scales has unsupported type"):

        @operation("test_pair", fake=lambda x: x)
        def pair(x: Tensor, scales: tuple[Tensor, Tensor] | None) -> Tensor:
            return x

    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        operation("test_elsewhere", fake=lambda x: torch.empty_like(x))(launch)
        OPERATIONS["test_elsewhere"](torch.zeros(1), pow2=True)


# The kernels themselves ---------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The Hopper backend on a machine that says it is one."""
    pytest.importorskip("triton")
    from lockstep.kernels.hopper import HopperKernels

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    made = HopperKernels()
    monkeypatch.undo()
    yield made


def described(found: Any) -> list[tuple[Any, ...]]:
    """Forms of all tensors of a result, in order."""
    parts = (found,) if isinstance(found, Tensor) else found
    return [] if found is None else [form(x) for x in parts]


def test_fakes_have_the_form_of_results(kernels: Any) -> None:
    found = tables()
    with FakeTensorMode():
        made = calls("cpu", found)
        for call in made:
            assert described(OPERATIONS[call.name](*call.args, **call.kwargs)) == call.forms, (
                call.name,
                call.kwargs,
            )
    assert {call.name for call in made} == {name for name in OPERATIONS if not name.startswith("test_")}


def test_codes_lie_in_padded_storage(kernels: Any) -> None:
    with FakeTensorMode():
        for rows, padded in ((1, 4), (4, 4), (103, 104)):
            x = torch.empty(rows, 200, dtype=torch.bfloat16)
            total, found = kernels.add_norm(x, x, x[0], 1e-6, row_groups("fp32"))
            assert form(total) == form(x) and total is not x
            for codes in (found, kernels.quantize_rows(x, row_groups("fp32"))):
                assert codes.codes.untyped_storage().nbytes() == padded * 200
                assert form(codes.scale) == ((rows, 2), torch.float32, (1, padded))
            assert kernels.add_norm(x, None, x[0], 1e-6, None)[0] is x


def test_methods_give_the_shapes_of_the_reference(kernels: Any) -> None:
    runs = [Run(0, 70, 0, torch.arange(70)), Run(70, 33, 0, torch.arange(70, 103))]
    plain = ReferenceKernels()
    index = SimpleNamespace(real=plain.index(runs, 2), fake=kernels.index(runs, 2))

    def shapes(backend: Any, index: Any) -> list[Any]:
        def some(*size: int) -> Tensor:
            return torch.ones(size, dtype=torch.bfloat16)

        x, weight, gate_up = some(103, 256), some(384, 256), some(103, 768)
        q, k, v = some(103, 4, 128), some(103, 2, 128), some(103, 2, 128)
        codes = Quantized(weight.to(E4M3), torch.ones(3, 2), (BLOCK, BLOCK))
        rows = backend.quantize_rows(x, row_groups("fp32"))
        out, lse = backend.attention(q, k, v, index)
        found = [
            rows.codes,
            rows.scale,
            backend.rms_norm(x, x[0], 1e-6),
            backend.linear(backend.dense_input(rows), backend.pack(codes)),
            backend.linear(backend.dense_input(x), backend.pack(weight)),
            backend.swiglu(*gate_up.chunk(2, 1)),
            out,
            lse,
            *backend.attention_grad(out, q, k, v, out, lse, index),
            backend.quantize_kv(k, torch.ones(2)),
            backend.log_normalizer(gate_up.float()),
        ]
        return [tuple(x.shape) for x in found]

    expected = shapes(plain, index.real)
    assert index.fake.gradient.entries == 103  # made here: it reads values
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert shapes(kernels, index.fake) == expected


@pytest.mark.gpu
def test_torch_agrees_with_every_operation(hopper: SimpleNamespace) -> None:
    """Results like the fakes, also with symbolic sizes; nothing changes but what is declared; no result is an argument."""
    import lockstep.kernels.hopper  # noqa: F401

    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for call in calls("cuda", tables()):
        operator = OPERATIONS[call.name]
        assert described(operator(*call.args, **call.kwargs)) == call.forms, (call.name, call.kwargs)
        kept = [x.contiguous().clone().view(torch.uint8) if isinstance(x, Tensor) else x for x in call.args]
        # `test_schema` compares arguments in a way that FP8 has no operation for; below is a comparison of bytes.
        torch.library.opcheck(operator, call.args, call.kwargs, test_utils=checks[call.has_codes :])
        for argument, before, now in zip(operator._schema.arguments, kept, call.args, strict=False):
            if isinstance(now, Tensor) and not (argument.alias_info and argument.alias_info.is_write):
                assert torch.equal(now.contiguous().view(torch.uint8), before), (call.name, argument.name)
