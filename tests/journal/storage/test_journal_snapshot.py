"""A damaged snapshot is refused."""

from __future__ import annotations

import pytest
from journal_support import Clock

from virta.errors import JournalError
from virta.journal.engine import JournalEngine
from virta.journal.protocol.messages import Type, Value
from virta.journal.storage.directory import Persistence


def test_damaged_snapshot_is_refused(tmp_path):
    """A flipped byte in a snapshot stops the start with file and position, never a wrong state."""
    disk = Persistence(tmp_path)
    engine = JournalEngine(Clock(5))
    disk.restore(engine)
    engine.store.set(b"k", Value(Type.STRING, b"v" * 100), 1, 5, persist=True)
    disk.snapshot(engine)
    disk.close()
    (path,) = tmp_path.glob("*.snap")
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)

    disk = Persistence(tmp_path)
    with pytest.raises(JournalError, match="damaged at byte"):
        disk.restore(JournalEngine(Clock(5)))
    disk.close()
