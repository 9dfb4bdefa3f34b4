"""
The price of a filter before it is added: how an event finds it, and what that costs.

A filter is *indexed* if a condition finds it, so that events without that condition never reach it; *verified* if more
is tested once it is found; *scanned* if nothing finds it and every event tests it. Conditions that the native engine
cannot evaluate run in Python, with the GIL: some for every candidate, some for rare values only (`virta.match.engine`
counts both). Time and memory are estimates.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from virta.filters import Filter, parse
from virta.filters.cesql.computed import CesqlExpression
from virta.filters.explain import path_text
from virta.filters.tree import And, Condition, Not, Or
from virta.match.compile import Compiled, compile_filter
from virta.match.compile.program import MATCH_FALLBACK, encode
from virta.match.engine import make_engine
from virta.match.plain.selectivity import SCAN, cover, implied, rank
from virta.match.regex import plain_condition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from virta.filters.tree import Node

# Nanoseconds an event costs for each conjunction that it tests, for each condition of a tree that is tested whole, and
# for each condition evaluated in Python.
SCAN_NS = 20
TREE_NS = 5
PYTHON_NS = 5_000
# Memory of a conjunction in a large index beside its conditions, whose size is about that of the program.
CONJUNCTION_BYTES = 100


@dataclass(frozen=True, slots=True)
class FilterCost:
    """
    What a filter costs an index.

    `found_by` are the conditions by which events find it, one a conjunction; `python` those evaluated in Python for
    every candidate, `python_at_times` those for some values only, which are named; `event_ns` is the estimated time of
    every event, whether it matches or not; `bytes` its estimated memory.
    """

    kind: str  # indexed, verified or scanned
    conjunctions: int
    found_by: tuple[str, ...]
    python: tuple[str, ...]
    python_at_times: tuple[str, ...]
    event_ns: int
    bytes: int

    @property
    def scans(self) -> int:
        """Return how many simple scanned filters cost every event as much as this one; 0 unless it is scanned."""
        return max(1, -(-self.event_ns // SCAN_NS)) if self.kind == "scanned" else 0

    def to_json(self) -> dict[str, Any]:
        """Return the cost as JSON data."""
        return asdict(self) | {"scans": self.scans}

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {_KINDS[self.kind]}",
            f"  conjunctions {self.conjunctions}, {self.bytes} bytes, about {self.event_ns} ns for every event",
        ]
        lines += [f"  found by {text}" for text in self.found_by]
        lines += [f"  in Python: {text}" for text in self.python]
        lines += [f"  in Python at times: {text}" for text in self.python_at_times]
        return "\n".join(lines)


_KINDS = {
    "indexed": "events find it by one condition, which is all of it",
    "verified": "events find it by a condition, then the rest is tested",
    "scanned": "no condition finds it: every event tests it",
}


def filter_cost(
    filter_: Filter | Compiled | str | bytes | dict[str, Any] | list[Any],
    *,
    dialect: str = "query-string",
    engine: str = "auto",
) -> FilterCost:
    """
    Return the price of a filter, or of the text or object of one in `dialect`: it is added to an index of its own.

    Raises:
        FilterError: for what is no filter.
    """
    if isinstance(filter_, Filter):
        filter_ = compile_filter(filter_)
    elif not isinstance(filter_, Compiled):
        filter_ = compile_filter(parse(filter_, dialect))
    compiled = filter_
    index = make_engine(engine)
    index.add(compiled)
    stats = index.stats()
    kind = next(
        name for name in ("scanned", "verified", "indexed") if stats[name] or name == "indexed"
    )
    program, conditions = encode(compiled)
    opaques = [condition for condition in conditions if condition.op not in MATCH_FALLBACK]
    at_times = [text for one in _conditions(compiled) for text in _at_times(one, conditions)]
    every = stats["unindexed"]
    return FilterCost(
        kind=kind,
        conjunctions=stats["conjunctions"],
        found_by=tuple(dict.fromkeys(_accesses(compiled))) if kind != "scanned" else (),
        python=tuple(_described(condition) for condition in opaques),
        python_at_times=tuple(dict.fromkeys(at_times)),
        event_ns=_event_ns(compiled, every, len(opaques)) if every else 0,
        bytes=len(program) + stats["conjunctions"] * CONJUNCTION_BYTES,
    )


def _event_ns(compiled: Compiled, conjunctions: int, opaques: int) -> int:
    tested = conjunctions * SCAN_NS
    if compiled.tree is not None:
        tested += TREE_NS * compiled.tree.count
    return tested + PYTHON_NS * opaques


def _accesses(compiled: Compiled) -> list[str]:
    if compiled.tree is not None:
        return [_described(literal) for literal in cover(compiled.tree)[1] if literal is not None]
    found = []
    for term in compiled.conjunctions:
        access = min((*term, *map(implied, term)), key=rank, default=None)
        if access is not None and rank(access) != SCAN:
            found.append(_described(access))
    return found


def _conditions(compiled: Compiled) -> Iterator[Condition]:
    """Yield the conditions of a filter, those inside a `select` too."""
    waiting: list[Node] = [node for term in compiled.conjunctions for node in term]
    if compiled.tree is not None:
        waiting.append(compiled.tree)
    while waiting:
        node = waiting.pop()
        if isinstance(node, And | Or):
            waiting += reversed(node.children)
        elif isinstance(node, Not):
            waiting.append(node.child)
        elif isinstance(node, Condition):
            yield node
            if node.op == "select":
                waiting.append(node.value.tree)


def _at_times(condition: Condition, numbered: tuple[Condition, ...]) -> Iterator[str]:
    """Yield what of a condition Python evaluates for some values only: docs/matching.md has the costs."""
    what, op = _described(condition), condition.op
    computed = condition.path[0] if condition.path else None
    if isinstance(computed, CesqlExpression):
        text = path_text(condition.path)
        yield f"{text}: an attribute that is an array, an object or no 32-bit Integer"
        if any(name in text for name in ("LOWER(", "UPPER(")):
            yield f"{text}: text beyond ASCII"
    if (op == "regexp" and plain_condition(condition.value) is None) or op == "regexp_text":
        yield f"{what}: a text not seen before"
    if op == "regexp_text":
        yield f"{what}: a value that is no text"
    elif op.startswith("geo_") and op != "geo_junk":
        yield f"{what}: a point that is neither {{lat, lon}} nor [lat, lon] of numbers"
    elif op in MATCH_FALLBACK and condition in numbered:
        yield f"{what}: more than 16,384 values to compare"


def _described(literal: Condition | Not) -> str:
    if isinstance(literal, Not):
        assert isinstance(literal.child, Condition)
        return f"not {_described(literal.child)}"
    return f"{literal.op} of {path_text(literal.path)}"
