"""
Matchers by (index, collection), as a document database registers filters.

An id here names a filter *in its place*: the same filter registered in two collections has two ids, so
`remove` needs no more than the id. Registering an equal filter again changes nothing and one `remove`
takes it away, however often it was registered.
"""

from __future__ import annotations

import hashlib
import json
import threading
from typing import TYPE_CHECKING, Any

from virta.errors import FilterError
from virta.filters import Filter, parse
from virta.match.compile import compile_filter
from virta.match.matcher import Matcher

if TYPE_CHECKING:
    from virta.match.compile import Compiled

NAME_CHARS_MAX = 256


class NamedMatchers:
    """
    Matchers by index and collection.

    Arguments:
        dialect: the dialect of `register` and `validate`.
        engine: as for `Matcher`.
    """

    def __init__(self, *, dialect: str = "koncorde", engine: str = "auto") -> None:
        self._dialect = dialect
        self._engine = engine
        self._lock = threading.Lock()
        self._matchers: dict[tuple[str, str], Matcher] = {}
        self._places: dict[
            str, tuple[tuple[str, str], str]
        ] = {}  # id -> place and the filter's own id
        self._ids: dict[tuple[str, str], dict[str, str]] = {}  # place -> the filter's own id -> id

    def exists(self, index: str, collection: str) -> bool:
        """Return whether some filter is registered there."""
        return (index, collection) in self._matchers

    def get_filter_ids(self, index: str, collection: str) -> list[str]:
        """Return the ids registered there, in the order of their registration."""
        with self._lock:
            return list(self._ids.get((index, collection), {}).values())

    def get_indexes(self) -> list[str]:
        """Return the names of the indexes that have filters."""
        with self._lock:
            return list(dict.fromkeys(index for index, _ in self._matchers))

    def get_collections(self, index: str) -> list[str]:
        """Return the names of an index's collections that have filters."""
        with self._lock:
            return [collection for name, collection in self._matchers if name == index]

    def has_filter(self, id_: str) -> bool:
        return id_ in self._places

    def find(self, index: str, collection: str, filter_: Filter) -> str | None:
        """Return the id under which a filter is registered there, None if it is not."""
        with self._lock:
            return self._ids.get((index, collection), {}).get(filter_.id)

    def register(self, index: str, collection: str, filter_: Any) -> dict[str, Any]:
        """
        Register a filter; returns its `id`, and `diff`: False when it was there, otherwise what is new.

        Raises FilterError for what is no filter, or no name.
        """
        place = (_name(index, "index"), _name(collection, "collection"))
        parsed = self._parse(filter_)
        compiled = compile_filter(parsed)
        with self._lock:
            known = self._ids.get(place, {}).get(compiled.id)
            if known is not None:
                return {"id": known, "diff": False}
            id_ = self._add(place, compiled)
        form = json.loads(parsed.canonical())
        diff = {"id": id_, "index": index, "collection": collection, "filter": form}
        return {"id": id_, "diff": diff}

    def _add(self, place: tuple[str, str], compiled: Compiled) -> str:
        id_ = hashlib.sha256(json.dumps([*place, compiled.id]).encode()).hexdigest()
        if place not in self._matchers:
            self._matchers[place] = Matcher(engine=self._engine)
            self._ids[place] = {}
        self._matchers[place].add(compiled)
        self._ids[place][compiled.id] = id_
        self._places[id_] = (place, compiled.id)
        return id_

    def remove(self, id_: str) -> bool:
        """Remove a filter; False when there is none, which is no error."""
        with self._lock:
            if id_ not in self._places:
                return False
            place, own = self._places.pop(id_)
            self._matchers[place].remove(own)
            del self._ids[place][own]
            if not self._ids[place]:
                del self._ids[place], self._matchers[place]
            return True

    def test(
        self, index: str, collection: str, document: Any, document_id: str | None = None
    ) -> list[str]:
        """
        Return ids of the filters that the document satisfies.

        A `document_id` stands in the document as `_id`, in place of one it may have.

        Raises:
            EventError: for what is no document.
            FilterError: for an id that is no text, or with a document that is no object.
        """
        with self._lock:
            matcher = self._matchers.get((index, collection))
            names = self._ids.get((index, collection), {})
        if document_id is not None and not isinstance(document_id, str):
            raise FilterError(f"a document's id is a text, got {type(document_id).__name__}")
        if matcher is None:
            _NO_FILTERS.match(document)  # for its error
            return []
        if document_id:
            if not isinstance(document, dict):
                raise FilterError(
                    f"a document with an id is an object, got {type(document).__name__}"
                )
            document = {**document, "_id": document_id}
        matched = matcher.match(document)
        # A filter removed meanwhile has no name any more.
        return [names[own] for own in matched if own in names]

    def validate(self, filter_: Any) -> None:
        """FilterError if `register` would refuse it."""
        compile_filter(self._parse(filter_))

    def _parse(self, filter_: Any) -> Filter:
        return filter_ if isinstance(filter_, Filter) else parse(filter_, self._dialect)


# Documents are checked also where nothing is registered.
_NO_FILTERS = Matcher(engine="plain")


def _name(name: Any, what: str) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise FilterError(
            f"{what} {name!r}: expected a text of 1 to {NAME_CHARS_MAX} characters", code="bad_name"
        )
    return name
