"""What the project promises to show on one Hopper GPU: id, what it is, and the command that measures it and writes it down.

`lockstep bench goals` prints them beside what `goals.json` holds; docs/goals.md is that table.

Next: `goals.py`, the file itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Promise:
    """`ids` of the entries that belong to it, what is promised, and the command without the leading `lockstep`; one that begins
    with `python` is a script of the repository."""

    ids: tuple[str, ...]
    what: str
    command: str

    @property
    def line(self) -> str:
        """As one would type it."""
        return self.command if self.command.startswith("python ") else f"lockstep {self.command}"


SHAPES = "--shape qwen3-0.6b --shape qwen3-1.7b --shape qwen2.5-7b --shape llama-3.1-8b --shape qwen3-8b"
PROMISES = (
    Promise(
        ("C1",),
        "rollout and training forward have equal bits, six models, BF16 and FP8 KV, 10,000 decode rows",
        f"audit configs/smollm2-addition.yaml kernels=hopper {SHAPES} --goals",
    ),
    Promise(("C2a",), "every kernel within its bound of the reference", "bench check --goals"),
    Promise(
        ("C2b",),
        "no fault under compute-sanitizer",
        "bench check --small --sanitize memcheck,racecheck --goals",
    ),
    Promise(
        ("C3a", "C3b", "C5a"),
        "rollout of Qwen3-8B, 64 x (512 + 1024): fp8+kv8 over vLLM in FP8 and BF16, and over our bf16",
        "bench rollout --work 64x512+1024 --vllm --goals",
    ),
    Promise(
        ("C4a", "C4b", "C5b"),
        "the same, 256 x (512 + 2048)",
        "bench rollout --work 256x512+2048 --vllm --goals",
    ),
    Promise(("C6",), "what exactness costs in a rollout", "bench price --goals"),
    Promise(("C7a", "C7b"), "decode attention over FP8 keys, 64 x 8k and 8 x 16k", "bench attention --goals"),
    Promise(
        ("C8",),
        "long tail, 8 x (512 + 16384), over vLLM in FP8",
        "bench rollout --work 8x512+16384 --flows fp8+kv8 --vllm --goals",
    ),
    Promise(("C9a", "C9b"), "publication of 8B weights after an optimizer step", "bench publish --goals"),
    Promise(
        ("C10a",),
        "Qwen3-0.6B, 256 x (256 + 512), beside vLLM (reported; no promise)",
        "bench rollout --model qwen3-0.6b --work 256x256+512 --flows fp8+kv8 --vllm --goals",
    ),
    Promise(
        ("C10b",),
        "the same for Qwen3-1.7B",
        "bench rollout --model qwen3-1.7b --work 256x256+512 --flows fp8+kv8 --vllm --goals",
    ),
    Promise(
        ("D1",),
        "mismatch exactly 0 over 50 training steps, SmolLM2 and the shape of Qwen3-1.7B",
        "bench train-exact configs/smollm2-addition-h100.yaml configs/random-1.7b-h100.yaml --goals",
    ),
    Promise(
        ("D2a", "D2b"),
        "a Qwen3-8B layer, 16k tokens, forward and backward, over BF16; its linear layers alone",
        "bench layer --goals",
    ),
    Promise(
        ("D3a", "D3b", "D4", "D7"),
        "a training step of Qwen3-1.7B or larger over BF16; saved activations; with old log-probabilities; at 512 tokens",
        "bench train --goals",
    ),
    Promise(("D5",), "a whole GRPO step over BF16", "bench step --goals"),
    Promise(
        ("D6a", "D6c"),
        "cosine of every layer's gradient against BF16, on real weights: from loss to input, and each layer by itself",
        "bench gradients --model-path DIR --goals",
    ),
    Promise(
        ("D6b",), "loss curves of fine-tuning within noise of BF16", "bench sft --model-path DIR --goals"
    ),
    Promise(
        ("D8a", "D8b"),
        "packed attention, 2 x 8192: forward over cuDNN's, backward over the fastest library's",
        "bench attention --goals",
    ),
    Promise(
        ("D9",),
        "corrections and exact FP8 side by side, three seeds each (docs/evidence.md); a resumed run is the same run",
        "python experiments/mismatch/report.py --goals",
    ),
)


def table(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Markdown: one row for each entry or, where nothing was measured, each promise."""
    lines = ["| id | what | goal | measured | | on | command |", "|---|---|---|---|---|---|---|"]
    for promise in PROMISES:
        for id in promise.ids:
            lines.append(_row(id, promise, entries.get(id)))
    return lines


def _row(id: str, promise: Promise, entry: Mapping[str, Any] | None) -> str:
    command = f"`{promise.line}`"
    if entry is None:
        return f"| {id} | {promise.what} | | not measured | | | {command} |"
    value, goal = float(entry["value"]), float(entry["goal"])
    higher = bool(entry["higher_is_better"])
    reached = value >= goal if higher else value <= goal
    sign = "at least" if higher else "at most"
    word = "reached" if reached else "missed"
    measured = f"{sign} {goal:g} {entry['unit']} | {value:.4g} | {word} | {_chip(str(entry.get('card', '')))}"
    return f"| {id} | {promise.what} | {measured} | {command} |"


def _chip(card: str) -> str:
    """H100 of NVIDIA H100 80GB HBM3."""
    return next((word for word in card.split() if word[1:].isdecimal()), card)
