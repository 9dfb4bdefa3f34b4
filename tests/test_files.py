"""Files that Virta creates belong to their user alone, whatever the umask, unless a directory is shared."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import sys
import time
from array import array
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import virta
from virta import errors, files
from virta.filters import parse
from virta.journal.clients.forwarder import _ping_socket
from virta.journal.clients.spool import Spool
from virta.journal.protocol import commands
from virta.journal.protocol.messages import Type, Value
from virta.journal.serving.embedded import Journal
from virta.match.image import Programs, shared_matcher

sys.path.insert(0, str(Path(__file__).parent / "server"))
from server_harness import Server, event

SRC = Path(__file__).parent.parent / "src" / "virta"
UMASKS = [0o000, 0o022, 0o077]


@contextmanager
def umask(mask):
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@pytest.fixture(params=UMASKS, ids=oct)
def under(request, tmp_path):
    """A directory to work in, under each umask."""
    tmp_path.chmod(0o755)
    with umask(request.param):
        yield tmp_path


def modes(root):
    """Every path below `root` with its mode."""
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}
    return {path: mode for path, mode in found.items() if not path.is_symlink()}


def check_private(root, at_least):
    """All below `root` is for its owner alone, and there are at least these names."""
    found = modes(root)
    names = {path.name for path in found}
    wrong = {
        str(path.relative_to(root)): oct(mode)
        for path, mode in found.items()
        if mode != (0o700 if path.is_dir() else 0o600)
    }
    assert wrong == {}
    assert set(at_least) <= names


def use_log(path, **options):
    """Make a log do everything that makes files."""
    with virta.open(path, segment_bytes=4096, **options) as log:
        for number in range(12):
            log.append("t", f"k{number % 2}", bytes(1000))
        pin = log.pin(3)
        with log.consumer("reader") as consumer:
            next(iter(consumer.read()))
            consumer.commit()
        kept = modes(path)
        pin.close()
        log.compact()
        log.retain(max_bytes=6000)
    segment = max(path.glob("*.puro"))
    with segment.open("r+b") as file:  # a torn batch: recovery keeps what it cuts off
        file.seek(0, os.SEEK_END)
        file.write(b"\x36\x01torn" * 20)
    with virta.open(path) as log:
        log.append("t", "k", b"after")
    return kept


def test_a_log_is_private(under):
    """Segments, indexes, locks, the control page, positions, pins, quarantine and the directories of a new log."""
    kept = use_log(under / "deep" / "log")

    names = {"META", "control", "writer.lock", "sync.lock", "maint.lock", "groups", "quarantine"}
    check_private(under, {"deep", "log", "reader.grp", "reader.lock", "pins"} | names)
    assert {mode for path, mode in kept.items() if path.parent.name == "pins"} == {0o600}
    assert {path.suffix for path in modes(under)} >= {".puro", ".pidx", ".bin", ".json"}


def test_an_export_is_private(under):
    """A file that `virta log export` makes holds the log's data."""
    with virta.open(under / "log") as log:
        log.append("t", "k", b"v")
    arguments = ["log", "export", str(under / "log"), str(under / "out.puro")]
    done = subprocess.run(
        [sys.executable, "-m", "virta", *arguments], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    check_private(under, {"out.puro"})


def test_a_journal_is_private(under):
    """Logs, snapshots, leases, lock, spool and the forwarder's socket."""
    with Journal(under / "journal") as journal:
        journal.set("color", "blue")
        journal.push("http://example.com/page")
        journal.next("http://example.com")
    with Journal(under / "journal") as journal:
        journal.set("color", "red")
        with Spool(under / "spool") as spool:
            spool.put(commands.set_(b"k", Value(Type.STRING, b"v")).request)
        ping = _ping_socket(under / "spool")
        check_private(under, {"lock", "leases", "spool"})
        assert {path.suffix for path in modes(under)} >= {".snap", ".log", ".fjs"}
    ping.close()


def test_a_server_is_private(under):
    """Everything in the data directory: log, registry with filters and subscriptions, journal, lock."""
    with Server(under / "data", environ={}) as server:
        server.publish("orders", event("1"))
        body = json.dumps({"filter": {"equals": {"a": 1}}})
        server.request("POST", "/filters/i/c", body, {"Content-Type": "application/json"})

    check_private(under, {"data", "serve.lock", "registry", "journal", "log", "META"})


@pytest.mark.skipif(
    virta.match.Matcher().engine == "plain", reason="images are of the native matcher"
)
def test_images_of_filters_are_private(under):
    """The image of an index that processes share, and its lock."""
    files.make_directory(under / "images")
    nothing = Programs(digests=b"", ends=array("q", [0]), programs=b"", opaques={})
    shared_matcher(under / "images" / "set", lambda: nothing)

    check_private(under, {"images.lock"})
    assert any(path.suffix == ".index" for path in modes(under))


def test_pipelines_are_private(under, monkeypatch):
    """Status, locks and logs of pipelines, filter sets, staged rows, reports of damage, the Java shim, a lake."""
    pytest.importorskip("pyspark")
    import pyarrow as pa

    from virta.log.format.damage import Problem
    from virta.server.pipeline_supervisor import OutputFile
    from virta.spark.lake.directory import only_writer
    from virta.spark.launch import java
    from virta.spark.matching import filter_set
    from virta.spark.pipeline import status
    from virta.spark.pipeline.model import Pipeline
    from virta.spark.source import decode, sink

    monkeypatch.setattr(filter_set, "gettempdir", lambda: str(under))
    pipeline = Pipeline.__new__(Pipeline)
    monkeypatch.setattr(Pipeline, "checkpoint_path", lambda self: str(under / "a" / "checkpoint"))
    with status.claimed(pipeline), only_writer(under / "lake"):
        status.write_status(pipeline, {"state": "running"})
    filter_set.write_set({"f": parse("a=1")})
    problem = Problem("00000000000000000000.puro", 0, 1, 0, None, "zero")
    decode.report(decode.ScanSpec("log", problems=str(under / "problems")), problem)
    OutputFile(under / "logs" / "p.log")._write(b"line\n")
    monkeypatch.setattr(sink, "MESSAGE_BYTES_MAX", 0)
    rows = pa.record_batch({"topic": ["t"], "key": [b""], "value": [b"v"]})
    with virta.open(under / "log") as log:
        sink.stage(SimpleNamespace(path=str(log.path), stream=log.id), [rows])
    check_private(under, {"checkpoint", "lake", "problems", "p.log", sink.STAGING})

    java.write_shim(under / "java" / "bin" / "java", "#!/bin/sh\n")
    assert stat.S_IMODE((under / "java" / "bin" / "java").stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["mode", "chmod"])
@pytest.mark.parametrize("mask", UMASKS, ids=oct)
def test_a_log_shared_with_a_group(tmp_path, mask, how):
    """With mode=0o770, or in a directory of mode 2770, every file is for the group as well, for every process."""
    path = tmp_path / "log"
    with umask(mask):
        if how == "chmod":
            path.mkdir()
            path.chmod(0o2770)
            use_log(path)
        else:
            use_log(path, mode=0o770)

    assert stat.S_IMODE(path.stat().st_mode) == 0o2770
    found = modes(path)
    assert {mode for at, mode in found.items() if at.is_dir()} == {0o2770}
    assert {mode for at, mode in found.items() if not at.is_dir()} == {0o660}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_two_users_share_a_log(tmp_path):
    """Two users of one group append to and read one log; a third, outside it, can do neither."""
    for parent in [tmp_path, *tmp_path.parents][:-2]:
        parent.chmod(0o755)
    path = tmp_path / "log"
    path.mkdir()
    os.chown(path, 64001, 64100)
    path.chmod(0o2770)
    code = (
        "import os, sys, virta.log\n"  # all of it: other users may not get at this Python
        "os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[1])); os.umask(0o077)\n"
        "with virta.open(sys.argv[3]) as log:\n"
        "    log.append('t', '', sys.argv[1].encode())\n"
        "    print(*[bytes(r.value).decode() for r in log.read()])\n"
    )

    def run(user, group):
        command = [sys.executable, "-c", code, str(user), str(group), str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run(64001, 64100).stdout == "64001\n"
    assert run(64002, 64100).stdout == "64001 64002\n"
    assert run(64001, 64100).stdout == "64001 64002 64001\n"
    assert "Permission denied; its owner can share it" in run(64003, 64003).stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")
def test_a_group_that_only_reads(tmp_path):
    """With mode 0o750 the group reads records, topics and consumers, and cannot keep the writers out."""
    for parent in [tmp_path, *tmp_path.parents][:-2]:
        parent.chmod(0o755)
    path = tmp_path / "log"
    code = (
        "import fcntl, os, sys, virta.log\n"  # all of it: other users may not get at this Python
        "os.setgroups([]); os.setgid(64100); os.setuid(64002)\n"
        "with virta.open(sys.argv[1], create=False, read_only=True) as log:\n"
        "    (info,) = log.consumers()\n"
        "    print(*[r.offset for r in log.read()], log.topics()[0].records, info.members, info.lag)\n"
        "    print(*[r.offset for r in log.read(start='consumer:reader')])\n"
        "for name in ('writer.lock', 'sync.lock', 'maint.lock'):\n"
        "    try:\n"
        "        fcntl.flock(os.open(sys.argv[1] + '/' + name, os.O_RDONLY), fcntl.LOCK_EX)\n"
        "    except PermissionError:\n"
        "        print('refused')\n"
    )
    with virta.open(path, mode=0o750) as log, log.consumer("reader") as consumer:
        for _ in range(3):
            log.append("t", "", b"v")
        next(iter(consumer.read()))
        consumer.commit()
        log.retain(max_bytes=1 << 30)
        subprocess.run(["chgrp", "-R", "64100", str(path)], check=True)
        command = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.stdout.splitlines() == ["0 1 2 3 1 2", "1 2", *["refused"] * 3], done.stderr


def test_a_spool_shared_with_a_group(tmp_path):
    """In a directory of mode 2770 every file is for the group, or only one user could spool commands."""
    path = tmp_path / "spool"
    path.mkdir()
    path.chmod(0o2770)
    with umask(0o077), Spool(path) as spool:
        spool.put(commands.set_(b"k", Value(Type.STRING, b"v")).request)

    assert set(modes(path).values()) == {0o660}
    assert {at.name for at in modes(path)} >= {"stamp"}


def test_a_server_shared_with_a_group(tmp_path):
    """`--data-mode 0750` lets the group read all of the data directory."""
    with umask(0o077), Server(tmp_path / "data", "--data-mode", "0750") as server:
        server.publish("orders", event("1"))

    log = modes(tmp_path / "data" / "log")
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o2750
    assert {mode for path, mode in log.items() if path.suffix == ".lock"} == {0o600}
    assert {mode for path, mode in log.items() if path.is_file() and path.suffix != ".lock"} == {
        0o640
    }
    assert stat.S_IMODE((tmp_path / "data" / "serve.lock").stat().st_mode) == 0o600


def test_what_exists_keeps_its_mode(tmp_path):
    """A directory or a file that is there already is not changed, and a server warns of an open directory."""
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o755)
    (data / "serve.lock").touch()
    (data / "serve.lock").chmod(0o640)
    with Server(data) as server:
        pass

    assert stat.S_IMODE(data.stat().st_mode) == 0o755
    assert stat.S_IMODE((data / "serve.lock").stat().st_mode) == 0o640
    assert any("data_directory_open" in line and "chmod" in line for line in server.said)
    check_private(data / "log", {"META"})


def test_the_doctor_looks_at_a_data_directory(tmp_path):
    """`virta doctor --data-dir` says when other users can read it."""
    (tmp_path / "data").mkdir()
    command = [
        sys.executable,
        "-m",
        "virta",
        "doctor",
        "--json",
        "--data-dir",
        str(tmp_path / "data"),
    ]
    (tmp_path / "data").chmod(0o755)
    findings = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=False).stdout
    )

    (found,) = [finding for finding in findings if finding["check"] == "data directory"]
    assert (found["state"], "0755" in found["detail"]) == ("warning", True)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o1777, 0o4700, 0o070, -1, True, "0770"])
def test_modes_that_are_no_directory_mode(tmp_path, mode):
    """A mode without all rights for the owner, or with read but no entry for others, is refused."""
    with pytest.raises(errors.LogLimitError, match="mode is"):
        virta.open(tmp_path / "log", mode=mode)
    assert not (tmp_path / "log").exists()


def test_a_file_that_cannot_be_made(tmp_path):
    """A link that leads nowhere is not followed to make a file elsewhere."""
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(FileExistsError):
        files.open_file(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    assert not (tmp_path / "elsewhere").exists()


MAKERS = {"mkdir", "makedirs", "write_text", "write_bytes", "touch", "mkstemp", "mkdtemp", "mkfifo"}


def makes_files(call):
    """Return whether a call makes a file or a directory by itself, past `virta.files`."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name in MAKERS and getattr(getattr(call.func, "value", None), "id", "") != "files":
        return not (name == "touch" and len(call.args) != 0)
    words = " ".join(ast.unparse(argument) for argument in call.args)
    through = any(keyword.arg == "opener" for keyword in call.keywords)
    if name == "open" and ast.unparse(call.func) == "os.open":
        return "O_CREAT" in words
    texts = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    written = any(
        isinstance(text, str) and set(text) & set("wax") for text in texts if len(str(text)) <= 3
    )
    return name == "open" and written and not through


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_files_are_made_in_one_place(path):
    """Only `virta/files.py` makes files and directories: there the mode is decided."""
    if path.name == "files.py":
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [f"{path}:{call.lineno}" for call in calls if makes_files(call)] == []


# Durable writes and locks.


def test_write_all_continues_after_a_short_write(tmp_path, monkeypatch):
    """`pwrite` may write less than it is given; `write_all` writes the rest."""
    path = tmp_path / "f"
    fd = files.open_file(path, os.O_RDWR | os.O_CREAT)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, pos: whole(fd, bytes(data)[:3], pos))
    try:
        for data in (b"0123456789", bytearray(b"abcdefg"), b""):
            files.write_all(fd, data, 5)
            assert path.read_bytes()[5 : 5 + len(data)] == data
    finally:
        os.close(fd)


def test_write_whole_replaces_a_file(tmp_path):
    """The new content replaces the old, with the mode of the rule, and nothing else stays behind."""
    path = tmp_path / "f"
    with umask(0o000):
        for data in (b"old", b"new and longer", b""):
            files.write_whole(path, data)
            assert path.read_bytes() == data

    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_write_whole_that_fails_keeps_the_old_content(tmp_path, monkeypatch):
    """A failed fsync leaves the old file, and no temporary one."""
    path = tmp_path / "f"
    files.write_whole(path, b"old")

    def fail(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        files.write_whole(path, b"new")

    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_a_directory_is_synced(tmp_path, monkeypatch):
    """`sync_directory` syncs the directory itself; a missing one is an error."""
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    files.sync_directory(tmp_path)

    assert synced == [str(tmp_path)]
    with pytest.raises(FileNotFoundError):
        files.sync_directory(tmp_path / "absent")


HOLDER = """
import sys
import time
from virta import files
fd = files.lock_file(sys.argv[1])
print("locked", flush=True)
sys.stdin.read(1)
"""


@contextmanager
def locked_elsewhere(path):
    """Another process that has locked a file."""
    arguments = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        yield holder
        holder.kill()


def test_a_lock_excludes_other_processes(tmp_path):
    """While another process has it, locking fails; when that process dies, it succeeds."""
    path = tmp_path / "lock"
    with locked_elsewhere(path) as holder:
        with pytest.raises(BlockingIOError):
            files.lock_file(path)
        holder.kill()
        holder.wait()
        files.unlock_file(files.lock_file(path))


def test_a_lock_that_is_waited_for(tmp_path):
    """With `wait` the lock is obtained when the other process ends."""
    path = tmp_path / "lock"
    with locked_elsewhere(path) as holder:
        holder.stdin.write(b"x")
        holder.stdin.close()
        files.unlock_file(files.lock_file(path, wait=True))


def test_an_unlocked_file_can_be_locked_though_a_child_has_it_open(tmp_path):
    """Unlocking releases the lock, not only this process's descriptor."""
    path = tmp_path / "lock"
    fd = files.lock_file(path)
    copy = os.dup(fd)  # as a forked child would have it
    try:
        files.unlock_file(fd)
        files.unlock_file(files.lock_file(path))
    finally:
        os.close(copy)


def test_locking_until_a_deadline(tmp_path):
    """False at the deadline if another process still has the lock, else True."""
    path = tmp_path / "lock"
    with locked_elsewhere(path) as holder:
        fd = files.open_lock(path)
        assert not files.lock_until(fd, 0.0)
        holder.kill()
        holder.wait()
        assert files.lock_until(fd, time.monotonic() + 30)
        files.unlock_file(fd)
