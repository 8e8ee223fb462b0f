"""What `lockstep bench rollout` is asked for, and which goals its figures answer."""

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lockstep.bench import rollout as bench
from lockstep.bench.rollout import GOALS, PROFILED_TOKENS, Throughput, Work, decode_profile, goals
from lockstep.bench.timing import Ceilings
from lockstep.cli.bench import rollout
from lockstep.errors import ConfigError
from lockstep.kernels.reference import ReferenceKernels
from lockstep.models.decoder import Decoder
from lockstep.numerics.flow import fp8_flow
from lockstep.rollout.engine import EmbeddedEngine
from lockstep.rollout.types import SamplingParams


def test_a_work_is_parsed_and_named() -> None:
    work = Work.parse("64x512+1024")
    assert work == Work(64, 512, 1024)
    assert work.name == "64 x (512 + 1024)"


@pytest.mark.parametrize("text", ["", "64", "64x512", "0x512+8", "64x512+1024x", "64 x 512 + 1024", "-1x2+3"])
def test_anything_else_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="PROMPTSxPROMPT_TOKENS"):
        Work.parse(text)


def test_prompts_are_the_same_for_both_engines_and_differ_from_each_other() -> None:
    first, again = (Work(3, 5, 2).ids(32_000) for _ in range(2))
    assert first == again
    assert len({tuple(p) for p in first}) == 3
    assert all(len(p) == 5 for p in first)


def speeds(work: Work, **by_engine: float) -> list[Throughput]:
    found = []
    for name, speed in by_engine.items():
        engine, _, flow = name.partition("_")
        label = "vllm 0.26.0" if engine == "vllm" else engine
        found.append(Throughput(label, {"fp8": "fp8+kv8"}.get(flow, flow), work.name, 1.0, speed))
    return found


def test_goals_are_ratios_of_this_work_only() -> None:
    short, long = Work(64, 512, 1024), Work(256, 512, 2048)
    found = speeds(short, lockstep_fp8=900.0, lockstep_bf16=600.0, vllm_fp8=600.0, vllm_bf16=450.0)
    found += speeds(long, lockstep_fp8=1000.0, vllm_fp8=500.0)
    reached = {g.id: g.value for g in goals(found, "qwen3-8b", [short, long])}
    assert reached == {"C3a": 1.5, "C3b": 2.0, "C5a": 1.5, "C4a": 2.0}


def test_other_models_and_works_answer_no_goal() -> None:
    work = Work(64, 512, 1024)
    found = speeds(work, lockstep_fp8=900.0, vllm_fp8=600.0)
    assert goals(found, "qwen3-0.6b", [work]) == []
    assert goals(found, "qwen3-8b", [Work(64, 512, 1000)]) == []


def test_every_goal_has_an_id_of_its_own() -> None:
    ids = [id for wanted in GOALS.values() for id, *_ in wanted]
    assert len(ids) == len(set(ids))


def test_a_profile_is_of_decode_steps_half_way(monkeypatch: pytest.MonkeyPatch, toy: SimpleNamespace) -> None:
    """The second time, which is watched, prompts come from the prefix cache."""
    engines: list[EmbeddedEngine] = []

    class Kept(EmbeddedEngine):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            engines.append(self)

    def profile(title: str, work: Callable[[], object]) -> list[str]:
        before = engines[0].recalled
        work()
        return [title, str(engines[0].recalled - before)]

    monkeypatch.setattr("lockstep.bench.rollout.EmbeddedEngine", Kept)
    monkeypatch.setattr("lockstep.bench.rollout.profile", profile)
    monkeypatch.setattr("lockstep.bench.rollout._free_tokens", lambda _: 1 << 20)
    spec = replace(toy.SPECS["qwen3"], vocab_size=2100)
    decoder = Decoder(spec, fp8_flow(kv_fp8=True), ReferenceKernels())
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    decoder.refresh(1)
    title, recalled = decode_profile(decoder, Work(2, 64, 128))
    assert title == f"{PROFILED_TOKENS} steps of 2 rows at 129 keys"
    assert int(recalled) == 2 * 128, "all of both prompts but the last token"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"top_p": 0.0}, "no token is left"),
        ({"top_k": 5, "goals": True}, "goals are of tokens drawn from all"),
    ],
    ids=str,
)
def test_a_truncation_that_says_nothing_is_refused_before_any_work(
    options: dict[str, float], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        rollout(**options)  # type: ignore[arg-type]


def test_both_engines_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def run(*_: object, env: dict[str, str], **__: object) -> SimpleNamespace:
        seen.append(json.loads(env["LOCKSTEP_VLLM_JOB"]))
        line = "RESULT " + json.dumps({"version": "1", "seconds": 2.0, "tokens": 6})
        return SimpleNamespace(returncode=0, stdout=line, stderr="")

    monkeypatch.setattr(bench, "ours", lambda *_, params, **__: [seen.append(params)])
    monkeypatch.setattr("subprocess.run", run)
    params, work = SamplingParams(1, top_p=0.9, top_k=40), Work(1, 2, 3)
    _, theirs = bench.run_rollout(
        Ceilings(1.0, 1.0), "qwen3-0.6b", [work], ["bf16"], vllm=True, params=params
    )
    assert theirs == Throughput("vllm 1", "bf16", work.name, 2.0, 3.0)
    ours, job = seen
    assert ours == params and isinstance(job, dict) and (job["top_p"], job["top_k"]) == (0.9, 40)
