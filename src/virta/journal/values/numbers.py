"""
Numbers inside values: the only data that the journal reads (ADD, NOT, TRUNCATE).

Integers are two's complement big-endian in 1, 2, 4 or 8 bytes, floats IEEE 754 big-endian in 4 or 8,
a boolean is one byte 0 or 1. A result keeps the type and width of what was stored.
"""

from __future__ import annotations

import math
import struct

from virta.journal.protocol.messages import VALUE_DATA_BYTES_MAX, RefusedError, Type, Value

_INTEGER_SIZES = (1, 2, 4, 8)
_FLOATS = {4: struct.Struct(">f"), 8: struct.Struct(">d")}


def integer_of(value: Value) -> int:
    if value.type != Type.INTEGER or len(value.data) not in _INTEGER_SIZES:
        raise RefusedError(
            "type-mismatch", f"{_name(value)} is not an integer of 1, 2, 4 or 8 bytes"
        )
    return int.from_bytes(value.data, "big", signed=True)


def added(stored: Value | None, amount: Value) -> Value:
    """Return the sum; nothing stored counts as 0 of the amount's type and width."""
    if stored is not None and stored.type != amount.type:
        raise RefusedError("type-mismatch", f"adding {_name(amount)} to {_name(stored)}")
    if amount.type == Type.INTEGER:
        return _added_integer(stored, amount)
    if amount.type == Type.FLOAT:
        return _added_float(stored, amount)
    raise RefusedError("type-mismatch", f"{_name(amount)} is neither integer nor float")


def inverted(stored: Value) -> Value:
    if stored.type != Type.BOOLEAN or stored.data not in (b"\0", b"\1"):
        raise RefusedError("type-mismatch", f"{_name(stored)} is not a boolean of one byte 0 or 1")
    return Value(Type.BOOLEAN, b"\1" if stored.data == b"\0" else b"\0")


def truncated(stored: Value, size: int) -> Value:
    """Return the value cut to `size` bytes, or filled with zeros up to it."""
    if stored.type not in (Type.BUFFER, Type.STRING):
        raise RefusedError("type-mismatch", f"{_name(stored)} is neither buffer nor string")
    if size < 0:
        raise RefusedError("type-mismatch", f"size {size} is negative")
    if size > VALUE_DATA_BYTES_MAX:
        raise RefusedError("too-large", f"size {size} is over {VALUE_DATA_BYTES_MAX}")
    return Value(stored.type, stored.data[:size].ljust(size, b"\0"))


def _added_integer(stored: Value | None, amount: Value) -> Value:
    width = len(amount.data if stored is None else stored.data)
    total = integer_of(amount) + (0 if stored is None else integer_of(stored))
    try:
        return Value(Type.INTEGER, total.to_bytes(width, "big", signed=True))
    except OverflowError:
        raise RefusedError("overflow", f"{total} does not fit {width} bytes") from None


def _added_float(stored: Value | None, amount: Value) -> Value:
    terms = [amount] if stored is None else [stored, amount]
    numbers = []
    for term in terms:
        if len(term.data) not in _FLOATS:
            raise RefusedError("type-mismatch", f"{_name(term)} is not a float of 4 or 8 bytes")
        numbers.append(_FLOATS[len(term.data)].unpack(term.data)[0])
    total = sum(numbers)
    form = _FLOATS[len(terms[0].data)]
    if math.isinf(total) and not any(map(math.isinf, numbers)):
        raise RefusedError("overflow", f"the sum does not fit {form.size} bytes")
    try:
        return Value(Type.FLOAT, form.pack(total))
    except OverflowError:
        raise RefusedError("overflow", f"{total} does not fit {form.size} bytes") from None


def _name(value: Value) -> str:
    return f"{Type(value.type).name.lower()} of {len(value.data)} bytes"
