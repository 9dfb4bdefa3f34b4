"""Random CESQL expressions and events for them: every operator and function, over values that casts accept or refuse."""

from __future__ import annotations

import random
from typing import Any

ATTRIBUTES = ["a", "b", "c", "type", "subject", "data"]
TEXTS = [
    "",
    "a",
    "ab",
    "abc",
    "ABC",
    " a ",
    "5",
    "05",
    "+7",
    "-3",
    "true",
    "FALSE",
    "1.5",
    "9999999999",
]
TEXTS += ["zoé", "ÀB", "ß", "a%b", "a_b", "\u2003x\u2003", "2024-01-01", "{}", "x.v1"]
INTEGERS = [0, 1, -1, 2, 3, 5, 7, 10, 100, 2147483647, -2147483648, 2147483646]
PATTERNS = [
    "%",
    "a%",
    "%b",
    "%b%",
    "a%c",
    "_",
    "_b%",
    "%_",
    "a\\%b",
    "%5",
    "%1",
    "a_c",
    "%a%b%",
    "",
]
ODD = [None, 1.5, 2.0, -0.0, 1e21, 2**31, -(2**40), 10**30, [1, "a"], {"x": 1}, [], "\ud800"]
COMPARISONS = ["=", "!=", "<>", "<", "<=", ">", ">="]
FUNCTIONS = [
    ("ABS", "i"), ("BOOL", "x"), ("CONCAT", "ss"), ("CONCAT", "sss"), ("CONCAT_WS", "sss"), ("INT", "x"),
    ("IS_BOOL", "x"), ("IS_INT", "x"), ("LEFT", "si"), ("LENGTH", "s"), ("LOWER", "s"), ("RIGHT", "si"),
    ("STRING", "x"), ("SUBSTRING", "si"), ("SUBSTRING", "sii"), ("TRIM", "s"), ("UPPER", "s"), ("NOPE", "x"),
]  # fmt: skip


class CesqlRandoms:
    """A source of random expressions; equal seeds give equal ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pick = self.rng.choice

    def literal(self) -> str:
        roll = self.rng.random()
        if roll < 0.45:
            return str(self.pick(INTEGERS))
        if roll < 0.55:
            return self.pick(["TRUE", "FALSE"])
        text = self.pick(TEXTS).replace("\\", "\\\\").replace("'", "\\'")
        return f"'{text}'"

    def value(self, depth: int) -> str:
        """An operand of any type."""
        roll = self.rng.random()
        if depth <= 0 or roll < 0.45:
            return self.pick(ATTRIBUTES) if self.rng.random() < 0.65 else self.literal()
        if roll < 0.65:
            name, kinds = self.pick(FUNCTIONS)
            arguments = [
                str(self.pick([0, 1, 2, 3, -1])) if kind == "i" and self.rng.random() < 0.7
                else self.value(depth - 1)
                for kind in kinds
            ]  # fmt: skip
            return f"{name}({', '.join(arguments)})"
        if roll < 0.85:
            op = self.pick("+-*/%")
            return f"({self.value(depth - 1)} {op} {self.value(depth - 1)})"
        if roll < 0.9:
            return f"-({self.value(depth - 1)})"
        return f"({self.boolean(depth - 1)})"

    def boolean(self, depth: int) -> str:
        roll = self.rng.random()
        if depth <= 0 or roll < 0.45:
            left, right = self.value(depth - 1), self.value(depth - 2)
            return f"{left} {self.pick(COMPARISONS)} {right}"
        if roll < 0.52:
            return f"EXISTS {self.pick(ATTRIBUTES)}"
        if roll < 0.62:
            negated = self.pick(["", "", "NOT "])
            return f"{self.value(depth - 1)} {negated}LIKE '{self.pick(PATTERNS)}'"
        if roll < 0.72:
            items = ", ".join(self.literal() for _ in range(self.rng.randint(1, 4)))
            if self.rng.random() < 0.2:
                items += f", {self.value(depth - 1)}"
            return f"{self.value(depth - 1)} {self.pick(['', 'NOT '])}IN ({items})"
        if roll < 0.78:
            return f"NOT ({self.boolean(depth - 1)})"
        if roll < 0.81:
            return f"NOT {self.value(0)}"
        op = f" {self.pick(['AND', 'OR', 'XOR'])} "
        parts = [
            self.pick(ATTRIBUTES) if self.rng.random() < 0.1 else f"({self.boolean(depth - 1)})"
            for _ in range(self.rng.randint(2, 3))
        ]
        return op.join(parts)

    def expression(self) -> str:
        return self.boolean(self.rng.randint(0, 3)) if self.rng.random() < 0.97 else self.value(2)

    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = {"type": self.pick(TEXTS), "data": self.pick([5, "a", {"a": 1}])}
        for name in ATTRIBUTES[:5]:
            roll = self.rng.random()
            if roll < 0.3:
                event[name] = self.pick(INTEGERS)
            elif roll < 0.65:
                event[name] = self.pick(TEXTS)
            elif roll < 0.75:
                event[name] = self.pick([True, False])
            elif roll < 0.85:
                event[name] = self.pick(ODD)
        return event
