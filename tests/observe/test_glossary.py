"""Every metric that is plotted or shown has a meaning, and the page is up to date."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from lockstep.observe.charts import CHARTS, CORE
from lockstep.observe.glossary import GLOSSARY, SECTIONS, describe, markdown
from lockstep.observe.live import COLUMNS

ROOT = Path(__file__).parents[2]


def test_every_plotted_metric_is_in_the_glossary() -> None:
    plotted = {name for chart in CHARTS for line in chart.lines for name in line.names}
    shown = {name for column in COLUMNS for name in column.metrics}
    assert len(plotted) > 20
    assert not [name for name in sorted(plotted | shown) if describe(name) is None]
    assert set(CORE) <= {chart.title for chart in CHARTS}


def test_the_names_of_the_field_are_there(synthetic: SimpleNamespace) -> None:
    names = [
        "reward", "reward_std", "completions/mean_length", "completions/clipped_ratio", "token_mult_prob_error",
        "mismatch/max_abs_dlogp", "mismatch/mean_abs_dlogp", "mismatch/kl_k1", "mismatch/kl_k3",
        "rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/chi2_token",
        "eval/greedy_pass@1", "eval/sampled_pass@1", "eval/mean@k", "eval/mean@16", "sync/changed_codes_pct",
        "sync/max_rel_err", "sync/version", "sync/bytes", "optim/lr", "optim/grad_norm", "optim/skipped_steps",
        "time/rollout_s", "time/step_s", "memory/rss_gb", "memory/cuda_gb", "rewards/exact_match/mean", "data/dropped_no_tokens",
        *synthetic.metrics_at(2),
    ]  # fmt: skip
    assert not [name for name in names if describe(name) is None]


def test_patterns_stand_for_one_part_only() -> None:
    assert describe("rewards/a/b/mean") is None
    assert describe("rewards//mean") is None
    assert describe("no/such/metric") is None
    assert describe("time/step_s") is GLOSSARY["time/step_s"]
    assert describe("time/rollout_s") is GLOSSARY["time/<phase>_s"]


def test_meanings_are_one_line_each() -> None:
    for name, meaning in GLOSSARY.items():
        assert meaning.text.endswith(".") and "\n" not in meaning.text and len(meaning.text) < 130, name
    assert sum(len(part) for part in SECTIONS.values()) == len(GLOSSARY), "a metric stands in two sections"


def test_docs_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "metrics.md"
    assert page.exists(), "write it: python -m lockstep.observe.glossary > docs/metrics.md"
    assert page.read_text(encoding="utf-8") == markdown()


def test_docs_tables_have_three_columns() -> None:
    rows = [row for row in markdown().splitlines() if row.startswith("|")]
    assert len(rows) == len(GLOSSARY) + 2 * len(SECTIONS)
    assert not [row for row in rows if row.replace("\\|", "").count("|") != 4]
