"""Socket activation: use the listening socket that systemd passes (sd_listen_fds(3))."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from virta.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

FIRST_FD = 3


def passed_socket(environ: MutableMapping[str, str]) -> socket.socket | None:
    """
    Return the socket that systemd opened for this process; None if there is none.

    Raises:
        ConfigError: several sockets were passed, or one that does not listen for TCP.
    """
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = environ.get("LISTEN_FDS", "0")
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):  # they are not for child processes
        environ.pop(name, None)
    if count != "1":
        raise ConfigError(
            f"systemd passed {count} sockets: the unit virta.socket has one ListenStream"
        )
    listener = socket.socket(fileno=FIRST_FD)
    if listener.type != socket.SOCK_STREAM or listener.family not in (
        socket.AF_INET,
        socket.AF_INET6,
    ):
        raise ConfigError("systemd passed a socket that is not TCP: give ListenStream a port")
    listener.setblocking(False)
    listener.set_inheritable(False)
    return listener
