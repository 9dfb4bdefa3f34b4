"""Clients of the server: `Client` blocks, `AsyncClient` awaits; both resume where they were cut off."""

from __future__ import annotations

from virta.client.aio import AsyncClient, AsyncLiveRows, AsyncStreamSubscription, AsyncSubscription
from virta.client.calls import Published
from virta.client.frames import Received
from virta.client.live import LiveChange
from virta.client.sync import Client, LiveRows, StreamSubscription, Subscription

__all__ = [
    "AsyncClient",
    "AsyncLiveRows",
    "AsyncStreamSubscription",
    "AsyncSubscription",
    "Client",
    "LiveChange",
    "LiveRows",
    "Published",
    "Received",
    "StreamSubscription",
    "Subscription",
]
