"""Polygons on both engines: repeated vertices, short edges, both poles, the antimeridian."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from virta.filters.filter import Filter
from virta.filters.geo import in_polygon
from virta.filters.tree import Condition, Polygon
from virta.match import Matcher
from virta.match.engine import make_engine

METRE = 1 / 111_195  # degrees of latitude
SQUARE = ((0.0, 0.0), (0.0, 10.0), (10.0, 10.0), (10.0, 0.0))


def inside(points, lat, lon):
    """The answer of the evaluator, which the native engine must share, for any turn of the globe."""
    polygon = Polygon(tuple(points))
    found = in_polygon(polygon, lat, lon)
    try:
        make_engine("native")
    except ImportError:
        return found
    matcher = Matcher(engine="native")
    matcher.add(Filter(Condition(("p",), "geo_polygon", polygon)))
    assert bool(matcher.match({"p": [lat, lon]})) is found, (points, lat, lon)
    return found


def tangent(pole, lat, lon):
    """Project a point from the globe's centre onto the plane at a pole; None on the far half."""
    if lat * pole <= 0:
        return None
    away = 1 / math.tan(math.radians(abs(lat)))
    return away * math.cos(math.radians(lon)), away * math.sin(math.radians(lon))


def in_plane(corners, x, y):
    """Whether a point is in a plane polygon, and how far from an edge it is at least."""
    turns, near = 0, math.inf
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1], strict=True):
        length = math.hypot(bx - ax, by - ay)
        if length == 0:
            continue
        side = (bx - ax) * (y - ay) - (by - ay) * (x - ax)
        near = min(near, abs(side) / length)
        if ay <= y < by:
            turns += side > 0
        elif by <= y < ay:
            turns -= side < 0
    return turns != 0, near


def ring(rng, pole, count):
    """Vertices round a pole, none half the globe from the next, with repeats now and then."""
    step = 360 / count
    turn = rng.uniform(-180, 180)
    found = []
    for i in range(count):
        lat = pole * rng.uniform(40, 89)
        lon = turn + step * (i + rng.uniform(-0.2, 0.2))
        found += [(lat, lon - 360 if lon > 180 and rng.random() < 0.5 else lon)] * rng.choice(
            [1, 1, 2]
        )
    return found


@pytest.mark.parametrize("pole", [1, -1])
def test_rings_round_a_pole(pole):
    """What is inside is what the projection on the plane at that pole gives; the other half never is."""
    rng = random.Random(7 * pole)
    compared = 0
    for _ in range(150):
        points = ring(rng, pole, rng.randint(3, 7))
        corners = [tangent(pole, *point) for point in points]
        if rng.random() < 0.5:
            points, corners = points[::-1], corners[::-1]
        start = rng.randrange(len(points))
        points = points[start:] + points[:start]
        assert inside(points, pole * 90, rng.uniform(-180, 180))
        for _ in range(12):
            lat, lon = pole * rng.uniform(1, 90), rng.uniform(-360, 360)
            wanted, near = in_plane(corners, *tangent(pole, lat, lon))
            if near > 1e-9:
                assert inside(points, lat, lon) is wanted, (points, lat, lon)
                compared += 1
            assert not inside(points, -lat, lon)
    assert compared > 1500


def test_north_and_south_poles_differ():
    """A ring at 80 degrees has the near pole inside, and little else; either way round."""
    for pole in (1, -1):
        square = [(80.0 * pole, lon) for lon in (0.0, 90.0, 180.0, -90.0)]
        for points in (square, square[::-1], [*square, square[0]]):
            assert inside(points, 85 * pole, 33)
            assert inside(points, 90 * pole, -7)
            assert not inside(points, -85 * pole, 33)
            assert not inside(points, 0, 33)
            assert not inside(points, -90 * pole, 0)


@pytest.mark.parametrize("pole", [90.0, -90.0])
@pytest.mark.parametrize("lon", [0.0, 45.0, 77.0, 180.0, -90.0, 400.0])
@pytest.mark.parametrize("base", [0.0, 60.0, -60.0])
def test_a_pole_as_a_vertex(pole, lon, base):
    """A pole has no longitude: whatever is written, the triangle is the same, wherever it begins."""
    triangle = [(pole, lon), (base, 0.0), (base, 90.0)]
    middle = (pole + base) / 2
    for start in range(3):
        points = triangle[start:] + triangle[:start]
        for some in (points, points[::-1], [*points, points[0]], [*points[:1], *points]):
            assert inside(some, middle, 45)
            assert inside(some, pole, 200)  # the vertex itself, under any longitude
            assert not inside(some, middle, 135)
            assert not inside(some, middle, -135)
            assert not inside(some, middle, -45)
            assert not inside(some, -pole, 45)


@pytest.mark.parametrize("close", [SQUARE[0], SQUARE[2]])
def test_a_repeated_vertex_has_no_halo(close):
    """A closed ring is the ring: a point a millimetre outside the vertex is outside."""
    at = SQUARE.index(close)
    points = [*SQUARE[: at + 1], close, *SQUARE[at + 1 :]]
    away = -1 if at == 0 else 1
    for metres in (0.001, 0.1, 1, 2, 2.7, 3):
        step = away * metres * METRE
        assert not inside(points, close[0] + step, close[1] + step)
    assert inside(points, *close)
    assert not inside([close] * 3, close[0] + METRE, close[1])
    assert inside([close] * 3, *close)


def test_short_edges_end_where_they_end():
    """On the line of an edge of a metre, a metre beyond its end is outside."""
    points = [(50.0, 8.0), (50.0 + METRE, 8.0), (50.0, 8.0 + METRE)]
    for metres in (0.01, 0.5, 1, 2):
        assert not inside(points, 50.0 + METRE + metres * METRE, 8.0)
        assert not inside(points, 50.0 - metres * METRE, 8.0)
    assert inside(points, 50.0 + METRE / 2, 8.0)
    assert inside(points, 50.0 + METRE / 4, 8.0 + METRE / 4)


VERTICES = st.lists(
    st.tuples(
        st.sampled_from([-90.0, -60.0, -10.0, 0.0, 20.0, 55.5, 90.0]),
        st.sampled_from([-180.0, -179.0, -90.0, 0.0, 12.25, 90.0, 179.5, 180.0, 540.0]),
    ),
    min_size=3,
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(VERTICES, st.data())
def test_both_engines_agree(points, data):
    """Whatever the vertices are, and for points on them, near them and anywhere."""
    lat, lon = data.draw(
        st.sampled_from(points) | st.tuples(st.floats(-90, 90), st.floats(-360, 360))
    )
    lat += data.draw(st.sampled_from([0, 1e-5, -1e-5, 1e-12]))
    inside(points, lat, lon)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-60, 60), st.floats(-60, 60)), min_size=3, max_size=6),
    st.data(),
)
def test_repeats_and_the_antimeridian_change_nothing(points, data):
    """Vertices twice, another first vertex, the other way round, another meridian: the same answer."""
    lat, lon = data.draw(st.tuples(st.floats(-70, 70), st.floats(-70, 70)))
    expected = inside(points, lat, lon)
    repeated = [p for p in points for _ in range(data.draw(st.integers(1, 3)))]
    start = data.draw(st.integers(0, len(repeated) - 1))

    assert inside(repeated, lat, lon) is expected
    assert inside(repeated[start:] + repeated[:start], lat, lon) is expected
    assert inside(repeated[::-1], lat, lon) is expected


def test_polygons_move_round_the_globe():
    """Shifted by a longitude, with the points, nothing changes; near the antimeridian neither."""
    rng = random.Random(3)
    for _ in range(200):
        points = [(rng.uniform(-60, 60), rng.uniform(-50, 50)) for _ in range(rng.randint(3, 6))]
        by = rng.choice([180, -180, 130, 360, 171.5])
        moved = [(lat, (lon + by + 180) % 360 - 180) for lat, lon in points]
        for _ in range(5):
            lat, lon = rng.uniform(-70, 70), rng.uniform(-60, 60)
            assert inside(moved, lat, lon + by) is inside(points, lat, lon)
