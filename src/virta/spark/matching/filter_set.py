"""
A filter set for executors: compiled and written once on the driver, mapped into memory by each worker.

    driver: filters ──► programs in an Arrow file, named by its digest      worker: file ──► index ──► image

The file reaches the executors by a shared directory, or as a broadcast that is written to such a file on each
machine. The first worker of a machine turns a large set into an image of the index beside it (virta.match.image);
the others map that. A worker keeps an opened set for all tasks with the same digest.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import secrets
import stat
import time
from collections import OrderedDict
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from virta import files
from virta.errors import VirtaError
from virta.event import document_of as event_document
from virta.event.document import read_event
from virta.filters.tree import Computed, Condition, Flat, Node, conditions
from virta.match import Compiled, Matcher, compile_filter
from virta.match.image import SHARED_WRITE, Programs, heap_matcher, shared_matcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from virta.filters import Filter

SETS_MAX = 4  # filter sets kept per Python worker; the least recently used is dropped
IMAGE_FILTERS_MIN = 20_000  # fewer are built faster than an image pays off
PLAIN_FILTERS_MAX = 20_000  # for workers without the native engine, which cannot cope with more
# Files in the own directory: age since the last use, and number.
SET_SECONDS_MAX = 7 * 24 * 3600
SENT_BYTES_MAX = 8 * 1024 * 1024  # of a filter set that is sent with tasks: about 200,000 filters
SET_FILES_MAX = 256

Texts = tuple[Any, Any]  # int32 ends and concatenated JSON texts, as in an Arrow array


class MatchError(VirtaError):
    """Filters or columns that matching cannot work with."""

    default_code = "match_invalid"


# On the driver.


def pack(filters: Mapping[str, Filter | Compiled]) -> pa.Buffer:
    """Return the file content of a named filter set; equal filters are one program with several names."""
    names: dict[bytes, list[str]] = {}
    programs: list[bytes] = []
    opaques: dict[int, tuple[Any, ...]] = {}
    plain: list[Compiled] = []
    ids = False
    for name, given in filters.items():
        compiled = given if isinstance(given, Compiled) else compile_filter(given)
        known = names.setdefault(compiled.digest, [])
        known.append(name)
        if len(known) > 1:
            continue
        ids = ids or sees_ids(compiled)
        program, left_over = compiled.encoded
        if left_over:
            opaques[len(programs)] = left_over
        programs.append(program)
        if len(programs) <= PLAIN_FILTERS_MAX:
            plain.append(compiled)
    rest = {
        b"ids": b"1" if ids else b"",
        b"opaques": pickle.dumps(opaques, protocol=5),
        b"plain": pickle.dumps(plain, protocol=5) if len(plain) == len(programs) else b"",
    }
    schema = pa.schema(
        [
            ("names", pa.list_(pa.string())),
            ("digest", pa.binary(32)),
            ("program", pa.large_binary()),
        ],
        metadata=rest,
    )
    columns = [
        pa.array(names.values(), schema.field(0).type),
        pa.array(names.keys(), schema.field(1).type),
        pa.array(programs, schema.field(2).type),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return sink.getvalue()


def sees_ids(compiled: Compiled) -> bool:
    """Return whether a filter may use an event's id; only then its spelling matters."""
    nodes: list[Node] = [] if compiled.tree is None else [compiled.tree]
    for conjunction in compiled.conjunctions:
        nodes += conjunction
    return any(_may_see_id(condition) for node in nodes for condition in conditions(node))


def _may_see_id(condition: Condition) -> bool:
    if not condition.path:
        return True  # it uses the whole event
    first = condition.path[0]
    if isinstance(first, Computed):
        return "id" in first.names
    return first.name.split(".", 1)[0] == "id" if isinstance(first, Flat) else first == "id"


def write_set(filters: Mapping[str, Filter | Compiled], directory: str | None = None) -> str:
    """Write a filter set to a file named by its digest; return the path."""
    packed = pack(filters)
    return write_packed(packed, hashlib.sha256(packed).hexdigest(), directory)


def write_packed(packed: Any, digest: str, directory: str | None = None) -> str:
    """Write the bytes to a file named by their digest unless it exists; return the path."""
    place = own_directory() if directory is None else Path(directory)
    files.make_directory(place)
    path = place / f"filters-{digest}.arrow"
    if path.exists():
        touch(path)
        return str(path)
    # A random name: threads and containers may write the same set at once, under the same process id.
    draft = path.with_suffix(f".{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=files.open_file) as file:
            file.write(packed)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return str(path)


def small_set(path: str) -> bytes | None:
    """Return the bytes of a filter set that may be sent with each task; None if it is larger, or not here."""
    try:
        size = Path(path).stat().st_size
        return Path(path).read_bytes() if size <= SENT_BYTES_MAX else None
    except OSError:
        return None  # executors that see it may be elsewhere


def own_directory() -> Path:
    """
    Return this user's directory for filter sets on this machine, after removing old ones.

    Raises:
        MatchError: another user made it or may write to it; parts of the files are unpickled.
    """
    place = Path(gettempdir()) / f"virta-filters-{os.geteuid()}"
    files.make_directory(place)
    about = place.lstat()
    if (
        not stat.S_ISDIR(about.st_mode)
        or about.st_uid != os.geteuid()
        or about.st_mode & SHARED_WRITE
    ):
        raise MatchError(
            f"{place} is no directory that only this user can write to: remove it, or set TMPDIR"
        )
    used = []
    for entry in os.scandir(place):
        with suppress(OSError):  # another worker removed it
            used.append((entry.stat().st_mtime, entry.path))
    used.sort(reverse=True)
    for position, (when, path) in enumerate(used):
        if position >= SET_FILES_MAX or time.time() - when > SET_SECONDS_MAX:
            with suppress(OSError):
                Path(path).unlink()
    return place


def touch(path: Path) -> None:
    """Mark a file as used; access times are not recorded on every file system."""
    with suppress(OSError):
        os.utime(path)


# JSON texts to match.


def texts_of(column: pa.Array, on: str, *, text_ids: bool = False) -> Texts:
    """
    Return the JSON text that filters see of each row.

    With `text_ids` the rows are events, and ids that are numbers become strings, as everywhere else.
    """
    if on != "event" or text_ids:
        values = [v.encode() if isinstance(v, str) else v or b"" for v in column.to_pylist()]
        return joined(map(document_of if on != "event" else with_text_id, values))
    if column.null_count:
        column = column.fill_null("" if pa.types.is_string(column.type) else b"")
    _, ends, data = column.buffers()
    bounds = np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1]
    return bounds, b"" if data is None else data


def joined(values: Iterable[bytes]) -> Texts:
    """Return texts concatenated, with their bounds."""
    found = list(values)
    return np.fromiter(accumulate(map(len, found), initial=0), np.int32), b"".join(found)


def document_of(value: bytes) -> bytes:
    """
    Return what Koncorde's filters see of a record's value (`virta.event.document_of`).

    A value that is not an event gives an empty text, which no filter matches.
    """
    event = read_event(bytes(value))
    return b"" if event is None else event_document(event.value, event.id)


def with_text_id(value: bytes) -> bytes:
    """Return an event as filters see it: a number as its id is a text."""
    event = read_event(value)
    return value if event is None else event.value


# On the executors.


class FilterSet:
    """A matcher that returns the caller's names of the filters."""

    def __init__(self, matcher: Matcher, names: pa.ListArray, *, sees_ids: bool) -> None:
        self.matcher, self.names, self.sees_ids = matcher, names, sees_ids
        # Equal filters share a number in the matcher; each of their names still gets its row.
        flat = names.flatten()
        self.first = flat if len(flat) == len(names) else None

    def pairs(self, texts: Texts) -> tuple[pa.Array, pa.Array]:
        """Return row and filter name of every hit, by row; rows that are not JSON have none."""
        rows, numbers = self.matcher.match_flat(*texts)
        found = pa.array(np.frombuffer(numbers, np.uint32) - np.uint32(1))
        at = pa.Array.from_buffers(pa.int32(), len(rows), [None, pa.py_buffer(rows)])
        if self.first is not None:
            return at, self.first.take(found)
        lists = self.names.take(found)
        return at.take(pc.list_parent_indices(lists)), lists.flatten()

    def hits(self, texts: Texts) -> np.ndarray[Any, Any]:
        """Return for each text whether any filter matches."""
        found = np.zeros(len(texts[0]) - 1, bool)
        found[np.frombuffer(self.matcher.match_flat(*texts)[0], np.int32)] = True
        return found


_sets: OrderedDict[str, FilterSet] = OrderedDict()


def opened_set(path: str, fetch: Callable[[], Any] | None = None) -> FilterSet:
    """
    Return the filter set of a file, opened once per Python worker; `fetch` returns its bytes if the file is missing.

    Raises:
        MatchError: the file is missing, or its bytes do not have the digest in its name.
    """
    digest = Path(path).stem.removeprefix("filters-")
    found = _sets.get(digest)
    if found is None:
        if fetch is not None and not Path(path).exists():
            path = str(own_directory() / Path(path).name)
            if not Path(path).exists():
                path = write_packed(fetch(), digest)
        found = _sets[digest] = open_file(Path(path), digest)
        while len(_sets) > SETS_MAX:
            _sets.popitem(last=False)
    _sets.move_to_end(digest)
    return found


def open_file(path: Path, digest: str) -> FilterSet:
    try:
        # Parts are unpickled, and other users may be able to write to the directory: bytes that could change after the
        # digest was checked are copied first. Not mapped: truncating a mapped file would end the worker.
        source = pa.BufferReader(path.read_bytes())
    except OSError as exc:
        raise MatchError(f"the filter set {path} cannot be read: {exc}") from exc
    touch(path)
    if hashlib.sha256(source.read_buffer()).hexdigest() != digest:
        raise MatchError(f"{path} is not the filter set it was: make it again")
    table = pa.ipc.open_file(source).read_all().combine_chunks()
    rest = table.schema.metadata
    names = column_of(table, "names")
    ids = bool(rest[b"ids"])
    # A copy: a slice would keep the whole file in memory.
    names = names.take(pa.array(range(len(names)), pa.int64()))
    if Matcher().engine == "plain":
        return FilterSet(plain_matcher(rest[b"plain"], len(names)), names, sees_ids=ids)
    programs = Programs(
        digests=column_of(table, "digest").buffers()[1] or b"",
        ends=column_of(table, "program").buffers()[1] or bytes(8),
        programs=column_of(table, "program").buffers()[2] or b"",
        opaques=pickle.loads(rest[b"opaques"]),  # noqa: S301 - bytes of our own driver
    )
    if len(names) < IMAGE_FILTERS_MIN:
        return FilterSet(heap_matcher(programs), names, sees_ids=ids)
    return FilterSet(shared_matcher(path.with_suffix(""), lambda: programs), names, sees_ids=ids)


def column_of(table: pa.Table, name: str) -> pa.Array:
    chunks = table.column(name).chunks
    return chunks[0] if chunks else pa.array([], table.schema.field(name).type)


def plain_matcher(packed: bytes, count: int) -> Matcher:
    if not packed and count:
        raise MatchError(
            f"{count} filters need the native matcher on every executor, which was not built here:"
            f" install virta from its wheel there, or give at most {PLAIN_FILTERS_MAX}"
        )
    matcher = Matcher(engine="plain")
    matcher.add_many(pickle.loads(packed))  # noqa: S301 - bytes of our own driver
    return matcher
