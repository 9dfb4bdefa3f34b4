"""The matcher's own methods: counting, numbers, outputs, statistics, errors."""

from __future__ import annotations

import pickle

import pytest

from virta.errors import EventError, FilterError
from virta.filters import Filter, parse
from virta.filters.tree import Condition
from virta.filters.values import Regexp
from virta.match import Matcher, compile_filter
from virta.match.engine import make_engine
from virta.match.events import TEXT_BYTES_MAX

ORDER = {"equals": {"type": "order"}}
CHEAP = {"range": {"price": {"lt": 10}}}


def koncorde(source):
    return parse(source, "koncorde")


def test_equal_filters_share_one_id_and_are_counted(engine):
    """A filter stays until it was removed as often as it was added, whatever its spelling."""
    matcher = Matcher(engine=engine)
    one = matcher.add(koncorde({"and": [ORDER, CHEAP]}))
    two = matcher.add(koncorde({"and": [CHEAP, ORDER]}))

    assert one == two
    assert len(matcher) == 1
    assert matcher.remove(one)
    assert matcher.match({"type": "order", "price": 5}) == [one]
    assert matcher.remove(one)
    assert matcher.match({"type": "order", "price": 5}) == []
    assert one not in matcher


def test_ids_are_the_filters_own(engine):
    """The id is the filter's, so it can be known before and after."""
    matcher = Matcher(engine=engine)
    filter_ = koncorde(ORDER)

    assert matcher.add(filter_) == filter_.id == Matcher.validate(ORDER, "koncorde")
    assert filter_.id in matcher
    assert matcher.ids() == [filter_.id]
    assert "no such id" not in matcher
    assert 5 not in matcher


@pytest.mark.parametrize("id_", ["", "zz", "00" * 32, "AB" * 32, "00 " * 32])
def test_removing_the_unknown_is_no_error(engine, id_):
    """remove() of an unknown id returns False and changes nothing."""
    assert Matcher(engine=engine).remove(id_) is False


def test_compiled_filters_can_be_kept(engine):
    """A compiled filter survives pickling and can be added anywhere."""
    compiled = pickle.loads(pickle.dumps(compile_filter(koncorde({"or": [ORDER, CHEAP]}))))
    matcher = Matcher(engine=engine)
    matcher.add(compiled)

    assert matcher.match({"price": 1}) == [compiled.id]


def test_numbers_lead_to_ids_and_back(engine):
    """uint32 output speaks of the same filters."""
    matcher = Matcher(engine=engine)
    ids = matcher.add_many([koncorde(ORDER), koncorde(CHEAP)])
    numbers, offsets = matcher.match_many([{"type": "order"}, {}, {"price": 1}], output="uint32")

    assert (numbers.format, offsets.format) == ("I", "I")
    assert list(offsets) == [0, 1, 1, 2]
    assert [matcher.id_of(n) for n in numbers] == ids
    assert [matcher.number_of(id_) for id_ in ids] == list(numbers)
    assert matcher.id_of(4_000_000_000) is None
    assert matcher.number_of("x") is None


def test_every_kind_of_input(engine):
    """Objects, bytes, text, bytearrays, memoryviews, lists of them, and buffers of lines."""
    matcher = Matcher(engine=engine)
    id_ = matcher.add(koncorde(ORDER))
    text = '{"type": "order"}'
    data = text.encode()

    for event in ({"type": "order"}, data, text, bytearray(data), memoryview(data)):
        assert matcher.match(event) == [id_]
    for events in (
        [data, data],
        [text, {"type": "order"}],
        (data, bytearray(data)),
        data + b"\n\n  \r\n" + data + b"\n",
        text + "\n" + text,
        memoryview(data + b"\n" + data),
    ):
        assert matcher.match_many(events) == [[id_], [id_]]
    assert matcher.match_many([]) == matcher.match_many(b"") == []


def test_everything_and_nothing(engine):
    """The filter that always holds is found by any event, the one that never does by none."""
    matcher = Matcher(engine=engine)
    everything = matcher.add(koncorde({}))
    matcher.add(koncorde({"nothing": True}))

    assert len(matcher) == 2
    for event in ({}, {"a": 1}, [], b"3", "null"):
        assert matcher.match(event) == [everything]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"nul", b'{"a": NaN}', b"[Infinity]", b'{"a": 1}x', b"\xff", b"\xef\xbb\xbf{}"],
)
def test_bad_json_is_refused(engine, data):
    """Invalid JSON is an EventError that names the event and quotes it."""
    matcher = Matcher(engine=engine)
    matcher.add(koncorde(ORDER))

    with pytest.raises(EventError, match="event 0 is not JSON") as caught:
        matcher.match(data)
    assert caught.value.code == "event_not_json"
    with pytest.raises(EventError, match="event 2"):
        matcher.match_many([b"{}", b"[]", data])


def test_events_too_large_are_refused(engine):
    """An event over 64 MiB is refused with a clear error, alone and in a batch."""
    matcher = Matcher(engine=engine)
    matcher.add(parse({"equals": {"a": 1}}, "koncorde"))
    allowed = b'{"a": 1}' + b" " * (TEXT_BYTES_MAX - 8)
    assert len(matcher.match(allowed)) == 1
    with pytest.raises(EventError, match="at most 67108864") as caught:
        matcher.match_many([b"{}", allowed + b" "])
    assert caught.value.code == "event_too_large"
    assert "event 1 " in str(caught.value)


@pytest.mark.parametrize("call", [{"output": "lists"}, {"output": "uint8"}])
def test_unknown_output_is_refused(engine, call):
    """An unknown output is an error."""
    with pytest.raises(ValueError, match="expected ids or uint32"):
        Matcher(engine=engine).match_many([], **call)


def test_wrong_types_are_refused(engine):
    """What is no filter, id or event is an error that names it."""
    matcher = Matcher(engine=engine)
    with pytest.raises(FilterError, match="an id is a text, got int 5"):
        matcher.remove(5)
    with pytest.raises(EventError, match="a list, or one buffer of JSON lines, got int 5"):
        matcher.match_many(5)
    with pytest.raises(EventError, match="event 1 is an object"):
        matcher.match_many([{}, 5])
    with pytest.raises(FilterError, match="a query string is a text, got int"):
        matcher.add(5)


def test_unknown_engine_is_refused():
    """An unknown engine is an error."""
    with pytest.raises(ValueError, match="expected one of auto, native, plain"):
        Matcher(engine="fast")
    assert make_engine("auto").name in ("native", "plain")


def test_validate_refuses_what_is_no_filter():
    """validate() raises what parse() raises, and adds nothing."""
    with pytest.raises(FilterError):
        Matcher.validate({"equals": {}}, "koncorde")


def test_statistics_count(engine):
    """stats() returns how many filters, conjunctions, paths and bytes there are."""
    matcher = Matcher(engine=engine)
    matcher.add(koncorde({"or": [ORDER, CHEAP]}))
    matcher.add(koncorde({"not": ORDER}))
    stats = matcher.stats()

    assert stats["engine"] == engine
    assert (stats["filters"], stats["conjunctions"], stats["unindexed"]) == (2, 3, 1)
    assert stats["bytes"] > 0
    assert stats["bytes_per_filter"] == round(stats["bytes"] / 2, 1)


def test_documents_are_not_changed(engine):
    """Matching leaves the event as it was."""
    matcher = Matcher(engine=engine)
    matcher.add(koncorde({"match": {"a": {"b": [1]}}}))
    event = {"a": {"b": [1, 2]}, "c": "é"}

    assert len(matcher.match(event)) == 1
    assert event == {"a": {"b": [1, 2]}, "c": "é"}


def test_patterns_come_and_go(engine):
    """However many patterns were added and removed since, a value finds those that are there, and no others."""
    matcher = Matcher(engine=engine)
    event = {"data": {"name": "abcabc"}}
    kept = matcher.add(pattern("b.a"))
    for round_ in range(3):
        numbers = range(600 * round_, 600 * round_ + 600)
        ids = [matcher.add(pattern(f"b.{'ax'[n % 2]}|q{n}")) for n in numbers]
        assert set(matcher.match(event)) == {kept, *ids[::2]}
        for id_ in ids:
            assert matcher.remove(id_)
        assert matcher.match(event) == [kept]


def pattern(text):
    return Filter(Condition(("data", "name"), "regexp", Regexp(text)))
