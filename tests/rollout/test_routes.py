"""Routes on their way from the engine's cache to the trainer: those of the training forward, whatever the schedule was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lockstep.data.turns import Conversations
from lockstep.kernels.table import select
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.models.tiny import char_tokenizer, tiny_spec
from lockstep.nn.routes import Routes
from lockstep.numerics.flow import Flow, bf16_flow, fp8_flow
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.external import BadSample, completion_from_json, completion_to_json
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, Request, SamplingParams
from lockstep.trainer.microbatch import make_microbatch
from lockstep.trainer.route_replay import RouteShape, routes_of_rows

PROMPTS = ((5, 9, 13, 30, 41, 7, 8, 11, 60), (5, 9, 13, 30, 41, 7, 8), (77, 20))
SCHEDULES = {
    "together": (RolloutSpec(), 2048),
    "chunks": (RolloutSpec(max_running=3, max_batched_tokens=5, page_size=4), 2048),
    "preemption": (RolloutSpec(page_size=4, prefix_cache=False), 32),
    "no pages shared": (RolloutSpec(page_size=64, prefix_cache=False), 2048),
}


def decoder_of(flow: Flow, spec: ModelSpec | None = None) -> Decoder:
    """Three layers, the second of them dense, random weights at version 1."""
    if spec is None:
        spec = tiny_spec(
            family="qwen3_moe",
            hidden=32,
            layers=3,
            heads=2,
            kv_heads=1,
            intermediate=48,
            experts=6,
            tied=False,
        )
        assert spec.moe is not None
        spec = replace(spec, moe=replace(spec.moe, dense_layers=(1,)))
    decoder = Decoder(spec, flow, select("reference"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + float("norm" in name))
    decoder.refresh(1)
    return decoder


def generate(decoder: Decoder, rollout: RolloutSpec, tokens: int) -> tuple[EmbeddedEngine, list[Completion]]:
    engine = EmbeddedEngine(decoder, replace(rollout, routes="replay"), cache_tokens=tokens)
    requests = [Request(p, i, 3, SamplingParams(9)) for i, p in enumerate(PROMPTS)]
    found = [engine.generate(requests, seed=1, step=0, expected_version=1) for _ in range(2)]
    for one, two in zip(*found):
        assert one == two and one.routes is not None and two.routes is not None
        assert torch.equal(one.routes, two.routes), "from a recalled prefix as well"
    return engine, found[1]


def chosen(decoder: Decoder, completion: Completion) -> tuple[Tensor, list[float]]:
    """([P + N - 1, sparse layers, k] experts that this decoder's training forward chooses by itself, log-probabilities)."""
    micro = make_microbatch([replace(completion, routes=None)], 2, share_prompts=True)
    routes = Routes()
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("lockstep.trainer.microbatch.routes_of_rows", lambda *_: routes)
        logp_N, _ = micro.log_probs(decoder, None)
    assert sorted(routes.ids) == [0, 2]
    return torch.stack(list(routes.ids.values()), 1), logp_N.tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_engine_s_routes_are_the_training_forward_s_case_52(schedule: str) -> None:
    decoder = decoder_of(fp8_flow())
    engine, completions = generate(decoder, *SCHEDULES[schedule])
    assert (engine.preemptions > 0) == (schedule == "preemption")
    assert (engine.recalled > 0) == (schedule == "chunks")
    distinct = set()
    for completion in completions:
        assert completion.routes is not None and completion.routes.dtype == torch.int16
        assert completion.routes.shape == (len(completion.prompt_ids) + 9 - 1, 2, 2)
        ids, logprobs = chosen(decoder, completion)
        assert torch.equal(completion.routes.long(), ids) and logprobs == list(completion.logprobs)
        distinct |= set(completion.routes.flatten().tolist())
    assert distinct == set(range(6)), "every expert was used"


def test_replayed_in_one_flow_they_change_no_bit_case_52() -> None:
    decoder = decoder_of(fp8_flow())
    _, completions = generate(decoder, *SCHEDULES["chunks"])
    for share in (True, False):
        micro = make_microbatch(completions, 2, share_prompts=share)
        assert micro.routes_TLk is not None and len(micro.routes_TLk) == len(micro.ids_T)
        with torch.no_grad():
            logp_N, _ = micro.log_probs(decoder, None)
        assert torch.equal(logp_N, micro.rollout_N)


def test_another_flow_chooses_otherwise_and_repeats_what_it_is_given_case_52() -> None:
    """The BF16 trainer of an FP8 engine: overruled here and there, by the engine's experts in every row."""
    engine_side, trainer = decoder_of(fp8_flow()), decoder_of(bf16_flow())
    _, completions = generate(engine_side, *SCHEDULES["together"])
    own = torch.cat([chosen(trainer, c)[0] for c in completions]).sort(-1).values
    given = torch.cat([c.routes for c in completions if c.routes is not None]).long().sort(-1).values
    differ = int((own != given).any(-1).sum())
    assert 0 < differ < own.shape[0] * own.shape[1] // 2
    micro = make_microbatch(completions, 2, share_prompts=False)
    routes = routes_of_rows(micro.routes_TLk, trainer.spec)
    assert routes is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.trainer.microbatch.routes_of_rows", lambda *_: routes)
        logp_N, _ = micro.log_probs(trainer, None)
    used = torch.stack(list(routes.ids.values()), 1).sort(-1).values
    assert torch.equal(used, given)
    logp_N.sum().backward()
    for layer in (0, 2):
        gate = trainer.get_parameter(f"model.layers.{layer}.mlp.gate.weight")
        assert gate.grad is not None and bool((gate.grad.norm(dim=1) > 0).all())


def test_nobody_records_what_nobody_asks_for() -> None:
    decoder = decoder_of(bf16_flow())
    engine = EmbeddedEngine(decoder, RolloutSpec(), cache_tokens=512)
    (one,) = engine.generate([Request((5, 6), 0, 1, SamplingParams(3))], seed=0, step=0, expected_version=1)
    assert one.routes is None and engine.cache.routes is None
    dense = decoder_of(bf16_flow(), tiny_spec(hidden=32, layers=1, heads=2, kv_heads=1))
    engine = EmbeddedEngine(dense, RolloutSpec(routes="replay"), cache_tokens=512)
    assert engine.cache.routes is None


def test_a_conversation_s_routes_cover_all_its_turns() -> None:
    """Also the rows of what a user said in between: those of the last turn, which was sampled after all the others."""
    decoder = decoder_of(fp8_flow())
    engine = EmbeddedEngine(decoder, RolloutSpec(routes="replay", page_size=4), cache_tokens=512)
    chats = Conversations(char_tokenizer(), (2,))
    talk = chats.start([{"role": "user", "content": "1+2="}], prompt_index=0, sample_index=0)
    for turn in range(3):
        request = talk.request(SamplingParams(5))
        (answer,) = engine.generate([request], seed=1, step=0, expected_version=1)
        talk.take(answer)
        if turn < 2:
            talk.add({"role": "user", "content": f"{turn}?"})
    (sample,) = talk.samples()
    assert sample.routes is not None and sample.loss_mask is not None and not all(sample.loss_mask)
    assert len(sample.routes) == len(sample.prompt_ids) + len(sample.token_ids) - 1
    assert torch.equal(sample.routes.long(), chosen(decoder, sample)[0])


def test_routes_travel_as_json() -> None:
    decoder = decoder_of(bf16_flow())
    _, completions = generate(decoder, *SCHEDULES["together"])
    shape = RouteShape(2, 2, 6)
    for completion in completions:
        again = completion_from_json(json.loads(json.dumps(completion_to_json(completion))))
        assert again == completion and again.routes is not None and completion.routes is not None
        assert torch.equal(again.routes, completion.routes.long()) and shape.wrong(again) == ""
    record = completion_to_json(completions[0])
    for bad in ([[1, 2]], [[[1.5]]], [[[1], [1, 2]]], [[["a"]]], [[[True]]], [[[None]]]):
        with pytest.raises(BadSample, match="routes are no"):
            completion_from_json({**record, "routes": bad})
    assert completion_from_json({**record, "routes": None}).routes is None
