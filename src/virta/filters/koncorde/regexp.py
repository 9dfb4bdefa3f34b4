"""
JavaScript's way of writing patterns, put into RE2's.

Koncorde runs patterns on RE2 after a light translation: `\\uXXXX` and `\\u{X}`, control characters `\\cX`, and
named groups `(?<name>`. What RE2 has no word for (look-around, back-references) stays as it is, and RE2
refuses it.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"\\c(?P<control>[A-Za-z])"
    r"|\\u(?P<hex>[0-9A-Fa-f]{1,4})"
    r"|\\u(?=\{)(?P<braced>)"
    r"|\\(?P<escaped>.)"
    r"|\(\?<(?![=!])(?P<named>)",
    re.DOTALL,
)


def translate(pattern: str) -> str:
    """The pattern as RE2 understands it."""
    return _TOKEN.sub(_translate_token, pattern)


def _translate_token(token: re.Match[str]) -> str:
    if token["control"] is not None:
        return f"\\x{ord(token['control']) % 32:02x}"
    if token["hex"] is not None:
        return f"\\x{{{token['hex']}}}"
    if token["braced"] is not None:
        return "\\x"
    return "(?P<" if token["named"] is not None else token[0]
