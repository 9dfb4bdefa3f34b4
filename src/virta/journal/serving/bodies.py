"""
JSON bodies and query arguments of the HTTP API, and values as JSON.

Invariant: bytes survive the way there and back. What is not UTF-8 is `{"base64": …}`, in keys as in values.
"""

from __future__ import annotations

import base64
import math
import re
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from virta.journal.jobs.job import parse_key
from virta.journal.protocol import commands
from virta.journal.protocol.commands import Command, to_plain
from virta.journal.protocol.messages import RefusedError, Type, Value
from virta.jsontext import check_depth

SET_OPTIONS = ("overwrite", "persist", "expires", "ttl")
# Stricter than `float`: "nan" is no time, and "1_0" a mistake.
_SECONDS = re.compile(r"-?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
FLAGS = {"1": True, "true": True, "0": False, "false": False}


class Base64(msgspec.Struct, forbid_unknown_fields=True):
    base64: str


Name = str | Base64


class SetBody(msgspec.Struct, forbid_unknown_fields=True):
    value: Any
    overwrite: bool = True
    persist: bool = True
    expires: float | None = None
    ttl: float | None = None


class KeyActionBody(msgspec.Struct, forbid_unknown_fields=True):
    amount: int | float = 1
    size: int | None = None
    to: Name = ""
    overwrite: bool = False


class PushBody(msgspec.Struct, forbid_unknown_fields=True):
    uri: Name
    domain: Name = ""
    priority: int = 0
    start: float | None = None
    delay: float = 0
    payload: Any = None
    persist: bool = True


class NextBody(msgspec.Struct, forbid_unknown_fields=True):
    domain: Name = ""
    count: int = 1
    work_for: float | None = None
    remove: bool = False
    wait: float = 0


class JobBody(msgspec.Struct, forbid_unknown_fields=True):
    key: Name = ""
    uri: str = ""
    domain: str = ""
    reason: str = ""
    seconds: float = 60.0
    traceback: str = ""
    delay: float | None = None
    dead: bool = False
    limit: int = 100


# What comes in.


def decoded(body: bytes, kind: type[Any]) -> Any:
    return parsed(body or b"{}", kind)


def parsed(body: bytes, kind: type[Any]) -> Any:
    """Return a JSON body as an object of `kind`; raise ValueError if it is none."""
    check_depth(body)
    return msgspec.json.decode(body, type=kind)


def named(name: Name) -> bytes:
    """Return the bytes of a key, a uri or a domain."""
    return name.encode() if isinstance(name, str) else base64.b64decode(name.base64, validate=True)


def job_key(name: Name) -> bytes:
    """Return the key of a job, as NEXT returned it; refuse anything else."""
    key = named(name)
    if not key:
        raise RefusedError("key-missing", "the key of a job, as next returned it")
    if parse_key(key) is None:
        raise RefusedError("does-not-exist", f"{shown_name(key)!r} is not a key that next returns")
    return key


def seconds(name: str, value: float | None) -> float | None:
    """Refuse a duration of work that is not above 0."""
    if value is not None and value <= 0:
        raise RefusedError("bad-request", f"{name} {value:g}: seconds, more than 0")
    return value


def from_json(plain: Any) -> Value:
    """Return plain JSON values by their type, `{"base64": …}` as bytes, anything else as its JSON text."""
    if isinstance(plain, dict) and plain.keys() == {"base64"}:
        if not isinstance(plain["base64"], str):
            raise RefusedError("bad-request", f"base64 {plain['base64']!r:.60} is not text")
        return Value(Type.BUFFER, base64.b64decode(plain["base64"], validate=True))
    if isinstance(plain, dict | list):
        return Value(Type.STRING, msgspec.json.encode(plain))
    return commands.to_value(plain)


def set_command(
    key: bytes, arguments: dict[str, str], body: bytes, content_type: str
) -> Command[int]:
    """Return the SET of a PUT: JSON has value and options; any other body is the value, options are in the query."""
    kind = content_type.partition(";")[0].strip().lower()
    given = SetBody(None)
    if kind == "application/json":
        for name in SET_OPTIONS:
            if name in arguments:
                raise RefusedError("bad-request", f"{name} belongs into the JSON, not the query")
        given = parsed(body, SetBody)
        value = from_json(given.value)
    else:
        value = Value(Type.STRING if kind.startswith("text/") else Type.BUFFER, body)
        given.overwrite = flag(arguments, "overwrite", default=True)
        given.persist = flag(arguments, "persist", default=True)
        given.expires = _seconds(arguments, "expires")
        given.ttl = _seconds(arguments, "ttl")
    return commands.set_(
        key,
        value,
        overwrite=given.overwrite,
        persist=given.persist,
        expires=given.expires,
        ttl=given.ttl,
    )


# Queries.


def query_arguments(query: str) -> dict[str, str]:
    """
    Return the arguments of a query; bytes that are not UTF-8 are kept as halves of pairs, see `argument`.

    An empty text is the same as none, an empty number or flag is refused where it is read.
    """
    return dict(parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))


def argument(arguments: dict[str, str], name: str, default: str = "") -> bytes:
    return arguments.get(name, default).encode(errors="surrogateescape")


def number(arguments: dict[str, str], name: str, default: int) -> int:
    text = arguments.get(name, str(default))
    if not (text.isascii() and text.isdecimal()):
        raise RefusedError("bad-request", f"{name} {text[:40]!r} is not a number from 0")
    return int(text)


def flag(arguments: dict[str, str], name: str, *, default: bool = False) -> bool:
    text = arguments.get(name)
    if text is None:
        return default
    if text not in FLAGS:
        raise RefusedError("bad-request", f"{name} {text[:40]!r} is not 1, 0, true or false")
    return FLAGS[text]


def _seconds(arguments: dict[str, str], name: str) -> float | None:
    text = arguments.get(name)
    if text is not None and not (text.isascii() and _SECONDS.fullmatch(text)):
        raise RefusedError("bad-request", f"{name} {text!r:.60} is no number of seconds")
    return None if text is None else float(text)


def cursor(text: str) -> bytes:
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except ValueError as error:
        raise RefusedError("bad-cursor", "it was not given by this journal") from error


# What goes out.


def shown(plain: Any) -> Any:
    """Return a value for JSON: bytes and text that is not UTF-8 as base64, nan and infinity as strings."""
    if isinstance(plain, float) and not math.isfinite(plain):
        return str(plain)
    if isinstance(plain, str):
        try:
            plain.encode()
        except UnicodeEncodeError:
            plain = plain.encode(errors="surrogateescape")
    return {"base64": base64.b64encode(plain).decode()} if isinstance(plain, bytes) else plain


def shown_value(value: Value) -> Any:
    return shown(to_plain(value))


def shown_name(key: bytes) -> Any:
    """Return a key or a uri for JSON."""
    return shown(key.decode(errors="surrogateescape"))
