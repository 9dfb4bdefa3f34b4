"""
Kill drivers and executors while large, shuffled micro-batches go to a channel, Parquet, Delta and Iceberg; then count rows.

    python tests/spark/kill_rounds.py --kills 20 [--seed 1] [--rows 7000]

Every round appends over 48 MiB to the log. A driver runs on local-cluster[2,1,1024], so that executors are processes
of their own; of five kills one is the driver's with all it started, the others are of one executor each. Every row
must be in each sink once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import virta

DRIVER = str(Path(__file__).with_name("table_driver.py"))
VALUE_BYTES = 8 * 1024
ROWS = 7000  # of 8 KiB: 55 MiB, more than one append to a log takes
DRIVER_KILLS = 5  # one in so many
START_S = 240
END_S = 900


def append(path: Path, first: int, count: int) -> None:
    """Append events whose ids are numbers from `first` on."""
    with virta.open(path, durability="none") as log:
        for at in range(first, first + count, 500):
            log.append_many(
                [
                    ("in", "", json.dumps({"id": str(i), "source": "/k", "data": {"pad": "x" * VALUE_BYTES}}).encode())
                    for i in range(at, min(at + 500, first + count))
                ]
            )  # fmt: skip


def launch(directory: Path, jars: str, trigger: str) -> subprocess.Popen[bytes]:
    with (directory / "driver.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, DRIVER, str(directory), jars, "local-cluster[2,1,1024]", trigger],
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )


def await_ready(driver: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + START_S
    assert driver.stdout is not None
    while time.monotonic() < deadline:
        if select.select([driver.stdout], [], [], 1)[0]:
            line = driver.stdout.readline()
            if line.strip() == b"ready":
                return
            if not line:
                break
    raise RuntimeError(f"no driver: {(directory / 'driver.log').read_text()[-3000:]}")


def executors(group: int) -> list[int]:
    """Return the process ids of the executors in a driver's process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
                if (
                    b"CoarseGrainedExecutorBackend" in command
                    and os.getpgid(int(entry.name)) == group
                ):
                    found.append(int(entry.name))
            except (OSError, ProcessLookupError):
                continue
    return found


def progress(directory: Path) -> int:
    """Return how many micro-batches have begun or ended: files of Spark's checkpoints."""
    return len(list(directory.glob("checkpoint/*/offsets/*"))) + len(list(directory.glob("checkpoint/*/commits/*")))  # fmt: skip


def await_batch(directory: Path, before: int, driver: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while progress(directory) <= before and time.monotonic() < deadline:
        if driver.poll() is not None:
            raise RuntimeError(
                f"the driver ended: {(directory / 'driver.log').read_text()[-3000:]}"
            )
        time.sleep(0.1)


def kill_group(driver: subprocess.Popen[bytes]) -> None:
    """End a driver and all it started, if it has not ended, and close its output."""
    if driver.poll() is None:
        os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    if driver.stdout is not None:
        driver.stdout.close()


def run(
    directory: Path, jars: str, kills: int, rng: random.Random, rows: int = ROWS
) -> dict[str, int]:
    """Kill so many times; return the counts of kills and rows. The log is then read to its end."""
    done = Counter(driver=0, executor=0)
    total = 0
    driver = None
    try:
        while done.total() < kills:
            before = progress(directory)
            append(directory / "log", total, rows)
            total += rows
            if driver is None or driver.poll() is not None:
                driver = launch(directory, jars, "continuous")
                await_ready(driver, directory)
            await_batch(directory, before, driver)
            time.sleep(rng.uniform(0, 4))  # the point of the kill, at random within the micro-batch
            victims = executors(driver.pid)
            if done.total() % DRIVER_KILLS == 1 or not victims:
                kill_group(driver)
                done["driver"] += 1
            else:
                os.kill(rng.choice(victims), signal.SIGKILL)
                done["executor"] += 1
            print(f"kill {done.total()}: {dict(done)}, {total} rows", flush=True)
    finally:
        if driver is not None:
            kill_group(driver)
    last = launch(directory, jars, "available-now")
    try:
        if last.wait(END_S):
            raise RuntimeError(
                f"the last run failed: {(directory / 'driver.log').read_text()[-3000:]}"
            )
    finally:
        kill_group(last)
    return {**done, "rows": total}


def counts(directory: Path) -> dict[str, Counter[str]]:
    """Return how often each id is in each sink that there is, read without Spark; the Parquet files by DuckDB."""
    import duckdb

    with virta.open(directory / "out", create=False, read_only=True) as log:
        channel = Counter(json.loads(record.value)["id"] for record in log.read("copy"))
    files = duckdb.read_parquet(str(directory / "parquet" / "**" / "*.parquet"))
    parquet = Counter(row[0] for row in files.select("id").fetchall())
    found = {"channel": channel, "parquet": parquet}
    if (directory / "delta").is_dir():
        found["delta"] = ids_in(delta_files(directory / "delta"))
    if (directory / "iceberg").is_dir():
        found["iceberg"] = ids_in(iceberg_files(directory))
    return found


def ids_in(files: list[str]) -> Counter[str]:
    import pyarrow.parquet as pq

    found: Counter[str] = Counter()
    for file in files:
        found.update(pq.ParquetFile(file).read(["id"])["id"].to_pylist())
    return found


def delta_files(table: Path) -> list[str]:
    import deltalake

    return deltalake.DeltaTable(str(table)).file_uris()


def iceberg_files(directory: Path) -> list[str]:
    """Return the data files of lake.db.t by PyIceberg."""
    from pyiceberg.table import StaticTable

    metadata = directory / "iceberg" / "db" / "t" / "metadata"
    version = (metadata / "version-hint.text").read_text().strip()
    # PyIceberg does not know the type yet; the list of files does not depend on it.
    text = (metadata / f"v{version}.metadata.json").read_text().replace('"variant"', '"binary"')
    plain = directory / "plain.metadata.json"
    plain.write_text(text)
    table = StaticTable.from_metadata(str(plain))
    return [task.file.file_path.removeprefix("file:") for task in table.scan().plan_files()]


def faults(found: dict[str, Counter[str]], rows: int) -> dict[str, tuple[int, int]]:
    """Return (missing, doubled) rows of each sink."""
    return {
        name: (rows - len(counted), counted.total() - len(counted))
        for name, counted in found.items()
    }


def main() -> int:
    from maven_jars import connector_jars

    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=ROWS)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="virta-kills-") as name:
        directory = Path(name)
        jars = ",".join(connector_jars("delta", "iceberg"))
        made = run(directory, jars, given.kills, random.Random(given.seed), given.rows)
        found = faults(counts(directory), made["rows"])
    print(
        json.dumps(
            {**made, "seconds": round(time.monotonic() - began), "missing_and_doubled": found}
        )
    )
    return int(any(map(any, found.values())))


if __name__ == "__main__":
    sys.exit(main())
