"""Which kernels a run computes with, and what they refuse.

`auto` takes the GPU where it can train this model and flow, and says in one line what it took, wherever there was a choice.

Next: `setup.py`, which builds everything on them.
"""

from __future__ import annotations

import torch

from lockstep.errors import ConfigError
from lockstep.kernels.table import Kernels, hopper_missing, select
from lockstep.models.spec import ModelSpec
from lockstep.numerics.flow import Flow, FlowPair
from lockstep.trainer.spec import RunSpec

REFERENCE = "set kernels to reference"


def choose_kernels(spec: RunSpec, model: ModelSpec, flows: FlowPair) -> Kernels:
    """The kernels of a run. Raises ConfigError for a model, flow or option that they can't honour."""
    dense = unsupported(model, flows.trainer, flows.rollout) is None
    kernels = select(spec.kernels, dense=dense)
    refuse_unsupported(kernels, model, flows.trainer, flows.rollout)
    asked = {
        "checkpointing": spec.update.checkpointing,
        "save_fp8": spec.update.save_fp8,
        "deterministic": not spec.update.deterministic,
    }
    for name, there in asked.items():
        if there and not kernels.fused:
            raise ConfigError(
                f"has no effect on {kernels.name} kernels",
                where=f"update.{name}",
                why="they keep what autograd keeps",
                fix="leave it at its default, or set kernels to hopper",
            )
    return kernels


def refuse_unsupported(kernels: Kernels, model: ModelSpec, *flows: Flow) -> None:
    """Raises ConfigError where kernels of a GPU are to compute what they can't train."""
    reason = unsupported(model, *flows)
    if kernels.fused and reason is not None:
        where, what = reason
        raise ConfigError(f"{what} can't be trained on a GPU yet", where=where, fix=REFERENCE)


def unsupported(model: ModelSpec, *flows: Flow) -> tuple[str, str] | None:
    """(setting, what) the GPU's kernels have no way to train, or None."""
    if model.moe is not None:
        return "kernels", "a model with experts"
    if any(flow.attention_fp8 for flow in flows):
        return "flow.attention", "FP8 queries and probabilities"
    return None


def choice(spec: RunSpec, kernels: Kernels) -> str | None:
    """One line on what `kernels: auto` took; None where there was no choice: it was named, or there is no such GPU."""
    if spec.kernels != "auto" or hopper_missing():
        return None
    if kernels.fused:
        return f"kernels: auto takes hopper, on {torch.cuda.get_device_name()}"
    return "kernels: auto takes reference, on the CPU: the GPU can't train this model or flow yet"
