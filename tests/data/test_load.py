"""Rows of files become examples; every bad row is named by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.example import Example, batch_columns, fingerprint, load
from lockstep.data.spec import DataSpec
from lockstep.errors import DataError

USER = {"role": "user", "content": "2+2?"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8"
    )
    return path


def rows(tmp_path: Path, *lines: Any, **spec: Any) -> list[Example]:
    return load(DataSpec("jsonl", path=str(write(tmp_path / "d.jsonl", *lines)), **spec))


def test_text_and_chat_rows_with_free_columns(tmp_path: Path) -> None:
    examples = rows(
        tmp_path,
        {"prompt": "1+1?", "answer": "2", "level": 1},
        "",
        {"prompt": [{"role": "system", "content": "s"}, USER], "answer": 4, "level": None},
    )
    assert examples == [
        Example("1+1?", {"answer": "2", "level": 1}, 0),
        Example([{"role": "system", "content": "s"}, USER], {"answer": 4, "level": None}, 1),
    ]


def test_named_columns_limit_and_no_answer(tmp_path: Path) -> None:
    lines = [{"question": f"q{i}", "solution": i, "level": i, "noise": 0} for i in range(5)]
    spec = {"prompt_column": "question", "answer_column": "solution", "columns": ("level",), "limit": 2}
    assert rows(tmp_path, *lines, **spec) == [
        Example("q0", {"level": 0, "answer": 0}, 0),
        Example("q1", {"level": 1, "answer": 1}, 1),
    ]
    everything = rows(tmp_path, *lines, prompt_column="question", answer_column="solution")
    assert everything[3].columns == {"solution": 3, "level": 3, "noise": 0, "answer": 3}
    assert rows(tmp_path, {"prompt": "q"}, answer_column="") == [Example("q", {}, 0)]


def test_template_system_and_chat(tmp_path: Path) -> None:
    line = {"question": "2+2?", "hint": "{small}", "answer": "4"}
    args = {"template": "Q: {question} ({hint}) {{}}", "system": "Be brief."}
    (example,) = rows(tmp_path, line, args=args)
    assert example.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: 2+2? ({small}) {}"},
    ]
    assert example.columns == {"question": "2+2?", "hint": "{small}", "answer": "4"}
    with pytest.raises(DataError, match=r"d\.jsonl:1: there is no column 'qestion'.*did you mean question"):
        rows(tmp_path, line, args={"template": "{qestion}"})
    with pytest.raises(DataError, match=r"d\.jsonl:1: template can't be filled"):
        rows(tmp_path, line, args={"template": "{question:d}"})


GOOD = {"prompt": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ('{"prompt": "q"', "not JSON"),
        ("[1, 2]", "a list, not an object"),
        ({"answer": "a"}, "there is no column 'prompt'"),
        ({"Prompt": "q", "answer": "a"}, "did you mean Prompt"),
        ({"prompt": "q"}, "there is no column 'answer'.*set data.answer_column, to ''"),
        ({"prompt": "q", "anwser": "a"}, "did you mean anwser"),
        ({"prompt": "q", "answer": None}, "column 'answer' is null"),
        ({"prompt": None, "answer": "a"}, "column 'prompt' is null"),
        ({"prompt": "  \n", "answer": "a"}, "prompt is empty"),
        ({"prompt": [], "answer": "a"}, "prompt is an empty list"),
        ({"prompt": 5, "answer": "a"}, "prompt is int, neither text nor"),
        ({"prompt": ["q"], "answer": "a"}, r"prompt\[0\] is 'q', not a message"),
        ({"prompt": [{"role": "usr", "content": "q"}], "answer": "a"}, r"role is 'usr'.*did you mean user"),
        ({"prompt": [{"content": "q"}], "answer": "a"}, "role is None"),
        ({"prompt": [{"role": "user", "content": ""}], "answer": "a"}, r"prompt\[0\]\.content is empty"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "a"},
            "only text is supported",
        ),
        ({"prompt": [USER, {"role": "assistant", "content": "4"}], "answer": "a"}, "nothing to answer"),
        ({"prompt": "q", "answer": "a", "completions": 1}, "reserved name"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, bad: Any, says: str) -> None:
    with pytest.raises(DataError, match=rf"d\.jsonl:3: .*{says}"):
        rows(tmp_path, GOOD, "", bad, GOOD)


def test_tool_calls_need_no_text(tmp_path: Path) -> None:
    chat = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "4"},
    ]
    (example,) = rows(tmp_path, {"prompt": chat, "answer": "4"})
    assert [m["role"] for m in example.prompt] == ["user", "assistant", "tool"]  # type: ignore[index]
    assert example.prompt[1]["content"] == ""  # type: ignore[index]


def test_files_that_hold_nothing_or_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d\.jsonl: there are no rows"):
        rows(tmp_path, "")
    with pytest.raises(DataError, match=r"doesn't exist.*did you mean d\.jsonl"):
        load(DataSpec("jsonl", path=str(tmp_path / "d.json")))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "caf\u00e9"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl:1: not UTF-8"):
        load(DataSpec("jsonl", path=str(tmp_path / "latin.jsonl")))
    with pytest.raises(DataError, match="layout is 'verll'"):
        rows(tmp_path, GOOD, args={"layout": "verll"})


def test_two_answers_are_not_silently_one(tmp_path: Path) -> None:
    line = {"prompt": "q", "answer": "long text #### 4", "final": "4"}
    with pytest.raises(DataError, match="another column has that name"):
        rows(tmp_path, line, answer_column="final")
    assert rows(tmp_path, line, answer_column="final", columns=("final",))[0].columns == {
        "final": "4",
        "answer": "4",
    }


def test_a_second_system_message_is_refused(tmp_path: Path) -> None:
    line = {"prompt": [{"role": "system", "content": "s"}, USER], "answer": "4"}
    with pytest.raises(DataError, match="has a system message already"):
        rows(tmp_path, line, args={"system": "t"})


def test_parquet_and_verl_layout(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(
        [
            {
                "data_source": "gsm8k",
                "prompt": [{"role": "user", "content": f"q{i}", "name": None}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(i)},
                "extra_info": {"index": i},
            }
            for i in range(3)
        ]
    )
    path = tmp_path / "train.parquet"
    pq.write_table(table, path)
    examples = load(DataSpec("parquet", path=str(path), args={"layout": "verl"}))
    assert examples[2] == Example(
        [{"role": "user", "content": "q2"}],
        {"data_source": "gsm8k", "ability": "math", "extra_info": {"index": 2}, "answer": "2"},
        2,
    )
    with pytest.raises(DataError, match=r"train\.parquet, row 0: there is no column 'answer'"):
        load(DataSpec("parquet", path=str(path)))
    pq.write_table(pa.table({"prompt": ["a", None], "answer": ["1", "2"]}), path)
    with pytest.raises(DataError, match=r"train\.parquet, row 1: column 'prompt' is null"):
        load(DataSpec("parquet", path=str(path)))
    with pytest.raises(DataError, match=r"row 0: reward_model is NoneType"):
        load(DataSpec("parquet", path=str(path), args={"layout": "verl"}))
    path.write_text("not parquet")
    with pytest.raises(DataError, match="not a parquet file"):
        load(DataSpec("parquet", path=str(path)))


def test_a_saved_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(tmp_path / "two")
    assert [e.prompt for e in load(DataSpec("dataset", path=str(tmp_path / "one")))] == ["a", "b"]
    spec = DataSpec("dataset", path=str(tmp_path / "two"), args={"split": "test"})
    assert load(spec) == [Example("b", {"answer": "2"}, 0)]
    with pytest.raises(DataError, match=r"no split 'dev'.*one of train, test"):
        load(DataSpec("dataset", path=str(tmp_path / "two"), args={"split": "dev"}))
    with pytest.raises(DataError, match="can't be loaded"):
        load(DataSpec("dataset", path=str(tmp_path / "none")))


def test_batch_columns_of_uneven_rows() -> None:
    batch = [Example("a", {"answer": 1, "x": 2}, 0), Example("b", {"answer": 3}, 1)]
    assert batch_columns(batch) == {"answer": [1, 3], "x": [2, None]}
    assert batch_columns([]) == {}


def test_fingerprint_sees_prompts_and_columns() -> None:
    a, b = Example("a", {"answer": 1}, 0), Example("b", {"answer": 1}, 1)
    assert fingerprint([a, b]) == fingerprint([a, b])
    others = ([b, a], [a], [a, Example("b", {"answer": 2}, 1)], [a, Example("c", {"answer": 1}, 1)])
    assert len({fingerprint(examples) for examples in ([a, b], *others)}) == 5
