"""A decoder layer under torch.compile: one graph without breaks, and on a GPU the bits of the layer as it is.

Without a GPU, operations get kernels whose results are zeros: what is tested then is that torch can trace and functionalize the
layer. Rows go through packed sequences, through pages in tiles of queries, and through pages one query a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lockstep.kernels.attention_index import Run
from lockstep.kernels.operation import NAMESPACE, OPERATIONS
from lockstep.kernels.reference import ReferenceKernels
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.fused import _layer
from lockstep.models.spec import ModelSpec
from lockstep.nn.device_context import DeviceContext, DevicePacked, DevicePages
from lockstep.nn.kv_scales import KVScales
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.numerics.formats import E4M3

SPECS = {
    "qwen2": ModelSpec("qwen2", 131, 256, 384, 1, 4, 2, 64, attention_bias=True),
    "qwen3": ModelSpec("qwen3", 131, 512, 384, 1, 4, 2, 128, qk_norm=True, tie_embeddings=True),
    "ragged": ModelSpec("llama", 131, 192, 320, 1, 3, 1, 64, tie_embeddings=True),
}
FLOWS = {
    "bf16": bf16_flow(),
    "fp8": fp8_flow(),
    "pow2": fp8_flow(scale="pow2"),
    "bf16+kv8": bf16_flow(kv_fp8=True),
    "fp8+kv8": fp8_flow(kv_fp8=True),
}
LENGTHS = (70, 33)
LAYOUTS = ("packed", "paged", "decode")


class Layer:
    """One layer with rows for it. `run` is the program; pages and maxima are as before after `reset`."""

    def __init__(self, toy: Any, spec: ModelSpec, flow: Flow, kernels: Any, device: str, layout: str) -> None:
        self.decoder = Decoder(spec, flow, kernels)
        self.decoder.load_state_dict(toy.random_weights(spec), strict=True)
        self.decoder.to(device)
        self.decoder.refresh(1)
        for projection in (self.layer.self_attn.qkv, self.layer.mlp.gate_up):
            projection.stacked()  # a GPU's refresh does that
        self.decoder.model.rope.reserve(256, torch.device(device))
        positions, slots = torch.cat([torch.arange(n) for n in LENGTHS]), torch.arange(128 + LENGTHS[1])
        slots = torch.cat([slots[: LENGTHS[0]], slots[128:]])
        if layout == "decode":
            positions, slots = (
                torch.tensor([LENGTHS[0], LENGTHS[1]]),
                torch.tensor([LENGTHS[0], 128 + LENGTHS[1]]),
            )
        generator = torch.Generator().manual_seed(1)
        rows, groups = (len(positions), spec.hidden_size), spec.num_kv_heads
        self.h, self.delta = (torch.randn(rows, generator=generator).bfloat16().to(device) for _ in range(2))
        self.pages = [
            torch.zeros(1, 3, groups, *shape, device=device, dtype=E4M3 if flow.kv_fp8 else torch.bfloat16)
            for shape in ((64, spec.head_dim), (spec.head_dim, 64))
        ]
        self.context = self._context(flow, kernels, device, layout, positions.to(device), slots.to(device))

    def _context(
        self, flow: Flow, kernels: Any, device: str, layout: str, positions: Tensor, slots: Tensor
    ) -> DeviceContext:
        from lockstep.kernels.triton.attention import DecodeIndex

        spec, scales = self.decoder.spec, None
        if flow.kv_fp8:
            shape = (1, spec.num_kv_heads)
            scales = KVScales(*(torch.full(shape, s, device=device) for s in (0.02, 0.03)), 1)
        starts = (0, LENGTHS[0])
        runs = [Run(s, n, 0, torch.arange(s, s + n)) for s, n in zip(starts, LENGTHS, strict=True)]
        index = kernels.index(runs, spec.num_heads // spec.num_kv_heads, torch.device(device))
        if layout == "packed":
            return DevicePacked(positions, index, scales)
        walked = index.tables.prefill
        if layout == "decode":
            lengths = torch.tensor([n + 1 for n in LENGTHS], dtype=torch.int32, device=device)
            pages = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32, device=device)
            walked = DecodeIndex(lengths, pages, 128)
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        return DevicePages(positions, slots, walked, *self.pages, scales, flag)

    @property
    def layer(self) -> Any:
        return self.decoder.model.layers[0]

    def run(self, h_TK: Tensor, delta_TK: Tensor) -> tuple[Tensor, Tensor]:
        return _layer(self.layer, 0, h_TK, delta_TK, self.context)

    def results(self, program: Callable[..., Any]) -> list[Tensor]:
        """Results of one run, and the pages after it, as bytes."""
        for pages in self.pages:
            pages.view(torch.uint8).zero_()
        with torch.no_grad():
            found = program(self.h, self.delta)
        return [x.clone().view(torch.uint8) for x in (*found, *self.pages)]


@pytest.fixture
def zero_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The Hopper backend as a CPU can have it: weights are the reference's, operations give zeros."""
    pytest.importorskip("triton")
    from lockstep.kernels.hopper import HopperKernels

    class OnCPU(HopperKernels):
        refresh = ReferenceKernels.refresh
        reserve = ReferenceKernels.reserve

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, operator in OPERATIONS.items():
        if not name.startswith("test_"):
            library.impl(name, _zeros(operator), "CPU")
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        kernels = OnCPU()
    yield kernels
    del library


def _zeros(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with FakeTensorMode() as mode:
            found = operator(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in args), **kwargs)
        if found is None:
            return None
        parts = [found] if isinstance(found, Tensor) else found
        bytes_of = [(x, torch.zeros(x.untyped_storage().nbytes(), dtype=torch.uint8)) for x in parts]
        made = [raw.view(x.dtype).as_strided(x.shape, x.stride()) for x, raw in bytes_of]
        return made[0] if isinstance(found, Tensor) else type(found)(made)

    return kernel


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flow", [FLOWS["bf16"], FLOWS["fp8+kv8"]], ids=["bf16", "fp8+kv8"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_layer_is_one_graph(name: str, flow: Flow, layout: str, toy: Any, zero_kernels: Any) -> None:
    layer = Layer(toy, SPECS[name], flow, zero_kernels, "cpu", layout)
    torch.compiler.reset()
    h, delta, *_ = layer.results(torch.compile(layer.run, backend="aot_eager", fullgraph=True))
    assert torch.equal(h, torch.zeros_like(h)) and h.shape == delta.shape
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
@pytest.mark.parametrize("name", SPECS)
def test_a_compiled_layer_has_the_same_bits(
    name: str, flow: Flow, layout: str, backend: str, toy: Any
) -> None:
    layer = Layer(toy, SPECS[name], flow, select("hopper"), "cuda", layout)
    expected = layer.results(layer.run)
    torch.compiler.reset()
    found = layer.results(torch.compile(layer.run, backend=backend, fullgraph=True))
    for which, a, b in zip(("h", "delta", "keys", "values"), found, expected, strict=True):
        assert torch.equal(a, b), which
    assert expected[1].any()
    torch.compiler.reset()
