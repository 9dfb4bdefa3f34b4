r"""
Text of JSON values, regular expressions over it, and the patterns of LIKE.

Patterns run on RE2, whose time is linear in the text for every pattern; users' patterns never run on Python's
backtracking `re`. RE2 comes with the extra `match`; only filters with a regular expression need it.

LIKE: `%` is any text, `_` any one character, `\%` and `\_` themselves, all else literal. A pattern is cut at its `%`
into segments. The first and last are anchored; each one between them goes to its leftmost place after the one before,
which finds a match whenever there is one. So there is no backtracking: without `_` a segment is one `str.find`; with
it, all places are found at once with bit masks, one shift per character of the segment, whatever the value contains.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any, TypeAlias

from virta.errors import FilterError
from virta.filters.limits import REGEXP_MEMORY_MAX
from virta.filters.values import Regexp, number

COMPILED_MAX = 8192  # cached compiled patterns of a few kilobytes each
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def search(regexp: Regexp, text: str) -> bool:
    """Return whether the pattern is found anywhere in the text."""
    try:
        return compiled(regexp).search(text) is not None
    except UnicodeEncodeError:
        return compiled(regexp).search(well_formed(text)) is not None


def compiled(regexp: Regexp) -> Any:
    """Return the RE2 program; raise FilterError with RE2's message if the pattern is invalid."""
    return compiled_text(pattern_text(regexp))


def pattern_text(regexp: Regexp) -> str:
    """Return flags, NUL and pattern as one text: Python's garbage collector does not visit it."""
    return f"{regexp.flags}\0{regexp.pattern}"


@lru_cache(maxsize=COMPILED_MAX)
def compiled_text(text: str) -> Any:
    """Return the RE2 program of a `pattern_text`, as `compiled` does."""
    flags, _, pattern = text.partition("\0")
    try:
        import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra; only filters with patterns need it
    except ImportError as exc:
        raise FilterError(
            "this filter holds a regular expression, which needs google-re2: pip install virta[match]",
            code="regexp_engine_missing",
        ) from exc
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = REGEXP_MEMORY_MAX
    options.case_sensitive = "i" not in flags
    options.dot_nl = "s" in flags
    pattern = well_formed(pattern)
    try:
        # RE2's option for this flag works only in POSIX syntax.
        return re2.compile(f"(?m){pattern}" if "m" in flags else pattern, options)
    except re2.error as exc:
        reason = exc.args[0] if exc.args else str(exc)
        if isinstance(reason, bytes):
            reason = reason.decode("utf-8", "replace")
        raise FilterError(str(reason), code="regexp_invalid") from exc


def well_formed(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, which UTF-8 cannot encode."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def text_of(value: Any) -> str:
    """Return a JSON value as text, as JavaScript's String() does."""
    if isinstance(value, list | tuple):
        return ",".join(_leaves(value))
    return "null" if value is None else _text_of_one(value)


def _leaves(array: Any) -> list[str]:
    """
    Return the texts between the commas: nested arrays join with commas too, null and [] are empty.

    Not recursive: documents may nest deeper than Python's stack.
    """
    texts: list[str] = []
    stack = [iter(array)] if array else []
    if not array:
        return [""]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list | tuple) and item:
                stack.append(iter(item))
                break
            texts.append(
                "" if item is None or isinstance(item, list | tuple) else _text_of_one(item)
            )
        else:
            stack.pop()
    return texts


def _text_of_one(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number_text(value)
    return "[object Object]"


def number_text(value: float) -> str:
    """Return a number as JavaScript writes it: shortest digits, exponent from 1e21 up and below 1e-6."""
    value = number(value)
    if isinstance(value, int):
        return str(value)
    if math.isnan(value) or math.isinf(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    # `point` is where the decimal point stands, counted from the first significant digit.
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    if len(digits) <= point <= 21:
        return sign + digits + "0" * (point - len(digits))
    if 0 < point <= 21:
        return sign + digits[:point] + "." + digits[point:]
    if -6 < point <= 0:
        return sign + "0." + "0" * -point + digits
    power = point - 1
    tail = "." + digits[1:] if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{tail}e{'+' if power > 0 else '-'}{abs(power)}"


# LIKE.

# Characters of a pattern: each costs one pass over the value (a shift of one bit per character).
PATTERN_CHARS_MAX = 2048

# A segment: its characters, None for `_`.
Segment: TypeAlias = tuple[str | None, ...]

_MARK = "\x01"
_DIGITS = bytes(ord("1") if byte == ord(_MARK) else ord("0") for byte in range(256))
_PIECE = re.compile(r"\\[%_]|.", re.DOTALL)


@lru_cache(maxsize=COMPILED_MAX)
def like(pattern: str) -> LikePattern:
    """Return the compiled pattern."""
    return LikePattern(pattern)


def segments(pattern: str) -> list[Segment]:
    """Return the pattern cut at its wildcards `%`; always at least one segment."""
    cut: list[list[str | None]] = [[]]
    for piece in _PIECE.findall(pattern):
        if piece == "%":
            cut.append([])
        else:
            cut[-1].append(None if piece == "_" else piece[-1])
    return [tuple(segment) for segment in cut]


def literal(segment: Segment) -> str | None:
    """Return the segment as text, None when it has a `_`."""
    return None if None in segment else "".join(map(str, segment))


class LikePattern:
    """A compiled pattern."""

    __slots__ = ("_first", "_inner", "_last", "_whole")

    def __init__(self, pattern: str) -> None:
        cut = segments(pattern)
        self._whole = len(cut) == 1
        self._first = cut[0]
        self._last = cut[-1]
        self._inner = [segment for segment in cut[1:-1] if segment]

    def matches(self, text: str) -> bool:
        if self._whole:
            return len(text) == len(self._first) and _matches_at(self._first, text, 0)
        start = len(self._first)
        end = len(text) - len(self._last)
        if (
            end < start
            or not _matches_at(self._first, text, 0)
            or not _matches_at(self._last, text, end)
        ):
            return False
        for segment in self._inner:
            start = _leftmost(segment, text, start, end)
            if start < 0:
                return False
        return True


def _matches_at(segment: Segment, text: str, at: int) -> bool:
    """Return whether the segment matches at that position."""
    return len(text) - at >= len(segment) and all(
        wanted is None or wanted == text[at + i] for i, wanted in enumerate(segment)
    )


def _leftmost(segment: Segment, text: str, start: int, end: int) -> int:
    """Return the end of the leftmost match between start and end, -1 without one."""
    plain = literal(segment)
    if plain is not None:
        found = text.find(plain, start, end)
        return -1 if found < 0 else found + len(plain)
    places = end - start - len(segment) + 1
    if places <= 0:
        return -1
    part = text[start:end]
    fits = (1 << places) - 1
    masks = {char: _mask(part, char) for char in set(segment) if char is not None}
    for i, char in enumerate(segment):
        if char is not None:
            fits &= masks[char] >> i
        if not fits:
            return -1
    return start + (fits & -fits).bit_length() - 1 + len(segment)


def _mask(text: str, char: str) -> int:
    """Return an integer whose bit i is set where text[i] is the character, in a few passes in C."""
    if char != _MARK:
        text = text.replace(_MARK, "\0").replace(char, _MARK)
    digits = text.encode("latin-1", "replace").translate(_DIGITS)  # one byte a character
    return int(digits[::-1], 2)
