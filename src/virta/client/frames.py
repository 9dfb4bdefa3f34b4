"""
Parse server-sent events: bytes to frames; no I/O.

`FrameReader` accepts a stream in any pieces and returns whole frames, as the HTML standard describes
(§9.2.6). A frame over the limit is an error: a stream that never ends a frame must not fill the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from virta.errors import ClientError

if TYPE_CHECKING:
    from virta.event import Event

# The largest event is 10 MiB; a frame has little beside it.
FRAME_BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True)
class Frame:
    """One frame: `data` is its text, `id` is None if the frame has none, `comment` its last comment."""

    event: str
    data: str
    id: str | None = None
    retry_ms: int | None = None
    comment: str = ""

    def json(self) -> Any:
        """Return the value of the data."""
        return msgspec.json.decode(self.data)


@dataclass(frozen=True)
class Received:
    """An event as a subscriber gets it: resume from `id`; `offset` is its place in the log."""

    event: Event
    id: str
    offset: int | None = None


class FrameReader:
    """Joins the pieces of a stream."""

    def __init__(self) -> None:
        self._buffer = b""
        self._carriage_return = b""

    def feed(self, data: bytes) -> list[Frame]:
        """
        Add bytes; return the frames that they complete.

        Raises:
            ClientError: a frame is larger than any event can be.
        """
        data = self._carriage_return + data
        # At the end it may be the first byte of a line end.
        self._carriage_return = b"\r" if data.endswith(b"\r") else b""
        self._buffer += data.removesuffix(b"\r").replace(b"\r\n", b"\n")
        *whole, self._buffer = self._buffer.split(b"\n\n")
        if len(self._buffer) > FRAME_BYTES_MAX:
            raise ClientError(
                f"a frame of over {FRAME_BYTES_MAX} bytes: this is no stream of events",
                code="frame-too-large",
            )
        return [made for text in whole if (made := parse_frame(text)) is not None]


def parse_frame(text: bytes) -> Frame | None:
    """Return the frame of some lines, or None if it only has comments."""
    name, id_, retry, comment = "message", None, None, ""
    data: list[str] = []
    for line in text.decode("utf-8", "replace").split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            id_ = value
        elif field == "retry" and value.isdigit():
            retry = int(value)
        elif not field:
            comment = value
    if not data:
        if retry is None and id_ is None:
            return None
        name = "message"  # a frame without data delivers nothing (HTML §9.2.6)
    return Frame(name, "\n".join(data), id_, retry, comment)
