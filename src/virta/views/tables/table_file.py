"""
Table files and rebuilding: how a row table comes to be.

A table file is `<sha>.rows`, written beside and renamed. All integers are little-endian:

    0    8   magic  "VIRTROW1"
    8    4   CRC-32C of everything after it
    12   4   length of the head in bytes
    16   n   head: JSON object with the log's id and epoch, channel, key rule, position, first offset, exact_from, counts
    …        lengths of the keys in bytes (u16 each), keys (UTF-8, end to end), offsets of the rows (i64; ~offset of the
             deletion for a row that only the ring refers to), touches: offsets (i64), rows (u32), previous offsets (i64)

There are no memberships in it: a pass finds them. A file that is wrong in any way is ignored, and so is one whose
position is below the end of a compacted segment, since compaction may have removed a delete that follows it. Then the
table is rebuilt from the log. `docs/format.md` does not promise this format: it may change with every release.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from array import array
from typing import TYPE_CHECKING, Any, Final

import msgspec

from virta import files
from virta.errors import ViewError
from virta.log.engine import kernel
from virta.views.changes import read_record
from virta.views.limits import DEFAULT_LIMITS
from virta.views.tables.table import EMPTY, RowTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from virta.event.row_changes import KeyRule
    from virta.log import Log
    from virta.views.limits import ViewLimits
    from virta.views.view import View

MAGIC: Final = b"VIRTROW1"
HEAD_AT: Final = 16
# Records that are applied together while a table is built.
BUILD_RECORDS: Final = 4096
SUFFIX: Final = ".rows"

logger = logging.getLogger("virta.views")


class TableImage:
    """What a table file contains, copied from a table in one step; `write` may run in a thread."""

    def __init__(self, log: Log, table: RowTable) -> None:
        # Copies only: this runs in the thread that delivers.
        self._keys = table.keys[:]
        self._offsets = table.offsets[:]
        self._ring = table.ring.copy(0)
        self._head = {
            "log": log.id,
            "epoch": log.epoch,
            "channel": table.channel,
            "key": table.rule.text,
            "position": table.position,
            "first_offset": table.first_offset,
            "exact_from": table.exact_from,
            "keyed": table.keyed,
            "unkeyed": table.unkeyed,
            "touches": len(self._ring),
            "byteorder": sys.byteorder,
        }

    def write(self, path: Path) -> None:
        """Write the file durably; blocks."""
        used = [n for n, key in enumerate(self._keys) if key is not None]
        renumbered = array("I", bytes(4 * len(self._keys)))
        for new, old in enumerate(used):
            renumbered[old] = new
        keys = [key.encode("utf-8", "surrogatepass") for key in self._keys if key is not None]
        head = msgspec.json.encode(self._head | {"rows": len(used)})
        body = b"".join(
            [
                len(head).to_bytes(4, "little"),
                head,
                array("H", [len(key) for key in keys]).tobytes(),
                b"".join(keys),
                array("q", [self._offsets[n] for n in used]).tobytes(),
                self._ring.offsets.tobytes(),
                array("I", [renumbered[n] for n in self._ring.numbers]).tobytes(),
                self._ring.previous.tobytes(),
            ]
        )
        files.write_whole(path, MAGIC + kernel.crc32c(body).to_bytes(4, "little") + body)


def table_path(directory: Path, channel: str, rule: KeyRule) -> Path:
    """Return the name of a table's file."""
    digest = hashlib.sha256(f"{channel}\0{rule.text}".encode()).hexdigest()
    return directory / (digest[:40] + SUFFIX)


def load_table(
    path: Path, log: Log, channel: str, rule: KeyRule, limits: ViewLimits = DEFAULT_LIMITS
) -> RowTable | None:
    """Return the table in a file; None if there is none, or it does not fit the log."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("table_file_unreadable path=%s: %s", path, error.strerror)
        return None
    try:
        return _load(data, log, channel, rule, limits)
    except (ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        logger.warning("table_file_ignored path=%s: %s", path, error)
        return None


def _load(data: bytes, log: Log, channel: str, rule: KeyRule, limits: ViewLimits) -> RowTable:
    if data[:8] != MAGIC or kernel.crc32c(data[12:]) != int.from_bytes(data[8:12], "little"):
        raise ValueError("its checksum is wrong")
    at = HEAD_AT + int.from_bytes(data[12:16], "little")
    head: dict[str, Any] = msgspec.json.decode(data[HEAD_AT:at])
    wanted = {"log": log.id, "epoch": log.epoch, "channel": channel, "key": rule.text}
    for name, value in (wanted | {"byteorder": sys.byteorder}).items():
        if head[name] != value:
            raise ValueError(f"its {name} is {head[name]!r}, not {value!r}")
    if head["position"] > log.next_offset:
        raise ValueError(f"its position {head['position']} is beyond the log")
    if compacted_end(log) > head["position"]:
        raise ValueError("the log was compacted beyond its position")
    rows, touches = head["rows"], head["touches"]
    lengths = array("H", data[at : at + 2 * rows])
    at += 2 * rows
    keys = []
    for length in lengths:
        keys.append(data[at : at + length].decode("utf-8", "surrogatepass"))
        at += length
    columns = []
    for code, size, count in (
        ("q", 8, rows),
        ("q", 8, touches),
        ("I", 4, touches),
        ("q", 8, touches),
    ):
        columns.append(array(code, data[at : at + size * count]))
        at += size * count
    if at != len(data):
        raise ValueError("its length is wrong")
    table = RowTable(channel, rule, position=head["position"], limits=limits)
    table.first_offset, table.exact_from = head["first_offset"], head["exact_from"]
    table.keyed, table.unkeyed = head["keyed"], head["unkeyed"]
    table.restore(keys, columns[0])
    _, offsets, numbers, previous = columns
    lost, _ = table.ring.extend(offsets, numbers, previous, [EMPTY] * len(offsets))
    if lost:  # the limit was lowered
        table.exact_from = max(table.exact_from, lost[-1] + 1)
    return table


def compacted_end(log: Log) -> int:
    """Return the offset after the last compacted segment; 0 if none is compacted. Blocks."""
    return max((info.next for info in log.segments() if info.compacted), default=0)


def check_compaction(log: Log, channel: str, rule: KeyRule) -> int:
    """
    Return the end of the last compacted segment.

    Raises:
        ViewError: view-key-compacted, for a key that compaction does not know.
    """
    end = compacted_end(log)
    if end and rule.steps:
        raise ViewError(
            f"channel {channel!r} is in compacted segments, and compaction knows record keys only: rows by "
            f"$key={rule.text} may be missing; publish with that value as partitionkey and leave $key out",
            code="view-key-compacted",
        )
    return end


def check_keyed(channel: str, rule: KeyRule, keyed: int, unkeyed: int) -> None:
    """
    Refuse a view of a channel none of whose records has a key.

    Raises:
        ViewError: view-unkeyed.
    """
    if keyed or not unkeyed:
        return
    if rule.steps:
        why = (
            f"none of the {unkeyed} records of channel {channel!r} has a text, a number or a boolean at "
            f"{rule.text}: name a pointer from the event's root, such as /data/id"
        )
    else:
        why = (
            f"none of the {unkeyed} records of channel {channel!r} has a key: publish events with a partitionkey "
            "or a subject, or name the key with $key=/data/id"
        )
    raise ViewError(why, code="view-unkeyed")


def open_table(
    log: Log,
    channel: str,
    rule: KeyRule,
    *,
    directory: Path | None = None,
    limits: ViewLimits = DEFAULT_LIMITS,
    stopped: Callable[[], bool] = bool,
) -> RowTable:
    """
    Return the table of a channel as of about now: from its file and the records since, or from the log. Blocks.

    Raises:
        ViewError: view-key-compacted or too-many-rows.
    """
    compacted = check_compaction(log, channel, rule)
    first = log.first_offset
    table = None
    if directory is not None:
        table = load_table(table_path(directory, channel, rule), log, channel, rule, limits)
    complete = table is not None and table.position >= first
    if table is None:
        table = RowTable(channel, rule, position=first, limits=limits)
        table.first_offset = first
        complete = first == 0
    read_on(log, table, log.next_offset, stopped)
    # Only now: consumers of an earlier process may have any position up to here, and rows that expired.
    table.expire(log.first_offset)
    table.exact_from = max(table.exact_from, compacted)
    if not complete:
        # A consumer may have rows that are no longer in the log.
        table.forget(table.position + 1)
    return table


def read_on(log: Log, table: RowTable, end: int, stopped: Callable[[], bool] = bool) -> None:
    """Apply the records between a table's position and `end`; blocks. The table has no views yet."""
    for _ in read_step(log, table, end):
        if stopped():
            return


def read_step(log: Log, table: RowTable, end: int | None = None) -> Iterator[list[View]]:
    """Apply records from a table's position on; yield the views with hits after every step. Blocks."""
    rule = table.rule
    end = log.next_offset if end is None else end
    if table.position >= end:
        return
    with log.read(
        topics=[table.channel], start=table.position, end=end, on_gap="skip", on_corruption="skip"
    ) as reader:
        for records in reader.batches():
            for start in range(0, len(records), BUILD_RECORDS):
                part = records[start : start + BUILD_RECORDS]
                changes = [(record.offset, read_record(record, rule)) for record in part]
                yield table.apply(changes, part[-1].offset + 1)
    table.position = max(table.position, end)


def save_table(log: Log, table: RowTable, directory: Path) -> None:
    """Write a table's file; blocks."""
    files.make_inside(directory)
    TableImage(log, table).write(table_path(directory, table.channel, table.rule))
