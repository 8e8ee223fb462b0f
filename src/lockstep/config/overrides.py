"""Dotted overrides from the command line: `optim.lr=1e-5`, `rewards.0.weight=2`.

They edit the tree that came out of the YAML file, before the schema sees it, so that a mistake in an override gets the
same message as one in the file.

Next: `schema.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from lockstep.config.dialect import parse
from lockstep.errors import ConfigError

Key = tuple[str | int, ...]


def split_override(text: str) -> tuple[Key, Any]:
    """`a.0.b=value` as its path and the value, read as YAML. Raises ConfigError."""
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(
            f"{text!r} is not an override", where="command line", fix="write it as section.key=value"
        )
    return tuple(int(p) if p.isdigit() else p for p in parts), parse(value, f"command line: {name.strip()}")


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> set[Key]:
    """Write the overrides into `tree`, the later the stronger; returns the paths that were written.

    A missing section is made; a list takes an index it has, or the next one. Raises ConfigError.
    """
    written: set[Key] = set()
    for text in overrides:
        path, value = split_override(text)
        node: Any = tree
        for here, following in pairwise(path):
            fresh: Any = [] if following == 0 else {}
            child = _read(node, here, text)
            if child is None:
                child = fresh
                _write(node, here, child, text)
            node = child
        _write(node, path[-1], value, text)
        written.add(path)
    return written


def _read(node: Any, key: str | int, text: str) -> Any:
    if isinstance(node, list):
        index = _index(node, key, text)
        return node[index] if index < len(node) else None
    _require_section(node, key, text)
    return node.get(str(key))


def _write(node: Any, key: str | int, value: Any, text: str) -> None:
    if isinstance(node, list):
        index = _index(node, key, text)
        node[index : index + 1] = [value]
        return
    _require_section(node, key, text)
    node[str(key)] = value


def _index(node: list[Any], key: str | int, text: str) -> int:
    if isinstance(key, int) and key <= len(node):
        return key
    raise ConfigError(
        f"{key!r} is no position in a list of {len(node)}",
        where=f"command line: {text}",
        fix=f"use 0 to {len(node)}; {len(node)} appends",
    )


def _require_section(node: Any, key: str | int, text: str) -> None:
    if not isinstance(node, dict):
        raise ConfigError(
            f"nothing can be set under {key!r}: its parent is {node!r}", where=f"command line: {text}"
        )
