"""YAML and overrides in, RunSpec out, and back; every mistake one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from lockstep.config.load import dump, load_run
from lockstep.errors import ConfigError
from lockstep.trainer.spec import RunSpec

FILES = Path(__file__).parent / "files"
SMALL, FULL = FILES / "small.yaml", FILES / "full.yaml"


def test_the_traps_of_yaml() -> None:
    run = load_run(FULL)
    assert run.optim.lr == 1e-6 and isinstance(run.optim.lr, float)
    assert run.rewards[1].weight == -1e-3
    assert run.update.steps == 1000 and run.data.seed == 31
    assert run.optim.warmup_steps == 10 and isinstance(run.optim.warmup_steps, int)
    assert math.isinf(run.correction.rollout_is_threshold)
    assert run.run_dir == "2024-01-01"


def test_switch_words_follow_the_type_of_their_key() -> None:
    run = load_run(FULL)
    assert run.observe.live == "off" and type(run.observe.live) is str
    assert (run.observe.tensorboard, run.observe.wandb, run.observe.project) == (False, True, "off")
    assert run.data.shuffle is False and run.rewards[1].isolate is True and run.checkpoint.export_hf is False
    assert run.data.columns == ("level", "on")


def test_switch_words_in_free_options_are_truth_values_unless_quoted() -> None:
    run = load_run(FULL)
    assert run.data.chat_template_args == {"enable_thinking": False}
    assert run.data.args == {"chat": True, "system": "no"}
    assert run.rewards[1].args == {"target": 12, "label": "1e-3", "strict": True, "steps": [1, 2.5, None]}


@pytest.mark.parametrize("word", ["false", "off", "'off'"])
def test_false_is_off_where_off_is_a_choice(word: str) -> None:
    assert load_run(SMALL, [f"observe.live={word}"]).observe.live == "off"


@pytest.mark.parametrize("file", [SMALL, FULL])
def test_a_dump_is_read_back_equal(file: Path, tmp_path: Path) -> None:
    run = load_run(file)
    again = tmp_path / "again.yaml"
    again.write_text(dump(run), encoding="utf-8")
    assert load_run(again) == run


def test_a_dump_is_complete_and_plain_yaml() -> None:
    tree = yaml.safe_load(dump(load_run(SMALL)))
    assert list(tree) == list(RunSpec.__dataclass_fields__)
    assert tree["optim"]["betas"] == [0.9, 0.999] and tree["observe"]["live"] == "off"


def test_overrides_win_over_the_file() -> None:
    run = load_run(
        SMALL,
        ["optim.lr=1e-5", "rewards.0.weight=2", "rewards.1.use=length", "eval.samples=0", "seed=1", "seed=2"],
    )
    assert (run.optim.lr, run.rewards[0].weight, run.rewards[1].use) == (1e-5, 2.0, "length")
    assert (run.eval.samples, run.seed) == (0, 2)
    assert run.optim.betas == (0.9, 0.999)


WRONG = [
    ("optim.lrr=1e-5", "command line: optim.lrr: unknown key, value 1e-05 -> did you mean optim.lr?"),
    ("rewards.0.wait=2", "command line: rewards.0.wait: unknown key, value 2"),
    ("rollout.kv=fp8", "command line: rollout.kv: unknown key, value fp8 -> did you mean flow.kv?"),
    ("zzz=1", "command line: zzz: unknown key, value 1 -> keys here: model, data, rewards, "),
    (
        "flow.name=fp9",
        "command line: flow.name: fp9 is not allowed (allowed: bf16, fp8, fp8-rollout) -> did you mean fp8?",
    ),
    ("observe.live=no", "command line: observe.live: no is not allowed (allowed: auto, table, plain, off)"),
    ("optim.lr=fast", "command line: optim.lr: fast is not a number"),
    ("optim.lr=.nan", "command line: optim.lr: not-a-number is not a setting"),
    ("update.steps=1.5", "command line: update.steps: 1.5 is not a whole number"),
    ("update.steps=true", "command line: update.steps: true is not a whole number"),
    ("run_dir=5", "command line: run_dir: 5 is not text -> quote it"),
    ("rollout.stop=x", "command line: rollout.stop: x is not a list -> write [x]"),
    ("optim.betas=[1, 2, 3]", "command line: optim.betas: [1, 2, 3] is not a list of 2 items"),
    ("data=null", "command line: data: null is not a section of keys and values"),
    (
        "data.args.digit=2",
        "and command line: data: args.digit: source arithmetic has no such option; did you mean digits?",
    ),
    ("rewards.1.weight=1", "rewards.1.use: missing (expected text)"),
]


@pytest.mark.parametrize(("override", "line"), WRONG, ids=[o for o, _ in WRONG])
def test_one_line_says_where_what_why_and_what_instead(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as e:
        load_run(SMALL, [override])
    assert line in str(e.value) and "\n" not in str(e.value)


def test_a_rule_between_keys_shows_their_values() -> None:
    with pytest.raises(ConfigError) as e:
        load_run(SMALL, ["rollout.max_batched_tokens=8"])
    assert str(e.value).startswith(
        f"{SMALL} and command line: rollout: max_batched_tokens must be at least max_running"
    )
    assert "(max_batched_tokens=8, max_running=64 by default)" in str(e.value)


def test_case_37_truncated_sampling_is_refused_in_training() -> None:
    with pytest.raises(ConfigError) as e:
        load_run(SMALL, ["rollout.top_p=0.9"])
    assert "off by the kept mass" in str(e.value) and "rollout.top_p=0.9" in str(e.value)
    replay = ["rollout.top_p=0.9", "rollout.truncation=replay", "rollout.max_kept=200"]
    replayed = load_run(SMALL, replay).rollout
    assert (replayed.top_p, replayed.truncation, replayed.max_kept) == (0.9, "replay", 200)


def test_case_44_what_becomes_of_bad_samples_is_a_choice() -> None:
    assert load_run(SMALL).data.on_bad_sample == "drop"
    assert load_run(SMALL, ["data.on_bad_sample=stop"]).data.on_bad_sample == "stop"
    with pytest.raises(ConfigError, match="data.on_bad_sample: fill is not allowed"):
        load_run(SMALL, ["data.on_bad_sample=fill"])


def test_several_mistakes_show_the_first_and_count_the_others() -> None:
    with pytest.raises(ConfigError) as e:
        load_run(SMALL, ["optim.lrr=1", "optim.eps=x", "update.stepz=3"])
    assert "2 more errors after this one" in str(e.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "the file is empty"),
        (b"- a\n- b\n", "the file is not a mapping"),
        (b"\xff\xfe\x00", "not a text file in UTF-8"),
        (b"seed: 1\nseed: 2\n", "line 2: key 'seed' is given twice"),
    ],
)
def test_files_that_are_no_configuration(content: bytes, line: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as e:
        load_run(file)
    assert str(e.value).startswith(str(file)) and line in str(e.value)


def test_a_folder_or_a_missing_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(ConfigError) as e:
            load_run(path)
        assert str(e.value).startswith(f"{path}: ")
