r"""
LIKE: `%` is any text, `_` any one character, `\%` and `\_` themselves, all else literal.

A pattern is cut at its `%` into segments. The first and last are anchored; each one between them goes
to its leftmost place after the one before, which finds a match whenever there is one. So there is no
backtracking: without `_` a segment is one `str.find`; with it, all places are found at once with
bit masks, one shift per character of the segment, whatever the value holds.
"""

from __future__ import annotations

import re
from typing import TypeAlias

# Characters of a pattern: each costs one pass over the value (a shift of one bit per character).
PATTERN_CHARS_MAX = 2048

# A segment: its characters, None for `_`.
Segment: TypeAlias = tuple[str | None, ...]

_MARK = "\x01"
_DIGITS = bytes(ord("1") if byte == ord(_MARK) else ord("0") for byte in range(256))
_PIECE = re.compile(r"\\[%_]|.", re.DOTALL)


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
