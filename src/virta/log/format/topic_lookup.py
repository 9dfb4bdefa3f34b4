"""
Which parts of a segment a reader of some topics has to read.

A sealed segment is looked up in its topic index. The active one has none yet: the second reader that asks for topics
has the handle fill a table in memory, which is then extended by what was appended since. Wherever there is no answer
(no index, a damaged one, too many topics) the segment is read in order.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from virta.errors import LogError
from virta.log.engine import kernel
from virta.log.format.codec import Status
from virta.log.format.directory import segment_name, topic_index_name
from virta.log.format.segment import Position, Segment
from virta.log.format.topic_index import TopicIndex, TopicIndexError
from virta.log.format.topic_table import PLACE, REPAIRS
from virta.log.limits import (
    ACTIVE_PLACES_MAX,
    ACTIVE_TABLE_BYTES_MIN,
    READ_CHUNK_BYTES,
    TOPIC_DENSE_BYTES,
    TOPIC_INDEXES_OPEN_MAX,
    TOPIC_LOOKUPS_MAX,
    TOPIC_RUN_GAP_BYTES,
)

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet
    from pathlib import Path
    from typing import Any

    from virta.log.engine.source import History
    from virta.log.format.topic_table import TopicRow

logger = logging.getLogger("virta.log")

# Byte position and size of a batch, and its base offset after that of the segment.
Place = tuple[int, int, int]


class TopicRun(NamedTuple):
    """Consecutive batches to read: bytes `pos` to `end`; `base` is the offset of the first."""

    pos: int
    end: int
    base: int


class TopicPlaces(NamedTuple):
    """All batches of some topics in one segment, and where reading continues after them."""

    base: int
    salt: int
    places: list[Place]  # in order
    after: Position  # pos -1: the segment is sealed, and `next` is the base of the following one
    path: str | None = None  # of the sealed segment's file, None if it is elsewhere

    @property
    def end(self) -> int:
        """The position after the last batch."""
        return sum(self.places[-1][:2]) if self.places else 0

    def runs(self) -> list[TopicRun]:
        """Return the batches as runs: those near each other are read in one go."""
        runs: list[TopicRun] = []
        for pos, size, offset in self.places:
            if runs and pos - runs[-1].end <= TOPIC_RUN_GAP_BYTES:
                runs[-1] = runs[-1]._replace(end=pos + size)
            else:
                runs.append(TopicRun(pos, pos + size, self.base + offset))
        return runs


class _Cached(NamedTuple):
    path: str | None
    identity: tuple[int, int, int]  # of the segment file: a replaced file has another one
    opened: TopicIndex


class TopicLookup:
    """The topic indexes of one log handle; safe to use from many threads."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._indexes: OrderedDict[int, _Cached] = OrderedDict()
        self._active = _ActiveTopics()

    def close(self) -> None:
        """Close the index files; a lookup opens them again."""
        with self._lock:
            self._indexes.clear()

    # --- sealed segments ---

    def find(
        self, base: int, topics: AbstractSet[bytes], start: int, history: History | None = None
    ) -> TopicPlaces | None:
        """Return what to read of a sealed segment from offset `start` on; None: read it in order."""
        if len(topics) > TOPIC_LOOKUPS_MAX:
            return None
        found = self._index(base, history)
        if found is None:
            return None
        path, _, index = found
        try:
            packed = [index.find(topic) for topic in topics]
            if index.repairs:
                packed.append(index.find(REPAIRS))
        except TopicIndexError as exc:
            self._refuse(base, exc)
            return None
        places = _places_from(packed, start - base, index.segment_bytes)
        if places is None:
            return None
        return TopicPlaces(base, index.salt, places, Position(-1, -1, index.next), path)

    def rows(
        self, base: int, following: int, history: History | None = None
    ) -> list[TopicRow] | None:
        """Return the counts of all topics of a sealed segment that ends before `following`, if they are known."""
        found = self._index(base, history)
        if found is None or found.opened.next != following:
            return None
        try:
            return list(found.opened.counts())
        except TopicIndexError as exc:
            self._refuse(base, exc)
            return None

    def count(
        self,
        base: int,
        following: int,
        topics: AbstractSet[bytes] | None,
        history: History | None = None,
    ) -> int | None:
        """Return how many records of the topics a sealed segment that ends before `following` has, if that is known."""
        found = self._index(base, history)
        if found is None or found.opened.next != following or found.opened.repairs:
            return None
        index = found.opened
        try:
            if topics is None:
                return index.records()
            return sum(index.records_of(topic) for topic in topics)
        except TopicIndexError as exc:
            self._refuse(base, exc)
            return None

    def _index(self, base: int, history: History | None) -> _Cached | None:
        """Return the index of a segment, from the last call if the file is still the same."""
        known = self._indexes.get(base)
        try:
            path = known.path if known is not None and known.path is not None else self._path(base)
            stat = os.stat(path)
        except OSError:
            return None if history is None else self._remote_index(base, history, known)
        identity = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if known is not None and known.identity == identity:
            return known
        if not os.path.exists(os.path.join(self._directory, topic_index_name(base))):
            return None
        try:
            with Segment(self._directory, base) as segment:
                salt, size = segment.header.salt, segment.size
            index = TopicIndex(self._directory, base, salt, size)
        except (OSError, LogError, TopicIndexError):
            return None
        return self._keep(base, _Cached(path, identity, index))

    def _remote_index(self, base: int, history: History, known: _Cached | None) -> _Cached | None:
        """Return the index of a segment that is no longer here."""
        try:
            place = history.topic_index(base)
            if place is None:
                return None
            identity = (place.salt, place.bytes, 0)
            if known is not None and known.identity == identity:
                return known
            index = TopicIndex(place.directory, base, place.salt, place.bytes)
        except TopicIndexError as exc:
            logger.warning("log_topic_index_damaged %s %020d.ptix: %s", history, base, exc)
            return None
        return self._keep(base, _Cached(None, identity, index))

    def _path(self, base: int) -> str:
        return os.path.join(self._directory, segment_name(base))

    def _keep(self, base: int, opened: _Cached) -> _Cached | None:
        if not opened.opened.complete:
            return None
        with self._lock:
            # The index opened first is closed first: with more segments than this, order of use decides little.
            self._indexes.pop(base, None)
            self._indexes[base] = opened
            while len(self._indexes) > TOPIC_INDEXES_OPEN_MAX:
                self._indexes.popitem(last=False)
        return opened

    def _refuse(self, base: int, exc: TopicIndexError) -> None:
        logger.warning("log_topic_index_damaged %s/%020d.ptix: %s", self._directory, base, exc)
        with self._lock:
            self._indexes.pop(base, None)

    # --- the active segment ---

    def find_active(
        self, segment: Segment, topics: AbstractSet[bytes], start: int, limit: int
    ) -> TopicPlaces | None:
        """Return what to read of the active segment up to about byte `limit`; None: read it in order."""
        if len(topics) > TOPIC_LOOKUPS_MAX:
            return None
        return self._active.find(segment, topics, start, limit)


class _ActiveTopics:
    """A topic table of the active segment, filled up to a position."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segment: tuple[int, int, int] | None = None
        self._table: Any = None
        self._at = Position(0, -1, 0)
        self._bytes_read = 0  # by readers of topics that had no table

    def find(
        self, segment: Segment, topics: AbstractSet[bytes], start: int, limit: int
    ) -> TopicPlaces | None:
        with self._lock:
            if not self._ready(segment, limit):
                return None
            packed = [self._table.find(topic) for topic in (*topics, REPAIRS)]
            places = _places_from(packed, start - segment.base, self._at.pos)
            if places is None:
                return None
            return TopicPlaces(segment.base, segment.header.salt, places, self._at)

    def _ready(self, segment: Segment, limit: int) -> bool:
        """Fill the table up to `limit`; return False when that would cost more than it saves."""
        identity = segment.header.generation
        if identity != self._segment:
            if self._segment is not None and identity < self._segment:
                return False  # the reader is in an older segment
            self._segment, self._table, self._bytes_read = identity, None, 0
        if self._table is None:
            # One pass over the segment may be all there ever is: the table must not double its cost.
            self._bytes_read += limit
            if self._bytes_read <= limit or limit < ACTIVE_TABLE_BYTES_MIN:
                return False
            self._table, self._at = kernel.TopicTable(segment.base), segment.start()
        while self._at.pos < limit and self._table.places <= ACTIVE_PLACES_MAX:
            if not self._add_chunk(segment, limit):
                break
        return bool(self._table.places <= ACTIVE_PLACES_MAX)

    def _add_chunk(self, segment: Segment, limit: int) -> bool:
        at, want = self._at, READ_CHUNK_BYTES
        while True:
            data = os.pread(segment.fd, min(want, limit - at.pos), at.pos)
            used, prev, following, code, detail = self._table.add(
                data, len(data), at.pos, segment.header.salt, at.prev, at.next
            )
            if used or code != Status.SHORT or not len(data) < detail <= limit - at.pos:
                break
            want = detail
        self._at = Position(at.pos + used, prev, following)
        return bool(used)


def _places_from(packed: list[bytes], start: int, size: int) -> list[Place] | None:
    """Return the batches at these places, from the one that has offset `start` on; None if they are dense."""
    count = sum(map(len, packed)) // PLACE.size
    if count * TOPIC_DENSE_BYTES > size:
        return None
    if len(packed) == 1:
        places = list(PLACE.iter_unpack(packed[0]))
    else:
        places = sorted({place for one in packed for place in PLACE.iter_unpack(one)})
    if start <= 0:
        return places
    # How many offsets a batch has is not listed: the last one that begins before `start` may reach over it.
    return places[max(bisect_right(places, start, key=itemgetter(2)) - 1, 0) :]
