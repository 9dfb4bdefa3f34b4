"""The files beside a pipeline's checkpoints: the state of its run, its lock, and its supervisor; without a JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from virta.spark.pipeline.file import loads
from virta.spark.pipeline.status import (
    LOCK,
    STATUS,
    SUPERVISED,
    BusyError,
    began,
    claimed,
    is_alive,
    is_remote,
    read_json,
    read_status,
    write_status,
    write_supervised,
)

TEXT = """
[pipeline]
name = "copy"
checkpoint = "CHECKPOINT"

[source]
log = "log"

[[sink]]
kind = "console"
"""


@pytest.fixture
def pipeline(tmp_path):
    return loads(TEXT.replace("CHECKPOINT", str(tmp_path / "state")), directory=str(tmp_path))


def running(**changes):
    """The status of a run of this process."""
    mine = {"state": "running", "pid": os.getpid(), "began": began(os.getpid()), "queries": {}}
    return mine | changes


def ended_process():
    """The id and start of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = began(child.pid)
    child.communicate(b"\n")
    return child.pid, start


def test_a_pipeline_that_never_ran(pipeline):
    """Without files there is no run, and reading creates none."""
    assert read_status(pipeline)["state"] == "never run"
    assert not Path(pipeline.checkpoint_path()).exists()


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_the_last_state_is_kept(pipeline, state):
    """After its end the state of a run is what it wrote last."""
    write_status(pipeline, running(state=state, reason="because"))

    found = read_status(pipeline)

    assert (found["state"], found["reason"]) == (state, "because")


def test_a_run_whose_process_ended_is_lost(pipeline):
    """A status of `running` counts only while the process with this id and start lives."""
    write_status(pipeline, running())
    assert read_status(pipeline)["state"] == "running"

    pid, start = ended_process()
    write_status(pipeline, running(pid=pid, began=start))
    assert read_status(pipeline)["state"] == "lost"

    write_status(pipeline, running(began=began(os.getpid()) - 1))  # a reused process id
    assert read_status(pipeline)["state"] == "lost"


@pytest.mark.parametrize(
    ("supervised", "run", "state"),
    [
        ("running", {}, "running"),
        ("running", {"state": "finished"}, "stopping"),
        ("running", {"pid": 1}, "starting"),
        ("waiting", {"state": "failed"}, "waiting"),
        ("stopped", {"state": "stopped"}, "stopped"),
        ("failed", {}, "failed"),
    ],
)
def test_a_supervised_run(pipeline, supervised, run, state):
    """The supervisor's state counts, except that a running process reports its own."""
    write_status(pipeline, running(**run))
    own = {"state": supervised, "pid": os.getpid(), "restarts": 2, "last_error": "e", "log": "l"}

    assert read_status(pipeline, own)["state"] == state


def test_the_file_of_a_dead_supervisor_is_ignored(pipeline):
    """A supervisor that has ended does not count, whatever it wrote last."""
    pid, start = ended_process()
    given = {"server": pid, "began": start, "state": "waiting", "pid": None, "restarts": 1}
    write_supervised(pipeline, {**given, "last_error": None, "log": "l"})
    write_status(pipeline, running(state="finished"))

    assert read_status(pipeline)["state"] == "finished"


@pytest.mark.parametrize("content", ["", "{", '{"state": "runn'])
def test_a_file_emptied_by_a_power_loss(pipeline, content):
    """Incomplete JSON counts as no file."""
    write_status(pipeline, running())
    (Path(pipeline.checkpoint_path()) / STATUS).write_text(content)

    assert read_json(pipeline, STATUS) == {}
    assert read_status(pipeline)["state"] == "never run"


def test_files_are_replaced_as_a_whole(pipeline):
    """A write leaves one file with its content and no draft."""
    for number in range(3):
        write_status(pipeline, running(number=number))
    write_supervised(pipeline, {"state": "waiting"})

    place = Path(pipeline.checkpoint_path())
    assert sorted(file.name for file in place.iterdir()) == [STATUS, SUPERVISED]
    assert json.loads((place / STATUS).read_text())["number"] == 2


def test_one_run_at_a_time(pipeline):
    """A second run is refused with the process of the first, and may start after its end."""
    write_status(pipeline, running())
    with claimed(pipeline), pytest.raises(BusyError) as caught, claimed(pipeline):
        pass
    with claimed(pipeline):
        assert (Path(pipeline.checkpoint_path()) / LOCK).exists()

    assert caught.value.code == "pipeline_busy"
    assert f"runs already (process {os.getpid()})" in caught.value.message


def test_remote_checkpoints_have_no_files(tmp_path, monkeypatch):
    """Nothing is written or locked for a checkpoint on remote storage."""
    monkeypatch.chdir(tmp_path)
    remote = loads(TEXT.replace("CHECKPOINT", "s3://bucket/state"))

    assert is_remote(remote)
    with claimed(remote), claimed(remote):
        write_status(remote, running())
    assert read_status(remote)["state"] == "never run"
    assert list(tmp_path.iterdir()) == []


def test_processes_are_told_apart_by_their_start():
    """An id alone is not enough, and a missing one is never alive."""
    start = began(os.getpid())

    assert is_alive(os.getpid(), start)
    assert not is_alive(os.getpid(), start + 1)
    assert not is_alive(None, start)
    assert not is_alive(os.getpid(), None)
    assert began(2**22 + 1) is None
