"""
Manifests: what of a log is in the store.

    manifest/00000000000000000042.json     numbered, created once, never replaced

The one with the highest number is valid. Each names the shipper's epoch, the sealed segments and the chunks of the
active one. A shipper begins by creating the next manifest with the next epoch, so a shipper of an earlier epoch loses
the race for its next number, reads the winner and stops: that is the fence between two writers.

The list of segments is long and changes seldom: a manifest without one names the manifest that has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from virta.errors import TierError
from virta.log.engine.kernel import crc32c

if TYPE_CHECKING:
    from virta.tier.store import TierStore

VERSION: Final = 1
FOLDER: Final = "manifest"
_READ_BYTES: Final = 1024 * 1024


class ShippedSegment(msgspec.Struct, frozen=True, array_like=True):
    """A sealed segment: offsets `base` to `next` (not included), and how to recognise the file."""

    base: int
    next: int
    bytes: int
    salt: int
    crc: int  # crc32c of the file
    last_time: int  # µs
    suffixes: tuple[str, ...]  # of the index files stored with it

    @property
    def name(self) -> str:
        """The object's name; a segment that was compacted or repaired gets another one."""
        return f"segments/{self.base:020d}-{self.salt:08x}-{self.crc:08x}"


class TailChunk(msgspec.Struct, frozen=True, array_like=True):
    """Bytes `start` to `end` of the active segment."""

    start: int
    end: int
    crc: int


class ShippedTail(msgspec.Struct, frozen=True):
    """The active segment so far."""

    base: int
    salt: int
    epoch: int  # of the shipper that wrote the chunks
    next: int  # offset after the last shipped record
    last_time: int
    chunks: tuple[TailChunk, ...] = ()

    @property
    def bytes(self) -> int:
        return self.chunks[-1].end if self.chunks else 0

    def name(self, chunk: TailChunk) -> str:
        folder = f"tail/{self.base:020d}-{self.salt:08x}"
        return f"{folder}/{self.epoch:08d}-{chunk.start:012d}-{chunk.end:012d}"


class TierManifest(msgspec.Struct, frozen=True):
    number: int
    epoch: int
    shipper: str  # a uuid of the process that wrote it
    stream: str  # the log's uuid
    meta: str  # the log's META file
    written: int  # µs
    segments: tuple[ShippedSegment, ...]
    tail: ShippedTail | None = None
    segments_in: int | None = None  # the manifest with the list, if this one is stored without it
    version: int = VERSION

    @property
    def next(self) -> int:
        """The offset after the last shipped record."""
        if self.tail is not None:
            return self.tail.next
        return self.segments[-1].next if self.segments else 0

    @property
    def object_names(self) -> set[str]:
        """Every object that this manifest needs."""
        names = {s.name + suffix for s in self.segments for suffix in ("", *s.suffixes)}
        if self.tail is not None:
            names.update(map(self.tail.name, self.tail.chunks))
        return names


def manifest_name(number: int) -> str:
    return f"{FOLDER}/{number:020d}.json"


def manifest_number(name: str) -> int:
    return int(name.rpartition("/")[2].removesuffix(".json"))


def encode(manifest: TierManifest) -> bytes:
    """Return the manifest as stored: without the segments if another one has the same list."""
    if manifest.segments_in is not None:
        manifest = msgspec.structs.replace(manifest, segments=())
    return msgspec.json.encode(manifest)


def read_manifest(store: TierStore, number: int) -> TierManifest:
    """
    Return a manifest with its segments.

    Raises:
        TierError: it is missing, damaged or of a newer version.
    """
    manifest = _decode(store, number)
    if manifest.segments_in is None:
        return manifest
    return msgspec.structs.replace(manifest, segments=_decode(store, manifest.segments_in).segments)


def _decode(store: TierStore, number: int) -> TierManifest:
    name = manifest_name(number)
    return decode(store.read(name), f"{store.url}/{name}")


def decode(data: bytes, place: str) -> TierManifest:
    """
    Return a manifest from its bytes; `place` is for the message.

    Raises:
        TierError: it is damaged or of a newer version.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).version
        if version == VERSION:
            return msgspec.json.decode(data, type=TierManifest)
    except msgspec.DecodeError as exc:
        raise TierError(
            f"{place} is damaged: {exc}; the segments next to it are not affected",
            code="tier_manifest",
        ) from exc
    raise TierError(
        f"{place} has version {version}; this Virta reads version {VERSION}: upgrade Virta",
        code="tier_version",
    )


class _Version(msgspec.Struct):
    version: int


def newest_number(store: TierStore, after: int = -1) -> int | None:
    """Return the highest number of a manifest above `after`, or None."""
    start = None if after < 0 else manifest_name(after)
    names = [found.name for found in store.list(FOLDER, after=start)]
    return manifest_number(names[-1]) if names else None


def newest_manifest(store: TierStore) -> TierManifest | None:
    """Return the valid manifest, or None if nothing was shipped to this store."""
    number = newest_number(store)
    while number is not None:
        try:
            return read_manifest(store, number)
        except TierError as exc:
            if exc.code != "tier_object_missing":
                raise
            # The shipper removed it, so there is a newer one.
            found = newest_number(store, number)
            if found is None:
                raise
            number = found
    return None


def find_manifest(store: TierStore) -> TierManifest:
    """
    Return the valid manifest.

    Raises:
        TierError: nothing was shipped to this store.
    """
    manifest = newest_manifest(store)
    if manifest is None:
        raise TierError(
            f"{store.url} has no log; ship one there with virta log ship", code="tier_empty"
        )
    return manifest


def file_crc(file: BinaryIO) -> int:
    """Return the checksum of a whole file, as a manifest has it of a segment."""
    file.seek(0)
    crc = 0
    while data := file.read(_READ_BYTES):
        crc = crc32c(data, crc)
    return crc
