"""
Talking to a webhook: one HTTP request, blocking, on a connection that is kept.

Follows "HTTP 1.1 Web Hooks for Event Delivery" (CloudEvents): the validation handshake before the
first delivery, and what each answer to a delivery means.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from virta.errors import HubError
from virta.server.consent import read_rate

# An answer's body says nothing that is needed; so much of it is read, to keep the connection.
ANSWER_BYTES_MAX = 65536
RETRY_AFTER_S_MAX = 3600.0
# What keeps a request from being sent or answered; a name that no resolver takes is a UnicodeError.
FAILURES = (OSError, HTTPException, UnicodeError)


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


@dataclass(frozen=True)
class Permission:
    """What the handshake gave: consent, and at most how many requests a minute."""

    granted: bool
    rate: int | None = None


class Sink:
    """One webhook; not for several threads at once."""

    def __init__(
        self, url: str, headers: dict[str, str], timeout_s: float, origin: str, method: str
    ) -> None:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise HubError(f"sink {url!r}: {error}", code="invalid-sink") from None
        if not url.isascii():
            raise HubError(f"sink {url!r} is not ASCII: escape it", code="invalid-sink")
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise HubError(f"sink {url!r} is no http or https address", code="invalid-sink")
        try:
            port = parts.port
        except ValueError:
            raise HubError(f"sink {url!r} has no valid port", code="invalid-sink") from None
        ours = {"webhook-request-origin", "content-type", "content-length"}
        self._headers = {name: v for name, v in headers.items() if name.lower() not in ours}
        self._origin = origin
        self._method = method
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._connection = kind(parts.hostname, port, timeout=timeout_s)

    def close(self) -> None:
        self._connection.close()

    def validate(self, callback: str | None) -> Permission:
        """
        The handshake (§4): ask whether this server may send, now or by a later call of `callback`.

        Raises:
            HubError: the sink does not answer, or does not allow it and will not.
        """
        asked = {"Content-Length": "0"}
        if callback is not None:
            asked["WebHook-Request-Callback"] = callback
        try:
            status, headers = self._request("OPTIONS", b"", asked)
        except FAILURES as error:
            raise HubError(f"the sink does not answer: {error}", code="sink-unreachable") from error
        allowed = headers.get("webhook-allowed-origin", "")
        # Who grants by callback withholds the header, whatever the status (§4.2).
        if not allowed and callback is not None:
            return Permission(granted=False)
        origins = {name.strip() for name in allowed.split(",")}
        if status >= 300 or not {self._origin, "*"} & origins:
            raise HubError(
                f"the sink answered {status} and allows {allowed or 'nobody'}: it must answer OPTIONS "
                f"with WebHook-Allowed-Origin: {self._origin}",
                code="sink-refused",
            )
        return Permission(granted=True, rate=read_rate(headers.get("webhook-allowed-rate")))

    def deliver(self, body: bytes) -> Answer:
        """Send one event in structured mode and judge the answer (§3.2)."""
        kind = {"Content-Type": "application/cloudevents+json; charset=utf-8"}
        try:
            status, headers = self._request(self._method, body, kind)
        except FAILURES as error:
            return Answer(Verdict.AGAIN, str(error) or type(error).__name__)
        if 200 <= status < 300:
            return Answer(Verdict.DELIVERED, "")
        reason = f"status {status}"
        if status == 410:
            return Answer(Verdict.GONE, reason)
        if status in {408, 425, 429} or status >= 500:
            return Answer(Verdict.AGAIN, reason, _wait_s(headers.get("retry-after", "")))
        return Answer(Verdict.REFUSED, reason)

    def _request(
        self, method: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str]]:
        sent = self._headers | headers | {"WebHook-Request-Origin": self._origin}
        try:
            response = self._asked(method, body, sent)
            rest = response.read(ANSWER_BYTES_MAX + 1)
        except FAILURES:
            self._connection.close()
            raise
        if len(rest) > ANSWER_BYTES_MAX or response.will_close:
            self._connection.close()
        return response.status, {name.lower(): value for name, value in response.getheaders()}

    def _asked(self, method: str, body: bytes, headers: dict[str, str]) -> HTTPResponse:
        """Ask, a second time if the sink has closed an idle connection just when it was used again."""
        kept = self._connection.sock is not None
        try:
            self._connection.request(method, self._path, body, headers)
            return self._connection.getresponse()
        except ConnectionError:
            if not kept:
                raise
        self._connection.close()
        self._connection.request(method, self._path, body, headers)
        return self._connection.getresponse()


def _wait_s(retry_after: str) -> float:
    """`Retry-After` in seconds: a number of them, or a date."""
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), RETRY_AFTER_S_MAX)
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return min(max((until - datetime.now(UTC)).total_seconds(), 0.0), RETRY_AFTER_S_MAX)
