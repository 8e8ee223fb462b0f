"""Makes docs/evidence.md and its plots from the results, and enters goal D9.

    python experiments/mismatch/report.py [--results DIR] [--goals]

Every number on the page comes from a file in `results/`; what isn't there is said to be missing. Goal D9 is entered only when all
arms have all seeds at their planned steps, on the GPU's kernels, and the resume check has run there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figure
from arms import ARMS, GROUPS, Arm
from page import HEAD, LIMITS, NOT_RUN, TERMS
from record import POSITIONS

from lockstep.bench.goals import GOALS, passed, write_goals
from lockstep.bench.machine import Stamp

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE, IMAGES = ROOT / "docs" / "evidence.md", "images"
SEEDS = (0, 1, 2)
COMMAND = "python experiments/mismatch/report.py --goals"
GOAL_STEPS = 50
"""A run of fewer planned steps is a trial."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column of the table: heading, where in a record its value is (`gain`: last less first of the curve), digits, and how zero
    is told."""

    title: str
    part: str
    name: str
    digits: int = 3
    zero: str = ""

    def of(self, record: Record) -> float | None:
        """Its value in this record."""
        if self.part != "gain":
            return record[self.part].get(self.name)  # type: ignore[no-any-return]
        _, values = record["curves"].get(self.name, ((), ()))
        return values[-1] - values[0] if values else None


COLUMNS = (
    Column("reward, whole run", "mean", "reward"),
    Column("reward, end", "end", "reward"),
    Column("held-out, greedy, all lines right", "last", "eval/greedy_pass@1"),
    Column("held-out, sampled reward", "last", "eval/mean@k"),
    Column("gained", "gain", "eval/mean@k"),
    Column("entropy, end", "end", "policy/entropy"),
    Column("gradient norm", "mean", "optim/grad_norm"),
    Column("largest", "most", "optim/grad_norm", 1),
)
END = Column("reward at the end", "end", "reward")
"""What arms are told apart by."""
MISMATCH = (
    Column("mean abs delta log p", "mean", "mismatch/mean_abs_dlogp", 5, "exactly 0"),
    Column("largest", "most", "mismatch/max_abs_dlogp", 3, "exactly 0"),
    Column("equal tokens", "mean", "mismatch/exact_tokens", 4),
    Column("effective sample size, token ratios", "mean", "mismatch/ess", 4),
    Column("of the weights", "mean", "rollout_corr/rollout_is_eff_sample_size", 4),
    Column("rejected", "mean", "rollout_corr/rejected_fraction"),
    Column("clipped high", "mean", "policy/clip_fraction_high", 5),
    Column("clipped low", "mean", "policy/clip_fraction_low", 5),
    Column("cosine", "mean", "probe/cosine", 4),
    Column("worst layer", "mean", "probe/cosine_worst_layer", 4),
    Column("cosine, weighted", "mean", "probe/cosine_weighted", 4),
)


def main(argv: Sequence[str] | None = None) -> int:
    """1 when a goal was to be entered and something is missing for it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="the page to write; plots go to images/ beside it"
    )
    parser.add_argument(
        "--goals", nargs="?", type=Path, const=GOALS, help="enter goal D9, here or in another file"
    )
    options = parser.parse_args(argv)
    records = load(options.results)
    resume = _json(options.results / "resume.json")
    write_page(options.page, records, resume, _json(options.results / "start.json"))
    print(f"{options.page}: {len(records)} runs")
    if options.goals is None:
        return 0
    missing = lacking(records, resume)
    if missing:
        print("goal D9 is not entered: " + "; ".join(missing), file=sys.stderr)
        return 1
    first = records[0]["stamp"]
    goal = passed("D9", holds(records, resume))
    write_goals(
        [goal],
        Stamp(first["card"], first["versions"], first["commit"], COMMAND, first["settings"]),
        options.goals,
    )
    print(goal.line())
    return 0


def load(folder: Path) -> list[Record]:
    """The runs, in the order of arms and seeds."""
    found = [json.loads(f.read_text()) for f in folder.glob("*-seed*.json")]
    order = list(ARMS)
    return sorted((r for r in found if r["arm"] in ARMS), key=lambda r: (order.index(r["arm"]), r["seed"]))


def lacking(records: Sequence[Record], resume: Record) -> list[str]:
    """What goal D9 still waits for."""
    there = {(r["arm"], r["seed"]): r for r in records}
    missing = []
    for arm in ARMS:
        found = [there.get((arm, seed)) for seed in SEEDS]
        if any(r is None or r["steps"] < max(r["planned"], GOAL_STEPS) for r in found):
            missing.append(f"{arm}: {[0 if r is None else r['steps'] for r in found]} steps")
        elif any(r["stamp"].get("kernels") != "hopper" for r in found if r is not None):
            missing.append(f"{arm} did not run on a GPU")
    if not resume or any(r.get("stamp", {}).get("kernels") != "hopper" for r in resume.values()):
        missing.append("no resume check on a GPU")
    return missing


def holds(records: Sequence[Record], resume: Record) -> bool:
    """Whether the evidence is what was promised: unified flows exact in every step, and a resumed run the same run."""
    unified = [r for r in records if r["arm"].removesuffix("-mini") in ("exact", "bf16")]
    exact = all(r["most"]["mismatch/max_abs_dlogp"] == 0 for r in unified)
    return exact and all(r["ran"] and not r["differ"] for r in resume.values())


def write_page(page: Path, records: Sequence[Record], resume: Record, start: Record) -> None:
    """The page, and its plots in `images/` beside it."""
    text = HEAD
    if not records:
        text += NOT_RUN
    else:
        text += "".join([ran_on(records, start), TERMS])
        for group, title in (
            ("main", "One optimizer step a rollout"),
            ("mini", "Several optimizer steps a rollout"),
        ):
            own = [r for r in records if r["arm"] in GROUPS[group]]
            if own:
                text += section(page, group, title, own)
        text += shown(records) + resumed(resume)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


def ran_on(records: Sequence[Record], start: Record) -> str:
    """Where, with what, and whether it is complete."""
    stamps = {(r["stamp"].get("card"), r["stamp"].get("commit"), r["stamp"].get("kernels")) for r in records}
    cards = "; ".join(
        f"{card}, kernels {kernels}, commit {commit}" for card, commit, kernels in sorted(stamps, key=str)
    )
    tokens = sum(r["last"].get("num_tokens") or 0 for r in records)
    lines = [f"\nRan on: {cards}. {len(records)} runs, {tokens / 1e6:.1f} million tokens."]
    open_runs = [
        f"{r['arm']} seed {r['seed']} ({r['steps']} of {r['planned']})"
        for r in records
        if r["steps"] < r["planned"]
    ]
    if open_runs:
        lines.append(f"**Not finished**: {', '.join(open_runs)}; curves and means below end there.")
    if start:
        last = start["curve"][-1]
        lines.append(
            f"Starting weights: {last['steps']:g} supervised steps of {start['warm']['batch']} problems in BF16; held-out reward "
            f"{last['eval/reward']:.3f} greedy, {last['eval/mean@k']:.3f} sampled."
        )
    return "\n".join(lines) + "\n"


def section(page: Path, group: str, title: str, records: Sequence[Record]) -> str:
    """Tables and plots of some arms."""
    arms = [a for a in ARMS.values() if any(r["arm"] == a.name for r in records)]
    parts = [f"\n## {title}\n"]
    parts += [f"- `{arm.name}`: {arm.what}" for arm in arms]
    parts += [
        "",
        *table(arms, records, COLUMNS, f"reward, end, less that of `{arms[0].name}`"),
        "",
        *table(arms, records, MISMATCH),
    ]
    folder = page.parent / IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    keys = {arm.name: arm.color for arm in arms}
    for name, panels in (("learning", learning(arms, records)), ("mismatch", mismatch(arms, records))):
        file = folder / f"evidence-{group}-{name}.svg"
        file.write_text(figure.svg(f"{title}: {name}", keys, panels), encoding="utf-8")
        parts += ["", f"![{title}: {name}, by arm]({IMAGES}/{file.name})"]
    return "\n".join(parts) + "\n"


def table(
    arms: Sequence[Arm], records: Sequence[Record], columns: Sequence[Column], paired: str = ""
) -> list[str]:
    """Rows of Markdown. paired: heading of a column with the reward's difference from the first arm's, seed by seed."""
    titles = ["arm", "seeds", *(c.title for c in columns), *([paired] if paired else [])]
    rows = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for arm in arms:
        own = [r for r in records if r["arm"] == arm.name]
        cells = [cell([c.of(r) for r in own], c.digits, c.zero) for c in columns]
        if paired:
            less = seed_by_seed(records, END, arm.name, arms[0].name)
            cells.append("" if arm is arms[0] else cell(less, 3, signed=True))
        rows.append(f"| `{arm.name}` | {len(own)} | {' | '.join(cells)} |")
    return rows


def seed_by_seed(records: Sequence[Record], column: Column, arm: str, base: str) -> list[float]:
    """What an arm has more than another, for every seed of it that both have a value of."""
    found = {r["seed"]: column.of(r) for r in records if r["arm"] == base}
    pairs = [(column.of(r), found.get(r["seed"])) for r in records if r["arm"] == arm]
    return [a - b for a, b in pairs if a is not None and b is not None]


def shown(records: Sequence[Record]) -> str:
    """Unified FP8 beside every other arm of its group, seed by seed, and what the runs don't show."""
    lines = ["\n## What the runs show\n"]
    columns = (END, Column("gained on held-out problems", "gain", "eval/mean@k"))
    for arm in ARMS.values():
        exact = "exact-mini" if arm.mini else "exact"
        if arm.name == exact:
            continue
        words = []
        for column in columns:
            less = seed_by_seed(records, column, exact, arm.name)
            if less:
                ahead = sum(x > 0 for x in less)
                words.append(
                    f"{column.title} {cell(less, 3, signed=True)}, ahead in {ahead} of {len(less)} seeds"
                )
        if words:
            lines.append(f"- `{exact}` less `{arm.name}`: {'; '.join(words)}.")
    return "\n".join(lines) + "\n" + LIMITS


def cell(values: Sequence[float | None], digits: int, zero: str = "", *, signed: bool = False) -> str:
    """Mean and standard deviation over seeds; `zero` where all are 0 and there is a word for it."""
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    if zero and not any(known):
        return zero
    sign = "+" if signed else ""
    text = f"{statistics.fmean(known):{sign}.{digits}f}"
    return text + (f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else "")


def curves(arms: Sequence[Arm], records: Sequence[Record], name: str) -> list[figure.Arm]:
    """The lines of one metric."""
    return [
        figure.Arm(
            arm.name,
            arm.color,
            [
                list(zip(*r["curves"][name], strict=True))
                for r in records
                if r["arm"] == arm.name and name in r["curves"]
            ],
        )
        for arm in arms
    ]


def learning(arms: Sequence[Arm], records: Sequence[Record]) -> list[figure.Panel]:
    """Reward, held-out results, entropy."""

    def draw(title: str, caption: str, name: str) -> figure.Panel:
        return figure.lines(title, caption, curves(arms, records, name), from_zero=True)

    return [
        draw("Reward", "Share of lines right, sampled, training problems", "reward"),
        draw("Held-out, sampled", "Share of lines right, temperature 1", "eval/mean@k"),
        draw("Held-out, greedy", "Share of problems with all lines right", "eval/greedy_pass@1"),
        draw("Entropy", "Nats a token", "policy/entropy"),
    ]


def mismatch(arms: Sequence[Arm], records: Sequence[Record]) -> list[figure.Panel]:
    """Differences of log-probabilities, what corrections cost, where gradients point."""
    found: Callable[[str], list[figure.Arm]] = lambda name: curves(arms, records, name)  # noqa: E731
    several = any(arm.mini for arm in arms)
    kept = ("Clipped tokens", "Share at the upper bound of the ratio", "policy/clip_fraction_high")
    if not several:
        kept = (
            "Rejected",
            "Share of samples; arms without rejection have no line",
            "rollout_corr/rejected_fraction",
        )
    return [
        figure.lines(
            "Mean |Δlogp|",
            "Trainer against rollout, nats; zero has its own line",
            found("mismatch/mean_abs_dlogp"),
            scale="zero-log",
        ),
        positions(arms, records),
        figure.lines(
            "Effective sample size",
            "Of the token ratios trainer over rollout, a share",
            found("mismatch/ess"),
        ),
        figure.lines(*kept[:2], found(kept[2]), from_zero=True),
        figure.lines("Gradient norm", "Before clipping", found("optim/grad_norm"), scale="zero-log"),
        figure.lines("Gradient cosine", "With BF16's from the same rollout", found("probe/cosine")),
        figure.lines(
            "Gradient cosine, weighted",
            "BF16's weighted by BF16 policy over rollout",
            found("probe/cosine_weighted"),
        ),
        figure.lines("Largest |Δlogp|", "Of a step, nats", found("mismatch/max_abs_dlogp"), scale="zero-log"),
    ]


def positions(arms: Sequence[Arm], records: Sequence[Record]) -> figure.Panel:
    """Mean |Δlogp| over the run, by position in the completion."""
    names = list(dict.fromkeys(n for r in records for n in r["mean"] if n.startswith(POSITIONS)))
    names.sort(key=lambda n: int(n[len(POSITIONS) :].split("-")[0]))
    lines = [
        figure.Arm(
            arm.name,
            arm.color,
            [
                [(i, r["mean"][n]) for i, n in enumerate(names) if r["mean"].get(n) is not None]
                for r in records
                if r["arm"] == arm.name
            ],
        )
        for arm in arms
    ]
    short = [n[len(POSITIONS) :] for n in names]
    return figure.buckets(
        "Mean |Δlogp| by position", "Of the token in its completion; mean over the run, nats", short, lines
    )


def resumed(resume: Record) -> str:
    """The resume check in words."""
    if not resume:
        return "\n## Stopped and continued\n\nThe resume check has not been run yet.\n"
    lines = ["\n## Stopped and continued\n"]
    for arm, result in resume.items():
        if not result["ran"]:
            lines.append(f"- `{arm}`: the check did not run to its end.")
            continue
        stamp = result.get("stamp", {})
        word = "equals" if not result["differ"] else f"**differs** ({', '.join(result['differ'])}) from"
        lines.append(
            f"- `{arm}`: a run stopped after half of its {result['steps']} steps and continued from the checkpoint {word} "
            "one that wasn't stopped: metrics, samples, receipts, masters, moments and KV scales, byte for byte "
            f"({stamp.get('card')}, kernels {stamp.get('kernels')})."
        )
    return "\n".join(lines) + "\n"


def _json(file: Path) -> Record:
    return dict(json.loads(file.read_text())) if file.is_file() else {}


if __name__ == "__main__":
    sys.exit(main())
