"""The YAML dialect of configuration files: YAML 1.1 without its traps.

PyYAML reads `1e-6` as a string, `off` and `no` as False, `012` as ten, `1:30` as ninety and the second of two equal keys
silently. Here numbers follow YAML 1.2, nothing is a date, equal keys are refused, and the words yes, no, on and off
stay words until the schema says what they stand for (`Word`). `dump` writes what `parse` reads back equal.

Next: `overrides.py`.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from lockstep.errors import ConfigError

_WORDS = {w: w in ("yes", "on") for w in ("yes", "no", "on", "off")}
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_INT = re.compile(r"[-+]?[0-9][0-9_]*$|0x[0-9a-fA-F_]+$|0o[0-7_]+$")
_BOOL = re.compile(r"(true|True|TRUE|false|False|FALSE)$")
_WORD = re.compile(r"(yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$")
_NULL = re.compile(r"(~|null|Null|NULL|)$")
_MERGE = re.compile(r"<<$")


class Word(str):
    """An unquoted yes, no, on or off: a string or a truth value, whichever the schema wants."""

    __slots__ = ()

    @property
    def truth(self) -> bool:
        """What the word says where a truth value is wanted."""
        return _WORDS[self.lower()]


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first in (
        ("tag:yaml.org,2002:bool", _BOOL, "tTfF"),
        ("!word", _WORD, "yYnNoO"),
        ("tag:yaml.org,2002:int", _INT, "-+0123456789"),
        ("tag:yaml.org,2002:float", _FLOAT, "-+0123456789."),
        ("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""]),
        ("tag:yaml.org,2002:merge", _MERGE, "<"),
    ):
        for char in first:
            table.setdefault(char, []).append((tag, pattern))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _Refused(line, f"key {key!r} is not a word", "quote it if it is meant as text")
            if key in seen:
                raise _Refused(
                    line,
                    f"key {str(key)!r} is given twice",
                    f"remove this one or the one in line {seen[key]}",
                )
            seen[key] = line
        made: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return made


class _Refused(yaml.YAMLError):
    def __init__(self, line: int, what: str, fix: str) -> None:
        super().__init__(what)
        self.line, self.what, self.fix = line, what, fix


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(
        str(loader.construct_scalar(node))
        .replace("_", "")
        .lower()
        .replace(".inf", "inf")
        .replace(".nan", "nan")
    )


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text, 10)


def _construct_word(loader: _Loader, node: yaml.ScalarNode) -> Word:
    return Word(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("!word", _construct_word)


def _all_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    ours, theirs = _resolvers(), yaml.SafeDumper.yaml_implicit_resolvers
    return {first: ours.get(first, []) + theirs.get(first, []) for first in {*ours, *theirs}}


class _Dumper(yaml.SafeDumper):
    """Quotes every string that this dialect or plain YAML 1.1 would read as something else."""

    yaml_implicit_resolvers = _all_resolvers()

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists are indented under their key


def parse(text: str, where: str) -> Any:
    """The value that `text` stands for. `where` names its source in errors.

    Raises ConfigError with the line for bad syntax, equal keys, keys that aren't words and unknown tags.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except _Refused as e:
        raise ConfigError(e.what, where=f"{where}: line {e.line}", fix=e.fix) from e
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = f"{where}: line {mark.line + 1}, column {mark.column + 1}" if mark else where
        raise ConfigError(
            "not valid YAML: " + ", ".join(t for t in (e.context, e.problem) if t), where=place
        ) from e
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError(f"not valid YAML: {e}", where=where) from e


def dump(value: Any) -> str:
    """`value` (dicts, lists, scalars) as YAML in this dialect."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text
