"""Line files: what is on disk, what survives a kill, what truncation keeps."""

from __future__ import annotations

import json
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import DataError, UserError
from lockstep.observe.jsonl import LineFile, encode, read_lines
from lockstep.observe.sinks import JsonlSink, SampleRecord, SamplesSink, metrics_of, select


def test_a_line_is_on_disk_when_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), real(handle))[1])
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"reward": 0.5}, 1000.0)
    before = len(synced)
    sink.write(2, {"reward": 0.75}, 1001.0)
    assert len(synced) == before + 1
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "time": 1000.0, "reward": 0.5}, {"step": 2, "time": 1001.0, "reward": 0.75}]


def test_case_44_non_finite_metrics_are_kept_and_readable(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, 0.0)
    text = (tmp_path / "m.jsonl").read_text()

    def refuse(token: str) -> Any:
        raise AssertionError(f"{token} is no JSON")

    record = json.loads(text, parse_constant=refuse)
    assert (record["a"], record["b"], record["c"]) == ("NaN", "Infinity", "-Infinity")
    back = metrics_of(record)
    assert math.isnan(back["a"]) and back["b"] == math.inf and back["c"] == -math.inf and back["d"] == 1.0


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'time'"):
        JsonlSink(tmp_path / "m.jsonl").write(1, {"time": 1.0}, 0.0)


def test_a_torn_last_line_is_no_data(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "x": 1.0}\n{"step": 2, "x": ')
    assert [r["step"] for r in read_lines(path)] == [1]
    sink = JsonlSink(path)
    assert sink.last_step == 1
    sink.write(2, {"x": 2.0}, 0.0)
    assert [r["step"] for r in read_lines(path)] == [1, 2]


def test_a_broken_line_inside_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataError, match=r"m\.jsonl:2"):
        list(read_lines(path))
    path.write_text('{"step": 1}\n[2]\n')
    with pytest.raises(DataError, match="no JSON object"):
        list(read_lines(path))


def test_an_old_run_is_not_written_over(tmp_path: Path) -> None:
    first = JsonlSink(tmp_path / "m.jsonl")
    first.write(3, {"x": 1.0}, 0.0)
    first.close()
    second = JsonlSink(tmp_path / "m.jsonl")
    with pytest.raises(UserError, match="earlier run"):
        second.write(1, {"x": 1.0}, 0.0)
    with pytest.raises(UserError, match="earlier run"):
        second.write(3, {"x": 1.0}, 0.0)
    second.truncate(0)
    second.write(1, {"x": 2.0}, 0.0)
    assert [r["x"] for r in read_lines(tmp_path / "m.jsonl")] == [2.0]


def test_truncate_keeps_lines_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    kept = b'{"step":1,   "odd": "spacing"}\n{"x": 1e-7, "step": 2}\n'
    path.write_bytes(kept + b'{"step": 3}\n{"step": 4}\n{"step": 5, "torn')
    file = LineFile(path)
    assert file.truncate(2) == 2
    assert path.read_bytes() == kept
    assert file.last_step == 2
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_truncate_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    text = "".join(encode({"step": s}) + "\n" for s in range(5))
    path.write_text(text)
    file = LineFile(path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        file.truncate(2)
    assert path.read_text() == text


def test_truncate_before_anything_was_written(tmp_path: Path) -> None:
    assert LineFile(tmp_path / "none.jsonl").truncate(7) == 0
    assert not (tmp_path / "none.jsonl").exists()


def test_a_line_without_step_can_not_be_cut(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"x": 1}\n{"step": 1}\n')
    with pytest.raises(DataError, match="without an integer"):
        LineFile(tmp_path / "m.jsonl").truncate(1)


text = st.text(st.characters(exclude_categories=[]), max_size=30)


@given(
    st.dictionaries(
        text, st.one_of(text, st.floats(), st.none(), st.lists(st.floats(), max_size=3)), max_size=5
    )
)
def test_any_record_is_one_readable_line(record: dict[str, Any]) -> None:
    line = encode(record)
    assert "\n" not in line
    line.encode("utf-8")
    assert json.loads(line).keys() == record.keys()


def sample(reward: float | None, text: str = "") -> SampleRecord:
    return SampleRecord(prompt="p", completion=text, reward=reward)


def test_selection_has_best_and_worst_and_is_not_random() -> None:
    samples = [sample(0.5, str(i)) for i in range(20)]
    samples[7], samples[13], samples[2] = sample(2.0, "best"), sample(-1.0, "worst"), sample(math.nan, "nan")
    chosen = select(samples, 5)
    assert [s.completion for s in chosen] == [s.completion for s in select(samples, 5)]
    assert {"best", "worst"} <= {s.completion for s in chosen} and len(chosen) == 5
    assert chosen == sorted(chosen, key=samples.index)
    assert select(samples, 0) == [] and select(samples, 50) == samples
    assert len(select([sample(None)] * 4, 2)) == 2


def test_samples_file(tmp_path: Path) -> None:
    sink = SamplesSink(tmp_path / "samples.jsonl", per_step=2)
    sink.write(1, [sample(0.0, "a\u2028\ud800"), sample(math.nan, "b"), sample(1.0, "c")])
    sink.write(2, [])
    records = list(read_lines(tmp_path / "samples.jsonl"))
    assert [r["completion"] for r in records] == ["a\u2028\ud800", "c"]
    assert set(records[0]) == {
        "step", "prompt", "completion", "answer", "reward", "parts", "finish_reason", "tokens", "mean_logp",
        "max_abs_dlogp", "weight_version",
    }  # fmt: skip


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_is_rebuilt_on_truncate(tmp_path: Path) -> None:
    from lockstep.observe.tensorboard import TensorBoardSink

    sink = TensorBoardSink(tmp_path / "tensorboard")
    lines = []
    for step in range(1, 6):
        sink.write(step, {"reward": float(step), "eval/greedy_pass@1": 0.5}, 1000.0 + step)
        lines.append({"step": step, "time": 1000.0 + step, "reward": float(step), "eval/greedy_pass@1": 0.5})
    sink.truncate(3, lines[:3])
    sink.write(4, {"reward": 40.0}, 2000.0)
    sink.close()
    found = scalars(tmp_path / "tensorboard")
    assert found["reward"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert found["eval/greedy_pass@1"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert os.listdir(tmp_path) == ["tensorboard"]


class FakeService(types.ModuleType):
    """Stands in for wandb and trackio: remembers what was opened and logged."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.opened: list[dict[str, Any]] = []
        self.logged: list[tuple[str, int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **options: Any) -> Any:
        self.opened.append(options)
        service = self

        class Run:
            def log(self, metrics: dict[str, float], step: int) -> None:
                service.logged.append((options["name"], step, metrics))

            def finish(self) -> None:
                service.finished += 1

        return Run()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_replay_into_a_new_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeService(name)
    monkeypatch.setitem(sys.modules, name, fake)
    import importlib

    module = importlib.import_module(f"lockstep.observe.{name}")
    sink = getattr(module, f"{name.capitalize()}Sink")(tmp_path / "demo", "lab", {"seed": 1})
    for step in (1, 2, 3):
        sink.write(step, {"reward": step / 4}, 0.0)
    sink.truncate(2, [{"step": s, "time": 0.0, "reward": s / 4} for s in (1, 2)])
    sink.write(3, {"reward": 9.0}, 0.0)
    sink.close()
    assert [o["name"] for o in fake.opened] == ["demo", "demo-from-2"]
    assert {o["group"] for o in fake.opened} == {"demo"} and fake.opened[0]["project"] == "lab"
    assert [(step, m["reward"]) for run, step, m in fake.logged if run == "demo-from-2"] == [
        (1, 0.25),
        (2, 0.5),
        (3, 9.0),
    ]
    assert fake.finished == 2


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_package_names_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    import importlib

    module = importlib.import_module(f"lockstep.observe.{name}")
    with pytest.raises(UserError, match=rf"lockstep-rl\[{name}\]"):
        getattr(module, f"{name.capitalize()}Sink")(tmp_path, "lab", {})
