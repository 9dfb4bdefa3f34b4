"""One consumer of a view: conflation, positions, snapshots that meet changes, overflow."""

from __future__ import annotations

import json

import pytest

from virta.event.row_changes import DELETE, SET, TRUNCATE, KeyRule, RowChange
from virta.filters import parse
from virta.views import consumer as consumer_module
from virta.views import view as view_module
from virta.views.consumer import GAP, OVERFLOW, ViewConsumer
from virta.views.frames import EMPTY_ID, NO_ID, FrameEncoder, ViewFrame
from virta.views.limits import ViewLimits
from virta.views.tables.passes import MembershipPass
from virta.views.tables.table import RowTable
from virta.views.view import View, ViewFilter

pytestmark = pytest.mark.usefixtures("either_step")


class Sink:
    """Collects frames; accepts none while it is blocked."""

    def __init__(self):
        self.blocked = False
        self.frames = []
        self.writes = 0
        self.asked = 0

    def write_frames(self, frames, payloads):
        self.writes += 1
        self.frames += frames

    def wants_pump(self, consumer):
        self.asked += 1

    def failed(self, error):
        raise error

    def take(self):
        """Return (name, key) of the frames since the last call."""
        frames, self.frames = self.frames, []
        return [(frame.name, frame.key) for frame in frames]


class Scene:
    """A table with a view of paid rows, its values, and one consumer."""

    def __init__(self, query="status=paid", *, row_filter=None, **limits):
        self.table = RowTable("orders", KeyRule(), limits=ViewLimits(**limits))
        self.values = {}
        own = None if row_filter is None else parse(row_filter)
        self.view = View(self.table, ViewFilter(parse(query), own))
        self.table.index.add(self.view)
        self.view.exact_since = 0
        self.sink = Sink()
        self.consumer = ViewConsumer(self.view, self.sink)

    def put(self, *rows):
        """Apply rows (key, status) in one step; a status of None deletes, a key of None truncates."""
        first, changes = self.table.position, []
        for at, (key, status) in enumerate(rows, first):
            if key is None:
                changes.append((at, RowChange(TRUNCATE)))
            elif status is None:
                changes.append((at, RowChange(DELETE, key)))
            else:
                data = {"status": status, "n": at}
                value = json.dumps({"id": str(at), "source": "/", "data": data}).encode()
                self.values[at] = value
                changes.append((at, RowChange(SET, key, value, value)))
        view_module.deliver_all(self.table.apply(changes, first + len(rows)), 1.5)

    def pump(self):
        """Send everything that waits, reading values that are not in memory."""
        values = {}
        while not self.consumer.idle:
            missing = self.consumer.pump(values)
            values = {o: self.values[o] for o in missing if o in self.values}
            for view in self.table.lose(set(missing) - values.keys()):
                view.deliver()
        return self.sink.take()

    def start(self):
        self.consumer.begin_snapshot()
        return self.pump()


def test_a_snapshot_and_then_each_step_as_it_is():
    """Frames of one step are one write, with ids behind their own offsets."""
    one = Scene()
    one.put(("a", "paid"), ("b", "new"))
    one.consumer.begin_snapshot()
    one.consumer.pump()
    names = [(f.name, f.id, f.key) for f in one.sink.frames]
    assert names == [("snapshot", EMPTY_ID, ""), ("row", NO_ID, "a"), ("live", 2, "")]
    one.sink.take()
    one.sink.writes = 0
    one.put(("b", "paid"), ("a", "paid"), ("b", "new"))

    assert [(f.name, f.id, f.offset) for f in one.sink.frames] == [
        ("enter", 3, 2),
        ("update", 4, 3),
        ("leave", 5, 4),
    ]
    assert one.sink.writes == 1


# What waits, what comes, and what is sent in the end; `has` is what the client had before.
CONFLATION = [
    ([], ["paid"], [("enter", "k")]),
    ([], ["paid", "paid"], [("enter", "k")]),
    ([], ["paid", "new"], []),
    ([], ["paid", None], []),
    ([], ["paid", "new", "paid"], [("enter", "k")]),
    (["paid"], ["paid", "paid"], [("update", "k")]),
    (["paid"], ["paid", "new"], [("leave", "k")]),
    (["paid"], ["new"], [("leave", "k")]),
    (["paid"], ["new", "paid"], [("update", "k")]),
    (["paid"], [None, "paid"], [("update", "k")]),
    (["paid"], ["new", "paid", None], [("leave", "k")]),
    (["paid"], [None, "new"], [("leave", "k")]),
]


@pytest.mark.parametrize(("has", "comes", "sent"), CONFLATION)
def test_a_slow_consumer_gets_one_frame_a_key(has, comes, sent):
    """Only the newest state is sent, and its kind says what the client has to do."""
    one = Scene()
    one.put(("other", "paid"), *[("k", status) for status in has])
    one.start()
    one.sink.blocked = True
    for status in comes:
        one.put(("k", status))
    assert one.sink.take() == []
    one.sink.blocked = False

    assert one.pump() == [*sent, ("live", "")]


def test_only_the_newest_value_is_sent():
    one = Scene()
    one.put(("k", "paid"))
    one.start()
    one.sink.blocked = True
    one.put(("k", "paid"), ("k", "paid"), ("k", "paid"))
    one.sink.blocked = False
    one.consumer.pump()

    assert [json.loads(f.event)["data"]["n"] for f in one.sink.frames if f.event] == [3]


def test_waiting_keys_are_sent_in_order_and_ids_say_what_is_still_missing():
    """The id of a frame is the first offset of the next key: a cut there misses nothing."""
    one = Scene()
    one.put(("a", "paid"))
    one.start()
    one.sink.blocked = True
    one.put(("b", "paid"), ("c", "paid"), ("a", "paid"), ("b", "paid"))  # offsets 1 to 4
    assert one.consumer.waiting == 3
    assert one.consumer.position == 1
    one.sink.blocked = False
    one.consumer.pump()

    assert [(f.name, f.key, f.id) for f in one.sink.frames] == [
        ("enter", "b", 2),
        ("enter", "c", 3),
        ("update", "a", 5),
        ("live", "", 5),
    ]


def test_frames_of_a_resume_keep_the_position_until_the_last():
    one = Scene()
    one.put(("a", "paid"), ("b", "paid"), ("c", "new"))
    one.consumer.begin_resume({"a": False, "b": True, "c": True, "gone": True}, 1)
    one.consumer.pump()

    assert [(f.name, f.key, f.id, f.reason) for f in one.sink.frames[:-1]] == [
        ("enter", "a", 1, ""),
        ("update", "b", 1, ""),
        ("leave", "c", 1, "changed"),
        ("leave", "gone", 3, "deleted"),
    ]
    assert (one.sink.frames[-1].name, one.sink.frames[-1].id) == ("live", 3)


def test_a_resume_of_too_many_keys_is_a_reset():
    one = Scene(view_pending_max=2)
    one.put(("a", "paid"))
    one.consumer.begin_resume({"a": True, "b": True, "c": True}, 0)

    assert one.pump() == [("reset", ""), ("snapshot", ""), ("row", "a"), ("live", "")]


def test_a_reset_has_its_reason_and_empties_the_id():
    one = Scene()
    one.put(("a", "paid"))
    one.consumer.begin_snapshot(GAP)
    one.consumer.pump()

    assert one.sink.frames[0].data == {"reason": "gap"}
    assert [f.id for f in one.sink.frames] == [EMPTY_ID, EMPTY_ID, NO_ID, 1]


def test_too_many_waiting_keys_overflow():
    """The map is dropped; a snapshot follows when the sink accepts bytes again."""
    one = Scene(view_pending_max=2)
    one.start()
    one.sink.blocked = True
    one.put(("a", "paid"), ("b", "paid"))
    assert one.consumer.waiting == 2
    one.put(("c", "paid"))
    assert one.consumer.waiting == 0
    assert one.consumer.position == NO_ID
    one.put(("d", "paid"))  # part of the snapshot that follows
    assert one.consumer.waiting == 0
    one.sink.blocked = False
    one.consumer.pump()

    assert one.sink.frames[0].data == {"reason": OVERFLOW}
    assert [key for name, key in one.sink.take() if name == "row"] == ["a", "b", "c", "d"]


def test_a_truncation_is_a_reset_for_those_that_keep_up_and_those_that_do_not():
    one = Scene()
    one.put(("a", "paid"))
    one.start()
    one.put((None, None), ("b", "paid"))
    assert one.pump() == [("reset", ""), ("snapshot", ""), ("row", "b"), ("live", "")]
    one.sink.blocked = True
    one.put(("c", "paid"), (None, None))
    one.sink.blocked = False

    assert one.pump() == [("reset", ""), ("snapshot", ""), ("live", "")]


class TestSnapshotMeetsChanges:
    """A change ahead of the cursor needs nothing; one behind it follows the snapshot."""

    @pytest.fixture(autouse=True)
    def pieces_of_two(self, monkeypatch):
        monkeypatch.setattr(consumer_module, "PIECE_FRAMES", 2)

    def begun(self):
        """Return a scene whose consumer has got `snapshot` and the row `a`."""
        one = Scene()
        one.put(*[(key, "paid") for key in "abcd"])
        one.consumer.begin_snapshot()
        one.consumer.pump()
        assert one.sink.take() == [("snapshot", ""), ("row", "a")]
        return one

    def test_behind_the_cursor(self):
        one = self.begun()
        one.put(("a", "paid"))
        assert one.pump() == [("row", "b"), ("row", "c"), ("row", "d"), ("update", "a"), ("live", "")]  # fmt: skip

    def test_a_row_that_leaves_behind_the_cursor(self):
        one = self.begun()
        one.put(("a", "new"))
        assert one.pump()[-2:] == [("leave", "a"), ("live", "")]

    def test_ahead_of_the_cursor(self):
        one = self.begun()
        one.put(("c", "paid"), ("d", "new"))
        assert one.consumer.waiting == 0
        one.consumer.pump()
        rows = [json.loads(f.event)["data"]["n"] for f in one.sink.frames]
        assert one.sink.take() == [("row", "b"), ("row", "c")]
        assert rows == [1, 4]  # the new value
        assert one.pump() == [("live", "")]

    def test_a_new_row_follows_the_snapshot(self):
        one = self.begun()
        one.put(("e", "paid"))
        assert one.pump()[-2:] == [("enter", "e"), ("live", "")]

    def test_there_is_no_position_inside_a_snapshot(self):
        """A cut there has to begin again."""
        one = self.begun()
        one.put(("a", "paid"))
        assert one.consumer.position == NO_ID
        assert one.consumer.ping("now").id == NO_ID

    def test_a_closed_consumer_sends_nothing(self):
        one = self.begun()
        one.consumer.close()
        one.put(("a", "paid"))
        assert one.consumer.pump() == []
        assert one.sink.take() == []
        assert one.view.consumers == {}


def test_a_blocked_sink_is_not_written_to():
    one = Scene()
    one.put(("a", "paid"))
    one.sink.blocked = True
    one.consumer.begin_snapshot()
    assert one.consumer.pump() == []
    assert one.sink.take() == []


def test_pieces_are_bounded_by_bytes(monkeypatch):
    monkeypatch.setattr(consumer_module, "PIECE_BYTES", 100)
    one = Scene()
    one.put(*[(str(n), "paid") for n in range(10)])
    one.consumer.begin_snapshot()
    one.consumer.pump()

    assert 1 < len(one.sink.frames) < 5
    assert one.sink.asked == 1  # for the next piece


def test_values_that_are_not_in_memory_are_asked_for_together():
    """One read for a piece, not one a row."""
    one = Scene(view_cache_bytes_max=0)
    one.put(*[(str(n), "paid") for n in range(6)], ("x", "new"))
    one.consumer.begin_snapshot()
    missing = one.consumer.pump()
    assert missing == [0, 1, 2, 3, 4, 5]
    assert one.consumer.pump({o: one.values[o] for o in missing}) == []
    assert [name for name, _ in one.sink.take()] == ["snapshot", *["row"] * 6, "live"]
    one.sink.blocked = True
    one.put(("1", "paid"), ("2", "new"))
    one.sink.blocked = False

    assert one.consumer.pump() == [7, 8]  # a leave shows the new row


def test_a_value_that_the_log_has_lost_is_a_row_that_left():
    one = Scene(view_cache_bytes_max=0)
    one.put(("a", "paid"), ("b", "paid"))
    del one.values[0]

    assert one.start() == [("snapshot", ""), ("row", "b"), ("live", "")]


def test_a_row_that_expired_while_it_waited():
    one = Scene()
    one.put(("a", "paid"), ("b", "paid"))
    one.start()
    one.sink.blocked = True
    for view in one.table.expire(1):
        view.deliver()
    one.sink.blocked = False
    one.consumer.pump()

    assert [(f.name, f.key, f.reason) for f in one.sink.frames[:1]] == [("leave", "a", "expired")]


def test_an_output_gets_bytes_while_the_consumer_keeps_up():
    """Behind the snapshot, and not while it is paused or something waits; one payload for all that get the same."""
    one = Scene()
    written = []
    others = [ViewConsumer(one.view, one.sink) for _ in range(2)]
    for consumer in (one.consumer, *others):
        consumer.output = (written.append, b"tag", False)
    one.put(("a", "paid"))
    assert one.start() == [("snapshot", ""), ("row", "a"), ("live", "")]
    assert written == []
    one.put(("b", "paid"), ("a", "new"))
    hits = [
        ViewFrame("enter", 2, "b", 1, one.values[1]),
        ViewFrame("leave", 3, "a", 2, one.values[2], "changed"),
    ]
    frames = b"".join(FrameEncoder("tag").encode(hits))
    assert written == [frames]

    one.sink.blocked = True
    one.consumer.pause()
    one.put(("c", "paid"))
    assert (written, one.sink.take()) == ([frames], [])
    one.sink.blocked = False
    assert one.pump() == [("enter", "c"), ("live", "")]
    one.put(("d", "paid"))
    assert len(written) == 2

    for consumer in others:
        consumer.begin_snapshot()
        consumer.pump()
    one.put(("e", "paid"))
    assert written[2] is written[3] is written[4]
    one.consumer.close()
    one.put(("f", "paid"))
    assert len(written) == 7


def test_a_leave_shows_the_new_row_only_within_the_row_filter():
    """For those that keep up and for those that do not."""
    for blocked in (False, True):
        one = Scene("n=>=0", row_filter="status=paid;status=new")
        one.put(("a", "paid"), ("b", "paid"))
        one.start()
        one.sink.blocked = blocked
        one.put(("a", "secret"), ("b", None))
        one.sink.blocked = False
        one.consumer.pump()

        leaves = {f.key: (f.reason, f.event) for f in one.sink.frames if f.name == "leave"}
        assert leaves == {"a": ("changed", None), "b": ("deleted", None)}


def test_a_ping_has_the_position_only_if_nothing_waits():
    one = Scene()
    one.start()
    one.table.apply([], 12)  # nothing for this view
    assert (one.consumer.ping("t").id, one.consumer.ping("t").data["offset"]) == (12, 12)
    one.sink.blocked = True
    one.put(("a", "paid"))

    assert one.consumer.ping("t").id == NO_ID


def test_consumers_of_one_view_do_not_wait_for_each_other():
    """One keeps up, one is slow, one begins: each gets its own."""
    one = Scene()
    one.put(("a", "paid"))
    one.start()
    slow, late = (ViewConsumer(one.view, Sink()) for _ in range(2))
    slow.begin_snapshot()
    slow.pump()
    slow.sink.take()
    slow.sink.blocked = True
    one.put(("a", "new"), ("b", "paid"))
    late.begin_snapshot()
    late.pump()
    slow.sink.blocked = False
    slow.pump()

    assert one.sink.take() == [("leave", "a"), ("enter", "b")]
    assert slow.sink.take() == [("leave", "a"), ("enter", "b"), ("live", "")]
    assert late.sink.take() == [("snapshot", ""), ("row", "b"), ("live", "")]


def test_a_new_view_of_a_full_table_needs_a_pass():
    """Memberships are right only after it, and count from its position on."""
    one = Scene("status=paid")
    one.put(*[(str(n), "paid" if n % 2 else "new") for n in range(10)])
    view = View(one.table, ViewFilter(parse("status=new")))
    one.table.index.add(view)
    work = MembershipPass(one.table, [view])
    pieces = list(work.pieces())
    one.put(("0", "paid"), ("11", "new"))  # meanwhile: the live step knows better
    for piece in pieces:
        piece.match(lambda offsets: {o: one.values[o] for o in offsets})
        work.finish(piece)
    assert view.exact_since is None
    work.end()

    assert view.exact_since == one.table.position
    assert sorted(one.table.keys[n] for n in view.row_numbers()) == ["11", "2", "4", "6", "8"]
