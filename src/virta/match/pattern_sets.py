"""
Many patterns against one text.

An index searches each new value once for all patterns of its path. Patterns are numbered by the index, in ascending
order, and gathered in RE2 sets (one automaton for many patterns):

    add ──► fresh: compiled, tried one by one ──► 32: a small set ──► eight of them: a set of 256
            ──► background thread: sets of 1,024

So adding a pattern takes a millisecond at most, matching compiles nothing, and the largest sets are built without
the GIL. A search takes a microsecond a set, whatever its size: even where the background is far behind, 5,000 patterns are
twenty sets and a few small ones. A set has a pattern that always matches: if that one is missing from a result, the automaton ran
out of memory and the set's patterns are tried one by one.

Threads search concurrently; a lock keeps them from seeing sets that are being replaced. Patterns are added and removed only
while no search runs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from bisect import bisect_left
from collections import deque
from typing import Any, Final

from virta.filters.text import COMPILED_MAX, compiled_text, well_formed

# Patterns and their characters in one set: 7 ms to build, 1 to 2 us to run.
SET_PATTERNS_MAX = 1024
SET_CHARS_MAX = 1 << 16
# The default of 8 MB makes sets of thousands of patterns a hundred times slower.
SET_MEMORY_MAX = 128 << 20
# Measured: memory for a character of a pattern in a set, and of one compiled alone; of a pattern in Python.
SET_CHAR_BYTES = 33
PATTERN_CHAR_BYTES = 110
ENTRY_BYTES = 250
# New patterns tried one by one before they become a set; their characters, so that building it takes 0.1 ms.
FRESH_MAX = 32
FRESH_CHARS_MAX = 2048
# Adjacent sets of about one size that are merged: the smallest ones by `add`, which takes 0.9 ms, others in the background.
SMALL_MERGED: Final = 8
MERGED_MIN: Final = 4
# The background releases the GIL this long after so many patterns, 0.4 ms of work, so that no other thread waits for more.
YIELD_PATTERNS: Final = FRESH_MAX * SMALL_MERGED
YIELD_S: Final = 0.0001
# Texts whose patterns the plain index remembers, a path, and how long they may be.
TEXTS_MAX = 4096
TEXT_CHARS_MAX = 1024

logger = logging.getLogger("virta.match")


class PatternSets:
    """The patterns of all paths: `change` and `search` are what the index calls."""

    def __init__(self) -> None:
        self._paths: dict[int, PathPatterns] = {}

    def change(self, node: int, number: int, text: str | None) -> None:
        """Add the pattern `text` (flags, NUL, pattern); without text remove it, or all for number -1."""
        patterns = self._paths.get(node)
        if number < 0:
            if patterns is not None:
                del self._paths[node]
                patterns.clear()
        elif text is not None:
            if patterns is None:
                patterns = self._paths[node] = PathPatterns()
            patterns.add(number, text)
        elif patterns is not None:
            patterns.remove(number)

    def search(self, node: int, text: str, start: int) -> list[int]:
        """Return the numbers, from `start` on, of the node's patterns that occur in the text."""
        patterns = self._paths.get(node)
        return patterns.search(text, start) if patterns else []

    @property
    def bytes(self) -> int:
        """Return the estimated memory of all patterns."""
        return sum(patterns.bytes for patterns in list(self._paths.values()))


class PathPatterns:
    """The patterns of one path."""

    def __init__(self) -> None:
        # Texts and no Regexps, here and in the sets: Python's garbage collector does not visit them.
        self.patterns: dict[int, str] = {}
        self.sets: list[_Set] = []  # by their numbers
        self.fresh: list[int] = []  # ascending, all above those in the sets
        self.texts: dict[str, frozenset[int]] = {}  # results for recent texts
        self.removed = 0  # numbers that sets or `fresh` still contain
        self._fresh_chars = 0
        self._programs: dict[int, Any] = {}  # of the fresh ones: no cache may drop them
        self._lock = threading.Lock()  # of `sets` and `fresh`

    def add(self, number: int, text: str) -> None:
        """Add a `pattern_text` with a number above all others, compiled now: matching never waits for it."""
        program = compiled_text(text)
        self.patterns[number] = text
        self.texts.clear()
        with self._lock:
            self.fresh = [*self.fresh, number]
            self._fresh_chars += len(text)
            self._programs[number] = program
        if len(self.fresh) >= FRESH_MAX or self._fresh_chars >= FRESH_CHARS_MAX:
            self._gather()

    def remove(self, number: int) -> None:
        # Sets still find it, and the index ignores it. When most are removed ones, the sets are built anew.
        with self._lock:
            self.removed += self.patterns.pop(number, None) is not None
        if self.removed > len(self.patterns) + SET_PATTERNS_MAX:
            BUILDER.submit(self)

    def clear(self) -> None:
        """Drop all patterns; sets are freed in the background, which takes milliseconds."""
        with self._lock:
            self.removed = len(self.patterns) + SET_PATTERNS_MAX + 1
            self.patterns, self.fresh, self._fresh_chars, self._programs = {}, [], 0, {}
        self.texts.clear()
        if self.sets:
            BUILDER.submit(self)

    @property
    def bytes(self) -> int:
        """Return the estimated memory: RE2 does not report it."""
        chars = sum(map(len, list(self.patterns.values())))
        # Parsing a filter compiles its pattern alone, and the process keeps the most recent of these.
        alone = min(1.0, COMPILED_MAX / max(1, len(self.patterns)))
        sets = sum(part.chars for part in tuple(self.sets)) * SET_CHAR_BYTES
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
        with self._lock:
            sets, fresh = tuple(self.sets), self.fresh
        text = well_formed(text)
        found = [number for part in sets if part.last >= start for number in part.search(text)]
        fresh = fresh[bisect_left(fresh, start) :]
        return [n for n in found if n >= start] + [n for n in fresh if self._matches_fresh(n, text)]

    def _matches_fresh(self, number: int, text: str) -> bool:
        program = self._programs.get(number)
        if program is None:  # it went into a set meanwhile
            pattern = self.patterns.get(number)
            return pattern is not None and compiled_text(pattern).search(text) is not None
        return program.search(text) is not None

    def _gather(self) -> None:
        """Put the fresh patterns into a set, and the newest small sets into one."""
        numbers = [n for n in self.fresh if n in self.patterns]
        made = [_Set(numbers, [self.patterns[n] for n in numbers])] if numbers else []
        with self._lock:
            self.sets = [*self.sets, *made]
            self.fresh, self._fresh_chars, self._programs = [], 0, {}
            newest = self.sets[-SMALL_MERGED:]
            small = _enough(newest) and not any(part.level or part.claimed for part in newest)
            chosen = _claimed(newest if small else [])
        if chosen:
            self._replace(chosen)
        if _mergeable(self.sets):
            BUILDER.submit(self)

    def tidy(self) -> bool:
        """Merge some sets, or leave removed patterns out of all; return False if nothing is to do."""
        with self._lock:
            sets, patterns = self.sets, self.patterns
            anew = not patterns or self.removed > len(patterns) + SET_PATTERNS_MAX
            waiting = anew and any(
                part.claimed for part in sets
            )  # an `add` is about to replace some
            chosen = _claimed([] if waiting else sets if anew else _mergeable(sets))
            removed = self.removed if anew else 0
        if chosen:
            self._replace(chosen, removed)
        elif not waiting:
            return False
        del sets
        # A search may still use some; freeing the others takes time, with the GIL.
        time.sleep(YIELD_S)
        while chosen:
            chosen.pop()
            time.sleep(YIELD_S)
        return True

    def _replace(self, chosen: list[_Set], removed: int = 0) -> None:
        """Put sets of the same patterns, without removed ones, in place of adjacent sets."""
        try:
            made = _sets_of(self.patterns, [n for part in chosen for n in part.numbers])
        except BaseException:
            for part in chosen:
                part.claimed = False
            raise
        with self._lock:
            # Meanwhile others were appended, or replaced elsewhere.
            first = self.sets.index(chosen[0])
            self.sets = [*self.sets[:first], *made, *self.sets[first + len(chosen) :]]
            self.removed -= removed


class _Set:
    def __init__(self, numbers: list[int], texts: list[str]) -> None:
        import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra, present where patterns were parsed

        self.numbers = numbers
        self.texts = texts
        self.last = numbers[-1]
        self.claimed = False  # by a thread that is about to replace it
        self.chars = sum(map(len, texts))
        options = re2.Options()
        options.log_errors = False
        options.never_capture = True
        options.max_mem = SET_MEMORY_MAX
        self._set: Any = re2.Set.SearchSet(options)
        try:
            for at, text in enumerate(texts):
                if at % YIELD_PATTERNS == YIELD_PATTERNS - 1 and len(texts) > YIELD_PATTERNS:
                    time.sleep(YIELD_S)
                flags, _, pattern = well_formed(text).partition("\0")
                self._set.Add(f"(?{flags}){pattern}" if flags else pattern)
            self._always = len(texts)
            self._set.Add("")
            self._set.Compile()  # without the GIL
        except re2.error:
            self._set = None

    @property
    def level(self) -> int:
        """Return its size in steps of four; sets of the last level are not merged."""
        size = max(len(self.numbers), self.chars * SET_PATTERNS_MAX // SET_CHARS_MAX)
        return sum(size > SET_PATTERNS_MAX >> bits for bits in (4, 2, 1))

    def search(self, text: str) -> list[int]:
        found = self._set.Match(text) if self._set is not None else []
        if self._set is None or self._always not in found:
            pairs = zip(self.numbers, self.texts, strict=True)
            return [number for number, pattern in pairs if compiled_text(pattern).search(text)]
        return [self.numbers[i] for i in found if i != self._always]


def _claimed(sets: list[_Set]) -> list[_Set]:
    """Return the sets in a list of its own, each marked as about to be replaced."""
    for part in sets:
        part.claimed = True
    return list(sets)


def _mergeable(sets: list[_Set]) -> list[_Set]:
    """Return adjacent sets of one level that fit into one set; none if they are too few."""
    run: list[_Set] = []
    patterns = chars = 0
    for part in reversed(sets):
        if part.claimed:
            if _enough(run):
                break
            run, patterns, chars = [], 0, 0
            continue
        patterns, chars = patterns + len(part.numbers), chars + part.chars
        fits = patterns <= SET_PATTERNS_MAX and chars <= SET_CHARS_MAX
        if run and (part.level != run[0].level or not fits):
            if _enough(run):
                break
            run, patterns, chars = [], len(part.numbers), part.chars
        run.append(part)
    return run[::-1] if _enough(run) else []


def _enough(run: list[_Set]) -> bool:
    # Two of the last level but one make a full set.
    return bool(run) and len(run) >= (SMALL_MERGED, MERGED_MIN, 2, SET_PATTERNS_MAX)[run[0].level]


def _sets_of(patterns: dict[int, str], numbers: list[int]) -> list[_Set]:
    """Return sets of those numbers that have a pattern still."""
    made: list[_Set] = []
    part: tuple[list[int], list[str]] = ([], [])
    chars = 0
    for number in numbers:
        text = patterns.get(number)
        if text is None:
            continue
        size = len(text)
        if part[0] and (len(part[0]) == SET_PATTERNS_MAX or chars + size > SET_CHARS_MAX):
            made.append(_Set(*part))
            part, chars = ([], []), 0
        part[0].append(number)
        part[1].append(text)
        chars += size
    return [*made, _Set(*part)] if part[0] else made


class _Builder:
    """
    A thread that merges sets while there are any to merge; it ends when there are none.

    Not a daemon: such a thread may be stopped inside RE2 at the end of the process, which aborts it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[PathPatterns] = deque()
        self.running = False

    def submit(self, patterns: PathPatterns) -> None:
        with self._lock:
            if patterns not in self._waiting:
                self._waiting.append(patterns)
            if not self.running:
                self.running = True
                threading.Thread(target=self._run, name="virta-patterns").start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or not threading.main_thread().is_alive():
                    self.running = False
                    return
                patterns = self._waiting.popleft()
            try:
                again = patterns.tidy()
            except Exception:
                logger.exception("patterns_not_merged")
                again = False
            if again:
                with self._lock:
                    self._waiting.append(patterns)


BUILDER = _Builder()
# A child has no such thread.
os.register_at_fork(after_in_child=BUILDER.__init__)  # type: ignore[misc]  # on purpose
