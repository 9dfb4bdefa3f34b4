"""
HTTP/1.1 for a client: requests to bytes, bytes to responses; no I/O.

`ResponseReader` accepts a response in any pieces and returns its body as it arrives, however it is
delimited: a proxy may use another encoding than the server.
"""

from __future__ import annotations

import re
import select
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virta.client.calls import Address

# No Virta server sends a longer head or chunk size line.
HEAD_BYTES_MAX = 65536
# The largest response that is kept in memory as a whole; pages of the API are far smaller.
ANSWER_BYTES_MAX = 256 * 1024 * 1024
# Bytes that are read from a connection at once.
READ_BYTES = 65536

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?", re.DOTALL)
_HEX = re.compile(rb"[0-9A-Fa-f]{1,15}")
# Responses that never have a body (RFC 9112 §6.3).
_BODILESS = frozenset({204, 304})


def request_bytes(
    address: Address, method: str, path: str, headers: dict[str, str] | None, body: bytes | None
) -> bytes:
    """
    Return a whole request.

    Raises:
        ValueError: a header contains a line end, which would end it early.
    """
    lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {address.authority}"]
    lines += [f"{name}: {value}" for name, value in (address.headers | (headers or {})).items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header must not contain a line end")
    head = "\r\n".join([*lines, "", ""]).encode()
    return head + body if body else head


def check_size(size: int) -> None:
    """Raise ValueError if a response that is kept as a whole is too large."""
    if size > ANSWER_BYTES_MAX:
        raise ValueError(f"the response has over {ANSWER_BYTES_MAX} bytes")


def is_readable(descriptor: int) -> bool:
    """Return whether a read would not block."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class ResponseReader:
    """
    Read one response.

    `status` is 0 until the head is complete; `complete` is set at the end of the body, and `keep` is then
    whether the connection can be used for another request.
    """

    __slots__ = ("_bodiless", "_buffer", "_chunked", "_in_chunk", "_left", "complete", "headers", "keep", "status")  # fmt: skip

    def __init__(self, method: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self.keep = False
        self._bodiless = method == "HEAD"
        self._buffer = b""
        self._chunked = False
        # Bytes of the body, or of the present chunk, that are still to come; None: until the end.
        self._left: int | None = 0
        self._in_chunk = False

    def feed(self, data: bytes) -> bytes:
        """
        Parse bytes of the connection; return those of the body among them.

        Raises:
            ValueError: the bytes are not HTTP/1.1.
        """
        if self.complete:
            self.keep = False  # more bytes than the response: the connection cannot be trusted
            return b""
        if not self.status:
            self._buffer += data
            head, found, data = self._buffer.partition(b"\r\n\r\n")
            if not found:
                self._check_size(self._buffer)
                return b""
            self._buffer = b""
            if not self._read_head(head):  # an interim response: the real one follows
                return self.feed(data) if data else b""
            if not self.complete and self._chunked:
                return self._chunks(data)
        elif self._chunked:
            return self._chunks(data)
        return self._plain(data)

    def end(self) -> None:
        """
        Note that the connection has ended, which completes a body without a length.

        Raises:
            ConnectionError: the response is not complete.
        """
        if self.complete:
            return
        if not self.status or self._left is not None:
            raise ConnectionError(
                "the server closed the connection before the response was complete"
            )
        self.complete = True

    def _read_head(self, head: bytes) -> bool:
        first, *lines = head.split(b"\r\n")
        found = _STATUS_LINE.fullmatch(first)
        if found is None:
            raise ValueError(f"not an HTTP/1.1 response: {first[:60]!r}")
        status = int(found[2])
        if status < 200:
            return False
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        headers = self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        self.status = status
        self.keep = found[1] == b"1" and "close" not in headers.get("connection", "").lower()
        length = headers.get("content-length")
        if self._bodiless or status in _BODILESS:
            self.complete = True
        elif headers.get("transfer-encoding", "").lower() == "chunked":
            self._chunked = True
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise ValueError(f"Content-Length is {length[:60]!r}, not a number")
            self._left = int(length)
            self.complete = self._left == 0
        else:
            self._left = None
            self.keep = False
        return True

    def _plain(self, data: bytes) -> bytes:
        if self._left is None:
            return data
        if len(data) > self._left:
            data, self.keep = data[: self._left], False
        self._left -= len(data)
        self.complete = self._left == 0
        return data

    def _chunks(self, data: bytes) -> bytes:
        parts: list[bytes] = []
        data = self._buffer + data
        self._buffer = b""
        while data and not self.complete:
            if self._left:
                parts.append(data[: self._left])
                data = data[self._left :]
                self._left -= len(parts[-1])
                continue
            line, found, rest = data.partition(b"\r\n")
            if not found:
                self._check_size(data)
                self._buffer = data
                break
            data = rest
            self._read_line(line)
        if self.complete and data:
            self.keep = False
        return b"".join(parts)

    def _read_line(self, line: bytes) -> None:
        """Parse a line between chunks: the end of one, a size, or a trailer after the last."""
        if self._in_chunk:
            if line:
                raise ValueError(f"a chunk is followed by {line[:60]!r}")
            self._in_chunk = False
        elif self._left is not None:
            size = line.partition(b";")[0].strip()
            if not _HEX.fullmatch(size):
                raise ValueError(f"{line[:60]!r} is not the size of a chunk")
            # The last chunk is empty; trailers, which are ignored, follow up to an empty line.
            self._left = int(size, 16) or None
            self._in_chunk = self._left is not None
        elif not line:
            self.complete = True

    @staticmethod
    def _check_size(data: bytes) -> None:
        if len(data) > HEAD_BYTES_MAX:
            raise ValueError(f"a head or chunk line of over {HEAD_BYTES_MAX} bytes")
