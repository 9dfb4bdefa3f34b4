"""A directory that an older release wrote opens with the same values and jobs, after a crash and after a stop."""

from __future__ import annotations

import json
import tarfile

import pytest
from journal_vectors import DIRECTORY

from virta.journal.serving.embedded import Journal

EXPECTED = json.loads((DIRECTORY / "journal-directory.json").read_text())


@pytest.fixture(params=["crash", "closed"])
def directory(request, tmp_path):
    """A journal as a kill left it (log and leases), or as a stop did (a snapshot)."""
    with tarfile.open(DIRECTORY / "journal-directory.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / request.param


def values_of(engine):
    shown = {}
    for key, entry in engine.store.by_key.items():
        value = engine.store.value(entry)
        fields = ("timestamp", "created", "modified", "expires", "ttl", "worked_until")
        shown[key.decode()] = {
            "keys": sorted(each.decode() for each in entry.keys),
            "type": int(value.type),
            "data": value.data.hex() if len(value.data) < 64 else len(value.data),
            **{name: getattr(entry, name) for name in fields},
            "tombstone": entry.tombstone,
            "persist": entry.persist,
            "marked_at": entry.marked_at,
        }
    return shown


def jobs_of(engine):
    fields = ("id", "state", "priority", "start", "timestamp", "created", "attempts", "reason")
    more = ("worked_until", "lease", "revision", "persist")
    return [
        {
            "uri": uri.decode(),
            "key": job.key().decode(),
            "domain": job.domain.name.decode(),
            **{name: getattr(job, name) for name in (*fields, *more)},
            "payload": job.payload and [int(job.payload.type), job.payload.data.hex()],
        }
        for uri in sorted(engine.jobs.uris())
        for job in engine.jobs.entries(uri)
    ]


def test_a_directory_of_an_older_release_opens(directory):
    """Values, marks, settings, jobs in every state, finished commands and leases are all there."""
    with Journal(directory, clock=lambda: EXPECTED["clock"]) as journal:
        engine = journal.engine

        assert values_of(engine) == EXPECTED["keys"]
        assert jobs_of(engine) == EXPECTED["jobs"]
        finished = sorted([u.decode(), t] for u, t in engine.jobs.finished.commands.items())
        assert finished == EXPECTED["finished"]
        assert engine.jobs.next_id >= EXPECTED["next_id"]
        assert engine.jobs.domains[b"slow.example"].settings.max_attempts == 2
        assert engine.jobs.domains[b"paused.example"].settings.paused


def test_and_opens_again_after_this_release(directory):
    """What this release writes over it, log and snapshot, says the same."""
    for _ in range(2):
        with Journal(directory, clock=lambda: EXPECTED["clock"]) as journal:
            journal.set("more", "value")
    with Journal(directory, clock=lambda: EXPECTED["clock"]) as journal:
        values = values_of(journal.engine)
        del values["more"]

        assert values == EXPECTED["keys"]
        assert jobs_of(journal.engine) == EXPECTED["jobs"]
