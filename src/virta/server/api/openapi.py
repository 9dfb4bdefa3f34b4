"""
The machine-readable description of the HTTP routes, served at `/openapi.json`.

A test compares it with what the server really answers; an answer that is not described here fails it.
"""

from __future__ import annotations

from virta import __version__
from virta.server.api import openapi_journal
from virta.server.api.channels import PAGE_MAX
from virta.server.api.schemas import CHANNEL_NAME, HEX_ID, SCHEMAS, Schema, ref
from virta.server.pipeline_supervisor import ORDERS

JSON = "application/json"
EVENT_STREAM = "text/event-stream"


def refusal(text: str) -> Schema:
    return {"description": text, "content": {JSON: {"schema": ref("Refusal")}}}


def answer(text: str, schema: Schema) -> Schema:
    return {"description": text, "content": {JSON: {"schema": schema}}}


def plain(text: str) -> Schema:
    return {"description": text, "content": {"text/plain": {"schema": {"type": "string"}}}}


def parameter(name: str, place: str, schema: Schema, text: str, *, required: bool = True) -> Schema:
    return {
        "name": name,
        "in": place,
        "required": required or place == "path",
        "schema": schema,
        "description": text,
    }


def body(kinds: dict[str, Schema]) -> Schema:
    return {
        "required": True,
        "content": {kind: {"schema": schema} for kind, schema in kinds.items()},
    }


LOG_BUSY = "Another process holds the log's write lock; nothing was written; see `Retry-After`."
# What any route may answer, whatever it does.
COMMON = {
    "400": refusal("The request cannot be understood; `code` says why."),
    "401": refusal("A token is needed, or the one sent is not known."),
    "403": refusal("The page's origin is not allowed, or the channel is the server's own."),
    "421": refusal("The Host is not a name of this server."),
    "500": refusal("The server failed; the request may be repeated."),
}
CHANNEL = parameter("name", "path", CHANNEL_NAME, "The channel, at most 1024 bytes.")
QUERY = parameter(
    "query",
    "query",
    {"type": "object", "additionalProperties": {"type": "string"}},
    "Terms of the query-string dialect.",
    required=False,
)
LAST_ID = parameter(
    "Last-Event-ID",
    "header",
    {"type": "string"},
    "Continue after this: a position, an offset, or an event's source and id as in a frame.",
    required=False,
)
LAST_ID_OPTION = parameter(
    "$last-event-id",
    "query",
    {"type": "string"},
    "The same as `Last-Event-ID`, for clients that cannot set headers.",
    required=False,
)
POSITIONS = parameter(
    "Virta-Positions",
    "header",
    {"type": "string", "enum": ["0", "1"]},
    "1: the id of every frame is a position.",
    required=False,
)
POSITIONS_OPTION = parameter(
    "$positions",
    "query",
    {"type": "string", "enum": ["0", "1"]},
    "The same as `Virta-Positions`.",
    required=False,
)
START = "earliest, latest, an offset, a time, a position or the id of a frame."
FROM = parameter("from", "query", {"type": "string"}, START, required=False)
RESUME = [LAST_ID, LAST_ID_OPTION, POSITIONS, POSITIONS_OPTION]
NAME = {"type": "string", "minLength": 1, "maxLength": 256, "pattern": "^[^/]+$"}
INDEX = parameter("index", "path", NAME, "The index.")
COLLECTION = parameter("collection", "path", NAME, "The collection.")
FILTER_ID = parameter("id", "path", {"type": "string", "pattern": HEX_ID}, "A filter's id.")


PLACED = {
    "Virta-Offset": {
        "schema": {"type": "integer", "minimum": 0},
        "description": "The offset of the first event that was written, or of the original of a repeat.",
    },
    "Virta-Duplicate": {
        "schema": {"enum": ["true"]},
        "description": "Everything was a repeat.",
    },
}


def _publish(operation: str) -> Schema:
    kinds = {
        "application/cloudevents+json": ref("Event"),
        "application/cloudevents-batch+json": {"type": "array", "items": ref("Event")},
    }
    return {
        "operationId": operation,
        "summary": "Publish one event or a batch.",
        "description": "With attributes in `ce-` headers (binary mode) the body is the event's data,"
        " of any content type.",
        "parameters": [CHANNEL],
        "requestBody": body(kinds),
        "responses": COMMON
        | {
            "202": answer(
                "The events are in the log, as durable as `Virta-Durability` says.", ref("Accepted")
            )
            | {"headers": PLACED},
            "408": refusal("The body took too long."),
            "413": refusal("The body, the batch, or an event's identity is too large."),
            "429": refusal("Too many events are on their way; see `Retry-After`."),
            "503": refusal(LOG_BUSY),
            "507": refusal("The disk is full; nothing was kept."),
        },
    }


def _consume(operation: str, parameters: list[Schema]) -> Schema:
    stream = {"description": "A stream of server-sent events.", "content": {EVENT_STREAM: {}}}
    return {
        "operationId": operation,
        "summary": "Hear events, from now on or from a place in the log.",
        "parameters": parameters,
        "responses": COMMON | {"200": stream, "404": refusal("No such filter.")},
    }


def _channels() -> dict[str, Schema]:
    start = parameter("start", "path", {"type": "string"}, START)
    return {
        "/channels": {
            "get": {
                "operationId": "listChannels",
                "summary": "Channels in order of their names, with what the log holds of each.",
                "parameters": [
                    parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": PAGE_MAX}, "Channels in one answer.", required=False),
                    parameter("after", "query", {"type": "string"}, "The `next` of the page before.", required=False),
                ],
                "responses": COMMON
                | {
                    "200": answer("One page of them.", ref("ChannelPage")),
                    "503": refusal("The log is still being counted; see `Retry-After`."),
                },
            }
        },
        "/channels/{name}": {
            "post": _publish("publish"),
            "put": _publish("publishByPut"),
            "get": _consume("consume", [CHANNEL, QUERY, *RESUME]),
        },
        "/channels/{name}/from/{start}": {
            "get": _consume("consumeFrom", [CHANNEL, start, QUERY, *RESUME])
        },
        "/publish": {
            "post": {
                "operationId": "publishMessages",
                "summary": "Send messages to streams.",
                "requestBody": body({JSON: {"type": "array", "items": ref("Message")}}),
                "responses": COMMON
                | {
                    "200": {"description": "The messages are in the log."},
                    "400": plain("What is wrong with the body."),
                    "408": refusal("The body took too long."),
                    "413": refusal("The body is too large."),
                    "429": refusal("Too many messages are on their way."),
                    "503": refusal(LOG_BUSY),
                    "507": refusal("The disk is full; nothing was kept."),
                },
            }
        },
        "/subscribe": {
            "get": {
                "operationId": "subscribe",
                "summary": "Hear streams over a WebSocket; see /asyncapi.json.",
                "parameters": [
                    parameter("streams", "query", {"type": "array", "items": {"type": "string"}}, "Stream ids."),
                    parameter("max_queued", "query", {"type": "integer", "minimum": 1, "maximum": 250}, "Copies that wait."),
                ],
                "responses": {
                    "101": {"description": "The socket is open."},
                    "400": plain("What is wrong with the parameters."),
                    "401": refusal("A token is needed."),
                    "403": COMMON["403"],
                    "404": plain("No streams were named."),
                    "421": COMMON["421"],
                    "426": plain("The request did not ask for a WebSocket."),
                },
            }
        },
    }  # fmt: skip


def _filters() -> dict[str, Schema]:
    place = [INDEX, COLLECTION]
    writing = COMMON | {
        "413": refusal("The body is too large."),
        "507": refusal("No more filters are taken."),
    }
    return {
        "/filters/{index}/{collection}": {
            "post": {
                "operationId": "registerFilter",
                "parameters": place,
                "requestBody": body({JSON: ref("Filter")}),
                "responses": writing
                | {
                    "200": answer("An equal filter was there.", ref("Registered")),
                    "201": answer("The filter is new.", ref("Registered")),
                },
            },
            "get": {
                "operationId": "filterIds",
                "parameters": place,
                "responses": COMMON | {"200": answer("Ids of the filters there.", ref("Ids"))},
            },
            "head": {
                "operationId": "filtersExist",
                "parameters": place,
                "responses": {
                    "200": {"description": "There are filters."},
                    "400": {"description": "A name is too long."},
                    "401": {"description": "A token is needed."},
                    "403": {"description": "The page's origin is not allowed."},
                    "404": {"description": "There are none."},
                    "421": {"description": "The Host is not a name of this server."},
                },
            },
        },
        "/filters/{index}/{collection}/test": {
            "post": {
                "operationId": "testFilters",
                "parameters": place,
                "requestBody": body({JSON: ref("Test")}),
                "responses": writing | {"200": answer("Filters that hold.", ref("Ids"))},
            }
        },
        "/filters/validate": {
            "post": {
                "operationId": "validateFilter",
                "requestBody": body({JSON: ref("Filter")}),
                "responses": writing | {"200": answer("It is a filter.", ref("Valid"))},
            }
        },
    }


def _one_filter() -> dict[str, Schema]:
    return {
        "/filters/{id}": {
            "get": {
                "operationId": "showFilter",
                "parameters": [FILTER_ID],
                "responses": COMMON
                | {
                    "200": answer("The registration.", ref("Description")),
                    "404": refusal("No filter has this id."),
                },
            },
            "delete": {
                "operationId": "removeFilter",
                "parameters": [FILTER_ID],
                "responses": COMMON
                | {
                    "204": {"description": "It is not there any more."},
                    "404": refusal("This is no id of a filter."),
                },
            },
        },
        "/filters/{id}/events": {"get": _consume("filterEvents", [FILTER_ID, FROM, *RESUME])},
    }


def _subscriptions() -> dict[str, Schema]:
    id_ = parameter("id", "path", {"type": "string", "minLength": 1}, "A subscription's id.")
    missing = {"404": refusal("No subscription has this id.")}
    description = body({JSON: ref("Subscription")})
    asked = COMMON | {
        "202": answer("The sink has yet to consent, by callback.", ref("Subscription")),
        "413": refusal("The body is too large."),
        "429": refusal("Too many handshakes with sinks are in progress."),
    }

    def confirm(operation: str) -> Schema:
        return {
            "operationId": operation,
            "summary": "The callback by which a webhook consents later; asks for no token.",
            "security": [{}],
            "parameters": [id_, parameter("key", "query", {"type": "string"}, "The sink's key.")],
            "responses": {
                "200": answer("It delivers.", {"type": "object", "required": ["id", "state"]}),
                "403": COMMON["403"],
                "404": refusal("Nothing waits for this."),
                "421": COMMON["421"],
            },
        }

    return {
        "/subscriptions": {
            "post": {
                "operationId": "createSubscription",
                "summary": "Deliver matching events to a webhook, which must agree first.",
                "requestBody": description,
                "responses": asked | {"201": answer("It delivers.", ref("Subscription"))},
            },
            "get": {
                "operationId": "listSubscriptions",
                "responses": COMMON
                | {"200": answer("All of them.", {"type": "array", "items": ref("Subscription")})},
            },
        },
        "/subscriptions/{id}": {
            "get": {
                "operationId": "showSubscription",
                "parameters": [id_],
                "responses": COMMON | missing | {"200": answer("This one.", ref("Subscription"))},
            },
            "put": {
                "operationId": "replaceSubscription",
                "parameters": [id_],
                "requestBody": description,
                "responses": asked
                | missing
                | {"200": answer("As it is now.", ref("Subscription"))},
            },
            "delete": {
                "operationId": "deleteSubscription",
                "parameters": [id_],
                "responses": COMMON | missing | {"204": {"description": "It is over."}},
            },
        },
        "/subscriptions/{id}/confirm": {
            "get": confirm("confirmSubscription"),
            "post": confirm("confirmSubscriptionByPost"),
        },
    }


def _pipelines() -> dict[str, Schema]:
    name = parameter("name", "path", NAME, "A pipeline's name.")
    listed = {"type": "array", "items": ref("Pipeline")}
    shown: dict[str, Schema] = {
        "/pipelines": {
            "get": {
                "operationId": "listPipelines",
                "summary": "The pipelines that run beside the server.",
                "responses": COMMON | {"200": answer("All that are listed.", listed)},
            }
        },
        "/pipelines/{name}": {
            "get": {
                "operationId": "showPipeline",
                "parameters": [name],
                "responses": COMMON
                | {
                    "200": answer("This one.", ref("Pipeline")),
                    "404": refusal("No pipeline of this name is listed."),
                },
            }
        },
    }
    ordered: dict[str, Schema] = {
        f"/pipelines/{{name}}/{order}": {
            "post": {
                "operationId": f"{order}Pipeline",
                "parameters": [name],
                "responses": COMMON
                | {
                    "200": answer("What came of it.", ref("Pipeline")),
                    "404": refusal("No pipeline of this name is listed."),
                    "409": refusal("Its file is wrong."),
                },
            }
        }
        for order in ORDERS
    }
    return shown | ordered


def _operating() -> dict[str, Schema]:
    def get(operation: str, responses: Schema) -> Schema:
        return {"get": {"operationId": operation, "responses": responses}}

    refused = {status: COMMON[status] for status in ("403", "421")}
    asked = refused | {"401": COMMON["401"]}
    document = asked | {"200": answer("The document.", {"type": "object"})}
    return {
        "/livez": get("livez", refused | {"200": plain("The process works.")}),
        "/readyz": get(
            "readyz", refused | {"200": plain("Serving."), "503": plain("Not serving; why.")}
        ),
        "/metrics": get(
            "metrics", asked | {"200": plain("Prometheus text."), "400": COMMON["400"]}
        ),
        "/metrics/keycounts/{name}": {
            "get": {
                "operationId": "keyCounts",
                "summary": "How many terms of standing queries name each path of a channel.",
                "parameters": [CHANNEL],
                "responses": COMMON
                | {
                    "200": answer("Counts, nested as the paths are.", {"type": "object"}),
                    "404": refusal("No standing query of this channel names a path."),
                },
            }
        },
        "/problems/{code}": {
            "get": {
                "operationId": "explainProblem",
                "summary": "What an error code of the journal means: the `type` of problem documents.",
                "parameters": [parameter("code", "path", {"type": "string"}, "The code.")],
                "responses": COMMON
                | {"200": plain("The page."), "404": refusal("There is no such code.")},
            }
        },
        "/openapi.json": get("openapi", document),
        "/asyncapi.json": get("asyncapi", document),
    }


def openapi() -> Schema:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Virta",
            "version": __version__,
            "description": "Publish once, and every live query hears it.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        # Relative to where the document was read: right for any name and port.
        "servers": [{"url": "/"}],
        "paths": _channels()
        | _filters()
        | _one_filter()
        | _subscriptions()
        | _pipelines()
        | openapi_journal.paths()
        | _operating(),
        "components": {
            "schemas": SCHEMAS | openapi_journal.schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }
