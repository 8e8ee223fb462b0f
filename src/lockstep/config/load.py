"""From a YAML file and overrides to a `RunSpec`, and back.

The specs of the packages below are plain frozen dataclasses; pydantic validates straight into them, so there is no second
schema to keep in step. Everything that is wrong becomes one ConfigError line.

Next: `explain.py` for the messages, `trainer/spec.py` for the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from lockstep.config import dialect
from lockstep.config.explain import problems_of, to_error
from lockstep.config.overrides import apply_overrides
from lockstep.config.schema import Problem, settle
from lockstep.errors import ConfigError
from lockstep.trainer.spec import RunSpec


@cache
def _adapter() -> TypeAdapter[RunSpec]:
    return TypeAdapter(RunSpec)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunSpec:
    """The run that the file at `path` describes, with `overrides` (`optim.lr=1e-5`) written over it.

    Raises ConfigError for an unreadable file, bad YAML, unknown keys and values that aren't allowed.
    """
    tree = dialect.parse(_read(Path(path)), str(path))
    if not isinstance(tree, dict):
        fix = "write `key: value` lines, see docs/configuration.md"
        raise ConfigError(
            "the file is empty" if tree is None else "the file is not a mapping", where=str(path), fix=fix
        )
    written = apply_overrides(tree, overrides)
    problems: list[Problem] = []
    tree = settle(tree, RunSpec, problems)
    try:
        spec = _adapter().validate_python(tree)
    except ValidationError as e:
        known = {p.path for p in problems}
        problems += [p for p in problems_of(e, RunSpec, tree) if p.path not in known]
        raise to_error(problems, str(path), written) from e
    if problems:
        raise to_error(problems, str(path), written)
    return spec


def dump(spec: RunSpec) -> str:
    """The complete configuration, defaults included, as YAML that `load_run` reads back equal."""
    return dialect.dump(_plain(spec))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise ConfigError("no such file", where=str(path), fix="give the path of a YAML file") from e
    except UnicodeDecodeError as e:
        raise ConfigError("not a text file in UTF-8", where=str(path)) from e
    except OSError as e:
        raise ConfigError(f"can't be read: {e.strerror}", where=str(path)) from e
