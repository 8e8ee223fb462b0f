"""A row becomes a prompt: its text or chat is checked, and shaped as the user asks (template, system message, chat).

What a chat template would refuse, or silently garble, is refused here with the row's place. Next: `example.py`.
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.data.spec import DataSpec
from lockstep.errors import DataError

Message = dict[str, Any]
Prompt = str | list[Message]

ROLES = ("system", "user", "assistant", "tool")


def shape_prompt(values: Mapping[str, Any], spec: DataSpec, where: str) -> Prompt:
    """The prompt of a row. DataError naming `where` for a missing column, an empty prompt or a malformed message."""
    template = _text_arg(spec, "template")
    if template:
        return shape(fill(template, values, where), "template", spec, where)
    return shape(column(values, spec.prompt_column, where), spec.prompt_column, spec, where)


def shape(prompt: object, name: str, spec: DataSpec, where: str) -> Prompt:
    """`prompt`, found under `name`, checked, and as a chat with a system message where `spec` asks for it."""
    system = _text_arg(spec, "system")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{name} is empty", where=where)
        if not (system or spec.args.get("chat", False)):
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    messages = check_messages(prompt, name, where)
    if messages[-1]["role"] not in ("user", "tool"):
        why = f"the last message of {name} is from role {messages[-1]['role']}"
        raise DataError(
            "there is nothing to answer", where=where, why=why, fix="end the prompt with a user message"
        )
    if system:
        if messages[0]["role"] == "system":
            raise DataError(f"{name} has a system message already", where=where, fix="drop data.args.system")
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def check_messages(value: object, name: str, where: str) -> list[Message]:
    """Chat messages, checked; keys without a value (which parquet adds) are dropped. Raises DataError."""
    if not isinstance(value, list):
        what = f"{name} is {type(value).__name__}, neither text nor a list of messages"
        raise DataError(what, where=where)
    if not value:
        raise DataError(f"{name} is an empty list", where=where)
    return [_check_message(message, f"{name}[{i}]", where) for i, message in enumerate(value)]


def _check_message(message: object, name: str, where: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(
            f"{name} is {message!r:.60}, not a message", where=where, fix="write {role: ..., content: ...}"
        )
    kept = {str(key): value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if role not in ROLES:
        fix = nearest(str(role), ROLES) or f"use {', '.join(ROLES)}"
        raise DataError(f"{name}.role is {role!r}", where=where, why="not a known role", fix=fix)
    if role == "assistant" and kept.get("tool_calls"):
        return {"content": "", **kept}
    content = kept.get("content")
    if not isinstance(content, str):
        raise DataError(
            f"{name}.content is {type(content).__name__}", where=where, why="only text is supported"
        )
    if role == "user" and not content.strip():
        raise DataError(f"{name}.content is empty", where=where)
    return kept


def column(values: Mapping[str, Any], name: str, where: str) -> Any:
    """The value of a column; DataError with the nearest name when it is missing or null."""
    if name not in values:
        why = f"columns are {', '.join(values) or 'none'}"
        raise DataError(f"there is no column {name!r}", where=where, why=why, fix=nearest(name, values))
    if values[name] is None:
        raise DataError(f"column {name!r} is null", where=where)
    return values[name]


def fill(template: str, values: Mapping[str, Any], where: str) -> str:
    """The template with the row's columns in it; `{{` and `}}` stand for braces. DataError for an unknown column."""
    for name in template_columns(template):
        column(values, name, where)
    try:
        return template.format(**values)
    except (ValueError, TypeError) as error:  # a format that doesn't suit the column's type
        raise DataError("template can't be filled", where=where, why=str(error)) from error


def template_columns(template: str) -> list[str]:
    """The columns that a template names. DataError when it isn't a format string."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise DataError(
            "template is not a format string", where="data.args.template", why=str(error)
        ) from error
    for name in names:
        if not name.isidentifier():
            why = f"{{{name}}} is not the name of a column"
            raise DataError(
                "template can't be filled", where="data.args.template", why=why, fix="write {{ for a brace"
            )
    return names


def nearest(name: str, names: Iterable[str]) -> str:
    """A suggestion, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else ""


def _text_arg(spec: DataSpec, name: str) -> str:
    value = spec.args.get(name) or ""
    if not isinstance(value, str):
        raise DataError(f"{name} is {value!r:.60}, not text", where=f"data.args.{name}")
    return value
