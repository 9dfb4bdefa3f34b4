"""Many idle consumers and a steady stream of events: nothing lost, memory flat, latency told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "bench" / "server_soak.py"
# The real thing: VIRTA_SOAK_S=600 VIRTA_SOAK_CONSUMERS=2000 VIRTA_SOAK_RATE=5000, or `make soak-server`.
SECONDS = os.environ.get("VIRTA_SOAK_S", "8")
CONSUMERS = os.environ.get("VIRTA_SOAK_CONSUMERS", "500")
EVENTS_PER_S = os.environ.get("VIRTA_SOAK_RATE", "1000")
GROWTH_KIB_MAX = 16 * 1024


@pytest.mark.slow
def test_soak():
    """Each event is heard once, in order, by its one hearer; two that read nothing hurt nobody; the server does not grow."""
    command = [sys.executable, SOAK, "--seconds", SECONDS, "--consumers", CONSUMERS]
    done = subprocess.run(
        [*command, "--rate", EVENTS_PER_S],
        capture_output=True,
        text=True,
        timeout=float(SECONDS) + 120,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)

    assert report["accepted"] > 0.5 * float(SECONDS) * float(EVENTS_PER_S)
    assert (report["lost"], report["out_of_order"], report["refused"]) == (0, 0, 0)
    assert (report["cut"], report["exit_code"]) == (0, 0)
    assert report["growth_kib"] < GROWTH_KIB_MAX
    assert done.returncode == 0
