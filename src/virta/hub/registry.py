"""
Registrations that are stored: filters by (index, collection), and subscriptions with a sink.

They have a small log of their own beside that of the events, so that retention of events removes no registration
and a start reads no history. A record's topic is the kind of registration, its key the id, its value the JSON; an empty
value removes it.

A filter on (index, collection) applies to the channel `index/collection`: Koncorde's filters to the data of its events,
those of the other dialects to the events.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

import virta.log
from virta import files
from virta.errors import FilterError, HubError, LogError
from virta.event import document_of
from virta.filters import Filter, parse
from virta.hub.event_matcher import DOCUMENT, root_of
from virta.log.group_commit import LOCK_S_MAX
from virta.match import NamedMatchers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.log import Log

logger = logging.getLogger("virta.hub")

FILTERS_TOPIC = b"filters"
SUBSCRIPTIONS_TOPIC = b"subscriptions"  # a CloudEvents Subscription, as its owner gave it
CURSORS_TOPIC = b"cursors"  # key: subscription id, value: the next offset it reads
REGISTERED_MAX = 1_000_000
# With more records that were replaced or removed, the log is compacted at start.
DEAD_RECORDS_MAX = 10_000
# Changes of one filter are serialised; those of others run at once, so that they share their syncs.
LOCKS = 64


@dataclass(frozen=True)
class Registered:
    """A filter with its index and collection."""

    id: str
    index: str
    collection: str
    dialect: str
    source: Any  # the filter as it was given
    filter: Filter
    owner: str = ""  # the principal that registered it; empty in records of older versions

    @property
    def channel(self) -> str:
        return f"{self.index}/{self.collection}"

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "index": self.index,
            "collection": self.collection,
            "dialect": self.dialect,
            "filter": self.source,
        }


class Registry:
    """Filters by id, and by index and collection. Methods that write block on the disk: call them in a thread."""

    def __init__(self, path: Path, *, open_log: Callable[..., Log] = virta.log.open) -> None:
        # Subscriptions contain secrets of their sinks.
        _keep_private(path)
        self._log = open_log(path, lock_timeout=LOCK_S_MAX)
        self._filters: dict[str, Registered] = {}
        self._locks = [threading.Lock() for _ in range(LOCKS)]
        self._documents = NamedMatchers()
        self._events = NamedMatchers()
        self.subscriptions: dict[str, dict[str, Any]] = {}
        self.cursors: dict[str, int] = {}
        dead = 0
        with self._log.read() as reader:
            for record in reader:
                dead += not self._load(record)
        if dead > DEAD_RECORDS_MAX:
            self._log.compact()

    def close(self) -> None:
        self._log.close()

    # Filters.

    def register(
        self,
        index: str,
        collection: str,
        source: Any,
        dialect: str,
        *,
        owner: str = "",
        filter_: Filter | None = None,
    ) -> dict[str, Any]:
        """
        Register a filter; return its id and a `diff`, which is False if it was registered before.

        Arguments:
            owner: the id of the principal whose filter it is.
            filter_: the source, if it is parsed already.

        Raises:
            FilterError: the filter or a name is invalid.
            HubError: there are too many.
        """
        for name in (index, collection):
            if "/" in name:
                raise FilterError(
                    f"{name!r} holds a slash: names of indexes have none", code="bad_name"
                )
        if filter_ is None:
            filter_ = parse(source, dialect)
        if len(self._filters) >= REGISTERED_MAX:
            raise HubError(
                f"{REGISTERED_MAX} filters are registered: no more are taken",
                code="too-many-filters",
            )
        with self._lock(index, collection, filter_):
            answer = self._matchers(filter_).register(index, collection, filter_)
            id_ = str(answer["id"])
            if answer["diff"] is False:
                return answer
            registered = Registered(id_, index, collection, dialect, source, filter_, owner)
            value = msgspec.json.encode(registered.describe() | {"owner": owner})
            try:
                self._log.append(FILTERS_TOPIC, id_, value)
            except LogError:
                self._matchers(filter_).remove(id_)
                raise
            self._filters[id_] = registered
        return answer

    def remove(self, id_: str) -> bool:
        """Remove a filter; return False if there is none."""
        registered = self._filters.get(id_)
        if registered is None:
            return False
        with self._lock(registered.index, registered.collection, registered.filter):
            if self._filters.get(id_) is not registered:
                return False  # another thread removed it
            self._log.append(FILTERS_TOPIC, id_, b"")
            self._forget(registered)
        return True

    def _lock(self, index: str, collection: str, filter_: Filter) -> threading.Lock:
        return self._locks[hash((index, collection, filter_.id)) % LOCKS]

    def get(self, id_: str) -> Registered | None:
        return self._filters.get(id_)

    def find(self, index: str, collection: str, filter_: Filter) -> str | None:
        """Return the id of a filter that is registered there, None if it is not."""
        return self._matchers(filter_).find(index, collection, filter_)

    def filters(self) -> list[Registered]:
        """Return all registered filters."""
        return list(self._filters.values())

    def exists(self, index: str, collection: str) -> bool:
        return self._documents.exists(index, collection) or self._events.exists(index, collection)

    def ids(self, index: str, collection: str) -> list[str]:
        return [
            *self._documents.get_filter_ids(index, collection),
            *self._events.get_filter_ids(index, collection),
        ]

    def __len__(self) -> int:
        return len(self._filters)

    def test_document(
        self, index: str, collection: str, document: Any, document_id: str | None
    ) -> list[str]:
        """Return the ids of filters that match a document; filters over events see it as an event's data."""
        found = self._documents.test(index, collection, document, document_id)
        wrapped: dict[str, Any] = {"data": document}
        if document_id:
            wrapped["subject"] = document_id
        return found + self._events.test(index, collection, wrapped)

    def test_event(self, index: str, collection: str, event: dict[str, Any]) -> list[str]:
        """Return the ids of filters that match an event of the channel."""
        id_ = event.get("id")
        if isinstance(id_, int | float) and not isinstance(id_, bool):
            event = event | {"id": str(id_)}
        value = msgspec.json.encode(event)
        document = msgspec.json.decode(document_of(value, str(event.get("id", ""))))
        found = self._documents.test(index, collection, document)
        return found + self._events.test(index, collection, event)

    # Subscriptions.

    def keep_subscription(self, id_: str, subscription: dict[str, Any]) -> None:
        """Store a subscription."""
        self._log.append(SUBSCRIPTIONS_TOPIC, id_, msgspec.json.encode(subscription))
        self.subscriptions[id_] = subscription

    def drop_subscription(self, id_: str) -> None:
        """Remove a subscription and its cursor."""
        self._log.append_many([(SUBSCRIPTIONS_TOPIC, id_, b""), (CURSORS_TOPIC, id_, b"")])
        self.subscriptions.pop(id_, None)
        self.cursors.pop(id_, None)

    def keep_cursor(self, id_: str, offset: int) -> None:
        """Store the next offset of a subscription; not synced, since a few events may be sent again."""
        self._log.append(CURSORS_TOPIC, id_, b"%d" % offset, durability="none")
        self.cursors[id_] = offset

    # Starting.

    def _load(self, record: virta.log.Record) -> bool:
        """Apply a stored record; return False if it removes or replaces another."""
        id_, value = str(record.key), bytes(record.value)
        if record.topic == FILTERS_TOPIC:
            return self._load_filter(value, id_)
        if record.topic == SUBSCRIPTIONS_TOPIC:
            self.subscriptions.pop(id_, None)
            if value:
                self.subscriptions[id_] = msgspec.json.decode(value)
            return bool(value)
        known = self.cursors.pop(id_, None)
        if value:
            self.cursors[id_] = int(value)
        return known is None

    def _load_filter(self, value: bytes, id_: str) -> bool:
        if not value:
            registered = self._filters.get(id_)
            if registered is not None:
                self._forget(registered)
            return False
        stored = msgspec.json.decode(value)
        try:
            filter_ = parse(stored["filter"], stored["dialect"])
        except FilterError as error:
            # It was valid in an older version: the server starts without it, and the record stays.
            logger.warning("filter_unreadable id=%s: %s", id_, error.message)
            return True
        index, collection = stored["index"], stored["collection"]
        answer = self._matchers(filter_).register(index, collection, filter_)
        # The id that clients got.
        registered = Registered(
            str(answer["id"]),
            index,
            collection,
            stored["dialect"],
            stored["filter"],
            filter_,
            stored.get("owner", ""),
        )
        self._filters[registered.id] = registered
        return True

    def _forget(self, registered: Registered) -> None:
        del self._filters[registered.id]
        self._matchers(registered.filter).remove(registered.id)

    def _matchers(self, filter_: Filter) -> NamedMatchers:
        return self._documents if root_of(filter_) == DOCUMENT else self._events


def _keep_private(path: Path) -> None:
    """Let only the owner read the directory of the registry and its files."""
    files.make_directory(path)
    # If another user owns the directory, that user decides.
    with contextlib.suppress(PermissionError):
        path.chmod(files.PRIVATE_DIRECTORY)
        for file in path.iterdir():
            if file.is_file():
                file.chmod(files.PRIVATE_FILE)
