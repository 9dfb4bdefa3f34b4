"""Processes killed at random points, and a million jobs over a restart."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS = Path(__file__).parent.parent / "journal_crash_rounds.py"
SEED = int(os.environ.get("VIRTA_SEED", random.SystemRandom().randrange(10**9)))


def crash(what, directory, rounds):
    """Run so many rounds; the command that repeats them is in the failure."""
    command = [sys.executable, str(ROUNDS), what, str(directory), str(rounds), str(SEED)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    assert result.returncode == 0, f"{' '.join(command)}\n{result.stderr[-3000:]}"
    return json.loads(result.stdout)


@pytest.mark.slow
def test_killed_daemon_keeps_its_promises(tmp_path):
    """220 kills of the daemon: acknowledged values and jobs are there, done jobs never come again."""
    summary = crash("daemon", tmp_path, 220)

    assert summary["pushed"] > 500
    assert summary["done"] > 50


@pytest.mark.slow
def test_killed_daemon_forwarder_and_client_lose_nothing_spooled(tmp_path):
    """100 kills of daemon, forwarder or client: whatever was spooled arrives."""
    assert crash("spool", tmp_path, 100)["spooled"] > 100


FILL = """
import gc, sys, time
from pathlib import Path
from virta.clock import now_us
from virta.journal.engine import JournalEngine
from virta.journal.protocol.messages import Value
from virta.journal.storage.directory import Persistence

gc.disable()
disk = Persistence(Path(sys.argv[1]), durability="none")
engine = JournalEngine(now_us)
disk.restore(engine)
payload = Value(1, b"x" * 100)
for i in range(1_000_000):
    engine.jobs.push(b"http://host%d/item-%08d" % (i % 8, i), b"", i + 1, 5, priority=i % 256,
                     start=5, payload=payload, persist=True)
disk.snapshot(engine)
disk.close()
"""

RESTART = """
import json, resource, sys, time
from pathlib import Path
from virta.clock import now_us
from virta.journal.engine import JournalEngine
from virta.journal.storage.directory import Persistence

wall, cpu = time.perf_counter(), time.process_time()
disk = Persistence(Path(sys.argv[1]))
engine = JournalEngine(now_us)
disk.restore(engine)
taken = engine.jobs.reserve(b"host3", engine.clock())
print(json.dumps({
    "wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "jobs": len(engine.jobs),
    "first": taken[0].uri.decode(),
    "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
}))
disk.close()
"""


@pytest.mark.slow
def test_a_million_jobs_restart(tmp_path, capsys):
    """A million waiting jobs are back in under five seconds of CPU, the best one first."""
    subprocess.run([sys.executable, "-c", FILL, tmp_path], check=True, timeout=300)
    out = subprocess.run(
        [sys.executable, "-c", RESTART, tmp_path], check=True, timeout=300, capture_output=True
    )
    figures = json.loads(out.stdout)
    with capsys.disabled():
        print(f"\n1M jobs: {figures}")

    assert figures["jobs"] == 1_000_000
    assert figures["first"] == "http://host3/item-00000003"
    # Wall time equals it on a machine that does nothing else.
    assert figures["cpu"] < 5.0
