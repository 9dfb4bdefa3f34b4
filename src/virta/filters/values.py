"""
The values of conditions: scalars in one spelling, ranges, patterns, shapes, and steps of a path.

Equal meaning is equal value here (1.0 is 1, flags are sorted, an absent bound is not "open"), so that
conditions can be compared, hashed and shared. `virta.filters.tree` documents what each value means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, runtime_checkable

from virta.errors import FilterError
from virta.filters.limits import (
    DEPTH_MAX,
    FIELD_CHARS_MAX,
    IN_VALUES_MAX,
    PATTERN_COMPOUNDS_MAX,
    PATTERN_DEPTH_MAX,
    PATTERN_VALUES_MAX,
    POLYGON_POINTS_MAX,
    REGEXP_CHARS_MAX,
)

Scalar: TypeAlias = bool | int | float | str | None

INTEGER_EXACT_MAX = 1 << 53  # doubles represent every integer up to here
REGEXP_FLAGS = "ims"
JSON_TYPES = ("null", "boolean", "number", "string", "array", "object")


@dataclass(frozen=True, slots=True)
class Flat:
    """A step that looks a dotted name up in the flattened root; see `virta.filters.tree`."""

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise FilterError(f"a field's name must be a string, got {self.name!r}")
        if len(self.name) > FIELD_CHARS_MAX or self.name.count(".") >= DEPTH_MAX:
            raise FilterError(
                f"field name of {len(self.name)} characters with {self.name.count('.')} dots: at most "
                f"{FIELD_CHARS_MAX} and fewer than {DEPTH_MAX} are allowed",
                code="too_complex",
            )


class Computed:
    """
    A step that computes a scalar from the root, by an expression of a dialect; see `virta.filters.tree`.

    Hashable and equal by meaning. `names` are the members of the root that it reads; those in `required` have no
    value only if the whole has none.
    """

    __slots__ = ()

    names: tuple[str, ...]
    required: tuple[str, ...]

    def compute(self, obj: Any) -> bool | int | str | None:
        """Return the value for a root object, None where there is none; never raise for any JSON value."""
        raise NotImplementedError

    def canonical_json(self) -> Any:
        """Return JSON data that is equal for equal expressions in every process."""
        raise NotImplementedError


Step: TypeAlias = str | int | Flat | Computed
Path: TypeAlias = tuple[Step, ...]

# Cached paths of dotted names: a million filters use few fields.
FIELD_PATHS_MAX = 8192


@lru_cache(maxsize=FIELD_PATHS_MAX)
def field_path(name: str) -> Path:
    """Return the path of a dotted name, the same tuple each time."""
    return (Flat(name),)


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Between two bounds of one type; None is no bound. A range may be empty: it then never holds."""

    lower: bool | int | float | str | None = None
    upper: bool | int | float | str | None = None
    lower_open: bool = False
    upper_open: bool = False

    def __post_init__(self) -> None:
        kinds = {type_name(b) for b in (self.lower, self.upper) if b is not None}
        if len(kinds) != 1 or not kinds <= {"number", "string", "boolean"}:
            raise FilterError(
                f"a range needs one or two bounds of one type, got {self.lower!r} and {self.upper!r}"
            )
        object.__setattr__(self, "lower", scalar(self.lower))
        object.__setattr__(self, "upper", scalar(self.upper))
        # An absent bound is neither open nor closed: one spelling, one id.
        object.__setattr__(self, "lower_open", self.lower_open and self.lower is not None)
        object.__setattr__(self, "upper_open", self.upper_open and self.upper is not None)

    @property
    def kind(self) -> str:
        """Return the type of the bounds: number, string or boolean."""
        return type_name(self.upper if self.lower is None else self.lower)

    def __eq__(self, other: object) -> bool:
        # True == 1 in Python; a range of booleans is not one of numbers.
        return isinstance(other, ValueRange) and self._comparison_key() == other._comparison_key()

    def __hash__(self) -> int:
        return hash(self._comparison_key())

    def _comparison_key(self) -> tuple[object, ...]:
        return (self.kind, self.lower, self.upper, self.lower_open, self.upper_open)


@dataclass(frozen=True, slots=True)
class Regexp:
    """An RE2 pattern, searched anywhere, with flags out of `i`, `m`, `s`."""

    pattern: str
    flags: str = ""

    def __post_init__(self) -> None:
        check_pattern_length(self.pattern)
        if not set(self.flags) <= set(REGEXP_FLAGS):
            raise FilterError(f"regexp flags {self.flags!r}: only i, m and s are known")
        object.__setattr__(self, "flags", "".join(sorted(set(self.flags))))


@dataclass(frozen=True, slots=True)
class LikeText:
    """A pattern of CESQL's LIKE for a whole text: `%` is any text, `_` any one character."""

    pattern: str


@dataclass(frozen=True, slots=True)
class JsonPattern:
    """A JSON value to be contained; `text` is its canonical JSON, so patterns hash and compare by it."""

    text: str

    @classmethod
    def of(cls, value: Any) -> JsonPattern:
        return cls(json_text(_pattern_value(value)))

    @property
    def value(self) -> Any:
        """Return the pattern as shared JSON data; do not modify it."""
        return _pattern_data(self.text)


@dataclass(frozen=True, slots=True)
class Circle:
    lat: float
    lon: float
    radius: float


@dataclass(frozen=True, slots=True)
class Annulus:
    lat: float
    lon: float
    inner: float
    outer: float


@dataclass(frozen=True, slots=True)
class Box:
    top: float
    left: float
    bottom: float
    right: float


@dataclass(frozen=True, slots=True)
class Polygon:
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) > POLYGON_POINTS_MAX:
            raise FilterError(
                f"polygon of {len(self.points)} points: at most {POLYGON_POINTS_MAX} are allowed",
                code="too_complex",
            )


@runtime_checkable
class Opaque(Protocol):
    """
    An expression of a dialect that no tree expresses exactly.

    Hashable and equal by meaning; `evaluate` never raises for any JSON object, `canonical_json` returns JSON data
    that is equal for equal expressions in every process.
    """

    def evaluate(self, obj: Any) -> bool: ...

    def canonical_json(self) -> Any: ...


def type_name(value: Any) -> str:
    """Return the JSON type of a Python value; raise FilterError if it has none."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    if isinstance(value, dict):
        return "object"
    if isinstance(value, list | tuple):
        return "array"
    raise FilterError(f"{value!r} ({type(value).__name__}) is not a JSON value")


def number(value: float) -> int | float:
    """Return a number as the double it is, as int where that is exact, so that 1.0 and 1 are one value."""
    if isinstance(value, int):
        if -INTEGER_EXACT_MAX <= value <= INTEGER_EXACT_MAX:
            return value
        try:
            value = float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if value.is_integer() and -INTEGER_EXACT_MAX <= value <= INTEGER_EXACT_MAX:
        return int(value)
    return value


def scalar(value: Any) -> Scalar:
    """Return a scalar in its one spelling; raise FilterError for other values."""
    if value is None or value.__class__ is bool or value.__class__ is str:
        return value
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, int | float):
        if value != value:  # noqa: PLR0124 - NaN, without a conversion
            raise FilterError("NaN is not a JSON number")
        return number(value)
    if isinstance(value, str):
        return str(value)
    raise FilterError(f"expected null, a boolean, a number or a string, got {value!r}")


def check_pattern_length(pattern: str) -> None:
    """Refuse a long pattern before it is parsed."""
    if len(pattern) > REGEXP_CHARS_MAX:
        raise FilterError(
            f"regular expression of {len(pattern)} characters: at most {REGEXP_CHARS_MAX} are allowed",
            code="regexp_too_long",
        )


def scalar_key(value: Scalar) -> tuple[str, Any]:
    """Return a key under which scalars of all types sort and compare as JSON values."""
    return (type_name(value), "" if value is None else value)


def json_text(value: Any) -> str:
    """Return JSON as it is hashed: sorted keys, no blanks, ASCII."""
    return _ENCODER.encode(value)


# Shared: json.dumps with these settings creates one per call, which costs more than the encoding.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def scalar_set(values: Any) -> tuple[Scalar, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise FilterError(f"condition in takes a list of scalars, got {values!r}")
    values = tuple(values)
    if not values:
        raise FilterError("condition in takes at least one value, got none")
    if len(values) > IN_VALUES_MAX:
        raise FilterError(
            f"condition in with {len(values)} values: at most {IN_VALUES_MAX} are allowed",
            code="too_complex",
        )
    if set(map(type, values)) == {str}:
        return tuple(sorted(set(values)))
    distinct = {scalar_key(v): v for v in map(scalar, values)}
    return tuple(distinct[key] for key in sorted(distinct))


@lru_cache(maxsize=1024)
def _pattern_data(text: str) -> Any:
    return json.loads(text)


def _pattern_value(value: Any) -> Any:
    """Return a copy of a JSON value with every number in its one spelling, within the limits."""
    return _copied(value, 0, [0])


# No function in a function: one that calls itself is left to Python's garbage collector, once a pattern.
def _copied(item: Any, depth: int, count: list[int]) -> Any:
    """Return the copy; `count` has the number of values so far."""
    count[0] += 1
    if count[0] > PATTERN_VALUES_MAX or depth > PATTERN_DEPTH_MAX:
        raise FilterError(
            f"pattern over {PATTERN_VALUES_MAX} values or {PATTERN_DEPTH_MAX} levels",
            code="too_complex",
        )
    if isinstance(item, dict):
        return {str(k): _copied(v, depth + 1, count) for k, v in item.items()}
    if isinstance(item, list | tuple):
        compounds = sum(isinstance(v, dict | list | tuple) for v in item)
        if compounds > PATTERN_COMPOUNDS_MAX:
            raise FilterError(
                f"array pattern with {compounds} objects and arrays: "
                f"at most {PATTERN_COMPOUNDS_MAX} are allowed",
                code="too_complex",
            )
        return [_copied(v, depth + 1, count) for v in item]
    return scalar(item)
