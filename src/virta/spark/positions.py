"""
The position of a stream as a named consumer of the log it reads.

Spark keeps a stream's position in its checkpoint, where the log cannot see it. With the option `consumer` the source also
stores it in the log: retention (`virta log retain --consumed`) then keeps what the stream has not read, and
`virta log inspect` shows its lag. The checkpoint stays the truth: a stream never reads from the stored position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import virta
from virta.errors import VirtaError
from virta.log.consumers.positions import check_name
from virta.log.limits import LEASE_S_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from virta.log.consumers.consumer import Consumer


class PositionError(VirtaError):
    """A position that cannot be stored."""

    default_code = "position_unknown"


class StreamPosition:
    """Stores the position of one stream; opens the log at the first move."""

    def __init__(self, path: str, name: str, topics: Iterable[bytes] | None) -> None:
        if "://" in path:
            raise PositionError(
                f"option consumer is {name!r}: a log in object storage ({path}) has no consumers;"
                " leave the option out"
            )
        self._path = path
        self._name = check_name(name)
        self._topics = None if topics is None else list(topics)
        self._log: virta.Log | None = None
        self._consumer: Consumer | None = None
        self._at: int | None = None

    def move(self, offset: int) -> None:
        """
        Store the offset of the next record to read, back or forth.

        Raises:
            LogError: the log cannot be written to.
        """
        if offset == self._at:
            return
        if self._consumer is None:
            self._log = virta.open(self._path, create=False)
            # Spark may be busy with a micro-batch for hours; another process cannot take over anyway.
            self._consumer = self._log.consumer(
                self._name, topics=self._topics, start=offset, lease=LEASE_S_MAX
            )
        self._consumer.seek(offset)
        self._at = offset

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None
        if self._log is not None:
            self._log.close()
            self._log = None
        self._at = None
