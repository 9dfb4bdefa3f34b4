"""
Random filters and documents, many a second: for differential tests and the fuzzer.

Names and values come from small sets, so that a random condition has a fair chance on a random document,
and the sets hold what is hard: dotted and empty names, numeric names, surrogates, numbers beside each other.
"""

from __future__ import annotations

import random
from typing import Any

from virta.filters import Filter, parse
from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    And,
    Annulus,
    Box,
    Circle,
    Condition,
    Flat,
    JsonPattern,
    LikeText,
    Not,
    Or,
    Polygon,
    Regexp,
    Select,
    ValueRange,
)

NAMES = ["a", "b", "c", "a.b", "b.c", "0", "1", "", "é", "lat"]
FLAT_NAMES = ["a", "b", "c", "a.b", "b.c", "a.b.c", "a.b.c.a", "0", "a.0", "", ".", "a.", ".a", "é"]
TEXTS = [
    "",
    "a",
    "ab",
    "abc",
    "abd",
    "b",
    "bob",
    "zoé",
    "1",
    "true",
    "null",
    "\U0001f600",
    "\ud800",
]
TEXTS += ["A\nb", "abcdefgh", "abcdefghi", "abcdefgi", "\uffff", "a\0b"]
NUMBERS = [0, 1, -1, 2, 2.5, 1.0, 1e21, 2**53 + 1, 2.0**53, -0.0, 1e-7, 10**400, -(10**400), 5e-324]
NUMBERS += [1.0000000000000002, 0.9999999999999999, 2**64, -(2**63), 1e308, 3, 4, 5, 6, 7]
PATTERNS = [
    "a",
    "^a",
    "b$",
    "^$",
    "[0-9]",
    ".",
    "^ab?c*$",
    "^ab(c|d)",
    "^a\\.?b|b",
    "^[a|]b",
    "(?i)BOB",
    "null|true",
    "a|b",
    "é",
    "\\x{fffd}",
]
GEOPOINTS = ["u09t", "spf8prntv18e", "paris", "x, y", "48.8, 2.3", {"latLon": None}, [1, 2, 3]]
GEOPOINTS += [{"lat": "48.8", "lon": 2.3}, {"lat_lon": "48.8,2.3"}, [48.8, 2.3], ["48.8abc", 2.3]]
QUERIES = [
    "{}=1",
    "{}=!a",
    "{}=>1&{}=<=4",
    "{}=~a",
    "{}=[a",
    "/{}/0=a",
    "{}=true",
    "{}=>=ab",
    "{}=!null",
]
EXPRESSIONS = [
    "data.{}", "EXISTS {}", "{} = 'a'", "{} LIKE 'a%'", "{} IN ('a', 'b', '1')", "NOT (EXISTS {})",
    "{} = 1", "LENGTH({}) > 1", "{} != 'a' AND EXISTS {}",
]  # fmt: skip

OPS = [
    "exists",
    "type",
    "eq",
    "eq",
    "eq",
    "in",
    "contains",
    "range",
    "range",
    "prefix",
    "suffix",
    "regexp",
    "regexp_text",
    "match",
    "geo",
    "geo",
]
OPS += ["geo_junk", "negative_zero", "select", "like", "elements"]
LIKES = ["%", "a%", "%b%", "_", "a_%d", "%bc%", "%\\_%", "%a%b%c%", "_b%", "%é", "%abcdefg_", ""]


def on_value(node: Any) -> Any:
    """The tree of a `select` as Koncorde has it: on fields below `value`."""
    if isinstance(node, Condition):
        name = "" if not node.path else str(getattr(node.path[0], "name", node.path[0]))
        field = name if name == "b" else f"value.{name}" if name else "value"
        return Condition((Flat(field),), node.op, node.value)
    if isinstance(node, Not):
        return Not(on_value(node.child))
    if isinstance(node, And | Or):
        return type(node)(tuple(map(on_value, node.children)))
    return node


class Randoms:
    """A source of random things; equal seeds give equal things."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pick = self.rng.choice

    # Documents.

    def scalar(self) -> Any:
        roll = self.rng.random()
        if roll < 0.1:
            return self.pick([None, True, False])
        if roll < 0.5:
            return self.pick(NUMBERS) if self.rng.random() < 0.5 else self.rng.randint(-5, 5)
        return self.pick(TEXTS)

    def value(self, depth: int = 3) -> Any:
        roll = self.rng.random()
        if depth == 0 or roll < 0.55:
            return self.scalar()
        if roll < 0.65:
            return self.pick(GEOPOINTS)
        if roll < 0.75:
            return self.point(self.pick(["list", "dict", "text"]))
        if roll < 0.88:
            return [self.value(depth - 1) for _ in range(self.rng.randint(0, 4))]
        return self.document(depth - 1)

    def document(self, depth: int = 3) -> dict[str, Any]:
        return {self.pick(NAMES): self.value(depth) for _ in range(self.rng.randint(0, 6))}

    def point(self, form: str) -> Any:
        lat, lon = round(self.rng.uniform(-60, 60), 2), round(self.rng.uniform(-200, 200), 2)
        if self.rng.random() < 0.5:
            lat, lon = round(self.rng.uniform(48, 49), 3), round(self.rng.uniform(2, 3), 3)
        if form == "list":
            return [lat, lon]
        return {"lat": lat, "lon": lon} if form == "dict" else f"{lat}, {lon}"

    # Filters.

    def path(self) -> tuple[Any, ...]:
        if self.rng.random() < 0.5:
            return (Flat(self.pick(FLAT_NAMES)),)
        steps = [
            self.pick(NAMES) if self.rng.random() < 0.8 else self.rng.randint(0, 3)
            for _ in range(self.pick([0, 1, 1, 1, 2, 2, 3]))
        ]
        return tuple(steps)

    def range(self) -> ValueRange:
        kind = self.pick(["number", "number", "text", "boolean"])
        bounds = [self._bound(kind), self._bound(kind)]
        if self.rng.random() < 0.4:
            bounds[self.rng.randint(0, 1)] = None
        elif kind != "boolean" and self.rng.random() < 0.8:
            bounds.sort()
        opens = [self.rng.random() < 0.5, self.rng.random() < 0.5]
        return ValueRange(bounds[0], bounds[1], lower_open=opens[0], upper_open=opens[1])

    def _bound(self, kind: str) -> Any:
        return self.pick({"number": NUMBERS, "text": TEXTS, "boolean": [True, False]}[kind])

    def shape(self) -> tuple[str, Any]:
        lat, lon = self.point("list")
        radius = 10 ** self.rng.uniform(0, 7)
        kind = self.pick(["geo_distance", "geo_distance_range", "geo_box", "geo_polygon"])
        if kind == "geo_distance":
            return kind, Circle(lat, lon, radius)
        if kind == "geo_distance_range":
            return kind, Annulus(lat, lon, radius, radius * self.rng.uniform(1.01, 3))
        if kind == "geo_box":
            return kind, Box(
                lat + 10 ** self.rng.uniform(-2, 2), lon, lat, lon + self.rng.uniform(0.1, 200)
            )
        corners = [(lat + self.rng.uniform(-5, 5), lon + self.rng.uniform(-9, 9)) for _ in range(5)]
        return kind, Polygon(tuple(corners))

    def condition(self, depth: int = 1) -> Condition:
        path = self.path()
        op = self.pick(OPS)
        if op == "geo":
            return Condition(path, *self.shape())
        if op == "elements":
            return Condition(
                path,
                "match",
                JsonPattern.of([self.document(1) for _ in range(2)][: self.pick([1, 1, 2])]),
            )
        if op == "type":
            types = ["null", "boolean", "number", "string", "array", "object"]
            return Condition(path, op, self.pick(types))
        if op == "in":
            return Condition(path, op, [self.scalar() for _ in range(self.rng.randint(1, 5))])
        if op == "select":
            tree = self.condition() if depth == 0 else self.tree(1)
            if self.rng.random() < 0.8:
                tree = on_value(tree)
            return Condition(path, op, Select(self.rng.randint(-3, 3), tree))
        makers: dict[str, Any] = {
            "eq": self.scalar,
            "contains": self.scalar,
            "range": self.range,
            "prefix": lambda: self.pick(TEXTS),
            "like": lambda: LikeText(self.pick(LIKES)),
            "suffix": lambda: self.pick(TEXTS),
            "regexp": lambda: Regexp(self.pick(PATTERNS), self.pick(["", "i", "ms"])),
            "regexp_text": lambda: Regexp(self.pick(PATTERNS), self.pick(["", "i", "ms"])),
            "match": lambda: JsonPattern.of(self.value(2)),
        }
        return Condition(path, op, makers[op]() if op in makers else None)

    def tree(self, depth: int = 3) -> Any:
        roll = self.rng.random()
        if depth == 0 or roll < 0.3:
            return self.condition(depth)
        if roll < 0.32:
            return self.pick([EVERYTHING, NOTHING])
        if roll < 0.5:
            return Not(self.tree(depth - 1))
        children = tuple(self.tree(depth - 1) for _ in range(self.rng.randint(1, 4)))
        return (And if roll < 0.8 else Or)(children)

    def big_tree(self) -> Any:
        """More conjunctions than an index takes: an And of Ors."""
        return And(
            tuple(Or(tuple(self.tree(1) for _ in range(4))) for _ in range(self.rng.randint(4, 6)))
        )

    def filter(self) -> Filter:
        """A filter of some dialect, mostly a bare tree."""
        roll = self.rng.random()
        if roll < 0.7:
            return Filter(self.tree())
        if roll < 0.78:
            return Filter(self.big_tree())
        name = self.pick("abc")
        if roll < 0.85:
            return parse(self.pick(QUERIES).format(name, name), "query-string")
        if roll < 0.92:
            return parse(self.pick(EXPRESSIONS[1:]).format(name, name), "cesql")
        if roll < 0.96:
            return parse(self.dialects(name), "cloudevents")
        return parse({"equals": {self.pick(["a", "a.b"]): self.pick([1, "a", True])}}, "koncorde")

    def dialects(self, name: str, depth: int = 2) -> dict[str, Any]:
        """A filter of the CloudEvents Subscriptions API."""
        kind = self.pick(["exact", "prefix", "suffix", "sql", "all", "any", "not"])
        if kind == "not" and depth:
            return {"not": self.dialects(name, depth - 1)}
        if kind in {"all", "any"} and depth:
            return {kind: [self.dialects(name, depth - 1) for _ in range(self.rng.randint(1, 3))]}
        if kind == "sql":
            return {"sql": self.pick(EXPRESSIONS[1:]).format(name, name)}
        return {
            self.pick(["exact", "prefix", "suffix"]): {name: self.pick(["a", "ab", "1", "true"])}
        }

    def event(self) -> Any:
        """A document, sometimes as the data of an envelope, seldom no object at all."""
        roll = self.rng.random()
        if roll < 0.05:
            value = self.value()
            return value if isinstance(value, dict | list) else [value]  # scalars are no events
        document = self.document()
        return {**document, "data": self.document()} if roll < 0.3 else document
