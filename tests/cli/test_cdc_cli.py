"""`virta cdc` as a command."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys

import pytest

import virta

DEADLINE_S = 30


@pytest.fixture
def shop(tmp_path):
    path = tmp_path / "shop.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, status TEXT)")
    db.execute("INSERT INTO orders VALUES (1, 'new')")
    db.commit()
    yield path, db, tmp_path / "data"
    db.close()


def command(path, *arguments):
    return [sys.executable, "-m", "virta", "cdc", "sqlite", str(path), *map(str, arguments)]


def run(path, *arguments):
    return subprocess.run(
        command(path, *arguments), capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )


def test_once_and_status_and_drop(shop):
    """--once captures what is there; status tells; drop removes."""
    path, db, data = shop
    assert json.loads(run(path, "status", "--data-dir", data, "--json").stdout)["tables"] == {}
    done = run(path, "--once", "--data-dir", data, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"records": 2})
    status = json.loads(run(path, "status", "--data-dir", data, "--json").stdout)
    assert status["tables"] == {"orders": "captured"}
    assert "orders: captured" in run(path, "status", "--data-dir", data).stdout
    assert run(path, "drop", "--data-dir", data).returncode == 0
    assert db.execute("SELECT count(*) FROM sqlite_schema WHERE name LIKE 'virta%'").fetchone() == (
        0,
    )


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, None])
def test_it_follows_until_it_is_stopped(shop, how):
    """A change arrives while it runs; a signal or the end of its input stops it cleanly."""
    path, db, data = shop
    process = subprocess.Popen(
        command(path, "--data-dir", data, "--name", "s2", "--until-eof"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        with virta.log.open(data / "log", wait=DEADLINE_S) as log:
            reader = log.read("s2.main.orders", follow=True, timeout=DEADLINE_S)
            assert json.loads(next(reader).value)["data"]["op"] == "r"
            db.execute("UPDATE orders SET status = 'paid'")
            db.commit()
            assert json.loads(next(reader).value)["data"]["after"]["status"] == "paid"
            reader.close()
        if how is None:
            process.stdin.close()
        else:
            process.send_signal(how)
        assert process.wait(DEADLINE_S) == 0
        assert process.stdout.read() == b"3 records\n"
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("none.db", "--once"), "there is no database file none.db"),
        (("shop.db", "--once", "--name", "a/b"), "--name is 'a/b'"),
    ],
)
def test_mistakes_are_sentences(shop, arguments, words):
    """Exit code 5 and one line."""
    path, _, data = shop
    done = run(path.parent / arguments[0] if arguments[0] == "shop.db" else arguments[0], *arguments[1:], "--data-dir", data)  # fmt: skip

    assert done.returncode == 5
    assert words in done.stderr
