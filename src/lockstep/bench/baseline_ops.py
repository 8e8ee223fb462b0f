"""What surrounds the products of the BF16 baseline: norm, rotation, SwiGLU, attention, and the gradients of all four.

On a GPU they are the fused kernels that the FP8 side is made of, in their BF16 form, and the faster of two libraries' attention
kernels: torch's FlashAttention for packed sequences of any length, and cuDNN's, which wants sequences of one length. So what
differs between the two sides is the precision, not the care. `PlainOperations` is the same in torch on any device, for the test
that compares the baseline's hand-written backward pass with autograd.

Legend: T rows, K hidden, N outputs, H query heads, G key/value heads, D head size. Next: `baseline.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.bench.timing import Call, events_ms
from lockstep.kernels.fused import FusedKernels
from lockstep.kernels.reference import ReferenceKernels

Norms = tuple[Tensor, Tensor] | None
"""Weights of the q and k norm, where the model has them."""
Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Packing:
    """Whole sequences side by side. starts_S1: int32 first row of each, and the number of rows; on the device."""

    lengths: tuple[int, ...]
    starts_S1: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        """Of sequences of these lengths."""
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths).cumsum(0)])
        return cls(tuple(lengths), starts.int().to(device))

    @property
    def longest(self) -> int:
        """Rows of the longest sequence."""
        return max(self.lengths)

    @property
    def equal(self) -> bool:
        """Whether all sequences have one length."""
        return len(set(self.lengths)) == 1


class Attention(Protocol):
    """Causal attention of packed sequences. What `forward` keeps for `backward` is the implementation's affair."""

    name: str

    def takes(self, packing: Packing) -> bool:
        """Whether it can do these lengths."""

    def forward(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packing: Packing, keep: bool
    ) -> tuple[Tensor, Any]:
        """(out [T, H, D], what backward needs; None unless `keep`)."""

    def backward(self, grad_THD: Tensor, state: Any) -> Triple:
        """Gradients of q, k, v."""


class FlashAttention:
    """torch's FlashAttention 2 for packed sequences."""

    name = "flash"

    def takes(self, packing: Packing) -> bool:
        """Any lengths."""
        return True

    def forward(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packing: Packing, keep: bool
    ) -> tuple[Tensor, Any]:
        """See `Attention`."""
        starts, longest = packing.starts_S1, packing.longest
        found = torch.ops.aten._flash_attention_forward(
            q_THD, k_TGD, v_TGD, starts, starts, longest, longest, 0.0, True, False
        )
        out, lse, seed, unused = found[:4]
        return out, (q_THD, k_TGD, v_TGD, out, lse, seed, unused, packing) if keep else None

    def backward(self, grad_THD: Tensor, state: Any) -> Triple:
        """See `Attention`."""
        q, k, v, out, lse, seed, unused, packing = state
        starts, longest = packing.starts_S1, packing.longest
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_THD, q, k, v, out, lse, starts, starts, longest, longest, 0.0, True, seed, unused
        )
        return dq, dk, dv


class LibraryAttention:
    """`scaled_dot_product_attention` with one of its backends, its own graph kept from forward to backward."""

    def __init__(self, name: str, backend: SDPBackend, *, batched: bool) -> None:
        self.name, self.backend, self.batched = name, backend, batched

    def takes(self, packing: Packing) -> bool:
        """One length where sequences are a batch dimension."""
        return packing.equal or not self.batched

    def forward(
        self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packing: Packing, keep: bool
    ) -> tuple[Tensor, Any]:
        """See `Attention`."""
        if not keep:
            return self._attend(q_THD, k_TGD, v_TGD, packing), None
        q, k, v = (x.detach().requires_grad_() for x in (q_THD, k_TGD, v_TGD))
        with torch.enable_grad():
            out = self._attend(q, k, v, packing)
        return out.detach(), (out, (q, k, v))

    def backward(self, grad_THD: Tensor, state: Any) -> Triple:
        """See `Attention`."""
        out, leaves = state
        dq, dk, dv = torch.autograd.grad(out, leaves, grad_THD)
        return dq, dk, dv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> Tensor:
        with sdpa_kernel(self.backend):
            if packing.equal:
                shape = (len(packing.lengths), packing.longest)
                batch = [x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v)]
                out = F.scaled_dot_product_attention(
                    batch[0], batch[1], batch[2], is_causal=True, enable_gqa=True
                )
                return out.transpose(1, 2).flatten(0, 1)
            outs, sizes = [], list(packing.lengths)
            for one in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
                a, b, c = (x.transpose(0, 1)[None] for x in one)
                out = F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
                outs.append(out[0].transpose(0, 1))
            return torch.cat(outs)


def cudnn_attention() -> LibraryAttention:
    """cuDNN's kernels, for sequences of one length."""
    return LibraryAttention("cudnn", SDPBackend.CUDNN_ATTENTION, batched=True)


class Operations(Protocol):
    """What a layer of the baseline is made of besides products. Every result is in the type of its inputs; sums are FP32."""

    attention: Attention

    def norm(
        self, h_TK: Tensor, delta_TK: Tensor | None, weight_K: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(h + delta, its RMSNorm)."""

    def norm_grad(
        self, grad_TK: Tensor, h_TK: Tensor, weight_K: Tensor, eps: float, dh_TK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(dh + the norm's gradient, gradient of the weight in FP32)."""

    def rope(
        self,
        qkv_TN: Tensor,
        table_PD: Tensor,
        positions_T: Tensor,
        heads: int,
        kv_heads: int,
        norms: Norms,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """(q [T, H, D], k [T, G, D]) after norm and rotation."""  # fmt: skip

    def rope_grad(
        self, grads: Triple, qkv_TN: Tensor, table_PD: Tensor, positions_T: Tensor, norms: Norms, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(gradient of qkv [T, N], of the q norm's weight, of the k norm's)."""

    def swiglu(self, gate_up_TN: Tensor) -> Tensor:
        """silu(gate) up of rows that hold both."""

    def swiglu_grad(self, grad_TN: Tensor, gate_up_TN: Tensor) -> Tensor:
        """Gradient of the rows that hold both."""

    def weight_grad(self, grad_TN: Tensor, x_TK: Tensor) -> Tensor:
        """grad^T x in FP32, [N, K]."""


class FusedOperations:
    """On a GPU: the kernels of a backend that fuses, in their BF16 form."""

    def __init__(self, kernels: FusedKernels, attention: Attention, *, sum_in_fp32: bool = True) -> None:
        self.kernels, self.attention, self.sum_in_fp32 = kernels, attention, sum_in_fp32

    def norm(
        self, h_TK: Tensor, delta_TK: Tensor | None, weight_K: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Operations`."""
        total, out = self.kernels.add_norm(h_TK, delta_TK, weight_K, eps, None)
        assert isinstance(out, Tensor)
        return total, out

    def norm_grad(
        self, grad_TK: Tensor, h_TK: Tensor, weight_K: Tensor, eps: float, dh_TK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Operations`."""
        return self.kernels.norm_grad(grad_TK.contiguous(), h_TK, weight_K, eps, dh_TK)

    def rope(
        self,
        qkv_TN: Tensor,
        table_PD: Tensor,
        positions_T: Tensor,
        heads: int,
        kv_heads: int,
        norms: Norms,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """See `Operations`. Values are read where they lie; the copy that the kernel makes is dropped."""  # fmt: skip
        q, k, _ = self.kernels.rope_rows(
            qkv_TN, table_PD, positions_T, heads=heads, kv_heads=kv_heads, norms=norms, eps=eps
        )
        return q, k

    def rope_grad(
        self, grads: Triple, qkv_TN: Tensor, table_PD: Tensor, positions_T: Tensor, norms: Norms, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `Operations`."""
        dq, dk, dv = (g.contiguous() for g in grads)
        return self.kernels.rope_grad(
            dq, dk, dv, qkv_TN, table_PD, positions_T, norms=norms, eps=eps, scales=None
        )

    def swiglu(self, gate_up_TN: Tensor) -> Tensor:
        """See `Operations`."""
        out = self.kernels.swiglu_rows(gate_up_TN, None)
        assert isinstance(out, Tensor)
        return out

    def swiglu_grad(self, grad_TN: Tensor, gate_up_TN: Tensor) -> Tensor:
        """See `Operations`."""
        out = self.kernels.swiglu_grad(grad_TN, gate_up_TN, None)
        assert isinstance(out, Tensor)
        return out

    def weight_grad(self, grad_TN: Tensor, x_TK: Tensor) -> Tensor:
        """See `Operations`. By cuBLAS, which writes FP32 itself, or BF16 that is widened afterwards."""
        if self.sum_in_fp32:
            return torch.mm(grad_TN.t(), x_TK, out_dtype=torch.float32)
        return torch.mm(grad_TN.t(), x_TK).float()


class PlainOperations:
    """In torch on any device and in any type; gradients by autograd of each operation alone."""

    def __init__(self) -> None:
        self.attention: Attention = LibraryAttention("math", SDPBackend.MATH, batched=False)
        self.kernels = ReferenceKernels()

    def norm(
        self, h_TK: Tensor, delta_TK: Tensor | None, weight_K: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `Operations`."""
        total = h_TK if delta_TK is None else h_TK + delta_TK
        return total, self.kernels.rms_norm(total, weight_K, eps)

    def norm_grad(
        self, grad_TK: Tensor, h_TK: Tensor, weight_K: Tensor, eps: float, dh_TK: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Operations`."""
        dh, dw = _gradients(lambda h, w: self.kernels.rms_norm(h, w, eps), (h_TK, weight_K), grad_TK)
        return dh if dh_TK is None else dh + dh_TK, dw.float()

    def rope(
        self,
        qkv_TN: Tensor,
        table_PD: Tensor,
        positions_T: Tensor,
        heads: int,
        kv_heads: int,
        norms: Norms,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """See `Operations`."""  # fmt: skip
        size = qkv_TN.shape[1] // (heads + 2 * kv_heads)
        rows = qkv_TN.unflatten(1, (-1, size))
        cos, sin = table_PD[positions_T].unbind(1)
        out = []
        for part, x in enumerate((rows[:, :heads], rows[:, heads : heads + kv_heads])):
            normed = x if norms is None else self.kernels.rms_norm(x, norms[part], eps)
            out.append(self.kernels.rope(normed, cos, sin))
        return out[0], out[1]

    def rope_grad(
        self, grads: Triple, qkv_TN: Tensor, table_PD: Tensor, positions_T: Tensor, norms: Norms, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `Operations`."""
        dq, dk, dv = grads
        heads, kv_heads = dq.shape[1], dk.shape[1]

        def joined(qkv: Tensor, *weights: Tensor) -> Tensor:
            pair = (weights[0], weights[1]) if weights else None
            q, k = self.rope(qkv, table_PD, positions_T, heads, kv_heads, pair, eps)
            return torch.cat([q.flatten(1), k.flatten(1), qkv[:, q[0].numel() + k[0].numel() :]], 1)

        grad = torch.cat([dq.flatten(1), dk.flatten(1), dv.flatten(1)], 1)
        dqkv, *dw = _gradients(joined, (qkv_TN, *(norms or ())), grad)
        return dqkv, *((dw[0].float(), dw[1].float()) if dw else (None, None))

    def swiglu(self, gate_up_TN: Tensor) -> Tensor:
        """See `Operations`."""
        gate, up = gate_up_TN.chunk(2, 1)
        return self.kernels.swiglu(gate, up)

    def swiglu_grad(self, grad_TN: Tensor, gate_up_TN: Tensor) -> Tensor:
        """See `Operations`."""
        return _gradients(self.swiglu, (gate_up_TN,), grad_TN)[0]

    def weight_grad(self, grad_TN: Tensor, x_TK: Tensor) -> Tensor:
        """See `Operations`."""
        return grad_TN.float().t() @ x_TK.float()


def _gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = function(*leaves)
    return torch.autograd.grad(out, leaves, grad)


def fastest_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, packing: Packing, timer: Callable[[Call], float] = events_ms
) -> tuple[Attention, dict[str, tuple[float, float]]]:
    """The faster one, forward and backward together; (forward, backward) milliseconds of each that takes these lengths."""
    grad = torch.randn_like(q_THD)
    times: dict[str, tuple[float, float]] = {}
    candidates: list[Attention] = [FlashAttention(), cudnn_attention()]
    usable = [a for a in candidates if a.takes(packing)]
    for attention in usable:

        def forward(attention: Attention = attention) -> Any:
            return attention.forward(q_THD, k_TGD, v_TGD, packing, True)[1]

        def both(attention: Attention = attention) -> None:
            attention.backward(grad, forward(attention))

        alone, together = timer(forward), timer(both)
        times[attention.name] = (alone, together - alone)
    best = min(usable, key=lambda a: sum(times[a.name]))
    return best, times


def faster_weight_grad(
    grad_TN: Tensor, x_TK: Tensor, timer: Callable[[Call], float] = events_ms
) -> tuple[bool, dict[str, float]]:
    """Whether cuBLAS should write weight gradients in FP32 itself, and milliseconds of both ways to FP32 gradients."""
    times = {
        "fp32 output": timer(lambda: torch.mm(grad_TN.t(), x_TK, out_dtype=torch.float32)),
        "bf16, widened": timer(lambda: torch.mm(grad_TN.t(), x_TK).float()),
    }
    return times["fp32 output"] <= times["bf16, widened"], times
