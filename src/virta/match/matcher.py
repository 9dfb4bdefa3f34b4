"""
Which of many filters hold for an event.

A matcher is a set of filters with counts: equal filters (equal canonical form, whatever the dialect) share
one id and one entry in the index, and a filter stays until it is removed as often as it was added.
All methods may be called from any thread; filters can be added and removed during matching.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from virta.filters import Filter, parse
from virta.match.compile import Compiled, compile_filter
from virta.match.engine import MatchEngine, make_engine
from virta.match.events import too_deep

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Matcher:
    """
    An index over filters.

    Arguments:
        engine: "native", "plain", or "auto": native if it is built; or an engine that has filters already.
    """

    def __init__(self, *, engine: str | MatchEngine = "auto") -> None:
        self._engine = make_engine(engine) if isinstance(engine, str) else engine

    @property
    def engine(self) -> str:
        """Return the engine in use: native or plain."""
        return self._engine.name

    # The set of filters.

    def add(self, filter_: Filter | Compiled) -> str:
        """Add a filter, or count it once more; returns its id."""
        compiled = filter_ if isinstance(filter_, Compiled) else compile_filter(filter_)
        self._engine.add(compiled)
        return compiled.id

    def add_many(self, filters: Iterable[Filter | Compiled]) -> list[str]:
        """Add filters; returns their ids in order."""
        return [self.add(filter_) for filter_ in filters]

    def remove(self, id_: str) -> bool:
        """Undo one `add`; return False, not an error, if there is no such filter."""
        return self._engine.remove(id_) >= 0

    @staticmethod
    def validate(source: Any, dialect: str = "query-string") -> str:
        """Return the id that a filter would have, without adding it; raise FilterError if it is invalid."""
        return compile_filter(source if isinstance(source, Filter) else parse(source, dialect)).id

    def __len__(self) -> int:
        return len(self._engine)

    def __contains__(self, id_: object) -> bool:
        return isinstance(id_, str) and self._engine.find(id_) > 0

    def ids(self) -> list[str]:
        """Return the ids of all filters, in no order."""
        return self._engine.ids()

    # Matching.

    def match(self, event: Any) -> list[str]:
        """
        Return the ids of the filters that hold for an event (an object, or JSON as bytes or text), in no order.

        Raises EventError for bytes that are no JSON.
        """
        try:
            return self._engine.match(_plain(event))
        except RecursionError as exc:
            raise too_deep() from exc

    @overload
    def match_many(self, events: Any, output: Literal["ids"] = "ids") -> list[list[str]]: ...
    @overload
    def match_many(
        self, events: Any, output: Literal["uint32"]
    ) -> tuple[memoryview[int], memoryview[int]]: ...

    def match_many(self, events: Any, output: str = "ids") -> Any:
        """
        Match a list of objects, a list of JSON bytes, or one buffer with a JSON event a line.

        With output "ids", return a list of ids for each event. With "uint32", return two arrays: the numbers of
        the filters (see `id_of`) and offsets; event i has numbers[offsets[i]:offsets[i+1]]. The native engine
        matches bytes without the GIL.

        Raises EventError, naming the event, for bytes that are no JSON.
        """
        if output not in ("ids", "uint32"):
            raise ValueError(f"unknown output {output!r}: expected ids or uint32")
        if isinstance(events, str):
            events = events.encode("utf-8", "surrogatepass")
        elif not isinstance(events, bytes | bytearray | memoryview):
            events = [_plain(event) for event in events] if _odd(events) else events
        try:
            found = self._engine.match_many(events, numbers=output == "uint32")
        except RecursionError as exc:
            raise too_deep() from exc
        if output != "uint32":
            return found
        # No hits come as None: an empty array has no address.
        return tuple(memoryview(part or b"").cast("I") for part in found)

    def match_flat(self, ends: Any, texts: Any) -> tuple[memoryview[int], memoryview[int]]:
        """
        Match JSON texts concatenated in one buffer, as in an Arrow array: text i is
        texts[ends[i]:ends[i+1]], and `ends` are int32.

        Return two arrays: for each hit the position of the text and the number of the filter. A text that is
        not JSON has no hits.
        """
        rows, numbers = self._engine.match_flat(ends, texts)
        return memoryview(rows or b"").cast("i"), memoryview(numbers or b"").cast("I")

    def id_of(self, number: int) -> str | None:
        """Return the id of a filter's number; numbers are reused some time after their filter was removed."""
        return self._engine.id(number)

    def number_of(self, id_: str) -> int | None:
        """Return the number of a filter, as `match_many` gives it."""
        return self._engine.find(id_) or None

    def stats(self) -> dict[str, Any]:
        """Return sizes of the index: filters, conjunctions, paths, buckets, bytes, and bytes a filter."""
        stats: dict[str, Any] = {"engine": self.engine, **self._engine.stats()}
        total = sum(size for name, size in stats.items() if name.startswith("bytes_"))
        stats["bytes"] = total
        stats["bytes_per_filter"] = round(total / max(1, stats["filters"]), 1)
        return stats


def _odd(events: Sequence[Any]) -> bool:
    return any(isinstance(event, str | bytearray | memoryview) for event in events)


def _plain(event: Any) -> Any:
    """Return JSON texts and buffers as bytes, objects unchanged."""
    if isinstance(event, str):
        return event.encode("utf-8", "surrogatepass")
    return bytes(event) if isinstance(event, bytearray | memoryview) else event
