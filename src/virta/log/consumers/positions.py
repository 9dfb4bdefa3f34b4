"""
Consumer positions on disk (groups/<name>.grp) and the locks beside them (groups/<name>.lock).

    .grp   64-byte header: "VIRTAGR1" | u32 version 1 | u32 partitions | u64 created µs | u32 turn | u32 flags
           (1: not yet merged) | zeros | u32 crc32c of bytes 0..59
           then per partition two 32-byte slots:
           u64 sequence | u64 next offset | u64 µs | u32 generation | u32 crc32c
    .grp.N the same file for turn N, see below
    .lock  empty; its bytes are locked (OFD locks: the system releases them when their process ends):
           T          positions are being changed, in the file of turn T (modulo 1024)
           1024 + m   member m is alive

A write goes to the older of a partition's two slots, so a torn one leaves the other. The highest sequence with a
good CRC counts. A generation is turn * 1024 + member: it names the owner (1023: none) and it fences: the turn
grows with every change of owner, and a commit of an older generation is refused.

A process that is stopped (SIGSTOP) while it has locked the changing byte would block the whole group, and it may continue to
write at any later time. So after a second without any change the others continue in a new file: turn + 1, which has a
changing byte of its own. `link` makes that file, so only one of several processes can. Every change ends with a check
that its file is still the last one; if not, it is done again in the new file. A change that passed this check came
before the new file did, and the first process to lock the new file merges it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import struct
import time
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

from virta import files
from virta.clock import now_us
from virta.errors import ConsumerError
from virta.log.engine import kernel
from virta.log.format.directory import GROUPS
from virta.log.limits import (
    CHANGE_PATIENCE_S,
    CONSUMER_NAME_MAX,
    MEMBERS_MAX,
    PARTITIONS_MAX,
    TURNS_MAX,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAGIC: Final = b"VIRTAGR1"
HEADER_BYTES: Final = 64
SLOT_BYTES: Final = 32
_HEADER: Final = struct.Struct("<8sIIQII28x")
_UNMERGED: Final = 1
_SLOT: Final = struct.Struct("<QQQI")
_FLOCK: Final = struct.Struct("hhqqi4x")
CHANGING_BYTE: Final = 0  # of turn 0; those of later turns follow
TURN_BYTES: Final = 1024
MEMBER_BYTE: Final = 1024
NO_OWNER: Final = MEMBERS_MAX
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# Pauses while waiting for the changing byte: first as short as a change, at most below what users notice.
_PAUSE_S_MIN: Final = 0.00005
_PAUSE_S_MAX: Final = 0.005


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
        """Return the slot after a change of owner."""
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
    """The open .grp file of one consumer, or its last turn; slots are read afresh each time."""

    def __init__(self, directory: Path, name: str, *, read_only: bool = False) -> None:
        self.name = name
        self.path = directory / GROUPS / f"{name}.grp"
        self.fd = -1
        self.partitions = 0
        self.created = 0
        self._flags = os.O_CLOEXEC | (os.O_RDONLY if read_only else os.O_RDWR)
        self._turn = self._first_turn = self._state = 0
        self._successor = ""
        self._first_file = (0, 0)  # device and inode of the file without a number
        self._reopen()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self) -> list[Slot]:
        """Return the current slot of every partition."""
        while self._superseded():
            self._reopen()
        slots = self._slots(self._data())
        for partition, slot in self._unmerged(slots).items():
            slots[partition] = slot
        return slots

    def change(
        self, locks: LockFile, compute: Callable[[list[Slot]], dict[int, Slot]]
    ) -> dict[int, Slot]:
        """
        Replace the slots that `compute` returns for the current ones, excluding other changes.

        `compute` has no side effects: it is called again if the file was superseded.
        """
        while True:
            byte = self._lock(locks)
            try:
                self._merge()
                changes = compute(self._slots(self._data()))
                self._write(changes)
                if not self._superseded():
                    return changes
            finally:
                locks.unlock(byte)

    def sync(self) -> None:
        """Sync the file; call it without the lock on the changing byte, because it is slow."""
        os.fdatasync(self.fd)

    @property
    def chained(self) -> bool:
        """Return whether files of earlier turns still exist."""
        return self._turn != self._first_turn

    def collapse(self, locks: LockFile) -> None:
        """Return to a single file, once no process is inside a change of an earlier turn."""
        byte = self._lock(locks)
        taken = [byte]
        try:
            self._merge()
            for turn in range(self._first_turn, self._turn):
                if not locks.lock(_changing_byte(turn)):
                    return
                taken.append(_changing_byte(turn))
            files.write_whole(self.path, os.pread(self.fd, self._size, 0))
            for turn in range(self._first_turn + 1, self._turn + 1):
                self._path_of(turn).unlink(missing_ok=True)
        finally:
            for each in taken:
                locks.unlock(each)
        self._reopen()

    # --- which file ---

    def _path_of(self, turn: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{turn}")

    def _reopen(self) -> None:
        """Open the file of the last turn."""
        while True:
            fd, header = self._open_file(self.path)
            first, first_file = header[4], _file_identity(os.fstat(fd))
            while True:
                try:
                    following, its_header = self._open_file(self._path_of(header[4] + 1))
                except FileNotFoundError:
                    break
                os.close(fd)
                fd, header = following, its_header
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)  # replaced by `collapse` since it was opened
        self.close()
        self.fd = fd
        self._first_turn, self._first_file = first, first_file
        _, _, self.partitions, self.created, self._turn, self._state = header
        self._successor = str(self._path_of(self._turn + 1))

    def _open_file(self, path: Path) -> tuple[int, tuple[bytes, int, int, int, int, int]]:
        fd = os.open(path, self._flags)
        header = os.pread(fd, HEADER_BYTES, 0)
        crc = int.from_bytes(header[60:64], "little")
        if len(header) < HEADER_BYTES or kernel.crc32c(header[:60]) != crc or header[:8] != MAGIC:
            os.close(fd)
            raise ConsumerError(
                f"{path} is not a consumer's position file or is damaged; remove it to start over",
                code="consumer_damaged",
            )
        return fd, _HEADER.unpack(header[:60])

    def _superseded(self) -> bool:
        if os.fstat(self.fd).st_nlink == 0 or os.path.exists(self._successor):
            return True
        # `collapse` replaces the first file before it removes ours, and may be killed in between.
        return self.chained and _file_identity(os.stat(self.path)) != self._first_file

    def _lock(self, locks: LockFile) -> int:
        """Lock the changing byte of the last turn and return it."""
        while True:
            if self._superseded():
                self._reopen()
            byte = _changing_byte(self._turn)
            got = self._wait_for(locks, byte)
            if self._superseded():
                if got:
                    locks.unlock(byte)
            elif got:
                return byte
            else:
                self._supersede()

    def _wait_for(self, locks: LockFile, byte: int) -> bool:
        """Lock `byte`; return False if its owner made no change for so long that it must be stopped."""
        seen = b""
        deadline, pause = 0.0, _PAUSE_S_MIN
        while not locks.lock(byte):
            if self._superseded():
                return False
            data = self._data()
            now = time.monotonic()
            if data != seen:  # other processes make progress
                seen, deadline = data, now + CHANGE_PATIENCE_S
            elif now >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 2, _PAUSE_S_MAX)
        return True

    def _supersede(self) -> None:
        """Create the file of the next turn unless another process did."""
        if self._turn - self._first_turn >= TURNS_MAX:
            raise ConsumerError(
                f"{TURNS_MAX} processes are stopped while they change the positions of consumer {self.name!r}; "
                "continue or end them (they are in state T in ps)",
                code="consumer_stuck",
            )
        header = self._header(self._turn + 1, _UNMERGED)
        make_file(self._path_of(self._turn + 1), header + self._data())

    def _unmerged(self, slots: list[Slot]) -> dict[int, Slot]:
        """Return what was changed in earlier turns after they were copied to this one."""
        if not self._state & _UNMERGED:
            return {}
        self._state = _HEADER.unpack(os.pread(self.fd, _HEADER.size, 0))[5]
        if not self._state & _UNMERGED:
            return {}  # another process did it
        late: dict[int, Slot] = {}
        earlier = [self._path_of(turn) for turn in range(self._first_turn + 1, self._turn)]
        for path in (self.path, *earlier):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                theirs = self._slots(os.pread(fd, self._size, HEADER_BYTES))
            finally:
                os.close(fd)
            for partition, slot in enumerate(theirs):
                if slot.sequence > late.get(partition, slots[partition]).sequence:
                    late[partition] = slot
        return late

    def _merge(self) -> None:
        """Merge earlier turns; call it under the lock of a new turn, before any change in it."""
        if self._state & _UNMERGED:
            self._write(self._unmerged(self._slots(self._data())))
            files.write_all(self.fd, self._header(self._turn, 0), 0)
            os.fdatasync(self.fd)
            self._state = 0

    def _header(self, turn: int, state: int) -> bytes:
        return pack_header(self.partitions, self.created, turn, state)

    # --- slots ---

    @property
    def _size(self) -> int:
        return HEADER_BYTES + self.partitions * 2 * SLOT_BYTES

    def _data(self) -> bytes:
        size = self.partitions * 2 * SLOT_BYTES
        data = os.pread(self.fd, size, HEADER_BYTES)
        if len(data) < size:
            raise ConsumerError(
                f"{self.path} has {len(data)} bytes of positions instead of {size}: another process"
                " truncated it; remove it to start over",
                code="consumer_damaged",
            )
        return data

    def _slots(self, data: bytes) -> list[Slot]:
        return [self._newest(data, p)[0] for p in range(self.partitions)]

    def _write(self, changes: dict[int, Slot]) -> None:
        if not changes:
            return
        data = self._data()
        for partition, slot in changes.items():
            _, newest = self._newest(data, partition)
            body = _SLOT.pack(*slot)
            body += kernel.crc32c(body).to_bytes(4, "little")
            older = 2 * partition + (1 - newest)
            files.write_all(self.fd, body, HEADER_BYTES + older * SLOT_BYTES)

    def _newest(self, data: bytes, partition: int) -> tuple[Slot, int]:
        best, which = Slot(0, 0, self.created, NO_OWNER), 1
        for number in (0, 1):
            at = (2 * partition + number) * SLOT_BYTES
            body, crc = data[at : at + 28], data[at + 28 : at + 32]
            if kernel.crc32c(body) == int.from_bytes(crc, "little") and any(body):
                slot = Slot(*_SLOT.unpack(body))
                if slot.sequence > best.sequence:
                    best, which = slot, number
        return best, which


def _file_identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _changing_byte(turn: int) -> int:
    return CHANGING_BYTE + turn % TURN_BYTES


def pack_header(partitions: int, created: int, turn: int, state: int) -> bytes:
    header = _HEADER.pack(MAGIC, 1, partitions, created, turn, state)
    return header + kernel.crc32c(header).to_bytes(4, "little")


def make_file(path: Path, data: bytes) -> bool:
    """Create a file with all its contents at once; return False if one of that name exists."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    files.write_whole(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    files.sync_directory(path.parent)
    return True


def create_positions(directory: Path, name: str, partitions: int, start: int) -> None:
    """Create a consumer at `start`, unless it exists."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise ConsumerError(f"partitions must be from 1 to {PARTITIONS_MAX}, got {partitions!r}")
    folder = directory / GROUPS
    files.make_inside(folder)
    path = folder / f"{name}.grp"
    if path.exists():
        return
    # Files of later turns are left from a consumer that was removed.
    numbers = [entry.name.removeprefix(f"{name}.grp.") for entry in folder.glob(f"{name}.grp.*")]
    turn = max((int(number) for number in numbers if number.isdecimal()), default=0)
    body = _SLOT.pack(1, start, now_us(), NO_OWNER)
    slot = body + kernel.crc32c(body).to_bytes(4, "little") + bytes(SLOT_BYTES)
    make_file(path, pack_header(partitions, now_us(), turn, 0) + slot * partitions)


def remove_positions(directory: Path, name: str) -> None:
    """Remove a consumer, if it exists; a new one of its name begins after the turns it had."""
    (directory / GROUPS / f"{check_name(name)}.grp").unlink(missing_ok=True)


class LockFile:
    """The byte locks of one consumer, through one open file description."""

    def __init__(self, directory: Path, name: str, *, read_only: bool = False) -> None:
        """Open the lock file; with `read_only`, only `others` works, also without write permission."""
        path = directory / GROUPS / f"{name}.lock"
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self.fd = files.open_file(path, flags)
        self._pid = os.getpid()
        _open.add(self)

    def __enter__(self) -> LockFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            if os.getpid() == self._pid:
                # A forked child has it open, too: closing alone would leave the bytes locked.
                everything = _FLOCK.pack(fcntl.F_UNLCK, 0, 0, 0, 0)
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, everything)
            os.close(self.fd)
            self.fd = -1

    def lock(self, byte: int) -> bool:
        """Lock a byte without waiting; return whether that succeeded."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, byte, 1, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, byte: int) -> None:
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, byte, 1, 0))

    def join(self) -> int:
        """Lock the first free member's byte; return the member's number."""
        for member in range(MEMBERS_MAX):
            if self.lock(MEMBER_BYTE + member):
                return member
        raise ConsumerError(f"a consumer has at most {MEMBERS_MAX} members", code="consumer_full")

    def others(self) -> set[int]:
        """Return the other members whose processes run."""
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
            # The system names some lock in the range, not the lowest: check both sides of it.
            ranges += [r for r in ((begin, first), (last, end)) if r[0] < r[1]]
        return alive


def list_names(directory: Path) -> list[str]:
    try:
        entries = os.listdir(directory / GROUPS)
    except FileNotFoundError:
        return []
    return sorted(entry[:-4] for entry in entries if entry.endswith(".grp"))


def position_of(directory: Path, name: str) -> int | None:
    """Return the offset below which a consumer has committed everything; None if there is no such consumer."""
    if not _NAME.fullmatch(name):
        return None
    try:
        positions = Positions(directory, name, read_only=True)
    except FileNotFoundError:
        return None
    try:
        return min(slot.next for slot in positions.read())
    finally:
        positions.close()


def _all_after_fork() -> None:
    """Close the files in a forked child: the locks are its parent's."""
    for locks in list(_open):
        locks.close()


os.register_at_fork(after_in_child=_all_after_fork)
