"""Finds the answer inside a completion: in a tag, in a box, after "the answer is", or as the last number.

Plain text in, plain text out; which of these a reward uses is its own choice. Next: `builtin.py`.
"""

from __future__ import annotations

import re
from decimal import Decimal

# A sign counts only where it can't be a minus between two operands: "5-3" ends in 3, "x = -3" in -3.
_NUMBER = re.compile(r"(?:(?<![\w)\]])[-+\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+", re.ASCII)
_PHRASE = re.compile(r"(?:final\s+)?answer\s*(?:is|:|=)\s*:?\s*(.+)", re.IGNORECASE)


def last_number(text: str) -> Decimal | None:
    """The last integer or decimal in the text, exact ("1,234.50" is 1234.5), or None."""
    found = [match.group() for match in _NUMBER.finditer(text)]
    return _decimal(found[-1]) if found else None


def whole_number(text: str) -> Decimal | None:
    """The number that the text consists of, apart from white space, or None."""
    stripped = text.strip()
    match = _NUMBER.fullmatch(stripped)
    return None if match is None else _decimal(stripped)


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("\u2212", "-"))


def in_tag(text: str, tag: str) -> str | None:
    """The stripped content of the last `<tag>...</tag>`, or None."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len(opening) : end].strip()


def in_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, braces balanced, or None."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for position in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin:position].strip()
        start = text.rfind("\\boxed{", 0, start)
    return None


def after_phrase(text: str) -> str | None:
    """What follows the last "answer is" or "answer:" on its line, without a closing full stop, or None."""
    found = _PHRASE.findall(text)
    return found[-1].strip().removesuffix(".").strip("*` ") if found else None


def final_answer(text: str) -> str:
    """The answer: from `<answer>`, else the box, else after "the answer is", else the whole text, stripped."""
    for found in (in_tag(text, "answer"), in_box(text), after_phrase(text)):
        if found is not None:
            return found
    return text.strip()
