"""
Problem documents (RFC 9457), the body of every HTTP error, and the pages that those of the journal link to.

`virta serve` serves the pages at `/problems/CODE`: what each error code of the journal means, for people.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

PATH = "/problems/"

EXPLANATIONS = {
    "already-exists": "The key, or a newer version of it, already exists. Send `overwrite`, or choose another key.",
    "bad-cursor": "The cursor was not given by this journal, or belongs to another query. Start the query again without one.",
    "bad-flags": "A flag or field has no meaning for this function. Leave it out.",
    "bad-priority": "Priorities are whole numbers from 0 to 255; the smallest comes first.",
    "bad-query": "This kind of query has no meaning here. Use a key, a range, a pattern or a cursor, as documented for the route.",
    "bad-regex": "The pattern is too long, or not one that RE2 and Python's `re` both understand.",
    "bad-request": "The body or a parameter of the request is missing, malformed, or contradicts another.",
    "bad-settings": "A setting of a domain or an administrative request has a wrong name or value.",
    "bad-uri": "The uri of a job is empty, too long, or has no host to take the domain from.",
    "clock-skew": "The command's timestamp is more than 300 s ahead of the daemon's clock. Correct the clock that made it.",
    "disk": "The disk refused to write, so nothing was stored. Free some space or repair the disk, then repeat the request.",
    "does-not-exist": "There is no such key, job, domain or schedule.",
    "forbidden": "The credential has no right to this. In the journal, keys and administration need rights to all names.",
    "key-missing": "The request names no key.",
    "locked": "Another client has the lock. Wait until it is released or expires.",
    "method-not-allowed": "The route exists, but not with this method; the header `Allow` lists those that do.",
    "no-copies": "Too few other daemons have confirmed the change in time. It is stored here; repeat it to be sure of the copies.",
    "not-owner": "The job or lock belongs to another client, or its deadline has passed.",
    "not-primary": "Another daemon has to answer this.",
    "not-yet": "The version that this refers to has not arrived yet. Repeat the request later.",
    "out-of-memory": "The journal has reached --memory-bytes-max or --jobs-max. Delete or finish something, or raise the limit.",
    "overflow": "The result, a time or a count does not fit a message.",
    "shutting-down": "The daemon is stopping. Repeat the request when it runs again.",
    "too-large": "A key, uri, value or payload is over its limit.",
    "type-mismatch": "The stored value has another type than the operation needs.",
    "unauthorized": "A token or another credential is required, and the given one is missing, unknown or expired.",
    "unknown-function": "There is no such route or function.",
    "value-missing": "The request needs a value and has none.",
    "version": "The message is of a protocol version that this daemon does not speak.",
    "worked-on": "A worker has this job right now. Wait until it is done, given back, or its deadline passes.",
}


def link(code: str) -> str:
    """Return the `type` of a problem document (RFC 9457): a page about the code, if there is one."""
    return PATH + code if code in EXPLANATIONS else "about:blank"


def document(code: str, status: int, message: str) -> dict[str, Any]:
    """Return the members that every problem document has; `message` is `detail`."""
    return {
        "type": link(code),
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": message,
        "code": code,
        "message": message,
    }


def page(code: str, status: int) -> str | None:
    """Return the text of a code's page; None for a code that does not exist."""
    text = EXPLANATIONS.get(code)
    return None if text is None else f"{code} (HTTP status {status})\n\n{text}\n"
