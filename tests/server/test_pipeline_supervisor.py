"""Pipelines beside the server: started, restarted, given up, stopped, never orphaned, shown at /pipelines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import structlog
from server_harness import Server, event

import virta
from virta.server import pipeline_supervisor
from virta.server.pipeline_supervisor import Pipelines, RestartLimits, SupervisedPipeline
from virta.spark.pipeline.file import loads
from virta.spark.pipeline.status import (
    BusyError,
    began,
    claimed,
    read_status,
    write_status,
    write_supervised,
)
from waiting import wait_until

CHILD = Path(__file__).with_name("pipeline_child.py")
DEADLINE = 120.0
LIMITS = RestartLimits(failures_max=3, window_ms=60_000, backoff_ms=1, stop_ms=20_000)
TEXT = """
[pipeline]
name = "copy"
trigger = "100 milliseconds"

[source]
log = "data/log"
topics = ["orders"]

[[filter]]
match = "n=>=2"

[[sink]]
kind = "channel"
topic = "copied"

[spark]
master = "local[2]"
conf = { "spark.driver.memory" = "700m" }
"""


def wait_for(condition, what):
    return wait_until(condition, what, seconds=DEADLINE)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def supervise(tmp_path):
    """Supervise the stand-in with an action; stopped at the end of the test."""
    made = []

    def start(action, limits=LIMITS, command=(sys.executable, str(CHILD))):
        pipeline = loads(TEXT, directory=str(tmp_path))
        command = [*command, str(tmp_path), action]
        logger = structlog.get_logger("test")
        one = SupervisedPipeline(pipeline, command, tmp_path / "logs" / "copy.log", limits, logger)
        made.append(one)
        one.start()
        return one

    yield start
    for one in made:
        one.stop_soon()
        one.stop(time.monotonic() + 5)


def starts(tmp_path):
    path = tmp_path / "starts"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def state(one):
    return one.overview()["state"]


def test_quick_failures_are_given_up_with_the_last_words(supervise, tmp_path):
    """After three failures it is left alone: `failed`, with the sentence, for the command line too."""
    one = supervise("fail")

    wait_for(lambda: state(one) == "failed", "giving up")

    assert len(starts(tmp_path)) == 3
    overview = one.overview()
    assert overview["reason"] == "the sentence that counts"
    assert overview["restarts"] == 2
    assert read_status(one.pipeline) == overview
    assert "a line before" in (tmp_path / "logs" / "copy.log").read_text()


def test_orders(supervise, tmp_path):
    """What has failed starts again on request, what runs can be stopped; the server's end is final."""
    one = supervise("fail")
    wait_for(lambda: state(one) == "failed", "giving up")
    one.start_again()
    wait_for(lambda: len(starts(tmp_path)) == 6 and state(one) == "failed", "giving up again")
    one.end()
    assert state(one) == "stopped"

    another = supervise("wait")
    first = wait_for(lambda: starts(tmp_path)[6:], "a start")
    another.start_again()  # it runs: nothing changes
    another.end()
    assert state(another) == "stopped"
    assert not alive(first[0])
    another.start_again()
    second = wait_for(lambda: starts(tmp_path)[7:], "another start")
    another.stop_soon()
    another.start_again()
    wait_for(lambda: state(another) == "stopped", "the end")
    assert not alive(second[0])
    assert len(starts(tmp_path)) == 8


def test_an_order_after_the_last_word_of_a_run(supervise, tmp_path):
    """A run that has said `finished` is not shown so before its process has ended: an order would find it running."""
    one = supervise("say")
    wait_for((tmp_path / "ready").exists, "its word")
    assert state(one) == "stopping"
    assert read_status(one.pipeline)["state"] == "stopping"

    (tmp_path / "go").touch()
    wait_for(lambda: state(one) == "finished", "the end")
    one.start_again()

    wait_for(lambda: len(starts(tmp_path)) == 2, "another start")


def test_a_stop_in_the_moment_of_the_end(supervise, tmp_path, monkeypatch):
    """A process that has ended, and is stopped before its thread has seen that, is seen to have ended."""
    wait, seen, go = os.waitid, threading.Event(), threading.Event()

    def late(*args):
        seen.set()
        assert go.wait(DEADLINE)
        return wait(*args)

    monkeypatch.setattr(os, "waitid", late)
    one = supervise("usage")
    assert seen.wait(DEADLINE)
    (pid,) = wait_for(lambda: starts(tmp_path), "a start")
    wait_for(lambda: not alive(pid), "its end")

    one.stop_soon()
    go.set()
    one.stop(time.monotonic() + DEADLINE)

    assert state(one) == "stopped"


def test_what_is_shown_is_of_one_moment(supervise, monkeypatch):
    """A process is shown once it is said to run: before, and in the file, there is none."""
    write, writing, go = pipeline_supervisor.write_supervised, threading.Event(), threading.Event()

    def slow(pipeline, facts):
        if facts["state"] == "running":
            writing.set()
            assert go.wait(DEADLINE)
        write(pipeline, facts)

    monkeypatch.setattr(pipeline_supervisor, "write_supervised", slow)
    one = supervise("wait")
    assert writing.wait(DEADLINE)

    before = one.facts()
    go.set()
    after = wait_for(lambda: one.facts() if one.facts()["pid"] else None, "a process")

    assert (before["state"], before["pid"]) == ("starting", None)
    assert after["state"] == "running"


def test_a_process_that_cannot_be_started(supervise):
    """What the system refuses is a failure as any other: tried again, given up, and started again on request."""
    one = supervise("wait", command=["/nowhere/python"])
    wait_for(lambda: state(one) == "failed", "giving up")

    assert one.overview()["restarts"] == 2
    assert "cannot be started" in one.overview()["reason"]
    one.start_again()
    wait_for(lambda: one.overview()["restarts"] == 4 and state(one) == "failed", "giving up again")


@pytest.mark.parametrize("kind", ["empty", "directory"])
def test_a_status_that_cannot_be_read(supervise, tmp_path, kind):
    """Whatever stands in the place of a run's status, the run is kept running and reported."""
    status = tmp_path / ".virta" / "pipelines" / "copy" / "status.json"
    status.parent.mkdir(parents=True)
    if kind == "empty":
        status.touch()
    else:
        status.mkdir()

    one = supervise("fail")

    wait_for(lambda: one.facts()["state"] == "failed", "giving up")
    assert one.facts()["last_error"] == "the sentence that counts"
    if kind == "empty":
        assert state(one) == "failed"


def test_output_that_does_not_end(supervise, tmp_path, monkeypatch):
    """Somebody who left the family may hold its output for ever: nobody waits for that, in no thread."""
    monkeypatch.setattr(pipeline_supervisor, "COPY_S_MAX", 0.05)
    before = set(threading.enumerate())
    one = supervise("leave")
    wait_for(lambda: state(one) == "finished", "the end")
    stranger = int((tmp_path / "grandchild").read_text())
    try:
        wait_for(lambda: set(threading.enumerate()) <= before, "the end of the copying")
        assert alive(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)


def test_orders_for_what_is_not_there(server):
    """A name that is not listed is not found; a page of another site is not asked for its wishes."""
    assert server.request("POST", "/pipelines/copy/restart").status == 404
    assert server.request("POST", "/pipelines/copy/dance").status == 404
    assert server.request("GET", "/pipelines/copy/stop").status == 405
    foreign = {"Origin": "https://elsewhere.example"}
    assert server.request("POST", "/pipelines/copy/stop", headers=foreign).status == 403


def test_a_wrong_file_is_not_tried_again(supervise, tmp_path):
    """Exit code 2 says that the next start would end the same way."""
    one = supervise("usage")

    wait_for(lambda: state(one) == "failed", "giving up")

    assert len(starts(tmp_path)) == 1
    assert one.overview()["reason"] == "exit code 2"


def test_failures_outside_the_window_do_not_count(supervise, tmp_path):
    """Only failures close to each other lead to giving up; a killed run starts again."""
    one = supervise(
        "wait", RestartLimits(failures_max=2, window_ms=1, backoff_ms=5, stop_ms=20_000)
    )
    for number in range(3):
        pids = wait_for(lambda n=number: starts(tmp_path)[n:], "a start")
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda n=number: len(starts(tmp_path)) > n + 1, "the next start")

    overview = wait_for(lambda: one.overview() if one.overview()["pid"] else None, "a process")
    assert overview["state"] == "starting"  # it has not written a status yet
    assert overview["restarts"] == 3
    assert overview["reason"] == "killed by SIGKILL"


def test_a_deaf_process_is_killed_with_what_it_started(supervise, tmp_path):
    """SIGTERM, then at the deadline SIGKILL for the whole family."""
    one = supervise(
        "deaf", RestartLimits(failures_max=3, window_ms=1000, backoff_ms=1, stop_ms=100)
    )
    wait_for((tmp_path / "ready").exists, "the stand-in")
    family = [starts(tmp_path)[0], int((tmp_path / "grandchild").read_text())]

    one.stop_soon()
    assert state(one) == "stopping"
    one.stop(time.monotonic() + 0.1)

    assert state(one) == "stopped"
    wait_for(lambda: not any(map(alive, family)), "the end of the family")


def test_output_is_bounded(supervise, tmp_path):
    """Four megabytes of chatter leave at most two files of the limit's size."""
    one = supervise("chatter")
    wait_for(lambda: state(one) == "finished", "the end")

    files = sorted((tmp_path / "logs").iterdir())

    assert [file.name for file in files][-1] == "copy.log.1"
    assert all(
        file.stat().st_size <= pipeline_supervisor.LOG_BYTES_MAX + pipeline_supervisor.CHUNK_BYTES
        for file in files
    )


SUPERVISOR = """
import sys, threading, structlog
from pathlib import Path
from virta.server.pipeline_supervisor import RestartLimits, SupervisedPipeline
from virta.spark.pipeline.file import loads
home, child, text = sys.argv[1:]
one = SupervisedPipeline(loads(text, directory=home), [sys.executable, child, home, "wait"], Path(home) / "log",
                 RestartLimits(3, 1000, 1, 1000), structlog.get_logger())
one.start()
threading.Event().wait()
"""


def test_no_orphan_when_the_supervisor_is_killed(tmp_path):
    """SIGKILL for the server ends the input of its pipelines, and they end."""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path), str(CHILD), TEXT],
        stdout=subprocess.DEVNULL,
    )
    wait_for((tmp_path / "ready").exists, "the stand-in")
    pid = starts(tmp_path)[0]
    assert alive(pid)

    supervisor.kill()
    supervisor.wait()

    wait_for(lambda: not alive(pid), "the end of the stand-in")


def test_files_that_are_no_pipelines_are_shown(tmp_path):
    """Patterns skip foreign TOML; what is listed and wrong is `invalid` with its lines, not a refusal to start."""
    (tmp_path / "a.toml").write_text(TEXT)
    (tmp_path / "b.toml").write_text(TEXT)
    (tmp_path / "c.toml").write_text(TEXT.replace('kind = "channel"', 'kind = "canal"'))
    (tmp_path / "virta.toml").write_text("[server]\n")
    patterns = [str(tmp_path / "*.toml"), str(tmp_path / "gone.toml"), str(tmp_path / "x*.toml")]

    found = Pipelines(patterns, tmp_path, LIMITS, structlog.get_logger("test"))

    assert list(found.supervised) == ["copy"]
    reasons = {
        one["pipeline"]: one["reason"] for one in found.overviews() if one["state"] == "invalid"
    }
    assert set(reasons) == {"b", "c", "gone"}
    assert "another file has the pipeline copy" in reasons["b"]
    assert "c.toml:14: kind 'canal'" in reasons["c"]
    assert "cannot be read" in reasons["gone"]
    assert found.overview("c")["state"] == "invalid"
    assert found.overview("nobody") is None


def test_a_pipeline_has_one_run(tmp_path):
    """A second run of the same checkpoint is refused in one sentence."""
    pipeline = loads(TEXT, directory=str(tmp_path))

    with claimed(pipeline), pytest.raises(BusyError, match="copy runs already"), claimed(pipeline):
        pass
    with claimed(pipeline):
        pass


def test_a_later_process_of_the_same_number_is_another(tmp_path):
    """What a run or a server has left in its files counts for as long as that very process lives."""
    pipeline = loads(TEXT, directory=str(tmp_path))
    pid, since = os.getpid(), began(os.getpid())
    status = {"state": "running", "pid": pid, "began": since, "queries": {}}
    supervised = {"server": pid, "began": since, "state": "waiting", "pid": None}

    write_status(pipeline, status)
    assert read_status(pipeline)["state"] == "running"
    write_status(pipeline, {**status, "began": since - 1})
    assert read_status(pipeline)["state"] == "lost"
    write_supervised(pipeline, supervised)
    assert read_status(pipeline)["state"] == "waiting"
    write_supervised(pipeline, {**supervised, "began": since - 1})
    assert read_status(pipeline)["state"] == "lost"


def test_the_server_never_imports_spark():
    """The server's process stays small: importing it brings neither pyspark nor pyarrow."""
    code = "import sys, virta.server.run; print({'pyspark', 'pyarrow'} & set(sys.modules))"

    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout == "set()\n"


def test_a_server_without_pipelines(server):
    """The list is empty, and a name that is not listed is not found."""
    assert server.request("GET", "/pipelines").json == []
    assert server.request("GET", "/pipelines/copy").status == 404


def progressed(server):
    answer = server.request("GET", "/pipelines/copy").json
    done = answer["state"] == "running" and answer["lag"] == 0 and answer["rows"] >= 5
    return answer if done else None


def shown_pid(server):
    return server.request("GET", "/pipelines/copy").json["pid"]


@pytest.mark.slow
def test_a_real_pipeline_beside_a_real_server(tmp_path):
    """Listed in virta.toml it runs, is restarted when killed, delivers each event once, and ends with the server."""
    pytest.importorskip("pyspark")
    (tmp_path / "copy.toml").write_text(TEXT)
    config = tmp_path / "virta.toml"
    config.write_text(
        f'[server]\npipelines = ["{tmp_path}/copy.toml"]\npipeline_stop_ms = 60000\n'
        "pipeline_backoff_ms = 1\n"
    )
    environ = {"PYTHONWARNINGS": "ignore"}
    with Server(tmp_path / "data", "--config", config, environ=environ) as server:
        for n in range(5):
            server.publish("orders", event(str(n), {"n": n}))
        first = wait_for(lambda: progressed(server), "the first five")
        os.kill(first["pid"], signal.SIGKILL)
        # The server ends its Java, which might read on until then.
        wait_for(lambda: shown_pid(server) != first["pid"], "the end of all of it")
        for n in range(5, 10):
            server.publish("orders", event(str(n), {"n": n}))
        second = wait_for(
            lambda: (now := progressed(server)) and now["pid"] != first["pid"] and now, "a restart"
        )
        shown = subprocess.run(
            [sys.executable, "-m", "virta", "pipeline", "status", tmp_path / "copy.toml", "--json"],
            capture_output=True,
            check=True,
        )
        metrics = server.request("GET", "/metrics").body.decode()
        server.process.terminate()
        server.said.append(server.process.communicate(timeout=DEADLINE)[0].decode())

    copied = [json.loads(r.value)["id"] for r in read_topic(tmp_path / "data" / "log", "copied")]
    assert copied == [str(n) for n in range(2, 10)]
    assert first["state"] == second["state"] == "running"
    assert (first["restarts"], second["restarts"]) == (0, 1)
    assert second["reason"] == "killed by SIGKILL"
    assert json.loads(shown.stdout)["pid"] == second["pid"]
    assert json.loads(shown.stdout)["restarts"] == 1
    assert 'virta_pipeline_restarts{pipeline="copy"} 1.0' in metrics
    assert 'virta_pipeline_running{pipeline="copy"} 1.0' in metrics
    assert not alive(second["pid"])
    assert server.process.returncode == 0
    assert "pipeline_killed" not in "".join(server.said)


def read_topic(path, topic):
    with virta.open(path, create=False, read_only=True) as log:
        return list(log.read(topic))
