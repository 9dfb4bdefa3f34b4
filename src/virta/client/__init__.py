"""Clients of the server: `Client` blocks, `AsyncClient` awaits; both resume where they were cut off."""

from __future__ import annotations

from virta.client.aio import AsyncClient, AsyncSubscription
from virta.client.frames import Received
from virta.client.streams import AsyncStreamSubscription, StreamSubscription
from virta.client.sync import Client, Subscription
from virta.client.wire import Published

__all__ = [
    "AsyncClient",
    "AsyncStreamSubscription",
    "AsyncSubscription",
    "Client",
    "Published",
    "Received",
    "StreamSubscription",
    "Subscription",
]
