"""Clients of the server: `Client` blocks, `AsyncClient` awaits; both resume where they were cut off."""

from __future__ import annotations

from virta.client.aio import AsyncClient, AsyncStreamSubscription, AsyncSubscription
from virta.client.calls import Published
from virta.client.frames import Received
from virta.client.sync import Client, StreamSubscription, Subscription

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
