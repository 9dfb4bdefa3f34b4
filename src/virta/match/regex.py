"""
Patterns that need no automaton, and many patterns against one text.

An index searches each new value once for all patterns of its path. Patterns are numbered by the index, in
ascending order, and gathered in RE2 sets (one automaton for many patterns). The newest are tried one by one
until there are enough for a set, which is built when the pattern is added. A set is bounded, so that building one takes a few milliseconds,
and has a pattern that always matches: if that one is missing from a result, the automaton ran out of memory and
the set's patterns are tried one by one.

Threads search concurrently; a lock keeps them from seeing a set that is being rebuilt. Patterns are added and
removed only while no search runs.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from typing import Any

from virta.filters.text import COMPILED_MAX, compiled, well_formed
from virta.filters.text import search as found_in
from virta.filters.values import Regexp

# Patterns and their characters in one set: 7 ms to build, 1 to 2 us to run.
SET_PATTERNS_MAX = 1024
SET_CHARS_MAX = 1 << 16
# The default of 8 MB makes sets of thousands of patterns a hundred times slower.
SET_MEMORY_MAX = 128 << 20
# Measured: memory for a character of a pattern in a set, and of one compiled alone; of a pattern in Python.
SET_CHAR_BYTES = 33
PATTERN_CHAR_BYTES = 110
ENTRY_BYTES = 250
# New patterns tried one by one before they become a set.
FRESH_MAX = 32
# Texts whose patterns the plain index remembers, a path, and how long they may be.
TEXTS_MAX = 4096
TEXT_CHARS_MAX = 1024
# Of a pattern that is taken as plain text: an event is looked up under each length in use.
PLAIN_CHARS_MAX = 32

# Text between anchors, without whatever RE2 may read as more than itself. U+FFFD is left out because it also
# stands for lone surrogates of the value.
_PLAIN = re.compile(
    rf"(\^?)([^\\.+*?()|\[\]{{}}^$\ufffd\ud800-\udfff]{{1,{PLAIN_CHARS_MAX}}})(\$?)"
)


def plain_condition(regexp: Regexp) -> tuple[str, str] | None:
    """Return the operation (prefix, suffix, eq) and text equivalent to an anchored literal, else None."""
    plain = _PLAIN.fullmatch(regexp.pattern) if regexp.flags in ("", "s") else None
    if plain is None:
        return None
    start, text, end = plain.groups()
    if start:
        return ("eq" if end else "prefix", text)
    return ("suffix", text) if end else None


class PatternSets:
    """The patterns of all paths: `change` and `search` are what the index calls."""

    def __init__(self) -> None:
        self._paths: dict[int, PathPatterns] = {}

    def change(self, node: int, number: int, text: str | None) -> None:
        """Add the pattern `text` (flags, NUL, pattern); without text remove it, or all for number -1."""
        if number < 0:
            self._paths.pop(node, None)
        elif text is not None:
            flags, _, pattern = text.partition("\0")
            self._paths.setdefault(node, PathPatterns()).add(number, Regexp(pattern, flags))
        elif node in self._paths:
            self._paths[node].remove(number)

    def search(self, node: int, text: str, start: int) -> list[int]:
        """Return the numbers, from `start` on, of the node's patterns that occur in the text."""
        patterns = self._paths.get(node)
        return patterns.search(text, start) if patterns else []

    @property
    def bytes(self) -> int:
        """Return the estimated memory of all patterns."""
        return sum(patterns.bytes for patterns in self._paths.values())


class PathPatterns:
    """The patterns of one path."""

    def __init__(self) -> None:
        self.patterns: dict[int, Regexp] = {}
        self.sets: list[_Set] = []
        self.fresh: list[int] = []  # ascending, all above those in the sets
        self.texts: dict[str, frozenset[int]] = {}  # results for recent texts
        self.removed = 0  # numbers that sets or `fresh` still contain
        self._gathering = threading.Lock()

    def add(self, number: int, regexp: Regexp) -> None:
        """Add a pattern with a number above all others, compiled now: matching never waits for it."""
        self.patterns[number] = regexp
        self.texts.clear()
        with self._gathering:
            self.fresh = [*self.fresh, number]
            if len(self.fresh) >= FRESH_MAX:
                self._gather()
            else:
                compiled(regexp)

    def remove(self, number: int) -> None:
        # Sets still find it, and the index ignores it. When most are removed ones, start over.
        self.removed += self.patterns.pop(number, None) is not None
        if self.removed > len(self.patterns) + SET_PATTERNS_MAX:
            with self._gathering:
                self.fresh, self.sets, self.removed = list(self.patterns), [], 0
                self._gather()

    @property
    def bytes(self) -> int:
        """Return the estimated memory: RE2 does not report it."""
        chars = sum(len(regexp.pattern) for regexp in self.patterns.values())
        # Parsing a filter compiles its pattern alone, and the process keeps the most recent of these.
        alone = min(1.0, COMPILED_MAX / max(1, len(self.patterns)))
        sets = sum(part.chars for part in self.sets) * SET_CHAR_BYTES
        return sets + int(alone * chars * PATTERN_CHAR_BYTES) + len(self.patterns) * ENTRY_BYTES

    def found(self, text: str) -> frozenset[int]:
        """Return the numbers of the patterns that occur in the text; short texts are cached."""
        known = self.texts.get(text)
        if known is None:
            known = frozenset(self.search(text, 0))
            if len(self.texts) >= TEXTS_MAX:
                self.texts.clear()
            if len(text) <= TEXT_CHARS_MAX:
                self.texts[text] = known
        return known

    def search(self, text: str, start: int) -> list[int]:
        with self._gathering:
            sets, fresh = tuple(self.sets), self.fresh
        text = well_formed(text)
        found = [number for part in sets if part.last >= start for number in part.search(text)]
        fresh = fresh[bisect_left(fresh, start) :]
        return [n for n in found if n >= start] + [n for n in fresh if self._found(n, text)]

    def _found(self, number: int, text: str) -> bool:
        regexp = self.patterns.get(number)
        return regexp is not None and found_in(regexp, text)

    def _gather(self) -> None:
        """
        Put the fresh patterns into sets; a set that is not larger than what is new is built anew with it.

        So a pattern is compiled again only when its set doubles: about five times until the set is full.
        """
        numbers = self.fresh
        while self.sets and self.sets[-1].has_space and len(self.sets[-1].numbers) <= len(numbers):
            numbers = self.sets.pop().numbers + numbers
        group: list[tuple[int, Regexp]] = []
        chars = 0
        for number in numbers:
            regexp = self.patterns.get(number)
            if regexp is None:
                continue
            if len(group) == SET_PATTERNS_MAX or (
                group and chars + len(regexp.pattern) > SET_CHARS_MAX
            ):
                self.sets.append(_Set(group))
                group, chars = [], 0
            group.append((number, regexp))
            chars += len(regexp.pattern)
        if group:
            self.sets.append(_Set(group))
        self.fresh = []


class _Set:
    def __init__(self, group: list[tuple[int, Regexp]]) -> None:
        import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra, present where patterns were parsed

        self.group = group
        self.numbers = [number for number, _ in group]
        self.last = self.numbers[-1]
        self.chars = sum(len(regexp.pattern) for _, regexp in group)
        self.has_space = len(group) <= SET_PATTERNS_MAX // 2
        options = re2.Options()
        options.log_errors = False
        options.never_capture = True
        options.max_mem = SET_MEMORY_MAX
        self._set: Any = re2.Set.SearchSet(options)
        try:
            for _, regexp in group:
                pattern = well_formed(regexp.pattern)
                self._set.Add(f"(?{regexp.flags}){pattern}" if regexp.flags else pattern)
            self._always = len(group)
            self._set.Add("")
            self._set.Compile()
        except re2.error:
            self._set = None

    def search(self, text: str) -> list[int]:
        found = self._set.Match(text) if self._set is not None else []
        if self._set is None or self._always not in found:
            return [number for number, regexp in self.group if found_in(regexp, text)]
        return [self.numbers[i] for i in found if i != self._always]
