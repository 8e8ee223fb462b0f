"""The contract, on whole decoders: a training forward and any way of serving the same tokens give the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lockstep.models.spec import ModelSpec
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow

LENGTHS = (67, 1, 30, 130)
WIDE = ModelSpec("qwen3", 131, 160, 272, 2, 6, 2, 64, qk_norm=True)
FLOWS = {
    "bf16": bf16_flow(),
    "bf16-kv8": bf16_flow(kv_fp8=True),
    "fp8": fp8_flow(),
    "fp8-kv8": fp8_flow(kv_fp8=True),
    "fp8-pow2-kv8": fp8_flow(kv_fp8=True, scale="pow2", keep_bf16=frozenset({0})),
}


@pytest.mark.parametrize("exact", [False, True], ids=["reference", "exact"])
@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
def test_case_46_packed_and_paged_hidden_states_are_equal(
    toy: SimpleNamespace, flow: Flow, exact: bool
) -> None:
    decoder = toy.make_decoder(WIDE, flow, exact=exact)
    ids = toy.random_ids(WIDE, LENGTHS)
    scales = toy.calibrate(decoder, ids, LENGTHS, 0.9) if flow.kv_fp8 else None
    with torch.no_grad():
        packed = toy.packed_hidden(decoder, ids, LENGTHS, scales)
        start = 0
        for n in LENGTHS:
            alone = toy.packed_hidden(decoder, ids[start : start + n], (n,), scales)
            assert torch.equal(alone, packed[start : start + n])
            start += n
    with_grad = toy.packed_hidden(decoder, ids, LENGTHS, scales)
    assert with_grad.requires_grad and torch.equal(with_grad.detach(), packed)
    for seed, largest, page in ((0, 8, 16), (1, 130, 5)):
        steps = toy.schedule(LENGTHS, seed, largest)
        paged = toy.paged_hidden(decoder, ids, LENGTHS, steps, scales, page=page, seed=seed)
        assert torch.equal(paged, packed), (seed, largest)


@pytest.mark.parametrize("family", ["llama31", "llama_tied", "qwen2", "qwen3", "qwen3_moe"])
def test_case_46_log_probs_token_by_token(toy: SimpleNamespace, family: str) -> None:
    """Log-probabilities of the trainer's chunked head and of decode steps, for every family, FP8 throughout."""
    decoder = toy.make_decoder(toy.SPECS[family], fp8_flow(kv_fp8=True))
    lengths = (40, 3, 66)
    ids, targets = toy.random_ids(decoder.spec, lengths), toy.random_ids(decoder.spec, lengths, 1)
    scales, temperature = toy.calibrate(decoder, ids, lengths, 2.0), torch.full((len(ids),), 0.8)
    packed = toy.packed_hidden(decoder, ids, lengths, scales)
    paged = toy.paged_hidden(decoder, ids, lengths, toy.decode_schedule(lengths), scales)
    trainer = decoder.head.log_probs(packed, targets, temperature)[0].detach()
    batches = zip(paged.split(7), targets.split(7), temperature.split(7))
    sampler = torch.cat([decoder.head.log_probs(*batch)[0] for batch in batches]).detach()
    assert torch.equal(trainer, sampler)
    assert bool((trainer < 0).all()) and bool(torch.isfinite(trainer).all())


def test_equal_weights_give_equal_codes_and_digest(toy: SimpleNamespace) -> None:
    first, second = (toy.make_decoder(WIDE, fp8_flow()) for _ in range(2))
    assert first.digest() == second.digest()
    assert toy.make_decoder(WIDE, bf16_flow()).digest() != first.digest()
    again = first.refresh(2)
    assert all(r.changed == 0 for r in again) and first.version == 2
    with torch.no_grad():
        dict(first.named_parameters())["model.layers.0.mlp.up_proj.weight"][3, 5] += 5.0
    changed = {r.name: r.changed for r in first.refresh(3) if r.changed}
    assert set(changed) == {"model.layers.0.mlp.up_proj.weight"}
    assert first.digest() != second.digest()


def test_case_14_codes_come_straight_from_the_masters(toy: SimpleNamespace) -> None:
    """A displacement far below BF16's resolution moves FP8 codes, by as much on average; it moves no BF16 copy."""
    weights, step = toy.random_weights(WIDE), 2.0**-10
    moved = {n: w * (1 + step) if w.dim() > 1 else w for n, w in weights.items()}
    before, after = (toy.make_decoder(WIDE, fp8_flow(), weights=w) for w in (weights, moved))
    plain = zip(before.working(), after.working())
    assert all(
        torch.equal(a.working.plain, b.working.plain) for (_, a), (_, b) in plain if not a.operand.is_fp8
    )
    name = "model.layers.0.mlp.up_proj.weight"
    old, new = (dict(d.working())[name].working.codes.dequantize() for d in (before, after))
    followed = float(((new - old) * old).sum() / (step * old.square().sum()))
    assert 0.9 < followed < 1.1


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"])
def test_case_15_a_non_finite_master_is_refused_by_name(toy: SimpleNamespace, name: str) -> None:
    decoder = toy.make_decoder(WIDE, fp8_flow())
    with torch.no_grad():
        dict(decoder.named_parameters())[name].view(-1)[7] = torch.nan
    with pytest.raises(ValueError, match=name):
        decoder.refresh(2)
