"""What only the native index has: redistribution, memory, the GIL, its own limits."""

from __future__ import annotations

import ast
import gc
import json
import math
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from randoms import Randoms

from virta.filters import Filter, parse
from virta.filters.tree import And, Condition, Select, ValueRange
from virta.filters.values import Box
from virta.match import Matcher, compile_filter, pattern_sets
from virta.match.engine import make_engine
from virta.native import load
from waiting import wait_until

core = load("virta.match._core")
if core is None:
    pytest.skip("needs the native engine", allow_module_level=True)


def equals(name, value):
    return Condition((name,), "eq", value)


def test_conjunctions_move_when_events_show_a_better_place():
    """A value that nearly every event has stops being where its conjunctions are looked for."""
    matcher = Matcher(engine="native")
    # `user` has many values, so it looks selective; but all events come from one user.
    matcher.add_many(Filter(equals("user", f"u{i}")) for i in range(2000))
    filters = [Filter(And((equals("user", "u0"), equals("page", i)))) for i in range(300)]
    matcher.add_many(filters)
    ranges = [
        Filter(
            And(
                (
                    equals("user", "u0"),
                    equals("day", i % 7),
                    Condition(("n",), "range", ValueRange(i, i + 9)),
                )
            )
        )
        for i in range(300)
    ]
    matcher.add_many(ranges)
    events = [{"user": "u0", "page": i % 400, "day": i % 9, "n": i % 300} for i in range(4000)]

    for start in range(0, len(events), 100):
        matcher.match_many([json.dumps(event).encode() for event in events[start : start + 100]])

    assert matcher.stats()["redistributed"] > 0
    for event in events[:400]:
        wanted = {f.id for f in [*filters, *ranges] if f.matches(event)}
        assert set(matcher.match(event)) - {matcher.match({"user": "u0"})[0]} == wanted
    for filter_ in [*filters, *ranges]:
        assert matcher.remove(filter_.id)
    assert len(matcher.match(events[0])) == 1


def test_the_gil_is_released():
    """While bytes are matched in one thread, Python runs in another."""
    matcher = Matcher(engine="native")
    matcher.add_many(Filter(Condition(("a",), "range", ValueRange(0, i))) for i in range(1, 2000))
    batch = [b'{"a": %d}' % (i % 2000) for i in range(20_000)]
    ticks = 0
    done = threading.Event()

    def match():
        matcher.match_many(batch, output="uint32")
        done.set()

    thread = threading.Thread(target=match)
    thread.start()
    while not done.wait(0.0005):  # needs the GIL to come back
        ticks += 1
    thread.join()

    assert ticks > 3


def test_patterns_are_compiled_when_they_are_added(monkeypatch):
    """Adding builds sets of 256 at most, the background larger ones, matching none; each is compiled a few times."""
    adder, built = threading.current_thread(), []

    class Counted(pattern_sets._Set):
        def __init__(self, numbers, texts):
            built.append((threading.current_thread() is adder, len(numbers)))
            super().__init__(numbers, texts)

    monkeypatch.setattr(pattern_sets, "_Set", Counted)
    matcher = Matcher(engine="native")
    filters = [parse({"regexp": {"t": f"^k.*{i}z"}}, "koncorde") for i in range(3000)]
    matcher.add_many(filters)
    added = [size for here, size in built if here]

    found = set(matcher.match({"t": "k-117z"}))

    assert found == {f.id for f in filters if f.matches({"t": "k-117z"})} != set()
    assert [size for here, size in built if here] == added
    assert max(added) <= pattern_sets.FRESH_MAX * pattern_sets.SMALL_MERGED
    wait_until(lambda: not pattern_sets.BUILDER.running)
    sizes = [size for _, size in built]
    assert max(added) < max(sizes) <= pattern_sets.SET_PATTERNS_MAX
    assert sum(sizes) < 6 * len(filters)
    assert set(matcher.match({"t": "k--117z"})) == found


def test_removed_patterns_leave_the_sets():
    """When most patterns of a path are removed, its sets are built anew without them, in the background."""
    patterns = pattern_sets.PathPatterns()
    for number in range(4000):
        patterns.add(number, f"\0k.*{number}z")
    before = patterns.bytes
    for number in range(3900):
        patterns.remove(number)
    wait_until(lambda: patterns.removed < 2000)
    wait_until(lambda: not pattern_sets.BUILDER.running)

    assert patterns.search("k-3950z", 0) == [3950]
    assert patterns.search("k-3950z", 3951) == []
    assert sum(len(part.numbers) for part in patterns.sets) < 2200
    assert patterns.bytes < before / 2


def test_removing_patterns_one_by_one_costs_little_each(monkeypatch):
    """No removal numbers many patterns anew; what is left is found, by values that were searched before too."""
    changes = [0]

    def counted(self, node, number, text, change=pattern_sets.PatternSets.change):
        changes[0] += 1
        change(self, node, number, text)

    monkeypatch.setattr(pattern_sets.PatternSets, "change", counted)
    matcher = Matcher(engine="native")
    filters = [parse({"regexp": {"t": f"^k.*{i}z"}}, "koncorde") for i in range(3000)]
    matcher.add_many(filters)
    events = [{"t": f"k-{i}z"} for i in (7, 117, 1500, 2999)]
    for keep in (range(0, 3000, 7), range(0, 3000, 49), range(0)):
        kept = {filters[i].id for i in keep}
        for filter_ in filters:
            if filter_.id in kept or filter_.id not in matcher:
                continue
            changes[0] = 0
            assert matcher.remove(filter_.id)
            assert changes[0] <= 5
        for event in events:
            wanted = {f.id for f in filters if f.id in kept and f.matches(event)}
            assert set(matcher.match(event)) == wanted
    matcher.add_many(filters[:50])
    assert set(matcher.match({"t": "k-7z"})) == {filters[7].id}


def test_more_texts_than_are_remembered():
    """Patterns are found in texts that were forgotten for others, and in both texts of one event."""
    matcher = Matcher(engine="native")
    filters = [parse({"regexp": {name: "^k.*7z"}}, "koncorde") for name in ("t", "u")]
    matcher.add_many(filters)
    ids = [filter_.id for filter_ in filters]
    events = [b'{"t": "k-%dz", "u": "k-%dz"}' % (i, i + 1) for i in range(70_000)]
    for part in (events, events[:500], events[-500:]):
        for event, found in zip(part, matcher.match_many(part), strict=True):
            first, second = (value.endswith(b'7z"') for value in event[:-1].split(b", "))
            assert set(found) == {id_ for id_, hit in zip(ids, (first, second), strict=True) if hit}


def test_more_texts_in_one_event_than_are_remembered():
    matcher = Matcher(engine="native")
    count = (1 << 16) + 300
    for i in range(count):
        matcher.add({"regexp": {f"{i:x}": "a.c"}}, dialect="koncorde")
    event = json.dumps({f"{i:x}": "abc" for i in range(count)}).encode()
    assert [len(matcher.match(event)) for _ in range(2)] == [count, count]


def test_long_texts_are_freed_when_short_ones_replace_them():
    matcher = Matcher(engine="native")
    matcher.add({"regexp": {"t": "a.c"}}, dialect="koncorde")
    used = []
    for size in (1000, 0):
        matcher.match_many([b'{"t": "%d%s"}' % (i + size, b"z" * size) for i in range(1 << 16)])
        used.append(matcher.stats()["bytes"])
    assert used[1] < used[0] / 2


def test_the_background_ends_with_the_process():
    """A process that ends while sets are built ends without an error."""
    code = (
        "from virta.match.pattern_sets import PathPatterns\n"
        "patterns = PathPatterns()\n"
        "for n in range(5000): patterns.add(n, '\\0^k.*[a-z]' f'{n}z')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, check=False
    )

    assert (done.returncode, done.stderr) == (0, b"")


def test_threads_that_add_patterns_while_others_match():
    """While one thread adds patterns, and sets are built, another finds the old ones every time."""
    matcher = Matcher(engine="native")
    old = [parse({"regexp": {"t": f"^k.*{i}z"}}, "koncorde") for i in range(40)]
    new = [parse({"regexp": {"t": f"^k.*{i}y"}}, "koncorde") for i in range(400)]
    matcher.add_many(old)
    wanted = {f.id for f in old if f.matches({"t": "k-33z"})}
    failures = []
    done = threading.Event()

    def match():
        turn = 0
        while not done.is_set():
            turn += 1
            text = f"k-{turn % 7}-33z"
            if not wanted <= set(matcher.match({"t": text})):
                failures.append(text)

    thread = threading.Thread(target=match)
    thread.start()
    matcher.add_many(new)
    done.set()
    thread.join()

    assert failures == []
    assert set(matcher.match({"t": "k-21y"})) == {f.id for f in new if f.matches({"t": "k-21y"})}


def test_numbers_are_not_reused_under_a_running_call():
    """Filters removed and added while a batch runs never lend their ids to each other."""
    matcher = Matcher(engine="native")
    steady = matcher.add(Filter(equals("a", 1)))
    others = [Filter(And((equals("a", 1), equals("b", i)))) for i in range(50)]
    never = [Filter(equals("z", i)) for i in range(50)]
    batch = [b'{"a": 1, "b": 7}'] * 2000
    allowed = {steady, others[7].id}
    done = threading.Event()

    def churn():
        while not done.is_set():
            matcher.add_many(others)
            for filter_ in others:
                matcher.remove(filter_.id)
            matcher.add_many(never)
            for filter_ in never:
                matcher.remove(filter_.id)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(30):
            assert {id_ for ids in matcher.match_many(batch) for id_ in ids} <= allowed
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("program", "digest"),
    [
        (b"", bytes(32)),
        (b"\1\0\0\0", bytes(32)),
        (b"\0\0\0\0x", bytes(32)),
        (b"\0\0\0\0", b"short"),
    ],
)
def test_programs_that_make_no_sense_are_refused(program, digest):
    """A program cut short or too long is a ValueError and leaves nothing behind."""
    index = make_index()
    with pytest.raises(ValueError):
        index.add(digest, program, ())
    assert len(index) == 0
    assert index.stats()["paths"] == 0


def test_programs_cut_anywhere_leave_nothing_behind():
    """Whatever was read before the cut, terms put off included, is given back."""
    index = make_index()
    tree = And(
        (
            equals("a", 1),
            equals("b", "text"),
            Condition(("c",), "range", ValueRange(0, 9)),
            Condition(("d",), "in", (1, 2)),
            Condition(("e",), "prefix", "p"),
            Condition(("f",), "exists"),
        )
    )
    program, opaques = compile_filter(Filter(tree)).encoded
    for end in range(len(program)):
        with pytest.raises(ValueError, match="not a program"):
            index.add(bytes(32), program[:end], opaques)
        stats = index.stats()
        assert (stats["paths"], stats["atoms"], stats["conditions"]) == (0, 0, 0)
    assert index.add(bytes(32), program, opaques) == 1


@pytest.mark.parametrize("source", [parse("a=1", "query-string"), "a=1"])
def test_answers_share_the_ids_of_add(source):
    """Matching makes no text for an id that `add` returned: many at once would pause an event loop."""
    matcher = Matcher(engine="native")
    id_ = matcher.add(source)

    assert matcher.match({"data": {"a": 1}})[0] is id_
    assert matcher.ids()[0] is id_

    matcher.add(source)
    matcher.remove(id_)

    assert matcher.match({"data": {"a": 1}})[0] is id_


def test_an_id_that_a_filter_knows_is_shared():
    filter_ = parse("a=1", "query-string")

    assert filter_.id is Matcher(engine="native").add(filter_)


def test_a_number_used_again_has_the_id_of_its_new_filter():
    matcher = Matcher(engine="native")
    first = matcher.add("a=1")
    number = matcher.number_of(first)
    matcher.remove(first)
    second = matcher.add("b=1")

    assert matcher.number_of(second) == number
    assert matcher.match({"data": {"a": 1, "b": 1}}) == [second]


def test_an_id_of_bytes_becomes_a_text_when_it_is_found():
    index = make_index()
    program, opaques = compile_filter(Filter(equals("a", 1))).encoded
    index.add(bytes(range(32)), program, opaques)

    assert index.match({"a": 1}) == [bytes(range(32)).hex()]


@pytest.mark.parametrize(
    "id_", ["", "0" * 63, "0" * 63 + "g", "0" * 63 + "A", "ä" + "0" * 63, "-" * 64]
)
def test_ids_that_are_not_64_hex_digits_are_refused(id_):
    index = make_index()
    program, opaques = compile_filter(Filter(equals("a", 1))).encoded
    with pytest.raises(ValueError, match="64 hex digits"):
        index.add(id_, program, opaques)
    assert len(index) == 0


def test_a_box_upside_down_takes_no_longer():
    """A box whose edges are swapped, which no parser lets through, holds no point and fills no grid."""
    matcher = Matcher(engine="native")
    for box in (Box(10, 0, 80, 1), Box(10, 5, 9.9999, -170), Box(1, math.nan, 0, 1)):
        matcher.add(Filter(Condition(("p",), "geo_box", box)))

    assert matcher.match({"p": {"lat": 9.99995, "lon": 3}}) == []
    assert len(matcher) == 3


def test_wrong_arguments_are_refused():
    """Calls with the wrong arguments are TypeErrors, not crashes."""
    index = make_index()
    with pytest.raises(TypeError):
        index.add(bytes(32), "text", ())
    with pytest.raises(TypeError):
        index.match_many([])
    with pytest.raises(TypeError):
        index.match_many(3, True)
    with pytest.raises(RuntimeError):
        index.__init__(None, None, None, None, None)


def test_exceptions_from_python_come_through():
    """What a callback raises reaches the caller, with the lock free again."""

    def fail(condition, root):
        raise KeyError("mine")

    engine = make_engine("native")
    engine.index = index = make_index(holds=fail)
    matcher = Matcher(engine=engine)
    opaque = Filter(Condition(("a",), "select", select()))
    matcher.add(opaque)
    with pytest.raises(KeyError, match="mine"):
        index.match({"a": [1]})
    with pytest.raises(KeyError, match="mine"):
        index.match_many([b"{}", b'{"a": [1]}'], False)
    with pytest.raises(KeyError, match="mine"):
        index.match_members([b"{}", b'{"a": [1]}'], ())
    assert index.match({"a": 1}) == []
    assert matcher.remove(opaque.id)


def test_calls_from_inside_are_refused():
    """Python code that runs while an index works cannot call it again: an error, not a deadlock."""
    engine = make_engine("native")
    engine.index = index = make_index(holds=lambda condition, root: index.remove(bytes(32)))
    matcher = Matcher(engine=engine)
    matcher.add(Filter(Condition(("a",), "select", select())))

    with pytest.raises(RuntimeError, match="from inside its own work"):
        index.match({"a": [1]})
    with pytest.raises(RuntimeError, match="from inside its own work"):
        index.match_members([b'{"a": [1]}'], ())
    assert index.remove(bytes(32)) == -1


def test_an_index_goes_away_with_its_last_user():
    """Callbacks that lead back to the index do not keep it for ever."""

    class Holder:
        def holds(self, condition, root):
            return True

    holder = Holder()
    holder.index = make_index(holds=holder.holds)
    reference = weakref.ref(holder)
    del holder
    gc.collect()
    assert reference() is None


def make_index(**callbacks):
    given = {
        "search": lambda node, text, start: [],
        "patterns": lambda node, number, text: None,
        "point": lambda value: None,
        "holds": lambda condition, root: True,
        "parse": lambda data, position: json.loads(data),
        "attribute": lambda event, name: str(event[name]),
        "text": str,
    }
    return core.Index(**(given | callbacks))


def select():
    return Select(0, Condition(("value",), "eq", 1))


def test_members_and_hits_come_from_one_parse():
    """As many hits as `match` finds, and the members that Python's reader sees, for random events."""
    randoms = Randoms(77)
    matcher = Matcher(engine="native")
    matcher.add_many(randoms.filter() for _ in range(300))
    events = [randoms.document() for _ in range(400)]
    texts = [json.dumps(event).encode() for event in events]
    names = ("a", "a.b", "é")
    left = 0
    for event, text, answer in zip(events, texts, matcher.match_members(texts, names), strict=True):
        if answer is None:
            left += 1
            continue
        hits, *members = answer
        assert hits == len(matcher.match(text))
        assert members == [v if isinstance(v := event.get(n), str) else None for n in names]
    assert left < len(events) / 4


@pytest.mark.parametrize(
    "text",
    [b"", b"[1]", b"1", b'{"a":1}\n', b'{"a":\r1}', b'{"a":1', b'{"a":"\xff"}', b'{"a":1e999}'],
)
def test_what_match_members_leaves_to_the_caller(text):
    matcher = Matcher(engine="native")
    matcher.add(Filter(equals("a", 1)))
    good = b'{"a":1,"b":"x","b":"y"}'
    assert matcher.match_members([good, text, good], ("b",)) == [(1, "y"), None, (1, "y")]


def test_match_members_refuses_what_is_no_list_of_texts():
    matcher = Matcher(engine="native")
    for texts, names in (
        ((b"{}",), ()),
        ([b"{}"], ["a"]),
        (["{}"], ()),
        ([b"{}"], (1,)),
        ([], ("a",) * 9),
    ):
        with pytest.raises(TypeError):
            matcher.match_members(texts, names)
    assert matcher.match_members([], ()) == []


def test_the_stub_has_the_names_of_the_module():
    """What type checkers see of the native index is what it has."""
    text = Path(core.__file__).with_name("_core.pyi").read_text()
    stub = ast.parse(text)
    for node in (one for one in stub.body if isinstance(one, ast.ClassDef)):
        named = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
        has = {name for name in vars(getattr(core, node.name)) if not name.startswith("_")}
        assert {name for name in named if not name.startswith("_")} == has
    shown = {one.name for one in stub.body if isinstance(one, ast.ClassDef | ast.FunctionDef)}
    assert shown == {name for name in vars(core) if not name.startswith("_")}
