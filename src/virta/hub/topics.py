"""
Topics the product keeps for itself, beside the users' channels in the same log.

A channel is a topic of its own name. These few names are ours: nobody publishes to them over HTTP.
"""

from __future__ import annotations

RESERVED_PREFIX = "$virta/"
STREAMS = RESERVED_PREFIX + "streams"  # key: stream id, value: the message as receivers see it
DEAD_LETTERS = RESERVED_PREFIX + "dead-letters"  # events no webhook would take; read as a channel
META = "meta"  # Thorium's channel of registrations; made in memory, never in the log


def is_reserved(channel: str) -> bool:
    return channel.startswith(RESERVED_PREFIX)
