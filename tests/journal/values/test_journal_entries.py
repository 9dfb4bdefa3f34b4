"""Values over restarts: equal timestamps, spilled data, tombstones."""

from __future__ import annotations

import asyncio

import pytest
from journal_support import Clock, connected, daemon

from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request, Type, Value
from virta.journal.serving.embedded import Journal
from virta.journal.values.store import TOMBSTONE_US

T0 = 1_700_000_000_000_000


@pytest.mark.parametrize(
    ("expiring", "other", "expected"),
    [(b"z", b"a", None), (b"a", b"z", b"z"), (b"z" * 300, b"a" * 300, None)],
)
def test_two_values_of_one_timestamp_one_of_which_expires(expiring, other, expected, tmp_path):
    """The larger wins, in whatever order they arrive, also if it is over by then or the daemon restarted."""

    def put(journal, data, expires=None):
        journal.set("k", Value(Type.BUFFER, data), timestamp=T0, expires=expires)

    results = []
    for order in ("together", "over", "restarted"):
        clock = Clock(T0)
        with Journal(tmp_path / order, clock=clock) as journal:
            put(journal, expiring, T0 / 1e6 + 1)
            if order != "together":
                clock.now += 2_000_000
                journal.ping()
            if order != "restarted":
                put(journal, other)
        clock.now = T0 + 2_000_000
        with Journal(tmp_path / order, clock=clock) as journal:
            put(journal, other)
            put(journal, expiring, T0 / 1e6 + 1)  # sent again
            results.append(journal.get("k"))
    assert results == [expected] * 3


def test_values_beyond_memory_are_on_disk(tmp_path):
    """What was not used for longest goes to disk and is read from there; memory stays within its limit."""
    memory = 400_000
    with Journal(tmp_path, memory_bytes_max=memory) as journal:
        for i in range(100):
            journal.set(f"k{i:02}", bytes([i]) * 10_000)
            journal.get("k00")
            assert journal.admin("stats")["memory_bytes"] <= memory
        figures = journal.admin("stats")
        store = journal.engine.store
        assert store.stored(b"k00").data is not None
        assert store.stored(b"k01").data is None
        assert [journal.get(f"k{i:02}") for i in range(100)] == [
            bytes([i]) * 10_000 for i in range(100)
        ]
    assert 50 < figures["values_spilled"] < 100
    with Journal(tmp_path, memory_bytes_max=memory) as journal:
        assert journal.get("k01") == b"\1" * 10_000
        assert journal.admin("stats")["memory_bytes"] <= memory


def test_tombstones_end_on_disk_too(tmp_path):
    """For seven days an older SET stays without effect, over restarts; then nothing is left of the key."""
    clock = Clock(T0)
    with Journal(tmp_path, clock=clock) as journal:
        journal.set("k", "v", timestamp=T0 - 9)
        journal.delete("k", timestamp=T0 - 8)
    clock.now = T0 + TOMBSTONE_US // 2
    with Journal(tmp_path, clock=clock) as journal:
        journal.set("k", "old", timestamp=T0 - 9)
        assert journal.get("k") is None
    clock.now = T0 + TOMBSTONE_US  # from the delete, not from a restart
    with Journal(tmp_path, clock=clock) as journal:
        journal.ping()
        assert journal.engine.store.stored(b"k") is None
        journal.set("k", "old", timestamp=T0 - 9)
        assert journal.get("k") == "old"


def test_a_late_set_is_not_reported_as_persistent(tmp_path):
    """A SET that came too late is answered with the deletion it lost against, without persist (3.2)."""

    async def run():
        async with daemon(tmp_path, clock=Clock(T0)) as server, connected(server) as wire:
            await wire.ask(Request(Function.DELETE, key=b"k", timestamp=900))
            late = Request(
                Function.SET, flags=m.PERSIST, key=b"k", timestamp=800, value=Value(1, b"v")
            )
            reply = await wire.ask(late)
            return reply.flags, reply.timestamp, reply.error

    assert asyncio.run(run()) == (0, 900, "")
