"""
Translate JavaScript patterns to RE2's syntax.

Koncorde runs patterns on RE2 after a light translation: `\\uXXXX` and `\\u{X}`, control characters `\\cX`, and
named groups `(?<name>`. What RE2 does not support (look-around, back-references) is left unchanged, and RE2
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
    """Return the pattern in RE2's syntax."""
    return _TOKEN.sub(_translate_token, pattern)


def _translate_token(token: re.Match[str]) -> str:
    if token["control"] is not None:
        return f"\\x{ord(token['control']) % 32:02x}"
    if token["hex"] is not None:
        return f"\\x{{{token['hex']}}}"
    if token["braced"] is not None:
        return "\\x"
    return "(?P<" if token["named"] is not None else token[0]
