"""
Keys in bytewise order: a list of short sorted lists.

Invariant: every chunk is sorted and not empty, chunks follow each other in order, and `_maxima[i]` is
the last key of `_chunks[i]`. Adding and removing cost O(log n) comparisons and one short move, which
for a million keys is faster than any balanced tree written in Python.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Twice the chunk size that made 1M random inserts fastest; a full chunk is split in two.
CHUNK_KEYS_MAX = 1024


class SortedKeys:
    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        ordered = sorted(set(keys))
        half = CHUNK_KEYS_MAX // 2
        self._chunks = [ordered[i : i + half] for i in range(0, len(ordered), half)]
        self._maxima = [chunk[-1] for chunk in self._chunks]
        self._size = len(ordered)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: bytes) -> bool:
        index = bisect_left(self._maxima, key)
        if index == len(self._chunks):
            return False
        chunk = self._chunks[index]
        at = bisect_left(chunk, key)
        return at < len(chunk) and chunk[at] == key

    def add(self, key: bytes) -> None:
        """Add a key; one that is there already stays there once."""
        if key in self:
            return
        self._size += 1
        if not self._chunks:
            self._chunks.append([key])
            self._maxima.append(key)
            return
        index = min(bisect_left(self._maxima, key), len(self._chunks) - 1)
        chunk = self._chunks[index]
        insort(chunk, key)
        self._maxima[index] = chunk[-1]
        if len(chunk) > CHUNK_KEYS_MAX:
            half = len(chunk) // 2
            self._chunks.insert(index + 1, chunk[half:])
            self._maxima.insert(index + 1, chunk[-1])
            del chunk[half:]
            self._maxima[index] = chunk[-1]

    def remove(self, key: bytes) -> None:
        """Remove a key; one that is not there is no error."""
        if key not in self:
            return
        self._size -= 1
        index = bisect_left(self._maxima, key)
        chunk = self._chunks[index]
        del chunk[bisect_left(chunk, key)]
        if chunk:
            self._maxima[index] = chunk[-1]
        else:
            del self._chunks[index]
            del self._maxima[index]

    def before(self, key: bytes) -> bytes:
        """Return the last key smaller than this one; empty if there is none."""
        index = min(bisect_left(self._maxima, key), len(self._chunks) - 1)
        while index >= 0:
            at = bisect_left(self._chunks[index], key)
            if at:
                return self._chunks[index][at - 1]
            index -= 1
        return b""

    def scan(self, lower: bytes, upper: bytes | None, *, after: bool = False) -> Iterator[bytes]:
        """
        Yield keys from `lower` (not including it if `after`) up to, not including, `upper`.

        The keys must not change while the iterator is in use.
        """
        index = bisect_left(self._maxima, lower)
        side = bisect_right if after else bisect_left
        at = side(self._chunks[index], lower) if index < len(self._chunks) else 0
        for chunk in self._chunks[index:]:
            for key in chunk[at:] if at else chunk:
                if upper is not None and key >= upper:
                    return
                yield key
            at = 0
