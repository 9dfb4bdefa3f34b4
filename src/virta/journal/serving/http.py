"""
The journal for any language: requests in, JSON answers out, no transport.

`await Handler(node).handle(method, path, query, body)` answers `/journal/keys/…` and `/journal/jobs/…` for an
HTTP server. Everything goes through the same engine as the binary protocol.
Invariant: bad input is a problem document (RFC 9457) with the journal's error code, never an exception;
an answer to a change that must survive comes after it is on disk.

Locks and listening need a connection and so are not here; `wait` of a NEXT takes the place of listening.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import msgspec

from virta.clock import now_us
from virta.journal.admin import CRON_PREFIX, DOMAIN_PREFIX, NESTED
from virta.journal.protocol import commands, problems
from virta.journal.protocol.commands import Command, DetailedValue, Next
from virta.journal.protocol.messages import RefusedError, Type, Value
from virta.journal.protocol.rules import check_limits
from virta.journal.serving import bodies
from virta.journal.serving.bodies import shown, shown_name
from virta.journal.sessions import Session

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from virta.journal.protocol.messages import Request
    from virta.journal.serving.commit_loop import CommitLoop

BODY_BYTES_MAX = 12 * 1024 * 1024  # the largest value as base64 in JSON
WAIT_S_MAX = 60.0
PAGE_KEYS_MAX = 1_000

STATUS = {
    "does-not-exist": 404,
    "unknown-function": 404,
    "unauthorized": 401,
    "forbidden": 403,
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
JOB_KEY_ACTIONS = frozenset({"done", "extend", "give-back", "fail"})
JOB_ACTIONS = JOB_KEY_ACTIONS | {"kick", "requeue", "drop"}


class Response(msgspec.Struct):
    status: int
    body: bytes
    content_type: str = "application/json"
    allow: str = ""  # of a 405: which methods there are


class MethodError(RefusedError):
    """`allow` says which methods there are."""

    def __init__(self, method: str, allowed: tuple[str, ...]) -> None:
        self.allow = ", ".join(allowed)
        super().__init__(
            "method-not-allowed", f"{method[:20]!r} is not possible here, {self.allow} is"
        )


class Handler:
    def __init__(
        self,
        node: CommitLoop,
        prefix: str = "/journal",
        *,
        check: Callable[[Request], RefusedError | None] | None = None,
    ) -> None:
        self._node = node
        self._prefix = prefix
        self._session = Session()
        self._session.check = check

    async def handle(
        self,
        method: str,
        path: str,
        query: str | Mapping[str, str] = "",
        body: bytes = b"",
        content_type: str = "application/json",
        *,
        disconnected: asyncio.Event | None = None,
    ) -> Response:
        """
        Answer one request; `path` is still percent-encoded, so that keys may contain slashes.

        `disconnected` is set when the client has left or the server stops: no job is reserved then.
        """
        arguments = bodies.query_arguments(query) if isinstance(query, str) else dict(query)
        if method == "HEAD":
            method = "GET"  # the transport leaves the body out
        try:
            _check_size(body)
            if path.removeprefix(self._prefix) == "/jobs/next":
                _require_method(method, "POST")
                given = bodies.decoded(body, bodies.NextBody)
                return _json_response(await self._next(given, disconnected or asyncio.Event()))
            return await self._route(method, path, arguments, body, content_type)
        except RefusedError as refused:
            return _refusal_response(refused, path)
        except (ValueError, msgspec.ValidationError, msgspec.DecodeError) as error:
            return _refusal_response(RefusedError("bad-request", str(error)[:300]), path)
        except RecursionError:
            # How deeply nested JSON can be read or written depends on the depth of the call stack.
            return _refusal_response(RefusedError("bad-request", NESTED), path)

    async def _route(
        self, method: str, path: str, arguments: dict[str, str], body: bytes, content_type: str
    ) -> Response:
        rest = path.removeprefix(self._prefix)
        if rest.startswith("/keys/") and len(rest) > len("/keys/"):
            return await self._key(method, rest[len("/keys/") :], arguments, body, content_type)
        if rest in ("/keys", "/keys/"):
            _require_method(method, "GET")
            return _json_response(await self._page(arguments))
        if rest in ("/stats", "/jobs/stats"):
            _require_method(method, "GET")
            return _json_response(await self._admin("stats", domain=arguments.get("domain", "")))
        if rest in ("/jobs", "/jobs/"):
            return await self._jobs(method, arguments, body)
        if rest == "/jobs/recurring":
            _require_method(method, "GET")
            return _json_response(await self._admin("recurring"))
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
            name, slash, action = name.rpartition("/")
            if not slash:
                raise MethodError(method, ("GET", "PUT", "DELETE"))
            return await self._key_action(unquote_to_bytes(name), action, body)
        key = unquote_to_bytes(name)
        if method == "GET":
            return await self._get(key, raw="raw" in arguments)
        if method == "PUT":
            command = bodies.set_command(key, arguments, body, content_type)
            return _json_response({"key": shown_name(key), "timestamp": await self._call(command)})
        if method != "DELETE":
            raise MethodError(method, ("GET", "PUT", "DELETE"))
        complete = bodies.flag(arguments, "complete")
        deleted = await self._call(commands.delete(key, complete=complete))
        return _json_response({"key": shown_name(key), "deleted": deleted})

    async def _get(self, key: bytes, *, raw: bool) -> Response:
        value, details, timestamp = await self._detailed(key)
        if raw:
            kind = "text/plain; charset=utf-8" if value.type == Type.STRING else None
            return Response(200, value.data, kind or "application/octet-stream")
        return _json_response(
            {
                "key": shown_name(key),
                "type": Type(value.type).name.lower(),
                "value": bodies.shown_value(value),
                "timestamp": timestamp,
                "expires": details.expires / 1e6 if details.expires else None,
                "ttl": details.ttl / 1e6 if details.ttl else None,
                "persist": bool(details.bits & 1),
                "locked": bool(details.bits & 2),
            }
        )

    async def _key_action(self, key: bytes, action: str, body: bytes) -> Response:
        given = bodies.decoded(body, bodies.KeyActionBody)
        if action == "truncate" and given.size is None:
            raise RefusedError("bad-request", "truncate needs the size to cut to")
        if action == "add":
            return _json_response(
                {"key": shown_name(key), "result": await self._add(key, given.amount)}
            )
        to = bodies.named(given.to)
        actions: dict[str, Callable[[], Command[Any]]] = {
            "not": lambda: commands.invert(key),
            "truncate": lambda: commands.truncate(key, given.size),
            "rename": lambda: commands.rename(key, to, overwrite=given.overwrite),
            "link": lambda: commands.link(key, to),
            "unlink": lambda: commands.unlink(key),
        }
        if action not in actions:
            raise RefusedError("unknown-function", f"a key has no action {action[:40]!r}")
        return _json_response(
            {"key": shown_name(key), "result": await self._call(actions[action]())}
        )

    async def _add(self, key: bytes, amount: float) -> Any:
        """Add to a number that is persistent by default; ADD alone creates one in memory only."""
        zero, add = commands.set_(key, type(amount)(0), overwrite=False), commands.add(key, amount)
        check_limits(add.request)
        # Submitted together: a DELETE between the two would leave a number in memory only.
        _, reply = await asyncio.gather(
            *(self._node.submit(command.request, self._session) for command in (zero, add))
        )
        return add.result(reply)

    async def _page(self, arguments: dict[str, str]) -> dict[str, Any]:
        count = min(bodies.number(arguments, "count", 100), PAGE_KEYS_MAX)
        if arguments.get("cursor"):
            again = count if "count" in arguments else None
            command = commands.more(bodies.cursor(arguments["cursor"]), count=again)
        elif arguments.get("regex"):
            command = commands.search(bodies.argument(arguments, "regex"), count=count)
        else:
            prefix = bodies.argument(arguments, "prefix")
            lower, upper = (bodies.argument(arguments, name) for name in ("from", "to"))
            command = commands.scan(max(lower, prefix), upper or _prefix_end(prefix), count=count)
        page = await self._call(command)
        cursor = None if page.cursor is None else base64.urlsafe_b64encode(page.cursor).decode()
        items = [{"key": shown_name(key), "value": shown(value)} for key, value in page.items]
        return {"keys": items, "cursor": cursor}

    # Jobs.

    async def _jobs(self, method: str, arguments: dict[str, str], body: bytes) -> Response:
        if method == "GET":
            fields: dict[str, Any] = {
                name: arguments[name] for name in ("domain", "state") if arguments.get(name)
            }
            fields |= {"limit": bodies.number(arguments, "limit", 100)}
            fields |= {"offset": bodies.number(arguments, "offset", 0)}
            return _json_response(await self._admin("list", **fields))
        if method != "POST":
            raise MethodError(method, ("GET", "POST"))
        given = bodies.decoded(body, bodies.PushBody)
        if given.start is not None and given.delay:
            raise RefusedError("bad-request", "start or delay, not both")
        uri = bodies.named(given.uri)
        timestamp = await self._call(
            commands.push(
                uri,
                domain=bodies.named(given.domain),
                priority=given.priority,
                start=given.start,
                delay=given.delay,
                payload=None if given.payload is None else bodies.from_json(given.payload),
                persist=given.persist,
            )
        )
        return _json_response({"uri": shown_name(uri), "timestamp": timestamp}, status=201)

    async def _job_action(
        self, method: str, action: str, arguments: dict[str, str], body: bytes
    ) -> Response:
        if action == "show":
            _require_method(method, "GET")
            named = {name: arguments[name] for name in ("uri", "key") if arguments.get(name)}
            return _json_response(await self._admin("show", **named))
        if action not in JOB_ACTIONS:
            raise RefusedError("unknown-function", f"jobs have no action {action[:40]!r}")
        _require_method(method, "POST")
        given = bodies.decoded(body, bodies.JobBody)
        bodies.seconds("seconds", given.seconds)
        key = bodies.job_key(given.key) if action in JOB_KEY_ACTIONS else b""
        group = {"uri": given.uri, "domain": given.domain, "limit": given.limit}
        actions: dict[str, Callable[[], Awaitable[Any]]] = {
            "done": lambda: self._call(commands.done(key)),
            "extend": lambda: self._call(commands.extend(key, given.seconds)),
            "give-back": lambda: self._call(commands.give_back(key)),
            "fail": lambda: self._call(_fail_command(key, given)),
            "kick": lambda: self._admin("kick", **group),
            "requeue": lambda: self._admin("requeue", **group),
            "drop": lambda: self._admin("drop", **group),
        }
        result = await actions[action]()
        return _json_response(result if isinstance(result, dict) else {"result": result})

    async def _next(self, given: bodies.NextBody, disconnected: asyncio.Event) -> dict[str, Any]:
        """Reserve jobs; wait for them if requested, woken as a listening connection would be."""
        woken = asyncio.Event()
        session = Session(lambda _: woken.set())
        session.check = self._session.check
        bodies.seconds("work_for", given.work_for)
        leaving = asyncio.create_task(disconnected.wait())
        deadline = asyncio.get_running_loop().time() + min(max(given.wait, 0.0), WAIT_S_MAX)
        try:
            while True:
                woken.clear()
                command = commands.next_(
                    bodies.named(given.domain),
                    count=min(max(given.count, 1), 1000),
                    work_for=given.work_for,
                    remove=given.remove,
                    listen=given.wait > 0,
                )
                found = await self._call(command, session)
                if found.jobs and disconnected.is_set() and not given.remove:
                    await self._give_back(found)
                    found = Next([], None)
                left = deadline - asyncio.get_running_loop().time()
                if found.jobs or left <= 0 or disconnected.is_set():
                    return _next_view(found)
                if found.wake_up is not None:
                    left = min(left, max(found.wake_up - now_us() / 1e6, 0.001))
                waking = asyncio.create_task(woken.wait())
                try:
                    await asyncio.wait(
                        {waking, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    waking.cancel()
                if disconnected.is_set():
                    return _next_view(Next([], found.wake_up))
        finally:
            leaving.cancel()
            self._node.engine.close(session)

    async def _give_back(self, found: Next) -> None:
        """Return jobs whose client has left; else they would wait for their deadline."""
        for job in found.jobs:
            with contextlib.suppress(RefusedError):
                await self._call(commands.give_back(job.key))

    async def _setting(self, method: str, rest: str, body: bytes) -> Response:
        """Answer for settings of domains and recurring jobs: JSON values under their own keys."""
        _, kind, name = rest[1:].split("/", 2)
        if kind == "domains":
            return await self._domain(method, unquote_to_bytes(name).lower(), body)
        key = CRON_PREFIX + unquote_to_bytes(name)
        if method == "GET":
            return Response(200, (await self._detailed(key)).value.data)
        if method == "PUT":
            await self._call(commands.set_(key, Value(Type.STRING, body)))
            return Response(200, body)
        if method != "DELETE":
            raise MethodError(method, ("GET", "PUT", "DELETE"))
        return _json_response({"deleted": await self._call(commands.delete(key))})

    async def _domain(self, method: str, name: bytes, body: bytes) -> Response:
        """Return all settings of a domain, defaults included; PUT replaces, PATCH changes some."""
        key = DOMAIN_PREFIX + name
        if method == "DELETE":
            return _json_response({"deleted": await self._call(commands.delete(key))})
        if method not in ("GET", "PUT", "PATCH"):
            raise MethodError(method, ("GET", "PUT", "PATCH", "DELETE"))
        if method == "PUT":
            await self._call(commands.set_(key, Value(Type.STRING, body)))
        changes = bodies.parsed(body, dict[str, Any]) if method == "PATCH" else {}
        return _json_response(
            await self._admin("configure", domain=name.decode(), settings=changes)
        )

    # The engine.

    async def _call(self, command: Command[Any], session: Session | None = None) -> Any:
        reply = await self._node.submit(command.request, session or self._session)
        return command.result(reply)

    async def _detailed(self, key: bytes) -> DetailedValue:
        found: DetailedValue | None = await self._call(commands.get_detailed(key))
        if found is None:
            raise RefusedError("does-not-exist")
        return found

    async def _admin(self, do: str, **fields: Any) -> Any:
        return await self._call(commands.admin(do, **fields))


def _fail_command(key: bytes, given: bodies.JobBody) -> Command[Any]:
    return commands.fail(
        key, given.reason, delay=given.delay, traceback=given.traceback, dead=given.dead
    )


def _check_size(body: bytes) -> None:
    if len(body) > BODY_BYTES_MAX:
        raise RefusedError("too-large", f"a body of {len(body)} bytes, at most {BODY_BYTES_MAX}")


def _next_view(found: Next) -> dict[str, Any]:
    return {
        "jobs": [
            {
                "key": shown_name(job.key),
                "uri": shown_name(job.uri),
                "payload": shown(job.payload),
                "deadline": job.deadline or None,  # removed: there is none
                "attempts": job.attempts,
            }
            for job in found.jobs
        ],
        "wake_up": found.wake_up,
    }


def _prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with a prefix; empty if there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes((stripped[-1] + 1,)) if stripped else b""


def _require_method(method: str, allowed: str) -> None:
    if method != allowed:
        raise MethodError(method, (allowed,))


def _json_response(content: Any, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(content))


def _refusal_response(refused: RefusedError, path: str) -> Response:
    status = STATUS.get(refused.code, 400)
    message = refused.message
    if message == refused.code:
        message = f"{path[:200]}: {problems.EXPLANATIONS.get(message, message)}"
    body = problems.document(refused.code, status, message)
    allow = refused.allow if isinstance(refused, MethodError) else ""
    return Response(status, msgspec.json.encode(body), "application/problem+json", allow)
