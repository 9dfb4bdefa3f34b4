"""
The journal for any language: requests in, JSON answers out, no transport.

`await Handler(node).handle(method, path, query, body)` answers `/journal/keys/…` and `/journal/jobs/…`;
whoever has a socket mounts it. Everything goes through the same engine as the binary protocol.
Invariant: bad input is a problem document (RFC 9457) with the journal's error code, never an exception;
an answer to a change that must survive comes after it is on disk.

Locks and listening need a connection and so are not here; `wait` of a NEXT takes the place of listening.
"""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from virta.journal import commands
from virta.journal.admin import CRON_PREFIX, DOMAIN_PREFIX
from virta.journal.commands import Command, Next, to_plain
from virta.journal.messages import DETAILS, RefusedError, Type, Value, system_clock
from virta.journal.rules import check_numbers
from virta.journal.session import Session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from virta.journal.node import Node

BODY_BYTES_MAX = 12 * 1024 * 1024  # the largest value as base64 in JSON
WAIT_S_MAX = 60.0
PAGE_KEYS_MAX = 1_000

STATUS = {
    "does-not-exist": 404,
    "unknown-function": 404,
    "method-not-allowed": 405,
    "already-exists": 409,
    "worked-on": 409,
    "locked": 409,
    "not-owner": 409,
    "too-large": 413,
    "out-of-memory": 507,
    "disk": 503,
    "not-primary": 503,
    "shutting-down": 503,
    "no-copies": 503,
}


class Response(msgspec.Struct):
    status: int
    body: bytes
    content_type: str = "application/json"


class SetBody(msgspec.Struct, forbid_unknown_fields=True):
    value: Any
    overwrite: bool = True
    persist: bool = True
    expires: float | None = None
    ttl: float | None = None


class KeyActionBody(msgspec.Struct, forbid_unknown_fields=True):
    amount: int | float = 1
    size: int = 0
    to: str = ""
    overwrite: bool = False


class PushBody(msgspec.Struct, forbid_unknown_fields=True):
    uri: str
    domain: str = ""
    priority: int = 0
    start: float | None = None
    delay: float = 0
    payload: Any = None
    persist: bool = True


class NextBody(msgspec.Struct, forbid_unknown_fields=True):
    domain: str = ""
    count: int = 1
    work_for: float | None = None
    remove: bool = False
    wait: float = 0


class JobBody(msgspec.Struct, forbid_unknown_fields=True):
    key: str = ""
    uri: str = ""
    domain: str = ""
    reason: str = ""
    seconds: float = 60.0
    delay: float | None = None
    limit: int = 100


class Handler:
    def __init__(self, node: Node, prefix: str = "/journal") -> None:
        self._node = node
        self._prefix = prefix
        self._session = Session()

    async def handle(
        self,
        method: str,
        path: str,
        query: str | Mapping[str, str] = "",
        body: bytes = b"",
        content_type: str = "application/json",
    ) -> Response:
        """Answer one request; `path` is still percent-encoded, so that keys may hold slashes."""
        pairs = (
            parse_qsl(query, keep_blank_values=True) if isinstance(query, str) else query.items()
        )
        arguments = {name: value for name, value in pairs if value or name == "raw"}
        try:
            _check_size(body)
            return await self._route(method, path, arguments, body, content_type)
        except RefusedError as refused:
            return _problem(refused)
        except (ValueError, msgspec.ValidationError, msgspec.DecodeError) as error:
            return _problem(RefusedError("bad-request", str(error)[:300]))

    async def _route(
        self, method: str, path: str, arguments: dict[str, str], body: bytes, content_type: str
    ) -> Response:
        rest = path.removeprefix(self._prefix)
        if rest.startswith("/keys/") and len(rest) > len("/keys/"):
            return await self._key(method, rest[len("/keys/") :], arguments, body, content_type)
        if rest in ("/keys", "/keys/"):
            _only(method, "GET")
            return _json(await self._page(arguments))
        if rest in ("/stats", "/jobs/stats"):
            _only(method, "GET")
            return _json(await self._admin("stats", domain=arguments.get("domain", "")))
        if rest in ("/jobs", "/jobs/"):
            return await self._jobs(method, arguments, body)
        if rest.startswith(("/jobs/domains/", "/jobs/recurring/")):
            return await self._setting(method, rest, body)
        if rest.startswith("/jobs/"):
            return await self._job_action(method, rest[len("/jobs/") :], arguments, body)
        raise RefusedError("unknown-function", f"nothing at {path[:100]}")

    # Keys.

    async def _key(
        self, method: str, name: str, arguments: dict[str, str], body: bytes, content_type: str
    ) -> Response:
        if method == "POST":
            name, _, action = name.rpartition("/")
            return await self._key_action(unquote_to_bytes(name), action, body)
        key = unquote_to_bytes(name)
        if method == "GET":
            return await self._get(key, raw="raw" in arguments)
        if method == "PUT":
            command = _set_command(key, arguments, body, content_type)
            return _json({"key": _text(key), "timestamp": await self._call(command)})
        _only(method, "DELETE")
        complete = arguments.get("complete", "") in ("1", "true")
        deleted = await self._call(commands.delete(key, complete=complete))
        return _json({"key": _text(key), "deleted": deleted})

    async def _get(self, key: bytes, *, raw: bool) -> Response:
        value, details, timestamp = await self._call(_get_command(key))
        if raw:
            kind = "text/plain; charset=utf-8" if value.type == Type.STRING else None
            return Response(200, value.data, kind or "application/octet-stream")
        return _json(
            {
                "key": _text(key),
                "type": Type(value.type).name.lower(),
                "value": _plain(value),
                "timestamp": timestamp,
                "expires": details.expires / 1e6 if details.expires else None,
                "ttl": details.ttl / 1e6 if details.ttl else None,
                "persist": bool(details.bits & 1),
                "locked": bool(details.bits & 2),
            }
        )

    async def _key_action(self, key: bytes, action: str, body: bytes) -> Response:
        given = _decoded(body, KeyActionBody)
        actions: dict[str, Callable[[], Command[Any]]] = {
            "add": lambda: commands.add(key, given.amount),
            "not": lambda: commands.invert(key),
            "truncate": lambda: commands.truncate(key, given.size),
            "rename": lambda: commands.rename(key, given.to, overwrite=given.overwrite),
            "link": lambda: commands.link(key, given.to),
            "unlink": lambda: commands.unlink(key),
        }
        if action not in actions:
            raise RefusedError("unknown-function", f"a key has no action {action[:40]!r}")
        return _json({"key": _text(key), "result": await self._call(actions[action]())})

    async def _page(self, arguments: dict[str, str]) -> dict[str, Any]:
        count = min(_number(arguments, "count", 100), PAGE_KEYS_MAX)
        if "cursor" in arguments:
            command = commands.more(_cursor(arguments["cursor"]))
        elif "regex" in arguments:
            command = commands.search(arguments["regex"], count=count)
        else:
            lower = arguments.get("from", arguments.get("prefix", "")).encode()
            upper = arguments.get("to", "").encode()
            if "prefix" in arguments and not upper:
                upper = _prefix_end(arguments["prefix"].encode())
            command = commands.scan(lower, upper, count=count)
        page = await self._call(command)
        cursor = None if page.cursor is None else base64.urlsafe_b64encode(page.cursor).decode()
        items = [{"key": _text(key), "value": _shown(value)} for key, value in page.items]
        return {"keys": items, "cursor": cursor}

    # Jobs.

    async def _jobs(self, method: str, arguments: dict[str, str], body: bytes) -> Response:
        if method == "GET":
            fields: dict[str, Any] = {
                name: arguments[name] for name in ("domain", "state") if name in arguments
            }
            fields |= {"limit": _number(arguments, "limit", 100)}
            fields |= {"offset": _number(arguments, "offset", 0)}
            return _json(await self._admin("list", **fields))
        _only(method, "POST")
        given = _decoded(body, PushBody)
        timestamp = await self._call(
            commands.push(
                given.uri,
                domain=given.domain,
                priority=given.priority,
                start=given.start,
                delay=given.delay,
                payload=None if given.payload is None else _from_json(given.payload),
                persist=given.persist,
            )
        )
        return _json({"uri": given.uri, "timestamp": timestamp}, status=201)

    async def _job_action(
        self, method: str, action: str, arguments: dict[str, str], body: bytes
    ) -> Response:
        if action == "show":
            _only(method, "GET")
            named = {name: arguments[name] for name in ("uri", "key") if name in arguments}
            return _json(await self._admin("show", **named))
        if action == "next":
            _only(method, "POST")
            return _json(await self._next(_decoded(body, NextBody)))
        given = _decoded(body, JobBody)
        key = given.key.encode()
        group = {"uri": given.uri, "domain": given.domain, "limit": given.limit}
        actions: dict[str, Callable[[], Awaitable[Any]]] = {
            "done": lambda: self._call(commands.done(key)),
            "extend": lambda: self._call(commands.extend(key, given.seconds)),
            "give-back": lambda: self._call(commands.give_back(key)),
            "fail": lambda: self._call(commands.fail(key, given.reason, delay=given.delay)),
            "kick": lambda: self._admin("kick", **group),
            "requeue": lambda: self._admin("requeue", **group),
            "drop": lambda: self._admin("drop", **group),
        }
        if action not in actions:
            raise RefusedError("unknown-function", f"jobs have no action {action[:40]!r}")
        _only(method, "POST")
        result = await actions[action]()
        return _json(result if isinstance(result, dict) else {"result": result})

    async def _next(self, given: NextBody) -> dict[str, Any]:
        """Jobs, waiting for them if asked to, woken as a listening connection would be."""
        woken = asyncio.Event()
        session = Session(lambda _: woken.set())
        deadline = asyncio.get_running_loop().time() + min(max(given.wait, 0.0), WAIT_S_MAX)
        try:
            while True:
                woken.clear()
                command = commands.next_(
                    given.domain,
                    count=min(max(given.count, 1), 1000),
                    work_for=given.work_for,
                    remove=given.remove,
                    listen=given.wait > 0,
                )
                found = await self._call(command, session)
                left = deadline - asyncio.get_running_loop().time()
                if found.jobs or left <= 0:
                    return _next_view(found)
                if found.wake_up is not None:
                    left = min(left, max(found.wake_up - system_clock() / 1e6, 0.001))
                try:
                    await asyncio.wait_for(woken.wait(), left)
                except TimeoutError:
                    continue
        finally:
            self._node.engine.close(session)

    async def _setting(self, method: str, rest: str, body: bytes) -> Response:
        """Settings of a domain and recurring jobs: JSON values under their own keys."""
        _, kind, name = rest[1:].split("/", 2)
        prefix = DOMAIN_PREFIX if kind == "domains" else CRON_PREFIX
        key = prefix + unquote_to_bytes(name)
        if method == "GET":
            value, _, _ = await self._call(_get_command(key))
            return Response(200, value.data)
        if method == "PUT":
            await self._call(commands.set_(key, Value(Type.STRING, body)))
            return Response(200, body)
        _only(method, "DELETE")
        return _json({"deleted": await self._call(commands.delete(key))})

    # The engine.

    async def _call(self, command: Command[Any], session: Session | None = None) -> Any:
        check_numbers(command.request)
        reply = await self._node.submit(command.request, session or self._session)
        return command.result(reply)

    async def _admin(self, do: str, **fields: Any) -> Any:
        return await self._call(commands.admin(do, **fields))


def _check_size(body: bytes) -> None:
    if len(body) > BODY_BYTES_MAX:
        raise RefusedError("too-large", f"a body of {len(body)} bytes, at most {BODY_BYTES_MAX}")


def _get_command(key: bytes) -> Command[Any]:
    command = commands.get(key)
    command.request.flags |= DETAILS
    return Command(
        command.request,
        lambda reply: (
            reply.pair.value if reply.pair else None,
            reply.pair.details if reply.pair else None,
            reply.timestamp,
        ),
    )


def _set_command(
    key: bytes, arguments: dict[str, str], body: bytes, content_type: str
) -> Command[int]:
    """JSON says everything; any other body is the value itself, with options in the query."""
    if content_type.partition(";")[0].strip() == "application/json":
        given = msgspec.json.decode(body, type=SetBody)
        return commands.set_(
            key,
            _from_json(given.value),
            overwrite=given.overwrite,
            persist=given.persist,
            expires=given.expires,
            ttl=given.ttl,
        )
    kind = Type.STRING if content_type.startswith("text/") else Type.BUFFER
    options = {
        name: arguments.get(name, "1") not in ("0", "false") for name in ("overwrite", "persist")
    }
    expires = float(arguments["expires"]) if "expires" in arguments else None
    ttl = float(arguments["ttl"]) if "ttl" in arguments else None
    return commands.set_(key, Value(kind, body), expires=expires, ttl=ttl, **options)


def _decoded(body: bytes, kind: type[Any]) -> Any:
    return msgspec.json.decode(body or b"{}", type=kind)


def _from_json(plain: Any) -> Value:
    """Plain JSON values by their type, `{"base64": …}` as bytes, anything else as its JSON text."""
    if isinstance(plain, dict) and plain.keys() == {"base64"}:
        return Value(Type.BUFFER, base64.b64decode(plain["base64"], validate=True))
    if isinstance(plain, dict | list):
        return Value(Type.STRING, msgspec.json.encode(plain))
    return commands.to_value(plain)


def _plain(value: Value) -> Any:
    return _shown(to_plain(value))


def _shown(plain: Any) -> Any:
    if isinstance(plain, str):
        try:
            plain.encode()
        except UnicodeEncodeError:
            plain = plain.encode(errors="surrogateescape")
    return {"base64": base64.b64encode(plain).decode()} if isinstance(plain, bytes) else plain


def _next_view(found: Next) -> dict[str, Any]:
    return {
        "jobs": [
            {
                "key": _text(job.key),
                "uri": _text(job.uri),
                "payload": _shown(job.payload),
                "deadline": job.deadline or None,  # removed: there is none
                "attempts": job.attempts,
            }
            for job in found.jobs
        ],
        "wake_up": found.wake_up,
    }


def _number(arguments: dict[str, str], name: str, default: int) -> int:
    text = arguments.get(name, str(default))
    if not text.isdecimal():
        raise RefusedError("bad-request", f"{name} {text[:40]!r} is not a number")
    return int(text)


def _cursor(text: str) -> bytes:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError as error:
        raise RefusedError("bad-cursor", "it was not given by this journal") from error


def _prefix_end(prefix: bytes) -> bytes:
    """The first key after all keys with a prefix; empty if there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,)) if stripped else b""


def _text(key: bytes) -> str:
    return key.decode(errors="replace")


def _only(method: str, allowed: str) -> None:
    if method != allowed:
        raise RefusedError(
            "method-not-allowed", f"{method[:20]} is not possible here, {allowed} is"
        )


def _json(content: Any, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(content))


def _problem(refused: RefusedError) -> Response:
    status = STATUS.get(refused.code, 400)
    body = {
        "type": f"/docs/journal#{refused.code}",
        "title": refused.code,
        "status": status,
        "code": refused.code,
        "detail": refused.message,
    }
    return Response(status, msgspec.json.encode(body), "application/problem+json")
