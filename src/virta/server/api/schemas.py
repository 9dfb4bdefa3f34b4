"""The shapes of what goes over the wire, shared by `/openapi.json` and `/asyncapi.json`."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

HEX_ID = "^[0-9a-f]{64}$"
# One control character alone is a topic of the log's own.
CHANNEL_NAME = {"type": "string", "pattern": r"^([^\x00-\x1f]|[^\x00]{2,})$"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


PIPELINE_STATES = [
    *("never run", "starting", "running", "waiting", "finished"),
    *("stopping", "stopped", "failed", "lost", "invalid"),
]
SCHEMAS: dict[str, Schema] = {
    "Refusal": {
        "type": "object",
        "required": ["code"],
        "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
    },
    "Accepted": {
        "type": "object",
        "required": ["code"],
        "properties": {"code": {"const": "accepted"}},
    },
    "Event": {
        "type": "object",
        "description": "A CloudEvent; members beside `source` and `id` are kept, not judged.",
        "required": ["source", "id"],
        "properties": {
            "specversion": {},
            "source": {"type": "string"},
            "id": {"type": ["string", "number"]},
            "type": {},
            "data": {},
        },
    },
    "Message": {
        "type": "object",
        "required": ["publish_to", "payload"],
        "properties": {
            "publish_to": {"type": "string", "pattern": ":[^:]|[^:]:"},
            "payload": {"type": "string"},
        },
    },
    "Filter": {
        "type": "object",
        "description": "A Koncorde filter, or `filter` and `dialect`.",
        "properties": {
            "filter": {},
            "dialect": {"enum": ["koncorde", "query-string", "cesql", "cloudevents"]},
        },
    },
    "Registered": {
        "type": "object",
        "required": ["id", "diff"],
        "properties": {"id": {"type": "string"}, "diff": {"type": ["object", "boolean"]}},
    },
    "Ids": {
        "type": "object",
        "required": ["ids"],
        "properties": {"ids": {"type": "array", "items": {"type": "string"}}},
    },
    "Valid": {
        "type": "object",
        "required": ["valid", "id", "canonical"],
        "properties": {"valid": {"const": True}, "id": {"type": "string"}, "canonical": {}},
    },
    "Description": {
        "type": "object",
        "required": ["id", "index", "collection", "dialect", "filter"],
    },
    "Subscription": {
        "type": "object",
        "required": ["sink", "config"],
        "properties": {
            "sink": {"type": "string"},
            "protocol": {"const": "HTTP"},
            "protocolsettings": {
                "type": "object",
                "properties": {
                    # Write-only: answers show `true`, which keeps the value when it is put back.
                    "headers": {
                        "type": "object",
                        "additionalProperties": {"anyOf": [{"type": "string"}, {"const": True}]},
                    },
                    "method": {"enum": ["POST", "PUT", "PATCH"]},
                },
            },
            "config": {
                "type": "object",
                "required": ["channel"],
                "properties": {
                    "channel": CHANNEL_NAME,
                    "from": {"type": ["string", "integer"]},
                },
            },
            "filters": {"type": "array", "items": {"type": "object"}},
            "types": {"type": "array", "items": {"type": "string"}},
            "source": {"type": "string"},
        },
    },
    "ChannelPage": {
        "type": "object",
        "required": ["channels", "next"],
        "properties": {
            "channels": {"type": "array", "items": ref("Channel")},
            "next": {"type": ["string", "null"], "description": "`after` of the next page."},
        },
    },
    "Channel": {
        "type": "object",
        "required": ["name", "records", "bytes", "subscribers"],
        "properties": {
            "name": {"type": "string"},
            "records": {"type": "integer"},
            "bytes": {"type": "integer", "description": "Of keys and values."},
            "firstOffset": {"type": ["integer", "null"]},
            "firstTime": {"type": ["string", "null"]},
            "lastOffset": {"type": ["integer", "null"]},
            "lastTime": {"type": ["string", "null"]},
            "subscribers": {"type": "integer"},
        },
    },
    "Pipeline": {
        "type": "object",
        "required": ["pipeline", "state", "queries"],
        "properties": {
            "pipeline": {"type": "string"},
            "description": {"type": "string"},
            "state": {"enum": PIPELINE_STATES},
            "pid": {"type": ["integer", "null"]},
            "updated": {"type": ["number", "null"]},
            "reason": {"type": ["string", "null"]},
            "restarts": {"type": "integer"},
            "log": {"type": ["string", "null"]},
            "rows": {"type": "number"},
            "rows_per_second": {"type": "number"},
            "late": {"type": "integer"},
            "repeats": {"type": "integer"},
            "dead": {"type": "integer"},
            "lag": {"type": ["integer", "null"]},
            "batch": {"type": "integer"},
            "queries": {"type": "object"},
        },
    },
    "Test": {
        "type": "object",
        "anyOf": [{"required": ["event"]}, {"required": ["document"]}],
        "properties": {
            "document": {},
            "documentId": {"type": ["string", "null"]},
            "event": {"type": "object"},
        },
    },
}
