"""
The journal's part of `/openapi.json`; what its bodies may hold is taken from the types that read them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from virta.journal.jobs.domain import STATE_NAMES, Settings
from virta.journal.jobs.recurring import Cron
from virta.journal.serving import bodies
from virta.server.api.schemas import Schema, ref

JSON = "application/json"
PROBLEM = "application/problem+json"
BODIES = (bodies.SetBody, bodies.PushBody, bodies.NextBody, bodies.JobBody, Settings, Cron)
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
TEXT: Schema = {"type": "string"}
NAME: Schema = {"anyOf": [TEXT, ref("Base64")]}
SECONDS: Schema = {"type": ["number", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
# Bodies that say nothing when they are left out.
NEEDED = {ref(name)["$ref"] for name in ("SetBody", "PushBody", "DomainSettings", "RecurringJob")}
FLAG: Schema = {"enum": ["1", "0", "true", "false"]}


def schemas() -> dict[str, Schema]:
    """The components that the paths refer to."""
    _, made = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
    made = {_name(name): shape for name, shape in made.items()}
    key_value = _object({"key": NAME, "value": {}})
    job = {"key": NAME, "uri": NAME, "payload": {}, "deadline": SECONDS, "attempts": INTEGER}
    listed = {
        **dict.fromkeys(("uri", "key", "domain"), TEXT),
        "state": {"enum": [*STATE_NAMES]},
        **dict.fromkeys(("priority", "start", "timestamp", "attempts", "payload_bytes"), INTEGER),
    }
    return made | {
        "Problem": _object(
            {"type": TEXT, "title": TEXT, "status": INTEGER, "code": TEXT, "detail": TEXT}
        ),
        "KeyValue": key_value,
        "HandedOut": _object(
            {"jobs": {"type": "array", "items": _object(job)}, "wake_up": SECONDS}
        ),
        "Job": _object(listed),
    }


def paths() -> dict[str, Schema]:
    return _keys() | _key_actions() | _jobs() | _job_actions() | _settings()


def _name(component: str) -> str:
    """`Settings` alone would say too little among the others."""
    return {"Settings": "DomainSettings", "Cron": "RecurringJob"}.get(component, component)


def _object(members: dict[str, Schema]) -> Schema:
    return {"type": "object", "required": [*members], "properties": members}


def _operation(
    name: str,
    answer: Schema,
    *parameters: Schema,
    body: Schema | None = None,
    status: str = "200",
    **responses: Schema,
) -> Schema:
    """What it answers when all is well, and what any may answer besides."""
    refusal = {JSON: {"schema": ref("Refusal")}}
    problem = {PROBLEM: {"schema": ref("Problem")}}
    said: dict[str, Any] = {
        status: {"description": "Done.", "content": {JSON: {"schema": answer}}},
        "400": {"description": "`code` says what is wrong.", "content": problem | refusal},
        "401": {"description": "A token is needed, or not known.", "content": refusal},
        "403": {"description": "The page's origin is not allowed.", "content": refusal},
        "404": {"description": "There is no such thing.", "content": problem},
        "409": {"description": "What is stored is in the way.", "content": problem},
        "413": {"description": "Too large.", "content": problem | refusal},
        "421": {"description": "The Host is not a name of this server.", "content": refusal},
        "503": {"description": "Not now: the disk, or copies.", "content": problem},
        "507": {"description": "No room.", "content": problem},
    }
    made: Schema = {"operationId": name, "responses": said | responses}
    if parameters:
        made["parameters"] = list(parameters)
    if body is not None:
        needed = body.get("required") or body.get("$ref", "") in NEEDED
        made["requestBody"] = {
            "required": bool(needed),
            "content": {JSON: {"schema": body}},
        }
    return made


def _path(name: str, text: str) -> Schema:
    schema = {"type": "string", "minLength": 1, "pattern": "^[^/]+$"}
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": text}


def _query(name: str, schema: Schema, text: str) -> Schema:
    return {"name": name, "in": "query", "schema": schema, "description": text}


def _keys() -> dict[str, Schema]:
    key = _path("key", "The key, percent-encoded.")
    page = _object(
        {
            "keys": {"type": "array", "items": ref("KeyValue")},
            "cursor": {"type": ["string", "null"]},
        }
    )
    value = _object(
        {"key": NAME, "type": TEXT, "value": {}, "timestamp": INTEGER}
        | {"expires": SECONDS, "ttl": SECONDS, "persist": BOOLEAN, "locked": BOOLEAN}
    )
    get = _operation("getKey", value, key, _query("raw", TEXT, "The bytes, not JSON."))
    get["responses"]["200"]["content"] |= {"text/plain": {}, "application/octet-stream": {}}
    put = _operation(
        "setKey", _object({"key": NAME, "timestamp": INTEGER}), key, body=ref("SetBody")
    )
    deleted = _object({"key": NAME, "deleted": BOOLEAN})
    return {
        "/journal/keys": {
            "get": _operation(
                "listKeys",
                page,
                *(
                    _query(name, TEXT, "Where keys begin and end.")
                    for name in ("prefix", "from", "to")
                ),
                _query("regex", TEXT, "An RE2 pattern found in the key."),
                _query("count", COUNT, "At most so many, and at most 1000."),
                _query("cursor", TEXT, "Of the page before."),
            )
        },
        "/journal/keys/{key}": {
            "get": get,
            "put": put,
            "delete": _operation(
                "deleteKey", deleted, key, _query("complete", FLAG, "Leave no tombstone.")
            ),
        },
    }


def _key_actions() -> dict[str, Schema]:
    key = _path("key", "The key, percent-encoded.")
    amount, size = {"type": "number"}, {"type": "integer", "minimum": 0}
    given: dict[str, Schema] = {
        "add": {"type": "object", "properties": {"amount": amount}},
        "not": {"type": "object"},
        "truncate": _object({"size": size}),
        "rename": _object({"to": NAME}),
        "link": _object({"to": NAME}),
        "unlink": {"type": "object"},
    }
    given["rename"]["properties"]["overwrite"] = BOOLEAN
    for body in given.values():
        body["additionalProperties"] = False
    answer = _object({"key": NAME, "result": {}})
    return {
        f"/journal/keys/{{key}}/{action}": {
            "post": _operation(f"{action}Key", answer, key, body=body)
        }
        for action, body in given.items()
    }


def _jobs() -> dict[str, Schema]:
    listed = _object({"jobs": {"type": "array", "items": ref("Job")}})
    pushed = _object({"uri": NAME, "timestamp": INTEGER})
    states = {"enum": [*STATE_NAMES[:5]]}
    return {
        "/journal/jobs": {
            "get": _operation(
                "listJobs",
                listed,
                _query("domain", TEXT, "Only of this domain."),
                _query("state", states, "Only in this state."),
                _query("limit", COUNT, "At most so many."),
                _query("offset", COUNT, "So many are passed over."),
            ),
            "post": _operation("pushJob", pushed, body=ref("PushBody"), status="201"),
        },
        "/journal/jobs/show": {
            "get": _operation(
                "showJob",
                ref("Job"),
                _query("uri", TEXT, "Its uri."),
                _query("key", TEXT, "Or its key."),
            )
        },
        "/journal/jobs/next": {
            "post": _operation("nextJobs", ref("HandedOut"), body=ref("NextBody"))
        },
        "/journal/stats": {
            "get": _operation(
                "journalStats", {"type": "object"}, _query("domain", TEXT, "Of this domain.")
            )
        },
    }


def _job_actions() -> dict[str, Schema]:
    done = _object({"result": BOOLEAN})
    answers: dict[str, Schema] = {
        "done": done,
        "extend": done,
        "give-back": done,
        "fail": ref("Job"),
    }
    for action, answer in (("kick", "kicked"), ("requeue", "requeued"), ("drop", "dropped")):
        answers[action] = _object({answer: INTEGER})
    return {
        f"/journal/jobs/{action}": {
            "post": _operation(f"{action.replace('-', '')}Job", answer, body=ref("JobBody"))
        }
        for action, answer in answers.items()
    }


def _settings() -> dict[str, Schema]:
    domain, name = _path("domain", "A domain."), _path("name", "Of a recurring job.")
    settings, cron = ref("DomainSettings"), ref("RecurringJob")
    deleted = _object({"deleted": BOOLEAN})
    return {
        "/journal/jobs/domains/{domain}": {
            "get": _operation("getDomain", settings, domain),
            "put": _operation("setDomain", settings, domain, body=settings),
            "patch": _operation("changeDomain", settings, domain, body=settings),
            "delete": _operation("resetDomain", deleted, domain),
        },
        "/journal/jobs/recurring/{name}": {
            "get": _operation("getRecurring", cron, name),
            "put": _operation("setRecurring", cron, name, body=cron),
            "delete": _operation("deleteRecurring", deleted, name),
        },
    }
