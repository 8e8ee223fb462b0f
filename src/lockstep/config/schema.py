"""The specs seen as a tree of keys and types: which keys a section has, what a value may be, how to say it.

The dataclasses of the lower packages are the only schema. This file reads their annotations, for `load.py` (to settle
YAML's ambiguous values before pydantic validates), `explain.py` (to name what would have been right) and `reference.py`.

Next: `explain.py`.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lockstep.config.dialect import Word
from lockstep.config.overrides import Key


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration."""

    path: Key
    what: str
    why: str = ""
    fix: str = ""


@cache
def hints(section: type) -> dict[str, Any]:
    """Key to annotation of a spec."""
    found = get_type_hints(section)
    return {f.name: found[f.name] for f in fields(section)}


def options(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of anything else itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def section_of(hint: Any) -> type | None:
    """The spec among the options of `hint`, if any."""
    return next((o for o in options(hint) if isinstance(o, type) and is_dataclass(o)), None)


def is_list(hint: Any) -> bool:
    """Whether a list is among the options of `hint`."""
    return any(get_origin(o) in (tuple, list) for o in options(hint))


def literals(hint: Any) -> tuple[Any, ...]:
    """The allowed values, where `hint` is an enumeration."""
    return tuple(v for o in options(hint) if get_origin(o) is Literal for v in get_args(o))


def item_hint(hint: Any, key: str | int) -> Any:
    """Annotation of what lies under `key` in a value of type `hint`; None when there is nothing."""
    for option in options(hint):
        args = get_args(option)
        if isinstance(option, type) and is_dataclass(option):
            return hints(option).get(str(key))
        if get_origin(option) is dict:
            return args[1]
        if get_origin(option) in (tuple, list) and isinstance(key, int):
            if len(args) == 1 or args[1:] == (...,):
                return args[0]
            return args[key] if key < len(args) else None
        if option is Any:
            return Any
    return None


def hint_at(root: type, path: Key) -> Any:
    """Annotation of the value at `path`; None when the schema has nothing there."""
    hint: Any = root
    for key in path:
        hint = item_hint(hint, key)
    return hint


def walk(section: type, prefix: Key = ()) -> Iterator[tuple[Key, Field[Any], Any]]:
    """Every key of a spec and of the sections below it, depth first; list items count as position 0."""
    for field in fields(section):
        hint, path = hints(section)[field.name], (*prefix, field.name)
        yield path, field, hint
        below = section_of(hint)
        if below is None and get_origin(hint) in (tuple, list):
            below, path = section_of(item_hint(hint, 0)), (*path, 0)
        if below is not None:
            yield from walk(below, path)


def describe(hint: Any) -> str:
    """What a value of this type looks like, in words."""
    allowed = literals(hint)
    if allowed:
        return "one of " + ", ".join(show(v) for v in allowed)
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Any: "any value",
    }
    parts = []
    for option in options(hint):
        args = get_args(option)
        if option in names:
            parts.append(names[option])
        elif get_origin(option) in (tuple, list):
            fixed = len(args) > 1 and args[1] is not ...
            parts.append(f"a list of {len(args)} items" if fixed else "a list")
        else:
            parts.append("a section of keys and values")
    return " or ".join(parts)


def show(value: Any) -> str:
    """A value for a message, on one line and not too long."""
    text = (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or isinstance(value, bool)
        else repr(value)
    )
    if isinstance(value, str):
        text = str(value) if value and value.isprintable() and value == value.strip() else repr(str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def default_of(field: Field[Any]) -> Any:
    """The default of a key; MISSING when it must be given."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def settle(value: Any, hint: Any, problems: list[Problem], path: Key = ()) -> Any:
    """`value` with YAML's ambiguities decided by the type: yes, no, on and off become words or truth values.

    Values that pydantic would bend into shape in silence (true as the number 1, not-a-number) are added to `problems`.
    """
    if isinstance(value, dict):
        return {str(k): settle(v, item_hint(hint, k), problems, (*path, str(k))) for k, v in value.items()}
    if isinstance(value, list):
        return [settle(v, item_hint(hint, i), problems, (*path, i)) for i, v in enumerate(value)]
    kinds, allowed = options(hint), literals(hint)
    if isinstance(value, Word):
        if value in allowed or str in kinds or not (bool in kinds or Any in kinds or hint is None):
            return str(value)
        return value.truth
    if isinstance(value, bool) and bool not in kinds:
        word = next((w for w in (("on", "yes") if value else ("off", "no")) if w in allowed), None)
        if word is not None:
            return word
        if int in kinds or float in kinds:
            problems.append(Problem(path, f"{show(value)} is not {describe(hint)}"))
    if isinstance(value, float) and math.isnan(value):
        problems.append(Problem(path, "not-a-number is not a setting"))
    return value
