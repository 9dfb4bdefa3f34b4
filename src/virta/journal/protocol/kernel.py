"""
The fast half of the wire: native where it was built, nothing otherwise.

Every function may decline: decoding returns what it understood and where it stopped, encoding returns
None. `wire` takes over there, so it alone defines what is waited for, faulty or refused, and it works
without this half. VIRTA_PLAIN=1 in the environment asks for that; the tests run both.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from virta.journal.protocol.messages import Details, Pair, Reply, Request, Value

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_native: ModuleType | None = None
if os.environ.get("VIRTA_PLAIN") != "1":
    try:
        from virta.journal import _native  # type: ignore[attr-defined,no-redef]
    except ImportError:
        _native = None

NATIVE: Final = _native is not None
native: Final = _native  # for `heap` and `shortcut`

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


if _native is not None:
    _native.set_types(Request, Reply, Pair, Value, Details)
    decode_requests, decode_replies = _native.decode_requests, _native.decode_replies
    encode_request, encode_reply = _native.encode_request, _native.encode_reply
    Lines, Asker = getattr(_native, "Lines", None), getattr(_native, "Asker", None)
else:
    Lines = Asker = None
    decode_requests = decode_replies = decode_nothing  # type: ignore[assignment]
    encode_request = encode_reply = encode_nothing
