"""`virta journal`: every command does what it says, for people and as JSON."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from virta.cli.journal import journal
from virta.journal import Client
from virta.journal.clients.spool import REJECTED, scan

VIRTA = Path(sys.executable).with_name("virta")


def test_values(shell):
    """Set, get, add, not, truncate, rename, link, ls and delete."""
    assert shell("set", "color", "blue") == "ok"
    assert shell("get", "color") == "blue"
    assert shell.json("get", "color") == [{"key": "color", "type": "string", "value": "blue"}]
    assert "no such key" in shell("get", "none", code=3)
    shell("set", "n", "40", "--type", "integer")
    assert shell("add", "n", "2") == "42"
    assert shell("add", "f", "1.5") == "1.5"
    assert shell.json("get", "f", "--details")[0]["bits"] == 1
    shell("set", "flag", "false", "--type", "boolean", "--memory")
    assert shell("not", "flag") == "true"
    assert shell("get", "flag") == "true"
    assert shell("ls", "flag") == "flag\ttrue"
    shell("set", "below", "-5", "--type", "integer")
    assert shell("add", "below", "-3") == "-8"
    assert "No such option" in shell("set", "k", "--memroy", code=2)
    shell("truncate", "color", "2")
    assert shell("rename", "color", "hue") == "ok"
    shell("link", "hue", "alias")
    assert shell("ls", "h") == "hue\tbl"
    assert [row["key"] for row in shell.json("ls", "--regex", "^[ah]")] == ["alias", "hue"]
    assert len(shell.json("ls", "--limit", "2")) == 2
    assert shell("get", "hue", "--details").splitlines()[-1].split() == ["state", "persist"]
    assert shell.json("get", "hue", "--details")[0]["bits"] == 1
    assert shell("delete", "hue") == "deleted"
    assert shell("delete", "hue") == "was not there"
    assert "already-exists" in shell("set", "n", "1", "--no-overwrite", code=1)
    shell("set", "in", "-", input="from stdin")
    assert shell("get", "in") == "from stdin"
    shell("set", "x", "abc", "--type", "integer", code=2)


def test_jobs(shell):
    """Push, next, done, jobs, stats, dead, kick, pause, resume, configure and cron."""
    shell("push", "http://h/1", "--payload", "p", "--priority", "3")
    shell("push", "http://h/2", "--delay", "60")
    (found,) = shell.json("next", "h")
    assert [job["uri"] for job in found["jobs"]] == ["http://h/1"]
    assert shell("done", found["jobs"][0]["key"]) == "ok"
    assert "does-not-exist" in shell("done", found["jobs"][0]["key"], code=3)
    assert "nothing due before" in shell("next", "h", code=3)
    assert shell("kick", "h") == "kicked 1"
    assert shell("pause", "h") == "paused"
    shell("next", "h", code=3)
    assert "(paused)" in shell("stats")
    shell("resume", "h")
    shell("configure", "h", "--max-attempts", "1", "--deadline", "0.001", "--mode", "throttle")
    _key, uri = shell("next", "h").split("\t")
    assert uri == "http://h/2"
    while not (rows := shell.json("jobs", "h", "--state", "dead")):
        pass
    assert rows[0]["reason"] == "the work deadline passed"
    assert "http://h/2" in shell("dead")
    assert shell("dead", "--requeue") == "requeued 1"
    assert "no dead jobs" in shell("dead", code=3)
    assert shell.json("stats", "h")[0]["domains"][0]["ready"] == 1
    assert shell("next", "h", "--remove", "--count", "5")
    shell("cron", "tick", "*/5 * * * *", "http://h/tick", "--payload", "x")
    assert shell("cron", "tick").splitlines()[0].split(maxsplit=1) == ["schedule", "*/5 * * * *"]
    assert shell("cron", "tick", "--remove") == "ok"
    assert shell("cron", "tick", "--remove") == "was not there"
    shell("cron", "tick", code=3)
    assert "bad-settings" in shell("cron", "bad", "* *", "http://h/", code=1)
    assert "needs a URI" in shell("cron", "half", "* * * * *", code=2)


def test_every_command_speaks_json(shell):
    """One JSON object per line from each command, also when nothing is found."""
    lines = {
        words[0]: shell.json(*words, code=code)
        for code, *words in (
            (0, "set", "k", "v"),
            (0, "get", "k"),
            (3, "get", "nothing"),
            (0, "add", "n", "2"),
            (0, "set", "b", "true", "--type", "boolean"),
            (0, "not", "b"),
            (0, "truncate", "k", "0"),
            (0, "link", "k", "k2"),
            (0, "unlink", "k2"),
            (0, "rename", "k", "k3"),
            (0, "ls", "k"),
            (0, "delete", "k3"),
            (0, "push", "http://h/1"),
            (0, "jobs"),
            (0, "kick", "h"),
            (0, "pause", "h"),
            (0, "resume", "h"),
            (0, "configure", "h", "--retry-delay", "1"),
            (0, "stats"),
            (0, "cron", "c", "@every 1h", "http://h/c", "--catch-up", "once"),
            (0, "next", "h"),
        )
    }

    assert all(rows and all(isinstance(row, dict) for row in rows) for rows in lines.values())
    assert lines["cron"][0]["catch_up"] == "once"
    assert lines["configure"][0]["retry_delay"] == 1.0
    key = lines["next"][0]["jobs"][0]["key"]
    assert shell.json("done", key) == [{"key": key, "done": True}]
    assert shell.json("ls", "none") == shell.json("jobs", "none") == []
    assert shell("dead", "--json", code=3) == ""  # a line per job


def test_lock(shell):
    """A command runs while the key is locked, and its exit code is passed on."""
    shell("set", "k", "v")
    script = (
        "import sys; from virta.journal import Client; from virta.errors import JournalError\n"
        "try: Client(port=int(sys.argv[1])).set('k', 'x')\n"
        "except JournalError as e: sys.exit(7 if e.code == 'locked' else 1)"
    )
    shell("lock", "k", "--", sys.executable, "-W", "ignore", "-c", script, str(shell.port), code=7)
    assert "not-owner" in shell("unlock", "k", code=1)
    assert shell.json("lock", "k", "--", "sh", "-c", "exit 4", code=4) == [{"key": "k", "code": 4}]
    assert "does-not-exist: 'none'" in shell("lock", "none", "true", code=3)
    assert "No such file" in shell("lock", "k", "no-such-command", code=127)
    shell("lock", "k", "--", "sh", "-c", "kill -9 $$", code=137)
    shell("set", "k", "not locked any more")


def test_a_lock_outlives_sigterm(shell):
    """SIGTERM is passed on to the command, and the key is locked until that has ended."""
    shell("set", "k", "v")
    slow = "trap 'read line; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
    command = [VIRTA, "journal", "lock", "--port", str(shell.port), "k", "--", "sh", "-c", slow]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as locking:
        assert locking.stdout.readline() == b"ready\n"
        locking.send_signal(signal.SIGTERM)
        assert "locked" in shell("set", "k", "x", code=1)
        locking.stdin.write(b"go on\n")
        locking.stdin.flush()
        assert locking.wait(20) == 5
    shell("set", "k", "x")


def test_json_loses_nothing(shell):
    """Bytes, text that is none and numbers that JSON does not know are distinct and can be read back."""

    def get(key):
        (row,) = shell.json("get", key)
        return row["type"], row["value"]

    shell("set", "raw", input=b"a\xff")
    shell("set", "text", input=b"plain")
    shell("set", "odd", "--type", "string", input=b"\xfe")
    shell("set", "n", "--type", "integer", input=b" 7\n")
    shell("set", "f", "--type", "float", "inf")
    shell("set", "\udcff", "key of one byte")
    with Client(port=shell.port) as client:
        client.push(b"http://h\xff/1", payload=b"\0\xff")
    (found,) = shell.json("next", "--count", "9")

    assert get("raw") == ("buffer", {"base64": "Yf8="})
    assert get("text") == ("buffer", "plain")
    assert get("odd") == ("string", {"base64": "/g=="})
    assert get("n") == ("integer", 7)
    assert get("f") == ("float", "inf")
    assert shell.json("ls", "--regex", "^.$")[-1]["key"] == {"base64": "/w=="}
    assert found["jobs"][0]["payload"] == {"base64": "AP8="}
    assert found["jobs"][0]["uri"] == {"base64": "aHR0cDovL2j/LzE="}


def test_what_becomes_of_jobs(shell):
    """A job taken by hand is extended, given back and failed; `next --wait` waits for one."""
    shell("configure", "h", "--max-attempts", "2")
    shell("push", "http://h/1", "--delay", "0.3")
    key = shell("next", "h", "--work-for", "600", "--wait", "20").split("\t")[0]
    assert shell.json("extend", key, "--seconds", "3600") == [{"key": key, "extended": True}]
    assert shell("next", "h", "--wait", "0.01", code=3).startswith("nothing due before")
    assert shell("give-back", key) == "ok"
    for _ in range(2):
        key = shell("next", "h").split("\t")[0]
        assert shell("fail", key, "--reason", "line\nend", "--delay", "0") == "ok"
    assert "that attempt is over" in shell("fail", key, code=3)
    assert shell("dead").endswith("http://h/1 attempts=2 line\\nend")
    shell("set", "a\tb", "x\x1b[0my\n")
    assert shell("ls", "a") == "a\\tb\tx\\x1b[0my\\n"


def test_done_is_for_jobs(shell):
    """A key that `next` did not print is left alone, and the other keys are acknowledged all the same."""
    shell("set", "color", "blue")
    shell("push", "http://h/1")
    key = shell("next", "h").split("\t")[0]

    said = shell("done", "color", key, key, code=3)
    assert "'color': `next` prints no such key" in said
    assert "ok" in said.splitlines()
    assert "that attempt is over" in said
    assert shell("get", "color") == "blue"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("not", "none"), 3, "does-not-exist: 'none'"),
        (("rename", "none", "x"), 3, "does-not-exist: 'none' 'x'"),
        (("kick", "--uri", "http://none/"), 3, "does-not-exist: 'http://none/'"),
        (("dead", "--uri", "http://none/"), 3, "no dead jobs"),
        (("add", "n", "inch"), 2, "'inch' is neither an integer nor a float"),
        (("truncate", "k", "-1"), 2, "-1 is not in the range"),
        (("next", "--count", "0"), 2, "0 is not in the range"),
        (("next", "--work-for", "0"), 2, "0.0 is not in the range"),
        (("push", "http://h/", "--delay", "-1"), 2, "-1.0 is not in the range"),
        (("ls", "--limit", "-1"), 2, "-1 is not in the range"),
        (("get", "k", "--port", "65536"), 2, "65536 is not in the range"),
        (("kick", "\udcff"), 1, "is not UTF-8"),
        (("push", "nowhere"), 1, "bad-uri: 'nowhere' has no host"),
    ],
)
def test_errors_say_what_it_was_about(shell, words, code, said):
    """What was wrong, the value, and what would be right; 3 where there is nothing."""
    assert said in shell(*words, code=code)


def test_asking_changes_nothing(shell):
    """Showing the settings of a domain does not make any."""
    assert shell("configure", "h").splitlines()[0].split() == ["paused", "false"]
    assert shell("ls", "virta:") == ""


def test_enough_is_enough(shell):
    """A reader that goes away after the first line is no error to speak of."""
    with Client(port=shell.port) as client:
        for number in range(2_000):
            client.set(f"k{number}", "v" * 100, persist=False)
    command = f"{VIRTA} journal ls --limit 2000 --port {shell.port} | head -1"
    out = subprocess.run(["sh", "-c", command], capture_output=True, check=True)

    assert (out.stdout[:3], out.stderr) == (b"k0\t", b"")


def test_spool_and_forward(shell, tmp_path):
    """What is spooled arrives with `forward --once`."""
    spool = str(tmp_path / "spool")
    assert shell("set", "late", "v", "--spool", spool) == "spooled"
    shell("push", "http://h/1", "--spool", spool)
    shell("delete", "other", "--spool", spool)
    assert shell("forward", spool, "--once") == "forwarded 3, rejected 0"
    assert shell("get", "late") == "v"
    (spooled,) = shell.json("set", "virta:none", "v", "--spool", spool)
    assert spooled == {"key": "virta:none", "timestamp": None}
    shell("set", "later", "v", "--spool", spool)
    assert shell("forward", spool, "--once").endswith("forwarded 1, rejected 1")
    assert shell("get", "later") == "v"
    (kept,) = scan((tmp_path / "spool" / REJECTED).read_bytes())
    assert b"virta:none" in kept.message


def test_forward_says_that_it_waits(tmp_path):
    """Without a daemon it says so once, and keeps everything; a signal ends it with its figures."""
    spool = tmp_path / "spool"
    CliRunner().invoke(journal, ["push", "http://h/1", "--spool", str(spool)])
    with start("forward", str(spool), "--port", "1", "--once") as process:
        waits = process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        out, rest = process.communicate(timeout=20)

    assert "journal_forwarder_waits" in waits
    assert (process.returncode, out, rest) == (0, "forwarded 0, rejected 0\n", "")


def test_work_without_work():
    """A worker that cannot reach a daemon keeps trying; when stopped it ends well, also without work."""
    with start("work", "--port", "1", "--exec", "true") as worker:
        assert "worker_waits" in worker.stderr.readline()
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=20)

    assert worker.returncode == 0


def test_out_of_reach():
    """Without a daemon the error says so, with exit code 1."""
    result = CliRunner().invoke(journal, ["get", "k", "--port", "1"])

    assert result.exit_code == 1
    assert "virta journal serve" in result.output


def start(*words):
    return subprocess.Popen(
        [VIRTA, "journal", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_serve_and_work(tmp_path):
    """The real processes: a daemon that keeps its data over SIGTERM, and a worker that runs commands."""
    out = tmp_path / "out"
    for round_ in range(2):
        with start("serve", "--port", "0", "--data-dir", str(tmp_path)) as daemon:
            port = daemon.stdout.readline().rpartition(":")[2].strip()
            with Client(port=int(port)) as client:
                if round_ == 0:
                    client.set("kept", "yes")
                client.push(f"http://h/{round_}", payload="hello")
                client.push("http://h/bad")
                client.admin("configure", domain="h", settings={"max_attempts": 1})
                command = f'echo "$(cat) $VIRTA_JOB_URI" >> {out}; case $VIRTA_JOB_URI in *bad) echo why >&2; exit 3;; esac'
                with start("work", "--port", port, "--exec", command) as worker:
                    while (
                        len(client.admin("list")["jobs"]) > 1
                        or not client.admin("list", state="dead")["jobs"]
                    ):
                        pass
                    worker.send_signal(signal.SIGTERM)
                    worker.communicate(timeout=20)
                    assert worker.returncode == 0
                (dead,) = client.admin("list", state="dead")["jobs"]
                assert dead["reason"] == "exit code 3: why"
                assert client.get("kept") == "yes"
            daemon.send_signal(signal.SIGTERM)
            _, errors = daemon.communicate(timeout=20)
            assert (daemon.returncode, errors) == (0, "")
    assert sorted(line for line in out.read_text().splitlines() if "hello" in line) == [
        "hello http://h/0",
        "hello http://h/1",
    ]


def test_serve_says_what_is_wrong(tmp_path):
    """A taken port, a journal in use and damaged files end the daemon with one line, not a trace."""

    def fails(*words):
        with start("serve", "--data-dir", str(tmp_path), *words) as process:
            _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
        return errors

    with start("serve", "--port", "0", "--data-dir", str(tmp_path)) as daemon:
        port = daemon.stdout.readline().rpartition(":")[2].strip()
        assert "in use" in fails("--port", "0")
        with start("serve", "--port", port, "--data-dir", str(tmp_path / "other")) as second:
            assert "address already in use" in second.communicate(timeout=20)[1]
        assert second.returncode == 1
        with Client(port=int(port)) as client:
            for i in range(20):
                client.set(f"k{i}", "v" * 100)
        daemon.kill()
        daemon.communicate(timeout=20)
    assert "needs a --peer" in fails("--copies", "2")
    assert "--name" in fails("--peer", "b=127.0.0.1:1")
    assert "'../b'" in fails("--name", "a", "--peer", "../b=127.0.0.1:1")
    assert "name=host:port" in fails("--name", "a", "--peer", "b")
    (segment,) = (tmp_path / "journal").glob("*.log/*.puro")
    raw = bytearray(segment.read_bytes())
    raw[600] ^= 1
    segment.write_bytes(raw)
    assert "corrupt" in fails("--port", "0")


def test_help_is_quick():
    """`virta journal --help` does not load the daemon."""
    code = (
        "import sys; from virta.cli.journal import journal; "
        "print([m for m in ('virta.journal.engine', 'virta.log') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )

    assert out.stdout.strip() == "[]"
