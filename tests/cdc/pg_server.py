"""A PostgreSQL of the tests' own on 127.0.0.1; it refuses to run as root, so then it runs as `postgres`."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg2

DEADLINE_S = 60


def binaries():
    """Return the directory of initdb and postgres, None where there is none; VIRTA_PG_BIN names another version's."""
    if given := os.environ.get("VIRTA_PG_BIN"):
        return Path(given)
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: p.parts[4])
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).parent if on_path else None


class PgServer:
    """Start, kill and stop one server."""

    def __init__(self, **settings):
        self.bin = binaries()
        # Not in pytest's folders: those are private to root, and every run of pytest makes them so again.
        self.folder = Path(tempfile.mkdtemp(prefix="virta-pg-"))
        self.data = self.folder / "pg"
        self.user = pwd.getpwnam("postgres") if os.getuid() == 0 else None
        self.data.mkdir(mode=0o700)
        if self.user is not None:
            self.folder.chmod(0o711)
            os.chown(self.data, self.user.pw_uid, self.user.pw_gid)
        self._run("initdb", "-D", self.data, "-U", "virta", "-A", "trust", "-E", "UTF8", "--no-sync", "--locale=C")  # fmt: skip
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        given = {
            "listen_addresses": "'127.0.0.1'", "port": self.port, "unix_socket_directories": "''",
            "wal_level": "logical", "max_wal_senders": 8, "max_replication_slots": 8,
            "shared_buffers": "'16MB'", "log_min_messages": "warning", "fsync": "off",
            "checkpoint_timeout": "'30s'", "wal_sender_timeout": "'20s'", "logging_collector": "off",
        } | settings  # fmt: skip
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = {value}\n" for name, value in given.items())
        self.dsn = f"host=127.0.0.1 port={self.port} user=virta dbname=postgres"
        self.process = None
        self.start()

    def _as_user(self):
        return {"user": self.user.pw_uid, "group": self.user.pw_gid} if self.user else {}

    def _run(self, name, *arguments):
        done = subprocess.run(
            [self.bin / name, *map(str, arguments)], capture_output=True, text=True, check=False,
            cwd="/", **self._as_user(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def start(self):
        self.log = (self.data / "server.log").open("ab")
        self.process = self._begin()
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                psycopg2.connect(self.dsn).close()
            except psycopg2.OperationalError:
                assert time.monotonic() < deadline, (self.data / "server.log").read_text()
                time.sleep(0.05)
                if self.process.poll() is not None:
                    # The memory of a server that was killed may still be in use for a short time.
                    self.process = self._begin()
            else:
                return

    def _begin(self):
        return subprocess.Popen(
            [self.bin / "postgres", "-D", self.data], stdout=self.log, stderr=self.log, cwd="/",
            start_new_session=True, **self._as_user(),
        )  # fmt: skip

    def kill(self):
        """SIGKILL the whole server: its processes are one group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()
        # Its children end by themselves; a new server waits for the last of them.
        deadline = time.monotonic() + DEADLINE_S
        while self._group_lives():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def _group_lives(self):
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)  # at once: nothing is kept
            try:
                self.process.wait(DEADLINE_S)
            finally:
                if self.process.poll() is None:
                    os.killpg(self.process.pid, signal.SIGKILL)
                    self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder)

    def connect(self, dbname="postgres"):
        connection = psycopg2.connect(self.dsn.replace("dbname=postgres", f"dbname={dbname}"))
        connection.autocommit = True
        return connection

    def database(self, name):
        """Create a database and return its DSN."""
        connection = self.connect()
        with connection.cursor() as cursor:
            cursor.execute(f'CREATE DATABASE "{name}"')
        connection.close()
        return self.dsn.replace("dbname=postgres", f"dbname={name}")
