"""
Job queues to compare with, each through a client as its users have it.

A system is started in a directory of its own and gives clients; a client puts jobs, one or many at a
time, and reserves and acknowledges one. `MissingError` says why a system is left out.
"""

# ruff: noqa: PLC0415  (a client library is imported only where its system is used)
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

PAYLOAD = b"x" * 100
START_S = 20


class MissingError(Exception):
    """The system is not installed here."""


def uri(number):
    return f"http://h{number % 8}.example/job/{number:010d}"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def wait_for(port):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise MissingError("it did not start")


class System:
    """A server process; subclasses say how to start it and how to talk to it."""

    name = ""
    durability = ""
    clients_max = 16
    lasting = False  # whether an acknowledged job survives a power cut

    def __init__(self, directory):
        self.directory = Path(directory)
        self.port = free_port()
        self.process = None

    def spawn(self, *command):
        if shutil.which(command[0]) is None:
            raise MissingError(f"{command[0]} is not installed")
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.directory
        )
        wait_for(self.port)

    def stop(self):
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


class Virta(System):
    name = "virta journal"

    def __init__(self, directory, durability):
        super().__init__(directory)
        self.durability = durability
        self.lasting = durability == "fsync"

    def start(self):
        virta = Path(sys.executable).with_name("virta")
        self.spawn(
            str(virta),
            "journal",
            "serve",
            "--port",
            str(self.port),
            "--data-dir",
            str(self.directory),
            "--durability",
            self.durability,
        )

    def client(self):
        from virta.journal import Client
        from virta.journal.protocol import commands

        class Queue:
            def __init__(self, port):
                self.client = Client(port=port)

            def put(self, number):
                self.client.push(uri(number), priority=number % 256, payload=PAYLOAD)

            def put_many(self, numbers):
                batch = [commands.push(uri(n), priority=n % 256, payload=PAYLOAD) for n in numbers]
                self.client.pipeline(batch)

            def reserve_ack(self):
                jobs = self.client.next().jobs
                return bool(jobs) and self.client.done(jobs[0].key)

            def reserve_ack_many(self, count):
                jobs = self.client.next(count=count).jobs
                self.client.pipeline([commands.done(job.key) for job in jobs])
                return len(jobs)

        return Queue(self.port)


class VirtaEmbedded(System):
    """No daemon and no socket: the library in one process."""

    name = "virta journal, in process"
    clients_max = 1

    def __init__(self, directory, durability):
        super().__init__(directory)
        self.durability = durability
        self.lasting = durability == "fsync"

    def start(self):
        pass

    def client(self):
        from virta.journal.protocol import commands
        from virta.journal.serving.embedded import Journal

        class Queue:
            def __init__(self, directory, durability):
                self.journal = Journal(directory / "journal", durability=durability)
                self.close = self.journal.close

            def put(self, number):
                self.journal.push(uri(number), priority=number % 256, payload=PAYLOAD)

            def put_many(self, numbers):
                self.journal.pipeline(
                    commands.push(uri(n), priority=n % 256, payload=PAYLOAD) for n in numbers
                )

            def reserve_ack(self):
                jobs = self.journal.next().jobs
                return bool(jobs) and self.journal.done(jobs[0].key)

            def reserve_ack_many(self, count):
                jobs = self.journal.next(count=count).jobs
                self.journal.pipeline(commands.done(job.key) for job in jobs)
                return len(jobs)

        return Queue(self.directory, self.durability)


class Beanstalkd(System):
    name = "beanstalkd"

    def __init__(self, directory, flag):
        super().__init__(directory)
        self.flag = flag
        self.durability = {"-f0": "fsync 0 ms", "-f50": "fsync 50 ms", "-F": "no fsync"}[flag]
        self.lasting = flag == "-f0"

    def start(self):
        self.spawn("beanstalkd", "-l", "127.0.0.1", "-p", str(self.port), "-b", ".", self.flag)

    def client(self):
        class Queue:
            """Its text protocol on a bare socket: less overhead than any client library."""

            def __init__(self, port):
                self.socket = socket.create_connection(("127.0.0.1", port))
                self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.file = self.socket.makefile("rb")

            def command(self, number):
                body = uri(number).encode() + b" " + PAYLOAD
                return b"put %d 0 60 %d\r\n%s\r\n" % (number % 256, len(body), body)

            def put(self, number):
                self.socket.sendall(self.command(number))
                assert self.file.readline().startswith(b"INSERTED")

            def put_many(self, numbers):
                self.socket.sendall(b"".join(map(self.command, numbers)))
                for _ in numbers:
                    assert self.file.readline().startswith(b"INSERTED")

            def reserved(self):
                word, *rest = self.file.readline().split()
                if word != b"RESERVED":
                    return None
                self.file.read(int(rest[1]) + 2)
                return rest[0]

            def reserve_ack(self):
                self.socket.sendall(b"reserve-with-timeout 0\r\n")
                job = self.reserved()
                if job is None:
                    return False
                self.socket.sendall(b"delete %s\r\n" % job)
                return self.file.readline() == b"DELETED\r\n"

            def reserve_ack_many(self, count):
                self.socket.sendall(b"reserve-with-timeout 0\r\n" * count)
                jobs = [job for job in (self.reserved() for _ in range(count)) if job]
                self.socket.sendall(b"".join(b"delete %s\r\n" % job for job in jobs))
                for _ in jobs:
                    assert self.file.readline() == b"DELETED\r\n"
                return len(jobs)

        return Queue(self.port)


PUT_LUA = """
redis.call('HSET', 'payload', KEYS[1], ARGV[2])
return redis.call('ZADD', 'waiting', ARGV[1], KEYS[1])
"""
RESERVE_LUA = """
local job = redis.call('ZRANGE', 'waiting', 0, 0)[1]
if not job then return false end
redis.call('ZREM', 'waiting', job)
redis.call('ZADD', 'working', ARGV[1], job)
return {job, redis.call('HGET', 'payload', job)}
"""
ACK_LUA = """
redis.call('HDEL', 'payload', KEYS[1])
return redis.call('ZREM', 'working', KEYS[1])
"""


class Redis(System):
    name = "Redis ZSET + Lua"

    def __init__(self, directory, fsync):
        super().__init__(directory)
        self.durability = f"appendfsync {fsync}"
        self.fsync = fsync
        self.lasting = fsync == "always"

    def start(self):
        try:
            import redis  # noqa: F401
        except ImportError as error:
            raise MissingError("the redis client is not installed") from error
        self.spawn(
            "redis-server",
            "--port",
            str(self.port),
            "--appendonly",
            "yes",
            "--save",
            "",
            "--appendfsync",
            self.fsync,
            "--dir",
            str(self.directory),
        )

    def client(self):
        import redis

        class Queue:
            def __init__(self, port):
                self.redis = redis.Redis(port=port)
                self.put_script = self.redis.register_script(PUT_LUA)
                self.reserve_script = self.redis.register_script(RESERVE_LUA)
                self.ack_script = self.redis.register_script(ACK_LUA)

            def put(self, number):
                score = number % 256 * 10**12 + number
                self.put_script(keys=[uri(number)], args=[score, PAYLOAD])

            def put_many(self, numbers):
                pipe = self.redis.pipeline(transaction=False)
                for n in numbers:
                    score = n % 256 * 10**12 + n
                    self.put_script(keys=[uri(n)], args=[score, PAYLOAD], client=pipe)
                pipe.execute()

            def reserve_ack(self):
                job = self.reserve_script(args=[time.time() + 60])
                if not job:
                    return False
                return self.ack_script(keys=[job[0]])

            def reserve_ack_many(self, count):
                pipe = self.redis.pipeline(transaction=False)
                for _ in range(count):
                    self.reserve_script(args=[time.time() + 60], client=pipe)
                jobs = [job for job in pipe.execute() if job]
                for job in jobs:
                    self.ack_script(keys=[job[0]], client=pipe)
                pipe.execute()
                return len(jobs)

        return Queue(self.port)


PREPARE_SQL = """
prepare put_job (text, int, bytea) as
    insert into jobs (uri, priority, payload) values ($1, $2, $3) on conflict (uri) do update
    set priority = excluded.priority, payload = excluded.payload;
prepare reserve_jobs (int) as
    update jobs set state = 1 where id in (select id from jobs where state = 0
    order by priority, id limit $1 for update skip locked) returning id, uri, payload;
prepare ack_jobs (bigint[]) as delete from jobs where id = any($1);
"""


class Postgres(System):
    name = "PostgreSQL SKIP LOCKED"

    def __init__(self, directory, commit):
        super().__init__(directory)
        self.commit = commit
        self.durability = f"synchronous_commit {commit}"
        self.lasting = commit == "on"

    def start(self):
        try:
            import psycopg2
        except ImportError as error:
            raise MissingError("psycopg2 is not installed") from error
        if shutil.which("initdb") is None or shutil.which("postgres") is None:
            raise MissingError("initdb and postgres are not on the path")
        prefix = []
        if os.geteuid() == 0:
            # It refuses to run as root; its own user has to reach the directory.
            for path in [self.directory, *self.directory.parents][:2]:
                path.chmod(0o755)
            shutil.chown(self.directory, "postgres")
            prefix = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        data = str(self.directory / "data")
        made = subprocess.run(
            [*prefix, "initdb", "-D", data, "-U", "postgres", "-A", "trust"],
            capture_output=True,
            check=False,
            cwd=self.directory,
        )
        if made.returncode:
            raise MissingError(made.stderr.decode()[-100:].strip())
        self.spawn(
            *prefix,
            "postgres",
            "-D",
            data,
            "-p",
            str(self.port),
            "-k",
            str(self.directory),
            "-c",
            f"synchronous_commit={self.commit}",
            "-c",
            "listen_addresses=127.0.0.1",
        )
        deadline = time.monotonic() + START_S
        while True:
            try:
                connection = psycopg2.connect(self.dsn())
                break
            except psycopg2.OperationalError:
                if time.monotonic() > deadline:
                    raise
        with connection, connection.cursor() as cursor:
            cursor.execute(
                "create table jobs (id bigserial primary key, uri text unique, priority int, "
                "state int default 0, payload bytea)"
            )
            cursor.execute("create index waiting on jobs (priority, id) where state = 0")
        connection.close()

    def dsn(self):
        return f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"

    def client(self):
        import psycopg2
        from psycopg2.extras import execute_values

        class Queue:
            """Single jobs by prepared statements, many by one insert: the least work on both sides."""

            def __init__(self, dsn):
                self.connection = psycopg2.connect(dsn)
                self.connection.autocommit = True
                self.cursor = self.connection.cursor()
                self.cursor.execute(PREPARE_SQL)

            def put(self, number):
                self.cursor.execute(
                    "execute put_job (%s, %s, %s)", (uri(number), number % 256, PAYLOAD)
                )

            def put_many(self, numbers):
                rows = [(uri(n), n % 256, PAYLOAD) for n in numbers]
                execute_values(
                    self.cursor,
                    "insert into jobs (uri, priority, payload) values %s on conflict (uri) do update "
                    "set priority = excluded.priority, payload = excluded.payload",
                    rows,
                )

            def reserve_ack(self):
                return self.reserve_ack_many(1)

            def reserve_ack_many(self, count):
                self.cursor.execute("execute reserve_jobs (%s)", (count,))
                ids = [row[0] for row in self.cursor.fetchall()]
                if ids:
                    self.cursor.execute("execute ack_jobs (%s::bigint[])", (ids,))
                return len(ids)

        return Queue(self.dsn())


class Huey(System):
    name = "huey SqliteStorage (dequeue, no ack)"

    def __init__(self, directory, fsync):
        super().__init__(directory)
        self.fsync = fsync
        self.durability = f"fsync={fsync}"
        self.lasting = fsync

    def start(self):
        try:
            import huey.storage  # noqa: F401
        except ImportError as error:
            raise MissingError("huey is not installed") from error

    def client(self):
        from huey.storage import SqliteStorage

        class Queue:
            def __init__(self, directory, fsync):
                self.storage = SqliteStorage("bench", str(directory / "huey.db"), fsync=fsync)

            def put(self, number):
                self.storage.enqueue(uri(number).encode() + PAYLOAD, number % 256)

            def put_many(self, numbers):
                for number in numbers:
                    self.put(number)

            def reserve_ack(self):
                return self.storage.dequeue() is not None

            def reserve_ack_many(self, count):
                return sum(self.reserve_ack() for _ in range(count))

        return Queue(self.directory, self.fsync)


SYSTEMS = [
    (Virta, "fsync"),
    (VirtaEmbedded, "fsync"),
    (Beanstalkd, "-f0"),
    (Redis, "always"),
    (Postgres, "on"),
    (Huey, True),
    (Virta, "none"),
    (VirtaEmbedded, "none"),
    (Beanstalkd, "-f50"),
    (Beanstalkd, "-F"),
    (Redis, "everysec"),
    (Postgres, "off"),
    (Huey, False),
]
