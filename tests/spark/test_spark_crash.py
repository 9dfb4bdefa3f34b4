"""Exactly once under SIGKILL: of Python workers, of the driver, of an executor in a standalone cluster."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import PySparkException
from spark_logs import fill, read_log

import virta
from virta.spark.java import ensure_java
from virta.spark.lake import compact, lake_ranges, read_all

pytestmark = pytest.mark.slow

WORKER_ROUNDS = int(os.environ.get("VIRTA_SPARK_WORKER_ROUNDS", "18"))
DRIVER_ROUNDS = int(os.environ.get("VIRTA_SPARK_DRIVER_ROUNDS", "2"))
DEADLINE = 240.0
DRIVER = Path(__file__).with_name("copy_driver.py")
SRC = Path(virta.__file__).parent.parent


def ids(path, topic=None):
    return [json.loads(record.value)["id"] for record in read_log(path, topic)]


def wait_for(condition, what, process=None):
    """Poll a condition until it holds; fail with what was awaited."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if condition():
            return
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended before {what}")
        threading.Event().wait(0.02)
    raise AssertionError(f"waited {DEADLINE:.0f} s for {what}")


def next_offset(path):
    """The end of a log that may not be there yet."""
    try:
        with virta.open(path, create=False, read_only=True) as log:
            return log.next_offset
    except virta.errors.LogNotFoundError:
        return 0


def children(pid):
    """All descendants of a process, with their command lines."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append((int(entry.name), command))
    found, queue = [], [pid]
    while queue:
        for child in parents.get(queue.pop(), []):
            found.append(child)
            queue.append(child[0])
    return found


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def kill_workers():
    """
    SIGKILL every Python worker Spark has here: readers, writers, planners, committers.

    Their daemons stay: Spark does not get over the loss of those, and they hold nothing of ours.
    """
    found = children(os.getpid())
    python = {
        pid: command
        for pid, command in found
        if "python" in Path(command.partition(" ")[0]).name and "pyspark" in command
    }
    workers = [
        pid
        for pid, command in python.items()
        if "streaming" in command or parent_of(pid) in python  # a fork of a daemon
    ]
    for pid in workers:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return bool(workers)


def test_workers_killed_at_random(spark, tmp_path):
    """SIGKILL the Python workers at a random moment, restart the query, again and again: each row once."""
    source, target, checkpoint = str(tmp_path / "in"), str(tmp_path / "out"), str(tmp_path / "c")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    events = []

    def copy():
        rows = spark.readStream.format("virta").option("maxRecordsPerTrigger", "40").load(source)
        writer = (
            rows.select("topic", "key", "value").writeStream.format("virta").option("path", target)
        )
        return writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()

    def ended_well(query):
        try:
            query.awaitTermination()
        except PySparkException:
            return False
        return True

    killed = failed = 0
    for number in range(WORKER_ROUNDS):
        events += fill(source, 80, seed=seed + number, first=len(events))
        query = copy()
        threading.Event().wait(rng.uniform(0.05, 1.4))
        killed += query.isActive and kill_workers()
        failed += not ended_well(query)
    # Spark may still hand out a dead worker or two that it kept for reuse.
    assert any(ended_well(copy()) for _ in range(WORKER_ROUNDS))

    print(f"{killed} rounds killed, {failed} queries failed")
    assert ids(target) == [event["id"] for event in events]
    assert killed >= WORKER_ROUNDS // 2
    assert failed


def start_driver(master, source, target, checkpoint, limit=50, *lakes):
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, DRIVER, master, source, target, checkpoint, str(limit), *lakes],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=Path(source).parent,
    )


def finish(process):
    """Wait for a driver to end by itself; its last words when it did not end well."""
    _, words = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, words.decode()[-3000:]


def kill_group(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_driver_killed_at_random(spark, tmp_path):
    """
    SIGKILL the driver and everything it started at a random micro-batch, in the middle of a compaction:
    restarts add each row once, lakes have all of a range or nothing.
    """
    source, target, checkpoint = str(tmp_path / "in"), str(tmp_path / "out"), str(tmp_path / "c")
    events = fill(source, 1500)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    reached, lakes = 0, tmp_path / "lakes"
    for _ in range(DRIVER_ROUNDS):
        reached = min(reached + rng.randrange(1, 300), 1400)
        process = start_driver("local[2]", source, target, checkpoint, 50, str(lakes))
        try:
            wait_for(lambda goal=reached: next_offset(target) >= goal, f"offset {reached}", process)
            threading.Event().wait(rng.uniform(0, 0.3))
            known = set(lakes.glob("*/_draft-*"))
            wait_for(lambda old=known: set(lakes.glob("*/_draft-*")) - old, "a draft", process)
        finally:
            kill_group(process)
        reached = next_offset(target)
    process = start_driver("local[2]", source, target, checkpoint, limit=5000)
    finish(process)

    assert ids(target) == [event["id"] for event in events]
    check_lakes(spark, source, [draft.parent for draft in lakes.glob("*/_draft-*")])


def check_lakes(spark, source, interrupted):
    """What a killed compaction left shows nothing of it, and the next one completes."""
    everything = [(record.offset, record.value) for record in read_log(source)]

    def united(lake):
        found = read_all(source, str(lake), spark=spark).select("offset", "value").collect()
        return sorted((row.offset, bytes(row.value)) for row in found)

    assert interrupted
    for lake in interrupted:
        assert lake_ranges(lake) == []
        assert united(lake) == everything
        report = compact(source, str(lake), spark=spark)
        assert 0 < report.next <= len(everything)
        assert united(lake) == everything
        assert not list(lake.glob("_draft-*"))


# A standalone cluster: master and two workers, each a process of its own, on loopback.


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """Spark's own master and workers; the pip package has the classes but not the scripts."""

    def __init__(self, directory, workers=2):
        import pyspark

        home = Path(pyspark.__file__).parent
        self.port = free_port()
        self.environment = {
            **os.environ,
            "JAVA_HOME": str(ensure_java()),
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_LOG_DIR": str(directory),
            "PYTHONPATH": str(SRC),
            "PYSPARK_PYTHON": sys.executable,
        }
        self.command = [str(home / "bin" / "spark-class")]
        self.directory = directory
        self.processes = []
        self.start(
            "master.Master", "--host", "127.0.0.1", "--port", str(self.port), "--webui-port", "0"
        )
        for number in range(workers):
            self.start(
                "worker.Worker", "-c", "1", "-m", "1g", "--host", "127.0.0.1", "--webui-port", "0",
                "-d", str(directory / f"worker-{number}"), self.url,
            )  # fmt: skip

    @property
    def url(self):
        return f"spark://127.0.0.1:{self.port}"

    def start(self, name, *arguments):
        with (self.directory / f"{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*self.command, f"org.apache.spark.deploy.{name}", *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.processes.append(process)

    def executors(self):
        return [
            pid
            for process in self.processes[1:]
            for pid, command in children(process.pid)
            if re.search(r"CoarseGrainedExecutorBackend", command)
            and "java" in command.split(" ")[0]
        ]

    def stop(self):
        for process in self.processes:
            kill_group(process)


def pack_environment(directory):
    """An archive whose Python notes that it was started, then is ours; gives the notes' file."""
    home, notes = directory / "packed", directory / "started"
    (home / "bin").mkdir(parents=True)
    python = home / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$PWD" >> "{notes}"\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    shutil.make_archive(str(directory / "environment"), "gztar", home)
    return notes


def test_cluster_with_a_killed_executor(tmp_path):
    """
    On a master with two workers, which run the Python of an archive, an executor dies in the middle: each row
    is in the sink once.
    """
    notes = pack_environment(tmp_path)
    source, target, checkpoint = str(tmp_path / "in"), str(tmp_path / "out"), str(tmp_path / "c")
    events = fill(source, 1200)
    cluster = Cluster(tmp_path)
    process = None
    try:
        process = start_driver(cluster.url, source, target, checkpoint, limit=200)
        wait_for(lambda: next_offset(target) >= 200, "the first micro-batch", process)
        executors = cluster.executors()
        assert len(executors) == 2
        os.kill(executors[0], signal.SIGKILL)
        finish(process)
    finally:
        if process is not None:
            kill_group(process)
        cluster.stop()

    assert ids(target, "copy") == [event["id"] for event in events]
    places = {Path(line).parents[1] for line in notes.read_text().split()}
    # Which of the two got tasks is Spark's to decide; that the archive was unpacked there is ours.
    assert places
    assert places <= {tmp_path / "worker-0", tmp_path / "worker-1"}
    assert not (tmp_path / "environment").exists()
