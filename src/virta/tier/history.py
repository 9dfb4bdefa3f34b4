"""
The segments of a log in object storage, as local files in a bounded cache.

What the store has is read from its newest manifest, or, next to the log itself, from the copy of the manifest that
the shipper writes there: then the store is asked only for segments that are no longer here. A segment is fetched whole
when a reader needs it; for a reader of some topics its topic index is fetched first, and then often only their batches.
The active segment grows: what was shipped since is added to the file that readers have open. When the cache is full,
the segments that were used least recently are removed; a reader that has one open finishes it undisturbed.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Final, TypeVar

from virta import files
from virta.errors import TierError
from virta.log.engine.kernel import crc32c
from virta.log.engine.source import IndexedSegment
from virta.log.format.directory import (
    INDEX_SUFFIX,
    TOPIC_INDEX_SUFFIX,
    segment_name,
    topic_index_name,
)
from virta.log.format.index import Index, parse_index
from virta.log.format.topic_index import TopicIndex, TopicIndexError
from virta.log.limits import SEGMENT_HEADER_BYTES
from virta.tier import manifest as manifests
from virta.tier.manifest import file_crc
from virta.tier.remote import RemotePart, RemoteSegment
from virta.tier.store import CACHE_BYTES_MAX, TierStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.log.format.segment import Segment
    from virta.tier.manifest import ShippedSegment, ShippedTail, TierManifest

Found = TypeVar("Found")

# The store is asked for a newer manifest at most this often.
REFRESH_S: Final = 1.0
# A segment of which a reader needs less than one part in so many is not fetched whole.
PARTIAL_SHARE: Final = 4
# A shipper may replace objects between reading the manifest and reading them; the next manifest names the new ones.
ATTEMPTS_MAX: Final = 3


class TierHistory:
    """The older segments of a log; `fetch` makes one a local file. Safe to share between threads."""

    def __init__(
        self,
        url: str,
        cache: Path,
        *,
        bytes_max: int = CACHE_BYTES_MAX,
        refresh_s: float = REFRESH_S,
        copy: Path | None = None,
    ) -> None:
        self.url = url
        self._cache = cache
        self._bytes_max = bytes_max
        self._refresh_s = refresh_s
        self._copy, self._copied = copy, 0  # the file, and its time when it was read
        self._store: TierStore | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._manifest: TierManifest | None = None
        self._checked_at = -refresh_s
        files.make_directory(cache)

    @property
    def next(self) -> int:
        """The offset after the last shipped record."""
        return 0 if self._nothing_shipped() else self.manifest().next

    def bases(self) -> list[int]:
        """Return the first offsets of the shipped segments, in order."""
        if self._nothing_shipped():
            return []
        manifest = self.manifest()
        bases = [segment.base for segment in manifest.segments]
        if manifest.tail is not None and manifest.tail.bytes:
            bases.append(manifest.tail.base)
        return bases

    def manifest(self, *, newest: bool = False) -> TierManifest:
        """
        Return the manifest, not older than a second.

        Raises:
            TierError: nothing was shipped to the store, or it cannot be reached.
        """
        with self._lock:
            return self._fresh_manifest(newest=newest)

    def fetch(self, base: int) -> Path:
        """
        Return the cache's directory after the segment that begins at `base` is there, whole or as far as shipped.

        Raises:
            FileNotFoundError: the store has no such segment.
            TierError: the store cannot be reached, or has other bytes than were shipped.
        """
        self._with_manifest(lambda manifest: self._fetch(manifest, base))
        return self._cache

    def topic_index(self, base: int) -> IndexedSegment | None:
        """Fetch the topic index of a sealed segment, not the segment; None if the store has none."""

        def find(manifest: TierManifest) -> IndexedSegment | None:
            segment = _shipped_segment(manifest, base)
            if segment is None or TOPIC_INDEX_SUFFIX not in segment.suffixes:
                return None
            path = self._cache / topic_index_name(base)
            if not _is_index_of(path, segment):
                data = self._open_store().read(segment.name + TOPIC_INDEX_SUFFIX)
                self._make_room(len(data), keep=path)
                files.write_whole(path, data)
            return IndexedSegment(self._cache, segment.salt, segment.bytes)

        return self._with_manifest(find)

    def fetch_ranges(self, base: int, ranges: list[tuple[int, int]]) -> Segment | None:
        """Return a sealed segment with these bytes only; None if it is here, or they are much of it: `fetch` it."""

        def find(manifest: TierManifest) -> Segment | None:
            segment = _shipped_segment(manifest, base)
            wanted = sum(end - pos for pos, end in ranges)
            if segment is None or wanted * PARTIAL_SHARE > segment.bytes:
                return None
            if _is_whole(self._cache / segment_name(base), segment):
                return None
            return self._remote_segment(segment).open_ranges(ranges, self._open_store())

        return self._with_manifest(find)

    def _with_manifest(self, call: Callable[[TierManifest], Found]) -> Found:
        """Call with the manifest, and again with the newest one if the shipper replaced objects meanwhile."""
        with self._lock:
            for attempt in range(ATTEMPTS_MAX):
                manifest = self._fresh_manifest(newest=attempt > 0)
                try:
                    return call(manifest)
                except TierError as exc:
                    if exc.code != "tier_object_missing" or attempt == ATTEMPTS_MAX - 1:
                        raise
        raise AssertionError("unreachable")

    def _remote_segment(self, segment: ShippedSegment) -> RemoteSegment:
        part = RemotePart(segment.name, 0, segment.bytes)
        return RemoteSegment(self.url, segment.base, segment.salt, (part,))

    def remote(self, base: int) -> RemoteSegment | None:
        """Return where the bytes of a shipped segment are; None if there is no such segment."""
        manifest = self.manifest()
        tail = manifest.tail
        if tail is not None and tail.base == base:
            parts = tuple(RemotePart(tail.name(c), c.start, c.end) for c in tail.chunks)
            return RemoteSegment(self.url, base, tail.salt, parts) if parts else None
        segment = _shipped_segment(manifest, base)
        return None if segment is None else self._remote_segment(segment)

    def index(self, base: int) -> Index | None:
        """Return the index of a sealed segment, None if the store has none."""
        segment = _shipped_segment(self.manifest(), base)
        if segment is None or INDEX_SUFFIX not in segment.suffixes:
            return None
        with self._lock:
            data = self._open_store().read(segment.name + INDEX_SUFFIX)
        return parse_index(data, base, segment.salt)

    def _nothing_shipped(self) -> bool:
        return self._copy is not None and not self._copy.exists()

    # Under the lock.

    def _fresh_manifest(self, *, newest: bool) -> TierManifest:
        if self._copy is not None and not newest:
            return self._copied_manifest(self._copy)
        present = self._manifest
        now = time.monotonic()
        if present is not None and not newest and now - self._checked_at < self._refresh_s:
            return present
        store = self._open_store()
        if present is None or manifests.newest_number(store, present.number) is not None:
            present = manifests.find_manifest(store)
        self._manifest, self._checked_at = present, now
        return present

    def _copied_manifest(self, path: Path) -> TierManifest:
        changed = path.stat().st_mtime_ns
        if self._manifest is None or changed > self._copied:
            self._manifest = manifests.decode(path.read_bytes(), str(path))
            self._copied = changed
        return self._manifest

    def _open_store(self) -> TierStore:
        if self._store is None or self._pid != os.getpid():
            # The threads of the store's client do not survive a fork.
            self._store, self._pid = TierStore(self.url), os.getpid()
        return self._store

    def _fetch(self, manifest: TierManifest, base: int) -> None:
        path = self._cache / segment_name(base)
        tail = manifest.tail
        if tail is not None and tail.base == base:
            self._extend(path, tail)
            return
        segment = _shipped_segment(manifest, base)
        if segment is None:
            raise FileNotFoundError(f"{self.url} has no segment that begins at offset {base}")
        if _is_whole(path, segment):
            os.utime(path)
            return
        self._make_room(segment.bytes, keep=path)
        for suffix in segment.suffixes:
            files.write_whole(
                path.with_suffix(suffix), self._open_store().read(segment.name + suffix)
            )
        if path.exists() and self._complete(path, segment):
            return
        self._download(path, segment)

    def _download(self, path: Path, segment: ShippedSegment) -> None:
        temporary = path.with_suffix(".fetch")
        fd = files.open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        crc = pos = 0
        try:
            for piece in self._open_store().stream(segment.name):
                files.write_all(fd, piece, pos)
                crc, pos = crc32c(piece, crc), pos + len(piece)
        finally:
            os.close(fd)
        if (crc, pos) != (segment.crc, segment.bytes):
            temporary.unlink()
            raise TierError(
                f"{self.url}/{segment.name} has other bytes than were shipped: {pos} bytes with crc32c"
                f" {crc:08x}, expected {segment.bytes} with {segment.crc:08x}",
                code="tier_corrupt",
            )
        os.rename(temporary, path)

    def _complete(self, path: Path, segment: ShippedSegment) -> bool:
        """Add the rest of a segment that was active when it was fetched: readers may have the file open."""
        size = path.stat().st_size
        if size >= segment.bytes:
            return False
        rest = self._open_store().read_range(segment.name, size, segment.bytes)
        with path.open("rb") as file:
            crc = file_crc(file)
        if crc32c(rest, crc) != segment.crc:
            return False  # compacted or repaired since: another file
        _append(path, rest)
        return True

    def _extend(self, path: Path, tail: ShippedTail) -> None:
        if _salt(path) not in {None, tail.salt}:
            path.unlink()
        size = path.stat().st_size if path.exists() else 0
        store = self._open_store()
        for chunk in tail.chunks:
            if chunk.end > size:
                data = store.read(tail.name(chunk))
                if crc32c(data) != chunk.crc:
                    raise TierError(
                        f"{self.url}/{tail.name(chunk)} has other bytes than were shipped",
                        code="tier_corrupt",
                    )
                _append(path, data[max(size - chunk.start, 0) :])
                size = chunk.end

    def _make_room(self, wanted: int, *, keep: Path) -> None:
        """Remove the segments used least recently, with their indexes, until `wanted` more bytes fit."""
        used: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for path in self._cache.glob("*.p*"):
            with suppress(FileNotFoundError):
                stat = path.stat()
                used[path.stem] = max(used.get(path.stem, 0), stat.st_mtime_ns)
                sizes[path.stem] = sizes.get(path.stem, 0) + stat.st_size
        total = sum(sizes.values()) + wanted
        for stem in sorted(used, key=used.__getitem__):
            if total <= self._bytes_max:
                return
            if stem != keep.stem:
                for path in self._cache.glob(f"{stem}.p*"):
                    path.unlink(missing_ok=True)
                total -= sizes[stem]


def _shipped_segment(manifest: TierManifest, base: int) -> ShippedSegment | None:
    """Return a shipped segment by its first offset, None if there is none."""
    at = bisect_left(manifest.segments, base, key=attrgetter("base"))
    found = manifest.segments[at : at + 1]
    return found[0] if found and found[0].base == base else None


def _is_index_of(path: Path, segment: ShippedSegment) -> bool:
    """Return whether the cache has the topic index of this generation of a segment."""
    try:
        TopicIndex(path.parent, segment.base, segment.salt, segment.bytes).close()
    except TopicIndexError:
        return False
    return True


def _is_whole(path: Path, segment: ShippedSegment) -> bool:
    """Return whether the cache has this generation of a segment, whole."""
    return _salt(path) == segment.salt and path.stat().st_size == segment.bytes


def _salt(path: Path) -> int | None:
    """Return what distinguishes generations of a segment (docs/format.md, 4.1); None without a header."""
    try:
        with path.open("rb") as file:
            head = file.read(SEGMENT_HEADER_BYTES)
    except FileNotFoundError:
        return None
    return int.from_bytes(head[40:44], "little") if len(head) == SEGMENT_HEADER_BYTES else None


def _append(path: Path, data: bytes) -> None:
    fd = files.open_file(path, os.O_WRONLY | os.O_CREAT)
    try:
        files.write_all(fd, data, os.fstat(fd).st_size)
    finally:
        os.close(fd)
