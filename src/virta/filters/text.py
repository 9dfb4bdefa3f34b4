"""
Text of JSON values and regular expressions over it.

Patterns run on RE2, whose time is linear in the text for every pattern; users' patterns never run on Python's
backtracking `re`. RE2 comes with the extra `match`; only filters with a regular expression need it.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

from virta.errors import FilterError
from virta.filters.limits import REGEXP_MEMORY_MAX
from virta.filters.values import Regexp, number

COMPILED_MAX = 8192  # cached compiled patterns of a few kilobytes each
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def search(regexp: Regexp, text: str) -> bool:
    """Return whether the pattern is found anywhere in the text."""
    try:
        return compiled(regexp).search(text) is not None
    except UnicodeEncodeError:
        return compiled(regexp).search(well_formed(text)) is not None


@lru_cache(maxsize=COMPILED_MAX)
def compiled(regexp: Regexp) -> Any:
    """Return the RE2 program; raise FilterError with RE2's message if the pattern is invalid."""
    try:
        import re2  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra; only filters with patterns need it
    except ImportError as exc:
        raise FilterError(
            "this filter holds a regular expression, which needs google-re2: pip install virta[match]",
            code="regexp_engine_missing",
        ) from exc
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = REGEXP_MEMORY_MAX
    options.case_sensitive = "i" not in regexp.flags
    options.dot_nl = "s" in regexp.flags
    pattern = well_formed(regexp.pattern)
    try:
        # RE2's option for this flag works only in POSIX syntax.
        return re2.compile(f"(?m){pattern}" if "m" in regexp.flags else pattern, options)
    except re2.error as exc:
        reason = exc.args[0] if exc.args else str(exc)
        if isinstance(reason, bytes):
            reason = reason.decode("utf-8", "replace")
        raise FilterError(str(reason), code="regexp_invalid") from exc


def well_formed(text: str) -> str:
    """Return the text with U+FFFD for each lone surrogate, which UTF-8 cannot encode."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def text_of(value: Any) -> str:
    """Return a JSON value as text, as JavaScript's String() does."""
    if isinstance(value, list | tuple):
        return ",".join(_leaves(value))
    return "null" if value is None else _text_of_one(value)


def _leaves(array: Any) -> list[str]:
    """
    Return the texts between the commas: nested arrays join with commas too, null and [] are empty.

    Not recursive: documents may nest deeper than Python's stack.
    """
    texts: list[str] = []
    stack = [iter(array)] if array else []
    if not array:
        return [""]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list | tuple) and item:
                stack.append(iter(item))
                break
            texts.append(
                "" if item is None or isinstance(item, list | tuple) else _text_of_one(item)
            )
        else:
            stack.pop()
    return texts


def _text_of_one(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return number_text(value)
    return "[object Object]"


def number_text(value: float) -> str:
    """Return a number as JavaScript writes it: shortest digits, exponent from 1e21 up and below 1e-6."""
    value = number(value)
    if isinstance(value, int):
        return str(value)
    if math.isnan(value) or math.isinf(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    sign = "-" if value < 0 else ""
    mantissa, _, exponent = f"{abs(value)!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    # `point` is where the decimal point stands, counted from the first significant digit.
    point = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    if len(digits) <= point <= 21:
        return sign + digits + "0" * (point - len(digits))
    if 0 < point <= 21:
        return sign + digits[:point] + "." + digits[point:]
    if -6 < point <= 0:
        return sign + "0." + "0" * -point + digits
    power = point - 1
    tail = "." + digits[1:] if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{tail}e{'+' if power > 0 else '-'}{abs(power)}"
