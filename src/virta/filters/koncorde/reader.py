"""
Koncorde's filter language (Kuzzle's real-time filters), as of its version 4.6.

A filter is an object with one keyword; `{}` matches every document. Fields are dotted names in the flattened
document. Messages, keywords and paths of errors are Koncorde's own. So is the meaning, except for Koncorde's
bugs, which docs/filters.md lists.

Negation is pushed down to the conditions while reading, because two of them have a negation of their own:

* `not regexp` tests the text of any value, `regexp` only strings;
* `not geo…` does not hold for a value that exists but is not a point.

A filter is read in one pass, in time linear in its size.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from virta import jsontext
from virta.errors import FilterError
from virta.filters.filter import Filter
from virta.filters.geo import read_point
from virta.filters.koncorde import geo as koncorde_geo
from virta.filters.koncorde.checks import (
    Place,
    check_allowed,
    check_filters,
    check_non_empty_object,
    check_one_field,
    check_properties,
    check_required,
    check_text,
    check_texts,
    is_number,
    script_text,
)
from virta.filters.koncorde.regexp import translate
from virta.filters.limits import CONDITIONS_MAX, DEPTH_MAX, FIELD_CHARS_MAX, TEXT_BYTES_MAX
from virta.filters.text import compiled
from virta.filters.tree import (
    EVERYTHING,
    NOTHING,
    And,
    Condition,
    JsonPattern,
    Node,
    Not,
    Or,
    Regexp,
    Select,
    ValueRange,
    all_of,
    negate,
)
from virta.filters.values import check_pattern_length, field_path

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["convert_distance", "convert_geopoint", "parse"]

convert_distance = koncorde_geo.convert_distance
convert_geopoint = read_point

_ARRAY_VALUE = re.compile(r"(.*?[^\\])\[(.*)\]\Z", re.DOTALL)
_ESCAPED_BRACKET = re.compile(r"\\([\[\]])")


def parse(source: Any, *, conditions_max: int = 0) -> Filter:
    """
    Parse a filter: the object, or its JSON text.

    `conditions_max`, when not 0, is Koncorde's own limit: conditions with every value of an `in` list
    counted. The limits of `virta.filters.limits` apply in any case.
    """
    if isinstance(source, str | bytes | bytearray):
        source = _load_filter(source)
    reader = _Reader()
    tree = reader.read_root(source)
    if reader.late is not None:
        raise reader.take_late()
    if conditions_max and reader.count > conditions_max:
        raise FilterError(
            "Filter too complex: exceeds the configured maximum number of conditions "
            f"(conditions: {reader.count}, max: {conditions_max})",
            code="too_complex",
        )
    return Filter(tree, dialect="koncorde")


def read_condition(keyword: str, value: Any, *, positive: bool) -> Node | None:
    """Return the node of one condition of a filter, or of its negation; None if it is refused."""
    reader = _Reader()
    try:
        node = reader.read({keyword: value}, Place(), positive=positive)
    except FilterError:
        return None
    return node if reader.late is None else None


def read_pattern(pattern: str, flags: str) -> Regexp:
    """Return a JavaScript pattern as one of RE2's; raise FilterError if RE2 does not accept it."""
    check_pattern_length(pattern)
    # RE2 has no other flags; g and y concern repeated searches.
    regexp = Regexp(translate(pattern), "".join(f for f in "ims" if f in flags))
    compiled(regexp)
    return regexp


def _load_filter(text: str | bytes | bytearray) -> Any:
    if len(text) > TEXT_BYTES_MAX:
        raise FilterError(
            f"filter of {len(text)} bytes: at most {TEXT_BYTES_MAX} are allowed", code="too_complex"
        )
    try:
        return jsontext.decode(text)
    except jsontext.JsonDepthError:
        raise FilterError("filter nests too deep to be read as JSON", code="too_complex") from None
    except ValueError as exc:
        raise FilterError(f"filter is not JSON: {exc}", code="json_invalid") from exc


class _Reader:
    """
    Reads one filter.

    `conditions` counts the conditions read; `count` does as Koncorde does, each value of an `in` list.
    `late` is our first error that any error of Koncorde's own takes precedence over.
    """

    def __init__(self) -> None:
        self.conditions = 0
        self.count = 0
        self.late: FilterError | None = None

    def keep_late(self, late: FilterError) -> None:
        """Keep the first error that is raised only if Koncorde itself has none."""
        self.late = self.late or late

    def take_late(self) -> FilterError:
        """Return the late error and drop the reference: its traceback refers to this reader."""
        late, self.late = self.late, None
        assert late is not None
        return late

    def read_root(self, source: Any) -> Node:
        place = Place()
        if isinstance(source, list | str) and source:
            # To Koncorde an array or a string is an object with the members 0, 1, ...
            source = {str(i): item for i, item in enumerate(source[: DEPTH_MAX + 1])}
        if not isinstance(source, dict):
            place.refuse(f"a filter must be an object, got {source!r}")
        return self.read(source, place, positive=True) if source else EVERYTHING

    def read(self, source: dict[str, Any], place: Place, *, positive: bool) -> Node:
        """Return the node of a non-empty filter, or of its negation."""
        if len(source) != 1:
            place.refuse(
                "Invalid filter syntax. Filters must have one keyword only",
                keyword=",".join(map(str, source)),
            )
        ((keyword, value),) = source.items()
        place = place.enter(str(keyword))
        if place.depth > DEPTH_MAX:
            raise FilterError(f"filter nests deeper than {DEPTH_MAX} levels", code="too_complex")
        operand = OPERANDS.get(keyword)
        if operand is not None:
            return operand(self, value, place, positive=positive)
        self.count += 1
        self.conditions += 1
        if self.conditions > CONDITIONS_MAX:
            raise FilterError(
                f"filter has more than {CONDITIONS_MAX} conditions", code="too_complex"
            )
        if keyword in koncorde_geo.READERS:
            return self.read_geo(value, place, positive=positive)
        if keyword == "regexp":
            return _read_regexp(value, place, positive=positive)
        leaf = LEAVES.get(keyword)
        if leaf is None:
            place.refuse("unknown keyword")
        node = leaf(self, value, place)
        return node if positive else negate(node)

    # Operands.

    def read_all(self, value: Any, place: Place, *, positive: bool) -> Node:
        children = [self.read(c, place, positive=positive) for c in check_filters(value, place)]
        return _combine(children, conjunction=positive)

    def read_any(self, value: Any, place: Place, *, positive: bool) -> Node:
        children = [self.read(c, place, positive=positive) for c in check_filters(value, place)]
        return _combine(children, conjunction=not positive)

    def read_not(self, value: Any, place: Place, *, positive: bool) -> Node:
        return self.read(check_properties(value, place, 1), place, positive=not positive)

    def read_bool(self, value: Any, place: Place, *, positive: bool) -> Node:
        members = check_non_empty_object(value, place)
        check_allowed(members, place, ("must", "must_not", "should", "should_not"))
        # Only null, false, 0 and "" are as if absent: an empty array or object is true to JavaScript.
        must = members["must"] if _is_given(members.get("must")) else []
        rewritten: list[Any] = [*must] if isinstance(must, list) else [must]
        if _is_given(members.get("must_not")):
            rewritten.append({"not": {"or": members["must_not"]}})
        if _is_given(members.get("should")):
            rewritten.append({"or": members["should"]})
        if _is_given(members.get("should_not")):
            rewritten.append({"not": {"and": members["should_not"]}})
        return self.read_all(rewritten, place.enter("and"), positive=positive)

    def read_geo(self, value: Any, place: Place, *, positive: bool) -> Node:
        try:
            name, op, shape = koncorde_geo.READERS[place.name](value, place)
        except FilterError as exc:
            if exc.code != koncorde_geo.LATE:
                raise
            self.keep_late(exc)
            return NOTHING
        inside = Condition(field_path(name), op, shape)
        if positive:
            return inside
        return And((Not(inside), Not(Condition(field_path(name), "geo_junk"))))

    # Conditions whose negation is their complement.

    def read_equals(self, value: Any, place: Place) -> Node:
        name, expected = check_one_field(value, place)
        if isinstance(expected, dict | list):
            place.at(name).refuse("must either be a string, a number, a boolean, or null")
        return Condition(field_path(name), "eq", expected)

    def read_in(self, value: Any, place: Place) -> Node:
        name, values = check_one_field(value, place)
        return self._one_of(name, check_texts(values, place.at(name)))

    def read_ids(self, value: Any, place: Place) -> Node:
        values = check_properties(value, place, 1, ("values",))["values"]
        return self._one_of("_id", check_texts(values, place.at("values")))

    def _one_of(self, name: str, values: list[str]) -> Node:
        self.count += len(values) - 1
        return Condition(field_path(name), "in", values)

    def read_exists(self, value: Any, place: Place) -> Node:
        if isinstance(value, str):
            if not value:
                place.refuse("cannot test empty field name")
            text = value
        else:
            members = check_properties(value, place, 1, ("field",))
            place = place.at("field")
            text = check_text(members["field"], place)
        if len(text) > FIELD_CHARS_MAX:
            place.refuse(
                f"is {len(text)} characters long: at most {FIELD_CHARS_MAX} are allowed",
                code="too_complex",
            )
        found = _ARRAY_VALUE.match(text)
        if found is None:
            return Condition(field_path(_ESCAPED_BRACKET.sub(r"\1", text)), "exists")
        field, raw = found.groups()
        try:
            element = jsontext.decode(raw)
        except ValueError:
            place.refuse(f'contains an invalid array value ("{raw}")')
        if isinstance(element, dict | list):
            return NOTHING  # only scalars are ever found in an array
        return Condition(field_path(_ESCAPED_BRACKET.sub(r"\1", field)), "contains", element)

    def read_missing(self, value: Any, place: Place) -> Node:
        return negate(self.read_exists(value, place))

    def read_range(self, value: Any, place: Place) -> Node:
        name, bounds = check_one_field(value, place)
        place = place.at(name)
        check_allowed(check_non_empty_object(bounds, place), place, ("gt", "gte", "lt", "lte"))
        found: dict[str, Any] = {}
        for key, bound in bounds.items():
            if not is_number(bound):
                place.at(key).refuse("must be a number")
            side = "lower" if key.startswith("g") else "upper"
            if side in found:
                place.refuse(f"only 1 {side} boundary allowed")
            found[side] = bound
            found[f"{side}_open"] = not key.endswith("e")
        if "lower" in found and "upper" in found and not found["lower"] < found["upper"]:
            place.refuse("lower boundary must be strictly inferior to the upper one")
        return Condition(field_path(name), "range", ValueRange(**found))

    def read_match(self, value: Any, place: Place) -> Node:
        members = check_non_empty_object(value, place)
        return all_of(
            Condition(field_path(name), "match", JsonPattern.of(pattern))
            if isinstance(pattern, dict | list)
            else Condition(field_path(name), "eq", pattern)
            for name, pattern in members.items()
        )

    def read_select(self, value: Any, place: Place) -> Node:
        members = check_properties(value, place, 3)
        name = check_text(members.get("field"), place.at("field"))
        index: Any = members.get("index")
        if not is_number(index):
            place.at("index").refuse("must be an integer")
        if index != index // 1:
            place.at("index").refuse("cannot have decimals, must be an integer")
        query = check_non_empty_object(members.get("query"), place.at("query"))
        # The query counts by itself: to Koncorde it is a filter in a filter.
        reader = _Reader()
        tree = reader.read(query, place.at("query"), positive=True)
        if reader.late is not None:
            self.keep_late(reader.take_late())  # no variable here: the traceback refers to it
        return Condition(field_path(name), "select", Select(int(index), tree))

    def read_nothing(self, value: Any, place: Place) -> Node:
        del value, place  # `nothing` takes any argument
        return NOTHING


def _is_given(value: Any) -> bool:
    return isinstance(value, dict | list) or bool(value)


def _combine(children: list[Node], *, conjunction: bool) -> Node:
    if len(children) == 1:
        return children[0]
    return And(tuple(children)) if conjunction else Or(tuple(children))


def _read_regexp(value: Any, place: Place, *, positive: bool) -> Node:
    name, given = check_one_field(value, place)
    place = place.at(name)
    pattern, flags = given, None
    if not isinstance(given, str):
        if not isinstance(given, dict):
            place.refuse("must be either a string or a non-empty object")
        members = check_non_empty_object(given, place)
        check_required(members, place, ("value",))
        check_allowed(members, place, ("flags", "value"))
        pattern, flags = members["value"], members.get("flags")
        if _is_given(flags) and not isinstance(flags, str):
            place.at("flags").refuse("must be a string")
    try:
        if not isinstance(pattern, str):
            raise FilterError("expected a string", code="regexp_invalid")  # noqa: TRY301
        regexp = read_pattern(pattern, flags or "")
    except FilterError as exc:
        if exc.code != "regexp_invalid":
            raise
        shown = f"/{script_text(pattern)}/{flags or 'undefined'}"
        place.refuse(f'cannot parse regexp expression "{shown}" ({exc.message})', code=exc.code)
    if positive:
        return Condition(field_path(name), "regexp", regexp)
    return Not(Condition(field_path(name), "regexp_text", regexp))


OPERANDS: dict[str, Callable[..., Node]] = {
    "and": _Reader.read_all,
    "or": _Reader.read_any,
    "not": _Reader.read_not,
    "bool": _Reader.read_bool,
}

LEAVES: dict[str, Callable[[_Reader, Any, Place], Node]] = {
    "equals": _Reader.read_equals,
    "in": _Reader.read_in,
    "ids": _Reader.read_ids,
    "exists": _Reader.read_exists,
    "missing": _Reader.read_missing,
    "range": _Reader.read_range,
    "match": _Reader.read_match,
    "select": _Reader.read_select,
    "nothing": _Reader.read_nothing,
}
