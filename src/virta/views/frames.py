"""
The frames of a live view, and their bytes as server-sent events and WebSocket texts.

    snapshot row live enter update leave reset ping aggregate

The id of a frame is the position up to which the consumer has everything: an offset, none, or empty. An empty one
makes a client forget its position: else a cut inside a snapshot would resume from before the reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from virta import native
from virta.errors import ViewError
from virta.event.row_changes import parse_pointer, raw_at
from virta.hub.frames import chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

_native = native.load("virta.views._native")

SNAPSHOT, ROW, LIVE, RESET, PING, AGGREGATE = (
    "snapshot",
    "row",
    "live",
    "reset",
    "ping",
    "aggregate",
)
NO_ID, EMPTY_ID = -1, -2
# Members that every projected event has.
IDENTITY: Final = ("id", "source", "type", "subject")
FIELDS_MAX: Final = 64

_encode = msgspec.json.Encoder().encode
_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class ViewFrame(msgspec.Struct, gc=False):
    """One frame; `data` is given for frames without a row."""

    name: str
    id: int = NO_ID
    key: str = ""
    offset: int = -1
    event: bytes | None = None
    reason: str = ""
    data: dict[str, Any] | None = None
    number: int = -1  # of the row, for a frame of a live step

    def __repr__(self) -> str:
        more = self.data if self.data is not None else (self.key, self.offset, self.reason)
        return f"<ViewFrame {self.name} id={self.id} {more}>"


class Projection:
    """The part of an event that a consumer gets: its identity and the values at some pointers."""

    __slots__ = ("pointers", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        names = [name for name in text.split(",") if name]
        if len(names) > FIELDS_MAX:
            raise ViewError(
                f"$fields names {len(names)} pointers, the limit is {FIELDS_MAX}: name the object around them",
                code="invalid-pointer",
            )
        self.pointers = tuple(parse_pointer(name, "$fields") for name in names)

    def __call__(self, event: bytes) -> bytes:
        members = _decode_members(event)
        shown: dict[str, Any] = {name: members[name] for name in IDENTITY if name in members}
        for steps in self.pointers:
            raw = raw_at(event, steps)
            if raw is not None:
                _place(shown, steps, msgspec.Raw(raw))
        return _encode(shown)


def _place(shown: dict[str, Any], steps: tuple[str, ...], raw: msgspec.Raw) -> None:
    """Put a value where it is in the event; a part of a value that is there already needs no place."""
    at = shown
    for step in steps[:-1]:
        below = at.setdefault(step, {})
        if not isinstance(below, dict):
            return
        at = below
    at[steps[-1]] = raw


class FrameEncoder:
    """Makes bytes of frames; equal encoders share what they made for a step."""

    __slots__ = ("_fields", "_tag", "_texts", "key")

    def __init__(self, tag: str, fields: Projection | None = None, *, texts: bool = False) -> None:
        self._tag = tag.encode()
        self._fields = fields
        self._texts = texts
        self.key = (tag, "" if fields is None else fields.text, texts)

    def position(self, offset: int) -> str:
        return f"{self._tag.decode()}.{offset}"

    def encode(self, frames: Sequence[ViewFrame]) -> list[bytes]:
        """Return the frames as server-sent events, or as JSON texts of a WebSocket."""
        make = self._json_text if self._texts else self._sse
        return [make(frame) for frame in frames]

    def _sse(self, frame: ViewFrame) -> bytes:
        return _sse(self._tag, frame, self._fields)

    def _json_text(self, frame: ViewFrame) -> bytes:
        id_ = b""
        if frame.id >= 0:
            id_ = b',"id":"%b.%d"' % (self._tag, frame.id)
        elif frame.id == EMPTY_ID:
            id_ = b',"id":""'
        members = _members(frame, self._fields)
        return b'{"frame":"%b"%b%b%b}' % (
            frame.name.encode(),
            id_,
            b"," if members else b"",
            members,
        )


def event_stream(tag: bytes, frames: list[ViewFrame], *, chunked: bool) -> bytes:
    """Return frames as server-sent events, end to end; as one chunk of HTTP/1.1 if wanted."""
    if _native is not None:
        made: bytes | None = _native.event_stream(tag, frames, chunked)
        if made is not None:
            return made
    body = b"".join([_sse(tag, frame, None) for frame in frames])
    return chunk(body) if chunked else body


def _sse(tag: bytes, frame: ViewFrame, fields: Projection | None) -> bytes:
    if frame.id >= 0 and frame.event is not None and fields is None:
        return b'event: %b\nid: %b.%d\ndata: {"key":%b,"offset":%d%b,"event":%b}\n\n' % (
            frame.name.encode(),
            tag,
            frame.id,
            _encode(frame.key),
            frame.offset,
            _reason(frame),
            frame.event,
        )
    id_line = b""
    if frame.id >= 0:
        id_line = b"id: %b.%d\n" % (tag, frame.id)
    elif frame.id == EMPTY_ID:
        id_line = b"id:\n"
    return b"event: %b\n%bdata: {%b}\n\n" % (frame.name.encode(), id_line, _members(frame, fields))


def _members(frame: ViewFrame, fields: Projection | None) -> bytes:
    if frame.data is not None:
        return _encode(frame.data)[1:-1]
    event = b""
    if frame.event is not None:
        shown = frame.event if fields is None else fields(frame.event)
        event = b',"event":%b' % shown
    return b'"key":%b,"offset":%d%b%b' % (_encode(frame.key), frame.offset, _reason(frame), event)


def _reason(frame: ViewFrame) -> bytes:
    return b',"reason":"%b"' % frame.reason.encode() if frame.reason else b""
