"""A real Kafka broker of one node (KRaft) from Maven Central's jars, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from contextlib import contextmanager
from pathlib import Path

from maven_jars import BROKER_JARS, jars

START_S = 120
SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs={data}
num.partitions=2
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
"""


def free_ports(count: int) -> list[int]:
    """Return ports that the kernel chose; the broker takes them right after."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@contextmanager
def broker(directory: Path):
    """Yield the address of a running broker; it ends, by its process, with the block."""
    from virta.spark.launch.java import ensure_java

    java = str(Path(ensure_java()) / "bin" / "java")
    classes = ":".join(jars(BROKER_JARS))
    port, controller = free_ports(2)
    settings = directory / "server.properties"
    settings.write_text(
        SETTINGS.format(port=port, controller=controller, data=directory / "kafka-data")
    )
    # Not the sign of an option at the beginning.
    cluster = urlsafe_b64encode(b"\0" + uuid.uuid4().bytes[1:]).decode().rstrip("=")
    subprocess.run(
        [java, "-cp", classes, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)],
        check=True, capture_output=True, timeout=START_S,
    )  # fmt: skip
    with (directory / "broker.log").open("wb") as output:
        process = subprocess.Popen(
            [java, "-Xmx384m", "-XX:+UseSerialGC", "-cp", classes, "kafka.Kafka", str(settings)],
            stdout=output,
            stderr=output,
            env=os.environ,
        )
        try:
            await_port(process, port, directory)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def await_port(process: subprocess.Popen[bytes], port: int, directory: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"no broker: {(directory / 'broker.log').read_text()[-2000:]}")
