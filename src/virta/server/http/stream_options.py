"""
Options of a stream: parameters of its URL whose names begin with `$`, or headers with the same meaning.

    /channels/orders?status=paid&$positions=1&$last-event-id=1f0c9be2a7d4.4711

They are never terms of the query; a member of an event's data whose name begins with `$` is written
as a path (`/$name=…`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_plus

from virta.errors import RequestError
from virta.hub.resume.positions import parse_last_event_id

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from virta.hub.resume.positions import Place

POSITIONS, LAST_EVENT_ID = "$positions", "$last-event-id"
KNOWN = (POSITIONS, LAST_EVENT_ID)
POSITIONS_HEADER, LAST_EVENT_ID_HEADER = b"virta-positions", b"last-event-id"
SWITCH = {"1": True, "0": False}


class StreamOptions(NamedTuple):
    """Options of a consumer, apart from its query."""

    query: bytes  # without the options
    seen: Place | None  # the last event received; the stream continues after it
    positions: bool  # make every id a position
    in_url: bool  # `seen` came from the URL


def read_options(query: bytes, headers: dict[bytes, bytes]) -> StreamOptions:
    """
    Read the options from a query and from the headers with the same meaning.

    If the header and the URL both name the last event, the header wins: a browser repeats its URL and sends
    the newer header automatically.

    Raises:
        RequestError: 400 for an unknown option or an invalid value.
    """
    given, query = split_options(query, KNOWN)
    positions = _switch("Virta-Positions", headers.get(POSITIONS_HEADER, b"0").decode("latin-1"))
    if POSITIONS in given:
        positions = _switch(POSITIONS, unquote_plus(given[POSITIONS]))
    seen = headers.get(LAST_EVENT_ID_HEADER, b"").decode("utf-8", "replace")
    seen = seen or unquote_plus(given.get(LAST_EVENT_ID, ""))
    place = parse_last_event_id(seen) if seen else None
    return StreamOptions(query, place, positions, in_url=LAST_EVENT_ID in given)


def split_options(query: bytes, known: Sequence[str]) -> tuple[dict[str, str], bytes]:
    """
    Return the options of a query with their values, still percent-encoded, and the query without them.

    Raises:
        RequestError: 400 for an option that is not `known`, or given twice.
    """
    if b"$" not in query and b"%24" not in query:
        return {}, query
    given: dict[str, str] = {}
    options, rest = split_parameters(query, _is_option)
    for piece in options:
        name, _, value = piece.decode("utf-8", "replace").partition("=")
        name = unquote_plus(name)
        if name not in known:
            raise RequestError(
                400,
                "unknown-option",
                f"{name!r} is not an option here: {', '.join(known[:-1])} and {known[-1]} are. For a member of "
                f"the data with that name write the path /{name}",
            )
        if name in given:
            raise RequestError(400, "invalid-option", f"{name} is given twice: write it once")
        given[name] = value
    return given, rest


def split_parameters(query: bytes, is_option: Callable[[bytes], bool]) -> tuple[list[bytes], bytes]:
    """
    Split a query into the options and the query without them.

    A part between semicolons that contained only options is removed: left empty, it would be a
    query that everything satisfies.
    """
    options: list[bytes] = []
    parts = []
    for part in query.split(b";"):
        kept: list[bytes] = []
        for piece in part.split(b"&"):
            (options if is_option(piece) else kept).append(piece)
        if kept:
            parts.append(b"&".join(kept))
    return options, b";".join(parts)


def _is_option(piece: bytes) -> bool:
    return piece.startswith((b"$", b"%24"))


def _switch(name: str, value: str) -> bool:
    if value not in SWITCH:
        raise RequestError(400, "invalid-option", f"{name} is 1 or 0, got {value[:40]!r}")
    return SWITCH[value]
