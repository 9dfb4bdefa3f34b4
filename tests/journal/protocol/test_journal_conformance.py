"""
The journal beside its specification: messages, faults, values and jobs, each case with its section.

The expected bytes come from `journal_reference`, which shares nothing with the product; what a scenario
expects was written by hand. Every scenario runs without I/O and through a daemon on a real socket.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import journal_reference as ref
import pytest
from journal_support import REPLY_WAIT_S, Clock, connected, daemon
from journal_vectors import DIRECTORY, play

from virta.journal.engine import JournalEngine
from virta.journal.protocol import codec
from virta.journal.protocol import messages as m
from virta.journal.sessions import Session

CLOCK = 10**9


def whole(part):
    """Long runs of one character are written as text, character and number."""
    if isinstance(part, dict):
        if part.keys() == {"text", "then", "times"}:
            return part["text"] + part["then"] * part["times"]
        return {name: whole(each) for name, each in part.items()}
    return [whole(each) for each in part] if isinstance(part, list) else part


CASES = whole(json.loads((DIRECTORY / "journal-conformance.json").read_text()))
CASES |= whole(json.loads((DIRECTORY / "journal-conformance-scenarios.json").read_text()))


def structure(message, *, reply):
    """Return the same message as the product's structure."""

    def value(part):
        return m.Value(part["value"][0], ref.raw(part["value"][1])) if "value" in part else None

    def pair(part):
        details = m.Details(**part["details"]) if "details" in part else None
        return m.Pair(ref.raw(part["key"]), value(part), details)

    fields = {name: message[name] for name in ("identifier", "timestamp") if name in message}
    fields |= {"timeout": message.get("timeout"), "query": message.get("query", 0)}
    if reply:
        made = m.Reply(flags=ref.named(message, ref.REPLY_BITS), **fields)
        made.error = ref.raw(message.get("error", "")).decode()
        made.pairs = [pair(part) for part in message["pairs"]] if "pairs" in message else None
        made.pair = pair(message["pair"]) if "pair" in message else None
        made.cursor = ref.raw(message["cursor"]) if "cursor" in message else None
        return made
    name = message["function"]
    return m.Request(
        ref.FUNCTIONS.index(name) if isinstance(name, str) else name,
        flags=ref.named(message, ref.REQUEST_BITS),
        ttl=message.get("ttl"),
        count=message.get("count", 0 if fields["query"] == 1 else None),
        key=ref.raw(message.get("key", "")),
        key2=ref.raw(message.get("key2", "")),
        value=value(message),
        **fields,
    )


@pytest.mark.parametrize("case", CASES["messages"], ids=lambda case: case["name"])
def test_messages(case, engine):
    """A message is its bytes and back, whole and in pieces; wider sizes than needed are read, not sent."""
    reply = "reply" in case
    message = case["reply" if reply else "request"]
    raw = (ref.reply_bytes if reply else ref.request_bytes)(message)
    parser, encode = (
        (codec.ReplyParser, codec.encode_reply)
        if reply
        else (codec.RequestParser, codec.encode_request)
    )
    expected = structure(message, reply=reply)
    pieces, step = parser(), max(1, len(raw) // 40)

    if "hex" in case:
        assert raw.hex() == case["hex"]
    else:
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (case["bytes"], case["sha256"])
    assert [expected] == parser().feed(raw)
    cut = [pieces.feed(raw[at : at + step]) for at in range(0, len(raw), step)]
    assert [expected] == [each for some in cut for each in some]
    if "wide" not in message:
        assert raw == encode(expected)


async def replies(reader):
    """Everything until the other side ends."""
    data = await asyncio.wait_for(reader.read(), REPLY_WAIT_S)
    found = []
    while data:
        reply, data = ref.read_reply(data)
        found.append(reply)
    return found


def test_faults():
    """Malformed streams end, without a reply or with the one that is due; others go on."""
    good = {"function": "NOP", "identifier": 5}
    end = ref.request_bytes({"function": "QUIT", "identifier": 9})

    async def send(server, case):
        reader, writer = await asyncio.open_connection(*server.address)
        after = b"" if case["closed"] else end
        writer.write(ref.request_bytes(good) + bytes.fromhex(case["bytes"]) + after)
        received = await replies(reader)
        writer.close()
        await writer.wait_closed()
        return [(one["identifier"], one.get("error", "").partition(":")[0]) for one in received]

    async def run():
        async with daemon(clock=Clock(CLOCK)) as server:
            return [await send(server, case) for case in CASES["faults"]]

    for case, received in zip(CASES["faults"], asyncio.run(run()), strict=True):
        refusal = [(7, case["error"] or "")] if case["error"] or not case["closed"] else []
        assert received == [(5, ""), *refusal, *([] if case["closed"] else [(9, "")])], case["name"]


class Alone:
    """The engine without I/O, fed and read as bytes."""

    def __init__(self, clock, directory):
        assert directory is None
        self.clock = clock
        self.engine = JournalEngine(clock)
        self.connections = {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    def _connection(self, name):
        if name not in self.connections:
            out = []
            session = Session(lambda message: out.append(codec.encode_reply(message)))
            self.connections[name] = session, out, codec.RequestParser()
        return self.connections[name]

    async def send(self, name, raw):
        session, out, parser = self._connection(name)
        self.engine.tick()
        for request in parser.feed(raw):
            out.append(codec.encode_reply(self.engine.handle(request, session)))

    async def receive(self, name):
        return self._connection(name)[1].pop(0)

    async def close(self, name):
        self.engine.close(self.connections.pop(name)[0])


class Daemon:
    """A daemon on a socket; with a directory it can be started again."""

    def __init__(self, clock, directory):
        self.clock = clock
        self.directory = directory
        self.connections = {}

    async def __aenter__(self):
        self._running = daemon(self.directory, clock=self.clock)
        self.server = await self._running.__aenter__()
        return self

    async def __aexit__(self, *_):
        for name in list(self.connections):
            await self.close(name)
        await self._running.__aexit__(None, None, None)

    async def restart(self):
        await self.__aexit__()
        await self.__aenter__()

    async def send(self, name, raw):
        if name not in self.connections:
            self.connections[name] = [*await asyncio.open_connection(*self.server.address), b""]
        self.connections[name][1].write(raw)

    async def receive(self, name):
        connection = self.connections[name]
        while True:
            try:
                _, rest = ref.read_reply(connection[2])
            except AssertionError:  # not whole yet
                data = await asyncio.wait_for(connection[0].read(1 << 20), REPLY_WAIT_S)
                assert data, "the daemon ended the connection"
                connection[2] += data
            else:
                message = connection[2].removesuffix(rest)
                connection[2] = rest
                return message

    async def close(self, name):
        """By QUIT, so that the daemon has seen it when this is over."""
        reader, writer, _ = self.connections.pop(name)
        writer.write(ref.request_bytes({"function": "QUIT", "identifier": 1}))
        await asyncio.wait_for(reader.read(), REPLY_WAIT_S)
        writer.close()
        await writer.wait_closed()


def filled_in(expected, got, now):
    """The expected message, with what the specification leaves open as it is."""
    message = copy.deepcopy(expected)
    message.setdefault("timestamp", now)
    for name in ("timestamp", "timeout", "cursor"):
        if message.get(name) == "*":
            message.pop(name)
            if name in got:
                message[name] = got[name]
    flags = message.get("flags", ())
    message["flags"] = [
        flag.removeprefix("*")
        for flag in flags
        if flag[0] != "*" or flag[1:] in got.get("flags", ())
    ]
    token = got.get("error", "").partition(":")[0]
    if message.get("error", "") in (token, "*"):
        message["error"] = got.get("error", "")  # with its detail
    for pair, other in zip(pairs_of(message), pairs_of(got), strict=False):
        for name in ("key", "value"):
            if pair.get(name) == "*":
                pair[name] = other[name]
        for name, value in pair.get("details", {}).items():
            if value == "*":
                pair["details"][name] = other.get("details", {}).get(name, 0)
    return message


def pairs_of(message):
    return message.get("pairs", [message["pair"]] if "pair" in message else [])


class Player:
    """One scenario against one place, step by step."""

    def __init__(self, place):
        self.place = place
        self.identifier = 0
        self.cursor = ""
        self.notified = {}

    async def ask(self, name, message):
        """The reply; notifications before it are kept."""
        self.identifier += 1
        await self.place.send(name, ref.request_bytes({**message, "identifier": self.identifier}))
        while True:
            raw = await self.place.receive(name)
            reply, rest = ref.read_reply(raw)
            assert not rest
            if reply["identifier"] == self.identifier:
                return reply, raw
            self.notified.setdefault(name, []).append((reply, raw))

    async def step(self, step):
        place = self.place
        if "restart" in step:
            await place.restart()
            return
        name = step.get("by", "a")
        if "close" in step:
            await place.close(name)
            return
        now = place.clock.now = step.get("now", place.clock.now)
        if "hears" in step:
            await self.ask(name, {"function": "NOP"})
            received = self.notified.pop(name, [])
            assert len(received) == len(step["hears"]), received
            for expected, (got, raw) in zip(step["hears"], received, strict=True):
                assert ref.reply_bytes(filled_in(expected, got, now)) == raw, got
            return
        message = {"timestamp": now, **step["ask"]}
        if message.get("key") == "$cursor":
            message["key"] = self.cursor
        got, raw = await self.ask(name, message)
        self.cursor = got.get("cursor", self.cursor)
        expected = filled_in({**step["reply"], "identifier": self.identifier}, got, now)
        if step["reply"].get("cursor"):
            assert got.get("cursor")
        assert ref.reply_bytes(expected) == raw, (message, got)


def durable(scenario):
    return any("restart" in step for step in scenario["steps"])


@pytest.mark.parametrize(
    ("place", "scenario"),
    [
        pytest.param(place, scenario, id=f"{place.__name__}: {scenario['scenario']}")
        for place in (Alone, Daemon)
        for scenario in CASES["scenarios"] + CASES["settings"]
        if place is Daemon or not durable(scenario)  # alone there is no disk to start again from
    ],
)
def test_scenarios(place, scenario, tmp_path):
    """Every reply and every notification is the expected one, byte for byte."""

    async def run():
        async with place(Clock(), tmp_path if durable(scenario) else None) as running:
            player = Player(running)
            for step in scenario["steps"]:
                await player.step(step)

    asyncio.run(run())


@pytest.mark.parametrize("scenario", CASES["jobs"], ids=lambda s: s["scenario"])
def test_job_scenarios(scenario):
    """Scenarios in the form of the job vectors, by hand and random from the rules of section 7."""

    async def run():
        clock = Clock()
        results = []
        async with daemon(clock=clock) as server, connected(server) as line:
            for step in scenario["steps"]:
                results.append(await play(step, line, clock, results))
        return results

    assert [step["result"] for step in scenario["steps"]] == asyncio.run(run())


@pytest.mark.skipif(codec.native_codec is None, reason="this is the plain engine already")
def test_the_plain_engine_says_the_same():
    """All of it again without native code."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-k",
            "not Alone",
            __file__,
        ],
        env={**os.environ, "VIRTA_PLAIN": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-4000:]
