"""
Run one action of a log's tier and die by SIGKILL before its step N.

Reads lines `STEP ACTION LOG URL TARGET`, runs each in a fork, and answers with the signal that ended it (0: it got to
its end). A step is a write to the store or to a file, or the removal of one; a file is written by half before the kill.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import virta
from virta import files
from virta.tier import Shipper, TierStore, restore_log


class Steps:
    """Counts calls; the one with the chosen number never returns."""

    def __init__(self, last: int) -> None:
        self.left = last

    def watch(self, owner: object, name: str, partly=None) -> None:
        real = getattr(owner, name)

        def watched(*arguments, **options):
            self.left -= 1
            if self.left == 0:
                if partly is not None:
                    partly(real, *arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(owner, name, watched)


def write_half(real, fd, data, pos):
    real(fd, data[: len(data) // 2], pos)


def run(step: int, action: str, path: str, url: str, target: str) -> None:
    steps = Steps(step)
    for name in ("create", "write", "delete"):
        steps.watch(TierStore, name)
    steps.watch(files, "write_whole")
    steps.watch(files, "write_all", write_half)
    steps.watch(files, "sync_directory")
    steps.watch(os, "rename")
    steps.watch(Path, "unlink")
    if action == "restore":
        restore_log(url, Path(target))
        return
    with virta.open(path) as log:
        if action == "retain":
            log.retain(max_bytes=0)
            return
        with Shipper(log, TierStore(url), garbage_age_s=0) as shipper:
            shipper.ship()
            shipper.collect_garbage(now=True)


def main() -> None:
    for line in sys.stdin:
        step, *arguments = line.split()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(int(step), *arguments)
                status = 0
            finally:
                os._exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(-ended if ended <= 0 else f"failed {ended}", flush=True)


if __name__ == "__main__":
    main()
