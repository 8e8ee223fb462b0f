"""What every tensor of a decoder is, by exact module path: the only place that decides which of them are quantized.

A role follows from the module's class and from the class of the module that owns it, never from a name: a skip list that
matched `mlp.gate` as a substring kept a dense model's `gate_proj` in BF16 on one side (verl 7519), and one that missed a
spelling quantized routers (NeMo-RL 3614). The rule is an allow list: a linear of attention, of an MLP or of an expert, in
a layer that the flow runs in FP8. A module of an unknown class has no role and is refused.

Next: `manifest.py`, which tells the other side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from lockstep.errors import ContractError
from lockstep.models.decoder import Decoder
from lockstep.models.spec import expected_tensors
from lockstep.nn.attention import Attention
from lockstep.nn.head import Table
from lockstep.nn.linear import Linear
from lockstep.nn.mlp import MLP
from lockstep.nn.moe import Experts, Router
from lockstep.nn.norm import RMSNorm
from lockstep.nn.working import Working

Role = Literal["embedding", "norm", "attention", "mlp", "expert", "router", "head", "bias"]
ROLES: tuple[str, ...] = get_args(Role)
QUANTIZED_ROLES: frozenset[Role] = frozenset({"attention", "mlp", "expert"})


@dataclass(frozen=True)
class Slot:
    """A tensor's place: `name` is `path` and `leaf` (`weight` or `bias`); `layer` is None outside the decoder layers."""

    name: str
    path: str
    leaf: str
    role: Role
    shape: tuple[int, ...]
    layer: int | None
    quantized: bool


def is_quantized(role: Role, layer: int | None, decoder: Decoder) -> bool:
    """The rule: what the decoder's flow does to a tensor of this role in this decoder layer."""
    flow = decoder.flow
    return role in QUANTIZED_ROLES and layer is not None and flow.fp8_layer(layer) and flow.fprop.rhs.is_fp8


def slots(decoder: Decoder) -> list[Slot]:
    """Every tensor of the decoder, in checkpoint order.

    Raises ContractError for a module without a role, for a linear whose own format is not what the rule says, and when
    modules and checkpoint don't have the same tensors.
    """
    layers = {id(module): i for i, layer in enumerate(decoder.model.layers) for module in layer.modules()}
    found: dict[str, Slot] = {}
    for name, module in decoder.working():
        path = name.removesuffix(".weight")
        found |= {s.name: s for s in _slots_of(decoder, path, module, layers.get(id(module)))}
    expected = expected_tensors(decoder.spec)
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise ContractError(
            f"the decoder's modules are not its checkpoint's: missing {missing[:4]}, extra {extra[:4]}"
        )
    return [found[name] for name in expected]


def _slots_of(decoder: Decoder, path: str, module: Working, layer: int | None) -> list[Slot]:
    role = role_of(decoder, path, module)
    quantized = is_quantized(role, layer, decoder)
    if quantized != module.operand.is_fp8:
        rule, own = ("FP8", "BF16") if quantized else ("BF16", "FP8")
        raise ContractError(f"{path}.weight: the flow says {rule} for role {role}, the module is {own}")
    made = [Slot(f"{path}.weight", path, "weight", role, tuple(module.weight.shape), layer, quantized)]
    if isinstance(module, Linear) and module.bias is not None:
        made.append(Slot(f"{path}.bias", path, "bias", "bias", tuple(module.bias.shape), layer, False))
    return made


def role_of(decoder: Decoder, path: str, module: nn.Module) -> Role:
    """Role of the weight of the module at this path. Raises ContractError when it has none."""
    if isinstance(module, Table):
        return "head" if module is decoder.head and not decoder.spec.tie_embeddings else "embedding"
    if isinstance(module, RMSNorm):
        return "norm"
    owner = decoder.get_submodule(path.rpartition(".")[0])
    if isinstance(module, Linear) and isinstance(owner, Attention):
        return "attention"
    if isinstance(module, Linear) and isinstance(owner, MLP):
        above = decoder.get_submodule(path.rpartition(".")[0].rpartition(".")[0])
        return "expert" if isinstance(above, Experts) else "mlp"
    if isinstance(module, Router):
        return "router"
    raise ContractError(
        f"{path}: a {type(module).__name__} in a {type(owner).__name__} has no role, so nothing says whether it is quantized"
    )
