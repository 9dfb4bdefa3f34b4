"""Filters under names: payloads, metadata, many names on one filter, and the errors of wrong types."""

from __future__ import annotations

import threading

import pytest

from virta.errors import EventError, FilterError
from virta.filters import parse
from virta.match import Compiled, Match, Matcher, compile_filter
from virta.match.names import METADATA_MEMBERS_MAX, NAME_CHARS_MAX

PAID = {"data": {"status": "paid"}}


@pytest.fixture
def matcher(engine):
    return Matcher(engine=engine)


def test_text_and_objects_are_filters_of_a_dialect(matcher):
    """add() takes the text or object of any dialect, a Filter and a Compiled: all give one id."""
    ids = {
        matcher.add("../type=order"),
        matcher.add("type = 'order'", dialect="cesql"),
        matcher.add({"exact": {"type": "order"}}, dialect="cloudevents"),
        matcher.add('{"exact": {"type": "order"}}', dialect="cloudevents"),
        matcher.add(parse("../type=order")),
        matcher.add(compile_filter(parse("../type=order"))),
    }

    assert len(ids) == len(matcher) == 1
    assert matcher.match({"type": "order"}) == list(ids)


def test_a_name_is_the_id(matcher):
    """A filter added under a name matches under it, and get() returns its payload and metadata."""
    assert (
        matcher.add("status=paid", id="mine", payload={"to": "x"}, metadata={"tenant": "a"})
        == "mine"
    )

    assert matcher.match(PAID) == ["mine"]
    assert "mine" in matcher
    assert matcher.names() == ["mine"]
    found = matcher.get("mine")
    assert (found.id, found.payload, found.metadata) == ("mine", {"to": "x"}, {"tenant": "a"})
    assert found.filter == parse("status=paid")
    assert found.filter_id == parse("status=paid").id
    assert matcher.number_of("mine") == matcher.number_of(found.filter_id)


def test_many_names_on_one_filter(matcher):
    """Equal filters under different names are one filter in the index; each name goes by itself."""
    for name in ("a", "b", "c"):
        matcher.add("status=paid", id=name, payload=name)

    assert len(matcher) == 1
    assert sorted(matcher.match(PAID)) == ["a", "b", "c"]
    assert sorted(matcher.match_many([PAID, {}])[0]) == ["a", "b", "c"]
    assert matcher.remove("b")
    assert not matcher.remove("b")
    assert sorted(matcher.match(PAID)) == ["a", "c"]
    assert matcher.remove("a")
    assert matcher.remove("c")
    assert len(matcher) == 0
    assert matcher.match(PAID) == []


def test_named_and_unnamed_together(matcher):
    """A filter added with and without a name matches under both; removing one leaves the other."""
    unnamed = matcher.add("status=paid")
    matcher.add("status=paid", id="mine")
    matcher.add("status=paid")
    assert sorted(matcher.match(PAID)) == sorted([unnamed, "mine"])

    assert matcher.remove(unnamed)
    assert sorted(matcher.match(PAID)) == sorted([unnamed, "mine"])
    assert matcher.remove(unnamed)
    assert not matcher.remove(unnamed)
    assert unnamed not in matcher
    assert matcher.match(PAID) == ["mine"]
    matcher.add("status=paid")
    assert matcher.remove("mine")
    assert matcher.match(PAID) == [unnamed]


def test_a_name_again_replaces(matcher):
    """Adding under a name in use replaces filter, payload and metadata."""
    matcher.add("status=paid", id="mine", payload=1)
    matcher.add("status=open", id="mine", payload=2)

    assert matcher.match(PAID) == []
    assert matcher.match({"data": {"status": "open"}}) == ["mine"]
    assert matcher.get("mine").payload == 2
    assert len(matcher) == 1
    matcher.add("status=open", id="mine", payload=3)
    assert matcher.get("mine").payload == 3
    assert matcher.remove("mine")
    assert len(matcher) == 0


def test_metadata_restricts(matcher):
    """`where` keeps names whose metadata has every member; filters without a name have none."""
    matcher.add("status=paid", id="a", metadata={"tenant": 1, "plan": "x"})
    matcher.add("status=paid", id="b", metadata={"tenant": 2, "plan": "x"})
    matcher.add("status=paid", id="c")
    unnamed = matcher.add("status=paid")

    assert matcher.match(PAID, where={"tenant": 1}) == ["a"]
    assert sorted(matcher.match(PAID, where={"plan": "x"})) == ["a", "b"]
    assert matcher.match(PAID, where={"plan": "x", "tenant": 2}) == ["b"]
    assert matcher.match(PAID, where={"region": None}) == []
    assert sorted(matcher.match(PAID, where={})) == sorted(["a", "b", "c", unnamed])


def test_limit_and_first(matcher):
    """`limit` bounds the answer, `first` is one of it."""
    names = [matcher.add("status=paid", id=f"n{i}", metadata={"i": i}) for i in range(5)]

    assert len(matcher.match(PAID, limit=3)) == 3
    assert set(matcher.match(PAID, limit=3)) < set(names)
    assert matcher.match(PAID, limit=0) == []
    assert matcher.first(PAID) in names
    assert matcher.first(PAID, where={"i": 3}) == "n3"
    assert matcher.first({}) is None


def test_why(matcher):
    """`why` gives the payload and the conditions that decided, for objects and JSON."""
    matcher.add("status=paid&total=>9", id="mine", payload=7)
    event = {"data": {"status": "paid", "total": 12}}

    (match,) = matcher.match(event, why=True)

    assert isinstance(match, Match)
    assert (match.id, match.payload) == ("mine", 7)
    assert match.reasons == [
        'data.status should equal "paid": it is "paid"',
        "data.total should be > 9: it is 12",
    ]
    assert matcher.match(b'{"data": {"status": "paid", "total": 12}}', why=True) == [match]
    assert matcher.match({}, why=True) == []


def test_why_of_unnamed_filters(matcher):
    """A filter added as text explains itself without a name; one added as a Filter is only an id."""
    text = matcher.add("status=paid")
    bare = matcher.add(parse("status=!open"))

    found = {match.id: match.reasons for match in matcher.match(PAID, why=True)}

    assert found == {text: ['data.status should equal "paid": it is "paid"'], bare: []}
    assert matcher.get(text).filter == parse("status=paid")
    assert matcher.get(bare).filter is None
    assert matcher.get("nobody") is None


@pytest.mark.parametrize(
    ("filter_", "message"),
    [
        ({"equals": {"a": 1}}, 'did you mean dialect "koncorde"'),
        (5, "a query string is a text, got int"),
        (None, "a query string is a text, got NoneType"),
    ],
)
def test_what_is_no_filter(matcher, filter_, message):
    """A wrong type is a FilterError that names it."""
    with pytest.raises(FilterError, match=message):
        matcher.add(filter_)

    assert len(matcher) == 0


@pytest.mark.parametrize("name", ["", 5, "x" * (NAME_CHARS_MAX + 1), "0" * 64, b"x"])
def test_bad_names(matcher, name):
    """Names are short texts that cannot be confused with the ids of filters."""
    with pytest.raises(FilterError) as caught:
        matcher.add("a=1", id=name)

    assert caught.value.code == "bad_name"
    assert len(matcher) == 0


@pytest.mark.parametrize(
    "metadata", [5, {"a": []}, {1: 2}, {str(i): i for i in range(METADATA_MEMBERS_MAX + 1)}]
)
def test_bad_metadata(matcher, metadata):
    """Metadata are few texts with scalars."""
    with pytest.raises(FilterError) as caught:
        matcher.add("a=1", id="x", metadata=metadata)

    assert caught.value.code == "bad_metadata"


def test_payload_needs_a_name(matcher):
    """A payload without a name would be lost: it is an error."""
    with pytest.raises(FilterError, match="need an id"):
        matcher.add("a=1", payload=5)


@pytest.mark.parametrize("event", [5, None, 1.5, True, {1, 2}, object()])
def test_what_is_no_event(matcher, event):
    """A value that can be no event is an EventError, alone and in a list with its position."""
    with pytest.raises(EventError, match="an event is an object") as caught:
        matcher.match(event)
    assert caught.value.code == "event_type"
    with pytest.raises(EventError, match="event 1 is an object"):
        matcher.match_many([{}, event])


@pytest.mark.parametrize("where", [5, "tenant", [1], {"tenant": []}, {1: 2}])
def test_what_is_no_restriction(matcher, where):
    """A `where` that no metadata can have is an error, not an empty answer."""
    with pytest.raises(FilterError, match="where") as caught:
        matcher.match(PAID, where=where)
    assert caught.value.code == "bad_metadata"
    with pytest.raises(FilterError, match="where"):
        matcher.first(PAID, where=where)


def test_true_is_not_one(matcher):
    """A restriction tells true from 1 and false from 0, as JSON does; 1 and 1.0 are one number."""
    for name, value in (("one", 1), ("true", True), ("zero", 0), ("false", False)):
        matcher.add("status=paid", id=name, metadata={"tenant": value})

    found = {
        repr(value): matcher.match(PAID, where={"tenant": value})
        for value in (1, 1.0, True, 0, False)
    }

    assert found == {
        "1": ["one"],
        "1.0": ["one"],
        "True": ["true"],
        "0": ["zero"],
        "False": ["false"],
    }


@pytest.mark.parametrize("limit", ["x", -1, 1.5, True])
def test_what_is_no_limit(matcher, limit):
    """A limit is a whole number from 0."""
    with pytest.raises(ValueError, match="expected a whole number from 0"):
        matcher.match(PAID, limit=limit)


def test_lists_are_not_single_values(matcher):
    """One filter is no list of filters, and one event no list of events."""
    for one in ("status=paid", b"status=paid", {"equals": {"a": 1}}, 5, None):
        with pytest.raises(FilterError, match="filters are a list"):
            matcher.add_many(one)
    assert len(matcher) == 0
    with pytest.raises(EventError, match="events are a list"):
        matcher.match_many({"data": {"status": "paid"}})


@pytest.mark.parametrize("id_", [5, None, b"x"])
def test_what_is_no_id(matcher, id_):
    """An id that is no text is an error wherever one is asked for."""
    for call in (matcher.get, matcher.number_of, matcher.remove):
        with pytest.raises(FilterError, match="an id is a text"):
            call(id_)
    assert id_ not in matcher


def test_numbers_that_no_filter_has(matcher):
    """id_of() of a number without a filter is None, in an empty matcher too; a number is an integer."""
    for _ in range(2):
        assert [matcher.id_of(n) for n in (0, -1, 7, 2**32, 2**70)] == [None] * 5
        with pytest.raises(TypeError):
            matcher.id_of("1")
        matcher.add("status=paid", id="mine")


def test_only_filters_compile():
    """compile_filter() says that it takes no text."""
    for odd in ("status=paid", {"equals": {"a": 1}}, 5):
        with pytest.raises(FilterError, match="expected a Filter"):
            compile_filter(odd)


def test_names_from_many_threads(matcher):
    """Threads that add and remove names of one filter leave exactly the names that stay."""
    matcher.add("status=paid", id="steady")

    def churn(number):
        for turn in range(60):
            matcher.add("status=paid", id=f"{number}")
            assert "steady" in matcher.match(PAID)
            if turn % 2:
                matcher.remove(f"{number}")

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert matcher.match(PAID) == ["steady"]
    assert matcher.remove("steady")
    assert len(matcher) == 0


def test_stats_count_names(matcher):
    """stats() has the number of names beside that of filters."""
    for name in ("a", "b"):
        matcher.add("status=paid", id=name)

    assert (matcher.stats()["filters"], matcher.stats()["names"]) == (1, 2)


def test_compiled_has_its_canonical_form():
    """A compiled filter carries the text whose hash is its id."""
    compiled = compile_filter(parse("a=1"))

    assert isinstance(compiled, Compiled)
    assert compiled.canonical == parse("a=1").canonical()
