"""The table of leases in a file that another process truncates."""

from __future__ import annotations

import os

import pytest

from virta.journal.storage import leases
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
