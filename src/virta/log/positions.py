"""
Consumer positions on disk (groups/<name>.grp) and the locks beside them (groups/<name>.lock).

    .grp   64-byte header: "VIRTAGR1" | u32 version 1 | u32 partitions | u64 created µs | zeros | u32 crc32c of bytes 0..59
           then per partition two 32-byte slots:
           u64 sequence | u64 next offset | u64 µs | u32 generation | u32 crc32c
    .lock  empty; its bytes are locked (OFD locks: the kernel frees them when the holder dies):
           0          positions are being changed
           1024 + m   member m is alive

A write goes to the older of a partition's two slots, so a torn one leaves the other. The highest sequence with a
good CRC counts. A generation is turn * 1024 + member: it names the owner (1023: nobody) and it fences, for the turn
grows with every change of owner and a commit of an older generation is refused.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from virta import files
from virta.errors import ConsumerError
from virta.log import kernel
from virta.log.directory import GROUPS, write_whole
from virta.log.limits import CONSUMER_NAME_MAX, MEMBERS_MAX, PARTITIONS_MAX
from virta.log.segment import now_us, write_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAGIC: Final = b"VIRTAGR1"
HEADER_BYTES: Final = 64
SLOT_BYTES: Final = 32
_HEADER: Final = struct.Struct("<8sIIQ36x")
_SLOT: Final = struct.Struct("<QQQI")
_FLOCK: Final = struct.Struct("hhqqi4x")
CHANGING_BYTE: Final = 0
MEMBER_BYTE: Final = 1024
NOBODY: Final = MEMBERS_MAX
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


_open: weakref.WeakSet[LockFile] = weakref.WeakSet()


class Slot(NamedTuple):
    sequence: int
    next: int
    time: int
    generation: int

    @property
    def owner(self) -> int:
        return self.generation & 1023

    def owned_by(self, member: int, time: int) -> Slot:
        """The slot after a change of owner."""
        turn = ((self.generation >> 10) + 1) & 0x3FFFFF
        return Slot(self.sequence + 1, self.next, time, turn << 10 | member)


def check_name(name: object) -> str:
    if not isinstance(name, str) or len(name) > CONSUMER_NAME_MAX or not _NAME.fullmatch(name):
        raise ConsumerError(
            f"a consumer's name is 1 to {CONSUMER_NAME_MAX} letters, digits, '.', '_' or '-', "
            f"not starting with '.' or '-'; got {name!r:.200}",
            code="consumer_name",
        )
    return name


class Positions:
    """One open .grp file; every partition's current slot is read afresh each time."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name = name
        self.path = directory / GROUPS / f"{name}.grp"
        self.fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        header = os.pread(self.fd, HEADER_BYTES, 0)
        crc = int.from_bytes(header[60:64], "little")
        if len(header) < HEADER_BYTES or kernel.crc32c(header[:60]) != crc or header[:8] != MAGIC:
            os.close(self.fd)
            raise ConsumerError(
                f"{self.path} is not a consumer's position file or is damaged; remove it to start over",
                code="consumer_damaged",
            )
        self.partitions: int
        self.created: int
        _, _, self.partitions, self.created = _HEADER.unpack(header[:60])

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self) -> list[Slot]:
        """The current slot of every partition."""
        data = os.pread(self.fd, self.partitions * 2 * SLOT_BYTES, HEADER_BYTES)
        return [self._newest(data, p)[0] for p in range(self.partitions)]

    def write(self, changes: dict[int, Slot]) -> None:
        """Replace slots; the caller holds the changing byte."""
        data = os.pread(self.fd, self.partitions * 2 * SLOT_BYTES, HEADER_BYTES)
        for partition, slot in changes.items():
            _, newest = self._newest(data, partition)
            body = _SLOT.pack(*slot)
            body += kernel.crc32c(body).to_bytes(4, "little")
            older = 2 * partition + (1 - newest)
            write_all(self.fd, body, HEADER_BYTES + older * SLOT_BYTES)

    def sync(self) -> None:
        """Make what was written durable; not for those who hold the changing byte, for it takes its time."""
        os.fdatasync(self.fd)

    def _newest(self, data: bytes, partition: int) -> tuple[Slot, int]:
        best, which = Slot(0, 0, self.created, NOBODY), 1
        for number in (0, 1):
            at = (2 * partition + number) * SLOT_BYTES
            body, crc = data[at : at + 28], data[at + 28 : at + 32]
            if kernel.crc32c(body) == int.from_bytes(crc, "little") and any(body):
                slot = Slot(*_SLOT.unpack(body))
                if slot.sequence > best.sequence:
                    best, which = slot, number
        return best, which


def create_positions(directory: Path, name: str, partitions: int, start: int) -> None:
    """A new consumer at `start`, unless it exists."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise ConsumerError(f"partitions must be from 1 to {PARTITIONS_MAX}, got {partitions!r}")
    folder = directory / GROUPS
    files.make_inside(folder)
    path = folder / f"{name}.grp"
    with LockFile(directory, name) as locks, locks.changing():
        if path.exists():
            return
        header = _HEADER.pack(MAGIC, 1, partitions, now_us())
        body = _SLOT.pack(1, start, now_us(), NOBODY)
        slot = body + kernel.crc32c(body).to_bytes(4, "little") + bytes(SLOT_BYTES)
        write_whole(path, header + kernel.crc32c(header).to_bytes(4, "little") + slot * partitions)


class LockFile:
    """The byte locks of one consumer, held through one open file description."""

    def __init__(self, directory: Path, name: str) -> None:
        path = directory / GROUPS / f"{name}.lock"
        self.fd = files.open_file(path, os.O_RDWR | os.O_CREAT)
        self._pid = os.getpid()
        _open.add(self)

    def __enter__(self) -> LockFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            if os.getpid() == self._pid:
                # A child that was forked meanwhile has it open too: closing alone would leave the locks in force.
                everything = _FLOCK.pack(fcntl.F_UNLCK, 0, 0, 0, 0)
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, everything)
            os.close(self.fd)
            self.fd = -1

    def take(self, byte: int) -> bool:
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def drop(self, byte: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, byte, 1, 0))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Exclude other changes of positions; held for microseconds."""
        lock = _FLOCK.pack(fcntl.F_WRLCK, 0, CHANGING_BYTE, 1, 0)
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLKW, lock)
        try:
            yield
        finally:
            self.drop(CHANGING_BYTE)

    def join(self) -> int:
        """Take a member's byte for ourselves."""
        for member in range(MEMBERS_MAX):
            if self.take(MEMBER_BYTE + member):
                return member
        raise ConsumerError(f"a consumer has at most {MEMBERS_MAX} members", code="consumer_full")

    def others(self) -> set[int]:
        """The other members that are alive."""
        alive: set[int] = set()
        ranges = [(MEMBER_BYTE, MEMBER_BYTE + MEMBERS_MAX)]
        while ranges:
            begin, end = ranges.pop()
            asked = _FLOCK.pack(fcntl.F_WRLCK, 0, begin, end - begin, 0)
            kind, _, start, length, _ = _FLOCK.unpack(
                fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked)
            )
            if kind == fcntl.F_UNLCK:
                continue
            first, last = max(start, begin), min(start + length if length else end, end)
            alive |= set(range(first - MEMBER_BYTE, last - MEMBER_BYTE))
            # The system names some lock in the range, not the lowest: look on both sides of it.
            ranges += [r for r in ((begin, first), (last, end)) if r[0] < r[1]]
        return alive


def list_names(directory: Path) -> list[str]:
    try:
        entries = os.listdir(directory / GROUPS)
    except FileNotFoundError:
        return []
    return sorted(entry[:-4] for entry in entries if entry.endswith(".grp"))


def position_of(directory: Path, name: str) -> int | None:
    """The offset below which a consumer has everything; None if there is no such consumer."""
    if not _NAME.fullmatch(name):
        return None
    try:
        positions = Positions(directory, name)
    except FileNotFoundError:
        return None
    try:
        return min(slot.next for slot in positions.read())
    finally:
        positions.close()


def _all_after_fork() -> None:
    """In a child: its parent's locks die with the parent, whoever else has the file open."""
    for locks in list(_open):
        locks.close()


os.register_at_fork(after_in_child=_all_after_fork)
