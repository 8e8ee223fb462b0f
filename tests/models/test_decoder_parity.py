"""Logits of the decoder against transformers' own classes, for every family, and for real weights when they are here.

In FP32 the two differ in one place by design: attention probabilities are rounded to BF16. Given that rounding, transformers
agrees to 1e-4; without it, to the size of that rounding.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from lockstep.kernels.reference import ReferenceKernels
from lockstep.models.checkpoint import load_config, load_tensors, save
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.numerics.measures import sqnr_db

FAMILIES = ("llama31", "llama_tied", "qwen2", "qwen3", "qwen3_moe")
LENGTH = 60  # one step of keys: the maximum that probabilities are taken against is the final one
FLOAT32 = dataclasses.replace(bf16_flow(), activation=torch.float32)
ROUNDED = "bf16_probabilities"
SMOLLM2 = os.environ.get("LOCKSTEP_SMOLLM2", "")


def rounded_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention whose probabilities are rounded to BF16 before their sum and their product with the values."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = (q @ k.mT * scaling).masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), -torch.inf)
    p = (s - s.amax(-1, keepdim=True)).exp().bfloat16().to(q.dtype)
    return (p @ v / p.sum(-1, keepdim=True)).transpose(1, 2).contiguous(), None


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    AttentionInterface.register(ROUNDED, rounded_attention)
    yield


def in_memory(spec: ModelSpec, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as transformers 5 holds them: all experts of a layer in one, gate above up."""
    out = {name: value for name, value in weights.items() if ".mlp.experts." not in name}
    for layer in range(spec.num_layers if spec.moe else 0):
        if spec.moe and spec.is_sparse(layer):
            prefix = f"model.layers.{layer}.mlp.experts."
            names = [f"{prefix}{i}." for i in range(spec.moe.num_experts)]
            gate, up, down = (
                torch.stack([weights[f"{n}{part}_proj.weight"] for n in names])
                for part in ("gate", "up", "down")
            )
            out[prefix + "gate_up_proj"] = torch.cat([gate, up], 1)
            out[prefix + "down_proj"] = down
    return out


def transformers_model(
    spec: ModelSpec, weights: dict[str, Tensor], attention: str = "eager", dtype: torch.dtype = torch.float32
) -> Any:
    """transformers' class for the config we would write, with these weights.

    Built in its type: casting a finished model would round the frequencies of the rotary embedding too.
    """
    config = AutoConfig.for_model(**spec.to_hf())
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    missing, extra = model.load_state_dict(in_memory(spec, weights), strict=False)
    assert not extra and set(missing) <= {"lm_head.weight"} and bool(missing) == spec.tie_embeddings
    return model.eval()


@torch.no_grad()
def transformers_logits(model: Any, ids: Tensor) -> Tensor:
    out: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    return out


@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_are_those_of_transformers(toy: SimpleNamespace, family: str, exact: bool) -> None:
    spec, weights = toy.SPECS[family], toy.random_weights(toy.SPECS[family])
    ids = toy.random_ids(spec, (LENGTH,))
    ours = toy.logits(toy.make_decoder(spec, FLOAT32, exact=exact, weights=weights), ids, (LENGTH,))
    same = transformers_logits(transformers_model(spec, weights, ROUNDED), ids)
    # A probability on the edge of a BF16 step may fall on the other side: a few logits are off by more than FP32 noise.
    assert float((ours - same).abs().median()) < 1e-5 * float(same.abs().max())
    assert float((ours - same).abs().max()) < 5e-4 * float(same.abs().max())
    assert float(((ours - same).abs() < 1e-4).float().mean()) > 0.95
    assert sqnr_db(same, ours) > 85
    unrounded = transformers_logits(transformers_model(spec, weights), ids)
    assert sqnr_db(unrounded, ours) > 55
    assert torch.equal(ours.argmax(-1), unrounded.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_long_and_packed_logits_are_those_of_transformers(toy: SimpleNamespace, family: str) -> None:
    """Beyond one step of keys, beyond the original context of the stretched rope, and beside other sequences."""
    spec, weights, lengths = toy.SPECS[family], toy.random_weights(toy.SPECS[family], 1), (150, 9, 200)
    ids = toy.random_ids(spec, lengths)
    ours = toy.logits(toy.make_decoder(spec, FLOAT32, weights=weights), ids, lengths)
    model = transformers_model(spec, weights, "sdpa")
    for a, part in zip(ours.split(list(lengths)), ids.split(list(lengths))):
        assert sqnr_db(transformers_logits(model, part), a) > 54


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_logits_are_as_good_as_those_of_transformers(toy: SimpleNamespace, family: str) -> None:
    spec, weights = toy.SPECS[family], toy.random_weights(toy.SPECS[family])
    ids = toy.random_ids(spec, (LENGTH,))
    truth, theirs = (
        transformers_logits(transformers_model(spec, weights, dtype=dtype), ids)
        for dtype in (torch.float32, torch.bfloat16)
    )
    ours = toy.logits(toy.make_decoder(spec, bf16_flow(), weights=weights), ids, (LENGTH,))
    assert float((ours - truth).norm()) < 1.1 * float((theirs - truth).norm())
    assert sqnr_db(truth, ours) > 37 and sqnr_db(theirs, ours) > 34


def test_fp8_logits_are_near(toy: SimpleNamespace) -> None:
    spec, weights = toy.SPECS["llama31"], toy.random_weights(toy.SPECS["llama31"])
    ids = toy.random_ids(spec, (LENGTH,))
    truth = transformers_logits(transformers_model(spec, weights), ids)
    ours = toy.logits(toy.make_decoder(spec, fp8_flow(), weights=weights), ids, (LENGTH,))
    assert 20 < sqnr_db(truth, ours) < 35


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_reloads_in_transformers_with_equal_logits(
    toy: SimpleNamespace, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    spec, weights = toy.SPECS[family], toy.random_weights(toy.SPECS[family])
    ids = toy.random_ids(spec, (LENGTH,))
    original = transformers_model(spec, weights, dtype=dtype)
    decoder = toy.make_decoder(spec, fp8_flow(), weights=weights)
    save(tmp_path / "export", spec, decoder.state_dict().items(), dtype=dtype)
    reloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", attn_implementation="eager", dtype="auto", local_files_only=True
    ).eval()
    assert reloaded.dtype == dtype and type(reloaded) is type(original)
    assert torch.equal(transformers_logits(reloaded, ids), transformers_logits(original, ids))
    again = Decoder(load_config(tmp_path / "export"), fp8_flow(), ReferenceKernels())
    again.load_state_dict({n: t.float() for n, t in load_tensors(tmp_path / "export", spec)}, strict=True)
    again.refresh(1)
    assert again.spec == spec and again.digest() == decoder.digest()


def load_smollm2(flow: Flow) -> Decoder:
    folder = Path(SMOLLM2)
    decoder = Decoder(load_config(folder), flow, ReferenceKernels())
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, tensor in load_tensors(folder, decoder.spec):
            parameters[name].copy_(tensor)
    decoder.refresh(1)
    return decoder


def transformers_smollm2(dtype: torch.dtype, attention: str = "eager") -> Any:
    return AutoModelForCausalLM.from_pretrained(
        SMOLLM2, attn_implementation=attention, dtype=dtype, local_files_only=True
    ).eval()


@pytest.mark.skipif(not SMOLLM2, reason="LOCKSTEP_SMOLLM2 does not name a folder with SmolLM2-135M")
def test_smollm2_in_fp32_and_bf16(toy: SimpleNamespace) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2, local_files_only=True)
    text = "The capital of France is Paris. Two plus two is four, and the quick brown fox jumps over the lazy"
    ids = torch.tensor(tokenizer(text)["input_ids"])
    truth = transformers_logits(transformers_smollm2(torch.float32), ids)
    same = transformers_logits(transformers_smollm2(torch.float32, ROUNDED), ids)
    ours = toy.logits(load_smollm2(FLOAT32), ids, (len(ids),))
    assert sqnr_db(same, ours) > 62 and sqnr_db(truth, ours) > 55
    assert float((ours - same).abs().median()) < 1e-4 * float(same.abs().max())
    assert torch.equal(ours.argmax(-1), truth.argmax(-1))
    assert tokenizer.decode(ours[-1].argmax()).strip() == "dog"

    theirs = transformers_logits(transformers_smollm2(torch.bfloat16), ids)
    ours = toy.logits(load_smollm2(bf16_flow()), ids, (len(ids),))
    assert float((ours - truth).norm()) < 1.3 * float((theirs - truth).norm())
    assert sqnr_db(truth, ours) > 30
    assert tokenizer.decode(ours[-1].argmax()).strip() == "dog"
