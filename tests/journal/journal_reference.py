"""
The tables of the protocol written down a second time, to compare the journal's own codec and daemon with.

Nothing of the product is used. A message is a dict in the form of the worked messages: `function`,
`identifier`, `timestamp`, `timeout`, `ttl`, `count`, `key`, `key2`, `value`, `query`, and for replies `error`,
`pairs`, `cursor`. `flags` is a list of names. Bytes are Latin-1 text; a value is [type, data]. A field that is
not there is absent or 0; `wide` asks for wider sizes than needed: {"key": 2, "value": 4}.
"""

from __future__ import annotations

FUNCTIONS = ["NOP", "QUIT", "SET", "GET", "DELETE", "ADD", "NOT", "TRUNCATE", "LOCK", "UNLOCK"]
FUNCTIONS += ["RENAME", "NEXT", "PUSH", "LINK", "UNLINK"]
REQUEST_BITS = {
    "touch": 4,
    "overwrite": 5,
    "worked-on": 6,
    "persist": 9,
    "data": 10,
    "listen": 11,
    "bit12": 12,
    "details": 15,
}
REPLY_BITS = {
    "deleted": 4,
    "worked-on": 6,
    "persist": 9,
    "data": 10,
    "notification": 11,
    "locked": 12,
    "bit15": 15,
}
DETAILS = (
    ("expires", 8),
    ("ttl", 8),
    ("created", 8),
    ("modified", 8),
    ("accessed", 8),
    ("worked_until", 8),
    ("size", 4),
    ("attempts", 2),
    ("bits", 1),
    ("zero", 1),
)


def big(number, size):
    return number.to_bytes(size, "big")


def raw(text):
    return text.encode("latin-1")


def key_width(message, texts):
    """2 as soon as one of them does not fit the size of one byte."""
    wide = any(len(text) > 255 for text in texts)
    return max(message.get("wide", {}).get("key", 1), 2 if wide else 1)


def value_width(message, values):
    """One width for all: the smallest that fits type and data of the largest; 0 without values."""
    if not values:
        return 0
    largest = max(len(data) + 1 for _, data in values)
    needed = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    return max(message.get("wide", {}).get("value", 1), needed)


def sized(text, width):
    return big(len(text), width) + raw(text)


def value_bytes(value, width):
    kind, data = value
    return big(len(data) + 1, width) + bytes([kind]) + raw(data)


def named(message, bits):
    return sum(1 << bits[name] for name in message.get("flags", ()))


def head_flags(message, width_of_keys, width_of_values):
    query = message.get("query", 0)
    flags = (width_of_keys == 2) | {0: 0, 1: 1, 2: 2, 4: 3}[width_of_values] << 1
    flags |= ("timeout" in message) << 3 | query << 7
    return flags | ("count" in message and query != 1) << 13


def request_bytes(message):
    """A request, section 2."""
    query = message.get("query", 0)
    keys = [message.get("key", "")] + ([message.get("key2", "")] if query == 1 else [])
    values = [message["value"]] if "value" in message else []
    narrow, width = key_width(message, keys), value_width(message, values)
    flags = named(message, REQUEST_BITS) | head_flags(message, narrow, width)
    flags |= ("ttl" in message) << 14
    function = message["function"]
    number = FUNCTIONS.index(function) if isinstance(function, str) else function
    out = b"FJ" + big(message.get("version", 1), 2) + big(number, 2)
    out += big(message["identifier"], 2) + big(flags, 2) + big(message.get("timestamp", 0), 8)
    for name in ("timeout", "ttl"):
        if name in message:
            out += big(message[name], 8)
    if query == 1 or "count" in message:
        out += big(message.get("count", 0), 2)
    for key in keys:
        out += sized(key, narrow)
    for value in values:
        out += value_bytes(value, width)
    return out


def reply_bytes(message):
    """A reply or a notification, section 3. `count` of pairs follows from them; a lone pair is `pair`."""
    counted = "pairs" in message
    pairs = message["pairs"] if counted else [message["pair"]] if "pair" in message else []
    error, cursor = message.get("error", ""), message.get("cursor")
    narrow = key_width(message, [error, cursor or "", *(pair["key"] for pair in pairs)])
    width = value_width(message, [pair["value"] for pair in pairs if "value" in pair])
    flags = named(message, REPLY_BITS) | head_flags(
        {**message, "count": 1} if counted else message, narrow, width
    )
    flags |= (cursor is not None) << 5 | any("details" in pair for pair in pairs) << 14
    out = b"JR" + big(1, 2) + big(message["identifier"], 2) + big(flags, 2)
    out += big(message["timestamp"], 8)
    if "timeout" in message:
        out += big(message["timeout"], 8)
    if counted:
        out += big(len(pairs), 2)
    out += sized(error, narrow)
    for pair in pairs:
        out += sized(pair["key"], narrow)
        if "details" in pair:
            out += b"".join(big(pair["details"].get(name, 0), size) for name, size in DETAILS)
        if "value" in pair:
            out += value_bytes(pair["value"], width)
    return out if cursor is None else out + sized(cursor, narrow)


class Bytes:
    """What is left of a message that is read."""

    def __init__(self, data):
        self.data = data

    def take(self, size):
        taken, self.data = self.data[:size], self.data[size:]
        assert len(taken) == size, "cut short"
        return taken

    def number(self, size):
        return int.from_bytes(self.take(size), "big")

    def text(self, width):
        return self.take(self.number(width)).decode("latin-1")

    def pair(self, width_of_keys, width_of_values, *, detailed):
        pair = {"key": self.text(width_of_keys)}
        if detailed:
            details = {name: self.number(size) for name, size in DETAILS}
            pair["details"] = {name: value for name, value in details.items() if value}
        if width_of_values:
            size = self.number(width_of_values)
            pair["value"] = [self.number(1), self.take(size - 1).decode("latin-1")]
        return pair


def read_reply(data):
    """The reply the bytes begin with, and the bytes after it."""
    left = Bytes(data)
    assert left.take(4) == b"JR\0\1"
    message = {"identifier": left.number(2)}
    flags = left.number(2)
    message["timestamp"] = left.number(8)
    names = [name for name, bit in REPLY_BITS.items() if flags >> bit & 1]
    if names:
        message["flags"] = names
    query = flags >> 7 & 3
    if query:
        message["query"] = query
    if flags >> 3 & 1:
        message["timeout"] = left.number(8)
    counted = query == 1 or flags >> 13 & 1
    number = left.number(2) if counted else None
    narrow, width = 1 + (flags & 1), (0, 1, 2, 4)[flags >> 1 & 3]
    error = left.text(narrow)
    if error:
        message["error"] = error
    detailed = flags >> 14 & 1
    if counted:
        message["pairs"] = [left.pair(narrow, width, detailed=detailed) for _ in range(number)]
    elif width:
        message["pair"] = left.pair(narrow, width, detailed=detailed)
    if flags >> 5 & 1:
        message["cursor"] = left.text(narrow)
    return message, left.data
