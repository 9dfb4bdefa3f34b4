"""
Compile a filter from its source: two engines behind `compile_source`.

The plain engine parses, canonicalises and encodes. The native one (native/match_source.hpp) does all of it at once for
the common forms of each dialect and returns nothing for the rest, which goes to the plain engine; so do errors. Both give
the same canonical text, id and program. How paths are spelled is asked here by the native engine, once a name.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from virta import jsontext
from virta.errors import FilterError
from virta.filters import parse
from virta.filters.canonical import canonical_form, digest, path_json, value_text
from virta.filters.limits import TEXT_BYTES_MAX
from virta.filters.tree import Condition, Not
from virta.filters.values import field_path
from virta.match.compile.compiled import Compiled, compile_filter
from virta.match.compile.program import encode_literal, encode_path
from virta.native import load

if TYPE_CHECKING:
    from virta.filters.canonical import Conjunction
    from virta.filters.tree import Path
    from virta.match import _core

# Dialects whose source is an object, or the JSON text of one.
_OBJECTS = frozenset({"koncorde", "cloudevents"})

# Conditions of Koncorde's that the native engine takes ready made.
_LEAVES = frozenset(
    {"regexp", "match", "geoDistance", "geoDistanceRange", "geoBoundingBox", "geoPolygon"}
)

_JOINED = frozenset({"exists", "eq", "in", "range", "negative_zero", "opaque"})

_ATTRIBUTE = re.compile(r"[a-z0-9]+")


class SourceCompiled(Compiled):
    """A filter that was compiled from its source; its conjunctions are read from the canonical text when needed."""

    tree = None

    def __init__(self, canonical: str, program: bytes) -> None:
        # The fields of a frozen dataclass are set one by one otherwise, which takes as long as the hash.
        fields = self.__dict__
        fields["id"] = digest(canonical)
        fields["canonical"] = canonical
        fields["encoded"] = (program, ())

    @cached_property
    def conjunctions(self) -> tuple[Conjunction, ...]:
        from virta.match.saved import read_filter  # noqa: PLC0415 - the native index needs none

        return compile_filter(read_filter(self.canonical)).conjunctions

    def __getstate__(self) -> dict[str, Any]:
        return {"id": self.id, "canonical": self.canonical, "encoded": self.encoded}


def compile_source(source: Any, dialect: str = "query-string", *, engine: str = "auto") -> Compiled:
    """
    Compile the text or object of a dialect; `engine` is auto or plain.

    Raises:
        FilterError: as `virta.filters.parse` does.
    """
    sources = _sources() if engine != "plain" else None
    if sources is not None:
        given = source
        if dialect in _OBJECTS and source.__class__ in (str, bytes):
            given = _decoded(source)
        found = sources.compile(dialect, given)
        if found is not None:
            return SourceCompiled(*found)
    return compile_filter(parse(source, dialect))


@lru_cache(maxsize=1)
def _sources() -> _core.Sources | None:
    core = load("virta.match._core")
    return None if core is None else core.Sources(_spelled, _pattern, _leaf)


def _decoded(text: str | bytes) -> Any:
    """Return the JSON of a text, None for the plain engine to say what is wrong with it."""
    if len(text) > TEXT_BYTES_MAX:
        return None
    try:
        return jsontext.decode(text)
    except (ValueError, jsontext.JsonDepthError):
        return None


# What the native engine asks.


def _spelled(kind: str, name: str) -> tuple[str, bytes] | None:
    """Return a path in a canonical text and in a program; None if it is refused, or the core has none such."""
    path = _path(kind, name)
    code = None if path is None else encode_path(path)
    return None if path is None or code is None else (path_json(path), code)


def _path(kind: str, name: str) -> Path | None:
    if kind == "q":
        from virta.filters.query_string import plain_key_path  # noqa: PLC0415 - dialects are loaded when used

        return plain_key_path(name)
    if kind == "f":
        try:
            return field_path(name)
        except FilterError:
            return None
    from virta.filters.cesql.attributes import integer_path, text_path  # noqa: PLC0415
    from virta.filters.cesql.values import DATA_MEMBERS  # noqa: PLC0415

    if name in DATA_MEMBERS or _ATTRIBUTE.fullmatch(name) is None:
        return None
    return (name,) if kind == "a" else text_path(name) if kind == "t" else integer_path(name)


def _pattern(pattern: str, flags: str) -> tuple[str, int, bytes] | None:
    """Return a regular expression of Koncorde's in a canonical text and in a program; None if it is refused."""
    from virta.filters.koncorde.reader import read_pattern  # noqa: PLC0415

    try:
        regexp = read_pattern(pattern, flags)
    except FilterError:
        return None
    literals = encode_literal(Condition((), "regexp", regexp))
    assert literals is not None
    literal = literals[0]
    # What stands before the operand: the operation, the length of the path, and the path of the root.
    return value_text(regexp), literal[0], literal[6:]


def _leaf(keyword: str, value: Any, positive: bool) -> tuple[str, str, bytes, int] | None:  # noqa: FBT001 - called from C
    """Return a condition of Koncorde's: its path, its text, its literals and their number."""
    from virta.filters.koncorde.reader import read_condition  # noqa: PLC0415

    if keyword not in _LEAVES:
        return None
    node = read_condition(keyword, value, positive=positive)
    form = None if node is None else canonical_form(node)
    condition = None if form is None else form.node
    if isinstance(condition, Not):
        condition = None if positive else condition.child
    elif not positive:
        return None
    # Conditions on one path are joined by their operation, so those that can be must not come from here.
    if form is None or not isinstance(condition, Condition) or condition.op in _JOINED:
        return None
    assert isinstance(form.node, Condition | Not)
    literals = encode_literal(form.node)
    return None if literals is None else (form.path, form.text, b"".join(literals), len(literals))
