"""
Compile a filter for an index: conjunctions of conditions, or the whole tree when there are too many.

`compile_filter` does the work that all engines share and that needs no index. A `Compiled` is immutable,
picklable, and can be added to any number of matchers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from virta.errors import FilterError
from virta.filters.canonical import (
    Conjunction,
    canonical_form,
    digest,
    form_conjunctions,
)
from virta.filters.filter import Filter
from virta.filters.tree import And, Condition, Not

if TYPE_CHECKING:
    from virta.filters.tree import Node


@dataclass(frozen=True)
class Compiled:
    """
    A filter ready for an index.

    Either `tree` is None and the filter is the disjunction of `conjunctions`, or it has too many of them for
    an index: then `tree` is the whole filter, found by some of its conditions and verified as a whole.
    """

    id: str
    conjunctions: tuple[Conjunction, ...]
    tree: Node | None = None
    canonical: str = ""  # the JSON text whose hash is the id

    @cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.id)

    @cached_property
    def encoded(self) -> tuple[bytes, tuple[Condition, ...]]:
        """Return the program for the native index, and the opaque conditions that Python evaluates."""
        from virta.match.compile.program import encode  # noqa: PLC0415 - only the native engine needs it

        return encode(self)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "conjunctions": self.conjunctions,
            "tree": self.tree,
            "canonical": self.canonical,
        }


def compile_filter(filter_: Filter) -> Compiled:
    """
    Compile a filter; takes some tens of microseconds.

    Raises:
        FilterError: for what is no `Filter`; `Matcher.add` takes texts and objects too.
    """
    if not isinstance(filter_, Filter):
        raise FilterError(
            f"expected a Filter, which virta.filters.parse returns, got {type(filter_).__name__} {filter_!r:.80}"
        )
    form = canonical_form(filter_.tree)
    tree = form.node
    id_ = filter_.known_id or digest(form.text)
    members = tree.children if isinstance(tree, And) else (tree,)
    if all(isinstance(member, Condition | Not) for member in members):
        # A canonical conjunction is its own normal form: most filters end here.
        return Compiled(id_, (members,), None, form.text)  # type: ignore[arg-type]  # just checked
    terms = form_conjunctions(form)
    if terms is None:
        return Compiled(id_, (), tree, form.text)
    return Compiled(id_, tuple(terms), None, form.text)
