"""The table of leases in a file that another process truncates."""

from __future__ import annotations

import os

import pytest
from journal_support import Clock, committed

from virta.journal.engine import JournalEngine
from virta.journal.jobs.job import STATE_NAMES
from virta.journal.storage import leases
from virta.journal.storage.directory import Persistence
from virta.log.engine import kernel


class FakeJob:
    """What the table of leases sees of a job."""

    def __init__(self, number: int) -> None:
        self.id, self.lease, self.worked_until, self.attempts, self.slot = number, 7, 8, 0, 0


@pytest.mark.parametrize("guarded", [True, False])
def test_a_truncated_table_of_leases(tmp_path, monkeypatch, guarded):
    """The journal's table of leases: the daemon continues, and later leases are stored."""
    if not guarded:
        monkeypatch.setattr(kernel, "guard", None)
    elif kernel.guard is None:
        pytest.skip("the native kernel is not built")
    path = tmp_path / "leases"
    table = leases.LeaseTable(path)
    table.begin([FakeJob(1)])
    assert [lease.job_id for lease in table.load()] == [1]
    os.truncate(path, 0)
    table.put(FakeJob(2))
    table.free_ended()
    assert [lease.job_id for lease in table.load()] == ([2] if guarded else [1, 2])
    for number in range(3, 3000):  # beyond its first size
        table.put(FakeJob(number))
    assert {lease.job_id for lease in table.load()} >= set(range(2, 3000))
    table.close()


def crashed(directory, clock):
    """What a process that was killed leaves behind, opened by the next one."""
    disk = Persistence(directory, durability="none")
    engine = JournalEngine(clock)
    disk.restore(engine)
    return disk, engine


def test_the_table_of_leases_grows_and_passes_over_damage(tmp_path):
    """More marks than it has slots; a slot half written and one of an attempt that ended count for nothing."""
    clock = Clock(1_000)
    disk, engine = crashed(tmp_path, clock)
    count = 3 * leases.SLOTS_MIN
    for number in range(count):
        engine.jobs.push(b"u%d" % number, b"d", 1, clock.now, persist=True)
    committed(disk, engine)
    taken = engine.jobs.reserve(b"d", clock.now, count=count)
    stale = (tmp_path / "leases").read_bytes()
    engine.jobs.fail(taken[0], "no", clock.now, delay=0)
    committed(disk, engine)
    disk.close()
    table = bytearray(stale)
    table[taken[1].slot * leases.SLOT_BYTES + 20] ^= 1
    (tmp_path / "leases").write_bytes(table)

    disk, engine = crashed(tmp_path, clock)
    states = {job.uri: STATE_NAMES[job.state] for job in engine.jobs.all()}
    disk.close()

    assert {uri for uri, state in states.items() if state == "ready"} == {
        taken[0].uri,
        taken[1].uri,
    }
    assert list(states.values()).count("working") == count - 2
