"""
The table of HTTP operations: what each route expects and what it may answer.

A test compares it with the routes of the server, and responses with the types named here.
"""

from __future__ import annotations

from types import GenericAlias, MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from msgspec import Meta, defstruct

from virta.journal.jobs.domain import DomainSettings as Settings
from virta.journal.jobs.job import STATE_NAMES
from virta.journal.jobs.recurring import Cron
from virta.journal.serving.bodies import JobBody, Name, NextBody, PushBody, SetBody
from virta.server.api.channels import PAGE_MAX
from virta.server.api.description import schemas
from virta.server.pipeline_supervisor import ORDERS

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTHING: Mapping[str, Any] = MappingProxyType({})
JSON = "application/json"
PROBLEM = "application/problem+json"


class Answer(NamedTuple):
    """A response: what it means, and the type of its body by content type; None is any body."""

    text: str
    content: Mapping[str, Any] = NOTHING
    headers: Mapping[str, tuple[Any, str]] = NOTHING


class Parameter(NamedTuple):
    """A parameter of a path, a query or the head of a request."""

    name: str
    place: Literal["path", "query", "header"]
    type: Any
    text: str
    required: bool = False


class Operation(NamedTuple):
    """A method of a path. `errors` are answers that most routes share."""

    route: str
    id: str
    answers: dict[int, Answer]
    parameters: tuple[Parameter, ...] = ()
    body: Any = None  # a type, sent as JSON, or types by content type
    body_required: bool = True
    summary: str = ""
    errors: dict[int, Answer] | None = None  # COMMON if not given
    public: bool = False  # needs no token


def json(text: str, kind: Any) -> Answer:
    return Answer(text, {JSON: kind})


def plain(text: str) -> Answer:
    return Answer(text, {"text/plain": str})


def refusal(text: str) -> Answer:
    return Answer(text, {PROBLEM: schemas.RefusalBody})


def body_of(name: str, **members: Any) -> Any:
    """Return a type of a request body, which has no other members."""
    return defstruct(name, members.items(), forbid_unknown_fields=True)


def result_of(name: str, **members: Any) -> Any:
    return defstruct(name, members.items())


def array(kind: Any) -> Any:
    return GenericAlias(list, (kind,))


COMMON = {
    400: refusal("The request is invalid; `code` says why."),
    401: refusal("A token is needed, or the given one is unknown."),
    403: refusal(
        "The page's origin is not allowed, the right is missing, or the channel is the server's own."
    ),
    421: refusal("The Host is not a name of this server."),
    500: refusal("The server failed; the request may be repeated."),
}
REJECTED = {status: COMMON[status] for status in (403, 421)}
TOO_LARGE = {413: refusal("The body is too large.")}
WRITING = {
    408: refusal("The body took too long."),
    413: refusal("The body, the batch, or an event's identity is too large."),
    429: refusal("Too many events are being published; see `Retry-After`."),
    503: refusal("Another process has the log's write lock; nothing was written; see `Retry-After`."),
    507: refusal("The disk is full; nothing was written."),
}  # fmt: skip

# Parameters.

Switch = Literal["0", "1"]
PathName = Annotated[str, Meta(min_length=1, max_length=256, pattern="^[^/]+$")]
PathPart = Annotated[str, Meta(min_length=1, pattern="^[^/]+$")]
Count = Annotated[int, Meta(ge=0)]
Flag = Literal["1", "0", "true", "false"]
START = "earliest, latest, an offset, a time, a position or the id of a frame."
CHANNEL = Parameter("name", "path", schemas.ChannelName, "The channel, at most 1024 bytes.")
QUERY = Parameter("query", "query", dict[str, str], "Terms of the query-string dialect.")
RESUME = (
    Parameter("Last-Event-ID", "header", str, "Continue after this: a position, an offset, or an event's source and id as in a frame."),
    Parameter("$last-event-id", "query", str, "The same as `Last-Event-ID`, for clients that cannot set headers."),
    Parameter("Virta-Positions", "header", Switch, "1: the id of every frame is a position."),
    Parameter("$positions", "query", Switch, "The same as `Virta-Positions`."),
)  # fmt: skip
FILTER_PLACE = (
    Parameter("index", "path", PathName, "The index."),
    Parameter("collection", "path", PathName, "The collection."),
)
FILTER_ID = Parameter("id", "path", Annotated[str, Meta(pattern="^[0-9a-f]{64}$")], "A filter's id.")  # fmt: skip
SUBSCRIPTION_ID = Parameter("id", "path", Annotated[str, Meta(min_length=1)], "A subscription's id.")  # fmt: skip
PIPELINE = Parameter("name", "path", PathName, "A pipeline's name.")
KEY = Parameter("key", "path", PathPart, "The key, percent-encoded.")
DOMAIN = Parameter("domain", "path", PathPart, "A domain.")
RECURRING = Parameter("name", "path", PathPart, "The name of a recurring job.")


def query(name: str, kind: Any, text: str, *, required: bool = False) -> Parameter:
    return Parameter(name, "query", kind, text, required)


# Channels and streams.

STREAM = Answer("A stream of server-sent events.", {"text/event-stream": None})
CONSUME = {200: STREAM, 404: refusal("No such filter.")}
CONSUME_SUMMARY = "Receive events, from now on or from a place in the log."
PLACED = {
    "Virta-Offset": (Count, "The offset of the first event that was written, or of the original of a repeat."),
    "Virta-Duplicate": (Literal["true"], "Everything was a repeat."),
}  # fmt: skip


def _publish(method: str, id_: str) -> Operation:
    answer = json("The events are in the log, as durable as `Virta-Durability` says.", schemas.AcceptedBody)  # fmt: skip
    return Operation(
        f"{method} /channels/{{name}}",
        id_,
        {202: answer._replace(headers=PLACED), **WRITING},
        (CHANNEL,),
        body={
            "application/cloudevents+json": schemas.EventBody,
            "application/cloudevents-batch+json": list[schemas.EventBody],
        },
        summary="Publish one event or a batch. With attributes in `ce-` headers (binary mode) the body is"
        " the event's data, of any content type.",
    )


VIEW_REFUSALS = {
    409: refusal(
        "No record has a key, the log is compacted under another key, or an aggregate meets no number."
    ),
    503: refusal("More rows or views than a limit allows, which the message names."),
}
VIEW_OPTIONS = (
    query("$filter", str, "A filter instead of the query."),
    query("$dialect", schemas.Dialect, "The dialect of `$filter`."),
    query("$key", str, "JSON pointer to the key; else the record's key, else `subject`."),
    query("$row", Literal["auto", "event"], "What filters and consumers see of Debezium's events."),
    query("$fields", str, "JSON pointers, separated by commas, to what is sent."),
)
LIVE_OPTIONS = (
    query("$select", str, "Aggregates: count, sum(POINTER), min(POINTER), max(POINTER)."),
    query("$group", str, "JSON pointer to the group of aggregates."),
    query("$since", str, "A position to resume from; the same as `Last-Event-ID`."),
    Parameter("Last-Event-ID", "header", str, "A position to resume from."),
)

CHANNELS = [
    Operation(
        "GET /channels", "listChannels",
        {200: json("One page.", schemas.ChannelPage), 503: refusal("The log is still being counted; see `Retry-After`.")},
        (
            query("limit", Annotated[int, Meta(ge=1, le=PAGE_MAX)], "Channels in one answer."),
            query("after", str, "The `next` of the page before."),
        ),
        summary="Channels in order of their names, with what the log contains of each.",
    ),
    _publish("POST", "publish"),
    _publish("PUT", "publishByPut"),
    Operation("GET /channels/{name}", "consume", CONSUME, (CHANNEL, QUERY, *RESUME), summary=CONSUME_SUMMARY),
    Operation(
        "GET /channels/{name}/from/{start}", "consumeFrom", CONSUME,
        (CHANNEL, Parameter("start", "path", str, START), QUERY, *RESUME), summary=CONSUME_SUMMARY,
    ),
    Operation(
        "GET /channels/{name}/live", "liveView",
        {101: Answer("The socket is open."), 200: STREAM, **VIEW_REFUSALS},
        (CHANNEL, QUERY, *VIEW_OPTIONS, *LIVE_OPTIONS),
        summary="The rows that satisfy a filter, then every row that enters, changes or leaves.",
    ),
    Operation(
        "GET /channels/{name}/rows", "rows", {200: json("The rows.", schemas.RowPage), **VIEW_REFUSALS},
        (CHANNEL, QUERY, *VIEW_OPTIONS), summary="The rows that satisfy a filter now.",
    ),
    Operation(
        "GET /channels/{name}/rows/{key}", "row",
        {200: json("The row.", schemas.RowBody), 404: refusal("The view has no such row."), **VIEW_REFUSALS},
        (CHANNEL, KEY, QUERY, *VIEW_OPTIONS), summary="One row.",
    ),
    Operation(
        "POST /publish", "publishMessages",
        {200: Answer("The messages are in the log."), **WRITING, 400: plain("What is wrong with the body.")},
        body=list[schemas.MessageBody], summary="Send messages to streams.",
    ),
    Operation(
        "GET /subscribe", "subscribe",
        {
            101: Answer("The socket is open."), 400: plain("What is wrong with the parameters."),
            401: COMMON[401], 404: plain("No streams were named."),
            426: plain("The request did not ask for a WebSocket."),
        },
        (
            query("streams", list[str], "Stream ids.", required=True),
            query("max_queued", Annotated[int, Meta(ge=1, le=250)], "Messages queued while the client does not read.", required=True),
        ),
        summary="Receive messages of streams over a WebSocket; see /asyncapi.json.", errors=REJECTED,
    ),
]  # fmt: skip

# Filters.

FILTER_WRITING = TOO_LARGE | {507: refusal("There are too many filters.")}
FilterTest = Annotated[
    schemas.FilterTest,
    Meta(extra_json_schema={"anyOf": [{"required": ["event"]}, {"required": ["document"]}]}),
]
FILTERS = [
    Operation(
        "POST /filters/{index}/{collection}", "registerFilter",
        {
            200: json("An equal filter was registered.", schemas.FilterRegistration),
            201: json("The filter is new.", schemas.FilterRegistration), **FILTER_WRITING,
        },
        FILTER_PLACE, body=schemas.FilterBody,
    ),
    Operation("GET /filters/{index}/{collection}", "filterIds", {200: json("Ids of the collection's filters.", schemas.FilterIds)}, FILTER_PLACE),
    Operation(
        "HEAD /filters/{index}/{collection}", "filtersExist",
        {
            200: Answer("There are filters."), 400: Answer("A name is too long."),
            401: Answer("A token is needed."), 403: Answer("The page's origin is not allowed."),
            404: Answer("There are none."), 421: Answer("The Host is not a name of this server."),
        },
        FILTER_PLACE, errors={},
    ),
    Operation(
        "POST /filters/{index}/{collection}/test", "testFilters",
        {200: json("Filters that match.", schemas.FilterIds), **FILTER_WRITING}, FILTER_PLACE, body=FilterTest,
    ),
    Operation(
        "POST /filters/validate", "validateFilter",
        {200: json("The filter is valid.", schemas.FilterValidation), **FILTER_WRITING}, body=schemas.FilterBody,
    ),
    Operation(
        "GET /filters/{id}", "showFilter",
        {200: json("The registration.", schemas.FilterDescription), 404: refusal("No filter has this id.")}, (FILTER_ID,),
    ),
    Operation(
        "DELETE /filters/{id}", "removeFilter",
        {204: Answer("The filter is removed."), 404: refusal("This is no id of a filter.")}, (FILTER_ID,),
    ),
    Operation(
        "GET /filters/{id}/events", "filterEvents", CONSUME, (FILTER_ID, query("from", str, START), *RESUME),
        summary=CONSUME_SUMMARY,
    ),
]  # fmt: skip

# Credentials.

NONE_NEEDED = {409: refusal("The server asks for no credential.")}
SESSIONS = [
    Operation(
        "POST /tickets", "createTicket", {201: json("A ticket.", schemas.StreamTicket), **NONE_NEEDED},
        summary="Get a credential for one use within 30 seconds, for clients that cannot set headers.",
    ),
    Operation("GET /session", "showSession", {200: json("Who you are.", schemas.SessionInfo)}),
    Operation(
        "POST /session", "startSession", {204: Answer("The cookie is set."), **NONE_NEEDED},
        summary="Put the credential of this request into a cookie, for pages of this server.",
    ),
    Operation("DELETE /session", "endSession", {204: Answer("The cookie is removed.")}),
]  # fmt: skip

# Subscriptions and pipelines.

SHOWN = json("The subscription.", schemas.SubscriptionView)
NO_SUBSCRIPTION = {404: refusal("No subscription has this id.")}
NO_PIPELINE = {404: refusal("No pipeline of this name is listed.")}
HANDSHAKE = TOO_LARGE | {
    503: WRITING[503],
    507: WRITING[507],
    202: json("The sink has not consented yet; it may by callback.", schemas.SubscriptionView),
    429: refusal("Too many handshakes with sinks are in progress."),
}


def _confirm(method: str, id_: str) -> Operation:
    answers = {
        200: json("Events are delivered.", schemas.SubscriptionConfirmation),
        404: refusal("No subscription waits for this confirmation."),
    }
    return Operation(
        f"{method} /subscriptions/{{id}}/confirm",
        id_,
        answers,
        (SUBSCRIPTION_ID, query("key", str, "The sink's key.", required=True)),
        summary="The callback by which a webhook consents later; needs no token.",
        errors=REJECTED,
        public=True,
    )


SUBSCRIPTIONS = [
    Operation(
        "POST /subscriptions", "createSubscription", {201: SHOWN, **HANDSHAKE}, body=schemas.SubscriptionBody,
        summary="Deliver matching events to a webhook, which must consent first.",
    ),
    Operation("GET /subscriptions", "listSubscriptions", {200: json("All subscriptions.", list[schemas.SubscriptionView])}),
    Operation("GET /subscriptions/{id}", "showSubscription", {200: SHOWN, **NO_SUBSCRIPTION}, (SUBSCRIPTION_ID,)),
    Operation(
        "PUT /subscriptions/{id}", "replaceSubscription", {200: SHOWN, **HANDSHAKE, **NO_SUBSCRIPTION},
        (SUBSCRIPTION_ID,), body=schemas.SubscriptionBody,
    ),
    Operation("DELETE /subscriptions/{id}", "deleteSubscription", {204: Answer("It is deleted."), **NO_SUBSCRIPTION}, (SUBSCRIPTION_ID,)),
    _confirm("GET", "confirmSubscription"),
    _confirm("POST", "confirmSubscriptionByPost"),
]  # fmt: skip
PIPELINES = [
    Operation(
        "GET /pipelines", "listPipelines", {200: json("All that are listed.", list[schemas.PipelineView])},
        summary="The pipelines that run beside the server.",
    ),
    Operation("GET /pipelines/{name}", "showPipeline", {200: json("This one.", schemas.PipelineView), **NO_PIPELINE}, (PIPELINE,)),
    *[
        Operation(
            f"POST /pipelines/{{name}}/{order}", f"{order}Pipeline",
            {200: json("Its status after that.", schemas.PipelineView), **NO_PIPELINE, 409: refusal("Its file is wrong.")},
            (PIPELINE,),
        )
        for order in ORDERS
    ],
]  # fmt: skip

# The journal. Its errors are problem documents; what precedes its handlers refuses as everywhere.

_PROBLEM = {PROBLEM: schemas.RefusalBody}
JOURNAL_ERRORS = {
    400: Answer("`code` says what is wrong.", _PROBLEM),
    401: COMMON[401],
    403: refusal("The page's origin is not allowed."),
    404: Answer("There is no such thing.", _PROBLEM),
    409: Answer("It conflicts with what is stored.", _PROBLEM),
    413: Answer("Too large.", _PROBLEM),
    421: COMMON[421],
    503: Answer("Not now: the disk, or copies.", _PROBLEM),
    507: Answer("No space.", _PROBLEM),
}
State = Annotated[str, Meta(extra_json_schema={"enum": [*STATE_NAMES]})]
StateAsked = Annotated[str, Meta(extra_json_schema={"enum": [*STATE_NAMES[:5], ""]})]  # empty: any
JobView = result_of(
    "JobView", uri=str, key=str, domain=str, state=State,
    priority=int, start=int, timestamp=int, attempts=int, payload_bytes=int,
)  # fmt: skip
JobFailure = result_of("JobFailure", attempt=int, ended=int, reason=str)
JobShown = result_of("JobShown", uri=str, key=str, domain=str, state=State, attempts=int, max_attempts=int, failures=array(JobFailure))  # fmt: skip
JobLease = result_of(
    "JobLease", key=Name, uri=Name, payload=Any, deadline=float | None, attempts=int
)
Leases = result_of("JobLeases", jobs=array(JobLease), wake_up=float | None)
KeyValue = result_of("KeyValue", key=Name, value=Any)
KeyView = result_of(
    "KeyView", key=Name, type=str, value=Any, timestamp=int, expires=float | None, ttl=float | None,
    persist=bool, locked=bool,
)  # fmt: skip
KeyResult = result_of("KeyResult", key=Name, result=Any)
JobResult = result_of("JobResult", result=bool)
Deleted = result_of("Deleted", deleted=bool)
EMPTY = body_of("EmptyBody")
KEY_BODIES: dict[str, tuple[Any, bool]] = {  # by action: the type, and whether it is required
    "add": (defstruct("AddBody", [("amount", float, 1)], forbid_unknown_fields=True), False),
    "not": (EMPTY, False),
    "truncate": (body_of("TruncateBody", size=Count), True),
    "rename": (defstruct("RenameBody", [("to", Name), ("overwrite", bool, False)], forbid_unknown_fields=True), True),
    "link": (body_of("LinkBody", to=Name), True),
    "unlink": (EMPTY, False),
}  # fmt: skip
JOB_RESULTS: dict[str, Any] = {
    **dict.fromkeys(("done", "extend", "give-back"), JobResult),
    "fail": JobView,
    "kick": result_of("KickResult", kicked=int),
    "requeue": result_of("RequeueResult", requeued=int),
    "drop": result_of("DropResult", dropped=int),
}


def _journal(
    route: str, id_: str, kind: Any, *parameters: Parameter, status: int = 200, **more: Any
) -> Operation:
    answers = {status: Answer("Done.", kind if isinstance(kind, dict) else {JSON: kind})}
    route = route.replace(" ", " /journal")
    return Operation(route, id_, answers, parameters, errors=JOURNAL_ERRORS, **more)


JOURNAL = [
    _journal(
        "GET /keys", "listKeys", result_of("KeyPage", keys=array(KeyValue), cursor=str | None),
        *(query(name, str, "Where keys begin and end.") for name in ("prefix", "from", "to")),
        query("regex", str, "An RE2 pattern found in the key."),
        query("count", Count, "At most so many, and at most 1000."),
        query("cursor", str, "Of the page before."),
    ),
    _journal(
        "GET /keys/{key}", "getKey", {JSON: KeyView, "text/plain": None, "application/octet-stream": None},
        KEY, query("raw", str, "The bytes, not JSON."),
    ),
    _journal("PUT /keys/{key}", "setKey", result_of("KeyStored", key=Name, timestamp=int), KEY, body=SetBody),
    _journal(
        "DELETE /keys/{key}", "deleteKey", result_of("KeyDeleted", key=Name, deleted=bool), KEY,
        query("complete", Flag, "Leave no tombstone."),
    ),
    *[
        _journal(f"POST /keys/{{key}}/{action}", f"{action}Key", KeyResult, KEY, body=kind, body_required=required)
        for action, (kind, required) in KEY_BODIES.items()
    ],
    _journal(
        "GET /jobs", "listJobs", result_of("JobPage", jobs=array(JobView)),
        query("domain", str, "Only of this domain."), query("state", StateAsked, "Only in this state; empty is any."),
        query("limit", Count, "At most so many."), query("offset", Count, "Skip so many."),
    ),
    _journal("POST /jobs", "pushJob", result_of("JobPushed", uri=Name, timestamp=int), body=PushBody, status=201),
    _journal("GET /jobs/show", "showJob", JobShown, query("uri", str, "Its uri."), query("key", str, "Or its key.")),
    _journal("POST /jobs/next", "nextJobs", Leases, body=NextBody, body_required=False),
    _journal("GET /stats", "journalStats", dict[str, Any], query("domain", str, "Of this domain.")),
    *[
        _journal(f"POST /jobs/{action}", f"{action.replace('-', '')}Job", kind, body=JobBody, body_required=False)
        for action, kind in JOB_RESULTS.items()
    ],
    _journal("GET /jobs/recurring", "listRecurring", result_of("RecurringJobs", recurring=array(dict[str, Any]))),
    _journal("GET /jobs/domains/{domain}", "getDomain", Settings, DOMAIN),
    _journal("PUT /jobs/domains/{domain}", "setDomain", Settings, DOMAIN, body=Settings),
    _journal("PATCH /jobs/domains/{domain}", "changeDomain", Settings, DOMAIN, body=Settings),
    _journal("DELETE /jobs/domains/{domain}", "resetDomain", Deleted, DOMAIN),
    _journal("GET /jobs/recurring/{name}", "getRecurring", Cron, RECURRING),
    _journal("PUT /jobs/recurring/{name}", "setRecurring", Cron, RECURRING, body=Cron),
    _journal("DELETE /jobs/recurring/{name}", "deleteRecurring", Deleted, RECURRING),
]  # fmt: skip

# Operating.

_DOCUMENT = {200: json("The document.", dict[str, Any]), 401: COMMON[401]}
OPERATING = [
    Operation("GET /livez", "livez", {200: plain("The process works.")}, errors=REJECTED),
    Operation("GET /readyz", "readyz", {200: plain("Serving."), 503: plain("Not serving; why.")}, errors=REJECTED),
    Operation(
        "GET /metrics", "metrics",
        {200: plain("Prometheus text."), 400: COMMON[400], 401: COMMON[401]}, errors=REJECTED,
    ),
    Operation(
        "GET /metrics/keycounts/{name}", "keyCounts",
        {
            200: json("Counts, nested as the paths are.", dict[str, Any]),
            404: refusal("No subscription's query of this channel names a path."),
        },
        (CHANNEL,), summary="How many terms of the channel's present queries name each path.",
    ),
    Operation(
        "GET /problems/{code}", "explainProblem",
        {200: plain("The page."), 404: refusal("There is no such code.")},
        (Parameter("code", "path", str, "The code."),),
        summary="What an error code of the journal means: the `type` of problem documents.",
    ),
    Operation("GET /openapi.json", "openapi", _DOCUMENT, errors=REJECTED),
    Operation("GET /asyncapi.json", "asyncapi", _DOCUMENT, errors=REJECTED),
]  # fmt: skip

OPERATIONS = [*CHANNELS, *FILTERS, *SESSIONS, *SUBSCRIPTIONS, *PIPELINES, *JOURNAL, *OPERATING]
