"""Makes the parts of a run from its spec: model, kernels, flows, engine, data. Everything that can be refused is refused
here, before the first token.

Next: `loop.py`, which puts them to work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from lockstep.data.example import fingerprint, load
from lockstep.data.spec import DataSpec
from lockstep.data.stream import PromptStream
from lockstep.data.tokenize import EncodedPrompt, encode_all
from lockstep.errors import CapacityError, ConfigError
from lockstep.kernels.table import Kernels, device_of, refuse_missing
from lockstep.models.build import empty_decoder, sharing_decoder
from lockstep.models.checkpoint import load_config, load_tensors
from lockstep.models.decoder import Decoder
from lockstep.models.spec import ModelSpec
from lockstep.models.tokenizer import load_tokenizer, stop_ids
from lockstep.nn.kv_scales import KVMaxima, KVScales
from lockstep.numerics.flow import FlowPair, FlowSpec, build_flows
from lockstep.rollout.calibration import measure_kv
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.types import Completion, Request, SamplingParams
from lockstep.trainer.backend import choose_kernels
from lockstep.trainer.cache_size import cache_size
from lockstep.trainer.microbatch import MicroBatch, make_microbatch
from lockstep.trainer.ranks import Ranks
from lockstep.trainer.recipes import prepare_model
from lockstep.trainer.route_replay import RouteShape, replayed_shape
from lockstep.trainer.spec import RunSpec


@dataclass
class Parts:
    """What a run works with. `stop_ids` are the model's own end tokens, `replayed` the shape of routes that are replayed, `note`
    what is to be said of its memory, `ranks` the processes that share the work."""

    spec: RunSpec
    model_spec: ModelSpec
    tokenizer: Any
    flows: FlowPair
    decoder: Decoder
    engine: EmbeddedEngine
    stop_ids: tuple[int, ...]
    stream: PromptStream[EncodedPrompt]
    dropped_prompts: int
    replayed: RouteShape | None = None
    note: str | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def generate(self, requests: Sequence[Request], **options: Any) -> list[Completion]:
        """Completions of all requests, in their order, each sampled by one rank. options: see `rollout.types.Engine.generate`."""
        division = self.ranks.divide(requests)
        drawn = self.engine.generate(division.own, **options) if division.own else []
        found: dict[int, list[Completion]] = {r.prompt_index: [] for r in division.own}
        for completion in drawn:
            found[completion.prompt_index].append(completion)
        return [c for some in division.gather(list(found.values())) for c in some]

    def text(self, completion: Completion) -> str:
        """As people and reward functions read it."""
        return str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))

    def calibrate(self, start: int, version: int) -> KVScales:
        """KV scales from the prompts of the step that begins at ordinal `start`, with headroom. Whichever side
        `flow.kv_calibration` names must hold the weights they are for."""
        flow = self.spec.flow
        return self.measure_kv(start).scales(headroom=flow.kv_headroom, kind=flow.scale, version=version)

    def measure_kv(self, start: int) -> KVMaxima:
        """KV maxima over those prompts, in a forward of the side that `flow.kv_calibration` names."""
        prompts = [p.ids for p in self.stream.take(start, self.spec.rollout.prompts_per_step)]
        rollout = self.spec.flow.kv_calibration == "rollout"
        return measure_kv(self.engine.decoder if rollout else self.decoder, prompts)

    @cached_property
    def fingerprint(self) -> str:
        """Of the training data."""
        return fingerprint([p.example for p in self.stream.examples])

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.model_spec.query_group

    @property
    def kernels(self) -> Kernels:
        """What both sides compute with."""
        return self.decoder.kernels

    @property
    def device(self) -> torch.device:
        """Where masters, working copies and micro-batches are."""
        return device_of(self.kernels)

    def microbatch(self, completions: Sequence[Completion], *, share_prompts: bool) -> MicroBatch:
        """Packed rows of these completions, on the device."""
        return make_microbatch(
            completions, self.group, share_prompts=share_prompts, kernels=self.kernels, device=self.device
        )


def make_parts(spec: RunSpec, ranks: Ranks | None = None) -> Parts:
    """Loads and checks everything a run needs."""
    ranks = ranks or Ranks()
    refuse_missing(spec.kernels)
    check_ranks(spec, ranks.size)
    model_path = prepare_model(spec.model)
    model_spec = load_config(model_path)
    tokenizer = load_tokenizer(model_path, model_spec)
    flows = make_flows(spec, model_spec)
    replayed = replayed_shape(spec.rollout, model_spec, flows)
    kernels = choose_kernels(spec, model_spec, flows)
    decoder = empty_decoder(model_spec, flows.trainer, kernels, device_of(kernels))
    decoder.checkpointing, decoder.save_fp8 = spec.update.checkpointing, spec.update.save_fp8
    decoder.deterministic = spec.update.deterministic
    decoder.capture(kernels.fused and spec.update.cuda_graphs)
    load_masters(decoder, model_path)
    prompts, dropped = load_prompts(spec.data, tokenizer, spec.seed)
    stream = PromptStream(
        prompts, spec.data.seed if spec.data.seed is not None else spec.seed, spec.data.shuffle
    )
    longest = max(len(p.ids) for p in prompts)
    check_lengths(model_spec, longest, spec.rollout.max_new_tokens)
    check_truncation(spec, model_spec.vocab_size)
    check_budget(spec, longest)
    rollout_decoder = decoder
    if not flows.unified:
        rollout_decoder = sharing_decoder(decoder, flows.rollout)
    memory = _memory(kernels)
    size = cache_size(spec, model_spec, flows, longest, fused=kernels.fused, memory=memory, ranks=ranks.size)
    engine = EmbeddedEngine(
        rollout_decoder,
        spec.rollout,
        cache_tokens=size.tokens,
        detokenize=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
    )
    check_cache(engine, longest, spec)
    ends = stop_ids(model_path, tokenizer, model_spec)
    return Parts(
        spec,
        model_spec,
        tokenizer,
        flows,
        decoder,
        engine,
        tuple(ends),
        stream,
        dropped,
        replayed,
        size.note,
        ranks,
    )


def _memory(kernels: Kernels) -> float | None:
    """Bytes of a GPU for this process: what is free, and what torch holds already."""
    if device_of(kernels).type != "cuda":
        return None
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()


def calibrate(decoder: Decoder, prompts: Sequence[tuple[int, ...]], flow: FlowSpec, version: int) -> KVScales:
    """KV scales under which the keys and values of these prompts fit with the flow's headroom."""
    return measure_kv(decoder, prompts).scales(headroom=flow.kv_headroom, kind=flow.scale, version=version)


def make_flows(spec: RunSpec, model: ModelSpec) -> FlowPair:
    """The two flows, as far as this trainer supports them."""
    try:
        return build_flows(spec.flow, model.num_layers)
    except ValueError as error:
        raise ConfigError(str(error), where="flow") from error


def load_masters(decoder: Decoder, path: Path) -> None:
    """Copies a checkpoint's tensors into the FP32 masters, strictly."""
    parameters = dict(decoder.named_parameters())
    with torch.no_grad():
        for name, tensor in load_tensors(path, decoder.spec):
            parameters[name].copy_(tensor)


def load_prompts(data: DataSpec, tokenizer: Any, seed: int) -> tuple[list[EncodedPrompt], int]:
    """Tokenized prompts and the number of overlong ones that were dropped."""
    examples = load(data, seed)
    return encode_all(examples, tokenizer, data.max_prompt_tokens, data.chat_template_args)


def check_lengths(model: ModelSpec, longest_prompt: int, new_tokens: int) -> None:
    """Refuses sequences beyond the model's positions."""
    total = longest_prompt + new_tokens
    if total > model.max_position:
        raise CapacityError(
            f"the longest prompt ({longest_prompt}) and {new_tokens} new tokens make {total}",
            where="rollout.max_new_tokens",
            why=f"the model has {model.max_position} positions",
            fix="lower rollout.max_new_tokens or data.max_prompt_tokens",
        )


def check_truncation(spec: RunSpec, vocabulary: int) -> None:
    """Refuses truncated sampling that may keep more ids of a token than are recorded for the trainer."""
    rollout = spec.rollout
    most = min(rollout.top_k or vocabulary, vocabulary)
    if spec.update.steps and rollout.truncates and most > rollout.max_kept:
        raise ConfigError(
            f"truncated sampling may keep {most} ids of a token, at most {rollout.max_kept} are recorded",
            where="rollout.top_k",
            why="rollout.truncation is replay: the trainer normalises over the ids that were kept",
            fix=f"set rollout.top_k to {rollout.max_kept} or less, or raise rollout.max_kept",
        )


def check_ranks(spec: RunSpec, ranks: int) -> None:
    """Refuses more processes than there are prompts for."""
    if ranks > spec.rollout.prompts_per_step:
        raise ConfigError(
            f"{ranks} processes share {spec.rollout.prompts_per_step} prompts a step",
            where="rollout.prompts_per_step",
            why="a prompt is sampled by one of them, so some would have none",
            fix=f"raise it to at least {ranks}, or start fewer processes",
        )


def check_cache(engine: EmbeddedEngine, longest_prompt: int, spec: RunSpec) -> None:
    """Refuses a KV cache that the longest possible sample doesn't fit into."""
    cache, longest = engine.cache, longest_prompt + spec.rollout.max_new_tokens
    if cache.pages_for(longest) > cache.num_pages:
        raise CapacityError(
            f"a sample may have {longest} tokens, the KV cache holds {cache.num_pages * cache.page_size}",
            where="rollout.cache_tokens",
            fix=f"raise it to at least {cache.pages_for(longest) * cache.page_size}",
        )


def check_budget(spec: RunSpec, longest_prompt: int) -> None:
    """Refuses a micro-batch budget that the longest possible sample exceeds."""
    total = longest_prompt + spec.rollout.max_new_tokens
    if spec.update.steps and total > spec.update.max_tokens_per_microbatch:
        raise CapacityError(
            f"a sample may have {total} tokens, a micro-batch {spec.update.max_tokens_per_microbatch}",
            where="update.max_tokens_per_microbatch",
            fix=f"raise it to at least {total}",
        )


def sampling_params(parts: Parts, *, greedy: bool = False, evaluation: bool = False) -> SamplingParams:
    """Sampling parameters of training rollouts, or of evaluation."""
    rollout, evaluate = parts.spec.rollout, parts.spec.eval
    ends = frozenset(rollout.stop_token_ids) | (
        frozenset() if rollout.ignore_eos else frozenset(parts.stop_ids)
    )
    truncation = evaluate if evaluation else rollout
    replays = rollout.truncation == "replay" and not evaluation
    return SamplingParams(
        (evaluate.max_new_tokens if evaluation else 0) or rollout.max_new_tokens,
        0.0 if greedy else rollout.temperature,
        truncation.top_p,
        truncation.top_k,
        truncation.min_p,
        rollout.stop,
        ends,
        rollout.max_kept if replays else 0,
    )
