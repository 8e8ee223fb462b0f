"""What `lockstep doctor --template` says of templates that leave the past alone, and of those that don't (field failure 60)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.data.template import PROBES, check_template
from lockstep.errors import CheckpointError
from lockstep.models.tiny import char_tokenizer, make_tiny

APPEND = (
    "{{ bos_token }}{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRIPS = APPEND.replace(
    "m.content", "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)"
)
STRIPS_BEFORE_USERS = (
    "{% set last = namespace(i=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.i = loop.index0 %}{% endif %}"
    "{% endfor %}"
    + APPEND.replace("m.content", "(m.content.split('</think>')[-1] if loop.index0 < last.i else m.content)")
)
TRIMS = APPEND.replace("m.content", "(m.content | trim)")
NO_TOOLS = "{% for m in messages if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endfor %}" + APPEND


@pytest.mark.parametrize(
    ("template", "rewritten", "refused"),
    [
        (APPEND, set(), set()),
        (STRIPS, {"reasoning, then a user", "reasoning, then a tool"}, set()),
        (STRIPS_BEFORE_USERS, {"reasoning, then a user"}, set()),
        (TRIMS, {"blanks at both ends"}, set()),
        (NO_TOOLS, set(), {"reasoning, then a tool"}),
    ],
)
def test_each_kind_of_chat_gets_its_verdict_case_60(
    template: str, rewritten: set[str], refused: set[str]
) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    verdicts = check_template(tokenizer)
    assert [v.name for v in verdicts] == list(PROBES)
    assert {v.name for v in verdicts if v.appended is False} == rewritten
    assert {v.name for v in verdicts if v.appended is None} == refused
    for v in verdicts:
        assert ("stood it writes" in v.line()) == (v.name in rewritten)
        assert v.name not in refused or v.detail == "no tools"


def test_variables_decide_too_case_60() -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{% if keep %}" + APPEND + "{% else %}" + STRIPS + "{% endif %}"
    assert any(v.appended is False for v in check_template(tokenizer))
    assert all(v.appended for v in check_template(tokenizer, {"keep": True}))


def test_without_a_template_there_is_nothing_to_check() -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(CheckpointError, match="no chat template"):
        check_template(tokenizer)


def doctor(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--template", str(folder)])
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out + out.err


def test_the_doctor_says_so_case_60(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "m"
    make_tiny(folder, layers=1)
    code, text = doctor(folder, capsys)
    assert code == 0 and "verdict: append-only" in text and text.count("appended") == len(PROBES)
    (folder / "chat_template.jinja").write_text(STRIPS_BEFORE_USERS)
    code, text = doctor(folder, capsys)
    assert code == 0 and "verdict: rewrites earlier turns (reasoning, then a user)" in text
    assert "REWRITTEN: where '<think>" in text
    code, text = doctor(tmp_path / "none", capsys)
    assert code == 2 and "no tokenizer" in text
