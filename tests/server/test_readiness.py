"""`/readyz` reports that publishing fails or hangs, publishers get 503 in time, and both recover by themselves."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from server_harness import DEADLINE_S, STRUCTURED, Consumer, event, ids

from waiting import wait_until

NO_JOURNAL = ("--journal-port", "none")


@contextmanager
def locked(path):
    """Hold a lock, as a process that hangs does."""
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def publish(server, id_, data=None):
    body = json.dumps(event(id_, data))
    return server.request("POST", "/channels/c", body, {"Content-Type": STRUCTURED})


def until_ready(server, status):
    """Return the body of `/readyz` once it has this status."""

    def asked():
        answer = server.request("GET", "/readyz")
        return answer if answer.status == status else None

    return wait_until(asked, f"/readyz with {status}")


def history(server, count):
    async def read():
        consumer = await Consumer.open(server.port, "/channels/c/from/earliest")
        await consumer.connected()
        found = ids(await consumer.frames(count))
        await consumer.close()
        return found

    return asyncio.run(read())


@pytest.mark.slow
@pytest.mark.parametrize(("durability", "plain"), [("group", False), ("none", True)])
def test_a_process_that_hangs_with_the_write_lock(start, durability, plain):
    """All publishers get 503 with Retry-After; `/readyz` reports the reason until the lock is free."""
    flags = (*NO_JOURNAL, "--durability", durability)
    with (
        start(*flags, environ={"VIRTA_PLAIN": "1"} if plain else None) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        assert publish(server, "before").status == 202
        with locked(server.data_dir / "log" / "writer.lock"):
            answers = [pool.submit(publish, server, f"lost{number}") for number in range(8)]
            waiting = until_ready(server, 503)
            assert server.request("GET", "/livez").status == 200
            assert server.request("GET", "/metrics").status == 200
            refused = [answer.result(DEADLINE_S) for answer in answers]
            failing = server.request("GET", "/readyz")
        until_ready(server, 200)  # without a publication
        assert publish(server, "lost0").status == 202
        assert publish(server, "after").status == 202
        found = history(server, 3)

    assert b"log:" in waiting.body
    for answer in refused:
        assert (answer.status, answer.code) == (503, "log-busy")
        assert answer.headers["retry-after"] == "1"
        assert "write lock" in answer.json["message"]
    assert (failing.status, b"write lock" in failing.body) == (503, True)
    assert found == ["before", "lost0", "after"]


@pytest.mark.slow
def test_a_filter_while_the_registry_cannot_be_written(start):
    """Filters are stored in a log too: 503 with Retry-After, not 500."""
    with start(*NO_JOURNAL) as server, locked(server.data_dir / "registry" / "writer.lock"):
        body = json.dumps({"dialect": "koncorde", "filter": {"equals": {"a": 1}}})
        kind = {"Content-Type": "application/json"}
        answer = server.request("POST", "/filters/i/c", body, kind)

    assert (answer.status, answer.code, "retry-after" in answer.headers) == (503, "log-busy", True)


def test_files_that_may_not_grow(start):
    """A full disk: `/readyz` reports it until writing works again, without a publication."""
    with start(*NO_JOURNAL) as server:
        assert publish(server, "before").status == 202
        pid = server.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        refused = publish(server, "lost", "x" * 100_000)
        failing = server.request("GET", "/readyz")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        until_ready(server, 200)
        assert publish(server, "lost", "x" * 100_000).status == 202
        found = history(server, 2)

    assert refused.status == 500
    assert (failing.status, b"File too large" in failing.body) == (503, True)
    assert found == ["before", "lost"]
