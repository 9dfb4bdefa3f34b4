"""
Ship a log to object storage while it is being written.

Sealed segments are uploaded as they are. The durable part of the active segment follows in chunks, which small
appends make few: a new chunk replaces the ones before it that are not much larger. Objects are written first, then the
manifest that names them, so a reader never sees a manifest without its objects, and a crash leaves only objects that
no manifest names; `collect_garbage` removes those.

One shipper per log: `ship.lock` excludes a second one on this machine, the manifest's epoch one elsewhere.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from virta import files
from virta.backoff import Backoff
from virta.clock import now_us, time_text
from virta.errors import LogError, TierError
from virta.log.engine.kernel import crc32c
from virta.log.format.directory import (
    INDEX_SUFFIX,
    META,
    TOPIC_INDEX_SUFFIX,
    read_meta,
    segment_bases,
)
from virta.log.format.index import index_sealed, load_index
from virta.log.format.segment import Segment, Walk
from virta.log.upkeep.retention import write_shipped
from virta.tier import manifest as manifests
from virta.tier.manifest import ShippedSegment, ShippedTail, TailChunk, TierManifest, file_crc
from virta.tier.store import CACHE, COPY

if TYPE_CHECKING:
    import threading

    from virta.log import Log
    from virta.tier.store import TierStore

logger = logging.getLogger("virta.tier")

LOCK: Final = "ship.lock"
INTERVAL_S: Final = 1.0
# A chunk is in memory while it is uploaded.
CHUNK_BYTES_MAX: Final = 8 * 1024 * 1024
# A chunk is merged into the next one if it is at most this many times as large: few chunks, few bytes written twice.
MERGE_FACTOR: Final = 2
# Objects that no manifest names are kept this long for readers that still use an older manifest.
GARBAGE_AGE_S: Final = 3600.0
GARBAGE_INTERVAL_S: Final = 600.0
# Each attempt that fails means that another shipper wrote a manifest meanwhile. One without a pause, on a busy machine,
# was seen to win 20 in a row.
CLAIM_ATTEMPTS_MAX: Final = 200
# After a store failed, it is tried again after these waits.
RETRY_S, RETRY_S_MAX = 1.0, 60.0


class Shipped(NamedTuple):
    """What one call of `ship` uploaded, and the offset after the last record in the store."""

    segments: int
    bytes: int
    next: int


class _Signature(NamedTuple):
    """Changes whenever a segment's file does."""

    inode: int
    bytes: int
    changed: int

    @classmethod
    def of(cls, fd: int) -> _Signature:
        stat = os.fstat(fd)
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns)


class Shipper:
    """Uploads what is new in a log. `start` claims the store; `ship` uploads once, `run` again and again."""

    def __init__(self, log: Log, store: TierStore, *, garbage_age_s: float = GARBAGE_AGE_S) -> None:
        self.log = log
        self.store = store
        self._directory = log.path
        self._garbage_age_s = garbage_age_s
        self._id = uuid.uuid4().hex
        self._lock = -1
        self.problem: str | None = None  # why the last upload of `run` failed
        self._manifest: TierManifest | None = None
        self._shipped = 0
        self._listed_in = -1  # the manifest that has the present list of segments
        self._signatures: dict[int, _Signature] = {}
        self._trusted_before = 0  # µs; the last shipper has seen files that are older
        self._created_at = 0.0
        self._collected_at = 0.0

    @property
    def shipped(self) -> int:
        """The offset after the last record in the store; after `close` or a failure, as this shipper last saw it."""
        return self._shipped if self._manifest is None else self._manifest.next

    def start(self) -> None:
        """
        Claim the store for this shipper: one that ships the same log elsewhere stops at its next upload.

        Raises:
            TierError: another process of this machine ships the log, or the store has another log.
        """
        try:
            self._lock = files.lock_file(self._directory / LOCK)
        except BlockingIOError as exc:
            raise TierError(
                f"another process ships the log at {self._directory}; stop it first",
                code="tier_busy",
            ) from exc
        try:
            self._claim()
        except BaseException:
            self.close()
            raise

    def _claim(self) -> None:
        stream = str(read_meta(self._directory).stream)
        for _ in range(CLAIM_ATTEMPTS_MAX):
            found = manifests.newest_manifest(self.store)
            if found is not None and found.stream != stream:
                raise TierError(
                    f"{self.store.url} has the log {found.stream}, {self._directory} is the log"
                    f" {stream}; give each log a prefix of its own",
                    code="tier_other_log",
                )
            if found is not None and found.next > self.log.next_offset:
                raise TierError(
                    f"{self.store.url} has records up to offset {found.next}, the log at"
                    f" {self._directory} ends at {self.log.next_offset}: it is older than what was"
                    " shipped; restore it from the store",
                    code="tier_ahead",
                )
            claim = TierManifest(
                number=0 if found is None else found.number + 1,
                epoch=1 if found is None else found.epoch + 1,
                shipper=self._id,
                stream=stream,
                meta=(self._directory / META).read_text(),
                written=now_us(),
                segments=() if found is None else found.segments,
                tail=None if found is None else found.tail,
            )
            if self.store.create(manifests.manifest_name(claim.number), manifests.encode(claim)):
                break
        else:
            raise TierError(
                f"{self.store.url} refused {CLAIM_ATTEMPTS_MAX} manifests as already existing: other"
                " processes claim this log all the time, or the store's answers are wrong",
                code="tier_contended",
            )
        self._manifest, self._listed_in = claim, claim.number
        self._created_at = time.monotonic()
        self._trusted_before = 0 if found is None else found.written
        self._save_state()

    def close(self) -> None:
        """Let another process ship the log."""
        if self._lock >= 0:
            files.unlock_file(self._lock)
            self._lock = -1
        self._shipped = self.shipped
        self._manifest = None

    def __enter__(self) -> Shipper:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, stop: threading.Event, *, interval_s: float = INTERVAL_S) -> None:
        """
        Ship every `interval_s` seconds until `stop` is set, then once more; a store that fails is tried again.

        Raises:
            TierError: another shipper took over (`tier_fenced`).
        """
        retry = Backoff(RETRY_S, RETRY_S_MAX, jitter=0.5)
        while True:
            stopping = stop.is_set()
            wait = interval_s
            try:
                self.ship()
                self.collect_garbage()
                retry.reset()
                self.problem = None
            except TierError as exc:
                if exc.code == "tier_fenced" or stopping:
                    raise
                wait = retry.next()
                self.problem = exc.message
                logger.warning("ship_failed code=%s: %s", exc.code, exc.message)
            if stopping:
                return
            stop.wait(wait)

    def ship(self) -> Shipped:
        """Upload what is new and publish it in a manifest."""
        before = self._present()
        index_sealed(self._directory)
        # Listed once: a segment that is sealed meanwhile is shipped as the active one this time.
        bases = segment_bases(self._directory)
        segments, uploaded = self._ship_sealed(before, bases[:-1])
        tail = self._ship_tail(before.tail, bases[-1]) if bases else None
        sent = sum(segment.bytes for segment in uploaded)
        if tail is not None:
            known = () if before.tail is None else before.tail.chunks
            sent += sum(chunk.end - chunk.start for chunk in set(tail.chunks) - set(known))
        if segments != before.segments or tail != before.tail:
            self._publish(before, segments, tail)
        return Shipped(len(uploaded), sent, self.shipped)

    def collect_garbage(self, *, now: bool = False) -> int:
        """Remove objects and manifests that nothing names any more; return how many. At most every ten minutes."""
        if not now and time.monotonic() - self._collected_at < GARBAGE_INTERVAL_S:
            return 0
        present = self._present()
        self._check_newest(present)
        kept = present.object_names | {
            manifests.manifest_name(present.number),
            manifests.manifest_name(self._listed_in),
        }
        oldest = datetime.now(UTC) - timedelta(seconds=self._garbage_age_s)
        removed = 0
        for folder in (manifests.FOLDER, "tail", "segments"):
            for found in self.store.list(folder):
                if found.name not in kept and found.modified < oldest:
                    self.store.delete(found.name)
                    removed += 1
        self._collected_at = time.monotonic()
        return removed

    # Sealed segments.

    def _ship_sealed(
        self, before: TierManifest, bases: list[int]
    ) -> tuple[tuple[ShippedSegment, ...], list[ShippedSegment]]:
        known = {segment.base: segment for segment in before.segments}
        uploaded = []
        for base in bases:
            with suppress(FileNotFoundError):  # removed by retention
                segment = self._ship_segment(base, known.get(base))
                if segment is not None:
                    known[base] = segment
                    uploaded.append(segment)
        return tuple(known[base] for base in sorted(known)), uploaded

    def _ship_segment(self, base: int, known: ShippedSegment | None) -> ShippedSegment | None:
        """Upload a sealed segment unless the store has it; return it if it was uploaded."""
        with Segment(self._directory, base) as segment, os.fdopen(os.dup(segment.fd), "rb") as file:
            signature = _Signature.of(segment.fd)
            if known is not None and self._is_shipped(base, known, signature):
                self._signatures[base] = signature
                return None
            following, last_time = _segment_end(segment)
            indexes = _index_files(segment)
            suffixes = tuple(sorted(indexes))
            salt, crc = segment.header.salt, file_crc(file)
            entry = ShippedSegment(base, following, signature.bytes, salt, crc, last_time, suffixes)
            if entry != known:
                for suffix, data in indexes.items():
                    self.store.write(entry.name + suffix, data)
                file.seek(0)
                self.store.write(entry.name, file)
            if _Signature.of(segment.fd) != signature:
                return None  # repaired meanwhile: the next call uploads what it is now
            self._signatures[base] = signature
        return None if entry == known else entry

    def _is_shipped(self, base: int, known: ShippedSegment, signature: _Signature) -> bool:
        """Return whether the store has this file, judged without reading it."""
        if base in self._signatures:
            return self._signatures[base] == signature
        return known.bytes == signature.bytes and signature.changed // 1000 < self._trusted_before

    # The active segment.

    def _ship_tail(self, before: ShippedTail | None, base: int) -> ShippedTail | None:
        try:
            with Segment(self._directory, base) as segment:
                end, following, last_time = self._durable_end(segment)
                tail = self._continued(before, segment, end)
                chunks = tail.chunks
                if end > tail.bytes:
                    chunks = self._ship_chunks(tail, segment, end)
                return ShippedTail(
                    segment.base, segment.header.salt, tail.epoch, following, last_time, chunks
                )
        except FileNotFoundError:
            # Sealed and removed by force meanwhile. The next call ships what is active now.
            return before if before is not None and before.base == base else None

    def _durable_end(self, segment: Segment) -> tuple[int, int, int]:
        """Return (byte, next offset, time) up to which the active segment is on disk."""
        snapshot = self.log.source.snapshot()
        if snapshot is None or not snapshot.current or snapshot.active != segment.base:
            walk = Walk(segment, segment.start(), segment.size, check_payload=True)
            end = walk.run().at
            return end.pos, end.next, segment.header.created
        if (snapshot.durable_base, snapshot.durable_pos) < (snapshot.active, snapshot.end):
            # Readers never see what a power failure could still remove; nor does the store.
            self.log.source.sync(segment.fd, snapshot.active, snapshot.end)
        return snapshot.end, snapshot.next, snapshot.last_time

    def _continued(self, before: ShippedTail | None, segment: Segment, end: int) -> ShippedTail:
        """Return the tail to continue: the last one without chunks that differ from the file."""
        present = self._present()
        salt = segment.header.salt
        if before is None or (before.base, before.salt) != (segment.base, salt):
            return ShippedTail(segment.base, salt, present.epoch, segment.base, 0)
        if before.epoch == present.epoch and before.bytes <= end:
            return before
        same: list[TailChunk] = []
        for chunk in before.chunks:
            size = chunk.end - chunk.start
            if chunk.end > end or crc32c(os.pread(segment.fd, size, chunk.start)) != chunk.crc:
                break
            same.append(chunk)
        if len(same) == len(before.chunks):
            return before  # chunks of an earlier shipper are as good
        return ShippedTail(segment.base, salt, present.epoch, segment.base, 0)

    def _ship_chunks(self, tail: ShippedTail, segment: Segment, end: int) -> tuple[TailChunk, ...]:
        chunks = list(tail.chunks)
        start = tail.bytes
        while chunks and end - chunks[-1].start <= CHUNK_BYTES_MAX:
            last = chunks[-1]
            if last.end - last.start > MERGE_FACTOR * (end - last.end):
                break
            start = chunks.pop().start
        while start < end:
            size = min(end - start, CHUNK_BYTES_MAX)
            data = os.pread(segment.fd, size, start)
            if len(data) < size:
                raise LogError(
                    f"{segment.path} is shorter than the log says: {start + len(data)} bytes of {end};"
                    " run virta log verify"
                )
            chunk = TailChunk(start, start + size, crc32c(data))
            self.store.write(tail.name(chunk), data)
            chunks.append(chunk)
            start += size
        return tuple(chunks)

    # Manifests.

    def _present(self) -> TierManifest:
        if self._manifest is None:
            raise TierError("the shipper is not started, or closed", code="tier_closed")
        return self._manifest

    def _publish(
        self,
        before: TierManifest,
        segments: tuple[ShippedSegment, ...],
        tail: ShippedTail | None,
    ) -> None:
        listed = segments != before.segments
        following = TierManifest(
            number=before.number + 1,
            epoch=before.epoch,
            shipper=self._id,
            stream=before.stream,
            meta=before.meta,
            written=now_us(),
            segments=segments,
            tail=tail,
            segments_in=None if listed else self._listed_in,
        )
        if time.monotonic() - self._created_at > self._garbage_age_s / 2:
            # The numbers after ours may have been used and removed again since the last upload.
            self._check_newest(before)
        name = manifests.manifest_name(following.number)
        if not self.store.create(name, manifests.encode(following)):
            # A request that was repeated on the way may have met its own first attempt.
            found = manifests.read_manifest(self.store, following.number)
            if found.shipper != self._id or found.written != following.written:
                raise self._fenced(found)
        self._manifest = following
        self._created_at = time.monotonic()
        if listed:
            self._listed_in = following.number
            self._save_state()

    def _check_newest(self, present: TierManifest) -> None:
        number = manifests.newest_number(self.store, present.number)
        if number is not None:
            raise self._fenced(manifests.read_manifest(self.store, number))

    def _fenced(self, found: TierManifest) -> TierError:
        return TierError(
            f"another process ships this log to {self.store.url} since {time_text(found.written)}"
            f" (epoch {found.epoch}); this one stops. Run one shipper per log",
            code="tier_fenced",
        )

    def _save_state(self) -> None:
        """Record how far sealed segments are shipped: retention does not remove later ones."""
        present = self._present()
        segments = present.segments
        copy = msgspec.structs.replace(present, segments_in=None)
        files.make_inside(self._directory / CACHE)
        files.write_whole(self._directory / COPY, manifests.encode(copy))
        write_shipped(self._directory, self.store.url, segments[-1].next if segments else 0)


def _segment_end(segment: Segment) -> tuple[int, int]:
    """Return the offset after a sealed segment's last record, and its time."""
    index = load_index(segment.path.parent, segment.base, segment.header.salt)
    if index is not None:
        return index.next, index.last_time
    walk = Walk(segment, segment.start(), segment.size)
    times = [batch.time for batches in walk for batch in batches]
    return walk.end.at.next, times[-1] if times else segment.header.created


def _index_files(segment: Segment) -> dict[str, bytes]:
    """Return the segment's index files by their suffix; they are optional, and belong to this generation of it."""
    if load_index(segment.path.parent, segment.base, segment.header.salt) is None:
        return {}
    found = {}
    for suffix in (INDEX_SUFFIX, TOPIC_INDEX_SUFFIX):
        with suppress(FileNotFoundError):
            found[suffix] = segment.path.with_suffix(suffix).read_bytes()
    return found
