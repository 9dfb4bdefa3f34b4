"""The fast path: publications with a cached head get the same responses as through the parser."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import threading

import pytest
from server_harness import BATCH, STRUCTURED, Consumer, event, ids

import virta
from virta.server.http.head_cache import HEADS_MAX, HeadCache

BODIES = [
    (STRUCTURED, json.dumps(event("fine")).encode(), b"202", b"accepted"),
    (STRUCTURED, json.dumps(event("ünïcode"), ensure_ascii=False).encode(), b"202", b"accepted"),
    (STRUCTURED, b'{"source":"//s","id":7}', b"202", b"accepted"),
    (STRUCTURED, b'{"source":"//s",\n"id":"lines"}', b"202", b"accepted"),
    (STRUCTURED, b'{"source":"//s","id":"\\ud800"}', b"202", b"accepted"),
    (STRUCTURED, b'{"source":"//s","id":"x"', b"400", b"invalid-json-body"),
    (STRUCTURED, b'{"source":"//s","id":"\xff"}', b"400", b"invalid-json-body"),
    (STRUCTURED, b'{"id":"x"}', b"400", b"missing-event-source"),
    (STRUCTURED, b'{"source":"//s"}', b"400", b"missing-event-id"),
    (BATCH, json.dumps([event(f"b{n}") for n in range(300)]).encode(), b"202", b"accepted"),
    (BATCH, b"[]", b"202", b"accepted"),
    (BATCH, json.dumps([event(f"b{n % 20}") for n in range(30)]).encode(), b"202", b"accepted"),
    (
        BATCH,
        json.dumps([*map(event, "abcdefghijklmnopq"), 7]).encode(),
        b"400",
        b"invalid-json-body",
    ),
    (BATCH, b'[{"source":"//s","id":"x"},{"id":"x"}]', b"400", b"missing-event-source"),
]


def request(channel, body, kind=STRUCTURED, more=b""):
    return (
        b"POST /channels/%b HTTP/1.1\r\nHost: localhost\r\n%bContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (channel.encode(), more, kind.encode(), len(body), body)
    )


class Talk:
    """A connection that sends pieces and reads whole responses."""

    def __init__(self, server):
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.read = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.read.close()
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def answer(self):
        """Return the head and body of one response."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.read.readline()
            assert line, "the connection ended"
            head += line
        return head, self.read.read(int(re.search(rb"Content-Length: (\d+)", head)[1]))


@pytest.mark.parametrize("case", range(len(BODIES)))
def test_a_cached_head_changes_no_response(server, case):
    """The first request is parsed, the second takes the fast path: same status, headers, body."""
    kind, body, status, code = BODIES[case]
    with Talk(server) as talk:
        seen, repeats = [], []
        for _ in range(3):
            talk.send(request(f"same-{case}", body, kind))
            head, said = talk.answer()
            assert head.split()[1] == status
            assert json.loads(said)["code"].encode() == code
            names = [line.split(b":")[0] for line in head.split(b"\r\n")[1:]]
            repeats.append(b"Virta-Duplicate" in names)
            seen.append(([name for name in names if name != b"Virta-Duplicate"], said))
    assert seen[0] == seen[1] == seen[2]
    accepted = status == b"202" and body != b"[]"
    assert repeats == [False, accepted, accepted]


def test_pieces_of_a_request_with_a_cached_head(server):
    """However the bytes arrive, each request is answered once and stored once."""
    whole = request("pieces", json.dumps(event("p")).encode())
    with Talk(server) as talk:
        for cut in (1, 30, len(whole) - 40, len(whole) - 1):
            talk.send(whole)
            assert talk.answer()[0].split()[1] == b"202"
            talk.send(whole[:cut])
            # An answer to somebody else is a sign that the first piece was read.
            assert server.request("GET", "/livez").status == 200
            talk.send(whole[cut:])
            assert talk.answer()[0].split()[1] == b"202"
        head = whole.index(b"\r\n\r\n") + 4
        for _ in range(3):
            talk.send(whole[:head])
            assert server.request("GET", "/livez").status == 200
            talk.send(whole[head : head + 9])
            assert server.request("GET", "/livez").status == 200
            talk.send(whole[head + 9 :])
            assert talk.answer()[0].split()[1] == b"202"
        talk.send(whole + whole + whole[:50])
        talk.send(whole[50:] + whole)
        for _ in range(4):
            assert talk.answer()[0].split()[1] == b"202"


def test_requests_after_a_fast_publication_keep_their_order(server):
    """Requests of one connection are published and answered in their order, on either path."""

    async def scenario():
        stream = await Consumer.open(server.port, "/channels/order")
        await stream.connected()
        with Talk(server) as talk:
            talk.send(request("order", json.dumps(event("a")).encode()))
            talk.answer()
            wanted = ["a"]
            for turn in range(20):
                quick, slow = f"{chr(98 + turn)}", f"slow-{turn}"
                talk.send(request("order", json.dumps(event(quick)).encode()))
                talk.send(
                    request("order", json.dumps(event(slow)).encode(), more=b"X: %d\r\n" % turn)
                )
                talk.send(b"DELETE /channels/order HTTP/1.1\r\nHost: localhost\r\n\r\n")
                wanted += [quick, slow]
                statuses = [talk.answer()[0].split()[1] for _ in range(3)]
                assert statuses == [b"202", b"202", b"405"]
        received = ids(await stream.frames(len(wanted)))
        await stream.close()
        return wanted, received

    wanted, received = asyncio.run(scenario())
    assert received == wanted


def test_a_half_closed_connection_gets_its_response(start):
    """A client may half-close the connection after a publication, also during its sync."""
    with start("--durability", "group") as server:
        whole = request("half", json.dumps(event("h")).encode())
        for _ in range(5):
            with Talk(server) as talk:
                talk.send(whole)
                talk.socket.shutdown(socket.SHUT_WR)
                assert talk.answer()[0].split()[1] == b"202"
                assert talk.read.read() == b""


def test_batches_and_events_of_one_turn_keep_their_order(start):
    """In one turn of the loop, each connection's events are stored whole and in order."""
    with start("--durability", "none") as server:
        batches = [[event(f"{c}-{n:02d}") for n in range(40)] for c in "abc"]
        parts = [(BATCH, json.dumps(batch).encode()) for batch in batches]
        parts += [(STRUCTURED, json.dumps(event(f"x-{n}")).encode()) for n in range(3)]
        order = [parts[n] for n in (3, 0, 4, 1, 2, 5)]
        with contextlib.ExitStack() as stack:
            talks = [stack.enter_context(Talk(server)) for _ in order]
            for talk, (kind, body) in zip(talks, order, strict=True):
                talk.send(request("turn", body, kind))
                assert talk.answer()[0].split()[1] == b"202"
            server.process.send_signal(signal.SIGSTOP)
            for talk, (kind, body) in zip(talks, order, strict=True):
                talk.send(request("turn", body.replace(b"-", b"+"), kind))
            server.process.send_signal(signal.SIGCONT)
            for talk in talks:
                assert talk.answer()[0].split()[1] == b"202"
        with virta.open(server.data_dir / "log", visibility="committed") as log:
            stored = [json.loads(record.value)["id"] for record in log.read(topics="turn")]
    first, second = stored[:123], stored[123:]
    assert first == [
        *("x-0", *[e["id"] for e in batches[0]], "x-1"),
        *[e["id"] for batch in batches[1:] for e in batch],
        "x-2",
    ]
    assert sorted(second) == sorted(id_.replace("-", "+") for id_ in first)
    for letter in "abc":
        mine = [id_ for id_ in second if id_.startswith(letter)]
        at = second.index(mine[0])
        assert second[at : at + 40] == mine == sorted(mine)


def test_a_body_that_does_not_arrive(server, start):
    """After a cached head: too late is 408, too short 400; both end the connection."""
    whole = request("late", json.dumps(event("l")).encode())
    with start("--body-timeout-ms", 300, "--durability", "none") as impatient:
        for cut in (1, 20):
            with Talk(impatient) as talk:
                talk.send(whole)
                assert talk.answer()[0].split()[1] == b"202"
                talk.send(whole[:-cut])
                assert talk.answer()[0].split()[1] == b"408"
                assert talk.read.read() == b""
    for cut in (1, 20):
        with Talk(server) as talk:
            talk.send(whole)
            assert talk.answer()[0].split()[1] == b"202"
            talk.send(whole[:-cut])
            talk.socket.shutdown(socket.SHUT_WR)
            assert talk.answer()[0].split()[1] == b"400"
            assert talk.read.read() == b""


def test_a_head_that_differs_is_parsed(server):
    """One more header is another head: `Connection: close` and `Expect` take effect."""
    body = json.dumps(event("d")).encode()
    for more, first in ((b"Connection: close\r\n", b"202"), (b"Expect: 100-continue\r\n", b"100")):
        for _ in range(2):
            with Talk(server) as talk:
                talk.send(request("differs", body))
                assert talk.answer()[0].split()[1] == b"202"
                talk.send(request("differs", body, more=more))
                assert talk.read.readline().split()[1] == first


def test_binary_events_are_cached_without_their_attributes(server):
    """Each event has its own attributes; a head over the limits of the cache is parsed."""
    body = b'{"n":1}'

    def binary(id_, more=b""):
        return (
            b"POST /channels/attributes HTTP/1.1\r\nHost: localhost\r\nce-source: //s\r\nCe-Id: %b\r\n%b"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (id_, more, len(body), body)
        )

    wanted = [b"%d" % n for n in range(20)] + [b"x" * 900, b"y" * 1100, b"2 words", b"\xc3\xbc"]
    with Talk(server) as talk:
        for id_ in [*wanted, *wanted]:
            talk.send(binary(id_))
            assert talk.answer()[0].split()[1] == b"202"
        for bad in (b"ce-id\r\n", b"ce-id: \x01\r\n"):
            talk.send(binary(b"more", b"ce-x: 1\r\n"))
            assert talk.answer()[0].split()[1] == b"202"
            with Talk(server) as other:
                other.send(binary(b"never", bad))
                assert other.answer()[0].split()[1] == b"400"
    with virta.open(server.data_dir / "log", visibility="committed") as log:
        stored = [json.loads(record.value) for record in log.read(topics="attributes")]
    assert [made["id"].encode() for made in stored] == [*wanted, b"more"]
    assert stored[0] == {
        "source": "//s", "id": "0", "datacontenttype": "application/json", "data": {"n": 1}
    }  # fmt: skip


def test_which_heads_are_cached():
    """Heads that differ from a cached one only in values of attributes; the body starts after each."""
    cache = HeadCache(500)

    def head(*lines, first=b"POST /channels/c HTTP/1.1"):
        return b"\r\n".join([first, b"Host: localhost", *lines, b"Content-Length: 7"])

    def learn(made):
        cache.add(made, "c", b"application/json", b"application/json", 7)

    usual = head(b"ce-id: 1", b"CE-source: s", b"Content-Type: application/json")
    other = usual.replace(b": 1", b": a longer one, \xc3\xbc")
    assert cache[usual] is None
    learn(usual)
    for made in (usual, other):
        start, kind = len(made) + 4, b"application/json"
        id_ = made.split(b"ce-id: ")[1].split(b"\r\n")[0]
        attributes = [(b"ce-id", id_), (b"ce-source", b"s")]
        assert cache[made] == (start + 7, start, "c", kind, kind, attributes, None)
    for made in (
        usual.replace(b"ce-id: 1", b"ce-id"),
        usual.replace(b"ce-id: 1", b"ce-id:1"),
        usual.replace(b"ce-id: 1", b"ce-id: 1 "),
        usual.replace(b"ce-id: 1", b"ce-id: \x01"),
        usual.replace(b"ce-id: 1", b"ce-id: 1\r\nce-id: 1"),
        usual.replace(b"ce-id: 1", b"ce-id: " + b"1" * 500),
        usual.replace(b"Length: 7", b"Length: 8"),
        usual.replace(b"/c ", b"/d "),
    ):
        assert cache[made] is None
    for odd in (
        b"ce-datacontenttype: application/json",
        b"ce-x: folded\r\n line",
        b"ce-x:",
        b"ce-x-y: 1",
        b"ce-x: 1\nce-y: 2",
        b"ce-x: " + b"1" * 1024,
    ):
        strange = head(b"ce-id: 1", b"ce-source: s", odd)
        learn(strange)
        assert cache[strange] is None
    assert cache == {}  # binary events only
    for number in range(HEADS_MAX):
        learn(head(b"ce-id: 1", b"X: %d" % number))
    assert cache[usual] is None  # the cache was full, and starts again


def test_tokens_are_checked_on_the_fast_path(start, tmp_path):
    """A head is cached with its token; another token is another head."""
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-that-is-long\n")
    tokens.chmod(0o600)
    with start("--token-file", tokens) as server:
        body = json.dumps(event("t")).encode()
        with Talk(server) as talk:
            for _ in range(3):
                good = b"Authorization: Bearer a-token-that-is-long\r\n"
                talk.send(request("t", body, more=good))
                assert talk.answer()[0].split()[1] == b"202"
        for more in (b"", b"Authorization: Bearer a-token-that-is-lonG\r\n"):
            with Talk(server) as talk:
                talk.send(request("t", body, more=more))
                assert talk.answer()[0].split()[1] == b"401"


def until_refused(server):
    """Connect until the server refuses."""
    with contextlib.suppress(OSError):
        while server.request("GET", "/livez").status == 200:
            continue


def test_a_draining_server_answers_what_it_has_read(start):
    """After SIGTERM a publication that had begun is accepted or refused; then the connection ends."""
    with start("--durability", "none", "--drain-timeout-ms", 60_000) as server:
        fine = request("drain", json.dumps(event("fine")).encode())
        bad = request("drain", b'{"source":"//s","id":"x"')
        with Talk(server) as first, Talk(server) as second:
            for talk, whole, status in ((first, fine, b"202"), (second, bad, b"400")):
                talk.send(whole)
                assert talk.answer()[0].split()[1] == status
                talk.send(whole[:-5])
            assert server.request("GET", "/livez").status == 200
            server.process.send_signal(signal.SIGTERM)
            until_refused(server)
            for talk, whole, status in ((first, fine, b"202"), (second, bad, b"400")):
                talk.send(whole[-5:])
                head, _ = talk.answer()
                assert head.split()[1] == status
                assert b"Connection: close\r\n" in head
                assert talk.read.read() == b""
        assert server.stop() == 0


def test_sigterm_under_load_loses_no_accepted_event(start):
    """Every accepted event is in the log; connections end between two responses."""
    with start("--durability", "group") as server:
        accepted = [[] for _ in range(8)]

        def publish(which):
            with Talk(server) as talk, contextlib.suppress(OSError, AssertionError):
                for number in range(100_000):
                    id_ = f"{which}-{number:06d}"
                    talk.send(request("load", json.dumps(event(id_)).encode()))
                    assert talk.answer()[0].split()[1] == b"202"
                    accepted[which].append(id_)

        threads = [threading.Thread(target=publish, args=(n,)) for n in range(len(accepted))]
        for thread in threads:
            thread.start()
        while min(map(len, accepted)) < 20:
            server.request("GET", "/livez")
        assert server.stop() == 0
        for thread in threads:
            thread.join()
        with virta.open(server.data_dir / "log") as log:
            stored = [json.loads(r.value)["id"] for r in log.read(topics="load")]
    assert len(stored) == len(set(stored))
    for which, ids_ in enumerate(accepted):
        kept = [id_ for id_ in stored if id_.startswith(f"{which}-")]
        assert kept[: len(ids_)] == ids_
        assert len(kept) - len(ids_) <= 1


def test_too_many_at_once_get_retry_after(start):
    """On the fast path: 429 with Retry-After, and nothing is stored."""
    flags = ("--max-outstanding-events-per-router-thread", 10, "--router-threads", 1)
    with start(*flags, "--durability", "none") as server:
        batch = request("many", json.dumps([event(f"{n:03d}") for n in range(200)]).encode(), BATCH)
        one = [request("many", json.dumps(event(f"x{n}")).encode()) for n in range(3)]
        with contextlib.ExitStack() as stack:
            talks = [stack.enter_context(Talk(server)) for _ in range(3)]
            for talk, whole in zip(talks, one, strict=True):
                talk.send(whole)
                talk.answer()
            talks[0].send(batch)
            assert talks[0].answer()[0].split()[1] == b"202"
            # Stopped, the server finds all of them in one turn when it goes on.
            server.process.send_signal(signal.SIGSTOP)
            talks[0].send(batch.replace(b'"0', b'"1'))
            for talk in talks[1:]:
                talk.send(one[0])
            server.process.send_signal(signal.SIGCONT)
            heads = [talk.answer()[0] for talk in talks]
    statuses = sorted(head.split()[1] for head in heads)
    assert set(statuses) <= {b"202", b"429"}
    for head in heads:
        assert (b"Retry-After: " in head) == (head.split()[1] == b"429")
