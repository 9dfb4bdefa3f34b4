"""Full disks and failing calls: clear errors, no partial changes, and a log that still works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

CRASH = Path(__file__).parent.parent.parent / "crash"
sys.path.append(str(CRASH))

from crash_tools import compile_shim, run_scenario  # noqa: E402

SCENARIOS = CRASH / "scenarios.py"


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    library = compile_shim(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("no C compiler: failing calls cannot be injected")
    return library


@pytest.mark.parametrize("plain", ["", "1"], ids=["native", "plain"])
@pytest.mark.parametrize(
    "name",
    [
        "full_disk",
        "refused_headroom",
        "failing_sync",
        "failing_sync_of_threads",
        "failing_rollover",
    ],
)
def test_injected_failures(shim, tmp_path, name, plain):
    """Full disk, fdatasync that fails once or for good, rollovers that cannot open, write or rename."""
    assert "done" in run_scenario(SCENARIOS, name, shim, tmp_path, VIRTA_PLAIN=plain)


@pytest.mark.slow
@pytest.mark.parametrize("plain", ["", "1"], ids=["native", "plain"])
def test_every_call_fails_once(shim, plain):
    """Whichever I/O call of a long workload fails: only LogError, nothing acknowledged is lost, the log is valid."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # hundreds of small logs
    with tempfile.TemporaryDirectory(prefix="virta-faults-", dir=memory) as folder:
        place = Path(folder)
        output = run_scenario(SCENARIOS, "every_call_fails_once", shim, place, VIRTA_PLAIN=plain)
    assert "failures" in output


@pytest.mark.parametrize("plain", ["", "1"], ids=["native", "plain"])
def test_file_size_limit(tmp_path, plain):
    """RLIMIT_FSIZE: an append that does not fit is refused whole, one that fits succeeds."""
    run_scenario(SCENARIOS, "file_size_limit", None, tmp_path, VIRTA_PLAIN=plain)


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of a megabyte: appends, compaction, consumers and repair on it fail clearly and lose nothing."""
    unshare = shutil.which("unshare")
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    if (
        unshare is None
        or subprocess.run(
            [unshare, "-rm", "sh", "-c", mount], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("mounting a small file system is not permitted here")
    script = f"{mount} && exec {sys.executable} -W error {SCENARIOS} tiny_disk {tmp_path}"
    done = subprocess.run(
        [unshare, "-rm", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
