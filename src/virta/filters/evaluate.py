"""
The reference evaluator of filter trees; the engines of `virta.match` must agree with it.

`holds(tree, obj)` walks the tree once, independently of dialects; each line of the table in
`virta.filters.tree` is one small function here. Any Python value can be the object: it is never modified and
never causes an exception, and a value without a JSON type satisfies only `exists`. Recursion follows the tree,
whose depth is bounded; documents may nest arbitrarily.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

from virta.filters.geo import in_annulus, in_box, in_circle, in_polygon, read_point
from virta.filters.text import like, search, text_of
from virta.filters.tree import And, Computed, Condition, Everything, Flat, Node, Not, Or
from virta.filters.values import INTEGER_EXACT_MAX, number, scalar_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from virta.filters.values import Path, Scalar, ValueRange


class _Missing:
    """The value of a path that leads nowhere."""

    def __repr__(self) -> str:
        return "missing"


MISSING: Final = _Missing()

_COMPOUND: Final = frozenset({dict, list, tuple})
_SCALAR: Final = frozenset({str, int, float, bool, type(None), _Missing})

# Scalars of one object or array of a pattern whose frequency is counted.
INDEXED_SCALARS_MAX = 4

# `in` lists longer than this are searched by bisection, not scanned.
SEARCHED_MIN = 8


def holds(node: Node, obj: Any) -> bool:
    """Return whether the tree holds for the object."""
    if isinstance(node, Condition):
        return condition_holds(node, obj)
    if isinstance(node, And):
        return all(holds(child, obj) for child in node.children)
    if isinstance(node, Or):
        return any(holds(child, obj) for child in node.children)
    if isinstance(node, Not):
        return not holds(node.child, obj)
    return isinstance(node, Everything)


def condition_holds(condition: Condition, obj: Any) -> bool:
    """Return whether one condition holds for the object."""
    value = resolve(obj, condition.path)
    return value is not MISSING and TESTS[condition.op](condition.value, value)


# Paths.


def resolve(obj: Any, path: Path) -> Any:
    """Return the value at a path, or MISSING."""
    for step in path:
        if isinstance(step, str):
            obj = obj.get(step, MISSING) if isinstance(obj, dict) else MISSING
        elif isinstance(step, Flat):
            obj = flat_member(obj, step.name)
        elif isinstance(step, Computed):
            value = step.compute(obj)
            obj = MISSING if value is None else value
        elif isinstance(obj, dict):
            obj = obj.get(str(step), MISSING)
        elif isinstance(obj, list | tuple) and 0 <= step < len(obj):
            obj = obj[step]
        else:
            return MISSING
        if obj is MISSING:
            return MISSING
    return obj


def flat_member(root: Any, name: str) -> Any:
    """
    Return the entry of the flattened root under a dotted name, or MISSING.

    The document is not flattened: the members whose path is a prefix of the name are looked up. Only when two
    of them end at the same name is it walked, because then document order decides.
    """
    if not isinstance(root, dict):
        return MISSING
    if name and isinstance(root.get(""), dict):
        return _last_flat_member(root, name)
    if "." not in name:
        return root.get(name, MISSING)
    found: Any = MISSING
    pending = [(root, name)]
    while pending:
        members, rest = pending.pop()
        cut = len(rest)
        while cut >= 0:
            value = members.get(rest[:cut], MISSING)
            if cut == len(rest):
                if value is not MISSING:
                    if found is not MISSING:
                        return _last_flat_member(root, name)
                    found = value
            elif isinstance(value, dict):
                pending.append((value, rest[cut + 1 :]))
            cut = rest.rfind(".", 0, cut)
    return found


def _last_flat_member(root: dict[str, Any], name: str) -> Any:
    """Return the last member, in document order, that flattens to the name, or MISSING."""
    found: Any = MISSING
    pending = [("", iter(root.items()))]
    while pending:
        prefix, members = pending[-1]
        for key, value in members:
            path = f"{prefix}.{key}" if prefix else str(key)
            if path == name:
                found = value
            leads_on = not path or name.startswith(path + ".")
            if leads_on and isinstance(value, dict):
                pending.append((path, iter(value.items())))
                break
        else:
            pending.pop()
    return found


# Values.


def same(expected: Scalar, value: Any) -> bool:
    """Return whether a value equals a scalar by JSON's rules: same type, numbers as doubles."""
    if isinstance(value, str):
        return isinstance(expected, str) and value == expected
    if value is None or isinstance(value, bool):
        return value is expected
    if isinstance(value, int | float):
        return (
            isinstance(expected, int | float)
            and not isinstance(expected, bool)
            and number(value) == expected
        )
    return False


def _has_type(name: str, value: Any) -> bool:
    if name == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, _PYTHON_TYPES[name])


_PYTHON_TYPES: dict[str, Any] = {
    "null": type(None),
    "boolean": bool,
    "string": str,
    "array": (list, tuple),
    "object": dict,
}


def _is_in(values: tuple[Scalar, ...], value: Any) -> bool:
    if len(values) <= SEARCHED_MIN:
        return any(same(expected, value) for expected in values)
    if value is not None and not isinstance(value, str | bool | int | float):
        return False
    found = number(value) if isinstance(value, int | float) else value
    position = bisect_left(values, scalar_key(found), key=scalar_key)
    return position < len(values) and same(values[position], value)


def _contains(expected: Scalar, value: Any) -> bool:
    return isinstance(value, list | tuple) and any(same(expected, item) for item in value)


def _range(bounds: ValueRange, value: Any) -> bool:
    if not _has_type(bounds.kind, value):
        return False
    if bounds.kind == "number":
        value = number(value)
        if value != value:  # noqa: PLR0124 - NaN lies nowhere
            return False
    lower, upper = bounds.lower, bounds.upper
    if lower is not None and (value < lower or (bounds.lower_open and value == lower)):
        return False
    return not (upper is not None and (value > upper or (bounds.upper_open and value == upper)))


def _match(pattern: Any, value: Any) -> bool:
    """Return whether the value contains the pattern; recursion is bounded by the pattern's depth."""
    if isinstance(pattern, dict):
        return isinstance(value, dict) and all(
            key in value and _match(part, value[key]) for key, part in pattern.items()
        )
    if isinstance(pattern, list):
        return isinstance(value, list | tuple) and _match_array(pattern, value)
    return same(pattern, value)


def _match_array(pattern: list[Any], value: Any) -> bool:
    """
    Return whether each element of the pattern, in order, is contained in an element of its own.

    An element of the pattern takes the first remaining element that contains it. Scalars take only their equals,
    so they are counted; objects and arrays never take a scalar.
    """
    if len(pattern) > len(value):
        return False
    scalars = [part for part in pattern if not isinstance(part, dict | list)]
    if scalars and not _has_scalars(scalars, value):
        return False
    if len(scalars) == len(pattern):
        return True
    parts = [part for part in pattern if isinstance(part, dict | list)]
    compounds = _Compounds(parts, [item for item in value if isinstance(item, dict | list | tuple)])
    return all(map(compounds.take, parts))


class _Compounds:
    """
    The objects and arrays of an array, of which each part of a pattern takes the first that contains it.

    Only the items with the rarest scalar of a part are candidates for it. Frequencies and positions of the scalars
    are computed for all parts at once, as arrays may be long. A scalar is identified by its value and the name of
    the member it must be in, None for an element of an array.
    """

    def __init__(self, parts: list[Any], items: list[Any]) -> None:
        self._items = items
        self._taken: set[int] = set()
        self._columns: dict[str | None, list[Any]] = {}
        named = [list(islice(_named_scalars(part), INDEXED_SCALARS_MAX)) for part in parts]
        counts = {name: self._count(name, wanted) for name, wanted in _by_name(named).items()}
        rarest = [
            min(scalars, key=lambda one: counts[one[0]][one[1]], default=None) for scalars in named
        ]
        chosen = _by_name([[one] for one in rarest if one is not None])
        places = {name: self._places(name, wanted) for name, wanted in chosen.items()}
        anywhere = range(len(items))
        self._candidates: Iterator[Sequence[int]] = iter(
            [anywhere if one is None else places[one[0]][one[1]] for one in rarest]
        )

    def take(self, part: Any) -> bool:
        """Assign the next part to an item, in the order of the parts; return False if none is left for it."""
        for at in next(self._candidates):
            if at not in self._taken and _match(part, self._items[at]):
                self._taken.add(at)
                return True
        return False

    def _count(self, name: str | None, wanted: set[Scalar]) -> Counter[Scalar]:
        column = self._column(name)
        if name is None:
            column = chain.from_iterable(column)  # type: ignore[assignment]
        return Counter(filter(wanted.__contains__, column))

    def _places(self, name: str | None, wanted: set[Scalar]) -> dict[Scalar, list[int]]:
        column = self._column(name)
        places: dict[Scalar, list[int]] = {scalar: [] for scalar in wanted}
        if name is not None:
            for at in [at for at, scalar in enumerate(column) if scalar in wanted]:
                places[column[at]].append(at)
            return places
        for at in [at for at, scalars in enumerate(column) if not wanted.isdisjoint(scalars)]:
            for scalar in wanted.intersection(column[at]):
                places[scalar].append(at)
        return places

    def _column(self, name: str | None) -> list[Any]:
        """Return of each item its scalar in a member (or MISSING), or for None its scalars as an array."""
        column = self._columns.get(name)
        if column is None:
            column = self._elements() if name is None else self._members(name)
            self._columns[name] = column
        return column

    def _elements(self) -> list[Any]:
        column: list[Any] = [() if isinstance(item, dict) else item for item in self._items]
        if set(map(type, chain.from_iterable(column))) <= _SCALAR:
            return column
        return [[one for one in item if _scalar(one)] for item in column]

    def _members(self, name: str) -> list[Any]:
        items = self._items
        column = [item.get(name, MISSING) if type(item) is dict else MISSING for item in items]
        if set(map(type, column)) <= _SCALAR and set(map(type, items)) <= _COMPOUND:
            return column
        # Not from JSON: do not call an object's own comparison.
        return [
            item[name]
            if isinstance(item, dict) and name in item and _scalar(item[name])
            else MISSING
            for item in items
        ]


def _named_scalars(part: Any) -> Iterator[tuple[str | None, Scalar]]:
    """Return the scalars of a part, each with the name of the member it must be in."""
    if isinstance(part, list):
        return ((None, wanted) for wanted in part if _is_exact(wanted))
    return ((name, wanted) for name, wanted in part.items() if _is_exact(wanted))


def _by_name(
    named: list[list[tuple[str | None, Scalar]]],
) -> dict[str | None, set[Scalar]]:
    wanted: dict[str | None, set[Scalar]] = {}
    for name, scalar in chain.from_iterable(named):
        wanted.setdefault(name, set()).add(scalar)
    return wanted


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _is_exact(wanted: Any) -> bool:
    """Return whether Python's equality agrees with JSON's: not for integers beyond the exact doubles."""
    if isinstance(wanted, int | float):
        return abs(wanted) < INTEGER_EXACT_MAX
    return not isinstance(wanted, dict | list)


def _has_scalars(wanted: list[Scalar], value: Any) -> bool:
    """
    Return whether the array has each scalar as often as it is wanted.

    Arrays may be long: types are separated once for all elements, and `Counter` counts in C.
    """
    if len(wanted) == 1:
        return any(same(wanted[0], item) for item in value)
    types = set(map(type, value))
    for family in (str, float, bool):
        counts = Counter(part for part in wanted if _family(type(part)) is family)
        if not counts:
            continue
        same_family = {kind for kind in types if _family(kind) is family}
        found = [item for item in value if type(item) in same_family]
        if family is float:
            exact = INTEGER_EXACT_MAX
            found = [item if -exact <= item <= exact else number(item) for item in found]
        have = Counter(filter(counts.__contains__, found))
        if any(have[part] < count for part, count in counts.items()):
            return False
    return True


def _family(kind: type) -> type | None:
    """Return the family within which a scalar type is compared: str, numbers (float), constants (bool)."""
    if issubclass(kind, str):
        return str
    if kind is bool or kind is type(None):
        return bool
    return float if issubclass(kind, int | float) else None


def _select(select: Any, value: Any) -> bool:
    if not isinstance(value, list | tuple) or not -len(value) <= select.index < len(value):
        return False
    return holds(select.tree, {"value": value[select.index]})


def _in_shape(test: Callable[[Any, float, float], bool]) -> Callable[[Any, Any], bool]:
    def inside(shape: Any, value: Any) -> bool:
        point = read_point(value)
        return point is not None and test(shape, *point)

    return inside


def _geo_junk(_: None, value: Any) -> bool:
    if isinstance(value, list | dict | tuple):
        return read_point(value) is None
    return bool(value) and read_point(value) is None


def _negative_zero(_: None, value: Any) -> bool:
    return isinstance(value, float) and value == 0 and math.copysign(1, value) < 0


TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "exists": lambda *_: True,
    "type": _has_type,
    "eq": same,
    "in": _is_in,
    "contains": _contains,
    "range": _range,
    "prefix": lambda prefix, value: isinstance(value, str) and value.startswith(prefix),
    "suffix": lambda suffix, value: isinstance(value, str) and value.endswith(suffix),
    "like": lambda text, value: isinstance(value, str) and like(text.pattern).matches(value),
    "regexp": lambda regexp, value: isinstance(value, str) and search(regexp, value),
    "regexp_text": lambda regexp, value: search(regexp, text_of(value)),
    "match": lambda pattern, value: _match(pattern.value, value),
    "select": _select,
    "geo_distance": _in_shape(in_circle),
    "geo_distance_range": _in_shape(in_annulus),
    "geo_box": _in_shape(in_box),
    "geo_polygon": _in_shape(in_polygon),
    "geo_junk": _geo_junk,
    "negative_zero": _negative_zero,
    "opaque": lambda expression, value: bool(expression.evaluate(value)),
}
