"""Points, distances and shapes on the ellipsoid."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from strategies import boxes, latitudes, longitudes, points, polygons, radii

from virta.filters.geo import distance, in_annulus, in_box, in_circle, in_polygon, read_point
from virta.filters.tree import Annulus, Box, Circle, Polygon

SQUARE = Polygon(((0.0, 0.0), (0.0, 10.0), (10.0, 10.0), (10.0, 0.0)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 2], (1, 2)),
        (["1", " 2abc"], (1, 2)),
        ([[5], "3"], (5, 3)),
        ("1.5, -2", (1.5, -2)),
        ("1e1,.5", (10, 0.5)),
        ("0x10,1", (0, 1)),
        ({"lat": 1, "lon": "2"}, (1, 2)),
        ({"lat": 1, "lon": 2, "latLon": [3, 4]}, (1, 2)),
        ({"latLon": [1, 2]}, (1, 2)),
        ({"lat_lon": "1,2"}, (1, 2)),
        ({"latLon": {"lat": 1, "lon": 2, "more": 3}}, (1, 2)),
        ({"latLon": [1, 2], "lat_lon": [3, 4]}, (3, 4)),
        (None, None),
        ("", None),
        (0, None),
        (True, None),
        (5, None),
        ([1], None),
        ([1, 2, 3], None),
        ([None, 1], None),
        ([True, 1], None),
        ([{}, 1], None),
        ("1,2,3", None),
        ("x,y", None),
        ("abc", None),
        ("ABCD", None),
        ({"lat": 1}, None),
        ({"latLon": None}, None),
        ({"latLon": 5}, None),
        ({"latLon": {"latLon": [1, 2]}}, None),
        ({"lat": "x", "lon": 1, "latLon": [1, 2]}, None),
        ([math.nan, 1], None),
    ],
)
def test_read_point(value, expected):
    """Every notation, and what is none."""
    assert read_point(value) == expected


def test_geohash():
    """The centre of the cell; letters that are no digits count as 0; length does not matter."""
    lat, lon = read_point("ezs42")
    assert (round(lat, 3), round(lon, 3)) == (42.605, -5.603)
    assert read_point("aaaa") == read_point("0000")
    assert read_point("0" * 1_000_000) == (-90.0, -180.0)


def test_distance_is_ellipsoidal():
    """A degree of the meridian is shorter at the equator than of the equator itself."""
    assert distance(0, 0, 0, 1) == pytest.approx(111_319.49, abs=0.5)
    assert distance(0, 0, 1, 0) == pytest.approx(110_574.4, abs=5)
    assert distance(48.8566, 2.3522, 51.5074, -0.1278) == pytest.approx(343_923, abs=20)
    assert distance(10, 0, 10, 0) == 0
    assert distance(10, 179.9, 10, -179.9) == distance(10, 0, 10, 0.2)
    assert distance(80, 0, 80, 180) == pytest.approx(2_233_800, rel=0.01)


@settings(max_examples=200, deadline=None)
@given(points, points)
def test_distance_is_a_distance(one, two):
    """Symmetric, not negative, and within 0.6 % of the sphere's."""
    metres = distance(*one, *two)

    assert metres == pytest.approx(distance(*two, *one), rel=1e-9, abs=1e-6)
    assert metres >= 0
    lat1, lon1, lat2, lon2 = map(math.radians, (*one, *two))
    half = math.sin((lat2 - lat1) / 2) ** 2
    half += math.cos(lat1) * math.cos(lat2) * math.sin((lon2 - lon1) / 2) ** 2
    sphere = 2 * 6_371_009 * math.asin(min(1, math.sqrt(half)))
    assert metres == pytest.approx(sphere, rel=0.007, abs=1)


@settings(max_examples=200, deadline=None)
@given(points, radii, latitudes, longitudes)
def test_a_ring_is_a_circle_without_its_middle(centre, radius, lat, lon):
    """Ring and circles agree, whatever turn of the globe the longitude is given in."""
    outer, inner = Circle(*centre, radius), Circle(*centre, radius / 2)
    ring = Annulus(*centre, radius / 2, radius)

    assert in_circle(outer, lat, lon) == in_circle(outer, lat, round(lon + 360, 3))
    if in_annulus(ring, lat, lon):
        assert in_circle(outer, lat, lon)
        assert distance(*centre, lat, lon) >= radius / 2
    elif in_circle(outer, lat, lon):
        assert in_circle(inner, lat, lon) or distance(*centre, lat, lon) < radius / 2


@settings(max_examples=200, deadline=None)
@given(boxes, latitudes, longitudes)
def test_boxes_count_longitudes_round_the_globe(box, lat, lon):
    """A point is in a box by any name of its meridian; corners are inside."""
    inside = box.bottom <= lat <= box.top and any(
        box.left <= lon + turn <= box.right for turn in (-720, -360, 0, 360, 720)
    )

    assert in_box(box, lat, lon) == inside
    assert in_box(box, box.top, box.left)
    assert in_box(box, box.bottom, box.right)


def test_box_across_the_antimeridian():
    """170 to 190 takes both sides of 180."""
    box = Box(10.0, 170.0, -10.0, 190.0)

    assert in_box(box, 0, 175)
    assert in_box(box, 0, -175)
    assert not in_box(box, 0, 165)
    assert not in_box(box, 0, -165)
    assert not in_box(box, 0, math.inf)


@pytest.mark.parametrize(
    ("lat", "lon", "inside"),
    [
        (5, 5, True),
        (0, 0, True),
        (0, 5, True),
        (5, 0, True),
        (10, 10, True),
        (-0.1, 5, False),
        (5, 10.1, False),
        (10.02, 5, True),  # the northern edge bulges
        (10.06, 5, False),
        (5, 365, True),
        (math.inf, 5, False),
    ],
)
def test_polygon(lat, lon, inside):
    """Vertices and edges are inside, edges are great circles."""
    assert in_polygon(SQUARE, lat, lon) is inside


def test_polygon_winds_either_way_and_round_itself():
    """Orientation does not matter; what is wound round twice is inside, and so is the rest."""
    star = Polygon(((0.0, 0.0), (10.0, 5.0), (0.0, 10.0), (7.0, 0.0), (7.0, 10.0)))

    assert in_polygon(Polygon(SQUARE.points[::-1]), 5, 5)
    assert in_polygon(star, 5, 5)
    assert in_polygon(Polygon((*SQUARE.points, SQUARE.points[0])), 5, 5)


def test_polygon_across_the_antimeridian():
    """Edges go the short way."""
    polygon = Polygon(((0.0, 170.0), (0.0, -170.0), (10.0, -170.0), (10.0, 170.0)))

    assert in_polygon(polygon, 5, 180)
    assert in_polygon(polygon, 5, -175)
    assert not in_polygon(polygon, 5, 0)


@settings(max_examples=200, deadline=None)
@given(polygons, latitudes, longitudes)
def test_polygon_any(polygon, lat, lon):
    """Orientation and the starting vertex never matter; every vertex is inside."""
    inside = in_polygon(polygon, lat, lon)

    assert in_polygon(Polygon(polygon.points[1:] + polygon.points[:1]), lat, lon) == inside
    assert all(in_polygon(polygon, *vertex) for vertex in polygon.points)
