"""The report: one file, whole for any input, and honest about zero, NaN and what is missing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import DataError
from lockstep.observe.plots import FLOOR, MOST_POINTS, Plot, Series, draw, short, thin
from lockstep.observe.report import build_report

VOID = {"meta", "br", "input", "link", "img", "hr"}


class Page(HTMLParser):
    """Checks nesting, and gathers attributes, text and the elements that occur."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def check(folder: Path) -> Page:
    """Build, parse, and assert what holds for every report."""
    path = build_report(folder)
    assert path == folder / "report.html"
    html = path.read_text(encoding="utf-8")
    page = Page(html)
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "image", "use"), tag
        assert not {"src", "srcset", "xlink:href", "data", "action", "background"} & set(attrs), (tag, attrs)
        assert (attrs.get("href") or "#").startswith("#"), attrs
        assert not any(name.startswith("on") for name in attrs), attrs
    style = re.search(r"<style>(.*?)</style>", html, re.S)
    assert style and "url(" not in style[1] and "@import" not in style[1]
    idents = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(idents) == len(set(idents))
    for attrs in page.all("svg"):
        if attrs.get("aria-hidden") != "true":
            assert attrs["role"] == "img" and set((attrs["aria-labelledby"] or "").split()) <= set(idents)
    for attrs in page.all("a"):
        assert (attrs["href"] or "")[1:] in idents
    assert "nan" not in " ".join(a.get("d") or "" for a in page.all("path")).lower()
    for block in re.findall(r'<script type="application/json">(.*?)</script>', html, re.S):
        json.loads(block)
    assert not (folder / "report.html.new").exists()
    return page


def test_full_run(make_run: Callable[..., Path]) -> None:
    folder = make_run("my-run")
    (folder / "summary.json").write_text('{"reward": 0.6, "model": "tiny-llama"}')
    page = check(folder)
    assert "Rollout and trainer agreed bit for bit in 6 of 6 steps." in page.text
    assert "my-run" in page.text and "tiny-llama" in page.text and "6 of 6" in page.text
    assert "0.100 → 0.600" in page.text and "exactly 0" in page.text
    for heading in ("Reward", "Evaluation", "Completion length", "Entropy", "Mismatch", "Time", "Memory"):
        assert heading in page.text
    for section in ("samples", "receipts", "config", "metrics", "summary"):
        assert f"#{section}" in {a["href"] for a in page.all("a")}
    assert len([a for a in page.all("tr") if "data-step" in a]) == 24
    assert len(page.all("figure")) == len(page.all("desc")) == len(page.all("svg")) - 1


def test_same_files_same_bytes(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    first = (folder / "report.html").read_bytes()
    assert build_report(folder).read_bytes() == first


def test_a_completion_is_never_markup(make_run: Callable[..., Path]) -> None:
    page = check(make_run())
    assert "<img src='http://example.org/a.png'>" in page.text
    assert all("example.org" not in str(attrs) for _, attrs in page.tags)


def test_one_step(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    page = check(synthetic.write_metrics(tmp_path, [{"step": 1, "time": 1.0, **synthetic.metrics_at(1)}]))
    assert "agreed bit for bit in 1 of 1 step." in page.text
    assert page.all("circle")


def test_only_evaluation_before_training(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    page = check(synthetic.write_metrics(tmp_path, [{"step": 0, "time": 1.0, "eval/greedy_pass@1": 0.25}]))
    assert "was not measured" in page.text and "Not recorded in this run: reward" in page.text


def test_mismatch_is_told(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    lines = [
        {"step": s, "time": 1.0, **synthetic.metrics_at(s, 0.02 if s == 3 else 0.0)} for s in range(1, 6)
    ]
    page = check(synthetic.write_metrics(tmp_path, lines))
    assert "agreed bit for bit in 4 of 5 steps." in page.text
    assert "0.02 nats at step 3" in page.text and "exactly 0" not in page.text


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (
            {"mismatch/mean_abs_dlogp": "NaN"},
            "in 0 of 1 step. Not a finite number in 1 step, first at step 1.",
        ),
        ({"mismatch/exact_tokens": 0.99}, "in 0 of 1 step."),
        ({"mismatch/exact_tokens": 1.0, "mismatch/tokens": 50}, "in 1 of 1 step."),
        ({"mismatch/tokens": 0}, "was not measured"),
    ],
)
def test_zero_counts_only_when_everything_agrees(
    extra: dict[str, Any], text: str, synthetic: SimpleNamespace, tmp_path: Path
) -> None:
    page = check(synthetic.write_metrics(tmp_path, [{"step": 1, "mismatch/max_abs_dlogp": 0.0, **extra}]))
    assert text in page.text


def test_dropped_samples_are_counted(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    lines = [{"step": s, "data/dropped_logprob_nonfinite": 2.0, "rewards/unscored": 1.0} for s in (1, 2)]
    assert "Dropped samples 6 never filled in" in check(synthetic.write_metrics(tmp_path, lines)).text


def test_nan_everywhere(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    lines = [
        {"step": s, "time": 1.0, **dict.fromkeys(synthetic.metrics_at(2), "NaN" if s % 2 else "-Infinity")}
        for s in range(1, 5)
    ]
    page = check(synthetic.write_metrics(tmp_path, lines))
    assert "agreed bit for bit in 0 of 4 steps." in page.text and "not finite" in page.text


def test_zero_is_apart_from_the_decades() -> None:
    zeros = draw(Plot("m", "", [Series("a", [(1, 0.0), (2, 0.0)])], scale="zero-log"), "p")
    assert "exactly 0" in zeros and zeros.count('class="tick y"') == 2
    assert re.search(rf'd="M[\d.]+ {FLOOR - 1}.0L[\d.]+ {FLOOR - 1}.0"', zeros)
    mixed = draw(Plot("m", "", [Series("a", [(1, 0.0), (2, 1e-30), (3, 1e-28)])], scale="zero-log"), "p")
    assert "exactly 0" not in mixed and "1e-30" in mixed and 'class="gap"' in mixed
    height = float(re.search(r'd="M[\d.]+ ([\d.]+)L', mixed)[1])  # type: ignore[index]
    assert height <= FLOOR - 25, "the smallest decade is well above zero"


ODD: list[list[dict[str, Any]]] = [
    [],
    [{"step": 1, "time": 2.0}],
    [{"step": 1}],
    [{"step": 1, "time": "Infinity", "reward": None, "note": "text", "list": [1]}],
    [
        {"step": 5, "time": 1, "reward": 1},
        {"step": 5, "time": 1, "reward": 2},
        {"step": 2, "time": 1, "reward": 0},
    ],
    [{"step": 1, "time": 1e300, "reward": 1e308}, {"step": 2, "time": -1, "reward": -1e308}],
    [{"step": s, "time": 1, "mismatch/max_abs_dlogp": 5e-324 * s, "optim/lr": 5e-324} for s in range(3)],
    [{"step": 1, "time": 1, "mismatch/kl_k3": -1e-9, "mismatch/max_abs_dlogp": 1e300}],
    [{"step": 1, "time": 1, "time/rollout_s": -3.0, "time/step_s": math.nan}],
    [
        {
            "step": 1,
            "time": 1,
            **{f"rewards/f{i}/mean": i for i in range(20)},
            **{f"time/p{i}_s": i for i in range(20)},
        }
    ],
    [{"step": 1, "time": 1, "rewards/<b>&\"'/mean": 1.0, "<script>": 2.0, "time/<i>_s": 1.0}],
    [
        {"step": s, "time": 1, "reward": math.sin(s), "time/rollout_s": 1.0, "time/step_s": 2.0}
        for s in range(2000)
    ],
]


@pytest.mark.parametrize("lines", ODD, ids=range(len(ODD)))
def test_odd_metrics(lines: list[dict[str, Any]], synthetic: SimpleNamespace, tmp_path: Path) -> None:
    check(synthetic.write_metrics(tmp_path, lines))
    assert (tmp_path / "report.html").stat().st_size < 400_000


def test_odd_neighbours(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (folder / "config.yaml").write_text("a: [unclosed\n</pre><script>")
    (folder / "summary.json").write_text('["no", "mapping"]')
    (folder / "receipts.jsonl").write_text('{"step": 1, "hash": null, "extra": {"a": [1, "NaN"]}}\n{}\n')
    odd = {
        "step": 1,
        "prompt": None,
        "completion": ["a", 1],
        "reward": "NaN",
        "parts": [1],
        "max_abs_dlogp": "x",
    }
    (folder / "samples.jsonl").write_text(json.dumps(odd) + "\n" + json.dumps({"step": "x"}) + "\n{}\n")
    page = check(folder)
    assert "no YAML" in page.text and "a: [unclosed </pre><script>" in page.text


def test_samples_are_bounded(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    synthetic.write_metrics(tmp_path, [{"step": 1, "time": 1.0, "reward": 1.0}])
    lines = [{"step": s, "prompt": "p", "completion": "x" * 9000, "reward": s} for s in range(1, 301)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = check(tmp_path)
    steps = [int(a["data-step"] or 0) for a in page.all("tr") if "data-step" in a]
    assert len(steps) == 40 and steps[0] == 1 and steps[-1] == 300
    assert "5000 more characters" in page.text and "Samples of 260 more steps" in page.text


def test_no_run_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="name a run folder"):
        build_report(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(DataError, match=r"summary\.json"):
        build_report(tmp_path)


def test_thinning_keeps_spikes_and_faults() -> None:
    points = [(float(step), 1.0) for step in range(20_000)]
    points[777], points[12_345], points[15_000] = (777.0, 50.0), (12_345.0, -50.0), (15_000.0, math.inf)
    kept = thin(points)
    assert len(kept) <= MOST_POINTS + 1 and kept == sorted(kept)
    assert {points[777], points[12_345], points[15_000]} <= set(kept)


values = st.one_of(st.floats(), st.sampled_from([0.0, -0.0, 1.0, 1e308, -1e308, 5e-324]))
series = st.lists(st.tuples(st.integers(0, 10**6), values), max_size=8, unique_by=lambda p: p[0]).map(sorted)


@given(
    st.lists(series, max_size=3),
    st.sampled_from(["linear", "log", "zero-log"]),
    st.sampled_from(["line", "stack"]),
)
@settings(max_examples=100, deadline=None)
def test_any_values_can_be_drawn(points: list[list[tuple[float, float]]], scale: Any, kind: Any) -> None:
    plot = Plot("t", "c", [Series(f"s{i}", p, i + 1) for i, p in enumerate(points)], kind, scale)
    html = draw(plot, "x")
    Page(html)
    for number in re.findall(r'(?:[xy][12]?|cx|cy|d)="([^"]*)"', html):
        assert "nan" not in number and "inf" not in number and "e" not in number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (-0.0, "0"), (math.nan, "NaN"), (-math.inf, "-inf"), (0.12345, "0.1235"), (9999.4, "9999"),
        (9999.6, "10k"), (999_960, "1M"), (135e6, "135M"), (1.5e9, "1.5G"), (2e12, "2T"), (1e15, "1e15"), (5e-6, "5e-6"),
        (-12345, "-12.35k"), (1e-3, "0.001"),
    ],
)  # fmt: skip
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text
