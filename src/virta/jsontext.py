"""
JSON texts: one lenient reader, one limit of nesting, and what happens to lone surrogates.

JSON allows more than the fast decoder reads: numbers beyond a double, integers of any length, escapes of lone
surrogates. `decode` reads all of that. NaN and Infinity are no JSON. Of members with equal names the last counts.

A text nests at most `DEPTH_MAX` levels: `[[1]]` nests two. The limits of the Python interpreter differ between
versions and depend on the call stack, so `check_depth` counts brackets before a decoder sees the text. It costs
nothing for short texts and two fast scans for long ones with few brackets.

Only the standard library is imported.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, Final, NoReturn

# Python 3.11 counts nesting and call stack together, up to 1,000. The server's deepest stack is under 100.
DEPTH_MAX: Final = 900
# Python can be set to refuse longer integers; as doubles they are infinite from 309 digits on.
_INTEGER_DIGITS_MAX: Final = 640
# After so many passes over innermost brackets, counting is cheaper than further passes.
_COLLAPSE_PASSES_MAX: Final = 12

_MARKS: Final = bytes.maketrans(b"{}", b"[]")
_NO_MARKS: Final = bytes(c for c in range(256) if c not in b'[]{}"')
# Maps "[" to 1 and "]" to 255, which stands for -1.
_STEPS: Final = bytes.maketrans(b"[]", b"\x01\xff")
# A pair of surrogates, a lone one (the group), any other escape.
_ESCAPES: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)


class JsonDepthError(ValueError):
    """A JSON text nests deeper than `DEPTH_MAX` levels."""

    def __init__(self) -> None:
        super().__init__(f"nested deeper than {DEPTH_MAX} levels")


def decode(text: bytes | bytearray | str) -> Any:
    """
    Return the value of a JSON text, read leniently; bytes are UTF-8.

    Raises:
        JsonDepthError: it nests too deeply.
        ValueError: it is no JSON, or no UTF-8.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    check_depth(raw)
    # A text: of bytes, `json.loads` would also read UTF-16 and UTF-32.
    text = text if isinstance(text, str) else str(text, "utf-8")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:  # the caller's stack is deep
        raise JsonDepthError from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer that is too long to convert, or a constant
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_integer)


def check_depth(text: bytes | bytearray, limit: int = DEPTH_MAX) -> None:
    """Raise JsonDepthError if a JSON text nests more than `limit` levels."""
    # Each level needs an opening bracket.
    if len(text) > limit and text.count(b"[") + text.count(b"{") > limit and _nests(text, limit):
        raise JsonDepthError


def _nests(text: bytes | bytearray, limit: int) -> bool:
    """Return whether brackets outside of strings nest more than `limit` levels."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = bytes(text.translate(_MARKS, _NO_MARKS))
    if b'"' in marks:
        marks = b"".join(marks.split(b'"')[::2])
    for depth in range(_COLLAPSE_PASSES_MAX):
        if marks.count(b"[") + depth <= limit:
            return False
        if depth == limit:
            return True
        marks = marks.replace(b"[]", b"")
    left = limit - _COLLAPSE_PASSES_MAX
    steps = memoryview(marks.translate(_STEPS)).cast("b")
    return any(depth > left for depth in accumulate(steps))


def replace_lone_surrogates(raw: bytes) -> bytes:
    """
    Return a JSON text in which each escaped lone surrogate is a question mark, as in Java's UTF-8.

    UTF-8 cannot encode a lone surrogate, so most readers refuse a text that has one.
    """
    return _ESCAPES.sub(lambda found: b"?" if found[1] else found[0], raw)


def valid_text(text: str) -> str:
    """Return a text with U+FFFD for each lone surrogate, which UTF-8 cannot encode."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _integer(digits: str) -> float:
    return int(digits) if len(digits) <= _INTEGER_DIGITS_MAX else float(digits)
