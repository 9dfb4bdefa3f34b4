"""Regular expressions that need no automaton: anchored literals."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from virta.filters.values import Regexp

# Of a pattern that is taken as plain text: an event is looked up under each length in use.
PLAIN_CHARS_MAX = 32

# Text between anchors, without whatever RE2 may read as more than itself. U+FFFD is left out because it also
# stands for lone surrogates of the value.
_PLAIN = re.compile(
    rf"(\^?)([^\\.+*?()|\[\]{{}}^$\ufffd\ud800-\udfff]{{1,{PLAIN_CHARS_MAX}}})(\$?)"
)


def plain_condition(regexp: Regexp) -> tuple[str, str] | None:
    """Return the operation (prefix, suffix, eq) and text equivalent to an anchored literal, else None."""
    plain = _PLAIN.fullmatch(regexp.pattern) if regexp.flags in ("", "s") else None
    if plain is None:
        return None
    start, text, end = plain.groups()
    if start:
        return ("eq" if end else "prefix", text)
    return ("suffix", text) if end else None
