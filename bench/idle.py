"""
What an idle daemon costs: CPU seconds and wake-ups of `virta serve` and `virta journal serve`.

    python bench/idle.py [--seconds 60] [--threads]

Each daemon starts on a free port with an empty data directory, is left alone for some seconds, and is then
measured from /proc. A wake-up is a voluntary context switch: a thread that slept and ran again. `--threads`
shows them by thread, which finds the timer behind them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# Start-up (imports, opening the log) is over once a daemon used less CPU time than this in a second.
CALM_CPU_S = 0.02
START_S_MAX = 60


class Usage(NamedTuple):
    """CPU seconds and context switches of all threads so far."""

    cpu_s: float
    wakeups: Counter[str]  # voluntary switches by thread, in order of their start
    preempted: int  # involuntary switches

    def since(self, before: Usage) -> Usage:
        return Usage(
            self.cpu_s - before.cpu_s,
            self.wakeups - before.wakeups,
            self.preempted - before.preempted,
        )


def usage(pid: int) -> Usage:
    """Read what the threads of a process have used; `schedstat` counts nanoseconds, not clock ticks."""
    cpu_ns, preempted = 0, 0
    wakeups: Counter[str] = Counter()
    for number, task in enumerate(sorted(Path(f"/proc/{pid}/task").iterdir())):
        cpu_ns += int((task / "schedstat").read_text().split()[0])
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        name = f"thread {number}" if number else "event loop"
        wakeups[name] += int(status["voluntary_ctxt_switches"])
        preempted += int(status["nonvoluntary_ctxt_switches"])
    return Usage(cpu_ns / 1e9, wakeups, preempted)


def commands(directory: Path) -> dict[str, list[str]]:
    run = [sys.executable, "-m", "virta"]
    data = ["--data-dir", str(directory / "serve")]
    return {
        "virta serve": [*run, "serve", "--server-port", "0", "--journal-port", "0", *data],
        "virta journal serve": [
            *run,
            *("journal", "serve", "--port", "0", "--data-dir", str(directory / "journal")),
        ],
    }


def wait_for_start(daemon: subprocess.Popen[bytes]) -> Usage:
    """Return the usage of a daemon that has started and has nothing to do."""
    assert daemon.stdout is not None
    before = usage(daemon.pid)
    for _ in range(START_S_MAX):
        time.sleep(1)
        assert daemon.poll() is None, daemon.stdout.read().decode()
        now = usage(daemon.pid)
        if now.cpu_s > CALM_CPU_S and now.since(before).cpu_s < CALM_CPU_S:
            return now
        before = now
    raise SystemExit(f"the daemon was busy for {START_S_MAX} s")


def measure(command: list[str], seconds: float) -> Usage:
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        before = wait_for_start(daemon)
        time.sleep(seconds)
        return usage(daemon.pid).since(before)
    finally:
        daemon.terminate()
        daemon.communicate(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", action="store_true", help="show wake-ups by thread")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="virta-idle-") as directory:
        for name, command in commands(Path(directory)).items():
            used = measure(command, options.seconds)
            wakeups_s = sum(used.wakeups.values()) / options.seconds
            percent = 100 * used.cpu_s / options.seconds
            print(
                f"{name:<20} {used.cpu_s:8.4f} CPU s in {options.seconds:g} s ({percent:.3f} % of a core), "
                f"{wakeups_s:7.2f} wake-ups/s, {used.preempted / options.seconds:.2f} preemptions/s",
                flush=True,
            )
            if options.threads:
                for thread, number in used.wakeups.most_common():
                    print(f"    {thread:<20} {number / options.seconds:7.2f} wake-ups/s")
            results[name] = {
                "cpu_s": used.cpu_s,
                "wakeups_s": wakeups_s,
                "seconds": options.seconds,
            }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
