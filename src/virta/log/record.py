"""The values a user of the log meets: Record, Name, Appended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Name(bytes):
    """
    A topic or key: bytes, as stored, that also equal their UTF-8 text.

    `record.topic == "orders"` and `record.topic == b"orders"` are both true, `str(record.topic)` is the text.
    As a dictionary key it is bytes: use bytes to find it.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            other = other.encode("utf-8", "surrogatepass")
        return bytes.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = bytes.__hash__

    def __str__(self) -> str:
        return self.decode("utf-8", "replace")


class Record(NamedTuple):
    """One record of the log; `timestamp` is the append time in microseconds since the epoch."""

    topic: Name
    key: Name
    value: bytes
    offset: int
    timestamp: int

    @property
    def time(self) -> datetime:
        """The append time as an aware datetime."""
        return datetime_of(self.timestamp)


class Appended(int):
    """
    The offset of the first record appended, and what is known about the append.

    `durability` is the level that was met; `duplicate` says that an idempotent producer's
    batch was in the log already and nothing was added.
    """

    count: int
    timestamp: int
    durability: str
    duplicate: bool

    def __new__(
        cls, offset: int, count: int, timestamp: int, durability: str, *, duplicate: bool = False
    ) -> Appended:
        self = int.__new__(cls, offset)
        self.count = count
        self.timestamp = timestamp
        self.durability = durability
        self.duplicate = duplicate
        return self

    @property
    def offset(self) -> int:
        """The first offset, as a plain int."""
        return int(self)

    def __repr__(self) -> str:
        extra = ", duplicate=True" if self.duplicate else ""
        return (
            f"Appended(offset={int(self)}, count={self.count}, "
            f"durability={self.durability!r}{extra})"
        )


def datetime_of(timestamp: int) -> datetime:
    """Microseconds since the epoch as an aware datetime, exactly."""
    return _EPOCH + timedelta(microseconds=timestamp)


def timestamp_of(time: datetime) -> int:
    """An aware (or local naive) datetime as microseconds since the epoch, exactly."""
    return (time.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)
