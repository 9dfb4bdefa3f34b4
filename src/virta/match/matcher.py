"""
Which of many filters hold for an event.

A matcher is a set of filters with counts: equal filters (equal canonical form, whatever the dialect) share
one entry in the index. A filter added without a name is known by the id of its canonical form and stays until it
is removed as often as it was added; one added under a name is known by that name, and any number of names may be
on one filter. All methods may be called from any thread; filters can be added and removed during matching.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

from virta.errors import EventError, FilterError
from virta.filters import Filter
from virta.match.compile import Compiled, compile_filter, compile_source
from virta.match.engine import MatchEngine, make_engine
from virta.match.events import too_deep
from virta.match.names import (
    Match,
    NamedFilter,
    Names,
    check_id,
    check_limit,
    check_metadata,
    check_name,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# What Matcher.add accepts besides sources.
_READY = (Filter, Compiled)
# What Matcher.match takes as an event, other than JSON texts.
_OBJECTS = (dict, list, tuple)


class Matcher:
    """
    An index over filters.

    Arguments:
        engine: "native", "plain", or "auto": native if it is built; or an engine that has filters already.
    """

    def __init__(self, *, engine: str | MatchEngine = "auto") -> None:
        self._engine = make_engine(engine) if isinstance(engine, str) else engine
        self._names = Names()
        self._source_engine = "plain" if self._engine.name == "plain" else "auto"

    @property
    def engine(self) -> str:
        """Return the engine in use: native or plain."""
        return self._engine.name

    # The set of filters.

    def add(
        self,
        filter_: Filter | Compiled | str | bytes | dict[str, Any] | list[Any],
        *,
        dialect: str = "query-string",
        id: str | None = None,  # noqa: A002 - the word that users say
        payload: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """
        Add a filter, or count it once more; return the id under which it matches.

        `filter_` is a filter, or the text or object of one in `dialect`. With an `id` the filter is known by that
        name, with a `payload` and `metadata`; a name in use is replaced. Without one the id is the filter's own.

        Raises:
            FilterError: for what is no filter, or no name.
        """
        compiled = self._compiled(filter_, dialect)
        if id is None:
            if payload is not None or metadata is not None:
                raise FilterError(
                    "payload and metadata need an id: add(filter, id=…)", code="bad_name"
                )
            return self._add_unnamed(filter_, compiled)
        one = NamedFilter(
            check_name(id), compiled.id, payload, check_metadata(metadata), compiled.canonical
        )
        self._add_named(one, compiled)
        return one.id

    def _add_unnamed(self, filter_: Any, compiled: Compiled) -> str:
        id_, names = compiled.id, self._names
        with names.lock:
            self._engine.add(compiled)
            if id_ in names.owners:
                names.shared.add(id_)
            if not isinstance(filter_, _READY):
                names.forms[id_] = compiled.canonical
        return id_

    def _compiled(self, filter_: Any, dialect: str) -> Compiled:
        if isinstance(filter_, Compiled):
            return filter_
        if isinstance(filter_, Filter):
            return compile_filter(filter_)
        # The plain index works on trees, which the native compiler does not make.
        return compile_source(filter_, dialect, engine=self._source_engine)

    def _add_named(self, one: NamedFilter, compiled: Compiled) -> None:
        with self._names.lock:
            known = self._engine.find(compiled.id) > 0
            self._engine.add(compiled)
            self._names.forms[compiled.id] = compiled.canonical
            replaced = self._names.put(one, known=known)
            if replaced is not None:
                self._drop(replaced.filter_id)

    def add_many(self, filters: Iterable[Any], *, dialect: str = "query-string") -> list[str]:
        """Add filters without names; return their ids in order. Raise FilterError for what is no list of filters."""
        if isinstance(filters, str | bytes | dict) or not isinstance(filters, Iterable):
            raise FilterError(
                f"filters are a list or another iterable, got {type(filters).__name__} {filters!r:.80}; `add` takes one"
            )
        add, compile_one = self._add_unnamed, self._compiled
        return [add(filter_, compile_one(filter_, dialect)) for filter_ in filters]

    def remove(self, id_: str) -> bool:
        """
        Remove a name, or undo one `add` without a name; return False, not an error, if there is no such id.

        Raises:
            FilterError: for an id that is no text.
        """
        check_id(id_)
        with self._names.lock:
            named = self._names.pop(id_)
            if named is not None:
                self._drop(named.filter_id)
                return True
            if not self._names.has_unnamed(id_):
                return False
            left = self._drop(id_)
            if left == len(self._names.owners.get(id_, ())):
                self._names.shared.discard(id_)
            return left >= 0

    def _drop(self, filter_id: str) -> int:
        left = self._engine.remove(filter_id)
        if left == 0:
            self._names.forms.pop(filter_id, None)
        return left

    def get(self, id_: str) -> NamedFilter | None:
        """Return what was added under a name or id, None if there is no such filter; raise FilterError for no text."""
        found = self._names.named.get(check_id(id_))
        if found is not None or id_ not in self:
            return found
        return NamedFilter(id_, id_, canonical=self._names.forms.get(id_))

    @staticmethod
    def validate(source: Any, dialect: str = "query-string") -> str:
        """Return the id that a filter would have, without adding it; raise FilterError if it is invalid."""
        if isinstance(source, Filter):
            return source.id
        return compile_source(source, dialect).id

    def __len__(self) -> int:
        return len(self._engine)

    def __contains__(self, id_: object) -> bool:
        if not isinstance(id_, str):
            return False
        if id_ in self._names.named:
            return True
        return self._engine.find(id_) > 0 and self._names.has_unnamed(id_)

    def ids(self) -> list[str]:
        """Return the ids of all filters, in no order; names are in `names`."""
        return self._engine.ids()

    def names(self) -> list[str]:
        """Return all names, in the order in which they were first added."""
        return list(self._names.named)

    # Matching.

    @overload
    def match(
        self,
        event: Any,
        *,
        where: Mapping[str, Any] | None = ...,
        limit: int | None = ...,
        why: Literal[False] = ...,
    ) -> list[str]: ...
    @overload
    def match(
        self,
        event: Any,
        *,
        where: Mapping[str, Any] | None = ...,
        limit: int | None = ...,
        why: Literal[True],
    ) -> list[Match]: ...

    def match(
        self,
        event: Any,
        *,
        where: Mapping[str, Any] | None = None,
        limit: int | None = None,
        why: bool = False,
    ) -> Any:
        """
        Return the ids of the filters that hold for an event (an object, or JSON as bytes or text), in no order.

        `where` restricts the answer to names whose metadata has these members, `limit` its length. With `why`,
        return `Match` values, which have the payload and the conditions that decided.

        Raises:
            EventError: for bytes that are no JSON, and for what is no event.
            FilterError: for a `where` that is no object of scalars.
            ValueError: for a `limit` that is no number from 0.
        """
        if event.__class__ is not bytes and event.__class__ is not dict:
            event = _plain(event)
        try:
            found = self._engine.match(event)
        except RecursionError as exc:
            raise too_deep() from exc
        if where is None and limit is None and not why:
            return self._names.expand(found) if self._names.named else found
        check_limit(limit)
        entries = self._names.select(found, check_metadata(where, "where"), limit)
        if not why:
            return [id_ for id_, _, _ in entries]
        return self._explained(event, entries)

    def _explained(self, event: Any, entries: Iterable[tuple[str, str, Any]]) -> list[Match]:
        from virta.match.events import parse_event  # noqa: PLC0415 - rarely needed
        from virta.match.saved import read_filter  # noqa: PLC0415

        value = parse_event(event) if isinstance(event, bytes) else event
        reasons: dict[str, list[str]] = {}
        matches = []
        for id_, filter_id, named in entries:
            if filter_id not in reasons:
                form = self._names.forms.get(filter_id)
                reasons[filter_id] = read_filter(form).explain(value).reasons if form else []
            payload = None if named is None else named.payload
            matches.append(Match(id_, filter_id, payload, reasons[filter_id]))
        return matches

    def first(self, event: Any, *, where: Mapping[str, Any] | None = None) -> str | None:
        """Return one id of `match`, None if no filter holds."""
        return next(iter(self.match(event, where=where, limit=1)), None)

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

        Raises:
            EventError: for bytes that are no JSON and for what is no event, naming the event.
        """
        if output not in ("ids", "uint32"):
            raise ValueError(f"unknown output {output!r}: expected ids or uint32")
        if isinstance(events, str):
            events = events.encode("utf-8", "surrogatepass")
        elif not isinstance(events, bytes | bytearray | memoryview):
            if isinstance(events, dict) or not isinstance(events, Iterable):
                raise EventError(
                    f"events are a list, or one buffer of JSON lines, got {type(events).__name__} {events!r:.80}",
                    code="event_type",
                )
            events = events if isinstance(events, list | tuple) else list(events)
            events = (
                [_plain(event, i) for i, event in enumerate(events)] if _odd(events) else events
            )
        try:
            found = self._engine.match_many(events, numbers=output == "uint32")
        except RecursionError as exc:
            raise too_deep() from exc
        if output != "uint32":
            return [self._names.expand(ids) for ids in found] if self._names.named else found
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

    def match_members(
        self, texts: list[bytes], names: tuple[str, ...]
    ) -> list[tuple[Any, ...] | None]:
        """
        Return for each JSON text how many filters hold, and the text of each of these members of the event.

        The event is parsed once for both. A member that is absent or no text is None; of equal names the last
        counts. A text that is no object, has line ends, or that only Python can read is left to the caller: None
        instead of a tuple. The plain engine leaves all.

        Raises:
            EventError: from a filter that needs what Python cannot read.
        """
        try:
            return self._engine.match_members(texts, names)
        except RecursionError as exc:
            raise too_deep() from exc

    def id_of(self, number: int) -> str | None:
        """Return the id of a filter's number; numbers are reused some time after their filter was removed."""
        return self._engine.id(number)

    def number_of(self, id_: str) -> int | None:
        """Return the number of a filter, as `match_many` gives it; `id_` is its own id or one of its names."""
        named = self._names.named.get(check_id(id_))
        return self._engine.find(id_ if named is None else named.filter_id) or None

    # Files.

    def save(self, path: str | Path) -> None:
        """
        Write all names and filters to a file that `load` reads.

        Raises:
            FilterError: if a filter was added as a `Filter` without a name, or a payload is not JSON.
        """
        from virta.match.saved import save  # noqa: PLC0415 - rarely needed

        with self._names.lock:
            save(path, self._names, {id_: self._engine.count(id_) for id_ in self._engine.ids()})

    @classmethod
    def load(cls, path: str | Path, *, engine: str = "auto") -> Matcher:
        """
        Return a matcher of a file that `save` wrote.

        Raises:
            FilterError: if the file is damaged, or no such file.
        """
        from virta.match.saved import read  # noqa: PLC0415 - rarely needed

        matcher = cls(engine=engine)
        for compiled, unnamed, named in read(path):
            for _ in range(unnamed):
                matcher._engine.add(compiled)
            matcher._names.forms[compiled.id] = compiled.canonical
            for one in named:
                matcher._add_named(one, compiled)
        return matcher

    def stats(self) -> dict[str, Any]:
        """
        Return counts and sizes of the index.

        Filters are `indexed` (found by a condition), `verified` (and more is tested) or `scanned` (every event tests
        them); `python_conditions` are evaluated in Python. Memory is in bytes_…, with its sum and the bytes a filter;
        that of regular expressions and of names is an estimate.
        """
        stats: dict[str, Any] = {"engine": self.engine, **self._engine.stats()}
        stats["names"] = len(self._names.named)
        stats["bytes_names"] = self._names.bytes
        total = sum(size for name, size in stats.items() if name.startswith("bytes_"))
        stats["bytes"] = total
        stats["bytes_per_filter"] = round(total / max(1, stats["filters"]), 1)
        return stats


def _odd(events: Sequence[Any]) -> bool:
    return any(event.__class__ is not bytes and event.__class__ is not dict for event in events)


def _plain(event: Any, position: int | None = None) -> Any:
    """Return JSON texts and buffers as bytes, objects and arrays unchanged; raise EventError for others."""
    if isinstance(event, (bytes, *_OBJECTS)):
        return event
    if isinstance(event, str):
        return event.encode("utf-8", "surrogatepass")
    if isinstance(event, bytearray | memoryview):
        return bytes(event)
    which = "an event" if position is None else f"event {position}"
    raise EventError(
        f"{which} is an object (dict) or JSON (bytes or str), got {type(event).__name__} {event!r:.80}",
        code="event_type",
    )
