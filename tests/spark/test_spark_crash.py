"""Exactly once under SIGKILL: of Python workers, of the driver, of an executor in a standalone cluster."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("pyspark")

from copy_driver import FILTERS, copy
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from spark_logs import fill, read_log

import virta
from s3_server import s3_environment, started_s3
from virta.spark.lake import compact, read_all
from virta.spark.lake.directory import ranges
from virta.spark.launch.java import ensure_java
from virta.spark.launch.package import write_package
from virta.spark.versions import HAS_READ_LIMITS

pytestmark = pytest.mark.slow
needs_limits = pytest.mark.skipif(
    not HAS_READ_LIMITS,
    reason="Spark 4.1 would copy all in one micro-batch; kill_rounds.py has kills for it",
)

WORKER_ROUNDS = int(os.environ.get("VIRTA_SPARK_WORKER_ROUNDS", "18"))
DRIVER_ROUNDS = int(os.environ.get("VIRTA_SPARK_DRIVER_ROUNDS", "2"))
EXECUTOR_ROUNDS = int(os.environ.get("VIRTA_SPARK_EXECUTOR_ROUNDS", "18"))
WORKER_BATCH = 40
# Parts of the command lines of Spark's Python workers: planners; readers and writers; committers; all at once.
ROLES = ("python_streaming_source_runner", "pyspark.worker ", "python_streaming_sink_runner", "")
DEAD_WORKER = "Python worker exited unexpectedly"
DEADLINE = 240.0
DRIVER = Path(__file__).with_name("copy_driver.py")
SRC = Path(virta.__file__).parent.parent
ROOT = Path(__file__).resolve().parents[2]


def ids(path, topic=None):
    return [json.loads(record.value)["id"] for record in read_log(path, topic)]


def wait_for(condition, what, process=None):
    """Poll a condition until it holds, and give what it gave; fail with what was awaited."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if found := condition():
            return found
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


def kill_workers(role):
    """
    SIGKILL the Python workers Spark has here for a role; True when there were any.

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
        if role in command
        and ("pyspark.daemon" not in command or parent_of(pid) in python)  # a daemon's fork
    ]
    for pid in workers:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return bool(workers)


class Copying:
    """A stream from one log to another, started again by its checkpoint whenever it has failed."""

    def __init__(self, spark, source, target, checkpoint):
        self.spark, self.source, self.target, self.checkpoint = spark, source, target, checkpoint
        self.failed = 0
        self.query = self.start(WORKER_BATCH)

    def start(self, limit, **trigger):
        """Start a query; again when Spark plans it with a worker that it does not know to be dead."""
        while True:
            try:
                return self.started(limit, **trigger)
            except Py4JJavaError as error:
                if DEAD_WORKER not in str(error):
                    raise
            self.failed += 1
            assert self.failed <= 2 * WORKER_ROUNDS

    def started(self, limit, **trigger):
        reader = self.spark.readStream.format("virta").option("maxRecordsPerTrigger", limit)
        rows = reader.load(self.source).select("topic", "key", "value")
        writer = rows.writeStream.format("virta").option("path", self.target)
        writer = writer.option("checkpointLocation", self.checkpoint)
        return (writer.trigger(**trigger) if trigger else writer).start()

    def reach(self, goal):
        """Wait until the other log has so many records, the last of them by a query that still runs."""
        while True:
            wait_for(
                lambda n=goal: next_offset(self.target) >= n or not self.query.isActive,
                f"offset {goal}",
            )
            if self.query.isActive:
                return
            self.failed += 1
            assert self.failed <= 2 * WORKER_ROUNDS
            goal = max(goal, next_offset(self.target) + 1)
            self.query = self.start(WORKER_BATCH)

    def kill(self, role):
        """As soon as there are workers of that role; a query that failed meanwhile has none."""
        killed = False

        def attempt():
            nonlocal killed
            killed = kill_workers(role)
            return killed or not self.query.isActive

        wait_for(attempt, f"a worker of role {role!r}")
        while not killed:
            self.reach(next_offset(self.target) + 1)
            wait_for(attempt, f"a worker of role {role!r}")

    def finish(self):
        """Stop it, then copy what is left in one go."""
        self.query.stop()
        for _ in range(WORKER_ROUNDS):  # Spark may still hand out a dead worker or two
            try:
                self.start(1_000_000, availableNow=True).awaitTermination()
            except PySparkException:
                continue
            return


def test_workers_killed_at_random(spark, tmp_path):
    """SIGKILL the Python workers in a random micro-batch, again and again; what fails restarts: each row once."""
    source, target = str(tmp_path / "in"), str(tmp_path / "out")
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    events = fill(source, WORKER_BATCH, seed=seed)
    copying = Copying(spark, source, target, str(tmp_path / "c"))
    try:
        for number in range(WORKER_ROUNDS):
            events += fill(source, 5 * WORKER_BATCH, seed=seed + 1 + number, first=len(events))
            # Planning takes longer than many micro-batches, so kill after rows arrived.
            copying.reach(next_offset(target) + rng.randrange(1, 2 * WORKER_BATCH))
            threading.Event().wait(rng.uniform(0, 0.3))
            copying.kill(ROLES[number % len(ROLES)])
    finally:
        copying.finish()

    print(f"{WORKER_ROUNDS} rounds killed, {copying.failed} queries failed")
    assert ids(target) == [event["id"] for event in events]
    assert copying.failed


def start_driver(master, source, target, checkpoint, limit=50, *lakes, **more):
    environment = {**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "ignore", **more}
    return subprocess.Popen(
        [sys.executable, DRIVER, master, source, target, checkpoint, str(limit), *lakes],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=Path(target).parent,
    )


def kill_group(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@needs_limits
def test_driver_killed_at_random(spark, tmp_path):
    """
    SIGKILL the driver and everything it started at a random micro-batch, in the middle of a compaction:
    restarts add each row once, lakes have all of a range or nothing.
    """
    source, target, checkpoint = str(tmp_path / "in"), str(tmp_path / "out"), str(tmp_path / "c")
    events = fill(source, 3000)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(DRIVER_ROUNDS):
        goal, lakes = next_offset(target) + rng.randrange(1, 200), tmp_path / "lakes" / str(number)
        process = start_driver("local[2]", source, target, checkpoint, 50, str(lakes))
        try:
            wait_for(lambda n=goal: next_offset(target) >= n, f"offset {goal}", process)
            threading.Event().wait(rng.uniform(0, 0.3))
            lakes.mkdir(parents=True)  # the driver has waited for it
            wait_for(partial(halted_in_a_draft, process, lakes), "a draft", process)
        finally:
            kill_group(process)
    # The last restart is ours: a driver that knows nothing but the checkpoint, as any other.
    copy(spark, source, target, checkpoint, limit=5000).awaitTermination()

    assert ids(target) == [event["id"] for event in events]
    check_lakes(spark, source, [draft.parent for draft in tmp_path.glob("lakes/*/*/_draft-*")])


def halted_in_a_draft(process, lakes):
    """Stop the driver and all it started; True when there is a draft now, which it can no longer complete."""
    if not list(lakes.glob("*/_draft-*")):
        return False
    os.killpg(process.pid, signal.SIGSTOP)
    if list(lakes.glob("*/_draft-*")):
        return True
    os.killpg(process.pid, signal.SIGCONT)
    return False


def check_lakes(spark, source, interrupted):
    """What a killed compaction left shows nothing of it, and the next one completes."""
    everything = [(record.offset, record.value) for record in read_log(source)]

    def united(lake):
        found = read_all(source, str(lake), spark=spark).select("offset", "value").collect()
        return sorted((row.offset, bytes(row.value)) for row in found)

    assert interrupted
    for lake in interrupted:
        assert ranges(lake) == []
        assert united(lake) == everything
        report = compact(source, str(lake))
        assert 0 < report.next <= len(everything)
        assert united(lake) == everything
        assert not list(lake.glob("_draft-*"))


# A standalone cluster: master and two workers, each a process of its own, on loopback.


class Cluster:
    """Spark's own master and workers; the pip package has the classes but not the scripts."""

    prefix: ClassVar[list[str]] = []

    def __init__(self, directory, workers=2, hide=(), environment=()):
        import pyspark

        home = Path(pyspark.__file__).parent
        if hide:
            # Each process in a mount namespace of its own, where `hide` are empty; Spark itself is bound elsewhere.
            (directory / "spark-home").mkdir()
            moved = directory / "spark-home"
            empty = " && ".join(f"mount -t tmpfs none {place}" for place in hide)
            mounts = f"mount --bind {home} {moved} && {empty} && cd / && exec"
            self.prefix = ["unshare", "-m", "sh", "-c", f'{mounts} "$@"', "sh"]
            home = moved
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
        self.environment.update(environment)
        if hide:
            del self.environment["PYTHONPATH"], self.environment["PYSPARK_PYTHON"]
        self.command = [*self.prefix, str(home / "bin" / "spark-class")]
        self.directory = directory
        self.processes = []
        self.start("master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        # A worker that starts before the master listens tries again ten or twenty seconds later.
        wait_for(self.find_master, "the master", self.processes[0])
        for number in range(workers):
            self.start(
                "worker.Worker", "-c", "1", "-m", "1g", "--host", "127.0.0.1", "--webui-port", "0",
                "-d", str(directory / f"worker-{number}"), self.url,
            )  # fmt: skip

    def find_master(self):
        """The port is the one that the master got: a free one that we had found might be taken by then."""
        said = (self.directory / "0.log").read_text()
        found = re.search(r"Starting Spark master at (spark://[\d.]+:\d+)\n", said)
        self.url = found and found[1]
        return self.url

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

    def pair(self):
        found = self.executors()
        return found if len(found) == 2 else None

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


@needs_limits
def test_cluster_with_killed_executors(spark, tmp_path):
    """
    On a master with two workers, which run the Python of an archive, executors die at random micro-batches, again
    and again, and the driver at last: each row is in the sink once.
    """
    notes = pack_environment(tmp_path)
    source, target, checkpoint = str(tmp_path / "in"), str(tmp_path / "out"), str(tmp_path / "c")
    # More than are copied meanwhile: a hundred micro-batches for each round, were they needed.
    events = fill(source, 1000 * EXECUTOR_ROUNDS)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    cluster = Cluster(tmp_path)
    process = None
    try:
        process = start_driver(cluster.url, source, target, checkpoint, limit=10)
        for _ in range(EXECUTOR_ROUNDS):
            goal = next_offset(target) + 1
            wait_for(lambda n=goal: next_offset(target) >= n, "a micro-batch", process)
            # Never the last one: Spark gives an application up that has none, time and again.
            pair = wait_for(cluster.pair, "two executors", process)
            threading.Event().wait(rng.uniform(0, 0.3))
            victim = rng.choice(pair)
            os.kill(victim, signal.SIGKILL)
            # One that still dies is not to be taken for one of the two that the next round needs.
            wait_for(lambda pid=victim: pid not in cluster.executors(), "its end", process)
        goal = next_offset(target) + 1
        wait_for(lambda: next_offset(target) >= goal, "a micro-batch", process)
    finally:
        if process is not None:
            kill_group(process)
        cluster.stop()
    copied = next_offset(target)
    copy(spark, source, target, checkpoint, limit=len(events)).awaitTermination()

    assert 0 < copied < len(events)
    assert ids(target, "copy") == [event["id"] for event in events]
    places = {Path(line).parents[1] for line in notes.read_text().split()}
    # Which of the two got tasks is Spark's to decide; that the archive was unpacked there is ours.
    assert places
    assert places <= {tmp_path / "worker-0", tmp_path / "worker-1"}


def can_unshare():
    return (
        subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not can_unshare(), reason="needs the right to make a mount namespace")
def test_a_cluster_that_sees_neither_the_repository_nor_the_log(tmp_path):
    """
    Executors with the packaged environment, under 100 MB, and credentials of a store that has the log.

    Bounded queries, `where` and `match_log` equal a plain evaluation; the stream's driver is killed and started again,
    and each row is in the sink once. The log's directory is moved away; the driver's own files are hidden. The same
    holds for a log that the executors see as a directory. A large write to a log that they do not see is refused.
    """
    pytest.importorskip("obstore", reason="object storage needs obstore")
    events = fill(tmp_path / "log", 2000, segment_bytes=256 * 1024)
    records = read_log(tmp_path / "log")
    size = write_package(tmp_path / "environment.tar.gz")
    driver = tmp_path / "driver"  # what only the driver sees
    for place in (driver / "tmp", driver / "state"):
        place.mkdir(parents=True)
    target, checkpoint = str(tmp_path / "out"), str(driver / "state" / "checkpoint")
    answers = driver / "state" / "answers.json"
    local = {"VIRTA_TEST_LOCAL": str(shutil.copytree(tmp_path / "log", tmp_path / "visible"))}
    hidden = {"VIRTA_TEST_HIDDEN": str(driver / "state" / "hidden")}
    with started_s3(tmp_path) as endpoint:
        store = s3_environment(endpoint)
        ship_to_s3(tmp_path / "log", "s3://bucket/orders", endpoint)
        (tmp_path / "log").rename(driver / "moved")
        cluster = Cluster(tmp_path, workers=1, hide=(ROOT, driver), environment=store)
        start = partial(
            start_driver, cluster.url, "s3://bucket/orders", target, checkpoint, 400,
            TMPDIR=str(driver / "tmp"), **store,
        )  # fmt: skip
        process = None
        try:
            process = start(VIRTA_TEST_ANSWERS=str(answers), **local, **hidden)
            wait_for(lambda: next_offset(target) > 0, "a micro-batch", process)
            kill_group(process)
            process = start(**local)
            wait_for(lambda: next_offset(target) == len(events), "all rows", process)
            wait_for(lambda: next_offset(f"{target}-local") == len(events), "all rows", process)
        finally:
            if process is not None:
                kill_group(process)
            cluster.stop()

    found = json.loads(answers.read_text())
    values = [json.loads(record.value) for record in records]
    assert size < 100_000_000
    for place in (target, f"{target}-local"):
        assert sorted(ids(place, "copy")) == sorted(event["id"] for event in events)
    pairs = sorted(
        [record.offset, name]
        for record, value in zip(records, values, strict=True)
        for name, filter_ in FILTERS.items()
        if filter_.matches(value)
    )
    assert found["source"] == found["local"] == {
        "batch": [[r.offset, v["id"]] for r, v in zip(records, values, strict=True)],
        "where": sorted(v["id"] for v in values if v["data"]["n"] >= 50),
        "match": pairs,
    }  # fmt: skip
    assert len({name for _, name in pairs}) == 2
    assert "this executor does not see the log at" in found["refusal"]
    assert next_offset(hidden["VIRTA_TEST_HIDDEN"]) == 0


def ship_to_s3(path, url, endpoint):
    """Make the bucket and ship the log there, by the command."""
    bucket = f"{endpoint}/{url.split('/')[2]}"
    urllib.request.urlopen(urllib.request.Request(bucket, method="PUT"), timeout=10).close()
    command = [sys.executable, "-m", "virta", "log", "ship", path, url]
    subprocess.run(command, env=os.environ | s3_environment(endpoint), check=True)


def test_the_name_of_the_packed_python_ends_with_its_last_user(tmp_path):
    """It exists while any driver lives, is replaced if a killed one left it, and is removed by the last."""
    link = tmp_path / "environment"
    link.symlink_to(tmp_path / "of-one-that-was-killed")
    script = (
        "import pathlib, sys\n"
        "from virta.spark.launch.session import use_packed_python\n"
        "use_packed_python('environment')\n"
        "print(pathlib.Path('environment/bin/python').exists(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]

    assert [driver.stdout.readline().strip() for driver in drivers] == ["True"] * 2
    drivers[0].communicate()
    assert (link / "bin" / "python").exists()
    drivers[1].communicate()

    assert [driver.returncode for driver in drivers] == [0, 0]
    assert list(tmp_path.iterdir()) == []
