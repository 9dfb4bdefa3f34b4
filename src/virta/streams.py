"""
Stream ids and prefix routing, as in Subtub.

An id is a path of segments split at `:`. Empty segments at the end are dropped; empty ones at the start and
inside count. Two ids match when one path is a prefix of the other, so a message to `a:` reaches all subscribers
below it, and a subscriber of `a:` receives all messages below it:

    published   a:b          subscribed   a:      a:b     a:b:c    a:c
                             receives     yes     yes     yes      no

Invariant of `StreamIndex`: `route(id)` returns a subscriber once for each of its subscriptions that match, and
no others. No I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from virta.errors import StreamIdError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

SEPARATOR = ":"
# An error message quotes at most this much of a bad id: ids have no length limit of their own.
QUOTED_CHARS_MAX = 80

Segments = tuple[str, ...]
S = TypeVar("S", bound="Hashable")


def parse_stream_id(text: str) -> Segments:
    """
    Split a stream id into its segments.

    Raises:
        StreamIdError: the text has no colon, or no segment with a character in it.
    """
    if SEPARATOR not in text:
        raise StreamIdError(
            f"stream id {text[:QUOTED_CHARS_MAX]!r} has no colon: write `name:` for a single segment"
        )
    stripped = text.rstrip(SEPARATOR)
    if not stripped:
        raise StreamIdError(
            f"stream id {text[:QUOTED_CHARS_MAX]!r} has only empty segments: name at least one"
        )
    return tuple(stripped.split(SEPARATOR))


def canonical_stream_id(segments: Segments) -> str:
    """Return the id as receivers get it; one with a single segment has no colon."""
    return SEPARATOR.join(segments)


def streams_match(left: Segments, right: Segments) -> bool:
    """Return whether one path is a prefix of the other, or equal to it."""
    shorter = min(len(left), len(right))
    return left[:shorter] == right[:shorter]


class _Node(Generic[S]):
    """One segment of the tree: its subscribers, and the segments below."""

    __slots__ = ("children", "subscribers")

    def __init__(self) -> None:
        self.children: dict[str, _Node[S]] = {}
        # A dict keeps the order of arrival and removes in constant time.
        self.subscribers: dict[S, None] = {}


class StreamIndex(Generic[S]):
    """Subscribers by stream id; adding, removing and routing cost the length of the id."""

    def __init__(self) -> None:
        self._root: _Node[S] = _Node()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, segments: Segments, subscriber: S) -> bool:
        """Add a subscription; return False if this subscriber already has this id."""
        assert segments, "an id has at least one segment"
        node = self._root
        for segment in segments:
            child = node.children.get(segment)
            if child is None:
                child = node.children[segment] = _Node()
            node = child
        if subscriber in node.subscribers:
            return False
        node.subscribers[subscriber] = None
        self._count += 1
        return True

    def remove(self, segments: Segments, subscriber: S) -> bool:
        """Remove a subscription and nodes that became empty; return False if there was none."""
        path: list[tuple[_Node[S], str]] = []
        node = self._root
        for segment in segments:
            child = node.children.get(segment)
            if child is None:
                return False
            path.append((node, segment))
            node = child
        if subscriber not in node.subscribers:
            return False
        del node.subscribers[subscriber]
        self._count -= 1
        for parent, segment in reversed(path):
            child = parent.children[segment]
            if child.children or child.subscribers:
                break
            del parent.children[segment]
        return True

    def route(self, segments: Segments) -> list[S]:
        """Return the subscribers of a published id, once per matching subscription."""
        found: list[S] = []
        node = self._root
        for segment in segments:
            child = node.children.get(segment)
            if child is None:
                return found
            node = child
            found.extend(node.subscribers)
        for below in _descendants(node):
            found.extend(below.subscribers)
        return found


def _descendants(node: _Node[S]) -> Iterator[_Node[S]]:
    """Yield every node below this one, in order; without recursion, since ids may be deep."""
    stack = list(reversed(node.children.values()))
    while stack:
        current = stack.pop()
        yield current
        stack.extend(reversed(current.children.values()))
