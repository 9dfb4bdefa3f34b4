"""
The cache of request heads that were checked before.

A publisher sends the same head again and again; only the length differs. A head that passed every check
that depends on the head alone is cached with its meaning. Heads of binary events contain the event's
attributes, so none comes twice: they are cached without the values of their attributes, which are read
from each.

Invariant: a cached head means what the parser and the checks would find again, since they are functions
of its bytes and of settings that do not change. What can change, the rights and the rate of its principal, is in
`access` and checked for every request; the cache is cleared when tokens change. (On a wildcard address a Host may have been right because
the connection arrived there; it is an address of this server on every other connection too. Responses to
web pages differ, so heads with an `Origin` are not cached.)
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from virta.server.event_input import MODES, Headers

if TYPE_CHECKING:
    from virta.access.principal import Principal
    from virta.filters import Filter

END_OF_HEAD = b"\r\n\r\n"
# Cached heads, and the size of one: a few megabytes at most together.
HEADS_MAX = 4096
HEAD_BYTES_MAX = 1024
# An attribute of a binary event in its usual spelling: one space, a value without spaces around it.
ATTRIBUTE = re.compile(
    rb"\r\n([cC][eE]-[a-zA-Z0-9]+): ([!-~\x80-\xff](?:[ -~\x80-\xff]*[!-~\x80-\xff])?)(?=\r|\Z)"
)
ANY_ATTRIBUTE = re.compile(rb"\r\nce-", re.IGNORECASE)
# Heads that are not cached without their values: a folded line, a type beside the content's.
NO_OUTLINE = re.compile(rb"\r\n[ \t]|\r\nce-datacontenttype:", re.IGNORECASE)


class HeadAccess(NamedTuple):
    """What is checked for every request with a head: its principal and the row filter for the channel."""

    principal: Principal
    row_filter: Filter | None


class KnownHead(NamedTuple):
    """The meaning of a head: a publication to this channel, with a body of this length."""

    size: int  # of the whole request
    start: int  # of the body
    channel: str
    content_type: bytes
    mode: bytes
    attributes: Headers  # of a binary event
    access: HeadAccess | None = None


class HeadCache(dict[bytes, "KnownHead | None"]):
    """Heads of publications that passed all checks; `cache[head]` is None if it has to be parsed."""

    def __init__(self, head_bytes_max: int) -> None:
        super().__init__()
        self._bytes_max = min(head_bytes_max, HEAD_BYTES_MAX)
        # Heads of binary events without the values of their attributes.
        self._outlines: dict[tuple[bytes, ...], KnownHead] = {}

    def __missing__(self, head: bytes) -> KnownHead | None:
        """Return the meaning of the head of a binary event."""
        if not self._outlines or not head or len(head) > self._bytes_max:
            return None
        outline, values = _outline(head)
        known = self._outlines.get(outline)
        if known is None:
            return None
        size, start, channel, content_type, mode, attributes, access = known
        attributes = [(name, value) for (name, _), value in zip(attributes, values, strict=True)]
        more = len(head) + len(END_OF_HEAD) - start
        size, start = size + more, start + more
        return KnownHead(size, start, channel, content_type, mode, attributes, access)

    def add(
        self,
        head: bytes,
        channel: str,
        content_type: bytes,
        mode: bytes,
        body_bytes: int,
        access: HeadAccess | None = None,
    ) -> None:
        """Cache a head that passed all checks, unless another one could mean something else."""
        # Where the head ends is only certain when every line ends as it should.
        lines = head.count(b"\r\n")
        whole = head.count(b"\n") == lines == head.count(b"\r")
        if len(head) > HEAD_BYTES_MAX or not whole:
            return
        start = len(head) + len(END_OF_HEAD)
        known = KnownHead(start + body_bytes, start, channel, content_type, mode, [], access)
        if mode in MODES:
            if len(self) >= HEADS_MAX:
                self.clear()
            self[head] = known
        elif not NO_OUTLINE.search(head):
            outline, values = _outline(head)
            if len(values) == len(ANY_ATTRIBUTE.findall(head)):
                if len(self._outlines) >= HEADS_MAX:
                    self._outlines.clear()
                names = [name.lower() for name in outline[1::2]]
                attributes = list(zip(names, values, strict=True))
                self._outlines[outline] = known._replace(attributes=attributes)

    def forget(self) -> None:
        """Clear the cache: what a credential in a head means has changed."""
        self.clear()
        self._outlines.clear()


def _outline(head: bytes) -> tuple[tuple[bytes, ...], list[bytes]]:
    """Split a head at its attributes: (text, name, text, name, …) and the values."""
    pieces = ATTRIBUTE.split(head)
    values = pieces[2::3]
    del pieces[2::3]
    return tuple(pieces), values
