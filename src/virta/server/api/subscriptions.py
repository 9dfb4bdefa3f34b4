"""
CloudEvents Subscriptions: `/subscriptions`, a filter and a sink to which matching events are sent.

The object is that of the Subscriptions API (version 1.0-wip): `sink`, `protocol` (HTTP), `filters`,
`types`, `source`, `protocolsettings` (`headers`, `method`); `config.channel` names the channel and
`config.from` where to start (`latest` without it).
"""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.routing import Route

from virta.errors import HubError, RequestError
from virta.hub.delivery import META
from virta.hub.resume.positions import EventId, ResumePosition
from virta.server.access.rules import principal_of, require
from virta.server.api.description.schemas import SubscriptionBody, SubscriptionConfirmation
from virta.server.api.handler import ApiHandler, ErrorsAsRefusals, not_found, read_json
from virta.server.event_input import check_channel
from virta.server.http.routes import name_fault, parse_start
from virta.server.webhooks.client import read_sink, without_user
from virta.server.webhooks.consent import read_rate
from virta.server.webhooks.owner import owner_of
from virta.server.webhooks.signing import (
    PREFIX,
    SECRET_BYTES_MAX,
    SECRET_BYTES_MIN,
    SECRETS_MAX,
    new_secret,
    read_secret,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from virta.access.principal import Principal
    from virta.server.webhooks.delivery import Webhook
    from virta.server.webhooks.owner import Owner

MEMBERS = frozenset(SubscriptionBody.__struct_fields__)
# RFC 9110 §5.6.2; and the headers of the connection, which are not the subscriber's to set.
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
RESERVED_HEADERS = frozenset({"connection", "content-length", "host", "transfer-encoding"})
METHODS = ("POST", "PUT", "PATCH")


class SubscriptionsApi(ApiHandler):
    """Handlers under `/subscriptions`."""

    def routes(self) -> list[Route]:
        return [
            Route("/subscriptions", self.create, methods=["POST"]),
            Route("/subscriptions", self.list, methods=["GET"]),
            Route("/subscriptions/{id}", self.show, methods=["GET"]),
            Route("/subscriptions/{id}", self.update, methods=["PUT"]),
            Route("/subscriptions/{id}", self.delete, methods=["DELETE"]),
            Route("/subscriptions/{id}/confirm", self.confirm, methods=["GET", "POST"]),
        ]

    async def create(self, request: Request) -> Response:
        description = _parse_subscription(await read_json(request))
        owner = self._owner(request, description["config"]["channel"])
        settings = description.setdefault("protocolsettings", {})
        made = not settings.get("secrets")
        if made:
            settings["secrets"] = [new_secret()]
        id_ = str(uuid.uuid4())
        cursor = await self._cursor(description)
        with ErrorsAsRefusals():
            hook = await self._service.webhooks.subscribe(id_, description, cursor, owner)
        self._service.audit.acted("webhook_created", owner.principal, id=id_, channel=hook.channel)
        status = 202 if hook.consent.pending else 201
        response = self._json(hook.status(secrets=made), status)
        response.headers["Location"] = f"/subscriptions/{id_}"
        return response

    async def update(self, request: Request) -> Response:
        """Replace a subscription's description; without `config.from` it continues where it is."""
        id_ = request.path_params["id"]
        body = await read_json(request)
        known = self._service.webhooks.hooks.get(id_)
        old = known if known is not None and may_see(principal_of(request), known) else None
        description = _parse_subscription(body, {} if old is None else old.description)
        if old is None:
            raise not_found("no subscription has this id")
        owner = self._owner(request, description["config"]["channel"])
        if body.get("id", id_) != id_:
            raise _invalid(f"`id` is {body['id']!r}, and {id_!r} in the path")
        cursor = await self._cursor(description) if "from" in description["config"] else None
        with ErrorsAsRefusals():
            hook = await self._service.webhooks.replace(id_, description, cursor, owner)
        if hook is None:
            raise not_found("no subscription has this id")
        return self._json(hook.status(), 202 if hook.consent.pending else 200)

    async def _cursor(self, description: dict[str, Any]) -> int:
        """Return the offset of the first record to deliver."""
        start = parse_start(str(description["config"].get("from", "latest")))
        with ErrorsAsRefusals():
            found = await self._service.replayer.find(description["config"]["channel"], start)
        if isinstance(start, ResumePosition | EventId) and found.gap is not None:
            reason = found.gap["reason"]
            if reason != "trimmed":  # else it would silently start at the present end
                raise RequestError(
                    400, "invalid-start", f"{start.text!r} is not in the log: {reason}"
                )
        return found.offset

    async def confirm(self, request: Request) -> Response:
        """Accept the callback of a deferred handshake; the key in its address authorises it."""
        if request.method == "HEAD":  # fetching a preview of a link is no consent
            raise HTTPException(405, headers={"Allow": "GET, POST"})
        rate = read_rate(request.headers.get("webhook-allowed-rate"))
        key = request.query_params.get("key", "")
        with ErrorsAsRefusals():
            hook = await self._service.webhooks.confirm(request.path_params["id"], key, rate)
        if hook is None:
            raise not_found("no subscription waits for this confirmation")
        return self._json(SubscriptionConfirmation(hook.id, hook.state))

    async def list(self, request: Request) -> Response:
        principal = principal_of(request)
        hooks = self._service.webhooks.hooks.values()
        return self._json([hook.status() for hook in hooks if may_see(principal, hook)])

    async def show(self, request: Request) -> Response:
        return self._json(self._visible(request).status())

    def _visible(self, request: Request) -> Webhook:
        """Return the subscription of the path, if the principal may see it."""
        hook: Webhook | None = self._service.webhooks.hooks.get(request.path_params["id"])
        if hook is None or not may_see(principal_of(request), hook):
            raise not_found("no subscription has this id")
        return hook

    def _owner(self, request: Request, channel: str) -> Owner:
        """Return the owner of a subscription to a channel, which needs two rights to it."""
        principal = principal_of(request)
        for verb in ("webhooks", "read"):
            require(self._service, principal, verb, channel)
        return owner_of(principal)

    async def delete(self, request: Request) -> Response:
        hook = self._visible(request)
        principal = principal_of(request).id
        self._service.audit.acted("webhook_deleted", principal, id=hook.id, channel=hook.channel)
        if not await self._service.webhooks.unsubscribe(request.path_params["id"]):
            raise not_found("no subscription has this id")
        return self._no_content()


def may_see(principal: Principal, hook: Webhook) -> bool:
    """Return whether a principal may see a subscription: with a row filter only its own ones."""
    permission = principal.rights.permission("webhooks", hook.channel)
    if permission is None:
        return False
    return permission.row_filter is None or hook.owner.principal == principal.id


def _parse_subscription(body: Any, old: dict[str, Any] | None = None) -> dict[str, Any]:
    """
    Check a subscription and return its description; filters are checked when they are parsed.

    Args:
        old: the description that it replaces; `true` as the value of a header keeps that of `old`.

    Raises:
        RequestError: 400 `invalid-subscription` for the first fault.
    """
    if not isinstance(body, dict):
        raise _invalid("the body is a JSON object")
    unknown = set(body) - MEMBERS
    if unknown:
        raise _invalid(f"{min(unknown)!r} is no member: {', '.join(sorted(MEMBERS))}")
    if not isinstance(body.get("sink"), str):
        raise _invalid("`sink` is the address of a webhook")
    if body.get("protocol", "HTTP") != "HTTP":
        raise _invalid(f"`protocol` is HTTP, got {body['protocol']!r}")
    _check_config(body.get("config"))
    if not isinstance(body.get("filters", []), list):
        raise _invalid("`filters` is an array of filters, which all have to hold")
    if not _texts(body.get("types", [])):
        raise _invalid("`types` is an array of texts")
    if not isinstance(body.get("source", ""), str):
        raise _invalid("`source` is a text")
    if without_user(body["sink"]) != body["sink"]:
        raise _invalid("`sink` has a user or password: send them by `protocolsettings.headers`")
    settings = _with_old_secrets(_with_old_headers(body, old or {}), old or {})
    _check_settings(settings)
    made = {name: value for name, value in body.items() if name != "id"}
    return made | {"protocolsettings": settings} if settings else made


def _check_config(config: Any) -> None:
    if not isinstance(config, dict) or not isinstance(config.get("channel"), str):
        raise _invalid("`config.channel` names the channel")
    if set(config) - {"channel", "from"}:
        raise _invalid("`config` has `channel` and `from`, nothing else")
    fault = name_fault(config["channel"])
    if fault:
        raise _invalid(f"`config.channel` is no channel: {fault}")
    if config["channel"] == META:
        raise _invalid("`config.channel` is meta, which has no history: read it as a stream")
    check_channel(config["channel"])


def _with_old_headers(body: dict[str, Any], old: dict[str, Any]) -> Any:
    """
    Return the settings, with the old value of each header whose value is `true`.

    Responses show values as `true`. Old values are kept only for a sink on the same server: a client that
    may change a subscription must not be able to send its secrets elsewhere.
    """
    settings = body.get("protocolsettings", {})
    headers = settings.get("headers") if isinstance(settings, dict) else None
    if not isinstance(headers, dict) or not any(value is True for value in headers.values()):
        return settings
    known = old.get("protocolsettings", {}).get("headers", {})
    missing = [name for name, value in headers.items() if value is True and name not in known]
    if missing:
        raise _invalid(f"header {missing[0]!r} is true, but has no old value to keep: give a value")
    if _server(body["sink"]) != _server(old["sink"]):
        raise _invalid("header values are kept only for a sink on the same server: give them again")
    return settings | {
        "headers": {
            name: known[name] if value is True else value for name, value in headers.items()
        }
    }


def _with_old_secrets(settings: Any, old: dict[str, Any]) -> Any:
    """Return the settings with the old secrets, if none are given, and for each that is `true`."""
    known = old.get("protocolsettings", {}).get("secrets")
    if not known or not isinstance(settings, dict):
        return settings
    given = settings.get("secrets", known)
    if not isinstance(given, list):
        return settings
    kept = [known[at] if s is True and at < len(known) else s for at, s in enumerate(given)]
    return settings | {"secrets": kept}


def _server(sink: str) -> tuple[str, bytes]:
    """Return scheme and authority of a sink; raise RequestError for an invalid one."""
    try:
        url = read_sink(sink)
    except HubError as error:
        raise RequestError(400, error.code, error.message) from error
    return url.scheme, url.netloc


def _check_settings(settings: Any) -> None:
    if not isinstance(settings, dict) or set(settings) - {"headers", "method", "secrets"}:
        raise _invalid("`protocolsettings` has `headers`, `method` and `secrets`, nothing else")
    secrets = settings.get("secrets", [])
    valid = isinstance(secrets, list) and len(secrets) <= SECRETS_MAX
    if not valid or any(read_secret(secret) is None for secret in secrets):
        raise _invalid(
            f"`protocolsettings.secrets` are at most {SECRETS_MAX} texts: {PREFIX} and base64 of "
            f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX} bytes"
        )
    if settings.get("method", "POST") not in METHODS:
        raise _invalid(
            f"`protocolsettings.method` is one of {', '.join(METHODS)}, got {settings['method']!r}"
        )
    headers = settings.get("headers", {})
    if not isinstance(headers, dict) or not _texts([*headers, *headers.values()]):
        raise _invalid("`protocolsettings.headers` is an object of texts")
    if any(c < " " or c > "~" for text in headers.values() for c in text):
        raise _invalid("headers are printable ASCII")
    for name in headers:
        if not HEADER_NAME.fullmatch(name) or name.lower() in RESERVED_HEADERS:
            raise _invalid(f"{name!r} is no header that a subscription may set")


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _invalid(message: str) -> RequestError:
    return RequestError(400, "invalid-subscription", message)
