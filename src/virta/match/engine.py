"""
Two engines behind one interface, and the choice between them.

`native` is the C++ core: it reads JSON bytes without making Python objects, releases the GIL meanwhile, and is
at least thirty times as fast. `plain` needs only Python. Both give the same answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from virta.errors import EventError
from virta.filters.cesql.values import attribute_text
from virta.filters.evaluate import condition_holds
from virta.filters.geo import read_point
from virta.filters.text import text_of
from virta.match.events import parse_event
from virta.match.pattern_sets import PatternSets
from virta.match.plain import PlainEngine
from virta.native import load

if TYPE_CHECKING:
    from typing import IO

    from virta.filters.tree import Condition
    from virta.match import _core
    from virta.match.compile import Compiled
    from virta.match.image import Programs

ENGINES = ("auto", "native", "plain")
# What the native engine may ask Python for.
PYTHON_CALLS = ("regexp", "condition", "point", "attribute", "case", "text", "event")


class MatchEngine(Protocol):
    """An index over compiled filters; every method may be called from any thread at any time."""

    @property
    def name(self) -> str: ...
    def add(self, compiled: Compiled) -> int:
        """Add a filter, or count it once more; return its number, from 1."""

    def remove(self, id_: str) -> int:
        """Decrement the filter's count; return what is left, -1 if there was no such filter."""

    def find(self, id_: str) -> int:
        """Return the filter's number, or 0."""

    def count(self, id_: str) -> int:
        """Return how often the filter was added and not removed, 0 if there is no such filter."""

    def id(self, number: int) -> str | None: ...
    def ids(self) -> list[str]: ...
    def match(self, event: Any) -> list[str]:
        """Return the ids of the filters that hold for an object or JSON bytes."""

    def match_many(self, events: Any, *, numbers: bool) -> Any:
        """Return a list of ids for each event; with `numbers` the bytes of uint32 numbers and offsets."""

    def match_flat(self, ends: Any, texts: Any) -> tuple[bytes, bytes]:
        """Return rows (int32) and numbers (uint32) of all hits in concatenated JSON texts; invalid JSON has none."""

    def match_members(
        self, texts: list[bytes], names: tuple[str, ...]
    ) -> list[tuple[Any, ...] | None]:
        """Return for each JSON text how many filters hold and the texts of members; None for what it does not read."""

    def stats(self) -> dict[str, int]:
        """Return counts of filters by how events find them, sizes, and memory by part (bytes_…)."""

    def __len__(self) -> int: ...


class NativeEngine:
    """The C++ core; it calls back into Python for patterns, points and opaque conditions."""

    name = "native"

    def __init__(self) -> None:
        core = load("virta.match._core")
        if core is None:
            raise ImportError(
                "the native engine is not built (no compiler when virta was installed?) or VIRTA_PLAIN=1 is set; "
                "engine='plain' needs neither"
            )
        self._patterns = patterns = PatternSets()
        self.index: _core.Index = core.Index(
            search=patterns.search,
            patterns=patterns.change,
            point=read_point,
            holds=condition_holds,
            parse=parse_event,
            attribute=attribute_text,
            text=text_of,
        )
        self.id = self.index.id
        self.ids = self.index.ids
        self.match = self.index.match
        self.match_members = self.index.match_members

    def add(self, compiled: Compiled) -> int:
        program, opaques = compiled.encoded
        # The index shares the text of the id, so that the first event that finds many filters makes none.
        return self.index.add(compiled.id, program, opaques)

    def remove(self, id_: str) -> int:
        digest = _digest(id_)
        return -1 if digest is None else self.index.remove(digest)

    def find(self, id_: str) -> int:
        digest = _digest(id_)
        return 0 if digest is None else self.index.find(digest)

    def count(self, id_: str) -> int:
        digest = _digest(id_)
        return 0 if digest is None else self.index.count(digest)

    def match_many(self, events: Any, *, numbers: bool) -> Any:
        return self.index.match_many(events, numbers)

    def match_flat(self, ends: Any, texts: Any) -> tuple[bytes, bytes]:
        return self.index.match_flat(ends, texts, (EventError, RecursionError))

    def stats(self) -> dict[str, int]:
        return {**self.index.stats(), "bytes_patterns": self._patterns.bytes}

    def __len__(self) -> int:
        return len(self.index)

    # Whole filter sets and their images (virta.match.image).

    def add_programs(self, programs: Programs) -> None:
        self.index.add_flat(
            programs.digests, programs.ends, programs.programs, dict(programs.opaques)
        )

    def conditions(self) -> tuple[Condition, ...]:
        """Return the opaque conditions in the order of their numbers."""
        return self.index.conditions()

    def begin_image(self, number: int) -> bool:
        return self.index.begin_image(number)

    def save_image(self, file: IO[bytes], mark: bytes) -> None:
        self.index.save(file, mark)

    def open_image(
        self, file: IO[bytes], mark: bytes, conditions: tuple[Condition, ...]
    ) -> bool | None:
        """Return whether the image could be mapped; None if the file is no image with this mark."""
        return self.index.open(file, mark, conditions)


def _digest(id_: str) -> bytes | None:
    """Return the bytes of an id, None for a text that cannot be one."""
    try:
        digest = bytes.fromhex(id_)
    except ValueError:
        return None
    return digest if len(digest) == 32 and digest.hex() == id_ else None


def make_engine(name: str) -> MatchEngine:
    """Return the engine of that name; `auto` is the native one where it was built."""
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}: expected one of {', '.join(ENGINES)}")
    if name == "plain":
        return PlainEngine()
    try:
        return NativeEngine()
    except ImportError:
        if name == "native":
            raise
        return PlainEngine()


def python_calls() -> dict[str, int]:
    """
    Return how often the native engine asked Python in this process, by what for; the plain engine is not counted.

    regexp: a text that was not searched before. condition: one that only Python evaluates. point, attribute, text: the
    form of a value. case: LOWER or UPPER beyond ASCII. event: JSON that the core leaves to Python.
    """
    core = load("virta.match._core")
    return dict.fromkeys(PYTHON_CALLS, 0) if core is None else core.python_calls()
