"""
The journal's binary protocol, without I/O: bytes in, messages out, and back.

A request (client to server) and a reply (server to client), integers big-endian, times in µs:

    request  "FJ" u16 version  u16 function  u16 identifier  u16 flags  u64 timestamp
             [u64 timeout: bit 3] [u64 ttl: bit 14] [u16 count: query 1 or bit 13]
             key [key 2: query 1] [value: bits 1-2]
    reply    "JR" u16 version  u16 identifier  u16 flags  u64 timestamp
             [u64 timeout: bit 3] [u16 count: query 1 or bit 13] error
             pairs, each: key [56 bytes of details: bit 14] [value: bits 1-2]
             [cursor: bit 5]

Keys, errors and cursors are a size (one byte, two with bit 0) and that many bytes; a value is a size
(1, 2 or 4 bytes for bits 1-2 = 1, 2, 3; it counts the type byte), a type and its data.

Invariants: what is decoded encodes to the same bytes if the sender chose the smallest widths, and a
parser never buffers more than one message's bytes plus one chunk, however large a size is announced.
`rules` says which flags a function may carry: framing never depends on the function, so the stream stays in
step even when a request is refused.

The native codec (`native/journal.c`) may decline: it decodes up to the first message that is incomplete or
malformed, and encodes only what fits. The plain codec here continues, so it alone defines waiting and errors.
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

from msgspec.structs import astuple

from virta import native
from virta.errors import JournalError
from virta.journal.protocol.messages import (
    COUNT,
    KEY16,
    PERSIST,
    PERSIST_ALIAS,
    QUERY_RANGE,
    QUERY_SHIFT,
    REPLY_CURSOR,
    REPLY_DECODE_BYTES_MAX,
    REPLY_DETAILS,
    REPLY_FLAGS,
    REQUEST_FLAGS,
    REQUEST_TTL,
    TIMEOUT,
    VALUE_DATA_BYTES_MAX,
    VERSION,
    WIDTH_SHIFT,
    Details,
    Pair,
    Reply,
    Request,
    Type,
    Value,
)
from virta.journal.protocol.rules import check_limits

native_codec = native.load("virta.journal._native")
if native_codec is not None:
    native_codec.set_types(Request, Reply, Pair, Value, Details, astuple)


class WireError(JournalError):
    """
    Malformed bytes; the connection has to end.

    `identifier` is that of the request to refuse before closing, None to close without a reply.
    """

    default_code = "bad-message"

    def __init__(
        self, message: str, *, code: str | None = None, identifier: int | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.identifier = identifier


_REQUEST_HEAD = struct.Struct(">2sHHHHQ")
_REPLY_HEAD = struct.Struct(">2sHHHQ")
_DETAILS = struct.Struct(">6QIHBx")
_U16 = struct.Struct(">H")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_REQUEST_BYTES_MIN = _REQUEST_HEAD.size + 1
_REPLY_BYTES_MIN = _REPLY_HEAD.size + 1
assert _REQUEST_HEAD.size == 18
assert _DETAILS.size == 56


# Encoding


def encode_request(request: Request) -> bytes:
    """
    Return the one canonical form of a request: the smallest widths that fit the fields.

    Raises:
        RefusedError: a key, value or number that no daemon accepts.
    """
    encoded: bytes | None = None if native_codec is None else native_codec.encode_request(request)
    return encode_request_plain(request) if encoded is None else encoded


def encode_request_plain(request: Request) -> bytes:
    check_limits(request)
    flags = request.flags | request.query << QUERY_SHIFT
    parts = [b""]
    if request.timeout is not None:
        flags |= TIMEOUT
        parts.append(_U64.pack(request.timeout))
    if request.ttl is not None:
        flags |= REQUEST_TTL
        parts.append(_U64.pack(request.ttl))
    if request.query == QUERY_RANGE:
        parts.append(_U16.pack(request.count or 0))
    elif request.count is not None:
        flags |= COUNT
        parts.append(_U16.pack(request.count))
    wide = len(request.key) > 255 or len(request.key2) > 255
    flags |= KEY16 if wide else 0
    parts.append(_with_length(request.key, wide=wide))
    if request.query == QUERY_RANGE:
        parts.append(_with_length(request.key2, wide=wide))
    if request.value is not None:
        width = _length_bytes(len(request.value.data) + 1)
        flags |= width << WIDTH_SHIFT
        parts.append(_encoded_value(request.value, width))
    parts[0] = _REQUEST_HEAD.pack(
        b"FJ", VERSION, request.function, request.identifier, flags, request.timestamp
    )
    return b"".join(parts)


def encode_reply(reply: Reply) -> bytes:
    """Return the bytes of a reply; an error has no pairs, count or cursor, and so never that of a range."""
    encoded: bytes | None = None if native_codec is None else native_codec.encode_reply(reply)
    return encode_reply_plain(reply) if encoded is None else encoded


def encode_replies(replies: list[Reply]) -> bytes:
    """Return the bytes of replies, one after the other."""
    encoded: bytes | None = None if native_codec is None else native_codec.encode_replies(replies)
    return b"".join(map(encode_reply, replies)) if encoded is None else encoded


def encode_reply_plain(reply: Reply) -> bytes:
    flags = reply.flags
    error = reply.error.encode()
    parts = [b""]
    if reply.timeout is not None:
        flags |= TIMEOUT
        parts.append(_U64.pack(reply.timeout))
    counted = reply.pairs is not None and not error
    pairs = [] if error else reply.all_pairs()
    if counted:
        flags |= reply.query << QUERY_SHIFT
        flags |= 0 if reply.query == QUERY_RANGE else COUNT
        parts.append(_U16.pack(len(pairs)))
    elif reply.query != QUERY_RANGE:
        flags |= reply.query << QUERY_SHIFT
    cursor = None if error else reply.cursor
    if cursor is not None:
        flags |= REPLY_CURSOR
    wide = (
        len(error) > 255
        or (cursor is not None and len(cursor) > 255)
        or any(len(pair.key) > 255 for pair in pairs)
    )
    flags |= KEY16 if wide else 0
    parts.append(_with_length(error, wide=wide))
    flags |= _encode_pairs(pairs, parts, wide=wide)
    if cursor is not None:
        parts.append(_with_length(cursor, wide=wide))
    parts[0] = _REPLY_HEAD.pack(b"JR", VERSION, reply.identifier, flags, reply.timestamp)
    return b"".join(parts)


def _encode_pairs(pairs: list[Pair], parts: list[bytes], *, wide: bool) -> int:
    """Append the pairs to `parts`; return the flags that describe them."""
    if not pairs:
        return 0
    details = pairs[0].details is not None
    sizes = [len(pair.value.data) + 1 for pair in pairs if pair.value is not None]
    width = _length_bytes(max(sizes)) if sizes else 0
    for pair in pairs:
        parts.append(_with_length(pair.key, wide=wide))
        if details:
            parts.append(_DETAILS.pack(*astuple(pair.details or Details())))
        if width:
            parts.append(_encoded_value(pair.value or Value(Type.VOID, b""), width))
    return width << WIDTH_SHIFT | (REPLY_DETAILS if details else 0)


def _with_length(data: bytes, *, wide: bool) -> bytes:
    return (_U16.pack(len(data)) if wide else bytes((len(data),))) + data


def _length_bytes(size: int) -> int:
    return 1 if size <= 0xFF else 2 if size <= 0xFFFF else 3


def _encoded_value(value: Value, width: int) -> bytes:
    size = len(value.data) + 1
    head = (
        bytes((size, value.type))
        if width == 1
        else (_U16.pack(size) if width == 2 else _U32.pack(size)) + bytes((value.type,))
    )
    return head + value.data


# Decoding


Message = TypeVar("Message", Request, Reply)


class _Short(Exception):  # noqa: N818  (control flow inside this module, never an error)
    """The message is incomplete: `args[0]` is the position its bytes must reach to make progress."""


class _Cursor:
    """A position in the received bytes; raises _Short where they end."""

    __slots__ = ("at", "buffer", "end", "identifier")

    def __init__(self, buffer: bytes | bytearray, at: int, identifier: int) -> None:
        self.buffer = buffer
        self.at = at
        self.end = len(buffer)
        self.identifier = identifier

    def step(self, size: int) -> int:
        """Move past `size` bytes; return their position."""
        at = self.at
        if at + size > self.end:
            raise _Short(at + size)
        self.at = at + size
        return at

    def u16(self) -> int:
        at = self.step(2)
        return self.buffer[at] << 8 | self.buffer[at + 1]

    def u64(self) -> int:
        number: int = _U64.unpack_from(self.buffer, self.step(8))[0]
        return number

    def sized(self, *, wide: bool) -> bytes:
        size = self.u16() if wide else self.buffer[self.step(1)]
        at = self.step(size)
        return bytes(self.buffer[at : at + size])

    def value(self, width: int) -> Value:
        size_at = self.step(1 << (width - 1))
        size = int.from_bytes(self.buffer[size_at : self.at], "big")
        if size == 0:
            raise WireError("value size 0: it counts the type byte, so it is at least 1")
        if size - 1 > VALUE_DATA_BYTES_MAX:
            raise WireError(
                f"a value of {size - 1} bytes was announced, the limit is {VALUE_DATA_BYTES_MAX}",
                code="too-large",
                identifier=self.identifier,
            )
        at = self.step(size)
        kind = self.buffer[at]
        if kind > Type.BOOLEAN:
            raise WireError(f"value type {kind}: the types are 0 to {int(Type.BOOLEAN)}")
        if kind == Type.VOID and size != 1:
            raise WireError(f"a void value with {size - 1} bytes of data: void has none")
        return Value(kind, bytes(self.buffer[at + 1 : at + size]))

    def details(self) -> Details:
        return Details(*_DETAILS.unpack_from(self.buffer, self.step(_DETAILS.size)))


class _Parser(Generic[Message]):
    """
    Splits the bytes of one direction of one connection into messages.

    After malformed bytes `error` is set and nothing more is read; the messages before them were returned.
    """

    _magic: bytes
    _native_decoder: str  # (bytes) -> (complete, well-formed messages at the front, where they end)
    _unfinished: Any = None  # a message that is decoded in steps

    def __init__(self) -> None:
        self.error: WireError | None = None
        self._buffer = bytearray()
        self._at = 0  # everything before was decoded
        self._wanted = 0

    @property
    def buffered(self) -> int:
        """Return how many bytes of an incomplete message are kept."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that the received bytes complete, in order."""
        if self.error is not None:
            return []
        buffer = self._buffer
        if buffer:
            buffer += data
            if len(buffer) < self._wanted:
                return []
        messages: list[Message] = []
        if self._unfinished is None and native_codec is not None:
            source = buffer or data
            messages, at = getattr(native_codec, self._native_decoder)(source)
            if at == len(source):
                buffer.clear()
                self._wanted = 0
                return messages
            data = data[at:]
            del buffer[:at]
        if not buffer:
            buffer += data
        self._at = 0
        try:
            while self._at < len(buffer):
                messages.append(self._decode(self._at))
            self._wanted = 0
        except _Short as short:
            self._wanted = short.args[0] - self._at
        except WireError as error:
            self.error = error
            self._at = len(buffer)
        del buffer[: self._at]
        return messages

    def _decode(self, at: int) -> Message:
        """Return the message at `at` and move `_at` past it."""
        raise NotImplementedError

    def _check_magic(self, at: int) -> None:
        got = bytes(self._buffer[at : at + 2])
        if not self._magic.startswith(got):
            raise WireError(f"message starts with {got!r}, not {self._magic!r}")


class RequestParser(_Parser[Request]):
    _magic = b"FJ"
    _native_decoder = "decode_requests"

    def _decode(self, at: int) -> Request:
        buffer = self._buffer
        if len(buffer) - at < _REQUEST_BYTES_MIN:
            self._check_magic(at)
            raise _Short(at + _REQUEST_BYTES_MIN)
        magic, version, function, identifier, bits, timestamp = _REQUEST_HEAD.unpack_from(
            buffer, at
        )
        if magic != b"FJ":
            self._check_magic(at)
        if version != VERSION:
            raise WireError(
                f"version {version}: this side speaks version {VERSION}",
                code="version",
                identifier=identifier,
            )
        cursor = _Cursor(buffer, at + _REQUEST_HEAD.size, identifier)
        query = bits >> QUERY_SHIFT & 3
        wide = bool(bits & KEY16)
        width = bits >> WIDTH_SHIFT & 3
        timeout = cursor.u64() if bits & TIMEOUT else None
        ttl = cursor.u64() if bits & REQUEST_TTL else None
        count = cursor.u16() if query == QUERY_RANGE or bits & COUNT else None
        key = cursor.sized(wide=wide)
        key2 = cursor.sized(wide=wide) if query == QUERY_RANGE else b""
        value = cursor.value(width) if width else None
        flags = bits & REQUEST_FLAGS | (PERSIST if bits & PERSIST_ALIAS else 0)
        self._at = cursor.at
        return Request(
            function, identifier, flags, timestamp, timeout, ttl, count, key, key2, value, query
        )


class ReplyParser(_Parser[Reply]):
    """Keeps the pairs of an incomplete reply, so a long one is decoded once, not again with every chunk."""

    _magic = b"JR"
    _native_decoder = "decode_replies"

    def __init__(self) -> None:
        super().__init__()
        self._unfinished: tuple[Reply, int, int] | None = None  # reply, its bits, pairs to come
        self._unfinished_bytes = 0

    def _decode(self, at: int) -> Reply:
        reply, bits, missing = self._unfinished or self._decode_head(at)
        self._unfinished = (reply, bits, missing)
        wide = bool(bits & KEY16)
        width = bits >> WIDTH_SHIFT & 3
        cursor = _Cursor(self._buffer, self._at, reply.identifier)
        while missing:
            pair = _read_pair(cursor, wide=wide, width=width, detailed=bool(bits & REPLY_DETAILS))
            if reply.pairs is None:
                reply.pair = pair
            else:
                reply.pairs.append(pair)
            missing -= 1
            self._unfinished = (reply, bits, missing)
            self._unfinished_bytes += cursor.at - self._at
            self._at = cursor.at
            if self._unfinished_bytes > REPLY_DECODE_BYTES_MAX:
                raise WireError(f"a reply of more than {REPLY_DECODE_BYTES_MAX} bytes")
        if bits & REPLY_CURSOR:
            reply.cursor = cursor.sized(wide=wide)
            self._at = cursor.at
        self._unfinished = None
        self._unfinished_bytes = 0
        return reply

    def _decode_head(self, at: int) -> tuple[Reply, int, int]:
        buffer = self._buffer
        if len(buffer) - at < _REPLY_BYTES_MIN:
            self._check_magic(at)
            raise _Short(at + _REPLY_BYTES_MIN)
        magic, version, identifier, bits, timestamp = _REPLY_HEAD.unpack_from(buffer, at)
        if magic != b"JR":
            self._check_magic(at)
        if version != VERSION:
            raise WireError(f"version {version}: this side speaks version {VERSION}")
        cursor = _Cursor(buffer, at + _REPLY_HEAD.size, identifier)
        query = bits >> QUERY_SHIFT & 3
        reply = Reply(identifier, bits & REPLY_FLAGS, timestamp, query=query)
        reply.timeout = cursor.u64() if bits & TIMEOUT else None
        count = cursor.u16() if query == QUERY_RANGE or bits & COUNT else None
        reply.error = _utf8(cursor.sized(wide=bool(bits & KEY16)))
        if count is not None:
            reply.pairs = []
        self._at = cursor.at
        return reply, bits, count if count is not None else int(bool(bits >> WIDTH_SHIFT & 3))


def _read_pair(cursor: _Cursor, *, wide: bool, width: int, detailed: bool) -> Pair:
    key = cursor.sized(wide=wide)
    details = cursor.details() if detailed else None
    return Pair(key, cursor.value(width) if width else None, details)


def _utf8(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise WireError(f"an error text that is not UTF-8: {data[:40]!r}") from error
