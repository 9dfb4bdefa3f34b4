"""
Runs the server: sockets, logging, uvicorn, shutdown.

On SIGTERM or SIGINT: stop accepting, end the streams of consumers (they reconnect later), answer what was
accepted, sync and close the log; all within the drain timeout. A second SIGINT ends the wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Any, cast

import structlog
import uvicorn
import uvloop

from virta.errors import ConfigError
from virta.log_lines import log_stream
from virta.malloc import return_freed_memory
from virta.server.access.auth import check_exposure, requires_credentials
from virta.server.api.app import build_app
from virta.server.http.server import HttpServer
from virta.server.log_fields import spread_fields
from virta.server.operating.activation import passed_socket
from virta.server.service import Service, read_credentials

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from virta.server.config_loader import Config

BACKLOG = 4096
# The thread that has just synced the log waits at most this long for a busy event loop.
SWITCH_S = 0.0005
# Allocations before the collector runs on young objects, then how rarely it runs on older ones. A closed connection
# needs no collector; cycles that libraries leave do, and reach the oldest generation under load. The interpreter
# itself delays a full collection until a quarter of all old objects is new, so thousands of consumers cost no more
# of them: 0.1 µs an object, 15 objects a consumer.
COLLECTOR = (20_000, 20, 10)
# Unanswered keepalive probes after which a connection is closed: together they take as long as the silence before.
KEEPALIVE_PROBES = 4
LEVELS = {"trace": 10, "debug": 10, "info": 20, "warn": 30, "error": 40}


def run(config: Config) -> None:
    """
    Serve until a signal stops the server.

    Raises:
        VirtaError: the server cannot start: exposure, directory, port, certificate, log.
    """
    if requires_credentials(config):
        check_exposure(config, len(read_credentials(config).store))
    _check_tls(config)
    configure_logging(config.log_level)
    return_freed_memory()
    sys.setswitchinterval(SWITCH_S)
    # What was imported stays in use, and objects of requests rarely form cycles.
    gc.freeze()
    gc.set_threshold(*COLLECTOR)
    listener = passed_socket(os.environ) or _bind(config.host, config.server_port)
    detect_dead_peers(listener, config.tcp_keepalive_ms, config.tcp_user_timeout_ms)
    try:
        uvloop.run(serve(config, listener))
    finally:
        listener.close()


async def serve(config: Config, listener: socket.socket) -> None:
    """Run one server on a bound socket, from opening the log to closing it."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if config.tls_cert else "http"
    shown = f"[{host}]" if ":" in host else host
    url = f"{scheme}://{shown}:{port}"
    _greet(url, config.data_dir)
    _warn_of_root()
    service = Service(config)
    await service.start()
    settings = uvicorn.Config(
        build_app(service),
        http=cast("type[asyncio.Protocol]", HttpServer(service)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        timeout_keep_alive=max(1, config.tcp_idle_timeout_ms // 1000),
        timeout_graceful_shutdown=max(1, config.drain_timeout_ms // 1000),
        backlog=BACKLOG,
    )
    server = _Server(settings, service)
    try:
        with server.handling_signals():  # before the log line that says that the server runs
            service.logger.info(
                "listening",
                url=url,
                log=str(config.log_path),
                durability=config.durability,
                next_offset=service.log.next_offset,
                journal=service.journal.address[1] if service.journal is not None else None,
            )
            await server.serve(sockets=[listener])
    finally:
        await service.stop()
        service.logger.info("stopped")


def _greet(url: str, data_dir: str) -> None:
    """Print the address before any log line, on a terminal only."""
    if sys.stdout.isatty():
        lines = log_stream(sys.stdout)
        lines.write(f"Console at {url}/ (Ctrl-C stops it)\n")
        lines.write(f"Data in {os.path.abspath(data_dir)}\n")
        lines.flush()


def _warn_of_root() -> None:
    if os.geteuid() == 0:
        structlog.get_logger("virta.server").warning(
            "running_as_root", advice="run the server as its own user: it does not need root"
        )


class _Server(uvicorn.Server):
    """uvicorn's server; it drains the service first."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._stop = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._stop.set()

    async def main_loop(self) -> None:
        """Wait for a signal; uvicorn looks ten times a second whether there was one."""
        await self.on_tick(0)
        await self._stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not let uvicorn handle signals: it raises them again before the log is closed."""
        yield

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Drain on the first signal, give up waiting on a second SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # aborted connections leave the hub


def configure_logging(level: str) -> None:
    """Log one line per event on standard output: readable on a terminal, JSON otherwise."""
    renderer: Any = (
        structlog.dev.ConsoleRenderer(event_key="message")
        if sys.stdout.isatty()
        else structlog.processors.JSONRenderer()
    )
    shared: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.EventRenamer("message"),
        structlog.processors.format_exc_info,
    ]
    lines = log_stream(sys.stdout)
    structlog.configure(
        processors=[*shared, renderer],
        logger_factory=structlog.PrintLoggerFactory(lines),
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        cache_logger_on_first_use=True,
    )
    # Packages without structlog log through the standard library, in the same format.
    handler = logging.StreamHandler(lines)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[spread_fields, *shared],
            pass_foreign_args=True,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=LEVELS[level], handlers=[handler])
    # httpx would log the whole address of a sink, which may contain a key.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "websockets", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING))


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; stop what listens there, "
            "or choose another --server-port (0 takes a free one)",
            setting="server_port",
        ) from error
    listener.set_inheritable(False)
    return listener


def detect_dead_peers(
    listener: socket.socket, keepalive_ms: int | None, user_timeout_ms: int | None
) -> None:
    """
    Let the kernel end connections whose peer vanished without closing (power, cable, a firewall timeout).

    Linux: accepted sockets inherit these options from the listener.
    """
    if keepalive_ms is not None:
        idle_s = max(1, keepalive_ms // 1000)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        interval_s = max(1, idle_s // KEEPALIVE_PROBES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    if user_timeout_ms is not None:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, user_timeout_ms)


def _check_tls(config: Config) -> None:
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together: give both or none")
    if config.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            config.tls_cert, config.tls_key
        )
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot use certificate {config.tls_cert}: {error}", setting="tls_cert"
        ) from error
