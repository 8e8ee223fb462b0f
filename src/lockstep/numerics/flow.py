"""The flow: for every tensor of the forward and backward pass its format, granularity and scale type.

Trainer and engine are built from a `Flow` each. In a *unified* run they get the same object, and then equality bit for
bit is the contract; in a split run (`fp8-rollout`) they get two, and the difference is measured. The algebra is
operand x GEMM x granularity, after torchao's float8 recipes; granularities are those of DeepSeek-V3 and Jet-RL
(arXiv 2601.14243): weights 128x128, activations and output gradients 1x128. Both operands of the weight gradient are regrouped
along tokens: output gradients 128x1, and activations, unlike there, 128x128, as weights are. That makes all three products one
kind, which libraries multiply a quarter faster than one with a scale for each row of both operands, and adds 2 % to the error of
the weight gradient (SmolLM2: 0.0221 instead of 0.0217, each layer's worst alike).

Next: `quantize.py`, the one quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from lockstep.numerics.formats import BF16, Operand, ScaleKind, column_groups, row_groups, square_blocks

FlowName = Literal["bf16", "fp8", "fp8-rollout"]


@dataclass(frozen=True)
class Gemm:
    """One matrix product of a linear layer: how each operand is stored. The result is rounded once."""

    lhs: Operand
    rhs: Operand

    @property
    def is_fp8(self) -> bool:
        return self.lhs.is_fp8 or self.rhs.is_fp8

    @property
    def is_mixed(self) -> bool:
        """One operand in FP8, the other in BF16: for probes, which ask what either of them costs."""
        return self.lhs.is_fp8 != self.rhs.is_fp8


@dataclass(frozen=True)
class Flow:
    """Formats of one side of the run. Equal flows mean equal operations, hence equal bits.

    `keep_bf16` holds decoder layer indices whose linears stay in BF16. `activation` is the type between operations;
    anything but BF16 exists for oracles in tests. `attention_fp8`: both products of attention are of e4m3 codes; it needs
    `kv_fp8`.
    """

    name: str
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    kv_fp8: bool = False
    scale: ScaleKind = "fp32"
    keep_bf16: frozenset[int] = frozenset()
    activation: torch.dtype = torch.bfloat16
    attention_fp8: bool = False

    def __post_init__(self) -> None:
        if self.attention_fp8 and not self.kv_fp8:
            raise ValueError("FP8 attention multiplies the codes of an FP8 KV cache: set kv to fp8 as well")

    @property
    def query_scale(self) -> ScaleKind | None:
        """How the scale of an FP8 query is stored, one for each row and head; None when attention multiplies in BF16."""
        return self.scale if self.attention_fp8 else None

    @property
    def is_fp8(self) -> bool:
        """Whether any linear layer runs in FP8."""
        return self.fprop.is_fp8

    def fp8_layer(self, layer: int) -> bool:
        """Whether the linears of this decoder layer run in FP8."""
        return self.is_fp8 and layer not in self.keep_bf16

    def describe(self) -> dict[str, str]:
        """Every choice by name, for manifests and logs."""
        return {
            "name": self.name,
            **{g: f"{getattr(self, g).lhs} x {getattr(self, g).rhs}" for g in ("fprop", "dgrad", "wgrad")},
            "kv": "e4m3 per layer and head" if self.kv_fp8 else "bf16",
            "attention": f"e4m3[1xD,{self.scale}] x e4m3[448]" if self.attention_fp8 else "bf16",
            "scale": self.scale,
            "keep_bf16": ",".join(map(str, sorted(self.keep_bf16))),
            "activation": str(self.activation).removeprefix("torch."),
        }


def bf16_flow(*, kv_fp8: bool = False, scale: ScaleKind = "fp32", attention_fp8: bool = False) -> Flow:
    """Every GEMM in BF16 with FP32 accumulation."""
    plain = Gemm(BF16, BF16)
    return Flow("bf16", plain, plain, plain, kv_fp8=kv_fp8, scale=scale, attention_fp8=attention_fp8)


def fp8_flow(
    *,
    kv_fp8: bool = False,
    scale: ScaleKind = "fp32",
    keep_bf16: frozenset[int] = frozenset(),
    wgrad_fp8: bool = True,
    attention_fp8: bool = False,
) -> Flow:
    """All three GEMMs of every decoder linear in block-scaled FP8; the weight gradient may stay in BF16."""
    rows, columns, squares = row_groups(scale), column_groups(scale), square_blocks(scale)
    wgrad = Gemm(columns, squares) if wgrad_fp8 else Gemm(BF16, BF16)
    fprop = Gemm(rows, squares)
    return Flow("fp8", fprop, fprop, wgrad, kv_fp8, scale, keep_bf16, attention_fp8=attention_fp8)


@dataclass(frozen=True)
class FlowSpec:
    """Which precision each side of the run computes in."""

    __pydantic_config__ = {"extra": "forbid"}

    name: FlowName = "fp8"
    """`fp8`: one flow for rollout and training, equal bit for bit. `bf16`: the same in BF16. `fp8-rollout`: BF16
    trainer, FP8 engine (FP8-RL); the two disagree, and the mismatch is measured."""

    kv: Literal["bf16", "fp8"] = "bf16"
    """Precision of the KV cache; FP8 has one scale for each layer and KV head. In a unified flow the training forward
    attends over the same quantized keys and values."""

    scale: ScaleKind = "fp32"
    """`pow2` rounds every scale up to a power of two (the format some engines demand); `fp32` keeps it exact."""

    keep_first_bf16: int = 0
    """Number of first decoder layers whose linears stay in BF16, on both sides."""

    keep_last_bf16: int = 0
    """Number of last decoder layers whose linears stay in BF16, on both sides."""

    keep_bf16_layers: tuple[int, ...] = ()
    """More decoder layers whose linears stay in BF16, by number from 0, ascending; on whichever sides are FP8. `lockstep
    attribute --target` suggests them."""

    wgrad: Literal["fp8", "bf16"] = "fp8"
    """Precision of the weight-gradient GEMM in the `fp8` flow."""

    attention: Literal["bf16", "fp8"] = "bf16"
    """Precision of attention's two products. `fp8`: queries get a scale for each row and head, probabilities are rounded to
    e4m3 after a multiplication by 448, and codes are multiplied. Needs `kv: fp8`; BF16 attention reads FP8 keys too."""

    kv_headroom: float = 2.0
    """KV scales cover this multiple of the largest absolute value seen, so that the next step doesn't saturate."""

    kv_recalibrate: Literal["step", "once"] = "step"
    """`step`: maxima are gathered in every training step, and scales follow them. `once`: the scales of the first
    calibration stay for the whole run."""

    kv_calibration: Literal["trainer", "rollout"] = "trainer"
    """Where maxima come from. `trainer`: from the training forward, which runs anyway. `rollout`: from a forward of the engine
    over the prompts of the step to come, an extra pass, in the engine's own flow (FP8-RL's route)."""

    kv_decay: float = 0.9
    """Maxima are remembered: of two steps the larger one counts, after this factor on the older. 1 never forgets."""

    kv_hysteresis: float = 0.25
    """New scales are made only when a maximum has moved by more than this share since the scales in use were made (or has
    left their range); else the old ones stay, and with them their version."""

    def __post_init__(self) -> None:
        if self.attention == "fp8" and self.kv != "fp8":
            raise ValueError("attention: fp8 multiplies the codes of an FP8 KV cache -> set kv: fp8 as well")
        if not 0.0 <= self.kv_decay <= 1.0 or not 0.0 <= self.kv_hysteresis <= 1.0:
            raise ValueError("kv_decay and kv_hysteresis must lie in 0..1")
        if self.keep_first_bf16 < 0 or self.keep_last_bf16 < 0:
            raise ValueError("keep_first_bf16 and keep_last_bf16 count layers and can't be negative")
        layers = self.keep_bf16_layers
        if list(layers) != sorted(set(layers)) or any(layer < 0 for layer in layers):
            raise ValueError(
                f"keep_bf16_layers lists layers from 0, ascending and each once, not {list(layers)}"
            )
        if not 1.0 <= self.kv_headroom <= 64.0:
            raise ValueError("kv_headroom must lie in 1..64")


@dataclass(frozen=True)
class FlowPair:
    """The flows of both sides."""

    trainer: Flow
    rollout: Flow
    unified: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unified", self.trainer == self.rollout)


def build_flows(spec: FlowSpec, num_layers: int) -> FlowPair:
    """The two flows a spec names, for a model of `num_layers` decoder layers.

    Raises ValueError for an unknown name, and when more layers are kept in BF16 than there are, or one that there isn't.
    """
    if spec.keep_first_bf16 + spec.keep_last_bf16 > num_layers:
        kept = spec.keep_first_bf16 + spec.keep_last_bf16
        raise ValueError(f"{kept} layers are to stay in BF16, the model has {num_layers}")
    if spec.keep_bf16_layers and spec.keep_bf16_layers[-1] >= num_layers:
        beyond = spec.keep_bf16_layers[-1]
        raise ValueError(f"keep_bf16_layers names layer {beyond}, the model has layers 0 to {num_layers - 1}")
    keep = frozenset(range(spec.keep_first_bf16)) | frozenset(spec.keep_bf16_layers)
    keep |= frozenset(range(num_layers - spec.keep_last_bf16, num_layers))
    kv_fp8, attention_fp8 = spec.kv == "fp8", spec.attention == "fp8"
    fp8 = fp8_flow(
        kv_fp8=kv_fp8,
        scale=spec.scale,
        keep_bf16=keep,
        wgrad_fp8=spec.wgrad == "fp8",
        attention_fp8=attention_fp8,
    )
    bf16 = bf16_flow(kv_fp8=kv_fp8, scale=spec.scale, attention_fp8=attention_fp8)
    if spec.name == "fp8":
        return FlowPair(fp8, fp8)
    if spec.name == "bf16":
        return FlowPair(bf16, bf16)
    if spec.name == "fp8-rollout":
        return FlowPair(bf16_flow(scale=spec.scale), fp8)
    raise ValueError(f"unknown flow {spec.name!r}: fp8, bf16 and fp8-rollout are known")
