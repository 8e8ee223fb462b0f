"""Several processes of one run: what is divided, gathered and compared, and that two do what one does."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, multiprocessing
from torch import distributed as dist

from lockstep.algorithms.spec import AlgorithmSpec
from lockstep.correction.spec import CorrectionSpec
from lockstep.data.example import Example
from lockstep.data.spec import DataSpec
from lockstep.errors import ConfigError, ContractError, JobError
from lockstep.launch import torchrun
from lockstep.launch.local import run_training
from lockstep.models.random_weights import make_random
from lockstep.numerics.flow import FlowSpec
from lockstep.observe.logger import RunLogger, SilentLogger
from lockstep.rewards.evaluate import RewardBatch
from lockstep.rollout.spec import RolloutSpec
from lockstep.rollout.types import Completion, SamplingParams
from lockstep.trainer.optimizer import Optimizer
from lockstep.trainer.ranks import Ranks, _on_host
from lockstep.trainer.sample import Sample
from lockstep.trainer.scoring import score
from lockstep.trainer.setup import make_parts
from lockstep.trainer.spec import CheckpointSpec, EvalSpec, ModelSource, OptimSpec, RunSpec, UpdateSpec

MakeSpec = Callable[..., RunSpec]
WIDE = {"rollout_rs_threshold": 1.02, "rollout_rs_threshold_lower": 0.98}
"""Geometric bounds for completions of six tokens."""
EVALUATION = EvalSpec(
    DataSpec("arithmetic", args={"template": "{a}+{b}=", "size": 5}), every=2, prompts=5, samples=2
)
MOE = {"family": "qwen3_moe", "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 32}


def process(rank: int, size: int, ports: Sequence[int], specs: Sequence[RunSpec]) -> None:
    """One of a job's, as `torchrun` starts them; one job for each spec."""
    torch.set_num_threads(1)
    for port, spec in zip(ports, specs, strict=True):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        os.environ |= {name: str(value) for name, value in place.items()}
        run_training(spec)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    found = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return found


def run_two(specs: Sequence[RunSpec]) -> None:
    """Each by two processes, one run after the other."""
    multiprocessing.spawn(process, (2, free_ports(len(specs)), specs), nprocs=2)


def cases(make_spec: MakeSpec, tmp_path: Path, name: str) -> dict[str, RunSpec]:
    """Runs whose mini-batches are two micro-batches: then a sum over ranks is the sum that one process forms, bit for bit."""
    rollout = RolloutSpec(prompts_per_step=4, samples_per_prompt=4, max_new_tokens=6, ignore_eos=True)
    whole, half = (
        UpdateSpec(2, max_tokens_per_microbatch=60, **more) for more in ({}, {"mini_batches": 2, "epochs": 2})
    )
    half = replace(half, max_tokens_per_microbatch=30)
    moe = ModelSource(str(tmp_path / f"{name}-moe"), "tiny", MOE)

    def make(case: str, *flow: str, update: UpdateSpec = whole, **more: Any) -> RunSpec:
        return make_spec(*flow, name=f"{name}-{case}", rollout=rollout, update=update, **more)

    tis, mis = CorrectionSpec("token_tis"), CorrectionSpec("geometric_mis", **WIDE)
    return {
        "unified": make(
            "unified",
            "fp8",
            "fp8",
            eval=EVALUATION,
            algorithm=AlgorithmSpec(kl_coef=0.1),
            checkpoint=CheckpointSpec(every=2),
        ),
        "weighted": make("weighted", "fp8-rollout", correction=tis),
        "rejected": make("rejected", "fp8-rollout", "fp8", update=half, correction=mis),
        "calibrated": make(
            "calibrated", "fp8", update=half, algorithm=AlgorithmSpec("dapo", clip_calibration_every=1)
        ),
        "experts": make("experts", "fp8", model=moe, reward="partly"),
    }


def test_two_processes_do_what_one_does(
    make_spec: MakeSpec, tmp_path: Path, outcome: Callable[[Path], dict[str, Any]]
) -> None:
    """Samples, metrics, receipts and weights, under every way to learn something about a step from all of it."""
    torch.set_num_threads(1)
    alone, together = (cases(make_spec, tmp_path, name) for name in ("one", "two"))
    run_two(list(together.values()))
    for case, spec in alone.items():
        run_training(spec)
        one, two = outcome(Path(spec.run_dir)), outcome(Path(together[case].run_dir))
        for step, (expected, found) in enumerate(zip(one["metrics"], two["metrics"], strict=True)):
            assert expected == found, f"{case}, step {step}"
        assert one == two, case
    kept = [Path(runs["unified"].run_dir) / "checkpoints" / "step_000002" for runs in (alone, together)]
    for file in ("masters", "optimizer", "kv_scales"):
        first, second = (load_file(folder / f"{file}.safetensors") for folder in kept)
        assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first), file


def test_two_processes_go_on_where_they_were(
    make_spec: MakeSpec, outcome: Callable[[Path], dict[str, Any]]
) -> None:
    """As if nothing had been; one process alone can go on too, and says that its sums are others."""
    rollout = RolloutSpec(prompts_per_step=5, samples_per_prompt=3, max_new_tokens=6)
    made = {
        name: make_spec(
            "fp8", "fp8", name=name, rollout=rollout, checkpoint=CheckpointSpec(every=2),
            update=UpdateSpec(4, max_tokens_per_microbatch=20),
        )
        for name in ("through", "stopped")
    }  # fmt: skip
    half = replace(made["stopped"], update=replace(made["stopped"].update, steps=2))
    run_two([made["through"], half, made["stopped"]])
    folders = [Path(spec.run_dir) for spec in made.values()]
    through, stopped = map(outcome, folders)
    assert through["metrics"][-1]["data/microbatches"] > 3
    assert through == stopped
    notes = (folders[1] / "notes.jsonl").read_text()
    assert "resumed from step_000002" in notes and "processes" not in notes
    longer = replace(made["stopped"], update=replace(made["stopped"].update, steps=5))
    run_training(longer)
    assert "1 processes now, 2 before" in (folders[1] / "notes.jsonl").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("flow", [FlowSpec("fp8", "fp8"), FlowSpec("bf16")], ids=["fp8+kv8", "bf16"])
def test_two_gpus_do_what_one_does(
    flow: FlowSpec, make_spec: MakeSpec, tmp_path: Path, outcome: Callable[[Path], dict[str, Any]]
) -> None:
    make_random(tmp_path / "model", shape="smollm2-135m", layers=2)
    alone, together = (
        make_spec(
            flow, name=name, kernels="hopper", model=ModelSource(str(tmp_path / "model")),
            rollout=RolloutSpec(4, 4, 24, ignore_eos=True), update=UpdateSpec(4, max_tokens_per_microbatch=220),
        )
        for name in ("alone", "together")
    )  # fmt: skip
    run_two([together])
    run_training(alone)
    one, two = (outcome(Path(spec.run_dir)) for spec in (alone, together))
    assert [row["data/microbatches"] for row in one["metrics"]] == [2.0] * 4
    assert one == two


def test_work_is_divided_and_put_together_again() -> None:
    ranks = [Ranks(rank, 3) for rank in range(3)]
    blocks = [r.divide("abcdefg").own for r in ranks]
    assert blocks == [["a", "b", "c"], ["d", "e"], ["f", "g"]]
    costs = [5, 1, 4, 2, 3, 3]
    divisions = [r.divide(range(6), costs) for r in ranks]
    loads = [sum(costs[i] for i in d.own) for d in divisions]
    assert sorted(i for d in divisions for i in d.own) == list(range(6)) and loads == [6, 6, 6]
    assert [r.divide([7]).own for r in ranks] == [[7], [], []], "some may have nothing to do"


def test_each_rank_holds_the_moments_of_its_share() -> None:
    parameters = [(f"p{n}", torch.nn.Parameter(torch.zeros(n, n))) for n in (8, 6, 5, 4, 2)]
    parameters += [("norm", torch.nn.Parameter(torch.zeros(3)))]
    held = [
        [
            p
            for group in Optimizer(parameters, OptimSpec(), 1, Ranks(r, 2)).adam.param_groups
            for p in group["params"]
        ]
        for r in range(2)
    ]
    assert sorted(id(p) for some in held for p in some) == sorted(id(p) for _, p in parameters)
    assert [sum(p.numel() for p in some) for some in held] == [71, 77]


def test_what_was_found_is_in_the_order_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [1, 9, 2, 8]
    divisions = [Ranks(rank, 2).divide("abcd", costs) for rank in range(2)]
    found = [[item.upper() for item in d.own] for d in divisions]
    monkeypatch.setattr(Ranks, "gather", lambda self, mine: found)
    assert [d.gather(mine) for d, mine in zip(divisions, found, strict=True)] == [list("ABCD")] * 2
    with pytest.raises(ValueError, match="1 results of 2 items"):
        divisions[0].gather(["A"])


def test_a_rank_reads_and_scores_its_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """And knows the scores of all, whoever has them."""
    read: list[str] = []

    class Half:
        def score(self, prompts: Any, texts: list[str], ids: Any, columns: Any) -> RewardBatch:
            return RewardBatch([float(t) for t in texts], {"f": [float(t) for t in texts]}, [])

    def decode(completion: Completion) -> str:
        read.append(str(completion.token_ids[0]))
        return read[-1]

    params = SamplingParams(1)
    completions = [Completion((1,), n // 2, n % 2, (n,), (-1.0,), "stop", (), 0, params) for n in range(6)]
    samples = [Sample(c, Example("1+1=", {}, 0), c.prompt_index, decode) for c in completions]
    other = RewardBatch([4.0, 5.0], {"f": [4.0, 5.0]}, [])
    monkeypatch.setattr(Ranks, "gather", lambda self, own: [own, other])
    metrics = score(Half(), samples, Ranks(0, 2))  # type: ignore[arg-type]
    assert read == ["0", "1", "2", "3"]
    assert [s.reward for s in samples] == [s.parts["f"] for s in samples] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert metrics["reward"] == 2.5


def test_tensors_are_sent_by_their_values() -> None:
    class OfAGpu(Tensor):
        device = torch.device("cuda")  # type: ignore[assignment]

        def cpu(self) -> Tensor:  # type: ignore[override]
            return torch.tensor(self.tolist())

    there = torch.arange(3.0).as_subclass(OfAGpu)
    sent = pickle.loads(_on_host({"x": [there], "n": 1}))
    assert sent["n"] == 1 and type(sent["x"][0]) is Tensor and torch.equal(sent["x"][0], torch.arange(3.0))


def test_other_weights_on_another_rank_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gather", lambda self, mine: ["a", "a", "b", "a"])
    with pytest.raises(ContractError, match=r"weights v3 differ between rank 0 and rank 2 of 4"):
        Ranks(1, 4).alike("a", "weights v3")


def test_more_processes_than_prompts_are_refused(make_spec: MakeSpec) -> None:
    with pytest.raises(ConfigError, match=r"4 processes share 3 prompts a step.*raise it to at least 4"):
        make_parts(make_spec(), Ranks(0, 4))


def test_a_process_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"process 2 of this machine has no GPU: there are 2.*start 2 or fewer"
    ):
        torchrun._take_gpu(2)


def test_a_process_that_lost_the_others_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line; whoever ended has told why. Other errors stay what they are."""
    for name in torchrun.PLACE:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(JobError, match="rank 1 lost the others"), torchrun.joined() as ranks:
        assert ranks == Ranks(1, 2) and not torchrun.speaks()
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    with pytest.raises(RuntimeError, match="shapes"), torchrun.joined():
        raise RuntimeError("shapes do not match")


def test_half_a_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in torchrun.PLACE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with (
        pytest.raises(ConfigError, match=r"WORLD_SIZE is 4, but LOCAL_RANK, MASTER_ADDR.* torchrun"),
        torchrun.joined(),
    ):
        pass


def test_the_others_write_nothing(tmp_path: Path, make_spec: MakeSpec) -> None:
    """Whatever a logger can be asked for."""
    missing = {
        name for name, value in vars(RunLogger).items()
        if not name.startswith("_") and name not in vars(SilentLogger) and name != "folder"
    }  # fmt: skip
    assert not missing
    with SilentLogger(tmp_path / "run", make_spec().observe, 3) as logger:
        logger.step(1, {"reward": 1.0})
        logger.note("hello")
        logger.busy(1, 2)
        assert logger.folder.path == tmp_path / "run" and logger.last_step is None
    assert not (tmp_path / "run").exists()
