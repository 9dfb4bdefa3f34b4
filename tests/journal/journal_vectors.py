"""Worked messages and job scenarios from the vectors, as structures of the product and as steps to play."""

from __future__ import annotations

import json
from pathlib import Path

from virta.journal.protocol import messages as m
from virta.journal.protocol.messages import Function, Request, Type, Value

DIRECTORY = Path(__file__).parent.parent / "vectors"

VECTORS = [
    json.loads(line)
    for line in (DIRECTORY / "fastjournal-wire-vectors.jsonl").read_text().splitlines()
]


DETAIL_NAMES = {"pflags": "bits"}


def value_of(vector):
    return vector and m.Value(vector["type"], vector["data"].encode("latin-1"))


def request_of(vector):
    fields = dict(vector)
    for name in ("key", "key2"):
        fields[name] = fields.get(name, "").encode("latin-1")
    fields["value"] = value_of(fields.get("value"))
    if fields["query"] == m.QUERY_RANGE:
        fields.setdefault("count", 0)
    return m.Request(**fields)


def pair_of(vector):
    details = vector["details"]
    if details is not None:
        details = m.Details(**{DETAIL_NAMES.get(k, k): v for k, v in details.items()})
    return m.Pair(vector["key"].encode("latin-1"), value_of(vector["value"]), details)


def reply_of(vector):
    fields = dict(vector)
    pairs = [pair_of(pair) for pair in fields.pop("pairs", [])]
    counted = fields.pop("count", None) is not None or fields["query"] == m.QUERY_RANGE
    if "cursor" in fields:
        fields["cursor"] = fields["cursor"].encode("latin-1")
    if counted:
        fields["pairs"] = pairs
    elif pairs:
        fields["pair"] = pairs[0]
    return m.Reply(**fields)


SCENARIOS = [
    json.loads(line)
    for line in (DIRECTORY / "fastjournal-job-vectors.jsonl").read_text().splitlines()
]


def text(data):
    return Value(Type.STRING, data)


def set_(key, data=b"v", flags=m.OVERWRITE, **fields):
    return Request(Function.SET, flags=flags, key=key, value=text(data), **fields)


def get(key, flags=m.DATA, **fields):
    return Request(Function.GET, flags=flags, key=key, **fields)


def delete(key, **fields):
    return Request(Function.DELETE, key=key, **fields)


def push(uri, domain=b"d", priority=0, flags=m.PERSIST, **fields):
    return Request(
        Function.PUSH,
        flags=flags,
        key=uri,
        key2=domain,
        count=priority,
        query=m.QUERY_RANGE,
        **fields,
    )


def next_(domain=b"d", **fields):
    return Request(Function.NEXT, key=domain, **fields)


async def play(step, wire, clock, results):
    """Send one step of a scenario; return the result in the scenario's form."""
    clock.now = step.get("now", clock.now)
    if step["op"] == "push":
        request = push(
            step["uri"].encode(),
            step.get("domain", "").encode(),
            step["prio"],
            timestamp=step["ts"],
            timeout=step["start"],
        )
    elif step["op"] == "next":
        request = next_(
            step.get("domain", "").encode(),
            count=step.get("count"),
            timeout=step.get("until"),
            flags=m.OVERWRITE if step.get("delete") else 0,
        )
    else:
        earlier, index = step["key"][1:].split(".")
        key = results[int(earlier)][int(index)][0].encode()
        request = delete(key) if step["op"] == "delete" else get(key, timeout=step["until"])
    reply = await wire.ask(request)
    if reply.error:
        return reply.error.partition(":")[0]
    if step["op"] != "next":
        return "ok"
    if reply.pairs:
        return [[pair.key.decode(), pair.value.data.decode()] for pair in reply.pairs]
    return "nothing" if reply.timeout is None else ["at", reply.timeout]
