"""
The workloads of `compare.py`, written against the public API so that both checkouts can run them.

`python compare_workloads.py NAME SECONDS` prints one JSON line: `rate` (items per second) and `cpu_us` (processor
time per item, of the process that does the work). Runs under the interpreter of the checkout that is measured.
"""

# ruff: noqa: PLC0415 - only the measured checkout has these packages

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
SEED = 7
BATCH = 100
VALUE = b"v" * 273
LOG_RECORDS = 200_000
FILTERS = 10_000
SPARK_EVENTS = 200_000
SPARK_FILTERS = 1_000
START_S_MAX = 60.0
SERVER_CELLS = {
    # name: scenario of server_load.py, number of consumers, what it reports
    "server-posts": ("posts", 0, "posts_s"),
    "server-fan-out": ("fanout", 1000, "deliveries_s"),
    "server-5000-consumers": ("selective", 5000, "events_s"),
}


def cpu_seconds(pid: int | str = "self") -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def repeat(step, seconds: float, each: int) -> dict[str, float]:
    """Call `step` for that long and return rate and processor time per item."""
    step()
    began, used, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        step()
        count += each
    spent, took = time.process_time() - used, time.perf_counter() - began
    return {"rate": count / took, "cpu_us": 1e6 * spent / count}


# The log.


def append(seconds: float, size: int) -> dict[str, float]:
    import virta

    with tempfile.TemporaryDirectory() as place, virta.open(place) as log:
        batch = [("events", b"0123456789abcdef", VALUE)] * size
        return repeat(lambda: log.append_many(batch, durability="none"), seconds, size)


def consume(seconds: float) -> dict[str, float]:
    import virta

    with tempfile.TemporaryDirectory() as place, virta.open(place) as log:
        batch = [("events", b"0123456789abcdef", VALUE)] * 1000
        for _ in range(LOG_RECORDS // 1000):
            log.append_many(batch, durability="none")

        def read() -> None:
            count = sum(1 for record in log.read() if record.value)
            assert count == LOG_RECORDS, count

        return repeat(read, seconds, LOG_RECORDS)


# Matching.


def make_document(rng: random.Random) -> dict[str, object]:
    return {
        "user": f"u{rng.randrange(2000)}",
        "shop": f"s{rng.randrange(200)}",
        "amount": rng.randrange(1000),
        "nested": {"city": f"c{rng.randrange(50)}", "name": "somebody with a name"},
    }


def match(seconds: float) -> dict[str, float]:
    from virta.filters import parse
    from virta.match import Matcher

    rng = random.Random(SEED)
    matcher = Matcher()
    for number in range(FILTERS):
        user, low = rng.randrange(2000), rng.randrange(1000)
        conditions = {
            "and": [{"equals": {"user": f"u{user}"}}, {"range": {"amount": {"gte": low}}}]
        }
        texts = [f"user=u{user}&shop=s{rng.randrange(200)}", conditions]
        matcher.add(parse(texts[number % 2], dialect=["query-string", "koncorde"][number % 2]))
    documents = [make_document(rng) for _ in range(1000)]
    return repeat(lambda: matcher.match_many(documents), seconds, len(documents))


# The server: the process is measured, the load runs beside it.


@contextlib.contextmanager
def running(*arguments: str):
    """Start `virta` with these arguments; yield the process and the port that it logs."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "virta", *arguments, "--data-dir", place]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            yield process, listening_port(process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=START_S_MAX)


def listening_port(process) -> int:
    for line in process.stdout:
        with contextlib.suppress(ValueError):
            logged = json.loads(line)
            if "listening" in (logged.get("event"), logged.get("message")):
                address = logged.get("url") or logged.get("address") or ""
                return int(address.rsplit(":", 1)[1])
    message = "the process ended before it listened"
    raise OSError(message)


def serve(seconds: float, scenario: str, consumers: int, key: str) -> dict[str, float]:
    flags = ["--server-port", "0", "--journal-port", "none", "--durability", "none"]
    with running("serve", *flags) as (process, port):
        command = [sys.executable, str(HERE / "server_load.py"), scenario, str(port), str(seconds)]
        load = subprocess.Popen([*command, str(consumers)], stdout=subprocess.PIPE, text=True)
        load.stdout.readline()  # consumers are connected
        used = cpu_seconds(process.pid)
        out, _ = load.communicate(timeout=600)
        report = json.loads(out.splitlines()[-1])
        assert not report.get("lost"), report
        rate = report[key]
        return {
            "rate": rate,
            "cpu_us": 1e6 * (cpu_seconds(process.pid) - used) / (rate * seconds),
        }


# Jobs.


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def job_daemon(durability: str):
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "virta", "journal", "serve", "--port", str(port)]
        command += ["--data-dir", place, "--durability", durability]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            from virta.journal import Client

            deadline = time.monotonic() + START_S_MAX
            while True:
                try:
                    client = Client(port=port)
                    client.push("job://warm/0")
                    break
                except Exception:
                    if time.monotonic() > deadline or process.poll() is not None:
                        raise
                    time.sleep(0.05)
            yield process, client
            client.close()
        finally:
            process.terminate()
            process.wait(timeout=START_S_MAX)


def jobs(seconds: float, durability: str, what: str) -> dict[str, float]:
    try:
        from virta.journal.protocol import commands
    except ImportError:  # an older checkout
        from virta.journal import commands

    with job_daemon(durability) as (process, client):
        numbers = iter(range(1, 1 << 60))

        def push() -> None:
            client.push(f"job://work/{next(numbers)}", payload=b"p" * 100)

        def push_many() -> None:
            names = [f"job://work/{next(numbers)}" for _ in range(BATCH)]
            client.pipeline([commands.push(name, payload=b"p" * 100) for name in names])

        def reserve() -> None:
            found = client.next().jobs
            client.done(found[0].key)

        def reserve_many() -> None:
            found = client.next(count=BATCH).jobs
            client.pipeline([commands.done(job.key) for job in found])

        if what.startswith("reserve"):
            for _ in range(600 if what.endswith("x100") else 200):
                push_many()
        step, each = {
            "push": (push, 1),
            "push-x100": (push_many, BATCH),
            "reserve": (reserve, 1),
            "reserve-x100": (reserve_many, BATCH),
        }[what]
        limit = {"reserve": 15_000, "reserve-x100": 50_000}.get(what, 1 << 60)
        began, used, count = time.perf_counter(), cpu_seconds(process.pid), 0
        while time.perf_counter() - began < seconds and count < limit:
            step()
            count += each
        took = time.perf_counter() - began
        return {
            "rate": count / took,
            "cpu_us": 1e6 * (cpu_seconds(process.pid) - used) / count,
        }


# Spark.


def spark(seconds: float, what: str) -> dict[str, float]:
    import virta
    import virta.spark
    from virta.filters import parse

    rng = random.Random(SEED)
    with tempfile.TemporaryDirectory() as place:
        with virta.open(Path(place) / "log") as log:
            for first in range(0, SPARK_EVENTS, 1000):
                events = [
                    json.dumps(
                        {
                            "specversion": "1.0",
                            "id": str(number),
                            "source": "/bench",
                            "type": "order",
                            "data": make_document(rng),
                        }
                    ).encode()
                    for number in range(first, first + 1000)
                ]
                log.append_many([("events", b"", event) for event in events], durability="none")
        session = virta.spark.session()
        df = session.read.format("virta").option("events", "true").load(f"{place}/log")
        if what == "match":
            filters = {
                str(n): parse(f"user=u{rng.randrange(2000)}&shop=s{rng.randrange(200)}")
                for n in range(SPARK_FILTERS)
            }
            df = virta.spark.match(df, filters)

        def drain() -> None:
            df.write.format("noop").mode("overwrite").save()

        drain()
        result = repeat(drain, seconds, SPARK_EVENTS)
        session.stop()
        # Spark works in processes of its own: the clock is what counts.
        return {"rate": result["rate"], "cpu_us": 1e6 / result["rate"]}


WORKLOADS = {
    "log-append": lambda seconds: append(seconds, 1),
    "log-append-x100": lambda seconds: append(seconds, BATCH),
    "log-consume": consume,
    "match": match,
    **{
        name: lambda seconds, cell=cell: serve(seconds, *cell)
        for name, cell in SERVER_CELLS.items()
    },
    **{
        f"jobs-{what}-{durability}": lambda seconds, d=durability, w=what: jobs(seconds, d, w)
        for durability in ("fsync", "none")
        for what in ("push", "push-x100", "reserve", "reserve-x100")
    },
    "spark-read": lambda seconds: spark(seconds, "read"),
    "spark-match": lambda seconds: spark(seconds, "match"),
}


if __name__ == "__main__":
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(WORKLOADS[sys.argv[1]](float(sys.argv[2]))))
