"""The hub over a real log: publishing, following, matching once, replaying into live."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest
from hub_support import draft, run

import virta
from virta.errors import LogGapError, LogWriteError
from virta.event.document import document_of
from virta.filters import parse
from virta.hub import log_follower
from virta.hub.delivery import Delivery, from_record
from virta.hub.registry import Registry
from virta.hub.resume import id_index, replay
from virta.hub.resume.id_index import IdSearchResult
from virta.hub.resume.positions import EventId
from virta.hub.resume.replay import Start
from virta.hub.subscription import ChannelSubscription
from virta.log.record import Name, Record
from waiting import turns


@pytest.mark.parametrize("durability", ["none", "group"])
def test_published_means_stored_and_received(tmp_path, durability):
    """When the answer comes, the log has the events and the subscribers have received them."""

    async def scenario(stack):
        sink = stack.attach("c")
        error = await stack.publish("c", "1", "2", "1")
        return error, [e["id"] for e in sink.received], [r.offset for r in stack.log.read()]

    assert run(scenario, tmp_path, durability=durability) == (None, ["1", "2"], [0, 1])


# Where a commit waits for its sync: nowhere, in the loop (a quick disk), in the thread (a slow one).
IN_THREAD = {"durability": "group", "inline_s_max": -1.0}
APPENDS = [("none", 0.0), ("group", float("inf")), ("group", -1.0)]


@pytest.mark.parametrize(("durability", "inline_s"), APPENDS)
def test_order_among_writers_at_once(tmp_path, durability, inline_s):
    """While another handle appends all the time, subscribers get the log's order, each record once."""

    async def scenario(stack):
        sink = stack.attach("c")

        def append_all():
            with virta.open(tmp_path / "log") as other:
                for n in range(300):
                    value = json.dumps({"source": "o", "id": f"o{n}"}).encode()
                    other.append("c", b"", value, durability="none")

        appending = asyncio.create_task(asyncio.to_thread(append_all))
        for n in range(150):
            assert await stack.publish("c", f"h{n}") is None
        await appending
        received = await sink.ids(450)
        return received, [json.loads(r.value)["id"] for r in stack.log.read()]

    received, stored = run(scenario, tmp_path, durability=durability, inline_s_max=inline_s)

    assert received == stored


@pytest.mark.parametrize("durability", ["none", "group"])
def test_order_is_that_of_the_log_among_all_writers(tmp_path, durability):
    """Records of another handle and our own reach subscribers in log order, each once."""

    async def scenario(stack):
        sink = stack.attach("c")
        with virta.open(tmp_path / "log") as other:
            for n in range(50):
                value = json.dumps({"source": "o", "id": f"o{n}"}).encode()
                await asyncio.to_thread(other.append, "c", b"", value, durability="none")
                await stack.publish("c", f"h{n}")
        received = await sink.ids(100)
        stored = [json.loads(r.value)["id"] for r in stack.log.read()]
        return received, stored

    received, stored = run(scenario, tmp_path, durability=durability)

    assert received == stored


def test_failed_writes_are_answered_and_forgotten(tmp_path):
    """When the log refuses, the publisher gets the error and may try again."""

    async def scenario(stack):
        real = stack.log.append_many

        def refuse(*arguments, **named):
            stack.log.append_many = real
            raise LogWriteError("disk full")

        stack.log.append_many = refuse
        first = await stack.publish("c", "1")
        second = await stack.publish("c", "1")
        return first, second, stack.publisher.duplicates, stack.publisher.outstanding

    first, second, duplicates, outstanding = run(scenario, tmp_path, durability="group")

    assert first.code == "log_write_failed"
    assert (second, duplicates, outstanding) == (None, 0, 0)


def test_a_repeat_of_an_event_that_was_not_written(tmp_path):
    """Who repeats an event while its first is being refused has it written, or is refused as well."""

    async def scenario(stack):
        sink = stack.attach("c")
        real, asked, go = stack.log.append_many, threading.Event(), threading.Event()

        def refuse(*arguments, **named):
            stack.log.append_many = real
            asked.set()
            assert go.wait(60)
            raise LogWriteError("disk full")

        stack.log.append_many = refuse
        first = asyncio.create_task(stack.publish("c", "1"))
        assert await asyncio.to_thread(asked.wait, 60)
        later = [asyncio.create_task(stack.publish("c", "1")) for _ in range(2)]
        later.append(asyncio.create_task(stack.publish("c", "2", "1", "1")))
        await turns()
        go.set()
        answers = await asyncio.gather(first, *later)
        stored = [json.loads(r.value)["id"] for r in stack.log.read()]
        return answers, stored, await sink.ids(2), stack.publisher.duplicates

    (first, *later), stored, received, duplicates = run(scenario, tmp_path, **IN_THREAD)

    assert first.code == "log_write_failed"
    assert later == [None, None, None]
    assert sorted(stored) == sorted(received) == ["1", "2"]
    assert duplicates == 3


def test_a_request_that_is_too_large_fails_alone(tmp_path):
    """What is more than one batch of the log does not take its neighbours with it."""

    async def scenario(stack):
        channel = "c" * 1024
        many = [str(n) for n in range(70_000)]
        return await asyncio.gather(
            stack.publish("c", "before"),
            stack.publish(channel, *many),
            stack.publish("c", "behind"),
        )

    before, large, behind = run(scenario, tmp_path)

    assert (before, large.code, behind) == (None, "log_batch_too_large", None)


def test_full_counts_what_is_not_answered(tmp_path):
    """The limit is on events under way; answered ones make room."""

    async def scenario(stack):
        done = asyncio.get_running_loop().create_future()
        stack.publisher.submit([draft("c", str(n)) for n in range(10)], done.set_result)
        during = stack.publisher.overloaded
        await done
        return during, stack.publisher.overloaded

    assert run(scenario, tmp_path) == (True, False)


def test_filters_of_all_dialects_share_a_channel(tmp_path):
    """Events meet queries and SQL whole, Koncorde's filters by their data."""

    async def scenario(stack):
        sinks = [
            stack.attach("c", "x=1"),
            stack.attach("c", "source = 's'", "cesql"),
            stack.attach("c", {"equals": {"x": 1}}, "koncorde"),
            stack.attach("c", {"ids": {"values": ["a"]}}, "koncorde"),
            stack.attach("c", {}, "koncorde"),
            stack.attach("other"),
        ]
        await stack.publish("c", "a", data={"x": 1})
        await stack.publish("c", "b", data={"x": 2})
        return [[e["id"] for e in sink.received] for sink in sinks]

    assert run(scenario, tmp_path) == [["a"], ["a", "b"], ["a"], ["a"], ["a", "b"], []]


def test_replay_goes_live_in_one_step(tmp_path):
    """A replay that runs while events are published ends attached, with each event once."""

    async def scenario(stack):
        await stack.publish("c", *[str(n) for n in range(5)], data={"x": 1})
        sink, subscription = stack.listen("c", "x=1")
        replay = stack.replayer.run(subscription, Start(0), drained=lambda: None, report_gap=print)
        running = asyncio.ensure_future(replay)
        for n in range(5, 50):
            await stack.publish("c", str(n), data={"x": 1})
        await running
        await stack.publish("c", "live", data={"x": 1})
        return await sink.ids(51)

    assert run(scenario, tmp_path) == [*[str(n) for n in range(50)], "live"]


def test_detached_subscriptions_leave_nothing(tmp_path):
    """A hub that many consumers came to and left is as empty as before."""

    async def scenario(stack):
        subscriptions = [stack.listen("c", f"x={n % 3}")[1] for n in range(9)]
        for subscription in subscriptions:
            stack.hub.attach(subscription)
        count = stack.hub.subscription_count
        for subscription in subscriptions:
            stack.hub.detach(subscription)
            stack.hub.detach(subscription)
        left = (stack.hub.subscription_count, stack.hub.conjunctions)
        return count, left, stack.hub.has_subscribers("c")

    assert run(scenario, tmp_path) == (9, (0, 0), False)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"source":"s","id":"1"}', {"source": "s", "id": "1"}),
        (b'{"source":"s",\n"id":"1"}', {"source": "s", "id": "1"}),
        (b'{"id":"1"}', {"type": "virta.record", "data": {"id": "1"}}),
        (b"[1]", {"type": "virta.record", "data": [1]}),
        (b"\xff", {"type": "virta.record", "data_base64": "/w=="}),
        (b"", {"type": "virta.record", "data_base64": ""}),
    ],
)
def test_records_as_events(value, expected):
    """Subscribers get every record as an event; what is none is wrapped in one."""
    delivery = from_record(Record(Name(b"t"), Name(b""), value, 7, 1_000_000))

    event = json.loads(delivery.value)
    assert event | expected == event
    assert b"\n" not in delivery.value


@pytest.mark.parametrize(
    ("event", "document"),
    [
        ({"id": "i", "data": {"a": 1}}, {"_id": "i", "a": 1}),
        ({"id": "i", "subject": "s", "data": {}}, {"_id": "s"}),
        ({"id": "i", "data": {"_id": "own"}}, {"_id": "own"}),
        ({"id": "i", "data": [1]}, {"_id": "i"}),
        ({"id": "i"}, {"_id": "i"}),
    ],
)
def test_documents_of_events(event, document):
    """Koncorde's document is the event's data with its subject or id as `_id`."""
    delivery = Delivery("c", "s", "i", json.dumps(event).encode(), 0, 0)

    assert json.loads(document_of(delivery.value, delivery.id)) == document


def test_registry_is_rewritten_when_mostly_dead(tmp_path, monkeypatch):
    """A registry whose records are mostly undone shrinks at start and means the same."""
    from virta.hub import registry as module

    monkeypatch.setattr(module, "DEAD_RECORDS_MAX", 5)
    first = Registry(tmp_path)
    kept = first.register("i", "c", {"equals": {"a": 1}}, "koncorde")["id"]
    for n in range(10):
        first.remove(first.register("i", "c", {"equals": {"b": n}}, "koncorde")["id"])
        first.keep_cursor("hook", n)
    first.close()
    Registry(tmp_path).close()

    again = Registry(tmp_path)

    assert again.ids("i", "c") == [kept]
    assert again.cursors == {"hook": 9}
    again.close()


# --- what one does must not stop the others --------------------------------------------------------


class Broken:
    """A sink that fails."""

    def write(self, payload):
        raise RuntimeError("the handler is closed")

    def end(self, reason):
        raise AssertionError(reason)


def test_a_sink_that_fails_affects_no_other(tmp_path, caplog):
    """Other subscriptions, with the same filter or another, get this event and the next."""

    async def scenario(stack):
        for query in ("", "x=1"):
            stack.hub.attach(
                ChannelSubscription("1-9", "c", parse(query, "query-string"), Broken())
            )
        sinks = [
            stack.attach("c"),
            stack.attach("c", "x=1"),
            stack.attach("c", "source = 's'", "cesql"),
        ]
        for id_ in ("1", "2"):
            assert await stack.publish("c", id_, data={"x": 1}) is None
        return [[event["id"] for event in sink.received] for sink in sinks]

    assert run(scenario, tmp_path) == [["1", "2"]] * 3
    assert "delivery_failed" in caplog.text


def test_records_of_others_that_cannot_be_delivered(tmp_path, caplog):
    """An error in their delivery is logged, and own events behind them are delivered and answered."""

    async def scenario(stack):
        sink = stack.attach("c")
        real = stack.publisher.arrived

        def fail(records):
            raise RuntimeError(records[0].value)

        stack.publisher.arrived = fail
        with virta.open(tmp_path / "log") as other:
            other.append("c", b"", b"{}", durability="none")
        assert await stack.publish("c", "1") is None
        stack.publisher.arrived = real
        assert await stack.publish("c", "2") is None
        return await sink.ids(2)

    assert run(scenario, tmp_path, **IN_THREAD) == ["1", "2"]
    assert "delivery_failed" in caplog.text


def test_an_answer_that_fails_keeps_no_other_waiting(tmp_path, caplog):
    """All requests of a write are answered, and those of the next."""

    async def scenario(stack):
        def fail(error):
            raise RuntimeError("the handler is closed")

        stack.publisher.submit([draft("c", "0")], fail)
        answers = await asyncio.gather(stack.publish("c", "1"), stack.publish("c", "2"))
        return answers, stack.publisher.outstanding

    assert run(scenario, tmp_path) == ([None, None], 0)
    assert "answer_failed" in caplog.text


def test_several_wait_for_the_publisher(tmp_path):
    """Each of them returns when everything is answered, also when one gave up waiting."""

    async def scenario(stack):
        real, go = stack.log.append_many, threading.Event()

        def slowly(*arguments, **named):
            assert go.wait(60)
            return real(*arguments, **named)

        stack.log.append_many = slowly
        publishing = asyncio.create_task(stack.publish("c", "1"))
        await turns()
        waiting = [asyncio.create_task(stack.publisher.finished()) for _ in range(3)]
        await turns()
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        go.set()
        await publishing
        return await asyncio.wait_for(asyncio.gather(*waiting[1:]), 30)

    assert run(scenario, tmp_path, **IN_THREAD) == [None, None]


def test_the_follower_outlives_a_log_that_does_not_say_where_it_ends(tmp_path, monkeypatch):
    """An error while nothing is to be done ends no thread: the next append is made."""
    monkeypatch.setattr(log_follower, "RETRY_S", 0.01)

    class Moody(virta.Log):
        asked = threading.Semaphore(0)
        failing = False

        @property
        def next_offset(self):
            if Moody.failing:
                Moody.asked.release()
                raise LogWriteError("too many open files")
            return super().next_offset

    async def scenario(stack):
        stack.log.__class__ = Moody
        Moody.failing = True
        for _ in range(3):
            assert await asyncio.to_thread(Moody.asked.acquire, timeout=60)
        Moody.failing = False
        return await stack.publish("c", "1")

    assert run(scenario, tmp_path, **IN_THREAD) is None


def test_a_filter_that_two_remove_at_once(tmp_path):
    """One of them removes it, the other gets False."""
    both = threading.Barrier(2)

    def open_log(path, **options):
        log = virta.open(path, **options)
        append = log.append

        def slowly(topic, key, value):
            if not value:  # removed
                with suppress(threading.BrokenBarrierError):
                    both.wait(0.2)  # for the other one, who does not come
            return append(topic, key, value)

        log.append = slowly
        return log

    registry = Registry(tmp_path, open_log=open_log)
    id_ = registry.register("i", "c", {"equals": {"a": 1}}, "koncorde")["id"]
    with ThreadPoolExecutor(2) as pool:
        removed = list(pool.map(registry.remove, [id_, id_]))
    assert sorted(removed) == [False, True]
    registry.close()


def test_searches_that_reach_a_limit_give_gaps(tmp_path, monkeypatch):
    """Cut short, found or not, or one too many: a gap says how far was searched."""

    async def scenario(stack):
        await stack.publish("c", "x")
        for first in range(0, 40, 10):
            await stack.publish("c", *[str(n) for n in range(first, first + 10)])
        stack.table.expire(time.monotonic() + 2000.0)  # so that the repeat is an event
        await stack.publish("c", "x")
        stack.table.expire(time.monotonic() + 2000.0)  # so that it is searched for
        monkeypatch.setattr(id_index, "SEARCH_RECORDS_MAX", 5)
        monkeypatch.setattr(id_index, "PART_BYTES", 1)
        found = [await stack.replayer.find("c", EventId("s+x"))]
        found.append(await stack.replayer.find("c", EventId("s+nobody")))
        monkeypatch.setattr(replay, "SEARCHES_MAX", 0)
        found.append(await stack.replayer.find("c", EventId("s+x")))
        monkeypatch.undo()
        found.append(await stack.replayer.find("c", EventId("s+x")))
        return found

    cut, unknown, busy, whole = run(scenario, tmp_path)

    assert (cut.offset, cut.gap["reason"], cut.gap["searchedFrom"]) == (42, "search-limit", 37)
    assert (unknown.offset, unknown.gap["searchedFrom"]) == (42, 32)
    assert (busy.offset, busy.gap["searchedFrom"]) == (42, 42)
    assert {unknown.gap["reason"], busy.gap["reason"]} == {"search-limit"}
    assert (whole.offset, whole.gap) == (1, None)


def test_a_consumer_that_leaves_does_not_free_the_turn_of_its_search(tmp_path):
    """Searches run one at a time, also when their consumers have left; they count until they end."""

    async def scenario(stack):
        await stack.publish("c", "x")
        running, most = 0, 0
        begun, go = threading.Event(), threading.Event()

        def find(*_):
            nonlocal running, most
            running += 1
            most = max(most, running)
            begun.set()
            go.wait(30)
            running -= 1
            return IdSearchResult(0, 0)

        stack.replayer = stack.make_replayer(stack.log, SimpleNamespace(find=find))
        asked = [asyncio.ensure_future(stack.replayer.find("c", EventId("s+x"))) for _ in range(5)]
        assert await asyncio.to_thread(begun.wait, 30)
        for one in asked[:4]:
            one.cancel()
        await asyncio.wait(asked[:4])
        during = len(stack.replayer.searches)
        go.set()
        start = await asked[4]
        await asyncio.gather(*stack.replayer.searches)
        return most, during, start

    assert run(scenario, tmp_path) == (1, 5, Start(1))


def test_events_before_a_gap_are_sent(tmp_path):
    """What a replay has read before it meets removed records is not lost with them."""

    async def scenario(stack):
        await stack.publish("c", "1", "2", data={"x": 1})
        real, gaps = stack.log.read, []

        def read(*arguments, **options):
            made = real(*arguments, **options)
            if options["start"] == 0:
                return TornReader(made)
            return made

        stack.replayer = stack.make_replayer(
            SimpleNamespace(read=read, first_offset=0), SimpleNamespace()
        )
        sink, subscription = stack.listen("c")
        await stack.replayer.run(
            subscription,
            Start(0),
            drained=lambda: None,
            report_gap=lambda gap, offset: gaps.append((gap["from"], offset)),
        )
        return [e["id"] for e in sink.received], gaps

    assert run(scenario, tmp_path) == (["1"], [(1, 2)])


class TornReader:
    """A reader whose second record was removed."""

    def __init__(self, reader):
        self.reader = reader
        self.problems = []

    def batches(self):
        yield next(self.reader.batches())[:1]
        raise LogGapError("gone", first=1, next=2)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.reader.close()
