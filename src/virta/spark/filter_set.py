"""
A filter set as executors use it: serialised once on the driver, built once per Python worker.

Filters are compiled on the driver; what travels is `pack`'s bytes, and a worker that has built the matcher
of a set keeps it for every task that brings the same digest.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from virta.errors import EventError, VirtaError
from virta.match import Compiled, Matcher, compile_filter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from virta.filters import Filter

SETS_MAX = 4  # filter sets kept per Python worker; the least recently used goes first


class MatchError(VirtaError):
    """Filters or columns that matching cannot work with."""

    default_code = "match_invalid"


_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def pack(filters: Mapping[str, Filter]) -> tuple[bytes, str]:
    """The bytes of a named filter set, and their digest."""
    packed = pickle.dumps([(n, compile_filter(f)) for n, f in filters.items()], protocol=5)
    return packed, hashlib.sha256(packed).hexdigest()


def documents(column: pa.Array, on: str) -> list[bytes]:
    """The JSON text each row is asked by."""
    values = [v.encode() if isinstance(v, str) else v or b"" for v in column.to_pylist()]
    return values if on == "event" else [document_of(value) for value in values]


def document_of(value: bytes) -> bytes:
    """
    What Koncorde's filters see of an event: its data, with an `_id` if it brings none.

    The `_id` is the event's subject, else its id; an event without an object as data is the empty
    document with that `_id`. The server's subscriptions follow the same rule.
    """
    try:
        members = _members(value)
    except (msgspec.DecodeError, RecursionError):
        return b""
    data = bytes(members.get("data", b"")).strip()
    name = bytes(members.get("subject", b"")).strip()
    identity = name if name.startswith(b'"') else bytes(members.get("id", b"null")).strip()
    if not data.startswith(b"{"):
        return b'{"_id":%b}' % identity
    inner = data[1:-1].strip()
    # Of equal names the last wins in every JSON reader, so the data's own `_id` stays.
    return b'{"_id":%b%b%b}' % (identity, b"," if inner else b"", inner)


class FilterSet:
    """A matcher that speaks in the caller's names for its filters."""

    def __init__(self, filters: Iterable[tuple[str, Compiled]]) -> None:
        self.matcher = Matcher()
        # Equal filters share a number in the matcher; each of their names still gets its row.
        names: dict[int, list[str]] = {}
        for name, compiled in filters:
            number = self.matcher.number_of(self.matcher.add(compiled))
            assert number is not None
            names.setdefault(number, []).append(name)
        self.shared = any(len(found) > 1 for found in names.values())
        self.names = names
        self.order = np.zeros(max(names, default=0) + 1, np.int64)
        for i, number in enumerate(names):
            self.order[number] = i
        self.first = pa.array([found[0] for found in names.values()], pa.string())

    def numbers(self, values: list[bytes]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Row and filter number of every hit, by row; rows that are no JSON have none."""
        try:
            found, offsets = self.matcher.match_many(values, output="uint32")
        except EventError:
            if len(values) == 1:
                return np.zeros(0, np.int64), np.zeros(0, np.uint32)
            # Halves: a batch with some junk in it costs little more than one without.
            middle = len(values) // 2
            low, high = self.numbers(values[:middle]), self.numbers(values[middle:])
            return np.concatenate((low[0], high[0] + middle)), np.concatenate((low[1], high[1]))
        ends: Any = np.frombuffer(offsets, np.uint32).astype(np.int64)
        rows = np.repeat(np.arange(len(values)), ends[1:] - ends[:-1])
        return rows, np.frombuffer(found, np.uint32)

    def pairs(self, values: list[bytes]) -> tuple[np.ndarray[Any, Any], pa.Array]:
        """Row and filter name of every hit."""
        rows, numbers = self.numbers(values)
        if not self.shared:
            return rows, self.first.take(pa.array(self.order[numbers]))
        names = [self.names[number] for number in numbers.tolist()]
        repeats = [len(found) for found in names]
        flat = [name for found in names for name in found]
        return np.repeat(rows, repeats), pa.array(flat, pa.string())

    def hits(self, values: list[bytes]) -> np.ndarray[Any, Any]:
        """For each value whether any filter holds."""
        held = np.zeros(len(values), bool)
        held[self.numbers(values)[0]] = True
        return held


_sets: OrderedDict[str, FilterSet] = OrderedDict()


def opened_set(digest: str, packed: bytes) -> FilterSet:
    """The filter set of these bytes, built once per Python worker."""
    found = _sets.get(digest)
    if found is None:
        found = FilterSet(pickle.loads(packed))  # noqa: S301 - bytes of our own driver
        _sets[digest] = found
        while len(_sets) > SETS_MAX:
            _sets.popitem(last=False)
    _sets.move_to_end(digest)
    return found


def write_set(filters: Mapping[str, Filter], directory: str) -> str:
    """Keep a filter set in a file named by its digest; returns the path."""
    packed, digest = pack(filters)
    path = Path(directory) / f"filters-{digest}.bin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(packed)
        draft.replace(path)
    return str(path)


def opened_file(path: str) -> FilterSet:
    """
    The filter set of a file, built once per Python worker.

    Raises:
        MatchError: the bytes are not those the name promises. They are unpickled, and the directory may
            be one that others write to.
    """
    digest = Path(path).stem.removeprefix("filters-")
    found = _sets.get(digest)
    if found is not None:
        return found
    packed = Path(path).read_bytes()
    if hashlib.sha256(packed).hexdigest() != digest:
        raise MatchError(f"{path} is not the filter set it was: make it again with match_log")
    return opened_set(digest, packed)
