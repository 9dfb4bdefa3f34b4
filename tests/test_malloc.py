"""The settings of the C library's allocator: daemons return what threads have freed."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the settings are glibc's"
)

# Six threads, each of which needs 12 MiB in blocks of 96 KiB once. The first block freed is a large one, which is
# what raises glibc's own limit for unused memory.
SCRIPT = """
import sys, threading
from pathlib import Path
from virta import malloc
getattr(malloc, sys.argv[1], lambda: None)()
def resident_kib():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])
bytearray(24 << 20)
turns = [threading.Event() for _ in range(7)]
def work(turn):
    turns[turn].wait()
    blocks = [b"x" * (96 << 10) for _ in range(128)]
    del blocks
    turns[turn + 1].set()
threads = [threading.Thread(target=work, args=(turn,)) for turn in range(6)]
for thread in threads:
    thread.start()
before = resident_kib()
turns[0].set()
turns[6].wait()
print(resident_kib() - before)
"""
UNUSED_KIB_MAX = 8 * 1024
# glibc reserves this much address space for each arena but the first, at a multiple of it.
HEAP_BYTES = 64 * 1024 * 1024


def growth_kib(setting):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, setting],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return int(done.stdout)


def test_threads_leave_no_freed_memory_behind():
    """Freed memory of threads is returned; by default each thread keeps its 12 MiB."""
    assert growth_kib("no setting") > 3 * UNUSED_KIB_MAX
    assert growth_kib("return_freed_memory") < UNUSED_KIB_MAX


def arenas(pid):
    """Return how many arenas a process has besides the first."""
    count = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        area, access, _, _, inode, *name = line.split()
        start = int(area.split("-")[0], 16)
        count += start % HEAP_BYTES == 0 and access == "rw-p" and inode == "0" and not name
    return count


def test_threads_of_a_server_share_an_arena(tmp_path):
    """However many threads a server has, they use one arena besides the first."""
    command = [sys.executable, "-m", "virta", "serve", "--server-port", "0"]
    command += ["--journal-port", "none", "--data-dir", str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        next(line for line in server.stdout if '"listening"' in line)
        assert arenas(server.pid) <= 1
    finally:
        server.terminate()
        server.communicate(timeout=30)
