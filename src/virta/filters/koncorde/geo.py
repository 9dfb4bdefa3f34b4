"""
Koncorde's geographic keywords: distances, boxes, circles, rings and polygons.

Values that would make Koncorde's native module abort or throw later (a latitude beyond the poles, a box with
swapped sides, a distance that is not a number) are refused here.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from virta.errors import FilterError
from virta.filters.geo import BLANKS, read_float, read_point
from virta.filters.koncorde.checks import (
    Place,
    check_array,
    check_one_field,
    check_properties,
    check_text,
    is_number,
    script_json,
)
from virta.filters.tree import Annulus, Box, Circle, Polygon

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from virta.filters.geo import Point

POLYGON_POINTS_MIN = 3
# The code of errors that Koncorde's validation misses and its native module raises.
LATE = "geo_shape_invalid"

METRES = {
    "meter": 1.0,
    "m": 1.0,
    "feet": 0.3048,
    "ft": 0.3048,
    "inch": 0.0254,
    "in": 0.0254,
    "yard": 0.9144,
    "yd": 0.9144,
    "mile": 1609.34,
    "mi": 1609.34,
}
# `m` is also a minute to Koncorde, so a unit of time that is no length gives minutes for metres.
# Each is multiplied, then divided: 1 s is 1/60.
MINUTES = {
    "second": (1, 60),
    "sec": (1, 60),
    "s": (1, 60),
    "minute": (60, 60),
    "min": (60, 60),
    "m": (60, 60),
    "hour": (3600, 60),
    "hr": (3600, 60),
    "h": (3600, 60),
    "day": (86_400, 60),
    "week": (10_080, 1),
}
# Tried in this order. Upper-case ones (mega and up) cannot be reached: units are put in lower case.
SHORT_PREFIXES = {
    "da": 10.0,
    "mu": 1e-6,
    "m": 1e-3,
    "h": 100.0,
    "k": 1e3,
    "n": 1e-9,
    "p": 1e-12,
    "c": 1e-2,
    "d": 1e-1,
    "f": 1e-15,
    "a": 1e-18,
    "z": 1e-21,
    "y": 1e-24,
}
LONG_PREFIXES = {
    "milli": 1e-3,
    "micro": 1e-6,
    "nano": 1e-9,
    "pico": 1e-12,
    "centi": 1e-2,
    "deci": 1e-1,
    "femto": 1e-15,
    "atto": 1e-18,
    "zepto": 1e-21,
    "yocto": 1e-24,
    "deka": 10.0,
    "hecto": 100.0,
    "kilo": 1e3,
    "mega": 1e6,
    "giga": 1e9,
    "tera": 1e12,
    "peta": 1e15,
    "exa": 1e18,
    "zeta": 1e21,
    "yotta": 1e24,
}
# Distances that are remembered, and their length: most filters have one of a few.
DISTANCES_MAX = 4096
DISTANCE_CHARS_MAX = 32
_CAMEL_CASE = {"top_left": "topLeft", "bottom_right": "bottomRight", "lat_lon": "latLon"}
_DROPPED = re.compile(rf"[-{BLANKS}]")
_UNIT_START = re.compile(r"(?<=[0-9])[a-z]")


# Distances.


def convert_distance(text: str) -> float:
    """Return the metres of a distance such as `5 km`, `1 000,5 m` or `3 miles`."""
    return _known_distance(text) if len(text) <= DISTANCE_CHARS_MAX else _read_distance(text)


@lru_cache(DISTANCES_MAX)
def _known_distance(text: str) -> float:
    return _read_distance(text)


def _read_distance(text: str) -> float:
    cleaned = _DROPPED.sub("", text).replace(",", ".").lower()
    start = _UNIT_START.search(cleaned)
    if start is not None:
        number = read_float(cleaned[: start.start()])
        metres = None if number is None else _convert(number, cleaned[start.start() :])
        if metres is not None:
            return metres
    raise FilterError(f'unable to parse distance value "{text}"', code="distance_invalid")


def _convert(number: float, unit: str) -> float | None:
    length = _resolve(unit, METRES)
    if length is not None:
        name, prefix = length
        return number * prefix * METRES[name]
    time = _resolve(unit, MINUTES)
    if time is None:
        return None
    name, prefix = time
    multiplier, divisor = MINUTES[name]
    return number * prefix * multiplier / divisor


def _resolve(unit: str, table: Mapping[str, object]) -> tuple[str, float] | None:
    """Return (unit, prefix) of a name: of its possible singular forms, the last known one."""
    names = [unit]
    if len(unit) != 2:
        names += [unit[: -len(end)] for end in ("s", "es", "ies") if unit.endswith(end)]
    found = None
    for name in names:
        if name in table:
            found = name, 1.0
            continue
        prefixes = LONG_PREFIXES if len(name) > 3 else SHORT_PREFIXES
        prefix = next((p for p in prefixes if name.startswith(p)), None)
        if prefix is not None and name[len(prefix) :] in table:
            found = name[len(prefix) :], prefixes[prefix]
    return found


# Keywords. Each reader returns the field, the operation and its value.


def read_box(value: Any, place: Place) -> tuple[str, str, Box]:
    name, given = check_one_field(value, place)
    place = place.at(name)
    members: dict[str, Any] = given if isinstance(given, dict) else {}
    corners = {_CAMEL_CASE.get(key, key): member for key, member in members.items()}
    box = _read_sides(corners, place) or _read_corners(corners, place)
    if not all(map(math.isfinite, (box.top, box.left, box.bottom, box.right))):
        place.refuse("unrecognized geo-point format")
    for lower, upper, axis in ((box.bottom, box.top, "lat"), (box.left, box.right, "lon")):
        if lower >= upper:
            raise FilterError(
                f"min_{axis} argument cannot be greater or equal max_{axis}",
                code=LATE,
                keyword=place.keyword,
                path=place.path,
            )
    return name, "geo_box", box


def _read_sides(corners: dict[str, Any], place: Place) -> Box | None:
    given = [corners.get(name) for name in ("top", "left", "bottom", "right")]
    if not all(isinstance(side, str) or is_number(side) for side in given):
        return None
    sides = [read_float(side) for side in given]
    if None in sides:
        place.refuse(f"unrecognized geoBoundingBox format: {script_json(corners)}")
    return Box(*(side for side in sides if side is not None))


def _read_corners(corners: dict[str, Any], place: Place) -> Box:
    top_left = read_point(corners.get("topLeft"))
    bottom_right = read_point(corners.get("bottomRight"))
    if top_left is None or bottom_right is None:
        place.refuse("unrecognized geo-point format")
    return Box(top_left[0], top_left[1], bottom_right[0], bottom_right[1])


def read_circle(value: Any, place: Place) -> tuple[str, str, Circle]:
    members = check_properties(value, place, 2, ("distance",))
    check_text(members["distance"], place.at("distance"))
    name = next(key for key in members if key != "distance")
    lat, lon = _read_centre(members[name], place.at(name))
    return name, "geo_distance", Circle(lat, lon, convert_distance(members["distance"]))


def read_annulus(value: Any, place: Place) -> tuple[str, str, Annulus]:
    members = check_properties(value, place, 3, ("from", "to"))
    inner = convert_distance(check_text(members["from"], place.at("from")))
    outer = convert_distance(check_text(members["to"], place.at("to")))
    if inner >= outer:
        place.refuse("inner radius must be smaller than outer radius")
    name = next(key for key in members if key not in ("from", "to"))
    lat, lon = _read_centre(members[name], place.at(name))
    return name, "geo_distance_range", Annulus(lat, lon, inner, outer)


def read_polygon(value: Any, place: Place) -> tuple[str, str, Polygon]:
    name, shape = check_one_field(value, place)
    place = place.at(name)
    points = check_properties(shape, place, 1, ("points",))["points"]
    place = place.at("points")
    if len(check_array(points, place)) < POLYGON_POINTS_MIN:
        place.refuse(
            f"at least {POLYGON_POINTS_MIN} points are required to build a polygon",
        )
    return name, "geo_polygon", Polygon(tuple(_read_vertex(point, place) for point in points))


def _read_vertex(value: Any, place: Place) -> Point:
    point = read_point(value)
    if point is None or not all(map(math.isfinite, point)):
        place.refuse(f'unrecognized point format "{script_json(value)}"')
    return point


def _read_centre(value: Any, place: Place) -> Point:
    point = read_point(value)
    if point is None or not all(map(math.isfinite, point)):
        place.refuse("unrecognized point format")
    if abs(point[0]) > 90:
        place.refuse(f"latitude {point[0]} is out of range: expected -90 to 90", code=LATE)
    return point


READERS: dict[str, Callable[[Any, Place], tuple[str, str, Any]]] = {
    "geoBoundingBox": read_box,
    "geoDistance": read_circle,
    "geoDistanceRange": read_annulus,
    "geoPolygon": read_polygon,
}
