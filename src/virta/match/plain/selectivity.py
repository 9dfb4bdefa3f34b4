"""
Choose the literal by which the plain index finds a conjunction.

Every conjunction is indexed under its literal of the lowest rank, which holds wherever the conjunction does;
`implied`, `interval` and `latitudes` weaken a condition to something that can be looked up.
"""

from __future__ import annotations

import math
from typing import Any

from virta.filters.geo import EQUATOR
from virta.filters.tree import And, Condition, Flat, Node, Not, Or
from virta.filters.values import Annulus, Box
from virta.match.regex import plain_condition

SHAPED, PATTERN, PRESENT, ABSENT, SCAN = 3, 5, 6, 7, 8
_RANKS = {"eq": 0, "in": 1, "contains": 2, "range": 4}
_RANKS |= dict.fromkeys(("geo_distance", "geo_distance_range", "geo_box"), SHAPED)
# Of the path of an equality taken out of a `match`.
IMPLIED_STEPS_MAX = 16
# Degrees added to a shape's latitudes: the exact test rounds differently.
_SLACK = 1e-6


def rank(literal: Condition | Not) -> int:
    """Return how selective a literal is as an access: lower is better."""
    if isinstance(literal, Not):
        return ABSENT if is_exists(literal.child) else SCAN
    if literal.op == "range":
        return _RANKS["range"] if _is_interval(literal) else PRESENT
    if literal.op == "regexp":
        return PRESENT if plain_condition(literal.value) else PATTERN
    return SCAN if literal.op == "opaque" else _RANKS.get(literal.op, PRESENT)


def implied(literal: Condition | Not) -> Condition | Not:
    """Return an equality implied by a `match`, to look it up by; the literal itself if there is none."""
    if isinstance(literal, Not) or literal.op != "match":
        return literal
    path, pattern = literal.path, literal.value.value
    while isinstance(pattern, dict) and pattern and len(path) < IMPLIED_STEPS_MAX:
        key, pattern = next(iter(pattern.items()))
        path = (*path, key)
    if any(isinstance(step, Flat) for step in path[:-1]) or isinstance(pattern, dict):
        return literal
    if not isinstance(pattern, list):
        return Condition(path, "eq", pattern)
    scalars = (part for part in pattern if not isinstance(part, dict | list))
    return next((Condition(path, "contains", part) for part in scalars), literal)


def cost(literal: Condition | Not) -> int:
    """Return the rough cost of testing a literal: cheap ones are tested first."""
    condition = literal if isinstance(literal, Condition) else literal.child
    assert isinstance(condition, Condition)
    if condition.op in ("exists", "type", "prefix", "suffix"):
        return 0
    return _RANKS.get(condition.op, SCAN)


def is_exists(node: Node) -> bool:
    return isinstance(node, Condition) and node.op == "exists"


def cover(node: Node) -> tuple[int, list[Condition | Not | None]]:
    """Return the worst rank, and literals of which one holds whenever the tree does."""
    if isinstance(node, And):
        return min((cover(child) for child in node.children), key=lambda found: found[0])
    if isinstance(node, Or):
        parts = [cover(child) for child in node.children]
        worst = max(part_rank for part_rank, _ in parts)
        return worst, [] if worst == SCAN else [literal for _, part in parts for literal in part]
    assert isinstance(node, Condition | Not)
    own = rank(node)
    return own, [] if own == SCAN else [node]


def _is_interval(condition: Condition) -> bool:
    return condition.op == "range" and condition.value.kind == "number"


def interval(condition: Condition) -> tuple[float, float]:
    """Return the bounds as a closed interval of doubles."""
    bounds = condition.value
    lower = -math.inf if bounds.lower is None else float(bounds.lower)
    upper = math.inf if bounds.upper is None else float(bounds.upper)
    if bounds.lower_open:
        lower = math.nextafter(lower, math.inf)
    if bounds.upper_open:
        upper = math.nextafter(upper, -math.inf)
    return lower, upper


def latitudes(shape: Any) -> tuple[float, float]:
    """Return the latitudes between which a shape lies."""
    if isinstance(shape, Box):
        lower, upper = shape.bottom, shape.top
    else:
        radius = shape.outer if isinstance(shape, Annulus) else shape.radius
        reach = math.degrees(radius / EQUATOR) + _SLACK
        lower, upper = shape.lat - reach, shape.lat + reach
    # NaN cannot be ordered.
    return (lower, upper) if lower <= upper else (-math.inf, math.inf)
