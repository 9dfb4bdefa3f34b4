"""`/asyncapi.json`: the description of streams, over server-sent events and WebSockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virta import __version__
from virta.server.api.description.openapi import Components
from virta.server.api.description.schemas import EventBody, LiveFrame, MessageBody

if TYPE_CHECKING:
    from virta.server.api.description.openapi import Schema

EVENT = (
    "With `$positions=1`, a WebSocket's events have the attribute `virtaposition` and the `id` of "
    "server-sent events is a position: resume with `$last-event-id`."
)
FRAME = (
    "A frame of a live view, as one text of a WebSocket; of server-sent events the name is `event:`, the position `id:`, "
    "and the other members are the data."
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
    frame = {"payload": components.schema(LiveFrame), "description": FRAME}
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
            "live": {
                "address": "/channels/{name}/live",
                "parameters": {"name": {"description": "The channel."}},
                "messages": {"frame": {"$ref": "#/components/messages/frame"}},
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
            "receiveRows": _operation("send", "live", "Rows that enter, change and leave."),
            "receiveStreams": _operation("send", "streams", "Messages of matching streams."),
        },
        "components": {
            "schemas": components.schemas,
            "messages": {"event": event, "message": message, "frame": frame},
        },
    }


def _operation(action: str, channel: str, text: str) -> Schema:
    return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": text}
