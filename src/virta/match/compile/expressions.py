"""
CESQL expressions as programs for the native index; native/match_expression.hpp documents the format.

Every expression of the language has a program, but for those that need a larger stack or more attributes than the
core allows: conditions on them are evaluated in Python.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from virta.filters.cesql import functions, syntax
from virta.filters.cesql.values import DATA_MEMBERS, REQUIRED_ATTRIBUTES
from virta.filters.text import Segment, segments

if TYPE_CHECKING:
    from virta.filters.cesql.computed import CesqlExpression

(
    INTEGER, TEXT, BOOLEAN, ATTRIBUTE, EXISTS, NOT, NEGATIVE, AND_ELSE, OR_ELSE, TO_BOOLEAN, XOR, EQUALS, DIFFERS,
    LESS, LESS_OR_EQUAL, MORE, MORE_OR_EQUAL, ADD, SUBTRACT, MULTIPLY, DIVIDE, MODULO, LIKE, IN, IN_END, CALL, FAIL,
) = range(1, 28)  # fmt: skip

OPERATORS = {
    "XOR": XOR, "=": EQUALS, "!=": DIFFERS, "<": LESS, "<=": LESS_OR_EQUAL, ">": MORE, ">=": MORE_OR_EQUAL,
    "+": ADD, "-": SUBTRACT, "*": MULTIPLY, "/": DIVIDE, "%": MODULO,
}  # fmt: skip
FUNCTIONS = {name: number for number, name in enumerate(sorted(functions.FUNCTIONS))}

# The limits of the core: native/match_expression.hpp.
STACK_MAX = 1024
INPUTS_MAX = 255
NO_TRIGGER = 2**32 - 1

_NUMBER = struct.Struct("<I")
_SIGNED = struct.Struct("<i")
_COUNT = struct.Struct("<H")


def encode_computed(step: CesqlExpression) -> bytes | None:
    """Return the encoded path of an expression, None if the core cannot run it."""
    writer = _ExpressionWriter(step)
    writer.emit(step.expression)
    if writer.deepest > STACK_MAX or len(writer.inputs) > INPUTS_MAX:
        return None
    required = [writer.inputs[name] for name in step.required if name in writer.inputs]
    inputs = [
        _with_length(b"EN" + _with_length(name.encode("utf-8", "surrogatepass")))
        for name in writer.inputs
    ]
    trigger = _NUMBER.pack(required[0] if required else NO_TRIGGER)
    return b"".join([b"C", trigger, _NUMBER.pack(len(inputs)), *inputs, writer.code])


def like_code(pattern: str) -> bytes:
    """Return a LIKE pattern for the core."""
    cut = segments(pattern)
    return b"".join([_NUMBER.pack(len(cut)), *(_with_length(_segment(part)) for part in cut)])


def _segment(segment: Segment) -> bytes:
    return b"".join(
        b"\xff" if char is None else char.encode("utf-8", "surrogatepass") for char in segment
    )


def _with_length(data: bytes) -> bytes:
    return _NUMBER.pack(len(data)) + data


class _ExpressionWriter:
    """Writes the code of one expression, and measures the stack it needs."""

    def __init__(self, step: CesqlExpression) -> None:
        self.code = bytearray()
        self.inputs: dict[str, int] = {}
        self.depth = 0
        self.deepest = 0
        for name in step.names:
            if name not in DATA_MEMBERS:
                self.inputs[name] = len(self.inputs)

    def emit(self, node: syntax.Expression) -> None:
        """Write code that leaves the value of an expression on the stack."""
        match node:
            case syntax.Literal(value):
                self._literal(value)
            case syntax.Attribute(name):
                known = name not in DATA_MEMBERS
                self._push(bytes([ATTRIBUTE, self.inputs[name] & 255]) if known else bytes([FAIL]))
            case syntax.Exists(name):
                if name in REQUIRED_ATTRIBUTES or name in DATA_MEMBERS:
                    self._push(bytes([BOOLEAN, name in REQUIRED_ATTRIBUTES]))
                else:
                    self._push(bytes([EXISTS, self.inputs[name] & 255]))
            case syntax.Unary(op, operand):
                self.emit(operand)
                self.code.append(NOT if op == "NOT" else NEGATIVE)
            case syntax.Chain(first, rest):
                self.emit(first)
                for op, operand in rest:
                    self._operator(op, operand)
            case syntax.Like(operand, pattern, negated):
                self.emit(operand)
                self.code += bytes([LIKE, negated]) + _with_length(like_code(pattern))
            case syntax.In(operand, items, negated):
                self._in(operand, items, negated=negated)
            case syntax.Call(name, arguments):
                self._call(name, arguments)

    def _push(self, code: bytes) -> None:
        self.code += code
        self.depth += 1
        self.deepest = max(self.deepest, self.depth)

    def _literal(self, value: bool | int | str) -> None:  # noqa: FBT001 - the value itself
        if isinstance(value, str):
            self._push(bytes([TEXT]) + _with_length(value.encode("utf-8", "surrogatepass")))
        elif isinstance(value, bool):
            self._push(bytes([BOOLEAN, value]))
        else:
            self._push(bytes([INTEGER]) + _SIGNED.pack(value))

    def _operator(self, op: str, operand: syntax.Expression) -> None:
        if op in OPERATORS:
            self.emit(operand)
            self.code.append(OPERATORS[op])
            self.depth -= 1
            return
        self.code.append(AND_ELSE if op == "AND" else OR_ELSE)
        jump = self._jump()
        self.depth -= 1
        self.emit(operand)
        self.code.append(TO_BOOLEAN)
        self._land([jump])

    def _in(
        self, operand: syntax.Expression, items: tuple[syntax.Expression, ...], *, negated: bool
    ) -> None:
        self.emit(operand)
        jumps = []
        for item in items:
            self.emit(item)
            self.code += bytes([IN, negated])
            jumps.append(self._jump())
            self.depth -= 1
        self.code += bytes([IN_END, negated])
        self._land(jumps)

    def _call(self, name: str, arguments: tuple[syntax.Expression, ...]) -> None:
        if functions.find(name, len(arguments)) is None:
            self._push(bytes([FAIL]))
            return
        for argument in arguments:
            self.emit(argument)
        if len(arguments) > STACK_MAX:
            self.deepest = len(arguments)
            return
        self.depth -= len(arguments)
        self._push(bytes([CALL, FUNCTIONS[name]]) + _COUNT.pack(len(arguments)))

    def _jump(self) -> int:
        self.code += bytes(_NUMBER.size)
        return len(self.code) - _NUMBER.size

    def _land(self, jumps: list[int]) -> None:
        for jump in jumps:
            _NUMBER.pack_into(self.code, jump, len(self.code))
