"""The publisher: capacity, repeats, and where a publication is in the log."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
from hub_support import draft, run

from virta.errors import LogWriteError
from virta.hub import publisher as module
from virta.hub.delivery import STREAMS, Delivery

IN_THREAD = {"durability": "group", "inline_s_max": -1.0}


async def submitted(stack, part):
    done = asyncio.get_running_loop().create_future()
    stack.publisher.submit(part, done.set_result)
    return await asyncio.wait_for(done, 60)


def test_the_place_of_a_publication(tmp_path):
    """It is the offset of the first event that was written, or of the one that is repeated."""

    async def scenario(stack):
        first = [draft("c", "1"), draft("c", "2")]
        mixed = [draft("c", "1"), draft("c", "3")]
        repeat = [draft("c", "2"), draft("c", "1")]
        for part in (first, mixed, repeat):
            await submitted(stack, part)
        return [stack.publisher.place(part) for part in (first, mixed, repeat, [])]

    assert run(scenario, tmp_path) == [(0, False), (2, False), (1, True), (None, False)]


def test_the_place_of_a_repeat_that_is_too_old(tmp_path):
    """A repeat whose first is no longer known is an event of its own."""

    async def scenario(stack):
        await submitted(stack, [draft("c", "1")])
        stack.table.expire(time.monotonic() + 2000.0)
        again = [draft("c", "1")]
        await submitted(stack, again)
        return stack.publisher.place(again), stack.publisher.duplicates

    assert run(scenario, tmp_path) == ((1, False), 0)


def test_stream_messages_are_never_repeats(tmp_path):
    """Two equal messages are two messages."""

    async def scenario(stack):
        message = b'{"publish_to":"a","payload":"x"}'
        for _ in range(2):
            await submitted(stack, [Delivery(STREAMS, "", "a", message, key=b"a")])
        return len(list(stack.log.read())), stack.publisher.duplicates

    assert run(scenario, tmp_path) == (2, 0)


def test_capacity_counts_events_and_bytes(tmp_path, monkeypatch):
    """While a write is in flight, what is accepted counts against both limits."""
    monkeypatch.setattr(module, "OUTSTANDING_BYTES_MAX", 1000)

    async def scenario(stack):
        real, go = stack.log.append_many, threading.Event()

        def slowly(*arguments, **named):
            assert go.wait(60)
            return real(*arguments, **named)

        stack.log.append_many = slowly
        publisher = stack.publisher
        found = [publisher.capacity]
        waiting = [asyncio.ensure_future(submitted(stack, [draft("c", str(n))])) for n in range(4)]
        await asyncio.sleep(0)
        found.append(publisher.capacity)
        big = asyncio.ensure_future(submitted(stack, [draft("c", "big", {"x": "y" * 1000})]))
        await asyncio.sleep(0)
        found += [publisher.capacity, publisher.overloaded]
        go.set()
        await asyncio.gather(*waiting, big)
        return [*found, publisher.capacity, publisher.outstanding, publisher.outstanding_bytes]

    assert run(scenario, tmp_path, **IN_THREAD) == [10, 6, 0, True, 10, 0, 0]


def test_a_failed_write_frees_capacity_and_keys(tmp_path):
    """The same events may be published again at once, and are then delivered once."""

    async def scenario(stack):
        sink = stack.attach("c")
        real = stack.log.append_many

        def refuse(*arguments, **named):
            stack.log.append_many = real
            raise LogWriteError("disk full")

        stack.log.append_many = refuse
        failed = await submitted(stack, [draft("c", "1")])
        worked = await submitted(stack, [draft("c", "1")])
        return failed, worked, await sink.ids(1), stack.publisher.outstanding

    failed, worked, received, outstanding = run(scenario, tmp_path)
    assert isinstance(failed, LogWriteError)
    assert (worked, received, outstanding) == (None, ["1"], 0)


@pytest.mark.parametrize("options", [{}, IN_THREAD], ids=["inline", "thread"])
def test_closing_answers_everything(tmp_path, options):
    """Whatever was accepted is in the log when `close` returns, and every answer was called."""

    async def scenario(stack):
        answers = []
        for n in range(10):
            stack.publisher.submit([draft("c", str(n))], answers.append)
        await stack.publisher.close()
        return answers, [json.loads(r.value)["id"] for r in stack.log.read()]

    answers, stored = run(scenario, tmp_path, **options)
    assert answers == [None] * 10
    assert stored == [str(n) for n in range(10)]


def test_repeats_of_other_processes_are_not_delivered(tmp_path):
    """A record of another process with a known source and id counts as a repeat."""

    async def scenario(stack):
        import virta

        sink = stack.attach("c")
        await submitted(stack, [draft("c", "1")])
        with virta.open(tmp_path / "log") as other:
            for id_ in ("1", "2"):
                other.append("c", "", json.dumps({"source": "s", "id": id_}).encode())
        return await sink.ids(2), stack.publisher.duplicates

    assert run(scenario, tmp_path) == (["1", "2"], 1)
