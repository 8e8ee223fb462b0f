"""Generated sums, differences and products, with held-out operand pairs.

Whether a pair of operands is for training or for evaluation is decided by a hash of the unordered pair, whatever the
operator, the number of digits, the seed or the size. So no training run can ever have seen 7 + 4 when 4 + 7 is an
evaluation question, not even among the hundred pairs of one-digit numbers. Next: `rows.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.data.order import permutation, words
from lockstep.data.prompt import template_columns
from lockstep.data.spec import DataSpec
from lockstep.errors import DataError

HOLDOUT_FRACTION = 0.2
"""Share of the unordered operand pairs that is kept for evaluation. Fixed: two runs must agree on it to be comparable."""

DEFAULT_TEMPLATE = "What is {a} {op} {b}? Answer with a number."
DEFAULT_SIZE = 10_000
ENUMERABLE = 1 << 18
"""Up to so many problems all are listed and shuffled; beyond, distinct ones are drawn."""

_STREAM = 1 << 63
_OPERATORS = ("+", "-", "*")


@dataclass(frozen=True)
class Arithmetic:
    """The options, checked. `digits` holds the digits of the first and of the second operand."""

    digits: tuple[int, int]
    operators: tuple[str, ...]
    size: int | None
    holdout: str

    @property
    def spans(self) -> tuple[range, range]:
        """All values of the two operands: 0..9, 10..99, 100..999, ..."""
        first, second = (range(0 if d == 1 else 10 ** (d - 1), 10**d) for d in self.digits)
        return first, second

    @property
    def problems(self) -> int:
        """How many problems there are, held out or not."""
        first, second = self.spans
        return len(first) * len(second) * len(self.operators)

    def problem(self, number: int) -> tuple[int, str, int]:
        """Problem `number` of all: operand, operator, operand."""
        first, second = self.spans
        pair, operator = divmod(number, len(self.operators))
        left, right = divmod(pair, len(second))
        return first[left], self.operators[operator], second[right]

    def wanted(self, number: int) -> bool:
        """It belongs to the side that `holdout` names."""
        a, _, b = self.problem(number)
        return held_out(a, b) == (self.holdout == "eval")


def held_out(a: int, b: int) -> bool:
    """This pair of operands, in either order, is for evaluation only."""
    text = f"lockstep holdout {min(a, b)} {max(a, b)}"
    word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return word < HOLDOUT_FRACTION * 2**64


def arithmetic_rows(spec: DataSpec, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with `prompt`, `answer` (text), `a`, `op` and `b`, all problems distinct, in an order given by the seed."""
    options = read_options(spec.args)
    template = spec.args.get("template") or DEFAULT_TEMPLATE
    for i, number in enumerate(chosen(options, seed)):
        a, op, b = options.problem(number)
        answer = {"+": a + b, "-": a - b, "*": a * b}[op]
        row = {"answer": str(answer), "a": a, "op": op, "b": b}
        yield f"arithmetic problem {i}", {"prompt": template.format(**row), **row}


def chosen(options: Arithmetic, seed: int) -> list[int]:
    """The numbers of the problems to use. DataError when more are asked for than there are."""
    total = options.problems
    if total <= ENUMERABLE:
        found = [int(n) for n in permutation(seed, _STREAM, total) if options.wanted(int(n))]
        if options.size is not None and options.size > len(found):
            _too_many(options, len(found))
        return found[: options.size if options.size is not None else DEFAULT_SIZE]
    share = HOLDOUT_FRACTION if options.holdout == "eval" else 1 - HOLDOUT_FRACTION
    size = options.size if options.size is not None else DEFAULT_SIZE
    if size > total * share / 2:
        _too_many(options, int(total * share / 2))
    return _draw(options, seed, size)


def _draw(options: Arithmetic, seed: int, size: int) -> list[int]:
    """`size` distinct problems out of very many."""
    found: dict[int, None] = {}
    round_number = 0
    while len(found) < size:
        for word in words(seed, _STREAM + round_number, max(256, 2 * size)):
            number = int(word) % options.problems
            if len(found) < size and options.wanted(number):
                found[number] = None
        round_number += 1
    return list(found)


def _too_many(options: Arithmetic, available: int) -> None:
    raise DataError(
        f"size is {options.size}, but there are only {available} problems",
        where="data.args.size",
        why=f"digits {list(options.digits)}, operators {list(options.operators)}, holdout {options.holdout}",
        fix="leave size out (every epoch uses all of them again), or take more digits",
    )


def read_options(args: dict[str, Any]) -> Arithmetic:
    """The options from `data.args`, checked. Raises DataError."""
    digits = args.get("digits", 1)
    pair = (
        [digits, digits]
        if isinstance(digits, int)
        else list(digits)
        if isinstance(digits, (list, tuple))
        else []
    )
    if len(pair) != 2 or not all(
        isinstance(d, int) and not isinstance(d, bool) and 1 <= d <= 9 for d in pair
    ):
        fix = "a number from 1 to 9, or two of them for the two operands"
        raise DataError(f"digits is {digits!r}", where="data.args.digits", fix=fix)
    operators = tuple(args.get("operators", ("+",)))
    if not operators or any(op not in _OPERATORS for op in operators) or len(set(operators)) < len(operators):
        raise DataError(
            f"operators is {list(operators)}",
            where="data.args.operators",
            fix="some of +, - and *, each once",
        )
    size = args.get("size")
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise DataError(
            f"size is {size!r}", where="data.args.size", fix="a whole number from 1 on, or leave it out"
        )
    holdout = args.get("holdout", "train")
    if holdout not in ("train", "eval"):
        raise DataError(f"holdout is {holdout!r}", where="data.args.holdout", fix="train or eval")
    _check_template(args.get("template") or DEFAULT_TEMPLATE, operators)
    return Arithmetic((pair[0], pair[1]), operators, size, holdout)


def _check_template(template: object, operators: tuple[str, ...]) -> None:
    if not isinstance(template, str):
        raise DataError(f"template is {template!r:.60}, not text", where="data.args.template")
    names = template_columns(template)
    unknown = sorted(set(names) - {"a", "b", "op"})
    needed = ["a", "b", *(["op"] if len(operators) > 1 else [])]
    missing = [name for name in needed if name not in names]
    if unknown or missing:
        what = f"template has {{{unknown[0]}}}" if unknown else f"template has no {{{missing[0]}}}"
        raise DataError(
            what, where="data.args.template", fix="it may have {a}, {op} and {b}, and must show the problem"
        )
