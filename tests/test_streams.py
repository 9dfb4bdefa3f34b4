"""Stream ids and prefix routing, against Subtub's recorded behaviour and a naive model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virta.errors import StreamIdError
from virta.streams import StreamIndex, canonical_stream_id, parse_stream_id, streams_match

VECTORS = [
    json.loads(line)
    for line in (Path(__file__).parent / "vectors" / "subtub-vectors.jsonl")
    .read_text()
    .splitlines()
]
IDS = [v for v in VECTORS if "stream_id" in v]
ROUTES = [v for v in VECTORS if "subscriptions" in v]

ids = (
    st.lists(st.sampled_from(["", "a", "b", "ab"]), min_size=1, max_size=4)
    .map(lambda parts: ":".join(parts) + ":")
    .filter(lambda text: text.strip(":"))
)


def test_every_vector_is_of_a_known_kind():
    """No vector is left out by how the two lists are picked."""
    assert len(IDS) + len(ROUTES) == len(VECTORS) == 190


@pytest.mark.parametrize("vector", IDS, ids=lambda v: v["stream_id"][:20])
def test_validity_and_canonical_form(vector):
    """An id is valid with a colon and a non-empty segment; empty segments at its end vanish."""
    if vector["valid"]:
        assert canonical_stream_id(parse_stream_id(vector["stream_id"])) == vector["canonical"]
    else:
        with pytest.raises(StreamIdError):
            parse_stream_id(vector["stream_id"])


@pytest.mark.parametrize("vector", ROUTES, ids=range(len(ROUTES)))
def test_deliveries(vector):
    """One copy per matching subscription; ids equal in canonical form count once."""
    index: StreamIndex[str] = StreamIndex()
    for text in vector["subscriptions"]:
        index.add(parse_stream_id(text), "me")

    found = index.route(parse_stream_id(vector["published"]))

    assert len(found) == vector["deliveries"]


@given(st.lists(st.tuples(ids, st.integers(0, 3)), max_size=12), ids, st.data())
def test_index_agrees_with_comparing_each_pair(pairs, published, data):
    """The tree finds exactly what comparing every subscription finds, also after removals."""
    index: StreamIndex[int] = StreamIndex()
    kept = {(parse_stream_id(text), who) for text, who in pairs}
    for segments, who in kept:
        assert index.add(segments, who)
        assert not index.add(segments, who)
    removed = data.draw(st.sets(st.sampled_from(sorted(kept)))) if kept else set()
    for segments, who in removed:
        assert index.remove(segments, who)
        assert not index.remove(segments, who)
    wanted = parse_stream_id(published)

    found = index.route(wanted)

    expected = [who for segments, who in kept - removed if streams_match(segments, wanted)]
    assert sorted(found) == sorted(expected)
    assert len(index) == len(kept - removed)


def test_an_emptied_index_holds_nothing():
    """Removing the last subscription prunes the whole path, so long-lived servers do not grow."""
    index: StreamIndex[int] = StreamIndex()
    segments = parse_stream_id("a:b:c")
    index.add(segments, 1)

    index.remove(segments, 1)

    assert index._root.children == {}


def test_the_seeds_example():
    """Two subscribers, eight messages: which receive what, as in Subtub's document."""
    index: StreamIndex[str] = StreamIndex()
    for text in ("first:second", "second:first"):
        index.add(parse_stream_id(text), "A")
    index.add(parse_stream_id("first:"), "B")
    published = ["first:", "first:second", "first:second:", "first:second:third", "first:third"]
    published += ["second:", "second:first", "second:third"]

    received = {"A": [], "B": []}
    for number, text in enumerate(published, 1):
        for who in index.route(parse_stream_id(text)):
            received[who].append(number)

    assert received == {"A": [1, 2, 3, 4, 6, 7], "B": [1, 2, 3, 4, 5]}


def test_a_very_deep_id_does_not_recurse():
    """Ten thousand segments are walked without recursion."""
    index: StreamIndex[int] = StreamIndex()
    deep = parse_stream_id("a:" * 10_000)
    index.add(deep, 1)

    assert index.route(("a",)) == [1]
    assert index.route(deep) == [1]
