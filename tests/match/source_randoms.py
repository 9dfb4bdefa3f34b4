"""Random sources of every dialect: common forms, what lies just beside them, and damaged ones."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NAMES = ["a", "b", "n", "type", "time", "a.b", "tags", "_id", "é", "", "a[0]"]
KEYS = [
    "a",
    "b",
    "/a/b",
    "/a",
    "../type",
    "../a/0",
    "a.b",
    "é",
    "0",
    "/a~1b",
    "/a~b",
    "a%20b",
    "a+b",
    "a!",
    "",
]
ATTRIBUTES = ["a", "b", "n", "type", "subject", "TYPE", "data", "id", "a_b", "x1", "1x", "7"]
TEXTS = [
    "", "a", "ab", "abc", "zoé", "5", "05", "-5", "-0", "0", "+7", "-", "t", "true", "TRUE", "false", "rue", "NaN", "Infinity",
    "-Infinity", "9999999999", "2147483648", "[x", "{", "x]", "x.v1", '"', "\\", "a\nb", "\x7f", "\0", "\U0001f600", "\ud800",
    " a ", "1.5", "1e3", "null", "%", "a%", "%a", "a%b", "a_b", "a'b", "0x1", "\x1f",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 5, 7, 2.5, -0.0, 1.0, 1e21, 2**53, 2**53 + 1, -(2**53), 2**64, 1e308, 1e-7, 0.1, 10**400, float("inf"), True, False,
    float("nan"), 2147483647, -2147483648, 2147483646, 2147483648,
]  # fmt: skip
LITERALS = [
    "", "1", "0", "-0", "-0.0", "0.0", "1.50", "01", "1e5", "1e999", "-1e999", " 5 ", "null", "true", "false", " true", '"a"', '"5"',
    '"a\\n"', '"a"b"', "a", "a+b", "a%20b", "%22a%22", "%c3%a9", "%0", "%zz", "é", "9007199254740993", "=a", "~a", "[a", "!",
]  # fmt: skip
OPERATORS = ["", "", "", "", "!", "<", "<=", ">", ">=", "~", "[", "["]
PATTERNS = ["^a", "b$", "^ab$", "[0-9]+", "(", "a|b", ""]


class SourceRandoms:
    """A source of random sources; equal seeds give equal ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pick = self.rng.choice

    def source(self, dialect: str) -> Any:
        """A source of a dialect, one in three damaged."""
        whole = {
            "query-string": self.query,
            "cesql": self.expression,
            "koncorde": self.koncorde,
            "cloudevents": self.cloudevents,
        }[dialect]()
        if isinstance(whole, str):
            return self.damaged(whole) if self.rng.random() < 0.3 else whole
        roll = self.rng.random()
        if roll < 0.2:
            self.damage(whole)
        if 0.15 < roll < 0.3:
            text = json.dumps(whole)
            return self.damaged(text) if roll < 0.2 else text
        return whole

    # Query strings.

    def query(self) -> str:
        # Half of them of parts that are all common.
        cut = self.pick([None, 8])
        terms = [
            f"{self.pick(KEYS[:cut])}={self.pick(OPERATORS)}{self.pick(LITERALS[: cut and 21])}"
            for _ in range(self.rng.randint(1, 3))
        ]
        if self.rng.random() < 0.3:
            key, (low, high) = self.pick(KEYS), sorted(self.rng.sample(range(-3, 4), 2))
            terms += [f"{key}=>{self.pick(['', '='])}{low}", f"{key}=<{self.pick(['', '='])}{high}"]
        first, *rest = terms
        return first + "".join(f"{self.pick('&&&;')}{term}" for term in rest)

    # CESQL.

    def expression(self) -> str:
        joint = self.pick([" AND ", " AND ", " OR ", " and ", " XOR "])
        one = self.pick(ATTRIBUTES) if joint == " OR " else None
        return joint.join(self.comparison(one) for _ in range(self.rng.randint(1, 3)))

    def comparison(self, name: str | None = None) -> str:
        name = name or self.pick(ATTRIBUTES)
        roll = self.rng.random()
        if roll < 0.3:
            return f"{name} {self.pick(['=', '!=', '<>', '<'])} {self.text()}"
        if roll < 0.55:
            op = self.pick(["=", "!=", "<", "<=", ">", ">=", "==", "!"])
            return f"{name}{self.pick(['', ' '])}{op}{self.pick(['', ' '])}{self.number()}"
        if roll < 0.7:
            return f"{name} {self.pick(['LIKE', 'like', 'NOT LIKE'])} {self.text()}"
        if roll < 0.85:
            maker = self.pick([self.text, self.number])
            items = ", ".join(maker() for _ in range(self.rng.randint(1, 3)))
            return f"{name} {self.pick(['IN', 'NOT IN'])} ({items})"
        return self.pick(
            [f"EXISTS {name}", name, f"NOT {name}", f"({name} = 1)", f"LENGTH({name}) > 1", "TRUE", f"5 = {name}"]
        )  # fmt: skip

    def text(self) -> str:
        mark = self.pick("'\"")
        return mark + self.pick(TEXTS) + mark

    def number(self) -> str:
        return self.pick(["", "-", "+", "- "]) + str(
            self.pick([0, 1, 5, 7, 2147483646, 2147483647, 2147483648, "007"])
        )

    # Koncorde.

    def koncorde(self, depth: int = 3) -> dict[str, Any]:
        roll = self.rng.random()
        if depth and roll < 0.45:
            inner = [self.koncorde(depth - 1) for _ in range(self.rng.randint(1, 3))]
            if roll < 0.1:
                keys = ("must", "must_not", "should", "should_not")
                names = self.rng.sample(keys, self.rng.randint(1, 2))
                return {
                    "bool": {name: self.pick([inner, [self.koncorde(depth - 1)]]) for name in names}
                }
            return {self.pick(["and", "and", "or"]): inner}
        if depth and roll < 0.55:
            return {"not": self.koncorde(depth - 1)}
        return self.condition()

    def condition(self) -> dict[str, Any]:
        name = self.pick(NAMES)
        keyword = self.pick(
            [
                "equals",
                "equals",
                "range",
                "in",
                "ids",
                "exists",
                "missing",
                "match",
                "regexp",
                "geoDistance",
            ]
        )
        if keyword in ("exists", "missing"):
            field = self.pick(
                [name, name, f'{name}["{self.pick(TEXTS)}"]', f"{name}[5]", f"{name}\\[x\\]"]
            )
            return {keyword: self.pick([field, {"field": field}])}
        if keyword == "ids":
            return {"ids": {"values": [self.pick(TEXTS) for _ in range(2)]}}
        makers: dict[str, Any] = {
            "equals": lambda: self.pick([*TEXTS, *NUMBERS, None]),
            "in": lambda: [self.pick(TEXTS) for _ in range(self.rng.randint(0, 3))],
            "range": lambda: {
                op: self.pick(NUMBERS)
                for op in self.rng.sample(["gt", "gte", "lt", "lte"], self.rng.randint(1, 2))
            },
            "match": lambda: self.pick(
                [
                    {self.pick(TEXTS): self.pick([*TEXTS, *NUMBERS]) for _ in range(2)},
                    [self.pick([*TEXTS, *NUMBERS]) for _ in range(2)],
                    {"x": {"y": 1}}, [], {}, "a", 5, [[1]],
                ]
            ),
            "regexp": lambda: self.pick([self.pick(PATTERNS), {"value": self.pick(PATTERNS), "flags": "i"}]),
            "geoDistance": lambda: {"lat": self.rng.uniform(-95, 95), "lon": 2},
        }  # fmt: skip
        value = {name: makers[keyword]()}
        if keyword == "geoDistance":
            value["distance"] = self.pick(["5km", "1 mile", "x"])
        return {keyword: value}

    # CloudEvents.

    def cloudevents(self, depth: int = 3) -> Any:
        roll = self.rng.random()
        if depth == 3 and roll < 0.1:
            return [self.cloudevents(2) for _ in range(self.rng.randint(0, 2))]
        if depth and roll < 0.4:
            inner = [self.cloudevents(depth - 1) for _ in range(self.rng.randint(1, 3))]
            return {self.pick(["all", "all", "any"]): inner}
        if depth and roll < 0.5:
            return {"not": self.cloudevents(depth - 1)}
        if roll < 0.6:
            return {"sql": self.expression()}
        names = self.rng.sample(ATTRIBUTES, self.rng.randint(1, 2))
        return {self.pick(["exact", "prefix", "suffix"]): {n: self.pick(TEXTS) for n in names}}

    # Damage.

    def damaged(self, text: str) -> str:
        chars = list(text)
        for _ in range(self.rng.randint(1, 2)):
            at = self.rng.randint(0, len(chars))
            chars[at : at + self.rng.randint(0, 1)] = self.pick(
                ["=", "&", ";", "'", '"', "\\", "%", "(", ")", " ", "é", "\0", "?", "-", "!", "AND", "{", "~", "\ud800"]
            )  # fmt: skip
        return "".join(chars)

    def damage(self, value: Any) -> None:
        """Replace, rename or add something inside an object."""
        while True:
            if isinstance(value, dict) and value:
                key = self.pick(list(value))
                roll = self.rng.random()
                if roll < 0.15 or not isinstance(value[key], dict | list):
                    value[key] = self.pick([None, 5, "a", [], {}, {"a": 1}, ["a"], float("nan")])
                    return
                if roll < 0.3:
                    value[self.pick(["and", "x", 5, "sql", "field"])] = copy.deepcopy(value[key])
                    return
                value = value[key]
            elif isinstance(value, list) and value:
                value = value[self.rng.randrange(len(value))]
            else:
                return
