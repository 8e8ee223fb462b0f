"""One declaration makes a kernel's launcher an operation that torch knows, `torch.ops.lockstep.<name>`.

    @operation("kv_codes", fake=lambda x_SGD: torch.empty(x_SGD.shape, dtype=E4M3, device=x_SGD.device))
    def kv_codes(x_SGD: Tensor, scale_G: Tensor) -> Tensor: ...

The schema comes from the annotations. `fake` takes by name whichever parameters it needs, and returns what the launcher would,
without values: the same shapes, types and strides. Best it is the very function with which the launcher allocates.

Torch's dispatcher costs microseconds a call, and training micro-batches are launched one by one. So whoever calls the launcher
gets it as it is, and the operation only while torch looks at the program instead of running it: under `torch.compile` and
`torch.export`, and where the first argument is no plain tensor but a fake one, a meta tensor or another subclass. Modes that
watch plain tensors see what `torch.ops.lockstep` is called for, and nothing of a launch.

What a schema can't say is left to the function that calls the launcher: pairs of scales, indices, results of several forms. Such
a launcher takes plain parameters and returns a list, whose length depends on flags alone. An operation's result is never one
of its arguments.

Next: `triton/quantize.py`, the simplest one; `products.py`, one that chooses between kernels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

P = ParamSpec("P")
R = TypeVar("R")

NAMESPACE = "lockstep"
OPERATIONS: dict[str, Any] = {}
"""What was declared so far, by name: torch's operator of each."""
LAUNCHERS: dict[str, Callable[..., Any]] = {}
"""The launcher of each."""
_PLAIN = frozenset((Tensor, nn.Parameter))


def operation(
    name: str, *, fake: Callable[..., object], mutates: Sequence[str] = (), device: str | None = "cuda"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declares a launcher. Its first parameter is a tensor, passed by position.

    fake: see above. mutates: parameters that are written to. device: the kind for which the launcher works, None for all; an
    operation without kernel for a tensor's device raises NotImplementedError. Raises ValueError for what has no schema, for a
    `fake` with a parameter that the launcher doesn't have, and for a name that is taken.
    """

    def declare(launch: Callable[P, R]) -> Callable[P, R]:
        if name in OPERATIONS:
            raise ValueError(f"{NAMESPACE}::{name} is declared twice")
        shape_only = _by_name(name, launch, fake)
        made = torch.library.custom_op(
            f"{NAMESPACE}::{name}",
            launch,
            mutates_args=mutates,
            device_types=device,
            tags=(torch.Tag.needs_exact_strides,),
        )
        made.register_fake(shape_only)
        operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        OPERATIONS[name], LAUNCHERS[name] = operator, launch

        @wraps(launch)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = args[0]
            if is_compiling() or type(first) not in _PLAIN or first.is_meta:
                return operator(*args, **kwargs)  # type: ignore[no-any-return]
            return launch(*args, **kwargs)

        return call

    return declare


def _by_name(name: str, launch: Callable[..., object], fake: Callable[..., object]) -> Callable[..., object]:
    """`fake` under the launcher's signature."""
    signature = inspect.signature(launch)
    wanted = tuple(inspect.signature(fake).parameters)
    unknown = [p for p in wanted if p not in signature.parameters]
    if unknown:
        raise ValueError(f"the fake of {NAMESPACE}::{name} takes {', '.join(unknown)}, its launcher doesn't")

    def shape_only(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return fake(**{p: bound.arguments[p] for p in wanted})

    return shape_only
