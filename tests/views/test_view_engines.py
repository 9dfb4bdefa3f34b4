"""The native live step against the plain one, which defines what is right; `make fuzz` runs the same tests longer."""

from __future__ import annotations

import json
from array import array
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from virta import native
from virta.errors import ViewError
from virta.event.row_changes import KeyRule, RowChange, event_of, read_change, read_event_change
from virta.filters import parse
from virta.hub.frames import chunk
from virta.log.record import Name, Record
from virta.views.changes import read_changes, read_record
from virta.views.consumer import ViewConsumer
from virta.views.frames import FrameEncoder, ViewFrame
from virta.views.limits import ViewLimits
from virta.views.tables.key_numbers import PlainKeyNumbers
from virta.views.tables.member_sets import PlainMemberSets
from virta.views.tables.table import RowTable
from virta.views.tables.values import ValueCache
from virta.views.view import View, ViewFilter, deliver_all_plain

core = native.load("virta.views._native")
pytestmark = pytest.mark.skipif(core is None, reason="the native step is not built")

# Reading changes.

ORDINARY = [
    b'{"id":"1","source":"/s","subject":"k","data":{"status":"paid"}}',
    b' {\t"subject" : "k" , "data" : [ 1 , { "op" : "d" } ] } ',
    '{"subject":"schlüssel","data":"ä"}'.encode(),
    b'{"subject":"a","subject":"twice","type":"a","data":1,"data":{}}',
    b'{"subject":"k"}',
    b'{"subject":"%b","data":true}' % (b"x" * 1024),
]
LEFT = [
    b'{"subject":"k","data":null}',
    b'{"subject":"k","type":"order.deleted","data":{}}',
    b'{"subject":"k","type":"deleted"}',
    b'{"subject":"k","type":"undeleted"}',
    b'{"subject":"k","data":{"op":"u","source":{},"after":{"a":1}}}',
    b'{"subject":"k","data":{"\\u006fp":"u","source":{},"after":{"a":1}}}',
    b'{"subject":"k","data":{"op":"t","source":{},"before":null}}',
    b'{"subject":"k","data":{"op":"x"}}',
    b'{"subject":"\\u006b","data":{}}',
    b'{"subj\\u0065ct":"k","data":{}}',
    b'{"subject":"","data":{}}',
    b'{"subject":7,"data":{}}',
    b'{"data":{}}',
    b'{"subject":"%b","data":{}}' % (b"x" * 1025),
    b'{"subject":"k","data":1e999}',
    b'{"subject":"k","n":%b}' % (b"9" * 400),
    b'{"subject":"k","type":7}',
    b'{"subject":"k","data":"\xff"}',
    b'{"subject":"k\xff","data":1}',
    b'{"subject":"k","data":%b1%b}' % (b"[" * 2000, b"]" * 2000),
    b'{"subject":"k","data":{}',
    b'{"subject":"k","data":{}}x',
    b"{}",
    b"",
    b"7",
]


@pytest.mark.parametrize("value", ORDINARY + LEFT)
def test_a_change_is_read_as_the_plain_reader_does(value):
    """Ordinary events without it, all others by it."""
    asked = []

    def plain(one):
        asked.append(one)
        return read_event_change(b"", one, KeyRule())

    wanted = [(7, read_event_change(b"", value, KeyRule()))]
    assert core.read_changes([value], 7, RowChange, plain) == wanted
    assert read_changes([value], 7, KeyRule()) == wanted
    assert asked == ([] if value in ORDINARY else [value])


def test_changes_with_a_pointer_as_key():
    values = [b'{"subject":"k","data":{"id":%d}}' % n for n in range(3)]

    changes = read_changes(values, 5, KeyRule("/data/id"))

    assert [(at, change.key) for at, change in changes] == [(5, "0"), (6, "1"), (7, "2")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda some: (
        st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=4), some, max_size=3)
    ),
)
events = st.dictionaries(
    st.sampled_from(["subject", "type", "data", "id", "op", "ä"]),
    json_values
    | st.sampled_from(["k", "deleted", "a.deleted", None])
    | st.fixed_dictionaries(
        {"op": st.sampled_from("cudtr"), "source": json_values},
        optional={"before": json_values, "after": st.just({"a": 1})},
    ),
)


@settings(deadline=None)
@given(events, st.booleans(), st.floats(0, 1), st.none() | st.binary(min_size=1, max_size=1))
def test_changes_are_read_alike(event, ascii_only, place, change):
    """Random events, of which a byte is replaced, too."""
    value = json.dumps(event, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if change:
        at = int(place * (len(value) - 1))
        value = value[:at] + change + value[at + 1 :]

    try:
        wanted = read_event_change(b"", value, KeyRule())
    except UnicodeDecodeError:  # no event is stored like that
        with pytest.raises(UnicodeDecodeError):
            read_changes([value], 3, KeyRule())
        return

    assert read_changes([value, b"{}", value], 3, KeyRule()) == [
        (3, wanted),
        (4, read_event_change(b"", b"{}", KeyRule())),
        (5, wanted),
    ]


@settings(deadline=None)
@given(events, st.booleans(), st.floats(0, 1), st.none() | st.binary(min_size=1, max_size=1))
def test_stored_events_are_known(event, ascii_only, place, change):
    """A value that is known to be an event is what the plain reader makes of its record."""
    event = {"id": "1", "source": "s"} | event
    value = json.dumps(event, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if change:
        at = int(place * (len(value) - 1))
        value = value[:at] + change + value[at + 1 :]
    record = Record(Name(b"c"), Name(b""), value, 7, 0)

    assert core.is_event(b'{"id":"1","source":"/s","data":{"a":[1,"\xc3\xa4"]}}')
    if core.is_event(value):
        assert event_of(record).value == value
        assert read_record(record, KeyRule()) == read_change(record, KeyRule())


# Frames.

frames = st.builds(
    ViewFrame,
    st.sampled_from(["row", "enter", "update", "leave"]),
    st.sampled_from([-2, -1, 0, 7, 2**62]),
    st.text(max_size=12) | st.sampled_from(["42", "a/b", "\x7f", "\x1f", 'q"', "b\\", "ü"]),
    st.sampled_from([-1, 0, 9, 2**62]),
    st.none() | st.binary(max_size=300),
    st.sampled_from(["", "changed", "deleted"]),
    st.none() | st.just({"rows": 1}),
)


@settings(deadline=None)
@given(st.lists(frames, max_size=5), st.booleans())
@example([ViewFrame("update", 1, "k", 0, b"x" * 100_000)] * 3, True)
def test_streams_are_alike(some, chunked):
    """What is not declined has the bytes of the plain encoder."""
    tag = b"0123456789ab"
    try:
        body = b"".join(FrameEncoder(tag.decode()).encode(some))
    except UnicodeEncodeError:  # a lone surrogate, which no key has
        return
    made = core.event_stream(tag, some, chunked)

    if made is None:
        assert any(f.data or f.id == -2 or json.dumps(f.key) != f'"{f.key}"' for f in some)
    else:
        assert made == (chunk(body) if chunked else body)


# Numbers of keys.

NUMBER_KEYS = [f"k{n}" for n in range(150)] + ["", "ä", "\u20ac", "\U0001f600", "\ud800", "x" * 300]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, len(NUMBER_KEYS) - 1)), max_size=400))
@example([(2, at) for at in range(len(NUMBER_KEYS))] + [(0, at) for at in range(0, 150, 3)])
def test_numbers_are_found_alike(steps):
    """Keys get numbers and lose them as a table gives and takes them; a key is in `keys` as long as it has one."""
    keys: list[str | None] = []
    free: list[int] = []
    found, plain = core.KeyNumbers(keys), PlainKeyNumbers(keys)
    for kind, at in steps:
        key = NUMBER_KEYS[at]
        if kind == 0 and key in plain:
            number = plain[key]
            del found[key], plain[key]
            keys[number] = None
            free.append(number)
        elif kind > 1 and key not in plain:
            number = free.pop() if free else len(keys)
            keys[number : number + 1] = [key]
            found[key] = plain[key] = number
        elif kind == 1 and at == 0:
            for one in (found, plain, keys, free):
                one.clear()
        assert len(found) == len(plain)
        assert found.get(key) == plain.get(key)
    for key in NUMBER_KEYS:
        assert (key in found) == (key in plain)
        assert found.get(key, -1) == plain.get(key, -1)
        for one in (found, plain):
            if key not in one:
                with pytest.raises(KeyError):
                    one[key]
                with pytest.raises(KeyError):
                    del one[key]


def test_wrong_numbers_are_refused():
    numbers = core.KeyNumbers([])
    for call, error in (
        (lambda: core.KeyNumbers(()), TypeError),
        (lambda: numbers.get(7), TypeError),
        (numbers.get, TypeError),
        (lambda: b"k" in numbers, TypeError),
        (lambda: numbers.__setitem__("k", -1), OverflowError),
        (lambda: numbers.__setitem__("k", 2**32 - 1), OverflowError),
        (lambda: numbers.__setitem__("k", "1"), TypeError),
    ):
        with pytest.raises(error):
            call()
    numbers["k"] = 7  # a number without a key is found by nobody
    assert "k" not in numbers


# Sets of views.

NOBODY = frozenset()
few = st.integers(0, 9) | st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(st.lists(st.none() | st.lists(st.lists(few, max_size=3), max_size=12), max_size=6))
@example([[[n * 0x10001] for n in range(200)], None, [[7], [0x10001]], [[1, 2], [2, 1], [1, 2]]])
def test_members_are_found_alike(batches):
    """The same views, asked for once; None forgets them."""
    asked, sides = ([], []), (core.MemberSets(), PlainMemberSets())
    for batch in batches:
        if batch is None:
            for side in sides:
                side.clear()
            continue
        flat = array("I", [number for numbers in batch for number in numbers])
        ends = array("I", [0, *accumulate(len(numbers) for numbers in batch)])
        found = []
        for side, keys in zip(sides, asked, strict=True):

            def members_of(key, keys=keys):
                keys.append(key)
                return frozenset([key])

            found.append(side.find(memoryview(flat), memoryview(ends), NOBODY, members_of))

        wanted = [tuple(n) if len(n) > 1 else n[0] if n else None for n in batch]
        assert found[0] == [NOBODY if key is None else {key} for key in wanted]
        assert found[0] == found[1]
        assert asked[0] == asked[1]


def test_wrong_sets_are_refused():
    def find(*arguments):
        sets = core.MemberSets()
        with pytest.raises((TypeError, ValueError, BufferError, ZeroDivisionError)) as error:
            sets.find(*arguments)
        return error.type

    one, ends = array("I", [1]), array("I", [0, 1])
    assert find(one, ends, NOBODY) is TypeError
    assert find(one, ends, set(), frozenset) is TypeError
    assert find([1], ends, NOBODY, frozenset) is TypeError
    assert find(one, [0, 1], NOBODY, frozenset) is TypeError
    for wrong in ([], [1, 1], [0, 2], [0, 1, 0]):
        assert find(one, array("I", wrong), NOBODY, frozenset) is ValueError
    assert find(one, ends, NOBODY, lambda _: {1}) is TypeError
    assert find(one, ends, NOBODY, lambda _: 1 // 0) is ZeroDivisionError


def test_sets_are_forgotten_beyond_a_limit():
    """Different sets are remembered, not any number of them."""
    for sets in (core.MemberSets(), PlainMemberSets()):
        asked = []

        def find(first, last, sets=sets, asked=asked):
            numbers, ends = array("I", range(first, last)), array("I", range(last - first + 1))
            sets.find(memoryview(numbers), memoryview(ends), NOBODY, lambda n: asked.append(n) or NOBODY)  # fmt: skip

        find(0, 65_536)
        find(0, 65_536)
        assert len(asked) == 65_536
        find(65_536, 65_537)
        find(0, 1)
        assert asked[65_536:] == [65_536, 0]


# Values.


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), max_size=6), max_size=9),
    st.integers(0, 600),
)
def test_values_are_put_alike(runs, bytes_max):
    plain, other = ValueCache(bytes_max), ValueCache(bytes_max)
    for run in runs:
        numbers, values = [n for n, _ in run], [b"x" * size for _, size in run]
        plain.put_all_plain(numbers, values)
        core.put_values(other, numbers, values)

        assert (plain.bytes, plain._values, plain._hand) == (
            other.bytes,
            other._values,
            other._hand,
        )


@pytest.mark.parametrize(
    ("numbers", "values", "error"),
    [([-1], [b""], IndexError), ([1], ["text"], TypeError), ([1, 2], [b""], ValueError)],
)
def test_wrong_values_are_refused(numbers, values, error):
    """With an exception of their own, whatever was prefetched for them."""
    with pytest.raises(error):
        core.put_values(ValueCache(300), numbers, values)


def test_wrong_arguments_are_refused():
    table, other = RowTable("c", KeyRule()), RowTable("c", KeyRule())
    other.numbers = PlainKeyNumbers(other.keys)
    change = RowChange(1, "k", b"{}", b"{}")
    for call in (
        lambda: core.set_rows(table, [change], [frozenset()], {}, ViewFrame),
        lambda: core.set_rows(table, [(0, change)], [], {}, ViewFrame),
        lambda: core.set_rows(table, [(0, change)], [{1}], {}, ViewFrame),
        lambda: core.set_rows(table, [("0", change)], [frozenset()], {}, ViewFrame),
        lambda: core.set_rows(table, [(0, RowChange(1, None))], [frozenset()], {}, ViewFrame),
        lambda: core.set_rows(other, [(0, change)], [frozenset()], {}, ViewFrame),
        lambda: core.deliver_all((), 0.0),
        lambda: core.event_stream("tag", [], True),
        lambda: core.read_changes([1], 0, RowChange, repr),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    with pytest.raises(KeyError):  # a view that does not exist
        core.set_rows(table, [(0, change)], [frozenset({7})], {}, ViewFrame)
    assert core.is_event("text") is False


# Rows.

QUERIES = ["a=1", "a=1;b=1", "b=1&a=2", "", "a=>1"]
ROW_FILTERS = [None, "b=1", None, "a=1", None]
rows = st.tuples(st.sampled_from("klmnä"), st.integers(0, 3), st.integers(0, 2))


class Side:
    """A table with views and their consumers under one engine."""

    blocked = False

    def __init__(self, engine, consumers, rows_max):
        limits = ViewLimits(view_rows_max=rows_max, view_ring=5, view_cache_bytes_max=400)
        self.table = RowTable("c", KeyRule(), limits=limits)
        self.native = engine == "native"
        if not self.native:
            self.table.numbers = PlainKeyNumbers(self.table.keys)
        self.written, self.views = [], []
        for number, (query, row_filter) in enumerate(zip(QUERIES, ROW_FILTERS, strict=True)):
            own = None if row_filter is None else parse(row_filter)
            root = "auto" if number % 2 else "event"
            view = View(self.table, ViewFilter(parse(query), own, root))
            view.exact_since = 0
            self.table.index.add(view)
            self.views.append(view)
            for direct in consumers[number]:
                consumer = ViewConsumer(view, self)
                if direct is not None:
                    consumer.output = (self.put, b"tag%d" % number, direct)
                consumer.begin_snapshot()
                consumer.pump()
        self.wants_pump = lambda _: None

    def put(self, payload):
        self.written.append(payload)

    def write_frames(self, frames, payloads):
        self.written += [(f.name, f.id, f.key, f.offset, f.event, f.reason, f.data) for f in frames]

    def step(self, run, removed):
        table = self.table
        changes = []
        for offset, (key, a, b) in enumerate(run, table.position):
            value = json.dumps({"id": "1", "source": "s", "data": {"a": a, "b": b}}).encode()
            kind = 2 if a == 3 else 1
            changes.append((offset, RowChange(kind, key, value, value[:-1] + b',"z":0}')))
        if removed is not None and self.views[removed].number in table.index.views:
            table.index.remove(self.views[removed])
        table.set_rows = table.set_rows_native if self.native else table.set_rows_plain
        touched = table.apply(changes, table.position + len(run))
        (core.deliver_all if self.native else deliver_all_plain)(touched, 2.5)

    def state(self):
        table = self.table
        return (
            self.written,
            table.keys,
            list(table.offsets),
            table.members,
            table.rows,
            table.keyed,
            table.exact_from,
            [(t.offset, t.number, t.previous, t.before) for t in table.ring.since(0)],
            [(v.count, v.row_numbers(), v.hits) for v in self.views],
            [[c.written_at for c in v.consumers] for v in self.views],
        )


outputs = st.lists(st.sampled_from([None, True, False]), max_size=2)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(rows, max_size=12), st.none() | st.integers(0, len(QUERIES) - 1)),
        max_size=8,
    ),
    st.lists(outputs, min_size=len(QUERIES), max_size=len(QUERIES)),
    st.sampled_from([3, 1000]),
)
def test_rows_are_set_alike(steps, consumers, rows_max):
    """Rows, memberships, the ring and every byte for the consumers, with views that are removed, and within a limit."""
    sides = [Side(engine, consumers, rows_max) for engine in ("native", "plain")]
    for run, removed in steps:
        failed = []
        for side in sides:
            try:
                side.step(run, removed)
            except ViewError as error:
                failed.append(error.code)
        if failed:  # the table ends with it
            assert failed == ["too-many-rows"] * 2
            return
        assert sides[0].state() == sides[1].state()
