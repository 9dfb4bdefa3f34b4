"""Positions and offsets on the wire: every id is a place from which nothing is lost."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
from urllib.parse import quote, urlencode

import pytest
from server_harness import BATCH, STRUCTURED, Consumer, event, ids, narrow_socket, shut
from websockets.asyncio.client import connect

import virta
from virta.hub.resume.positions import NOWHERE, tag_of

POSITION = re.compile(r"([0-9a-f]{12})\.([0-9]+)")
QUICK_PINGS = ("--ping-interval-ms", 100, "--durability", "none")


def tag(server):
    with virta.open(server.data_dir / "log", read_only=True) as log:
        return tag_of(log.id)


def offset_of(position):
    return int(POSITION.fullmatch(position)[2])


async def listen(server, path, count, headers=None):
    """Return `connect` and a number of frames after it; pings come in between when the server takes its time."""
    consumer = await Consumer.open(server.port, path, headers)
    opened = await consumer.connected()
    found = []
    while len(found) < count:
        frame = await consumer.frame()
        if frame.event != "ping":
            found.append(frame)
    await consumer.close()
    return opened, found


def heard(server, path, count, headers=None):
    return asyncio.run(listen(server, path, count, headers))


def resume(server, channel, seen, count):
    """Return what follows `seen`, which is given in every possible way; all must agree."""
    ways = [
        heard(server, f"/channels/{channel}", count, {"Last-Event-ID": seen}),
        heard(server, f"/channels/{channel}?$last-event-id={quote(seen, safe='')}", count),
        heard(server, f"/channels/{channel}?%24last-event-id={quote(seen, safe='')}", count),
    ]
    if not seen.isdigit():  # an offset in the path is one to begin with
        path = f"/channels/{channel}/from/{quote(seen, safe='')}"
        ways.append(heard(server, path, count))
    found = [[(f.event, f.id, f.data) for f in frames if f.event != "gap"] for _, frames in ways]
    assert all(one == found[0] for one in found)
    return ways[0][1]


# The 202.


@pytest.mark.parametrize("native", [True, False])
def test_a_202_says_where_the_event_is(start, native):
    """Single events and batches, first and repeated, on the fast path and the general one."""
    server = start("--durability", "none", environ={} if native else {"VIRTA_PLAIN": "1"})

    def post(*events, kind=STRUCTURED):
        body = json.dumps(events[0] if kind == STRUCTURED else list(events))
        answer = server.request("POST", "/channels/o", body, {"Content-Type": kind})
        assert answer.status == 202
        return answer.headers.get("virta-offset"), answer.headers.get("virta-duplicate")

    assert post(event("a")) == ("0", None)
    assert post(event("b")) == ("1", None)  # a head that is known
    assert post(event("a")) == ("0", "true")
    many = [event(f"m{n}") for n in range(40)]
    assert post(*many, kind=BATCH) == ("2", None)
    assert post(*many, kind=BATCH) == ("2", "true")
    assert post(event("m7")) == ("9", "true")
    # Of a batch with repeats, the first that it wrote.
    assert post(many[0], event("c"), event("d"), kind=BATCH) == ("42", None)
    assert post(event("e"), event("e"), kind=BATCH) == ("44", None)
    assert post(event("f"), *many, kind=BATCH) == ("45", None)
    assert post(kind=BATCH) == (None, None)
    binary = {"Content-Type": "application/json", "ce-source": "//test", "ce-id": "bin"}
    for repeat in (None, "true", "true"):
        answer = server.request("POST", "/channels/o", "{}", binary)
        found = (answer.headers["virta-offset"], answer.headers.get("virta-duplicate"))
        assert found == ("46", repeat)
    with virta.open(server.data_dir / "log", read_only=True, visibility="committed") as log:
        stored = [json.loads(record.value)["id"] for record in log.read()]
    assert [stored[n] for n in (0, 1, 2, 9, 42, 44, 45, 46)] == [
        "a", "b", "m0", "m7", "c", "e", "f", "bin",
    ]  # fmt: skip


def test_an_original_that_is_forgotten_has_no_offset(start):
    """A repeat within the same batch is still a repeat after its key has expired."""
    server = start("--max-idempotency-keys", 1, "--durability", "none")
    one = server.publish("o", event("a"))
    again = server.publish("o", event("a"))

    assert one.headers["virta-offset"] == again.headers["virta-offset"] == "0"
    assert again.headers["virta-duplicate"] == "true"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("query", ["", "x=1"])
def test_frames_carry_offsets(start, native, query):
    """Live and replayed, alone and in batches, with positions and without."""
    server = start("--durability", "none", environ={} if native else {"VIRTA_PLAIN": "1"})

    async def scenario():
        plain = await Consumer.open(server.port, f"/channels/f?{query}")
        asking = await Consumer.open(server.port, f"/channels/f?{query}&$positions=1")
        first = [await plain.connected(), await asking.connected()]
        server.publish("other", event("0"))
        server.publish("f", event("1", {"x": 1}))
        server.publish("f", *[event(f"b{n}", {"x": n % 2}) for n in range(30)])
        count = 1 + (15 if query else 30)
        live = await plain.frames(count), await asking.frames(count)
        await plain.close()
        await asking.close()
        again = [
            (await listen(server, f"/channels/f/from/earliest?{query}", count, headers))[1]
            for headers in ({}, {"Virta-Positions": "1"})
        ]
        return first, live, again

    first, live, again = asyncio.run(scenario())

    mark = tag(server)
    assert [frame.id for frame in first] == [f"{mark}.0", f"{mark}.0"]
    expected = [1, *[n + 2 for n in range(30) if n % 2 or not query]]
    for frames in (*live, *again):
        assert [json.loads(frame.comment)["offset"] for frame in frames] == expected
        assert all(json.loads(frame.comment)["timestamp"] for frame in frames)
    for plain in (live[0], again[0]):
        assert [f.id for f in plain] == [f"%2F%2Ftest+{id_}" for id_ in ids(plain)]
    for asking in (live[1], again[1]):
        assert [f.id for f in asking] == [f"{mark}.{offset + 1}" for offset in expected]
    assert [f.data for f in live[0]] == [f.data for f in live[1]]


def test_http_1_0(server):
    """A stream without chunks has the same ids."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as old:
        old.sendall(b"GET /channels/old?$positions=1 HTTP/1.0\r\nHost: localhost\r\n\r\n")
        text = b""
        while b"event: connect" not in text or not text.endswith(b"\n\n"):
            received = old.recv(65536)
            assert received, text
            text += received
        answer = server.publish("old", event("1"))
        offset = int(answer.headers["virta-offset"])
        while b"event: data" not in text or not text.endswith(b"\n\n"):
            received = old.recv(65536)
            assert received, text
            text += received

    assert b"\nid: %b.%d\n" % (tag(server).encode(), offset + 1) in text


# Where to resume from.


def test_each_kind_of_id_resumes_after_it(server):
    """Positions, offsets, source and id: the same events follow."""
    answer = server.publish("kinds", *[event(f"k {n}") for n in range(5)])
    first = int(answer.headers["virta-offset"])
    mark = tag(server)

    for seen in (f"{mark}.{first + 2}", str(first + 1), "%2F%2Ftest+k%201"):
        assert ids(resume(server, "kinds", seen, 3)) == ["k 2", "k 3", "k 4"]
    # As older servers wrote a blank, and as a URL that was not escaped twice says it.
    assert ids(heard(server, "/channels/kinds", 2, {"Last-Event-ID": "%2F%2Ftest+k+2"})[1]) == [
        "k 3", "k 4",
    ]  # fmt: skip
    assert ids(heard(server, "/channels/kinds/from/%2F%2Ftest+k%202", 2)[1]) == ["k 3", "k 4"]
    assert ids(heard(server, f"/channels/kinds/from/{first + 3}", 2)[1]) == ["k 3", "k 4"]


def test_two_events_of_one_old_id_are_two(server):
    """Source `s`, id `1 2` and source `s 1`, id `2`: consumers of one do not skip to the other."""
    server.publish("pairs", event("1 2", source="s"), event("a"), event("2", source="s 1"))
    server.publish("pairs", event("b"))

    _, frames = heard(server, "/channels/pairs/from/earliest", 4)

    assert len({frame.id for frame in frames}) == 4
    for at, frame in enumerate(frames[:-1]):
        found = resume(server, "pairs", frame.id, 3 - at)
        assert [f.data for f in found] == [f.data for f in frames[at + 1 :]]
    # An id of an older server can mean both: continuing after the older one loses nothing.
    assert ids(heard(server, "/channels/pairs", 3, {"Last-Event-ID": "s+1+2"})[1]) == [
        "a",
        "2",
        "b",
    ]


@pytest.mark.parametrize(
    "flags", [("--idempotency-expiration-ms", 0), ("--max-idempotency-keys", 1)]
)
def test_an_id_that_occurs_twice_resumes_after_the_older(start, flags):
    """A publisher's late retry hides nothing, whether the table of repeats knows the newer or none."""
    server = start(*flags)
    server.publish("late", event("x"))
    server.publish("late", event("a"))
    server.publish("late", event("b"))
    server.publish("late", event("x"))

    found = resume(server, "late", "%2F%2Ftest+x", 3)

    assert [f.event for f in found] == ["data"] * 3
    assert ids(found) == ["a", "b", "x"]


def test_positions_of_other_logs_give_gaps(server):
    """Another log's position, and one beyond the end: a gap, then what is new."""
    server.publish("gaps", event("old"))
    mark = tag(server)

    for seen in ("0123456789ab.0", f"{mark}.{10**12}", NOWHERE):

        async def scenario(seen=seen):
            consumer = await Consumer.open(server.port, "/channels/gaps", {"Last-Event-ID": seen})
            opened, gap = await consumer.connected(), await consumer.frame()
            answer = server.publish("gaps", event(f"after {seen}"))
            live = await consumer.frame()
            await consumer.close()
            # Cut before the gap was sent: the id of `connect` leads to it again.
            _, again = await listen(server, "/channels/gaps", 1, {"Last-Event-ID": opened.id})
            return gap, answer, live, again[0]

        gap, answer, live, again = asyncio.run(scenario())

        assert gap.event == again.event == "gap"
        assert gap.json["reason"] == "unknown-position"
        assert gap.json["lastEventID"] == seen
        assert offset_of(gap.id) == gap.json["resumedAt"] == int(answer.headers["virta-offset"])
        assert live.json["id"] == f"after {seen}"


def test_trimmed_positions(start, tmp_path):
    """A position that retention has passed gives a gap, also for a consumer that received only `connect`."""
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
    mark = tag(server)

    opened, (gap, after) = heard(server, "/channels/t", 2, {"Last-Event-ID": f"{mark}.5"})

    assert opened.id == f"{mark}.5"
    assert (gap.json["reason"], gap.json["from"], gap.id) == ("trimmed", 5, f"{mark}.{first}")
    assert after.json["id"] == f"t-{first}"


def test_connect_is_the_start_of_a_replay(server):
    """Its position is where history begins, not that of live delivery."""
    answer = server.publish("begin", *[event(str(n)) for n in range(5)])
    first = int(answer.headers["virta-offset"])
    mark = tag(server)
    last_id = {"Last-Event-ID": "%2F%2Ftest+1"}

    for path, headers, offset in (
        (f"/channels/begin/from/{first}", {}, first),
        (f"/channels/begin/from/{mark}.{first + 3}", {}, first + 3),
        ("/channels/begin", last_id, first + 2),
        ("/channels/begin?$positions=1", last_id, first + 2),
    ):
        opened, frames = heard(server, path, 1, headers)
        assert opened.id == f"{mark}.{offset}"
        assert frames[0].json["id"] == str(offset - first)
        assert resume(server, "begin", opened.id, 1)[0].data == frames[0].data


def test_a_consumer_without_events_loses_nothing(start):
    """`connect` alone is enough to resume after SIGKILL."""
    server = start()
    opened, _ = heard(server, "/channels/quiet?x=1", 0)
    server.stop(signal.SIGKILL)
    with virta.open(server.data_dir / "log") as log:
        log.append("quiet", b"", json.dumps(event("by another process", {"x": 1})).encode())
    server = start()
    server.publish("quiet", event("no", {"x": 2}), event("after", {"x": 1}))

    _, found = heard(server, "/channels/quiet?x=1", 2, {"Last-Event-ID": opened.id})

    assert ids(found) == ["by another process", "after"]


# Pings, overflow and the end.


def test_pings_say_how_far_the_consumer_is(start):
    """A query that nothing matches moves on with the log; its ping resumes exactly."""
    server = start(*QUICK_PINGS)

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/p?x=1")
        opened = await consumer.connected()
        answer = server.publish("p", *[event(str(n), {"x": 2}) for n in range(20)])
        last = int(answer.headers["virta-offset"]) + 20
        ping = await consumer.frame()
        while offset_of(ping.id) < last:
            assert ping.event == "ping"
            ping = await consumer.frame()
        await consumer.close()
        return opened, ping, last

    opened, ping, last = asyncio.run(scenario())

    assert offset_of(opened.id) == 0
    assert ping.id == f"{tag(server)}.{last}"
    server.publish("p", event("new", {"x": 1}))
    assert ids(resume(server, "p", ping.id, 1)) == ["new"]


def test_no_ping_overtakes_what_waits(start):
    """Whatever a slow consumer has read last, resuming there gives everything it has not read."""
    server = start(*QUICK_PINGS, "--slow-consumer-bytes-max", 50_000_000)
    total = 60

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/slow", narrow=True)
        await consumer.connected()
        consumer.writer.transport.pause_reading()
        for n in range(total):
            await asyncio.to_thread(server.publish, "slow", event(str(n), "x" * 200_000))
        consumer.writer.transport.resume_reading()
        seen, places = [], []
        while len(seen) < total:
            frame = await consumer.frame()
            if frame.event == "data":
                seen.append(frame.json["id"])
            assert frame.event in {"data", "ping"}
            places.append((frame.id, len(seen)))
        await consumer.close()
        return seen, places

    seen, places = asyncio.run(scenario())

    assert seen == [str(n) for n in range(total)]
    for id_, count in places:
        if POSITION.fullmatch(id_):
            assert offset_of(id_) == count
    id_, count = places[len(places) // 2]
    assert ids(resume(server, "slow", id_, 1)) == [str(count)]


def test_dropped_events_are_delivered_after_resuming(start):
    """`overflow` has no id: resuming from the last id gives everything after it."""
    server = start(
        *("--durability", "none", "--slow-consumer-bytes-max", 1_000_000),
        *("--slow-consumer", "drop-oldest"),
    )
    total = 100

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/drop?$positions=1", narrow=True)
        opened = await consumer.connected()
        consumer.writer.transport.pause_reading()
        for n in range(total):
            await asyncio.to_thread(server.publish, "drop", event(str(n), "x" * 200_000))
        consumer.writer.transport.resume_reading()
        last, frame = opened.id, await consumer.frame()
        while frame.event != "overflow":
            last, frame = frame.id, await consumer.frame()
        behind = await consumer.frame()
        await consumer.close()
        return last, frame, behind

    last, overflow, behind = asyncio.run(scenario())

    assert overflow.id is None
    assert overflow.json["dropped"] == int(behind.json["id"]) - offset_of(last)
    _, found = heard(server, "/channels/drop", 2, {"Last-Event-ID": last})
    assert ids(found) == [str(offset_of(last)), str(offset_of(last) + 1)]


def test_disconnect_carries_the_place(start):
    """A consumer that gets `disconnect` resumes where it was, even without an event."""
    server = start("--durability", "none")

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/end?x=1")
        await consumer.connected()
        server.publish("end", event("no", {"x": 2}))
        server.process.send_signal(signal.SIGTERM)
        frames = await consumer.rest()
        await consumer.close()
        return frames

    (frame,) = asyncio.run(scenario())

    assert (frame.event, offset_of(frame.id)) == ("disconnect", 1)


def test_damage_in_history_gives_a_gap(start, tmp_path):
    """A replay over a damaged batch says so, where it had been silent."""
    data = tmp_path / "data"
    with virta.open(data / "log") as log:
        for n in range(30):
            log.append("d", b"", json.dumps(event(f"damage-{n:02}")).encode())
        path = log.segments()[0].path
    with open(path, "r+b") as file:
        file.seek(file.read().index(b"damage-10"))
        file.write(b"DAMAGED!!")
    server = start(data_dir=data)

    _, frames = heard(server, "/channels/d/from/earliest", 30)

    (gap,) = [frame for frame in frames if frame.event == "gap"]
    assert (gap.json["reason"], gap.json["from"], gap.json["resumedAt"]) == ("damaged", 10, 11)
    assert ids(frames) == [f"damage-{n:02}" for n in range(30) if n != 10]


# Options.


@pytest.mark.parametrize(
    ("query", "code", "words"),
    [
        ("$nothing=1", "unknown-option", ["'$nothing'", "$positions and $last-event-id"]),
        ("x=1&%24nothing", "unknown-option", ["/$nothing"]),
        ("$positions=yes", "invalid-option", ["1 or 0", "'yes'"]),
        ("$positions=1&$positions=1", "invalid-option", ["twice"]),
    ],
)
def test_bad_options(server, query, code, words):
    """An option that is none is refused with the names of those that are."""
    for path in ("/channels/c", "/channels/c/from/earliest"):
        answer = server.request("GET", f"{path}?{query}")
        assert (answer.status, answer.code) == (400, code)
        assert all(word in answer.json["message"] for word in words)
    answer = server.request("GET", "/channels/c", headers={"Virta-Positions": "maybe"})
    assert (answer.status, answer.code) == (400, "invalid-option")


def test_options_are_no_terms(server):
    """Options may be anywhere in a query and do not change what matches."""

    async def scenario():
        found = []
        for n, query in enumerate(
            [
                "$positions=1",
                "x=1&$positions=1",
                "$positions=1;x=1",
                "x=1;$positions=1&x=3",
                "/$x=1",
            ]
        ):
            consumer = await Consumer.open(server.port, f"/channels/terms{n}?{query}")
            await consumer.connected()
            data = [{"x": 1}, {"x": 2}, {"x": 3}, {"$x": 1}]
            server.publish(f"terms{n}", *[event(str(i), d) for i, d in enumerate(data)])
            server.publish(f"terms{n}", event("end", {"x": 1, "$x": 1}))
            frames = []
            while not frames or frames[-1].json["id"] != "end":
                frames.append(await consumer.frame())
            found.append(ids(frames)[:-1])
            await consumer.close()
        return found

    everything = ["0", "1", "2", "3"]
    assert asyncio.run(scenario()) == [everything, ["0"], ["0"], ["0", "2"], ["3"]]


def test_the_header_counts_more_than_the_url(server):
    """A browser that reconnects repeats its URL and sends what it saw last."""
    server.publish("both", *[event(str(n)) for n in range(4)])
    path = f"/channels/both/from/earliest?$last-event-id={quote('%2F%2Ftest+0', safe='')}"

    assert ids(heard(server, path, 1)[1]) == ["1"]
    assert ids(heard(server, path, 1, {"Last-Event-ID": "%2F%2Ftest+2"})[1]) == ["3"]


def test_streams_of_filters_have_positions(server):
    """`/filters/ID/events` takes the same options and starts."""
    body = json.dumps({"equals": {"x": 1}})
    filter_id = server.request("POST", "/filters/i/c", body).json["id"]
    answer = server.publish("i%2Fc", *[event(f"f{n}", {"x": n % 2}) for n in range(6)])
    first = int(answer.headers["virta-offset"])
    path, mark = f"/filters/{filter_id}/events", tag(server)

    for query, headers in (
        (f"?from={mark}.{first + 2}&$positions=1", {}),
        (f"?$last-event-id={mark}.{first + 2}&$positions=1", {}),
        ("?from=earliest", {"Last-Event-ID": "%2F%2Ftest+f1", "Virta-Positions": "1"}),
    ):
        opened, frames = heard(server, path + query, 2, headers)
        assert opened.id == f"{mark}.{first + 2}"
        assert [f.id for f in frames] == [f"{mark}.{first + n}" for n in (4, 6)]
    assert server.request("GET", f"{path}?$what=1").code == "unknown-option"


def test_the_meta_channel_has_no_history(server):
    """Coming back to it is a gap: what came and went meanwhile is nowhere."""

    async def scenario():
        consumer = await Consumer.open(server.port, "/channels/meta?$positions=1")
        opened = await consumer.connected()
        data = await consumer.frame()
        await consumer.close()
        _, (gap,) = await listen(server, "/channels/meta", 1, {"Last-Event-ID": opened.id})
        return data, gap

    data, gap = asyncio.run(scenario())

    assert data.id is None
    assert "offset" not in json.loads(data.comment)
    assert (gap.event, gap.json["reason"]) == ("gap", "no-history")


# What unknown ids cost.


def searched(server):
    text = server.request("GET", "/metrics").body.decode()
    return float(re.search(r"^virta_searched_bytes_total (\S+)$", text, re.MULTILINE)[1])


def test_unknown_ids_do_not_read_the_log_again_and_again(start, tmp_path):
    """Many at once read each byte of the log at most once, all together."""
    data = tmp_path / "data"
    value = json.dumps(event("%d", {"pad": "x" * 100}))
    with virta.open(data / "log") as log:
        for first in range(0, 60_000, 5000):
            values = [(value % n).encode() for n in range(first, first + 5000)]
            log.append_many([("u", b"", v) for v in values], durability="none")
        size = log.bytes
    server = start(data_dir=data)

    async def one(n):
        consumer = await Consumer.open(
            server.port, "/channels/u", {"Last-Event-ID": f"%2F%2Ftest+unknown-{n}"}
        )
        await consumer.connected()
        gap = await consumer.frame()
        await consumer.close()
        return gap.json["reason"]

    async def scenario():
        return await asyncio.gather(*[one(n) for n in range(200)])

    reasons = asyncio.run(scenario())

    assert set(reasons) == {"unknown-id"}
    assert 0 < searched(server) <= size
    read = searched(server)
    assert ids(resume(server, "u", "%2F%2Ftest+59998", 1)) == ["59999"]
    assert searched(server) == read


# WebSockets.


def socket_to(server, path, headers=None):
    return connect(
        f"ws://127.0.0.1:{server.port}{path}",
        subprotocols=["cloudevents.json"],
        additional_headers=headers or {},
        compression=None,
    )


async def messages(opened, count):
    return [json.loads(await asyncio.wait_for(opened.recv(), 10)) for _ in range(count)]


@pytest.mark.parametrize("header", [False, True])
def test_sockets_resume_by_position(server, header):
    """The messages carry positions, and each can be resumed from."""
    channel = f"ws-{header}"
    path, asked = f"/channels/{channel}?x=1", {"Virta-Positions": "1"} if header else {}

    async def scenario():
        async with socket_to(server, path + ("" if header else "&$positions=1"), asked) as opened:
            (hello,) = await messages(opened, 1)
            answer = await asyncio.to_thread(
                server.publish, channel, *[event(str(n), {"x": n % 2}) for n in range(6)]
            )
            live = await messages(opened, 3)
        found = []
        for place in (hello, *live[:-1]):
            query = urlencode({"$last-event-id": place["virtaposition"]})
            async with socket_to(server, f"{path}&{query}") as again:
                found.append(await messages(again, 2))
        return int(answer.headers["virta-offset"]), hello, live, found

    first, hello, live, found = asyncio.run(scenario())

    mark = tag(server)
    assert (hello["type"], hello["virtaposition"]) == ("virta.connect", f"{mark}.{first}")
    assert [e["virtaposition"] for e in live] == [f"{mark}.{first + n}" for n in (2, 4, 6)]
    assert {"specversion", "id", "source", "type", "time"} <= hello.keys()
    for (opened, missed), place, expected in zip(found, (hello, *live[:-1]), live, strict=True):
        assert opened["virtaposition"] == place["virtaposition"]
        assert missed == expected


def test_sockets_that_ask_for_no_position_get_none(server):
    """Without the option a socket carries what was published, byte for byte."""

    async def scenario():
        async with socket_to(server, "/channels/ws-plain") as opened:
            body = '{"source":"s",  "id":"1","virtaposition":"mine"}'
            headers = {"Content-Type": STRUCTURED}
            await asyncio.to_thread(server.request, "POST", "/channels/ws-plain", body, headers)
            return body, await asyncio.wait_for(opened.recv(), 10)

    body, message = asyncio.run(scenario())

    assert message == body


def test_a_socket_gets_a_gap_with_a_position(server):
    """The gap's position is where the socket continues."""

    async def scenario():
        async with socket_to(server, "/channels/ws-gap?$last-event-id=unknown+id") as opened:
            hello, gap = await messages(opened, 2)
            answer = await asyncio.to_thread(server.publish, "ws-gap", event("1"))
            (live,) = await messages(opened, 1)
            return hello, gap, live, int(answer.headers["virta-offset"])

    hello, gap, live, offset = asyncio.run(scenario())

    assert hello["virtaposition"] == NOWHERE
    assert (gap["type"], gap["data"]["reason"]) == ("virta.gap", "unknown-id")
    assert offset_of(gap["virtaposition"]) == offset
    assert offset_of(live["virtaposition"]) == offset + 1


def test_a_silent_socket_gets_positions(start):
    """When the log grows without an event for it, it gets a position; else nothing is sent."""
    server = start(*QUICK_PINGS)

    async def scenario():
        async with socket_to(server, "/channels/w?x=1&$positions=1") as opened:
            await messages(opened, 1)
            await asyncio.to_thread(server.publish, "w", event("no", {"x": 2}))
            (ping,) = await messages(opened, 1)
            # The log does not move: the next message is the event.
            await asyncio.to_thread(server.publish, "w", event("yes", {"x": 1}))
            (data,) = await messages(opened, 1)
            return ping, data

    ping, data = asyncio.run(scenario())

    assert (ping["type"], offset_of(ping["virtaposition"])) == ("virta.ping", 1)
    assert (data["id"], offset_of(data["virtaposition"])) == ("yes", 2)


@pytest.mark.slow
def test_a_socket_that_drops_gets_an_overflow(start):
    """With positions, a slow socket is notified of drops, and gets the events when it resumes."""
    flags = ("--slow-consumer-bytes-max", 1_000_000, "--slow-consumer", "drop-oldest")
    server = start("--durability", "none", *flags)

    async def scenario():
        url = f"ws://127.0.0.1:{server.port}/channels/d?$positions=1"
        options = {"max_queue": 1, "sock": narrow_socket(server.port), "compression": None}
        async with connect(url, subprotocols=["cloudevents.json"], **options) as opened:
            (last,) = await messages(opened, 1)
            for n in range(100):
                await asyncio.to_thread(server.publish, "d", event(str(n), "x" * 200_000))
            (message,) = await messages(opened, 1)
            while message["type"] != "virta.overflow":
                last = message
                (message,) = await messages(opened, 1)
            (behind,) = await messages(opened, 1)
            return last, message, behind

    last, overflow, behind = asyncio.run(scenario())

    lost = offset_of(behind["virtaposition"]) - 1 - offset_of(last["virtaposition"])
    assert overflow["data"]["dropped"] == lost > 0
    assert "virtaposition" not in overflow


def test_streams_resume_by_position(server):
    """Subtub's sockets, too: messages since, one for each subscription that matches, then live ones."""

    def publish(*pairs):
        body = json.dumps([{"publish_to": to, "payload": text} for to, text in pairs])
        assert server.request("POST", "/publish", body).status == 200

    async def scenario():
        path = "/subscribe?streams=res:a&streams=res:&max_queued=250"
        async with socket_to(server, f"{path}&$positions=1") as opened:
            (hello,) = await messages(opened, 1)
            await asyncio.to_thread(publish, ("res:a", "1"), ("other:", "no"), ("res:b", "2"))
            live = await messages(opened, 3)
        await asyncio.to_thread(publish, ("res:a:x", "3"))
        async with socket_to(server, f"{path}&$last-event-id={live[1]['position']}") as again:
            missed = await messages(again, 4)
            await asyncio.to_thread(publish, ("res:c", "4"))
            missed += await messages(again, 1)
        async with socket_to(server, f"{path}&$last-event-id={NOWHERE}") as lost:
            gap = await messages(lost, 2)
        return hello, live, missed, gap

    hello, live, missed, gap = asyncio.run(scenario())

    assert hello["connect"] == {}
    assert [m["payload"] for m in live] == ["1", "1", "2"]
    assert offset_of(live[0]["position"]) == offset_of(hello["position"]) + 1
    assert missed[0] == {"connect": {}, "position": live[1]["position"]}
    assert [m["payload"] for m in missed[1:]] == ["2", "3", "3", "4"]
    assert gap[1]["gap"]["reason"] == "unknown-position"


def test_streams_refuse_unknown_options(server):
    """With a sentence, as everything on this route."""

    async def scenario():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"GET /subscribe?streams=a:&max_queued=1&$x=1 HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        text = await asyncio.wait_for(reader.read(), 10)
        await shut(writer)
        return text

    text = asyncio.run(scenario())

    assert text.startswith(b"HTTP/1.1 400 ")
    assert b"$positions and $last-event-id" in text
