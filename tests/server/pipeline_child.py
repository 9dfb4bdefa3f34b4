"""
A stand-in for a pipeline's run: says something, then does what it is told.

    python pipeline_child.py DIRECTORY ACTION
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def main(directory, action):
    home = Path(directory)
    with (home / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    if action == "fail":
        print("a line before")
        sys.exit("the sentence that counts")
    if action == "usage":
        sys.exit(2)
    if action == "chatter":
        for _ in range(40):
            sys.stdout.write(("x" * 99 + "\n") * 1000)
        return
    if action == "leave":  # and somebody stays, out of reach, with the output
        stays = f"until [ -e {home}/go ]; do sleep 0.02; done; echo late words"
        subprocess.Popen(["sh", "-c", stays], start_new_session=True)
        return
    if action == "deaf":  # ignores SIGTERM, and has a child that does, too
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        (home / "grandchild").write_text(str(child.pid))
    (home / "ready").touch()
    if action == "deaf":
        threading.Event().wait()
    while os.read(0, 4096):
        continue


if __name__ == "__main__":
    main(*sys.argv[1:])
