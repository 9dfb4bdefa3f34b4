"""
A filter: a tree and the dialect it was written in.

Two filters are equal when their canonical forms are, regardless of dialect, order of operands and process: `id`
is the hash of that form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from virta.filters.canonical import canonical_text, digest
from virta.filters.evaluate import holds

if TYPE_CHECKING:
    from virta.filters.explain import Explanation
    from virta.filters.tree import Node


class Filter:
    """An immutable filter; build one with `virta.filters.parse`, or from a tree."""

    __slots__ = ("_canonical", "_id", "dialect", "tree")

    def __init__(self, tree: Node, *, dialect: str = "tree") -> None:
        self.tree = tree
        self.dialect = dialect
        self._canonical: str | None = None
        self._id: str | None = None

    def matches(self, obj: Any) -> bool:
        """Return whether an object satisfies the filter: an event, or a document for Koncorde."""
        return holds(self.tree, obj)

    @property
    def id(self) -> str:
        """Return 64 hex characters, equal for equal filters in every process."""
        if self._id is None:
            self._id = digest(self.canonical())
        return self._id

    @property
    def known_id(self) -> str | None:
        """Return the id if it was asked for before, for others to share its text."""
        return self._id

    def canonical(self) -> str:
        """Return the canonical form as JSON text: negations at the conditions, flat, sorted, without repeats."""
        if self._canonical is None:
            self._canonical = canonical_text(self.tree)
        return self._canonical

    def explain(self, obj: Any) -> Explanation:
        """Return which conditions hold for an object and which do not, with reasons; `str()` draws it as text."""
        from virta.filters.explain import explain  # noqa: PLC0415 - rarely needed

        return explain(self.tree, obj)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Filter) and self.canonical() == other.canonical()

    def __hash__(self) -> int:
        return hash(self.canonical())

    def __repr__(self) -> str:
        return f"<Filter {self.dialect} {self.canonical()}>"
