"""Bring a shipped log back to a directory, and check that the store has what its manifest names."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.errors import TierError
from virta.log.engine.kernel import crc32c
from virta.log.format.directory import META, make_directory, segment_bases
from virta.log.format.topic_index import remove_unfinished
from virta.tier import manifest as manifests
from virta.tier.history import TierHistory
from virta.tier.store import TierStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from virta.tier.manifest import TierManifest


class Restored(NamedTuple):
    """What was written, and the offset after the last record."""

    segments: int
    bytes: int
    next: int


class TierReport(NamedTuple):
    """What the store has of a log; `problems` are sentences, empty if everything is there."""

    manifest: TierManifest
    objects: int
    bytes: int
    problems: list[str]


def restore_log(
    url: str, directory: Path, *, progress: Callable[[int, int], None] | None = None
) -> Restored:
    """
    Write the shipped log to `directory`, which is new or empty, or has a restore that was interrupted.

    META is written last, so an interrupted restore is not taken for a log; calling again continues it.

    Raises:
        TierError: the store has no log, or other bytes than were shipped.
        LogFormatError: the directory has other files.
    """
    if (directory / META).exists():
        raise TierError(
            f"{directory} is a log already; restore to a new directory", code="tier_exists"
        )
    if directory.is_dir():  # of a restore that was interrupted
        for unfinished in directory.glob("*.fetch"):
            unfinished.unlink()
        remove_unfinished(directory)
    make_directory(directory)
    # The directory is the cache, and nothing is removed from it.
    history = TierHistory(url, directory, bytes_max=1 << 62, refresh_s=float("inf"))
    manifest = history.manifest()
    bases = history.bases()
    for base in segment_bases(directory):
        if base not in bases:
            raise TierError(
                f"{directory} has a segment of another log (offset {base}); restore to a new directory",
                code="tier_exists",
            )
    for done, base in enumerate(bases):
        history.fetch(base)
        if progress is not None:
            progress(done + 1, len(bases))
    _sync(directory)
    files.write_whole(directory / META, manifest.meta.encode())
    size = sum(path.stat().st_size for path in directory.glob("*.puro"))
    return Restored(len(bases), size, manifest.next)


def _sync(directory: Path) -> None:
    """Make the fetched files durable: after META is there, a power failure must not take them away."""
    for path in directory.glob("*.p*"):
        files.sync_file(path)
    files.sync_directory(directory)


def verify_store(
    url: str, *, deep: bool = True, progress: Callable[[int, int], None] | None = None
) -> TierReport:
    """
    Check that every object of the newest manifest is there with its size, and with `deep` its checksum.

    Raises:
        TierError: the store has no log, or cannot be reached.
    """
    store = TierStore(url)
    manifest = manifests.find_manifest(store)
    expected = {s.name: (s.bytes, s.crc) for s in manifest.segments}
    if manifest.tail is not None:
        for chunk in manifest.tail.chunks:
            expected[manifest.tail.name(chunk)] = (chunk.end - chunk.start, chunk.crc)
    problems = _order_problems(manifest)
    for name in sorted(
        manifest.object_names - set(expected)
    ):  # indexes, which have checksums inside
        try:
            store.read(name)
        except TierError as exc:
            problems.append(exc.message)
    for done, (name, (size, crc)) in enumerate(sorted(expected.items())):
        problem = _object_problem(store, name, size, crc if deep else None)
        if problem is not None:
            problems.append(problem)
        if progress is not None:
            progress(done + 1, len(expected))
    total = sum(size for size, _ in expected.values())
    return TierReport(manifest, len(expected), total, problems)


def _order_problems(manifest: TierManifest) -> list[str]:
    """Return a sentence for each range of offsets that no segment has."""
    problems = []
    ends = [(s.base, s.next) for s in manifest.segments]
    if manifest.tail is not None:
        ends.append((manifest.tail.base, manifest.tail.next))
    for (_, end), (base, _) in itertools.pairwise(ends):
        if base != end:
            problems.append(f"offsets {end} to {base} are in no segment")
    return problems


def _object_problem(store: TierStore, name: str, size: int, crc: int | None) -> str | None:
    try:
        if crc is None:
            found = len(store.read_range(name, size - 1, size)) if size else 0
            return None if found else f"{name} is shorter than {size} bytes"
        total = summed = 0
        for piece in store.stream(name):
            total, summed = total + len(piece), crc32c(piece, summed)
    except TierError as exc:
        return exc.message
    if (total, summed) != (size, crc):
        return f"{name} has {total} bytes with crc32c {summed:08x}, expected {size} with {crc:08x}"
    return None
