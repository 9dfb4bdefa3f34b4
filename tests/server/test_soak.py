"""Many idle consumers, a steady stream of events and connections that come and go: nothing lost, memory flat."""

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
GROWTH_DESCRIPTORS_MAX = 32
CHURN_KINDS, CHURN_PER_S = 14, 60


@pytest.mark.slow
def test_soak():
    """Each event comes once, in order, to the one consumer it matches; others come and go; the server does not grow."""
    command = [sys.executable, SOAK, "--seconds", SECONDS, "--consumers", CONSUMERS]
    done = subprocess.run(
        [*command, "--rate", EVENTS_PER_S, "--churn", str(CHURN_PER_S)],
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
    # Every kind of connection was opened and closed, and got the expected response.
    assert (report["churn_failed"], report["churn_failures"]) == (0, [])
    assert len(report["churn_kinds"]) == CHURN_KINDS
    assert report["churned"] > 0.5 * float(SECONDS) * CHURN_PER_S
    assert report["growth_descriptors"] < GROWTH_DESCRIPTORS_MAX
    assert done.returncode == 0
