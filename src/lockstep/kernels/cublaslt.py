"""cuBLASLt by its C interface, for a product that torch has no call for: FP8 columns times columns, added to totals in place.

    total_NK += dy_NT x_KT^T      dy 1x128 along T, x as well or 128x128

The sum over T is formed as `library.scaled_mm_columns` forms it, and the total is added to it once, in FP32: the same bits as
product and addition one after the other, without the bytes of a product in between (`tests/kernels/test_triton_backward.py`).

No workspace is offered, so no algorithm splits the sum. Constants are those of `cublasLt.h`, CUDA 12.9 and later.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

FP32, E4M3 = 0, 28
"""cudaDataType_t."""
COMPUTE_FP32 = 68
"""cublasComputeType_t."""
TRANS_A, A_SCALE, B_SCALE, A_SCALE_MODE, B_SCALE_MODE = 3, 17, 18, 31, 32
"""cublasLtMatmulDescAttributes_t."""
VEC128_FP32, BLOCK128_FP32 = 4, 5
"""cublasLtMatmulMatrixScale_t: a scale for 128 neighbours along the summed dimension, or for 128 such rows."""
MOST_WORKSPACE = 1
"""cublasLtMatmulPreferenceAttributes_t."""
ALIGNED = 256
"""Bytes that the choice of an algorithm takes every address to be a multiple of."""
_LOCK = Lock()


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint64 * 8)]


class _Choice(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@dataclass(frozen=True)
class _Plan:
    """Of one shape. The description takes the addresses of scales anew at every call, hence the lock."""

    description: ctypes.c_void_p
    a: ctypes.c_void_p
    b: ctypes.c_void_p
    out: ctypes.c_void_p
    algorithm: _Algorithm


_PLANS: dict[tuple[int | None, int, int, int, bool], _Plan | None] = {}
"""By device, N, K, T and whether x has a scale for 128x128 values."""


def add_columns(
    total_NK: Tensor,
    grad_codes: Tensor,
    grad_scale: Tensor,
    x_codes: Tensor,
    x_scale: Tensor,
    *,
    square: bool = False,
) -> bool:
    """Adds in place, and says so; False where this machine's library does not take the operands.

    total_NK: FP32. Codes e4m3 [N, T] and [K, T], T a multiple of 128; scales FP32 [N, T / 128] and [K, T / 128] with strides
    (1, N) and (1, K). square: x_scale is [K / 128, T / 128 rounded up to a multiple of four]. All else contiguous. Raises
    RuntimeError when a launch fails.
    """
    columns, depth = grad_codes.shape
    tensors = (total_NK, grad_codes, grad_scale, x_codes, x_scale)
    assert grad_scale.stride() == (1, columns)
    assert x_scale.is_contiguous() if square else x_scale.stride() == (1, len(x_codes))
    assert total_NK.is_contiguous() and grad_codes.is_contiguous() and x_codes.is_contiguous()
    if any(x.data_ptr() % ALIGNED for x in tensors):
        return False
    device, one, at = total_NK.device, ctypes.c_float(1.0), ctypes.c_void_p(total_NK.data_ptr())
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    key = (device.index, columns, len(x_codes), depth, square)
    scales = (x_scale.data_ptr(), grad_scale.data_ptr())
    with _LOCK:  # column-major, [K, N] = x^T dy
        if key not in _PLANS:
            _PLANS[key] = _plan(*key, scales)
        plan = _PLANS[key]
        if plan is None:
            return False
        _point(plan.description, scales)
        status = _library().cublasLtMatmul(
            _handle(device.index), plan.description, ctypes.byref(one),
            ctypes.c_void_p(x_codes.data_ptr()), plan.a, ctypes.c_void_p(grad_codes.data_ptr()), plan.b,
            ctypes.byref(one), at, plan.out, at, plan.out,
            ctypes.byref(plan.algorithm), None, ctypes.c_size_t(0), stream,
        )  # fmt: skip
    _check(status, f"cublasLtMatmul of {columns} x {len(x_codes)} over {depth}")
    return True


def _plan(
    device: int | None, columns: int, rows: int, depth: int, square: bool, scales: tuple[int, int]
) -> _Plan | None:
    """None where the library, or this version of it, has no such product. It chooses none for a description without scales."""
    library = _library()
    if library is None or torch.cuda.get_device_capability(device) != (9, 0):
        return None
    description, preference = ctypes.c_void_p(), ctypes.c_void_p()
    _check(library.cublasLtMatmulDescCreate(ctypes.byref(description), COMPUTE_FP32, FP32), "a description")
    _set(description, TRANS_A, ctypes.c_int32(1))
    for mode, kind in ((A_SCALE_MODE, BLOCK128_FP32 if square else VEC128_FP32), (B_SCALE_MODE, VEC128_FP32)):
        if _try(description, mode, ctypes.c_int32(kind)):
            return None
    _point(description, scales)
    a, b, out = (
        _layout(E4M3, depth, rows),
        _layout(E4M3, depth, columns),
        _layout(FP32, rows, columns),
    )
    _check(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "a preference")
    nothing, choice, count = ctypes.c_size_t(0), _Choice(), ctypes.c_int(0)
    status = library.cublasLtMatmulPreferenceSetAttribute(
        preference, MOST_WORKSPACE, ctypes.byref(nothing), ctypes.c_size_t(ctypes.sizeof(nothing))
    )
    _check(status, "a workspace of zero")
    refused = library.cublasLtMatmulAlgoGetHeuristic(
        _handle(device), description, a, b, out, out, preference, 1, ctypes.byref(choice), ctypes.byref(count)
    )
    library.cublasLtMatmulPreferenceDestroy(preference)
    if refused or not count.value or choice.status or choice.workspace:
        return None
    return _Plan(description, a, b, out, choice.algorithm)


@cache
def _library() -> Any:
    """The one that torch has loaded, or None without CUDA."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@cache
def _handle(device: int | None) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(_library().cublasLtCreate(ctypes.byref(handle)), "a handle")
    return handle


def _point(description: ctypes.c_void_p, scales: tuple[int, int]) -> None:
    for attribute, address in zip((A_SCALE, B_SCALE), scales, strict=True):
        _set(description, attribute, ctypes.c_uint64(address))


def _layout(kind: int, rows: int, columns: int) -> ctypes.c_void_p:
    """Column-major and dense."""
    layout, sizes = ctypes.c_void_p(), (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
    _check(_library().cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *sizes), "a layout")
    return layout


def _try(description: ctypes.c_void_p, attribute: int, value: Any) -> int:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    status = _library().cublasLtMatmulDescSetAttribute(description, attribute, ctypes.byref(value), size)
    return int(status)


def _set(description: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _check(_try(description, attribute, value), f"attribute {attribute}")


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt refused {what}: status {status}")
