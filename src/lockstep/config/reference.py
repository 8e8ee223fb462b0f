"""`docs/configuration.md`, made from the specs: section, key, type, default and the docstring under each field.

A field's docstring is not kept at run time, so it is read from the source with `ast`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

from lockstep.config.explain import dotted
from lockstep.config.overrides import Key
from lockstep.config.schema import default_of, hints, item_hint, literals, options, section_of, show
from lockstep.trainer.spec import RunSpec

_HEAD = """\
# Configuration

Made by `lockstep config reference --out docs/configuration.md`; don't edit by hand.

A run is one YAML file. Every key can be overridden on the command line with its dotted name, list items by position:
`lockstep train run.yaml optim.lr=1e-5 rewards.0.weight=2`. Unknown keys are refused with the nearest name.
`lockstep config show run.yaml` prints the complete configuration, defaults included.

Numbers may be written `1e-6`. The words `on`, `off`, `yes` and `no` are truth values where a truth value is wanted and
text where text is. Equal keys in one section are refused.
"""


@cache
def docstrings(section: type) -> dict[str, str]:
    """Key to the string literal that follows its field in the class body."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if (
            isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = inspect.cleandoc(text.value.value)
    return found


def type_name(hint: Any) -> str:
    """A type as a reader of YAML knows it."""
    if literals(hint):
        return ", ".join(f"`{show(v)}`" for v in literals(hint))
    names = {
        int: "integer",
        float: "number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Any: "any",
    }
    parts = []
    for option in options(hint):
        args = get_args(option)
        if option in names:
            parts.append(names[option])
        elif isinstance(option, type) and is_dataclass(option):
            parts.append("section")
        elif get_origin(option) is dict:
            parts.append(f"mapping of {type_name(args[1])}")
        else:
            fixed = len(args) > 1 and args[1] is not ...
            parts.append(
                f"{len(args)} x {type_name(args[0])}"
                if fixed
                else f"list of {type_name(args[0])}{'s' * is_dataclass(args[0])}"
            )
    return " or ".join(parts)


def default_name(field: Field[Any]) -> str:
    """The default as YAML would have it."""
    default = default_of(field)
    if default is MISSING:
        return "**required**"
    if isinstance(default, (tuple, list)):
        return f"`[{', '.join(show(v) for v in default)}]`"
    return "`{}`" if default == {} else f"`{show(default)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(section: type, prefix: Key) -> list[str]:
    texts, types = docstrings(section), hints(section)
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for field in fields(section):
        hint = types[field.name]
        below = section_of(hint) or _listed_section(hint)
        text = texts.get(field.name, "")
        if below is not None:
            name = dotted((*prefix, field.name))
            text = f"{text} See [`{name}`](#{name.replace('.', '')}).".strip()
        default = "" if below is not None and default_of(field) is not MISSING else default_name(field)
        rows.append(f"| `{field.name}` | {type_name(hint)} | {default} | {_cell(text)} |")
    return rows


def _listed_section(hint: Any) -> type | None:
    return section_of(item_hint(hint, 0)) if get_origin(hint) in (tuple, list) else None


def _sections(section: type, prefix: Key = ()) -> list[tuple[Key, type, bool]]:
    found: list[tuple[Key, type, bool]] = []
    for name, hint in hints(section).items():
        below, listed = section_of(hint), _listed_section(hint)
        kind = below or listed
        if kind is not None:
            found.append(((*prefix, name), kind, listed is not None))
            found += _sections(kind, (*prefix, name))
    return found


def reference() -> str:
    """The whole page. A spec that appears in several places is written out once and referred to after that."""
    lines = [_HEAD, "## The run", "", *_table(RunSpec, ()), ""]
    written: dict[type, str] = {}
    for path, kind, listed in _sections(RunSpec):
        name = dotted(path)
        lines += [f"## {name}", ""]
        if kind in written:
            first = written[kind]
            lines += [f"The same keys as [`{first}`](#{first.replace('.', '')}).", ""]
            continue
        written[kind] = name
        about = _cell(inspect.getdoc(kind) or "")
        lines += [
            about + (" A list: each item has these keys." if listed else ""),
            "",
            *_table(kind, path),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"
