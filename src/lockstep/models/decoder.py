"""The one decoder: Llama 3, Qwen2, Qwen3, Qwen3-MoE, SmolLM2. Trainer and embedded engine run this class and nothing else.

Parameters carry Hugging Face's names, so a checkpoint is loaded and saved without a mapping. Rows are packed, [T, ...]:
there is no batch dimension and no padding; which rows belong together is the attention context's knowledge.

    h = embed(ids);  for each layer: h += attention(norm(h));  h += mlp(norm(h));  norm(h) -> head

Next: `../nn/linear.py` for the three GEMMs, `../nn/context.py` for the seam.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lockstep.kernels.table import Kernels
from lockstep.models import fused, fused_layer
from lockstep.models.frequencies import inverse_frequencies
from lockstep.models.spec import ModelSpec
from lockstep.nn.attention import Attention
from lockstep.nn.context import AttentionContext
from lockstep.nn.head import Table
from lockstep.nn.linear import Projection
from lockstep.nn.mlp import MLP
from lockstep.nn.moe import MoE
from lockstep.nn.norm import RMSNorm
from lockstep.nn.rope import Rope
from lockstep.nn.working import Refreshed, Working, contents, refresh
from lockstep.numerics.flow import Flow

if TYPE_CHECKING:
    from lockstep.models.trunk_graph import TrunkGraphs

BETWEEN = -1
"""Version of working copies while they are remade; they keep it when that fails."""


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP (or mixture of experts) with residuals in the activation type."""

    def __init__(self, spec: ModelSpec, rope: Rope, *, flow: Flow, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, flow=flow, kernels=kernels)
        self.self_attn = Attention(
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            qkv_bias=spec.attention_bias,
            out_bias=spec.attention_output_bias,
            qk_norm_eps=spec.rms_norm_eps if spec.qk_norm else None,
            rope=rope,
            flow=flow,
            layer=layer,
            kernels=kernels,
        )
        self.post_attention_layernorm = RMSNorm(
            spec.hidden_size, spec.rms_norm_eps, flow=flow, kernels=kernels
        )
        self.mlp = feed_forward(spec, flow=flow, layer=layer, kernels=kernels)

    def forward(self, h_TK: Tensor, context: AttentionContext, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """[T, K] to [T, K]."""
        h_TK = h_TK + self.self_attn(self.input_layernorm(h_TK), context, cos_sin)
        x_TK = self.post_attention_layernorm(h_TK)
        y_TK: Tensor = self.mlp(x_TK, context.routes) if isinstance(self.mlp, MoE) else self.mlp(x_TK)
        return h_TK + y_TK


def feed_forward(spec: ModelSpec, *, flow: Flow, layer: int, kernels: Kernels) -> MLP | MoE:
    """The second half of a decoder layer, as the spec says for it."""
    moe = spec.moe
    if moe is None or not spec.is_sparse(layer):
        return MLP(spec.hidden_size, spec.intermediate_size, flow=flow, layer=layer, kernels=kernels)
    return MoE(
        hidden=spec.hidden_size,
        intermediate=moe.intermediate_size,
        experts=moe.num_experts,
        count=moe.experts_per_token,
        normalize=moe.norm_topk_prob,
        flow=flow,
        layer=layer,
        kernels=kernels,
    )


class Trunk(nn.Module):
    """Embedding, layers and final norm, under the names a checkpoint has below `model.`."""

    def __init__(self, spec: ModelSpec, *, flow: Flow, kernels: Kernels) -> None:
        super().__init__()
        rope = Rope(inverse_frequencies(spec.rope, spec.head_dim), kernels)
        self.embed_tokens = Table(spec.vocab_size, spec.hidden_size, flow=flow, kernels=kernels)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, rope, flow=flow, layer=i, kernels=kernels) for i in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, flow=flow, kernels=kernels)
        self.rope = rope


class Decoder(nn.Module):
    """A causal language model under one flow. Call `refresh` after every change of the master weights.

    Where kernels fuse, attributes trade memory of the training forward. checkpointing: a layer keeps its input only and runs
    again in the backward pass, with the same bits. save_fp8: FP8 layers keep gate and up as codes; gradients change a little.
    Without `deterministic` the gradient of attention may come from a library that adds in no fixed order, where it is faster.
    With `graphs` the layers of a training pass are captured and launched at once (`trunk_graph.py`).
    """

    def __init__(self, spec: ModelSpec, flow: Flow, kernels: Kernels) -> None:
        super().__init__()
        self.spec, self.flow, self.kernels = spec, flow, kernels
        self.model = Trunk(spec, flow=flow, kernels=kernels)
        if not spec.tie_embeddings:
            self.lm_head = Table(spec.vocab_size, spec.hidden_size, flow=flow, kernels=kernels)
        self.version = self.refreshes = 0
        self.checkpointing = self.save_fp8 = False
        self.deterministic = True
        self.graphs: TrunkGraphs | None = None
        self.family: list[tuple[dict[str, nn.Module | None], list[nn.Module | None]]] = []
        self.found: list[tuple[str, Working]] = []

    @property
    def device(self) -> torch.device:
        """Where the working copies are; before the first refresh, where the masters are."""
        packed = self.model.embed_tokens.packed
        known = packed.plain if packed is not None else None
        return known.device if known is not None else self.model.embed_tokens.weight.device

    @property
    def head(self) -> Table:
        """The output head; the embedding itself when tied."""
        return self.model.embed_tokens if self.spec.tie_embeddings else self.lm_head

    def hidden(self, ids_T: Tensor, context: AttentionContext) -> Tensor:
        """Final normed hidden states [T, K] of token ids [T]."""
        if self.kernels.fused:
            forward = fused_layer.hidden if torch.is_grad_enabled() else fused.hidden
            return forward(self, ids_T, context)  # type: ignore[arg-type]
        cos_sin = self.model.rope.at(context.positions_T)
        h_TK = self.model.embed_tokens(ids_T)
        for layer in self.model.layers:
            h_TK = layer(h_TK, context, cos_sin)
        context.finish()
        return self.model.norm(h_TK)  # type: ignore[no-any-return]

    def working(self) -> Iterator[tuple[str, Working]]:
        """Every module with a working copy, by the name of its weight, in layer order. A publication asks for them several times,
        so they are looked up again only when some module has other children than before."""
        if not self.family or any(list(held.values()) != children for held, children in self.family):
            modules = list(self.named_modules())
            self.family = [(module._modules, list(module._modules.values())) for _, module in modules]
            self.found = [(f"{path}.weight", m) for path, m in modules if isinstance(m, Working)]
        yield from self.found

    def refresh(self, version: int) -> list[Refreshed]:
        """Remakes all working copies from the masters and stamps them with `version`.

        Raises ValueError that names the first master with NaN or infinity. Some copies may be new then and others old, so the
        decoder has no version, and an engine over it refuses to sample.
        """
        self.version = BETWEEN
        self.refreshes += 1
        first = self.model.embed_tokens.packed is None
        reserved = {m: place for p in self.projections() for m, place in p.reserve().items()} if first else {}
        refreshed = refresh(self.working(), reserved)
        self.version = version
        return refreshed

    def projections(self) -> Iterator[Projection]:
        """Every projection, in layer order."""
        for module in self.modules():
            yield from (value for value in module.__dict__.values() if isinstance(value, Projection))

    def stack(self) -> None:
        """Stacks weights that share an input now, where the backend multiplies them at once, and not in the first forward:
        working copies become views of their stack, so they move."""
        for projection in self.projections():
            projection.stacked()

    def capture(self, on: bool) -> None:
        """Whether training passes are captured, and gradients added in place. For kernels that fuse, before the first pass."""
        from lockstep.models.trunk_graph import TrunkGraphs

        self.graphs = TrunkGraphs() if on else None
        self.add_in_place(on)

    def add_in_place(self, on: bool) -> None:
        """Whether gradients of embedding and head are added in place; see `Table`."""
        self.model.embed_tokens.in_place = self.head.in_place = on

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Passes within are launched kernel by kernel, and gradients that were None before are new tensors: for whoever keeps
        those that are there, since captured passes add to the same storage step after step."""
        held, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = held

    def places(self) -> tuple[int, ...]:
        """Where the rotary table and all working copies lie: a captured pass reads them there as long as this stays the same."""
        self.stack()
        rope = self.model.rope.table_PD
        working = [module.working for _, module in self.working()]
        tensors = [w.plain if w.codes is None else w.codes.codes for w in working]
        return (len(rope), rope.data_ptr(), *(t.data_ptr() for t in tensors if t is not None))

    def digest(self) -> str:
        """SHA-256 over names, types, shapes and fingerprints of codes with scales, plain values and biases: equal working
        copies, equal digest, on every backend."""
        return hashlib.sha256("".join(contents(list(self.working()))).encode()).hexdigest()

    def share_masters(self, other: Decoder) -> None:
        """Makes this decoder's parameters the very tensors of `other` (an engine with a flow of its own)."""
        theirs = dict(other.named_parameters())
        for name, _ in list(self.named_parameters()):
            parent, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(parent), leaf, theirs[name])
