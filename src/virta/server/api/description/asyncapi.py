"""`/asyncapi.json`: the description of streams, over server-sent events and WebSockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta import __version__
from virta.server.api.description.openapi import Components
from virta.server.api.description.schemas import EventBody, MessageBody

if TYPE_CHECKING:
    from virta.server.api.description.openapi import Schema

EVENT = (
    "With `$positions=1`, a WebSocket's events have the attribute `virtaposition` and the `id` of "
    "server-sent events is a position: resume with `$last-event-id`."
)
MESSAGE = "With `$positions=1`, `position` is where to continue after it."


def asyncapi(host: str, *, secure: bool = False) -> Schema:
    """
    Return the whole document.

    Args:
        host: name and port by which the client reached the server.
        secure: whether the server uses TLS.
    """
    end = "s" if secure else ""
    components = Components()
    event = {
        "contentType": "application/cloudevents+json",
        "payload": components.schema(EventBody),
        "description": EVENT,
    }
    message = {"payload": components.schema(MessageBody), "description": MESSAGE}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Virta", "version": __version__},
        "servers": {
            "http": {"host": host, "protocol": f"http{end}"},
            "ws": {"host": host, "protocol": f"ws{end}"},
        },
        "channels": {
            "channel": {
                "address": "/channels/{name}",
                "parameters": {"name": {"description": "The channel."}},
                "messages": {"event": {"$ref": "#/components/messages/event"}},
            },
            "streams": {
                "address": "/subscribe",
                "messages": {"message": {"$ref": "#/components/messages/message"}},
                "bindings": {"ws": {"method": "GET"}},
            },
        },
        "operations": {
            "receiveChannel": _operation("send", "channel", "Events, by SSE or WebSocket."),
            "publishToChannel": _operation("receive", "channel", "Events over a WebSocket."),
            "receiveStreams": _operation("send", "streams", "Messages of matching streams."),
        },
        "components": {
            "schemas": components.schemas,
            "messages": {"event": event, "message": message},
        },
    }


def _operation(action: str, channel: str, text: str) -> Schema:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": text}
