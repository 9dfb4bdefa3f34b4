"""
A stand-in for a pipeline's run: says something, then does what its arguments say.

    python pipeline_child.py DIRECTORY ACTION
"""

from __future__ import annotations

import json
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
    if action == "deaf":  # ignores SIGTERM, and has a child that does, too
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        (home / "grandchild").write_text(str(child.pid))
    if action == "leave":  # a child that belongs to nobody any more, with our output
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (home / "grandchild").write_text(str(child.pid))
        os._exit(0)
    if action == "say":  # its last word, and an end that takes its time
        status = {"state": "finished", "pid": os.getpid(), "queries": {}}
        (home / ".virta" / "pipelines" / "copy" / "status.json").write_text(json.dumps(status))
    (home / "ready").touch()
    if action == "say":
        while not (home / "go").exists():
            threading.Event().wait(0.01)
        return
    if action == "deaf":
        threading.Event().wait()
    while os.read(0, 4096):
        continue


if __name__ == "__main__":
    main(*sys.argv[1:])
