"""
Talking to a webhook: one HTTP request, blocking, on a connection that is kept.

Follows "HTTP 1.1 Web Hooks for Event Delivery" (CloudEvents): the validation handshake before the
first delivery, and what each answer to a delivery means.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from virta.errors import HubError

# An answer's body says nothing that is needed; so much of it is read, to keep the connection.
ANSWER_BYTES_MAX = 65536
RETRY_AFTER_S_MAX = 3600.0


class Verdict(Enum):
    """What an answer means for the event."""

    DELIVERED = auto()
    AGAIN = auto()  # the sink is not well, or asks for patience
    REFUSED = auto()  # this event will never be taken
    GONE = auto()  # no event will ever be taken: 410


@dataclass(frozen=True)
class Answer:
    """The verdict, why, and how long the sink asked to be left alone."""

    verdict: Verdict
    reason: str
    wait_s: float = 0.0


class Sink:
    """One webhook; not for several threads at once."""

    def __init__(self, url: str, headers: dict[str, str], timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise HubError(f"sink {url!r} is no http or https address", code="invalid-sink")
        try:
            port = parts.port
        except ValueError:
            raise HubError(f"sink {url!r} has no valid port", code="invalid-sink") from None
        self._headers = headers
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = kind(parts.hostname, port, timeout=timeout_s)

    def close(self) -> None:
        self._connection.close()

    def validate(self, origin: str) -> int | None:
        """
        The handshake (§4): ask whether this server may send; gives the allowed rate per minute.

        Raises:
            HubError: the sink does not answer or does not allow it.
        """
        asked = {"WebHook-Request-Origin": origin, "Content-Length": "0"}
        try:
            status, headers = self._request("OPTIONS", b"", asked)
        except (OSError, HTTPException) as error:
            raise HubError(f"the sink does not answer: {error}", code="sink-unreachable") from error
        allowed = headers.get("webhook-allowed-origin", "")
        if status >= 300 or not {origin, "*"} & {name.strip() for name in allowed.split(",")}:
            raise HubError(
                f"the sink answered {status} and allows {allowed or 'nobody'}: it must answer OPTIONS "
                f"with WebHook-Allowed-Origin: {origin}",
                code="sink-refused",
            )
        rate = headers.get("webhook-allowed-rate", "*")
        return int(rate) if rate.isdigit() and int(rate) > 0 else None

    def deliver(self, body: bytes) -> Answer:
        """Send one event in structured mode and judge the answer (§3.2)."""
        kind = {"Content-Type": "application/cloudevents+json; charset=utf-8"}
        try:
            status, headers = self._request("POST", body, kind)
        except (OSError, HTTPException) as error:
            return Answer(Verdict.AGAIN, str(error) or type(error).__name__)
        if 200 <= status < 300:
            return Answer(Verdict.DELIVERED, "")
        reason = f"status {status}"
        if status == 410:
            return Answer(Verdict.GONE, reason)
        if status in {408, 425, 429} or status >= 500:
            wait = headers.get("retry-after", "")
            seconds = min(float(wait), RETRY_AFTER_S_MAX) if wait.isdigit() else 0.0
            return Answer(Verdict.AGAIN, reason, seconds)
        return Answer(Verdict.REFUSED, reason)

    def _request(
        self, method: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str]]:
        try:
            self._connection.request(method, self._path, body, self._headers | headers)
            response = self._connection.getresponse()
            rest = response.read(ANSWER_BYTES_MAX + 1)
        except (OSError, HTTPException):
            self._connection.close()
            raise
        if len(rest) > ANSWER_BYTES_MAX or response.will_close:
            self._connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}
