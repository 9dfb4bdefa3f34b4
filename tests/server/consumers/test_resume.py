"""Resuming: what was missed, then what is new, without gap or duplicate."""

from __future__ import annotations

import asyncio
import json
import signal
from datetime import UTC, datetime

import pytest
from server_harness import Consumer, event, ids, shut

import virta


def read(port, path, count, headers=None):
    """The first frames of a stream behind `connect`."""

    async def scenario():
        consumer = await Consumer.open(port, path, headers)
        await consumer.connected()
        found = await consumer.frames(count)
        await consumer.close()
        return found

    return asyncio.run(scenario())


def test_last_event_id_replays_what_matched_since(server):
    """After the given id come the later matching events, then live ones."""

    async def scenario():
        server.publish("r", *[event(str(n), {"x": n % 2}) for n in range(10)])
        consumer = await Consumer.open(
            server.port, "/channels/r?x=1", {"Last-Event-ID": "%2F%2Ftest+3"}
        )
        await consumer.connected()
        replayed = await consumer.frames(3)
        server.publish("r", event("live", {"x": 1}))
        live = await consumer.frame()
        await consumer.close()
        return replayed, live

    replayed, live = asyncio.run(scenario())

    assert ids(replayed) == ["5", "7", "9"]
    assert live.json["id"] == "live"


def test_an_id_of_an_event_that_did_not_match_is_a_place_too(server):
    """Any event of the channel can be resumed from."""
    server.publish("r2", *[event(str(n), {"x": n % 2}) for n in range(4)])

    found = read(server.port, "/channels/r2?x=1", 1, {"Last-Event-ID": "%2F%2Ftest+2"})

    assert ids(found) == ["3"]


def test_unknown_id_is_told_as_a_gap(server):
    """An id the log does not have gives a gap frame first, then live events."""

    async def scenario():
        consumer = await Consumer.open(
            server.port, "/channels/g", {"Last-Event-ID": "%2F%2Ftest+nobody"}
        )
        await consumer.connected()
        gap = await consumer.frame()
        server.publish("g", event("after"))
        live = await consumer.frame()
        await consumer.close()
        return gap, live

    gap, live = asyncio.run(scenario())

    assert gap.event == "gap"
    assert gap.json["reason"] == "unknown-id"
    assert gap.json["lastEventID"] == "%2F%2Ftest+nobody"
    assert live.json["id"] == "after"


def test_start_points(server):
    """`/from/` starts at the earliest or latest event, at an offset or at a time."""
    before = datetime.now(UTC)
    server.publish("s", event("a"))
    server.publish("s", event("b"))
    with virta.open(server.data_dir / "log", read_only=True) as log:
        offset = next(iter(log.read(topics="s"))).offset

    assert ids(read(server.port, "/channels/s/from/earliest", 2)) == ["a", "b"]
    assert ids(read(server.port, f"/channels/s/from/{offset + 1}", 1)) == ["b"]
    moment = before.isoformat().replace("+", "%2B")
    assert ids(read(server.port, f"/channels/s/from/{moment}", 2)) == ["a", "b"]
    assert ids(read(server.port, f"/channels/s/from/{before:%Y-%m-%dT%H:%M:%SZ}/", 2)) == ["a", "b"]
    # A reconnecting browser repeats the path; the id it saw last is the better place.
    assert ids(
        read(server.port, "/channels/s/from/earliest", 1, {"Last-Event-ID": "%2F%2Ftest+a"})
    ) == ["b"]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("2020-01-01t00:00:00z", ["only"]),
        ("2016-12-31T23:59:60Z", ["only"]),
        ("0001-01-01T00:00:00%2B14:00", ["only"]),
        ("9999-12-31T23:59:59-12:00", ["after"]),
    ],
)
def test_unusual_times(server, start, expected):
    """Small letters, leap seconds and times beyond the calendar are times like any other."""
    channel = f"times-{len(start)}-{start[:4]}"
    server.publish(channel, event("only"))

    async def scenario():
        consumer = await Consumer.open(server.port, f"/channels/{channel}/from/{start}")
        await consumer.connected()
        if expected == ["after"]:
            server.publish(channel, event("after"))
        found = await consumer.frame()
        await consumer.close()
        return found

    assert ids([asyncio.run(scenario())]) == expected


def test_an_offset_beyond_the_end_is_told_as_a_gap(server):
    """Who asks for an offset that this log has not reached has another log in mind."""
    server.publish("beyond", event("a"))

    found = read(server.port, "/channels/beyond/from/123456789", 1)

    assert found[0].event == "gap"
    assert found[0].json["reason"] == "unknown-offset"
    assert found[0].json["from"] == 123456789


@pytest.mark.parametrize("start", ["never", "-1", "2024-13-01T00:00:00Z", "%zz"])
def test_bad_start_points(server, start):
    """A start that is none of these is 400 with a sentence."""
    answer = server.request("GET", f"/channels/s/from/{start}")

    assert (answer.status, answer.code) == (400, "invalid-start")
    assert answer.json["message"]


def test_replay_and_live_meet_without_gap_or_duplicate(server):
    """Consumers that start in the past while events pour in see each event once, in order."""
    total = 2000

    async def scenario():
        async def pour():
            for first in range(0, total, 20):
                batch = [event(f"{n:05}") for n in range(first, first + 20)]
                await asyncio.to_thread(server.publish, "seam", *batch)

        async def consume(delay):
            await asyncio.sleep(delay)  # not to wait for something: to start at different places
            consumer = await Consumer.open(server.port, "/channels/seam/from/earliest")
            await consumer.connected()
            found = ids(await consumer.frames(total))
            await consumer.close()
            return found

        _, *found = await asyncio.gather(pour(), *[consume(n * 0.02) for n in range(10)])
        return found

    for found in asyncio.run(scenario()):
        assert found == [f"{n:05}" for n in range(total)]


def test_kill_in_the_middle_of_publishing(start, tmp_path):
    """After SIGKILL every 202 is in the log once, repeats are known, consumers resume exactly."""
    server = start("--durability", "group")
    accepted = []

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/k")
        await consumer.connected()

        async def publish(worker):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for n in range(10_000):
                body = json.dumps(event(f"{worker}-{n}")).encode()
                head = f"POST /channels/k HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/cloudevents+json\r\nContent-Length: {len(body)}\r\n\r\n"
                try:
                    writer.write(head.encode() + body)
                    line = await reader.readline()
                    while (await reader.readline()) not in {b"\r\n", b""}:
                        pass
                    await reader.readexactly(19)
                except (ConnectionError, asyncio.IncompleteReadError):
                    break
                assert line.startswith(b"HTTP/1.1 202")
                accepted.append(f"{worker}-{n}")
            await shut(writer)

        workers = [asyncio.ensure_future(publish(w)) for w in range(8)]
        seen = []
        while len(accepted) < 2000:
            seen.append(await consumer.frame())
        server.process.send_signal(signal.SIGKILL)
        await asyncio.gather(*workers)
        await consumer.close()
        return seen

    seen = asyncio.run(scenario())
    server.stop()
    with virta.open(server.data_dir / "log") as log:
        stored = [json.loads(record.value)["id"] for record in log.read(topics="k")]
    assert len(stored) == len(set(stored))
    assert set(accepted) <= set(stored)

    again = start()
    again.publish("k", *[event(id_) for id_ in accepted[-100:]], event("last"))
    rest = len(stored) - stored.index(seen[-1].json["id"])
    resumed = ids(read(again.port, "/channels/k", rest, {"Last-Event-ID": seen[-1].id}))

    assert ids(seen) + resumed == [*stored, "last"]


def test_an_id_beyond_the_horizon_is_found_in_the_log(start):
    """The table of repeats forgets; the log does not: resuming works after any time away."""
    server = start("--idempotency-expiration-ms", 0)
    server.publish("far", *[event(f"far-{n}", source="a b") for n in range(5)])

    found = read(server.port, "/channels/far", 2, {"Last-Event-ID": "a+b+far-2"})

    assert ids(found) == ["far-3", "far-4"]


def test_trimmed_history_is_told_as_a_gap(start, tmp_path):
    """Offsets that retention took away are named in a gap frame, and what is left follows."""
    data = tmp_path / "small"
    with virta.open(data / "log", segment_bytes=4096) as log:
        server = start("--durability", "none", data_dir=data)
        for n in range(400):
            value = json.dumps(event(f"t-{n}", {"pad": "x" * 100})).encode()
            log.append("t", b"", value, durability="none")
        log.retain(max_bytes=4096)
        first = log.first_offset
    assert first > 0
    server.publish("sync", event("the server has read all"))

    gap, event_ = read(server.port, "/channels/t/from/0", 2)

    assert gap.event == "gap"
    assert (gap.json["from"], gap.json["resumedAt"]) == (0, first)
    assert event_.json["id"] == f"t-{first}"


def test_stalled_replays_keep_nobody_from_reading(start):
    """More consumers than replays may run at once stop in the middle of history; another gets it all."""
    total = 400
    # They stand still for as long as the other one reads, which is no fault of theirs.
    server = start("--durability", "none", "--slow-consumer-ms-max", 600_000)
    for first in range(0, total, 20):
        server.publish("h", *[event(f"{n:05}", "x" * 50_000) for n in range(first, first + 20)])

    async def scenario():
        stalled = []
        for _ in range(40):
            consumer = await Consumer.open(server.port, "/channels/h/from/earliest")
            consumer.writer.transport.pause_reading()
            stalled.append(consumer)
        fine = await Consumer.open(server.port, "/channels/h/from/earliest")
        await fine.connected()
        found = ids(await fine.frames(total))
        await fine.close()
        late = stalled.pop()
        late.writer.transport.resume_reading()
        await late.connected()
        resumed = ids(await late.frames(total))
        for consumer in (late, *stalled):
            await consumer.close()
        return found, resumed

    found, resumed = asyncio.run(scenario())

    assert found == resumed == [f"{n:05}" for n in range(total)]


def test_only_as_many_repeats_are_known_after_a_restart_as_before(start):
    """The table rebuilt from the log's tail has the newest keys, up to the limit, and no older ones."""
    flags = ["--max-idempotency-keys", 3, "--durability", "none"]
    server = start(*flags)
    server.publish("few", *[event(str(n)) for n in range(6)])
    server.stop()
    server = start(*flags)
    server.publish("few", event("5"), event("0"))

    with virta.open(server.data_dir / "log", read_only=True, visibility="committed") as log:
        stored = [json.loads(record.value)["id"] for record in log.read(topics="few")]

    assert stored == ["0", "1", "2", "3", "4", "5", "0"]


def test_repeats_in_the_log_itself_are_known_after_a_restart(start):
    """Keys are read from the tail with gaps between their offsets: a repeat, and a record that is no event."""
    server = start("--durability", "none")
    server.stop()
    with virta.open(server.data_dir / "log") as log:
        for value in (event("a"), event("a"), {"no": "event"}, event("b")):
            log.append("odd", b"", value)
    server = start("--durability", "none", data_dir=server.data_dir)
    server.publish("odd", event("a"), event("b"), event("c"))

    with virta.open(server.data_dir / "log", read_only=True, visibility="committed") as log:
        stored = [json.loads(record.value).get("id") for record in log.read(topics="odd")]

    assert stored == ["a", "a", None, "b", "c"]
