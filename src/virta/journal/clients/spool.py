"""
Requests stored in files until a daemon has them: nothing is lost while it is away.

A directory with one append-only file per hour, `YYYYMMDDHH.fjs` (UTC), of records:

    at   bytes
    0    1     "+" pending, "-" erased
    1    8     size of the message, lower-case hex
    9    8     CRC-32 of the message, lower-case hex
    17   1     space
    18   n     the complete request
    18+n 1     newline

Writers only append, one write() per record, under a shared flock that keeps the file from being deleted
meanwhile; they do not exclude each other. A record is erased by overwriting its first byte. Damaged
bytes (a writer died) are skipped to the next record whose size, newline and CRC all fit; an incomplete
tail is waited for.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
import zlib
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from virta import files
from virta.clock import now_us
from virta.journal.jobs.job import host_of
from virta.journal.protocol.codec import encode_request
from virta.journal.protocol.messages import (
    COMMAND_KEY,
    KEY_BYTES_MAX,
    PERSIST,
    VALUE_DATA_BYTES_MAX,
    Function,
    RefusedError,
    Request,
)
from virta.journal.protocol.rules import CLOCK_SKEW_US_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HEAD_BYTES = 18
MESSAGE_BYTES_MAX = VALUE_DATA_BYTES_MAX + 2 * KEY_BYTES_MAX + 64
RECORD_BYTES_MAX = HEAD_BYTES + MESSAGE_BYTES_MAX + 1
REJECTED = "rejected.fjs"
PING_SOCKET = "ping.sock"
STAMP = "stamp"  # the last timestamp, 20 digits
STAMP_DIGITS = 20
# Its lock is needed for microseconds; a process that has it for longer was stopped, perhaps for hours.
STAMP_PATIENCE_S = 1.0
# The file of a process whose clock lags a little must still exist.
DELETE_AFTER_HOUR_S = 300
# Those whose repetition is harmless: a resent RENAME would report a missing key.
SPOOLED = frozenset({Function.SET, Function.DELETE, Function.PUSH})
# Read at once: as a rule, and where that has no whole record.
READ_BYTES = 256 * 1024
LARGE_BYTES = 2 * RECORD_BYTES_MAX
_HEAD = re.compile(rb"[+\-][0-9a-f]{16} ")


class Spooled(NamedTuple):
    """A record found: `at` and `end` are positions in the file."""

    at: int
    end: int
    pending: bool
    message: bytes


def encode_record(message: bytes) -> bytes:
    if len(message) > MESSAGE_BYTES_MAX:
        raise RefusedError("too-large", f"{len(message)} bytes, at most {MESSAGE_BYTES_MAX}")
    return b"+%08x%08x %s\n" % (len(message), zlib.crc32(message), message)


def scan(data: bytes, base: int = 0, *, more: bool = False) -> Iterator[Spooled]:
    """
    Yield the complete records in `data`, which starts at position `base` of its file.

    If there is `more` behind it, a record that may continue there ends the scan: apparent records inside of it
    may be its content.
    """
    at = 0
    while at < len(data):
        record = _record_at(data, at, base)
        if record is None:
            if more and _continues(data, at):
                return
            following = _HEAD.search(data, at + 1)
            if following is None:
                return
            at = following.start()
            continue
        yield record
        at = record.end - base


def _continues(data: bytes, at: int) -> bool:
    """Whether a record begins here that ends behind the data."""
    if _HEAD.match(data, at) is None:
        return False
    size = int(data[at + 1 : at + 9], 16)
    return size <= MESSAGE_BYTES_MAX and at + HEAD_BYTES + size + 1 > len(data)


def _record_at(data: bytes, at: int, base: int) -> Spooled | None:
    if _HEAD.match(data, at) is None:
        return None
    size = int(data[at + 1 : at + 9], 16)
    end = at + HEAD_BYTES + size + 1
    if size > MESSAGE_BYTES_MAX or end > len(data) or data[end - 1] != 0x0A:
        return None
    message = data[at + HEAD_BYTES : end - 1]
    if zlib.crc32(message) != int(data[at + 9 : at + 17], 16):
        return None
    return Spooled(base + at, base + end, data[at] == 0x2B, message)


class Spool:
    """The writing side: `put` returns when the request is as safe as it asks to be."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        files.make_directory(directory)
        self._named = ""  # the file of which the name is on disk
        self._stuck = False  # a stopped process has the stamp's lock: do not wait for it again
        self._ping = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def put(self, request: Request) -> None:
        """
        Keep a SET, DELETE or PUSH for the forwarder.

        Raises:
            RefusedError: a command whose repetition would not be harmless, or that any daemon would refuse.
        """
        if request.function not in SPOOLED or request.key == COMMAND_KEY:
            raise RefusedError("bad-query", "only SET, DELETE and PUSH can be spooled")
        if not request.key:
            raise RefusedError("key-missing")
        if request.function == Function.PUSH and not request.key2:
            host_of(request.key)  # refuse it now instead of rejecting it later
        if not request.timestamp:
            request.timestamp = self._stamp()
        self.append(encode_request(request), sync=bool(request.flags & PERSIST))

    def _stamp(self) -> int:
        """
        Return a timestamp later than all spooled here before, by any process.

        A clock that was set back in between must not make the later command older. If it was ahead by
        more than a daemon accepts, that command is refused anyway, and this one must not be.
        """
        descriptor = files.open_file(self.directory / STAMP, os.O_RDWR | os.O_CREAT)
        try:
            # Without the lock two commands of two processes may get one timestamp, at worst.
            self._stuck = not files.lock_until(
                descriptor, time.monotonic() + (0.0 if self._stuck else STAMP_PATIENCE_S)
            )
            text = os.pread(descriptor, STAMP_DIGITS, 0)
            now, last = now_us(), int(text) if text.isdigit() else 0
            stamp = max(now, last + 1) if last <= now + CLOCK_SKEW_US_MAX else now
            os.pwrite(descriptor, b"%0*d" % (STAMP_DIGITS, stamp), 0)
        finally:
            os.close(descriptor)
        return stamp

    def append(self, *messages: bytes, sync: bool) -> tuple[str, list[int]]:
        """Add records with one write; return the file's name and the end of each record in it."""
        records = [encode_record(message) for message in messages]
        while True:
            path = self.directory / time.strftime("%Y%m%d%H.fjs", time.gmtime())
            descriptor = files.open_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                if not _leads_to(path, descriptor):
                    continue  # deleted between open and lock
                self._write(descriptor, b"".join(records), path)
                end = os.lseek(descriptor, 0, os.SEEK_CUR)
                if sync:
                    os.fdatasync(descriptor)
                    # The writer of the first record may not have synced the directory yet, or died.
                    if self._named != path.name or end == sum(map(len, records)):
                        files.sync_directory(self.directory)
                        self._named = path.name
            finally:
                os.close(descriptor)
            self._wake()
            start = end - sum(map(len, records))
            return path.name, [start + total for total in accumulate(map(len, records))]

    def _write(self, descriptor: int, record: bytes, path: Path) -> None:
        written = os.write(descriptor, record)
        if written != len(record):
            # What is there is skipped by readers: its size or CRC does not fit.
            raise RefusedError("disk", f"{path} took {written} of {len(record)} bytes")

    def _wake(self) -> None:
        """Wake the forwarder, which also checks by itself."""
        try:
            self._ping.sendto(b"PING", str(self.directory / PING_SOCKET))
        except OSError:
            return

    def close(self) -> None:
        self._ping.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SpoolFile:
    """The reading side of one file, for the one forwarder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._position = 0  # everything before was handed out

    @property
    def current(self) -> bool:
        """Whether the path still leads to this file."""
        return _leads_to(self.path, self._descriptor)

    def read(self, count: int) -> list[Spooled]:
        """Return up to `count` further pending records; reads few bytes, however long the file."""
        return self._read(count, self._read_tail)

    def _read(self, count: int, tail: Callable[[], list[Spooled]]) -> list[Spooled]:
        found: list[Spooled] = []
        while len(found) < count:
            left = os.fstat(self._descriptor).st_size - self._position
            records = self._scan(READ_BYTES, more=True) if left > 0 else []
            if not records and left > READ_BYTES:
                records = self._scan(LARGE_BYTES, more=True)
            if not records and left >= LARGE_BYTES:
                self._position += RECORD_BYTES_MAX  # damage larger than any record
                continue
            if not records and left > 0:
                records = tail()
            if not records:
                break
            for record in records:
                if len(found) == count:
                    break
                self._position = record.end
                if record.pending:
                    found.append(record)
        return found

    def _scan(self, size: int, *, more: bool) -> list[Spooled]:
        data = os.pread(self._descriptor, size, self._position)
        return list(scan(data, self._position, more=more))

    def _read_tail(self) -> list[Spooled]:
        """Read what follows an incomplete record, unless a writer is just completing it."""
        if not self._exclude_writers():
            return []
        try:
            return self._scan_tail()
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _scan_tail(self) -> list[Spooled]:
        return self._scan(LARGE_BYTES, more=False)

    def _exclude_writers(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def erase(self, record: Spooled) -> None:
        os.pwrite(self._descriptor, b"-", record.at)

    def rewind(self) -> None:
        """Hand out again what is still pending."""
        self._position = 0

    def remove_if_done(self, now: float) -> bool:
        """Delete the file if its hour is over and nothing in it is pending; True if it is deleted."""
        try:
            hour = time.strptime(self.path.name, "%Y%m%d%H.fjs")
        except ValueError:
            return False
        if now < _seconds_of_hour(hour) + 3600 + DELETE_AFTER_HOUR_S:
            return False
        if not self._exclude_writers():
            return False
        try:
            if self._read(1, self._scan_tail):
                self.rewind()
                return False
            # Else another process removed it, and its name belongs to another file.
            if self.current:
                self.path.unlink()
            return True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)


def _leads_to(path: Path, descriptor: int) -> bool:
    """Whether the path still leads to the opened file."""
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _seconds_of_hour(hour: time.struct_time) -> float:
    import calendar  # noqa: PLC0415  (only for files that are an hour old)

    return calendar.timegm(hour)
