"""
The filter tree: what every dialect compiles to and every engine runs.

    Node = And(children) | Or(children) | Not(child) | EVERYTHING | NOTHING | Condition(path, op, value)

Nodes are immutable, hashable, comparable and picklable. The logic is two-valued: a condition either
holds for an object or it does not, `Not` is plain negation, and so **`Not(Condition)` holds whenever the
condition does not, a missing field included**. A dialect that negates differently chooses other
conditions (see `regexp_text`, `geo_junk`); no evaluator has a flag for it.

Numbers, everywhere: IEEE doubles. `1`, `1.0` and `1e0` are equal, `9007199254740993` equals
`...992`, integers too large become infinity, `-0.0` equals `0`. Booleans are not numbers.
Strings, everywhere: sequences of code points, ordered by code point (which is the order of their UTF-8
bytes); nothing is normalised; a lone surrogate is a code point like any other (WTF-8), except that
regular expressions see U+FFFD in its place. *Scalar* below means null, boolean, number or string.

Paths
-----
A path is a tuple of steps from the root of the object:

    "name"      the member `name` of an object; on anything else: missing
    3           element 3 of an array, or the member "3" of an object; negative or past the end: missing
    Flat(name)  only as the single step of a path: the entry `name` of the *flattened* root. Flattening
                keeps every object under its own dotted path and adds its members as `parent.child`,
                recursively; arrays are values and not entered; a literal key may hold dots, and where two
                members get one path the later in document order wins; an empty key at the root adds no
                prefix. So Flat("a.b") finds {"a": {"b": 1}} and {"a.b": 1}. To compile it: the nodes are
                the dotted prefixes of the name, and for i < j an edge leads from prefix i to prefix j by
                the member name ".".join(parts[i:j]); an edge "" leads from the root to itself.

    Computed    only as the single step of a path: a scalar computed from the root by an expression of a
                dialect (CESQL: `LENGTH(subject)`); missing where the expression has an error

The empty tuple is the object itself. *Missing* is not null: a member that is null is there.

Conditions
----------
v is the value at the path. A missing v satisfies no condition at all, except `opaque`, which has no path.
"Index" says how an engine can find the condition from an event without trying it; "residual" conditions
are only verified. The negation of any condition is residual, but for exists (a list per path).

    op                   value                 holds when                                     index
    exists               None                  v is there (null too)                          per path
    type                 "null" "boolean"      v is of that JSON type                         per path
                         "number" "string"
                         "array" "object"
    eq                   scalar                v is a scalar of the same type, and equal      hash
    in                   tuple of scalars      v equals one of them (as eq). Sorted, without  hash, under
                                               duplicates, at least one; ONE condition        each value
    contains             scalar                v is an array with a direct element that       hash, multi-
                                               equals it (as eq); nested arrays are not seen  valued path
    range                ValueRange(lower,     v has the bounds' type (number, string or      interval tree
                         upper, lower_open,    boolean; types never mix) and lies between;    per path and
                         upper_open)           a bound of None is no bound                    type
    prefix               str                   v is a string that starts with it              trie
    suffix               str                   v is a string that ends with it                trie, reversed
    like                 LikeText(pattern)     v is a string that the LIKE pattern matches    its literal
                                                                                              parts
    regexp               Regexp(pattern,       v is a string and RE2 finds the pattern        set per path
                         flags)                anywhere in it
    regexp_text          Regexp                as regexp, but on text(v) for any v: strings   residual
                                               as they are, null true false as words, numbers
                                               as JavaScript writes them, arrays joined with
                                               "," (null elements empty), objects as
                                               "[object Object]"
    match                JsonPattern(text)     v contains the JSON pattern: object in object  residual
                                               (each key, recursively), array in array (in
                                               order, each element takes the first remaining
                                               that contains it), scalars equal
    select               Select(index, tree)   v is an array, has that element (negative:     residual
                                               from the end), and tree holds for the object
                                               {"value": element}
    geo_distance         Circle(lat, lon,      v is a geopoint in the circle                  grid
                         radius)
    geo_distance_range   Annulus(lat, lon,     v is a geopoint in the ring                    grid
                         inner, outer)
    geo_box              Box(top, left,        v is a geopoint in the box                     grid
                         bottom, right)
    geo_polygon          Polygon(points)       v is a geopoint in the polygon                 grid
    geo_junk             None                  v is no geopoint, and not null, false, 0 or "" residual
    negative_zero        None                  v is the float -0.0                            residual
    opaque               Opaque                value.evaluate(root object) is true; path ()   residual

Regexp flags: any of i (ignore case), m (^ and $ at lines), s (dot takes newlines), sorted. `$` without m
is the very end. Geopoints and the arithmetic of the four shapes: `virta.filters.geo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from virta.errors import FilterError
from virta.filters.limits import CONDITIONS_MAX, DEPTH_MAX
from virta.filters.values import (
    JSON_TYPES,
    Annulus,
    Box,
    Circle,
    Computed,
    Flat,
    JsonPattern,
    LikeText,
    Opaque,
    Path,
    Polygon,
    Regexp,
    Scalar,
    Step,
    ValueRange,
    scalar,
    scalar_set,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "EVERYTHING",
    "NOTHING",
    "OPS",
    "And",
    "Annulus",
    "Box",
    "Circle",
    "Computed",
    "Condition",
    "Everything",
    "Flat",
    "JsonPattern",
    "LikeText",
    "Node",
    "Not",
    "Nothing",
    "Opaque",
    "Or",
    "Path",
    "Polygon",
    "Regexp",
    "Scalar",
    "Select",
    "Step",
    "ValueRange",
    "all_of",
    "any_of",
    "conditions",
    "negate",
]


@dataclass(frozen=True, slots=True)
class _Constant:
    """A node without conditions."""

    levels: ClassVar[int] = 1
    count: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class Everything(_Constant):
    """Holds for every object."""


@dataclass(frozen=True, slots=True)
class Nothing(_Constant):
    """Holds for no object."""


EVERYTHING = Everything()
NOTHING = Nothing()


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """One test on the value at one path; the module docstring has the table."""

    path: Path
    op: str
    value: Any = None

    def __post_init__(self) -> None:
        shape = OPS.get(self.op)
        value = self.value
        if shape is _SCALAR:
            plain = scalar(value)
            if plain is not value:
                object.__setattr__(self, "value", plain)
        elif shape is _SCALARS:
            object.__setattr__(self, "value", scalar_set(value))
        elif shape is None:
            raise FilterError(f"unknown condition {self.op!r}: expected one of {', '.join(OPS)}")
        elif not isinstance(value, shape) or (self.op == "type" and value not in JSON_TYPES):
            raise FilterError(f"condition {self.op} does not take {value!r}")
        if self.op == "select":
            _check_size(self.levels, self.count)
        path = self.path
        if not isinstance(path, tuple) or (
            len(path) > 1 and any(isinstance(step, Flat | Computed) for step in path)
        ):
            raise FilterError(
                f"{self.path!r} is not a path: expected a tuple of names and indexes, of one Flat or one Computed"
            )

    @property
    def levels(self) -> int:
        """Return the number of nodes from here to the deepest condition, the tree of a `select` included."""
        return 1 + self.value.tree.levels if self.op == "select" else 1

    @property
    def count(self) -> int:
        """Return the number of conditions in the subtree, the tree of a `select` included."""
        return 1 + self.value.tree.count if self.op == "select" else 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Condition) and self._comparison_key() == other._comparison_key()

    def __hash__(self) -> int:
        return hash(self._comparison_key())

    def _comparison_key(self) -> tuple[object, ...]:
        # True == 1 in Python, so scalars are compared together with "is it a boolean".
        value = self.value
        if isinstance(value, tuple):
            return (self.op, self.path, tuple((v.__class__ is bool, v) for v in value))
        return (self.op, self.path, value.__class__ is bool, value)


@dataclass(frozen=True, slots=True)
class Not:
    """Holds when the child does not."""

    child: Node
    levels: int = field(init=False, compare=False, repr=False)
    count: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _measure(self, (self.child,))


@dataclass(frozen=True, slots=True)
class _Joined:
    """A node with children; equal to another of the same class with the same children."""

    children: tuple[Node, ...]
    levels: int = field(init=False, compare=False, repr=False)
    count: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _measure(self, self.children)


@dataclass(frozen=True, slots=True)
class And(_Joined):
    """Holds when all children do; of none, always."""


@dataclass(frozen=True, slots=True)
class Or(_Joined):
    """Holds when one child does; of none, never."""


Node: TypeAlias = And | Or | Not | Everything | Nothing | Condition


@dataclass(frozen=True, slots=True)
class Select:
    """A filter on one element of an array."""

    index: int
    tree: Node


def all_of(nodes: Iterable[Node]) -> Node:
    """Return the conjunction, without an `And` where there is nothing to join."""
    kept = tuple(node for node in nodes if not isinstance(node, Everything))
    if any(isinstance(node, Nothing) for node in kept):
        return NOTHING
    return kept[0] if len(kept) == 1 else And(kept) if kept else EVERYTHING


def any_of(nodes: Iterable[Node]) -> Node:
    """Return the disjunction, without an `Or` where there is nothing to join."""
    kept = tuple(node for node in nodes if not isinstance(node, Nothing))
    if any(isinstance(node, Everything) for node in kept):
        return EVERYTHING
    return kept[0] if len(kept) == 1 else Or(kept) if kept else NOTHING


def negate(node: Node) -> Node:
    """Return the negation, without `Not(Not(…))`."""
    if isinstance(node, Not):
        return node.child
    if isinstance(node, Everything):
        return NOTHING
    return EVERYTHING if isinstance(node, Nothing) else Not(node)


def conditions(node: Node) -> Iterator[Condition]:
    """Yield every condition of a tree in order, repeated ones too, but not those inside a `select`."""
    if isinstance(node, Condition):
        yield node
    elif isinstance(node, Not):
        yield from conditions(node.child)
    elif isinstance(node, And | Or):
        for child in node.children:
            yield from conditions(child)


def _measure(node: Not | _Joined, children: tuple[Node, ...]) -> None:
    """Set the size of a new node and refuse one too large, so that every tree can be walked recursively."""
    levels = 1 + max((child.levels for child in children), default=0)
    count = sum(child.count for child in children)
    _check_size(levels, count)
    object.__setattr__(node, "levels", levels)
    object.__setattr__(node, "count", count)


def _check_size(levels: int, count: int) -> None:
    if levels > DEPTH_MAX:
        raise FilterError(f"filter nests deeper than {DEPTH_MAX} levels", code="too_complex")
    if count > CONDITIONS_MAX:
        raise FilterError(
            f"filter has {count} conditions: at most {CONDITIONS_MAX} are allowed",
            code="too_complex",
        )


_SCALAR: Any = object()
_SCALARS: Any = object()

# What the value of a condition has to be.
OPS: dict[str, Any] = {
    "exists": type(None),
    "type": str,
    "eq": _SCALAR,
    "in": _SCALARS,
    "contains": _SCALAR,
    "range": ValueRange,
    "prefix": str,
    "suffix": str,
    "like": LikeText,
    "regexp": Regexp,
    "regexp_text": Regexp,
    "match": JsonPattern,
    "select": Select,
    "geo_distance": Circle,
    "geo_distance_range": Annulus,
    "geo_box": Box,
    "geo_polygon": Polygon,
    "geo_junk": type(None),
    "negative_zero": type(None),
    "opaque": Opaque,
}
