"""Finds the function that a `RewardSpec` names and checks, before anything is sampled, that it can be called.

A reward that turns out to be missing, misspelt or of the wrong signature after the first rollout has cost that rollout, so
everything that can be known from the signature is checked here. Built-ins and users' functions become the same thing, a
`LoadedReward`. Next: `evaluate.py`.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

from lockstep.errors import RewardError
from lockstep.rewards import builtin, graders, verl
from lockstep.rewards.contract import RESERVED
from lockstep.rewards.spec import RewardSpec

BUILTINS: dict[str, Callable[..., Any]] = {
    "exact_match": builtin.exact_match,
    "last_number": builtin.last_number,
    "format_tags": builtin.format_tags,
    "length": builtin.length,
    "math_verify": graders.math_verify,
    "reasoning_gym": graders.reasoning_gym,
}
"""Rewards that need no file, by name. Beside them stands `verl`, which wraps a function of the user's."""

WORKER_BUILTINS = {
    "math_verify": ("math_verify", "math-verify"),
    "reasoning_gym": ("reasoning_gym", "lockstep-rl[gym]"),
}
"""Built-ins that run in worker processes: the module they need and what to install for it."""

_KEYWORD = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class LoadedReward:
    """A reward that can be called: `function(prompts=, completions=, completion_ids=, **columns, **options)`."""

    name: str
    spec: RewardSpec
    function: Callable[..., Any]
    options: dict[str, Any]
    is_builtin: bool
    is_async: bool
    isolated: bool
    required: tuple[str, ...]
    """Columns without which it can't be called."""
    optional: tuple[str, ...]
    """Columns it takes where the data has them."""
    takes_all: bool
    """It has `**columns` and so gets every column."""

    def columns(self, available: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """The columns it is to be called with. RewardError where one it requires is missing, or is also an argument."""
        missing = [name for name in self.required if name not in available]
        if missing:
            raise RewardError(
                f"reward {self.name} needs the column {missing[0]!r}",
                why=f"the data has {', '.join(available) or 'no columns'}",
                fix=f"add it to the data, rename it there, or set {missing[0]} in the reward's args",
            )
        chosen = available if self.takes_all else {k: available[k] for k in self._accepted(available)}
        both = sorted(set(chosen) & set(self.options))
        if both:
            raise RewardError(
                f"reward {self.name}: {both[0]!r} is both a column of the data and one of its args",
                fix="rename one of them",
            )
        return dict(chosen)

    def _accepted(self, available: dict[str, list[Any]]) -> Iterable[str]:
        return (name for name in (*self.required, *self.optional) if name in available)


def load_reward(spec: RewardSpec, *, in_worker: bool = False) -> LoadedReward:
    """The reward that `spec` names, signature checked against `spec.args`. Raises RewardError.

    `in_worker` says that this is the worker process, in which an isolated function is simply called.
    """
    function, options = _find(spec)
    is_builtin = spec.use in BUILTINS
    accepted, takes_all = _signature(spec.use, function)
    _check_options(spec.use, options, accepted, takes_all)
    isolated = (spec.isolate or spec.use in WORKER_BUILTINS) and not in_worker
    if isolated and spec.use in WORKER_BUILTINS:
        _check_installed(spec.use)
    free = [p for p in accepted.values() if p.name not in RESERVED and p.name not in options]
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    optional = () if is_builtin else tuple(p.name for p in free if p.default is not Parameter.empty)
    return LoadedReward(
        name=getattr(function, "__name__", type(function).__name__),
        spec=spec,
        function=function,
        options=options,
        is_builtin=is_builtin,
        is_async=is_async,
        isolated=isolated,
        required=tuple(p.name for p in free if p.default is Parameter.empty),
        optional=optional,
        takes_all=takes_all,
    )


def _find(spec: RewardSpec) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function, and the options it is called with."""
    if spec.use == "verl":
        options = dict(spec.args)
        use = options.pop("function", None)
        if not isinstance(use, str):
            raise RewardError(
                "reward verl: args.function is missing", fix="args: {function: path.py:compute_score}"
            )
        return verl.adapt(load_function(use), use.rpartition(":")[2], options), {}
    if ":" in spec.use:
        return load_function(spec.use), spec.args
    if spec.use not in BUILTINS:
        raise RewardError(
            f"there is no built-in reward {spec.use!r}",
            why=f"built-ins are {', '.join((*BUILTINS, 'verl'))}",
            fix=_nearest(spec.use, (*BUILTINS, "verl")) or "for your own function write path.py:function",
        )
    return BUILTINS[spec.use], spec.args


def load_function(use: str) -> Callable[..., Any]:
    """The object behind `path.py:function` or `package.module:function`, which must be callable. Raises RewardError."""
    source, _, name = use.rpartition(":")
    if not source or not name:
        raise RewardError(
            f"{use!r} names no reward function", fix="write path.py:function or package.module:function"
        )
    module = _module_of_file(source) if source.endswith(".py") or "/" in source else _module(source)
    if name not in vars(module):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RewardError(
            f"there is no function {name!r}",
            where=source,
            fix=_nearest(name, names) or f"it has {', '.join(names[:10]) or 'no functions'}",
        )
    found: Callable[..., Any] = vars(module)[name]
    if not callable(found) or isinstance(found, type):
        kind = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise RewardError(f"{name!r} is {kind}, not a function", where=source)
    return found


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever the user's module does at import
        raise _import_failed(name, error) from error


def _module_of_file(source: str) -> ModuleType:
    path = Path(source).expanduser().resolve()
    if not path.is_file():
        near = _nearest(path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else [])
        raise RewardError("the file doesn't exist", where=source, why=f"looked for {path}", fix=near)
    name = f"lockstep_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError("not a Python file", where=source, fix="give the file a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import the files beside it, as a script can
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _import_failed(source, error) from error
    return module


def _import_failed(source: str, error: BaseException) -> RewardError:
    return RewardError("can't be imported", where=source, why=f"{type(error).__name__}: {error}")


def _signature(use: str, function: Callable[..., Any]) -> tuple[dict[str, Parameter], bool]:
    """The parameters that can be passed by keyword, and whether there is a `**columns`."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise RewardError("the signature can't be read", where=use, why=str(error)) from error
    accepted = {p.name: p for p in parameters if p.kind in _KEYWORD}
    takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in parameters)
    missing = [name for name in RESERVED if name not in accepted and not takes_all]
    positional = [p.name for p in parameters if p.kind is Parameter.POSITIONAL_ONLY]
    if missing or positional:
        what = f"doesn't accept {', '.join(missing or positional)} by keyword"
        fix = "def reward(prompts, completions, completion_ids, **columns) -> list[float | None]"
        raise RewardError(what, where=use, why="every reward is called with it", fix=fix)
    if "completions" not in accepted:
        near = _nearest("completions", list(accepted))
        raise RewardError(
            "has no parameter 'completions'", where=use, why="there is nothing to score", fix=near
        )
    return accepted, takes_all


def _check_options(
    use: str, options: dict[str, Any], accepted: dict[str, Parameter], takes_all: bool
) -> None:
    for name in options:
        if name in RESERVED:
            raise RewardError(
                f"args.{name} of reward {use} is what every reward is called with", fix="rename it"
            )
        if name not in accepted and not takes_all:
            names = [p for p in accepted if p not in RESERVED]
            raise RewardError(
                f"reward {use} has no option {name!r}",
                fix=_nearest(name, names) or f"it takes {', '.join(names) or 'none'}",
            )


def _check_installed(use: str) -> None:
    module, package = WORKER_BUILTINS[use]
    if importlib.util.find_spec(module) is None:
        raise RewardError(
            f"reward {use} needs {module}", why="it is not installed", fix=f"pip install '{package}'"
        )


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else ""
