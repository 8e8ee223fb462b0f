"""Gluon kernels on a CPU, program by program: what they compute and where they put it, without a compiler and without a GPU.

`install` puts stand-ins for Triton's modules in place, so it belongs into a process of its own (`emulated.py`); kernels imported
from then on run when they are launched. Layouts are ignored. Arithmetic is FP32 as written, with `fma` rounded once;
instructions given as text are recognised by what they contain. Addresses are checked. Asynchronous copies land at once, or as
late as they may (`LATE`): what is not waited for is rubbish, and what is overwritten too early is gone in one of the two.

What this can't see is what a GPU does at the same time: warps, proxies, registers. `test_slots.py` reads that off machine code.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LATE = [False]
"""Whether copies land when they are waited for, not when they are asked for."""
RUBBISH = 0x7F
PROGRAM, GRID, WARPS = [0, 0, 0], [1, 1, 1], [4]


class Value(Tensor):
    """A tensor of a kernel."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        """Cast as the hardware does it: what is too large for e4m3 saturates."""
        x = self.as_subclass(Tensor)
        if bitcast:
            return value(x.contiguous().view(dtype))
        if dtype == E4M3:
            x = torch.where(x.isnan(), x.float(), x.float().clamp(-448, 448))
        return value(x.to(dtype))


def value(x: Any) -> Value:
    """A number or tensor as a kernel's."""
    x = x if isinstance(x, Tensor) else torch.tensor(x)
    return x.as_subclass(Value)


class Pointer:
    """Places in a tensor's storage."""

    def __init__(self, whole: Tensor, places: Any) -> None:
        self.whole, self.places = whole, places
        self.dtype = SimpleNamespace(element_ty=whole.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.whole, self.places + more)

    def at(self, mask: Any) -> tuple[Tensor, Tensor]:
        """(places, which of them count), of one shape. Every one that counts is inside."""
        places = torch.as_tensor(self.places).as_subclass(Tensor).long()
        wanted = torch.as_tensor(True if mask is None else mask).as_subclass(Tensor)
        places, wanted = torch.broadcast_tensors(places, wanted)
        inside = (places >= 0) & (places < len(self.whole))
        assert bool((inside | ~wanted).all()), "an address outside of the tensor"
        return torch.where(wanted, places, 0), wanted


def load(pointer: Pointer, mask: Any = None, other: float = 0.0, **_: object) -> Value:
    """`gl.load`."""
    places, wanted = pointer.at(mask)
    found = pointer.whole[places]
    raw, rest = found.view(_bits(found)), torch.full((), other).to(found.dtype)
    return value(torch.where(wanted, raw, rest.view(_bits(found))).view(found.dtype))


def store(pointer: Pointer, x: Any, mask: Any = None, **_: object) -> None:
    """`gl.store`."""
    places, wanted = pointer.at(mask)
    x = value(x).to(pointer.whole.dtype).as_subclass(Tensor).expand(places.shape)
    raw = pointer.whole.view(_bits(x))
    raw[places[wanted]] = x.contiguous().view(_bits(x))[wanted]


def _bits(x: Tensor) -> torch.dtype:
    """An integer type as wide as x's: torch indexes no e4m3."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]


class Shared:
    """Shared memory."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def index(self, i: Any) -> Shared:
        """One of the first dimension."""
        return Shared(self.x[int(i)])

    def permute(self, axes: tuple[int, ...]) -> Shared:
        """The same with its dimensions in another order."""
        return Shared(self.x.permute(axes))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        """A range of one dimension."""
        return Shared(self.x.narrow(dim, start, length))

    def load(self, _layout: object = None) -> Value:
        """Its content."""
        return value(self.x.clone())

    def store(self, x: Tensor) -> None:
        """Content of the same shape and type."""
        assert x.shape == self.x.shape and x.dtype == self.x.dtype
        self.x.copy_(x)

    def spoil(self) -> None:
        """What nobody has waited for."""
        self.x.view(torch.uint8).fill_(RUBBISH)


class Barrier:
    """An mbarrier that one `expect` at a time may arm. coming: copies on their way."""

    def __init__(self) -> None:
        self.missing, self.phases, self.coming = 0, 0, list[Callable[[], None]]()

    def expect(self, nbytes: int) -> None:
        """One more phase, which ends with so many bytes."""
        assert self.missing == 0, "the phase before isn't over"
        self.missing = nbytes

    def arrive(self, nbytes: int) -> None:
        """Bytes of the phase."""
        self.missing -= nbytes
        assert self.missing >= 0, "more bytes than expected"
        self.phases += self.missing == 0

    def wait(self, parity: int) -> None:
        """Until the last phase is over, which must be one of this parity: a kernel that runs alone waits for no other."""
        for land in self.coming:
            land()
        self.coming.clear()
        assert self.missing == 0 and self.phases and (self.phases - 1) % 2 == int(parity), "waits for ever"


class Barriers:
    """Several, in shared memory; as one, the first."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in builtins.range(count)]

    def index(self, i: Any) -> Barrier:
        """One of them."""
        return self.all[int(i)]


def _one(barrier: Barrier | Barriers) -> Barrier:
    return barrier if isinstance(barrier, Barrier) else barrier.all[0]


class Descriptor:
    """Tiles of a matrix; what lies outside of it is zero."""

    def __init__(self, x: Tensor, block: list[int], _layout: object = None) -> None:
        self.x, self.block, self.dtype, self.layout = x, block, x.dtype, None
        self.block_type = SimpleNamespace(nbytes=block[0] * block[1] * x.element_size())

    def tile(self, row: int, column: int) -> Tensor:
        """Rows and columns from there on."""
        raw = torch.zeros(*self.block, dtype=_bits(self.x))
        part = self.x.view(_bits(self.x))[row : row + self.block[0], column : column + self.block[1]]
        raw[: len(part), : part.shape[1]] = part
        return raw.view(self.x.dtype)


def bulk_copy(descriptor: Descriptor, at: list[Any], barrier: Any, to: Shared, pred: Any = True) -> None:
    """`tma.async_copy_global_to_shared`."""
    if not bool(pred):
        return
    row, column, waiting = int(at[0]), int(at[1]), _one(barrier)

    def land() -> None:
        to.x.copy_(descriptor.tile(row, column))
        waiting.arrive(descriptor.block_type.nbytes)

    if LATE[0]:
        to.spoil()
        waiting.coming.append(land)
    else:
        land()


def words_by_text(asm: str, word: Tensor) -> list[Tensor]:
    """$0 and $1 of a conversion of words, as it is written, $2 being `word`."""
    held: dict[str, Tensor] = {"$2": word.long() & 0xFFFFFFFF}
    for text in asm.strip("{} \n").split(";"):
        name, _, rest = text.strip().partition(" ")
        if not name or name == ".reg":
            continue
        *to, source = [operand.strip("{} ") for operand in rest.split(",")]
        given = held[source]
        if name == "mov.b32":
            low, high = to
            held[low], held[high] = given & 0xFFFF, given >> 16
        else:
            assert name == "cvt.rn.f16x2.e4m3x2"
            made = [(given >> s & 0xFF).to(torch.uint8).view(E4M3).half().view(torch.int16) for s in (0, 8)]
            held[to[0]] = (made[0].long() & 0xFFFF) | (made[1].long() & 0xFFFF) << 16
    return [torch.where(held[o] >= 1 << 31, held[o] - (1 << 32), held[o]).int() for o in ("$0", "$1")]


def by_text(asm: str, constraints: str, args: list[Any], **_: object) -> Any:
    """`gl.inline_asm_elementwise` of the instructions that kernels use."""
    if "cvt.rn.satfinite.e4m3x2" in asm:
        codes = [a.to(E4M3).as_subclass(Tensor).view(torch.uint8).int() for a in args]
        return value(codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24)
    x = args[0].as_subclass(Tensor)
    if "cvt.rn.satfinite.f16x2" in asm:
        return value(x.clamp(-65504.0, 65504.0).half())
    if "cvt.rn.f16x2.e4m3x2" in asm:
        return [value(found) for found in words_by_text(asm, x)]
    if "0fBFB8AA3B" in asm:  # `sigmoid`: the factor is -1 / log(2), in FP32
        return value(1.0 / (1.0 + torch.exp2(x * -1.4426950216293335)))
    known = {
        "shl.b32": lambda: x.float(),
        "rcp.approx.ftz.f32": lambda: 1.0 / x,
        "lg2.approx.ftz.f32": lambda: torch.log2(torch.where(x.abs() < 2.0**-126, 0.0, x)),
    }
    return value(known[asm.split()[0]]())


def fma(a: Any, b: Any, c: Any) -> Value:
    """a b + c, rounded once but for a tie in 2^29 or so."""
    a, b, c = (torch.as_tensor(x).as_subclass(Tensor).double() for x in (a, b, c))
    return value((a * b + c).float())


def product(a: Any, b: Shared, sum: Tensor, use_acc: bool = True, is_async: bool = False) -> Value:
    """`warpgroup_mma`, but for the order in which the instruction adds."""
    a = a.x if isinstance(a, Shared) else a.as_subclass(Tensor)
    return value(a.float() @ b.x.float() + (sum if use_acc else 0))


class Constant:
    """`gl.constexpr` of a number."""

    def __new__(cls, x: Any = None) -> Any:
        kind = type(x)
        if kind not in (int, float):
            return x
        return type("Constant", (kind,), {"value": property(lambda self: kind(self))})(x)


def _like(a: Tensor, b: Any) -> Tensor:
    return b if isinstance(b, Tensor) else torch.full((), b, dtype=a.dtype).as_subclass(Value)


class Kernel:
    """A function under `gluon.jit`: called by others, or launched over a grid."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        function.__globals__["range"] = _range

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, **_: object) -> None:
            WARPS[0], GRID[:] = num_warps, [*grid, 1, 1][:3]
            names = self.function.__code__.co_varnames
            constant = self.function.__annotations__
            given = [_argument(a, n in constant) for a, n in zip(args, names, strict=False)]
            for z in builtins.range(GRID[2]):
                for y in builtins.range(GRID[1]):
                    for x in builtins.range(GRID[0]):
                        PROGRAM[:] = [x, y, z]
                        self.function(*given)

        return launch


def _argument(x: Any, constant: bool) -> Any:
    if isinstance(x, Tensor):
        return Pointer(torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()), x.storage_offset())
    return value(x) if isinstance(x, int) and not isinstance(x, bool) and not constant else x


def _range(*bounds: Any) -> Iterator[Value]:
    return (value(i) for i in builtins.range(*(int(b) for b in bounds)))


def _jit(function: Callable[..., Any] | None = None, **_: object) -> Any:
    return Kernel if function is None else Kernel(function)


def _assert(holds: bool) -> None:
    assert holds


def _shared(dtype: torch.dtype, shape: list[int], _layout: object) -> Shared | Barriers:
    if dtype == torch.int64:
        return Barriers(shape[0])
    found = Shared(torch.empty(shape, dtype=dtype))
    found.spoil()
    return found


def language() -> ModuleType:
    """`triton.experimental.gluon.language`."""
    gl = ModuleType("language")
    kinds = ("bfloat16", "float16", "float32", "int16", "int32", "int64")
    layouts = (
        "BlockedLayout",
        "SliceLayout",
        "SwizzledSharedLayout",
        "NVMMASharedLayout",
        "DistributedLinearLayout",
        "NVMMADistributedLayout",
        "DotOperandLayout",
    )
    gl.__dict__.update({name: getattr(torch, name) for name in kinds})
    gl.__dict__.update({name: MagicMock() for name in layouts})
    gl.__dict__.update(
        float8e4nv=E4M3,
        constexpr=Constant,
        static_range=builtins.range,
        static_assert=_assert,
        program_id=lambda axis: value(PROGRAM[axis]),
        num_programs=lambda axis: value(GRID[axis]),
        num_warps=lambda: WARPS[0],
        arange=lambda start, end, layout=None: value(torch.arange(start, end)),
        zeros=lambda shape, dtype, layout=None: value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, x, dtype, layout=None: value(torch.full(shape, x, dtype=dtype)),
        full_like=torch.full_like,
        zeros_like=torch.zeros_like,
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, axes: x.permute(axes),
        split=lambda x: x.unbind(-1),
        join=lambda a, b: torch.stack([a, b], -1),
        exp=torch.exp,
        exp2=torch.exp2,
        cdiv=lambda a, b: -(-a // b),
        convert_layout=lambda x, *_, **__: x,
        abs=torch.abs,
        where=lambda c, a, b: torch.where(c, a, b),
        maximum=lambda a, b, **_: torch.maximum(a, _like(a, b)),
        minimum=lambda a, b, **_: torch.minimum(a, _like(a, b)),
        sum=lambda x, axis: x.sum(axis),
        cumsum=lambda x, axis: x.cumsum(axis, dtype=x.dtype),
        max=lambda x, axis: x.amax(axis),
        reduce=lambda x, axis, _larger: x.amax(axis),
        div_rn=lambda a, b: (a if isinstance(a, Tensor) else value(a)) / b,
        sqrt_rn=torch.sqrt,
        fma=fma,
        load=load,
        store=store,
        inline_asm_elementwise=by_text,
        allocate_shared_memory=_shared,
        thread_barrier=lambda: None,
    )
    return gl


def shared_language(gl: ModuleType) -> MagicMock:
    """`triton.language`, as far as kernels under test use it: `gl` has it all."""
    names = ("bfloat16", "float32", "int32", "int64", "float8e4nv", "constexpr", "expand_dims", "sum")
    names += ("program_id", "arange", "zeros", "zeros_like", "load", "store", "exp")
    names += (
        "full",
        "max",
        "cumsum",
        "div_rn",
        "sqrt_rn",
        "fma",
        "minimum",
        "maximum",
        "where",
        "inline_asm_elementwise",
    )
    return MagicMock(**{name: getattr(gl, name) for name in names})


def install() -> None:
    """Stand-ins for every module of Triton that a kernel imports, and a GPU of three processors."""
    gl, gluon, hopper = language(), ModuleType("gluon"), ModuleType("hopper")
    gluon.__dict__.update(jit=_jit, constexpr_function=lambda f: f, language=gl)
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=lambda barrier, count: None,
        expect=lambda barrier, nbytes, pred=True: _one(barrier).expect(nbytes) if bool(pred) else None,
        wait=lambda barrier, parity: _one(barrier).wait(parity),
    )
    hopper.__dict__.update(
        mbarrier=mbarrier,
        tma=SimpleNamespace(async_copy_global_to_shared=bulk_copy),
        fence_async_shared=lambda: None,
        warpgroup_mma=product,
        warpgroup_mma_wait=lambda num_outstanding, deps: deps if len(deps) > 1 else deps[0],
        TensorDescriptor=SimpleNamespace(from_tensor=Descriptor),
    )
    tl = shared_language(gl)
    triton = MagicMock(jit=_jit, experimental=SimpleNamespace(gluon=gluon), language=tl)
    nothing = MagicMock(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None)
    base = "triton.experimental"
    sys.modules.update({"triton": triton, "triton.language": tl})
    sys.modules.update({f"triton.language.extra{name}": nothing for name in ("", ".cuda")})
    sys.modules.update({f"triton.tools{name}": nothing for name in ("", ".tensor_descriptor")})
    sys.modules.update({base: MagicMock(gluon=gluon), f"{base}.gluon": gluon, f"{base}.gluon.language": gl})
    sys.modules.update(
        {f"{base}.gluon.language.nvidia{n}": m for n, m in (("", nothing), (".hopper", hopper))}
    )
    sys.modules.update({f"{base}.gluon.nvidia{n}": m for n, m in (("", nothing), (".hopper", hopper))})
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=3)
