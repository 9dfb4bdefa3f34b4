"""
Geopoints, and whether one lies in a shape.

A point is written `[lat, lon]`, `"lat, lon"`, `"geohash"`, `{"lat", "lon"}`, or `{"latLon": …}` or
`{"lat_lon": …}` round any of these. Degrees; latitudes are not checked here, longitudes count modulo 360.
Borders belong to every shape.

Distances are metres on the WGS84 ellipsoid by Andoyer's first-order formula (good to a few metres in
20,000 km; the sphere is off by up to 0.56 %). A circle is cut by a rough box round it, as Koncorde's
is: the sphere's degrees for the radius, which takes 0.67 % off the northern and southern tips at the
equator. Edges of polygons are great circles, so they bulge towards the poles; a polygon may cross the
antimeridian and itself (what it winds around, in either direction, is inside). A polygon around a pole contains
the nearer pole: the smaller of the two parts of the globe.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from virta.filters.text import text_of

if TYPE_CHECKING:
    from virta.filters.values import Annulus, Box, Circle, Polygon

Point: TypeAlias = tuple[float, float]
Vector: TypeAlias = tuple[float, float, float]

EQUATOR = 6_378_137.0
POLE = 6_356_752.314_245_179_3
FLATTENING = (EQUATOR - POLE) / EQUATOR
_THIRD_FLATTENING = FLATTENING / (2 - FLATTENING)

# Sines below this are rounding: the point is on the great circle (a micrometre on the ground).
EDGE_SINE_MAX = 1e-13
NORTH, HALF_TURN = 90.0, 180.0
# Degrees of longitude below this are none.
MERIDIAN_DEGREES_MAX = 1e-13
# Digits of a geohash that can still change a double; further ones are ignored.
GEOHASH_DIGITS_MAX = 64

_GEOHASH = re.compile(r"[0-9a-z]{4,}\Z")
_GEOHASH_DIGITS = {digit: i for i, digit in enumerate("0123456789bcdefghjkmnpqrstuvwxyz")}
# White space in JavaScript, which differs from Python's \s.
BLANKS = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_FLOAT = re.compile(
    rf"[{BLANKS}]*([+-]?(?:Infinity|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?))"
)


# Reading points.


def read_point(value: Any) -> Point | None:
    """Return (lat, lon) of a value in one of the notations, or None."""
    if isinstance(value, dict):
        if "lat" in value and "lon" in value:
            return _coordinates(value["lat"], value["lon"])
        return _read_simple_point(_last_member(value, "latLon", "lat_lon"))
    return None if isinstance(value, bool) else _read_simple_point(value)


def _read_simple_point(value: Any) -> Point | None:
    if isinstance(value, str):
        return _read_text(value)
    if isinstance(value, list | tuple):
        return _coordinates(value[0], value[1]) if len(value) == 2 else None
    if isinstance(value, dict) and "lat" in value and "lon" in value:
        return _coordinates(value["lat"], value["lon"])
    return None


def _last_member(value: dict[str, Any], *names: str) -> Any:
    """Return the last member under one of its spellings, or None."""
    found = None
    for key, member in value.items():
        if key in names:
            found = member
    return found


def _read_text(text: str) -> Point | None:
    if text.count(",") == 1:
        lat, lon = text.split(",")
        return _coordinates(lat, lon)
    return _read_geohash(text) if _GEOHASH.match(text) else None


def _read_geohash(text: str) -> Point:
    """Return the centre of the cell. Letters that are no geohash digit (a, i, l, o) count as 0."""
    low, high = [-90.0, -180.0], [90.0, 180.0]
    axis = 1
    for letter in text[:GEOHASH_DIGITS_MAX]:
        digit = _GEOHASH_DIGITS.get(letter, 0)
        for bit in (16, 8, 4, 2, 1):
            middle = (low[axis] + high[axis]) / 2
            (low if digit & bit else high)[axis] = middle
            axis = 1 - axis
    return (low[0] + high[0]) / 2, (low[1] + high[1]) / 2


def _coordinates(lat: Any, lon: Any) -> Point | None:
    latitude, longitude = read_float(lat), read_float(lon)
    return None if latitude is None or longitude is None else (latitude, longitude)


def read_float(value: Any) -> float | None:
    """Return the number that a value's text starts with, as JavaScript's parseFloat does, or None."""
    if isinstance(value, float):
        return None if math.isnan(value) else value + 0.0  # -0.0 is 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if value is None or isinstance(value, bool | dict):
        return None
    found = _FLOAT.match(value if isinstance(value, str) else text_of(value))
    return None if found is None else float(found.group(1)) + 0.0


# Shapes.


def in_circle(circle: Circle, lat: float, lon: float) -> bool:
    return (
        _in_rough_box(circle.lat, circle.lon, circle.radius, lat, lon)
        and distance(circle.lat, circle.lon, lat, lon) <= circle.radius
    )


def in_annulus(ring: Annulus, lat: float, lon: float) -> bool:
    return (
        _in_rough_box(ring.lat, ring.lon, ring.outer, lat, lon)
        and ring.inner <= distance(ring.lat, ring.lon, lat, lon) <= ring.outer
    )


def in_box(box: Box, lat: float, lon: float) -> bool:
    if not (box.bottom <= lat <= box.top and math.isfinite(lon)):
        return False
    if box.left <= lon <= box.right:
        return True
    # The first meridian at or east of the left border that is this longitude.
    return lon + 360 * math.ceil((box.left - lon) / 360) <= box.right


def in_polygon(polygon: Polygon, lat: float, lon: float) -> bool:
    """
    Return whether the winding number is not zero: edges south of the point, eastward ones less westward ones.

    An edge spans the point's meridian when its ends lie on different sides of it, the western side
    including the meridian itself, so that a vertex exactly south of the point is counted once. For a polygon
    around the South Pole, the edges north of the point are counted.
    """
    if not (math.isfinite(lat) and math.isfinite(lon)):
        return False
    point = _vector(lat, lon)
    edges, is_southern = _edges(polygon)
    sign = -1 if is_southern else 1
    turns = 0
    for start, normal, towards, back, lon_from, lon_to, lon_by, polar in edges:
        if towards is back:  # a repeated vertex, not an edge
            if all(abs(p - s) <= EDGE_SINE_MAX for p, s in zip(point, start, strict=True)):
                return True
            continue
        side = _dot(normal, point)
        if (
            abs(side) <= EDGE_SINE_MAX
            and _dot(towards, point) >= -EDGE_SINE_MAX
            and _dot(back, point) >= -EDGE_SINE_MAX
        ):
            return True
        side = polar or side
        here = _wrap_longitude(lon_from - lon)
        # Exactly the value that is `here` for the next edge, so each vertex is on the same side for both edges.
        there = _wrap_longitude(lon_to - lon)
        there += 360 * math.floor((here + lon_by - there) / 360 + 0.5)
        if here <= 0 < there:
            turns += sign * side > 0
        elif there <= 0 < here:
            turns -= sign * side < 0
    return turns != 0


# The first end; the normal of the edge's plane; at each end the direction to the other; both longitudes and
# the way from one to the other; for an edge to or over a pole, on which side of it every point is, else 0.
Edge: TypeAlias = tuple[Vector, Vector, Vector, Vector, float, float, float, float]


@lru_cache(maxsize=1024)
def _edges(polygon: Polygon) -> tuple[list[Edge], bool]:
    """Return the edges, and whether the polygon goes around the South Pole."""
    edges: list[Edge] = []
    longitudes = _longitudes(polygon.points)
    vectors = [_vector(lat, lon) for lat, lon in polygon.points]
    along = weight = 0.0
    touches_north = touches_south = False
    for i, end in enumerate(vectors):
        start = vectors[i - 1]
        lat_from, lat_to = polygon.points[i - 1][0], polygon.points[i][0]
        lon_from = longitudes[i - 1]
        lon_by = _wrap_longitude(longitudes[i] - lon_from)
        # The cross product of the ends, computed so that it stays accurate for ends close together.
        normal = _unit_vector(
            _cross(
                (start[0] + end[0], start[1] + end[1], start[2] + end[2]),
                (end[0] - start[0], end[1] - start[1], end[2] - start[2]),
            )
        )
        towards, back = _cross(normal, start), _cross(end, normal)
        if polygon.points[i - 1] == polygon.points[i] or normal == (0.0, 0.0, 0.0):
            towards = back
        pole = _pole(lat_from, lat_to, lon_by)
        polar = -pole if lon_by > 0 else pole
        edges.append((start, normal, towards, back, lon_from, longitudes[i], lon_by, polar))
        along += lon_by
        weight += lon_by * (start[2] + end[2])
        touches_north = touches_north or pole > 0
        touches_south = touches_south or pole < 0
    if abs(along) < HALF_TURN or touches_north:
        return edges, False
    return edges, touches_south or along * weight < 0


def _pole(lat_from: float, lat_to: float, lon_by: float) -> float:
    """Return 1.0 for an edge to, from or straight over the North Pole, -1.0 for the South Pole, else 0.0."""
    if abs(lat_from) == NORTH:
        return math.copysign(1.0, lat_from)
    if abs(lat_to) == NORTH:
        return math.copysign(1.0, lat_to)
    if abs(lon_by) == HALF_TURN and lat_from + lat_to != 0:
        return math.copysign(1.0, lat_from + lat_to)
    return 0.0


def _longitudes(points: tuple[Point, ...]) -> list[float]:
    """Return the vertices' longitudes; a pole has none of its own and gets that of the vertex before it."""
    longitudes = [lon for _, lon in points]
    count = len(points)
    first = next((i for i, (lat, _) in enumerate(points) if abs(lat) != NORTH), 0)
    for i in range(first + 1, first + count):
        if abs(points[i % count][0]) == NORTH:
            longitudes[i % count] = longitudes[i % count - 1]
    return longitudes


def _in_rough_box(lat0: float, lon0: float, radius: float, lat: float, lon: float) -> bool:
    if not (math.isfinite(lat) and math.isfinite(lon)):
        return False
    if abs(lat - lat0) > math.degrees(radius / EQUATOR):
        return False
    cosine = math.cos(math.radians(lat0))
    if cosine <= 0:
        return True
    return abs(_wrap_longitude(lon - lon0)) <= math.degrees(radius / EQUATOR / cosine)


def distance(lat0: float, lon0: float, lat: float, lon: float) -> float:
    """Return the metres between two points."""
    apart = abs(_wrap_longitude(lon - lon0))
    one, two = math.radians(lat0), math.radians(lat)
    if apart <= MERIDIAN_DEGREES_MAX:
        return abs(_meridian(two) - _meridian(one))
    if apart >= 180 - MERIDIAN_DEGREES_MAX:
        sign = -1 if one + two < 0 else 1
        return abs(2 * sign * _meridian(math.pi / 2) - _meridian(one) - _meridian(two))
    sine1, sine2 = math.sin(one), math.sin(two)
    cosine = sine1 * sine2 + math.cos(one) * math.cos(two) * math.cos(math.radians(apart))
    cosine = max(-1.0, min(1.0, cosine))
    arc = math.acos(cosine)
    sine = math.sin(arc)
    near = (arc + 3 * sine) / (1 - cosine) if cosine < 1 else 0.0
    far = (arc - 3 * sine) / (1 + cosine) if cosine > -1 else 0.0
    correction = near * (sine1 - sine2) ** 2 + far * (sine1 + sine2) ** 2
    return EQUATOR * (arc - FLATTENING / 4 * correction)


def _meridian(latitude: float) -> float:
    """Return the metres along a meridian from the equator, to first order."""
    return (
        EQUATOR
        / (1 + _THIRD_FLATTENING)
        * (latitude - 1.5 * _THIRD_FLATTENING * math.sin(2 * latitude))
    )


def _wrap_longitude(degrees: float) -> float:
    """Return the same difference of longitudes in (-180, 180]."""
    if -180 < degrees <= 180:
        return degrees
    return 180 - (180 - degrees) % 360


def _vector(lat: float, lon: float) -> Vector:
    latitude, longitude = math.radians(lat), math.radians(lon)
    cosine = math.cos(latitude)
    return cosine * math.cos(longitude), cosine * math.sin(longitude), math.sin(latitude)


def _dot(one: Vector, two: Vector) -> float:
    return one[0] * two[0] + one[1] * two[1] + one[2] * two[2]


def _cross(one: Vector, two: Vector) -> Vector:
    return (
        one[1] * two[2] - one[2] * two[1],
        one[2] * two[0] - one[0] * two[2],
        one[0] * two[1] - one[1] * two[0],
    )


def _unit_vector(vector: Vector) -> Vector:
    length = math.hypot(*vector)
    return vector if length == 0 else (vector[0] / length, vector[1] / length, vector[2] / length)
