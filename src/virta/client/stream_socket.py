"""How both clients open the WebSocket of message streams: where, how, and what a refusal means; no I/O."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from virta.client.calls import Address, check, unreachable

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator

    from virta.client.resume import ResumeState


class StreamSocket(NamedTuple):
    """The server's WebSockets as one client opens them."""

    address: Address
    timeout: float
    tls: ssl.SSLContext | None

    def options(self, state: ResumeState) -> dict[str, Any]:
        """Return the arguments of `connect` of the `websockets` package for the next attempt."""
        path, headers = state.request()
        return {
            "uri": self.address.websocket(path),
            "additional_headers": self.address.headers | headers,
            "ssl": self.tls,
            "open_timeout": self.timeout,
            "max_size": None,
        }

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn what `connect` raises into ClientError."""
        from websockets.exceptions import InvalidHandshake, InvalidStatus  # noqa: PLC0415

        try:
            yield
        except InvalidStatus as error:
            check(error.response.status_code, bytes(error.response.body or b""))
            raise
        except (OSError, InvalidHandshake) as error:
            raise unreachable(self.address, error) from error
