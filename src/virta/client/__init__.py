"""Clients of the server: `Client` blocks, `AsyncClient` awaits; both resume where they were cut off."""

from __future__ import annotations

from virta.client.aio import AsyncClient
from virta.client.frames import Received
from virta.client.sync import Client

__all__ = ["AsyncClient", "Client", "Received"]
