"""Carries out what the controller orders: the only place where a run changes its own flow, scales or correction.

`../correction/controller.py` decides from numbers; this file has the parts of the run in its hands. An action that needs a
publication (new KV scales, layers in another precision, the same weights again) publishes at once, under a new version, so
that the next rollout is already made under it. What was ordered and what became of it is a note in the log, a line of
`controller.jsonl` and the metric `controller/action`.

Layers are taken out of FP8 by new decoders: quantized layers are built from a flow, never swapped. They share the masters of
the old ones, so the optimizer goes on with the very same tensors, and the engine gets its decoder like any other.

Next: `loop.py`, which calls `observe` once a step.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from lockstep.correction.controller import Controller, Order, State
from lockstep.correction.mismatch import Mismatch
from lockstep.errors import ConfigError, ContractError
from lockstep.models.build import sharing_decoder
from lockstep.numerics.flow import Flow, FlowPair
from lockstep.trainer.sample import Sample
from lockstep.trainer.update import Scales, Updater

if TYPE_CHECKING:
    from lockstep.trainer.loop import Trainer

FLOOR_SAMPLES = 8
"""Samples whose log-probabilities are computed a second time, once a run, to measure the floor."""


class Control:
    """The controller of one run and its hands. Without a controller (a unified flow) it does nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.spec = trainer, trainer.spec.controller
        active = self.spec.active(unified=trainer.parts.flows.unified)
        self.controller = Controller(self.spec) if active else None
        self.failure: ContractError | None = None
        layers = trainer.parts.model_spec.num_layers
        if self.spec.keep_layers and self.spec.keep_layers[-1] >= layers:
            raise ConfigError(
                f"layer {self.spec.keep_layers[-1]} is to be kept in BF16, the model has layers 0 to {layers - 1}",
                where="controller.keep_layers",
            )

    def observe(self, metrics: dict[str, float], samples: list[Sample]) -> dict[str, float]:
        """Shows a finished step to the controller, carries out what it orders, and returns the metrics of both."""
        controller, trainer = self.controller, self.trainer
        if controller is None:
            return {}
        before = trainer.progress.version
        if not controller.measured and samples:
            controller.measure_floor(self_mismatch(trainer.updater, samples, trainer.history).metrics())
        order, carried = controller.observe(trainer.progress.step, metrics), None
        while order is not None:
            done = self.carry_out(order)
            carried = order if done is not None else carried
            self.tell(order, done)
            order = controller.report(order, done, metrics)
        trainer.progress.controller = controller.to_dict()
        found = controller.metrics(carried)
        if trainer.progress.version != before:
            found["sync/version"] = float(trainer.progress.version)
        return found

    def carry_out(self, order: Order) -> str | None:
        """Does it, and says what was done; None when this run has no use for it."""
        if order.action == "tighten":
            return self.trainer.updater.tighten_correction()
        if order.action == "recalibrate":
            return self.recalibrate()
        if order.action == "keep_layers":
            return self.keep_layers()
        if order.action == "republish":
            return self.publish()
        assert self.controller is not None
        self.failure = ContractError(
            f"the mismatch of rollout and trainer left its band and stayed out: {order.reason()}; {self.controller.told()}; "
            "controller.jsonl has the history. Widen controller.band, or let `lockstep attribute` find the source"
        )
        return "the run ends"

    def recalibrate(self) -> str | None:
        """New KV scales on both sides, with the weights that are current; None also when they would be the same."""
        if not self.trainer.parts.flows.rollout.kv_fp8:
            return None
        before = self.trainer.progress.scale_version
        self.trainer.force_recalibrate = True
        published, after = self.publish(), self.trainer.progress.scale_version
        return f"KV scales v{before} became v{after}, {published}" if after != before else None

    def keep_layers(self) -> str | None:
        """The linears of the named layers in BF16, on whichever side has them in FP8."""
        assert self.controller is not None
        parts, state = self.trainer.parts, self.controller.state
        layers = self.spec.keep_layers or (0, parts.model_spec.num_layers - 1)
        flows = FlowPair(_keeping(parts.flows.trainer, layers), _keeping(parts.flows.rollout, layers))
        if flows == parts.flows:
            return None
        use_flows(self.trainer, flows)
        state.kept_layers = sorted({*state.kept_layers, *layers})
        return f"layers {', '.join(map(str, sorted(set(layers))))} in BF16, {self.publish()}"

    def publish(self) -> str:
        """The current weights once more, under a new version."""
        self.trainer.publish(must_change=False)
        return f"weights published again as v{self.trainer.progress.version}"

    def tell(self, order: Order, done: str | None) -> None:
        """A line of controller.jsonl, and a note about what was carried out."""
        fate = {"carried_out": done is not None, "done": done or "of no use to this run"}
        self.trainer.logger.control(order.step, {**asdict(order), "reason": order.reason(), **fate})
        if done is not None:
            self.trainer.logger.note(
                f"controller, step {order.step}: {order.action}: {done}. {order.reason()}"
            )

    def restore(self) -> None:
        """Puts a resumed run where the controller had brought it, before its first publication."""
        saved = self.trainer.progress.controller
        if not saved:
            return
        state = State(**saved)
        if self.controller is not None:
            self.controller.state = state
        flows = self.trainer.parts.flows
        kept = FlowPair(
            _keeping(flows.trainer, state.kept_layers), _keeping(flows.rollout, state.kept_layers)
        )
        if kept != flows:
            use_flows(self.trainer, kept)
        for entry in state.history:
            if entry["action"] == "tighten":
                self.trainer.updater.tighten_correction()

    def stop_if_ordered(self) -> None:
        """Raises ContractError when the controller has ended the run; its last step is in the log by then."""
        if self.failure is not None:
            raise self.failure


def _keeping(flow: Flow, layers: tuple[int, ...] | list[int]) -> Flow:
    """The flow with these layers' linears in BF16; itself where no linear is in FP8."""
    return replace(flow, keep_bf16=flow.keep_bf16 | frozenset(layers)) if flow.is_fp8 else flow


def use_flows(trainer: Trainer, flows: FlowPair) -> None:
    """Builds the decoders of other flows over the same masters and puts them to use on both sides. They have no working
    copies until the next publication."""
    parts = trainer.parts
    decoder = (
        parts.decoder
        if flows.trainer == parts.flows.trainer
        else sharing_decoder(parts.decoder, flows.trainer)
    )
    rollout = decoder if flows.unified else sharing_decoder(decoder, flows.rollout)
    parts.flows, parts.decoder = flows, decoder
    parts.engine.use(rollout)
    trainer.publisher.trainer = decoder
    reference = trainer.updater.reference
    if reference is not None and reference.flow != decoder.flow:
        trainer.updater.reference = sharing_decoder(reference, decoder.flow)
        trainer.updater.reference.refresh(0)


def self_mismatch(updater: Updater, samples: list[Sample], scales: Scales) -> Mismatch:
    """The trainer against itself: some samples packed together, and each alone with its own prompt. By the row law nothing
    differs; a kernel that sums in another order for another batch shows here what it can't be held to."""
    chosen = [samples[i] for i in updater.packs.pack(samples, {})[0][:FLOOR_SAMPLES]]
    together = updater.old_log_probs(chosen, scales)
    mismatch = Mismatch()
    for sample in chosen:
        mismatch.see(together[id(sample)], updater.old_log_probs([sample], scales)[id(sample)])
    return mismatch
