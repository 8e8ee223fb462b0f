"""From pydantic's findings to one line to act on: the key, the value, the reason, what would be right.

Next: `load.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lockstep.config.overrides import Key
from lockstep.config.schema import (
    Problem,
    default_of,
    describe,
    hint_at,
    hints,
    is_list,
    literals,
    section_of,
    show,
    walk,
)
from lockstep.errors import ConfigError


def dotted(path: Key) -> str:
    """`rewards.0.weight`."""
    return ".".join(map(str, path))


def to_error(problems: list[Problem], source: str, written: Collection[Key]) -> ConfigError:
    """The first problem as an error; the others are counted.

    `written` holds the paths that came from the command line: they are blamed instead of `source`.
    """
    first, rest = problems[0], len({p.path for p in problems}) - 1
    depth = len(first.path)
    if any(first.path[: len(w)] == w for w in written):
        where = "command line"
    else:
        where = f"{source} and command line" if any(w[:depth] == first.path for w in written) else source
    key = dotted(first.path)
    if key and not first.what.startswith(f"{key}."):
        where += f": {key}"
    more = f"{rest} more error{'s' if rest > 1 else ''} after this one" if rest else ""
    why = "; ".join(t for t in (first.why, more) if t)
    return ConfigError(first.what, where=where, why=why, fix=first.fix)


def problems_of(error: ValidationError, root: type, tree: Any) -> list[Problem]:
    """What pydantic found, in its order, one for each key."""
    found: dict[Key, Problem] = {}
    for detail in error.errors(include_url=False):
        path = _real_path(detail, tree)
        found.setdefault(path, _problem(detail, path, root, tree))
    return list(found.values())


def _real_path(detail: ErrorDetails, tree: Any) -> Key:
    """pydantic's location without the names of union members it mixes in."""
    path: list[str | int] = []
    node = tree
    for position, key in enumerate(detail["loc"]):
        if isinstance(node, dict) and str(key) in node:
            node = node[str(key)]
        elif isinstance(node, list) and isinstance(key, int) and key < len(node):
            node = node[key]
        elif detail["type"] != "missing" or position != len(detail["loc"]) - 1:
            continue
        path.append(key)
    return tuple(path)


def _problem(detail: ErrorDetails, path: Key, root: type, tree: Any) -> Problem:
    kind, value = detail["type"], detail["input"]
    if kind == "unexpected_keyword_argument":
        return Problem(path, f"unknown key, value {show(value)}", fix=_suggest_key(path, root))
    hint = hint_at(root, path)
    if kind == "missing":
        return Problem(path, "missing", why=f"expected {describe(hint)}")
    if kind == "value_error":
        reason = str(detail.get("ctx", {}).get("error", detail["msg"]))
        return Problem(path, reason, why=_values_named(reason, path, root, tree))
    allowed = [show(v) for v in literals(hint)]
    if allowed:
        near = get_close_matches(show(value), allowed, n=1)
        fix = f"did you mean {near[0]}?" if near else ""
        return Problem(path, f"{show(value)} is not allowed", why=f"allowed: {', '.join(allowed)}", fix=fix)
    if hint is None:
        return Problem(path, f"{show(value)}: {detail['msg']}")
    fix = "quote it" if hint is str and isinstance(value, (int, float)) else ""
    if is_list(hint) and not isinstance(value, (dict, list)) and value is not None:
        fix = f"write [{show(value)}]"
    return Problem(path, f"{show(value)} is not {describe(hint)}", fix=fix)


def _suggest_key(path: Key, root: type) -> str:
    """The nearest key of the same section, else the same key elsewhere, else the keys there are."""
    section = section_of(hint_at(root, path[:-1]))
    here = list(hints(section)) if section else []
    unknown = str(path[-1])
    near = get_close_matches(unknown, here, n=1)
    if near:
        return f"did you mean {dotted((*path[:-1], near[0]))}?"
    keys = [p for p, _, _ in walk(root)]
    elsewhere = [p for p in keys if p[-1] == unknown]
    if not elsewhere:
        names = {str(p[-1]) for p in keys}
        close = get_close_matches(unknown, names, n=1, cutoff=0.75)
        elsewhere = [p for p in keys if close and p[-1] == close[0]]
    if elsewhere:
        return f"did you mean {dotted(elsewhere[0])}?"
    return f"keys here: {', '.join(here)}"


def _values_named(reason: str, path: Key, root: type, tree: Any) -> str:
    """The values of the keys that a spec's own message names; defaults too when they are few."""
    section = section_of(hint_at(root, path))
    if section is None:
        return ""
    node = tree
    for key in path:
        node = node[key]
    given, default = [], []
    for name in dict.fromkeys(re.findall(r"[a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*", reason)):
        parts = tuple(name.split("."))
        if path and parts[: len(path)] == path:
            parts = parts[len(path) :]
        value, is_default = _lookup(node, section, parts)
        if value is MISSING or isinstance(value, dict):
            continue
        if is_default:
            default.append(f"{dotted(parts)}={show(value)} by default")
        else:
            given.append(f"{dotted(parts)}={show(value)}")
    return ", ".join(given + default if len(given + default) <= 3 else given)


def _lookup(node: Any, section: type, parts: Key) -> tuple[Any, bool]:
    """The value of a key below a section and whether it is the default; MISSING when there's no such key."""
    if not parts:
        return MISSING, False
    field = {f.name: f for f in fields(section)}.get(str(parts[0]))
    if field is None:
        return MISSING, False
    given = node.get(parts[0], MISSING) if isinstance(node, dict) else MISSING
    below = section_of(hints(section)[field.name])
    if below is not None:
        return _lookup(given, below, parts[1:])
    if len(parts) > 1:
        return MISSING, False
    return (default_of(field), True) if given is MISSING else (given, False)
