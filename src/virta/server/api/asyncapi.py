"""The machine-readable description of what is sent without being asked each time, at `/asyncapi.json`."""

from __future__ import annotations

from virta import __version__
from virta.server.api.schemas import SCHEMAS, Schema


def asyncapi(host: str, *, secure: bool = False) -> Schema:
    """
    Return the AsyncAPI document: server-sent events and WebSockets.

    Args:
        host: name and port by which the client reached the server.
        secure: the server speaks TLS.
    """
    end = "s" if secure else ""
    message = {
        "payload": {"$ref": "#/components/schemas/Message"},
        "description": "With `$positions=1`, `position` is where to continue after it.",
    }
    event = {
        "contentType": "application/cloudevents+json",
        "payload": {"$ref": "#/components/schemas/Event"},
        "description": "With `$positions=1`, a WebSocket's events have the attribute `virtaposition` "
        "and the `id` of server-sent events is a position: resume with `$last-event-id`.",
    }
    channels = {
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
    }

    def operation(action: str, channel: str, text: str) -> Schema:
        return {"action": action, "channel": {"$ref": f"#/channels/{channel}"}, "summary": text}

    return {
        "asyncapi": "3.0.0",
        "info": {"title": "Virta", "version": __version__},
        "servers": {
            "http": {"host": host, "protocol": f"http{end}"},
            "ws": {"host": host, "protocol": f"ws{end}"},
        },
        "channels": channels,
        "operations": {
            "hearChannel": operation("send", "channel", "Events, by SSE or WebSocket."),
            "publishToChannel": operation("receive", "channel", "Events over a WebSocket."),
            "hearStreams": operation("send", "streams", "Messages of matching streams."),
        },
        "components": {"schemas": SCHEMAS, "messages": {"event": event, "message": message}},
    }
