"""
Checks of a server's set-up for `virta doctor`: settings, exposure, tokens, certificate, directory, disk, log, ports.

Each yields (check, state, detail); the detail says what to do. Nothing is changed, and a running server is not
disturbed.
"""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any

from virta import files
from virta.errors import ConfigError, LogError, VirtaError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from virta.server.config_loader import Config

OK, WARNING, WRONG = "ok", "warning", "wrong"
Row = tuple[str, str, str]

FREE_BYTES_WARNING = 1024**3
FREE_BYTES_WRONG = 16 * 1024**2
CERTIFICATE_DAYS_WARNING = 21
DAY_S = 86_400


def setup_findings(config_file: str | None, flags: Mapping[str, Any] | None) -> Iterator[Row]:
    """Yield the findings; without valid settings only what is wrong with them."""
    try:
        from virta.server.config_loader import load
    except ModuleNotFoundError:
        return  # the extra is missing, which another check reports
    try:
        config = load(flags, environ=os.environ, file=config_file or os.environ.get("VIRTA_CONFIG"))
    except ConfigError as error:
        for line in error.message.splitlines():
            yield "settings", WRONG, line
        return
    yield "settings", OK, "every setting can be used; `virta config` shows them"
    yield from _access(config)
    yield from _certificate(config)
    yield from _directory(config)
    running = _is_running(config.data_dir)
    yield from _ports(config, running=running)
    yield from _log(config)


def _access(config: Config) -> Iterator[Row]:
    from virta.server.access.auth import check_exposure, requires_credentials
    from virta.server.service import read_credentials

    try:
        if requires_credentials(config):
            count = len(read_credentials(config).store)
            check_exposure(config, count)
            detail = f"{count} in {config.data_dir}"
            if config.token_file is not None:
                detail += f", and those of {config.token_file}"
            yield "tokens", OK, detail
        elif config.insecure:
            yield "tokens", WARNING, f"everyone who reaches {config.host} may do anything: create tokens with `virta token create`"  # fmt: skip
    except VirtaError as error:
        yield "access", WRONG, error.message


def _certificate(config: Config) -> Iterator[Row]:
    cert, key = config.tls_cert, config.tls_key
    if cert is None and key is None:
        return
    if cert is None or key is None:
        yield "certificate", WRONG, "--tls-cert and --tls-key go together: give both or none"
        return
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        yield "certificate", WRONG, f"{cert} and {key} cannot be used: {error}"
        return
    try:
        decoded: dict[str, Any] = ssl._ssl._test_decode_cert(cert)  # type: ignore[attr-defined]  # noqa: SLF001
        left = (ssl.cert_time_to_seconds(decoded["notAfter"]) - time.time()) / DAY_S
    except (AttributeError, KeyError, OSError, ValueError, ssl.SSLError):
        yield "certificate", OK, f"{cert} fits its key"
        return
    if left < 0:
        yield "certificate", WRONG, f"{cert} expired on {decoded['notAfter']}: renew it"
    elif left < CERTIFICATE_DAYS_WARNING:
        yield "certificate", WARNING, f"{cert} expires in {left:.0f} days: renew it"
    else:
        yield "certificate", OK, f"{cert} is valid for {left:.0f} days"


def _directory(config: Config) -> Iterator[Row]:
    path = os.path.abspath(config.data_dir)
    present = path
    while not os.path.exists(present):
        present = os.path.dirname(present)
    if not os.path.isdir(present):
        yield "directory", WRONG, f"{present} is no directory: choose another --data-dir"
        return
    if not os.access(present, os.W_OK | os.X_OK):
        yield "directory", WRONG, f"{present} cannot be written by this user: change its owner or mode"  # fmt: skip
        return
    free = shutil.disk_usage(present).free
    if free < FREE_BYTES_WRONG:
        yield "disk", WRONG, f"{free:,} bytes are free at {present}: free some space"
    elif free < FREE_BYTES_WARNING:
        yield (
            "disk",
            WARNING,
            f"{free / 2**20:,.0f} MiB are free at {present}: see --retention-bytes",
        )
    else:
        yield "disk", OK, f"{free / 2**30:,.1f} GiB are free at {present}"


def _is_running(data_dir: str) -> bool:
    """Return whether a server has locked the data directory."""
    path = os.path.join(data_dir, "serve.lock")
    if not os.path.exists(path):
        return False
    try:
        files.unlock_file(files.lock_file(path))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _ports(config: Config, *, running: bool) -> Iterator[Row]:
    if running:
        yield "ports", OK, f"a server runs on {config.data_dir}"
        return
    for name in ("server_port", "journal_port"):
        port = getattr(config, name)
        if not port:
            continue
        flag = "--" + name.replace("_", "-")
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        try:
            with socket.create_server((config.host, port), family=family):
                yield "ports", OK, f"{config.host}:{port} is free ({flag})"
        except OSError as error:
            yield "ports", WRONG, f"{config.host}:{port} cannot be used ({error.strerror}): stop what listens there, or choose another {flag}"  # fmt: skip


def _log(config: Config) -> Iterator[Row]:
    import virta

    path = config.log_path
    if not os.path.exists(path):
        return
    try:
        with virta.open(path, read_only=True) as log:
            yield "log", OK, f"{log.next_offset - log.first_offset:,} offsets in {path}"
    except (LogError, OSError) as error:
        message = error.message if isinstance(error, LogError) else str(error)
        yield "log", WRONG, f"{path} cannot be opened: {message}"
