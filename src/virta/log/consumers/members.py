"""
Which members of a consumer are active (groups/<name>.members), and which topics they read (groups/<name>.topics).

    .members  per member 24 bytes: u64 boot id | u64 alive until, µs of CLOCK_MONOTONIC | u32 0 | u32 crc32c
    .topics   JSON: {"topics": [...]}, or null for all; the member that joined last wrote it

The lock on its byte (positions.py) shows that a member's process exists; this shows progress. Each member writes
its own entry when it reads a record or commits: a process that is stopped, or a handler that does not return,
writes none. All processes of one boot share CLOCK_MONOTONIC, which no clock step changes and which stops while
the machine sleeps. Entries of another boot are ignored.
"""

from __future__ import annotations

import json
import os
import struct
import time
from typing import TYPE_CHECKING, Final

from virta import files
from virta.log.engine import kernel
from virta.log.format.directory import GROUPS, boot_id

if TYPE_CHECKING:
    from pathlib import Path

ENTRY_BYTES: Final = 24
_ENTRY: Final = struct.Struct("<QQI")


def uptime_us() -> int:
    return time.monotonic_ns() // 1000


class Heartbeats:
    """The open .members file of one consumer."""

    def __init__(self, directory: Path, name: str, *, read_only: bool = False) -> None:
        path = directory / GROUPS / f"{name}.members"
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        try:
            self._fd = files.open_file(path, flags)
        except FileNotFoundError:
            self._fd = -1  # no member of this version ever joined
        self._boot = boot_id()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def beat(self, member: int, seconds: float) -> None:
        """Record that `member` is active for that long from now on."""
        entry = _ENTRY.pack(self._boot, uptime_us() + int(seconds * 1e6), 0)
        entry += kernel.crc32c(entry).to_bytes(4, "little")
        files.write_all(self._fd, entry, member * ENTRY_BYTES)

    def clear(self, member: int) -> None:
        """Remove the entry, so that the next process with this number does not inherit it."""
        files.write_all(self._fd, bytes(ENTRY_BYTES), member * ENTRY_BYTES)

    def expired(self, members: set[int]) -> tuple[set[int], set[int]]:
        """Return (hung, silent): members whose lease has expired, and those without an entry of this boot."""
        hung: set[int] = set()
        silent: set[int] = set()
        data = b""
        if self._fd >= 0 and members:
            data = os.pread(self._fd, (max(members) + 1) * ENTRY_BYTES, 0)
        now = uptime_us()
        for member in members:
            entry = data[member * ENTRY_BYTES : (member + 1) * ENTRY_BYTES]
            sound = kernel.crc32c(entry[:20]) == int.from_bytes(entry[20:], "little")
            boot, until, _ = _ENTRY.unpack(entry[:20]) if sound and entry else (0, 0, 0)
            if boot != self._boot:
                silent.add(member)  # of an older version, or being written now
            elif until < now:
                hung.add(member)
        return hung, silent


def save_topics(directory: Path, name: str, topics: frozenset[bytes] | None) -> None:
    """Record which topics a consumer reads, so that its lag can be counted."""
    path = directory / GROUPS / f"{name}.topics"
    # Topics are bytes that need not be UTF-8.
    listed = None
    if topics is not None:
        listed = sorted(topic.decode(errors="surrogateescape") for topic in topics)
    text = json.dumps({"topics": listed}).encode() + b"\n"
    try:
        if path.read_bytes() == text:
            return
    except FileNotFoundError:
        if topics is None:
            return
    files.write_whole(path, text)


def load_topics(directory: Path, name: str) -> frozenset[bytes] | None:
    """Return the topics that a consumer reads; None if it reads all, or none were recorded."""
    try:
        text = (directory / GROUPS / f"{name}.topics").read_bytes()
        listed = json.loads(text)["topics"]
        if listed is None:
            return None
        return frozenset(topic.encode(errors="surrogateescape") for topic in listed)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
