"""
The client of a webhook: one HTTP request at a time, on a connection that stays open.

Follows "HTTP 1.1 Web Hooks for Event Delivery" (CloudEvents): the validation handshake before the
first delivery, and what each answer to a delivery means.

A request and its response share one deadline, from the lookup of the name to the last byte of the
body, so a sink that sends a byte now and then times out like one that sends none. The name is resolved
once for a connection, and the address that was checked (`virta.server.webhooks.addresses`) is the one connected
to. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from functools import cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

from virta.errors import HubError
from virta.server.webhooks.consent import read_rate

if TYPE_CHECKING:
    from virta.server.webhooks.outbound import Resolver

# A response's body is not used; up to this much of it is read, to keep the connection.
ANSWER_BYTES_MAX = 65536
RETRY_AFTER_S_MAX = 3600.0
# Idle connections are closed after this long, and names are looked up again.
KEPT_S = 60.0
# Errors of a request that could not be sent or was not answered.
FAILURES = (OSError, httpx.HTTPError, httpx.InvalidURL, UnicodeError)
# Errors of a request on a connection that the sink has just closed.
CLOSED = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
USER_AGENT = "virta"
USERINFO = re.compile(r"^([^/?#]*//)[^/?#]*@")
# One deadline is around the whole exchange.
NO_TIMEOUTS: dict[str, float | None] = dict.fromkeys(("connect", "read", "write", "pool"))


class Verdict(Enum):
    """What an answer means for the event that was sent."""

    DELIVERED = auto()
    RETRY = auto()  # the sink fails, or asks to wait
    REFUSED = auto()  # this event will never be accepted
    GONE = auto()  # no event will ever be accepted: 410


@dataclass(frozen=True)
class SinkAnswer:
    """What an answer means, why, and how long the sink asked us to wait."""

    verdict: Verdict
    reason: str
    wait_s: float = 0.0


@dataclass(frozen=True)
class Permission:
    """The outcome of a handshake: consent, and how many requests a minute are allowed."""

    granted: bool
    rate: int | None = None
    refusal: str = ""  # why not; for the server's log only, subscribers must not learn it


class WebhookClient:
    """Sends requests to one sink. Its coroutines run in the outbound loop, one at a time."""

    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        deadline_s: float,
        origin: str,
        method: str,
        resolver: Resolver,
    ) -> None:
        self._url = self._at_url = read_sink(url)
        self.host = self._url.raw_host.decode("ascii")
        own = {
            "webhook-request-origin",
            "content-type",
            "content-length",
            "webhook-id",
            "webhook-timestamp",
            "webhook-signature",
        }
        self._headers = {
            "Host": self._url.netloc.decode("ascii"),
            "User-Agent": USER_AGENT,
            "WebHook-Request-Origin": origin,
        } | {name: v for name, v in headers.items() if name.lower() not in own}
        self._deadline_s = deadline_s
        self._origin = origin
        self._method = method
        self._resolver = resolver
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._kept_until = 0.0  # when a kept connection is too old to be used again
        self._addresses: list[str] = []
        self._resolved_at = 0.0

    async def close(self) -> None:
        """Close the connection."""
        transport, self._transport, self._kept_until = self._transport, None, 0.0
        if transport is not None:
            await transport.aclose()

    async def validate(self, callback: str | None) -> Permission:
        """Request the sink's consent, given now or by a later call of `callback` (§4)."""
        fields = {"Content-Length": "0"}
        if callback is not None:
            fields["WebHook-Request-Callback"] = callback
        try:
            status, headers = await self._exchange("OPTIONS", b"", fields)
        except FAILURES as error:
            return Permission(granted=False, refusal=self._reason(error))
        finally:
            await self.close()
        allowed = headers.get("webhook-allowed-origin", "")
        # A sink that grants by callback withholds the header, whatever the status (§4.2).
        if not allowed and callback is not None:
            return Permission(granted=False)
        origins = {name.strip() for name in allowed.split(",")}
        if status >= 300 or not {self._origin, "*"} & origins:
            refusal = f"the sink answered {status} and allows {allowed or 'no origin'}"
            return Permission(granted=False, refusal=refusal)
        return Permission(granted=True, rate=read_rate(headers.get("webhook-allowed-rate")))

    async def deliver(self, body: bytes, signed: dict[str, str] | None = None) -> SinkAnswer:
        """Send one event in structured mode with its signature, and interpret the response (§3.2)."""
        kind = {"Content-Type": "application/cloudevents+json; charset=utf-8"} | (signed or {})
        try:
            status, headers = await self._exchange(self._method, body, kind)
        except FAILURES as error:
            return SinkAnswer(Verdict.RETRY, self._reason(error))
        reason = f"status {status}"
        if 200 <= status < 300:
            return SinkAnswer(Verdict.DELIVERED, reason)
        if status == 410:
            return SinkAnswer(Verdict.GONE, reason)
        if status in {408, 425, 429} or status >= 500:
            return SinkAnswer(Verdict.RETRY, reason, retry_after_s(headers.get("retry-after", "")))
        return SinkAnswer(Verdict.REFUSED, reason)

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return f"no complete response within {self._deadline_s:g} s"
        return str(error) or type(error).__name__

    async def _exchange(
        self, method: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, httpx.Headers]:
        """Send a request and read its whole response before the deadline; else close the connection."""
        sent = self._headers | headers
        whole = False
        try:
            async with asyncio.timeout(self._deadline_s):
                status, answered, whole = await self._request(method, body, sent)
        finally:
            if not whole:
                await self.close()
        if whole:
            self._kept_until = time.monotonic() + KEPT_S
        return status, answered

    async def _request(
        self, method: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, httpx.Headers, bool]:
        """Send a request, again on a new connection if the sink has just closed the idle one."""
        if time.monotonic() < self._kept_until:
            try:
                return await self._request_at(self._addresses[0], method, body, headers)
            except CLOSED:
                await self.close()
        await self.close()
        addresses = await self._resolve()
        for left, address in enumerate(addresses, 1 - len(addresses)):
            try:
                answer = await self._request_at(address, method, body, headers)
            except httpx.ConnectError:
                await self.close()
                if left == 0:
                    self._resolved_at = 0.0
                    raise
            else:
                self._addresses = addresses[addresses.index(address) :]
                return answer
        raise AssertionError("a resolver returns at least one address")

    async def _resolve(self) -> list[str]:
        now = time.monotonic()
        if not self._resolved_at or now - self._resolved_at > KEPT_S:
            self._addresses = await self._resolver.addresses(self.host)
            self._resolved_at = now
        return self._addresses

    async def _request_at(
        self, address: str, method: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, httpx.Headers, bool]:
        """Send a request to one address; the last value is whether the connection can be used again."""
        if self._transport is None:
            self._transport = _new_transport()
        if self._at_url.host != address:
            self._at_url = self._url.copy_with(host=address)
        request = httpx.Request(
            method,
            self._at_url,
            content=body,
            headers=headers,
            extensions={"sni_hostname": self.host, "timeout": NO_TIMEOUTS},
        )
        response = await self._transport.handle_async_request(request)
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        try:
            size = 0
            async for piece in stream:
                size += len(piece)
                if size > ANSWER_BYTES_MAX:
                    return response.status_code, response.headers, False
        finally:
            await stream.aclose()
        return response.status_code, response.headers, True


def without_user(url: str) -> str:
    """Return an address without the user and password in it."""
    return USERINFO.sub(r"\1", url)


def read_sink(url: str) -> httpx.URL:
    """
    Check the address of a webhook.

    Raises:
        HubError: it is no http or https address.
    """
    if not url.isascii():
        raise HubError(f"sink {url!r} is not ASCII: escape it", code="invalid-sink")
    try:
        parts = urlsplit(url)
        port = parts.port
        read = httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise HubError(f"sink {url!r}: {error}", code="invalid-sink") from None
    if parts.scheme not in {"http", "https"} or not read.host or port == 0:
        raise HubError(f"sink {url!r} is not an http or https address", code="invalid-sink")
    # The part before an `@` was never sent.
    return read.copy_with(username=None, password=None, fragment=None)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _new_transport() -> httpx.AsyncHTTPTransport:
    """One connection. A transport alone follows no redirects and keeps no cookies."""
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEPT_S)
    return httpx.AsyncHTTPTransport(verify=_tls(), trust_env=False, limits=limits)


def retry_after_s(retry_after: str) -> float:
    """Return `Retry-After` in seconds; it is a number of them, or a date."""
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
