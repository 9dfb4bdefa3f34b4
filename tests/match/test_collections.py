"""Named indexes: the (index, collection) interface."""

from __future__ import annotations

import pytest

from virta.errors import EventError, FilterError
from virta.match import NamedMatchers

FILTER = {"equals": {"name": "bob"}}


def test_register_tells_what_is_new(engine):
    """The first registration gives a diff with the canonical form, the next False and the same id."""
    named = NamedMatchers(engine=engine)
    first = named.register("i", "c", FILTER)
    again = named.register("i", "c", {"in": {"name": ["bob"]}})

    assert first["diff"]["id"] == first["id"]
    assert (first["diff"]["index"], first["diff"]["collection"]) == ("i", "c")
    assert first["diff"]["filter"] == {"eq": [[{"flat": "name"}], "bob"]}
    assert again == {"id": first["id"], "diff": False}


def test_ids_are_unique_to_their_place(engine):
    """The same filter in two collections has two ids, and each answers for its own."""
    named = NamedMatchers(engine=engine)
    one = named.register("i", "c", FILTER)["id"]
    two = named.register("i", "d", FILTER)["id"]

    assert one != two
    assert named.test("i", "c", {"name": "bob"}) == [one]
    assert named.test("i", "d", {"name": "bob"}) == [two]
    assert named.test("i", "e", {"name": "bob"}) == []
    assert named.get_indexes() == ["i"]
    assert named.get_collections("i") == ["c", "d"]


def test_one_remove_is_enough(engine):
    """Registrations are not counted; the place disappears with its last filter."""
    named = NamedMatchers(engine=engine)
    id_ = named.register("i", "c", FILTER)["id"]
    named.register("i", "c", FILTER)
    other = named.register("i", "c", {})["id"]

    assert named.exists("i", "c")
    assert named.get_filter_ids("i", "c") == [id_, other]
    assert named.remove(id_)
    assert named.test("i", "c", {"name": "bob"}) == [other]
    assert named.remove(other)
    assert not named.exists("i", "c")
    assert named.get_filter_ids("i", "c") == []
    assert not named.has_filter(id_)
    assert named.remove(id_) is False


@pytest.mark.parametrize("collection", ["full", "empty"])
def test_what_is_no_document(engine, collection):
    """A value that is no document is an error, whether filters are registered or not."""
    named = NamedMatchers(engine=engine)
    named.register("i", "full", FILTER)

    with pytest.raises(EventError, match="an event is an object"):
        named.test("i", collection, 5)
    with pytest.raises(FilterError, match="id is a text"):
        named.test("i", collection, {}, document_id=5)


def test_document_id_is_a_field(engine):
    """The id given to test() is the field _id, and wins over one in the document."""
    named = NamedMatchers(engine=engine)
    id_ = named.register("i", "c", {"ids": {"values": ["x"]}})["id"]

    assert named.test("i", "c", {}, "x") == [id_]
    assert named.test("i", "c", {"_id": "y"}, "x") == [id_]
    assert named.test("i", "c", {"_id": "x"}) == [id_]
    assert named.test("i", "c", {"_id": "y"}) == []
    with pytest.raises(FilterError, match="is an object"):
        named.test("i", "c", [], "x")


def test_validate_and_names(engine):
    """What register would refuse, validate refuses; names are short texts."""
    named = NamedMatchers(engine=engine)
    named.validate(FILTER)
    with pytest.raises(FilterError):
        named.validate({"equals": 3})
    for name in ("", None, "x" * 300):
        with pytest.raises(FilterError, match="expected a text"):
            named.register(name, "c", FILTER)
    assert not named.exists("", "c")
