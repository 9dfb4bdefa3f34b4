"""
The fast half of the wire: native where it was built, nothing otherwise.

Every function may decline: decoding returns what it understood and where it stopped, encoding returns
None. `wire` takes over there, so it alone defines what is waited for, faulty or refused, and it works
without this half. VIRTA_PLAIN=1 in the environment asks for that; the tests run both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from virta.journal.protocol.messages import Details, Pair, Reply, Request, Value
from virta.native import load

if TYPE_CHECKING:
    from collections.abc import Callable


native: Final = load("virta.journal._native")
NATIVE: Final = native is not None

decode_requests: Callable[[bytes | bytearray], tuple[list[Request], int]]
decode_replies: Callable[[bytes | bytearray], tuple[list[Reply], int]]
encode_request: Callable[[Request], bytes | None]
encode_reply: Callable[[Reply], bytes | None]
# Both ends of a line, for systems with epoll; None: asyncio's transports and Python's sockets do it.
Lines: Callable[[Callable[[Reply], bytes], int, int, int, int], Any] | None
Asker: Callable[[int], Any] | None


def decode_nothing(data: bytes | bytearray) -> tuple[list[object], int]:  # noqa: ARG001
    return [], 0


def encode_nothing(message: object) -> None:  # noqa: ARG001
    return None


if native is not None:
    native.set_types(Request, Reply, Pair, Value, Details)
    decode_requests, decode_replies = native.decode_requests, native.decode_replies
    encode_request, encode_reply = native.encode_request, native.encode_reply
    Lines, Asker = getattr(native, "Lines", None), getattr(native, "Asker", None)
else:
    Lines = Asker = None
    decode_requests = decode_replies = decode_nothing  # type: ignore[assignment]
    encode_request = encode_reply = encode_nothing
